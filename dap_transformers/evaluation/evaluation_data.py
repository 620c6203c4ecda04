"""The flags of evaluators, which a training and `eval-retrieval` share."""

from dataclasses import dataclass

from dap_transformers.evaluation.evaluator import Evaluator
from dap_transformers.evaluation.passage_search import Search
from dap_transformers.options import arg


@dataclass(kw_only=True)
class EvaluationData:
    """What to measure on. A new evaluator is a field here and a line in `evaluators`."""

    search_data: list[str] = arg(
        [],
        "Folders of questions and passages in BEIR's layout (docs/evaluation.md): nDCG@10.",
        changes_weights=False,
        aliases=["--search"],
    )

    def evaluators(self) -> list[Evaluator]:
        """Return the evaluators that the flags ask for."""
        chosen: list[Evaluator] = []
        if self.search_data:
            chosen.append(Search(self.search_data))
        return chosen
