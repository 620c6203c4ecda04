"""Readers read damaged text to its last line, or refuse the file by name."""

import logging
import random
from pathlib import Path

from written import NAMES, many, write, write_format

from dap_transformers.errors import UserError
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import LineAudit, read_tables

PIECES = [
    b"\n", b"\r", b"\t", bytes(4), b"\xff", b"\xe2\x80\xa8", b'"', b"{", b"<", b"</tu>", b"null",
]  # fmt: skip
PO = 'msgid ""\nmsgstr "Language: de\\n"\n\n'
UNIT = '<tu><tuv xml:lang="it"><seg>{}</seg></tuv><tuv xml:lang="en"><seg>{}</seg></tuv></tu>'


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes of a file that is cut off, or in which a part is replaced or repeated."""
    start = draw.randrange(len(data) + 1)
    end = start + draw.choice([0, 1, 4, 60, 1000])
    fillers = [b"", draw.randbytes(end - start), draw.choice(PIECES) * 9, data[start:end] * 3]
    return data[:start] + draw.choice(fillers) + draw.choice([b"", data[end:], data[end:]])


def test_damaged_text_is_read_or_refused_by_name(tmp_path: Path) -> None:
    pairs = many(40)
    for number, name in enumerate(NAMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_format(folder, name, pairs)
    units = "".join(UNIT.format(*pair) for pair in pairs)
    write(tmp_path / "tmx/m.tmx", f'<tmx version="1.4"><body>{units}</body></tmx>')
    messages = "".join(f'msgid "{target}"\nmsgstr "{source}"\n\n' for source, target in pairs)
    write(tmp_path / "po/c.po", PO + messages)
    files = [path for path in sorted(tmp_path.rglob("*.*")) if path.is_file()]
    draw = random.Random(0)
    logging.disable(logging.WARNING)
    refused = []
    for path in files * 25:
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, draw))
        try:
            for (file,) in find_bitext(path).values():
                audit = LineAudit(file, 1.0)
                count = sum(map(len, read_tables(file, audit)))
                assert file.format in ("tmx", "po") or count + audit.bad <= audit.lines
        except (UserError, FileNotFoundError) as error:
            refused.append((str(path), str(error)))
        path.write_bytes(whole)
    logging.disable(logging.NOTSET)
    assert all(path in message for path, message in refused)
    assert 50 < len(refused) < 25 * len(files) - 50
