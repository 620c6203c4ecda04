"""What `run_xnli.py` is told: the encoder, the data, and the fine-tuning with the paper's values as defaults."""

import os
from dataclasses import dataclass, field

from transformers import TrainingArguments

from configuration_dap import CHOICES
from dap.errors import UserError


@dataclass
class ModelArguments:
    """Which encoder; whatever it is, the classifier on it is of one shape and starts from random weights."""

    model_name_or_path: str = field(
        metadata={"help": "A DAP checkpoint, any encoder of AutoModel, or a sentence-transformers folder or Hub id."}
    )
    pooling: str | None = field(
        default=None,
        metadata={"help": "What the classifier gets, 'cls' as in the paper unless the checkpoint says otherwise.",
                  "choices": list(CHOICES["pooling"])},
    )  # fmt: skip
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub repository."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that the repository carries."})


@dataclass
class DataArguments:
    """English pairs to fine-tune on, and dev and test sets by language."""

    data_dir: str = field(
        default="facebook/xnli", metadata={"help": "Folder with dev-{xx} and test-{xx} files, or a Hub dataset id."}
    )
    train_data: str | None = field(
        default=None,
        metadata={"help": "English pairs: file, folder or Hub id (nyu-mll/multi_nli). Default: train-en of data_dir."},
    )
    languages: list[str] | None = field(
        default=None, metadata={"help": "Languages to test, such as 'en de sw'. Default: all of the 15 in data_dir."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Tokens a pair is cut to."})
    max_train_pairs: int | None = field(default=None, metadata={"help": "Only the first pairs of the training data."})
    max_test_pairs: int | None = field(default=None, metadata={"help": "Only the first pairs of each test set."})


@dataclass
class XNLITrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's values as defaults (appendix "XNLI Fine-tuning")."""

    total_train_batch_size: int = field(
        default=256, metadata={"help": "Pairs a step, over all processes and accumulated batches; sets the latter."}
    )
    seeds: list[int] | None = field(default=None, metadata={"help": "Fine-tune with each; --seed when absent."})
    search: bool = field(
        default=False, metadata={"help": "Choose among learning_rates by dev accuracy, with the first seed."}
    )
    learning_rates: list[float] = field(
        default_factory=lambda: [1e-5, 3e-5, 5e-5, 7e-5], metadata={"help": "What --search chooses from."}
    )
    selection: str = field(
        default="english",
        metadata={"help": "Dev sets that choose: English alone (zero-shot), or the mean over all languages.",
                  "choices": ["english", "all"]},
    )  # fmt: skip
    keep_models: bool = field(default=False, metadata={"help": "Keep the models that --search did not choose, too."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate of AdamW."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the training pairs."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of AdamW."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Pairs a process has in memory at once."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Accuracy does not depend on it."})
    save_steps: float = field(default=0.2, metadata={"help": "Steps, or share of a run, between checkpoints."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints that a run keeps."})
    logging_steps: float = field(default=0.05, metadata={"help": "Steps, or share of a run, between logs."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "A loss that is not finite is an error."})
    report_to: None | str | list[str] = field(default="none", metadata={"help": "Trackers, such as tensorboard."})

    def __post_init__(self) -> None:
        super().__post_init__()
        launched = int(os.environ.get("WORLD_SIZE", 1))
        if launched != self.world_size:
            raise UserError(
                f"{launched} processes were launched, but world_size={self.world_size}: each would train alone. On "
                "CPU, put ACCELERATE_USE_CPU=true before the command."
            )
        if self.push_to_hub:
            raise UserError("push_to_hub=True: several models are made here; push the folder of one with `hf upload`.")
        for name in ("seeds", "learning_rates"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise UserError(f"{name}={values}: give one or more, each once.")
        if str(self.resume_from_checkpoint).lower() not in ("none", "true", "false"):
            raise UserError(
                f"resume_from_checkpoint={self.resume_from_checkpoint}: each run goes on from its own checkpoint; "
                "leave it out, or give false to begin unfinished runs anew."
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type == "cuda"
        self.gradient_accumulation_steps = self._accumulation()

    def _accumulation(self) -> int:
        """Batches that make a step; raises `ValueError` where they cannot come to `total_train_batch_size`."""
        at_once = self.train_batch_size * self.world_size
        given, steps = self.gradient_accumulation_steps, self.total_train_batch_size // at_once
        if steps * at_once != self.total_train_batch_size or steps < 1 or given not in (1, steps):
            raise UserError(
                f"total_train_batch_size={self.total_train_batch_size} is not {at_once} pairs (per_device_train_"
                f"batch_size={self.per_device_train_batch_size}, {self.world_size} processes) times "
                f"gradient_accumulation_steps={given if given > 1 else 'any'}: change one of them."
            )
        return steps

    @property
    def all_seeds(self) -> list[int]:
        return self.seeds or [self.seed]
