"""What bad input gets: an error that says which field and what was expected, nothing half added, and life goes on."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import RULES, START, HashEncoder, memory_of, talk

from zeromem_torch.config import SubstrateConfig
from zeromem_torch.evidence import Evidence
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.encoder import Encoded
from zeromem_torch.substrate.traces import Trace, ZeroMemError

TALK = talk(
    "a",
    ["I went to the lake in Oslo.", "Was it cold?", "Yes, very.", "I bought a red boat."],
    ["The boat sank.", "Oh no!"],
)
NEAR = [Trace(f"{name}/1", name, f"This is the record of {name}.") for name in ("acme", "acme-corp", "a_b", "a%")]


def ids(evidence: Evidence) -> list[str]:
    return [item.trace_id for item in evidence.main]


def still_answers(memory: ZeroMem) -> bool:
    return "a/1:4" in ids(memory.search("Who bought a red boat?", boundary="a", top_k=2))


@pytest.fixture
def memory() -> ZeroMem:
    return memory_of(*TALK, *NEAR)


# Queries that cannot be used

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("empty query", {"query": ""}, ["query", "not blank", "''"]),
    ("blank query", {"query": " \n\t"}, ["query", "not blank"]),
    ("invisible query", {"query": "\u200b\u2060"}, ["query", "not blank"]),
    ("NUL", {"query": "red\0boat"}, ["query", "without NUL", "remove"]),
    ("lone surrogate", {"query": "red \ud83d boat"}, ["query", "valid Unicode", "character 4"]),
    ("query of another type", {"query": b"boat"}, ["query", "a string", "b'boat'"]),
    ("no query", {"query": None}, ["query", "a string", "None"]),
    ("k = 0", {"top_k": 0}, ["top_k", "at least 1", "got 0"]),
    ("k < 0", {"top_k": -3}, ["top_k", "at least 1", "-3"]),
    ("k is a fraction", {"top_k": 2.5}, ["top_k", "whole number", "2.5"]),
    ("k is a text", {"top_k": "5"}, ["top_k", "whole number", "'5'"]),
    ("k is a bool", {"top_k": True}, ["top_k", "whole number", "True"]),
    ("no tokens", {"token_budget": 0}, ["token_budget", "at least 1", "got 0"]),
    ("tokens are a fraction", {"token_budget": 99.5}, ["token_budget", "whole number", "99.5"]),
    ("blank boundary", {"boundary": ""}, ["boundary", "not blank", "''"]),
    ("no boundary", {"boundary": None}, ["boundary", "user_id", "None"]),
    ("no boundaries", {"boundary": []}, ["boundary", "at least one", "[]"]),
    ("a hole in the path", {"boundary": "a//b"}, ["boundary", "segments that are not empty", "'a//b'"]),
    ("k of relevance", {"min_score": 5}, ["min_score", "a cosine from -1 to 1", "5"]),
    ("filter unknown", {"filters": {"speker": "Ann"}}, ["filters", "did you mean 'speaker'"]),
    ("moment", {"as_of": "soon"}, ["time", "ISO 8601", "'soon'"]),
    ("time as a text", {"reference_time": "2023-05-08"}, ["reference_time", "a datetime", "parse_time"]),
    ("time as a number", {"reference_time": 1683554160}, ["reference_time", "a datetime", "parse_time"]),
]


@pytest.mark.parametrize(("given", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_searches(memory: ZeroMem, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ZeroMemError) as error:
        memory.search(**{"query": "boat", "boundary": "a", **given})
    assert [word for word in words if word not in str(error.value)] == []
    assert still_answers(memory)


BATCHES: list[tuple[str, Callable[[ZeroMem], object], list[str]]] = [
    ("a text", lambda m: m.search_batch("boat", boundaries=["a"] * 4), ["queries", "a list"]),
    ("one boundary", lambda m: m.search_batch(["boat"], boundaries="a"), ["boundaries", "a list"]),
    ("nothing", lambda m: m.search_batch(None, boundaries=["a"]), ["queries", "a list"]),  # type: ignore[arg-type]
    ("fewer boundaries", lambda m: m.search_batch(["boat", "lake"], boundaries=["a"]), ["boundaries", "2", "got 1"]),
    (
        "fewer times",
        lambda m: m.search_batch(["boat", "lake"], boundaries=["a", "a"], reference_times=[None]),
        ["reference_times", "2", "got 1"],
    ),
    (
        "one bad of many",
        lambda m: m.search_batch(["boat", " "], boundaries=["a", "acme"]),
        ["query", "not blank"],
    ),
]


@pytest.mark.parametrize(("ask", "words"), [row[1:] for row in BATCHES], ids=[row[0] for row in BATCHES])
def test_refused_batches(memory: ZeroMem, ask: Callable[[ZeroMem], object], words: list[str]) -> None:
    with pytest.raises(ZeroMemError) as error:
        ask(memory)
    assert [word for word in words if word not in str(error.value)] == []
    assert still_answers(memory)


@pytest.mark.parametrize("boundary", ["zebra", "acme-crop", "ACME", "a_b ", "zebra/"])
def test_nothing_is_found_where_nothing_was_stored(memory: ZeroMem, boundary: str) -> None:
    """A new user's memory is empty, which is no error; and no name of another's is offered instead."""
    found = memory.search("boat", boundary=boundary)
    assert not found.found
    assert found.boundary == boundary
    assert found.reasons == ("nothing is there",)
    assert not found.main
    assert found.tokens == 0


def test_an_empty_memory_finds_nothing() -> None:
    memory = memory_of()
    assert memory
    assert not memory.search("boat", boundary="a")
    assert memory.add([]) == []
    assert memory.search_batch([], boundaries=[]) == []
    memory.add(TALK)
    assert still_answers(memory)


# Traces that cannot be used: none of the call is added

FRESH = Trace("fresh/1", "fresh", "Something new.")
GOOD = {"id": "x", "boundary": "b", "text": "boat"}
UNUSABLE: list[tuple[str, Any, list[str]]] = [
    ("nothing", None, ["messages", "a list", "None"]),
    ("a number", 5, ["messages", "a list", "5"]),
    ("a text of nobody", "I bought a boat.", ["boundary", "user_id"]),
    ("a hole", [FRESH, None], ["message", "a mapping", "None"]),
    ("a text of nobody in the list", [FRESH, "boat"], ["boundary", "user_id"]),
    ("no boundary", [FRESH, {"id": "x", "text": "boat"}], ["boundary", "user_id"]),
    ("a hole in the path", [FRESH, {"id": "x", "text": "boat", "boundary": "a/"}], ["boundary", "not empty", "'a/'"]),
    ("ends before its start", [FRESH, {**GOOD, "valid_from": 1704067200, "valid_to": 1672531200}], ["valid_to"]),
    ("blank text", [FRESH, {"id": "x", "boundary": "b", "text": " "}], ["'x'", "text", "not blank"]),
    ("blank id", [FRESH, {"id": "", "boundary": "b", "text": "boat"}], ["id", "not blank"]),
    ("blank boundary", [FRESH, {"id": "x", "boundary": "\t", "text": "boat"}], ["'x'", "boundary", "not blank"]),
    ("NUL", [FRESH, {"id": "x", "boundary": "b", "text": "bo\0at"}], ["'x'", "text", "NUL"]),
    ("surrogate", [FRESH, {"id": "x", "boundary": "b", "text": "bo\udc00at"}], ["'x'", "text", "valid Unicode"]),
    ("surrogate in a name", [FRESH, {"id": "x", "boundary": "b\ud800", "text": "boat"}], ["boundary", "valid Unicode"]),
    ("unknown field", [FRESH, {"id": "x", "boundary": "b", "txt": "boat"}], ["txt", "did you mean 'text'"]),
    ("no date", [FRESH, {"id": "x", "boundary": "b", "text": "boat", "time": "soon"}], ["time", "'soon'", "ISO 8601"]),
    ("other trace, same id", [FRESH, dataclasses.replace(TALK[0], text="Other.")], ["id", "a/1:1", "overwrite=True"]),
    ("twice in one call", [FRESH, dataclasses.replace(FRESH, text="Other.")], ["id", "fresh/1", "another id"]),
]


@pytest.mark.parametrize(("given", "words"), [row[1:] for row in UNUSABLE], ids=[row[0] for row in UNUSABLE])
def test_refused_traces(memory: ZeroMem, given: Any, words: list[str]) -> None:
    before = memory.search("Who bought a red boat?", boundary="a")
    with pytest.raises(ZeroMemError) as error:
        memory.add(given)
    assert [word for word in words if word not in str(error.value)] == []
    assert len(memory) == len(TALK) + len(NEAR)
    assert "fresh" not in memory.boundaries
    assert memory.search("Who bought a red boat?", boundary="a") == before
    assert memory.add(FRESH) == ["fresh/1"]
    assert ids(memory.search("new", boundary="fresh")) == ["fresh/1"]


def test_the_same_trace_again_is_no_change(memory: ZeroMem) -> None:
    assert memory.add([TALK[0], TALK[0], *TALK]) == [t.id for t in (TALK[0], TALK[0], *TALK)]
    assert len(memory) == len(TALK) + len(NEAR)
    assert still_answers(memory)


# Encoders that cannot be trusted


def bent(encoded: Encoded, name: str, value: Tensor) -> Encoded:
    """Changed behind the back of what checks shapes in tests."""
    object.__setattr__(encoded, name, value)
    return encoded


FLAWS: list[tuple[str, Callable[[Encoded], Encoded], list[str]]] = [
    ("NaN", lambda e: bent(e, "vectors", e.vectors * torch.nan), ["encoder, vectors", "finite", "NaN"]),
    ("infinity", lambda e: bent(e, "states", e.states / 0), ["encoder, states", "finite", "infinity"]),
    ("wrong dim", lambda e: bent(e, "vectors", e.vectors[:, :5]), ["encoder, vectors", "64", "5"]),
    ("one too few", lambda e: bent(e, "vectors", e.vectors[1:]), ["encoder, vectors", "the shape"]),
    ("a state too few", lambda e: bent(e, "states", e.states[1:]), ["encoder, states", "the shape"]),
]


@pytest.mark.parametrize(("flaw", "words"), [row[1:] for row in FLAWS], ids=[row[0] for row in FLAWS])
def test_an_encoder_that_errs_is_named(flaw: Callable[[Encoded], Encoded], words: list[str]) -> None:
    encoder = Moody()
    memory = memory_of(*TALK, encoder=encoder)
    for _ in ("building", "asking"):
        encoder.flaw = flaw
        with pytest.raises(ZeroMemError) as error:
            memory.search("boat", boundary="a")
        assert [word for word in (*words, "hash-1") if word not in str(error.value)] == []
        encoder.flaw = None
        assert still_answers(memory)


class Moody(HashEncoder):
    """Errs while it has a flaw."""

    flaw: Callable[[Encoded], Encoded] | None = None

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        encoded = super().encode(texts, states=states)
        return self.flaw(encoded) if self.flaw else encoded


# Unusual, and welcome


@pytest.mark.parametrize("k", [1, 5, 6, 7, 1000, 10**12])
def test_k_may_exceed_what_there_is(memory: ZeroMem, k: int) -> None:
    assert len(memory.search("boat", boundary="a", top_k=k).main) == min(k, len(TALK))


def test_any_number_of_tokens_may_be_handed_over(memory: ZeroMem) -> None:
    assert memory.search("boat", boundary="a", token_budget=1).items == []
    assert len(memory.search("boat", boundary="a", token_budget=10**30).items) == len(TALK)


WELCOME = [
    ("all stop words", "the of and to", "a/1:1"),
    ("a question of stop words", "Was it?", "a/1:2"),
    ("another script", "Где красная лодка?", None),
    ("no spaces", "赤いボートはどこですか", None),
    ("right to left", "أين القارب الأحمر؟", None),
    ("emoji only", "🚣", None),
    ("emoji with joiners", "👩‍🚀🏽🏳️‍🌈", None),
    ("punctuation only", "?!...", None),
    ("a combining mark alone", "\u0301", None),
    ("digits", "1234567890", None),
    ("markup", "<b>boat</b> & \\n %s {0}", None),
    ("an SQL line", "'; DROP TABLE traces; --", None),
    ("no entity anywhere", "what happened then", None),
    ("very long", "Who bought a red boat? " * 5_000, None),
    ("one long word", "boat" * 50_000, None),
]


@pytest.mark.parametrize(("query", "first"), [row[1:] for row in WELCOME], ids=[row[0] for row in WELCOME])
def test_welcome_queries(memory: ZeroMem, query: str, first: str | None) -> None:
    began = time.perf_counter()
    evidence = memory.search(query, boundary="a", top_k=6)
    assert time.perf_counter() - began < 20
    assert sorted(ids(evidence)) == sorted(trace.id for trace in TALK)
    assert all(-10 < item.score < 10 for item in evidence.items)  # NaN fails both
    assert first is None or ids(evidence)[0] == first
    assert still_answers(memory)


@pytest.mark.parametrize(
    "texts",
    [
        ["The only turn."],
        ["same words"] * 9,
        ["the of and"] * 3,
        ["?"] * 3,
        ["🚣", "🚣🚣", "👩‍🚀"],
        ["\u0301", "\u0301\u0302"],
        ["it was then so", "and so it was", "we did that"],
        ["船はどこですか", "لا أعرف", "Где лодка?"],
        ["x", "...", "1"],
    ],
    ids=["one turn", "all equal", "stop words", "punctuation", "emoji", "marks", "no entity", "scripts", "signs"],
)
@pytest.mark.parametrize("spoken", [True, False], ids=["talk", "documents"])
@pytest.mark.parametrize("query", ["Where is the boat?", "🚣", "the of"])
def test_welcome_records(texts: list[str], spoken: bool, query: str) -> None:
    traces = talk("b", texts) if spoken else [Trace(f"b/{i}", "b", text) for i, text in enumerate(texts)]
    evidence = memory_of(*traces).search(query, boundary="b", top_k=len(texts))
    assert sorted(ids(evidence)) == sorted(trace.id for trace in traces)
    assert all(-10 < item.score < 10 for item in evidence.items)
    if not spoken and len(set(texts)) == 1:
        assert ids(evidence) == [trace.id for trace in traces]


def filler(megabyte: int = 1_000_000) -> str:
    """A megabyte of sentences with names, dates and quotes in them."""
    sentences = (
        f'On {1 + n % 28} May {1990 + n % 30} Ann Lee told the New York Club of "Number {n}": it rained. '
        for n in range(megabyte // 60)
    )
    return "".join(sentences)[:megabyte]


@pytest.mark.parametrize(
    "text",
    [filler(), "x" * 1_000_000, "船" * 333_000, "word\n" * 200_000, '"' * 1_000_000],
    ids=["sentences", "one word", "no spaces", "lines", "quotes"],
)
def test_a_megabyte_is_cut_into_chunks_and_found_at_its_end(text: str) -> None:
    end = "\nThe wombat password is quokka, quokka."
    long = Trace("big/2", "a", text + end, session="s", order=2, time=START, speaker="Ann")
    short = [Trace(f"big/{n}", "a", f"Nothing {n}.", session="s", order=n, time=START, speaker="Bo") for n in (1, 3)]
    encoder = HashEncoder(max_tokens=48)
    began = time.perf_counter()
    memory = memory_of(short[0], long, short[1], encoder=encoder)
    (item,) = memory.search("What is the wombat password?", boundary="a", top_k=1).main
    assert time.perf_counter() - began < 30
    assert item.trace_id == "big/2"
    assert item.text == long.text[item.start : item.end]
    assert item.end == len(long.text)
    assert "quokka" in item.text
    assert item.tokens <= 2 * encoder.max_tokens
    chunks = [part for call in encoder.calls for part in call]
    assert max(len(spans) for spans in encoder.token_spans(chunks)) <= encoder.max_tokens


def test_a_long_turn_with_a_tagger() -> None:
    config = dataclasses.replace(RULES, substrate=SubstrateConfig(entities="spacy"))
    text = filler(20_000) + " The wombat password is quokka, quokka."
    memory = memory_of(*talk("a", ["Nothing.", text, "Nothing else."]), config=config)
    (item,) = memory.search("What is the wombat password?", boundary="a", top_k=1).main
    assert item.end == len(text)


def test_sessions_out_of_order_are_put_in_order() -> None:
    shuffled = [TALK[i] for i in (4, 1, 5, 3, 0, 2)]
    expected = memory_of(*TALK).search("What happened to the boat?", boundary="a")
    assert memory_of(*shuffled).search("What happened to the boat?", boundary="a") == expected


def test_naive_and_aware_times_mix() -> None:
    east = timezone(timedelta(hours=9))
    aware = [datetime(2023, 5, 8, 11, tzinfo=UTC), datetime(2023, 5, 8, 21, tzinfo=east)]
    times = [datetime(2023, 5, 8, 10), *aware, None]
    traces = [
        Trace(f"t{n}", "b", f"Entry {n} about the boat.", session=f"s{n}", time=time) for n, time in enumerate(times)
    ]
    memory = memory_of(*traces)
    for reference in (None, datetime(2023, 5, 9), datetime(2023, 5, 9, tzinfo=east)):
        evidence = memory.search("What of the boat yesterday?", boundary="b", reference_time=reference)
        assert sorted(ids(evidence)) == ["t0", "t1", "t2", "t3"]
    found = {item.trace_id: item.time for item in evidence.main}
    assert found["t0"] == datetime(2023, 5, 8, 10, tzinfo=UTC)
    assert found["t2"] == datetime(2023, 5, 8, 12, tzinfo=UTC)
    assert found["t3"] is None


DATES = {
    "LoCoMo": "1:56 pm on 8 May, 2023",
    "LongMemEval": "2023/05/08 (Mon) 13:56",
    "ISO": "2023-05-08T13:56:00+00:00",
    "ISO elsewhere": "2023-05-08T15:56:00+02:00",
    "ISO without a zone": "2023-05-08 13:56",
    "seconds": 1683554160,
    "milliseconds": 1683554160000,
    "seconds as text": "1683554160",
}


def test_dates_of_every_form_are_the_same_moment() -> None:
    memory = memory_of()
    for number, (form, value) in enumerate(DATES.items()):
        memory.add({"id": form, "boundary": "b", "text": f"Note {number}.", "session": form, "time": value})
    memory.add({"id": "other", "boundary": "b", "text": "Note.", "session": "other", "time": "2022-01-01"})
    evidence = memory.search("What was noted on 8 May 2023?", boundary="b", top_k=9)
    assert {item.trace_id for item in evidence.main if item.time == START} == set(DATES)
    assert evidence.main[-1].trace_id == "other"


def test_boundaries_with_names_alike_are_apart(memory: ZeroMem) -> None:
    for trace in NEAR:
        evidence = memory.search("This is the record of acme a_b a% acme-corp.", boundary=trace.boundary, top_k=99)
        assert ids(evidence) == [trace.id]
    assert len(memory.search("record", boundary="a", top_k=99).main) == len(TALK)
