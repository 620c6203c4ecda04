"""The flags of evaluators, which a training and `eval-retrieval` share."""

from dataclasses import dataclass, fields

from dap_transformers.evaluation.bucc import PROTOCOLS, Bucc
from dap_transformers.evaluation.evaluator import Evaluator
from dap_transformers.evaluation.passage_search import Search
from dap_transformers.evaluation.sts import STS
from dap_transformers.options import arg


def data(flag: str, text: str) -> list[str]:
    """Define a flag for data files of an evaluator, with a shorter alias."""
    return arg([], text, aliases=[flag])


@dataclass(kw_only=True)
class EvaluationData:
    """What to measure on. A new evaluator is a field `{name}_data` and a line in `evaluators`."""

    search_data: list[str] = data(
        "--search", "Folders of questions and passages in BEIR's layout (docs/evaluation.md)."
    )
    sts_data: list[str] = data("--sts", "Files of two sentences and a score per line, with tabs.")
    bucc_data: list[str] = data("--bucc", "Folders of BUCC's language pairs, such as bucc/fr-en.")
    bucc_protocol: str | None = arg(
        None,
        "Protocol of BUCC. The paper's Table 2 is 'sample', its Table 3 is "
        "'sample-threshold-on-training'. Default: training-optimal if all pairs have a training "
        "split with gold pairs, else sample.",
        choices=tuple(PROTOCOLS),
    )

    def evaluators(self) -> list[Evaluator]:
        """Read the data of the evaluators that the flags ask for, and return these."""
        chosen = [
            self.search_data and Search(self.search_data),
            self.sts_data and STS(self.sts_data),
            self.bucc_data and Bucc(self.bucc_data, self.bucc_protocol),
        ]
        return [each for each in chosen if each]

    def test_data(self) -> list[str]:
        """Return all files and folders that these flags name."""
        paths = []
        for field in fields(EvaluationData):
            value = getattr(self, field.name)
            paths += value if isinstance(value, list) else []
        return paths
