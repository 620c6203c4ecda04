"""The objectives of DAP as a loss for the trainer of sentence-transformers."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate.state import AcceleratorState
from accelerate.utils.modeling import get_mixed_precision_context_manager
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from encoder_dap import require_encoder
from losses_dap import world_size
from modeling_dap import DAPForPreTraining
from modules_dap import EXPECTED, build_modules, can_run, pooling_mode
from objectives_dap import Sentences
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


class DAPLoss(nn.Module):
    """The loss of `DAPForPreTraining` for `SentenceTransformerTrainer`.

    Use it to train a `SentenceTransformer` with RTL, TLM or BOW in code that already uses that
    library. The encoder is the SentenceTransformer's own. The heads belong to the loss. Loss and
    gradients equal those of `DAPForPreTraining` on the same token ids.

    The columns of the data are source, translation and, optionally, a changed copy of the
    translation as a hard negative. A label is a `language_id`.

    Relations to other losses: with objective `"tr"` it is `MultipleNegativesRankingLoss(scale=20)`,
    except that duplicates of a pair's own translation are not its negatives.

    Differences from `train-dap`:

    - It runs in one process, and the batch is as large as the memory allows. `train-dap` has
      gradient caching and several processes.
    - `max_seq_length` is the SentenceTransformer's. Prompts are those of the trainer's arguments.
    - `max_grad_norm` limits the gradient of the encoder only, not that of the heads.
    - The heads are saved beside the encoder in each checkpoint. To resume a run, or to load the
      best model at its end, add the callback `KeepHeads(loss)`.
      `loss.dap.save_pretrained(folder)` saves encoder and heads without tokenizer and prompts.
    - It does not work inside `MatryoshkaLoss`. Set `tr_matryoshka_dims` in the configuration of
      `dap` instead.

    Args:
        model: Transformer, Pooling, and optionally Dense and Normalize. If the trainer is
            given a `model_init`, it also needs a function that builds this loss.
        dap: objectives and heads, built by `from_encoder` or loaded by `from_pretrained`. Its
            encoder is replaced by that of `model`, which must have the same shape, and so is its
            pooling.
    """

    def __init__(self, model: SentenceTransformer, dap: DAPForPreTraining) -> None:
        super().__init__()
        if "distill" in dap.config.objectives:
            raise ValueError("DAPLoss has no vectors of a teacher for distill: use train-dap")
        kinds = [type(module).__name__ for module in model]
        pooling = model[1].get_config_dict()
        if not can_run(kinds) or not pooling.get("include_prompt", True):
            raise ValueError(
                f"the model consists of {', '.join(kinds)} with {pooling}: give Transformer, "
                "Pooling that includes the prompt and, if you like, Dense and Normalize"
            )
        model[0].unpad_inputs = False  # the loss reads padded text
        encoder = model[0].auto_model
        checkpoint = None
        if encoder.config.model_type == dap.config.model_type:
            checkpoint = encoder
            encoder = encoder.encoder
        require_encoder(encoder.config, "the model")
        dap.dap.encoder = encoder
        dap.config.encoder_config = encoder.config
        dap.config.pooling = pooling_mode(pooling)
        dap.config.modules, dap.dap.after = shared_modules(list(model)[2:])
        dap.config.validate()
        if checkpoint is not None:
            # It is saved as it was trained.
            checkpoint.after = dap.dap.after
            checkpoint.config.modules = dap.config.modules
            checkpoint.config.pooling = dap.config.pooling
        use_packing(encoder)
        self.model = model
        self.dap = dap.to(encoder.device, encoder.dtype)
        self.has_heads = bool(self.head_weights())
        if self.has_heads:
            vars(model)["saves_heads_of"] = self  # not as a part of the model
        self.lacks_heads = False  # the encoder was loaded from a checkpoint, the heads were not
        model.register_load_state_dict_post_hook(self._note_loading)
        self.dap.register_state_dict_pre_hook(self._require_heads)
        model.save_pretrained = partial(self._save_with_heads, model.save_pretrained)

    def _note_loading(self, *_: Any) -> None:
        """Note that the encoder was loaded: a run resumes, or its best model was loaded."""
        self.lacks_heads = self.has_heads

    def _require_heads(self, *_: Any) -> None:
        """Raise `ValueError` if encoder and heads are of different steps."""
        if self.lacks_heads:
            raise ValueError(
                "the trainer has loaded the encoder of a checkpoint, but not the heads of this "
                "loss: begin anew, with trainer.add_callback(KeepHeads(loss))"
            )

    def _save_with_heads(
        self, save: Callable[..., None], path: str, *args: Any, **kwargs: Any
    ) -> None:
        """Save the model, and beside it the heads, unless they are of another step."""
        save(path, *args, **kwargs)
        if self.has_heads and not self.lacks_heads:
            of_encoder = {"encoder": weights_digest(self.dap.dap.encoder)}
            save_file(self.head_weights(), Path(path) / HEADS_FILE, of_encoder)

    def head_weights(self) -> dict[str, Tensor]:
        """Return the weights of the heads by name, without the encoder's."""
        state = self.dap.state_dict()
        return {name: value for name, value in state.items() if not name.startswith("dap.")}

    def load_missing_heads(self, checkpoint: str | None) -> None:
        """Load the heads of a checkpoint's folder, if the encoder was loaded without them."""
        if not self.lacks_heads:
            return
        path = Path(f"{checkpoint}/{HEADS_FILE}")
        if not path.is_file():
            raise ValueError(f"{path} is missing: resume from a checkpoint of the output folder")
        with safe_open(path, "pt") as file:
            saved = file.metadata() or {}
        if saved.get("encoder") != weights_digest(self.dap.dap.encoder):
            raise ValueError(
                f"{path} is of another encoder: resume from a checkpoint of the output folder"
            )
        weights = load_file(path)
        self.lacks_heads = False
        self.dap.load_state_dict(self.dap.state_dict() | weights)

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

    def _check(self, sides: list[Sentences]) -> None:
        """Raise `ValueError` for input that would train something else in silence."""
        self._require_heads()
        if type(self.model.forward).__name__ == "ForwardDecorator":
            raise ValueError(
                "MatryoshkaLoss has no effect on DAPLoss: set tr_matryoshka_dims in the "
                "configuration of the DAPForPreTraining instead"
            )
        if len(sides) not in (2, 3):
            raise ValueError(f"{len(sides)} columns of text: give source, target, hard negative")
        if world_size() > 1:
            # The library's wrapper would not share the gradients of the heads.
            raise ValueError("DAPLoss runs in one process: use train-dap for several")

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings that the model card of the trainer lists."""
        return {"objective": self.dap.config.objective}

    @property
    def citation(self) -> str:
        """Return the paper to cite, which the model card of the trainer lists."""
        return CITATION


def weights_digest(model: nn.Module) -> str:
    """Return a hash of all parameters but those of a pooler, which may be random at each start."""
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        if "pooler." not in name:
            digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def autocast_of_trainer() -> AbstractContextManager:
    """Return the trainer's autocast for the heads, which run outside the model's forward."""
    mixed = AcceleratorState._shared_state and AcceleratorState().mixed_precision != "no"
    return get_mixed_precision_context_manager(True) if mixed else nullcontext()


class KeepHeads(TrainerCallback):
    """Loads the heads of a `DAPLoss` when a run resumes, and when its best model was loaded.

    Example:
        trainer = SentenceTransformerTrainer(model, args, data, loss=loss)
        trainer.add_callback(KeepHeads(loss))
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, loss: DAPLoss) -> None:
        self.loss = loss

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        if self.loss.has_heads and vars(self.loss.model)["saves_heads_of"] is not self.loss:
            raise ValueError(
                "another DAPLoss was made later for this model, and only its heads are saved: "
                "give one DAPLoss for all data"
            )
        self.loss.load_missing_heads(f"{args.output_dir}/checkpoint-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        self.loss.load_missing_heads(state.best_model_checkpoint)


def shared_modules(modules: list[nn.Module]) -> tuple[list[dict[str, Any]], nn.Sequential]:
    """Return the library's modules behind the pooling as ours, with the same weights."""
    configs = []
    for module in modules:
        config = {"type": type(module).__name__} | module.get_config_dict()
        if any(value != EXPECTED.get(name, value) for name, value in config.items()):
            raise ValueError(f"a module with {config} cannot be trained here: leave it out")
        configs.append(config)
    ours = build_modules(configs)
    for module, own in zip(modules, ours):
        if hasattr(module, "linear"):
            own.linear = module.linear
    return configs, ours
