"""Mine translations: margin scores, BUCC, and the two texts of a mining run."""

from dap.mining.bucc import (
    PROTOCOLS,
    MiningScore,
    Split,
    best_threshold,
    count_gold,
    default_protocol,
    find_splits,
    read_gold,
    read_text,
    score_at,
)
from dap.mining.distinct import DistinctSentences
from dap.mining.in_memory import (
    Choice,
    Margin,
    Vectors,
    mine,
    mine_vectors,
    report_of,
    require_some,
    table_text,
)
from dap.mining.margin import (
    MARGINS,
    RETRIEVALS,
    MinedPairs,
    candidate_pairs,
    neighbourhoods,
    score_pairs,
    select,
)
from dap.mining.mined_texts import (
    MiningTask,
    TextSide,
    require_writable,
    score_splits,
    write_pairs,
)
from dap.mining.threshold import LOW_PRECISION

__all__ = [
    "Choice",
    "DistinctSentences",
    "LOW_PRECISION",
    "MARGINS",
    "Margin",
    "MinedPairs",
    "MiningScore",
    "MiningTask",
    "PROTOCOLS",
    "RETRIEVALS",
    "Split",
    "TextSide",
    "Vectors",
    "best_threshold",
    "candidate_pairs",
    "count_gold",
    "default_protocol",
    "find_splits",
    "mine",
    "mine_vectors",
    "neighbourhoods",
    "read_gold",
    "read_text",
    "report_of",
    "require_some",
    "require_writable",
    "score_at",
    "score_pairs",
    "score_splits",
    "select",
    "table_text",
    "write_pairs",
]
