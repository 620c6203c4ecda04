"""The trainer: its log, its evaluation, and what it freezes, chunks, prints and refuses."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import LANGUAGES, synthetic_pairs, tiny_tokenizer, weights
from datasets import Dataset, concatenate_datasets
from tiny_models import start_from, tiny_model
from torch import nn
from torch.testing import assert_close
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from dap_transformers.errors import UserError
from dap_transformers.evaluation.retrieval import Retrieval
from dap_transformers.text.corpus import load_bitext
from dap_transformers.training.arguments import DAPTrainingArguments
from dap_transformers.training.batches import BitextCollator, tokenize_bitext
from dap_transformers.training.mixing import LanguageMixSampler
from dap_transformers.training.resume import find_resumable
from dap_transformers.training.source_information import SourceInformation
from dap_transformers.training.step_log import StepMeter
from dap_transformers.training.trainer import DAPTrainer


@pytest.fixture(scope="module")
def tokenized(bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    text = load_bitext([bitext_dir], cache_dir=tmp_path_factory.mktemp("cache"))
    return tokenize_bitext(text, tiny_tokenizer(), 16)


@pytest.fixture
def make_trainer(tmp_path: Path, tokenized: dict, tiny_bert_dir: Path) -> Callable:
    def make(objective: str = "tr+rtl", **arguments: object) -> DAPTrainer:
        options = {
            "per_device_train_batch_size": 8,
            "max_steps": 4,
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
        }
        args = DAPTrainingArguments(tmp_path / "out", **options | arguments)
        dev = {language: synthetic_pairs(language, 15, seed=1) for language in LANGUAGES}
        return DAPTrainer(
            model=start_from(tiny_bert_dir, objective=objective),
            args=args,
            train_dataset=concatenate_datasets(list(tokenized.values())),
            train_sampler=LanguageMixSampler([200, 200, 200], "natural", 0.5, seed=0),
            data_collator=BitextCollator(tiny_tokenizer().pad_token_id, sorted(tokenized)),
            processing_class=tiny_tokenizer(),
            evaluators=[Retrieval(dev, pool=True), SourceInformation(dev)],
            max_seq_length=16,
        )

    return make


def lines_with(name: str, trainer: DAPTrainer) -> list[dict[str, float]]:
    """Return the lines of the log that have this value."""
    return [line for line in trainer.state.log_history if name in line]


ROWS = Dataset.from_dict({"source": ["Ja"]})
OWN_OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(
    ("given", "arguments", "says"),
    [
        ({"eval_dataset": ROWS}, {}, "evaluators"),
        ({"compute_metrics": len}, {}, "evaluators"),
        ({"processing_class": None}, {}, "tokenizer as processing_class"),
        (
            {"train_sampler": [0]},
            {"label_smoothing_factor": 0.1},
            "label_smoothing_factor has no effect",
        ),
        (
            {"train_sampler": [0]},
            {"train_sampling_strategy": "sequential"},
            "train_sampling_strategy has no effect",
        ),
        ({"train_dataset": {"de": ROWS}}, {}, "concatenate_datasets"),
        ({"train_dataset": ROWS.to_iterable_dataset()}, {}, "a dataset with a length"),
        (
            {"optimizers": (OWN_OPTIMIZER, None)},
            {"head_learning_rate": 1},
            "head_learning_rate.*no optimizer",
        ),
    ],
)
def test_arguments_of_transformers_are_refused(
    given: dict, arguments: dict, says: str, tmp_path: Path
) -> None:
    args = DAPTrainingArguments(tmp_path, report_to=[], **arguments)
    options = {"model": tiny_model(), "args": args, "processing_class": tiny_tokenizer()}
    with pytest.raises(UserError, match=says):
        DAPTrainer(**options | given)


def test_models_and_methods_that_do_not_fit_the_trainer_are_refused(tmp_path: Path) -> None:
    for model in ({"model": tiny_model()}, {"model_init": lambda: tiny_model()}):
        with pytest.raises(UserError, match="DAPTrainingArguments"):
            DAPTrainer(**model, args=TrainingArguments(tmp_path, report_to=[]))

    class OwnLoss(DAPTrainer):
        compute_loss = Trainer.compute_loss

    args = DAPTrainingArguments(tmp_path, report_to=[], mini_batch_size=2)
    with pytest.raises(UserError, match="mini_batch_size does not call"):
        OwnLoss(model=tiny_model(), args=args)

    given = {"args": args, "processing_class": tiny_tokenizer()}
    trainer = DAPTrainer(model=tiny_model(), **given)
    for measure in (trainer.evaluate, trainer.predict):
        with pytest.raises(UserError, match="evaluators"):
            measure(ROWS)
    with pytest.raises(UserError, match="give BitextCollator negatives"):
        DAPTrainer(model=tiny_model(tr_hard_negatives=0.5), train_dataset=ROWS, **given)
    wrapped = tiny_model()
    wrapped.dap.encoder = nn.Sequential(wrapped.dap.encoder)
    with pytest.raises(UserError, match="encoder is a Sequential.*peft_lora_rank"):
        DAPTrainer(model=wrapped, args=args)


# The log


def test_the_trainer_of_transformers_takes_the_same_batches(
    make_trainer: Callable, tmp_path: Path
) -> None:
    ours = make_trainer("tr")
    rows = ours.train_dataset.select(range(8))
    expected = ours.model.eval()(**ours.data_collator([*rows])).loss.item()
    args = TrainingArguments(tmp_path, max_steps=1, remove_unused_columns=False, report_to=[])
    stock = Trainer(ours.model, args, ours.data_collator, rows, eval_dataset=rows)
    assert stock.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    stock.train()
    assert stock.evaluate()["eval_loss"] < expected


def test_an_own_evaluator_is_enough_unless_the_best_model_is_wanted(make_trainer: Callable) -> None:
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, save_steps=2)
    trainer.evaluators = trainer.evaluators[1:]  # without accuracies
    trainer.train()
    assert len(lines_with("eval_rtl_loss", trainer)) == 2
    trainer.args.load_best_model_at_end = True
    with pytest.raises(UserError, match="metric_for_best_model=eval_mean_accuracy"):
        trainer.train()


def test_a_run_that_sigterm_stops_is_not_finished(make_trainer: Callable) -> None:
    trainer = make_trainer("tr", enable_jit_checkpoint=True, max_steps=4, save_total_limit=1)
    (callback,) = (
        each
        for each in trainer.callback_handler.callbacks
        if isinstance(each, JITCheckpointCallback)
    )

    class Stop(TrainerCallback):
        def on_step_begin(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
            callback.jit_manager.is_checkpoint_requested = state.global_step == 2

    trainer.callback_handler.callbacks.insert(0, Stop())  # before the callback that saves
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    checkpoint = Path(find_resumable(trainer.args))
    assert checkpoint.name == "checkpoint-3"  # the step whose dropout is drawn is finished
    assert not list(checkpoint.glob("*incomplete*"))

    # Stopping early is an end.
    trainer = make_trainer("tr", enable_jit_checkpoint=True, save_steps=1)

    class StopEarly(TrainerCallback):
        def on_step_end(self, *inputs: Any, **_: object) -> None:
            inputs[2].should_training_stop = True

    trainer.add_callback(StopEarly)
    assert trainer.train().global_step == 1


def test_a_checkpoint_without_its_schedule_is_not_resumed(make_trainer: Callable) -> None:
    trainer = make_trainer("tr", save_steps=2)
    trainer.train()
    checkpoint = Path(trainer.args.output_dir, "checkpoint-2")
    (checkpoint / "scheduler.pt").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_the_saved_model_takes_sentences_of_the_training_whole(make_trainer: Callable) -> None:
    trainer = make_trainer("tr")
    assert trainer.saved_encoder(trainer.model).max_seq_length == 80  # its positions
    trainer.max_seq_length, trainer.saved_length = 16, 8
    assert trainer.saved_encoder(trainer.model).max_seq_length == 16


def test_a_hub_that_cannot_be_reached_ends_the_run_before_it_begins(make_trainer: Callable) -> None:
    with pytest.raises(UserError, match="push_to_hub: "):
        make_trainer("tr", push_to_hub=True, hub_model_id="user/model")


def test_two_evaluators_that_log_the_same_name_are_refused(make_trainer: Callable) -> None:
    trainer = make_trainer()
    other = copy.copy(trainer.evaluators[0])
    other.name = "other"
    with pytest.raises(ValueError, match="two evaluators log de-en_accuracy"):
        trainer.evaluate([*trainer.evaluators, other])


@pytest.mark.parametrize(("objective", "batches"), [("tr+tlm", 2), ("mlm", 1)])
def test_the_log_has_every_loss_and_they_add_up(
    objective: str, batches: int, make_trainer: Callable
) -> None:
    trainer = make_trainer(objective, gradient_accumulation_steps=batches)
    trainer.train()
    lines = lines_with("loss", trainer)
    assert len(lines) == 4
    weights = {"tr": 1, "rtl": 1, "tlm": trainer.model.config.tlm_weight, "mlm": 1}
    parts = objective.split("+")
    for line in lines:
        total = sum(weights[part] * line[f"{part}_loss"] for part in parts)
        assert line["loss"] == pytest.approx(total, abs=2e-3)
        assert not [part for part in weights if part not in parts and f"{part}_loss" in line]
        if objective != "mlm":
            right = line["accuracy"] * 8 * batches
            assert right == pytest.approx(round(right), abs=1e-2)
            assert line["negatives"] == 7


def test_the_pace_leaves_out_saving_and_waiting(
    make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this test only a training step (1 s) and a save (1,000 s) take time.
    clock = [0.0]

    def taking(seconds: float, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock[0] += seconds
            return function(*args, **kwargs)

        return timed

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    trainer = make_trainer("tr", max_steps=4, logging_steps=2, save_strategy="steps", save_steps=2)
    trainer.save_model = taking(1000.0, trainer.save_model)
    trainer.training_step = taking(1.0, trainer.training_step)
    clock[0] += 1000.0  # between building and training
    trainer.train()

    # Two steps have 16 pairs. The clock starts within the first step, after the second of its work.
    paces = [line["pairs_per_second"] for line in lines_with("pairs_per_second", trainer)]
    assert paces == [16.0, 8.0]
    assert StepMeter().read(1) == {}  # there was no step


# Evaluation


# Four evaluations of 90 sentences, and which of them are the best so far.
@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("accuracy", (90, 90, 70, 84), (True, True, False, True)),
        ("accuracy", (90, 79, 79, 78), (True, False, False, False)),
        ("accuracy", (100, 100, 99.9, 100), (True, True, True, True)),
        ("error", (30, 10, 21, 10), (True, True, False, True)),
        ("squared_error", (150, 120, 130, 140), (True, True, False, False)),  # no percentages
    ],
)
def test_the_last_evaluation_within_two_standard_errors_of_the_best_is_kept(
    name: str, values: tuple, best: tuple, make_trainer: Callable
) -> None:
    metric = f"eval_mean_{name}"
    trainer = make_trainer("tr", eval_strategy="steps", save_steps=1, metric_for_best_model=metric)
    # sqrt(0.9 * 0.1 + 0.84 * 0.16) / sqrt(90) is 5.0%, and for 0.79 it is 5.3%.
    trainer.measured_on = {metric: 90}
    for step, (value, is_best) in enumerate(zip(values, best)):
        metrics = {metric: value}
        trainer.state.global_step = step
        trainer.log(metrics)
        assert trainer._determine_best_metric(metrics, trial=None) == is_best
        if is_best:
            kept = step
    assert trainer.state.best_global_step == kept
    assert trainer.state.best_metric == (min if name.endswith("error") else max)(values)


def test_an_accuracy_of_one_language_has_no_standard_error_of_all(
    make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("tr")
    assert "eval_de-en_accuracy" in trainer.evaluate()
    sentences = 2 * sum(map(len, trainer.evaluators[0].pairs.values()))
    assert trainer.measured_on["eval_mean_accuracy"] == sentences
    assert "eval_de-en_accuracy" not in trainer.measured_on
    monkeypatch.setattr(Retrieval, "size", lambda _: 0)  # as of one that names no sentences
    trainer = make_trainer("tr")
    trainer.evaluate()
    assert not trainer.measured_on


def test_the_averages_of_a_schedule_free_optimizer_are_measured_and_saved(
    make_trainer: Callable,
) -> None:
    class Averaged(torch.optim.SGD):
        """The average of a weight is 1 more than the weight that is trained."""

        is_average = True

        def add(self, change: float, is_average: bool) -> None:
            if is_average != self.is_average:
                for parameter in self.param_groups[0]["params"]:
                    parameter.data += change
            self.is_average = is_average

        def train(self) -> None:
            self.add(-1.0, False)

        def eval(self) -> None:
            self.add(1.0, True)

    trainer = make_trainer("tr", max_steps=2, save_steps=1, eval_strategy="steps", eval_steps=2)
    before = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    trainer.optimizer = Averaged(trainer.model.parameters(), lr=0.0)
    measured = []
    trainer.encoder = lambda: measured.append(copy.deepcopy(trainer.model.state_dict())) or Mock()
    trainer.evaluators = []
    trainer.train()
    for step in (1, 2):
        saved = weights(Path(trainer.args.output_dir, f"checkpoint-{step}"))
        assert_close(dict(saved), before, rtol=0, atol=1e-6)
    assert_close(dict(measured[0]), before, rtol=0, atol=1e-6)


def test_the_best_model_is_kept_also_between_two_saves(
    make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = np.array([0.0, 10.0, 30.0, 95.0, 60.0], np.float32)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 2}
    trainer = make_trainer("tr", load_best_model_at_end=True, **options)
    logged = Retrieval.logged

    def changed(self: Retrieval, numbers: dict) -> dict:
        return logged(self, numbers) | {"mean_accuracy": accuracies[trainer.state.global_step]}

    monkeypatch.setattr(Retrieval, "logged", changed)
    trainer.train()
    assert trainer.state.best_global_step == 3
    best = Path(trainer.args.output_dir, "checkpoint-3")
    assert_close(dict(trainer.model.state_dict()), weights(best), rtol=0, atol=0)


# Steps


def test_processes_exchange_gradients_only_at_the_last_chunk(make_trainer: Callable) -> None:
    trainer = make_trainer("tr", mini_batch_size=3, gradient_accumulation_steps=2, max_steps=1)
    watched = Mock()
    watched.no_sync.return_value = nullcontext()
    watched.backward.side_effect = trainer.accelerator.backward
    trainer.accelerator.no_sync = watched.no_sync
    trainer.accelerator.backward = watched.backward
    trainer.train()
    # Two batches of three chunks.
    first = ["no_sync", *["backward"] * 3]
    second = [*["no_sync", "backward"] * 2, "backward"]
    assert [name for name, *_ in watched.mock_calls] == first + second


@pytest.mark.slow
def test_compiled_layers_train_as_plain_ones(make_trainer: Callable) -> None:
    losses = []
    for compiles in ({}, {"torch_compile_backend": "eager"}):
        torch.manual_seed(0)
        trainer = make_trainer("tr+rtl+bow", max_steps=1, **compiles)
        losses.append(trainer.train().training_loss)
    assert trainer.args.torch_compile
    assert trainer.args.tf32 is False  # compiling does not switch it on
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(make_trainer: Callable, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=3, save_strategy="steps", save_steps=1)
    weight = trainer.model.dap.encoder.embeddings.LayerNorm.weight

    def poison(*_: object) -> None:
        if trainer.state.global_step == 1:
            weight.data.fill_(float("nan"))

    trainer.model.register_forward_pre_hook(poison)
    # The message names the eight pairs.
    named = r"loss is not finite at step 2: .*tr_loss=nan.*pairs: (\w\w:\d+ ?){8}"
    with pytest.raises(UserError, match=named):
        trainer.train()
    checkpoints = [folder.name for folder in (tmp_path / "out").glob("checkpoint-*")]
    assert checkpoints == ["checkpoint-1"]


def test_weights_that_are_not_finite_are_not_saved(make_trainer: Callable, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=1)
    weight = trainer.model.dap.encoder.embeddings.LayerNorm.weight
    weight.register_hook(lambda gradient: gradient / (1 - trainer.state.global_step))
    with pytest.raises(UserError, match="the weights are not finite after step 2: begin anew"):
        trainer.train()
    saved = [folder.parent.name for folder in (tmp_path / "out").rglob("model.safetensors")]
    assert saved == ["checkpoint-1"]


def test_a_batch_without_negatives_stops_the_run(make_trainer: Callable) -> None:
    trainer = make_trainer()
    trainer.train_sampler = None
    trainer.train_dataset = trainer.train_dataset.select([5] * 8)  # one pair, eight times
    with pytest.raises(ValueError, match=r"step 1 has no negatives.*pairs: de:5 de:5"):
        trainer.train()


def test_each_epoch_has_the_order_of_the_sampler(make_trainer: Callable) -> None:
    trainer = make_trainer("tr", per_device_train_batch_size=60, max_steps=20)
    trainer.training_step = lambda *_: torch.zeros(())  # only the order matters
    trainer.data_collator = Mock(wraps=trainer.data_collator)
    trainer.train()
    seen = []
    for call in trainer.data_collator.call_args_list:
        seen += [row["pair_id"] for row in call.args[0]]
    ids = trainer.train_dataset["pair_id"][:]
    sampler = LanguageMixSampler([200, 200, 200], "natural", 0.5, seed=0)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert seen[600 * epoch : 600 * (epoch + 1)] == [ids[row] for row in sampler]


# Frozen parts and learning rates


def test_only_frozen_word_embeddings_stay_the_same(make_trainer: Callable) -> None:
    trainer = make_trainer(freeze_word_embeddings=True, learning_rate=1e-2, max_steps=1)
    parameters = dict(trainer.model.named_parameters())
    before = {name: value.clone() for name, value in parameters.items()}
    trainer.train()
    same = {name for name, value in before.items() if torch.equal(value, parameters[name])}
    assert same == {"dap.encoder.embeddings.word_embeddings.weight"}


def test_a_model_of_model_init_has_the_same_frozen_parts(
    make_trainer: Callable, tiny_bert_dir: Path
) -> None:
    given = make_trainer("tr", peft_lora_rank=2, freeze_word_embeddings=True, max_steps=1)
    trainer = DAPTrainer(
        model_init=lambda: start_from(tiny_bert_dir, objective="tr"),
        args=given.args,
        train_dataset=given.train_dataset,
        data_collator=given.data_collator,
        processing_class=given.processing_class,
    )
    trainer.train()
    given, made = (
        {name for name, value in each.model.named_parameters() if value.requires_grad}
        for each in (given, trainer)
    )
    assert given == made == {name for name in made if "lora" in name}


def test_heads_can_have_a_learning_rate_of_their_own(make_trainer: Callable) -> None:
    rates = {"learning_rate": 1e-4, "head_learning_rate": 1e-3}
    trainer = make_trainer(**rates, warmup_steps=1, max_steps=3, weight_decay=0.1)
    trainer.train()
    found = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            found[id(parameter)] = group["initial_lr"], group["weight_decay"]
    for name, parameter in trainer.model.named_parameters():
        rate = 1e-4 if name.startswith("dap.") else 1e-3
        decay = 0.1 if parameter.dim() > 1 else 0  # neither biases nor norms
        assert found[id(parameter)] == (rate, decay), name
