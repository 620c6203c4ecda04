"""Measure the alignment of sentences in order: F1 on texts with known groups, time and memory.

    python -m benchmarks.sentence_alignment --model e5 --prefix "query: " --texts bleualign_data
    python -m benchmarks.sentence_alignment --model e5 --texts tatoeba/ --languages ru zh
    python -m benchmarks.sentence_alignment --rows 10000 100000

- The first command reads vecalign's test set: `test0.de`, `test0.fr` and the groups `test0.defr`.
  It also joins the lines to paragraphs, which are split into sentences again. Groups are then equal
  if they cover the same characters. "at our borders" merges the reference groups between which our
  sentences have no border, because no alignment of these sentences tells them apart.
- The second takes 1,000 pairs of each language. Of 5%, 10% and 20% of them, one side is left out,
  split in two, or merged with the next one.
- vecalign's own algorithm aligns the same vectors. It draws a sample, so its numbers are means of
  five runs. vecalign must be importable (`PYTHONPATH`), with its compiled `dp_core`.
- F1 is that of vecalign's `score_multiple`, in percent: of equal groups (strict), and of groups
  that share a sentence on both sides (lax). "found" is the share of the sentences without a
  translation that ours leaves out, and "wrong" the share of the others that it leaves out.
- The third takes random vectors. A tenth of the source sentences have no translation. Memory is the
  peak with the vectors, divided by their size.
"""

import random
import time
from ast import literal_eval
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np

from benchmarks.timing import machine_parser, peak_memory, save
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.encoding.encoder import Encoder
from dap_transformers.encoding.shards import SharedEncoder
from dap_transformers.evaluation.retrieval import read_languages
from dap_transformers.mining.in_order import align
from dap_transformers.mining.texts import GroupedText, joined
from dap_transformers.search.exact import unit_rows
from dap_transformers.text.find import find_bitext
from dap_transformers.text.sentences import Sentence, read_translations

SIZE = 3  # most sentences of a group on a side
RUNS = 5  # of vecalign
PARAGRAPH = 5  # lines, at least
#: Pairs of groups: the numbers of the source sentences and of the target sentences.
Groups = list[list[list[int]]]
#: Vectors of the distinct groups of source and target, and the two texts.
Encoded = tuple[list[np.ndarray], list[GroupedText]]
#: Source sentences, target sentences and their groups.
Book = tuple[list[str], list[str], Groups]


def changed(pairs: list[tuple[str, str]], rate: float) -> Book:
    """Leave out, split or merge a share of the sentences, 0 to 1."""
    rng = random.Random(0)
    book: Book = [], [], []
    rest = iter(pairs)
    for pair in rest:
        parts = [[text] for text in pair]
        side = rng.randrange(2)
        text = pair[side]
        kind = rng.choice(["left out", "split", "merge"]) if rng.random() < rate else ""
        if kind == "left out":
            parts[side] = []
        elif kind == "split":
            middle = max(text.find(" ", len(text) // 2), len(text) // 2)
            parts[side] = [text[:middle].strip(), text[middle:].strip()]
        elif kind == "merge":
            for own, following in zip(parts, next(rest, ())):
                own.append(following)
            parts[side] = [joined(parts[side])]
        ends = [len(lines) + len(part) for lines, part in zip(book, parts)]
        book[2].append([list(range(end - len(part), end)) for end, part in zip(ends, parts)])
        for lines, part in zip(book, parts):
            lines += part
    return book


def as_paragraphs(lines: list[str]) -> str:
    """Join lines to paragraphs of at least `PARAGRAPH` lines, one per line.

    A paragraph ends where a sentence ends. A line without a mark at its end is a heading, which
    stays a line of its own.
    """
    text = ""
    length = 0
    stripped = [line.strip() for line in lines]
    for line, following in pairwise([*stripped, "end"]):
        length += 1
        is_beside_heading = line[-1].isalnum() or following[-1].isalnum()
        if is_beside_heading or (length >= PARAGRAPH and line[-1] in ".!?"):
            text += f"{line}\n"
            length = 0
        else:
            text += f"{line} "
    return text


def split_again(lines: list[str], language: str) -> list[str]:
    """Return the sentences of a text whose lines were joined to paragraphs."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_text(as_paragraphs(lines))
        [text] = read_translations([str(path)], [language], split=True)
        return [each.text for each in text]


def borders(sentences: list[str]) -> list[int]:
    """Return the number of characters before each sentence and in all, blanks left out."""
    return [0, *accumulate(len("".join(text.split())) for text in sentences)]


def covered(groups: Groups, *sides: list[str]) -> Groups:
    """Return the groups of characters that groups of sentences cover."""
    found = []
    for group in groups:
        characters: list[list[int]] = [[], []]
        for rows, own, ends in zip(group, characters, map(borders, sides)):
            for row in rows:
                own += range(ends[row], ends[row + 1])
        found.append(characters)
    return found


def merged(groups: Groups, *sides: list[str]) -> Groups:
    """Merge groups of characters, in order, between which a side has no border of sentences."""
    allowed = [set(borders(sentences)) for sentences in sides]
    ends = [0, 0]  # of the group before
    found: Groups = [[[], []]]
    for group in groups:
        starts = [own[0] if own else end for own, end in zip(group, ends)]
        if all(map(set.__contains__, allowed, starts)):
            found.append([[], []])
        for side, own in enumerate(group):
            found[-1][side] += own
            ends[side] = starts[side] + len(own)
    return found


def paragraphs(encoder: Encoder, books: list[Book]) -> dict[str, float]:
    """Return F1 of the German and French books if they are given as paragraphs."""
    from vecalign.score import score_multiple

    found, gold, possible = [], [], []
    for *sides, groups in books:
        again = [split_again(lines, code) for lines, code in zip(sides, ("de", "fr"))]
        found.append(covered(ours(*encoded(encoder, *again)), *again))
        gold.append(covered(groups, *sides))
        possible.append(merged(gold[-1], *again))
    numbers = {}
    for name, expected in (("as paragraphs", gold), ("at our borders", possible)):
        score = score_multiple(expected, found)
        for kind in ("strict", "lax"):
            numbers[f"{name} {kind}"] = 100 * float(score[f"f1_{kind}"])
    return numbers


def encoded(encoder: Encoder, *sides: list[str]) -> Encoded:
    """Encode the sentences of two texts and their groups of neighbours."""
    texts = [GroupedText(starmap(Sentence, enumerate(lines)), "text", SIZE) for lines in sides]
    vectors = [encoder.encode(list(text)) for text in texts]
    return vectors, texts


def ours(vectors: list[np.ndarray], texts: list[GroupedText]) -> Groups:
    """Align by this project. Each sentence without a translation is a group of its own."""
    found = []
    for _, i, j, a, b in align(vectors, texts)[0].tolist():
        found.append([list(range(i, i + a)), list(range(j, j + b))])
    return found


def vecalign(vectors: list[np.ndarray], texts: list[GroupedText]) -> Groups:
    """Align by vecalign's own algorithm with its defaults: groups of at most 4 sentences."""
    from vecalign import dp_utils

    blocks = []
    for side, text in zip(vectors, texts):
        block = np.zeros((SIZE, len(text.groups), side.shape[1]), np.float32)
        for before in range(SIZE):  # a group stands at its last sentence
            rows = text.groups[: len(text.groups) - before, before]
            block[before, before:] = unit_rows(side[rows])
        blocks.append(block)
    kinds = dp_utils.make_alignment_types(4)
    return dp_utils.vecalign(*blocks, kinds, 0.2, 7, 300, 20_000, 100)[0]["final_alignments"]


def quality(encoder: Encoder, books: list[Book]) -> dict[str, float]:
    """Return strict and lax F1 of both methods over all texts, and what ours leaves out."""
    from vecalign.score import score_multiple

    both = [encoded(encoder, *sides) for *sides, _ in books]
    gold = [groups for *_, groups in books]
    own = list(starmap(ours, both))
    np.random.seed(0)
    runs = {"ours": [own], "vecalign": [starmap(vecalign, both) for _ in range(RUNS)]}
    numbers = {}
    for method, found in runs.items():
        scores = [score_multiple(gold, list(groups)) for groups in found]
        for kind in ("strict", "lax"):
            f1 = np.mean([score[f"f1_{kind}"] for score in scores])
            numbers[f"{method} {kind}"] = 100 * float(f1)
    return numbers | left_out(gold, own)


def left_out(gold: list[Groups], found: list[Groups]) -> dict[str, float]:
    """Return the percentages of sentences that are left out wrongly and rightly."""
    translated = []  # for each sentence that has a translation: is it left out?
    untranslated = []  # the same for the others
    for expected, groups in zip(gold, found, strict=True):
        for side in (0, 1):
            alone = {row for group in groups if not group[1 - side] for row in group[side]}
            for group in expected:
                sentences = translated if group[1 - side] else untranslated
                sentences += [row in alone for row in group[side]]
    return {"wrong": 100 * np.mean(translated), "found": 100 * np.mean(untranslated)}


def speed(rows: int, dimensions: int = 384) -> dict[str, float]:
    """Measure the alignment of texts with random vectors."""
    rng = np.random.default_rng(0)
    text = rng.standard_normal((rows, dimensions), np.float32)
    vectors, texts = [], []
    for side in (text, text[rng.random(rows) > 0.1]):
        longer = rng.standard_normal(((SIZE - 1) * len(side), dimensions), np.float32)
        vectors.append(np.concatenate([side, longer]))
        groups = np.arange(len(vectors[-1])).reshape(SIZE, -1).T
        ones = np.ones(len(side))
        texts.append(SimpleNamespace(groups=groups, lengths=ones, kinds=groups[:, 0]))
    del longer
    with peak_memory("cpu") as peak:
        started = time.perf_counter()
        align(vectors, texts)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "memory": 1 + peak["bytes"] / sum(v.nbytes for v in vectors)}


def main(argv: list[str] | None = None) -> None:
    """Print a line per text or number of rows, and write all to `--json`."""
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--model")
    parser.add_argument("--prefix")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--languages", nargs="+", help="default: the test set of vecalign")
    parser.add_argument("--rows", nargs="+", type=int, default=[])
    args = parser.parse_args(argv)

    results = {}
    for rows in [1000, *args.rows] if args.rows else ():  # the first run also loads libraries
        results[f"{rows} rows"] = speed(rows)
    books = {}
    if args.languages:
        for code, pairs in read_languages(find_bitext(args.texts), args.languages, 1000).items():
            for rate in (0.05, 0.1, 0.2):
                books[f"{code} {rate}"] = [changed(pairs, rate)]
    elif args.texts:
        books["bleualign"] = []
        for path in sorted(args.texts.glob("test*.defr")):
            sides = [path.with_suffix(end).read_text().splitlines() for end in (".de", ".fr")]
            gold = [list(map(literal_eval, row.split(":")[:2])) for row in path.open()]
            books["bleualign"].append((*sides, gold))
    if books:
        arguments = EncoderArguments(args.model, prefix=args.prefix, max_seq_length=512)
        encoder = SharedEncoder(arguments.load())
        results |= {name: quality(encoder, texts) for name, texts in books.items()}
        if "bleualign" in books:
            results["paragraphs"] = paragraphs(encoder, books["bleualign"])
    for name, numbers in results.items():
        print(name, *(f"{key} {value:.2f}" for key, value in numbers.items()), sep="  ")
    save(args, {"results": results})


if __name__ == "__main__":
    main()
