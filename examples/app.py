"""The translations of a sentence in two texts, and which token goes with which: a Gradio app.

    pip install --constraint constraints.txt '.[app]'
    python examples/app.py --model out

Then open http://127.0.0.1:7860/. Every text has a sentence a line, pasted or in a file (`.gz` and `.xz` too).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dap.alignment import draw_alignment
from dap.arguments import ArgumentParser
from dap.commands import command
from dap.encoding import EncoderArguments, SentenceEncoder
from dap.errors import UserError
from dap.search import unit_rows
from dap.text import read_sentences

MATCHES = 5  # shown of each text
MOST = 20_000  # sentences of a text that are encoded while a reader waits
EXAMPLE = (
    "Guten Morgen!\nWo ist der Bahnhof?\nDie Suppe ist zu heiß.\nIch habe meinen Schlüssel verloren.",
    "The soup is too hot.\nI have lost my keys.\nGood morning!\nWhere is the station?",
)


class Text(NamedTuple):
    """A text to search."""

    sentences: list[str]  # N
    vectors: np.ndarray  # (N, D), of length 1


def read_text(encoder: SentenceEncoder, name: str, pasted: str, file: str | None) -> Text:
    """The lines of a file, or else the pasted ones, without repetitions.

    Raises:
        ValueError: no sentences, or more than `MOST`; or a file that is no text.
    """
    lines = list(read_sentences(file)) if file else pasted.splitlines()
    sentences = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not 1 <= len(sentences) <= MOST:
        raise UserError(f"{name} has {len(sentences):,} sentences: give 1 to {MOST:,}")
    return Text(sentences, unit_rows(encoder.encode(sentences), name).numpy())


def search(encoder: SentenceEncoder, texts: Sequence[Text], query: str) -> list[list[Any]]:
    """The nearest sentences of each text by cosine, best first: rows of cosine, text number from 1, sentence.

    Raises:
        ValueError: an empty query, or no texts.
    """
    if not query.strip() or not texts:
        raise UserError("there is nothing to search: read two texts, and type a sentence")
    vector = unit_rows(encoder.encode([query.strip()]), "query").numpy()[0]  # (D,)
    rows = []
    for number, text in enumerate(texts, 1):
        cosines = text.vectors @ vector  # (N,)
        best = np.argsort(-cosines, kind="stable")[:MATCHES]
        rows += [[round(float(cosines[row]), 3), number, text.sentences[row]] for row in best]
    return sorted(rows, key=lambda row: -row[0])


def picture(encoder: SentenceEncoder, query: str, match: str) -> Any:
    """The cosines of the tokens as a heat map, with a dot on those that are each other's nearest."""
    from matplotlib.figure import Figure

    sides = [query.strip(), match]
    spans = zip(sides, encoder.token_spans(sides), strict=True)
    source, target = ([side[start:end].strip() for start, end in own] for side, own in spans)
    figure = Figure(
        figsize=(2 + 0.45 * len(target), 1.5 + 0.35 * len(source)), layout="constrained"
    )
    axes = figure.subplots()
    axes.set_title("Dots join tokens that are each other's nearest")
    draw_alignment(axes, encoder.encode_tokens(sides), source, target)
    return figure


def build(encoder: SentenceEncoder, name: str) -> Any:
    """The app, a `gradio.Blocks`."""
    import gradio

    read = lru_cache(8)(partial(read_text, encoder))  # a text is encoded once

    def find(query: str, *given: Any) -> tuple[Any, Any]:
        try:
            texts = [read(f"text {i + 1}", given[i], given[i + 2]) for i in range(2)]
            rows = search(encoder, texts, query)
        except (UserError, OSError) as error:
            raise gradio.Error(str(error)) from error
        return rows, picture(encoder, query, rows[0][2])

    def choose(query: str, rows: list[list[Any]], event: gradio.SelectData) -> Any:
        return picture(encoder, query, rows[event.index[0]][2])

    with gradio.Blocks(title="Translations") as app:
        gradio.Markdown(
            f"# Translations of a sentence in two texts\nEncoder: `{name}`. A sentence a line."
        )
        with gradio.Row():
            pasted = [
                gradio.Textbox(EXAMPLE[i], label=f"Text {i + 1}", lines=6, max_lines=12)
                for i in range(2)
            ]
        with gradio.Row():
            files = [gradio.File(label=f"or a file as text {i + 1}", height=120) for i in range(2)]
        with gradio.Row():
            query = gradio.Textbox(
                "Keitto on liian kuumaa.", label="Sentence, in any language", scale=4
            )
            button = gradio.Button("Search", variant="primary")
        headers = ["cosine", "text", "sentence"]
        label = "Choose one to align its tokens"
        matches = gradio.Dataframe(
            headers=headers,
            type="array",
            interactive=False,
            label=label,
            column_widths=["12%", "8%", "80%"],
        )
        plot = gradio.Plot(show_label=False)
        for trigger in (app.load, button.click, query.submit):
            trigger(find, [query, *pasted, *files], [matches, plot], api_name="search")
        matches.select(choose, [query, matches], plot, api_name=False)
    return app


@dataclass
class AppArguments:
    """Where the app is."""

    port: int = field(default=7860, metadata={"help": "Port on 127.0.0.1."})


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = ArgumentParser((EncoderArguments, AppArguments), description=__doc__.splitlines()[0])
    model, args = parser.parse_args_into_dataclasses(args=argv)
    build(model.load(), Path(model.model_name_or_path).name).launch(server_port=args.port)


if __name__ == "__main__":
    main()
