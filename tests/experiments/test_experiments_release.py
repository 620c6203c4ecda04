"""The released code's gradients against a loop over its processes, and the starts of the ablations."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import LANGUAGES, synthetic_pairs
from tiny_models import gradients, make_batch, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from experiments import new_encoder, release
from experiments.release import ReleasedDAP
from modeling_dap import DAPForPreTraining, DAPForPreTrainingOutput

PAIRS, WEIGHT = 8, 0.1


def embeddings(model: DAPForPreTraining, batch: dict[str, Tensor]) -> list[Tensor]:
    """Embeddings of the first tokens of sources and of targets, (B, D) each."""
    sides = [
        {key: batch[f"{side}_{key}"] for key in ("input_ids", "attention_mask")}
        for side in ("source", "target")
    ]
    return [model.dap(**side).pooler_output for side in sides]


def released_ranking(model: DAPForPreTraining, batch: dict[str, Tensor], processes: int) -> Tensor:
    """The mean over processes of L_TR of the gathered batch, in which only a process's own rows have a graph."""
    total = torch.zeros(())
    for rows in torch.arange(PAIRS).chunk(processes):
        own = torch.isin(torch.arange(PAIRS), rows)[:, None]  # (B, 1)
        queries, answers = (
            torch.where(own, part, part.detach()) for part in embeddings(model, batch)
        )
        similarity = F.cosine_similarity(queries[:, None], answers[None], dim=-1) / 0.05  # (B, B)
        total = total + F.cross_entropy(similarity, torch.arange(PAIRS)) / processes
    return total


def released_step(
    batch: dict[str, Tensor], processes: int, **config: object
) -> tuple[Tensor, Tensor]:
    """Loss and gradients that DDP averages over the processes of the released code; L_RTL is that of the own pairs."""
    model = tiny_model(**config)
    total = released_ranking(model, batch, processes)
    for rows in torch.arange(PAIRS).chunk(processes):
        share = model(**{key: value[rows] for key, value in batch.items()})
        total = total + WEIGHT * share.rtl_loss / processes
    total.backward()
    return total.detach(), gradients(model)


@pytest.mark.parametrize(
    ("direction", "processes"), [("source-to-target", 4), ("both", 4), ("both", 1)]
)
def test_gradients_are_those_of_the_released_processes(direction: str, processes: int) -> None:
    config = {"rtl_weight": WEIGHT, "rtl_direction": direction}
    config |= {"rtl_languages": ["de", "fr"]} if direction == "both" else {}
    batch = make_batch(PAIRS, longest=11) | {"language_ids": torch.arange(PAIRS) % 2}
    expected_loss, expected = released_step(batch, processes, **config)
    model = tiny_model(**config)
    model.__class__, model.processes = ReleasedDAP, processes
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss)
    assert (gradients(model) - expected).norm() < 1e-5 * expected.norm()


def test_the_released_gather_leaves_one_part_in_w_of_the_ranking_gradient() -> None:
    """For every embedding, and whether its negatives are of its own process or of another."""
    batch, model = make_batch(PAIRS, longest=11), tiny_model(objective="tr")
    ours = torch.autograd.grad(model(**batch).loss, list(model.parameters()), allow_unused=True)
    theirs = torch.autograd.grad(
        released_ranking(model, batch, 4), list(model.parameters()), allow_unused=True
    )
    used = [(our, their) for our, their in zip(ours, theirs, strict=True) if our is not None]
    assert len(used) > len(ours) / 2
    for our, their in used:
        assert (their - our / 4).norm() < 1e-5 * ours[0].norm()


@pytest.fixture
def flags(bitext_dir: Path) -> list[str]:
    given = {
        "train_data": bitext_dir,
        "max_seq_length": 16,
        "dev_pairs": 10,
        "total_train_batch_size": 8,
    }
    given |= {
        "max_steps": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
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
    own = [
        "--released_processes",
        "4",
        "--rtl_weight",
        "0.1",
        "--model_name_or_path",
        str(tiny_bert_dir),
    ]
    release.main([*flags, *own, "--output_dir", str(out)])
    assert trained == [4, 4]
    assert json.loads((out / "run.json").read_text())["released_processes"] == 4
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DAPForPreTraining"]
    assert not (out / "release.py").exists()
    assert type(DAPForPreTraining.from_pretrained(out)) is DAPForPreTraining


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("3", "3 do not share a batch of 8 pairs"),
        ("0", "0 do not share"),
        ("2 --mini_batch_size 4", "2 does not go with --mini_batch_size 4"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    more: str, message: str, flags: list[str], tmp_path: Path
) -> None:
    line = f"--model_name_or_path m --output_dir {tmp_path} --released_processes {more}"
    with pytest.raises(SystemExit, match=f"^error: --released_processes {message}"):
        release.main([*flags, *line.split()])


def unigram_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer, special = Tokenizer(models.Unigram()), ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    options = {
        "vocab_size": 120,
        "special_tokens": special,
        "unk_token": "<unk>",
        "show_progress": False,
    }
    text = [
        side for language in ("de", "sw") for pair in synthetic_pairs(language) for side in pair
    ]
    tokenizer.train_from_iterator(text, trainers.UnigramTrainer(**options))
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.save_pretrained(folder)
    return made


def test_a_small_encoder_has_the_frequent_pieces_of_the_text(
    tmp_path: Path, bitext_dir: Path, tiny_bert_dir: Path
) -> None:
    whole, small = unigram_tokenizer(tmp_path / "whole"), tmp_path / "cut"
    argv = ["--train_data", str(bitext_dir), "--output_dir", str(small), "--tokenizer"]
    new_encoder.main([*argv, str(tmp_path / "whole"), "--vocab_size", "40"])
    cut = AutoTokenizer.from_pretrained(small)
    assert sorted(cut.get_vocab().values()) == list(range(40))
    assert AutoConfig.from_pretrained(small).vocab_size == 40

    text = [side for language in LANGUAGES for pair in synthetic_pairs(language) for side in pair]
    counts = Counter(piece for line in text for piece in whole.tokenize(line))
    kept, rank = (
        set(cut.get_vocab()),
        {piece: (len(piece) > 1, -count) for piece, count in counts.items()},
    )
    assert set(whole.all_special_tokens) <= kept <= set(whole.get_vocab())
    assert max(rank[piece] for piece in kept & set(rank)) <= min(
        rank[piece] for piece in set(rank) - kept
    )

    line = next(line for line in text if set(whole.tokenize(line)) <= kept)
    assert cut.convert_ids_to_tokens(cut(line)["input_ids"]) == [
        "<s>",
        *whole.tokenize(line),
        "</s>",
    ]
    with pytest.raises(SystemExit, match="leaves no piece"):
        new_encoder.main([*argv, str(tmp_path / "whole"), "--vocab_size", "5"])
    with pytest.raises(SystemExit, match="a BPE tok"):
        new_encoder.main([*argv, str(tiny_bert_dir)])
