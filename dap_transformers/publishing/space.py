"""Write a Gradio Space around examples/app.py: search in two texts, with a published model."""

import shutil
from importlib import metadata
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dap
from dap_transformers.errors import UserError

#: The folder of dap/ and of the model files, installed or in a checkout.
ROOT = Path(modeling_dap.__file__).parent
APP = Path("examples/app.py")
#: Versions that the Space asks for. Without them the Hub takes Python 3.10, which is too old.
PYTHON = "3.11"
GRADIO = "6.31.0"
START = '''"""Search with {repo_id}."""

import sys

from search import main

main(sys.argv[1:] or ["--model", "{repo_id}"])
'''


def write_space(repo_id: str, folder: Path) -> None:
    """Write a complete Gradio Space that searches with a published model.

    The Space holds the app, our code (which no package index has), the requirements of both and a
    card.

    Args:
        repo_id: id of the model on the Hub.
        folder: a new or empty folder, which is created.
    """
    if not (ROOT / APP).is_file():
        raise UserError(f"--space needs {APP}: run push-to-hub in a checkout, which has it")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: remove it")

    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dap", folder / "dap", ignore=no_caches, dirs_exist_ok=True)
    for file in (modeling_dap.__file__, *get_relative_import_files(modeling_dap.__file__)):
        shutil.copy(file, folder)
    shutil.copy(ROOT / APP, folder / "search.py")
    (folder / "app.py").write_text(START.format(repo_id=repo_id), encoding="utf-8")

    required = metadata.requires("dap-transformers") or []
    lines = [line for line in required if ";" not in line]  # not those of an extra
    (folder / "requirements.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")

    title = f"Translations by {repo_id.split('/')[-1]}"
    data = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=GRADIO,
        python_version=PYTHON,
        app_file="app.py",
        models=[repo_id],
        license="apache-2.0",
    )
    text = (
        f"Find translations of a sentence in two texts with {repo_id}, and see which words belong "
        "together.\n"
    )
    SpaceCard(f"---\n{data}\n---\n\n# {title}\n\n{text}").save(folder / "README.md")
