"""Reports of evaluations: write them, merge several seeds, and show them beside the paper's
numbers."""

from dap.reports.merge import merge_seeds, merged_table, numbers_of, paper_beside
from dap.reports.paper import (
    BUCC_HEADINGS,
    BUCC_PAIRS,
    BUCC_PROTOCOLS,
    DIRECTIONS,
    PAPER_BUCC,
    PAPER_COST,
    PAPER_DIRECTIONS,
    PAPER_MODELS,
    PAPER_TATOEBA,
    PAPER_TATOEBA_LANGUAGES,
    PAPER_XNLI,
    POOL_KEYS,
    TATOEBA_GROUPS,
    tatoeba_tables,
)
from dap.reports.plots import (
    CURVES,
    drawable_languages,
    plot_accuracies,
    plot_curves,
    require_drawable,
)
from dap.reports.records import (
    OF_RUN,
    RECORD,
    machine,
    mean_of,
    read_report,
    report,
    training_record,
    versions,
)
from dap.reports.rendering import markdown_table, text_table

__all__ = [
    "BUCC_HEADINGS",
    "BUCC_PAIRS",
    "BUCC_PROTOCOLS",
    "CURVES",
    "DIRECTIONS",
    "OF_RUN",
    "PAPER_BUCC",
    "PAPER_COST",
    "PAPER_DIRECTIONS",
    "PAPER_MODELS",
    "PAPER_TATOEBA",
    "PAPER_TATOEBA_LANGUAGES",
    "PAPER_XNLI",
    "POOL_KEYS",
    "RECORD",
    "TATOEBA_GROUPS",
    "drawable_languages",
    "machine",
    "markdown_table",
    "mean_of",
    "merge_seeds",
    "merged_table",
    "numbers_of",
    "paper_beside",
    "plot_accuracies",
    "plot_curves",
    "read_report",
    "report",
    "require_drawable",
    "tatoeba_tables",
    "text_table",
    "training_record",
    "versions",
]
