"""Find parallel text: which files, folders and Hub datasets hold which languages.

Files are named as `{xx}-en.tsv` or as Moses pairs (`name.{xx}` + `name.en`), also packed (`.gz`,
`.xz`) or in zip archives, such as OPUS' `en-fr.txt.zip`. A Hub dataset is `user/name` or
`user/name:config`.

The file name tells the language, as ISO 639-1 or 639-3. Regions and scripts are dropped:

- `pt-br-en.tsv`, `a.zh-CN` and `deu_Latn-eng_Latn.tsv` are pt, zh and de.
- Two capital letters are always a region. In small letters, only `languages.REGIONS` are.
- Anything else before the two codes is part of the name: `it-da-en.tsv` is da.

A TMX file states its languages itself. A PO file states its language in its header (`Language:`),
otherwise in its name (`de.po`, `de/LC_MESSAGES/app.po`), and its target side is English.
"""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from dap_transformers.errors import UserError, reading, warn_once
from dap_transformers.files import plain_suffix, unpacked
from dap_transformers.languages import LANGUAGE_TAG, NAMES, base_language, language_in
from dap_transformers.text.archives import disk_path, list_archive, list_folder
from dap_transformers.text.formats import FORMATS, BitextFile, hub_dataset, is_mined
from dap_transformers.text.tmx_po import catalogue_languages, memory_languages
from dap_transformers.text.tsv_csv import UNDETERMINED, find_columns

#: Formats whose file names do not tell both languages.
OTHER_FORMATS = ("moses", "tmx", "po", "hub")
#: Split -> splits that are read for it, the best first. None stands for files that name no split.
PREFERRED = {
    "train": ({"train", None},),
    "test": ({"test"}, {None}, {"dev"}),
    "dev": ({"dev"}, {None}, {"test"}),
}
#: What `prepare-data` writes beside the text.
LEAKS = "leaks.jsonl"
#: How many files a message names before it only counts.
NAMED = 10
#: Endings of bilingual files that are not read.
XLIFF = ("xlf", "xliff", "sdlxliff")
#: Endings of packed files that are not read.
OTHER_PACKING = ("bz2", "zst")
#: Endings of two or three letters that are not the language of a Moses side, unless the name before
#: them has the code, too, as in `X.en-sh.sh`.
NOT_A_LANGUAGE = (
    "bak|bat|bin|bpe|bz|cfg|csv|dat|db|doc|err|gz|htm|idx|ids|ini|js|key|lck|log|lst|md|npy|npz|odt|"
    "old|out|pdf|pkl|po|pot|py|rar|rej|sgm|sh|sql|src|swp|tar|tex|tgt|tgz|tmp|tmx|tok|tsv|txt|vec|"
    "xls|xml|xz|yml|zip|zst"
)
_TAG = f"({LANGUAGE_TAG})"
_BEFORE = "(?:.*?[._-])??"
_PACKED = r"(?:\.gz|\.xz)?"
#: File names with two languages, such as `news.de-en.tsv.gz`, in a PO file and of a Moses side.
_PAIR = re.compile(rf"{_BEFORE}{_TAG}-{_TAG}\.\w+{_PACKED}")
_PO = re.compile(rf"{_BEFORE}{_TAG}(?:@[A-Za-z0-9]+)?\.po{_PACKED}")
_MOSES = re.compile(rf"(.+)\.(?!gz$|xz$){_TAG}{_PACKED}")
#: A Hub dataset, and its configuration for two languages.
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")
_CONFIGURATION = re.compile(f":{_TAG}-{_TAG}$")
#: Words that name a split of the text: those of `datasets`, and of shared tasks.
SPLITS = {
    "train": "train", "training": "train", "validation": "dev", "valid": "dev", "val": "dev",
    "dev": "dev", "devel": "dev", "devset": "dev", "newsdev": "dev", "newsdiscussdev": "dev",
    "tune": "dev", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "testset": "test", "devtest": "test", "tst": "test", "newstest": "test", "newstestb": "test",
    "newsdiscusstest": "test", "generaltest": "test", "wmttest": "test",
}  # fmt: skip


def _named_formats() -> list[str]:
    """Return the formats whose file names tell both languages."""
    return [name for name in FORMATS if name not in OTHER_FORMATS]


def describe_layouts() -> str:
    """Return a text for error messages that lists the file names which `find_bitext` finds."""
    formats = "|".join(_named_formats())
    return (
        f"{{xx}}-en.({formats}), Moses pairs name.{{xx}} + name.en, *.tmx, {{xx}}.po, a "
        ".csv or .tsv whose first line is {xx},en or lang,source,target, with .gz or .xz, or *.zip "
        "of these ({xx}: a language code; en: the target language, whose text comes second, so "
        "swap the columns of en-{xx}.tsv before you rename it); see docs/training.md"
    )


def find_bitext(
    paths: str | Path | Sequence[str | Path],
    target_language: str = "en",
    split: str | None = "train",
) -> dict[str, list[BitextFile]]:
    """Find the files with parallel text, and group them by source language.

    Files in a language other than the 36 known ones are included, with a warning.

    Args:
        paths: files, folders, zip archives or ids of Hub datasets. Subfolders are not searched,
            except those named for the split if the folder itself holds no text of it.
        split: "train", "dev" or "test". Files of other splits are left out of a folder, with a
            warning. If it has none of this split, the next one in `PREFERRED` is read, or else all.
            None reads all. Files that are given themselves are always read.

    Returns:
        Source language code -> files. The languages are sorted, and each file occurs once.
    """
    given = [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not given:
        raise UserError(f"no parallel text is given: name files or folders of {describe_layouts()}")
    target = base_language(target_language)
    absolute = [Path(os.path.abspath(Path(path).expanduser())) for path in given]
    files: dict[BitextFile, None] = {}  # a set that keeps the order
    for name, path in zip(given, absolute):
        if path.is_dir() or (path.is_file() and path.suffix == ".zip"):
            found = _files_in_folder(path, target, split)
        elif path.is_file():
            found = _files_at(path, absolute, target)
        elif _HUB.fullmatch(name) and not _PAIR.fullmatch(path.name):
            found = find_hub_files(name, target)
        else:
            raise FileNotFoundError(f"{name}: no such file or folder")
        files.update(dict.fromkeys(found))

    by_language: dict[str, list[BitextFile]] = {}
    for file in sorted(files, key=lambda file: file.language):
        by_language.setdefault(file.language, []).append(file)
    for language in by_language.keys() - NAMES.keys():
        name = str(by_language[language][0])
        warn_once(
            "%s: %r is not one of the 36 languages: its script is not checked", name, language
        )
    return by_language


# -------------------------------------------------------------------------------------- folders


def _files_in_folder(folder: Path, target: str, split: str | None) -> list[BitextFile]:
    """Return the parallel text of a split in a folder or zip archive."""
    paths = _list_with_archives(folder)
    files = _parallel_text(paths, target)
    splits = [_split_in(Path(file.paths[0]).relative_to(folder)) for file in files]
    if not files or (split and PREFERRED[split][0].isdisjoint(splits)):
        # perhaps the layout of `prepare-data` and `datasets`
        for path in sorted(folder.glob("[!.]*/")):
            is_named = _folder_split(path) == (split or "train")
            if is_named and _parallel_text(_list_with_archives(path), target):
                found = _files_in_folder(path, target, split)
                files += found
                splits += [split] * len(found)
    if not files:
        names = _listed(folder, paths) or "nothing"
        raise UserError(
            f"{folder}: no file is named for a language and the target {target!r}, such as "
            f"de-{target}.tsv; it holds {names}; expected {describe_layouts()}; subfolders are not "
            "searched, give them instead"
        )
    _warn_of_others(folder, paths, files, target, split)
    return _of_split(files, splits, split)


def _warn_of_others(
    folder: Path, paths: Sequence[Path], files: Sequence[BitextFile], target: str, split: str | None
) -> None:
    """Warn of paths and subfolders that look like parallel text, but are not among the files.

    Raises:
        UserError: if a text is there twice, as it is and packed.
    """
    used = {folder / LEAKS}
    for file in files:
        for path in file.paths:
            used |= {Path(path), disk_path(path), Path(f"{path}.json")}  # a report of `mine-bitext`
    for path in sorted(used):
        plain = disk_path(path).with_name(unpacked(path).name)  # beside itself or its archive
        if plain != path and plain in used:
            raise UserError(f"{plain} and {path} may be one text: remove one, or rename one")
    found = dict.fromkeys([*map(disk_path, paths), *paths])
    looks = partial(_looks_parallel, target=target)
    nested = {path.parent for path in folder.glob("[!.]*/[!.]*") if looks(path.name)}
    nested -= {path.parent for path in used}
    left_out = [path for path in found if path not in used and looks(path.name)]
    left_out += sorted(path for path in nested if _folder_split(path) in (split, None))
    if left_out:
        names = _listed(folder, left_out)
        warn_once("%s: left out: %s; expected %s", folder, names, describe_layouts())


def _listed(folder: Path, paths: Sequence[Path]) -> str:
    """Format names of files for a message: the first ones with their faults, then a count."""
    names = [f"{path.relative_to(folder)}{_fault(path)}" for path in paths[:NAMED]]
    if others := paths[NAMED:]:
        names.append(f"{len(others)} more")
    return ", ".join(names)


def _fault(path: Path) -> str:
    """Return in brackets why a file is not read, or "" if only its name is at fault."""
    kind = plain_suffix(path)[1:]
    if path.is_dir():
        return " (a subfolder, which is not searched)"
    if kind in XLIFF:
        return " (XLIFF: convert it, such as with xliff2po of the Translate Toolkit)"
    if kind in OTHER_PACKING:
        return " (unpack it, or pack it as .gz)"
    if kind == "po" and not catalogue_languages(path)[0]:
        return " (its header names no Language)"
    return ""


def _of_split(
    files: list[BitextFile], splits: list[str | None], split: str | None
) -> list[BitextFile]:
    """Return the files of a split, or else of the next one in `PREFERRED`, or else all.

    `splits` has the split of each file. Files that are left out are named in a warning.
    """
    preferred = PREFERRED.get(split, ())
    own = next((group for group in preferred if not group.isdisjoint(splits)), None)
    if own is None:
        return files
    kept = []
    for file, named in zip(files, splits):
        if named in own:
            kept.append(file)
        else:
            kind = f"{named} pairs" if named else "no split"
            text = "%s is named for %s, so it is not read as %s text unless it is given itself"
            warn_once(text, str(file), kind, split)
    return kept


def _split_in(path: Path) -> str | None:
    """Return the split that a file's name tells, or else the nearest folder in its archive."""
    return next(filter(None, map(split_of, [path, *path.parents])), None)


def split_of(path: str | Path) -> str | None:
    """Return the split that a file, or a folder in an archive, is named for, or None.

    As in `datasets`, a word of the name tells it, between digits or marks. If the words tell
    several splits, "train" is taken before "test", and "test" before "dev".

    >>> split_of("test-2020.de"), split_of("newsdev2016.de-en.de"), split_of("a.de-en-test.de")
    ('test', 'dev', 'test')
    >>> split_of("contest.de-en.tsv"), split_of("dev/news.de")
    (None, None)
    """
    words = re.split(r"[\W\d_]+", Path(path).name.lower())
    told = set(map(SPLITS.get, words))
    return next((split for split in PREFERRED if split in told), None)


def _folder_split(folder: Path) -> str | None:
    """Return the split that a folder is named for by its whole name, or None.

    Digits and marks at the end of the name do not count: `test2014` is "test".
    """
    return SPLITS.get(re.sub(r"[\W\d_]+$", "", folder.name.lower()))


def _without_split(path: Path) -> str:
    """Return a name in small letters without words that tell a split, and numbers behind them.

    `train.de-en.tsv` and `dev2016.de-en.tsv.gz` give `.de-en.tsv`.
    """
    words = "|".join(SPLITS)
    numbers = r"(?:-\d+-of-\d+|[-\d]*)"
    return re.sub(rf"(?<![a-z])(?:{words}){numbers}(?![a-z])", "", unpacked(path).name.lower())


def find_dev(train: Sequence[str], target_language: str = "en") -> list[str]:
    """Return the files and folders with dev pairs that belong to training text.

    Such as `dev/` beside `train/`, or `validation.csv` beside `train.csv`. `train` names such
    files or folders, a file in `train/`, or the folder that holds both. Beside a file, the rest of
    the name must be equal. What `train` names is no dev set.
    """
    target = base_language(target_language)
    inputs = [Path(os.path.abspath(Path(path).expanduser())) for path in train]
    found: dict[Path, Path] = {}  # unpacked name -> path
    for given in filter(Path.exists, inputs):
        dev = _dev_in(given, target) if given.is_dir() else []
        for named in (given, given.parent):
            if dev or _split_at(named) != "train":
                continue
            if named.is_dir():
                dev = _dev_in(named.parent, target)
            else:
                rest = _without_split(named)
                for path in sorted(named.parent.glob("[!.]*")):
                    is_dev = path.is_file() and split_of(path) == "dev"
                    dev += [path] if is_dev and _without_split(path) == rest else []
        for path in dev:
            if not any(each.is_relative_to(path) for each in inputs):
                found.setdefault(unpacked(path), path)
    return list(map(str, found.values()))


def _dev_in(folder: Path, target: str) -> list[Path]:
    """Return what is named for dev pairs and holds pairs, if another entry is for training."""
    splits = {path: _split_at(path) for path in sorted(folder.glob("[!.]*")) if path.exists()}
    training = [path for path, split in splits.items() if split == "train"]
    if not any(_looks_like_text(path, target) for path in training):
        return []
    named = [path for path, split in splits.items() if split == "dev"]
    members = []
    for path in named:
        holds_members = path.is_dir() or path.suffix == ".zip"
        members += _list_with_archives(path) if holds_members else [path]
    texts = [Path(side) for file in _parallel_text(members, target) for side in file.paths]
    return [path for path in named if any(text.is_relative_to(path) for text in texts)]


def _looks_like_text(path: Path, target: str) -> bool:
    """Tell whether a file, or anything directly in a folder, is named like parallel text."""
    names = [each.name for each in path.glob("[!.]*")] if path.is_dir() else [path.name]
    return any(_looks_parallel(name, target) for name in names)


def _split_at(path: Path) -> str | None:
    """Return the split that a folder tells by its whole name, or a file by a word."""
    return _folder_split(path) if path.is_dir() else split_of(path)


def _looks_parallel(name: str, target: str) -> bool:
    """Tell whether a file name looks like parallel text, also in a form that is never read.

    Such forms are unknown packing (`.bz2`) and other text (`de-en.txt`).
    """
    known = {"zip", *FORMATS, *XLIFF}
    if _PAIR.fullmatch(name):
        known |= {"txt", "json"}
    side = _moses_side(name.lower())
    is_side = side is not None and side[1] in {*NAMES, target}
    return is_side or not known.isdisjoint(name.lower().split(".")[1:])


def _parallel_text(paths: Sequence[Path], target: str) -> list[BitextFile]:
    """Return the parallel text in some files, sorted."""
    files = _moses_pairs(paths, target)
    for path in paths:
        files += _classify(path, target)
    return sorted(files, key=lambda file: file.paths)


def _list_with_archives(folder: Path) -> list[Path]:
    """List the files in a folder and in its zip archives, or the files in one zip archive."""
    if not folder.is_dir():
        return list_archive(folder)
    files = []
    for path in list_folder(folder):
        files += list_archive(path) if path.suffix == ".zip" else [path]
    return files


# ---------------------------------------------------------------------------------------- files


def _files_at(path: Path, all_paths: Collection[Path], target: str) -> list[BitextFile]:
    """Return the parallel text of one file, which may be one side of a Moses pair.

    A target side stands for its pairs with those source sides that are also given. If none is
    given, it stands for its pairs with all that are in its folder.
    """
    files = _classify(path, target)
    if not files:
        pairs = _moses_pairs([path, *list_folder(path.parent)], target)
        files = [file for file in pairs if str(path) in file.paths]
    if not files:
        raise UserError(
            f"{path}{_fault(path)}: neither name nor content tells a language beside {target!r}, "
            f"or its other side is absent. Expected {describe_layouts()}"
        )
    given = [file for file in files if Path(file.paths[0]) in all_paths]
    return given or files


def _classify(path: Path, target: str) -> list[BitextFile]:
    """Return the parallel text in a file, one `BitextFile` for each source language.

    The list is empty if the file tells no source language, as a side of a Moses pair.
    """
    kind = plain_suffix(path)[1:]
    if kind == "parquet" and not path.is_file():
        return []  # the members of an archive are only read from start to end
    match = _PAIR.fullmatch(path.name) or _PAIR.fullmatch(path.name.lower())
    source, second = map(base_language, match.groups()) if match else ("", "")
    named = {source} - {target} if second == target else set()
    if kind in ("tsv", "csv"):
        tables = find_columns(str(path), target, named)
        return [BitextFile(code, (str(path),), kind, target, tables[code]) for code in tables]
    if kind == "tmx":
        languages = memory_languages(path, target)
    elif kind == "po":
        languages = _po_languages(path, target)
    else:
        languages = named if kind in _named_formats() else set()
        if not named and kind in ("jsonl", "parquet") and is_mined(path):
            languages = {UNDETERMINED}
    return [BitextFile(code, (str(path),), kind, target) for code in languages]


def _po_languages(path: Path, target: str) -> set[str]:
    """Return the language of a PO file's translations, if its originals are in the target language.

    The header states the languages, otherwise the path.
    """
    translation, original = catalogue_languages(path)
    if not translation:
        match = _PO.fullmatch(path.name)
        code = match[1] if match else "en"
        if path.parent.name == "LC_MESSAGES":
            code = path.parent.parent.name
        translation = language_in(path, code)
    return {translation} - {target} if original == target else set()


def _moses_side(name: str) -> tuple[str, str] | None:
    """Split a file name such as `news.de-AT.gz` into the name ("news") and the language ("de").

    Returns None if the name has no such form, or an ending that is no language.
    """
    match = _MOSES.fullmatch(name)
    if not match:
        return None
    stem, code = match.groups()
    pair = rf"{_BEFORE}(?:{LANGUAGE_TAG}-{code}|{code}-{LANGUAGE_TAG})"
    if re.fullmatch(NOT_A_LANGUAGE, code) and not re.fullmatch(pair, stem):
        return None
    return stem, base_language(code)


def _moses_pairs(paths: Iterable[Path], target: str) -> list[BitextFile]:
    """Find the Moses pairs among some files.

    A Moses pair is two files, such as `news.de` and `news.en`, whose lines translate each other.
    Of several target sides, `.en` is preferred to `.eng`, and both to `.en-US`.
    """
    by_stem: dict[Path, list[tuple[str, str]]] = {}
    for path in paths:
        if side := _moses_side(path.name):
            stem, language = side
            by_stem.setdefault(path.with_name(stem), []).append((str(path), language))

    pairs = []
    for sides in by_stem.values():
        targets = [path for path, language in sides if language == target]
        for path, language in sides:
            if targets and language != target:
                both = (path, min(targets, key=len))
                pairs.append(BitextFile(language, both, "moses", target))
    return pairs


# --------------------------------------------------------------------------------- Hub datasets


def find_hub_files(name: str, target: str) -> list[BitextFile]:
    """Find the configurations of a Hub dataset that pair a language with the target language.

    The name is `user/name` for all configurations, or `user/name:config` for one.
    """
    from datasets import get_dataset_config_names

    dataset, _, config = name.partition(":")
    with reading(f"{name}: no such file or folder, and no Hub dataset that can be read"):
        configs = [config] if config else get_dataset_config_names(dataset)
        languages = {each: _hub_languages(f"{dataset}:{each}") for each in configs}

    files = []
    for each, pair in languages.items():
        others = set(pair) - {target}
        if target in pair and len(others) == 1:
            files.append(BitextFile(others.pop(), (f"{dataset}:{each}",), "hub", target))
    if not files:
        raise UserError(
            f"{name}: no configuration of {configs} pairs a language with {target!r}; a "
            f"configuration is named like 'de-{target}' or has a `translation` column of two "
            "languages"
        )
    return files


def _hub_languages(name: str) -> list[str]:
    """Return the codes in the configuration's name, such as "de-en", or of its `translation`."""
    if match := _CONFIGURATION.search(name):
        return [base_language(code) for code in match.groups()]
    features = hub_dataset(name, streaming=True).features or {}
    codes = getattr(features.get("translation"), "languages", [])
    return [base_language(code) for code in codes]
