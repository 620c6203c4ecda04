"""Describe prepared pairs: the table of counts, the report and the data card."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from dap_transformers.errors import counted
from dap_transformers.files import write_json
from dap_transformers.languages import NAMES
from dap_transformers.prepare.filters import REASONS
from dap_transformers.prepare.run_folder import CARD, REPORT
from dap_transformers.tables import markdown_table, text_table

#: Our folders -> splits of `datasets`. The folders' names are also those of their counts.
SPLITS = {"train": "train", "dev": "validation"}
#: Why pairs are not in the training set, in the order of the steps. These counts, with `train` and
#: `dev`, add up to `read`.
LOSSES = {
    "unreadable": "malformed line, such as one with an empty side",
    **REASONS,
    "leak": "a side equals, or nearly equals, an evaluation sentence",
    "duplicate": "the same pair again, except for case, punctuation and spaces",
    "not_sampled": "beyond the number of pairs for a language",
    "held_out": "English sentence of a dev set, of any language",
}
#: Language -> name -> count.
Counts = Mapping[str, Mapping[str, Any]]


def total(languages: Counts) -> Counter[str]:
    """Add up each count over all languages, by name. Entries that are not integers are left out."""
    sums: Counter[str] = Counter()
    for counts in languages.values():
        sums.update({name: value for name, value in counts.items() if isinstance(value, int)})
    return sums


def counts_table(languages: Counts, table: Callable[..., str] = text_table) -> str:
    """Format the counts as a table with one row per language, and one of their sums.

    Reasons that concern no pair have no column.
    """
    sums = total(languages)
    used = [name for name in LOSSES if sums[name]]
    columns = ["read", *used, *SPLITS]
    rows = []
    for code, counts in [*languages.items(), ("all", sums)]:
        rows.append([code, *(counts.get(name, 0) for name in columns)])
    return table(["", *columns], rows)


def describe(folder: Path, report: Mapping[str, Any]) -> None:
    """Write the data card and the report. The report comes last and marks the end of the run.

    Args:
        folder: the output folder of `prepare-data`, which gets `README.md` and `report.json`.
        report: the report of the run. Its counts, licences and settings are shown on the card.
    """
    languages = report["languages"]
    target = report["settings"]["target_language"]
    origins: Counter[str] = Counter()
    for counts in languages.values():
        origins.update(counts["origins"])
    card = DatasetCard.from_template(
        DatasetCardData(
            language=[*languages, target],
            license="other",
            task_categories=["translation", "sentence-similarity"],
            configs=_configurations(languages, target),
        ),
        template_path=str(Path(__file__).with_name("data_card.md")),
        counted=counted,
        losses=LOSSES,
        origins=origins.most_common(),
        pairs=counts_table(languages, markdown_table),
        sums=total(languages),
        target=NAMES.get(target, "one more"),
        **report,
    )
    (folder / CARD).write_text(str(card), encoding="utf-8")
    write_json(report, folder / REPORT)


def _configurations(languages: Counts, target: str) -> list[dict[str, Any]]:
    """List the configurations of the card: "default" with all languages, and "de-en" with one.

    A split without pairs is left out, and so is a configuration without splits.
    """
    configurations = []
    for code, counts in [("*", total(languages)), *languages.items()]:
        files = []
        for folder, split in SPLITS.items():
            if counts[folder]:
                files.append({"split": split, "path": f"{folder}/*.{code}-{target}.parquet"})
        if files:
            name = "default" if code == "*" else f"{code}-{target}"
            configurations.append({"config_name": name, "data_files": files})
    return configurations
