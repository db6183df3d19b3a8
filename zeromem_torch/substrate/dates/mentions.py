"""Dates in a text: expressions found one by one, joined to intervals, and narrowed by the words before them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal, NamedTuple

from zeromem_torch.substrate.dates.days import (
    LAST_DAY,
    WEEKDAYS,
    Days,
    Yearless,
    away,
    nearest_year,
    nth_part,
    of_year,
    period,
    weekday_near,
)
from zeromem_torch.substrate.dates.rules import COUNT, WORDLIKE_MONTHS, any_of, count_of, rules_at


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
        days = nearest_year(raw.days, today) if isinstance(raw.days, Yearless) else raw.days
        if days is not None and not raw.relative:
            start, days = _refined(folded, free, start, days)
        if days is not None and 1 <= days[0] <= days[1] <= LAST_DAY:
            kind: Literal["explicit", "relative"] = "relative" if raw.relative else "explicit"
            mentions.append(DateMention(start, raw.end, days[0], days[1], kind))
            free = raw.end
    return mentions


class _Raw(NamedTuple):
    start: int
    end: int
    days: Days | Yearless
    relative: bool


_WORD = re.compile(r"(?<!\w)(?:[a-z]+|\d+)")


def _raw_mentions(text: str, folded: str, today: int | None) -> Iterator[_Raw]:
    free = 0
    for word in _WORD.finditer(folded):
        start = word.start()
        if start < free:
            continue
        for rule in rules_at(word.group()):
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
    name = "month" if groups.get("month") in WORDLIKE_MONTHS else "what"
    if groups.get(name) not in WORDLIKE_MONTHS:
        return True
    at = match.start(name)
    return text[at].isupper() or bool(groups.get("year")) or match.string[max(0, at - 3) : at] == "in "


_TO = re.compile(r"\s*(?:-|\u2013|\u2014|to|through|thru|until|till)\s*(?:the\s+)?")
_AND = re.compile(r"\s+and\s+(?:the\s+)?")
_BETWEEN = re.compile(r"\bbetween\s+(?:the\s+)?$")


def _joined(folded: str, raws: Iterator[_Raw]) -> Iterator[_Raw]:
    """Explicit mentions with a dash, "to" or "between ... and" are one interval; the second's year may serve both."""
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
    if isinstance(b.days, Yearless):
        if not isinstance(a.days, Yearless) or b.days.month < a.days.month:
            return None
        return _Raw(a.start, b.end, Yearless(a.days.month, a.days.first, b.days.last_month, b.days.last), False)
    first: Days | None
    if isinstance(a.days, Yearless):
        year = date.fromordinal(b.days[0]).year
        spans = (of_year(a.days, year), of_year(a.days, year - 1))
        first = next((span for span in spans if span and span[0] <= b.days[0]), None)
    else:
        first = a.days
    if first is None or first[0] > b.days[1]:
        return None
    return _Raw(a.start, b.end, (first[0], b.days[1]), False)


_ORDINALS = {"first": 0, "second": 1, "third": 2, "fourth": 3, "last": -1}
_PART = re.compile(
    r"\b(?P<part>early|late|mid|middle|beginning|start|end)(?:\s+(?:of|in))?(?:\s+the)?(?:\s+month\s+of)?[\s-]+$"
)
_NTH = re.compile(
    r"\b(?P<nth>first|second|third|fourth|last)\s+(?P<unit>week|weekend|half)\s+(?:of|in)\s+(?:the\s+month\s+of\s+)?$"
)
_ANCHORED = re.compile(
    rf"\b(?:{COUNT}\s+(?P<unit>day|week|weekend|month|year)s?|(?P<what>day|night|week|weekend|month|year|{any_of(WEEKDAYS)}))"
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
    elif match := _NTH.search(before):
        nth = nth_part(days, match["unit"], _ORDINALS[match["nth"]])
        if days[0] <= nth[0] <= nth[1] <= days[1]:
            return at + match.start(), nth
    elif match := _ANCHORED.search(before):
        side = -1 if match["side"].startswith(("before", "prior")) else 0 if match["side"] == "of" else 1
        if moved := _beside(days, match, side):
            return at + match.start(), moved
    return start, days


def _beside(days: Days, match: re.Match[str], side: int) -> Days | None:
    anchor, what = days[1] if side > 0 else days[0], match["what"]
    if match["count"]:
        low, high = count_of(match)
        near, far = away(anchor, match["unit"], side * low), away(anchor, match["unit"], side * high)
        return (min(near[0], far[0]), max(near[1], far[1])) if side and near and far else None
    if what in ("day", "night"):
        return (anchor + side, anchor + side) if side else None
    if what == "week" and side:
        return (anchor - 7, anchor - 1) if side < 0 else (anchor + 1, anchor + 7)
    if what == "weekend" and side:
        saturday = weekday_near(anchor, 5, before=side < 0)
        return saturday, saturday + 1
    if not side and (what in ("month", "year") or days[0] < days[1]):
        return days  # "the month of May 2023", "the last week of May"
    return period(anchor, what, side)


def _lower(text: str) -> str:
    """Lower case, character by character where some letter would grow (offsets must hold)."""
    folded = text.lower()
    return folded if len(folded) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
