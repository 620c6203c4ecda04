"""Print what a training changes in search, from reports of `eval-retrieval`.

    python -m study.search_table RESULTS/

`study/search.sh` makes the reports: `start.json`, and `METHOD_TEXT_SEED.json` such as
`tr_software-44_0.json`. A row is a method and a text, and a column is the mean over the question
sets of one kind. Of a trained model it shows the change against the start, as the mean over seeds.
The last column is the seconds of the training, all included.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dap_transformers.files import read_json
from dap_transformers.tables import text_table

#: Kind of question sets -> how the names of its folders end (`study.question_sets`).
SEARCH = ("English", "worst set", "own language", "across", "mixed")
KINDS = (*SEARCH, "pool", "retrieval", "altered copies")
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
    found["altered copies"] = report["hard_negatives"]["mean"]["error"]["error"]
    return found


def rows_of(folder: Path) -> list[list]:
    """Return a row for the start, and for each method and text the mean change and the seeds."""
    start = read_json(folder / "start.json")
    before = numbers_of(start, start)
    by_run = defaultdict(list)
    for path in sorted(folder.glob("*_*_*.json")):
        method, text, _ = path.stem.split("_")
        training = read_json(folder / "training" / path.name)
        numbers = numbers_of(read_json(path), start) | {"seconds": training["total_seconds"]}
        by_run[text, method].append(numbers)

    before["worst set"] = 0.0  # it is a change already
    rows = [["start", "", "", *(before[kind] for kind in KINDS), None]]
    for (text, method), seeds in sorted(by_run.items()):
        row = [method, text, len(seeds)]
        for kind in KINDS:
            change = np.mean([each[kind] for each in seeds]) - before[kind]
            row.append(f"{change:+.1f}")
        rows.append([*row, float(np.mean([each["seconds"] for each in seeds]))])
    return rows


def main() -> None:
    """Print the table of a folder of reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    print(
        text_table(["", "text", "seeds", *KINDS, "seconds"], rows_of(parser.parse_args().results))
    )


if __name__ == "__main__":
    main()
