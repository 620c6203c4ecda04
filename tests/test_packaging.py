"""Check which folder may import which, what the wheel holds, and that versions agree."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from wheels import build_wheel

from configuration_dap import OLDEST_TRANSFORMERS
from dap_transformers import __version__

#: Layers, lowest first. A module imports from its own layer or from lower ones.
LAYERS = ("model", "library", "command", "beside")
BESIDE = ("quickstart", "study", "benchmarks")
COMMANDS = ("train_dap", "eval_retrieval", "run_xnli")
PACKAGE = "dap_transformers"
#: Modules of `dap_transformers.commands` that all commands share.
SHARED = tuple(f"{PACKAGE}.commands.{name}" for name in ("edge", "arguments", "encoder_arguments"))
WITHOUT_MODEL = ("text", "prepare", "search", "reports")

#: Name of a module or folder -> names that it imports.
Graph = dict[str, set[str]]


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


def folder_of(module: str) -> str:
    """Return `dap_transformers.text` for `dap_transformers.text.corpus`."""
    return ".".join(module.split(".")[:2])


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Return the own modules that a file imports, also within functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            submodules = {f"{module}.{alias.name}" for alias in node.names} & modules
            names |= submodules or {module}
    return names & modules


def reachable(graph: Graph, start: str) -> set[str]:
    """Return everything that `start` imports, directly or through others."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


@pytest.fixture(scope="module")
def files() -> Graph:
    """Return the imports of each module."""
    modules = own_modules()
    graph = {}
    for name, path in modules.items():
        graph[name] = imports_of(path, set(modules)) - {name}
    return graph


@pytest.fixture(scope="module")
def folders(files: Graph) -> Graph:
    """Return the imports between the folders of the package and the modules elsewhere."""
    graph: Graph = {}
    for name, imported in files.items():
        folder = folder_of(name)
        others = {folder_of(other) for other in imported} - {folder}
        graph.setdefault(folder, set()).update(others)
    return graph


def test_no_module_imports_from_a_higher_layer(files: Graph) -> None:
    for name, imported in files.items():
        for other in imported:
            is_lower = LAYERS.index(layer_of(other)) < LAYERS.index(layer_of(name))
            # Commands do not import each other.
            is_same = layer_of(other) == layer_of(name) != "command"
            assert is_lower or is_same, f"{name} imports {other}"


def test_there_are_no_import_cycles(files: Graph, folders: Graph) -> None:
    # A module may import its own folder's `__init__.py`.
    modules = {name: imported - {folder_of(name)} for name, imported in files.items()}
    for graph in (modules, folders):
        assert not [name for name in graph if name in reachable(graph, name)]


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_folders_for_text_and_arrays_import_no_model(name: str, files: Graph) -> None:
    for module in files:
        if folder_of(module) == f"{PACKAGE}.{name}":
            imported = reachable(files, module)
            assert not [other for other in imported if layer_of(other) == "model"], module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_modules_of_the_checkout(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=REPOSITORY)
    inside = {name for name in listed.stdout.splitlines() if name.startswith(f"{PACKAGE}/")}
    at_the_top = {f"{name}.py" for name in own_modules() if layer_of(name) in ("model", "command")}
    assert held == inside | {name for name in at_the_top if (REPOSITORY / name).is_file()}


def test_wheel_and_checkout_import_the_same_names(wheel: Path, tmp_path: Path) -> None:
    names = [name for name in own_modules() if layer_of(name) != "beside"]
    code = "import importlib, sys, pathlib\n"
    code += f"for name in {names}: print(name, importlib.import_module(name).__file__)"
    for place in (REPOSITORY, wheel):
        environment = os.environ | {"PYTHONPATH": str(place)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        found = dict(line.split() for line in done.stdout.splitlines())
        assert list(found) == names, done.stderr
        assert all(file.startswith(str(place)) for file in found.values())

    scripts = (
        zipfile.ZipFile(wheel)
        .read(
            next(
                name
                for name in zipfile.ZipFile(wheel).namelist()
                if name.endswith("entry_points.txt")
            )
        )
        .decode()
    )
    modules = set(re.findall(r"= (\S+):main", scripts))
    assert modules >= {name for name in names if layer_of(name) == "command"}


@pytest.mark.slow
def test_an_older_transformers_is_refused_in_one_line() -> None:
    setup = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    assert f'"transformers>={OLDEST_TRANSFORMERS}"' in setup

    older = "import transformers; transformers.__version__ = '5.3.0'; import configuration_dap"
    command = [sys.executable, "-c", older]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    message = "transformers 5.3.0 is too old for DAP: pip install 'transformers>=5.17'"
    assert done.stderr.splitlines()[-1] == f"RuntimeError: {message}"


def test_the_citation_names_the_version_of_the_package() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
