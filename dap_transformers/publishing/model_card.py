"""Make the model card of a published checkpoint from its records and evaluations.

`model_card.md` is the template. Anything that was not recorded or measured is left out, or the card
says "not stated".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, EvalResult, ModelCard, ModelCardData

from configuration_dap import FIELDS, is_plugin, unknown_keys
from dap_transformers.errors import UserError, reading
from dap_transformers.evaluation.evaluator import tables_of
from dap_transformers.files import public_name
from dap_transformers.languages import NAMES
from dap_transformers.publishing.layout import Published
from dap_transformers.reports import read_record
from dap_transformers.tables import markdown_table
from modules_dap import PROMPTS_OF
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
#: Task of a metric -> its type on the Hub, if that is not its own name.
TASK_TYPES = {"natural language inference": "text-classification"}
LONGEST_TABLE = 8  # rows of a table that is not folded
NOT_SHOWN = ("data", "pairs_per_language")  # settings that the heading has


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

    @property
    def target(self) -> str:
        """Return the code of the target language."""
        return self.run.get("target_language") or "en"

    @property
    def languages(self) -> list[str]:
        """Return the codes of the training languages, the target last. Empty if unknown."""
        found = self.run.get("training text") or self.config.get("rtl_languages")
        return [*sorted(set(found) - {self.target}), self.target] if found else []

    @property
    def is_anchored(self) -> bool | None:
        """Tell whether no teacher was given, so that "distill" keeps the model's own vectors.

        None if the run is not known.
        """
        return self.run["distill_from"] is None if "distill_from" in self.run else None


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
    sources = Sources(reports=reports)
    if dataset_info is not None:
        sources = replace(sources, **read_data_card(dataset_info))
    if licence is not None:
        sources = replace(sources, licence=licence)

    config = read_record(checkpoint, "config.json")
    if config.get("model_type") != "dap":
        return sources
    run = read_record(checkpoint)
    results = read_record(checkpoint, "train_results.json")
    if "base_commit" in results:
        run["base_commit"] = results["base_commit"]
    steps = results.get("model_step")
    if checkpoint.name.startswith("checkpoint-"):
        steps = read_record(checkpoint, "trainer_state.json").get("global_step")
    return replace(sources, config=config, run=run, steps=steps)


def read_data_card(path: str | Path) -> dict[str, Any]:
    """Read a data card: fields of `Sources` with its text, its only licence, and Hub ids."""
    with reading(path):
        card = DatasetCard.load(Path(path))
    about = card.data.to_dict()
    licences = _as_list(about.get("license"))
    names = _as_list(about.get("datasets")) + _as_list(about.get("source_datasets"))
    return {
        "dataset_info": card.text.strip(),
        "licence": licences[0] if len(licences) == 1 else None,  # none of several
        "datasets": [name for name in names if "/" in name],  # others are words like "original"
    }


def _as_list(value: str | list[str] | None) -> list[str]:
    """Return a value of a card's metadata, which may be one text, as a list."""
    return [value] if isinstance(value, str) else value or []


# ---------------------------------------------------------------------------------------- the card


def model_card(repo_id: str, published: Published, sources: Sources) -> ModelCard:
    """Make the model card: metadata with a `model-index` of the results, and a text."""
    results = []
    for report in sources.reports:
        if "metrics" not in report:
            raise UserError(
                f"the report on {report['protocol']} has no metrics for the card: give reports of "
                "eval-retrieval or run-xnli"
            )
        _require_same_encoding(report, published)
        results += eval_results(report)
    codes = sources.languages
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

    objective = sources.config.get("objective", "")
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md")),
        repo_id=repo_id,
        name=name,
        published=published,
        encoder=published.encoder,
        prefix=repr(published.encoder.prefix) if published.encoder.prefix else "",
        sources=sources,
        objective=objective,
        method=method(objective, sources.is_anchored),
        plugins=[name for name in objective.split("+") if is_plugin(name)],
        languages=[NAMES.get(code, code) for code in codes],
        pairs=pairs,
        pairs_table=markdown_table(["language", "pairs"], rows, numbers=True),
        target=NAMES.get(sources.target, "the target language"),
        recipe=_folded("Recipe", _recipe_table(sources)),
        results="\n\n".join(map(report_text, sources.reports)),
    )


def _require_same_encoding(report: Mapping[str, Any], published: Published) -> None:
    """Check that a report was measured with the published model's pooling, prompts and length."""
    encoder = published.encoder
    ours = {"pooling": encoder.pooling, "prefix": encoder.prefix}
    ours |= {f"{task}_prompt": encoder.for_task(task).prefix for task in PROMPTS_OF}
    settings = report.get("settings", {})
    if "prefix" in settings:  # else max_seq_length is about pairs of texts, as in run-xnli
        ours["max_seq_length"] = encoder.max_seq_length
    for name, own in ours.items():
        if settings.get(name, own) != own:
            raise UserError(
                f"results on {data_names(report)} were measured with {name}={settings[name]!r}, "
                f"but the model is published with {own!r}: measure again with that"
            )


def method(objective: str, is_anchored: bool | None = None) -> str:
    """Say in words what a model was trained by. Objectives of a plugin have only their names.

    `is_anchored` tells that "distill" had no teacher but the model before the training. None if it
    is not known.

    >>> method("tr+distill", is_anchored=True)
    'translation ranking (TR) and the anchor (its own vectors before the training)'
    >>> method("tr+distill")
    'translation ranking (TR) and distillation'
    """
    names = objective.split("+")
    if set(names) == {"tr", "rtl"}:
        return "dual-alignment pre-training (DAP)"
    titles = {name: each.title for name, each in OBJECTIVES.items()}
    if is_anchored:
        titles["distill"] = "the anchor (its own vectors before the training)"
    elif is_anchored is None:
        titles["distill"] = "distillation"
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
    if teacher := sources.run.get("distill_from"):
        name = Path(teacher).name if Path(teacher).exists() else teacher
        rows.append(["teacher", f"`{public_name(name)}`"])
    if sources.steps is not None:
        rows.append(["optimizer steps", sources.steps])

    known = {**sources.config, **sources.run}
    if known.get("language_mix") != "temperature":
        known["mix_alpha"] = None
    objectives = (known.get("objective") or "").split("+")
    unused = tuple(start for start, user in USED_BY.items() if user not in objectives)
    for name in (*RECIPE, *unknown_keys(sources.config)):  # and fields of plug-ins
        is_used = name not in FIELDS or not name.startswith(unused)
        if is_used and known.get(name) is not None:
            rows.append([name.replace("_", " "), known[name]])
    return markdown_table(["", ""], rows)


# ------------------------------------------------------------------------------------- the results


def eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    """Turn the metrics of a report into entries of a card's `model-index`.

    Metrics that the Hub has no name for are left out. Each task has a type of its own, because the
    Hub's client joins entries of one type, data set and place under the first one's name.
    """
    results = []
    for each in report["metrics"]:
        if each["kind"] is None:
            continue
        result = EvalResult(
            task_type=TASK_TYPES.get(each["task"], each["task"].replace(" ", "-")),
            task_name=each["task"],
            dataset_type=each["data"],
            dataset_name=each["data"],
            dataset_config=each["place"] or None,
            metric_type=each["kind"],
            metric_name=each["name"],
            metric_value=each["value"],
        )
        results.append(result)
    return results


def data_names(report: Mapping[str, Any]) -> str:
    """Return the names of all data that the metrics of a report were measured on."""
    return "; ".join(dict.fromkeys(each["data"] for each in report["metrics"]))


def report_text(report: Mapping[str, Any]) -> str:
    """Format an evaluation report as Markdown: data, protocol, settings, and tables.

    A table of more than `LONGEST_TABLE` rows is folded.
    """
    parts = [f"### {data_names(report)}", _measured_text(report)]
    for columns, rows in tables_of(report["metrics"]).items():
        cells = [[place, *map(_cell, values)] for place, *values in rows]
        table = markdown_table(columns, cells, numbers=True)
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

    protocol = report["protocol"]
    text = f"{protocol[:1].upper()}{protocol[1:]}."
    if shown:
        text += f" Settings: {', '.join(shown)}."
    return f"{text} Measured on {report['time'][:10]}."


def _cell(value: Any) -> str:
    """Format a number of a table."""
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def _folded(summary: str, text: str) -> str:
    """Hide a Markdown text behind a line that the reader can click."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"
