"""A type checker sees the types of the library."""

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from forked import run_fresh

pytestmark = pytest.mark.release

TYPED = """from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.encoding.encoder import SentenceEncoder

encoder = SentenceEncoder.from_pretrained("model")
vectors = encoder.encode(["Good morning!"])
arguments = parse_arguments([])
reveal_type(encoder)
reveal_type(vectors)
reveal_type(arguments)
"""
#: Large packages are not read, because mypy would take minutes for them.
SETTINGS = """
[mypy]
follow_imports = silent
[mypy-torch.*,transformers.*,datasets.*,huggingface_hub.*]
follow_imports = skip
"""


def test_mypy_sees_the_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "user.py").write_text(TYPED)
    line = [sys.executable, "-m", "mypy", "--strict", "user.py"]
    printed = run_fresh(*line, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(REPOSITORY)})
    revealed = re.findall(r'Revealed type is "(.+)"', printed)
    assert len(revealed) == 3, printed
    assert "Any" not in revealed
    assert re.search("float32|_32Bit", revealed[1]), revealed[1]
