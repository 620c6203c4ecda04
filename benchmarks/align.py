"""Compare the links of our word alignment with those of SimAlign's own code.

    pip install simalign
    python -m benchmarks.align --model out --source a.de --target a.en

Both run the same weights on the same sentences and take the same hidden layer. The links of all
methods are compared pair by pair, by the mean states of words (SimAlign calls them "word").
"""

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timing import machine_parser, save
from dap_transformers.alignment.word_alignment import align_words
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.tables import text_table
from dap_transformers.text.archives import read_sentences

LAYER = 8  # hidden layer of the token states
#: Our method -> the name of its links in SimAlign's output.
METHODS = {"argmax": "inter", "itermax": "itermax"}


def compare(args: Namespace) -> list[tuple[str, int, int]]:
    """Align the same sentences with SimAlign and with our code.

    Returns:
        For each method its name, the number of pairs, and the number of pairs with equal links.
    """
    from simalign import SentenceAligner

    source = list(read_sentences(Path(args.source)))
    target = list(read_sentences(Path(args.target)))
    encoder = SentenceEncoder.from_pretrained(args.model, "mean", "", device=args.device)
    found = []
    aligner = SentenceAligner(
        args.model, "word", matching_methods="ai", device=args.device, layer=LAYER
    )
    logging.getLogger("simalign").setLevel(logging.WARNING)
    theirs = [aligner.get_word_aligns(*pair) for pair in zip(source, target, strict=True)]
    for method, name in METHODS.items():
        ours = align_words(encoder, source, target, method=method, layer=LAYER, words="spaces")
        equal = 0
        for own, wanted in zip(ours, theirs, strict=True):
            equal += list(map(tuple, own.links.tolist())) == wanted[name]
        found.append((method, len(source), equal))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Compare our word alignment with SimAlign's, print a table, and write it to `--json`."""
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--model", required=True, help="folder or Hub id of an encoder")
    parser.add_argument("--source", required=True, help="one sentence per line")
    parser.add_argument("--target", required=True, help="their translations")
    args = parser.parse_args(argv)
    found = compare(args)
    print(text_table(["method", "pairs", "with equal links"], found))
    save(args, {"alignment": found})


if __name__ == "__main__":
    main()
