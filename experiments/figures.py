"""The pictures of docs/reproduction.md: token states of two models on the plane, and how a sentence pair aligns.

    python -m experiments.figures --models TR=out/tr DAP=out/dap --data_dir tatoeba/ --output_dir docs/figures

Figure 1 (`token_states.png`) shows the tokens of 100 Arabic–English pairs, as the paper's does; the heat maps
(`alignment.png`) the words of one pair whose languages order them differently.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import HfArgumentParser

from dap.commands import command
from dap.encoding import SentenceEncoder
from dap.errors import UserError
from dap.languages import NAMES
from dap.search import plot_alignment, plot_token_states
from eval_retrieval import read_languages
from experiments.alignment import states_of_words, token_spans
from experiments.reference import word_spans


@dataclass
class FigureArguments:
    """Which models are drawn, on which sentences, and where the pictures go."""

    models: list[str] = field(metadata={"help": "Two of NAME=PATH, the first on the left."})
    data_dir: list[str] = field(metadata={"help": "Parallel text with English, such as Tatoeba's."})
    output_dir: str = field(metadata={"help": "Folder for the pictures."})
    cloud_language: str = field(default="ar", metadata={"help": "Language of Figure 1."})
    cloud_pairs: int = field(default=100, metadata={"help": "First pairs of that language to draw."})
    pair_language: str = field(default="tr", metadata={"help": "Language of the pair that is aligned."})
    pair_line: int = field(default=216, metadata={"help": "Its line, counted from 1."})
    units: str = field(default="words", metadata={"help": "What is aligned.", "choices": ["words", "subwords"]})
    prefix: str | None = field(default=None, metadata={"help": "Text before every sentence. Default: the model's."})
    font: str | None = field(default=None, metadata={"help": "Font file, for scripts that DejaVu Sans lacks."})


def run(argv: Sequence[str] | None = None) -> list[Path]:
    """Draws as the command line `argv` says (None: the process's own); returns the pictures.

    Raises:
        ValueError: arguments or data that do not fit, or a font without the characters.
        OSError: no such data or model.
    """
    (args,) = HfArgumentParser(FigureArguments, description=__doc__.splitlines()[0]).parse_args_into_dataclasses(argv)
    models = dict(_named(model) for model in args.models)
    if len(models) != 2:
        raise UserError(f"--models {' '.join(args.models)}: give two of NAME=PATH, of different names")
    cloud = read_languages(args.data_dir, [args.cloud_language]).popitem()
    language, rows = read_languages(args.data_dir, [args.pair_language]).popitem()
    if not 0 < args.pair_line <= len(rows):
        raise UserError(f"--pair_line {args.pair_line}: {language} has lines 1 to {len(rows)}")
    encoders = {
        name: SentenceEncoder.from_pretrained(path, "mean", args.prefix)  # token states are not pooled
        for name, path in models.items()
    }
    return [draw_clouds(encoders, cloud, args), draw_pair(encoders, rows[args.pair_line - 1], args)]


def _named(model: str) -> tuple[str, str]:
    name, equals, path = model.partition("=")
    if not (name and equals and path):
        raise UserError(f"--models {model}: give NAME=PATH")
    return name, path


def draw_clouds(
    encoders: dict[str, SentenceEncoder], text: tuple[str, list[tuple[str, str]]], args: FigureArguments
) -> Path:
    """Figure 1; prints the distance of the two clouds for each model."""
    language, rows = text
    sides = list(zip(*rows[: args.cloud_pairs], strict=True))
    states = [tuple(np.concatenate(encoder.encode_tokens(side)) for side in sides) for encoder in encoders.values()]
    path = Path(args.output_dir, "token_states.png")
    distances = plot_token_states(*states, path, NAMES.get(language, language), titles=tuple(encoders))
    for name, distance in zip(encoders, distances, strict=True):
        print(f"{name}: centres of {len(sides[0])} {language}-en pairs' tokens {distance:.3f} spreads apart")
    print(f"written to {path}")
    return path


def draw_pair(encoders: dict[str, SentenceEncoder], pair: tuple[str, str], args: FigureArguments) -> Path:
    """The heat maps; prints the links of each model.

    Raises:
        ValueError: the models cut the pair into different subwords.
    """
    states, labels = {}, {}
    for name, encoder in encoders.items():
        if args.units == "words":
            spans = [np.array(word_spans(side), np.int64).reshape(-1, 2) for side in pair]
            states[name] = tuple(states_of_words(encoder, pair, spans))
        else:
            spans, states[name] = token_spans(encoder, pair), tuple(encoder.encode_tokens(pair))
        labels[name] = [[text[start:end] for start, end in side] for text, side in zip(pair, spans, strict=True)]
    (first, cut), (second, other) = labels.items()
    if cut != other:
        raise UserError(f"{first} and {second} cut the pair into different subwords: draw it with --units words")
    path = Path(args.output_dir, "alignment.png")
    for name, links in plot_alignment(states, *cut, path, args.font).items():
        print(f"{name}: {', '.join(f'{cut[0][i]}–{cut[1][j]}' for i, j in links)}")
    print(f"written to {path}")
    return path


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `run`."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    run(argv)


if __name__ == "__main__":
    main()
