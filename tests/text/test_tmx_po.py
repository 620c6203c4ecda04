"""Translation memories and catalogues: markup, variants, regions, damage and bounded memory."""

import io
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from written import folder_text, write

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


def memory(*units: str) -> str:
    return "".join([HEAD, *units, TAIL])


def read(*units: str) -> list[dict[str, list[str]]]:
    return list(read_units(io.BytesIO(memory(*units).encode()), "memory.tmx"))


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        ("plain &amp; &lt;b&gt; &#x10FFFF; &#233;", "plain & <b> \U0010ffff é"),
        ('<bpt i="1">&lt;b&gt;</bpt>Bold<ept i="1">&lt;/b&gt;</ept> face', "Bold face"),
        ("press <hi type='key'>Enter <hi>now</hi></hi>!", "press Enter now!"),
        ("<hi>a<ph>{0}</ph>b</hi><it pos='begin'>[</it>c<ut>\\n</ut><ph/>d", "a bc d"),
        ("wait<ph/>. <ph/>2<ph/>u", "wait. 2u"),
        ("see<ph>&lt;img alt='<sub>a tree</sub>'&gt;</ph> here", "see here"),
        ("<g>unknown</g> elements are <mrk>text</mrk>", "unknown elements are text"),
        ("\n    wrapped\n    by an editor\r\n  ", "wrapped by an editor"),
        (
            "<![CDATA[<b>]]>&#x2028;\u0085\u200fשלום\u0301 \u00a0",
            "<b>\u2028\u0085\u200fשלום\u0301 \u00a0",
        ),
    ],
)
def test_text_is_kept_and_codes_are_dropped(segment: str, text: str) -> None:
    assert read(unit(("en", segment), ("fr", "x"))) == [{"en": [text], "fr": ["x"]}]


def test_languages_with_regions_scripts_and_the_old_attribute() -> None:
    old = '<tu><tuv lang="DE-at"><seg>Jänner</seg></tuv><tuv><seg>of no language</seg></tuv></tu>'
    variants = [("EN-us", "color"), ("zh-Hans-CN", "颜色"), ("xh-ZA", "umbala"), ("cmn", "色")]
    found = read(unit(*variants), old)
    assert found == [{"en": ["color"], "zh": ["颜色", "色"], "xh": ["umbala"]}, {"de": ["Jänner"]}]


@pytest.mark.parametrize("name", ["memory.tmx", "en-it.tmx.gz"])
def test_each_source_text_of_a_unit_is_paired_with_each_visible_target_text(
    tmp_path: Path, name: str
) -> None:
    english = [("en-GB", "colour"), ("en-US", "color"), ("en", "&#160;&#8203;")]
    german = [("de", "Farbe"), ("de-AT", "Farbe"), ("de-CH", "Farb"), ("de", "<ph>a code</ph>")]
    text = memory(
        unit(*english, *german),
        unit(("de", "ohne Englisch"), ("fr", "sans anglais")),
        unit(("en", "red"), ("fr", "rouge")),
    )
    assert folder_text(write(tmp_path / name, text)) == {
        "de": "Farbe\tcolour\nFarbe\tcolor\nFarb\tcolour\nFarb\tcolor\n",
        "fr": "rouge\tred\n",
    }


def test_memory_does_not_grow_with_the_file() -> None:
    units = 100 * unit(("en", "hello " * 20), ("de", "hallo " * 20)).encode()

    def peak(hundreds: int) -> int:
        parts = iter([HEAD.encode(), *[units] * hundreds, TAIL.encode()])
        made_while_read = SimpleNamespace(read=lambda _: next(parts, b""))
        tracemalloc.start()
        assert sum(1 for _ in read_units(made_while_read, "memory")) == 100 * hundreds
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(20) < 1.3 * peak(2)


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
PO_PAIRS = """Guten „Tag“\tGood "day"
zwei Zeilen\ttwo lines
%d Datei\t%d file
%d Dateien\t%d files
"""


def write_po(path: Path, language: str = "de", charset: str = "utf-8") -> Path:
    return write(path, (PO % (language, charset)).encode(charset.replace("CHARSET", "utf-8")))


@pytest.mark.parametrize(
    ("name", "header", "charset", "language"),
    [
        ("django.po", "de", "utf-8", "de"),
        ("de.po.gz", "", "CHARSET", "de"),
        ("app-de_AT.po", "", "cp1252", "de"),
        ("locale/de_AT/LC_MESSAGES/app.po", "", "utf-8", "de"),
        ("app.de.po", "zh_Hans", "utf-8", "zh"),
        ("app-pt-br.po", "", "utf-8", "pt"),
        ("sr@latin.po", "", "utf-8", "sr"),
    ],
)
def test_translated_entries_of_a_catalogue_are_read(
    tmp_path: Path,
    name: str,
    header: str,
    charset: str,
    language: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_po(tmp_path / name, header, charset)
    assert folder_text(path) == {language: PO_PAIRS}
    assert f"{path}: fuzzy entries left out: 1" in caplog.text


def test_the_header_tells_the_languages_of_a_catalogue(tmp_path: Path) -> None:
    write_po(tmp_path / "a.po", "de")
    write_po(tmp_path / "b.po", r"sw\n" + '"\n"' + r"X-Source-Language: en_US")
    write_po(tmp_path / "c.po", "en-GB")
    write_po(tmp_path / "d.po", r"it\n" + '"\n"' + r"X-Source-Language: fr")
    assert list(find_bitext(tmp_path)) == ["de", "sw"]
    assert list(find_bitext(tmp_path, target_language="fr")) == ["it"]
    for name, target in (("a", "fr"), ("c", "en"), ("d", "en")):
        with pytest.raises(UserError, match=rf"{name}\.po.*'{target}'"):
            find_bitext(tmp_path / f"{name}.po", target_language=target)


FORMS = 'msgid "%d a"\nmsgid_plural "%d as"\nmsgstr[0] "1"\nmsgstr[1] "2"\nmsgstr[2] "форма"\n'


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        (
            'msgid "a\u2028b\x85c\x0cd"\nmsgstr "e\u2029f\x0bg"\n\nmsgid "h"\nmsgstr "i"\n',
            [(1, ("e\u2029f\x0bg", "a\u2028b\x85c\x0cd")), (4, ("i", "h"))],
        ),
        (FORMS, [(1, ("форма", "%d as"))]),  # of three forms, the first may not mean "one"
    ],
)
def test_separators_end_no_line_and_of_three_plural_forms_the_last_is_taken(
    tmp_path: Path, text: str, pairs: list
) -> None:
    path = write(tmp_path / "ru.po", text)
    assert list(catalogue_pairs(str(path))) == pairs
