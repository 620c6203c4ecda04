"""The first step of `prepare_data.py`: repair, filter and leak check of each file or block of one (no models).

Shapes: N pairs of a table.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dap.prepare.deduplication import Admission, normalise_all, pair_keys, ranks
from dap.prepare.filters import Cleaner, load_identifier
from dap.prepare.leaks import LeakIndex, Leaks
from dap.prepare.plan import Plan, Source, keys_of, read_json
from dap.prepare.shards import full_device, new_folder
from dap.prepare.tokens import load_tokens
from dap.reports import write_json
from dap.text import LineAudit, audited_tables, cut, finish_file

TABLE_ROWS = 50_000  # pairs cleaned at a time
KEYS = ("all", "exact", "ranks", "targets")  # files of uint64
_CLEANED = pa.schema({"source": pa.string(), "target": pa.string(), "text_hash": pa.uint64()})


def cut_file(plan: Plan, source: Source) -> None:
    """Writes where a large file is cut."""
    blocks = [asdict(block) for block in cut(source.file, plan.block_bytes)]
    with full_device(plan.blocks(source)):
        write_json({"blocks": blocks}, plan.blocks(source))


def clean_part(plan: Plan, source: Source) -> None:
    """The pairs of one file or block that pass: their text, and the keys by which a sample is drawn from them.

    Counts `read`, `unreadable` (lines), the repairs and reasons of `cleaning`, and `leak`. Blocks of the same file
    that are finished tell what its sample cannot need, and how many bad lines it has already.

    Raises:
        ValueError: as `audited_tables`, a file without pairs, or no space left on the device.
    """
    finished = _finished_blocks(plan, source)
    audit = _audit(plan, source, finished)
    with new_folder(plan.cleaned(source)) as folder, _CleanedRows(folder, plan, finished) as rows:
        clean, check = _cleaner(plan, source.language), _LeakCheck(plan, source, folder)
        counts = Counter(read=0)
        for table in audited_tables(source.file, audit, TABLE_ROWS, source.block):
            pairs, found = clean(pl.from_arrow(table))
            counts.update(found, read=len(table))
            counts["leak"] += rows.add(pairs, check)
        if source.block is None:
            finish_file(source.file, audit, counts["read"])
        write_json(counts | {"unreadable": audit.bad}, folder / "counts.json")
        write_json({"bad": audit.bad, "first": audit.first}, folder / "bad.json")


def _finished_blocks(plan: Plan, source: Source) -> list[Path]:
    """Folders of other blocks of the same file."""
    folders = map(plan.cleaned, plan.parts(source)) if source.block else ()
    return [folder for folder in folders if folder.exists()]


def _audit(plan: Plan, source: Source, finished: Sequence[Path]) -> LineAudit:
    if source.block is None:
        return LineAudit(str(source.file), plan.max_bad_lines)
    bad = sum(read_json(folder / "bad.json")["bad"] for folder in finished)
    return LineAudit(str(source.file), plan.max_bad_lines, quiet=True, lines=source.block.rows, elsewhere=bad)


def judge(plan: Plan, source: Source) -> None:
    """The verdict over a file whose blocks are all cleaned, and warnings of its bad lines.

    Raises:
        ValueError: too many bad lines, or no pair.
    """
    if not plan.blocks(source).exists():
        return
    audit, pairs = LineAudit(str(source.file), plan.max_bad_lines), 0
    for part in plan.parts(source):
        audit.take(**read_json(plan.cleaned(part) / "bad.json"))
        audit.lines = part.block.rows
        pairs += read_json(plan.cleaned(part) / "counts.json")["read"]
    finish_file(source.file, audit, pairs)


def _cleaner(plan: Plan, language: str) -> Cleaner:
    tokens = load_tokens(plan.tokenizer) if plan.tokenizer else None
    identify = load_identifier(plan.language_identifier) if plan.language_identifier else None
    return Cleaner(language, plan.cleaning, plan.target_language, tokens, identify)


class _CleanedRows:
    """Writes `rows.parquet` (what the sample may need), its `ranks` and `targets`, and `all` and `exact` of all."""

    def __init__(self, folder: Path, plan: Plan, finished: Sequence[Path]) -> None:
        self._seed, self._admit = plan.seed, Admission(plan.max_pairs)
        if finished and plan.max_pairs:
            self._admit(np.concatenate([keys_of(other / "ranks") for other in finished]))
        self._text = pq.ParquetWriter(folder / "rows.parquet", _CLEANED, compression="zstd", compression_level=1)
        self._keys = {name: (folder / name).open("wb") for name in KEYS}

    def add(self, pairs: pl.DataFrame, check: "_LeakCheck") -> int:
        """Adds the pairs without a leak, and tells the number of the others."""
        sides = [normalise_all(pairs[side].to_list()) for side in ("source", "target")]
        source, target = (side.keys() for side in sides)
        clear = ~check(pairs, sides, (source, target))
        pairs = pairs.filter(pl.Series(clear))
        text_hash = pair_keys(source, target)[clear]
        order = ranks(text_hash, self._seed)
        admitted = self._admit(order)
        self._write("all", order)
        self._write("exact", pairs.select(pl.struct("source", "target").hash()).to_series().to_numpy())
        self._write("ranks", order[admitted])
        self._write("targets", ranks(target[clear], self._seed)[admitted])
        text = pairs.select("source", "target", text_hash=pl.Series(text_hash)).filter(pl.Series(admitted))
        self._text.write_table(text.to_arrow().cast(_CLEANED))
        return int((~clear).sum())

    def _write(self, name: str, values: np.ndarray) -> None:
        self._keys[name].write(np.ascontiguousarray(values, np.uint64).tobytes())

    def __enter__(self) -> "_CleanedRows":
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._text, *self._keys.values()):
            file.close()


class _LeakCheck:
    """Marks the pairs with a side that an evaluation sentence leaks into, and keeps them in `leaks.jsonl` if asked."""

    def __init__(self, plan: Plan, source: Source, folder: Path) -> None:
        self._index = LeakIndex.load(plan.work_dir / "leaks") if plan.check_leaks else None
        self._source, self._path = source, folder / "leaks.jsonl" if plan.list_leaks else None

    def __call__(self, pairs: pl.DataFrame, letters: list[Any], keys: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Whether each pair has a leak: (N,) bool."""
        marked = np.zeros(len(pairs), dtype=bool)
        if self._index is None:
            return marked
        records: list[tuple[int, dict[str, Any]]] = []
        for side, side_letters, side_keys in zip(("source", "target"), letters, keys):
            leaks = self._index(side_letters, side_keys)
            marked[leaks.rows] = True
            records += self._records(pairs, side, leaks) if self._path else ()
        if records:
            with open(self._path, "a", encoding="utf-8") as file:
                in_order = sorted(records, key=lambda record: record[0])
                file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for _, record in in_order)
        return marked

    def _records(self, pairs: pl.DataFrame, side: str, leaks: Leaks) -> Iterator[tuple[int, dict[str, Any]]]:
        """(row, what is listed) of each leak."""
        for row, sentence, share, equal in zip(leaks.rows, leaks.sentences, leaks.containment, leaks.equal):
            found = {"language": self._source.language, "origin": self._source.origin}
            found |= {"line": pairs["line"][int(row)], "side": side, "text": pairs[side][int(row)]}
            found |= {"evaluation": self._index.sentences[sentence], "equal": bool(equal), "containment": float(share)}
            yield int(row), found
