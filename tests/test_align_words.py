"""The command that aligns words: files in every format, links, reference and refusals."""

from pathlib import Path

import pandas as pd
import pytest
from conftest import synthetic_pairs
from written import lines_of, read_table, write

from dap_transformers.alignment.word_alignment import align_words
from dap_transformers.commands import align_words as align_command
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import read_json

PAIRS = [*synthetic_pairs("de", 7), ('"quoted NA', 'a "quote" here')]
SOURCE, TARGET = map(list, zip(*PAIRS))


def run(command: str) -> dict:
    return align_command.run(command.split())


@pytest.fixture
def options(tiny_bert_dir: Path, tmp_path: Path) -> str:
    return f"--model {tiny_bert_dir} --output {tmp_path}/links.pharaoh"


@pytest.fixture
def texts(tmp_path: Path) -> str:
    write(tmp_path / "a.de", lines_of(SOURCE))
    write(tmp_path / "a.en", lines_of(TARGET))
    return f"{tmp_path}/a.de {tmp_path}/a.en"


@pytest.fixture
def command(texts: str, options: str) -> str:
    """Return the command that aligns two texts."""
    return f"{texts} --words spaces {options}"


@pytest.fixture
def expected(encoder: SentenceEncoder) -> list[str]:
    return [aligned.pharaoh() for aligned in align_words(encoder, SOURCE, TARGET, words="spaces")]


def test_every_format_has_the_links_of_the_function(
    command: str, expected: list, tmp_path: Path
) -> None:
    made = run(command)
    assert (tmp_path / "links.pharaoh").read_text().split("\n") == [*expected, ""]
    assert made == read_json(tmp_path / "links.pharaoh.json")
    assert (made["pairs"], made["settings"]["pooling"]) == (8, "mean of subwords")
    assert made["links"] == sum(len(each.split()) for each in expected) > 8

    run(f"{command} --output {tmp_path}/links.jsonl.gz")
    objects = pd.read_json(tmp_path / "links.jsonl.gz", lines=True)
    assert objects.pair.tolist() == list(range(1, 9))
    assert [" ".join(words) for words in objects.source] == SOURCE
    assert [" ".join(f"{i}-{j}" for i, j in links) for links in objects.links] == expected
    assert objects.cosines.map(len).tolist() == objects.links.map(len).tolist()

    run(f"{command} --output {tmp_path}/links.tsv")
    table = read_table(tmp_path / "links.tsv")
    assert len(table) == made["links"]
    for row in table.itertuples():
        assert SOURCE[row.pair - 1].split()[row.source_position] == row.source_word
        assert TARGET[row.pair - 1].split()[row.target_position] == row.target_word


def test_the_word_list_counts_the_links_of_the_table(command: str, tmp_path: Path) -> None:
    both = ["source_word", "target_word"]
    run(f"{command} --output {tmp_path}/links.tsv --lexicon {tmp_path}/words.tsv")
    table = read_table(tmp_path / "links.tsv")
    found = read_table(tmp_path / "words.tsv")
    assert len(found) == len(table[both].drop_duplicates())
    assert found.links.is_monotonic_decreasing
    for row in found.itertuples():
        source, target = table.source_word == row.source_word, table.target_word == row.target_word
        counts = (source & target).sum(), source.sum(), target.sum()
        assert (row.links, row.source_links, row.target_links) == counts
    run(f"{command} --lexicon {tmp_path}/few.tsv --min_count 2")
    frequent = found[found.links >= 2]
    assert 0 < len(frequent) < len(found)
    assert read_table(tmp_path / "few.tsv").equals(frequent)


@pytest.mark.parametrize(("name", "header"), [("news.de-en.tsv.gz", []), ("news.tsv", ["de\ten"])])
def test_parallel_text_keeps_a_line_for_each_of_its_lines_but_none_for_a_header(
    name: str, header: list, options: str, expected: list, tmp_path: Path
) -> None:
    rows = [f"{source}\t{target}" for source, target in PAIRS]
    rows.insert(2, "no tab")
    table = write(tmp_path / name, lines_of([*header, *rows, "\t"]))
    made = run(f"{table} --words spaces {options} --max_bad_lines 0.5")
    found = (tmp_path / "links.pharaoh").read_text().splitlines()
    assert found == [*expected[:2], "", *expected[2:], ""]
    assert made["pairs"] == 10


def test_punctuation_is_split_off_words(texts: str, options: str, tmp_path: Path) -> None:
    write(tmp_path / "a.de", "Caín, (el l'eau z.B. «¿qué?» हिन्दी -- $5.\n")
    write(tmp_path / "a.en", "Cain\n")
    run(f"{texts} {options} --output {tmp_path}/links.jsonl")
    [words] = pd.read_json(tmp_path / "links.jsonl", lines=True).source
    assert " ".join(words) == "Caín , ( el l'eau z.B . «¿ qué ?» हिन्दी -- $5 ."


def test_reference_gives_error_rate_precision_and_recall(
    texts: str, options: str, expected: list, tmp_path: Path
) -> None:
    gold = write(tmp_path / "same.talp", lines_of(expected))
    made = run(f"{texts} {options} --gold {gold}")
    assert made["settings"]["words"] == "spaces"
    assert (made["aer"], made["precision"], made["recall"]) == (0, 100, 100)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a.de a.en --language de", "give parallel text, whose language"),
        ("a.de a.en --output a.de", "would change the input"),
        ("a.de a.en --output p.parquet", "p.parquet: write .tsv"),
        ("a.de short", "differ in length, from line 8"),
        ("a.de a.en --gold short-gold", "has 1 lines, the text has 8 pairs"),
        ("a.de a.en --gold far-gold", "line 8 of the reference"),
        ("several", "there is text in de fr"),
        ("empty empty", "there is no sentence"),
    ],
)
def test_unfit_arguments_and_text_are_one_line(
    line: str, says: str, texts: str, options: str, here: Path
) -> None:
    given = {"short": lines_of(TARGET[:7]), "short-gold": "0-0\n", "empty": ""}
    given |= {"far-gold": "0-0\n" * 7 + "90-1\n"}
    given |= dict.fromkeys(("several/de-en.tsv", "several/fr-en.tsv"), "a\tb\n")
    for name, content in given.items():
        write(here / name, content)
    with pytest.raises(SystemExit, match=f"^error: .*{says}"):
        align_command.main(f"--words spaces {options} {line}".split())
    assert not (here / "links.pharaoh").exists()


def test_text_without_spaces_and_cut_sentences_are_warned_of(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.de", lines_of(["打开文件。"] * 7 + SOURCE[:1]))
    run(f"{command} --max_seq_length 4")
    assert "source sentences have no spaces between words" in caplog.text
    assert "target sentences" not in caplog.text
    assert "without a token, so without a link: raise --max_seq_length 4" in caplog.text
