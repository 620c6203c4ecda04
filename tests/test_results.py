"""Reports: what they hold, that they are written whole, and the tables."""

import json
from pathlib import Path

import pytest

from dap.results import PAPER_TATOEBA, paper_table, report, text_table, write_json


def test_report_says_what_is_needed_to_get_the_number_again() -> None:
    made = report("user/model", "Tatoeba", {"score": 1.5}, {"pooling": "cls"}, 2.345, revision="abc", seed=7)
    assert {
        "model": "user/model",
        "revision": "abc",
        "protocol": "Tatoeba",
        "seed": 7,
        "score": 1.5,
    }.items() <= made.items()
    assert made["settings"] == {"pooling": "cls"}
    assert made["seconds"] == 2.35 or made["seconds"] == 2.34
    assert {"python", "torch", "transformers"} <= set(made["versions"])
    assert made["machine"]["cpu"]
    assert made["machine"]["threads"] >= 1
    assert json.loads(json.dumps(made)) == made


def test_json_is_written_with_its_folders_and_no_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json({"language": "Ελληνικά"}, path)
    write_json({"language": "中文"}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == {"language": "中文"}
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


@pytest.mark.parametrize("content", [{"score": float("nan")}, {"score": object()}])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, content: dict) -> None:
    path = tmp_path / "b.json"
    write_json({"score": 1}, path)
    with pytest.raises((ValueError, TypeError)):
        write_json(content, path)
    assert json.loads(path.read_text()) == {"score": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["b.json"]


def test_a_target_that_is_a_folder_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "b.json").mkdir()
    with pytest.raises(OSError, match=r"b\.json"):
        write_json({}, tmp_path / "b.json")
    assert [p.name for p in tmp_path.iterdir()] == ["b.json"]


def test_table_columns_line_up() -> None:
    lines = text_table(["name", "x"], [["a", 1.0], ["longer", 100.0], ["b", None]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2:] == ["a         1.0", "longer  100.0", "b           -"]


def test_paper_table_has_our_row_and_every_model_of_the_paper() -> None:
    lines = paper_table({"36 languages": (85.3, 84.1)}, "mine").splitlines()
    assert lines[2].split() == ["mine", "-", "-", "85.3", "-", "-", "84.1"]
    assert len(lines) == 3 + len(PAPER_TATOEBA)
    assert lines[-1].split() == ["paper:", "XLM-R+DAP", "95.0", "94.7", "91.3", "95.1", "95.2", "92.7"]
