"""Readers read damaged text to its last line, or refuse the file in one line.

`tests/slow/test_damaged_inputs.py` runs many more cases.
"""

import logging
from collections import Counter
from pathlib import Path

from damaged_files import read_damaged, write_texts


def test_every_line_of_damaged_text_is_counted_or_the_file_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "text")
    before = {path: path.read_bytes() for path in (tmp_path / "text").iterdir()}
    logging.disable(logging.WARNING)
    try:
        ends = Counter(read_damaged(tmp_path / "text", case) for case in range(600))
    finally:
        logging.disable(logging.NOTSET)
    assert {path: path.read_bytes() for path in (tmp_path / "text").iterdir()} == before
    assert ends.keys() == {"read", "refused"}
    assert min(ends.values()) > 100
