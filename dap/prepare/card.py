"""What describes prepared pairs: the table of counts, `dataset_info.json` and the Markdown card (no models)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

from dap.languages import NAMES
from dap.prepare.filters import REASONS, REPAIRS
from dap.reports import markdown_table, text_table

#: Why pairs are not in the training set, in the order of the steps; with `train` and `dev` they add up to `read`.
LOSSES = (*REASONS, "leak", "exact_duplicate", "near_duplicate", "not_sampled", "held_out")
UNKNOWN = "not stated; see the source"
Counts = Mapping[str, Mapping[str, Any]]

_MEANING = {
    "empty": "a side was empty after the repair",
    "url": "URL or e-mail address",
    "short": "too few tokens",
    "length_ratio": "one side much longer than the other",
    "long": "both sides too long",
    "identical": "source = target",
    "shared": "too many tokens shared by both sides",
    "script": "letters of another script than the language's",
    "language": "another language, by the identifier",
    "leak": "a side equals, or nearly equals, an evaluation sentence",
    "exact_duplicate": "the same pair again",
    "near_duplicate": "the same pair but for case, punctuation and spaces",
    "not_sampled": "beyond the number of pairs for a language",
    "held_out": "English sentence of a dev set, of any language",
}


def total(languages: Counts) -> dict[str, int]:
    """The sums of the counts over all languages."""
    sums: Counter[str] = Counter()
    for counts in languages.values():
        sums.update({name: value for name, value in counts.items() if isinstance(value, int)})
    return dict(sums)


def counts_table(languages: Counts) -> str:
    """Pairs by language and reason; reasons that nothing was dropped for have no column."""
    sums = total(languages)
    used = [name for name in (*REPAIRS, "unreadable", *LOSSES) if sums.get(name)]
    columns = ["read", *used, "train", "dev", "target_repeated"]
    rows = [[code, *(counts.get(name, 0) for name in columns)] for code, counts in languages.items()]
    return text_table(["", *columns], [*rows, ["all", *(sums.get(name, 0) for name in columns)]])


def dataset_info(languages: Counts, settings: Mapping[str, Any], licences: Mapping[str, str]) -> dict[str, Any]:
    """`dataset_info.json`: features, splits by configuration (a language and English), counts and settings."""
    text = {"dtype": "string", "_type": "Value"}
    features = dict.fromkeys(("source", "target", "origin"), text)
    features["text_hash"] = {"dtype": "uint64", "_type": "Value"}
    features["target_repeated"] = {"dtype": "bool", "_type": "Value"}
    configs = {
        f"{code}-{settings['target_language']}": {
            "splits": {split: {"num_examples": counts[split]} for split in ("train", "dev")},
            "counts": {name: value for name, value in counts.items() if name != "origins"},
            "origins": counts["origins"],
        }
        for code, counts in languages.items()
    }
    return {"features": features, "configs": configs, "licences": dict(licences), "settings": dict(settings)}


def data_card(languages: Counts, settings: Mapping[str, Any], licences: Mapping[str, str]) -> str:
    """README.md: YAML that `datasets` reads (a configuration a language), counts, steps and licences."""
    parts = [
        f"---\n{yaml.safe_dump(_metadata(languages, settings), sort_keys=False, allow_unicode=True)}---",
        f"# Parallel text of {len(languages)} languages with {NAMES.get(settings['target_language'], 'one more')}",
        _introduction(languages, settings),
        "## Origins and licences",
        _origins(languages, licences),
        "## Pairs by language",
        _by_language(languages),
        "## What was dropped",
        _dropped(languages),
        "## Settings",
        markdown_table(["setting", "value"], [[name, f"`{value}`"] for name, value in settings.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(languages: Counts, settings: Mapping[str, Any]) -> dict[str, Any]:
    target = settings["target_language"]
    configs = []
    for code, counts in languages.items():
        splits = [split for split in ("train", "dev") if counts[split]]
        files = [{"split": split, "path": f"{split}/*.{code}-{target}.parquet"} for split in splits]
        configs += [{"config_name": f"{code}-{target}", "data_files": files}] if files else []
    return {"language": [*languages, target], "task_categories": ["translation", "sentence-similarity"],
            "configs": configs}  # fmt: skip


def _introduction(languages: Counts, settings: Mapping[str, Any]) -> str:
    sums = total(languages)
    sets = ", ".join(settings["evaluation_data"])
    leaks = f"was compared with the evaluation sets {sets}" if sets else "was not compared with any evaluation set"
    return (
        f"{sums['train']:,} training and {sums['dev']:,} dev pairs out of {sums['read']:,}, made by `prepare_data.py` "
        "of dap-transformers. `source` is a sentence, `target` its translation; `origin` names the corpus or file; "
        "`text_hash` is a key of the pair as normalised (letters and digits, case folded); `target_repeated` says "
        "that other training pairs, of this or another language, have the same `target`, so that these are no "
        "negatives of each other. No `target` of a dev pair is that of a training pair of any language. "
        f"The text {leaks}."
    )


def _origins(languages: Counts, licences: Mapping[str, str]) -> str:
    pairs: Counter[str] = Counter()
    for counts in languages.values():
        pairs.update(counts["origins"])
    rows = [[origin, f"{count:,}", licences.get(origin, UNKNOWN)] for origin, count in pairs.most_common()]
    return markdown_table(["origin", "training pairs", "licence"], rows)


def _by_language(languages: Counts) -> str:
    names = ("read", "train", "dev", "target_repeated")
    rows = [
        [code, NAMES.get(code, ""), *(f"{counts[name]:,}" for name in names)] for code, counts in languages.items()
    ]
    return markdown_table(["", "language", *names], rows)


def _dropped(languages: Counts) -> str:
    sums = total(languages)
    return markdown_table(
        ["reason", "pairs", ""], [[name, f"{sums.get(name, 0):,}", _MEANING[name]] for name in LOSSES]
    )
