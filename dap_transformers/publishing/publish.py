"""Publish a checkpoint: write its folder and model card, and push them to the Hub."""

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError, reading
from dap_transformers.files import whole_folder
from dap_transformers.options import arg
from dap_transformers.publishing.hub import fetch_checkpoint, upload
from dap_transformers.publishing.layout import FolderOptions, build
from dap_transformers.publishing.model_card import model_card, read_sources
from dap_transformers.publishing.onnx_export import export_onnx
from dap_transformers.reports import read_report

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishOptions(FolderOptions):
    """How a checkpoint is published: the folder's options, the model card, and the repository."""

    onnx: bool = arg(False, "Add ONNX files in onnx/.")
    results: list[str] = arg([], "Reports of evaluations, for the model card.")
    dataset_info: str | None = arg(
        None,
        "Markdown file about the training text, such as the data card of prepare-data. A licence "
        "in it becomes the model's, unless --license is given.",
    )
    license: str | None = arg(None, "Licence of the model, such as apache-2.0.")
    revision: str | None = arg(None, "Branch, tag or commit, if CHECKPOINT is a Hub id.")
    private: bool = arg(False, "Make the repository private.")
    dry_run: bool = arg(False, "Write the folder and send nothing.")


def publish(
    checkpoint: str | Path,
    repo_id: str,
    options: PublishOptions | None = None,
    folder: Path | None = None,
    branch: str | None = None,
) -> str | None:
    """Write a checkpoint's published form with its model card, and push it to the Hub.

    Args:
        folder: where to keep what is published, a new or empty folder. It is written whole or not
            at all. None keeps nothing.
        branch: existing branch to push to. None takes main.

    Returns:
        The commit on the Hub. None after a dry run.
    """
    options = options or PublishOptions()
    # Windows cannot remove a file of weights that is still mapped into memory.
    with tempfile.TemporaryDirectory(prefix="dap-hub-", ignore_cleanup_errors=True) as place:
        folder = folder or Path(place, "hub")
        _write(checkpoint, folder, repo_id, options)
        if options.dry_run:
            return None
        return upload(folder, repo_id, options.private, branch)


def _write(checkpoint: str | Path, folder: Path, repo_id: str, options: PublishOptions) -> None:
    """Write the folder that is published, whole or not at all."""
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: give another folder, or remove it")
    local = fetch_checkpoint(checkpoint, options.revision)
    reports = [read_report(path) for path in options.results]
    for report in reports:
        _warn_about_another_model(report, {str(checkpoint), repo_id}, local)
    sources = read_sources(local, reports, options.dataset_info, options.license)
    if not sources.config and (local / "README.md").is_file():
        logger.warning(
            "the model card of %s is not read: the new one says nothing about its training",
            checkpoint,
        )
    with whole_folder(folder) as new:
        published = build(local, new, options)
        model_card(repo_id, published, sources).save(new / "README.md")
        if options.onnx:
            with reading("the export to ONNX"):
                export_onnx(new)


def _warn_about_another_model(report: Mapping[str, Any], names: set[str], local: Path) -> None:
    """Log a warning if a report does not name the published checkpoint as its model."""
    model = report["model"]
    if model not in names and Path(model).resolve() != local.resolve():
        logger.warning(
            "the results on %s are about %s: is this the checkpoint that you publish?",
            report["protocol"],
            model,
        )
