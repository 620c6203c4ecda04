"""Export an encoder to ONNX, with pooling and normalisation inside the graph.

`onnx/model.onnx` takes `input_ids` and `attention_mask` (B, S). It gives `last_hidden_state`
(B, S, D) and `sentence_embedding` (B, E), of length 1. Optimum and text-embeddings-inference look
for these names. The export needs the packages onnx, onnxscript and onnxruntime.

Legend: `B` rows of a batch, `S` tokens, `D` hidden size, `E` dimensions of a sentence vector.
"""

import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.publishing.layout import PROBE, require_same_vectors
from states_dap import POOLINGS, takes_packed

NAME = "model.onnx"
INPUTS = ("input_ids", "attention_mask")
OUTPUTS = ("last_hidden_state", "sentence_embedding")
#: Weights of more bytes get a file of their own, because a protocol buffer holds at most 2 GiB.
ONE_FILE = 1_900_000_000


class _Graph(nn.Module):
    """The module to export: token states (B, S, D) and sentence vectors (B, E) of length 1."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        super().__init__()
        self.model = encoder.backbone
        self.after = encoder.after
        self.pool = POOLINGS[encoder.pooling].pool

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        states = out.last_hidden_state
        return states, F.normalize(self.after(self.pool(states, attention_mask)), dim=1)


def export_onnx(folder: str | Path) -> Path:
    """Export the encoder in a folder to `onnx/model.onnx` in the same folder. Return the path.

    Nothing is written unless the graph gives the encoder's vectors.
    """
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    encoder = SentenceEncoder.from_pretrained(str(folder), device="cpu")
    if takes_packed(encoder.backbone):  # ONNX has no such attention
        encoder.backbone.set_attn_implementation("sdpa")
    # Any ids will do, but sizes of 0 or 1 would be taken for constants.
    ids = torch.arange(14).view(2, 7)
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            _Graph(encoder).eval(),
            (ids, (ids < 12).long()),
            dynamo=True,
            verbose=False,
            dynamic_shapes=dict.fromkeys(INPUTS, {0: "batch", 1: "sequence"}),
            input_names=INPUTS,
            output_names=OUTPUTS,
        )
    # The notes of the exporter hold paths of this machine.
    ClearMetadataAndDocStringPass()(program.model)

    size = sum(tensor.nbytes for tensor in encoder.model.state_dict().values())
    weights = f"{NAME}_data" if size > ONE_FILE else None
    place = Path(folder, "onnx")
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        path = Path(temporary, NAME)
        onnx_ir.save(program.model, path, external_data=weights)
        _check_vectors(encoder, path)
        for file in path.parent.iterdir():
            file.replace(place / file.name)
    return place / NAME


def _check_vectors(encoder: SentenceEncoder, path: Path) -> None:
    """Compare a graph's vectors of a padded batch and of single sentences with the encoder's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = encoder.encode(PROBE, normalize=True)  # (N, E)
    texts = [encoder.prefix + text for text in PROBE]
    for rows in (slice(None), slice(1), slice(-1, None)):
        batch = encoder.tokenizer(
            texts[rows],
            padding=True,
            truncation=True,
            max_length=encoder.max_seq_length,
            return_tensors="np",
        )
        _, vectors = session.run(OUTPUTS, {name: batch[name] for name in INPUTS})
        require_same_vectors(expected[rows], vectors, NAME)
