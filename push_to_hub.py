"""Publish a checkpoint on the Hugging Face Hub: plain encoder, sentence-transformers files and model card.

    python push_to_hub.py out --repo_id user/dap-xlmr --results tatoeba.json

`--dry_run` writes the folder and sends nothing. Log in once with `hf auth login`, or set HF_TOKEN.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from dap.arguments import ArgumentParser, arg
from dap.commands import command, guarded
from dap.encoding import require_packages
from dap.errors import UserError, refusals
from dap.file_io import disk_full
from dap.publishing import Options, fetch, read_sources, upload, write, write_space
from dap.publishing.onnx_export import export
from dap.reports import read_report

logger = logging.getLogger(__name__)


@dataclass
class PushArguments:
    """What is published, and where."""

    repo_id: str = arg(
        MISSING, "Repository of the Hub, such as user/dap-xlmr; made if it is not there."
    )
    private: bool = arg(False, "The repository is to be private.")
    dry_run: bool = arg(False, "Write the folder and send nothing.")
    output_dir: str | None = arg(
        None, "Keep the folder here. Default: with --dry_run CHECKPOINT-hub, else it is temporary."
    )
    space: bool = arg(False, "Add a Space of the same id: examples/app.py, a search app.")
    onnx: bool = arg(False, "Add ONNX files in onnx/.")
    results: list[str] = arg(
        [], "JSON files of eval_retrieval.py, mine_bitext.py and run_xnli.py, for the card."
    )
    dataset_info: str | None = arg(
        None, "Report of prepare_data.py, dataset_info.json or card of the training text."
    )
    license: str | None = arg(None, "The model's licence, such as apache-2.0.")
    revision: str | None = arg(None, "Branch, tag or commit, if CHECKPOINT is a Hub id.")


def parse(argv: Sequence[str] | None = None) -> tuple[str, PushArguments, Options]:
    """Checkpoint and arguments of the command line.

    Raises:
        ValueError: arguments that contradict each other, or no id of a repository.
    """
    parser = ArgumentParser((PushArguments, Options), allow_abbrev=False)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="Folder of a checkpoint, or a Hub id."
    )
    args, options, rest = parser.parse_args_into_dataclasses(args=argv)
    with refusals(f"--repo_id {args.repo_id}"):
        validate_repo_id(args.repo_id)
    if "/" not in args.repo_id:
        raise UserError(
            f"--repo_id {args.repo_id}: name the account too, as in user/{args.repo_id}."
        )
    if options.with_heads and options.layout == "dap":
        raise UserError("--layout dap has the heads at the root already: leave --with_heads out.")
    if args.dry_run and args.private:
        raise UserError(
            "--private says nothing with --dry_run, which sends nothing: leave one out."
        )
    return rest.checkpoint, args, options


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Publishes as the command line `argv` says (None: the process's own); returns what was written and where.

    Raises:
        ValueError: arguments, a checkpoint or results that do not fit, or the Hub does not take it.
        FileNotFoundError: no such checkpoint or file.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    checkpoint, args, options = parse(argv)
    if args.output_dir or args.dry_run:
        beside = (
            os.path.abspath(checkpoint) if Path(checkpoint).is_dir() else checkpoint
        )  # "." has a name, too
        folder = Path(args.output_dir or f"{beside.rstrip('/')}-hub")
        with guarded(folders={"--output_dir": folder}, model=checkpoint):
            return publish(checkpoint, folder, args, options)
    with tempfile.TemporaryDirectory(prefix="dap-hub-") as place, disk_full(Path(place)):
        return publish(checkpoint, Path(place, "hub"), args, options)


def publish(checkpoint: str, folder: Path, args: PushArguments, options: Options) -> dict[str, Any]:
    """Write the folder and its card, and the Space's beside it, and push them unless that is a dry run."""
    space = folder.with_name(f"{folder.name}-space") if args.space else None
    if space is not None:
        write_space(args.repo_id, space)
    if args.onnx:
        try:
            require_packages()
        except UserError as error:
            raise UserError(f"--onnx: {error}, or leave it out.") from error
    local = fetch(checkpoint, args.revision)
    reports = {path: read_report(path, merged=True) for path in args.results}
    for path, report in reports.items():
        models = report.get("models", [report["model"]])
        if not any(
            name in (checkpoint, args.repo_id) or Path(name).resolve() == local.resolve()
            for name in models
        ):
            logger.warning(
                "%s is about %s, the checkpoint is %s: are they the same?",
                path,
                ", ".join(models),
                checkpoint,
            )
    sources = read_sources(local, list(reports.values()), args.dataset_info, args.license)
    write(local, folder, args.repo_id, options, sources)
    if args.onnx:
        export(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        print(f"{path.stat().st_size:>13,}  {path.relative_to(folder)}")
    written: dict[str, Any] = {"files": [path.relative_to(folder).as_posix() for path in files]}
    if args.dry_run:
        print(f"written to {folder}{f' and {space}' if space else ''}; nothing was sent")
        return written | {"folder": str(folder)}
    commit = upload(folder, args.repo_id, args.private)
    print(f"published as {args.repo_id}, commit {commit}")
    if space is not None:
        print(
            f"Space {args.repo_id}, commit {upload(space, args.repo_id, args.private, space=True)}"
        )
    return written | {"repo_id": args.repo_id, "commit": commit}


main = command(run)


if __name__ == "__main__":
    main()
