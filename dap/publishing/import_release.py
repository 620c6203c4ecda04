"""Turn a checkpoint of the paper's released code into the layout that this project publishes.

    python -m dap.publishing.import_release dap-xlm-roberta-base/ out/

That is a BERT or XLM-R encoder, with or without a pooler and what only its training needed; its sentence vector is the
first token's last state. Every command here reads such a folder as it is (`--pooling cls`). What the import adds are
the files that record this for sentence-transformers and servers; what it leaves out are the weights nobody uses.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from configuration_dap import CHOICES
from dap.arguments import ArgumentParser
from dap.commands import command, guarded
from dap.publishing.folder import Options, Published, build
from dap.publishing.hub import fetch

BASES = ("bert.", "roberta.")  # where a model with heads keeps its encoder


@dataclass
class ImportArguments:
    """How the checkpoint is read."""

    pooling: str | None = field(
        default=None,
        metadata={
            "help": "Default: as PATH says, else cls, the released code's.",
            "choices": list(CHOICES["pooling"]),
        },
    )
    max_seq_length: int | None = field(default=None, metadata={"help": "Tokens a sentence. Default: 128."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit, if PATH is a Hub id."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that the checkpoint carries."})


def import_release(
    path: str,
    out: Path,
    pooling: str | None = None,
    max_seq_length: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Published, dict[str, int]]:
    """Write the checkpoint to `out`; `pooling=None` is what it says itself, else "cls".

    Gives what was written, and how many tensors were left out by part of the model.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a checkpoint without safetensors, tokenizer or some weights of its encoder;
            or `out` is not empty.
    """
    folder = fetch(path, revision)
    if pooling is None and not (folder / "modules.json").exists():
        pooling = "cls"
    options = Options(pooling=pooling, max_seq_length=max_seq_length, trust_remote_code=trust_remote_code)
    published = build(folder, out, options)
    kept = {name for name in _tensors(out) if not name.startswith("pooler.")}  # whose weights are new
    dropped = Counter(name.split(".")[0] for name in _tensors(folder) if _without_base(name) not in kept)
    return published, dict(dropped)


def _tensors(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            yield from weights.keys()


def _without_base(name: str) -> str:
    """A tensor's name within the encoder.

    >>> _without_base("roberta.embeddings.word_embeddings.weight")
    'embeddings.word_embeddings.weight'
    """
    return next((name.removeprefix(base) for base in BASES if name.startswith(base)), name)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `import_release` of what `argv` names."""
    parser = ArgumentParser(ImportArguments, allow_abbrev=False)
    parser.add_argument("path", metavar="PATH", help="Folder of the checkpoint, or a Hub id.")
    parser.add_argument("out", metavar="OUT", help="Folder to write; it must be empty, or not there.")
    args, rest = parser.parse_args_into_dataclasses(args=argv)
    with guarded(folders={"OUT": rest.out}):
        published, dropped = import_release(rest.path, Path(rest.out), **vars(args))
    parts = ", ".join(f"{name} ({count} tensors)" for name, count in dropped.items())
    print(f"{rest.out}: {published.model_type}, pooling {published.pooling}; left out: {parts or 'nothing'}")


if __name__ == "__main__":
    main()
