"""Every benchmark runs on a tiny model, and counts and compares correctly."""

import contextlib
import copy
import importlib
import json
import re
import shlex
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable
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
    input_pipeline,
    many_pairs,
    memory,
    mining,
    quality,
    scale,
    timing,
    train_step,
)
from benchmarks.workload import PAD, Workload, token_counts
from dap_transformers.files import read_json
from dap_transformers.ray.connection import ClusterArguments
from dap_transformers.training import grad_cache
from modeling_dap import DAPForPreTraining

TINY = [
    "--size",
    "tiny",
    "--batch_size",
    "6",
    "--lengths",
    "4",
    "9",
    "--target_vocabulary",
    "200",
    "--repeats",
    "1",
]
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


@pytest.mark.parametrize("other", [lambda loss: 1.01 * loss, lambda loss: 2 * loss - loss.detach()])
def test_step_refuses_another_loss_or_gradient(workload: Workload, other: Callable) -> None:
    ours = workload.losses()["TR"]
    losses = {"TR": ours, train_step.LIBRARY: lambda batch: other(ours(batch))}
    with pytest.raises(ValueError, match=r"our TR gives \d"):
        train_step.check_equal(losses, workload, workload.batch(4))


def test_contenders_share_weights_but_not_modules(workload: Workload) -> None:
    encoders = [model.dap.encoder for model in workload.models.values()]
    assert len({id(encoder) for encoder in encoders}) == 4
    for parameters in zip(*(encoder.parameters() for encoder in encoders), strict=True):
        assert len({id(parameter) for parameter in parameters}) == 1


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
    options = [
        "--tokens",
        "1000",
        "--vocabularies",
        "4000",
        "20000",
        "--hidden",
        "8",
        "--same_process",
    ]
    memory.main([*TINY, *options, "--json", str(tmp_path / "a.json")])
    found = {
        (part["contender"], *part["sizes"]): part["bytes"]
        for part in read_json(tmp_path / "a.json")["points"]
    }
    assert found["naive", 1000, 20_000] > 4 * 1000 * 20_000
    assert found["ours", 1000, 20_000] < 4 * 1000 * 20_000


@pytest.mark.slow
def test_memory_of_steps_and_of_grad_cache(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--batch_sizes", "3", "--grad_cache", "6", "--mini_batch_size", "2"]
    memory.main([*TINY, *options, "--same_process", "--json", str(tmp_path / "a.json")])
    points = read_json(tmp_path / "a.json")["points"]
    found = [f"{part['contender']} {part['sizes']}" for part in points]
    assert found == ["TR [2]", "TR cached [6]", "DAP [2]", "DAP cached [6]", "TR [3]", "DAP [3]"]
    printed = capsys.readouterr().out.splitlines()[2:]
    assert ["{} [{}]".format(*re.split(" {2,}", line)) for line in printed] == found


def test_encode_compares_equal_vectors(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path
) -> None:
    options = [
        "--model",
        str(tiny_bert_dir),
        "--data_dir",
        str(bitext_dir),
        "--sentences",
        "20",
        "--repeats",
        "1",
    ]
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
    options = [
        "--vectors",
        *vectors,
        "--model",
        str(tiny_bert_dir),
        "--data_dir",
        str(bitext_dir),
        "--rows",
        "30",
    ]
    mining.main([*options, "--repeats", "1", "--json", str(tmp_path / "a.json")])
    ours, *others = read_json(tmp_path / "a.json")["rows"]["30"].values()
    assert [np.load(path).shape for path in vectors] == [(30, 32)] * 2
    assert [part["found"] for part in others] == [ours["found"]] * 2
    assert 30 * 4 <= ours["computed"] * 30 * 30 <= 30 * 30
    assert ours["in_float32"] in (0, 1)  # one block


def test_encode_does_without_data_but_not_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    encode.main(["--size", "tiny", "--sentences", "30", "--batch_sizes", "8", "--repeats", "1"])
    assert "30 sentences" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        encode.main(["--size", "tiny", "--data_dir", str(tmp_path)])


@pytest.mark.slow
def test_quality_times_trainings_that_give_the_same_weights(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = DAPForPreTraining.from_encoder(str(tiny_bert_dir), pooling="mean", rtl_layers=1)
    heads.save_pretrained(tmp_path / "heads")
    clocks, clock = [], quality.Clock
    monkeypatch.setattr(quality, "Clock", lambda *args: clocks.append(clock(*args)) or clocks[-1])
    options = [
        "--model",
        str(tiny_bert_dir),
        "--heads",
        str(tmp_path / "heads"),
        "--train_data",
        str(bitext_dir),
    ]
    options += ["--data_dir", str(bitext_dir), "--languages", "sw", "--steps", "4", "--every", "2"]
    quality.main([*options, "--batch_size", "6", "--json", str(tmp_path / "a.json")])
    points = read_json(tmp_path / "a.json")["points"]
    assert list(points) == ["TR", "DAP", quality.MNRL, quality.CACHED]
    assert all([step for step, *_ in part] == [0, 2, 4] for part in points.values())
    assert all(part[1][1] < part[2][1] for part in points.values())
    start = heads.dap.encoder.state_dict()
    ends = [one.encoder.model.state_dict() for one in clocks]
    tr, dap, *theirs = [torch.cat([(end[n] - start[n]).flatten() for n in end]) for end in ends]
    assert all((tr - other).norm() < 0.01 * tr.norm() < (tr - dap).norm() for other in theirs)


def test_pipeline_with_and_without_a_step(tmp_path: Path) -> None:
    options = [
        "--pairs",
        "20",
        "--batches",
        "2",
        "--workers",
        "0",
        "--json",
        str(tmp_path / "a.json"),
    ]
    input_pipeline.main([*TINY, *options, "--step"])
    lines = read_json(tmp_path / "a.json")["lines"]
    assert [line["step"] for line in lines] == [False, True]
    assert all(0 < line["waiting"] <= line["wall"] for line in lines)
    with pytest.raises(ValueError, match="5 pairs make no batch of 6"):
        input_pipeline.main([*TINY, *options, "--pairs", "5"])


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


@pytest.mark.slow
def test_correctness_with_dropout_finds_a_path_without_dropout_of_attention() -> None:
    batch = correctness.uneven_batch(pairs=3, longest=8)
    model = correctness.build("bert", "tr+rtl", dropout=0.3)
    moments = {}
    for name in ("packed", "padded", "wrong"):
        copied = copy.deepcopy(model)
        if name != "packed":
            correctness.padded(copied)
        if name == "wrong":
            for stack in correctness.stacks(copied):
                for layer in stack.encoder.layer:
                    layer.attention.self.dropout.p = 0.0
        found = correctness.computations(copied, batch, 200)
        moments[name] = {what: correctness.draw(found[what], 200) for what in found}

    def largest(other: str, what: str) -> float:
        pairs = zip(moments["packed"][what], moments[other][what], strict=True)
        return max(correctness.excess(*pair) for pair in pairs)

    for what in moments["packed"]:
        allowed = correctness.ALLOWED_EXCESS
        assert largest("padded", what) < allowed < largest("wrong", what), what


def test_correctness_with_dropout_finds_other_masks_in_grad_caches_second_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options = ["--encoders", "bert", "--paths", "dropout, cached"]
    correctness.main(options)
    assert capsys.readouterr().out.count(" ok\n") == 4
    monkeypatch.setattr(grad_cache, "seeded", lambda seed, device: contextlib.nullcontext())
    with pytest.raises(ValueError, match="bert TR dropout, cached"):
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


@pytest.mark.slow
def test_a_rehearsal_tells_of_each_stage_and_what_fails_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(flops, "main", lambda argv: 1 / 0)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "benchmarks.input_pipeline")
    stages = ["FLOPs", "pipeline", "step, compiled", "memory", "step"]
    archive = tmp_path / "a.tar.xz"
    options = ["--device", "cpu", "--tiny", "--folder", str(tmp_path), "--archive", str(archive)]
    with pytest.raises(SystemExit, match="1"):
        gpu.main([*options, "--stages", *stages])
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [line["stage"] for line in lines] == ["preflight", *stages]
    assert "datasets" in lines[0]["missing"]
    assert lines[-1]["contenders"]["BOW"]["wall"] > 0
    with tarfile.open(archive) as file:
        assert file.getnames() == ["memory.json", "step.json"]
    table = printed.rpartition("\nstage  ")[2]
    rows = {
        name: rest for name, *rest in (re.split(" {2,}", line) for line in table.splitlines()[2:-2])
    }
    assert [rows[name][0] for name in stages] == [
        "FAILED: ZeroDivisionError: division by zero",
        "FAILED: datasets is not installed",
        "left out of a rehearsal",
        "ok",
        "ok",
    ]
    assert re.fullmatch(r"goal 45%, reached \d+%: (met|MISSED)", rows["step"][-1])
    assert read_json(tmp_path / "memory.json")["points"]


def test_no_stage_begins_after_the_command_was_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "run_benchmark", gpu.stop)  # as if a signal came during the stage
    options = ["--device", "cpu", "--tiny", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit, match="1"):
        gpu.main([*options, "--stages", "memory", "step"])
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    outcomes = [line["outcome"] for line in lines[1:]]
    assert outcomes == [
        "FAILED: TimeoutError: asked to end",
        "FAILED: not begun, the time is over",
    ]


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(5.0, "reached 40%: MISSED"), (4.0, "reached 50%: met")]
)
def test_a_goal_is_judged_by_the_benchmarks_numbers(seconds: float, verdict: str) -> None:
    parts = {"DAP": {"flops": 2.0, "wall": seconds}, "matrix products": {"flops": 3.0, "wall": 3.0}}
    assert gpu.judge("step", {"contenders": parts}) == f"goal 45%, {verdict}"


def test_a_preparation_reads_the_text_of_its_number_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    monkeypatch.setattr("prepare_data.run", commands.append)
    args = Namespace(folder=str(tmp_path))
    scale.preparation(3200, args, ClusterArguments(None))(True)
    scale.preparation(3200, args, ClusterArguments(None))(False)
    read = [command[command.index("--data") + 1] for command in commands]
    assert read == [str(scale.text_folder(args, lines)) for lines in (3200, scale.FEW_LINES)]


def test_mining_made_up_results_is_measured_and_written(tmp_path: Path) -> None:
    assert scale.mining_memory(1000, Namespace(folder=str(tmp_path))) >= 0
    lines = (tmp_path / "pairs.tsv").read_text().splitlines()
    assert all(len(line.split("\t")) == 5 for line in lines)
    assert lines


def test_an_epoch_of_made_up_pairs_has_every_row(tmp_path: Path) -> None:
    used, seconds = many_pairs.memory_of(36 * 30, 2, tmp_path)
    assert used >= 0
    assert seconds > 0
