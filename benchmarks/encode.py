"""Sentences a second of our encoder and of sentence-transformers, with the same weights and the same vectors.

    OMP_NUM_THREADS=1 python -m benchmarks.encode --model out --data_dir tatoeba/ --sentences 1000 --json encode.json
    python -m benchmarks.encode --size xlmr --device cuda --bf16 --sentences 50000 --token_budget 32768

Sentences are drawn from both sides of all languages, each text once. With `--size` the weights are random, and of a
`--model` only the tokenizer is taken; without data the sentences are random words. Ours makes batches by tokens,
sentence-transformers by sentences: it gets several sizes, and ratios are with the best. Contenders take turns.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.timing import CPU, WALL, add_machine_arguments, alternate, prepare_machine, save
from benchmarks.workload import SIZES
from dap.encoding import OnnxEncoder, SentenceEncoder
from dap.reports import text_table

OURS, LIBRARY = "ours", "sentence-transformers"
#: Of ours and theirs; in bfloat16 ours is at 0.99998 of float32, theirs, whose residuals are rounded too, at 0.9985.
LEAST_COSINE = {"float32": 0.9999, "bf16": 0.995}
WORDS = [f"w{number}" for number in range(900)]

Encode = Callable[[], np.ndarray]


def read_sentences(folders: list[str], languages: list[str] | None, count: int) -> list[str]:
    """Texts of both sides of all languages in random order, each once."""
    from eval_retrieval import read_languages  # it needs libraries that the random words do without

    pairs = read_languages(folders, languages)
    texts = sorted({text for rows in pairs.values() for pair in rows for text in pair})
    return random.Random(0).sample(texts, min(count, len(texts)))


def random_sentences(count: int) -> list[str]:
    """Sentences of 4 to 30 random words of the `word_tokenizer`."""
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 30))) for _ in range(count)]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows `WORDS` and puts each sentence between CLS and SEP."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def write_model(args: argparse.Namespace, folder: str) -> None:
    """What all contenders load: the model, or random weights of `--size`, with the model's tokenizer or our words'."""
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else word_tokenizer()
    tokenizer.save_pretrained(folder)
    model: PreTrainedModel
    if args.size:
        config, _ = SIZES[args.size]()
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.pad_token_id = tokenizer.pad_token_id
        model = AutoModel.from_config(config)
    else:
        model = AutoModel.from_pretrained(args.model)
    model.save_pretrained(folder)


def contenders(args: argparse.Namespace, folder: str, sentences: list[str]) -> dict[str, Encode]:
    """Name -> vectors of all sentences."""
    options = {"pooling": args.pooling, "max_seq_length": args.max_seq_length, "device": args.device}
    ours = SentenceEncoder.from_pretrained(folder, prefix="", bf16=args.bf16, **options)
    transformer = Transformer(folder)
    transformer.max_seq_length = ours.max_seq_length
    pooling = Pooling(ours.hidden_size, pooling_mode=args.pooling)
    library = SentenceTransformer(modules=[transformer, pooling], device=args.device)
    if args.bf16:
        library.bfloat16()
    found: dict[str, Encode] = {OURS: lambda: ours.encode(sentences, token_budget=args.token_budget)}
    for size in args.batch_sizes:
        batch = {"batch_size": size, "show_progress_bar": False}
        found[f"{LIBRARY}, {size} a batch"] = lambda batch=batch: library.encode(sentences, **batch)
    for path in args.onnx:
        exported = OnnxEncoder(path, prefix="", max_seq_length=ours.max_seq_length)
        found[Path(path).name] = lambda exported=exported: exported.encode(sentences, token_budget=args.token_budget)
    return found


def least_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The lowest cosine of two vectors of the same sentence."""
    a, b = (np.asarray(side, np.float64) for side in (a, b))
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Contender -> medians of its seconds, and the lowest cosine with ours.

    Raises:
        ValueError: a contender's vectors are not ours.
    """
    if not (args.model or args.size) or (args.data_dir and not args.model):
        raise ValueError(
            f"--model {args.model} --size {args.size} --data_dir {args.data_dir}: real text needs a --model"
        )
    if args.data_dir:
        sentences = read_sentences(args.data_dir, args.languages, args.sentences)
    else:
        sentences = random_sentences(args.sentences)
    with tempfile.TemporaryDirectory(prefix="dap-encode-") as folder:
        write_model(args, folder)
        found = contenders(args, folder, sentences)
        vectors = {name: encode() for name, encode in found.items()}
        cosines = {name: least_cosine(vectors[OURS], part) for name, part in vectors.items()}
        for name, cosine in cosines.items():
            if name.startswith(LIBRARY) and cosine < LEAST_COSINE["bf16" if args.bf16 else "float32"]:
                raise ValueError(f"{name} and ours give a sentence vectors of cosine {cosine:.5f}: not the same work")
        timed = alternate(found, args.repeats, args.device, warm_up=0)
    parts = {name: part | {"least_cosine": cosines[name]} for name, part in timed.items()}
    return {"sentences": len(sentences), "contenders": parts}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Clock -> time of the fastest sentence-transformers over ours."""
    parts = found["contenders"]
    return {
        clock: min(part[clock] for name, part in parts.items() if name.startswith(LIBRARY)) / parts[OURS][clock]
        for clock in (WALL, CPU)
    }


def table(found: dict[str, Any]) -> str:
    """Medians as text."""
    count = found["sentences"]
    lines = [
        [name, f"{count / part[WALL]:.1f}", f"{count / part[CPU]:.1f}", f"{part['least_cosine']:.6f}"]
        for name, part in found["contenders"].items()
    ]
    faster = ratios(found)
    header = [f"{count} sentences", "sentences / s", "sentences / CPU s", "lowest cosine"]
    return f"{text_table(header, lines)}\nours is faster: wall {faster[WALL]:.2f}, CPU {faster[CPU]:.2f}"


def main(argv: list[str] | None = None) -> None:
    """Prints a table; `--json` keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint of an encoder")
    parser.add_argument("--size", choices=list(SIZES), help="random weights of this size in place of the model's")
    parser.add_argument("--data_dir", nargs="+", help="parallel text with English")
    parser.add_argument("--languages", nargs="+", help="default: all")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--pooling", choices=("cls", "mean"), default="mean")
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--token_budget", type=int, default=4096, help="of ours")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[32, 128], help=f"of {LIBRARY}")
    parser.add_argument("--bf16", action="store_true", help="ours under autocast, theirs in bfloat16")
    parser.add_argument(
        "--onnx", nargs="+", default=[], help="files that were exported from the model, to time beside"
    )
    add_machine_arguments(parser, repeats=3)
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    print(table(found))
    save(args, found | {"faster": ratios(found)})


if __name__ == "__main__":
    main()
