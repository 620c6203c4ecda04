"""Every benchmark runs on a tiny model, and counts and compares correctly."""

import importlib
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import losses_dap
from benchmarks import (
    correctness,
    encode,
    flops,
    gpu,
    memory,
    mining,
    timing,
    train_step,
)
from benchmarks.workload import PAD, Workload, token_counts
from dap_transformers.files import read_json

TINY = shlex.split("--size tiny --batch_size 6 --target_vocabulary 200 --repeats 1")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(Namespace(size="tiny", target_vocabulary=200))


@pytest.mark.slow
def test_step_compares_equal_losses_on_shared_weights(
    tmp_path: Path,
) -> None:
    train_step.main([*TINY, "--optimizer", "--json", str(tmp_path / "a.json")])
    found = read_json(tmp_path / "a.json")
    parts = found["contenders"]
    assert list(parts) == ["TR", "TLM", "DAP", "BOW", "sentence-transformers", "matrix products"]
    assert found["check"]["gradient"] > 0
    assert parts["TR"]["flops"] < min(
        parts["sentence-transformers"]["flops"], parts["BOW"]["flops"]
    )
    assert parts["matrix products"]["cpu_share"] == 1


def test_batches_are_padded_pairs_within_the_vocabulary(workload: Workload) -> None:
    batch = workload.batch(50)
    lengths = {length for pair in token_counts(batch) for length in pair}
    assert (min(lengths), max(lengths)) == (6, 32)
    ids, mask = batch["target_input_ids"], batch["target_attention_mask"].bool()
    assert (ids[~mask] == PAD).all()
    assert set(ids[:, 1:][mask[:, 1:]].tolist()) <= set(workload.target_ids)
    assert torch.equal(batch["source_input_ids"], workload.batch(50)["source_input_ids"])
    noisy = flops.with_noise(workload.batch_of([12], [17]))  # which masks a fifth
    assert (
        sum(int((noisy[f"{side}_noise"] < 0.2).sum()) for side in ("source", "target"))
        == (10 + 15) / 5
    )


def test_flops_of_an_encoder_are_those_of_the_formula(workload: Workload) -> None:
    config = workload.config
    wide, inner = config.hidden_size, config.intermediate_size
    lengths = [(5, 9), (4, 4), (9, 30)]

    def expected(length: int) -> int:
        products = 2 * length * (4 * wide * wide + 2 * wide * inner)
        return config.num_hidden_layers * (products + 4 * length * length * wide)

    def forward(**batch: torch.Tensor) -> object:
        sides = ("source", "target")
        return [
            workload.encoder(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"])
            for side in sides
        ]

    wanted = sum(expected(length) for pair in lengths for length in pair)
    assert flops.real_token_flops(forward, workload, lengths) == pytest.approx(wanted)
    similarity = 2 * wide * len(lengths)
    found = flops.real_token_flops(workload.models["TR"], workload, lengths)
    counted = found / (wanted + similarity)  # the fit's rounding differs between CPUs
    assert counted < 1.001  # padding is not counted, nor a layer that nothing reads


def test_flops_prints_the_paper_beside(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flops.main([*TINY, "--tokens", "8", "--json", str(tmp_path / "a.json")])
    parts = read_json(tmp_path / "a.json")["pair"]
    assert parts["TR"]["flops"] < parts["BOW"]["flops"] < parts["DAP"]["flops"]
    assert parts["TR"]["flops"] < parts["TLM"]["flops"]
    assert "33.7" in capsys.readouterr().out


def test_memory_of_the_loss_is_below_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_dap, "LOGITS_PER_CHUNK", 2**20)
    options = shlex.split("--tokens 1000 --vocabularies 4000 20000 --hidden 8 --same_process")
    memory.main([*TINY, *options, "--json", str(tmp_path / "a.json")])
    found = {
        (part["contender"], *part["sizes"]): part["bytes"]
        for part in read_json(tmp_path / "a.json")["points"]
    }
    assert found["naive", 1000, 20_000] > 4 * 1000 * 20_000
    assert found["ours", 1000, 20_000] < 4 * 1000 * 20_000


def test_encode_compares_equal_vectors(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path
) -> None:
    options = ["--model", str(tiny_bert_dir), "--data_dir", str(bitext_dir)]
    options += ["--sentences", "20", "--repeats", "1"]
    encode.main([*options, "--json", str(tmp_path / "a.json")])
    found = read_json(tmp_path / "a.json")
    assert found["sentences"] == 20
    assert min(part["least_cosine"] for part in found["contenders"].values()) > 0.9999
    assert list(found["contenders"]) == [
        "ours",
        *(f"sentence-transformers, {size} a batch" for size in (32, 128)),
    ]


@pytest.mark.slow
def test_mining_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(mining, "in_own_process", lambda work, *args: work(*args))
    monkeypatch.setattr(mining, "product_rate", lambda device: 1.0)
    vectors = []
    for name in ("xx.npy", "en.npy"):
        np.save(tmp_path / name, np.random.default_rng(3).standard_normal((40, 8), np.float32))
        vectors.append(str(tmp_path / name))
    options = ["--vectors", *vectors, "--rows", "30", "--repeats", "1"]
    mining.main([*options, "--json", str(tmp_path / "a.json")])
    found = read_json(tmp_path / "a.json")["rows"]["30"]
    assert [part["found"] for part in found.values()] == [1.0] * 3


@pytest.mark.slow
def test_correctness_finds_a_wrong_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options = ["--encoders", "modernbert", "--paths", "float32"]
    correctness.main(options)
    assert capsys.readouterr().out.count(" ok\n") == 4
    monkeypatch.setattr(correctness, "OBJECTIVES", {"TR": "tr"})
    right = correctness.gradient
    off = lambda model: right(model) * (1 if model.dtype == torch.float64 else 1.01)  # noqa: E731
    monkeypatch.setattr(correctness, "gradient", off)
    with pytest.raises(ValueError, match="modernbert TR float32"):
        correctness.main(options)


def test_turns_alternate_and_medians_are_taken() -> None:
    turns: list[str] = []
    steps = {name: (lambda name=name: turns.append(name)) for name in "ab"}
    assert len(timing.alternate(steps, 3, "cpu", warm_up=2)["b"]["runs"]) == 3
    assert turns == [*"aabb", *"ababab"]
    seconds = iter([3.0, 1.0, 2.0])
    assert timing.in_turn({"ours": lambda: {"wall": next(seconds)}}, 3)["ours"]["wall"] == 2.0


@pytest.mark.parametrize(
    "line",
    sorted({*gpu.STAGES.values(), *gpu.DRY.values()} - {"tests"}),  # one order for all workers
)
def test_every_benchmark_for_a_gpu_takes_its_arguments(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, *argv = shlex.split(line)
    benchmark = importlib.import_module(f"benchmarks.{module}")

    parse = ArgumentParser.parse_args

    def stop(parser: ArgumentParser, argv: list[str]) -> None:
        parse(parser, argv)
        raise KeyboardInterrupt  # the command line was taken

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*argv, "--device", "cuda", "--json", "a.json"])


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.4, "reached 40%: MISSED"), (0.5, "reached 50%: met")]
)
def test_a_goal_is_judged_by_the_benchmarks_numbers(share: float, verdict: str) -> None:
    found = {"contenders": {"DAP": {"wall_share": share}}}
    assert gpu.judge("step", found) == f"goal 45%, {verdict}"
