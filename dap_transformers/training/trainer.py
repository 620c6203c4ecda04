"""Pre-training as a `transformers.Trainer`.

Beside what `Trainer` does, it

- logs each objective's loss and the pairs per second,
- evaluates with any evaluators of `dap_transformers.evaluation`,
- trains a batch in chunks (GradCache, `mini_batch_size`),
- freezes parts of the model, trains LoRA adapters, and gives heads a learning rate of their own,
- stops with the pairs' names if a loss is not finite. It looks before it logs a line or saves.
"""

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
)
from transformers.trainer_utils import denumpify_detensorize

from dap_transformers.encoding.encoder import DEFAULT_MAX_SEQ_LENGTH, SentenceEncoder
from dap_transformers.errors import UserError, counted
from dap_transformers.evaluation.evaluator import Evaluator, evaluate
from dap_transformers.training.arguments import DAPTrainingArguments
from dap_transformers.training.grad_cache import CachedBatch
from dap_transformers.training.lora import add_adapters, load_adapters, save_adapters
from dap_transformers.training.resume import ResumableTrainer, keeps_best
from dap_transformers.training.sharding import prepare_sharding, ready_to_save, whole_model
from dap_transformers.training.source_information import EncoderWithHeads
from dap_transformers.training.step_log import ShortLines, ShortProgress, StepMeter
from losses_dap import world_size
from modeling_dap import DAPForPreTraining, DAPForPreTrainingOutput
from modules_dap import write_modules


class DAPTrainer(ResumableTrainer):
    """`Trainer` for `DAPForPreTraining`.

    All other arguments are those of `ResumableTrainer`. `args` are `DAPTrainingArguments`,
    `processing_class` is the tokenizer, and `data_collator` is a `BitextCollator`.

    Args:
        evaluators: what to measure, such as `Retrieval`, which logs `eval_de-en_accuracy` and
            `eval_mean_accuracy`, and `SourceInformation`, which logs `eval_rtl_source_nats`.
        max_seq_length: largest number of tokens of a dev sentence, with special tokens.
        prefix: text to put before every dev sentence. The saved model has it as its default prompt.
        prompts: name -> prompt of the saved model, such as "query" (`SentenceEncoder.prompts`).
        saved_length: largest number of tokens of a sentence for the saved model. None takes 128, or
            less if the model has fewer positions. If `max_seq_length` is larger, it is taken.
    """

    args: DAPTrainingArguments

    def __init__(
        self,
        *args: Any,
        evaluators: Sequence[Evaluator] | None = None,
        max_seq_length: int = 32,
        prefix: str = "",
        prompts: Mapping[str, str] | None = None,
        saved_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.evaluators = list(evaluators or ())
        self.max_seq_length = max_seq_length
        self.prefix = prefix
        self.prompts = prompts
        self.saved_length = saved_length
        #: Name of an accuracy or error over all languages -> `Evaluator.size`.
        self.measured_on: dict[str, float] = {}
        self.meter = StepMeter()
        self.is_in_train = False
        if self.evaluators:
            # `Trainer` does not evaluate without a dataset.
            kwargs.setdefault("eval_dataset", self.evaluators)
        super().__init__(*args, **kwargs)
        self._require_supported()
        needs_negatives = self.train_dataset and self.model.config.tr_hard_negatives
        if needs_negatives and not getattr(self.data_collator, "negatives", None):
            raise UserError("tr_hard_negatives: give BitextCollator negatives (HardNegativeMaker)")
        if self.pop_callback(ProgressCallback):
            self.add_callback(ShortProgress)
        if self.pop_callback(PrinterCallback):
            self.add_callback(ShortLines)
        require_batch(self.train_dataset, self.args)
        prepare_sharding(self)
        if self.args.dataloader_pin_memory:
            # The next batch is copied and prepared while the GPU still computes this step.
            self.accelerator.dataloader_config.non_blocking = True

        self._limit_training(self.model)

    def call_model_init(self, trial: Any = None) -> DAPForPreTraining:
        """Return a new model from `model_init`. Each call of `train` makes its own."""
        model = super().call_model_init(trial)
        if self.is_in_train:  # `__init__` limits the first one, after all checks
            self._limit_training(model)
        return model

    def _limit_training(self, model: DAPForPreTraining) -> None:
        """Add LoRA adapters to a model, and freeze its word embeddings, as the arguments say."""
        if self.args.peft_lora_rank is not None:
            add_adapters(model.dap.encoder, self.args.peft_lora_rank)
        if self.args.freeze_word_embeddings:
            # The prediction head shares this matrix, so its output embeddings are frozen as well.
            model.get_input_embeddings().weight.requires_grad_(False)

    def _require_supported(self) -> None:
        """Refuse arguments without effect, and what would fail or be lost later."""
        if not isinstance(self.args, DAPTrainingArguments):
            raise UserError("DAPTrainer takes DAPTrainingArguments, not TrainingArguments")
        if not isinstance(self.model.dap.encoder, PreTrainedModel):  # such as a PeftModel
            raise UserError(
                f"the encoder is a {type(self.model.dap.encoder).__name__}, whose saved weights no "
                "model loads; for LoRA, give DAPTrainingArguments(peft_lora_rank=16)"
            )
        require_evaluators(self.eval_dataset or ())
        if self.compute_metrics or self.compute_loss_func:
            raise UserError(
                "compute_metrics and compute_loss_func have no effect on DAPTrainer: give "
                "evaluators, or an objective of your own"
            )
        if self.args.mini_batch_size and type(self).compute_loss is not DAPTrainer.compute_loss:
            raise UserError("mini_batch_size does not call your compute_loss: write an objective")
        if self.processing_class is None:
            raise UserError("DAPTrainer: give the tokenizer as processing_class")
        if self.optimizer is not None and self.args.head_learning_rate is not None:
            raise UserError("head_learning_rate: leave it out, or give no optimizer")
        if isinstance(self.train_dataset, Mapping):
            raise UserError("train_dataset: join the languages (datasets.concatenate_datasets)")

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer. With `head_learning_rate`, the last groups have the heads."""
        optimizer = super().create_optimizer(model)
        rate = self.args.head_learning_rate
        if rate is None:
            return optimizer

        wrapped = self.model if model is None else model
        unwrapped = self.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
        encoder = {id(parameter) for parameter in unwrapped.dap.parameters()}
        for group in list(optimizer.param_groups):
            heads = [each for each in group["params"] if id(each) not in encoder]
            group["params"] = [each for each in group["params"] if id(each) in encoder]
            optimizer.add_param_group({**group, "params": heads, "lr": rate})
        optimizer.param_groups[:] = [each for each in optimizer.param_groups if each["params"]]
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, DAPForPreTrainingOutput]:
        """Compute the loss of a batch of `BitextCollator`. `StepMeter.check` looks at it later."""
        self.meter.start()
        out = model(**inputs)
        self.meter.add(self.state.global_step + 1, out, inputs["pair_ids"])
        return (out.loss, out) if return_outputs else out.loss

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Compute the loss and add the gradients of a batch, in chunks of `mini_batch_size` pairs.

        The returned loss is divided by the number of batches per optimizer step.
        """
        size = self.args.mini_batch_size
        if size is None or size >= len(inputs["source_input_ids"]):
            return super().training_step(model, inputs, num_items_in_batch)

        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            # Schedule-free optimizers have a training mode, too.
            self.optimizer.train()
        self.meter.start()
        inputs = self._prepare_inputs(inputs)

        def forward(**arguments: Any) -> DAPForPreTrainingOutput:
            with self.compute_loss_context_manager():
                return model(**arguments)

        unwrapped = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        batch = CachedBatch(unwrapped, forward, inputs, size)

        # Processes exchange gradients only at the last chunk of a step. In a step of gradient
        # accumulation that does not exchange them, `Trainer` has switched it off already.
        syncs_each_batch = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
        syncs_last_chunk = self.accelerator.sync_gradients and not syncs_each_batch
        for part in batch.parts:
            is_last = part is batch.parts[-1]
            no_sync = syncs_last_chunk and not is_last
            with self.accelerator.no_sync(model) if no_sync else nullcontext():
                loss = batch.run(part) / self.current_gradient_accumulation_steps
                self.accelerator.backward(loss)

        out = batch.output()
        self.meter.add(self.state.global_step + 1, out, inputs["pair_ids"])
        return out.loss / self.current_gradient_accumulation_steps

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager:
        """Return autocast for the model's call under FSDP2, otherwise a context that does nothing.

        Without FSDP2, accelerate has put autocast into the model's `forward` already.
        """
        return self.accelerator.autocast() if self.is_fsdp_enabled else nullcontext()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Check all steps since the last line, and log a line of metrics.

        A line with the training loss also gets what `StepMeter` has.
        """
        self.meter.check()
        if "loss" in logs:
            logs = logs | self.meter.read(world_size())
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Sequence[Evaluator] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the model by evaluators, which `eval_dataset` may replace, and log the metrics.

        All processes return the same.
        """
        started = time.perf_counter()
        self.meter.check()
        self._take_averages()
        evaluators = self.evaluators if eval_dataset is None else eval_dataset
        require_evaluators(evaluators)
        found = evaluate(self.encoder(), evaluators)
        metrics = {}
        for each in evaluators:
            logged = each.logged(found[each.name])
            if same := metrics.keys() & logged.keys():
                raise ValueError(f"two evaluators log {min(same)}: rename one of them")
            metrics |= logged
            for key in logged:
                # "de-en_accuracy" is of fewer sentences.
                is_of_all = key.endswith(("accuracy", "error")) and "-" not in key
                if is_of_all and (size := each.size()):
                    self.measured_on[f"eval_{key}"] = size
        metrics["seconds"] = round(time.perf_counter() - started, 2)
        # `Trainer` saves them as JSON, which knows no types of numpy.
        metrics = denumpify_detensorize(metrics)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        needs_best = self.is_in_train and eval_dataset is None and keeps_best(self.args)
        if needs_best and self.best_name not in metrics:
            raise UserError(
                f"metric_for_best_model={self.best_name}: the evaluation has only "
                f"{', '.join(metrics)}"
            )

        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        if self.is_fsdp_enabled:
            gc.collect()  # the layers of the whole copy refer to themselves
        self.meter.leave_out(time.perf_counter() - started)
        return metrics

    def predict(self, *_: Any, **__: Any) -> None:
        """Raise `UserError`: batches would leave out the rows of the incomplete last one."""
        raise UserError(
            "DAPTrainer has no predict: give evaluators, or get vectors by "
            "SentenceEncoder(trainer.model, tokenizer)"
        )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Tell whether this evaluation is the best so far.

        It is, if it is not worse than the best one before it (`is_worse`). So of nearly equal
        evaluations, the last is kept. With `load_best_model_at_end`, its checkpoint is saved at
        once. `state.best_metric` stays the best value, so early stopping waits for a better one.
        """
        name = self.best_name
        if name not in metrics:
            return False
        value = metrics[name]
        best = value if self.state.best_metric is None else self.state.best_metric
        if self.is_worse(name, value, best):
            return False
        self.state.best_metric = (max if self.args.greater_is_better else min)(value, best)
        self.state.best_global_step = self.state.global_step
        if self.args.load_best_model_at_end:
            self.control.should_save = True  # also between the steps of `save_steps`
        return True

    def is_worse(self, name: str, value: float, other: float) -> bool:
        """Tell whether a value of a metric is worse than another value.

        Accuracies and error rates over all languages also vary by chance. Such a value is worse
        only if it differs by more than two standard errors of the difference.
        """
        standard_error = 0.0
        if name in self.measured_on:
            shares = (torch.tensor([value, other]) / 100).clamp(0, 1)
            variance = float((shares * (1 - shares)).sum() / self.measured_on[name])
            standard_error = 100 * variance**0.5
        drop = other - value if self.args.greater_is_better else value - other
        return not drop <= 2 * standard_error  # NaN is worse than any number

    @property
    def best_name(self) -> str:
        """Return the name of the logged metric that chooses the best checkpoint."""
        return "eval_" + self.args.metric_for_best_model.removeprefix("eval_")

    def _take_averages(self) -> None:
        """Use the averaged weights of an optimizer, if it is schedule-free, until the next step."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def encoder(self) -> EncoderWithHeads:
        """Return an encoder with the present weights. With FSDP, all processes call this."""
        model = whole_model(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        return EncoderWithHeads(
            model,
            self.processing_class,
            self.saved_encoder(model),
            prefix=self.prefix,
            max_seq_length=self.max_seq_length,
            bf16=self.args.bf16,
        )

    def saved_encoder(self, model: DAPForPreTraining) -> SentenceEncoder:
        """Return the sentence encoder that is saved of a model."""
        length = self.saved_length
        if self.max_seq_length > (length or DEFAULT_MAX_SEQ_LENGTH):
            length = self.max_seq_length
        return SentenceEncoder(
            model.dap,
            self.processing_class,
            prefix=self.prefix,
            max_seq_length=length,
            bf16=self.args.bf16,
            prompts=self.prompts,
        )

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._take_averages()  # here, because `_save` may run in one process only
        super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        super()._save_checkpoint(*args, **kwargs)
        self.meter.leave_out(time.perf_counter() - started)

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(checkpoint, model)
        self._load_adapters(checkpoint)

    def _load_best_model(self) -> None:
        self._take_averages()  # now, so that `save_model` does not change the best weights
        super()._load_best_model()
        self._load_adapters(self.state.best_model_checkpoint)

    def _load_adapters(self, checkpoint: str) -> None:
        """Load the LoRA adapters of a checkpoint, if adapters are trained."""
        if self.args.peft_lora_rank is not None:
            load_adapters(self.model.dap.encoder, Path(checkpoint))

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save the model, and the files that sentence-transformers needs to pool it correctly."""
        self.meter.check()
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        with ready_to_save(model):  # under FSDP, all processes come here
            super()._save(output_dir, state_dict)
            if self.args.should_save:
                folder = Path(output_dir or self.args.output_dir)
                write_modules(self.saved_encoder(model), folder)
                # The final model is complete without them, because its weights are merged.
                if self.args.peft_lora_rank is not None and folder != Path(self.args.output_dir):
                    save_adapters(model.dap.encoder, folder)


def require_evaluators(evaluators: Iterable[Any]) -> None:
    """Raise `UserError` if one of them is no `Evaluator`, for example a dataset."""
    for each in evaluators:
        if not isinstance(each, Evaluator):
            raise UserError("DAPTrainer measures by evaluators, such as Retrieval, no datasets")


def require_batch(train: Any, args: TrainingArguments) -> None:
    """Raise `UserError` if a dataset has no length, or too few pairs for one batch of a launch."""
    batch = args.per_device_train_batch_size * args.world_size
    if train is None:
        return
    if not hasattr(train, "__len__"):
        raise UserError("train_dataset: give a dataset with a length: every batch must be full")
    if len(train) < batch:
        raise UserError(
            f"{counted(len(train), 'training pair')} cannot fill one batch of {batch}: lower the "
            "batch size"
        )
