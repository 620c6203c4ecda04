"""The wheel works in an environment of its own: a command, the model it saves, and types.

The environment has the installed packages of this one, but not this checkout.
"""

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import REPOSITORY
from forked import run_fresh
from wheels import build_wheel

pytestmark = pytest.mark.release


#: The variables of this process without PYTHONPATH, which may name the checkout.
VARIABLES = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

TYPED = """from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.encoding.encoder import SentenceEncoder

encoder = SentenceEncoder.from_pretrained("model")
vectors = encoder.encode(["Good morning!"])
arguments = parse_arguments([])
reveal_type(__version__)
reveal_type(encoder)
reveal_type(vectors)
reveal_type(arguments)
"""
#: Large packages are not read, because mypy would take minutes for them.
SETTINGS = """
[mypy]
[mypy-torch.*,transformers.*,datasets.*,huggingface_hub.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment that also finds this one's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    wheel = build_wheel(folder)
    run_fresh(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index"]
    run_fresh(*pip, wheel, env=VARIABLES)

    # A path in a .pth file does not run the .pth files of that path, such as that of a checkout.
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_a_command_trains_and_saves_a_model_with_its_code(
    environment: Path, flags: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    training = f"tr {flags} --max_steps 2 --use_cpu --output_dir {out}"
    run_fresh(environment / "bin/train-dap", *training.split(), cwd=tmp_path, env=VARIABLES)
    assert (out / "modeling_dap.py").read_bytes() == (REPOSITORY / "modeling_dap.py").read_bytes()


def test_mypy_sees_the_types(environment: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "user.py").write_text(TYPED)
    line = [sys.executable, "-m", "mypy", "--strict"]
    line += ["--python-executable", environment / "bin" / "python", "user.py"]
    printed = run_fresh(*line, cwd=tmp_path)
    revealed = re.findall(r'Revealed type is "(.+)"', printed)
    assert len(revealed) == 4, printed
    assert "Any" not in revealed
    assert re.search("float32|_32Bit", revealed[2]), revealed[2]
