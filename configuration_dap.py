"""What shapes a DAP model: the encoder, how a sentence is pooled, and the objectives it is trained with."""

import math
from dataclasses import fields
from typing import Any

from transformers import AutoConfig, BertConfig, PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

AUTO_MAP = {
    "AutoConfig": "configuration_dap.DAPConfig",
    "AutoModel": "modeling_dap.DAPModel",
    "AutoModelForPreTraining": "modeling_dap.DAPForPreTraining",
    "AutoModelForSequenceClassification": "modeling_dap.DAPForSequenceClassification",
}

CHOICES: dict[str, tuple] = {
    "pooling": ("cls", "mean"),
    "projection": (None, "mlp"),
    "tr_similarity": ("cosine", "dot"),
    "rtl_direction": ("source-to-target", "target-to-source", "both"),
}
#: Keys that a saved config.json may carry beside the fields of PreTrainedConfig; the last ones are the Trainer's.
SAVED_KEYS = {
    *(
        "model_type",
        "auto_map",
        "name_or_path",
        "attn_implementation",
        "experts_implementation",
        "torch_dtype",
    ),
    *("quantization_config", "num_labels", "revision", "output_attentions"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "tie_word_embeddings"),
}


class DAPConfig(PreTrainedConfig):
    """Configuration of `DAPModel`, `DAPForPreTraining` and `DAPForSequenceClassification`.

    Source and target are the paper's x (non-English) and y (its English translation). The defaults are the paper's,
    and the released code's where the paper is silent.

    Args:
        encoder_config: configuration, or its dict with `model_type`, of any encoder; BERT-base when absent.
        objective: names of `objectives_dap.OBJECTIVES` joined by `"+"`, in any order: `"tr"`, `"tr+tlm"`, `"tr+rtl"`
            (= DAP, section 3.3), `"tr+bow"`, ...; `"mlm"` by itself makes an encoder that the others can start from.
            What none of them uses is not built.
        pooling: `"cls"`, the first token's last state (section 3.2), or `"mean"` over the real tokens.
        projection: `"mlp"` puts dense + tanh between the sentence vector and the TR loss, in training only.
        tr_similarity: `"cosine"`, or `"dot"` for the inner product that eq. L_TR prints.
        tr_temperature: divisor of the similarities; 0.05 for cosine and 1.0 for dot unless given.
        tr_margin: additive margin taken from the similarity of a true pair.
        tr_bidirectional: also rank the sources for each target, and take the mean of both losses.
        tr_mask_duplicates: a pair whose target text equals another's is not that one's negative.
        tr_hard_negatives: share of the pairs of a batch that bring a copy of their target with one word changed, a
            negative of every source.
        tr_weight: factor of the TR loss.
        rtl_layers: K, the number of transformer blocks in the RTL head (section 4.2).
        rtl_direction: which side is reconstructed from the other (Table 5); `"both"` takes even pairs source-to-target
            and odd pairs target-to-source, and the average of the two means.
        rtl_ratio: rho, the share of target tokens to reconstruct; of the others the head sees the encoder's states
            (section 5.2).
        rtl_weight: factor of the RTL loss.
        rtl_tied: RTL predicts with the encoder's word embeddings. False gives it a matrix of its own, which starts as
            their copy: freezing them does not freeze it, and its gradient does not reach them (the released code).
        rtl_reembed: the RTL head puts states and [MASK] embeddings together through embeddings of its own, with
            positions, token type and norm a second time (the released code; eq. g^0 has none of these).
        rtl_languages: source language codes, in the order of `language_ids`; wherever a source is reconstructed, the
            head gets an embedding of each side's language (section 5.1).
        target_vocab_size: number of token ids of the target side that RTL and BOW predict; all of the vocabulary when
            absent. The ids themselves are stored with the weights (`DAPForPreTraining.set_target_vocabulary`).
        rtl_sampled_negatives: number of ids, drawn anew in every step, that stand for all others in the softmax of the
            RTL loss while training; the whole vocabulary when absent.
        tlm_probability: share of the tokens that TLM masks.
        tlm_weight: factor of the TLM loss.
        mlm_probability: share of the tokens that `"mlm"` masks.
        mlm_weight: factor of the MLM loss.
        xum_probability: share of the tokens that cross-unmasking (`"xum"`) masks.
        xum_weight: factor of its loss.
        bow_weight: factor of the loss of bags of words (`"bow"`), the words of the target from a sentence vector.
        mask_token_id: the tokenizer's mask token; every objective but `"tr"` and `"bow"` needs it.
        kwargs: fields of `PreTrainedConfig`, and of a new objective, whose name they begin with (`mine_weight`).

    Raises:
        ValueError: an unknown field, or a value that is not allowed or contradicts another; it names the field, the
            value and what is allowed.
    """

    model_type = "dap"
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: PreTrainedConfig | dict | None = None
    objective: str = "tr+rtl"
    pooling: str = "cls"
    projection: str | None = None
    tr_similarity: str = "cosine"
    tr_temperature: float | None = None
    tr_margin: float = 0.0
    tr_bidirectional: bool = False
    tr_mask_duplicates: bool = True
    tr_hard_negatives: float = 0.0
    tr_weight: float = 1.0
    rtl_layers: int = 2
    rtl_direction: str = "source-to-target"
    rtl_ratio: float = 1.0
    rtl_weight: float = 1.0
    rtl_tied: bool = True
    rtl_reembed: bool = False
    rtl_languages: list[str] | None = None
    target_vocab_size: int | None = None
    rtl_sampled_negatives: int | None = None
    tlm_probability: float = 0.2
    tlm_weight: float = 0.1
    mlm_probability: float = 0.15
    mlm_weight: float = 1.0
    xum_probability: float = 0.4
    xum_weight: float = 1.0
    bow_weight: float = 1.0
    mask_token_id: int | None = None

    def __init__(self, encoder_config: PreTrainedConfig | dict | None = None, **given: Any) -> None:
        if unknown := _unknown(given, given.get("objective", self.objective)):
            listed = ", ".join(f"{key}={given[key]!r}" for key in unknown)
            raise ValueError(
                f"DAPConfig has no field for {listed}. Its fields are: {', '.join(FIELDS)}."
            )
        for name, own in FIELDS.items():
            setattr(self, name, given.pop(name, own.default))
        self.encoder_config = _build_encoder_config(encoder_config)
        if self.tr_temperature is None:
            self.tr_temperature = 1.0 if self.tr_similarity == "dot" else 0.05
        if isinstance(self.rtl_languages, tuple):
            self.rtl_languages = list(self.rtl_languages)
        self.auto_map = given.pop("auto_map", None) or dict(AUTO_MAP)
        self.check()
        super().__init__(**given)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers; keys of a saved file that this version does not know are left out with a warning."""
        if config_dict.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(
                f"this is a plain {config_dict['model_type']!r} checkpoint, not a DAP one: start from it with "
                "DAPForPreTraining.from_encoder, or load it with AutoModel."
            )
        if dropped := _unknown(config_dict, config_dict.get("objective", cls.objective)):
            logger.warning(
                f"config.json has fields that are not known here: {', '.join(dropped)}; they are left out."
            )
        return super().from_dict(
            {key: config_dict[key] for key in config_dict if key not in dropped}, **kwargs
        )

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
        """The names that `objective` joins."""
        return frozenset(self.objective.split("+"))

    def check(self) -> None:
        """Raise `ValueError` for a value that is not allowed; models call it again, as attributes can be set later."""
        names = self.objective.split("+") if isinstance(self.objective, str) else [""]
        different = len(set(names)) == len(names) and all(map(str.isidentifier, names))
        self._require("objective", different, "different names joined by '+', such as 'tr+rtl'")
        for name, allowed in CHOICES.items():
            self._require(
                name, getattr(self, name) in allowed, f"one of {', '.join(map(repr, allowed))}"
            )
        for name, field in FIELDS.items():
            value = getattr(self, name)
            if name.endswith(("_ratio", "_probability")):
                self._require(name, _is_number(value) and 0 < value <= 1, "a number in (0, 1]")
            elif name.endswith(("_weight", "_margin")):
                self._require(name, _is_number(value) and value >= 0, "a number in [0, inf)")
            elif field.type is bool:
                self._require(name, isinstance(value, bool), "True or False")
        is_share = _is_number(self.tr_hard_negatives) and 0 <= self.tr_hard_negatives <= (
            "tr" in self.objectives
        )
        self._require(
            "tr_hard_negatives",
            is_share,
            "a number in [0, 1], which is 0 unless TR is in the objective",
        )
        divides = _is_number(self.tr_temperature) and self.tr_temperature > 0
        self._require("tr_temperature", divides, "a number in (0, inf)")
        layers, vocabulary = self.encoder_config.num_hidden_layers, self.encoder_config.vocab_size
        self._require_integer(
            "rtl_layers", 1, layers if "rtl" in self.objectives else 10**9, "the encoder's layers"
        )
        self._require_integer(
            "target_vocab_size", 1, vocabulary, "the encoder's vocabulary", optional=True
        )
        predicted = self.target_vocab_size or vocabulary
        self._require_integer(
            "rtl_sampled_negatives", 2, predicted, "the predicted vocabulary", optional=True
        )
        self._require_integer(
            "mask_token_id", 0, vocabulary - 1, "the encoder's token ids", optional=True
        )
        is_list = isinstance(self.rtl_languages, list | None)
        self._require("rtl_languages", is_list, "None or a list of language codes")
        self._check_directions()

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(
                f"DAPConfig: {name}={getattr(self, name)!r} is not allowed; give {allowed}."
            )

    def _require_integer(
        self, name: str, low: int, high: int, what: str, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        self._require(
            name,
            fits or (optional and value is None),
            f"{'None or ' * optional}{low} to {high}, {what}",
        )

    def _check_directions(self) -> None:
        if self.rtl_direction == "source-to-target" or "rtl" not in self.objectives:
            return
        known = bool(self.rtl_languages) and len(set(self.rtl_languages)) == len(self.rtl_languages)
        allowed = f"the different source languages, as rtl_direction is {self.rtl_direction!r}"
        self._require("rtl_languages", known, allowed)
        allowed = f"None, as rtl_direction {self.rtl_direction!r} reconstructs sources, whose ids are not the target's"
        self._require("target_vocab_size", self.target_vocab_size is None, allowed)


def _build_encoder_config(value: PreTrainedConfig | dict | None) -> PreTrainedConfig:
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


def _unknown(keys: dict[str, Any], objective: str) -> list[str]:
    """Those that are no fields of ours, of `PreTrainedConfig` or a new objective, nor what a saved config.json has."""
    known = FIELDS.keys() | SAVED_KEYS | {field.name for field in fields(PreTrainedConfig)}
    ours = {name.split("_")[0] for name in FIELDS}
    free = ("_", *(f"{name}_" for name in str(objective).split("+") if name not in ours))
    return sorted(key for key in keys if key not in known and not key.startswith(free))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


#: The fields of `DAPConfig` by name, without those of `PreTrainedConfig`.
FIELDS = {
    name: each
    for name, each in DAPConfig.__dataclass_fields__.items()
    if name in DAPConfig.__annotations__
}

# Not as a checkpoint's own code: a process may load checkpoints of several versions, and each runs its own.
if __name__ == "configuration_dap":
    AutoConfig.register("dap", DAPConfig, exist_ok=True)
