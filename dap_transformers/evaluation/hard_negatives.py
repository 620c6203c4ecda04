"""Hard negatives as in xsim++: copies of an English sentence that say something else.

After Chen et al. (2023, arXiv 2306.12907). There are three kinds of changes: another number; a
negation added or removed, or an antonym ("causality alternation"); another name. The rules find
these words by lists and patterns, without a parser. The order of the sentences does not matter.

These copies are for evaluation. Training uses `dap_transformers/training/negatives.py`.

In this module, `found` and `place` are matches of a pattern: the part of the text that is changed.

Legend: `N` pairs, `C` copies, `D` dimensions.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.evaluation.evaluator import (
    Evaluator,
    Metric,
    Numbers,
    PairsByLanguage,
    as_pairs,
    both_sides,
    pairs_of_mean,
)
from dap_transformers.evaluation.retrieval import require_pairs
from dap_transformers.search.exact import nearest

COPY_KINDS = ("number", "negation", "name")
#: Most copies per sentence and kind. They change the first places where the rule applies.
COPIES_PER_KIND = 3

#: Each word may be replaced by any other word of its line.
NUMBER_WORDS = """
two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen \
sixteen eighteen
twenty thirty forty fifty sixty seventy eighty ninety
hundred thousand million billion
hundreds thousands millions billions
first third fourth fifth sixth seventh eighth ninth tenth
"""
ANTONYMS = """
accept/reject accepted/rejected add/remove added/removed after/before agree/disagree
agreed/disagreed alive/dead allow/forbid allowed/forbidden always/never asleep/awake bad/good
beautiful/ugly began/ended begin/end best/worst better/worse big/small bought/sold bright/dark
buy/sell cheap/expensive clean/dirty close/open closed/opened cold/hot correct/wrong
dangerous/safe day/night decrease/increase decreased/increased decreases/increases difficult/easy
down/up dry/wet early/late east/west empty/full enemy/friend everybody/nobody everyone/nobody
everything/nothing everywhere/nowhere exclude/include excluded/included export/import
failed/succeeded failure/success false/true far/near fast/slow fell/rose female/male few/many
find/lose first/last forget/remember forgot/remembered found/lost happy/sad hard/soft hate/love
hated/loved hates/loves healthy/ill heavy/light high/low higher/lower husband/wife illegal/legal
important/unimportant impossible/possible inside/outside known/unknown large/tiny left/right
less/more long/short longer/shorter lose/win loss/profit man/woman maximum/minimum men/women
most/least negative/positive new/old north/south often/rarely old/young older/younger
oppose/support opposed/supported over/under peace/war poor/rich private/public same/different
strong/weak usually/rarely with/without
"""
#: Names by class, for texts that have too few names themselves.
NAMES = {
    "day": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "month": (
        "January, February, March, April, May, June, July, August, September, October, "
        "November, December"
    ),
    "people": (
        "American, British, French, German, Greek, Chinese, Japanese, Russian, Spanish, "
        "Turkish, Brazilian"
    ),
    "acronym": "BBC, EU, IBM, NASA, NATO, UN, WHO",
    "one word": (
        "Alice, Berlin, Canada, David, Egypt, Helen, Kenya, London, Maria, Robert, Sydney, Toronto"
    ),
    "several words": (
        "Buenos Aires, Jane Smith, New Zealand, Peter Brown, South Africa, United Nations"
    ),
}

_GROUP: dict[str, list[str]] = {}
for _line in NUMBER_WORDS.splitlines():
    _GROUP.update(dict.fromkeys(_line.split(), _line.split()))
_OPPOSITE: dict[str, str] = {}
for _pair in ANTONYMS.split():
    _one, _other = _pair.split("/")
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
    """A changed copy of a sentence. `kind` says what was changed, one of `COPY_KINDS`."""

    sentence: str
    kind: str
    text: str


@dataclass
class HardNegatives(Evaluator):
    """Measure the error if changed copies of the English sentences are candidates (xsim++).

    `pairs` maps a language code to (source, English) sentences.
    """

    pairs: PairsByLanguage
    name = "hard_negatives"
    task = "hard negatives"
    primary = "hard_negative_error"

    def __post_init__(self) -> None:
        self.pairs = as_pairs(self.pairs)
        self.copies = {}
        for code, rows in self.pairs.items():
            self.copies[code] = hard_negative_copies([english for _, english in rows])

    def sentences(self) -> Iterator[str]:
        yield from both_sides(self.pairs)
        for copies in self.copies.values():
            yield from (copy.text for copy in copies)

    def size(self) -> float:
        return pairs_of_mean(self.pairs)

    def __call__(self, encoder: Encoder) -> Numbers:
        """Return the results by language code, and "mean" -> {"error": means over the languages}.

        The results of a language are "pairs" (their number), "without_copies" (pairs whose English
        sentence has no copy), "copies" (kind of change -> number of copies) and "error" (the result
        of `hard_negative_errors`).
        """
        results: Numbers = {}
        for code, copies in self.copies.items():
            source, english = zip(*self.pairs[code], strict=True)
            texts = (source, english, [copy.text for copy in copies])
            kinds = [copy.kind for copy in copies]
            found = hard_negative_errors(*(encoder.encode(list(text)) for text in texts), kinds)
            have_copies = {copy.sentence for copy in copies}
            results[code] = {
                "pairs": len(english),
                "without_copies": sum(sentence not in have_copies for sentence in english),
                "copies": {kind: kinds.count(kind) for kind in COPY_KINDS},
                "error": found,
            }
        errors = [each["error"] for each in results.values()]
        mean = {name: float(np.mean([error[name] for error in errors])) for name in errors[0]}
        return results | {"mean": {"error": mean}}

    def logged(self, numbers: Numbers) -> dict[str, float]:
        return {self.primary: numbers["mean"]["error"]["error"]}

    def metrics(self, numbers: Numbers) -> list[Metric]:
        names = {"error": "hard-negative error", "other": "by another sentence"}
        found = []
        for code, each in numbers.items():
            for preferred, share in each["error"].items():
                found.append(Metric(names.get(preferred, f"by {preferred}"), share, code))
        return found


# From sentences to copies


def hard_negative_copies(sentences: Sequence[str]) -> list[Copy]:
    """Make changed copies of each distinct sentence, in order.

    A sentence has at most `COPIES_PER_KIND` of each kind, and none if no rule applies. A copy is
    left out if it equals one of the sentences or an earlier copy of the same sentence, except for
    case and spaces. The sentences also decide which words are names, so give all of the text.

    >>> for copy in hard_negative_copies(["She did not buy 20 books."]):
    ...     print(copy.kind, copy.text)
    number She did not buy 90 books.
    negation She did buy 20 books.
    negation She did not sell 20 books.
    """
    rules = (numbers, negations, name_rule(sentences))
    known = {_normalised(sentence) for sentence in sentences}
    copies = []
    for sentence in dict.fromkeys(sentences):
        taken: set[str] = set()
        for kind, rule in zip(COPY_KINDS, rules, strict=True):
            for text in islice(rule(sentence), COPIES_PER_KIND):
                normalised = _normalised(text)
                if normalised not in known and normalised not in taken:
                    taken.add(normalised)
                    copies.append(Copy(sentence, kind, text))
    return copies


def _normalised(text: str) -> str:
    """Return a text in lower case, with single spaces."""
    return " ".join(text.lower().split())


def numbers(text: str) -> Iterator[str]:
    """Yield copies of the text, each with one number changed: its last non-zero digit, or word.

    >>> list(numbers("On the 21st, 1,500 came."))
    ['On the 24th, 1,500 came.', 'On the 21st, 8,500 came.', 'On the 21st, 1,600 came.']
    """
    for found in _NUMBER.finditer(text):
        old = found[0]
        if old[0].isdigit():
            new = _other_digits(text, found)
        else:
            new = _in_case_of(old, _pick(_GROUP[old.lower()], old.lower(), text, found))
        if new:
            yield _replace(text, found, new)


def _other_digits(text: str, found: re.Match[str]) -> str:
    """Change the last digit of a number that is not a zero. If all are zeros, return ""."""
    digits = re.match("[0-9]+", found[0])[0]
    ordinal = found[0][len(digits) :]  # such as "st"
    place = len(digits.rstrip("0")) - 1
    if place < 0:
        return ""
    # ordinals get a digit whose ending is "th"
    options = "456789" if ordinal else "123456789"
    digit = _pick(options, digits[place], text, found)
    return digits[:place] + digit + digits[place + 1 :] + ("th" if ordinal else "")


def negations(text: str) -> Iterator[str]:
    """Yield copies with a negation removed or else added, then with one antonym each.

    >>> list(negations("He can't come before noon."))
    ['He can come before noon.', "He can't come after noon."]
    """
    if found := _NEGATED.search(text):
        yield _without_negation(text, found)
    else:
        yield from _with_negation(text)
    for found in _ANTONYM.finditer(text):
        yield _replace(text, found, _in_case_of(found[0], _OPPOSITE[found[0].lower()]))


def _without_negation(text: str, found: re.Match[str]) -> str:
    """Return the text without a negation. "cannot" becomes "can", and "not" disappears."""
    rest = text[found.end() :]
    short = (found[1] or found[2] or "").lower()  # "can" of "cannot", "wo" of "won't"
    verb = _in_case_of(found[0], _FULL_VERB.get(short, short))
    if verb:
        return text[: found.start()] + verb + rest
    return text[: found.start()] + _in_case_of(found[0][0], rest)


def _with_negation(text: str) -> Iterator[str]:
    """Yield a copy with "not" after the first auxiliary verb, or else "never" after a subject."""
    is_question = text.rstrip().endswith("?")
    asked = _ASKED.search(text) if is_question else None
    if place := asked or _AUXILIARY.search(text):
        yield text[: place.end()] + "not " + text[place.end() :]
    elif place := _SUBJECT.search(text):
        yield text[: place.end()] + "never " + text[place.end() :]


def name_rule(sentences: Sequence[str]) -> Callable[[str], Iterator[str]]:
    """Make the rule that yields copies of a sentence, each with one name replaced by another.

    Names are capitalised words that never occur in lower case in the sentences. The first word of a
    sentence is a name only if it also occurs as a name inside a sentence. The new name comes from
    the sentences or from `NAMES`, and is of the same class.

    >>> rule = name_rule(["Yesterday Ann met Bob Lee.", "Bob laughed.", "On Monday she met Ann."])
    >>> list(rule("Bob laughed.")), list(rule("On Monday she laughed."))
    (['Canada laughed.'], ['On Sunday she laughed.'])
    """
    lower_words = _lower_case_words(sentences)
    names = _names_by_class(sentences, lower_words)
    pools = {kind: sorted(group) for kind, group in names.items()}

    # collect the words of names, for names that occur in another combination
    name_words = set()
    for pool in pools.values():
        for name in pool:
            name_words.update(word for word in name.split() if word.lower() not in lower_words)

    def rule(text: str) -> Iterator[str]:
        for found, is_first in _capitalised(text):
            name = found[0]
            if is_first and name.split()[0] not in name_words:
                name = name.partition(" ")[2]  # "" if there is no other word
            kind = _class(name)
            is_name = name in names[kind] or (name and name_words.issuperset(name.split()))
            if is_name and (other := _pick(pools[kind], text, text, found)):
                yield text[: found.end() - len(name)] + other + text[found.end() :]

    return rule


def _lower_case_words(sentences: Sequence[str]) -> set[str]:
    """Return the words that occur in lower case in the sentences."""
    words = set()
    for text in sentences:
        words.update(word for word in re.findall(r"\b[^\W\d_]+", text) if word.islower())
    return words


def _names_by_class(sentences: Sequence[str], lower_words: set[str]) -> dict[str, set[str]]:
    """Return the names in `NAMES` and in the sentences by class, without words that begin one."""
    names = {kind: set(listed.split(", ")) for kind, listed in NAMES.items()}
    for text in sentences:
        for found, is_first in _capitalised(text):
            name = found[0].partition(" ")[2] if is_first else found[0]
            if not lower_words.issuperset(name.lower().split()):
                names[_class(name)].add(name)
    return names


def _capitalised(text: str) -> Iterator[tuple[re.Match[str], bool]]:
    """Yield the match of each run of capitalised words, and whether the run begins a sentence."""
    for found in _NAME.finditer(text):
        before = text[: found.start()].rstrip(" \"'“”‘’([{-–—¿¡")
        yield found, not before or before[-1] in ".!?:…"


def _class(name: str) -> str:
    """Return the class of a name, a key of `NAMES`, by what the name looks like."""
    for kind in ("day", "month"):
        if name in NAMES[kind].split(", "):
            return kind
    if " " in name:
        return "several words"
    if name.isupper():
        return "acronym"
    return "people" if _PEOPLE.search(name) else "one word"


def _pick(options: Sequence[str], without: str, text: str, place: re.Match[str]) -> str:
    """Pick an option that is no part of the text `without`, by a hash of the text and the place.

    Return "" if there is none.
    """
    digest = hashlib.sha256(f"{place.start()} {text}".encode(errors="surrogatepass")).digest()
    start = int.from_bytes(digest[:8], "big")
    for step in range(len(options)):
        option = options[(start + step) % len(options)]
        if option not in without:
            return option
    return ""


def _replace(text: str, place: re.Match[str], word: str) -> str:
    """Return the text with `word` instead of the part that `place` matches."""
    return text[: place.start()] + word + text[place.end() :]


def _in_case_of(old: str, new: str) -> str:
    """Return the new word in the case of the old one: all capitals, a first capital, or as is."""
    if len(old) > 1 and old.isupper():
        return new.upper()
    return new[:1].upper() + new[1:] if old[:1].isupper() else new


# From vectors to errors


def hard_negative_errors(
    source_embeds: np.ndarray,
    target_embeds: np.ndarray,
    copy_embeds: np.ndarray,
    kinds: Sequence[str],
) -> dict[str, float]:
    """Measure how often a source's nearest candidate is not its translation (xsim++), in percent.

    Candidates are all targets (N, D), row i the translation of source i, and all their changed
    copies (C, D). A copy with the vector of the translation counts as nearer, because the encoder
    cannot tell them apart. Of target rows with equal cosines the first counts.

    >>> copies = np.array([[0.9, 0.1], [0.6, 0.8]])
    >>> targets = np.array([[0.8, 0.2], [0.0, 1.0]])
    >>> hard_negative_errors(np.eye(2), targets, copies, ["number", "name"])
    {'error': 50.0, 'number': 50.0, 'negation': 0.0, 'name': 0.0, 'other': 0.0}

    "error" is the share of source rows that miss their translation. The other keys split it by
    what was found: a copy of the kind "number", "negation" or "name", or an "other" target.
    """
    require_pairs(source_embeds, target_embeds)
    # copies come first, so that they win a tie, and have the numbers -C to -1
    candidates = np.concatenate([copy_embeds, target_embeds])
    winners = nearest(source_embeds, candidates) - len(copy_embeds)  # (N,)
    wrong = winners[winners != np.arange(len(winners))]
    counts = Counter("other" if winner >= 0 else kinds[winner] for winner in wrong)
    shares = {kind: 100 * counts[kind] / len(winners) for kind in (*COPY_KINDS, "other")}
    return {"error": 100 * len(wrong) / len(winners)} | shares
