"""Similarity against sentence-transformers, across languages, and faults of the files."""

from pathlib import Path

import pytest
from conftest import load_library, synthetic_pairs
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from written import text_of, write

import eval_retrieval
from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluator import evaluate
from dap_transformers.evaluation.sts import STS
from dap_transformers.training.run import build_trainer


@pytest.fixture
def sts_file(tmp_path: Path) -> Path:
    """Pairs in two languages, with scores of which many are equal."""
    german = synthetic_pairs("de", 60)
    rows = [("sentence1", "sentence2", "score")]
    for number, (source, _) in enumerate(german):
        rows.append((source, german[number // 2][1], str(number % 5 / 2)))
    return write(tmp_path / "sts.de-en.tsv.gz", text_of(rows))


def test_equals_sentence_transformers(tiny_bert_dir: Path, sts_file: Path) -> None:
    pairs = STS([sts_file]).pairs["sts.de-en"]
    assert len(pairs) == 60
    library = EmbeddingSimilarityEvaluator(*map(list, zip(*pairs)), main_similarity="cosine")
    expected = library(load_library(tiny_bert_dir))["spearman_cosine"]
    command = f"--model {tiny_bert_dir} --pooling mean --sts {sts_file}"
    report = eval_retrieval.run(command.split())
    assert report["sts"]["sts.de-en"] == pytest.approx(100 * expected, abs=1e-6)
    (metric,) = report["metrics"]  # no mean of one
    assert (metric["place"], metric["kind"]) == ("sts.de-en", "spearman")
    assert metric["value"] == pytest.approx(100 * expected, abs=1e-4)


@pytest.mark.parametrize("is_flag", [True, False])
def test_a_training_measures_it_by_a_flag_or_from_python(
    is_flag: bool, flags: str, sts_file: Path
) -> None:
    command = f"{flags} --output_dir {sts_file.parent}/out --dev_pairs 0 --eval_on_start true"
    command += " --eval_strategy steps --load_best_model_at_end true"
    if is_flag:
        command += f" --sts {sts_file}"
    evaluators = [] if is_flag else [STS([sts_file])]
    trainer, _ = build_trainer(*parse_arguments(command.split()), evaluators)
    found = trainer.evaluate()
    assert found["eval_sts.de-en_spearman"] == found["eval_mean_spearman"]
    with pytest.raises(UserError, match="eval_mean_accuracy: the evaluation has .*_spearman"):
        trainer.train()  # stops before the first step
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\tb\t1\na\tc\n", "line 2"),
        ("a\tb\t1\na\tc\tx\n", "line 2"),
        ("a\tb\t1\na\tc\tnan\na\td\t2\n", "line 2"),
        ("a\tb\t-1.5\na\tc\t-1.5\n", "no two pairs of different scores"),
        ("", "no two pairs"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = write(tmp_path / "sts.tsv", text)
    with pytest.raises(UserError, match=f"sts.tsv.*{says}"):
        STS([file])


def test_two_files_of_one_name_are_refused(sts_file: Path) -> None:
    for name in ("b/sts.de-en.tsv", "mean.tsv"):
        other = write(sts_file.parent / name, "a\tb\t1\nc\td\t2\n")
        with pytest.raises(UserError, match=r"both called (sts\.de-en|mean)"):
            STS([sts_file, other])


def test_two_evaluators_of_one_name_are_refused(sts_file: Path, encoder: SentenceEncoder) -> None:
    other = write(sts_file.parent / "other.tsv", "a\tb\t1\nc\td\t2\n")
    with pytest.raises(ValueError, match="two evaluators have the same name"):
        evaluate(encoder, [STS([sts_file]), STS([other])])
    names = list(evaluate(encoder, [STS([sts_file, other])])["sts"])
    assert names == ["sts.de-en", "other", "mean"]
