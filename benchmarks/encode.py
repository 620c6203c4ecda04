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
#: Lowest cosine between our vectors and the library's in float32, and in bfloat16. There ours are
#: at 0.99998 of float32, and the library's at 0.9985: it also rounds the residual stream.
LEAST_COSINE = (0.9999, 0.995)

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
    """Write an encoder of `SIZES` with random weights, and the tokenizer of the random words."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    AutoModel.from_config(encoder_config(size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def contenders(model: str, sentences: list[str], args: argparse.Namespace) -> dict[str, Encode]:
    """Return our encoder, and sentence-transformers at each batch size, by name."""
    ours = SentenceEncoder.from_pretrained(model, "mean", "", device=args.device, bf16=args.bf16)
    transformer = Transformer(model)
    transformer.max_seq_length = ours.max_seq_length
    pooling = Pooling(ours.hidden_size, pooling_mode="mean")
    library = SentenceTransformer(modules=[transformer, pooling], device=args.device)
    if args.bf16:
        library.bfloat16()

    found: dict[str, Encode] = {OURS: partial(ours.encode, sentences)}
    for size in args.batch_sizes:
        found[f"{LIBRARY}, {size} a batch"] = partial(
            library.encode, sentences, batch_size=size, show_progress_bar=False
        )
    return found


def least_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the lowest cosine between two encoders' vectors (N, D) of the same sentence."""
    left = torch.tensor(a, dtype=torch.float64)
    right = torch.tensor(b, dtype=torch.float64)
    return torch.cosine_similarity(left, right).min().item()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Time all contenders, and compare their vectors with ours.

    Returns:
        "sentences" -> number of sentences. "contenders" -> for each contender its median wall-clock
        and CPU seconds, the single runs, and "least_cosine", the lowest cosine between its vectors
        and ours.
    """
    sentences = read_sentences(args)
    with tempfile.TemporaryDirectory(prefix="dap-encode-") as folder:
        if args.size:
            write_model(args.size, folder)
        encoders = contenders(args.model or folder, sentences, args)
    vectors = encoders[OURS]()
    cosines = {}
    for name, encode in encoders.items():
        cosines[name] = least_cosine(vectors, encode())
    if not all(each >= LEAST_COSINE[args.bf16] for each in cosines.values()):  # also for NaN
        raise ValueError(f"vectors differ, lowest cosines with ours: {cosines}")
    found = alternate(encoders, args.repeats, args.device, warm_up=0)
    for name, part in found.items():
        part["least_cosine"] = cosines[name]
    return {"sentences": len(sentences), "contenders": found}


def table(found: dict[str, Any]) -> str:
    """Format the result of `compare` as a text table, with the speed of ours / that of each."""
    count = found["sentences"]
    ours = found["contenders"][OURS]
    lines = []
    for name, part in found["contenders"].items():
        line = [name]
        for clock in (WALL, CPU):
            line += [f"{count / part[clock]:.1f}", f"{part[clock] / ours[clock]:.2f}"]
        lines.append([*line, f"{part['least_cosine']:.6f}"])
    header = [f"{count} sentences", "sentences / s", "ours is faster"]
    header += ["sentences / CPU s", "ours is faster", "lowest cosine"]
    return text_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Compare the encoders, print a table, and write everything to `--json`."""
    parser = machine_parser(__doc__, repeats=3)
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--model", help="checkpoint of an encoder; needs --data_dir")
    weights.add_argument("--size", choices=list(SIZES), help="random weights of this size")
    parser.add_argument("--data_dir", nargs="+", help="parallel text with English")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument(
        "--batch_sizes", type=int, nargs="+", default=[32, 128], help=f"sentences, of {LIBRARY}"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="ours under autocast, the library in bfloat16"
    )
    args = parser.parse_args(argv)
    found = compare(args)
    print(table(found))
    save(args, found)


if __name__ == "__main__":
    main()
