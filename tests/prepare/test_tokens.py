"""Tokens put together from words are those of the whole text, whatever the tokenizer and the text."""

import random

import polars as pl
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from dap.prepare import tokens
from dap.prepare.filters import repair_texts
from dap.prepare.tokens import Tokens, splits_at_spaces

#: Pieces of text, some of which join with their neighbours, or become spaces or nothing.
PIECES = [
    *("a", "b", "cab", "straße", "ﬁ", "日本語", "ไทย", "한글", "नमस्ते", "क", "🙂", "👍🏽", "½", "…", "¿", "x"),
    *(" ", " ", " ", " ", "\u0301", "\u093f", "\u200d", "\u200c", "\ufe0f", "\U0001f3fb", "\u0d4e", "\u0600"),
    *("\u00ad", "▁", "´", "¨", "\ufffd", "\ufdfa", "\u00a0", "<s>", "<mask>", "s>", "\u1160", " \u0308", "▁ "),
]
ALWAYS = pre_tokenizers.Metaspace(prepend_scheme="always")
BY_WORD = {
    "bert": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "none": (None, pre_tokenizers.WhitespaceSplit()),
    "nfkc": (normalizers.NFKC(), ALWAYS),
    "e5": (normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]), ALWAYS),
    "xlm-r": (normalizers.NFKC(), pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), ALWAYS])),
}
WHOLE = {
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "unsplit": (None, pre_tokenizers.Metaspace(split=False)),
    "strip": (normalizers.Strip(), pre_tokenizers.WhitespaceSplit()),
    "replaced": (normalizers.Replace("a", " "), pre_tokenizers.WhitespaceSplit()),
    "alone": (None, None),
}


def tokenizer_of(parts: tuple[normalizers.Normalizer | None, pre_tokenizers.PreTokenizer | None]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = parts
    special = [AddedToken("<s>"), AddedToken("<unk>"), AddedToken("<mask>", lstrip=True)]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(wild_texts(1, 200), trainer)
    return tokenizer


def wild_texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(PIECES, k=draw.randint(0, 9))) for _ in range(count)]


def naive(tokenizer: Tokenizer, texts: pl.Series) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("name", [*BY_WORD, *WHOLE])
def test_tokens_are_those_of_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of((BY_WORD | WHOLE)[name])
    assert splits_at_spaces(tokenizer) == (name in BY_WORD)
    find = Tokens(tokenizer)
    for seed, known in ((2, 300_000), (3, 300_000), (4, 3)):
        monkeypatch.setattr(tokens, "KNOWN_WORDS", known)
        texts = repair_texts(pl.Series(wild_texts(seed, 500)))
        assert find(texts).to_list() == naive(tokenizer, texts)
    assert find(texts.clear()).to_list() == []


def test_a_word_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = tokenizer_of(BY_WORD["nfkc"]), []
    find = Tokens(tokenizer)
    encode = find._encode
    monkeypatch.setattr(find, "_encode", lambda texts: asked.extend(texts) or encode(texts))
    texts = pl.Series(["a cab a", "cab b", "\ufdfa a"])
    assert find(texts).to_list() == find(texts).to_list() == naive(tokenizer, texts)
    assert sorted(asked) == sorted(["a", "b", "cab", "\ufdfa a", "\ufdfa a"])


@pytest.mark.parametrize("token", [AddedToken("ab", normalized=True), AddedToken("a b", normalized=False)])
def test_added_tokens_that_reach_over_words(token: AddedToken) -> None:
    tokenizer = tokenizer_of(BY_WORD["none"])
    tokenizer.add_tokens([token])
    assert not splits_at_spaces(tokenizer)
    texts = pl.Series(["a b", "ab a b", "cab"])
    assert Tokens(tokenizer)(texts).to_list() == naive(tokenizer, texts)
