"""Where a teacher and the anchor pull the vectors, and which sentences the anchor encodes."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.training.mixing import LanguageMixSampler
from dap_transformers.training.run import drawn_pairs
from dap_transformers.training.teacher import NO_ROW, ROWS, add_teacher


def rows_of(part: Dataset, language: str) -> list[dict]:
    return [row | {"language": language} for row in part.to_list()]


def test_the_anchor_moves_the_sources_of_each_language_to_the_centre_of_their_targets(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    text = {
        "de": Dataset.from_dict({"source": ["kaban", "q", "ban"], "target": ["ban", "fin", "q"]}),
        "fr": Dataset.from_dict({"source": ["kaban", "o"], "target": ["fin", "ban"]}),
    }
    is_drawn = np.array([True, True, False, True, True])
    sides = ("source", "target")
    with_rows, teacher = add_teacher(encoder, sides, text, text, is_drawn, tmp_path)
    for language, part in text.items():
        rows = rows_of(with_rows[language], language)[:2]
        source, target = (encoder.encode(part[side][:2], normalize=True) for side in part.features)
        goals = teacher(rows).numpy()
        np.testing.assert_allclose(goals[:, 1], target, atol=1e-6)
        centre = source.mean(0, dtype=np.float64), target.mean(0, dtype=np.float64)
        np.testing.assert_allclose(goals[:, 0], source + centre[1] - centre[0], atol=1e-6)
    left_out = rows_of(with_rows["de"], "de")[2]
    assert [left_out[name] for name in ROWS] == [NO_ROW, NO_ROW]
    with pytest.raises(IndexError):
        teacher([left_out])


@pytest.mark.parametrize(
    ("limit", "steps"),
    [({"max_steps": 3}, 3), ({"num_train_epochs": 0.41}, 11), ({"num_train_epochs": 1}, 25)],
)
def test_the_anchor_needs_the_pairs_that_a_run_draws_and_few_others(
    limit: dict[str, float], steps: int
) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "world_size": 4}
    training = SimpleNamespace(**{"max_steps": -1, "num_train_epochs": 3} | sizes | limit)
    sampler = LanguageMixSampler([300, 100, 7], "uniform", 0.5, seed=0)
    is_drawn = drawn_pairs(sampler, training)
    drawn = set(islice(sampler, 16 * steps + 8))  # the loader reads one batch ahead
    assert is_drawn[sorted(drawn)].all()
    assert is_drawn.sum() <= len(drawn) + 32
    assert drawn_pairs(sampler, SimpleNamespace(**vars(training) | {"max_steps": 26})).all()
