"""The model card of a published checkpoint, from what the checkpoint and the evaluations say about themselves.

`model_card.md` is its text. What was not recorded or measured is left out or "not stated": nothing has a default.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from configuration_dap import FIELDS
from dap.file_io import read_object
from dap.languages import NAMES
from dap.publishing.card_results import eval_results, report_text
from dap.reports import markdown_table
from objectives_dap import OBJECTIVES

HEADS_FOLDER = "pretraining"  # of the repository, with the whole DAP checkpoint
#: tanh(s x) = s x to 3e-4 of a value for |x| < 32, which layer normalisation stays below; float16 can hold s x.
POOLER_SCALE = 2.0**-10
#: What the record of a run says of the recipe, in the card's order.
RECIPE = (
    *(name for name in FIELDS if name not in ("encoder_config", "rtl_languages", "mask_token_id")),
    "pairs a step", "max_seq_length", "language_mix", "mix_alpha", "learning_rate", "head_learning_rate",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "freeze_word_embeddings", "freeze_encoder",
    "bf16", "fp16", "seed",
)  # fmt: skip
#: What a field's name begins with -> the part of an objective that has a use for it.
OF_OBJECTIVE = {"projection": "tr", **{f"{name}_": name for name in OBJECTIVES}}
CURVE = ("loss", *(f"{name}_loss" for name in OBJECTIVES))
CURVE += ("eval_rtl_source_nats", "eval_bow_source_nats", "eval_mean_accuracy")
CURVE_ROWS = 12
NOT_STATED = "not stated"


@dataclass(frozen=True)
class Published:
    """What a folder holds: how it makes a sentence vector, and in which layout."""

    layout: str
    heads: bool
    model_type: str
    layers: int
    hidden_size: int
    pooling: str
    prefix: str
    max_seq_length: int
    normalize: bool
    similarity: str
    has_pooler: bool  # its class has one, if it has no weights in the checkpoint
    prompts: dict[str, str] = field(default_factory=dict)  # of sentence-transformers, by name

    @property
    def pools_itself(self) -> bool:
        """Whether `AutoModel`'s `pooler_output` is the sentence vector, in the plain layout times `POOLER_SCALE`."""
        return self.layout == "dap" or (self.has_pooler and self.pooling == "cls")


@dataclass(frozen=True)
class Sources:
    """What a card is made from, beside the published folder.

    Args:
        config: the DAP checkpoint's config.json, {} for a plain encoder.
        run: `run.json` of the training, {} where there is none; `base_commit` is the Hub's, of what it began with.
        history: `log_history` of `trainer_state.json`.
        steps: optimizer steps that the weights are of; None where it is not known which of a run they are.
        reports: what eval_retrieval.py, mine_bitext.py and run_xnli.py wrote.
        dataset_info: the JSON file of a dataset (`prepare_data.py`'s report or `dataset_info.json`), or its card.
        licence: the model's, as an identifier of the Hub.
    """

    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    steps: int | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    dataset_info: dict[str, Any] | str | None = None
    licence: str | None = None


def read_sources(
    checkpoint: Path,
    reports: Sequence[dict[str, Any]] = (),
    dataset_info: str | Path | None = None,
    licence: str | None = None,
) -> Sources:
    """What a checkpoint's folder, or for `checkpoint-N` the one above, says about its training.

    Raises:
        FileNotFoundError: no such `dataset_info`.
        ValueError: it is JSON, but no object.
    """
    config = _read(checkpoint, "config.json")
    trained = config.get("model_type") == "dap"
    state = _read(checkpoint, "trainer_state.json") if trained else {}
    within = checkpoint.name.startswith("checkpoint-")
    run = _read(checkpoint, "run.json", within) if trained else {}
    ended = _read(checkpoint, "train_results.json", within) if trained else {}
    return Sources(
        config=config if trained else {},
        run=run | {name: ended[name] for name in ("base_commit",) if name in ended},
        history=state.get("log_history", []),
        steps=state.get("global_step") if within else _steps(state, ended),
        reports=list(reports),
        dataset_info=None if dataset_info is None else _read_dataset_info(Path(dataset_info)),
        licence=licence,
    )


def _steps(state: Mapping[str, Any], ended: Mapping[str, Any]) -> int | None:
    """A run may have ended with its best model, which the state alone does not tell."""
    last, best = state.get("global_step"), state.get("best_global_step")
    return ended.get("model_step", last if best in (None, last) else None)


def _read(folder: Path, name: str, or_above: bool = False) -> dict[str, Any]:
    places = [folder, folder.parent] if or_above else [folder]
    path = next((place / name for place in places if (place / name).is_file()), None)
    return {} if path is None else read_object(path)


def _read_dataset_info(path: Path) -> dict[str, Any] | str:
    if path.suffix == ".json":
        return read_object(path)
    return re.sub(
        r"\A---\n.*?\n---\n", "", path.read_text(encoding="utf-8"), flags=re.DOTALL
    ).strip()


def model_card(repo_id: str, published: Published, sources: Sources) -> ModelCard:
    """The card: metadata, with a `model-index` of what was measured, and the text of `model_card.md`."""
    results = [result for report in sources.reports for result in eval_results(report)]
    data = ModelCardData(
        language=languages(sources) or None,
        license=sources.licence,
        library_name="transformers" if published.layout == "dap" else "sentence-transformers",
        tags=[
            "sentence-transformers",
            "feature-extraction",
            "cross-lingual",
            "bitext-mining",
            "dap",
        ],
        base_model=base_model(sources.run),
        pipeline_tag="sentence-similarity",
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    pairs = {
        code: int(words.split()[0]) for code, words in sources.run.get("training text", {}).items()
    }
    rows = [[NAMES.get(code, code), code, f"{count:,}"] for code, count in pairs.items()]
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md")),
        repo_id=repo_id,
        name=repo_id.split("/")[-1],
        made=published,
        remote=published.layout == "dap",
        prefix=repr(published.prefix) if published.prefix else "",
        sources=sources,
        objective=sources.config.get("objective"),
        languages=[NAMES.get(code, code) for code in languages(sources)],
        pairs=pairs,
        pairs_table=markdown_table(["language", "code", "pairs"], rows),
        target=NAMES.get(sources.run.get("target_language", "en"), "the target language"),
        dataset=_dataset(sources.dataset_info),
        recipe=_recipe(sources),
        curve=loss_curve(sources.history),
        results="\n\n".join(map(report_text, sources.reports)),
    )


def languages(sources: Sources) -> list[str]:
    """Codes of the languages that the model was trained on, English last; [] where that was not recorded."""
    found = sorted(sources.run.get("training text", {})) or sorted(
        sources.config.get("rtl_languages") or []
    )
    return [*found, sources.run.get("target_language", "en")] if found else []


def base_model(run: Mapping[str, Any]) -> str | None:
    """The Hub id that training began with: a name alone may be that of a folder which is elsewhere now."""
    base = run.get("model_name_or_path")
    return base if base and run.get("base_commit") and is_hub_id(base) else None


def is_hub_id(name: str) -> bool:
    """Whether a name is the id of a Hub repository, and no path.

    >>> is_hub_id("FacebookAI/xlm-roberta-base"), is_hub_id("/tmp/e5"), is_hub_id("../e5")
    (True, False, False)
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _dataset(info: Mapping[str, Any] | str | None) -> str:
    """Origins and licences by `prepare_data.py`'s report, or what the `dataset_info.json` of a data set says."""
    if info is None:
        return f"Sources and licences: {NOT_STATED}."
    if isinstance(info, str):
        return info
    lines = [str(info[name]).strip() for name in ("description", "homepage") if info.get(name)]
    licences, origins = info.get("licences") or {}, Counter()
    languages = info.get(
        "languages"
    )  # those of `prepare_data.py`; others list codes under this name
    for each in languages.values() if isinstance(languages, Mapping) else ():
        origins.update(each.get("origins", {}))
    if origins:
        rows = [
            [name, f"{count:,}", licences.get(name) or NOT_STATED]
            for name, count in origins.most_common()
        ]
        return "\n\n".join([*lines, markdown_table(["origin", "training pairs", "licence"], rows)])
    stated = info.get("license") or NOT_STATED
    return "\n\n".join(
        [*lines, f"Licence: {', '.join(stated) if isinstance(stated, list) else stated}."]
    )


def _recipe(sources: Sources) -> str:
    known = {**sources.config, **sources.run}
    if known.get("language_mix") != "temperature":
        known["mix_alpha"] = None
    rows = []
    if base := sources.run.get("model_name_or_path"):
        kind = "" if is_hub_id(base) else "a local folder, "
        rows.append(["started from", base_model(sources.run) or f"{kind}`{Path(base).name}`"])
    if shape := sources.run.get("config_name"):
        name = shape if is_hub_id(shape) else Path(shape).name
        rows.append(["started from", f"random weights, configuration `{name}`"])
    if sources.steps is not None:
        rows.append(["optimizer steps", sources.steps])
    for name in RECIPE:
        needed = next(
            (part for start, part in OF_OBJECTIVE.items() if name.startswith(start)), None
        )
        if known.get(name) is not None and (
            needed is None or needed in known.get("objective", "").split("+")
        ):
            rows.append([name.replace("_", " "), known[name]])
    return markdown_table(["", ""], rows)


def loss_curve(history: Sequence[Mapping[str, Any]]) -> str:
    """The log as a table of `CURVE_ROWS` steps, evenly spread, and of the evaluations if they are few; else ""."""
    steps: dict[int, dict[str, float]] = {}
    for entry in history:
        if found := {name: entry[name] for name in CURVE if name in entry}:
            steps.setdefault(entry["step"], {}).update(found)
    columns = [name for name in CURVE if any(name in values for values in steps.values())]
    if not any(name.endswith("loss") for name in columns):
        return ""
    numbers, evaluated = sorted(steps), {step for step in steps if CURVE[-1] in steps[step]}
    kept = {numbers[round(i * (len(numbers) - 1) / (CURVE_ROWS - 1))] for i in range(CURVE_ROWS)}
    if len(evaluated) <= CURVE_ROWS:
        kept |= evaluated
    rows = [
        [step, *(f"{steps[step][c]:.3f}" if c in steps[step] else "" for c in columns)]
        for step in sorted(kept)
    ]
    header = ["step", *(name.removeprefix("eval_").replace("_", " ") for name in columns)]
    return markdown_table(header, rows)
