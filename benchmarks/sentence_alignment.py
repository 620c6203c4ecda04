"""Measure the alignment of sentences in order: quality on texts with known groups, and speed.

    python -m benchmarks.sentence_alignment quality --model e5 --texts bleualign_data --vecalign VA
    python -m benchmarks.sentence_alignment made --model e5 --texts train/ --pairs de --vecalign VA
    python -m benchmarks.sentence_alignment speed --rows 10000 100000

`quality` reads the test set of vecalign: `test0.de`, `test0.fr` and the groups `test0.defr`. `made`
splits, merges, inserts and deletes sentences of parallel text. Both need the folder of vecalign.
Its own algorithm aligns the same vectors, and its `score.py` gives F1: strict (equal groups), lax.
"""

import argparse
import ast
import resource
import sys
import time
from pathlib import Path

import numpy as np

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.mining.in_order import Side, align
from dap_transformers.search.exact import mutual_neighbours
from dap_transformers.text.corpus import load_bitext

SIZE = 3
Groups = list[tuple[list[int], list[int]]]


def encoded(encoder: SentenceEncoder, lines: list[str], known: dict[str, np.ndarray]) -> Side:
    """Encode the sentences of a text and its groups of neighbours, except those known already."""
    vectors, rows = [], []
    for size in range(1, SIZE + 1):
        count = len(lines) - size + 1
        texts = [" ".join(lines[i : i + size]) for i in range(count)]
        new = list(dict.fromkeys(text for text in texts if text not in known))
        known.update(zip(new, encoder.encode(new) if new else ()))
        vectors.append(np.array([known[text] for text in texts]))
        rows.append(np.arange(count))
    return Side(vectors, rows)


def ours(source: Side, target: Side) -> Groups:
    """Align by this project. Each sentence without a translation is a group of its own."""
    found, _ = align(source, target, mutual_neighbours(source.vectors[0], target.vectors[0], 1))
    groups, seen = [], (set(), set())
    for _, i, j, a, b in found.tolist():
        groups.append((list(range(i, i + a)), list(range(j, j + b))))
        seen[0].update(groups[-1][0])
        seen[1].update(groups[-1][1])
    groups += [([i], []) for i in range(len(source)) if i not in seen[0]]
    return groups + [([], [j]) for j in range(len(target)) if j not in seen[1]]


def vecalign(source: Side, target: Side) -> Groups:
    """Align by vecalign's own algorithm and its defaults: groups of at most 4 sentences."""
    from vecalign import dp_utils

    blocks = []
    for side in (source, target):
        block = np.zeros((SIZE, len(side), side.vectors[0].shape[1]), np.float32)
        for size in side.sizes:
            # a group that ends at a sentence; groups that begin before the text stay zero
            block[size - 1, size - 1 :] = side.units(size, slice(None))
        blocks.append(block)
    np.random.seed(0)
    kinds = dp_utils.make_alignment_types(4)
    stack = dp_utils.vecalign(*blocks, kinds, 0.2, 7, 300, 20_000, 100)
    return stack[0]["final_alignments"]


def rates(gold: list[Groups], found: list[Groups]) -> tuple[float, float]:
    """Return strict and lax F1 in percent, as vecalign's `score_multiple` with gold deletions."""
    from vecalign.score import score_multiple

    scores = score_multiple(gold_list=gold, test_list=found)
    return 100 * scores["f1_strict"], 100 * scores["f1_lax"]


def read_gold(path: Path) -> Groups:
    """Read lines such as `[0]:[0, 1]`."""
    pairs = (line.split(":")[:2] for line in path.read_text().splitlines() if line.strip())
    return [tuple(map(ast.literal_eval, pair)) for pair in pairs]


def changed(pairs: list[tuple[str, str]], rate: float, seed: int) -> tuple[list, list, Groups]:
    """Split, merge, insert and delete sentences at a rate. Return both sides and the groups."""
    rng = np.random.default_rng(seed)
    source, target, gold = [], [], []
    for own, other in pairs:
        kind = rng.choice(["split", "merge", "insert", "delete", ""], p=[rate / 4] * 4 + [1 - rate])
        if kind == "delete":
            gold.append(([], [len(target)]))
            target.append(other)
            continue
        if kind == "merge" and gold and 0 < len(gold[-1][1]) < SIZE and len(gold[-1][0]) == 1:
            source[-1] += f" {own}"
            gold[-1][1].append(len(target))
            target.append(other)
            continue
        parts = [own]
        if kind == "split" and len(own) > 9:
            middle = (
                own.find(" ", len(own) // 2) if " " in own[len(own) // 2 : -1] else len(own) // 2
            )
            parts = [own[:middle], own[middle:].strip()]
        gold.append((list(range(len(source), len(source) + len(parts))), [len(target)]))
        source += parts
        target.append(other)
        if kind == "insert":
            gold.append(([len(source)], []))
            source.append(pairs[rng.integers(len(pairs))][0])
    return source, target, gold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("quality", "made", "speed"))
    parser.add_argument("--model")
    parser.add_argument("--prefix")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--pairs", nargs="+", default=["de"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05, 0.1, 0.2])
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000])
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--vecalign", help="folder of vecalign, with its compiled dp_core")
    args = parser.parse_args()
    if args.what == "speed":
        for rows in args.rows:
            speed(rows, args.dimensions)
        return

    sys.path.append(args.vecalign or ".")
    encoder = SentenceEncoder.from_pretrained(args.model, prefix=args.prefix)
    books = {}
    known = {}
    if args.what == "quality":
        for path in sorted(args.texts.glob("test*.defr")):
            sides = [path.with_suffix(end).read_text().splitlines() for end in (".de", ".fr")]
            books.setdefault("bleualign", []).append((*sides, read_gold(path)))
    for code in args.pairs if args.what == "made" else ():
        read = load_bitext([str(args.texts / f"{code}-en.tsv.xz")])[code][:1000]
        pairs = list(zip(read["source"], read["target"]))
        for rate in args.rates:
            books[f"{code} {rate:g}"] = [changed(pairs, rate, 0)]

    for name, texts in books.items():
        sides = [(encoded(encoder, a, known), encoded(encoder, b, known)) for a, b, _ in texts]
        gold = [groups for *_, groups in texts]
        line = f"{name}:"
        for method in (ours, vecalign):
            strict, lax = rates(gold, [method(*pair) for pair in sides])
            line += f"  {method.__name__} strict {strict:.1f} lax {lax:.1f}"
        print(line, flush=True)


def speed(rows: int, dimensions: int) -> None:
    """Print the time and memory of aligning random vectors, of which a tenth are left out."""
    rng = np.random.default_rng(0)
    meanings = rng.normal(size=(rows, dimensions)).astype(np.float32)
    kept = meanings[rng.random(rows) > 0.1]
    sides = []
    for base in (meanings, kept):
        counts = [len(base) - size for size in range(SIZE)]
        vectors = [base, *(base[:count] + base[-count:] for count in counts[1:])]
        sides.append(Side(vectors, [np.arange(count) for count in counts]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    neighbours = mutual_neighbours(meanings, kept, 1)
    found = time.perf_counter()
    groups, _ = align(*sides, neighbours)
    ended = time.perf_counter()
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    size = sum(each.nbytes for side in sides for each in side.vectors)
    print(
        f"{rows} lines: anchors {found - began:.1f} s, path {ended - found:.1f} s, "
        f"{len(groups)} groups, memory beside the vectors {more / size:.2f} of their size",
        flush=True,
    )


if __name__ == "__main__":
    main()
