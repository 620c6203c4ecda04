"""Search two texts for the translations of a sentence, show its words, and mine two files.

    pip install --constraint constraints.txt '.[app]'
    python examples/app.py --model out

Then open http://127.0.0.1:7860/. A text has one sentence per line, pasted or in a file. The file
may be `.gz` or `.xz`.
"""

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dap_transformers.alignment.heat_map import heat_map
from dap_transformers.alignment.word_alignment import align_words
from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.commands.safeguards import command
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.mining.mine_pairs import MiningOptions, mine_vectors
from dap_transformers.search.exact import unit_rows
from dap_transformers.text.archives import read_sentences
from dap_transformers.text_keys import is_blank

MATCHES = 5  # sentences shown per text
MOST = 20_000  # sentences per text, because a reader waits while they are encoded
LONGEST = 20_000_000  # characters per text
LONGEST_SENTENCE = 10_000  # characters that are tokenised, more than any encoder reads
SHOWN = 500  # mined pairs in the table; the file has all
EXAMPLE = (
    "Guten Morgen!\nWo ist der Bahnhof?\nDie Suppe ist zu heiß.\n"
    "Ich habe meinen Schlüssel verloren.",
    "The soup is too hot.\nI have lost my keys.\nGood morning!\nWhere is the station?",
)
QUERIES = ["Keitto on liian kuumaa.", "火车站在哪里？", "मेरी चाबी खो गई है।", "صباح الخير!"]
# Sentences of a right-to-left script end on the left, also in boxes of an English page.
ANY_SCRIPT = "input, textarea, td span, button div {unicode-bidi: plaintext}"
COLUMNS = ["score", "source", "target", "source_line", "target_line"]


class Text(NamedTuple):
    """A text to search.

    Attributes:
        sentences: N distinct sentences.
        vectors: (N, D), their vectors, of Euclidean length 1.
    """

    sentences: list[str]
    vectors: np.ndarray


def first_lines(name: str, lines: Iterable[str]) -> dict[str, int]:
    """Collect the distinct sentences of a text, with the number of the first line of each.

    The lines are counted while they are read, because a small `.gz` may hold gigabytes.

    Args:
        name: what error messages call the text.
        lines: its lines. Empty ones are left out.

    Returns:
        Sentence -> number of its first line, from 1.
    """
    found: dict[str, int] = {}
    characters = 0
    for number, line in enumerate(lines, 1):
        characters += len(line) + 1
        if characters > LONGEST:
            raise UserError(f"{name} is too long: give at most {LONGEST:,} characters")
        if not is_blank(line):
            found.setdefault(line.strip(), number)
        if len(found) > MOST:
            raise UserError(f"{name} has too many sentences: give at most {MOST:,}")
    if not found:
        raise UserError(f"{name} has 0 sentences: give 1 to {MOST:,}")
    return found


def beginning(text: str) -> str:
    """Cut a text before it is tokenised, and replace lone surrogates, which no tokenizer takes.

    >>> beginning("a\\ud800")
    'a?'
    """
    return text[:LONGEST_SENTENCE].encode(errors="replace").decode()


def read_text(encoder: SentenceEncoder, name: str, pasted: str, file: str | None) -> Text:
    """Read the distinct lines of a file, or of pasted text, and encode them.

    Blank lines are left out, and blanks at both ends of a line are removed.

    Args:
        encoder: makes the vectors.
        name: what error messages call the text.
        pasted: sentences, one per line.
        file: path of a file to read instead of the pasted text. None if there is no file.

    Returns:
        The sentences and their vectors of length 1.
    """
    lines = first_lines(name, read_sentences(file) if file else pasted.splitlines())
    sentences = list(map(beginning, lines))
    return Text(sentences, unit_rows(encoder.encode(sentences), name).numpy())


def search(encoder: SentenceEncoder, texts: Sequence[Text], query: str) -> list[list[Any]]:
    """Find the `MATCHES` sentences of each text that are nearest to a sentence by cosine.

    Args:
        encoder: makes the vector of the sentence. It must be that of the texts.
        texts: the texts to search.
        query: the sentence.

    Returns:
        A row [cosine, number of the text (from 1), sentence] per match. The highest cosine comes
        first, whichever text it is from.
    """
    if not query.strip() or not texts:
        raise UserError("there is nothing to search: give two texts, and type a sentence")
    if len(query) > LONGEST_SENTENCE:
        raise UserError(f"the sentence is too long: give at most {LONGEST_SENTENCE:,} characters")
    vector = unit_rows(encoder.encode([beginning(query.strip())]), "query").numpy()[0]  # (D,)
    rows = []
    for number, text in enumerate(texts, 1):
        cosines = text.vectors @ vector  # (N,)
        best = np.argsort(-cosines, kind="stable")[:MATCHES]
        rows += [[float(cosines[row]), number, text.sentences[row]] for row in best]
    return sorted(rows, key=lambda row: -row[0])


def picture(encoder: SentenceEncoder, query: str, match: str) -> str:
    """Draw the cosines of two sentences' words as an HTML table.

    A frame marks two words that are each other's nearest.

    Args:
        encoder: makes the token states.
        query: the sentence that was searched, whose words are the rows.
        match: the sentence that was found, whose words are the columns.

    Returns:
        The table, or a sentence that says why there is none.
    """
    if not hasattr(encoder, "encode_tokens"):
        return "<p>This encoder gives sentence vectors only, so there are no words to compare.</p>"
    sides = [beginning(query.strip())], [beginning(match)]
    [aligned] = align_words(encoder, *sides, words="tokenizer")
    return heat_map(aligned)


class Mined(NamedTuple):
    """A mined pair: a row of the table, in the order of `COLUMNS`.

    Attributes:
        score: margin score.
        source: the source sentence.
        target: the target sentence.
        source_line: number of its line in the source file, from 1.
        target_line: number of its line in the target file, from 1.
    """

    score: float
    source: str
    target: str
    source_line: int
    target_line: int


def mine_files(
    encoder: SentenceEncoder, source_file: str | None, target_file: str | None
) -> tuple[list[Mined], float]:
    """Find the pairs of two texts that translate each other, by margin score.

    Args:
        encoder: makes the sentence vectors.
        source_file: path of the source text, one sentence per line. None if none was uploaded.
        target_file: path of the target text, one sentence per line. None if none was uploaded.

    Returns:
        The pairs, best first, and the threshold that the scores suggest. It is the lowest score
        if the scores suggest none. A repeated sentence has the number of its first line.
    """
    if not source_file or not target_file:
        raise UserError("there is nothing to mine: give two files with one sentence per line")
    sides = []
    for name, file in (("the source", source_file), ("the target", target_file)):
        first_line = first_lines(name, read_sentences(file))
        sentences = list(first_line)
        vectors = encoder.encode(list(map(beginning, sentences)))  # (N, D)
        vectors = unit_rows(vectors, name).numpy()
        sides.append((sentences, list(first_line.values()), vectors))

    (source, source_lines, source_vectors), (target, target_lines, target_vectors) = sides
    vectors = (source_vectors, target_vectors)
    try:
        _, found, choice = mine_vectors(vectors, MiningOptions())
    except UserError:  # no group of translations stands out
        _, found, choice = mine_vectors(vectors, MiningOptions(threshold=None))
    rows = []
    for score, i, j in found.tolist():
        score = math.floor(score * 1e6) / 1e6  # rounded down, as the threshold is
        rows.append(Mined(score, source[i], target[j], source_lines[i], target_lines[j]))
    lowest = min(row.score for row in rows)
    threshold = lowest if choice.threshold is None else max(lowest, choice.threshold)
    return rows, threshold


def keep(rows: Sequence[Mined], threshold: float) -> tuple[str, list[Mined], str]:
    """Select the mined pairs that score at least the threshold, and write them to a new file.

    The file is `mined.tsv` in a new temporary folder.

    Args:
        rows: all mined pairs.
        threshold: lowest score of a pair that is kept.

    Returns:
        A line that says how many are kept, the best `SHOWN` of them, and the file's path.
    """
    kept = [row for row in rows if row.score >= threshold]
    path = Path(tempfile.mkdtemp()) / "mined.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        for row in (COLUMNS, *kept):  # literal text, as the readers of this project expect it
            file.write("\t".join(str(cell).replace("\t", " ") for cell in row) + "\n")
    line = f"{len(kept):,} of {len(rows):,} pairs have a score of {threshold:.3f} or more."
    if len(kept) > SHOWN:
        line += f" The table shows the best {SHOWN}, the file has all."
    return line, kept[:SHOWN], str(path)


def build(encoder: SentenceEncoder, name: str) -> Any:
    """Build the web app, with a tab that searches two texts and a tab that mines two files.

    Args:
        encoder: makes the sentence vectors.
        name: name of the encoder, which the page shows.

    Returns:
        The app, a `gradio.Blocks`, which is not started yet.
    """
    import gradio

    with gradio.Blocks(title="Translations") as app:
        gradio.Markdown(f"# Translations\nEncoder: `{name}`. One sentence per line.")
        with gradio.Tab("Search"):
            build_search(gradio, app, encoder)
        with gradio.Tab("Mine"):
            build_mine(gradio, encoder)
    return app


def build_search(gradio: Any, app: Any, encoder: SentenceEncoder) -> None:
    """Add the contents of the tab that searches two texts, and compares the words of a match.

    Args:
        gradio: the module.
        app: the `gradio.Blocks` that is being built.
        encoder: makes vectors and token states.
    """
    read = lru_cache(8)(partial(read_text, encoder))  # encodes each text once

    def find(
        query: str, pasted_1: str, pasted_2: str, file_1: str | None, file_2: str | None
    ) -> tuple[Any, str]:
        try:
            texts = [read("text 1", pasted_1, file_1), read("text 2", pasted_2, file_2)]
            rows = search(encoder, texts, query)
            shown = [[f"{cosine:.3f}", *others] for cosine, *others in rows]
            return shown, picture(encoder, query, rows[0][2])
        except (UserError, OSError) as error:
            raise gradio.Error(str(error)) from error

    def choose(query: str, rows: list[list[Any]], event: gradio.SelectData) -> str:
        return picture(encoder, query, rows[event.index[0]][2])

    with gradio.Row():
        query = gradio.Textbox(QUERIES[0], label="Sentence, in any language", scale=4)
        button = gradio.Button("Search", variant="primary")
    examples = gradio.Examples([[text] for text in QUERIES], [query], label="Examples")
    matches = gradio.Dataframe(
        headers=["cosine", "text", "sentence"],
        type="array",
        interactive=False,
        wrap=True,
        label="Choose one to compare its words",
        column_widths=["84px", "56px", "calc(100% - 140px)"],
    )
    gradio.Markdown("Cosines of the words. A frame joins words that are each other's nearest.")
    table = gradio.HTML()
    pasted = []
    with gradio.Row():
        for number, example in enumerate(EXAMPLE, 1):
            box = gradio.Textbox(example, label=f"Text {number}", lines=6, max_lines=12)
            pasted.append(box)
    files = []
    with gradio.Row():
        for number in (1, 2):
            files.append(gradio.File(label=f"or a file as text {number}", height=120))

    inputs = [query, *pasted, *files]
    for trigger in (app.load, button.click, query.submit):
        trigger(find, inputs, [matches, table], api_name="search")
    examples.load_input_event.then(find, inputs, [matches, table], api_name=False)
    matches.select(choose, [query, matches], table, api_name=False)


def build_mine(gradio: Any, encoder: SentenceEncoder) -> None:
    """Add the contents of the tab that mines two files: it finds pairs that translate each other.

    Args:
        gradio: the module.
        encoder: makes the sentence vectors.
    """

    def start(source: str | None, target: str | None) -> tuple[Any, ...]:
        try:
            rows, threshold = mine_files(encoder, source, target)
        except (UserError, OSError) as error:
            raise gradio.Error(str(error)) from error
        scores = [row.score for row in rows]
        lowest = min(scores)
        highest = max(*scores, lowest + 0.001)  # a slider needs two different ends
        slider = gradio.Slider(minimum=lowest, maximum=highest, value=threshold, interactive=True)
        return rows, slider, *keep(rows, threshold)

    gradio.Markdown("Find the pairs of two files that translate each other.")
    with gradio.Row():
        source = gradio.File(label="Source sentences", height=120)
        target = gradio.File(label="Target sentences", height=120)
    button = gradio.Button("Mine", variant="primary")
    rows = gradio.State([])
    threshold = gradio.Slider(
        0, 2, 0, step=0.001, label="Threshold: lowest margin score", interactive=False
    )
    summary = gradio.Markdown()
    table = gradio.Dataframe(
        headers=COLUMNS,
        interactive=False,
        wrap=True,
        column_widths=["92px", "280px", "280px", "110px", "110px"],
    )
    download = gradio.DownloadButton("Download as TSV")
    shown = [summary, table, download]
    button.click(start, [source, target], [rows, threshold, *shown], api_name="mine")
    threshold.release(keep, [rows, threshold], shown, api_name=False)


@dataclass
class AppArguments:
    """Port of the web app, a command-line argument beside `EncoderArguments`."""

    port: int = field(default=7860, metadata={"help": "Port on 127.0.0.1."})


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Start the web app, which searches two texts for translations and mines two files.

    Its address is `http://127.0.0.1:PORT/`. The command line gives the encoder and the port.

    Args:
        argv: the arguments of the command. None takes those of this process.
    """
    parser = ArgumentParser((EncoderArguments, AppArguments), description=__doc__.splitlines()[0])
    model, args = parser.parse_args_into_dataclasses(args=argv)
    app = build(model.load(), Path(model.model_name_or_path).name)
    app.launch(server_port=args.port, css=ANY_SCRIPT)


if __name__ == "__main__":
    main()
