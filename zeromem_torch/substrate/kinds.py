"""What a text holds: the kinds of answers in it, and whether it can be understood without its neighbours.

Rules only: patterns and word lists are data, in `cues.toml`. A text's kinds and a query's answer types (paper Eq. 6)
are bits of one mask, so that compatibility is a bit test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import IntFlag, auto

from zeromem_torch.substrate.cues import CUES, GRAMMAR, WORDS, compiled, is_plural
from zeromem_torch.substrate.dates import find_dates

__all__ = ["LABEL_KINDS", "NOUN_KINDS", "AnswerType", "needs_context", "text_kinds"]


class AnswerType(IntFlag):
    """Kinds of answers; any text that is not blank holds a PHRASE."""

    DATE = auto()
    DURATION = auto()
    NUMBER = auto()
    PERSON = auto()
    PLACE = auto()
    ORGANISATION = auto()
    TITLE = auto()
    YES_NO = auto()
    LIST = auto()
    PHRASE = auto()


def text_kinds(text: str) -> int:
    """The kinds of answers a text holds, as AnswerType bits; a tagger's labels add to them through `LABEL_KINDS`.

    Reads at most the first 20,000 characters.
    """
    text = text[:20_000]
    if not text.strip():
        return 0
    folded = text.lower().replace("\u2019", "'")
    kinds = _PHRASE
    for bit, pattern in _LOWER_KINDS:
        if pattern.search(folded):
            kinds |= bit
    for bit, pattern in _CAPITAL_KINDS:
        if pattern.search(text):
            kinds |= bit
    if not kinds & _DATE and find_dates(text, _SOME_DAY):
        kinds |= _DATE
    return kinds


def needs_context(text: str) -> bool:
    """Whether a turn leans on what is around it: a short reply, a yes or no, a pronoun with nothing before it.

    Greetings and exclamations count for nothing. Reads the first forty words.
    """
    words = [match for _, match in zip(range(40), WORDS.finditer(text), strict=False)]
    said = [match.group().lower().replace("\u2019", "'") for match in words]
    begin = next((i for i, word in enumerate(said) if not _is_filler(text, words, said, i)), len(said))
    if len(said) - begin <= 4 or said[0] in GRAMMAR["answers"] or said[begin] in GRAMMAR["answers"]:
        return True
    for i in range(begin, len(said)):
        bare = said[i].partition("'")[0]
        if bare in GRAMMAR["pointers"] and (i == begin or _ends_there(text, words, said, i)):
            return True
        if bare in GRAMMAR["pronouns"]:
            return True
        named = i > begin and words[i].group()[0].isupper() and bare not in _OPENERS
        if named or bare in GRAMMAR["determiners"] or (i > begin and is_plural(bare)) or bare in NOUN_KINDS:
            return False
    return False


def _is_filler(text: str, words: Sequence[re.Match[str]], said: Sequence[str], i: int) -> bool:
    """A greeting or an exclamation, or the name it is addressed to: "Hey John!", "Thanks, Maria."."""
    if said[i] in GRAMMAR["fillers"]:
        return True
    after = text[words[i].end() : words[i].end() + 1]
    return words[i].group()[0].isupper() and i < 6 and after in ("!", ",", ".") and said[i] not in _OPENERS


def _ends_there(text: str, words: Sequence[re.Match[str]], said: Sequence[str], i: int) -> bool:
    """Whether "this" or "that" stands alone rather than before a noun or a clause."""
    if "'" in said[i] or i + 1 == len(said):
        return True
    return text[words[i].end()] in ".,!?;" or said[i + 1] in GRAMMAR["auxiliaries"]


# What a noun stands for, in the singular.
NOUN_KINDS: dict[str, AnswerType] = {}
for _name, _nouns in CUES["nouns"].items():
    for _noun in _nouns.split():
        NOUN_KINDS[_noun] = NOUN_KINDS.get(_noun, AnswerType(0)) | AnswerType[_name.upper()]
# Labels of a named-entity tagger (OntoNotes) as bits to OR into `text_kinds`.
LABEL_KINDS: Mapping[str, int] = {label: int(AnswerType[name.upper()]) for label, name in CUES["labels"].items()}

_OPENERS = GRAMMAR["openers"]
_PHRASE, _DATE = int(AnswerType.PHRASE), int(AnswerType.DATE)
_CAPITAL = ("place", "organisation", "title")  # kinds whose patterns look at capitals
_LOWER_KINDS = [
    (int(AnswerType[name.partition("_words")[0].upper()]), compiled(pattern))
    for name, pattern in CUES["kinds"].items()
    if name not in _CAPITAL
]
_CAPITAL_KINDS = [(int(AnswerType[name.upper()]), compiled(CUES["kinds"][name])) for name in _CAPITAL]

_SOME_DAY = datetime(2000, 6, 15, tzinfo=UTC)  # whether a text holds a date does not depend on the day
