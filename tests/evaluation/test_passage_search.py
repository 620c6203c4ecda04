"""Search against sentence-transformers on random questions with ties, grades, and broken files."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import load_encoder, load_library, logged, results, run, save_bert
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from written import lines_of, write

import eval_retrieval
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluator import evaluate
from dap_transformers.evaluation.passage_search import Search, changes_table, search_quality
from dap_transformers.files import write_json
from modules_dap import write_modules

WORDS = ("kaban", "loder", "mifin", "negol", "pusut", "raban")
HEADER = "query-id\tcorpus-id\tscore\n"

Grades = dict[str, dict[str, int]]


def random_set(folder: Path, seed: int = 0) -> tuple[dict[str, str], dict[str, str], Grades]:
    """Write 40 questions and 120 passages, of which many are equal, so that there are ties.

    They have BEIR's layout. The first word of every other passage becomes its title.
    """
    rng = random.Random(seed)
    passages = {f"p{i}": " ".join(rng.choices(WORDS, k=rng.randint(2, 3))) for i in range(120)}
    questions = {f"q{i}": " ".join(rng.choices(WORDS, k=3)) for i in range(40)}
    grades = {}
    for name in questions:
        own = rng.sample(sorted(passages), rng.randint(1, 14))
        grades[name] = {passage: rng.choice((0, 1, 1)) for passage in own}
    grades.pop("q3")  # a question that nobody has judged
    grades["q5"] = {"p1": 0}

    for name, texts in (("queries", questions), ("corpus", passages)):
        records = [{"_id": key, "text": text, "metadata": {}} for key, text in texts.items()]
        if name == "corpus":
            for record in records[1::2]:
                record["title"], _, record["text"] = record["text"].partition(" ")
        write(folder / f"{name}.jsonl", lines_of(map(json.dumps, records)))
    rows = []
    for key, own in grades.items():
        rows += [f"{key}\t{passage}\t{grade}" for passage, grade in own.items()]
    write(folder / "qrels/test.tsv", HEADER + lines_of(rows))
    return questions, passages, grades


@pytest.fixture
def prompted(tmp_path: Path) -> Path:
    """A sentence-transformers folder with a prompt for each side."""
    folder = save_bert(tmp_path / "prompted")
    encoder = load_encoder(folder, "mean")
    encoder.prompts = {"query": "negol: ", "passage": "raban: "}
    write_modules(encoder, folder)
    return folder


def test_equals_sentence_transformers_on_questions_with_ties(
    prompted: Path, tmp_path: Path
) -> None:
    questions, passages, grades = random_set(tmp_path / "faq")
    relevant = {}
    for name, own in grades.items():
        relevant[name] = {passage for passage, grade in own.items() if grade}
    library = InformationRetrievalEvaluator(questions, passages, relevant, write_csv=False)
    ours = load_encoder(prompted)
    model = load_library(prompted)
    for task in ("query", "document"):  # equal texts get exactly equal vectors
        encode = ours.for_task(task).encode
        setattr(model, f"encode_{task}", lambda texts, encode=encode, **_: encode(texts))
    expected = library(model)
    found = evaluate(ours, [Search([tmp_path / "faq"])])["search"]["faq"]
    assert found["questions"] == sum(map(bool, relevant.values())) < len(relevant)
    for ours, theirs in (("ndcg@10", "cosine_ndcg@10"), ("accuracy@1", "cosine_accuracy@1")):
        assert found[ours] == pytest.approx(100 * expected[theirs], abs=1e-6)
        assert 0 < found[ours] < 100


def test_the_prompts_of_queries_and_documents_are_those_of_the_library(prompted: Path) -> None:
    path = prompted / "config_sentence_transformers.json"
    default = '{"prompts": {"text": "negol: "}, "default_prompt_name": "text"}'
    for prompts in (path.read_text(), default):
        path.write_text(prompts)
        ours = load_encoder(prompted)
        library = load_library(prompted)
        for found, expected in (
            (ours, library.encode),
            (ours.for_task("query"), library.encode_query),
            (ours.for_task("document"), library.encode_document),
        ):
            np.testing.assert_allclose(found.encode(WORDS), expected([*WORDS]), atol=1e-5)
    # a prefix takes the place of both prompts
    assert load_encoder(prompted, prefix="").for_task("query").prefix == ""


def test_higher_grades_are_higher_gains() -> None:
    passages = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    question = np.array([[1.0, 0.0]])
    ndcg, accuracy = search_quality(question, passages, [{0: 1, 1: 3}])
    discount = 1 / np.log2(3)
    assert ndcg == pytest.approx(100 * (1 + 3 * discount) / (3 + 1 * discount))
    assert accuracy == 100


def test_the_command_measures_and_compares_sets_without_parallel_text(
    prompted: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    random_set(tmp_path / "faq")
    random_set(tmp_path / "faq-de", seed=1)
    command = f"--model {prompted} --search {tmp_path}/faq {tmp_path}/faq-de"
    report = eval_retrieval.run(command.split())
    search = Search([tmp_path / "faq", tmp_path / "faq-de"])
    expected = search(load_encoder(prompted))
    assert report["search"] == expected
    *ndcg, mean = (found["ndcg@10"] for found in report["search"].values())
    assert mean == pytest.approx(sum(ndcg) / 2)
    assert report["settings"]["document_prompt"] == "raban: "
    write_json(report, tmp_path / "before.json")
    command += f" --before {tmp_path}/before.json"
    other = eval_retrieval.run([*command.split(), "--query_prompt", "kaban"])
    before, now = (each["search"]["faq-de"] for each in (report, other))
    changes = np.subtract(now["ndcg_of_questions"], before["ndcg_of_questions"])
    change = now["ndcg@10"] - before["ndcg@10"]
    error = changes.std(ddof=1) / len(changes) ** 0.5
    line = rf"faq-de +{before['ndcg@10']:.1f} +{now['ndcg@10']:.1f} +{change:.1f} +{error:.1f}\n"
    assert re.search(line, capsys.readouterr().out)

    # The lines of judgements may be in another order.
    judged = tmp_path / "faq-de/qrels/test.tsv"
    header, *rows = judged.read_text().splitlines()
    write(judged, lines_of([header, *rows[::-1]]))
    again = eval_retrieval.run(command.split())
    assert again["search"]["faq-de"] == before
    corpus = tmp_path / "faq-de/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace(WORDS[0], WORDS[1], 1))
    changed = Search([tmp_path / "faq-de"]).sets["faq-de"].digest()
    for others in ({}, {"faq-de": before | {"digest": changed}}):
        assert changes_table(others, again["search"]).startswith("nothing is compared")
    assert other["settings"]["query_prompt"] == "kaban"
    assert other["search"] != expected


def test_a_training_chooses_by_search_and_measures_what_it_saves(
    prompted: Path, short_flags: str, tmp_path: Path
) -> None:
    folder = tmp_path / "faq"
    random_set(folder)
    out = tmp_path / "out"
    run(
        f"{short_flags} --model_name_or_path {prompted} --search {folder} --output_dir {out} "
        "--query_prompt kaban --max_steps 4 --eval_strategy steps --eval_steps 2 --save_steps 2 "
        "--load_best_model_at_end true --metric_for_best_model eval_mean_ndcg"
    )
    best = results(out)["eval_faq_ndcg"]
    assert best == results(out)["eval_mean_ndcg"] == max(logged(out, "eval_mean_ndcg"))
    saved = load_encoder(out)
    assert (saved.prompts["query"], saved.prompts["document"]) == ("kaban", "raban: ")
    assert Search([folder])(saved)["faq"]["ndcg@10"] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("corpus.jsonl", None, "corpus.jsonl"),
        (
            "queries.jsonl",
            '{"_id": "q0", "text": "a"}\n{"_id": "q1"}\n',
            "line 2: KeyError: 'text'",
        ),
        ("queries.jsonl", '{"_id": "q0", "text": "a"}\n' * 2, "line 2: the id q0 is repeated"),
        ("corpus.jsonl", "no json\n", "corpus.jsonl, line 1"),
        ("qrels/test.tsv", f"{HEADER}q0\tp0\t1\nq0\tp999\t1\n", "line 3: .*p999"),
        ("qrels/test.tsv", "q999\tp0\t1\n", "line 1: .*q999"),
        ("qrels/test.tsv", "q0\tp0\t1.0\n", "line 1: .*1.0"),  # no header
        ("qrels/test.tsv", f"{HEADER}q0 0 p0 1\n", "line 2: ids of queries.jsonl"),
        ("qrels/test.tsv", f"{HEADER}q0\tp0\t0\n", "no question has an answer"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, file: str, content: str | None, says: str
) -> None:
    random_set(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        write(tmp_path / file, content)
    with pytest.raises((UserError, FileNotFoundError), match=says):
        Search([tmp_path])
