"""Check which folder may import which, what the wheel holds, and that versions agree."""

import ast
import importlib
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

import dap.encoding
import dap.text
import modeling_dap
from configuration_dap import OLDEST_TRANSFORMERS
from dap import __version__

#: Layers, lowest first. A module imports from its own layer or from lower ones.
LAYERS = ("model", "dap", "command", "beside")
BESIDE = ("quickstart", "experiments", "benchmarks")
COMMANDS = ("train_dap", "eval_retrieval", "mine_bitext", "align_words", "run_xnli")
COMMANDS += ("prepare_data", "push_to_hub")
WITHOUT_MODEL = ("text", "prepare", "search", "reports")
#: Modules that others import by their full name. A folder's `__init__.py` does not load them,
#: because they are a command, or because `dap.prepare` needs one of them without the model.
IMPORTED_DIRECTLY = ("dap.publishing.onnx_export", "dap.ray.")

#: Name of a module or folder -> names that it imports.
Graph = dict[str, set[str]]


def own_modules() -> dict[str, Path]:
    """Return the file of each module, by its dotted name. A package has its `__init__.py`."""
    beside = ("setup", "dap_transformers")
    files = [path for path in REPOSITORY.glob("*.py") if path.stem not in beside]
    for folder in ("dap", *BESIDE):
        files += (REPOSITORY / folder).rglob("*.py")

    modules = {}
    for path in files:
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def layer_of(module: str) -> str:
    """Return the layer of a module, one of `LAYERS`."""
    root = module.split(".")[0]
    if root == "dap":
        return "dap"
    if root in BESIDE:
        return "beside"
    if root.endswith("_dap") and root != "train_dap":
        return "model"
    return "command"


def folder_of(module: str) -> str:
    """Return `dap.text` for `dap.text.corpus`. A module outside of `dap` stands for itself."""
    if layer_of(module) != "dap":
        return module
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
    """Return the imports between the folders of `dap` and the modules elsewhere."""
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


def test_folders_import_each_other_by_their_public_names(files: Graph) -> None:
    for name, imported in files.items():
        if name.startswith("dap.ray."):
            continue  # distributes the inner parts of dap.encoding and dap.search
        for other in imported:
            is_inner = layer_of(other) == "dap" and other != folder_of(other)
            is_foreign = folder_of(other) != folder_of(name)
            if is_inner and is_foreign:
                assert other.startswith(IMPORTED_DIRECTLY), f"{name} imports {other}"


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_folders_for_text_and_arrays_import_no_model(name: str, files: Graph) -> None:
    for module in files:
        if folder_of(module) == f"dap.{name}":
            imported = reachable(files, module)
            assert not [other for other in imported if layer_of(other) == "model"], module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_one_package_with_model_library_commands_and_recipes(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}

    expected = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("configs/**/*.yaml")}
    for name, path in own_modules().items():
        if layer_of(name) != "beside":
            expected.add(str(path.relative_to(REPOSITORY)).removeprefix("dap/"))
    for path in (REPOSITORY / "dap").rglob("*.*"):
        if not path.suffix.startswith(".py") or path.name == "py.typed":
            expected.add(str(path.relative_to(REPOSITORY / "dap")))
    assert held == {f"dap_transformers/{name}" for name in expected}


def test_modules_of_the_wheel_import_each_other_from_the_package(wheel: Path) -> None:
    ours = {name.split(".")[0] for name in own_modules()}
    archive = zipfile.ZipFile(wheel)
    for name in archive.namelist():
        source = archive.read(name)
        path = Path(name)
        if path.suffix == ".py" and layer_of(path.stem) == "model":
            # Published checkpoints hold these files.
            assert source == (REPOSITORY / path.name).read_bytes()
        elif path.suffix == ".py":
            for node in ast.walk(ast.parse(source)):
                imported = [node.module] if isinstance(node, ast.ImportFrom) else []
                if isinstance(node, ast.Import):
                    imported = [alias.name for alias in node.names]
                assert not ours & {str(module).split(".")[0] for module in imported}, name


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dap_transformers.reports", "--version"]
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == f"dap-transformers {__version__}\n", done.stderr

    archive = zipfile.ZipFile(wheel)
    metadata = {}
    for name in archive.namelist():
        if ".dist-info/" in name:
            metadata[Path(name).name] = archive.read(name).decode()
    assert metadata["top_level.txt"] == "dap_transformers\n"
    functions = re.findall(r"= dap_transformers\.(\S+):main", metadata["entry_points.txt"])
    modules = {module if module in COMMANDS else f"dap.{module}" for module in functions}
    assert modules == {*COMMANDS, "dap.publishing.onnx_export", "dap.reports.command_line"}


def test_a_checkout_has_the_names_of_the_wheel() -> None:
    import dap_transformers.encoding
    import dap_transformers.modeling_dap
    import dap_transformers.text.corpus as corpus

    assert dap_transformers.modeling_dap.DAPModel is modeling_dap.DAPModel
    assert dap_transformers.encoding.SentenceEncoder is dap.encoding.SentenceEncoder
    assert corpus.load_bitext is dap.text.load_bitext
    for absent in ("numpy", "absent", "text.absent"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"dap_transformers.{absent}")

    command = [sys.executable, "-m", "dap_transformers.reports", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout == f"dap-transformers {__version__}\n", done.stderr


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
