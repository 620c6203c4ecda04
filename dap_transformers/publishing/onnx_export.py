"""Export an encoder to ONNX, with pooling and normalisation inside the graph.

    python -m dap_transformers.publishing.onnx_export CHECKPOINT OUT [--int8]

`OUT/onnx/model.onnx` takes `input_ids` and `attention_mask` (B, S). It gives `last_hidden_state`
(B, S, D) and `sentence_embedding` (B, D), of length 1. Optimum and text-embeddings-inference look
for these names. `--int8` adds `model_quantized.onnx`. `dap_transformers.encoding.OnnxEncoder` runs
both files.
The export is compared with the checkpoint's vectors. It needs the extra `onnx`.

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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.edge import command, guarded
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.load import longest_input
from dap_transformers.encoding.onnx import FLOAT32, INT8, OnnxEncoder, require_packages
from dap_transformers.errors import UserError
from dap_transformers.options import arg
from dap_transformers.publishing.layout import PROBE, require_same_vectors, save_tokenizer
from states_dap import POOLINGS, takes_packed

INPUTS = ("input_ids", "attention_mask")
OUTPUTS = ("last_hidden_state", "sentence_embedding")
#: Weights of more bytes get a file of their own, because a protocol buffer holds at most 2 GiB.
ONE_FILE = 1_900_000_000


class _SentenceModel(nn.Module):
    """The module to export. It computes token states and sentence vectors of length 1.

    Called with `input_ids` and `attention_mask` (B, S), it returns states (B, S, D) and vectors
    (B, D).

    Args:
        model: the encoder.
        pooling: "cls" or "mean".
    """

    def __init__(self, model: nn.Module, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        states = out.last_hidden_state  # (B, S, D)
        return states, F.normalize(POOLINGS[self.pooling].pool(states, attention_mask), dim=1)


def export(
    model: str | Path | SentenceEncoder,
    output: Path | None = None,
    int8: bool = False,
    **options: Any,
) -> Path:
    """Export an encoder to `onnx/model.onnx` and, with `int8`, also `onnx/model_quantized.onnx`.

    Nothing is written unless the graph gives the encoder's vectors. Files of an earlier export
    are replaced. A folder other than the checkpoint's own also gets the tokenizer and the
    encoder's configuration.

    Args:
        model: folder or Hub id of a checkpoint, or an encoder.
        output: the checkpoint's own folder, or a new or empty one. Default: the checkpoint's own.
        int8: also write the graph with int8 weights.
        **options: arguments of `SentenceEncoder.from_pretrained`, which loads a checkpoint.

    Returns:
        The path of `model.onnx`.
    """
    require_packages()
    folder = _output_folder(model, output)
    is_own = not isinstance(model, SentenceEncoder) and Path(model).resolve() == folder.resolve()
    if not is_own and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: give a new folder, or the checkpoint's own")

    encoder = model
    if not isinstance(model, SentenceEncoder):
        encoder = SentenceEncoder.from_pretrained(str(model), device="cpu", **options)
    if encoder.bf16:
        raise UserError("bf16=True: export an encoder in float32, and use int8 for a smaller one")
    if encoder.layer is not None:
        raise UserError(f"layer={encoder.layer}: a graph uses the last layer, leave layer out")

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=folder) as temporary:
        path = Path(temporary, FLOAT32)
        _write_graph(encoder, path)
        _check_vectors(encoder, path)
        if int8:
            _write_int8(encoder, path)
        (folder / "onnx").mkdir(exist_ok=True)
        for stale in (folder / "onnx").glob("model*.onnx*"):  # of an earlier export
            stale.unlink()
        for file in Path(temporary).iterdir():
            file.replace(folder / "onnx" / file.name)
    if not is_own:
        save_tokenizer(encoder.tokenizer, encoder.max_seq_length, folder)
        encoder.backbone.config.save_pretrained(folder)
    return folder / "onnx" / FLOAT32


def _output_folder(model: str | Path | SentenceEncoder, output: Path | None) -> Path:
    """Return the folder to write into: `output` or, if it is None, the model's own folder."""
    if output is not None:
        return Path(output)
    if isinstance(model, SentenceEncoder) or not Path(model).is_dir():
        raise UserError("output is needed, because the model is not a local checkpoint's folder")
    return Path(model)


def _write_graph(encoder: SentenceEncoder, path: Path) -> None:
    """Export an encoder in float32 to an ONNX file, with its settings in the file's metadata.

    These are pooling, prefix, length, number of positions and hidden size. The encoder's
    attention may be set to "sdpa".
    """
    device = encoder.model.device
    was_training = encoder.model.training

    # Any ids will do, but sizes of 0 or 1 would be taken for constants.
    ids = torch.arange(14, device=device).view(2, 7)
    mask = (ids < 12).long()
    shapes = dict.fromkeys(INPUTS, {0: "batch", 1: "sequence"})

    if takes_packed(encoder.backbone):  # ONNX has no such attention
        encoder.backbone.set_attn_implementation("sdpa")
    graph = _SentenceModel(encoder.backbone, encoder.pooling).eval()
    try:
        with _quiet():
            program = torch.onnx.export(
                graph,
                (ids, mask),
                dynamo=True,
                verbose=False,
                dynamic_shapes=shapes,
                input_names=INPUTS,
                output_names=OUTPUTS,
            )
    finally:
        encoder.model.train(was_training)

    settings = {
        "pooling": encoder.pooling,
        "prefix": encoder.prefix,
        "max_seq_length": encoder.max_seq_length,
        "positions": longest_input(encoder.model) or "",
        "hidden_size": encoder.hidden_size,
    }
    program.model.metadata_props.update({name: str(value) for name, value in settings.items()})
    size = sum(tensor.nbytes for tensor in encoder.model.state_dict().values())
    _save(program.model, path, size)


def _save(graph: Any, path: Path, size: int) -> None:
    """Write a graph without the notes of the exporter, which hold paths of this machine."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    ClearMetadataAndDocStringPass()(graph)
    onnx_ir.save(graph, path, external_data=f"{path.name}_data" if size > ONE_FILE else None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide all warnings within the block, because the exporter gives many that help nobody.

    They are about optional packages and further optimisation. Errors are still logged.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _check_vectors(encoder: SentenceEncoder, path: Path) -> None:
    """Check that an exported graph gives the encoder's vectors, and print the largest difference.

    Single sentences, padded batches and sentences of full length are compared.
    """
    longest = longest_input(encoder.model) or 512
    model = SentenceEncoder(
        encoder.model, encoder.tokenizer, encoder.pooling, encoder.prefix, longest
    )
    graph = OnnxEncoder(path, encoder.tokenizer, max_seq_length=longest)
    worst = 0.0
    for token_budget in (1, 64, 4096):
        expected = model.encode(PROBE, token_budget)  # (N, D)
        found = graph.encode(PROBE, token_budget)  # (N, D)
        worst = max(worst, require_same_vectors(expected, found, path.name))
    print(f"{path.name}: largest difference from the model's vectors {worst:.1e}")


def _write_int8(encoder: SentenceEncoder, path: Path) -> None:
    """Write the int8 graph beside the float32 graph, and print how much its vectors differ.

    Nothing is refused: the printed number is the smallest cosine of the vectors of both graphs.
    """
    quantized = path.with_name(INT8)
    quantize(path, quantized)
    exact = OnnxEncoder(path, encoder.tokenizer).encode(PROBE)  # (N, D)
    coarse = OnnxEncoder(quantized, encoder.tokenizer).encode(PROBE)  # (N, D)
    smallest = (exact * coarse).sum(axis=1).min()
    print(f"{INT8}: smallest cosine with the float32 vectors {smallest:.3f}")


def quantize(path: Path, quantized: Path) -> None:
    """Convert the weights of an ONNX graph to int8, including the word embeddings.

    Each column of a matrix has its own scale. One scale per matrix needs the same space, and lost
    1.6 points of accuracy where this lost nothing. Activations are quantised at run time, with one
    scale per batch, so a vector depends slightly on the other sentences in its batch.

    Args:
        path: the float32 graph.
        quantized: the file to write.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(path, quantized, weight_type=QuantType.QInt8, per_channel=True)


@dataclass
class ExportArguments:
    """Options of the export: int8 weights, pooling, and how the checkpoint is loaded."""

    int8: bool = arg(False, "Add the graph with int8 weights.")
    pooling: str | None = arg(
        None, "How to pool. Default: the checkpoint's.", choices=tuple(POOLINGS)
    )
    revision: str | None = arg(None, "Branch, tag or commit, if CHECKPOINT is a Hub id.")
    trust_remote_code: bool = arg(False, "Run code that comes with the checkpoint.")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Export an encoder to ONNX, from command-line arguments, and print the sizes of the files.

    Args:
        argv: arguments of the command. None takes those of this process.

    Returns:
        Path of each ONNX file within the output folder -> its size in bytes.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = ArgumentParser(ExportArguments, allow_abbrev=False)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="Folder of a checkpoint, or a Hub id."
    )
    parser.add_argument(
        "out", metavar="OUT", help="Folder to write: a new or empty one, or CHECKPOINT itself."
    )
    args, rest = parser.parse_args_into_dataclasses(args=argv)
    out = Path(rest.out)
    with guarded(folders={"OUT": out}):
        export(rest.checkpoint, out, **vars(args))

    sizes = {}
    for path in sorted((out / "onnx").iterdir()):
        sizes[path.relative_to(out).as_posix()] = path.stat().st_size
    for name, size in sizes.items():
        print(f"{size:>13,}  {name}")
    return sizes


main = command(run)


if __name__ == "__main__":
    main()
