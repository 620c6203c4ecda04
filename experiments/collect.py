"""Merge the results of a study's runs into one file, `experiments/results/STUDY.json`.

    python -m experiments.collect experiments/recipes/warm.yaml --results_dir runs/results

`experiments.run` writes a full JSON file per run. The merged file keeps what tables and figures
need: the final numbers, the settings, and the training losses of the compared methods. The runs of
a study must have been trained as their recipe says, and all models must have been evaluated in the
same way. Otherwise the command refuses.

The merged file is written anew. With `--keep`, results stay in it although their files in
`--results_dir` are gone. The same checks decide whether they still fit.
"""

import argparse
import hashlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dap_transformers.commands.edge import command
from dap_transformers.errors import UserError
from dap_transformers.files import read_object
from experiments.reading import read_evaluations, read_study_file, write_study_file
from experiments.recipes import Recipe, Run, flags, read_recipe
from experiments.statistics import ALIGNMENT, ORDER, Outcome, label_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
KEYS = (
    "recipe",
    "run",
    "seed",
    "learning_rate",
    "record",
    "train",
    "dev",
    "curve",
    "evaluations",
    "machine",
    "versions",
)
LOSSES = ("tr_loss", "rtl_loss", "tlm_loss", "bow_loss")
#: What is kept of the training of the heads: distinct pairs, steps and CPU seconds.
HEAD_NUMBERS = ("pairs", "steps", "cpu_seconds")
#: Settings of an evaluation that may differ between compared models: places, and the model itself.
FREE = ("recipe", "data", "bucc", "train_data", "pooling")
#: Prefixes of arguments that cannot change the weights. A record does not have them.
HARMLESS = (
    "logging_",
    "save_",
    "eval_",
    "report_to",
    "use_cpu",
    "load_best_",
    "metric_for_best_",
    "mini_batch_size",
)
#: Arguments that a record has under another name.
RECORDED = {"total_train_batch_size": "pairs a step"}
#: Entries of a record that depend on the seed.
OF_THE_SEED = ("seed", "data_seed", "training text", "dev text")
#: Entries of a record that describe text. The merged file has a hash of each.
TEXTS = ("training text", "dev text")
#: Settings in the merged file that do not come from the record of a training.
ADDED = ("heads", "command", "commit", "encoder", "machine", "versions")
#: Entries of a record that follow from other arguments or from the place of a file.
FOLLOWS = (
    "target_vocab_size",
    "rtl_languages",
    "tr_temperature",
    "learning_rate",
    "model_name_or_path",
)


def read_runs(folder: Path, recipe: Recipe) -> dict[Path, dict[str, Any]]:
    """Read the result file of every training, `RUN-lrRATE/seed-N.json`.

    Args:
        folder: folder of the study's results.
        recipe: the study's recipe.

    Returns:
        File -> its content, which is the result of one run with one seed.

    Raises:
        UserError: there is no such file. Or a file is no result of a run, is in the wrong place, or
            its run is not in the recipe.
    """
    found = {}
    for path in sorted(folder.glob("*/seed-*.json")):
        content = read_object(path)
        lacking = [key for key in KEYS if key not in content]
        if lacking:
            names = ", ".join(lacking)
            raise UserError(f"{path} has no {names}: it is no result of experiments.run")
        name = f"{content['run']}-lr{content['learning_rate']:g}/seed-{content['seed']}.json"
        if path != folder / name or content["recipe"] != recipe.name:
            raise UserError(f"{path} is the result {content['recipe']}/{name}: move it there")
        if content["run"] not in recipe.runs:
            raise UserError(f"{path}: the recipe {recipe.name} has no run {content['run']}")
        found[path] = content
    if not found:
        raise UserError(f"{folder} has no RUN-lrRATE/seed-N.json: run experiments.run first")
    return found


def require_trained_as_told(path: Path, content: Mapping[str, Any], run: Run) -> None:
    """Raise a `UserError` if a result was trained with other arguments than its recipe has now.

    Learning rate and number of steps are not compared where `experiments.run` chooses them. Paths
    that the recipe has in braces are not compared either.

    Args:
        path: result file, for the message.
        content: content of the file.
        run: the run as the recipe defines it.
    """
    told = {RECORDED.get(key, key): value for key, value in run.arguments.items()}
    told.pop("learning_rate", None)  # the runner fills in both
    if run.same_time_as or run.total_time_as:
        told.pop("max_steps", None)
    told["command"] = run.command

    line = content.get("command") or [run.command]  # old results have no command
    trained = {**content["record"], "command": line[0]}
    for key, value in told.items():
        if isinstance(value, str) and "{" in value:  # a place
            continue
        if key in trained and trained[key] != value:
            text = f"trained with {key} {trained[key]}, but {run.name} has {value}"
            raise UserError(f"{path}: {text}: train it anew")
        is_checked = key in trained or key.startswith(HARMLESS) or len(line) == 1
        given = shlex.join(flags({key: value}))
        if given and not is_checked and f" {given} " not in f"{shlex.join(line)} ":
            raise UserError(f"{path}: trained without {given}: train it anew")


def require_comparable(contents: Mapping[Path, Mapping[str, Any]], runs: Mapping[str, Run]) -> None:
    """Raise a `UserError` if two models differ in something that the recipe does not mention.

    Such models cannot be compared. Examples are another training text for the same seed, other
    settings of an evaluation, a changed default of an argument, and other weights of the encoder in
    the same folder.

    Args:
        contents: result file -> its content.
        runs: name -> run of the recipe.
    """
    first: dict[tuple[Any, ...], tuple[Path, Any]] = {}
    for path, content in contents.items():
        facts = [*_training_facts(content, runs[content["run"]]), *_evaluation_facts(content)]
        for about, value in facts:
            other, theirs = first.setdefault(about, (path, value))
            if value == theirs:
                continue
            what = about[0]
            if isinstance(theirs, dict) and isinstance(value, dict):
                differing = [key for key in theirs | value if theirs.get(key) != value.get(key)]
                part = min(differing)
                what = f"{part} of {what}"
                theirs = theirs.get(part)
                value = value.get(part)
            text = f"{other} and {path} differ in {what} ({theirs!r} and {value!r})"
            raise UserError(f"{text}, which the recipe does not tell: make one anew")


def _training_facts(
    content: Mapping[str, Any], run: Run
) -> Iterator[tuple[tuple[Any, ...], object]]:
    """Yield the settings of a training that comparable models must have in common.

    Models are comparable if they start from the same encoder and train on the same text. Arguments
    that the recipe gives are left out, because there a difference is intended.

    Args:
        content: content of a result file.
        run: the run as the recipe defines it.

    Yields:
        A key and a value. The key is a tuple: name of the setting, encoder and text, and the seed
        if the setting depends on it. All models with the same key must have the same value.
    """
    told = {RECORDED.get(key, key) for key in run.arguments}
    start = (run.arguments.get("model_name_or_path"), run.arguments.get("train_data"))
    record = content["record"] | {"encoder": content.get("encoder")}
    for key, value in record.items():
        if value is not None and key not in told and key not in FOLLOWS:
            seed = content["seed"] if key in OF_THE_SEED else None
            yield (key, start, seed), value


def _evaluation_facts(content: Mapping[str, Any]) -> Iterator[tuple[tuple[str], dict[str, Any]]]:
    """Yield the protocol and settings of each evaluation, which all models of a study must share.

    Args:
        content: content of a result file.

    Yields:
        A key and its facts for each evaluation: the key is a tuple with the evaluation's name, and
        the facts are the result of `how_evaluated`.
    """
    for name, report in content["evaluations"].items():
        yield (name,), how_evaluated(report)


def how_evaluated(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the protocol and the settings of an evaluation's report that all models must share.

    The settings in `FREE` and those without a value are left out.

    Args:
        report: the JSON report of an evaluation command.

    Returns:
        "protocol" and the names of settings -> their values.
    """
    made = {"protocol": report.get("protocol")} | report.get("settings", {})
    return {key: value for key, value in made.items() if key not in FREE and value is not None}


# --------------------------------------------------------------------------------------- merging


def outcome_of(content: Mapping[str, Any], keeps_losses: bool) -> Outcome:
    """Return the part of a run's result that tables and figures need.

    Args:
        content: content of a result file.
        keeps_losses: keep the losses of the training, for the figure. Otherwise they are left out.

    Returns:
        The outcome, without the details that no table shows.
    """
    machine = content["machine"]
    settings = {key: value for key, value in content["record"].items() if value is not None}
    for key in TEXTS:
        settings[key] = digest_of_text(settings.pop(key, None))
    for key in OF_THE_SEED[:2]:
        settings.pop(key, None)
    if content.get("heads"):
        settings["heads"] = {name: content["heads"][name] for name in HEAD_NUMBERS}
    settings["pairs_per_step"] = settings.pop("pairs a step")
    settings["command"] = (content.get("command") or ["train_dap.py"])[0]
    settings["commit"] = (content.get("commit") or "not recorded")[:7]
    settings["encoder"] = content.get("encoder")
    settings["machine"] = f"{machine['gpu'] or machine['cpu']}, threads: {machine['threads']}"
    settings["versions"] = content["versions"]
    rate = content["learning_rate"]
    return Outcome(
        run=content["run"],
        seed=content["seed"],
        learning_rate=rate,
        steps=content["train"]["model_step"] if rate else 0,  # without training: the start
        pairs_per_step=content["record"]["pairs a step"],
        settings=settings,
        dev={name: round(value, 4) for name, value in content["dev"].items()},
        losses=losses_of(content["curve"]) if keeps_losses else {},
        results={name: numbers_of(report) for name, report in content["evaluations"].items()},
    )


def digest_of_text(described: object) -> str:
    """Return a hash of a record's description of text, which tells texts apart as well."""
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def losses_of(curve: Sequence[Mapping[str, float]]) -> dict[str, list[list[float]]]:
    """Return name of a loss -> its curve: [step, value] of each log, with 4 significant digits.

    Args:
        curve: the logs of a training, each with its step and losses.
    """
    found = {}
    for key in LOSSES:
        points = [[line["step"], float(f"{line[key]:.4g}")] for line in curve if key in line]
        if points:
            found[key] = points
    return found


def numbers_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an evaluation's report that tables show.

    Args:
        report: the JSON report of an evaluation command.

    Returns:
        The report with fewer keys, also in the inner dictionaries. What is kept:

        - Retrieval: "averages". With hard negatives, "hard_negatives" instead (the mean error).
        - `experiments.measure_sentences`: "averages", "hard_negatives" and "sentences".
        - BUCC: "pairs". XNLI: "mean". Word alignment: "mean" and "languages".
    """
    found: dict[str, Any] = {}
    if "averages" in report and ("hard_negatives" not in report or "sentences" in report):
        found["averages"] = report["averages"]  # retrieval
    if "sentences" in report:
        found["sentences"] = report["sentences"]
    if "hard_negatives" in report:
        found["hard_negatives"] = {"mean": {"error": report["hard_negatives"]["mean"]["error"]}}
    if "pairs" in report:  # BUCC
        for pair, row in report["pairs"].items():
            numbers = {key: row[key] for key in ("f1", "precision", "recall")}
            found.setdefault("pairs", {})[pair] = numbers
    if "accuracy" in report.get("mean", {}):  # XNLI
        found["mean"] = {"accuracy": report["mean"]["accuracy"]}
    if "AER" in report.get("mean", {}):  # word alignment
        found["mean"] = {name: report["mean"][name] for name in ALIGNMENT}
        languages = report["languages"].items()
        found["languages"] = {code: {"AER": row["AER"]} for code, row in languages}
    return found


@dataclass(frozen=True)
class Kept:
    """What stays in a study's merged file although the result files are gone.

    Attributes:
        outcomes: name of the lost result file, without its folder -> the result.
        step_seconds: name of a run -> CPU seconds of a training step.
        evaluations: name of an evaluation -> its protocol and settings.
    """

    outcomes: Mapping[Path, Outcome] = field(default_factory=dict)
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def contents(self, path: Path) -> dict[Path, dict[str, Any]]:
        """Return what is known of the lost result files, in their form, so that it can be checked.

        Args:
            path: the merged file, for messages.

        Returns:
            Merged file and name of the lost file -> run, seed, record, command, encoder and the
            settings of the evaluations. The record has hashes instead of descriptions of text.
        """
        found = {}
        for name, outcome in self.outcomes.items():
            record = {key: value for key, value in outcome.settings.items() if key not in ADDED}
            record["pairs a step"] = record.pop("pairs_per_step")
            reports = {}
            for evaluation in outcome.results:
                settings = dict(self.evaluations[evaluation])
                protocol = settings.pop("protocol", None)
                reports[evaluation] = {"protocol": protocol, "settings": settings}
            found[path / name] = {
                "run": outcome.run,
                "seed": outcome.seed,
                "record": record,
                "command": [outcome.settings["command"]],
                "encoder": outcome.settings["encoder"],
                "evaluations": reports,
            }
        return found


def read_kept(path: Path, recipe: Recipe, present: Collection[Path]) -> Kept:
    """Read the results of a study's merged file whose result files are gone.

    Args:
        path: the merged file. It may be missing.
        recipe: the study's recipe.
        present: names of the result files that are there, without the study's folder.

    Raises:
        UserError: the merged file is damaged, or has a run or seed that is not in the recipe.
    """
    if not path.is_file():
        return Kept()
    outcomes, seconds = read_study_file(path)
    kept = {}
    for outcome in outcomes:
        name = Path(f"{outcome.run}-lr{outcome.learning_rate:g}", f"seed-{outcome.seed}.json")
        if name in present:
            continue
        run = recipe.runs.get(outcome.run)
        if run is None or outcome.seed not in run.seeds:
            what = f"no run {outcome.run} with seed {outcome.seed}"
            raise UserError(f"{path}: the recipe {recipe.name} has {what}: collect without --keep")
        kept[name] = outcome
    return Kept(kept, seconds, read_evaluations(path))


def with_hashed_texts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with a hash instead of each description of text, as in the merged file."""
    record = dict(content["record"])
    for key in TEXTS:
        record[key] = digest_of_text(record.get(key))
    return {**content, "record": record}


def collect(recipe: Recipe, folder: Path, path: Path, keep: bool = False) -> tuple[int, int]:
    """Check the results of a recipe's runs and write the merged file.

    Args:
        recipe: the study's recipe.
        folder: folder of the study's results.
        path: file to write.
        keep: also keep the results that `path` has, and whose result files are gone.

    Returns:
        The number of results that were merged, and the number of results that were kept.
    """
    contents = read_runs(folder, recipe)
    for file, content in contents.items():
        require_trained_as_told(file, content, recipe.runs[content["run"]])
    require_comparable(contents, recipe.runs)

    outcomes = {}
    evaluations: dict[str, Any] = {}
    for file, content in contents.items():
        run = recipe.runs[content["run"]]
        is_compared = label_of(run) in ORDER and run.same_time_as is None
        keeps_losses = is_compared and bool(run.evaluate)
        outcomes[file.relative_to(folder)] = outcome_of(content, keeps_losses)
        for name, report in content["evaluations"].items():
            evaluations[name] = how_evaluated(report)

    kept = read_kept(path, recipe, outcomes) if keep else Kept()
    old = kept.contents(path)
    for file, content in old.items():
        require_trained_as_told(file, content, recipe.runs[content["run"]])
    new = {file: with_hashed_texts(content) for file, content in contents.items()}
    require_comparable(old | new, recipe.runs)

    timing = folder / "timing.json"
    seconds = dict(kept.step_seconds)
    if timing.is_file():
        for name, part in read_object(timing)["steps"].items():
            seconds[name] = round(part["cpu"], 4)
    merged = outcomes | kept.outcomes
    ordered = [merged[name] for name in sorted(merged)]
    write_study_file(path, ordered, seconds, {**kept.evaluations, **evaluations})
    return len(outcomes), len(kept.outcomes)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check and merge the results of each study that the command line names, one file per study.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", type=Path, help="YAML files of the studies")
    parser.add_argument(
        "--results_dir",
        type=Path,
        default=Path("runs/results"),
        help="folder that experiments.run wrote its results into",
    )
    parser.add_argument("--output_dir", type=Path, default=RESULTS, help="folder for STUDY.json")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep results in STUDY.json that have no file in --results_dir any more",
    )
    args = parser.parse_args(argv)
    for path in args.recipes:
        recipe = read_recipe(path, None)
        target = args.output_dir / f"{recipe.name}.json"
        count, kept = collect(recipe, args.results_dir / recipe.name, target, args.keep)
        note = f", and {kept} kept" if args.keep else ""
        print(f"{target}: {count} runs{note}")


if __name__ == "__main__":
    main()
