"""Bitext retrieval accuracy in both directions, on Tatoeba or on your own parallel text.

    eval-retrieval --model user/dap-xlmr --data_dir tatoeba/ --output_file out.json

- Data: `--data_dir` takes a folder in Tatoeba's layout (`tatoeba.deu-eng.deu` and
  `tatoeba.deu-eng.eng`) or any other parallel text that training reads, such as `de-en.tsv`.
- Directions: "xx→en" queries with language xx and retrieves from the English side. "en→xx" is the
  other way round.
- Multilingual pool: `--pool multilingual` also measures retrieval where the other sentences of the
  query's own language are candidates.
- Hard negatives: `--hard_negatives` also measures how often a source prefers a changed copy of an
  English sentence to the translation (xsim++).
- Reuse: with `--embeddings_dir` a second run of the same model on the same text encodes nothing.
- Several processes: `accelerate launch` shares the encoding among processes.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, make_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from dap_transformers.commands.arguments import (
    ArgumentParser,
    EncoderArguments,
    token_budget,
)
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.encoding.encoder import tokens_of_a_batch
from dap_transformers.encoding.shards import launched
from dap_transformers.errors import counted
from dap_transformers.evaluation.evaluator import evaluate
from dap_transformers.evaluation.hard_negatives import HardNegatives
from dap_transformers.evaluation.paper import PAPER_MODELS, tatoeba_tables
from dap_transformers.evaluation.retrieval import Retrieval, pool_table, read_languages, rounded
from dap_transformers.files import public_name, write_json
from dap_transformers.options import arg
from dap_transformers.pictures import plot_accuracies
from dap_transformers.ray.connection import Cluster
from dap_transformers.reports import read_report
from dap_transformers.text.find import find_bitext

PROTOCOL = (
    "bitext retrieval: nearest neighbour by cosine over the other side, accuracy by line, macro "
    "averages"
)
#: What can be measured beside retrieval: flag -> evaluator of pairs by language.
EVALUATORS = {"hard_negatives": HardNegatives}


@dataclass
class RetrievalArguments:
    """Command-line arguments of a retrieval evaluation: what to evaluate on, and what to write."""

    data_dir: list[str] = arg(MISSING, "Folders or files of parallel text with English.")
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
    output_file: str | None = arg(None, "JSON file to write.")
    plot: str | None = arg(None, "Picture of accuracy by language to draw: .svg, .png or .pdf.")
    before: str | None = arg(None, "JSON file of another model, for --plot to compare with.")
    embeddings_dir: str | None = arg(
        None, "Folder that keeps the vectors for other runs of the same model on the same text."
    )
    token_budget: int | None = token_budget()


def flag_of(name: str) -> tuple[str, type, Any]:
    """Return the dataclass field of an evaluator's flag. Its class says what it measures."""
    return name, bool, arg(False, EVALUATORS[name].__doc__.partition("\n")[0])


Measures = make_dataclass("Measures", map(flag_of, EVALUATORS))


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure retrieval accuracy, print tables, and write the report that is returned.

    If there are several processes, only the first one writes, and the others return {}.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    types = (EncoderArguments, RetrievalArguments, Measures, Cluster)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0])
    model_args, args, chosen, cluster = parser.parse_args_into_dataclasses(args=argv)
    files = {"--output_file": args.output_file, "--plot": args.plot}
    folders = {"--embeddings_dir": args.embeddings_dir}
    found = find_bitext(args.data_dir)
    paths = []
    for file in chain.from_iterable(found.values()):
        paths += file.paths
    inputs = [*args.data_dir, *paths, args.before]
    model = model_args.model_name_or_path
    is_main = launched().is_main_process

    with guarded(files, folders, inputs, model, is_main), cluster.connect():
        # read the pairs and load the model
        reports = {"before": read_report(args.before)["languages"]} if args.before else {}
        pairs = read_languages(found, args.languages, args.max_pairs)
        retrieval = Retrieval(pairs, args.pool == "multilingual")
        others = [EVALUATORS[name](pairs) for name, is_on in asdict(chosen).items() if is_on]
        encoder = model_args.load(cluster)
        if is_main:
            print(f"{model_args.summary(encoder)}; {counted(len(pairs), 'language')}")

        # measure
        started = time.perf_counter()
        budget = tokens_of_a_batch(args.token_budget)
        numbers = evaluate(encoder, [retrieval, *others], budget, args.embeddings_dir, is_main)
        seconds = time.perf_counter() - started
        if not is_main:
            return {}
        numbers = rounded(numbers.pop(retrieval.name)) | numbers

        # print the tables first, so that they are not lost if a file cannot be written
        is_tatoeba = all(Path(path).name.startswith("tatoeba.") for path in paths)
        is_comparable = is_tatoeba and args.max_pairs is None  # fewer candidates are easier
        print(tatoeba_tables(numbers, Path(model).name, PAPER_MODELS if is_comparable else ()))
        if retrieval.pool:
            print(f"\n{pool_table(numbers)}")
        for each in others:
            print(f"\n{each.table(numbers[each.name])}")

        # write the report
        settings = {
            "data": [public_name(path) for path in args.data_dir],
            "text": digest(pairs),
            "max_pairs": args.max_pairs,
        }
        if retrieval.pool:
            settings["pool"] = args.pool
        for each in others:
            settings[each.name] = digest(list(each.sentences()))
        content = model_args.report(encoder, PROTOCOL, numbers, settings, seconds)
        if args.output_file:
            write_json(content, args.output_file)
            print(f"written to {args.output_file}")
        if args.plot:
            reports["after" if reports else "accuracy"] = content["languages"]
            plot_accuracies(reports, args.plot)
            print(f"drawn in {args.plot}")
    return content


def digest(text: Any) -> str:
    """Return 12 hexadecimal digits of a hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]


main = command(run)


if __name__ == "__main__":
    main()
