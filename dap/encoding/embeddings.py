"""Sentence vectors on disk: encoded once in shards, which survive a kill and belong to one model and one text.

A shard is `shard-000003-1f….npy`: its number, then a hash of the model's fingerprint and the shard's sentences. It has
that name only when it is whole and on disk, so what carries the name can be used again, and what belongs to another
model or another text is not found. One run at a time may use a folder; the processes of a run share it.

Where the folder is the copy of an address (`dap.addresses`), a shard is sent there once it is whole, and a run that
lacks it fetches it.

Legend: `N` sentences, `D` dimensions.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from tqdm.auto import tqdm

from dap.addresses import fetch_path, send_path
from dap.disk_arrays import concatenate_on_disk, temporary_folder
from dap.encoding.sentence_encoder import LibraryEncoder, SentenceEncoder
from dap.errors import SHOWN, UserError, joined, one_line
from dap.file_io import disk_full, whole_file
from dap.tokenizers import tokenizer_state

#: Sentences of a shard: what a kill may lose, and the unit that processes share.
SHARD_SIZE = 16384
#: Sentences encoded between two steps of the progress bar.
PIECE = 1024
FORMAT = "1"
#: Entries of a config that say where it came from, not what the model computes.
ORIGIN = ("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map")
ANOTHER_FOLDER = "make room or choose another folder, then run again: whole shards are kept"

Encoder = SentenceEncoder | LibraryEncoder


class SentenceError(UserError):
    """Sentences that cannot be encoded, while others can."""


def launched() -> PartialState:
    """The processes of this launch, which know of each other on CPUs too; one may wait a week for another's shard."""
    cpu = not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    return PartialState(cpu=cpu, timeout=timedelta(days=7))


def encode_shared(encoder: Encoder, sentences: Sequence[str], *arguments: Any) -> np.ndarray:
    """`encoder.encode(sentences, *arguments)`, (N, D), on every process of a launch; each encodes its share."""
    state = launched()
    share = encoder.encode(sentences[state.process_index :: state.num_processes], *arguments)
    if state.num_processes == 1:
        return share
    vectors = np.empty((len(sentences), share.shape[1]), share.dtype)
    for rank, part in enumerate(gather_object([share])):
        vectors[rank :: state.num_processes] = part
    return vectors


def model_fingerprint(encoder: Encoder) -> str:
    """SHA-256 of all that shapes a vector: weights, config, tokenizer, pooling, prefix, length, bf16 and layer.

    The path does not count: a copy of the model has its fingerprint. Nor does the pooler, which no vector comes from
    and which a checkpoint may lack, so that it is random at each loading.
    """
    model, digest = encoder.model, hashlib.sha256(FORMAT.encode())
    tokenizer = getattr(encoder, "tokenizer", None) or model.tokenizer
    settings = (encoder.pooling, encoder.prefix, encoder.max_seq_length, encoder.bf16, str(model))
    settings += () if encoder.layer is None else (encoder.layer,)
    for part in (settings, _config(getattr(model, "config", None)), tokenizer_state(tokenizer)):
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if "pooler" not in name.split("."):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _config(config: Any) -> Any:
    """What the model computes, as plain JSON values, nested configs included."""
    content = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(content, dict):
        return content
    return {key: _config(value) for key, value in content.items() if key not in ORIGIN}


def embed_to_disk(
    encoder: Encoder,
    sentences: Iterable[str],
    folder: str | Path,
    shard_size: int = SHARD_SIZE,
    token_budget: int = 4096,
    progress: bool = False,
    where: Callable[[int], str] = "sentence {}".format,
    fingerprint: str | None = None,
) -> np.ndarray:
    """The sentences' vectors, (N, D) float32, read-only and memory mapped; not normalised, as `encode` gives them.

    Finished shards in the folder are used again; a kill loses the shard being written. Only one shard's text is in
    memory at a time. Shards of another model or text are removed. Several shards are joined in an unnamed file in the
    same folder, which takes their size once more until the result is let go.

    A shard that cannot be encoded keeps none of the others from it, unless `SHOWN` have failed.

    The processes of a launch share the shards and wait for each other; all of them need the same text and the same
    folder. Only the first gets the vectors, the others get none: (0, D).

    Args:
        sentences: read once, in order; the progress bar knows its end if it has a length.
        token_budget: most tokens a batch; the vectors do not depend on it.
        where: what an error calls the sentence of a number, counted from 0.
        fingerprint: the encoder's `model_fingerprint`, for those who have it already.

    Raises:
        SentenceError: sentences that cannot be encoded, or have NaN or infinity in their vector; named.
        OSError: the disk is full; no incomplete shard is left.
    """
    folder, fingerprint, state = Path(folder), fingerprint or model_fingerprint(encoder), launched()
    shards: list[Path] = []
    failed: list[SentenceError] = []
    folder.mkdir(parents=True, exist_ok=True)
    total = len(sentences) if isinstance(sentences, Sized) else None
    with tqdm(
        total=total,
        desc=f"encoding {folder.name}",
        unit=" sentences",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for number, text in enumerate(_blocks(sentences, shard_size)):
            shard = folder / f"shard-{number:06d}-{_key(fingerprint, text)}.npy"
            shards.append(shard)
            if number % state.num_processes != state.process_index or _is_whole(shard, len(text)):
                bar.update(len(text))
                continue
            try:
                vectors = encode_pieces(encoder, text, token_budget, bar)  # (n, D)
                first = number * shard_size
                require_finite(
                    vectors, text, lambda row, first=first: where(first + row), " in its shard"
                )
            except SentenceError as error:
                failed.append(error)
                if len(failed) == SHOWN:
                    break
                continue
            _write_shard(vectors, shard)
    if failed := gather_object(failed):  # of all processes, which wait for each other here
        raise SentenceError(one_line(joined(failed)))
    if state.is_main_process:
        for other in set(folder.glob("*shard-[0-9]*-*")) - set(shards):
            other.unlink(missing_ok=True)
        send_path(folder)  # shards that an earlier run could not send
    return _join(shards, folder) if shards and state.is_main_process else encoder.encode([""])[:0]


def _blocks(sentences: Iterable[str], size: int) -> Iterator[list[str]]:
    if size < 1:
        raise UserError(f"shard_size={size}: at least 1 sentence")
    stream = iter(sentences)
    while block := list(islice(stream, size)):
        yield block


def _key(fingerprint: str, text: Sequence[str]) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for sentence in text:
        data = sentence.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def _is_whole(shard: Path, rows: int) -> bool:
    """Whether the shard exists and has its rows: a disk may have lost what it had promised to keep."""
    if not shard.is_file():
        fetch_path(shard)
    try:
        return len(np.load(shard, mmap_mode="r")) == rows
    except (OSError, ValueError, EOFError):
        return False


def encode_pieces(
    encoder: Encoder, text: Sequence[str], token_budget: int, bar: tqdm
) -> np.ndarray:
    """The vectors (n, D) of some text, encoded in pieces of like length, so that the bar moves.

    A cluster encodes the pieces at the same time.
    """
    order = sorted(range(len(text)), key=lambda i: -len(text[i]))
    pieces = [
        [text[i] for i in order[start : start + PIECE]] for start in range(0, len(order), PIECE)
    ]
    each = getattr(encoder, "encode_each", None)
    found = []
    for vectors in (
        each(pieces, token_budget)
        if each
        else (encoder.encode(piece, token_budget) for piece in pieces)
    ):
        found.append(vectors)  # (PIECE, D)
        bar.update(len(vectors))
    return np.concatenate(found)[np.argsort(order)].astype(np.float32, copy=False)


def require_finite(
    vectors: np.ndarray, text: Sequence[str], where: Callable[[int], str], among: str = ""
) -> None:
    """Raises `SentenceError` for NaN or infinity; `where` names the sentence of a row, `among` what all rows are."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(bad):
        raise SentenceError(
            f"{where(int(bad[0]))}: NaN or infinity in the vector of {text[bad[0]][:60]!r} (one of {len(bad)} such "
            f"vectors{among}): check the model's weights, or leave bf16 out"
        )


def write_vectors(vectors: np.ndarray, path: Path) -> None:
    """Writes a .npy file as `whole_file` does, whose errors it raises."""
    with whole_file(path, vectors.nbytes, ANOTHER_FOLDER) as file:
        np.lib.format.write_array_header_1_0(
            file, np.lib.format.header_data_from_array_1_0(vectors)
        )
        file.write(np.ascontiguousarray(vectors).data)  # tofile would hide the reason of a failure


def _write_shard(vectors: np.ndarray, shard: Path) -> None:
    """In place of another model's or text's shard of this number, and of what a kill has left unfinished."""
    for path in shard.parent.glob(f"*{shard.name.rsplit('-', 1)[0]}-*"):
        path.unlink(missing_ok=True)
    write_vectors(vectors, shard)
    send_path(shard)


def _join(shards: list[Path], folder: Path) -> np.ndarray:
    """The vectors of all shards as one memory map (N, D): of the only shard, or of an unnamed copy of several."""
    parts = [np.load(shard, mmap_mode="r") for shard in shards]
    if len(parts) == 1:
        return parts[0]
    size = sum(part.nbytes for part in parts)
    with disk_full(folder / "joined shards", size, ANOTHER_FOLDER), temporary_folder(folder):
        vectors = concatenate_on_disk(parts)
    vectors.flags.writeable = False
    return vectors
