"""The mining command from files to pairs and report, with a tiny real model."""

import gzip
import json
import lzma
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import written
from conftest import save, synthetic_pairs
from forked import run_two
from written import full_disk

import eval_retrieval
from dap.encoding.sentence_encoder import SentenceEncoder
from dap.errors import UserError
from dap.mining.margin import margin_scores
from mine_bitext import main, run

PAIRS = synthetic_pairs("de", 40)
SOURCE, TARGET = ([pair[side] for pair in PAIRS] for side in (0, 1))
TARGET = TARGET[::-1]


def write(path: Path, lines: list[str]) -> str:
    return str(written.write(path, "".join(f"{line}\n" for line in lines)))


def read(path: Path) -> list[list[str]]:
    """The columns of a written file; every row must have five."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    assert all(len(row) == 5 for row in rows)
    return rows


@pytest.fixture
def command(tiny_bert_dir: Path, tmp_path: Path) -> list[str]:
    """Everything but what is particular: texts, model, output."""
    files = [write(tmp_path / "a.de", SOURCE), write(tmp_path / "a.en", TARGET)]
    return [
        *files,
        "--model",
        str(tiny_bert_dir),
        "--pooling",
        "mean",
        "--output",
        str(tmp_path / "pairs.tsv"),
    ]


def test_pairs_are_written_best_first_with_their_lines(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(command)
    rows = read(tmp_path / "pairs.tsv")
    assert 10 < len(rows) <= 40
    for _, source, target, source_line, target_line in rows:
        assert (source, target) == (SOURCE[int(source_line) - 1], TARGET[int(target_line) - 1])
    scores = [float(row[0]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert made["kept"] == made["candidates"] == len(rows)
    assert made["source"] == {
        "file": "a.de",
        "lines": 40,
        "empty": 0,
        "repeated": 0,
        "distinct": 40,
    }
    assert made["settings"]["margin"] == "ratio"
    assert made["settings"]["data"] == command[:2]
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
    one, two = read(tmp_path / "one.tsv"), read(tmp_path / "two.tsv")
    assert [row[1:] for row in one] == [row[1:] for row in two]
    np.testing.assert_allclose(
        [float(row[0]) for row in one], [float(row[0]) for row in two], atol=3e-6
    )


def test_a_second_run_encodes_nothing(command: list[str], tmp_path: Path) -> None:
    run([*command, "--shard_size", "16"])
    shards = sorted((tmp_path / "pairs.tsv.embeddings").glob("*/*"))
    before = [path.stat().st_mtime_ns for path in shards]
    assert [path.parent.name for path in shards] == ["source.a.de"] * 3 + ["target.a.en"] * 3
    run([*command, "--shard_size", "16", "--retrieval", "intersection", "--top_n", "3"])
    assert [path.stat().st_mtime_ns for path in shards] == before
    assert len(read(tmp_path / "pairs.tsv")) == 3


def test_a_threshold_keeps_the_better_pairs(command: list[str], tmp_path: Path) -> None:
    run(command)
    scores = [float(row[0]) for row in read(tmp_path / "pairs.tsv")]
    made = run([*command, "--threshold", str(scores[4] - 1e-5)])
    assert made["kept"] == len(read(tmp_path / "pairs.tsv")) < made["candidates"]
    assert {float(row[0]) for row in read(tmp_path / "pairs.tsv")} == {
        s for s in scores if s >= scores[4] - 1e-5
    }


def test_empty_repeated_and_tabbed_lines(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command)
    clean = read(tmp_path / "pairs.tsv")
    write(tmp_path / "a.de", ["", SOURCE[0], SOURCE[0], *SOURCE[1:], " ", SOURCE[5]])
    made = run(command)
    counts = {"lines": 44, "empty": 2, "repeated": 2, "distinct": 40}
    assert made["source"] == {"file": "a.de"} | counts
    assert f"{command[0]}: 44 lines, 2 empty, 2 repeated, 40 sentences" in capsys.readouterr().out
    lines = {"1": "2"} | {str(n): str(n + 2) for n in range(2, 41)}
    assert read(tmp_path / "pairs.tsv") == [[*row[:3], lines[row[3]], row[4]] for row in clean]
    write(tmp_path / "a.de", [f"{line[:3]}\t{line[3:]}\tban" for line in SOURCE])
    run(command)
    rows = read(tmp_path / "pairs.tsv")
    assert all(
        source == f"{SOURCE[int(n) - 1][:3]} {SOURCE[int(n) - 1][3:]} ban"
        for _, source, _, n, _ in rows
    )
    write(tmp_path / "a.de", [*SOURCE[:6], "ka\rban", *SOURCE[6:]])
    with pytest.raises(
        ValueError, match=r"a\.de, line 7: carriage return at offset 2, within the line: tr '"
    ):
        run(command)


def test_on_a_full_disk_it_says_where_leaves_the_old_pairs_and_goes_on_once_there_is_room(
    command: list[str], tmp_path: Path
) -> None:
    run(command)
    before, said = (
        (tmp_path / "pairs.tsv").read_bytes(),
        rf"^error: {tmp_path}/pairs\S+.*: the disk is full \(.*make room",
    )
    with full_disk(100), pytest.raises(SystemExit, match=said):
        main([*command, "--top_n", "2"])
    assert (tmp_path / "pairs.tsv").read_bytes() == before
    assert not list(tmp_path.glob(".pairs*"))
    (tmp_path / "pairs.tsv").unlink()
    shutil.rmtree(tmp_path / "pairs.tsv.embeddings")
    for size in (500, 1500, 4000):  # bytes that a file may have
        with full_disk(size), pytest.raises(SystemExit, match=said):
            main(command)
    run(command)
    assert (tmp_path / "pairs.tsv").read_bytes() == before


def test_given_pairs_are_scored_in_their_order(
    command: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    source, target = [*SOURCE[:9], "", SOURCE[0]], [*TARGET[::-1][:9], "ban", TARGET[-1]]
    write(tmp_path / "a.de", source)
    write(tmp_path / "a.en", target)
    made = run([*command, "--score_only"])
    rows = read(tmp_path / "pairs.tsv")
    assert [(row[1], row[2]) for row in rows] == [pair for pair in zip(source, target) if pair[0]]
    assert [(row[3], row[4]) for row in rows] == [(str(n), str(n)) for n in (*range(1, 10), 11)]
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    a, b = (
        rows / np.linalg.norm(rows, axis=1)[:, None]
        for rows in map(encoder.encode, (source[:9], target[:10]))
    )
    similar = a @ b.T  # distinct sentences only
    mean = [np.sort(side, axis=1)[:, -4:].mean(1) for side in (similar, similar.T)]
    expected = margin_scores(np.diag(similar), mean[0], mean[1][:9])
    np.testing.assert_allclose([float(row[0]) for row in rows], [*expected, expected[0]], atol=1e-5)
    assert made["candidates"] == 10
    assert made["protocol"] == "margin of given pairs over nearest neighbours"
    run([*command, "--score_only", "--top_n", "2"])
    best = sorted(sorted(rows, key=lambda row: -float(row[0]))[:2], key=lambda row: int(row[3]))
    assert read(tmp_path / "pairs.tsv") == best


def test_an_index_states_its_recall(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("faiss")
    run(command)
    exact = read(tmp_path / "pairs.tsv")
    made = run([*command, "--index", "Flat"])
    assert [row[1:] for row in read(tmp_path / "pairs.tsv")] == [row[1:] for row in exact]
    assert made["recall_at_k"] == 1.0
    assert "Flat: recall@4 1.0000" in capsys.readouterr().out
    assert made["settings"]["index"] == "Flat"
    made = run([*command, "--index", "IVF8,Flat:nprobe=1"])
    assert 0.1 < made["recall_at_k"] < 1.0


def bucc(folder: Path, name: str, seed: int) -> list[tuple[str, str]]:
    """A split where sources 0-9 have the same text as their gold targets, so that any model finds them."""
    shared, other = synthetic_pairs("de", 60, seed), synthetic_pairs("fr", 30, seed)
    source = [pair[0] for pair in shared[:10]] + [pair[0] for pair in other]
    target = [pair[1] for pair in shared[20:40]] + [pair[0] for pair in shared[:10]]
    gold = [(f"de-{seed}{i}", f"en-{seed}{i + 20}") for i in range(10)]
    write(folder / f"de-en.{name}.de", [f"de-{seed}{i}\t{text}" for i, text in enumerate(source)])
    write(folder / f"de-en.{name}.en", [f"en-{seed}{i}\t{text}" for i, text in enumerate(target)])
    write(folder / f"de-en.{name}.gold", ["\t".join(pair) for pair in gold])
    return gold


@pytest.fixture
def bucc_command(tiny_bert_dir: Path, tmp_path: Path) -> list[str]:
    """The command for BUCC, whose folder is still empty."""
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
    assert {(row[1], int(row[3]) + 20) for row in rows} == {(row[2], int(row[4])) for row in rows}
    printed = capsys.readouterr().out
    assert "(10 pairs of ids extracted, 10 of 10 true ones)" in printed
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
    with pytest.raises(FileNotFoundError, match=r"has no de-en\.training\.gold; "):
        run(bucc_command)


def one_of_two(rank: int, argv: list[str], evaluations: list[list[str]], place: Path) -> None:
    """One process of two; writes how many pairs it kept, and the languages that it evaluated."""
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
    files = [
        write(tmp_path / name, lines)
        for name, lines in (("a.de", ["ban", "q"]), ("a.en", ["q", "ban"]))
    ]
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
        (["--threshold", "nan"], "--threshold nan: give a finite number"),
        (
            ["more.en"],
            r"more\.en: no such option, or a text in the wrong place; the two texts come first",
        ),
        (["--pair", "de-en"], "--pair belongs to --bucc"),
        (["--bucc", "x", "--pair", "de-en"], "--bucc takes no two texts"),
        (["--model", "no-such-model"], "the configuration of no-such-model cannot be loaded "),
    ],
)
def test_unfit_arguments_are_one_message(
    change: list[str], message: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine-bitext", *command, *change])
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"ban\nb\xffn\n", "line 2: invalid UTF-8"),
        (b"\n \n", "2 lines, and none of them holds a sentence"),
        (b"", "0 lines"),
        (None, r"No such file.*a\.de"),
    ],
)
def test_unfit_texts_are_found_before_the_model_is_loaded(
    text: bytes | None, message: str, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.de").unlink() if text is None else (tmp_path / "a.de").write_bytes(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run([*command, "--model", "no-such-model"])


def test_texts_of_unequal_length_cannot_be_scored(command: list[str], tmp_path: Path) -> None:
    write(tmp_path / "a.en", TARGET[:-1])
    with pytest.raises(ValueError, match=r"a\.de has 40 lines, .*a\.en has 39: --score_only"):
        run([*command, "--score_only", "--model", "no-such-model"])
    with pytest.raises(
        ValueError, match="--retrieval backward is for mining: --score_only scores the given"
    ):
        run([*command, "--score_only", "--retrieval", "backward"])


def test_a_text_may_be_mined_against_itself(command: list[str], tmp_path: Path) -> None:
    run([command[0], *command[:1], *command[2:]])
    assert {(row[3], row[4]) for row in read(tmp_path / "pairs.tsv")} == {
        (str(n), str(n)) for n in range(1, 41)
    }


def test_a_text_after_a_switch_shows_where_texts_belong(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(["--score_only", *command])
    assert "The two texts come first, side by side" in capsys.readouterr().err


@pytest.mark.parametrize("files", [[], ["one"], ["a", "b", "c"]])
def test_two_texts_are_needed(files: list[str], tiny_bert_dir: Path) -> None:
    with pytest.raises(ValueError, match="name a source text and a target text"):
        run([*files, "--model", str(tiny_bert_dir), "--output", "x"])
