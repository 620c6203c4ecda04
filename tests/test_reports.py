"""Reports: what they hold, and what the seed of a training is."""

from pathlib import Path

import pytest

from dap_transformers.errors import UserError
from dap_transformers.files import write_json
from dap_transformers.reports import RECORD, read_record, read_report, report


def test_a_report_says_what_is_needed_to_get_the_number_again(tmp_path: Path) -> None:
    made = report("out", "retrieval", {}, {"pooling": "cls"}, 2.342, "abc", 0)
    told = {"model": "out", "revision": "abc", "protocol": "retrieval", "seed": 0, "seconds": 2.34}
    assert made.items() >= (told | {"settings": {"pooling": "cls"}}).items()
    assert {"python", "torch", "transformers"} <= set(made["versions"])
    assert made["machine"]["cpu"]
    write_json(made, tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == made
    (tmp_path / "a.json").write_text('{"model": "out"}')
    with pytest.raises(UserError, match=r"a\.json"):
        read_report(tmp_path / "a.json")


def test_the_record_of_a_training_is_in_its_folder_or_above_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    assert read_record(checkpoint) == read_record(Path("user/model")) == {}
    write_json({"seed": 3}, tmp_path / RECORD)
    assert read_record(checkpoint) == read_record(tmp_path) == {"seed": 3}
    (tmp_path / "encoder").mkdir()
    assert read_record(tmp_path / "encoder") == {}
