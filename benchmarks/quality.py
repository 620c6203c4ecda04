"""Compare the CPU time that our trainer and sentence-transformers' need to reach an accuracy.

    python -m benchmarks.quality --model ENCODER --heads HEADS --train_data corpus/ \\
        --data_dir tatoeba/ --languages te

All methods train on the same pairs in the same order, with the same batch size, learning rate,
schedule and dropout, mean pooling and frozen word embeddings. DAP starts with HEADS, a checkpoint
of `configs/head.yaml` for the same encoder. The clock stops while retrieval is measured. Between
two measurements, accuracy is interpolated linearly.
"""

import argparse
import random
import tempfile
import time
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import AutoTokenizer, PreTrainedModel, Trainer, TrainerCallback

from benchmarks.timing import machine_parser, prepare_machine, save, show
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.reports.rendering import text_table
from dap_transformers.training.arguments import DAPTrainingArguments
from dap_transformers.training.batches import BitextCollator, tokenize_bitext
from dap_transformers.training.trainer import DAPTrainer
from eval_retrieval import evaluate, read_languages
from modeling_dap import DAPForPreTraining

MNRL, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
LENGTH = 32  # tokens of a training sentence


class Clock(TrainerCallback):
    """A callback that measures retrieval accuracy every few steps of a training.

    It also measures once when it is made, before the training.

    Args:
        encoder: the encoder that is trained.
        args: the command line, which has the text for retrieval and the number of steps between two
            measurements (`--every`).
        spent: CPU seconds that count as used before the training.

    Attributes:
        points: (step, CPU seconds of training, mean accuracy in percent) of each measurement.
    """

    def __init__(
        self, encoder: PreTrainedModel, args: argparse.Namespace, spent: float = 0.0
    ) -> None:
        self.encoder = SentenceEncoder(encoder, AutoTokenizer.from_pretrained(args.model), "mean")
        self.pairs = read_languages(args.data_dir, args.languages)
        self.every = args.every
        self.spent = spent
        self.points: list[tuple[int, float, float]] = []
        self.measure(0)

    def measure(self, step: int) -> None:
        """Measure retrieval accuracy, add it to `points`, and print it to standard error.

        Args:
            step: number of training steps so far.
        """
        accuracy = float(np.mean(list(evaluate(self.encoder, self.pairs).values())))
        self.points.append((step, self.spent, accuracy))
        show(f"step {step}: {self.spent:.1f} CPU-s, {accuracy:.2f}")

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start counting the CPU time of this process, at the start of the training."""
        self.started = time.process_time()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Add the CPU time of the step, and measure accuracy after every `--every` steps.

        The CPU time of measuring does not count.
        """
        self.spent += time.process_time() - self.started
        if state.global_step % self.every == 0:
            self.measure(state.global_step)
        self.started = time.process_time()


def draw_pairs(args: argparse.Namespace) -> Dataset:
    """Draw as many training pairs as the steps take, evenly from all languages.

    Args:
        args: the command line: `--train_data`, `--steps`, `--batch_size` and `--seed`.

    Returns:
        A dataset with the columns "source" and "target", in random order.
    """
    rng = random.Random(args.seed)
    count = args.steps * args.batch_size
    languages = read_languages(args.train_data)
    drawn = []
    for rows in languages.values():
        drawn += rng.sample(rows, -(-count // len(languages)))
    rng.shuffle(drawn)
    records = [{"source": source, "target": target} for source, target in drawn[:count]]
    return Dataset.from_list(records)


def ours(
    name: str, pairs: Dataset, args: argparse.Namespace, common: dict[str, Any]
) -> tuple[Trainer, Clock]:
    """Return our trainer for an objective. The training pairs are tokenised here.

    Args:
        name: "DAP" or "TR".
        pairs: training pairs.
        args: the command line.
        common: training arguments that all methods share.

    Returns:
        The trainer, and the clock that measures its encoder. The clock counts the time of
        tokenising as training time.
    """
    rates = {}
    if name == "DAP":
        model = DAPForPreTraining.from_pretrained(args.heads)
        rates["head_learning_rate"] = 3e-4
    else:
        model = DAPForPreTraining.from_encoder(args.model, objective="tr", pooling="mean")
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    started = time.process_time()
    rows = tokenize_bitext({"xx": pairs}, tokenizer, LENGTH)["xx"]
    clock = Clock(model.dap.encoder, args, time.process_time() - started)
    trainer = DAPTrainer(
        model=model,
        args=DAPTrainingArguments(**common, **rates, freeze_word_embeddings=True),
        train_dataset=rows,
        train_sampler=SequentialSampler(rows),
        data_collator=BitextCollator(tokenizer.pad_token_id, ["xx"]),
        callbacks=[clock],
    )
    return trainer, clock


def theirs(
    name: str, pairs: Dataset, args: argparse.Namespace, common: dict[str, Any]
) -> tuple[Trainer, Clock]:
    """Return the trainer of sentence-transformers for one of its losses.

    It tokenises the texts during the training steps.

    Args:
        name: class name of the loss, `MNRL` or `CACHED`.
        pairs: training pairs.
        args: the command line.
        common: training arguments that all methods share.

    Returns:
        The trainer, and the clock that measures its encoder.
    """
    transformer = Transformer(
        args.model, max_seq_length=LENGTH, model_kwargs={"add_pooling_layer": False}
    )
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling])
    model[0].auto_model.get_input_embeddings().weight.requires_grad_(False)
    clock = Clock(model[0].auto_model, args)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            **common,
            batch_sampler=lambda rows, batch_size, **_: BatchSampler(
                SequentialSampler(rows), batch_size, True
            ),
        ),
        train_dataset=pairs,
        loss=getattr(losses, name)(model),
        callbacks=[clock],
    )
    return trainer, clock


def main(argv: list[str] | None = None) -> None:
    """Train by all methods, print a table of accuracy and CPU time, and write it to `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--model", required=True, help="encoder to start from")
    parser.add_argument("--heads", required=True, help="checkpoint with trained heads")
    parser.add_argument("--train_data", nargs="+", required=True)
    parser.add_argument("--data_dir", nargs="+", required=True, help="text for retrieval")
    parser.add_argument("--languages", nargs="+", help="languages for retrieval")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    args = parser.parse_args(argv)
    prepare_machine(args)
    pairs = draw_pairs(args)
    points = {}
    with tempfile.TemporaryDirectory(prefix="dap-quality-") as folder:
        common = {
            "output_dir": folder,
            "max_steps": args.steps,
            "per_device_train_batch_size": args.batch_size,
            "learning_rate": 5e-5,
            "warmup_steps": args.steps // 10,
            "seed": args.seed,
            "bf16": args.bf16,
            "use_cpu": args.device == "cpu",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        for name, prepare in {"TR": ours, "DAP": ours, MNRL: theirs, CACHED: theirs}.items():
            show(name)
            trainer, clock = prepare(name, pairs, args, common)
            trainer.train()
            points[name] = np.array(clock.points)  # (measurements, 3)
    goal = min(part[:, 2].max() for part in points.values())  # all reach it
    seconds = {}
    for name, part in points.items():
        best_so_far = np.maximum.accumulate(part[:, 2])
        seconds[name] = np.interp(goal, best_so_far, part[:, 1])

    steps = [f"step {step:.0f}" for step in points["TR"][:, 0]]
    header = ["", *steps, "CPU s per step", f"until {goal:.2f}", "/ MNRL"]
    lines = []
    for name, part in points.items():
        per_step = part[-1, 1] / args.steps
        ratio = seconds[name] / seconds[MNRL]
        numbers = [*part[:, 2], per_step, seconds[name], ratio]
        lines.append([name, *(f"{number:.2f}" for number in numbers)])
    print(text_table(header, lines))
    listed = {name: part.tolist() for name, part in points.items()}
    save(args, {"points": listed, "goal": goal, "seconds": seconds})


if __name__ == "__main__":
    main()
