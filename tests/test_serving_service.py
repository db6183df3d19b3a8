"""The service behind HTTP and MCP: durable at once, indexed behind, nothing outside a key's boundaries."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from test_serving_budget import Card
from toys import RULES, HashEncoder

from zeromem_torch import Trace, ZeroMem, ZeroMemError
from zeromem_torch.errors import Conflict, NotFound
from zeromem_torch.reader import Reply, Usage
from zeromem_torch.scope import SearchRequest
from zeromem_torch.serving.keys import LOCAL, Caller, Keys
from zeromem_torch.serving.refusals import Forbidden, Overloaded, Refusal, TooLarge, Unauthorized
from zeromem_torch.serving.service import Limits, MemoryService

T = TypeVar("T")
ANN = Caller("ann", frozenset({"read", "write"}), ("acme/ann",))
ACME = Caller("acme", frozenset({"read", "write"}), ("acme/",))
READER = Caller("reader", frozenset({"read"}), ("acme/",))
ADMIN = Caller("admin", frozenset({"admin"}), None)


class Slow(HashEncoder):
    """An encoder that waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Any:
        assert self.gate.wait(30)
        return super().encode(texts, states=states)


class Echo:
    """A reader that says the first piece of its evidence."""

    name = "echo"
    context_tokens = 1000

    def read(
        self, questions: Sequence[str], evidence: Sequence[Any], *, token_budget: int | None = None
    ) -> list[Reply]:
        return [Reply(found.items[0].text, Usage(), "hash") for found in evidence]


def served(
    folder: Path | None,
    do: Callable[[MemoryService], Awaitable[T]],
    *,
    encoder: HashEncoder | None = None,
    ready: str = "",
    **settings: Any,
) -> T:
    """Run it against a service that is started before and stopped behind."""

    async def run() -> T:
        own = encoder or HashEncoder()
        memory = (
            ZeroMem(RULES, encoder=own)
            if folder is None
            else ZeroMem.open(folder, encoder=own, config=RULES, index=False)
        )
        service = MemoryService(memory, **{"warm_up": False, "reader": Echo(), **settings})
        assert service.ready == "starting"
        await service.start()
        assert service._state == ""
        if not ready:
            assert service.ready == ""
        try:
            return await do(service)
        finally:
            own_gate = getattr(own, "gate", None)
            if own_gate is not None:
                own_gate.set()
            await service.stop()
            memory.close()

    return asyncio.run(run())


def test_what_is_added_is_found_answered_changed_and_forgotten(tmp_path: Path) -> None:
    async def do(service: MemoryService) -> None:
        added = await service.add(
            ACME, [{"text": "The red kite flew over the lake.", "boundary": "acme/ann"}], session="s", wait=True
        )
        assert added.indexed
        (own,) = added.ids
        (found,) = await service.search(ACME, [SearchRequest("Where did the kite fly?", "acme/ann")])
        assert found.items[0].trace_id == own
        (answered,) = await service.answer(ACME, [SearchRequest("Where did the kite fly?", "acme/ann")])
        assert answered.raw == "The red kite flew over the lake."
        assert answered.cites == (own,)
        assert (await service.get(ACME, own)).text == found.items[0].text
        after = await service.update(ACME, own, {"text": "The red kite flew over the hill."})
        assert after.text.endswith("hill.")
        assert [change.actor for change in await service.history(ACME, own)] == ["acme", "acme"]
        assert [trace.id for trace in await service.list(ACME)] == [own]
        status = await service.status(ACME)
        assert (status["traces"], status["boundaries"], status["ready"]) == (1, 1, True)
        await service.delete(ACME, own)
        with pytest.raises(NotFound):
            await service.get(ACME, own)
        assert len(await service.history(ACME, own)) == 3
        assert (await service.status(ACME))["traces"] == 0

    served(tmp_path, do)


def test_an_acknowledged_write_is_on_disk_before_it_is_indexed(tmp_path: Path) -> None:
    encoder = Slow()

    async def do(service: MemoryService) -> None:
        encoder.gate.clear()
        added = await service.add(LOCAL, [{"text": f"kite {n}", "boundary": "a"} for n in range(3)])
        assert not added.indexed
        with ZeroMem.open(tmp_path, encoder=HashEncoder(), config=RULES, read_only=True, index=False) as other:
            assert [trace.id for trace in other.list(boundary="a")] == added.ids
        waited = asyncio.create_task(service.add(LOCAL, [{"text": "kite 4", "boundary": "a"}], wait=True, timeout=20))
        await asyncio.sleep(0.05)
        assert not waited.done()
        encoder.gate.set()
        assert (await waited).indexed
        status = await service.status(LOCAL)
        assert status["indexed_up_to"] == status["stored_up_to"] == 4
        assert len((await service.search(LOCAL, [SearchRequest("kite", "a")]))[0]) == 4

    served(tmp_path, do, encoder=encoder)


def test_waiting_for_the_index_ends_with_the_deadline(tmp_path: Path) -> None:
    encoder = Slow()

    async def do(service: MemoryService) -> None:
        encoder.gate.clear()
        added = await service.add(LOCAL, [{"text": "kite", "boundary": "a"}], wait=True, timeout=0.3)
        assert not added.indexed
        encoder.gate.set()

    served(tmp_path, do, encoder=encoder)


def test_a_reader_and_the_index_may_take_nearly_all_the_time_of_a_request(tmp_path: Path) -> None:
    encoder = Slow()

    class Ponders(Echo):
        def read(
            self, questions: Sequence[str], evidence: Sequence[Any], *, token_budget: int | None = None
        ) -> list[Reply]:
            time.sleep(3.2)  # more than half of the six seconds
            return super().read(questions, evidence)

    async def do(service: MemoryService) -> None:
        await service.add(LOCAL, [{"text": "a kite", "boundary": "b"}], wait=True)
        await service.search(LOCAL, [SearchRequest("kite", "b")])  # what is compiled once is compiled now
        asyncio.get_running_loop().call_later(3.2, encoder.gate.set)
        encoder.gate.clear()
        added = await service.add(LOCAL, [{"text": "a kite", "boundary": "a"}], wait=True, timeout=6)
        assert added.indexed
        (answered,) = await service.answer(LOCAL, [SearchRequest("kite", "a")], timeout=6)
        assert answered.raw == "a kite"

    served(tmp_path, do, encoder=encoder, reader=Ponders())


def test_a_restart_goes_on_where_indexing_stopped(tmp_path: Path) -> None:
    with ZeroMem.open(tmp_path, encoder=HashEncoder(), config=RULES) as memory:
        memory.add([Trace(f"t{n}", "a", f"kite {n}") for n in range(30)], index=False)

    async def do(service: MemoryService) -> None:
        assert service.memory.waiting or service.memory.indexed_up_to == 30
        added = await service.add(LOCAL, [{"text": "one more kite", "boundary": "a"}], wait=True)
        assert added.indexed
        assert service.memory.indexed_up_to == added.position == 31

    served(tmp_path, do, limits=Limits(burst_tokens=40))


def test_stopping_indexes_what_is_left(tmp_path: Path) -> None:
    async def do(service: MemoryService) -> ZeroMem:
        await service.add(LOCAL, [{"text": f"kite {n}", "boundary": "a"} for n in range(50)])
        return service.memory

    memory = served(tmp_path, do, limits=Limits(burst_tokens=40))
    assert memory.waiting == 0


def test_the_same_request_again_writes_nothing_new(tmp_path: Path) -> None:
    messages = [{"text": "kite one"}, {"text": "kite two", "id": "own"}, {"text": "kite one"}]

    async def first(service: MemoryService) -> list[str]:
        added = await service.add(ACME, messages, boundary="acme/x", idempotency_key="k1")
        again = await service.add(ACME, messages, boundary="acme/x", idempotency_key="k1")
        assert again.ids == added.ids
        assert len(set(added.ids)) == 3
        assert added.ids[1] == "own"
        other = await service.add(ANN, [{"text": "kite one"}], boundary="acme/ann", idempotency_key="k1")
        assert not set(other.ids) & set(added.ids)
        with pytest.raises(Conflict):
            await service.add(ACME, [{"text": "another kite"}], boundary="acme/x", idempotency_key="k1")
        assert len(await service.list(ACME, boundary="acme/x")) == 3
        return added.ids

    ids = served(tmp_path, first)

    async def after_a_restart(service: MemoryService) -> None:
        assert (await service.add(ACME, messages, boundary="acme/x", idempotency_key="k1")).ids == ids
        assert len(await service.list(ACME, boundary="acme/x")) == 3

    served(tmp_path, after_a_restart)


def test_nothing_is_done_outside_a_keys_boundaries() -> None:
    async def do(service: MemoryService) -> None:
        await service.add(ADMIN, [{"id": "one", "text": "ann's kite", "boundary": "acme/ann"}])
        await service.add(ADMIN, [{"id": "two", "text": "bob's kite", "boundary": "acme/bob"}])
        await service.add(ADMIN, [{"id": "one", "text": "a corporate kite", "boundary": "acme-corp"}], wait=True)
        asked: list[Callable[[Caller, str], Awaitable[object]]] = [
            lambda c, b: service.add(c, [{"text": "x", "boundary": b}]),
            lambda c, b: service.add(c, [{"text": "x"}], boundary=b),
            lambda c, b: service.add(c, [{"text": "x", "boundary": "acme/ann"}, {"text": "y", "boundary": b}]),
            lambda c, b: service.search(c, [SearchRequest("kite", b)]),
            lambda c, b: service.search(c, [SearchRequest("kite", ["acme/ann", b])]),
            lambda c, b: service.search(c, [SearchRequest("kite", "acme/ann"), SearchRequest("kite", b)]),
            lambda c, b: service.answer(c, [SearchRequest("kite", b)]),
            lambda c, b: service.get(c, "two", boundary=b),
            lambda c, b: service.history(c, "two", boundary=b),
            lambda c, b: service.update(c, "two", {"text": "stolen"}, boundary=b),
            lambda c, b: service.delete(c, "two", boundary=b),
            lambda c, b: service.list(c, boundary=b),
            lambda c, b: service.delete_boundary(c, b),
            lambda c, b: service.handle(c, "memory_query", {}, boundary=b),
            lambda c, b: service.handle(c, "memory_store", {"type": "fact", "key": "k", "value": "v"}, boundary=b),
        ]
        for ask in asked:
            said = set()
            for outside in ("acme/bob", "acme-corp", "acme/", "acme", "nowhere"):
                with pytest.raises(Forbidden) as refused:
                    await ask(ANN, outside)
                said.add(str(refused.value))
            assert len(said) == 1  # the same, whether or not anything is there
        for refused_to in (service.get(ANN, "two"), service.get(ACME, "nothing"), service.delete(ANN, "two")):
            with pytest.raises(NotFound):
                await refused_to
        assert (await service.get(ANN, "one")).boundary == "acme/ann"  # the other one is none of hers
        assert [trace.boundary for trace in await service.list(ANN)] == ["acme/ann"]
        assert {trace.boundary for trace in await service.list(ACME)} == {"acme/ann", "acme/bob"}
        assert (await service.status(ANN))["traces"] == 1
        with pytest.raises(ZeroMemError, match="name its boundary"):
            await service.get(ADMIN, "one")
        for act in (
            service.add(READER, [{"text": "x", "boundary": "acme/ann"}]),
            service.update(READER, "one", {"text": "x"}),
            service.delete(READER, "one", boundary="acme/ann"),
            service.delete(ACME, "one", boundary="acme/ann", purge=True),
            service.delete_boundary(ACME, "acme/", purge=True),
            service.release_memory(ACME),
        ):
            with pytest.raises(Forbidden):
                await act
        assert await service.delete_boundary(ACME, "acme/") == 2
        assert await service.delete_boundary(ADMIN, "acme-corp", purge=True) == 1
        await service.release_memory(ADMIN)

    served(None, do)


def test_handles_are_of_a_session_and_stay_in_their_boundary() -> None:
    async def do(service: MemoryService) -> None:
        given = {"type": "preference", "key": "reply/language", "value": "Answer in French."}
        stored = await service.handle(ACME, "memory_store", given, boundary="acme/ann", session="s")
        handle = {"handle": stored["handle"]}
        assert (await service.handle(ANN, "memory_retrieve", handle, boundary="acme/ann"))["handle"] == stored["handle"]
        opened = await service.handle(ACME, "memory_materialize", {"handles": [stored["handle"]]}, boundary="acme/ann")
        assert "French" in opened["text"]
        with pytest.raises(NotFound):
            await service.handle(ACME, "memory_retrieve", handle, boundary="acme/bob")
        with pytest.raises(ZeroMemError):
            await service.handle(ACME, "memory_bake", handle, boundary="acme/bob")
        with pytest.raises(Forbidden):
            await service.handle(READER, "memory_forget", handle, boundary="acme/ann")
        assert await service.handle(ACME, "memory_forget", handle, boundary="acme/ann") == {
            "forgotten": stored["handle"]
        }

    served(None, do)


def test_limits_are_kept() -> None:
    own = Limits(queries=2, messages=2, text_chars=20, query_chars=10, page=5, longest_timeout=2)

    async def do(service: MemoryService) -> None:
        for too_large in (
            service.add(LOCAL, [{"text": "x", "boundary": "a"}] * 3),
            service.add(LOCAL, [{"text": "x" * 21, "boundary": "a"}]),
            service.update(LOCAL, "x", {"text": "x" * 21}),
            service.search(LOCAL, [SearchRequest("x", "a")] * 3),
            service.search(LOCAL, [SearchRequest("x" * 11, "a")]),
            service.list(LOCAL, limit=6),
        ):
            with pytest.raises(TooLarge):
                await too_large
        for unusable in (
            service.add(LOCAL, []),
            service.add(LOCAL, "text"),  # type: ignore[arg-type]
            service.add(LOCAL, ["text"]),  # type: ignore[list-item]
            service.add(LOCAL, [{"text": "x"}]),
            service.search(LOCAL, []),
            service.search(LOCAL, [SearchRequest("", "a")]),
            service.search(LOCAL, [SearchRequest("x", "a")], timeout=3),
            service.update(LOCAL, "x", {"boundary": "other"}),
        ):
            with pytest.raises(ZeroMemError) as error:
                await unusable
            assert not isinstance(error.value, Refusal)
        with pytest.raises(ZeroMemError, match="query 1"):
            await service.search(LOCAL, [SearchRequest("x", "a"), SearchRequest("x", "a", top_k=0)])

    served(None, do, limits=own)


def test_a_query_is_answered_as_if_alone_whatever_its_batch(tmp_path: Path) -> None:
    encoder = Slow()
    queries = [SearchRequest(f"kite {n} of {b}", b) for b in "abc" for n in range(8)]

    async def do(service: MemoryService) -> None:
        messages = [{"text": f"kite {n} of {b} over lake {n}", "boundary": b} for b in "abc" for n in range(8)]
        await service.add(LOCAL, messages, wait=True)
        alone = [(await service.search(LOCAL, [query]))[0] for query in queries]
        encoder.gate.clear()
        first = asyncio.create_task(service.search(LOCAL, [SearchRequest("what holds up the others", "a")]))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(service.search(LOCAL, [query])) for query in queries]
        await asyncio.sleep(0.05)
        assert service._batcher.depth == len(queries)
        encoder.gate.set()
        await first
        for task, expected in zip(others, alone, strict=True):
            (found,) = await task
            assert [item.trace_id for item in found] == [item.trace_id for item in expected]
            assert [item.score for item in found] == pytest.approx([item.score for item in expected], abs=1e-6)

    served(tmp_path, do, encoder=encoder, limits=Limits(recent_queries=0))


def test_what_comes_too_late_or_is_not_waited_for_is_not_searched(tmp_path: Path) -> None:
    encoder = Slow()

    async def do(service: MemoryService) -> None:
        await service.add(LOCAL, [{"text": "kite", "boundary": "a"}], wait=True)
        encoder.gate.clear()
        first = asyncio.create_task(service.search(LOCAL, [SearchRequest("kite", "a")]))
        await asyncio.sleep(0.05)
        gone = asyncio.create_task(service.search(LOCAL, [SearchRequest("unwanted", "a")]))
        late = asyncio.create_task(service.search(LOCAL, [SearchRequest("belated", "a")], timeout=0.1))
        await asyncio.sleep(0.2)
        gone.cancel()
        encoder.gate.set()
        await first
        with pytest.raises(Overloaded) as refused:
            await late
        assert (refused.value.status, refused.value.reason) == (503, "deadline")
        with pytest.raises(asyncio.CancelledError):
            await gone
        asked = {text for call in encoder.calls for text in call}
        assert not asked & {"unwanted", "belated"}

    served(tmp_path, do, encoder=encoder)


def test_keys_decide_who_calls(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    secret = keys.make("ann", scopes=["read"], boundaries=["acme/ann"])

    async def do(service: MemoryService) -> None:
        assert service.authenticate(secret).name == "ann"
        for wrong in (None, "", "zm_x_y", secret[:-1], secret + "x"):
            with pytest.raises(Unauthorized):
                service.authenticate(wrong)

    served(None, do, keys=keys)

    async def open_to_all(service: MemoryService) -> None:
        assert service.authenticate(None) is LOCAL

    served(None, open_to_all)


def test_a_service_that_stops_refuses_and_says_so() -> None:
    async def do(service: MemoryService) -> None:
        assert await service.stop()
        assert service.ready == "closing"
        with pytest.raises(Overloaded) as refused:
            await service.search(LOCAL, [SearchRequest("x", "a")])
        assert refused.value.status == 503

    served(None, do)


def test_the_cost_model_is_fitted_at_start_on_made_text() -> None:
    encoder = HashEncoder()

    async def do(service: MemoryService) -> None:
        assert service._batcher.cost.predict(1000, 1 << 20) > 0
        assert len(service.memory) == 0

    served(None, do, encoder=encoder, warm_up=True)


def test_metrics_say_how_far_the_index_is() -> None:
    async def do(service: MemoryService) -> None:
        await service.add(LOCAL, [{"text": "kite", "boundary": "secret/place"}], wait=True)
        await service.search(LOCAL, [SearchRequest("kite", "secret/place")])
        text = (await service.exposition())[0].decode()
        assert "zeromem_" in text
        assert "secret" not in text

    served(None, do)


def test_it_is_ready_beside_a_reader_once_its_memory_stays_as_it_is() -> None:
    card = Card()

    async def do(service: MemoryService) -> None:
        card.reserve(100)  # what a first batch got from the device
        assert "changes" in service.ready
        card.reserve(1000)
        assert "changes" in service.ready
        assert service.ready == ""
        card.reserve(10_000)
        assert service.ready == ""  # it was so once: what was waiting for it has started
        await service.release_memory(ADMIN)

    served(None, do, allocator=card, ready="not at once")


def test_it_is_never_ready_while_allocations_fail() -> None:
    class Torn(Card):
        def retries(self) -> int:
            return 1

    async def do(service: MemoryService) -> None:
        assert service.ready
        assert service.ready

    served(None, do, allocator=Torn(), ready="not at once")
