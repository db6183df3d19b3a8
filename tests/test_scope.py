"""Who may be seen: boundaries by whole segments, filters, and what holds at a moment."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from zeromem_torch.scope import Filters, Scope, boundaries_in, boundary_of
from zeromem_torch.substrate.traces import Trace, ZeroMemError

KNOWN = ("acme", "acme/alice", "acme/alice/chat", "acme-corp", "acme_x", "a%", "a", "🚢/x", "ACME", "acme ")
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("acme", ["acme"]),
        ("acme/", ["acme", "acme/alice", "acme/alice/chat"]),
        ("acme/alice/", ["acme/alice", "acme/alice/chat"]),
        ("a", ["a"]),
        ("a/", ["a"]),
        ("a%", ["a%"]),
        ("🚢/", ["🚢/x"]),
        ("unknown", ["unknown"]),
        ("unknown/", []),
        (["a", "acme", "a"], ["a", "acme"]),
        (["acme/alice/", "a%"], ["acme/alice", "acme/alice/chat", "a%"]),
    ],
)
def test_boundaries_by_whole_segments(asked: Any, found: list[str]) -> None:
    assert list(boundaries_in(asked, KNOWN)) == found


@pytest.mark.parametrize("asked", ["", "/", "a//b", "/a", " ", None, 5, [], [None], ["a", ""], "a\0", "a\ud800"])
def test_what_names_no_boundary_is_refused(asked: Any) -> None:
    with pytest.raises(ZeroMemError, match="boundary"):
        boundaries_in(asked, KNOWN)


def test_ids_of_other_libraries_are_levels_of_a_path() -> None:
    assert boundary_of("u1") == "user=u1"
    assert boundary_of("u1", "a1", "r1") == "user=u1/agent=a1/run=r1"
    assert boundary_of(run_id="r1") == "run=r1"
    assert boundary_of("u1/agent=a1") == "user=u1%2Fagent=a1"  # no id reaches into another level
    assert boundary_of("u1%2F") == "user=u1%252F"
    with pytest.raises(ZeroMemError, match="boundary: expected one, or a user_id"):
        boundary_of()
    with pytest.raises(ZeroMemError, match="user_id: expected something that is not blank"):
        boundary_of("")


TRACE = Trace(
    "1", "a", "x", session="s1", speaker="Ann", role="user", time=NOON, metadata={"kind": "note", "n": 1, "on": True}
)


@pytest.mark.parametrize(
    ("given", "admitted"),
    [
        ({}, True),
        ({"session": "s1"}, True),
        ({"session": ["s0", "s1"]}, True),
        ({"session": "s"}, False),
        ({"speaker": "ann"}, False),
        ({"speaker": ("Ann",), "role": {"user"}}, True),
        ({"role": "tool"}, False),
        ({"after": NOON}, True),
        ({"after": "2024-01-01T12:00:01Z"}, False),
        ({"before": NOON}, False),
        ({"before": "2024-01-02"}, True),
        ({"metadata": {"kind": "note"}}, True),
        ({"metadata": {"kind": "note", "n": 2}}, False),
        ({"metadata": {"n": True}}, False),  # 1 is not True
        ({"metadata": {"on": 1}}, False),
        ({"metadata": {"unknown": None}}, True),
        ({"metadata": {"k%": "note"}}, False),
    ],
)
def test_filters(given: dict[str, Any], admitted: bool) -> None:
    filters = Filters.of(given)
    assert filters is not None
    assert filters.admits(TRACE) is admitted


def test_a_trace_without_a_time_is_in_no_range_of_times() -> None:
    undated = Trace("1", "a", "x")
    for name in ("after", "before"):
        filters = Filters.of({name: NOON})
        assert filters is not None
        assert not filters.admits(undated)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sesion": "s1"}, ["filters", "did you mean 'session'"]),
        ({"user": "s1"}, ["filters", "metadata"]),
        ({"session": 5}, ["session", "a name or a list"]),
        ({"session": []}, ["session", "at least one"]),
        ({"speaker": ""}, ["speaker", "not blank"]),
        ({"after": "soon"}, ["time", "ISO 8601"]),
        ({"metadata": "kind"}, ["metadata", "a mapping"]),
        ("speaker", ["filters", "a mapping"]),
    ],
)
def test_refused_filters(given: Any, words: list[str]) -> None:
    with pytest.raises(ZeroMemError) as error:
        Filters.of(given)
    assert [word for word in words if word not in str(error.value)] == []


def at(moment: datetime | None, **fields: Any) -> bool:
    """Whether a trace holds at a moment, "now" being noon."""
    return Scope(("a",), as_of=moment).stands(Trace("1", "a", "x", **fields), NOON)


HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({}, True),
        ({"expires_at": NOON}, False),
        ({"expires_at": NOON + HOUR}, True),
        ({"valid_from": NOON}, True),
        ({"valid_from": NOON + HOUR}, False),
        ({"valid_to": NOON}, False),
        ({"valid_from": NOON - HOUR, "valid_to": NOON + HOUR}, True),
    ],
)
def test_what_holds_now_and_then(fields: dict[str, datetime], holds: bool) -> None:
    assert at(None, **fields) is holds
    assert at(NOON, **fields) is holds  # the same moment, said
    shifted = {name: time - 9 * HOUR for name, time in fields.items()}
    assert at(NOON - 9 * HOUR, **shifted) is holds


def test_the_past_does_not_know_what_came_later() -> None:
    assert at(None, time=NOON + HOUR)  # a plan for later is known now
    assert not at(NOON, time=NOON + HOUR)
    assert at(NOON, time=NOON)
    assert not at(NOON, added_at=NOON + HOUR)  # with no event time, when it was stored counts
    assert at(NOON, time=NOON - HOUR, added_at=NOON + HOUR)
