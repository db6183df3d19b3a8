"""Forward rows: each is its trace's alone, whatever it is read, stored, moved or appended with."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from toys import HashEncoder, talk

from zeromem_torch.config import SubstrateConfig
from zeromem_torch.substrate.entities import EntityExtractor, Mention, RuleExtractor
from zeromem_torch.substrate.forward import DTYPES, RAGGED, Forward, Growing, encoded_texts, entries, read_traces
from zeromem_torch.substrate.graph import TitlesFound
from zeromem_torch.substrate.memory import Memory, assemble
from zeromem_torch.substrate.traces import Trace, ZeroMemError
from zeromem_torch.substrate.units import order_turns

RULES = SubstrateConfig(entities="rules")
SIZES = (0, 1, 7, 129)
WORDS = "the Oslo boat Lom red Ann Mjosa lake in 2023 was bought Bergen on 5 May".split()
TITLES = ("", "Mjosa", "Lom", "Red Boat", "Oslo (city)")


def some_traces(count: int, first: int = 0) -> list[Trace]:
    """Turns and titled documents that share names, from a small pool of words."""
    return [
        Trace(
            id=str(number),
            boundary="b",
            text=" ".join(WORDS[(number * step + step * step) % len(WORDS)] for step in range(1, 4 + number % 9)) + ".",
            session="" if number % 5 == 4 else f"s{number // 6}",
            order=number,
            speaker="" if number % 5 == 4 else ("Ann", "Bo")[number % 2],
            title=TITLES[number % 7] if number % 5 == 4 and number % 7 < 5 else "",
        )
        for number in range(first, first + count)
    ]


def read(traces: Sequence[Trace], encoder: HashEncoder | None = None, config: SubstrateConfig = RULES) -> Forward:
    extractor = RuleExtractor()
    return read_traces(traces, encoder or HashEncoder(), lambda _: extractor, config)


def equal(one: Forward, other: Forward) -> bool:
    return not one.differences(other, 0.0)


@pytest.mark.parametrize("count", SIZES)
def test_a_row_is_the_same_alone_and_among_others(count: int) -> None:
    traces = some_traces(count)
    whole = read(traces)
    assert whole.rows == count
    assert whole.differences(Forward.cat([read([trace]) for trace in traces] or [Forward.empty(64)]), 1e-6) == []
    assert equal(whole, read(traces))
    for axis, held in zip(RAGGED, whole.counts.T, strict=True):
        assert whole.row_of(axis).tolist() == [row for row, n in enumerate(held.tolist()) for _ in range(n)]


@pytest.mark.parametrize("count", SIZES)
def test_rows_can_be_taken_in_any_order(count: int) -> None:
    traces = some_traces(count)
    whole = read(traces)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    taken = whole.take(order)
    assert equal(taken, Forward.cat([whole.take(order[[i]]) for i in range(count)] or [whole]))
    assert equal(taken.take(order.argsort()), whole)
    assert whole.take(torch.tensor([], dtype=torch.long)).rows == 0
    if count:
        twice = whole.take(torch.tensor([0, 0]))
        assert equal(twice, Forward.cat([whole.take(torch.tensor([0]))] * 2))


def test_entries_of_rows() -> None:
    assert entries(torch.tensor([2, 0, 3]), torch.tensor([2, 1, 0])).tolist() == [2, 3, 4, 0, 1]


@pytest.mark.parametrize("step", [1, 7, 50])
def test_appended_rows_are_those_of_one_call(step: int) -> None:
    whole = read(some_traces(129))
    grown = Growing(Forward.empty(64))
    seen = []
    for start in range(0, 129, step):
        grown.append(whole.take(torch.arange(start, min(start + step, 129))))
        seen.append(grown.forward)
    assert grown.rows == 129
    assert equal(grown.forward, whole)
    for early in seen:  # what was handed out is not changed by what came later
        assert equal(early, whole.take(torch.arange(early.rows)))


def test_appending_moves_a_row_only_a_few_times() -> None:
    rows, grown = read(some_traces(1)), Growing(Forward.empty(64))
    moved, held = 0, 0
    for _ in range(1000):
        before = grown.forward.chunk_vector.data_ptr()
        grown.append(rows)
        if grown.forward.chunk_vector.data_ptr() != before:
            moved += held
        held += 1
    assert moved < 3 * held


def test_tensors_from_elsewhere_are_checked() -> None:
    rows = read(some_traces(7))
    given = rows.tensors()
    assert set(given) == set(DTYPES)
    assert equal(Forward.of_tensors(given), rows)
    wrong = [
        {name: tensor for name, tensor in given.items() if name != "state"},
        {**given, "more": given["kinds"]},
        {**given, "kinds": given["kinds"].float()},
        {**given, "kinds": given["kinds"][:-1]},
        {**given, "state": given["state"][1:]},
        {**given, "counts": given["counts"][:, 1:]},
        {**given, "counts": -given["counts"]},
    ]
    for tensors in wrong:
        with pytest.raises(ZeroMemError, match=r"index row.*expected.*make it anew"):
            Forward.of_tensors(tensors)


def test_differences_are_named() -> None:
    rows = read(some_traces(7))
    moved = dataclasses.replace(rows, chunk_vector=rows.chunk_vector + 1e-3, kinds=rows.kinds + 1)
    assert rows.differences(moved, 1e-2) == ["kinds"]
    assert rows.differences(moved, 1e-4) == ["kinds", "chunk_vector"]
    assert "counts" in rows.differences(read(some_traces(8)), 1.0)
    blank = dataclasses.replace(rows, chunk_vector=rows.chunk_vector * torch.nan)
    assert rows.differences(blank, 1e9) == ["chunk_vector"]


def test_each_trace_is_read_by_its_own_extractor() -> None:
    class Fixed:
        def __init__(self, key: str) -> None:
            self.fingerprint, self.calls = key, 0

        def extract(self, texts: Sequence[str]) -> list[list[Mention]]:
            self.calls += 1
            return [[Mention(0, 1, self.fingerprint, "NAME")] for _ in texts]

    spoken, written = Fixed("a"), Fixed("b")

    def choose(trace: Trace) -> EntityExtractor:
        return spoken if trace.speaker else written

    traces = some_traces(20)
    rows = read_traces(traces, HashEncoder(), choose, RULES)
    keys = rows.mention_key.tolist()
    assert [keys[i] == keys[0] for i in range(20)] == [bool(trace.speaker) for trace in traces]
    assert (spoken.calls, written.calls) == (1, 1)


def test_what_an_encoder_was_given() -> None:
    encoder = HashEncoder(max_tokens=12)
    traces = [*some_traces(3), Trace("long", "b", "One two three four. " * 9, speaker="Ann")]
    read(traces, encoder)
    assert encoder.calls == [encoded_texts(traces, encoder)]


# Memories assembled from rows that came in parts


def assembled(traces: Sequence[Trace], rows: Forward, found: TitlesFound | None = None) -> Memory:
    turns = order_turns(traces)
    return assemble("b", turns, rows.take(turns.source), RULES, found)


def test_a_memory_that_grew_is_the_one_built_at_once() -> None:
    """Titles come and go, and one-word titles turn to common words and back; what is kept of them must not be stale."""
    traces = some_traces(90)
    small = [
        Trace(f"small/{n}", "b", "The lom and the mjosa lie low, mjosa, lom, lom.", session="small", order=n)
        for n in range(40)
    ]
    found = TitlesFound()
    for stage in (traces[:1], traces[:30], traces[:60], traces, [*traces, *small], traces[20:], small, traces[::2]):
        rows = read(stage)
        assert assembled(stage, rows, found).same_as(assembled(stage, rows))


def test_titles_are_looked_for_again_only_where_they_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeromem_torch.substrate.graph import Gazetteer

    looked: list[str] = []
    find = Gazetteer.find_starts

    def seen(self: Gazetteer, text: str) -> list[tuple[int, tuple[str, ...]]]:
        looked.append(text)
        return find(self, text)

    monkeypatch.setattr(Gazetteer, "find_starts", seen)
    texts = ["Oslo is far.", "The Mjosa is deep.", "Nothing here.", "Old Harbour is old."]
    traces = [Trace(str(n), "b", text, title=("Oslo", "", "", "")[n]) for n, text in enumerate(texts)]
    found = TitlesFound()
    assembled(traces, read(traces), found)
    assert looked == texts
    looked.clear()
    more = [*traces, Trace("new", "b", "It is deep.", title="Old Harbour")]
    assembled(more, read(more), found)
    assert sorted(looked) == ["It is deep.", "Old Harbour is old."]


def test_order_of_sessions_and_boundaries() -> None:
    """Sessions of one name in two boundaries are two, and traces that tie keep the order they came in."""
    traces = [*talk("a", ["One.", "Two."]), *talk("b", ["Three.", "Four."])]
    turns = order_turns(traces)
    assert turns.sessions == 2
    assert [traces[i] for i in turns.source.tolist()] == list(turns.traces)
    assert turns.session.tolist() == [0, 0, 1, 1]
