"""Every benchmark runs on a tiny model, and FLOPs and memory are counted correctly."""

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import losses_dap
from benchmarks import correctness, encode, flops, gpu, memory, mining
from benchmarks.workload import Workload
from dap_transformers.files import read_json

REHEARSED = [name for name, (_, tiny) in gpu.STAGES.items() if tiny is not None]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(Namespace(size="tiny", target_vocabulary=200))


@pytest.mark.slow
@pytest.mark.parametrize("stage", REHEARSED)
def test_every_benchmark_for_a_gpu_runs_on_a_cpu(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for benchmark in (memory, mining):
        monkeypatch.setattr(benchmark, "in_own_process", lambda work, *args: work(*args))
    gpu.run_benchmark(stage, Namespace(device="cpu", tiny=True))


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_dap, "LOGITS_PER_CHUNK", 2**20)
    monkeypatch.setattr(memory, "in_own_process", lambda work, *args: work(*args))
    options = "--size tiny --target_vocabulary 200 --repeats 1 --tokens 1000 --vocabularies 20000"
    memory.main(f"{options} --hidden 8 --json {tmp_path}/a.json".split())
    points = read_json(tmp_path / "a.json")["points"]
    peaks = {part["contender"]: part["bytes"] for part in points}
    assert peaks["naive"] > 4 * 1000 * 20_000
    assert peaks["ours"] < 4 * 1000 * 20_000


def test_a_comparison_with_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = iter([np.ones((2, 3)), np.ones((2, 3)), np.full((2, 3), math.nan)])
    contenders = dict.fromkeys((encode.OURS, encode.LIBRARY), lambda: next(vectors))
    monkeypatch.setattr(encode, "contenders", lambda *_: contenders)
    args = Namespace(size="tiny", model=None, bf16=False, sentences=2)
    with pytest.raises(ValueError, match="vectors differ"):
        encode.compare(args)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_correctness_finds_a_wrong_path(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "OBJECTIVES", {"TR": "tr"})
    right = correctness.gradient
    off = lambda model: right(model) * (1 if model.dtype == torch.float64 else factor)  # noqa: E731
    monkeypatch.setattr(correctness, "gradient", off)
    with pytest.raises(ValueError, match="modernbert TR float32"):
        correctness.main(["--encoders", "modernbert", "--paths", "float32"])
