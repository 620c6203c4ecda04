"""A Space of the Hub around examples/app.py: search in two texts, with token alignment, by a published model."""

import shutil
from importlib import metadata
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dap
from dap.errors import UserError

ROOT = Path(
    modeling_dap.__file__
).parent  # where dap/ and the model's files lie, installed or in a checkout
APP = Path("examples/app.py")
START = (
    '"""Searches with {repo_id}."""\n\nfrom search import main\n\nmain(["--model", "{repo_id}"])\n'
)


def write_space(repo_id: str, folder: Path) -> None:
    """Write a Gradio Space that searches with the model `repo_id` into a new folder; it needs nothing beside it.

    The Space holds the app, all of this project, which no package index has, and the requirements of both.

    Raises:
        UserError: the folder holds something, or the app, which only a checkout has, is not there.
    """
    if not (ROOT / APP).is_file():
        raise UserError(
            f"--space needs {APP}, which is in the checkout only: run push_to_hub.py there."
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: remove it.")
    shutil.copytree(
        ROOT / "dap",
        folder / "dap",
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    for file in (modeling_dap.__file__, *get_relative_import_files(modeling_dap.__file__)):
        shutil.copy(file, folder)
    shutil.copy(ROOT / APP, folder / "search.py")
    (folder / "app.py").write_text(START.format(repo_id=repo_id), encoding="utf-8")
    needed = [
        line for line in metadata.requires("dap-transformers") if ";" not in line
    ]  # of no extra
    (folder / "requirements.txt").write_text(
        "\n".join([*needed, "matplotlib", ""]), encoding="utf-8"
    )
    title = f"Translations by {repo_id.split('/')[-1]}"
    data = SpaceCardData(
        title=title, sdk="gradio", app_file="app.py", models=[repo_id], license="apache-2.0"
    )
    text = f"The nearest sentences of two texts in any language, and which token goes with which, by {repo_id}.\n"
    SpaceCard(f"---\n{data}\n---\n\n# {title}\n\n{text}").save(folder / "README.md")
