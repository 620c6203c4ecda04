"""Search: does a question find the passages that answer it?

A set of questions is a folder in BEIR's layout:

- `corpus.jsonl`: a passage per line with "_id", "text" and, if it has one, "title"
- `queries.jsonl`: a question per line with "_id" and "text"
- `qrels/test.tsv`: a header, then a question's id, a passage's id and a grade per line
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError, counted, reading
from dap_transformers.evaluation.evaluator import (
    Evaluator,
    Metric,
    Numbers,
    by_name,
    without_lone_mean,
)
from dap_transformers.search.exact import nearest_neighbours
from dap_transformers.tables import text_table
from dap_transformers.text.archives import decoded_lines

#: Passages per question that nDCG looks at.
TOP = 10


@dataclass
class QuestionSet:
    """Questions, passages, and which passages answer which question.

    Attributes:
        questions: questions that at least one passage answers, by ascending id.
        passages: title and text of each passage, by ascending id.
        grades: of each question, row of a passage -> its grade, above 0.
    """

    questions: list[str]
    passages: list[str]
    grades: list[dict[int, int]]

    def digest(self) -> str:
        """Return a hash of questions, passages and grades: 12 hexadecimal digits."""
        content = json.dumps([self.questions, self.passages, self.grades], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


@dataclass
class Search(Evaluator):
    """nDCG@10 and accuracy@1 of sets of questions, with the model's prompts for both sides.

    Passages are ranked by cosine, and equal ones by id. For grades of 0 and 1, the numbers equal
    those of sentence-transformers' `InformationRetrievalEvaluator`. A higher grade is a higher
    gain, as in BEIR. A question without a passage of a grade above 0 is left out.

    Attributes:
        folders: a folder per set, in BEIR's layout.
    """

    folders: Sequence[str | Path]
    name = "search"
    task = "search"
    primary = "mean_ndcg"
    description = "search: nDCG@10 and accuracy@1 by cosine"

    def __post_init__(self) -> None:
        folders = by_name(self.folders)
        self.sets = {name: read_questions(folder) for name, folder in folders.items()}

    def __call__(self, encoder: SentenceEncoder) -> Numbers:
        """Return the numbers of each set, and their means over the sets under "mean"."""
        query_encoder = encoder.for_task("query")
        document_encoder = encoder.for_task("document")
        numbers: Numbers = {}
        for name, each in self.sets.items():
            questions = query_encoder.encode(each.questions)
            passages = document_encoder.encode(each.passages)
            ndcg, accuracy = search_quality(questions, passages, each.grades)
            numbers[name] = {
                "questions": len(questions),
                "passages": len(passages),
                "digest": each.digest(),
                "ndcg@10": float(ndcg.mean()),
                "accuracy@1": accuracy,
                "ndcg_of_questions": ndcg.round(4).tolist(),
            }
        means = {}
        for key in ("ndcg@10", "accuracy@1"):
            means[key] = float(np.mean([each[key] for each in numbers.values()]))
        return numbers | {"mean": means}

    def logged(self, numbers: Numbers) -> dict[str, float]:
        return {f"{name}_ndcg": each["ndcg@10"] for name, each in numbers.items()}

    def metrics(self, numbers: Numbers) -> list[Metric]:
        found = []
        for name, each in without_lone_mean(numbers).items():
            count = f" ({counted(each['questions'], 'question')})" if "questions" in each else ""
            found.append(Metric("nDCG@10", each["ndcg@10"], name + count, "ndcg_at_10"))
            found.append(Metric("accuracy@1", each["accuracy@1"], name + count, "accuracy_at_1"))
        return found


def search_quality(
    questions: np.ndarray, passages: np.ndarray, grades: Sequence[Mapping[int, int]]
) -> tuple[np.ndarray, float]:
    """Return nDCG@10 of each question (N,), and accuracy@1 over all questions, in percent.

    Vectors are (N, D) of the questions and (M, D) of the passages. `grades` has for each question
    the rows of its passages and their grades. accuracy@1 is the share of questions whose first
    passage has a grade above 0.

    The passage at rank i, from 1, has the gain of its grade divided by log2(i + 1). nDCG is the
    sum of the gains divided by the highest possible sum.

    >>> nearby = np.array([[1.0, 0.2], [1.0, 0.0], [0.0, 1.0]])
    >>> ndcg, accuracy = search_quality(np.array([[1.0, 0.0]]), nearby, [{0: 1}])
    >>> ndcg.round(2).tolist(), accuracy
    ([63.09], 0.0)
    """
    _, found = nearest_neighbours(questions, passages, min(TOP, len(passages)))
    ndcg = []
    is_right = []
    for row, own in zip(found.tolist(), grades, strict=True):
        gains = [own.get(passage, 0) for passage in row]
        best = sorted(own.values(), reverse=True)
        ndcg.append(discounted(gains) / discounted(best))
        is_right.append(gains[0] > 0)
    return 100 * np.array(ndcg), 100 * float(np.mean(is_right))


def changes_table(before: Numbers, now: Numbers) -> str:
    """Format nDCG@10 of each set before and now, its mean change, and the change's standard error.

    Question by question is compared. Sets whose name or content differs are left out.
    """
    rows = []
    for name, each in now.items():
        old = before.get(name, {}).get("ndcg_of_questions", [])
        new = each.get("ndcg_of_questions", [])
        if len(old) == len(new) > 1 and before[name].get("digest") == each["digest"]:
            changes = np.subtract(new, old)
            error = changes.std(ddof=1) / len(changes) ** 0.5
            means = (before[name]["ndcg@10"], each["ndcg@10"])
            rows.append([name, *means, float(changes.mean()), float(error)])
    if not rows:
        return "nothing is compared: no set has the name and the content of one before"
    return text_table(["nDCG@10", "before", "now", "change", "standard error"], rows)


def discounted(gains: Sequence[int]) -> float:
    """Return the sum of the first `TOP` gains, each divided by log2(rank + 1)."""
    first = gains[:TOP]
    return float((np.array(first) / np.log2(np.arange(2, len(first) + 2))).sum())


# The files


def read_questions(folder: Path) -> QuestionSet:
    """Read a set of questions in BEIR's layout."""
    corpus = read_texts(folder / "corpus.jsonl")
    questions = read_texts(folder / "queries.jsonl")
    row_of = {name: row for row, name in enumerate(corpus)}

    path = folder / "qrels/test.tsv"
    grades: dict[str, dict[int, int]] = {name: {} for name in questions}
    for number, line in enumerate(decoded_lines(path), 1):
        with reading(f"{path}, line {number}: ids of queries.jsonl and corpus.jsonl, and a number"):
            question, passage, grade = line.split("\t")
            if number == 1 and not grade.strip()[:1].isdigit():
                continue  # the header
            own = grades[question]  # the KeyError of an unknown id names it
            row = row_of[passage]
            if int(grade) > 0:
                own[row] = int(grade)
    answered = {name: own for name, own in grades.items() if own}
    if not answered:
        raise UserError(f"{path}: no line has a grade above 0, so no question has an answer")
    asked = [questions[name] for name in answered]
    return QuestionSet(asked, list(corpus.values()), list(answered.values()))


def read_texts(path: Path) -> dict[str, str]:
    """Read the texts of a JSON Lines file by ascending id. A title goes before the text."""
    texts: dict[str, str] = {}
    for number, line in enumerate(decoded_lines(path), 1):
        place = f"{path}, line {number}"
        with reading(place):
            record = json.loads(line)
            name = str(record["_id"])
            text = " ".join(filter(None, (record.get("title"), record["text"])))
        if name in texts:
            raise UserError(f"{place}: the id {name} is repeated")
        texts[name] = text
    return dict(sorted(texts.items()))
