"""Publish a checkpoint on the Hugging Face Hub, so that other libraries load it without our code.

    push-to-hub out --repo_id user/dap-xlmr --results tatoeba.json

The published folder holds a plain encoder, the files of sentence-transformers and a model card.
`--dry_run` writes it and sends nothing. Log in once with `hf auth login`, or set HF_TOKEN.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from dap_transformers.commands.arguments import ArgumentParser, arg
from dap_transformers.commands.edge import command, guarded
from dap_transformers.encoding.onnx import require_packages
from dap_transformers.errors import UserError, refusals
from dap_transformers.files import disk_full
from dap_transformers.publishing.card import read_sources
from dap_transformers.publishing.hub import fetch_checkpoint, upload
from dap_transformers.publishing.layout import Options, build_with_card
from dap_transformers.publishing.mteb_results import read_result
from dap_transformers.publishing.onnx_export import export
from dap_transformers.publishing.space import write_space

logger = logging.getLogger(__name__)


@dataclass
class PushArguments:
    """Command-line arguments that say what to publish besides the model, and where.

    The help text of each field says what it does.
    """

    repo_id: str = arg(
        MISSING, "Repository on the Hub, such as user/dap-xlmr. It is created if it does not exist."
    )
    private: bool = arg(False, "Make the repository private.")
    dry_run: bool = arg(False, "Write the folder and send nothing.")
    output_dir: str | None = arg(
        None, "Keep the folder here. Default: CHECKPOINT-hub with --dry_run, else nowhere."
    )
    space: bool = arg(False, "Also publish a Space of the same id with a search app.")
    onnx: bool = arg(False, "Add ONNX files in onnx/.")
    results: list[str] = arg(
        [],
        "For the model card: reports of eval_retrieval.py, mine-bitext and run_xnli.py, and "
        "result files of MTEB.",
    )
    dataset_info: str | None = arg(
        None,
        "What the training text is: report of prepare-data, dataset_info.json, data card, or "
        "Hub id of a dataset. A licence in it becomes the model's, unless --license is given.",
    )
    license: str | None = arg(None, "Licence of the model, such as apache-2.0.")
    revision: str | None = arg(None, "Branch, tag or commit, if CHECKPOINT is a Hub id.")


def parse(argv: Sequence[str] | None = None) -> tuple[str, PushArguments, Options]:
    """Parse the command line.

    Args:
        argv: the command line. None takes the process's own.

    Returns:
        The folder or Hub id of the checkpoint, the arguments of this command, and the options that
        say what the published folder holds.
    """
    parser = ArgumentParser((PushArguments, Options), allow_abbrev=False)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="Folder of a checkpoint, or a Hub id."
    )
    args, options, rest = parser.parse_args_into_dataclasses(args=argv)
    with refusals(f"--repo_id {args.repo_id}"):
        validate_repo_id(args.repo_id)
    if "/" not in args.repo_id:
        raise UserError(f"--repo_id {args.repo_id}: add the account, as in user/{args.repo_id}")
    if options.with_heads and options.layout == "dap":
        raise UserError("--layout dap includes the heads at the root: leave --with_heads out")
    if args.dry_run and args.private:
        raise UserError("--dry_run sends nothing, so --private has no effect: leave one out")
    return rest.checkpoint, args, options


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Publish a checkpoint as the command line says.

    Args:
        argv: the command line. None takes the process's own.

    Returns:
        "files" holds the names of the published files. A dry run adds "folder", where they are.
        Otherwise "repo_id" and "commit" say what was published.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    checkpoint, args, options = parse(argv)

    if not args.output_dir and not args.dry_run:
        # Windows cannot remove a file of weights that is still mapped into memory.
        temporary = tempfile.TemporaryDirectory(prefix="dap-hub-", ignore_cleanup_errors=True)
        with temporary as place, disk_full(Path(place)):
            return write_and_push(checkpoint, Path(place, "hub"), args, options)

    name = checkpoint
    if Path(checkpoint).is_dir():
        name = os.path.abspath(checkpoint)  # "." has no name to add "-hub" to
    folder = Path(args.output_dir or f"{name.rstrip('/')}-hub")
    with guarded(folders={"--output_dir": folder}, model=checkpoint):
        return write_and_push(checkpoint, folder, args, options)


def write_and_push(
    checkpoint: str, folder: Path, args: PushArguments, options: Options
) -> dict[str, Any]:
    """Write the folder to publish, and send it to the Hub unless this is a dry run.

    With `--space`, the folder of a Space is also written, beside it, and sent.

    Args:
        checkpoint: folder or Hub id of the checkpoint.
        folder: where to write. It need not exist.
        args: arguments of the command.
        options: what the folder holds.

    Returns:
        A dictionary with "files" (names within the folder). Also "folder" for a dry run,
        otherwise "repo_id" and "commit".
    """
    space = folder.with_name(f"{folder.name}-space") if args.space else None
    if space is not None:
        write_space(args.repo_id, space)
    if args.onnx:
        _require_onnx()

    local = fetch_checkpoint(checkpoint, args.revision)
    reports = {path: read_result(path) for path in args.results}
    for path, report in reports.items():
        _warn_about_another_model(path, report, {checkpoint, args.repo_id}, local)
    sources = read_sources(local, list(reports.values()), args.dataset_info, args.license)
    build_with_card(local, folder, args.repo_id, options, sources)
    if args.onnx:
        export(folder)

    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files.append(path.relative_to(folder).as_posix())
            print(f"{path.stat().st_size:>13,}  {files[-1]}")

    if args.dry_run:
        folders = f"{folder} and {space}" if space else f"{folder}"
        print(f"written to {folders}; nothing was sent")
        print("to publish, give the command without --dry_run and --output_dir")
        return {"files": files, "folder": str(folder)}

    commit = upload(folder, args.repo_id, args.private)
    print(f"published as {args.repo_id}, commit {commit}")
    if space is not None:
        space_commit = upload(space, args.repo_id, args.private, space=True)
        print(f"Space {args.repo_id}, commit {space_commit}")
    return {"files": files, "repo_id": args.repo_id, "commit": commit}


def _require_onnx() -> None:
    """Raise `UserError`, which names `--onnx`, unless the packages for it are installed."""
    try:
        require_packages()
    except UserError as error:
        raise UserError(f"--onnx: {error}, or leave it out") from error


def _warn_about_another_model(
    path: str, report: dict[str, Any], names: set[str], local: Path
) -> None:
    """Log a warning if a report does not name the published checkpoint as its model.

    Results of MTEB name no model, so there is no warning about them. For a merged report, one of
    its models must be the checkpoint.
    """
    models = report.get("models", [report["model"]])
    for model in models:
        if model in names or Path(model).resolve() == local.resolve():
            return
    if not models:  # as in a result of MTEB
        return
    logger.warning(
        "%s is about %s: is this the checkpoint that you publish?", path, ", ".join(models)
    )


main = command(run)


if __name__ == "__main__":
    main()
