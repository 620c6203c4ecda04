"""What reports hold."""

from pathlib import Path

import pytest

from dap_transformers.errors import UserError
from dap_transformers.files import write_json
from dap_transformers.reports import read_report, report


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
