"""Outcomes by sentence add up to the report."""

import json
from pathlib import Path

import numpy as np
import pytest

from dap_transformers.errors import UserError
from experiments import measure_sentences
from experiments.statistics import bootstrap_interval

ENGLISH = ["He is not at school.", "We have 3 dogs.", "Where is Anna?", "It rains.", "Stop!"]


def write_text(folder: Path) -> Path:
    """Write "translations" of the English sentences into two languages."""
    folder.mkdir()
    for code in ("de", "fr"):
        lines = [f"{sentence.lower()} {code}\t{sentence}\n" for sentence in ENGLISH]
        (folder / f"{code}-en.tsv").write_text("".join(lines))
    return folder


def test_counts_by_sentence_add_up_to_the_report(tiny_bert_dir: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    report = tmp_path / "report.json"
    argv = ["--model", str(tiny_bert_dir), "--data_dir", str(text), "--output_file", str(report)]
    measure_sentences.main([*argv, "--pooling", "mean"])
    made = json.loads(report.read_text())
    counts = made["sentences"]
    (mean,) = made["averages"].values()
    expected = {"error": made["hard_negatives"]["mean"]["error"]["error"]}
    for direction in ("xx-en", "en-xx"):
        expected[f"pool_{direction}"] = mean[f"pool_{direction}"]
    for name, share in expected.items():
        assert len(counts[name]) == len(ENGLISH)
        assert 100 * sum(counts[name]) / (2 * len(ENGLISH)) == pytest.approx(share)

    (text / "fr-en.tsv").write_text("Oui\tYes\n")
    with pytest.raises(UserError, match="fr and de have other English sentences"):
        measure_sentences.require_same_english(measure_sentences.read_languages([str(text)]))


def test_bootstrap_interval_is_that_of_plain_draws() -> None:
    generator = np.random.default_rng(1)
    values = generator.normal([[0.0], [1.0], [3.0]], 5.0, (3, 80))
    draws = []
    for _ in range(4000):
        seeds = generator.integers(0, 3, 3)
        sentences = generator.integers(0, 80, 80)
        draws.append(values[seeds][:, sentences].mean())
    expected = np.quantile(draws, (0.025, 0.975))
    np.testing.assert_allclose(bootstrap_interval(values.tolist()), expected, atol=0.15)
