"""Align the words of sentences with those of their translations, with any encoder.

Legend: `P` sentence pairs, `S` source words, `T` target words, `W` words of a sentence, `N` tokens
of a sentence, `L` links, `D` hidden size.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dap_transformers.alignment.links import METHODS, align_tokens, overlaps, word_states
from dap_transformers.alignment.pharaoh import format_links
from dap_transformers.alignment.words import (
    PUNCTUATED,
    SPACED,
    Span,
    is_unsegmented,
    tokenizer_words,
    with_word_marks,
    words_like,
)
from dap_transformers.encoding.encoder import SentenceEncoder, TokenPlaces, listed
from dap_transformers.errors import UserError
from dap_transformers.files import compressed_file, plain_suffix
from dap_transformers.options import arg
from dap_transformers.text.archives import read_sentences
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import SIDES, BitextFile, LineAudit, read_tables
from dap_transformers.text_keys import is_blank

logger = logging.getLogger(__name__)

#: What counts as a word -> function that finds the spans of a sentence's words.
WORDS: dict[str, Callable[[str, TokenPlaces], list[Span]]] = {
    "punctuation": partial(words_like, PUNCTUATED),
    "spaces": partial(words_like, SPACED),
    "tokenizer": lambda sentence, tokens: tokenizer_words(sentence, tokens.spans, tokens.words),
}
#: Pairs that are encoded at a time. This bounds the memory of the token states.
CHUNK = 512
#: Formats whose line numbers are those of a text. Others hold pairs in units of other kinds.
NOT_LINES = ("tmx", "po", "hub")
#: Columns of a table of links.
COLUMNS = ("pair", "source_position", "target_position", "source_word", "target_word", "cosine")
#: Columns of a word list: links of two words with each other, and all links of each.
WORD_LIST = ("source_word", "target_word", "links", "source_links", "target_links")

#: A sentence and its translation.
Pair = tuple[str, str]


@dataclass
class AlignmentOptions:
    """How the words of a sentence pair are found and linked."""

    method: str = arg(
        "argmax",
        "'argmax' links words that are each other's nearest, 'itermax' adds links in a second "
        "round.",
        choices=tuple(METHODS),
    )
    layer: int | None = arg(
        None,
        "Hidden layer of the token states, from 0 (embeddings). Default: the last. SimAlign takes "
        "8 of mBERT and XLM-R.",
    )
    words: str | None = arg(
        None,
        "'punctuation': words end at spaces, and the punctuation around them is split off. "
        "'spaces': only at spaces, as for SimAlign and fast_align. 'tokenizer': words of the "
        "tokenizer, for text without spaces such as Chinese. Default: 'punctuation', and with "
        "reference links 'spaces'.",
        choices=tuple(WORDS),
    )


@dataclass(frozen=True)
class WordAlignment:
    """The S words of a sentence, the T words of its translation, and their links.

    Attributes:
        links: (L, 2) int64, numbers of a source and a target word, from 0, in ascending order.
        similarity: (S, T) float32, cosines of the words, 0 for a word without tokens. The state of
            a word is the mean of its tokens' states.
        without_state: number of words of both sides that have no tokens, because the sentence was
            cut or the tokenizer dropped them. These words get no link.
    """

    source: list[str]
    target: list[str]
    links: np.ndarray
    similarity: np.ndarray
    without_state: int

    @property
    def cosines(self) -> np.ndarray:
        """Return the cosine of the two words of each link, (L,) float32."""
        return self.similarity[self.links[:, 0], self.links[:, 1]]

    def pharaoh(self) -> str:
        """Return the links of the sentence pair in Pharaoh format, such as `0-1 2-0`."""
        return format_links(self.links)


@dataclass(frozen=True)
class _Words:
    """The W words of a sentence, their states (W, D), and which of them have tokens, (W,)."""

    words: list[str]
    states: np.ndarray
    has_tokens: np.ndarray


def align_words(
    encoder: SentenceEncoder,
    source: Sequence[str],
    target: Sequence[str],
    **options: Any,
) -> list[WordAlignment]:
    """Link the words of each sentence with the words of its translation.

    Example:
        encoder = SentenceEncoder.from_pretrained("out")
        [aligned] = align_words(encoder, ["Wo ist der Bahnhof?"], ["Where is the station?"])
        print(aligned.pharaoh())  # 0-0 1-1 2-2 3-3 4-4

    Args:
        options: fields of `AlignmentOptions`, such as `method="itermax"`.
    """
    pairs = zip(listed(source), listed(target), strict=True)
    return list(stream_alignments(encoder, pairs, AlignmentOptions(**options)))


def stream_alignments(
    encoder: SentenceEncoder,
    pairs: Iterable[Pair],
    options: AlignmentOptions,
) -> Iterator[WordAlignment]:
    """Yield the word alignment of each pair of sentences, in the order of the pairs.

    Memory does not grow with the number of pairs: `CHUNK` pairs are read and encoded at a time.
    """
    pairs = iter(pairs)
    while chunk := list(islice(pairs, CHUNK)):
        sentences = [source for source, _ in chunk] + [target for _, target in chunk]
        found = _words_of(encoder, sentences, options)
        for source, target in zip(found[: len(chunk)], found[len(chunk) :], strict=True):
            links, similarity = align_tokens(source.states, target.states, options.method)
            missing = sum(int((~side.has_tokens).sum()) for side in (source, target))
            yield WordAlignment(source.words, target.words, links, similarity, missing)


def _words_of(
    encoder: SentenceEncoder, sentences: Sequence[str], options: AlignmentOptions
) -> list[_Words]:
    """Encode sentences, and find their words with their states."""
    token_states, places = encoder.encode_tokens(sentences, options.layer)
    found = []
    for sentence, states, own in zip(sentences, token_states, places, strict=True):
        spans = WORDS[options.words or "punctuation"](sentence, own)
        is_part = overlaps(spans, with_word_marks(sentence, own.spans))  # (W, N)
        words = [sentence[start:end] for start, end in spans]
        found.append(_Words(words, word_states(states, is_part), is_part.any(1)))
    return found


# --------------------------------------------------------------------------- from files to pairs


def read_lines(source_file: str | Path, target_file: str | Path) -> Iterator[Pair]:
    """Yield the sentence pairs of two texts, line by line. One or both sentences may be empty."""
    lines = zip_longest(read_sentences(source_file), read_sentences(target_file))
    for number, (source, target) in enumerate(lines, 1):
        if source is None or target is None:
            raise UserError(
                f"{source_file} and {target_file} differ in length, from line {number}: line i of "
                "one must translate line i of the other"
            )
        # A line without anything that a reader sees holds no words.
        yield "" if is_blank(source) else source, "" if is_blank(target) else target


def read_bitext(
    files: Sequence[str],
    language: str | None = None,
    target_language: str = "en",
    max_bad_lines: float = 0.001,
) -> Iterator[Pair]:
    """Yield the sentence pairs of parallel text in one language. None takes the only one.

    A malformed line becomes a pair of empty sentences. `max_bad_lines` is their highest share.
    """
    found = find_bitext(files, target_language, split=None)
    if language is None and len(found) == 1:
        [language] = found
    if language not in found:
        raise UserError(f"there is text in {' '.join(found)}: choose one source language")
    for file in found[language]:
        yield from _pairs_of_file(file, max_bad_lines)


def _pairs_of_file(file: BitextFile, max_bad_lines: float) -> Iterator[Pair]:
    """Yield the sentence pairs of a file, and empty pairs for lines that are malformed.

    The header of a table is no pair.
    """
    has_lines = file.format not in NOT_LINES
    audit = LineAudit(file, max_bad_lines)
    number = int(file.columns.has_header)
    for table in read_tables(file, audit):
        columns = (table[name].to_pylist() for name in ("line", "source", "target"))
        for line, source, target in zip(*columns, strict=True):
            if has_lines:
                yield from [("", "")] * (line - number - 1)
            number = line
            yield source, target
    if has_lines:
        yield from [("", "")] * (audit.lines - number)


def check_pairs(pairs: Sequence[Pair], options: AlignmentOptions) -> None:
    """Refuse no pairs at all. Warn if a side has no spaces between words, but words need them."""
    if not pairs:
        raise UserError("there is no sentence to align")
    for name, sentences in zip(SIDES, zip(*pairs[:1000])):  # so many are enough
        if options.words != "tokenizer" and is_unsegmented(sentences):
            logger.warning(
                "the %s sentences have no spaces between words: take the words of the tokenizer, "
                "or put spaces between the words",
                name,
            )


# --------------------------------------------------------------------------- from links to a file


def write_links(
    aligned: Iterable[WordAlignment], path: str | Path, words: Counter[Pair] | None = None
) -> dict[str, int]:
    """Write the links of all pairs in the format that the name says. Return counts for a report.

    The linked words are counted in `words`, if it is given: each pair of words, and beside an empty
    text each word of the source and of the target.
    """
    text_of = WRITERS.get(plain_suffix(path), _pharaoh)
    counts = Counter(words=0, links=0, words_without_state=0, pairs=0)
    with compressed_file(path) as file:
        if text_of is _tsv:
            file.write("\t".join(COLUMNS).encode() + b"\n")
        for number, pair in enumerate(aligned, 1):
            file.write(text_of(number, pair).encode())
            counts["words"] += len(pair.source) + len(pair.target)
            counts["links"] += len(pair.links)
            counts["words_without_state"] += pair.without_state
            counts["pairs"] += 1
            if words is not None:
                for i, j in pair.links.tolist():
                    source, target = pair.source[i], pair.target[j]
                    words.update([(source, target), (source, ""), ("", target)])
    return dict(counts)


def write_word_list(links: Counter[Pair], path: str | Path, min_count: int = 1) -> None:
    """Write the word pairs with at least `min_count` links as a table, most frequent first.

    `links` are the counts of `write_links`. Words without a letter or digit are left out.
    """
    with compressed_file(path) as file:
        file.write("\t".join(WORD_LIST).encode() + b"\n")
        for (source, target), count in links.most_common():
            words = f"{source}\t{target}"
            if count >= min_count and re.search(r"\w.*\t.*\w", words):
                totals = f"{links[source, '']}\t{links['', target]}"
                file.write(f"{words}\t{count}\t{totals}\n".encode())


def _pharaoh(number: int, aligned: WordAlignment) -> str:
    return f"{aligned.pharaoh()}\n"


def _tsv(number: int, aligned: WordAlignment) -> str:
    """Return a line with the values of the `COLUMNS` for each link, as literal text."""
    text = ""
    for (i, j), cosine in zip(aligned.links.tolist(), aligned.cosines.tolist(), strict=True):
        words = f"{aligned.source[i]}\t{aligned.target[j]}"
        text += f"{number}\t{i}\t{j}\t{words}\t{cosine:.4f}\n"
    return text


def _json(number: int, aligned: WordAlignment) -> str:
    """Return a line with the words and links of a sentence pair as an object."""
    content = {
        "pair": number,
        "source": aligned.source,
        "target": aligned.target,
        "links": aligned.links.tolist(),
        "cosines": [round(cosine, 4) for cosine in aligned.cosines.tolist()],
    }
    return json.dumps(content, ensure_ascii=False) + "\n"


#: Ending of a file's name -> function that writes a pair. Others are in Pharaoh format.
WRITERS = {".tsv": _tsv, ".jsonl": _json}
