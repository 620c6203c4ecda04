"""NLI data from files to token ids, compared with plain loops."""

import copy
import json
import lzma
import os
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import written
from conftest import REPOSITORY
from datasets import ClassLabel, Dataset, Features, Value
from transformers import PreTrainedTokenizerFast

from dap_transformers.xnli.data import (
    COLUMNS,
    LABEL,
    NLISource,
    StepLengthSampler,
    chosen_languages,
    digest,
    find_nli,
    load_nli,
    longest_first,
    prepare_nli,
    tokenize_nli,
    training_source,
)

XNLI = REPOSITORY.parent / "shared" / "data" / "xnli"
ROWS = [
    ("He is «here».", 'He said "no', "contradiction"),
    ("It\u2028rains", "It is wet", "entailment"),
    ("Mira", "-", "neutral"),
]


def tsv(rows: list[tuple[str, ...]]) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


def json_lines(names: Sequence[str], rows: Iterable[tuple[object, ...]]) -> str:
    return "".join(json.dumps(dict(zip(names, row))) + "\n" for row in rows)


def write(path: Path, text: str) -> NLISource:
    return NLISource(str(written.write(path, text)))


BLANK_PREMISE = json_lines(COLUMNS, [("\u200b", "b", "0")])
FILES = ["a.tsv", "a.tsv.gz", "snli.en.tsv.xz", "a.jsonl", "a.jsonl.xz", "a.parquet"]


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if ".tsv" in name:
        source = write(path, tsv([COLUMNS, *((*row, "letters") for row in ROWS)]))
    elif ".jsonl" in name:
        source = write(path, json_lines(COLUMNS, ROWS))
    else:
        numbered = [(*row[:2], LABEL.names.index(row[2])) for row in ROWS]
        pq.write_table(pa.table(dict(zip(COLUMNS, map(list, zip(*numbered))))), path)
        source = NLISource(str(path))
    expected = [dict(zip(COLUMNS, (*row[:2], LABEL.names.index(row[2])))) for row in ROWS]
    assert load_nli(source).to_list() == expected


def test_the_files_of_multinli_and_of_translated_multinli_are_read(tmp_path: Path) -> None:
    rows = [("a", "b", "-", 1), ("c", "d", "contradiction", 2), ("e", "f", "neutral", 3)]
    names = ["sentence1", "sentence2", "gold_label", "pairID"]
    own = write(tmp_path / "multinli_1.0_train.jsonl", json_lines(names, rows))
    assert load_nli(own)["label"][:] == [2, 1]
    assert load_nli(own)["premise"][:] == ["c", "e"]
    header = ("premise", "hypo", "label")
    translated = write(tmp_path / "multinli.de.tsv", tsv([header, ("a", "b", "contradictory")]))
    assert load_nli(translated)["label"][:] == [2]


@pytest.mark.parametrize("name", ["a.tsv.xz", "a.jsonl"])
def test_a_file_that_was_changed_is_read_again(name: str, tmp_path: Path) -> None:
    for premise in ("first", "other"):
        rows = [(premise, "b", "0")]
        content = tsv(rows) if "tsv" in name else json_lines(COLUMNS, rows)
        source = write(tmp_path / name, content)
        os.utime(tmp_path / name, (1, 1))
        assert load_nli(source)["premise"][:] == [premise]


def test_an_invisible_line_is_empty_and_an_invisible_text_is_refused(tmp_path: Path) -> None:
    lines = tsv([("a", "b", "0")]) + "\u200b\n\n" + tsv([("c\u200dd", "e", "1")])
    source = write(tmp_path / "a.tsv", lines)
    assert load_nli(source)["premise"][:] == ["a", "c\u200dd"]
    for name, text in (("b.tsv", tsv([("a", "\u00ad", "0")])), ("b.jsonl", BLANK_PREMISE)):
        with pytest.raises(ValueError, match=rf"{name}, row 1: \w+ is empty"):
            load_nli(write(tmp_path / name, text))


def test_labels_have_the_numbers_of_the_hub(tmp_path: Path) -> None:
    names = [*LABEL.names, "0", "1", "2", "-1", "-"]
    source = write(tmp_path / "a.tsv", tsv([("a", "b", name) for name in names]))
    assert load_nli(source)["label"][:] == [0, 1, 2] * 2
    numbers = [("a", "b", number) for number in (0, -1, 2, 1)]
    source = write(tmp_path / "a.jsonl", json_lines(COLUMNS, numbers))
    assert load_nli(source)["label"][:] == [0, 2, 1]


PARQUET = BytesIO()
pq.write_table(pa.table({"premise": ["x"], "gold": [0]}), PARQUET)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"x\ty\tneutral\nx\ty\tmaybe\n", "row 2: unknown label 'maybe'"),
        ("a.tsv", b"x\ty\tNeutral\n", "row 1: unknown label 'Neutral'"),
        ("a.tsv", b"x\ty\tneutral\nx\ty\n", "row 2: unknown label ''"),
        ("a.tsv", b"x\ty\tz\t0\t1\n", "row 1: more than 4 columns"),
        ("a.tsv", b"x\ty\t0\n\xff\ty\t0\n", "line 2: invalid UTF-8"),
        ("a.tsv", b"", "holds no examples"),
        ("a.tsv", b"x\ty\t-\n", "no examples with a gold label"),
        ("a.tsv.xz", lzma.compress(b"x\ty\t0\n" * 9)[:-9], "damaged or truncated"),
        ("a.jsonl", b'{"premise": "x"}\n', "no column 'hypothesis' among premise"),
        ("a.jsonl", b"{\n", "cannot be read"),
        ("a.jsonl", b'{"premise": 1, "hypothesis": "y", "label": 0}\n', "'premise' holds int64"),
        ("a.jsonl", b'{"premise": "x", "hypothesis": "y", "label": true}\n', "holds bool"),
        ("a.jsonl", b'{"premise": "x", "hypothesis": "y", "label": 3}\n', "unknown label 3"),
        ("a.parquet", b"no", "cannot be read"),
        ("a.parquet", PARQUET.getvalue(), "no column 'hypothesis' among premise, gold"),
    ],
)
def test_bad_input_is_refused_with_file_and_value(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        load_nli(NLISource(str(tmp_path / name)))


def test_labels_or_texts_of_mixed_types_are_refused(tmp_path: Path) -> None:
    """The JSON reader of `datasets` would turn a "-" among numbers into 0."""
    mixed = [("a", "b", label) for label in (0, "-", "neutral")]
    with pytest.raises(ValueError, match="column 'label' holds Json"):
        load_nli(write(tmp_path / "a.jsonl", json_lines(COLUMNS, mixed)))
    without = [("a", "b", 0), (None, "b", 0)]
    with pytest.raises(ValueError, match="row 2: premise is null"):
        load_nli(write(tmp_path / "a.jsonl", json_lines(COLUMNS, without)))


def test_pairs_without_a_gold_label_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        ("a", "b", "-"),
        ("c", "d", "neutral"),
        ("e", "f", "-1"),
        ("g", "h", "0"),
        ("i", "j", "1"),
    ]
    source = write(tmp_path / "a.tsv", tsv(rows))
    assert load_nli(source)["label"][:] == [1, 0, 1]
    assert "skipped 2 pairs" in caplog.text
    assert load_nli(source, limit=2)["premise"][:] == ["c", "g"]


def test_a_folder_is_read_by_split_and_language(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (
        "test-sw.tsv",
        "test-deu.tsv.xz",
        "validation-en.jsonl",
        "train-en.parquet",
        "test-fi.tsv",
        "README",
    ):
        (tmp_path / name).touch()
    found = find_nli(str(tmp_path))
    languages = {split: list(sources) for split, sources in found.items()}
    assert languages == {"train": ["en"], "dev": ["en"], "test": ["de", "sw"]}
    assert found["test"]["de"].path.endswith("test-deu.tsv.xz")
    assert "test-fi.tsv is left out" in caplog.text
    assert "README" not in caplog.text
    assert training_source(None, found, str(tmp_path)).path.endswith("train-en.parquet")
    (tmp_path / "dev-en.tsv").touch()
    with pytest.raises(ValueError, match=r"dev-en.tsv and .*validation-en.jsonl are both"):
        find_nli(str(tmp_path))


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(FileNotFoundError, match="no-such: no such folder"):
        find_nli(str(tmp_path / "no-such"))
    with pytest.raises(ValueError, match=r"holds a.txt: expected files \{train"):
        find_nli(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nobody/nothing: no such folder"):
        find_nli("nobody/nothing")
    with pytest.raises(ValueError, match="xnli holds no train-en file"):
        training_source(None, {"train": {}}, "xnli")
    with pytest.raises(FileNotFoundError, match="mnli.tsv: no such file"):
        training_source("mnli.tsv", {"train": {}}, "xnli")
    source = training_source("nobody/nothing:plain", {"train": {}}, "xnli")
    assert str(source) == "nobody/nothing:plain:train"
    with pytest.raises(FileNotFoundError, match="nobody/nothing:plain:train: cannot be loaded"):
        load_nli(source)


def test_a_class_label_column_says_the_names_of_its_numbers(tmp_path: Path) -> None:
    names = ["contradiction", "entailment", "neutral"]  # another order than the Hub's
    features = Features(
        {name: Value("string") for name in COLUMNS[:2]} | {"label": ClassLabel(names=names)}
    )
    rows = {"premise": ["a", "b", "c"], "hypothesis": ["d", "e", "f"], "label": [0, 2, -1]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    for source in (
        NLISource(str(tmp_path), None, "train"),
        NLISource(str(tmp_path / "train.parquet")),
    ):
        assert load_nli(source).to_list() == [
            dict(zip(COLUMNS, row)) for row in (("a", "d", 2), ("b", "e", 1))
        ]
    with pytest.raises(FileNotFoundError, match="test: cannot be loaded"):
        load_nli(NLISource(str(tmp_path), None, "test"))


def test_languages_are_tested_in_the_order_of_the_paper() -> None:
    test = {code: NLISource("") for code in ("de", "en", "sw")}
    assert chosen_languages(None, test, "xnli") == ["en", "de", "sw"]
    assert chosen_languages(["swh", "en"], test, "xnli") == ["en", "sw"]
    for wanted, message in (
        ("fr", "xnli has test sets only of de en sw"),
        ("fi", "XNLI has en fr"),
        ("qq", "qq"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen_languages([wanted], test, "xnli")
    with pytest.raises(ValueError, match="xnli holds no test"):
        chosen_languages(None, {}, "xnli")


def test_token_ids_equal_those_of_the_tokenizer_and_are_cached(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [("kaban " * size, "loder " * (12 - size), LABEL.names[size % 3]) for size in (1, 9, 5)]
    text = load_nli(write(tmp_path / "a.tsv", tsv(rows)))
    tokens = tokenize_nli(text, tiny_tokenizer, 12, False, "a")
    for row, (premise, hypothesis, label) in zip(tokens, rows, strict=True):
        expected = tiny_tokenizer(premise, hypothesis, truncation=True, max_length=12)["input_ids"]
        assert row["input_ids"] == expected
        assert (row["labels"], row["length"]) == (LABEL.names.index(label), len(expected))
        assert "token_type_ids" not in row
    again = tokenize_nli(text, tiny_tokenizer, 12, False, "a")
    assert again.cache_files == tokens.cache_files
    typed = copy.deepcopy(tiny_tokenizer)
    typed.model_input_names = [*typed.model_input_names, "token_type_ids"]
    for wanted in (True, False):
        assert (
            "token_type_ids" in tokenize_nli(text, typed, 12, wanted, "a").column_names
        ) == wanted
    assert max(tokenize_nli(text, tiny_tokenizer, 9, False, "a")["length"]) == 9
    lengths = longest_first(tokenize_nli(text, tiny_tokenizer, 40, False, "a"))["length"][:]
    assert lengths == sorted(lengths, reverse=True)


def test_data_is_prepared_by_split_and_language(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = write(
        tmp_path / "a.tsv", tsv([("kaban", "loder", "0"), ("loder", "kaban kaban", "2")])
    )
    data = prepare_nli(
        source, {"en": source}, {"en": source, "sw": source}, tiny_tokenizer, max_train_pairs=1
    )
    assert (len(data.train), list(data.dev), list(data.test)) == (1, ["en"], ["en", "sw"])
    assert data.test["sw"]["labels"][:] == [2, 0]  # the longer pair first
    assert len(data.missing) == 13
    assert (
        data.digests["test sw"]
        == data.digests["dev en"]
        == digest(load_nli(source))
        != data.digests["train"]
    )
    cut = prepare_nli(source, {"en": source}, {"sw": source}, tiny_tokenizer, max_test_pairs=1)
    assert (len(cut.train), len(cut.dev["en"]), cut.test["sw"]["labels"][:]) == (2, 2, [0])


def test_examples_are_drawn_at_random_and_sorted_within_each_step() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 1000)
    sampler = StepLengthSampler(lengths, step=64, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(1000))
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    blocks = [first[start : start + 64] for start in range(0, 1000, 64)]
    for block in blocks:
        assert all(lengths[a] >= lengths[b] for a, b in zip(block, block[1:]))
    drawn = np.random.default_rng((3, 0)).permutation(1000)
    assert [set(block) for block in blocks] == [
        set(drawn[i : i + 64].tolist()) for i in range(0, 1000, 64)
    ]

    def padded(order: list[int]) -> int:
        return sum(
            len(part) * lengths[part].max()
            for part in (order[i : i + 8] for i in range(0, len(order), 8))
        )

    assert padded(first) < 1.2 * lengths.sum() < padded(drawn.tolist())


@pytest.mark.skipif(not XNLI.is_dir(), reason="../shared with XNLI is absent")
def test_the_real_data_is_found_whole() -> None:
    found = find_nli(str(XNLI))
    assert (len(found["dev"]), len(found["test"]), found["train"]) == (15, 15, {})
    german = load_nli(found["test"]["de"])
    assert np.bincount(german["label"]).tolist() == [1670, 1670, 1670]
    assert len(load_nli(training_source(str(XNLI / "snli.en.tsv.xz"), found, str(XNLI)))) == 19_666
