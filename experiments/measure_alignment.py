"""How well the token states of a sentence and its translation align: retrieval of linked words, and word alignment.

    python -m experiments.measure_alignment --model_name_or_path out/dap --train_data train/ --data_dir tatoeba/ \\
        --languages de fr --links_dir links/ --output_file alignment.json

The state of a word is the mean of its subwords' states of the last layer, in the context of its sentence. The
reference is silver: links by a statistical aligner (`experiments.reference`). Links of equal words (names, numbers)
and of punctuation are left out of everything. The links measured join the words that are each other's nearest
("Argmax" of SimAlign, Jalili Sabet et al. 2020); their precision is against links that the aligner found in one
direction or both, their recall against those found in both.

Legend: `P` sentence pairs, `W` words, `D` hidden size, `L` links.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import HfArgumentParser

from dap.alignment import align_tokens, alignment_quality, token_retrieval_accuracy, word_states
from dap.commands import check_outputs, command
from dap.encoding import EncoderArguments, SentenceEncoder
from dap.errors import UserError
from dap.file_io import write_json
from dap.reports import text_table
from eval_retrieval import read_languages
from experiments.reference import AlignedPair, is_trivial, lower_words, reference, word_spans
from experiments.statistics import ALIGNMENT

PROTOCOL = "token alignment: words, last layer, cosine; SILVER links of a statistical aligner, no equal words"
#: Measured pairs, links of the reference that count, and links that do not.
COUNTS = ("pairs", "reference links", "left out")


@dataclass
class AlignmentArguments:
    """What to measure on, what the reference is made from, and where the numbers go."""

    data_dir: list[str] = field(
        metadata={"help": "Parallel text with English to measure on, such as Tatoeba's."}
    )
    train_data: list[str] = field(
        metadata={
            "help": "Parallel text to train the aligner on; of several folders the first is used up first."
        }
    )
    languages: list[str] = field(metadata={"help": "Codes of languages with spaces between words."})
    links_dir: str = field(
        metadata={"help": "Folder that keeps the links; those of the same text are not made anew."}
    )
    output_file: str = field(metadata={"help": "JSON file to write."})
    pairs: int = field(default=300, metadata={"help": "First pairs of each language to measure."})
    training_pairs: int = field(
        default=20000, metadata={"help": "Most pairs a language to train the aligner on."}
    )


def states_of_words(encoder: SentenceEncoder, sentences: Sequence[str]) -> list[np.ndarray]:
    """Each sentence's word states, (W_i, D); see `word_states`.

    Raises:
        ValueError: the tokenizer is not a fast one.
    """
    words = map(word_spans, sentences)
    return list(
        map(word_states, encoder.encode_tokens(sentences), encoder.token_spans(sentences), words)
    )


def measure(encoder: SentenceEncoder, pairs: Sequence[AlignedPair]) -> dict[str, float | int]:
    """The numbers of one language: `COUNTS`, and `ALIGNMENT` in percent.

    Raises:
        ValueError: no reference link remains, or a state that is not finite.
    """
    source = states_of_words(encoder, [pair.source for pair in pairs])
    target = states_of_words(encoder, [pair.target for pair in pairs])
    sure = [_telling(pair, pair.sure) for pair in pairs]
    links = [
        _telling(pair, align_tokens(*states)[0])
        for pair, *states in zip(pairs, source, target, strict=True)
    ]
    retrieval = token_retrieval_accuracy(source, target, sure)
    quality = alignment_quality(links, sure, [pair.possible for pair in pairs])
    kept, all_links = sum(map(len, sure)), sum(len(pair.sure) for pair in pairs)
    counts = dict(zip(COUNTS, (len(pairs), kept, all_links - kept), strict=True))
    numbers = (
        *retrieval.pool,
        *retrieval.sentence,
        quality.precision,
        quality.recall,
        quality.error_rate,
    )
    return counts | {
        name: round(number, 4) for name, number in zip(ALIGNMENT, numbers, strict=True)
    }


def _telling(pair: AlignedPair, links: np.ndarray) -> np.ndarray:
    """The links that are not trivial, (L, 2)."""
    source, target = lower_words(pair.source), lower_words(pair.target)
    return links[np.array([not is_trivial(source[i], target[j]) for i, j in links], bool)]


def _digest(aligned: Mapping[str, Sequence[AlignedPair]]) -> str:
    """Of the sentences, the words and the links: only models measured against the same can be compared."""
    rows = [
        [code, pair.source, pair.target, pair.sure.tolist()]
        for code, pairs in aligned.items()
        for pair in pairs
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: measures every language, prints a table and writes the report."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = HfArgumentParser(
        (EncoderArguments, AlignmentArguments), description=__doc__.splitlines()[0]
    )
    model_args, args = parser.parse_args_into_dataclasses(args=argv)
    check_outputs({"--output_file": args.output_file})
    encoder = model_args.load()
    if not isinstance(encoder, SentenceEncoder):
        raise UserError(
            f"--model_name_or_path {model_args.model_name_or_path}: it gives no states of tokens"
        )
    pairs = read_languages(args.data_dir, args.languages)
    aligned = reference(pairs, args.train_data, args.pairs, args.training_pairs, args.links_dir)
    started = time.perf_counter()
    languages = {code: measure(encoder, rows) for code, rows in aligned.items()}
    mean = {
        name: round(statistics.fmean(row[name] for row in languages.values()), 4)
        for name in ALIGNMENT
    }
    seconds = time.perf_counter() - started
    text = {
        "aligner's text": [Path(path).name for path in args.train_data],
        "training_pairs": args.training_pairs,
    }
    settings = {"data": args.data_dir, "text": _digest(aligned), **text}
    content = model_args.report(
        encoder, PROTOCOL, {"languages": languages, "mean": mean}, settings, seconds
    )
    columns = (*COUNTS, *ALIGNMENT)
    table = [[code, *map(row.get, columns)] for code, row in (languages | {"mean": mean}).items()]
    print(f"{PROTOCOL}\n\n{text_table(['', *columns], table)}")
    write_json(content, args.output_file)
    print(f"written to {args.output_file}")


if __name__ == "__main__":
    main()
