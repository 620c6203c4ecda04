"""Pairs of gettext catalogues are cleaned, chosen and held out by rule."""

import zipfile
from pathlib import Path

import pytest

from quickstart import bitext

PO = r"""
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n != 1;\n"

msgid "Add a <b>new</b> page"
msgstr "Eine <b>neue</b> Seite hinzufügen"

msgid "Delete %(name)s now"
msgstr "%(name)s jetzt löschen"

msgid "Same in both"
msgstr "same in both!"

msgid "Save"
msgstr "Speichern"

#, fuzzy
msgid "Not quite sure"
msgstr "Nicht ganz sicher"

msgid "Left to do"
msgstr ""

msgid "one open task"
msgid_plural "all open tasks"
msgstr[0] "eine offene Aufgabe"
msgstr[1] "alle offenen Aufgaben"

msgid "First line\n\tsecond &amp; last"
msgstr "Erste Zeile\n\tzweite &amp; letzte"

#~ msgid "No longer used"
#~ msgstr "Nicht mehr verwendet"
"""


def po(*pairs: tuple[str, str]) -> str:
    entries = "".join(f'msgid "{english}"\nmsgstr "{source}"\n\n' for english, source in pairs)
    return 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n' + entries


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for locale, text in files.items():
            archive.writestr(f"app/locale/{locale}/LC_MESSAGES/django.po", text)
    return path


def test_po_entries_are_cleaned_and_chosen(tmp_path: Path) -> None:
    assert bitext.read_wheels([wheel(tmp_path / "a.whl", {"de": PO})])["de"] == [
        ("Eine neue Seite hinzufügen", "Add a new page"),
        ("eine offene Aufgabe", "one open task"),
        ("alle offenen Aufgaben", "all open tasks"),
        ("Erste Zeile zweite & letzte", "First line second & last"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Delete %s?",
        "%d items",
        "Hello {name}",
        "{{ user }} left",
        "%(n)s pages",
        "up to %.1f MB",
        "{0} of {1}",
    ],
)
def test_strings_with_placeholders_are_dropped(text: str) -> None:
    assert bitext.clean(text) == ""


def test_percent_signs_and_escaped_characters_stay() -> None:
    assert bitext.clean("100% &lt;sure&gt;: &Yes,&nbsp;R&amp;D <br/>") == "100% <sure>: Yes, R&D"


def test_preferred_locale_wins_and_variants_fill_in(tmp_path: Path) -> None:
    files = {"pt_BR": po(("Good morning", "Bom dia BR"), ("Good night", "Boa noite"))}
    files |= {"pt": po(("Good morning", "Bom dia")), "nb": po(("Good morning", "God morgen"))}
    files |= {
        "zh_Hant": po(("Good morning", "早安早安")),
        "zh_Hans": po(("Good morning", "早上好")),
    }
    path = wheel(tmp_path / "a.whl", files)
    assert bitext.read_wheels([path]) == {
        "pt": [("Bom dia", "Good morning"), ("Boa noite", "Good night")],
        "zh": [("早上好", "Good morning")],
    }


@pytest.fixture
def corpus(tmp_path: Path) -> bitext.Corpus:
    english = [f"Sentence number {i}" for i in range(400)]
    files = {"de": po(*((e, f"Satz mit Nummer {i}") for i, e in enumerate(english)))}
    files["fr"] = po(
        *((e.upper() + "!", f"Phrase numéro {i % 300}") for i, e in enumerate(english))
    )
    return bitext.read_wheels([wheel(tmp_path / "a.whl", files)])


def test_no_held_out_string_is_in_training_and_sides_are_unique(corpus: bitext.Corpus) -> None:
    train, test = bitext.split(corpus, share=0.2, minimum=10)
    trained = {bitext.normalise(english) for pairs in train.values() for _, english in pairs}
    assert len(corpus["fr"]) == 300  # repeated sources are dropped
    for language, pairs in test.items():
        assert not trained & {bitext.normalise(english) for _, english in pairs}
        assert not {source for source, _ in train[language]} & {source for source, _ in pairs}
        assert [len(set(map(bitext.normalise, side))) for side in zip(*pairs, strict=True)] == [
            len(pairs)
        ] * 2
        assert len(train[language]) + len(pairs) == len(corpus[language])
        assert 0.1 < len(pairs) / len(corpus[language]) < 0.3


def test_a_small_test_set_is_left_out_and_a_large_one_cut_with_its_strings_out_of_training(
    corpus: bitext.Corpus,
) -> None:
    train, test = bitext.split(corpus, share=0.2, minimum=10_000)
    assert (set(train), test) == ({"de", "fr"}, {})
    cut_train, cut = bitext.split(corpus, share=0.2, minimum=10, maximum=20)
    _, whole = bitext.split(corpus, share=0.2, minimum=10)
    assert cut_train == train
    assert len(cut["de"]) == 20 < len(whole["de"])
    assert set(cut["de"]) < set(whole["de"])


def test_written_files_line_up(corpus: bitext.Corpus, tmp_path: Path) -> None:
    train, test = bitext.split(corpus, share=0.2, minimum=10)
    bitext.write(train, test, tmp_path / "out")
    rows = (tmp_path / "out" / "train" / "de-en.tsv").read_text("utf-8").splitlines()
    assert [tuple(row.split("\t")) for row in rows] == list(train["de"])
    stem = tmp_path / "out" / "test"
    sources = (stem / "tatoeba.deu-eng.deu").read_text("utf-8").splitlines()
    targets = (stem / "tatoeba.deu-eng.eng").read_text("utf-8").splitlines()
    assert list(zip(sources, targets, strict=True)) == list(test["de"])
    assert [s.split()[-1] for s in sources] == [t.split()[-1] for t in targets]
