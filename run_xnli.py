"""Fine-tune an encoder on English XNLI, and test it in 15 languages without further training.

    accelerate launch run_xnli.py --model_name_or_path out --data_dir xnli/ --train_data mnli.tsv \\
        --output_dir xnli-out

`--data_dir` takes a folder with `dev-{xx}.tsv` and `test-{xx}.tsv` (see
dap_transformers/xnli/data.py), or a
Hub id such as `facebook/xnli`. Each pair of learning rate and seed is a run with its own folder in
`output_dir`. If you give the same command again, finished runs are used again and a stopped run
continues from its checkpoint.
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

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.edge import command, guarded
from dap_transformers.commands.encoder_arguments import BaseEncoderArguments
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import model_fingerprint
from dap_transformers.errors import UserError, refusals
from dap_transformers.evaluation.paper import xnli_table
from dap_transformers.files import disk_full, public_name, read_json, write_json
from dap_transformers.languages import NAMES, XNLI_LANGUAGES
from dap_transformers.options import arg, require_least
from dap_transformers.reports import mean_of, merge_seeds, report
from dap_transformers.tables import text_table
from dap_transformers.tokenizers import require_padding
from dap_transformers.training.resume import changes_weights, differences
from dap_transformers.xnli.data import (
    NLISource,
    chosen_languages,
    find_nli,
    prepare_nli,
    training_source,
)
from dap_transformers.xnli.finetuning import (
    RESULT,
    Task,
    XNLITrainingArguments,
    has_token_types,
    measured,
    search,
)
from encoder_dap import require_encoder
from modeling_dap import DAPModel

logger = logging.getLogger(__name__)

PROTOCOL = "XNLI, fine-tuned on English, zero-shot"
RECORD = "run.json"
#: Arguments that may differ between the runs in one output folder.
MAY_DIFFER = {
    "seed",
    "seeds",
    "search",
    "learning_rate",
    "learning_rates",
    "selection",
    "keep_models",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
}
#: Arguments that a report shows.
SHOWN = (
    "total_train_batch_size",
    "num_train_epochs",
    "weight_decay",
    "warmup_steps",
    "max_steps",
    "bf16",
)


@dataclass
class XNLIDataArguments:
    """Command-line arguments that choose the text: training pairs, dev sets and test sets."""

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
    max_seq_length: int = arg(128, "Maximum number of tokens of a pair. Longer pairs are cut.")
    max_train_pairs: int | None = arg(None, "Use only the first pairs of the training data.")
    max_test_pairs: int | None = arg(None, "Use only the first pairs of each test set.")

    def __post_init__(self) -> None:
        require_least(self, max_train_pairs=1, max_test_pairs=1)


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Fine-tune an encoder on XNLI and test it, as the command line says.

    Args:
        argv: the command line. None takes the process's own.

    Returns:
        The report that is written to `xnli.json`. In a launch of several processes, only the
        first one writes it, and the others return the report of the first seed.
    """
    is_first_process = int(os.environ.get("RANK", 0)) == 0
    level = logging.INFO if is_first_process else logging.ERROR
    logging.basicConfig(format="%(message)s", level=level)
    types = (BaseEncoderArguments, XNLIDataArguments, XNLITrainingArguments)
    parser = ArgumentParser(types, allow_abbrev=False)
    model_args, data, training = parser.parse_args_into_dataclasses(args=argv)

    folder = Path(training.output_dir)
    is_writer = training.process_index == 0
    folders = {"--output_dir": folder}
    inputs = [data.data_dir, *filter(None, [data.train_data])]
    with guarded(None, folders, inputs, model_args.model_name_or_path, is_writer):
        waiting = training.main_process_first(desc="reading and tokenising")
        with waiting, disk_full(Path(datasets_config.HF_DATASETS_CACHE)):
            task = build_task(model_args, data, training)
        keep_record(task, data)

        learning_rate, tried = search(task)
        reports = {}
        for seed in training.all_seeds:
            measured(task, learning_rate, seed, "dev")
            result = measured(task, learning_rate, seed, "test")
            reports[seed] = make_report(model_args, data, task, result, tried)
        if not is_writer:
            return reports[training.all_seeds[0]]

        content = write_reports(reports, folder)
        print(summary(content, tried, task.data.missing))
        print(f"written to {folder / 'xnli.json'}")
    return content


def build_task(
    model_args: BaseEncoderArguments, data: XNLIDataArguments, training: XNLITrainingArguments
) -> Task:
    """Load the encoder, and read and tokenise all text.

    Args:
        model_args: which encoder.
        data: which text.
        training: arguments of all fine-tuning runs.

    Returns:
        The encoder, the tokenised text and the arguments, which the fine-tuning runs share.
    """
    found = find_nli(data.data_dir)
    train = training_source(data.train_data, found, data.data_dir)
    test_codes = chosen_languages(data.languages, found["test"], data.data_dir)
    dev_codes = dev_languages(training, data, test_codes, found["dev"])

    name = model_args.model_name_or_path
    encoder = SentenceEncoder.from_pretrained(
        name,
        model_args.pooling,
        revision=model_args.revision,
        trust_remote_code=model_args.trust_remote_code,
        device="cpu",
        prefix="",
        max_seq_length=data.max_seq_length,
        only_transformer=True,  # a classifier comes after the pooling instead
    )
    require_padding(encoder.tokenizer, name)
    if not isinstance(encoder.model, DAPModel):
        with refusals():
            require_encoder(encoder.model.config, name)

    text = prepare_nli(
        train,
        {code: found["dev"][code] for code in dev_codes},
        {code: found["test"][code] for code in test_codes},
        encoder.tokenizer,
        data.max_seq_length,
        has_token_types(encoder),
        data.max_train_pairs,
        data.max_test_pairs,
    )
    return Task(encoder, text, training)


def dev_languages(
    training: XNLITrainingArguments,
    data: XNLIDataArguments,
    test_codes: Sequence[str],
    dev: Mapping[str, NLISource],
) -> list[str]:
    """Choose the languages whose dev sets are measured, by `--selection`.

    Args:
        training: says whether dev sets choose the learning rate, and which languages' sets: only
            English, or all.
        data: says where the text is, for error messages.
        test_codes: codes of the languages to test.
        dev: language code -> where its dev set is.

    Returns:
        Codes of the languages that `--selection` asks for and that have a dev set.
    """
    wanted = ["en"] if training.selection == "english" else list(test_codes)
    if "en" not in dev and training.eval_strategy != IntervalStrategy.NO:
        raise UserError(
            f"--eval_strategy {training.eval_strategy.value} needs the English dev set, which "
            f"{data.data_dir} lacks: add dev-en, or leave --eval_strategy out"
        )
    absent = [code for code in wanted if code not in dev]
    if training.search and absent:
        raise UserError(
            f"--search --selection {training.selection} needs the dev sets of {' '.join(absent)}, "
            f"which {data.data_dir} lacks: add dev-{{xx}} files, or leave --search out"
        )
    return [code for code in wanted if code in dev]


def keep_record(task: Task, data: XNLIDataArguments) -> None:
    """Record the settings that all runs in `output_dir` share, or compare them with the record.

    The record is `output_dir/run.json`. The first command writes it. A later command must have the
    same settings, so that runs of different settings never meet in one report.

    Args:
        task: encoder, text and arguments of all runs.
        data: arguments that choose the text.
    """
    training = task.training
    folder = Path(training.output_dir)
    record = {}
    for name, value in training.to_dict().items():
        if changes_weights(name) and name not in MAY_DIFFER:
            record[name] = value
    record["max_seq_length"] = data.max_seq_length
    record["model"] = model_fingerprint(task.encoder)
    record["training text"] = task.data.digests["train"]
    record["load_best_model_at_end"] = training.load_best_model_at_end
    record = json.loads(json.dumps(record, default=str))  # as it is read from the file

    path = folder / RECORD
    if not path.exists():
        if training.process_index == 0:
            write_json(record, path)
        return
    if differing := differences(read_json(path), record):
        raise UserError(
            f"{folder} holds runs with {'; '.join(differing)}: give the same arguments, or another "
            "--output_dir"
        )
    finished = [result.parent.name for result in sorted(folder.glob(f"lr-*/{RESULT}"))]
    logger.info("used again from %s: %s", folder, ", ".join(finished) or "no finished run yet")


def make_report(
    model_args: BaseEncoderArguments,
    data: XNLIDataArguments,
    task: Task,
    result: Mapping[str, Any],
    tried: list[dict[str, Any]],
) -> dict[str, Any]:
    """Make the report of one seed: accuracy in percent by language, and their mean.

    It also has the dev accuracies, and the settings. Nothing is written.

    Args:
        model_args: which encoder.
        data: which text.
        task: encoder, text and arguments of all runs.
        result: what `measured` returned for this seed, with dev and test accuracies.
        tried: learning rates that `search` tried, with their dev accuracies. Empty without search.
    """
    training = task.training
    settings = {"learning_rate": result["learning_rate"]}
    for name in SHOWN:
        settings[name] = getattr(training, name)
    settings |= {
        "pooling": task.encoder.pooling,
        "max_seq_length": data.max_seq_length,
        "data": public_name(data.data_dir),
        "train_data": public_name(data.train_data) if data.train_data else None,
        "train_pairs": len(task.data.train),
        "max_test_pairs": data.max_test_pairs,
        "selection": training.selection if tried else None,
        "search": tried,
        "missing": task.data.missing,
    }

    languages = {}
    seconds = result["train_seconds"]
    for code, dataset in task.data.test.items():
        tested = result["test"][code]
        languages[code] = {"pairs": len(dataset), "accuracy": tested["accuracy"]}
        seconds += tested["seconds"]
    mean = sum(numbers["accuracy"] for numbers in languages.values()) / len(languages)
    dev = {code: {"accuracy": value} for code, value in task.dev_accuracies(result).items()}
    return report(
        model_args.model_name_or_path,
        PROTOCOL,
        {
            "languages": languages,
            "mean": {"languages": len(languages), "accuracy": mean},
            "dev": dev,
        },
        settings,
        seconds,
        task.encoder.revision or model_args.revision,
        result["seed"],
    )


def write_reports(reports: Mapping[int, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Write `xnli.json`. For several seeds, also write a report of each seed beside it.

    Args:
        reports: seed -> report.
        folder: where to write.

    Returns:
        The content of `xnli.json`: the only report, or the merged one.
    """
    if len(reports) == 1:
        (content,) = reports.values()
    else:
        for seed, each in reports.items():
            write_json(each, folder / f"xnli-seed-{seed}.json")
        content = merge_seeds(list(reports.values()))
    write_json(content, folder / "xnli.json")
    return content


def summary(content: Mapping[str, Any], tried: list[dict[str, Any]], missing: Sequence[str]) -> str:
    """Format the results as text for the terminal.

    Args:
        content: the report of one seed, or the merged one of several seeds.
        tried: learning rates that `search` tried, with their dev accuracies. Empty without search.
        missing: codes of the XNLI languages that were not tested.

    Returns:
        A table of the search if there was one, a table by language, and the paper's results.
    """
    parts = []
    if tried:
        rows = [[f"{each['learning_rate']:g}", each["dev_accuracy"]] for each in tried]
        parts.append(text_table(["learning rate", "dev accuracy"], rows))

    rows = []
    for code, numbers in content["languages"].items():
        mean, sd = mean_and_deviation(numbers["accuracy"])
        rows.append([f"{code}  {NAMES[code]}", numbers["pairs"], mean, sd])
    mean, sd = mean_and_deviation(content["mean"]["accuracy"])
    rows.append([f"mean of {len(rows)} of {len(XNLI_LANGUAGES)} languages", "", mean, sd])
    parts.append(text_table(["language", "pairs", "accuracy", "sd"], rows))

    if missing:
        parts.append(f"not tested (no test set, or not asked for): {' '.join(missing)}")
    name = Path(content["model"]).name
    if "n" in content:
        name += f" (n={content['n']})"
    accuracies = {}
    for code, numbers in content["languages"].items():
        accuracies[code] = mean_of(numbers["accuracy"])
    parts.append(xnli_table(accuracies, name))
    return "\n\n".join(parts)


def mean_and_deviation(accuracy: float | Mapping[str, float]) -> tuple[float, float | None]:
    """Return mean and standard deviation of an accuracy in a report.

    Args:
        accuracy: a number in a report of one seed, or {"mean", "sd"} in a merged report.

    Returns:
        The mean, and the standard deviation over seeds. The latter is None for one seed.
    """
    if isinstance(accuracy, float):
        return accuracy, None
    return accuracy["mean"], accuracy["sd"]


main = command(run)


if __name__ == "__main__":
    main()
