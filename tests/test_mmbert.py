"""An encoder in the shape of mmBERT trains by configs/mmbert.yaml, with its masked-LM head.

It is a ModernBERT with special ids pad 0, eos 1, bos 2, mask 4, and pieces that begin with "▁". Its
tokenizer has no `cls_token`. One layer in three attends globally. The decoder is tied to the word
embeddings and has a bias.
"""

from pathlib import Path

from conftest import REPOSITORY, bpe_tokenizer, built, results, run, save
from tiny_models import SHAPE
from transformers import ModernBertConfig, ModernBertForMaskedLM

TOKENS = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>", "mask": "<mask>"}
CONFIG = ModernBertConfig(
    **SHAPE | {"num_hidden_layers": 7, "pad_token_id": 0},
    max_position_embeddings=80,
    global_attn_every_n_layers=3,
    local_attention=8,
    eos_token_id=1,
    bos_token_id=2,
    cls_token_id=1,
    sep_token_id=1,
)


def test_it_trains_by_its_recipe(bitext_dir: Path, tmp_path: Path) -> None:
    model = save(tmp_path / "mmbert", ModernBertForMaskedLM(CONFIG), bpe_tokenizer(TOKENS))
    recipe = (
        f"{REPOSITORY}/dap_transformers/configs/mmbert.yaml --bf16 --use_cpu --dev_pairs 10 "
        f"--model_name_or_path {model} --train_data {bitext_dir} --total_train_batch_size 16 "
        "--max_steps 2 --eval_steps 2 --save_steps 2 --dataloader_num_workers 0 "
        "--disable_tqdm true --report_to none"
    )
    out = tmp_path / "out"
    run(f"{recipe} --objective tr+rtl+bow --output_dir {out}")
    assert {"eval_rtl_loss", "eval_bow_loss"} <= results(out).keys()
    config = built(f"{recipe} --output_dir {tmp_path}/new").model.config
    assert (config.mask_token_id, config.rtl_layers) == (4, 3)
