"""Going on with a run that was stopped: which checkpoint to take, and whether it is the same run."""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import align_special_tokens, sort_checkpoints

from dap.errors import UserError
from dap.file_io import read_json, write_json
from dap.reports import RECORD
from dap.training.training_arguments import CONFIG_FIELDS, GROUPS, Arguments, DAPTrainingArguments
from modeling_dap import DAPConfig

logger = logging.getLogger(__name__)

FINISHED = "train_results.json"  # written last, so it marks a finished run
# What a checkpoint consists of, and the names that Trainer, DeepSpeed and FSDP give it.
PARTS = {
    "configuration": ["config.json"],
    "weights": ["model*.safetensors", "pytorch_model*", "global_step*"],
    "optimizer": ["optimizer*", "global_step*"],
    "scheduler": ["scheduler.pt"],
    "state of the random numbers": ["rng_state*.pth"],
}
# Arguments of Transformers that can change the weights; of our own all can but these.
OF_TRANSFORMERS = (
    "per_device_train_batch_size", "auto_find_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm",
    "weight_decay", "optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon",
    "neftune_noise_alpha", "label_smoothing_factor", "average_tokens_across_devices", "bf16", "fp16", "tf32",
    "seed", "data_seed", "train_sampling_strategy", "remove_unused_columns", "dataloader_drop_last",
    "dataloader_in_order", "dataloader_num_workers", "accelerator_config", "parallelism_config", "fsdp",
    "fsdp_config", "deepspeed", "ignore_data_skip",
)  # fmt: skip
HARMLESS = (
    "mini_batch_size",
    "early_stopping_patience",
    "attn_implementation",
    "trust_remote_code",
    "max_bad_lines",
)
# Arguments for which the record has what they come to: the pairs a step over all processes, and the text itself.
REPLACED = ("per_device_train_batch_size", "total_train_batch_size", "validation_data")
OF_STREAMS = (
    "train_data",
    "shuffle_buffer",
    "dataloader_num_workers",
)  # all that is known of a stream's order
SAMPLE = 2000  # pairs of a language that its digest is made from


def find_resumable(args: DAPTrainingArguments) -> str | None:
    """The checkpoint to go on from: the one asked for, or the last complete one in `output_dir`.

    Raises:
        ValueError: the folder holds a finished run, the checkpoint asked for is not complete, or the run saves only
            the model.
    """
    folder = Path(args.output_dir)
    if (folder / FINISHED).exists():
        raise UserError(
            f"{folder} holds a finished run ({FINISHED}): give another --output_dir, or remove it."
        )
    wanted = str(args.resume_from_checkpoint)
    if wanted.lower() == "false":
        return None
    if wanted.lower() not in ("none", "true"):
        if lacking := missing_parts(Path(wanted)):
            raise UserError(
                f"--resume_from_checkpoint {wanted}: it lacks its {', '.join(lacking)}; name another."
            )
        return wanted
    checkpoints = sort_checkpoints(str(folder)) if folder.is_dir() else []
    if checkpoints and args.save_only_model:
        raise UserError(
            f"{folder} holds a run with --save_only_model, which cannot be resumed: give another --output_dir, or "
            "--resume_from_checkpoint false to begin anew."
        )
    for checkpoint in reversed(checkpoints):
        if lacking := missing_parts(Path(checkpoint)):
            logger.warning(
                "%s is left out, as of a run killed at a save: it lacks %s",
                checkpoint,
                ", ".join(lacking),
            )
        elif is_of_another_run(folder, Path(checkpoint)):
            logger.warning(
                "%s is left out, as of a run before the one that was begun anew in %s",
                checkpoint,
                folder,
            )
        else:
            return checkpoint
    return None


def is_of_another_run(folder: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint's record is another than that of the run that was last begun in the folder."""
    records = folder / RECORD, checkpoint / RECORD
    return all(record.exists() for record in records) and bool(
        differences(*map(read_json, records))
    )


def missing_parts(checkpoint: Path) -> list[str]:
    """What a checkpoint lacks to be resumed from; the Trainer writes its own state after everything else."""
    lacking = [
        part
        for part, names in PARTS.items()
        if not any(any(checkpoint.glob(name)) for name in names)
    ]
    try:
        trainer_state(checkpoint)
    except (FileNotFoundError, NotADirectoryError, UserError):
        lacking.append(TRAINER_STATE_NAME)
    return lacking


def trainer_state(checkpoint: str | Path) -> dict[str, Any]:
    """The content of a checkpoint's `trainer_state.json`."""
    return read_json(Path(checkpoint) / TRAINER_STATE_NAME)


def has_ended(checkpoint: str, max_steps: int) -> bool:
    """Whether the run had taken the last of `max_steps` (of its epochs', if that is not above 0), or stopped early."""
    state = trainer_state(checkpoint)
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {})
    early = (
        control.get("args", {}).get("should_training_stop", False)
        and state["global_step"] < state["max_steps"]
    )
    return early or state["global_step"] >= (max_steps if max_steps > 0 else state["max_steps"])


def train_to_end(trainer: Trainer, checkpoint: str | None) -> dict[str, float]:
    """Train from a checkpoint on, or from the beginning; gives the training's metrics.

    Of a run that was killed after its last step only the model is loaded: the best one, with `load_best_model_at_end`.

    Raises:
        UserError: what a process that reads the batches (`dataloader_num_workers`) refuses, or that one was killed.
    """
    if checkpoint is None or not has_ended(checkpoint, trainer.args.max_steps):
        try:
            return trainer.train(resume_from_checkpoint=checkpoint).metrics
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            raise UserError(
                "a process that reads the batches was ended from outside, perhaps for want of memory; give the same "
                "command again to go on, with a smaller --dataloader_num_workers"
            ) from error
        except (UserError, OSError) as error:
            if " in DataLoader worker process " not in str(error):
                raise
            raise UserError(
                re.split(r"\n[\w.]+Error: ", str(error))[-1]
            ) from error  # what stands below its traceback
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    GoOn().on_train_begin(trainer.args, trainer.state, trainer.control)
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    trainer._load_from_checkpoint(best or checkpoint)
    align_special_tokens(
        trainer.model, trainer.processing_class
    )  # as training does, in the configuration
    return {"steps": trainer.state.global_step, "epoch": trainer.state.epoch}


def changes_weights(argument: str) -> bool:
    """Whether an argument of a training can change the weights; a resumed run may have another value of the others.

    >>> changes_weights("learning_rate"), changes_weights("logging_steps")
    (True, False)
    """
    own = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    own -= TrainingArguments.__dataclass_fields__.keys() | {*HARMLESS}
    return argument in own or argument in OF_TRANSFORMERS


def describe_run(
    config: DAPConfig, arguments: Arguments, train: Mapping[str, Any], dev: Mapping[str, Dataset]
) -> dict[str, Any]:
    """What a run must keep when it is resumed: arguments that change weights, the model's fields, and the text."""
    model, data, training = arguments
    given = dataclasses.asdict(model) | dataclasses.asdict(data) | training.to_dict()
    without = {*REPLACED} if data.streaming else {*REPLACED, *OF_STREAMS}
    record = {
        name: value
        for name, value in given.items()
        if changes_weights(name) and name not in without
    }
    record |= {name: getattr(config, name) for name in CONFIG_FIELDS}  # with defaults filled in
    record["pairs a step"] = training.per_device_train_batch_size * training.world_size
    if not data.streaming:
        record["training text"] = {
            language: describe_text(part) for language, part in train.items()
        }
    record["dev text"] = {language: describe_text(part) for language, part in dev.items()}
    return json.loads(json.dumps(record, default=str))  # as it is read again: lists for tuples


def describe_text(part: Dataset) -> str:
    """Number of pairs and a digest of `SAMPLE` of them, evenly spread; the same wherever the text lies.

    >>> describe_text(Dataset.from_dict({"source": ["Ja", "Nein"], "target": ["Yes", "No"]}))
    '2 pairs, 9b96b64269e1'
    """
    rows = np.linspace(0, len(part) - 1, min(len(part), SAMPLE)).astype(int).tolist()
    digest = hashlib.sha256(json.dumps(part[rows] if rows else {}).encode())
    return f"{len(part)} pairs, {digest.hexdigest()[:12]}"


def keep_record(
    run: dict[str, Any], training: DAPTrainingArguments, checkpoint: str | None
) -> None:
    """Compare the run with the one that made the checkpoint; write it down where a run begins.

    Raises:
        ValueError: the runs differ; names every difference.
    """
    here = Path(training.output_dir) / RECORD
    if checkpoint is not None:
        places = [folder / RECORD for folder in (Path(checkpoint), Path(checkpoint).parent)]
        record = next((place for place in places if place.exists()), None)
        if record is None:
            logger.warning(
                "%s is not there: whether the arguments are the same as before is not known",
                places[0],
            )
        elif differing := differences(read_json(record), run):
            raise UserError(
                f"{checkpoint} is of a run with {'; '.join(differing)}: give the same arguments; or another "
                f"--output_dir, with --model_name_or_path {checkpoint} to train on from these weights; or "
                "--resume_from_checkpoint false to begin anew."
            )
    if training.process_index == 0 and (checkpoint is None or not here.exists()):
        write_json(run, here)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs in two records, of mappings only the keys; a name that one of them lacks is of another version.

    >>> differences({"seed": 1, "text": {"de": 5, "fr": 7}}, {"seed": 1, "text": {"de": 6, "fr": 7}, "new": 3})
    ["text={'de': 5}, now {'de': 6}"]
    """
    found = []
    for name in (name for name in old if name in new and old[name] != new[name]):
        before, now = old[name], new[name]
        if isinstance(before, dict) and isinstance(now, dict):
            keys = [key for key in before | now if before.get(key) != now.get(key)]
            before, now = (
                {key: side[key] for key in keys if key in side} for side in (before, now)
            )
        found.append(f"{name}={before!r}, now {now!r}")
    return found


class GoOn(TrainerCallback):
    """Has a resumed run log, evaluate and save as often as it is now told, and find its best checkpoint if moved."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)
        best = state.best_model_checkpoint
        if state.best_global_step and (best is None or not Path(best).is_dir()):
            here = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(here) if here.is_dir() else None


class RecordInCheckpoints(TrainerCallback):
    """Each checkpoint carries the record of its own run, whatever is begun anew in the folder later."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        record, checkpoint = (
            Path(args.output_dir) / RECORD,
            Path(args.output_dir) / f"checkpoint-{state.global_step}",
        )
        if state.is_world_process_zero and record.exists() and checkpoint.is_dir():
            write_json(read_json(record), checkpoint / RECORD)
