from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import LANGUAGES, synthetic_pairs
from datasets import concatenate_datasets
from transformers import PreTrainedTokenizerFast, TrainingArguments

import dap.training.trainer
from dap.text.corpus import load_bitext
from dap.training.batches import BitextCollator, LanguageMixSampler, tokenize_bitext
from dap.training.trainer import DAPTrainer, StepMeter
from dap.training.training_arguments import DAPTrainingArguments
from encoder_dap import pool
from modeling_dap import DAPForPreTraining

MakeTrainer = Callable[..., DAPTrainer]


@pytest.fixture(scope="module")
def tokenized(
    bitext_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict:
    text = load_bitext([bitext_dir], cache_dir=tmp_path_factory.mktemp("cache"))
    return tokenize_bitext(text, tiny_tokenizer, 16)


@pytest.fixture
def make_trainer(
    tmp_path: Path, tokenized: dict, tiny_bert_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> MakeTrainer:
    def make(objective: str = "tr+rtl", **arguments: object) -> DAPTrainer:
        options = {
            "per_device_train_batch_size": 8,
            "max_steps": 4,
            "logging_steps": 1,
            "report_to": [],
        }
        options |= {"disable_tqdm": True, **arguments}
        args = DAPTrainingArguments(output_dir=str(tmp_path / "out"), **options)
        dev = {
            language: list(zip(*synthetic_pairs(language, 15, seed=1))) for language in LANGUAGES
        }
        return DAPTrainer(
            model=DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective=objective),
            args=args,
            train_dataset=concatenate_datasets(list(tokenized.values())),
            train_sampler=LanguageMixSampler([200, 200, 200], "natural", 0.5, seed=0),
            data_collator=BitextCollator(tiny_tokenizer.pad_token_id, sorted(tokenized)),
            processing_class=tiny_tokenizer,
            dev_bitext=dev,
            max_seq_length=16,
        )

    return make


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"args": TrainingArguments}, "args are TrainingArguments: give DAPTrainingArguments"),
        ({"dev_bitext": {"de": (["Ja"], ["Yes"])}}, "processing_class=None: give the tokenizer"),
        ({"eval_dataset": {"de": (["Ja"], ["Yes"])}}, "eval_dataset=.*: give none, but dev_bitext"),
        ({"compute_metrics": dict}, "compute_metrics=<class 'dict'>: give none"),
        ({"compute_loss_func": max}, "compute_loss_func=.*: give none"),
        ({"train_dataset": [{}] * 3}, "3 training pairs do not fill one batch of 8"),
    ],
)
def test_arguments_of_trainer_that_would_do_nothing_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path, tiny_bert_dir: Path
) -> None:
    given = {"args": DAPTrainingArguments, **given}
    given["args"] = given["args"](str(tmp_path / "out"), per_device_train_batch_size=8)
    with pytest.raises(ValueError, match=message):
        DAPTrainer(
            model=DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr"), **given
        )


def test_what_is_frozen_or_grouped_anew_is_not_made_elsewhere(
    tmp_path: Path, tiny_bert_dir: Path
) -> None:
    def model_init() -> DAPForPreTraining:
        return DAPForPreTraining.from_encoder(str(tiny_bert_dir))

    frozen = DAPTrainingArguments(str(tmp_path / "out"), freeze_encoder=True)
    with pytest.raises(ValueError, match="model_init=.*: give model"):
        DAPTrainer(model_init=model_init, args=frozen)
    args, model = DAPTrainingArguments(str(tmp_path / "out"), head_learning_rate=1e-3), model_init()
    own = torch.optim.SGD(model.parameters()), None
    with pytest.raises(
        ValueError, match="(?s)optimizer=SGD.*: give none, or no head_learning_rate"
    ):
        DAPTrainer(model=model, args=args, optimizers=own)


def lines_with(name: str, trainer: DAPTrainer) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if name in line]


def accuracy_by_loops(trainer: DAPTrainer, language: str) -> float:
    """Percent of a language's dev sources whose nearest target is their own."""
    sides = []
    for side in trainer.dev_bitext[language]:
        batch = trainer.processing_class(
            list(side), padding=True, truncation=True, max_length=16, return_tensors="pt"
        )
        with torch.no_grad():
            states = (
                trainer.model.eval()
                .dap.encoder(batch["input_ids"], batch["attention_mask"])
                .last_hidden_state
            )
        vectors = (
            pool(states, batch["attention_mask"], trainer.model.config.pooling)
            .numpy()
            .astype(np.float64)
        )
        sides.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    cosines = sides[0] @ sides[1].T  # (15, 15)
    first, second = np.sort(cosines, axis=1)[:, [-1, -2]].T
    assert (first - second).min() > 1e-5  # no rounding decides
    return 100 * np.mean(
        [max(range(15), key=row.__getitem__) == i for i, row in enumerate(cosines)]
    )


@pytest.mark.parametrize(
    ("objective", "batches"), [("tr", 2), ("tr+tlm", 1), ("tr+rtl", 1), ("mlm", 1)]
)
def test_log_has_every_component_and_they_add_up(
    objective: str, batches: int, make_trainer: MakeTrainer
) -> None:
    options = {
        "gradient_accumulation_steps": batches,
        "include_num_input_tokens_seen": "non_padding",
    }
    trainer, tokens = make_trainer(objective, **options), []
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(int(kwargs["source_attention_mask"].sum())),
        with_kwargs=True,
    )
    trainer.train()
    lines = lines_with("loss", trainer)
    assert len(lines) == 4
    assert lines[-1]["num_input_tokens_seen"] == sum(tokens) > 0
    config = trainer.model.config
    weights = {
        "tr_loss": 1,
        "rtl_loss": config.rtl_weight,
        "tlm_loss": config.tlm_weight,
        "mlm_loss": 1,
    }
    for line in lines:
        total = sum(weight * line[name] for name, weight in weights.items() if name in line)
        assert line["loss"] == pytest.approx(total, abs=2e-3)
        assert {name for name in weights if name in line} == {
            f"{part}_loss" for part in objective.split("+")
        }
        assert line["pairs_per_second"] > 0
        if objective != "mlm":
            assert line["accuracy"] in [right / 8 / batches for right in range(8 * batches + 1)]
            assert line["negatives"] == 7


@pytest.mark.parametrize(
    ("objective", "steps"), [("tr+rtl", 2), ("mlm", 1)]
)  # later masks depend on the chunks
def test_chunks_train_as_whole_batches(
    objective: str, steps: int, make_trainer: MakeTrainer
) -> None:
    options = {
        "gradient_accumulation_steps": steps,
        "gradient_checkpointing": True,
        "bf16": True,
        "use_cpu": True,
    }
    logs = []
    for size in (None, 3, 8):
        torch.manual_seed(0)
        trainer = make_trainer(objective, mini_batch_size=size, max_steps=steps, **options)
        trainer.train()
        logs.append(lines_with("loss", trainer))
    assert [len(lines) for lines in logs] == [steps] * 3
    own = {"mlm": ("mlm_loss",), "tr+rtl": ("tr_loss", "rtl_loss", "negatives", "ignored_tokens")}[
        objective
    ]
    for plain, chunked, whole in zip(*logs, strict=True):
        assert chunked.keys() == plain.keys()
        for name in ("loss", "grad_norm", *own):
            assert chunked[name] == pytest.approx(plain[name], rel=1e-3), name
            assert whole[name] == pytest.approx(plain[name], rel=1e-6), name


def test_processes_wait_for_each_other_at_the_last_chunk_alone(make_trainer: MakeTrainer) -> None:
    trainer, waits = (
        make_trainer("tr", mini_batch_size=3, gradient_accumulation_steps=2, max_steps=1),
        [],
    )
    accelerator, no_sync = trainer.accelerator, trainer.accelerator.no_sync
    depth = []

    @contextmanager
    def counted(model: torch.nn.Module) -> Iterator[None]:
        depth.append(model)
        with no_sync(model):
            yield
        depth.pop()

    backward = accelerator.backward
    accelerator.no_sync = counted
    accelerator.backward = lambda loss: waits.append(not depth) or backward(loss)
    trainer.train()
    assert waits == [False] * 5 + [True]  # two batches of three chunks


def test_compiled_layers_train_as_plain_ones(make_trainer: Callable) -> None:
    losses = []
    for compiles in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        torch.manual_seed(0)
        losses.append(make_trainer("tr+rtl+bow", max_steps=1, **compiles).train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("objective", ["tr+rtl", "mlm"])
def test_evaluation_is_retrieval_of_the_dev_pairs(
    objective: str, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(objective)
    trainer.model.config.pooling = trainer.model.dap.config.pooling = (
        "mean"  # first tokens are too much alike
    )
    metrics = trainer.evaluate()
    for language in LANGUAGES:
        assert metrics[f"eval_{language}-en_accuracy"] == pytest.approx(
            accuracy_by_loops(trainer, language)
        )
    both = [
        metrics[f"eval_{pair}_accuracy"]
        for code in LANGUAGES
        for pair in (f"{code}-en", f"en-{code}")
    ]
    assert metrics["eval_mean_accuracy"] == pytest.approx(np.mean(both))


@pytest.mark.parametrize(
    ("poisoned", "message"),
    [
        ("weight", r"not finite at step 4 \(tr_loss=nan.*languages: .*pairs: (\w\w:\d+ ?){8}"),
        (
            "gradient",
            r"gradient is not finite at step 4 \(norm=(nan|inf)\); languages: .*pairs: (\w\w:\d+ ?){8}\. No",
        ),
    ],
)
def test_what_is_not_finite_stops_the_run_with_step_languages_and_pairs(
    poisoned: str,
    message: str,
    make_trainer: MakeTrainer,
    tmp_path: Path,
) -> None:
    trainer = make_trainer(max_steps=6, save_strategy="steps", save_steps=2)
    weight = trainer.model.dap.encoder.embeddings.LayerNorm.weight

    def poison(*_: object) -> None:
        if trainer.state.global_step == 3:
            weight.data.fill_(float("nan"))

    if poisoned == "weight":
        trainer.model.register_forward_pre_hook(poison)
    else:
        weight.register_hook(
            lambda gradient: gradient * (float("inf") if trainer.state.global_step == 3 else 1.0)
        )
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    assert torch.isfinite(weight).all() == (poisoned == "gradient")  # no step was made
    assert [folder.name for folder in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    saved = DAPForPreTraining.from_pretrained(tmp_path / "out/checkpoint-2")
    assert all(torch.isfinite(value).all() for value in saved.parameters())


def test_each_epoch_has_the_order_of_the_sampler(make_trainer: MakeTrainer) -> None:
    trainer, seen = (
        make_trainer("tr", per_device_train_batch_size=60, max_steps=20, learning_rate=0.0),
        [],
    )
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: (
        seen.extend(row["pair_id"] for row in rows) or collate(rows)
    )
    trainer.train()
    rows, sampler = (
        trainer.train_dataset["pair_id"][:],
        LanguageMixSampler([200, 200, 200], "natural", 0.5, seed=0),
    )
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert seen[600 * epoch : 600 * (epoch + 1)] == [rows[number] for number in sampler]


def test_the_sampler_is_told_the_epoch_that_a_resumed_run_is_in(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("tr")
    trainer.state.epoch = 2.7  # accelerate does not tell it where several processes skip batches
    trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
    assert trainer.train_sampler.epoch == 2


def test_frozen_word_embeddings_stay_and_the_rest_learns(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(freeze_word_embeddings=True, learning_rate=1e-2)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = {
        name
        for name, value in trainer.model.named_parameters()
        if not torch.equal(value, before[name])
    }
    assert set(before) - changed == {"dap.encoder.embeddings.word_embeddings.weight"}


@pytest.mark.parametrize("size", [None, 3])
def test_a_frozen_encoder_drops_nothing_and_is_not_differentiated(
    size: int | None, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(freeze_encoder=True, mini_batch_size=size, max_steps=2)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    seen = []
    layers = trainer.model.dap.encoder.encoder.layer, trainer.model.rtl_head.blocks.encoder.layer
    for part in layers:
        part[0].register_forward_hook(
            lambda module, _, out: seen.append((module.training, out.requires_grad))
        )
    trainer.train()
    encoder, head = (False, False), (True, True)
    assert set(seen) == {encoder, head}


def test_heads_have_a_learning_rate_of_their_own(make_trainer: MakeTrainer) -> None:
    options = {"learning_rate": 1e-4, "warmup_steps": 2, "max_steps": 6, "weight_decay": 0.1}
    trainer, plain = make_trainer(head_learning_rate=1e-3, **options), make_trainer(**options)
    names = {id(value): name for name, value in trainer.model.named_parameters()}
    plain.create_optimizer()
    decayed = {
        len(group["params"]) for group in plain.optimizer.param_groups if group["weight_decay"]
    }
    trainer.train()
    rates, decays = {}, set()
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)]] = group["initial_lr"]
            decays |= {names[id(parameter)]} if group["weight_decay"] else set()
    assert rates.keys() == {*names.values()}
    assert {
        rate: {name.startswith("dap.") for name in rates if rates[name] == rate}
        for rate in rates.values()
    } == {
        1e-4: {True},
        1e-3: {False},
    }
    assert {len(decays)} == decayed
    lines = lines_with("head_learning_rate", trainer)
    assert len(lines) == 6
    assert [line["head_learning_rate"] for line in lines] == pytest.approx(
        [10 * li["learning_rate"] for li in lines]
    )
    assert max(line["head_learning_rate"] for line in lines) == 1e-3


def test_with_a_rate_of_zero_for_either_the_other_learns_alone(make_trainer: MakeTrainer) -> None:
    for rates in ((0.0, 1e-3), (1e-3, 0.0)):
        trainer = make_trainer(
            learning_rate=rates[0], head_learning_rate=rates[1], mini_batch_size=4, max_steps=2
        )
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        moved = {
            name
            for name, value in trainer.model.named_parameters()
            if not torch.equal(value, before[name])
        }
        assert {name.startswith("dap.") for name in moved} == {rates[0] > 0}


def test_a_learning_rate_for_heads_that_are_not_there_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        ValueError,
        match="--head_learning_rate 0.1 is for heads, but objective 'tr' has none: leave",
    ):
        make_trainer("tr", head_learning_rate=0.1).train()


def test_pace_is_that_of_training_alone(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]  # seconds: only what is said here takes time

    def taking(seconds: float, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock[0] += seconds
            return function(*args, **kwargs)

        return timed

    monkeypatch.setattr(
        dap.training.trainer, "time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    trainer = make_trainer("tr", max_steps=4, logging_steps=2, save_strategy="steps", save_steps=2)
    trainer.save_model = taking(1000.0, trainer.save_model)
    trainer.training_step = taking(1.0, trainer.training_step)
    clock[0] += 1000.0  # between building and training
    trainer.train()
    assert StepMeter().read(1) == {}  # without a step it says nothing
    paces = [line["pairs_per_second"] for line in lines_with("pairs_per_second", trainer)]
    assert paces == [
        16.0,
        8.0,
    ]  # 8 pairs a step; the clock starts with the first batch, of which it has seen all


@pytest.mark.parametrize("bar", [False, True])
def test_evaluation_is_printed_in_brief_and_logged_in_full(
    bar: bool,
    make_trainer: MakeTrainer,
    capsys: pytest.CaptureFixture,
) -> None:
    trainer = make_trainer(
        "tr", max_steps=1, eval_strategy="steps", eval_steps=1, disable_tqdm=not bar
    )
    trainer.train()
    (logged,) = lines_with("eval_mean_accuracy", trainer)
    directions = [name for name in logged if name.endswith("_accuracy") and "-" in name]
    printed = "".join(capsys.readouterr())
    shown = [name for name in directions if name in printed]
    assert (len(directions), len(shown)) == (6, 3)
    assert max(logged[name] for name in shown) <= min(
        logged[name] for name in set(directions) - set(shown)
    )
    assert all(name in printed for name in ("eval_mean_accuracy", "eval_seconds", "tr_loss"))
