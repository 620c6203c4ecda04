"""Mine translations out of two texts, score given pairs, or align texts in order.

    mine-bitext wiki.fr wiki.en --model out --output pairs.tsv
    mine-bitext news.fr news.en --model out --score_only --output scores.tsv
    mine-bitext novel.fr novel.en --model out --in_order --pair fr-en --output novel.tmx

- Input: texts with one sentence per line, also as `.gz` or `.xz`. A repeated sentence is mined
  once, under its first line. With `--in_order` also paragraphs, and `.srt` and `.vtt`.
- Output: the columns score, source, target, source_line and target_line. Lines count from 1. The
  best pairs come first. With `--score_only` the pairs keep the order of the texts. With
  `--in_order` a row is a group of sentences, or a sentence without a translation. The file's name
  says the format: `.tsv`, `.jsonl`, `.parquet` or `.tmx`.
- Threshold: chosen from the scores (`dap_transformers.mining.threshold`). A table shows how many
  pairs other thresholds keep, and their estimated precision.
- Resuming: sentence vectors are kept in shards beside the output, for these two texts. If a run was
  stopped, the same command continues it. With another threshold or output, nothing is encoded.
- Several processes: `accelerate launch` shares the encoding among processes. `--ray` encodes and
  searches on a cluster.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.errors import UserError
from dap_transformers.files import plain_suffix, public_name, write_json
from dap_transformers.languages import LANGUAGE_TAG
from dap_transformers.mining.in_order import align_texts
from dap_transformers.mining.mine_pairs import (
    MiningOptions,
    encode_texts,
    mine_texts,
    score_texts,
)
from dap_transformers.mining.texts import (
    MEMORY,
    read_known,
    read_texts,
    read_texts_in_order,
    write_pairs,
)
from dap_transformers.options import arg, require_least
from dap_transformers.processes import launched
from dap_transformers.ray.connection import Cluster
from dap_transformers.ray.search import cluster_neighbours
from dap_transformers.search.approximate import approximate_neighbours, recall_at_k
from dap_transformers.search.exact import NeighbourSearch, mutual_neighbours
from dap_transformers.text.formats import is_in_other_script

logger = logging.getLogger(__name__)

USAGE = """%(prog)s SOURCE TARGET --model MODEL --output FILE [options]
The two texts come first, side by side; what is below names the options."""
#: Names of files that can be written.
WRITTEN = re.compile(r"\.(parquet|(tsv|jsonl|tmx)(\.gz|\.xz)?)$", re.IGNORECASE)
#: Two language codes, such as `pt-BR-en`.
LANGUAGE_PAIR = re.compile(rf"({LANGUAGE_TAG}|[A-Z]{{2,3}})-({LANGUAGE_TAG}|[A-Z]{{2,3}})")
#: What is mined -> options that would have no effect there.
WITHOUT_EFFECT = {
    "given pairs": ("largest_group", "split_lines", "min_precision", "calibrate"),
    "two texts": ("largest_group", "split_lines"),
    "texts in order": ("score_only", "k", "min_precision", "calibrate", "index"),
}


@dataclass
class MiningArguments:
    """Command-line arguments of mining: what to mine, and which files to write."""

    output: str = arg(
        MISSING, "File for the pairs: .tsv, .jsonl or .tmx, also with .gz or .xz, or .parquet."
    )
    in_order: bool = arg(
        False,
        "The texts are translations of each other, in the same order: align their sentences in "
        "groups. --threshold is then the lowest cosine of a group.",
    )
    largest_group: int = arg(3, "With --in_order: most sentences of a group, on each side.")
    split_lines: bool | None = arg(
        None,
        "With --in_order: split lines into sentences. It needs --pair. Default: only if one text "
        "has subtitles, wrapped text or many long lines.",
    )
    score_only: bool = arg(
        False, "Score line i of one text with line i of the other instead of mining."
    )
    pair: str | None = arg(
        None,
        "Languages of the texts, such as fr-en or pt-BR-en: for .tmx, for --split_lines, and to "
        "check the scripts.",
    )
    calibrate: str | None = arg(
        None,
        "Known translations, a line each: source, tab, target. They show how translations score, "
        "which helps if the texts have few.",
    )
    index: str | None = arg(
        None, "Faiss index for approximate search, such as IVF4096,PQ64. Default: exact search."
    )
    embeddings_dir: str | None = arg(
        None, "Folder that keeps the vectors. Default: one for these two texts, beside the output."
    )
    report_file: str | None = arg(None, "JSON report. Default: OUTPUT.json.")

    def __post_init__(self) -> None:
        require_least(self, largest_group=1)
        if not WRITTEN.search(self.output):
            raise UserError(
                f"--output {self.output}: give a name that ends in .tsv, .jsonl or .tmx, also with "
                ".gz or .xz, or in .parquet"
            )
        self.report_file = self.report_file or f"{self.output}.json"

    @property
    def mode(self) -> str:
        """Return what is mined, a key of `WITHOUT_EFFECT`."""
        if self.in_order:
            return "texts in order"
        return "given pairs" if self.score_only else "two texts"

    @property
    def languages(self) -> tuple[str, ...]:
        """Return the codes of source and target that `pair` names, or two empty ones."""
        match = LANGUAGE_PAIR.fullmatch(self.pair or "")
        return match.groups() if match else ("", "")


def parse(
    argv: Sequence[str] | None,
) -> tuple[EncoderArguments, MiningArguments, MiningOptions, Cluster, list[str]]:
    """Parse the command line. The last result are the names of the two texts."""
    types = (EncoderArguments, MiningArguments, MiningOptions, Cluster)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0], usage=USAGE)
    text = "source text and target text with one sentence per line, before all options"
    parser.add_argument("files", nargs=2, help=text)
    model_args, args, options, cluster, positional = parser.parse_args_into_dataclasses(args=argv)
    files = positional.files
    if not args.embeddings_dir:
        paths = "\n".join(map(os.path.abspath, files))
        names = "-".join(Path(path).name for path in files)
        names += f".{hashlib.sha256(paths.encode()).hexdigest()[:8]}.embeddings"
        args.embeddings_dir = str(Path(args.output).with_name(names))
    for name in WITHOUT_EFFECT[args.mode]:
        group = options if hasattr(options, name) else args
        if getattr(group, name) != getattr(type(group), name):
            raise UserError(f"--{name} has no effect on {args.mode}: leave it out")
    if args.index and cluster.ray:
        raise UserError("--index and --ray do not go together: leave one out")
    if not all(args.languages) and (args.pair or plain_suffix(args.output) == MEMORY):
        raise UserError("--pair takes two language codes, such as fr-en, and .tmx needs it")
    if (args.score_only or args.in_order) and options.threshold == "auto":
        options.threshold = None
    return model_args, args, options, cluster, files


def search_of(args: MiningArguments, cluster: Cluster) -> NeighbourSearch:
    """Return the search for neighbours: exact or with an index, here or on a cluster."""
    if cluster.ray:
        return partial(cluster_neighbours, progress=True)
    if args.index:
        return partial(approximate_neighbours, index=args.index, progress=True)
    return partial(mutual_neighbours, progress=True)


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Mine translations, score given pairs or align texts, as the command line says.

    Returns:
        The report that is also written as JSON. If there are several processes, only the first one
        searches and writes, and the others return an empty report.
    """
    model_args, args, options, cluster, files = parse(argv)
    is_main = launched().is_main_process
    level = "WARNING" if is_main else "ERROR"
    logging.basicConfig(format="%(levelname)s: %(message)s", level=level)
    inputs = [*files, args.calibrate, model_args.model_name_or_path]
    outputs = {"--output": args.output, "--report_file": args.report_file}
    folders = {"--embeddings_dir": args.embeddings_dir}

    with guarded(outputs, folders, inputs, is_main), cluster.connect():
        # read everything before the model is loaded, so that faults are found early
        if args.in_order:
            texts = read_texts_in_order(files, args.languages, args.split_lines, args.largest_group)
        else:
            texts = read_texts(files, is_parallel=args.score_only)
        known = read_known(args.calibrate) if args.calibrate else {}
        for code, text in zip(args.languages, texts.values()):
            if code and is_in_other_script(text.sentences, code):
                logger.warning("%s is not in the script of --pair's language %s", text.name, code)

        # encode
        started = time.perf_counter()
        encoder = model_args.load(cluster)
        vectors = encode_texts(encoder, texts | known, args.embeddings_dir, progress=is_main)
        if cluster.ray:
            encoder.end()  # the search needs its memory
        if not is_main:
            return {}

        # search
        search = search_of(args, cluster)
        sides = vectors["source"], vectors["target"]
        if args.in_order:
            found = align_texts(texts, sides, options.threshold, search)
        elif args.score_only:
            found = score_texts(texts, sides, options, search)
        else:
            of_known = tuple(vectors[name][text.rows] for name, text in known.items())
            found = mine_texts(texts, sides, options, search, of_known or None)
        recall = recall_at_k(found.neighbours, *sides) if args.index else None
        seconds = time.perf_counter() - started

        # write the pairs and the report
        write_pairs(found.table, args.output, args.languages)
        numbers = {side: text.counts() for side, text in texts.items()} | found.numbers
        numbers["recall_at_k"] = recall
        settings = settings_of(args, options, files)
        report = model_args.report(encoder, found.protocol, numbers, settings, seconds)
        write_json(report, args.report_file)

    print(*known.values(), *texts.values(), sep="\n")
    print(model_args.summary(encoder))
    if recall is not None:
        print(f"{args.index}: recall {recall:.4f} of the exact search, on a sample")
    print(found.summary)
    print(f"written to {args.output} and {args.report_file}")
    print(f"vectors are kept in {args.embeddings_dir}")
    return report


def settings_of(
    args: MiningArguments, options: MiningOptions, files: Sequence[str]
) -> dict[str, Any]:
    """Return the settings for the report, without those that have no effect."""
    data = [public_name(path) for path in files]
    chosen = asdict(options) | {"index": args.index, "data": data}
    for name in WITHOUT_EFFECT[args.mode]:
        chosen.pop(name, None)
    return chosen


main = command(run)


if __name__ == "__main__":
    main()
