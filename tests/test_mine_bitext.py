"""The mining command from files to pairs and report, with a tiny real model."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import synthetic_pairs
from forked import run_two
from numpy.testing import assert_allclose
from written import lines_of, pairs_of, read_table
from written import write as write_text

import eval_retrieval
from dap_transformers.commands import mine_bitext as mine_command
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.files import read_json, write_json
from dap_transformers.mining.margin import PAIR, neighbourhoods, score_pairs
from dap_transformers.mining.mine_pairs import mine
from dap_transformers.mining.texts import (
    DistinctSentences,
    pair_table,
    read_known,
    write_pairs,
)
from dap_transformers.text.corpus import load_bitext

SOURCE, TARGET = map(list, zip(*synthetic_pairs("de", 40)))
TARGET.reverse()


def write(path: Path, lines: list[str]) -> Path:
    return write_text(path, lines_of(lines))


def line_pairs(table: pd.DataFrame) -> list[tuple[int, int]]:
    return list(zip(table.source_line, table.target_line))


def run(command: str) -> dict:
    return mine_command.run(command.split())


def main(command: str) -> None:
    mine_command.main(command.split())


@pytest.fixture
def model(tiny_bert_dir: Path) -> str:
    return f"--model {tiny_bert_dir} --pooling mean"


@pytest.fixture
def command(model: str, tmp_path: Path) -> str:
    """Return the command that mines the two texts."""
    texts = f"{write(tmp_path / 'a.de', SOURCE)} {write(tmp_path / 'a.en', TARGET)}"
    return f"{texts} {model} --output {tmp_path}/pairs.tsv"


def test_pairs_are_written_best_first_and_filtered_anew_without_encoding(
    command: str, tmp_path: Path
) -> None:
    made = run(command)
    rows = read_table(tmp_path / "pairs.tsv")
    assert 10 < len(rows) <= 40
    assert rows.source.tolist() == [SOURCE[line - 1] for line in rows.source_line]
    assert rows.target.tolist() == [TARGET[line - 1] for line in rows.target_line]
    assert rows.score.is_monotonic_decreasing

    counts = {"lines": 40, "empty": 0, "repeated": 0, "distinct": 40}
    assert made["source"] == {"file": "a.de"} | counts
    assert made["kept"] == made["candidates"] == len(rows)
    assert made["settings"]["data"] == ["a.de", "a.en"]
    assert read_json(tmp_path / "pairs.tsv.json") == made

    shards = sorted(tmp_path.glob("a.de-a.en.????????.embeddings/*/*.npy"))
    before = [path.stat().st_mtime_ns for path in shards]
    assert [path.parent.name[:11] for path in shards] == ["source.a.de", "target.a.en"]

    run(f"{command} --bf16")  # has vectors of its own
    run(f"{command} --in_order")  # so have groups
    lowest = rows.score[4] - 1e-5
    made = run(f"{command} --threshold {lowest} --output {tmp_path}/best.tsv")
    kept = read_table(tmp_path / "best.tsv")
    assert kept.equals(rows[rows.score >= lowest])
    assert made["kept"] == len(kept) < made["candidates"]
    assert [path.stat().st_mtime_ns for path in shards] == before


def test_given_pairs_are_scored_in_their_order(
    command: str, encoder: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap_transformers.mining.mine_pairs.VECTOR_BLOCK", 4)
    # line 10 is empty on one side, and line 11 repeats line 1
    source = [*SOURCE[:9], "", SOURCE[0]]
    target = [*TARGET[::-1][:9], "ban", TARGET[-1]]
    write(tmp_path / "a.de", source)
    write(tmp_path / "a.en", target)
    made = run(f"{command} --score_only")
    rows = read_table(tmp_path / "pairs.tsv")
    assert line_pairs(rows) == [(line, line) for line in [*range(1, 10), 11]]
    assert rows.target.tolist() == target[:9] + target[10:]
    assert made["candidates"] == 10
    assert made["settings"]["threshold"] is None

    vectors = encoder.encode(source[:9]), encoder.encode(target[:10])  # of distinct sentences
    pairs = np.array([*range(9), 0])
    expected = score_pairs(*vectors, pairs, pairs, neighbourhoods(*vectors))
    assert_allclose(rows.score, expected, atol=1e-5)


ODD = ['"', "'", '""', 'say "yes', "a, b", "#", "\\", "\u2028", " x ", "\t"]


@pytest.mark.parametrize("name", ["de-en.tsv", "de-en.TSV.XZ", "de-en.jsonl.gz", "de-en.parquet"])
def test_what_is_written_is_read_back_as_parallel_text(name: str, tmp_path: Path) -> None:
    odd = [f'{ODD[row % 10]}{row}{ODD[row % 7]} "{row}" ""' for row in range(300)]
    sentences = [*odd, '"a ""b"" c"']
    text = DistinctSentences(sentences)
    pairs = np.zeros(len(text), PAIR)
    pairs["source"] = np.arange(len(text))
    pairs["target"] = pairs["source"][::-1]
    write_pairs(pair_table(pairs, {"source": text, "target": text}), tmp_path / name)
    loaded = load_bitext(tmp_path / name, cache_dir=tmp_path)["de"]
    if "tsv" in name.lower():
        sentences = [sentence.replace("\t", " ") for sentence in sentences]
    assert pairs_of(loaded) == list(zip(sentences, sentences[::-1]))


def test_the_threshold_is_chosen_and_reported_and_the_function_finds_the_same(
    command: str, encoder: SentenceEncoder, tmp_path: Path
) -> None:
    shared = [source for source, _ in synthetic_pairs("de", 120, seed=5)]
    sides = [
        shared + [source for source, _ in synthetic_pairs("de", 60, seed=6)],
        shared + [target for _, target in synthetic_pairs("de", 60, seed=7)],
    ]
    for name, side in zip(("a.de", "a.en"), sides):
        write(tmp_path / name, side)
    made = run(command)
    choice = made["threshold_choice"]
    assert choice["table"][-1]["kept"] == made["candidates"]

    rows = read_table(tmp_path / "pairs.tsv")
    table = mine(*sides, encoder)
    assert made["kept"] == len(rows)
    assert line_pairs(rows) == line_pairs(table.to_pandas())
    assert_allclose(rows.score, table["score"], atol=2e-6)

    texts = [text for text, _ in synthetic_pairs("de", 30, seed=8)]
    known = ["English\tGerman", *(f"{text}\t{text}" for text in texts)]
    calibrated = run(f"{command} --calibrate {write(tmp_path / 'known.tsv', known)}")
    assert calibrated["threshold_choice"]["calibrated"]
    pairs = read_known(tmp_path / "known.tsv")
    assert len(pairs["known_source"]) == 30  # a header is no pair


def test_languages_of_a_translation_memory_are_codes_and_fit_the_scripts(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command += f" --output {tmp_path}/pairs.tmx --threshold none"
    for pair in ("German-English", 'd"e-en', "de"):
        with pytest.raises(UserError, match="two language codes"):
            run(f"{command} --pair {pair}")
    for pair in ("de_AT-en-US", "de-AT-en_US"):
        run(f"{command} --pair {pair}")
        assert "script" not in caplog.text
        text = (tmp_path / "pairs.tmx").read_text()
        assert text.count('xml:lang="de-AT"') == text.count('xml:lang="en-US"') > 0
    run(f"{command} --pair de-el")
    assert "a.en is not in the script of --pair's language el" in caplog.text
    assert "a.de is not" not in caplog.text


def test_an_index_states_its_recall(command: str, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    run(command)
    exact = line_pairs(read_table(tmp_path / "pairs.tsv"))
    assert run(f"{command} --index Flat")["recall_at_k"] == 1.0
    assert line_pairs(read_table(tmp_path / "pairs.tsv")) == exact
    assert 0.1 < run(f"{command} --index IVF8,Flat:nprobe=1")["recall_at_k"] < 1.0


def one_of_two(rank: int, command: str, evaluation: str, place: Path) -> None:
    """Run in one of two processes: write how many pairs were kept, and what was evaluated."""
    found = [run(command).get("kept")]
    found.append(eval_retrieval.run(evaluation.split()).get("hard_negatives"))
    write_json(found, place / f"found-{rank}")
    torch.distributed.destroy_process_group()


def test_processes_share_the_encoding_and_give_the_same_pairs_and_numbers(
    command: str, model: str, bitext_dir: Path, tmp_path: Path
) -> None:
    kept = run(command)["kept"]
    evaluation = f"{model} --data_dir {bitext_dir} --hard_negatives"
    numbers = eval_retrieval.run(evaluation.split())["hard_negatives"]
    run_two(one_of_two, f"{command} --output {tmp_path}/two.tsv", evaluation, tmp_path)
    assert read_json(tmp_path / "found-0") == [kept, numbers]
    assert read_json(tmp_path / "found-1") == [None, None]
    assert (tmp_path / "two.tsv").read_text() == (tmp_path / "pairs.tsv").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--threshold 9", "no pair scores so high"),
        ("more.en", r"not used .*more\.en"),
        ("--score_only --min_precision 0.9", "--min_precision has no effect on given pairs"),
        ("--index Flat --ray local", "--index and --ray do not go together"),
        ("--in_order --score_only", "--score_only has no effect on texts in order"),
        ("--output p.CSV", r"p\.CSV: give a name that ends in \.tsv"),
        ("--output p.parquet.gz", "give a name"),
        ("--output p.TMX", "two language codes"),
        ("--in_order --pair de", "two language codes"),
        ("--calibrate known", "known: 1 of the first 1 lines are bad"),
    ],
)
def test_unfit_arguments_end_the_command_in_one_line(
    change: str, message: str, command: str, here: Path
) -> None:
    write(here / "known", ["no tab"])
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main(f"{command} {change}")


@pytest.mark.parametrize("name", ["film.srt.gz", "memory.tmx", "a.jsonl", "de-en.tsv"])
def test_files_of_other_formats_are_not_read_as_lines(
    name: str, command: str, model: str, tmp_path: Path
) -> None:
    other = write_text(tmp_path / name, "1\n00:00:01,000 --> 00:00:02,000\tban\n")
    with pytest.raises(UserError, match=f"{name}: its lines are no sentences"):
        run(f"{other} {tmp_path}/a.en {model} --output {tmp_path}/pairs.tsv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\n \n", "none of its lines holds a sentence"),
        (b"ban\n", r"a\.de has 1 line, .*a\.en has 40"),
    ],
)
def test_unfit_texts_are_found_before_the_model_is_loaded(
    text: bytes, message: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / "a.de").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        run(f"{command} --score_only --model no-such-model")
