"""The quickstart runs to its end on tiny text, and uses a finished run again."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write_bitext

from dap_transformers.files import read_json
from quickstart import __main__ as run


@pytest.fixture
def home(
    tiny_bert_dir: Path, short_bitext_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder that has text and encoder, beside a recipe of two steps."""
    recipe = run.RECIPE.read_text().replace("max_steps: 60", "max_steps: 2\nhead_steps: 2")
    (tmp_path / "quickstart.yaml").write_text(recipe)
    monkeypatch.setattr(run, "RECIPE", tmp_path / "quickstart.yaml")
    monkeypatch.setattr(run, "HOME", tmp_path)
    monkeypatch.setattr(run, "FIGURE_LANGUAGE", "de")
    monkeypatch.setattr(run, "prepare_text", lambda: None)
    monkeypatch.setattr(run, "prepare_encoder", lambda: tiny_bert_dir)
    shutil.copytree(short_bitext_dir, tmp_path / "train")
    write_bitext(tmp_path / "test", 9)
    return tmp_path


def test_a_second_objective_is_shown_beside_the_finished_run(
    home: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.main([])
    weights = (home / "model" / "model.safetensors").stat().st_mtime_ns
    assert "hard-negative error" in capsys.readouterr().out
    run.main(["--objective", "tr+bow"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert any(row[-3:] == ["before", "tr+distill", "tr+bow"] for row in rows)
    assert (home / "model" / "model.safetensors").stat().st_mtime_ns == weights
    found = read_json(home / "results.json")
    assert list(found["results"]) == ["before", "tr+distill", "tr+bow"]
    assert (home / "token_states.png").is_file()

    # of other text
    pins = [replace(wheel, sha256="0") for wheel in run.fetch.TEXT_WHEELS]
    monkeypatch.setattr(run.fetch, "TEXT_WHEELS", pins)
    with pytest.raises(SystemExit, match="model holds a run with other"):
        run.main([])
    (home / "model" / run.FINISHED).unlink()  # a run that was killed leaves the folder free
    assert not run.is_trained(home / "model", "tr")
