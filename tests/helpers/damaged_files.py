"""Ways to damage a file of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load
from safetensors.torch import save as dump


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
