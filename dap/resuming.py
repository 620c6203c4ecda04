"""Going on with a run that was stopped: which checkpoint to take, and whether it is the same run."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from dap.arguments import CONFIG_DEFAULTS, DataArguments
from dap.results import write_json
from dap.trainer import DAPTrainingArguments
from modeling_dap import DAPConfig

logger = logging.getLogger(__name__)

FINISHED = "train_results.json"  # written last, so it marks a finished run
RECORD = "run.json"  # written first: what the run is
# What a checkpoint consists of, and the names that Trainer, DeepSpeed and FSDP give it.
PARTS = {
    "configuration": ["config.json"],
    "weights": ["model*.safetensors", "pytorch_model*", "global_step*"],
    "optimizer": ["optimizer*", "global_step*"],
    "scheduler": ["scheduler.pt"],
    "state of the random numbers": ["rng_state*.pth"],
}
# Arguments that a resumed run takes from its checkpoint, or that decide which text comes after it.
TRAINING_FIELDS = ("gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay")
TRAINING_FIELDS += ("optim", "seed", "data_seed", "freeze_word_embeddings")
DATA_FIELDS = ("max_seq_length", "language_mix", "mix_alpha", "streaming", "target_language", "dev_pairs")


def find_resumable(args: DAPTrainingArguments) -> str | None:
    """The checkpoint to go on from: the one asked for, or the last complete one in `output_dir`.

    Raises:
        ValueError: the folder holds a finished run, the checkpoint asked for is not complete, or the run saves only
            the model.
    """
    folder = Path(args.output_dir)
    if (folder / FINISHED).exists():
        raise ValueError(f"{folder} holds a finished run ({FINISHED}): give another --output_dir, or remove it.")
    wanted = str(args.resume_from_checkpoint)
    if wanted.lower() == "false":
        return None
    if wanted.lower() not in ("none", "true"):
        if lacking := missing_parts(Path(wanted)):
            raise ValueError(f"--resume_from_checkpoint {wanted}: it lacks its {', '.join(lacking)}; name another.")
        return wanted
    checkpoints = sort_checkpoints(str(folder)) if folder.is_dir() else []
    if checkpoints and args.save_only_model:
        raise ValueError(
            f"{folder} holds a run with --save_only_model, which cannot be resumed: give another --output_dir, or "
            "--resume_from_checkpoint false to begin anew."
        )
    for checkpoint in reversed(checkpoints):
        if not (lacking := missing_parts(Path(checkpoint))):
            return checkpoint
        logger.warning("%s is left out, as of a run killed at a save: it lacks %s", checkpoint, ", ".join(lacking))
    return None


def missing_parts(checkpoint: Path) -> list[str]:
    """What a checkpoint lacks to be resumed from; the Trainer writes its own state after everything else."""
    lacking = [part for part, names in PARTS.items() if not any(any(checkpoint.glob(name)) for name in names)]
    try:
        trainer_state(checkpoint)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        lacking.append(TRAINER_STATE_NAME)
    return lacking


def trainer_state(checkpoint: str | Path) -> dict[str, Any]:
    """The content of a checkpoint's `trainer_state.json`."""
    return json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))


def has_ended(checkpoint: str, max_steps: int) -> bool:
    """Whether the run had taken its last step, of `max_steps` (those of its epochs if that is not above 0), or stopped
    early."""
    state = trainer_state(checkpoint)
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {})
    early = control.get("args", {}).get("should_training_stop", False) and state["global_step"] < state["max_steps"]
    return early or state["global_step"] >= (max_steps if max_steps > 0 else state["max_steps"])


def describe_run(
    config: DAPConfig, data: DataArguments, training: DAPTrainingArguments, pairs: Mapping[str, int]
) -> dict[str, Any]:
    """What a run must keep when it is resumed: model, text (`pairs` by language), and the course of training."""
    record = {name: getattr(config, name) for name in CONFIG_DEFAULTS}
    record |= {name: getattr(data, name) for name in DATA_FIELDS}
    if data.streaming:
        record |= {"train_data": data.train_data, "shuffle_buffer": data.shuffle_buffer}
    record |= {name: getattr(training, name) for name in TRAINING_FIELDS}
    record |= {"pairs a step": training.per_device_train_batch_size * training.world_size, "pairs": dict(pairs)}
    return json.loads(json.dumps(record))  # as it is read again: lists for tuples, text for enumerations


def keep_record(run: dict[str, Any], training: DAPTrainingArguments, checkpoint: str | None) -> None:
    """Compare the run with the one that made the checkpoint; write it down where there is none.

    Raises:
        ValueError: the runs differ; names every difference.
    """
    if checkpoint is None:
        if training.process_index == 0:
            write_json(run, Path(training.output_dir) / RECORD)
        return
    record = Path(checkpoint).parent / RECORD
    if not record.exists():
        logger.warning("%s is not there: whether the arguments are the same as before is not known", record)
        return
    old = json.loads(record.read_text(encoding="utf-8"))
    differing = [name for name in old | run if old.get(name) != run.get(name)]
    if differing:
        listed = "; ".join(f"{name}={old.get(name)!r}, now {run.get(name)!r}" for name in differing)
        raise ValueError(
            f"{checkpoint} is of a run with {listed}: give the same arguments, another --output_dir, or "
            "--resume_from_checkpoint false to begin anew."
        )


class FindBestAgain(TrainerCallback):
    """After `output_dir` was moved, the best checkpoint is where it is now."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        best = state.best_model_checkpoint
        if state.best_global_step and (best is None or not Path(best).is_dir()):
            here = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(here) if here.is_dir() else None
