"""The steps give the same shards with any number of processes and after a kill."""

import os
import random
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from conftest import LANGUAGES, synthetic_pairs
from datasets import Dataset
from forked import run_killed
from written import Pairs, lines_of, read, text_of

from dap_transformers.prepare.filters import REASONS
from dap_transformers.prepare.options import PrepareOptions
from dap_transformers.prepare.pipeline import SCHEMA, prepare
from dap_transformers.prepare.run_folder import Plan, RawFile, begin
from dap_transformers.text.corpus import find_bitext
from dap_transformers.text_keys import normalise
from dap_transformers.training.dev_split import split_validation

TOO_SHORT = ("zu kurz", "too short")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two files per language.

    Some English sentences occur in all languages, some have two sources, some pairs are repeated.
    """
    folder = tmp_path_factory.mktemp("raw")
    shared = [target for _, target in synthetic_pairs("de", 60)]
    for language in LANGUAGES:
        for part in (0, 1):
            rng = random.Random(f"{language}{part}")
            own = synthetic_pairs(language, 150, part)
            for text in shared:
                own.append((" ".join(word[::-1] + language for word in text.split()), text))
            own = [pair for pair in own if len(pair[1].split()) > 3]
            own += [(f"{source} oderso", target) for source, target in own[::3]]
            near = [(source.upper() + "!", target) for source, target in rng.sample(own, 20)]
            own += near + rng.sample(own, 20) + [TOO_SHORT] * 3
            rng.shuffle(own)
            (folder / f"part{part}.{language}-en.tsv").write_bytes(text_of(own))
    return folder


def files_of(folder: Path) -> list[RawFile]:
    files = []
    for file in chain(*find_bitext(folder).values()):
        name = Path(file.paths[0]).name
        files.append(RawFile(file, origin=name, key=name))
    return files


def plan_of(output: Path, **changes: Any) -> Plan:
    settings = {"max_shared": 2, "max_pairs": 180, "dev_pairs": 12, "shard_size": 70, "seed": 3}
    plan = Plan(output, PrepareOptions(**settings | changes))
    plan.work_dir.mkdir(parents=True)
    return plan


def shards(folder: Path) -> dict[Path, bytes]:
    """Return the content of all shards."""
    paths = folder.glob("[!.]*/*.parquet")
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def prepared_pairs(folder: Path, split: str, language: str) -> Pairs:
    shards = folder / split / f"*.{language}-en.parquet"
    return pl.read_parquet(shards, columns=["source", "target"]).rows()


@pytest.fixture(scope="module")
def prepared(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("prepared")
    return folder, prepare(plan_of(folder), files_of(raw), 1)


def normalised(pair: tuple[str, str]) -> tuple[str, str]:
    return tuple(map(normalise, pair))


def targets(pairs: Pairs) -> list[str]:
    return [normalise(target) for _, target in pairs]


def test_counts_equal_those_of_a_loop_and_the_first_of_equal_pairs_is_kept(
    raw: Path, prepared: tuple
) -> None:
    folder, counts = prepared
    losses = [*REASONS, "leak", "duplicate", "not_sampled", "held_out"]
    for language in LANGUAGES:
        found = counts[language]
        pairs = [*read(raw / f"part0.{language}-en.tsv"), *read(raw / f"part1.{language}-en.tsv")]
        good = [pair for pair in pairs if pair != TOO_SHORT]
        first = {normalised(pair): pair for pair in reversed(good)}
        train, dev = (prepared_pairs(folder, split, language) for split in ("train", "dev"))
        assert found["read"] == len(pairs)
        assert found["short"] == 6
        assert found["duplicate"] == len(good) - len(first) >= 60
        assert found["not_sampled"] == len(first) - 180
        assert found["train"] == len(train) == sum(found["origins"].values())
        assert found["dev"] == len(dev) == 12
        assert sum(found[name] for name in [*losses, "train", "dev"]) == found["read"]

        kept = train + dev
        assert len(set(map(normalised, kept))) == len(kept)
        assert all(first[normalised(pair)] == pair for pair in kept)


def test_english_sentences_of_dev_sets_are_in_no_training_set(
    prepared: tuple,
) -> None:
    folder, counts = prepared
    train = {language: prepared_pairs(folder, "train", language) for language in LANGUAGES}
    trained = {target for part in train.values() for target in targets(part)}
    for language, part in train.items():
        dev = targets(prepared_pairs(folder, "dev", language))
        assert len(set(dev)) == len(dev)
        assert not trained & set(dev)
        paths = sorted((folder / "train").glob(f"*.{language}-en.parquet"))
        sizes = [pq.read_metadata(path).num_rows for path in paths]
        assert sizes == [70] * (len(part) // 70) + [len(part) % 70]
        assert len(sizes) > 1
        assert pq.read_schema(paths[0]).equals(SCHEMA)
    assert sum(found["held_out"] for found in counts.values()) > 0


def test_the_sample_depends_on_the_seed_but_not_on_the_order_of_the_files(
    raw: Path, prepared: tuple, tmp_path: Path
) -> None:
    folders = [prepared[0]]
    for seed in (3, 4):
        folders.append(tmp_path / str(seed))
        prepare(plan_of(folders[-1], seed=seed), files_of(raw)[::-1], 1)
    chosen = [set(map(normalised, prepared_pairs(folder, "train", "de"))) for folder in folders]
    assert chosen[0] == chosen[1] != chosen[2]


def test_samples_of_corpora_are_drawn_before_that_of_the_language(tmp_path: Path) -> None:
    for name, size in (("large", 1500), ("small", 150)):
        line = "{0} Haus garden light {1}\t{0} house garden light {1}"
        lines = lines_of(line.format(name, number) for number in range(size))
        (tmp_path / f"{name}.de-en.tsv").write_text(lines)
    found = {}
    for most in (0, 100):
        plan = plan_of(tmp_path / f"{most}", max_corpus_pairs=100, max_pairs=most, dev_pairs=0)
        found[most] = prepare(plan, files_of(tmp_path), 1)["de"]["origins"]
    assert list(found[0].values()) == [100, 100]
    # If both samples used the same rank, it would be about 10.
    assert 35 < found[100]["small.de-en.tsv"] < 65


def test_dev_sets_equal_those_of_the_trainer(raw: Path, tmp_path: Path) -> None:
    prepare(plan_of(tmp_path, dev_pairs=5), files_of(raw), 1)
    whole = {}
    for language in LANGUAGES:
        pairs = prepared_pairs(tmp_path, "*", language)
        whole[language] = Dataset.from_list([{"target": target} for _, target in pairs])
    _, dev = split_validation(whole, 5, seed=3)
    for language in LANGUAGES:
        found = set(map(normalise, dev[language]["target"]))
        assert found == set(targets(prepared_pairs(tmp_path, "dev", language)))


# ------------------------------------------------------------------------ processes and kills


@pytest.mark.slow
def test_two_processes_write_the_same_as_one(raw: Path, prepared: tuple, tmp_path: Path) -> None:
    folder, counts = prepared
    threads = os.environ.get("POLARS_MAX_THREADS")
    assert prepare(plan_of(tmp_path), files_of(raw), 2) == counts
    assert shards(tmp_path) == shards(folder)
    assert os.environ.get("POLARS_MAX_THREADS") == threads


def prepare_until_killed(renamings: int, plan: Plan, files: list[RawFile]) -> None:
    """Prepare text in a process that kills itself in place of a later renaming of a file."""
    replace = os.replace

    def count_down(*paths: Path) -> None:
        nonlocal renamings
        renamings -= 1
        if not renamings:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = count_down
    begin(plan, files)
    prepare(plan, files, num_workers=1)


def cleaned_files(work: Path) -> dict[Path, int]:
    """Return the folders of cleaned files, and when each was made."""
    return {path: path.stat().st_mtime_ns for path in work.glob("clean-*")}


def test_a_killed_run_is_resumed_and_the_result_is_the_same(
    raw: Path, prepared: tuple, tmp_path: Path
) -> None:
    folder, counts = prepared
    finished: dict[Path, int] = {}
    plan = plan_of(tmp_path)
    for renamings in (5, 12):  # during the cleaning, and after it
        run_killed(prepare_until_killed, renamings, plan, files_of(raw))
        folders = cleaned_files(plan.work_dir)
        assert folders.items() >= finished.items()  # finished folders are kept
        assert len(folders) > len(finished)
        finished = folders
    assert list(tmp_path.rglob("*.tmp"))
    (plan.work_dir / ".leaks.json.a.tmp").touch()  # left by a kill within `whole_file`
    begin(plan, files_of(raw))
    assert cleaned_files(plan.work_dir) == finished
    assert not list(tmp_path.rglob("*.tmp"))
    assert prepare(plan, files_of(raw), 1) == counts
    assert shards(tmp_path) == shards(folder)
