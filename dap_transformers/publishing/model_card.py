"""Make the model card of a published checkpoint from its records and evaluations.

`model_card.md` is the template. Anything that was not recorded or measured is left out, or the card
says "not stated".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, EvalResult, ModelCard, ModelCardData

from configuration_dap import FIELDS
from dap_transformers.errors import UserError, reading
from dap_transformers.files import read_json
from dap_transformers.languages import NAMES
from dap_transformers.publishing.layout import Published
from dap_transformers.reports import mean_of, numbers_of
from dap_transformers.tables import markdown_table
from objectives_dap import OBJECTIVES

#: Fields of `DAPConfig` that say nothing about the recipe.
OF_FILES = (
    "encoder_config",
    "rtl_languages",
    "mask_token_id",
    "modules",
    "special_tokens_before",
    "special_tokens_after",
)
#: Names in a training's record that the card shows, in this order.
RECIPE = (
    *(name for name in FIELDS if name not in OF_FILES),
    "pairs a step",
    "gradient_accumulation_steps",
    "processes",
    "max_seq_length",
    "language_mix",
    "mix_alpha",
    "learning_rate",
    "head_learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "optim",
    "freeze_word_embeddings",
    "peft_lora_rank",
    "bf16",
    "fp16",
    "seed",
)
#: First part of a field's name -> the objective that uses the field.
USED_BY = {"projection": "tr", **{f"{name}_": name for name in OBJECTIVES}}
TAGS = ["sentence-transformers", "feature-extraction", "cross-lingual", "bitext-mining", "dap"]
#: Sentences that the page of the model compares when a visitor clicks a button.
WIDGET = {
    "source_sentence": "Where is the station?",
    "sentences": ["Wo ist der Bahnhof?", "¿Dónde está la estación?", "The soup is too hot."],
}
#: Key of a number in a report -> (metric on the Hub, name on the card).
METRICS = {
    "xx-en": ("accuracy", "accuracy xx→en"),
    "en-xx": ("accuracy", "accuracy en→xx"),
    "pool_xx-en": ("accuracy", "multilingual pool xx→en"),
    "pool_en-xx": ("accuracy", "multilingual pool en→xx"),
    "accuracy": ("accuracy", "accuracy"),
    "precision": ("precision", "precision"),
    "recall": ("recall", "recall"),
    "f1": ("f1", "F1"),
    "ndcg@10": ("ndcg_at_10", "nDCG@10"),
    "accuracy@1": ("accuracy_at_1", "accuracy@1"),
}
#: Key of a number that is not a metric of the Hub -> name on the card.
OTHER_NAMES = {
    "own_xx-en": "lost to own language xx→en",
    "own_en-xx": "lost to own language en→xx",
    "error": "hard-negative error",
    "number": "by number",
    "negation": "by negation",
    "name": "by name",
    "other": "by another sentence",
}
#: A number that only one kind of evaluation has -> (task on the Hub, its name).
TASKS = {
    "xx-en": ("sentence-similarity", "bitext retrieval"),
    "f1": ("sentence-similarity", "bitext mining"),
    "ndcg@10": ("sentence-similarity", "information retrieval"),
    "accuracy": ("text-classification", "natural language inference"),
}
HUB_DATASETS = ("facebook/xnli",)  # default data of an evaluation
LONGEST_TABLE = 8  # rows of a table that is not folded
NOT_SHOWN = ("data", "bucc", "text")  # settings that the heading names, and hashes


@dataclass(frozen=True)
class Sources:
    """What a card is made from, besides the published folder.

    Attributes:
        config: config.json of the DAP checkpoint. {} for a plain encoder.
        run: `run.json` of the training, or {}. `base_commit` is added if training started from
            the Hub.
        steps: optimizer steps of these weights. None if unknown.
        dataset_info: description of the training text, in Markdown.
        datasets: Hub ids of the datasets that the training text comes from.
    """

    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    reports: Sequence[Mapping[str, Any]] = ()
    dataset_info: str = "Sources and licences: not stated."
    licence: str | None = None
    datasets: Sequence[str] = ()


# ------------------------------------------------------------------------------------- the sources


def read_sources(
    checkpoint: Path,
    reports: Sequence[Mapping[str, Any]] = (),
    dataset_info: str | Path | None = None,
    licence: str | None = None,
) -> Sources:
    """Collect what the model card of a checkpoint is made from.

    Records that do not exist are left empty. For a plain encoder, no records are read. For a
    folder `checkpoint-N`, `run.json` and `train_results.json` may be in the folder above it.
    `dataset_info` is a Markdown file. Without a `licence`, that of the text is taken if it has one.
    """
    known: dict[str, Any] = {"reports": reports, "licence": licence}
    if dataset_info is not None:
        with reading(dataset_info):
            card = DatasetCard.load(Path(dataset_info))
        about = card.data.to_dict()
        known["dataset_info"] = card.text.strip()
        own = about.get("license", [])
        own = [own] if isinstance(own, str) else own
        known["licence"] = licence or (own[0] if len(own) == 1 else None)  # none of several
        names = [*about.get("datasets", ()), *about.get("source_datasets", ())]
        known["datasets"] = [name for name in names if "/" in name]  # else a word, "original"

    config = _read_record(checkpoint, "config.json")
    if config.get("model_type") != "dap":
        return Sources(**known)
    run = _read_record(checkpoint, "run.json")
    results = _read_record(checkpoint, "train_results.json")
    steps = results.get("model_step")
    if checkpoint.name.startswith("checkpoint-"):
        steps = _read_record(checkpoint, "trainer_state.json").get("global_step")
    if "base_commit" in results:
        run["base_commit"] = results["base_commit"]
    return Sources(config=config, run=run, steps=steps, **known)


def _read_record(checkpoint: Path, name: str) -> dict[str, Any]:
    """Read a JSON record of a training, or return an empty dictionary if there is none."""
    path = checkpoint / name
    if checkpoint.name.startswith("checkpoint-") and not path.is_file():
        path = checkpoint.parent / name
    return read_json(path) if path.is_file() else {}


# ---------------------------------------------------------------------------------------- the card


def model_card(repo_id: str, published: Published, sources: Sources) -> ModelCard:
    """Make the model card: metadata with a `model-index` of the results, and a text."""
    results = []
    for report in sources.reports:
        _require_same_encoding(report, published)
        results += eval_results(report)
    codes = languages(sources)
    name = repo_id.split("/")[-1]
    data = ModelCardData(
        language=codes or None,
        license=sources.licence,
        library_name="sentence-transformers",
        tags=TAGS,
        base_model=_base_model(sources.run),
        datasets=list(sources.datasets) or None,
        pipeline_tag="sentence-similarity",
        widget=[WIDGET],
        model_name=name if results else None,
        eval_results=results or None,
    )

    pairs = {}
    rows = []
    for code, description in (sources.run.get("training text") or {}).items():
        pairs[code] = int(re.match("[0-9]*", description)[0] or 0)
        language = f"{NAMES[code]} ({code})" if code in NAMES else code
        rows.append([language, f"{pairs[code]:,}"])

    objective = sources.config.get("objective")
    target = sources.run.get("target_language") or "en"
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md")),
        repo_id=repo_id,
        name=name,
        made=published,
        prefix=repr(published.prefix) if published.prefix else "",
        sources=sources,
        objective=objective,
        method=method(objective or ""),
        languages=[NAMES.get(code, code) for code in codes],
        pairs=pairs,
        pairs_table=markdown_table(["language", "pairs"], rows, numbers=True),
        target=NAMES.get(target, "the target language"),
        recipe=_folded("Recipe", _recipe_table(sources)),
        results="\n\n".join(map(report_text, sources.reports)),
    )


def _require_same_encoding(report: Mapping[str, Any], published: Published) -> None:
    """Check that a report was measured with the published model's pooling, prefix and length."""
    settings = report.get("settings", {})
    names = ["pooling", "prefix"]
    if "prefix" in settings:  # else max_seq_length is about pairs of texts, as in run-xnli
        names.append("max_seq_length")
    for name in names:
        ours = getattr(published, name)
        if settings.get(name, ours) != ours:
            raise UserError(
                f"results on {dataset_name(report)} were measured with {name}={settings[name]!r}, "
                f"but the model is published with {ours!r}: evaluate it so, or give that {name}"
            )


def languages(sources: Sources) -> list[str]:
    """Return the codes of the training languages, sources first and sorted. Empty if unknown."""
    found = sources.run.get("training text") or sources.config.get("rtl_languages") or []
    if not found:
        return []
    target = sources.run.get("target_language") or "en"
    return [*sorted(set(found) - {target}), target]


def method(objective: str) -> str:
    """Say in words what a model was trained by. Objectives of a plugin have only their names.

    >>> method("tr+bow")
    'translation ranking (TR) and bag-of-words prediction (BOW)'
    """
    names = objective.split("+")
    if set(names) == {"tr", "rtl"}:
        return "dual-alignment pre-training (DAP)"
    titles = {name: each.title for name, each in OBJECTIVES.items()}
    return " and ".join(titles.get(name) or name for name in names)


def _base_model(run: Mapping[str, Any]) -> str | None:
    """Return the Hub id of the model that training started from. None for a local folder."""
    return run.get("model_name_or_path") if run.get("base_commit") else None


def _recipe_table(sources: Sources) -> str:
    """Make a Markdown table of the known settings of the objectives that were trained."""
    rows: list[list[Any]] = []
    if base := sources.run.get("model_name_or_path"):
        rows.append(["started from", _base_model(sources.run) or f"`{Path(base).name}`"])
    if shape := sources.run.get("config_name"):
        name = Path(shape).name
        rows.append(["started from", f"random weights, configuration `{name}`"])
    if sources.steps is not None:
        rows.append(["optimizer steps", sources.steps])

    known = {**sources.config, **sources.run}
    if known.get("language_mix") != "temperature":
        known["mix_alpha"] = None
    objectives = (known.get("objective") or "").split("+")
    for name in RECIPE:
        users = [objective for start, objective in USED_BY.items() if name.startswith(start)]
        is_used = not users or users[0] in objectives
        if is_used and known.get(name) is not None:
            rows.append([name.replace("_", " "), known[name]])
    return markdown_table(["", ""], rows)


# ------------------------------------------------------------------------------------- the results


def _averages_first(report: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Return the numbers of a report by their place (`numbers_of`), single languages last."""
    return sorted(numbers_of(report), key=lambda found: found[0][:1] == ("languages",))


def eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    """Turn the metrics of a report, in percent, into entries of a card's `model-index`.

    There is one entry per metric and language, averages first. For a report merged from several
    seeds, its value is the mean. Numbers that are no metrics of the Hub (`METRICS`) are left out.
    """
    name = dataset_name(report)
    results = []
    for place, numbers in _averages_first(report):
        tasks = [task for key, task in TASKS.items() if key in numbers]
        metrics = [key for key in numbers if key in METRICS]
        for key in metrics if tasks else ():
            task_type, task_name = tasks[0]
            metric, metric_name = METRICS[key]
            result = EvalResult(
                task_type=task_type,
                task_name=task_name,
                dataset_type=name,
                dataset_name=name,
                dataset_config=place[-1] if place else None,
                dataset_split="validation" if place[:1] == ("dev",) else None,
                metric_type=metric,
                metric_name=metric_name,
                metric_value=mean_of(numbers[key]),
            )
            results.append(result)
    return results


def dataset_name(report: Mapping[str, Any]) -> str:
    """Return the names of a report's data without folders of this machine, or else its protocol.

    >>> dataset_name({"protocol": "retrieval", "settings": {"data": ["/data/tatoeba"]}})
    'tatoeba'
    """
    settings = report.get("settings", {})
    data = settings.get("data") or settings.get("bucc") or report["protocol"]
    paths = [data] if isinstance(data, str) else list(data)
    names = [path if path in HUB_DATASETS else Path(path).name for path in paths]
    return ", ".join(names)


def report_text(report: Mapping[str, Any]) -> str:
    """Format an evaluation report as Markdown: data, protocol, settings, and tables of results.

    Rows with the same columns make a table, so that no cell is empty. Results stand before counts,
    and averages before languages. A table of more than `LONGEST_TABLE` rows is folded.
    """
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for place, numbers in _averages_first(report):
        if place[:1] == ("hard_negatives",) and place[-1] != "error":
            continue  # numbers of pairs and copies
        columns = [name for name in METRICS if name in numbers]
        columns += [name for name in numbers if name not in METRICS]
        row = [_place_name(place), *(_cell(name, numbers[name]) for name in columns)]
        tables.setdefault(tuple(columns), []).append(row)

    parts = [f"### {dataset_name(report)}", _measured_text(report)]
    # A stable sort: False comes first.
    for columns in sorted(tables, key=METRICS.keys().isdisjoint):
        header = [""]
        for name in columns:
            header.append(METRICS[name][1] if name in METRICS else OTHER_NAMES.get(name, name))
        rows = tables[columns]
        table = markdown_table(header, rows, numbers=True)
        if len(rows) > LONGEST_TABLE:
            table = _folded(f"All {len(rows)} rows", table)
        parts.append(table)
    return "\n\n".join(parts)


def _measured_text(report: Mapping[str, Any]) -> str:
    """Say how and when the numbers of a report were measured, without paths and `NOT_SHOWN`."""
    settings = {**report.get("settings", {}), "seed": report.get("seed")}
    shown = []
    for name, value in settings.items():
        is_simple = isinstance(value, (str, int, float))
        is_path = any(separator in str(value) for separator in "/\\")  # Windows has "\\"
        if is_simple and not is_path and name not in NOT_SHOWN:
            shown.append(f"{name} {value!r}")
    if "seeds" in report:
        shown.append(f"seeds {', '.join(map(str, report['seeds']))}")

    protocol = report["protocol"]
    text = f"{protocol[:1].upper()}{protocol[1:]}."
    if shown:
        text += f" Settings: {', '.join(shown)}."
    return f"{text} Measured on {report['time'][:10]}."


def _place_name(place: Sequence[str]) -> str:
    """Return the name of a table's row, such as "German" for ("languages", "de")."""
    if not place:
        return "all"
    if place[0] in ("languages", "hard_negatives"):
        return NAMES.get(place[1], place[1])
    return " ".join(place[1:] if place[0] in ("averages", "pairs") else place)


def _cell(name: str, value: Any) -> str:
    """Format a value of a table: a number, or mean and standard deviation over seeds."""
    digits = 4 if name == "threshold" else 2
    if isinstance(value, Mapping):
        spread = "" if value["sd"] is None else f" ± {value['sd']:.{digits}f}"
        return f"{value['mean']:.{digits}f}{spread}"
    return f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}"


def _folded(summary: str, text: str) -> str:
    """Hide a Markdown text behind a line that the reader can click."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"
