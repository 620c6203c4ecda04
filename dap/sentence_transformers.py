"""The objectives as a loss for sentence-transformers' own trainer."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils.modeling import get_mixed_precision_context_manager
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from dap.encoding import pooling_mode
from dap.errors import UserError
from losses_dap import world_size
from modeling_dap import DAPForPreTraining
from states_dap import use_packing


class DAPLoss(nn.Module):
    """The loss of `DAPForPreTraining` for `SentenceTransformerTrainer`.

    The encoder is the SentenceTransformer's own, so that it learns; the heads are the loss's. Loss and gradients are
    those of `DAPForPreTraining` on the same token ids, with the encoder's dropout and the trainer's autocast. The
    columns of the data are source, translation and, where they are wanted as hard negatives, changed copies of the
    translations; a label is a `language_id`. With `model_init` the trainer is to be given a function that makes it.

    Other than in `train_dap.py`:

    - The cut is the SentenceTransformer's (`max_seq_length`), prompts are those of the trainer's arguments.
    - A Normalize module changes nothing by cosine, and is left out under `tr_similarity="dot"`.
    - `max_grad_norm` is a limit for the encoder's gradient alone; the heads' is not clipped.
    - Checkpoints hold no heads: a resumed run has those again that it began with. `loss.dap.save_pretrained(folder)`
      saves encoder and heads as `train_dap.py` does.
    - There is one process, no GradCache, and no loss around it, such as `MatryoshkaLoss`.

    Args:
        model: Transformer, Pooling by cls or mean, and perhaps Normalize.
        dap: the objectives and heads, made by `from_encoder` or loaded by `from_pretrained`. Its encoder gives way to
            that of `model`, which has to have the same shape, its pooling to that of `model`.

    Raises:
        ValueError: other modules, another pooling, or an encoder of another shape.
    """

    def __init__(self, model: SentenceTransformer, dap: DAPForPreTraining) -> None:
        super().__init__()
        kinds = [type(module).__name__ for module in model]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise UserError(
                f"the model consists of {', '.join(kinds)}: give Transformer, Pooling (and Normalize) alone."
            )
        encoder, pooling = model[0].auto_model, model[1].get_config_dict()
        shape = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
        theirs, own = (
            [getattr(each.config, name) for name in shape] for each in (encoder, dap.dap.encoder)
        )
        if theirs != own:
            raise UserError(
                f"the heads are for an encoder of {own} ({', '.join(shape)}), the model's has {theirs}."
            )
        dap.config.pooling = pooling_mode(pooling) + " without its prompt" * (
            not pooling.get("include_prompt", True)
        )
        dap.config.check()
        dap.dap.encoder, dap.config.encoder_config = encoder, encoder.config
        use_packing(encoder)
        self.dap = dap.to(encoder.device, encoder.dtype)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None
    ) -> dict[str, Tensor]:
        """Each objective's loss with its weight, by name; the trainer logs them and adds them up.

        Args:
            sentence_features: `input_ids` and `attention_mask` (B, S) of each column.
            labels: (B,), or None.

        Raises:
            ValueError: several processes, more columns than three, text that is packed already, or labels that are no
                `language_id`.
        """
        texts = list(sentence_features)
        if any("attention_mask" not in text for text in texts):
            raise UserError(
                "sentence-transformers has packed the text: set model[0].unpad_inputs = False."
            )
        if world_size() > 1:
            raise UserError(
                f"DAPLoss is for one process, not {world_size()}: train with train_dap.py."
            )
        if len(texts) not in (2, 3):
            raise UserError(
                f"{len(texts)} columns of text: give source, target and at most one hard negative."
            )
        names = self.dap.config.rtl_languages
        if labels is not None and names and not 0 <= labels.min() <= labels.max() < len(names):
            wrong = f"labels from {labels.min()} to {labels.max()}"
            raise UserError(
                f"{wrong}: a label is a language_id, 0 to {len(names) - 1} (rtl_languages={names})."
            )
        self.dap.train(self.dap.dap.encoder.training)  # the trainer does not know the heads
        sides = zip(("source", "target", "negative"), texts)
        tokens = {
            f"{side}_{key}": text[key]
            for side, text in sides
            for key in ("input_ids", "attention_mask")
        }
        # accelerate has put the trainer's autocast into the SentenceTransformer's forward, which is not called here
        mixed = AcceleratorState._shared_state and AcceleratorState().mixed_precision != "no"
        with get_mixed_precision_context_manager(True) if mixed else nullcontext():
            out = self.dap(**tokens, language_ids=labels)
        return {
            f"{own.name}_loss": own.weight * getattr(out, f"{own.name}_loss")
            for own in self.dap.objectives
        }

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card says about the loss."""
        return {"objective": self.dap.config.objective}
