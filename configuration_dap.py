"""Configuration of a DAP model: the encoder, how it pools, and the objectives it is trained with.

The file ships with every checkpoint, beside modeling_dap.py.
"""

import math
from dataclasses import field, fields
from typing import Any

from packaging.version import Version
from transformers import AutoConfig, BertConfig, PreTrainedConfig
from transformers import __version__ as transformers_version
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

CHOICES: dict[str, tuple] = {
    "pooling": ("cls", "mean", "lasttoken"),
    "projection": (None, "mlp"),
    "tr_similarity": ("cosine", "dot"),
    "rtl_direction": ("source-to-target", "target-to-source", "both"),
}
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
    """Return a dataclass field of `DAPConfig` that is marked as changeable.

    Its value may change when a checkpoint is trained further, because neither the shapes nor the
    meaning of the weights depend on it.

    Args:
        default: the field's default value.
    """
    return field(default=default, metadata={"changeable": True})


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
            or `"lasttoken"`, the last real token's state.
        projection: `"mlp"` puts dense + tanh between the sentence vector and the TR loss, in
            training only.
        tr_similarity: `"cosine"`, or `"dot"` for the inner product that eq. L_TR prints.
        tr_temperature: divisor of the similarities. Default: 0.05 for cosine and 1.0 for dot.
        tr_margin: margin that is subtracted from the similarity of a true pair.
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
        mask_token_id: the tokenizer's mask token. RTL, TLM and MLM need it.
        kwargs: fields of `PreTrainedConfig`. Fields of an objective of your own are also
            accepted, if they begin with its name: `mine_weight` for an objective called `mine`.

    Raises:
        ValueError: an unknown field, or a value that is not allowed or contradicts another. The
            message names the field, the value and what is allowed.
    """

    model_type = "dap"
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: PreTrainedConfig | dict | None = None
    objective: str = "tr+rtl"
    pooling: str = "cls"
    projection: str | None = None
    tr_similarity: str = "cosine"
    tr_temperature: float | None = changeable(None)
    tr_margin: float = changeable(0.0)
    tr_bidirectional: bool = changeable(False)
    tr_same_side_negatives: bool = changeable(False)
    tr_mask_duplicates: bool = changeable(True)
    tr_hard_negatives: float = changeable(0.0)
    tr_matryoshka_dims: list[int] | None = changeable(None)
    tr_weight: float = changeable(1.0)
    rtl_layers: int = 2
    rtl_direction: str = "source-to-target"
    rtl_ratio: float = changeable(1.0)
    rtl_weight: float = changeable(1.0)
    rtl_tied: bool = True
    rtl_reembed: bool = False
    rtl_languages: list[str] | None = None
    target_vocab_size: int | None = None
    tlm_probability: float = changeable(0.2)
    tlm_weight: float = changeable(0.1)
    mlm_probability: float = changeable(0.15)
    mlm_weight: float = changeable(1.0)
    bow_weight: float = changeable(1.0)
    distill_size: int | None = None
    distill_weight: float = changeable(1.0)
    mask_token_id: int | None = None

    def __init__(self, encoder_config: PreTrainedConfig | dict | None = None, **given: Any) -> None:
        unknown = _unknown_keys(given, given.get("objective", self.objective))
        if unknown:
            listed = ", ".join(f"{key}={given[key]!r}" for key in unknown)
            raise ValueError(
                f"DAPConfig has no field for {listed}. Its fields are: {', '.join(FIELDS)}."
            )
        for name, own in FIELDS.items():
            setattr(self, name, given.pop(name, own.default))
        self.encoder_config = _build_encoder_config(encoder_config)
        if self.tr_temperature is None:
            self.tr_temperature = 1.0 if self.tr_similarity == "dot" else 0.05
        for name in ("rtl_languages", "tr_matryoshka_dims"):
            if isinstance(getattr(self, name), tuple):
                setattr(self, name, list(getattr(self, name)))
        self.auto_map = given.pop("auto_map", None) or dict(AUTO_MAP)
        self.check()
        super().__init__(**given)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration from the content of a saved `config.json`.

        Keys that this version does not know are left out with a warning.

        Args:
            config_dict: the content of the file.
            **kwargs: as in `PreTrainedConfig.from_dict`.

        Raises:
            ValueError: the file is not of a DAP checkpoint, or has a value that is not allowed.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"this is a plain {model_type!r} checkpoint, not a DAP one: start from it with "
                "DAPForPreTraining.from_encoder, or load it with AutoModel."
            )
        unknown = _unknown_keys(config_dict, config_dict.get("objective", cls.objective))
        if unknown:
            logger.warning(
                f"config.json has unknown fields, which are left out: {', '.join(unknown)}"
            )
        known = {key: value for key, value in config_dict.items() if key not in unknown}
        return super().from_dict(known, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dictionary, for `config.json`.

        The name of the folder that the encoder was loaded from is left out.
        """
        fields = super().to_dict()
        encoder = fields.get("encoder_config")
        if isinstance(encoder, dict):
            encoder.pop("_name_or_path", None)
        return fields

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

    def check(self) -> None:
        """Raise `ValueError` for a value that is not allowed.

        Models call this again, because attributes can be changed after the configuration was built.
        """
        self._check_objective()
        self._check_by_kind()
        self._check_bounds()
        self._check_directions()

    def _check_objective(self) -> None:
        """Raise `ValueError` unless `objective` joins names by "+", none of them twice.

        That an objective of each name exists is checked elsewhere (`objectives_of`).
        """
        names = self.objective.split("+") if isinstance(self.objective, str) else [""]
        all_differ = len(set(names)) == len(names)
        are_names = all(name.isidentifier() for name in names)
        self._require(
            "objective", all_differ and are_names, "different names joined by '+', such as 'tr+rtl'"
        )

    def _check_by_kind(self) -> None:
        """Raise `ValueError` for a wrong value of a field with simple rules.

        These are the fields in `CHOICES`, shares (`_ratio`, `_probability`), weights and margins
        (`_weight`, `_margin`), and fields of type bool.
        """
        for name, allowed in CHOICES.items():
            listed = ", ".join(repr(value) for value in allowed)
            self._require(name, getattr(self, name) in allowed, f"one of {listed}")
        for name, own in FIELDS.items():
            value = getattr(self, name)
            if name.endswith(("_ratio", "_probability")):
                self._require(name, _is_number(value) and 0 < value <= 1, "a number in (0, 1]")
            elif name.endswith(("_weight", "_margin")):
                self._require(name, _is_number(value) and value >= 0, "a number in [0, inf)")
            elif own.type is bool:
                self._require(name, isinstance(value, bool), "True or False")

    def _check_bounds(self) -> None:
        """Raise `ValueError` for a number outside its bounds.

        Checked are the temperature, the share of hard negatives, the RTL layers, the target
        vocabulary's size and the mask token. Most bounds depend on the encoder or the objective.
        """
        value = self.tr_temperature
        self._require("tr_temperature", _is_number(value) and value > 0, "a number in (0, inf)")

        value = self.tr_hard_negatives
        most = 1 if "tr" in self.objectives else 0
        self._require(
            "tr_hard_negatives",
            _is_number(value) and 0 <= value <= most,
            "a number in [0, 1], which is 0 unless TR is in the objective",
        )

        self._check_matryoshka()
        self._require_integer_or_none("distill_size", 1, 2**20, "the size of a vector")
        encoder = self.encoder_config
        layers = encoder.num_hidden_layers if "rtl" in self.objectives else 10**9
        self._require_integer("rtl_layers", 1, layers, "the encoder's layers")
        self._require_integer_or_none(
            "target_vocab_size", 1, encoder.vocab_size, "the encoder's vocabulary"
        )
        self._require_integer_or_none(
            "mask_token_id", 0, encoder.vocab_size - 1, "the encoder's token ids"
        )

    def _check_matryoshka(self) -> None:
        """Check that the sizes of shortened vectors differ, and are below the whole size."""
        dims = self.tr_matryoshka_dims
        if dims is None:
            return
        most = self.encoder_config.hidden_size - 1
        are_sizes = isinstance(dims, list) and all(type(each) is int for each in dims)
        fits = are_sizes and len(set(dims)) == len(dims) and all(0 < each <= most for each in dims)
        self._require(
            "tr_matryoshka_dims",
            fits and bool(dims) and self.projection is None and "tr" in self.objectives,
            f"None, or different sizes from 1 to {most}, with TR in the objective and without a "
            "projection",
        )

    def _check_directions(self) -> None:
        """Raise `ValueError` if RTL reconstructs sources, but lacks what it needs for that.

        It needs `rtl_languages` and the whole vocabulary. `rtl_languages` must always be None or a
        list.
        """
        languages = self.rtl_languages
        self._require(
            "rtl_languages",
            languages is None or isinstance(languages, list),
            "None or a list of language codes",
        )
        if self.rtl_direction == "source-to-target" or "rtl" not in self.objectives:
            return
        self._require(
            "rtl_languages",
            bool(languages) and len(set(languages)) == len(languages),
            f"the different source languages, as rtl_direction is {self.rtl_direction!r}",
        )
        self._require(
            "target_vocab_size",
            self.target_vocab_size is None,
            f"None, as rtl_direction {self.rtl_direction!r} reconstructs sources, "
            "whose ids are not the target's",
        )

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        """Raise `ValueError` for a field unless a condition on its value holds."""
        if not holds:
            raise ValueError(
                f"DAPConfig: {name}={getattr(self, name)!r} is not allowed; give {allowed}."
            )

    def _require_integer(self, name: str, low: int, high: int, what: str) -> None:
        """Raise `ValueError` unless a field is an integer from `low` to `high`."""
        value = getattr(self, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        self._require(name, is_integer and low <= value <= high, f"{low} to {high}, {what}")

    def _require_integer_or_none(self, name: str, low: int, high: int, what: str) -> None:
        """Raise `ValueError` unless a field is None or an integer from `low` to `high`."""
        value = getattr(self, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        self._require(
            name,
            value is None or (is_integer and low <= value <= high),
            f"None or {low} to {high}, {what}",
        )


def _build_encoder_config(value: PreTrainedConfig | dict | None) -> PreTrainedConfig:
    """Return the encoder's configuration as an object."""
    if value is None:
        return BertConfig()
    if isinstance(value, PreTrainedConfig):
        return value
    if not isinstance(value, dict) or "model_type" not in value:
        raise ValueError(
            f"encoder_config={value!r}: give a configuration, or its dict with 'model_type'."
        )
    options = {key: item for key, item in value.items() if key != "model_type"}
    return AutoConfig.for_model(value["model_type"], **options)


def _unknown_keys(keys: dict[str, Any], objective: str) -> list[str]:
    """Return the keys of a configuration that are no fields of it, in alphabetical order.

    Two kinds of unknown fields are accepted: private ones, which begin with "_", and those of an
    objective that the user has written, which begin with its name and "_".
    """
    known = FIELDS.keys() | SAVED_KEYS | {field.name for field in fields(PreTrainedConfig)}
    our_prefixes = {name.split("_")[0] for name in FIELDS}
    free_prefixes = ["_"]
    for name in str(objective).split("+"):
        if name not in our_prefixes:
            free_prefixes.append(f"{name}_")
    unknown = [key for key in keys if key not in known and not key.startswith(tuple(free_prefixes))]
    return sorted(unknown)


def _is_number(value: object) -> bool:
    """Tell whether a value is a finite number. A bool is not one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


#: Fields that `DAPConfig` adds to `PreTrainedConfig`, by name.
FIELDS = {
    name: each
    for name, each in DAPConfig.__dataclass_fields__.items()
    if name in DAPConfig.__annotations__
}

# Not for a checkpoint's own code: a process may load checkpoints of several versions, and each
# runs its own.
if __name__ == "configuration_dap":
    AutoConfig.register("dap", DAPConfig, exist_ok=True)
