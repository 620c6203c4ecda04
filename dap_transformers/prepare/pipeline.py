"""Turn files of raw parallel text into shards of training pairs, in four steps.

1. `clean_file`, for each file: repair, filter, check for leaks, compute keys. Text that the sample
   cannot need is dropped at once.
2. `select_language`, for each language: find duplicates, draw the sample and the dev set.
3. `find_shared`: find the English sentences of all dev sets, and those that occur more than once.
4. `write_language`, for each language: write the shards.

The result of cleaning a file lies in a folder of its own, which gets its final name only when it is
complete. A run that was killed continues after the last complete file. The result is the same, byte
for byte, for any number of processes.

Each pair has a *rank*, its place in a random order that depends only on its text and the seed.
Samples take the pairs of smallest rank. Its English sentence also has a rank, `english`. Dev sets
take the pairs whose English sentence has the smallest rank, so all languages hold out the same
sentences.

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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dap_transformers.errors import UserError, joined
from dap_transformers.files import DiskFullError, read_json, whole_file, whole_folder, write_json
from dap_transformers.languages import normalise_all, ranks, text_keys
from dap_transformers.prepare.deduplication import (
    Admission,
    count_distinct,
    pair_keys,
    repeated,
    sample,
)
from dap_transformers.prepare.filters import SIDES, clean
from dap_transformers.prepare.leaks import LeakIndex, load_index
from dap_transformers.prepare.run_folder import Plan, RawFile
from dap_transformers.text.formats import LineAudit, read_tables

logger = logging.getLogger(__name__)

#: Pairs of a row group in a shard.
ROW_GROUP = 65_536
_TEXT = {
    "source": pa.string(),
    "target": pa.string(),
    "origin": pa.string(),
    "text_hash": pa.uint64(),
}
#: Columns of the shards. `text_hash` is the key of the normalised pair. `target_repeated` marks
#: English sentences that other training pairs, of any language, have as well.
SCHEMA = pa.schema(_TEXT | {"target_repeated": pa.bool_()})
#: Columns of `keys.parquet`, which has all pairs that pass. Exactly equal pairs have the same
#: `exact`.
_KEYS = pa.schema({"rank": pa.uint64(), "exact": pa.uint64()})
#: Columns of `rows.parquet`, which has the pairs that the sample may need.
_ROWS = pa.schema(_TEXT | {"rank": pa.uint64(), "english": pa.uint64()})
#: A second random rank, to draw a sample within a corpus independently of that of the language.
CORPUS_RANK = (pl.col("rank") * pl.lit(0x9E3779B97F4A7C15, pl.UInt64)).alias("corpus_rank")
#: Columns of the list of leaks after the language.
_LISTED = ("origin", "line", "side", "text", "evaluation", "equal", "containment")

#: Name of a call, such as a language -> arguments.
Calls = Mapping[str, tuple]
#: Calls a function for each of `Calls`, and yields (name, result) in the order of the results.
OnCluster = Callable[[Callable[..., Any], Calls], Iterator[tuple[str, Any]]]


def prepare(
    plan: Plan, files: Sequence[RawFile], num_workers: int, on_cluster: OnCluster | None = None
) -> dict[str, dict[str, Any]]:
    """Turn raw files into shards of training pairs: carry out all steps of this module.

    The results are written into the folders of `plan`. Files that an earlier run has cleaned are
    not cleaned again.

    Args:
        num_workers: number of processes.
        on_cluster: makes the calls instead of processes on this machine.

    Returns:
        Source language -> its counts by name: those of `select_language` and `write_language`.
    """
    languages: dict[str, list[RawFile]] = {}
    for raw in files:
        languages.setdefault(raw.file.language, []).append(raw)
    of_languages = {language: (plan, language, own) for language, own in languages.items()}
    of_files = {}
    for raw in sorted(files, key=lambda raw: raw.bytes, reverse=True):  # the largest file first
        of_files[f"{raw.file}, {raw.file.language}"] = (plan, raw)

    each = on_cluster or partial(each_in_processes, num_workers)
    run_all("clean", clean_file, of_files, each)
    selected = run_all("select", select_language, of_languages, each)
    find_shared(plan, list(languages))
    written = run_all("write", write_language, of_languages, each)
    return {language: selected[language] | written[language] for language in languages}


# ------------------------------------------------------------------------------- 1. cleaning


def clean_file(plan: Plan, raw: RawFile) -> None:
    """Clean a file, and write the pairs that pass into a folder of their own (`plan.cleaned`).

    - `keys.parquet` has two hashes (rank and exact text) of every pair that passes.
    - `rows.parquet` has the text of the pairs that a sample may need.
    - `leaks.jsonl` lists the leaks.
    - `counts.json` has the counts `read` (pairs), `unreadable` (lines), `leak` (pairs), and those
      of `clean`.

    If the folder exists already, nothing is done.
    """
    if plan.cleaned(raw).exists():  # by a run that was stopped
        return

    options = plan.options
    audit = LineAudit(str(raw.file), options.max_bad_lines)
    index = None
    if plan.leaks.exists():
        index = load_index(plan.leaks, plan.leaks.stat().st_mtime_ns)
    admission = Admission(options.max_corpus_pairs or options.max_pairs or None)
    admission_rank = CORPUS_RANK if options.max_corpus_pairs else pl.col("rank")

    counts = Counter(read=0)
    with (
        whole_folder(plan.cleaned(raw)) as folder,
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
            side_keys = [text_keys(side) for side in letters]
            text_hash = pair_keys(*side_keys)
            pairs = pairs.with_row_index("row").with_columns(
                origin=pl.lit(raw.origin),
                text_hash=text_hash,
                exact=pl.struct(*SIDES).hash(),
                rank=ranks(text_hash, options.seed),
                english=ranks(side_keys[1], options.seed),
            )

            passed = pairs
            if index is not None:
                leaks = _find_leaks(index, pairs, letters, side_keys)
                passed = pairs.join(leaks, on="row", how="anti", maintain_order="left")
                language = pl.lit(raw.file.language).alias("language")
                listed.write(leaks.select(language, *_LISTED).write_ndjson().encode())
            counts.update(found, read=len(table), leak=len(pairs) - len(passed))

            keys.write_table(passed.select(_KEYS.names).to_arrow())
            is_admitted = admission(passed.select(admission_rank).to_series().to_numpy())
            admitted = passed.filter(is_admitted)
            rows.write_table(admitted.select(_ROWS.names).to_arrow().cast(_ROWS))
        write_json(counts | {"unreadable": audit.bad}, folder / "counts.json")


def _find_leaks(
    index: LeakIndex,
    pairs: pl.DataFrame,
    letters: Sequence[list[str]],
    side_keys: Sequence[np.ndarray],
) -> pl.DataFrame:
    """Find the pairs with a side that equals, or nearly equals, an evaluation sentence.

    Args:
        side_keys: their hashes, uint64 (N,) each.

    Returns:
        A row for each leak, in the order of the pairs. A pair has two rows if both sides are leaks.
        The columns are those of `pairs` and of `index`, and also `side` ("source" or "target") and
        `text`, the text of that side.
    """
    found = []
    for side, own_letters, own_keys in zip(SIDES, letters, side_keys):
        leaks = index(own_letters, own_keys)
        texts = pairs.with_columns(side=pl.lit(side), text=side)
        found.append(leaks.join(texts, on="row"))
    return pl.concat(found).sort("row", maintain_order=True)


# ------------------------------------------------------------------------------- 2. choosing


def select_language(plan: Plan, language: str, files: Sequence[RawFile]) -> dict[str, int]:
    """Choose which cleaned pairs of a language to keep, and which of these are its dev set.

    The choice is written to `plan.selected(language)`.

    - Of pairs that are equal after normalising, the first pair of the first file is kept.
    - With `max_corpus_pairs`, a sample of each corpus is drawn first.
    - Then the `max_pairs` pairs of smallest rank are drawn.
    - The dev set takes the pairs whose English sentence has the smallest rank, at most
      `dev_pairs` and at most a tenth of the kept pairs. `split_validation` of
      `dap_transformers.training` chooses the same.

    Returns:
        The counts of `clean_file`, summed over all files, and also `exact_duplicate`,
        `near_duplicate` (equal only after normalising) and `not_sampled`.
    """
    keys = _scan([plan.cleaned(raw) / "keys.parquet" for raw in files])
    row_files = [plan.cleaned(raw) / "rows.parquet" for raw in files]
    rows = pl.scan_parquet(row_files, row_index_name="row", glob=False)

    # Draw the samples.
    drawn = rows.select("row", "rank", "english")
    if most := plan.options.max_corpus_pairs:
        of_corpora = []
        for origin in sorted({raw.origin for raw in files}):
            corpus = rows.filter(origin=origin).select("row", "rank", "english", CORPUS_RANK)
            of_corpora.append(sample(corpus, "corpus_rank", most).lazy())
        drawn = pl.concat(of_corpora).drop("corpus_rank")
    kept = sample(drawn, "rank", plan.options.max_pairs or None)
    dev = sample(kept.lazy(), "english", min(plan.options.dev_pairs, len(kept) // 10))

    # Write the numbers of the rows.
    is_dev = pl.col("row").is_in(dev["row"].implode())
    kept = kept.sort("row").select("row", "english", dev=is_dev)
    _write_table(kept, plan.selected(language))

    # Count what was dropped.
    passed = keys.select(pl.len()).collect().item()
    exact = count_distinct(keys, "exact")
    normalised = count_distinct(keys, "rank")
    counts: Counter[str] = Counter()
    for raw in files:
        counts.update(read_json(plan.cleaned(raw) / "counts.json"))
    return dict(
        counts,
        exact_duplicate=passed - exact,
        near_duplicate=exact - normalised,
        not_sampled=normalised - len(kept),
    )


# ------------------------------------------------------------------------ 3. over all languages


def find_shared(plan: Plan, languages: Iterable[str]) -> None:
    """Write two lists of English sentences, which are given by their ranks, into the work folder.

    `held.parquet` has the sentences of the dev sets of all languages. `repeated.parquet` has the
    sentences that occur in several kept pairs, of any language.
    """
    kept = _scan([plan.selected(language) for language in languages])
    held = kept.filter("dev").select(pl.col("english").unique()).collect()
    _write_table(held, plan.work_dir / "held.parquet")
    _write_table(repeated(kept, "english"), plan.work_dir / "repeated.parquet")


def _scan(paths: Sequence[Path]) -> pl.LazyFrame:
    """Return a lazy table of the rows of Parquet files. `[` and `*` in a path mean themselves."""
    return pl.scan_parquet(paths, glob=False)


def _write_table(table: pl.DataFrame, path: Path) -> None:
    """Write a table to a Parquet file, which appears whole or not at all."""
    with whole_file(path) as file:
        pq.write_table(table.to_arrow(), file)


# -------------------------------------------------------------------------------- 4. writing


def write_language(plan: Plan, language: str, files: Sequence[RawFile]) -> dict[str, Any]:
    """Write the shards of a language to `train/` and `dev/`, in the order of the files.

    Returns:
        Counts by name:

        - `train` and `dev`: pairs written.
        - `held_out`: pairs left out of both, because a dev set of any language has their English
          sentence.
        - `target_repeated`: training pairs whose English sentence occurs in other pairs, too.
        - `train_shards` and `dev_shards`: files written.
        - `origins`: training pairs by corpus, a dictionary.
    """
    rows = _scan([plan.cleaned(raw) / "rows.parquet" for raw in files])
    held = _scan([plan.work_dir / "held.parquet"]).collect()["english"]
    several = _scan([plan.work_dir / "repeated.parquet"]).collect()["english"]
    kept = (
        _scan([plan.selected(language)])
        .collect()
        .with_columns(
            held_out=pl.col("english").is_in(held.implode()),
            target_repeated=pl.col("english").is_in(several.implode()),
        )
    )
    train = kept.filter(~pl.col("held_out"))
    dev = kept.filter("dev")

    counts: dict[str, Any] = {
        "train": len(train),
        "dev": len(dev),
        "held_out": len(kept) - len(train) - len(dev),
        "target_repeated": int(train["target_repeated"].sum()),
    }
    for split, pairs in (("train", train), ("dev", dev)):
        (plan.output_dir / split).mkdir(exist_ok=True)
        shards = list(pairs.iter_slices(plan.options.shard_size))
        for number, shard in enumerate(shards):
            _write_shard(plan.shard(split, language, number), rows, shard)
        counts[f"{split}_shards"] = len(shards)

    origins = rows.select("origin").with_row_index("row")
    of_train = origins.join(train.lazy(), on="row", how="semi")
    found = of_train.group_by("origin").len().sort("origin").collect(engine="streaming")
    counts["origins"] = dict(found.iter_rows())
    return counts


def _write_shard(path: Path, rows: pl.LazyFrame, pairs: pl.DataFrame) -> None:
    """Write some pairs of a language to a Parquet file, one row group at a time."""
    with (
        whole_file(path) as file,
        pq.ParquetWriter(file, SCHEMA, compression="zstd", compression_level=3) as writer,
    ):
        for group in pairs.iter_slices(ROW_GROUP):
            first, last = group["row"][0], group["row"][-1]
            text = rows.slice(first, last + 1 - first).with_row_index("row", first)
            table = text.join(group.lazy(), on="row", maintain_order="left").select(SCHEMA.names)
            # How the table is split into chunks depends on the threads, and the bytes depend on it.
            one_chunk = table.collect(engine="streaming").rechunk()
            writer.write_table(one_chunk.to_arrow().cast(SCHEMA))


# ------------------------------------------------------------------------------- processes


def run_all(
    step: str, function: Callable[..., Any], calls: Calls, each: OnCluster
) -> dict[str, Any]:
    """Call a function for each of `calls`, and return the results by name.

    If a call fails because of its input, the other calls are still made, and then the errors are
    raised together. A full disk is raised at once.
    """
    started = time.perf_counter()
    found = {}
    for name, outcome in each(partial(_result_or_error, function), calls):
        found[name] = outcome
        seconds = time.perf_counter() - started
        logger.info("%s: %d of %d done, %.0f s", step, len(found), len(calls), seconds)
    errors = [found[name] for name in calls if isinstance(found[name], Exception)]
    if errors:
        raise joined(errors)
    return found


def each_in_processes(
    count: int, function: Callable[..., Any], calls: Calls
) -> Iterator[tuple[str, Any]]:
    """Share calls among processes, or make them in this process if `count` is 1.

    Yields:
        (name, result) of each call, in the order in which they end.
    """
    if count == 1:
        for name, arguments in calls.items():
            yield name, function(*arguments)
        return

    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(count,))
    try:
        names = {pool.submit(function, *arguments): name for name, arguments in calls.items()}
        for job in as_completed(names):
            yield names[job], job.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process was ended from outside, perhaps because memory ran out; give the same "
            "command again to continue, with fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _result_or_error(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. Return its result, or the `UserError` or `OSError` that it raises.

    A full disk and all other errors are raised, because they concern the whole run.
    """
    try:
        return function(*arguments)
    except DiskFullError:
        raise
    except (UserError, OSError) as error:
        return error


def _start_worker(count: int) -> None:
    """Set up a worker process: limit its threads, and end it when its parent process is killed."""

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threads = max((os.cpu_count() or 1) // count, 1)
    for name in ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    threading.Thread(target=end_with_parent, daemon=True).start()
