"""A whole run: find the text, prepare it, and describe the result."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError
from dap_transformers.files import content_digest, public_name, read_json, whole_file, write_json
from dap_transformers.languages import base_language
from dap_transformers.prepare.card import describe
from dap_transformers.prepare.evaluation_sets import read_evaluation
from dap_transformers.prepare.options import PrepareOptions, RawText
from dap_transformers.prepare.opus import NOT_IN_RELEASE, corpus_of_archive, download_corpora
from dap_transformers.prepare.pipeline import OnCluster, check_names, prepare
from dap_transformers.prepare.run_folder import (
    LEAKS,
    Plan,
    RawFile,
    begin,
    finished_report,
    remove,
)
from dap_transformers.reports import versions
from dap_transformers.text.archives import disk_path
from dap_transformers.text.find import find_bitext

logger = logging.getLogger(__name__)

#: Version of the work folder and of the result. A run does not continue one of another version.
VERSION = 11


def prepare_text(
    text: RawText, options: PrepareOptions, on_cluster: OnCluster | None = None
) -> dict[str, Any]:
    """Prepare raw text, or only return the report if the same run has finished before.

    Args:
        on_cluster: makes the calls of the steps, such as `each_on_cluster` of Ray. None makes them
            in `num_workers` processes of this machine.

    Returns:
        The report, as written to `report.json`.
    """
    started = time.perf_counter()
    files, licences = find_files(text, options)
    require_outside(text, options, files)

    # Return the report if the same run has finished before.
    plan = Plan(Path(text.output_dir), options)
    settings = {
        "data": text.data,
        "opus": text.opus,
        "recipe": text.recipe,
        "languages": text.languages,
        "evaluation_data": text.evaluation_data,
        **asdict(options),
    }
    fingerprint = _fingerprint(settings, [file.key for file in files])
    report = finished_report(plan, fingerprint, text.overwrite)
    if report:
        logger.info("%s is finished already", text.output_dir)
        if report["licences"] != licences:
            report["licences"] = licences
            describe(plan.output_dir, report)
        remove(plan.work_dir)  # a killed run may have left it
        return report

    # Prepare.
    check_names(options)
    sentences = read_evaluation(text.evaluation_data)
    begin(plan, files)
    if sentences:
        threshold = options.leak_threshold or None
        write_json({"sentences": sentences, "threshold": threshold}, plan.leaks)
    languages = prepare(plan, files, text.num_workers, on_cluster)
    empty = [code for code, counts in languages.items() if not counts["train"]]
    if empty:
        logger.warning("%s: no training pair is left; the table tells why", " ".join(empty))

    # Describe the result.
    if sentences:
        with whole_file(plan.output_dir / LEAKS) as listed:
            for file in files:
                listed.write((plan.cleaned(file) / LEAKS).read_bytes())
    report = {
        "fingerprint": fingerprint,
        "languages": languages,
        "settings": settings | _shown(settings),
        "licences": licences,
        "evaluation_sentences": len(sentences),
        "num_workers": text.num_workers,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions(),
    }
    describe(plan.output_dir, report)
    remove(plan.work_dir)
    for path in plan.output_dir.glob("*/.*.tmp"):  # half-written files of workers that were lost
        path.unlink()
    return report


def find_files(text: RawText, options: PrepareOptions) -> tuple[list[RawFile], dict[str, str]]:
    """Find the input files, and download those from OPUS.

    Returns:
        The files, sorted by language, and the licences by the name of the corpus or file.
        Licences are known for archives from OPUS, and for files in `text.licences`.
    """
    # Download from OPUS.
    corpora = {}
    names = [name for given in text.opus for name in given.split(",")]
    if names:
        without = NOT_IN_RELEASE if text.recipe else ()
        downloaded = download_corpora(names, text.languages, text.download_dir, without)
        for path, corpus in downloaded.items():
            corpora[os.path.abspath(path)] = corpus

    # Find the languages.
    found = find_bitext([*text.data, *corpora], options.target_language)
    wanted = {base_language(code) for code in text.languages} or set(found)
    absent = sorted(wanted - set(found))
    if absent:
        raise UserError(f"languages {' '.join(absent)}: there is text only in {' '.join(found)}")

    # The key of a file depends on what shapes its cleaning.
    shaping = asdict(options)
    for name in ("dev_pairs", "shard_size"):
        del shaping[name]
    read = [*text.evaluation_data]
    read += filter(None, (options.tokenizer, options.language_identifier))
    states_of_read = [_file_state(path) for path in read]
    files = []
    licences = {}
    for language in sorted(wanted):
        for file in found[language]:
            is_of_hub = file.format == "hub"
            file = replace(file, streaming=is_of_hub)
            origin = str(file) if is_of_hub else Path(file.paths[0]).name
            archive = str(disk_path(file.paths[0]))
            corpus = corpora.get(archive) or corpus_of_archive(archive)
            if corpus:
                origin = str(corpus)
                licences[origin] = f"{corpus.licence} ({corpus.home})"
            states = [_file_state(path) for path in file.paths]
            key = _fingerprint(shaping, states_of_read, asdict(file), origin, states)
            files.append(RawFile(file, origin, key))

    given = read_json(text.licences) if text.licences else {}
    return files, licences | given


def require_outside(text: RawText, options: PrepareOptions, files: Sequence[RawFile]) -> None:
    """Raise `UserError` if an input lies in the output folder, where it could be deleted."""
    output = Path(text.output_dir).resolve()
    found = [str(disk_path(path)) for raw in files for path in raw.file.paths]
    for path in [*text.inputs(options), *found]:
        place = Path(path).expanduser()
        if place.exists() and place.resolve().is_relative_to(output):
            raise UserError(f"the input {path} lies in the output folder {text.output_dir}")


def _fingerprint(*content: Any) -> str:
    """Return a hash (16 hexadecimal digits) of JSON values, `VERSION` and the version of polars."""
    joined = json.dumps([VERSION, version("polars"), *content], sort_keys=True)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def _file_state(path: str) -> Any:
    """Return a hash of a file's content, or (name, hash) of each file in a folder.

    For a member of an archive it is the hash of the archive. None if there is no such file.
    """
    place = str(disk_path(path))
    if os.path.isdir(place):
        names = sorted(os.listdir(place))
        return [(name, _file_state(os.path.join(place, name))) for name in names]
    return content_digest(place) if os.path.isfile(place) else None


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are paths without folders of this machine."""
    shown: dict[str, Any] = {}
    for name in ("data", "evaluation_data"):
        shown[name] = [public_name(path) for path in settings[name]]
    if settings["tokenizer"]:
        shown["tokenizer"] = public_name(settings["tokenizer"])
    return shown
