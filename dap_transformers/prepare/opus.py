"""Download corpora from OPUS (https://opus.nlpl.eu).

The releases of the paper's six corpora are fixed. For other corpora, opustools knows the latest.
"""

import logging
import os
import re
import time
import zipfile
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import requests
from tqdm import tqdm
from urllib3.exceptions import HTTPError

from dap_transformers.addresses import cache_folder
from dap_transformers.errors import UserError, one_line, without_secrets
from dap_transformers.languages import TATOEBA_36, to_iso1

logger = logging.getLogger(__name__)

#: The file store of OPUS. Its files are `OPUS-{corpus}/{version}/moses/{pair}.txt.zip`. The two
#: codes of a pair are in alphabetical order.
STORE = "https://object.pouta.csc.fi"
#: Lines of the README in an archive from OPUS: a field and its value.
_README_FIELD = re.compile(r"^\s*(Corpus Name|Release|Website|License)\s*:\s*(\S.*?)\s*$", re.M)
_README_SIZE = 100_000  # bytes to read of it
#: How often a run tries to download a file.
TRIES = 5
#: Seconds without an answer before a try fails.
PATIENCE = 60
BLOCK = 2**20  # most bytes that are written at a time


class OpusCorpus(NamedTuple):
    """One release of a corpus.

    Attributes:
        name: its name in OPUS.
        version: its version in OPUS.
        home: the address of its page.
        licence: what its publishers state, in their words.
    """

    name: str
    version: str
    home: str
    licence: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


_CORPORA = (
    OpusCorpus(
        "Europarl", "v8", "https://www.statmt.org/europarl/",
        'OPUS names none. The publisher: "We are not aware of any copyright restrictions of the '
        'material."',
    ),
    OpusCorpus(
        "UNPC", "v1.0", "https://cms.unov.org/UNCorpus",
        "No licence by name. Made available without warranty, used at the user's sole risk; the "
        "user must acknowledge the United Nations as the source of the information; \"no other "
        'restrictions apply".',
    ),
    OpusCorpus(
        "OpenSubtitles", "v2018", "https://opus.nlpl.eu/OpenSubtitles-v2018.php",
        "OPUS names none. It asks to add a link to http://www.opensubtitles.org/ to your website "
        "and to your reports and publications produced with the data.",
    ),
    OpusCorpus(
        "Tanzil", "v1", "https://tanzil.net/trans/",
        '"For non-commercial purposes only. If used otherwise, you need to obtain necessary '
        'permission from the translator or the publisher." More than three translations on a '
        "website: link to http://tanzil.net/trans.",
    ),
    OpusCorpus(
        "CCMatrix", "v1", "https://github.com/facebookresearch/LASER/tree/main/tasks/CCMatrix",
        "Neither OPUS nor the authors' page names one. The text is from web pages (Common Crawl).",
    ),
    OpusCorpus(
        "WikiMatrix", "v1", "https://github.com/facebookresearch/LASER/tree/main/tasks/WikiMatrix",
        "CC-BY-SA 4.0.",
    ),
)  # fmt: skip
#: The corpora of the paper's section 4.1 by their name.
CORPORA = {corpus.name: corpus for corpus in _CORPORA}
#: (corpus, language) that the paper's released code leaves out, because these languages have
#: enough.
NOT_IN_RELEASE = {
    ("CCMatrix", code) for code in ("ar", "de", "es", "fr", "it", "nl", "pt", "ru", "zh")
}
#: (corpus, language) -> its codes in OPUS, if they are not the language's own code.
CODES = {("OpenSubtitles", "pt"): ("pt", "pt_br"), ("OpenSubtitles", "zh"): ("zh_cn", "zh_tw")}


def download_corpora(
    names: Sequence[str],
    languages: Sequence[str],
    folder: str | Path,
    mirror: str | None = None,
    without: Collection[tuple[str, str]] = (),
) -> dict[Path, OpusCorpus]:
    """Download the text of corpora in some languages and English, unless it is there already.

    Args:
        names: names of corpora in OPUS, or `["all"]` for the paper's six (`CORPORA`). Other
            corpora are found by the package opustools.
        languages: language codes, with or without regions. An empty sequence means all 36
            languages.
        folder: where to put the files, zip archives named like `Europarl_v8.de-en.txt.zip`.
        mirror: base address of a copy of OPUS' file store, with the same folders. None downloads
            from OPUS.
        without: pairs (corpus, language) to leave out.

    Returns:
        Path of each file -> its corpus, also for files that were there already. Files that OPUS
        does not have are left out.
    """
    wanted = _wanted_files(names, languages, without)
    base = (mirror or STORE).rstrip("/")
    found = {}
    for corpus, code in wanted:
        pair = "-".join(sorted((code, "en")))
        url = f"{base}/OPUS-{corpus.name}/{corpus.version}/moses/{pair}.txt.zip"
        path = Path(folder) / f"{corpus.name}_{corpus.version}.{pair}.txt.zip"
        try:
            download(url, path)
        except FileNotFoundError:
            logger.info("OPUS has no %s %s: %s", corpus, pair, without_secrets(url))
        else:
            found[path] = corpus if corpus.name in CORPORA else corpus_of_archive(path) or corpus
    if not found:
        raise UserError(f"--opus {' '.join(names)}: none of the {len(wanted)} files exists")
    return found


def corpus_of_archive(path: str | Path) -> OpusCorpus | None:
    """Return the corpus that the README in an archive from OPUS names.

    Args:
        path: a file of any type.

    Returns:
        The corpus with its release, its licence and the address of its page (OPUS itself if the
        README has none). None if the file is no zip archive, or has no README with name, release
        and licence.
    """
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive, archive.open("README") as file:
            text = file.read(_README_SIZE).decode("utf-8", "replace")
    except (KeyError, RuntimeError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        return None  # no README, or one that cannot be read
    fields = dict(_README_FIELD.findall(text))
    if not {"Corpus Name", "Release", "License"} <= fields.keys():
        return None
    home = fields.get("Website", "https://opus.nlpl.eu")
    return OpusCorpus(fields["Corpus Name"], fields["Release"], home, fields["License"])


def _corpus_beyond_the_papers(name: str, code: str) -> OpusCorpus | None:
    """Look up the latest release of a corpus in the index that the package opustools holds.

    Returns:
        The corpus. None if OPUS has none of this name, or not in this language and English.
    """
    try:
        from opustools import OpusGet
    except ImportError:
        raise UserError(
            f"--opus {name}: known are {', '.join(CORPORA)}. To find all other corpora of OPUS: "
            "pip install opustools"
        ) from None
    folder = str(cache_folder() / "opustools")
    index = OpusGet(
        source=code,
        target="en",
        directory=name,
        preprocess="moses",
        local_db=True,
        database=f"{folder}/index.db",
        download_dir=folder,
    )
    found, _ = index.get_corpora_data()
    if not found:
        return None
    licence = "see LICENSE in the archive"
    return OpusCorpus(name, found[0]["version"], f"https://opus.nlpl.eu/{name}", licence)


def _wanted_files(
    names: Sequence[str], languages: Sequence[str], without: Collection[tuple[str, str]]
) -> list[tuple[OpusCorpus, str]]:
    """List the files to download, each as (corpus, OPUS' code of the language).

    A language may have several files in a corpus, such as "zh_cn" and "zh_tw" (`CODES`). A
    language that a corpus outside of `CORPORA` does not have is left out.
    """
    if list(names) == ["all"]:
        names = list(CORPORA)
    codes = dict.fromkeys(to_iso1(language) for language in languages or TATOEBA_36)
    if "en" in codes:
        raise UserError("languages holds 'en', the other side of every pair; leave it out")

    wanted = []
    for name in names:
        for language in codes:
            if (name, language) in without:
                continue
            for code in CODES.get((name, language), (language,)):
                corpus = CORPORA.get(name) or _corpus_beyond_the_papers(name, code)
                if corpus:
                    wanted.append((corpus, code))
        is_found = name in CORPORA or any(corpus.name == name for corpus, _ in wanted)
        if not is_found:
            raise UserError(f"--opus {name}: OPUS has no such corpus in these languages")
    return wanted


def download(url: str, path: Path, wait: float = 1.0) -> None:
    """Download a zip archive, unless it is there already, and test it for damage.

    Until it is complete it is called `PATH.part`. A stopped download is resumed by the next run.

    Args:
        url: the address.
        path: where to put the archive.
        wait: seconds before the second try. They are doubled before each further try.
    """
    if path.exists():
        return
    shown = without_secrets(url)
    part = Path(f"{path}.part")
    for number in range(TRIES):
        if _receive(url, part):
            break
        time.sleep(wait * 2**number)
    else:
        raise UserError(f"{shown}: {TRIES} tries failed, see above; run again to resume {part}")

    try:
        damaged = zipfile.ZipFile(part).testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        damaged = error
    except RuntimeError as error:  # zipfile's error for an encrypted member
        part.unlink()
        raise UserError(f"{shown}: {one_line(error)}; put the unpacked text into --data") from error
    if damaged:
        part.unlink()
        raise UserError(f"{shown}: the file is damaged ({damaged}); run again to download it anew")
    os.replace(part, path)


def _receive(url: str, part: Path) -> bool:
    """Try once to download a file, or the rest of it.

    Returns:
        True if the file is complete. False if the server or the network failed, which is logged.
    """
    start = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=PATIENCE) as response:
            if response.status_code in (404, 410):
                raise FileNotFoundError(f"{without_secrets(url)}: the server has no such file")
            if start and response.status_code == requests.codes.range_not_satisfiable:
                return True  # nothing is left to download
            response.raise_for_status()
            resumes = response.status_code == requests.codes.partial_content
            _write_response(response, part, start if resumes else 0)
    except (requests.RequestException, HTTPError) as error:
        logger.warning("%s", one_line(error))
        return False
    return True


def _write_response(response: requests.Response, part: Path, start: int) -> None:
    """Write the content of a response into a file, and show a progress bar on a terminal."""
    size = int(response.headers.get("Content-Length", 0)) + start
    bar = tqdm(total=size, initial=start, unit="B", unit_scale=True, desc=part.name, disable=None)
    part.parent.mkdir(parents=True, exist_ok=True)
    with bar, part.open("ab") as file:
        file.truncate(start)
        # `read1` returns what has arrived, so that nothing is lost if the connection breaks.
        while block := response.raw.read1(BLOCK):
            file.write(block)
            bar.update(len(block))
