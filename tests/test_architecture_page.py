"""Run the code of docs/architecture.md; its objective is in test_objectives_dap.py."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY

from dap_transformers.evaluation.evaluator import evaluate
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import FORMATS, read_pairs

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")


def code_of_section(title: str) -> str:
    """Return the code of a section."""
    section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
    return re.search(r"```py\n(.*?)```", section, re.DOTALL)[1]


def run_section(title: str) -> dict[str, object]:
    """Run the code of a section and return its names."""
    names: dict[str, object] = {}
    exec(code_of_section(title), names)
    return names


@pytest.fixture
def csv_format() -> Iterator[None]:
    """Register the page's format, and remove it afterwards."""
    run_section("A format of parallel text")
    yield
    del FORMATS["csv"]


def test_the_format_is_found_and_read(csv_format: None, tmp_path: Path) -> None:
    (tmp_path / "de-en.csv").write_text("Guten Tag;Good day\nDanke;Thank you\n", encoding="utf-8")
    (file,) = find_bitext(tmp_path)["de"]
    pairs = [(pair["source"], pair["target"]) for pair in read_pairs(file)]
    assert pairs == [("Guten Tag", "Good day"), ("Danke", "Thank you")]


class Fixed:
    """An encoder that knows the vectors of some sentences."""

    vectors = dict(zip("abcABC", np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 2, 1]]))

    def encode(self, sentences: list[str], *_: object, **__: object) -> np.ndarray:
        return np.array([self.vectors[sentence] for sentence in sentences]).reshape(-1, 3)


def test_the_evaluator_is_the_mean_reciprocal_rank() -> None:
    evaluator = run_section("An evaluator")["ReciprocalRank"]([("a", "A"), ("b", "B"), ("c", "C")])
    # The first pair ranks first, the others rank last, behind a tie.
    assert evaluate(Fixed(), [evaluator])["reciprocal_rank"]["mean"] == pytest.approx(5 / 9)


def test_the_trainer_of_transformers_trains_the_model(
    tiny_bert_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(code_of_section("The training loop").replace("xlm-roberta-base", str(tiny_bert_dir)), {})
    assert (tmp_path / "out-plain" / "model.safetensors").is_file()
