"""Blocks of a file hold the rows of the whole file, wherever it is cut, and errors name lines of the file."""

import random
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dap.text import archives, blocks
from dap.text.blocks import Block, cut, is_cut
from dap.text.formats import BitextFile, LineAudit
from dap.text.tables import audited_tables

PIECES = [
    b"a", b"b c", b"\t", b"\t", b"\t", b"\n", b"\n", b"\r\n", b"\r", b'"', b'"\n', b"\xff", b"\xef\xbb\xbf", b"\0",
    "日本".encode(), b"\xe2\x80\xa8", b"{", b'{"source": "x\\n", "target": "y"}\n', b'{"source": "x"}\n', b"null\n",
]  # fmt: skip


class Record(LineAudit):
    """Keeps every bad line."""

    def __init__(self) -> None:
        super().__init__("", 1.0)
        self.every: list[tuple[int, str]] = []

    def reject(self, line: int, reason: object) -> None:
        self.every.append((line, str(reason)))
        super().reject(line, reason)


def rows_of(file: BitextFile, parts: list[Block | None], audit: LineAudit) -> list[tuple[int, str, str]]:
    tables = [table for part in parts for table in audited_tables(file, audit, 7, part)]
    return [(row["line"], row["source"], row["target"]) for table in tables for row in table.to_pylist()]


def wild_file(folder: Path, form: str, seed: int) -> BitextFile:
    draw = random.Random(seed)
    if form == "parquet":
        texts = [["a", "b", None, " ", "日\n本"][draw.randrange(5)] for _ in range(80)]
        table = pa.table({"source": texts, "target": texts[::-1]})
        pq.write_table(table, folder / "de-en.parquet", row_group_size=draw.choice([1, 13, 1000]))
        return BitextFile("de", (str(folder / "de-en.parquet"),), form)
    data = [b"\xef\xbb\xbf" * (seed % 2) + b"".join(draw.choices(PIECES, k=250)) for _ in range(2)]
    names = ("a.de", "a.en") if form == "moses" else (f"de-en.{form}",)
    if form == "moses":
        lines = [side.split(b"\n")[:40] + [b"x"] for side in data]
        data = [b"\n".join(side) + b"\n" * (seed % 3 > 0) for side in lines]
    for name, side in zip(names, data):
        (folder / name).write_bytes(side)
    return BitextFile("de", tuple(str(folder / name) for name in names), form)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", ["tsv", "jsonl", "moses", "parquet"])
def test_blocks_hold_the_rows_of_the_file(
    form: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "BLOCK_BYTES", [1, 50, 10_000][seed % 3])
    monkeypatch.setattr(blocks, "CHUNK", [1, 3, 64, 10_000][seed % 4])
    file = wild_file(tmp_path, form, seed)
    audit = Record()
    whole = rows_of(file, [None], audit)
    assert len(whole) > 1
    assert len(audit.every) > 1
    for size in (1, 60, 10**6):
        parts = cut(file, size)
        assert [part.number for part in parts] == list(range(len(parts)))
        assert {part.rows for part in parts} == {audit.lines}
        assert all(before.spans[0][1] == after.spans[0][0] for before, after in pairwise(parts))
        again = Record()
        assert rows_of(file, parts, again) == whole
        assert (again.every, again.lines) == (audit.every, audit.lines)
        assert len(parts) > 5 or size > 60 or form == "parquet"
    assert len(parts) == 1


@pytest.mark.parametrize("place", [99_990, 100_000])
def test_a_line_of_ten_megabytes_over_a_border(place: int, tmp_path: Path) -> None:
    path = tmp_path / "de-en.tsv"
    before = b"a\tb\n" * (place // 4)
    path.write_bytes(b"\xef\xbb\xbf" + before + b"x" * 10_000_000 + b"\ty\r\n" + before[:40] + b"last\tone")
    file = BitextFile("de", (str(path),), "tsv")
    parts = cut(file, 100_000)
    audit = LineAudit("", 0.0)
    tables = [table for part in parts for table in audited_tables(file, audit, block=part)]
    long = [row for table in tables for row in table.to_pylist() if len(row["source"]) > 4]
    assert [(row["line"], len(row["source"]), row["target"]) for row in long] == [(place // 4 + 1, 10_000_000, "y")]
    assert tables[-1]["line"][-1].as_py() == parts[0].rows == place // 4 + 12
    assert sum(map(len, tables)) == parts[0].rows


def test_errors_name_lines_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"a\tb\n" * 500 + b"alone\n" + b"a\tb\n" * 500 + b"x" * 9000)
    file = BitextFile("de", (str(path),), "tsv")
    parts = cut(file, 400)
    with pytest.raises(ValueError, match="1 of the 1002 lines are bad.*\n  line 501: one column"):
        rows_of(file, parts, LineAudit("f", 0.0, lines=parts[0].rows))
    monkeypatch.setattr(archives, "MAX_LINE", 5000)
    monkeypatch.setattr(archives, "BLOCK_BYTES", 100)
    with pytest.raises(ValueError, match="de-en.tsv, line 1002: longer than 5,000 bytes"):
        list(audited_tables(file, LineAudit("f", 1.0), block=parts[-1]))


def test_bad_lines_elsewhere_count(tmp_path: Path) -> None:
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"alone\n" * 3 + b"a\tb\n" * 2997)
    file = BitextFile("de", (str(path),), "tsv")
    assert sum(map(len, audited_tables(file, LineAudit("f", 0.001, lines=3000)))) == 2997 - 0
    with pytest.raises(ValueError, match="f: 4 of the 3000 lines are bad"):
        list(audited_tables(file, LineAudit("f", 0.001, lines=3000, elsewhere=3)))


def test_only_large_plain_files_are_cut(tmp_path: Path) -> None:
    for name in ("de-en.tsv", "de-en.tsv.gz", "m.tmx", "a.zip", "a.de"):
        (tmp_path / name).write_bytes(b"x" * 100)
    kinds = {"de-en.tsv": "tsv", "de-en.tsv.gz": "tsv", "m.tmx": "tmx", "a.zip/de-en.tsv": "tsv"}
    given = {name: BitextFile("de", (str(tmp_path / name),), kind) for name, kind in kinds.items()}
    assert [name for name, file in given.items() if is_cut(file, 99)] == ["de-en.tsv"]
    assert not is_cut(given["de-en.tsv"], 100)
    assert not is_cut(BitextFile("de", (str(tmp_path / "a.de"), "a.en.gz"), "moses"), 10)
    assert not is_cut(BitextFile("de", ("user/name",), "hub"), 10)


@pytest.mark.parametrize(("source", "target"), [(5, 9), (9, 5), (3, 0)])
def test_sides_of_different_length_are_found_before_the_work(source: int, target: int, tmp_path: Path) -> None:
    paths = tuple(str(tmp_path / name) for name in ("a.de", "a.en"))
    for path, lines in zip(paths, (source, target)):
        Path(path).write_bytes(b"eins\n" * lines)
    with pytest.raises(ValueError, match=f"differ in length: .*a.de has {source} lines, .*a.en has {target};"):
        cut(BitextFile("de", paths, "moses"), 10)


def test_damaged_and_utf_16_files_are_named_when_they_are_cut(tmp_path: Path) -> None:
    (tmp_path / "de-en.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="de-en.parquet: damaged or no Parquet file"):
        cut(BitextFile("de", (str(tmp_path / "de-en.parquet"),), "parquet"), 3)
    (tmp_path / "de-en.tsv").write_bytes("\ufeffa\tb\n".encode("utf-16-le"))
    with pytest.raises(ValueError, match="de-en.tsv is UTF-16"):
        cut(BitextFile("de", (str(tmp_path / "de-en.tsv"),), "tsv"), 3)
