"""Test the threshold that mining chooses, on texts whose translations are known.

    python -m benchmarks.thresholds --models "e5,mean,query: " build/quickstart/model \\
        --texts tatoeba/ train/ --json thresholds.json

- Texts are made from parallel text: 2%, 20%, 50%, 100% or 0% of the sentences of each side have
  their translation on the other side.
- English sentences that share more than half of their words with an earlier one are left out.
  Otherwise almost equal sentences would count as wrong.
- "best F1" is that of the best threshold, chosen with the known translations.
- The last line says how often the command remarks that its estimate is unsure, and how often the
  estimate is off by more than 5 points with and without such a remark.
- `--known 40` keeps 40 pairs out of each text, and gives them as `--calibrate` does.

Legend: `N` source sentences, `M` target sentences, `K` known pairs, `D` dimensions.
"""

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import machine_parser, save
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.encoding.encoder import Encoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.bucc import best_threshold, score_at
from dap_transformers.evaluation.retrieval import read_languages
from dap_transformers.mining.mine_pairs import MiningOptions, mine_vectors
from dap_transformers.tables import text_table
from dap_transformers.text.find import find_bitext

SHARES = (0.02, 0.2, 0.5, 1.0, 0.0)
LANGUAGES = ("de", "hi", "ja", "sw", "tr", "zh")
FAR_OFF = 5.0  # points by which an estimated precision may be wrong
OVERLAP = 0.5  # share of common words from which a sentence is left out

Sides = tuple[np.ndarray, np.ndarray]  # of the source and of the target


@dataclass(frozen=True)
class Case:
    """Two texts with known translations.

    Attributes:
        name: name of the texts, such as "tatoeba.de".
        share: share of a side's sentences that have their translation on the other side, 0 to 1.
        vectors: vectors of the source (N, D) and the target (M, D).
        numbers: number of each sentence's pair, (N,) and (M,).
        known: vectors of translations that are in neither text, (K, D) each. None calibrates
            nothing.
    """

    name: str
    share: float
    vectors: Sides
    numbers: Sides
    known: Sides | None


def drawn_pairs(rows: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Draw at most `count` pairs at random, the same in every call, no sentence of a side twice."""
    pairs = list(rows)
    random.Random(0).shuffle(pairs)
    for side in (0, 1):
        pairs = list({pair[side]: pair for pair in pairs}.values())
    return pairs[:count]


def distinct_rows(sentences: Sequence[str]) -> list[int]:
    """Return the row numbers of sentences that do not share too many words with an earlier one.

    Too many is a share above `OVERLAP`: the number of common words, divided by the number of
    distinct words of the two sentences together. Sentences without words are left out.

    >>> distinct_rows(["Tom sang a song", "Tom sang that song", "a dog barks"])
    [0, 2]
    """
    words = [set(re.findall(r"\w+", sentence.lower())) for sentence in sentences]
    kept: list[int] = []
    for row, own in enumerate(words):
        common = (len(own & words[other]) / len(own | words[other]) for other in kept)
        if own and max(common, default=0) <= OVERLAP:
            kept.append(row)
    return kept


def made_case(name: str, vectors: Sides, share: float, draw: int, known: int) -> Case:
    """Make two texts in which a chosen share of the sentences are translations of each other.

    Both texts have half as many sentences as `vectors` has rows, without the known ones.

    Args:
        vectors: vectors of the sources and of their translations, row by row.
        share: share of a text's sentences whose translation is in the other text, 0 to 1.
        draw: number of the random draw, from 0.
        known: number of pairs, the last rows, that are in neither text and calibrate the estimate.
    """
    split = len(vectors[0]) - known
    kept_out = (vectors[0][split:], vectors[1][split:]) if known else None
    rows = np.random.default_rng(draw).permutation(split)
    size = split // 2
    common = round(share * size)
    source = rows[:size]
    target = np.concatenate([rows[:common], rows[size : 2 * size - common]])
    texts = vectors[0][source], vectors[1][target]
    return Case(name, share, texts, (source, target), kept_out)


def made_cases(encoder: Encoder, args: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each corpus, language, share of `SHARES` and draw."""
    for corpus in args.texts:
        for code, rows in read_languages(find_bitext(corpus), LANGUAGES).items():
            sources, targets = zip(*drawn_pairs(rows, args.pairs), strict=True)
            order = list(range(len(targets)))
            random.Random(0).shuffle(order)
            kept = [order[row] for row in distinct_rows([targets[row] for row in order])]
            vectors = encoder.encode(sources)[kept], encoder.encode(targets)[kept]
            for share in SHARES:
                for draw in range(args.draws):
                    yield made_case(f"{Path(corpus).name}.{code}", vectors, share, draw, args.known)


def measure(case: Case) -> dict[str, Any]:
    """Mine one case, and compare the chosen threshold and the estimate with the truth.

    Returns:
        "text", "share" (0 to 1), "gold" (true pairs), "best_f1" (of the best threshold, in percent)
        and "threshold" (the chosen score, or None if mining refuses to choose). The others are
        missing without a threshold. In percent: "f1" and "precision" of the chosen threshold, and
        "estimated" (its estimated precision). In points: "below_best" and "error" (of the
        estimate). "unsure" tells whether the command remarks on the estimate, other than that
        almost all candidates look like translations.
    """
    _, pairs, _ = mine_vectors(case.vectors, MiningOptions(threshold=None))
    source, target = case.numbers
    correct = (source[pairs["source"]] == target[pairs["target"]]).astype(int)
    gold = int(np.isin(source, target).sum())
    counts = pairs["score"], np.ones(len(pairs), int), correct, max(gold, 1)
    best = score_at(best_threshold(*counts), *counts)
    numbers = {"text": case.name, "share": case.share, "gold": gold, "best_f1": best["f1"]}
    try:
        _, _, choice = mine_vectors(case.vectors, MiningOptions(), known=case.known)
    except UserError:
        return numbers | {"threshold": None}  # the command asks for a number
    found = score_at(choice.threshold, *counts)
    return numbers | {
        "threshold": choice.threshold,
        "f1": found["f1"],
        "below_best": best["f1"] - found["f1"],
        "precision": found["precision"],
        "estimated": 100 * choice.precision,
        "error": abs(100 * choice.precision - found["precision"]),
        "unsure": bool(choice.remark) and choice.share < 0.99,
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results of all models as a text table with a row per share of `SHARES`.

    It shows how often no threshold was chosen ("asks"), how far F1 is below the best F1, and the
    errors of the estimated precisions, in points. A last line says how well the remark tells which
    estimates are wrong.
    """
    lines = []
    for share in SHARES:
        own = [row for row in rows if row["share"] == share]
        chosen = [row for row in own if row["threshold"] is not None]
        line = [f"{share:.0%}", len(own), len(own) - len(chosen)]
        for name in ("below_best", "error"):
            values = [row[name] for row in chosen]
            line += [float(np.mean(values)), max(values)] if values else ["", ""]
        lines.append(line)
    header = ["share", "texts", "asks", "F1 below best: mean", "max", "precision error: mean"]

    parts = []
    for unsure, name in ((True, "with"), (False, "without")):
        errors = [row["error"] for row in rows if row.get("unsure") == unsure]
        far = sum(error > FAR_OFF for error in errors)
        parts.append(f"{far} of {len(errors)} {name} the remark")
    note = f"estimates that are off by more than {FAR_OFF:g} points: {', '.join(parts)}"
    return f"{text_table([*header, 'max'], lines)}\n{note}"


def main(argv: list[str] | None = None) -> None:
    """Measure all models and texts, print a summary, and write every text's numbers to `--json`."""
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument(
        "--models", nargs="+", required=True, help="MODEL, MODEL,POOLING or MODEL,POOLING,PREFIX"
    )
    parser.add_argument("--texts", nargs="+", required=True, help="folders of parallel text")
    parser.add_argument("--draws", type=int, default=1, help="random texts of each kind")
    parser.add_argument(
        "--known", type=int, default=0, help="known translations of each text, for --calibrate"
    )
    parser.add_argument("--pairs", type=int, default=2000, help="most pairs of each language")
    args = parser.parse_args(argv)

    results: dict[str, list[dict[str, Any]]] = {}
    for spec in args.models:
        name, pooling, prefix = (*spec.split(",", 2), None, None)[:3]
        encoder = EncoderArguments(name, pooling=pooling, prefix=prefix).load()
        results[spec] = [measure(case) for case in made_cases(encoder, args)]
    everything = [row for rows in results.values() for row in rows]
    print(summary(everything))
    save(args, {"models": results})


if __name__ == "__main__":
    main()
