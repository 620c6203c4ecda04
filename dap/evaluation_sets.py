"""Read the sentences of evaluation sets in whatever form they come, for the leak check (no models)."""

from collections.abc import Sequence
from pathlib import Path

from dap.archives import read_sentences
from dap.corpus import find_bitext
from dap.formats import BitextFile, read_pairs


def read_evaluation(paths: Sequence[str | Path]) -> list[str]:
    """Sentences of evaluation sets, in no particular order, each once.

    Args:
        paths: parallel text as `find_bitext` takes it; other files, and other files of a folder, are plain text, one
            sentence a line, or several between tabs (such as XNLI's premise and hypothesis). Moses sides are read
            alone, as evaluation sets (BUCC's) may have sides of different length.

    Raises:
        ValueError, FileNotFoundError: as `find_bitext`, `read_pairs` and `read_sentences`.
    """
    found: dict[str, None] = {}
    for path in paths:
        tables, texts = _evaluation_files(Path(path))
        for table in tables:
            found.update((side, None) for pair in read_pairs(table) for side in pair.values())
        for text in texts:
            found.update((field, None) for line in read_sentences(text) for field in line.split("\t"))
    return [text for text in found if text and not text.isspace()]


def _evaluation_files(path: Path) -> tuple[list[BitextFile], list[str]]:
    """Tables of pairs, and plain text."""
    try:
        files = [file for files in find_bitext(path).values() for file in files]
    except ValueError:  # no name in it tells a language
        files = []
    tables = [file for file in files if file.format != "moses"]
    sides = {side for file in files if file.format == "moses" for side in file.paths}
    known = sides.union(*(table.paths for table in tables))
    if path.is_dir():
        plain = {str(other.absolute()) for other in path.iterdir() if other.is_file()} - known
    else:
        plain = set() if files else {str(path)}
    return tables, sorted(sides | plain)
