"""A checkpoint as a model of MTEB: its vectors, its cosines, and MTEB's Tatoeba task on our own text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save, synthetic_pairs
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from dap.encoding.mteb import MTEBEncoder
from dap.encoding.sentence_encoder import SentenceEncoder
from dap.search.retrieval import retrieval_accuracy
from modeling_dap import DAPForPreTraining

NO_MTEB = "MTEB (the extra mteb) is not installed"


@pytest.fixture(scope="module")
def dap_dir(
    tiny_bert_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    folder = tmp_path_factory.mktemp("checkpoint") / "dap"
    save(
        folder,
        DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr", pooling="mean"),
        tiny_tokenizer,
    )
    return str(folder)


def batches(sentences: list[str], size: int) -> Iterator[dict[str, list[str]]]:
    for start in range(0, len(sentences), size):
        yield {"text": sentences[start : start + size]}


def test_encodes_with_the_checkpoints_pooling_and_the_prefix(dap_dir: str) -> None:
    sentences = [source for source, _ in synthetic_pairs("de", 20)]
    made = MTEBEncoder(dap_dir, prefix="ka: ").encode(
        batches(sentences, 7), hf_split="test", prompt_type=None
    )
    expected = SentenceEncoder.from_pretrained(dap_dir, "mean", "ka: ").encode(sentences)
    np.testing.assert_array_equal(made, expected)
    assert np.abs(made - MTEBEncoder(dap_dir).encode(batches(sentences, 7))).max() > 0.01


def test_similarities_are_cosines_of_rows_or_of_one_vector() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(4, 5)), rng.normal(size=(3, 5))
    naive = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in right] for a in left]
    encoder = object.__new__(MTEBEncoder)  # similarity needs no model
    np.testing.assert_allclose(encoder.similarity(left, torch.tensor(right)), naive, atol=1e-6)
    np.testing.assert_allclose(encoder.similarity(left[1], right), naive[1:2], atol=1e-6)
    np.testing.assert_allclose(
        encoder.similarity_pairwise(left[:3], right), np.diag(naive[:3]), atol=1e-6
    )


def test_what_it_cannot_encode_is_named(dap_dir: str) -> None:
    encoder = MTEBEncoder(dap_dir)
    with pytest.raises(ValueError, match="a batch holds image, no text"):
        encoder.encode([{"image": []}])
    with pytest.raises(ValueError, match="precision='int8'"):
        encoder.encode([], precision="int8")


def test_mtebs_tatoeba_task_gives_the_accuracy_of_our_command(dap_dir: str) -> None:
    mteb = pytest.importorskip("mteb", reason=NO_MTEB)
    target = [english for _, english in synthetic_pairs("de", 100)]
    source = [
        sentence.rsplit(" ", 1)[0] for sentence in target
    ]  # so like it that an untrained model finds some
    encoder = MTEBEncoder(dap_dir)
    assert isinstance(encoder, mteb.EncoderProtocol)
    task, accuracies = mteb.get_task("Tatoeba", languages=["deu"]), []
    for queries, keys in ((source, target), (target, source)):
        task.dataset = {
            "deu-eng": {"test": Dataset.from_dict({"sentence1": queries, "sentence2": keys})}
        }
        task.data_loaded = True
        found = mteb.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False)
        (scores,) = found.task_results[0].scores["test"]
        assert (
            scores["main_score"] == scores["f1"] < scores["accuracy"]
        )  # MTEB's headline is not the accuracy
        accuracies.append(100 * scores["accuracy"])
    ours = retrieval_accuracy(encoder.encoder.encode(source), encoder.encoder.encode(target))
    assert ours == pytest.approx(tuple(accuracies))
    assert 0 < min(ours) < max(ours) < 100


def test_mteb_keeps_results_apart_by_weights_and_options(
    dap_dir: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pytest.importorskip("mteb", reason=NO_MTEB)
    trained = DAPForPreTraining.from_pretrained(dap_dir)
    with torch.no_grad():
        next(trained.parameters()).add_(0.1)
    save(tmp_path / "dap", trained, tiny_tokenizer)
    one, same, other, prefixed = (
        MTEBEncoder(folder, **options).mteb_model_meta
        for folder, options in (
            (dap_dir, {}),
            (dap_dir, {}),
            (str(tmp_path / "dap"), {}),
            (dap_dir, {"prefix": "a"}),
        )
    )
    assert one.name == other.name == "local/dap"
    assert one.revision == same.revision != other.revision
    assert prefixed.experiment_name != one.experiment_name
