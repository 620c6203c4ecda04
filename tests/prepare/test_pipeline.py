"""The steps give the same shards with any number of processes and after a kill."""

import hashlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import REPOSITORY, synthetic_pairs
from datasets import Dataset
from written import text_of

from dap.errors import UserError
from dap.file_io import write_json
from dap.languages import normalise
from dap.prepare.filters import REASONS
from dap.prepare.options import PrepareOptions
from dap.prepare.pipeline import SCHEMA, prepare, workers
from dap.prepare.run_folder import Plan, RawFile, begin
from dap.text.corpus import find_bitext, load_bitext
from dap.training.batches import split_validation

LANGUAGES = ("de", "fr", "sw")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two files per language.

    Some English sentences occur in all languages, some have two sources, some pairs are repeated.
    """
    folder, shared = (
        tmp_path_factory.mktemp("raw"),
        [target for _, target in synthetic_pairs("de", 60)],
    )
    for language in LANGUAGES:
        for part in (0, 1):
            rng = random.Random(f"{language}{part}")
            own = synthetic_pairs(language, 150, part)
            own += [
                (" ".join(word[::-1] + language for word in text.split()), text) for text in shared
            ]
            own = [pair for pair in own if len(pair[1].split()) > 3]
            own += [(f"{source} oderso", target) for source, target in own[::3]]
            own += [
                (source.upper() + "!", target) for source, target in rng.sample(own, 20)
            ] + rng.sample(own, 20)
            own += [("zu kurz", "too short")] * 3
            rng.shuffle(own)
            (folder / f"part{part}.{language}-en.tsv").write_bytes(text_of(own))
    return folder


def files_of(folder: Path) -> list[RawFile]:
    files = [file for found in find_bitext(folder).values() for file in found]
    return [RawFile(file, Path(file.paths[0]).name, Path(file.paths[0]).name) for file in files]


def plan_of(output: Path, leaks: list[str] | None = None, **changes: Any) -> Plan:
    settings = {
        "max_shared": 2,
        "max_pairs": 180,
        "dev_pairs": 12,
        "shard_size": 70,
        "seed": 3,
        **changes,
    }
    plan = Plan(output, PrepareOptions(**settings))
    plan.work_dir.mkdir(parents=True)
    if leaks is not None:
        write_json({"sentences": leaks, "threshold": None}, plan.leaks)
    return plan


def content(folder: Path) -> dict[str, str]:
    """Hashes of the shards."""
    paths = sorted(folder.glob("[!.]*/*.parquet"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def rows(folder: Path, split: str, language: str) -> list[dict[str, Any]]:
    paths = sorted((folder / split).glob(f"*.{language}-en.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def prepared(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("prepared")
    return folder, prepare(plan_of(folder), files_of(raw), 1)


def raw_pairs(raw: Path, language: str) -> list[tuple[str, str]]:
    lines = [
        line
        for part in (0, 1)
        for line in (raw / f"part{part}.{language}-en.tsv").read_text().splitlines()
    ]
    return [tuple(line.split("\t")) for line in lines]


def test_counts_add_up_and_are_those_of_a_loop(
    raw: Path, prepared: tuple[Path, dict[str, Any]]
) -> None:
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
        ends = (
            *REASONS,
            "exact_duplicate",
            "near_duplicate",
            "not_sampled",
            "held_out",
            "leak",
            "train",
            "dev",
        )
        assert sum(found[name] for name in ends) == found["read"]
        assert (
            found["train"] == len(rows(folder, "train", language)) == sum(found["origins"].values())
        )
        assert found["dev"] == len(rows(folder, "dev", language)) == 12


def test_each_kept_pair_is_the_first_of_its_kind_and_none_comes_twice(
    raw: Path, prepared: tuple[Path, dict[str, Any]]
) -> None:
    folder, _ = prepared
    for language in LANGUAGES:
        first: dict[tuple[str, str], tuple[str, str]] = {}
        for pair in raw_pairs(raw, language):
            first.setdefault((normalise(pair[0]), normalise(pair[1])), pair)
        kept = [
            (row["source"], row["target"])
            for split in ("train", "dev")
            for row in rows(folder, split, language)
        ]
        keys = [(normalise(source), normalise(target)) for source, target in kept]
        assert len(set(keys)) == len(keys)
        assert all(first[key] == pair for key, pair in zip(keys, kept))
        hashes = [
            row["text_hash"] for split in ("train", "dev") for row in rows(folder, split, language)
        ]
        assert len(set(hashes)) == len(hashes)


def test_no_english_of_a_dev_set_is_in_any_training_set(
    prepared: tuple[Path, dict[str, Any]],
) -> None:
    folder, counts = prepared
    dev = {
        language: [normalise(row["target"]) for row in rows(folder, "dev", language)]
        for language in LANGUAGES
    }
    train = {
        normalise(row["target"])
        for language in LANGUAGES
        for row in rows(folder, "train", language)
    }
    assert all(len(set(keys)) == len(keys) for keys in dev.values())
    assert not train & {key for keys in dev.values() for key in keys}
    assert sum(found["held_out"] for found in counts.values()) > 0
    assert (
        len(set(dev["de"]) & set(dev["fr"])) >= 2
    )  # languages that share text hold out the same sentences


def test_english_that_other_pairs_have_is_marked(prepared: tuple[Path, dict[str, Any]]) -> None:
    folder, counts = prepared
    train = {language: rows(folder, "train", language) for language in LANGUAGES}
    times = Counter(normalise(row["target"]) for part in train.values() for row in part)
    for language, part in train.items():
        assert [row["target_repeated"] for row in part] == [
            times[normalise(row["target"])] > 1 for row in part
        ]
        assert (
            counts[language]["target_repeated"] == sum(row["target_repeated"] for row in part) > 10
        )


def test_shards_are_read_by_the_trainer(
    prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, counts = prepared
    loaded = load_bitext(folder / "train", cache_dir=tmp_path)
    assert {language: len(part) for language, part in loaded.items()} == {
        language: found["train"] for language, found in counts.items()
    }
    sizes = [
        pq.read_metadata(path).num_rows
        for path in sorted((folder / "train").glob("*.de-en.parquet"))
    ]
    assert sizes[:-1] == [70] * (len(sizes) - 1)
    assert counts["de"]["train_shards"] == len(sizes) > 1
    assert {row["origin"] for row in rows(folder, "train", "de")} == {
        "part0.de-en.tsv",
        "part1.de-en.tsv",
    }
    assert pq.read_schema(next((folder / "train").iterdir())).equals(SCHEMA)


def test_the_sample_depends_on_the_seed_and_not_on_the_order_of_the_files(
    raw: Path, tmp_path: Path
) -> None:
    files, chosen = files_of(raw), []
    for name, order, seed in (("a", files, 3), ("b", files[::-1], 3), ("c", files, 4)):
        prepare(plan_of(tmp_path / name, seed=seed), order, 1)
        chosen.append({row["text_hash"] for row in rows(tmp_path / name, "train", "de")})
    assert chosen[0] == chosen[1] != chosen[2]


def test_so_many_pairs_of_each_corpus_are_drawn_before_those_of_the_language(
    raw: Path, tmp_path: Path
) -> None:
    counts = prepare(
        plan_of(tmp_path, max_corpus_pairs=60, max_pairs=0, dev_pairs=0), files_of(raw), 1
    )
    for language in LANGUAGES:
        first, second = (
            counts[language]["origins"][f"part{part}.{language}-en.tsv"] for part in (0, 1)
        )
        assert (first, counts[language]["train"]) == (60, first + second)
        assert 40 < second <= 60  # without those that the first has, too
        assert counts[language]["train"] + counts[language]["not_sampled"] == len(
            {
                tuple(map(normalise, pair))
                for pair in raw_pairs(raw, language)
                if pair[0] != "zu kurz"
            }
        )


def test_of_what_is_drawn_of_each_corpus_the_language_draws_evenly(tmp_path: Path) -> None:
    for name, size in ("large", 1500), ("small", 150):
        text = (
            f"{name} Haus Garten Licht {number}\t{name} house garden light {number}\n"
            for number in range(size)
        )
        (tmp_path / f"{name}.de-en.tsv").write_text("".join(text))
    plan = plan_of(tmp_path / "out", max_corpus_pairs=100, max_pairs=100, dev_pairs=0)
    origins = prepare(plan, files_of(tmp_path), 1)["de"]["origins"]
    assert 35 < origins["small.de-en.tsv"] < 65  # by one and the same order it would be about 10


def test_dev_sets_are_a_tenth_at_most(raw: Path, tmp_path: Path) -> None:
    counts = prepare(plan_of(tmp_path, dev_pairs=10_000), files_of(raw), 1)
    assert [found["dev"] for found in counts.values()] == [18] * 3
    parts = load_bitext(tmp_path / "train", cache_dir=tmp_path / "cache")
    _, again = split_validation(parts, 5, 0)  # the trainer may split once more
    assert [len(part) for part in again.values()] == [5] * 3


def test_dev_sets_are_those_of_the_trainer(raw: Path, tmp_path: Path) -> None:
    prepare(plan_of(tmp_path, dev_pairs=10, seed=3), files_of(raw), 1)
    whole = {}
    for language in LANGUAGES:
        pairs = rows(tmp_path, "train", language) + rows(tmp_path, "dev", language)
        whole[language] = Dataset.from_list([{"target": pair["target"]} for pair in pairs])
    _, dev = split_validation(whole, 10, seed=3)
    for language in LANGUAGES:
        prepared = {normalise(pair["target"]) for pair in rows(tmp_path, "dev", language)}
        assert {normalise(target) for target in dev[language]["target"]} == prepared


def test_leaks_are_left_out_and_listed_in_the_order_of_the_file(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap.text.formats.BATCH", 50)
    pairs = [pair for pair in raw_pairs(raw, "de") if pair[0] != "zu kurz"]
    sentences = [
        pairs[0][0].upper(),
        pairs[5][1] + "?",
        "nothing of the kind",
        *sum(pairs[::9], ()),
    ]
    plan = plan_of(tmp_path, sentences, max_pairs=0, dev_pairs=0)
    counts = prepare(plan, files_of(raw), 1)
    held = set(map(normalise, sentences))
    for language in LANGUAGES:
        keys = [
            tuple(map(normalise, pair)) for pair in raw_pairs(raw, language) if pair[0] != "zu kurz"
        ]
        assert counts[language]["leak"] == sum(bool(held & set(pair)) for pair in keys)
        assert counts[language]["train"] == len(
            {pair for pair in keys if not held & set(pair)}
        )  # without limits
        assert not rows(tmp_path, "dev", language)
        assert not held & {
            normalise(row[side])
            for row in rows(tmp_path, "train", language)
            for side in ("source", "target")
        }
    assert counts["de"]["leak"] >= 20
    for file in files_of(raw):
        lines = Path(file.file.paths[0]).read_text().splitlines()
        listed = [
            json.loads(line)
            for line in (plan.cleaned(file) / "leaks.jsonl").read_text().splitlines()
        ]
        expected = [
            (number, side, text)
            for number, line in enumerate(lines, 1)
            for side, text in zip(("source", "target"), line.split("\t"))
            if normalise(text) in held
        ]
        assert [(leak["line"], leak["side"], leak["text"]) for leak in listed] == expected
        assert all(normalise(leak["evaluation"]) == normalise(leak["text"]) for leak in listed)


def test_bad_lines_are_judged_over_the_file(tmp_path: Path) -> None:
    lines = [
        f"Satz Nummer {number} steht hier\tsentence number {number} is here\n"
        for number in range(3000)
    ]
    for number in (1, 502, 1003, 1504, 2005, 2506, 3007):
        lines.insert(number - 1, "one column\n")
    (tmp_path / "de-en.tsv").write_text("".join(lines))
    plan = plan_of(tmp_path / "a", max_bad_lines=0.003, max_pairs=50)
    assert prepare(plan, files_of(tmp_path), 1)["de"]["unreadable"] == 7
    strict = plan_of(tmp_path / "b", max_bad_lines=0.002)
    for _ in range(2):  # nor does it pass when the command is given again
        with pytest.raises(
            ValueError, match="7 of the first 3007 lines are bad, more than max_bad_lines=0.002"
        ):
            prepare(strict, files_of(tmp_path), 1)


def test_text_that_no_sample_needs_is_let_go(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap.text.formats.BATCH", 20)
    plan = plan_of(tmp_path, max_pairs=20)
    prepare(plan, files_of(raw), 1)
    sizes = [
        pq.read_metadata(plan.cleaned(file) / "rows.parquet").num_rows for file in files_of(raw)
    ]
    assert all(20 <= size < 120 for size in sizes)


# Processes and kills


def test_two_processes_write_what_one_writes(
    raw: Path, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, counts = prepared
    threads = os.environ.get("POLARS_MAX_THREADS")
    assert prepare(plan_of(tmp_path), files_of(raw), 2) == counts
    assert content(tmp_path) == content(folder)
    assert os.environ.get("POLARS_MAX_THREADS") == threads


KILL_AT = """
import os, pickle, signal, sys
from dap.prepare.pipeline import prepare
from dap.prepare.run_folder import begin
left, replace = int(sys.argv[2]), os.replace
def count_down(*paths):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = count_down
with open(sys.argv[1], "rb") as file:
    plan, files = pickle.load(file)
begin(plan, files)
prepare(plan, files, num_workers=1)
"""


def cleaned_files(work: Path) -> dict[Path, int]:
    """Folders of what is cleaned of a file, and when each was made."""
    return {path: path.stat().st_mtime_ns for path in work.glob("clean-*") if path.suffix != ".tmp"}


def test_after_a_kill_the_rest_is_done_and_the_result_is_the_same(
    raw: Path, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, counts = prepared
    finished: dict[Path, int] = {}
    given, plan = tmp_path / "arguments", plan_of(tmp_path)
    given.write_bytes(pickle.dumps((plan, files_of(raw))))
    for renamings in (10, 20):  # within the cleaning, and behind
        code = [sys.executable, "-c", KILL_AT, str(given), str(renamings)]
        environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(code, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        folders = cleaned_files(plan.work_dir)
        assert folders.items() >= finished.items()  # what was finished is not made again
        assert len(folders) > len(finished)
        finished = folders
    assert list(tmp_path.rglob("*.tmp"))
    (plan.work_dir / ".leaks.json.a.tmp").touch()  # as a kill within `whole_file` leaves it
    begin(plan, files_of(raw))
    assert cleaned_files(plan.work_dir) == finished
    assert not list(tmp_path.rglob("*.tmp"))
    assert prepare(plan, files_of(raw), 1) == counts
    assert content(tmp_path) == content(folder)


def test_a_killed_process_ends_the_run_with_one_message() -> None:
    with pytest.raises(UserError, match="--num_workers"), workers(2) as run:
        run("kill", signal.raise_signal, {"de": (signal.SIGKILL,)})
