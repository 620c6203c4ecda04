"""XNLI: fine-tune an encoder on English inference pairs and test it, without more training, in 15 languages.

    accelerate launch run_xnli.py --model_name_or_path out --data_dir xnli/ --train_data mnli.tsv --output_dir xnli-out

`--data_dir` takes a folder with `dev-{xx}.tsv` and `test-{xx}.tsv` (dap/xnli/data.py says more), or a Hub id such as
`facebook/xnli`. Each pair of learning rate and seed is a run of its own in `output_dir`: finished ones are used again,
and a stopped one goes on from its checkpoint when the same command is given again.
"""

import copy
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, set_seed
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import IntervalStrategy, sort_checkpoints

from dap.encoding import SentenceEncoder, model_fingerprint
from dap.errors import UserError
from dap.languages import NAMES, XNLI_LANGUAGES
from dap.reports import merge_seeds, report, text_table, write_json, xnli_table
from dap.training import changes_weights, differences, find_resumable, has_ended, leave_together, load_ended
from dap.xnli import (
    DataArguments,
    ModelArguments,
    NLIData,
    NLISource,
    XNLITrainer,
    XNLITrainingArguments,
    accuracy,
    build_classifier,
    build_trainer,
    chosen_languages,
    find_nli,
    has_token_types,
    prepare_nli,
    training_source,
)
from encoder_dap import require_encoder
from modeling_dap import DAPForSequenceClassification, DAPModel

logger = logging.getLogger(__name__)

PROTOCOL = "XNLI, fine-tuned on English, zero-shot"
RECORD, RESULT = "run.json", "result.json"
# Arguments that each run has for itself, or that only share a step's pairs out.
OWN = {"seed", "seeds", "search", "learning_rate", "learning_rates", "selection", "keep_models"}
OWN |= {"per_device_train_batch_size", "gradient_accumulation_steps"}


def load_encoder(args: ModelArguments, max_seq_length: int) -> SentenceEncoder:
    """The encoder with its tokenizer and pooling.

    Raises:
        ValueError: it cannot be loaded, holds fewer positions, or is no encoder.
    """
    options = {"revision": args.revision, "trust_remote_code": args.trust_remote_code, "device": "cpu"}
    try:
        encoder = SentenceEncoder.from_pretrained(
            args.model_name_or_path, args.pooling, prefix="", max_seq_length=max_seq_length, **options
        )
        if not isinstance(encoder.model, DAPModel):
            require_encoder(encoder.model.config, args.model_name_or_path)
    except (ValueError, OSError) as error:  # what other libraries raise seldom names the model
        raise UserError(f"--model_name_or_path {args.model_name_or_path}: {error}") from error
    return encoder


# ------------------------------------------------------------------------------------------- runs


@dataclass
class Task:
    """What all runs share."""

    encoder: SentenceEncoder
    data: NLIData


def build_task(model_args: ModelArguments, data: DataArguments, training: XNLITrainingArguments) -> Task:
    """Encoder, and the text that this command needs."""
    found = find_nli(data.data_dir)
    source = training_source(data.train_data, found, data.data_dir)
    codes = chosen_languages(data.languages, found["test"], data.data_dir)
    dev = {code: found["dev"][code] for code in dev_languages(training, data, codes, found["dev"])}
    test = {code: found["test"][code] for code in codes}
    encoder = load_encoder(model_args, data.max_seq_length)
    types, limits = has_token_types(encoder), (data.max_train_pairs, data.max_test_pairs)
    return Task(encoder, prepare_nli(source, dev, test, encoder.tokenizer, data.max_seq_length, types, *limits))


def dev_languages(
    training: XNLITrainingArguments, data: DataArguments, codes: Sequence[str], dev: Mapping[str, NLISource]
) -> list[str]:
    """The languages whose dev sets are measured; raises `ValueError` where a search would need an absent one."""
    wanted = ["en"] if training.selection == "english" else list(codes)
    if "en" not in dev and training.eval_strategy != IntervalStrategy.NO:
        raise UserError(
            f"--eval_strategy {training.eval_strategy.value} measures English dev, which {data.data_dir} has not: add "
            "dev-en, or leave --eval_strategy out"
        )
    if training.search and (absent := [code for code in wanted if code not in dev]):
        raise UserError(
            f"--search --selection {training.selection} needs the dev sets of {' '.join(absent)}, which "
            f"{data.data_dir} has not: add dev-{{xx}} files, or leave --search out"
        )
    return [code for code in wanted if code in dev]


def keep_record(task: Task, data: DataArguments, training: XNLITrainingArguments) -> None:
    """Write down what all runs in `output_dir` share, or compare it with what an earlier command wrote.

    Raises:
        ValueError: they differ; names every difference.
    """
    path = Path(training.output_dir) / RECORD
    record = {name: value for name, value in training.to_dict().items() if changes_weights(name) and name not in OWN}
    record |= {"max_seq_length": data.max_seq_length, "model": model_fingerprint(task.encoder)}
    record |= {"training text": task.data.digests["train"], "load_best_model_at_end": training.load_best_model_at_end}
    record = json.loads(json.dumps(record, default=str))
    if not path.exists():
        if training.process_index == 0:
            write_json(record, path)
        return
    if differing := differences(json.loads(path.read_text(encoding="utf-8")), record):
        raise UserError(
            f"{path.parent} holds runs with {'; '.join(differing)}: give the same arguments, or another --output_dir"
        )
    finished = [each.parent.name for each in sorted(path.parent.glob(f"lr-*/{RESULT}"))]
    logger.info("used again from %s: %s", path.parent, ", ".join(finished) or "no finished run yet")


def run_folder(training: XNLITrainingArguments, learning_rate: float, seed: int) -> Path:
    return Path(training.output_dir) / f"lr-{learning_rate}-seed-{seed}"


def weights_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors*"))


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished run found so far; None where it has not finished."""
    path = folder / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def fine_tune(
    task: Task, training: XNLITrainingArguments, learning_rate: float, seed: int, needs_weights: bool = False
) -> dict[str, Any]:
    """One run: its result, from its folder where it has finished (and its weights are there, if they are needed).

    Raises:
        FloatingPointError: the loss is not finite.
    """
    folder = run_folder(training, learning_rate, seed)
    done = read_result(folder)
    if done is not None and (weights_of(folder) or not needs_weights):
        return done
    args = copy.copy(training)
    args.learning_rate, args.seed, args.output_dir = learning_rate, seed, str(folder)
    if done is not None and training.process_index == 0:
        (folder / RESULT).unlink()  # weights that are being written again are not yet those of a finished run
    set_seed(seed)
    model, english = build_classifier(task.encoder), task.data.dev.get("en")
    trainer = build_trainer(model, task.encoder.tokenizer, args, task.data.train, english)
    seconds, resumed = train(trainer)
    result = {"learning_rate": learning_rate, "seed": seed, "steps": trainer.state.global_step}
    result |= {"loss": last_loss(trainer), "train_seconds": seconds, "resumed_from": resumed, "dev": {}, "test": {}}
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nobody needs
    finish(trainer, result, folder)
    return result


def train(trainer: XNLITrainer) -> tuple[float, str | None]:
    """Train from the last complete checkpoint on; seconds, and the checkpoint's name."""
    started, checkpoint = time.perf_counter(), find_resumable(trainer.args)
    if checkpoint is not None and has_ended(checkpoint, trainer.args.max_steps):
        load_ended(trainer, checkpoint)  # killed after its last step: nothing is left to train
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    return round(time.perf_counter() - started, 1), checkpoint and Path(checkpoint).name


def last_loss(trainer: XNLITrainer) -> float | None:
    """The last logged training loss; raises `FloatingPointError` where it is not finite."""
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if losses and not math.isfinite(losses[-1]):
        raise FloatingPointError(
            f"the loss is {losses[-1]} with learning_rate={trainer.args.learning_rate:g}, seed={trainer.args.seed}: "
            "give a lower learning rate"
        )
    return losses[-1] if losses else None


def finish(trainer: XNLITrainer, result: dict[str, Any], folder: Path) -> None:
    """Write a run's result, and remove the checkpoints that only resuming needs."""
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        write_json(result, folder / RESULT)
        for checkpoint in sort_checkpoints(str(folder)):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()


def dev_accuracies(result: Mapping[str, Any], task: Task) -> dict[str, float]:
    return {code: result["dev"][code]["accuracy"] for code in task.data.dev}


def search(task: Task, training: XNLITrainingArguments) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate with the best dev accuracy of the first seed (the first of equals), and all that it tried."""
    if not training.search:
        return training.learning_rate, []
    seed, tried, best = training.all_seeds[0], [], None
    for rate in training.learning_rates:
        try:
            dev = dev_accuracies(measured(task, training, rate, seed, "dev"), task)
        except FloatingPointError as error:
            logger.warning("left out of the search: %s", error)
            tried.append({"learning_rate": rate, "dev_accuracy": None})
            continue
        tried.append({"learning_rate": rate, "dev_accuracy": sum(dev.values()) / len(dev)})
        better = best is None or tried[-1]["dev_accuracy"] > best["dev_accuracy"]
        loser, best = (best, tried[-1]) if better else (tried[-1], best)
        if loser is not None and not training.keep_models and training.process_index == 0:
            for path in weights_of(run_folder(training, loser["learning_rate"], seed)):
                path.unlink()
    if best is None:
        raise FloatingPointError(
            f"no loss was finite with any of learning_rates={training.learning_rates}: lower them"
        )
    return best["learning_rate"], tried


def measured(
    task: Task, training: XNLITrainingArguments, learning_rate: float, seed: int, split: str
) -> dict[str, Any]:
    """The result of a run with its accuracy on every "dev" or "test" set; what is known already stays as it is."""

    def unmeasured(result: dict[str, Any]) -> list[str]:
        texts = {code: each["text"] for code, each in result[split].items()}
        return [code for code in datasets if texts.get(code) != task.data.digests[f"{split} {code}"]]

    datasets = getattr(task.data, split)
    result = fine_tune(task, training, learning_rate, seed)
    if not unmeasured(result):
        return result
    result = fine_tune(task, training, learning_rate, seed, needs_weights=True)
    folder, args = run_folder(training, learning_rate, seed), copy.copy(training)
    args.output_dir, args.eval_strategy, args.load_best_model_at_end = str(folder), IntervalStrategy.NO, False
    model = DAPForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trainer = build_trainer(model, task.encoder.tokenizer, args)
    for code in unmeasured(result):
        started = time.perf_counter()
        found = {"accuracy": accuracy(trainer, datasets[code]), "text": task.data.digests[f"{split} {code}"]}
        result[split][code] = found | {"seconds": round(time.perf_counter() - started, 1)}
        finish(trainer, result, folder)
    return result


# ------------------------------------------------------------------------------------------- reports


def make_report(
    arguments: tuple[ModelArguments, DataArguments, XNLITrainingArguments],
    task: Task,
    result: Mapping[str, Any],
    tried: list[dict[str, Any]],
) -> dict[str, Any]:
    """The report of one seed: accuracy in percent by language and their mean."""
    model_args, data, training = arguments
    names = ("total_train_batch_size", "num_train_epochs", "weight_decay", "warmup_steps", "max_steps", "bf16")
    settings = {"learning_rate": result["learning_rate"]} | {name: getattr(training, name) for name in names}
    settings |= {"pooling": task.encoder.pooling, "max_seq_length": data.max_seq_length, "data": data.data_dir}
    settings |= {"train_data": data.train_data, "train_pairs": len(task.data.train)}
    settings |= {"max_test_pairs": data.max_test_pairs}
    settings |= {"selection": training.selection if tried else None, "search": tried, "missing": task.data.missing}
    tested = {code: result["test"][code] for code in task.data.test}
    languages = {code: {"pairs": len(task.data.test[code]), "accuracy": tested[code]["accuracy"]} for code in tested}
    mean = sum(each["accuracy"] for each in languages.values()) / len(languages)
    numbers = {
        "languages": languages,
        "mean": {"languages": len(languages), "accuracy": mean},
    }
    numbers["dev"] = {code: {"accuracy": accuracy} for code, accuracy in dev_accuracies(result, task).items()}
    seconds = result["train_seconds"] + sum(each["seconds"] for each in tested.values())
    revision = task.encoder.revision or model_args.revision
    return report(model_args.model_name_or_path, PROTOCOL, numbers, settings, seconds, revision, result["seed"])


def write_reports(reports: Mapping[int, Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """`xnli.json`: the one report, or the mean and standard deviation of several, which are written beside it."""
    if len(reports) == 1:
        (content,) = reports.values()
    else:
        paths = {folder / f"xnli-seed-{seed}.json": each for seed, each in reports.items()}
        for path, each in paths.items():
            write_json(each, path)
        content = merge_seeds({str(path): each for path, each in paths.items()})
    write_json(content, folder / "xnli.json")
    return dict(content)


def summary(content: Mapping[str, Any], tried: list[dict[str, Any]], missing: Sequence[str], name: str) -> str:
    """The tables a user sees: the search, the languages, and the paper's numbers."""
    tables = []
    if tried:
        rows = [[f"{each['learning_rate']:g}", each["dev_accuracy"]] for each in tried]
        tables.append(text_table(["learning rate", "dev accuracy"], rows))
    spread = {code: as_spread(each["accuracy"]) for code, each in content["languages"].items()}
    rows = [[f"{code}  {NAMES[code]}", content["languages"][code]["pairs"], *spread[code]] for code in spread]
    rows.append(
        [f"mean of {len(spread)} of {len(XNLI_LANGUAGES)} languages", "", *as_spread(content["mean"]["accuracy"])]
    )
    tables.append(text_table(["language", "pairs", "accuracy", "sd"], rows))
    if missing:
        tables.append(f"not tested, as there is no test set or it was not asked for: {' '.join(missing)}")
    tables.append(xnli_table({code: mean for code, (mean, _) in spread.items()}, name))
    return "\n\n".join(tables)


def as_spread(accuracy: float | Mapping[str, float | None]) -> tuple[float, float | None]:
    """Mean and standard deviation of a number in a report of one seed or of several."""
    return (accuracy, None) if isinstance(accuracy, float) else (accuracy["mean"], accuracy["sd"])


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Fine-tunes and tests as the command line `argv` says (None: the process's own); returns what it writes.

    Raises:
        ValueError: arguments or data that do not fit, or a model that cannot be loaded.
        FileNotFoundError: no such data.
        FloatingPointError: the training diverged.
    """
    parser = HfArgumentParser((ModelArguments, DataArguments, XNLITrainingArguments), allow_abbrev=False)
    model_args, data, training = parser.parse_args_into_dataclasses(args=argv)
    with training.main_process_first(desc="reading and tokenising"):
        task = build_task(model_args, data, training)
    keep_record(task, data, training)
    rate, tried = search(task, training)
    results = {}
    for seed in training.all_seeds:
        measured(task, training, rate, seed, "dev")
        results[seed] = measured(task, training, rate, seed, "test")
    reports = {seed: make_report((model_args, data, training), task, each, tried) for seed, each in results.items()}
    if training.process_index != 0:
        return reports[training.all_seeds[0]]
    content = write_reports(reports, Path(training.output_dir))
    print(summary(content, tried, task.data.missing, Path(model_args.model_name_or_path).name))
    print(f"written to {Path(training.output_dir) / 'xnli.json'}")
    return content


def main() -> None:
    """The command: `run`, whose expected errors end it with status 1 and one message."""
    logging.basicConfig(
        format="%(message)s", level=logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.ERROR
    )
    try:
        run()
        leave_together()
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
