"""Download corpora from OPUS (https://opus.nlpl.eu).

The releases of the paper's six corpora are fixed.
"""

import logging
import os
import zipfile
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

from dap_transformers.errors import UserError, reading
from dap_transformers.languages import TATOEBA_36, base_language

logger = logging.getLogger(__name__)

#: The file store of OPUS. Its files are `OPUS-{corpus}/{version}/moses/{pair}.txt.zip`. The two
#: codes of a pair are in alphabetical order.
STORE = "https://object.pouta.csc.fi"


class OpusCorpus(NamedTuple):
    """One release of a corpus. `licence` is what its publishers state, in their words."""

    name: str
    version: str
    home: str
    licence: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


#: The corpora of the paper's section 4.1.
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
    without: Collection[tuple[str, str]] = (),
) -> dict[Path, OpusCorpus]:
    """Download the text of corpora in some languages and English, unless it is there already.

    Args:
        names: names of the paper's six corpora (`CORPORA`), or `["all"]`.
        languages: language codes, with or without regions. None are all 36 languages.
        without: pairs (corpus, language) to leave out.

    Returns:
        Path of each zip archive -> its corpus. Files that OPUS does not have are left out.
    """
    if list(names) == ["all"]:
        names = list(CORPORA)
    unknown = set(names) - set(CORPORA)
    if unknown:
        raise UserError(
            f"{' '.join(sorted(unknown))}: known are {', '.join(CORPORA)}; download any other "
            "corpus from https://opus.nlpl.eu, and give its files as data"
        )
    found = {}
    codes = dict.fromkeys(map(base_language, languages or TATOEBA_36))
    for name, language in product(names, codes):
        if (name, language) in without:
            continue
        corpus = CORPORA[name]
        for code in CODES.get((name, language), [language]):
            pair = "-".join(sorted((code, "en")))
            url = f"{STORE}/OPUS-{name}/{corpus.version}/moses/{pair}.txt.zip"
            path = Path(folder) / f"{name}_{corpus.version}.{pair}.txt.zip"
            if download(url, path):
                found[path] = corpus
    if not found:
        raise UserError(f"OPUS has none of the files of {' '.join(names)} in these languages")
    return found


def download(url: str, path: Path) -> bool:
    """Download and test a zip archive, unless it is there already. Tell whether there is one.

    Until it is complete and tested it is called `PATH.part`. A stopped download starts anew.
    """
    from torch.hub import download_url_to_file

    if path.exists():
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{path}.part")
    try:
        download_url_to_file(url, str(part))
    except HTTPError as error:
        logger.info("OPUS has no %s: %s", url, error)
        return False
    with reading(f"{url} is damaged, run again to download it anew"):
        damaged = zipfile.ZipFile(part).testzip()
        if damaged:
            raise zipfile.BadZipFile(damaged)
    os.replace(part, path)
    return True
