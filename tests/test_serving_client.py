"""The client: a served memory answers as the embedded one does, and what a server says becomes the library's errors."""

import asyncio
import builtins
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from servers import serving
from toys import EchoReader, memory_of, same_evidence, talk

from zeromem_torch.errors import Conflict, NotFound, ZeroMemError
from zeromem_torch.evidence import Evidence
from zeromem_torch.library import ZeroMem
from zeromem_torch.serving import client as client_module
from zeromem_torch.serving.client import AsyncClient, Client
from zeromem_torch.serving.keys import Keys
from zeromem_torch.serving.refusals import Forbidden, Overloaded, TooLarge, Unauthorized
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import MemoryService
from zeromem_torch.substrate.traces import Trace

T = TypeVar("T")
LAKE = talk(
    "acme/ann",
    ["We went to the lake in Oslo.", "Was it cold?", "Yes, the Mjosa is always cold.", "I bought a red boat."],
    ["The red boat sank.", "Oh no! What will you do?", "I will build a raft.", "Call it Otter."],
)
JUNE = datetime(2023, 6, 9, tzinfo=UTC)


@pytest.fixture
def memory() -> ZeroMem:
    return memory_of(*LAKE)


@pytest.fixture
def client(memory: ZeroMem) -> Iterator[Client]:
    service = MemoryService(memory, reader=EchoReader(), warm_up=False)
    with serving(create_app(service, mcp=False)) as url, Client(url) as client:
        yield client


def test_a_search_is_that_of_the_embedded_memory(memory: ZeroMem, client: Client) -> None:
    asked: dict[str, Any] = {"boundary": "acme/", "top_k": 3, "as_of": JUNE, "explain": True}
    for query in ("What did Ann buy?", "What sank?"):
        assert same_evidence(client.search(query, **asked), memory.search(query, **asked))
    short = client.search("What did Ann buy?", boundary=["acme/ann"], filters={"speaker": {"Bo"}, "after": JUNE})
    whole = memory.search("What did Ann buy?", boundary=["acme/ann"], filters={"speaker": {"Bo"}, "after": JUNE})
    assert isinstance(short, Evidence)
    assert [(item.trace_id, item.text, item.time) for item in short] == [(i.trace_id, i.text, i.time) for i in whole]
    assert (short.main, short.items[0].views) == ([], {})
    assert (short.tokens, short.found) == (whole.tokens, True)


def test_many_queries_are_sent_in_parts_and_come_back_in_order(memory: ZeroMem, client: Client) -> None:
    queries = [f"Who bought boat {number}?" for number in range(300)]
    boundaries: list[Any] = ["acme/ann", "acme/", ["acme/ann", "nobody"]] * 100
    found = client.search_batch(queries, boundaries=boundaries, top_k=1, reference_times=[None, JUNE, None] * 100)
    assert [evidence.query for evidence in found] == queries
    assert all(evidence.found for evidence in found)
    assert client.search_batch([], boundaries=[]) == []
    with pytest.raises(ZeroMemError, match="boundaries: expected one per query"):
        client.search_batch(["a"], boundaries=[])


def test_answers_rest_on_their_evidence(memory: ZeroMem, client: Client) -> None:
    served, embedded = (
        client.answer("What sank?", boundary="acme/ann"),
        memory.answer("What sank?", boundary="acme/ann", reader=EchoReader()),
    )
    assert (served.text, served.cites, served.usage) == (embedded.text, embedded.cites, embedded.usage)
    assert [item.trace_id for item in served.citations] == [item.trace_id for item in embedded.citations]
    raw, failed = client.answer_batch(["What sank?", "a fault"], boundaries=["acme/ann"] * 2, calibrate=False)
    assert raw.rule == "not calibrated"
    assert failed.error == "the server was gone"


def test_writing_and_reading_back(memory: ZeroMem, client: Client) -> None:
    said = {"text": "It has a red flag.", "time": JUNE, "metadata": {"kind": "flag"}}
    (own,) = client.add(said, user_id="u/1", session="s")
    assert client.search("red flag", user_id="u/1").items[0].trace_id == own, "searches find it when add returns"
    trace = client.get(own)
    assert trace == memory.get(own)
    assert (trace.boundary, trace.session, trace.time, trace.added_at) == (
        "user=u%2F1", "s", JUNE, memory.get(own).added_at
    )  # fmt: skip
    assert client.update(own, text="It has a blue flag.", valid_from=JUNE, boundary="user=u%2F1").text.count("blue")
    first, second = client.history(own)
    assert (first.action, second.action, second.actor) == ("add", "update", "local")
    assert second.at > first.at
    client.delete(own, purge=True)
    with pytest.raises(NotFound):
        client.get(own)
    kept = Trace("k", "other", "Kept.", order=3)
    assert client.add([kept, "Also kept."], boundary="other", timestamp=JUNE)[0] == "k"
    assert client.get("k").order == 3
    assert client.add([]) == []
    assert client.delete_all(boundary=["other", "acme/"]) == 10
    assert client.status()["traces"] == 0


@pytest.mark.parametrize("own", ["a/b", "..", ".", "a:b?c#d", "%2F", "é 🚢", "a//b/", "/x", "history", "x\ny"])
def test_ids_and_boundaries_are_what_they_are(client: Client, own: str) -> None:
    client.add({"id": own, "text": "Here."}, boundary=f"b{own.replace('/', '|')}")
    assert client.get(own).text == "Here."
    assert client.history(own)[0].action == "add"
    assert [trace.id for trace in client.list(boundary=f"b{own.replace('/', '|')}")] == [own]
    assert client.delete_all(boundary=f"b{own.replace('/', '|')}") == 1


def test_lists_are_followed_to_their_end(client: Client) -> None:
    client.add([f"Note {number}." for number in range(1000)], boundary="notes", index=False)
    client.add([f"Note {number}." for number in range(1000, 1100)], boundary="notes", index=False)
    page = client.list(boundary="notes", limit=7)
    assert (len(page), [trace.text for trace in page][-1]) == (7, "Note 6.")
    assert [t.text for t in client.list(boundary="notes", limit=2, cursor=page.next_cursor)] == ["Note 7.", "Note 8."]
    whole = client.list(boundary=["notes", "acme/"], limit=None)
    assert (len(whole), whole.next_cursor) == (1108, None)
    assert [trace.id for trace in client.list(prefix="acme/ann/1:")] == [t.id for t in LAKE[:4]]


def test_handles(client: Client) -> None:
    stored = client.handle("store", boundary="ann", type="preference", key="reply/language", value="French")
    assert stored == {"handle": "mem:preference:reply/language"}
    found = client.handle("query", boundary="ann", text="Which language?", session="s1")
    assert found["matches"][0]["handle"] == stored["handle"]
    with pytest.raises(NotFound):
        client.handle("retrieve", boundary="bo", handle=stored["handle"])


def test_errors_are_those_of_the_library(memory: ZeroMem, client: Client) -> None:
    cases: list[tuple[type[ZeroMemError], str, Callable[[], object]]] = [
        (ZeroMemError, "top_k", lambda: client.search("x", boundary="a", top_k=0)),
        (NotFound, "id", lambda: client.get("nowhere")),
        (Conflict, "acme/ann/1:1", lambda: client.add({"id": "acme/ann/1:1", "text": "Other."}, boundary="acme/ann")),
        (TooLarge, "65536", lambda: client.add("x" * 100_000, boundary="a")),
        (ZeroMemError, "speaker", lambda: client.update("acme/ann/1:1", speaker="Bo")),
        (ZeroMemError, "boundary", lambda: client.search("x")),
        (ZeroMemError, "id", lambda: client.get("")),
        (ZeroMemError, "surrogate", lambda: client.get("\ud800")),
        (ZeroMemError, "message", lambda: client.add([7], boundary="a")),  # type: ignore[list-item]
        (NotFound, "path", lambda: client.handle("../status", boundary="a")),
    ]
    for kind, said, call in cases:
        with pytest.raises(kind, match=said):
            call()


def test_the_same_add_under_one_key_writes_once(client: Client) -> None:
    first = client.add(["One.", "Two."], boundary="b", idempotency_key="k")
    assert client.add(["One.", "Two."], boundary="b", idempotency_key="k") == first
    assert client.add(["One.", "Two."], boundary="b") != first
    assert len(client.list(boundary="b")) == 4
    with pytest.raises(Conflict):
        client.add(["One.", "Three."], boundary="b", idempotency_key="k")


def test_a_key_and_what_it_may_not(memory: ZeroMem, tmp_path: Any) -> None:
    keys = Keys(tmp_path / "keys.json")
    secret = keys.make("ann", scopes=["read"], boundaries=["acme/ann"])
    with serving(create_app(MemoryService(memory, keys=keys, warm_up=False), mcp=False)) as url:
        with Client(url, secret) as ann:
            assert ann.search("boat", boundary="acme/ann").found
            with pytest.raises(Forbidden):
                ann.search("boat", boundary="acme/")
            with pytest.raises(Forbidden):
                ann.add("x", boundary="acme/ann")
        with Client(url) as nobody, pytest.raises(Unauthorized):
            nobody.list()


class Busy(MemoryService):
    """Refuses the first requests."""

    refusals = 2

    async def search(self, *args: Any, **given: Any) -> builtins.list[Evidence]:
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("queue: expected room, got none; wait", reason="queue", retry_after=0.2)
        return await super().search(*args, **given)


def test_what_was_refused_for_want_of_room_is_sent_again_within_the_timeout(memory: ZeroMem) -> None:
    service = Busy(memory, warm_up=False)
    with serving(create_app(service, mcp=False)) as url:
        with Client(url, timeout=10) as patient:
            assert patient.search("boat", boundary="acme/ann").found
        service.refusals = 99
        with Client(url, timeout=0.5) as hasty, pytest.raises(Overloaded) as caught:
            hasty.search("boat", boundary="acme/ann")
        assert (caught.value.reason, caught.value.status, caught.value.retry_after) == ("queue", 429, 1)
        assert service.refusals == 98, "no try that would end too late"


def answering(*replies: httpx2.Response | Exception) -> tuple[httpx2.MockTransport, list[httpx2.Request]]:
    seen: list[httpx2.Request] = []
    left = list(replies)

    def reply(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        one = left.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    return httpx2.MockTransport(reply), seen


def test_a_broken_connection_is_tried_again_only_where_that_changes_nothing() -> None:
    added = httpx2.Response(201, json={"ids": ["1"], "position": 1, "indexed": True})
    transport, seen = answering(httpx2.ReadError("gone"), added)
    with Client("http://s", transport=transport) as client:
        assert client.add("x", boundary="b") == ["1"]
    keys = {request.headers["idempotency-key"] for request in seen}
    assert (len(seen), len(keys)) == (2, 1)
    calls: list[Callable[[Client], object]] = [lambda c: c.answer("x", boundary="b"), lambda c: c.delete("x")]
    for call in calls:
        transport, seen = answering(httpx2.ReadError("gone"))
        with Client("http://s", transport=transport) as client, pytest.raises(ZeroMemError, match="zeromem serve"):
            call(client)
        assert len(seen) == 1


def test_a_server_that_cannot_be_reached_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda pause: now.__setitem__(0, now[0] + pause))
    transport, seen = answering(*[httpx2.ConnectError("refused")] * 20)
    with Client("http://s", transport=transport) as client, pytest.raises(ZeroMemError, match="zeromem serve"):
        client.search("x", boundary="b")
    assert len(seen) > 2, "one that starts anew comes back"
    assert now[0] - 100 <= client_module.REFUSED_FOR

    begun = now[0]  # nor is a pause that follows a broken connection cut short
    transport, seen = answering(*[httpx2.ReadError("gone")] * 20)
    with Client("http://s", timeout=20, transport=transport) as client, pytest.raises(ZeroMemError):
        client.search("x", boundary="b")
    assert now[0] - begun > 10


@pytest.mark.parametrize("reply", [httpx2.Response(502, text="<html>"), httpx2.Response(404, json=[1])])
def test_what_is_no_answer_of_ours_is_said(reply: httpx2.Response) -> None:
    transport, _ = answering(reply)
    with Client("http://s", transport=transport) as client, pytest.raises(ZeroMemError, match="check the address"):
        client.get("x")


def test_the_async_client_is_the_same(memory: ZeroMem) -> None:
    async def session() -> None:
        service = MemoryService(memory, reader=EchoReader(), warm_up=False)
        app = create_app(service, mcp=False)
        await service.start()
        async with AsyncClient("http://s", transport=httpx2.ASGITransport(app)) as client:
            many = await asyncio.gather(*(client.search(f"boat {n}", boundary="acme/ann") for n in range(20)))
            assert all(many)
            (own,) = await client.add("The oar broke.", boundary="b")
            assert (await client.get(own)).text == "The oar broke."
            assert (await client.list(boundary="b", limit=None)).items[0].id == own
            assert (await client.answer("What broke?", boundary="b")).cites == (own,)
            assert await client.delete_all(boundary="b") == 1
        await service.stop()

    asyncio.run(session())


def test_methods_and_parameters_are_those_of_the_library() -> None:
    left_out = {"self", "actor", "progress", "reader", "search"}
    shared = "add search search_batch answer answer_batch get update delete delete_all list history".split()
    for name in shared:
        ours = set(inspect.signature(getattr(Client, name)).parameters)
        theirs = set(inspect.signature(getattr(ZeroMem, name)).parameters) - left_out
        theirs -= {"index"} if name == "update" else set()  # a served update is always indexed a little later
        assert theirs <= ours, (name, theirs - ours)
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name))


def test_a_client_reads_all_that_it_is_sent_without_torch(memory: ZeroMem, tmp_path: Path) -> None:
    (answered,) = memory.answer_batch(["What sank?"], boundaries=["acme/ann"], reader=EchoReader())
    page = memory.list(boundary="acme/ann")
    changes = memory.history(page.items[0].id, boundary="acme/ann")
    sent = {
        "/v1/answer": answered.to_dict(),
        "/v1/search": answered.evidence.to_dict(),
        "/v1/memories": page.to_dict(),
        "/v1/history/x": {"items": [change.to_dict() for change in changes]},
    }
    (tmp_path / "sent.json").write_text(json.dumps(sent))
    code = f"""
import json, sys
import httpx2
from zeromem_torch.serving.client import Client
sent = json.load(open({str(tmp_path / "sent.json")!r}))
reply = lambda request: httpx2.Response(200, json=sent[request.url.path])
with Client("http://s", transport=httpx2.MockTransport(reply)) as client:
    assert client.answer("What sank?", boundary="acme/ann").to_dict() == sent["/v1/answer"]
    assert client.search("What sank?", boundary="acme/ann").to_dict() == sent["/v1/search"]
    assert client.list(boundary="acme/ann").to_dict() == sent["/v1/memories"]
    assert [change.to_dict() for change in client.history("x")] == sent["/v1/history/x"]["items"]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
