"""Mine translations out of two texts, score given pairs, or measure mining on BUCC.

    mine-bitext wiki.fr wiki.en --model out --output pairs.tsv
    mine-bitext news.fr news.en --model out --score_only --output scores.tsv
    mine-bitext --bucc bucc2018/ --pair fr-en --model out --output fr-en.tsv

- Input: texts with one sentence per line, also as `.gz` or `.xz`. A repeated sentence is mined
  once, under its first line.
- Output: the columns score, source, target, source_line and target_line. Lines count from 1. The
  best pairs come first. With `--score_only` the pairs keep the order of the texts. The file's name
  says the format: `.tsv`, `.jsonl` or `.parquet`.
- Threshold: chosen from the scores (`dap_transformers.mining.threshold`). A table shows how many
  pairs other
  thresholds keep, and their estimated precision.
- Resuming: sentence vectors are kept in shards beside the output. If a run was stopped, the same
  command continues it. A run with another threshold or output name encodes nothing.
- Several processes: `accelerate launch` shares the encoding among processes. `--ray` encodes and
  searches on a cluster.

Legend: `N` source sentences, `M` target sentences, `D` dimensions.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dap_transformers.commands.arguments import ArgumentParser, EncoderArguments, load
from dap_transformers.commands.edge import command, guarded
from dap_transformers.disk_arrays import temporary_folder
from dap_transformers.encoding.encoder import Encoder, tokens_of_a_batch
from dap_transformers.encoding.shards import (
    SHARD_SIZE,
    SentenceError,
    embed_to_disk,
    launched,
    model_fingerprint,
)
from dap_transformers.errors import UserError, counted, joined
from dap_transformers.evaluation.bucc import PROTOCOLS, Bucc
from dap_transformers.files import public_name, write_json
from dap_transformers.languages import is_blank
from dap_transformers.mining.distinct import DistinctSentences
from dap_transformers.mining.margin import (
    MARGINS,
    RETRIEVALS,
    MinedPairs,
    candidate_pairs,
    neighbourhoods,
    select,
)
from dap_transformers.mining.mine import (
    Choice,
    Margin,
    Vectors,
    mine_vectors,
    report_of,
    require_some,
    table_text,
)
from dap_transformers.mining.texts import (
    MiningTask,
    TextSide,
    require_writable,
    write_pairs,
)
from dap_transformers.options import arg, require_least
from dap_transformers.ray.connection import Cluster
from dap_transformers.ray.search import cluster_neighbours
from dap_transformers.search.approximate import approximate_neighbours, recall_at_k
from dap_transformers.search.exact import Neighbours, Search, mutual_neighbours
from dap_transformers.text.archives import read_sentences

logger = logging.getLogger(__name__)

#: Fewest known translations from which an estimate can be calibrated.
FEWEST_KNOWN = 20
MINING = "bitext mining by margin over nearest neighbours"
SCORING = "margin of given pairs over nearest neighbours"
USAGE = """%(prog)s SOURCE TARGET --model MODEL --output FILE [options]
       %(prog)s --bucc FOLDER --pair fr-en --model MODEL [options]
The two texts come first, side by side; what is below names the options."""


@dataclass
class MiningArguments:
    """Options of mining: what to mine, how to mine it, and which files to write.

    The names of `output` and `report_file` are filled in if they are not given.

    Raises:
        UserError: a number is too small, `--output` is missing, or its format is not written.
    """

    output: str | None = arg(
        None,
        "File for the pairs: .tsv or .jsonl, also with .gz or .xz, or .parquet. Default for "
        "--bucc: bucc.PAIR.tsv.",
    )
    score_only: bool = arg(
        False, "Score line i of one text with line i of the other instead of mining."
    )
    bucc: str | None = arg(None, "Folder with the files of BUCC, instead of two texts.")
    pair: str | None = arg(None, "Languages for --bucc, such as fr-en.")
    protocol: str | None = arg(
        None,
        "Protocol for --bucc. The paper's Table 2 is 'sample', its Table 3 is "
        "'sample-threshold-on-training'. Default: training-optimal if there is a training split, "
        "else sample.",
        choices=PROTOCOLS,
    )
    margin: str = arg("ratio", "How the cosine is compared with the neighbours'.", choices=MARGINS)
    retrieval: str = arg(
        "max",
        "Which candidates are kept: 'forward' those of the source sentences, 'backward' those of "
        "the target sentences, 'intersection' those of both, 'max' the best of both with no "
        "sentence twice.",
        choices=RETRIEVALS,
    )
    k: int = arg(4, "Number of neighbours of each sentence.")
    threshold: str | None = arg(
        None,
        "Lowest score of a pair: a number, 'auto' to choose it from the scores, or 'none'. "
        "Default: auto, or none with --score_only.",
    )
    min_precision: float | None = arg(
        None, "Choose the lowest threshold with this estimated precision, such as 0.9."
    )
    calibrate: str | None = arg(
        None,
        "Known translations, a line each: source, tab, target. They show how translations score, "
        "which helps if the texts have few.",
    )
    top_n: int | None = arg(None, "Number of the best pairs to keep. Default: all.")
    index: str | None = arg(
        None, "Faiss index for approximate search, such as IVF4096,PQ64. Default: exact search."
    )
    embeddings_dir: str | None = arg(
        None, "Folder that keeps the vectors. Default: beside the output, named after the texts."
    )
    shard_size: int = arg(
        SHARD_SIZE, "Sentences per shard of vectors. A killed process loses at most one shard."
    )
    token_budget: int | None = arg(
        None,
        "Most tokens per batch. It does not change the results. Default: 4096, on CUDA 32768.",
    )
    report_file: str | None = arg(None, "JSON report. Default: OUTPUT.json.")

    def __post_init__(self) -> None:
        require_least(self, k=1, top_n=1, shard_size=1, token_budget=1)
        self.output = self.output or (self.bucc and f"bucc.{self.pair}.tsv")
        if not self.output:
            raise UserError("--output is missing: name the file for the pairs")
        require_writable(self.output)
        self.report_file = self.report_file or f"{self.output}.json"

    def options(self) -> Margin:
        """Return the options that say how pairs are scored and chosen.

        If `--threshold` is not given, it is "auto", or "none" with `--score_only`.
        """
        threshold = self.threshold or ("none" if self.score_only else "auto")
        return Margin(self.margin, self.k, self.retrieval, threshold, self.min_precision)


@dataclass(frozen=True)
class MiningResult:
    """The pairs that a run has found, and what its report says about them.

    Attributes:
        protocol: name of the procedure, for the report.
        numbers: counts and scores by name, for the report.
        pairs: the kept pairs of lines, counted from 0, which are written to the output.
        summary: what is printed about them once they are written. BUCC has a table instead.
    """

    protocol: str
    numbers: dict[str, Any]
    pairs: MinedPairs
    summary: str = ""


def _parse(
    argv: Sequence[str] | None,
) -> tuple[EncoderArguments, MiningArguments, Cluster, list[str]]:
    """Parse the command line, check that the options fit together, and fill in defaults.

    Returns:
        The options of the encoder, of mining and of the cluster, and the names of the text files.
    """
    types = (EncoderArguments, MiningArguments, Cluster)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0], usage=USAGE)
    parser.add_argument(
        "files",
        nargs="*",
        help="source text and target text with one sentence per line, before all options",
    )
    *groups, positional, rest = parser.parse_args_into_dataclasses(
        args=argv, return_remaining_strings=True
    )
    if rest:
        raise UserError(
            f"{' '.join(rest)}: no such option, or a text in the wrong place; the two texts come "
            "first, side by side"
        )
    model_args, args, cluster = groups
    if args.bucc:
        _check_bucc_arguments(args, positional.files)
    else:
        _check_text_arguments(args, positional.files)
    if not args.embeddings_dir:
        args.embeddings_dir = _vector_folder(args, model_args, positional.files)
    return model_args, args, cluster, positional.files


def _vector_folder(
    args: MiningArguments, model_args: EncoderArguments, files: Sequence[str]
) -> str:
    """Return the path of a folder beside the output for the vectors. It is not made here.

    Its name has a hash of the names of texts and model and of the encoder's options.

    A second run with the same texts and model therefore finds the vectors of the first.
    """
    given = [asdict(model_args), files, args.bucc, args.pair]
    digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:8]
    names = [f"bucc.{args.pair}"] if args.bucc else [Path(file).name for file in files]
    return str(Path(args.output).parent / f"{'-'.join(names)[:150]}.{digest}.embeddings")


def _check_bucc_arguments(args: MiningArguments, files: Sequence[str]) -> None:
    """Raise `UserError` for options that do not fit `--bucc`, and fill in the default protocol."""
    unfit = {
        "two texts": files or None,
        "--score_only": args.score_only or None,
        "--threshold": args.threshold,
        "--min_precision": args.min_precision,
        "--calibrate": args.calibrate,
        "--top_n": args.top_n,
    }
    for name, value in unfit.items():
        if value is not None:
            raise UserError(
                f"--bucc takes no {name}: it mines its own files and finds the threshold"
            )
    if not args.pair:
        raise UserError("--bucc needs --pair, such as --pair fr-en")


def _check_text_arguments(args: MiningArguments, files: Sequence[str]) -> None:
    """Raise `UserError` for options that do not fit two texts, or if two texts are not given."""
    for name in ("pair", "protocol"):
        if getattr(args, name):
            raise UserError(f"--{name} belongs to --bucc")
    if args.score_only and args.retrieval != "max":
        raise UserError(
            f"--retrieval {args.retrieval} is for mining: --score_only scores the given pairs"
        )
    for name in ("min_precision", "calibrate"):
        if args.score_only and getattr(args, name):
            raise UserError(f"--{name} is for mining, without --score_only")
    if args.score_only and args.threshold == "auto":
        raise UserError("--threshold auto is for mining: give --score_only a number or none")
    args.options()  # refuses wrong values before the work
    if len(files) != 2:
        raise UserError(
            f"texts given: {' '.join(files) or 'none'}; name a source text and a target text, or "
            "--bucc"
        )


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Mine translations, score given pairs or evaluate on BUCC, from command-line arguments.

    The pairs and the JSON report are written to files. Vectors are kept in a folder.

    Args:
        argv: arguments of the command. None takes those of this process.

    Returns:
        The report that is also written as JSON. If there are several processes, only the first one
        searches and writes, and the others return an empty report.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    model_args, args, cluster, files = _parse(argv)
    bucc = None
    inputs = list(files)
    if args.bucc:
        bucc = Bucc(args.bucc, args.pair, args.protocol, args.options())
        for split in bucc.splits:
            inputs += [split.source, split.target, split.gold]
    if args.calibrate:
        inputs.append(args.calibrate)
    outputs = {"--output": args.output, "--report_file": args.report_file}
    folders = {"--embeddings_dir": args.embeddings_dir}
    is_main = launched().is_main_process

    with (
        guarded(outputs, folders, inputs, model_args.model_name_or_path, is_main),
        temporary_folder(args.embeddings_dir),
        cluster.connect(),
    ):
        # read the texts
        Path(args.embeddings_dir).mkdir(parents=True, exist_ok=True)
        tasks = bucc.read() if bucc else [read_texts(files, args.score_only)]
        for task in tasks:
            _show(task)

        # encode them
        known_pairs = read_known(args.calibrate)
        started = time.perf_counter()
        encoder = load(model_args, cluster)
        if is_main:
            print(model_args.summary(encoder))
        if cluster.ray:
            print(_ray_summary(encoder, tasks, args.shard_size))
        before = _shards(args.embeddings_dir)
        vectors = encode(encoder, tasks, args, progress=is_main)
        known = encode_known(encoder, known_pairs, args)
        if cluster.ray:
            encoder.end()
        if not is_main:
            return {}
        _print_reused(before, args.embeddings_dir)
        encoded = time.perf_counter()

        # mine
        search = _search_function(args, on_cluster=bool(cluster.ray))
        result = find_pairs(tasks, vectors, args, search, known, bucc)
        searched = time.perf_counter()

        # write the pairs and the report
        write_pairs(result.pairs, tasks[-1], args.output)
        numbers = result.numbers | {
            "seconds_by_part": {
                "encoding": round(encoded - started, 2),
                "search": round(searched - encoded, 2),
            }
        }
        settings = _settings(args, files, tasks)
        seconds = searched - started
        content = model_args.report(encoder, result.protocol, numbers, settings, seconds)
        write_json(content, args.report_file)
    if bucc:
        print(bucc.table(content, Path(content["model"]).name))
    else:
        print(result.summary)
    print(
        f"written to {args.output} and {args.report_file}; vectors are kept in "
        f"{args.embeddings_dir}"
    )
    return content


# From files to vectors


def read_texts(files: Sequence[str], is_parallel: bool) -> MiningTask:
    """Read the two texts of the command line.

    A warning is logged if they hold the same text.

    Args:
        files: names of the source file and the target file.
        is_parallel: whether line i of one text belongs to line i of the other. Then both must have
            the same number of lines.

    Returns:
        The two texts, without gold pairs.
    """
    source_file, target_file = files
    source = _read_side(Path(source_file), read_sentences(source_file))
    target = _read_side(Path(target_file), read_sentences(target_file))
    source_lines = len(source.text.rows)
    target_lines = len(target.text.rows)
    if is_parallel and source_lines != target_lines:
        raise UserError(
            f"{source_file} has {counted(source_lines, 'line')}, {target_file} has {target_lines}: "
            "--score_only pairs them line by line"
        )
    may_be_same = launched().is_main_process and source.text.counts() == target.text.counts()
    if may_be_same and source.text.digest() == target.text.digest():  # a digest reads the text
        logger.warning(
            "%s and %s hold the same text, so each sentence finds itself", source_file, target_file
        )
    return MiningTask(source, target)


def _read_side(path: Path, lines: Iterator[str]) -> TextSide:
    """Return one text as a `TextSide`."""
    side = TextSide(path, DistinctSentences(lines))
    if not len(side.text):
        raise UserError(f"{path}: none of its lines holds a sentence")
    return side


def _show(task: MiningTask) -> None:
    """Print how many lines and sentences each text has, in the first process only."""
    if not launched().is_main_process:
        return
    for side in (task.source, task.target):
        counts = side.text.counts()
        empty = "{empty:,} empty, {repeated:,} repeated".format(**counts)
        lines = counted(counts["lines"], "line")
        print(f"{side.path}: {lines}, {empty}, {counted(counts['distinct'], 'sentence')}")


def _ray_summary(encoder: Encoder, tasks: Sequence[MiningTask], shard_size: int) -> str:
    """Return one line that says how many sentences, shards and encoders the Ray cluster has."""
    sizes = []
    for task in tasks:
        sizes += [len(task.source.text), len(task.target.text)]
    shards = sum(-(-size // shard_size) for size in sizes)
    text = f"{counted(sum(sizes), 'sentence')} in {counted(shards, 'shard')}"
    return f"Ray: {text} on {counted(len(encoder.actors), 'encoder')}"


def encode(
    encoder: Encoder, tasks: Sequence[MiningTask], args: MiningArguments, progress: bool
) -> list[Vectors]:
    """Encode the distinct sentences of all texts. Vectors of an earlier run are read instead.

    Several processes share the work. Only the first one gets the vectors.

    Args:
        encoder: the sentence encoder.
        tasks: pairs of texts.
        args: options with the folder of the vectors, the shard size and the token budget.
        progress: whether to show a progress bar.

    Returns:
        For each task the vectors of its source sentences (N, D) and target sentences (M, D). In
        all processes but the first, they have no rows.
    """
    fingerprint = model_fingerprint(encoder)
    token_budget = tokens_of_a_batch(args.token_budget)
    failed: list[SentenceError] = []

    def encode_side(role: str, side: TextSide) -> np.ndarray | None:
        try:
            return embed_to_disk(
                encoder,
                side.text,
                Path(args.embeddings_dir) / f"{role}.{side.path.name}",
                args.shard_size,
                token_budget,
                progress,
                lambda row: f"{side.path}, line {side.text.first_line[row]}",
                fingerprint,
            )
        except SentenceError as error:
            failed.append(error)
            return None

    vectors = []
    for task in tasks:
        source = encode_side("source", task.source)
        target = encode_side("target", task.target)
        vectors.append((source, target))
    if failed:
        raise joined(failed)
    return vectors


def read_known(path: str | None) -> tuple[list[str], list[str]] | None:
    """Read the known translations of `--calibrate`.

    Args:
        path: a file with lines `source<TAB>target`. None if the option is not given.

    Returns:
        The sources and the targets without repeated pairs, or None if there is no path.
    """
    if path is None:
        return None
    pairs = []
    for number, line in enumerate(read_sentences(path), 1):
        columns = line.split("\t")
        if len(columns) < 2 or is_blank(columns[0]) or is_blank(columns[1]):
            raise UserError(f"--calibrate {path}, line {number}: expected source, tab, target")
        pairs.append((columns[0], columns[1]))
    pairs = list(dict.fromkeys(pairs))
    if len(pairs) < FEWEST_KNOWN:
        raise UserError(
            f"--calibrate {path}: {counted(len(pairs), 'different pair')}, at least "
            f"{FEWEST_KNOWN} are needed"
        )
    return [source for source, _ in pairs], [target for _, target in pairs]


def encode_known(
    encoder: Encoder, sides: tuple[list[str], list[str]] | None, args: MiningArguments
) -> Vectors | None:
    """Encode K known translations. Vectors of an earlier run are read instead.

    Args:
        encoder: the sentence encoder.
        sides: sources and targets of the translations (`read_known`). None if there are none.
        args: options with the folder of the vectors, the shard size and the token budget.

    Returns:
        The vectors of the sources and of the targets, (K, D) each, or None without known
        translations.
    """
    if sides is None:
        return None
    vectors = []
    for name, sentences in zip(("known-source", "known-target"), sides, strict=True):
        folder = Path(args.embeddings_dir) / name
        budget = tokens_of_a_batch(args.token_budget)
        vectors.append(embed_to_disk(encoder, sentences, folder, args.shard_size, budget))
    return vectors[0], vectors[1]


def _shards(folder: str) -> set[tuple[str, int]]:
    """Return (path, time of the last change in ns) of each shard of vectors in a folder."""
    return {(str(path), path.stat().st_mtime_ns) for path in Path(folder).glob("*/*shard*.npy")}


def _print_reused(before: set[tuple[str, int]], folder: str) -> None:
    """Print how many shards of vectors an earlier run had already made. Print nothing if none."""
    after = _shards(folder)
    reused = len(before & after)
    if reused:
        shards = counted(len(after), "shard")
        print(f"vectors of an earlier run reused: {reused} of {shards} in {folder}")


# From vectors to pairs


def _search_function(args: MiningArguments, on_cluster: bool) -> Search:
    """Return the function that searches for nearest neighbours, given source, target and k.

    With a Ray cluster it searches there, also if there is an `--index`. Otherwise it searches in
    this process, with the faiss index of `--index` or exactly.
    """
    if on_cluster:
        return partial(cluster_neighbours, index=args.index, progress=True)
    if args.index:
        return partial(approximate_neighbours, index=args.index, progress=True)
    return partial(mutual_neighbours, progress=True)


def find_pairs(
    tasks: Sequence[MiningTask],
    vectors: Sequence[Vectors],
    args: MiningArguments,
    search: Search,
    known: Vectors | None = None,
    bucc: Bucc | None = None,
) -> MiningResult:
    """Mine two texts, score given pairs, or evaluate on BUCC, as the options say.

    Args:
        tasks: one pair of texts, or the splits of BUCC.
        vectors: for each of them, the vectors of its distinct sentences, (N, D) and (M, D).
        args: options of mining. `bucc` and `score_only` decide what is done.
        search: function that finds nearest neighbours.
        known: vectors of K known translations, (K, D) each, which calibrate the threshold. None if
            there are none. Only mining uses them.
        bucc: the evaluation on BUCC. None if two texts are mined.

    Returns:
        The pairs to write, and the numbers for the report.
    """
    if bucc:
        return evaluate_bucc(bucc, tasks, vectors, args, search)
    if args.score_only:
        return score_texts(tasks[0], vectors[0], args, search)
    return mine_texts(tasks[0], vectors[0], args, search, known)


def mine_texts(
    task: MiningTask,
    vectors: Vectors,
    args: MiningArguments,
    search: Search,
    known: Vectors | None = None,
) -> MiningResult:
    """Mine the pairs of sentences that are translations, and print how the threshold was chosen.

    Args:
        task: the two texts.
        vectors: vectors of their distinct sentences, (N, D) and (M, D).
        args: options of mining.
        search: function that finds nearest neighbours.
        known: vectors of K known translations, (K, D) each, which calibrate the threshold. None if
            there are none.

    Returns:
        The pairs that score at least the threshold, best first, as pairs of lines, at most
        `--top_n`. And the numbers for the report.
    """
    neighbours, rows, choice = mine_vectors(vectors, args.options(), search, known)
    recall = _recall(neighbours, vectors, args)
    candidates = task.first_lines(rows)
    kept = select(candidates, choice.threshold, args.top_n)
    kept = require_some(kept, candidates, choice)
    numbers = _numbers(task, recall, candidates, kept)
    numbers["threshold_choice"] = report_of(choice)
    amount = f"{counted(len(kept), 'pair')} kept of {counted(len(candidates), 'candidate')}"
    summary = f"{amount}: {_in_words(choice)}"
    if choice.table:
        summary += f"\n{table_text(choice)}"
    return MiningResult(MINING, numbers, kept, summary)


def _in_words(choice: Choice) -> str:
    """Return a sentence on how the threshold was chosen, with the estimated precision if known.

    What `choice` remarks on the estimate is the end of the sentence.
    """
    text = choice.note
    if choice.precision is not None:
        text += f", estimated precision {100 * choice.precision:.0f}%"
    if choice.remark:
        text += f"; {choice.remark}"
    return text


def score_texts(
    task: MiningTask, vectors: Vectors, args: MiningArguments, search: Search
) -> MiningResult:
    """Score each pair of lines with the same number by its margin, and keep the best pairs.

    Args:
        task: two texts with the same number of lines.
        vectors: vectors of their distinct sentences, (N, D) and (M, D).
        args: options of mining. Without `--threshold` and `--top_n` all pairs are kept.
        search: function that finds nearest neighbours, with which the margin compares.

    Returns:
        The kept pairs of lines, in the order of the texts, and the numbers for the report. Lines
        that are empty on one side are left out.
    """
    neighbours = neighbourhoods(*vectors, args.k, search)
    recall = _recall(neighbours, vectors, args)
    given = task.score_line_by_line(*vectors, neighbours, args.margin)
    threshold = args.options().threshold
    kept = select(given, None if threshold == "none" else threshold, args.top_n)
    if not len(kept) and len(given):
        raise UserError(
            f"--threshold {threshold}: no pair scores so high, the best has "
            f"{float(given.scores.max()):.6f}; give a lower one"
        )
    summary = f"{counted(len(kept), 'pair')} kept of {len(given):,} given ones"
    return MiningResult(SCORING, _numbers(task, recall, given, kept), kept, summary)


def evaluate_bucc(
    bucc: Bucc,
    splits: Sequence[MiningTask],
    vectors: Sequence[Vectors],
    args: MiningArguments,
    search: Search,
) -> MiningResult:
    """Mine the splits of BUCC, and evaluate the last one against its gold pairs.

    The threshold is the one with the best F1 on the first split.

    Args:
        bucc: the evaluation.
        splits: one split, or the split for the threshold and the split to evaluate.
        vectors: for each split, the vectors of its distinct sentences, (N, D) and (M, D).
        args: options of mining.
        search: function that finds nearest neighbours.

    Returns:
        The scores of the splits for the report, and the pairs of the last split that reach the
        threshold, as pairs of lines.
    """
    mined = []
    for split_vectors in vectors:
        neighbours = neighbourhoods(*split_vectors, args.k, search)
        recall = _recall(neighbours, split_vectors, args)
        mined.append(candidate_pairs(neighbours, args.margin, args.retrieval))
    scores, kept = bucc.score(splits, mined)
    numbers = _numbers(splits[-1], recall, mined[-1], kept) | scores
    return MiningResult(f"BUCC {bucc.protocol}: {bucc.meaning}", numbers, kept)


def _recall(neighbours: Neighbours, vectors: Vectors, args: MiningArguments) -> float | None:
    """Measure the recall of an approximate search on a sample of the sentences, and print it.

    Args:
        vectors: the vectors that were searched, (N, D) and (M, D).

    Returns:
        Share of the true nearest neighbours that were found, 0 to 1. None after an exact search.
    """
    if args.index is None:
        return None
    recall = recall_at_k(neighbours, *vectors)
    k = neighbours.forward_indices.shape[1]
    print(f"{args.index}: recall@{k} {recall:.4f} of the exact search, on a sample")
    return recall


# The report


def _numbers(
    task: MiningTask, recall: float | None, candidates: MinedPairs, kept: MinedPairs
) -> dict[str, Any]:
    """Return the counts of lines, sentences and pairs, and the recall, for the report."""
    return {
        "source": task.source.counts(),
        "target": task.target.counts(),
        "recall_at_k": recall,
        "candidates": len(candidates),
        "kept": len(kept),
    }


def _settings(
    args: MiningArguments, files: Sequence[str], tasks: Sequence[MiningTask]
) -> dict[str, Any]:
    """Return the options and a hash of the text, name -> value, for the report."""
    settings = {}
    for name in ("margin", "k", "index", "top_n"):
        settings[name] = getattr(args, name)
    if not args.bucc:
        options = args.options()
        settings["threshold"] = None if options.threshold == "none" else options.threshold
        if args.min_precision is not None:
            settings["min_precision"] = args.min_precision
    if args.bucc:
        settings |= {"bucc": public_name(args.bucc), "pair": args.pair}
    else:
        settings["data"] = [public_name(path) for path in files]
    digests = "".join(task.digest() for task in tasks)
    settings["text"] = hashlib.sha256(digests.encode()).hexdigest()[:12]
    if not args.score_only:
        settings["retrieval"] = args.retrieval
    return settings


main = command(run)


if __name__ == "__main__":
    main()
