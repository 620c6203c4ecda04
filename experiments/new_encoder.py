"""Make a folder from which a small encoder can be trained: a configuration and a tokenizer.

    python -m experiments.new_encoder --tokenizer ENCODER --train_data corpus/ --output_dir mini
    python train_dap.py configs/mlm.yaml --config_name mini --train_data corpus/ \\
        --output_dir mini-mlm

The tokenizer is a given Unigram tokenizer with fewer pieces: the special tokens, then pieces of one
character, then longer pieces by their frequency in the text. Each piece keeps its score.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BertConfig, PreTrainedTokenizerBase

from dap_transformers.commands.edge import command
from dap_transformers.errors import UserError
from dap_transformers.files import read_object
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import read_pairs

PAIRS = 2000  # pairs of each language whose pieces are counted


def frequent_pieces(tokenizer: PreTrainedTokenizerBase, paths: Sequence[str]) -> list[str]:
    """Return the distinct pieces that the tokenizer cuts a text into.

    Pieces of one character come first, then longer ones. Both groups are sorted by frequency, the
    most frequent first. The first `PAIRS` pairs of each language are read, both sides.

    Args:
        tokenizer: a fast tokenizer.
        paths: files or folders of parallel text.
    """
    counts: Counter[str] = Counter()
    for files in find_bitext(paths).values():
        pairs = islice((pair for file in files for pair in read_pairs(file)), PAIRS)
        text = [side for pair in pairs for side in (pair["source"], pair["target"])]
        for encoding in tokenizer(text, add_special_tokens=False).encodings:
            counts.update(encoding.tokens)
    return sorted(counts, key=lambda piece: (len(piece) > 1, -counts[piece]))


def cut_vocabulary(definition: dict[str, Any], pieces: Sequence[str], size: int) -> None:
    """Reduce the vocabulary of a tokenizer to its special tokens and the first pieces.

    Args:
        definition: content of a tokenizer.json, changed in place.
        pieces: pieces in the order in which they are kept.
        size: largest size of the new vocabulary, special tokens included.

    Raises:
        UserError: the tokenizer is no Unigram model like those of XLM-R and E5, or the size leaves
            no room for a piece.
    """
    model = definition["model"]
    template = (definition["post_processor"] or {}).get("special_tokens")
    if model["type"] != "Unigram" or template is None:
        raise UserError(
            f"--tokenizer has a {model['type']} model: give one with a Unigram model (XLM-R, E5)"
        )
    special = {token["content"] for token in definition["added_tokens"]}
    if outside := sorted(special - {piece for piece, _ in model["vocab"]}):
        raise UserError(
            f"--tokenizer has {outside[0]} outside of its Unigram model: give that of XLM-R or E5"
        )
    if size <= len(special):
        raise UserError(
            f"--vocab_size {size} leaves no room beside {len(special)} special tokens: raise it"
        )
    others = [piece for piece in pieces if piece not in special]
    kept = special | set(others[: size - len(special)])
    unknown = model["vocab"][model["unk_id"]][0]
    model["vocab"] = [entry for entry in model["vocab"] if entry[0] in kept]
    ids = {entry[0]: number for number, entry in enumerate(model["vocab"])}
    model["unk_id"] = ids[unknown]
    for token in definition["added_tokens"]:
        token["id"] = ids[token["content"]]
    for token in template.values():
        token["ids"] = [ids[name] for name in token["tokens"]]


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the configuration and the tokenizer of a small encoder into a folder, without weights.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokenizer", required=True, help="folder or Hub id with a Unigram tokenizer"
    )
    parser.add_argument(
        "--train_data",
        required=True,
        nargs="+",
        help="parallel text, in any form that train_dap.py takes",
    )
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--vocab_size", type=int, default=16000)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--num_hidden_layers", type=int, default=4)
    args = parser.parse_args(argv)
    folder = Path(args.output_dir)
    known = AutoTokenizer.from_pretrained(args.tokenizer)
    pieces = frequent_pieces(known, args.train_data)
    known.save_pretrained(folder)
    definition = read_object(folder / "tokenizer.json")
    cut_vocabulary(definition, pieces, args.vocab_size)
    (folder / "tokenizer.json").write_text(
        json.dumps(definition, ensure_ascii=False), encoding="utf-8"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=max(1, args.hidden_size // 32),
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=160,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)
    print(f"{folder}: {len(tokenizer)} ids, {args.num_hidden_layers} layers of {args.hidden_size}")


if __name__ == "__main__":
    main()
