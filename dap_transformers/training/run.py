"""A whole training: read the text, load the model, train the heads, train, save and publish.

`train` tells this story from top to bottom.
"""

import logging
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import concatenate_datasets
from transformers import PreTrainedTokenizerBase, TrainerState, set_seed

from dap_transformers.encoding.checkpoint import hub_commit
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError, counted
from dap_transformers.evaluation.evaluator import Evaluator, as_pairs
from dap_transformers.evaluation.kept_neighbours import KeptNeighbours
from dap_transformers.evaluation.retrieval import Retrieval
from dap_transformers.files import write_json
from dap_transformers.pictures import CURVES, plot_curves
from dap_transformers.publishing.publish import PublishOptions, publish
from dap_transformers.search.screening import fastest_product
from dap_transformers.text.corpus import load_bitext, spread_rows
from dap_transformers.text.find import find_dev
from dap_transformers.text.tsv_csv import UNDETERMINED
from dap_transformers.training.arguments import (
    DAPTrainingArguments,
    PretrainingDataArguments,
    PretrainingModelArguments,
)
from dap_transformers.training.batches import BitextCollator, tokenize_bitext
from dap_transformers.training.dev_split import drop_targets, split_validation
from dap_transformers.training.head_training import train_missing_heads
from dap_transformers.training.mixing import LanguageMixSampler
from dap_transformers.training.negatives import HardNegativeMaker
from dap_transformers.training.resume import (
    FINISHED,
    describe_run,
    find_resumable,
    record_run,
    require_no_other_model,
    train_to_end,
)
from dap_transformers.training.source_information import LEAST_INFORMATION, SourceInformation
from dap_transformers.training.start import Start, load_model, read_start
from dap_transformers.training.step_log import readable
from dap_transformers.training.teacher import add_teacher
from dap_transformers.training.trainer import DAPTrainer
from modeling_dap import DAPConfig
from modules_dap import prompt_for

logger = logging.getLogger(__name__)


def train(
    model_args: PretrainingModelArguments,
    data: PretrainingDataArguments,
    training: DAPTrainingArguments,
) -> None:
    """Train a sentence encoder, and save it with its results.

    A run that was stopped is resumed from its last checkpoint. With `load_best_model_at_end` the
    best model is saved, otherwise the last one. All processes of a launch call this.
    """
    started = time.perf_counter()
    require_no_other_model(Path(training.output_dir))
    checkpoint = find_resumable(training)
    trainer, record = build_trainer(model_args, data, training)
    record_run(record, training, checkpoint)
    if checkpoint is None:
        train_missing_heads(trainer)
    else:
        logger.info("resumes from %s", checkpoint)
    metrics = train_to_end(trainer, checkpoint)
    # With the text, the teacher's vectors and the heads: what a comparison of methods needs.
    metrics["total_seconds"] = round(time.perf_counter() - started, 1)
    finish(trainer, metrics, model_args)
    # A process that leaves while another one still talks to it may be aborted.
    trainer.accelerator.wait_for_everyone()


# -------------------------------------------------------------------------------------- the trainer


def build_trainer(
    model_args: PretrainingModelArguments,
    data: PretrainingDataArguments,
    training: DAPTrainingArguments,
    evaluators: Sequence[Evaluator] = (),
) -> tuple[DAPTrainer, dict[str, Any]]:
    """Read the text, load the model, and make a trainer of them.

    The prefix, the prompts and the length of `data` are filled in if they are None. Also return the
    record of the run (`describe_run`).
    """
    # First what fails in seconds: the arguments and the test data.
    evaluators = [*data.evaluators(), *evaluators]
    start = read_start(model_args)
    complete_data_arguments(data, start)

    distills = "distill" in start.planned.objectives
    if model_args.distill_from is not None and not distills:
        raise UserError(f"distill_from={model_args.distill_from}: add distill to the objective")

    # The first process fills the cache of the text, and the others read it.
    with training.main_process_first(desc="reading and tokenising"):
        train, dev, text = build_datasets(data, training, start.tokenizer)

    # The model has a head for the teacher if their vectors have different sizes.
    teacher = None
    if model_args.distill_from is not None:
        teacher = SentenceEncoder.from_pretrained(model_args.distill_from)

    set_seed(training.seed)
    model = load_model(model_args, start, train, teacher and teacher.dimensions)

    # The encoder before the training: an anchor, and what dev pairs are compared with.
    before = None
    if start.has_vectors:
        # It shares the weights of the model, so it must be used before they are trained.
        before = SentenceEncoder(
            model.dap,
            start.tokenizer,
            prefix=data.prefix,
            max_seq_length=data.max_seq_length,
            device=training.device,
            bf16=training.bf16,
        )

    # Which pairs are drawn, and where their vectors should point.
    sizes = [len(part) for part in train.values()]
    sampler = LanguageMixSampler(sizes, data.language_mix, data.mix_alpha, training.seed_of_text)
    goals = None
    if distills:
        sides, is_drawn = ("target", "target"), np.ones(len(sampler), bool)
        if teacher is None:
            # The model teaches itself to stay where it is now.
            sides, is_drawn = ("source", "target"), drawn_pairs(sampler, training)
        folder = Path(training.output_dir, "teacher")
        train, goals = add_teacher(teacher or before, sides, text, train, is_drawn, folder)

    logger.info("%s", summary(model.config, train, dev, training, data.max_seq_length))
    is_float32 = training.device.type == "cpu" and not training.bf16
    if is_float32 and fastest_product(training.device) == "bfloat16":
        logger.info("this CPU trains faster with --bf16 --use_cpu")

    # What a batch has, and what is measured.
    negatives = None
    if share := model.config.tr_hard_negatives:
        negatives = HardNegativeMaker(
            start.tokenizer, data.max_seq_length, share, training.seed_of_text, data.prefix
        )
    languages = model.config.rtl_languages or sorted(train)
    collator = BitextCollator(start.tokenizer.pad_token_id, languages, negatives, goals)
    if dev:
        pairs = as_pairs(dev)
        retrieval = Retrieval(pairs, True, data.target_language)
        evaluators = [retrieval, SourceInformation(pairs), *evaluators]
        if before is not None:
            evaluators.append(KeptNeighbours(pairs, before))

    trainer = DAPTrainer(
        model=model,
        args=training,
        train_dataset=concatenate_datasets(list(train.values())),
        train_sampler=sampler,
        data_collator=collator,
        processing_class=start.tokenizer,
        evaluators=evaluators,
        max_seq_length=data.max_seq_length,
        prefix=data.prefix,
        prompts={"query": data.query_prompt, "document": data.document_prompt},
        saved_length=start.library_length,
    )
    return trainer, describe_run(model.config, (model_args, data, training), train, dev)


def complete_data_arguments(data: PretrainingDataArguments, start: Start) -> None:
    """Fill in the prefix, the prompts and the length that the user did not give.

    They are those of a sentence-transformers folder if training starts from one. Otherwise there is
    no prefix, the prompts are the prefix, and the length is 32 tokens. A given prefix also replaces
    the folder's prompts.

    Raises:
        UserError: if the length is above the encoder's number of positions.
    """
    library = start.checkpoint.library
    prompts = library.prompts if data.prefix is None else {}
    if data.prefix is None:
        data.prefix = library.prefix
    if data.query_prompt is None:
        data.query_prompt = prompt_for("query", prompts, data.prefix)
    if data.document_prompt is None:
        data.document_prompt = prompt_for("document", prompts, data.prefix)
    if data.max_seq_length is None:
        data.max_seq_length = start.library_length or 32
    if start.positions is not None and data.max_seq_length > start.positions:
        raise UserError(
            f"max_seq_length={data.max_seq_length} is above the encoder's {start.positions} "
            "positions; lower it"
        )


def build_datasets(
    data: PretrainingDataArguments,
    training: DAPTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Read the text, hold out or read the dev set, and tokenise the training pairs.

    The dev set is all of `validation_data`, or at most `dev_pairs` rows per language of the dev set
    beside the training text. Training pairs are removed if their target is anywhere in that text,
    also in a row that is left out. Without a dev set in a language of the training, dev pairs are
    held out of the training text.

    Returns:
        The tokenised training pairs, the dev pairs as text, and the training pairs as text. All
        are by language.
    """
    options = {"max_bad_lines": data.max_bad_lines, "target_language": data.target_language}
    train = load_bitext(data.train_data, **options)
    validation = data.validation_data or find_dev(data.train_data, data.target_language)
    dev: dict[str, Any] = {}
    if validation:
        dev = load_bitext(validation, **options, split="dev")
        targets = [text for part in dev.values() for text in part["target"][:]]
        train = drop_targets(train, targets)
        if not data.validation_data:
            # mined text may be in any language
            own = dev if UNDETERMINED in {*train, *dev} else dev.keys() & train.keys()
            most = data.dev_pairs
            dev = {code: spread_rows(dev[code], most) for code in sorted(own) if most}
    if dev:
        logger.info("dev pairs: %s", " ".join(validation))
    else:
        train, dev = split_validation(train, data.dev_pairs, training.seed_of_text)
    tokenized = tokenize_bitext(train, tokenizer, data.max_seq_length, data.prefix)
    return tokenized, dev, train


def drawn_pairs(sampler: LanguageMixSampler, training: DAPTrainingArguments) -> np.ndarray:
    """Mark the pairs that a run may draw: (number of pairs,). With several epochs it is all."""
    batch = training.per_device_train_batch_size * training.world_size
    step = batch * training.gradient_accumulation_steps
    epochs = training.num_train_epochs
    if training.max_steps > 0:
        epochs = training.max_steps * step / len(sampler)
    is_drawn = np.full(len(sampler), epochs > 1)
    # `Trainer` rounds an epoch and the run up to whole steps, and reads one batch ahead.
    first = islice(sampler, math.ceil(epochs * len(sampler)) + 2 * step)
    is_drawn[np.fromiter(first, np.int64)] = True
    return is_drawn


def summary(
    config: DAPConfig, train: dict, dev: dict, training: DAPTrainingArguments, max_seq_length: int
) -> str:
    """Return a line for the log that describes the run: objective, text and batch."""
    languages = counted(len(train), "language")
    pairs = counted(sum(map(len, train.values())), "pair")
    dev_pairs = counted(sum(map(len, dev.values())), "dev pair")
    batch = training.per_device_train_batch_size * training.world_size
    step = counted(batch * training.gradient_accumulation_steps, "pair")
    text = f"{languages}, {pairs}, {dev_pairs}; {step} per step, at most {max_seq_length} tokens"
    return f"{config.objective} with {config.pooling} pooling on {text}"


# --------------------------------------------------------------------------------- the end of a run


def finish(
    trainer: DAPTrainer, metrics: dict[str, float], model_args: PretrainingModelArguments
) -> None:
    """Save the model and its evaluation, mark the run as finished, and publish it if asked for.

    Curves are drawn if matplotlib is installed. `train_results.json` is written last and marks the
    run as finished. All processes call this, and the first one writes.
    """
    training = trainer.args
    state = trainer.state
    folder = Path(training.output_dir)

    # `_internal_call` keeps the Trainer from pushing now. `publish` does so when all files exist.
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    # The saved weights are those of the best step or of the last one.
    keeps_best = training.load_best_model_at_end and state.best_model_checkpoint
    step = state.best_global_step if keeps_best else state.global_step
    found = evaluation_at(step, state)
    if trainer.evaluators:
        found = found or trainer.evaluate()
        trainer.save_metrics("eval", found, combined=False)
        warn_of_idle_heads(found)
    if not trainer.is_world_process_zero():
        return

    if find_spec("matplotlib"):
        plot_curves(state.log_history, folder / CURVES, kept=step)
    base = model_args.model_name_or_path
    commit = base and hub_commit(base, model_args.revision)
    write_json(metrics | {"model_step": step, "base_commit": commit}, folder / FINISHED)

    name = trainer.best_name
    names = [name, *(f"eval_{each.primary}" for each in trainer.evaluators)]
    text = main_numbers(found, names) or "not evaluated"
    start = evaluation_at(0, state)
    if before := main_numbers(start, names):
        text += f"; before training: {before}"
    logger.info("kept step %d of %d: %s; written to %s", step, state.global_step, text, folder)
    if name in start and name in found and trainer.is_worse(name, found[name], start[name]):
        logger.warning("%s is worse than before training: lower the learning rate", name)
    if training.push_to_hub:
        push(training, trainer.hub_model_id, model_args.plugin)
    else:
        place = shlex.quote(str(folder))
        evaluation = f"eval-retrieval --model {place} --data_dir FOLDER"
        logger.info("next: %s, or push-to-hub %s --repo_id USER/NAME", evaluation, place)


def evaluation_at(step: int, state: TrainerState) -> dict[str, float]:
    """Return the metrics that were logged at a step, the latest ones if it has several."""
    found = {}
    for line in state.log_history:
        if line["step"] == step and "eval_seconds" in line:
            found = {name: value for name, value in line.items() if name.startswith("eval_")}
    return found


def main_numbers(numbers: Mapping[str, float], names: Iterable[str]) -> str:
    """Format the numbers with these names. Missing ones are left out."""
    return readable({name: numbers[name] for name in names if name in numbers})


def warn_of_idle_heads(metrics: dict[str, float]) -> None:
    """Log a warning for each head that learns less than `LEAST_INFORMATION` from the source.

    Such a head teaches the encoder little.
    """
    for name, nats in metrics.items():
        if name.endswith("_source_nats") and nats < LEAST_INFORMATION:
            logger.warning(
                "%s is only %.2f per token, so this head teaches the encoder little: give a higher "
                "head_learning_rate, or more steps",
                name.removeprefix("eval_"),
                nats,
            )


def push(training: DAPTrainingArguments, repo_id: str, plugins: Sequence[str]) -> None:
    """Publish the model of a finished run. An error has the command that publishes it later."""
    options = PublishOptions(with_heads=True, private=bool(training.hub_private_repo))
    try:
        commit = publish(training.output_dir, repo_id, options, branch=training.hub_revision)
    except ValueError as error:
        place = shlex.quote(training.output_dir)
        later = f"push-to-hub {place} --repo_id {repo_id} --with_heads"
        if plugins:
            later += f" --plugin {shlex.join(plugins)}"
        raise UserError(
            f"the training is finished and saved, but {error}; push it by {later}"
        ) from error
    logger.info("published as %s, commit %s", repo_id, commit)
