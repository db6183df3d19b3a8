"""Turns in order, windows, episodes and chunks (Eq. 5), against loops and by what must hold of every text."""

import random
from datetime import UTC, datetime, timedelta, timezone

import equations
import pytest
import torch
from builders import SIZES, Dice
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import HashEncoder

from zeromem_torch.substrate.traces import Trace
from zeromem_torch.substrate.units import chunk_spans, day_of, episodes, order_turns, turn_prefix, voice, windows

START = datetime(2023, 5, 8, 13, 56, tzinfo=UTC)


def sessions(units: int, seed: int = 0, *, longest: int = 12) -> torch.Tensor:
    """A sorted session number per unit."""
    dice, found = Dice(seed), list[int]()
    while len(found) < units:
        found += [len(set(found))] * min(1 + dice.one(longest), units - len(found))
    return torch.tensor(found, dtype=torch.long)


@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("length", [1, 2, 3, 8, 500])
def test_windows_equal_the_loop(units: int, length: int) -> None:
    session = sessions(units)
    window, unit, count = windows(session, length)
    held: list[list[int]] = [[] for _ in range(count)]
    for w, u in zip(window.tolist(), unit.tolist(), strict=True):
        held[w].append(u)
    assert held == equations.windows(session.tolist(), length)
    assert {u for own in held for u in own} == set(range(units)), "every unit is in a window"


@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("length", [1, 2, 4, 8, 500])
@pytest.mark.parametrize("longest", [1, 12, 200])
def test_episodes_equal_the_loop(units: int, length: int, longest: int) -> None:
    session = sessions(units, longest=longest)
    assert episodes(session, length).tolist() == equations.episodes(session.tolist(), length)


def test_a_long_session_is_cut_evenly() -> None:
    held = torch.bincount(episodes(torch.zeros(100_003, dtype=torch.long), 8))
    assert set(held.tolist()) <= {8, 9}
    assert len(held) == round(100_003 / 8)


# Order


def trace(name: str, session: str = "", order: int = 0, time: datetime | None = None) -> Trace:
    return Trace(id=name, boundary="b", text=name, session=session, order=order, time=time)


def test_sessions_go_by_their_first_event_and_turns_by_their_number() -> None:
    later, night = START + timedelta(days=9), START - timedelta(hours=2)
    turns = order_turns(
        [trace("b2", "b", 2, later), trace("a2", "a", 2), trace("b1", "b", 1, later), trace("a1", "a", 1, START),
         trace("c", "c", 0, night)]
    )  # fmt: skip
    assert [t.id for t in turns.traces] == ["c", "a1", "a2", "b1", "b2"]
    assert turns.session.tolist() == [0, 1, 1, 2, 2]
    assert turns.position.tolist() == [0, 0, 1, 0, 1]
    assert turns.sessions == 3


def test_times_of_different_zones_compare_as_moments() -> None:
    east = datetime(2023, 5, 8, 15, 0, tzinfo=timezone(timedelta(hours=9)))  # 06:00 UTC
    assert [t.id for t in order_turns([trace("utc", "a", 0, START), trace("east", "b", 0, east)]).traces] == [
        "east",
        "utc",
    ]


def test_what_has_no_time_keeps_the_order_it_came_in() -> None:
    turns = order_turns([trace(name) for name in "cab"])
    assert [t.id for t in turns.traces] == ["c", "a", "b"]
    assert turns.session.tolist() == [0, 1, 2]
    assert turns.position.tolist() == [-1, -1, -1], "a document stands alone"


def test_an_undated_session_follows_the_one_that_came_before_it() -> None:
    early, late = START - timedelta(days=1), START + timedelta(days=1)
    given_ = [trace("first"), trace("late", time=late), trace("after", "s", 1), trace("early", time=early)]
    assert [t.id for t in order_turns(given_).traces] == ["first", "early", "late", "after"]


def test_turns_of_one_number_keep_the_order_they_came_in() -> None:
    assert [t.id for t in order_turns([trace(name, "s", 1) for name in "cab"]).traces] == ["c", "a", "b"]


def test_no_traces_are_no_units() -> None:
    turns = order_turns([])
    assert (turns.traces, turns.sessions) == ((), 0)
    assert turns.session.dtype == turns.position.dtype == torch.long
    assert windows(turns.session, 3)[2] == episodes(turns.session, 8).numel() == 0


def test_order_does_not_depend_on_how_dated_traces_arrive() -> None:
    given_ = [
        trace(f"{s}:{t}", f"s{s}", t, START + timedelta(days=s, minutes=t)) for s in range(5) for t in range(s + 1)
    ]
    mixed = list(given_)
    random.Random(0).shuffle(mixed)
    assert order_turns(mixed).traces == order_turns(given_).traces == tuple(given_)


def test_days_and_prefixes() -> None:
    own = Trace(id="t", boundary="b", text="Hi", speaker="Melanie", time=START)
    assert turn_prefix(own) == "[8 May 2023] Melanie: "
    assert turn_prefix(own, dated=False) == "Melanie: "
    assert turn_prefix(Trace(id="d", boundary="b", text="A film.", title="Ed Wood")) == "Ed Wood. "
    assert turn_prefix(trace("plain")) == ""
    asked = Trace(id="q", boundary="b", text="Hi", role="user")
    assert turn_prefix(asked) == "user: "
    assert day_of(START) == 738_648
    assert day_of(None) == 0
    night = datetime(2023, 5, 9, 1, 0, tzinfo=timezone(timedelta(hours=9)))
    assert day_of(night) == 738_649, "the day is the speaker's own, not that of UTC"


@pytest.mark.parametrize(
    ("speaker", "role", "who"),
    [("Ann", "user", "Ann"), ("", "user", "user"), ("", "assistant", "assistant"), ("", "tool", ""), ("", "", "")],
)
def test_who_speaks(speaker: str, role: str, who: str) -> None:
    assert voice(Trace(id="t", boundary="b", text="Hi", speaker=speaker, role=role)) == who


# Chunks

SENTENCES = st.lists(
    st.sampled_from(["Yes.", "Is it so?", "A word ", "и слово. ", "日本語。", "a b c d e f g h!", "\n"])
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(SENTENCES.map(" ".join), st.integers(1, 9))
def test_chunks_cover_a_text_and_fit(text: str, limit: int) -> None:
    (tokens,) = HashEncoder().token_spans([text])
    spans = chunk_spans(text, tokens, limit)
    assert [spans[0][0], *(end for _, end in spans)] == [*(start for start, _ in spans), len(text)], "end to end"
    assert spans[0][0] == 0
    for start, end in spans:
        assert sum(start <= first < end for first, _ in tokens) <= limit
        assert all(last <= end for first, last in tokens if start <= first < end), "no token is cut"
    if len(tokens) > limit:
        assert all(any(start <= first < end for first, _ in tokens) for start, end in spans), "none is empty"


def test_chunks_end_at_sentences_where_they_fit() -> None:
    text = "One two. Three four five. Six seven eight nine ten eleven twelve."
    (tokens,) = HashEncoder().token_spans([text])
    assert [text[a:b] for a, b in chunk_spans(text, tokens, 7)] == [
        "One two. Three four five. ",
        "Six seven eight nine ten eleven twelve",
        ".",
    ]


def test_a_text_that_fits_is_one_chunk() -> None:
    assert chunk_spans("One two.", [(0, 3), (4, 7), (7, 8)], 3) == [(0, 8)]
    assert chunk_spans("", [], 3) == [(0, 0)]


def test_a_character_of_several_tokens_stays_whole() -> None:
    """Byte-level tokenizers spell a rare character in several tokens, all of the same span."""
    text = "ab\U0001f600cd"
    tokens = [(0, 1), (1, 2), (2, 3), (2, 3), (2, 3), (2, 3), (3, 4), (4, 5)]
    assert [text[a:b] for a, b in chunk_spans(text, tokens, 5)] == ["ab", "\U0001f600c", "d"]
    assert [text[a:b] for a, b in chunk_spans(text, tokens, 3)] == ["ab", "\U0001f600", "cd"]
