"""The command that aligns words: files in every format, links, reference and refusals."""

import gzip
import json
from pathlib import Path

import pytest
from conftest import synthetic_pairs
from written import write

from dap_transformers.alignment.align import align_words
from dap_transformers.commands.align import run
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError

pd = pytest.importorskip("pandas")

PAIRS = [*synthetic_pairs("de", 7), ('"quoted NA', 'a "quote" here')]
SOURCE, TARGET = (list(side) for side in zip(*PAIRS, strict=True))


def lines(sentences: list[str]) -> str:
    return "".join(f"{sentence}\n" for sentence in sentences)


@pytest.fixture
def command(tiny_bert_dir: Path, tmp_path: Path) -> list[str]:
    """Return the command that aligns two texts."""
    files = [
        str(write(tmp_path / "a.de", lines(SOURCE))),
        str(write(tmp_path / "a.en", lines(TARGET))),
    ]
    return [*files, "--model", str(tiny_bert_dir), "--output", str(tmp_path / "links.pharaoh")]


@pytest.fixture
def expected(tiny_bert_dir: Path) -> list[str]:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    return [aligned.pharaoh() for aligned in align_words(encoder, SOURCE, TARGET)]


def test_every_format_has_the_links_of_the_function(
    command: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(command)
    assert (tmp_path / "links.pharaoh").read_text().split("\n") == [*expected, ""]
    assert made == json.loads((tmp_path / "links.pharaoh.json").read_text())
    assert made["pairs"] == 8
    assert made["links"] == sum(len(each.split()) for each in expected) > 8
    assert made["settings"]["pooling"] == "mean of subwords"
    assert f"{made['links']} links in 8 pairs" in capsys.readouterr().out

    run([*command[:-1], str(tmp_path / "links.jsonl.gz")])
    with gzip.open(tmp_path / "links.jsonl.gz", "rt", encoding="utf-8") as file:
        objects = list(map(json.loads, file))
    for number, (each, links) in enumerate(zip(objects, expected, strict=True), 1):
        assert each["pair"] == number
        assert each["source"] == SOURCE[number - 1].split()
        assert " ".join(f"{i}-{j}" for i, j in each["links"]) == links
        assert len(each["cosines"]) == len(each["links"])

    run([*command[:-1], str(tmp_path / "links.tsv")])
    table = pd.read_csv(tmp_path / "links.tsv", sep="\t", keep_default_na=False)
    assert len(table) == made["links"]
    for row in table.itertuples():
        assert objects[row.pair - 1]["source"][row.source_position] == row.source_word
        assert objects[row.pair - 1]["target"][row.target_position] == row.target_word


def test_parallel_text_keeps_a_line_for_each_of_its_lines(
    command: list[str], expected: list[str], tmp_path: Path
) -> None:
    rows = [f"{source}\t{target}" for source, target in PAIRS]
    rows.insert(2, "no tab")
    packed = write(tmp_path / "news.de-en.tsv.gz", lines([*rows, "\t"]))
    made = run([str(packed), *command[2:], "--max_bad_lines", "0.5"])
    found = (tmp_path / "links.pharaoh").read_text().splitlines()
    assert found == [*expected[:2], "", *expected[2:], ""]
    assert made["pairs"] == 10
    with pytest.raises(UserError, match="2 of the first 10 lines are bad"):
        run([str(packed), *command[2:]])


def test_lines_of_invisible_characters_have_no_words(command: list[str], tmp_path: Path) -> None:
    write(tmp_path / "a.de", lines(["\u200b", "kaban \u00ad", "\ufeff \u2060"]))
    write(tmp_path / "a.en", lines(["\u200b", "loder", "loder"]))
    made = run([*command[:-1], str(tmp_path / "links.jsonl")])
    objects = list(map(json.loads, (tmp_path / "links.jsonl").read_text().splitlines()))
    assert [len(each["links"]) for each in objects] == [0, 1, 0]
    assert (objects[0]["source"], objects[2]["source"]) == ([], [])
    assert made["links"] == 1


def test_reference_gives_error_rate_precision_and_recall(
    command: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = write(tmp_path / "same.talp", lines(expected))
    made = run([*command, "--gold", str(gold)])
    assert (made["aer"], made["precision"], made["recall"]) == (0, 100, 100)
    assert "AER 0.00, precision 100.00, recall 100.00" in capsys.readouterr().out

    # counted from 1, and one sure link of each pair is only a possible one
    changed = []
    for links in expected:
        pairs = [link.split("-") for link in links.split()]
        numbers = [f"{int(i) + 1}-{int(j) + 1}" for i, j in pairs]
        changed.append(" ".join([numbers[0].replace("-", "p"), *numbers[1:]]))
    gold = write(tmp_path / "from-one.talp", lines(changed))
    made = run([*command, "--gold", str(gold), "--gold_from", "1", "--method", "itermax"])
    assert made["recall"] == 100
    assert made["precision"] <= 100


def test_unfit_arguments_and_text_are_one_message(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cases = {
        "texts given: none": command[2:],
        "--language is for parallel text": [*command, "--language", "de"],
        "--output is missing": command[:-2],
        "p.parquet: links are written as": [*command[:-1], "p.parquet"],
        "--gold_from 2": [*command, "--gold_from", "2"],
        "--pooling": [*command, "--pooling", "mean"],
        "a.en ends after line 7": command,
        "would overwrite the input": [*command[:-1], command[0]],
        "has 1 lines, the text has 8 pairs": [*command, "--gold", "one"],
        "line 1: '0:1' is no link": [*command, "--gold", "no-links"],
        "no sure link": [*command, "--gold", "possible"],
        "line 8 of the reference": [*command, "--gold", "far"],
        "there is text in de fr": ["several", *command[2:]],
        "there is no sentence": ["empty", "empty", *command[2:]],
    }
    golds = {
        "one": "0-0\n",
        "no-links": "0:1\n" * 8,
        "possible": "0p0\n" * 8,
        "far": "0-0\n" * 7 + "90-1\n",
        "empty": "",
    }
    for name, content in golds.items():
        write(tmp_path / name, content)
    write(tmp_path / "several" / "de-en.tsv", "a\tb\n")
    write(tmp_path / "several" / "fr-en.tsv", "a\tb\n")
    for message, argv in cases.items():
        argv = [str(tmp_path / word) if word in [*golds, "several"] else word for word in argv]
        write(tmp_path / "a.en", lines(TARGET[:7] if "ends after" in message else TARGET))
        with pytest.raises(UserError, match=message):
            run(argv)
    assert not (tmp_path / "links.pharaoh").exists()

    write(tmp_path / "a.de", lines(["火车八点钟从车站出发前往北京。"] * 8))
    run([*command, "--max_seq_length", "4"])
    assert "8 of 8 pairs have no spaces between words: give --words tokenizer" in caplog.text
    assert "without a token, so without a link: raise --max_seq_length 4" in caplog.text
