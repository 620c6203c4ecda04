"""Input of the training benchmarks: models that share random weights, and pairs of random ids.

Legend: `B` pairs, `S` tokens.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig, PreTrainedConfig, PreTrainedTokenizerFast, XLMRobertaConfig

from modeling_dap import DAPConfig, DAPForPreTraining

Batch = dict[str, Tensor]
Loss = Callable[[Batch], Tensor]  # a scalar

OBJECTIVES = {"TR": "tr", "TLM": "tr+tlm", "DAP": "tr+rtl", "BOW": "tr+bow"}
LENGTHS = (6, 32)  # tokens of a sentence, uniform: mean 19
CLS, SEP, MASK, PAD = "cls_token_id", "sep_token_id", "mask_token_id", "pad_token_id"
BERT_IDS = {PAD: 0, CLS: 101, SEP: 102, MASK: 103}
WORDS = [f"w{number}" for number in range(900)]
#: Layers, width and vocabulary of the encoders with random weights.
SIZES = {
    "base": (12, 768, 119_547),
    "small": (6, 384, 119_547),
    "xlmr": (12, 768, 250_002),
    "mini": (2, 128, 10_000),
    "tiny": (2, 32, 1000),
}
XLMR_IDS = {CLS: 0, PAD: 1, SEP: 2, MASK: 250_001}


def add_workload_arguments(parser: argparse.ArgumentParser, batch_size: int = 32) -> None:
    """Add the command-line options that choose the model and the pairs.

    Args:
        parser: the benchmark's parser, changed in place.
        batch_size: default of `--batch_size`.
    """
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="base",
        help="size of the encoder, which has random weights",
    )
    parser.add_argument("--batch_size", type=int, default=batch_size, help="pairs per step")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs=2,
        default=LENGTHS,
        help="tokens of the shortest and the longest sentence",
    )
    parser.add_argument(
        "--target_vocabulary",
        type=int,
        default=37_000,
        help="token ids that RTL and BOW predict",
    )
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")


def encoder_config(size: str) -> tuple[PreTrainedConfig, dict[str, int]]:
    """Return the configuration of an encoder, and the ids of its special tokens by name.

    Args:
        size: key of `SIZES`. "xlmr" is XLM-R base, and all others are a BERT.
    """
    layers, hidden, words = SIZES[size]
    shape = {
        "vocab_size": words,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": max(2, hidden // 64),
    }
    if size != "xlmr":
        return BertConfig(**shape), BERT_IDS
    config = XLMRobertaConfig(
        **shape, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
    )
    return config, XLMR_IDS


class Workload:
    """Models of several objectives that share one encoder's random weights, and batches for them.

    Everything is on the CPU until `to` is called, because FLOPs are counted there.

    Args:
        args: the command line, with the options of `add_workload_arguments`.
        objectives: which models to make, keys of `OBJECTIVES`.

    Attributes:
        lengths: fewest and most tokens of a sentence.
        device: where models and new batches are.
        config: configuration of the encoder.
        special: name of each special token's id, such as "cls_token_id" -> id.
        encoder: the encoder that all models share.
        target_ids: ids of the target vocabulary, from which sentences are drawn.
        models: objective -> model in training mode.
    """

    def __init__(
        self, args: argparse.Namespace, objectives: Sequence[str] = tuple(OBJECTIVES)
    ) -> None:
        self.lengths = args.lengths
        self.device = "cpu"
        self.config, self.special = encoder_config(args.size)
        first = DAPForPreTraining(DAPConfig(self.config, objective="tr"))
        self.encoder = first.dap.encoder
        lowest = max(BERT_IDS.values()) + 1
        highest = self.config.vocab_size - 2
        spread = torch.linspace(lowest, highest, args.target_vocabulary - 1)
        separator = self.special[SEP]  # which RTL also predicts
        self.target_ids = sorted({*spread.long().tolist(), separator})
        self.models = {name: self._model(OBJECTIVES[name]) for name in objectives}

    def _model(self, objective: str) -> DAPForPreTraining:
        """Return a model of an objective, such as "tr+rtl", that uses the shared encoder's weights.

        RTL and BOW predict only the ids of the target vocabulary.
        """
        is_restricted = objective in ("tr+rtl", "tr+bow")  # as train_dap.py does by default
        config = DAPConfig(
            self.config,
            objective=objective,
            mask_token_id=self.special[MASK],
            target_vocab_size=len(self.target_ids) if is_restricted else None,
        )
        model = DAPForPreTraining(config).train()
        if is_restricted:
            model.set_target_vocabulary(self.target_ids)
        share_weights(model.dap.encoder, self.encoder)
        return model

    def to(self, device: str) -> "Workload":
        """Move the models to a device ("cpu" or "cuda"), and return this workload.

        Batches that are made later are on this device as well.
        """
        self.device = device
        self.encoder.to(device)
        for model in self.models.values():
            share_weights(model.to(device).dap.encoder, self.encoder)
        return self

    def losses(self) -> dict[str, Loss]:
        """Return name of each objective, such as "DAP" -> function that returns a batch's loss."""
        found = {}
        for name, model in self.models.items():
            found[name] = lambda batch, model=model: model(**batch).loss
        return found

    def batch(self, pairs: int, seed: int = 0) -> Batch:
        """Return a batch of pairs with random lengths and token ids.

        Args:
            pairs: number of pairs, B.
            seed: seed of the random numbers.

        Returns:
            Name of a model's input, such as "source_input_ids" -> tensor (B, S).
        """
        generator = torch.Generator().manual_seed(seed)
        low, high = self.lengths
        lengths = torch.randint(low, high + 1, (2, pairs), generator=generator).tolist()
        return self.batch_of(*lengths, generator=generator)

    def batch_of(
        self, source: list[int], target: list[int], generator: torch.Generator | None = None
    ) -> Batch:
        """Return a batch of pairs with given lengths and random token ids.

        A sentence has CLS, random ids and SEP, then padding up to the longest of its side. The
        random ids of both sides are from `target_ids`.

        Args:
            source: number of tokens of each source sentence, with CLS and SEP: at least 2.
            target: number of tokens of each target sentence, counted in the same way.
            generator: source of random numbers. None takes torch's own.

        Returns:
            Name of an input of the model, such as "source_input_ids" -> tensor (B, S).
        """
        allowed = torch.tensor([i for i in self.target_ids if i != self.special[SEP]])
        batch = {}
        for side, lengths in (("source", source), ("target", target)):
            ends = torch.tensor(lengths)[:, None]
            columns = torch.arange(max(lengths))
            mask = (columns < ends).long()  # (B, S)
            ids = allowed[torch.randint(len(allowed), mask.shape, generator=generator)]
            ids[:, 0] = self.special[CLS]
            ids = ids.masked_fill(columns == ends - 1, self.special[SEP])
            ids = ids.masked_fill(mask == 0, self.special[PAD])
            batch[f"{side}_input_ids"] = ids
            batch[f"{side}_attention_mask"] = mask
        return {key: value.to(self.device) for key, value in batch.items()}


def share_weights(module: nn.Module, other: nn.Module) -> None:
    """Make a module use the parameters of another module, so that both train the same weights.

    Args:
        module: the module whose parameters are replaced.
        other: a module with parameters of the same names.
    """
    for name, parameter in other.named_parameters():
        place, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(place), leaf, parameter)


def token_counts(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """Return how many tokens the source and the target of each pair have, without padding."""
    source = batch["source_attention_mask"].sum(1).tolist()
    target = batch["target_attention_mask"].sum(1).tolist()
    return list(zip(source, target, strict=True))


def backward(loss: Loss, batch: Batch, bf16: bool = False) -> Tensor:
    """Compute the loss of a batch and its gradients, which are added to the parameters' `grad`.

    Args:
        loss: function that computes the loss.
        batch: the pairs.
        bf16: compute the loss under bfloat16 autocast.

    Returns:
        The loss, a scalar without gradients.
    """
    with torch.autocast(batch["source_input_ids"].device.type, torch.bfloat16, enabled=bf16):
        found = loss(batch)
    found.backward()
    return found.detach()


def cached_backward(model: DAPForPreTraining, size: int, batch: Batch, bf16: bool = False) -> None:
    """Compute the same gradients as `backward`, in chunks that need less memory (GradCache).

    Args:
        model: the model. The gradients are added to its parameters' `grad`.
        size: pairs of a chunk.
        batch: the pairs.
        bf16: compute the loss under bfloat16 autocast.
    """
    from dap_transformers.training.grad_cache import CachedBatch

    autocast = torch.autocast(batch["source_input_ids"].device.type, torch.bfloat16, enabled=bf16)
    with autocast:
        cached = CachedBatch(model, model, batch, size)
    for part in cached.parts:
        with autocast:
            loss = cached.run(part)
        loss.backward()


def word_tokenizer(words: Sequence[str] = WORDS, **options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has an id per word, and puts each sentence between CLS and SEP.

    Words are divided by white space. Unknown words become "[UNK]".

    Args:
        words: the words that it knows.
        options: further arguments of `PreTrainedTokenizerFast`.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    names = {f"{word[1:-1].lower()}_token": word for word in special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **options)
