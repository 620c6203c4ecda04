"""Vectors on disk equal `encode`, and finished shards outlive kills, full disks and edited text."""

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import load_encoder, save, synthetic_pairs
from forked import run_killed, run_two
from numpy.testing import assert_allclose
from transformers import BertJapaneseTokenizer
from written import write

from dap_transformers.encoding import shards
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import (
    SharedEncoder,
    embed_to_disk,
    model_fingerprint,
)
from dap_transformers.processes import launched

SENTENCES = [*itertools.chain(*synthetic_pairs("de", 25))]  # 50


@pytest.fixture
def spoilt(encoder: SentenceEncoder) -> SentenceEncoder:
    """Return an encoder that gives NaN for the sentence "q"."""
    token = encoder.tokenizer("q", add_special_tokens=False)["input_ids"][-1]
    with torch.no_grad():
        encoder.model.embeddings.word_embeddings.weight[token] = torch.nan
    return encoder


def times(folder: Path) -> dict[str, int]:
    """Return name and modification time of every file in the folder, in order."""
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.iterdir())}


def require_vectors(found: np.ndarray, encoder: SentenceEncoder, text: list[str]) -> None:
    assert_allclose(found, encoder.encode(text), atol=1e-5)


@pytest.mark.parametrize(("shard_size", "piece"), [(7, 1000), (50, 1000), (1000, 8)])
def test_vectors_equal_encode(
    encoder: SentenceEncoder,
    shard_size: int,
    piece: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "PIECE", piece)
    folder = tmp_path / "new" / "x"
    found = embed_to_disk(encoder, iter(SENTENCES), folder, shard_size=shard_size)
    assert isinstance(found, np.memmap)
    assert not found.flags.writeable
    assert found.dtype == np.float32
    require_vectors(found, encoder, SENTENCES)
    assert len(times(folder)) == -(-50 // shard_size)
    assert embed_to_disk(encoder, [], tmp_path / "none").shape == (0, 32)


def test_one_warning_counts_the_sentences_that_are_cut(
    encoder: SentenceEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [len(encoder.tokenizer(text)["input_ids"]) for text in SENTENCES]
    encoder.max_seq_length = limit = sorted(lengths)[25]  # an exact fit is not cut
    longer = sum(length > limit for length in lengths)
    embed_to_disk(encoder, SENTENCES, tmp_path, shard_size=10)
    (record,) = caplog.records
    assert record.args[1:] == (f"{longer} sentences", limit)


def test_a_sentence_is_encoded_once_whoever_asks_for_its_vector(encoder: SentenceEncoder) -> None:
    expected = encoder.encode(SENTENCES)
    encoder.encode = Mock(wraps=encoder.encode)
    shared = SharedEncoder(encoder)
    assert_allclose(shared.encode(SENTENCES[:30]), expected[:30], atol=1e-5)
    assert_allclose(shared.encode(SENTENCES[::-1]), expected[::-1], atol=1e-5)
    encoded = itertools.chain(*(call.args[0] for call in encoder.encode.call_args_list))
    assert sorted(encoded) == sorted(set(SENTENCES))
    assert shared.encode([]).shape == (0, 32)
    assert shared.pooling == "mean"


def test_text_is_read_one_shard_at_a_time_and_encoded_again_if_it_has_changed(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    def text() -> Iterator[str]:
        for number, sentence in enumerate(SENTENCES):
            # All shards before this one are on disk already.
            assert len(times(tmp_path)) == number // 10
            yield sentence

    embed_to_disk(encoder, text(), tmp_path, shard_size=10)
    before = list(times(tmp_path).items())
    # The text now ends in the fourth shard, and differs in the third.
    changed = [*SENTENCES[:25], "another sentence", *SENTENCES[26:35]]
    found = embed_to_disk(encoder, changed, tmp_path, shard_size=10)
    after = list(times(tmp_path).items())
    assert [new == old for new, old in zip(after, before)] == [True, True, False, False]
    assert len(after) == 4
    require_vectors(found, encoder, changed)


def test_another_model_finds_no_shards_and_removes_only_shards(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    embed_to_disk(encoder, SENTENCES, tmp_path, shard_size=25)
    before = times(tmp_path)
    own = {tmp_path / "train-shard-0001-of-0010.jsonl", tmp_path / "shard-000000-mine.npy"}
    for path in own:
        path.write_text("not of this run")
    with torch.no_grad():
        encoder.model.encoder.layer[0].output.dense.bias[0] += 1
    found = embed_to_disk(encoder, SENTENCES, tmp_path, shard_size=25)
    require_vectors(found, encoder, SENTENCES)
    assert len(times(tmp_path)) == 2 + len(own)
    assert not times(tmp_path).keys() & before.keys()
    assert {path.read_text() for path in own} == {"not of this run"}


def test_a_sentence_with_nan_is_named_and_earlier_shards_stay(
    spoilt: SentenceEncoder, tmp_path: Path
) -> None:
    text = ["ban", "der", "fin", "q", "gol", "sut", "q"]
    options = {"shard_size": 2, "where": lambda row: f"line {row + 1}"}
    with pytest.raises(ValueError, match="^line 4: NaN "):
        embed_to_disk(spoilt, text, tmp_path, **options)
    assert [name[:12] for name in times(tmp_path)] == ["shard-000000"]
    with pytest.raises(ValueError, match="sentence 3: NaN or infinity in the vector of 'q'"):
        SharedEncoder(spoilt).encode(text)


def one_of_two(rank: int, folder: Path) -> None:
    """Encode in one of two processes, and write the error that it gets."""
    launched()
    encoder = load_encoder(folder / "model", "mean")
    with pytest.raises(ValueError, match="NaN") as refused:
        embed_to_disk(encoder, ["ban", "q", "fin"], folder / "vectors", shard_size=1)
    (folder / f"error-{rank}").write_text(str(refused.value))
    torch.distributed.destroy_process_group()


def test_processes_share_the_shards_and_the_errors(spoilt: SentenceEncoder, tmp_path: Path) -> None:
    save(tmp_path / "model", spoilt.model, spoilt.tokenizer)
    run_two(one_of_two, tmp_path)
    for rank in range(2):
        assert (tmp_path / f"error-{rank}").read_text().startswith("sentence 1: NaN")
    assert [name[:12] for name in times(tmp_path / "vectors")] == ["shard-000000", "shard-000002"]


def embed_until_killed(model: Path, folder: Path) -> None:
    """Encode, and be killed in the middle of the fourth shard."""

    def text() -> Iterator[str]:
        for number in range(175):
            yield f"ban der {number}"
        os.kill(os.getpid(), signal.SIGKILL)

    embed_to_disk(load_encoder(model, "mean"), text(), folder, shard_size=50)


def test_a_killed_run_resumes_with_its_shards(
    encoder: SentenceEncoder, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    run_killed(embed_until_killed, tiny_bert_dir, tmp_path)
    finished = times(tmp_path)
    assert len(finished) == 3
    left_by_a_kill = tmp_path / ".shard-000003-0123456789abcdef.npy.01234567.tmp"
    left_by_a_kill.touch()
    text = [f"ban der {number}" for number in range(270)]
    found = embed_to_disk(encoder, text, tmp_path, shard_size=50)
    assert finished.items() <= times(tmp_path).items()
    assert not left_by_a_kill.exists()
    require_vectors(found, encoder, text)


def setting(name: str, value: object) -> Callable:
    """Return a function that changes an attribute of an encoder."""
    return lambda encoder: setattr(encoder, name, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: encoder.model.embeddings.LayerNorm.bias.data[0].add_(1e-3),
        lambda encoder: encoder.tokenizer.add_tokens(["banban"]),
        lambda encoder: setattr(encoder.model.config, "layer_norm_eps", 1e-3),
        setting("pooling", "cls"),
        setting("prefix", "query: "),
        setting("max_seq_length", 9),
        setting("bf16", True),
        lambda encoder: encoder.after.append(torch.nn.Linear(32, 8)),
    ],
)
def test_whatever_shapes_a_vector_changes_the_fingerprint(
    encoder: SentenceEncoder, change: Callable
) -> None:
    fingerprint = model_fingerprint(encoder)
    change(encoder)
    assert model_fingerprint(encoder) != fingerprint


def test_settings_of_a_slow_tokenizer_change_the_fingerprint(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    vocabulary = write(tmp_path / "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nA\n")
    kinds = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "character"}
    found = []
    for name, lower in (("one", True), ("copy", True), ("other", False)):
        slow = BertJapaneseTokenizer(str(vocabulary), do_lower_case=lower, **kinds)
        slow.save_pretrained(tmp_path / name)
        encoder.tokenizer = BertJapaneseTokenizer.from_pretrained(tmp_path / name)
        found.append(model_fingerprint(encoder))
    assert found[0] == found[1] != found[2]


def test_copying_or_using_a_model_keeps_the_fingerprint(
    encoder: SentenceEncoder, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    fingerprint = model_fingerprint(encoder)
    encoder.encode(SENTENCES)
    assert model_fingerprint(encoder) == fingerprint
    shutil.copytree(tiny_bert_dir, tmp_path / "copy")
    copy = load_encoder(tmp_path / "copy", "mean")
    poolers = [each.model.pooler.dense.weight for each in (encoder, copy)]
    assert not torch.equal(*poolers)  # they are initialised at random
    assert model_fingerprint(copy) == fingerprint
