"""Lines are read from plain, packed and archived files, and damaged files are refused by name."""

import gzip
import lzma
import os
import random
import re
import warnings
import zipfile
from pathlib import Path

import pytest
from written import json_of, many, pairs_of, read, text_of, write, write_format, zip_of

from dap_transformers.errors import UserError
from dap_transformers.text import archives
from dap_transformers.text.archives import read_lines, read_sentences
from dap_transformers.text.corpus import load_bitext
from dap_transformers.text.find import find_bitext

TMX = (
    b"<tmx><body><tu><tuv lang='en'><seg>5</seg></tuv><tuv lang='ru'><seg>V</seg></tuv></tu>"
    b"</body></tmx>"
)


def test_an_archive_is_read_as_a_folder(tmp_path: Path) -> None:
    members = {
        "deep/er/tatoeba.deu-eng.deu": b"eins\n",
        "deep/er/tatoeba.deu-eng.eng": b"one\n",
        "fr-en.tsv": b"deux\ttwo\n",
        "packed.sw.gz": gzip.compress(b"tatu\n"),
        "packed.en": b"three\n",
        "README.txt": b"none",
        "more.zip": b"none",
        "zh-en.jsonl.xz": lzma.compress(json_of([("四", "four")])),
        "ur-en.parquet": b"unread",
        "deep/": b"",
        "m.tmx": TMX,
        "locale/tr/LC_MESSAGES/a.po": b'msgid "six"\nmsgstr "alti"\n',
    }
    expected = {
        "de": [("eins", "one")],
        "fr": [("deux", "two")],
        "ru": [("V", "5")],
        "sw": [("tatu", "three")],
        "tr": [("alti", "six")],
        "zh": [("四", "four")],
    }
    path = zip_of(tmp_path / "all.zip", members)
    for given in (path, tmp_path):
        found = find_bitext(given)
        assert {language: read(file) for language, (file,) in found.items()} == expected
    assert found["de"][0].paths[0] == f"{path}/deep/er/tatoeba.deu-eng.deu"
    assert pairs_of(load_bitext(tmp_path, cache_dir=tmp_path / "cache")["de"]) == expected["de"]
    assert pairs_of(load_bitext(tmp_path, streaming=True)["de"]) == expected["de"]
    assert list(read_sentences(path / "packed.sw.gz")) == ["tatu"]
    with pytest.raises(FileNotFoundError, match=r"none\.de"):
        list(read_lines(path / "none.de"))


def test_a_warning_names_what_is_not_read_in_an_archive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("fr-en.tsv", "inner.zip", "de-en.parquet")
    zip_of(tmp_path / "a.zip", dict.fromkeys(names, b"oui\tyes\n"))
    zip_of(tmp_path / "notes.zip", {"notes.txt": b"none"})
    assert list(find_bitext(tmp_path)) == ["fr"]
    for name in ("a.zip/inner.zip", "a.zip/de-en.parquet", "notes.zip"):
        assert f"{name} is left out" in caplog.text


def test_an_archive_is_opened_once_and_again_when_it_has_changed(
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


def test_a_folder_may_be_named_like_an_archive(tmp_path: Path) -> None:
    write(tmp_path / "folder.zip/de-en.tsv", text_of(many(3)))
    assert read(tmp_path / "folder.zip") == many(3)


@pytest.mark.parametrize("name", ["../x.de", "a/../../x.de", "/etc/x.de"])
def test_a_member_outside_the_folder_of_its_archive_is_refused(tmp_path: Path, name: str) -> None:
    path = zip_of(tmp_path / "a.zip", {"./x.de": b"a\n", "x.en": b"b\n"})
    assert read(path) == [("a", "b")]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"evil\n")
    with pytest.raises(UserError, match=rf"a\.zip.*{name}"):
        find_bitext(path)
    with pytest.raises(UserError, match=rf"a\.zip.*{name}"):
        list(read_lines(path / "x.de"))


@pytest.mark.parametrize("name", ["", "d\x1b[2J.de"])
def test_a_member_without_a_plain_name_is_refused_with_its_archive(
    tmp_path: Path, name: str
) -> None:
    path = zip_of(tmp_path / "a.zip", {"x.de": b"a\n"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"b\n")
    with pytest.raises(UserError, match=r"a\.zip"):
        find_bitext(path)


#: (the start of a record in a zip archive, the bytes to change at offsets in it)
DAMAGED_RECORDS = {
    "encrypted": (b"PK\x01\x02", {8: b"\1"}),
    "declares 500 bytes": (b"PK\x01\x02", {24: b"\xf4\1\0\0"}),
    "name not UTF-8": (b"PK\x01\x02", {8: b"\0\x08", 46: b"\xff"}),
    "name before the data not UTF-8": (b"PK\x03\x04", {6: b"\0\x08", 30: b"\xff"}),
    "data before the start of the file": (b"PK\x05\x06", {16: b"\xff"}),
}


@pytest.mark.parametrize("damage", DAMAGED_RECORDS)
def test_an_archive_with_a_damaged_table_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.tsv": b"ja\tyes\n" * 1_000_000})
    data = bytearray(path.read_bytes())
    record, changes = DAMAGED_RECORDS[damage]
    for offset, change in changes.items():
        start = data.index(record) + offset
        data[start : start + len(change)] = change
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.zip"):
        read(path, 1.0)


@pytest.mark.parametrize("keep", [0, 10, -10, -60])
def test_a_truncated_archive_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = zip_of(tmp_path / "a.zip", {"a.de": b"eins\n" * 100, "a.en": b"one\n" * 100})
    path.write_bytes(path.read_bytes()[:keep])
    for given in (path, tmp_path):
        with pytest.raises(UserError, match=r"a\.zip"):
            find_bitext(given)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_damaged_member_is_refused_by_name(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("de-en.tsv", random.Random(0).randbytes(5000).hex())
    data = bytearray(path.read_bytes())
    data[60:200] = bytes(140)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.zip/de-en\.tsv"):
        read(path, 1.0)


def test_a_member_that_occurs_twice_is_refused_by_name(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.tsv": b"a\tb\n", "deep/": b""})
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings(action="ignore"):
        archive.writestr("deep/", b"")  # a folder may occur twice
        archive.writestr("./de-en.tsv", b"c\td\n")
    with pytest.raises(UserError, match=r"a\.zip.*de-en\.tsv"):
        find_bitext(path)


@pytest.mark.parametrize(
    "name", ["de-en.tsv.gz", "de-en.tsv.xz", "moses.XX.gz", "moses.XX.xz", "de-en.jsonl.gz"]
)
@pytest.mark.parametrize("damage", ["cut", "end", "changed", "plain", "empty"])
def test_a_damaged_compressed_file_is_refused_by_name(
    tmp_path: Path, name: str, damage: str
) -> None:
    draw = random.Random(0)
    pairs = [(f"{draw.random()}", f"{draw.random()}") for _ in range(2000)]
    file = write_format(tmp_path, name, pairs)
    path = Path(file.paths[0])
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = {
        "cut": data[:middle],
        "end": data[:-10],
        "changed": data[:middle] + bytes(50) + data[middle + 50 :],
        "plain": b"plain\ttext\n",
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(UserError, match=re.escape(str(path))):
        read(file, 1.0)


def test_only_lf_and_cr_lf_end_a_line(tmp_path: Path) -> None:
    odd = b"\x0b\x0c\x1c\xc2\x85\xe2\x80\xa8\r"
    data = b"\xef\xbb\xbfone\r\ntwo\rstill two\n\n" + odd + b"\r\n\xef\xbb\xbflast"
    path = write(tmp_path / "x", data)
    assert list(read_lines(path)) == [b"one", b"two\rstill two", b"", odd, b"\xef\xbb\xbflast"]
    with pytest.raises(UserError, match="x, line 2: carriage return at offset 3"):
        list(read_sentences(path))
    assert list(read_lines(write(tmp_path / "y", b""))) == []
    assert list(read_lines(write(tmp_path / "z", b"\n"))) == [b""]


NO_TEXT = {
    "too long": (b"a\tb\n" * 321 + b"x" * 100_000 + b"\n", "line 322"),
    "UTF-16, little": (("\ufeff" + "ja\tyes\n" * 50).encode("utf-16-le"), "iconv -f UTF-16"),
    "UTF-16, big": (("\ufeff" + "ja\tyes\n" * 50).encode("utf-16-be"), "iconv -f UTF-16"),
    "CR": (b"ja\tyes\r" * 20, "line 1"),
    "CR later": (b"ja\tyes\n" * 200 + b"ja\tyes\r" * 200 + b"ja\tyes\n", "line 201"),
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_a_file_that_is_not_text_is_refused_with_its_line_or_the_remedy(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_LINE", 5000)
    data, told = NO_TEXT[kind]
    with pytest.raises(UserError, match=rf"de-en\.tsv\.gz.*{told}"):
        read(write(tmp_path / "de-en.tsv.gz", data), 1.0)


def test_a_sentence_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.de.xz", b"eins\r\n\nzw\xffei\ndrei")
    with pytest.raises(UserError, match=r"x\.de\.xz, line 3: .*0xff at offset 2"):
        list(read_sentences(path))
    with pytest.raises(FileNotFoundError):
        list(read_sentences(tmp_path / "none"))
