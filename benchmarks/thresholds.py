"""Test the threshold that mining chooses, on texts whose translations are known.

    python -m benchmarks.thresholds --models "e5,mean,query: " build/quickstart/model \\
        --bucc bucc/ --texts tatoeba/ train/ --vectors kept/ --json thresholds.json

- Texts are made from parallel text: 2%, 20%, 50%, 100% or 0% of the sentences of each side have
  their translation on the other side. `--mix fr+es+it` also makes texts in several languages.
  BUCC's sample is used as it is.
- English sentences that share more than half of their words with an earlier one are left out.
  Otherwise almost equal sentences would count as wrong.
- "best F1" is that of the best threshold, chosen with the known translations. "table" is the
  largest error of the printed table's precisions, in points.
- The last line says how often the command remarks that its estimate is unsure, and how often the
  estimate is off by more than 5 points with and without such a remark.
- `--known 40` keeps 40 pairs out of each text, and gives them as `--calibrate` does.
- "mixture" is a plain mixture of two normal distributions, for comparison.
"""

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import machine_parser, save
from dap_transformers.commands.arguments import EncoderArguments
from dap_transformers.encoding.encoder import Encoder
from dap_transformers.encoding.shards import embed_to_disk, model_fingerprint
from dap_transformers.errors import UserError
from dap_transformers.evaluation.bucc import Bucc, best_threshold, count_gold, score_at
from dap_transformers.evaluation.retrieval import read_languages
from dap_transformers.mining.mine import MiningOptions, mine_vectors
from dap_transformers.tables import text_table
from dap_transformers.text.find import find_bitext

SHARES = (0.02, 0.2, 0.5, 1.0, 0.0)
LANGUAGES = ("de", "hi", "ja", "sw", "tr", "zh")
FAR_OFF = 5.0  # points by which an estimated precision may be wrong
OVERLAP = 0.5  # share of common words from which a sentence is left out


@dataclass(frozen=True)
class Case:
    """Two texts with known translations.

    Attributes:
        name: name of the texts, such as "tatoeba.de".
        share: share of a side's sentences that have their translation on the other side, 0 to 1.
            None for BUCC, where it is not chosen.
        source: vectors of the source sentences, (N, D).
        target: vectors of the target sentences, (M, D).
        gold: number of true pairs.
        truth: function of the P candidates. It returns how many pairs of ids each stands for and
            how many of those are true, (P,) each.
        known: vectors of the sources and the targets of known translations that are in neither
            text, (K, D) each. None calibrates nothing.
    """

    name: str
    share: float | None
    source: np.ndarray
    target: np.ndarray
    gold: int
    truth: Any
    known: tuple[np.ndarray, np.ndarray] | None = None


def drawn_pairs(rows: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Draw at most `count` pairs at random, the same in every call.

    No sentence of a side is drawn twice, so there may be fewer.

    Args:
        rows: pairs of a source sentence and a target sentence.
        count: number of pairs to draw.

    Returns:
        The drawn pairs, in random order.
    """
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
    rows_with: dict[str, list[int]] = defaultdict(list)
    kept = []
    for row, own in enumerate(words):
        earlier = {other for word in own for other in rows_with[word]}
        common = (len(own & words[other]) / len(own | words[other]) for other in earlier)
        if own and max(common, default=0) <= OVERLAP:
            kept.append(row)
            for word in own:
                rows_with[word].append(row)
    return kept


def made_case(
    name: str,
    vectors: tuple[np.ndarray, np.ndarray],
    share: float,
    draw: int = 0,
    known: int = 0,
) -> Case:
    """Make two texts in which a chosen share of the sentences are translations of each other.

    Args:
        name: name of the texts.
        vectors: vectors of the sources and of their translations, row by row.
        share: share of a text's sentences whose translation is in the other text, 0 to 1.
        draw: number of the random draw, from 0.
        known: number of pairs, the last rows, that are in neither text and calibrate the estimate.

    Returns:
        The case. Both texts have half as many sentences as `vectors` has other rows.
    """
    split = len(vectors[0]) - known
    kept_out = (vectors[0][split:], vectors[1][split:]) if known else None
    vectors = vectors[0][:split], vectors[1][:split]
    rows = np.random.default_rng(draw).permutation(len(vectors[0]))
    size = len(rows) // 2
    common = round(share * size)
    source = rows[:size]
    target = np.concatenate([rows[:common], rows[size : 2 * size - common]])

    def truth(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_true = source[pairs["source"]] == target[pairs["target"]]
        return np.ones(len(pairs), int), is_true.astype(int)

    return Case(name, share, vectors[0][source], vectors[1][target], common, truth, kept_out)


def made_cases(encoder: Encoder, args: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """Yield the cases that are made from the parallel text of `--texts`.

    There is one case per corpus, language or mix of languages, share of `SHARES` and draw.

    Args:
        encoder: encodes the sentences.
        args: the command line.
        folder: where to keep the vectors.
    """
    fingerprint = model_fingerprint(encoder)
    mixes = [mix.split("+") for mix in args.mix]
    codes = sorted({code for group in (args.languages, *mixes) for code in group})
    for corpus in args.texts:
        english = {}
        vectors = {}
        for code, rows in read_languages(find_bitext(corpus), codes).items():
            pairs = drawn_pairs(rows, args.pairs)
            english[code] = [pair[1] for pair in pairs]
            sides = []
            for side, part in enumerate(("source", "target")):
                sentences = [pair[side] for pair in pairs]
                place = folder / f"{Path(corpus).name}.{code}.{part}"
                sides.append(embed_to_disk(encoder, sentences, place, fingerprint=fingerprint))
            vectors[code] = sides

        for group in [*([code] for code in args.languages), *mixes]:
            texts = [code for code in group if code in english]
            if not texts:
                continue
            sentences = [sentence for code in texts for sentence in english[code]]
            source = np.concatenate([vectors[code][0][:] for code in texts])
            target = np.concatenate([vectors[code][1][:] for code in texts])
            order = list(range(len(sentences)))
            random.Random(0).shuffle(order)
            shuffled = [sentences[row] for row in order]
            kept = [order[row] for row in distinct_rows(shuffled)]
            name = f"{Path(corpus).name}.{'+'.join(texts)}"
            for share in SHARES:
                for draw in range(args.draws):
                    vectors_of = source[kept], target[kept]
                    yield made_case(name, vectors_of, share, draw, args.known)


def bucc_case(encoder: Encoder, args: argparse.Namespace, folder: Path) -> Case:
    """Return the sample split of BUCC zh-en as a case.

    Args:
        encoder: encodes the sentences.
        args: the command line, which has the folder of BUCC.
        folder: where to keep the vectors.
    """
    (task,) = Bucc(args.bucc, "zh-en", "sample").read()
    fingerprint = model_fingerprint(encoder)
    vectors = []
    for part, side in (("source", task.source), ("target", task.target)):
        place = folder / f"bucc.zh-en.{part}"
        vectors.append(
            embed_to_disk(encoder, side, place, shard_size=2048, fingerprint=fingerprint)
        )

    def truth(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return count_gold(pairs, task)

    return Case("bucc.zh-en", None, *vectors, len(task.gold), truth)


def measure(case: Case) -> dict[str, Any]:
    """Mine one case, and compare the chosen threshold and the estimates with the truth.

    Returns:
        "text", "share" (0 to 1), "gold" (true pairs), "candidates" (their number) and "threshold"
        (the chosen score, or None if mining refuses to choose). All others are in percent, and some
        are missing if there are no true pairs or no threshold: "best_f1" (of the best threshold),
        "mixture_f1" (of a plain mixture's threshold), "f1" and "precision" (of the chosen
        threshold), "estimated" (its estimated precision) and "table_error" (largest error of the
        estimates in the table). "unsure" tells whether the command remarks on the estimate, other
        than that almost all candidates look like translations.
    """
    numbers: dict[str, Any] = {"text": case.name, "share": case.share, "gold": case.gold}
    vectors = case.source, case.target
    everything = MiningOptions(threshold="none")
    _, candidates, _ = mine_vectors(vectors, everything)
    extracted, correct = case.truth(candidates)
    scores = np.array(candidates["score"])
    numbers["candidates"] = len(scores)
    if case.gold:
        best = best_threshold(scores, extracted, correct, case.gold)
        numbers["best_f1"] = score_at(best, scores, extracted, correct, case.gold).f1
    mixture = score_at(mixture_threshold(scores), scores, extracted, correct, max(case.gold, 1))
    numbers["mixture_f1"] = mixture.f1

    try:
        _, _, choice = mine_vectors(vectors, MiningOptions(), known=case.known)
    except UserError:
        return numbers | {"threshold": None}  # the command asks for a number
    found = score_at(choice.threshold, scores, extracted, correct, max(case.gold, 1))
    errors = []
    for row in choice.table:
        kept = scores >= row["threshold"]
        errors.append(row["precision"] - correct[kept].sum() / extracted[kept].sum())
    return numbers | {
        "threshold": choice.threshold,
        "f1": found.f1,
        "precision": found.precision,
        "estimated": 100 * choice.precision,
        "unsure": bool(choice.remark) and choice.share < 0.99,
        "table_error": 100 * float(np.abs(errors).max()),
    }


def mixture_threshold(scores: np.ndarray) -> float:
    """Return the lowest score that a plain mixture takes for a translation.

    The mixture of two normal distributions is fitted to the scores by EM. The returned score is the
    lowest with a probability of at least ½, or the highest score if there is none.
    """
    ordered = np.sort(scores)
    likely = (ordered > ordered.mean() + 3 * ordered.std()).astype(float)
    for _ in range(200):
        logs = []
        for weights in (1 - likely, likely):
            total = weights.sum() + 1e-9
            mean = (weights * ordered).sum() / total
            deviation = ((weights * (ordered - mean) ** 2).sum() / total) ** 0.5 + 1e-6
            log = np.log(total / len(ordered)) - np.log(deviation)
            logs.append(log - 0.5 * ((ordered - mean) / deviation) ** 2)
        likely = 1 / (1 + np.exp(np.clip(logs[0] - logs[1], -500, 500)))
    above = ordered[np.maximum.accumulate(likely) >= 0.5]
    return float(above[0]) if len(above) else float(ordered[-1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format one model's results as a text table, a row per text and share.

    The column "gold" has the number of true pairs. All other numbers are in percent. F1 is "asks"
    if mining refused to choose a threshold.

    Args:
        rows: results of `measure`.
    """
    header = ["text", "share", "gold", "best F1", "mixture F1", "F1", "precision", "estimated"]
    lines = []
    for row in rows:
        share = "" if row["share"] is None else f"{100 * row['share']:.0f}%"
        line = [row["text"], share, row["gold"]]
        for name in ("best_f1", "mixture_f1", "f1", "precision", "estimated", "table_error"):
            line.append("" if name not in row else f"{row[name]:.1f}")
        if row["threshold"] is None:
            line[5] = "asks"
        lines.append(line)
    return text_table([*header, "table"], lines)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results of all models as a text table, a row per share of `SHARES` and for BUCC.

    It shows how often no threshold was chosen ("asks"), how far F1 is below the best F1, and the
    errors of the estimated precisions, in points.

    Args:
        rows: results of `measure`, of all models.
    """
    lines = []
    for share in (None, *SHARES):
        own = [row for row in rows if row["share"] == share]
        chosen = [row for row in own if row["threshold"] is not None]
        name = "BUCC" if share is None else f"{100 * share:.0f}%"
        line = [name, len(own), len(own) - len(chosen)]
        gaps = [row["best_f1"] - row["f1"] for row in chosen if "best_f1" in row]
        errors = [abs(row["estimated"] - row["precision"]) for row in chosen]
        tables = [row["table_error"] for row in chosen]
        for values in (gaps, errors, tables):
            line += [f"{np.mean(values):.1f}", f"{max(values):.1f}"] if values else ["", ""]
        lines.append(line)
    header = ["share", "texts", "asks", "F1 below best: mean", "max", "precision error: mean"]
    return text_table([*header, "max", "table error: mean", "max"], lines)


def remarks(rows: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on how well the remark tells which estimates are wrong.

    Args:
        rows: results of `measure`, of all models.
    """
    chosen = [row for row in rows if row["threshold"] is not None]
    parts = []
    for unsure, name in ((True, "with"), (False, "without")):
        own = [row for row in chosen if row["unsure"] == unsure]
        far = [row for row in own if abs(row["estimated"] - row["precision"]) > FAR_OFF]
        parts.append(f"{len(far)} of {len(own)} {name} the remark")
    return f"estimates that are off by more than {FAR_OFF:g} points: {', '.join(parts)}"


def main(argv: list[str] | None = None) -> None:
    """Measure all models and texts, print a table per model and a summary, and write `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument(
        "--models", nargs="+", required=True, help="MODEL, MODEL,POOLING or MODEL,POOLING,PREFIX"
    )
    parser.add_argument("--bucc", help="folder of BUCC 2018 zh-en, sample split")
    parser.add_argument("--texts", nargs="*", default=[], help="folders of parallel text")
    parser.add_argument("--languages", nargs="+", default=list(LANGUAGES))
    parser.add_argument(
        "--mix", nargs="*", default=[], help="also mix languages in one text, such as fr+es+it"
    )
    parser.add_argument("--draws", type=int, default=1, help="random texts of each kind")
    parser.add_argument(
        "--known", type=int, default=0, help="known translations of each text, for --calibrate"
    )
    parser.add_argument("--pairs", type=int, default=2000, help="most pairs of each language")
    parser.add_argument("--vectors", type=Path, default=Path("build/thresholds"))
    args = parser.parse_args(argv)

    results: dict[str, list[dict[str, Any]]] = {}
    for spec in args.models:
        name, pooling, prefix = (*spec.split(",", 2), None, None)[:3]
        encoder = EncoderArguments(name, pooling=pooling, prefix=prefix).load()
        folder = args.vectors / Path(name).name
        cases = made_cases(encoder, args, folder)
        rows = [measure(case) for case in cases]
        if args.bucc:
            rows.append(measure(bucc_case(encoder, args, folder)))
        results[name] = rows
        print(f"{name}\n{table(rows)}\n", flush=True)
    everything = [row for rows in results.values() for row in rows]
    print(summary(everything))
    print(remarks(everything))
    save(args, {"models": results})


if __name__ == "__main__":
    main()
