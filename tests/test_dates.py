"""Dates in words: a table of expressions, calendar properties, and edges of zones and of the calendar itself."""

import time
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.substrate.dates import find_dates

SATURDAY = datetime(2023, 7, 15, 20, 51, tzinfo=UTC)
DAYS = st.dates(date(1900, 1, 1), date(2099, 12, 31))


def found(text: str, reference: datetime | None = SATURDAY) -> list[str]:
    """Each mention as "its words: first day - last day"."""
    return [
        f"{text[m.start : m.end]}: {date.fromordinal(m.first_day)} - {date.fromordinal(m.last_day)}"
        for m in find_dates(text, reference)
    ]


def days(text: str, reference: datetime | None = SATURDAY) -> list[str]:
    return [f"{date.fromordinal(m.first_day)} {date.fromordinal(m.last_day)}" for m in find_dates(text, reference)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 May 2023", "2023-05-07 2023-05-07"),
        ("the 7th of May, 2023", "2023-05-07 2023-05-07"),
        ("May 7, 2023", "2023-05-07 2023-05-07"),
        ("Dec 1st,2023", "2023-12-01 2023-12-01"),
        ("2023-05-07T13:00", "2023-05-07 2023-05-07"),
        ("2023/05/07", "2023-05-07 2023-05-07"),
        ("05/07/2023", "2023-05-07 2023-05-07"),
        ("25/05/2023", "2023-05-25 2023-05-25"),
        ("07.05.2023", "2023-05-07 2023-05-07"),
        ("5/7/23", "2023-05-07 2023-05-07"),
        ("May 2023", "2023-05-01 2023-05-31"),
        ("February of 2024", "2024-02-01 2024-02-29"),
        ("2023-05", "2023-05-01 2023-05-31"),
        ("2023", "2023-01-01 2023-12-31"),
        ("born in 1803", "1803-01-01 1803-12-31"),
        ("(1864\u20131920)", "1864-01-01 1920-12-31"),
        ("from 1986 to 2013", "1986-01-01 2013-12-31"),
        ("the 2011-12 season", "2011-01-01 2012-12-31"),
        ("June 2-5, 2023", "2023-06-02 2023-06-05"),
        ("2 to 5 June 2023", "2023-06-02 2023-06-05"),
        ("between August 11 and August 15 2023", "2023-08-11 2023-08-15"),
        ("from December 20 to January 3, 2023", "2022-12-20 2023-01-03"),
        ("from May to July 2023", "2023-05-01 2023-07-31"),
        ("summer 2022", "2022-06-01 2022-08-31"),
        ("spring of 2021", "2021-03-01 2021-05-31"),
        ("winter 2022", "2022-12-01 2023-02-28"),
        ("the 1990s", "1990-01-01 1999-12-31"),
        ("the '80s", "1980-01-01 1989-12-31"),
        ("the 19th century", "1801-01-01 1900-12-31"),
        ("late 2022", "2022-08-31 2022-12-31"),
        ("early May 2023", "2023-05-01 2023-05-11"),
        ("the second week of November 2023", "2023-11-08 2023-11-14"),
        ("the first weekend of August 2023", "2023-08-05 2023-08-06"),
        ("the first half of September 2022", "2022-09-01 2022-09-15"),
        ("the week before 9 June 2023", "2023-06-02 2023-06-08"),
        ("the Sunday before 25 May 2023", "2023-05-21 2023-05-21"),
        ("the Saturday after October 28, 2023", "2023-11-04 2023-11-04"),
        ("the weekend before 4th October, 2023", "2023-09-30 2023-10-01"),
        ("two weeks before August 11, 2023", "2023-07-25 2023-07-31"),
        ("two days after 5 May 2023", "2023-05-07 2023-05-07"),
        ("the week of 5 April 2023", "2023-04-03 2023-04-09"),
    ],
)
def test_explicit_dates_need_no_reference(text: str, expected: str) -> None:
    assert days(text, None) == days(text) == [expected]
    assert [m.kind for m in find_dates(text)] == ["explicit"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("today", "2023-07-15 2023-07-15"),
        ("yesterday", "2023-07-14 2023-07-14"),
        ("Last night", "2023-07-14 2023-07-14"),
        ("tomorrow", "2023-07-16 2023-07-16"),
        ("the day before yesterday", "2023-07-13 2023-07-13"),
        ("last week", "2023-07-03 2023-07-09"),
        ("this week", "2023-07-10 2023-07-16"),
        ("next week", "2023-07-17 2023-07-23"),
        ("last weekend", "2023-07-08 2023-07-09"),
        ("this past weekend", "2023-07-08 2023-07-09"),
        ("this weekend", "2023-07-15 2023-07-16"),
        ("last month", "2023-06-01 2023-06-30"),
        ("next month", "2023-08-01 2023-08-31"),
        ("last year", "2022-01-01 2022-12-31"),
        ("this year", "2023-01-01 2023-12-31"),
        ("last Friday", "2023-07-14 2023-07-14"),
        ("last Saturday", "2023-07-08 2023-07-08"),
        ("next Saturday", "2023-07-22 2023-07-22"),
        ("this Friday", "2023-07-14 2023-07-14"),
        ("last summer", "2022-06-01 2022-08-31"),
        ("this summer", "2023-06-01 2023-08-31"),
        ("last December", "2022-12-01 2022-12-31"),
        ("next May", "2024-05-01 2024-05-31"),
        ("three days ago", "2023-07-12 2023-07-12"),
        ("a few days ago", "2023-07-10 2023-07-13"),
        ("two weeks ago", "2023-06-28 2023-07-04"),
        ("two weekends ago", "2023-07-01 2023-07-02"),
        ("a couple of months ago", "2023-04-30 2023-05-30"),
        ("3 years ago", "2020-01-01 2020-12-31"),
        ("in two months", "2023-08-31 2023-09-30"),
        ("ten days from now", "2023-07-25 2023-07-25"),
        ("the past two weeks", "2023-07-01 2023-07-15"),
        ("over the past year", "2022-07-15 2023-07-15"),
        ("the next few days", "2023-07-15 2023-07-20"),
        ("the week before.", "2023-07-03 2023-07-09"),
        ("two hours ago", "2023-07-15 2023-07-15"),
    ],
)
def test_relative_expressions_count_from_the_reference(text: str, expected: str) -> None:
    assert days(text) == [expected]
    assert [m.kind for m in find_dates(text, SATURDAY)] == ["relative"]
    assert find_dates(text, None) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("May 7", "2023-05-07 2023-05-07"),
        ("in May", "2023-05-01 2023-05-31"),
        ("January 3", "2024-01-03 2024-01-03"),
        ("Feb 29", "2024-02-29 2024-02-29"),
        ("June 3 to July 4", "2023-06-03 2023-07-04"),
    ],
)
def test_a_missing_year_is_the_nearest(text: str, expected: str) -> None:
    assert days(text) == [expected]
    assert days(text, None) == []


@pytest.mark.parametrize(
    "text",
    ["You may be right", "March on, said May", "this may be it", "may 5", "1500 people", "$2000", "2000 calories"]
    + ["1,500 or 12345", "0.2023", "call 555-2023", "31 June", "2023-2-30-4", "13/13/2023", "in his 20s", "9-1-1"]
    + ["5000 years ago", "9999 years ago", "lasting weeks", "fall over", "the second", "room 2023b", "", "٢٠٢٣"],
)
def test_what_only_looks_like_a_date(text: str) -> None:
    assert found(text) == []


def test_mentions_carry_their_words_in_order() -> None:
    text = "Last week, as mentioned on November 6, 2023 (İstanbul, the day before yesterday)"
    assert found(text) == [
        "Last week: 2023-07-03 - 2023-07-09",
        "November 6, 2023: 2023-11-06 - 2023-11-06",
        "day before yesterday: 2023-07-13 - 2023-07-13",
    ]


@given(DAYS)
def test_every_way_of_writing_a_day_is_that_day(day: date) -> None:
    month = day.strftime("%B")
    for text in (
        day.isoformat(),
        f"{day.day} {month} {day.year}",
        f"on {month} {day.day}, {day.year}.",
        f"the {day.day}th of {month[:3]}. {day.year}",
        f"{day:%m/%d/%Y}",
        f"{day:%d.%m.%Y}",
    ):
        assert [(m.first_day, m.last_day) for m in find_dates(text)] == [(day.toordinal(), day.toordinal())], text


@given(DAYS, st.sampled_from(["monday", "Tuesday", "wednesday", "Thursday", "friday", "Saturday", "sunday"]))
def test_last_and_next_weekdays_are_within_a_week_on_either_side(day: date, weekday: str) -> None:
    reference = datetime(day.year, day.month, day.day, tzinfo=UTC)
    last, coming = find_dates(f"last {weekday} and next {weekday}", reference)
    assert 1 <= day.toordinal() - last.first_day <= 7
    assert 1 <= coming.first_day - day.toordinal() <= 7
    for mention in (last, coming):
        assert date.fromordinal(mention.first_day).strftime("%A").lower() == weekday.lower()


@given(DAYS)
def test_last_this_and_next_are_side_by_side(day: date) -> None:
    reference = datetime(day.year, day.month, day.day, tzinfo=UTC)
    for period in ("week", "month", "year"):
        last, this, coming = find_dates(f"last {period}, this {period}, next {period}", reference)
        assert last.last_day + 1 == this.first_day
        assert this.last_day + 1 == coming.first_day
        assert this.first_day <= day.toordinal() <= this.last_day


@pytest.mark.parametrize(
    "clock", [datetime(2023, 3, 26, 0, 30), datetime(2023, 3, 26, 3, 30), datetime(2023, 10, 29, 2, 30)]
)
@pytest.mark.parametrize("fold", [0, 1])
def test_the_day_is_the_references_own_at_a_change_of_clocks(clock: datetime, fold: int) -> None:
    reference = clock.replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    (yesterday,) = find_dates("yesterday", reference)
    assert yesterday.first_day == clock.toordinal() - 1  # not 24 hours, and not the day in Greenwich


def test_the_zone_decides_the_day() -> None:
    late = datetime(2023, 7, 15, 23, 30, tzinfo=timezone(timedelta(hours=-11)))
    assert days("today", late) == ["2023-07-15 2023-07-15"]
    assert days("today", late.astimezone(UTC)) == ["2023-07-16 2023-07-16"]


@pytest.mark.parametrize(
    "edge", [datetime.min, datetime.max, datetime(1, 12, 31), datetime(9999, 1, 1), datetime(4, 2, 29)]
)
def test_the_ends_of_the_calendar_lose_mentions_but_nothing_else(edge: datetime) -> None:
    text = (
        "yesterday, tomorrow, last week, next week, last month, next month, last year, next year, last summer, "
        "next winter, two months ago, in two months, a decade ago, in May, May 5, the past three years, last weekend, "
        "next decade, two weekends ago, the week before 1 January 2023, last Friday"
    )
    for mention in find_dates(text, edge.replace(tzinfo=UTC)):
        assert 1 <= mention.first_day <= mention.last_day <= date.max.toordinal()


WORDS = "last next this week month May 5 2023 , - to and between ago two 31 June the of before 99 a few in '90s 1/2/03"


@given(
    st.lists(st.sampled_from(WORDS.split(" ")), max_size=12).map(" ".join) | st.text(max_size=60),
    st.none() | st.just(SATURDAY),
)
def test_any_text_gives_mentions_in_order_and_apart(text: str, reference: datetime | None) -> None:
    end = 0
    for mention in find_dates(text, reference):
        assert end <= mention.start < mention.end <= len(text)
        assert mention.first_day <= mention.last_day
        assert reference is not None or mention.kind == "explicit"
        end = mention.end


@pytest.mark.parametrize(
    "unit", ["1", "1 ", "2023 ", "May ", "May 5 to ", "last ", "a ", "in ", " ", "between 2020 and ", "İ"]
)
def test_a_megabyte_of_anything_takes_linear_time(unit: str) -> None:
    begin = time.perf_counter()
    find_dates(unit * (1_000_000 // len(unit)), SATURDAY)
    assert time.perf_counter() - begin < 30
