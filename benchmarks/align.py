"""Compare word alignment with SimAlign's own code: the links and the speed.

    pip install simalign
    OMP_NUM_THREADS=1 python -m benchmarks.align --model out --source a.de --target a.en

Both run the same weights on the same sentences and take the same hidden layer. The links of all
methods and both kinds of states (SimAlign calls them "word" and "bpe") are compared pair by pair.

- SimAlign encodes one pair at a time. We encode many pairs in a batch, which is most of the gain.
- SimAlign makes the links of both methods in one call. We are timed for each method by itself.
- The contenders take turns, so that a slow minute of the machine does not hit one of them only.
"""

import logging
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.timing import CPU, WALL, alternate, machine_parser, save
from dap_transformers.alignment.align import align_words
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.tables import text_table
from dap_transformers.text.archives import read_sentences

#: Our way to use subwords -> SimAlign's `token_type`.
TOKEN_TYPES = {"mean": "word", "link": "bpe"}
#: Our method -> the name of its links in SimAlign's output.
METHODS = {"argmax": "inter", "itermax": "itermax"}

Links = list[tuple[int, int]]


def library_links(aligner: Any, source: Sequence[str], target: Sequence[str]) -> list[dict]:
    """Align each pair with SimAlign, and return its output for each of them.

    Args:
        aligner: a `simalign.SentenceAligner`.
        source: sentences.
        target: their translations.

    Returns:
        For each pair a dictionary: name of a method ("inter", "itermax") -> links, as pairs of
        source and target word, from 0.
    """
    return [aligner.get_word_aligns(*pair) for pair in zip(source, target, strict=True)]


def our_links(aligned: Sequence[Any]) -> list[Links]:
    """Return the links of each pair in SimAlign's form: lists of (source word, target word).

    Args:
        aligned: our result for each pair, `dap_transformers.alignment.WordAlignment`.
    """
    return [list(map(tuple, each.links.tolist())) for each in aligned]


def compare(args: Namespace) -> list[dict[str, Any]]:
    """Align the same sentences with SimAlign and with our code, for each kind of states and method.

    Args:
        args: the command line.

    Returns:
        One dictionary per kind of states and method: "subwords", "method", "pairs" (number of
        pairs), "equal" (pairs with the same links), and the median wall-clock and CPU seconds of
        both, such as "ours, wall".
    """
    from simalign import SentenceAligner

    source = list(islice(read_sentences(args.source), args.pairs))
    target = list(islice(read_sentences(args.target), args.pairs))
    encoder = SentenceEncoder.from_pretrained(args.model, "mean", "", device=args.device)
    records = []
    for subwords, token_type in TOKEN_TYPES.items():
        aligner = SentenceAligner(
            args.model, token_type, matching_methods="ai", device=args.device, layer=args.layer
        )
        logging.getLogger("simalign").setLevel(logging.WARNING)
        theirs = partial(library_links, aligner, source, target)
        expected = theirs()
        for method, name in METHODS.items():
            ours = partial(align_words, encoder, source, target, method, subwords, layer=args.layer)
            found = our_links(ours())
            equal = sum(own == each[name] for own, each in zip(found, expected, strict=True))
            timed = alternate({"ours": ours, "SimAlign": theirs}, args.repeats, args.device, 0)
            record = {"subwords": subwords, "method": method, "pairs": len(found), "equal": equal}
            for clock in (WALL, CPU):
                record[f"ours, {clock}"] = timed["ours"][clock]
                record[f"SimAlign, {clock}"] = timed["SimAlign"][clock]
            records.append(record)
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format the result of `compare` as a text table. Its seconds are wall-clock seconds."""
    columns = ["subwords", "method", "pairs", "equal links", "ours, s", "SimAlign, s", "ratio"]
    rows = []
    for record in records:
        ours = record[f"ours, {WALL}"]
        theirs = record[f"SimAlign, {WALL}"]
        counts = [record["subwords"], record["method"], record["pairs"], record["equal"]]
        rows.append([*counts, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}"])
    return text_table(columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare our word alignment with SimAlign's, print a table, and write it to `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=3)
    parser.add_argument("--model", required=True, help="folder or Hub id of an encoder")
    parser.add_argument("--source", type=Path, required=True, help="one sentence per line")
    parser.add_argument("--target", type=Path, required=True, help="their translations")
    parser.add_argument("--pairs", type=int, default=200, help="first pairs to align")
    parser.add_argument("--layer", type=int, default=8, help="hidden layer of the token states")
    args = parser.parse_args(argv)
    records = compare(args)
    print(table(records))
    save(args, {"alignment": records})


if __name__ == "__main__":
    main()
