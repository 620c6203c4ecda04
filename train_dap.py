"""Pre-train a cross-lingual sentence encoder on parallel text with translation ranking and RTL or TLM.

    accelerate launch train_dap.py configs/xlmr.yaml --train_data corpus/ --output_dir out

The recipe is optional, and flags override it. A run that was stopped goes on from its last checkpoint. An encoder to
start from is made from scratch by masked language modelling, with configs/mlm.yaml.
"""

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.trainer import TRAINING_ARGS_NAME

from dap.commands import command, guarded
from dap.encoding import hub_commit, longest_input
from dap.errors import UserError
from dap.publishing import Options, publish
from dap.reports import write_json
from dap.text import count_pairs, find_bitext, load_bitext
from dap.training import (
    CONFIG_DEFAULTS,
    FINISHED,
    BitextCollator,
    DAPTrainer,
    DAPTrainingArguments,
    DataArguments,
    FindBestAgain,
    LanguageMixSampler,
    ModelArguments,
    RecordInCheckpoints,
    StopEarlyAfterWarmup,
    describe_run,
    drop_targets,
    find_resumable,
    freeze_word_embeddings,
    given_fields,
    goes_on,
    has_ended,
    keep_record,
    leave_together,
    load_ended,
    load_model,
    load_start_config,
    load_tokenizer,
    mix_languages,
    parse_arguments,
    read_target_vocabulary,
    split_validation,
    target_vocabulary,
    token_counts,
    tokenize_bitext,
)
from modeling_dap import DAPConfig, DAPForPreTraining

logger = logging.getLogger(__name__)


def text_fields(
    args: ModelArguments, data: DataArguments, train: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What the training text says about a new model: the ids that RTL predicts, or the languages.

    Raises:
        ValueError: a target vocabulary for a model that has no use for it.
    """
    settings = CONFIG_DEFAULTS | given_fields(args)
    objective, direction = settings["objective"], settings["rtl_direction"]
    if args.target_vocabulary_file is not None and (objective, direction) != ("tr+rtl", "source-to-target"):
        raise UserError(
            f"--target_vocabulary_file {args.target_vocabulary_file} does nothing with objective={objective!r} and "
            f"rtl_direction={direction!r}: it is for 'tr+rtl' from source to target; leave it out."
        )
    if objective != "tr+rtl":
        return {}
    if direction != "source-to-target":
        return {"rtl_languages": sorted(train)}
    if args.target_vocabulary_file is not None:
        return {"target_token_ids": read_target_vocabulary(args.target_vocabulary_file, tokenizer)}
    restricted = args.restrict_target_vocabulary and not data.streaming
    return {"target_token_ids": target_vocabulary(train, tokenizer)} if restricted else {}


def count_predicted(
    args: ModelArguments,
    data: DataArguments,
    train: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    saved: DAPConfig | None,
) -> dict[str, Tensor]:
    """How often a new model is to predict each id, where the bias of its prediction head is to start from that.

    Nothing for a DAP checkpoint to go on with (`saved`), with a warning.

    Raises:
        ValueError: another `prediction_bias` than there is, or nothing that could be counted.
    """
    if args.prediction_bias == "zeros":
        return {}
    if args.prediction_bias != "frequencies":
        raise UserError(f"prediction_bias={args.prediction_bias!r}: give 'zeros' or 'frequencies'.")
    settings = CONFIG_DEFAULTS | given_fields(args)
    objective = settings["objective"] if saved is None else saved.objective
    if objective == "tr" or data.streaming:
        why = "a stream cannot be counted" if data.streaming else "objective 'tr' predicts no tokens"
        raise UserError(f"--prediction_bias frequencies does nothing, as {why}: leave it out.")
    if saved is not None:
        logger.warning("%s has its prediction head already: its bias stays", args.model_name_or_path)
        return {}
    if objective == "tr+rtl":
        sides = {"source-to-target": ("target",), "target-to-source": ("source",)}.get(settings["rtl_direction"])
        return {"token_counts": torch.from_numpy(token_counts(train, tokenizer, sides or ("source", "target")))}
    counts = torch.from_numpy(token_counts(train, tokenizer, ("source", "target")))  # (V,)
    for last in {tokenizer.sep_token_id, tokenizer.eos_token_id} - {None}:
        counts[last] = 0  # only RTL predicts it
    return {"token_counts": counts}


def build_datasets(
    data: DataArguments, training: DAPTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokenised training pairs and dev text, both by language."""
    options = {"max_bad_lines": data.max_bad_lines, "target_language": data.target_language}
    train = load_bitext(data.train_data, streaming=data.streaming, **options)
    if data.validation_data:
        dev = load_bitext(data.validation_data, **options)
        train = drop_targets(train, (text for part in dev.values() for text in part["target"][:]))
    else:
        train, dev = split_validation(train, data.dev_pairs, data_seed(training))
    order = {"streaming": data.streaming, "shuffle_buffer": data.shuffle_buffer, "seed": data_seed(training)}
    return tokenize_bitext(train, tokenizer, data.max_seq_length, **order), dev


def check_schedule(training: DAPTrainingArguments, dev: dict[str, Any], objective: str) -> None:
    """Raise `ValueError` when there is nothing to rank a pair against, or nothing to evaluate on."""
    pairs = training.per_device_train_batch_size * training.world_size
    if pairs < 2 and objective != "mlm":
        raise UserError(f"a batch of {pairs} pair has no negatives: give --per_device_train_batch_size 2 or more.")
    if training.early_stopping_patience is not None and training.eval_strategy == "no":
        raise UserError(
            f"early_stopping_patience={training.early_stopping_patience} needs evaluations: give "
            "--eval_strategy steps --save_strategy steps --load_best_model_at_end."
        )
    if not dev and training.eval_strategy != "no":
        raise UserError(
            f"eval_strategy={str(training.eval_strategy.value)!r}, but there are no dev pairs: raise --dev_pairs, "
            "give --validation_data, or --eval_strategy no --load_best_model_at_end false."
        )


def data_seed(training: DAPTrainingArguments) -> int:
    """The seed of everything that chooses or orders text."""
    return training.seed if training.data_seed is None else training.data_seed


def check_length(model: DAPForPreTraining, max_seq_length: int) -> None:
    """Raise `ValueError` when sequences would be longer than the encoder's table of positions."""
    longest = longest_input(model.dap)
    if longest is not None and max_seq_length > longest:
        raise UserError(f"max_seq_length={max_seq_length} is above the encoder's {longest} positions; lower it.")


def check_languages(model: DAPForPreTraining, train: dict[str, Any], name: str) -> None:
    """Raise `ValueError` when the model tells languages apart and the text has others."""
    known = model.config.rtl_languages
    if known is not None and (new := sorted(set(train) - set(known))):
        raise UserError(
            f"{name} was trained with rtl_direction={model.config.rtl_direction!r} on {' '.join(known)}, the text has "
            f"{' '.join(new)} too: leave it out, or start from a plain encoder."
        )


def build_trainer(
    model_args: ModelArguments,
    data: DataArguments,
    training: DAPTrainingArguments,
    model_class: type[DAPForPreTraining] = DAPForPreTraining,
) -> tuple[DAPTrainer, dict[str, Any]]:
    """Everything wired: tokenizer, data, model, trainer; and the record of the run."""
    tokenizer = load_tokenizer(model_args)
    start = load_start_config(model_args, tokenizer)
    with training.main_process_first(desc="reading and tokenising"):
        train, dev = build_datasets(data, training, tokenizer)
    check_schedule(training, dev, (CONFIG_DEFAULTS | given_fields(model_args))["objective"])
    is_dap = goes_on(start, model_args)
    if is_dap and model_args.target_vocabulary_file is not None:
        raise UserError(
            f"{model_args.model_name_or_path} has its target vocabulary already: leave --target_vocabulary_file "
            f"{model_args.target_vocabulary_file} out, or start from a plain encoder."
        )
    fields = {} if is_dap else text_fields(model_args, data, train, tokenizer)
    fields |= count_predicted(model_args, data, train, tokenizer, start if is_dap else None)
    set_seed(training.seed)
    model = load_model(model_args, start, tokenizer, fields, model_class)
    check_length(model, data.max_seq_length)
    check_languages(model, train, model_args.model_name_or_path)
    if training.freeze_word_embeddings:
        freeze_word_embeddings(model)
    logger.info("%s", describe(model, train, dev, training))
    mixed, sampler = (mix_stream(train, data, training), None) if data.streaming else mix(train, data, training)
    callbacks: list[TrainerCallback] = [FindBestAgain(), RecordInCheckpoints()]
    if training.early_stopping_patience is not None:
        callbacks.append(StopEarlyAfterWarmup(training.early_stopping_patience))
    trainer = DAPTrainer(
        model=model,
        args=training,
        train_dataset=mixed,
        train_sampler=sampler,
        data_collator=BitextCollator(tokenizer.pad_token_id, model.config.rtl_languages or sorted(train)),
        processing_class=tokenizer,
        target_language=data.target_language,
        dev_bitext={language: (dev[language]["source"][:], dev[language]["target"][:]) for language in dev},
        max_seq_length=data.max_seq_length,
        callbacks=callbacks,
    )
    return trainer, describe_run(model.config, (model_args, data, training), train, dev)


def mix(
    train: dict[str, Dataset], data: DataArguments, training: DAPTrainingArguments
) -> tuple[Dataset, LanguageMixSampler]:
    """All languages as one dataset, and the sampler that draws the language mix from it."""
    sizes, seed = [len(part) for part in train.values()], data_seed(training)
    check_size(sum(sizes), training)
    sampler = LanguageMixSampler(sizes, data.language_mix, data.mix_alpha, seed)
    return mix_languages(train, "natural", data.mix_alpha, seed), sampler


def mix_stream(
    train: dict[str, IterableDataset], data: DataArguments, training: DAPTrainingArguments
) -> IterableDataset:
    """All languages as one stream in the language mix, for which their pairs are counted."""
    sizes = None
    if data.language_mix != "uniform":
        found = find_bitext(data.train_data, data.target_language)
        sizes = {language: count_pairs(files, data.max_bad_lines) for language, files in found.items()}
        check_size(sum(sizes.values()), training)
    return mix_languages(train, data.language_mix, data.mix_alpha, data_seed(training), sizes)


def check_size(pairs: int, training: DAPTrainingArguments) -> None:
    """Raise `ValueError` when the training pairs do not fill one batch."""
    batch = training.per_device_train_batch_size * training.world_size
    if pairs < batch:
        raise UserError(f"{pairs} training pairs do not fill one batch of {batch}: lower the batch size.")


def describe(model: DAPForPreTraining, train: dict, dev: dict, training: DAPTrainingArguments) -> str:
    """One line about the run, for the log."""
    pairs = (
        "streamed" if any(not hasattr(part, "__len__") for part in train.values()) else sum(map(len, train.values()))
    )
    vocabulary = model.config.target_vocab_size or model.config.vocab_size
    total = training.per_device_train_batch_size * training.world_size
    ranked = " and as many candidates for each (accumulation adds none)" if model.config.uses_tr else ""
    chunks = f" in chunks of {training.mini_batch_size}" if training.mini_batch_size else ""
    languages = "1 language" if len(train) == 1 else f"{len(train)} languages"
    return (
        f"{model.config.objective} on {languages}, {pairs} pairs, {sum(map(len, dev.values()))} dev pairs; "
        f"{total} pairs a step{chunks}{ranked}; "
        f"vocabulary of the prediction head: {vocabulary}"
    )


def run(
    argv: Sequence[str],
    model_class: type[DAPForPreTraining] = DAPForPreTraining,
    also_recorded: Mapping[str, Any] | None = None,
) -> None:
    """Train, save the model (the best one, with `load_best_model_at_end`), and write the results.

    Args:
        argv: the arguments of the command.
        model_class: what is trained.
        also_recorded: what can change the weights beside the arguments, for the run's record.
    """
    model_args, data, training = parse_arguments(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO if training.process_index == 0 else logging.ERROR)
    outputs, is_writer = {"--output_dir": training.output_dir}, training.process_index == 0
    start = model_args.model_name_or_path or model_args.config_name
    with guarded(folders=outputs, model=start, is_writer=is_writer):
        _run(model_args, data, training, model_class, also_recorded or {})


def _run(
    model_args: ModelArguments,
    data: DataArguments,
    training: DAPTrainingArguments,
    model_class: type[DAPForPreTraining],
    also_recorded: Mapping[str, Any],
) -> None:
    """Train, save and write, while no other run is at work in the folder."""
    checkpoint = find_resumable(training)
    trainer, record = build_trainer(model_args, data, training, model_class)
    keep_record(record | also_recorded, training, checkpoint)
    if checkpoint is not None and has_ended(checkpoint, training.max_steps):
        metrics = load_ended(trainer, checkpoint)  # killed after its last step: nothing is left to train
    else:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model(_internal_call=True)  # pushed at the end, when all is on disk
    if trainer.is_world_process_zero():
        Path(training.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nobody needs
    trainer.save_state()
    if trainer.dev_bitext:
        trainer.save_metrics("eval", trainer.evaluate(), combined=False)
    made = {"model_step": step_of_model(trainer)}
    base = model_args.model_name_or_path
    if base is not None and (commit := hub_commit(base, model_args.revision)):
        made["base_commit"] = commit
    if trainer.is_world_process_zero():
        write_json(metrics | made, Path(training.output_dir, FINISHED))
    if training.push_to_hub and trainer.is_world_process_zero():
        push(training, trainer.hub_model_id)


def step_of_model(trainer: DAPTrainer) -> int:
    """The step that the saved weights are of: the best one with `load_best_model_at_end`, else the last."""
    state = trainer.state
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint and state.best_global_step
    return best or state.global_step


def push(training: DAPTrainingArguments, repo_id: str) -> None:
    """Publish the model of a run that has ended; raises `ValueError` with what to do instead of training again."""
    private = bool(training.hub_private_repo)
    try:
        to = {"private": private, "revision": training.hub_revision}
        commit = publish(training.output_dir, repo_id, Options(with_heads=True), **to)
    except ValueError as error:
        later = ["push_to_hub.py", training.output_dir, "--repo_id", repo_id, "--with_heads"]
        command = shlex.join(later + ["--private"] * private)
        raise UserError(f"the training is finished and saved, but {error}; push it by python {command}") from error
    logger.info("published as %s, commit %s", repo_id, commit)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `run`."""
    run(sys.argv[1:] if argv is None else argv)
    leave_together()


if __name__ == "__main__":
    main()
