"""XNLI: fine-tune an encoder on English inference pairs and test it, without more training, in 15 languages.

    accelerate launch run_xnli.py --model_name_or_path out --data_dir xnli/ --train_data mnli.tsv --output_dir xnli-out

`--data_dir` takes a folder with `dev-{xx}.tsv` and `test-{xx}.tsv` (dap/xnli/nli_data.py says more), or a Hub id such as
`facebook/xnli`. Each pair of learning rate and seed is a run of its own in `output_dir`: finished ones are used again,
and a stopped one goes on from its checkpoint when the same command is given again.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import config as datasets_config
from transformers.trainer_utils import IntervalStrategy

from dap.arguments import ArgumentParser, arg, require_least
from dap.commands import command, guarded
from dap.encoding import BaseEncoderArguments, SentenceEncoder, model_fingerprint
from dap.errors import UserError, refusals
from dap.file_io import disk_full, read_json, write_json
from dap.languages import NAMES, XNLI_LANGUAGES
from dap.reports import merge_seeds, paper_beside, report, text_table
from dap.tokenizers import require_padding
from dap.training import changes_weights, differences, leave_together
from dap.xnli import (
    RESULT,
    NLISource,
    Task,
    XNLITrainingArguments,
    chosen_languages,
    find_nli,
    has_token_types,
    measured,
    prepare_nli,
    search,
    training_source,
)
from encoder_dap import require_encoder
from modeling_dap import DAPModel

logger = logging.getLogger(__name__)

PROTOCOL = "XNLI, fine-tuned on English, zero-shot"
RECORD = "run.json"
# Arguments that each run has for itself, or that only share a step's pairs out.
OWN = {
    *("seed", "seeds", "search", "learning_rate", "learning_rates", "selection", "keep_models"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
}


@dataclass
class DataArguments:
    """English pairs to fine-tune on, and dev and test sets by language."""

    data_dir: str = arg(
        "facebook/xnli", "Folder with dev-{xx} and test-{xx} files, or a Hub dataset id."
    )
    train_data: str | None = arg(
        None,
        "English pairs: file, folder or Hub id (nyu-mll/multi_nli). Default: train-en of data_dir.",
    )
    languages: list[str] | None = arg(
        None, "Languages to test, such as 'en de sw'. Default: all of the 15 in data_dir."
    )
    max_seq_length: int = arg(128, "Tokens a pair is cut to.")
    max_train_pairs: int | None = arg(None, "Only the first pairs of the training data.")
    max_test_pairs: int | None = arg(None, "Only the first pairs of each test set.")

    def __post_init__(self) -> None:
        require_least(self, max_train_pairs=1, max_test_pairs=1)


def build_task(
    model_args: BaseEncoderArguments, data: DataArguments, training: XNLITrainingArguments
) -> Task:
    """Load the encoder, and read and tokenise the text that this command needs.

    Raises:
        ValueError: the encoder cannot be loaded, holds fewer positions or is none; data that is absent or damaged.
    """
    found = find_nli(data.data_dir)
    source = training_source(data.train_data, found, data.data_dir)
    codes = chosen_languages(data.languages, found["test"], data.data_dir)
    dev = {code: found["dev"][code] for code in dev_languages(training, data, codes, found["dev"])}
    test = {code: found["test"][code] for code in codes}
    options = {
        "revision": model_args.revision,
        "trust_remote_code": model_args.trust_remote_code,
        "device": "cpu",
    }
    options |= {"prefix": "", "max_seq_length": data.max_seq_length}
    encoder = SentenceEncoder.from_pretrained(
        model_args.model_name_or_path, model_args.pooling, **options
    )
    require_padding(encoder.tokenizer, model_args.model_name_or_path)
    if not isinstance(encoder.model, DAPModel):
        with refusals():
            require_encoder(encoder.model.config, model_args.model_name_or_path)
    types, limits = has_token_types(encoder), (data.max_train_pairs, data.max_test_pairs)
    text = prepare_nli(source, dev, test, encoder.tokenizer, data.max_seq_length, types, *limits)
    return Task(encoder, text, training)


def dev_languages(
    training: XNLITrainingArguments,
    data: DataArguments,
    codes: Sequence[str],
    dev: Mapping[str, NLISource],
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


def keep_record(task: Task, data: DataArguments) -> None:
    """Write down what all runs in `output_dir` share, or compare it with what an earlier command wrote.

    Raises:
        ValueError: they differ; names every difference.
    """
    training, path = task.training, Path(task.training.output_dir) / RECORD
    record = {
        name: value
        for name, value in training.to_dict().items()
        if changes_weights(name) and name not in OWN
    }
    record |= {"max_seq_length": data.max_seq_length, "model": model_fingerprint(task.encoder)}
    record |= {
        "training text": task.data.digests["train"],
        "load_best_model_at_end": training.load_best_model_at_end,
    }
    record = json.loads(json.dumps(record, default=str))
    if not path.exists():
        if training.process_index == 0:
            write_json(record, path)
        return
    if differing := differences(read_json(path), record):
        raise UserError(
            f"{path.parent} holds runs with {'; '.join(differing)}: give the same arguments, or another --output_dir"
        )
    finished = [each.parent.name for each in sorted(path.parent.glob(f"lr-*/{RESULT}"))]
    logger.info("used again from %s: %s", path.parent, ", ".join(finished) or "no finished run yet")


def make_report(
    model_args: BaseEncoderArguments,
    data: DataArguments,
    task: Task,
    result: Mapping[str, Any],
    tried: list[dict[str, Any]],
) -> dict[str, Any]:
    """The report of one seed: accuracy in percent by language and their mean."""
    training = task.training
    names = (
        "total_train_batch_size",
        "num_train_epochs",
        "weight_decay",
        "warmup_steps",
        "max_steps",
        "bf16",
    )
    settings = {"learning_rate": result["learning_rate"]} | {
        name: getattr(training, name) for name in names
    }
    settings |= {
        "pooling": task.encoder.pooling,
        "max_seq_length": data.max_seq_length,
        "data": data.data_dir,
    }
    settings |= {"train_data": data.train_data, "train_pairs": len(task.data.train)}
    settings |= {"max_test_pairs": data.max_test_pairs}
    settings |= {
        "selection": training.selection if tried else None,
        "search": tried,
        "missing": task.data.missing,
    }
    tested = {code: result["test"][code] for code in task.data.test}
    languages = {
        code: {"pairs": len(task.data.test[code]), "accuracy": tested[code]["accuracy"]}
        for code in tested
    }
    mean = sum(each["accuracy"] for each in languages.values()) / len(languages)
    numbers = {"languages": languages, "mean": {"languages": len(languages), "accuracy": mean}}
    numbers["dev"] = {
        code: {"accuracy": accuracy} for code, accuracy in task.dev_accuracies(result).items()
    }
    seconds = result["train_seconds"] + sum(each["seconds"] for each in tested.values())
    revision = task.encoder.revision or model_args.revision
    return report(
        model_args.model_name_or_path,
        PROTOCOL,
        numbers,
        settings,
        seconds,
        revision,
        result["seed"],
    )


def write_reports(reports: Mapping[int, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """`xnli.json`: the one report, or the mean and standard deviation of several, which are written beside it."""
    if len(reports) == 1:
        (content,) = reports.values()
    else:
        paths = {str(folder / f"xnli-seed-{seed}.json"): each for seed, each in reports.items()}
        for path, each in paths.items():
            write_json(each, path)
        content = merge_seeds(paths)
    write_json(content, folder / "xnli.json")
    return content


def summary(content: Mapping[str, Any], tried: list[dict[str, Any]], missing: Sequence[str]) -> str:
    """The tables a user sees: the search, the languages, and the paper's numbers."""
    tables = []
    if tried:
        rows = [[f"{each['learning_rate']:g}", each["dev_accuracy"]] for each in tried]
        tables.append(text_table(["learning rate", "dev accuracy"], rows))
    spread = {code: as_spread(each["accuracy"]) for code, each in content["languages"].items()}
    rows = [
        [f"{code}  {NAMES[code]}", content["languages"][code]["pairs"], *spread[code]]
        for code in spread
    ]
    label = f"mean of {len(spread)} of {len(XNLI_LANGUAGES)} languages"
    rows.append([label, "", *as_spread(content["mean"]["accuracy"])])
    tables.append(text_table(["language", "pairs", "accuracy", "sd"], rows))
    if missing:
        tables.append(
            f"not tested, as there is no test set or it was not asked for: {' '.join(missing)}"
        )
    return "\n\n".join([*tables, paper_beside(content)])


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
    parser = ArgumentParser(
        (BaseEncoderArguments, DataArguments, XNLITrainingArguments), allow_abbrev=False
    )
    model_args, data, training = parser.parse_args_into_dataclasses(args=argv)
    is_main, folders = training.process_index == 0, {"--output_dir": training.output_dir}
    with guarded(folders=folders, model=model_args.model_name_or_path, is_writer=is_main):
        with (
            training.main_process_first(desc="reading and tokenising"),
            disk_full(Path(datasets_config.HF_DATASETS_CACHE)),
        ):
            task = build_task(model_args, data, training)
        keep_record(task, data)
        rate, tried = search(task)
        reports = {}
        for seed in training.all_seeds:
            measured(task, rate, seed, "dev")
            reports[seed] = make_report(
                model_args, data, task, measured(task, rate, seed, "test"), tried
            )
        if not is_main:
            return reports[training.all_seeds[0]]
        content = write_reports(reports, Path(training.output_dir))
        print(summary(content, tried, task.data.missing))
        print(f"written to {Path(training.output_dir) / 'xnli.json'}")
    return content


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `run`."""
    logging.basicConfig(
        format="%(message)s",
        level=logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.ERROR,
    )
    run(argv)
    leave_together()


if __name__ == "__main__":
    main()
