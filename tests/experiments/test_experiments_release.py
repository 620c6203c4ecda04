"""The released code's gradients against a loop over its processes, and the starts of the ablations."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import LANGUAGES, synthetic_pairs, tiny_config
from tiny_models import gradients, make_batch, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from experiments import new_encoder, plain_encoder, release
from experiments.release import ReleasedDAP, released
from modeling_dap import DAPConfig, DAPForPreTraining, DAPForPreTrainingOutput

PAIRS, PROCESSES, WEIGHT = 8, 4, 0.1


def embeddings(model: DAPForPreTraining, batch: dict[str, Tensor]) -> list[Tensor]:
    """Embeddings of the first tokens of sources and of targets, (B, D) each."""
    sides = [{key: batch[f"{side}_{key}"] for key in ("input_ids", "attention_mask")} for side in ("source", "target")]
    return [model.dap(**side).pooler_output for side in sides]


def released_ranking(model: DAPForPreTraining, batch: dict[str, Tensor]) -> Tensor:
    """The mean over processes of L_TR of the gathered batch, in which only a process's own rows have a graph."""
    total = torch.zeros(())
    for rows in torch.arange(PAIRS).chunk(PROCESSES):
        own = torch.isin(torch.arange(PAIRS), rows)[:, None]  # (B, 1)
        queries, answers = (torch.where(own, part, part.detach()) for part in embeddings(model, batch))
        similarity = F.cosine_similarity(queries[:, None], answers[None], dim=-1) / 0.05  # (B, B)
        total = total + F.cross_entropy(similarity, torch.arange(PAIRS)) / PROCESSES
    return total


def released_step(batch: dict[str, Tensor], **config: object) -> tuple[Tensor, Tensor]:
    """Loss and gradients that DDP averages over the processes of the released code."""
    model = tiny_model(**config)
    ranking = released_ranking(model, batch)
    total = ranking
    for number in range(PROCESSES):
        rows = slice(number * PAIRS // PROCESSES, (number + 1) * PAIRS // PROCESSES)
        share = model(**{key: value[rows] for key, value in batch.items()})
        total = total + WEIGHT * share.rtl_loss / PROCESSES
    total.backward()
    return total.detach(), gradients(model)


def simulated(batch: dict[str, Tensor], processes: int = PROCESSES, **config: object) -> tuple[Tensor, Tensor]:
    """The same by `experiments.release`."""
    model = tiny_model(**config)
    model.__class__ = released(processes)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


def languages(direction: str) -> dict[str, list[str]]:
    return {} if direction == "source-to-target" else {"rtl_languages": ["de", "fr"]}


@pytest.mark.parametrize("direction", ["source-to-target", "both"])
def test_gradients_are_those_of_the_released_processes(direction: str) -> None:
    config = {"rtl_weight": WEIGHT, "rtl_direction": direction, **languages(direction)}
    batch = make_batch(PAIRS, longest=11) | {"language_ids": torch.arange(PAIRS) % 2}
    (loss, expected), (found_loss, found) = released_step(batch, **config), simulated(batch, **config)
    torch.testing.assert_close(found_loss, loss)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_the_released_gather_leaves_one_part_in_w_of_the_ranking_gradient() -> None:
    """For every embedding, and whether its negatives are of its own process or of another."""
    batch, model = make_batch(PAIRS, longest=11), tiny_model(objective="tr")
    ours = torch.autograd.grad(model(**batch).loss, list(model.parameters()), allow_unused=True)
    theirs = torch.autograd.grad(released_ranking(model, batch), list(model.parameters()), allow_unused=True)
    used = [(our, their) for our, their in zip(ours, theirs, strict=True) if our is not None]
    assert len(used) > len(ours) / 2
    for our, their in used:
        assert (their - our / PROCESSES).norm() < 1e-5 * ours[0].norm()


def test_one_process_is_the_usual_step() -> None:
    batch, model = make_batch(PAIRS, longest=11), tiny_model()
    model(**batch).loss.backward()
    expected = gradients(model)
    assert torch.equal(simulated(batch, processes=1)[1], expected)


@pytest.fixture
def flags(bitext_dir: Path) -> list[str]:
    given = {"train_data": bitext_dir, "max_seq_length": 16, "dev_pairs": 10, "total_train_batch_size": 8}
    given |= {"max_steps": 2, "learning_rate": 1e-3, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    given |= {"eval_strategy": "no", "save_strategy": "no"}
    return [str(part) for key, value in given.items() for part in (f"--{key}", value)]


def test_the_command_trains_its_own_model_and_saves_a_usual_checkpoint(
    flags: list[str], tiny_bert_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained, forward = tmp_path / "out", [], DAPForPreTraining.forward

    def recorded(model: ReleasedDAP, **batch: Tensor) -> DAPForPreTrainingOutput:
        trained.extend([model.processes] * model.training)  # an evaluation calls it, too
        return forward(model, **batch)

    monkeypatch.setattr(DAPForPreTraining, "forward", recorded)
    own = ["--released_processes", "4", "--rtl_weight", "0.1", "--model_name_or_path", str(tiny_bert_dir)]
    release.run([*flags, *own, "--output_dir", str(out)])
    assert trained == [4, 4]
    assert json.loads((out / "run.json").read_text())["released_processes"] == 4
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DAPForPreTraining"]
    assert config["auto_map"]["AutoModelForPreTraining"] == "modeling_dap.DAPForPreTraining"
    assert (out / "modeling_dap.py").exists()
    assert not (out / "release.py").exists()
    assert type(DAPForPreTraining.from_pretrained(out)) is DAPForPreTraining


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--released_processes", "3"], "--released_processes 3 do not share a batch of 8 pairs"),
        (["--released_processes", "0"], "--released_processes 0 do not share"),
        (
            ["--released_processes", "2", "--mini_batch_size", "4"],
            "--released_processes 2 does not go with --mini_batch_size 4",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(more: list[str], message: str, flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        release.main([*flags, "--model_name_or_path", "m", "--output_dir", str(tmp_path / "out"), *more])


def test_an_encoder_without_head_is_taken_from_a_checkpoint(
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_bert_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = DAPForPreTraining(DAPConfig(tiny_config("bert"), objective="mlm", mask_token_id=4))
    model.save_pretrained(tmp_path / "mlm")
    tiny_tokenizer.save_pretrained(tmp_path / "mlm")
    plain_encoder.main([str(tmp_path / "mlm"), "--output_dir", str(tmp_path / "plain")])
    for name, warned in (("mlm", False), ("plain", True)):
        caplog.clear()
        started = DAPForPreTraining.from_encoder(str(tmp_path / name))
        assert ("has no masked-LM head to take" in caplog.text) is warned
        expected = model.dap.encoder.state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in started.dap.encoder.state_dict().items())
    assert AutoModel.from_pretrained(tmp_path / "plain").config.model_type == "bert"
    with pytest.raises(SystemExit, match="is a plain 'bert' already"):
        plain_encoder.main([str(tiny_bert_dir), "--output_dir", str(tmp_path / "again")])


def unigram_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    text = [side for language in ("de", "sw") for pair in synthetic_pairs(language) for side in pair]
    tokenizer.train_from_iterator(
        text, trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    ends = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.save_pretrained(folder)
    return made


def test_a_small_encoder_has_the_frequent_pieces_of_the_text(
    tmp_path: Path, bitext_dir: Path, tiny_bert_dir: Path
) -> None:
    whole = unigram_tokenizer(tmp_path / "whole")
    argv = ["--train_data", str(bitext_dir), "--output_dir", str(tmp_path / "cut"), "--hidden_size", "32"]
    new_encoder.main(["--tokenizer", str(tmp_path / "whole"), "--vocab_size", "40", *argv])
    cut = AutoTokenizer.from_pretrained(tmp_path / "cut")
    assert sorted(cut.get_vocab().values()) == list(range(40))
    assert AutoConfig.from_pretrained(tmp_path / "cut").vocab_size == 40

    text = [side for language in LANGUAGES for pair in synthetic_pairs(language) for side in pair]
    counts = Counter(piece for line in text for piece in whole.tokenize(line))
    kept, rank = set(cut.get_vocab()), {piece: (len(piece) > 1, -count) for piece, count in counts.items()}
    assert set(whole.all_special_tokens) <= kept <= set(whole.get_vocab())
    assert max(rank[piece] for piece in kept & set(rank)) <= min(rank[piece] for piece in set(rank) - kept)

    line = next(line for line in text if set(whole.tokenize(line)) <= kept)
    assert cut.tokenize(line) == whole.tokenize(line)
    ids = cut(line)["input_ids"]
    assert (ids[0], ids[-1]) == (cut.cls_token_id, cut.sep_token_id)
    for tokenizer, size, message in ((tmp_path / "whole", "5", "leaves no piece"), (tiny_bert_dir, "70", "a BPE tok")):
        with pytest.raises(SystemExit, match=message):
            new_encoder.main(["--tokenizer", str(tokenizer), "--vocab_size", size, *argv])
