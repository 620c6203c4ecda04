"""What only training needs beside the encoder: the RTL head and the vocabulary prediction head (section 3.2).

Ships with a checkpoint beside modeling_dap.py. Shapes in the comments: `B` pairs, `D` hidden size, `E` width of the
word embeddings, `V` predicted vocabulary, `T` tokens with a label, `C` context and `Q` query tokens, `K` layers.
"""

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

try:
    from .configuration_dap import DAPConfig
    from .encoder_dap import (
        absolute_positions,
        build_encoder,
        last_states,
        layer_stack,
        use_packing,
    )
    from .losses_dap import (
        bag_cross_entropy,
        columns_of,
        sampled_cross_entropy,
        vocabulary_cross_entropy,
        whole,
    )
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
    from encoder_dap import absolute_positions, build_encoder, last_states, layer_stack, use_packing
    from losses_dap import (
        bag_cross_entropy,
        columns_of,
        sampled_cross_entropy,
        vocabulary_cross_entropy,
        whole,
    )

OF_TARGETS = {
    "rtl",
    "bow",
}  # objectives that predict tokens of the target side, and so ids of its vocabulary alone


class _PassThrough(nn.Module):
    """Stands where an encoder has its embeddings, for input that is embedded already."""

    word_embeddings = tok_embeddings = None  # what encoders return from get_input_embeddings

    def forward(
        self, input_ids: None = None, inputs_embeds: Tensor | None = None, *_: Any, **others: Any
    ) -> Tensor:
        return inputs_embeds


class Projection(nn.Sequential):
    """Between the sentence vector and L_TR, in training only."""

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(nn.Linear(config.hidden_size, config.hidden_size), nn.Tanh())


class RTLHead(nn.Module):
    """g of section 3.2: K transformer blocks of the encoder's own class over (source states, [MASK] embeddings).

    With `rtl_reembed` it is the released code's: its own embeddings, which start as the encoder's, take [MASK], and
    then a second time the states and [MASK] embeddings together, with positions, token type and norm.
    """

    def __init__(self, config: DAPConfig) -> None:
        super().__init__()
        self.reembeds = config.rtl_reembed
        self.blocks = self._build_blocks(config)
        names = config.rtl_languages if config.rtl_direction != "source-to-target" else None
        # row 0 is the target language, row i + 1 is rtl_languages[i]
        self.language_embeddings = (
            None if names is None else nn.Embedding(len(names) + 1, config.hidden_size)
        )

    @staticmethod
    def _build_blocks(config: DAPConfig) -> PreTrainedModel:
        own = copy.deepcopy(config.encoder_config)
        own.vocab_size = (
            getattr(own, "pad_token_id", None) or 0
        ) + 1  # word embeddings are about to go
        if own.model_type == "deberta-v2":
            own.conv_kernel_size = 0  # its convolution comes after the first layer only
        blocks = build_encoder(own)
        _, layers = layer_stack(blocks)
        del layers[: len(layers) - config.rtl_layers]
        blocks.config.num_hidden_layers = config.rtl_layers
        if not hasattr(blocks, "embeddings"):
            raise ValueError(
                f"the RTL head needs an encoder with `.embeddings`; {type(blocks).__name__} has none."
            )
        if config.rtl_reembed:
            blocks.set_input_embeddings(None)  # words come embedded
        else:
            blocks.embeddings = _PassThrough()
        use_packing(blocks)
        return blocks

    @torch.no_grad()
    def copy_last_layers(self, encoder: PreTrainedModel) -> None:
        """Start from the encoder's last K layers and whatever else the head has of it (section 4.2)."""
        prefix, layers = layer_stack(encoder)
        dropped = len(layers) - self.blocks.config.num_hidden_layers
        state = {}
        for key, value in encoder.state_dict().items():
            if key.startswith(prefix + "."):
                index, rest = key[len(prefix) + 1 :].split(".", 1)
                key = f"{prefix}.{int(index) - dropped}.{rest}"
            state[key] = value
        wanted = self.blocks.state_dict()
        self.blocks.load_state_dict(
            {key: value for key, value in state.items() if key in wanted}, strict=True
        )

    def embed(self, words: Tensor, encoder: PreTrainedModel) -> Tensor:
        """Embeddings (B, S, D) of words (B, S, E) with the positions 0, 1, 2, ..., whatever the padding."""
        owner = self.blocks if self.reembeds else encoder
        return owner.embeddings(
            input_ids=None,
            inputs_embeds=words,
            **absolute_positions(owner, columns_of(words[..., 0])),
        )

    def forward(
        self,
        context: Tensor,
        context_mask: Tensor,
        queries: Tensor,
        query_mask: Tensor,
        languages: Tensor | None,
    ) -> Tensor:
        """States (B, Q, D) of the queries (B, Q, D), which see the context (B, C, D) and each other.

        Each pair's real tokens stand next to each other, as relative positions would otherwise count the padding.
        `languages` (B, 2) are the embedding rows of the context's and the queries' language.
        """
        if self.language_embeddings is not None:
            vectors = self.language_embeddings(languages)  # (B, 2, D)
            context, queries = context + vectors[:, :1], queries + vectors[:, 1:]
        states = torch.cat([context, queries], 1)  # (B, C+Q, D), eq. g^0
        mask = torch.cat([context_mask, query_mask], 1)  # (B, C+Q)
        # positions where it embeds again: those of both sentences one after another, each with its CLS
        columns = columns_of(query_mask) + context_mask.sum(1, keepdim=True) + 2
        columns = torch.cat([columns_of(context_mask) + 1, columns], 1)  # (B, C+Q)
        inputs = {"inputs_embeds": states, **absolute_positions(self.blocks, columns)}
        start = context.shape[1]
        return last_states(self.blocks, mask, F.pad(query_mask, (start, 0)), **inputs)[:, start:]


class Words(NamedTuple):
    """Word embeddings beside those of the texts."""

    table: Tensor  # (V, E), of all ids
    mask: Tensor | None  # (1, E), of [MASK]
    predicted: Tensor  # of the target vocabulary, (V', E), or `table`


class PredictionTransform(nn.Module):
    """Dense, activation and norm: what stands before the output matrix of a masked-LM head."""

    def __init__(self, config: DAPConfig) -> None:
        super().__init__()
        encoder = config.encoder_config
        width = getattr(encoder, "embedding_size", None) or encoder.hidden_size
        bias = getattr(encoder, "classifier_bias", True)  # ModernBERT's head has none
        eps = getattr(encoder, "layer_norm_eps", None) or getattr(encoder, "norm_eps", 1e-12)
        self.dense = nn.Linear(encoder.hidden_size, width, bias=bias)
        self.norm = nn.LayerNorm(width, eps=eps, bias=getattr(encoder, "norm_bias", True))
        names = (
            "classifier_activation",
            "hidden_act",
            "activation",
        )  # ModernBERT, most, DistilBERT
        activation = next(
            (found for name in names if (found := getattr(encoder, name, None))), "gelu"
        )
        self.activation = ACT2FN[activation] if isinstance(activation, str) else activation

    def transform(self, hidden: Tensor) -> Tensor:
        """States (T, D) as the output matrix takes them, (T, E)."""
        return self.norm(self.activation(self.dense(hidden)))


class PredictionHead(PredictionTransform):
    """Vocabulary prediction head: a `PredictionTransform`, then W of section 3.2.

    W are the encoder's word embeddings. Of targets it can predict fewer ids, V', and with a matrix of its own
    (`rtl_tied=False`).
    """

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        of_targets = bool(config.objectives & OF_TARGETS)
        size = config.target_vocab_size if of_targets else None
        # sorted ids of the target vocabulary (V',), where that is not all
        self.register_buffer("token_ids", None if size is None else torch.arange(size))
        self.is_narrow = (
            size is not None and config.objectives <= {"tr"} | OF_TARGETS
        )  # others predict all ids
        self.bias = nn.Parameter(
            torch.zeros(size if self.is_narrow else config.vocab_size)
        )  # (V') or (V)
        untied = of_targets and not config.rtl_tied
        width = self.dense.out_features
        self.decoder = nn.Linear(width, size or config.vocab_size, bias=False) if untied else None
        self.config = config

    @torch.no_grad()
    def resize(self, table: Tensor) -> None:
        """Predict the ids of new word embeddings (V, E), those that are new with bias 0, unless their own are set.

        Raises:
            ValueError: an id of these would be gone.
        """
        if self.token_ids is not None and (last := int(self.token_ids.max())) >= len(table):
            raise ValueError(
                f"the target vocabulary has id {last}: give {last + 1} token embeddings or more."
            )
        if not self.is_narrow:
            kept = self.bias[: len(table)]
            self.bias = nn.Parameter(F.pad(kept, (0, len(table) - len(kept))))
        if self.decoder is not None and self.token_ids is None:
            kept = self.decoder.weight[: len(table)]
            self.decoder.weight = nn.Parameter(torch.cat([kept, table[len(kept) :]]))

    @torch.no_grad()
    def copy_masked_lm_head(self, model: PreTrainedModel) -> bool:
        """Take over dense, norm and bias of a masked-LM model, whatever it calls them; False where it has no such.

        Nor are they any good where they were trained for a matrix other than the word embeddings.
        """
        head = getattr(model, "prediction_head", None)
        if isinstance(head, PredictionHead):
            dense, norm, bias = head.dense, head.norm, head.bias
        else:
            body = {id(module) for module in model.base_model.modules()}
            output = model.get_output_embeddings()
            own = [
                module
                for module in model.modules()
                if id(module) not in body and module is not output
            ]
            dense = next((module for module in own if isinstance(module, nn.Linear)), None)
            norm = next((module for module in own if isinstance(module, nn.LayerNorm)), None)
            if dense is None or norm is None or dense.weight.shape != self.dense.weight.shape:
                return False
            if output.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr():
                return False
            bias = output.bias
        self.dense.load_state_dict(dense.state_dict())
        self.norm.load_state_dict(norm.state_dict())
        if bias is not None:  # (V,), that of all ids
            self.bias.copy_(bias[self.token_ids] if self.is_narrow else bias)
        return True

    @torch.no_grad()
    def start_bias(self, counts: Tensor) -> None:
        """Set the bias to the log of the ids' shares of a text, given how often each of all ids (N,) occurs there.

        One is added to each count, so that an id that does not occur has a share, too.
        """
        counts = F.pad(counts, (0, self.config.vocab_size - len(counts)))
        seen = (
            counts[self.token_ids] if self.is_narrow else counts
        ).double() + 1  # those of the bias
        self.bias.copy_((seen / seen.sum()).log())

    @torch.no_grad()
    def start_decoder(self, table: Tensor) -> None:
        """Set the targets' own matrix, if there is one, to the word embeddings (V, E) of what it predicts."""
        if self.decoder is not None:
            self.decoder.weight.copy_(table if self.token_ids is None else table[self.token_ids])

    @property
    def samples(self) -> bool:
        """Whether drawn ids stand for RTL's vocabulary: `rtl_sampled_negatives`, in training."""
        return self.config.rtl_sampled_negatives is not None and self.training

    @property
    def looked_up(self) -> Tensor | None:
        """Ids (V',) whose word embeddings predict targets; None where these are all, or its own, or drawn."""
        drawn = self.samples and "bow" not in self.config.objectives
        return self.token_ids if self.decoder is None and not drawn else None

    def knows(self, ids: Tensor) -> Tensor:
        """Whether each id is of the target vocabulary, bool."""
        if self.token_ids is None:
            return torch.ones_like(ids, dtype=torch.bool)
        return self.token_ids[self._rows(ids)] == ids

    def _rows(self, ids: Tensor) -> Tensor:
        """Places of ids in the target vocabulary, if they are in it."""
        return torch.searchsorted(self.token_ids, ids.contiguous()).clamp(
            max=len(self.token_ids) - 1
        )

    def loss_sum(self, hidden: Tensor, labels: Tensor, table: Tensor) -> Tensor:
        """Summed cross entropy of labels (T,) among all ids, given states (T, D) and the word embeddings (V, E)."""
        return vocabulary_cross_entropy(self.transform(hidden), table, self.bias, labels)

    def _target_vocabulary(self, labels: Tensor, words: Words) -> tuple[Tensor, Tensor, Tensor]:
        """Output embeddings (V', E) and bias (V',) of the target vocabulary, and the labels as rows of them.

        The embeddings are those of all ids, (V, E), where drawn ones are to be looked up in them.
        """
        restricted = self.token_ids is not None
        bias = self.bias[self.token_ids] if restricted and not self.is_narrow else self.bias
        weight = words.predicted if self.decoder is None else whole(self.decoder.weight)
        return weight, bias, self._rows(labels) if restricted else labels

    def bag_loss_sum(self, states: Tensor, ids: Tensor, counted: Tensor, words: Words) -> Tensor:
        """Summed cross entropy of the ids (B, S) that count, given what the transform makes of each row, (B, E)."""
        weight, bias, labels = self._target_vocabulary(ids, words)
        return bag_cross_entropy(states, weight, bias, labels, counted)

    def rtl_loss_sum(self, hidden: Tensor, labels: Tensor, words: Words) -> Tensor:
        """The same among the ids of the target vocabulary, of which all labels are."""
        states, restricted = self.transform(hidden), self.token_ids is not None
        weight, bias, labels = self._target_vocabulary(labels, words)
        if not self.samples:
            return vocabulary_cross_entropy(states, weight, bias, labels)
        drawn = torch.randperm(len(bias), device=labels.device)[
            : self.config.rtl_sampled_negatives
        ]  # (N,)
        rows = torch.cat([labels, drawn])  # (T+N,)
        sizes = [len(labels), len(drawn)]
        ids = self.token_ids[rows] if restricted and weight is words.table else rows
        own_weight, weight = F.embedding(ids, weight).split(sizes)
        own_bias, drawn_bias = bias[rows].split(sizes)
        own = labels[:, None] == drawn  # (T, N)
        return sampled_cross_entropy(
            states, own_weight, own_bias, weight, drawn_bias, own, len(bias)
        )
