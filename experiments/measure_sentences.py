"""Measure the multilingual pool and hard negatives, and keep the outcome of every sentence.

    python -m experiments.measure_sentences --model out --data_dir news/ --output_file out.json

All languages must translate the same English sentences. The report is that of `eval_retrieval.py`
with `--pool multilingual --hard_negatives`. Its part "sentences" has, for each English sentence,
the number of languages in which the query was right or wrong. With it a bootstrap can draw
sentences (`experiments.statistics.bootstrap_interval`).
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np

from dap_transformers.addresses import public_name
from dap_transformers.commands.arguments import ArgumentParser, arg
from dap_transformers.commands.edge import check_outputs, command
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.errors import UserError
from dap_transformers.evaluation.hard_negatives import hard_negative_hits
from dap_transformers.evaluation.retrieval import multilingual_pool_hits
from dap_transformers.files import write_json
from eval_retrieval import (
    COPIES,
    ENGLISH,
    PROTOCOL,
    SOURCE,
    PairsByLanguage,
    TextName,
    accuracies_of,
    accuracy_numbers,
    add_pool_numbers,
    copies_of,
    digest,
    encode_texts,
    hard_negative_numbers,
    pool_table,
    read_languages,
    texts_of,
)


@dataclass
class SentenceArguments:
    """Command-line arguments: what to evaluate on, and the file to write."""

    data_dir: list[str] = arg(MISSING, "Folders or files of parallel text with English.")
    output_file: str = arg(MISSING, "JSON file to write.")
    max_pairs: int | None = arg(None, "Use only the first pairs of each language. Default: all.")


def require_same_english(pairs: PairsByLanguage) -> None:
    """Raise a `UserError` unless all languages translate the same English sentences.

    Args:
        pairs: language code -> (source, English) sentences.
    """
    first, *others = pairs
    expected = [english for _, english in pairs[first]]
    for code in others:
        if [english for _, english in pairs[code]] != expected:
            raise UserError(f"{code} and {first} have other English sentences: give the same ones")


def sentence_counts(
    pairs: PairsByLanguage, vectors: Mapping[TextName, np.ndarray]
) -> dict[str, Any]:
    """Count for each English sentence in how many languages retrieval finds the right sentence.

    Args:
        pairs: language code -> (source, English) sentences.
        vectors: (language code, side) -> vectors (n, D), as `encode_texts` returns them.

    Returns:
        "languages" -> number of languages. Three lists have a number of languages for each English
        sentence. "error": languages whose sentence is nearer to a changed copy or to another
        English sentence. "pool_xx-en" and "pool_en-xx": languages in which the translation is found
        in the multilingual pool.
    """
    length = len(next(iter(pairs.values())))
    counts = {name: np.zeros(length, int) for name in ("error", "pool_xx-en", "pool_en-xx")}
    for code in pairs:
        source = vectors[code, SOURCE]
        english = vectors[code, ENGLISH]
        counts["error"] += ~hard_negative_hits(source, english, vectors[code, COPIES])
        counts["pool_xx-en"] += multilingual_pool_hits(source, english)
        counts["pool_en-xx"] += multilingual_pool_hits(english, source)
    return {"languages": len(pairs)} | {name: each.tolist() for name, each in counts.items()}


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Measure a model in all languages, print a table, and write the JSON report.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    types = (EncoderArguments, SentenceArguments)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0])
    model_args, args = parser.parse_args_into_dataclasses(args=argv)
    name = model_args.model_name_or_path
    check_outputs({"--output_file": args.output_file}, args.data_dir, name)

    pairs = read_languages(args.data_dir, max_pairs=args.max_pairs)
    require_same_english(pairs)
    copies = copies_of(pairs)
    encoder = model_args.load()
    started = time.perf_counter()
    vectors = encode_texts(encoder, texts_of(pairs, copies))

    numbers = accuracy_numbers(pairs, accuracies_of(vectors))
    add_pool_numbers(numbers, vectors)
    numbers["hard_negatives"] = hard_negative_numbers(pairs, copies, vectors)
    numbers["sentences"] = sentence_counts(pairs, vectors)
    seconds = time.perf_counter() - started

    settings = {
        "data": [public_name(path) for path in args.data_dir],
        "text": digest(pairs),
        "max_pairs": args.max_pairs,
        "pool": "multilingual",
        "hard_negatives": digest(copies),
    }
    write_json(model_args.report(encoder, PROTOCOL, numbers, settings, seconds), args.output_file)
    error = numbers["hard_negatives"]["mean"]["error"]["error"]
    print(f"{pool_table(numbers)}\n\nhard-negative error {error:.2f}")
    print(f"written to {args.output_file}")


if __name__ == "__main__":
    main()
