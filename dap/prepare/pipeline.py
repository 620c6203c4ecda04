"""From files of raw parallel text to shards of training pairs: the steps, their processes, and resuming.

1. `clean_file`, for each file: repair, filter, leak check, keys of what is left. Text that the sample cannot need is
   let go at once.
2. `select_language`, for each language: duplicates, the sample, the dev sentences.
3. `find_shared`: English sentences that any dev set holds out, and those that come more than once.
4. `write_language`, for each language: the shards.
5. `write_vocabulary`, where it is asked for.

What is cleaned of a file lies in a folder of its own, which has its final name only when it is whole; a run that was
killed goes on behind these files. The result is the same to the byte whatever the number of processes.

Shapes: N pairs of a table.
"""

import logging
import multiprocessing
import os
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

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dap.errors import UserError, joined
from dap.file_io import DiskFullError, read_object, whole_file, write_json
from dap.languages import normalise_all
from dap.prepare.deduplication import (
    Admission,
    count_distinct,
    pair_keys,
    repeated,
    sample,
)
from dap.prepare.filters import SIDES, clean, identified, load_tokenizer
from dap.prepare.leaks import LeakIndex, load_index
from dap.prepare.options import PrepareOptions
from dap.prepare.run_folder import VOCABULARY, Plan, RawFile, new_folder
from dap.ray.connection import each_on_cluster
from dap.text import LineAudit, read_tables
from dap.text_keys import ranks, text_keys
from dap.tokenizers import never_predicted

logger = logging.getLogger(__name__)

ROW_GROUP = 65_536  # pairs
#: Of the shards. `text_hash` is the key of the normalised pair; `target_repeated` marks English sentences that other
#: training pairs, of any language, have too.
_TEXT = {
    "source": pa.string(),
    "target": pa.string(),
    "origin": pa.string(),
    "text_hash": pa.uint64(),
}
SCHEMA = pa.schema(_TEXT | {"target_repeated": pa.bool_()})
#: Of `keys.parquet`: the random place of each pair that passes, and what is the same for exactly equal ones.
_KEYS = pa.schema({"rank": pa.uint64(), "exact": pa.uint64()})
#: Of `rows.parquet`: the pairs that the sample may need; `english` is the random place of the English sentence.
_ROWS = pa.schema(_TEXT | {"rank": pa.uint64(), "english": pa.uint64()})
#: The random place of a pair among those of its corpus, another one than among those of the language.
CORPUS_RANK = (pl.col("rank") * pl.lit(0x9E3779B97F4A7C15, pl.UInt64)).alias("corpus_rank")
#: Of the list of leaks, behind the language.
_LISTED = ("origin", "line", "side", "text", "evaluation", "equal", "containment")


def prepare(
    plan: Plan, files: Sequence[RawFile], num_workers: int, on_cluster: bool = False
) -> dict[str, dict[str, Any]]:
    """All steps, but for the files that are cleaned already; `workers` says where.

    Returns:
        language -> its counts, which `select_language` and `write_language` name.

    Raises:
        ValueError: input as `read_tables`, no space left on the device, or a process that was killed.
    """
    languages: dict[str, list[RawFile]] = {}
    for raw in files:
        languages.setdefault(raw.file.language, []).append(raw)
    calls = {language: (plan, language, own) for language, own in languages.items()}
    with workers(num_workers, on_cluster) as run:
        largest = sorted(files, key=lambda raw: -raw.bytes)
        size = f"{sum(raw.bytes for raw in files) / 2**20:,.0f} MiB"
        logger.info(
            "clean: %d files of %s; then select and write: %d languages",
            len(files),
            size,
            len(languages),
        )
        run(
            "clean",
            clean_file,
            {f"{raw.file}, {raw.file.language}": (plan, raw) for raw in largest},
        )
        selected = run("select", select_language, calls)
        find_shared(plan, list(languages))
        written = run("write", write_language, calls)
    if plan.options.target_vocabulary:
        write_vocabulary(plan)
    return {language: chosen | more for language, chosen, more in zip(languages, selected, written)}


def check_names(options: PrepareOptions) -> None:
    """Loads what the options name, so that a wrong one is found before anything is written."""
    if options.tokenizer:
        load_tokenizer(options.tokenizer)
    if name := options.target_vocabulary:
        ids = set(load_tokenizer(name).get_vocab().values())
        if max(ids) >= len(ids):
            raise UserError(
                f"tokenizer {name} has {len(ids)} tokens, but ids up to {max(ids)}: number them 0, 1, …"
            )
    if options.language_identifier:
        identified(options.language_identifier, ["One sentence."])


# 1. Cleaning


def clean_file(plan: Plan, raw: RawFile) -> None:
    """The pairs of one file that pass: their keys, and the text of those that a sample may need.

    Counts `read`, `unreadable` (lines), the repairs and reasons of `clean`, and `leak`.

    Raises:
        ValueError: as `read_tables`, a file without pairs, or no space left on the device.
    """
    if plan.cleaned(
        raw
    ).exists():  # by a run that was stopped, or a worker that was lost right behind it
        return
    options, audit = plan.options, LineAudit(str(raw.file), plan.options.max_bad_lines)
    index = load_index(plan.leaks, plan.leaks.stat().st_mtime_ns) if plan.leaks.exists() else None
    rank = CORPUS_RANK if options.max_corpus_pairs else pl.col("rank")
    admit, counts = (
        Admission(options.max_corpus_pairs or options.max_pairs or None),
        Counter(read=0),
    )
    with (
        new_folder(plan.cleaned(raw)) as folder,
        pq.ParquetWriter(
            folder / "keys.parquet", _KEYS, compression="none", use_dictionary=False
        ) as keys,
        pq.ParquetWriter(
            folder / "rows.parquet", _ROWS, compression="zstd", use_dictionary=["origin"]
        ) as rows,
        (folder / "leaks.jsonl").open("wb") as listed,
    ):
        for table in read_tables(raw.file, audit):
            pairs, found = clean(pl.from_arrow(table), raw.file.language, options)
            letters = [normalise_all(pairs[side].to_list()) for side in SIDES]
            source, target = map(text_keys, letters)
            text_hash = pair_keys(source, target)
            order = {"rank": ranks(text_hash, options.seed), "english": ranks(target, options.seed)}
            pairs = pairs.with_row_index("row").with_columns(
                origin=pl.lit(raw.origin),
                text_hash=text_hash,
                exact=pl.struct(*SIDES).hash(),
                **order,
            )
            passed = pairs
            if index is not None:
                leaks = _leaks(index, pairs, letters, (source, target))
                passed = pairs.join(leaks, on="row", how="anti", maintain_order="left")
                language = pl.lit(raw.file.language).alias("language")
                listed.write(leaks.select(language, *_LISTED).write_ndjson().encode())
            counts.update(found, read=len(table), leak=len(pairs) - len(passed))
            keys.write_table(passed.select(_KEYS.names).to_arrow())
            admitted = passed.filter(admit(passed.select(rank).to_series().to_numpy()))
            rows.write_table(admitted.select(_ROWS.names).to_arrow().cast(_ROWS))
        write_json(counts | {"unreadable": audit.bad}, folder / "counts.json")


def _leaks(
    index: LeakIndex, pairs: pl.DataFrame, letters: Sequence[list[str]], keys: Sequence[np.ndarray]
) -> pl.DataFrame:
    """What `index` finds in both sides of pairs, beside their columns, in their order; a pair may come twice."""
    found = [
        index(*texts).join(pairs.with_columns(side=pl.lit(side), text=side), on="row")
        for side, *texts in zip(SIDES, letters, keys)
    ]
    return pl.concat(found).sort("row", maintain_order=True)


# 2. Choosing


def select_language(plan: Plan, language: str, files: Sequence[RawFile]) -> dict[str, int]:
    """Which cleaned pairs of a language to keep, and which of these are its dev set.

    Of equal pairs (as normalised) the first of the first file is kept (with `max_corpus_pairs`, of these of each
    corpus so many, drawn apart); of what is left the `max_pairs` whose seeded hash is smallest; of these, as
    `split_validation`, those whose English sentence's is smallest for dev.

    Counts what `clean_file` does, and `exact_duplicate`, `near_duplicate` (equal as normalised only), `not_sampled`.
    """
    keys = pl.scan_parquet([plan.cleaned(raw) / "keys.parquet" for raw in files])
    rows = pl.scan_parquet(
        [plan.cleaned(raw) / "rows.parquet" for raw in files], row_index_name="row"
    )
    drawn = rows.select("row", "rank", "english")
    if most := plan.options.max_corpus_pairs:
        corpora = [rows.filter(origin=name) for name in sorted({raw.origin for raw in files})]
        columns = [corpus.select("row", "rank", "english", CORPUS_RANK) for corpus in corpora]
        drawn = pl.concat(sample(each, "corpus_rank", most).lazy() for each in columns).drop(
            "corpus_rank"
        )
    kept = sample(drawn, "rank", plan.options.max_pairs or None)
    dev = sample(kept.lazy(), "english", min(plan.options.dev_pairs, len(kept) // 10))
    kept = kept.sort("row").select("row", "english", dev=pl.col("row").is_in(dev["row"].implode()))
    with whole_file(plan.selected(language)) as file:
        pq.write_table(kept.to_arrow(), file)
    passed = keys.select(pl.len()).collect().item()
    texts, different = (count_distinct(keys, name) for name in ("exact", "rank"))
    counts: Counter[str] = Counter()
    for raw in files:
        counts.update(read_object(plan.cleaned(raw) / "counts.json"))
    counts.update(exact_duplicate=passed - texts, near_duplicate=texts - different)
    return dict(counts, not_sampled=different - len(kept))


# 3. Over all languages


def find_shared(plan: Plan, languages: Iterable[str]) -> None:
    """Keys of English sentences: those `held` out for a dev set of any language, those `repeated` in several pairs."""
    kept = pl.scan_parquet([plan.selected(language) for language in languages])
    held = kept.filter("dev").select(pl.col("english").unique()).collect()
    for name, keys in ("held", held), ("repeated", repeated(kept, "english")):
        with whole_file(plan.work_dir / f"{name}.parquet") as file:
            pq.write_table(keys.to_arrow(), file)


# 4. Writing


def write_language(plan: Plan, language: str, files: Sequence[RawFile]) -> dict[str, Any]:
    """The shards of a language in `train/` and `dev/`, in the order of the files.

    Counts `held_out` (training pairs lost because a dev set has their English sentence), `train`, `dev`,
    `target_repeated`, and `origins`: training pairs of each.
    """
    rows = pl.scan_parquet([plan.cleaned(raw) / "rows.parquet" for raw in files])
    held, again = (
        pl.read_parquet(plan.work_dir / f"{name}.parquet") for name in ("held", "repeated")
    )
    kept = pl.read_parquet(plan.selected(language)).with_columns(
        held_out=pl.col("english").is_in(held["english"].implode()),
        target_repeated=pl.col("english").is_in(again["english"].implode()),
    )
    chosen = {"train": kept.filter(~pl.col("held_out")), "dev": kept.filter("dev")}
    counts: dict[str, Any] = {split: len(pairs) for split, pairs in chosen.items()}
    counts["held_out"] = len(kept) - counts["train"] - counts["dev"]
    counts["target_repeated"] = int(chosen["train"]["target_repeated"].sum())
    for split, pairs in chosen.items():
        shards = list(pairs.iter_slices(plan.options.shard_size))
        counts[f"{split}_shards"] = len(shards)
        (plan.output_dir / split).mkdir(exist_ok=True)
        for number, shard in enumerate(shards):
            _write_shard(plan.shard(split, language, number), rows, shard)
    origins = (
        rows.select("origin")
        .with_row_index("row")
        .join(chosen["train"].lazy(), on="row", how="semi")
    )
    found = origins.group_by("origin").len().sort("origin").collect(engine="streaming")
    return counts | {"origins": dict(found.iter_rows())}


def _write_shard(path: Path, rows: pl.LazyFrame, pairs: pl.DataFrame) -> None:
    """Writes the text of pairs, a row group at a time.

    Args:
        rows: those of all files together.
        pairs: number `row` among them, ascending, and whether `target_repeated`.
    """
    with (
        whole_file(path) as file,
        pq.ParquetWriter(file, SCHEMA, compression="zstd", compression_level=3) as writer,
    ):
        for group in pairs.iter_slices(ROW_GROUP):
            first, last = group["row"][0], group["row"][-1]
            text = rows.slice(first, last + 1 - first).with_row_index("row", first)
            table = text.join(group.lazy(), on="row", maintain_order="left").select(SCHEMA.names)
            whole = table.collect(
                engine="streaming"
            ).rechunk()  # its chunks, and so the bytes, depend on the threads
            writer.write_table(whole.to_arrow().cast(SCHEMA))


def write_vocabulary(plan: Plan) -> None:
    """Writes the ids on the English training side, special tokens but SEP left out, into `target_vocabulary.json`.

    These are what `dap.training.start.target_vocabulary` finds when no sentence is cut, and what `train_dap.py` restricts
    the softmax of RTL to.
    """
    name = plan.options.target_vocabulary
    tokenizer, ids = load_tokenizer(name), set()
    for path in (plan.output_dir / "train").glob("[!.]*.parquet"):
        with pq.ParquetFile(path) as shard:
            for batch in shard.iter_batches(columns=["target"]):
                codes = tokenizer.backend_tokenizer.encode_batch_fast(batch["target"].to_pylist())
                ids.update(token for code in codes for token in code.ids)
    ids -= never_predicted(tokenizer)
    size = max(tokenizer.get_vocab().values()) + 1
    content = {"tokenizer": name, "vocab_size": size, "target_token_ids": sorted(ids)}
    write_json(content, plan.output_dir / VOCABULARY)


# Processes

Calls = Mapping[str, tuple]  # what a call is about, such as a language -> its arguments
Outcomes = Iterator[tuple[str, Any]]  # what each call is about and what it returned, as they end


@contextmanager
def workers(
    count: int, on_cluster: bool = False
) -> Iterator[Callable[[str, Callable[..., Any], Calls], list[Any]]]:
    """What makes calls of a function here, in `count` processes or by the connected cluster, and logs what is done.

    It returns what the function does, in the order of the calls. A call that fails keeps no other from being made.

    Raises:
        ValueError, OSError: what a call failed with, or a line of what several did; of a full disk at once.
        ValueError: a process was killed.
    """
    if on_cluster or count == 1:
        yield partial(_run, each_on_cluster if on_cluster else _each_here)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=_start_worker, initargs=(count,)
    )

    def each(function: Callable[..., Any], calls: Calls) -> Outcomes:
        jobs = {pool.submit(function, *call): name for name, call in calls.items()}
        return ((jobs[job], job.result()) for job in as_completed(jobs))

    try:
        yield partial(_run, each)
    except BrokenProcessPool as error:
        raise UserError(
            "a process was ended from outside, perhaps for want of memory; give the same command again to go on, "
            "with a smaller --num_workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _each_here(function: Callable[..., Any], calls: Calls) -> Outcomes:
    return ((name, function(*call)) for name, call in calls.items())


def _run(
    each: Callable[[Callable[..., Any], Calls], Outcomes],
    step: str,
    function: Callable[..., Any],
    calls: Calls,
) -> list[Any]:
    started, found = time.perf_counter(), {}
    for name, outcome in each(partial(_attempt, function), calls):
        found[name] = outcome
        logger.info(
            "%s: %d of %d done, %.0f s", step, len(found), len(calls), time.perf_counter() - started
        )
    failed = [found[name] for name in calls if isinstance(found[name], Exception)]
    if failed:
        raise joined(failed)
    return [found[name] for name in calls]


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or what it raises over its input."""
    try:
        return function(*arguments)
    except DiskFullError:
        raise
    except (UserError, OSError) as error:
        return error


def _start_worker(count: int) -> None:
    """Gives this process its share of the cores, and ends it when its parent is killed."""

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    for name in ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(max((os.cpu_count() or 1) // count, 1)))
    threading.Thread(target=follow, daemon=True).start()
