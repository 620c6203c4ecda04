"""Read a text as sentences: one per line, out of paragraphs, or out of subtitles."""

import itertools
import re
from collections.abc import Iterator
from html import unescape
from typing import NamedTuple

from transformers.utils.versions import require_version

from dap_transformers.errors import UserError, reading
from dap_transformers.files import plain_suffix
from dap_transformers.languages import base_language
from dap_transformers.text.archives import decoded_lines, read_sentences
from dap_transformers.text_keys import is_blank

#: A line of more bytes is rarely one sentence.
LONG_LINE = 500
#: Lines are taken for paragraphs if long ones hold more than this share of the text.
LONG_SHARE = 0.2
#: Endings of the names of subtitles.
SUBTITLES = (".srt", ".vtt")
#: Opening quotation marks: any mark before a word and behind a blank, a French one before a blank,
#: and those that open a quotation in every language.
OPENING = re.compile(r"""(?<!\S)(?:["'“”„‟‘’‚«»‹›]+(?=[\w¿¡])|«)|[“‘「『《]+(?=\w)""")
#: Other quotation marks. Apostrophes are none.
CLOSING = re.compile(r"""["“”‟«»‹›」』》]|(?<=[.!?])'""")
INSTALL = "pip install 'dap-transformers[sentences]', or give one sentence per line"


class Sentence(NamedTuple):
    """A sentence and its place in a file.

    Attributes:
        line: the line, from 1, or the number of the first of the subtitles that were joined.
        number: which sentence of the line, or of these subtitles, it is, from 1.
        time: when the first of these subtitles is shown, such as "0:01:02".
    """

    line: int
    text: str
    number: int = 1
    time: str | None = None


def read_text(path: str, language: str, split: bool | None = None) -> Iterator[Sentence]:
    """Yield the sentences of a text, in order. Empty lines are left out of what is split.

    Args:
        language: code of the text's language, which is needed to split lines.
        split: whether to split lines into sentences. None splits subtitles, and other lines if
            long ones (`LONG_LINE`) hold more than a fifth of the text.
    """
    is_subtitles = plain_suffix(path) in SUBTITLES
    if is_subtitles:
        lines = read_subtitles(path)
    else:
        lines = [Sentence(*line) for line in enumerate(read_sentences(path), 1)]
    if split is None:
        sizes = [len(line.text.encode()) for line in lines]
        long = sum(size for size in sizes if size > LONG_LINE)
        split = is_subtitles or long > LONG_SHARE * sum(sizes)
    if not split:
        yield from lines
        return

    with reading(path):
        require_version("sentencex>=1.0.32", INSTALL)
        from sentencex import get_sentence_boundaries
    if not language:
        raise UserError(f"{path}: its lines are split into sentences: name the languages by --pair")
    code = base_language(language)
    for line in lines:
        bounds = get_sentence_boundaries(code, unpair_quotation_marks(line.text))
        parts = (line.text[bound["start_index"] : bound["end_index"]] for bound in bounds)
        for number, part in enumerate(itertools.filterfalse(is_blank, parts), 1):
            yield line._replace(text=part.strip(), number=number)


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
        text = "\n".join(decoded_lines(path)) + number
        if text.startswith("WEBVTT"):
            # pysubs2 takes comments, names of cues and times within cues for text
            cues = re.findall(r"^.*-->.*(?:\n.+)*", text, re.M)
            text = "WEBVTT\n\n" + re.sub(r"<[\d:.]+>", "", number.join([*cues, ""]))
        subtitles = SSAFile.from_string(text)
    joined: list[Sentence] = []
    continues = False
    for number, subtitle in enumerate(subtitles, 1):
        text = unescape(subtitle.plaintext).replace("\n", " ").strip()
        if continues:
            joined[-1] = joined[-1]._replace(text=f"{joined[-1].text} {text}")
        else:
            joined.append(Sentence(number, text, time=time.ms_to_str(subtitle.start)))
        last = text[-1:]
        continues = last.lower() != last.upper() or last in tuple(",;:-–")
    return joined
