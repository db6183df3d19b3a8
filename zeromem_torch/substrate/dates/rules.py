"""English expressions of time, each a pattern and the days it stands for; tried where a word or a number begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from zeromem_torch.substrate.dates.days import (
    MONTHS,
    SEASONS,
    WEEKDAYS,
    Days,
    Yearless,
    away,
    month_days,
    months_from,
    period,
    shifted,
    years,
)

WORDLIKE_MONTHS = {"may", "march", "mar", "jan", "april", "june", "august", "dec", "sep"}  # verbs, names, fragments
_NEAR_DAYS = {  # days from the reference
    "today": (0, 0),
    "tonight": (0, 0),
    "yesterday": (-1, -1),
    "tomorrow": (1, 1),
    "last night": (-1, -1),
    "this morning": (0, 0),
    "this afternoon": (0, 0),
    "this evening": (0, 0),
    "day before yesterday": (-2, -2),
    "day after tomorrow": (2, 2),
    "other day": (-7, -1),
}
_EXACT_COUNTS = "one a an, two couple, three, four, five, six, seven, eight, nine, ten, eleven, twelve"
_COUNTS = {word: (n, n) for n, words in enumerate(_EXACT_COUNTS.split(","), start=1) for word in words.split()}
_COUNTS |= {"twenty": (20, 20), "few": (2, 5), "several": (3, 8)}  # (least, most)
_COUNTABLES = ("people", "dollars", "euros", "pounds", "km", "miles", "metres", "meters", "feet", "calories", "steps")


def any_of(words: Iterable[str]) -> str:
    """A pattern of these words, the longest first."""
    return "|".join(sorted(words, key=len, reverse=True))


_MONTH = rf"(?P<month>{any_of(MONTHS)})\b\.?"
_YEAR = r"(?P<year>[12]\d{3})(?![\d%]|[.,]\d)"
_MAYBE_YEAR = rf"(?:(?:,\s*|\s+)(?:of\s+|in\s+)?{_YEAR})?"
_NO_YEAR_AFTER = ("$", "#", "\u00a3", "\u20ac", ".", "/", ":")
_YEAR_CUE = re.compile(
    r"(?:\b(?:in|since|year|by|from|until|till|of|before|after|circa|ca\.?|about|around|during|early|late|mid|born|died"
    r"|between|and|to)\s+|[(\u2013\u2014-]\s?)$"
)
_PART_OF_NUMBER = re.compile(r"\d-$(?<!\b[12]\d{3}-)")  # 555-2023, but not 1986-2023
_YEARS = re.compile(r"\s?[-\u2013\u2014]\s?[12]\d{3}\b")
_MONTH_CUE = re.compile(
    r"\b(?:in|since|by|from|until|till|during|between|early|late|mid|of|before|after|around|every|each|on"
    rf"|(?:{any_of(MONTHS)})\s*(?:to|and|or|through|-|,))[\s-]+$"
)
_DAY = r"(?P<day>[0-3]?\d)(?:st|nd|rd|th)?(?![\d:/]|\s*[ap]\.?m\b)"
_RANGE = r"\s*(?:-|\u2013|to|and|&)\s*(?P<day2>[0-3]?\d)(?:st|nd|rd|th)?(?![\d:/]|\s*[ap]\.?m\b)"
COUNT = rf"(?P<count>\d{{1,4}}|(?:a\s+)?(?:couple(?:\s+of)?|few)|{any_of(_COUNTS)})"
_UNIT = r"(?P<unit>minute|hour|day|week|weekend|month|year|decade)s?\b"
_NAMED = any_of([*MONTHS, *WEEKDAYS, *SEASONS, "week", "weekend", "month", "year", "decade"])

Resolver = Callable[[re.Match[str], int], Days | Yearless | None]


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    resolve: Resolver
    relative: bool = False  # needs the reference


def _year_of(match: re.Match[str]) -> int | None:
    year = match.groupdict().get("year")
    return int(year) if year else None


def _iso_day(match: re.Match[str], _: int) -> Days | None:
    return month_days(int(match["year"]), int(match["month"]), int(match["day"]), int(match["day"]))


def _iso_month(match: re.Match[str], _: int) -> Days | None:
    """2023-05 is a month; 2022-23, 2022/23 and 2005\u201308 are years."""
    year, second, dash = int(match["year"]), match["second"], match["dash"]
    last = int(match["year"][: 4 - len(second)] + second)
    if dash == "-" and len(second) == 2 and 1 <= int(second) <= 12 and last != year + 1:
        return month_days(year, int(second))
    return years(year, last)


def _numeric(match: re.Match[str], _: int) -> Days | None:
    first, second, year = int(match["first"]), int(match["second"]), int(match["year"])
    if len(match["year"]) == 2:
        year += 2000 if year < 70 else 1900
    month, day = (second, first) if first > 12 or match["dash"] == "." else (first, second)
    return month_days(year, month, day, day)


def _named_days(match: re.Match[str], _: int) -> Days | Yearless | None:
    month, first = MONTHS[match["month"]], int(match["day"])
    last = int(match.groupdict().get("day2") or first)
    year = _year_of(match)
    if year is None:
        return Yearless(month, first, month, last) if month_days(2000, month, first, last) else None
    return month_days(year, month, first, last)


def _named_month(match: re.Match[str], _: int) -> Days | None:
    year = _year_of(match)
    if year is None:
        year = int(match["short"]) + (2000 if int(match["short"]) < 70 else 1900)
    return month_days(year, MONTHS[match["month"]])


def _season(match: re.Match[str], _: int) -> Days | None:
    return months_from(int(match["year"]), SEASONS[match["season"]], 3)


def _decade(match: re.Match[str], _: int) -> Days | None:
    first = int(match["decade"]) if len(match["decade"]) == 4 else 1900 + int(match["decade"])
    return years(first, first + 9)


def _century(match: re.Match[str], _: int) -> Days | None:
    return years(int(match["century"]) * 100 - 99, int(match["century"]) * 100)


def _bare_year(match: re.Match[str], _: int) -> Days | None:
    """Any number from 1900 to 2099 that counts nothing; an older year only where the words around it say so."""
    year, before = int(match["year"]), match.string[max(0, match.start() - 16) : match.start()]
    if (
        before[-1:] in _NO_YEAR_AFTER
        or _PART_OF_NUMBER.search(before)
        or not (1900 <= year <= 2099 or _YEAR_CUE.search(before) or _YEARS.match(match.string, match.end()))
    ):
        return None
    return years(year, year)


def _bare_month(match: re.Match[str], _: int) -> Yearless | None:
    before = match.string[max(0, match.start() - 24) : match.start()]
    if match["month"] in WORDLIKE_MONTHS and not _MONTH_CUE.search(before):
        return None
    return Yearless(MONTHS[match["month"]], 1, MONTHS[match["month"]], 0)


def _near_day(match: re.Match[str], today: int) -> Days:
    first, last = _NEAR_DAYS[" ".join(match.group().split())]
    return today + first, today + last


def count_of(match: re.Match[str]) -> tuple[int, int]:
    """The least and the most that the words of `COUNT` stand for."""
    words = match["count"].split()
    number = words[1] if len(words) > 1 and words[0] == "a" else words[0]
    return (int(number), int(number)) if number.isdigit() else _COUNTS[number]


def _counted(match: re.Match[str], today: int) -> Days | None:
    """`count` units before or after a day: exact for days, and as vague as the unit for others."""
    low, high = count_of(match)
    side = 1 if match.groupdict().get("ahead") else -1
    near, far = away(today, match["unit"], side * low), away(today, match["unit"], side * high)
    return (min(near[0], far[0]), max(near[1], far[1])) if near and far else None


def _stretch(match: re.Match[str], today: int) -> Days | None:
    """The last two weeks, the next few months, the past year: between the reference and there."""
    side = 1 if match.groupdict().get("ahead") else -1
    count = side * (count_of(match)[1] if match.groupdict().get("count") else 1)
    unit = match["unit"]
    if unit in ("month", "year", "decade"):
        there = shifted(today, count * {"month": 1, "year": 12, "decade": 120}[unit])
    else:
        there = today + count * (7 if unit in ("week", "weekend") else 1 if unit == "day" else 0)
    return (min(today, there), max(today, there)) if there else None


def _which(match: re.Match[str], today: int) -> Days | None:
    """Last, this or next week, weekend, month, year, Friday, May, summer."""
    word = match["which"].split()[-1]
    step = 1 if word in ("next", "coming", "upcoming") else 0 if word in ("this", "current") else -1
    return period(today, match["what"], step)


def _before_this(match: re.Match[str], today: int) -> Days | None:
    step = -1 if match["side"] == "before" else 1
    if match["what"] in ("day", "night"):
        return today + step, today + step
    return period(today, match["what"], step)


def _rule(pattern: str, resolve: Resolver, relative: bool = False) -> Rule:
    return Rule(re.compile(pattern), resolve, relative)


_COUNTED = [
    _rule(rf"{COUNT}\s+{_UNIT}\s+(?:ago|back|earlier)\b", _counted, True),
    _rule(rf"{COUNT}\s+{_UNIT}\s+(?P<ahead>from\s+(?:now|today))\b", _counted, True),
]
_AT_NUMBER = [
    _rule(r"(?P<year>[12]\d{3})([-/.])(?P<month>\d{1,2})\2(?P<day>\d{1,2})(?!\d)", _iso_day),
    _rule(r"(?P<year>[12]\d{3})(?P<dash>[-/\u2013])(?P<second>\d{2})(?![\d/-])", _iso_month),
    _rule(r"(?P<first>\d{1,2})(?P<dash>[-/.])(?P<second>\d{1,2})(?P=dash)(?P<year>[12]\d{3}|\d{2})(?!\d)", _numeric),
    _rule(rf"{_DAY}{_RANGE}\s+(?:of\s+)?{_MONTH}{_MAYBE_YEAR}", _named_days),
    _rule(rf"{_DAY}\s+(?:of\s+)?{_MONTH}{_MAYBE_YEAR}", _named_days),
    _rule(r"(?P<decade>[12]\d{2}0)'?s\b", _decade),
    _rule(r"(?<=the )(?P<decade>[2-9]0)'?s\b", _decade),
    _rule(r"(?<=')(?P<decade>[2-9]0)s\b", _decade),
    _rule(r"(?P<century>\d{1,2})(?:st|nd|rd|th)[\s-]+century\b", _century),
    *_COUNTED,
    _rule(rf"(?P<year>[12]\d{{3}})(?![\w%:/]|[.,]\d|-\d{{1,3}}\b|\s+(?:{any_of(_COUNTABLES)})\b)", _bare_year),
]
_AT_MONTH = [
    _rule(rf"{_MONTH}\s+{_DAY}{_RANGE}{_MAYBE_YEAR}", _named_days),
    _rule(rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_MAYBE_YEAR}", _named_days),
    _rule(rf"{_MONTH},?\s+(?:of\s+)?(?:{_YEAR}|'(?P<short>\d\d)\b)", _named_month),
    _rule(_MONTH, _bare_month),
]
_AT_SEASON = [_rule(rf"(?P<season>{any_of(SEASONS)})(?:,\s*|\s+(?:of\s+|in\s+)?){_YEAR}", _season)]
_NEAR = _rule(rf"(?:{any_of(_NEAR_DAYS).replace(' ', chr(92) + 's+')})\b", _near_day, True)
_BEFORE_THIS = _rule(
    r"(?P<what>day|night|week|weekend|month|year)\s+(?P<side>before|after)(?=\s*(?:[.,;!?)]|$))", _before_this, True
)
_AT_STEP = [
    _NEAR,
    _rule(rf"(?:this\s+)?(?:last|past|(?P<ahead>next|coming))\s+{COUNT}\s+{_UNIT}", _stretch, True),
    _rule(r"(?:this\s+)?past\s+(?P<unit>week|month|year|decade)\b", _stretch, True),
    _rule(
        rf"(?P<which>(?:this\s+)?(?:last|past|coming|upcoming)|this|current|next)\s+(?P<what>{_NAMED})\b(?!\s+of\b)",
        _which,
        True,
    ),
]
_AHEAD = _rule(rf"(?P<ahead>in)\s+(?:about\s+)?{COUNT}\s+{_UNIT}(?!\s+of\b)", _counted, True)
_TRIGGERS: dict[str, Sequence[Rule]] = {
    **dict.fromkeys(MONTHS, _AT_MONTH),
    **dict.fromkeys(SEASONS, _AT_SEASON),
    **dict.fromkeys(_COUNTS, _COUNTED),
    **dict.fromkeys(("today", "tonight", "yesterday", "tomorrow", "other"), (_NEAR,)),
    **dict.fromkeys(("last", "past", "this", "current", "next", "coming", "upcoming"), _AT_STEP),
    **dict.fromkeys(("day", "night", "week", "weekend", "month", "year"), (_NEAR, _BEFORE_THIS)),
    "in": [_AHEAD],
}


def rules_at(word: str) -> Sequence[Rule]:
    """What to try, in order, where this word of a text begins; the first that holds takes its characters."""
    return _AT_NUMBER if word[0].isdigit() else _TRIGGERS.get(word, ())
