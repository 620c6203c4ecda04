"""Find and read parallel text: the one place that knows file formats (no models, no tokenizers).

A corpus is one or many files or folders of `{xx}-en.tsv[.gz|.xz]`, `{xx}-en.jsonl[.gz|.xz]`, `{xx}-en.parquet`,
Moses pairs `name.{xx}` + `name.en` (Tatoeba's `tatoeba.{xxx}-eng.{xxx}` + `….eng` is one of them), or a dataset of
the Hub (`user/name` or `user/name:config`). The language comes from the file name, ISO 639-1 or 639-3. A region or
script is dropped: `pt-br-en.tsv`, `a.zh-CN` and `deu_Latn-eng_Latn.tsv` are pt, zh and de. In capitals every region
is known as one, in small letters those of `REGIONS`; else what precedes the two codes is a name: `it-da-en.tsv` is da.

Text is taken as it stands: quotes are text, and only a line feed (or CR + LF) ends a line, so that U+2028 or U+0085
inside a sentence do not tear it apart.

A *bad line* has one column, an empty side, invalid UTF-8 or invalid JSON. Bad lines are logged, counted and skipped
while their share of a file stays within `max_bad_lines`. The share is judged at the end of the file: one bad line
among the first ten says nothing about a file of a million. Reading stops earlier only when there are more bad lines
than the first 100,000 lines (or all lines read so far, if more) may have, as a longer file is judged from there on.
"""

import gzip
import hashlib
import io
import json
import logging
import lzma
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets import config as datasets_config

from dap.languages import ISO3, NAMES, to_iso1

logger = logging.getLogger(__name__)

FEATURES = Features({"source": Value("string"), "target": Value("string")})
STREAM_FEATURES = Features({**FEATURES, "row": Value("string")})
LAYOUTS = (
    "{xx}-en.tsv[.gz|.xz], {xx}-en.jsonl[.gz|.xz], {xx}-en.parquet, or Moses pairs name.{xx} + name.en "
    "({xx}: a language code of 2 or 3 letters; the target language, in file names too, is the second one)"
)
JUDGE_AFTER = 100_000  # lines
SHOWN = 5  # bad lines quoted in a warning or an error, per file
BLOCK = 10_000  # pairs written at once
CACHE_VERSION = 1

#: Regions that file names of known corpora write in small letters, by language.
REGIONS = {
    "ar": "ae|eg|ma|sa|sy", "bn": "bd|in", "de": "at|ch|de", "en": "au|ca|gb|in|uk|us", "es": "ar|cl|co|es|mx|pe|us",
    "eu": "es", "fa": "af|ir", "fr": "be|ca|ch|fr", "it": "ch|it", "nl": "be|nl", "pt": "ao|br|pt", "sw": "ke|tz",
    "ta": "in|lk", "ur": "in|pk", "zh": "cn|hk|mo|sg|tw|hans|hant",
}  # fmt: skip
#: Endings of two or three letters that tell what a file holds, not the language of a Moses side.
NO_LANGUAGES = (
    "bak|bat|bin|bpe|bz|cfg|csv|dat|db|doc|err|gz|htm|idx|ids|ini|js|key|lck|log|lst|md|npy|npz|odt|old|out|pdf|pkl|"
    "py|rar|rej|sgm|sh|sql|src|swp|tar|tex|tgt|tgz|tmp|tmx|tok|tsv|txt|vec|xls|xml|xz|yml|zip|zst"
)

_SMALL = "|".join(f"{code}[-_](?:{regions})" for code, regions in REGIONS.items())
_LANGUAGE = rf"(?:{_SMALL}|[a-z]{{2,3}}(?:[-_](?:[A-Z][a-z]{{3}}|[A-Z]{{2}}|[0-9]{{3}}))*)"
_TABLE = re.compile(rf"(?:.*?[._-])??({_LANGUAGE})-({_LANGUAGE})\.(tsv|jsonl|parquet)(\.gz|\.xz)?")
_SIDE = re.compile(rf"(.+)\.(?!(?:{NO_LANGUAGES})(?:\.|$))({_LANGUAGE})(\.gz|\.xz)?")
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


@dataclass(frozen=True)
class BitextFile:
    """Where the pairs of one language are.

    Attributes:
        language: source language, ISO 639-1 where there is such a code among the 36, else the code as given.
        paths: one path; the source side and the target side for `"moses"`; the dataset id for `"hub"`.
        format: `"tsv"`, `"jsonl"`, `"parquet"`, `"moses"` or `"hub"`.
        target_language: target language, `"en"` unless asked otherwise.
        config: configuration of a dataset of the Hub.
        streaming: read a dataset of the Hub without downloading it first.
    """

    language: str
    paths: tuple[str, ...]
    format: str
    target_language: str = "en"
    config: str | None = None
    streaming: bool = False

    def __str__(self) -> str:
        return " + ".join(self.paths) + (f":{self.config}" if self.config else "")


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
        raise ValueError(f"no parallel text is given; name files or folders of {LAYOUTS}, or a Hub dataset id")
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
    if path.is_dir():
        return _folder(path, target)
    if path.is_file():
        file = _classify(path, target)
        return [file] if file else _target_side(path, names, target)
    if _HUB.fullmatch(given) and not _TABLE.fullmatch(path.name):
        return _find_hub(given, target)
    raise FileNotFoundError(
        f"{given}: no such file or folder; expected {LAYOUTS}, a folder of these, or a Hub dataset id"
    )


def _classify(path: Path, target: str) -> BitextFile | None:
    """The corpus that this file is (or whose source side it is); None where its name tells no language."""
    if match := _TABLE.fullmatch(path.name):
        source, other, form, _ = match.groups()
        if _code(other) == target and _code(source) != target:
            return BitextFile(_code(source), (str(path),), form, target)
    if (match := _SIDE.fullmatch(path.name)) and _code(match[2]) != target:
        sides = [f"{match[1]}.{code}{packed}" for code in (target, ISO3.get(target)) for packed in ("", ".gz", ".xz")]
        for other_side in map(path.with_name, sides):
            if other_side.is_file():
                return BitextFile(_code(match[2]), (str(path), str(other_side)), "moses", target)
    return None


def _folder(folder: Path, target: str) -> list[BitextFile]:
    """All corpora in a folder; a table whose name tells no language is left out with a warning."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    files = [file for path in paths if (file := _classify(path, target))]
    if not files:
        names = ", ".join(path.name for path in paths[:SHOWN]) or "nothing"
        raise ValueError(f"{folder}: holds no parallel text but {names}; expected {LAYOUTS}, target {target!r}")
    used = {path for file in files for path in file.paths}
    for path in paths:
        if str(path) not in used and re.search(r"\.(tsv|jsonl|parquet)(\.gz|\.xz)?$", path.name):
            logger.warning("%s is left out: its name is not {xx}-%s.…", path, target)
    return files


def _target_side(path: Path, names: set[str], target: str) -> list[BitextFile]:
    """What the target side `a.en` of Moses pairs stands for: those source sides that are given too, else all."""
    pairs = [file for other in sorted(path.parent.iterdir()) if (file := _classify(other, target))]
    pairs = [file for file in pairs if str(path) in file.paths]
    if not pairs:
        raise ValueError(
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
        raise ValueError(
            f"{name}: no configuration of {configs} pairs a language with {target!r}; a configuration is named "
            f"like 'de-{target}' or has a `translation` column of two languages"
        )
    return files


def _hub_language(dataset: str, config: str, target: str) -> str | None:
    """The other language of a configuration, from its name or from its `translation` column; None without target."""
    if match := re.fullmatch(f"({_LANGUAGE})-({_LANGUAGE})", config):
        codes = list(map(_code, match.groups()))
    else:
        features = _hub_dataset(dataset, config, streaming=True).features or {}
        codes = list(map(_code, getattr(features.get("translation"), "languages", [])))
    others = [code for code in codes if code != target]
    return others[0] if len(codes) == 2 and len(others) == 1 else None


def _hub_dataset(dataset: str, config: str | None, streaming: bool) -> Dataset | IterableDataset:
    from datasets import load_dataset

    return load_dataset(dataset, config, split="train", streaming=streaming)


# Reading


class LineAudit:
    """Counts the bad lines of one file and raises when they are too many (see the module's docstring).

    A `quiet` one warns of none: those of a stream's later passes are known.
    """

    def __init__(self, name: str, max_bad_lines: float, quiet: bool = False) -> None:
        if not 0.0 <= max_bad_lines <= 1.0:
            raise ValueError(f"max_bad_lines is the share of lines that may be bad, 0 to 1, not {max_bad_lines}")
        self.name, self.limit, self.quiet = name, max_bad_lines, quiet
        self.bad = 0
        self.first: list[str] = []

    def reject(self, line: int, reason: object) -> None:
        """Counts line number `line` (from 1) as bad."""
        self.bad += 1
        if self.bad <= SHOWN:
            self.first.append(f"line {line}: {reason}")
        level = logging.DEBUG if self.quiet else logging.WARNING if self.bad <= SHOWN else logging.INFO
        logger.log(level, "%s, line %d skipped: %s", self.name, line, reason)
        if self.bad > self.limit * max(line, JUDGE_AFTER):
            self._stop(line)

    def finish(self, lines: int) -> None:
        """The verdict over the whole file of `lines` lines."""
        if self.bad > self.limit * lines:
            self._stop(lines)
        if self.bad and not self.quiet:
            logger.warning("%s: %d of %d lines skipped (limit %.3g%%)", self.name, self.bad, lines, 100 * self.limit)

    def _stop(self, lines: int) -> None:
        quoted = "\n  ".join(self.first + ["…"] * (self.bad > len(self.first)))
        raise ValueError(
            f"{self.name}: {self.bad} of the first {lines} lines are bad, more than max_bad_lines={self.limit:g} "
            f"({100 * self.limit:g}%) allows:\n  {quoted}\nRepair the file, or raise max_bad_lines to skip them."
        ) from None


def read_pairs(file: BitextFile, max_bad_lines: float = 0.001) -> Iterator[dict[str, str]]:
    """The pairs of one file in its order, as `{"source": …, "target": …}`.

    Args:
        max_bad_lines: share of the file's lines that may be bad (0 to 1); 0 stops at the first one.

    Raises:
        ValueError: too many bad lines, not a single pair, sides of different length, damaged file, missing columns.
    """
    for source, target in _pairs(file, max_bad_lines):
        yield {"source": source, "target": target}


def count_pairs(files: Iterable[BitextFile], max_bad_lines: float = 0.001) -> int:
    """The number of pairs in these files, by reading them once."""
    return sum(1 for file in files for _ in _pairs(file, max_bad_lines))


def _pairs(file: BitextFile, max_bad_lines: float, quiet: bool = False) -> Iterator[tuple[str, str]]:
    audit = LineAudit(str(file), max_bad_lines, quiet)
    rows, parse = _READERS[file.format]
    number = 0
    for number, row in enumerate(rows(file), 1):
        try:
            pair = parse(row)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            audit.reject(number, f"invalid UTF-8: byte 0x{byte:02x} at offset {error.start} of the line")
        except ValueError as error:
            audit.reject(number, error)
        else:
            yield pair
    audit.finish(number)
    if audit.bad == number:
        raise ValueError(f"{file}: holds no pair of language {file.language!r}; remove the file or fill it")


def _parse_tsv(line: bytes) -> tuple[str, str]:
    cells = line.decode().split("\t", 2)
    if len(cells) < 2:
        raise ValueError("one column, expected source<TAB>target")
    return _both(cells[0], cells[1])


def _parse_json(line: bytes) -> tuple[str, str]:
    record = json.loads(line.decode())
    if not (isinstance(record, dict) and {"source", "target"} <= record.keys()):
        raise ValueError('expected an object {"source": …, "target": …}')
    source, target = _both(record["source"], record["target"])
    f"{source}{target}".encode()  # "\ud800" is valid JSON but no text: UnicodeEncodeError, a ValueError
    return source, target


def _parse_sides(sides: tuple[bytes, bytes]) -> tuple[str, str]:
    return _both(sides[0].decode(), sides[1].decode())


def _both(source: Any, target: Any) -> tuple[str, str]:
    if type(source) is type(target) is str and source and target and not (source.isspace() or target.isspace()):
        return source, target
    side, text = ("target", target) if isinstance(source, str) and source.strip() else ("source", source)
    raise ValueError(f"empty {side} side" if isinstance(text, str) else f"{side} side is {text!r}, expected text")


def _tsv_rows(file: BitextFile) -> Iterator[bytes]:
    return _lines(file.paths[0])


def _moses_rows(file: BitextFile) -> Iterator[tuple[bytes, bytes]]:
    source, target = file.paths
    counts = _count_lines(source), _count_lines(target)
    if counts[0] != counts[1]:
        raise ValueError(
            f"the two sides differ in length: {source} has {counts[0]} lines, {target} has {counts[1]}; "
            f"line i of one must translate line i of the other"
        )
    return zip(_lines(source), _lines(target), strict=True)


def _parquet_rows(file: BitextFile) -> Iterator[tuple[Any, Any]]:
    try:
        with pq.ParquetFile(file.paths[0]) as table:
            names = table.schema_arrow.names
            if not {"source", "target"} <= set(names):
                raise ValueError(f"{file}: columns are {names}; expected 'source' and 'target': rename them")
            for block in table.iter_batches(BLOCK, columns=["source", "target"]):
                yield from zip(block["source"].to_pylist(), block["target"].to_pylist(), strict=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: damaged or no Parquet file ({error}); fetch or write it again") from error


def _hub_rows(file: BitextFile) -> Iterator[tuple[Any, Any]]:
    dataset = _hub_dataset(file.paths[0], file.config, file.streaming)
    columns = dataset.column_names or list(next(iter(dataset), {}))  # a stream may not know them beforehand
    if "translation" not in columns and not {"source", "target"} <= set(columns):
        raise ValueError(f"{file}: columns are {columns}; expected 'source' and 'target', or 'translation'")
    swapped = _code((file.config or "").split("-")[0] or file.language) == file.target_language
    for record in dataset:
        if "translation" in record:
            sides = {_code(code): text for code, text in record["translation"].items()}
            yield sides.get(file.language), sides.get(file.target_language)
        else:
            yield (record["target"], record["source"]) if swapped else (record["source"], record["target"])


_READERS: dict[str, tuple[Callable[[BitextFile], Iterator[Any]], Callable[[Any], tuple[str, str]]]] = {
    "tsv": (_tsv_rows, _parse_tsv),
    "jsonl": (_tsv_rows, _parse_json),
    "moses": (_moses_rows, _parse_sides),
    "parquet": (_parquet_rows, lambda sides: _both(*sides)),
    "hub": (_hub_rows, lambda sides: _both(*sides)),
}


def _open(path: str) -> BinaryIO:
    opener: Callable[..., Any] = {".gz": gzip.open, ".xz": lzma.open}.get(Path(path).suffix, open)
    return io.BufferedReader(opener(path, "rb"), 1 << 20)  # lines in C, whatever is below


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a file without their end, nor the byte order mark that some editors write."""
    try:
        with _open(path) as stream:
            if stream.peek(3)[:3] == b"\xef\xbb\xbf":
                stream.read(3)
            for line in stream:
                yield line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged or truncated compressed file ({error}); fetch it again") from error


def _count_lines(path: str) -> int:
    return sum(1 for _ in _lines(path))


def read_sentences(path: str | Path) -> Iterator[str]:
    """The lines of one monolingual text, `.gz` and `.xz` unpacked, empty ones included: line i is sentence i.

    Raises:
        ValueError: invalid UTF-8, named by its line, or a damaged compressed file.
        FileNotFoundError: no such file.
    """
    for number, line in enumerate(_lines(str(path)), 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{path}, line {number}: invalid UTF-8: byte 0x{byte:02x} at offset {error.start}; repair the line"
            ) from error


# Loading


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
        for number, (source, target) in enumerate(_pairs(file, max_bad_lines, str(file) in _READ_ONCE)):
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
        _write_arrow(_pairs(file, max_bad_lines), path)
    return Dataset.from_file(str(path))


def _fingerprint(file: BitextFile, max_bad_lines: float) -> str:
    """Changes with the path, size or modification time of a file, and with everything that shapes what is read."""
    if file.format == "hub":
        state: list[Any] = [_hub_dataset(file.paths[0], file.config, False)._fingerprint]
    else:
        state = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, file.paths)]
    return hashlib.sha256(repr((CACHE_VERSION, file, max_bad_lines, state)).encode()).hexdigest()[:16]


def _write_arrow(pairs: Iterator[tuple[str, str]], path: Path) -> None:
    """Writes the pairs as an Arrow stream that appears under its name only when it is whole."""
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    schema = FEATURES.arrow_schema
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            while block := list(islice(pairs, BLOCK)):
                columns = [pa.array(side, pa.string()) for side in zip(*block, strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
