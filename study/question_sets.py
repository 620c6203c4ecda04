"""Build question sets for search out of the manuals that Debian ships.

    python -m study.question_sets OUT/

- It needs Debian with its package index (`apt-get update`); packages are unpacked, not installed.
- A question is a heading. Its answer is the beginning of the text below.
- The same page has the same id in all languages, so that German questions find English answers.
- Every folder below has BEIR's layout: corpus.jsonl, queries.jsonl and qrels/test.tsv.

    OUT/gnome-de/        German questions, German passages
    OUT/gnome-de-en/     German questions, English passages
    OUT/gnome-de-mixed/  German questions to a third of the pages, English passages of all pages,
                         and German passages of the other two thirds
"""

import argparse
import hashlib
import html
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ENGLISH = "en"
#: Pages of a set at most.
MOST_PAGES = 160
#: Characters of a passage at most, about 90 tokens, and of a passage and a question at least.
MOST_CHARACTERS = 400
LEAST_ANSWER = 120
LEAST_QUESTION = 12
#: Languages whose script needs fewer characters: their share.
DENSE = {"ja": 0.45, "zh": 0.4}
#: A page counts as translated if it shares fewer of its words with the English page.
SHARED_WORDS = 0.5


@dataclass(frozen=True)
class Page:
    """A question and the passage that answers it, as plain text."""

    question: str
    passage: str


Pages = dict[str, Page]
"""The pages of a language by id."""


@dataclass(frozen=True)
class Source:
    """Where a set comes from.

    Attributes:
        packages: names of Debian packages, with spaces between them.
        files: glob below the folder of the unpacked packages; {} stands for the language.
        reader: function that yields (id, page) of a file.
        languages: our name of a language -> its name in `files`.
    """

    packages: str
    files: str
    reader: Callable[[Path], Iterator[tuple[str, Page]]]
    languages: Mapping[str, str]


def plain(markup: str) -> str:
    """Return the text between the tags, with single spaces and none before punctuation."""
    blocks = re.sub(r"</(p|li|div|dt|dd|title|gui|key)>|<br", r" \g<0>", markup)
    text = html.unescape(re.sub(r"<[^>]*>", "", blocks))
    return re.sub(r" ([.,;)])", r"\1", " ".join(text.split()))


#: What is no prose, in HTML and in the pages of GNOME's help.
NO_PROSE = r"<(pre|table|script|style|footer|info|comment)\b.*?</\1>|<!--.*?-->"


def split_markup(path: Path, heading: str) -> Iterator[tuple[str, str, str]]:
    """Yield the last anchor, the text and the prose below of each heading of a file.

    Args:
        path: HTML or XML.
        heading: pattern of the tag of a heading.
    """
    markup = re.sub(NO_PROSE, " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for part in re.split(rf"(?=<{heading}\b)", markup)[1:]:
        title, _, text = re.split(rf"</({heading})>", part, maxsplit=1)
        anchors = re.findall(r'<a [^>]*\b(?:id|name|href)="#?([^"]*)"', title)
        yield anchors[-1] if anchors else "", plain(title), plain(text)


def read_page(path: Path) -> Iterator[tuple[str, Page]]:
    """Yield a file of help as one page: its first heading asks, everything below answers."""
    heading = "title" if path.suffix == ".page" else "h[1-4]"
    (_, question, text), *others = split_markup(path, heading)
    for _, title, more in others:
        text += f" {title} {more}"
    yield path.stem, Page(question, text)


def read_sections(path: Path) -> Iterator[tuple[str, Page]]:
    """Yield the numbered sections of a DocBook manual and the questions of a Sphinx manual."""
    for anchor, title, text in split_markup(path, "h[1-4]"):
        found = re.fullmatch(r"[A-Z\d]+(?:\.\d+)+\. (.+)|(.+\?) *¶", title)
        # Generated anchors differ between languages.
        if found and not re.fullmatch(r"idm\d+", anchor):
            yield anchor, Page(found[1] or found[2], text)


def read_pod(path: Path) -> Iterator[tuple[str, Page]]:
    """Yield the questions of a chapter of Perl's FAQ, without code and indices."""
    pod = re.sub(r"^([ \t]|X<|\(contributed).*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
    # C<...> is code, and codes can be nested once.
    for _ in range(2):
        pod = re.sub(r"[A-Z]<+([^<>]*)>+", r"\1", pod)
    for number, part in enumerate(re.split(r"^=\w+ *", pod, flags=re.MULTILINE)):
        question, _, answer = part.partition("\n")
        if question.endswith("?"):
            yield f"{path.stem}-{number}", Page(question, " ".join(answer.split()))


SOURCES = {
    "gnome": Source(
        "gnome-user-docs",
        "usr/share/help/{}/gnome-help/*.page",
        read_page,
        {"en": "C", "de": "de", "fr": "fr", "ru": "ru"},
    ),
    "mail": Source(
        "evolution-common",
        "usr/share/help/{}/evolution/*.page",
        read_page,
        {"en": "C", "de": "de", "fr": "fr", "ru": "ru"},
    ),
    "office": Source(
        "libreoffice-help-en-us libreoffice-help-de libreoffice-help-fr libreoffice-help-ru "
        "libreoffice-help-ja",
        "usr/share/libreoffice/help/{}/text/*/guide/*.html",
        read_page,
        {"en": "en-US", "de": "de", "fr": "fr", "ru": "ru", "ja": "ja"},
    ),
    "installer": Source(
        "installation-guide-amd64",
        "usr/share/doc/installation-guide-amd64/{}/*.html",
        read_sections,
        {"en": "en", "de": "de", "fr": "fr", "ru": "ru", "ja": "ja", "zh": "zh_CN"},
    ),
    "reference": Source(
        "debian-reference-en debian-reference-de debian-reference-fr debian-reference-ja "
        "debian-reference-zh-cn",
        "usr/share/debian-reference/*.{}.html",
        read_sections,
        {"en": "en", "de": "de", "fr": "fr", "ja": "ja", "zh": "zh-cn"},
    ),
    "perl": Source("perl-doc", "usr/share/perl/*/pod/perlfaq[1-9].pod", read_pod, {"en": ""}),
    "python": Source(
        "python-celery-doc python-django-doc python-scrapy-doc python-sqlalchemy-doc",
        "usr/share/doc/python-*-doc/html/**/*.html",
        read_sections,
        {"en": ""},
    ),
}


# Choosing pages


def read_pages(source: Source, root: Path, language: str) -> Pages:
    """Return the pages of a language that have one clear question, which they do not repeat."""
    pages: Pages = {}
    for path in sorted(root.glob(source.files.format(source.languages[language]))):
        pages.update(source.reader(path))

    texts = Counter()
    for page in pages.values():
        texts.update((page.question, page.passage))
    scale = DENSE.get(language, 1)
    kept = {}
    for key, page in pages.items():
        once = texts[page.question] == texts[page.passage] == 1
        repeats = page.question.lower() in page.passage.lower()
        question_fits = len(page.question) >= LEAST_QUESTION * scale
        if once and not repeats and question_fits and len(page.passage) >= LEAST_ANSWER * scale:
            kept[key] = Page(page.question, page.passage[: int(MOST_CHARACTERS * scale)].strip())
    return kept


def is_translated(page: Page, english: Page) -> bool:
    """Tell whether neither question nor passage is still in English."""
    for ours, theirs in ((page.question, english.question), (page.passage, english.passage)):
        words = set(ours.lower().split())
        if len(words & set(theirs.lower().split())) > SHARED_WORDS * len(words):
            return False
    return True


def digest(key: str) -> str:
    """Return a number that puts pages in an arbitrary order that never changes."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_set(source: Source, root: Path) -> dict[str, Pages]:
    """Return the chosen pages of each language, those first that most languages have."""
    english = read_pages(source, root, ENGLISH)
    languages = {}
    for language in source.languages:
        languages[language] = {}
        for key, page in read_pages(source, root, language).items():
            if language == ENGLISH or (key in english and is_translated(page, english[key])):
                languages[language][key] = page

    count = Counter(key for pages in languages.values() for key in pages)
    chosen = sorted(english, key=lambda key: (-count[key], digest(key)))[:MOST_PAGES]
    for language, pages in languages.items():
        languages[language] = {key: pages[key] for key in sorted(chosen) if key in pages}
    return languages


# Writing BEIR's layout


def write_folder(
    folder: Path, corpus: Mapping[str, str], pages: Mapping[str, Page], answered_by: str = ""
) -> None:
    """Write passages by id, and the questions of pages.

    Args:
        folder: folder to make.
        corpus: id -> passage.
        pages: id -> page whose question is asked.
        answered_by: prefix of the id of the answer in `corpus`.
    """
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    documents = [{"_id": key, "title": "", "text": text} for key, text in corpus.items()]
    queries = [{"_id": key, "text": page.question} for key, page in pages.items()]
    for name, rows in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    lines = [f"{key}\t{answered_by}{key}\t1\n" for key in pages]
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels/test.tsv").write_text(header + "".join(lines), encoding="utf-8")


def write_set(out: Path, name: str, languages: Mapping[str, Pages]) -> None:
    """Write the folders of a set: each language, its questions in English, and mixed."""
    answers = {key: page.passage for key, page in languages[ENGLISH].items()}
    for language, pages in languages.items():
        passages = {key: page.passage for key, page in pages.items()}
        write_folder(out / f"{name}-{language}", passages, pages)
        if language == ENGLISH:
            continue
        write_folder(out / f"{name}-{language}-en", answers, pages)
        asked = sorted(pages, key=digest)[: len(pages) // 3]
        mixed = {f"en:{key}": text for key, text in answers.items()}
        for key in sorted(pages.keys() - asked):
            mixed[f"{language}:{key}"] = passages[key]
        asked_pages = {key: pages[key] for key in asked}
        write_folder(out / f"{name}-{language}-mixed", mixed, asked_pages, answered_by="en:")


def unpack(packages: str, root: Path) -> list[str]:
    """Download packages, unpack them into a folder, and return the names of their files."""
    subprocess.run(["apt-get", "download", "--quiet=2", *packages.split()], cwd=root, check=True)
    files = sorted(root.glob("*.deb"))
    for file in files:
        subprocess.run(["dpkg-deb", "--extract", file, root], check=True)
    return [file.name for file in files]


def main() -> None:
    """Build all sets, and print the number of questions of each language."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the sets; packages.txt tells versions")
    out = parser.parse_args().out
    files = []
    for name, source in SOURCES.items():
        with tempfile.TemporaryDirectory() as root:
            files += unpack(source.packages, Path(root))
            languages = read_set(source, Path(root))
        write_set(out, name, languages)
        counts = [f"{language} {len(pages)}" for language, pages in languages.items()]
        print(f"{name}: {', '.join(counts)}", flush=True)
    (out / "packages.txt").write_text("\n".join(files) + "\n")


if __name__ == "__main__":
    main()
