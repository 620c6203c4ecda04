"""Measure the alignment of sentences in order: F1 on texts with known groups, time and memory.

    python -m benchmarks.sentence_alignment --model e5 --texts bleualign_data --vecalign VA
    python -m benchmarks.sentence_alignment --model e5 --texts train/ --languages ru --vecalign VA
    python -m benchmarks.sentence_alignment --rows 10000 100000

- The first command reads vecalign's test set: `test0.de`, `test0.fr` and the groups `test0.defr`.
- The second takes 1,000 pairs of each language. Of a share of them (`--rates`), one side is left
  out, split in two, or merged with the next one.
- vecalign's own algorithm, in its folder VA, aligns the same vectors. It draws a sample, so its
  numbers are means of five runs. Its `score_multiple` gives the numbers in percent: precision,
  recall and F1 of equal groups (strict), and of groups that share a sentence on both sides (lax).
- The third takes random vectors. A tenth of the source sentences have no translation. Memory is the
  peak with the vectors, divided by their size.
"""

import random
import sys
import time
from ast import literal_eval
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import machine_parser, peak_memory, save
from dap_transformers.commands.arguments import EncoderArguments
from dap_transformers.encoding.encoder import Encoder
from dap_transformers.encoding.shards import SharedEncoder
from dap_transformers.mining.in_order import Costs, align
from dap_transformers.mining.texts import GroupedText, joined
from dap_transformers.tables import text_table
from dap_transformers.text.corpus import load_bitext

SIZE = 3  # most sentences of a group on a side
#: Groups of an alignment: the numbers of the source sentences and of the target sentences.
Groups = list[list[list[int]]]
Lines = list[list[str]]


def changed(pairs: list[tuple[str, str]], rate: float) -> tuple[Lines, Groups]:
    """Leave out, split or merge a share of the sentences. Return both texts and their groups."""
    rng = random.Random(0)
    lines: Lines = [[], []]
    gold = []
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
        gold.append([])
        for own, part in zip(lines, parts):
            gold[-1].append(list(range(len(own), len(own) + len(part))))
            own += part
    return lines, gold


def costs_of(encoder: Encoder, lines: Lines) -> Costs:
    """Encode the sentences of two texts and their groups of neighbours."""
    texts = [GroupedText(own, "text", SIZE) for own in lines]
    vectors = [encoder.encode(list(text)) for text in texts]
    return Costs(vectors, [text.groups for text in texts])


def ours(costs: Costs) -> Groups:
    """Align by this project. Each sentence without a translation is a group of its own."""
    found = []
    for _, i, j, a, b in align(costs)[0].tolist():
        found.append([list(range(i, i + a)), list(range(j, j + b))])
    for side, rows in enumerate(costs.groups):
        seen = {sentence for group in found for sentence in group[side]}
        for sentence in set(range(len(rows))) - seen:
            found.append([[], [sentence]] if side else [[sentence], []])
    return found


def vecalign(costs: Costs, seed: int) -> Groups:
    """Align by vecalign's own algorithm with its defaults: groups of at most 4 sentences."""
    from vecalign import dp_utils

    blocks = []
    for side, rows in enumerate(costs.groups):
        block = np.zeros((SIZE, len(rows), costs.vectors[side].shape[1]), np.float32)
        for size in range(1, SIZE + 1):
            # a group stands at its last sentence
            starts = slice(0, len(rows) - size + 1)
            block[size - 1, size - 1 :] = costs.units(side, starts, size)
        blocks.append(block)
    np.random.seed(seed)
    kinds = dp_utils.make_alignment_types(4)
    return dp_utils.vecalign(*blocks, kinds, 0.2, 7, 300, 20_000, 100)[0]["final_alignments"]


def quality(texts: list[tuple[Lines, Groups]], encoder: Encoder) -> dict[str, dict[str, float]]:
    """Return method -> name of a number -> percent, over all texts together."""
    from vecalign.score import score_multiple

    costs = [costs_of(encoder, lines) for lines, _ in texts]
    gold = [groups for _, groups in texts]
    runs = {"ours": [list(map(ours, costs))], "vecalign": []}
    for seed in range(5):
        runs["vecalign"].append([vecalign(each, seed) for each in costs])
    numbers = {}
    for name, found in runs.items():
        scores = [score_multiple(gold, groups) for groups in found]
        numbers[name] = {key: 100 * np.mean([s[key] for s in scores]) for key in scores[0]}
    return numbers


def speed(rows: int, dimensions: int) -> dict[str, float]:
    """Measure the alignment of random texts. Groups have noisy sums of the sentences' vectors."""
    rng = np.random.default_rng(0)
    meanings = rng.standard_normal((rows, dimensions), np.float32)
    vectors = []
    for text in (meanings, meanings[rng.random(rows) > 0.1]):
        sums = np.stack([text] * SIZE)
        for size in range(1, SIZE):
            sums[size:, :-size] += text[size:]
        sums += rng.standard_normal(sums.shape, np.float32) / 2
        vectors.append(sums.reshape(-1, dimensions))
    with peak_memory("cpu") as peak:
        started = time.perf_counter()
        groups = [np.arange(len(side)).reshape(SIZE, -1).T for side in vectors]
        align(Costs(vectors, groups))
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "memory": 1 + peak["bytes"] / sum(v.nbytes for v in vectors)}


def main(argv: list[str] | None = None) -> None:
    """Print a row per text or number of rows, and write all to `--json`."""
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--model")
    parser.add_argument("--prefix")
    parser.add_argument("--max_seq_length", type=int)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--languages", nargs="*", help="default: the test set of vecalign")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05, 0.1, 0.2])
    parser.add_argument("--vecalign", default=".", help="folder with its compiled dp_core")
    parser.add_argument("--rows", nargs="*", type=int, default=[])
    parser.add_argument("--dimensions", type=int, default=384)
    args = parser.parse_args(argv)
    sys.path.append(args.vecalign)

    results: dict[str, Any] = {}
    for rows in args.rows:
        results[str(rows)] = {"ours": speed(rows, args.dimensions)}
    texts = {}
    for code in args.languages or ():
        read = load_bitext([str(args.texts / f"{code}-en.tsv.xz")])[code][:1000]
        for rate in args.rates:
            pairs = list(zip(read["source"], read["target"]))
            texts[f"{code} {rate:.0%}"] = [changed(pairs, rate)]
    if args.texts and not args.languages:
        texts["bleualign"] = []
        for path in sorted(args.texts.glob("test*.defr")):
            lines = [path.with_suffix(end).read_text().splitlines() for end in (".de", ".fr")]
            gold = [list(map(literal_eval, row.split(":")[:2])) for row in path.open()]
            texts["bleualign"].append((lines, gold))
    if texts:
        chosen = EncoderArguments(
            args.model, prefix=args.prefix, max_seq_length=args.max_seq_length
        )
        encoder = SharedEncoder(chosen.load())
        for name, own in texts.items():
            results[name] = quality(own, encoder)
    lines = []
    for name, found in results.items():
        for method, numbers in found.items():
            lines.append([name, method, *numbers.values()])
    print(text_table(["", "", *numbers], lines))
    save(args, {"results": results})


if __name__ == "__main__":
    main()
