"""The house itself: what the wheel holds, which module may import which, and the commands that README names."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

from conftest import REPOSITORY

SCRIPTS = ("train_dap", "eval_retrieval", "mine_bitext", "run_xnli", "prepare_data", "push_to_hub")
MODEL = ("modeling_dap", "objectives_dap", "heads_dap", "encoder_dap", "pairs_dap", "packing_dap", "losses_dap")
MODEL += ("configuration_dap",)
# Layers from the bottom; a module imports only from layers below its own, or within `dap` without a cycle.
ARROWS = {
    "configuration_dap": 0,
    "losses_dap": 0,
    "packing_dap": 0,
    "pairs_dap": 0,
    "encoder_dap": 1,
    "heads_dap": 2,
    "objectives_dap": 2,
    "modeling_dap": 3,
}
ARROWS |= {"dap": 4, "scripts": 5, "quickstart": 6, "experiments": 6}
PACKAGES = ("dap", "quickstart", "experiments")
NO_MODEL = (
    "dap.corpus",
    "dap.data",
    "dap.mixing",
    "dap.splitting",
    "dap.languages",
    "dap.records",
    "dap.rendering",
    "dap.results",
    "dap.retrieval",
    "dap.similarity",
    "dap.alignment",
    "dap.analysis",
    "dap.approximate",
    "dap.archives",
    "dap.blocks",
    "dap.bucc",
    "dap.clean_files",
    "dap.cleaning",
    "dap.data_card",
    "dap.deduplication",
    "dap.download",
    "dap.evaluation_sets",
    "dap.formats",
    "dap.leaks",
    "dap.mining",
    "dap.opus",
    "dap.paper",
    "dap.plan",
    "dap.preparation",
    "dap.processes",
    "dap.run_folder",
    "dap.shards",
    "dap.tables",
    "dap.tokens",
    "dap.tmx",
)


def own_modules() -> dict[str, Path]:
    files = [REPOSITORY / f"{name}.py" for name in (*SCRIPTS, *MODEL)]
    files += [path for package in PACKAGES for path in (REPOSITORY / package).glob("*.py")]
    return {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in files}


def layer(module: str) -> int:
    return ARROWS["scripts" if module in SCRIPTS else module.split(".")[0]]


def imports_of(path: Path) -> set[str]:
    """Own modules that a file imports, as `dap.data` or `modeling_dap`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found & own_modules().keys()


def test_imports_point_one_way() -> None:
    graph = {name: imports_of(path) - {name} for name, path in own_modules().items()}
    for name, wanted in graph.items():
        for other in wanted:
            same_package = name.split(".")[0] == other.split(".")[0] in PACKAGES
            below = layer(other) < layer(name)
            assert below or same_package, f"{name} imports {other}"
    for name in NO_MODEL:
        assert "modeling_dap" not in reachable(graph, name), f"{name} reaches the model"
    for name in graph:
        assert name not in reachable(graph, name), f"{name} imports itself through others"


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
    assert expected <= names
    assert not {name for name in names if name.startswith(("tests", "quickstart", "benchmarks", "experiments"))}
