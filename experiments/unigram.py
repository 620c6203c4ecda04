"""Entropy of the target tokens: the RTL loss of a head that has learned how frequent tokens are, and nothing else.

    python -m experiments.unigram --tokenizer ENCODER --train_data corpus/

A sample of every language counts; tokens are those that RTL predicts: all but CLS, of sentences cut like training's.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from transformers import AutoTokenizer

from dap.commands import command
from dap.text import load_bitext
from dap.training import token_counts, tokenize_bitext

PAIRS = 700  # of each language, spread over its text


def entropy(counts: np.ndarray) -> float:
    """Of the shares that counts (V,) have of their sum, in nats.

    >>> round(entropy(np.array([2, 1, 1, 0])) / float(np.log(2)), 6)
    1.5
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder or Hub id")
    parser.add_argument(
        "--train_data", required=True, nargs="+", help="parallel text as train_dap.py takes it"
    )
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sample = {}
    for code, text in load_bitext(args.train_data).items():
        sample[code] = text.select(np.linspace(0, len(text) - 1, min(len(text), PAIRS)).astype(int))
    counts = token_counts(tokenize_bitext(sample, tokenizer, 32), tokenizer)  # (V,)
    print(f"{entropy(counts):.2f} nats a token, of {counts.sum():,} target tokens")


if __name__ == "__main__":
    main()
