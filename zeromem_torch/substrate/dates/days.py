"""Days of the calendar: months, years, weeks and seasons as intervals of proleptic ordinals (`date.toordinal`).

An interval is None where the calendar, which runs from the year 1 to 9999, has no such day.
"""

from __future__ import annotations

from calendar import monthrange
from datetime import date
from typing import NamedTuple

Days = tuple[int, int]
LAST_DAY = date.max.toordinal()

_NAMES_OF_MONTHS = """january jan, february feb, march mar, april apr, may, june jun, july jul, august aug,
    september sep sept, october oct, november nov, december dec"""
MONTHS = {name: number for number, names in enumerate(_NAMES_OF_MONTHS.split(","), start=1) for name in names.split()}
WEEKDAYS = {"monday": 0, "tuesday": 1, "wednesday": 2, "thursday": 3, "friday": 4, "saturday": 5, "sunday": 6}
SEASONS = {"spring": 3, "summer": 6, "autumn": 9, "fall": 9, "winter": 12}  # first month


class Yearless(NamedTuple):
    """Days whose year is still to be found; a last day of 0 is the end of its month."""

    month: int
    first: int
    last_month: int
    last: int


def month_days(year: int, month: int, first: int = 1, last: int = 0) -> Days | None:
    """Days of a month, all by default; None when there is no such day."""
    if not 1 <= month <= 12 or not 1 <= year <= 9999:
        return None
    length = monthrange(year, month)[1]
    last = last or length
    if not 1 <= first <= last <= length:
        return None
    return date(year, month, first).toordinal(), date(year, month, last).toordinal()


def years(first: int, last: int) -> Days | None:
    if not 1 <= first <= last <= 9999:
        return None
    return date(first, 1, 1).toordinal(), date(last, 12, 31).toordinal()


def months_from(year: int, month: int, count: int) -> Days | None:
    """`count` calendar months from the given one; `month` may lie outside 1..12."""
    begin, end = year * 12 + month - 1, year * 12 + month - 1 + count - 1
    if not 12 <= begin <= end < 120_000:
        return None
    first, last = month_days(begin // 12, begin % 12 + 1), month_days(end // 12, end % 12 + 1)
    return (first[0], last[1]) if first and last else None


def shifted(day: int, months: int) -> int | None:
    """The same day of the month some months away, or the last day of a shorter month."""
    when = date.fromordinal(day)
    index = when.year * 12 + when.month - 1 + months
    if not 12 <= index < 120_000:
        return None
    year, month = index // 12, index % 12 + 1
    return date(year, month, min(when.day, monthrange(year, month)[1])).toordinal()


def of_year(days: Yearless, year: int) -> Days | None:
    first = month_days(year, days.month, days.first, days.first)
    last = month_days(year, days.last_month, days.last or 1, days.last)
    return (first[0], last[1]) if first and last else None


def nearest_year(days: Yearless, today: int | None) -> Days | None:
    if today is None:
        return None
    year = date.fromordinal(today).year
    spans = [span for step in range(-4, 5) if (span := of_year(days, year + step))]
    return min(spans, key=lambda span: _distance(span, today), default=None)


def _distance(span: Days, day: int) -> int:
    return max(span[0] - day, day - span[1], 0)


def away(today: int, unit: str, count: int) -> Days | None:
    """What lies `count` units from a day: exact for days, and as vague as the unit for longer ones."""
    if unit in ("minute", "hour"):
        return today, today
    if unit == "day":
        return today + count, today + count
    if unit == "week":
        return today + 7 * count - 3, today + 7 * count + 3
    if unit == "weekend":
        saturday = weekday_near(today, 5, before=count < 0) + 7 * (count + (1 if count < 0 else -1))
        return saturday, saturday + 1
    if unit == "month":
        middle = shifted(today, count)
        return (middle - 15, middle + 15) if middle else None
    year = date.fromordinal(today).year + count * (10 if unit == "decade" else 1)
    return years(year, year) if unit == "year" else years(year - 3, year + 3)


def weekday_near(day: int, weekday: int, *, before: bool) -> int:
    """The last such weekday strictly before a day, or the first strictly after it."""
    now = (day - 1) % 7  # ordinal 1 is a Monday
    return day - ((now - weekday - 1) % 7 + 1) if before else day + ((weekday - now - 1) % 7 + 1)


def period(today: int, what: str, step: int) -> Days | None:
    """The last (step -1), this (0) or next (1) week, weekend, month, year, decade, Friday, May or summer."""
    now, monday = date.fromordinal(today), today - (today - 1) % 7
    if what == "week":
        return monday + 7 * step, monday + 7 * step + 6
    if what == "weekend":
        saturday = monday + 5 + 7 * step
        return saturday, saturday + 1
    if what == "month":
        return months_from(now.year, now.month + step, 1)
    if what == "year":
        return years(now.year + step, now.year + step)
    if what == "decade":
        first = now.year // 10 * 10 + 10 * step
        return years(first, first + 9)
    if what in WEEKDAYS:
        day = monday + WEEKDAYS[what] if step == 0 else weekday_near(today, WEEKDAYS[what], before=step < 0)
        return day, day
    first, count = (SEASONS[what], 3) if what in SEASONS else (MONTHS[what], 1)
    spans = [span for year in (-2, -1, 0, 1, 2) if (span := months_from(now.year + year, first, count))]
    if step < 0:
        return next((s for s in reversed(spans) if s[1] < today), None)
    if step > 0:
        return next((s for s in spans if s[0] > today), None)
    return min(spans, key=lambda s: _distance(s, today))


def nth_part(days: Days, unit: str, nth: int) -> Days:
    """A week, weekend or half of a longer stretch, counted from 0, or from its end when negative."""
    if unit == "weekend":
        saturday = weekday_near(days[0] - 1, 5, before=False) if nth >= 0 else weekday_near(days[1], 5, before=True)
        return saturday + 7 * max(nth, 0), saturday + 7 * max(nth, 0) + 1
    if unit == "half":
        middle = (days[0] + days[1]) // 2
        return (days[0], middle) if nth == 0 else (middle + 1, days[1])
    length = 7
    first = days[0] + length * nth if nth >= 0 else days[1] - length + 1
    return first, first + length - 1
