"""Adjust accelerate's FSDP2 to DAP models."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import Trainer

from dap_transformers.errors import UserError
from heads_dap import whole
from modeling_dap import DAPForPreTraining
from modules_dap import build_modules
from states_dap import layer_stack


def prepare_sharding(trainer: Trainer) -> None:
    """Make accelerate's FSDP shard the encoder layer by layer, and save whole checkpoints.

    Without FSDP, do nothing. This is called before the trainer's model is wrapped.
    """
    if not trainer.is_fsdp_enabled:
        return
    if trainer.args.peft_lora_rank is not None:
        raise UserError("LoRA does not work with FSDP: use DDP")

    plugin = trainer.accelerator.state.fsdp_plugin
    adjust(plugin)
    if plugin.transformer_cls_names_to_wrap is None:
        # By default accelerate would also wrap the embeddings, and shard them a second time.
        _, blocks = layer_stack(trainer.model.dap.encoder)
        plugin.transformer_cls_names_to_wrap = [type(blocks[0]).__name__]


def adjust(plugin: FullyShardedDataParallelPlugin) -> None:
    """Set what this project needs of FSDP2."""
    if plugin.fsdp_version != 2:
        raise UserError(
            "fsdp_version=1 is not supported: give 2, as in configs/accelerate/fsdp2.yaml"
        )
    # FSDP's own mixed precision would also round losses and gradients. The trainer uses autocast.
    plugin.mixed_precision_policy = None
    # `from_pretrained` cannot load a checkpoint in shards.
    plugin.set_state_dict_type("FULL_STATE_DICT")


@contextmanager
def ready_to_save(model: DAPForPreTraining) -> Iterator[None]:
    """Give a sharded model its own class and whole Dense modules until the block ends.

    FSDP replaces the class by one of torch's. `save_pretrained` would then copy torch's file into
    the checkpoint instead of ours. All processes must call this together.
    """
    sharded, after = type(model), model.dap.after
    try:
        if hasattr(sharded, "unshard"):
            model.__class__ = next(kind for kind in sharded.__mro__ if not hasattr(kind, "unshard"))
            with torch.random.fork_rng(devices=[]):  # the random numbers of the training stay
                model.dap.after = build_modules(model.config.modules)
            weights = {name: whole(value).detach() for name, value in after.state_dict().items()}
            model.dap.after.load_state_dict(weights)
        yield
    finally:
        model.__class__, model.dap.after = sharded, after


@torch.no_grad()
def whole_model(model: DAPForPreTraining) -> DAPForPreTraining:
    """Return the model itself, or an unsharded copy if FSDP holds it in shards.

    All processes must call this together.
    """
    state = model.state_dict()
    if not any(hasattr(value, "full_tensor") for value in state.values()):
        return model

    weights = {name: whole(value) for name, value in state.items()}
    # The copy draws random weights first. That must not change the random numbers of the training.
    with torch.random.fork_rng(devices=[]):
        copy = DAPForPreTraining(model.config).to(model.device, model.dtype)
    copy.load_state_dict(weights)
    return copy
