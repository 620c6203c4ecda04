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

from dap.alignment import plot_alignment, plot_token_states
from dap.commands import command
from dap.encoding import SentenceEncoder
from dap.errors import UserError
from dap.languages import NAMES
from eval_retrieval import read_languages
from experiments.alignment import states_of_words
from experiments.reference import word_spans


@dataclass
class FigureArguments:
    """Which models are drawn, on which sentences, and where the pictures go."""

    models: list[str] = field(metadata={"help": "Two of NAME=PATH, the first on the left."})
    data_dir: list[str] = field(metadata={"help": "Parallel text with English, such as Tatoeba's."})
    output_dir: str = field(metadata={"help": "Folder for the pictures."})
    cloud_language: str = field(default="ar", metadata={"help": "Language of Figure 1."})
    cloud_pairs: int = field(
        default=100, metadata={"help": "First pairs of that language to draw."}
    )
    pair_language: str = field(
        default="tr", metadata={"help": "Language of the pair that is aligned."}
    )
    pair_line: int = field(default=216, metadata={"help": "Its line, counted from 1."})


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: draws both pictures, and prints the distance of each model's clouds and its links."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    (args,) = HfArgumentParser(
        FigureArguments, description=__doc__.splitlines()[0]
    ).parse_args_into_dataclasses(argv)
    models = dict(model.split("=", 1) for model in args.models if "=" in model)
    if len(models) != 2 or len(args.models) != 2:
        raise UserError(
            f"--models {' '.join(args.models)}: give two of NAME=PATH, of different names"
        )
    language, cloud = read_languages(args.data_dir, [args.cloud_language]).popitem()
    _, rows = read_languages(args.data_dir, [args.pair_language]).popitem()
    if not 0 < args.pair_line <= len(rows):
        raise UserError(
            f"--pair_line {args.pair_line}: {args.pair_language} has lines 1 to {len(rows)}"
        )
    encoders = {
        name: SentenceEncoder.from_pretrained(path, "mean") for name, path in models.items()
    }

    clouds = Path(args.output_dir, "token_states.png")
    sides = list(zip(*cloud[: args.cloud_pairs], strict=True))
    states = [
        tuple(np.concatenate(encoder.encode_tokens(side)) for side in sides)
        for encoder in encoders.values()
    ]
    distances = plot_token_states(
        *states, clouds, NAMES.get(language, language), titles=tuple(encoders)
    )
    for name, distance in zip(encoders, distances, strict=True):
        print(
            f"{name}: centres of {len(sides[0])} {language}-en pairs' tokens {distance:.3f} spreads apart"
        )

    heat_maps, pair = Path(args.output_dir, "alignment.png"), rows[args.pair_line - 1]
    states = {name: tuple(states_of_words(encoder, pair)) for name, encoder in encoders.items()}
    source, target = ([text[start:end] for start, end in word_spans(text)] for text in pair)
    for name, links in plot_alignment(states, source, target, heat_maps).items():
        print(f"{name}: {', '.join(f'{source[i]}–{target[j]}' for i, j in links)}")
    print(f"written to {clouds} and {heat_maps}")


if __name__ == "__main__":
    main()
