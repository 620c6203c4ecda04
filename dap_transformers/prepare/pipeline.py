"""Turn files of raw parallel text into shards of training pairs, in four steps.

1. `clean_file`, for each file: repair, filter, check for leaks, compute keys. Text that the sample
   cannot need is dropped at once.
2. `select_language`, for each language: find duplicates, draw the sample and the dev set.
3. `mark_held`: find the English sentences of all dev sets.
4. `write_language`, for each language: write the shards.

The result of cleaning a file lies in a folder that gets its name only when it is complete, so a run
that was killed continues after the last complete file. The result is the same, byte for byte, for
any number of processes.

Each pair has a *rank*, its place in a random order that depends only on its text and the seed.
Samples take the pairs of smallest rank. Its English sentence also has a rank, `english`. Dev sets
take the pairs whose English sentence has the smallest rank, so all languages hold out the same
sentences.
"""

import logging
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dap_transformers.files import read_json, whole_file, whole_folder, write_json
from dap_transformers.prepare.deduplication import (
    Admission,
    count_distinct,
    pair_keys,
    sample,
)
from dap_transformers.prepare.filters import SIDES, clean
from dap_transformers.prepare.leaks import LeakIndex, load_index, measured
from dap_transformers.prepare.options import PrepareOptions
from dap_transformers.prepare.run_folder import Plan, RawFile
from dap_transformers.text.find import LEAKS
from dap_transformers.text.formats import LineAudit, read_tables
from dap_transformers.text_keys import ranks

logger = logging.getLogger(__name__)

#: Pairs of a row group in a shard.
ROW_GROUP = 65_536
#: Columns of the shards.
SCHEMA = pa.schema(dict.fromkeys(("source", "target", "origin"), pa.string()))
#: Columns of `pairs.parquet`.
_PAIRS = pa.schema([*SCHEMA, ("rank", pa.uint64()), ("english", pa.uint64())])
#: A second random rank, to draw a sample within a corpus independently of that of the language.
CORPUS_RANK = (pl.col("rank") * pl.lit(0x9E3779B97F4A7C15, pl.UInt64)).alias("corpus_rank")
#: Columns of the list of leaks.
_LISTED = ("language", "origin", "line", "side", "text", "evaluation", "equal", "containment")

#: Name of a call, such as a language -> arguments.
Calls = Mapping[str, tuple]
#: Calls a function for each of `Calls`, and yields (name, result) in the order of the results.
OnCluster = Callable[[Callable[..., Any], Calls], Iterator[tuple[str, Any]]]


def prepare(
    plan: Plan, files: Sequence[RawFile], num_workers: int, on_cluster: OnCluster | None = None
) -> dict[str, dict[str, Any]]:
    """Turn raw files into shards of training pairs, in the folders of `plan`.

    Returns:
        Source language -> its counts by name: those of `select_language` and `write_language`.
    """
    each = on_cluster or partial(each_in_processes, num_workers)
    calls = {f"{raw.file}, {raw.file.language}": (plan, raw) for raw in files}
    run_all("clean", clean_file, calls, each)

    languages: dict[str, list[RawFile]] = {}
    for raw in files:
        languages.setdefault(raw.file.language, []).append(raw)
    calls = {language: (plan, own) for language, own in languages.items()}
    selected = run_all("select", select_language, calls, each)
    kept = mark_held({language: table for language, (table, _) in selected.items()})
    calls = {language: (plan, own, kept[language]) for language, own in languages.items()}
    written = run_all("write", write_language, calls, each)
    return {language: selected[language][1] | written[language] for language in languages}


# ------------------------------------------------------------------------------- 1. cleaning


def clean_file(plan: Plan, raw: RawFile) -> None:
    """Clean a file, and write the pairs that pass into the new folder `plan.cleaned(raw)`.

    - `pairs.parquet` has all pairs that pass, without the text of those that no sample needs.
    - `leaks.jsonl` lists the leaks.
    - `counts.json` has the counts of `clean_table`, and `unreadable` lines, which also are `read`.
    """
    if plan.cleaned(raw).exists():  # by a run that was stopped
        return

    options = plan.options
    audit = LineAudit(str(raw.file), options.max_bad_lines)
    index = load_index(plan.evaluation, options.leak_threshold if plan.evaluation else 0)
    admission = Admission(options.max_corpus_pairs or options.max_pairs)
    admission_rank = CORPUS_RANK if options.max_corpus_pairs else pl.col("rank")

    counts: Counter[str] = Counter()
    with (
        whole_folder(plan.cleaned(raw)) as folder,
        pq.ParquetWriter(folder / "pairs.parquet", _PAIRS, use_dictionary=["origin"]) as writer,
        (folder / LEAKS).open("wb") as listed,
    ):
        for table in read_tables(raw.file, audit):
            passed, leaks, found = clean_table(pl.from_arrow(table), raw, options, index)
            counts.update(found)
            listed.write(leaks.write_ndjson().encode())

            is_admitted = pl.Series(admission(passed.select(admission_rank).to_series().to_numpy()))
            passed = passed.with_columns(pl.when(is_admitted).then(pl.col(*SIDES)))
            writer.write_table(passed.select(_PAIRS.names).to_arrow().cast(_PAIRS))
        counts.update(read=audit.bad, unreadable=audit.bad)
        write_json(counts, folder / "counts.json")


def clean_table(
    table: pl.DataFrame, raw: RawFile, options: PrepareOptions, index: LeakIndex
) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, int]]:
    """Clean some pairs of a file: repair, filter, check for leaks, and rank.

    Returns:
        The pairs that pass, with the columns of `_PAIRS`. The leaks, with those of `_LISTED`. And
        the counts `read` and `leak` (pairs), and those of `clean`.
    """
    language = raw.file.language
    pairs, counts = clean(table, language, options)
    pairs = pairs.with_row_index("row")
    pairs = pairs.with_columns(language=pl.lit(language), origin=pl.lit(raw.origin))

    sides = [measured(pairs[side]) for side in SIDES]
    leaks = pl.concat([index(side) for side in sides]).sort("row", maintain_order=True)
    source, target = (side["key"].to_numpy() for side in sides)
    ranked = pairs.with_columns(
        rank=ranks(pair_keys(source, target), options.seed), english=ranks(target, options.seed)
    )
    passed = ranked.join(leaks, on="row", how="anti", maintain_order="left")
    counts |= {"read": len(table), "leak": len(pairs) - len(passed)}
    return passed, leaks.join(pairs, on="row", maintain_order="left").select(_LISTED), counts


# ------------------------------------------------------------------------------- 2. choosing


def select_language(plan: Plan, files: Sequence[RawFile]) -> tuple[pl.DataFrame, dict[str, int]]:
    """Choose which cleaned pairs of a language to keep, and which of these are its dev set.

    Of pairs that are equal after normalising, the first one is kept. `split_validation` of
    `dap_transformers.training` chooses dev pairs in the same order.

    Returns:
        A table of the pairs to keep, in order: `row`, `english` and `dev`. And the counts of
        `clean_file`, summed over all files, with `duplicate` and `not_sampled`.
    """
    pairs = _scan(plan, files)
    rows = pairs.filter(pl.col("source").is_not_null())

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

    is_dev = pl.col("row").is_in(dev["row"].implode())
    kept = kept.sort("row").select("row", "english", dev=is_dev)

    # Count what was dropped.
    passed = pairs.select(pl.len()).collect().item()
    distinct = count_distinct(pairs, "rank")
    counts: Counter[str] = Counter()
    for raw in files:
        counts.update(read_json(plan.cleaned(raw) / "counts.json"))
    counts["duplicate"] = passed - distinct
    counts["not_sampled"] = distinct - len(kept)
    return kept, dict(counts)


def _scan(plan: Plan, files: Sequence[RawFile]) -> pl.LazyFrame:
    """Return the lazy table of the cleaned pairs of some files, numbered in the column `row`."""
    paths = [plan.cleaned(raw) / "pairs.parquet" for raw in files]
    return pl.scan_parquet(paths, row_index_name="row", glob=False)


# ------------------------------------------------------------------------ 3. over all languages


def mark_held(kept: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Mark the pairs whose English sentence is in the dev set of any language (`is_held`)."""
    tables = [table.with_columns(language=pl.lit(language)) for language, table in kept.items()]
    marked = pl.concat(tables).with_columns(is_held=pl.col("dev").any().over("english"))
    return {language: marked.filter(language=language) for language in kept}


# -------------------------------------------------------------------------------- 4. writing


def write_language(plan: Plan, files: Sequence[RawFile], kept: pl.DataFrame) -> dict[str, Any]:
    """Write the kept pairs (`mark_held`) of a language to `train/` and `dev/`, in their order.

    Returns:
        Counts of pairs by name: `train`, `dev`, and `held_out`, those left out of both because a
        dev set of any language has their English sentence. `origins` has the training pairs by
        corpus.
    """
    rows = _scan(plan, files)
    language = files[0].file.language
    train = kept.filter(~pl.col("is_held"))
    dev = kept.filter("dev")

    counts: dict[str, Any] = {
        "train": len(train),
        "dev": len(dev),
        "held_out": len(kept) - len(train) - len(dev),
    }
    for split, pairs in (("train", train), ("dev", dev)):
        for number, shard in enumerate(pairs.iter_slices(plan.options.shard_size)):
            _write_shard(plan.shard(split, language, number), rows, shard)

    of_train = rows.join(train.lazy(), on="row", how="semi")
    origins = of_train.group_by("origin").len().sort("origin").collect(engine="streaming")
    counts["origins"] = dict(origins.iter_rows())
    return counts


def _write_shard(path: Path, rows: pl.LazyFrame, pairs: pl.DataFrame) -> None:
    """Write some pairs of a language to a Parquet file, which appears whole or not at all."""
    joined = rows.join(pairs.lazy(), on="row", maintain_order="left").select(SCHEMA.names)
    table = joined.collect(engine="streaming")
    with (
        whole_file(path) as file,
        pq.ParquetWriter(file, SCHEMA, compression="zstd", compression_level=3) as writer,
    ):
        for part in table.iter_slices(ROW_GROUP):
            # How a table is split into chunks depends on the threads, and the bytes depend on it.
            writer.write_table(part.rechunk().to_arrow().cast(SCHEMA))


# ------------------------------------------------------------------------------- processes


def run_all(
    step: str, function: Callable[..., Any], calls: Calls, each: OnCluster
) -> dict[str, Any]:
    """Return the results of calls by name, and log how many are done."""
    found = {}
    for name, result in each(function, calls):
        found[name] = result
        logger.info("%s: %d of %d done", step, len(found), len(calls))
    return found


def each_in_processes(
    count: int, function: Callable[..., Any], calls: Calls
) -> Iterator[tuple[str, Any]]:
    """Make calls in some processes, or in this one if `count` is 1. Yield each name and result.

    If a call fails, its error is raised. Other processes finish all other calls before that.
    """
    if count == 1:
        for name, arguments in calls.items():
            yield name, function(*arguments)
        return

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _start_worker, (count,)) as pool:
        jobs = {pool.submit(function, *arguments): name for name, arguments in calls.items()}
        for job in as_completed(jobs):
            yield jobs[job], job.result()


def _start_worker(count: int) -> None:
    """Set up a worker process: limit its threads, and end it when its parent process is killed."""

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threads = max((os.cpu_count() or 1) // count, 1)
    for name in ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    threading.Thread(target=end_with_parent, daemon=True).start()
