"""What FSDP2 needs beside what accelerate does, and which of its settings do not work here."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from transformers import Trainer

from dap.errors import UserError
from encoder_dap import layer_stack
from modeling_dap import DAPForPreTraining


def prepare_sharding(trainer: Trainer) -> None:
    """Make FSDP shard block by block.

    Raises:
        ValueError: FSDP on CPU, or what `check_fsdp` refuses.
    """
    if not trainer.is_fsdp_enabled:
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" or trainer.args.fsdp:
            kind = trainer.args.device.type
            raise UserError(
                f"accelerate has no FSDP on {kind}, it would use DDP: give configs/accelerate/ddp.yaml."
            )
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    check_fsdp(plugin)
    plugin.mixed_precision_policy = (
        None  # it would round losses and gradients, too: the trainer uses autocast
    )
    if (
        plugin.transformer_cls_names_to_wrap is None
    ):  # or it takes the embeddings, too, and shards them a second time
        _, blocks = layer_stack(trainer.model.dap.encoder)
        plugin.transformer_cls_names_to_wrap = [type(blocks[0]).__name__]


def check_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise `ValueError` for FSDP of version 1, and for checkpoints in shards, of which no model would be left."""
    kind = getattr(plugin.state_dict_type, "name", plugin.state_dict_type)
    for name, value, needed in (
        ("version", plugin.fsdp_version, 2),
        ("state_dict_type", kind, "FULL_STATE_DICT"),
    ):
        if value != needed:
            raise UserError(
                f"fsdp_{name}={value} is not supported: give {needed}, as configs/accelerate/fsdp2.yaml."
            )


@contextmanager
def own_class(model: nn.Module) -> Iterator[None]:
    """FSDP gives a model a class of torch, whose file `save_pretrained` would copy: it has its own one for a while."""
    sharded = type(model)
    model.__class__ = next(kind for kind in sharded.__mro__ if not hasattr(kind, "unshard"))
    try:
        yield
    finally:
        model.__class__ = sharded


@torch.no_grad()
def whole_model(model: DAPForPreTraining) -> DAPForPreTraining:
    """The model, or where FSDP holds shards of it a copy in one piece; all processes are to call this together."""
    state = model.state_dict()
    if not any(hasattr(value, "full_tensor") for value in state.values()):
        return model
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)()
        for name, value in state.items()
    }
    with torch.random.fork_rng(
        devices=[]
    ):  # the random weights that it is born with are not to be missed in training
        copy = DAPForPreTraining(model.config).to(model.device, model.dtype)
    copy.load_state_dict(whole)
    return copy
