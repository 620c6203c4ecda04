"""Vectors of a teacher are kept on disk, in a folder that several runs may share."""

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.training.teacher import ROW, add_teacher


def test_runs_share_a_folder_but_not_their_shards(
    encoder: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = (["ban", "q"], ["ban", "fin"])
    texts = [{"de": Dataset.from_dict({"target": own})} for own in targets]
    expected = [encoder.encode(text["de"]["target"][:]) for text in texts]
    encode = encoder.encode
    found = []

    def encode_beside_other_runs(*args: object, **options: object) -> np.ndarray:
        """Begin a run of the same text and one of another text before the sentences are encoded."""
        monkeypatch.setattr(encoder, "encode", encode)
        with pytest.raises(UserError, match="distill_dir .* is in use"):
            add_teacher(encoder, texts[0], texts[0], tmp_path)
        found.append(add_teacher(encoder, texts[1], texts[1], tmp_path))
        return encode(*args, **options)

    monkeypatch.setattr(encoder, "encode", encode_beside_other_runs)
    found.insert(0, add_teacher(encoder, texts[0], texts[0], tmp_path))
    for (rows, vectors), right in zip(found, expected, strict=True):
        np.testing.assert_allclose(vectors[rows["de"][ROW][:]], right, atol=1e-6)
    assert len(list(tmp_path.glob("targets-*.npy"))) == len(list(tmp_path.iterdir())) == 2
