"""Which files hold which languages: the parallel text behind the files, folders and Hub ids that a user names.

Files are named as `LAYOUTS` says, or packed so (`.gz`, `.xz`, zip archives as OPUS' `en-fr.txt.zip`); Tatoeba's
`tatoeba.{xxx}-eng.{xxx}` + `….eng` are Moses pairs. A dataset of the Hub is `user/name` or `user/name:config`.

The language comes from the file name, ISO 639-1 or 639-3. A region or script is dropped: `pt-br-en.tsv`, `a.zh-CN` and
`deu_Latn-eng_Latn.tsv` are pt, zh and de. In capitals every region is known as one, in small letters those of
`REGIONS`; else what precedes the two codes is a name: `it-da-en.tsv` is da. A TMX file tells its languages itself,
and a PO file by its header (`Language:`), else by its name (`de.po`, `de/LC_MESSAGES/app.po`); the
target side of PO is English.
"""

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from datasets import Dataset, IterableDataset, get_dataset_config_names, load_dataset

from dap.errors import SHOWN, UserError, loading
from dap.languages import ISO3, NAMES, base_language
from dap.text.archives import disk_path, list_archive, list_folder
from dap.text.tmx_po import catalogue_language, memory_languages

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

LAYOUTS = (
    "{xx}-en.tsv[.gz|.xz], {xx}-en.jsonl[.gz|.xz], {xx}-en.parquet, Moses pairs name.{xx} + name.en, *.tmx, {xx}.po, "
    "*.zip of these ({xx}: a language code of 2 or 3 letters; the target language, in file names too, is the second)"
)

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
_TABLE = re.compile(
    rf"(?:.*?[._-])??({_LANGUAGE})-({_LANGUAGE})\.(?:tsv|jsonl|parquet)(?:\.gz|\.xz)?"
)
_CATALOGUE = re.compile(rf"(?:.*[._-])?({_LANGUAGE})\.po(?:\.gz|\.xz)?")
_SIDE = re.compile(rf"(.+)\.(?!(?:{NO_LANGUAGES})(?:\.|$))({_LANGUAGE})(?:\.gz|\.xz)?")
_PACKED = (".gz", ".xz")
#: What looks like parallel text, whether or not it can be read.
_PARALLEL = re.compile(
    r"(?i:.*\.(?:tsv|jsonl|parquet|tmx|po|zip)(?:\.(?:gz|xz|bz2|zst|lz4|7z))?)"
    rf"|(?:.*[._-])?{_LANGUAGE}-{_LANGUAGE}\.(?:txt|csv|json)(?:\.gz|\.xz)?"
)
_CLOSED = (".zip", ".parquet")
#: Id of a data set of the Hub, with a configuration or without.
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


Sides = dict[tuple[Path, str], dict[Path, str]]


@dataclass(frozen=True)
class BitextFile:
    """Where the pairs of one language are.

    Attributes:
        language: source language, ISO 639-1 where there is such a code among the 36, else the code as given.
        paths: one path; the source side and the target side for `"moses"`; the dataset id for `"hub"`.
        format: `"tsv"`, `"jsonl"`, `"parquet"`, `"moses"`, `"tmx"`, `"po"` or `"hub"`.
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


def find_bitext(
    paths: str | Path | Sequence[str | Path], target_language: str = "en"
) -> dict[str, list[BitextFile]]:
    """The files of each source language, languages in alphabetical order, each file once.

    Args:
        paths: files, folders (not searched but for `train/`, where they hold no text) or ids of Hub datasets. A Hub
            dataset is looked for only when there is no such path and the name has the form `user/name[:config]`.

    Raises:
        ValueError: no path is given, a name does not tell its language, or a folder holds no parallel text.
        FileNotFoundError: a path does not exist.
    """
    given = [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not given:
        raise UserError(
            f"no parallel text is given; name files or folders of {LAYOUTS}, or a Hub dataset id"
        )
    target = base_language(target_language)
    if not re.fullmatch("[a-z]{2,3}", target):
        raise UserError(
            f"target language {target_language!r}: expected a code of two or three letters, such as 'en'"
        )
    absolute = [Path(os.path.abspath(Path(path).expanduser())) for path in given]
    files = dict.fromkeys(
        file for pair in zip(given, absolute) for file in _files_of(*pair, absolute, target)
    )
    found: dict[str, list[BitextFile]] = {}
    for file in sorted(files, key=lambda file: file.language):
        found.setdefault(file.language, []).append(file)
    for language in found.keys() - NAMES.keys():
        name = str(found[language][0])
        _warn_once(
            "%s is taken for text in the language %r, which is none of the 36 known ones",
            name,
            language,
        )
    return found


def _files_of(given: str, path: Path, others: Collection[Path], target: str) -> list[BitextFile]:
    """The files that one argument stands for; `others` are the paths of all arguments."""
    if path.is_dir() or (path.is_file() and path.suffix == ".zip"):
        return _files_in(path, target)
    if path.is_file():
        return _files_at(path, others, target)
    if HUB_ID.fullmatch(given) and not _TABLE.fullmatch(path.name):
        return _find_hub(given, target)
    raise FileNotFoundError(
        f"{given}: no such file or folder; expected {LAYOUTS}, a folder of these, or a Hub dataset id"
    )


def _files_in(folder: Path, target: str) -> list[BitextFile]:
    """All parallel text in a folder or archive; what looks like some but tells no language is named in a warning."""
    paths = _list(folder)
    sides = _sides(paths)
    files = [file for path in paths for file in _classify(path, target, sides)]
    if (
        not files and (folder / "train").is_dir()
    ):  # as `datasets` takes such a folder, and `prepare_data.py` makes it
        return _files_in(folder / "train", target)
    if not files:
        names = ", ".join(path.name for path in paths[:SHOWN]) or "nothing"
        deeper = (
            sorted(f"{path}/" for path in folder.iterdir() if path.is_dir())
            if folder.is_dir()
            else []
        )
        hint = (
            f"; folders within are not searched, give {' or '.join(deeper[:SHOWN])} itself"
            if deeper
            else ""
        )
        raise UserError(
            f"{folder}: holds no parallel text but {names}; expected {LAYOUTS}, target {target!r}{hint}"
        )
    used = {Path(path) for file in files for name in file.paths for path in (name, disk_path(name))}
    for path in sorted(used):
        if path.suffix in _PACKED and path.with_suffix("") in used:
            raise UserError(
                f"{path.with_suffix('')} and {path} are the same text twice: keep one of them"
            )
    for path in dict.fromkeys(path for inside in paths for path in (disk_path(inside), inside)):
        if path not in used and _looks_parallel(path.name):
            reason = f"it tells no language that it pairs with {target!r}, or is packed or named otherwise than"
            logger.warning("%s is left out: %s %s", path, reason, LAYOUTS)
    return files


def _looks_parallel(name: str) -> bool:
    side = _SIDE.fullmatch(name)
    return bool(_PARALLEL.fullmatch(name) or side and base_language(side[2]) in NAMES)


def _list(folder: Path) -> list[Path]:
    """The files in a folder and in its archives, or in an archive; what cannot be read from one stays closed."""
    if folder.is_dir():
        return [
            inner
            for path in list_folder(folder)
            for inner in (_list(path) if path.suffix == ".zip" else [path])
        ]
    members = list_archive(folder)
    for path in members:
        if path.suffix in _CLOSED:
            logger.warning(
                "%s is left out: such a file is not read inside an archive; unpack it", path
            )
    return [path for path in members if path.suffix not in _CLOSED]


def _files_at(path: Path, others: Collection[Path], target: str) -> list[BitextFile]:
    """The parallel text of one file; of a Moses target side, the source sides given, else all."""
    side = _SIDE.fullmatch(path.name)
    named = list_folder(path.parent, f"{side[1]}.") if side else []
    sides = _sides(named)
    if files := _classify(path, target, sides):
        return files
    if _kind(path) in (".tmx", ".po"):
        raise UserError(
            f"{path}: tells no language that it pairs with {target!r} (xml:lang, or Language: in PO)"
        )
    beside = [file for other in named for file in _moses(other, target, sides)]
    files = [file for file in beside if str(path) in file.paths]
    if not files:
        raise UserError(
            f"{path}: the name does not tell the language, or its other side is absent; expected {LAYOUTS}"
        )
    return [file for file in files if Path(file.paths[0]) in others] or files


def _classify(path: Path, target: str, sides: Sides) -> list[BitextFile]:
    """The parallel text in a file, or whose source side it is; none where it tells no language."""
    kind = _kind(path)
    languages: set[str] = set()
    if kind == ".tmx":
        languages = memory_languages(path, target)
    elif kind == ".po" and target == "en":
        name = _CATALOGUE.fullmatch(path.name)
        named = path.parent.parent.name if path.parent.name == "LC_MESSAGES" else name and name[1]
        languages = {base_language(catalogue_language(path) or named or "en")} - {"en"}
    elif match := _TABLE.fullmatch(path.name):
        source, other = map(base_language, match.groups())
        languages = {source} if other == target != source else set()
    files = [BitextFile(language, (str(path),), kind[1:], target) for language in sorted(languages)]
    return files or _moses(path, target, sides)


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix


def _sides(paths: Sequence[Path]) -> Sides:
    """What may be Moses sides, by folder and name without the language: their languages' codes."""
    found: Sides = {}
    for path in paths:
        if match := _SIDE.fullmatch(path.name):
            found.setdefault((path.parent, match[1]), {})[path] = match[2]
    return found


def _moses(path: Path, target: str, sides: Sides) -> list[BitextFile]:
    """The pair of Moses sides whose source side is `path`; none if its target side does not exist."""
    match = _SIDE.fullmatch(path.name)
    if not match or base_language(match[2]) == target:
        return []
    beside = sides[path.parent, match[1]].items()
    others = [
        (code != target, code != ISO3.get(target), other)
        for other, code in beside
        if base_language(code) == target
    ]
    source = base_language(match[2])
    return [
        BitextFile(source, (str(path), str(other)), "moses", target)
        for *_, other in sorted(others)[:1]
    ]


def _find_hub(name: str, target: str) -> list[BitextFile]:
    """The configurations of a Hub dataset that pair a language with the target language."""
    dataset, _, config = name.partition(":")
    try:
        configs = [config] if config else get_dataset_config_names(dataset)
        languages = {config: _hub_languages(dataset, config) for config in configs}
    except Exception as error:  # the Hub's client raises many unrelated classes
        raise FileNotFoundError(
            f"{name}: no such file or folder ({LAYOUTS}), and as a Hub dataset it cannot be read: {error}"
        ) from error
    others = {
        config: set(pair) - {target}
        for config, pair in languages.items()
        if len(pair) == 2 and target in pair
    }
    files = [
        BitextFile(other.pop(), (dataset,), "hub", target, config)
        for config, other in others.items()
        if other
    ]
    if not files:
        raise UserError(
            f"{name}: no configuration of {configs} pairs a language with {target!r}; a configuration is named "
            f"like 'de-{target}' or has a `translation` column of two languages"
        )
    return files


def _hub_languages(dataset: str, config: str) -> list[str]:
    """The languages of a configuration, from its name or from its `translation` column."""
    if match := re.fullmatch(f"({_LANGUAGE})-({_LANGUAGE})", config):
        return list(map(base_language, match.groups()))
    features = hub_dataset(dataset, config, streaming=True).features or {}
    return list(map(base_language, getattr(features.get("translation"), "languages", [])))


def hub_dataset(dataset: str, config: str | None, streaming: bool) -> Dataset | IterableDataset:
    """The training split of a dataset of the Hub; raises `UserError` where there is none to be had."""
    with loading("training split", f"{dataset}:{config}" if config else dataset):
        return load_dataset(dataset, config, split="train", streaming=streaming)
