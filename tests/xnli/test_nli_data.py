"""Inference data from files to token ids, and accuracy, against independent libraries and plain loops."""

import copy
import json
import lzma
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

from dap.xnli.nli_data import (
    COLUMNS,
    LABEL,
    NLISource,
    StepLengthSampler,
    _find_configs,
    chosen_languages,
    digest,
    find_nli,
    label_id,
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
    ("Mira", "", "neutral"),
]


NO_HYPOTHESIS = BytesIO()
pq.write_table(pa.table({"premise": ["x"], "gold": [0]}), NO_HYPOTHESIS)


def tsv(rows: list[tuple[str, ...]]) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


def write(path: Path, text: str) -> NLISource:
    return NLISource(str(written.write(path, text)))


@pytest.mark.parametrize(
    "name", ["a.tsv", "a.tsv.gz", "snli.en.tsv.xz", "a.jsonl", "a.jsonl.xz", "a.parquet"]
)
def test_every_format_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if ".tsv" in name:
        source = write(path, tsv([COLUMNS, *((*row, "letters") for row in ROWS)]))
    elif ".jsonl" in name:
        source = write(path, "".join(json.dumps(dict(zip(COLUMNS, row))) + "\n" for row in ROWS))
    else:
        numbered = [
            (premise, hypothesis, LABEL.names.index(label)) for premise, hypothesis, label in ROWS
        ]
        pq.write_table(pa.table(dict(zip(COLUMNS, map(list, zip(*numbered))))), path)
        source = NLISource(str(path))
    expected = [dict(zip(COLUMNS, (*row[:2], LABEL.names.index(row[2])))) for row in ROWS]
    assert load_nli(source).to_list() == expected


def test_labels_are_those_of_the_hub() -> None:
    names = [*LABEL.names, 0, 1, 2, "0", "1", "2", -1, "-1", "-"]
    assert [label_id(name, "") for name in names] == [0, 1, 2] * 3 + [-1] * 3


@pytest.mark.parametrize("label", ["maybe", "", "3", 3, True, None, 1.0, "Neutral"])
def test_another_label_is_an_error(label: object) -> None:
    message = r"a.tsv, line 7: unknown label .*entailment \(0\), neutral \(1\), contradict"
    with pytest.raises(ValueError, match=message):
        label_id(label, "a.tsv, line 7")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"x\ty\tneutral\nx\ty\tmaybe\n", "a.tsv, line 2: unknown label 'maybe'"),
        (
            "a.tsv",
            b"x\ty\tneutral\nx\ty\n",
            "a.tsv, line 2: 2 columns; expected premise, hypothesis, label",
        ),
        ("a.tsv", b"x\ty\tz\t0\t1\n", "a.tsv, line 1: 5 columns"),
        ("a.tsv", b"x\ty\t0\n\xff\ty\t0\n", "a.tsv, line 2: invalid UTF-8"),
        ("a.tsv", b"", "a.tsv: no examples"),
        ("a.tsv.xz", lzma.compress(b"x\ty\t0\n" * 9)[:-9], "a.tsv.xz: damaged"),
        ("a.jsonl", b'{"premise": "x"}\n', "a.jsonl, line 1: no hypothesis or label"),
        ("a.jsonl", b"[]\n", "a.jsonl, line 1: no object"),
        ("a.jsonl", b"{\n", "a.jsonl, line 1: invalid JSON"),
        (
            "a.jsonl",
            b'{"premise": "\\ud800", "hypothesis": "y", "label": 0}\n',
            "a.jsonl, line 1: invalid JSON",
        ),
        (
            "a.jsonl",
            b'{"premise": 1, "hypothesis": "y", "label": 0}\n',
            "a.jsonl, line 1: premise 1",
        ),
        ("a.parquet", b"no", "a.parquet: not a parquet file"),
        ("a.parquet", NO_HYPOTHESIS.getvalue(), "no hypothesis or label among premise, gold"),
    ],
)
def test_bad_input_is_named_by_file_and_line(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_nli(NLISource(str(tmp_path / name)))


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
    assert "2 pairs without a gold label are skipped, 3 are kept" in caplog.text
    assert load_nli(source, limit=2)["premise"][:] == ["c", "g"]


def test_a_dash_among_the_numbers_of_json_lines_is_no_label(tmp_path: Path) -> None:
    rows = [
        {"premise": "2020-01-01", "hypothesis": "a", "label": label}
        for label in (0, "-", "neutral")
    ]
    source = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert load_nli(source)["label"][:] == [0, 1]
    assert load_nli(source)["premise"][0] == "2020-01-01"  # text, no date


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


def test_where_no_inference_data_is_to_be_found(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(FileNotFoundError, match="no-such: no such folder"):
        find_nli(str(tmp_path / "no-such"))
    with pytest.raises(ValueError, match=r"holds a.txt; expected files \{train"):
        find_nli(str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match="nobody/nothing: no such folder, and not to be had from the Hub"
    ):
        find_nli("nobody/nothing")
    with pytest.raises(
        ValueError, match="xnli holds no train-en file: give English pairs by --train_data"
    ):
        training_source(None, {"train": {}}, "xnli")
    with pytest.raises(FileNotFoundError, match="mnli.tsv: no such file"):
        training_source("mnli.tsv", {"train": {}}, "xnli")
    source = training_source("nobody/nothing:plain", {"train": {}}, "xnli")
    assert str(source) == "nobody/nothing:plain:train"
    with pytest.raises(
        FileNotFoundError, match="nobody/nothing:plain:train: not to be had from the Hub"
    ):
        load_nli(source)
    (tmp_path / f"{tmp_path.name}.py").touch()
    for read in (_find_configs, lambda name: load_nli(NLISource(name, "de", "train"))):
        with pytest.raises(
            FileNotFoundError, match="not to be had from the Hub .Dataset scripts are no longer"
        ):
            read(str(tmp_path))


def test_labels_of_parquet_files_and_of_data_sets_are_named_by_them(tmp_path: Path) -> None:
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
    with pytest.raises(FileNotFoundError, match="test: not to be had"):
        load_nli(NLISource(str(tmp_path), None, "test"))


def test_languages_are_chosen_in_the_papers_order() -> None:
    test = {code: NLISource("") for code in ("de", "en", "sw")}
    assert chosen_languages(None, test, "xnli") == ["en", "de", "sw"]
    assert chosen_languages(["swh", "en"], test, "xnli") == ["en", "sw"]
    for wanted, message in (
        ("fr", "xnli has test sets of de en sw only"),
        ("fi", "XNLI has en fr"),
        ("qq", "qq"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen_languages([wanted], test, "xnli")
    with pytest.raises(ValueError, match="xnli holds no test"):
        chosen_languages(None, {}, "xnli")


def test_token_ids_are_the_tokenizers_own_and_are_cached(
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


def test_steps_are_drawn_at_random_and_sorted_within() -> None:
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
