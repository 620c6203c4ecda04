"""The objectives of DAP as a loss for the trainer of sentence-transformers."""

# ruff: noqa: E402 (the version is checked before the library is imported)

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils.modeling import get_mixed_precision_context_manager
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import all_reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.versions import require_version

# Before 6.2, its cached losses would give wrong gradients without any error.
require_version("sentence-transformers>=6.2", "pip install 'sentence-transformers>=6.2'")

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import CachedLossMixin
from sentence_transformers.base.losses.gradcache import RandContext

from losses_dap import sum_over_processes, world_size
from modeling_dap import DAPForPreTraining
from modules_dap import build_modules, pooling_mode
from objectives_dap import Encoded, Pairs, Sentences, draw_noise, needs_of, pad_to
from states_dap import use_packing

#: Name of the file of the heads in a checkpoint.
HEADS_FILE = "dap_heads.safetensors"
CITATION = """
@inproceedings{li-etal-2023-dual,
    title = "Dual-Alignment Pre-training for Cross-lingual Sentence Embedding",
    author = "Li, Ziheng and Huang, Shaohan and Zhang, Zihan and Deng, Zhi-Hong and Lou, Qiang and
      Huang, Haizhen and Jiao, Jian and Wei, Furu and Deng, Weiwei and Zhang, Qi",
    booktitle = "Proceedings of the 61st Annual Meeting of the Association for Computational
      Linguistics (Volume 1: Long Papers)",
    year = "2023",
    url = "https://aclanthology.org/2023.acl-long.191",
}
"""


class DAPLoss(CachedLossMixin, nn.Module):
    """The loss of `DAPForPreTraining` for `SentenceTransformerTrainer`.

    Use it to train a `SentenceTransformer` with RTL, TLM or BOW in code that already uses that
    library. The encoder is the SentenceTransformer's own. The heads belong to the loss. Loss and
    gradients equal those of `DAPForPreTraining` on the same token ids.

    The columns of the data are source, translation and, optionally, a changed copy of the
    translation as a hard negative. A label is a `language_id`.

    Relations to other losses: with objective `"tr"` it is `MultipleNegativesRankingLoss(scale=20)`,
    except that duplicates of a pair's own translation are not its negatives. With `mini_batch_size`
    it is `CachedMultipleNegativesRankingLoss(scale=20, gather_across_devices=True)` with the same
    exception.

    Gradient caching: with `mini_batch_size`, or with several processes, sentences are encoded
    twice. Between the two passes only the token states are kept. TLM and MLM encode their masked
    text by themselves, so a smaller `mini_batch_size` does not save their memory.

    Differences from `train-dap`:

    - `max_seq_length` is the SentenceTransformer's. Prompts are those of the trainer's arguments.
    - `max_grad_norm` limits the gradient of the encoder only, not that of the heads.
    - The heads are saved beside the encoder in each checkpoint. To resume a run, add the callback
      `KeepHeads(loss)`. `loss.dap.save_pretrained(folder)` saves as `train-dap` does.
    - It does not work inside `MatryoshkaLoss`, which would shorten token states. Set
      `tr_matryoshka_dims` in the configuration of `dap` instead.

    Args:
        model: Transformer, Pooling, and optionally Dense and Normalize. If the trainer is
            given a `model_init`, it also needs a function that builds this loss.
        dap: objectives and heads, built by `from_encoder` or loaded by `from_pretrained`. Its
            encoder is replaced by that of `model`, which must have the same shape, and so is its
            pooling.
        mini_batch_size: pairs that are encoded at a time. None encodes the whole batch at once.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        dap: DAPForPreTraining,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        kinds = [type(module).__name__ for module in model]
        pooling = model[1].get_config_dict()
        is_known = kinds[:2] == ["Transformer", "Pooling"] and {*kinds[2:]} <= {
            "Dense",
            "Normalize",
        }
        if not is_known or not pooling.get("include_prompt", True):
            raise ValueError(
                f"the model consists of {', '.join(kinds)} with {pooling}: give Transformer, "
                "Pooling that includes the prompt and, if you like, Dense and Normalize"
            )
        model[0].unpad_inputs = False  # the loss reads padded text
        encoder = model[0].auto_model
        dap.dap.encoder = encoder
        dap.config.encoder_config = encoder.config
        dap.config.pooling = pooling_mode(pooling)
        dap.config.modules, dap.dap.after = shared_modules(list(model)[2:])
        dap.config.validate()
        use_packing(encoder)
        self.model = model
        self.mini_batch_size = mini_batch_size
        self.dap = dap.to(encoder.device, encoder.dtype)
        #: What `calculate_loss` computes from and leaves behind, within one call of `forward`.
        self._pairs: Pairs | None = None
        self._losses: dict[str, Tensor] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.has_trained = False
        self.lacks_heads = False  # the encoder was loaded from a checkpoint, the heads were not
        model.register_load_state_dict_post_hook(self._note_loading)
        model.save_pretrained = partial(self._save_with_heads, model.save_pretrained)

    def _note_loading(self, *_: Any) -> None:
        """Note that the encoder was loaded, which before the first step means a resumed run."""
        self.lacks_heads = self.has_heads and not self.has_trained

    def _save_with_heads(
        self, save: Callable[..., None], path: str, *args: Any, **kwargs: Any
    ) -> None:
        """Save the model, and beside it the heads."""
        save(path, *args, **kwargs)
        if self.has_heads:
            save_file(self.head_weights(), Path(path) / HEADS_FILE)

    @property
    def has_heads(self) -> bool:
        """Tell whether the objectives have heads, which need to be trained and saved."""
        return bool(self.head_weights())

    def head_weights(self) -> dict[str, Tensor]:
        """Return the weights of the heads by name, without the encoder's."""
        state = self.dap.state_dict()
        return {name: value for name, value in state.items() if not name.startswith("dap.")}

    def load_heads(self, weights: dict[str, Tensor]) -> None:
        """Load weights of the heads by name, as `head_weights` returned them."""
        state = self.dap.state_dict()
        encoder = {name: value for name, value in state.items() if name.startswith("dap.")}
        self.dap.load_state_dict(encoder | weights)
        self.lacks_heads = False

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None
    ) -> dict[str, Tensor]:
        """Return each objective's loss times its weight, by name such as "tr_loss".

        The trainer adds them up and logs them. The columns are source, target and perhaps a hard
        negative, each `input_ids` and `attention_mask` (B, S). The labels are language ids (B,).
        """
        sides = []
        for text in sentence_features:
            sides.append(Sentences(text["input_ids"], text["attention_mask"]).padded_right())
        self._check(sides)
        self.dap.train(self.dap.dap.encoder.training)  # the trainer does not know the heads

        if self.mini_batch_size is not None or world_size() > 1:
            return self._cached_losses(sides, labels)

        tokens = {}
        for name, side in zip(("source", "target", "negative"), sides):
            tokens[f"{name}_input_ids"] = side.ids
            tokens[f"{name}_attention_mask"] = side.mask
        with autocast_of_trainer():
            out = self.dap(**tokens, language_ids=labels)

        losses = {}
        for objective in self.dap.objectives:
            name = f"{objective.name}_loss"
            losses[name] = objective.weight * getattr(out, name)
        return losses

    def _cached_losses(self, sides: list[Sentences], labels: Tensor | None) -> dict[str, Tensor]:
        """Return the result of `forward`. All gradients flow through the first loss, in a hook."""
        if "noise" in needs_of(self.dap.objectives):
            sides = [side._replace(noise=draw_noise(side.ids)) for side in sides]
        self._pairs = Pairs(*sides, language_ids=labels)
        texts = [{"input_ids": side.ids, "attention_mask": side.mask} for side in sides]

        # `_minibatch_ranges` of the library reads this size.
        size = self.mini_batch_size
        self.mini_batch_size = size or len(sides[0].ids)
        try:
            total = self.forward_cached(texts, labels)
        finally:
            self.mini_batch_size = size
        if total.requires_grad:
            total.register_hook(partial(add_gradients, self._gradients))
        losses, self._pairs, self._losses, self._gradients = self._losses, None, {}, []

        first, *others = losses
        losses[first] = total - sum(losses[name] for name in others)
        return losses

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Tensor],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """Return the token states of some sentences (b, S, D), and the state of random numbers."""
        rows = {}
        longest = max(1, int(sentence_feature["attention_mask"][begin:end].sum(1).max()))
        for name in ("input_ids", "attention_mask"):
            rows[name] = sentence_feature[name][begin:end, :longest]
        with random_state or nullcontext(), torch.set_grad_enabled(with_grad):
            state = RandContext(*rows.values()) if copy_random_state else None
            states = self.model(rows)["token_embeddings"]
        return states, state

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        labels: Tensor | None = None,
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """Compute the weighted sum of all losses from the token states of the whole batch.

        It is detached if there were gradients to compute. `forward` has put the labels into the
        pairs.
        """
        pairs = self._pairs
        with autocast_of_trainer():
            encoded = self._encoded(pairs, reps)
            losses = {}
            for objective in self.dap.objectives:
                loss, _ = objective.loss(pairs, encoded, self.dap)
                losses[f"{objective.name}_loss"] = objective.weight * loss
        total = sum(losses.values())
        self._losses = {name: loss.detach() for name, loss in losses.items()}
        if not with_backward:
            return total

        leaves = [states for column in reps for states in column]
        weights = [each for each in self.dap.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(total, [*leaves, *weights], allow_unused=True)
        for states, gradient in zip(leaves, gradients):
            states.grad = torch.zeros_like(states) if gradient is None else gradient
        for weight, gradient in zip(weights, gradients[len(leaves) :]):
            if gradient is not None:
                self._gradients.append((weight, gradient))
        return total.detach()

    def _encoded(self, pairs: Pairs, reps: list[list[Tensor]]) -> Encoded:
        """Put token states into the form that the objectives read."""
        all_states = []
        vectors = []
        for side, parts in zip((pairs.source, pairs.target, pairs.negatives), reps):
            length = side.ids.shape[1]
            states = torch.cat([pad_to(part, length) for part in parts])  # (B, S, D)
            mask = side.mask.clone()
            mask[:, 0] = 1  # a row without tokens, as in `DAPForPreTraining.encode`
            states = states.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
            all_states.append(states)
            vectors.append(self.dap.dap.pool(states, mask))  # (B, D')
        words, _ = self.dap.embed_words(pairs.source.ids[:0], needs_of(self.dap.objectives))
        return Encoded(
            words=words,
            source_states=all_states[0],
            target_states=all_states[1],
            source_embeds=vectors[0],
            target_embeds=vectors[1],
            negative_embeds=vectors[2] if len(vectors) > 2 else None,
        )

    def _check(self, sides: list[Sentences]) -> None:
        """Raise `ValueError` for input that would train something else in silence."""
        if self.lacks_heads:
            raise ValueError(
                "the trainer has loaded the encoder of a checkpoint, but not the heads of this "
                "loss: begin anew, with trainer.add_callback(KeepHeads(loss)) to be able to resume"
            )
        self.has_trained = self.has_trained or self.dap.dap.encoder.training
        if "calculate_loss" in vars(self):
            raise ValueError(
                "DAPLoss does not work inside MatryoshkaLoss, which would shorten token states: "
                "set tr_matryoshka_dims in the configuration of the DAPForPreTraining instead"
            )
        if len(sides) not in (2, 3):
            raise ValueError(f"{len(sides)} columns of text: give source, target, hard negative")
        count = len(sides[0].ids)
        if world_size() > 1:
            counts = sum_over_processes(torch.tensor([count, count**2], device=self.dap.device))
            if counts[1] * world_size() != counts[0] ** 2:
                raise ValueError("batches of different sizes: set dataloader_drop_last=True")

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings that the model card of the trainer lists."""
        return {
            "objective": self.dap.config.objective,
            "mini_batch_size": self.mini_batch_size,
        }

    @property
    def citation(self) -> str:
        """Return the paper to cite, which the model card of the trainer lists."""
        return CITATION


def autocast_of_trainer() -> AbstractContextManager:
    """Return the trainer's autocast for the heads, which run outside the model's forward."""
    mixed = AcceleratorState._shared_state and AcceleratorState().mixed_precision != "no"
    return get_mixed_precision_context_manager(True) if mixed else nullcontext()


def add_gradients(gradients: list[tuple[nn.Parameter, Tensor]], factor: Tensor) -> None:
    """Add gradients, times that of the outer loss by this one (`factor`), to the weights' `grad`.

    With several processes, each adds the mean over all of them, as the library's wrapper does with
    the gradients of the encoder.
    """
    for weight, gradient in gradients:
        scaled = gradient * factor
        if world_size() > 1:
            all_reduce(scaled)
            scaled /= world_size()
        weight.grad = scaled if weight.grad is None else weight.grad + scaled


class KeepHeads(TrainerCallback):
    """Loads the heads of a `DAPLoss` from the checkpoint when a run resumes.

    Example:
        trainer = SentenceTransformerTrainer(model, args, data, loss=loss)
        trainer.add_callback(KeepHeads(loss))
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, loss: DAPLoss) -> None:
        self.loss = loss

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.loss.lacks_heads:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / HEADS_FILE
            self.loss.load_heads(load_file(path))


def shared_modules(modules: list[nn.Module]) -> tuple[list[dict[str, Any]], nn.Sequential]:
    """Return the library's modules behind the pooling as ours, with the same weights."""
    configs = []
    for module in modules:
        configs.append({"type": type(module).__name__} | module.get_config_dict())
    ours = build_modules(configs)
    for module, own in zip(modules, ours):
        if hasattr(module, "linear"):
            own.linear = module.linear
    return configs, ours
