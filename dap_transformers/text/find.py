"""Find parallel text: which files, folders and Hub datasets hold which languages.

Files are named as `{xx}-en.tsv` or as Moses pairs (`name.{xx}` + `name.en`), also packed (`.gz`,
`.xz`) or in zip archives, such as OPUS' `en-fr.txt.zip`. A Hub dataset is `user/name` or
`user/name:config`.

The file name tells the language, as ISO 639-1 or 639-3. Regions and scripts are dropped:

- `pt-br-en.tsv`, `a.zh-CN` and `deu_Latn-eng_Latn.tsv` are pt, zh and de.
- Two capital letters are always a region. In small letters, only `REGIONS` are.
- Anything else before the two codes is part of the name: `it-da-en.tsv` is da.

A TMX file states its languages itself. A PO file states its language in its header (`Language:`),
otherwise in its name (`de.po`, `de/LC_MESSAGES/app.po`), and its target side is English.
"""

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from dap_transformers.errors import SHOWN, UserError, refusals
from dap_transformers.files import COMPRESSORS, plain_suffix
from dap_transformers.languages import ISO3, NAMES, base_language
from dap_transformers.text.archives import disk_path, list_archive, list_folder
from dap_transformers.text.formats import FORMATS, BitextFile, hub_dataset
from dap_transformers.text.tmx_po import catalogue_language, memory_languages

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

#: Regions that file names of known corpora write in small letters, by language.
REGIONS = {
    "ar": "ae|eg|ma|sa|sy", "bn": "bd|in", "de": "at|ch|de", "en": "au|ca|gb|in|uk|us",
    "es": "ar|cl|co|es|mx|pe|us", "eu": "es", "fa": "af|ir", "fr": "be|ca|ch|fr", "it": "ch|it",
    "nl": "be|nl", "pt": "ao|br|pt", "sw": "ke|tz", "ta": "in|lk", "ur": "in|pk",
    "zh": "cn|hk|mo|sg|tw|hans|hant",
}  # fmt: skip
#: Endings of two or three letters that are not the language of a Moses side, unless the name says
#: so twice, as in `X.en-sh.sh`.
NO_LANGUAGES = (
    "bak|bat|bin|bpe|bz|cfg|csv|dat|db|doc|err|gz|htm|idx|ids|ini|js|key|lck|log|lst|md|npy|npz|odt|"
    "old|out|pdf|pkl|po|pot|py|rar|rej|sgm|sh|sql|src|swp|tar|tex|tgt|tgz|tmp|tmx|tok|tsv|txt|vec|"
    "xls|xml|xz|yml|zip|zst"
)
#: Files that are not read from within an archive.
NOT_IN_ARCHIVES = (".zip", ".parquet")
#: The id of a Hub dataset, with or without a configuration.
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")

_SMALL_REGION = "|".join(f"{code}[-_](?:{regions})" for code, regions in REGIONS.items())
_REGION = r"[-_](?:[A-Z][a-z]{3}|[A-Z]{2}|[0-9]{3})"  # Latn, AT, 419
_LANGUAGE = rf"(?:{_SMALL_REGION}|[a-z]{{2,3}}(?:{_REGION})*)"
_ENDING = r"(?:\.gz|\.xz)?"
_PO_NAME = re.compile(rf"(?:.*[._-])?({_LANGUAGE})(?:@[A-Za-z0-9]+)?\.po{_ENDING}")
_MOSES_SIDE = re.compile(rf"(.+)\.(?!gz$|xz$)({_LANGUAGE}){_ENDING}")

#: Possible Moses sides: (folder, name without language) -> path -> code of the language.
MosesSides = dict[tuple[Path, str], dict[Path, str]]


def named_formats() -> list[str]:
    """Return the names of the formats whose file names tell both languages, such as "tsv".

    A function returns them, because users may add formats to `FORMATS`.
    """
    return [name for name, each in FORMATS.items() if each.languages_in_name]


def describe_layouts() -> str:
    """Return a text for error messages that lists the file names which `find_bitext` finds."""
    tables = ", ".join(f"{{xx}}-en.{name}" for name in named_formats())
    return (
        f"{tables}, Moses pairs name.{{xx}} + name.en, *.tmx, {{xx}}.po, with .gz or .xz, or *.zip "
        "of these ({xx}: a language code of 2 or 3 letters; the second code is the target language)"
    )


def _languages_in_name(name: str) -> tuple[str, str] | None:
    """Return the codes (source, target) in a file name such as `news.de-en.tsv.gz`.

    Regions and scripts are dropped. Returns None for a name that does not end in two languages
    and one of `named_formats`.
    """
    formats = "|".join(map(re.escape, named_formats()))
    match = re.fullmatch(
        rf"(?:.*?[._-])??({_LANGUAGE})-({_LANGUAGE})\.(?:{formats}){_ENDING}", name
    )
    return (base_language(match[1]), base_language(match[2])) if match else None


def find_bitext(
    paths: str | Path | Sequence[str | Path],
    target_language: str = "en",
    columns: Sequence[int] | None = None,
) -> dict[str, list[BitextFile]]:
    """Find the files with parallel text, and group them by source language.

    Files in a language other than the 36 known ones are included, with a warning.

    Args:
        paths: files, folders, zip archives or ids of Hub datasets. Subfolders are not searched,
            except `train/` if the folder itself holds no text. A Hub dataset is looked for only
            if there is no such path and the name has the form `user/name[:config]`.
        target_language: code of the targets' language.
        columns: the columns of source and target in TSV files, from 1. None: the first two.

    Returns:
        Source language code -> files. The languages are sorted, and each file occurs once.
    """
    given = [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not given:
        raise UserError(
            f"no parallel text is given; name files or folders of {describe_layouts()}, or a Hub "
            "dataset id"
        )
    with refusals("target language"):
        target = base_language(target_language)
    if columns is not None and (len(set(columns)) != 2 or len(columns) != 2 or min(columns) < 1):
        given = " ".join(map(str, columns))
        raise UserError(f"--columns {given}: give two columns from 1, source and target, as 2 3")

    absolute = [Path(os.path.abspath(Path(path).expanduser())) for path in given]
    files: dict[BitextFile, None] = {}  # a set that keeps the order
    for name, path in zip(given, absolute):
        files.update(dict.fromkeys(_files_of(name, path, absolute, target)))

    found: dict[str, list[BitextFile]] = {}
    for file in sorted(files, key=lambda file: file.language):
        if columns is not None and file.format == "tsv":
            file = replace(file, columns=tuple(columns))
        found.setdefault(file.language, []).append(file)
    for language in found.keys() - NAMES.keys():
        name = str(found[language][0])
        _warn_once("%s is taken for text in the unknown language %r", name, language)
    return found


def _files_of(given: str, path: Path, all_paths: Collection[Path], target: str) -> list[BitextFile]:
    """Find the parallel text at one of the paths that `find_bitext` is given.

    Returns:
        At least one file.
    """
    if path.is_dir() or (path.is_file() and path.suffix == ".zip"):
        return _files_in_folder(path, target)
    if path.is_file():
        return _files_at(path, all_paths, target)
    if HUB_ID.fullmatch(given) and not _languages_in_name(path.name):
        return find_hub_files(given, target)
    raise FileNotFoundError(
        f"{given}: no such file or folder; expected {describe_layouts()}, a folder of these, or a "
        "Hub dataset id"
    )


# -------------------------------------------------------------------------------------- folders


def _files_in_folder(folder: Path, target: str) -> list[BitextFile]:
    """Return all parallel text in a folder or zip archive.

    If the folder itself holds none, its subfolder `train/` is searched. Files that look like
    parallel text, but whose language cannot be told, are left out with a warning.
    """
    paths = _list_with_archives(folder)
    sides = _moses_sides(paths)
    files = []
    for path in paths:
        files += _classify(path, target, sides)

    if not files and (folder / "train").is_dir():  # the layout of `prepare-data` and `datasets`
        return _files_in_folder(folder / "train", target)
    if not files:
        raise UserError(_describe_folder_without_text(folder, paths, target))

    used = set()
    for file in files:
        for path in file.paths:
            used |= {Path(path), disk_path(path)}
    _require_no_packed_copy(used)
    _warn_of_unused_text(paths, used, target)
    return files


def _describe_folder_without_text(folder: Path, paths: Sequence[Path], target: str) -> str:
    """Return the error message for a folder without parallel text.

    It names a few of the files and subfolders that the folder has instead.
    """
    names = ", ".join(path.name for path in paths[:SHOWN]) or "nothing"
    message = (
        f"{folder}: no file is named for a language and the target {target!r}, such as "
        f"de-{target}.tsv; it holds {names}; expected {describe_layouts()}"
    )
    if folder.is_dir():
        subfolders = sorted(f"{path}/" for path in folder.iterdir() if path.is_dir())
        if subfolders:
            message += f"; subfolders are not searched, give {' or '.join(subfolders[:SHOWN])}"
    return message


def _require_no_packed_copy(used: set[Path]) -> None:
    """Raise `UserError` if a file and its packed copy (`.gz`, `.xz`) are both among the files."""
    for path in sorted(used):
        plain = path.with_suffix("")
        if path.suffix in COMPRESSORS and plain in used:
            raise UserError(f"{plain} and {path} are the same text twice: keep one of them")


def _warn_of_unused_text(paths: Sequence[Path], used: set[Path], target: str) -> None:
    """Warn of files and archives that look like parallel text but are not read."""
    candidates: dict[Path, None] = {}
    for path in paths:
        candidates[disk_path(path)] = None
        candidates[path] = None
    for path in candidates:
        if path not in used and _looks_parallel(path.name):
            logger.warning(
                "%s is left out: its name or content tells no language beside %r, or it is packed "
                "in another way than %s",
                path,
                target,
                describe_layouts(),
            )


def _looks_parallel(name: str) -> bool:
    """Tell whether a file name looks like parallel text, also in a form that is never read.

    Such forms are unknown packing (`.bz2`) and tables of other kinds (`de-en.csv`).
    """
    formats = "|".join(map(re.escape, [*named_formats(), "tmx", "po", "zip"]))
    if re.fullmatch(rf"(?i:.*\.(?:{formats})(?:\.(?:gz|xz|bz2|zst|lz4|7z))?)", name):
        return True
    if re.fullmatch(rf"(?:.*[._-])?{_LANGUAGE}-{_LANGUAGE}\.(?:txt|csv|json){_ENDING}", name):
        return True
    side = _moses_side(name)
    return side is not None and base_language(side[1]) in NAMES


def _list_with_archives(folder: Path) -> list[Path]:
    """List the files in a folder and in its zip archives, or the files in one zip archive.

    Hidden files and subfolders are left out. Archives and Parquet files inside an archive are
    left out with a warning, because they cannot be read there.
    """
    if folder.is_dir():
        files = []
        for path in list_folder(folder):
            files += _list_with_archives(path) if path.suffix == ".zip" else [path]
        return files

    members = []
    for path in list_archive(folder):
        if path.suffix in NOT_IN_ARCHIVES:
            logger.warning("%s is left out: it is not read inside an archive; unpack it", path)
        else:
            members.append(path)
    return members


# ---------------------------------------------------------------------------------------- files


def _files_at(path: Path, all_paths: Collection[Path], target: str) -> list[BitextFile]:
    """Return the parallel text of one file, which may be one side of a Moses pair.

    A Moses pair is two files, such as `news.de` and `news.en`, whose lines translate each other.
    A target side may have several source sides. It stands for its pairs with those that are also
    given. If none is given, it stands for its pairs with all that are in its folder.

    Returns:
        At least one file. A TMX file or a Moses target side may give several, one for each
        language.
    """
    side = _moses_side(path.name)
    beside = list_folder(path.parent, f"{side[0]}.") if side else []
    sides = _moses_sides(beside)
    files = _classify(path, target, sides)
    if files:
        return files
    if plain_suffix(path) in (".tmx", ".po"):
        raise UserError(
            f"{path}: states no language beside {target!r} (xml:lang, or Language: in PO)"
        )

    for source_side in beside:
        for file in _moses_pair(source_side, target, sides):
            if str(path) in file.paths:
                files.append(file)
    if not files:
        raise UserError(
            f"{path}: the name does not tell the languages, or its other side is absent; rename "
            f"the file, for example to de-{target}.tsv for German. Expected {describe_layouts()}"
        )
    given = [file for file in files if Path(file.paths[0]) in all_paths]
    return given or files


def _classify(path: Path, target: str, sides: MosesSides) -> list[BitextFile]:
    """Return the parallel text in a file, one `BitextFile` for each source language.

    A TMX file may have several source languages. A PO file counts only if the target language is
    English. The list is empty if the file tells no source language, or if it is the target side
    of a Moses pair.
    """
    kind = plain_suffix(path)
    languages: set[str] = set()
    if kind == ".tmx":
        languages = memory_languages(path, target)
    elif kind == ".po" and target == "en":
        languages = {_po_source_language(path)} - {"en"}
    elif named := _languages_in_name(path.name):
        source, other = named
        if other == target != source:
            languages = {source}
    if languages:
        return [BitextFile(code, (str(path),), kind[1:], target) for code in sorted(languages)]
    return _moses_pair(path, target, sides)


def _po_source_language(path: Path) -> str:
    """Return the language of a PO file's translations.

    The file's header states it. Otherwise it comes from the path, which ends in
    `de/LC_MESSAGES/NAME.po` or `de.po`. If nothing states it, return English ("en").
    """
    code = catalogue_language(path)
    if code is None and path.parent.name == "LC_MESSAGES":
        code = path.parent.parent.name
    elif code is None:
        match = _PO_NAME.fullmatch(path.name)
        code = match[1] if match else "en"
    with refusals(str(path)):
        return base_language(code)


def _moses_side(name: str) -> tuple[str, str] | None:
    """Split a file name such as `news.de.gz` into the name ("news") and the language code ("de").

    Returns None if the name has no such form, or an ending that is no language.
    """
    match = _MOSES_SIDE.fullmatch(name)
    if not match:
        return None
    stem, code = match.groups()
    pairs = rf"(?:.*[._-])?(?:{_LANGUAGE}-{code}|{code}-{_LANGUAGE})"
    if re.fullmatch(NO_LANGUAGES, code) and not re.fullmatch(pairs, stem):
        return None
    return stem, code


def _moses_sides(paths: Sequence[Path]) -> MosesSides:
    """Group files that may be sides of Moses pairs by folder and by name without language code.

    A Moses pair is two files, such as `news.de` and `news.en`, whose lines translate each other.
    Other files are left out.

    Returns:
        (folder, name without language) -> {path: language code}, as in
        `{(folder, "news"): {news.de: "de", news.en: "en"}}`.
    """
    found: MosesSides = {}
    for path in paths:
        if side := _moses_side(path.name):
            name, code = side
            found.setdefault((path.parent, name), {})[path] = code
    return found


def _moses_pair(path: Path, target: str, sides: MosesSides) -> list[BitextFile]:
    """Return a list with the Moses pair that has this source side. It is empty if there is none.

    A Moses pair is two files, such as `news.de` and `news.en`, whose lines translate each other.
    If several files may be the target side, `.en` is preferred to `.eng`, and `.eng` to `.en-US`.
    """
    side = _moses_side(path.name)
    if not side:
        return []
    name, code = side
    source = base_language(code)
    if source == target:
        return []
    # Of several target sides, prefer `.en` to `.eng`, and both to `.en-US`.
    candidates = []
    for other, code in sides[path.parent, name].items():
        if base_language(code) == target:
            candidates.append((code != target, code != ISO3.get(target), other))
    if not candidates:
        return []
    _, _, target_side = min(candidates)
    return [BitextFile(source, (str(path), str(target_side)), "moses", target)]


# --------------------------------------------------------------------------------- Hub datasets


def find_hub_files(name: str, target: str) -> list[BitextFile]:
    """Find the configurations of a Hub dataset that pair a language with the target language.

    Args:
        name: `user/name` for all configurations, or `user/name:config` for one.
        target: the target language.

    Returns:
        One `BitextFile` for each of these configurations, at least one. No rows are downloaded.
    """
    from datasets import get_dataset_config_names

    dataset, _, config = name.partition(":")
    languages: dict[str, list[str]] = {}
    try:
        configs = [config] if config else get_dataset_config_names(dataset)
        for each in configs:
            languages[each] = _hub_languages(dataset, each)
    except Exception as error:  # the Hub's client raises many unrelated classes
        raise FileNotFoundError(
            f"{name}: no such file or folder ({describe_layouts()}), and as a Hub dataset it "
            f"cannot be read: {error}"
        ) from error

    files = []
    for each, pair in languages.items():
        others = set(pair) - {target}
        if len(pair) == 2 and target in pair and others:
            files.append(BitextFile(others.pop(), (dataset,), "hub", target, each))
    if not files:
        raise UserError(
            f"{name}: no configuration of {configs} pairs a language with {target!r}; a "
            f"configuration is named like 'de-{target}' or has a `translation` column of two "
            "languages"
        )
    return files


def _hub_languages(dataset: str, config: str) -> list[str]:
    """Return the language codes of a Hub dataset's configuration, or an empty list.

    They come from the configuration's name, such as "de-en". If it is no such name, they come
    from the languages of the column `translation`.
    """
    if match := re.fullmatch(f"({_LANGUAGE})-({_LANGUAGE})", config):
        return [base_language(code) for code in match.groups()]
    features = hub_dataset(dataset, config, streaming=True).features or {}
    codes = getattr(features.get("translation"), "languages", [])
    return [base_language(code) for code in codes]
