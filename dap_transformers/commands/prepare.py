"""Turn raw parallel text into training pairs, without noise, duplicates and leaks, as Parquet.

    prepare-data --data raw/ --evaluation_data tatoeba/ --output_dir corpus
    prepare-data --opus all --languages de fr sw --download_dir raw --output_dir corpus

Then train with `train_dap.py --train_data corpus/train --validation_data corpus/dev`.

*Noise* is text that fails a filter. A *leak* is a pair with a side that equals, or nearly equals, a
sentence of the evaluation sets.

If a run was stopped or failed, give the same command again, or the corrected one. It does not clean
again the files that are finished.
"""

# ruff: noqa: E402 (a package is checked before the modules that need it are imported)

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dap_transformers import __version__

try:
    import polars  # noqa: F401
except ImportError:
    if sys.argv[1:] == ["--version"]:
        print(f"dap-transformers {__version__}")
        sys.exit()
    sys.exit("error: prepare-data needs the package polars: pip install polars")

from dap_transformers.addresses import public_name
from dap_transformers.commands.arguments import ArgumentParser, arg, require_least
from dap_transformers.commands.edge import check_outputs, command, guarded
from dap_transformers.errors import UserError
from dap_transformers.files import content_digest, read_object, whole_file, write_json
from dap_transformers.languages import base_language
from dap_transformers.prepare.card import counts_table, describe
from dap_transformers.prepare.evaluation_sets import read_evaluation
from dap_transformers.prepare.options import RELEASE, PrepareOptions
from dap_transformers.prepare.opus import NOT_IN_RELEASE, corpus_of_archive, download_corpora
from dap_transformers.prepare.pipeline import check_names, prepare
from dap_transformers.prepare.run_folder import Plan, RawFile, begin, finished_report, remove
from dap_transformers.ray.connection import ClusterArguments
from dap_transformers.reports import versions
from dap_transformers.text.archives import disk_path
from dap_transformers.text.find import find_bitext

logger = logging.getLogger(__name__)

#: Version of the work folder and of the result. A run does not continue one of another version.
VERSION = 10


@dataclass
class DataArguments:
    """Options that name the text to prepare, and where to write the result.

    The help text of each field says what it does. Values that contradict each other raise
    `UserError`.
    """

    output_dir: str = field(
        metadata={"help": "Folder to write train/, dev/, README.md and report.json into."}
    )
    data: list[str] = arg([], "Files, folders or a Hub dataset id, as train_dap.py takes them.")
    columns: list[int] | None = arg(
        None, "Columns of source and target in TSV files, such as '2 3'. Default: the first two."
    )
    opus: list[str] = arg(
        [],
        "Corpora to download from OPUS, such as 'Europarl Tatoeba'. 'all': the paper's six. Others "
        "need the package opustools.",
    )
    languages: list[str] = arg(
        [], "Source languages. Default: all that are found; with --opus, the 36."
    )
    download_dir: str = arg("raw", "Folder for the files from OPUS.")
    recipe: str | None = arg(
        None, "'release': the data steps of the paper's released code; see docs/data.md."
    )
    mirror: str | None = arg(None, "Base address of a copy of OPUS' file store.")
    licences: str | None = arg(
        None, "JSON file for the data card: name of an input file -> its licence."
    )
    evaluation_data: list[str] = arg(
        [],
        "Evaluation sets, for the leak check: parallel text, or plain text with one sentence per "
        "line, or several between tabs.",
    )
    list_leaks: str | None = arg(None, "JSONL file to list the leaks in.")
    num_workers: int = arg(
        1, "Processes that share the files. The result does not depend on their number."
    )
    ray: str | None = arg(
        None,
        "Share the files among a Ray cluster instead: its address (auto or HOST:PORT), or 'local'. "
        "All nodes need the same folders.",
    )
    overwrite: bool = arg(False, "Replace the result of a finished run in output_dir.")

    def __post_init__(self) -> None:
        if not self.data and not self.opus:
            raise UserError("there is no text to prepare: give --data, --opus or both")
        if self.recipe not in (None, "release"):
            raise UserError(f"--recipe {self.recipe!r} is unknown: give release, or leave it out")
        require_least(self, num_workers=1)
        if self.ray and self.num_workers > 1:
            raise UserError(
                f"--num_workers {self.num_workers}: --ray uses all CPUs of the cluster; "
                "leave one out"
            )

    def outputs(self) -> dict[str, str]:
        """Return the output files outside of `output_dir`, by the flag that names them.

        This is only the file of `--list_leaks`, if it is given.
        """
        return {"--list_leaks": self.list_leaks} if self.list_leaks else {}


def check_outside(args: DataArguments, options: PrepareOptions) -> None:
    """Check that no other input or output lies in `output_dir`, where --overwrite would delete it.

    Args:
        args: what to prepare, and where to write it.
        options: the options that shape the text, some of which name files.
    """
    output = Path(args.output_dir).resolve()
    values = vars(args) | vars(options)
    read = ["data", "evaluation_data", "licences", "tokenizer", "target_vocabulary", "model"]
    written = ["list_leaks"]
    if args.opus:
        written.append("download_dir")
    for name in read + written:
        value = values[name]
        paths = value if isinstance(value, list) else [value]
        for path in filter(None, paths):
            place = Path(path).expanduser()
            # An input that does not exist may be the id of a Hub dataset.
            is_local = name in written or place.exists()
            if is_local and place.resolve().is_relative_to(output):
                raise UserError(
                    f"--{name} {path} lies in --output_dir {args.output_dir}: give another folder "
                    "for one"
                )


def find_files(
    args: DataArguments, options: PrepareOptions
) -> tuple[list[RawFile], dict[str, str]]:
    """Find the input files, and download those from OPUS.

    Args:
        args: what to prepare.
        options: the options that shape the text.

    Returns:
        The files, sorted by language, and the licences by the name of the corpus or file.
        Licences are known for archives from OPUS, and for files in `args.licences`.
    """
    # Download from OPUS.
    corpora = {}
    names = [name for given in args.opus for name in given.split(",")]
    if names:
        without = NOT_IN_RELEASE if args.recipe else ()
        downloaded = download_corpora(
            names, args.languages, args.download_dir, args.mirror, without
        )
        for path, corpus in downloaded.items():
            corpora[os.path.abspath(path)] = corpus

    # Find the languages.
    found = find_bitext([*args.data, *corpora], options.target_language, args.columns)
    wanted = {base_language(code) for code in args.languages} or set(found)
    absent = sorted(wanted - set(found))
    if absent:
        raise UserError(f"--languages {' '.join(absent)}: there is text only in {' '.join(found)}")

    # The key of a file depends on what shapes its cleaning.
    shaping = asdict(options)
    for name in ("dev_pairs", "shard_size", "target_vocabulary"):
        del shaping[name]
    read = [*args.evaluation_data]
    read += filter(None, (options.tokenizer, options.language_identifier, options.model))
    states_of_read = [_file_state(path) for path in read]
    files = []
    licences = {}
    for language in sorted(wanted):
        for file in found[language]:
            is_of_hub = file.format == "hub"
            file = replace(file, streaming=is_of_hub)
            name = str(file) if is_of_hub else Path(file.paths[0]).name
            archive = str(disk_path(file.paths[0]))
            corpus = corpora.get(archive) or corpus_of_archive(archive)
            origin = name
            if corpus:
                origin = str(corpus)
                licences[origin] = f"{corpus.licence} ({corpus.home})"
            states = [_file_state(path) for path in file.paths]
            key = _fingerprint(shaping, states_of_read, asdict(file), origin, states)
            files.append(RawFile(file, origin, key))

    return files, licences | read_licences(args.licences)


def read_licences(path: str | None) -> dict[str, str]:
    """Read the licences of input files.

    Args:
        path: JSON file that maps the name of an input file to its licence. None gives no licences.

    Returns:
        Name of an input file -> its licence.
    """
    content = read_object(Path(path)) if path else {}
    for origin, licence in content.items():
        if not isinstance(licence, str):
            raise UserError(f"{path}: the licence of {origin!r} is {licence!r}; give a text")
    return content


def _fingerprint(*content: Any) -> str:
    """Return a hash (16 hexadecimal digits) of JSON values, `VERSION` and the version of polars."""
    text = json.dumps([VERSION, version("polars"), *content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _file_state(path: str) -> Any:
    """Return a hash of the content of a file, or of each file in a folder, as JSON values.

    Returns:
        The hash of a file, or a list of (name, hash) for a folder. For a member of an archive, the
        hash of the archive. None if there is no such file or folder.
    """
    place = str(disk_path(path))
    if os.path.isdir(place):
        names = sorted(os.listdir(place))
        return [(name, _file_state(os.path.join(place, name))) for name in names]
    return content_digest(place) if os.path.isfile(place) else None


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Turn raw parallel text into training pairs, as the command line of `prepare-data` says.

    Args:
        argv: arguments of the command. None takes those of this process.

    Returns:
        The report, as written to `report.json`.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    parser = ArgumentParser((DataArguments, PrepareOptions))
    args, options = parser.parse_args_into_dataclasses(args=argv)
    if args.recipe:
        parser.set_defaults(**RELEASE)
        args, options = parser.parse_args_into_dataclasses(args=argv)
    check_outside(args, options)

    given = [args.licences, options.tokenizer, options.target_vocabulary, options.model]
    read = [*args.data, *args.evaluation_data, *filter(None, given)]
    inputs = [Path(path).expanduser() for path in read]
    outputs = {"--output_dir": args.output_dir}
    with guarded(args.outputs(), outputs, inputs), ClusterArguments(args.ray).connect():
        return prepare_all(args, options)


def prepare_all(args: DataArguments, options: PrepareOptions) -> dict[str, Any]:
    """Prepare the text, or only return the report if the same run has finished before.

    The caller has checked and locked the output folder. All results are written there, and a
    table of counts is printed.

    Args:
        args: what to prepare, and where to write it.
        options: the options that shape the text.

    Returns:
        The report, as written to `report.json`.
    """
    started = time.perf_counter()
    files, licences = find_files(args, options)
    inputs = [disk_path(path) for raw in files for path in raw.file.paths]
    check_outputs(args.outputs(), inputs)

    # Return the report if the same run has finished before.
    plan = Plan(Path(args.output_dir), options)
    settings = {
        "data": args.data,
        "opus": args.opus,
        "recipe": args.recipe,
        "languages": args.languages,
        "evaluation_data": args.evaluation_data,
        **asdict(options),
        "list_leaks": args.list_leaks is not None,
    }
    fingerprint = _fingerprint(settings, [file.key for file in files])
    report = finished_report(plan, fingerprint, args.overwrite)
    if report:
        return keep_finished(plan, args, report, licences)

    # Prepare.
    check_names(options)
    sentences = read_evaluation(args.evaluation_data)
    begin(plan, files)
    if sentences:
        threshold = options.leak_threshold or None
        write_json({"sentences": sentences, "threshold": threshold}, plan.leaks)
    languages = prepare(plan, files, args.num_workers, bool(args.ray))

    empty = [code for code, counts in languages.items() if not counts["train"]]
    if empty:
        logger.warning("%s: no training pair is left; the table tells why", " ".join(empty))
    seconds = time.perf_counter() - started
    report = {
        "fingerprint": fingerprint,
        "languages": languages,
        "settings": settings | _shown(settings),
        "licences": licences,
        "evaluation_sentences": len(sentences),
        "leaks": os.path.relpath(args.list_leaks, args.output_dir) if args.list_leaks else None,
        "num_workers": args.num_workers,
        "seconds": round(seconds, 1),
        "versions": versions(),
    }
    finish(plan, args, files, report)
    print(f"{counts_table(languages)}\n")
    print(f"written to {args.output_dir} in {seconds:.0f} s; README.md there explains the columns")
    return report


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are paths or names, without folders of this machine and secrets.

    They are part of the report and the card, which users publish.

    Returns:
        The changed settings by name. All others are left out.
    """
    shown = {}
    for name in ("data", "evaluation_data"):
        shown[name] = [public_name(path) for path in settings[name]]
    for name in ("tokenizer", "target_vocabulary", "model"):
        if settings.get(name):
            shown[name] = public_name(settings[name])
    return shown


def keep_finished(
    plan: Plan, args: DataArguments, report: dict[str, Any], licences: dict[str, str]
) -> dict[str, Any]:
    """Return the report of a run that has finished before, with the licences of this call.

    If the licences differ, the report and the data card are written again. A work folder that a
    killed run has left is removed. The table of counts is printed.

    Args:
        plan: the paths of the run.
        args: what to prepare, and where to write it.
        report: the report in the output folder. Its licences are replaced.
        licences: licences by the name of the corpus or file.
    """
    listed = os.path.normpath(os.path.join(os.path.abspath(args.output_dir), report["leaks"] or ""))
    if args.list_leaks and os.path.abspath(args.list_leaks) != listed:
        raise UserError(
            f"--list_leaks {args.list_leaks}: {plan.output_dir} is finished and its leaks are "
            f"listed in {listed}; copy that file, or give --overwrite to start again"
        )
    if report["licences"] != licences:
        report["licences"] = licences
        describe(plan.output_dir, report)
    remove(plan.work_dir)  # a killed run may have left it
    print(f"{counts_table(report['languages'])}\n\n{args.output_dir} is finished already")
    return report


def finish(
    plan: Plan, args: DataArguments, files: Sequence[RawFile], report: dict[str, Any]
) -> None:
    """Write the list of leaks (if asked for), the card and the report, and remove the work folder.

    Leaks are pairs that were dropped because a side equals, or nearly equals, an evaluation
    sentence. The card is the README of the data.

    Args:
        plan: the paths of the run.
        args: the arguments, which may name a file for the leaks (`--list_leaks`).
        files: the input files.
        report: the report to write.
    """
    if args.list_leaks:
        with whole_file(args.list_leaks) as listed:
            for file in files:
                listed.write((plan.cleaned(file) / "leaks.jsonl").read_bytes())
    describe(plan.output_dir, report)
    remove(plan.work_dir)
    for path in plan.output_dir.glob("*/.*.tmp"):  # half-written files of workers that were lost
        path.unlink()


main = command(run)


if __name__ == "__main__":
    main()
