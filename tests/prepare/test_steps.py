"""The steps on disk: the same result from any number of processes and after a kill, and what the shards hold."""

import hashlib
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import REPOSITORY, synthetic_pairs

from dap.prepare.filters import REASONS, CleaningOptions
from dap.prepare.leaks import LeakIndex
from dap.prepare.plan import Plan, Source
from dap.prepare.processes import workers
from dap.prepare.shards import SCHEMA, ShardWriter, full_device, new_folder
from dap.prepare.steps import prepare
from dap.text.corpus import find_bitext, load_bitext
from dap.training.data import normalise, split_validation

LANGUAGES = ("de", "fr", "sw")


def english(count: int) -> list[str]:
    return [target for _, target in synthetic_pairs("de", count)]


def write_raw(folder: Path) -> None:
    """Two files a language; a part of the English is the same in all, some has two sources, some pairs come again."""
    shared = english(60)
    for language in LANGUAGES:
        for part in (0, 1):
            rng = random.Random(f"{language}{part}")
            own = synthetic_pairs(language, 150, part)
            own += [(" ".join(word[::-1] + language for word in text.split()), text) for text in shared]
            own = [pair for pair in own if len(pair[1].split()) > 3]
            own += [(f"{source} oderso", target) for source, target in own[::3]]
            own += [(source.upper() + "!", target) for source, target in rng.sample(own, 20)] + rng.sample(own, 20)
            own += [("zu kurz", "too short")] * 3
            rng.shuffle(own)
            text = "".join(f"{source}\t{target}\n" for source, target in own)
            (folder / f"part{part}.{language}-en.tsv").write_text(text)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    write_raw(folder)
    return folder


def sources_of(folder: Path) -> list[Source]:
    files = [file for found in find_bitext(folder).values() for file in found]
    return [Source(number, file, Path(file.paths[0]).name) for number, file in enumerate(files)]


def plan_of(output: Path, **changes: Any) -> Plan:
    cleaning = CleaningOptions(max_shared=2)
    settings = {"max_pairs": 180, "dev_pairs": 12, "shard_size": 70, "seed": 3, **changes}
    return Plan(output, output / ".work", cleaning, **settings)


def content(folder: Path) -> dict[str, str]:
    """Hashes of the shards."""
    paths = sorted(folder.glob("*/*.parquet"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def rows(folder: Path, split: str, language: str) -> list[dict[str, Any]]:
    paths = sorted((folder / split).glob(f"*.{language}-en.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def prepared(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("prepared")
    return folder, prepare(plan_of(folder), sources_of(raw), 1)


def raw_pairs(raw: Path, language: str) -> list[tuple[str, str]]:
    lines = [line for part in (0, 1) for line in (raw / f"part{part}.{language}-en.tsv").read_text().splitlines()]
    return [tuple(line.split("\t")) for line in lines]


def test_counts_add_up_and_are_those_of_a_loop(raw: Path, prepared: tuple[Path, dict[str, Any]]) -> None:
    folder, counts = prepared
    for language in LANGUAGES:
        found, pairs = counts[language], raw_pairs(raw, language)
        good = [pair for pair in pairs if pair[0] != "zu kurz"]
        keys = [(normalise(source), normalise(target)) for source, target in good]
        assert found["read"] == len(pairs)
        assert found["short"] == 6
        assert found["exact_duplicate"] == len(good) - len(set(good)) >= 40
        assert found["near_duplicate"] == len(set(good)) - len(set(keys)) >= 20
        assert found["not_sampled"] == len(set(keys)) - 180
        losses = sum(
            found[name] for name in (*REASONS, "exact_duplicate", "near_duplicate", "not_sampled", "held_out")
        )
        assert losses + found["leak"] + found["train"] + found["dev"] == found["read"]
        assert found["train"] == len(rows(folder, "train", language)) == sum(found["origins"].values())
        assert found["dev"] == len(rows(folder, "dev", language)) == 12


def test_each_kept_pair_is_the_first_of_its_kind_and_none_comes_twice(
    raw: Path, prepared: tuple[Path, dict[str, Any]]
) -> None:
    folder, _ = prepared
    for language in LANGUAGES:
        first: dict[tuple[str, str], tuple[str, str]] = {}
        for pair in raw_pairs(raw, language):
            first.setdefault((normalise(pair[0]), normalise(pair[1])), pair)
        kept = [(row["source"], row["target"]) for split in ("train", "dev") for row in rows(folder, split, language)]
        keys = [(normalise(source), normalise(target)) for source, target in kept]
        assert len(set(keys)) == len(keys)
        assert all(first[key] == pair for key, pair in zip(keys, kept))
        hashes = [row["text_hash"] for split in ("train", "dev") for row in rows(folder, split, language)]
        assert len(set(hashes)) == len(hashes)


def test_no_english_of_a_dev_set_is_in_any_training_set(prepared: tuple[Path, dict[str, Any]]) -> None:
    folder, counts = prepared
    dev = {language: [normalise(row["target"]) for row in rows(folder, "dev", language)] for language in LANGUAGES}
    train = {normalise(row["target"]) for language in LANGUAGES for row in rows(folder, "train", language)}
    assert all(len(set(keys)) == len(keys) for keys in dev.values())
    assert not train & {key for keys in dev.values() for key in keys}
    assert sum(found["held_out"] for found in counts.values()) > 0
    assert len(set(dev["de"]) & set(dev["fr"])) >= 2  # languages that share text hold out the same sentences


def test_english_that_other_pairs_have_is_marked(prepared: tuple[Path, dict[str, Any]]) -> None:
    folder, counts = prepared
    train = {language: rows(folder, "train", language) for language in LANGUAGES}
    times = Counter(normalise(row["target"]) for part in train.values() for row in part)
    for language, part in train.items():
        assert [row["target_repeated"] for row in part] == [times[normalise(row["target"])] > 1 for row in part]
        assert counts[language]["target_repeated"] == sum(row["target_repeated"] for row in part) > 10


def test_shards_are_read_by_the_trainer(prepared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, counts = prepared
    loaded = load_bitext(folder / "train", cache_dir=tmp_path)
    assert {language: len(part) for language, part in loaded.items()} == {
        language: found["train"] for language, found in counts.items()
    }
    sizes = [pq.read_metadata(path).num_rows for path in sorted((folder / "train").glob("*.de-en.parquet"))]
    assert sizes[:-1] == [70] * (len(sizes) - 1)
    assert counts["de"]["train_shards"] == len(sizes) > 1
    assert {row["origin"] for row in rows(folder, "train", "de")} == {"part0.de-en.tsv", "part1.de-en.tsv"}
    assert pq.read_schema(next((folder / "train").iterdir())).equals(SCHEMA)


def test_the_sample_depends_on_the_seed_and_not_on_the_order_of_the_files(raw: Path, tmp_path: Path) -> None:
    sources = sources_of(raw)
    turned = [replace(source, number=number) for number, source in enumerate(reversed(sources))]
    chosen = []
    for name, order, seed in (("a", sources, 3), ("b", turned, 3), ("c", sources, 4)):
        prepare(plan_of(tmp_path / name, seed=seed), order, 1)
        chosen.append({row["text_hash"] for row in rows(tmp_path / name, "train", "de")})
    assert chosen[0] == chosen[1] != chosen[2]


def test_without_limits_everything_good_stays(raw: Path, tmp_path: Path) -> None:
    counts = prepare(plan_of(tmp_path, max_pairs=None, dev_pairs=0), sources_of(raw), 1)
    for language in LANGUAGES:
        different = {tuple(map(normalise, pair)) for pair in raw_pairs(raw, language) if pair[0] != "zu kurz"}
        assert counts[language]["train"] == len(different)
        assert not rows(tmp_path, "dev", language)


def test_dev_sets_are_a_tenth_at_most(raw: Path, tmp_path: Path) -> None:
    counts = prepare(plan_of(tmp_path, dev_pairs=10_000), sources_of(raw), 1)
    assert [found["dev"] for found in counts.values()] == [18] * 3
    parts = load_bitext(tmp_path / "train", cache_dir=tmp_path / "cache")
    _, again = split_validation(parts, 5, 0)  # the trainer may split once more
    assert [len(part) for part in again.values()] == [5] * 3


def test_leaks_are_left_out_and_listed(raw: Path, tmp_path: Path) -> None:
    pairs = [pair for pair in raw_pairs(raw, "de") if pair[0] != "zu kurz"]
    sentences = [pairs[0][0].upper(), pairs[5][1] + "?", "nothing of the kind"]
    plan = plan_of(tmp_path, check_leaks=True, list_leaks=True, max_pairs=None, dev_pairs=0)
    with new_folder(plan.work_dir / "leaks") as folder:
        LeakIndex(sentences, None).save(folder)
    counts = prepare(plan, sources_of(raw), 1)
    held = set(map(normalise, sentences))
    for language in LANGUAGES:
        leaking = [pair for pair in raw_pairs(raw, language) if held & set(map(normalise, pair))]
        assert counts[language]["leak"] == len(leaking)
        assert not held & {
            normalise(row[side]) for row in rows(tmp_path, "train", language) for side in ("source", "target")
        }
    assert counts["de"]["leak"] >= 2
    lines = [line for path in plan.work_dir.glob("clean-*/*/leaks.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == sum(found["leak"] for found in counts.values())


# Processes and kills


def test_two_processes_write_what_one_writes(raw: Path, prepared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, counts = prepared
    threads = os.environ.get("POLARS_MAX_THREADS")
    assert prepare(plan_of(tmp_path), sources_of(raw), 2) == counts
    assert content(tmp_path) == content(folder)
    assert os.environ.get("POLARS_MAX_THREADS") == threads


@pytest.mark.parametrize(("block_bytes", "num_workers"), [(3000, 1), (9000, 2)])
def test_blocks_of_a_file_give_what_the_whole_file_gives(
    block_bytes: int, num_workers: int, raw: Path, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, counts = prepared
    plan = plan_of(tmp_path, block_bytes=block_bytes)
    assert prepare(plan, sources_of(raw), num_workers) == counts
    assert content(tmp_path) == content(folder)
    assert len(plan.parts(sources_of(raw)[0])) > 1


def test_leaks_are_listed_in_the_order_of_the_file_whatever_the_blocks(raw: Path, tmp_path: Path) -> None:
    pairs = [pair for pair in raw_pairs(raw, "de") if pair[0] != "zu kurz"]
    listed = []
    for block_bytes in (2000, 10**9):
        plan = plan_of(tmp_path / str(block_bytes), block_bytes=block_bytes, check_leaks=True, list_leaks=True)
        with new_folder(plan.work_dir / "leaks") as folder:
            LeakIndex([side for pair in pairs[::9] for side in pair], None).save(folder)
        prepare(plan, sources_of(raw), 1)
        parts = [part for source in sources_of(raw) for part in plan.parts(source)]
        found = [plan.cleaned(part) / "leaks.jsonl" for part in parts]
        listed.append("".join(path.read_text() for path in found if path.exists()))
    assert listed[0] == listed[1]
    lines = [json.loads(line) for line in listed[0].splitlines()]
    for leak in lines:
        line = (raw / leak["origin"]).read_text().splitlines()[leak["line"] - 1]
        assert leak["text"] == line.split("\t")[leak["side"] == "target"]
    assert len(lines) > 50


BAD_LINES = [1, 502, 1003, 1504, 2005, 2506, 3007]


def bad_file(folder: Path) -> list[Source]:
    """A file with a bad line in most of its blocks."""
    lines = [f"Satz Nummer {number} steht hier\tsentence number {number} is here\n" for number in range(3000)]
    for number in BAD_LINES:
        lines.insert(number - 1, "one column\n")
    (folder / "de-en.tsv").write_text("".join(lines))
    return sources_of(folder)


@pytest.mark.parametrize("size", [30_000, 10**9])
def test_bad_lines_are_judged_over_all_blocks(size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sources = bad_file(tmp_path)
    plan = plan_of(tmp_path / "a", block_bytes=size, max_bad_lines=0.003)
    assert prepare(plan, sources, 1)["de"]["unreadable"] == 7
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    shown = [f", line {line} skipped: one column, expected source<TAB>target" for line in BAD_LINES[:5]]
    assert warnings == [f"{tmp_path}/de-en.tsv{text}" for text in (*shown, ": 7 of 3007 lines skipped (limit 0.3%)")]
    strict = plan_of(tmp_path / "b", block_bytes=size, max_bad_lines=0.002)
    for _ in range(2):  # nor does it pass when the command is given again
        with pytest.raises(ValueError, match="7 of the (first )?3007 lines are bad, more than max_bad_lines=0.002"):
            prepare(strict, sources, 1)
    assert len(plan.parts(sources[0])) == (6 if size < 10**9 else 1)


def test_text_that_no_sample_needs_is_let_go_over_blocks_too(tmp_path: Path) -> None:
    sources = bad_file(tmp_path)
    plan = plan_of(tmp_path / "a", block_bytes=5000, max_bad_lines=1.0, max_pairs=50)
    prepare(plan, sources, 1)
    sizes = [pq.read_metadata(plan.cleaned(part) / "rows.parquet").num_rows for part in plan.parts(sources[0])]
    assert sum(sizes) < 1000
    assert max(sizes[-5:]) < 20 < sizes[0]


KILL_AT = """
import os, pickle, signal, sys
from dap.prepare.steps import prepare
left, replace = int(sys.argv[2]), os.replace
def count_down(*paths):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = count_down
with open(sys.argv[1], "rb") as file:
    prepare(*pickle.load(file), num_workers=1)
"""


def finished_steps(work: Path) -> dict[Path, int]:
    """Folders of finished steps, and when each was made."""
    folders = [path for pattern in ("clean-*/*", "select-*", "shared", "write-*") for path in work.glob(pattern)]
    return {path: path.stat().st_mtime_ns for path in folders if path.is_dir() and path.suffix != ".tmp"}


def test_after_a_kill_the_rest_is_done_and_the_result_is_the_same(
    raw: Path, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, counts = prepared
    finished: dict[Path, int] = {}
    given, plan = tmp_path / "arguments", plan_of(tmp_path, block_bytes=9000)
    given.write_bytes(pickle.dumps((plan, sources_of(raw))))
    for renamings in (20, 30):  # within the cleaning, and behind
        code = [sys.executable, "-c", KILL_AT, str(given), str(renamings)]
        environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(code, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        folders = finished_steps(tmp_path / ".work")
        assert folders.items() >= finished.items()  # what was finished is not made again
        assert len(folders) > len(finished)
        finished = folders
    assert list((tmp_path / ".work").rglob("*.tmp"))
    assert prepare(plan, sources_of(raw), 1) == counts
    assert content(tmp_path) == content(folder)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_process_that_is_killed_ends_the_run_with_one_message() -> None:
    with pytest.raises(ValueError, match="a process was ended from outside.*--num_workers"), workers(2) as run:
        run("kill", signal.raise_signal, [(signal.SIGKILL,)])


# Full devices


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_no_space_left_is_one_message_and_finished_shards_stay(
    raw: Path, prepared: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, counts = prepared
    monkeypatch.setattr(ShardWriter, "_unfinished", property(_full_for_french))
    with pytest.raises(ValueError, match="write-fr: no space left on device; what is finished stays valid"):
        prepare(plan_of(tmp_path), sources_of(raw), 1)
    whole = content(tmp_path)
    assert {name for name in whole if "fr-en" not in name} == set(whole)
    assert whole.items() <= content(folder).items()
    assert len(whole) == counts["de"]["train_shards"] + 1
    monkeypatch.undo()
    assert prepare(plan_of(tmp_path), sources_of(raw), 1) == counts
    assert content(tmp_path) == content(folder)


def _full_for_french(writer: ShardWriter) -> Path:
    path = writer._folder / f".{writer._number:05d}.{writer._name}.{os.getpid()}.tmp"
    if writer._name == "fr-en" and not path.exists():
        path.symlink_to("/dev/full")
    return path


def test_a_short_write_of_numpy_is_a_full_device() -> None:
    with pytest.raises(ValueError, match="here: no space left on device"), full_device("here"):
        raise OSError("131072 requested and 4096 written")


def test_other_errors_of_the_system_pass() -> None:
    with pytest.raises(FileNotFoundError), full_device("here"):
        raise FileNotFoundError(2, "absent")


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "new") as folder:
        (folder / "half").write_bytes(bytes([1 // 0]))
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "new") as folder:
        (folder / "whole").touch()
        assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["whole"]


@pytest.mark.parametrize("sizes", [[], [0, 5], [10, 10], [25, 3, 0, 12], [100_000]])
def test_shards_have_their_size(sizes: list[int], tmp_path: Path) -> None:
    numbers = iter(range(10**6))
    tables = []
    for size in sizes:
        texts = [str(next(numbers)) for _ in range(size)]
        columns = [texts, texts, texts, np.zeros(size, np.uint64), np.zeros(size, bool)]
        tables.append(pa.table(columns, schema=SCHEMA))
    shard = 10 if sum(sizes) < 1000 else 70_000
    with ShardWriter(tmp_path, "de-en", shard) as writer:
        for table in tables:
            writer.add(table)
        count = writer.close()
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"{number:05d}.de-en.parquet" for number in range(count)]
    assert count == -(-sum(sizes) // shard)
    found = [row for path in paths for row in pq.read_table(path)["source"].to_pylist()]
    assert found == [str(number) for number in range(sum(sizes))]
    assert all(pq.read_metadata(path).num_rows == shard for path in paths[:-1])
