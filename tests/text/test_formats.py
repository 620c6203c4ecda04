"""Every format reads back what was written, as a plain loop would, and bad lines are counted."""

import json
import random
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written import NAMES, PAIRS, lines_of, many, read, text_of, write, write_format

from dap_transformers.errors import UserError
from dap_transformers.text import formats
from dap_transformers.text.formats import TABLE, BitextFile, LineAudit, read_tables
from dap_transformers.text_keys import is_blank

both_sides = itemgetter("source", "target")
Numbered = dict[int, tuple[str, str]]


def numbered(file: BitextFile) -> Numbered:
    """Read the good lines of a file. Returns: line -> pair."""
    tables = list(read_tables(file, LineAudit(file, 1.0)))
    assert all(table.schema.equals(TABLE) and 0 < len(table) <= formats.BATCH for table in tables)
    rows = pa.concat_tables(tables).to_pylist()
    return {row["line"]: both_sides(row) for row in rows}


@pytest.mark.parametrize("batch", [1, 10_000])
@pytest.mark.parametrize("name", NAMES)
def test_every_format_reads_back_what_was_written(
    tmp_path: Path, name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "BATCH", batch)
    file = write_format(tmp_path, name, PAIRS)
    assert file.language == "de"
    assert read(file) == PAIRS
    assert numbered(file) == dict(enumerate(PAIRS, 1))


# Against a plain loop over the lines

PIECES = [
    b"a", b"b", b" ", b"\t", b"\t", b"\t", b"\n", b"\n", b"\r", b"\r\n", b"\0", b'"', b"\xff",
    b"\xe2\x80\xa8", b"\xc2\x85", b"\x1f", "é".encode(), "日".encode(), b"\xe6\x97",
    b"\xef\xbb\xbf",
]  # fmt: skip


def read_naively(data: bytes, parse: Callable) -> Numbered:
    """Read the good lines of a text with a plain loop. Returns: line -> pair."""
    pairs = {}
    lines = data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\r")
        if b"\r" in line:
            continue
        try:
            source, target = parse(line.decode())
            f"{source}{target}".encode()
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        is_text = isinstance(source, str) and isinstance(target, str)
        if is_text and not is_blank(source) and not is_blank(target):
            pairs[number] = source, target
    return pairs


def require_naive(path: Path, data: bytes, parse: Callable, least: int) -> None:
    """Compare the pairs with those of the plain loop, which finds more than `least`."""
    file = BitextFile("de", (str(write(path, data)),), path.suffix[1:])
    expected = read_naively(data, parse)
    assert len(expected) > least
    assert numbered(file) == expected


@pytest.mark.parametrize("batch", [7, 10_000])
@pytest.mark.parametrize("start", [b"a\tb\n" * 99, b"\xef\xbb\xbf" + b"a\tb\r\n" * 99])
def test_random_tsv_is_read_as_by_a_plain_loop(
    tmp_path: Path, start: bytes, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "BATCH", batch)
    data = start + b"".join(random.Random(batch).choices(PIECES, k=4000)) + b"\nx\ty"
    require_naive(tmp_path / "de-en.tsv", data, lambda line: line.split("\t"), 105)


JSON_LINES = [
    b' {"target": "b", "source": "a"} ', b"[1]", b"null", b"{}null{}", b"[" * 10**5,
    b'{"source": "a", "target": "b", "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"source": "a\\u0000\\n\\u2028", "target": "\\ud83d\\ude00"}',
    b'{"source": "a", "target": "b"}{"source": "c", "target": "d"}',
    b'{"source": "a", "source": "c", "target": "b"}', b'{"source": 1, "target": "b"}',
    b'{"source": "a", "target": "b", "score": NaN}', b'{"source": "a", "target": "b\tc"}',
    b'\xef\xbb\xbf{"source": "a", "target": 2}',
]  # fmt: skip


def test_odd_json_is_read_as_by_a_plain_loop(tmp_path: Path) -> None:
    good = b'{"source": "x", "target": "y"}\n'
    text = good + b"".join(odd + b"\n" + good for odd in JSON_LINES)
    path = tmp_path / "de-en.jsonl"
    require_naive(path, text, lambda line: both_sides(json.loads(line)), len(JSON_LINES))


@pytest.mark.parametrize(
    ("source", "read_back"),
    [
        (pa.array(["a", None, " ", ""]), {1: "a"}),
        (pa.array(["a", "b", "a", None], pa.string_view()), {1: "a", 2: "b", 3: "a"}),
        (pa.array([b"a", b"\xff", None, b"d"]), {1: "a", 4: "d"}),
        (pa.array([b"a", b"\xff", b"c", b"d"]).view(pa.string()), {1: "a", 3: "c", 4: "d"}),
    ],
)
def test_all_types_of_text_in_parquet_columns_are_read(
    tmp_path: Path, source: pa.Array, read_back: dict
) -> None:
    path = tmp_path / "de-en.parquet"
    pq.write_table(pa.table({"source": source, "target": ["w", "x", "y", "z"]}), path)
    file = BitextFile("de", (str(path),), "parquet")
    assert {line: source for line, (source, _) in numbered(file).items()} == read_back


def test_fields_of_the_two_languages_are_read_as_in_hub_datasets(tmp_path: Path) -> None:
    flat = [{"id": 7, "en": target, "de": source, "en_US": "x"} for source, target in PAIRS]
    nested = [{"translation": {"en_GB": target, "de": source}} for source, target in PAIRS]
    for layout in (flat, nested):
        lines = write(tmp_path / "de-en.jsonl", lines_of(map(json.dumps, layout)))
        assert read(lines) == PAIRS
        table = tmp_path / "de-en.parquet"
        pq.write_table(pa.Table.from_pylist([*layout, {"id": 8}]), table)
        assert read(table, 0.5) == PAIRS  # a row without texts is one bad line
    fields = b'{"de": "a", "fr": "b"}\n[1]\n{"translation": null}\n"source, target"\n'
    with pytest.raises(UserError, match=r"4 of the first 4 .*expected fields .*'de', 'en'"):
        read(write(lines, fields))


@pytest.mark.parametrize(
    ("name", "blank"),
    [
        ("de-en.tsv", "\n\n \t\n"),
        ("de-en.csv", "\n\n,\n"),
        ("de-en.jsonl", '\n\n{"source": "", "target": null}\n'),
        ("a.XX", "\n \n\n"),
    ],
)
def test_two_empty_sides_are_no_damage(tmp_path: Path, name: str, blank: str) -> None:
    file = write_format(tmp_path, name, many(9))
    for path in map(Path, file.paths):
        path.write_text(path.read_text().replace("\n", blank))
    assert read(file, 0.0) == many(9)


# Bad lines

BAD = [
    ("de-en.tsv", b"no tab here", "1 column, expected 2"),
    ("de-en.tsv", b"a\tb\rc", "carriage return"),
    ("de-en.csv", b"a,b\xffc", "not UTF-8"),
    ("de-en.jsonl", b'{"source": "a",\r"target": "b"}', "carriage return"),
    ("de-en.tsv", b"\tempty", "empty source side"),
    ("de-en.tsv", b"empty\t \xe2\x80\xa8", "empty target side"),
    ("de-en.tsv", b"ab\xffc\td", "not UTF-8"),
    ("de-en.jsonl", b'{"source": "a"', "Expecting"),
    ("de-en.jsonl", b'{"source": "a"}', "expected fields"),
    ("de-en.jsonl", b'{"source": "a", "target": 1}', "target side is 1"),
    ("de-en.jsonl", b'{"source": "a", "target": null}', "empty target side"),
    ("de-en.jsonl", b'{"source": "\\ud800", "target": "b"}', "'utf-8' codec"),
    ("de-en.jsonl", b'{"source": "\xff", "target": "b"}', "not UTF-8"),
    ("a.XX", b"caf\xe9", "not UTF-8"),
    ("a.XX", b"a\rb", "carriage return"),
    ("a.XX", b" ", "empty target side"),
]


@pytest.mark.parametrize(("name", "line", "reason"), BAD)
def test_a_bad_line_is_skipped_and_logged_or_refused(
    tmp_path: Path, name: str, line: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_format(tmp_path, name, many(199))
    inserted = [line] if len(file.paths) == 1 else [b"x", line]  # of two sides, the second is bad
    for path, own in zip(map(Path, file.paths), inserted):
        *first, rest = path.read_bytes().split(b"\n", 6)
        path.write_bytes(b"\n".join([*first, own, rest]))
    assert read(file, 0.01) == many(199)
    assert f"{file}, line 7 skipped: {reason}" in caplog.text
    assert "1 of 200 lines skipped" in caplog.text
    with pytest.raises(UserError, match=f"line 7: {reason}") as error:
        read(file)
    assert f"{file}: " in str(error.value)


def test_the_first_bad_lines_are_quoted_and_all_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_format(tmp_path, "de-en.parquet", [*many(393), *[(" ", "sentence")] * 7])
    assert len(read(file, 0.1)) == 393
    *skipped, last = [each.getMessage() for each in caplog.records]
    assert len(skipped) == 5
    assert all(f"line {number} skipped" in text for number, text in enumerate(skipped, 394))
    assert "7 of 400 lines skipped" in last
    with pytest.raises(UserError, match=r"7 of the first 400 .*line 398: [^;]*;[^;]*$"):
        read(file)


@pytest.mark.parametrize(
    ("lines", "limit", "message"),
    [
        ([("alone",), *many(998)], 0.001, "1 of the first 999 lines"),
        ([*many(50), ("alone",), *many(50)], 0.0, "1 of the first 51 lines"),
        ([("one column",)] * 5000, 0.001, "101 of the first 101 lines .*line 5: 1 column"),
    ],
)
def test_a_file_with_too_many_bad_lines_is_refused_as_soon_as_that_is_sure(
    tmp_path: Path, lines: list, limit: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "de-en.tsv", text_of(lines)), limit)
    path = write(tmp_path / "de-en.tsv", text_of([("alone",), *many(999)]))
    assert read(path) == many(999)  # 1 of 1,000 is 0.1%
