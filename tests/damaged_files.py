"""Parallel text in every format, and ways to damage a file of a checkpoint."""

import gzip
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load
from safetensors.torch import save as dump


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
