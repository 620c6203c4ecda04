"""Heads that only training needs: the RTL head and the vocabulary prediction head (section 3.2).

The file ships with every checkpoint, beside modeling_dap.py. `look_up` gives the heads their word
embeddings.

Shapes in the comments: `B` pairs, `D` hidden size, `E` width of the word embeddings, `V`
vocabulary, `V'` target vocabulary, `T` tokens with a label, `C` context tokens, `Q` query tokens,
`K` layers, `R` rows of text, `S` tokens of a row.
"""

import copy
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

try:
    from .configuration_dap import DAPConfig
    from .encoder_dap import build_encoder
    from .losses_dap import bag_cross_entropy, vocabulary_cross_entropy
    from .modules_dap import VectorLinear
    from .states_dap import PassThrough, absolute_positions, last_states, layer_stack, use_packing
except ImportError:  # a checkout, where these files are top-level modules
    from configuration_dap import DAPConfig
    from encoder_dap import build_encoder
    from losses_dap import bag_cross_entropy, vocabulary_cross_entropy
    from modules_dap import VectorLinear
    from states_dap import PassThrough, absolute_positions, last_states, layer_stack, use_packing


class Projection(nn.Sequential):
    """Head between the sentence vectors and the TR loss (dense + tanh), used only in training."""

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(VectorLinear(config.vector_size, config.vector_size), nn.Tanh())


class TeacherProjection(VectorLinear):
    """Linear map from sentence vectors to the size of a teacher's vectors, in training only."""

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config.vector_size, config.distill_size)


# --------------------------------------------------------------------------------------- RTL head


class RTLHead(nn.Module):
    """Head g of section 3.2: K transformer blocks over source states and [MASK] embeddings.

    The blocks are of the encoder's own class, and start as its last K layers.

    With `rtl_reembed` it is the head of the released code, which differs from the paper: the head
    has embeddings of its own. They embed [MASK], and then embed states and [MASK] embeddings
    together a second time, with positions, token type and norm.
    """

    def __init__(self, config: DAPConfig) -> None:
        super().__init__()
        self.blocks = self._build_blocks(config)
        self.mask_token = None
        if config.mask_token_id is None:
            width = word_width(config.encoder_config)
            self.mask_token = nn.Parameter(torch.zeros(1, width))  # (1, E)
        self.language_embeddings = None
        if config.rtl_direction != "source-to-target":
            # Row 0 is the target language, row i + 1 is rtl_languages[i].
            rows = len(config.rtl_languages) + 1
            self.language_embeddings = nn.Embedding(rows, config.hidden_size)

    @staticmethod
    def _build_blocks(config: DAPConfig) -> PreTrainedModel:
        """Return K random layers for embedded tokens, with own embeddings if `rtl_reembed`."""
        block_config = copy.deepcopy(config.encoder_config)
        block_config.use_cache = False  # blocks have the numbers of the encoder's last layers
        padding = getattr(block_config, "pad_token_id", None) or 0
        block_config.vocab_size = padding + 1  # the table is removed below
        if block_config.model_type == "deberta-v2":
            block_config.conv_kernel_size = 0  # its convolution follows the first layer only
        blocks = build_encoder(block_config)

        _, layers = layer_stack(blocks)
        del layers[: len(layers) - config.rtl_layers]
        blocks.config.num_hidden_layers = config.rtl_layers
        if getattr(blocks.config, "layer_types", None):
            blocks.config.layer_types = blocks.config.layer_types[-config.rtl_layers :]

        if config.rtl_reembed or not hasattr(blocks, "embeddings"):
            blocks.set_input_embeddings(None)  # keeps positions, token type and norm
        else:
            blocks.embeddings = PassThrough()
        use_packing(blocks)
        return blocks

    @torch.no_grad()
    def copy_last_layers(self, encoder: PreTrainedModel) -> None:
        """Copy the encoder's last K layers into the head's blocks (section 4.2).

        A final norm is also copied and, with `rtl_reembed`, positions, token type and norm.
        """
        prefix, layers = layer_stack(encoder)
        dropped = len(layers) - self.blocks.config.num_hidden_layers
        copied = {}
        for key, value in encoder.state_dict().items():
            if key.startswith(prefix + "."):
                number, rest = key[len(prefix) + 1 :].split(".", 1)
                key = f"{prefix}.{int(number) - dropped}.{rest}"
            copied[key] = value
        weights = {key: copied[key] for key in self.blocks.state_dict()}
        self.blocks.load_state_dict(weights)

    def forward(
        self,
        context: Tensor,
        context_mask: Tensor,
        queries: Tensor,
        query_mask: Tensor,
        languages: Tensor | None,
    ) -> Tensor:
        """Compute eq. g^0: the states (B, Q, D) of queries that see the context and each other.

        Args:
            context: (B, C, D) token states of one side, without CLS.
            context_mask: (B, C), 1 for real tokens.
            queries: (B, Q, D) [MASK] embeddings of the other side, without CLS. Tokens that stay
                visible have their states here instead.
            query_mask: (B, Q), 1 for real tokens.
            languages: (B, 2) the row of `language_embeddings` for each pair's context and for its
                queries. None if the head has no such embeddings.
        """
        if self.language_embeddings is not None:
            vectors = self.language_embeddings(languages)  # (B, 2, D)
            context = context + vectors[:, :1]
            queries = queries + vectors[:, 1:]

        states = torch.cat([context, queries], 1)  # (B, C+Q, D)
        mask = torch.cat([context_mask, query_mask], 1)  # (B, C+Q)
        columns = self._columns(context_mask, query_mask)  # (B, C+Q)
        positions = absolute_positions(self.blocks, columns)  # none without `rtl_reembed`

        # `last_states` moves each pair's real tokens side by side. Otherwise relative positions
        # would count the padding between context and queries.
        first_query = context.shape[1]
        read = F.pad(query_mask, (first_query, 0)).bool()  # (B, C+Q)
        states = last_states(self.blocks, mask, read, inputs_embeds=states, **positions)
        return states[:, first_query:]

    @staticmethod
    def _columns(context_mask: Tensor, query_mask: Tensor) -> Tensor:
        """Return positions (B, C+Q) in one row. They count the CLS that is left out here."""
        context = context_mask.cumsum(1)  # (B, C): 1, 2, ...
        context_length = context_mask.sum(1, keepdim=True) + 1  # (B, 1), with CLS
        queries = query_mask.cumsum(1) + context_length  # (B, Q)
        return torch.cat([context, queries], 1)


# ------------------------------------------------------------------------------- word embeddings


class Words(NamedTuple):
    """Word embeddings that the heads need in a training step (`look_up`).

    Attributes:
        table: (V, E), the embeddings of all ids.
        mask_token: (1, E), the embedding of [MASK]. None if no objective needs it.
        predicted: (V', E), the embeddings of the target vocabulary. It is `table` if there is no
            target vocabulary, if no objective needs it, or if the head has a matrix of its own.
    """

    table: Tensor
    mask_token: Tensor | None
    predicted: Tensor


def look_up(
    embeddings: nn.Module,
    ids: Tensor,
    head: "PredictionHead | None" = None,
    mask_token_id: int | None = None,
) -> tuple[Words, Tensor]:
    """Look up word embeddings for the heads, and word embeddings of sentences.

    One look-up serves both, because each has a dense gradient of the table's size (V, E): 0.8 GB
    for XLM-R base. Only an adapted embedding layer runs a second time, for the sentences.

    Args:
        ids: (R, S) token ids of the sentences.
        head: given if the embeddings of its target vocabulary are needed.
        mask_token_id: given if the embedding of [MASK] is needed.

    Returns:
        The embeddings for the heads, and those of the sentences: (R, S, E).
    """
    table = whole(embeddings.weight)  # (V, E)

    wanted = {"sentences": ids}
    if mask_token_id is not None:
        wanted["mask_token"] = torch.full((1,), mask_token_id, device=table.device)
    if head is not None and head.ids_to_look_up is not None:
        wanted["predicted"] = head.ids_to_look_up
    all_ids = torch.cat([part.flatten() for part in wanted.values()])
    sizes = [part.numel() for part in wanted.values()]
    rows = F.embedding(all_ids, table).split(sizes)
    found = {name: part.unflatten(0, wanted[name].shape) for name, part in zip(wanted, rows)}

    embedded = embeddings(ids) if is_adapted(embeddings) else found["sentences"]
    return Words(table, found.get("mask_token"), found.get("predicted", table)), embedded


def is_adapted(embeddings: nn.Module) -> bool:
    """Tell whether an adapter, a hook or a scale changes what is looked up in the table."""
    is_plain = type(embeddings).forward is nn.Embedding.forward
    return not is_plain or bool(embeddings._forward_hooks)


def whole(weight: Tensor) -> Tensor:
    """Return a parameter as a whole tensor with gradients, gathered from all processes' shards.

    Under FSDP, a parameter outside of its module's forward pass is only a shard.
    """
    if not hasattr(weight, "full_tensor"):
        return weight
    from torch.distributed.tensor import Partial  # not part of every build of torch

    full = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    if full.requires_grad:
        # FSDP takes the mean over processes, `Partial` the sum.
        full.register_hook(lambda gradient: gradient / weight.device_mesh.size())
    return full


# -------------------------------------------------------------------- vocabulary prediction head


class PredictionTransform(nn.Module):
    """Dense, activation and norm: the part of a masked-LM head before its output matrix.

    `size` is the size of its input: that of sentence vectors by default.
    """

    def __init__(self, config: DAPConfig, size: int | None = None) -> None:
        super().__init__()
        encoder = config.encoder_config
        size = size or config.vector_size
        width = word_width(encoder)
        eps = getattr(encoder, "layer_norm_eps", None) or getattr(encoder, "norm_eps", 1e-12)
        has_dense_bias = getattr(encoder, "classifier_bias", True)  # ModernBERT's has none
        has_norm_bias = getattr(encoder, "norm_bias", True)
        self.dense = VectorLinear(size, width, bias=has_dense_bias)
        self.norm = nn.LayerNorm(width, eps=eps, bias=has_norm_bias)
        self.activation = _activation_of(encoder)

    def transform(self, hidden: Tensor) -> Tensor:
        """Turn states (T, D) into the input (T, E) of the output matrix."""
        return self.norm(self.activation(self.dense(hidden)))


def word_width(encoder_config: PreTrainedConfig) -> int:
    """Return E, the width of an encoder's word embeddings. Its field has several names."""
    fields = ("embedding_size", "input_embedding_size", "hidden_size")  # the second is RemBERT's
    return next(filter(None, (getattr(encoder_config, field, None) for field in fields)))


def _activation_of(encoder_config: PreTrainedConfig) -> nn.Module:
    """Return the activation of an encoder's masked-LM head. Its field has several names."""
    fields = ("classifier_activation", "hidden_act", "activation")  # the first is ModernBERT's
    given = [getattr(encoder_config, field, None) for field in fields]
    activation = next(filter(None, given), "gelu")
    return ACT2FN[activation] if isinstance(activation, str) else activation


class PredictionHead(PredictionTransform):
    """Vocabulary prediction head: a `PredictionTransform`, then the output matrix W of section 3.2.

    It never returns logits: `loss_sum`, `target_loss_sum` and `bag_loss_sum` return summed cross
    entropies. W is usually the encoder's word embeddings (V, E). Two options change that:

    - A *target vocabulary* (`target_vocab_size`): RTL and BOW predict only V' ids. `token_ids`
      holds these ids in ascending order.
    - `rtl_tied=False`: RTL and BOW predict with a matrix of their own, `decoder`.

    Args:
        predicts: what the objectives that share the head predict (`Objective.predicts`).
        reads_vectors: whether they predict from sentence vectors only, and from no token states.
    """

    def __init__(
        self,
        config: DAPConfig,
        predicts: Collection[str | None] = ("tokens",),
        reads_vectors: bool = False,
    ) -> None:
        super().__init__(config, config.vector_size if reads_vectors else config.hidden_size)
        self.config = config
        predicts_targets = "targets" in predicts
        size = config.target_vocab_size if predicts_targets else None
        self.register_buffer("token_ids", None if size is None else torch.arange(size))

        # The bias has V' entries if no other objective predicts all V ids.
        self.is_narrow = size is not None and "tokens" not in predicts
        self.bias = nn.Parameter(torch.zeros(size if self.is_narrow else config.vocab_size))

        self.decoder = None
        if predicts_targets and not config.rtl_tied:
            width = self.dense.out_features
            self.decoder = nn.Linear(width, size or config.vocab_size, bias=False)

    # ---- losses

    def loss_sum(self, hidden: Tensor, labels: Tensor, table: Tensor) -> Tensor:
        """Return the summed cross entropy of labels (T,) by states (T, D) among V ids, in nats."""
        return vocabulary_cross_entropy(self.transform(hidden), table, self.bias, labels)

    def target_loss_sum(self, hidden: Tensor, labels: Tensor, words: Words) -> Tensor:
        """Return the same sum as `loss_sum`, but among the target vocabulary, if there is one."""
        weight, bias = self._target_output(words)
        return vocabulary_cross_entropy(self.transform(hidden), weight, bias, self._rows(labels))

    def bag_loss_sum(self, states: Tensor, ids: Tensor, counted: Tensor, words: Words) -> Tensor:
        """Return the summed cross entropy, in nats, of several ids (B, S) by each state (B, E).

        The states are after `PredictionTransform.transform`. `counted` (B, S) is True for ids that
        count, all of the target vocabulary.
        """
        weight, bias = self._target_output(words)
        return bag_cross_entropy(states, weight, bias, self._rows(ids), counted)

    # ---- the target vocabulary

    @property
    def ids_to_look_up(self) -> Tensor | None:
        """Return the ids (V',) whose word embeddings RTL and BOW need. None: all or none."""
        return self.token_ids if self.decoder is None else None

    def knows(self, ids: Tensor) -> Tensor:
        """Return True for each id that is in the target vocabulary, which must exist."""
        return self.token_ids[self._rows(ids)] == ids

    def _rows(self, ids: Tensor) -> Tensor:
        """Return each id's row in the target vocabulary, and any row for an unknown id."""
        if self.token_ids is None:
            return ids
        rows = torch.searchsorted(self.token_ids, ids.contiguous())
        return rows.clamp(max=len(self.token_ids) - 1)

    def _target_output(self, words: Words) -> tuple[Tensor, Tensor]:
        """Return output matrix (V', E) and bias (V',) of RTL and BOW.

        V' is V if there is no target vocabulary.
        """
        weight = words.predicted if self.decoder is None else whole(self.decoder.weight)
        if self.token_ids is None or self.is_narrow:
            return weight, self.bias
        return weight, self.bias[self.token_ids]

    # ---- initial weights

    @torch.no_grad()
    def copy_masked_lm_head(self, model: PreTrainedModel) -> bool:
        """Copy dense layer, norm and bias of a masked-LM model's head. Tell if it was possible.

        False if the model has no layers of these shapes, or if its output matrix is not tied to its
        word embeddings, because the layers were then trained for another matrix.
        """
        head = getattr(model, "prediction_head", None)
        is_ours = isinstance(head, PredictionHead)
        dense, norm = (head.dense, head.norm) if is_ours else _layers_before_output(model)
        if dense is None or norm is None or dense.weight.shape != self.dense.weight.shape:
            return False
        output = head if is_ours else model.get_output_embeddings()
        table = model.get_input_embeddings().weight
        if not is_ours and output.weight.data_ptr() != table.data_ptr():
            return False
        bias = output.bias

        self.dense.load_state_dict(dense.state_dict())
        self.norm.load_state_dict(norm.state_dict())
        if bias is not None:  # (V,)
            self.bias.copy_(bias[self.token_ids] if self.is_narrow else bias)
        return True

    @torch.no_grad()
    def start_bias(self, counts: Tensor) -> None:
        """Set the bias to the log of each id's share of the tokens.

        `counts` (N,) says how often the ids 0 to N - 1 occur. Other ids do not occur. 1 is added to
        each count.
        """
        counts = F.pad(counts, (0, self.config.vocab_size - len(counts)))
        if self.is_narrow:
            counts = counts[self.token_ids.cpu()]
        smoothed = counts.double() + 1
        self.bias.copy_((smoothed / smoothed.sum()).log())

    @torch.no_grad()
    def start_decoder(self, table: Tensor) -> None:
        """Start the head's own output matrix, if it has one, as the word embeddings (V, E)."""
        if self.decoder is not None:
            self.decoder.weight.copy_(table if self.token_ids is None else table[self.token_ids])

    @torch.no_grad()
    def resize(self, table: Tensor) -> None:
        """Resize the bias and the head's own matrix to word embeddings (V, E).

        The bias of new ids is 0, and their rows of the matrix are their word embeddings.

        Raises:
            ValueError: if an id of the target vocabulary would be lost.
        """
        if self.token_ids is not None:
            last = int(self.token_ids.max())
            if last >= len(table):
                raise ValueError(
                    f"the target vocabulary has id {last}: give {last + 1} or more embeddings."
                )
        if not self.is_narrow:
            kept = self.bias[: len(table)]
            self.bias = nn.Parameter(F.pad(kept, (0, len(table) - len(kept))))
        if self.decoder is not None and self.token_ids is None:
            kept = self.decoder.weight[: len(table)]
            self.decoder.weight = nn.Parameter(torch.cat([kept, table[len(kept) :]]))


def _layers_before_output(model: PreTrainedModel) -> tuple[nn.Linear | None, nn.LayerNorm | None]:
    """Return the dense layer and the norm of a masked-LM model's head, None for a missing one."""
    body = {id(module) for module in model.base_model.modules()}
    output = model.get_output_embeddings()
    dense = norm = None
    for module in model.modules():
        if id(module) in body or module is output:
            continue
        if dense is None and isinstance(module, nn.Linear):
            dense = module
        if norm is None and isinstance(module, nn.LayerNorm):
            norm = module
    return dense, norm
