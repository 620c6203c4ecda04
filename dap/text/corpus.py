"""Find and load parallel text: which files hold which languages, as datasets (no models, no tokenizers).

A corpus is one or many files or folders of `{xx}-en.tsv[.gz|.xz]`, `{xx}-en.jsonl[.gz|.xz]`, `{xx}-en.parquet`,
Moses pairs `name.{xx}` + `name.en` (Tatoeba's `tatoeba.{xxx}-eng.{xxx}` + `….eng` is one of them), translation
memories `*.tmx[.gz|.xz]`, catalogues `*.po[.gz|.xz]`, zip archives of all but parquet (as OPUS' `en-fr.txt.zip`), or a
dataset of the Hub (`user/name` or `user/name:config`). `dap.text.formats` tells what is inside them.

The language comes from the file name, ISO 639-1 or 639-3. A region or script is dropped: `pt-br-en.tsv`, `a.zh-CN` and
`deu_Latn-eng_Latn.tsv` are pt, zh and de. In capitals every region is known as one, in small letters those of
`REGIONS`; else what precedes the two codes is a name: `it-da-en.tsv` is da. A TMX file tells its languages itself, by
its first units, and a PO file by its header (`Language:`), else by its name (`de.po`, `de/LC_MESSAGES/app.po`); the
target side of PO is English.
"""

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets import config as datasets_config

from dap.errors import UserError
from dap.languages import ISO3, NAMES, to_iso1
from dap.text.archives import disk_path, list_archive, open_file, read_sentences
from dap.text.formats import BitextFile, LineAudit, hub_dataset, numbered_pairs, read_pairs
from dap.text.tables import read_tables
from dap.text.tmx import base_language, languages_of

__all__ = ["BitextFile", "count_pairs", "find_bitext", "load_bitext", "read_pairs", "read_sentences", "read_tables"]

logger = logging.getLogger(__name__)

FEATURES = Features({"source": Value("string"), "target": Value("string")})
STREAM_FEATURES = Features({**FEATURES, "row": Value("string")})
LAYOUTS = (
    "{xx}-en.tsv[.gz|.xz], {xx}-en.jsonl[.gz|.xz], {xx}-en.parquet, Moses pairs name.{xx} + name.en, *.tmx, {xx}.po, "
    "*.zip of these ({xx}: a language code of 2 or 3 letters; the target language, in file names too, is the second)"
)
SHOWN = 5  # files named in an error
CACHE_VERSION = 1
BATCH = 10_000  # pairs a batch of the cache

#: Regions that file names of known corpora write in small letters, by language.
REGIONS = {
    "ar": "ae|eg|ma|sa|sy", "bn": "bd|in", "de": "at|ch|de", "en": "au|ca|gb|in|uk|us", "es": "ar|cl|co|es|mx|pe|us",
    "eu": "es", "fa": "af|ir", "fr": "be|ca|ch|fr", "it": "ch|it", "nl": "be|nl", "pt": "ao|br|pt", "sw": "ke|tz",
    "ta": "in|lk", "ur": "in|pk", "zh": "cn|hk|mo|sg|tw|hans|hant",
}  # fmt: skip
#: Endings of two or three letters that tell what a file holds, not the language of a Moses side.
NO_LANGUAGES = (
    "bak|bat|bin|bpe|bz|cfg|csv|dat|db|doc|err|gz|htm|idx|ids|ini|js|key|lck|log|lst|md|npy|npz|odt|old|out|pdf|pkl|"
    "po|pot|py|rar|rej|sgm|sh|sql|src|swp|tar|tex|tgt|tgz|tmp|tmx|tok|tsv|txt|vec|xls|xml|xz|yml|zip|zst"
)

_SMALL = "|".join(f"{code}[-_](?:{regions})" for code, regions in REGIONS.items())
_LANGUAGE = rf"(?:{_SMALL}|[a-z]{{2,3}}(?:[-_](?:[A-Z][a-z]{{3}}|[A-Z]{{2}}|[0-9]{{3}}))*)"
_TABLE = re.compile(rf"(?:.*?[._-])??({_LANGUAGE})-({_LANGUAGE})\.(tsv|jsonl|parquet)(\.gz|\.xz)?")
_CATALOGUE = re.compile(rf"(?:.*[._-])?({_LANGUAGE})\.po(?:\.gz|\.xz)?")
_SIDE = re.compile(rf"(.+)\.(?!(?:{NO_LANGUAGES})(?:\.|$))({_LANGUAGE})(\.gz|\.xz)?")
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


# Finding


def find_bitext(paths: str | Path | Sequence[str | Path], target_language: str = "en") -> dict[str, list[BitextFile]]:
    """The files of each source language, languages in alphabetical order, each file once.

    Args:
        paths: files, folders (not searched recursively) or ids of Hub datasets. A Hub dataset is looked for only
            when there is no such path and the name has the form `user/name` or `user/name:config`.

    Raises:
        ValueError: no path is given, a name does not tell its language, or a folder holds no parallel text.
        FileNotFoundError: a path does not exist.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise UserError(f"no parallel text is given; name files or folders of {LAYOUTS}, or a Hub dataset id")
    names = {os.path.abspath(Path(path).expanduser()) for path in given}
    files = [file for path in given for file in _expand(str(path), names, _code(target_language))]
    found: dict[str, list[BitextFile]] = {}
    for file in sorted(dict.fromkeys(files), key=lambda file: file.language):
        found.setdefault(file.language, []).append(file)
    for language in found.keys() - NAMES.keys():
        _warn_of(language, str(found[language][0]))
    return found


@cache  # once a language and file
def _warn_of(language: str, name: str) -> None:
    logger.warning("%s is taken for text in the language %r, which is none of the 36 known ones", name, language)


def _code(code: str) -> str:
    """ISO 639-1 where the code is one of the 36 languages or English, else the code without its region."""
    try:
        return to_iso1(code)
    except ValueError:
        if not re.fullmatch(_LANGUAGE, code):
            raise
        return re.split("[-_]", code)[0]


def _expand(given: str, names: set[str], target: str) -> list[BitextFile]:
    """The files that one argument stands for; `names` are all arguments as absolute paths."""
    path = Path(os.path.abspath(Path(given).expanduser()))
    if path.is_dir() or (path.is_file() and path.suffix == ".zip"):
        return _folder(path, target)
    if path.is_file():
        files = _classify(path, target, Path.is_file)
        if not files and _kind(path) in (".tmx", ".po"):
            raise UserError(f"{path}: tells no language that it pairs with {target!r} (xml:lang, or Language: in PO)")
        return files or _target_side(path, names, target)
    if _HUB.fullmatch(given) and not _TABLE.fullmatch(path.name):
        return _find_hub(given, target)
    raise FileNotFoundError(
        f"{given}: no such file or folder; expected {LAYOUTS}, a folder of these, or a Hub dataset id"
    )


def _folder(folder: Path, target: str) -> list[BitextFile]:
    """All corpora in a folder or archive; what looks like one but tells no language is left out with a warning."""
    paths = sorted(filter(Path.is_file, folder.iterdir())) if folder.is_dir() else _members(folder)
    exists = set(paths).__contains__
    files = [file for path in paths for file in _classify(path, target, exists)]
    if not files:
        names = ", ".join(path.name for path in paths[:SHOWN]) or "nothing"
        deeper = [f"{path}/" for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
        hint = f"; folders within are not searched, give {' or '.join(deeper[:SHOWN])} itself" if deeper else ""
        raise UserError(f"{folder}: holds no parallel text but {names}; expected {LAYOUTS}, target {target!r}{hint}")
    used = {name for file in files for path in file.paths for name in (path, str(disk_path(path)))}
    for path in paths:
        if str(path) not in used and re.search(r"\.(tsv|jsonl|parquet|tmx|po|zip)(\.gz|\.xz)?$", path.name):
            logger.warning("%s is left out: it tells no language that it pairs with %r", path, target)
    return files


def _members(archive: Path) -> list[Path]:
    """Paths through an archive; archives in it and parquet, which is not read as a stream, stay closed."""
    names = sorted(list_archive(archive))
    closed = [name for name in names if name.endswith((".zip", ".parquet"))]
    for name in closed:
        logger.warning("%s is left out: such a file is not read inside an archive; unpack it", archive / name)
    return [archive / name for name in names if name not in closed]


def _classify(path: Path, target: str, exists: Callable[[Path], bool]) -> list[BitextFile]:
    """The corpora in this file (or whose source side it is); none where it tells no language."""
    kind = _kind(path)
    if kind == ".zip":
        members = _members(path)
        inside = set(members).__contains__
        return [file for member in members for file in _classify(member, target, inside)]
    if kind == ".tmx":
        with open_file(path) as stream:
            languages = languages_of(stream, str(path))
        sources = sorted(languages - {target}) if target in languages else []
        return [BitextFile(language, (str(path),), "tmx", target) for language in sources]
    if kind == ".po":
        language = _po_language(path)
        pair = language and target == "en" != language
        return [BitextFile(language, (str(path),), "po", target)] if pair else []
    file = _table(path, target) or _moses(path, target, exists)
    return [file] if file else []


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in (".gz", ".xz") else path.suffix


def _table(path: Path, target: str) -> BitextFile | None:
    if match := _TABLE.fullmatch(path.name):
        source, other, form, _ = match.groups()
        if _code(other) == target and _code(source) != target:
            return BitextFile(_code(source), (str(path),), form, target)
    return None


def _moses(path: Path, target: str, exists: Callable[[Path], bool]) -> BitextFile | None:
    if (match := _SIDE.fullmatch(path.name)) and _code(match[2]) != target:
        sides = [f"{match[1]}.{code}{packed}" for code in (target, ISO3.get(target)) for packed in ("", ".gz", ".xz")]
        for other_side in map(path.with_name, sides):
            if exists(other_side):
                return BitextFile(_code(match[2]), (str(path), str(other_side)), "moses", target)
    return None


def _po_language(path: Path) -> str | None:
    """From the header of a catalogue, else from its folder or name; None where none of them tells it."""
    with open_file(path) as stream:
        header = re.search(rb'"Language: *([A-Za-z]{2,3})(?![A-Za-z])|$', stream.read(4096).partition(b"\n\n")[0])
    if header and header[1]:
        return base_language(header[1].decode())
    if path.parent.name == "LC_MESSAGES":
        return base_language(path.parent.parent.name)
    name = _CATALOGUE.fullmatch(path.name)
    return _code(name[1]) if name else None


def _target_side(path: Path, names: set[str], target: str) -> list[BitextFile]:
    """What the target side `a.en` of Moses pairs stands for: those source sides that are given too, else all."""
    pairs = [file for other in sorted(path.parent.iterdir()) if (file := _moses(other, target, Path.is_file))]
    pairs = [file for file in pairs if str(path) in file.paths]
    if not pairs:
        raise UserError(
            f"{path}: the name does not tell the language, or its other side is absent; expected {LAYOUTS}"
        )
    return [file for file in pairs if file.paths[0] in names] or pairs


def _find_hub(name: str, target: str) -> list[BitextFile]:
    """The configurations of a Hub dataset that pair a language with the target language."""
    from datasets import get_dataset_config_names

    dataset, _, config = name.partition(":")
    try:
        configs = [config] if config else get_dataset_config_names(dataset)
        languages = [(config, _hub_language(dataset, config, target)) for config in configs]
    except Exception as error:  # the Hub's client raises many unrelated classes
        raise FileNotFoundError(
            f"{name}: no such file or folder ({LAYOUTS}), and as a Hub dataset it cannot be read: {error}"
        ) from error
    files = [BitextFile(language, (dataset,), "hub", target, config) for config, language in languages if language]
    if not files:
        raise UserError(
            f"{name}: no configuration of {configs} pairs a language with {target!r}; a configuration is named "
            f"like 'de-{target}' or has a `translation` column of two languages"
        )
    return files


def _hub_language(dataset: str, config: str, target: str) -> str | None:
    """The other language of a configuration, from its name or from its `translation` column; None without target."""
    if match := re.fullmatch(f"({_LANGUAGE})-({_LANGUAGE})", config):
        codes = list(map(_code, match.groups()))
    else:
        features = hub_dataset(dataset, config, streaming=True).features or {}
        codes = list(map(_code, getattr(features.get("translation"), "languages", [])))
    others = [code for code in codes if code != target]
    return others[0] if len(codes) == 2 and len(others) == 1 else None


# Loading


def count_pairs(files: Iterable[BitextFile], max_bad_lines: float = 0.001) -> int:
    """The number of pairs in these files, by reading them once."""
    return sum(len(table) for file in files for table in read_tables(file, max_bad_lines))


def load_bitext(
    paths: str | Path | Sequence[str | Path],
    streaming: bool = False,
    max_bad_lines: float = 0.001,
    target_language: str = "en",
    cache_dir: str | Path | None = None,
) -> dict[str, Dataset] | dict[str, IterableDataset]:
    """One dataset a language, columns `source` and `target` (strings); files of one language follow each other.

    Streams have the column `row` (str) too, which names the pair whatever becomes of the stream's order: its number in
    the language's file, from 0, as the row of a map-style dataset; with several files `"name:number"`.

    Args:
        streaming: False reads everything once into Arrow files in `cache_dir`, memory mapped, and reuses them while
            paths, sizes and modification times stay the same. True reads on the fly, in file order, resumable; a bad
            file is then found only when its turn comes.
        max_bad_lines: share of a file's lines that may be bad.
        cache_dir: `dap` in the cache folder of `datasets` (`HF_DATASETS_CACHE`) unless given.

    Raises:
        ValueError, FileNotFoundError: as `find_bitext` and `read_pairs`.
    """
    found = find_bitext(paths, target_language)
    if streaming:
        return {language: _stream(files, max_bad_lines) for language, files in found.items()}
    folder = Path(cache_dir or Path(datasets_config.HF_DATASETS_CACHE) / "dap")
    return {
        language: concatenate_datasets([_load_cached(file, max_bad_lines, folder) for file in files])
        for language, files in found.items()
    }


def _stream(files: list[BitextFile], max_bad_lines: float) -> IterableDataset:
    LineAudit("", max_bad_lines)  # a wrong limit is found now, not at the first batch
    shards = [(replace(file, streaming=True), name) for file, name in zip(files, _names(files), strict=True)]
    arguments = {"shards": shards, "max_bad_lines": max_bad_lines}
    return IterableDataset.from_generator(_read_all, features=STREAM_FEATURES, gen_kwargs=arguments)


_READ_ONCE: set[str] = set()  # streamed files of whose bad lines this process has warned


def _read_all(shards: list[tuple[BitextFile, str]], max_bad_lines: float) -> Iterator[dict[str, str]]:
    for file, name in shards:
        for number, (_, source, target) in enumerate(numbered_pairs(file, max_bad_lines, str(file) in _READ_ONCE)):
            yield {"source": source, "target": target, "row": f"{name}{number}"}
        _READ_ONCE.add(str(file))


def _names(files: list[BitextFile]) -> list[str]:
    """What precedes the number in the rows of each file: nothing for one file, else its name, below what all share."""
    if len(files) == 1:
        return [""]
    folders = [os.path.dirname(file.paths[0]) for file in files if file.format != "hub"]
    shared = os.path.commonpath(folders) if folders else ""
    return [f"{file if file.format == 'hub' else os.path.relpath(file.paths[0], shared)}:" for file in files]


def _load_cached(file: BitextFile, max_bad_lines: float, folder: Path) -> Dataset:
    path = folder / f"{file.language}-{file.target_language}-{_fingerprint(file, max_bad_lines)}.arrow"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_arrow(read_tables(file, max_bad_lines), path)
    return Dataset.from_file(str(path))


def _fingerprint(file: BitextFile, max_bad_lines: float) -> str:
    """Changes with the path, size or modification time of a file, and with everything that shapes what is read."""
    if file.format == "hub":
        state: list[Any] = [hub_dataset(file.paths[0], file.config, False)._fingerprint]
    else:
        state = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, map(disk_path, file.paths))]
    return hashlib.sha256(repr((CACHE_VERSION, file, max_bad_lines, state)).encode()).hexdigest()[:16]


def _write_arrow(tables: Iterator[pa.Table], path: Path) -> None:
    """Writes the pairs as an Arrow stream that appears under its name only when it is whole."""
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    schema = FEATURES.arrow_schema
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for table in tables:
                writer.write_table(pa.table([table["source"], table["target"]], schema=schema), BATCH)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
