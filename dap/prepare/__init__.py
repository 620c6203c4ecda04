"""Raw parallel text into training shards: repaired, filtered, checked for leaks, de-duplicated and sampled."""

from dap.prepare.card import counts_table, describe
from dap.prepare.evaluation_sets import read_evaluation
from dap.prepare.leaks import LeakIndex
from dap.prepare.options import PrepareOptions, base_code
from dap.prepare.opus import fetch
from dap.prepare.pipeline import check_names, prepare, write_vocabulary
from dap.prepare.run_folder import Plan, RawFile, begin, claimed, finished, full_device, read_object

__all__ = [
    "LeakIndex",
    "Plan",
    "PrepareOptions",
    "RawFile",
    "base_code",
    "begin",
    "check_names",
    "claimed",
    "counts_table",
    "describe",
    "fetch",
    "finished",
    "full_device",
    "prepare",
    "read_evaluation",
    "read_object",
    "write_vocabulary",
]
