"""Print what a training changes in search, from reports of `eval-retrieval`.

    python -m study.search_table study/results/search.json
    python -m study.search_table build/search/ --output search.json   # of a run of study/search.sh

`study/search.sh` makes the reports: `start.json`, and `METHOD_TEXT_SEED.json` such as
`tr_software-44_0.json`. A row is a method and a text. A column is the mean over the question sets
of one kind. Of a trained model it shows the change against the start, as the mean over seeds. The
last column is the seconds of the training, all included. A checkpoint within a run has none.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dap_transformers.files import read_json, write_json
from dap_transformers.tables import text_table

#: What is measured. The first five are nDCG@10 in percent.
SEARCH = ("English", "worst set", "own language", "across", "mixed")
OTHERS = ("pool", "retrieval", "altered copies")
KINDS = (*SEARCH, *OTHERS)
Run = Mapping[str, Any]


def kind_of(name: str) -> str:
    """Return the kind of a question set (`study.question_sets`).

    >>> [kind_of(f"gnome-{each}") for each in ("en", "de", "de-en", "de-mixed")]
    ['English', 'own language', 'across', 'mixed']
    """
    _, language, *rest = name.split("-")
    if rest:
        return "mixed" if rest == ["mixed"] else "across"
    return "English" if language == "en" else "own language"


def collect(folder: Path) -> dict[str, Run]:
    """Read the reports in a folder: name of a run -> its numbers, in percent, and its seconds."""
    runs = {}
    for path in sorted(folder.glob("*.json")):
        report = read_json(path)
        *_, averages = report["averages"].values()  # the last group has all languages
        sets = {name: each["ndcg@10"] for name, each in report["search"].items() if name != "mean"}
        runs[path.stem] = {
            "ndcg": sets,
            "pool": (averages["pool_xx-en"] + averages["pool_en-xx"]) / 2,
            "retrieval": (averages["xx-en"] + averages["en-xx"]) / 2,
            "altered copies": report["hard_negatives"]["mean"]["error"]["error"],
        }
        training = folder / "training" / path.name
        if training.is_file():
            runs[path.stem]["seconds"] = read_json(training)["total_seconds"]
    return runs


def numbers_of(run: Run, start: Run) -> dict[str, float]:
    """Return the mean of each kind of sets, the lowest change of an English set, and `OTHERS`."""
    values = defaultdict(list)
    for name, value in run["ndcg"].items():
        kind = kind_of(name)
        values[kind].append(value)
        if kind == "English":
            values["worst set"].append(value - start["ndcg"][name])
    worst = min(values.pop("worst set"))
    means = {kind: float(np.mean(each)) for kind, each in values.items()}
    return means | {"worst set": worst} | {kind: run[kind] for kind in OTHERS}


def rows_of(runs: Mapping[str, Run]) -> list[list]:
    """Return a row for the start, and for each method and text the mean change and the seeds."""
    start = runs["start"]
    before = numbers_of(start, start)
    by_method = defaultdict(list)
    for name, run in runs.items():
        if name != "start":
            method, text, _ = name.split("_")
            by_method[text, method].append(run)

    rows = [["start", "", "", *(before[kind] for kind in KINDS), None]]
    for (text, method), seeds in sorted(by_method.items()):
        numbers = [numbers_of(run, start) for run in seeds]
        row = [method, text, len(seeds)]
        for kind in KINDS:
            change = np.mean([each[kind] for each in numbers]) - before[kind]
            row.append(f"{change:+.1f}")
        seconds = [run["seconds"] for run in seeds if "seconds" in run]
        rows.append([*row, float(np.mean(seconds)) if seconds else None])
    return rows


def main() -> None:
    """Print the table of a folder of reports, or of a file that `--output` wrote."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs = collect(args.results) if args.results.is_dir() else read_json(args.results)
    if args.output:
        write_json(runs, args.output)
    print(text_table(["", "text", "seeds", *KINDS, "seconds"], rows_of(runs)))


if __name__ == "__main__":
    main()
