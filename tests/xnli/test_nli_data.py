"""NLI data from files to token ids, compared with plain loops."""

import copy
from pathlib import Path

import pytest
from conftest import tiny_tokenizer
from datasets import ClassLabel, Dataset, Features, Value
from written import text_of, write

from dap_transformers.errors import UserError
from dap_transformers.xnli.data import (
    COLUMNS,
    LABEL,
    NLISource,
    TextOptions,
    find_nli,
    load_nli,
    prepare_nli,
    training_source,
)

TOKENIZER = tiny_tokenizer()


def write_rows(path: Path, *rows: tuple[str, ...]) -> NLISource:
    return NLISource(str(write(path, text_of(rows))))


@pytest.mark.parametrize("name", ["a.tsv", "snli.en.tsv.xz"])
def test_every_form_of_a_file_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    plain = 'He is «here».\tHe said "no\t2\nIt\u2028rains\t-\tentailment\n'
    header = "premise\thypothesis\tgold_label\n"
    for text in (plain, header + plain.replace("\n", "\tletters\n") + "\n"):  # with a genre
        assert load_nli(NLISource(str(write(path, text)))).to_list() == [
            {"premise": "He is «here».", "hypothesis": 'He said "no', "label": 2},
            {"premise": "It\u2028rains", "hypothesis": "-", "label": 0},
        ]


def test_labels_have_the_numbers_of_the_hub_and_those_without_gold_are_skipped(
    tmp_path: Path,
) -> None:
    names = [*LABEL.names, "contradictory", "-1", "0", "1", "2", "-"]
    source = write_rows(tmp_path / "a.tsv", *((name, "b", name) for name in names))
    assert load_nli(source)["label"][:] == [0, 1, 2, 2, 0, 1, 2]
    assert load_nli(source, limit=5)["premise"][:] == [*LABEL.names, "contradictory", "0"]


def test_a_dataset_says_the_names_of_its_numbers(tmp_path: Path) -> None:
    names = ["contradiction", "entailment", "neutral"]  # another order than the Hub's
    text = {name: Value("string") for name in COLUMNS[:2]}
    rows = {"premise": ["a", "b", "c"], "hypothesis": ["d", "e", "f"], "label": [0, 2, -1]}
    dataset = Dataset.from_dict(rows, Features(text | {"label": ClassLabel(names=names)}))
    dataset.to_parquet(tmp_path / "train.parquet")
    found = load_nli(NLISource(str(tmp_path), None, "train")).to_list()
    assert [tuple(row.values()) for row in found] == [("a", "d", 2), ("b", "e", 1)]


def test_a_folder_is_read_by_split_and_language(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = tmp_path / "train-en.tsv"
    for name in ("test-sw.tsv", "test-de.tsv.xz", "dev-en.tsv", "test-fi.tsv", "README"):
        (tmp_path / name).touch()
    train.touch()
    found = find_nli(str(tmp_path))
    languages = {split: list(sources) for split, sources in found.items()}
    assert languages == {"train": ["en"], "dev": ["en"], "test": ["de", "sw"]}
    assert "test-fi.tsv is left out" in caplog.text
    assert found["test"]["de"].path.endswith("test-de.tsv.xz")
    for given in (None, str(train)):
        assert training_source(given, found) == NLISource(str(train))
    assert training_source("nyu-mll/multi_nli", found) == ("nyu-mll/multi_nli", None, "train")
    assert find_nli("facebook/xnli")["dev"]["sw"] == ("facebook/xnli", "sw", "validation")

    (tmp_path / "test-de.tsv").touch()
    with pytest.raises(UserError, match=r"test-de.tsv and .*test-de.tsv.xz are of one language"):
        find_nli(str(tmp_path))
    with pytest.raises(UserError, match="no train-en"):
        training_source(None, {"train": {}})
    with pytest.raises(UserError, match="nobody/nothing "):
        load_nli(NLISource("nobody/nothing", None, "test"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x\ty\tmaybe\n", "a.tsv .*tabs.*KeyError: 'maybe'"),
        ("x\ty\t0\nx\ty\n", "a.tsv .*tabs.*ValueError"),
        ("x\ty\t-\n", "a.tsv: no examples with a gold label"),
        ("hypothesis\tpremise\tlabel\n", "a.tsv: .*not premise, hypoth"),
    ],
)
def test_a_file_with_other_columns_or_labels_is_refused(
    text: str, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.tsv", text)
    with pytest.raises(UserError, match=says):
        load_nli(NLISource(str(path)))


def test_data_is_tokenised_by_split_and_language_as_the_tokenizer_does(tmp_path: Path) -> None:
    rows = [("kaban " * size, "loder " * (12 - size), LABEL.names[size % 3]) for size in (9, 1, 5)]
    rows.append(("kaban", "loder", LABEL.names[0]))
    source = write_rows(tmp_path / "a.tsv", *rows)
    sources = {"train": {"en": source}, "dev": {"en": source}, "test": {"sw": source}}
    options = TextOptions(max_seq_length=12, max_train_pairs=3)
    data = prepare_nli(sources, TOKENIZER, options)
    for row, (premise, hypothesis, label) in zip(data.train["en"], rows[:3], strict=True):
        expected = TOKENIZER(premise, hypothesis, truncation=True, max_length=12)["input_ids"]
        assert row["input_ids"] == expected
        assert row["labels"] == LABEL.names.index(label)
        assert "token_type_ids" not in row

    # Dev and test sets are whole, the longest first.
    lengths = data.test["sw"]["length"][:]
    assert lengths == data.dev["en"]["length"][:] == sorted(lengths, reverse=True)
    assert len(lengths) == 4

    typed = copy.deepcopy(TOKENIZER)
    typed.model_input_names = [*typed.model_input_names, "token_type_ids"]
    for wanted in (True, False):
        columns = prepare_nli(sources, typed, options, wanted).train["en"].column_names
        assert ("token_type_ids" in columns) == wanted
