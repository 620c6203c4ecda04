"""Fine-tuning an encoder on pairs of texts with a label: the classifier, its trainer and its accuracy."""

import copy
from typing import Any

import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from configuration_dap import DAPConfig
from dap.encoding import SentenceEncoder
from dap.training import EpochOfSampler
from dap.xnli.data import LABELS, StepLengthSampler
from modeling_dap import DAPForSequenceClassification, DAPModel


def build_classifier(encoder: SentenceEncoder) -> DAPForSequenceClassification:
    """The encoder's weights under a new classifier, of the same shape whatever the encoder is."""
    body, config = encoder.model, copy.deepcopy(encoder.model.config)
    if not isinstance(body, DAPModel):
        config = DAPConfig(config, objective="tr")
    config.pooling = encoder.pooling
    config.id2label, config.label2id = dict(enumerate(LABELS)), {name: number for number, name in enumerate(LABELS)}
    model = DAPForSequenceClassification(config)
    target, state = (model.dap, body.state_dict())
    if not isinstance(body, DAPModel):  # a pooler would not be used
        target, state = model.dap.encoder, {key: state[key] for key in model.dap.encoder.state_dict()}
    target.load_state_dict(state)
    return model


def has_token_types(encoder: SentenceEncoder) -> bool:
    """Whether the encoder tells the two texts of a pair apart by embeddings."""
    config = encoder.model.config
    return (getattr(getattr(config, "encoder_config", config), "type_vocab_size", None) or 0) > 1


class XNLITrainer(Trainer):
    """`Trainer` whose batches are of like lengths within each optimizer step."""

    def __init__(self, train_sampler: Sampler | None = None, **kwargs: Any) -> None:
        self.train_sampler = train_sampler
        super().__init__(**kwargs)
        if train_sampler is not None:
            self.add_callback(EpochOfSampler(train_sampler))

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.train_sampler


def step_size(args: TrainingArguments) -> int:
    """Pairs of one optimizer step."""
    return args.train_batch_size * args.world_size * args.gradient_accumulation_steps


def mean_over_step(
    outputs: SequenceClassifierOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Cross entropy summed over this batch, divided by the pairs of the whole step, however it is accumulated."""
    total = F.cross_entropy(outputs["logits"].float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    from dap.xnli.metric import compute_accuracy  # takes seconds to import

    return compute_accuracy(prediction)


def build_trainer(
    model: DAPForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    args: TrainingArguments,
    train: Dataset | None = None,
    dev: Dataset | None = None,
) -> XNLITrainer:
    """A trainer for one run, or for measuring alone where there is no training data."""
    return XNLITrainer(
        train_sampler=None if train is None else StepLengthSampler(train["length"][:], step_size(args), args.seed),
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=dev,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=mean_over_step,
        compute_metrics=compute_metrics,
    )


def accuracy(trainer: XNLITrainer, dataset: Dataset) -> float:
    """Share of the examples whose label is predicted, in percent."""
    return 100 * trainer.predict(dataset).metrics["test_accuracy"]
