"""The objectives of DAP as a loss for the trainer of sentence-transformers."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils.modeling import get_mixed_precision_context_manager
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dap.encoding import pooling_mode
from dap.errors import UserError, refusals
from losses_dap import world_size
from modeling_dap import DAPForPreTraining
from states_dap import use_packing

#: Name of the file of the heads in a checkpoint.
HEADS_FILE = "dap_heads.safetensors"


class DAPLoss(nn.Module):
    """The loss of `DAPForPreTraining` for `SentenceTransformerTrainer`.

    Use it to train a `SentenceTransformer` with RTL, TLM or BOW in code that already uses that
    library. The encoder is the SentenceTransformer's own. The heads belong to the loss. Loss and
    gradients equal those of `DAPForPreTraining` on the same token ids.

    The columns of the data are source, translation and, optionally, a changed copy of the
    translation as a hard negative. A label is a `language_id`.

    Relations to other losses: with objective `"tr"` it is
    `MultipleNegativesRankingLoss(scale=20)`, except that duplicates of a pair's own translation
    are not its negatives.

    Differences from `train_dap.py`:

    - `max_seq_length` is the SentenceTransformer's. Prompts are those of the trainer's arguments.
    - A Normalize module changes nothing with cosine, and is left out with `tr_similarity="dot"`.
    - `max_grad_norm` limits the gradient of the encoder only, not that of the heads.
    - Checkpoints of the library hold no heads, and a run cannot be resumed without them. The
      callback `KeepHeads(loss)` saves them beside each checkpoint and loads them again.
      `loss.dap.save_pretrained(folder)` saves encoder and heads as `train_dap.py` does.
    - It runs in one process, without GradCache, and not inside other losses such as
      `MatryoshkaLoss`.

    Args:
        model: Transformer, Pooling by cls or mean, and optionally Normalize. If the trainer is
            given a `model_init`, it also needs a function that builds this loss.
        dap: objectives and heads, built by `from_encoder` or loaded by `from_pretrained`. Its
            encoder is replaced by that of `model`, which must have the same shape, and so is its
            pooling.

    Raises:
        ValueError: other modules, another pooling, or an encoder of another shape.
    """

    def __init__(self, model: SentenceTransformer, dap: DAPForPreTraining) -> None:
        super().__init__()
        kinds = [type(module).__name__ for module in model]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise UserError(
                f"the model consists of {', '.join(kinds)}: give Transformer, Pooling and, if you "
                "like, Normalize."
            )
        encoder = model[0].auto_model
        shape = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
        theirs = [getattr(encoder.config, name) for name in shape]
        ours = [getattr(dap.dap.encoder.config, name) for name in shape]
        if theirs != ours:
            raise UserError(
                f"the heads are for an encoder with {', '.join(shape)} = {ours}, but the model's "
                f"encoder has {theirs}: give heads for this encoder."
            )

        pooling = model[1].get_config_dict()
        dap.config.pooling = pooling_mode(pooling)
        if not pooling.get("include_prompt", True):
            dap.config.pooling += " without its prompt"  # which `check` refuses by this name
        dap.config.check()
        dap.dap.encoder = encoder
        dap.config.encoder_config = encoder.config
        use_packing(encoder)
        self.dap = dap.to(encoder.device, encoder.dtype)
        self.has_trained = False
        self.lacks_heads = False  # the encoder was loaded from a checkpoint, the heads were not
        model.register_load_state_dict_post_hook(self._note_loading)

    def _note_loading(self, *_: Any) -> None:
        """Note that the model was loaded from a checkpoint, but its heads were not (`lacks_heads`).

        This hook is called after the encoder's weights were loaded. Before the first step this
        means that the trainer resumes a run.
        """
        self.lacks_heads = self.has_heads and not self.has_trained

    @property
    def has_heads(self) -> bool:
        """Tell whether the objectives have heads, which need to be trained and saved."""
        return bool(self.head_weights())

    def head_weights(self) -> dict[str, Tensor]:
        """Return the weights of the heads by name, without the encoder's."""
        state = self.dap.state_dict()
        return {name: value for name, value in state.items() if not name.startswith("dap.")}

    def load_heads(self, weights: dict[str, Tensor]) -> None:
        """Load weights that `head_weights` returned. The encoder does not change.

        Args:
            weights: weights of the heads by name.

        Raises:
            RuntimeError: the weights are those of other heads.
        """
        self.dap.load_state_dict(self.dap.state_dict() | weights)
        self.lacks_heads = False

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None
    ) -> dict[str, Tensor]:
        """Return each objective's loss times its weight, by name such as "tr_loss".

        The trainer adds them up and logs them.

        Args:
            sentence_features: `input_ids` and `attention_mask` (B, S) of each column: source,
                target and perhaps a hard negative.
            labels: (B,) language ids, or None.

        Raises:
            UserError: there are several processes or a wrong number of columns, the text is
                packed already, or labels are not language ids. Or a run was resumed without the
                heads.
        """
        texts = list(sentence_features)
        self._check(texts, labels)
        self.dap.train(self.dap.dap.encoder.training)  # the trainer does not know the heads

        tokens = {}
        for side, text in zip(("source", "target", "negative"), texts):
            for key in ("input_ids", "attention_mask"):
                tokens[f"{side}_{key}"] = text[key]

        # accelerate puts the trainer's autocast into the SentenceTransformer's forward, which is
        # not called here.
        mixed = AcceleratorState._shared_state and AcceleratorState().mixed_precision != "no"
        with get_mixed_precision_context_manager(True) if mixed else nullcontext():
            out = self.dap(**tokens, language_ids=labels)

        losses = {}
        for objective in self.dap.objectives:
            name = f"{objective.name}_loss"
            losses[name] = objective.weight * getattr(out, name)
        return losses

    def _check(self, texts: list[dict[str, Tensor]], labels: Tensor | None) -> None:
        """Raise `UserError` for input that this loss cannot use, or if its heads are missing.

        They are missing if a run was resumed without `KeepHeads`.

        Args:
            texts: `input_ids` and `attention_mask` of each column.
            labels: (B,) language ids, or None.
        """
        if self.lacks_heads:
            raise UserError(
                "the trainer has loaded the encoder of a checkpoint, but not the heads of this "
                "loss: begin anew, with trainer.add_callback(KeepHeads(loss)) to be able to resume."
            )
        self.has_trained = self.has_trained or self.dap.dap.encoder.training
        if any("attention_mask" not in text for text in texts):
            raise UserError(
                "sentence-transformers has packed the text: set model[0].unpad_inputs = False."
            )
        if world_size() > 1:
            raise UserError(
                f"DAPLoss runs in one process, not {world_size()}: train with train_dap.py."
            )
        if len(texts) not in (2, 3):
            raise UserError(
                f"{len(texts)} columns of text: give source, target and at most one hard negative."
            )
        names = self.dap.config.rtl_languages
        if labels is not None and names and not 0 <= labels.min() <= labels.max() < len(names):
            raise UserError(
                f"labels from {labels.min()} to {labels.max()}: a label is a language_id, from 0 "
                f"to {len(names) - 1} (rtl_languages={names})."
            )

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings that the trainer's model card lists: `{"objective": …}`."""
        return {"objective": self.dap.config.objective}


class KeepHeads(TrainerCallback):
    """Callback that saves the heads of a `DAPLoss` in each checkpoint, and loads them on resuming.

    Example:
        trainer = SentenceTransformerTrainer(model, args, data, loss=loss)
        trainer.add_callback(KeepHeads(loss))
        trainer.train(resume_from_checkpoint=True)

    Args:
        loss: the loss of the trainer.
    """

    def __init__(self, loss: DAPLoss) -> None:
        self.loss = loss

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            save_file(self.loss.head_weights(), _heads_file(args, state))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.loss.lacks_heads:
            path = _heads_file(args, state)
            with refusals(f"the heads of {path.parent}"):
                self.loss.load_heads(load_file(path))


def _heads_file(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the path of the heads' file in the checkpoint of the current step.

    Args:
        args: name the output folder.
        state: tells the step.
    """
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / HEADS_FILE
