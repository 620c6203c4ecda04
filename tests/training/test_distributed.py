import socket
from pathlib import Path

import torch
from conftest import REPOSITORY
from distributed_worker import CASES, VARIANTS, step_gradients
from forked import run_python

import losses_dap


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_processes_give_the_gradients_of_one_with_all_pairs(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("distributed_worker.py")
    paths = {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests:{worker.parent}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = run_python([str(worker), "2", free_port(), str(tmp_path)], paths, tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "gradients.pt")
    runs = [(case, variant) for case in CASES for variant in VARIANTS]
    for (case, variant), gradient in zip(runs, found, strict=True):
        expected = step_gradients(case, *variant[:2])
        error = (gradient - expected).norm() / expected.norm()
        assert error < 1e-5, (case, variant, error)


def test_gather_is_the_identity_in_one_process() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    assert losses_dap.gather_rows(rows) is rows
    assert losses_dap.sum_over_processes(rows) is rows
