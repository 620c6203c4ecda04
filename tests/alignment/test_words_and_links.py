"""Words of sentences, their links with a tiny encoder, Pharaoh format and the heat map."""

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import load_encoder, synthetic_pairs
from naive import cosines
from numpy.testing import assert_allclose, assert_array_equal
from written import lines_of, write

from dap_transformers.alignment.heat_map import heat_map
from dap_transformers.alignment.links import align_tokens
from dap_transformers.alignment.pharaoh import format_links, parse_links, read_links
from dap_transformers.alignment.word_alignment import align_words
from dap_transformers.alignment.words import tokenizer_words, with_word_marks
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError

SOURCE, TARGET = map(list, zip(*synthetic_pairs("de", 6)))


def naive_states(encoder: SentenceEncoder, sentence: str) -> list[np.ndarray]:
    """Return the state of each word between spaces, by a loop over characters, in float64."""
    [states], [places] = encoder.encode_tokens([sentence])
    found = []
    position = 0
    for word in sentence.split(" "):
        characters = set(range(position, position + len(word)))
        rows = [row for row, span in enumerate(places.spans) if characters & set(range(*span))]
        found.append(states[rows].mean(0, np.float64))
        position += len(word) + 1
    return found


def test_words_have_the_cosines_of_a_plain_loop(encoder: SentenceEncoder) -> None:
    aligned = align_words(encoder, SOURCE, TARGET)
    for source, target, found in zip(SOURCE, TARGET, aligned, strict=True):
        assert (found.source, found.target) == (source.split(), target.split())
        sides = [np.array(naive_states(encoder, text)) for text in (source, target)]
        assert_allclose(found.similarity, cosines(*sides), atol=1e-6)
        assert found.links.tolist() == align_tokens(*sides)[0].tolist()


def test_words_that_are_cut_off_have_no_links(tiny_bert_dir: Path) -> None:
    short = load_encoder(tiny_bert_dir, "mean", max_seq_length=4)
    [cut, empty] = align_words(short, [SOURCE[0], ""], [TARGET[0], "a"])
    assert cut.without_state > 0
    assert cut.links.max() <= 1  # two tokens remain
    assert (empty.pharaoh(), empty.similarity.shape) == ("", (0, 1))


def test_words_of_a_tokenizer_and_marks_of_word_starts() -> None:
    text = "Er  lief, 他们在10点"
    spans = [(0, 2), (2, 6), (6, 8), (8, 9), (9, 12), (12, 13), (13, 14), (13, 15), (15, 16)]
    words = tokenizer_words(text, spans, [0, 1, 1, 2, 3, 3, 3, 3, 3])
    assert [text[slice(*word)] for word in words] == ["Er", "lief", ",", "他们", "在", "10", "点"]
    marked = with_word_marks("a  b ", [(0, 1), (1, 3), (3, 4), (4, 5)])
    assert marked[1:] == [(1, 4), (3, 4), (4, 5)]


def test_links_survive_pharaoh_format(tmp_path: Path) -> None:
    written = [np.empty((0, 2)), np.array([[7, 0], [12, 98]])]
    found = read_links(write(tmp_path / "links.gz", lines_of(map(format_links, written))))
    for links, each in zip(written, found, strict=True):
        assert_array_equal(each.sure, links)
        assert each.possible.shape == (0, 2)
    gold = parse_links("7\t1-1 2p3 1-1", first=1)
    assert (gold.sure.tolist(), gold.possible.tolist()) == ([[0, 0]], [[1, 2]])


@pytest.mark.parametrize(
    ("line", "says"), [("1-0", "counted from 1"), ("1:2", "'1:2' is no link"), ("-1-2", "no link")]
)
def test_lines_that_are_no_links_are_named(line: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"line 2: .*{says}"):
        read_links(write(tmp_path / "bad", f"1-1\n{line}\n"), first=1)


def test_a_sentence_in_place_of_a_list_is_refused(encoder: SentenceEncoder) -> None:
    with pytest.raises(ValueError, match="pass a list"):
        align_words(encoder, "one", ["a"])


def test_heat_map_has_all_words_and_cosines_and_frames_the_links(encoder: SentenceEncoder) -> None:
    [aligned] = align_words(encoder, ["<b>火</b> & Haus"], ["fire house now"])
    html = heat_map(aligned)
    assert "<b>" not in html
    assert re.findall(r'dir="auto">(.*?)</th>', html) == [
        *("fire", "house", "now"),
        *("&lt;b&gt;火&lt;/b&gt;", "&amp;", "Haus"),
    ]
    shown = [float(number) for number in re.findall(r">(-?\d\.\d\d)</td>", html)]
    assert_allclose(shown, aligned.similarity.ravel(), atol=0.0051)
    assert html.count('class="linked"') == len(aligned.links)
    [empty] = align_words(encoder, [""], ["a"])
    assert "<td class" not in heat_map(empty)
