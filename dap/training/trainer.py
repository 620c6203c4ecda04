"""Pre-training as a `transformers.Trainer`: component losses in the log, retrieval on dev sets, named failures."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy

from dap.encoding import SentenceEncoder
from dap.errors import UserError
from dap.publishing import explained
from dap.search import retrieval_accuracy
from dap.training.callbacks import BriefPrinter, BriefProgress, StepMeter
from dap.training.fsdp import own_class, prepare_sharding, whole_encoder
from dap.training.grad_cache import CachedBatch
from dap.training.head_warmup import HeadWarmupTrainer, check_head_warmup
from losses_dap import sum_over_processes, world_size
from modeling_dap import DAPForPreTraining, DAPForPreTrainingOutput

Bitext = tuple[Sequence[str], Sequence[str]]  # sources and targets of a language, line by line


@dataclass
class DAPTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's values as defaults (section 4.2) and what a contrastive loss needs."""

    mini_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Pairs a process holds in memory at a time (GradCache): a batch of any size in the memory of this "
            "one, with the same gradients, for a second pass through the encoder; the whole batch if not given."
        },
    )
    total_train_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Pairs a step over all processes, each a negative of every other; sets the per-device size."
        },
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better metric_for_best_model."}
    )
    freeze_word_embeddings: bool = field(
        default=False, metadata={"help": "Do not train the word embeddings: less memory, faster steps."}
    )
    head_warmup_steps: int = field(
        default=0, metadata={"help": "First steps in which the heads learn alone; the encoder's schedule begins then."}
    )
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate of AdamW."})
    max_steps: int = field(default=100_000, metadata={"help": "Number of optimizer steps."})
    per_device_train_batch_size: int = field(default=128, metadata={"help": "Pairs a process in one step."})
    dataloader_drop_last: bool = field(default=True, metadata={"help": "The gather needs equal batches: keep it."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "The collator uses all columns: keep it."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "A loss that is not finite stops the run."})
    metric_for_best_model: str | None = field(default="eval_mean_accuracy", metadata={"help": "What 'best' means."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every parameter of an objective is used: keep it."}
    )
    report_to: None | str | list[str] = field(
        default=None, metadata={"help": "Trackers; TensorBoard, when installed, if not given."}
    )
    hub_strategy: HubStrategy | str = field(
        default="end", metadata={"help": "The model is published once, when the run has ended: keep it."}
    )
    dataloader_pin_memory: bool | None = field(
        default=None, metadata={"help": "Page-locked batches, for faster copies; true on CUDA if not given."}
    )

    def __post_init__(self) -> None:
        if self.mini_batch_size is not None:
            self._check_mini_batch()
        if self.report_to is None:
            self.report_to = ["tensorboard"] if find_spec("tensorboard") else []
        super().__post_init__()
        if self.torch_compile:  # the layers alone: between them rows are packed, which differs in every step
            os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        if self.hub_token is not None:  # where the Hub's client looks: every save pickles these arguments
            os.environ["HF_TOKEN"], self.hub_token = self.hub_token, None
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = self.device.type == "cuda"
        if self.accelerator_config.dispatch_batches is None:
            self.accelerator_config.dispatch_batches = False  # every process reads its own share of a stream
        self._check_processes()
        self._check_supported()
        check_head_warmup(self, self.max_steps)
        if self.total_train_batch_size is not None:
            self.per_device_train_batch_size = share_of_batch(self.total_train_batch_size, self.world_size)
        if (patience := self.early_stopping_patience) is not None and patience < 1:
            raise UserError(f"early_stopping_patience={patience}: give 1 or more, or leave it out.")
        if not self.dataloader_drop_last or self.remove_unused_columns:
            raise UserError(
                f"dataloader_drop_last={self.dataloader_drop_last} remove_unused_columns={self.remove_unused_columns}:"
                " DAP needs True and False, as negatives are gathered from equal batches; leave both out."
            )

    def _check_supported(self) -> None:
        """Raise `ValueError` for arguments of `TrainingArguments` that would break the gather or do nothing."""
        allowed = {
            "gradient_accumulation_steps": (self.gradient_accumulation_steps >= 1, "1 or more"),
            "label_smoothing_factor": (self.label_smoothing_factor == 0, "0: no DAP objective has it"),
            "train_sampling_strategy": (self.train_sampling_strategy == "random", "random, and --language_mix"),
            "hub_strategy": (
                not self.push_to_hub or self.hub_strategy == HubStrategy.END,
                "end: the others push half-trained models and training_args.bin, a pickle",
            ),
            "accelerator_config.dispatch_batches": (not self.accelerator_config.dispatch_batches, "false"),
            "accelerator_config.split_batches": (not self.accelerator_config.split_batches, "false"),
        }
        for name, (fits, remedy) in allowed.items():
            if not fits:
                raise UserError(f"{name}={attrgetter(name)(self)!r} is not supported: give {remedy}.")

    def _check_mini_batch(self) -> None:
        """Raise `ValueError` for a size that is not positive, and under DeepSpeed."""
        if self.mini_batch_size < 1:
            raise UserError(f"mini_batch_size={self.mini_batch_size}: give 1 or more, or leave it out.")
        if self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            raise UserError(
                f"mini_batch_size={self.mini_batch_size} does not go with DeepSpeed, which takes a step at each "
                "backward pass: use configs/accelerate/ddp.yaml or fsdp2.yaml, or leave it out."
            )

    def _check_processes(self) -> None:
        """Raise `ValueError` unless each process trains on one device and all of them know of each other."""
        if self.n_gpu > 1:
            raise UserError(f"{self.n_gpu} GPUs in one process: start one process a GPU with `accelerate launch`.")
        launched = int(os.environ.get("WORLD_SIZE", 1))
        if launched != self.world_size:
            raise UserError(
                f"{launched} processes were launched, but world_size={self.world_size}: each would train alone. On "
                "CPU, put ACCELERATE_USE_CPU=true before the command."
            )


def share_of_batch(total: int, processes: int) -> int:
    """Pairs of each process in a batch of `total`.

    >>> share_of_batch(1024, 8)
    128

    Raises:
        ValueError: fewer pairs than processes, or pairs that do not divide evenly.
    """
    if total < processes or total % processes:
        better = max(1, round(total / processes)) * processes
        raise UserError(
            f"total_train_batch_size={total} cannot be shared evenly by {processes} processes; give {better}, for one."
        )
    return total // processes


class EpochOfSampler(TrainerCallback):
    """Tells the sampler its epoch: accelerate does not get through to it where several processes skip batches, as in
    the first epoch of a resumed run, which would then go on with the order of epoch 0."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.sampler.set_epoch(int(state.epoch))


class DAPTrainer(HeadWarmupTrainer):
    """`Trainer` for `DAPForPreTraining`.

    Args:
        dev_bitext: source and target sentences by language. Evaluation measures retrieval in both directions:
            `eval_{lang}-en_accuracy`, `eval_en-{lang}_accuracy` and `eval_mean_accuracy`, in percent.
        target_language: code of the targets' language, for the metrics' names.
        max_seq_length: tokens a dev sentence is cut to.
        train_sampler: draws the training rows, such as `LanguageMixSampler`; the stock shuffle when absent.
        args: everything else as in `Trainer`; `processing_class` is the tokenizer, `data_collator` a `BitextCollator`.
    """

    def __init__(
        self,
        *args: Any,
        dev_bitext: Mapping[str, Bitext] | None = None,
        target_language: str = "en",
        max_seq_length: int = 32,
        train_sampler: Sampler | None = None,
        **kwargs: Any,
    ) -> None:
        self.dev_bitext = dict(dev_bitext or {})
        self.target_language, self.max_seq_length = target_language, max_seq_length
        self.train_sampler = train_sampler
        self.meter = StepMeter()
        self.step_pairs: list[str] = []  # ids of the pairs since the last optimizer step
        if self.dev_bitext:
            kwargs.setdefault("eval_dataset", list(self.dev_bitext))  # Trainer asks for one before it evaluates
        super().__init__(*args, **kwargs)
        prepare_sharding(self)
        if hasattr(train_sampler, "set_epoch"):
            self.add_callback(EpochOfSampler(train_sampler))
        for stock, callback in ((PrinterCallback, BriefPrinter), (ProgressCallback, BriefProgress)):
            if self.pop_callback(stock):
                self.add_callback(callback)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository of `push_to_hub`, before any step; raises `ValueError` where the Hub refuses."""
        with explained(self.args.hub_model_id or Path(self.args.output_dir).absolute().name):
            super().init_hf_repo(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.train_sampler or super()._get_train_sampler(train_dataset)

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
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
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

        batch = CachedBatch(self.accelerator.unwrap_model(model, keep_torch_compile=False), forward, inputs, size)
        for part in batch.parts:
            with self._synchronised(model, part is batch.parts[-1]):
                self.accelerator.backward(batch.run(part) / self.current_gradient_accumulation_steps)
        out = batch.output()
        self._observe(out, len(inputs["source_input_ids"]))
        return out.loss / self.current_gradient_accumulation_steps

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """accelerate puts autocast into the model's forward, but not under FSDP2, where it would round the losses."""
        return self.accelerator.autocast() if self.is_fsdp_enabled else nullcontext()

    def _synchronised(self, model: nn.Module, wanted: bool) -> AbstractContextManager:
        """Where the gradients of a backward pass are to wait for those of the next ones, unless it is the `wanted`."""
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        waits = self.accelerator.sync_gradients and not wanted and not each  # else the stock loop has seen to it
        return self.accelerator.no_sync(model) if waits else nullcontext()

    def _begin(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The model's arguments of a batch; its pairs are remembered, and the time runs."""
        self.meter.start()
        inputs = dict(inputs)
        self.step_pairs += inputs.pop("pair_ids", [])
        return inputs

    def _observe(self, out: DAPForPreTrainingOutput, pairs: int) -> None:
        """Raise `FloatingPointError` for a loss that is not finite; count a step of so many pairs, if any."""
        if not torch.isfinite(out.loss):
            losses = {name: getattr(out, name) for name in ("tr_loss", "rtl_loss", "tlm_loss", "mlm_loss")}
            listed = ", ".join(f"{name}={value.item()}" for name, value in losses.items() if value is not None)
            raise FloatingPointError(self._describe_failure("loss", listed))
        if pairs:
            self.meter.add(out, pairs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float | None:
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
            logs = {**logs, **self.meter.read(world_size())}
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Mapping[str, Bitext] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Retrieval accuracy on every language's dev pairs, shared among the processes.

        Args:
            eval_dataset: sources and targets by language; the dev pairs when absent.
        """
        started = time.perf_counter()
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        encoder = SentenceEncoder(
            whole_encoder(model),
            self.processing_class,
            pooling=model.config.pooling,
            max_seq_length=self.max_seq_length,
            bf16=self.args.bf16,
        )
        metrics = {}
        bitext = eval_dataset if isinstance(eval_dataset, Mapping) else self.dev_bitext
        for language, (forward, backward) in self._retrieve(encoder, bitext).items():
            metrics[f"{metric_key_prefix}_{language}-{self.target_language}_accuracy"] = forward
            metrics[f"{metric_key_prefix}_{self.target_language}-{language}_accuracy"] = backward
        metrics[f"{metric_key_prefix}_mean_accuracy"] = float(np.mean(list(metrics.values())))
        metrics[f"{metric_key_prefix}_seconds"] = round(time.perf_counter() - started, 2)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.meter.leave_out(time.perf_counter() - started)
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        for callback in self.callback_handler.callbacks:  # the stock save misses one that the resumed run is new to
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, {})
        super()._save_checkpoint(*args, **kwargs)
        self.meter.leave_out(time.perf_counter() - started)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with own_class(self.model):
            super()._save(*args, **kwargs)

    def _retrieve(self, encoder: SentenceEncoder, bitext: Mapping[str, Bitext]) -> dict[str, tuple[float, float]]:
        """Both accuracies of each language; each process encodes its share of the sentences and searches its share."""
        rank, processes = self.args.process_index, self.args.world_size
        found = torch.zeros(len(bitext), 2, dtype=torch.float64)  # a row is filled in by one process
        for number, (sources, targets) in enumerate(bitext.values()):
            vectors = self._encode_shared(encoder, [*sources, *targets])
            if number % processes == rank:
                found[number] = torch.tensor(retrieval_accuracy(vectors[: len(sources)], vectors[len(sources) :]))
        found = sum_over_processes(found.to(self.args.device)) if processes > 1 else found
        return dict(zip(bitext, map(tuple, found.tolist()), strict=True))

    def _encode_shared(self, encoder: SentenceEncoder, sentences: list[str]) -> Tensor:
        """Vectors (N, D) of the sentences on every process, each of which encodes its share."""
        rank, processes = self.args.process_index, self.args.world_size
        if processes == 1:
            return torch.from_numpy(encoder.encode(sentences))
        rows = np.arange(rank, len(sentences) + (-len(sentences)) % processes, processes) % len(sentences)
        share = torch.from_numpy(encoder.encode([sentences[row] for row in rows])).to(self.args.device)
        gathered = self.accelerator.gather(share).cpu()  # (W·N/W, D), process by process
        return gathered.view(processes, len(rows), -1).transpose(0, 1).flatten(0, 1)[: len(sentences)]


def freeze_word_embeddings(model: DAPForPreTraining) -> None:
    """Take the word embeddings, which are the prediction head's output embeddings too, out of the training."""
    model.get_input_embeddings().weight.requires_grad_(False)


def leave_together() -> None:
    """The end of a command: a process that leaves while another still talks to it may be aborted."""
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
