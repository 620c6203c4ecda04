"""Check which room may import which, what the wheel holds, and that versions agree."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import networkx as nx  # a requirement of torch
import pytest
import yaml
from conftest import REPOSITORY
from forked import run_fresh, run_python

import dap_transformers.commands
from configuration_dap import OLDEST_TRANSFORMERS
from dap_transformers import PUBLIC, __version__

#: Layers, lowest first. A module imports from its own layer or from lower ones.
LAYERS = ("model", "library", "command", "beside")
BESIDE = ("quickstart", "study", "benchmarks")
COMMANDS = ("train_dap", "eval_retrieval", "run_xnli")
PACKAGE = "dap_transformers"
#: Modules that all commands share.
SHARED = tuple(
    f"{PACKAGE}.commands{name}"
    for name in ("", ".safeguards", ".arguments", ".encoder_arguments", ".recipes")
)
WITHOUT_MODEL = ("text", "prepare", "search", "reports")


def own_modules() -> dict[str, Path]:
    """Return the file of each module, by its dotted name. A package has its `__init__.py`."""
    files = [path for path in REPOSITORY.glob("*.py") if path.stem != "setup"]
    for folder in (PACKAGE, *BESIDE):
        files += (REPOSITORY / folder).rglob("*.py")
    modules = {}
    for path in files:
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def layer_of(module: str) -> str:
    """Return the layer of a module, one of `LAYERS`."""
    root = module.split(".")[0]
    if root in BESIDE:
        return "beside"
    if root in COMMANDS or module.startswith(f"{PACKAGE}.commands.") and module not in SHARED:
        return "command"
    return "library" if root == PACKAGE else "model"


def room_of(module: str) -> str:
    """Return `dap_transformers.text` for `dap_transformers.text.corpus`."""
    return ".".join(module.split(".")[:2])


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Return the own modules that a file imports, also within functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & modules


@pytest.fixture(scope="module")
def files() -> nx.DiGraph:
    """Return which module imports which."""
    modules = own_modules()
    graph = nx.DiGraph()
    for name, path in modules.items():
        graph.add_node(name)
        graph.add_edges_from((name, other) for other in imports_of(path, {*modules}) - {name})
    return graph


def test_no_module_imports_from_a_higher_layer_and_no_file_imports_a_command(
    files: nx.DiGraph,
) -> None:
    for name, other in files.edges:
        assert layer_of(other) != "command", f"{name} imports {other}"
        is_lower = LAYERS.index(layer_of(other)) <= LAYERS.index(layer_of(name))
        assert is_lower, f"{name} imports {other}"


def test_there_are_no_import_cycles(files: nx.DiGraph) -> None:
    between = [(room_of(name), room_of(other)) for name, other in files.edges]
    rooms = nx.DiGraph([edge for edge in between if edge[0] != edge[1]])
    for graph in (files, rooms):
        assert not [*nx.simple_cycles(graph)]


def test_the_library_reads_no_flags_and_prints_nothing() -> None:
    for name, path in own_modules().items():
        if layer_of(name) == "library" and name not in SHARED:
            text = path.read_text()
            assert not re.search(r"^ *(import|from) argparse", text, re.MULTILINE), name
            calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            assert "print" not in {getattr(called, "id", None) for called in calls}, name


@pytest.mark.parametrize("room", WITHOUT_MODEL)
def test_rooms_for_text_and_arrays_import_no_model(room: str, files: nx.DiGraph) -> None:
    for module in files:
        if room_of(module) == f"{PACKAGE}.{room}":
            layers = {layer_of(other) for other in nx.descendants(files, module)}
            assert "model" not in layers, module


def test_the_wheel_holds_every_module_and_imports_every_name(tmp_path: Path) -> None:
    # A build leaves files in its folder.
    left_out = shutil.ignore_patterns(".*", "build", "out", "runs", "*.egg-info")
    tree = shutil.copytree(REPOSITORY, tmp_path / "tree", ignore=left_out)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run_fresh(*command, "--outdir", tmp_path, tree)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    installed = tmp_path / "installed"
    wheel.extractall(installed)
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    listed = subprocess.check_output(["git", "ls-files"], text=True, cwd=REPOSITORY).splitlines()
    top = {f"{name}.py" for name in own_modules() if layer_of(name) != "beside" and "." not in name}
    top -= {f"{PACKAGE}.py"}
    assert held == top | {name for name in listed if name.startswith(f"{PACKAGE}/")}

    names = sorted(name for name in own_modules() if layer_of(name) != "beside")
    code = "import importlib\n"
    code += f"for name in {names}: print(name, importlib.import_module(name).__file__)\n"
    code += f"import dap_transformers; print([getattr(dap_transformers, x) for x in {[*PUBLIC]}])"
    imported = [line.split() for line in run_python(code, installed).splitlines()[:-1]]
    assert [name for name, _ in imported] == names
    assert all(file.startswith(str(installed)) for _, file in imported)

    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    functions = re.findall(r"= dap_transformers.commands:(\S+)", wheel.read(entry_points).decode())
    commands = dap_transformers.commands
    modules = [getattr(commands, name).args[0] for name in functions]
    assert sorted(modules) == [name for name in names if layer_of(name) == "command"]


def test_readers_and_versions_of_commands_import_no_slow_library() -> None:
    code = "import sys, dap_transformers.text.corpus, dap_transformers.commands.prepare_data\n"
    code += "sys.argv = ['mine-bitext', '--version']\n"
    code += "from dap_transformers.commands import mine_bitext_main; mine_bitext_main()\n"
    code += "assert not {'datasets', 'polib', 'torch', 'xz'} & {*sys.modules}"
    assert run_fresh(sys.executable, "-c", code) == f"dap-transformers {__version__}\n"


@pytest.mark.slow
def test_an_older_transformers_is_refused_in_one_line() -> None:
    setup = (REPOSITORY / "setup.py").read_text()
    assert f'"transformers>={OLDEST_TRANSFORMERS}"' in setup

    older = "import transformers; transformers.__version__ = '5.3.0'; import configuration_dap"
    command = [sys.executable, "-c", older]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    message = "transformers 5.3.0 is too old for DAP: pip install 'transformers>=5.17'"
    assert done.stderr.splitlines()[-1] == f"RuntimeError: {message}"


def test_the_citation_names_the_version_of_the_package() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == __version__
