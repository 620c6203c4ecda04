"""Text that is damaged at random is read to the last line, or refused in one line; `benchmarks/fuzz.py` goes on."""

import logging
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written import zip_of

from benchmarks.fuzz import read_damaged, write_texts
from dap.errors import UserError
from dap.text import find_bitext, read_pairs


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


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        (b"PK\x01\x02", {8: b"\0\x08", 46: b"\xff"}),  # the name in the directory is no UTF-8
        (b"PK\x03\x04", {6: b"\0\x08", 30: b"\xff"}),  # the name before the data
        (b"PK\x05\x06", {16: b"\xff"}),  # the data is said to lie before the file's start
    ],
)
def test_an_archive_whose_names_or_places_make_no_sense_is_damaged(
    tmp_path: Path, part: bytes, changes: dict[int, bytes]
) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.tsv": b"ja\tyes\n"})
    data = bytearray(path.read_bytes())
    for place, change in changes.items():
        start = data.index(part) + place
        data[start : start + len(change)] = change
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.zip(/de-en\.tsv)?: damaged or truncated"):
        list(read_pairs(find_bitext(path)["de"][0]))


def test_a_column_whose_name_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "de-en.parquet"
    pq.write_table(pa.table({"source": ["a"], "target": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"source", b"so\xcfrce"))
    with pytest.raises(UserError, match=r"de-en\.parquet: damaged or no Parquet file of text"):
        list(read_pairs(find_bitext(path)["de"][0]))
