"""The serialization boundary: over the whole grid, what may enter a context, how much, and of what."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromem_torch.handles import Entry, Handle, SerializationPolicy, serialize_if
from zeromem_torch.handles.serialization import GAP, estimate, extract
from zeromem_torch.substrate.tokenizer import sentence_spans
from zeromem_torch.substrate.traces import ZeroMemError

DOOR = "The door opens at nine. It closes at five. The key hangs behind the clock. Nobody may lend it."


def entry(value: Any) -> Entry:
    return Entry(Handle("procedural", "door"), value, datetime(2026, 5, 8, tzinfo=UTC), "b")


SHARES = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.7, 1.0])
BUDGETS = st.none() | st.integers(0, 40)
POLICIES = st.builds(
    SerializationPolicy,
    high_confidence=SHARES,
    high_complexity=SHARES,
    when_confident_and_complex=st.booleans(),
    when_unsure_and_simple=st.booleans(),
    extract_tokens=st.none() | st.integers(1, 40),
)
VALUES = st.sampled_from([DOOR, "Yes.", {"opens": 9}, 42]) | st.lists(
    st.text("ab .!\n", min_size=1, max_size=20), min_size=1, max_size=6
).map(". ".join)


@settings(deadline=None)
@given(VALUES, SHARES, SHARES, BUDGETS, st.none() | POLICIES, st.booleans(), st.sampled_from(["", "Where is the key?"]))
def test_the_whole_grid(
    value: Any,
    complexity: float,
    confidence: float,
    budget: int | None,
    policy: SerializationPolicy | None,
    force: bool,
    query: str,
) -> None:
    made = entry(value)
    decision = serialize_if(
        made,
        context_budget_remaining=budget,
        task_complexity=complexity,
        retrieval_confidence=confidence,
        policy=policy,
        query=query,
        force_context=force,
    )
    policy = policy or SerializationPolicy()
    confident, hard = confidence >= policy.high_confidence, complexity >= policy.high_complexity
    limits = [limit for limit in (budget, policy.extract_tokens) if limit is not None]

    if confident and not hard:
        wanted = False
    elif not confident and hard:
        wanted = True
    else:
        wanted = policy.when_confident_and_complex if confident else policy.when_unsure_and_simple
    text, tokens = extract(made, min(limits, default=None), estimate, query) if wanted or force else ("", 0)
    assert decision.serialize == bool(text)
    assert (decision.text, decision.tokens) == (text, tokens)
    assert decision.forced == (force and not wanted)
    assert decision.handle == made.handle
    assert json.loads(json.dumps(decision.to_dict()))["handle"] == "mem:procedural:door"
    assert decision.reason
    if decision.serialize:
        assert decision.tokens == estimate(decision.text) <= min(limits, default=10_000)
        for piece in decision.text.split(GAP):
            assert piece in made.text  # never a word that is not the entry's


@pytest.mark.parametrize("confidence", [0.1, 0.9])
@pytest.mark.parametrize("complexity", [0.1, 0.9])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_table(confidence: float, complexity: float, mixed: bool) -> None:
    policy = SerializationPolicy(when_confident_and_complex=mixed, when_unsure_and_simple=mixed)
    decision = serialize_if(
        entry(DOOR),
        context_budget_remaining=100,
        task_complexity=complexity,
        retrieval_confidence=confidence,
        policy=policy,
    )
    table = {(0.9, 0.1): False, (0.9, 0.9): mixed, (0.1, 0.1): mixed, (0.1, 0.9): True}
    assert decision.serialize == table[confidence, complexity]
    assert decision.text == (DOOR if decision.serialize else "")


@settings(deadline=None)
@given(st.lists(st.text("abc .,!?\n", max_size=40), max_size=8).map(" ".join), st.integers(0, 60))
def test_an_extract_is_whole_sentences_from_the_beginning(text: str, budget: int) -> None:
    found, tokens = extract(entry(text), budget, estimate)
    assert tokens == estimate(found) <= budget
    if found and estimate(text) > budget:
        ends = [end for _, end in sentence_spans(text)]
        start = sentence_spans(text)[0][0]
        assert found == text[start : start + len(found)]
        assert start + len(found) in ends
        following = ends[ends.index(start + len(found)) + 1]
        assert estimate(text[start:following]) > budget, "the budget is used"


@pytest.mark.parametrize(
    ("query", "budget", "expected"),
    [
        ("", 6, "The door opens at nine."),
        ("", 12, "The door opens at nine. It closes at five."),
        ("", 5, ""),
        ("Where is the key?", 8, "The key hangs behind the clock."),
        ("When opens the door, and the key?", 18, "The door opens at nine. ... The key hangs behind the clock."),
        ("Who may lend the key of the clock?", 12, "The key hangs behind the clock. Nobody may lend it."),
        ("Who may lend the key of the clock?", 11, "The key hangs behind the clock."),  # what shares most stays
        ("Where is the key?", 6, ""),  # the sentence takes seven
        ("What about giraffes?", 6, "The door opens at nine."),
        ("the and of", 6, "The door opens at nine."),
        ("", 1000, DOOR),
    ],
)
def test_what_an_extract_takes(query: str, budget: int, expected: str) -> None:
    assert extract(entry(DOOR), budget, estimate, query) == (expected, estimate(expected))


def test_json_is_not_cut() -> None:
    value = {"note": DOOR}
    whole = estimate(entry(value).text)
    assert extract(entry(value), whole - 1, estimate, "key") == ("", 0)
    assert extract(entry(value), whole, estimate) == (entry(value).text, whole)


def test_the_reader_counts() -> None:
    decision = serialize_if(
        entry(DOOR), context_budget_remaining=24, task_complexity=1, retrieval_confidence=0, count=len
    )
    assert (decision.text, decision.tokens) == ("The door opens at nine.", 23)
    both = "The door opens at nine. It closes at five."  # longer than its parts, by the blank between
    assert extract(entry(DOOR), len(both), len) == (both, len(both))
    assert extract(entry(DOOR), len(both) - 1, len) == ("The door opens at nine.", 23)


def test_a_decision_says_why() -> None:
    def reason(budget: int, confidence: float, force: bool = False) -> str:
        return serialize_if(
            entry(DOOR),
            context_budget_remaining=budget,
            task_complexity=0.9,
            retrieval_confidence=confidence,
            force_context=force,
        ).reason

    assert reason(100, 0.9) == "confident and complex: the handle stands"
    assert reason(100, 0.9, force=True) == "confident and complex, forced: the value enters"
    assert reason(100, 0.1) == "unsure and complex: the value enters"
    assert reason(10, 0.1) == "unsure and complex: an extract enters"
    assert reason(3, 0.1) == "unsure and complex: nothing of it fits in 3 tokens"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task_complexity": 1.1}, "task_complexity"),
        ({"task_complexity": float("nan")}, "task_complexity"),
        ({"task_complexity": True}, "task_complexity"),
        ({"retrieval_confidence": -0.1}, "retrieval_confidence"),
        ({"retrieval_confidence": "high"}, "retrieval_confidence"),
        ({"context_budget_remaining": -1}, "context_budget_remaining"),
        ({"context_budget_remaining": 1.5}, "context_budget_remaining"),
    ],
)
def test_what_cannot_be_decided_is_refused(given: Any, words: str) -> None:
    arguments = {"task_complexity": 0.5, "retrieval_confidence": 0.5, "context_budget_remaining": 10, **given}
    with pytest.raises(ZeroMemError, match=rf"{words}: expected .+, got .+; "):
        serialize_if(entry(DOOR), **arguments)


@pytest.mark.parametrize("given", [{"high_confidence": 2}, {"high_complexity": None}, {"extract_tokens": 0}])
def test_a_policy_that_means_nothing_is_refused(given: Any) -> None:
    with pytest.raises(ZeroMemError, match=next(iter(given))):
        SerializationPolicy(**given)
