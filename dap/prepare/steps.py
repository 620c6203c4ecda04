"""From files of raw parallel text to training pairs on disk: the steps, their processes, and resuming (no models).

1. `clean_files`, for each file or block of a large one: repair, filter, leak check, keys of what is left; text that
   the sample cannot need is let go at once.
2. `select_language`, for each language: duplicates, the sample, the dev sentences.
3. `find_shared`: English sentences that any dev set holds out, and those that occur more than once.
4. `write_language`, for each language: the shards.

The result of a step lies in a folder of its own, which has its final name only when it is whole. A run that was
killed goes on behind the finished ones. Processes share out files, blocks of those that `blocks` can cut, and
languages. Whatever the number of processes and the size of the blocks, the result is the same to the byte.
Memory: a process holds a table of pairs, or the keys of one range (`deduplication.PART`) and a byte for each pair of a
language, or one row group. Everything else is on the disk: 16 bytes for each pair that passes the filters, and the
text and 24 bytes of those that the sample may need.

Shapes: N pairs of a block or language.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dap.prepare.clean_files import KEYS, clean_part, cut_file, judge
from dap.prepare.deduplication import contains, count_distinct, repeated_values, sample
from dap.prepare.plan import KeyFiles, Plan, Source, keys_of, read_json
from dap.prepare.processes import workers
from dap.prepare.shards import ROW_GROUP, SCHEMA, ShardWriter, new_folder
from dap.prepare.tokens import Vocabulary
from dap.reports import write_json
from dap.text import is_cut


def prepare(plan: Plan, sources: Sequence[Source], num_workers: int) -> dict[str, Any]:
    """All steps that are not done yet.

    Returns:
        language -> its counts, which `clean_part`, `select_language` and `write_language` name.

    Raises:
        ValueError: input as `read_tables`, no space left on the device, or a process that was killed.
    """
    for left in (*plan.work_dir.glob("*.tmp"), *plan.work_dir.glob("*/*.tmp"), *plan.output_dir.glob("*/.*.tmp")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    largest = sorted(sources, key=lambda source: -source.bytes)
    with workers(num_workers) as run:
        large = [source for source in largest if is_cut(source.file, plan.block_bytes)]
        run("cut", cut_file, [(plan, source) for source in large if not plan.blocks(source).exists()])
        parts = [part for source in largest for part in plan.parts(source)]
        run("clean", clean_part, [(plan, part) for part in parts if not plan.cleaned(part).exists()])
        languages: dict[str, tuple[Source, ...]] = {}
        for source in sources:
            judge(plan, source)
            languages[source.language] = (*languages.get(source.language, ()), *plan.parts(source))
        todo = [(plan, *item) for item in languages.items() if not plan.selected(item[0]).exists()]
        run("select", select_language, todo)
        find_shared(plan, list(languages))
        todo = [(plan, *item) for item in languages.items() if not plan.written(item[0]).exists()]
        run("write", write_language, todo)
    return {language: _counts(plan, language, parts) for language, parts in languages.items()}


def _counts(plan: Plan, language: str, parts: Sequence[Source]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(read_json(plan.cleaned(part) / "counts.json"))
    steps = (plan.selected(language), plan.written(language))
    return {**counts, **{name: value for step in steps for name, value in read_json(step / "counts.json").items()}}


# 2. Choosing


def select_language(plan: Plan, language: str, parts: Sequence[Source]) -> None:
    """Which cleaned pairs of a language to keep, and which of these are its dev set.

    Of equal pairs (as normalised) the first of the first file is kept; of what is left the `max_pairs` whose
    seeded hash is smallest; of these, as `split_validation`, those whose English sentence's is smallest
    for dev.

    Counts `exact_duplicate`, `near_duplicate` (equal as normalised only), `not_sampled`.
    """
    with new_folder(plan.selected(language)) as folder:
        keys = {name: KeyFiles([plan.cleaned(part) / name for part in parts]) for name in KEYS}
        texts, different = count_distinct(keys["exact"]), count_distinct(keys["all"])
        kept = sample(keys["ranks"], plan.max_pairs)  # (N,)
        start = 0
        with open(folder / "targets", "wb") as file:
            for targets in keys["targets"]:
                file.write(targets[kept[start : start + len(targets)]].tobytes())
                start += len(targets)
        targets = keys_of(folder / "targets")  # of the kept ones
        dev = sample([targets], min(plan.dev_pairs, len(targets) // 10))
        np.save(folder / "kept.npy", kept)
        np.save(folder / "dev.npy", dev)
        counts = {"exact_duplicate": keys["all"].total - texts, "near_duplicate": texts - different}
        write_json(counts | {"not_sampled": different - len(targets)}, folder / "counts.json")


# 3. Over all languages


def find_shared(plan: Plan, languages: Sequence[str]) -> None:
    """Ranks of English sentences: `held` out for a dev set of any language, and `repeated` in several pairs."""
    folder = plan.work_dir / "shared"
    if folder.exists():
        return
    with new_folder(folder) as new:
        targets = [keys_of(plan.selected(language) / "targets") for language in languages]
        held = [keys[np.load(plan.selected(code) / "dev.npy")] for code, keys in zip(languages, targets)]
        np.unique(np.concatenate(held)).tofile(new / "held")
        repeated_values(targets).tofile(new / "repeated")


# 4. Writing


def write_language(plan: Plan, language: str, parts: Sequence[Source]) -> None:
    """The shards `train/{number}.{language}-en.parquet` and `dev/…`, in the order of the files.

    Counts `held_out` (training pairs lost because a dev set has their English sentence), `train`, `dev`,
    `target_repeated`, and `origins`: training pairs of each. Gathers the vocabulary of the English training side.
    """
    counts: Counter[str] = Counter(train=0, dev=0, held_out=0, target_repeated=0)
    origins: Counter[str] = Counter()
    vocabulary = Vocabulary(plan.target_vocabulary)
    name = f"{language}-{plan.target_language}"
    with (
        new_folder(plan.written(language)) as folder,
        ShardWriter(plan.output_dir / "train", name, plan.shard_size) as train,
        ShardWriter(plan.output_dir / "dev", name, plan.shard_size) as dev,
    ):
        for part, table, is_dev, is_held in _kept_tables(plan, language, parts):
            training = table.filter(pa.array(~is_held))
            train.add(training)
            dev.add(table.filter(pa.array(is_dev)))
            vocabulary.add(training["target"].to_pylist())
            origins[part.origin] += len(training)
            lost = int((is_held & ~is_dev).sum())
            counts.update(train=len(training), dev=int(is_dev.sum()), held_out=lost)
            counts["target_repeated"] += training["target_repeated"].to_numpy().sum().item()
        vocabulary.save(folder / "vocabulary.npy")
        shards = {"train_shards": train.close(), "dev_shards": dev.close()}
        write_json(counts | shards | {"origins": origins}, folder / "counts.json")


def _kept_tables(
    plan: Plan, language: str, parts: Sequence[Source]
) -> Iterator[tuple[Source, pa.Table, np.ndarray, np.ndarray]]:
    """The chosen pairs in blocks, with what is known of them: (N,) bool each for dev and for held out English."""
    kept, dev = (np.load(plan.selected(language) / f"{name}.npy") for name in ("kept", "dev"))
    targets = keys_of(plan.selected(language) / "targets")
    held, repeated = (keys_of(plan.work_dir / "shared" / name) for name in ("held", "repeated"))
    row = place = 0
    for part in parts:
        with pq.ParquetFile(plan.cleaned(part) / "rows.parquet") as file:
            for batch in file.iter_batches(ROW_GROUP):
                chosen = batch.filter(pa.array(kept[row : row + len(batch)]))
                row += len(batch)
                here = slice(place, place + len(chosen))
                place += len(chosen)
                columns = [chosen["source"], chosen["target"], pa.repeat(part.origin, len(chosen))]
                columns += [chosen["text_hash"], pa.array(contains(repeated, targets[here]))]
                table = pa.Table.from_arrays(
                    [pa.chunked_array([c], t) for c, t in zip(columns, SCHEMA.types)], schema=SCHEMA
                )
                yield part, table, dev[here], contains(held, targets[here])
