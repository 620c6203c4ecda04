"""Align the words of a sentence with those of its translation, and draw the alignment."""

from dap.alignment.alignment_plots import (
    TokenStates,
    draw_alignment,
    plot_alignment,
    plot_token_states,
)
from dap.alignment.word_alignment import (
    align_tokens,
    alignment_quality,
    token_retrieval_accuracy,
    word_states,
)
