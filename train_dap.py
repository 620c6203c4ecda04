"""Pre-train a cross-lingual sentence encoder on parallel text with translation ranking and RTL or TLM.

    accelerate launch train_dap.py configs/xlmr.yaml --train_data corpus/ --output_dir out

The recipe is optional, and flags override it. A run that was stopped goes on from its last
checkpoint. An encoder to start from is made from scratch by masked language modelling, with
configs/mlm.yaml.
"""

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import concatenate_datasets
from datasets import config as datasets_config
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINING_ARGS_NAME

from dap.commands import command, guarded
from dap.encoding import hub_commit
from dap.errors import UserError
from dap.file_io import disk_full, write_json
from dap.publishing import Options, publish
from dap.reports import CURVES, plot_curves
from dap.text import count_pairs, find_bitext, load_bitext
from dap.training import (
    FINISHED,
    HARDLY,
    READERS,
    BitextCollator,
    DAPTrainer,
    DAPTrainingArguments,
    DataArguments,
    HardNegatives,
    LanguageMixSampler,
    ModelArguments,
    describe_run,
    drop_targets,
    find_resumable,
    interleave_languages,
    keep_record,
    leave_together,
    load_model,
    parse_arguments,
    read_start,
    require_batch,
    split_validation,
    tokenize_bitext,
    train_to_end,
)
from modeling_dap import DAPForPreTraining

logger = logging.getLogger(__name__)


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
        train, dev = split_validation(train, data.dev_pairs, training.seed_of_text)
    cut = data.max_seq_length, data.shuffle_buffer, training.seed_of_text, data.prefix or ""
    return tokenize_bitext(train, tokenizer, *cut), dev


def mix_languages(
    train: dict[str, Any], data: DataArguments, training: DAPTrainingArguments
) -> tuple[Dataset, Sampler | None]:
    """All languages as one dataset, and what draws the language mix from it; a stream is in the mix already.

    Raises:
        ValueError: the pairs of a stream do not fill one batch.
    """
    mix = data.language_mix, data.mix_alpha, training.seed_of_text
    if not data.streaming:
        sizes = [len(part) for part in train.values()]
        return concatenate_datasets(list(train.values())), LanguageMixSampler(sizes, *mix)
    counts = dict.fromkeys(train, 1)  # a uniform mix needs no more
    if data.language_mix != "uniform":
        found = find_bitext(data.train_data, data.target_language)
        counts = {
            language: count_pairs(files, data.max_bad_lines) for language, files in found.items()
        }
        require_batch(sum(counts.values()), training)
    return interleave_languages(train, counts, *mix), None


def check_run(
    data: DataArguments,
    training: DAPTrainingArguments,
    dev: dict[str, Any],
    model: DAPForPreTraining,
) -> None:
    """Raise `ValueError` where pairs cannot be ranked, or nothing can be evaluated."""
    pairs = training.per_device_train_batch_size * training.world_size
    if pairs < 2 and "tr" in model.config.objectives:
        raise UserError(
            f"a batch of {pairs} pair has no negatives: give --per_device_train_batch_size 2 or more."
        )
    if data.streaming and training.max_steps < 1:
        raise UserError("--streaming reads text again and again, without epochs: give --max_steps.")
    if not dev and training.eval_strategy != "no":
        raise UserError(
            f"eval_strategy={str(training.eval_strategy.value)!r}, but there are no dev pairs: raise --dev_pairs, "
            "give --validation_data, or --eval_strategy no --load_best_model_at_end false."
        )
    check_metric(data, training, dev, model)


def check_metric(
    data: DataArguments,
    training: DAPTrainingArguments,
    dev: dict[str, Any],
    model: DAPForPreTraining,
) -> None:
    """Raise `ValueError` where no evaluation gives the metric that chooses the best model, or it cannot change."""
    name = training.metric_for_best_model
    readers = [objective.name for objective in model.objectives if objective.name in READERS]
    known = [
        f"eval_{reader}_{measure}" for reader in readers for measure in ("loss", "source_nats")
    ]
    directions = [
        way
        for code in dev
        for way in (f"{code}-{data.target_language}", f"{data.target_language}-{code}")
    ]
    known = ["eval_mean_accuracy", *known, *(f"eval_{way}_accuracy" for way in directions)]
    if training.chooses and f"eval_{name.removeprefix('eval_')}" not in known:
        raise UserError(
            f"metric_for_best_model={name!r} is in no evaluation: give {', '.join(known[:4])}, ..."
        )
    if training.chooses and training.freeze_encoder and name.endswith("accuracy"):
        instead = f"give eval_{readers[0]}_loss, or " if readers else ""
        raise UserError(
            f"metric_for_best_model={name!r} stays as it is under --freeze_encoder: {instead}leave "
            "--load_best_model_at_end and --early_stopping_patience out."
        )


def build_trainer(
    model_args: ModelArguments,
    data: DataArguments,
    training: DAPTrainingArguments,
    model_class: type[DAPForPreTraining] = DAPForPreTraining,
) -> tuple[DAPTrainer, dict[str, Any]]:
    """Text, model and trainer, wired; and the record of the run."""
    start = read_start(model_args)
    library = start.library
    if data.prefix is None:
        data.prefix = library.prefix
    else:
        library = replace(library, prompts={})
    if data.max_seq_length is None:
        data.max_seq_length = library.max_seq_length or 32
    if start.positions is not None and data.max_seq_length > start.positions:
        longest = f"the encoder's {start.positions} positions"
        raise UserError(f"max_seq_length={data.max_seq_length} is above {longest}; lower it.")
    with (
        training.main_process_first(desc="reading and tokenising"),
        disk_full(Path(datasets_config.HF_DATASETS_CACHE)),
    ):
        train, dev = build_datasets(data, training, start.tokenizer)
    set_seed(training.seed)
    model = load_model(model_args, start, train, model_class)
    check_run(data, training, dev, model)
    logger.info("%s", describe(model, train, dev, training))
    dataset, sampler = mix_languages(train, data, training)
    share, languages = model.config.tr_hard_negatives, model.config.rtl_languages or sorted(train)
    drawn = data.max_seq_length, share, training.seed_of_text, data.prefix
    changed = HardNegatives(start.tokenizer, *drawn) if share else None
    trainer = DAPTrainer(
        model=model,
        args=training,
        train_dataset=dataset,
        train_sampler=sampler,
        data_collator=BitextCollator(start.tokenizer.pad_token_id, languages, negatives=changed),
        processing_class=start.tokenizer,
        target_language=data.target_language,
        dev_bitext={
            language: (dev[language]["source"][:], dev[language]["target"][:]) for language in dev
        },
        max_seq_length=data.max_seq_length,
        prefix=data.prefix,
        library=library,
    )
    return trainer, describe_run(model.config, (model_args, data, training), train, dev)


def describe(
    model: DAPForPreTraining, train: dict, dev: dict, training: DAPTrainingArguments
) -> str:
    """One line about the run, for the log."""
    streamed = not all(hasattr(part, "__len__") for part in train.values())
    pairs = "streamed" if streamed else sum(map(len, train.values()))
    total = training.per_device_train_batch_size * training.world_size
    ranked = (
        " and as many candidates for each (accumulation adds none)"
        if "tr" in model.config.objectives
        else ""
    )
    chunks = f" in chunks of {training.mini_batch_size}" if training.mini_batch_size else ""
    languages = "1 language" if len(train) == 1 else f"{len(train)} languages"
    return (
        f"{model.config.objective} on {languages}, {pairs} pairs, {sum(map(len, dev.values()))} dev pairs; "
        f"{total} pairs a step{chunks}{ranked}; "
        f"vocabulary of the prediction head: {model.config.target_vocab_size or model.config.vocab_size}"
    )


def save(trainer: DAPTrainer, metrics: dict[str, float], model_args: ModelArguments) -> None:
    """Save the model and its evaluation, mark the run as finished, and publish the model where that is asked for."""
    training, state = trainer.args, trainer.state
    trainer.save_model(_internal_call=True)  # pushed at the end, when all is on disk
    if trainer.is_world_process_zero():
        Path(training.output_dir, TRAINING_ARGS_NAME).unlink(
            missing_ok=True
        )  # a pickle, which nobody needs
    trainer.save_state()
    if trainer.dev_bitext:
        found = trainer.evaluate()
        trainer.save_metrics("eval", found, combined=False)
        for reader in READERS:
            if (nats := found.get(f"eval_{reader}_source_nats", HARDLY)) < HARDLY:
                logger.warning(
                    "the %s head hardly reads the source (%.2f nats a token), so it teaches the encoder little: train "
                    "the head first (configs/head.yaml), or longer, or raise --head_learning_rate",
                    reader.upper(),
                    nats,
                )
    best = (
        training.load_best_model_at_end and state.best_model_checkpoint and state.best_global_step
    )
    made = {"model_step": best or state.global_step}  # the step that the saved weights are of
    base = model_args.model_name_or_path
    if base is not None and (commit := hub_commit(base, model_args.revision)):
        made["base_commit"] = commit
    if trainer.is_world_process_zero():
        if find_spec("matplotlib"):
            plot_curves(state.log_history, Path(training.output_dir, CURVES))
        write_json(metrics | made, Path(training.output_dir, FINISHED))
        if training.push_to_hub:
            push(training, trainer.hub_model_id)


def push(training: DAPTrainingArguments, repo_id: str) -> None:
    """Publish the model of a run that has ended; raises `ValueError` with what to do instead of training again."""
    private = bool(training.hub_private_repo)
    try:
        to = {"private": private, "revision": training.hub_revision}
        commit = publish(training.output_dir, repo_id, Options(with_heads=True), **to)
    except ValueError as error:
        later = ["push_to_hub.py", training.output_dir, "--repo_id", repo_id, "--with_heads"]
        command = shlex.join(later + ["--private"] * private)
        raise UserError(
            f"the training is finished and saved, but {error}; push it by python {command}"
        ) from error
    logger.info("published as %s, commit %s", repo_id, commit)


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
    logging.basicConfig(
        format="%(message)s", level=logging.INFO if training.process_index == 0 else logging.ERROR
    )
    outputs, is_writer = {"--output_dir": training.output_dir}, training.process_index == 0
    start = model_args.model_name_or_path or model_args.config_name
    inputs = filter(None, [model_args.tokenizer_name])
    with guarded(folders=outputs, inputs=inputs, model=start, is_writer=is_writer):
        checkpoint = find_resumable(training)
        trainer, record = build_trainer(model_args, data, training, model_class)
        keep_record(record | (also_recorded or {}), training, checkpoint)
        save(trainer, train_to_end(trainer, checkpoint), model_args)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `run`."""
    run(sys.argv[1:] if argv is None else argv)
    leave_together()


if __name__ == "__main__":
    main()
