"""Files whose text cannot be trusted are refused, with the file's name and the place."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written import json_of, many, read, text_of, write, write_format, zip_of

from dap_transformers.errors import UserError
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import read_pairs

UNIT = '<tu><tuv xml:lang="en"><seg>{}</seg></tuv><tuv xml:lang="{}"><seg>y</seg></tuv></tu>\n'
TMX = "<tmx>\n<body>\n" + UNIT
PO = 'msgid ""\nmsgstr ""\n"Language: {}\\n"\n\nmsgid "a"\nmsgstr "b"\n'
FUZZY = '#, fuzzy\nmsgid "a"\nmsgstr "b"\n\nmsgid "c"\nmsgstr ""\n'

KEYS = "".join(f'msgid "menu.file.{n}"\nmsgstr "Datei {n}"\n\n' for n in "abc")
TICKETS = "".join(f"de,Frage {n},Question {n}\ntr,Soru {n},Question {n}\n" for n in range(50))
CODES = '{"source": "de", "target": "en", "source_text": "Ja"}\n'
SWAPPED = [("He waits.", "Он ждёт."), ("It is 8", "8 часов"), ("Tom", "Tom")]
#: (name of the file, its text, what the message says after the name)
REFUSED = [
    ("de-en.tsv.gz", ("\ufeff" + "ja\tyes\n" * 50).encode("utf-16-le"), "UTF-16"),
    ("de-en.tsv", b"%PDF-1.5\n", "is a PDF"),
    ("de-en.tsv", b"PK\3\4\0mimetypeapplication/epub+zip", "is an e-book"),
    ("de-en.tsv", b"PK\3\4\0[Content_Types].xml\0word/document.xml", "is a Word document"),
    ("de-en.tsv", b"PK\3\4\0de-en.tsv", "is a zip archive"),
    ("de-en.tsv.xz", "ja\tyes\n" * 200 + "ja\tyes\r" * 200, "line 201: lines end in CR"),
    ("de-en.tsv", "1.25\teins\tone\n0.75\tzwei\ttwo\n", "source side holds '0.75'"),
    ("de-en.tsv", "http://a.de/x\thttp://a.uk\teins\tone\n" * 3, "source side holds 'http"),
    ("de-en.tsv", "score\td\te\n" + "  ١٫٢٣\teins\tone\n" * 4, "source side holds"),
    ("de-en.tsv", "one\tid-7\teins\n" * 3, "target side holds"),
    ("de-en.tsv", "news\ta\tb\nnews\tc\td\nnews\te\tf\n", "source side holds 'news'"),
    ("de-en.csv", "de,en,Hm,Hm\nfr,en,Oui,Yes\nit,en,No,No\n", "source side holds 'it'"),
    ("de-en.jsonl", CODES * 2, "source side holds 'de'"),
    ("de.po", KEYS, "target side holds 'menu"),
    ("ru-en.tsv", text_of(SWAPPED), "swapped"),
    ("xh-en.tsv", "This and that\tOku naoko\n" * 3, "swapped"),
    ("tickets.csv", "de,frage,en\n" + TICKETS, "source side holds 'tr'"),
    ("tickets.csv", "language;question;translation_en\n", "language,source,target"),
    ("de-en.csv", "Größe,size\n".encode("cp1252"), r"byte 0xf6\): if it is Windows-1252, iconv"),
    ("de-en.tsv", "eins\tone\nzwei\ttwo\ndrei\tx\tthree\n", "line 3: 3 columns, expected 2"),
    ("de-en.tsv", "\n", "holds no pair"),
    ("customers.csv", "texte,anglais\nOui,Yes\n", "first line is {xx},en"),
    ("customers.csv", "source,target\nOui,Yes\n", "first line is {xx},en"),
    ("en-fr.tsv", "Yes\tOui\n", "swap the columns of en-{xx}.tsv"),
    ("fr-en.csv", 'fr,en\n"Oui,Yes\nNon,No\n', "unexpected end of data"),
    ("all.csv", "lang,source,target\n?,Oui,Yes\n", "'\\?' is not a language"),
    ("de-en.parquet", "no parquet", "parquet"),
    ("m.tmx", TMX.format("x", "de"), "line 4"),
    ("m.tmx", TMX.format("a & b", "de"), "line 3"),
    ("m.tmx", "<xliff/>", "xliff"),
    ("m.tmx", '<?xml version="1.0" encoding="klingon"?><tmx/>', "encoding"),
    ("m.tmx", TMX.format("x", "../evil"), "'../evil'"),
    ("x.po", PO.format("German"), "'German'"),
    ("de.po", FUZZY, "holds no pair"),
    ("x.po", PO.format(""), "names no Language"),
    ("de.xlf.gz", "<xliff/>", "XLIFF: convert it"),
    ("de.po", b'msgid "a"\nmsgstr "\xff"\n', "0xff"),
    ("de.po", 'msgid "a"\nmsgstr "b"c"\n', "line 2"),
]


@pytest.mark.parametrize(("name", "text", "says"), REFUSED)
def test_what_is_refused(tmp_path: Path, name: str, text: str | bytes, says: str) -> None:
    with pytest.raises(UserError, match=f"(?s){name}.*{says}"):
        read(write(tmp_path / name, text), 0.01)


def test_sides_of_different_length_are_refused_before_the_first_pair(tmp_path: Path) -> None:
    write(tmp_path / "a.de", b"eins\n" * 5)
    write(tmp_path / "a.en", b"one\n" * 9)
    (file,) = find_bitext(tmp_path)["de"]
    with pytest.raises(UserError, match="5 lines.* 9"):
        next(read_pairs(file, 0.0))


@pytest.mark.parametrize("name", ["de-en.tsv.gz", "de-en.tsv.xz", "de-en.txt.zip", "de-en.parquet"])
@pytest.mark.parametrize("cut", [0, 0.5, -10])
def test_a_packed_file_that_is_cut_off_is_refused(tmp_path: Path, name: str, cut: float) -> None:
    write_format(tmp_path, name, many(2000))
    path = tmp_path / name
    data = path.read_bytes()
    path.write_bytes(data[: int(cut * len(data)) if cut >= 0 else cut])
    with pytest.raises(ValueError, match=name):
        read(path, 1.0)


@pytest.mark.parametrize("names", [["de", "text"], ["source", "target", "source"]])
def test_a_table_without_the_two_columns_is_refused(tmp_path: Path, names: list) -> None:
    path = tmp_path / "de-en.parquet"
    pq.write_table(pa.table([pa.array(["a"])] * len(names), names=names), path)
    with pytest.raises(ValueError, match=r"de-en\.parquet.*source"):
        read(path)


def test_a_member_of_an_archive_never_leads_outside_of_it(tmp_path: Path) -> None:
    outside = write(tmp_path / "de-en.tsv", text_of([("außen", "outside")]))
    path = zip_of(tmp_path / "a.zip", {str(outside): text_of([("innen", "inside")])})
    assert read(path) == [("innen", "inside")]


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"de-en.jsonl": json_of(many(3))})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] = 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.zip/de-en\.jsonl.*encrypted"):
        read(path)
