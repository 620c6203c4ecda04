"""The tokenizer of a folder is the one that its files describe."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dap_transformers.files import read_json, write_json
from dap_transformers.tokenizer import PROBE, load_tokenizer

SENTENCE = "kaban loderfr migol"


def test_without_a_tokenizer_class_the_tokens_are_those_of_the_file(
    tiny_bert_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Transformers would take the class of the model, which is BERT's WordPiece.
    folder = tmp_path / "old"
    shutil.copytree(tiny_bert_dir, folder)
    settings = read_json(folder / "tokenizer_config.json")
    del settings["tokenizer_class"]
    write_json(settings, folder / "tokenizer_config.json")
    expected = load_tokenizer(tiny_bert_dir)
    assert not caplog.text

    tokenizer = load_tokenizer(folder)
    assert "BertTokenizer gives other tokens than tokenizer.json" in caplog.text
    assert tokenizer(SENTENCE).input_ids == expected(SENTENCE).input_ids
    assert tokenizer.all_special_ids == expected.all_special_ids

    tokenizer.save_pretrained(tmp_path / "saved")
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert saved.encode(PROBE).ids == expected(PROBE).input_ids
