"""A whole run: find the text, prepare it, and describe the result."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl

from dap_transformers.errors import UserError, counted, reading, warn_once
from dap_transformers.files import content_digest, public_name, read_json, whole_file
from dap_transformers.languages import base_language
from dap_transformers.prepare.data_card import LOSSES, describe, total
from dap_transformers.prepare.evaluation_sets import read_evaluation
from dap_transformers.prepare.filters import clean, plain_tokenizer
from dap_transformers.prepare.options import OF_SELECTION, PrepareOptions, RawText
from dap_transformers.prepare.opus import NOT_IN_RELEASE, OpusCorpus, download_corpora
from dap_transformers.prepare.pipeline import OnCluster, prepare
from dap_transformers.prepare.run_folder import WORK, Plan, RawFile, begin
from dap_transformers.reports import versions
from dap_transformers.text.archives import disk_path
from dap_transformers.text.find import LEAKS, find_bitext
from dap_transformers.text.formats import BitextFile

#: What shapes the result, apart from `PrepareOptions`.
SHAPING = ("data", "opus", "recipe", "languages", "evaluation_data")
#: Version of the work folder and of the result. A run does not continue one of another version.
VERSION = 17


def prepare_text(
    text: RawText, options: PrepareOptions, on_cluster: OnCluster | None = None
) -> dict[str, Any]:
    """Prepare raw text, and describe the result.

    Args:
        on_cluster: makes the calls of the steps instead of processes of this machine, such as
            `each_on_cluster` of Ray.

    Returns:
        The report, as written to `report.json`.
    """
    started = time.perf_counter()
    output_dir = Path(text.output_dir)
    require_outside(output_dir, text.inputs(options))
    # Try the filters and read everything, before text is downloaded and an earlier result removed.
    with reading(f"url_pattern={options.url_pattern!r}"):
        clean(pl.DataFrame({"source": [""], "target": [""]}), "en", options)
    evaluation = read_evaluation(text.evaluation_data, options.target_language)
    files, licences = find_files(text, options, evaluation)
    plan = Plan(output_dir, options, tuple(evaluation))
    begin(plan, files, text.overwrite)
    languages = prepare(plan, files, text.num_workers, on_cluster)
    sums = total(languages)
    if not sums["train"]:
        reasons = {name: sums[name] for name in LOSSES if sums[name]}
        raise UserError(f"nothing is left of {counted(sums['read'], 'pair')}: {reasons}")
    if without := [language for language, counts in languages.items() if not counts["train"]]:
        warn_once("no training pairs are left of: %s; README.md counts why", ", ".join(without))
    if plan.evaluation:
        with whole_file(output_dir / LEAKS) as listed:
            for file in files:
                listed.write((plan.cleaned(file) / LEAKS).read_bytes())

    # The report shows paths without the folders of this machine.
    settings = {name: getattr(text, name) for name in SHAPING} | asdict(options)
    for name in ("data", "evaluation_data"):
        settings[name] = [public_name(path) for path in settings[name]]
    if options.tokenizer:
        settings["tokenizer"] = public_name(options.tokenizer)
    report = {
        "languages": languages,
        "settings": settings,
        "licences": licences,
        "evaluation_sentences": len(plan.evaluation),
        "num_workers": text.num_workers,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions(),
    }
    describe(output_dir, report)
    shutil.rmtree(output_dir / WORK, ignore_errors=True)
    return report


def require_outside(output: Path, inputs: Iterable[str]) -> None:
    """Raise `UserError` if an input lies in the output folder, where it could be deleted."""
    for path in inputs:
        place = Path(path).expanduser()
        if place.exists() and place.resolve().is_relative_to(output.resolve()):
            raise UserError(f"the input {path} lies in the output folder {output}")


def find_files(
    text: RawText, options: PrepareOptions, evaluation: Sequence[str] = ()
) -> tuple[list[RawFile], dict[str, str]]:
    """Find the input files, and download those from OPUS.

    Args:
        evaluation: the sentences for the leak check, with which the files will be cleaned.

    Returns:
        The files, sorted by language, and the licences by the name of the corpus or file. Known
        are those of corpora from OPUS, and those in `text.licences`.
    """
    corpora: dict[Path, OpusCorpus] = {}
    if text.opus:
        names = ",".join(text.opus).split(",")
        folder = os.path.abspath(text.download_dir)
        without = NOT_IN_RELEASE if text.recipe else ()
        corpora = download_corpora(names, text.languages, folder, without)

    found = find_bitext([*text.data, *corpora], options.target_language)
    wanted = {base_language(code) for code in text.languages} or set(found)
    absent = sorted(wanted - set(found))
    if absent:
        raise UserError(f"languages {' '.join(absent)}: there is text only in {' '.join(found)}")

    # Name the corpus of each file. Files of the same name also show as many folders as they need.
    paths = {file: Path(file.paths[0]) for file in chain(*found.values())}
    origins: dict[BitextFile, str] = {}
    for file, path in paths.items():
        same = {other.parts for other in paths.values() if other.name == path.name}
        size = 1
        while len({parts[-size:] for parts in same}) < len(same):
            size += 1
        corpus = corpora.get(disk_path(path))
        name = Path(*path.parts[-size:])
        origins[file] = str(corpus or (file if file.format == "hub" else name))

    licences = {str(corpus): f"{corpus.licence} ({corpus.home})" for corpus in corpora.values()}
    given = read_json(text.licences) if text.licences else {}
    known = set(origins.values())
    if unknown := given.keys() - known:
        raise UserError(f"{text.licences}: no input is called {min(unknown)}, only {sorted(known)}")

    tokenizer = options.tokenizer and plain_tokenizer(options.tokenizer).backend_tokenizer.to_str()
    cleaning = {name: each for name, each in asdict(options).items() if name not in OF_SELECTION}
    shared = _fingerprint(cleaning, tokenizer, evaluation)
    files = []
    for language in sorted(wanted):
        for file in found[language]:
            origin = origins[file]
            file = replace(file, streaming=file.format == "hub")
            # The content of a Hub dataset is not known before it is read.
            places = filter(Path.is_file, map(disk_path, file.paths))
            contents = [content_digest(place) for place in places]
            key = _fingerprint(shared, asdict(file), origin, contents)
            files.append(RawFile(file, origin, key))
    return files, licences | given


def _fingerprint(*content: Any) -> str:
    """Return a hash (16 hexadecimal digits) of JSON values, `VERSION` and the version of polars."""
    joined = json.dumps([VERSION, version("polars"), *content], sort_keys=True)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]
