"""Accuracy as a metric of the `evaluate` library that needs no network; import it late, as the library takes seconds.

Shapes: `N` examples, `C` classes.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
from transformers import EvalPrediction

DESCRIPTION = "Share of predictions that equal their reference."
INPUTS = "predictions: list of class ids; references: list of class ids of the same length."


class Accuracy(evaluate.Metric):
    """`evaluate.load("accuracy")` without the download.

    >>> Accuracy(keep_in_memory=True).compute(predictions=[0, 1, 2, 2], references=[0, 1, 1, 2])
    {'accuracy': 0.75}
    """

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", inputs_description=INPUTS, features=features)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a `Trainer`: accuracy, 0 to 1, of logits (N, C) against labels (N,)."""
    classes = np.asarray(prediction.predictions).argmax(-1)  # (N,)
    return Accuracy(keep_in_memory=True).compute(predictions=classes, references=prediction.label_ids)
