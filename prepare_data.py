"""Make training pairs out of raw parallel text: clean, without duplicates and leaks, sampled, as parquet shards.

    python prepare_data.py --data raw/ --evaluation_data tatoeba/ --output_dir corpus
    python prepare_data.py --opus all --languages de fr sw --download_dir raw --output_dir corpus

Then: `train_dap.py --train_data corpus/train --validation_data corpus/dev`. A run that was stopped, even killed, goes
on behind the files that it had cleaned when the command is given again, the same or, where it failed over a file or an
argument, the corrected one.
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

from dap.arguments import ArgumentParser, arg, require_least
from dap.commands import check_outputs, command, guarded
from dap.errors import UserError
from dap.file_io import read_object, whole_file, write_json
from dap.languages import base_language
from dap.prepare import (
    NOT_IN_RELEASE,
    RELEASE,
    Plan,
    PrepareOptions,
    RawFile,
    begin,
    check_names,
    counts_table,
    describe,
    fetch,
    finished,
    prepare,
    read_evaluation,
)
from dap.ray.connection import ClusterArguments
from dap.reports import versions
from dap.text import disk_path, find_bitext

logger = logging.getLogger(__name__)

VERSION = 7  # of the work folder and the result; another one does not go on with a run of this


@dataclass
class DataArguments:
    """What to prepare, and where it goes."""

    output_dir: str = field(
        metadata={"help": "Folder to write train/, dev/, README.md and report.json into."}
    )
    data: list[str] = arg([], "Files, folders or a Hub dataset id, as train_dap.py takes them.")
    opus: list[str] = arg(
        [], "Corpora to fetch from OPUS, such as 'Europarl CCMatrix'; 'all' are the paper's six."
    )
    languages: list[str] = arg([], "Source languages. Default: all that there are (OPUS: the 36).")
    download_dir: str = arg("raw", "Folder for what is fetched from OPUS.")
    recipe: str | None = arg(
        None, "'release': the data steps of the paper's released code; see docs/data.md."
    )
    mirror: str | None = arg(None, "Base address of a copy of OPUS' file store.")
    licences: str | None = arg(None, "JSON file for the data card: origin (file name) -> licence.")
    evaluation_data: list[str] = arg(
        [],
        "Evaluation sets: parallel text, or plain text, one sentence a line or several with tabs.",
    )
    list_leaks: str | None = arg(None, "JSONL file to list the leaks in.")
    num_workers: int = arg(1, "Processes that share the files; the result does not depend on it.")
    ray: str | None = arg(
        None,
        "Share the files among a Ray cluster instead: its address (auto or HOST:PORT), or 'local'. All nodes need the "
        "same folders.",
    )
    overwrite: bool = arg(False, "Replace what a finished run left in output_dir.")

    def __post_init__(self) -> None:
        if not self.data and not self.opus:
            raise UserError("there is no text to prepare: give --data, --opus or both")
        if self.recipe not in (None, "release"):
            raise UserError(f"--recipe {self.recipe!r} is unknown: give release, or leave it out")
        require_least(self, num_workers=1)
        if self.ray and self.num_workers > 1:
            raise UserError(
                f"--num_workers {self.num_workers}: with --ray all CPUs of the cluster work; leave it out"
            )

    def outputs(self) -> dict[str, str]:
        """Argument -> file to write beside `output_dir`."""
        return {"--list_leaks": self.list_leaks} if self.list_leaks else {}


def check_outside(args: DataArguments, options: PrepareOptions) -> None:
    """What is read or written beside the output may not lie where --overwrite would delete it."""
    output, given = Path(args.output_dir).resolve(), vars(args) | vars(options)
    read = ("data", "evaluation_data", "licences", "tokenizer", "target_vocabulary")
    written = ("list_leaks", "download_dir") if args.opus else ("list_leaks",)
    for name in (*read, *written):
        for path in given[name] if isinstance(given[name], list) else filter(None, [given[name]]):
            own = Path(path).expanduser()
            is_file = name in written or own.exists()  # else what is absent may be on the Hub
            if is_file and own.resolve().is_relative_to(output):
                raise UserError(
                    f"--{name} {path} lies in --output_dir {args.output_dir}: give another folder for one"
                )


def find_files(
    args: DataArguments, options: PrepareOptions
) -> tuple[list[RawFile], dict[str, str]]:
    """The input files by language and name, and the licence of each known origin.

    A file's key changes with its state and with what shapes its cleaning, and with no other file.

    Raises:
        ValueError, FileNotFoundError: as `find_bitext` and `fetch`; a language asked for that has no file.
    """
    names = [name for given in args.opus for name in given.split(",")]
    without = NOT_IN_RELEASE if args.recipe else ()
    fetched = fetch(names, args.languages, args.download_dir, args.mirror, without) if names else {}
    corpora = {os.path.abspath(path): corpus for path, corpus in fetched.items()}
    found = find_bitext([*args.data, *corpora], options.target_language)
    wanted = [base_language(code) for code in args.languages] or list(found)
    if absent := [code for code in wanted if code not in found]:
        raise UserError(f"--languages {' '.join(absent)}: there is text in {' '.join(found)} only")
    shaping = asdict(options)
    for name in ("dev_pairs", "shard_size", "target_vocabulary"):  # nothing to cleaning
        del shaping[name]
    check, files = list(map(_state, args.evaluation_data)), []
    for file in (file for language in sorted(set(wanted)) for file in found[language]):
        file = replace(file, streaming=file.format == "hub")
        name = str(file) if file.format == "hub" else Path(file.paths[0]).name
        origin = str(corpora.get(str(disk_path(file.paths[0])), name))
        key = _digest(shaping, check, asdict(file), origin, list(map(_state, file.paths)))
        files.append(RawFile(file, origin, key))
    licences = {str(corpus): f"{corpus.licence} ({corpus.home})" for corpus in corpora.values()}
    return files, licences | read_licences(args.licences)


def read_licences(path: str | None) -> dict[str, str]:
    """Origin -> licence, of a JSON file."""
    content = read_object(Path(path)) if path else {}
    if odd := [origin for origin, licence in content.items() if not isinstance(licence, str)]:
        raise UserError(f"{path}: the licence of {odd[0]!r} is {content[odd[0]]!r}; give a text")
    return content


def _digest(*content: Any) -> str:
    whole = json.dumps([VERSION, version("polars"), *content], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _state(path: str) -> Any:
    path = str(disk_path(path))
    if os.path.isdir(path):
        return [(name, _state(os.path.join(path, name))) for name in sorted(os.listdir(path))]
    return (os.path.getsize(path), os.stat(path).st_mtime_ns) if os.path.exists(path) else None


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Prepares as the command line `argv` says (None: the process's own); returns the report that it writes.

    Raises:
        ValueError: arguments or text that do not fit, a folder of another run, or no space left on the device.
        FileNotFoundError: no such file or folder.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    parser = ArgumentParser((DataArguments, PrepareOptions))
    args, options = parser.parse_args_into_dataclasses(args=argv)
    if args.recipe:
        parser.set_defaults(**RELEASE)
        args, options = parser.parse_args_into_dataclasses(args=argv)
    check_outside(args, options)
    given = [args.licences, options.tokenizer, options.target_vocabulary]
    inputs = [
        Path(path).expanduser()
        for path in (*args.data, *args.evaluation_data, *filter(None, given))
    ]
    with (
        guarded(args.outputs(), {"--output_dir": args.output_dir}, inputs),
        ClusterArguments(args.ray).connect(),
    ):
        return _run(args, options)


def _run(args: DataArguments, options: PrepareOptions) -> dict[str, Any]:
    started = time.perf_counter()
    files, licences = find_files(args, options)
    check_outputs(args.outputs(), [disk_path(path) for raw in files for path in raw.file.paths])
    plan = Plan(Path(args.output_dir), options)
    settings = {
        name: getattr(args, name)
        for name in ("data", "opus", "recipe", "languages", "evaluation_data")
    }
    settings |= asdict(options) | {"list_leaks": args.list_leaks is not None}
    mark = _digest(settings, [file.key for file in files])
    if ended := finished(plan, mark, args.overwrite):
        return again(plan, args, ended, licences)
    check_names(options)
    sentences = read_evaluation(args.evaluation_data)
    begin(plan, files)
    if sentences:
        write_json(
            {"sentences": sentences, "threshold": options.leak_threshold or None}, plan.leaks
        )
    languages = prepare(plan, files, args.num_workers, bool(args.ray))
    if empty := [code for code, counts in languages.items() if not counts["train"]]:
        logger.warning("%s: nothing is left to train on; the table tells why", " ".join(empty))
    seconds = time.perf_counter() - started
    report = {
        "fingerprint": mark,
        "languages": languages,
        "settings": settings,
        "licences": licences,
    }
    report |= {
        "evaluation_sentences": len(sentences),
        "leaks": args.list_leaks,
        "num_workers": args.num_workers,
    }
    report |= {"seconds": round(seconds, 1), "versions": versions()}
    finish(plan, args, files, report)
    print(f"{counts_table(languages)}\n\nwritten to {args.output_dir} in {seconds:.0f} s")
    return report


def again(
    plan: Plan, args: DataArguments, ended: dict[str, Any], licences: dict[str, str]
) -> dict[str, Any]:
    """The report of a finished run, with the licences as they are now.

    Raises:
        ValueError: the leaks were not listed where they are asked for now.
    """
    if args.list_leaks and os.path.abspath(args.list_leaks) != os.path.abspath(ended["leaks"]):
        raise UserError(
            f"--list_leaks {args.list_leaks}: {plan.output_dir} is finished and its leaks were listed in "
            f"{ended['leaks']}; copy that file, or give --overwrite to make all again"
        )
    if ended["licences"] != licences:
        ended["licences"] = licences
        describe(plan.output_dir, ended)
    shutil.rmtree(plan.work_dir, ignore_errors=True)  # a kill may have left it
    print(f"{counts_table(ended['languages'])}\n\n{args.output_dir} holds this already")
    return ended


def finish(
    plan: Plan, args: DataArguments, files: Sequence[RawFile], report: dict[str, Any]
) -> None:
    """Writes what describes the shards; the report comes last and marks the end."""
    if args.list_leaks:
        with whole_file(args.list_leaks) as listed:
            for file in files:
                listed.write((plan.cleaned(file) / "leaks.jsonl").read_bytes())
    describe(plan.output_dir, report)
    for path in plan.output_dir.glob("*/.*.tmp"):  # of workers that were lost on a cluster
        path.unlink()
    shutil.rmtree(plan.work_dir)


main = command(run)


if __name__ == "__main__":
    main()
