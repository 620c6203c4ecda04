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
