"""Silver links equal those of a plain EM, and word states are means of their tokens' states."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import LANGUAGES, synthetic_pairs

from dap_transformers.encoding.encoder import SentenceEncoder
from experiments import measure_alignment
from experiments.measure_alignment import measure, states_of_words
from experiments.reference import AlignedPair, link_pairs, reference, word_spans
from experiments.silver import ITERATIONS, NO_SOURCE, TENSION, align_words, generating_words

Text = list[list[str]]


def toy_text(pairs: int = 12) -> tuple[Text, Text]:
    """Return pairs of few words, with words left out and two empty sides."""
    rng = np.random.default_rng(0)
    source = [[f"s{i}" for i in rng.integers(0, 6, size=rng.integers(1, 6))] for _ in range(pairs)]
    target = [[f"t{word[1:]}" for word in words if rng.random() < 0.8] for words in source]
    return [*source, [], ["s1"]], [*target, ["t1", "t2"], []]


def naive_scores(source: Text, target: Text) -> list[list[list[float]]]:
    """Return, for each pair and target word, the scores of no source word and of each source word.

    Computed by EM in plain loops.
    """

    def prior(words: list[str], others: list[str], j: int) -> list[float]:
        weights = [
            math.exp(-TENSION * abs((j + 1) / len(others) - (i + 1) / len(words)))
            for i in range(len(words))
        ]
        return [NO_SOURCE] + [(1 - NO_SOURCE) * weight / sum(weights) for weight in weights]

    translation: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)

    def scores(x: list[str], y: list[str], j: int) -> list[float]:
        return [translation[word, y[j]] * p for word, p in zip(["", *x], prior(x, y, j))]

    for _ in range(ITERATIONS):
        counts, totals = defaultdict(float), defaultdict(float)
        for x, y in zip(source, target):
            for j, word in enumerate(y):
                found = scores(x, y, j)
                for i, other in enumerate(["", *x]):
                    counts[other, word] += found[i] / sum(found)
                    totals[other] += found[i] / sum(found)
        translation = {key: count / totals[key[0]] for key, count in counts.items()}
    return [[scores(x, y, j) for j in range(len(y))] for x, y in zip(source, target)]


def test_aligner_finds_the_best_source_words_of_a_plain_em() -> None:
    source, target = toy_text()
    found, expected = generating_words(source, target), naive_scores(source, target)
    assert [len(row) for row in found] == [len(words) for words in target]
    for row, scores in zip(found, expected):
        for chosen, of_word in zip(row, scores):
            assert of_word[chosen + 1] == pytest.approx(max(of_word), rel=1e-9)
    assert {-1, 0, 1} <= {int(i) for row in found for i in row}  # some words have no source


def test_both_directions_make_sure_and_possible_links() -> None:
    source, target = toy_text()
    forward, backward = generating_words(source, target), generating_words(target, source)
    for row, links in enumerate(align_words(source, target)):
        one = {(int(i), j) for j, i in enumerate(forward[row]) if i >= 0}
        other = {(i, int(j)) for i, j in enumerate(backward[row]) if j >= 0}
        assert [[tuple(link) for link in part] for part in links] == [
            sorted(one & other),
            sorted(one | other),
        ]
    assert len(align_words(source, target, 3)) == 3
    assert align_words([], []) == []
    with pytest.raises(ValueError, match="14 source and 3 target sentences"):
        align_words(source, target[:3])


def test_sure_links_join_words_that_the_text_has_often() -> None:
    rows = [("ka lo", "mi ne"), ("ka", "mi"), ("ka ru", "mi ta")]
    assert [pair.sure.tolist() for pair in link_pairs(rows, [], 3, 0)] == [
        [[0, 0]]
    ] * 3  # the others come once
    assert [pair.possible.tolist() for pair in link_pairs(rows, [], 1, 0)] == [[[0, 0], [1, 1]]]
    text = [("lo", "ne"), ("lo", "ne"), ("ru", "ta")]
    assert [pair.sure.tolist() for pair in link_pairs(rows, text, 1, 2)] == [[[0, 0], [1, 1]]]
    with pytest.raises(ValueError, match="4 pairs are asked for, the text has 3"):
        link_pairs(rows, [], 4, 0)


def test_words_cover_every_character_but_spaces() -> None:
    for sentence in (
        "L'eau n’est-elle  pas «froide»?",
        "हिन्दी में है।",
        "مَدْرَسَةٌ",
        "a_b\u00a05,3 %",
        "",
    ):
        spans = word_spans(sentence)
        covered = [sentence[i] for start, end in spans for i in range(start, end)]
        assert covered == [character for character in sentence if not character.isspace()]
        assert spans == sorted(spans)
    assert [("हिन्दी में")[slice(*span)] for span in word_spans("हिन्दी में")] == ["हिन्दी", "में"]


@pytest.mark.parametrize("prefix", ["", "query: "])
def test_word_states_are_means_over_the_tokens_of_each_word(
    tiny_bert_dir: Path, prefix: str
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", prefix)
    sentences = ["kaban xyzzy lo", "puban jumps kaban wxyz"]
    found = states_of_words(encoder, sentences)
    for text, states, tokens in zip(sentences, found, encoder.encode_tokens(sentences)):
        pieces = [
            encoder.tokenizer.tokenize(word) for word in text.split()
        ]  # Metaspace: no token spans two words
        parts = np.split(tokens, np.cumsum([len(word) for word in pieces])[:-1])
        letters = [
            [piece != "▁" for piece in word] for word in pieces
        ]  # a token of the space is in no word
        np.testing.assert_allclose(
            states, [part[own].mean(0) for part, own in zip(parts, letters)], atol=1e-6
        )
        assert max(map(sum, letters)) > 1


def test_equal_words_and_punctuation_do_not_count(tiny_bert_dir: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    diagonal = np.array([[0, 0], [1, 1], [2, 2]])
    numbers = measure(encoder, [AlignedPair("Ka lo !", "ka mi !", diagonal, diagonal)])
    assert (numbers["pairs"], numbers["reference links"], numbers["left out"]) == (1, 1, 2)
    with pytest.raises(ValueError, match="no link in 1 pair:"):
        measure(encoder, [AlignedPair("Ka lo !", "ka lo !", diagonal, diagonal)])


def test_report_of_the_command_and_links_that_are_kept(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = tmp_path / "links"
    report = tmp_path / "new" / "alignment.json"
    argv = f"--model_name_or_path {tiny_bert_dir} --pooling mean --data_dir {bitext_dir}"
    argv += f" --train_data {bitext_dir} --pairs 40 --links_dir {links}"
    argv = f"{argv} --output_file {report} --languages".split()
    measure_alignment.main([*argv, *LANGUAGES])
    made = json.loads(report.read_text())
    assert "SILVER" in made["protocol"]
    assert "SILVER" in capsys.readouterr().out
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    pairs = {code: synthetic_pairs(code) for code in LANGUAGES}
    linked = reference(pairs, [str(bitext_dir)], 40, 20000, str(tmp_path / "other links"))
    assert made["languages"] == {code: measure(encoder, linked[code]) for code in LANGUAGES}
    errors = [numbers["AER"] for numbers in made["languages"].values()]
    assert made["mean"]["AER"] == pytest.approx(np.mean(errors), abs=1e-3)
    kept = sorted(links.iterdir())
    assert [path.name[:3] for path in kept] == ["de-", "fr-", "sw-"]
    kept[0].write_text('{"pairs": [{"source": "x"}]}')
    with pytest.raises(SystemExit, match="does not hold links .* delete it"):
        measure_alignment.main([*argv, *LANGUAGES])


@pytest.mark.parametrize(
    ("code", "message"),
    [("zh", "zh: written without spaces between words"), ("tr", "tr: .* holds de fr sw only")],
)
def test_refused_languages(code: str, message: str, bitext_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        reference({code: [("x", "school")]}, [str(bitext_dir)], 1, 10, str(tmp_path))
