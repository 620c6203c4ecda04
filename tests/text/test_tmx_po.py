"""Translation memories and catalogues: markup, variants, regions, damage, and memory that does not grow."""

import io
import logging
import tracemalloc
from pathlib import Path

import pytest
import written

from dap.text import find_bitext
from dap.text.tmx_po import catalogue_pairs, read_units

HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header/><body>
"""
TAIL = "</body></tmx>\n"


def unit(*variants: tuple[str, str]) -> str:
    inside = "".join(
        f'<tuv xml:lang="{language}"><seg>{text}</seg></tuv>' for language, text in variants
    )
    return f"<tu><prop type='x'>not text</prop>{inside}</tu>\n"


def units(*texts: str) -> list[dict[str, list[str]]]:
    return list(read_units(io.BytesIO((HEAD + "".join(texts) + TAIL).encode()), "memory.tmx"))


def write(path: Path, *texts: str) -> Path:
    return written.write(path, HEAD + "".join(texts) + TAIL)


def read(path: Path, language: str, max_bad_lines: float = 0.001) -> written.Pairs:
    (file,) = find_bitext(path)[language]
    return written.read(file, max_bad_lines)


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        ("plain &amp; &lt;b&gt; &#x10FFFF; &#233;", "plain & <b> \U0010ffff é"),
        ('<bpt i="1">&lt;b&gt;</bpt>Bold<ept i="1">&lt;/b&gt;</ept> face', "Bold face"),
        ("press <hi type='key'>Enter <hi>now</hi></hi>!", "press Enter now!"),
        ("<hi>a<ph>{0}</ph>b</hi><it pos='begin'>[</it>c<ut>\\n</ut>d", "abcd"),
        ("see<ph>&lt;img alt='<sub>a tree</sub>'&gt;</ph> here", "see here"),
        ("<g>unknown</g> elements are <mrk>text</mrk>", "unknown elements are text"),
        ("\n    wrapped\n    by an editor\r\n  ", "wrapped by an editor"),
        (
            "<![CDATA[<b>]]>&#x2028;\u0085\u200fשלום\u0301 \u00a0",
            "<b>\u2028\u0085\u200fשלום\u0301 \u00a0",
        ),
        ("", ""),
    ],
)
def test_text_is_kept_and_codes_are_dropped(segment: str, text: str) -> None:
    assert units(unit(("en", segment), ("fr", "x"))) == [{"en": [text], "fr": ["x"]}]


def test_languages_with_regions_scripts_and_the_old_attribute() -> None:
    old = '<tu><tuv lang="DE-at"><seg>Jänner</seg></tuv><tuv><seg>of no language</seg></tuv></tu>'
    found = units(
        unit(("EN-us", "color"), ("zh-Hans-CN", "颜色"), ("xh-ZA", "umbala"), ("cmn", "色")), old
    )
    assert found == [{"en": ["color"], "zh": ["颜色", "色"], "xh": ["umbala"]}, {"de": ["Jänner"]}]


def test_every_variant_is_paired_with_every_other(tmp_path: Path) -> None:
    path = write(
        tmp_path / "memory.tmx",
        unit(
            ("en-GB", "colour"),
            ("de", "Farbe"),
            ("en-US", "color"),
            ("de-AT", "Farbe"),
            ("de-CH", "Farb"),
        ),
        unit(("de", "ohne Englisch"), ("fr", "sans anglais")),
        unit(("en", "red"), ("fr", "rouge")),
        unit(("en", "one"), ("de", "eins")),
    )
    assert list(find_bitext(path)) == ["de", "fr"]
    pairs = [
        ("Farbe", "colour"),
        ("Farbe", "color"),
        ("Farb", "colour"),
        ("Farb", "color"),
        ("eins", "one"),
    ]
    assert read(path, "de") == pairs
    assert read(path, "fr") == [("rouge", "red")]


@pytest.mark.parametrize("name", ["en-fr.tmx", "memory.tmx.gz"])
def test_the_content_tells_the_languages_not_the_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, unit(("en", "yes"), ("fr", "oui")))
    assert read(tmp_path, "fr") == [("oui", "yes")]


def test_an_empty_side_is_left_out_and_a_blank_one_is_bad(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    texts = [unit(("en", "x"), ("de", f"{number}")) for number in range(3)]
    texts += [unit(("en", "<ph>only a code</ph>"), ("de", "y")), unit(("en", "x"), ("de", ""))]
    assert len(read(write(tmp_path / "a.tmx", *texts), "de", max_bad_lines=0.0)) == 3
    assert "a.tmx: 2 pairs left out: a segment is empty" in caplog.text
    path = write(tmp_path / "b.tmx", *texts[:3], unit(("en", "&#160;"), ("de", "y")))
    with pytest.raises(
        ValueError, match=r"b\.tmx: 1 of the first 4 lines .*\n.*line 4: empty target side"
    ):
        read(path, "de")
    assert len(read(path, "de", max_bad_lines=0.5)) == 3


def test_a_language_may_come_late_and_counts_where_it_has_a_translation(tmp_path: Path) -> None:
    texts = [unit(("en", f"{number}"), ("de", "x"), ("sw", "y")) for number in range(1500)]
    path = write(
        tmp_path / "a.tmx",
        *texts,
        unit(("en", "yes"), ("fr", "oui")),
        unit(("fr", "a"), ("it", "b")),
    )
    assert len(read(path, "de")) == len(read(path, "sw")) == 1500
    assert read(path, "fr") == [("oui", "yes")]
    assert list(find_bitext(path)) == ["de", "fr", "sw"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            (HEAD + unit(("en", "x"), ("de", "y")))[:-20],
            "memory.tmx, line 4: damaged or truncated TMX",
        ),
        (
            HEAD + "<tu><tuv xml:lang='en'><seg>a & b</seg></tuv></tu>" + TAIL,
            "line 4: .*not well-formed",
        ),
        (HEAD + unit(("en", "a\0b")) + TAIL, "line 4: .*not well-formed"),
        (
            HEAD.encode() + b"<tu><tuv xml:lang='en'><seg>\xff</seg></tuv></tu>",
            "line 4: .*not well-formed",
        ),
        ("<xliff/>", "the root element is <xliff>, expected <tmx>"),
        ("plain text", "line 1: damaged"),
        ("", "line 1: damaged"),
        ('<?xml version="1.0" encoding="klingon"?><tmx/>', "unknown encoding"),
        (HEAD + unit(("en", "&nothing;")) + TAIL, "line 4: .*undefined entity"),
    ],
)
def test_damage_is_named_with_its_line(data: str | bytes, message: str) -> None:
    stream = io.BytesIO(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=message):
        list(read_units(stream, "memory.tmx"))


def test_entities_neither_explode_nor_read_files() -> None:
    nested = "".join(f'<!ENTITY a{level} "{f"&a{level - 1};" * 10}">' for level in range(1, 10))
    bomb = f'<!DOCTYPE tmx [<!ENTITY a0 "{"a" * 50}">{nested}]><tmx><body>{unit(("en", "&a9;"))}</body></tmx>'
    with pytest.raises(ValueError, match="amplification"):
        list(read_units(io.BytesIO(bomb.encode()), "bomb.tmx"))
    outside = f'<!DOCTYPE tmx [<!ENTITY a SYSTEM "/etc/passwd">]><tmx><body>{unit(("en", "&a;"))}</body></tmx>'
    with pytest.raises(ValueError, match="undefined entity"):
        list(read_units(io.BytesIO(outside.encode()), "outside.tmx"))


class Endless(io.RawIOBase):
    """A memory of very many units that no one has to store."""

    def __init__(self, count: int) -> None:
        text = unit(("en", "hello " * 20), ("de", "hallo " * 20)).encode()
        self.parts = iter([HEAD.encode(), *[text * 100] * (count // 100), TAIL.encode()])

    def read(self, size: int = -1) -> bytes:
        return next(self.parts, b"")


def test_memory_does_not_grow_with_the_file() -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        assert sum(1 for _ in read_units(Endless(count), "endless")) == count
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(2000) < 1.3 * peak(200)


# PO

PO = r"""# comment
msgid ""
msgstr ""
"Language: %s\n"
"Content-Type: text/plain; charset=%s\n"

msgid "Good \"day\""
msgstr "Guten „Tag“"

#, fuzzy
msgid "almost"
msgstr "fast"

msgid "not yet"
msgstr ""

msgid ""
"two\n"
"lines"
msgstr ""
"zwei\n"
"Zeilen"

msgid "%%d file"
msgid_plural "%%d files"
msgstr[0] "%%d Datei"
msgstr[1] "%%d Dateien"

#~ msgid "gone"
#~ msgstr "weg"
"""
PO_PAIRS = [("Guten „Tag“", 'Good "day"'), ("zwei Zeilen", "two lines")]
PLURAL = [("%d Datei", "%d file"), ("%d Dateien", "%d files")]


def write_po(path: Path, language: str = "de", charset: str = "utf-8", text: str = PO) -> Path:
    return written.write(
        path, (text % (language, charset)).encode(charset.replace("CHARSET", "utf-8"))
    )


@pytest.mark.parametrize(
    ("name", "header", "charset", "language"),
    [
        ("django.po", "de", "utf-8", "de"),
        ("de.po.gz", "", "CHARSET", "de"),
        ("app-de_AT.po", "", "cp1252", "de"),
        ("locale/de_AT/LC_MESSAGES/app.po", "", "utf-8", "de"),
        ("xx.po", "de-AT", "utf-8", "de"),
        ("app.de.po", "zh_Hans", "utf-8", "zh"),
    ],
)
def test_catalogues_of_translated_entries(
    tmp_path: Path,
    name: str,
    header: str,
    charset: str,
    language: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_po(tmp_path / name, header, charset)
    with caplog.at_level(logging.INFO, "dap.text.tmx_po"):
        assert read(path, language) == PO_PAIRS + PLURAL
    assert f"{path}: entries left out: 1 fuzzy, 1 obsolete, 1 untranslated" in caplog.text


def test_catalogues_in_a_folder_and_for_another_target(tmp_path: Path) -> None:
    write_po(tmp_path / "a.po", "de")
    write_po(tmp_path / "b.po", "sw")
    write_po(tmp_path / "c.po", "en-GB")
    assert list(find_bitext(tmp_path)) == ["de", "sw"]
    with pytest.raises(ValueError, match=r"a\.po: tells no language that it pairs with 'fr'"):
        find_bitext(tmp_path / "a.po", target_language="fr")
    with pytest.raises(ValueError, match=r"c\.po: tells no language"):
        find_bitext(tmp_path / "c.po")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        (
            'msgid "a\u2028b\x85c\x0cd"\nmsgstr "e\u2029f\x0bg"\n',
            ("e\u2029f\x0bg", "a\u2028b\x85c\x0cd"),
        ),
        (
            'msgid "%d a"\nmsgid_plural "%d as"\nmsgstr[0] "1"\nmsgstr[1] "2"\nmsgstr[2] "форма"\n',
            ("форма", "%d as"),
        ),
    ],
)
def test_separators_of_unicode_end_no_line_and_the_last_of_three_plurals_is_general(
    text: str, pair: tuple[str, str], tmp_path: Path
) -> None:
    assert list(catalogue_pairs(str(written.write(tmp_path / "ru.po", text)))) == [(1, pair)]


def test_entries_know_their_lines(tmp_path: Path) -> None:
    numbered = catalogue_pairs(str(write_po(tmp_path / "de.po")))
    starts = [number for number, line in enumerate(PO.split("\n"), 1) if line.startswith('msgid "')]
    assert [number for number, *_ in numbered] == [starts[1], starts[4], starts[5], starts[5]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'msgid "a"\nmsgstr "\xff"\n', r"de\.po, line 2: not in its encoding utf-8"),
        (
            b'msgid "a"\nmsgstr "b"c"\n',
            r"de\.po: no PO file that can be read \(Syntax error \(line 2\)",
        ),
        (b"nonsense\n", r"Syntax error \(line 1\)"),
        (
            b'msgid ""\nmsgstr "charset=klingon"\n\nmsgid "a"\nmsgstr "b"',
            "unknown encoding: klingon",
        ),
    ],
)
def test_damaged_catalogues_are_named_with_the_line(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = written.write(tmp_path / "de.po", data)
    with pytest.raises(ValueError, match=message):
        read(path, "de")
