"""Hard negatives to train with: a target changed by a rule, so that it is no translation of its source any more.

The rules and word lists are others than those of the evaluation (numbers, negations, antonyms and names, in
`dap/search/hard_negatives.py`), so that what training gains there is not the knowledge of the rules. The word lists
are English; words of other languages are exchanged, moved and deleted, too, if spaces part them.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from dap.errors import UserError
from dap.training.data import cutting_backend

#: Words of a line may stand for each other: modality, tense, quantity, degree, place, conjunction, person, time.
SWAPS = """
can must will should
could would might
is was
are were
has had
does did
all some
every another
much enough little
very hardly slightly
only also even almost
in on from to behind beside towards through
during until since
and or
because although if unless while
I you we they
he she
him her me us them
my your our their its his
here there elsewhere
today tomorrow yesterday
now soon later already
who what where when why how
probably certainly
say ask hear
said asked heard
want need refuse
wants needs refuses
wanted needed refused
go come stay
goes comes stays
went came stayed
make take give
made took gave
think hope doubt
thinks hopes doubts
thought hoped doubted
mother father sister brother
morning afternoon evening
week month year
"""
#: Negations, which the evaluation takes out and no rule here touches.
UNTOUCHED = "never none nobody nothing nowhere cannot without"
_OTHERS = {word: line.split() for line in SWAPS.splitlines() for word in line.split()}
_LISTED = _OTHERS.keys() | UNTOUCHED.split()
_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_CLAUSE = re.compile(r"[,;:]\s|\s[-–—]\s")
#: Letters of the shortest content word.
CONTENT = 4
#: Further targets of a batch from which a copy may have a word.
OTHERS = 8


def perturbed(text: str, seed: object, others: Sequence[str] = ()) -> str | None:
    """The text changed by one rule, which a seed chooses among those that apply; None where none does.

    The same text, seed and others give the same copy. It differs from the text in its words, not in case or
    punctuation alone.

    >>> perturbed("She will sing in the garden.", 0), perturbed("She will sing in the garden.", 2)
    ('She should sing in the garden.', 'She will in the garden.')

    Args:
        text: a target of the batch.
        seed: a number or string, such as step and row.
        others: further targets of the batch, whose words may be put into the text.
    """
    rng = random.Random(f"{seed} {text.encode(errors='surrogatepass')!r}")
    for rule in rng.sample(RULES, len(RULES)):
        copy = rule(text, rng, others)
        if copy is not None and _words(copy) != _words(text):
            return copy
    return None


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _function_word(text: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """Another word of its line in `SWAPS` for one word."""
    found = [word for word in _WORD.finditer(text) if word[0] in _OTHERS or word[0].lower() in _OTHERS]
    if not found:
        return None
    place = rng.choice(found)
    group = _OTHERS.get(place[0]) or _OTHERS[place[0].lower()]
    return _put(text, place, rng.choice([word for word in group if word != place[0].lower() and word != place[0]]))


def _word_of_another(text: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """A content word of another target for one of like length, as rare words are long and frequent ones short."""
    own, known = _content(text), set(_words(text))
    foreign = {word[0] for other in others for word in _content(other)} - known
    if not own or not foreign:
        return None
    place = rng.choice(own)
    order = sorted(foreign, key=lambda word: (abs(len(word) - len(place[0])), word))
    return _put(text, place, rng.choice(order[:3]))


def _deletion(text: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """Without one of its content words; at least three words are left."""
    found = _content(text)
    if not found or len(_words(text)) < 4:
        return None
    place = rng.choice(found)
    return (text[: place.start()].rstrip() + text[place.end() :]).strip()


def _exchange(text: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """Two of its content words in each other's place."""
    found = _content(text)
    if len(found) < 2:
        return None
    one, other = sorted(rng.sample(found, 2), key=re.Match.start)
    return _put(_put(text, other, one[0]), one, other[0])


def _clause(text: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """Without one of the clauses that commas, colons or dashes part."""
    parts = [part for part in _CLAUSE.split(text) if part.strip()]
    if len(parts) < 2:
        return None
    parts.pop(rng.randrange(len(parts)))
    copy = ", ".join(parts)
    return copy[:1].upper() + copy[1:]


def _content(text: str) -> list[re.Match[str]]:
    """The longer words, without those that the lists name, contractions, and capitalised words, which may be names."""
    found = [word for word in _WORD.finditer(text) if len(word[0]) >= CONTENT and not word[0][0].isupper()]
    return [word for word in found if word[0] not in _LISTED and not re.search("['’]", word[0])]


def _put(text: str, place: re.Match[str], word: str) -> str:
    """The text with a word in the place of another, with a capital where that has one."""
    word = word[:1].upper() + word[1:] if place[0][0].isupper() else word
    return text[: place.start()] + word + text[place.end() :]


Rule = Callable[[str, random.Random, Sequence[str]], str | None]
RULES: list[Rule] = [_function_word, _word_of_another, _deletion, _exchange, _clause]


class HardNegatives:
    """Changed copies of a batch's targets, as token ids.

    They depend on the seed and the batch alone, so that a resumed run has the same; and no two epochs have the same,
    as their batches differ.

    Args:
        tokenizer, max_seq_length: what the ids of the targets were made with.
        share: of the pairs, drawn one by one, that are to bring a copy.

    Raises:
        ValueError: the tokenizer cannot make text of ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, share: float, seed: int) -> None:
        self.tokenizer, self.share, self.seed = cutting_backend(tokenizer, max_seq_length), share, seed
        if self.tokenizer.decoder is None:
            raise UserError(f"tr_hard_negatives={share}: the tokenizer has no decoder for the text to change; give 0")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The ids of each row's copy; none for a pair that is not drawn, or whose target no rule changes.

        Nor has one a target whose text has other ids than it (as of an unknown letter): its copy would tell itself.
        """
        rng = random.Random(f"{self.seed} {' '.join(row['pair_id'] for row in rows)}")
        targets = [list(row["target_input_ids"]) for row in rows]
        texts, found = self.tokenizer.decode_batch(targets), {}
        for row in range(len(rows)):
            if rng.random() < self.share:
                others = [texts[(row + 1 + k) % len(texts)] for k in range(min(OTHERS, len(texts) - 1))]
                found[row] = perturbed(texts[row], rng.random(), others)
        found = {row: copy for row, copy in found.items() if copy is not None}
        encoded = self.tokenizer.encode_batch_fast([*found.values(), *(texts[row] for row in found)])
        ids: list[list[int]] = [[] for _ in rows]
        for row, copy, again in zip(found, encoded, encoded[len(found) :]):
            if again.ids == targets[row] != copy.ids:
                ids[row] = copy.ids
        return ids
