"""Every benchmark runs on a tiny model, and counts and compares correctly."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
    thresholds,
    timing,
    train_step,
)
from benchmarks.workload import PAD, Workload, token_counts
from dap_transformers.files import read_json

TINY = "--size tiny --batch_size 6 --target_vocabulary 200 --repeats 1"


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Return a function that runs a benchmark, and returns the content of its JSON file."""

    def run(benchmark: ModuleType, options: str) -> dict:
        if hasattr(benchmark, "in_own_process"):
            monkeypatch.setattr(benchmark, "in_own_process", lambda work, *args: work(*args))
        benchmark.main(f"{options} --json {tmp_path}/a.json".split())
        return read_json(tmp_path / "a.json")

    return run


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(Namespace(size="tiny", target_vocabulary=200))


@pytest.mark.slow
def test_step_compares_equal_losses_on_shared_weights(found: Callable) -> None:
    result = found(train_step, f"{TINY} --optimizer")
    parts = result["contenders"]
    names = ["TR", "TLM", "DAP", "BOW", "sentence-transformers"]
    assert list(parts) == [*names, "float32 products", "bfloat16 products"]
    assert result["check"]["gradient"] > 0
    assert parts["TR"]["flops"] < min(
        parts["sentence-transformers"]["flops"], parts["BOW"]["flops"]
    )
    assert parts["float32 products"]["of float32 products"] == 1


def test_batches_are_padded_pairs_within_the_vocabulary(workload: Workload) -> None:
    batch = workload.batch(50)
    lengths = {length for pair in token_counts(batch) for length in pair}
    assert (min(lengths), max(lengths)) == (6, 32)
    ids, mask = batch["target_input_ids"], batch["target_attention_mask"].bool()
    assert (ids[~mask] == PAD).all()
    assert set(ids[:, 1:][mask[:, 1:]].tolist()) <= set(workload.target_ids)
    assert torch.equal(batch["source_input_ids"], workload.batch(50)["source_input_ids"])
    noisy = flops.with_noise(workload.batch_of([12], [17]))  # which masks a fifth
    masked = torch.cat([noisy["source_noise"], noisy["target_noise"]], 1) < 0.2
    assert masked.sum() == (10 + 15) / 5


def test_flops_of_an_encoder_are_those_of_the_formula(workload: Workload) -> None:
    config = workload.config
    wide, inner = config.hidden_size, config.intermediate_size
    lengths = [(5, 9), (4, 4), (9, 30)]

    def expected(length: int) -> int:
        products = 2 * length * (4 * wide * wide + 2 * wide * inner)
        return config.num_hidden_layers * (products + 4 * length * length * wide)

    def forward(**batch: torch.Tensor) -> None:
        for side in ("source", "target"):
            workload.encoder(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"])

    wanted = sum(expected(length) for pair in lengths for length in pair)
    assert flops.real_token_flops(forward, workload, lengths) == pytest.approx(wanted)
    similarity = 2 * wide * len(lengths)
    counted = flops.real_token_flops(workload.models["TR"], workload, lengths)
    share = counted / (wanted + similarity)  # the fit's rounding differs between CPUs
    assert share < 1.001  # padding is not counted, nor a layer that nothing reads


def test_memory_of_the_loss_is_below_its_logits(
    found: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_dap, "LOGITS_PER_CHUNK", 2**20)
    options = f"{TINY} --tokens 1000 --vocabularies 4000 20000 --hidden 8"
    peaks = {}
    for part in found(memory, options)["points"]:
        peaks[(part["contender"], *part["sizes"])] = part["bytes"]
    assert peaks["naive", 1000, 20_000] > 4 * 1000 * 20_000
    assert peaks["ours", 1000, 20_000] < 4 * 1000 * 20_000


def test_encode_compares_equal_vectors(
    found: Callable, tiny_bert_dir: Path, bitext_dir: Path
) -> None:
    options = f"--model {tiny_bert_dir} --data_dir {bitext_dir} --sentences 20 --repeats 1"
    result = found(encode, options)
    assert result["sentences"] == 20
    assert min(part["least_cosine"] for part in result["contenders"].values()) > 0.9999


@pytest.mark.slow
def test_mining_finds_the_same(
    found: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(mining, "product_rate", lambda *args: 1.0)
    for name in ("xx.npy", "en.npy"):
        np.save(tmp_path / name, np.random.default_rng(3).standard_normal((40, 8), np.float32))
    options = f"--vectors {tmp_path}/xx.npy {tmp_path}/en.npy --rows 30 --repeats 1"
    parts = found(mining, options)["rows"]["30"]
    assert [part["found"] for part in parts.values()] == [1.0] * 2


def test_a_threshold_is_compared_with_the_best_one() -> None:
    rng = np.random.default_rng(0)
    source = rng.standard_normal((800, 16))
    vectors = source, source + 0.1 * rng.standard_normal((800, 16))
    case = thresholds.made_case("made", vectors, share=0.5, draw=0, known=40)
    assert [len(text) for text in case.vectors] == [380, 380]
    numbers = thresholds.measure(case)
    assert numbers["gold"] == 190
    assert numbers["f1"] == pytest.approx(numbers["best_f1"] - numbers["below_best"])
    assert min(numbers["f1"], numbers["precision"]) > 90


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


@pytest.mark.parametrize("stage", [name for name in gpu.STAGES if name != gpu.TESTS])
def test_every_benchmark_for_a_gpu_takes_its_arguments(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = ArgumentParser.parse_args

    def stop(parser: ArgumentParser, argv: list[str]) -> None:
        parse(parser, argv)
        raise KeyboardInterrupt  # the command line was taken

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    with pytest.raises(KeyboardInterrupt):
        gpu.run_benchmark(stage, Namespace(device="cuda", tiny=False))
