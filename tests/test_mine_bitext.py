"""The mining command from files to pairs and report, with a tiny real model."""

import gzip
import json
import lzma
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import written
from conftest import save, synthetic_pairs
from forked import run_two
from written import full_disk

import eval_retrieval
from dap_transformers.commands.mine import main, run
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.mining.distinct import DistinctSentences
from dap_transformers.mining.margin import MinedPairs, margin_scores
from dap_transformers.mining.mine import mine
from dap_transformers.mining.texts import MiningTask, TextSide, require_writable, write_pairs

PAIRS = synthetic_pairs("de", 40)
SOURCE = [source for source, _ in PAIRS]
TARGET = [target for _, target in reversed(PAIRS)]


class Row(NamedTuple):
    """A row of the output."""

    score: float
    source: str
    target: str
    source_line: int
    target_line: int

    @property
    def lines(self) -> tuple[int, int]:
        return self.source_line, self.target_line


def write(path: Path, lines: list[str]) -> str:
    return str(written.write(path, "".join(f"{line}\n" for line in lines)))


def read(path: Path) -> list[Row]:
    """Read a written file, in which every row must have five columns."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    rows = []
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        assert file.readline() == "score\tsource\ttarget\tsource_line\ttarget_line\n"
        for line in file:
            score, source, target, source_line, target_line = line.rstrip("\n").split("\t")
            rows.append(Row(float(score), source, target, int(source_line), int(target_line)))
    return rows


@pytest.fixture
def command(tiny_bert_dir: Path, tmp_path: Path) -> list[str]:
    """Return the command that mines the two texts."""
    files = [write(tmp_path / "a.de", SOURCE), write(tmp_path / "a.en", TARGET)]
    model = ["--model", str(tiny_bert_dir), "--pooling", "mean"]
    return [*files, *model, "--output", str(tmp_path / "pairs.tsv")]


def test_pairs_are_written_best_first_with_their_lines(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(command)
    rows = read(tmp_path / "pairs.tsv")
    assert 10 < len(rows) <= 40
    for row in rows:
        assert row.source == SOURCE[row.source_line - 1]
        assert row.target == TARGET[row.target_line - 1]
    scores = [row.score for row in rows]
    assert scores == sorted(scores, reverse=True)

    counts = {"lines": 40, "empty": 0, "repeated": 0, "distinct": 40}
    assert made["source"] == {"file": "a.de"} | counts
    assert made["kept"] == made["candidates"] == len(rows)
    assert made["settings"]["margin"] == "ratio"
    assert made["settings"]["data"] == [Path(text).name for text in command[:2]]
    assert made["protocol"] == "bitext mining by margin over nearest neighbours"
    assert made["recall_at_k"] is None
    assert json.loads((tmp_path / "pairs.tsv.json").read_text()) == made
    assert f"{len(rows)} pairs kept of {len(rows)} candidates" in capsys.readouterr().out


def test_compressed_texts_give_the_same_pairs_compressed(
    command: list[str], tmp_path: Path
) -> None:
    made = run(command)
    packed = [write(tmp_path / "b.de.gz", SOURCE), write(tmp_path / "b.en.xz", TARGET)]
    again = run([*packed, *command[2:-1], str(tmp_path / "new" / "b.tsv.gz")])
    assert read(tmp_path / "new" / "b.tsv.gz") == read(tmp_path / "pairs.tsv")
    assert made["settings"]["text"] == again["settings"]["text"]
    write(tmp_path / "a.en", [*TARGET[1:], TARGET[0]])
    assert run(command)["settings"]["text"] != made["settings"]["text"]


def test_batches_and_shards_do_not_change_the_pairs(command: list[str], tmp_path: Path) -> None:
    run([*command[:-1], str(tmp_path / "one.tsv"), "--token_budget", "1"])
    run([*command[:-1], str(tmp_path / "two.tsv"), "--token_budget", "5000", "--shard_size", "7"])
    one = read(tmp_path / "one.tsv")
    two = read(tmp_path / "two.tsv")
    assert [row.lines for row in one] == [row.lines for row in two]
    scores = [row.score for row in one]
    np.testing.assert_allclose(scores, [row.score for row in two], atol=3e-6)


def test_a_second_run_with_another_output_encodes_nothing_and_says_so(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*command, "--shard_size", "16"])
    folder = next(tmp_path.glob("a.de-a.en.*.embeddings"))
    shards = sorted(folder.glob("*/*.npy"))
    before = [path.stat().st_mtime_ns for path in shards]
    assert [path.parent.name for path in shards] == ["source.a.de"] * 3 + ["target.a.en"] * 3
    capsys.readouterr()
    another = [*command[:-1], str(tmp_path / "b.tsv"), "--top_n", "3"]
    run([*another, "--shard_size", "16", "--retrieval", "intersection"])
    assert f"vectors of an earlier run reused: 6 of 6 shards in {folder}" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in shards] == before
    assert len(read(tmp_path / "b.tsv")) == 3


def test_a_threshold_keeps_the_better_pairs(command: list[str], tmp_path: Path) -> None:
    run(command)
    rows = read(tmp_path / "pairs.tsv")
    threshold = rows[4].score - 1e-5
    made = run([*command, "--threshold", str(threshold)])
    kept = read(tmp_path / "pairs.tsv")
    assert kept == [row for row in rows if row.score >= threshold]
    assert made["kept"] == len(kept) < made["candidates"]


def test_empty_and_repeated_lines_are_counted_and_left_out(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command)
    clean = read(tmp_path / "pairs.tsv")
    write(tmp_path / "a.de", ["", SOURCE[0], SOURCE[0], *SOURCE[1:], " ", SOURCE[5]])
    made = run(command)
    counts = {"lines": 44, "empty": 2, "repeated": 2, "distinct": 40}
    assert made["source"] == {"file": "a.de"} | counts
    assert f"{command[0]}: 44 lines, 2 empty, 2 repeated, 40 sentences" in capsys.readouterr().out
    expected = []
    for row in clean:
        moved_by = 1 if row.source_line == 1 else 2
        expected.append(row._replace(source_line=row.source_line + moved_by))
    assert read(tmp_path / "pairs.tsv") == expected


def test_tabs_become_spaces_and_carriage_returns_are_refused(
    command: list[str], tmp_path: Path
) -> None:
    write(tmp_path / "a.de", [f"{line[:3]}\t{line[3:]}\tban" for line in SOURCE])
    run(command)
    for row in read(tmp_path / "pairs.tsv"):
        line = SOURCE[row.source_line - 1]
        assert row.source == f"{line[:3]} {line[3:]} ban"
    write(tmp_path / "a.de", [*SOURCE[:6], "ka\rban", *SOURCE[6:]])
    with pytest.raises(ValueError, match=r"a\.de, line 7: carriage return at offset 2"):
        run(command)


def test_on_a_full_disk_it_keeps_the_old_pairs_and_continues_once_there_is_room(
    command: list[str], tmp_path: Path
) -> None:
    run(command)
    before = (tmp_path / "pairs.tsv").read_bytes()
    message = rf"^error: {tmp_path}/(pairs|a\.de-)\S+.*: the disk is full \(.*make room"
    with full_disk(100), pytest.raises(SystemExit, match=message):
        main([*command, "--top_n", "2"])
    assert (tmp_path / "pairs.tsv").read_bytes() == before
    assert not list(tmp_path.glob(".pairs*"))

    (tmp_path / "pairs.tsv").unlink()
    shutil.rmtree(next(tmp_path.glob("*.embeddings")))
    for size in (500, 1500, 4000):  # bytes that a file may have
        with full_disk(size), pytest.raises(SystemExit, match=message):
            main(command)
    run(command)
    assert (tmp_path / "pairs.tsv").read_bytes() == before


def test_given_pairs_are_scored_in_their_order(
    command: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    # line 10 is empty on one side, and line 11 repeats line 1
    source = [*SOURCE[:9], "", SOURCE[0]]
    target = [*TARGET[::-1][:9], "ban", TARGET[-1]]
    write(tmp_path / "a.de", source)
    write(tmp_path / "a.en", target)
    made = run([*command, "--score_only"])
    rows = read(tmp_path / "pairs.tsv")
    filled = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert [(row.source, row.target) for row in rows] == [(source[i], target[i]) for i in filled]
    assert [row.lines for row in rows] == [(i + 1, i + 1) for i in filled]
    assert made["candidates"] == 10
    assert made["protocol"] == "margin of given pairs over nearest neighbours"

    # compare the scores with the formula
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    a = encoder.encode(source[:9])  # distinct sentences only
    b = encoder.encode(target[:10])
    similar = (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T
    source_means = np.sort(similar, axis=1)[:, -4:].mean(1)
    target_means = np.sort(similar.T, axis=1)[:, -4:].mean(1)
    expected = margin_scores(np.diag(similar), source_means, target_means[:9])
    scores = [row.score for row in rows]
    np.testing.assert_allclose(scores, [*expected, expected[0]], atol=1e-5)

    run([*command, "--score_only", "--top_n", "2"])
    best = sorted(rows, key=lambda row: -row.score)[:2]
    assert read(tmp_path / "pairs.tsv") == sorted(best, key=lambda row: row.source_line)


def test_every_reader_gets_every_row_of_every_format(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    odd = ['"', "'", '""', 'say "yes', "a, b", "#", "\\", "\u2028", " x ", "\t"]
    sentences = [f"{odd[row % 10]}{row}{odd[row % 7]}" for row in range(5000)]
    side = TextSide(Path("a"), DistinctSentences(sentences))
    lines = np.arange(5000)
    pairs = MinedPairs(np.linspace(2, 1, 5000), lines, lines[::-1])
    readers = {
        "p.tsv": (
            lambda path: pandas.read_csv(path, sep="\t").to_dict("list"),
            lambda path: polars.read_csv(path, separator="\t").to_dict(as_series=False),
        ),
        "p.tsv.gz": (lambda path: pandas.read_csv(path, sep="\t").to_dict("list"),),
        "p.jsonl": (
            lambda path: pandas.read_json(path, lines=True).to_dict("list"),
            lambda path: polars.read_ndjson(path).to_dict(as_series=False),
        ),
        "p.parquet": (
            lambda path: pandas.read_parquet(path).to_dict("list"),
            lambda path: polars.read_parquet(path).to_dict(as_series=False),
        ),
    }
    for name, functions in readers.items():
        write_pairs(pairs, MiningTask(side, side), tmp_path / name)
        expected = sentences
        if "tsv" in name:
            expected = [sentence.replace("\t", " ") for sentence in sentences]
        for function in functions:
            found = function(tmp_path / name)
            assert list(found) == ["score", "source", "target", "source_line", "target_line"]
            assert found["source"] == expected, name
            assert found["target"] == expected[::-1], name
            assert found["source_line"] == list(range(1, 5001))
    with pytest.raises(UserError, match=r"p\.csv: pairs are written as \.tsv, \.jsonl"):
        require_writable("p.csv")


@pytest.fixture
def half_parallel(command: list[str], tmp_path: Path) -> list[str]:
    """Return the command with two longer texts that share half of their sentences."""
    shared = [source for source, _ in synthetic_pairs("de", 120, seed=5)]
    write(tmp_path / "a.de", shared + [source for source, _ in synthetic_pairs("de", 60, seed=6)])
    write(tmp_path / "a.en", shared + [target for _, target in synthetic_pairs("de", 60, seed=7)])
    return command


def test_the_threshold_is_chosen_printed_and_reported_and_the_function_finds_the_same(
    half_parallel: list[str],
    tiny_bert_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = run(half_parallel)
    choice = made["threshold_choice"]
    printed = capsys.readouterr().out
    assert f"threshold {choice['threshold']:.6f}, chosen by expected F1" in printed
    assert "threshold   pairs kept   estimated precision" in printed
    assert f"{tiny_bert_dir}: pooling mean, prefix ''" in printed
    assert made["settings"]["threshold"] == "auto"
    assert choice["table"][-1]["kept"] == made["candidates"]

    rows = read(tmp_path / "pairs.tsv")
    assert made["kept"] == len(rows)
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    sides = [Path(name).read_text().splitlines() for name in half_parallel[:2]]
    table = mine(*sides, encoder)
    assert table.num_rows == len(rows)
    for row, other in zip(rows, table.to_pylist(), strict=True):
        assert row.lines == (other["source_line"], other["target_line"])
        assert row.score == pytest.approx(other["score"], abs=2e-6)

    # known translations calibrate the estimate, and too few or broken ones are refused
    known = [f"{text}\t{text}" for text, _ in synthetic_pairs("de", 30, seed=8)]
    calibrate = ["--calibrate", write(tmp_path / "known.tsv", known)]
    assert run([*half_parallel, *calibrate])["kept"] > 0
    write(tmp_path / "known.tsv", known[:5])
    with pytest.raises(UserError, match="5 different pairs, at least 20 are needed"):
        run([*half_parallel, *calibrate])
    write(tmp_path / "known.tsv", ["no tab"])
    with pytest.raises(UserError, match="line 1: expected source, tab, target"):
        run([*half_parallel, *calibrate])


def test_an_index_states_its_recall(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("faiss")
    run(command)
    exact = [row.lines for row in read(tmp_path / "pairs.tsv")]
    made = run([*command, "--index", "Flat"])
    assert [row.lines for row in read(tmp_path / "pairs.tsv")] == exact
    assert made["recall_at_k"] == 1.0
    assert "Flat: recall@4 1.0000" in capsys.readouterr().out
    assert made["settings"]["index"] == "Flat"
    made = run([*command, "--index", "IVF8,Flat:nprobe=1"])
    assert 0.1 < made["recall_at_k"] < 1.0


def bucc(folder: Path, name: str, seed: int) -> None:
    """Write a split whose ten gold pairs have the same text on both sides.

    So any model finds them. They are lines 1 to 10 of the source and lines 21 to 30 of the target.
    """
    shared = synthetic_pairs("de", 60, seed)
    other = synthetic_pairs("fr", 30, seed)
    same = [text for text, _ in shared[:10]]
    source = same + [text for text, _ in other]
    target = [text for _, text in shared[20:40]] + same
    gold = [f"de-{seed}{i}\ten-{seed}{i + 20}" for i in range(10)]
    write(folder / f"de-en.{name}.de", [f"de-{seed}{i}\t{text}" for i, text in enumerate(source)])
    write(folder / f"de-en.{name}.en", [f"en-{seed}{i}\t{text}" for i, text in enumerate(target)])
    write(folder / f"de-en.{name}.gold", gold)


@pytest.fixture
def bucc_command(tiny_bert_dir: Path, tmp_path: Path) -> list[str]:
    """Return the command for BUCC, whose folder is still empty."""
    (tmp_path / "bucc").mkdir()
    argv = ["--bucc", str(tmp_path / "bucc"), "--pair", "de-en", "--margin", "absolute"]
    argv += ["--model", str(tiny_bert_dir), "--pooling", "mean"]
    return [*argv, "--output", str(tmp_path / "out.tsv")]


def test_the_sample_split_is_evaluated_at_its_own_threshold_beside_table_2(
    bucc_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucc(tmp_path / "bucc", "dev", 3)
    made = run(bucc_command)
    assert made["protocol"].startswith("BUCC sample: ")
    numbers = made["pairs"]["de-en"]
    assert (numbers["precision"], numbers["recall"], numbers["f1"]) == (100, 100, 100)
    rows = read(tmp_path / "out.tsv")
    assert made["kept"] == len(rows) == 10
    for row in rows:
        assert row.source == row.target
        assert row.target_line == row.source_line + 20
    printed = capsys.readouterr().out
    assert "(10 pairs of ids found, 10 of the 10 true pairs)" in printed
    assert re.search("paper: XLM-R.DAP .* 95.4", printed)


@pytest.mark.parametrize("names", [("sample", "training"), ("dev", "test")])
def test_the_samples_threshold_is_applied_to_the_training_split_beside_table_3(
    names: tuple[str, str],
    bucc_command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucc(tmp_path / "bucc", names[0], 3)
    bucc(tmp_path / "bucc", names[1], 1)
    made = run([*bucc_command, "--protocol", "sample-threshold-on-training"])
    assert made["protocol"].startswith("BUCC sample-threshold-on-training: ")
    assert made["source"]["file"] == f"de-en.{names[1]}.de"
    sample_alone = run([*bucc_command, "--protocol", "sample"])["pairs"]["de-en"]
    assert made["threshold_split"]["de-en"] == sample_alone
    assert made["pairs"]["de-en"]["threshold"] == sample_alone["threshold"]
    assert made["pairs"]["de-en"]["recall"] == 100
    assert re.search("paper: XLM-R.DAP .* 86.8", capsys.readouterr().out)


def test_a_training_split_is_evaluated_at_its_own_threshold_or_gives_that_of_the_test_split(
    bucc_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucc(tmp_path / "bucc", "dev", 3)
    bucc(tmp_path / "bucc", "training", 1)
    assert run(bucc_command)["protocol"].startswith("BUCC training-optimal: ")
    assert "paper" not in capsys.readouterr().out
    bucc(tmp_path / "bucc", "test", 2)
    made = run([*bucc_command, "--protocol", "training-threshold-on-test"])
    assert made["protocol"].startswith("BUCC training-threshold-on-test: ")
    assert made["pairs"]["de-en"]["threshold"] == made["threshold_split"]["de-en"]["threshold"]
    assert made["source"]["file"] == "de-en.test.de"
    assert made["pairs"]["de-en"]["recall"] == 100


def test_a_file_of_bucc_is_neither_overwritten_nor_left_out(
    bucc_command: list[str], tmp_path: Path
) -> None:
    bucc(tmp_path / "bucc", "training", 1)
    gold = tmp_path / "bucc" / "de-en.training.gold"
    with pytest.raises(ValueError, match=r"--output .*de-en\.training\.gold would overwrite"):
        run([*bucc_command, "--output", str(gold), "--model", "no-such-model"])
    gold.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no de-en\.training\.gold"):
        run(bucc_command)


def one_of_two(rank: int, argv: list[str], evaluations: list[list[str]], place: Path) -> None:
    """Run in one of two processes: write how many pairs were kept and which languages evaluated."""
    found = [
        run(argv).get("kept"),
        *(eval_retrieval.run(each).get("languages") for each in evaluations),
    ]
    (place / f"found-{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_processes_share_the_encoding_and_give_the_same_pairs_and_accuracies(
    command: list[str], tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path
) -> None:
    kept = run([*command, "--shard_size", "8"])["kept"]
    evaluation = [
        "--model_name_or_path",
        str(tiny_bert_dir),
        "--data_dir",
        str(bitext_dir),
        "--pooling",
        "mean",
    ]
    languages = eval_retrieval.run(evaluation)["languages"]
    argv = [*command[:-1], str(tmp_path / "two.tsv"), "--shard_size", "8"]
    evaluations = [[*evaluation, "--embeddings_dir", str(tmp_path / "vectors")], evaluation]
    run_two(one_of_two, argv, evaluations, tmp_path)
    assert json.loads((tmp_path / "found-0").read_text()) == [kept, languages, languages]
    assert json.loads((tmp_path / "found-1").read_text()) == [None, None, None]
    assert (tmp_path / "two.tsv").read_text() == (tmp_path / "pairs.tsv").read_text()


def test_what_cannot_be_encoded_is_named_in_both_texts(tiny_bert_dir: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    token = encoder.tokenizer("q", add_special_tokens=False)["input_ids"][-1]
    with torch.no_grad():
        encoder.model.embeddings.word_embeddings.weight[token] = torch.nan
    save(tmp_path / "model", encoder.model, encoder.tokenizer)
    files = [write(tmp_path / "a.de", ["ban", "q"]), write(tmp_path / "a.en", ["q", "ban"])]
    with pytest.raises(UserError, match="^2 fail: .*/a.de, line 2: NaN .*; .*/a.en, line 1: NaN "):
        run(
            [
                *files,
                "--model",
                str(tmp_path / "model"),
                "--pooling",
                "mean",
                "--output",
                str(tmp_path / "pairs.tsv"),
            ]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--k", "0"], "--k 0: at least 1"),
        (["--top_n", "0"], "--top_n 0: at least 1"),
        (["--threshold", "nan"], "--threshold: give auto, none or a finite number"),
        (["--threshold", "9"], "--threshold 9.0: no pair scores so high"),
        (["--min_precision", "2"], "--min_precision 2.0: give a number above 0 and below 1"),
        (["--min_precision", "0.9", "--threshold", "1"], "leave --threshold out"),
        (["--score_only", "--threshold", "auto"], "--threshold auto is for mining"),
        (["more.en"], r"more\.en: no such option, or a text in the wrong place"),
        (["--pair", "de-en"], "--pair belongs to --bucc"),
        (["--bucc", "x", "--pair", "de-en"], "--bucc takes no two texts"),
        (["--score_only", "--retrieval", "backward"], "--retrieval backward is for mining"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_unfit_arguments_end_the_command_in_one_line(
    change: list[str], message: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine-bitext", *command, *change])
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main()


@pytest.mark.parametrize("files", [[], ["one"], ["a", "b", "c"]])
def test_two_texts_are_needed(files: list[str], tiny_bert_dir: Path) -> None:
    with pytest.raises(ValueError, match="name a source text and a target text"):
        run([*files, "--model", str(tiny_bert_dir), "--output", "x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"ban\nb\xffn\n", "line 2: invalid UTF-8"),
        (b"\n \n", "none of its lines holds a sentence"),
        (b"ban\n", r"a\.de has 1 line, .*a\.en has 40"),
        (None, r"No such file.*a\.de"),
    ],
)
def test_unfit_texts_are_found_before_the_model_is_loaded(
    text: bytes | None, message: str, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.de").unlink() if text is None else (tmp_path / "a.de").write_bytes(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run([*command, "--score_only", "--model", "no-such-model"])


def test_a_text_may_be_mined_against_itself_with_a_warning(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run([command[0], *command[:1], *command[2:]])
    assert "hold the same text" in caplog.text
    rows = read(tmp_path / "pairs.tsv")
    assert sorted(row.lines for row in rows) == [(line, line) for line in range(1, 41)]
