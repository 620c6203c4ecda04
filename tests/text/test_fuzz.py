"""Text that is damaged at random is read to the last line, or refused in one line; `benchmarks/fuzz.py` goes on."""

import logging
from collections import Counter
from pathlib import Path

from benchmarks.fuzz import read_damaged, write_texts


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
