"""Turn raw parallel text into training shards: repair, filter, check for leaks, draw samples."""

try:
    import polars  # noqa: F401
except ImportError as error:
    raise ImportError(
        "preparing data needs polars: pip install 'dap-transformers[data]'"
    ) from error

from dap.prepare.card import counts_table, describe
from dap.prepare.evaluation_sets import read_evaluation
from dap.prepare.options import RELEASE, PrepareOptions
from dap.prepare.opus import NOT_IN_RELEASE, download_corpora
from dap.prepare.pipeline import check_names, prepare
from dap.prepare.run_folder import Plan, RawFile, begin, finished_report, remove
