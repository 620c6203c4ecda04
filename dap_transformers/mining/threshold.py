"""Choose the lowest score of a pair from the scores themselves, and estimate the precision.

1. **Runner-up scores.** A *candidate* is a pair that may be a translation. Its *runner-up* is the
   next best pair of its two sentences. If the candidate is a translation, its runner-up is none.
   So runner-ups show how pairs score that are no translations, in any text and for any model.
2. **Two groups.** The candidates' scores are a mixture. Those of translations have a normal
   distribution. Those of the *other pairs*, the best of many, have a long tail: they are the sum of
   a normal and an exponential variable. EM fits both. The few scores in the tail do not tell its
   length, so several lengths are fitted, and their results are averaged.
3. **Precision.** The mean probability of all pairs above a threshold is its estimated precision.
   The threshold with the best expected F1 is chosen, or the lowest one with a wanted precision.

Runner-ups decide whether scores with one mode are all translations or none. A mixture fitted to the
scores only cannot tell these apart.

Legend: `P` pairs, `k` neighbours.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dap_transformers.errors import UserError, counted
from dap_transformers.mining.margin import margin_of
from dap_transformers.search.exact import Found, Neighbours

#: With fewer candidates nothing is estimated.
FEWEST_CANDIDATES = 50
#: At most this many candidates, evenly spread over the ranks, are used for the estimate.
SAMPLE = 200_000
#: Tails that are fitted: mean of the exponential part, in standard deviations of the normal part.
TAILS = (0.7, 1.0, 1.4, 1.8, 2.3)
#: How much higher runner-ups of translations score than candidates that are none, because each is
#: the better of two pairs, in their standard deviations. Measured on six languages: 0.16 to 0.36.
RUNNER_UP_LEAD = 0.2
#: Least distance of the two means, and least and largest standard deviation of the translations'
#: scores, in standard deviations of the other pairs' scores.
LEAST_DISTANCE = 2.0
WIDTHS = (1.0, 2.5)
#: Number and deviation of made-up translations, without which a small group would look too narrow.
MADE_UP = 20
MADE_UP_WIDTH = 1.8
#: A group with a smaller share of the candidates, fewer pairs or less distance (in standard
#: deviations) may be the tail of the other pairs' scores, so no threshold is chosen from it.
CLEAR_SHARE = 0.19
CLEAR_PAIRS = 50
CLEAR_DISTANCE = 5.0
#: Estimated precisions below this are often wrong by more than 5 points.
LOW_PRECISION = 0.86
#: Precisions of the table's rows. All pairs have the last one.
TABLE_ROWS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5, 0.0)
#: Most steps of EM.
STEPS = 300


@dataclass(frozen=True)
class ScoreModel:
    """How likely a pair with some score is a translation, the result of fitting the two groups.

    Attributes:
        candidates: number of all candidates, of which P are a sample.
        scores: (P,) best first.
        probabilities: (P,) that the pair is a translation. They never rise.
        distance: of the two groups' means, in standard deviations of the other pairs' scores.
        calibrated: whether the scores of known translations were given.
    """

    candidates: int
    scores: np.ndarray
    probabilities: np.ndarray
    distance: float
    calibrated: bool

    @property
    def share(self) -> float:
        """Return the estimated share of the candidates that are translations, 0 to 1."""
        return float(self.probabilities.mean())

    @property
    def translations(self) -> float:
        """Return the estimated number of translations among the P candidates."""
        return self.share * len(self.scores)

    @property
    def is_clear(self) -> bool:
        """Tell whether the translations stand out clearly enough to choose a threshold."""
        if self.calibrated or self.share >= CLEAR_SHARE:
            return True
        return self.translations >= CLEAR_PAIRS and self.distance >= CLEAR_DISTANCE

    @property
    def kept(self) -> np.ndarray:
        """Return how many pairs score at least as high as each pair: (P,)."""
        return np.searchsorted(-self.scores, -self.scores, "right")

    @property
    def precisions(self) -> np.ndarray:
        """Return for each pair the estimated precision, 0 to 1, if its score is the threshold."""
        return self.probabilities.cumsum()[self.kept - 1] / self.kept

    def row(self, threshold: float) -> dict[str, Any]:
        """Return a row of `table`, for a threshold that at least one pair reaches."""
        count = int((self.scores >= threshold).sum())
        return {
            # rounded down, so that a pair with exactly this score is kept
            "threshold": math.floor(threshold * 1e6) / 1e6,
            "kept": round(count * self.candidates / len(self.scores)),
            "precision": round(float(self.precisions[count - 1]), 4),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return a row for the lowest threshold of each precision in `TABLE_ROWS`, highest first.

        A row has "threshold", "kept" (number of pairs that score at least as high) and "precision"
        (their estimated share of translations, 0 to 1).
        """
        rows = {}
        for wanted in TABLE_ROWS:
            for threshold in self.scores[self.precisions >= wanted][-1:]:
                row = self.row(threshold)
                rows[row["kept"]] = row
        return list(rows.values())

    def choose(self, min_precision: float | None) -> dict[str, Any]:
        """Return the row of the best expected F1, or the lowest with a precision, 0 to 1."""
        if not self.is_clear:
            parts = []
            for share in (0.01, 0.05, 0.2):
                row = self.row(self.scores[int(share * len(self.scores))])
                parts.append(f"{row['threshold']} keeps {counted(row['kept'], 'pair')}")
            raise UserError(
                f"no group of translations stands out among {counted(self.candidates, 'candidate')}"
                ": the texts have few or none, or the model cannot tell; give known translations, "
                f"or a threshold: {', '.join(parts)}"
            )
        precisions = self.precisions
        if min_precision is None:
            f1 = 2 * precisions * self.kept / (self.kept + self.translations)
            return self.row(self.scores[f1.argmax()])
        reached = self.scores[precisions >= min_precision]
        if not len(reached):
            raise UserError(
                f"min_precision={min_precision:g}: the estimated precision is at most "
                f"{math.floor(100 * precisions.max()) / 100:.2f}; give a lower one"
            )
        return self.row(reached[-1])


@dataclass(frozen=True)
class Choice:
    """The chosen threshold, and what is estimated. None stands for what could not be estimated.

    Attributes:
        threshold: lowest score of a kept pair. None keeps all pairs.
        precision: share of translations among the kept pairs, 0 to 1.
        share: share of translations among all candidates, 0 to 1.
        table: rows of `ScoreModel.table`.
        note: one sentence on how the threshold was chosen.
        calibrated: whether known translations were used for the estimate.
        remark: what to know about the estimate, or an empty text.
    """

    threshold: float | None
    precision: float | None
    share: float | None
    table: list[dict[str, Any]]
    note: str
    calibrated: bool = False
    remark: str = ""

    def __str__(self) -> str:
        """Return the note, the estimate and the remark, and the table below them."""
        text = self.note
        if self.precision is not None:
            text += f", estimated precision {100 * self.precision:.0f}%"
        if self.remark:
            text += f"; {self.remark}"
        lines = [text]
        if self.table:
            lines.append("threshold   pairs kept   estimated precision")
        for row in self.table:
            mark = "  <- chosen" if row["threshold"] == self.threshold else ""
            share = f"{100 * row['precision']:.0f}%"
            lines.append(f"{row['threshold']:9.6f}   {row['kept']:10,}   {share:>19}{mark}")
        return "\n".join(lines)


def choose(
    candidates: np.ndarray,
    neighbours: Neighbours,
    k: int,
    threshold: float | str | None,
    min_precision: float | None,
    known_scores: np.ndarray | None,
) -> Choice:
    """Choose the threshold unless it is given, and estimate the precision if the scores allow it.

    `threshold` and `min_precision` are those of `MiningOptions`. `neighbours` are the `k` + 1
    nearest ones, or all if a text has no more than `k` sentences. Then, or with fewer candidates
    than `FEWEST_CANDIDATES`, nothing is estimated, and "auto" keeps all. Scores (K,) of known
    translations calibrate the estimate.

    Raises:
        UserError: if `min_precision` cannot be reached or estimated, or if "auto" finds no group of
            translations among the scores.
    """
    count = len(candidates)
    is_auto = threshold == "auto"
    threshold = None if is_auto else threshold
    note = ""
    if count < FEWEST_CANDIDATES:
        note = f"too few candidates for an estimate of the precision ({count})"
    elif neighbours.forward.scores.shape[1] <= k:
        note = f"no estimate of the precision: k={k} is as large as a text"
    if note:
        if min_precision is not None:
            raise UserError(f"min_precision={min_precision:g}: {note}; give a threshold")
        if is_auto:
            note += "; all are kept"
        return Choice(threshold, None, None, [], note)

    rows = np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64)
    sample = np.array(candidates[rows])
    runner_ups = runner_up_scores(sample, neighbours)
    model = fit_scores(sample["score"], runner_ups, known_scores, count)

    if is_auto:
        row = model.choose(min_precision)
        threshold = row["threshold"]
        goal = "expected F1"
        if min_precision is not None:
            goal = f"estimated precision of at least {min_precision:g}"
        note = f"threshold {threshold:.6f}, chosen by {goal}"
    else:
        row = model.row(model.scores[-1] if threshold is None else threshold)
        note = "all are kept" if threshold is None else "threshold as given"
        if not model.is_clear:
            remark = "no group of translations stands out, so the precision cannot be estimated"
            return Choice(threshold, None, None, [], note, remark=remark)
    remark = remark_on(model, row["precision"] if is_auto else None)
    share = round(model.share, 4)
    table = model.table()
    return Choice(threshold, row["precision"], share, table, note, model.calibrated, remark)


def remark_on(model: ScoreModel, precision: float | None) -> str:
    """Return what to know about the estimates, or an empty text.

    `precision` is the estimate for a threshold that was chosen, None if it was given.
    """
    if model.translations < 1:
        return "no candidate looks like a translation"
    if model.share > 0.99:
        return "almost all candidates look like translations"
    is_few = model.share < CLEAR_SHARE
    if model.calibrated:
        is_few = model.translations < CLEAR_PAIRS
    if is_few:
        return (
            f"only about {model.share * model.candidates:,.0f} of the candidates look like "
            "translations, and some may only be similar: check a few pairs"
        )
    if precision is not None and precision < LOW_PRECISION and not model.calibrated:
        return (
            f"an estimate below {100 * LOW_PRECISION:.0f}% is often wrong by more than 5 points: "
            "give known translations, a higher min_precision or more sentences"
        )
    return ""


def runner_up_scores(pairs: np.ndarray, neighbours: Neighbours) -> np.ndarray:
    """Score the runner-up of each pair (P,): the next best pair that has one of its two sentences.

    The mean cosine of a sentence's neighbourhood is also computed without its partner. `neighbours`
    are the k + 1 nearest ones of all rows in both directions.
    """
    source, target = pairs["source"], pairs["target"]
    near_source, near_target = neighbours
    of_source = _runner_ups(near_source, near_target, source, target)
    of_target = _runner_ups(near_target, near_source, target, source)
    return np.maximum(of_source, of_target)


def _runner_ups(
    near: Found, near_other: Found, rows: np.ndarray, partners: np.ndarray
) -> np.ndarray:
    """Score the best neighbour (P,) of a row of each pair, other than its partner.

    `near` are the neighbours of this side, and `near_other` those of the partners' side.
    """
    cosines = near.scores[rows].astype(np.float64)  # (P, k + 1)
    indices = near.indices[rows]
    k = indices.shape[1] - 1

    # leave the partner out or, if it is no neighbour, the last neighbour
    is_partner = indices == partners[:, None]
    left_out = np.where(is_partner.any(1), is_partner.argmax(1), k)
    kept = np.arange(k + 1) != left_out[:, None]
    cosines = cosines[kept].reshape(-1, k)
    indices = indices[kept].reshape(-1, k)

    own_means = cosines.mean(1, keepdims=True)  # (P, 1)
    other_means = near_other.scores[indices, :k].mean(2, dtype=np.float64)  # (P, k)
    return margin_of(cosines, own_means, other_means).max(1)


def fit_scores(
    scores: np.ndarray,
    runner_ups: np.ndarray,
    known: np.ndarray | None,
    candidates: int,
) -> ScoreModel:
    """Fit the distributions of translations' scores and of other pairs' scores.

    `scores` (P,) are of all `candidates` or a sample, and `runner_ups` (P,) of their runner-ups.
    Scores (K,) of `known` translations, if given, fix the translations' distribution.
    """
    order = np.argsort(scores)
    scores = scores[order]
    runner_ups = runner_ups[order] - RUNNER_UP_LEAD * _spread(runner_ups)

    probabilities = []
    distances = []
    for tail in TAILS:
        probability, distance = _fit(scores, runner_ups, known, tail)
        probabilities.append(np.maximum.accumulate(probability))
        distances.append(distance)
    mean = np.mean(probabilities, axis=0)  # (P,)
    distance = float(np.mean(distances))
    return ScoreModel(candidates, scores[::-1], mean[::-1], distance, known is not None)


def _fit(
    scores: np.ndarray, runner_ups: np.ndarray, known: np.ndarray | None, tail: float
) -> tuple[np.ndarray, float]:
    """Fit both groups by EM for a tail. `scores` (P,) ascend.

    Returns:
        The probability (P,) that each pair is a translation, and the distance of the two means.
    """
    # start with what lies far above the runner-ups
    spread = max(1.2 * _spread(runner_ups), 1e-6)
    likely = np.clip((scores - np.median(runner_ups)) / spread - 3, 0, 1)
    probability = 0.01 + 0.98 * likely  # (P,)

    values = np.concatenate([scores, runner_ups])
    order = np.argsort(values)
    for _ in range(STEPS):
        before = probability

        # the other pairs: candidates that are no translations, and runner-ups of those that are
        weights = np.concatenate([1 - probability, probability])
        mean, deviation = _mean_and_deviation(values, order, weights)
        deviation = max(deviation, 1e-6)

        # the translations, with made-up ones so that a small group keeps a width
        if known is None:
            high, width = _moments(scores, probability)
            high = max(high, mean + LEAST_DISTANCE * deviation)
            weight = probability.sum()
            made_up = (MADE_UP_WIDTH * deviation) ** 2
            variance = (weight * width**2 + MADE_UP * made_up) / (weight + MADE_UP)
            width = min(max(variance**0.5, WIDTHS[0] * deviation), WIDTHS[1] * deviation)
        else:
            high = float(known.mean())
            width = max(float(known.std()), 0.5 * deviation)

        share = min(max(float(probability.mean()), 1e-6), 1 - 1e-6)
        others = math.log(1 - share) + _log_skewed(scores, mean, deviation, tail)
        translations = math.log(share) + _log_normal(scores, high, width)
        probability = 1 / (1 + np.exp(np.clip(others - translations, -500, 500)))

        # where both densities are tiny, a lower score must not be more likely a translation
        start = int(np.searchsorted(scores, mean))
        least = probability[min(start, len(scores) - 1)]
        probability[:start] = np.minimum(probability[:start], least)
        if np.abs(probability - before).max() < 1e-5:
            break

    return probability, (high - mean) / deviation


def _spread(values: np.ndarray) -> float:
    """Estimate the standard deviation of values from their quartiles, as if they were normal."""
    return float(np.subtract(*np.quantile(values, (0.75, 0.25)))) / 1.349


def _moments(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the weighted mean and the weighted standard deviation of values."""
    total = weights.sum() + 1e-12
    mean = float((weights * values).sum() / total)
    return mean, float((weights * (values - mean) ** 2).sum() / total) ** 0.5


def _mean_and_deviation(
    values: np.ndarray, order: np.ndarray, weights: np.ndarray
) -> tuple[float, float]:
    """Estimate the mean and standard deviation of the other pairs' scores.

    Each averages two estimates. The one by moments is too large if translations are among the
    values, the one by quartiles is too small if the tail is heavy.
    """
    mean, deviation = _moments(values, weights)
    total = weights[order].cumsum()
    lower, middle, upper = np.interp(np.array([0.25, 0.5, 0.75]) * total[-1], total, values[order])
    by_quartiles = 0.8 * float(upper - lower)  # of a normal plus an exponential variable
    by_median = float(middle) + 0.086 * by_quartiles
    return (mean + by_median) / 2, (deviation + by_quartiles) / 2


def _log_normal(values: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """Return the log density of a normal distribution at each value."""
    z = (values - mean) / deviation
    return -0.5 * z**2 - math.log(deviation * math.sqrt(2 * math.pi))


def _log_skewed(values: np.ndarray, mean: float, deviation: float, tail: float) -> np.ndarray:
    """Return the log density of the sum of a normal and an exponential variable at each value.

    `mean` and `deviation` are of the sum. `tail` is one of `TAILS`.
    """
    normal = deviation / math.sqrt(1 + tail**2)  # standard deviation of the normal part
    exponential = tail * normal  # mean and standard deviation of the exponential part
    z = (values - mean + exponential) / normal
    below = torch.special.log_ndtr(torch.from_numpy(z - 1 / tail)).numpy()
    return 0.5 / tail**2 - z / tail + below - math.log(exponential)
