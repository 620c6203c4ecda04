"""Parallel text in every format, ways to damage it at random, and a check that readers survive it.

`tests/text/test_fuzz.py` reads a few hundred damaged files.
"""

import gzip
import json
import lzma
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load
from safetensors.torch import save as dump

from dap_transformers.errors import UserError
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import LineAudit, read_tables

#: Bytes that readers of text often handle wrongly.
PIECES = [
    b"\n",
    b"\r",
    b"\r\n",
    b"\t",
    b"\0",
    bytes(4),
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b'"',
    b"{",
    b"]",
    b"<",
    b">",
    b"</tu>",
    b"\x1b[2J",
    b"NaN",
    b"-1",
    b"1e999",
    b"null",
    b"[]",
    b"\\ud800",
    b"\xed\xa0\x80",
]
#: Values that replace a value in a JSON file.
VALUES = [
    b"NaN",
    b"-1",
    b"0",
    b"1e999",
    b"1000000000",
    b"null",
    b"[]",
    b"[3]",
    b"{}",
    b"true",
    b'"x"',
    b'""',
    b"0.5",
]
#: A value of a JSON object: what follows `": ` up to the next bracket, comma or space.
JSON_VALUE = re.compile(rb'(?<=": )[^\s,{}\[\]]+')
#: Formats whose readers count lines.
COUNTED = ("tsv", "jsonl", "moses", "parquet")


def damaged(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """Return the bytes of a file with one random fault.

    Args:
        data: the bytes of the undamaged file.
        others: the bytes of other files, one of which may replace `data`.
        draw: source of randomness.
    """
    start = draw.randrange(len(data) + 1)
    end = min(len(data), start + draw.choice([1, 4, 60, 1000]))
    kind = draw.randrange(9)
    values = [found.span() for found in JSON_VALUE.finditer(data)]

    if kind == 0:  # cut off
        return data[:start]
    if kind == 1:  # random bytes
        return draw.randbytes(draw.choice([0, 1, 50, 5000]))
    if kind == 2:  # something follows
        return data + draw.choice([data, bytes(draw.randrange(9)), b"trailing"])
    if kind == 3:  # another file
        return draw.choice(others)
    if kind == 8 and values:  # another JSON value
        start, end = draw.choice(values)
        return data[:start] + draw.choice(VALUES) + data[end:]

    # A part is deleted, randomised, replaced by an awkward piece, or repeated.
    fillers = {
        4: b"",
        5: draw.randbytes(end - start),
        6: draw.choice(PIECES) * draw.choice([1, 1, 50]),
    }
    filler = fillers.get(kind, data[start:end] * 3)
    return data[:start] + filler + data[end:]


def write_texts(folder: Path, pairs: int = 40) -> None:
    """Write the same pairs in every format of parallel text."""
    rows = []
    for n in range(pairs):
        rows.append((f"Satz {n} über „das“ da", f"sentence {n} on “the” there\u2028!"))
    sources = [source for source, _ in rows]
    targets = [target for _, target in rows]

    table = "".join(f"{source}\t{target}\n" for source, target in rows).encode()
    left = "".join(f"{text}\n" for text in sources).encode()
    right = "".join(f"{text}\n" for text in targets).encode()
    records = [{"source": source, "target": target} for source, target in rows]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    unit = '<tu><tuv xml:lang="it"><seg>{}</seg></tuv><tuv xml:lang="en"><seg>{}</seg></tuv></tu>'
    units = "".join(unit.format(*row) for row in rows)
    head = 'msgid ""\nmsgstr ""\n"Language: af\\n"\n'
    head += '"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    messages = "".join(f'msgid "{b}"\nmsgstr "{a}"\n\n' for a, b in rows)

    files = {
        "de-en.tsv": table,
        "sw-en.tsv.gz": gzip.compress(table),
        "tr-en.tsv.xz": lzma.compress(table) * 2,
        "a.fr": left,
        "a.en": right,
        "b.ru.xz": lzma.compress(left),
        "b.en.gz": gzip.compress(right),
        "el-en.jsonl": "".join(lines).encode(),
        "m.tmx": f'<?xml version="1.0"?><tmx version="1.4"><body>{units}</body></tmx>'.encode(),
        "c.po": (head + messages).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with zipfile.ZipFile(folder / "en-es.txt.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("d.es", left)
        archive.writestr("d.en", right)
    pq.write_table(pa.Table.from_pylist(records), folder / "bg-en.parquet")


def read_damaged(folder: Path, case: int) -> str:
    """Damage one file of a folder, read the folder's files that remain readable, and mend the file.

    Args:
        folder: files written by `write_texts`.
        case: seed of the damage. The same case always damages the same file in the same way.

    Returns:
        "read", or "refused" if the reader refused the file with a message that names it.

    Raises:
        AssertionError: a line was counted neither as a pair nor as bad, or the message names no
            file.
        Exception: any other error that a reader raised.
    """
    draw = random.Random(case)
    files = sorted(folder.iterdir())
    path = draw.choice(files)
    whole = path.read_bytes()
    hurt = damaged(whole, [file.read_bytes() for file in files], draw)
    path.write_bytes(hurt)
    try:
        for bitext_files in find_bitext(path).values():
            for file in bitext_files:
                _require_all_lines_counted(file)
    except (UserError, FileNotFoundError) as error:
        if folder.name not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        return "refused"
    finally:
        assert path.read_bytes() == hurt, f"{path} has changed"
        path.write_bytes(whole)
    return "read"


def _require_all_lines_counted(file: object) -> None:
    """Read a bitext file and assert that each line counts as a pair, as bad, or is blank."""
    audit = LineAudit(file, 1.0)
    pairs = sum(len(table) for table in read_tables(file, audit))
    if file.format not in COUNTED:
        return
    message = f"{pairs} pairs and {audit.bad} bad lines of {audit.lines}"
    assert pairs + audit.bad <= audit.lines, message
    if file.format != "parquet":
        assert audit.lines == count_lines(Path(file.paths[0])), "lines are lost"


def count_lines(path: Path) -> int:
    """Count the lines of a file, packed file or archive member in the plainest way."""
    if path.parent.suffix == ".zip":
        with zipfile.ZipFile(path.parent) as archive:
            data = archive.read(path.name)
    elif path.suffix == ".gz":
        data = gzip.decompress(path.read_bytes())
    elif path.suffix == ".xz":
        data = lzma.decompress(path.read_bytes().rstrip(b"\0"))  # without padding
    else:
        data = path.read_bytes()
    data = data.removeprefix(b"\xef\xbb\xbf")
    has_open_end = data != b"" and not data.endswith(b"\n")
    return data.count(b"\n") + has_open_end


def damage(model: Path, file: str, content: Any) -> None:
    """Replace a file of a checkpoint.

    Args:
        content: the new JSON value. None removes the file. A dictionary replaces fields of a JSON
            file. A set names weights to leave out. A number keeps that share of the bytes.
    """
    before = (model / file).read_bytes() if (model / file).exists() else b""
    for path in model.glob(file):
        path.unlink()
    if content is None:
        return
    if isinstance(content, float):
        data = before[: int(content * len(before))]
    elif isinstance(content, set):
        (left_out,) = content
        weights = load(before)
        data = dump({name: weights[name] for name in weights if left_out not in name})
    elif isinstance(content, dict) and content:
        data = json.dumps(json.loads(before) | content).encode()
    else:
        data = json.dumps(content).encode()
    (model / file).write_bytes(data)
