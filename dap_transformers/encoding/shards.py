"""Sentence vectors that several processes share, in memory or on disk.

`SharedEncoder` encodes each distinct sentence once. `embed_to_disk` encodes texts of any length
into shards that outlive a stopped run.

A shard is a .npy file of the vectors of consecutive sentences, such as `shard-000003-1f….npy`. The
name has the shard's number and a hash of the model and the sentences, so a run finds the shards of
an earlier run with the same model and text. It gets its name once it is whole and on the disk.

Only one run at a time may use a folder. The processes of one launch share it.

Legend: `N` sentences, `D` dimensions, `n` sentences of a shard or a piece.
"""

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from tqdm.auto import tqdm

from dap_transformers.encoding.encoder import Encoder, SentenceEncoder
from dap_transformers.errors import UserError, counted
from dap_transformers.files import whole_file
from dap_transformers.processes import launched
from dap_transformers.tokenizer import tokenizer_state

logger = logging.getLogger(__name__)

#: Sentences of a shard. A kill loses at most one shard per process, and processes share whole
#: shards.
SHARD_SIZE = 16384
#: Sentences encoded between two steps of the progress bar, and in one call of a cluster's encoder.
PIECE = 1024
#: Names of shards, and of the unfinished files that a kill leaves (`whole_file`).
OUR_NAMES = re.compile(r"\.?shard-\d{6,}-[0-9a-f]{16}\.npy(\.[0-9a-f]{8}\.tmp)?")
#: Fields of a config that say where it came from, and not what the model computes.
ORIGIN = ("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map")


# ------------------------------------------------------------------------------ several processes


class SharedEncoder:
    """An encoder that encodes each distinct sentence once, whoever asks for its vector.

    The processes of a launch divide the sentences among them, so all processes must call `encode`
    with the same sentences. Attributes that this class lacks are taken from `encoder`.
    """

    def __init__(self, encoder: Encoder, progress: bool = False) -> None:
        self.encoder = encoder
        self.progress = progress
        self._vector_of: dict[str, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def for_task(self, task: str) -> "SharedEncoder":
        """Return a shared encoder with the model's prompt for a task, which has no vectors yet."""
        return SharedEncoder(self.encoder.for_task(task), self.progress)

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Return the vectors (N, D) of N sentences, in every process.

        A call with all sentences of an evaluation makes the best batches.
        """
        if not len(sentences):
            return self.encoder.encode([])
        new = [each for each in dict.fromkeys(sentences) if each not in self._vector_of]
        if new:
            self._vector_of |= zip(new, self._encode_new(new), strict=True)
        return np.stack([self._vector_of[sentence] for sentence in sentences])

    def _encode_new(self, sentences: list[str]) -> np.ndarray:
        """Return the vectors (N, D) of sentences, of which each process encodes its share."""
        state = launched()
        step = state.num_processes
        share = sentences[state.process_index :: step]
        # Only our own encoders have a progress bar.
        options = {"progress": True} if self.progress else {}
        parts = gather_object([self.encoder.encode(share, **options)])
        vectors = np.empty((len(sentences), parts[0].shape[1]), np.float32)
        for rank, part in enumerate(parts):
            vectors[rank::step] = part
        require_finite(vectors, sentences)
        return vectors


# ------------------------------------------------------------------------------------ fingerprint


def model_fingerprint(encoder: SentenceEncoder) -> str:
    """Return a SHA-256, in hexadecimal, of everything that the vectors of an encoder depend on.

    It excludes the path, so a copy of a model has the same fingerprint. It also excludes the
    pooler: no vector comes from it, and its weights are random at each loading if the checkpoint
    lacks them.
    """
    modules = nn.ModuleList([encoder.model, encoder.after])
    names = ("pooling", "prefix", "max_seq_length", "bf16")
    settings = [getattr(encoder, name) for name in names]
    config = encoder.model.config.to_dict()
    config = {key: value for key, value in config.items() if key not in ORIGIN}

    digest = hashlib.sha256()
    for part in (settings, str(modules), config, tokenizer_state(encoder.tokenizer)):
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    for name, tensor in sorted(modules.state_dict().items()):
        if "pooler" not in name.split("."):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            values = tensor.detach().cpu().contiguous().flatten()
            digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------- shards


def embed_to_disk(
    encoder: Encoder,
    sentences: Iterable[str],
    folder: str | Path,
    **options: Any,
) -> np.ndarray:
    """Encode sentences as `write_shards` does, and return their vectors (N, D), mapped into memory.

    The options are those of `write_shards`.

    A warning tells how many of the sentences that were encoded now were cut. Several shards are
    joined in a temporary file in the folder, which takes their size once more until the result is
    deleted. In a launch only the first process gets the vectors, and the others get (0, D).
    """
    before = encoder.cut
    shards = write_shards(encoder, sentences, folder, **options)
    cut = sum(gather_object([encoder.cut - before]))
    if cut and launched().is_main_process:
        text = "%s: %s cut after %d tokens (max_seq_length)"
        logger.warning(text, folder, counted(cut, "sentence"), encoder.max_seq_length)
    if not shards or not launched().is_main_process:
        return encoder.encode([])
    parts = [np.load(shard, mmap_mode="r") for shard in shards]
    if len(parts) == 1:
        return parts[0]
    shape = sum(map(len, parts)), parts[0].shape[1]
    with tempfile.TemporaryFile(dir=folder) as file:
        for part in parts:
            file.write(part.data)
        file.flush()
        return np.memmap(file, parts[0].dtype, "r", shape=shape)


def write_shards(
    encoder: Encoder,
    sentences: Iterable[str],
    folder: str | Path,
    shard_size: int = SHARD_SIZE,
    progress: bool = False,
    where: Callable[[int], str] = "sentence {}".format,
    fingerprint: str | None = None,
    name: str = "",
) -> list[Path]:
    """Encode sentences into the shards of a folder. Return them in order, in every process.

    Complete shards of an earlier run with the same model and text are not encoded again. Memory
    holds the text and the vectors of one shard. If no shard fails, shards of another model or text
    are removed.

    The processes of a launch share the shards and wait for each other. All of them need the same
    text and the same folder.

    Args:
        sentences: read once, in order. The progress bar shows an end if they have a length.
        where: function that returns a sentence's name for error messages, such as "a.txt, line 3",
            given its number from 0.
        fingerprint: the encoder's `model_fingerprint`. None computes it.
        name: what the progress bar calls the sentences. Default: the folder's name.

    Raises:
        UserError: if a vector has NaN or infinity, in every process.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = fingerprint or model_fingerprint(encoder)
    state = launched()
    shards: list[Path] = []
    failed: list[UserError] = []
    with tqdm(
        total=length_hint(sentences) or None,
        desc=f"encoding {name or folder.name}",
        unit=" sentences",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        stream = iter(sentences)
        while text := list(islice(stream, shard_size)):
            number = len(shards)
            shard = folder / f"shard-{number:06d}-{hash_of_text(fingerprint, text)}.npy"
            shards.append(shard)
            is_mine = number % state.num_processes == state.process_index
            if not is_mine or shard.is_file():
                bar.update(len(text))
            else:
                try:
                    vectors = encode_pieces(encoder, text, bar)  # (n, D)
                    require_finite(vectors, text, where, number * shard_size)
                except UserError as error:
                    failed.append(error)
                    break
                with whole_file(shard) as file:
                    np.save(file, vectors)

    # Here all processes wait for each other, and learn what failed in any.
    failed = gather_object(failed)
    if failed:
        raise failed[0]
    if state.is_main_process:
        for path in set(folder.iterdir()) - set(shards):
            if OUR_NAMES.fullmatch(path.name):
                path.unlink(missing_ok=True)
    return shards


def hash_of_text(fingerprint: str, text: Sequence[str]) -> str:
    """Return 16 hexadecimal digits of a hash of a model's fingerprint and a list of sentences."""
    digest = hashlib.sha256(fingerprint.encode())
    for sentence in text:
        data = sentence.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def encode_pieces(encoder: Encoder, text: Sequence[str], bar: tqdm) -> np.ndarray:
    """Encode n sentences in pieces of `PIECE`, so that the progress bar moves. Return (n, D).

    The sentences of a piece have similar lengths, and the longest sentences come first. A Ray
    cluster has a method `encode_each`, which encodes several pieces at the same time.
    """
    order = sorted(range(len(text)), key=lambda row: -len(text[row]))  # longest first
    pieces = []
    for start in range(0, len(order), PIECE):
        pieces.append([text[row] for row in order[start : start + PIECE]])
    if hasattr(encoder, "encode_each"):
        results = encoder.encode_each(pieces)
    else:
        results = map(encoder.encode, pieces)
    found = []
    for vectors in results:
        found.append(vectors)  # (n, D)
        bar.update(len(vectors))
    return np.concatenate(found)[np.argsort(order)].astype(np.float32, copy=False)


def require_finite(
    vectors: np.ndarray,
    text: Sequence[str],
    where: Callable[[int], str] = "sentence {}".format,
    first: int = 0,
) -> None:
    """Raise `UserError` if a vector (n, D) has NaN or infinity. `where` takes `first` + i."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(bad):
        row = int(bad[0])
        raise UserError(
            f"{where(first + row)}: NaN or infinity in the vector of {text[row][:60]!r} (one of "
            f"{len(bad)} such vectors): check the model's weights, or leave bf16 out"
        )
