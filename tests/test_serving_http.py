"""The HTTP API: what each operation takes and gives, errors as problem+json, limits, keys, logs, metrics and traces."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from servers import serving
from starlette.testclient import TestClient
from toys import EchoReader, memory_of, talk

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.evidence import Evidence
from zeromem_torch.library import ZeroMem
from zeromem_torch.serving import logs, schemas
from zeromem_torch.serving.keys import KEYS, Keys
from zeromem_torch.serving.refusals import Overloaded
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import Limits, MemoryService
from zeromem_torch.serving.tracing import Tracing

LAKE = talk(
    "acme/ann", ["We went to the lake in Oslo.", "Was it cold?", "I bought a red boat."], ["The red boat sank."]
)
COMPACT = set(schemas.responses()["EvidenceItem"]["required"])


def memory() -> ZeroMem:
    return memory_of(*LAKE)


def client_of(service: MemoryService | None = None, **settings: Any) -> TestClient:
    service = service or MemoryService(memory(), reader=EchoReader(), warm_up=False)
    return TestClient(create_app(service, mcp=False, **settings))


@pytest.fixture
def client() -> Iterator[TestClient]:
    with client_of() as client:
        yield client


def refused(reply: Any, status: int, kind: str, said: str = "") -> dict[str, Any]:
    """A problem as RFC 9457 has it, in the words of our errors."""
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/problem+json"), reply.text
    plain: dict[str, Any] = reply.json()
    assert {"type", "title", "status", "detail", "request_id"} <= set(plain)
    assert (plain["type"], plain["status"]) == (f"urn:zeromem:{kind}", status)
    assert plain["request_id"] == reply.headers["x-request-id"]
    assert re.search(said, plain["detail"]), plain["detail"]
    assert re.search(r": expected .*, got .*; ", plain["detail"]), plain["detail"]
    return plain


# Operations


def test_one_query_gives_evidence_and_many_give_results(client: TestClient) -> None:
    one = client.post("/v1/search", json={"query": "What sank?", "boundary": "acme/ann"})
    assert one.status_code == 200
    found = one.json()
    assert found["found"] is True
    assert all(set(item) == COMPACT for item in found["items"])
    assert found["tokens"] == sum(item["tokens"] for item in found["items"])
    assert found["items"][0]["text"] == "The red boat sank."
    body = {
        "queries": ["What sank?", {"query": "Where?", "boundary": ["acme/", "nobody"], "explain": True, "top_k": 1}],
        "boundary": "acme/ann",
        "filters": {"speaker": "Ann"},
    }
    first, second = client.post("/v1/search", json=body).json()["results"]
    assert {item["speaker"] for item in (*first["items"], *second["items"])} == {"Ann"}
    assert "main" not in first
    assert Evidence.from_dict({k: v for k, v in second.items() if k not in ("found", "tokens")}).main
    assert second["items"][0]["explanation"]["sums"]
    empty = client.post("/v1/search", json={"query": "What?", "boundary": "nobody"}).json()
    assert (empty["found"], empty["items"], empty["route"]) == (False, [], "none")


def test_every_field_of_a_search_reaches_it() -> None:
    service = MemoryService(memory(), warm_up=False)
    seen: list[Any] = []

    async def search(caller: object, requests: Sequence[Any], *, timeout: float | None = None) -> list[Evidence]:
        seen.append((requests[0], timeout))
        return [Evidence.nothing("q", "b", "nothing")]

    service.search = search  # type: ignore[method-assign]
    given = {
        "top_k": 3,
        "token_budget": 40,
        "filters": {"session": ["s"], "after": "2023-01-01", "metadata": {"n": None}},
        "as_of": 1683554160,
        "min_score": -0.5,
        "explain": True,
    }
    times = {"reference_time": "2023-05-08", "timeout": 2.5}
    with client_of(service) as client:
        assert client.post("/v1/search", json={"query": "q", "boundary": "b", **given, **times}).status_code == 200
        client.post("/v1/search", json={"query": "q", "boundary": "b", "top_k": None, "explain": None})
    (asked, timeout), (bare, none) = seen
    assert {name: getattr(asked, name) for name in given} == given
    assert (asked.reference_time.isoformat(), timeout) == ("2023-05-08T00:00:00+00:00", 2.5)
    assert (bare.top_k, bare.explain, none) == (None, False, None)


def test_a_failing_query_of_several_is_named(client: TestClient) -> None:
    for second, said in (({"query": "x", "top_k": 0}, r"queries\[1\]\.top_k"), ("\0", "query 1")):
        body = {"queries": ["a", second], "boundary": "acme/ann"}
        refused(client.post("/v1/search", json=body), 422, "invalid", said)
    refused(client.post("/v1/search", json={"queries": ["a"]}), 422, "invalid", r"queries\[0\]\.boundary")
    body = {"queries": ["a", {"query": "b", "reference_time": "soon"}], "boundary": "b"}
    refused(client.post("/v1/search", json=body), 422, "invalid", r"queries\[1\]")


def test_messages_are_stored_once_under_one_key(client: TestClient) -> None:
    body = {"messages": ["One.", {"role": "user", "content": "Two."}], "boundary": "b", "wait": True}
    first = client.post("/v1/memories", json=body, headers={"Idempotency-Key": "k1"})
    assert first.status_code == 201
    assert first.json()["indexed"] is True
    again = client.post("/v1/memories", json=body, headers={"Idempotency-Key": "k1"})
    assert again.json()["ids"] == first.json()["ids"]
    assert len(client.get("/v1/memories?boundary=b").json()["items"]) == 2
    other = {**body, "messages": ["One.", "Three."]}
    refused(client.post("/v1/memories", json=other, headers={"Idempotency-Key": "k1"}), 409, "conflict")
    one = client.post("/v1/memories", json={"messages": "Just this.", "boundary": "c"}).json()
    assert client.get(f"/v1/memories/{one['ids'][0]}").json()["role"] == "user"


def test_a_trace_from_birth_to_purge(client: TestClient) -> None:
    client.post("/v1/memories", json={"messages": {"id": "x/1", "text": "Red."}, "boundary": "b", "metadata": {"k": 1}})
    path = "/v1/memories/x/1"
    assert client.get(path).json()["metadata"] == {"k": 1}
    assert client.get("/v1/memories/x%2F1?boundary=b").json() == client.get(path).json()
    assert client.patch(path, json={"text": "Blue.", "valid_to": "2030-01-01"}).json()["text"] == "Blue."
    refused(client.patch(path, json={"speaker": "Bo"}), 422, "invalid", "speaker")
    refused(client.patch(path, json={}), 422, "invalid", "at least one")
    assert [change["action"] for change in client.get("/v1/history/x/1").json()["items"]] == ["add", "update"]
    assert client.delete(path).status_code == 204
    assert client.delete(f"{path}?purge=true&boundary=b").status_code == 204
    refused(client.get(path), 404, "not-found")
    refused(client.delete(f"{path}?purge=yes"), 422, "invalid", "purge")


def test_pages_and_boundaries(client: TestClient) -> None:
    client.post("/v1/memories", json={"messages": [f"Note {n}." for n in range(7)], "boundary": "notes/a"})
    page = client.get("/v1/memories", params={"boundary": ["notes/", "nobody"], "limit": 5}).json()
    assert [item["text"] for item in page["items"]] == [f"Note {n}." for n in range(5)]
    rest = client.get("/v1/memories", params={"boundary": "notes/", "cursor": page["next_cursor"]}).json()
    assert ([item["text"] for item in rest["items"]], rest["next_cursor"]) == (["Note 5.", "Note 6."], None)
    assert len(client.get("/v1/memories?prefix=acme/ann/1").json()["items"]) == 3
    for query, said in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("cursor=-1", "cursor"),
        ("limt=5", "did you mean"),
    ):
        refused(client.get(f"/v1/memories?{query}"), 422, "invalid", said)
    refused(client.get("/v1/memories?limit=1001"), 413, "too-large", "limit")
    assert client.delete("/v1/boundaries/notes").json() == {"deleted": 0}
    assert client.delete("/v1/boundaries/notes/").json() == {"deleted": 7}
    assert client.delete("/v1/boundaries/acme%2Fann?purge=true").json() == {"deleted": 4}
    assert client.get("/v1/status").json()["traces"] == 0


def test_answers_and_handles(client: TestClient) -> None:
    answered = client.post("/v1/answer", json={"question": "What sank?", "boundary": "acme/ann"}).json()
    assert answered["cites"] == [LAKE[3].id]
    assert answered["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "calls": 1}
    many = {"questions": ["What sank?", "a fault"], "boundary": "acme/ann", "calibrate": False}
    raw, failed = client.post("/v1/answer", json=many).json()["results"]
    assert raw["rule"] == "not calibrated"
    assert failed["error"] == "the server was gone"
    own = {"boundary": "bo", "type": "fact", "key": "office/floor"}
    handle = client.post("/v1/handles/store", json={**own, "value": {"floor": 3}, "session": "s"}).json()
    assert handle == {"handle": "mem:fact:office/floor"}
    known = client.post("/v1/handles/retrieve", json={"boundary": "bo", **handle}).json()
    assert (known["key"], "value" in known) == ("office/floor", False)
    text = client.post("/v1/handles/materialize", json={"boundary": "bo", "handles": [handle["handle"]]}).json()["text"]
    assert text.endswith('{"floor": 3}')
    refused(client.post("/v1/handles/retrieve", json={"boundary": "ann", **handle}), 404, "not-found")
    refused(client.post("/v1/handles/store", json={**own, "value": 1, "typ": "fact"}), 422, "invalid", "did you mean")
    assert client.post("/v1/handles/forget", json={"boundary": "bo", **handle}).json() == {
        "forgotten": handle["handle"]
    }


def test_what_serves_the_server(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.head("/healthz").status_code == 200
    assert client.post("/v1/release-memory").status_code == 204
    page = client.get("/docs").text
    assert "curl -X POST http://localhost:8765/v1/search" in page
    elsewhere = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page)
    assert not elsewhere, "nothing is loaded from there"
    assert client.post("/v1/search", json={"query": "boat", "boundary": "acme/ann"}).json()["found"]


def test_the_document_names_every_path_and_its_examples_work() -> None:
    memory = memory_of()
    memory.add({"id": "D1:3", "text": "The course starts on Monday."}, boundary="acme/alice")
    with client_of(MemoryService(memory, reader=EchoReader(), warm_up=False)) as client:
        document = client.get("/openapi.json").json()
        routes = {re.sub(":name", "", route.path) for route in client.app.routes}  # type: ignore[attr-defined]
        assert set(document["paths"]) == routes - {"/docs", "/openapi.json", "/{rest}"}
        tried = 0
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                bodies = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                for example in bodies.get("examples", {}).values():
                    reply = client.request(method, path.replace("{id}", "D1:3"), json=example["value"])
                    assert reply.is_success, (path, reply.text)
                    tried += 1
        assert tried >= 10
        for name, schema in document["components"]["schemas"].items():
            for example in schema.get("examples", ()):
                schemas.compiled(schema, document["components"]["schemas"])(example, name)


# Errors and limits


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nope", 404, "not-found"),
        ("POST", "/", 404, "not-found"),
        ("GET", "/v1/search", 405, "method-not-allowed"),
        ("PUT", "/v1/memories", 405, "method-not-allowed"),
        ("BREW", "/v1/memories/x", 405, "method-not-allowed"),
        ("GET", "/v1/memories/nowhere", 404, "not-found"),
        ("GET", "/v1/memories/", 422, "invalid"),
        ("GET", "/v1/search/", 404, "not-found"),
    ],
)
def test_what_there_is_not(client: TestClient, method: str, path: str, status: int, kind: str) -> None:
    reply = client.request(method, path)
    refused(reply, status, kind)
    if status == 405:
        assert set(reply.headers["allow"].split(", ")) <= {"GET", "HEAD", "POST", "PATCH", "DELETE"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:3_x", True), ("a b", False), ("x" * 65, False), ("", False), ("a\x7fb", False), ("é", False)],
)
def test_request_ids_are_kept_if_they_may_stand_in_a_log(client: TestClient, given: str, kept: bool) -> None:
    own = client.get("/healthz", headers={b"X-Request-ID": given.encode("latin-1")}).headers["x-request-id"]
    assert (own == given) is kept
    assert re.fullmatch(r"[\w.:-]{1,64}", own)


def test_limits_hold_before_anything_is_read() -> None:
    limits = Limits(body_bytes=1000, queries=3, messages=3, text_chars=100, query_chars=50, page=10)
    with client_of(MemoryService(memory(), limits=limits, warm_up=False)) as client:
        parts: list[bytes] = []

        def chunks() -> Iterator[bytes]:
            for _ in range(100):
                parts.append(b"x" * 100)
                yield parts[-1]

        headers = {"content-type": "application/json"}
        reply = client.post("/v1/search", content=b"{" + b" " * 2000, headers=headers)
        refused(reply, 413, "too-large", "at most 1000 bytes")
        assert reply.headers["connection"] == "close"
        refused(client.post("/v1/search", content=chunks(), headers=headers), 413, "too-large", "at most 1000 bytes")
        refused(client.request("GET", "/healthz", content=b"x" * 2000), 413, "too-large")
    with client_of() as client:
        refused(client.request("GET", "/healthz", content=b"x" * 100_000), 413, "too-large")
    with client_of(MemoryService(memory(), limits=limits, warm_up=False)) as client:
        for body in ({"queries": ["a"] * 4, "boundary": "b"}, {"query": "a" * 51, "boundary": "b"}):
            refused(client.post("/v1/search", json=body), 413, "too-large")
        for messages in (["a"] * 4, "a" * 101, [{"content": [{"type": "text", "text": "a" * 101}]}]):
            refused(client.post("/v1/memories", json={"messages": messages, "boundary": "b"}), 413, "too-large")
        refused(client.get("/v1/memories?limit=11"), 413, "too-large")
        refused(
            client.post("/v1/search", json={"query": "a", "boundary": "b", "timeout": 121}), 422, "invalid", "timeout"
        )


def test_overload_says_when_to_come_back() -> None:
    service = MemoryService(memory(), warm_up=False)
    reasons = {"queue": (429, 2.2), "deadline": (503, 0.1)}
    with client_of(service) as client:
        for reason, (status, seconds) in reasons.items():

            async def search(*_: Any, error: Exception, **__: Any) -> Any:
                raise error

            error = Overloaded("queue: expected room, got none; wait", reason=reason, retry_after=seconds)
            service.search = lambda *_, error=error, **__: search(error=error)  # type: ignore[method-assign]
            reply = client.post("/v1/search", json={"query": "a", "boundary": "b"})
            plain = refused(reply, status, "overloaded")
            assert (plain["reason"], reply.headers["retry-after"]) == (reason, {"queue": "3", "deadline": "1"}[reason])


def test_a_server_is_ready_from_its_start_to_its_end() -> None:
    service = MemoryService(memory(), warm_up=False)
    app = create_app(service, mcp=False)

    async def session() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://s") as client:
            early = await client.get("/readyz")
            assert early.headers["retry-after"] == "1"
            refused(early, 503, "overloaded", "starting")
            assert (await client.get("/healthz")).status_code == 200
            await service.start()
            assert (await client.get("/readyz")).status_code == 200
            await service.stop()
            refused(await client.get("/readyz"), 503, "overloaded", "closing")
            refused(await client.post("/v1/search", json={"query": "a", "boundary": "b"}), 503, "overloaded")

    asyncio.run(session())


# Keys


def test_each_operation_needs_a_key_that_reaches_so_far(tmp_path: Path) -> None:
    keys = Keys(tmp_path / KEYS)
    secrets = {
        scope: keys.make(scope, scopes=[scope], boundaries=None if scope == "admin" else ["acme/ann"])
        for scope in ("read", "write", "admin")
    }
    with client_of(MemoryService(memory(), keys=keys, warm_up=False)) as client:
        document = client.get("/openapi.json").json()
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                reply = client.request(method, path.replace("{id}", "x").replace("{boundary}", "x"))
                if operation["security"]:
                    assert refused(reply, 401, "unauthorized")["title"] == "Unauthorized"
                    assert reply.headers["www-authenticate"] == "Bearer"
                else:
                    assert reply.status_code == 200
        asked = {"query": "boat", "boundary": "acme/ann"}

        def status(scope: str, method: str, path: str, **given: Any) -> int:
            headers = {"Authorization": f"Bearer {secrets[scope]}"}
            return int(client.request(method, path, headers=headers, **given).status_code)

        assert [status(scope, "POST", "/v1/search", json=asked) for scope in secrets] == [200, 403, 200]
        assert [status(scope, "POST", "/v1/search", json={**asked, "boundary": "acme/"}) for scope in secrets] == [
            403,
            403,
            200,
        ]
        assert [status(scope, "GET", "/metrics") for scope in secrets] == [403, 403, 200]
        told = {
            client.get(
                f"/v1/memories/{own}?boundary={where}", headers={"Authorization": f"Bearer {secrets['write']}"}
            ).json()["detail"]
            for own, where in ((LAKE[0].id, "acme/ann"), ("nowhere", "acme/ann"), ("nowhere", "nobody"))
        }
        assert len(told) == 1, "a refusal tells nothing of what is there"
        for wrong in ("", "Bearer", "Basic eDp5", f"Token {secrets['admin']}", "Bearer zm_x_y", "bearer  "):
            refused(client.get("/v1/status", headers={"Authorization": wrong}), 401, "unauthorized")
        assert client.get("/v1/status", headers={"Authorization": f"bearer {secrets['admin']}"}).status_code == 200
        two = [("Authorization", f"Bearer {secrets[scope]}") for scope in ("read", "admin")]
        refused(client.get("/v1/status", headers=two), 400, "bad-request", "authorization")


def test_a_web_page_cannot_have_a_browser_call_a_server_without_keys() -> None:
    with client_of(hosts=["localhost", "[::1]"]) as client:
        for host in ("localhost", "LOCALHOST:8765", "[::1]:8765", "[::1]"):
            assert client.get("/v1/status", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example:8765", "127.0.0.1", ""):
            refused(client.get("/v1/status", headers={"Host": host}), 421, "misdirected-request", "Host")
        for origin, status in {"http://localhost:3000": 204, "https://evil.example": 403, "null": 403, "": 403}.items():
            headers = {"Host": "localhost", "Origin": origin}
            assert client.post("/v1/release-memory", headers=headers).status_code == status, origin
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            reply = client.post("/v1/memories", content=b"{}", headers={"Host": "localhost", "Content-Type": kind})
            refused(reply, 415, "unsupported-media-type", "Content-Type")


# What is seen of it


@pytest.fixture
def logged() -> Iterator[Callable[..., io.StringIO]]:
    """Sets up logs to a stream, and takes them down."""
    made: list[logging.Handler] = []
    levels = {name: logging.getLogger(name).level for name in ("", "zeromem_torch", "uvicorn.error")}

    def start(**settings: Any) -> io.StringIO:
        stream = io.StringIO()
        made.append(logs.set_up(stream=stream, **settings))
        return stream

    yield start
    for handler in made:
        logging.getLogger().removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


SECRET = "Otterphrase"


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("text", [True, False])
def test_logs_hold_what_was_said_only_if_asked_to(logged: Any, as_json: bool, text: bool) -> None:
    stream = logged(as_json=as_json, text=text)
    service = MemoryService(memory(), warm_up=False)
    with client_of(service, log_text=text) as client:
        client.post("/v1/memories", json={"messages": f"{SECRET} one.", "boundary": f"b-{SECRET}"})
        client.post("/v1/search", json={"query": f"{SECRET}?", "boundary": f"b-{SECRET}"})
        client.get(f"/v1/memories/{SECRET}?boundary={SECRET}", headers={"X-Request-ID": "mine"})
        client.post("/v1/search", json={"query": f"{SECRET}\0", "boundary": "b"})

        async def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"a statement with {SECRET} in it")

        service.get = fails  # type: ignore[method-assign]
        reply = client.get("/v1/memories/x")
        assert SECRET not in reply.text
        refused(reply, 500, "internal-error", "request_id")
    lines = stream.getvalue()
    assert (SECRET in lines) is text
    assert "RuntimeError" in lines
    assert "in fails" in lines, "where it happened"
    if as_json:
        first, *plain, last = [json.loads(line) for line in lines.splitlines()]
        assert (first["event"], last["event"]) == ("started", "stopped")
        assert [line["status"] for line in plain] == [201, 200, 404, 422, 500]
        assert {line["route"] for line in plain} == {"/v1/memories", "/v1/search", "/v1/memories/{id}"}
        assert plain[2]["id"] == "mine"
        assert plain[4]["level"] == "error"
    else:
        assert "id=mine key=local method=GET route=/v1/memories/{id} status=404" in lines


def test_a_value_can_neither_end_a_line_of_the_log_nor_pass_for_a_field(logged: Any) -> None:
    stream = logged()
    logs.event("note\nevil", detail="x\nstatus=200", key="a b", ms=1.23456, none=None)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"note\nevil detail='x\nstatus=200' key='a b' ms=1.235")


def test_metrics_name_routes_and_nobody(client: TestClient) -> None:
    client.post("/v1/search", json={"query": SECRET, "boundary": SECRET})
    client.get(f"/v1/memories/{SECRET}")
    client.get(f"/{SECRET}")
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    for line in (
        'zeromem_requests_total{route="/v1/search",status="200"} 1.0',
        'zeromem_requests_total{route="/v1/memories/{id}",status="404"} 1.0',
        'zeromem_requests_total{route="unknown",status="404"} 1.0',
        'zeromem_request_seconds_count{route="/v1/search"} 1.0',
    ):
        assert line in reply.text
    assert SECRET not in reply.text


def test_traces_continue_the_callers_and_hold_no_text() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    trace = "0af7651916cd43dd8448eb211c80319c"
    with client_of(tracing=tracing) as client:
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "X-Request-ID": "mine"}
        client.post("/v1/search", json={"query": SECRET, "boundary": SECRET}, headers=headers)
        client.get(f"/v1/memories/{SECRET}")
    tracing.close()
    first, second = exporter.get_finished_spans()
    assert (first.name, f"{first.context.trace_id:032x}") == ("POST /v1/search", trace)
    assert dict(first.attributes or {}) == {"zeromem.request_id": "mine"}
    assert (second.attributes or {})["error.type"] == "NotFound"
    assert SECRET not in "".join(span.to_json() for span in (first, second))


def test_traces_need_something_that_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("zeromem_torch.serving.tracing.import_module", missing)
    with pytest.raises(ImportError, match="pip install"):
        Tracing()


# Clients that leave, and servers that are real


def call(app: Any, messages: list[dict[str, Any]], sent: list[dict[str, Any]], gone: asyncio.Event) -> Awaitable[None]:
    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/search", "query_string": b"", "headers": headers}
    return app(scope, receive, send)  # type: ignore[no-any-return]


def test_work_whose_client_has_left_is_dropped() -> None:
    service = MemoryService(memory(), warm_up=False)
    state: list[str] = []

    async def search(*_: Any, **__: Any) -> Any:
        state.append("asked")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            state.append("dropped")
            raise

    service.search = search  # type: ignore[method-assign]
    app = create_app(service, mcp=False)
    body = json.dumps({"query": "a", "boundary": "b"}).encode()

    async def session() -> None:
        gone, sent = asyncio.Event(), list[dict[str, Any]]()
        running = asyncio.ensure_future(call(app, [{"type": "http.request", "body": body}], sent, gone))
        while not state:
            await asyncio.sleep(0.001)
        gone.set()
        await asyncio.wait_for(running, 5)
        assert (state, sent) == (["asked", "dropped"], [])
        gone.set()
        part = {"type": "http.request", "body": body[:5], "more_body": True}
        await asyncio.wait_for(call(app, [part], sent, gone), 5)
        assert (state, sent) == (["asked", "dropped"], []), "one that left while it sent was not asked for"

    asyncio.run(session())
    assert 'route="/v1/search",status="499"' in service.metrics.render()[0].decode()


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    service = MemoryService(memory(), limits=Limits(timeout=0.05), warm_up=False)
    app = create_app(service, mcp=False)

    async def session() -> None:
        for parts in ([], [{"type": "http.request", "body": b"{", "more_body": True}]):
            sent: list[dict[str, Any]] = []
            await asyncio.wait_for(call(app, list(parts), sent, asyncio.Event()), 5)
            assert sent[0]["status"] == 408
            assert (b"connection", b"close") in sent[0]["headers"]

    asyncio.run(session())


def test_large_bodies_have_only_so_much_room() -> None:
    service = MemoryService(memory(), limits=Limits(timeout=0.2, body_bytes=100_000), warm_up=False)
    app = create_app(service, mcp=False)

    async def session() -> None:
        waiting: list[list[dict[str, Any]]] = [[] for _ in range(18)]
        part = {"type": "http.request", "body": b"{", "more_body": True}
        running = [asyncio.ensure_future(call(app, [part], sent, asyncio.Event())) for sent in waiting]
        await asyncio.sleep(0.05)
        refusals = [sent for sent in waiting if sent]
        assert [sent[0]["status"] for sent in refusals] == [503, 503], "sixteen may be under way"
        assert json.loads(refusals[0][1]["body"])["reason"] == "bodies"
        assert 'zeromem_shed_total{reason="bodies"} 2.0' in service.metrics.render()[0].decode()
        await asyncio.wait_for(asyncio.gather(*running), 5)
        sent: list[dict[str, Any]] = []
        await service.start()
        whole = {"type": "http.request", "body": json.dumps({"query": "a", "boundary": "b"}).encode()}
        await asyncio.wait_for(call(app, [whole], sent, asyncio.Event()), 5)
        assert sent[0]["status"] == 200, "room was given back"
        await service.stop()

    asyncio.run(session())


def test_a_client_that_hangs_up_on_a_real_server_frees_it() -> None:
    service = MemoryService(memory(), warm_up=False)
    state: list[str] = []

    async def search(*_: Any, **__: Any) -> Any:
        try:
            await asyncio.sleep(30)
        finally:
            state.append("ended")

    service.search = search  # type: ignore[method-assign]
    with serving(create_app(service, mcp=False)) as url, httpx2.Client(base_url=url, timeout=0.3) as client:
        with pytest.raises(httpx2.TimeoutException):
            client.post("/v1/search", json={"query": "a", "boundary": "b"})
        for _ in range(100):
            if state:
                break
            client.get("/healthz", timeout=5)
        assert state == ["ended"]


def test_a_query_and_a_question_are_told_apart() -> None:
    with client_of(MemoryService(memory(), reader=EchoReader(), warm_up=False)) as client:
        for path, field, meant in (
            ("answer", "query", "question"),
            ("answer", "queries", "questions"),
            ("search", "question", "query"),
            ("search", "questions", "queries"),
        ):
            reply = client.post(f"/v1/{path}", json={field: "boat", "boundary": "b"})
            assert f"did you mean '{meant}'?" in refused(reply, 422, "invalid")["detail"]


# Schemas


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "x"], [1, None, True, [], {}]),
        ({"type": ["string", "null"]}, ["x", None], [1]),
        ({"type": "integer", "minimum": 1}, [1, 10**30], [0, 1.0, "1", True, None]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 2}, [0.1, 2], [0, 2.1, False]),
        ({"type": "boolean"}, [True, False], [0, 1, "true", None]),
        ({"type": "string", "enum": ["a", "b"]}, ["a"], ["c", "A", 1]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1]], [[], [1, 2, 3], ["1"]]),
        ({"type": "object", "additionalProperties": {"type": "string"}}, [{}, {"a": "b"}], [{"a": 1}, []]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a", ["a"]], [1, [1], None]),
    ],
)
def test_a_compiled_schema_refuses_what_it_does_not_describe(schema: Any, good: list[Any], bad: list[Any]) -> None:
    check = schemas.compiled(schema, {})
    for value in good:
        check(value, "value")
    for value in bad:
        with pytest.raises(ZeroMemError, match=r"^value.*: expected"):
            check(value, "value")


def test_an_object_names_what_is_wrong_in_it_and_what_was_meant() -> None:
    inner: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    inner |= {"additionalProperties": False}
    schema: Any = {"type": "object", "properties": {"items": {"type": "array", "items": {"$ref": "#/x/Inner"}}}}
    check = schemas.compiled(schema, {"Inner": inner})
    check({"items": [{"name": "x"}], "other": 1}, "")
    for value, said in (
        ({"items": [{"name": "x"}, {"name": 1}]}, r"items\[1\]\.name: expected a text"),
        ({"items": [{"nam": "x"}]}, "did you mean 'name'"),
        ({"items": [{}]}, r"items\[0\]\.name: expected a value"),
        ({"items": "x"}, "items: expected a list"),
    ):
        with pytest.raises(ZeroMemError, match=said):
            check(value, "")
