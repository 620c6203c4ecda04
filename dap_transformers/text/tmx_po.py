"""Read translation memories (TMX 1.4b) and PO files, the message catalogues of gettext.

A TMX file is read unit by unit, in bounded memory. In both formats a sentence may be wrapped: a
line break, with the blanks around it, then stands for one space.
"""

import codecs
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from xml.etree.ElementTree import Element, ParseError, iterparse

from dap_transformers.errors import UserError, counted, refusals
from dap_transformers.languages import base_language, is_blank
from dap_transformers.text.archives import open_file

if TYPE_CHECKING:
    import polib

logger = logging.getLogger(__name__)

#: Elements that hold codes of the original document (TMX 1.4b, content markup). They are left out,
#: with everything inside them: a `sub` within them is a text of its own, such as a footnote.
CODES = frozenset({"bpt", "ept", "it", "ph", "ut"})

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
#: The strings of a PO file's header, and one string of them.
_HEADER = re.compile(
    rb'^[ \t]*msgid[ \t]+""\s+(?:(?:""|#[^\r\n]*)\s+)*'
    rb'msgstr((?:\s*"(?:[^"\\\r\n]|\\.)*")+)',
    re.MULTILINE,
)
_STRING = re.compile(rb'"((?:[^"\\\r\n]|\\.)*)"')

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
    """Return the source languages of a TMX file, by reading the whole file.

    These are the languages of texts beside a text of the target language.

    Args:
        path: the TMX file.
        target: the target language.

    Returns:
        Language codes without regions. The set is empty if no unit has a text in the target
        language.
    """
    found: set[str] = set()
    with open_file(path) as stream:
        for unit in read_units(stream, str(path)):
            if target in unit:
                found.update(unit)
    return found - {target}


def memory_pairs(path: str, source: str, target: str) -> Iterator[NumberedPair]:
    """Yield (unit number, (source, target)) of each pair in a TMX file. Numbers start at 1.

    Within a unit, each text of the source language is paired with each text of the target
    language. Pairs with an empty text are left out, and the log states their number.

    Args:
        path: the TMX file.
        source: the source language.
        target: the target language.
    """
    empty = 0
    with open_file(path) as stream:
        for number, unit in enumerate(read_units(stream, path), 1):
            for pair in product(unit.get(source, ()), unit.get(target, ())):
                if not any(map(is_blank, pair)):
                    yield number, pair
                else:
                    empty += 1
    if empty:
        logger.info("%s: %s left out: a segment is empty", path, counted(empty, "pair"))


def read_units(stream: BinaryIO, name: str) -> Iterator[dict[str, list[str]]]:
    """Yield {language code: texts} for each translation unit (element `tu`) of a TMX file.

    Repeated texts of a unit are yielded once. Text inside `hi` and unknown elements is kept. Text
    inside `CODES`, the elements for codes of the original document, is left out.

    Args:
        stream: a TMX file, opened for reading bytes.
        name: the file's name, for error messages.
    """
    body = None
    try:
        for event, element in iterparse(stream, events=("start", "end")):
            tag = _local_name(element)
            if event == "start" and body is None and tag != "tmx":
                raise UserError(f"{name}: the root element is <{tag}>, expected <tmx>")
            if event == "start" and (body is None or tag == "body"):
                body = element
            elif event == "end" and tag == "tu":
                yield _texts_of_unit(element, name)
                body.clear()  # otherwise all units would stay in memory
    except ParseError as error:
        line, _ = error.position
        raise UserError(
            f"{name}, line {line}: damaged or truncated TMX ({error}); fetch or repair it"
        ) from error
    except UserError:
        raise
    except (ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise UserError(f"{name}: no TMX that can be read ({error})") from error


def _texts_of_unit(unit: Element, name: str) -> dict[str, list[str]]:
    """Return {language code: texts} of a translation unit, without repeated texts.

    A variant (`tuv`) without a language or a segment is skipped. Text inside `CODES` is removed.
    """
    found: dict[str, list[str]] = {}
    for variant in unit.iterfind("{*}tuv"):
        language = variant.get(_XML_LANG) or variant.get("lang")  # `lang` up to TMX 1.3
        segment = variant.find("{*}seg")
        if not language or segment is None:
            continue
        _remove_codes(segment)
        text = unwrap("".join(segment.itertext()))
        with refusals(f"{name}, xml:lang"):
            code = base_language(language)
        texts = found.setdefault(code, [])
        if text not in texts:
            texts.append(text)
    return found


def _remove_codes(segment: Element) -> None:
    """Empty all elements within a segment that hold codes of the original document (`CODES`).

    The segment is changed in place. The text that follows such an element (`tail`) stays.
    """
    for element in segment.iter():
        if _local_name(element) in CODES:
            tail = element.tail
            element.clear()
            element.tail = tail


def _local_name(element: Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


# ----------------------------------------------------------------------------------- catalogues


def catalogue_language(path: str | Path) -> str | None:
    """Return the language that the header of a PO file states, or None if it states none."""
    code = _header_of(_read_po(path)).get("language")
    if not code:
        return None
    with refusals(f"{path}, Language"):
        return base_language(code)


def _read_po(path: str | Path) -> bytes:
    """Return the bytes of a PO file, unpacked and without a byte order mark."""
    with open_file(path) as stream:
        return stream.read().removeprefix(codecs.BOM_UTF8)


def _header_of(data: bytes) -> dict[str, str]:
    """Return the fields of a PO file's header, which is the entry with an empty `msgid`.

    The header is read as Latin-1, because one of its fields names the file's encoding.

    Returns:
        Values by the name of the field in small letters, such as "language". Empty if there is no
        header.
    """
    entry = _HEADER.search(data)
    if not entry:
        return {}
    text = b"".join(_STRING.findall(entry[1])).decode("latin-1")
    fields = {}
    for line in text.split("\\n"):
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    return fields


def catalogue_pairs(path: str) -> Iterator[NumberedPair]:
    """Yield (line number, (translation, original)) of each pair in a PO file. Lines start at 1.

    An entry with plural forms may give two pairs. Fuzzy, obsolete and untranslated entries are
    left out, and the log states their number.
    """
    left_out: Counter[str] = Counter()
    for entry in _parse_po(_read_po(path), path):
        if entry.translated():
            line = max(1, entry.linenum)  # without a header, polib says 0 for the first entry
            for translation, original in _pairs_of_entry(entry):
                yield line, (unwrap(translation), unwrap(original))
        elif entry.obsolete:
            left_out["obsolete"] += 1
        elif entry.fuzzy:
            left_out["fuzzy"] += 1
        else:
            left_out["untranslated"] += 1

    if left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
        logger.info("%s: entries left out: %s", path, counts)


def _pairs_of_entry(entry: "polib.POEntry") -> list[tuple[str, str]]:
    """Return the pairs (translation, original) of an entry.

    For an entry with plural forms these are the last form and, in languages with two forms, also
    the singular. In languages with more forms, the first one does not always mean "one".
    """
    if not entry.msgid_plural:
        return [(entry.msgstr, entry.msgid)]
    forms = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)]
    plural = (forms[-1], entry.msgid_plural)
    if len(forms) == 2:
        return [(forms[0], entry.msgid), plural]
    return [plural]


def _parse_po(data: bytes, name: str) -> "polib.POFile":
    """Parse the content of a PO file in the encoding that its header declares. Default: UTF-8."""
    import polib

    charset = "utf-8"
    declared = re.search(r"charset=([^;\s]+)", _header_of(data).get("content-type", ""))
    if declared and declared[1] != "CHARSET":  # templates say CHARSET
        charset = declared[1]
    try:
        data.decode(charset)
        # polib would split a string at U+2028, but not a file.
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy.po")
            copy.write_bytes(data)
            return polib.pofile(str(copy), encoding=charset)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{name}, line {line}: not in its encoding {charset} ({error.reason}); repair it"
        ) from error
    except (LookupError, UnicodeError) as error:  # also of codecs that are not of text
        raise UserError(
            f"{name}: its header names the unknown charset {charset[:80]!r}; repair it"
        ) from error
    except OSError as error:
        reason = re.sub(r" in po file .*?\(line", " (line", str(error))
        raise UserError(f"{name}: no PO file that can be read ({reason}); repair it") from error
