"""Compare the speed of our encoder with that of sentence-transformers.

    OMP_NUM_THREADS=1 python -m benchmarks.encode --model out --data_dir tatoeba/ --json encode.json
    python -m benchmarks.encode --size xlmr --device cuda --bf16 --sentences 50000

Both run the same weights, and the vectors must be the same. Both use mean pooling.

- Sentences are drawn from both sides of all languages, without repetition. With `--size` the
  weights are random, and the sentences are random words.
- We make batches by tokens, sentence-transformers by sentences. It gets several batch sizes, and
  the fastest one counts.
- The contenders take turns, so that a slow minute of the machine does not hit one of them only.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoModel

from benchmarks.timing import CPU, WALL, alternate, machine_parser, save
from benchmarks.workload import SIZES, WORDS, encoder_config, word_tokenizer
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.evaluation.retrieval import read_languages
from dap_transformers.tables import text_table
from dap_transformers.text.find import find_bitext

OURS = "ours"
LIBRARY = "sentence-transformers"
#: Lowest cosine between our vectors and the library's. In bfloat16 ours are at 0.99998 of float32;
#: the library's are at 0.9985, because it also rounds the residual stream.
LEAST_COSINE = {"float32": 0.9999, "bf16": 0.995}

#: Encodes all sentences.
Encode = Callable[[], np.ndarray]


def read_sentences(args: argparse.Namespace) -> list[str]:
    """Draw distinct sentences of `--data_dir` or, for `--size`, make sentences of random words.

    They are the same in every call. `--data_dir` may have fewer than `--sentences`.
    """
    rng = random.Random(0)
    if args.size:
        return [" ".join(rng.choices(WORDS, k=rng.randint(4, 30))) for _ in range(args.sentences)]
    distinct = set()
    for pairs in read_languages(find_bitext(args.data_dir)).values():
        for pair in pairs:
            distinct.update(pair)
    texts = sorted(distinct)
    return rng.sample(texts, min(args.sentences, len(texts)))


def write_model(size: str, folder: str) -> None:
    """Write a model with random weights into a folder, and the tokenizer of the random words.

    Args:
        size: key of `SIZES`.
        folder: where to write.
    """
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    config = encoder_config(size)
    config.pad_token_id = tokenizer.pad_token_id
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def contenders(model: str, sentences: list[str], args: argparse.Namespace) -> dict[str, Encode]:
    """Return the contenders: our encoder, and the library at each batch size.

    The library is sentence-transformers.

    Args:
        model: folder or Hub id of the encoder.
        sentences: what to encode.
        args: the command line.

    Returns:
        Name of each contender -> a function that encodes all sentences.
    """
    ours = SentenceEncoder.from_pretrained(model, "mean", "", device=args.device, bf16=args.bf16)
    transformer = Transformer(model)
    transformer.max_seq_length = ours.max_seq_length
    pooling = Pooling(ours.hidden_size, pooling_mode="mean")
    library = SentenceTransformer(modules=[transformer, pooling], device=args.device)
    if args.bf16:
        library.bfloat16()

    found: dict[str, Encode] = {OURS: partial(ours.encode, sentences, args.token_budget)}
    for size in args.batch_sizes:
        found[f"{LIBRARY}, {size} a batch"] = partial(
            library.encode, sentences, batch_size=size, show_progress_bar=False
        )
    return found


def least_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Compare two encoders' vectors of the same sentences.

    Args:
        a: (N, D), vectors of one encoder.
        b: (N, D), vectors of the other encoder.

    Returns:
        The lowest cosine between the two vectors of a sentence.
    """
    left = torch.tensor(a, dtype=torch.float64)
    right = torch.tensor(b, dtype=torch.float64)
    return torch.cosine_similarity(left, right).min().item()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Time all contenders, and compare their vectors with ours.

    Args:
        args: the command line.

    Returns:
        "sentences" -> number of sentences. "contenders" -> for each contender its median wall-clock
        and CPU seconds, the single runs, and "least_cosine", the lowest cosine between its vectors
        and ours.
    """
    sentences = read_sentences(args)
    with tempfile.TemporaryDirectory(prefix="dap-encode-") as folder:
        if args.size:
            write_model(args.size, folder)
        found = contenders(args.model or folder, sentences, args)
        vectors = {name: encode() for name, encode in found.items()}
        cosines = {name: least_cosine(vectors[OURS], own) for name, own in vectors.items()}
        least = LEAST_COSINE["bf16" if args.bf16 else "float32"]
        for name, cosine in cosines.items():
            if name.startswith(LIBRARY) and cosine < least:
                raise ValueError(
                    f"{name} and ours give a sentence vectors of cosine "
                    f"{cosine:.5f}: not the same work"
                )
        timed = alternate(found, args.repeats, args.device, warm_up=0)
    parts = {name: part | {"least_cosine": cosines[name]} for name, part in timed.items()}
    return {"sentences": len(sentences), "contenders": parts}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Divide the time of sentence-transformers at its fastest batch size by ours.

    Args:
        found: result of `compare`.

    Returns:
        `WALL` -> ratio of wall-clock times, and `CPU` -> ratio of CPU times. Above 1, ours is
        faster.
    """
    parts = found["contenders"]
    library = [part for name, part in parts.items() if name.startswith(LIBRARY)]
    faster = {}
    for clock in (WALL, CPU):
        fastest = min(part[clock] for part in library)
        faster[clock] = fastest / parts[OURS][clock]
    return faster


def table(found: dict[str, Any]) -> str:
    """Format the result of `compare` as text: sentences per second of each contender."""
    count = found["sentences"]
    lines = []
    for name, part in found["contenders"].items():
        wall = f"{count / part[WALL]:.1f}"
        cpu = f"{count / part[CPU]:.1f}"
        lines.append([name, wall, cpu, f"{part['least_cosine']:.6f}"])
    header = [f"{count} sentences", "sentences / s", "sentences / CPU s", "lowest cosine"]
    faster = ratios(found)
    verdict = f"ours is faster: wall {faster[WALL]:.2f}, CPU {faster[CPU]:.2f}"
    return f"{text_table(header, lines)}\n{verdict}"


def main(argv: list[str] | None = None) -> None:
    """Compare the encoders, print a table, and write everything to `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=3)
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--model", help="checkpoint of an encoder; needs --data_dir")
    weights.add_argument("--size", choices=list(SIZES), help="random weights of this size")
    parser.add_argument("--data_dir", nargs="+", help="parallel text with English")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--token_budget", type=int, default=4096, help="tokens of our batches")
    parser.add_argument(
        "--batch_sizes", type=int, nargs="+", default=[32, 128], help=f"sentences, of {LIBRARY}"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="ours under autocast, the library in bfloat16"
    )
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.data_dir):
        parser.error("--model and --data_dir need each other")
    found = compare(args)
    print(table(found))
    save(args, found | {"faster": ratios(found)})


if __name__ == "__main__":
    main()
