"""Input of the training benchmarks: models that share random weights, and pairs of random ids.

Legend: `B` pairs, `S` tokens.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig, PreTrainedModel, PreTrainedTokenizerFast

from modeling_dap import DAPConfig, DAPForPreTraining

#: Name of a model's input, such as "source_input_ids" -> tensor (B, S).
Batch = dict[str, Tensor]
#: Takes a batch by name, and returns an output with the `loss`, a scalar.
Model = Callable[..., Any]

OBJECTIVES = {"TR": "tr", "TLM": "tr+tlm", "DAP": "tr+rtl", "BOW": "tr+bow"}
LENGTHS = (6, 32)  # tokens of a sentence, uniform: mean 19
#: Layers, width and vocabulary of the encoders with random weights.
SIZES = {
    "base": (12, 768, 119_547),
    "small": (6, 384, 119_547),
    "xlmr": (12, 768, 250_002),
    "mini": (2, 128, 10_000),
    "tiny": (2, 32, 1000),
}
WORDS = [f"w{number}" for number in range(900)]  # of random text
PAD, CLS, SEP, MASK = 0, 101, 102, 103  # ids of BERT's special tokens, which all sizes use


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options that choose the model and the pairs."""
    parser.add_argument("--size", choices=list(SIZES), default="base", help="of the encoder")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs per step")
    parser.add_argument(
        "--target_vocabulary",
        type=int,
        default=37_000,
        help="token ids that RTL and BOW predict",
    )
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")


def encoder_config(size: str) -> BertConfig:
    """Return the configuration of an encoder of `SIZES`."""
    layers, hidden, words = SIZES[size]
    return BertConfig(
        vocab_size=words,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=max(2, hidden // 64),
        pad_token_id=PAD,
    )


class Workload:
    """Models of several objectives that share one random encoder, and batches for them.

    Args:
        args: the command line, with the options of `add_workload_arguments`.
        objectives: which models to make, keys of `OBJECTIVES`.

    Attributes:
        config: configuration of the encoder.
        target_ids: ids of the target vocabulary, from which sentences are drawn.
        models: objective -> model in training mode.
    """

    def __init__(
        self, args: argparse.Namespace, objectives: Sequence[str] = tuple(OBJECTIVES)
    ) -> None:
        torch.manual_seed(0)
        self.config = encoder_config(args.size)
        spread = torch.linspace(MASK + 1, self.config.vocab_size - 1, args.target_vocabulary - 1)
        self.target_ids = sorted({*spread.long().tolist(), SEP})  # RTL also predicts SEP
        self.models = nn.ModuleDict()
        for name in objectives:
            model = self._model(OBJECTIVES[name])
            if len(self.models):
                model.dap.encoder = self.encoder
            self.models[name] = model

    @property
    def encoder(self) -> PreTrainedModel:
        """The encoder of all models."""
        first = next(iter(self.models.values()))
        return first.dap.encoder

    def _model(self, objective: str) -> DAPForPreTraining:
        """Return a model of an objective. RTL and BOW predict only ids of the target vocabulary."""
        is_restricted = objective in ("tr+rtl", "tr+bow")  # as train_dap.py does by default
        config = DAPConfig(
            self.config,
            objective=objective,
            mask_token_id=MASK,
            target_vocab_size=len(self.target_ids) if is_restricted else None,
        )
        model = DAPForPreTraining(config).train()
        if is_restricted:
            model.set_target_vocabulary(self.target_ids)
        return model

    def batch(self, pairs: int) -> Batch:
        """Return pairs with random lengths and token ids, the same in every call."""
        generator = torch.Generator().manual_seed(0)
        low, high = LENGTHS
        lengths = torch.randint(low, high + 1, (2, pairs), generator=generator).tolist()
        return self.batch_of(*lengths, generator=generator)

    def batch_of(
        self, source: list[int], target: list[int], generator: torch.Generator | None = None
    ) -> Batch:
        """Return pairs with given lengths and random token ids, on the encoder's device.

        A sentence has CLS, random ids of `target_ids` and SEP, then padding up to the longest of
        its side.

        Args:
            source: number of tokens of each source sentence, with CLS and SEP: at least 2.
            target: number of tokens of each target sentence, counted in the same way.
            generator: source of random numbers. None takes torch's own.
        """
        allowed = torch.tensor([i for i in self.target_ids if i != SEP])
        batch = {}
        for side, lengths in (("source", source), ("target", target)):
            ends = torch.tensor(lengths)[:, None]
            columns = torch.arange(max(lengths))
            mask = (columns < ends).long()  # (B, S)
            ids = allowed[torch.randint(len(allowed), mask.shape, generator=generator)]
            ids[:, 0] = CLS
            ids = ids.masked_fill(columns == ends - 1, SEP)
            ids = ids.masked_fill(mask == 0, PAD)
            batch[f"{side}_input_ids"] = ids
            batch[f"{side}_attention_mask"] = mask
        return {key: value.to(self.encoder.device) for key, value in batch.items()}


def token_counts(batch: Batch) -> list[tuple[int, int]]:
    """Return how many tokens the source and the target of each pair have, without padding."""
    sides = (batch[f"{side}_attention_mask"].sum(1).tolist() for side in ("source", "target"))
    return list(zip(*sides, strict=True))


def backward(model: Model, batch: Batch, bf16: bool = False) -> Tensor:
    """Compute a batch's loss, a scalar, and add its gradients to the parameters' `grad`.

    Args:
        bf16: compute the loss under bfloat16 autocast.
    """
    with torch.autocast(batch["source_input_ids"].device.type, torch.bfloat16, enabled=bf16):
        loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def cached_backward(model: DAPForPreTraining, size: int, batch: Batch, bf16: bool = False) -> None:
    """Add the same gradients as `backward`, from chunks of `size` pairs (GradCache)."""
    from dap_transformers.training.grad_cache import CachedBatch

    autocast = torch.autocast(batch["source_input_ids"].device.type, torch.bfloat16, enabled=bf16)
    with autocast:
        cached = CachedBatch(model, model, batch, size)
    for part in cached.parts:
        with autocast:
            loss = cached.run(part)
        loss.backward()


def word_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has an id per word, and puts each sentence between CLS and SEP.

    Words are divided by white space. Unknown words become "[UNK]".
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
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)
