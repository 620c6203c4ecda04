"""Pairs of gettext catalogues are cleaned, chosen and held out by rule."""

from pathlib import Path

import pytest
from written import read, text_of, write, zip_of

from dap_transformers.evaluation.retrieval import Retrieval
from eval_retrieval import EvaluationArguments
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
    place = "app/locale/{}/LC_MESSAGES/django.po"
    return zip_of(path, {place.format(locale): text for locale, text in files.items()})


def test_po_entries_are_cleaned_and_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = wheel(tmp_path / "a.whl", {"de": PO, "fr": po(("Save all of it", ""))})
    assert list(map("\t".join, bitext.read_wheels([path])["de"])) == [
        "Eine neue Seite hinzufügen\tAdd a new page",
        "eine offene Aufgabe\tone open task",
        "alle offenen Aufgaben\tall open tasks",
        "Erste Zeile zweite & letzte\tFirst line second & last",
    ]
    assert not caplog.text


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
    others = {"pt": "Bom dia", "nb": "God morgen", "zh_Hant": "早安早安", "zh_Hans": "早上好"}
    files |= {locale: po(("Good morning", text)) for locale, text in others.items()}
    path = wheel(tmp_path / "a.whl", files)
    assert bitext.read_wheels([path]) == {
        "pt": [("Bom dia", "Good morning"), ("Boa noite", "Good night")],
        "zh": [("早上好", "Good morning")],
    }


@pytest.fixture
def corpus(tmp_path: Path) -> bitext.Corpus:
    english = [f"Sentence number {i}" for i in range(1500)]
    german = po(*((text, f"Satz mit Nummer {i}") for i, text in enumerate(english)))
    french = po(*((f"{text.upper()}!", f"Numéro {i % 1200}") for i, text in enumerate(english)))
    few = po(*((text, f"Numero {i}") for i, text in enumerate(english[:100])))
    return bitext.read_wheels([wheel(tmp_path / "a.whl", {"de": german, "fr": french, "it": few})])


def test_no_held_out_string_is_in_training_and_sides_are_unique(corpus: bitext.Corpus) -> None:
    train, test = bitext.split(corpus)
    trained = {bitext.normalise(english) for pairs in train.values() for _, english in pairs}
    assert len(corpus["fr"]) == 1200  # repeated sources are dropped
    assert {language: len(pairs) for language, pairs in test.items()} == {
        "de": bitext.MOST_TESTED,
        "fr": min(bitext.MOST_TESTED, 1200 - len(train["fr"])),
    }  # Italian has too few
    for language, pairs in test.items():
        assert not trained & {bitext.normalise(english) for _, english in pairs}
        assert not {source for source, _ in train[language]} & {source for source, _ in pairs}
        for side in zip(*pairs):
            assert len(set(map(bitext.normalise, side))) == len(pairs)
    for language in corpus:
        assert 0.1 < 1 - len(train[language]) / len(corpus[language]) < 0.25


def test_written_files_line_up(corpus: bitext.Corpus, tmp_path: Path) -> None:
    train, test = bitext.split(corpus)
    earlier = write(tmp_path / "test/tatoeba.ita-eng.eng", "of an earlier version")
    bitext.write(train, test, tmp_path)
    assert (tmp_path / "train/de-en.tsv").read_bytes() == text_of(train["de"])
    assert read(tmp_path / "test/de-en.de") == list(test["de"])
    assert not earlier.exists()
    (retrieval,) = EvaluationArguments(data_dir=[str(tmp_path / "test")]).all_evaluators()
    assert retrieval.pairs == test
    assert type(retrieval) is Retrieval  # the paper's numbers are of another text
