"""Configuration of a DAP model: the encoder, how it pools, and the objectives it is trained with.

The file ships with every checkpoint, beside modeling_dap.py.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from packaging.version import Version
from transformers import AutoConfig, BertConfig, PreTrainedConfig
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging

#: Oldest version of Transformers with which this code works, as in setup.py.
OLDEST_TRANSFORMERS = "5.17"
if Version(transformers_version) < Version(OLDEST_TRANSFORMERS):
    # Not an ImportError, after which the other files would try to import this one as a module.
    raise RuntimeError(
        f"transformers {transformers_version} is too old for DAP: "
        f"pip install 'transformers>={OLDEST_TRANSFORMERS}'"
    )

logger = logging.get_logger(__name__)

AUTO_MAP = {
    "AutoConfig": "configuration_dap.DAPConfig",
    "AutoModel": "modeling_dap.DAPModel",
    "AutoModelForPreTraining": "modeling_dap.DAPForPreTraining",
    "AutoModelForSequenceClassification": "modeling_dap.DAPForSequenceClassification",
}

Number = float | int

#: Keys that a saved config.json may have besides our fields and those of PreTrainedConfig.
SAVED_KEYS = {
    "model_type",
    "auto_map",
    "name_or_path",
    "attn_implementation",
    "experts_implementation",
    "torch_dtype",
    "quantization_config",
    "num_labels",
    "revision",
    "output_attentions",
    # written by the Trainer
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "tie_word_embeddings",
}


def changeable(default: Any) -> Any:
    """Return a field that may change in further training: weights keep shape and meaning."""
    return field(default=default, metadata={"changeable": True})


@strict
class DAPConfig(PreTrainedConfig):
    """Configuration of `DAPModel`, `DAPForPreTraining` and `DAPForSequenceClassification`.

    The *source* is the paper's x, the non-English sentence. The *target* is y, its English
    translation. The defaults are the paper's, and those of the released code where the paper is
    silent.

    Args:
        encoder_config: configuration of any encoder, or its dict with `model_type`. None means
            BERT-base.
        objective: names of `objectives_dap.OBJECTIVES` joined by `"+"` in any order: `"tr+rtl"`
            (= DAP, section 3.3), `"tr"`, `"tr+tlm"`, `"tr+bow"`, ... `"mlm"` by itself makes an
            encoder from which the others can start. Heads that no objective uses are not built.
        pooling: `"cls"`, the first token's last state (section 3.2), `"mean"` over the real tokens,
            or `"lasttoken"`, the last real token's state. None takes the pooling of the folder to
            start from. If the folder does not say, or there is none, a causal decoder gets
            `"lasttoken"`, because its first token sees nothing else. Any other encoder then gets
            `"mean"` if there is a folder, and `"cls"` if there is none.
        modules: what follows the pooling, as in sentence-transformers: a dict with `"type"`
            `"Dense"` or `"Normalize"` and its settings for each module. They are trained.
        projection: `"mlp"` puts dense + tanh between the sentence vector and the TR loss, in
            training only.
        tr_similarity: `"cosine"`, or `"dot"` for the inner product that equation L_TR prints.
        tr_temperature: divisor of the similarities. Default: 0.05 for cosine and 1.0 for dot.
        tr_bidirectional: also rank the sources for each target. The loss is the mean of both
            directions.
        tr_same_side_negatives: a source's negatives include all other sources. With
            `tr_bidirectional`, a target's negatives include all other targets. The encoder learns
            to put a sentence nearer to its translation than to other sentences in its language.
        tr_mask_duplicates: pairs with the same target or the same source are not negatives of each
            other.
        tr_hard_negatives: share of the pairs that bring a hard negative. This is a copy of their
            target with one word changed. It is a negative of every source.
        tr_matryoshka_dims: a list of sizes, such as 64 and 128, to which sentence vectors can be
            shortened after training. For each size n, TR also compares the first n numbers of the
            vectors. The loss is the mean over these sizes and the whole vectors.
        tr_weight: factor of the TR loss.
        rtl_layers: K, number of transformer blocks in the RTL head (section 4.2).
        rtl_direction: side that is reconstructed from the other (Table 5). `"source-to-target"`
            reconstructs targets, `"target-to-source"` sources. `"both"` reconstructs targets in
            every other pair of the batch and sources in the others, and averages the two means.
        rtl_ratio: rho, share of the target tokens to reconstruct. The head sees the encoder's
            states of the others (section 5.2).
        rtl_weight: factor of the RTL loss.
        rtl_tied: RTL predicts with the encoder's word embeddings. False gives it a matrix of its
            own that starts as their copy (the released code). Then the loss has no gradient for
            the word embeddings, and freezing these does not freeze the matrix.
        rtl_reembed: the RTL head embeds states and [MASK] embeddings again, with its own positions,
            token type and norm (the released code; eq. g^0 has none of these).
        rtl_languages: language codes of the sources, in the order of `language_ids`. If sources are
            reconstructed, the head gets an embedding of each side's language (section 5.1).
        target_vocab_size: number of token ids that RTL and BOW predict. None means the whole
            vocabulary. The ids are stored with the weights
            (`DAPForPreTraining.set_target_vocabulary`).
        tlm_probability: share of the tokens that TLM masks.
        tlm_weight: factor of the TLM loss.
        mlm_probability: share of the tokens that MLM masks.
        mlm_weight: factor of the MLM loss.
        bow_weight: factor of the BOW loss, which predicts the target's tokens from a sentence
            vector.
        distill_size: size of the vectors of the distillation's teacher. A linear head maps sentence
            vectors to it. None means the encoder's own size, without a head.
        distill_weight: factor of the distillation loss.
        mask_token_id: the tokenizer's mask token. TLM and MLM need it. Without it RTL learns an
            embedding of its own.
        special_tokens_before: number of special tokens that the tokenizer puts before a sentence,
            such as CLS. No objective predicts them.
        special_tokens_after: the same number behind a sentence. BOW, TLM and MLM do not predict
            these tokens.
        given: these fields, and those of `PreTrainedConfig`. Fields of an objective of your own are
            also accepted, if they begin with its name: `mine_weight` for an objective called
            `mine`.
    """

    model_type = "dap"
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: PreTrainedConfig | dict | None = None
    objective: str = "tr+rtl"
    pooling: Literal["cls", "mean", "lasttoken"] | None = None
    modules: list[dict] | None = None
    projection: Literal["mlp"] | None = None
    tr_similarity: Literal["cosine", "dot"] = "cosine"
    tr_temperature: Number | None = changeable(None)
    tr_bidirectional: bool = changeable(False)
    tr_same_side_negatives: bool = changeable(False)
    tr_mask_duplicates: bool = changeable(True)
    tr_hard_negatives: Number = changeable(0.0)
    tr_matryoshka_dims: list[int] | None = changeable(None)
    tr_weight: Number = changeable(1.0)
    rtl_layers: int = 2
    rtl_direction: Literal["source-to-target", "target-to-source", "both"] = "source-to-target"
    rtl_ratio: Number = changeable(1.0)
    rtl_weight: Number = changeable(1.0)
    rtl_tied: bool = True
    rtl_reembed: bool = False
    rtl_languages: list[str] | None = None
    target_vocab_size: int | None = None
    tlm_probability: Number = changeable(0.2)
    tlm_weight: Number = changeable(0.1)
    mlm_probability: Number = changeable(0.15)
    mlm_weight: Number = changeable(1.0)
    bow_weight: Number = changeable(1.0)
    distill_size: int | None = None
    distill_weight: Number = changeable(1.0)
    mask_token_id: int | None = None
    special_tokens_before: int = 1
    special_tokens_after: int = 1

    def __init__(self, encoder_config: PreTrainedConfig | dict | None = None, **given: Any) -> None:
        objective = given.get("objective", self.objective)
        unknown = unknown_keys(given, objective)
        if unknown:
            names = ", ".join(unknown)
            raise ValueError(f"no field {names} in DAPConfig or objective {objective!r}")
        values = {name: each.default for name, each in FIELDS.items()} | given
        if encoder_config is None:
            encoder_config = BertConfig()
        if isinstance(encoder_config, dict):
            encoder_config = AutoConfig.for_model(**encoder_config)
        values["encoder_config"] = encoder_config
        self.encoder_config = encoder_config  # so that `attn_implementation` reaches it
        if values["pooling"] is None:
            values["pooling"] = "lasttoken" if is_causal(encoder_config) else "cls"
        if values["tr_temperature"] is None:
            values["tr_temperature"] = 1.0 if values["tr_similarity"] == "dot" else 0.05
        values["auto_map"] = given.get("auto_map") or dict(AUTO_MAP)
        super().__init__(**values)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration from a saved `config.json`. Warn of keys that are unknown here.

        Raises:
            ValueError: if the file is of another model, or holds a value that is not allowed.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"this is a plain {model_type!r} checkpoint, not a DAP one: start from it with "
                "DAPForPreTraining.from_encoder, or load it with AutoModel."
            )
        unknown = unknown_keys(config_dict, config_dict.get("objective", cls.objective))
        if unknown:
            logger.warning(
                f"config.json has unknown fields, which are left out: {', '.join(unknown)}"
            )
        known = {key: value for key, value in config_dict.items() if key not in unknown}
        return super().from_dict(known, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, without the name of the folder that the encoder was loaded from."""
        content = super().to_dict()
        encoder = content.get("encoder_config")
        if isinstance(encoder, dict):
            encoder.pop("_name_or_path", None)
        return content

    @property
    def vector_size(self) -> int:
        """Return the number of dimensions of a sentence vector."""
        sizes = [
            module["out_features"] for module in self.modules or () if "out_features" in module
        ]
        return sizes[-1] if sizes else self.hidden_size

    hidden_size = property(lambda self: self.encoder_config.hidden_size)
    num_hidden_layers = property(lambda self: self.encoder_config.num_hidden_layers)
    num_attention_heads = property(lambda self: self.encoder_config.num_attention_heads)

    @property
    def vocab_size(self) -> int:
        return self.encoder_config.vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.encoder_config.vocab_size = size

    @property
    def objectives(self) -> frozenset[str]:
        """Return the names of the model's objectives, such as "tr" and "rtl" for "tr+rtl"."""
        return frozenset(self.objective.split("+"))

    @property
    def reconstructs_sources(self) -> bool:
        """Tell whether RTL predicts tokens of the sources, in all pairs or in some."""
        return "rtl" in self.objectives and self.rtl_direction != "source-to-target"

    def validate_rules(self) -> None:
        """Raise `ValueError` for a value that breaks its rule. Transformers calls this."""
        weights = {f"{name}_weight": FACTOR for name in self.objectives}  # also of plug-ins
        for name, (holds, allowed) in (RULES | weights).items():
            value = getattr(self, name, 1.0)  # a plug-in's weight may be left to its default
            if not holds(value, self):
                raise ValueError(f"{name}={value!r}: give {allowed}")


def is_causal(encoder_config: PreTrainedConfig) -> bool:
    """Tell whether a token of this model sees no later tokens, as in a decoder."""
    name = encoder_config.model_type
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return False
    if getattr(encoder_config, "use_bidirectional_attention", None) in (True, "all"):
        return False
    return getattr(encoder_config, "is_causal", True)


def own_pooling(config: PreTrainedConfig) -> str | None:
    """Return `config.pooling` of a DAP model, else None. Other models may mean another thing."""
    return config.pooling if config.model_type == DAPConfig.model_type else None


def default_pooling(encoder_config: PreTrainedConfig) -> str:
    """Return the pooling of a folder that names none: what sentence-transformers would take."""
    return "lasttoken" if is_causal(encoder_config) else "mean"


def is_plugin(objective: str) -> bool:
    """Tell whether an objective is one of a plug-in. All others have a weight in `DAPConfig`."""
    return f"{objective}_weight" not in FIELDS


def unknown_keys(keys: Iterable[str], objective: str = "") -> list[str]:
    """Return the keys of a configuration that nobody knows, sorted.

    Known are the fields, `SAVED_KEYS`, and names that begin with "_". If `objective` names one of a
    plug-in, all names that begin with it are known as well, because it checks them itself.
    """
    known = {each.name for each in fields(DAPConfig)} | SAVED_KEYS
    plugins = [name for name in str(objective).split("+") if is_plugin(name)]
    free_prefixes = ("_", *(f"{name}_" for name in plugins))
    return sorted(key for key in keys if key not in known and not key.startswith(free_prefixes))


#: Fields that `DAPConfig` adds to `PreTrainedConfig`, by name.
FIELDS = {each.name: each for each in fields(DAPConfig) if each not in fields(PreTrainedConfig)}


# ------------------------------------------------------------------------------------------ rules


def are_sizes(dims: list[int] | None, config: DAPConfig) -> bool:
    """Tell whether TR can shorten vectors to these sizes."""
    if dims is None:
        return True
    has_plain_vectors = "tr" in config.objectives and config.projection is None
    return has_plain_vectors and all(0 < size < config.vector_size for size in dims)


def _impossible(encoder_config: PreTrainedConfig) -> set[str]:
    """Return the objectives that an encoder's architecture cannot have."""
    if hasattr(encoder_config, "num_decoder_layers"):
        return {"rtl", "tlm", "mlm"}  # only the first layer has positions, and there is no mask
    return {"tlm", "mlm"} if is_causal(encoder_config) else set()


SHARE = (lambda value, _: 0 < value <= 1, "a number above 0, and at most 1")
FACTOR = (
    lambda value, _: isinstance(value, Number) and 0 <= value < math.inf,
    "a number of 0 or more",
)
#: What types cannot say: name -> condition on the value and the configuration, and what is allowed.
RULES: dict[str, tuple[Callable[[Any, DAPConfig], bool], str]] = {
    "pooling": (
        lambda value, config: value != "cls" or not is_causal(config.encoder_config),
        "'lasttoken' or 'mean', as the first token of a decoder sees no other token",
    ),
    "objective": (
        lambda _, config: not config.objectives & _impossible(config.encoder_config),
        "other objectives: a decoder has no 'tlm' and no 'mlm', and T5 has no 'rtl' either",
    ),
    "tr_temperature": (lambda value, _: 0 < value < math.inf, "a number above 0"),
    "tr_hard_negatives": (
        lambda value, config: value == 0 or (0 < value <= 1 and "tr" in config.objectives),
        "a number from 0 to 1, and 0 without TR",
    ),
    "tr_matryoshka_dims": (are_sizes, "sizes below the whole one, for TR without a projection"),
    "rtl_layers": (
        lambda value, config: (
            "rtl" not in config.objectives or 1 <= value <= config.num_hidden_layers
        ),
        "1 to the number of the encoder's layers",
    ),
    "rtl_ratio": SHARE,
    "rtl_languages": (
        lambda value, config: value or not config.reconstructs_sources,
        "the source languages, as RTL reconstructs sources",
    ),
    "target_vocab_size": (
        lambda value, config: value is None or not config.reconstructs_sources,
        "None, as RTL reconstructs sources, whose ids are not the target's",
    ),
    "tlm_probability": SHARE,
    "mlm_probability": SHARE,
}

# Not for a checkpoint's own code: a process may load checkpoints of several versions, and each
# runs its own.
if __name__ == "configuration_dap":
    AutoConfig.register("dap", DAPConfig, exist_ok=True)
