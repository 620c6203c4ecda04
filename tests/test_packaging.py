"""The plan of the house: which folder may import which, and what the wheel holds. Everything is read off the files."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY

#: A module imports only what stands further left, or at the same place; commands do not import each other.
PLACES = ("model", "dap", "command", "beside")
BESIDE = ("quickstart", "experiments", "benchmarks")
WITHOUT_MODEL = ("text", "prepare", "search", "reports")
#: Files of a folder that others import by their own names: slow to import, or commands.
BY_THEMSELVES = {"dap.publishing.onnx_export"}

Graph = dict[str, set[str]]


def own_modules() -> dict[str, Path]:
    """Dotted name -> file; a folder's `__init__.py` has the name of the folder."""
    files = [path for path in REPOSITORY.glob("*.py") if path.stem != "setup"]
    files += [path for folder in ("dap", *BESIDE) for path in (REPOSITORY / folder).rglob("*.py")]
    dotted = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


def place(module: str) -> str:
    root = module.split(".")[0]
    if root == "dap":
        return "dap"
    return (
        "beside"
        if root in BESIDE
        else "model"
        if root.endswith("_dap") and root != "train_dap"
        else "command"
    )


def folder(module: str) -> str:
    """`dap.text` of `dap.text.corpus`; elsewhere the module itself."""
    return ".".join(module.split(".")[:2]) if place(module) == "dap" else module


def imports(path: Path, modules: set[str]) -> set[str]:
    """The own modules that a file imports, within functions too."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            named |= {f"{module}.{alias.name}" for alias in node.names} & modules or {module}
    return named & modules


def reachable(graph: Graph, start: str) -> set[str]:
    seen, ahead = set(), list(graph[start])
    while ahead:
        if (name := ahead.pop()) not in seen:
            seen.add(name)
            ahead += graph[name]
    return seen


@pytest.fixture(scope="module")
def files() -> Graph:
    """Module -> the modules that it imports."""
    modules = own_modules()
    return {name: imports(path, set(modules)) - {name} for name, path in modules.items()}


@pytest.fixture(scope="module")
def folders(files: Graph) -> Graph:
    """The same between folders of `dap`, and files elsewhere."""
    graph: Graph = {}
    for name, wanted in files.items():
        graph.setdefault(folder(name), set()).update(
            {folder(other) for other in wanted} - {folder(name)}
        )
    return graph


def test_every_place_imports_only_what_stands_before_it(files: Graph) -> None:
    for name, other in ((one, other) for one, wanted in files.items() for other in wanted):
        before = PLACES.index(place(other)) < PLACES.index(place(name))
        together = place(other) == place(name) != "command"
        assert before or together, f"{name} imports {other}"


def test_nothing_is_imported_in_a_circle(files: Graph, folders: Graph) -> None:
    inside = {
        name: wanted - {folder(name)} for name, wanted in files.items()
    }  # but a folder's own `__init__.py`
    for graph in (inside, folders):
        assert not [name for name in graph if name in reachable(graph, name)]


def test_folders_import_each_other_by_their_public_names(files: Graph) -> None:
    for name, wanted in files.items():
        hidden = {
            other
            for other in wanted
            if place(other) == "dap" and other != folder(other) != folder(name)
        }
        assert not hidden - BY_THEMSELVES, f"{name} reaches into a folder"


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_text_and_arrays_know_no_model(name: str, folders: Graph) -> None:
    assert not [other for other in reachable(folders, f"dap.{name}") if place(other) == "model"]


def test_the_wheel_holds_model_library_and_commands_alone(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # a copy, as setuptools adds what an earlier build left in build/
    shutil.copytree(
        REPOSITORY, tree, ignore=shutil.ignore_patterns(".*", "build", "out", "runs", "*.egg-info")
    )
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    held = {
        name
        for name in zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
        if ".dist-info/" not in name
    }
    files = [path for name, path in own_modules().items() if place(name) != "beside"]
    files += [
        path for path in (REPOSITORY / "dap").rglob("*.*") if not path.suffix.startswith(".py")
    ]  # templates
    assert held == {str(path.relative_to(REPOSITORY)) for path in files}
