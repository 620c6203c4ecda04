"""The house itself: what the wheel holds, which module may import which, and the commands that README names."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY

SCRIPTS = ("train_dap", "eval_retrieval", "mine_bitext", "run_xnli", "prepare_data", "push_to_hub")
MODEL = ("modeling_dap", "objectives_dap", "heads_dap", "encoder_dap", "losses_dap")
MODEL += ("configuration_dap",)
# Layers from the bottom; a module imports only from layers below its own, or within `dap` without a cycle.
ARROWS = {
    "configuration_dap": 0,
    "losses_dap": 0,
    "encoder_dap": 1,
    "heads_dap": 2,
    "objectives_dap": 2,
    "modeling_dap": 3,
}
ARROWS |= {"dap": 4, "scripts": 5, "quickstart": 6, "experiments": 6}
PACKAGES = ("dap", "quickstart", "experiments")
# What may not reach a model.
NO_MODEL = (
    "dap.text",
    "dap.prepare",
    "dap.search",
    "dap.reports",
    "dap.languages",
)
BY_THEMSELVES = {
    "dap.encoding.mteb",
    "dap.publishing.import_release",
    "dap.publishing.onnx_export",
}  # slow, or a command


def own_modules() -> dict[str, Path]:
    files = [REPOSITORY / f"{name}.py" for name in (*SCRIPTS, *MODEL)]
    files += [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")]
    return {name_of(path): path for path in files}


def name_of(path: Path) -> str:
    """The dotted name of a file; a folder's `__init__.py` has the name of the folder."""
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def folder_of(module: str) -> str:
    """`dap.text` of `dap.text.corpus`; elsewhere the module itself."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "dap" else module


def layer(module: str) -> int:
    return ARROWS["scripts" if module in SCRIPTS else module.split(".")[0]]


def imports_of(path: Path) -> set[str]:
    """Own modules that a file imports, as `dap.training.data` or `modeling_dap`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inside = {f"{module}.{alias.name}" for alias in node.names} & own_modules().keys()
            found |= inside or {module}
    return found & own_modules().keys()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: imports_of(path) - {name} for name, path in own_modules().items()}


def test_imports_point_one_way(graph: dict[str, set[str]]) -> None:
    for name, wanted in graph.items():
        for other in wanted:
            same_package = name.split(".")[0] == other.split(".")[0] in PACKAGES
            assert layer(other) < layer(name) or same_package, f"{name} imports {other}"


def test_folders_import_each_other_one_way_and_by_their_public_names(graph: dict[str, set[str]]) -> None:
    folders: dict[str, set[str]] = {}
    for name, wanted in graph.items():
        others = {other for other in wanted if folder_of(other) != folder_of(name)}
        folders.setdefault(folder_of(name), set()).update(map(folder_of, others))
        inside = {other for other in others if other.startswith("dap.") and other != folder_of(other)}
        assert not inside - BY_THEMSELVES, f"{name} reaches into a folder: {inside}"
    for name in folders:
        assert name not in reachable(folders, name), f"{name} imports itself through others"
    for name in NO_MODEL:
        assert "modeling_dap" not in reachable(folders, name), f"{name} reaches the model"


def test_files_of_a_folder_import_each_other_one_way(graph: dict[str, set[str]]) -> None:
    files = {name: {other for other in wanted if other != folder_of(name)} for name, wanted in graph.items()}
    for name in files:
        assert name not in reachable(files, name), f"{name} imports itself through others"


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, ahead = set(), list(graph[start])
    while ahead:
        if (name := ahead.pop()) not in seen:
            seen.add(name)
            ahead += graph[name]
    return seen


def test_wheel_holds_every_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    expected = {
        str(path.relative_to(REPOSITORY)) for name, path in own_modules().items() if layer(name) < layer("quickstart")
    }
    assert expected | {"dap/publishing/model_card.md"} <= names
    assert not {name for name in names if name.startswith(("tests", "quickstart", "benchmarks", "experiments"))}
