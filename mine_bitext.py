"""Mine translations out of two texts, score given pairs, or measure mining on BUCC.

    python mine_bitext.py wiki.fr wiki.en --model out --threshold 1.06 --output pairs.tsv
    python mine_bitext.py news.fr news.en --model out --score_only --output scores.tsv
    python mine_bitext.py --bucc bucc2018/ --pair fr-en --model out --output fr-en.tsv

Texts have a sentence a line (`.gz` and `.xz` too). The output has the columns score, source, target and the numbers of
both lines, from 1: best pairs first, with `--score_only` in the order of the text. A repeated sentence is mined once,
under its first line. Sentence vectors are kept in shards in `OUTPUT.embeddings`: the same command goes on where it was
stopped, and `accelerate launch` shares the encoding among processes; `--ray` has a cluster encode and search.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dap.arguments import ArgumentParser, arg, require_least
from dap.commands import command, guarded
from dap.encoding import (
    SHARD_SIZE,
    Encoder,
    EncoderArguments,
    SentenceError,
    embed_to_disk,
    launched,
    model_fingerprint,
    tokens_of_a_batch,
)
from dap.errors import UserError, joined
from dap.file_io import write_json
from dap.mining import (
    MARGINS,
    PROTOCOLS,
    RETRIEVALS,
    DistinctSentences,
    MiningScore,
    Pairs,
    Side,
    Split,
    Texts,
    default_protocol,
    find_splits,
    mine,
    neighbourhoods,
    read_gold,
    read_text,
    score_splits,
    select,
    write_pairs,
)
from dap.ray.connection import ClusterArguments
from dap.ray.ray_encoder import load_on
from dap.ray.ray_search import cluster_neighbours
from dap.reports import paper_beside
from dap.search import Neighbours, Search, approximate_neighbours, mutual_neighbours, recall_at_k
from dap.text import read_sentences

MINING = "bitext mining by margin over nearest neighbours"
SCORING = "margin of given pairs over nearest neighbours"
USAGE = """%(prog)s SOURCE TARGET --model MODEL --output FILE [options]
       %(prog)s --bucc FOLDER --pair fr-en --model MODEL [options]
The two texts come first, side by side; what is below names the options."""


@dataclass
class MiningArguments:
    """What to mine, how, and where it goes."""

    output: str | None = arg(
        None, "File of the pairs, .gz and .xz too. For BUCC the default is bucc.PAIR.tsv."
    )
    score_only: bool = arg(
        False,
        "Score line i of one file with line i of the other, instead of mining. Follows the texts.",
    )
    bucc: str | None = arg(None, "Folder of BUCC's files; takes the place of two texts.")
    pair: str | None = arg(None, "Languages for --bucc, such as fr-en.")
    protocol: str | None = arg(
        None, "BUCC's protocol. Default: training-optimal where there is a training split, else sample.",
        choices=PROTOCOLS
    )  # fmt: skip
    margin: str = arg("ratio", "How a pair is scored.", choices=MARGINS)
    retrieval: str = arg(
        "max",
        "Whose nearest sentences are candidates; 'max': both sides', no sentence twice.",
        choices=RETRIEVALS,
    )
    k: int = arg(4, "Neighbours of a sentence.")
    threshold: float | None = arg(None, "Lowest score of a pair. Default: none.")
    top_n: int | None = arg(None, "Number of the best pairs to keep. Default: all.")
    index: str | None = arg(
        None, "Approximate search by a faiss index such as IVF4096,PQ64. Default: exact search."
    )
    embeddings_dir: str | None = arg(
        None, "Folder that keeps the vectors. Default: OUTPUT.embeddings."
    )
    shard_size: int = arg(SHARD_SIZE, "Sentences of a shard: a kill loses one a process.")
    token_budget: int | None = arg(
        None, "Most tokens a batch. Default: 4096, on CUDA 32768. Results do not depend on it."
    )
    report_file: str | None = arg(None, "JSON report. Default: OUTPUT.json.")

    def __post_init__(self) -> None:
        require_least(self, k=1, top_n=1, shard_size=1, token_budget=1)
        self.output = self.output or (self.bucc and f"bucc.{self.pair}.tsv")
        if not self.output:
            raise UserError("--output is missing: name the file for the pairs")
        if self.output.endswith((".bz2", ".zst", ".lz4", ".7z", ".zip")):
            raise UserError(
                f"--output {self.output}: pairs are packed by .gz or .xz alone: end it so, or in .tsv"
            )
        self.report_file = self.report_file or f"{self.output}.json"
        self.embeddings_dir = self.embeddings_dir or f"{self.output}.embeddings"


def _parse(
    argv: Sequence[str] | None,
) -> tuple[EncoderArguments, MiningArguments, ClusterArguments, list[str]]:
    types = (EncoderArguments, MiningArguments, ClusterArguments)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0], usage=USAGE)
    parser.add_argument(
        "files",
        nargs="*",
        help="source text and target text, a sentence a line, before all options",
    )
    *found, positional, rest = parser.parse_args_into_dataclasses(
        args=argv, return_remaining_strings=True
    )
    if rest:
        raise UserError(
            f"{' '.join(rest)}: no such option, or a text in the wrong place; the two texts come first, side by side"
        )
    model_args, args, cluster = found
    _check(args, positional.files)
    return model_args, args, cluster, positional.files


def _check(args: MiningArguments, files: Sequence[str]) -> None:
    if args.bucc:
        unfit = {"two texts": files or None, "--score_only": args.score_only or None}
        unfit |= {"--threshold": args.threshold, "--top_n": args.top_n}
        for name, value in unfit.items():
            if value is not None:
                raise UserError(
                    f"--bucc takes no {name}: it mines its own files and finds the threshold"
                )
        if not args.pair:
            raise UserError("--bucc needs --pair, such as --pair fr-en")
        args.protocol = args.protocol or default_protocol(args.bucc, args.pair)
    elif args.pair or args.protocol:
        raise UserError(f"--{'pair' if args.pair else 'protocol'} belongs to --bucc")
    elif args.score_only and args.retrieval != "max":
        raise UserError(
            f"--retrieval {args.retrieval} is for mining: --score_only takes the pairs as they are"
        )
    elif len(files) != 2:
        raise UserError(
            f"texts given: {' '.join(files) or 'none'}; name a source text and a target text, or --bucc"
        )


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Mines as the command line `argv` says (None: the process's own); returns the report that it writes.

    Of several processes only the first searches and writes; the others return an empty report.

    Raises:
        UserError: arguments or data that do not fit, or a model that cannot be loaded.
        OSError: no such file, or no room on the disk.
    """
    model_args, args, cluster, files = _parse(argv)
    splits = find_splits(args.bucc, args.pair, args.protocol) if args.bucc else []
    is_main = launched().is_main_process
    inputs = [
        path for split in splits for path in (split.source, split.target, split.gold)
    ] or files
    outputs = {"--output": args.output, "--report_file": args.report_file}
    folders = {"--embeddings_dir": args.embeddings_dir}
    with (
        guarded(outputs, folders, inputs, model_args.model_name_or_path, is_main),
        cluster.connect(),
    ):
        texts = [read_split(args, split) for split in splits] or [read_texts(args, files)]
        started = time.perf_counter()
        encoder = load_on(cluster, model_args)
        if cluster.ray:
            print(_ray_summary(encoder, texts, args))
        encode(encoder, texts, args, is_main)
        if cluster.ray:
            encoder.end()
        if not is_main:
            return {}
        encoded = time.perf_counter()
        search = (
            partial(approximate_neighbours, index=args.index) if args.index else mutual_neighbours
        )
        search = (
            partial(cluster_neighbours, index=args.index, folder=args.embeddings_dir)
            if cluster.ray
            else search
        )
        search = partial(search, progress=is_main)
        protocol, numbers, pairs = (evaluate_bucc if args.bucc else mine_texts)(texts, args, search)
        seconds = {
            "encoding": round(encoded - started, 2),
            "search": round(time.perf_counter() - encoded, 2),
        }
        write_pairs(pairs, texts[-1], args.output)
        data = {"bucc": args.bucc, "pair": args.pair} if args.bucc else {"data": files}
        data["text"] = hashlib.sha256(
            "".join(each.digest() for each in texts).encode()
        ).hexdigest()[:12]
        settings = {
            key: getattr(args, key) for key in ("margin", "k", "index", "threshold", "top_n")
        } | data
        if not args.score_only:
            settings["retrieval"] = args.retrieval
        numbers |= {"seconds_by_part": seconds}
        content = model_args.report(encoder, protocol, numbers, settings, sum(seconds.values()))
        if args.bucc:
            print(_bucc_table(args, content))
        write_json(content, args.report_file)
    print(
        f"written to {args.output} and {args.report_file}; vectors are kept in {args.embeddings_dir}"
    )
    return content


# From files to vectors


def read_texts(args: MiningArguments, files: Sequence[str]) -> Texts:
    """The two texts of the command line.

    Raises:
        UserError: invalid UTF-8, no sentences, or with `--score_only` unequal numbers of lines.
    """
    source, target = (_read(Path(path), read_sentences(path), args) for path in files)
    lines = len(source.text.rows), len(target.text.rows)
    if args.score_only and lines[0] != lines[1]:
        raise UserError(
            f"{files[0]} has {lines[0]} lines, {files[1]} has {lines[1]}: --score_only pairs them line by line"
        )
    return Texts(source, target, folder=args.embeddings_dir)


def read_split(args: MiningArguments, split: Split) -> Texts:
    """The texts of a split of BUCC, and its gold; raises `UserError` for a fault in the files, named by its line."""
    source_ids: dict[str, int] = {}
    target_ids: dict[str, int] = {}
    source = _read(split.source, read_text(split.source, source_ids), args)
    target = _read(split.target, read_text(split.target, target_ids), args)
    return Texts(source, target, read_gold(split, source_ids, target_ids), args.embeddings_dir)


def _read(path: Path, lines: Iterator[str], args: MiningArguments) -> Side:
    folder = Path(args.embeddings_dir)
    folder.mkdir(parents=True, exist_ok=True)
    side = Side(path, DistinctSentences(lines, folder))
    if launched().is_main_process:
        counts = "{lines} lines, {empty} empty, {repeated} repeated, {distinct} sentences"
        print(f"{path}: {counts.format(**side.text.counts())}")
    if not len(side.text):
        raise UserError(f"{path}: {len(side.text.rows)} lines, and none of them holds a sentence")
    return side


def _ray_summary(encoder: Encoder, all_texts: Sequence[Texts], args: MiningArguments) -> str:
    """Return one line that says how the cluster shares the encoding."""
    texts = [side.text for each in all_texts for side in (each.source, each.target)]
    sentences = sum(map(len, texts))
    shards = sum(-(-len(text) // args.shard_size) for text in texts)
    return f"Ray: {sentences:,} sentences in {shards:,} shards on {len(encoder.actors)} encoders"


def encode(
    encoder: Encoder, all_texts: Sequence[Texts], args: MiningArguments, progress: bool
) -> None:
    """Fills in the vectors of every side: processes share the work, and the first gets them."""
    fingerprint, failed = model_fingerprint(encoder), []
    for role, side in (
        (role, getattr(texts, role)) for texts in all_texts for role in ("source", "target")
    ):
        try:
            side.vectors = embed_to_disk(
                encoder,
                side.text,
                Path(args.embeddings_dir) / f"{role}.{side.path.name}",
                args.shard_size,
                tokens_of_a_batch(args.token_budget),
                progress,
                lambda row, side=side: f"{side.path}, line {side.text.first_line[row]}",
                fingerprint,
            )
        except SentenceError as error:
            failed.append(error)
    if failed:
        raise joined(failed)


# From vectors to pairs


def mine_texts(
    all_texts: Sequence[Texts], args: MiningArguments, search: Search
) -> tuple[str, dict[str, Any], Pairs]:
    """Mines, or scores line by line: the protocol's name, the numbers for the report, and pairs of lines to write."""
    (texts,) = all_texts
    neighbours, recall = _search(texts, args, search)
    if args.score_only:
        found = texts.same_lines(neighbours, args.margin)
    else:
        found = texts.first_lines(mine(neighbours, args.margin, args.retrieval, texts.folder))
    kept = select(found, args.threshold, args.top_n, texts.folder)
    print(
        f"{len(kept)} pairs kept of {len(found)} {'given ones' if args.score_only else 'candidates'}"
    )
    return SCORING if args.score_only else MINING, _numbers(texts, recall, found, kept), kept


def evaluate_bucc(
    splits: Sequence[Texts], args: MiningArguments, search: Search
) -> tuple[str, dict[str, Any], Pairs]:
    """Mines each split and finds the threshold on the first; as `mine_texts`, with the last one's pairs above it."""
    searched = [_search(texts, args, search) for texts in splits]
    mined = [mine(neighbours, args.margin, args.retrieval) for neighbours, _ in searched]
    scores = score_splits(mined, splits)
    kept = splits[-1].first_lines(select(mined[-1], scores[0].threshold))
    numbers = _numbers(splits[-1], searched[-1][1], mined[-1], kept) | {
        "pairs": {args.pair: _rounded(scores[-1])}
    }
    if len(scores) > 1:
        numbers["threshold_split"] = {args.pair: _rounded(scores[0])}
    return f"BUCC {args.protocol}: {PROTOCOLS[args.protocol][0]}", numbers, kept


def _numbers(texts: Texts, recall: float | None, found: Pairs, kept: Pairs) -> dict[str, Any]:
    sides = {"source": texts.source.counts(), "target": texts.target.counts()}
    return sides | {"recall_at_k": recall, "candidates": len(found), "kept": len(kept)}


def _bucc_table(args: MiningArguments, content: dict[str, Any]) -> str:
    """Protocol and numbers, beside the paper's where that has the protocol and the pair."""
    text = "BUCC {}, {}: precision {precision:.2f}, recall {recall:.2f}, F1 {f1:.2f} at threshold {threshold:.6f} "
    text += "({extracted} pairs of ids extracted, {correct} of {gold} true ones)"
    text = text.format(args.protocol, args.pair, **content["pairs"][args.pair])
    return "\n\n".join(filter(None, [text, paper_beside(content)]))


def _rounded(score: MiningScore) -> dict[str, float]:
    percent = {name: round(getattr(score, name), 4) for name in ("precision", "recall", "f1")}
    return asdict(score) | percent


def _search(texts: Texts, args: MiningArguments, search: Search) -> tuple[Neighbours, float | None]:
    """Neighbours in both directions and, for an approximate search, its recall at k on a sample."""
    source, target = texts.source.vectors, texts.target.vectors
    found = neighbourhoods(source, target, args.k, search)
    if args.index is None:
        return found, None
    recall = recall_at_k(found, source, target)
    print(
        f"{args.index}: recall@{found.forward_indices.shape[1]} {recall:.4f} of the exact search, on a sample"
    )
    return found, recall


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `run`."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    run(argv)
    launched().destroy_process_group()


if __name__ == "__main__":
    main()
