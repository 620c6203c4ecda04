"""An encoder as ONNX: pooling and normalisation inside the graph, checked against the model that it comes from.

    python -m dap.publishing.onnx_export CHECKPOINT OUT [--int8]

`OUT/onnx/model.onnx` takes `input_ids` and `attention_mask` (B, S) and gives `last_hidden_state` (B, S, D) and
`sentence_embedding` (B, D), of length 1: the names that Optimum and text-embeddings-inference look for. `--int8` adds
`model_quantized.onnx`. Both say how they pool, and `dap.encoding.OnnxEncoder` runs them. Needs the extra `onnx`.

Legend: `N` sentences, `B` rows of a batch, `S` tokens, `D` hidden size.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configuration_dap import CHOICES
from dap.arguments import ArgumentParser, arg
from dap.commands import command, guarded
from dap.encoding import (
    FLOAT32,
    INT8,
    OnnxEncoder,
    SentenceEncoder,
    longest_input,
    require_packages,
)
from dap.errors import UserError
from dap.publishing.folder import save_tokenizer
from dap.search import unit_rows
from encoder_dap import pool, takes_packed

INPUTS, OUTPUTS = ("input_ids", "attention_mask"), ("last_hidden_state", "sentence_embedding")
#: Largest difference of an entry of a vector of length 1 from the model's own.
TOLERANCE = 1e-4
#: Bytes of weights from which on they get a file of their own: a protocol buffer holds 2 GiB.
ONE_FILE = 1_900_000_000
TEXT = "Guten Morgen! Доброе утро, мир. 我喜欢喝茶。 Habari ya asubuhi? "
#: One character to more tokens than any model has positions for.
PROBE = (*(TEXT[:end] for end in (1, 5, 12, 30, 60)), TEXT * 3, TEXT * 400)


class _SentenceModel(nn.Module):
    """What the graph computes: token states (B, S, D) and the sentence vectors (B, D), of length 1."""

    def __init__(self, model: nn.Module, pooling: str) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.model(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state  # (B, S, D)
        return states, F.normalize(pool(states, attention_mask, self.pooling), dim=1)


def export(
    model: str | Path | SentenceEncoder,
    output: Path | None = None,
    int8: bool = False,
    **options: Any,
) -> Path:
    """Write `onnx/model.onnx` and, with `int8`, `onnx/model_quantized.onnx`; gives the path of the former.

    Nothing is written unless the graph gives the encoder's vectors, for several batch sizes and lengths and with
    padding. Another folder than the checkpoint's also gets the tokenizer and the encoder's config.

    Args:
        model: a checkpoint's folder or Hub id, or an encoder.
        output: an empty folder, or the checkpoint's own (None).
        options: of `SentenceEncoder.from_pretrained`, which loads a checkpoint.

    Raises:
        ValueError: the packages of the extra `onnx` are missing, the folder is not empty, the encoder cannot be
            loaded, runs in bfloat16 or pools another layer, or the vectors differ by more than `TOLERANCE`.
    """
    require_packages()
    folder = _folder(model, output)
    is_own = not isinstance(model, SentenceEncoder) and Path(model).resolve() == folder.resolve()
    if not is_own and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: give a new folder, or the checkpoint's own")
    encoder = model
    if not isinstance(model, SentenceEncoder):
        encoder = SentenceEncoder.from_pretrained(str(model), device="cpu", **options)
    if encoder.bf16:
        raise UserError("bf16=True: export an encoder in float32, and use int8 for a smaller one")
    if encoder.layer is not None:
        raise UserError(
            f"layer={encoder.layer}: a graph gives the last layer's vectors; leave layer out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=folder) as temporary:
        path = Path(temporary, FLOAT32)
        _write_graph(encoder, path)
        _require_same_vectors(encoder, path)
        if int8:
            quantized = path.with_name(INT8)
            quantize(path, quantized)
            vectors = [
                OnnxEncoder(file, encoder.tokenizer).encode(PROBE) for file in (path, quantized)
            ]  # 2 of (N, D)
            print(
                f"{INT8}: smallest cosine with those vectors {np.prod(vectors, axis=0).sum(1).min():.3f}"
            )
        (folder / "onnx").mkdir(exist_ok=True)
        for stale in (folder / "onnx").glob("model*.onnx*"):  # of an earlier export
            stale.unlink()
        for file in Path(temporary).iterdir():
            file.replace(folder / "onnx" / file.name)
    if not is_own:
        save_tokenizer(encoder.tokenizer, encoder.max_seq_length, folder)
        encoder.backbone.config.save_pretrained(folder)
    return folder / "onnx" / FLOAT32


def _folder(model: str | Path | SentenceEncoder, output: Path | None) -> Path:
    if output is not None:
        return Path(output)
    if isinstance(model, SentenceEncoder) or not Path(model).is_dir():
        raise UserError("only a checkpoint's own folder can take the files: give output")
    return Path(model)


def _write_graph(encoder: SentenceEncoder, path: Path) -> None:
    device, training = encoder.model.device, encoder.model.training
    ids = torch.arange(14, device=device).view(
        2, 7
    )  # any ids: sizes of 0 and 1 would be taken for constants
    mask = (ids < 12).long()
    shapes = dict.fromkeys(INPUTS, {0: "batch", 1: "sequence"})
    if takes_packed(encoder.backbone):  # by an attention that no graph has
        encoder.backbone.set_attn_implementation("sdpa")
    graph = _SentenceModel(encoder.backbone, encoder.pooling).eval()
    try:
        with _quiet():
            program = torch.onnx.export(
                graph, (ids, mask), dynamo=True, verbose=False, dynamic_shapes=shapes,
                input_names=INPUTS, output_names=OUTPUTS,
            )  # fmt: skip
    finally:
        encoder.model.train(training)
    settings = {name: getattr(encoder, name) for name in ("pooling", "prefix", "max_seq_length")}
    settings |= {
        "positions": longest_input(encoder.model) or "",
        "hidden_size": encoder.hidden_size,
    }
    program.model.metadata_props.update({name: str(value) for name, value in settings.items()})
    _save(program.model, path, sum(tensor.nbytes for tensor in encoder.model.state_dict().values()))


def _save(graph: Any, path: Path, size: int) -> None:
    """Writes a graph with weights of so many bytes, which Optimum wants in `model.onnx_data` if they do not fit.

    The exporter notes at each node the lines of code that it comes from, with the paths of this machine: they go.
    """
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    ClearMetadataAndDocStringPass()(graph)
    onnx_ir.save(graph, path, external_data=f"{path.name}_data" if size > ONE_FILE else None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the exporter's remarks on packages that the graph does not need, and advice to prepare it further."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _require_same_vectors(encoder: SentenceEncoder, path: Path) -> None:
    found = difference(encoder, path)
    print(f"{path.name}: largest difference from the model's vectors {found:.1e}")
    if not found <= TOLERANCE:
        raise UserError(
            f"the graph's vectors differ from the model's by {found:.1e}, above {TOLERANCE}: not written"
        )


def difference(encoder: SentenceEncoder, path: Path) -> float:
    """Largest difference of an entry of the vectors, both of length 1, over single sentences and padded batches.

    The longest sentence fills all the positions that the model has, or 512.
    """
    longest = longest_input(encoder.model) or 512
    ours = SentenceEncoder(
        encoder.model, encoder.tokenizer, encoder.pooling, encoder.prefix, longest
    )
    graph, worst = OnnxEncoder(path, encoder.tokenizer, max_seq_length=longest), 0.0
    for token_budget in (1, 64, 4096):
        expected = unit_rows(ours.encode(PROBE, token_budget), "vectors").numpy()  # (N, D)
        worst = max(worst, float(np.abs(graph.encode(PROBE, token_budget) - expected).max()))
    return worst


def quantize(path: Path, quantized: Path) -> None:
    """Write the graph with its weights, word embeddings included, as int8; activations follow at run time.

    Each column of a matrix has its own scale: a common one takes as much room and lost 1.6 points of accuracy
    where this lost none. The scale of the activations is that of the batch, so that a vector depends a little on
    the sentences beside it.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(path, quantized, weight_type=QuantType.QInt8, per_channel=True)


@dataclass
class ExportArguments:
    """What is exported."""

    int8: bool = arg(False, "Add the graph with int8 weights.")
    pooling: str | None = arg(None, "Default: the checkpoint's.", choices=CHOICES["pooling"])
    revision: str | None = arg(None, "Branch, tag or commit, if CHECKPOINT is a Hub id.")
    trust_remote_code: bool = arg(False, "Run the code that the checkpoint carries.")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Exports as the command line says; gives the bytes of each file by its path within OUT.

    Raises:
        ValueError, FileNotFoundError, OSError: as `export` and loading do.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = ArgumentParser(ExportArguments, allow_abbrev=False)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="Folder of a checkpoint, or a Hub id."
    )
    parser.add_argument(
        "out", metavar="OUT", help="Folder to write: empty, not there, or CHECKPOINT itself."
    )
    args, rest = parser.parse_args_into_dataclasses(args=argv)
    with guarded(folders={"OUT": rest.out}):
        export(rest.checkpoint, Path(rest.out), **vars(args))
    files = {
        path.relative_to(rest.out).as_posix(): path.stat().st_size
        for path in Path(rest.out, "onnx").iterdir()
    }
    for name, size in sorted(files.items()):
        print(f"{size:>13,}  {name}")
    return files


main = command(run)


if __name__ == "__main__":
    main()
