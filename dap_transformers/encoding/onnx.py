"""Run an encoder that `publishing/onnx_export.py` has exported, with onnxruntime on the CPU.

Legend: `B` rows of a batch, `S` tokens, `D` hidden size.
"""

import glob
import hashlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError, reading
from dap_transformers.tokenizers import load_tokenizer

#: File names of the exported encoder, with float32 and with int8 weights.
FLOAT32 = "model.onnx"
INT8 = "model_quantized.onnx"


def require_packages() -> None:
    """Raise `UserError` unless `onnxruntime` and `onnxscript` (the extra `onnx`) are installed."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error}: pip install onnx onnxscript onnxruntime") from error


class _OnnxModel(nn.Module):
    """An ONNX file that is called like a model of Transformers.

    Args:
        path: the ONNX file.

    Attributes:
        session: onnxruntime's session.
        settings: name -> value, as the exporter wrote them into the file, such as "pooling".
        config: a config that only has `hidden_size`.
        sha256: (32,) hash of the file. As a buffer it is part of the model's fingerprint.

    Raises:
        UserError: onnxruntime cannot load the file, or it lacks the exporter's settings.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # onnxruntime does not read OMP_NUM_THREADS, torch does.
        options.intra_op_num_threads = torch.get_num_threads()
        with reading(f"the graph of {path}"):
            self.session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        self.settings: dict[str, str] = self.session.get_modelmeta().custom_metadata_map
        if "pooling" not in self.settings or "hidden_size" not in self.settings:
            raise UserError(
                f"{path} does not say how it pools: export it with "
                "`python -m dap_transformers.publishing.onnx_export`"
            )
        self.config = PreTrainedConfig(hidden_size=int(self.settings["hidden_size"]))
        content = torch.tensor(list(_graph_hash(path)), dtype=torch.uint8)  # (32,)
        self.register_buffer("sha256", content)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> BaseModelOutputWithPooling:
        """Return token states (B, S, D) and, as the pooler's output, sentence vectors (B, D).

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for tokens and 0 for padding.
        """
        inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        states, vectors = self.session.run(["last_hidden_state", "sentence_embedding"], inputs)
        return BaseModelOutputWithPooling(torch.from_numpy(states), torch.from_numpy(vectors))


def _graph_hash(path: Path) -> bytes:
    """Return the SHA-256 of an ONNX file and of its weights, which may be in a file beside it."""
    digest = hashlib.sha256()
    for part in sorted(path.parent.glob(f"{glob.escape(path.name)}*")):
        with part.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.digest()


class OnnxEncoder(SentenceEncoder):
    """A `SentenceEncoder` on an exported file, run by onnxruntime. Its vectors have length 1.

    Args:
        path: a file that `dap_transformers.publishing.onnx_export` wrote.
        tokenizer: its tokenizer. None loads the one in the file's folder, or in the folder above
            `onnx/`.
        prefix: text put before every sentence. None takes the prefix of the exported encoder.
        max_seq_length: tokens per sentence. None takes the length of the exported encoder.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: onnxruntime is missing, the file is not one of ours, or the length is above the
            model's positions.
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
        model = _OnnxModel(path)
        positions = int(model.settings["positions"] or sys.maxsize)
        length = max_seq_length or int(model.settings["max_seq_length"])
        if length > positions:
            raise UserError(
                f"max_seq_length={length} is above the model's {positions} positions: lower it"
            )
        if tokenizer is None:
            folder = path.parent.parent if path.parent.name == "onnx" else path.parent
            tokenizer = load_tokenizer(folder)
        if prefix is None:
            prefix = model.settings["prefix"]
        super().__init__(model, tokenizer, model.settings["pooling"], prefix, length)

    def _vectors(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the sentence vectors (B, D) of a batch, pooled and normalised by the ONNX graph.

        Args:
            ids: token ids (B, S).
            mask: (B, S), 1 for tokens and 0 for padding.
        """
        return self.model(ids, mask).pooler_output
