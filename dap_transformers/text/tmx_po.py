"""Read translation memories (TMX 1.4b) and PO files, the message catalogues of gettext.

A TMX file is read unit by unit, in bounded memory. In both formats a sentence may be wrapped: a
line break, with the blanks around it, then stands for one space.
"""

import codecs
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from xml.etree.ElementTree import Element, iterparse
from xml.sax.saxutils import escape

from dap_transformers.errors import UserError, reading, warn_once
from dap_transformers.languages import language_in
from dap_transformers.text.archives import open_file
from dap_transformers.text_keys import is_blank

if TYPE_CHECKING:
    import polib

#: What takes the place of a placeholder, and becomes a blank between two letters.
_GAP = "\ufffc"
#: Elements that hold codes of the original document (TMX 1.4b, content markup). They are left out,
#: with everything inside them: a `sub` within them is a text of its own, such as a footnote. Those
#: of formatting (`bpt`, `ept`, `it`) may stand within a word.
CODES = {"bpt": "", "ept": "", "it": "", "ph": _GAP, "ut": _GAP}
_BETWEEN_LETTERS = re.compile(rf"(?<=[^\W\d_]){_GAP}+(?=[^\W\d_])")

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MEMORY_HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<tmx version="1.4">
<header creationtool="dap-transformers" creationtoolversion="1" segtype="sentence"
 o-tmf="none" adminlang="en" srclang="{source}" datatype="plaintext"/>
<body>
"""
#: The number of a unit or line, and (source, target).
NumberedPair = tuple[int, tuple[str, str]]


def unwrap(text: str) -> str:
    """Replace line breaks, with the blanks and tabs around them, by single spaces.

    Line breaks, blanks and tabs at the start and the end are removed.

    >>> unwrap(" wrapped\\n      by an editor ")
    'wrapped by an editor'
    """
    parts = (part.strip(" \t") for part in re.split(r"[\r\n]", text))
    return " ".join(part for part in parts if part)


# ------------------------------------------------------------------------- translation memories


def memory_languages(path: str | Path, target: str) -> set[str]:
    """Return the languages of the texts beside a target text in a TMX file, which is read whole."""
    found: set[str] = set()
    with open_file(path) as stream:
        for unit in read_units(stream, str(path)):
            if target in unit:
                found.update(unit)
    return found - {target}


def memory_pairs(path: str, source: str, target: str) -> Iterator[NumberedPair]:
    """Yield (unit number, (source, target)) of each pair in a TMX file. Numbers start at 1.

    Within a unit, all source texts are paired with all target texts, except empty ones.
    """
    with open_file(path) as stream:
        for number, unit in enumerate(read_units(stream, path), 1):
            for pair in product(unit.get(source, ()), unit.get(target, ())):
                if not any(map(is_blank, pair)):
                    yield number, pair


def write_memory(
    pairs: Iterable[tuple[str, str]], languages: Sequence[str], output: BinaryIO
) -> None:
    """Write (source, target) pairs as a translation memory, TMX 1.4.

    Characters that XML does not allow are left out.

    Args:
        languages: codes of source and target.
    """
    source, target = (code.replace("_", "-") for code in languages)
    output.write(_MEMORY_HEAD.format(source=source).encode())
    for pair in pairs:
        output.write(b"<tu>")
        for language, text in zip((source, target), pair):
            segment = escape(_NOT_IN_XML.sub("", text))
            output.write(f'<tuv xml:lang="{language}"><seg>{segment}</seg></tuv>'.encode())
        output.write(b"</tu>\n")
    output.write(b"</body>\n</tmx>\n")


def read_units(stream: BinaryIO, name: str) -> Iterator[dict[str, list[str]]]:
    """Yield {language code: texts} for each translation unit (element `tu`) of a TMX file.

    Repeated texts of a unit are yielded once. The name is for error messages.
    """
    body = None
    for event, element in iterparse(stream, events=("start", "end")):
        tag = _local_name(element)
        if event == "start" and body is None and tag != "tmx":
            raise UserError(f"{name}: the root element is <{tag}>, expected <tmx>")
        if event == "start" and (body is None or tag == "body"):
            body = element
        elif event == "end" and tag == "tu":
            yield _texts_of_unit(element, name)
            body.clear()  # otherwise all units would stay in memory


def _texts_of_unit(unit: Element, name: str) -> dict[str, list[str]]:
    """Return {language code: texts} of a translation unit, without repeated texts."""
    found: dict[str, list[str]] = {}
    for variant in unit.iterfind("{*}tuv"):
        language = variant.get(_XML_LANG) or variant.get("lang")  # `lang` up to TMX 1.3
        segment = variant.find("{*}seg")
        if not language or segment is None:
            continue
        _remove_codes(segment)
        text = _BETWEEN_LETTERS.sub(" ", "".join(segment.itertext()))
        text = unwrap(text.replace(_GAP, ""))
        if not is_blank(text):  # a language without any is none of the file's
            texts = found.setdefault(language_in(name, language), [])
            texts += [text] if text not in texts else []
    return found


def _remove_codes(segment: Element) -> None:
    """Empty all elements of `CODES` within a segment. The text that follows them stays."""
    for element in segment.iter():
        name = _local_name(element)
        if name in CODES:
            tail = element.tail
            element.clear()
            element.text = CODES[name]
            element.tail = tail


def _local_name(element: Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


# ----------------------------------------------------------------------------------- catalogues


def catalogue_languages(path: str | Path) -> tuple[str, str]:
    """Return the languages of translations (or "") and originals in the header of a PO file."""
    header = _parse_po(path).metadata
    translation = header.get("Language", "")
    original = header.get("X-Source-Language") or "en"
    return translation and language_in(path, translation), language_in(path, original)


def catalogue_pairs(path: str, tells_fuzzy: bool = True) -> Iterator[NumberedPair]:
    """Yield (line number, (translation, original)) of each pair in a PO file. Lines start at 1.

    Fuzzy, obsolete and untranslated entries are left out. With `tells_fuzzy`, a warning counts the
    fuzzy ones.
    """
    catalogue = _parse_po(path)
    fuzzy = catalogue.fuzzy_entries()
    if fuzzy and tells_fuzzy:
        text = "%s: fuzzy entries left out: %d (msgattrib --clear-fuzzy accepts them)"
        warn_once(text, path, len(fuzzy))
    for entry in catalogue.translated_entries():
        line = max(1, entry.linenum)  # without a header, polib says 0 for the first entry
        for translation, original in _pairs_of_entry(entry):
            yield line, (unwrap(translation), unwrap(original))


def _pairs_of_entry(entry: "polib.POEntry") -> list[tuple[str, str]]:
    """Return the pairs (translation, original) of an entry.

    Of plural forms, the last one is taken, and of two also the singular. In languages with more
    forms, the first one does not always mean "one".
    """
    if not entry.msgid_plural:
        return [(entry.msgstr, entry.msgid)]
    forms = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)]
    plural = (forms[-1], entry.msgid_plural)
    if len(forms) == 2:
        return [(forms[0], entry.msgid), plural]
    return [plural]


def _parse_po(path: str | Path) -> "polib.POFile":
    """Parse a PO file in the encoding that its header declares. Default: UTF-8."""
    import polib

    with open_file(path) as stream:
        data = stream.read().removeprefix(codecs.BOM_UTF8)
    # polib would split a string at U+2028, but not a file.
    with reading(path), tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.po")
        copy.write_bytes(data)
        return polib.pofile(str(copy))
