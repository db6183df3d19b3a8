"""Spans that could be an answer of a given type, each with a key by which two wordings of one thing are equal.

Candidates are always characters of a text; only dates are worded anew: a day as "15 July 2023", and what is as vague
as a week as "the week before 9 June 2023", so that a relative date keeps its meaning outside of its conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from zeromem_torch.substrate.cues import GRAMMAR
from zeromem_torch.substrate.dates import DateMention, find_dates
from zeromem_torch.substrate.entities import RuleExtractor, entity_key


class Candidate(NamedTuple):
    """Characters [start, end) of a text; `key` is equal for two wordings of one answer, `text` how we word it."""

    start: int
    end: int
    key: Any  # hashable
    text: str


def dates_of(text: str, reference: datetime | None = None) -> list[Candidate]:
    """Dates of a text; relative ones, and those without a year, only with a reference to count them from."""
    return [_date(text, mention, reference) for mention in find_dates(text, reference)]


def day_of(moment: datetime) -> str:
    return f"{moment.day} {moment:%B} {moment.year}"


def days_of(moment: datetime) -> tuple[int, int]:
    """The key of the day of a moment."""
    return moment.toordinal(), moment.toordinal()


def numbers_of(text: str) -> list[Candidate]:
    """Counts, in digits or words; not those of a date."""
    dated = find_dates(text, SOME_DAY)
    return [
        Candidate(*match.span(), _value(match.group()), match.group())
        for match in _NUMBER.finditer(text)
        if not any(mention.start < match.end() and match.start() < mention.end for mention in dated)
    ]


def durations_of(text: str) -> list[Candidate]:
    """Lengths of time ("about four months"), how long ago, since when, and how often ("three times a week")."""
    found = []
    for match in _DURATION.finditer(text):
        words = _WORD.findall(match.group().casefold())
        values = [_unit(word) or str(_value(word)) for word in words if word not in _VAGUE]
        found.append(Candidate(*match.span(), tuple(values), match.group()))
    return found


def names_of(text: str) -> list[Candidate]:
    """The longest names of a text, by their capitals."""
    found: list[Candidate] = []
    for mention in RuleExtractor().extract([text])[0]:
        span = text[mention.start : mention.end]
        words = span.casefold().split()
        if words[0] in GRAMMAR["openers"] | GRAMMAR["calendar"] | GRAMMAR["fillers"]:
            continue
        if all(mention.start >= known.end or mention.end <= known.start for known in found):
            found.append(Candidate(mention.start, mention.end, mention.key, span))
        else:
            inside = [k for k in found if mention.start <= k.start and k.end <= mention.end]
            if inside and len(span) > max(len(k.text) for k in inside):
                found = [k for k in found if k not in inside]
                found.append(Candidate(mention.start, mention.end, mention.key, span))
    return sorted(found)


def quoted_of(text: str) -> list[Candidate]:
    """What stands in quotation marks."""
    found = ((match, match[1] or match[2]) for match in _QUOTED.finditer(text))
    return [Candidate(match.start() + 1, match.end() - 1, entity_key(said) or said, said) for match, said in found]


def titles_of(text: str) -> list[Candidate]:
    """Quoted strings, or names where nothing is quoted."""
    return quoted_of(text) or names_of(text)


FINDERS: Mapping[str, Callable[[str], list[Candidate]]] = {
    "number": numbers_of,
    "duration": durations_of,
    "person": names_of,
    "place": names_of,
    "organisation": names_of,
    "title": titles_of,
}

SOME_DAY = datetime(2000, 6, 15, 12, tzinfo=UTC)  # whether an expression is a date does not depend on the day
_WORD = re.compile(r"\w+")
_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: float(value) for value, word in enumerate(_ONES)}
_VALUES |= {word: 10.0 * value for value, word in enumerate(_TENS, start=2)}
_VALUES |= {"once": 1.0, "twice": 2.0, "a": 1.0, "an": 1.0, "hundred": 100.0, "dozen": 12.0}
_COUNT = rf"(?:\d+(?:,\d{{3}})*(?:\.\d+)?|(?:{'|'.join(_TENS)})(?:-\w+)?|{'|'.join(_ONES)}|hundred|dozen)"
_NUMBER = re.compile(
    rf"(?<![\w.,$-])[$\u20ac\u00a3]?(?:{_COUNT}|once|twice)\b"
    r"(?:\s?%|\s+(?:thousand|million|billion|percent)\b)?(?!-?\w)",
    re.I,
)
_UNITS = "second minute hour day night week weekend month year decade".split()
_UNIT = rf"(?:{'|'.join(_UNITS)})s?"
_ROUGHLY = r"(?:about|around|almost|nearly|over|approximately|at\ least|less\ than|more\ than|under)\s+"
_DURATION = re.compile(
    rf"""\b(?:
      (?:{_ROUGHLY})?
      (?:{_COUNT}(?:\s*(?:-|\u2013|to|or)\s*{_COUNT})?
        |(?:an?|half\ an?|(?:a\s+)?few|(?:a\s+)?couple(?:\s+of)?|several|many)\b)
      (?:\s+and\s+a\s+half)?[\s-]+(?:more\s+|long\s+|whole\s+)?{_UNIT}\b(?:\s+and\s+a\s+half)?(?:\s+(?:ago|old))?
    | since\s+(?:\w+\s+)?(?:19|20)\d\d
    | (?:{_ROUGHLY})?(?:once\ or\ twice|once|twice|(?:{_COUNT}|a\s+few|several|multiple|many)\s+times)
      \s+(?:an?|per|every|each)\s+\w+
    | (?:every|each)\s+(?:single\s+|other\s+)?(?:day|night|week|weekend|month|year|morning|evening)
    )""",
    re.I | re.X,
)
_VAGUE = frozenset(
    "about around almost nearly over approximately at least less than more under long whole to or of and".split()
)
_QUOTED = re.compile('"([^"\n]{2,120})"|\u201c([^\u201d\n]{2,120})\u201d')
_PLAIN = re.compile(r"\d|(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)", re.I)
_AGO = re.compile(r"(.+?)\s+(?:ago|back|earlier)")
_AHEAD = re.compile(r"in\s+(?:about\s+)?(.+)|(.+)\s+from\s+(?:now|today)")
_NEXT_TO = re.compile(r"(?:this\s+)?(last|past|previous|next|coming|this|current)\s+(week|weekend|month|year)")
_BEFORE = re.compile(r"(?:the\s+)?(week|weekend|month)\s+(before|after)")
_SIDES = {"last": "before", "past": "before", "previous": "before", "next": "after", "coming": "after"}


def _value(words: str) -> float | str:
    """What a count stands for, or the words themselves where they are no plain number."""
    bare = words.casefold().strip("$\u20ac\u00a3% ").replace(",", "")
    tens, _, ones = bare.partition("-")
    if tens in _VALUES and (not ones or ones in _VALUES):
        return _VALUES[tens] + _VALUES.get(ones, 0.0)
    try:
        return float(bare)
    except ValueError:
        return bare


def _unit(word: str) -> str:
    return next((unit for unit in _UNITS if word in (unit, unit + "s")), "")


def _date(text: str, mention: DateMention, reference: datetime | None) -> Candidate:
    words, days = text[mention.start : mention.end], (mention.first_day, mention.last_day)
    said = _words_of(days)
    if mention.kind == "relative" and reference is not None:
        said = said or _beside(words.casefold(), reference)
    elif not _PLAIN.match(words):  # "the week before 9 June 2023", "early May 2023": as they are
        said = ""
    return Candidate(mention.start, mention.end, days, said or words)


@lru_cache(maxsize=1 << 12)
def _words_of(days: tuple[int, int]) -> str:
    """A day, a whole month or a whole year in words; "" for other stretches."""
    first, last = date.fromordinal(days[0]), date.fromordinal(days[1])
    if first == last:
        return f"{first.day} {first:%B} {first.year}"
    if first.day != 1 or (last.toordinal() < date.max.toordinal() and date.fromordinal(days[1] + 1).day != 1):
        return ""
    if (first.year, first.month) == (last.year, last.month):
        return f"{first:%B} {first.year}"
    return str(first.year) if (first.month, last.month, last.year) == (1, 12, first.year) else ""


def _beside(words: str, reference: datetime) -> str:
    """A vague stretch as the words it was said in, counted from the day it was said on; "" where they do not fit."""
    day = day_of(reference)
    if match := _AGO.fullmatch(words):
        return f"{match[1]} before {day}"
    if match := _AHEAD.fullmatch(words):
        return f"{match[1] or match[2]} after {day}"
    if match := _NEXT_TO.fullmatch(words):
        return f"the {match[2]} {_SIDES.get(match[1], 'of')} {day}"
    if match := _BEFORE.fullmatch(words):
        return f"the {match[1]} {match[2]} {day}"
    return ""
