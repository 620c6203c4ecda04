"""Sentences a second of our encoder and of sentence-transformers, with the same weights and the same vectors.

    OMP_NUM_THREADS=1 python -m benchmarks.encode --model out --data_dir tatoeba/ --sentences 1000 --json encode.json
    python -m benchmarks.encode --size xlmr --device cuda --bf16 --sentences 50000 --token_budget 32768

Sentences are drawn from both sides of all languages, each text once; vectors are means of states. With
`--size` the weights are random, and the sentences random words. Ours makes batches by tokens, sentence-transformers
by sentences: it gets several sizes, and ratios are with the best. Contenders take turns.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoModel

from benchmarks.timing import CPU, WALL, alternate, machine_parser, prepare_machine, save
from benchmarks.workload import SIZES, WORDS, encoder_config, word_tokenizer
from dap.encoding import OnnxEncoder, SentenceEncoder
from dap.reports import text_table
from eval_retrieval import read_languages

OURS, LIBRARY = "ours", "sentence-transformers"
#: Of ours and theirs; in bfloat16 ours is at 0.99998 of float32, theirs, whose residuals are rounded too, at 0.9985.
LEAST_COSINE = {"float32": 0.9999, "bf16": 0.995}

Encode = Callable[[], np.ndarray]


def read_sentences(args: argparse.Namespace) -> list[str]:
    """Texts of both sides of all languages in random order, each once; for `--size` 4 to 30 random words each."""
    rng = random.Random(0)
    if args.size:
        return [" ".join(rng.choices(WORDS, k=rng.randint(4, 30))) for _ in range(args.sentences)]
    texts = sorted(
        {text for rows in read_languages(args.data_dir).values() for pair in rows for text in pair}
    )
    return rng.sample(texts, min(args.sentences, len(texts)))


def write_model(size: str, folder: str) -> None:
    """Random weights of a size, for the random words."""
    tokenizer = word_tokenizer()
    config, _ = encoder_config(size)
    config.pad_token_id = tokenizer.pad_token_id
    for part in (AutoModel.from_config(config), tokenizer):
        part.save_pretrained(folder)


def contenders(model: str, sentences: list[str], args: argparse.Namespace) -> dict[str, Encode]:
    """Name -> vectors of all sentences."""
    ours = SentenceEncoder.from_pretrained(model, "mean", "", device=args.device, bf16=args.bf16)
    transformer = Transformer(model)
    transformer.max_seq_length = ours.max_seq_length
    modules = [transformer, Pooling(ours.hidden_size, pooling_mode="mean")]
    library = SentenceTransformer(modules=modules, device=args.device)
    if args.bf16:
        library.bfloat16()
    found: dict[str, Encode] = {OURS: partial(ours.encode, sentences, args.token_budget)}
    for size in args.batch_sizes:
        found[f"{LIBRARY}, {size} a batch"] = partial(
            library.encode, sentences, batch_size=size, show_progress_bar=False
        )
    for path in args.onnx:
        exported = OnnxEncoder(path, prefix="", max_seq_length=ours.max_seq_length)
        found[Path(path).name] = partial(exported.encode, sentences, token_budget=args.token_budget)
    return found


def least_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The lowest cosine of two vectors of the same sentence."""
    return (
        torch.cosine_similarity(*(torch.tensor(side, dtype=torch.float64) for side in (a, b)))
        .min()
        .item()
    )


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Contender -> medians of its seconds, and the lowest cosine with ours.

    Raises:
        ValueError: a contender's vectors are not ours.
    """
    sentences = read_sentences(args)
    with tempfile.TemporaryDirectory(prefix="dap-encode-") as folder:
        if args.size:
            write_model(args.size, folder)
        found = contenders(args.model or folder, sentences, args)
        vectors = {name: encode() for name, encode in found.items()}
        cosines = {name: least_cosine(vectors[OURS], part) for name, part in vectors.items()}
        for name, cosine in cosines.items():
            if (
                name.startswith(LIBRARY)
                and cosine < LEAST_COSINE["bf16" if args.bf16 else "float32"]
            ):
                raise ValueError(
                    f"{name} and ours give a sentence vectors of cosine {cosine:.5f}: not the same work"
                )
        timed = alternate(found, args.repeats, args.device, warm_up=0)
    parts = {name: part | {"least_cosine": cosines[name]} for name, part in timed.items()}
    return {"sentences": len(sentences), "contenders": parts}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Clock -> time of the fastest sentence-transformers over ours."""
    parts = found["contenders"]
    return {
        clock: min(part[clock] for name, part in parts.items() if name.startswith(LIBRARY))
        / parts[OURS][clock]
        for clock in (WALL, CPU)
    }


def table(found: dict[str, Any]) -> str:
    """Medians as text."""
    count = found["sentences"]
    lines = [
        [
            name,
            f"{count / part[WALL]:.1f}",
            f"{count / part[CPU]:.1f}",
            f"{part['least_cosine']:.6f}",
        ]
        for name, part in found["contenders"].items()
    ]
    faster = ratios(found)
    header = [f"{count} sentences", "sentences / s", "sentences / CPU s", "lowest cosine"]
    return f"{text_table(header, lines)}\nours is faster: wall {faster[WALL]:.2f}, CPU {faster[CPU]:.2f}"


def main(argv: list[str] | None = None) -> None:
    """Prints a table; `--json` keeps everything."""
    parser = machine_parser(__doc__, repeats=3)
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--model", help="checkpoint of an encoder; needs --data_dir")
    weights.add_argument("--size", choices=list(SIZES), help="random weights of this size")
    parser.add_argument("--data_dir", nargs="+", help="parallel text with English")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--token_budget", type=int, default=4096, help="of ours")
    parser.add_argument(
        "--batch_sizes", type=int, nargs="+", default=[32, 128], help=f"of {LIBRARY}"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="ours under autocast, theirs in bfloat16"
    )
    parser.add_argument(
        "--onnx", nargs="+", default=[], help="files exported from the model, to time beside"
    )
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.data_dir):
        parser.error("--model and --data_dir need each other")
    prepare_machine(args)
    found = compare(args)
    print(table(found))
    save(args, found | {"faster": ratios(found)})


if __name__ == "__main__":
    main()
