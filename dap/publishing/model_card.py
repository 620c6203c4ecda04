"""The model card of a published checkpoint, from what the checkpoint and the evaluations say about themselves.

What was not recorded or measured is left out or "not stated": nothing here has a default of its own.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from dap.errors import UserError
from dap.files import read_json
from dap.languages import NAMES
from dap.publishing.card_results import eval_results, results_text
from dap.reports import markdown_table

HEADS_FOLDER = "pretraining"  # of the repository, with the whole DAP checkpoint
#: What the record of a run says of the recipe, in the card's order.
RECIPE = (
    "objective", "pooling", "projection", "tr_similarity", "tr_temperature", "tr_margin", "tr_bidirectional",
    "rtl_layers", "rtl_direction", "rtl_ratio", "rtl_weight", "target_vocab_size", "rtl_sampled_negatives",
    "tlm_probability", "tlm_weight", "mlm_probability",
    "pairs a step", "max_seq_length", "language_mix", "mix_alpha", "learning_rate", "lr_scheduler_type",
    "warmup_steps", "weight_decay", "optim", "freeze_word_embeddings", "bf16", "fp16", "seed",
)  # fmt: skip
#: What a field's name begins with -> the part of an objective that has a use for it.
OF_OBJECTIVE = {"tr_": "tr", "projection": "tr", "rtl_": "rtl", "target_vocab": "rtl", "tlm_": "tlm", "mlm_": "mlm"}
CURVE = ("loss", "tr_loss", "rtl_loss", "tlm_loss", "mlm_loss", "eval_mean_accuracy")
CURVE_ROWS = 12
NOT_STATED = "not stated"
CITATION = """@inproceedings{li-etal-2023-dual,
  title = {Dual-Alignment Pre-training for Cross-lingual Sentence Embedding},
  author = {Li, Ziheng and Huang, Shaohan and Zhang, Zihan and Deng, Zhi-Hong and Lou, Qiang and Huang, Haizhen and
            Jiao, Jian and Wei, Furu and Deng, Weiwei and Zhang, Qi},
  booktitle = {Proceedings of the 61st Annual Meeting of the Association for Computational Linguistics
               (Volume 1: Long Papers)},
  year = {2023},
  url = {https://arxiv.org/abs/2305.09148}
}"""


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
    has_pooler_option: bool
    prompts: dict[str, str] = field(default_factory=dict)  # of sentence-transformers, by name


@dataclass(frozen=True)
class Sources:
    """What a card is made from, beside the published folder.

    Args:
        config: the DAP checkpoint's config.json, {} for a plain encoder.
        run: `run.json` of the training, {} where there is none; `base_commit` is the Hub's, of what it began with.
        history: `log_history` of `trainer_state.json`.
        steps: optimizer steps that the weights are of; None where it is not known which of a run they are.
        reports: what eval_retrieval.py, mine_bitext.py and run_xnli.py wrote.
        dataset_info: a dataset's `dataset_info.json`, or the text of its card.
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
    return {} if path is None else read_json(path)


def _read_dataset_info(path: Path) -> dict[str, Any] | str:
    if path.suffix != ".json":
        text = path.read_text(encoding="utf-8")
        return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL).strip()
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is no dataset_info.json: expected an object, found {type(content).__name__}.")
    return content


def model_card(repo_id: str, published: Published, sources: Sources) -> ModelCard:
    """The card: metadata with a `model-index` of what was measured, and the text."""
    data = card_data(repo_id, published, sources)
    parts = [
        f"# {repo_id.split('/')[-1]}",
        _introduction(published, sources),
        "## Use",
        usage(repo_id, published),
        "## Training",
        _training(sources),
        "## Results",
        results_text(sources.reports) or "No evaluation was given when this card was made.",
        "## Limits",
        _limits(published, sources),
        "## Citation",
        f"```bibtex\n{CITATION}\n```",
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def card_data(repo_id: str, published: Published, sources: Sources) -> ModelCardData:
    """The metadata: only what is known."""
    results = [result for report in sources.reports for result in eval_results(report)]
    return ModelCardData(
        language=languages(sources) or None,
        license=sources.licence,
        library_name="transformers" if published.layout == "dap" else "sentence-transformers",
        tags=["sentence-transformers", "feature-extraction", "cross-lingual", "bitext-mining", "dap"],
        base_model=base_model(sources.run),
        pipeline_tag="sentence-similarity",
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )


def languages(sources: Sources) -> list[str]:
    """Codes of the languages that the model was trained on, English last; [] where that was not recorded."""
    found = sorted(sources.run.get("training text", {})) or sorted(sources.config.get("rtl_languages") or [])
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


def _introduction(published: Published, sources: Sources) -> str:
    known, objective = languages(sources), sources.config["objective"] if sources.config else None
    kind = f"(`{published.model_type}`, {published.layers} layers)"
    if objective == "mlm":
        text = f"An encoder {kind} to start training from: its vectors of translations have not been aligned."
    else:
        text = (
            f"A sentence encoder {kind} that gives a vector of {published.hidden_size} values for a sentence, so that "
            "translations lie next to each other: for retrieval across languages, bitext mining and similarity."
        )
    if objective:
        made = "masked language modelling" if objective == "mlm" else "dual-alignment pre-training (DAP)"
        text += f" It was trained with dap-transformers, objective `{objective}` of {made}."
    text += f" Languages: {', '.join(NAMES.get(code, code) for code in known) or NOT_STATED}."
    length = " The vectors of sentence-transformers have length 1." if published.normalize else ""
    prefix = f", after the prefix {published.prefix!r}" if published.prefix else ""
    pooled = "the first token's last state" if published.pooling == "cls" else "the mean of the tokens' last states"
    how = f"The vector is {pooled}{prefix}, of at most {published.max_seq_length} tokens; compare by"
    by = {"dot": "inner product"}.get(published.similarity, published.similarity)
    return f"{text}\n\n{how} {by}.{length}"


def usage(repo_id: str, published: Published) -> str:
    """Python that runs as it is written: sentence-transformers, Transformers, and this project's batches."""
    remote = published.layout == "dap"
    trust = ", trust_remote_code=True" if remote else ""
    snippets = [
        f'''from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{repo_id}"{trust})
vectors = model.encode(["Guten Morgen!", "Good morning!"])
print(model.similarity(vectors, vectors))''',
        _transformers_snippet(repo_id, published),
        f'''from dap.encoding import SentenceEncoder  # of dap-transformers

encoder = SentenceEncoder.from_pretrained("{repo_id}")
vectors = encoder.encode(["Guten Morgen!", "Good morning!"])  # (2, {published.hidden_size}), for many''',
    ]
    if published.heads:
        where = "" if remote else f', subfolder="{HEADS_FOLDER}"'
        snippets.append(f'''from transformers import AutoModelForPreTraining  # with the heads, to train on

model = AutoModelForPreTraining.from_pretrained("{repo_id}"{where}, trust_remote_code=True)''')
    note = (
        "" if remote or not published.has_pooler_option else
        "\n\nWithout `add_pooling_layer=False` Transformers adds a pooler with random weights; do not use its output."
    )  # fmt: skip
    return "\n\n".join(f"```python\n{snippet}\n```" for snippet in snippets) + note


def _transformers_snippet(repo_id: str, published: Published) -> str:
    options, lines = "", ["    vectors = model(**batch).last_hidden_state[:, 0]"]
    if published.pooling == "mean":
        states = '    states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)'
        lines = [states, "    vectors = (states * mask).sum(1) / mask.sum(1)"]
    if published.layout == "dap":
        options, lines = ", trust_remote_code=True", ["    vectors = model(**batch).pooler_output"]
    elif published.has_pooler_option:
        options = ", add_pooling_layer=False"
    prefix = f"{published.prefix!r} + " if published.prefix else ""
    body = "\n".join(lines)
    return f'''import torch
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
model = AutoModel.from_pretrained("{repo_id}"{options}).eval()
sentences = [{prefix}text for text in ("Guten Morgen!", "Good morning!")]
batch = tokenizer(sentences, padding=True, truncation=True, max_length={published.max_seq_length}, return_tensors="pt")
with torch.no_grad():
{body}  # (2, {published.hidden_size})'''


# ------------------------------------------------------------------------------------------- training


def _training(sources: Sources) -> str:
    if not sources.config:
        return f"Recipe and training data: {NOT_STATED}."
    parts = ["### Data", _data(sources), "### Recipe", _recipe(sources)]
    if curve := loss_curve(sources.history):
        parts += ["### Loss", curve]
    return "\n\n".join(parts)


def _data(sources: Sources) -> str:
    text, stated = sources.run.get("training text", {}), sources.dataset_info
    parts = []
    if text:
        pairs = {code: int(words.split()[0]) for code, words in text.items()}
        rows = [[NAMES.get(code, code), code, f"{count:,}"] for code, count in pairs.items()]
        target = NAMES.get(sources.run.get("target_language", "en"), "the target language")
        languages = "1 language" if len(pairs) == 1 else f"{len(pairs)} languages"
        parts.append(f"{sum(pairs.values()):,} sentence pairs of {languages} with {target}:")
        parts.append(markdown_table(["language", "code", "pairs"], rows))
    else:
        parts.append(f"Amount of text: {NOT_STATED}.")
    if stated is None:
        return "\n\n".join([*parts, f"Sources and licences: {NOT_STATED}."])
    return "\n\n".join([*parts, stated if isinstance(stated, str) else _dataset(stated)])


def _dataset(info: Mapping[str, Any]) -> str:
    """Origins and licences of a `dataset_info.json`: prepare_data.py's, or what a data set of the Hub says."""
    lines = [str(info[name]).strip() for name in ("description", "homepage") if info.get(name)]
    licences, origins = info.get("licences") or {}, Counter()
    for each in info.get("configs", {}).values():
        origins.update(each.get("origins", {}))
    if origins:
        rows = [[name, f"{count:,}", licences.get(name) or NOT_STATED] for name, count in origins.most_common()]
        return "\n\n".join([*lines, markdown_table(["origin", "training pairs", "licence"], rows)])
    stated = info.get("license") or NOT_STATED
    return "\n\n".join([*lines, f"Licence: {', '.join(stated) if isinstance(stated, list) else stated}."])


def _recipe(sources: Sources) -> str:
    known = {**{key: value for key, value in sources.config.items() if key in RECIPE}, **sources.run}
    rows = []
    if base := sources.run.get("model_name_or_path"):
        kind = "" if is_hub_id(base) else "a local folder, "
        rows.append(["started from", base_model(sources.run) or f"{kind}`{Path(base).name}`"])
    if shape := sources.run.get("config_name"):
        rows.append(
            ["started from", f"random weights, configuration `{shape if is_hub_id(shape) else Path(shape).name}`"]
        )
    if sources.steps is not None:
        rows.append(["optimizer steps", sources.steps])
    for name in RECIPE:
        needed = next((part for start, part in OF_OBJECTIVE.items() if name.startswith(start)), None)
        if known.get(name) is not None and (needed is None or needed in known.get("objective", "").split("+")):
            rows.append([name.replace("_", " "), known[name]])
    if "mix_alpha" in known and known.get("language_mix") != "temperature":
        rows = [row for row in rows if row[0] != "mix alpha"]
    note = "" if sources.run else "\n\nThe run left no record (`run.json`): what is not listed is not stated."
    return markdown_table(["", ""], rows) + note


def loss_curve(history: Sequence[Mapping[str, Any]]) -> str:
    """The log as a table of `CURVE_ROWS` steps, evenly spread, and of the evaluations if they are few; else ""."""
    steps: dict[int, dict[str, float]] = {}
    for entry in history:
        if found := {name: entry[name] for name in CURVE if name in entry}:
            steps.setdefault(entry["step"], {}).update(found)
    columns = [name for name in CURVE if any(name in values for values in steps.values())]
    if not any(name.endswith("loss") for name in columns):
        return ""
    numbers = sorted(steps)
    last = len(numbers) - 1
    evaluated = [i for i, number in enumerate(numbers) if CURVE[-1] in steps[number]]
    kept = {round(i * last / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)}
    kept = sorted(kept | set(evaluated if len(evaluated) <= CURVE_ROWS else []))
    rows = [
        [numbers[i], *(f"{steps[numbers[i]][c]:.3f}" if c in steps[numbers[i]] else "" for c in columns)] for i in kept
    ]
    header = ["step", *(name.removeprefix("eval_").replace("_", " ") for name in columns)]
    return markdown_table(header, rows) + "\n\nLosses in nats, means since the step logged before."


def _limits(published: Published, sources: Sources) -> str:
    lines = [f"- Text beyond {published.max_seq_length} tokens is cut off."]
    trained = sources.run.get("max_seq_length")
    if trained is not None and trained < published.max_seq_length:
        lines.append(f"- The training cut sentences at {trained} tokens: longer ones were never seen whole.")
    if known := languages(sources):
        lines.append(f"- Trained on {len(known)} languages; nothing is known here about others.")
    lines.append("- A near sentence need not be a translation: check mined pairs before you rely on them.")
    lines.append("- What biases the training text has, the vectors have; they have not been examined.")
    if not sources.reports:
        lines.append("- Its quality has not been stated here.")
    return "\n".join(lines)
