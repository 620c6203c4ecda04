"""Our code on a pretend GPU (`pretend_gpu.py`), so that a machine without one finds some faults.

The tests show that no operation mixes tensors of the CPU and of the GPU, that our branches for
CUDA give the values of the CPU, and how often a training step waits for the GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import LANGUAGES, load_encoder, results, synthetic_pairs
from pretend_gpu import pretend_gpu
from tiny_models import ALL, gradients, make_batch, tiny_model, with_negatives
from torch import Tensor

from dap_transformers.alignment.word_alignment import align_words
from dap_transformers.files import read_json
from dap_transformers.search.exact import nearest
from dap_transformers.training.trainer import DAPTrainer
from train_dap import main

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")

TARGET_IDS = [0, 2, *range(5, 250, 3)]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Let the test have a pretend GPU. Gives the places where the CPU waits for it."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    # The fastest product is measured, which takes long without a GPU.
    monkeypatch.setattr("dap_transformers.search.exact.fastest_product", lambda device: "bfloat16")
    AcceleratorState._reset_state(True)
    with pretend_gpu() as waits:
        yield waits
    AcceleratorState._reset_state(True)


# ------------------------------------------------------------------------------ the tool itself


@pytest.mark.parametrize(
    "mixture",
    [
        lambda gpu, cpu: gpu + cpu,
        lambda gpu, cpu: cpu[gpu.long()],
        lambda gpu, cpu: gpu.index_put_((cpu[0].long(),), cpu),
    ],
)
def test_a_mixture_of_devices_raises(mixture: Callable, waits: Counter) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mixture(torch.zeros(2, 2, device="cuda"), torch.zeros(2, 2))


# ------------------------------------------------------------------------------------- our code


def losses(model_type: str, device: str, folder: Path, **fields: Any) -> Tensor:
    model = tiny_model(model_type, **fields)
    if "target_vocab_size" in fields:
        model.set_target_vocabulary(TARGET_IDS)
    model.to(device)
    if model.prediction_head is not None:
        model.prediction_head.start_bias(torch.arange(250))
    batch = with_negatives(make_batch()) | {"language_ids": torch.arange(6) % 2}
    out = model(**{name: value.to(device) for name, value in batch.items()})
    out.loss.backward()
    return torch.cat([out.loss.detach().view(1), gradients(model)])


def vectors_links_and_neighbours(device: str, folder: Path) -> Tensor:
    sources, targets = zip(*synthetic_pairs(LANGUAGES[0], 20))
    encoder = load_encoder(folder, "mean", device=device)
    vectors = torch.tensor(encoder.encode([*sources, *targets], normalize=True), device=device)
    links = [aligned.links for aligned in align_words(encoder, sources, targets)]
    rows = [nearest(vectors[:20], vectors[20:]), np.concatenate(links).flatten()]
    return torch.cat([vectors.cpu().flatten(), torch.from_numpy(np.concatenate(rows))])


FROM_BOTH = {"rtl_direction": "both", "rtl_languages": ["de", "fr"], "rtl_ratio": 0.6}
RESTRICTED = {"target_vocab_size": len(TARGET_IDS)}


@pytest.mark.parametrize(
    "compute",
    [
        partial(losses, "bert", objective=ALL, tr_bidirectional=True, tr_matryoshka_dims=[8]),
        partial(losses, "bert", objective="bow", rtl_tied=False, **RESTRICTED),
        partial(losses, "bert", objective="tr+bow", pooling="mean", projection="mlp"),
        partial(losses, "xlm-roberta", objective="rtl+mlm", rtl_reembed=True, **FROM_BOTH),
        partial(losses, "modernbert", objective="tr+rtl", tr_mask_duplicates=False),
        partial(losses, "deberta-v2", objective="tr+tlm"),
        partial(losses, "mistral", objective="tr+rtl", pooling="lasttoken"),
        vectors_links_and_neighbours,
    ],
)
def test_a_gpu_gives_what_the_cpu_gives(
    compute: Callable, tiny_bert_dir: Path, waits: Counter
) -> None:
    expected, found = (compute(device, tiny_bert_dir) for device in ("cpu", "cuda"))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_training_seldom_waits_runs_to_the_end_and_resumes(
    flags: str, tmp_path: Path, waits: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = []  # at each step, the waits until then

    def step(self: DAPTrainer, *args: object) -> Tensor:
        before.append(waits.copy())
        return training_step(self, *args)

    training_step = DAPTrainer.training_step
    monkeypatch.setattr(DAPTrainer, "training_step", step)
    more = (
        "--objective tr+bow --head_steps 2 --head_pairs 32 "
        "--tr_hard_negatives 0.5 --dev_pairs 4 --max_steps 3 --save_strategy steps --save_steps 3"
    )
    command = f"{flags} {more} --output_dir {tmp_path}".split()
    main(command)
    of_a_step = before[2] - before[1]
    assert 0 < sum(of_a_step.values()) <= 6, of_a_step
    assert read_json(tmp_path / "head_results.json")["steps"] == 2
    loss = results(tmp_path)["eval_bow_loss"]
    (tmp_path / "train_results.json").unlink()
    main(command)
    assert results(tmp_path)["eval_bow_loss"] == pytest.approx(loss, rel=1e-3)
