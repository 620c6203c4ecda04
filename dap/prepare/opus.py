"""Download the paper's six corpora from OPUS (https://opus.nlpl.eu)."""

import logging
import os
import shutil
import subprocess
import time
import zipfile
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from dap.errors import UserError, one_line, without_secrets
from dap.languages import TATOEBA_36, to_iso1

logger = logging.getLogger(__name__)

#: The file store of OPUS. Its files are `OPUS-{corpus}/{version}/moses/{pair}.txt.zip`. The two
#: codes of a pair are in alphabetical order.
STORE = "https://object.pouta.csc.fi"
#: How often a run tries to download a file.
TRIES = 5
#: What curl's exit status 33 says: the server cannot continue in the middle of a file.
CANNOT_RESUME = 33


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
        names: keys of `CORPORA`, or `["all"]`.
        languages: language codes, with or without regions. An empty sequence means all 36
            languages.
        folder: where to put the files, zip archives named like `Europarl_v8.de-en.txt.zip`.
        mirror: base address of a copy of OPUS' file store, with the same folders. None downloads
            from OPUS.
        without: pairs (corpus, language) to leave out.

    Returns:
        Path of each file -> its corpus, also for files that were there already. Files that OPUS
        does not have are left out.

    Raises:
        UserError: a corpus or language is unknown, no file exists, or as `download`.
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
            found[path] = corpus
    if not found:
        raise UserError(f"--opus {' '.join(names)}: none of the {len(wanted)} files exists")
    return found


def _wanted_files(
    names: Sequence[str], languages: Sequence[str], without: Collection[tuple[str, str]]
) -> list[tuple[OpusCorpus, str]]:
    """List the files to download, each as (corpus, OPUS' code of the language).

    A language may have several files in a corpus, such as "zh_cn" and "zh_tw" (`CODES`).

    Args:
        names: keys of `CORPORA`, or `["all"]`.
        languages: language codes. An empty sequence means all 36 languages.
        without: pairs (corpus, language) to leave out.

    Raises:
        UserError: a corpus or language is unknown, or a language is English.
    """
    if list(names) == ["all"]:
        names = list(CORPORA)
    unknown = [name for name in names if name not in CORPORA]
    if unknown:
        raise UserError(f"unknown corpora {', '.join(unknown)}; known are {', '.join(CORPORA)}")
    codes = dict.fromkeys(to_iso1(language) for language in languages or TATOEBA_36)
    if "en" in codes:
        raise UserError("languages holds 'en', the other side of every pair; leave it out")

    wanted = []
    for name in names:
        for language in codes:
            if (name, language) in without:
                continue
            for code in CODES.get((name, language), (language,)):
                wanted.append((CORPORA[name], code))
    return wanted


def download(url: str, path: Path, wait: float = 1.0) -> None:
    """Download a zip archive with curl, unless it is there already, and test it for damage.

    Until it is complete it is called `PATH.part`. A stopped download is resumed by the next run.

    Args:
        url: the address.
        path: where to put the archive.
        wait: seconds before the second try. They are doubled before each further try.

    Raises:
        FileNotFoundError: the server has no such file (404, 410).
        UserError: curl is not installed, all `TRIES` tries failed, or the archive is damaged or
            encrypted. A damaged archive is removed.
    """
    if path.exists():
        return
    shown = without_secrets(url)
    if not shutil.which("curl"):
        raise UserError(f"{shown}: curl is not installed; install it, or put the file in {path}")

    part = Path(f"{path}.part")
    for number in range(TRIES):
        if _run_curl(url, part):
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


def _run_curl(url: str, part: Path) -> bool:
    """Try once to download a file, or the rest of it. Progress goes to the terminal.

    Args:
        url: the address.
        part: where to put the file. What is there already is not downloaded again. If the server
            cannot continue in the middle of a file, this part is removed.

    Returns:
        Whether the file is complete.

    Raises:
        FileNotFoundError: the server has no such file.
    """
    command = ["curl", "--fail", "--location", "--create-dirs"]
    command += ["--speed-time", "60"]  # seconds without progress before it gives up
    command += ["--continue-at", "-"]
    command += ["--write-out", "%{http_code}", "--output", str(part), url]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.stdout in ("404", "410"):
        raise FileNotFoundError(f"{without_secrets(url)}: the server has no such file")
    if done.returncode == CANNOT_RESUME:
        part.unlink()
    return done.returncode == 0
