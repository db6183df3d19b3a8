"""Traces: what is accepted, what is refused and in which words, and times in every form that the data sets use."""

import pickle
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.substrate.traces import Trace, ZeroMemError, check_text, nearest, parse_time

NOON = datetime(2023, 5, 8, 13, 56, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        "1:56 pm on 8 May, 2023",
        "1:56 PM on 8 May 2023",
        "2023/05/08 (Mon) 13:56",
        "2023/05/08 (Sun) 13:56",  # the weekday is redundant
        "2023-05-08T13:56",
        "2023-05-08 13:56:00Z",
        "2023-05-08T15:56:00+02:00",
        "20230508T135600",
        " 2023-05-08T13:56 ",
        1683554160,
        1683554160.0,
        1683554160000,
        "1683554160",
        "1683554160000",
        NOON,
        NOON.replace(tzinfo=None),
    ],
)
def test_one_instant_in_every_form(value: Any) -> None:
    assert parse_time(value) == NOON


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("12:30 am on 1 January, 2024", datetime(2024, 1, 1, 0, 30, tzinfo=UTC)),
        ("12:30 pm on 1 January, 2024", datetime(2024, 1, 1, 12, 30, tzinfo=UTC)),
        ("2023/05/20", datetime(2023, 5, 20, tzinfo=UTC)),
        ("2024-02-29", datetime(2024, 2, 29, tzinfo=UTC)),
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (-86400, datetime(1969, 12, 31, tzinfo=UTC)),
    ],
)
def test_midnight_noon_days_and_the_epoch(value: Any, expected: datetime) -> None:
    assert parse_time(value) == expected


@pytest.mark.parametrize(
    "value",
    ["", "yesterday", "13:56 pm on 8 May, 2023", "1:56 pm on 8 Foo, 2023", "2023/02/30 (Thu) 02:21", "2023-13-01"]
    + ["2023", "x" * 10_000, "٢٠٢٣-٠٥-٠٨T", True, None, [], float("nan"), float("inf"), 10**400, 1e300],
)
def test_other_times_are_refused_with_the_accepted_forms(value: Any) -> None:
    with pytest.raises(ZeroMemError) as error:
        parse_time(value)
    assert "1:56 pm on 8 May, 2023" in str(error.value)
    assert "ISO 8601" in str(error.value)
    assert len(str(error.value)) < 600


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-9, minutes=-30))])))
def test_iso_times_survive(time: datetime) -> None:
    assert parse_time(time.isoformat()) == time


def test_a_naive_time_is_utc_and_a_zone_is_kept() -> None:
    assert Trace("a", "b", "c", time=datetime(2023, 5, 8)).time == datetime(2023, 5, 8, tzinfo=UTC)
    tokyo = datetime(2023, 5, 8, tzinfo=timezone(timedelta(hours=9)))
    assert Trace("a", "b", "c", time=tokyo).time is tokyo


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": ""}, "id"),
        ({"id": " \t"}, "id"),
        ({"id": 7}, "a string"),
        ({"boundary": "\u200b"}, "boundary"),
        ({"text": ""}, "text"),
        ({"text": "\n \ufeff"}, "not blank"),
        ({"text": b"bytes"}, "a string"),
        ({"text": "a\x00b"}, "NUL"),
        ({"text": "ab\ud83d"}, "lone surrogate at character 2"),
        ({"speaker": "\udc00"}, "speaker"),
        ({"speaker": None}, "speaker"),
        ({"order": 1.0}, "order"),
        ({"order": True}, "order"),
        ({"order": 2**63}, "64-bit"),
        ({"time": "2023-05-08"}, "parse_time"),
        ({"metadata": {"a": None}}, "metadata['a']"),
        ({"metadata": {"a": [1]}}, "metadata['a']"),
        ({"metadata": {"a": float("nan")}}, "finite"),
        ({"metadata": {"": 1}}, "metadata key"),
        ({"metadata": {1: 1}}, "metadata key"),
        ({"metadata": {"a": "\x00"}}, "NUL"),
        ({"metadata": 5}, "a mapping"),
    ],
)
def test_a_bad_field_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {"id": "t1", "boundary": "b", "text": "hello"}
    Trace(**good)
    with pytest.raises(ZeroMemError, match=r"expected .+, got .+; ") as error:
        Trace(**good | change)
    assert words in str(error.value)
    assert str(error.value).isascii()
    assert len(str(error.value)) < 500


def test_a_megabyte_of_text_is_kept_as_it_is() -> None:
    text = "héllo 👋 " * 125_000
    assert Trace("a", "b", text).text is text


def test_surprising_but_good_input() -> None:
    for boundary in ("a", "a_b", "a%", "acme", "acme-corp", "作業", "a' OR 1=1"):
        assert Trace("x", boundary, "👍").boundary == boundary


def test_a_trace_is_a_value() -> None:
    metadata = {"n": 1}
    trace = Trace("a", "b", "c", metadata=metadata)
    metadata["n"] = 2
    assert trace.metadata == {"n": 1}  # what was checked is what is kept
    assert pickle.loads(pickle.dumps(trace)) == trace
    assert len({trace, Trace("a", "b", "c", metadata={"n": 1})}) == 1


def test_from_dict_reads_all_fields_back() -> None:
    trace = Trace("a", "b", "c", "s", 3, NOON, "Ann", "user", "T", {"n": 1})
    assert Trace.from_dict({f.name: getattr(trace, f.name) for f in fields(trace)}) == trace


def test_from_dict_reads_openai_messages() -> None:
    message = {"role": "user", "name": "Ann", "content": "hi", "id": "1", "boundary": "b", "time": 0, "title": None}
    assert Trace.from_dict(message) == Trace("1", "b", "hi", speaker="Ann", role="user", time=parse_time(0))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert Trace.from_dict({"id": "1", "boundary": "b", "content": parts}).text == "one\ntwo"


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"id": "1", "boundary": "b", "text": "x", "spoker": "A"}, "did you mean 'speaker'"),
        ({"id": "1", "boundary": "b", "text": "x", "zzz": 1}, "metadata"),
        ({"id": "1", "boundary": "b", "text": "x", 5: 1}, "got 5"),
        ({"id": "1", "boundary": "b"}, "trace '1', text"),
        ({"id": "1", "boundary": "b", "text": None}, "trace '1', text"),
        ({"boundary": "b", "text": "x"}, "every trace needs id"),
        ({"id": "1", "boundary": "b", "text": "x", "content": "y"}, "keep only 'text'"),
        ({"id": "1", "boundary": "b", "content": [{"type": "image_url"}]}, "text parts"),
        ({"id": "1", "boundary": "b", "text": "x", "time": "soon"}, "LongMemEval"),
        ([("id", "1")], "a mapping"),
    ],
)
def test_from_dict_says_what_is_wrong(mapping: Any, words: str) -> None:
    with pytest.raises(ZeroMemError) as error:
        Trace.from_dict(mapping)
    assert words in str(error.value)


def test_nearest_names_up_to_three_and_is_silent_when_nothing_is_near() -> None:
    assert nearest("acme-crop", ["acme-corp", "zebra"]) == "did you mean 'acme-corp'? "
    assert nearest("zzz", ["acme"]) == ""
    assert nearest("a", []) == ""
    assert nearest("Conv-1", [f"conv-{i}" for i in range(20)]).count("'") == 6


def test_check_text_names_what_it_checks() -> None:
    check_text("query", "text", "?!")
    with pytest.raises(ZeroMemError, match="query, text: expected something that is not blank"):
        check_text("query", "text", " ")


@given(st.text())
def test_any_text_is_either_kept_or_refused_in_words(text: str) -> None:
    try:
        assert Trace("a", "b", text).text == text
    except ZeroMemError as error:
        assert "trace 'a', text" in str(error)  # noqa: PT017
