"""Publish a checkpoint on the Hugging Face Hub, so that other libraries load it without our code.

    push-to-hub out --repo_id user/dap-xlmr --results tatoeba.json

The published folder holds a plain encoder, the files of sentence-transformers and a model card.
`--dry_run` writes it and sends nothing. Log in once with `hf auth login`, or set HF_TOKEN.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.errors import UserError
from dap_transformers.options import arg
from dap_transformers.publishing.publish import PublishOptions, publish
from dap_transformers.training.plugins import load_plugin


@dataclass
class PushArguments:
    """Command-line arguments that say where to publish."""

    repo_id: str = arg(
        MISSING, "Repository on the Hub, such as user/dap-xlmr. It is created if it does not exist."
    )
    output_dir: str | None = arg(
        None, "Keep the folder here. Default: CHECKPOINT-hub with --dry_run, else nowhere."
    )
    plugin: list[str] = arg(
        [], "Files of the objectives of your own, for --with_heads.", action="extend"
    )

    def __post_init__(self) -> None:
        validate_repo_id(self.repo_id)
        if "/" not in self.repo_id:
            raise UserError(f"--repo_id {self.repo_id}: give USER/NAME, which the model card shows")


def run(argv: Sequence[str] | None = None) -> str | None:
    """Publish a checkpoint as the command line says, and return the commit on the Hub, if any.

    Args:
        argv: the command line. None takes the process's own.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = ArgumentParser((PushArguments, PublishOptions))
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="Folder of a checkpoint, or a Hub id."
    )
    args, options, rest = parser.parse_args_into_dataclasses(args=argv)
    for path in args.plugin:
        load_plugin(path)
    folder = Path(args.output_dir) if args.output_dir else None
    if options.dry_run and folder is None:
        # "." and "out/" have no name to add "-hub" to
        folder = Path(f"{os.path.abspath(rest.checkpoint)}-hub")

    with guarded({}, {"--output_dir": folder}, [rest.checkpoint]):
        commit = publish(rest.checkpoint, args.repo_id, options, folder)

    if commit is None:
        print(f"written to {folder}; nothing was sent")
        print("to publish, give the command without --dry_run and --output_dir")
    else:
        print(f"published as {args.repo_id}, commit {commit}")
    return commit


main = command(run)


if __name__ == "__main__":
    main()
