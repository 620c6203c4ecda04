"""Align the words of a sentence with those of its translation, and draw the alignment."""

from dap.alignment.alignment_plots import (
    TokenStates,
    draw_alignment,
    plot_alignment,
    plot_token_states,
)
from dap.alignment.heat_map import heat_map
from dap.alignment.pharaoh import GoldLinks, format_links, parse_links, read_links
from dap.alignment.sentence_alignment import (
    SUBWORDS,
    WordAlignment,
    align_words,
    stream_alignments,
)
from dap.alignment.word_alignment import (
    METHODS,
    AlignmentQuality,
    align_tokens,
    alignment_quality,
    itermax,
    token_retrieval_accuracy,
    word_states,
)
from dap.alignment.words import WORDS, is_unsegmented

__all__ = [
    "AlignmentQuality",
    "GoldLinks",
    "METHODS",
    "SUBWORDS",
    "TokenStates",
    "WORDS",
    "WordAlignment",
    "align_tokens",
    "align_words",
    "alignment_quality",
    "draw_alignment",
    "format_links",
    "heat_map",
    "is_unsegmented",
    "itermax",
    "parse_links",
    "plot_alignment",
    "plot_token_states",
    "read_links",
    "stream_alignments",
    "token_retrieval_accuracy",
    "word_states",
]
