"""Resuming a stopped run: which checkpoint to continue from, and whether it is the same run."""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback
from transformers.trainer_utils import SaveStrategy, align_special_tokens, sort_checkpoints

from dap_transformers.errors import UserError, reading
from dap_transformers.files import content_digest, write_json
from dap_transformers.reports import RECORD, read_record
from dap_transformers.text.corpus import spread_rows
from dap_transformers.training.arguments import Arguments, fields_of
from heads_dap import whole
from modeling_dap import DAPConfig

logger = logging.getLogger(__name__)

#: Written last, so this file marks a finished run.
FINISHED = "train_results.json"

#: Arguments of Transformers that can change the weights. Of ours, all but `WITHOUT_EFFECT` can.
OF_TRANSFORMERS = (
    "per_device_train_batch_size", "auto_find_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "max_grad_norm", "weight_decay", "optim", "optim_args", "optim_target_modules",
    "adam_beta1", "adam_beta2", "adam_epsilon", "neftune_noise_alpha", "label_smoothing_factor",
    "average_tokens_across_devices", "bf16", "fp16", "tf32", "seed", "data_seed",
    "train_sampling_strategy", "remove_unused_columns", "dataloader_drop_last",
    "dataloader_in_order", "accelerator_config", "parallelism_config",
    "fsdp", "fsdp_config", "deepspeed", "ignore_data_skip",
    "metric_for_best_model", "greater_is_better",  # which weights are kept
)  # fmt: skip

#: Our own arguments that change no weights, except by rounding and by which dropout is drawn.
WITHOUT_EFFECT = {
    "trust_remote_code", "attn_implementation", "mini_batch_size", "max_bad_lines", "query_prompt",
    "document_prompt",
}  # fmt: skip

#: Arguments that the record replaces by their effect: the pairs per step, and a digest of the text.
REPLACED = (
    "per_device_train_batch_size", "total_train_batch_size", "train_data", "validation_data",
)  # fmt: skip

#: Distance of the seeds of two processes, so that they are no seeds of other runs.
SEEDS_BETWEEN_PROCESSES = 1_000_003

#: Number of pairs per language that its digest is made from.
PAIRS_IN_DIGEST = 2000


# ----------------------------------------------------------------------------- finding a checkpoint


def require_no_other_model(folder: Path) -> None:
    """Raise `UserError` if a folder holds a model, but no record of a run that has begun there."""
    holds_model = any(folder.glob("*config.json")) or (folder / "modules.json").exists()
    if holds_model and not (folder / RECORD).exists():
        raise UserError(f"{folder} holds another model, which would be replaced: give a new folder")


def find_resumable(args: TrainingArguments) -> str | None:
    """Find the folder of the checkpoint to resume from, or None to begin from the start.

    This is the one that `resume_from_checkpoint` names, or else the last complete one of the run
    in `output_dir`. Incomplete checkpoints, and those of an earlier run in the same folder, are
    skipped with a warning. With `resume_from_checkpoint="false"` the run begins anew.

    Raises:
        UserError: if the run in `output_dir` is finished, or if the named checkpoint is incomplete.
    """
    folder = Path(args.output_dir)
    if (folder / FINISHED).exists():
        raise UserError(
            f"{folder} holds a finished run ({FINISHED}): give another folder, or remove this one"
        )

    wanted = str(args.resume_from_checkpoint)
    if wanted.lower() == "false":
        return None
    if wanted.lower() not in ("none", "true"):
        require_whole(wanted)
        return wanted

    record = read_record(folder)
    for checkpoint in reversed(sort_checkpoints(str(folder)) if folder.is_dir() else []):
        if not is_whole(Path(checkpoint)):
            logger.warning("%s is skipped: it is incomplete", checkpoint)
        elif differences(record, read_record(Path(checkpoint))):
            logger.warning("%s is skipped: it is from an earlier run in %s", checkpoint, folder)
        else:
            return checkpoint
    return None


def is_whole(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was written to its end. The Trainer writes its state last."""
    # Each process writes its own random state. Without it, other dropout would be drawn.
    written = len(list(checkpoint.glob("rng_state*.pth")))
    if written < read_record(checkpoint).get("processes", 1):
        return False
    try:
        saved_state(checkpoint)
    except (ValueError, OSError, TypeError):
        return False
    # Without these, the Trainer would begin with a new optimizer or schedule and say nothing.
    return any(checkpoint.glob("optimizer*")) and (checkpoint / "scheduler.pt").exists()


def require_whole(checkpoint: str) -> None:
    """Raise `UserError` unless a checkpoint is whole (`is_whole`)."""
    if not is_whole(Path(checkpoint)):
        raise UserError(
            f"{checkpoint} is no whole checkpoint (optimizer, schedule, random state and "
            "trainer_state.json): name another"
        )


def saved_state(checkpoint: str | Path) -> TrainerState:
    """Read the state of the training from a checkpoint."""
    return TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))


class ResumableTrainer(Trainer):
    """A `Trainer` that loads no weights that do not fit, and saves none that are not finite.

    It raises `UserError` instead. `Trainer` itself only warns of missing weights. Each checkpoint
    also gets the run's record, and what begins with a run or an epoch is set (`Beginnings`).

    Args:
        train_sampler: draws the training rows. None takes the shuffle of `Trainer`.
    """

    def __init__(self, *args: Any, train_sampler: Sampler | None = None, **kwargs: Any) -> None:
        self.train_sampler = train_sampler
        super().__init__(*args, **kwargs)
        if self.args.label_smoothing_factor:
            raise UserError("label_smoothing_factor has no effect: leave it out")
        if train_sampler is not None and self.args.train_sampling_strategy != "random":
            raise UserError("train_sampling_strategy has no effect: leave it out")
        self.add_callback(Beginnings(train_sampler))
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback):
                leave_after_saving(callback.jit_manager)
                # Before a step ends, its batch and its dropout are already drawn, and a checkpoint
                # would lose them. `on_step_end` and `on_epoch_end` still save.
                callback.on_step_begin = callback.on_pre_optimizer_step = do_nothing

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.train_sampler or super()._get_train_sampler(train_dataset)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        with reading("push_to_hub"):  # the Hub's client raises errors of its HTTP library
            super().init_hf_repo(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        # A run could not resume from such weights, and older checkpoints are removed.
        if not whole(get_total_norm(self.model.parameters())).isfinite():
            raise UserError(
                f"the weights are not finite after step {self.state.global_step}: begin anew with "
                "a lower learning rate"
            )
        super().save_model(*args, **kwargs)

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        require_whole(checkpoint)
        super()._load_from_checkpoint(checkpoint, model)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.args.should_save:
            folder = Path(self.args.output_dir)
            # A checkpoint tells which run made it, even if another is begun in the same folder.
            if record := read_record(folder):
                write_json(record, folder / f"checkpoint-{self.state.global_step}" / RECORD)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise `UserError` for weights that are missing or too many, except tied ones."""
        missing = set(load_result.missing_keys)
        if missing == set(self.model._keys_to_ignore_on_save or ()):
            missing = set()
        others = {*missing, *load_result.unexpected_keys}
        if others:
            raise UserError(
                f"the checkpoint does not fit: {len(others)} weights are missing or too many, "
                f"such as {min(others)}"
            )


# ----------------------------------------------------------------------- training from a checkpoint


def train_to_end(trainer: Trainer, checkpoint: str | None) -> dict[str, float]:
    """Train to the last step, from the start or from a checkpoint, and return metrics by name.

    The checkpoint is already of the last step if a run was killed before it had saved everything.
    Then only the model is loaded, the best one with `load_best_model_at_end`. The metrics are then
    `steps` and `epoch`.
    """
    args = trainer.args
    state = TrainerState() if checkpoint is None else saved_state(checkpoint)
    # Without `max_steps`, the number in the checkpoint counts, which follows from the epochs.
    last = args.max_steps if args.max_steps > 0 else state.max_steps
    if checkpoint is not None:
        count_intervals(args, last)
    if checkpoint is None or state.global_step < last:
        return trainer.train(resume_from_checkpoint=checkpoint).metrics

    trainer.state = state
    correct_state(args, state)
    best = state.best_model_checkpoint if args.load_best_model_at_end else None
    trainer._load_from_checkpoint(best or checkpoint)
    # `train` does this, too: the saved configuration must have the tokenizer's special tokens.
    align_special_tokens(trainer.model, trainer.processing_class)
    return {"steps": state.global_step, "epoch": state.epoch}


def count_intervals(args: TrainingArguments, steps: int) -> None:
    """Turn intervals that are shares of a run into numbers of steps, as checkpoints have them.

    Otherwise `Trainer` warns that they differ from the checkpoint's. The run has `steps` steps.
    """
    for name in ("logging_steps", "eval_steps", "save_steps"):
        interval = getattr(args, name)
        if interval is not None and interval < 1:
            setattr(args, name, math.ceil(interval * steps))


# ------------------------------------------------------------------------------ the record of a run


def changes_weights(argument: str) -> bool:
    """Tell whether an argument of a training can change the trained weights.

    A resumed run must have the same values of these arguments, and may change the others.

    >>> changes_weights("learning_rate"), changes_weights("logging_steps")
    (True, False)
    """
    if argument in TrainingArguments.__dataclass_fields__:
        return argument in OF_TRANSFORMERS
    return argument not in WITHOUT_EFFECT


def describe_run(
    config: DAPConfig, arguments: Arguments, train: Mapping[str, Any], dev: Mapping[str, Dataset]
) -> dict[str, Any]:
    """Return the record of a run: everything that must stay the same when it is resumed.

    These are the arguments that can change the weights, the model's configuration, the number of
    processes and pairs per step, and digests of the text. `train` and `dev` have the pairs by
    language.
    """
    model, data, training = arguments
    given = dataclasses.asdict(model) | dataclasses.asdict(data) | training.to_dict()
    record: dict[str, Any] = {}
    for name, value in given.items():
        if changes_weights(name) and name not in REPLACED:
            record[name] = value

    # The configuration has the defaults filled in.
    record |= fields_of(config)
    # Stored records of runs have this key, so it keeps its name.
    record["pairs a step"] = training.per_device_train_batch_size * training.world_size
    record["processes"] = training.world_size
    if model.plugin:
        record["plugin files"] = [[Path(each).name, content_digest(each)] for each in model.plugin]
    record["training text"] = {code: describe_text(part) for code, part in train.items()}
    record["dev text"] = {code: describe_text(part) for code, part in dev.items()}
    return record


def describe_text(part: Dataset, most: int = PAIRS_IN_DIGEST) -> str:
    """Describe a text by its number of pairs and a hash of at most `most` of them.

    The hashed pairs are evenly spread over the text. A change of others is not noticed.
    The result does not depend on where the text is stored.

    >>> describe_text(Dataset.from_dict({"source": ["Ja", "Nein"], "target": ["Yes", "No"]}))
    '2 pairs, 9b96b64269e1'
    """
    digest = hashlib.sha256(json.dumps(spread_rows(part, most)[:]).encode())
    return f"{len(part)} pairs, {digest.hexdigest()[:12]}"


def record_run(run: dict[str, Any], training: TrainingArguments, folder: str | None) -> None:
    """Write the record of a run to `run.json` of the output folder, in the first process.

    Args:
        run: the record, names and values that must all stay the same.
        folder: what the run resumes from, a checkpoint or an output folder. None for a new run.

    Raises:
        UserError: if `folder` has the record of another run, or if it lies elsewhere and the output
            folder holds checkpoints of another run, whose best one could be taken for this run's.
    """
    # Compare what a JSON file gives back, such as lists instead of tuples.
    run = json.loads(json.dumps(run, default=str))
    differing = differences(read_record(Path(folder)), run) if folder else []
    if differing:
        raise UserError(
            f"{folder} is of a run with {'; '.join(differing)}: give the same arguments, or "
            "another output folder (and this checkpoint as the model to train further)"
        )
    output = Path(training.output_dir)
    given = Path(folder or output).resolve()
    if output.resolve() not in (given, given.parent):
        for checkpoint in output.glob("checkpoint-*"):
            if differences(read_record(checkpoint), run):
                raise UserError(f"{checkpoint} is of another run: give another output folder")
    if training.process_index == 0:
        write_json(run, output / RECORD)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the entries that differ between the records of two runs, as texts for a message.

    A name that only one record has is skipped, because another version wrote that record. The
    number of processes may differ. If both values are mappings, only the keys that differ are
    shown.

    >>> old = {"seed": 1, "text": {"de": 5, "fr": 7}}
    >>> differences(old, {"seed": 1, "text": {"de": 6, "fr": 7}, "new": 3})
    ["text={'de': 5}, now {'de': 6}"]
    """
    found = []
    for name in old:
        if name not in new or name == "processes":
            continue
        before = old[name]
        now = new[name]
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            keys = [key for key in before | now if before.get(key) != now.get(key)]
            before = {key: before[key] for key in keys if key in before}
            now = {key: now[key] for key in keys if key in now}
        found.append(f"{name}={before!r}, now {now!r}")
    return found


def leave_after_saving(manager: CheckpointManager) -> None:
    """Make SIGTERM save a checkpoint, and then end the run as Ctrl-C does.

    `Trainer` alone would return as if the training was finished.
    """
    save = manager.execute_jit_checkpoint

    def save_and_leave() -> None:
        save()
        raise KeyboardInterrupt

    manager.execute_jit_checkpoint = save_and_leave


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


class Beginnings(TrainerCallback):
    """Callback that sets random numbers, intervals and the sampler's epoch where they begin."""

    def __init__(self, sampler: Sampler | None) -> None:
        self.sampler = sampler

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # By their common seed, all processes would draw the same dropout and masks.
        if args.process_index > 0:
            torch.manual_seed(args.seed + SEEDS_BETWEEN_PROCESSES * args.process_index)
        correct_state(args, state)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # accelerate does not do so if a resumed run of several processes skips batches.
        if self.sampler is not None:
            self.sampler.set_epoch(int(state.epoch))


def keeps_best(args: TrainingArguments) -> bool:
    """Tell whether a run keeps its best checkpoint."""
    return args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST


def correct_state(args: TrainingArguments, state: TrainerState) -> None:
    """Correct the state of a resumed run before its first step.

    - The intervals of logging, evaluation and saving become those of this start's arguments.
    - The best checkpoint so far is looked for in this output folder first, which may have been
      moved. If it is missing, the best one is chosen anew, with a warning.
    """
    state.compute_steps(args, state.max_steps)
    step = state.best_global_step
    best = Path(state.best_model_checkpoint or "")
    own = Path(args.output_dir, best.name)  # the folder of the run may have been moved
    if step and best.name and own.is_dir():
        best = own
        state.best_model_checkpoint = str(own)
    is_there = best.name == f"checkpoint-{step}" and best.is_dir()
    if step and keeps_best(args) and not is_there:
        logger.warning(
            "the best checkpoint so far, of step %d, is missing: it is chosen anew", step
        )
        state.best_model_checkpoint = None
        state.best_metric = None
        state.best_global_step = None
