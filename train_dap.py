"""Pre-train a cross-lingual sentence encoder on parallel text.

    accelerate launch train_dap.py configs/xlmr.yaml --train_data corpus/ --output_dir out

The recipe is optional, and flags override it. Give the same command again to resume a stopped run
from its last checkpoint. docs/training.md describes all recipes.
"""

import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import concatenate_datasets
from datasets import config as datasets_config
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase, set_seed

from dap_transformers.commands.edge import check_folders, command, guarded
from dap_transformers.encoding.load import hub_commit
from dap_transformers.errors import UserError, counted
from dap_transformers.evaluation.retrieval import Retrieval
from dap_transformers.files import disk_full, write_json
from dap_transformers.pictures import CURVES, plot_curves
from dap_transformers.publishing.publish import PublishOptions, publish
from dap_transformers.text.corpus import count_pairs, load_bitext
from dap_transformers.text.find import find_bitext
from dap_transformers.training.arguments import (
    DAPTrainingArguments,
    PretrainingDataArguments,
    PretrainingModelArguments,
    parse_arguments,
)
from dap_transformers.training.batches import (
    BitextCollator,
    LanguageMixSampler,
    drop_targets,
    mix_streams,
    mix_weights,
    split_validation,
    tokenize_bitext,
)
from dap_transformers.training.hard_negatives import HardNegatives
from dap_transformers.training.head_reading import HARDLY, HeadReading
from dap_transformers.training.heads import HEADS_FILE, train_missing_heads
from dap_transformers.training.resume import (
    FINISHED,
    describe_run,
    find_resumable,
    record_run,
    train_to_end,
)
from dap_transformers.training.start import (
    Start,
    check_settings,
    is_streamed,
    load_model,
    read_start,
)
from dap_transformers.training.teacher import add_teacher, check_teacher
from dap_transformers.training.trainer import DAPTrainer, leave_together, require_batch
from modeling_dap import DAPForPreTraining
from objectives_dap import OBJECTIVES

logger = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------- the text


def build_datasets(
    data: PretrainingDataArguments,
    training: DAPTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Read the text, hold out or read the dev set, and tokenise the training pairs.

    Without `validation_data`, dev pairs are held out of the training text. With it, training
    pairs whose target is in the dev set are removed.

    Args:
        data: arguments that name the text and its form.
        training: arguments with the seed.
        tokenizer: a fast tokenizer.

    Returns:
        The tokenised training pairs, map-style or streamed, the dev pairs as text, and the
        training pairs as text. All are by language.
    """
    options = {
        "max_bad_lines": data.max_bad_lines,
        "target_language": data.target_language,
        "columns": data.columns,
    }
    train = load_bitext(data.train_data, streaming=data.streaming, **options)
    if data.validation_data:
        dev = load_bitext(data.validation_data, **options)
        targets = [text for part in dev.values() for text in part["target"][:]]
        train = drop_targets(train, targets)
    else:
        train, dev = split_validation(train, data.dev_pairs, training.seed_of_text)
    tokenized = tokenize_bitext(train, tokenizer, data.max_seq_length, data.prefix or "")
    return tokenized, dev, train


def mix_languages(
    train: dict[str, Any], data: PretrainingDataArguments, training: DAPTrainingArguments
) -> tuple[Dataset, Sampler | None]:
    """Put all languages into one dataset, and decide how often each is drawn.

    For a stream, all pairs are counted first, unless the mix is uniform.

    Args:
        train: tokenised pairs by language, map-style or streamed.
        data: arguments with the language mix.
        training: arguments with the seed and the batch size.

    Returns:
        The dataset, and the sampler that draws the language mix from it. A stream is mixed
        already, so its sampler is None.
    """
    seed = training.seed_of_text
    if not data.streaming:
        sizes = [len(part) for part in train.values()]
        sampler = LanguageMixSampler(sizes, data.language_mix, data.mix_alpha, seed)
        return concatenate_datasets(list(train.values())), sampler

    # A uniform mix does not depend on the number of pairs, so there is no need to count them.
    sizes = [1] * len(train)
    if data.language_mix != "uniform":
        found = find_bitext(data.train_data, data.target_language, data.columns)
        sizes = [count_pairs(found[language], data.max_bad_lines) for language in train]
        require_batch(sum(sizes), training)
    weights = mix_weights(sizes, data.language_mix, data.mix_alpha)
    return mix_streams(train, weights, data.shuffle_buffer, seed), None


# ------------------------------------------------------------------------------ checks before a run


def check_run(
    data: PretrainingDataArguments,
    training: DAPTrainingArguments,
    dev: dict[str, Any],
    model: DAPForPreTraining,
) -> None:
    """Check, before the first step, that the run will not fail later or learn nothing.

    Args:
        data: arguments of the text.
        training: arguments of the training.
        dev: dev pairs by language.
        model: the model to train.
    """
    pairs = training.per_device_train_batch_size * training.world_size
    if pairs < 2 and "tr" in model.config.objectives:
        raise UserError(
            f"a batch of {pairs} pair has no negatives: give --per_device_train_batch_size 2 or "
            "more."
        )
    if data.streaming and training.max_steps < 1:
        raise UserError(
            "--streaming reads text without end, so it has no epochs: give --max_steps."
        )
    if not dev and training.eval_strategy != "no":
        raise UserError(
            f"eval_strategy={str(training.eval_strategy.value)!r}, but there are no dev pairs: "
            "raise --dev_pairs, give --validation_data, or --eval_strategy no "
            "--load_best_model_at_end false."
        )
    name = training.metric_for_best_model
    if training.chooses and training.freeze_encoder and name.endswith("accuracy"):
        raise UserError(
            f"metric_for_best_model={name!r} does not change under --freeze_encoder: leave "
            "--load_best_model_at_end and --early_stopping_patience out, or give eval_rtl_loss"
        )


# -------------------------------------------------------------------------------------- the trainer


def build_trainer(
    model_args: PretrainingModelArguments,
    data: PretrainingDataArguments,
    training: DAPTrainingArguments,
) -> tuple[DAPTrainer, dict[str, Any]]:
    """Read the text, load the model, check that they fit the arguments, and make a trainer of them.

    Args:
        model_args: which model to train, and its settings.
        data: arguments of the text. The prefix and the length are filled in if they are None.
        training: arguments of the training.

    Returns:
        The trainer, and the record of the run (`describe_run`).
    """
    start = read_start(model_args)
    library = start.library
    if data.prefix is not None:
        # The given prefix replaces the prompts of a sentence-transformers folder.
        library = replace(library, prompts={})
    complete_data_arguments(data, start)
    objective = start.settings["objective"]
    folder = model_args.distill_dir
    check_teacher(objective, model_args.distill_from, folder, data.streaming)
    check_settings(start, training)

    # The first process fills the cache of the text, and the others read it.
    with (
        training.main_process_first(desc="reading and tokenising"),
        disk_full(Path(datasets_config.HF_DATASETS_CACHE)),
    ):
        train, dev, text = build_datasets(data, training, start.tokenizer)

    teacher = None
    if model_args.distill_from is not None:
        place = Path(folder or Path(training.output_dir, "teacher"))
        train, teacher = add_teacher(model_args.distill_from, text, train, place)

    set_seed(training.seed)
    teacher_size = None if teacher is None else teacher.shape[1]
    model = load_model(model_args, start, train, teacher_size)
    check_run(data, training, dev, model)
    logger.info("%s", summarise(model, train, dev, training))

    dataset, sampler = mix_languages(train, data, training)
    share = model.config.tr_hard_negatives
    negatives = None
    if share:
        seed = training.seed_of_text
        negatives = HardNegatives(start.tokenizer, data.max_seq_length, share, seed, data.prefix)
    languages = model.config.rtl_languages or sorted(train)
    collator = BitextCollator(start.tokenizer.pad_token_id, languages, negatives, teacher)
    pairs = {}
    for code, part in dev.items():
        pairs[code] = list(zip(part["source"][:], part["target"][:], strict=True))
    evaluators = [Retrieval(pairs, True, data.target_language), HeadReading(pairs)]
    trainer = DAPTrainer(
        model=model,
        args=training,
        train_dataset=dataset,
        train_sampler=sampler,
        data_collator=collator,
        processing_class=start.tokenizer,
        evaluators=evaluators if dev else None,
        max_seq_length=data.max_seq_length,
        prefix=data.prefix,
        library=library,
    )
    return trainer, describe_run(model.config, (model_args, data, training), train, dev)


def complete_data_arguments(data: PretrainingDataArguments, start: Start) -> None:
    """Fill in the prefix and the length that the user did not give.

    They are those of a sentence-transformers folder if training starts from one. Otherwise there is
    no prefix, and the length is 32 tokens.

    Args:
        data: arguments of the text, changed in place.
        start: what training starts from.
    """
    if data.prefix is None:
        data.prefix = start.library.prefix
    if data.max_seq_length is None:
        data.max_seq_length = start.library.max_seq_length or 32
    if start.positions is not None and data.max_seq_length > start.positions:
        raise UserError(
            f"max_seq_length={data.max_seq_length} is above the encoder's {start.positions} "
            "positions; lower it."
        )


def summarise(
    model: DAPForPreTraining, train: dict, dev: dict, training: DAPTrainingArguments
) -> str:
    """Return a line for the log that describes the run: objective, text, batch and vocabulary.

    Args:
        model: the model to train.
        train: training pairs by language, map-style or streamed.
        dev: dev pairs by language.
        training: arguments of the training.
    """
    config = model.config
    languages = counted(len(train), "language")
    if is_streamed(train):
        text = "streamed pairs"
    else:
        text = counted(sum(len(part) for part in train.values()), "pair")
    dev_pairs = sum(len(part) for part in dev.values())
    if dev_pairs:
        text += f", {counted(dev_pairs, 'dev pair')}"

    batch = training.per_device_train_batch_size * training.world_size
    accumulated = training.gradient_accumulation_steps
    step = f"{counted(batch * accumulated, 'pair')} per step"
    if training.mini_batch_size:
        step += f" in chunks of {training.mini_batch_size}"
    if "tr" in config.objectives:
        step += f", each source ranked among {counted(batch, 'target')}"
        if accumulated > 1:
            step += " (gradient accumulation adds pairs, but no targets to rank)"

    line = f"{config.objective} with {config.pooling} pooling on {languages}, {text}; {step}"
    if model.prediction_head is not None:
        size = config.target_vocab_size or config.vocab_size
        line += f"; predicted vocabulary: {counted(size, 'token')}"
    return line


# --------------------------------------------------------------------------------- the end of a run


def finish(
    trainer: DAPTrainer, metrics: dict[str, float], model_args: PretrainingModelArguments
) -> None:
    """Save the model and its evaluation, mark the run as finished, and publish it if asked for.

    Curves are drawn if matplotlib is installed. The file of heads that were trained first is
    removed, because the model holds them. `train_results.json` is written last and marks the run
    as finished. All processes call this, and the first one writes.

    Args:
        trainer: the trainer after its last step.
        metrics: the metrics of the training by name.
        model_args: the arguments that name the model that training started from.
    """
    training = trainer.args
    state = trainer.state
    folder = Path(training.output_dir)
    is_writer = trainer.is_world_process_zero()

    # `_internal_call` keeps the Trainer from pushing now. `push` does so when all files are there.
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    step = kept_step(trainer)
    history = list(state.log_history)
    found = {}
    if trainer.evaluators:
        found = trainer.evaluate()
        trainer.save_metrics("eval", found, combined=False)
        warn_of_idle_heads(found)
    if not is_writer:
        return

    made = {"model_step": step}
    if step == state.global_step:
        history = state.log_history  # with the evaluation of the last step
    base = model_args.model_name_or_path
    commit = None if base is None else hub_commit(base, model_args.revision)
    if commit:
        made["base_commit"] = commit
    if find_spec("matplotlib"):
        plot_curves(history, folder / CURVES, kept=step)
    # The saved model has the heads.
    (folder / HEADS_FILE).unlink(missing_ok=True)
    write_json(metrics | made, folder / FINISHED)
    logger.info("%s", summarise_end(trainer, step, found))
    if training.push_to_hub:
        push(training, trainer.hub_model_id)


def kept_step(trainer: DAPTrainer) -> int:
    """Return the step of the weights that are saved: the best step or the last one.

    Args:
        trainer: the trainer after its last step.
    """
    state = trainer.state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
        return state.best_global_step or state.global_step
    return state.global_step


def summarise_end(trainer: DAPTrainer, step: int, metrics: dict[str, float]) -> str:
    """Say in one line which weights were kept, how accurate they are, and where they are.

    Args:
        trainer: the trainer after its last step.
        step: the step of the saved weights.
        metrics: metrics of the last evaluation by name. It may be empty.
    """
    accuracy = metrics.get("eval_mean_accuracy")
    pool = metrics.get("eval_mean_pool_accuracy")
    shown = "not evaluated" if accuracy is None else f"mean accuracy {accuracy:.1f}% on dev pairs"
    if pool is not None:
        shown += f", {pool:.1f}% in the multilingual pool"
    steps = trainer.state.global_step
    return f"kept step {step} of {steps}: {shown}; written to {trainer.args.output_dir}"


def warn_of_idle_heads(metrics: dict[str, float]) -> None:
    """Log a warning if a head hardly uses the source, because it then hardly trains the encoder.

    Args:
        metrics: metrics of an evaluation by name. Those of `HeadReading` are used, if there
            are any.
    """
    for reader in OBJECTIVES:
        nats = metrics.get(f"eval_{reader}_source_nats", HARDLY)
        if nats < HARDLY:
            logger.warning(
                "the %s head hardly uses the source (%.2f nats per token), so it teaches the "
                "encoder little: give more --head_steps, or a higher --head_learning_rate",
                reader.upper(),
                nats,
            )


def push(training: DAPTrainingArguments, repo_id: str) -> None:
    """Publish the model of a finished run on the Hub.

    Args:
        training: arguments with the output folder and the options of the Hub.
        repo_id: id of the Hub repository.
    """
    private = bool(training.hub_private_repo)
    options = PublishOptions(with_heads=True, private=private)
    try:
        done = publish(training.output_dir, repo_id, options, branch=training.hub_revision)
    except ValueError as error:
        later = [
            "push-to-hub",
            training.output_dir,
            "--repo_id",
            repo_id,
            "--with_heads",
        ]
        if private:
            later.append("--private")
        raise UserError(
            f"the training is finished and saved, but {error}; push it by python "
            f"{shlex.join(later)}"
        ) from error
    logger.info("published as %s, commit %s", repo_id, done.commit)


# -------------------------------------------------------------------------------------- the command


def run(argv: Sequence[str]) -> None:
    """Pre-train a sentence encoder from command-line arguments, and save it with its results.

    A run that was stopped is resumed. With `load_best_model_at_end` the best model is saved,
    otherwise the last one.

    Args:
        argv: the arguments of the command, without the name of the program.
    """
    model_args, data, training = parse_arguments(argv)
    is_writer = training.process_index == 0
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_writer else logging.ERROR)

    inputs = [*data.train_data, *data.validation_data]
    for path in (
        model_args.model_name_or_path,
        model_args.config_name,
        model_args.tokenizer_name,
        model_args.init_heads_from,
        model_args.target_vocabulary_file,
        model_args.distill_from,
    ):
        if path:
            inputs.append(path)
    if model_args.distill_dir:
        # Not locked, because runs may share the teacher's vectors.
        check_folders({"--distill_dir": model_args.distill_dir}, inputs)
    with guarded(folders={"--output_dir": training.output_dir}, inputs=inputs, is_writer=is_writer):
        checkpoint = find_resumable(training)
        trainer, record = build_trainer(model_args, data, training)
        record_run(record, training, checkpoint)
        if checkpoint is None:
            train_missing_heads(trainer, record)
        metrics = train_to_end(trainer, checkpoint)
        finish(trainer, metrics, model_args)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `train_dap.py`: pre-train a sentence encoder.

    Args:
        argv: the arguments of the command. None takes those of this process.
    """
    try:
        run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "by default, the same command resumes from the last checkpoint, if there is one"
        ) from None
    leave_together()


if __name__ == "__main__":
    main()
