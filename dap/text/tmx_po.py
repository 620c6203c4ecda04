"""Read translation memories (TMX 1.4b, unit by unit in bounded memory) and catalogues (PO).

A sentence may be wrapped in both: there a line break, with the blanks around it, is a space.
"""

import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import BinaryIO
from xml.etree.ElementTree import Element, ParseError, iterparse

import polib

from dap.errors import UserError
from dap.languages import base_language
from dap.text.archives import open_file

logger = logging.getLogger(__name__)

#: Elements that hold codes of the original document, not text, and end up in no sentence (TMX 1.4b, content markup).
#: A `sub` inside one of them is a text flow of its own (a footnote, an alternative text) and goes with it.
CODES = frozenset({"bpt", "ept", "it", "ph", "ut"})

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"


def one_line(text: str) -> str:
    """The text with its line breaks, and the blanks and tabs around them and at both ends, made one space each.

    >>> one_line(" wrapped\\n      by an editor ")
    'wrapped by an editor'
    """
    return " ".join(filter(None, (part.strip(" \t") for part in re.split(r"[\r\n]", text))))


# Translation memories


def memory_languages(path: str | Path, target: str) -> set[str]:
    """The languages that are beside the target language in some unit of a TMX file, which is read to its end."""
    with open_file(path) as stream:
        units = (unit for unit in read_units(stream, str(path)) if target in unit)
        return {language for unit in units for language in unit} - {target}


def memory_pairs(path: str, source: str, target: str) -> Iterator[tuple[int, tuple[str, str]]]:
    """(number of the unit, (source, target)): every variant of the source language with every one of the target's.

    The log counts the pairs left out because a segment is empty.

    Raises:
        ValueError: as `read_units` and `open_file`.
    """
    empty = 0
    with open_file(path) as stream:
        for number, unit in enumerate(read_units(stream, path), 1):
            for pair in product(unit.get(source, ()), unit.get(target, ())):
                if all(pair):
                    yield number, pair
                else:
                    empty += 1
    if empty:
        logger.info("%s: %d pairs left out: a segment is empty", path, empty)


def read_units(stream: BinaryIO, name: str) -> Iterator[dict[str, list[str]]]:
    """The text of each translation unit (`tu`), by language: one string a `tuv`, in order, equal ones once.

    The text inside `hi` and unknown elements is kept, that inside the `CODES` is not.

    Args:
        name: what errors call the stream.

    Raises:
        ValueError: not well-formed, cut short, or no TMX; with the line where XML knows it.
    """
    body = None
    try:
        for event, element in iterparse(stream, events=("start", "end")):
            tag = _local(element)
            if event == "start" and body is None and tag != "tmx":
                raise UserError(f"the root element is <{tag}>, expected <tmx>")
            if event == "start" and (body is None or tag == "body"):
                body = element
            elif event == "end" and tag == "tu":
                yield _texts(element)
                body.clear()  # else every unit read stays in memory
    except ParseError as error:
        line, column = error.position
        raise UserError(
            f"{name}, line {line}: damaged or truncated TMX ({error}); XML cannot be read past it: fetch or repair it"
        ) from error
    except (ValueError, LookupError) as error:  # also an encoding that Python does not know
        raise UserError(f"{name}: no TMX that can be read ({error})") from error


def _texts(unit: Element) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = {}
    for variant in unit.iterfind("{*}tuv"):
        language = variant.get(_XML_LANG) or variant.get("lang")  # `lang` up to TMX 1.3
        segment = variant.find("{*}seg")
        if not language or segment is None:
            continue
        for element in segment.iter():
            if _local(element) in CODES:
                tail = element.tail
                element.clear()
                element.tail = tail
        found.setdefault(base_language(language), {})[one_line("".join(segment.itertext()))] = None
    return {language: list(texts) for language, texts in found.items()}


def _local(element: Element) -> str:
    """The element's name without namespace."""
    return element.tag.rpartition("}")[2]


# Catalogues


def catalogue_language(path: str | Path) -> str | None:
    """The language that the header of a PO file names, as it names it; None where it names none."""
    with open_file(path) as stream:
        header = stream.read(4096).partition(b"\n\n")[0]
    found = re.search(rb'"Language: *([A-Za-z]{2,3})(?![A-Za-z])', header)
    return found and found[1].decode()


def catalogue_pairs(path: str) -> Iterator[tuple[int, tuple[str, str]]]:
    """(line, (translation, original)) of the translated entries of a PO file; the log counts the others.

    Fuzzy, obsolete and untranslated entries are left out. Of plural entries the general plural is taken, and the
    singular too where the language has two forms: with more, the first form is not always "one".

    Raises:
        ValueError: not the declared encoding or no PO, with the line.
    """
    with open_file(path) as stream:
        data = stream.read()
    left_out: Counter[str] = Counter()
    for entry in _parse_po(data, path):
        if not entry.translated():
            left_out[
                "obsolete" if entry.obsolete else "fuzzy" if entry.fuzzy else "untranslated"
            ] += 1
            continue
        pairs = [(entry.msgstr, entry.msgid)]
        if entry.msgid_plural:
            forms = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)]
            pairs = [(forms[0], entry.msgid)] * (len(forms) == 2) + [
                (forms[-1], entry.msgid_plural)
            ]
        for (
            translation,
            original,
        ) in pairs:  # polib calls the first entry's line 0 where no header precedes
            yield max(1, entry.linenum), (one_line(translation), one_line(original))
    if left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
        logger.info("%s: entries left out: %s", path, counts)


def _parse_po(data: bytes, name: str) -> polib.POFile:
    declared = re.search(rb"charset=([\w-]+)", data[:4096])
    charset = (
        declared[1].decode() if declared and declared[1] != b"CHARSET" else "utf-8"
    )  # templates say CHARSET
    try:
        data.decode(charset)
        with tempfile.NamedTemporaryFile(
            suffix=".po"
        ) as copy:  # a string polib would split at U+2028 too
            copy.write(data)
            copy.flush()
            return polib.pofile(copy.name, encoding=charset)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{name}, line {line}: not in its encoding {charset} ({error.reason}); repair it"
        ) from error
    except (OSError, LookupError) as error:
        reason = re.sub(r" in po file .*?\(line", " (line", str(error))
        raise UserError(f"{name}: no PO file that can be read ({reason}); repair it") from error
