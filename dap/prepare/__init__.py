"""Raw parallel text into training shards: repaired, filtered, checked for leaks, de-duplicated and sampled."""

from dap.prepare.card import counts_table, data_card, dataset_info
from dap.prepare.evaluation_sets import read_evaluation
from dap.prepare.filters import identified, load_identifier
from dap.prepare.leaks import LeakIndex
from dap.prepare.options import PrepareOptions, base_code
from dap.prepare.opus import fetch
from dap.prepare.pipeline import prepare
from dap.prepare.run_folder import (
    CARD,
    INFO,
    REPORT,
    VOCABULARY,
    Plan,
    RawFile,
    begin,
    claimed,
    finished,
    full_device,
    read_object,
)
from dap.prepare.tokens import load_tokenizer, special_ids, vocabulary_size

__all__ = [
    "CARD",
    "INFO",
    "LeakIndex",
    "Plan",
    "PrepareOptions",
    "REPORT",
    "RawFile",
    "VOCABULARY",
    "base_code",
    "begin",
    "claimed",
    "counts_table",
    "data_card",
    "dataset_info",
    "fetch",
    "finished",
    "full_device",
    "identified",
    "load_identifier",
    "load_tokenizer",
    "prepare",
    "read_evaluation",
    "read_object",
    "special_ids",
    "vocabulary_size",
]
