"""What a run of `prepare_data.py` reads, how it shapes the result, and where each step lies on the disk (no models).

Shapes: none.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dap.prepare.filters import CleaningOptions
from dap.text import BitextFile, Block, disk_path


@dataclass(frozen=True)
class Source:
    """One input file, or a block of one.

    Attributes:
        number: its place among all files.
        origin: name under which its pairs go out.
        key: names what is cleaned of it; its own for each file and way of cleaning it.
        block: None for the whole file.
    """

    number: int
    file: BitextFile
    origin: str
    key: str = ""
    block: Block | None = None

    @property
    def language(self) -> str:
        return self.file.language

    @property
    def bytes(self) -> int:
        """Size of the whole file on the disk."""
        paths = {disk_path(path) for path in self.file.paths}  # both sides may be in one archive
        return sum(path.stat().st_size for path in paths if path.is_file())


@dataclass(frozen=True)
class Plan:
    """What shapes the result, and where it goes; passed to every process.

    Attributes:
        output_dir: of `train/`, `dev/` and what describes them.
        work_dir: of what is needed to go on; removed at the end.
        max_pairs: most pairs a language; None for all.
        dev_pairs: most dev pairs a language, and at most a tenth of its pairs.
        shard_size: pairs of a shard.
        block_bytes: larger files are cut into blocks of about this size, where they can be; the result is the same.
        max_bad_lines: share of a file's lines that may be bad.
        check_leaks: whether `work_dir` has an index of evaluation sentences; `list_leaks` keeps what it finds.
        tokenizer: name of the tokenizer whose tokens the filters count; None counts words.
        target_vocabulary: name of the tokenizer whose ids of the English training side are gathered.
    """

    output_dir: Path
    work_dir: Path
    cleaning: CleaningOptions
    target_language: str = "en"
    max_pairs: int | None = 1_000_000
    dev_pairs: int = 10_000
    seed: int = 0
    shard_size: int = 1_000_000
    block_bytes: int = 64 << 20
    max_bad_lines: float = 0.001
    check_leaks: bool = False
    list_leaks: bool = False
    tokenizer: str | None = None
    target_vocabulary: str | None = None
    language_identifier: str | None = None

    def file_folder(self, source: Source) -> Path:
        """Of all that is cleaned of a file, and of `blocks.json`, where it is cut."""
        return self.work_dir / f"clean-{source.key or source.number}"

    def blocks(self, source: Source) -> Path:
        return self.file_folder(source) / "blocks.json"

    def cleaned(self, source: Source) -> Path:
        """Of what is cleaned of one block, or of a file that is not cut."""
        return self.file_folder(source) / (f"{source.block.number:05d}" if source.block else "whole")

    def parts(self, source: Source) -> list[Source]:
        """The blocks of a file, or the file itself if it is not cut."""
        if not self.blocks(source).exists():
            return [source]
        return [replace(source, block=Block(**block)) for block in read_json(self.blocks(source))["blocks"]]

    def selected(self, language: str) -> Path:
        return self.work_dir / f"select-{language}"

    def written(self, language: str) -> Path:
        return self.work_dir / f"write-{language}"


def keys_of(path: Path) -> np.ndarray:
    """A file of uint64 as a memory map, which cannot be empty."""
    return np.memmap(path, np.uint64, "r") if path.stat().st_size else np.empty(0, np.uint64)


class KeyFiles(Sequence[np.ndarray]):
    """Files of uint64, read one at a time when their turn comes: together they may be larger than the memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.total = sum(path.stat().st_size for path in paths) // 8  # keys

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: int) -> np.ndarray:
        return np.fromfile(self._paths[place], np.uint64)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
