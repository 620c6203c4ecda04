"""Pre-train a cross-lingual sentence encoder on parallel text with translation ranking and RTL or TLM.

    accelerate launch train_dap.py configs/xlmr.yaml --train_data corpus/ --output_dir out

The recipe is optional, and flags override it. A run that was stopped goes on from its last checkpoint.
"""

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import (
    AutoConfig,
    AutoTokenizer,
    EarlyStoppingCallback,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from dap.corpus import count_pairs, find_bitext, load_bitext
from dap.data import (
    BitextCollator,
    LanguageMixSampler,
    mix_languages,
    require_mask_token,
    split_validation,
    target_vocabulary,
    tokenize_bitext,
)
from dap.encoding import longest_input
from dap.trainer import DAPTrainer, DAPTrainingArguments, freeze_word_embeddings
from modeling_dap import DAPConfig, DAPForPreTraining

logger = logging.getLogger(__name__)

FINISHED = "train_results.json"  # written last, so it marks a finished run


@dataclass
class ModelArguments:
    """What is trained; see `DAPConfig` for the fields that it shares with it."""

    model_name_or_path: str = field(metadata={"help": "Encoder to start from, or a DAP checkpoint to go on with."})
    objective: str = field(default="tr+rtl", metadata={"help": "tr, tr+tlm, or tr+rtl (= DAP)."})
    pooling: str = field(default="cls", metadata={"help": "cls or mean."})
    projection: str | None = field(default=None, metadata={"help": "mlp: a train-only layer on the sentence vector."})
    tr_similarity: str = field(default="cosine", metadata={"help": "cosine or dot."})
    tr_temperature: float | None = field(default=None, metadata={"help": "0.05 for cosine, 1 for dot by default."})
    tr_margin: float = field(default=0.0, metadata={"help": "Additive margin on the true pair's similarity."})
    tr_bidirectional: bool = field(default=False, metadata={"help": "Rank sources for each target, too."})
    tr_mask_duplicates: bool = field(default=True, metadata={"help": "Equal targets are not each other's negatives."})
    rtl_layers: int = field(default=2, metadata={"help": "K, transformer blocks of the RTL head."})
    rtl_direction: str = field(default="source-to-target", metadata={"help": "Or target-to-source, or both."})
    rtl_ratio: float = field(default=1.0, metadata={"help": "rho, share of target tokens to reconstruct."})
    rtl_weight: float = field(default=1.0, metadata={"help": "Factor of the RTL loss."})
    tlm_probability: float = field(default=0.2, metadata={"help": "Share of tokens that TLM masks."})
    tlm_weight: float = field(default=0.1, metadata={"help": "Factor of the TLM loss."})
    restrict_target_vocabulary: bool = field(
        default=True, metadata={"help": "RTL predicts only ids that occur in the training targets (not in streams)."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, ..."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})
    revision: str | None = field(default=None, metadata={"help": "Commit, tag or branch of the checkpoint."})


@dataclass
class DataArguments:
    """Parallel text; sources of every language share one target language, English."""

    train_data: list[str] = field(metadata={"help": "Files, folders or a Hub dataset id; see README for the formats."})
    validation_data: list[str] = field(default_factory=list, metadata={"help": "Dev pairs; held out if not given."})
    dev_pairs: int = field(default=1000, metadata={"help": "Pairs a language to hold out, at most a tenth; 0: none."})
    target_language: str = field(default="en", metadata={"help": "Language code of the target side."})
    max_seq_length: int = field(default=32, metadata={"help": "Tokens a sentence is cut to."})
    language_mix: str = field(default="natural", metadata={"help": "natural, uniform or temperature."})
    mix_alpha: float = field(default=0.5, metadata={"help": "Exponent of the temperature mix, 0 to 1."})
    streaming: bool = field(default=False, metadata={"help": "Read the text as it is needed instead of caching it."})
    max_bad_lines: float = field(default=0.001, metadata={"help": "Share of malformed lines a file may have."})


Arguments = tuple[ModelArguments, DataArguments, DAPTrainingArguments]


def parse_arguments(argv: list[str]) -> Arguments:
    """Arguments from an optional YAML recipe (first in `argv`) and flags, which override it."""
    parser = HfArgumentParser((ModelArguments, DataArguments, DAPTrainingArguments))
    if argv and argv[0].endswith((".yaml", ".yml")):
        argv = recipe_flags(Path(argv[0])) + argv[1:]
    return parser.parse_args_into_dataclasses(args=argv)


def recipe_flags(path: Path) -> list[str]:
    """A recipe as flags: `{"rtl_layers": 2}` becomes `["--rtl_layers", "2"]`.

    Raises:
        ValueError: not a mapping, or a key that is no argument of this command.
    """
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: expected lines of `argument: value`, found {type(recipe).__name__}.")
    groups = (ModelArguments, DataArguments, DAPTrainingArguments)
    known = {item.name for group in groups for item in dataclasses.fields(group)}
    if unknown := sorted(set(recipe) - known):
        raise ValueError(f"{path}: unknown argument {', '.join(unknown)}; `python train_dap.py --help` lists them.")
    flags: list[str] = []
    for key, value in recipe.items():
        if value is not None:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            flags += [f"--{key}", *map(str, values)]
    return flags


def find_resumable(args: DAPTrainingArguments) -> str | None:
    """The checkpoint to go on from: the one asked for, or the last in `output_dir`.

    Raises:
        ValueError: the folder holds a finished run.
    """
    folder = Path(args.output_dir)
    if (folder / FINISHED).exists():
        raise ValueError(f"{folder} holds a finished run ({FINISHED}): give another --output_dir, or remove it.")
    if args.resume_from_checkpoint not in (None, "True", "true", True):
        return args.resume_from_checkpoint
    return get_last_checkpoint(folder) if folder.is_dir() else None


def load_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, **config: Any) -> DAPForPreTraining:
    """A DAP checkpoint to go on with, or a new model around a plain encoder."""
    source = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    options = {**source, "attn_implementation": args.attn_implementation}
    if AutoConfig.from_pretrained(args.model_name_or_path, **source).model_type == DAPConfig.model_type:
        return DAPForPreTraining.from_pretrained(args.model_name_or_path, dtype="float32", **options)
    named = {item.name for item in dataclasses.fields(ModelArguments)}
    shared = {key: getattr(args, key) for key in named if key.startswith(("tr_", "rtl_", "tlm_"))}
    shared |= {"objective": args.objective, "pooling": args.pooling, "projection": args.projection}
    if args.objective != "tr":
        shared["mask_token_id"] = require_mask_token(tokenizer)
    return DAPForPreTraining.from_encoder(args.model_name_or_path, **shared, **config, **options)


def build_datasets(
    data: DataArguments, training: DAPTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokenised training pairs and dev text, both by language."""
    options = {"max_bad_lines": data.max_bad_lines, "target_language": data.target_language}
    train = load_bitext(data.train_data, streaming=data.streaming, **options)
    if data.validation_data:
        dev = load_bitext(data.validation_data, **options)
    else:
        train, dev = split_validation(train, data.dev_pairs, training.data_seed or training.seed)
    return tokenize_bitext(train, tokenizer, data.max_seq_length, data.streaming), dev


def check_length(model: DAPForPreTraining, max_seq_length: int) -> None:
    """Raise `ValueError` when sequences would be longer than the encoder's table of positions."""
    longest = longest_input(model.dap)
    if longest is not None and max_seq_length > longest:
        raise ValueError(f"max_seq_length={max_seq_length} is above the encoder's {longest} positions; lower it.")


def build_trainer(model_args: ModelArguments, data: DataArguments, training: DAPTrainingArguments) -> DAPTrainer:
    """Everything wired: tokenizer, data, model, trainer."""
    source = {"trust_remote_code": model_args.trust_remote_code, "revision": model_args.revision}
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, **source)
    with training.main_process_first(desc="reading and tokenising"):
        train, dev = build_datasets(data, training, tokenizer)
    config: dict[str, Any] = {}
    source_to_target = model_args.rtl_direction == "source-to-target"
    if model_args.objective == "tr+rtl" and source_to_target:
        if model_args.restrict_target_vocabulary and not data.streaming:
            config["target_token_ids"] = target_vocabulary(train, tokenizer)
    elif model_args.objective == "tr+rtl":
        config["rtl_languages"] = sorted(train)
    set_seed(training.seed)
    model = load_model(model_args, tokenizer, **config)
    check_length(model, data.max_seq_length)
    if training.freeze_word_embeddings:
        freeze_word_embeddings(model)
    logger.info("%s", describe(model, train, dev, training))
    mixed, sampler = mix(train, data, training)
    patience = training.early_stopping_patience
    return DAPTrainer(
        model=model,
        args=training,
        train_dataset=mixed,
        train_sampler=sampler,
        data_collator=BitextCollator(tokenizer.pad_token_id, model.config.rtl_languages or sorted(train)),
        processing_class=tokenizer,
        dev_bitext={language: (dev[language]["source"][:], dev[language]["target"][:]) for language in dev},
        max_seq_length=data.max_seq_length,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
    )


def mix(train: dict[str, Any], data: DataArguments, training: DAPTrainingArguments) -> tuple[Any, Any]:
    """All languages as one dataset, and the sampler that draws the language mix from it (none for a stream)."""
    seed = training.data_seed or training.seed
    if not data.streaming:
        pairs, batch = sum(map(len, train.values())), training.per_device_train_batch_size * training.world_size
        if pairs < batch:
            raise ValueError(f"{pairs} training pairs do not fill one batch of {batch}: lower the batch size.")
        sampler = LanguageMixSampler([len(part) for part in train.values()], data.language_mix, data.mix_alpha, seed)
        return mix_languages(train, "natural", data.mix_alpha, seed), sampler
    sizes = None
    if data.language_mix == "temperature":
        found = find_bitext(data.train_data, data.target_language)
        sizes = {language: count_pairs(files, data.max_bad_lines) for language, files in found.items()}
    return mix_languages(train, data.language_mix, data.mix_alpha, seed, sizes), None


def describe(model: DAPForPreTraining, train: dict, dev: dict, training: DAPTrainingArguments) -> str:
    """One line about the run, for the log."""
    pairs = (
        "streamed" if any(not hasattr(part, "__len__") for part in train.values()) else sum(map(len, train.values()))
    )
    vocabulary = model.config.target_vocab_size or model.config.vocab_size
    total = training.per_device_train_batch_size * training.world_size
    return (
        f"{model.config.objective} on {len(train)} languages, {pairs} pairs, {sum(map(len, dev.values()))} dev pairs; "
        f"{total} pairs a step and as many candidates for each (accumulation adds none); "
        f"vocabulary of the prediction head: {vocabulary}"
    )


def main(argv: list[str] | None = None) -> None:
    """Train, save the model (the best one, with `load_best_model_at_end`), and write the results."""
    model_args, data, training = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO if training.process_index == 0 else logging.ERROR)
    checkpoint = find_resumable(training)
    trainer = build_trainer(model_args, data, training)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    if trainer.dev_bitext:
        trainer.save_metrics("eval", trainer.evaluate(), combined=False)
    trainer.save_metrics("train", result.metrics, combined=False)
    if training.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
