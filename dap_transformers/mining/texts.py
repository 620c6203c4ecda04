"""The two texts that are mined: their distinct sentences, their vectors, and the file of pairs.

A repeated sentence must be mined only once. Otherwise its copies would fill up the neighbourhoods
of other sentences.

Legend: `N` distinct sentences of a text, `D` dimensions, `L` lines.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dap_transformers.errors import UserError, counted
from dap_transformers.files import compressed_file, plain_suffix
from dap_transformers.text.archives import read_sentences
from dap_transformers.text.formats import SIDES, BitextFile, read_pairs
from dap_transformers.text.sentences import Sentence, read_translations
from dap_transformers.text.tmx_po import write_memory
from dap_transformers.text.tsv_csv import UNDETERMINED, find_columns, language_of
from dap_transformers.text_keys import is_blank

#: Pairs that are formatted at a time, a row group of Parquet.
GROUP_ROWS = 2**16
#: Ending of the name of a translation memory, which needs the languages.
MEMORY = ".tmx"
#: Ends in a Chinese or Japanese character, perhaps with quotation marks, dashes or dots behind it.
#: No blank stands there.
NO_BLANK = re.compile("[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef][\u2010-\u2027]*$")


class DistinctSentences(Sequence[str]):
    """The distinct sentences of a text, in the order of their first lines.

    A line of white space is empty: it holds no sentence. Lines that differ in any character hold
    different sentences.

    >>> text = DistinctSentences(["a", " ", "b", "a"])
    >>> list(text), text.rows.tolist(), text.first_line.tolist()
    (['a', 'b'], [0, -1, 1, 0], [1, 3])

    Args:
        lines: the lines of the text. They are read once.
        name: the file's name or another name, for messages.

    Attributes:
        rows: (L,) for each line the number of its sentence, from 0. It is -1 for an empty line.
        first_line: (N,) for each sentence the number of the first line that holds it, from 1.
    """

    def __init__(self, lines: Iterable[str], name: str | Path = "text") -> None:
        self.name = str(name)
        filled = (None if is_blank(line) else line for line in lines)
        coded = pa.array(filled, pa.large_string()).dictionary_encode()
        self.sentences = coded.dictionary  # (N,) in the order of their first lines
        self.rows = coded.indices.fill_null(-1).to_numpy().astype(np.int64)

        places = np.flatnonzero(self.rows >= 0)
        _, first = np.unique(self.rows[places], return_index=True)
        self.first_line = places[first] + 1
        if not len(self):
            raise UserError(f"{name}: none of its lines holds a sentence")

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, row: int) -> str:
        return self.sentences[row].as_py()

    def __str__(self) -> str:
        counts = self.counts()
        del counts["file"]
        return f"{self.name}: " + ", ".join(f"{counts[name]:,} {name}" for name in counts)

    def place(self, row: int) -> str:
        """Return the file and the line of a sentence, for messages."""
        return f"{self.name}, line {self.first_line[row]}"

    def counts(self) -> dict[str, Any]:
        """Return the name of the text's file, and its numbers of lines and sentences."""
        empty = int((self.rows < 0).sum())
        return {
            "file": Path(self.name).name,
            "lines": len(self.rows),
            "empty": empty,
            "repeated": len(self.rows) - empty - len(self),
            "distinct": len(self),
        }


class GroupedText(DistinctSentences):
    """The distinct groups of 1 to S neighbouring sentences of a text, single sentences first.

    A group counts as a line of `DistinctSentences`. S is the argument `largest`.

    Attributes:
        singles: all N sentences of the text in order, with their places in the file.
        groups: (N, S) for each sentence the numbers of the groups that begin with it, by size. The
            last groups are shorter, because the text ends.
        lengths: (N,) number of characters of each sentence.
        kinds: (N,) a number for each sentence. Sentences that differ only in digits, such as "Page
            7" and "Page 8", share it.
    """

    def __init__(self, sentences: Iterable[Sentence], name: str | Path, largest: int) -> None:
        self.singles = [each for each in sentences if not is_blank(each.text)]
        texts = [each.text for each in self.singles]
        self.lengths = np.array([len(text) for text in texts])
        without_digits = pa.array([re.sub(r"\d+", "0", text) for text in texts], pa.large_string())
        self.kinds = without_digits.dictionary_encode().indices.to_numpy()
        places = product(range(1, largest + 1), range(len(texts)))
        super().__init__((joined(texts[i : i + size]) for size, i in places), name)
        self.groups = self.rows.reshape(largest, -1).T

    def place(self, row: int) -> str:
        sentence = (self.first_line[row] - 1) % len(self.singles)
        return f"{self.name}, line {self.singles[sentence].line}"

    def counts(self) -> dict[str, Any]:
        return {"file": Path(self.name).name, "sentences": len(self.singles)}


#: The texts by "source" and "target".
Texts = Mapping[str, DistinctSentences]


def joined(sentences: Iterable[str]) -> str:
    """Join sentences by blanks, but without one behind Chinese or Japanese characters.

    >>> joined(["Ja.", "Nein."]), joined(["“是。”", "不。"])
    ('Ja. Nein.', '“是。”不。')
    """
    text = ""
    for sentence in sentences:
        text += sentence if not text or NO_BLANK.search(text) else f" {sentence}"
    return text


# ---------------------------------------------------------------------------- from files to texts


def read_texts(files: Sequence[str], is_parallel: bool = False) -> dict[str, DistinctSentences]:
    """Read two texts with one sentence per line, and equally many lines if `is_parallel`."""
    texts = {}
    for name, path in zip(SIDES, files):
        texts[name] = DistinctSentences(read_sentences(path), path)
    lines, target_lines = (len(text.rows) for text in texts.values())
    if is_parallel and lines != target_lines:
        raise UserError(
            f"{files[0]} has {counted(lines, 'line')}, {files[1]} has {target_lines}: line i of "
            "one must belong to line i of the other"
        )
    return texts


def read_texts_in_order(
    files: Sequence[str], languages: Sequence[str], split: bool | None, largest: int
) -> dict[str, GroupedText]:
    """Read two texts by `read_translations`, and make groups of at most `largest` sentences."""
    texts = {}
    for name, path, sentences in zip(SIDES, files, read_translations(files, languages, split)):
        texts[name] = GroupedText(sentences, path, largest)
    return texts


def read_known(path: str | Path) -> dict[str, DistinctSentences]:
    """Read known translations, a TSV file with source and target, without repeated pairs.

    A first line that names two languages, such as "de" and "en", is left out as a header.

    Returns:
        The texts "known_source" and "known_target", whose lines are the pairs.
    """
    columns = find_columns(str(path), UNDETERMINED, {UNDETERMINED})[UNDETERMINED]
    file = BitextFile(UNDETERMINED, (str(path),), "tsv", columns=columns)
    rows = read_pairs(file, max_bad_lines=0.0)
    pairs = dict.fromkeys((row["source"], row["target"]) for row in rows)
    first = next(iter(pairs), ("",))
    if all(map(language_of, first)):
        del pairs[first]
    source = DistinctSentences((source for source, _ in pairs), path)
    target = DistinctSentences((target for _, target in pairs), path)
    return {"known_source": source, "known_target": target}


# ------------------------------------------------------------------------------ the file of pairs


def pair_table(pairs: np.ndarray, texts: Texts) -> pa.Table:
    """Return pairs of lines, which count from 0, with their sentences and lines from 1.

    A side of which only vectors are known has no text, and no column for it.
    """
    columns = {"score": pairs["score"].round(6)}
    for name, text in texts.items():
        sentences = text.sentences.take(pa.array(text.rows[pairs[name]]))
        columns[name] = pa.array(sentences.to_pylist(), pa.string())
    for name in SIDES:
        columns[f"{name}_line"] = pairs[name] + 1
    return pa.table(columns)


def group_table(groups: np.ndarray, texts: Mapping[str, GroupedText]) -> pa.Table:
    """Return groups (`in_order.GROUP`) with their text and its places, from 1.

    The numbers of sentences in their lines, and the times of subtitles, are columns only where the
    text has them. A group without sentences has an empty text.
    """
    columns = {"score": pa.array(groups["score"].round(6), from_pandas=True)}  # NaN is null
    places = {}
    for name, text in texts.items():
        shown = ["line"]
        for kind in ("number", "time"):
            if {getattr(each, kind) for each in text.singles} != {Sentence._field_defaults[kind]}:
                shown.append(kind)
        sentences = []
        places |= {f"{name}_{kind}s": [] for kind in shown}
        for first, size in zip(groups[name], groups[f"{name}s"]):
            group = text.singles[first : first + size]
            sentences.append(joined(each.text for each in group))
            for kind in shown:
                places[f"{name}_{kind}s"].append([getattr(each, kind) for each in group])
        columns[name] = pa.array(sentences, pa.string())
    return pa.table(columns | places)


def write_pairs(table: pa.Table, path: str | Path, languages: Sequence[str] = ()) -> None:
    """Write a table of pairs or groups in the format that the name says.

    `.parquet`, `.jsonl` and `.tmx` keep every sentence unchanged. All other names give a table with
    tabs, where only a tab in a sentence becomes a space. Quotation marks are text there, as in
    every file that we read. The file is compressed if its name ends in `.gz` or `.xz`. Rows with an
    empty side are left out of `.tmx`.

    Args:
        languages: codes of source and target, for `.tmx`.
    """
    batches = table.to_batches(GROUP_ROWS)
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    suffix = plain_suffix(path)
    with compressed_file(path) as output:
        if suffix == ".parquet":
            pq.write_table(table, output, GROUP_ROWS)
        elif suffix == ".jsonl":
            for row in rows:
                output.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        elif suffix == MEMORY:
            sides = ((row["source"], row["target"]) for row in rows)
            write_memory(filter(all, sides), languages, output)
        else:
            _write_tsv(table.column_names, rows, output)


def _write_tsv(names: Sequence[str], rows: Iterable[dict[str, Any]], output: BinaryIO) -> None:
    """Write rows of literal text, below a header. Several lines are separated by blanks."""
    output.write("\t".join(names).encode() + b"\n")
    for row in rows:
        row["score"] = "" if row["score"] is None else f"{row['score']:.6f}"
        cells = []
        for value in row.values():
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            cells.append(text.replace("\t", " "))
        output.write("\t".join(cells).encode() + b"\n")
