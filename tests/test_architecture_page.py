"""Run the code of docs/architecture.md."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from tiny_models import make_batch, require_step, step, tiny_model, widen

from dap_transformers.evaluation.evaluator import evaluate
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import FORMATS, read_pairs
from objectives_dap import OBJECTIVES

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()


def run_section(title: str) -> dict:
    """Run the code of a section and return its names."""
    section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
    names: dict = {"__name__": "page"}
    for code in re.findall(r"```py\n(.*?)```", section, re.DOTALL):
        exec(code, names)
    return names


@patch.dict(OBJECTIVES)
def test_the_objectives_train_and_do_not_see_padding_or_chunks() -> None:
    run_section("An objective")
    batch = make_batch()
    for objective in ("bag", "tr+bag", "tr+rtl+bag", "margin", "tr+margin"):
        own = objective.split("+")[-1]
        model = tiny_model(objective=objective, **{f"{own}_weight": 0.5})
        expected = step(model, batch)
        order = torch.randperm(6)
        shuffled = {key: value[order] for key, value in batch.items()}
        for changed, size in ((widen(batch, 5), None), (shuffled, None), (batch, 4)):
            require_step(expected, model, changed, size)
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        assert model(**batch).loss.item() < expected[0]

    # A loop over all pairs of sentences.
    out = tiny_model(objective="margin")(**batch)
    total = 0.0
    for number, source in enumerate(out.source_embeds):
        cosines = [torch.cosine_similarity(source, each, dim=0) for each in out.target_embeds]
        total += sum(max(0, each - cosines[number] + 0.2) for each in cosines)
    assert out.margin_loss.item() == pytest.approx(total.item() / 36)


def test_the_format_is_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "ssv", None)
    run_section("A format of parallel text")
    (tmp_path / "de-en.ssv").write_text("Guten Tag;Good day\nDanke;Thank you\n")
    (file,) = find_bitext(tmp_path)["de"]
    pairs = [(pair["source"], pair["target"]) for pair in read_pairs(file)]
    assert pairs == [("Guten Tag", "Good day"), ("Danke", "Thank you")]


def test_the_evaluator_is_the_mean_reciprocal_rank() -> None:
    vector_of = dict(zip("abcABC", np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 2, 1]]))
    encode = lambda texts, *_, **__: np.array([vector_of[text] for text in texts])  # noqa: E731
    pairs = {"de": [("a", "A"), ("b", "B"), ("c", "C")]}
    evaluator = run_section("An evaluator")["ReciprocalRank"](pairs)
    # The first pair ranks first, the others rank last, behind a tie.
    numbers = evaluate(SimpleNamespace(encode=encode), [evaluator])["reciprocal_rank"]
    assert numbers == {"de": pytest.approx(5 / 9), "mean": pytest.approx(5 / 9)}
    assert "0.6" in evaluator.table(numbers)
