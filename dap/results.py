"""Reports of evaluations: written as JSON, and those of several seeds merged and shown beside the paper's numbers.

    python -m dap.results seed1.json seed2.json seed3.json --output merged.json

A report says how its numbers came about; only reports that agree in that are merged. Those of bitext mining may be of
several language pairs.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dap.paper import (  # noqa: F401  (the paper's numbers are part of this module's names)
    BUCC_PAIRS,
    BUCC_PROTOCOLS,
    DIRECTIONS,
    PAPER_BUCC,
    PAPER_TATOEBA,
    PAPER_XNLI,
    TATOEBA_GROUPS,
    bucc_table,
    paper_table,
    tatoeba_table,
    text_table,
    xnli_table,
)

#: What a report says about the run; everything else in it is a number of the evaluation.
HEAD = ("model", "revision", "protocol", "seed", "settings", "seconds", "seconds_by_part", "time", "machine")
HEAD += ("versions",)
#: Numbers that say how large the test set is.
COUNTS = ("pairs", "gold")
MEASURES = ("precision", "recall", "f1")
#: Settings that say where the text was, and those that differ between the language pairs of bitext mining.
PLACES = ("data", "bucc")
OF_A_PAIR = ("pair", "text")
RECORD = "run.json"  # what train_dap.py keeps of a run's arguments; see dap/resuming.py
SEED_MARK = re.compile(r"seed[-_=]?\d+")
#: Libraries whose version can move a number.
LIBRARIES = ("dap-transformers", "torch", "transformers", "tokenizers", "datasets", "accelerate", "numpy")
LIBRARIES += ("sentence-transformers", "faiss-cpu")


def report(
    model: str,
    protocol: str,
    results: Mapping[str, Any],
    settings: Mapping[str, Any],
    seconds: float,
    revision: str | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """One result with what is needed to get it again, ready for `write_json`.

    Args:
        model: name or path of the checkpoint.
        protocol: how the number came about, such as "Tatoeba, cosine, index match".
        results: the numbers, named with their unit or direction.
        settings: what was chosen for the run: pooling, prefix, lengths, data.
        seconds: wall-clock time of the measured part.
        revision: commit of the checkpoint on the Hub.
        seed: of training or sampling, where there was one.
    """
    head = {"model": model, "revision": revision, "protocol": protocol, "seed": seed, "settings": dict(settings)}
    tail = {"seconds": round(seconds, 2), "time": _now(), "machine": machine(), "versions": versions()}
    return head | dict(results) | tail


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Version of Python and of each of `LIBRARIES` that is installed."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Name of CPU and GPU (None where there is none), and PyTorch's number of threads."""
    import torch  # takes seconds, which those who only write tables need not wait

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu_name(), "gpu": gpu, "threads": torch.get_num_threads(), "system": platform.platform()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_json(content: Mapping[str, Any], path: str | Path) -> None:
    """Writes the whole file or leaves what was there: a reader or a kill never sees half of it.

    Raises:
        ValueError: NaN or infinity, which JSON cannot hold.
    """
    path = Path(path)
    text = json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_outputs(outputs: Mapping[str, str | Path], inputs: Iterable[str | Path] = ()) -> None:
    """Finds out before the work what would spoil its end; makes the folders of the outputs.

    Args:
        outputs: argument that names the file -> file to be written.
        inputs: files that are read, each as often as one likes.

    Raises:
        ValueError: an output that is an input or another output (names both), a folder, or cannot be written.
    """
    taken = {Path(path).resolve(): f"the input {path}" for path in inputs}
    for name, path in outputs.items():
        if Path(path).resolve() in taken:
            raise ValueError(f"{name} {path} would overwrite {taken[Path(path).resolve()]}: give another file")
        if Path(path).is_dir():
            raise ValueError(f"{name} {path} is a folder: give the file to write")
        taken[Path(path).resolve()] = f"{name} {path}"
    for name, path in outputs.items():
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=Path(path).parent).close()
        except OSError as error:
            raise ValueError(f"{name} {path} cannot be written: {error}") from error


def training_record(name_or_path: str) -> tuple[int | None, str | None]:
    """Seed and recipe of a local checkpoint that train_dap.py made, from the `run.json` that it left; else None twice.

    The recipe is a digest of all arguments that can change the weights but the seeds, of the languages, and of the
    step for one of a run's checkpoints. The text is not part of it, since the seed draws the dev set; nor is the size
    of a target vocabulary that comes from the text.
    """
    folder = Path(name_or_path)
    places = [folder, folder.parent] if folder.name.startswith("checkpoint-") else [folder]
    path = next((place / RECORD for place in places if (place / RECORD).is_file()), None)
    if path is None:
        return None, None
    run = json.loads(path.read_text(encoding="utf-8"))
    by_seed = {"seed", "data_seed"} | ({"target_vocab_size"} if run.get("target_vocabulary_file") is None else set())
    recipe = {name: value for name, value in run.items() if name not in by_seed}
    recipe |= {name: sorted(recipe.get(name, {})) for name in ("training text", "dev text")}
    recipe |= {"checkpoint": folder.name if len(places) > 1 else None}
    return run.get("seed"), hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def merge_seeds(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One report of several that differ in the seed alone: mean and sample standard deviation of every number.

    Every number, however deep, becomes {"mean": ..., "sd": ...} (sd None for one report). Whole numbers that are equal
    in all reports stay as they are; those of `COUNTS` have to be. Models count as one if their settings name one
    recipe (`training_record`), or if their names are equal but for a mark such as "seed1".

    Args:
        reports: file name -> what `report` made; the names are for errors.

    Raises:
        ValueError: no reports, or two that differ in protocol, settings, model or form, or are of one and the same
            run. Names both files and both values.
    """
    if not reports:
        raise ValueError("no reports to merge: give one file or more")
    (first, one), *others = reports.items()
    for file, other in others:
        _same_question(first, one, file, other)
    _different_runs(reports)
    bodies = {file: {key: value for key, value in each.items() if key not in HEAD} for file, each in reports.items()}
    head = {key: one.get(key) for key in ("protocol", "settings")}
    head |= {"model": _family(one), "models": [each["model"] for each in reports.values()]}
    head |= {"n": len(reports), "seeds": [each.get("seed") for each in reports.values()]}
    return head | _merged(bodies) | {"time": _now(), "versions": [each.get("versions") for each in reports.values()]}


def merge_pairs(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`merge_seeds` of bitext mining's reports of several language pairs, whose numbers are kept side by side.

    Reports of anything else, or of one pair, are merged as they are.

    Raises:
        ValueError: as `merge_seeds`; or pairs that differ in more than their text, or in their numbers of seeds.
    """
    by_pair: dict[str | None, dict[str, Mapping[str, Any]]] = {}
    for file, each in reports.items():
        by_pair.setdefault(each.get("settings", {}).get("pair"), {})[file] = each
    merged = [merge_seeds(group) for group in by_pair.values()]
    if len(merged) < 2:
        return merged[0] if merged else merge_seeds({})
    (first, one), *others = ((next(iter(group)), part) for group, part in zip(by_pair.values(), merged))
    for file, other in others:
        _same_question(first, _of_any_pair(one), file, _of_any_pair(other))
        if set(one["seeds"]) != set(other["seeds"]):
            raise ValueError(
                f"{first} is of the seeds {one['seeds']}, {file} of {other['seeds']}: give all pairs of each"
            )
    head = {key: one[key] for key in ("protocol", "model", "models", "n", "seeds", "time", "versions")}
    pairs = {pair: numbers for part in merged for pair, numbers in part["pairs"].items()}
    of_pairs = {key: [part["settings"].get(key) for part in merged] for key in OF_A_PAIR}
    return head | {"settings": one["settings"] | of_pairs, "pairs": pairs}


def _of_any_pair(report: Mapping[str, Any]) -> dict[str, Any]:
    return {**report, "settings": {key: value for key, value in report["settings"].items() if key not in OF_A_PAIR}}


def _family(one: Mapping[str, Any]) -> str:
    return SEED_MARK.sub("seed*", one["model"])


def _same_question(first: str, one: Mapping[str, Any], file: str, other: Mapping[str, Any]) -> None:
    """Raises unless both reports say the same protocol, settings (data among them), recipe and model."""
    pairs = [("protocol", one.get("protocol"), other.get("protocol"))]
    settings = [each.get("settings", {}) for each in (one, other)]
    names = dict.fromkeys([*settings[0], *settings[1]])
    if settings[0].get("text") is not None and settings[0]["text"] == settings[1].get("text"):
        for place in PLACES:
            names.pop(place, None)  # the same text from another place
    pairs += [(f"settings.{name}", settings[0].get(name), settings[1].get(name)) for name in names]
    if not settings[0].get("recipe"):
        pairs.append(("model", _family(one), _family(other)))
    for name, here, there in pairs:
        if here != there:
            raise ValueError(
                f"{first} has {name} {here!r}, {file} has {there!r}: only reports of one protocol, data, settings and "
                "model (but for a mark such as seed1 in its name) can be merged"
            )


def _different_runs(reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises where two reports are of one model and seed, or of one recipe and seed, which give the same model."""
    seen: dict[Any, str] = {}
    for file, each in reports.items():
        model = each.get("settings", {}).get("recipe") or f"{each['model']} {each.get('revision') or ''}".rstrip()
        run = model, each.get("seed")
        if run in seen:
            raise ValueError(
                f"{seen[run]} and {file} are of the same model {model} and seed {run[1]}; give each run once"
            )
        seen[run] = file


def _merged(values: Mapping[str, Any], place: tuple[str, ...] = ()) -> Any:
    """File -> value at `place` of the report, merged into one value."""
    (first, one), *others = values.items()
    if all(isinstance(value, Mapping) for value in values.values()):
        for file, other in others:
            if differing := one.keys() ^ other.keys():
                name = " ".join([*place, min(differing)])
                raise ValueError(f"only one of {first} and {file} has {name!r}: evaluate both on the same")
        return {name: _merged({file: value[name] for file, value in values.items()}, (*place, name)) for name in one}
    differing = [(file, other) for file, other in others if other != one]
    if all(_is_number(value) for value in values.values()) and place[-1] not in COUNTS:
        if isinstance(one, int) and not differing:
            return one
        return {"mean": statistics.fmean(values.values()), "sd": statistics.stdev(values.values()) if others else None}
    for file, other in differing:
        raise ValueError(f"{' '.join(place)}: {first} has {one!r}, {file} has {other!r}: not the same evaluation")
    return one


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_report(path: str | Path, merged: bool = False) -> dict[str, Any]:
    """What `write_json` wrote of a `report`, or with `merged` of several that were merged, too.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, NaN in it, or no report (without model or protocol).
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:  # JSON's and Unicode's errors are ValueErrors
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not (isinstance(content, dict) and all(isinstance(content.get(key), str) for key in ("model", "protocol"))):
        raise ValueError(f"{path} is no report of an evaluation: it names no model and protocol")
    if "seeds" in content and not merged:
        raise ValueError(f"{path} is a merged report: give the reports that it was made of")
    return content


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}")


def merged_table(merged: Mapping[str, Any]) -> str:
    """Every number of a merged report: a row a place, a column a name, "mean ± sd" in each."""
    rows = list(_rows(merged, ()))
    columns = list(dict.fromkeys(name for _, numbers in rows for name in numbers))
    cells = [[" ".join(place) or "all", *(numbers.get(name) for name in columns)] for place, numbers in rows]
    return text_table(["", *columns], cells)


def _rows(node: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    numbers = {name: _spread(value) for name, value in node.items() if _is_spread(value)}
    if numbers:
        yield place, numbers
    for name, value in node.items():
        if isinstance(value, Mapping) and not _is_spread(value) and name not in HEAD:
            yield from _rows(value, (*place, name))


def _is_spread(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"mean", "sd"}


def _spread(value: Mapping[str, float | None]) -> str:
    """Percentages with two decimals, thresholds and losses with four.

    >>> _spread({"mean": 90.5, "sd": 0.25}), _spread({"mean": 1.0625, "sd": None})
    ('90.50 ± 0.25', '1.0625')
    """
    digits = 2 if abs(value["mean"]) >= 10 else 4
    return " ± ".join(f"{number:.{digits}f}" for number in value.values() if number is not None)


def paper_beside(merged: Mapping[str, Any]) -> str | None:
    """The means of a merged report beside the paper's, if it has such numbers: Tatoeba, BUCC or XNLI."""
    means, name = _means(merged), f"{Path(merged['model']).name} (n={merged['n']})"
    languages, averages = means.get("languages", {}), means.get("averages", {})
    if any(group in averages for group in TATOEBA_GROUPS):
        counts = {code: numbers["pairs"] for code, numbers in languages.items()}
        table = tatoeba_table(_both_ways(languages), _both_ways(averages), counts)
        return table + "\n\n" + paper_table(_both_ways(averages), name)
    if languages and all("accuracy" in numbers for numbers in languages.values()):
        return xnli_table({code: numbers["accuracy"] for code, numbers in languages.items()}, name)
    split = BUCC_PROTOCOLS.get(merged["protocol"].removeprefix("BUCC ").split(":")[0])
    pairs = {pair: numbers for pair, numbers in means.get("pairs", {}).items() if pair in BUCC_PAIRS}
    if split and pairs:
        return bucc_table({pair: [numbers[key] for key in MEASURES] for pair, numbers in pairs.items()}, name, split)
    return None


def _both_ways(part: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    return {place: [numbers[direction] for direction in DIRECTIONS] for place, numbers in part.items()}


def _means(node: Any) -> Any:
    if _is_spread(node):
        return node["mean"]
    return {name: _means(value) for name, value in node.items()} if isinstance(node, Mapping) else node


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Merges the reports that the command line `argv` names, prints the tables; returns the merged report.

    Raises:
        ValueError: reports that do not belong together, or a file that is none.
        FileNotFoundError: no such file.
    """
    parser = argparse.ArgumentParser(prog="python -m dap.results", description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", help="JSON reports of one evaluation, a seed each")
    parser.add_argument("--output", help="JSON file for the merged report")
    arguments = parser.parse_args(argv)
    if repeated := [path for path in arguments.reports if arguments.reports.count(path) > 1]:
        raise ValueError(f"{repeated[0]} is given twice: give each report once")
    if arguments.output:
        check_outputs({"--output": arguments.output}, arguments.reports)
    merged = merge_pairs({path: read_report(path) for path in arguments.reports})
    if arguments.output:
        write_json(merged, arguments.output)
    print(f"{merged['model']}: {merged['protocol']}\nmean ± sample standard deviation, n={merged['n']}\n")
    print("\n\n".join(table for table in (merged_table(merged), paper_beside(merged)) if table))
    if arguments.output:
        print(f"written to {arguments.output}")
    return merged


def main() -> None:
    """The command: `run`, whose expected errors end it with status 1 and one message."""
    try:
        run()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
