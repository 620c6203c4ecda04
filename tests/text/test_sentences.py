"""Sentences of a text: paragraphs, speech, wrapped lines and the cues of subtitles."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import synthetic_pairs
from written import lines_of, write

from dap_transformers.errors import UserError
from dap_transformers.text.sentences import Sentence, read_translations


def read_text(path: Path | str, language: str, split: bool | None = None) -> list[Sentence]:
    """Return the sentences of one text."""
    [text] = read_translations([str(path)], [language], split)
    return text


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", '"I came.|I won."|Then he left.|\'Go!\'|"Ah."|"Oh."'),
        ("en", "‘I came,’ said Tom.|‘“Go!”|It’s Ann’s.’|The boys’ dog ran."),
        ("de", "„Ich kam.|Ich sah.“|Er ging.|»Nein.|Nie!«|Sie blieb."),
        ("fr", "« Je viens.|Je pars. »|Il partit.|L’homme dit : « Oui. »|Fin."),
        ("sv", "”Jag kom.|Jag såg.”|Han gick."),
        ("es", '«¡Ven!|¡Ya!»|"¿Por qué?|Porque sí."|Fue.'),
        ("ja", "「来た。|見た。」|彼は言った。|「帰る。」"),
        ("ja", '違う。|"来た。"|彼は言った。|"A" と "B"は違う。'),
        ("de", "1.2. Das Haus.|Es ist alt ... !|Ja."),
    ],
)
def test_a_speech_is_split_into_its_sentences(
    language: str, sentences: str, tmp_path: Path
) -> None:
    blank = "" if language == "ja" else " "
    path = write(tmp_path / "a.txt", sentences.replace("|", blank))
    found = [each.text for each in read_text(path, language, split=True)]
    assert found == sentences.split("|")


GERMAN = [f"Der Brief mit der Nummer {each} kam gestern aus der Stadt an." for each in range(40)]
CHINESE = [f"第 {each} 天他说：“我们……去看 Debian 的家吧。”" for each in range(40)]
JAPANESE = [f"手紙 {each} は{' Debian' * (each // 4)} の家から届いた。" for each in range(40)]
ENGLISH = [english for _, english in synthetic_pairs("de", 40)]
VERSES = [f"{first}, {second}," for first, second in pairwise(ENGLISH)]


def wrap(text: str) -> list[str]:
    """Wrap a text at 70 columns. In GBK, a character has as many bytes as columns."""
    lines = [""]
    for word in re.findall("[!-~]+|.", text):
        if len(f"{lines[-1]}{word}".encode("gbk")) > 70:
            lines.append("")
        lines[-1] += word
    return lines


def blocks_of(lines: list[str], size: int) -> list[list[str]]:
    return [lines[first : first + size] for first in range(0, len(lines), size)]


@pytest.mark.parametrize(
    ("language", "blank", "sentences"),
    [("de", " ", GERMAN), ("ja", "", JAPANESE), ("zh", "", CHINESE)],
)
def test_a_wrapped_text_is_split_into_its_sentences(
    language: str, blank: str, sentences: list, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["1. Wort", ""]
    starts = []
    for block in blocks_of(sentences, 5):
        starts += [len(lines) + 1] * 5
        lines += [*(f"  \u00a0 {line}" for line in wrap(blank.join(block))), ""]
    lines += ["Ein Vers", "Ein Ende"]
    path = write(tmp_path / "a.txt", lines_of(lines))
    first, *found, verse, end = read_text(path, language)
    assert (first.text, verse.text, end.text) == ("1. Wort", "Ein Vers", "Ein Ende")
    places = [(each.text, each.line, each.number) for each in found]
    assert places == list(zip(sentences, starts, [1, 2, 3, 4, 5] * 8, strict=True))
    assert "a.txt is wrapped" in caplog.text
    assert [each.text for each in read_text(path, "", split=False)] == lines
    with pytest.raises(UserError, match="--pair"):
        read_text(path, "")


@pytest.mark.parametrize(
    "blocks",
    [
        blocks_of(GERMAN, 4),
        blocks_of(VERSES, 4),
        blocks_of([f"{number}. Der Brief" for number in range(40)], 10),
    ],
    ids=["one sentence per line", "verses", "headings"],
)
def test_lines_of_other_texts_are_not_joined(blocks: list[list[str]], tmp_path: Path) -> None:
    lines = [line for block in blocks for line in [*block, ""]]
    path = write(tmp_path / "a.txt", lines_of(lines))
    assert [each.text for each in read_text(path, "")] == lines


def test_both_texts_are_split_if_one_has_paragraphs(tmp_path: Path) -> None:
    """A Cyrillic letter has two bytes. So only the Russian lines are long."""
    numbers = blocks_of(list(range(80)), 10)
    sides = {
        "de": [" ".join(f"Brief Nummer {each} kam gestern." for each in row) for row in numbers],
        "ru": [" ".join(f"Письмо под номером {each} пришло." for each in row) for row in numbers],
    }
    files = [str(write(tmp_path / code, lines_of(lines))) for code, lines in sides.items()]
    for text in read_translations(files, ["de", "ru"]):
        assert [each.line for each in text] == [1 + row // 10 for row in range(80)]
    unsplit = read_translations(files, ["", ""], split=False)
    assert [[each.text for each in text] for text in unsplit] == list(sides.values())


CUES = """WEBVTT - a film

STYLE
::cue { color: red }

NOTE the first
comment

opening scene
00:01.000 --> 00:02.000 align:start
<v Ann>Tom &amp; I are <00:00:01.500><c>here.</c>

NOTE Another.

2
00:00:03.000 --> 00:00:04.000
Dr. No, am
3. Mai

00:05.000 --> 00:06.000
1984
2001
"""


@pytest.mark.parametrize("name", ["film.vtt", "film.VTT", "film.vtt.gz"])
def test_only_the_text_of_cues_is_read(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, CUES)
    found = [(each.text, each.line, each.time) for each in read_text(path, "DE")]
    assert found == [
        ("Tom & I are here.", 1, "0:00:01"),
        ("Dr. No, am 3. Mai 1984 2001", 2, "0:00:03"),
    ]
    cue = "3\n00:00:01,000 --> 00:00:02,000\n{}\n1990\n\n"
    path = write(tmp_path / "a.srt", cue.format("In") + cue.format(r"{\an8}[Script Info] {a}\N"))
    assert [each.text for each in read_text(path, "en")] == [
        "In 1990",
        "[Script Info] {a}  1990",
    ]
