"""Tables are read by the names of their columns, and CSV with its quotes."""

from pathlib import Path

import pytest
from written import read_folder, write

from dap_transformers.errors import UserError
from dap_transformers.text.tsv_csv import read_table

FRENCH = [('Bonjour, "toi"', "Hello; you"), ("Oui", "Yes, sir"), ("Non\n merci", "No")]
CELLS = ['"Bonjour, ""toi"""', "Oui", '"Non\n merci"']
ROWS = list(zip(CELLS, ('"Hello; you"', '"Yes, sir"', "No")))


def csv_of(header: str, row: str = "{},{}") -> str:
    return "\n".join([header, *(row.format(*cells) for cells in ROWS)])


#: (name of the file, its text, its pairs by language)
TABLES = [
    ("customers.csv", csv_of("fr,en"), {"fr": FRENCH}),
    ("customers.csv.gz", csv_of("id;English;French", "7;{1};{0}"), {"fr": FRENCH}),
    ("fr-en.csv", csv_of(" Source,Target"), {"fr": FRENCH}),
    ("fr-en.csv", csv_of("src\ttgt\tnote", "{}\t{}\t"), {"fr": FRENCH}),
    ("fr-en.csv", "\ufeff" + csv_of("{},{}".format(*ROWS[0])), {"fr": [FRENCH[0], *FRENCH]}),
    (
        "all.csv",
        csv_of("lang,text,English", "fr,{},{}") + "\nGerman,Ja,Yes\n,,\nen,a,a\n, ,\n",
        {"de": [("Ja", "Yes")], "fr": FRENCH},
    ),
    (
        "all.tsv",
        'deu\tfra\teng\n"Ja"\tOui\tYes\nNein\tNon\tNo\n',
        {"de": [('"Ja"', "Yes"), ("Nein", "No")], "fr": [("Oui", "Yes"), ("Non", "No")]},
    ),
    (
        "mined.tsv",
        "score\tsource\ttarget\tsource_line\ttarget_line\n1.2\teins\tone\t7\t8\n1\tzwei\ttwo\t8\t9",
        {"und": [("eins", "one"), ("zwei", "two")]},
    ),
]


@pytest.mark.parametrize(("name", "text", "pairs"), TABLES)
def test_columns_are_found_by_their_names(
    tmp_path: Path, name: str, text: str, pairs: dict
) -> None:
    write(tmp_path / name, text)
    for given in (tmp_path / name, tmp_path):
        assert read_folder(given) == pairs


def test_a_header_of_other_languages_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "all.csv", csv_of("fr,en"))
    with pytest.raises(UserError, match="all.csv: its header names fr, not de"):
        list(read_table(str(path), "de", "en"))
