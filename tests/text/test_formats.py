"""Tables equal pairs in every format, archives that lie are refused, and hard input is read or named by its line."""

import gzip
import io
import json
import logging
import lzma
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dap.text import archives
from dap.text.archives import count_lines, list_archive, open_file, read_lines, read_sentences
from dap.text.corpus import find_bitext, load_bitext
from dap.text.formats import BitextFile, read_pairs
from dap.text.formats import TABLE, read_tables

PAIRS = [
    ('"Nein", sagte er. "', 'He said "no'),
    ("eins\u2028zwei\x85drei\x0cvier\x0bfünf\x1c", "one\u2028two\x85three\x0cfour\x0bfive\x1d"),
    ("\u200fשָׁלוֹם\u200e e\u0301", "مرحبا\u0301 \u202bbidi\u202c"),
    ("nul\0byte", "a\0b"),
    ("日本語 \U0001f600", " \u00a0padded\u3000"),
    ("null", "NA"),
]
TMX = b"<tmx><body><tu><tuv lang='en'><seg>5</seg></tuv><tuv lang='ru'><seg>V</seg></tuv></tu></body></tmx>"
PACK = {".gz": gzip.compress, ".xz": lzma.compress}


def text_of(pairs: list[tuple[str, str]]) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in pairs).encode()


def json_of(pairs: list[tuple[str, str]]) -> bytes:
    records = [{"origin": [1, {"a": None}], "target": target, "source": source} for source, target in pairs]
    return "".join(
        json.dumps(record, ensure_ascii=number % 2 == 0) + "\n" for number, record in enumerate(records)
    ).encode()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(PACK.get(path.suffix, bytes)(data))
    return path


def zip_of(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def sides_of(pairs: list[tuple[str, str]]) -> list[bytes]:
    return ["".join(f"{side}\n" for side in sides).encode() for sides in zip(*pairs)]


def write_format(folder: Path, name: str, pairs: list[tuple[str, str]]) -> list[BitextFile]:
    """The pairs in the format that the name tells."""
    if "zip" in name:
        inside = dict(zip(("OPUS.de-en.de", "OPUS.de-en.en"), sides_of(pairs)))
        zip_of(folder / name, {"README": b"x", "LICENSE": b"y", "OPUS.de-en.ids": b"z", **inside})
    elif "moses" in name:
        for ending, data in zip(("de", "en"), sides_of(pairs)):
            write(folder / name.replace("XX", ending), data)
    elif "parquet" in name:
        columns = {"target": [target for _, target in pairs], "source": [source for source, _ in pairs]}
        pq.write_table(pa.table(columns), folder / name)
    else:
        write(folder / name, json_of(pairs) if "json" in name else text_of(pairs))
    return find_bitext(folder)["de"]


FORMATS = [
    "de-en.tsv", "de-en.tsv.gz", "de-en.tsv.xz", "de-en.jsonl", "de-en.jsonl.gz", "de-en.parquet", "moses.XX",
    "moses.XX.gz", "moses.XX.xz", "de-en.txt.zip",
]  # fmt: skip


def tables_of(file: BitextFile, **options: float) -> list[tuple[int, str, str]]:
    tables = list(read_tables(file, **options))
    assert all(table.schema.equals(TABLE) for table in tables)
    assert all(0 < len(table) <= options.get("rows", 100_000) for table in tables)
    return [(row["line"], row["source"], row["target"]) for table in tables for row in table.to_pylist()]


def pairs_of(file: BitextFile, **options: float) -> list[tuple[str, str]]:
    return [(pair["source"], pair["target"]) for pair in read_pairs(file, **options)]


def outcome(read: Callable[..., object], *arguments: object, **options: object) -> object:
    try:
        return read(*arguments, **options)
    except ValueError as error:
        return str(error)


# Every format


@pytest.mark.parametrize("rows", [1, 4, 100_000])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_back_what_was_written(tmp_path: Path, name: str, rows: int) -> None:
    (file,) = write_format(tmp_path, name, PAIRS)
    assert pairs_of(file) == PAIRS
    numbered = [(line, source, target) for line, (source, target) in enumerate(PAIRS, 1)]
    assert tables_of(file, rows=rows) == numbered


PIECES = [
    b"a", b"b", b" ", b"\t", b"\t", b"\t", b"\n", b"\n", b"\r", b"\r\n", b"\0", b'"', b"\xff",
    b"\xe2\x80\xa8", b"\xc2\x85", b"\x1f", "é".encode(), "日".encode(), b"\xe6\x97", b"\xef\xbb\xbf",
]  # fmt: skip


def naive_tsv(data: bytes) -> dict[int, tuple[str, str]]:
    """Line -> pair, as plainly as it can be said."""
    lines = (data.removeprefix(b"\xef\xbb\xbf") + b"\n" * (not data.endswith(b"\n"))).split(b"\n")[:-1]
    pairs = {}
    for number, line in enumerate(lines, 1):
        try:
            cells = line.removesuffix(b"\r").decode().split("\t")
        except UnicodeDecodeError:
            continue
        if len(cells) > 1 and cells[0].strip() and cells[1].strip():
            pairs[number] = cells[0], cells[1]
    return pairs


@pytest.mark.parametrize("seed", range(8))
def test_tables_equal_pairs_and_a_plain_loop_on_wild_text(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "BLOCK_BYTES", [1, 7, 50, 1 << 20][seed % 4])
    draw = random.Random(seed)
    data = b"".join(draw.choices(PIECES, k=3000)) + b"\nx\ty"
    file = BitextFile("de", (str(write(tmp_path / "de-en.tsv", data)),), "tsv")
    expected = naive_tsv(data)
    assert len(expected) > 15
    assert tables_of(file, max_bad_lines=1.0) == [(line, *pair) for line, pair in expected.items()]
    assert pairs_of(file, max_bad_lines=1.0) == list(expected.values())


@pytest.mark.parametrize("seed", range(4))
def test_tables_equal_pairs_on_wild_sides(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "BLOCK_BYTES", [1, 9, 100, 1 << 20][seed])
    draw = random.Random(seed)
    pieces = [piece for piece in PIECES if b"\n" not in piece]
    sides = [[b"".join(draw.choices(pieces, k=draw.randint(0, 6))) for _ in range(300)] for _ in range(2)]
    paths = tuple(str(tmp_path / name) for name in ("a.de", "a.en"))
    for path, side in zip(paths, sides):
        Path(path).write_bytes(b"\n".join(side) + b"\n")
    file = BitextFile("de", paths, "moses")
    read = tables_of(file, max_bad_lines=1.0)
    assert [pair for _, *pair in read] == [list(pair) for pair in pairs_of(file, max_bad_lines=1.0)]
    for line, source, target in read:
        assert [source.encode(), target.encode()] == [side[line - 1].removesuffix(b"\r") for side in sides]


JSON_LINES = [
    b'{"source": "a", "target": "b"}', b' {"target": "b", "source": "a"} ', b'{"source": "a"}', b"", b"{}", b"[1]",
    b"null", b'{}null{}', b'{"source": "a", "target": "b", "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"source": "a\\u0000\\n\\u2028", "target": "\\ud83d\\ude00"}', b'{"source": "\\ud800", "target": "b"}',
    b'{"source": "a", "target": "b"}{"source": "c", "target": "d"}', b'{"source": "a",', b'"target": "b"}',
    b'{"source": "a", "source": "c", "target": "b"}', b'{"source": 1, "target": "b"}',
    b'{"source": null, "target": "b"}',
    b'{"source": "a", "target": "b", "score": NaN}', b'{"source": "a", "target": "b", "score": 1e999}',
    b'{"source": "a", "target": "\xff"}', b'{"source": "a", "target": "b\tc"}', b'{"source": "a", "target": "b\0c"}',
    b"{'source': 'a', 'target': 'b'}", b'{"source": "a", "target": " "}', b'{"source": "a", "target": "b",}',
    b'{"source": "a", "target": "b", "x": {"source": 3}}', b'{"source": "a", "target": "b", "x": 01}',
    b'{"source": "2020-01-01", "target": "12:30"}', b'\xef\xbb\xbf{"source": "a", "target": "b"}',
    b'{"source": "a\\/b", "target": "\\u00e9"}', b'{"source": ["a"], "target": "b"}', b'{"source": "a" "target": "b"}',
]  # fmt: skip


@pytest.mark.parametrize("line", JSON_LINES)
def test_json_tables_equal_pairs_on_wild_lines(tmp_path: Path, line: bytes) -> None:
    """Arrow's reader and Python's do not agree on everything that is nearly JSON."""
    good = b'{"source": "x", "target": "y"}'
    for lines in ([good, line, good], [line, good], [good, line, b"", line]):
        file = BitextFile("de", (str(write(tmp_path / "de-en.jsonl", b"\n".join(lines) + b"\n")),), "jsonl")
        assert [pair for _, *pair in tables_of(file, max_bad_lines=1.0)] == [
            list(pair) for pair in pairs_of(file, max_bad_lines=1.0)
        ]


def test_parquet_tables_equal_pairs(tmp_path: Path) -> None:
    invalid = pa.array([b"a", b"\xff", b"c", b"d"]).view(pa.string())
    columns = [
        pa.array(["a", None, " ", ""]),
        pa.array(["a", "b", "a", "b"], pa.large_string()).dictionary_encode(),
        pa.array([1, 2, 3, 4]),
        pa.array([b"a", b"\xff", None, b"d"]),
        invalid,
        pa.nulls(4),
    ]
    target = pa.array(["w", "x", "y", "z"])
    read = []
    for source in columns:
        pq.write_table(pa.table({"source": source, "target": target}), tmp_path / "de-en.parquet")
        file = BitextFile("de", (str(tmp_path / "de-en.parquet"),), "parquet")
        tables = outcome(tables_of, file, max_bad_lines=1.0)
        pairs = outcome(pairs_of, file, max_bad_lines=1.0)
        assert tables == pairs if isinstance(pairs, str) else [(s, t) for _, s, t in tables] == pairs
        read.append(pairs if isinstance(pairs, str) else "".join(source for source, _ in pairs))
    assert read[0] == "a"
    assert read[1] == "abab"
    assert read[3] == "ad"
    assert read[4] == "acd"
    assert "holds no pair" in read[2]
    assert "holds no pair" in read[5]


@pytest.mark.parametrize("name", FORMATS)
def test_both_ways_of_reading_log_and_raise_the_same(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [(f"Satz {number}" if number % 50 else " ", f"sentence {number}") for number in range(1, 400)]
    (file,) = write_format(tmp_path, name, pairs)
    texts = []
    for read in (pairs_of, tables_of):
        caplog.clear()
        assert len(read(file, max_bad_lines=0.1)) == 399 - 7
        texts.append([record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING])
    assert texts[0] == texts[1]
    assert f"{file}, line 50 skipped: empty source side" in texts[0]
    errors = [outcome(read, file) for read in (pairs_of, tables_of)]
    assert errors[0] == errors[1]
    assert "7 of the first 399 lines are bad" in errors[0]
    assert "line 250: empty source side\n  …" in errors[0]


# Archives


def test_an_archive_is_a_folder(tmp_path: Path) -> None:
    inside = {
        "deep/er/tatoeba.deu-eng.deu": b"eins\n", "deep/er/tatoeba.deu-eng.eng": b"one\n", "fr-en.tsv": b"deux\ttwo\n",
        "packed.sw.gz": gzip.compress(b"tatu\n"), "packed.en": b"three\n", "README.txt": b"none", "more.zip": b"none",
        "zh-en.jsonl.xz": lzma.compress(json_of([("四", "four")])), "ur-en.parquet": b"unread", "deep/": b"",
        "m.tmx": TMX,
        "locale/tr/LC_MESSAGES/a.po": b'msgid "six"\nmsgstr "alti"\n',
    }  # fmt: skip
    path = zip_of(tmp_path / "all.zip", inside)
    for given in (path, tmp_path):
        found = find_bitext(given)
        read = {language: [pairs_of(file) for file in files] for language, files in found.items()}
        assert read == {
            "de": [[("eins", "one")]],
            "fr": [[("deux", "two")]],
            "ru": [[("V", "5")]],
            "sw": [[("tatu", "three")]],
            "tr": [[("alti", "six")]],
            "zh": [[("四", "four")]],
        }
    assert found["de"][0].paths[0] == f"{path}/deep/er/tatoeba.deu-eng.deu"
    loaded = load_bitext(tmp_path, cache_dir=tmp_path / "cache")["de"]
    assert loaded[0] == {"source": "eins", "target": "one"}
    streamed = load_bitext(tmp_path, streaming=True)["de"]
    assert list(streamed) == [{"source": "eins", "target": "one", "row": "0"}]
    assert list(read_sentences(path / "packed.sw.gz")) == ["tatu"]
    with pytest.raises(FileNotFoundError, match=r"all\.zip: holds no member 'none\.de'"):
        list(read_lines(path / "none.de"))


def test_a_changed_archive_is_read_again(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.tsv": b"a\tb\n"})
    assert load_bitext(path, cache_dir=tmp_path / "cache")["de"]["source"] == ["a"]
    zip_of(path, {"de-en.tsv": b"longer\tb\n"})
    assert load_bitext(path, cache_dir=tmp_path / "cache")["de"]["source"] == ["longer"]


def test_a_folder_named_as_an_archive(tmp_path: Path) -> None:
    (tmp_path / "folder.zip").mkdir()
    write(tmp_path / "folder.zip/de-en.tsv", text_of(PAIRS))
    (file,) = find_bitext(tmp_path / "folder.zip")["de"]
    assert pairs_of(file) == PAIRS


@pytest.mark.parametrize("name", ["../x.de", "a/../../x.de", "/etc/x.de", "C:/x.de", "..\\x.de"])
def test_a_member_outside_its_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = zip_of(tmp_path / "a.zip", {"x.de": b"a\n", "x.en": b"b\n"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"evil\n")
    with pytest.raises(ValueError, match=r"a\.zip: its member .* has a path outside the archive's folder") as error:
        find_bitext(path)
    assert repr(name) in str(error.value)
    with pytest.raises(ValueError, match="outside"):
        list(read_lines(path / "x.de"))


def test_links_and_encrypted_members_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("x.de")
    link.external_attr = 0o120777 << 16
    path = zip_of(tmp_path / "a.zip", {"x.en": b"b\n"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, b"/etc/passwd")
    with pytest.raises(ValueError, match=r"a\.zip: its member 'x\.de' is a link"):
        find_bitext(path)
    data = bytearray(zip_of(tmp_path / "b.zip", {"x.de": b"b\n"}).read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag in the archive's directory
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(ValueError, match=r"'x\.de' is encrypted"):
        find_bitext(tmp_path / "b.zip")


def test_a_zip_bomb_stops_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zip_of(tmp_path / "bomb.zip", {"a.de": bytes(70 << 20), "a.en": b"b\n"})
    size = path.stat().st_size
    monkeypatch.delattr(zipfile.ZipFile, "open")  # nothing is unpacked
    with pytest.raises(
        ValueError, match=rf"from {size:,} to 73,400,322 bytes, more than the 67,108,864 that"
    ) as error:
        find_bitext(path)
    monkeypatch.undo()
    assert "200 times its size" in str(error.value)
    repetitive = zip_of(tmp_path / "small.zip", {"a.de": b"ja\n" * 500_000, "a.en": b"yes\n" * 500_000})
    assert len(list_archive(repetitive)) == 2


def test_members_that_share_their_bytes_count_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb without a high ratio in any member: many names for the same packed bytes."""
    monkeypatch.setattr(archives, "FREE_BYTES", 1000)
    monkeypatch.setattr(archives, "MAX_RATIO", 3)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.de", b"x" * 20_000)
        for number in range(10):
            other = zipfile.ZipInfo(f"{number}.de")
            info = archive.getinfo("a.de")
            other.file_size, other.compress_size, other.CRC = info.file_size, info.compress_size, info.CRC
            other.header_offset = info.header_offset
            archive.filelist.append(other)
    with pytest.raises(ValueError, match="to 220,000 bytes"):
        list_archive(path)


def test_a_member_that_unpacks_to_more_than_it_declares(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"a.de": b"line\n" * 1_000_000})
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = struct.pack("<I", 500)  # the size that the directory declares
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.zip/a\.de: damaged or truncated compressed file \(Bad CRC-32"):
        count_lines(path / "a.de")


@pytest.mark.parametrize("keep", [0, 10, -10, -60])
def test_a_truncated_archive(tmp_path: Path, keep: int) -> None:
    path = zip_of(tmp_path / "a.zip", {"a.de": b"eins\n" * 100, "a.en": b"one\n" * 100})
    path.write_bytes(path.read_bytes()[:keep])
    for given in (path, tmp_path):
        with pytest.raises(ValueError, match=r"a\.zip: damaged or truncated zip archive .*; fetch it again"):
            find_bitext(given)


def test_a_damaged_member(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.tsv": text_of([(f"{n}", f"{n * n}") for n in range(5000)])})
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)
    (file,) = find_bitext(path)["de"]
    for read in (pairs_of, tables_of):
        with pytest.raises(ValueError, match=r"a\.zip/de-en\.tsv: damaged or truncated compressed file"):
            read(file, max_bad_lines=1.0)


# Hard input


def test_line_ends(tmp_path: Path) -> None:
    odd = b"\x0b\x0c\x1c\xc2\x85\xe2\x80\xa8\r"
    path = write(tmp_path / "x", b"\xef\xbb\xbfone\r\ntwo\rstill two\n\n" + odd + b"\r\n\xef\xbb\xbflast")
    lines = [b"one", b"two\rstill two", b"", odd, b"\xef\xbb\xbflast"]
    assert list(read_lines(path)) == lines
    assert count_lines(path) == 5
    assert list(read_lines(write(tmp_path / "y", b""))) == []
    assert list(read_lines(write(tmp_path / "z", b"\n"))) == [b""]


@pytest.mark.parametrize("name", ["de-en.tsv", "de-en.jsonl", "de-en.txt.zip"])
def test_a_line_of_ten_megabytes_is_text(tmp_path: Path, name: str) -> None:
    pairs = [("kurz", "short"), ("lang " * 2_000_000, "x" * 10_000_000), ("kurz", "short")]
    (file,) = write_format(tmp_path, name, pairs)
    assert [pair for _, *pair in tables_of(file)] == [list(pair) for pair in pairs]
    assert pairs_of(file) == pairs


def test_a_line_without_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_LINE", 5000)
    monkeypatch.setattr(archives, "BLOCK_BYTES", 100)
    path = write(tmp_path / "de-en.tsv.gz", b"a\tb\n" * 321 + b"x" * 100_000 + b"\n")
    (file,) = find_bitext(path)["de"]
    for read in (pairs_of, tables_of):
        with pytest.raises(ValueError, match=r"de-en\.tsv\.gz, line 322: longer than 5,000 bytes"):
            read(file, max_bad_lines=1.0)


@pytest.mark.parametrize("name", ["moses.XX", "moses.XX.xz", "de-en.txt.zip"])
@pytest.mark.parametrize(("source", "target"), [(5, 9), (9, 5), (0, 3), (500, 499)])
def test_sides_of_different_length(
    tmp_path: Path, name: str, source: int, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "BLOCK_BYTES", 30)
    (file,) = write_format(tmp_path, name, [("eins", "one")])
    if "zip" in name:
        sides = {"OPUS.de-en.de": b"eins\n" * source, "OPUS.de-en.en": b"one\n" * target}
        zip_of(tmp_path / name, sides)
    else:
        write(Path(file.paths[0]), b"eins\n" * source)
        write(Path(file.paths[1]), b"one\n" * target)
    message = rf"differ in length: {file.paths[0]} has {source} lines, {file.paths[1]} has {target};"
    for read in (pairs_of, tables_of):
        with pytest.raises(ValueError, match=message):
            read(file)


@pytest.mark.parametrize("name", ["de-en.tsv.gz", "de-en.tsv.xz", "moses.XX.gz", "moses.XX.xz", "de-en.jsonl.gz"])
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_damaged_compressed_files_are_named(tmp_path: Path, name: str, damage: str) -> None:
    draw = random.Random(0)
    (file,) = write_format(tmp_path, name, [(f"{draw.random()}", f"{draw.random()}") for _ in range(2000)])
    path = Path(file.paths[0])
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data = {"cut": data[:middle], "changed": data[:middle] + bytes(50) + data[middle + 50 :], "empty": data[:0]}[
        damage
    ]
    path.write_bytes(data)
    message = "damaged or truncated compressed file"
    if damage == "empty" and path.suffix == ".gz":  # which is how gzip packs no text at all
        message = "holds no pair|differ in length"
    for read in (pairs_of, tables_of):
        with pytest.raises(ValueError, match=message) as error:
            read(file, max_bad_lines=1.0)
        assert str(path) in str(error.value)


def test_bad_sentences_are_named_by_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.de.xz", b"eins\r\n\nzw\xffei\ndrei")
    with pytest.raises(ValueError, match=r"x\.de\.xz, line 3: invalid UTF-8: byte 0xff at offset 2; repair the line"):
        list(read_sentences(path))
    with pytest.raises(FileNotFoundError):
        list(read_sentences(tmp_path / "none"))


def test_an_open_file_reads_as_bytes(tmp_path: Path) -> None:
    for name in ("a.txt", "a.gz", "a.xz"):
        with open_file(write(tmp_path / name, b"bytes")) as stream:
            assert isinstance(stream, io.BufferedReader)
            assert stream.read() == b"bytes"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named_with_the_remedy(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "de-en.tsv"
    path.write_bytes(("\ufeff" + "ja\tyes\n" * 50).encode(encoding))
    with pytest.raises(ValueError, match=r"de-en\.tsv is UTF-16, expected UTF-8: convert it, iconv -f UTF-16"):
        list(read_pairs(find_bitext(path)["de"][0], 1.0))


def test_lines_that_end_in_cr_alone_are_named(tmp_path: Path) -> None:
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"ja\tyes\rnein\tno\r")
    with pytest.raises(ValueError, match=r"de-en\.tsv: its lines end in CR alone; convert it: tr"):
        list(read_pairs(find_bitext(path)["de"][0], 1.0))


def test_a_damaged_bzip2_member_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("de-en.tsv", random.Random(0).randbytes(5000).hex())
    data = bytearray(path.read_bytes())
    data[60:200] = bytes(140)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.zip/de-en\.tsv: damaged or truncated compressed file"):
        list(read_pairs(find_bitext(path)["de"][0], 1.0))


def test_an_archive_is_listed_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(archives, "_refusal", lambda member: checked.append(member.filename))
    path = tmp_path / "a.zip"
    for count in (5, 6):
        with zipfile.ZipFile(path, "w") as archive:
            for number in range(count):
                archive.writestr(f"{number}.de-en.tsv", "ja\tyes\n")
        checked.clear()
        files = find_bitext(path)["de"]
        assert [len(list(read_pairs(file))) for file in files] == [1] * count
        assert len(checked) == count


def test_what_stays_closed_in_an_archive_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("fr-en.tsv", "inner.zip", "de-en.parquet"):
            archive.writestr(name, "oui\tyes\n")
    assert list(find_bitext(tmp_path / "a.zip")) == ["fr"]
    for name in ("inner.zip", "de-en.parquet"):
        assert f"a.zip/{name} is left out: such a file is not read inside an archive; unpack it" in caplog.text
