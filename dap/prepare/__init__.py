"""Raw parallel text into training shards: repaired, filtered, checked for leaks, de-duplicated and sampled."""

from dap.prepare.card import counts_table, data_card, dataset_info
from dap.prepare.evaluation_sets import read_evaluation
from dap.prepare.filters import CleaningOptions, base_code, identified, load_identifier
from dap.prepare.leaks import LeakIndex
from dap.prepare.opus import CORPORA, fetch, find_files, licences
from dap.prepare.plan import Plan, Source
from dap.prepare.run_folder import (
    CARD,
    INFO,
    REPORT,
    VOCABULARY,
    WORK,
    begin,
    check_free,
    claimed,
    finished,
    read_object,
)
from dap.prepare.shards import full_device, new_folder
from dap.prepare.steps import prepare
from dap.prepare.tokens import load_tokenizer, special_ids, vocabulary_size

__all__ = [
    "CARD",
    "CORPORA",
    "CleaningOptions",
    "INFO",
    "LeakIndex",
    "Plan",
    "REPORT",
    "Source",
    "VOCABULARY",
    "WORK",
    "base_code",
    "begin",
    "check_free",
    "claimed",
    "counts_table",
    "data_card",
    "dataset_info",
    "fetch",
    "find_files",
    "finished",
    "full_device",
    "identified",
    "licences",
    "load_identifier",
    "load_tokenizer",
    "new_folder",
    "prepare",
    "read_evaluation",
    "read_object",
    "special_ids",
    "vocabulary_size",
]
