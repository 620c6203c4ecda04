"""What describes prepared pairs: the table of counts, the report and the Markdown card (no models)."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from dap.file_io import write_json
from dap.languages import NAMES
from dap.prepare.filters import REASONS, REPAIRS
from dap.prepare.run_folder import CARD, REPORT
from dap.reports import markdown_table, text_table

SPLITS = {
    "train": "train",
    "dev": "validation",
}  # folder and name in the counts -> split of `datasets`
SHOWN = ("read", *SPLITS, "target_repeated")  # counts of each language in the card
#: Why pairs are not in the training set, in the order of the steps; with `train` and `dev` they add up to `read`.
LOSSES = REASONS | {
    "leak": "a side equals, or nearly equals, an evaluation sentence",
    "exact_duplicate": "the same pair again",
    "near_duplicate": "the same pair but for case, punctuation and spaces",
    "not_sampled": "beyond the number of pairs for a language",
    "held_out": "English sentence of a dev set, of any language",
}
UNKNOWN = "not stated; see the source"
Counts = Mapping[str, Mapping[str, Any]]


def total(languages: Counts) -> Counter[str]:
    """The sums of the counts over all languages."""
    sums: Counter[str] = Counter()
    for counts in languages.values():
        sums.update({name: value for name, value in counts.items() if isinstance(value, int)})
    return sums


def counts_table(languages: Counts) -> str:
    """Pairs by language and reason; reasons that nothing was dropped for have no column."""
    sums = total(languages)
    used = [name for name in (*REPAIRS, "unreadable", *LOSSES) if sums[name]]
    columns = ["read", *used, "train", "dev", "target_repeated"]
    every = {**languages, "all": sums}
    rows = [[code, *(counts.get(name, 0) for name in columns)] for code, counts in every.items()]
    return text_table(["", *columns], rows)


def describe(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes the card `README.md` and the report, which comes last and marks the end.

    The card has YAML that `datasets` reads (a configuration a language, and of all), counts, steps and licences.
    """
    languages, settings, licences = (report[name] for name in ("languages", "settings", "licences"))
    target, sums, origins = settings["target_language"], total(languages), Counter()
    configs, pairs = [], []
    for code, counts in ("*", sums), *languages.items():
        own = f"*.{code}-{target}.parquet"
        files = [
            {"split": split, "path": f"{name}/{own}"}
            for name, split in SPLITS.items()
            if counts[name]
        ]
        name = "default" if code == "*" else f"{code}-{target}"
        configs += [{"config_name": name, "data_files": files}] if files else []
    for code, counts in languages.items():
        pairs.append([code, NAMES.get(code, ""), *(f"{counts[name]:,}" for name in SHOWN)])
        origins.update(counts["origins"])
    named = [
        [name, f"{count:,}", licences.get(name, UNKNOWN)] for name, count in origins.most_common()
    ]
    losses = [[name, f"{sums[name]:,}", reason] for name, reason in LOSSES.items()]
    tasks = ["translation", "sentence-similarity"]
    card = DatasetCard.from_template(
        DatasetCardData(language=[*languages, target], task_categories=tasks, configs=configs),
        template_path=str(Path(__file__).with_name("data_card.md")),
        sums=sums,
        languages=languages,
        target=NAMES.get(target, "one more"),
        evaluation=", ".join(settings["evaluation_data"]),
        origins=markdown_table(["origin", "training pairs", "licence"], named),
        pairs=markdown_table(["", "language", *SHOWN], pairs),
        dropped=markdown_table(["reason", "pairs", ""], losses),
        settings=markdown_table(
            ["setting", "value"], [[name, f"`{value}`"] for name, value in settings.items()]
        ),
    )
    (folder / CARD).write_text(f"{card}\n", encoding="utf-8")
    write_json(report, folder / REPORT)
