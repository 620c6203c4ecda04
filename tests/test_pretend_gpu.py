"""Our code on a pretend GPU (`pretend_gpu.py`), so that a machine without one finds some faults.

The tests show that no operation mixes tensors of the CPU and of the GPU, that our branches for
CUDA give the values of the CPU, and how often a training step waits for the GPU. They cannot show
whether CUDA's kernels work, how fast they are, how much memory they need, or how they round.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from conftest import LANGUAGES, results, synthetic_pairs
from pretend_gpu import STAND_INS, PretendTensor, flash_attention, pretend_gpu
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from tiny_models import ALL, gradients, make_batch, tiny_model, with_negatives
from torch import Tensor

from dap_transformers.alignment.align import align_words
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import read_json
from dap_transformers.search.exact import nearest
from dap_transformers.sentence_transformers import HEADS_FILE, DAPLoss
from dap_transformers.training.trainer import DAPTrainer
from modeling_dap import DAPConfig, DAPForPreTraining, DAPForSequenceClassification
from train_dap import main

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")

TARGET_IDS = [0, 2, *range(5, 250, 3)]
ODD_ROWS = torch.arange(6) % 2


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Let the test have a pretend GPU. Gives the places where the CPU waits for it."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    AcceleratorState._reset_state(True)
    with pretend_gpu() as waits:
        yield waits
    AcceleratorState._reset_state(True)


# ------------------------------------------------------------------------------ the tool itself


@pytest.mark.parametrize(
    "mixture",
    [
        lambda gpu, cpu: gpu + cpu,
        lambda gpu, cpu: torch.cat([gpu, cpu]),
        lambda gpu, cpu: F.linear(gpu, cpu),
        lambda gpu, cpu: cpu[gpu.long()],
        lambda gpu, cpu: gpu.index_select(0, cpu[0].long()),
        lambda gpu, cpu: gpu.index_put_((cpu[0].long(),), cpu),
    ],
)
def test_a_mixture_of_devices_raises(
    mixture: Callable[[Tensor, Tensor], Tensor], waits: Counter[str]
) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mixture(torch.zeros(2, 2, device="cuda"), torch.zeros(2, 2))


def test_what_cuda_allows_is_allowed(waits: Counter[str]) -> None:
    gpu = torch.arange(6.0).to("cuda").view(2, 3)
    assert (gpu * torch.tensor(2.0)).cpu().tolist() == [[0, 2, 4], [6, 8, 10]]
    gpu[torch.tensor([1])] = 0.0
    assert gpu.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert gpu.copy_(torch.ones(2, 3)).sum().item() == 6
    assert torch.zeros_like(gpu).device == gpu.new_ones(3).device == torch.device("cuda:0")
    assert type(gpu.cpu()) is Tensor
    for to_numpy in (lambda gpu: gpu.numpy(), np.asarray):
        with pytest.raises(TypeError, match="cuda:0"):
            to_numpy(gpu)


def test_places_where_the_cpu_waits_are_counted(waits: Counter[str]) -> None:
    gpu = torch.arange(6).to("cuda", non_blocking=True)
    gpu.sum() + gpu[2:].max()
    gpu.masked_fill(gpu > 2, 0)
    assert not waits
    gpu.sum().item()
    gpu[gpu > 2]
    gpu[torch.tensor([0])]
    gpu.nonzero()
    torch.tensor([1], device="cuda")
    assert sum(waits.values()) == 5


def test_a_model_trains_as_on_the_cpu(waits: Counter[str]) -> None:
    def trained(device: str) -> Tensor:
        torch.manual_seed(0)
        first = torch.nn.Linear(4, 4)
        second = torch.nn.Linear(4, 4)
        second.weight = first.weight
        model = torch.nn.Sequential(first, torch.nn.LayerNorm(4), second).to(device)
        assert first.weight is second.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        text = torch.ones(3, 4).cumsum(0).to(device)
        for _ in range(3):
            F.cross_entropy(model(text), torch.tensor([0, 1, 3]).to(device)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(first.weight, PretendTensor) == (device == "cuda")
        return torch.cat([value.cpu().flatten() for value in model.state_dict().values()])

    torch.testing.assert_close(trained("cuda"), trained("cpu"))


@pytest.mark.parametrize(
    ("is_causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (1, 1)), (True, (2, 0))]
)
def test_the_stand_in_for_flash_attention_is_attention(
    is_causal: bool, window: tuple[int, int], waits: Counter[str]
) -> None:
    query = torch.randn(6, 4, 4, dtype=torch.bfloat16)  # (T, H, d)
    key, value = torch.randn(2, 6, 2, 4, dtype=torch.bfloat16)  # two heads share a key
    states = [part.float().requires_grad_() for part in (query, key, value)]
    distance = torch.arange(6)[:, None] - torch.arange(6)
    left, right = (99 if reach < 0 else reach for reach in window)
    sees = (distance <= left) & (-distance <= (0 if is_causal else right))
    parts = []
    for start, end in ((0, 2), (2, 6)):
        heads = [part[start:end].transpose(0, 1).unsqueeze(0) for part in states]  # (1, H, t, d)
        mask = sees[: end - start, : end - start]
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    expected = torch.cat(parts)
    expected.square().sum().backward()

    packed = [part.to("cuda").requires_grad_() for part in (query, key, value)]
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device="cuda")
    arguments = (ends, ends, 4, 4, 0.0, is_causal, False)
    reach = dict(zip(("window_size_left", "window_size_right"), window))
    found, *_ = torch.ops.aten._flash_attention_forward(*packed, *arguments, scale=0.3, **reach)
    found.float().square().sum().backward()
    close = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found.float().cpu(), expected, **close)
    for ours, theirs in zip(packed, states):
        torch.testing.assert_close(ours.grad.float().cpu(), theirs.grad, **close)


# ------------------------------------------------------------------------------------- our code


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bert", {"objective": ALL, "tr_bidirectional": True, "tr_matryoshka_dims": [8]}),
        ("bert", {"objective": "tr+rtl+bow", "target_vocab_size": len(TARGET_IDS)}),
        ("bert", {"objective": "bow", "target_vocab_size": len(TARGET_IDS), "rtl_tied": False}),
        ("bert", {"objective": "tr+bow", "pooling": "mean", "projection": "mlp"}),
        (
            "xlm-roberta",
            {
                "objective": "rtl+mlm",
                "rtl_direction": "both",
                "rtl_languages": ["de", "fr"],
                "rtl_ratio": 0.6,
                "rtl_tied": False,
                "rtl_reembed": True,
            },
        ),
        ("modernbert", {"objective": "tr+rtl", "tr_mask_duplicates": False}),
        ("deberta-v2", {"objective": "tr+tlm"}),
    ],
)
def test_losses_and_gradients_are_those_of_the_cpu(
    model_type: str, fields: dict, waits: Counter[str]
) -> None:
    batch = with_negatives(make_batch()) | {"language_ids": ODD_ROWS}
    found = []
    for device in ("cpu", "cuda"):
        model = tiny_model(model_type, **fields)
        if "target_vocab_size" in fields:
            model.set_target_vocabulary(TARGET_IDS)
        model.to(device)
        if model.prediction_head is not None:
            model.prediction_head.start_bias(torch.arange(250))
        out = model(**{name: value.to(device) for name, value in batch.items()})
        out.loss.backward()
        found.append(torch.cat([out.loss.detach().view(1), gradients(model)]).cpu())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_half_precision_runs_through_flash_attention(
    waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(objective=ALL, target_vocab_size=len(TARGET_IDS))
    model.set_target_vocabulary(TARGET_IDS)
    batch = make_batch()
    expected = model(**batch).loss.item()

    flash = mock.Mock(wraps=flash_attention)
    monkeypatch.setitem(STAND_INS, torch.ops.aten._flash_attention_forward.default, flash)
    model.to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**{name: value.to("cuda") for name, value in batch.items()}).loss
    loss.backward()
    assert flash.called
    assert loss.item() == pytest.approx(expected, rel=0.02)


def test_training_runs_to_the_end_and_resumes(
    flags: list[str], tmp_path: Path, waits: Counter[str]
) -> None:
    more = (
        "--objective tr+bow --restrict_target_vocabulary true --head_steps 2 --head_pairs 32 "
        "--mini_batch_size 8 --tr_hard_negatives 0.5 --bf16 --dev_pairs 4 --max_steps 2 "
        "--save_strategy steps --save_steps 1"
    )
    command = [*flags, *more.split(), "--output_dir", str(tmp_path)]
    main(command)
    assert read_json(tmp_path / "head_results.json")["steps"] == 2
    loss = results(tmp_path)["eval_bow_loss"]
    (tmp_path / "train_results.json").unlink()
    shutil.rmtree(tmp_path / "checkpoint-2")
    main(command)
    assert results(tmp_path)["eval_bow_loss"] == pytest.approx(loss, rel=1e-3)


def test_a_training_step_seldom_waits(
    flags: list[str], tmp_path: Path, waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = []  # at each step, the waits until then

    def step(self: DAPTrainer, *args: object) -> Tensor:
        before.append(waits.copy())
        return training_step(self, *args)

    training_step = DAPTrainer.training_step
    monkeypatch.setattr(DAPTrainer, "training_step", step)
    more = "--objective tr+rtl --max_steps 4 --dev_pairs 1 --output_dir"
    main([*flags, *more.split(), str(tmp_path)])
    of_a_step = before[3] - before[2]
    assert 0 < sum(of_a_step.values()) <= 6, of_a_step


def test_encoding_search_and_alignment_give_what_the_cpu_gives(
    tiny_bert_dir: Path, waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap_transformers.search.exact.fastest_product", lambda device: "bfloat16")
    sources, targets = zip(*synthetic_pairs(LANGUAGES[0], 20), strict=True)
    found = []
    for device in ("cpu", "cuda"):
        encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", device=device)
        vectors = encoder.encode([*sources, *targets], normalize=True)
        links = [aligned.pharaoh() for aligned in align_words(encoder, sources, targets)]
        found.append((vectors, links))
    (expected, expected_links), (vectors, links) = found
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert links == expected_links
    neighbours = nearest(vectors[:20], vectors[20:])
    assert neighbours.tolist() == (expected[:20] @ expected[20:].T).argmax(1).tolist()


def test_a_classifier_runs(waits: Counter[str]) -> None:
    config = DAPConfig(tiny_model().config.encoder_config, num_labels=3)
    model = DAPForSequenceClassification(config).eval()
    ids = torch.randint(5, 250, (3, 7))
    mask = (torch.arange(7) < torch.tensor([[3], [7], [5]])).long()
    labels = torch.tensor([0, 2, 1])
    expected = model(ids, mask, labels).loss.detach()
    loss = model.to("cuda")(ids.to("cuda"), mask.to("cuda"), labels.to("cuda")).loss
    loss.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected)


@pytest.mark.parametrize("size", [None, 4])
def test_the_loss_for_sentence_transformers_runs(
    size: int | None, tiny_bert_dir: Path, tmp_path: Path, waits: Counter[str]
) -> None:
    heads = DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr+rtl+bow")
    modules = [Transformer(str(tiny_bert_dir)), Pooling(32, "cls")]
    model = SentenceTransformer(modules=modules, device="cuda")
    loss = DAPLoss(model, heads, mini_batch_size=size)
    batch = {name: value.to("cuda") for name, value in make_batch().items()}
    columns = []
    for side in ("source", "target"):
        columns.append({key: batch[f"{side}_{key}"] for key in ("input_ids", "attention_mask")})
    sum(loss(columns, None).values()).backward()
    assert all(weight.grad.is_cuda for weight in heads.rtl_head.parameters())
    model.save_pretrained(str(tmp_path), create_model_card=False)
    loss.load_heads(load_file(tmp_path / HEADS_FILE))
