"""Mine translations: margin scores, BUCC, and the two texts of a mining run."""

from dap.mining.bucc import (
    PROTOCOLS,
    MiningScore,
    Split,
    default_protocol,
    find_splits,
    read_gold,
    read_text,
)
from dap.mining.distinct import DistinctSentences
from dap.mining.margin import MARGINS, RETRIEVALS, MinedPairs, mine, neighbourhoods, select
from dap.mining.mined_texts import MiningTask, TextSide, score_splits, write_pairs
