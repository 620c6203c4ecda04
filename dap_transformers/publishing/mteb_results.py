"""Read results of MTEB, and put them into the form of our reports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError
from dap_transformers.files import read_json, require_kinds
from dap_transformers.reports import read_report

#: Scores of MTEB that a card shows, if a task has them.
SCORES = ("main_score", "accuracy", "precision", "recall", "f1")
#: What is read of a result file, in the form of `dap_transformers.files.misfit`.
OF_MTEB = {
    "task_name": str,
    "dataset_revision": str,
    "scores": {str: [{"hf_subset": str | None} | dict.fromkeys(SCORES, float | None)]},
}
SPLITS = ("test", "validation", "dev")  # the first that a result has is shown


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a report of one of our commands, or a result file of MTEB.

    Args:
        path: JSON file. Merged reports of several seeds are accepted, too.
    """
    content = read_json(path, finite=True)
    if isinstance(content, dict) and {"task_name", "scores"} <= content.keys():
        require_kinds(path, content, OF_MTEB)
        return mteb_report(content, path)
    return read_report(path)


def mteb_report(result: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Put a result of MTEB into the form of a report, with scores in percent.

    Such a file does not say which model it is about, so "models" is empty.

    Args:
        result: content of the file.
        path: the file, for the message.
    """
    scores = result["scores"]
    found = [split for split in SPLITS if scores.get(split)]
    if not found:
        raise UserError(f"{path}: a result of MTEB without scores of {' or '.join(SPLITS)}")

    languages: dict[str, dict[str, float]] = {}
    for subset in scores[found[0]]:
        percent = {}
        for name in SCORES:
            if subset.get(name) is not None:
                percent[name] = round(100 * subset[name], 4)
        languages[subset.get("hf_subset") or "default"] = percent
    means = {}
    for name in SCORES:
        values = [numbers[name] for numbers in languages.values() if name in numbers]
        if len(values) == len(languages):
            means[name] = sum(values) / len(values)
    averages = {f"{len(languages)} subsets": means} if len(languages) > 1 else {}
    return {
        "model": "",
        "models": [],
        "protocol": f"MTEB {result.get('mteb_version') or ''}, split {found[0]}",
        "settings": {"data": result["task_name"], "dataset_revision": result["dataset_revision"]},
        "languages": languages,
        "averages": averages,
        "time": result.get("date") or "",
    }
