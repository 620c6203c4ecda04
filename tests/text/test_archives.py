"""Plain, packed and archived files give their lines, and archives that are damaged or lie are named."""

import gzip
import lzma
import os
import random
import warnings
import zipfile
from pathlib import Path

import pytest
from written import json_of, many, read, text_of, write, write_format, zip_of

from dap.errors import UserError
from dap.text import archives, find_bitext, load_bitext, read_sentences
from dap.text.archives import read_lines

TMX = b"<tmx><body><tu><tuv lang='en'><seg>5</seg></tuv><tuv lang='ru'><seg>V</seg></tuv></tu></body></tmx>"
DAMAGED = "damaged or truncated compressed file"


def test_an_archive_is_a_folder(tmp_path: Path) -> None:
    inside = {
        "deep/er/tatoeba.deu-eng.deu": b"eins\n", "deep/er/tatoeba.deu-eng.eng": b"one\n", "fr-en.tsv": b"deux\ttwo\n",
        "packed.sw.gz": gzip.compress(b"tatu\n"), "packed.en": b"three\n", "README.txt": b"none", "more.zip": b"none",
        "zh-en.jsonl.xz": lzma.compress(json_of([("四", "four")])), "ur-en.parquet": b"unread", "deep/": b"",
        "m.tmx": TMX, "locale/tr/LC_MESSAGES/a.po": b'msgid "six"\nmsgstr "alti"\n',
    }  # fmt: skip
    path = zip_of(tmp_path / "all.zip", inside)
    expected = {
        "de": ("eins", "one"),
        "fr": ("deux", "two"),
        "ru": ("V", "5"),
        "sw": ("tatu", "three"),
    }
    expected |= {"tr": ("alti", "six"), "zh": ("四", "four")}
    for given in (path, tmp_path):
        found = find_bitext(given)
        assert {language: [read(file) for file in files] for language, files in found.items()} == {
            language: [[pair]] for language, pair in expected.items()
        }
    assert found["de"][0].paths[0] == f"{path}/deep/er/tatoeba.deu-eng.deu"
    assert load_bitext(tmp_path, cache_dir=tmp_path / "cache")["de"][0] == {
        "source": "eins",
        "target": "one",
    }
    assert list(load_bitext(tmp_path, streaming=True)["de"]) == [
        {"source": "eins", "target": "one", "row": "0"}
    ]
    assert list(read_sentences(path / "packed.sw.gz")) == ["tatu"]
    with pytest.raises(FileNotFoundError, match=r"all\.zip: holds no member 'none\.de'"):
        list(read_lines(path / "none.de"))


def test_what_stays_closed_in_an_archive_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zip_of(
        tmp_path / "a.zip",
        dict.fromkeys(("fr-en.tsv", "inner.zip", "de-en.parquet"), b"oui\tyes\n"),
    )
    zip_of(tmp_path / "notes.zip", {"notes.txt": b"none"})
    assert list(find_bitext(tmp_path)) == ["fr"]
    for name in ("inner.zip", "de-en.parquet"):
        assert (
            f"a.zip/{name} is left out: such a file is not read inside an archive; unpack it"
            in caplog.text
        )
    assert "notes.zip is left out: it tells no language" in caplog.text


def test_an_archive_is_listed_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    archive = zipfile.ZipFile
    monkeypatch.setattr(
        archives.zipfile, "ZipFile", lambda path: opened.append(path) or archive(path)
    )
    path = tmp_path / "a.zip"
    for state in (5, 6):  # of the same size
        with archive(path, "w") as writing:
            for number in range(5):
                writing.writestr(f"{number}.de-en.tsv", f"ja\tyes {state}\n")
        os.utime(path, (state, state))
        data = load_bitext(path, cache_dir=tmp_path / "cache")["de"]
        assert data["target"] == [f"yes {state}"] * 5
    assert opened == [path] * 2


def test_a_folder_named_as_an_archive(tmp_path: Path) -> None:
    write(tmp_path / "folder.zip/de-en.tsv", text_of(many(3)))
    assert read(tmp_path / "folder.zip") == many(3)


@pytest.mark.parametrize("name", ["../x.de", "a/../../x.de", "/etc/x.de"])
def test_a_member_outside_its_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = zip_of(tmp_path / "a.zip", {"x.de": b"a\n", "x.en": b"b\n"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"evil\n")
    with pytest.raises(
        ValueError, match=rf"a\.zip: its member '{name}' has a path outside the archive's folder"
    ):
        find_bitext(path)
    with pytest.raises(ValueError, match="outside"):
        list(read_lines(path / "x.de"))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (b"PK\x01\x02", {8: b"\1"}, r"a\.zip: its member 'de-en\.tsv' is encrypted"),
        (
            b"PK\x01\x02",
            {24: b"\xf4\1\0\0"},
            rf"a\.zip/de-en\.tsv: {DAMAGED} \(Bad CRC-32",
        ),  # it declares 500 bytes
        (
            b"PK\x01\x02",
            {8: b"\0\x08", 46: b"\xff"},
            r"a\.zip: damaged or truncated",
        ),  # its name is no UTF-8
        (
            b"PK\x03\x04",
            {6: b"\0\x08", 30: b"\xff"},
            rf"a\.zip/de-en\.tsv: {DAMAGED}",
        ),  # the name before the data
        (
            b"PK\x05\x06",
            {16: b"\xff"},
            rf"a\.zip/de-en\.tsv: {DAMAGED}",
        ),  # the data lies before the file's start
    ],
)
def test_an_archive_whose_tables_make_no_sense_is_named(
    tmp_path: Path, part: bytes, changes: dict[int, bytes], message: str
) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.tsv": b"ja\tyes\n" * 1_000_000})
    data = bytearray(path.read_bytes())
    for place, change in changes.items():
        start = data.index(part) + place
        data[start : start + len(change)] = change
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        read(path, 1.0)


@pytest.mark.parametrize("keep", [0, 10, -10, -60])
def test_a_truncated_archive(tmp_path: Path, keep: int) -> None:
    path = zip_of(tmp_path / "a.zip", {"a.de": b"eins\n" * 100, "a.en": b"one\n" * 100})
    path.write_bytes(path.read_bytes()[:keep])
    for given in (path, tmp_path):
        with pytest.raises(
            ValueError, match=r"a\.zip: damaged or truncated zip archive .*; fetch it again"
        ):
            find_bitext(given)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_damaged_member_is_named(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("de-en.tsv", random.Random(0).randbytes(5000).hex())
    data = bytearray(path.read_bytes())
    data[60:200] = bytes(140)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.zip/de-en\.tsv: {DAMAGED}"):
        read(path, 1.0)


def test_a_member_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.tsv": b"a\tb\n", "deep/": b""})
    for name in ("deep/", "./de-en.tsv"):
        with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings(action="ignore"):
            archive.writestr(name, b"" if name == "deep/" else b"c\td\n")
    with pytest.raises(
        UserError, match=r"a\.zip: its member 'de-en\.tsv' is there twice; repack it"
    ):
        find_bitext(path)


STREAM = lzma.compress(b"ja\tyes\n" * 5000)
PACKED = gzip.compress(b"ja\tyes\n" * 5000)
WHOLE = [
    b"",
    bytes(4),
    bytes(1 << 18),
    STREAM + bytes(8),
    STREAM * 2,
    lzma.compress(b"") + bytes(4),
]
BROKEN = [bytes(3), bytes(4) + b"x", b"x" * 8, bytes(4) + STREAM[:-1], STREAM[1:], STREAM[:9]]
BROKEN += [b"\xfd7zXZ\0" + STREAM[7:]]


@pytest.mark.parametrize("behind", WHOLE)
def test_all_streams_of_a_packed_file_are_read_and_the_padding_between_them(
    tmp_path: Path, behind: bytes
) -> None:
    gzipped = behind.replace(STREAM, PACKED).replace(lzma.compress(b""), gzip.compress(b""))
    for name, data in (("de-en.tsv.xz", STREAM + behind), ("de-en.tsv.gz", PACKED + gzipped)):
        (tmp_path / name).write_bytes(data)
        assert len(read(tmp_path / name)) == 5000 * (1 + behind.count(STREAM))


@pytest.mark.parametrize("behind", BROKEN)
def test_anything_else_behind_a_stream_is_damage(tmp_path: Path, behind: bytes) -> None:
    (tmp_path / "de-en.tsv.xz").write_bytes(STREAM + behind)
    with pytest.raises(UserError, match=rf"de-en\.tsv\.xz: {DAMAGED}"):
        read(tmp_path / "de-en.tsv.xz")
    if behind.strip(b"\0") and not behind.startswith(bytes(4) + STREAM[:6]):
        (tmp_path / "de-en.tsv.gz").write_bytes(PACKED + behind)
        with pytest.raises(UserError, match=rf"de-en\.tsv\.gz: {DAMAGED}"):
            read(tmp_path / "de-en.tsv.gz")


@pytest.mark.parametrize(
    "name", ["de-en.tsv.gz", "de-en.tsv.xz", "moses.XX.gz", "moses.XX.xz", "de-en.jsonl.gz"]
)
@pytest.mark.parametrize("damage", ["cut", "end", "changed", "plain", "empty"])
def test_damaged_compressed_files_are_named(tmp_path: Path, name: str, damage: str) -> None:
    draw = random.Random(0)
    file = write_format(
        tmp_path, name, [(f"{draw.random()}", f"{draw.random()}") for _ in range(2000)]
    )
    path = Path(file.paths[0])
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = {"cut": data[:middle], "end": data[:-10], "plain": b"plain\ttext\n", "empty": b""}
    path.write_bytes(damaged.get(damage, data[:middle] + bytes(50) + data[middle + 50 :]))
    packed_nothing = (
        damage == "empty" and path.suffix == ".gz"
    )  # which is how gzip packs no text at all
    with pytest.raises(
        ValueError, match="holds no pair|differ in length" if packed_nothing else DAMAGED
    ) as error:
        read(file, 1.0)
    assert str(path) in str(error.value)


def test_line_ends(tmp_path: Path) -> None:
    odd = b"\x0b\x0c\x1c\xc2\x85\xe2\x80\xa8\r"
    path = write(
        tmp_path / "x", b"\xef\xbb\xbfone\r\ntwo\rstill two\n\n" + odd + b"\r\n\xef\xbb\xbflast"
    )
    assert list(read_lines(path)) == [b"one", b"two\rstill two", b"", odd, b"\xef\xbb\xbflast"]
    with pytest.raises(
        UserError, match=r"x, line 2: carriage return at offset 3, within the line: .*; repair"
    ):
        list(read_sentences(path))
    assert list(read_lines(write(tmp_path / "y", b""))) == []
    assert list(read_lines(write(tmp_path / "z", b"\n"))) == [b""]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\tb\n" * 321 + b"x" * 100_000 + b"\n", ", line 322: longer than 5,000 bytes"),
        (
            ("\ufeff" + "ja\tyes\n" * 50).encode("utf-16-le"),
            " is UTF-16, expected UTF-8: convert it, iconv -f UTF-16",
        ),
        (
            ("\ufeff" + "ja\tyes\n" * 50).encode("utf-16-be"),
            " is UTF-16, expected UTF-8: convert it, iconv -f UTF-16",
        ),
        (b"ja\tyes\r" * 20, ", line 1: many lines that end in CR alone; convert it: tr"),
        (
            b"ja\tyes\n" * 200 + b"ja\tyes\r" * 200 + b"ja\tyes\n",
            ", line 201: many lines that end in CR alone",
        ),
    ],
)
def test_what_is_no_text_is_named_with_the_remedy(
    tmp_path: Path, data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_LINE", 5000)
    with pytest.raises(ValueError, match=rf"de-en\.tsv\.gz{message}"):
        read(write(tmp_path / "de-en.tsv.gz", data), 1.0)


def test_bad_sentences_are_named_by_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.de.xz", b"eins\r\n\nzw\xffei\ndrei")
    with pytest.raises(
        ValueError,
        match=r"x\.de\.xz, line 3: invalid UTF-8: byte 0xff at offset 2; repair the line",
    ):
        list(read_sentences(path))
    with pytest.raises(FileNotFoundError):
        list(read_sentences(tmp_path / "none"))
