"""What README and the pages of docs/ and examples/ say can be done as it is written."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY

from dap.encoding import SentenceEncoder
from dap.training import parse_arguments
from modeling_dap import DAPForPreTraining

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = [
    REPOSITORY / "README.md",
    *(
        page
        for folder in ("docs", "examples")
        for page in sorted((REPOSITORY / folder).glob("*.md"))
    ),
]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def readme_commands(program: str) -> list[list[str]]:
    """The arguments of each call of `program`, but of those in shell loops."""
    lines = [
        line.split(" #")[0] for line in TEXT.replace("\\\n", " ").splitlines() if "$" not in line
    ]
    commands = [
        line for line in lines if program in line and line.startswith(("accelerate", "python"))
    ]
    return [command.split(program, 1)[1].split() for command in commands]


def test_readme_training_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    commands = readme_commands("train_dap.py ")
    assert len(commands) >= 2
    for argv in commands:
        model, data, _ = parse_arguments(
            [re.sub(r"^out\b", str(tmp_path), word) for word in argv] + ["--use_cpu"]
        )
        assert model.model_name_or_path or model.config_name
        assert data.train_data


@pytest.mark.parametrize(
    ("program", "modules"),
    [
        ("eval_retrieval.py", ("dap.encoding", "eval_retrieval")),
        ("mine_bitext.py", ("dap.encoding", "mine_bitext")),
        ("run_xnli.py", ("dap.xnli", "run_xnli")),
        ("prepare_data.py", ("prepare_data", "dap.prepare")),
        ("push_to_hub.py", ("push_to_hub",)),
        ("-m dap.publishing.onnx_export", ("dap.publishing.onnx_export",)),
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


def test_programs_in_readme_exist() -> None:
    modules = set(re.findall(r"python -m ((?:dap|experiments|benchmarks|quickstart)[\w.]*)", TEXT))
    assert modules >= {
        "dap.reports",
        "experiments.report",
        "benchmarks.train_step",
        "benchmarks.mining",
        "quickstart.run",
    }
    for name in sorted(modules):
        found = importlib.util.find_spec(name)
        assert found, name
        assert not found.submodule_search_locations or importlib.util.find_spec(
            f"{name}.__main__"
        ), name
    scripts = set(re.findall(r"python ([\w/]+\.py)", TEXT))
    assert scripts >= {"prepare_data.py", "examples/app.py"}
    for name in scripts:
        assert (REPOSITORY / name).is_file(), name


def test_readme_names_files_that_exist() -> None:
    folders = "configs|dap|tests|quickstart|docs|examples|benchmarks"
    for name in re.findall(rf"`((?:{folders})/[\w./]+|\w+\.(?:py|md|txt))`", TEXT):
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        text = linked.read_bytes().decode("utf-8", "replace")  # raises where there is no such file
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE) if anchor else []
        assert not anchor or anchor in {
            re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings
        }


def test_readme_python_runs_as_it_is_written(
    tiny_bert_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    model = DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr")
    model.save_pretrained(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "out" / name).write_bytes((tiny_bert_dir / name).read_bytes())
    (tmp_path / "xlm-roberta-base").symlink_to(tiny_bert_dir)
    (tmp_path / "build" / "quickstart").mkdir(parents=True)
    (tmp_path / "build" / "quickstart" / "model").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 4
    results = []
    for block in blocks:
        names: dict = {}
        exec(block, names)
        results.append(names)
    use, in_code, auto_model, library = results
    assert (use["unit"][0] @ use["unit"][1].T).shape == (3, 3)
    assert auto_model["vectors"].shape == (2, 32)
    assert "torch.Size([2, 32])" in capsys.readouterr().out
    assert in_code["out"].rtl_loss > 0
    learned = SentenceEncoder.from_pretrained("out-st")
    assert (learned.pooling, learned.max_seq_length) == ("mean", 32)
    np.testing.assert_allclose(
        library["vectors"], learned.encode(["Guten Morgen!", "Good morning!"]), atol=1e-5
    )
    states = {
        name: value for name, value in learned.model.state_dict().items() if "pooler" not in name
    }
    assert any(
        not torch.equal(value, model.dap.encoder.state_dict()[name])
        for name, value in states.items()
    )
