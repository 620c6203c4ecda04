"""Translation memories and catalogues: markup, variants, regions, damage and bounded memory."""

import io
import logging
import tracemalloc
from pathlib import Path

import pytest
import written

from dap_transformers.errors import UserError
from dap_transformers.text.find import find_bitext
from dap_transformers.text.tmx_po import catalogue_pairs, read_units

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


def test_each_source_text_of_a_unit_is_paired_with_each_target_text(tmp_path: Path) -> None:
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
def test_the_content_of_a_memory_tells_the_languages_not_its_name(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / name, unit(("en", "yes"), ("fr", "oui")))
    assert read(tmp_path, "fr") == [("oui", "yes")]


def test_pairs_with_a_side_that_nobody_sees_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    texts = [unit(("en", "x"), ("de", f"{number}")) for number in range(3)]
    texts += [unit(("en", "<ph>only a code</ph>"), ("de", "y")), unit(("en", "x"), ("de", ""))]
    texts.append(unit(("en", "&#160;&#8203;"), ("de", "y")))
    assert len(read(write(tmp_path / "a.tmx", *texts), "de", max_bad_lines=0.0)) == 3
    assert "a.tmx: 3 pairs left out: a segment is empty" in caplog.text


class Endless(io.RawIOBase):
    """A translation memory of many units, made while it is read."""

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
        ("app.de.po", "zh_Hans", "utf-8", "zh"),
        ("sr@latin.po", "", "utf-8", "sr"),
    ],
)
def test_translated_entries_of_a_catalogue_are_read_and_the_others_counted(
    tmp_path: Path,
    name: str,
    header: str,
    charset: str,
    language: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_po(tmp_path / name, header, charset)
    with caplog.at_level(logging.INFO, "dap_transformers.text.tmx_po"):
        assert read(path, language) == PO_PAIRS + PLURAL
    assert f"{path}: entries left out: 1 fuzzy, 1 obsolete, 1 untranslated" in caplog.text


def test_catalogues_in_a_folder_and_for_another_target(tmp_path: Path) -> None:
    write_po(tmp_path / "a.po", "de")
    write_po(tmp_path / "b.po", "sw")
    write_po(tmp_path / "c.po", "en-GB")
    assert list(find_bitext(tmp_path)) == ["de", "sw"]
    with pytest.raises(UserError, match=r"a\.po.*'fr'"):
        find_bitext(tmp_path / "a.po", target_language="fr")
    with pytest.raises(UserError, match=r"c\.po"):
        find_bitext(tmp_path / "c.po")


def test_the_header_of_a_catalogue_is_found_after_a_long_comment(tmp_path: Path) -> None:
    text = '# charset=klingon "Language: xx\n' * 200 + PO % ("de", "cp1252")
    path = written.write(tmp_path / "app.po", text.encode("cp1252"))
    assert read(path, "de") == PO_PAIRS + PLURAL


def test_unicode_separators_do_not_end_a_line(tmp_path: Path) -> None:
    text = 'msgid "a\u2028b\x85c\x0cd"\nmsgstr "e\u2029f\x0bg"\n'
    path = written.write(tmp_path / "ru.po", text)
    assert list(catalogue_pairs(str(path))) == [(1, ("e\u2029f\x0bg", "a\u2028b\x85c\x0cd"))]


def test_of_three_plural_forms_only_the_last_one_is_taken(tmp_path: Path) -> None:
    text = 'msgid "%d a"\nmsgid_plural "%d as"\nmsgstr[0] "1"\nmsgstr[1] "2"\nmsgstr[2] "форма"\n'
    path = written.write(tmp_path / "ru.po", text)
    assert list(catalogue_pairs(str(path))) == [(1, ("форма", "%d as"))]


def test_entries_of_a_catalogue_have_their_line_numbers(tmp_path: Path) -> None:
    numbered = catalogue_pairs(str(write_po(tmp_path / "de.po")))
    starts = [number for number, line in enumerate(PO.split("\n"), 1) if line.startswith('msgid "')]
    assert [number for number, *_ in numbered] == [starts[1], starts[4], starts[5], starts[5]]
