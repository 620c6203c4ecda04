"""The retrieval command from files to JSON, with a tiny real model."""

import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY, save, synthetic_pairs
from forked import run_python
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import eval_retrieval
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.hard_negatives import (
    COPY_KINDS,
    hard_negative_copies,
    hard_negative_errors,
)
from dap_transformers.evaluation.retrieval import multilingual_pool_accuracy, retrieval_accuracy
from dap_transformers.pictures import plot_accuracies
from dap_transformers.publishing.card import report_text
from dap_transformers.reports import merge_seeds
from dap_transformers.text import tmx_po
from eval_retrieval import POOLS, evaluate_retrieval, main, read_languages, run
from modeling_dap import DAPForPreTraining


def test_report_holds_the_accuracy_of_both_directions(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "results.json"
    argv = ["--model", str(tiny_bert_dir), "--pooling", "mean", "--data_dir", str(bitext_dir)]
    made = run([*argv, "--output_file", str(out), "--output_dir", str(tmp_path)])
    assert json.loads(out.read_text()) == made
    assert json.loads((tmp_path / "retrieval.json").read_text()) == made
    assert list(made["languages"]) == ["de", "fr", "sw"]
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    for code, numbers in made["languages"].items():
        source, target = zip(*synthetic_pairs(code), strict=True)
        expected = retrieval_accuracy(encoder.encode(source), encoder.encode(target))
        assert numbers["pairs"] == 200
        assert (numbers["xx-en"], numbers["en-xx"]) == pytest.approx(expected, abs=1e-3)
    (mean,) = made["averages"].values()
    for direction in ("xx-en", "en-xx"):
        accuracies = [numbers[direction] for numbers in made["languages"].values()]
        assert mean[direction] == pytest.approx(np.mean(accuracies), abs=1e-3)
    assert made["settings"]["pooling"] == "mean"
    from_python = evaluate_retrieval(encoder, bitext_dir, languages=["deu", "sw"], pool=POOLS[1])
    assert from_python["languages"]["de"].items() >= made["languages"]["de"].items()
    assert "pool_xx-en" in from_python["averages"]["2 of 36 languages"]
    with pytest.raises(UserError, match="pool='all'"):
        evaluate_retrieval(encoder, bitext_dir, pool="all")
    printed = capsys.readouterr().out
    assert "3 of 36 languages" in printed
    assert "paper" not in printed  # no group is complete
    assert "German" in printed


def test_tatoeba_layout_prints_the_papers_numbers_for_a_complete_group(
    tiny_bert_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dap_transformers.languages import ISO3, TATOEBA_36

    for code in TATOEBA_36:
        source, target = zip(*synthetic_pairs(code, 5), strict=True)
        for side, lines in ((ISO3[code], source), ("eng", target)):
            (tmp_path / f"tatoeba.{ISO3[code]}-eng.{side}").write_text(
                "\n".join(lines) + "\n", encoding="utf-8"
            )
    argv = ["--model_name_or_path", str(tiny_bert_dir), "--data_dir", str(tmp_path)]
    made = run(argv)
    assert list(made["averages"]) == ["14 languages", "28 languages", "36 languages"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (sw,) = (line for line in lines if line[:2] == ["sw", "Swahili"])
    assert sw[2] == "5"  # pairs
    assert (sw[4:6], sw[7:]) == (["77.9", "77.2"], ["75.6", "78.5"])  # the paper's appendix
    (mean,) = (line for line in lines if line[:2] == ["mean", "28"])
    assert (mean[4:6], mean[7:]) == (["94.7", "94.7"], ["94.6", "95.2"])
    assert any(line[:2] == ["paper:", "XLM-R+TR+TLM"] and line[-1] == "92.4" for line in lines)
    run([*argv, "--languages", "de"])  # some languages stand beside the paper's, too
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (german,) = (line for line in lines if "German" in line)
    assert (german[4:6], german[7:]) == (["99.1", "99.2"], ["98.9", "98.9"])
    cut = run([*argv, "--max_pairs", "4"])
    assert {each["pairs"] for each in cut["languages"].values()} == {4}
    assert "paper" not in capsys.readouterr().out  # fewer candidates are not the paper's task
    with pytest.raises(ValueError, match="--max_pairs 0: give 1 or more"):
        run([*argv, "--max_pairs", "0"])


@pytest.fixture
def near_dir(tmp_path: Path) -> Path:
    """Write pairs whose source is the English sentence without its last word.

    So an untrained encoder finds some of them.
    """
    folder = tmp_path / "near"
    folder.mkdir()
    for code, count in (("de", 170), ("fr", 130)):
        english = [target for _, target in synthetic_pairs(code, count)]
        (folder / f"{code}-en.tsv").write_text(
            "".join(f"{text.rsplit(' ', 1)[0]}\t{text}\n" for text in english)
        )
    return folder


@pytest.fixture
def argv(tiny_bert_dir: Path, near_dir: Path) -> list[str]:
    """Return the command that evaluates on the pairs of `near_dir`."""
    return ["--model", str(tiny_bert_dir), "--pooling", "mean", "--data_dir", str(near_dir)]


def test_kept_embeddings_are_used_for_the_same_model_and_text_only(
    argv: list[str],
    tiny_bert_dir: Path,
    near_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []
    encode = SentenceEncoder.encode

    def counting(self: SentenceEncoder, sentences: list[str], *rest: Any) -> np.ndarray:
        encoded.append(len(sentences))
        return encode(self, sentences, *rest)

    def evaluated(*more: str) -> tuple[dict[str, Any], int]:
        encoded.clear()
        return run([*argv, "--model", str(tmp_path / "model"), *more])["languages"], sum(encoded)

    shutil.copytree(tiny_bert_dir, tmp_path / "model")
    monkeypatch.setattr(SentenceEncoder, "encode", counting)
    keep = ["--embeddings_dir", str(tmp_path / "kept")]
    plain, count = evaluated()
    first, unique = evaluated(*keep)
    assert first == plain
    assert 0 < unique <= count
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*.npy")}
    assert shards
    assert evaluated(*keep) == (first, 0)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*.npy")} == shards

    prefixed, again = evaluated(*keep, "--prefix", "ka ")
    assert again == unique
    assert prefixed != first
    assert evaluated(*keep) == (first, 0)  # another prefix took nothing away
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    save_file(
        weights | {name: weights[name].flip(0)},
        tmp_path / "model" / "model.safetensors",
        {"format": "pt"},
    )
    changed, again = evaluated(*keep)
    assert again == unique
    assert changed != first
    with (near_dir / "de-en.tsv").open("a") as file:
        file.write("new\tnew text\n")
    assert evaluated(*keep)[1] == unique + 2


def test_accuracies_are_drawn_beside_those_of_an_earlier_report(
    argv: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    earlier = tmp_path / "earlier.json"
    picture = tmp_path / "accuracy.svg"
    run([*argv, "--output_file", str(earlier)])
    run([*argv, "--plot", str(picture), "--before", str(earlier)])
    for text in ("before", "after", "xx→en", "en→xx"):
        assert f"<!-- {text} -->" in picture.read_text()
    for wrong, why in (
        (["--before", "a.json"], "name that with --plot"),
        (["--plot", "a.doc"], "ends in .svg, .png"),
    ):
        with pytest.raises(UserError, match=why):
            run([*argv, *wrong])
    of_xnli = json.loads(earlier.read_text()) | {"languages": {"de": {"accuracy": 60.0}}}
    del of_xnli["averages"]
    earlier.write_text(json.dumps(of_xnli))
    with pytest.raises(
        UserError, match=r"--before .*earlier\.json: no accuracies by language; give a report"
    ):
        run([*argv, "--plot", str(picture), "--before", str(earlier)])
    with pytest.raises(UserError, match="no language is in all"):
        plot_accuracies(
            {"before": {"languages": {"de": {}}}, "after": {"languages": {"fr": {}}}}, picture
        )


@pytest.fixture
def telling_dir(tmp_path: Path) -> Path:
    """Write ten pairs, of which eight have English sentences with numbers, names and antonyms.

    The source is the English sentence in capitals.
    """
    folder = tmp_path / "telling"
    folder.mkdir()
    english = []
    for name, old, count in product(("Tom", "Ann"), ("old", "ill"), (2, 30)):
        english.append(f"Here {name} is {old} and has {count} cats.")
    english += ["ka lo", "mi ne"]
    text = "".join(f"{line}\n" for line in english)
    (folder / "tatoeba.deu-eng.eng").write_text(text)
    (folder / "tatoeba.deu-eng.deu").write_text(text.upper())
    return folder


def test_hard_negatives_are_candidates_of_the_english_side(
    tiny_bert_dir: Path, telling_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    argv = ["--model", str(tiny_bert_dir), "--pooling", "mean", "--prefix", "ka "]
    argv += ["--data_dir", str(telling_dir)]
    plain = run(argv)
    made = run([*argv, "--hard_negatives", "--embeddings_dir", str(tmp_path / "kept")])
    assert "hard_negatives" not in plain
    assert made["languages"] == plain["languages"]
    assert made["averages"] == plain["averages"]

    source, english = zip(*read_languages([str(telling_dir)])["de"], strict=True)
    copies = hard_negative_copies(english)
    kinds = [copy.kind for copy in copies]
    texts = [copy.text for copy in copies]
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", "ka ")
    error = hard_negative_errors(*map(encoder.encode, (source, english, texts)), kinds)
    numbers = made["hard_negatives"]["de"]
    assert (numbers["pairs"], numbers["without_copies"]) == (10, 2)
    assert numbers["copies"] == {kind: kinds.count(kind) for kind in COPY_KINDS}
    assert all(numbers["copies"].values())
    assert numbers["error"] == pytest.approx(error)
    assert numbers["error"]["error"] >= 100 - made["languages"]["de"]["xx-en"]
    assert made["hard_negatives"]["mean"] == {"error": numbers["error"]}
    assert "without" in capsys.readouterr().out
    first = run([*argv, "--hard_negatives", "--max_pairs", "4"])
    assert first["hard_negatives"]["de"]["pairs"] == 4
    assert first["settings"]["hard_negatives"] != made["settings"]["hard_negatives"]


def test_the_multilingual_pool_stands_beside_plain_accuracy(
    argv: list[str], tiny_bert_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    plain = run(argv)
    made = run([*argv, "--pool", "multilingual"])
    assert "pool" not in plain["settings"]
    assert made["settings"]["pool"] == "multilingual"
    assert "lost to own language" in capsys.readouterr().out

    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    for code, numbers in made["languages"].items():
        assert numbers.items() >= plain["languages"][code].items()
        sides = zip(*read_languages([argv[-1]])[code], strict=True)
        found = multilingual_pool_accuracy(*map(encoder.encode, sides))
        for direction, shares in zip(("xx-en", "en-xx"), found, strict=True):
            assert numbers[f"pool_{direction}"] == pytest.approx(shares.accuracy, abs=1e-3)
            assert numbers[f"own_{direction}"] == pytest.approx(shares.own_language, abs=1e-3)
    (mean,) = made["averages"].values()
    each = [numbers["pool_xx-en"] for numbers in made["languages"].values()]
    assert mean["pool_xx-en"] == pytest.approx(np.mean(each), abs=1e-3)

    assert " multilingual pool xx→en |" in report_text(made)


def test_without_a_sentence_to_change_the_error_is_that_of_retrieval(argv: list[str]) -> None:
    made = run([*argv, "--hard_negatives"])
    assert made["hard_negatives"].keys() == {"de", "fr", "mean"}
    for code, numbers in made["languages"].items():
        own = made["hard_negatives"][code]
        assert own["without_copies"] == own["pairs"]
        assert own["error"]["other"] == pytest.approx(100 - numbers["xx-en"], abs=1e-3)


@pytest.mark.parametrize("kept", [False, True])
def test_vectors_with_nan_are_named(
    argv: list[str], tiny_bert_dir: Path, near_dir: Path, tmp_path: Path, kept: bool
) -> None:
    shutil.copytree(tiny_bert_dir, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in weights.items():
        if "layer.2" in name:
            tensor.fill_(float("nan"))
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    first, _ = read_languages([str(near_dir)])["de"][0]
    keep = ["--embeddings_dir", str(tmp_path / "kept")] if kept else []
    with pytest.raises(ValueError, match=rf"de, pair 1, source side: NaN .* vector of '{first}'"):
        run([*argv, "--model", str(tmp_path / "model"), *keep])
    assert not list(tmp_path.rglob("*.npy"))


def test_the_report_names_the_seed_of_the_training(
    tiny_bert_dir: Path, telling_dir: Path, tmp_path: Path
) -> None:
    reports = []
    for seed in (3, 4):
        model = shutil.copytree(tiny_bert_dir, tmp_path / f"run-{seed}")
        (model / "run.json").write_text(json.dumps({"seed": seed, "max_steps": 10}))
        argv = ["--model", str(model), "--data_dir", str(telling_dir), "--hard_negatives"]
        reports.append(run([*argv, "--output_file", str(tmp_path / f"{seed}.json")]))
        assert reports[-1]["seed"] == seed
    assert reports[0]["settings"] == reports[1]["settings"]
    merged = merge_seeds(reports)
    forward = reports[0]["languages"]["de"]["xx-en"]
    assert merged["languages"]["de"]["xx-en"] == {"mean": forward, "sd": 0.0}


def test_the_command_takes_a_dap_checkpoint_without_a_word_of_complaint(
    tiny_bert_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save(
        tmp_path / "dap",
        DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr"),
        tiny_tokenizer,
    )
    (tmp_path / "de-en.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in synthetic_pairs("de", 5)))
    script = shutil.which("eval-retrieval", path=str(Path(sys.executable).parent))
    same = ["-c", "import sys; from eval_retrieval import main; sys.exit(main())"]
    argv = ["--model", str(tmp_path / "dap"), "--pooling", "mean", "--data_dir", str(tmp_path)]
    done = run_python([*([script] if script else same), *argv], dict(os.environ), REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "{" not in done.stderr  # the report
    assert "German" in done.stdout


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ("no-such-folder", "any", "no-such-folder"),
        ("empty", "any", "holds no pair of language"),
        ("pairs", "no-such-model", "no-such-model"),
        (
            "pairs",
            "/no/such-folder",
            "/no/such-folder",
        ),
        ("pairs --languages de xx", "any", "--languages xx: .* holds de only"),
        ("sides", "any", "tatoeba.deu-eng.deu.*tatoeba.deu-eng.eng.*line"),
    ],
)
def test_expected_errors_end_the_command_without_a_traceback(
    data: str, model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("empty", ""), ("pairs", "ka\tlo\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "de-en.tsv").write_text(text)
    (tmp_path / "sides").mkdir()
    for side, lines in (("deu", 3), ("eng", 2)):
        (tmp_path / "sides" / f"tatoeba.deu-eng.{side}").write_text("ka\n" * lines)
    folder, *more = data.split()
    argv = ["--model_name_or_path", model, "--data_dir", str(tmp_path / folder), *more]
    monkeypatch.setattr(sys, "argv", ["eval-retrieval", *argv])
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main()


@pytest.mark.parametrize("spelling", ["sw", "swh"])
def test_languages_are_chosen_by_either_code(bitext_dir: Path, spelling: str) -> None:
    pairs = read_languages([str(bitext_dir)], [spelling, "de", spelling])
    assert list(pairs) == ["sw", "de"]
    assert pairs["sw"] == synthetic_pairs("sw")


def test_a_memory_is_read_once_for_its_languages_and_once_for_each(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    open_file = tmx_po.open_file
    monkeypatch.setattr(tmx_po, "open_file", lambda path: (reads.append(path), open_file(path))[1])
    texts = "".join(
        f"<tu><tuv xml:lang='en'><seg>{english}</seg></tuv>"
        f"<tuv xml:lang='{code}'><seg>{source}</seg></tuv></tu>"
        for code in ("de", "fr")
        for source, english in synthetic_pairs(code, 3)
    )
    memory = tmp_path / "memory.tmx"
    memory.write_text(f"<tmx><body>{texts}</body></tmx>", encoding="utf-8")
    made = run([*argv[:-1], str(memory)])
    assert {code: each["pairs"] for code, each in made["languages"].items()} == {"de": 3, "fr": 3}
    assert len(reads) == 1 + 2


def test_a_report_that_cannot_be_written_costs_no_numbers(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(eval_retrieval, "write_json", full)
    with pytest.raises(OSError, match="no space left"):
        run([*argv, "--output_dir", str(tmp_path)])
    assert "German" in capsys.readouterr().out
