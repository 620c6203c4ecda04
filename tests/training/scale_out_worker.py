"""`train_dap.py` on 2 CPU processes under configurations of accelerate, one run after the other.

`python scale_out_worker.py RUNS.json` reads a list of `{"config": FILE, "flags": [...], "move": [[FROM, TO], ...]}`:
a run's arguments, and what is to be put elsewhere before it. All is imported once.

accelerate has FSDP for accelerators alone: on CPU it would train with DDP. So that FSDP is run here, its state is told
that there are GPUs, after it has chosen the CPU and gloo.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from test_distributed import free_port

import train_dap
from dap.training.arguments import Arguments, parse_arguments

PROCESSES = 2


def launch_environment(config: str, *flags: str) -> dict[str, str]:
    """What `accelerate launch --config_file CONFIG` gives its processes."""
    arguments = ["--config_file", config, "--main_process_port", "0", *flags, "train_dap.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    return prepare_multi_gpu_env(args)


def parse_as_with_gpus(argv: list[str]) -> Arguments:
    arguments = parse_arguments(argv)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return arguments


def train(rank: int, port: str, config: str, flags: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= launch_environment(config, "--num_processes", str(PROCESSES))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        train_dap.parse_arguments = parse_as_with_gpus
    train_dap.main(flags)


if __name__ == "__main__":
    for run in json.loads(Path(sys.argv[1]).read_text()):
        for there, here in run["move"]:
            Path(there).rename(here)
        mp.start_processes(train, (free_port(), run["config"], run["flags"]), nprocs=PROCESSES, start_method="fork")
