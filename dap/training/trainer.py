"""Pre-training as a `transformers.Trainer`: component losses in the log, retrieval on dev sets, named failures."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Sampler
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from dap.encoding import LibrarySettings, SentenceEncoder, encode_shared
from dap.errors import UserError
from dap.publishing import explained, write_modules
from dap.search import retrieval_accuracy
from dap.training.fsdp import own_class, prepare_sharding, whole_model
from dap.training.grad_cache import CachedBatch
from dap.training.resuming import GoOn, RecordInCheckpoints
from dap.training.source_reading import source_reading
from dap.training.training_arguments import DAPTrainingArguments, require
from losses_dap import sum_over_processes, world_size
from modeling_dap import DAPForPreTraining, DAPForPreTrainingOutput

Bitext = tuple[Sequence[str], Sequence[str]]  # sources and targets of a language, line by line


class DAPTrainer(Trainer):
    """`Trainer` for `DAPForPreTraining`.

    Args:
        dev_bitext: source and target sentences by language. Evaluation measures retrieval in both directions:
            `eval_{lang}-en_accuracy`, `eval_en-{lang}_accuracy` and `eval_mean_accuracy`, in percent; with RTL
            or BOW also how much their heads read the source, as `source_reading` says (`eval_rtl_source_nats`).
        target_language: code of the targets' language, for the metrics' names.
        max_seq_length, prefix: tokens a dev sentence is cut to, and text before it.
        library: what the saved model keeps of a sentence-transformers folder that it began with: length (else 128, or
            what the model allows), normalisation and prompts.
        train_sampler: draws the training rows, such as `LanguageMixSampler`; the stock shuffle when absent.
        args: everything else as in `Trainer`; `args` are `DAPTrainingArguments`, `processing_class` is the tokenizer,
            `data_collator` a `BitextCollator`.

    Raises:
        ValueError: other training arguments, one of `Trainer`'s that would do nothing, or pairs that fill no batch.
    """

    args: DAPTrainingArguments

    def __init__(
        self,
        *args: Any,
        dev_bitext: Mapping[str, Bitext] | None = None,
        target_language: str = "en",
        max_seq_length: int = 32,
        prefix: str = "",
        library: LibrarySettings | None = None,
        train_sampler: Sampler | None = None,
        **kwargs: Any,
    ) -> None:
        self.dev_bitext = dict(dev_bitext or {})
        self.target_language, self.max_seq_length = target_language, max_seq_length
        self.train_sampler, self.prefix, self.library = (
            train_sampler,
            prefix,
            library or LibrarySettings(),
        )
        self.meter = StepMeter()
        self.step_pairs: list[str] = []  # ids of the pairs since the last optimizer step
        if self.dev_bitext:
            kwargs.setdefault(
                "eval_dataset", list(self.dev_bitext)
            )  # Trainer asks for one before it evaluates
        super().__init__(*args, **kwargs)
        self._require_arguments()
        prepare_sharding(self)
        if self.args.freeze_word_embeddings:  # the prediction head's output embeddings, too
            self.model.get_input_embeddings().weight.requires_grad_(False)
        if self.args.freeze_encoder:  # nothing is differentiated in it then
            require_heads(self.model, "--freeze_encoder")
            self.model.dap.requires_grad_(False)
        self._add_callbacks()

    def _require_arguments(self) -> None:
        """Raise `ValueError` for arguments of `Trainer` that do nothing here, and for text without a tokenizer."""
        args = self.args
        if not isinstance(args, DAPTrainingArguments):
            raise UserError(f"args are {type(args).__name__}: give DAPTrainingArguments")
        freezes, tokenizer = (
            args.freeze_encoder or args.freeze_word_embeddings,
            self.processing_class,
        )
        own, rate = self.optimizer is not None, args.head_learning_rate
        allowed = {
            "model_init": (
                self.model_init is None or not freezes,
                "model, of which a part is to be frozen",
            ),
            "optimizer": (
                not own or rate is None,
                "none, or no head_learning_rate, which groups its parameters anew",
            ),
            "compute_metrics": (
                self.compute_metrics is None,
                "none: evaluation is of retrieval, see dev_bitext",
            ),
            "compute_loss_func": (
                self.compute_loss_func is None,
                "none: the loss is that of the objectives",
            ),
            "eval_dataset": (
                self.eval_dataset in (None, list(self.dev_bitext)),
                "none, but dev_bitext",
            ),
            "processing_class": (
                not self.dev_bitext or tokenizer is not None,
                "the tokenizer of dev_bitext's text",
            ),
        }
        require(self, allowed)
        if hasattr(self.train_dataset, "__len__"):
            require_batch(len(self.train_dataset), args)

    def predict(self, *_: Any, **__: Any) -> None:
        raise UserError(
            "DAPTrainer predicts nothing: encode with SentenceEncoder(trainer.model.dap, tokenizer)"
        )

    def _add_callbacks(self) -> None:
        """Those that every run has, and those of its arguments; and bars and lines that are brief."""
        own: list[TrainerCallback] = [GoOn(), RecordInCheckpoints()]
        if hasattr(self.train_sampler, "set_epoch"):
            own.append(EpochOfSampler(self.train_sampler))
        if self.args.early_stopping_patience is not None:
            own.append(EarlyStoppingCallback(self.args.early_stopping_patience))
        for callback in own:
            self.add_callback(callback)
        for stock, callback in ((PrinterCallback, BriefPrinter), (ProgressCallback, BriefProgress)):
            if self.pop_callback(stock):
                self.add_callback(callback)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository of `push_to_hub`, before any step; raises `ValueError` where the Hub refuses."""
        with explained(self.args.hub_model_id or Path(self.args.output_dir).absolute().name):
            super().init_hf_repo(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.train_sampler or super()._get_train_sampler(train_dataset)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The stock optimizer; with `head_learning_rate`, the heads have groups of their own at the end.

        Raises:
            ValueError: a learning rate for heads that the model does not have.
        """
        optimizer, rate = super().create_optimizer(model), self.args.head_learning_rate
        if rate is None:
            return optimizer
        whole = self.accelerator.unwrap_model(
            self.model if model is None else model, keep_torch_compile=False
        )
        require_heads(whole, f"--head_learning_rate {rate}")
        encoder = {id(parameter) for parameter in whole.dap.parameters()}
        groups: dict[bool, list[dict]] = {True: [], False: []}
        for group in optimizer.param_groups:
            for is_encoder, found in groups.items():
                own = [
                    parameter
                    for parameter in group["params"]
                    if (id(parameter) in encoder) is is_encoder
                ]
                found.append({**group, "params": own, "lr": group["lr"] if is_encoder else rate})
        optimizer.param_groups[:] = [
            group for group in groups[True] + groups[False] if group["params"]
        ]
        return optimizer

    def _get_learning_rate(self) -> float:
        """The encoder's, before the step; that of the heads is remembered for the log."""
        self.head_rate = self.optimizer.param_groups[-1]["lr"]
        return super()._get_learning_rate()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, DAPForPreTrainingOutput]:
        """The objective's loss of one batch.

        Raises:
            FloatingPointError: the loss is not finite; names the step, the losses, the languages and the pairs since
                the last step. The same happens for a gradient, before it is used.
        """
        inputs = self._begin(inputs)
        out = model(**inputs)
        self._observe(out, len(inputs["source_input_ids"]) if model.training else 0)
        return (out.loss, out) if return_outputs else out.loss

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The stock step, or with `mini_batch_size` one with the same gradients in the memory of so many pairs."""
        size = self.args.mini_batch_size
        if size is None or size >= len(inputs["source_input_ids"]):
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # that of a schedule-free optimizer
            self.optimizer.train()
        inputs = self._begin(self._prepare_inputs(inputs))

        def forward(**arguments: Any) -> DAPForPreTrainingOutput:
            with self.compute_loss_context_manager():
                return model(**arguments)

        batch = CachedBatch(
            self.accelerator.unwrap_model(model, keep_torch_compile=False), forward, inputs, size
        )
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        waits = (
            self.accelerator.sync_gradients and not each
        )  # for the last part; else the stock loop has seen to it
        for part in batch.parts:
            alone = waits and part is not batch.parts[-1]
            with self.accelerator.no_sync(model) if alone else nullcontext():
                self.accelerator.backward(
                    batch.run(part) / self.current_gradient_accumulation_steps
                )
        out = batch.output()
        self._observe(out, len(inputs["source_input_ids"]))
        return out.loss / self.current_gradient_accumulation_steps

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager:
        """accelerate puts autocast into the model's forward, but not under FSDP2, where it would round the losses."""
        return self.accelerator.autocast() if self.is_fsdp_enabled else nullcontext()

    def _begin(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The model's arguments of a batch; its pairs are remembered, and the time runs."""
        self.meter.start()
        if self.args.freeze_encoder:
            self.model.dap.eval()  # without dropout: `Trainer` puts the whole model into training mode at each step
        inputs = dict(inputs)
        self.step_pairs += inputs.pop("pair_ids", [])
        return inputs

    def _observe(self, out: DAPForPreTrainingOutput, pairs: int) -> None:
        """Raise `FloatingPointError` for a loss that is not finite; count a step of so many pairs, if any."""
        if not torch.isfinite(out.loss):
            losses = {name: value for name, value in out.measures.items() if name.endswith("_loss")}
            listed = ", ".join(f"{name}={value.item()}" for name, value in losses.items())
            raise FloatingPointError(self._describe_failure("loss", listed))
        if pairs:
            self.meter.add(out, pairs)

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: Tensor | float | None = None
    ) -> Tensor | float | None:
        """The stock norm, before the optimizer's step; raises `FloatingPointError` when it is not finite.

        Under float16 the scaler sees to that: it skips the step.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if norm is not None and not scaled and not math.isfinite(norm):
            raise FloatingPointError(self._describe_failure("gradient", f"norm={float(norm)}"))
        self.step_pairs = []
        return norm

    def _describe_failure(self, what: str, values: str) -> str:
        pairs = self.step_pairs
        languages = ", ".join(sorted({pair.split(":", 1)[0] for pair in pairs}))
        kept = self.state.best_model_checkpoint or f"the last checkpoint in {self.args.output_dir}"
        return (
            f"the {what} is not finite at step {self.state.global_step + 1} ({values}); languages: {languages}; "
            f"pairs: {' '.join(pairs)}. Nothing was saved after it: resume from {kept} with a lower learning rate, "
            "or look at these pairs."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means since the last log to a line that has the training loss."""
        if "loss" in logs:
            rate = (
                {}
                if self.args.head_learning_rate is None
                else {"head_learning_rate": self.head_rate}
            )
            logs = {**logs, **rate, **self.meter.read(world_size())}
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Mapping[str, Bitext] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Retrieval accuracy on every language's dev pairs, shared among the processes; and `source_reading`.

        Args:
            eval_dataset: sources and targets by language; the dev pairs when absent.

        Raises:
            ValueError: it is anything else, or there are no dev pairs.
        """
        started = time.perf_counter()
        model = whole_model(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        encoder = SentenceEncoder(
            model.dap,
            self.processing_class,
            pooling=model.config.pooling,
            prefix=self.prefix,
            max_seq_length=self.max_seq_length,
            bf16=self.args.bf16,
        )
        bitext = self.dev_bitext if eval_dataset is None else eval_dataset
        if not isinstance(bitext, Mapping) or not bitext:
            raise UserError(
                "nothing to evaluate on: pass sources and targets by language, {'de': (sources, targets)}"
            )
        found = torch.zeros(
            len(bitext), 2, dtype=torch.float64
        )  # each language is searched by one process
        for number, (sources, targets) in enumerate(bitext.values()):
            vectors = torch.from_numpy(encode_shared(encoder, [*sources, *targets]))
            if number % self.args.world_size == self.args.process_index:
                found[number] = torch.tensor(
                    retrieval_accuracy(vectors[: len(sources)], vectors[len(sources) :])
                )
        if self.args.world_size > 1:
            found = sum_over_processes(found.to(self.args.device))
        metrics = {}
        for language, (forward, backward) in zip(bitext, found.tolist(), strict=True):
            metrics[f"{metric_key_prefix}_{language}-{self.target_language}_accuracy"] = forward
            metrics[f"{metric_key_prefix}_{self.target_language}-{language}_accuracy"] = backward
        metrics[f"{metric_key_prefix}_mean_accuracy"] = float(np.mean(list(metrics.values())))
        with self.accelerator.autocast():
            reading = source_reading(
                model, self.processing_class, bitext, self.max_seq_length, self.prefix
            )
        metrics |= {f"{metric_key_prefix}_{name}": value for name, value in reading.items()}
        metrics[f"{metric_key_prefix}_seconds"] = round(time.perf_counter() - started, 2)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        self.meter.leave_out(time.perf_counter() - started)
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        for callback in (
            self.callback_handler.callbacks
        ):  # the stock save misses one that the resumed run is new to
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, {})
        super()._save_checkpoint(*args, **kwargs)
        self.meter.leave_out(time.perf_counter() - started)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """The stock save, of a folder that sentence-transformers pools as the model does."""
        with own_class(self.model):
            super()._save(output_dir, state_dict)
        if self.args.should_save:  # under FSDP all processes come here
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False).dap
            kept, folder = self.library, Path(output_dir or self.args.output_dir)
            encoder = SentenceEncoder(
                model, self.processing_class, None, self.prefix, kept.max_seq_length
            )
            write_modules(encoder, folder, kept.normalize, None, kept.prompts)


def require_heads(model: DAPForPreTraining, argument: str) -> None:
    """Raise `ValueError` for an argument about heads where the model has none."""
    encoder = {id(parameter) for parameter in model.dap.parameters()}
    if all(id(parameter) in encoder for parameter in model.parameters()):
        objective = model.config.objective
        raise UserError(
            f"{argument} is for heads, but objective {objective!r} has none: leave it out."
        )


def require_batch(pairs: int, args: TrainingArguments) -> None:
    """Raise `ValueError` for fewer pairs than one step takes: there would be none."""
    batch = args.per_device_train_batch_size * args.world_size
    if pairs < batch:
        raise UserError(
            f"{pairs} training pairs do not fill one batch of {batch}: lower the batch size."
        )


def leave_together() -> None:
    """The end of a command: a process that leaves while another still talks to it may be aborted."""
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


# ---------------------------------------------------------------------- what it says while it runs, and its epochs


class StepMeter:
    """Means of the model's outputs and the pace since the last reading; the first one counts from `start` on."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.sums: dict[str, Tensor] = {}
        self.steps = self.pairs = 0

    def start(self) -> None:
        """Begin to count time, unless that was done."""
        if self.started is None:
            self.started = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Take time that was not spent on training out of the pace."""
        if self.started is not None:
            self.started += seconds

    def add(self, out: DAPForPreTrainingOutput, pairs: int) -> None:
        for name, value in out.measures.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().float()
        self.steps += 1
        self.pairs += pairs

    def read(self, processes: int) -> dict[str, float]:
        """Means over steps and processes, and pairs a second of all processes; starts anew."""
        if not self.steps:
            return {}
        names = list(self.sums)
        totals = sum_over_processes(torch.stack([self.sums[name] for name in names])) / (
            self.steps * processes
        )
        values = {name: round(value, 4) for name, value in zip(names, totals.tolist())}
        now = time.perf_counter()
        values["pairs_per_second"] = round(self.pairs * processes / (now - self.started), 1)
        self.started, self.sums, self.steps, self.pairs = now, {}, 0, 0
        return values


def brief(logs: dict[str, Any]) -> dict[str, Any]:
    """A line of the log to print: of an evaluation's directions only the three with the lowest accuracy.

    >>> brief({"eval_de-en_accuracy": 9, "eval_en-de_accuracy": 7, "eval_fr-en_accuracy": 8, "eval_en-fr_accuracy": 6})
    {'eval_en-de_accuracy': 7, 'eval_fr-en_accuracy': 8, 'eval_en-fr_accuracy': 6}
    """
    directions = [name for name in logs if re.fullmatch(r".+_\w+-\w+_accuracy", name)]
    hidden = sorted(directions, key=logs.get)[3:]
    return {name: value for name, value in logs.items() if name not in hidden}


class BriefPrinter(PrinterCallback):
    """Prints an evaluation in brief."""

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        super().on_log(*args, logs=brief(logs), **kwargs)


class BriefProgress(ProgressCallback):
    """Prints an evaluation in brief, above the progress bar."""

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        super().on_log(*args, logs=brief(logs), **kwargs)


class EpochOfSampler(TrainerCallback):
    """Tells the sampler its epoch: accelerate does not where several processes skip batches, as a resumed run does."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch))
