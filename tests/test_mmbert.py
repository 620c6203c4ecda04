"""An encoder in the shape of mmBERT trains by configs/mmbert.yaml, with its masked-LM head.

It is a ModernBERT with special ids pad 0, eos 1, bos 2, mask 4, and pieces that begin with "▁". Its
tokenizer has no `cls_token`. One layer in three attends globally. The decoder is tied to the word
embeddings and has a bias.
"""

from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, built, results, run, synthetic_pairs
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from dap_transformers.encoding.encoder import SentenceEncoder
from modeling_dap import DAPForPreTraining

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


@pytest.fixture(scope="module")
def mmbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny mmBERT with random weights and its tokenizer."""
    folder = tmp_path_factory.mktemp("mmbert")
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    text = [side for pair in synthetic_pairs("de") for side in pair]
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([*text, "abcdefghijklmnopqrstuvwxyz"], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    names = {f"{word[1:-1]}_token": word for word in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(folder)
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        max_position_embeddings=80,
        global_attn_every_n_layers=3,
        local_attention=8,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        cls_token_id=1,
        sep_token_id=1,
        decoder_bias=True,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = ModernBertForMaskedLM(config)
    model.decoder.bias.data.normal_()
    model.save_pretrained(folder)
    return folder


def recipe(model: Path, text: Path) -> list[str]:
    """Return the arguments of a short training by configs/mmbert.yaml."""
    return [
        *(
            str(REPOSITORY / "dap_transformers" / "configs" / "mmbert.yaml"),
            "--model_name_or_path",
            str(model),
        ),
        *("--train_data", str(text), "--total_train_batch_size", "16", "--dev_pairs", "10"),
        *("--max_steps", "2", "--eval_steps", "2", "--save_steps", "2", "--report_to", "none"),
        *("--dataloader_num_workers", "0", "--disable_tqdm", "true", "--bf16", "--use_cpu"),
    ]


def test_the_prediction_head_is_the_masked_lm_head(mmbert: Path) -> None:
    masked_lm = ModernBertForMaskedLM.from_pretrained(mmbert).eval()
    model = DAPForPreTraining.from_encoder(str(mmbert), objective="tr+tlm").eval()
    ids = torch.randint(5, len(masked_lm.decoder.bias), (3, 12))
    states = model.dap.encoder(ids).last_hidden_state
    head = model.prediction_head
    logits = head.transform(states) @ model.get_input_embeddings().weight.T + head.bias
    torch.testing.assert_close(logits, masked_lm(ids).logits)


def test_it_trains_by_its_recipe(mmbert: Path, bitext_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run([*recipe(mmbert, bitext_dir), "--objective", "tr+rtl+bow", "--output_dir", str(out)])
    assert {"eval_rtl_loss", "eval_bow_loss"} <= results(out).keys()
    encoder = SentenceEncoder.from_pretrained(str(out))
    text = [source for source, _ in synthetic_pairs("de")[:9]]
    together = torch.tensor(encoder.encode(text))
    alone = torch.cat([torch.tensor(encoder.encode([each])) for each in text])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    trainer = built([*recipe(mmbert, bitext_dir), "--output_dir", str(tmp_path / "new")])
    assert trainer.model.config.mask_token_id == 4
    assert trainer.model.config.rtl_layers == 3
