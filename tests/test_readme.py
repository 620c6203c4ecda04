"""What README and the pages of docs/ say can be done as it is written."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
from conftest import REPOSITORY

from dap.training.arguments import parse_arguments
from modeling_dap import DAPForPreTraining

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def readme_commands(program: str) -> list[list[str]]:
    """The arguments of each call of `program`, but of those in shell loops."""
    lines = [line.split(" #")[0] for line in TEXT.replace("\\\n", " ").splitlines() if "$" not in line]
    commands = [line for line in lines if program in line and line.startswith(("accelerate", "python"))]
    return [command.split(program, 1)[1].split() for command in commands]


def test_readme_training_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    commands = readme_commands("train_dap.py ")
    assert len(commands) >= 2
    for argv in commands:
        model, data, _ = parse_arguments([re.sub(r"^out\b", str(tmp_path), word) for word in argv] + ["--use_cpu"])
        assert model.model_name_or_path or model.config_name
        assert data.train_data


@pytest.mark.parametrize(
    ("program", "modules"),
    [
        ("eval_retrieval.py", ("dap.encoding.arguments", "eval_retrieval")),
        ("mine_bitext.py", ("dap.encoding.arguments", "mine_bitext")),
        ("run_xnli.py", ("dap.xnli.arguments",)),
        ("prepare_data.py", ("prepare_data", "dap.prepare.options")),
        ("push_to_hub.py", ("push_to_hub",)),
        ("-m dap.encoding.onnx", ("dap.encoding.onnx",)),
    ],
)
def test_flags_in_readme_are_those_of_the_commands(program: str, modules: tuple[str, ...]) -> None:
    known = set()
    for module in map(importlib.import_module, modules):
        own = [item for item in vars(module).values() if dataclasses.is_dataclass(item)]
        known |= {field.name for item in own for field in dataclasses.fields(item)} | {"model"}
    commands = readme_commands(program)
    assert commands
    for argv in commands:
        flags = {word[2:].split("=")[0] for word in argv if word.startswith("--")}
        assert flags <= known, (program, flags - known)


def test_readme_names_files_that_exist() -> None:
    folders = "configs|dap|tests|quickstart|docs|examples|benchmarks"
    for name in re.findall(rf"`((?:{folders})/[\w./]+|\w+\.(?:py|md|txt))`", TEXT):
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        text = (page.parent / path).read_bytes().decode("utf-8", "replace")  # raises where there is no such file
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_readme_python_runs_as_it_is_written(
    tiny_bert_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model = DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr")
    model.save_pretrained(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "out" / name).write_bytes((tiny_bert_dir / name).read_bytes())
    (tmp_path / "xlm-roberta-base").symlink_to(tiny_bert_dir)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    shapes = []
    for block in blocks:
        names: dict = {}
        exec(block, names)
        shapes.append(tuple(names["vectors" if "vectors" in names else "out"][0].shape))
    assert shapes[:2] == [(32,), (32,)]
    assert "torch.Size([2, 32])" in capsys.readouterr().out
