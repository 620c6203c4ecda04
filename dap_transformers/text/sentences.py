"""Read a text as sentences: one per line, out of paragraphs, or out of subtitles."""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import unescape
from itertools import filterfalse, pairwise
from typing import NamedTuple

from transformers.utils.versions import require_version

from dap_transformers.errors import UserError, reading
from dap_transformers.files import plain_suffix
from dap_transformers.languages import UNSPACED, base_language
from dap_transformers.text.archives import decoded_lines, read_sentences
from dap_transformers.text_keys import is_blank

logger = logging.getLogger(__name__)

#: A line of more bytes is rarely one sentence.
LONG_LINE = 500
#: Lines are taken for paragraphs if long ones hold more than this share of the text's bytes.
LONG_SHARE = 0.2
#: A text is wrapped if at least so many lines break at one width, and at least such a share of the
#: lines that count. These have `NARROW` columns or more, and no blank line follows them.
LEAST_WRAPPED = 15
WRAPPED_SHARE = 2 / 3
NARROW = 30
#: A line that fills this share of the width is joined to the next one.
FILLED = 0.7
#: Characters of which pysubs2 would make commands -> code points that are no characters.
HIDDEN = str.maketrans("{}", "\ufdd0\ufdd1")
#: Endings of the names of subtitles.
SUBTITLES = (".srt", ".vtt")
#: Opening quotation marks: any mark after a blank and before a word, « after a blank, those that
#: open a quotation in every language, and " after a sentence if an odd number of " follows it.
OPENING = re.compile(
    r"""(?<!\S)(?:["'“”„‟‘’‚«»‹›]+(?=[\w¿¡])|«)|[“‘「『《]+(?=\w)"""
    r"""|(?<=[。！？])"(?=\w[^"]*"(?:[^"]*"[^"]*")*[^"]*$)"""
)
#: Other quotation marks. ' counts only after the end of a sentence, else it is an apostrophe.
CLOSING = re.compile(r"""["“”‟«»‹›」』》]|(?<=[.!?])'""")
#: A letter or punctuation mark of a script without blanks between words.
_CHARACTER = f"[{UNSPACED}\u3000-\u303f\uff00-\uff60]"
#: Dashes, quotation marks and dots that such scripts share with others.
_MARKS = "[\u2010-\u2027]*"
#: What no line break may divide at the start of a line.
FIRST_WORD = re.compile(rf"{_CHARACTER}{{1,3}}|\S{{1,50}}")
#: A line break that does not stand for a blank.
BREAK_IN_WORD = re.compile(rf"({_CHARACTER}{_MARKS})\s*\n\s*(?={_MARKS}{_CHARACTER})")
SENTENCE_END = re.compile(r"[.!?…。！？।؟۔።།]\W*$")
INSTALL = "pip install 'dap-transformers[sentences]', or give one sentence per line"


class Sentence(NamedTuple):
    """A sentence and its place in a file.

    Attributes:
        line: the line, from 1, or the first of the lines or subtitles that were joined.
        number: which sentence of these lines or subtitles it is, from 1.
        time: when the first of these subtitles is shown, such as "0:01:02".
    """

    line: int
    text: str
    number: int = 1
    time: str | None = None


def read_translations(
    files: Sequence[str], languages: Sequence[str], split: bool | None = None
) -> list[list[Sentence]]:
    """Read translations of one text as sentences, in order. Texts that are split lose empty lines.

    Args:
        languages: codes of the languages, which are needed to split lines.
        split: whether to split lines into sentences. None splits all of the texts if one of them
            has paragraphs (`read_lines`).
    """
    found = [read_lines(path, join=split is not False) for path in files]
    texts = [lines for lines, _ in found]
    if split is None:
        split = any(has_paragraphs for _, has_paragraphs in found)
    if split:
        return [list(split_lines(*each)) for each in zip(texts, files, languages, strict=True)]
    return texts


def read_lines(path: str, join: bool = True) -> tuple[list[Sentence], bool]:
    """Return the lines or subtitles of a text, and whether they are paragraphs.

    The lines are paragraphs if they are subtitles, if the text was wrapped and is joined
    (`join_wrapped`), or if long lines (`LONG_LINE`) hold more than a fifth of its bytes.

    Args:
        join: whether to join the lines of wrapped text.
    """
    if plain_suffix(path) in SUBTITLES:
        return read_subtitles(path), True
    lines = [Sentence(*line) for line in enumerate(read_sentences(path), 1)]
    if join and (paragraphs := join_wrapped(lines)):
        logger.warning("%s is wrapped: the lines of each paragraph are joined and split", path)
        return paragraphs, True
    sizes = [len(line.text.encode()) for line in lines]
    return lines, sum(size for size in sizes if size > LONG_LINE) > LONG_SHARE * sum(sizes)


def split_lines(lines: Iterable[Sentence], path: str, language: str) -> Iterator[Sentence]:
    """Yield the sentences of the lines of a text, without blank ones."""
    with reading(path):
        require_version("sentencex>=1.0.32", INSTALL)
        from sentencex import get_sentence_boundaries
    if not language:
        raise UserError(f"{path}: its lines are split into sentences: name the languages by --pair")
    code = base_language(language)
    for line in lines:
        parts: list[str] = []
        for bound in get_sentence_boundaries(code, unpair_quotation_marks(line.text)):
            part = line.text[bound["start_index"] : bound["end_index"]]
            # A part of marks belongs to the sentence before it, and "1.2." to the one behind it.
            if parts and not (any(map(str.isalnum, part)) and any(map(str.isalpha, parts[-1]))):
                parts[-1] += part
            else:
                parts.append(part)
        for number, part in enumerate(filterfalse(is_blank, parts), 1):
            yield line._replace(text=part.strip(), number=number)


def join_wrapped(lines: Sequence[Sentence]) -> list[Sentence]:
    """Join the lines of each paragraph of a text that is wrapped, such as at 70 columns.

    A line breaks at a width if the line fits, but the line and the next word do not. Lines that end
    a sentence are not counted as breaks. A paragraph ends at a blank line, or at a line that is
    shorter than 70% of the width. So short headings, verses and items of lists stay unchanged.

    Returns:
        The paragraphs, or an empty list if the text is not wrapped.
    """
    breaks: Counter[int] = Counter()  # width -> lines that break there
    judged = 0
    for line, following in pairwise(lines):
        width = columns(line.text)
        if width < NARROW or is_blank(following.text):
            continue
        judged += 1
        if not SENTENCE_END.search(line.text):
            word = FIRST_WORD.match(following.text.strip())[0]
            breaks.update(range(width, width + columns(word) + 1))
    wrapped_at = max(breaks, key=breaks.get, default=0)
    if breaks[wrapped_at] < max(LEAST_WRAPPED, WRAPPED_SHARE * judged):
        return []

    joined: list[Sentence] = []
    continues = False
    for line in lines:
        if continues and not is_blank(line.text):
            text = BREAK_IN_WORD.sub(r"\1", f"{joined[-1].text}\n{line.text}")
            joined[-1] = joined[-1]._replace(text=re.sub(r"\s*\n\s*", " ", text))
        else:
            joined.append(line)
        continues = columns(line.text) >= FILLED * wrapped_at
    return joined


def columns(text: str) -> int:
    """Return the number of characters, wide ones (East Asian) twice, without blanks at the end."""
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text.rstrip())


def unpair_quotation_marks(text: str) -> str:
    """Replace opening quotation marks by "¿" and closing ones by "”".

    The text keeps its length, so that borders found in it hold for the original. sentencex takes
    all that stands between two partners for one sentence. It leaves "¿" with the sentence behind
    it, and "”" with the sentence before it.

    >>> unpair_quotation_marks('"Go! Go!" «Non.»')
    '¿Go! Go!” ¿Non.”'
    """
    return CLOSING.sub("”", OPENING.sub(lambda marks: "¿" * len(marks[0]), text))


def read_subtitles(path: str) -> list[Sentence]:
    """Read subtitles without tags, and join each one to the one before if that is unfinished.

    A subtitle is unfinished if it ends in a comma or the like, or in a letter that has a capital
    form. Languages without capital letters often have no full stops in subtitles.
    """
    with reading(path):
        require_version("pysubs2>=1.8", INSTALL)
        from pysubs2 import SSAFile, time

        number = "\n\n1\n"  # pysubs2 leaves out a last line that is a number
        text = "\n".join(decoded_lines(path)).lstrip() + number
        if text.startswith("WEBVTT"):
            # pysubs2 takes comments, names of cues and times within cues for text
            cues = re.findall(r"^.*-->.*(?:\n.+)*", text, re.M)
            text = "WEBVTT\n\n" + re.sub(r"<[\d:.]+>", "", number.join([*cues, ""]))
        text = re.sub(r"\{\\[^{}]*\}", "", text).translate(HIDDEN)
        kind = "vtt" if text.startswith("WEBVTT") else "srt"
        subtitles = SSAFile.from_string(text, format_=kind)
        if not any(subtitle.text for subtitle in subtitles):
            raise UserError(
                f"{path} holds no subtitle below a line such as 00:00:01,000 --> 00:00:02,000 (a "
                ".vtt file begins with WEBVTT)"
            )
    joined: list[Sentence] = []
    continues = False
    for number, subtitle in enumerate(subtitles, 1):
        text = subtitle.plaintext.translate({mark: sign for sign, mark in HIDDEN.items()})
        text = unescape(text).replace("\n", " ").strip()
        if continues:
            joined[-1] = joined[-1]._replace(text=f"{joined[-1].text} {text}")
        else:
            joined.append(Sentence(number, text, time=time.ms_to_str(subtitle.start)))
        last = text[-1:]
        continues = last.lower() != last.upper() or last in tuple(",;:-–")
    return joined
