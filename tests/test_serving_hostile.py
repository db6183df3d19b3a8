"""Hostile input: whatever is sent, the answer is a refusal in words, the server goes on, and nothing was written."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import serving
from starlette.testclient import TestClient
from toys import EchoReader, memory_of, talk

from zeromem_torch.library import ZeroMem
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import Limits, MemoryService

LAKE = talk("acme/ann", ["We went to the lake.", "Was it cold?"], ["The red boat sank."])
JSON = {"content-type": "application/json"}
POSTS = ["/v1/search", "/v1/memories", "/v1/answer", *(f"/v1/handles/{name}" for name in ("store", "query", "forget"))]


@pytest.fixture(scope="module")
def memory() -> ZeroMem:
    return memory_of(*LAKE)


@pytest.fixture(scope="module")
def client(memory: ZeroMem) -> Iterator[TestClient]:
    service = MemoryService(memory, limits=Limits(body_bytes=1 << 20), reader=EchoReader(), warm_up=False)
    with TestClient(create_app(service, mcp=False)) as client:
        yield client


@pytest.fixture(autouse=True)
def unchanged(memory: ZeroMem, client: TestClient) -> Iterator[None]:
    """What was hostile has written nothing, and the next request is answered."""
    before = memory._record.row_hash()
    yield
    assert memory._record.row_hash() == before
    found = client.post("/v1/search", json={"query": "What sank?", "boundary": "acme/ann"})
    assert found.json()["items"][0]["text"] == "The red boat sank."


def refused(reply: Any) -> None:
    """In words that hold neither a traceback nor much of what was sent."""
    assert 400 <= reply.status_code < 500, (reply.status_code, reply.text[:500])
    assert reply.headers["content-type"] == "application/problem+json"
    detail = json.loads(reply.content)["detail"]
    assert len(detail) < 2000
    assert "Traceback" not in detail
    assert ".py" not in detail


DEEP = 100_000
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"query"',
    "half": b'{"query": "a", "boundary"',
    "two": b'{"query": "a", "boundary": "b"} {"query": "a"}',
    "not UTF-8": b'{"query": "\xff\xfe", "boundary": "b"}',
    "UTF-16": '{"query": "a", "boundary": "b"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"query": "a", "boundary": "b"}',
    "a control character": b'{"query": "a\x01", "boundary": "b"}',
    "deep lists": b'{"query": ' + b"[" * DEEP + b"]" * DEEP + b', "boundary": "b"}',
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep and open": b"[" * DEEP,
    "a field twice": b'{"query": "a", "query": "b", "boundary": "b"}',
    "a field twice, escaped": b'{"query": "a", "qu\\u0065ry": "b", "boundary": "b"}',
    "NaN": b'{"query": "a", "boundary": "b", "min_score": NaN}',
    "Infinity": b'{"query": "a", "boundary": "b", "min_score": -Infinity}',
    "a float too large": b'{"query": "a", "boundary": "b", "min_score": 1e999}',
    "digits": b'{"query": "a", "boundary": "b", "top_k": ' + b"9" * 100_000 + b"}",
    "many fields": json.dumps({str(n): n for n in range(50_000)}).encode(),
    "a long field": b'{"' + b"x" * 500_000 + b'": 1}',
    "a prototype": b'{"__proto__": {"admin": true}, "query": "a", "boundary": "b"}',
    "a comment": b'{"query": "a", /* x */ "boundary": "b"}',
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94.",
    "a form": b"query=a&boundary=b",
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", BODIES)
def test_bodies(client: TestClient, path: str, name: str) -> None:
    refused(client.post(path, content=BODIES[name], headers=JSON))


SURROGATE = "\\ud800"


def each(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


SEARCHES: list[Any] = [
    *each("query", None, 1, True, [], {}, "", " ", "\0", "\u200b", "a" * 9_000),
    *each("boundary", None, 1, [], {}, "", " ", "/", "a//b", "//", "a\0", "a//"),
    *each("boundary", [""], [["a"]], [None], ["a", "b//"], {"$ne": "a"}),
    *each("top_k", 0, -1, 1.5, "5", True, [5], {}, 1e3),
    *each("token_budget", 0, -1, "5", False),
    *each("min_score", 2, -2, "0.5", True, [0]),
    *each("explain", 1, 0, "true", [], "false"),
    *each("as_of", "soon", "", 1e300, -1e300, 10**30, True, [], {}, "2023-13-01", "x" * 200),
    *each("reference_time", "soon", 1e300, [], "99999-01-01", "0000-00-00"),
    *each("timeout", 0, -1, 121, 1e300, "5", True),
    {"filters": []},
    {"filters": {"nope": 1}},
    {"filters": {"speaker": []}},
    {"filters": {"speaker": [1]}},
    {"filters": {"speaker": {"$ne": ""}}},
    {"filters": {"after": None}},
    {"filters": {"after": {}}},
    {"filters": {"metadata": {"k": [1]}}},
    {"filters": {"metadata": {"k": {"$gt": 0}}}},
    {"filters": {"metadata": []}},
    {"queries": ["a"]},
    {"user_id": "u"},
    {"admin": True},
]


@pytest.mark.parametrize("change", SEARCHES, ids=lambda change: json.dumps(change)[:60])
def test_searches(client: TestClient, change: Any) -> None:
    refused(client.post("/v1/search", json={"query": "boat", "boundary": "acme/ann", **change}))
    rest = {name: value for name, value in change.items() if name not in ("query", "queries", "timeout", "user_id")}
    if rest and "boundary" not in rest:
        several = {"queries": ["boat", {"query": "boat", **rest}], "boundary": "acme/ann"}
        refused(client.post("/v1/search", json=several))


@pytest.mark.parametrize("field", ["query", "boundary", "filters", "as_of"])
def test_lone_surrogates(client: TestClient, field: str) -> None:
    values = {"query": '"boat"', "boundary": '"acme/ann"', "filters": '{"speaker": "Ann"}', "as_of": '"2023-05-08"'}
    values[field] = f'{{"speaker": "{SURROGATE}"}}' if field == "filters" else f'"a{SURROGATE}"'
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"
    refused(client.post("/v1/search", content=body, headers=JSON))
    refused(client.post("/v1/search", content=f'{{"{SURROGATE}": 1, "query": "a", "boundary": "b"}}', headers=JSON))


MESSAGES: list[Any] = [
    *(None, 1, True, "", " ", "\0", [], [[]], [None], [1], {}, [{}], [" "], "x" * 70_000),
    {"text": None},
    {"text": 1},
    {"text": "a", "content": "b"},
    {"text": "a\0"},
    {"text": "a", "texts": "b"},
    {"text": [{"type": "image_url"}]},
    {"text": [{"text": 1}]},
    {"text": ["a"]},
    {"text": [{"text": "x" * 40_000}, {"text": "x" * 40_000}]},
    {"text": "a", "boundary": "x//y"},
    {"text": "a", "boundary": ["a", "b"]},
    {"text": "a", "boundary": "a/"},
    {"text": "a", "id": ""},
    {"text": "a", "id": 7},
    {"text": "a", "id": "x" * 2_000},
    {"text": "a", "order": 2**63},
    {"text": "a", "order": 1.5},
    {"text": "a", "order": True},
    {"text": "a", "time": "soon"},
    {"text": "a", "time": 1e300},
    {"text": "a", "valid_from": "2024-01-01", "valid_to": "2023-01-01"},
    {"text": "a", "metadata": []},
    {"text": "a", "metadata": {"k": []}},
    {"text": "a", "metadata": {"k": None}},
    {"text": "a", "metadata": {"": 1}},
    {"text": "a", "metadata": {"k": 2**64}},
    {"text": "a", "metadata": {"k\0": 1}},
    {"text": "a", "tool_calls": 5},
    {"text": "a", "tool_calls": [5]},
    {"text": "a", "tool_calls": [{"function": 5}]},
    {"text": "a", "tool_calls": [{"function": None}]},
    {"text": "a", "tool_calls": [{}]},
    {"text": "a", "tool_call_id": []},
    {"text": "a", "name": "Ann", "speaker": "Bo"},
    {"text": "a", "role": "x\0"},
    ["fine", {"text": "a", "nope": 1}],
    ["fine"] * 1_025,
]


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda messages: json.dumps(messages)[:60])
def test_messages(client: TestClient, messages: Any) -> None:
    refused(client.post("/v1/memories", json={"messages": messages, "boundary": "b"}))


ADDS: list[Any] = [
    *each("boundary", None, "", "a/", "/", "a//b", ["a"], 1, "x" * 2_000),
    *each("timestamp", "soon", [], True, 1e300),
    *each("metadata", [], {"k": {}}, "x", {"k": None}),
    *each("overwrite", 1, "true", []),
    *each("wait", 1, "true", []),
    {"session": 1},
    {"actor": "root"},
    {"progress": 1},
    {"index": False},
    {"timeout": 0},
]


@pytest.mark.parametrize("change", ADDS, ids=lambda change: json.dumps(change)[:60])
def test_adds(client: TestClient, change: Any) -> None:
    refused(client.post("/v1/memories", json={"messages": "Hello.", "boundary": "b", **change}))


PATHS = [
    ("GET", "/v1/memories/../../etc/passwd"),
    ("GET", "/v1/memories/..%2f..%2fetc%2fpasswd"),
    ("GET", "/v1/memories/%2e%2e"),
    ("GET", "/v1/memories/%00"),
    ("GET", "/v1/memories/%ff"),
    ("GET", "/v1/memories/%c0%af"),
    ("GET", "/v1/memories/%ed%a0%80"),
    ("GET", "/v1/memories/a%0d%0aX-Evil:%201"),
    ("GET", "/v1/memories/" + "x" * 5_000),
    ("GET", "/v1/memories/%25252e"),
    ("GET", "/v1/memories/x?boundary="),
    ("GET", "/v1/memories/x?boundary=%00"),
    ("GET", "/v1/memories/x?boundary=a&boundary=b"),
    ("GET", "/v1/memories/x?boundary=%ff"),
    ("GET", "/v1/memories/x?purge=true"),
    ("GET", "/v1/memories/x?" + "a=b&" * 5_000),
    ("GET", "/v1/memories?limit=1e3"),
    ("GET", "/v1/memories?limit=%D9%A1"),
    ("GET", "/v1/memories?limit=-1"),
    ("GET", "/v1/memories?limit=99999999999999999999"),
    ("GET", "/v1/memories?limit=5&limit=6"),
    ("GET", "/v1/memories?cursor=" + "9" * 30),
    ("GET", "/v1/memories?cursor=1%20OR%201=1"),
    ("GET", "/v1/memories?boundary=a//b"),
    ("GET", "/v1/memories?boundary=/"),
    ("GET", "/v1/memories?prefix=" + "x" * 5_000),
    ("GET", "/v1/history/"),
    ("DELETE", "/v1/boundaries/"),
    ("DELETE", "/v1/boundaries//"),
    ("DELETE", "/v1/boundaries/%2F"),
    ("DELETE", "/v1/boundaries/a%2F%2Fb"),
    ("DELETE", "/v1/boundaries/acme%2Fann?purge=1"),
    ("DELETE", "/v1/boundaries/acme%2Fann?purge=true&purge=false"),
    ("DELETE", "/v1/memories/acme/ann/1:1?boundary=acme/"),
    ("DELETE", "/v1/memories"),
    ("POST", "/v1/handles/../status"),
    ("POST", "/v1/handles/memory_store"),
    ("PATCH", "/v1/memories/"),
    ("GET", "/v1//memories"),
    ("GET", "//v1/memories"),
    ("GET", "/V1/MEMORIES"),
    ("GET", "/v1/memories;x=y"),
    ("CONNECT", "/v1/memories"),
    ("TRACE", "/v1/memories"),
    ("OPTIONS", "/v1/memories"),
]


@pytest.mark.parametrize(("method", "path"), PATHS, ids=[f"{method} {path[:50]}" for method, path in PATHS])
def test_paths(client: TestClient, method: str, path: str) -> None:
    refused(client.request(method, path, headers=JSON, content=b"{}" if method in ("POST", "PATCH") else b""))


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/jsonx"},
        {"content-length": "-1"},
        {"content-length": "1, 1"},
        {"content-length": "0x10"},
        {"content-length": "9" * 30},
        {"content-length": "٣"},
        {"idempotency-key": ""},
        {"idempotency-key": "a b"},
        {"idempotency-key": "x" * 201},
        {"idempotency-key": "é"},
    ],
    ids=lambda headers: str(headers)[:60],
)
def test_headers(client: TestClient, headers: dict[str, str]) -> None:
    raw = {name.encode(): value.encode() for name, value in {**JSON, **headers}.items()}
    refused(client.post("/v1/memories", content=b'{"messages": "a", "boundary": "b"}', headers=raw))


@pytest.mark.parametrize("name", ["authorization", "content-type", "host", "idempotency-key"])
def test_headers_that_come_twice(client: TestClient, name: str) -> None:
    twice = [("content-type", "application/json"), (name, "a"), (name, "application/json")]
    refused(client.post("/v1/memories", content=b'{"messages": "a", "boundary": "b"}', headers=twice))


HANDLES: list[tuple[str, Any]] = [
    ("store", {"type": "fact", "key": "k"}),
    ("store", {"type": "opinion", "key": "k", "value": "v"}),
    ("store", {"type": "fact", "key": "k//", "value": "v"}),
    ("store", {"type": "fact", "key": "", "value": "v"}),
    ("store", {"type": "fact", "key": "k", "value": "v", "boundary": "b/"}),
    ("store", {"type": "fact", "key": "k", "value": "v", "confidence": 2}),
    ("store", {"type": "fact", "key": "k", "value": "v", "ttl_seconds": 1e300}),
    ("store", {"type": "fact", "key": "k", "value": "v", "source": "nowhere"}),
    ("store", {"type": "fact", "key": "k", "value": "x" * 70_000}),
    ("store", {"type": "fact", "key": "k", "value": ["x" * 70_000]}),
    ("store", {"type": "fact", "key": "k", "value": json.loads("[" * 500 + "]" * 500)}),
    ("retrieve", {"handle": "mem:fact:k"}),
    ("retrieve", {"handle": "mem:fact:../k"}),
    ("retrieve", {"handle": 7}),
    ("query", {"limit": 0}),
    ("query", {"text": "a", "key": "b"}),
    ("materialize", {"handles": []}),
    ("materialize", {"handles": ["mem:fact:k"], "token_budget": 0}),
    ("forget", {}),
    ("forget", {"handle": LAKE[0].id}),
]


@pytest.mark.parametrize(("operation", "arguments"), HANDLES, ids=[f"{o} {json.dumps(a)[:50]}" for o, a in HANDLES])
def test_handles(client: TestClient, operation: str, arguments: Any) -> None:
    refused(client.post(f"/v1/handles/{operation}", json={"boundary": "b", **arguments}))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["query", "queries", "boundary", "top_k", "filters", "explain", "as_of", "timeout", "question", "handle", "x"]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(["/v1/search", "/v1/answer", "/v1/handles/query"]), body=st.dictionaries(FIELDS, ANY) | ANY)
def test_anything_is_answered_without_a_fault(client: TestClient, path: str, body: Any) -> None:
    reply = client.post(path, content=json.dumps(body), headers=JSON)
    assert reply.status_code < 500 or reply.json()["type"] == "urn:zeromem:overloaded", reply.text


# What a client library would not send


RAW: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "two lengths": b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    "length and chunks": b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /admin HTTP/1.1\r\nHost: x\r\n\r\n",
    "a bad chunk": b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no host": b"GET /v1/memories/x HTTP/1.1\r\n\r\n",
    "a folded header": b"GET /v1/memories/x HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
    "a header without a name": b"GET /v1/memories/x HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    "a space before the colon": b"GET /v1/memories/x HTTP/1.1\r\nHost: x\r\nContent-Length : 5\r\n\r\n",
    "a long line": b"GET /v1/memories/" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "many headers": b"GET /v1/memories/x HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    "an absolute path": b"GET http://evil.example/v1/memories/x HTTP/1.1\r\nHost: x\r\n\r\n",
    "an upgrade": b"GET /v1/memories/x HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "a body cut short": b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 50\r\n\r\n{",
}


@pytest.fixture(scope="module")
def address(memory: ZeroMem) -> Iterator[tuple[str, int]]:
    with serving(create_app(MemoryService(memory, warm_up=False), mcp=False)) as url:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        yield parts.hostname, parts.port


@pytest.mark.parametrize("name", RAW)
def test_what_a_client_library_would_not_send(address: tuple[str, int], name: str) -> None:
    with socket.create_connection(address, timeout=5) as connection:
        answer = b""
        try:
            connection.sendall(RAW[name])
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
        except (ConnectionError, TimeoutError):  # refused by hanging up
            pass
    statuses = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(status.startswith(b"4") for status in statuses), answer
    assert b"Traceback" not in answer
