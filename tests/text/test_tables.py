"""Tables are read by the names of their columns, and CSV with its quotes."""

from pathlib import Path

import pytest
from written import folder_text, lines_of, write

from dap_transformers.errors import UserError
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import read_pairs
from dap_transformers.text.tsv_csv import role_of

FRENCH = 'Bonjour, "toi"\tHello; you\nOui\tYes, sir\nNon\n merci\tNo\n'
CELLS = ['"Bonjour, ""toi"""', "Oui", '"Non\n merci"']
ROWS = list(zip(CELLS, ('"Hello; you"', '"Yes, sir"', "No")))


def csv_of(header: str, row: str = "{},{}") -> str:
    return "\n".join([header, *(row.format(*cells) for cells in ROWS)])


#: What a column holds -> names of such a column. The last ones are not understood.
ROLES = {
    "de": 'de| deu|German|de-AT|de_XX|deu_Latn|German (US)|Text (German)|# de|"deu"|de_text|'
    "sentence_de|German translation|target_de|German [de]",
    "source": "source|src|SRC TEXT|#source|source_text|sentence",
    "target": "target| TGT|trg|Translation|target_text",
    "source language": "lang|language|source_lang|src lang",
    "target language": "target_lang|Target language|TGT LANGUAGE",
    None: "non-German|xGerman|not de|German 2|de-fr|German words|Germans|dede|id_de|sentence1|"
    "source 2|the source|targets",
}
#: (name of the file, its text, its pairs by language as lines with a tab)
TABLES = [
    ("customers.csv", csv_of("fr,en"), {"fr": FRENCH}),
    ("customers.csv.gz", csv_of("id;English;French", "7;{1};{0}"), {"fr": FRENCH}),
    ("fr-en.csv", csv_of("src\ttgt\tnote", "{}\t{}\t"), {"fr": FRENCH}),
    (
        "fr-en.csv",
        "\ufeff" + csv_of("{},{}".format(*ROWS[0])),
        {"fr": 'Bonjour, "toi"\tHello; you\n' + FRENCH},
    ),
    (
        "all.csv",
        csv_of("lang,text,English", "fr,{},{}") + "\nGerman,Ja,Yes\n,,\nen,a,a\n, ,\n",
        {"de": "Ja\tYes\n", "fr": FRENCH},
    ),
    (
        "all.tsv",
        'deu\tfra\teng\n"Ja"\tOui\tYes\nNein\tNon\tNo\n',
        {"de": '"Ja"\tYes\nNein\tNo\n', "fr": "Oui\tYes\nNon\tNo\n"},
    ),
    (
        "mined.tsv",
        "score\tsource\ttarget\tsource_line\ttarget_line\n1.2\teins\tone\t7\t8\n1\tzwei\ttwo\t8\t9\n"
        "\tdrei\t\t9\t\n",
        {"und": "eins\tone\nzwei\ttwo\n"},
    ),
    ("de-en.csv", "\n\n# en;de\nYes;Ja\n", {"de": "Ja\tYes\n"}),
    ("xh-en.tsv", "en\txh\nYes\tEwe\n", {"xh": "Ewe\tYes\n"}),
    (
        "all.tsv",
        "src_lang\ttgt_lang\tsrc\ttgt\nde\ten\tJa\tYes\nde\tfr\tJa\tOui\nen\tde\tNo\tNein\n"
        " \ten\tJa\tYes\n",
        {"de": "Ja\tYes\n"},
    ),
    (
        "all.csv",
        "en,id,vi\nNot yet,Belum ada,Chưa\nYes,Ya,\n,,Không\n",
        {"id": "Belum ada\tNot yet\nYa\tYes\n", "vi": "Chưa\tNot yet\n"},
    ),
    ("all.csv", "id,en,vi,fr\n1,No,Không,\n", {"vi": "Không\tNo\n"}),
    ("all.csv", "id,en,de\ngreeting,Good day,Guten Tag\n", {"de": "Guten Tag\tGood day\n"}),
    ("de-en.csv", "source_id,source,target_id,target\na,Ja,b,Yes\n", {"de": "Ja\tYes\n"}),
    ("id-en.csv", "id,en\nYa,Yes\nBukan,No\n", {"id": "Ya\tYes\nBukan\tNo\n"}),
    (
        "id-en.csv",
        "id,de,en\nYa,Ja,Yes\nBukan,,No\n",
        {"de": "Ja\tYes\n", "id": "Ya\tYes\nBukan\tNo\n"},
    ),
    (
        "all.csv",
        "de,en\nJa,Yes\nJa,Yeah\nJa,Yep\n",
        {"de": "Ja\tYes\nJa\tYeah\nJa\tYep\n"},
    ),
    ("all.csv", 'de,en\n"' + "Ja" * 70_000 + '",Yes\n', {"de": "Ja" * 70_000 + "\tYes\n"}),
    ("all.csv", "de;es;en\nJa;;Yes\n;;\n", {"de": "Ja\tYes\n"}),
    ("de-en.csv", "Hund|Hunde,dog|dogs\n" * 2, {"de": "Hund|Hunde\tdog|dogs\n" * 2}),
    ("de-en.csv", 'de|en\n"Ja, gut"|Yes\n', {"de": "Ja, gut\tYes\n"}),
    ("de-en.csv", "Ja, gut;Yes, fine\n" * 2, {"de": "Ja, gut\tYes, fine\n" * 2}),
    ("de-en.csv", "sep=;\r\nde;en\r\nJa, gut;Yes\r\n", {"de": "Ja, gut\tYes\n"}),
    ("de-en.tsv", "Finnisch\tFinnish\nes\tit\n", {"de": "Finnisch\tFinnish\nes\tit\n"}),
    ("de-en.tsv", "es\tit\nText\ttext\n", {"de": "es\tit\nText\ttext\n"}),
]
#: Name and first line of a table whose columns are known only in part.
IN_PART = [
    ("de-en.csv", "English,Translation"),
    ("de-en.csv", "Englisch,German"),
    ("de-en.tsv", "English\tDeutsch"),
    ("de-en.csv", "de,fr"),
    ("fr-en.csv", "de,en"),
    ("all.csv", "de,en,German"),
    ("all.csv", "de,en,source"),
    ("all.csv", "de,en,lang"),
    ("de-en.tsv", "src\ttgt\ttranslation"),
    ("de-en.csv", "sentence,translation,source"),
    ("de-en.csv", "von,tgt_lang,src,tgt"),
]


@pytest.mark.parametrize(("role", "names"), ROLES.items())
def test_a_role_is_known_by_many_names(role: str | None, names: str) -> None:
    understood = {name: role_of(name) for name in names.split("|")}
    assert set(understood.values()) == {role}, understood


@pytest.mark.parametrize(("name", "text", "pairs"), TABLES)
def test_columns_are_found_by_their_names(
    tmp_path: Path, name: str, text: str, pairs: dict
) -> None:
    write(tmp_path / name, text)
    for given in (tmp_path / name, tmp_path):
        assert folder_text(given) == pairs


@pytest.mark.parametrize(("name", "header"), IN_PART)
def test_a_header_that_is_known_in_part_is_refused(tmp_path: Path, name: str, header: str) -> None:
    path = write(tmp_path / name, f"{header}\n{header}\n")
    with pytest.raises(UserError, match=f"{name}: the first line names"):
        find_bitext(path)


def test_rows_of_other_languages_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "de,en,Ja,Yes\n" + "de,fr,Ja,Oui\n" * 2 + "en,de,No,Nein\n"
    find_bitext(write(tmp_path / "all.csv", f"source_lang,target_lang,source,target\n{rows}"))
    assert "all.csv: rows of other languages are left out: {'de-fr': 2, 'en-de': 1}" in caplog.text


def test_bad_rows_are_a_share_of_the_whole_table(tmp_path: Path) -> None:
    rows = [*["de,Ja,Yes"] * 500, *["es,Sí,Yes"] * 1000, *["de,bad"] * 2, *["fr,Oui,Yes"] * 1500]
    path = write(tmp_path / "all.csv", lines_of(["lang,text,english", *rows]))
    for [file] in find_bitext(path).values():
        assert len(list(read_pairs(file, 2 / 2900))) >= 500
