"""Print what a training changes in search, from reports of `eval-retrieval`.

    python -m study.search_table RESULTS/

`study/search.sh` makes the reports: `start.json`, and `METHOD_TEXT_SEED.json` such as
`tr_software-3000_0.json`. A row is a method and a text, and a column is the mean over the question
sets of one kind. Of a trained model it shows the change against the start, as the mean over seeds.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dap_transformers.files import read_json
from dap_transformers.tables import text_table

#: Kind of question sets -> how the names of its folders end (`study.question_sets`).
KINDS = ("English", "worst set", "own language", "across", "mixed", "pool", "retrieval")
POOL = ("pool_xx-en", "pool_en-xx")
RETRIEVAL = ("xx-en", "en-xx")


def kind_of(name: str) -> str:
    """Return the kind of a question set.

    >>> [kind_of(f"gnome-{each}") for each in ("en", "de", "de-en", "de-mixed")]
    ['English', 'own language', 'across', 'mixed']
    """
    _, language, *rest = name.split("-")
    if rest:
        return "mixed" if rest == ["mixed"] else "across"
    return "English" if language == "en" else "own language"


def numbers_of(report: Mapping, start: Mapping) -> dict[str, float]:
    """Return a report's mean over the sets of each kind, and the largest loss of an English set."""
    values = defaultdict(list)
    for name, each in report["search"].items():
        if name == "mean":
            continue
        kind = kind_of(name)
        values[kind].append(each["ndcg@10"])
        if kind == "English":
            values["change"].append(each["ndcg@10"] - start["search"][name]["ndcg@10"])
    *_, averages = report["averages"].values()  # the last group has all languages
    found = {kind: float(np.mean(each)) for kind, each in values.items()}
    found["worst set"] = min(values["change"])
    found["pool"] = float(np.mean([averages[name] for name in POOL]))
    found["retrieval"] = float(np.mean([averages[name] for name in RETRIEVAL]))
    return found


def rows_of(folder: Path) -> list[list]:
    """Return a row for the start, and for each method and text the mean change and the seeds."""
    start = read_json(folder / "start.json")
    before = numbers_of(start, start)
    by_run = defaultdict(list)
    for path in sorted(folder.glob("*_*_*.json")):
        method, text, _ = path.stem.split("_")
        by_run[text, method].append(numbers_of(read_json(path), start))

    rows = [["start", "", "", *(before[kind] if kind != "worst set" else None for kind in KINDS)]]
    for (text, method), seeds in sorted(by_run.items()):
        row = [method, text, len(seeds)]
        for kind in KINDS:
            value = np.mean([each[kind] for each in seeds])
            row.append(f"{value if kind == 'worst set' else value - before[kind]:+.1f}")
        rows.append(row)
    return rows


def main() -> None:
    """Print the table of a folder of reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    print(text_table(["", "text", "seeds", *KINDS], rows_of(parser.parse_args().results)))


if __name__ == "__main__":
    main()
