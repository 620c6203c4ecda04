"""A DAP checkpoint, or any encoder that eval_retrieval.py takes, as a model of the MTEB library (version 2).

    import mteb
    from dap.encoding.mteb import MTEBEncoder
    mteb.evaluate(MTEBEncoder("user/dap-xlmr"), mteb.get_tasks(tasks=["Tatoeba"], languages=["deu"]))

MTEB itself is needed only for the model's metadata. Legend: `N`, `M` sentences, `D` hidden size.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dap.encoding.embeddings import model_fingerprint
from dap.encoding.encoder_arguments import tokens_of_a_batch
from dap.encoding.sentence_encoder import load_encoder
from dap.errors import UserError
from dap.search import Array, unit_rows


class MTEBEncoder:
    """MTEB's `EncoderProtocol`: the checkpoint's own pooling and prefix for every task, similarity by cosine.

    MTEB's prompts are not used, and its batch size only says how text arrives: batches are made by `token_budget`.

    Args:
        model_name: a DAP checkpoint, any encoder of `AutoModel`, or a sentence-transformers folder or Hub id.
        revision: branch, tag or commit of a Hub repository.
        device: where to run; None takes CUDA where there is one.
        token_budget: most tokens a batch; None: 4096, on CUDA 32768. The vectors do not depend on it.
        options: `pooling`, `prefix`, `max_seq_length`, `trust_remote_code`, `bf16`, `layer` as in
            `dap.encoding.load_encoder`.

    Raises:
        ValueError: the checkpoint or an option does not fit.
    """

    def __init__(
        self,
        model_name: str,
        revision: str | None = None,
        *,
        device: str | None = None,
        token_budget: int | None = None,
        **options: Any,
    ) -> None:
        self.encoder = load_encoder(model_name, revision=revision, **options)
        if device is not None:
            self.encoder.model.to(device)
        self.token_budget = tokens_of_a_batch(token_budget)
        self._name, self._revision, self._options = model_name, revision, options

    def encode(self, inputs: Iterable[Mapping[str, Any]], **settings: Any) -> np.ndarray:
        """The sentences' vectors, (N, D) float32, in the order they come.

        Args:
            inputs: MTEB's data loader: batches whose "text" is a list of sentences.
            settings: the task, split, subset and prompt type, which change nothing; `show_progress_bar`; `precision`.

        Raises:
            ValueError: batches without text, or another precision than float32.
        """
        if settings.get("precision") not in (None, "float32"):
            raise UserError(
                f"precision={settings['precision']!r}: vectors are float32; leave it out"
            )
        sentences: list[str] = []
        for batch in inputs:
            if "text" not in batch:
                raise UserError(
                    f"a batch holds {' '.join(batch)}, no text: this model encodes text only"
                )
            sentences += batch["text"]
        return self.encoder.encode(
            sentences, self.token_budget, bool(settings.get("show_progress_bar"))
        )

    def similarity(self, embeddings1: Array, embeddings2: Array) -> Tensor:
        """Cosine of each row of one, (N, D) or (D,), with each of the other: (N, M) float32."""
        return _rows(embeddings1, "embeddings1") @ _rows(embeddings2, "embeddings2").T  # (N, M)

    def similarity_pairwise(self, embeddings1: Array, embeddings2: Array) -> Tensor:
        """Cosine of row i of one with row i of the other: (N,) float32."""
        return (_rows(embeddings1, "embeddings1") * _rows(embeddings2, "embeddings2")).sum(
            1
        )  # (N,)

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's `ModelMeta`, under whose name and revision MTEB keeps its results.

        The revision is the Hub's commit; for a local folder a digest of the weights and settings, so that a checkpoint
        trained further is not given the old results. Options other than the checkpoint's own are an experiment's.

        Raises:
            ImportError: MTEB is not installed.
        """
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        local, weights = Path(self._name).is_dir(), self.encoder.model.parameters()
        about = {
            "name": f"local/{Path(self._name).resolve().name}" if local else self._name,
            "revision": self.encoder.revision
            or self._revision
            or model_fingerprint(self.encoder)[:16],
            "max_tokens": self.encoder.max_seq_length,
            "n_parameters": sum(parameter.numel() for parameter in weights),
            "framework": ["PyTorch", "Transformers"],
            "similarity_fn_name": ScoringFunction.COSINE,
            "use_instructions": bool(self.encoder.prefix),
            "experiment_kwargs": self._options or None,
        }
        return ModelMeta.create_empty(about)


def _rows(embeddings: Array, name: str) -> Tensor:
    rows = torch.as_tensor(embeddings)
    return unit_rows(rows if rows.ndim == 2 else rows[None], name)
