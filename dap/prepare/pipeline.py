"""From files of raw parallel text to shards of training pairs: the steps, their processes, and resuming.

1. `clean_file`, for each file: repair, filter, leak check, keys of what is left. Text that the sample cannot need is
   let go at once.
2. `select_language`, for each language: duplicates, the sample, the dev sentences.
3. `find_shared`: English sentences that any dev set holds out, and those that come more than once.
4. `write_language`, for each language: the shards.

The result of a step lies in a folder of its own, which has its final name only when it is whole; a run that was killed
goes on behind the finished ones. The result is the same to the byte whatever the number of processes.

Shapes: N pairs of a table.
"""

import logging
import multiprocessing
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dap.errors import UserError
from dap.files import read_object, write_json
from dap.prepare.deduplication import Admission, count_distinct, normalise_all, pair_keys, ranks, repeated, sample
from dap.prepare.filters import SIDES, Cleaner, identified, load_identifier
from dap.prepare.leaks import LeakIndex
from dap.prepare.options import PrepareOptions
from dap.prepare.run_folder import VOCABULARY, Plan, RawFile, new_folder
from dap.prepare.tokens import load_tokenizer, special_ids, vocabulary_size
from dap.text import LineAudit, read_tables

logger = logging.getLogger(__name__)

ROW_GROUP = 65_536  # pairs
#: Of the shards. `text_hash` is the key of the normalised pair; `target_repeated` marks English sentences that other
#: training pairs, of any language, have too.
_TEXT = {"source": pa.string(), "target": pa.string()}
SCHEMA = pa.schema(_TEXT | {"origin": pa.string(), "text_hash": pa.uint64(), "target_repeated": pa.bool_()})
#: Of `keys.parquet`: the random place of each pair that passes, and what is the same for exactly equal ones.
_KEYS = pa.schema({"rank": pa.uint64(), "exact": pa.uint64()})
#: Of `rows.parquet`: the pairs that the sample may need; `english` is that of the English sentence.
_ROWS = pa.schema(_TEXT | dict.fromkeys(("text_hash", "rank", "english"), pa.uint64()))


def prepare(plan: Plan, files: Sequence[RawFile], num_workers: int) -> dict[str, Any]:
    """All steps that are not done yet.

    Returns:
        language -> its counts, which `clean_file`, `select_language` and `write_language` name.

    Raises:
        ValueError: input as `read_tables`, no space left on the device, or a process that was killed.
    """
    for left in (*plan.work_dir.glob("*.tmp"), *plan.output_dir.glob("*/.*.tmp")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    languages: dict[str, list[RawFile]] = {}
    for raw in files:
        languages.setdefault(raw.file.language, []).append(raw)

    def left_to(folder: Callable[[str], Path]) -> list[tuple]:
        return [(plan, *item) for item in languages.items() if not folder(item[0]).exists()]

    with workers(num_workers) as run:
        largest = sorted(files, key=lambda raw: -raw.bytes)
        run("clean", clean_file, [(plan, raw) for raw in largest if not plan.cleaned(raw).exists()])
        run("select", select_language, left_to(plan.selected))
        find_shared(plan, list(languages))
        run("write", write_language, left_to(plan.written))
    found: dict[str, dict[str, Any]] = {}
    for language, own in languages.items():
        counts: Counter[str] = Counter()
        for raw in own:
            counts.update(read_object(plan.cleaned(raw) / "counts.json"))
        selected, written = (read_object(folder(language) / "counts.json") for folder in (plan.selected, plan.written))
        found[language] = dict(counts) | selected | written
    return found


def check_names(options: PrepareOptions) -> None:
    """Loads what the options name, so that a wrong one is found before anything is written."""
    if options.tokenizer:
        load_tokenizer(options.tokenizer)
    if options.target_vocabulary:
        vocabulary_size(options.target_vocabulary)
    if options.language_identifier:
        identified(load_identifier(options.language_identifier), ["One sentence."])


# 1. Cleaning


def clean_file(plan: Plan, raw: RawFile) -> None:
    """The pairs of one file that pass: their keys, and the text of those that a sample may need.

    Counts `read`, `unreadable` (lines), the repairs and reasons of `Cleaner`, and `leak`.

    Raises:
        ValueError: as `read_tables`, a file without pairs, or no space left on the device.
    """
    options, audit = plan.options, LineAudit(str(raw.file), plan.options.max_bad_lines)
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    identify = load_identifier(options.language_identifier) if options.language_identifier else None
    clean = Cleaner(raw.file.language, options, tokenizer, identify)
    index = LeakIndex.load(plan.leaks) if plan.check_leaks else None
    admit, counts = Admission(options.max_pairs or None), Counter(read=0)
    with (
        new_folder(plan.cleaned(raw)) as folder,
        pq.ParquetWriter(folder / "keys.parquet", _KEYS, compression="none", use_dictionary=False) as keys,
        pq.ParquetWriter(folder / "rows.parquet", _ROWS, compression="zstd", use_dictionary=False) as rows,
        (folder / "leaks.jsonl").open("wb") as listed,
    ):
        for table in read_tables(raw.file, audit):
            pairs, found = clean(pl.from_arrow(table))  # repaired and filtered
            letters = [normalise_all(pairs[side].to_list()) for side in SIDES]
            source, target = (side.keys() for side in letters)
            text_hash = pair_keys(source, target)
            order = {"rank": ranks(text_hash, options.seed), "english": ranks(target, options.seed)}
            passed = pairs.with_columns(text_hash=text_hash, exact=pl.struct(*SIDES).hash(), **order)
            if index is not None:
                leaks = pl.concat(
                    index(side, key).with_columns(side=pl.lit(name))
                    for side, key, name in zip(letters, (source, target), SIDES)
                )
                passed = passed.filter(~pl.int_range(pl.len()).is_in(leaks["row"].implode()))
                if plan.list_leaks:
                    listed.write(_listed(leaks, pairs, raw).write_ndjson().encode())
            counts.update(found, read=len(table), leak=len(pairs) - len(passed))
            keys.write_table(passed.select(_KEYS.names).to_arrow())
            admitted = passed.filter(admit(passed["rank"].to_numpy()))
            rows.write_table(admitted.select(_ROWS.names).to_arrow().cast(_ROWS))
        write_json(counts | {"unreadable": audit.bad}, folder / "counts.json")


def _listed(leaks: pl.DataFrame, pairs: pl.DataFrame, raw: RawFile) -> pl.DataFrame:
    """What `--list_leaks` tells of leaks, in the order of the file."""
    found = leaks.sort("row", maintain_order=True).join(pairs.with_row_index("row"), on="row", maintain_order="left")
    return found.select(
        pl.lit(raw.file.language).alias("language"),
        pl.lit(raw.origin).alias("origin"),
        "line",
        "side",
        pl.when(pl.col("side") == "source").then("source").otherwise("target").alias("text"),
        "evaluation",
        "equal",
        "containment",
    )


# 2. Choosing


def select_language(plan: Plan, language: str, files: Sequence[RawFile]) -> None:
    """Which cleaned pairs of a language to keep, and which of these are its dev set.

    Of equal pairs (as normalised) the first of the first file is kept; of what is left the `max_pairs` whose seeded
    hash is smallest; of these, as `split_validation`, those whose English sentence's is smallest for dev.

    Counts `exact_duplicate`, `near_duplicate` (equal as normalised only), `not_sampled`.
    """
    with new_folder(plan.selected(language)) as folder:
        keys = pl.scan_parquet([plan.cleaned(raw) / "keys.parquet" for raw in files])
        rows = pl.scan_parquet([plan.cleaned(raw) / "rows.parquet" for raw in files], row_index_name="row")
        kept = sample(rows.select("row", "rank", "english"), "rank", plan.options.max_pairs or None)
        dev = sample(kept.lazy(), "english", min(plan.options.dev_pairs, len(kept) // 10))
        kept = kept.sort("row").select("row", "english", dev=pl.col("row").is_in(dev["row"].implode()))
        pq.write_table(kept.to_arrow(), folder / "kept.parquet")
        passed = keys.select(pl.len()).collect().item()
        texts, different = (count_distinct(keys, name) for name in _KEYS.names[::-1])
        counts = {"exact_duplicate": passed - texts, "near_duplicate": texts - different}
        write_json(counts | {"not_sampled": different - len(kept)}, folder / "counts.json")


# 3. Over all languages


def find_shared(plan: Plan, languages: Iterable[str]) -> None:
    """Keys of English sentences: those `held` out for a dev set of any language, those `repeated` in several pairs."""
    if (plan.work_dir / "shared").exists():
        return
    with new_folder(plan.work_dir / "shared") as folder:
        kept = pl.scan_parquet([plan.selected(language) / "kept.parquet" for language in languages])
        held = kept.filter("dev").select(pl.col("english").unique()).collect()
        pq.write_table(held.to_arrow(), folder / "held.parquet")
        pq.write_table(repeated(kept, "english").to_frame().to_arrow(), folder / "repeated.parquet")


# 4. Writing


def write_language(plan: Plan, language: str, files: Sequence[RawFile]) -> None:
    """The shards of a language in `train/` and `dev/`, in the order of the files.

    Counts `held_out` (training pairs lost because a dev set has their English sentence), `train`, `dev`,
    `target_repeated`, and `origins`: training pairs of each. Gathers the ids of the English training side.
    """
    origins = {str(plan.cleaned(raw) / "rows.parquet"): raw.origin for raw in files}
    held, again = (pl.read_parquet(plan.work_dir / f"shared/{name}.parquet") for name in ("held", "repeated"))
    marks = {
        "held_out": pl.col("english").is_in(held["english"].implode()),
        "target_repeated": pl.col("english").is_in(again["english"].implode()),
    }
    kept = pl.read_parquet(plan.selected(language) / "kept.parquet").with_columns(**marks)
    chosen = {"train": kept.filter(~pl.col("held_out")), "dev": kept.filter("dev")}
    counts: dict[str, Any] = {split: len(rows) for split, rows in chosen.items()}
    counts["held_out"] = len(kept) - counts["train"] - counts["dev"]
    counts["target_repeated"] = int(chosen["train"]["target_repeated"].sum())
    found, ids = Counter(), set()
    with new_folder(plan.written(language)) as folder:
        for split, rows in chosen.items():
            counts[f"{split}_shards"] = -(-len(rows) // plan.options.shard_size)
            for table in _write_shards(plan, split, language, rows, origins):
                if split == "train":
                    found.update(dict(table["origin"].value_counts().iter_rows()))
                    ids |= _ids(table["target"].to_list(), plan.options.target_vocabulary)
        write_json({"ids": sorted(ids)}, folder / "vocabulary.json")
        write_json(counts | {"origins": found}, folder / "counts.json")


def _write_shards(
    plan: Plan, split: str, language: str, rows: pl.DataFrame, origins: Mapping[str, str]
) -> Iterator[pl.DataFrame]:
    """Writes shards, each of which has its name only when it is whole; gives what it writes, a row group at a time."""
    (plan.output_dir / split).mkdir(exist_ok=True)
    for number, shard in enumerate(rows.iter_slices(plan.options.shard_size)):
        path = plan.shard(split, language, number)
        unfinished = path.with_name(f".{path.name}.tmp")
        try:
            with pq.ParquetWriter(unfinished, SCHEMA, compression="zstd", compression_level=3) as writer:
                for group in shard.iter_slices(ROW_GROUP):
                    table = _text(origins, group)
                    writer.write_table(table.to_arrow().cast(SCHEMA))
                    yield table
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def _text(origins: Mapping[str, str], part: pl.DataFrame) -> pl.DataFrame:
    """The pairs of some rows of all files together, which are the keys of `origins`."""
    first, last = part["row"][0], part["row"][-1]
    rows = pl.scan_parquet(list(origins), include_file_paths="path").slice(first, last + 1 - first)
    chosen = rows.with_row_index("row", first).join(part.lazy(), on="row", maintain_order="left")
    named = chosen.with_columns(origin=pl.col("path").replace_strict(origins, return_dtype=pl.String))
    return named.select(SCHEMA.names).collect(engine="streaming")


def _ids(texts: list[str], tokenizer: str | None) -> set[int]:
    """Ids that a tokenizer gives texts, its special tokens among them."""
    codes = load_tokenizer(tokenizer).encode_batch_fast(texts) if tokenizer else ()
    return {token for code in codes for token in code.ids}


def write_vocabulary(plan: Plan, languages: Iterable[str]) -> None:
    """Writes the ids on the English training side, special tokens but SEP left out, into `target_vocabulary.json`.

    These are what `dap.training.target_vocabulary` finds when no sentence is cut, and what `train_dap.py` restricts
    the softmax of RTL to.
    """
    name, ids = plan.options.target_vocabulary, set()
    for language in languages:
        ids.update(read_object(plan.written(language) / "vocabulary.json")["ids"])
    content = {"tokenizer": name, "vocab_size": vocabulary_size(name)}
    write_json(content | {"target_token_ids": sorted(ids - special_ids(name))}, plan.output_dir / VOCABULARY)


# Processes


@contextmanager
def workers(count: int) -> Iterator[Callable[[str, Callable[..., None], list[tuple]], None]]:
    """What calls a function with each of some arguments, here or in `count` processes, and logs what is done."""
    context, pool = multiprocessing.get_context("spawn"), None
    if count > 1:
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=(count,))

    def run(name: str, function: Callable[..., None], calls: list[tuple]) -> None:
        started, here = time.perf_counter(), (partial(function, *call) for call in calls)
        results = (job.result for job in as_completed(map(pool.submit, here))) if pool else here
        for number, result in enumerate(results, 1):
            result()
            logger.info("%s: %d of %d done, %.0f s", name, number, len(calls), time.perf_counter() - started)

    try:
        yield run
    except BrokenProcessPool as error:
        raise UserError(
            "a process was ended from outside, perhaps for want of memory; give the same command again to go on, "
            "with a smaller --num_workers"
        ) from error
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _start_worker(count: int) -> None:
    """Gives this process its share of the cores, and ends it when its parent is killed."""

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    for name in ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(max((os.cpu_count() or 1) // count, 1)))
    threading.Thread(target=follow, daemon=True).start()
