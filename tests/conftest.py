"""Build tiny real models, tokenizers and parallel text, so that no test needs a network."""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # processes with more threads than cores slow each other down
_cache = tempfile.TemporaryDirectory(prefix="dap-tests-")
os.environ["HF_HOME"] = _cache.name

import pytest

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    from dap_transformers.encoding.encoder import SentenceEncoder
    from dap_transformers.training.trainer import DAPTrainer

REPOSITORY = Path(__file__).resolve().parent.parent
LANGUAGES = ("de", "fr", "sw")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that fork, so that all are on one worker, which needs one server."""
    forks = {"run_two", "run_killed", "run_python"}

    def is_other(item: pytest.Item) -> bool:
        called = item.function.__code__.co_names if isinstance(item, pytest.Function) else ()
        return forks.isdisjoint(called)

    items.sort(key=is_other)


def synthetic_pairs(language: str, count: int = 200, seed: int = 0) -> list[tuple[str, str]]:
    """Make pairs whose sources are English sentences, word by word in a made-up language."""
    rng = random.Random(f"{language}-{seed}")
    words = [
        f"{a}{b}"
        for a in ("ka", "lo", "mi", "ne", "pu", "ra")
        for b in ("ban", "der", "fin", "gol", "sut")
    ]
    pairs = {}
    while len(pairs) < count:
        english = rng.choices(words, k=rng.randint(3, 9))
        pairs[" ".join(english)] = " ".join(word[::-1] + language for word in english)
    return [(source, target) for target, source in pairs.items()]


def bpe_tokenizer(tokens: dict[str, str], **options: Any) -> PreTrainedTokenizerFast:
    """Train a tokenizer of 250 ids on made-up text.

    Args:
        tokens: kind -> special token, such as "bos". The first ids are theirs, in this order.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*dict.fromkeys(tokens.values())]
    tokenizer = Tokenizer(models.BPE(unk_token=tokens["unk"]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    text = [side for language in LANGUAGES for pair in synthetic_pairs(language) for side in pair]
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(text + ["abcdefghijklmnopqrstuvwxyz .,?!"], trainer)
    first, last = tokens["bos"], tokens["eos"]
    ids = [(token, special.index(token)) for token in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=ids
    )
    names = {f"{kind}_token": token for kind, token in tokens.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokens = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    return bpe_tokenizer(tokens | {"cls": "<s>", "sep": "</s>"}, model_max_length=64)


#: Fields of `tiny_config` that only one class has.
OWN_FIELDS = {
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 16,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "modernbert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "cls_token_id": 0,
        "sep_token_id": 2,
    },
    "t5": {"d_kv": 8, "d_ff": 48, "dropout_rate": 0.0},
    "distilbert": {"hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0},
}


def tiny_config(model_type: str, vocab_size: int = 250) -> PreTrainedConfig:
    """Return a three-layer configuration of an encoder class, without dropout."""
    import transformers

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 80,
        "pad_token_id": 1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **OWN_FIELDS.get(model_type, {}),
    }
    if model_type in ("eurobert", "gemma3_text", "lfm2", "llama", "mistral", "qwen3"):
        shape |= {"num_key_value_heads": 2, "head_dim": 8}
    if model_type in ("gemma3_text", "mistral", "qwen3"):
        shape |= {"sliding_window": 6, "use_sliding_window": True}
    if model_type in ("gemma3_text", "qwen3"):
        shape["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if model_type == "lfm2":
        shape["layer_types"] = ["conv", "full_attention", "conv"]
    if model_type == "gemma3_text":
        shape["use_bidirectional_attention"] = True
    return transformers.AutoConfig.for_model(model_type, **shape)


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Save a model with a tokenizer, the tiny one unless another is given."""
    for part in (model, tokenizer or tiny_tokenizer()):
        part.save_pretrained(folder)
    return folder


def save_bert(folder: Path, **shape: float) -> Path:
    """Save a BERT of random weights with its tokenizer, as most encoders on the Hub are."""
    import torch
    from transformers import BertModel

    torch.manual_seed(0)
    config = tiny_config("bert", len(tiny_tokenizer()))
    config.update(shape)
    return save(folder, BertModel(config, add_pooling_layer=False))


@pytest.fixture(scope="session")
def tiny_bert_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny_bert"))


def load_encoder(folder: Path, *args: Any, **options: Any) -> SentenceEncoder:
    from dap_transformers.encoding.encoder import SentenceEncoder

    return SentenceEncoder.from_pretrained(str(folder), *args, **options)


def load_library(folder: Path, **options: Any) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", **options)


def save_with_modules(folder: Path, encoder_dir: Path) -> Path:
    """Save an encoder as a sentence-transformers folder with Dense and Normalize."""
    from modules_dap import build_modules, write_modules

    dense = {"type": "Dense", "in_features": 32, "out_features": 8, "bias": True}
    dense["activation_function"] = "torch.nn.modules.activation.Tanh"
    encoder = load_encoder(encoder_dir, "mean")
    encoder.after = build_modules([dense, {"type": "Normalize"}])
    save(folder, encoder.model)
    write_modules(encoder, folder)
    return folder


@pytest.fixture
def encoder(tiny_bert_dir: Path) -> SentenceEncoder:
    """The tiny BERT with mean pooling."""
    return load_encoder(tiny_bert_dir, "mean")


def write_bitext(folder: Path, count: int) -> Path:
    """Write `count` pairs of each language. One of the three files is compressed."""
    from written import text_of, write

    for name in ("de-en.tsv", "fr-en.tsv", "sw-en.tsv.xz"):
        write(folder / name, text_of(synthetic_pairs(name[:2], count)))
    return folder


@pytest.fixture(scope="session")
def bitext_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 pairs of each language."""
    return write_bitext(tmp_path_factory.mktemp("bitext"), 200)


@pytest.fixture(scope="session")
def short_bitext_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pairs of each language, of which 6 become dev pairs, for runs of more than one epoch."""
    return write_bitext(tmp_path_factory.mktemp("short"), 60)


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    gc.freeze()  # otherwise each training's garbage collection visits all imported modules


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    import torch

    os.environ["COLUMNS"] = "100"  # tables are as wide as the terminal
    # torch.manual_seed notes the stack for devices: slower than many tests
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def flags(tiny_bert_dir: Path, bitext_dir: Path) -> str:
    return training_flags(tiny_bert_dir, bitext_dir)


@pytest.fixture
def short_flags(tiny_bert_dir: Path, short_bitext_dir: Path) -> str:
    """Arguments of a training with 162 pairs: an epoch has 5 steps of 30 pairs."""
    flags = training_flags(tiny_bert_dir, short_bitext_dir)
    return f"{flags} --per_device_train_batch_size 30"


def training_flags(model: Path, text: Path) -> str:
    """Arguments of a small training with train_dap.py."""
    return (
        f"--model_name_or_path {model} --train_data {text} --max_seq_length 16 "
        "--per_device_train_batch_size 16 --learning_rate 1e-3 --dev_pairs 20 --report_to none "
        "--disable_tqdm true --logging_steps 5 --head_steps 0"
    )


def run(command: str) -> None:
    """Train as a command of `train_dap.py` does, without its edge."""
    from dap_transformers.commands.recipes import parse_arguments
    from dap_transformers.training.run import train

    train(*parse_arguments(command.split()))


def built(command: str) -> DAPTrainer:
    """The trainer that a command of `train_dap.py` makes."""
    return built_and_described(command)[0]


def built_and_described(command: str) -> tuple[DAPTrainer, dict]:
    """The trainer that a command of `train_dap.py` makes, and the record of the run."""
    from dap_transformers.commands.recipes import parse_arguments
    from dap_transformers.training.run import build_trainer

    return build_trainer(*parse_arguments(command.split()))


def results(folder: Path, name: str = "eval") -> dict[str, float]:
    """What a training wrote of its end."""
    return json.loads((folder / f"{name}_results.json").read_text())


def state(folder: Path) -> dict:
    """The Trainer's state as a training left it."""
    return json.loads((folder / "trainer_state.json").read_text())


def logged(folder: Path, name: str) -> list[float]:
    """The values of this name in the log of a training."""
    return [line[name] for line in state(folder)["log_history"] if name in line]


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights that a folder holds."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def assert_equal_weights(folder: Path, other: Path) -> None:
    from torch.testing import assert_close

    assert_close(weights(folder), weights(other), rtol=0, atol=0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
