"""Turn raw parallel text into training shards: repair, filter, check for leaks, draw samples."""

try:
    import polars  # noqa: F401
except ImportError as error:
    raise ImportError("preparing data needs polars: pip install polars") from error

from dap.prepare.card import counts_table, describe
from dap.prepare.evaluation_sets import read_evaluation
from dap.prepare.options import RELEASE, PrepareOptions
from dap.prepare.opus import NOT_IN_RELEASE, corpus_of_archive, download_corpora
from dap.prepare.pipeline import check_names, prepare
from dap.prepare.run_folder import Plan, RawFile, begin, finished_report, remove

__all__ = [
    "NOT_IN_RELEASE",
    "Plan",
    "PrepareOptions",
    "RELEASE",
    "RawFile",
    "begin",
    "check_names",
    "corpus_of_archive",
    "counts_table",
    "describe",
    "download_corpora",
    "finished_report",
    "prepare",
    "read_evaluation",
    "remove",
]
