"""Check that README and the pages of docs/ and examples/ are true: code, flags, files and links."""

import dataclasses
import importlib
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY

from dap_transformers.training.arguments import parse_arguments
from modeling_dap import DAPForPreTraining

README = REPOSITORY / "README.md"
PAGES = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "examples").glob("*.md")),
]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)

#: Each test of a Python block runs it on a tiny model that stands under these names.
MODELS = (
    "out",
    "build/quickstart/model",
    "xlm-roberta-base",
    "intfloat/multilingual-e5-small",
)

#: README answers a stranger's questions in this order: what, when, install, output, train, ...
README_ORDER = (
    "# dap-transformers",
    "](docs/figures/overview.svg)",
    "**sentence embeddings**",
    "## When to use it",
    "## When not to use it",
    "## Install",
    "## A first vector",
    "make quickstart",
    "```text",
    "## Train",
    "## Evaluate",
    "## Mine",
    "## Publish",
    "## Results",
    "## Speed",
    "## Limits",
    "## Cite",
)


def python_blocks() -> list[object]:
    """Return the blocks of language `python`, which run offline. Blocks of `py` need the Hub."""
    blocks = []
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for number, block in enumerate(found, 1):
            blocks.append(pytest.param(block, id=f"{page.stem}-{number}"))
    return blocks


def commands_in_pages(program: str) -> list[list[str]]:
    """Return the arguments of every call of `program`. Lines with shell variables are left out."""
    commands = []
    for line in TEXT.replace("\\\n", " ").splitlines():
        is_command = line.startswith(("accelerate", "python")) and program in line
        if is_command and "$" not in line:
            without_comment = line.split(" #")[0]
            commands.append(without_comment.split(program, 1)[1].split())
    return commands


def heading_anchor(heading: str) -> str:
    """Return the anchor that GitHub makes from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_readme_tells_its_story_in_order() -> None:
    text = README.read_text(encoding="utf-8")
    places = [text.find(part) for part in README_ORDER]
    missing = [part for part, place in zip(README_ORDER, places, strict=True) if place < 0]
    assert not missing
    assert places == sorted(places)


@pytest.fixture(scope="module")
def checkout(tiny_bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder in which each name in `MODELS` is a tiny DAP model with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkout")
    model = folder / "tiny"
    DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr").save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((tiny_bert_dir / name).read_bytes())
    for name in MODELS:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tiny_bert_dir if name == "xlm-roberta-base" else model)
    return folder


@pytest.mark.parametrize("block", python_blocks())
def test_python_runs_as_it_is_written(
    block: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    names: dict = {}
    exec(block, names)
    if "vectors" in names:
        vectors = np.asarray(names["vectors"].tolist())
        assert vectors.ndim == 2
        assert np.isfinite(vectors).all()


def test_training_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    commands = commands_in_pages("train_dap.py ")
    assert commands
    for command in commands:
        if "--plugin" in command:  # needs a file of the reader; tests/test_train_dap.py writes it
            continue
        arguments = [re.sub(r"^out\b", str(tmp_path), word) for word in command]
        model, data, _ = parse_arguments([*arguments, "--use_cpu"])
        assert model.model_name_or_path or model.config_name
        assert data.train_data


@pytest.mark.parametrize(
    ("program", "modules"),
    [
        (
            "eval_retrieval.py",
            ("dap_transformers.encoding", "dap_transformers.ray.connection", "eval_retrieval"),
        ),
        (
            "dap_transformers/commands/mine.py",
            ("dap_transformers.encoding", "dap_transformers.ray.connection", "mine_bitext"),
        ),
        ("dap_transformers/commands/align.py", ("dap_transformers.encoding", "align_words")),
        ("run_xnli.py", ("dap_transformers.xnli", "run_xnli")),
        (
            "dap_transformers/commands/prepare.py",
            ("dap_transformers.prepare", "dap_transformers.ray.connection", "prepare_data"),
        ),
        ("dap_transformers/commands/push.py", ("push_to_hub",)),
        (
            "-m dap_transformers.publishing.onnx_export",
            ("dap_transformers.publishing.onnx_export",),
        ),
    ],
)
def test_commands_have_the_flags_that_the_pages_use(program: str, modules: tuple[str, ...]) -> None:
    known = {"model"}
    for module in modules:
        for item in vars(importlib.import_module(module)).values():
            if dataclasses.is_dataclass(item):
                known |= {field.name for field in dataclasses.fields(item)}

    commands = commands_in_pages(program)
    assert commands
    for command in commands:
        flags = {word[2:].split("=")[0] for word in command if word.startswith("--")}
        assert flags <= known, (program, flags - known)


def test_programs_in_the_pages_exist() -> None:
    folders = "dap|experiments|benchmarks|quickstart"
    modules = set(re.findall(rf"python -m ((?:{folders})[\w.]*)", TEXT))
    assert {"dap_transformers.reports", "benchmarks.train_step"} <= modules
    for name in sorted(modules):
        found = importlib.util.find_spec(name)
        assert found, name
        is_folder = found.submodule_search_locations
        assert not is_folder or importlib.util.find_spec(f"{name}.__main__"), name

    scripts = set(re.findall(r"python ([\w/]+\.py)", TEXT))
    assert {"train_dap.py", "examples/app.py"} <= scripts
    for name in scripts:
        assert (REPOSITORY / name).is_file(), name


def test_files_in_the_pages_exist() -> None:
    folders = "configs|dap|tests|quickstart|docs|examples|benchmarks|experiments"
    for name in re.findall(rf"`((?:{folders})/[\w./]+|\w+\.(?:py|md|txt))`", TEXT):
        is_readers_file = name == "my_loss.py"
        assert is_readers_file or (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {heading_anchor(each) for each in headings}, target
