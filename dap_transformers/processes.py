"""The processes of one launch."""

from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def launched() -> PartialState:
    """Connect the processes of `accelerate launch`, also on CPUs, and return Accelerate's state."""
    on_cpu = not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    # Encoding the shards of another process may take days.
    return PartialState(cpu=on_cpu, timeout=timedelta(days=7))
