"""The language mix: its shares, no repetition before all was seen, the same order for a seed."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from conftest import tiny_tokenizer
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from written import text_of, write

from dap_transformers.text.corpus import load_bitext
from dap_transformers.training.batches import BitextCollator, tokenize_bitext
from dap_transformers.training.mixing import LanguageMixSampler, mix_streams, mix_weights

SIZES = {"aa": 400, "bb": 100, "cc": 10}
NAMES = [f"{language}:{row}" for language, size in SIZES.items() for row in range(size)]
MIXES = [
    ("natural", 0.5, [400, 100, 10]),
    ("uniform", 0.5, [1, 1, 1]),
    ("temperature", 0.5, [400**0.5, 100**0.5, 10**0.5]),
]


def drawn(sampler: LanguageMixSampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(("mix", "alpha", "shares"), MIXES)
def test_shares_of_the_mix(mix: str, alpha: float, shares: list) -> None:
    sampler = LanguageMixSampler(list(SIZES.values()), mix, alpha, seed=0)
    times = Counter(NAMES[row] for row in drawn(sampler))
    assert times.total() == len(sampler) == 510
    for language, share in zip(SIZES, shares):
        uses = [times[f"{language}:{row}"] for row in range(SIZES[language])]
        assert abs(sum(uses) - 510 * share / sum(shares)) <= 1
        # Nothing is repeated before everything has been seen.
        assert max(uses) - min(uses) <= 1


def test_the_order_depends_on_the_seed_and_each_epoch_goes_on_where_the_last_one_ended() -> None:
    sampler = LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=3)
    epochs = [drawn(sampler, epoch) for epoch in range(3)]
    uses = np.bincount(np.concatenate(epochs), minlength=507)
    for rows in (uses[:400], uses[400:500], uses[500:]):
        assert rows.min() >= 1
        assert rows.max() - rows.min() <= 1
    languages = np.searchsorted([400, 500], epochs[0][:100], side="right")
    assert np.bincount(languages, minlength=3).min() > 20  # shuffled
    assert epochs[0] == drawn(LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=3))
    assert epochs[0] != epochs[1]
    assert epochs[0] != drawn(LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=4))


@pytest.mark.parametrize(("mix", "alpha", "shares"), MIXES[1:])
def test_a_mixed_stream_has_no_end_and_the_shares_of_the_mix(
    mix: str, alpha: float, shares: list
) -> None:
    streams = {}
    for language in SIZES:
        own = [name for name in NAMES if name.startswith(language)]
        streams[language] = Dataset.from_dict({"pair_id": own}).to_iterable_dataset()
    weights = mix_weights(list(SIZES.values()), mix, alpha)
    stream = mix_streams(streams, weights, shuffle_buffer=0, seed=0)
    names = [row["pair_id"] for row in islice(stream, 2000)]
    assert set(names) == set(NAMES)
    for language, share in zip(SIZES, shares):
        times = Counter(name for name in names if name.startswith(language))
        assert times.total() / 2000 == pytest.approx(share / sum(shares), abs=0.03)
        # No pair comes again before the other pairs of its language.
        assert max(times.values()) - min(times.values()) <= 1


def test_a_stream_is_shuffled_by_the_seed_and_each_pass_is_complete(bitext_dir: Path) -> None:
    def rows(seed: int) -> list[int]:
        text = load_bitext(bitext_dir / "de-en.tsv", streaming=True)
        stream = mix_streams(tokenize_bitext(text, tiny_tokenizer(), 8), np.ones(1), 70, seed)
        return [int(row["pair_id"].removeprefix("de:")) for row in islice(stream, 600)]

    order = rows(seed=1)
    assert order == rows(seed=1) != rows(seed=2)
    for start in (0, 200, 400):
        one_pass = order[start : start + 200]
        assert sorted(one_pass) == list(range(200)) != one_pass


# Streams over processes and workers

PAIRS = {"de": 60, "fr": 30}
#: Number of German and French files.
FILES = {"one": (1, 1), "uneven": (3, 2)}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders in which the pairs of a language are spread over one to three files."""
    folders = {}
    for name, counts in FILES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        for language, count in zip(PAIRS, counts):
            for number in range(count):
                rows = range(number, PAIRS[language], count)
                pairs = [(f"{language} {row}", f"sentence {row}") for row in rows]
                write(folders[name] / f"{number}.{language}-en.tsv", text_of(pairs))
    return folders


def batches(folder: Path, rank: int, workers: int, split: str) -> DataLoader:
    """Batches of five pairs for one of two processes, split as `datasets` or as accelerate does."""
    tokenized = tokenize_bitext(load_bitext(folder, streaming=True), tiny_tokenizer(), 16)
    weights = mix_weights(list(PAIRS.values()), "natural")
    mixed = mix_streams(tokenized, weights, shuffle_buffer=25, seed=3)
    if split == "datasets":
        mixed = split_dataset_by_node(mixed, rank, 2)
    collator = BitextCollator(1, ["de", "fr"])
    loader = DataLoader(mixed, batch_size=5, num_workers=workers, collate_fn=collator)
    if split == "accelerate":
        loader = prepare_data_loader(
            loader, num_processes=2, process_index=rank, dispatch_batches=False
        )
    return loader


@pytest.mark.parametrize(("files", "split"), [("uneven", "datasets"), ("one", "accelerate")])
def test_processes_draw_full_batches_of_different_pairs_without_end(
    sharded: dict, files: str, split: str
) -> None:
    drawn = []
    for rank in range(2):
        loader = batches(sharded[files], rank, 2, split)
        drawn.append([batch["pair_ids"] for batch in islice(loader, 4 * 90 // 10)])
    assert {len(batch) for batch in drawn[0] + drawn[1]} == {5}
    assert [len(part) for part in drawn] == [36, 36]

    first = {pair for batch in drawn[0][:4] for pair in batch}
    second = {pair for batch in drawn[1][:4] for pair in batch}
    assert not first & second
    uses = Counter(pair for part in drawn for batch in part for pair in batch)
    assert len(uses) == 90
    counts = Counter(pair.split(":")[0] for pair in uses.elements())
    assert counts["de"] / counts.total() == pytest.approx(2 / 3, abs=0.08)


@pytest.mark.parametrize(("files", "workers"), [("one", 0), ("uneven", 2)])
def test_a_stream_resumes_exactly_by_skipping_batches(
    sharded: dict, files: str, workers: int
) -> None:
    whole = batches(sharded[files], 1, workers, "accelerate")
    again = batches(sharded[files], 1, workers, "accelerate")
    rest = skip_first_batches(again, 23)  # beyond the first pass
    expected = [batch["pair_ids"] for batch in islice(whole, 33)][23:]
    assert [batch["pair_ids"] for batch in islice(rest, 10)] == expected
