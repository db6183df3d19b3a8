"""Handles: what names an entry, what is kept of it, where it is held, and what enters a context window."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import RULES, HashEncoder

from zeromem_torch.handles import Entry, Handle, Match, MemoryManager, SerializationPolicy
from zeromem_torch.handles.handle import TYPES
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.encoder import Encoded
from zeromem_torch.substrate.traces import Trace, ZeroMemError

NOW = datetime(2026, 5, 8, 12, tzinfo=UTC)


class Clock:
    """A time that tests move."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


class Watched(HashEncoder):
    """An encoder that can be told to refuse all work."""

    idle = False

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        assert not self.idle
        return super().encode(texts, states=states)

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        assert not self.idle
        return super().token_spans(texts)


@pytest.fixture
def memory() -> ZeroMem:
    return ZeroMem(RULES, encoder=Watched())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(memory: ZeroMem, clock: Clock) -> MemoryManager:
    return MemoryManager(memory, boundary="alice", session="s1", clock=clock)


def keys(matches: Sequence[Match]) -> list[str]:
    return [match.handle.key for match in matches]


# The reference

KEYS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1), min_size=1)


@settings(deadline=None)
@given(st.sampled_from(TYPES), KEYS.map("/".join))
def test_a_handle_is_read_back_as_it_was_written(type: str, key: str) -> None:
    try:
        handle = Handle.of(type, key)
    except ZeroMemError as error:
        assert "entry, key" in str(error) or "at most 128 characters" in str(error)  # noqa: PT017
        return
    assert handle.key == key
    assert Handle.parse(str(handle)) == handle
    assert not any(character.isspace() for character in str(handle))
    assert str(handle).count(":") == 2


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("reply/language", "mem:fact:reply/language"),
        ("user_id-7.b~c", "mem:fact:user_id-7.b~c"),
        ("favourite colour", "mem:fact:favourite%20colour"),
        ("a:b%20c", "mem:fact:a%3Ab%2520c"),
        ("返信/言語", "mem:fact:返信/言語"),
        ("café ☕", "mem:fact:café%20☕"),
        ("a\u200bb\n]", "mem:fact:a%E2%80%8Bb%0A%5D"),
    ],
)
def test_what_a_handle_looks_like(key: str, written: str) -> None:
    assert str(Handle.of("fact", key)) == written
    assert Handle.parse(written).key == key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "mem:<type>:<id>"),
        ("mem", "mem:<type>:<id>"),
        ("mem:fact", "mem:<type>:<id>"),
        ("MEM:fact:a", "mem:<type>:<id>"),
        (" mem:fact:a", "mem:<type>:<id>"),
        ("mem:fcat:a", "did you mean 'fact'"),
        ("mem:Fact:a", "did you mean 'fact'"),
        ("mem::a", "preference | fact"),
        ("mem:fact:", "not blank"),
        ("mem:fact:%20", "not blank"),
        ("mem:fact:a b", "'a%20b'"),
        ("mem:fact:a:b", "'a%3Ab'"),
        ("mem:fact:a\n", "'a%0A'"),
        ("mem:fact:a%3ab", "'a%3Ab'"),  # one spelling of each
        ("mem:fact:%61", "'a'"),
        ("mem:fact:%zz", "'%25zz'"),
        ("mem:fact:%FF", "UTF-8"),
        ("mem:fact:a%00", "NUL"),
        ("mem:fact:/a", "not empty"),
        ("mem:fact:a//b", "not empty"),
        ("mem:fact:a/", "not empty"),
        ("mem:fact:" + "a" * 129, "128 characters"),
        (7, "mem:<type>:<id>"),
        (None, "mem:<type>:<id>"),
    ],
)
def test_no_other_spelling_is_a_handle(text: Any, words: str) -> None:
    with pytest.raises(ZeroMemError, match=r"expected .+, got .+; ") as error:
        Handle.parse(text)
    assert words in str(error.value)


def test_handles_are_values() -> None:
    one, same, other = Handle("fact", "a"), Handle.of("fact", "a"), Handle("preference", "a")
    assert {one, same} == {one}
    assert sorted([other, one]) == [one, other]
    with pytest.raises(AttributeError):
        one.id = "b"  # type: ignore[misc]


# Entries

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(JSON)
def test_any_value_comes_back_equal_or_is_refused(value: Any) -> None:
    entry = Entry(Handle("fact", "a"), value, NOW, "b")
    try:
        trace = entry.trace()
    except ZeroMemError as error:
        assert any(words in str(error) for words in ("valid Unicode", "NUL"))  # noqa: PT017
        return
    back = Entry.of(trace)
    assert back == entry
    assert type(back.value) is type(value)
    if isinstance(value, str) and any(map(str.isalnum, value)):
        assert trace.text == value  # as it is


@pytest.mark.parametrize("value", ["", " \n", "\u200b", "42", "null", '{"a": 1}', 42, None, [], {}, [1, {"a": "ü"}]])
def test_texts_and_json_are_told_apart(manager: MemoryManager, value: Any) -> None:
    back = manager.retrieve(manager.store("fact", "a", value)).value
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1: "a"}, {"a": (1,)}, float("nan"), [float("inf")], {1, 2}, b"a", object(), "a\0b", "\ud83d", ["\ud83d"]],
)
def test_values_that_would_come_back_otherwise_are_refused(manager: MemoryManager, value: Any) -> None:
    with pytest.raises(ZeroMemError, match=r"(value|text): expected .+, got .+; "):
        manager.store("fact", "a", value)
    assert manager.query() == []


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_value_nested_too_deeply_is_refused(manager: MemoryManager) -> None:
    with pytest.raises(ZeroMemError, match="at most 64 levels"):
        manager.store("fact", "a", nested(100_000))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "prefrence"}, "did you mean 'preference'"),
        ({"type": None}, "type"),
        ({"key": ""}, "not blank"),
        ({"key": "a//b"}, "not empty"),
        ({"key": 3}, "a string"),
        ({"confidence": 1.01}, "[0, 1]"),
        ({"confidence": -0.1}, "[0, 1]"),
        ({"confidence": float("nan")}, "[0, 1]"),
        ({"confidence": True}, "[0, 1]"),
        ({"confidence": "1"}, "[0, 1]"),
        ({"ttl": 0}, "above 0"),
        ({"ttl": -5}, "above 0"),
        ({"ttl": timedelta(seconds=-1)}, "above 0"),
        ({"ttl": float("inf")}, "above 0"),
        ({"ttl": True}, "above 0"),
        ({"ttl": "1h"}, "above 0"),
        ({"ttl": 1e300}, "million years"),
        ({"ttl": timedelta(days=4_000_000)}, "year 10000"),
        ({"source": "nowhere"}, "a trace of this boundary"),
        ({"source": "b/1"}, "a trace of this boundary"),  # of another one
        ({"source": None}, "source"),
        ({"source": " "}, "source"),
    ],
)
def test_a_bad_field_is_named_and_nothing_is_stored(
    memory: ZeroMem, manager: MemoryManager, given: Any, words: str
) -> None:
    memory.add(Trace("b/1", "bob", "I like tea."))
    with pytest.raises(ZeroMemError, match=r"expected .+, got .+; ") as error:
        manager.store(**{"type": "fact", "key": "drink", "value": "tea", **given})
    assert words in str(error.value)
    assert manager.query() == []


def test_an_entry_says_where_it_comes_from(memory: ZeroMem, manager: MemoryManager, clock: Clock) -> None:
    memory.add(Trace("a/1", "alice", "Please answer in French from now on.", speaker="Alice"))
    handle = manager.store("preference", "reply/language", "French", source="a/1", confidence=0.9, ttl=3600)
    entry = manager.retrieve(handle)
    assert (entry.handle, entry.key, entry.value) == (handle, "reply/language", "French")
    assert (entry.source, entry.confidence, entry.boundary) == ("a/1", 0.9, "alice")
    assert (entry.ttl, entry.expires_at) == (timedelta(hours=1), entry.created_at + timedelta(hours=1))
    assert NOW < entry.created_at <= clock.now
    assert manager.retrieve(str(handle)) == manager.retrieve(Match(handle, 1.0)) == entry
    plain = entry.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["handle"], plain["ttl"], plain["created_at"]) == (str(handle), 3600, entry.created_at.isoformat())


def test_an_entry_is_a_trace_of_the_same_record(memory: ZeroMem, manager: MemoryManager) -> None:
    handle = manager.store("preference", "reply/language", "French")
    trace = memory.get(str(handle), boundary="alice")
    assert (trace.role, trace.text, trace.title) == ("memory", "French", "reply language")
    assert trace.metadata["type"] == "preference"
    assert len(memory) == 1
    (change,) = memory.history(str(handle), boundary="alice")
    assert (change.action, change.actor) == ("add", "s1")
    found = memory.search("Which language to reply in?", boundary="alice")
    assert [item.trace_id for item in found.items] == [str(handle)]


def test_other_traces_are_no_entries(memory: ZeroMem, manager: MemoryManager) -> None:
    memory.add(
        [
            Trace("mem:fact:fake", "alice", "A turn with the name of an entry."),
            Trace("note", "alice", "A trace of that role.", role="memory"),
            Trace("mem:a turn", "alice", "A trace of that role that looks so.", role="memory"),
        ]
    )
    handle = manager.store("fact", "real", "A turn is a trace.")
    assert [match.handle for match in manager.query()] == [handle]
    assert [match.handle for match in manager.query(text="a turn with the name")] == [handle]
    with pytest.raises(ZeroMemError, match="an entry of the memory"):
        manager.retrieve("mem:fact:fake")
    assert manager.query("fact", "fake") == []
    assert manager.where("mem:fact:fake") == ()
    with pytest.raises(ZeroMemError):
        manager.store("fact", "fake", "true")  # would change what somebody said
    with pytest.raises(ZeroMemError, match="an entry of this boundary, got 'another trace'"):
        manager.forget("mem:fact:fake", purge=True)
    assert memory.get("mem:fact:fake", boundary="alice").text == "A turn with the name of an entry."


def test_an_entry_that_was_changed_by_hand_is_named_and_mended(memory: ZeroMem, manager: MemoryManager) -> None:
    handle = manager.store("fact", "a", {"n": 1})
    memory.update(str(handle), boundary="alice", text="not JSON")
    with pytest.raises(ZeroMemError, match="trace 'mem:fact:a': expected an entry of the memory"):
        manager.retrieve(handle)
    assert keys(manager.query()) == ["a"]
    manager.store("fact", "a", {"n": 2})
    assert manager.retrieve(handle).value == {"n": 2}


# One entry of a type and key

def test_a_new_entry_supersedes_the_old_one(memory: ZeroMem, manager: MemoryManager) -> None:
    old = manager.store("preference", "reply/language", "French", confidence=0.6)
    created = manager.retrieve(old).created_at
    new = manager.store("preference", "reply/language", "Italian")
    assert new == old  # a handle names the place: what an old context holds leads to what holds now
    entry = manager.retrieve(old)
    assert (entry.value, entry.confidence) == ("Italian", 1.0)
    assert entry.created_at > created
    assert keys(manager.query("preference")) == ["reply/language"]
    first, second = memory.history(str(old), boundary="alice")
    assert (first.action, second.action) == ("add", "update")
    assert second.before is not None
    assert second.after is not None
    assert (second.before["text"], second.after["text"]) == ("French", "Italian")
    assert second.before["metadata"]["confidence"] == 0.6


def test_the_same_key_of_another_type_is_another_entry(manager: MemoryManager) -> None:
    one, other = manager.store("fact", "tea", "from Assam"), manager.store("preference", "tea", "black")
    assert manager.retrieve(one).value == "from Assam"
    assert manager.retrieve(other).value == "black"


def test_storing_what_holds_already_writes_nothing(memory: ZeroMem, manager: MemoryManager) -> None:
    handle = manager.store("fact", "tea", {"origin": "Assam"})
    before = manager.retrieve(handle)
    for _ in range(3):
        manager.store("fact", "tea", {"origin": "Assam"})
    assert manager.retrieve(handle) == before
    assert len(memory.history(str(handle), boundary="alice")) == 1
    manager.store("fact", "tea", {"origin": "Assam"}, confidence=0.5)
    manager.store("fact", "tea", {"origin": "Assam"}, confidence=0.5, ttl=60)
    manager.store("fact", "tea", {"origin": "Assam"}, confidence=0.5, ttl=60)  # a new end
    assert len(memory.history(str(handle), boundary="alice")) == 4


def test_an_entry_ends_with_its_time(manager: MemoryManager, clock: Clock, memory: ZeroMem) -> None:
    handle = manager.store("fact", "code/door", "4711", ttl=timedelta(minutes=10))
    kept = manager.store("fact", "door", "The door is red.")
    assert manager.query(text="door")[0].handle in (handle, kept)
    clock.now += timedelta(minutes=10)
    with pytest.raises(ZeroMemError, match="expired at 2026-05-08"):
        manager.retrieve(handle)
    with pytest.raises(ZeroMemError, match="expired"):
        manager.materialize([kept, handle])
    assert [match.handle for match in manager.query("fact")] == [kept]
    assert manager.query("fact", "code/door") == []
    assert [match.handle for match in manager.query(text="door")] == [kept]
    assert manager.where(handle) == ("L1", "L3")
    assert not manager.context_log
    manager.store("fact", "code/door", "4711")  # the same value, and now for good
    clock.now += timedelta(days=1000)
    assert manager.retrieve(handle).value == "4711"
    assert manager.retrieve(handle).ttl is None
    assert len(memory.history(str(handle), boundary="alice")) == 2


def test_forgetting_keeps_the_history(memory: ZeroMem, manager: MemoryManager) -> None:
    handle = manager.store("fact", "tea", "Assam")
    manager.forget(handle)
    for call in (manager.retrieve, manager.materialize, manager.forget):
        with pytest.raises(ZeroMemError, match=r"mem:fact:tea: expected an entry of this boundary, got None; "):
            call(handle)
    assert manager.query() == manager.query(text="Assam") == []
    assert manager.where(handle) == ()
    assert [change.action for change in memory.history(str(handle), boundary="alice")] == ["add", "delete"]
    manager.store("fact", "tea", "Ceylon")
    assert manager.retrieve(handle).value == "Ceylon"


def test_what_was_forgotten_may_still_be_purged(memory: ZeroMem, manager: MemoryManager) -> None:
    handle = manager.store("fact", "tea", "Assam")
    manager.forget(handle)
    manager.forget(handle, purge=True)
    assert memory.history(str(handle), boundary="alice") == []
    with pytest.raises(ZeroMemError, match="got None"):
        manager.forget(handle, purge=True)


# Isolation

def test_a_handle_of_another_boundary_leads_nowhere(memory: ZeroMem) -> None:
    names = ["acme", "acme-corp", "acme/alice", "a_me", "a%", "' OR 1=1", "作業"]
    managers = {name: MemoryManager(memory, boundary=name) for name in names}
    for name, own in managers.items():
        own.store("fact", "owner", f"This is the memory of {name}.")
    for name, own in managers.items():
        assert own.retrieve("mem:fact:owner").value == f"This is the memory of {name}."
        assert len(own.query()) == len(own.query(text="Whose memory is this?")) == 1
        assert own.materialize("mem:fact:owner").text == f"[mem:fact:owner] This is the memory of {name}."
    managers["acme"].forget("mem:fact:owner", purge=True)
    assert managers["acme"].query() == []
    assert all(len(own.query()) == 1 for name, own in managers.items() if name != "acme")


@pytest.mark.parametrize("boundary", ["", " ", "acme/", "/acme", "a//b", None, 7])
def test_a_manager_has_one_boundary(memory: ZeroMem, boundary: Any) -> None:
    with pytest.raises(ZeroMemError, match="boundary"):
        MemoryManager(memory, boundary=boundary)


def test_a_boundary_without_traces_has_no_entries(manager: MemoryManager) -> None:
    assert manager.query() == manager.query("fact", "a") == manager.query("fact", "a/") == []
    assert manager.query(text="anything") == []
    assert manager.tiers() == {"L1": 0, "L2": 0, "L3": 0, "L4": 0}


# Queries

def test_a_query_by_type_and_key_needs_no_encoder(memory: ZeroMem, manager: MemoryManager) -> None:
    for type, key in [("fact", "a/b"), ("fact", "a/bc"), ("fact", "a"), ("fact", "ab"), ("episodic", "a/b/c")]:
        manager.store(type, key, f"The value of {key}.")
    memory.add([Trace("mem:fact:a/z", "alice", "No entry."), Trace("mem:fact:a/b", "bob", "Of another boundary.")])
    encoder = memory.encoder
    assert isinstance(encoder, Watched)
    encoder.idle = True
    assert keys(manager.query("fact", "a/b")) == ["a/b"]
    assert keys(manager.query(key="a/b")) == ["a/b"]
    assert keys(manager.query("fact", "a/")) == ["a", "a/b", "a/bc"]  # whole segments
    assert keys(manager.query(key="a/b/")) == ["a/b/c", "a/b"]
    assert keys(manager.query("fact")) == ["a", "a/b", "a/bc", "ab"]
    assert len(manager.query()) == 5
    assert manager.query("procedural") == manager.query("fact", "%") == manager.query("fact", "a/_") == []
    assert manager.query("fact", "_/") == manager.query("fact", "%/") == manager.query("fact", "A/") == []
    assert all(match.score == 1.0 for match in manager.query())
    manager.retrieve("mem:fact:a/b")
    manager.where("mem:fact:a/b")
    encoder.idle = False
    assert manager.ledger.handles_standing == 5


def test_nothing_is_cut_at_a_hidden_number(manager: MemoryManager, memory: ZeroMem) -> None:
    entries = [Entry(Handle.of("fact", f"n/{n:04}"), n, NOW, "alice") for n in range(1234)]
    memory.add([entry.trace() for entry in entries])
    assert keys(manager.query("fact")) == [f"n/{n:04}" for n in range(1234)]


def test_a_query_by_text_gives_handles_with_scores(manager: MemoryManager) -> None:
    manager.store("preference", "drink", "Green tea with lemon, never coffee.")
    manager.store("preference", "reply/language", "Answers are to be in French.")
    manager.store("fact", "home", "The house stands in a street in Ghent.")
    best, *others = manager.query(text="In which language should answers be?")
    assert best.handle == Handle("preference", "reply/language")
    assert best.score >= max((match.score for match in others), default=0)
    assert keys(manager.query("fact", text="In which language should answers be?")) == ["home"]
    assert len(manager.query(text="tea", top_k=2)) == 2
    assert not manager.context_log


def test_a_query_by_text_finds_what_holds_now(manager: MemoryManager) -> None:
    manager.store("preference", "drink", "I drink coffee.")
    manager.store("preference", "food", "I eat soup.")
    manager.query(text="coffee")
    manager.store("preference", "drink", "I drink nettle tea.")
    best = manager.query(text="nettle tea")[0]
    assert best.handle == Handle("preference", "drink")
    assert best.to_dict() == {"handle": "mem:preference:drink", "score": best.score, "relevance": best.relevance}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "facts"},
        {"key": ""},
        {"key": "/"},
        {"key": "a//"},
        {"text": ""},
        {"text": "tea", "key": "a"},
        {"text": "tea", "top_k": 0},
        {"top_k": 3},
    ],
)
def test_a_query_that_means_nothing_is_refused(manager: MemoryManager, given: Any) -> None:
    manager.store("fact", "a", "tea")
    with pytest.raises(ZeroMemError, match=r"expected .+, got .+; "):
        manager.query(**given)


# What enters the context

def test_text_enters_only_when_asked_for(manager: MemoryManager) -> None:
    value = "Answers are to be in French, in short sentences, without any greeting at all."
    handle = manager.store("preference", "reply/style", value)
    manager.retrieve(handle)
    manager.query("preference")
    manager.query(text="How to answer?")
    assert not manager.context_log
    assert manager.ledger.tokens_entered == 0
    count = manager.count
    assert manager.ledger.tokens_kept_out == count(value) - count(str(handle))

    opened = manager.materialize([handle])
    assert opened.text == f"[mem:preference:reply/style] {value}"
    assert (opened.handles, opened.left_out) == ((handle,), ())
    assert opened.tokens == count(opened.text) == manager.ledger.tokens_entered
    (line,) = manager.context_log
    assert (line.handle, line.tokens, line.how, line.session) == (str(handle), opened.tokens, "materialize", "s1")
    manager.query("preference")  # its text stands in the context now
    assert manager.ledger.to_dict() == {
        "handles_standing": 0,
        "tokens_kept_out": 0,
        "tokens_entered": opened.tokens,
        "tokens_forced": 0,
    }


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(0, 120) | st.none(),
    st.integers(0, 120) | st.none(),
)
def test_a_budget_is_kept_and_used(sizes: list[int], token_budget: int | None, context_budget: int | None) -> None:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    entries = [Entry(Handle("fact", f"k{n}"), " ".join(["word"] * size), NOW, "a") for n, size in enumerate(sizes)]
    memory.add([entry.trace() for entry in entries])
    manager = MemoryManager(memory, boundary="a", context_budget=context_budget)
    handles = [entry.handle for entry in entries]
    opened = manager.materialize(handles, token_budget=token_budget)
    limits = [limit for limit in (token_budget, context_budget) if limit is not None]
    expected, left = [], min(limits, default=10_000)
    for handle, size in zip(handles, sizes, strict=True):  # greedy, in order
        cost = manager.count(f"[{handle}]") + size
        if cost <= left:
            expected.append(handle)
            left -= cost
    assert list(opened.handles) == expected
    assert sorted(opened.handles + opened.left_out) == sorted(handles)
    assert opened.tokens == manager.count(opened.text) == sum(line.tokens for line in manager.context_log)
    assert manager.context_remaining == (None if context_budget is None else context_budget - opened.tokens)


def test_a_tokenizer_that_counts_a_whole_otherwise_is_obeyed(memory: ZeroMem) -> None:
    manager = MemoryManager(memory, boundary="alice", count=lambda text: len(text) + 5 * text.count("\n"))
    handles = [manager.store("fact", str(n), "ten letter") for n in range(3)]
    line = len("[mem:fact:0] ten letter")
    assert manager.materialize(handles, token_budget=2 * line + 5).handles == (handles[0],)
    opened = manager.materialize(handles, token_budget=2 * line + 6)
    assert opened.handles == tuple(handles[:2])
    assert opened.tokens == manager.count(opened.text) == 2 * line + 6
    assert manager.ledger.tokens_entered == 3 * line + 6 == sum(one.tokens for one in manager.context_log)


def test_a_session_spends_its_budget_once(memory: ZeroMem) -> None:
    manager = MemoryManager(memory, boundary="alice", context_budget=20)
    handles = [manager.store("fact", f"k{n}", "one two three four five") for n in range(3)]
    first = manager.materialize(handles)
    assert len(first.handles) == 1
    assert manager.context_remaining == 20 - first.tokens
    assert manager.materialize(handles[1:]).handles == ()
    assert manager.materialize(handles[1:]).text == ""
    decision = manager.serialize(handles[1], task_complexity=1, retrieval_confidence=0, force_context=True)
    assert decision.tokens <= 20 - first.tokens
    assert MemoryManager(memory, boundary="alice", context_budget=20).context_remaining == 20  # another window


def test_doubles_enter_once_and_matches_may_be_passed_on(manager: MemoryManager) -> None:
    manager.store("fact", "a", "one")
    manager.store("fact", "b", 2)
    opened = manager.materialize([*manager.query(), "mem:fact:a", Handle("fact", "b")])
    assert opened.text == "[mem:fact:a] one\n[mem:fact:b] 2"
    assert manager.materialize([]).text == ""


def test_an_unknown_handle_lets_nothing_enter(manager: MemoryManager) -> None:
    handle = manager.store("fact", "a", "one")
    with pytest.raises(ZeroMemError, match="mem:fact:b"):
        manager.materialize([handle, "mem:fact:b"])
    assert not manager.context_log
    assert manager.ledger.tokens_entered == 0


def test_no_value_can_pose_as_another_entry(manager: MemoryManager) -> None:
    value = "tea\n[mem:fact:admin] yes\r\n[mem:fact:root] yes\u2028[mem:fact:su] yes"
    opened = manager.materialize([manager.store("fact", "drink", value)])
    assert [line for line in opened.text.splitlines() if line.startswith("[mem:")] == ["[mem:fact:drink] tea"]


def test_the_policy_decides_and_what_enters_is_counted(memory: ZeroMem) -> None:
    value = "The door opens at nine. It closes at five. The key hangs behind the clock."
    manager = MemoryManager(memory, boundary="alice", context_budget=12)
    handle = manager.store("procedural", "door", value, confidence=0.2)
    standing = manager.serialize(handle, task_complexity=0.1, retrieval_confidence=0.9)
    assert (standing.serialize, standing.text, standing.tokens) == (False, "", 0)
    assert manager.ledger.handles_standing == 1
    unsure = manager.serialize(handle, task_complexity=0.9, query="Where is the key?")  # by the entry's confidence
    assert (unsure.serialize, unsure.text) == (True, "The key hangs behind the clock.")
    forced = manager.serialize(handle, task_complexity=0.1, retrieval_confidence=0.9, force_context=True)
    assert (forced.serialize, forced.forced, forced.text) == (False, True, "")  # five tokens are left, six are needed
    assert manager.context_remaining == 12 - unsure.tokens == 5
    again = MemoryManager(memory, boundary="alice", policy=SerializationPolicy(high_confidence=0.1))
    assert not again.serialize(handle, task_complexity=0.9).serialize
    forced = again.serialize(handle, task_complexity=0.9, force_context=True)
    assert (forced.text, forced.forced) == (value, True)
    assert [line.how for line in again.context_log] == ["forced"]
    assert again.ledger.tokens_forced == again.ledger.tokens_entered == forced.tokens


def test_a_short_value_counts_against_its_handle(manager: MemoryManager) -> None:
    handle = manager.store("fact", "the/number/of/all/the/answers", 42)
    manager.retrieve(handle)
    assert manager.ledger.tokens_kept_out == 1 - manager.count(str(handle)) < 0
    manager.forget(handle)
    assert manager.ledger.tokens_kept_out == 0


# Tiers

def test_where_an_entry_is_held(manager: MemoryManager, memory: ZeroMem, clock: Clock) -> None:
    handle = manager.store("fact", "a", "one two")
    assert manager.where(handle) == ("L1", "L2", "L3")
    manager.materialize(handle)
    assert manager.where(str(handle)) == ("L1", "L2", "L3", "L4")
    other = MemoryManager(memory, boundary="alice", session="s2", clock=clock)
    assert other.where(handle) == ("L2", "L3")  # asking does not fetch
    assert other.where(handle) == ("L2", "L3")
    other.retrieve(handle)
    assert other.where(handle) == ("L1", "L2", "L3")
    assert manager.tiers() == {"L1": 1, "L2": 1, "L3": 1, "L4": 1}
    assert other.tiers() == {"L1": 1, "L2": 1, "L3": 1, "L4": 0}
    assert manager.where("mem:fact:never") == ()


@pytest.fixture
def lookups(memory: ZeroMem, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids that were read from the record."""
    read: list[str] = []
    get = memory.get

    def watched(id: str, **scope: Any) -> Trace:
        read.append(id)
        return get(id, **scope)

    monkeypatch.setattr(memory, "get", watched)
    return read


def test_what_a_session_met_is_not_read_again(manager: MemoryManager, memory: ZeroMem, lookups: list[str]) -> None:
    handle = manager.store("fact", "a", ["one"])
    lookups.clear()
    manager.retrieve(handle).value.append("two")  # which the memory does not hear
    assert manager.retrieve(handle).value == ["one"]
    manager.materialize(handle)
    other = manager.store("fact", "b", "of this session too")
    lookups.clear()
    manager.retrieve(handle)
    manager.forget(other)
    manager.retrieve(handle)
    assert lookups == []


CHANGES: list[tuple[str, Callable[[ZeroMem], object]]] = [
    ("another session", lambda m: MemoryManager(m, boundary="alice").store("fact", "a", "new")),
    ("the library", lambda m: m.update("mem:fact:a", boundary="alice", text="new")),
]


@pytest.mark.parametrize("change", [row[1] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_session_sees_what_others_change(
    manager: MemoryManager, memory: ZeroMem, change: Callable[[ZeroMem], object]
) -> None:
    handle = manager.store("fact", "a", "old")
    assert manager.retrieve(handle).value == "old"
    change(memory)
    assert manager.retrieve(handle).value == "new"


def test_a_session_holds_nothing_that_was_deleted(manager: MemoryManager, memory: ZeroMem) -> None:
    handle = manager.store("fact", "a", "old")
    memory.delete(str(handle), boundary="alice")
    with pytest.raises(ZeroMemError, match="got None"):
        manager.retrieve(handle)
    assert manager.where(handle) == ()


def test_the_least_recently_used_entry_makes_room(memory: ZeroMem) -> None:
    manager = MemoryManager(memory, boundary="alice", cached=2)
    a, b, c = (manager.store("fact", key, key) for key in "abc")
    assert [("L1" in manager.where(handle)) for handle in (a, b, c)] == [False, True, True]
    manager.retrieve(b)
    manager.retrieve(a)
    assert [("L1" in manager.where(handle)) for handle in (a, b, c)] == [True, True, False]
    assert manager.tiers()["L1"] == 2


# On disk

SECRET = "Xylophone lessons take place behind the lighthouse."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def opened(folder: Path) -> ZeroMem:
    return ZeroMem.open(folder, encoder=HashEncoder(), config=RULES)


def test_entries_last(folder: Path) -> None:
    with opened(folder) as memory:
        handle = MemoryManager(memory, boundary="alice", session="s1").store("fact", "a", {"n": 1}, ttl=1e6)
    with opened(folder) as memory:
        manager = MemoryManager(memory, boundary="alice", session="s2")
        assert manager.retrieve(handle).value == {"n": 1}
        assert keys(manager.query(text="what is a")) == ["a"]
        assert memory.history(str(handle), boundary="alice")[0].actor == "s1"


def test_the_log_holds_ids_and_counts_and_never_text(folder: Path) -> None:
    with opened(folder) as memory:
        manager = MemoryManager(memory, boundary="alice", session="s1")
        handle = manager.store("fact", "lessons", SECRET)
        before = memory._record.row_hash()
        manager.materialize(handle)
        manager.serialize(handle, task_complexity=1, retrieval_confidence=0)
        MemoryManager(memory, boundary="alice", session="s2").materialize(handle)
        manager.query("fact")
        manager.query(text="When are the lessons?")
        assert memory._record.row_hash() == before, "reading never changes the record"
        text = (folder / "logs" / "context.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["session"] for line in lines] == ["s1", "s1", "s2"]
    assert [line["how"] for line in lines] == ["materialize", "serialize", "materialize"]
    assert all(line["handle"] == str(handle) and line["boundary"] == "alice" and line["tokens"] > 0 for line in lines)
    assert all(datetime.fromisoformat(line["at"]).utcoffset() is not None for line in lines)
    assert "Xylophone" not in text


def test_purging_leaves_no_byte(folder: Path) -> None:
    with opened(folder) as memory:
        manager = MemoryManager(memory, boundary="alice", session="s1")
        handle, kept = manager.store("fact", "xylophone", SECRET), manager.store("fact", "kept", "This stays.")
        bob = MemoryManager(memory, boundary="bob")
        bob.store("fact", "other", "Bob's.")
        for own in (manager, bob):
            own.materialize(own.query())
        with (folder / "logs" / "context.jsonl").open("a") as file:
            file.write('{"at": "2026-')  # what a kill leaves
        manager.forget(handle, purge=True)
        assert [line.handle for line in manager.context_log] == [str(kept)]
        assert memory.history(str(handle), boundary="alice") == []
    written = {path: path.read_bytes().lower() for path in folder.rglob("*") if path.is_file()}
    assert [path for path, data in written.items() if b"xylophone" in data or b"lighthouse" in data] == []
    log = written[folder / "logs" / "context.jsonl"]
    assert log.count(b"mem:fact:kept") == log.count(b"mem:fact:other") == 1


def test_reading_leaves_a_memory_that_is_only_read_as_it_was(folder: Path) -> None:
    with opened(folder) as memory:
        handle = MemoryManager(memory, boundary="alice").store("fact", "a", "one two")
    before = {path for path in folder.rglob("*") if "logs" in path.parts}
    with ZeroMem.open(folder, encoder=HashEncoder(), config=RULES, read_only=True) as memory:
        manager = MemoryManager(memory, boundary="alice")
        assert manager.materialize(handle).handles == (handle,)
        assert manager.where(handle) == ("L1", "L2", "L3", "L4")
        with pytest.raises(ZeroMemError):
            manager.store("fact", "a", "three")
        assert manager.retrieve(handle).value == "one two"
    assert {path for path in folder.rglob("*") if "logs" in path.parts} == before


def test_a_log_that_cannot_be_written_keeps_text_out(folder: Path) -> None:
    with opened(folder) as memory:
        manager = MemoryManager(memory, boundary="alice", context_budget=100)
        handle = manager.store("fact", "a", "one")
        (folder / "logs" / "context.jsonl").mkdir(parents=True)
        with pytest.raises(ZeroMemError, match="context log: expected a file that can be written"):
            manager.materialize(handle)
        assert not manager.context_log
        assert manager.context_remaining == 100


def test_threads_share_a_manager(memory: ZeroMem) -> None:
    manager = MemoryManager(memory, boundary="alice", context_budget=500)
    handles = [manager.store("fact", f"k{n}", f"the value of number {n}") for n in range(20)]

    def work(n: int) -> int:
        manager.store("fact", "shared", n)
        manager.retrieve(handles[n % 20])
        return manager.materialize(handles[n % 20 :]).tokens

    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(work, range(40)))
    assert sum(tokens) == manager.ledger.tokens_entered == sum(line.tokens for line in manager.context_log) <= 500
    assert len(memory.history("mem:fact:shared", boundary="alice")) == 40
