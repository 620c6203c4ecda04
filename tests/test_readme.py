"""Check that README and the pages of docs/ and examples/ are true: code, flags, files and links."""

import importlib
import importlib.util
import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, save
from tiny_models import start_from

from dap_transformers.commands.recipes import parse_arguments

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
for folder in ("docs", "examples"):
    PAGES += sorted((REPOSITORY / folder).glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)

#: Console name of each command -> its module.
COMMANDS = {
    "train-dap": "train_dap",
    "eval-retrieval": "eval_retrieval",
    "run-xnli": "run_xnli",
    "mine-bitext": "dap_transformers.commands.mine_bitext",
    "align-words": "dap_transformers.commands.align_words",
    "prepare-data": "dap_transformers.commands.prepare_data",
    "push-to-hub": "dap_transformers.commands.push_to_hub",
}
#: Flags in sentences that belong to other programs.
FLAGS_OF_OTHERS = {
    "--constraint",
    "--default",
    "--list",
    "--num_processes",
    "--rows",
}

#: Each test of a Python block runs it on a tiny model that stands under these names.
MODELS = ("out", "build/quickstart/model", "intfloat/multilingual-e5-small")


def python_blocks() -> list[object]:
    """Return the blocks of language `python`, which run offline. Blocks of `py` need the Hub."""
    blocks = []
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for number, block in enumerate(found, 1):
            blocks.append(pytest.param(block, id=f"{page.stem}-{number}"))
    return blocks


def commands_in_pages(name: str) -> list[list[str]]:
    """Return the arguments of every call of a command. Lines with shell variables are left out."""
    script = f"{COMMANDS[name]}.py"
    commands = []
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for place, word in enumerate(words):
                if word in (name, script) and "$" not in line:
                    commands.append(words[place + 1 :])
                    break
    return commands


def heading_anchor(heading: str) -> str:
    """Return the anchor that GitHub makes from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.fixture(scope="module")
def checkout(tiny_bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder in which each name in `MODELS` is a tiny DAP model with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkout")
    model = start_from(tiny_bert_dir, objective="tr")
    for name in MODELS:
        save(folder / name, model)
    (folder / "xlm-roberta-base").symlink_to(tiny_bert_dir)
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
    commands = commands_in_pages("train-dap")
    assert commands
    for command in commands:
        if "--plugin" in command:  # needs a file of the reader; tests/test_train_dap.py writes it
            continue
        arguments = [re.sub(r"^out\b", str(tmp_path), word) for word in command]
        model, data, _ = parse_arguments([*arguments, "--use_cpu"])
        assert model.model_name_or_path or model.config_name
        assert data.train_data


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """Return the flags in the help of each command."""
    found = {}
    for name, module in COMMANDS.items():
        all_flags = "--help_all" if name in ("train-dap", "run-xnli") else "--help"
        with redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
            importlib.import_module(module).main([all_flags])
        found[name] = set(re.findall(r"--\w+", shown.getvalue()))
    return found


def test_commands_have_the_flags_that_the_pages_use(flags: dict) -> None:
    for name, known in flags.items():
        commands = commands_in_pages(name)
        assert commands, name
        for command in commands:
            plugin = {"--bag_weight", "--bag_longest"} if "--plugin" in command else set()
            used = {word.split("=")[0] for word in command if word.startswith("--")}
            assert used <= known | plugin, (name, used - known)


def test_flags_in_sentences_exist(flags: dict) -> None:
    known = set().union(*flags.values())
    used = set(re.findall(r"`(--\w+)", TEXT))
    assert used - known <= FLAGS_OF_OTHERS


def test_programs_in_the_pages_exist() -> None:
    folders = "dap_transformers|study|benchmarks|quickstart"
    for name in set(re.findall(rf"python -m ((?:{folders})[\w.]*)", TEXT)):
        found = importlib.util.find_spec(name)
        assert found, name
        is_folder = found.submodule_search_locations
        assert not is_folder or importlib.util.find_spec(f"{name}.__main__"), name
    for name in set(re.findall(r"python ([\w/]+\.py)", TEXT)):
        assert (REPOSITORY / name).is_file(), name


def test_files_in_the_pages_exist() -> None:
    folders = "dap_transformers|tests|quickstart|docs|examples|benchmarks|study"
    for name in re.findall(rf"`((?:{folders})/[\w./]+|\w+\.(?:py|md|txt))`", TEXT):
        is_readers_file = name == "my_loss.py"
        assert is_readers_file or (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in {heading_anchor(each) for each in headings}, target
