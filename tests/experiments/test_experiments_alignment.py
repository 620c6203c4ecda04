"""Silver links against a plain EM, words and their states, and the commands from text to report and pictures."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import LANGUAGES, synthetic_pairs

from dap.encoding.encoder import SentenceEncoder
from experiments import alignment, figures
from experiments.alignment import measure, states_of_words
from experiments.reference import AlignedPair, link_pairs, reference, word_spans
from experiments.silver import ITERATIONS, NO_SOURCE, TENSION, align_words, generating_words

Text = list[list[str]]


def toy_text(pairs: int = 12) -> tuple[Text, Text]:
    """Pairs of few words, with words left out and two empty sides."""
    rng = np.random.default_rng(0)
    source = [[f"s{i}" for i in rng.integers(0, 6, size=rng.integers(1, 6))] for _ in range(pairs)]
    target = [[f"t{word[1:]}" for word in words if rng.random() < 0.8] for words in source]
    return [*source, [], ["s1"]], [*target, ["t1", "t2"], []]


def naive_scores(source: Text, target: Text) -> list[list[list[float]]]:
    """For each pair and target word the score of no source word and of every source word, by EM in loops."""

    def prior(words: list[str], others: list[str], j: int) -> list[float]:
        weights = [math.exp(-TENSION * abs((j + 1) / len(others) - (i + 1) / len(words))) for i in range(len(words))]
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
        assert [tuple(link) for link in links.sure] == sorted(one & other)
        assert [tuple(link) for link in links.possible] == sorted(one | other)
    assert len(align_words(source, target, 3)) == 3
    assert align_words([], []) == []
    with pytest.raises(ValueError, match="14 source and 3 target sentences"):
        align_words(source, target[:3])


def test_links_of_translations_word_by_word_are_the_diagonal() -> None:
    rows = synthetic_pairs("de")
    linked = link_pairs(rows[:50], rows[50:], 30, 150)
    diagonals = [{(i, i) for i in range(len(target.split()))} for _, target in rows[:30]]
    found = [set(map(tuple, pair.sure.tolist())) for pair in linked]
    right, wanted = sum(len(a & b) for a, b in zip(found, diagonals)), sum(map(len, diagonals))
    assert right == sum(map(len, found))
    assert right > 0.9 * wanted
    with pytest.raises(ValueError, match="51 pairs are asked for, the text has 50"):
        link_pairs(rows[:50], rows[50:], 51, 150)


def test_sure_links_join_words_that_the_text_has_often() -> None:
    rows = [("ka lo", "mi ne"), ("ka", "mi"), ("ka ru", "mi ta")]
    assert [pair.sure.tolist() for pair in link_pairs(rows, [], 3, 0)] == [[[0, 0]]] * 3  # the others come once
    assert [pair.possible.tolist() for pair in link_pairs(rows, [], 1, 0)] == [[[0, 0], [1, 1]]]


def test_words_cover_every_character_but_spaces() -> None:
    for sentence in ("L'eau n’est-elle  pas «froide»?", "हिन्दी में है।", "مَدْرَسَةٌ", "a_b\u00a05,3 %", ""):
        spans = word_spans(sentence)
        covered = [sentence[i] for start, end in spans for i in range(start, end)]
        assert covered == [character for character in sentence if not character.isspace()]
        assert spans == sorted(spans)
    assert [("हिन्दी में")[slice(*span)] for span in word_spans("हिन्दी में")] == ["हिन्दी", "में"]


@pytest.mark.parametrize("prefix", ["", "query: "])
def test_word_states_are_means_over_the_tokens_of_each_word(tiny_bert_dir: Path, prefix: str) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", prefix)
    sentences = ["kaban xyzzy lo", "puban jumps kaban wxyz"]
    found = states_of_words(encoder, sentences, [np.array(word_spans(text)) for text in sentences])
    for text, states, tokens in zip(sentences, found, encoder.encode_tokens(sentences)):
        pieces = [encoder.tokenizer.tokenize(word) for word in text.split()]  # Metaspace: no token spans two words
        parts = np.split(tokens, np.cumsum([len(word) for word in pieces])[:-1])
        letters = [[piece != "▁" for piece in word] for word in pieces]  # a token of the space is in no word
        np.testing.assert_allclose(states, [part[own].mean(0) for part, own in zip(parts, letters)], atol=1e-6)
        assert max(map(sum, letters)) > 1


def test_equal_words_and_punctuation_do_not_count(tiny_bert_dir: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    spans = np.array(word_spans("Ka lo !"))
    diagonal = np.array([[0, 0], [1, 1], [2, 2]])
    pair = AlignedPair("Ka lo !", "ka mi !", spans, spans, diagonal, diagonal)
    numbers = measure(encoder, [pair])
    assert (numbers["pairs"], numbers["reference links"], numbers["left out"]) == (1, 1, 2)
    same = AlignedPair("Ka lo !", "ka lo !", spans, spans, diagonal, diagonal)
    with pytest.raises(ValueError, match="no link in 1 pairs"):
        measure(encoder, [same])


def arguments(model: Path, data: Path, tmp_path: Path) -> list[str]:
    train = tmp_path / "train"
    train.mkdir()
    for code in LANGUAGES:
        text = "".join(f"{source}\t{target}\n" for source, target in synthetic_pairs(code, 150, seed=1))
        (train / f"{code}-en.tsv").write_text(text, encoding="utf-8")
    words = ["--model_name_or_path", model, "--pooling", "mean", "--train_data", train, "--data_dir", data]
    words += ["--pairs", "40", "--links_dir", tmp_path / "links", "--output_file", tmp_path / "new" / "alignment.json"]
    return [*map(str, words), "--languages", *LANGUAGES]


def test_report_of_the_command_and_links_that_are_kept(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tiny_bert_dir, bitext_dir, tmp_path)
    made = alignment.run(given)
    assert json.loads((tmp_path / "new" / "alignment.json").read_text()) == made
    assert "SILVER" in made["protocol"]
    assert "SILVER" in capsys.readouterr().out
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    pairs = {code: synthetic_pairs(code) for code in LANGUAGES}
    linked = reference(pairs, [str(tmp_path / "train")], 40, 20000)
    assert made["languages"] == {code: measure(encoder, linked[code]) for code in LANGUAGES}
    for name in alignment.ALIGNMENT:
        mean = np.mean([numbers[name] for numbers in made["languages"].values()])
        assert made["mean"][name] == pytest.approx(mean, abs=1e-3)
    kept = sorted((tmp_path / "links").iterdir())
    assert [path.name[:3] for path in kept] == ["de-", "fr-", "sw-"]
    again = alignment.run(given)
    assert (again["languages"], again["settings"]) == (made["languages"], made["settings"])
    kept[0].write_text('{"pairs": [{"source": "x"}]}')
    with pytest.raises(ValueError, match="does not hold links .* delete it"):
        alignment.run(given)


def test_refused_languages(tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path) -> None:
    train = [str(bitext_dir)]
    with pytest.raises(ValueError, match="zh: written without spaces between words"):
        reference({"zh": [("学校", "school")]}, train, 1, 10)
    with pytest.raises(ValueError, match="tr: .* holds de fr sw only"):
        reference({"tr": [("okul", "school")]}, train, 1, 10)


def test_pictures_of_two_models(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    given = ["--models", f"TR={tiny_bert_dir}", f"DAP={tiny_bert_dir}", "--data_dir", str(bitext_dir)]
    given += ["--output_dir", str(tmp_path / "figures"), "--cloud_language", "de", "--cloud_pairs", "10"]
    for units in ("words", "subwords"):
        paths = figures.run([*given, "--pair_language", "sw", "--pair_line", "2", "--units", units])
        assert [path.name for path in paths] == ["token_states.png", "alignment.png"]
        assert all(5_000 < path.stat().st_size < 200_000 for path in paths)
        printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("written")]
        assert [line.split(":")[0] for line in printed] == ["TR", "DAP"] * 2
        assert printed[2].partition(":")[2] == printed[3].partition(":")[2]
    with pytest.raises(ValueError, match="--pair_line 201: sw has lines 1 to 200"):
        figures.run([*given, "--pair_language", "sw", "--pair_line", "201"])
    with pytest.raises(ValueError, match="--models TR: give NAME=PATH"):
        figures.run(["--models", "TR", *given[3:]])
    with pytest.raises(ValueError, match="give two of NAME=PATH"):
        figures.run([*given[:2], *given[3:]])
