"""Measure how well the token states of a sentence and its translation align.

    python -m experiments.measure_alignment --model_name_or_path out/dap --train_data train/ \\
        --data_dir tatoeba/ --languages de fr --links_dir links/ --output_file alignment.json

The state of a word is the mean of the last-layer states of its subwords. The reference is silver:
the links of a statistical aligner (`experiments.reference`). Links of equal words (names, numbers)
and of punctuation never count.

A model's links join words that are each other's nearest ("Argmax" of SimAlign, Jalili Sabet et al.
2020). Precision compares them with links that the aligner found in at least one direction. Recall
compares them with links found in both. Word retrieval is measured, too.

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

from dap_transformers.addresses import public_name
from dap_transformers.alignment.links import (
    align_tokens,
    alignment_quality,
    token_retrieval_accuracy,
    word_states,
)
from dap_transformers.commands.edge import check_outputs, command
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.files import write_json
from dap_transformers.reports.rendering import text_table
from eval_retrieval import read_languages
from experiments.reference import AlignedPair, is_trivial, lower_words, reference, word_spans
from experiments.statistics import ALIGNMENT

PROTOCOL = (
    "token alignment: words, last layer, cosine; "
    "SILVER links of a statistical aligner, no equal words"
)
#: Numbers of measured pairs, of reference links that count, and of links that do not.
COUNTS = ("pairs", "reference links", "left out")


@dataclass
class AlignmentArguments:
    """Command-line arguments: text to measure on, text for the aligner, and the output file."""

    data_dir: list[str] = field(
        metadata={"help": "Parallel text with English to measure on, such as Tatoeba's."}
    )
    train_data: list[str] = field(
        metadata={
            "help": "Parallel text to train the aligner on. The first folder is used up first."
        }
    )
    languages: list[str] = field(metadata={"help": "Codes of languages with spaces between words."})
    links_dir: str = field(
        metadata={"help": "Folder that keeps the links for later calls on the same text."}
    )
    output_file: str = field(metadata={"help": "JSON file to write."})
    pairs: int = field(
        default=300, metadata={"help": "Number of pairs of each language to measure."}
    )
    training_pairs: int = field(
        default=20000, metadata={"help": "Largest number of pairs per language for the aligner."}
    )


def states_of_words(encoder: SentenceEncoder, sentences: Sequence[str]) -> list[np.ndarray]:
    """Compute the state of each word, the mean of the states of its tokens.

    Args:
        encoder: makes the token states.
        sentences: the sentences.

    Returns:
        Word states (W, D) of each sentence.

    Raises:
        UserError: the tokenizer is not a fast one.
    """
    token_states, places = encoder.encode_located_tokens(sentences)
    found = []
    for sentence, states, own in zip(sentences, token_states, places, strict=True):
        found.append(word_states(states, own.spans, word_spans(sentence)))
    return found


def measure(encoder: SentenceEncoder, pairs: Sequence[AlignedPair]) -> dict[str, float | int]:
    """Measure word alignment and word retrieval of a model in one language.

    Args:
        encoder: the model to measure.
        pairs: sentence pairs with reference links.

    Returns:
        Name -> number: the numbers of pairs and links that `COUNTS` names, and the results that
        `ALIGNMENT` names, in percent.

    Raises:
        UserError: no reference link counts, or a state is not finite.
    """
    source = states_of_words(encoder, [pair.source for pair in pairs])
    target = states_of_words(encoder, [pair.target for pair in pairs])
    sure = [_without_trivial(pair, pair.sure) for pair in pairs]
    links = []
    for pair, own, other in zip(pairs, source, target, strict=True):
        links.append(_without_trivial(pair, align_tokens(own, other)[0]))
    retrieval = token_retrieval_accuracy(source, target, sure)
    quality = alignment_quality(links, sure, [pair.possible for pair in pairs])
    kept = sum(len(part) for part in sure)
    left_out = sum(len(pair.sure) for pair in pairs) - kept
    found = dict(zip(COUNTS, (len(pairs), kept, left_out), strict=True))
    numbers = (
        *retrieval.pool,
        *retrieval.sentence,
        quality.precision,
        quality.recall,
        quality.error_rate,
    )
    for name, number in zip(ALIGNMENT, numbers, strict=True):
        found[name] = round(number, 4)
    return found


def _without_trivial(pair: AlignedPair, links: np.ndarray) -> np.ndarray:
    """Leave out links that say nothing about translation, as `is_trivial` tells.

    Args:
        pair: the sentence pair.
        links: (L, 2), numbers of a source word and a target word.

    Returns:
        The remaining links, in the same form.
    """
    source = lower_words(pair.source)
    target = lower_words(pair.target)
    kept = [not is_trivial(source[i], target[j]) for i, j in links]
    return links[np.array(kept, bool)]


def _digest(aligned: Mapping[str, Sequence[AlignedPair]]) -> str:
    """Return 12 hexadecimal digits of a hash of all sentences and sure links.

    Models with the same hash were measured on the same text, so they can be compared.

    Args:
        aligned: language code -> sentence pairs with reference links.
    """
    rows = []
    for code, pairs in aligned.items():
        for pair in pairs:
            rows.append([code, pair.source, pair.target, pair.sure.tolist()])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Measure a model in every language, print a table, and write the JSON report.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = HfArgumentParser(
        (EncoderArguments, AlignmentArguments), description=__doc__.splitlines()[0]
    )
    model_args, args = parser.parse_args_into_dataclasses(args=argv)
    inputs = [*args.data_dir, *args.train_data]
    check_outputs({"--output_file": args.output_file}, inputs, model_args.model_name_or_path)
    encoder = model_args.load()
    if not isinstance(encoder, SentenceEncoder):
        raise UserError(
            f"--model_name_or_path {model_args.model_name_or_path}: it gives no token states"
        )
    pairs = read_languages(args.data_dir, args.languages)
    aligned = reference(pairs, args.train_data, args.pairs, args.training_pairs, args.links_dir)
    started = time.perf_counter()
    languages = {code: measure(encoder, rows) for code, rows in aligned.items()}
    mean = {}
    for name in ALIGNMENT:
        mean[name] = round(statistics.fmean(row[name] for row in languages.values()), 4)
    seconds = time.perf_counter() - started
    text = {
        "aligner's text": [Path(path).name for path in args.train_data],
        "training_pairs": args.training_pairs,
    }
    settings = {
        "data": [public_name(path) for path in args.data_dir],
        "text": _digest(aligned),
        **text,
    }
    content = model_args.report(
        encoder, PROTOCOL, {"languages": languages, "mean": mean}, settings, seconds
    )
    write_json(content, args.output_file)
    columns = (*COUNTS, *ALIGNMENT)
    table = [[code, *map(row.get, columns)] for code, row in (languages | {"mean": mean}).items()]
    print(f"{PROTOCOL}\n\n{text_table(['', *columns], table)}")
    print(f"written to {args.output_file}")


if __name__ == "__main__":
    main()
