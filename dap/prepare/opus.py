"""The paper's six corpora in OPUS (https://opus.nlpl.eu): what they are, where they lie, and fetching them."""

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

from dap.errors import UserError
from dap.languages import TATOEBA_36, to_iso1

logger = logging.getLogger(__name__)

#: Below it: `OPUS-{corpus}/{version}/moses/{pair}.txt.zip`, the codes of a pair in alphabetical order.
STORE = "https://object.pouta.csc.fi"
TRIES = 5  # to fetch a file in one run


class OpusCorpus(NamedTuple):
    """One release of a corpus: its name and version in OPUS, its page, what its publishers state in their words."""

    name: str
    version: str
    home: str
    licence: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


#: The corpora of the paper's section 4.1, with the statements on the pages of OPUS and of the authors.
_TABLE = (
    ("Europarl", "v8", "https://www.statmt.org/europarl/",
     "OPUS names none. The publisher: \"We are not aware of any copyright restrictions of the material.\""),
    ("UNPC", "v1.0", "https://cms.unov.org/UNCorpus",
     "No licence by name. Made available without warranty, used at the user's sole risk; the user must acknowledge "
     "the United Nations as the source of the information; \"no other restrictions apply\"."),
    ("OpenSubtitles", "v2018", "https://opus.nlpl.eu/OpenSubtitles-v2018.php",
     "OPUS names none. It asks to add a link to http://www.opensubtitles.org/ to your website and to your reports and "
     "publications produced with the data."),
    ("Tanzil", "v1", "https://tanzil.net/trans/",
     "\"For non-commercial purposes only. If used otherwise, you need to obtain necessary permission from the "
     "translator or the publisher.\" More than three translations on a website: link to http://tanzil.net/trans."),
    ("CCMatrix", "v1", "https://github.com/facebookresearch/LASER/tree/main/tasks/CCMatrix",
     "Neither OPUS nor the authors' page names one. The text is from web pages (Common Crawl)."),
    ("WikiMatrix", "v1", "https://github.com/facebookresearch/LASER/tree/main/tasks/WikiMatrix", "CC-BY-SA 4.0."),
)  # fmt: skip
CORPORA = {row[0]: OpusCorpus(*row) for row in _TABLE}
#: What the paper's released code leaves out, as these languages have text enough.
NOT_IN_RELEASE = {
    ("CCMatrix", code) for code in ("ar", "de", "es", "fr", "it", "nl", "pt", "ru", "zh")
}
#: (Corpus, language) -> its codes there, where they are not the language's own.
CODES = {("OpenSubtitles", "pt"): ("pt", "pt_br"), ("OpenSubtitles", "zh"): ("zh_cn", "zh_tw")}


def fetch(
    names: Sequence[str],
    languages: Sequence[str],
    folder: str | Path,
    mirror: str | None = None,
    without: Collection[tuple[str, str]] = (),
) -> dict[Path, OpusCorpus]:
    """Downloads what the corpora have in these languages beside English, unless it is there: path -> corpus.

    Args:
        names: keys of `CORPORA`; `["all"]` for all of them.
        languages: codes of the 36, with or without regions; none for all 36.
        mirror: base address of a copy of OPUS' file store, with the same folders below it.
        without: corpora and languages to leave out.

    Raises:
        ValueError: an unknown corpus or language, as `download`, or no file is there.
    """
    names = list(CORPORA) if list(names) == ["all"] else names
    if unknown := [name for name in names if name not in CORPORA]:
        raise UserError(f"unknown corpora {', '.join(unknown)}; known are {', '.join(CORPORA)}")
    languages = list(dict.fromkeys(to_iso1(language) for language in languages or TATOEBA_36))
    if "en" in languages:
        raise UserError("languages holds 'en', which is the other side of every pair; leave it out")
    asked = [(name, each) for name in names for each in languages if (name, each) not in without]
    wanted = [
        (CORPORA[name], code) for name, each in asked for code in CODES.get((name, each), (each,))
    ]
    found = {}
    for corpus, code in wanted:
        pair = "-".join(sorted((code, "en")))
        url = f"{(mirror or STORE).rstrip('/')}/OPUS-{corpus.name}/{corpus.version}/moses/{pair}.txt.zip"
        try:
            found[
                download(url, Path(folder) / f"{corpus.name}_{corpus.version}.{pair}.txt.zip")
            ] = corpus
        except FileNotFoundError:
            logger.info("OPUS has no %s %s: %s", corpus, pair, url)
    if not found:
        raise UserError(f"--opus {' '.join(names)}: none of the {len(wanted)} files is there")
    return found


def download(url: str, path: Path, wait: float = 1.0) -> Path:
    """Fetches a zip archive into `path` with curl, unless it is there; goes on with what a stopped run left.

    Args:
        wait: seconds before the second try, twice as many before each further one.

    Raises:
        FileNotFoundError: the server has no such file (404, 410).
        ValueError: no curl, no whole archive after `TRIES` tries, or a damaged one.
    """
    if path.exists():
        return path
    part = Path(f"{path}.part")
    command = [
        "curl",
        "--fail",
        "--location",
        "--speed-time",
        "60",
        "--continue-at",
        "-",
        "--create-dirs",
    ]
    command += ["--write-out", "%{http_code}", "--output", str(part), url]
    if not shutil.which("curl"):
        raise UserError(
            f"{url}: files are fetched by curl, which is absent; install it, or put the file in {path}"
        )
    for number in range(TRIES):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.stdout in ("404", "410"):
            raise FileNotFoundError(f"{url}: the server has no such file")
        if not done.returncode:
            break
        if done.returncode == 33:  # the server cannot go on in the middle of a file
            part.unlink()
        time.sleep(wait * 2**number)
    else:
        raise UserError(
            f"{url}: {TRIES} tries failed, see above; run again to go on with what is in {part}"
        )
    try:
        damaged = zipfile.ZipFile(part).testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        damaged = error
    if damaged:
        part.unlink()
        raise UserError(f"{url}: a damaged file came ({damaged}); run again to fetch it anew")
    os.replace(part, path)
    return path
