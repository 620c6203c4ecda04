"""Cross-lingual sentence embeddings from any encoder (DAP, ACL 2023).

The names of `PUBLIC` are imported at their first use, so that `import dap_transformers` is fast.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"
#: Public names, and the modules that define them.
PUBLIC = {
    "BitextCollator": "dap_transformers.training.batches",
    "DAPConfig": "configuration_dap",
    "DAPForPreTraining": "modeling_dap",
    "DAPForSequenceClassification": "modeling_dap",
    "DAPLoss": "dap_transformers.dap_loss",
    "DAPModel": "modeling_dap",
    "DAPTrainer": "dap_transformers.training.trainer",
    "DAPTrainingArguments": "dap_transformers.training.arguments",
    "Evaluator": "dap_transformers.evaluation.evaluator",
    "HardNegatives": "dap_transformers.evaluation.hard_negatives",
    "KeepHeads": "dap_transformers.dap_loss",
    "Retrieval": "dap_transformers.evaluation.retrieval",
    "STS": "dap_transformers.evaluation.sts",
    "Search": "dap_transformers.evaluation.passage_search",
    "SentenceEncoder": "dap_transformers.encoding.encoder",
    "align_words": "dap_transformers.alignment.word_alignment",
    "evaluate": "dap_transformers.evaluation.evaluator",
    "heat_map": "dap_transformers.alignment.heat_map",
    "load_bitext": "dap_transformers.text.corpus",
    "mine": "dap_transformers.mining.mine_pairs",
    "tokenize_bitext": "dap_transformers.training.batches",
}
__all__ = ["__version__", *PUBLIC]
if find_spec("sentence_transformers") is None:  # it comes with an extra
    __all__ = [name for name in __all__ if PUBLIC.get(name) != "dap_transformers.dap_loss"]


def __dir__() -> list[str]:
    """Return the public names, so that editors complete them."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)
