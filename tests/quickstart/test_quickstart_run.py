"""A finished run is used again only for the same settings."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dap_transformers.commands.recipes import parse_arguments
from quickstart import __main__ as run
from quickstart import reuse

MODEL_FILE = b"weights"
RECIPE = "max_steps: 60\nlearning_rate: 5.0e-5\n"


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """Return the ingredients of a run from `model`, `recipe.yaml` and `train`."""
    for folder, name, content in (
        ("model", "weights", MODEL_FILE),
        ("train", "de-en.tsv", b"Ja\tYes\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return look(tmp_path)


def look(
    folder: Path, model: str = "model", pooling: str = "mean", objective: str = "tr"
) -> dict[str, Any]:
    start = str(folder / model) if (folder / model).exists() else model
    return reuse.ingredients(start, pooling, objective, folder / "recipe.yaml", folder / "train")


def finish(out: Path) -> None:
    (out / reuse.FINISHED).write_text("{}")


def test_a_finished_run_of_the_same_settings_is_used_again(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    assert not reuse.claim(tmp_path / "out", asked)
    finish(tmp_path / "out")
    (tmp_path / "recipe.yaml").write_text("# a remark\nlearning_rate: 0.00005\nmax_steps: 60\n")
    (tmp_path / "model").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "model")
    os.utime(
        tmp_path / "train" / "de-en.tsv"
    )  # written again with the same content, as every run does
    assert reuse.claim(tmp_path / "out", look(tmp_path))


@pytest.mark.parametrize("remains", ["finished", "checkpoint"])
@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"model": "user/other"}, r"start model='model \([0-9a-f]{16}\)', now 'user/other'"),
        ({"pooling": "cls"}, "pooling='mean', now 'cls'"),
        ({"objective": "tr+rtl"}, r"objective='tr', now 'tr\+rtl'"),
        (
            {"recipe.yaml": RECIPE.replace("60", "61")},
            "recipe.yaml={'max_steps': 60}, now {'max_steps': 61}",
        ),
        ({"recipe.yaml": RECIPE + "rtl_layers: 1\n"}, "recipe.yaml={}, now {'rtl_layers': 1}"),
        ({"train/de-en.tsv": "Nein\tNo\n"}, "training text='[0-9a-f]{16}', now '[0-9a-f]{16}'"),
        (
            {"model/weights": "other"},
            r"start model='model \([0-9a-f]{16}\)', now 'model \([0-9a-f]{16}\)'",
        ),
    ],
)
def test_a_run_of_other_settings_is_refused(
    tmp_path: Path, asked: dict[str, Any], changed: dict[str, str], difference: str, remains: str
) -> None:
    out = tmp_path / "out"
    reuse.claim(out, asked)
    finish(out) if remains == "finished" else (out / "checkpoint-10").mkdir()
    for name in [name for name in changed if (tmp_path / name).is_file()]:
        (tmp_path / name).write_text(changed[name])
        changed = {}
    with pytest.raises(ValueError, match=rf"out holds a run .*\({difference}.*mv "):
        reuse.claim(out, look(tmp_path, **changed))
    assert json.loads((out / reuse.RECORD).read_text()) == asked


def test_a_run_killed_before_its_first_checkpoint_leaves_the_folder_free(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    assert not reuse.claim(out, asked)
    (out / "model.safetensors").write_bytes(b"half")  # killed while it saved
    assert not reuse.claim(out, look(tmp_path, pooling="cls"))
    finish(out)
    assert reuse.claim(out, look(tmp_path, pooling="cls"))


def test_a_run_killed_after_a_checkpoint_goes_on_and_one_of_unknown_settings_is_refused(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    reuse.claim(out, asked)
    (out / "checkpoint-10").mkdir()
    assert not reuse.claim(out, look(tmp_path))
    (out / reuse.RECORD).unlink()
    finish(out)
    with pytest.raises(ValueError, match="out holds a run made from something else .*None.*mv "):
        reuse.claim(out, asked)


def test_start_model_pooling_and_objective_have_a_folder_each() -> None:
    asked = [
        (None, "mean", "tr"),
        (None, "mean", "tr+rtl"),
        (None, "cls", "tr"),
        ("user/model", "mean", "tr"),
        ("user/model", "cls", "tr"),
        ("other", "cls", "tr"),
    ]
    assert len({run.output_folder(*choice) for choice in asked}) == len(asked)


def test_the_tables_show_means_first_and_languages_on_request() -> None:
    numbers = {
        code: dict.fromkeys(run.ROWS, value) | {"error": 20.0}
        for code, value in (("de", 90.0), ("fi", 80.0))
    }
    better = {code: each | {"pool_xx-en": 99.0} for code, each in numbers.items()}
    states = (np.zeros((1, 2)), np.zeros((1, 2)))
    before, after = run.Measured(numbers, states), run.Measured(better, states)
    table = run.means_table(before, {"tr": after}, {"tr": 60.0})
    lines = [line.split() for line in table.splitlines()]
    assert ["multilingual", "pool", "xx→en", "85.0", "99.0"] in lines
    assert lines[-1][-2:] == ["20.0", "20.0"]
    table = run.means_table(before, {"tr": after, "tr+rtl": before}, {"tr": 60.0, "tr+rtl": 200.0})
    lines = [line.split() for line in table.splitlines()]
    assert lines[0][-3:] == ["before", "tr", "tr+rtl"]
    assert ["multilingual", "pool", "xx→en", "85.0", "99.0", "85.0"] in lines
    assert lines[-1][-3:] == ["-", "60", "200"]
    pairs = {"de": [("Ja", "Yes")], "fi": [("Kyllä", "Yes")]}
    finnish = run.languages_table(pairs, before, after).splitlines()[-1].split()
    assert finnish[:3] == ["fi", "Finnish", "1"]
    assert finnish[3:] == ["80.0"] * 5 + ["99.0", "80.0", "80.0", "20.0", "20.0"]


def test_the_training_command_parses_and_keeps_the_recipe(tmp_path: Path) -> None:
    arguments = run.training_arguments("some/model", "mean", "tr", tmp_path)
    model, data, training = parse_arguments(arguments)
    assert (model.model_name_or_path, model.pooling, model.objective) == (
        "some/model",
        "mean",
        "tr",
    )
    assert (data.train_data, data.max_seq_length) == ([str(run.HOME / "train")], 32)
    assert training.output_dir == str(tmp_path)
    assert training.use_cpu
    assert 0 < training.warmup_steps <= training.max_steps / 5


def test_the_size_of_the_text_says_which_languages_are_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"de": (3000, 200), "fr": (500, 40), "ka": (90, 0)}
    monkeypatch.setattr(run.fetch, "fetch", lambda *_: [])
    monkeypatch.setattr(run.bitext, "prepare", lambda *_: counts)
    run.prepare_text()
    training, test = capsys.readouterr().out.splitlines()
    assert training.strip() == "3,590 training pairs in 3 languages"
    assert test.strip() == "240 held-out pairs to test on, in the 2 languages that have at least 30"
