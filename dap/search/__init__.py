"""Search over arrays of vectors: neighbours, retrieval accuracy, hard negatives, mining, BUCC, token alignment."""

from dap.search.alignment import (
    align_tokens,
    alignment_quality,
    token_retrieval_accuracy,
    word_states,
)
from dap.search.alignment_plots import (
    TokenStates,
    draw_alignment,
    plot_alignment,
    plot_token_states,
)
from dap.search.approximate import approximate_neighbours, recall_at_k
from dap.search.bucc import (
    PROTOCOLS,
    MiningScore,
    Split,
    default_protocol,
    find_splits,
    read_gold,
    read_text,
)
from dap.search.cluster import cluster_neighbours, plan_search, product_rate
from dap.search.distinct import DistinctSentences
from dap.search.hard_negatives import COPY_KINDS, Copy, hard_negative_copies, hard_negative_errors
from dap.search.mining import MARGINS, RETRIEVALS, Pairs, mine, neighbourhoods, select
from dap.search.plan import TILES, SearchPlan
from dap.search.retrieval import group_averages, retrieval_accuracy
from dap.search.similarity import Array, Neighbours, Search, mutual_neighbours, unit_rows
from dap.search.texts import Side, Texts, score_splits, write_pairs
