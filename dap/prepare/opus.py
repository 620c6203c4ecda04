"""The paper's six corpora in OPUS (https://opus.nlpl.eu): what they are, where they lie, and fetching them."""

import http.client
import logging
import os
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from dap.errors import UserError
from dap.languages import TATOEBA_36, to_iso1

logger = logging.getLogger(__name__)

#: Below it: `OPUS-{corpus}/{version}/moses/{pair}.txt.zip`, the codes of a pair in alphabetical order.
STORE = "https://object.pouta.csc.fi"
TRIES = 5  # in a row without a byte more than before
TIMEOUT = 60.0  # seconds without an answer
_BROKEN = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


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
#: (Corpus, language) -> its codes there, where they are not the language's own.
CODES = {("OpenSubtitles", "pt"): ("pt", "pt_br"), ("OpenSubtitles", "zh"): ("zh_cn", "zh_tw")}


def fetch(
    names: Sequence[str], languages: Sequence[str], folder: str | Path, mirror: str | None = None
) -> dict[Path, OpusCorpus]:
    """Downloads what the corpora have in these languages beside English, unless it is there: path -> corpus.

    Args:
        names: keys of `CORPORA`; `["all"]` for all of them.
        languages: codes of the 36, with or without regions; none for all 36.
        mirror: base address of a copy of OPUS' file store, with the same folders below it.

    Raises:
        ValueError: an unknown corpus or language, as `download`, or no file is there.
    """
    names = list(CORPORA) if list(names) == ["all"] else names
    if unknown := [name for name in names if name not in CORPORA]:
        raise UserError(f"unknown corpora {', '.join(unknown)}; known are {', '.join(CORPORA)}")
    languages = list(dict.fromkeys(to_iso1(language) for language in languages or TATOEBA_36))
    if "en" in languages:
        raise UserError("languages holds 'en', which is the other side of every pair; leave it out")
    wanted = [
        (CORPORA[name], code) for name in names for each in languages for code in CODES.get((name, each), (each,))
    ]
    found = {}
    for corpus, code in wanted:
        pair = "-".join(sorted((code, "en")))
        url = f"{(mirror or STORE).rstrip('/')}/OPUS-{corpus.name}/{corpus.version}/moses/{pair}.txt.zip"
        try:
            found[download(url, Path(folder) / f"{corpus.name}_{corpus.version}.{pair}.txt.zip")] = corpus
        except FileNotFoundError:
            logger.info("OPUS has no %s %s: %s", corpus, pair, url)
    if not found:
        raise UserError(f"--opus {' '.join(names)}: none of the {len(wanted)} files is there")
    return found


def download(url: str, path: Path, wait: float = 1.0) -> Path:
    """Fetches a zip archive into `path`, unless it is there; goes on with what a stopped run left in `path` + `.part`.

    Args:
        wait: seconds before the second try, twice as many before each further one.

    Raises:
        FileNotFoundError: the server has no such file (404, 410).
        ValueError: no whole archive after `TRIES` tries in a row that brought nothing, or a damaged one.
    """
    if path.exists():
        return path
    part = Path(f"{path}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    failed, most = 0, -1
    while True:
        try:
            _fetch_rest(url, part)
            break
        except _BROKEN as error:
            status, came = getattr(error, "code", None), part.stat().st_size if part.exists() else 0
            if status == 416:  # nothing lies behind what is here
                break
            if status in (404, 410):
                raise FileNotFoundError(f"{url}: {error}: the server has no such file") from None
            failed, most = (1, came) if came > most else (failed + 1, most)
            if failed >= TRIES:
                raise UserError(
                    f"{url}: {error}, {TRIES} tries in a row; check the address and the network, and run again; the "
                    f"{came:,} bytes that are here are kept"
                ) from error
            logger.warning("%s: %s; another try follows", url, error)
            time.sleep(wait * 2 ** (failed - 1))
    try:
        damaged = zipfile.ZipFile(part).testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        damaged = error
    if damaged:
        part.unlink()
        raise UserError(f"{url}: a damaged file came ({damaged}); run again to fetch it anew")
    os.replace(part, path)
    return path


def _fetch_rest(url: str, part: Path) -> None:
    """Appends to `part` what it lacks, or writes it anew if the server sends the whole."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "dap-transformers"} | ({"Range": f"bytes={start}-"} if start else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        start = start if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        bar = tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=part.stem)
        with bar, part.open("ab" if start else "wb") as file:
            while block := response.read1(1 << 20):
                bar.update(file.write(block))
            if total is not None and file.tell() < total:
                raise ConnectionError(f"the connection broke after {file.tell():,} of {total:,} bytes")
