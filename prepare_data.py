"""Make training pairs out of raw parallel text: clean, without duplicates and leaks, sampled, as parquet shards.

    python prepare_data.py --data raw/ --evaluation_data tatoeba/ --output_dir corpus
    python prepare_data.py --opus all --languages de fr sw --download_dir raw --output_dir corpus

Then: `train_dap.py --train_data corpus/train --validation_data corpus/dev`. A run that was stopped, even killed, goes
on behind the blocks and languages that were finished when the same command is given again; when it failed over a file
or an argument, the corrected one goes on with the files that are unchanged.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dap.arguments import ArgumentParser
from dap.commands import command
from dap.errors import UserError
from dap.languages import TATOEBA_36
from dap.prepare import (
    CARD,
    INFO,
    REPORT,
    VOCABULARY,
    WORK,
    CleaningOptions,
    LeakIndex,
    Plan,
    Source,
    base_code,
    begin,
    check_free,
    claimed,
    counts_table,
    data_card,
    dataset_info,
    finished,
    full_device,
    identified,
    load_identifier,
    load_tokenizer,
    new_folder,
    prepare,
    read_evaluation,
    read_object,
    special_ids,
    vocabulary_size,
)
from dap.reports import versions, write_json
from dap.text import BitextFile, disk_path, find_bitext

logger = logging.getLogger(__name__)

VERSION = 3  # of the result; another one does not go on with a run of this


@dataclass
class DataArguments:
    """What to prepare, and where it goes."""

    output_dir: str = field(metadata={"help": "Folder to write train/, dev/, README.md and report.json into."})
    data: list[str] = field(
        default_factory=list, metadata={"help": "Files, folders or a Hub dataset id, as train_dap.py takes them."}
    )
    opus: list[str] = field(
        default_factory=list,
        metadata={"help": "Corpora to fetch from OPUS, such as 'Europarl CCMatrix'; 'all' are the paper's six."},
    )
    languages: list[str] = field(
        default_factory=list, metadata={"help": "Source languages. Default: all that there are (OPUS: the 36)."}
    )
    download_dir: str = field(default="raw", metadata={"help": "Folder for what is fetched from OPUS."})
    mirror: str | None = field(default=None, metadata={"help": "Base address of a copy of OPUS' file store."})
    target_language: str = field(default="en", metadata={"help": "Language code of the target side."})
    max_bad_lines: float = field(default=0.001, metadata={"help": "Share of malformed lines a file may have."})
    licences: str | None = field(
        default=None, metadata={"help": "JSON file for the data card: origin (file name) -> licence."}
    )
    evaluation_data: list[str] = field(
        default_factory=list,
        metadata={"help": "Evaluation sets: parallel text, or plain text, one sentence a line or several with tabs."},
    )
    leak_threshold: float = field(
        default=0.7,
        metadata={
            "help": "Share of character n-grams from which texts are near; 0: equal ones alone. With a word replaced, "
            "0.7 finds 6 of 10 of Tatoeba's English sentences, and 4 of 10 of the shorter Russian and Hindi ones."
        },
    )
    list_leaks: str | None = field(default=None, metadata={"help": "JSONL file to list the leaks in."})
    max_pairs: int = field(default=1_000_000, metadata={"help": "Most pairs a language, drawn at random; 0: all."})
    dev_pairs: int = field(default=10_000, metadata={"help": "Dev pairs a language, at most a tenth; 0: none."})
    seed: int = field(default=0, metadata={"help": "Of the sample and the dev sets."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Count its tokens in the filters, as the paper does. Default: words."}
    )
    target_vocabulary: str | None = field(
        default=None, metadata={"help": "Tokenizer whose ids of the English training side to write as JSON."}
    )
    language_identifier: str | None = field(
        default=None,
        metadata={
            "help": "module:function that tells the language codes of a list of texts; for languages beyond the 36, "
            "as the file names have them (sr or srp)."
        },
    )
    shard_size: int = field(default=1_000_000, metadata={"help": "Most pairs of a parquet file."})
    num_workers: int = field(
        default=1,
        metadata={
            "help": "Processes; the result does not depend on it. They share a large file too, but a compressed one."
        },
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Replace what a finished or another run left in output_dir."}
    )

    def __post_init__(self) -> None:
        if not self.data and not self.opus:
            raise UserError("there is no text to prepare: give --data, --opus or both")
        for name, least in (("num_workers", 1), ("shard_size", 1), ("max_pairs", 0), ("dev_pairs", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} {getattr(self, name)} must be at least {least}")
        if not 0.0 <= self.leak_threshold <= 1.0:
            raise UserError(f"--leak_threshold {self.leak_threshold} is a share of n-grams, 0 to 1")
        self.target_language = base_code(self.target_language)
        self._check_output()

    def _check_output(self) -> None:
        """What is read may not lie where --overwrite would delete it."""
        output = Path(self.output_dir).resolve()
        if output.exists() and not output.is_dir():
            raise UserError(f"--output_dir {self.output_dir} is a file; give a folder")
        for name in ("data", "evaluation_data", "licences", "list_leaks", "tokenizer", "target_vocabulary"):
            given = getattr(self, name)
            for path in given if isinstance(given, list) else filter(None, [given]):
                if name == "list_leaks" or os.path.exists(os.path.expanduser(path)):
                    self._check_outside(name, path, output)
        if self.opus:
            self._check_outside("download_dir", self.download_dir, output)

    def _check_outside(self, name: str, path: str, output: Path) -> None:
        if Path(path).expanduser().resolve().is_relative_to(output):
            raise UserError(f"--{name} {path} lies in --output_dir {self.output_dir}: give another folder for one")


def find_sources(args: DataArguments) -> tuple[list[Source], dict[str, str]]:
    """The input files, numbered by language and place, and the licence of each known origin.

    Raises:
        ValueError, FileNotFoundError: as `find_bitext` and `fetch`; a language asked for that has no file.
    """
    fetched, licences = fetch_opus(args) if args.opus else ({}, {})
    found = find_bitext([*args.data, *fetched], args.target_language)
    wanted = [base_code(code) for code in args.languages] or list(found)
    if absent := [code for code in wanted if code not in found]:
        raise UserError(f"--languages {' '.join(absent)}: there is text in {' '.join(found)} only")
    files = [file for language in sorted(set(wanted)) for file in found[language]]
    files = [replace(file, streaming=True) if file.format == "hub" else file for file in files]
    sources = [Source(number, file, origin_of(file, fetched)) for number, file in enumerate(files)]
    return sources, licences | (read_licences(args.licences) if args.licences else {})


def read_licences(path: str) -> dict[str, str]:
    """Origin -> licence, of a JSON file."""
    content = read_object(Path(path))
    if odd := [origin for origin, licence in content.items() if not isinstance(licence, str)]:
        raise UserError(f"{path}: the licence of {odd[0]!r} is {content[odd[0]]!r}; give a text")
    return content


def fetch_opus(args: DataArguments) -> tuple[dict[str, str], dict[str, str]]:
    """Downloads what OPUS has: path -> origin, and origin -> licence."""
    from dap.prepare import CORPORA, fetch, find_files
    from dap.prepare import licences as opus_licences

    names = [name for given in args.opus for name in given.split(",")]
    corpora = list(CORPORA) if names == ["all"] else names
    files, absent = find_files(args.languages or TATOEBA_36, corpora, mirror=args.mirror)
    for file in absent:
        logger.info("OPUS has no %s", file)
    paths, _ = fetch(files, args.download_dir, progress=True)
    origins = {str(path): f"{file.corpus.name} {file.corpus.version}" for file, path in paths.items()}
    if not origins:
        raise UserError(f"--opus {' '.join(args.opus)}: none of the {len(files) + len(absent)} files is there")
    return origins, opus_licences(paths)


def origin_of(file: BitextFile, fetched: dict[str, str]) -> str:
    """OPUS' corpus, the id of a Hub dataset, or the file's name."""
    if file.format == "hub":
        return str(file)
    path = os.path.abspath(file.paths[0])
    known = (origin for start, origin in fetched.items() if path.startswith(os.path.abspath(start)))
    return next(known, Path(path).name)


def make_plan(args: DataArguments, cleaning: CleaningOptions) -> Plan:
    output = Path(args.output_dir)
    same = ("target_language", "dev_pairs", "seed", "shard_size", "max_bad_lines", "tokenizer", "target_vocabulary")
    return Plan(
        output_dir=output,
        work_dir=output / WORK,
        cleaning=cleaning,
        max_pairs=args.max_pairs or None,
        check_leaks=bool(args.evaluation_data),
        list_leaks=args.list_leaks is not None,
        language_identifier=args.language_identifier,
        **{name: getattr(args, name) for name in same},
    )


def fingerprint(settings: dict[str, Any], sources: Sequence[Source], evaluation: Sequence[str]) -> str:
    """Changes with every setting that shapes the result and with the input files' paths, sizes and times."""
    files = [(source.origin, source.file.paths, [_state(path) for path in source.file.paths]) for source in sources]
    return _digest(settings, files, [[path, _state(path)] for path in evaluation])


def with_keys(
    sources: Sequence[Source], settings: dict[str, Any], cleaning: CleaningOptions, evaluation: Sequence[str]
) -> list[Source]:
    """The sources, each with a key that changes with its file and what shapes its cleaning, and with no other file."""
    names = ("target_language", "max_bad_lines", "leak_threshold", "list_leaks", "max_pairs", "seed", "tokenizer",
             "language_identifier")  # fmt: skip
    shaping = {name: settings[name] for name in names} | asdict(cleaning)
    check = [[path, _state(path)] for path in evaluation]
    states = [[_state(path) for path in source.file.paths] for source in sources]
    keys = [
        _digest(shaping, check, asdict(source.file), source.origin, state) for source, state in zip(sources, states)
    ]
    return [replace(source, key=key) for source, key in zip(sources, keys)]


def _digest(*content: Any) -> str:
    whole = json.dumps([VERSION, version("polars"), *content], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _state(path: str) -> Any:
    path = str(disk_path(path))
    if os.path.isdir(path):
        return [(name, _state(os.path.join(path, name))) for name in sorted(os.listdir(path))]
    return (os.path.getsize(path), os.stat(path).st_mtime_ns) if os.path.exists(path) else None


def evaluation_sentences(args: DataArguments) -> list[str]:
    sentences = read_evaluation(args.evaluation_data)
    if args.evaluation_data and not sentences:
        raise UserError(f"--evaluation_data {' '.join(args.evaluation_data)} holds no sentence")
    return sentences


def index_leaks(plan: Plan, sentences: Sequence[str], threshold: float) -> None:
    """Writes the index of the evaluation sentences, unless it is there."""
    folder = plan.work_dir / "leaks"
    if sentences and not folder.exists():
        with new_folder(folder) as new:
            LeakIndex(sentences, threshold or None).save(new)


def write_leaks(plan: Plan, sources: Sequence[Source], path: Path) -> None:
    """All leaks in one JSONL file, in the order of the input."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        for source in sources:
            for part in plan.parts(source):
                if (found := plan.cleaned(part) / "leaks.jsonl").is_file():
                    with found.open("rb") as lines:
                        shutil.copyfileobj(lines, target)


def write_vocabulary(plan: Plan, languages: Sequence[str]) -> None:
    """`target_vocabulary.json`: ids on the English training side, special tokens but SEP left out.

    These are what `dap.training.model.target_vocabulary` finds when no sentence is cut, and what `train_dap.py`
    restricts the softmax of RTL to.
    """
    seen = np.any([np.load(plan.written(language) / "vocabulary.npy") for language in languages], axis=0)  # (V,)
    seen[special_ids(plan.target_vocabulary)] = False
    content = {"tokenizer": plan.target_vocabulary, "vocab_size": len(seen)}
    write_json(content | {"target_token_ids": np.flatnonzero(seen).tolist()}, plan.output_dir / VOCABULARY)


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Prepares as the command line `argv` says (None: the process's own); returns the report that it writes.

    Raises:
        ValueError: arguments or text that do not fit, a folder of another run, or no space left on the device.
        FileNotFoundError: no such file or folder.
    """
    args, cleaning = ArgumentParser((DataArguments, CleaningOptions)).parse_args_into_dataclasses(args=argv)
    with full_device(args.output_dir), claimed(Path(args.output_dir)):
        return _run(args, cleaning)


def _run(args: DataArguments, cleaning: CleaningOptions) -> dict[str, Any]:
    started = time.perf_counter()
    sources, licences = find_sources(args)
    plan, settings = make_plan(args, cleaning), shaping(args, cleaning)
    mark = fingerprint(settings, sources, args.evaluation_data)
    if not args.overwrite and (ended := finished(plan, mark)):
        return again(plan, args, ended, licences)
    check_free(plan, mark, args.overwrite)
    sentences = check_names(args)
    sources = with_keys(sources, settings, cleaning, args.evaluation_data)
    begin(plan, sources, mark)
    index_leaks(plan, sentences, args.leak_threshold)
    languages = prepare(plan, sources, args.num_workers)
    if empty := [code for code, counts in languages.items() if not counts["train"]]:
        logger.warning("%s: nothing is left to train on; the table tells why", " ".join(empty))
    seconds = time.perf_counter() - started
    report = {"fingerprint": mark, "languages": languages, "settings": settings, "licences": licences}
    report |= {"evaluation_sentences": len(sentences), "leaks": args.list_leaks, "num_workers": args.num_workers}
    finish(plan, args, sources, report | {"seconds": round(seconds, 1), "versions": versions()})
    print(f"{counts_table(languages)}\n\nwritten to {args.output_dir} in {seconds:.0f} s")
    return read_object(plan.output_dir / REPORT)


def check_names(args: DataArguments) -> list[str]:
    """Loads what the arguments name, so that a wrong one is found before anything is written.

    Returns:
        The evaluation sentences.
    """
    if args.tokenizer:
        load_tokenizer(args.tokenizer)
    if args.target_vocabulary:
        vocabulary_size(args.target_vocabulary)
    if args.language_identifier:
        identified(load_identifier(args.language_identifier), ["One sentence."])
    return evaluation_sentences(args)


def again(plan: Plan, args: DataArguments, ended: dict[str, Any], licences: dict[str, str]) -> dict[str, Any]:
    """The report of a finished run, with the licences as they are now.

    Raises:
        ValueError: the leaks were not listed where they are asked for now.
    """
    leaks = args.list_leaks
    if leaks and (os.path.abspath(leaks) != os.path.abspath(ended["leaks"]) or not os.path.isfile(leaks)):
        raise UserError(
            f"--list_leaks {leaks}: {plan.output_dir} is finished and its leaks were listed in {ended['leaks']}; "
            "copy that file, or give --overwrite to make all again"
        )
    if ended["licences"] != licences:
        ended["licences"] = licences
        describe(plan, ended)
    shutil.rmtree(plan.work_dir, ignore_errors=True)  # a kill may have left it
    print(f"{counts_table(ended['languages'])}\n\n{args.output_dir} holds this already")
    return ended


def shaping(args: DataArguments, cleaning: CleaningOptions) -> dict[str, Any]:
    """The arguments that shape the result, for the report and the card."""
    elsewhere = ("output_dir", "num_workers", "overwrite", "list_leaks", "licences", "download_dir", "mirror")
    named = {name: value for name, value in asdict(args).items() if name not in elsewhere}
    return named | asdict(cleaning) | {"list_leaks": args.list_leaks is not None}


def finish(plan: Plan, args: DataArguments, sources: Sequence[Source], report: dict[str, Any]) -> None:
    """What describes the shards; the report comes last and marks the end."""
    if args.list_leaks:
        write_leaks(plan, sources, Path(args.list_leaks))
    if args.target_vocabulary:
        write_vocabulary(plan, list(report["languages"]))
    describe(plan, report)
    shutil.rmtree(plan.work_dir)


def describe(plan: Plan, report: dict[str, Any]) -> None:
    languages, settings, licences = report["languages"], report["settings"], report["licences"]
    write_json(dataset_info(languages, settings, licences), plan.output_dir / INFO)
    (plan.output_dir / CARD).write_text(data_card(languages, settings, licences), encoding="utf-8")
    write_json(report, plan.output_dir / REPORT)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `run`."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    run(argv)


if __name__ == "__main__":
    main()
