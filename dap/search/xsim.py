"""Hard negatives as in xsim++ (Chen et al., 2023, arXiv 2306.12907): copies of an English sentence that say otherwise.

Three kinds: another number; a negation put in or taken out, or an antonym ("causality alternation"); another name. The
rules know English by word lists alone. What a rule chooses depends on the sentence, and for names also on which names
the text has, but never on the order of the sentences. `dap/training/word_edits.py` has the rules to train with,
which are others.

Legend: `N` pairs, `C` copies, `D` dimensions.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from dap.search.similarity import nearest

COPY_KINDS = ("number", "negation", "name")
#: Copies of a sentence and kind: the first places where the rule applies.
MOST = 3

#: Words of which any of a line may stand for any other.
NUMBER_WORDS = """
two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen eighteen
twenty thirty forty fifty sixty seventy eighty ninety
hundred thousand million billion
hundreds thousands millions billions
first third fourth fifth sixth seventh eighth ninth tenth
"""
ANTONYMS = """
accept/reject accepted/rejected add/remove added/removed after/before agree/disagree agreed/disagreed alive/dead
allow/forbid allowed/forbidden always/never asleep/awake bad/good beautiful/ugly began/ended begin/end best/worst
better/worse big/small bought/sold bright/dark buy/sell cheap/expensive clean/dirty close/open closed/opened cold/hot
correct/wrong dangerous/safe day/night decrease/increase decreased/increased decreases/increases difficult/easy
down/up dry/wet early/late east/west empty/full enemy/friend everybody/nobody everyone/nobody everything/nothing
everywhere/nowhere exclude/include excluded/included export/import failed/succeeded failure/success false/true far/near
fast/slow fell/rose female/male few/many find/lose first/last forget/remember forgot/remembered found/lost happy/sad
hard/soft hate/love hated/loved hates/loves healthy/ill heavy/light high/low higher/lower husband/wife illegal/legal
important/unimportant impossible/possible inside/outside known/unknown large/tiny left/right less/more long/short
longer/shorter lose/win loss/profit man/woman maximum/minimum men/women most/least negative/positive new/old
north/south often/rarely old/young older/younger oppose/support opposed/supported over/under peace/war poor/rich
private/public same/different strong/weak usually/rarely with/without
"""
#: Names by their class, for text that has too few of its own.
NAMES = {
    "day": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "month": "January, February, March, April, May, June, July, August, September, October, November, December",
    "people": "American, British, French, German, Greek, Chinese, Japanese, Russian, Spanish, Turkish, Brazilian",
    "acronym": "BBC, EU, IBM, NASA, NATO, UN, WHO",
    "one word": "Alice, Berlin, Canada, David, Egypt, Helen, Kenya, London, Maria, Robert, Sydney, Toronto",
    "several words": "Buenos Aires, Jane Smith, New Zealand, Peter Brown, South Africa, United Nations",
}

_GROUP = {word: line.split() for line in NUMBER_WORDS.splitlines() for word in line.split()}
_OPPOSITE: dict[str, str] = {}
for _one, _other in (pair.split("/") for pair in ANTONYMS.split()):
    _OPPOSITE.setdefault(_one, _other)
    _OPPOSITE.setdefault(_other, _one)
_FULL_VERB = {"ca": "can", "wo": "will", "sha": "shall", "ai": "is"}  # before n't
_NUMBER = re.compile(rf"(?<![^\W_])(?:[0-9]+(?:(?ai:st|nd|rd|th)\b)?|(?ai:{'|'.join(_GROUP)})\b)")
_ANTONYM = re.compile(rf"\b(?ai:{'|'.join(_OPPOSITE)})\b")
_NEGATED = re.compile(
    r"\b(?:(can)not\b|(\w+)n['’]t\b|(?:never|not(?!\s+only\b)|no(?!\s+(?:one|longer|matter)\b))\s+)",
    re.IGNORECASE,
)
_ASKED = re.compile(
    r"\b(?:do|does|did|is|are|was|were|can|could|will|would|should|must|has|have|had)\s+"
    r"(?:I|you|he|she|it|we|they|there|(?-i:[A-Z])\w+)\s+",
    re.IGNORECASE,
)
_AUXILIARY = re.compile(
    r"(?:\b(?:am|is|are|was|were|will|would|can|could|should|must|might|may)"
    r"|\b(?:has|have|had)(?=\s+(?:\w+\s+)?\w+(?:ed|en)\b)"
    r"|\b(?:(?i:I|you|he|she|it|we|they|that|there)['’](?:m|s|re|ll|ve|d)))\s+(?!$)"
)
_SUBJECT = re.compile(r"\b(?:I|[Hh]e|[Ss]he|[Ww]e|[Tt]hey|[Ww]ho)\s+(?=[a-z])")
_WORD = r"(?!(?:Mrs?|Ms|Dr|St)\b)[A-ZÀ-ÖØ-Þ][^\W_]+(?:[-'’][^\W_]{2,})*"
_NAME = re.compile(rf"\b{_WORD}(?: {_WORD})*")
_PEOPLE = re.compile(r"(?:ish|ese|ian|ean|can|ench|rman|reek)$")


class Copy(NamedTuple):
    """A sentence, one of `COPY_KINDS`, and the sentence changed by a rule of that kind."""

    sentence: str
    kind: str
    text: str


def hard_negative_copies(sentences: Sequence[str]) -> list[Copy]:
    """The copies of each different sentence, at most `MOST` of a kind; of some sentences there are none.

    A copy that is, but for case and spaces, a sentence of the text or an earlier copy of its sentence is left out.

    >>> for copy in hard_negative_copies(["She did not buy 20 books."]):
    ...     print(copy.kind, copy.text)
    number She did not buy 90 books.
    negation She did buy 20 books.
    negation She did not sell 20 books.
    """
    known, rules, copies = (
        {_key(sentence) for sentence in sentences},
        (numbers, negations, name_rule(sentences)),
        [],
    )
    for sentence in dict.fromkeys(sentences):
        taken: set[str] = set()
        for kind, rule in zip(COPY_KINDS, rules, strict=True):
            for text in islice(rule(sentence), MOST):
                if _key(text) not in known and _key(text) not in taken:
                    taken.add(_key(text))
                    copies.append(Copy(sentence, kind, text))
    return copies


def _key(text: str) -> str:
    return " ".join(text.lower().split())


def numbers(text: str) -> Iterator[str]:
    """The text with one of its numbers changed, in the order of the numbers: the last digit but zeros, or a word.

    >>> list(numbers("On the 21st, 1,500 came."))
    ['On the 24th, 1,500 came.', 'On the 21st, 8,500 came.', 'On the 21st, 1,600 came.']
    """
    for found in _NUMBER.finditer(text):
        old = found[0]
        if not old[0].isdigit():
            yield _put(
                text, found, _cased(_pick(_GROUP[old.lower()], old.lower(), text, found), old)
            )
            continue
        digits = re.match("[0-9]+", old)[0]
        place, ordinal = len(digits.rstrip("0")) - 1, old[len(digits) :]
        if place >= 0:
            other = _pick("456789" if ordinal else "123456789", digits[place], text, found)
            yield _put(
                text,
                found,
                digits[:place] + other + digits[place + 1 :] + ("th" if ordinal else ""),
            )


def negations(text: str) -> Iterator[str]:
    """The text with its first negation taken out, or with one put in where there is none; then with one antonym each.

    >>> list(negations("He can't come before noon."))
    ['He can come before noon.', "He can't come after noon."]
    """
    if found := _NEGATED.search(text):
        short, rest = (found[1] or found[2] or "").lower(), text[found.end() :]
        verb = _cased(_FULL_VERB.get(short, short), found[0])
        yield text[: found.start()] + (verb + rest if verb else _cased(rest, found[0][0]))
    else:
        asked = _ASKED.search(text) if text.rstrip().endswith("?") else None
        if place := asked or _AUXILIARY.search(text):
            yield text[: place.end()] + "not " + text[place.end() :]
        elif place := _SUBJECT.search(text):
            yield text[: place.end()] + "never " + text[place.end() :]
    for found in _ANTONYM.finditer(text):
        yield _put(text, found, _cased(_OPPOSITE[found[0].lower()], found[0]))


def name_rule(sentences: Sequence[str]) -> Callable[[str], Iterator[str]]:
    """The rule that puts another name of these sentences, or of `NAMES`, of the same class in a name's place.

    Names are capitalised words that the sentences do not have in lower case; the first word of a sentence is one if
    another sentence has it as one.

    >>> rule = name_rule(["Yesterday Ann met Bob Lee.", "Bob laughed.", "On Monday she met Ann."])
    >>> list(rule("Bob laughed.")), list(rule("On Monday she laughed."))
    (['Canada laughed.'], ['On Sunday she laughed.'])
    """
    plain = {
        word for text in sentences for word in re.findall(r"\b[^\W\d_]+", text) if word.islower()
    }
    names = {kind: set(listed.split(", ")) for kind, listed in NAMES.items()}
    for text in sentences:
        for found, is_first in _capitalised(text):
            name = found[0].partition(" ")[2] if is_first else found[0]
            if not plain.issuperset(name.lower().split()):
                names[_class(name)].add(name)
    known = {word for group in names.values() for name in group for word in name.split()}
    known -= {word for word in known if word.lower() in plain}
    pools = {kind: sorted(group) for kind, group in names.items()}

    def rule(text: str) -> Iterator[str]:
        for found, is_first in _capitalised(text):
            name = found[0]
            if is_first and name.split()[0] not in known:
                name = name.partition(" ")[2]
            is_name = name in names[_class(name)] or name and known.issuperset(name.split())
            if is_name and (other := _pick(pools[_class(name)], text, text, found)):
                yield text[: found.end() - len(name)] + other + text[found.end() :]

    return rule


def _capitalised(text: str) -> Iterator[tuple[re.Match[str], bool]]:
    """Runs of capitalised words, and whether the first begins a sentence."""
    for found in _NAME.finditer(text):
        before = text[: found.start()].rstrip(" \"'“”‘’([{-–—¿¡")
        yield found, not before or before[-1] in ".!?:…"


def _class(name: str) -> str:
    """Which of `NAMES` a name is one of, by its form."""
    for kind in ("day", "month"):
        if name in NAMES[kind].split(", "):
            return kind
    if " " in name:
        return "several words"
    return "acronym" if name.isupper() else "people" if _PEOPLE.search(name) else "one word"


def _pick(options: Sequence[str], without: str, text: str, place: re.Match[str]) -> str:
    """The first option, from where a hash of text and place points, that is no part of `without`; "" if all are."""
    digest = hashlib.sha256(f"{place.start()} {text}".encode(errors="surrogatepass")).digest()
    start = int.from_bytes(digest[:8], "big")
    turned = (options[(start + step) % len(options)] for step in range(len(options)))
    return next((option for option in turned if option not in without), "")


def _put(text: str, place: re.Match[str], word: str) -> str:
    return text[: place.start()] + word + text[place.end() :]


def _cased(word: str, like: str) -> str:
    """The word in the case of another: capitals where that has them, or a first capital."""
    if len(like) > 1 and like.isupper():
        return word.upper()
    return word[:1].upper() + word[1:] if like[:1].isupper() else word


def hard_negative_errors(
    source_embeds: np.ndarray,
    target_embeds: np.ndarray,
    copy_embeds: np.ndarray,
    kinds: Sequence[str],
) -> dict[str, float]:
    """Sources in percent whose nearest of all target sentences and all copies is not their own line: xsim++.

    "error" is their share, and its parts are by what won: a copy of one of `COPY_KINDS`, or an "other" line. A copy
    with the same vector as the sentence wins, as the encoder cannot tell them apart; of equal lines the first wins.
    Without copies the error is 100 less the accuracy of `retrieval_accuracy`.

    >>> copies = np.array([[0.9, 0.1], [0.6, 0.8]])
    >>> hard_negative_errors(np.eye(2), np.array([[0.8, 0.2], [0.0, 1.0]]), copies, ["number", "name"])
    {'error': 50.0, 'number': 50.0, 'negation': 0.0, 'name': 0.0, 'other': 0.0}

    Args:
        source_embeds: (N, D), need not be normalised.
        target_embeds: (N, D), row i the translation of row i.
        copy_embeds: (C, D), of all sentences in any order.
        kinds: the kind of each copy, (C,).

    Raises:
        ValueError: no rows, rows that are not finite, or sides that do not fit.
    """
    won = nearest(source_embeds, np.concatenate([copy_embeds, target_embeds])) - len(
        kinds
    )  # (N,), a copy below 0
    winners = ["other" if line >= 0 else kinds[line] for line in won[won != np.arange(len(won))]]
    shares = {kind: 100 * winners.count(kind) / len(won) for kind in (*COPY_KINDS, "other")}
    return {"error": 100 * len(winners) / len(won)} | shares
