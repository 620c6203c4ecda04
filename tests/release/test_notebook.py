"""The notebook of examples/ runs from its first to its last cell, on a tiny encoder."""

from pathlib import Path

import pytest
from conftest import REPOSITORY

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.release

TEXT_AND_ENCODER = """
from pathlib import Path
start = "{model}"
train_folder = Path("{text}")
test_folder = Path("{text}")
out = Path("{out}")
"""


def test_the_quickstart_notebook_runs(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path
) -> None:
    notebook = nbformat.read(REPOSITORY / "examples" / "quickstart.ipynb", as_version=4)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "text-and-encoder" in tags:  # else it would need a network
            cell.source = TEXT_AND_ENCODER.format(
                model=tiny_bert_dir, text=bitext_dir, out=tmp_path / "out"
            )
        if "train" in tags:
            cell.source = cell.source.replace('"--use_cpu"', '"--max_steps", "3", "--use_cpu"')
        if "mine" in tags:  # the tiny encoder tells no translations apart
            cell.source = cell.source.replace("after)", "after, threshold=None)")

    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(REPOSITORY / "examples")}},
    )
    client.execute()
    assert "text/html" in str(notebook.cells), "the word alignment is not shown"
    assert (tmp_path / "out" / "model.safetensors").is_file()
