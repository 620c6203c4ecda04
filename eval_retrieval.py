"""Measure an encoder: retrieval, search, similarity, and mining.

    eval-retrieval --model user/dap-xlmr --data_dir tatoeba/ --output_file out.json

- Data: `--data_dir` takes a folder in Tatoeba's layout (`tatoeba.deu-eng.deu` and
  `tatoeba.deu-eng.eng`) or any other parallel text that training reads, such as `de-en.tsv`.
- Directions: "xx→en" queries with language xx and retrieves from the English side. "en→xx" is the
  other way round.
- Multilingual pool: `--pool multilingual` also measures retrieval where the other sentences of the
  query's own language are candidates.
- Hard negatives: `--hard_negatives` also measures how often a source prefers a changed copy of an
  English sentence to the translation (xsim++).
- Search: `--search faq/` measures whether questions find the passages that answer them.
- Similarity: `--sts sts.tsv` measures whether cosines order pairs of sentences as people do.
- Mining: `--bucc bucc/fr-en` measures the pairs that are mined out of two texts.
- Several processes: `accelerate launch` shares the encoding among processes.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluation_data import EvaluationData
from dap_transformers.evaluation.evaluator import Evaluator, card_rows, data_name, evaluate
from dap_transformers.evaluation.hard_negatives import HardNegatives
from dap_transformers.evaluation.passage_search import changes_table
from dap_transformers.evaluation.retrieval import Retrieval, Tatoeba, read_languages
from dap_transformers.files import public_name, write_json
from dap_transformers.options import arg, require_least
from dap_transformers.pictures import plot_accuracies
from dap_transformers.processes import launched
from dap_transformers.ray.connection import Cluster
from dap_transformers.reports import read_report
from dap_transformers.text.find import find_bitext
from modules_dap import PROMPTS_OF


@dataclass
class EvaluationArguments(EvaluationData):
    """Command-line arguments of an evaluation: what to evaluate on, and what to write."""

    data_dir: list[str] = arg([], "Folders or files of parallel text with English.")
    languages: list[str] | None = arg(
        None, "Codes such as 'de fr' or 'deu fra'. Default: all languages in data_dir."
    )
    max_pairs: int | None = arg(
        None, "Use only the first pairs of each language, for a quick look. Default: all."
    )
    pool: str = arg(
        "monolingual",
        "Candidates of a query. 'monolingual' takes the sentences of the other language only. "
        "'multilingual' also measures a pool that holds the other sentences of the query's "
        "language, too.",
        choices=("monolingual", "multilingual"),
    )
    hard_negatives: bool = arg(
        False, "Measure the error if changed copies of the English sentences are candidates."
    )
    query_prompt: str | None = arg(
        None,
        "With --search: text before a question, such as 'query: '. Default: the checkpoint's own "
        "prompt for queries, perhaps none, unless --prefix is given, otherwise the prefix.",
    )
    document_prompt: str | None = arg(None, "The same before a passage, such as 'passage: '.")
    output_file: str | None = arg(None, "JSON file to write.")
    plot: str | None = arg(None, "Picture of accuracy by language to draw: .svg, .png or .pdf.")
    before: str | None = arg(
        None, "JSON file of another model: compares --search with it, and --plot accuracies."
    )

    def __post_init__(self) -> None:
        require_least(self, max_pairs=1)

    def text_files(self) -> list[Path]:
        """Return the files of the parallel text."""
        found = find_bitext(self.data_dir, split="test") if self.data_dir else {}
        return [Path(path) for file in chain.from_iterable(found.values()) for path in file.paths]

    def all_evaluators(self) -> list[Evaluator]:
        """Read the text, and return the evaluators that the flags ask for."""
        chosen: list[Evaluator] = []
        if self.data_dir:
            pairs = read_languages(
                find_bitext(self.data_dir, split="test"), self.languages, self.max_pairs
            )
            is_tatoeba = all(path.name.startswith("tatoeba.") for path in self.text_files())
            is_whole = self.max_pairs is None  # fewer candidates are easier than the paper's
            kind = Tatoeba if is_tatoeba and is_whole else Retrieval
            chosen.append(kind(pairs, self.pool == "multilingual"))
            if self.hard_negatives:
                chosen.append(HardNegatives(pairs))
        elif self.hard_negatives or self.plot or self.languages or self.max_pairs:
            raise UserError(
                "--hard_negatives, --plot, --languages and --max_pairs need the pairs of --data_dir"
            )
        chosen += self.evaluators()
        if not chosen:
            raise UserError("nothing to measure: give test data, such as --data_dir (see --help)")
        return chosen


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure an encoder, print tables, and write the report that is returned.

    If there are several processes, only the first one writes, and the others return {}.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    types = (EncoderArguments, EvaluationArguments, Cluster)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0])
    model_args, args, cluster = parser.parse_args_into_dataclasses(args=argv)
    files = {"--output_file": args.output_file, "--plot": args.plot}
    inputs = [*args.data_dir, *args.text_files(), *args.test_data(), args.before]
    inputs.append(model_args.model_name_or_path)
    is_main = launched().is_main_process

    with guarded(files, {}, inputs, is_main), cluster.connect():
        # read the text and load the model
        before = read_report(args.before) if args.before else {}
        draws_before = args.plot and "languages" in before
        compares_search = args.search_data and "search" in before
        if args.before and not (draws_before or compares_search):
            raise UserError(f"--before {args.before} has no such numbers to compare with")
        evaluators = args.all_evaluators()
        encoder = model_args.load(cluster)
        prompts = {"query": args.query_prompt, "document": args.document_prompt}
        encoder.prompts.update((task, text) for task, text in prompts.items() if text is not None)
        if is_main:
            print(model_args.summary(encoder))

        # measure
        started = time.perf_counter()
        numbers = evaluate(encoder, evaluators, is_main)
        seconds = time.perf_counter() - started
        if not is_main:
            return {}

        # print the tables first, so that they are not lost if a file cannot be written
        tables = [each.table(numbers[each.name]) for each in evaluators]
        if compares_search:
            tables.append(changes_table(before["search"], numbers["search"]))
        print(*tables, sep="\n\n")

        # write the report
        settings = {
            "data": [public_name(path) for path in (*args.data_dir, *args.test_data())],
            "pairs_per_language": args.max_pairs,
        }
        if args.pool == "multilingual":
            settings["pool"] = args.pool
        if args.search_data:
            settings |= {f"{task}_prompt": encoder.for_task(task).prefix for task in PROMPTS_OF}
        protocol = "; ".join(each.description for each in evaluators if each.description)
        metrics = []
        for each in evaluators:
            own = getattr(args, f"{each.name}_data", None)  # else the pairs of --data_dir
            data = data_name(own) if own else data_name(args.data_dir, args.max_pairs)
            metrics += card_rows(each.task, each.metrics(numbers[each.name]), data)
        numbers = numbers.pop("retrieval", {}) | numbers | {"metrics": metrics}
        content = model_args.report(encoder, protocol, numbers, settings, seconds)
        if args.output_file:
            write_json(content, args.output_file)
            print(f"written to {args.output_file}")
        if args.plot:
            reports = {"before": before["languages"]} if draws_before else {}
            reports["after" if reports else "accuracy"] = content["languages"]
            plot_accuracies(reports, args.plot)
            print(f"drawn in {args.plot}")
    return content


main = command(run)


if __name__ == "__main__":
    main()
