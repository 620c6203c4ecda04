"""The paper's six corpora in OPUS (https://opus.nlpl.eu): what they are, where they lie, and fetching them.

files, absent = find_files(["sw", "zh"])   # asks OPUS which pairs there are
fetch(files, Path("raw"))                  # raw/WikiMatrix_v1.en-sw.txt.zip, …: `find_bitext("raw")` reads them
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlencode

from dap.errors import UserError
from dap.languages import TATOEBA_36, to_iso1
from dap.prepare.download import download, get_json

logger = logging.getLogger(__name__)

#: Below it: `OPUS-{corpus}/{version}/moses/{source}-{target}.txt.zip`, codes in alphabetical order.
STORE = "https://object.pouta.csc.fi"
API = "https://opus.nlpl.eu/opusapi/"


@dataclass(frozen=True)
class OpusCorpus:
    """One release of a corpus.

    Attributes:
        name, version: as OPUS calls them.
        licence: what its publishers state, in their words; never more than that.
        home: where they state it.
        codes: language -> its codes in this corpus, where they are not the language's own.
    """

    name: str
    version: str
    licence: str
    home: str
    codes: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


#: The corpora of the paper's section 4.1, with the statements on the pages of OPUS and of the authors.
CORPORA = {
    corpus.name: corpus
    for corpus in (
        OpusCorpus(
            "Europarl", "v8",
            "OPUS names none. The publisher: \"We are not aware of any copyright restrictions of the material.\"",
            "https://www.statmt.org/europarl/",
        ),
        OpusCorpus(
            "UNPC", "v1.0",
            "No licence by name. Made available without warranty, used at the user's sole risk; the user must "
            "acknowledge the United Nations as the source of the information; \"no other restrictions apply\".",
            "https://cms.unov.org/UNCorpus",
        ),
        OpusCorpus(
            "OpenSubtitles", "v2018",
            "OPUS names none. It asks to add a link to http://www.opensubtitles.org/ to your website and to your "
            "reports and publications produced with the data.",
            "https://opus.nlpl.eu/OpenSubtitles-v2018.php",
            {"pt": ("pt", "pt_br"), "zh": ("zh_cn", "zh_tw")},
        ),
        OpusCorpus(
            "Tanzil", "v1",
            "\"For non-commercial purposes only. If used otherwise, you need to obtain necessary permission from the "
            "translator or the publisher.\" More than three translations on a website: link to http://tanzil.net/trans.",
            "https://tanzil.net/trans/",
        ),
        OpusCorpus(
            "CCMatrix", "v1",
            "Neither OPUS nor the authors' page names one. The text is from web pages (Common Crawl).",
            "https://github.com/facebookresearch/LASER/tree/main/tasks/CCMatrix",
        ),
        OpusCorpus(
            "WikiMatrix", "v1",
            "CC-BY-SA 4.0.",
            "https://github.com/facebookresearch/LASER/tree/main/tasks/WikiMatrix",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class OpusFile:
    """The text of one language and English in one corpus.

    Attributes:
        language: source language, as in `dap.languages`; `code` is what the corpus calls it.
        url: of a zip archive with a Moses pair.
        pairs: how many it holds, as OPUS counts; None where it was not asked.
    """

    corpus: OpusCorpus
    language: str
    code: str
    url: str
    pairs: int | None = None

    @property
    def filename(self) -> str:
        """Tells the corpus and the languages apart when all lie in one folder."""
        return f"{self.corpus.name}_{self.corpus.version}.{pair_name(self.code)}.txt.zip"

    def __str__(self) -> str:
        return f"{self.corpus.name} {self.corpus.version} {pair_name(self.code)}"


def pair_name(code: str, target: str = "en") -> str:
    """A pair as OPUS names it.

    >>> pair_name("de"), pair_name("zh_cn")
    ('de-en', 'en-zh_cn')
    """
    return "-".join(sorted((code, target)))


def file_of(corpus: OpusCorpus, code: str, mirror: str | None = None) -> OpusFile:
    """Where the text would lie; whether it is there is not asked."""
    base = f"{(mirror or STORE).rstrip('/')}/OPUS-{corpus.name}/{corpus.version}/moses"
    return OpusFile(corpus, to_iso1(code), code, f"{base}/{pair_name(code)}.txt.zip")


def find_files(
    languages: Sequence[str] = TATOEBA_36,
    corpora: Sequence[str] = tuple(CORPORA),
    *,
    mirror: str | None = None,
    api: str | None = API,
    tries: int = 5,
) -> tuple[list[OpusFile], list[OpusFile]]:
    """(files, absent): the files of these languages, and those that OPUS says it does not have.

    OPUS is asked for every file. With a `mirror`, with `api=None`, and where OPUS gives no answer, all that may exist
    is listed, and `fetch` finds out.

    Args:
        languages: codes of the 36, with or without regions; English is the other side.
        corpora: names, keys of `CORPORA`.
        mirror: base address of a copy of OPUS' file store, with the same folders below it.

    Raises:
        ValueError: an unknown corpus or language.
    """
    if unknown := [name for name in corpora if name not in CORPORA]:
        raise UserError(f"unknown corpora {', '.join(unknown)}; known are {', '.join(CORPORA)}")
    codes = list(dict.fromkeys(to_iso1(language) for language in languages))
    if "en" in codes:
        raise UserError("languages holds 'en', which is the other side of every pair; leave it out")
    files = [
        file_of(CORPORA[name], code, mirror)
        for name in corpora
        for language in codes
        for code in CORPORA[name].codes.get(language, (language,))
    ]
    return files_of_opus(files, api, tries) if api and not mirror else (files, [])


def files_of_opus(files: Iterable[OpusFile], api: str = API, tries: int = 5) -> tuple[list[OpusFile], list[OpusFile]]:
    """(files, absent) as the OPUS API answers; once it gives no answer, all the rest are taken to be there."""
    present: list[OpusFile] = []
    absent: list[OpusFile] = []
    answering = True
    for file in files:
        if answering:
            try:
                file, exists = _ask(file, api, tries)
                (present if exists else absent).append(file)
                continue
            except (ValueError, FileNotFoundError) as error:
                logger.warning("OPUS does not say which files it has: %s. The usual addresses are tried", error)
                answering = False
        present.append(file)
    return present, absent


def _ask(file: OpusFile, api: str, tries: int) -> tuple[OpusFile, bool]:
    """The file as OPUS lists it, and whether it does."""
    source, target = pair_name(file.code).split("-")
    query = {"corpus": file.corpus.name, "version": file.corpus.version, "source": source, "target": target}
    answer = get_json(f"{api}?{urlencode({**query, 'preprocessing': 'moses'})}", tries=tries)
    listed = answer.get("corpora") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        raise UserError(f"{api}: the answer has no list 'corpora': {str(answer)[:200]}")
    for entry in listed:
        if isinstance(entry, dict) and str(entry.get("url", "")).endswith(file.url.partition("/OPUS-")[2]):
            pairs = str(entry.get("alignment_pairs", ""))
            return replace(file, url=entry["url"], pairs=int(pairs) if pairs.isdecimal() else None), True
    return file, False


def fetch(
    files: Iterable[OpusFile], folder: str | Path, *, tries: int = 5, timeout: float = 60.0, progress: bool = False
) -> tuple[dict[OpusFile, Path], list[OpusFile]]:
    """Downloads into the folder what is not there yet: (path by file, files that the server does not have).

    Raises:
        ValueError: as `dap.prepare.download.download`; what is whole stays, and running again goes on from there.
    """
    paths: dict[OpusFile, Path] = {}
    absent: list[OpusFile] = []
    for file in files:
        target = Path(folder) / file.filename
        try:
            paths[file] = download(file.url, target, tries=tries, timeout=timeout, progress=progress)
        except FileNotFoundError:
            logger.warning("%s is absent: %s", file, file.url)
            absent.append(file)
    return paths, absent


def licences(files: Iterable[OpusFile]) -> dict[str, str]:
    """Corpus and version -> what its publishers state, and where, for those that the files are from."""
    corpora = dict.fromkeys(file.corpus.name for file in files)
    stated = (CORPORA[name] for name in corpora)
    return {f"{corpus.name} {corpus.version}": f"{corpus.licence} ({corpus.home})" for corpus in stated}
