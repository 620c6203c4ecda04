"""Make the model card of a published checkpoint from its records and evaluations.

`model_card.md` is the template. Anything that was not recorded or measured is left out, or the card
says "not stated".
"""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download, metadata_load
from huggingface_hub.utils import HFValidationError, validate_repo_id

from configuration_dap import FIELDS
from dap_transformers.errors import loading
from dap_transformers.files import read_object, read_text, require_kinds
from dap_transformers.languages import NAMES
from dap_transformers.publishing.card_results import eval_results, folded, headlines, report_text
from dap_transformers.reports import mean_of
from dap_transformers.tables import markdown_table
from objectives_dap import OBJECTIVES

HEADS_FOLDER = "pretraining"  # in the repository, with the whole DAP checkpoint
#: Factor of `pooler_output`. The pooler's tanh changes x by less than 3e-4 of its value for |x| <
#: 32 with this factor, and layer normalisation keeps states below that. float16 can hold the
#: result.
POOLER_SCALE = 2.0**-10
#: Names in a training's record that the card shows, in this order.
RECIPE = (
    *(name for name in FIELDS if name not in ("encoder_config", "rtl_languages", "mask_token_id")),
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
    "freeze_encoder",
    "peft_lora_rank",
    "bf16",
    "fp16",
    "seed",
)
#: First part of a field's name -> the objective that uses the field.
USED_BY = {"projection": "tr", **{f"{name}_": name for name in OBJECTIVES}}
#: Values of the training log that the card shows.
CURVE = ("loss", *(f"{name}_loss" for name in OBJECTIVES))
CURVE += ("eval_rtl_source_nats", "eval_bow_source_nats", "eval_mean_accuracy")
CURVE_ROWS = 12
#: Sentences that the page of the model compares when a visitor clicks a button.
WIDGET = {
    "source_sentence": "Where is the station?",
    "sentences": ["Wo ist der Bahnhof?", "¿Dónde está la estación?", "The soup is too hot."],
}
#: What the card reads from the files of a checkpoint, in the form of
#: `dap_transformers.files.misfit`.
OF_CONFIG = {"model_type": str | None, "objective": str | None, "rtl_languages": ([str], None)}
OF_LOG = {"step": int} | dict.fromkeys(CURVE, float | None)
OF_STATE = {
    "log_history": ([OF_LOG], None),
    "global_step": int | None,
    "best_global_step": int | None,
}
OF_RESULTS = {"base_commit": str | None, "model_step": int | None}
#: What the card reads from a report of `prepare-data`, or a `dataset_info.json`.
OF_DATASET = {
    "languages": ({str: {"origins": ({str: int}, None)}}, list | str | None),
    "licences": ({str: str | None}, None),
    "license": (str, [str], None),
}
#: What the card reads from the metadata of a data card.
OF_CARD = {name: (str, [str], None) for name in ("license", "datasets", "source_datasets")}
NOT_STATED = "not stated"


@dataclass(frozen=True)
class Published:
    """What a published folder holds, and how a sentence vector is computed with it.

    Attributes:
        layout: "plain" (an encoder that needs no code of ours) or "dap" (the DAP checkpoint).
        heads: whether the folder has the training heads.
        model_type: type of the encoder, such as "xlm-roberta".
        layers: number of the encoder's layers.
        hidden_size: entries of a sentence vector.
        pooling: "cls" or "mean".
        prefix: text before every sentence.
        max_seq_length: number of tokens that a sentence is cut to.
        normalize: whether sentence-transformers returns vectors of length 1.
        similarity: "cosine" or "dot".
        has_pooler: whether the encoder's class has a pooler, even if the checkpoint has no
            weights for it.
        prompts: prompts of sentence-transformers, by name.
    """

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
    has_pooler: bool
    prompts: dict[str, str] = field(default_factory=dict)

    @property
    def pools_itself(self) -> bool:
        """Tell whether the model's output `pooler_output` is the sentence vector.

        This is so in the layout "dap", and for CLS pooling if the encoder's class has a pooler.
        In the plain layout the output is the vector times `POOLER_SCALE`.
        """
        return self.layout == "dap" or (self.has_pooler and self.pooling == "cls")


@dataclass(frozen=True)
class Sources:
    """What a card is made from, besides the published folder.

    Attributes:
        config: config.json of the DAP checkpoint. {} for a plain encoder.
        run: `run.json` of the training, or {}. `base_commit` is added if training started from
            the Hub.
        history: `log_history` of `trainer_state.json`.
        steps: optimizer steps of these weights. None if unknown.
        reports: reports of eval_retrieval.py, mine-bitext and run_xnli.py.
        dataset_info: report of `prepare-data`, a `dataset_info.json`, or the text of a data
            card.
        licence: the model's licence, as the Hub names it.
        datasets: Hub ids of the datasets that the training text comes from.
    """

    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    steps: int | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    dataset_info: dict[str, Any] | str | None = None
    licence: str | None = None
    datasets: list[str] = field(default_factory=list)


def read_sources(
    checkpoint: Path,
    reports: Sequence[dict[str, Any]] = (),
    dataset_info: str | Path | None = None,
    licence: str | None = None,
) -> Sources:
    """Collect what the model card of a checkpoint is made from.

    Records that do not exist are left empty. For a plain encoder, no records are read. For a
    folder `checkpoint-N`, `run.json` and `train_results.json` may be in the folder above it.

    Args:
        checkpoint: folder of the checkpoint.
        reports: evaluation reports to show on the card.
        dataset_info: file that describes the training text: a JSON object, or a data card. It can
            also be the Hub id of a dataset, such as "user/pairs". None states nothing.
        licence: the model's licence, as the Hub names it. None takes that of the training text.
    """
    text = TrainingText() if dataset_info is None else read_training_text(dataset_info)
    known = {
        "reports": list(reports),
        "dataset_info": text.description,
        "licence": licence or text.licence,
        "datasets": text.datasets,
    }
    config = _read_record(checkpoint, "config.json", OF_CONFIG)
    if config.get("model_type") != "dap":
        return Sources(**known)

    is_intermediate = checkpoint.name.startswith("checkpoint-")
    state = _read_record(checkpoint, "trainer_state.json", OF_STATE)
    run = _read_record(checkpoint, "run.json", {}, is_intermediate)
    results = _read_record(checkpoint, "train_results.json", OF_RESULTS, is_intermediate)
    if "base_commit" in results:
        run["base_commit"] = results["base_commit"]
    return Sources(
        config=config,
        run=run,
        history=state.get("log_history") or [],
        steps=state.get("global_step") if is_intermediate else _final_steps(state, results),
        **known,
    )


def _final_steps(state: Mapping[str, Any], results: Mapping[str, Any]) -> int | None:
    """Return the number of optimizer steps of the weights that a finished run has saved.

    Returns:
        The number of steps. None if it is unknown whether the best or the last weights were saved.
    """
    last = state.get("global_step")
    best = state.get("best_global_step")
    return results.get("model_step", last if best in (None, last) else None)


def _read_record(
    folder: Path, name: str, kinds: Mapping[str, Any], or_above: bool = False
) -> dict[str, Any]:
    """Read a JSON record of a training, or return an empty dictionary if there is none."""
    path = folder / name
    if or_above and not path.is_file():
        path = folder.parent / name
    return read_object(path, kinds) if path.is_file() else {}


@dataclass(frozen=True)
class TrainingText:
    """What is known about the training text.

    Args:
        description: report of `prepare-data`, a `dataset_info.json`, or the text of a data card.
        licence: the licence of all of it, as the Hub names licences. None if there are several.
        datasets: Hub ids of the datasets that it comes from.
    """

    description: dict[str, Any] | str | None = None
    licence: str | None = None
    datasets: list[str] = field(default_factory=list)


def read_training_text(name: str | Path) -> TrainingText:
    """Read a description of the training text.

    Args:
        name: a JSON file, a data card, or the Hub id of a dataset with a data card.
    """
    datasets = []
    path = Path(name)
    if not path.exists() and not path.suffix and "/" in str(name) and is_hub_id(str(name)):
        datasets = [str(name)]
        with loading("data card", name):
            path = Path(hf_hub_download(str(name), "README.md", repo_type="dataset"))

    if path.suffix == ".json":
        info = read_object(path, OF_DATASET)
        of_origins = filter(None, (info.get("licences") or {}).values())
        licences = info.get("license") or list(of_origins)
        return TrainingText(info, _single_licence(licences))

    text = read_text(path)
    without_metadata = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    with loading("metadata", path):
        metadata = metadata_load(path) or {}
        require_kinds(path, metadata, OF_CARD)
    for key in ("datasets", "source_datasets"):
        for dataset in metadata.get(key) or []:
            if "/" in dataset and is_hub_id(dataset):
                datasets.append(dataset)
    licence = _single_licence(metadata.get("license"))
    return TrainingText(without_metadata.strip(), licence, datasets)


def _single_licence(licences: str | list[str] | None) -> str | None:
    """Return the one licence of a text, or None if there are several or its name is a phrase."""
    names = {licences} if isinstance(licences, str) else set(licences or [])
    if len(names) != 1:
        return None
    (name,) = names
    return name if re.fullmatch(r"[a-z0-9.-]+", name) else None


def model_card(repo_id: str, published: Published, sources: Sources) -> ModelCard:
    """Make the model card: metadata with a `model-index` of the results, and a text.

    Nothing is written.

    Args:
        repo_id: id of the model on the Hub.
        published: what the published folder holds.
        sources: everything else that the card shows.
    """
    results = [result for report in sources.reports for result in eval_results(report)]
    name = repo_id.split("/")[-1]
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
        datasets=sources.datasets or None,
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

    target = sources.run.get("target_language") or "en"
    thresholds = mining_thresholds(sources.reports)
    recommended = ""
    if thresholds:
        recommended = f"{statistics.median(each.value for each in thresholds):.4f}"
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md")),
        repo_id=repo_id,
        name=name,
        made=published,
        remote=published.layout == "dap",
        prefix=repr(published.prefix) if published.prefix else "",
        sources=sources,
        objective=sources.config.get("objective"),
        method=method(sources.config.get("objective") or ""),
        languages=[NAMES.get(code, code) for code in languages(sources)],
        pairs=pairs,
        pairs_table=markdown_table(["language", "pairs"], rows, numbers=True),
        target=NAMES.get(target, "the target language"),
        dataset=_dataset_text(sources.dataset_info),
        recipe=folded("Recipe", _recipe_table(sources)),
        curve=loss_curve(sources.history),
        folded=folded,
        headlines=headlines(sources.reports),
        results="\n\n".join(map(report_text, sources.reports)),
        thresholds=thresholds,
        threshold=recommended,
    )


def method(objective: str) -> str:
    """Say in words what a model was trained by.

    >>> method("tr+bow")
    'translation ranking (TR) and bag-of-words prediction (BOW)'
    >>> method("rtl+tr")
    'dual-alignment pre-training (DAP)'
    """
    names = objective.split("+")
    if set(names) == {"tr", "rtl"}:
        return "dual-alignment pre-training (DAP)"
    titles = []
    for name in names:
        title = OBJECTIVES[name].title if name in OBJECTIVES else ""
        titles.append(title or name)
    return " and ".join(titles)


@dataclass(frozen=True)
class Threshold:
    """A threshold of mining that was measured, for the ratio margin with 4 neighbours."""

    value: float
    origin: str  # such as "best F1 on BUCC fr-en"


def mining_thresholds(reports: Sequence[Mapping[str, Any]]) -> list[Threshold]:
    """Collect the thresholds of mining that were measured: on BUCC, or by known translations.

    Only those of the ratio margin with 4 neighbours are taken, because the card's section on
    mining is about these.

    Args:
        reports: reports of `mine-bitext` and others, also merged ones.
    """
    found = []
    for report in reports:
        settings = report.get("settings", {})
        if (settings.get("margin"), settings.get("k")) != ("ratio", 4):
            continue
        pairs = report.get("pairs")
        for pair, numbers in pairs.items() if isinstance(pairs, Mapping) else ():
            value = mean_of(numbers.get("threshold"))
            if isinstance(value, float):
                found.append(Threshold(value, f"best F1 on BUCC {pair}"))
        choice = report.get("threshold_choice") or {}
        estimated = choice.get("threshold"), choice.get("precision")
        if choice.get("calibrated") and None not in estimated:
            threshold, precision = map(mean_of, estimated)
            share = f"{100 * precision:.0f}%"
            found.append(Threshold(threshold, f"estimated precision {share}"))
    return found


def languages(sources: Sources) -> list[str]:
    """Return the codes of the training languages, or an empty list if they are unknown.

    Source languages come first, sorted. The target language is the last.
    """
    found = sources.run.get("training text") or sources.config.get("rtl_languages") or []
    if not found:
        return []
    target = sources.run.get("target_language") or "en"
    return [*sorted(set(found) - {target}), target]


def base_model(run: Mapping[str, Any]) -> str | None:
    """Return the Hub id of the model that training started from.

    None stands for a local folder, and also for a model that may have been one.

    Args:
        run: record of the training. Only a model of the Hub has a `base_commit` there.
    """
    base = run.get("model_name_or_path")
    return base if base and run.get("base_commit") and is_hub_id(base) else None


def is_hub_id(name: str) -> bool:
    """Tell whether a name has the form of a Hub repository's id, and no such local path exists.

    >>> is_hub_id("FacebookAI/xlm-roberta-base"), is_hub_id("/tmp/e5"), is_hub_id("../e5")
    (True, False, False)
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _dataset_text(info: Mapping[str, Any] | str | None) -> str:
    """Describe the origins and licences of the training text in Markdown."""
    if info is None:
        return f"Sources and licences: {NOT_STATED}."
    if isinstance(info, str):
        return info

    paragraphs = []
    for name in ("description", "homepage"):
        if info.get(name):
            paragraphs.append(str(info[name]).strip())

    origins: Counter[str] = Counter()
    by_language = info.get("languages")
    if isinstance(by_language, Mapping):  # a report of prepare-data. Others have a list of codes.
        for numbers in by_language.values():
            origins.update(numbers.get("origins", {}))
    if origins:
        licences = info.get("licences") or {}
        rows = []
        for name, count in origins.most_common():
            rows.append([name, f"{count:,}", licences.get(name) or NOT_STATED])
        paragraphs.append(markdown_table(["origin", "training pairs", "licence"], rows))
        return "\n\n".join(paragraphs)

    stated = info.get("license") or NOT_STATED
    if isinstance(stated, list):
        stated = ", ".join(stated)
    paragraphs.append(f"Licence: {stated}.")
    return "\n\n".join(paragraphs)


def _recipe_table(sources: Sources) -> str:
    """Make a Markdown table of the training's settings: its start, its steps, and `RECIPE`.

    Settings of objectives that were not trained, and unknown ones, are left out.
    """
    rows: list[list[Any]] = []
    if base := sources.run.get("model_name_or_path"):
        kind = "" if is_hub_id(base) else "a local folder, "
        rows.append(["started from", base_model(sources.run) or f"{kind}`{Path(base).name}`"])
    if shape := sources.run.get("config_name"):
        name = shape if is_hub_id(shape) else Path(shape).name
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


def loss_curve(history: Sequence[Mapping[str, Any]]) -> str:
    """Make a table of losses and accuracies from the training log.

    The table has `CURVE_ROWS` evenly spread steps, and all evaluations unless there are more of
    them than that.

    Args:
        history: `log_history` of `trainer_state.json`.

    Returns:
        A Markdown table with one row per step, or "" if the log has no losses.
    """
    steps: dict[int, dict[str, float]] = {}
    for entry in history:
        if found := {name: entry[name] for name in CURVE if name in entry}:
            steps.setdefault(entry["step"], {}).update(found)
    logged = set().union(*steps.values())
    columns = [name for name in CURVE if name in logged]
    if not any(name.endswith("loss") for name in columns):
        return ""

    numbers = sorted(steps)
    kept = set()
    for i in range(CURVE_ROWS):
        kept.add(numbers[round(i * (len(numbers) - 1) / (CURVE_ROWS - 1))])
    evaluated = {step for step in steps if "eval_mean_accuracy" in steps[step]}
    if len(evaluated) <= CURVE_ROWS:
        kept |= evaluated

    rows = []
    for step in sorted(kept):
        values = [steps[step].get(name) for name in columns]
        rows.append([step, *("" if value is None else f"{value:.3f}" for value in values)])
    header = ["step", *(name.removeprefix("eval_").replace("_", " ") for name in columns)]
    return markdown_table(header, rows)
