"""A question set holds only prose, only translated pages, and no translation of a mixed answer."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from written import json_rows, write

from study.question_sets import (
    Page,
    Pages,
    Source,
    read_page,
    read_pod,
    read_sections,
    read_set,
    write_set,
)

Reader = Callable[[Path], Iterator[tuple[str, Page]]]

MALLARD = """<page xmlns="http://projectmallard.org/1.0/" id="x">
<info><desc>Not wanted.</desc></info>
<title>{title}</title>
<p>{text} <guiseq><gui>File</gui><gui>Open</gui></guiseq>.</p>
<section><title>More</title><p>And <em>the</em> rest.</p></section>
</page>"""
DOCBOOK = """<title>Page</title><h2><a id="chapter"></a>Chapter 6. Using it</h2><p>Intro.</p>
<h3><a name="keyboard"></a>6.3.1. Choosing a <b>Key</b>board</h3><p>Select
a layout.</p><pre>code</pre><table><tr><td>cell</td></tr></table><p>Then go on.</p>
<h3><a name="idm38"></a>6.3.2. Generated</h3><p>No stable anchor.</p>"""
SPHINX = """<h2>Is it fast?<a class="headerlink" href="#is-it-fast">¶</a></h2><p>Yes.</p>
<h2>Statement<a class="headerlink" href="#statement">¶</a></h2><p>No question.</p>"""
OFFICE = """<h1 id="hd"><a name="b"></a>Setting Colors</h1><p>Choose one.</p>
<h2>For text</h2><p>Mark it.</p><footer><h3>Debug</h3>Title is: Setting Colors</footer>"""
POD = """=head1 NAME

=head2 How do I C<sort> a B<list>?
X<sort>

(contributed by someone)

Use L<sort|perlfunc>.

    sort @list;

Or C<< map >> I<it>.

=head1 AUTHOR
"""


@pytest.mark.parametrize(
    ("reader", "name", "text", "pages"),
    [
        (
            read_page,
            "turn-on.page",
            MALLARD.format(title="Turn it on", text="Press"),
            {"turn-on": Page("Turn it on", "Press File Open. More And the rest.")},
        ),
        (
            read_sections,
            "ch06.html",
            DOCBOOK,
            {"keyboard": Page("Choosing a Keyboard", "Select a layout. Then go on.")},
        ),
        (read_sections, "faq.html", SPHINX, {"is-it-fast": Page("Is it fast?", "Yes.")}),
        (
            read_page,
            "swriter/guide/color.html",
            OFFICE,
            {"color": Page("Setting Colors", "Choose one. For text Mark it.")},
        ),
        (
            read_pod,
            "perlfaq4.pod",
            POD,
            {"perlfaq4-2": Page("How do I sort a list?", "Use sort|perlfunc. Or map it.")},
        ),
    ],
)
def test_a_reader_keeps_the_prose(
    reader: Reader, name: str, text: str, pages: Pages, tmp_path: Path
) -> None:
    assert dict(reader(write(tmp_path / name, text))) == pages


def long(words: str) -> str:
    return " ".join(f"{words}{number}" for number in range(30))


@pytest.fixture
def languages(tmp_path: Path) -> dict[str, Pages]:
    """Read a small set.

    Of its nine English pages, German has six, one as it was and one whose answer is not translated.
    Two English pages ask the same, and the question of another is in its passage.
    """
    english = {
        f"page{number}": (f"Question number {number}", long(f"w{number}x")) for number in range(9)
    }
    german = {key: (f"Frage Nummer {key}", long(f"{key}y")) for key in list(english)[:8]}
    german["page6"] = english["page6"]
    german["page7"] = ("Frage ohne Antwort", english["page7"][1])
    more = {"twin1": ("Which of both", long("one")), "twin2": ("Which of both", long("two"))}
    more["echo"] = (long("echo"), long("echo"))
    for code, pages in (("C", english | more), ("de", german)):
        for key, (title, text) in pages.items():
            write(tmp_path / f"help/{code}/{key}.page", MALLARD.format(title=title, text=text))
    source = Source("", "help/{}/*.page", read_page, {"en": "C", "de": "de"})
    return read_set(source, tmp_path)


def test_a_mixed_index_has_translated_pages_but_not_those_of_its_answers(
    languages: dict[str, Pages], tmp_path: Path
) -> None:
    assert list(languages["en"]) == [f"page{number}" for number in range(9)]
    assert list(languages["de"]) == [f"page{number}" for number in range(6)]
    write_set(tmp_path, "gnome", languages)
    folder = tmp_path / "gnome-de-mixed"
    corpus = [row["_id"] for row in json_rows(folder / "corpus.jsonl")]
    queries = [row["_id"] for row in json_rows(folder / "queries.jsonl")]
    header, *lines = (folder / "qrels" / "test.tsv").read_text().splitlines()
    assert header == "query-id\tcorpus-id\tscore"
    assert lines == [f"{key}\ten:{key}\t1" for key in queries]
    assert len(queries) == 2
    english = {f"en:{key}" for key in languages["en"]}
    german = {f"de:{key}" for key in languages["de"].keys() - {*queries}}
    assert set(corpus) == english | german
