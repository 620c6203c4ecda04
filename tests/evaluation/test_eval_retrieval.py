"""The retrieval command from files to JSON, with a tiny real model."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import load_encoder, synthetic_pairs
from written import text_of, write

import eval_retrieval
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluator import data_name
from dap_transformers.evaluation.hard_negatives import (
    COPY_KINDS,
    HardNegatives,
    hard_negative_errors,
)
from dap_transformers.evaluation.retrieval import read_languages, retrieval_accuracy
from dap_transformers.files import read_json, write_json
from dap_transformers.publishing.model_card import eval_results, report_text
from dap_transformers.text.find import find_bitext


def run(command: str) -> dict:
    return eval_retrieval.run(command.split())


@pytest.fixture
def near_dir(tmp_path: Path) -> Path:
    """Write pairs whose source is the English sentence without its last word.

    So an untrained encoder finds some of them.
    """
    for code, count in (("de", 170), ("fr", 130)):
        pairs = [(text.rsplit(" ", 1)[0], text) for _, text in synthetic_pairs(code, count)]
        write(tmp_path / f"near/{code}-en.tsv", text_of(pairs))
    return tmp_path / "near"


@pytest.fixture
def argv(tiny_bert_dir: Path, near_dir: Path) -> str:
    """Return the command that evaluates on the pairs of `near_dir`."""
    return f"--model {tiny_bert_dir} --pooling mean --data_dir {near_dir}"


def test_report_holds_the_accuracy_of_both_directions(
    argv: str, encoder: SentenceEncoder, near_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "results.json"
    made = run(f"{argv} --pool multilingual --hard_negatives --output_file {out}")
    assert read_json(out) == made
    assert (made["settings"]["pooling"], made["settings"]["pool"]) == ("mean", "multilingual")
    pairs = read_languages(find_bitext(near_dir))
    for code, numbers in made["languages"].items():
        source, target = map(encoder.encode, zip(*pairs[code]))
        expected = retrieval_accuracy(source, target)
        assert numbers["pairs"] == len(pairs[code])
        assert (numbers["xx-en"], numbers["en-xx"]) == pytest.approx(expected, abs=1e-3)
        assert 0 < numbers["pool_xx-en"] <= numbers["xx-en"] < 100
        error = made["hard_negatives"][code]["error"]["other"]  # these words have no copies
        assert error == pytest.approx(100 - numbers["xx-en"], abs=1e-3)
        on_card = {row["name"]: row["value"] for row in made["metrics"] if row["place"] == code}
        assert on_card["accuracy xx→en"] == pytest.approx(numbers["xx-en"], abs=1e-4)
        assert on_card["by another sentence"] == pytest.approx(error, abs=1e-4)
    assert "pool" not in run(argv)["settings"]


def test_tatoeba_stands_beside_the_papers_numbers(
    argv: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for side in ("deu", "eng"):
        (tmp_path / f"tatoeba.deu-eng.{side}").write_text("ka lo\nmi ne\n")
    for more, pairs, is_comparable in (("", 2, True), ("--max_pairs 1", 1, False)):
        made = run(f"{argv} --data_dir {tmp_path} {more}")
        assert made["languages"]["de"]["pairs"] == pairs
        assert ("XLM-R+DAP" in capsys.readouterr().out) == is_comparable


def test_data_are_named_as_given_even_if_they_are_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "blobs/3fa9c0", "")  # as in the cache of the Hub
    (tmp_path / "sts.tsv").symlink_to(tmp_path / "blobs/3fa9c0")
    monkeypatch.chdir(tmp_path)
    names = data_name(["sts.tsv", tmp_path / "sts.tsv", ".", "facebook/xnli"])
    assert names == f"sts.tsv, sts.tsv, {tmp_path.name}, facebook/xnli"


def test_a_card_names_the_data_of_each_result(argv: str, tmp_path: Path) -> None:
    sts = write(tmp_path / "sts.tsv", text_of([("ka", "lo", "1"), ("mi", "ne", "2")]))
    made = run(f"{argv} --sts {sts} --max_pairs 100")
    assert {each.task_name: each.dataset_name for each in eval_results(made)} == {
        "bitext retrieval": "near, first 100 pairs per language",
        "semantic textual similarity": "sts.tsv",
    }
    heading = report_text(made).splitlines()[0]
    assert heading == "### near, first 100 pairs per language; sts.tsv"


def test_accuracies_are_drawn_beside_those_of_an_earlier_report(argv: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    earlier = tmp_path / "earlier.json"
    picture = tmp_path / "accuracy.svg"
    run(f"{argv} --output_file {earlier}")
    run(f"{argv} --plot {picture} --before {earlier}")
    for text in ("before", "after", "xx→en", "en→xx"):
        assert f"<!-- {text} -->" in picture.read_text()
    write_json({"model": "other", "protocol": "search"}, earlier)
    with pytest.raises(UserError, match="no such numbers"):
        run(f"{argv} --plot {picture} --before {earlier}")


def test_hard_negatives_are_candidates_of_the_english_side(tiny_bert_dir: Path) -> None:
    encoder = load_encoder(tiny_bert_dir, "mean", "ka ")
    english = ["ka lo", "mi ne", "Here Tom is old and has 2 cats.", "Here Ann is ill and has 30."]
    source = [text.upper() for text in english]
    evaluator = HardNegatives({"de": list(zip(source, english))})
    found = evaluator(encoder)
    copies = evaluator.copies["de"]
    kinds = [copy.kind for copy in copies]
    texts = [copy.text for copy in copies]
    error = hard_negative_errors(*map(encoder.encode, (source, english, texts)), kinds)
    numbers = found["de"]
    assert (numbers["pairs"], numbers["without_copies"]) == (4, 2)
    assert numbers["copies"] == {kind: kinds.count(kind) for kind in COPY_KINDS}
    assert all(numbers["copies"].values())
    assert numbers["error"] == pytest.approx(error)
    assert found["mean"] == {"error": numbers["error"]}
    assert evaluator.logged(found) == {"hard_negative_error": numbers["error"]["error"]}
    assert evaluator.size() == 4  # the error is of the sources only


@pytest.mark.parametrize("spelling", ["fr", "fra"])
def test_languages_are_chosen_by_either_code(near_dir: Path, spelling: str) -> None:
    pairs = read_languages(find_bitext(near_dir), [spelling, "de", spelling], 7)
    assert [(code, len(rows)) for code, rows in pairs.items()] == [("fr", 7), ("de", 7)]
    with pytest.raises(UserError, match="no text in xx, only in de fr"):
        read_languages(find_bitext(near_dir), ["de", "xx"])


NEEDS = "need the pairs of --data_dir"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--data_dir y --max_pairs 0", "max_pairs=0: at least 1"),
        ("--sts sts.tsv --languages de", NEEDS),
        ("--sts sts.tsv --max_pairs 1", NEEDS),
        ("--sts sts.tsv --hard_negatives", NEEDS),
        ("--sts sts.tsv --plot a", NEEDS),
    ],
)
def test_what_is_refused(flags: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(f"--model x {flags}")


def test_a_report_that_cannot_be_written_costs_no_numbers(
    argv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    full = Mock(side_effect=OSError("no space left"))
    monkeypatch.setattr(eval_retrieval, "write_json", full)
    with pytest.raises(OSError, match="no space left"):
        run(f"{argv} --output_file {tmp_path}/out.json")
    assert "German" in capsys.readouterr().out
