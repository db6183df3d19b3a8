"""Dates in words: what a text or a query says about time, as intervals of days (temporal cues, paper Eq. 6).

Days are proleptic ordinals (`date.toordinal`), so that matching two mentions is comparing numbers.
Relative expressions count calendar days from the reference's own date in its own zone: no clock
arithmetic, so a change to summer time moves nothing.

The readings are English and ours: weeks run from Monday to Sunday; a season is its three calendar
months in the north, and a winter belongs to the year it begins in; 05/07/2023 is month first as in
the United States (day first when the first number is above 12, or with dots: 05.07.2023); a month or
a day without its year is the one nearest to the reference, and nothing without a reference.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal, NamedTuple

__all__ = ["DateMention", "find_dates"]


@dataclass(frozen=True, slots=True)
class DateMention:
    """Characters [start, end) of a text stand for the days first_day to last_day, both included."""

    start: int
    end: int
    first_day: int
    last_day: int
    kind: Literal["explicit", "relative"]


def find_dates(text: str, reference: datetime | None = None) -> list[DateMention]:
    """Dates, intervals, seasons and relative expressions of a text, in order and apart.

    Relative ones are left out when there is no reference to count from.
    """
    folded = _lower(text)
    today = reference.date().toordinal() if reference is not None else None
    mentions: list[DateMention] = []
    free = 0  # where the last mention ended
    for raw in _joined(folded, _raw_mentions(text, folded, today)):
        start = raw.start
        days = _nearest_year(raw.days, today) if isinstance(raw.days, _Yearless) else raw.days
        if days is not None and not raw.relative:
            start, days = _refined(folded, free, start, days)
        if days is not None and 1 <= days[0] <= days[1] <= _LAST_DAY:
            kind: Literal["explicit", "relative"] = "relative" if raw.relative else "explicit"
            mentions.append(DateMention(start, raw.end, days[0], days[1], kind))
            free = raw.end
    return mentions


Days = tuple[int, int]
_LAST_DAY = date.max.toordinal()

_MONTHS = dict(january=1, february=2, march=3, april=4, may=5, june=6, july=7, august=8, september=9, october=10)
_MONTHS |= dict(november=11, december=12, sept=9) | {name[:3]: number for name, number in _MONTHS.items()}
_MONTHS |= dict(nov=11, dec=12)
_WORDLIKE_MONTHS = {"may", "march", "mar", "jan", "april", "june", "august", "dec", "sep"}  # verbs, names, fragments
_WEEKDAYS = dict(monday=0, tuesday=1, wednesday=2, thursday=3, friday=4, saturday=5, sunday=6)
_SEASONS = {"spring": 3, "summer": 6, "autumn": 9, "fall": 9, "winter": 12}  # first month
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
_NUMBERS = dict(one=1, two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, eleven=11, twelve=12)
_COUNTS = {word: (number, number) for word, number in (_NUMBERS | dict(a=1, an=1, couple=2, twenty=20)).items()}
_COUNTS |= {"few": (2, 5), "several": (3, 8)}
_COUNTABLES = ("people", "dollars", "euros", "pounds", "km", "miles", "metres", "meters", "feet", "calories", "steps")


def _any(words: Iterable[str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


_MONTH = rf"(?P<month>{_any(_MONTHS)})\b\.?"
_YEAR = r"(?P<year>[12]\d{3})(?![\d%]|[.,]\d)"
_MAYBE_YEAR = rf"(?:(?:,\s*|\s+)(?:of\s+|in\s+)?{_YEAR})?"
_NO_YEAR_AFTER = ("$", "#", "\u00a3", "\u20ac", ".", "/", ":")
_YEAR_CUE = re.compile(
    r"(?:\b(?:in|since|year|by|from|until|till|of|before|after|circa|ca\.?|about|around|during|early|late|mid|born|died"
    r"|between|and|to)\s+|[(\u2013\u2014-]\s?)$"
)
_YEARS = re.compile(r"\s?[-\u2013\u2014]\s?[12]\d{3}\b")
_MONTH_CUE = re.compile(
    r"\b(?:in|since|by|from|until|till|during|between|early|late|mid|of|before|after|around|every|each|on"
    rf"|(?:{_any(_MONTHS)})\s*(?:to|and|or|through|-|,))[\s-]+$"
)
_DAY = r"(?P<day>[0-3]?\d)(?:st|nd|rd|th)?(?![\d:/]|\s*[ap]\.?m\b)"
_RANGE = r"\s*(?:-|\u2013|to|and|&)\s*(?P<day2>[0-3]?\d)(?:st|nd|rd|th)?(?![\d:/]|\s*[ap]\.?m\b)"
_COUNT = rf"(?P<count>\d{{1,4}}|(?:a\s+)?(?:couple(?:\s+of)?|few)|{_any(_COUNTS)})"
_UNIT = r"(?P<unit>minute|hour|day|week|weekend|month|year|decade)s?\b"
_NAMED = _any([*_MONTHS, *_WEEKDAYS, *_SEASONS, "week", "weekend", "month", "year", "decade"])


class _Yearless(NamedTuple):
    """Days whose year is still to be found; a last day of 0 is the end of its month."""

    month: int
    first: int
    last_month: int
    last: int


class _Raw(NamedTuple):
    start: int
    end: int
    days: Days | _Yearless
    relative: bool


Resolver = Callable[[re.Match[str], int], "Days | _Yearless | None"]


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    resolve: Resolver
    relative: bool = False  # needs the reference


def _month_days(year: int, month: int, first: int = 1, last: int = 0) -> Days | None:
    """Days of a month, all by default; None when there is no such day."""
    if not 1 <= month <= 12 or not 1 <= year <= 9999:
        return None
    length = monthrange(year, month)[1]
    last = last or length
    if not 1 <= first <= last <= length:
        return None
    return date(year, month, first).toordinal(), date(year, month, last).toordinal()


def _years(first: int, last: int) -> Days | None:
    if not 1 <= first <= last <= 9999:
        return None
    return date(first, 1, 1).toordinal(), date(last, 12, 31).toordinal()


def _months_from(year: int, month: int, count: int) -> Days | None:
    """`count` calendar months from the given one; `month` may lie outside 1..12."""
    begin, end = year * 12 + month - 1, year * 12 + month - 1 + count - 1
    if not 12 <= begin <= end < 120_000:
        return None
    first, last = _month_days(begin // 12, begin % 12 + 1), _month_days(end // 12, end % 12 + 1)
    return (first[0], last[1]) if first and last else None


def _shifted(day: int, months: int) -> int | None:
    """The same day of the month some months away, or the last day of a shorter month."""
    when = date.fromordinal(day)
    index = when.year * 12 + when.month - 1 + months
    if not 12 <= index < 120_000:
        return None
    year, month = index // 12, index % 12 + 1
    return date(year, month, min(when.day, monthrange(year, month)[1])).toordinal()


def _year_of(match: re.Match[str]) -> int | None:
    year = match.groupdict().get("year")
    return int(year) if year else None


def _iso_day(match: re.Match[str], _: int) -> Days | None:
    return _month_days(int(match["year"]), int(match["month"]), int(match["day"]), int(match["day"]))


def _iso_month(match: re.Match[str], _: int) -> Days | None:
    """2023-05 is a month; 2022-23, 2022/23 and 2005\u20138 are years."""
    year, second, dash = int(match["year"]), match["second"], match["dash"]
    last = int(match["year"][: 4 - len(second)] + second)
    if dash == "-" and len(second) == 2 and 1 <= int(second) <= 12 and last != year + 1:
        return _month_days(year, int(second))
    return _years(year, last)


def _numeric(match: re.Match[str], _: int) -> Days | None:
    first, second, year = int(match["first"]), int(match["second"]), int(match["year"])
    if len(match["year"]) == 2:
        year += 2000 if year < 70 else 1900
    month, day = (second, first) if first > 12 or match["dash"] == "." else (first, second)
    return _month_days(year, month, day, day)


def _named_days(match: re.Match[str], _: int) -> Days | _Yearless | None:
    month, first = _MONTHS[match["month"]], int(match["day"])
    last = int(match.groupdict().get("day2") or first)
    year = _year_of(match)
    if year is None:
        return _Yearless(month, first, month, last) if _month_days(2000, month, first, last) else None
    return _month_days(year, month, first, last)


def _named_month(match: re.Match[str], _: int) -> Days | None:
    year = _year_of(match)
    if year is None:
        year = int(match["short"]) + (2000 if int(match["short"]) < 70 else 1900)
    return _month_days(year, _MONTHS[match["month"]])


def _season(match: re.Match[str], _: int) -> Days | None:
    return _months_from(int(match["year"]), _SEASONS[match["season"]], 3)


def _decade(match: re.Match[str], _: int) -> Days | None:
    first = int(match["decade"]) if len(match["decade"]) == 4 else 1900 + int(match["decade"])
    return _years(first, first + 9)


def _century(match: re.Match[str], _: int) -> Days | None:
    return _years(int(match["century"]) * 100 - 99, int(match["century"]) * 100)


def _bare_year(match: re.Match[str], _: int) -> Days | None:
    """Any number from 1900 to 2099 that counts nothing; an older year only where the words around it say so."""
    year, before = int(match["year"]), match.string[max(0, match.start() - 16) : match.start()]
    if before[-1:] in _NO_YEAR_AFTER or not (
        1900 <= year <= 2099 or _YEAR_CUE.search(before) or _YEARS.match(match.string, match.end())
    ):
        return None
    return _years(year, year)


def _of_year(days: _Yearless, year: int) -> Days | None:
    first = _month_days(year, days.month, days.first, days.first)
    last = _month_days(year, days.last_month, days.last or 1, days.last)
    return (first[0], last[1]) if first and last else None


def _nearest_year(days: _Yearless, today: int | None) -> Days | None:
    if today is None:
        return None
    year = date.fromordinal(today).year
    spans = [span for step in range(-4, 5) if (span := _of_year(days, year + step))]
    return min(spans, key=lambda span: _distance(span, today), default=None)


def _distance(span: Days, day: int) -> int:
    return max(span[0] - day, day - span[1], 0)


def _bare_month(match: re.Match[str], _: int) -> _Yearless | None:
    before = match.string[max(0, match.start() - 24) : match.start()]
    if match["month"] in _WORDLIKE_MONTHS and not _MONTH_CUE.search(before):
        return None
    return _Yearless(_MONTHS[match["month"]], 1, _MONTHS[match["month"]], 0)


def _near_day(match: re.Match[str], today: int) -> Days:
    first, last = _NEAR_DAYS[" ".join(match.group().split())]
    return today + first, today + last


def _count(match: re.Match[str]) -> tuple[int, int]:
    words = match["count"].split()
    number = words[1] if len(words) > 1 and words[0] == "a" else words[0]
    return (int(number), int(number)) if number.isdigit() else _COUNTS[number]


def _counted(match: re.Match[str], today: int) -> Days | None:
    """`count` units before or after a day: exact for days, and as vague as the unit for others."""
    low, high = _count(match)
    side = 1 if match.groupdict().get("ahead") else -1
    near, far = _away(today, match["unit"], side * low), _away(today, match["unit"], side * high)
    return (min(near[0], far[0]), max(near[1], far[1])) if near and far else None


def _away(today: int, unit: str, count: int) -> Days | None:
    if unit in ("minute", "hour"):
        return today, today
    if unit == "day":
        return today + count, today + count
    if unit == "week":
        return today + 7 * count - 3, today + 7 * count + 3
    if unit == "weekend":
        saturday = _weekday_near(today, 5, before=count < 0) + 7 * (count + (1 if count < 0 else -1))
        return saturday, saturday + 1
    if unit == "month":
        middle = _shifted(today, count)
        return (middle - 15, middle + 15) if middle else None
    year = date.fromordinal(today).year + count * (10 if unit == "decade" else 1)
    return _years(year, year) if unit == "year" else _years(year - 3, year + 3)


def _weekday_near(day: int, weekday: int, *, before: bool) -> int:
    """The last such weekday strictly before a day, or the first strictly after it."""
    now = (day - 1) % 7  # ordinal 1 is a Monday
    return day - ((now - weekday - 1) % 7 + 1) if before else day + ((weekday - now - 1) % 7 + 1)


def _stretch(match: re.Match[str], today: int) -> Days | None:
    """The last two weeks, the next few months, the past year: between the reference and there."""
    side = 1 if match.groupdict().get("ahead") else -1
    count = side * (_count(match)[1] if match.groupdict().get("count") else 1)
    unit = match["unit"]
    if unit in ("month", "year", "decade"):
        there = _shifted(today, count * {"month": 1, "year": 12, "decade": 120}[unit])
    else:
        there = today + count * (7 if unit in ("week", "weekend") else 1 if unit == "day" else 0)
    return (min(today, there), max(today, there)) if there else None


def _which(match: re.Match[str], today: int) -> Days | None:
    """Last, this or next week, weekend, month, year, Friday, May, summer."""
    word = match["which"].split()[-1]
    step = 1 if word in ("next", "coming", "upcoming") else 0 if word in ("this", "current") else -1
    return _period(today, match["what"], step)


def _period(today: int, what: str, step: int) -> Days | None:
    now, monday = date.fromordinal(today), today - (today - 1) % 7
    if what == "week":
        return monday + 7 * step, monday + 7 * step + 6
    if what == "weekend":
        saturday = monday + 5 + 7 * step
        return saturday, saturday + 1
    if what == "month":
        return _months_from(now.year, now.month + step, 1)
    if what == "year":
        return _years(now.year + step, now.year + step)
    if what == "decade":
        first = now.year // 10 * 10 + 10 * step
        return _years(first, first + 9)
    if what in _WEEKDAYS:
        day = monday + _WEEKDAYS[what] if step == 0 else _weekday_near(today, _WEEKDAYS[what], before=step < 0)
        return day, day
    first, count = (_SEASONS[what], 3) if what in _SEASONS else (_MONTHS[what], 1)
    spans = [span for year in (-2, -1, 0, 1, 2) if (span := _months_from(now.year + year, first, count))]
    if step < 0:
        return next((s for s in reversed(spans) if s[1] < today), None)
    if step > 0:
        return next((s for s in spans if s[0] > today), None)
    return min(spans, key=lambda s: _distance(s, today))


def _before_this(match: re.Match[str], today: int) -> Days | None:
    step = -1 if match["side"] == "before" else 1
    if match["what"] in ("day", "night"):
        return today + step, today + step
    return _period(today, match["what"], step)


def _rule(pattern: str, resolve: Resolver, relative: bool = False) -> _Rule:
    return _Rule(re.compile(pattern), resolve, relative)


# The rules to try, in order, where a word or a number begins; the first that holds takes its characters.
_COUNTED = [
    _rule(rf"{_COUNT}\s+{_UNIT}\s+(?:ago|back|earlier)\b", _counted, True),
    _rule(rf"{_COUNT}\s+{_UNIT}\s+(?P<ahead>from\s+(?:now|today))\b", _counted, True),
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
    _rule(rf"(?P<year>[12]\d{{3}})(?![\w%:/]|[.,]\d|\s+(?:{_any(_COUNTABLES)})\b)", _bare_year),
]
_AT_MONTH = [
    _rule(rf"{_MONTH}\s+{_DAY}{_RANGE}{_MAYBE_YEAR}", _named_days),
    _rule(rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_MAYBE_YEAR}", _named_days),
    _rule(rf"{_MONTH},?\s+(?:of\s+)?(?:{_YEAR}|'(?P<short>\d\d)\b)", _named_month),
    _rule(_MONTH, _bare_month),
]
_AT_SEASON = [_rule(rf"(?P<season>{_any(_SEASONS)})(?:,\s*|\s+(?:of\s+|in\s+)?){_YEAR}", _season)]
_NEAR = _rule(rf"(?:{_any(_NEAR_DAYS).replace(' ', chr(92) + 's+')})\b", _near_day, True)
_BEFORE_THIS = _rule(
    r"(?P<what>day|night|week|weekend|month|year)\s+(?P<side>before|after)(?=\s*(?:[.,;!?)]|$))", _before_this, True
)
_AT_STEP = [
    _NEAR,
    _rule(rf"(?:this\s+)?(?:last|past|(?P<ahead>next|coming))\s+{_COUNT}\s+{_UNIT}", _stretch, True),
    _rule(r"(?:this\s+)?past\s+(?P<unit>week|month|year|decade)\b", _stretch, True),
    _rule(
        rf"(?P<which>(?:this\s+)?(?:last|past|coming|upcoming)|this|current|next)\s+(?P<what>{_NAMED})\b(?!\s+of\b)",
        _which,
        True,
    ),
]
_AHEAD = _rule(rf"(?P<ahead>in)\s+(?:about\s+)?{_COUNT}\s+{_UNIT}(?!\s+of\b)", _counted, True)
_TRIGGERS: dict[str, Sequence[_Rule]] = {
    **dict.fromkeys(_MONTHS, _AT_MONTH),
    **dict.fromkeys(_SEASONS, _AT_SEASON),
    **dict.fromkeys(_COUNTS, _COUNTED),
    **dict.fromkeys(("today", "tonight", "yesterday", "tomorrow", "other"), (_NEAR,)),
    **dict.fromkeys(("last", "past", "this", "current", "next", "coming", "upcoming"), _AT_STEP),
    **dict.fromkeys(("day", "night", "week", "weekend", "month", "year"), (_NEAR, _BEFORE_THIS)),
    "in": [_AHEAD],
}
_WORD = re.compile(r"(?<!\w)(?:[a-z]+|\d+)")


def _raw_mentions(text: str, folded: str, today: int | None) -> Iterator[_Raw]:
    free = 0
    for word in _WORD.finditer(folded):
        start = word.start()
        if start < free:
            continue
        said = word.group()
        for rule in _AT_NUMBER if said[0].isdigit() else _TRIGGERS.get(said, ()):
            if rule.relative and today is None:
                continue
            match = rule.pattern.match(folded, start)
            if match is None or not _names_month(text, match):
                continue
            if (days := rule.resolve(match, today or 0)) is not None:
                yield _Raw(start, match.end(), days, rule.relative)
                free = match.end()
                break


def _names_month(text: str, match: re.Match[str]) -> bool:
    """Whether a word like "may" or "march" is the month: written large, or with its year, or after "in"."""
    groups = match.groupdict()
    name = "month" if groups.get("month") in _WORDLIKE_MONTHS else "what"
    if groups.get(name) not in _WORDLIKE_MONTHS:
        return True
    at = match.start(name)
    return text[at].isupper() or bool(groups.get("year")) or match.string[max(0, at - 3) : at] == "in "


_TO = re.compile(r"\s*(?:-|\u2013|\u2014|to|through|thru|until|till)\s*(?:the\s+)?")
_AND = re.compile(r"\s+and\s+(?:the\s+)?")
_BETWEEN = re.compile(r"\bbetween\s+(?:the\s+)?$")


def _joined(folded: str, raws: Iterator[_Raw]) -> Iterator[_Raw]:
    """Two explicit mentions with a dash, "to" or "between ... and" are one interval, and may share the second's year."""
    last: _Raw | None = None
    for raw in raws:
        if last is not None and (both := _interval(folded, last, raw)):
            last = both
            continue
        if last is not None:
            yield last
        last = raw
    if last is not None:
        yield last


def _interval(folded: str, a: _Raw, b: _Raw) -> _Raw | None:
    if a.relative or b.relative or b.start - a.end > 16:
        return None
    gap = folded[a.end : b.start]
    if not _TO.fullmatch(gap) and not (_AND.fullmatch(gap) and _BETWEEN.search(folded[max(0, a.start - 12) : a.start])):
        return None
    if isinstance(b.days, _Yearless):
        if not isinstance(a.days, _Yearless) or b.days.month < a.days.month:
            return None
        return _Raw(a.start, b.end, _Yearless(a.days.month, a.days.first, b.days.last_month, b.days.last), False)
    first: Days | None
    if isinstance(a.days, _Yearless):
        year = date.fromordinal(b.days[0]).year
        spans = (_of_year(a.days, year), _of_year(a.days, year - 1))
        first = next((span for span in spans if span and span[0] <= b.days[0]), None)
    else:
        first = a.days
    if first is None or first[0] > b.days[1]:
        return None
    return _Raw(a.start, b.end, (first[0], b.days[1]), False)


_PART = re.compile(
    r"\b(?P<part>early|late|mid|middle|beginning|start|end)(?:\s+(?:of|in))?(?:\s+the)?(?:\s+month\s+of)?[\s-]+$"
)
_ANCHORED = re.compile(
    rf"\b(?:{_COUNT}\s+(?P<unit>day|week|weekend|month|year)s?|(?P<what>day|night|week|weekend|month|year|{_any(_WEEKDAYS)}))"
    r"\s+(?P<side>before|after|of|following|prior\s+to)\s+(?:the\s+)?$"
)


def _refined(folded: str, free: int, start: int, days: Days) -> tuple[int, Days | None]:
    """Days narrowed or moved by the words before them: "late", "the end of", "the week before", "two days after"."""
    at = max(free, start - 40)
    before = folded[at:start]
    if match := _PART.search(before):
        third = (days[1] - days[0] + 1) // 3
        if third:
            part = match["part"]
            low = 0 if part in ("early", "beginning", "start") else 1 if part in ("mid", "middle") else 2
            first = days[0] + low * third
            return at + match.start(), (first, days[1] if low == 2 else first + third)
    elif match := _ANCHORED.search(before):
        side = -1 if match["side"].startswith(("before", "prior")) else 0 if match["side"] == "of" else 1
        if moved := _beside(days, match, side):
            return at + match.start(), moved
    return start, days


def _beside(days: Days, match: re.Match[str], side: int) -> Days | None:
    anchor, what = days[1] if side > 0 else days[0], match["what"]
    if match["count"]:
        low, high = _count(match)
        near, far = _away(anchor, match["unit"], side * low), _away(anchor, match["unit"], side * high)
        return (min(near[0], far[0]), max(near[1], far[1])) if side and near and far else None
    if what in ("day", "night"):
        return (anchor + side, anchor + side) if side else None
    if what == "week" and side:
        return (anchor - 7, anchor - 1) if side < 0 else (anchor + 1, anchor + 7)
    if what == "weekend" and side:
        saturday = _weekday_near(anchor, 5, before=side < 0)
        return saturday, saturday + 1
    if not side and (what in ("month", "year") or days[0] < days[1]):
        return days  # "the month of May 2023", "the last week of May"
    return _period(anchor, what, side)


def _lower(text: str) -> str:
    """Lower case, character by character where some letter would grow (offsets must hold)."""
    folded = text.lower()
    return folded if len(folded) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
