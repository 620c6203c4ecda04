"""An encoder from a file that `dap.publishing.onnx_export` wrote, run by onnxruntime on the CPU.

Legend: `N` sentences, `B` rows of a batch, `S` tokens, `D` hidden size.
"""

import glob
import hashlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dap.encoding.sentence_encoder import SentenceEncoder
from dap.errors import UserError, loading
from dap.tokenizers import load_tokenizer

FLOAT32, INT8 = "model.onnx", "model_quantized.onnx"


def require_packages() -> None:
    """Raise `ValueError` unless the packages of the extra `onnx` are installed."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error}: pip install 'dap-transformers[onnx]'") from error


class _Session(nn.Module):
    """An ONNX file in the place of a model: its config, and a hash of the file for fingerprints."""

    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = (
            torch.get_num_threads()
        )  # it does not look at OMP_NUM_THREADS
        with loading("graph", path):
            self.session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        self.settings: dict[str, str] = self.session.get_modelmeta().custom_metadata_map
        if not {"pooling", "hidden_size"} <= set(self.settings):
            raise UserError(
                f"{path} was not written by dap.publishing.onnx_export: it does not say how it pools"
            )
        self.config = PreTrainedConfig(hidden_size=int(self.settings["hidden_size"]))
        self.register_buffer(
            "sha256", torch.tensor(list(_digest(path)), dtype=torch.uint8)
        )  # (32,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> BaseModelOutputWithPooling:
        inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        states, vectors = self.session.run(["last_hidden_state", "sentence_embedding"], inputs)
        return BaseModelOutputWithPooling(torch.from_numpy(states), torch.from_numpy(vectors))


def _digest(path: Path) -> bytes:
    """SHA-256 of a graph and of the weights beside it, if they have a file of their own."""
    digest = hashlib.sha256()
    for part in sorted(path.parent.glob(f"{glob.escape(path.name)}*")):
        with part.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.digest()


class OnnxEncoder(SentenceEncoder):
    """`SentenceEncoder` on an exported file, run by onnxruntime on the CPU; its vectors have length 1.

    Args:
        path: a file that `dap.publishing.onnx_export` wrote.
        tokenizer: None takes the one in the file's folder, or in the folder above `onnx/`.
        prefix, max_seq_length: None takes those of the exported encoder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: onnxruntime is missing, the file is not one of ours, or the length is above its positions.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefix: str | None = None,
        max_seq_length: int | None = None,
    ) -> None:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        require_packages()
        model = _Session(path)
        own, positions = model.settings, int(model.settings["positions"] or sys.maxsize)
        length = max_seq_length or int(own["max_seq_length"])
        if length > positions:
            raise UserError(
                f"max_seq_length={length} is above the model's {positions} positions: lower it"
            )
        if tokenizer is None:
            folder = path.parent.parent if path.parent.name == "onnx" else path.parent
            tokenizer = load_tokenizer(folder)
        super().__init__(
            model, tokenizer, own["pooling"], own["prefix"] if prefix is None else prefix, length
        )

    def _vectors(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(ids, mask).pooler_output  # the graph has pooled and divided by the length
