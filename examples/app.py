"""Search two texts for the translations of a sentence, and show which words belong together.

    pip install --constraint constraints.txt '.[app]'
    python examples/app.py --model out

Then open http://127.0.0.1:7860/. A text has one sentence per line, pasted or in a file. The file
may be `.gz` or `.xz`.
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

MATCHES = 5  # sentences shown per text
MOST = 20_000  # sentences per text, because a reader waits while they are encoded
EXAMPLE = (
    "Guten Morgen!\nWo ist der Bahnhof?\nDie Suppe ist zu heiß.\n"
    "Ich habe meinen Schlüssel verloren.",
    "The soup is too hot.\nI have lost my keys.\nGood morning!\nWhere is the station?",
)


class Text(NamedTuple):
    """A text to search.

    Attributes:
        sentences: N distinct sentences.
        vectors: (N, D), their vectors, of Euclidean length 1.
    """

    sentences: list[str]
    vectors: np.ndarray


def read_text(encoder: SentenceEncoder, name: str, pasted: str, file: str | None) -> Text:
    """Encode the distinct lines of a file, or of pasted text.

    Args:
        encoder: makes the vectors.
        name: what error messages call the text.
        pasted: sentences, one per line.
        file: path of a file to read instead of the pasted text. None if there is no file.

    Raises:
        UserError: no sentences, more than `MOST`, or a file that is not text.
    """
    lines = list(read_sentences(file)) if file else pasted.splitlines()
    sentences = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not 1 <= len(sentences) <= MOST:
        raise UserError(f"{name} has {len(sentences):,} sentences: give 1 to {MOST:,}")
    return Text(sentences, unit_rows(encoder.encode(sentences), name).numpy())


def search(encoder: SentenceEncoder, texts: Sequence[Text], query: str) -> list[list[Any]]:
    """Find the `MATCHES` sentences of each text that are nearest to a sentence by cosine.

    Args:
        encoder: makes the vector of the sentence. It must be that of the texts.
        texts: the texts to search.
        query: the sentence.

    Returns:
        A row per match: cosine, number of the text (from 1) and sentence. Highest cosine first.

    Raises:
        UserError: an empty query, or no texts.
    """
    if not query.strip() or not texts:
        raise UserError("there is nothing to search: give two texts, and type a sentence")
    vector = unit_rows(encoder.encode([query.strip()]), "query").numpy()[0]  # (D,)
    rows = []
    for number, text in enumerate(texts, 1):
        cosines = text.vectors @ vector  # (N,)
        best = np.argsort(-cosines, kind="stable")[:MATCHES]
        rows += [[round(float(cosines[row]), 3), number, text.sentences[row]] for row in best]
    return sorted(rows, key=lambda row: -row[0])


def picture(encoder: SentenceEncoder, query: str, match: str) -> Any:
    """Draw the cosines of two sentences' tokens as a heat map.

    A dot marks two tokens that are each other's nearest.

    Args:
        encoder: makes the token states.
        query: the sentence that was searched, whose tokens are the rows.
        match: the sentence that was found, whose tokens are the columns.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    sentences = [query.strip(), match]
    tokens = []
    for sentence, spans in zip(sentences, encoder.token_spans(sentences), strict=True):
        tokens.append([sentence[start:end].strip() for start, end in spans])
    source, target = tokens

    size = (2 + 0.45 * len(target), 1.5 + 0.35 * len(source))  # inches
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title("Dots join tokens that are each other's nearest")
    draw_alignment(axes, encoder.encode_tokens(sentences), source, target)
    return figure


def build(encoder: SentenceEncoder, name: str) -> Any:
    """Build the app.

    Args:
        encoder: the encoder.
        name: what the app calls the encoder.

    Returns:
        The app, a `gradio.Blocks`.
    """
    import gradio

    read = lru_cache(8)(partial(read_text, encoder))  # encodes each text once

    def find(
        query: str, pasted_1: str, pasted_2: str, file_1: str | None, file_2: str | None
    ) -> tuple[Any, Any]:
        try:
            texts = [read("text 1", pasted_1, file_1), read("text 2", pasted_2, file_2)]
            rows = search(encoder, texts, query)
        except (UserError, OSError) as error:
            raise gradio.Error(str(error)) from error
        return rows, picture(encoder, query, rows[0][2])

    def choose(query: str, rows: list[list[Any]], event: gradio.SelectData) -> Any:
        return picture(encoder, query, rows[event.index[0]][2])

    with gradio.Blocks(title="Translations") as app:
        gradio.Markdown(
            f"# Translations of a sentence in two texts\nEncoder: `{name}`. One sentence per line."
        )
        pasted = []
        with gradio.Row():
            for number, example in enumerate(EXAMPLE, 1):
                box = gradio.Textbox(example, label=f"Text {number}", lines=6, max_lines=12)
                pasted.append(box)
        files = []
        with gradio.Row():
            for number in (1, 2):
                files.append(gradio.File(label=f"or a file as text {number}", height=120))
        with gradio.Row():
            query = gradio.Textbox(
                "Keitto on liian kuumaa.", label="Sentence, in any language", scale=4
            )
            button = gradio.Button("Search", variant="primary")
        matches = gradio.Dataframe(
            headers=["cosine", "text", "sentence"],
            type="array",
            interactive=False,
            label="Choose one to align its tokens",
            column_widths=["12%", "8%", "80%"],
        )
        plot = gradio.Plot(show_label=False)
        for trigger in (app.load, button.click, query.submit):
            trigger(find, [query, *pasted, *files], [matches, plot], api_name="search")
        matches.select(choose, [query, matches], plot, api_name=False)
    return app


@dataclass
class AppArguments:
    """Command-line arguments of the app, beside those that choose the encoder."""

    port: int = field(default=7860, metadata={"help": "Port on 127.0.0.1."})


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Start the app as the command line says."""
    parser = ArgumentParser((EncoderArguments, AppArguments), description=__doc__.splitlines()[0])
    model, args = parser.parse_args_into_dataclasses(args=argv)
    build(model.load(), Path(model.model_name_or_path).name).launch(server_port=args.port)


if __name__ == "__main__":
    main()
