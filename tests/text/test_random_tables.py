"""Random tables are read as by someone who is told the columns, or refused.

    DIFFERENTIAL_SECONDS=1800 python -m pytest -s tests/text/test_random_tables.py

Seeds are drawn until the time is over, at least 200. Their number and the number of refused tables
are printed.
"""

import csv
import logging
import os
import random
import time
from collections import Counter
from pathlib import Path

from written import read

from dap_transformers.errors import UserError
from dap_transformers.languages import ISO3, NAMES
from dap_transformers.text.find import find_bitext

SECONDS = float(os.environ.get("DIFFERENTIAL_SECONDS", "1"))
FIRST_SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))
#: Names of a column of text in a language, from its code, code of three letters and name. The
#: first ones must be understood. The others may be refused, but never mistaken.
LANGUAGE_NAMES = (
    "{0}", "{1}", "{2}", "{0}-AT", "{0}_XX", "{1}_Latn", "{2} (US)", "{2} text", "{0}_text",
    "Text ({2})", "# {0}", " {2} ", '"{1}"', "sentence_{0}", "{2} translation", "{2} [{0}]",
    "non-{2}", "x{2}", "not {0}", "{2} 2", "{0}-fr", "source ({0})", "src_{0}", "{2}, {0}",
    "{2} words", "{2}s", "{0}{0}", "id_{0}",
)  # fmt: skip
#: The same for other columns.
OTHER_NAMES = {
    "source": ("source", "src", "source_text", "Source", "sentence", "SRC TEXT", "#source")
    + ("source en", "sentence1", "source 2", "the source", "source/en"),
    "target": ("target", "tgt", "translation", "Translation", "target_text", " TGT", "trg")
    + ("target_de", "sentence2", "target 2", "translation (de)", "targets"),
    "source language": ("lang", "language", "source_lang", "src lang", "Source language") * 2,
    "target language": ("target_lang", "tgt_lang", "Target language", "TGT LANGUAGE") * 2,
}
PLAIN = 15  # of the names of languages
PLAIN_OTHERS = 7
#: Names of further columns, and their cells. The first ones do not matter.
FURTHER = (
    ("key", "menu.item{}"), ("note", "Bemerkung {}"), ("score", "0.{}"), ("id", "{}"),
    ("ID", "s-{}"), ("source_line", "{}"), ("source_id", "a{}"), ("", ""),
    ("source", "Ein Buch, Teil {}"), ("text", "x {}"), ("translation", "Nur so {}"),
    ("German", "halb {}"), ("en", "other {}"), ("English", "more {}"), ("lang", "fr"),
)  # fmt: skip
FREE = 8
#: Names of further columns that would be a lie if there were no other column of that language.
COPIES = {"German": "de", "en": "en", "English": "en", "lang": "en"}
Pairs = dict[str, list[tuple[str, str]]]


class RandomTable:
    """A table with its pairs by source language, as told by who knows the columns.

    Attributes:
        is_plain: whether it must be read.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.ending = draw.choice(["csv", "csv", "tsv"])
        self.languages = draw.sample([code for code in ISO3 if code != "en"], 3)
        self.is_named = draw.random() < 0.5  # for the first language
        self.kinds = self.draw_kinds()
        oddness = draw.choice([0, 0, 0.3])
        columns = []
        for kind in self.kinds:
            is_plain = draw.random() >= oddness
            columns.append((self.draw_name(kind, is_plain), kind, is_plain))
        for name, cell in draw.sample(FURTHER, draw.choice([0, 0, 1, 2])):
            is_free = (name, cell) in FURTHER[:FREE]
            is_copy = name not in COPIES or COPIES[name] in self.kinds
            if is_free or (is_copy and not oddness):
                columns.append((name, cell, is_free))
        draw.shuffle(columns)

        # Unknown names are taken for a pair. So is a name of two in a TSV file, at its place.
        _, kind, is_plain = columns[0]
        names_target = is_plain and kind in ("en", "target")
        looks_like_pair = self.ending == "tsv" and len(columns) == 2 and not names_target
        is_known = any(is_plain and kind in self.kinds for _, kind, is_plain in columns)
        if self.is_named and (looks_like_pair or not is_known):
            columns = [(self.draw_name(kind, True), kind, True) for kind in self.kinds]
        self.header = [name for name, *_ in columns]
        self.pairs: Pairs = {}
        self.rows = []
        for number in range(draw.randint(3, 9)):
            row = self.draw_row(number)
            self.rows.append([row.get(kind, kind.format(number)) for _, kind, _ in columns])
        self.is_plain = all(is_plain for *_, is_plain in columns) and bool(self.pairs)

    def draw_name(self, kind: str, is_plain: bool) -> str:
        """Draw a name of a column, which must be understood if it is plain."""
        names = OTHER_NAMES.get(kind, LANGUAGE_NAMES)
        plain = PLAIN_OTHERS if kind in OTHER_NAMES else PLAIN
        name = self.draw.choice(names[:plain] if is_plain else names[plain:])
        if kind in OTHER_NAMES:
            return name
        return name.format(kind, ISO3[kind], NAMES[kind])

    def draw_kinds(self) -> list[str]:
        """Draw what the columns hold."""
        kinds = ["source", "target"]
        draw = self.draw.random()
        if draw < 0.3:
            return [*kinds, "source language", *["target language"] * (draw < 0.2)]
        if draw < 0.45:
            self.is_named = True
            return kinds
        return ["en", *self.languages[: self.draw.choice([1, 1, 2, 3])]]

    def draw_row(self, number: int) -> dict[str, str]:
        """Draw what a row holds, and note its pairs."""
        row = {}
        signs = " ,;\"'"
        for kind in self.kinds:
            sign = self.draw.choice(signs)
            row[kind] = f"{kind}{sign} text number{sign} {number}"
            if len(self.kinds) > 2 and "source" not in row and self.draw.random() < 0.2:
                row[kind] = ""
        if "source language" in row:
            row["source language"] = self.draw.choice(["de", "fr", "en"])
        if "target language" in row:
            row["target language"] = self.draw.choice(["en", "en", "de"])

        if "source" not in row:
            sides = [(code, row[code], row["en"]) for code in self.kinds[1:]]
        elif row.get("target language", "en") == "en":
            code = row.get("source language", self.languages[0])
            sides = [(code, row["source"], row["target"])]
        else:
            sides = []
        for code, source, target in sides:
            if source and target and code != "en":
                self.pairs.setdefault(code, []).append((source, target))
        return row

    def write(self, folder: Path) -> Path:
        """Write the table, perhaps after blank lines."""
        stem = f"{self.languages[0]}-en" if self.is_named else "table"
        path = folder / f"{stem}.{self.ending}"
        rows = [self.header, *self.rows]
        with path.open("w", newline="") as file:
            file.write("\n" * self.draw.choice([0, 0, 1, 2]))
            if self.ending == "tsv":
                file.writelines("\t".join(row) + "\n" for row in rows)
            else:
                quoting = self.draw.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
                delimiter = self.draw.choice(",;\t")
                csv.writer(file, delimiter=delimiter, quoting=quoting).writerows(rows)
        return path


def test_random_tables_are_read_as_told_or_refused(tmp_path: Path) -> None:
    logging.disable(logging.WARNING)
    ends: Counter = Counter()
    stop = time.monotonic() + SECONDS
    seed = FIRST_SEED
    while time.monotonic() < stop or seed < FIRST_SEED + 200:
        table = RandomTable(random.Random(seed))
        path = table.write(tmp_path)
        shown = f"seed {seed}: {path.name}\n{path.read_text()}"
        found = {}
        try:
            for language, (file,) in find_bitext(path).items():
                found[language] = read(file, 0.0)
            end = "read"
        except UserError as error:
            end = "refused"
            shown = f"{error}\n{shown}"
        for language, pairs in found.items():
            assert pairs == table.pairs.get(language), f"{language}, {shown}"
        assert end == "read" or not table.is_plain, shown
        ends[end] += 1
        path.unlink()
        seed += 1
    logging.disable(logging.NOTSET)
    print(f"seeds {FIRST_SEED} to {seed - 1}: {dict(ends)}")
    assert min(ends["read"], ends["refused"]) > 10
