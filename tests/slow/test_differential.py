"""Compare random settings and inputs with naive float64 loops, for as long as one likes.

    DIFFERENTIAL_SECONDS=450 python -m pytest -m slow -s tests/slow/test_differential.py

Each test draws seeds until its time is over, and prints how many it compared.
"""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_equal_weights, load_encoder, load_library, run
from evaluation.test_retrieval import naive_accuracy, naive_pool
from forked import run_killed
from naive import cosines
from test_objective_losses import rank, reconstruct, vector_of
from tiny_models import (
    COMBINATIONS,
    ENCODERS,
    make_batch,
    padded_left,
    step,
    tiny_model,
    widen,
    with_negatives,
)
from training.test_resume import run_killed_at

from dap_transformers.evaluation.retrieval import multilingual_pool_accuracy, retrieval_accuracy
from dap_transformers.publishing.layout import FolderOptions, build

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("DIFFERENTIAL_SECONDS", "5"))
FIRST_SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))
ALPHABETS = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x600), (0x900, 0xE80), (0x2000, 0x2070))
ALPHABETS += ((0x3040, 0x30FF), (0x4E00, 0x4F00), (0x1F600, 0x1F640))


def seeds(what: str) -> Iterator[random.Random]:
    """Yield random number generators until the time is over, at least two."""
    ends = time.monotonic() + SECONDS
    seed = FIRST_SEED
    while time.monotonic() < ends or seed < FIRST_SEED + 2:
        torch.manual_seed(seed)
        print(f"\r{what}: seeds {FIRST_SEED} to {seed}", end="", flush=True)
        yield random.Random(seed)
        seed += 1
    print()


def test_losses_are_those_of_naive_loops() -> None:
    for rng in seeds("losses"):
        pairs = rng.randint(2, 9)
        batch = make_batch(pairs, rng.randint(6, 14), rng.randrange(10**6))
        settings = {
            "rtl_ratio": rng.choice([0.3, 0.7, 1.0]),
            "tr_similarity": rng.choice(["dot", "cosine"]),
            "tr_temperature": rng.uniform(0.05, 4.0),
            "tr_margin": rng.choice([0.0, rng.uniform(0, 0.5)]),
            "tr_bidirectional": rng.random() < 0.5,
            "tr_weight": rng.uniform(0.1, 2),
        }
        objective = rng.choice(["tr", "rtl", "tr+rtl", "tr+bow", "tr+tlm", "tr+mlm"])
        model = tiny_model(rng.choice(ENCODERS), objective=objective, **settings).double()
        out = model(**batch)
        rows = range(pairs)
        if "tr" in objective.split("+"):
            sides = []
            for side in ("source", "target"):
                sides.append([vector_of(model, batch, side, row) for row in rows])
            losses = []
            for x, y in (sides, sides[::-1])[: 2 if settings["tr_bidirectional"] else 1]:
                for i in rows:
                    others = [y[j] for j in rows if j != i]
                    losses.append(rank(model.config, x[i], [y[i], *others])[0])
            expected = torch.stack(losses).mean().item()
            assert out.tr_loss.item() == pytest.approx(expected, rel=1e-8)
        if "rtl" in objective:
            losses = [loss for row in rows for loss in reconstruct(model, batch, row)]
            if losses:
                expected = torch.stack(losses).mean().item()
                assert out.rtl_loss.item() == pytest.approx(expected, rel=1e-8)


def test_layout_order_and_chunks_change_no_loss_and_no_gradient() -> None:
    for rng in seeds("layouts"):
        pairs = rng.randint(2, 9)
        batch = with_negatives(make_batch(pairs, rng.randint(6, 14), rng.randrange(10**6)))
        objective = rng.choice(COMBINATIONS)
        options = {"distill_size": 32} if "distill" in objective else {}
        model = tiny_model(rng.choice(ENCODERS), objective=objective, **options).double()
        loss, gradient = step(model, batch)
        order = torch.tensor(rng.sample(range(pairs), pairs))
        others = [
            step(model, widen(batch, rng.randint(1, 5))),
            step(model, padded_left(batch)),
            step(model, {name: value[order] for name, value in batch.items()}),
            step(model, batch, rng.randint(1, pairs)),
        ]
        for other_loss, other_gradient in others:
            assert other_loss == pytest.approx(loss, rel=1e-8)
            torch.testing.assert_close(other_gradient, gradient, rtol=1e-6, atol=1e-9)


def test_vectors_are_those_of_sentence_transformers(tiny_bert_dir: Path, tmp_path: Path) -> None:
    build(tiny_bert_dir, tmp_path / "hub", FolderOptions(pooling="mean"))
    ours = load_encoder(tmp_path / "hub")
    library = load_library(tmp_path / "hub")
    for rng in seeds("strings"):
        texts = []
        for _ in range(rng.randint(1, 20)):
            low, high = rng.choice(ALPHABETS)
            length = rng.choice([0, 1, 5, 40, 600])
            texts.append("".join(chr(rng.randrange(low, high)) for _ in range(length)))
        np.testing.assert_allclose(ours.encode(texts), library.encode(texts), atol=2e-5)


def test_accuracies_with_ties_are_those_of_naive_loops() -> None:
    for rng in seeds("accuracies"):
        generator = np.random.default_rng(rng.randrange(10**9))
        pairs = rng.randint(2, 60)
        source = generator.normal(size=(pairs, rng.randint(8, 32)))
        target = source + rng.uniform(0, 2) * generator.normal(size=source.shape)
        for side in (source, target):
            for _ in range(rng.randint(0, pairs // 3)):
                side[rng.randrange(pairs)] = side[rng.randrange(pairs)]
        both = np.concatenate([source, target])
        gaps = np.diff(np.sort(cosines(both, both)))
        if ((gaps > 1e-12) & (gaps < 1e-7)).any():
            continue  # float32 does not tell these cosines apart
        expected = naive_accuracy(source, target), naive_accuracy(target, source)
        assert retrieval_accuracy(source, target) == expected
        found = np.array(multilingual_pool_accuracy(source, target))
        expected = np.array([naive_pool(source, target), naive_pool(target, source)])
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_killed_runs_resume_to_the_same_weights(short_flags: str, tmp_path: Path) -> None:
    for number, rng in enumerate(seeds("kills")):
        save = rng.randint(1, 3)
        step_of_kill = rng.randint(save + 1, 6)
        more = rng.choice(["--rtl_ratio 0.7", "--tr_hard_negatives 0.5", "--objective tr+bow"])
        more += rng.choice(["", " --mini_batch_size 7", " --gradient_accumulation_steps 2"])
        more += f" --max_steps 7 --save_strategy steps --save_steps {save}"
        flags = f"{short_flags} {more} --seed {rng.randrange(1000)}"
        folders = [tmp_path / f"{name}{number}" for name in ("killed", "whole")]
        command = f"{flags} --output_dir {folders[0]}"
        run_killed(run_killed_at, step_of_kill, command)
        run(command)
        run(f"{flags} --output_dir {folders[1]}")
        assert_equal_weights(*folders)
