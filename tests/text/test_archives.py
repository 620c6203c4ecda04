"""Lines are read from plain, packed and archived files, and damaged files are refused by name."""

import gzip
import lzma
import os
import zipfile
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from written import folder_text, json_of, many, pairs_of, read, text_of, write, zip_of

from dap_transformers.errors import UserError
from dap_transformers.text.archives import read_lines, read_sentences
from dap_transformers.text.corpus import load_bitext

TMX = """<tmx><body>
<tu><tuv lang='en'><seg>5</seg></tuv><tuv lang='ru'><seg>V</seg></tuv></tu>
</body></tmx>"""


def test_an_archive_is_read_as_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        "de": "eins\tone\n",
        "fr": "deux\ttwo\n",
        "ru": "V\t5\n",
        "sw": "tatu\tthree\n",
        "tr": "alti\tsix\n",
        "zh": "四\tfour\n",
    }
    path = zip_of(tmp_path / "all.zip", members)
    zip_of(tmp_path / "notes.zip", {"notes.txt": b"none"})
    for given in (path, tmp_path):
        assert folder_text(given) == expected
    assert f"{path}: left out: more.zip, ur-en.parquet; expected" in caplog.text
    assert "left out: notes.zip, all.zip/more.zip, all.zip/ur-en.parquet;" in caplog.text
    assert pairs_of(load_bitext(tmp_path)["de"]) == [("eins", "one")]
    assert list(read_sentences(path / "packed.sw.gz")) == ["tatu"]
    with pytest.raises(FileNotFoundError, match=r"none\.de"):
        list(read_lines(path / "none.de"))


def test_an_archive_is_opened_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    opened = Mock(wraps=zipfile.ZipFile)
    path = tmp_path / "a.zip"
    for state in (5, 6):  # of the same size
        zip_of(path, {f"{number}.de-en.tsv": f"ja\tyes {state}\n" for number in range(5)})
        os.utime(path, (state, state))
        with patch.object(zipfile, "ZipFile", opened):
            data = load_bitext(path, cache_dir=tmp_path / "cache")["de"]
        assert data["target"] == [f"yes {state}"] * 5
    assert opened.call_count == 2


def test_a_folder_may_be_named_like_an_archive(tmp_path: Path) -> None:
    write(tmp_path / "folder.zip/de-en.tsv", text_of(many(3)))
    assert read(tmp_path / "folder.zip") == many(3)


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "a\nü\n".encode("cp1252"))
    with pytest.raises(UserError, match=r"x, line 2: not UTF-8 \(byte 0xfc\)"):
        list(read_sentences(path))
