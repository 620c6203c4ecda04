"""From files of raw parallel text to training pairs on disk: the steps, their processes, and resuming (no models).

1. `clean_file`, for each file: repair, filter, leak check, keys of what is left; text that the sample cannot need is
   let go at once.
2. `select_language`, for each language: duplicates, the sample, the dev sentences.
3. `find_shared`: English sentences that any dev set holds out, and those that occur more than once.
4. `write_language`, for each language: the shards.

The result of a step lies in a folder of its own, which has its final name only when it is whole. A run that was
killed goes on behind the finished ones. Processes share out whole files and languages: a single large file is the work
of one. Whatever the number of processes, the result is the same to the byte.
Memory: a process holds a block of pairs, or the keys of one range (`deduplication.PART`) and a byte for each pair of a
language, or one row group. Everything else is on the disk: 16 bytes for each pair that passes the filters, and the
text and 24 bytes of those that the sample may need.

Shapes: N pairs of a block or language.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dap.archives import disk_path
from dap.cleaning import Cleaner, CleaningOptions, load_identifier
from dap.deduplication import (
    Admission,
    contains,
    count_distinct,
    normalise_all,
    pair_keys,
    ranks,
    repeated_values,
    sample,
)
from dap.formats import BitextFile, read_tables
from dap.leaks import LeakIndex
from dap.processes import workers
from dap.shards import ROW_GROUP, SCHEMA, ShardWriter, new_folder

BLOCK = 50_000  # pairs cleaned at a time
KEYS = ("all", "exact", "ranks", "targets")  # files of uint64
_CLEANED = pa.schema({"source": pa.string(), "target": pa.string(), "text_hash": pa.uint64()})


@dataclass(frozen=True)
class Source:
    """One input file.

    Attributes:
        number: its place among all files.
        origin: name under which its pairs go out.
        key: names what is cleaned of it; its own for each file and way of cleaning it.
    """

    number: int
    file: BitextFile
    origin: str
    key: str = ""

    @property
    def language(self) -> str:
        return self.file.language


@dataclass(frozen=True)
class Plan:
    """What shapes the result, and where it goes; passed to every process.

    Attributes:
        output_dir: of `train/`, `dev/` and what describes them.
        work_dir: of what is needed to go on; removed at the end.
        max_pairs: most pairs a language; None for all.
        dev_pairs: most dev pairs a language, and at most a tenth of its pairs.
        shard_size: pairs of a shard.
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
    max_bad_lines: float = 0.001
    check_leaks: bool = False
    list_leaks: bool = False
    tokenizer: str | None = None
    target_vocabulary: str | None = None
    language_identifier: str | None = None

    def cleaned(self, source: Source) -> Path:
        return self.work_dir / f"clean-{source.key or source.number}"

    def selected(self, language: str) -> Path:
        return self.work_dir / f"select-{language}"

    def written(self, language: str) -> Path:
        return self.work_dir / f"write-{language}"


def prepare(plan: Plan, sources: Sequence[Source], num_workers: int) -> dict[str, Any]:
    """All steps that are not done yet.

    Returns:
        language -> its counts, which `clean_file`, `select_language` and `write_language` name.

    Raises:
        ValueError: input as `read_tables`, no space left on the device, or a process that was killed.
    """
    for left in (*plan.work_dir.glob("*.tmp"), *plan.output_dir.glob("*/.*.tmp")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    languages: dict[str, tuple[Source, ...]] = {}
    for source in sources:
        languages[source.language] = (*languages.get(source.language, ()), source)
    largest = sorted(sources, key=lambda source: -_bytes(source.file))
    with workers(num_workers) as run:
        run("clean", clean_file, [(plan, s) for s in largest if not plan.cleaned(s).exists()])
        todo = [(plan, *item) for item in languages.items() if not plan.selected(item[0]).exists()]
        run("select", select_language, todo)
        find_shared(plan, list(languages))
        todo = [(plan, *item) for item in languages.items() if not plan.written(item[0]).exists()]
        run("write", write_language, todo)
    return {language: _counts(plan, language, parts) for language, parts in languages.items()}


def _counts(plan: Plan, language: str, sources: Sequence[Source]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for source in sources:
        counts.update(_read_json(plan.cleaned(source) / "counts.json"))
    return {
        **counts,
        **_read_json(plan.selected(language) / "counts.json"),
        **_read_json(plan.written(language) / "counts.json"),
    }


def _bytes(file: BitextFile) -> int:
    paths = {disk_path(path) for path in file.paths}  # both sides may be in one archive
    return sum(path.stat().st_size for path in paths if path.is_file())


# 1. Cleaning


def clean_file(plan: Plan, source: Source) -> None:
    """The pairs of one file that pass: their text, and the keys by which `select_language` chooses among them.

    Counts `read`, `unreadable` (lines; those behind the last pair are not seen), the repairs and reasons of
    `cleaning`, and `leak`.
    """
    with new_folder(plan.cleaned(source)) as folder, _CleanedRows(folder, plan) as rows:
        clean, check = _cleaner(plan, source.language), _LeakCheck(plan, source, folder)
        counts = Counter({"read": 0, "unreadable": 0})
        last = 0
        for table in read_tables(source.file, plan.max_bad_lines, BLOCK):
            pairs, found = clean(pl.from_arrow(table))
            counts.update(found, read=len(table))
            counts["leak"] += rows.add(pairs, check)
            last = table["line"][-1].as_py()
        if source.file.format not in ("tmx", "po", "hub"):  # where lines are not pairs
            counts["unreadable"] = last - counts["read"]
        _write_json(counts, folder / "counts.json")


def _cleaner(plan: Plan, language: str) -> Cleaner:
    tokenizer = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    identify = load_identifier(plan.language_identifier) if plan.language_identifier else None
    return Cleaner(language, plan.cleaning, plan.target_language, tokenizer, identify)


class _CleanedRows:
    """Writes `rows.parquet` (what the sample may need), its `ranks` and `targets`, and `all` and `exact` of all."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._seed, self._admit = plan.seed, Admission(plan.max_pairs)
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
        for side, side_letters, side_keys in zip(("source", "target"), letters, keys):
            leaks = self._index(side_letters, side_keys)
            marked[leaks.rows] = True
            if self._path and len(leaks.rows):
                with open(self._path, "a", encoding="utf-8") as file:
                    file.writelines(self._lines(pairs, side, leaks))
        return marked

    def _lines(self, pairs: pl.DataFrame, side: str, leaks: Any) -> Iterator[str]:
        for row, sentence, share, equal in zip(leaks.rows, leaks.sentences, leaks.containment, leaks.equal):
            found = {"language": self._source.language, "origin": self._source.origin}
            found |= {"line": pairs["line"][int(row)], "side": side, "text": pairs[side][int(row)]}
            found |= {"evaluation": self._index.sentences[sentence], "equal": bool(equal), "containment": float(share)}
            yield json.dumps(found, ensure_ascii=False) + "\n"


@cache
def _fast_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {name}: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {name} is a slow one ({type(tokenizer).__name__}); give a fast one")
    return tokenizer


@cache
def load_tokenizer(name: str) -> Any:
    """The Rust tokenizer (`tokenizers.Tokenizer`) behind a fast tokenizer, without truncation and padding.

    Raises:
        ValueError: there is no such tokenizer, or it is a slow one.
    """
    backend = _fast_tokenizer(name).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


def special_ids(name: str) -> list[int]:
    """Ids of a tokenizer that no sentence's text gives, CLS and padding; SEP, which RTL predicts, is not of them."""
    tokenizer = _fast_tokenizer(name)
    return sorted({tokenizer.cls_token_id, tokenizer.pad_token_id} - {tokenizer.sep_token_id, None})


def vocabulary_size(name: str) -> int:
    """Ids of a tokenizer, `len` of it.

    Raises:
        ValueError: as `load_tokenizer`; ids are left out, so that some are beyond this number.
    """
    ids = load_tokenizer(name).get_vocab(with_added_tokens=True).values()
    if max(ids) >= len(set(ids)):
        raise ValueError(f"tokenizer {name} has {len(set(ids))} tokens, but ids up to {max(ids)}: number them 0, 1, …")
    return len(set(ids))


# 2. Choosing


def select_language(plan: Plan, language: str, sources: Sequence[Source]) -> None:
    """Which cleaned pairs of a language to keep, and which of these are its dev set.

    Of equal pairs (as normalised) the first of the first file is kept; of what is left the `max_pairs` whose seeded
    hash is smallest; of these, as `dap.data.split_validation`, those whose English sentence's is smallest for dev.

    Counts `exact_duplicate`, `near_duplicate` (equal as normalised only), `not_sampled`.
    """
    with new_folder(plan.selected(language)) as folder:
        parts = {name: [_keys(plan.cleaned(s) / name) for s in sources] for name in KEYS}
        pairs = sum(map(len, parts["all"]))
        texts, different = count_distinct(parts["exact"]), count_distinct(parts["all"])
        kept = sample(parts["ranks"], plan.max_pairs)  # (N,)
        start = 0
        with open(folder / "targets", "wb") as file:
            for targets in parts["targets"]:
                file.write(targets[kept[start : start + len(targets)]].tobytes())
                start += len(targets)
        targets = _keys(folder / "targets")  # of the kept ones
        dev = sample([targets], min(plan.dev_pairs, len(targets) // 10))
        np.save(folder / "kept.npy", kept)
        np.save(folder / "dev.npy", dev)
        counts = {"exact_duplicate": pairs - texts, "near_duplicate": texts - different}
        _write_json(counts | {"not_sampled": different - len(targets)}, folder / "counts.json")


# 3. Over all languages


def find_shared(plan: Plan, languages: Sequence[str]) -> None:
    """Ranks of English sentences: `held` out for a dev set of any language, and `repeated` in several pairs."""
    folder = plan.work_dir / "shared"
    if folder.exists():
        return
    with new_folder(folder) as new:
        targets = [_keys(plan.selected(language) / "targets") for language in languages]
        held = [keys[np.load(plan.selected(code) / "dev.npy")] for code, keys in zip(languages, targets)]
        np.unique(np.concatenate(held)).tofile(new / "held")
        repeated_values(targets).tofile(new / "repeated")


# 4. Writing


def write_language(plan: Plan, language: str, sources: Sequence[Source]) -> None:
    """The shards `train/{number}.{language}-en.parquet` and `dev/…`, in the order of the files.

    Counts `held_out` (training pairs lost because a dev set has their English sentence), `train`, `dev`,
    `target_repeated`, and `origins`: training pairs of each. Gathers the vocabulary of the English training side.
    """
    counts: Counter[str] = Counter(train=0, dev=0, held_out=0, target_repeated=0)
    origins: Counter[str] = Counter()
    vocabulary = _Vocabulary(plan.target_vocabulary)
    name = f"{language}-{plan.target_language}"
    with (
        new_folder(plan.written(language)) as folder,
        ShardWriter(plan.output_dir / "train", name, plan.shard_size) as train,
        ShardWriter(plan.output_dir / "dev", name, plan.shard_size) as dev,
    ):
        for source, table, is_dev, is_held in _kept_tables(plan, language, sources):
            training = table.filter(pa.array(~is_held))
            train.add(training)
            dev.add(table.filter(pa.array(is_dev)))
            vocabulary.add(training["target"].to_pylist())
            origins[source.origin] += len(training)
            lost = int((is_held & ~is_dev).sum())
            counts.update(train=len(training), dev=int(is_dev.sum()), held_out=lost)
            counts["target_repeated"] += training["target_repeated"].to_numpy().sum().item()
        vocabulary.save(folder / "vocabulary.npy")
        shards = {"train_shards": train.close(), "dev_shards": dev.close()}
        _write_json(counts | shards | {"origins": origins}, folder / "counts.json")


def _kept_tables(
    plan: Plan, language: str, sources: Sequence[Source]
) -> Iterator[tuple[Source, pa.Table, np.ndarray, np.ndarray]]:
    """The chosen pairs in blocks, with what is known of them: (N,) bool each for dev and for held out English."""
    kept, dev = (np.load(plan.selected(language) / f"{name}.npy") for name in ("kept", "dev"))
    targets = _keys(plan.selected(language) / "targets")
    held, repeated = (_keys(plan.work_dir / "shared" / name) for name in ("held", "repeated"))
    row = place = 0
    for source in sources:
        with pq.ParquetFile(plan.cleaned(source) / "rows.parquet") as file:
            for batch in file.iter_batches(ROW_GROUP):
                chosen = batch.filter(pa.array(kept[row : row + len(batch)]))
                row += len(batch)
                here = slice(place, place + len(chosen))
                place += len(chosen)
                columns = [chosen["source"], chosen["target"], pa.repeat(source.origin, len(chosen))]
                columns += [chosen["text_hash"], pa.array(contains(repeated, targets[here]))]
                table = pa.Table.from_arrays(
                    [pa.chunked_array([c], t) for c, t in zip(columns, SCHEMA.types)], schema=SCHEMA
                )
                yield source, table, dev[here], contains(held, targets[here])


class _Vocabulary:
    """Ids that a tokenizer gives texts, with its special tokens."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer else None
        self._seen = np.zeros(vocabulary_size(tokenizer) if tokenizer else 0, dtype=bool)

    def add(self, texts: list[str]) -> None:
        if self._tokenizer is not None:
            for code in self._tokenizer.encode_batch_fast(texts):
                self._seen[code.ids] = True

    def save(self, path: Path) -> None:
        np.save(path, self._seen)


def _keys(path: Path) -> np.ndarray:
    """A file of uint64 as a memory map, which cannot be empty."""
    return np.memmap(path, np.uint64, "r") if path.stat().st_size else np.empty(0, np.uint64)


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
