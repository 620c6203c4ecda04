"""The retrieval command from files to JSON, with a tiny real model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, synthetic_pairs
from transformers import PreTrainedTokenizerFast

from dap.encoding import SentenceEncoder
from dap.retrieval import retrieval_accuracy
from eval_retrieval import evaluate, main, read_languages, run
from modeling_dap import DAPForPreTraining

SHARED = Path(__file__).resolve().parents[2] / "shared"


def test_report_holds_the_accuracy_of_both_directions(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "results.json"
    arguments = ["--model_name_or_path", str(tiny_bert_dir), "--data_dir", str(bitext_dir), "--pooling", "mean"]
    made = run([*arguments, "--output_file", str(out), "--output_dir", str(tmp_path)])
    assert json.loads(out.read_text()) == json.loads((tmp_path / "retrieval.json").read_text()) == made
    assert list(made["languages"]) == ["de", "fr", "sw"]
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    for code, numbers in made["languages"].items():
        source, target = zip(*synthetic_pairs(code), strict=True)
        expected = retrieval_accuracy(encoder.encode(source), encoder.encode(target))
        assert numbers["pairs"] == 200
        assert (numbers["xx-en"], numbers["en-xx"]) == pytest.approx(expected, abs=1e-3)
    means = {d: np.mean([numbers[d] for numbers in made["languages"].values()]) for d in ("xx-en", "en-xx")}
    assert made["averages"] == {"3 of 36 languages": pytest.approx(means, abs=1e-3)}
    assert made["settings"]["pooling"] == "mean"
    printed = capsys.readouterr().out
    assert "3 of 36 languages" in printed
    assert "paper" not in printed  # no group is complete
    assert "German" in printed


def test_tatoeba_layout_prints_the_papers_numbers_for_a_complete_group(
    tiny_bert_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dap.languages import ISO3, TATOEBA_36

    for code in TATOEBA_36:
        source, target = zip(*synthetic_pairs(code, 5), strict=True)
        for side, lines in ((ISO3[code], source), ("eng", target)):
            (tmp_path / f"tatoeba.{ISO3[code]}-eng.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    made = run(["--model_name_or_path", str(tiny_bert_dir), "--data_dir", str(tmp_path)])
    assert list(made["averages"]) == ["14 languages", "28 languages", "36 languages"]
    assert "paper: mBERT+DAP" in capsys.readouterr().out


def test_the_command_takes_a_dap_checkpoint_without_a_word_of_complaint(
    tiny_bert_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for part in (DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr"), tiny_tokenizer):
        part.save_pretrained(tmp_path / "dap")
    (tmp_path / "de-en.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in synthetic_pairs("de", 5)))
    script = shutil.which("eval-retrieval", path=str(Path(sys.executable).parent))
    same = [sys.executable, "-c", "import sys; from eval_retrieval import main; sys.exit(main())"]
    argv = ["--model_name_or_path", str(tmp_path / "dap"), "--data_dir", str(tmp_path), "--pooling", "mean"]
    done = subprocess.run([*([script] if script else same), *argv], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "{" not in done.stderr  # the report
    assert "German" in done.stdout


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ("no-such-folder", "any", "no-such-folder"),
        ("empty", "any", "holds no pair of language"),
        ("pairs", "no-such-model", "--model_name_or_path .*no-such-model: "),
    ],
)
def test_expected_errors_end_the_command_without_a_traceback(
    data: str, model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("empty", ""), ("pairs", "ka\tlo\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "de-en.tsv").write_text(text)
    argv = ["--model_name_or_path", model, "--data_dir", str(tmp_path / data)]
    monkeypatch.setattr(sys, "argv", ["eval-retrieval", *argv])
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(argv)


@pytest.mark.parametrize("spelling", ["sw", "swh"])
def test_languages_are_chosen_by_either_code(bitext_dir: Path, spelling: str) -> None:
    pairs = read_languages([str(bitext_dir)], [spelling, "de", spelling])
    assert list(pairs) == ["sw", "de"]
    assert pairs["sw"] == synthetic_pairs("sw")


def test_a_language_without_a_file_is_named(bitext_dir: Path) -> None:
    with pytest.raises(ValueError, match="--languages th: .* holds de fr sw only"):
        read_languages([str(bitext_dir)], ["de", "th"])


def test_a_folder_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        read_languages(["no-such-folder"])


def test_a_folder_as_the_output_file_is_refused_before_the_work(bitext_dir: Path, tmp_path: Path) -> None:
    argv = ["--model_name_or_path", "absent", "--data_dir", str(bitext_dir), "--output_file", str(tmp_path)]
    with pytest.raises(ValueError, match="is a folder: give the JSON file to write"):
        run(argv)


def test_a_language_with_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "de-en.tsv").write_text("")
    with pytest.raises(ValueError, match="de"):
        read_languages([str(tmp_path)])


def test_a_perfect_encoder_scores_100() -> None:
    class Perfect(SentenceEncoder):
        def __init__(self) -> None:
            """Needs no model: the vector is the sentence's number."""

        def encode(self, sentences: list[str], token_budget: int = 0, progress: bool = False) -> np.ndarray:
            return np.eye(8)[[int(sentence[1:]) for sentence in sentences]]

    pairs = {"de": [(f"s{i}", f"t{i}") for i in range(8)], "fr": [("s1", "t1"), ("s2", "t3"), ("s3", "t2")]}
    assert evaluate(Perfect(), pairs) == {"de": (100.0, 100.0), "fr": pytest.approx((100 / 3, 100 / 3))}


@pytest.mark.skipif(not (SHARED / "data" / "tatoeba").is_dir(), reason="../shared with the Tatoeba test set is absent")
def test_the_real_test_set_is_found_whole() -> None:
    pairs = read_languages([str(SHARED / "data" / "tatoeba")])
    assert len(pairs) == 36
    assert sum(map(len, pairs.values())) == 31_692
    assert (len(pairs["jv"]), len(pairs["th"]), len(pairs["de"])) == (205, 548, 1000)
