"""Every benchmark runs on a tiny model, and counts and compares correctly."""

import importlib
import shlex
from argparse import Namespace
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

TINY = shlex.split("--size tiny --batch_size 6 --lengths 4 9 --target_vocabulary 200 --repeats 1")
ARGS = {"size": "tiny", "lengths": (4, 9), "target_vocabulary": 200}


@pytest.fixture(scope="module")
def workload() -> Workload:
    torch.manual_seed(0)
    return Workload(Namespace(**ARGS))


@pytest.mark.slow
def test_step_compares_equal_losses_on_shared_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = ["--mini_batch_size", "4", "--optimizer", "--matrix_seconds", "0.001"]
    train_step.main([*TINY, *options, "--json", str(tmp_path / "a.json")])
    found = read_json(tmp_path / "a.json")
    names = ["TR", "TLM", "DAP", "BOW", "sentence-transformers"]
    names += [f"{name} cached" for name in names]
    assert set(found["contenders"]) == {*names, "matrix products"}
    assert found["check"]["gradient"] > 0
    parts = found["contenders"]
    assert parts["TR"]["flops"] < min(
        parts["sentence-transformers"]["flops"], parts["BOW"]["flops"]
    )
    assert found["cpu"]["DAP / TR"] == parts["DAP"]["cpu"] / parts["TR"]["cpu"]
    assert "DAP cached" in capsys.readouterr().out


def test_batches_are_padded_pairs_within_the_vocabulary(workload: Workload) -> None:
    batch = workload.batch(50)
    counts = token_counts(batch)
    assert {length for pair in counts for length in pair} == set(range(4, 10))
    ids, mask = batch["target_input_ids"], batch["target_attention_mask"].bool()
    assert (ids[~mask] == workload.special[PAD]).all()
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

    def forward(batch: dict) -> object:
        sides = ("source", "target")
        return [
            workload.encoder(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"])
            for side in sides
        ]

    wanted = sum(expected(length) for pair in lengths for length in pair)
    assert flops.real_token_flops(forward, workload, lengths) == pytest.approx(wanted)
    similarity = 2 * wide * len(lengths)
    found = flops.real_token_flops(workload.losses()["TR"], workload, lengths)
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
def test_mining_finds_the_same_and_says_what_was_computed(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(mining, "in_own_process", lambda work, *args: work(*args))
    monkeypatch.setattr(mining, "sgemm_rate", lambda device: 1.0)
    vectors = [str(tmp_path / name) for name in ("xx.npy", "en.npy")]
    options = ["--vectors", *vectors, "--rows", "30"]
    options += ["--model", str(tiny_bert_dir), "--data_dir", str(bitext_dir)]
    mining.main([*options, "--repeats", "1", "--json", str(tmp_path / "a.json")])
    ours, *others = read_json(tmp_path / "a.json")["rows"]["30"].values()
    assert [np.load(path).shape for path in vectors] == [(30, 32)] * 2
    assert [part["found"] for part in others] == [ours["found"]] * 2
    assert 30 * 4 <= ours["computed"] * 30 * 30 <= 30 * 30
    assert ours["in_float32"] in (0, 1)  # one block


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

    def stop(args: Namespace) -> None:  # the command line was taken
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "prepare_machine", stop)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*argv, "--device", "cuda", "--json", "a.json"])


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(5.0, "reached 40%: MISSED"), (4.0, "reached 50%: met")]
)
def test_a_goal_is_judged_by_the_benchmarks_numbers(seconds: float, verdict: str) -> None:
    parts = {"DAP": {"flops": 2.0, "wall": seconds}, "matrix products": {"flops": 3.0, "wall": 3.0}}
    assert gpu.judge("step", {"contenders": parts}) == f"goal 45%, {verdict}"
