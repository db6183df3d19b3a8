"""Traces that are stored first and indexed later: on disk at once, found in bounded steps, and never lost between."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import RULES, HashEncoder

from zeromem_torch import Trace, ZeroMem, ZeroMemError
from zeromem_torch.bank import Index
from zeromem_torch.evidence import Evidence
from zeromem_torch.residents import Residents
from zeromem_torch.scope import Scope, SearchRequest
from zeromem_torch.substrate.encoder import Encoder, RecentTexts
from zeromem_torch.substrate.memory import Memory


def opened(path: Path, **settings: bool) -> ZeroMem:
    return ZeroMem.open(path, encoder=HashEncoder(), config=RULES, **settings)  # type: ignore[arg-type]


def found(memory: ZeroMem, query: str, boundary: str = "a") -> list[str]:
    return sorted(item.trace_id for item in memory.search(query, boundary=boundary))


def trace(number: int, text: str = "a red kite over the lake") -> Trace:
    return Trace(f"t{number}", "a", f"{text} number {number}", session="s")


def test_a_trace_is_stored_at_once_and_found_when_it_is_indexed(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add([trace(1)])
        memory.add([trace(2), trace(3)], index=False)
        assert (memory.waiting, memory.stored_up_to, memory.indexed_up_to) == (2, 3, 1)
        assert memory.get("t3", boundary="a").text == trace(3).text
        assert found(memory, "kite") == ["t1"]
        assert memory.verify().ok
        assert memory.index_some(1) == 1  # at least one
        assert (memory.waiting, memory.indexed_up_to) == (1, 2)
        assert found(memory, "kite") == ["t1", "t2"]
        assert memory.index_some(10_000) == 1
        assert memory.index_some(10_000) == 0
        assert (memory.waiting, memory.indexed_up_to) == (0, 3)
        assert found(memory, "kite") == ["t1", "t2", "t3"]
        assert memory.verify().ok


def test_a_step_is_bounded_by_its_tokens(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add([trace(n, "word " * 40) for n in range(10)], index=False)
        assert [memory.index_some(150) for _ in range(6)] == [2, 2, 2, 2, 2, 0]


def test_what_waits_when_the_memory_closes_is_indexed_by_the_next_opening(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add([trace(1), trace(2)], index=False)
    with opened(tmp_path, index=False) as memory:
        assert memory.waiting == 2
        assert found(memory, "kite") == []
        assert "indexed yet" in memory.search("kite", boundary="a").reasons[-1]
        memory.index_some(1)
    with opened(tmp_path) as memory:
        assert memory.waiting == 0
        assert found(memory, "kite") == ["t1", "t2"]


def test_a_change_that_waits_is_not_found_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add([trace(1), trace(2)])
        assert found(memory, "kite") == ["t1", "t2"]
        memory.update("t1", boundary="a", text="a blue whale", index=False)
        assert found(memory, "kite") == ["t2"]
        memory.update("t2", boundary="a", metadata={"seen": True}, index=False)  # what is read stays as it was
        assert (memory.waiting, memory.indexed_up_to) == (1, 0)
        assert memory.search("kite", boundary="a").items[0].trace_id == "t2"
        memory.index_some(1000)
        assert memory.search("whale", boundary="a").items[0].text == "a blue whale"
        memory.add([Trace("t1", "a", "a grey heron", session="s")], overwrite=True, index=False)
        assert found(memory, "heron") == ["t2"]
        memory.index_some(1000)
        assert memory.search("heron", boundary="a").items[0].text == "a grey heron"
        assert memory.verify().ok


def test_what_is_deleted_while_it_waits_is_not_waited_for(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add([trace(1), trace(2), trace(3)], index=False)
        memory.delete("t2", boundary="a")
        memory.delete("t3", boundary="a", purge=True)
        assert memory.waiting == 1
        assert memory.index_some(1000) == 1
        assert found(memory, "kite") == ["t1"]
        assert memory.verify().ok


@given(st.lists(st.sampled_from("aAdiru"), max_size=14))
def test_in_the_end_it_is_as_if_all_had_been_indexed_at_once(steps: list[str]) -> None:
    one, other, number = ZeroMem(RULES, encoder=HashEncoder()), ZeroMem(RULES, encoder=HashEncoder()), 0
    for step in steps:
        if step in "aA":
            number += 1
            one.add([trace(number)])
            other.add([trace(number)], index=step == "a")
        elif step == "i":
            other.index_some(20)
        elif step == "r":
            one.rebuild()
            other.rebuild()
            assert other.waiting == 0
        elif len(one):
            own = f"t{number}"
            for memory, index in ((one, True), (other, False)):
                if step == "u" and memory.homes(own):
                    memory.update(own, boundary="a", text=f"{number} herons", index=index)
                elif memory.homes(own):
                    memory.delete(own, boundary="a")
    while other.waiting:
        assert other.index_some(20)
    assert other.indexed_up_to == other.stored_up_to
    asked = {"boundary": "a", "explain": True}
    assert other.search("kite 3", **asked).to_dict() == one.search("kite 3", **asked).to_dict()  # type: ignore[arg-type]


def test_each_request_is_answered_as_if_it_came_alone() -> None:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add([Trace(f"{b}{n}", b, f"kite {n} of {b}", speaker=b) for b in "abc" for n in range(5)])
    requests = [
        SearchRequest("kite 1", "a"),
        SearchRequest("kite 2", "b", top_k=2, explain=True),
        SearchRequest("kite 3", ["a", "b"], filters={"speaker": "b"}),
        SearchRequest("kite 4", "c", token_budget=12),
        SearchRequest("kite", "nowhere"),
        SearchRequest("kite", "a", min_score=0.99),
        SearchRequest("kite 2", "b", top_k=2, explain=True),
    ]
    bad = [
        SearchRequest("", "a"),
        SearchRequest("kite", "a", top_k=0),
        SearchRequest("kite", "a", filters={"colour": "red"}),
        SearchRequest("kite", "a//b", as_of="never"),
    ]
    mixed = [request for pair in zip(requests, [*bad, *bad], strict=False) for request in pair]
    answers = memory.search_each(mixed)
    for request, answer in zip(mixed, answers, strict=True):
        if request in bad:
            assert isinstance(answer, ZeroMemError)
            continue
        alone = memory.search(
            request.query, boundary=request.boundary, top_k=request.top_k, token_budget=request.token_budget,
            filters=request.filters, min_score=request.min_score, explain=request.explain,
        )  # fmt: skip
        assert isinstance(answer, Evidence)
        assert [(i.trace_id, i.start, i.end) for i in answer] == [(i.trace_id, i.start, i.end) for i in alone]
        assert [i.score for i in answer] == pytest.approx([i.score for i in alone], abs=1e-6)
        assert answer.reasons == alone.reasons
    assert memory.search_each([]) == []


def test_texts_asked_again_are_not_encoded_again_and_say_the_same() -> None:
    inner = HashEncoder()
    recent: Encoder = RecentTexts(inner, 2)
    for texts in (["kite", "lake"], ["kite", "kite"], [], ["river", "kite"], ["lake"], [""]):
        for states in (False, True, True):
            mine, plain = recent.encode(texts, states=states), HashEncoder().encode(texts, states=states)
            for name in ("vectors", "counts", "states", "spans", "terms", "weights"):
                assert torch.equal(getattr(mine, name), getattr(plain, name)), name
    assert isinstance(recent, RecentTexts)
    asked = [texts for texts in inner.calls if texts]
    assert asked[:2] == [["kite", "lake"], ["kite", "lake"]]  # without states, then with them
    assert recent.fingerprint == inner.fingerprint
    recent.encode(["river"], states=True)
    before = len(inner.calls)
    recent.encode(["river"], states=True)
    assert len(inner.calls) == before


def test_a_memory_that_remembers_queries_encodes_each_once() -> None:
    encoder = HashEncoder()
    memory = ZeroMem(RULES, encoder=encoder)
    memory.add([trace(1)])
    memory.remember_queries(10)
    first, before = memory.search("Where is the kite?", boundary="a"), len(encoder.calls)
    assert memory.search("Where is the kite?", boundary="a").to_dict() == first.to_dict()
    assert len(encoder.calls) == before


def memories_of(number: int) -> list[Memory]:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add([Trace(f"t{n}", f"b{n}", f"kite {n}") for n in range(number)])
    held = [memory._derived.memories.of(Scope((f"b{n}",))) for n in range(number)]
    return [one for one in held if one is not None]


def test_indices_on_a_device_go_when_they_were_not_asked_for_longest() -> None:
    first, second, third = memories_of(3)
    size = max(memory.index.nbytes for memory in (first, second, third))
    held = Residents("cpu", 2 * size)
    indices: list[Index] = held.of([first, second])
    assert held.nbytes <= 2 * size
    assert held.of([first])[0] is indices[0]
    held.of([third])  # drives out the second
    assert (held.hits, held.misses) == (1, 3)
    assert held.of([first])[0] is indices[0]
    assert held.of([second])[0] is not indices[1]
    assert len(held.of([first, second, third])) == 3  # what is asked together is held together, whatever the budget
    held.release()
    assert held.nbytes == 0
