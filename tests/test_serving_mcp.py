"""Memory over the Model Context Protocol, as the official SDK's own client meets it: in process, by HTTP, by stdio."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import TextContent
from toys import RULES, HashEncoder

from zeromem_torch.cli import main
from zeromem_torch.errors import ZeroMemError
from zeromem_torch.evidence import Evidence
from zeromem_torch.library import ZeroMem
from zeromem_torch.serving.keys import KEYS, LOCAL, Caller, Keys
from zeromem_torch.serving.logs import PlainFormatter
from zeromem_torch.serving.mcp import INSTRUCTIONS, OPERATIONS, create_mcp, narrowed
from zeromem_torch.serving.refusals import Forbidden, Overloaded
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import Limits, MemoryService

READS = {"search_memory", "get_memory", "list_memories", "memory_retrieve", "memory_query", "memory_materialize"}
WRITES = {"add_memory", "delete_memory", "memory_store", "memory_forget"}
URL = "http://127.0.0.1:8765"
Called = dict[str, Any]


@asynccontextmanager
async def unstarted(folder: Path, **settings: Any) -> AsyncIterator[MemoryService]:
    with ZeroMem.open(folder, encoder=HashEncoder(), config=RULES) as memory:
        yield MemoryService(memory, keys=Keys(folder / KEYS), warm_up=False, **settings)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[MemoryService]:
    async with unstarted(folder) as service:
        await service.start()
        try:
            yield service
        finally:
            await service.stop()


def in_process(service: MemoryService, caller: Caller = LOCAL, mode: str = "auto") -> Client:
    return Client(create_mcp(service, lambda _: caller), mode=mode)


@asynccontextmanager
async def by_http(service: MemoryService) -> AsyncIterator[Callable[..., Any]]:
    """The whole application, which starts the service, without a socket; gives what connects to it."""
    app = create_app(service)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app.router.lifespan_context(app))

        @asynccontextmanager
        async def connect(key: str | None = None, mode: str = "auto") -> AsyncIterator[Client]:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with (
                httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, headers=headers) as http,
                Client(streamable_http_client(f"{URL}/mcp", http_client=http), mode=mode) as client,
            ):
                yield client

        yield connect


def by_stdio(folder: Path, *arguments: str, **environment: str) -> StdioServerParameters:
    """A process of its own that serves with the toy encoder."""
    script = (
        "import asyncio, sys; from pathlib import Path; from toys import RULES, HashEncoder\n"
        "import zeromem_torch.library as library; library.load_encoder = lambda *a, **k: HashEncoder()\n"
        "from zeromem_torch.cli import main; raise SystemExit(main(sys.argv[1:]))"
    )
    config = folder.parent / "rules.toml"
    config.write_text('[substrate]\nentities = "rules"\n')
    root = Path(__file__).resolve().parent
    path = os.pathsep.join([str(root), str(root.parent)])
    command = ["-c", script, "mcp", str(folder), "--config", str(config), "--threads", "1", *arguments]
    return StdioServerParameters(command=sys.executable, args=command, env={"PYTHONPATH": path, **environment})


async def call(client: Client, tool: str, **arguments: Any) -> Called:
    """What a tool returned; its text says the same as its structure."""
    result = await client.call_tool(tool, arguments)
    (block,) = result.content
    assert isinstance(block, TextContent)
    data: Called = result.structured_content
    assert json.loads(block.text) == data
    assert result.is_error == ("error" in data)
    return data


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    data = await call(client, tool, **arguments)
    assert set(data) == {"error"}, data
    code: str = data["error"]["code"]
    assert data["error"]["message"]
    return code


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def a_day_of_a_model(client: Client) -> None:
    """Every tool once, in the order in which a model would come to use them; no boundary is named."""
    assert client.instructions == INSTRUCTIONS
    assert {tool.name for tool in (await client.list_tools()).tools} == READS | WRITES

    assert not (await call(client, "search_memory", query="What is the boat called?"))["found"]
    talk = [
        {"role": "user", "content": "I bought a red boat.", "name": "Ann", "id": "a/1", "time": "2025-03-02T10:00"},
        {"role": "assistant", "content": "What is it called?", "id": "a/2", "time": "2025-03-02T10:01"},
        {"role": "user", "content": "The red boat is called Otter.", "name": "Ann", "id": "a/3"},
    ]
    assert await call(client, "add_memory", messages=talk, session="monday") == {
        "ids": ["a/1", "a/2", "a/3"],
        "indexed": True,
    }
    (own,) = (await call(client, "add_memory", text="Call it Otter ✓", metadata={"kind": "name"}))["ids"]

    found = await call(client, "search_memory", query="What is the red boat called?", top_k=1)
    assert found["found"]
    assert found["items"][0]["id"] == "a/3"
    assert found["items"][0]["text"] == "The red boat is called Otter."
    assert found["items"][0]["speaker"] == "Ann"
    assert (await call(client, "search_memory", query="name", filters={"metadata": {"kind": "name"}}))["items"]

    assert (await call(client, "get_memory", id="a/1"))["time"].startswith("2025-03-02T10:00")
    first = await call(client, "list_memories", limit=3)
    assert [item["id"] for item in first["items"]] == ["a/1", "a/2", "a/3"]
    rest = await call(client, "list_memories", cursor=first["next_cursor"])
    assert [item["id"] for item in rest["items"]] == [own]
    assert rest["next_cursor"] is None

    assert await call(client, "delete_memory", id=own) == {"deleted": own}
    assert await refused(client, "get_memory", id=own) == "not_found"

    stored = await call(client, "memory_store", type="fact", key="boat/name", value="Otter", source="a/3")
    handle = stored["handle"]
    assert handle == "mem:fact:boat/name"
    known = await call(client, "memory_retrieve", handle=handle)
    assert known["source"] == "a/3"
    assert "Otter" not in json.dumps(known)
    assert (await call(client, "memory_query", key="boat/"))["matches"][0]["handle"] == handle
    assert (await call(client, "memory_query", text="What is the boat called?"))["matches"]
    assert "Otter" in (await call(client, "memory_materialize", handles=[handle]))["text"]
    assert await call(client, "memory_forget", handle=handle) == {"forgotten": handle}
    assert await refused(client, "memory_retrieve", handle=handle) == "not_found"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_day_in_process(tmp_path: Path, mode: str) -> None:
    async def work() -> None:
        async with (
            served(tmp_path / "m") as service,
            in_process(service, Caller("k", frozenset(["read", "write"]), ("ann",)), mode) as client,
        ):
            await a_day_of_a_model(client)

    run(work())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_day_over_http(tmp_path: Path, mode: str) -> None:
    key = Keys(tmp_path / "m" / KEYS).make("k", boundaries=["ann"])

    async def work() -> None:
        async with (
            unstarted(tmp_path / "m") as service,
            by_http(service) as connect,
            connect(key, mode) as client,
        ):
            await a_day_of_a_model(client)

    run(work())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_day_over_stdio_in_a_process_of_its_own(tmp_path: Path, mode: str) -> None:
    async def work() -> None:
        async with Client(by_stdio(tmp_path / "m", "--boundary", "ann"), mode=mode) as client:
            await a_day_of_a_model(client)

    run(work())
    with ZeroMem.open(tmp_path / "m", encoder=HashEncoder()) as memory:
        assert [trace.id for trace in memory.list()] == ["a/1", "a/2", "a/3"]
        assert memory.boundaries == ("ann",)
        assert memory.verify().ok


# What a model is told


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tool_says_what_it_takes(name: str) -> None:
    tool = OPERATIONS[name].tool
    Draft202012Validator.check_schema(tool.input_schema)
    assert tool.description
    assert tool.title
    assert tool.input_schema["additionalProperties"] is False
    told = [{**known.get("items", {}), **known} for known in tool.input_schema["properties"].values()]
    assert all(known["description"] for known in told)
    assert set(tool.input_schema["required"]) <= set(tool.input_schema["properties"])
    assert "boundary" not in tool.input_schema["required"]
    assert tool.annotations is not None
    assert tool.annotations.read_only_hint is (name in READS)
    assert tool.annotations.destructive_hint is (name in ("delete_memory", "memory_forget"))


def test_a_model_is_shown_what_its_key_allows(tmp_path: Path) -> None:
    async def work() -> None:
        async with served(tmp_path / "m") as service:
            for scopes, shown in ((["read"], READS), (["write"], WRITES), (["admin"], READS | WRITES)):
                async with in_process(service, Caller("k", frozenset(scopes), ("ann",))) as client:
                    assert {tool.name for tool in (await client.list_tools()).tools} == shown
                    for hidden in (READS | WRITES) - shown:  # called all the same
                        needed = OPERATIONS[hidden].tool.input_schema["required"]
                        given: Called = {"type": "fact", "handles": ["mem:fact:a"], "handle": "mem:fact:a"}
                        given |= {"text": "x"} if hidden == "add_memory" else {}
                        allowed = {n: given.get(n, "x") for n in [*needed, *(["text"] if "text" in given else [])]}
                        assert await refused(client, hidden, **allowed) == "forbidden"

    run(work())


# Boundaries


def test_a_key_of_several_boundaries_names_one_to_write_and_searches_all(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            served(tmp_path / "m") as service,
            in_process(service, Caller("k", frozenset(["read", "write"]), ("acme/", "ann"))) as client,
        ):
            assert await refused(client, "add_memory", text="The red boat sank.") == "refused"
            assert await refused(client, "memory_query") == "refused"
            for boundary in ("acme", "acme/x", "ann"):
                await call(client, "add_memory", text="The red boat sank.", boundary=boundary)
            await service.add(LOCAL, [{"text": "The red boat sank."}], boundary="bob", wait=True)
            everywhere = await call(client, "search_memory", query="What sank?", top_k=9)
            assert {item["boundary"] for item in everywhere["items"]} == {"acme", "acme/x", "ann"}
            below = await call(client, "search_memory", query="What sank?", top_k=9, boundary="acme/")
            assert {item["boundary"] for item in below["items"]} == {"acme", "acme/x"}
            some = await call(client, "search_memory", query="What sank?", top_k=9, boundary=["acme", "ann"])
            assert {item["boundary"] for item in some["items"]} == {"acme", "ann"}
            assert await refused(client, "search_memory", query="What sank?", boundary="bob") == "forbidden"
            assert await refused(client, "search_memory", query="What sank?", boundary=["ann", "bob"]) == "forbidden"
            assert len((await call(client, "list_memories"))["items"]) == 3

    run(work())


def test_who_may_see_everything_says_where_to_look(tmp_path: Path) -> None:
    async def work() -> None:
        async with served(tmp_path / "m") as service, in_process(service) as client:
            await call(client, "add_memory", text="The red boat sank.", boundary="bob", id="b/1")
            assert await refused(client, "search_memory", query="What sank?") == "refused"
            assert (await call(client, "search_memory", query="What sank?", boundary="bob"))["found"]
            assert (await call(client, "get_memory", id="b/1"))["boundary"] == "bob"

    run(work())


def test_a_caller_is_narrowed_and_never_widened() -> None:
    assert narrowed(LOCAL, "ann").boundaries == ("ann",)
    assert narrowed(Caller("k", frozenset(["read"]), ("acme/",)), "acme/x/").boundaries == ("acme/x/",)
    for bound, asked in (("acme", "acme/"), ("acme/", "acme-corp"), ("acme/x", "acme")):
        with pytest.raises(Forbidden):
            narrowed(Caller("k", frozenset(["write"]), (bound,)), asked)


# Mistakes

BAD: list[tuple[str, Called, str]] = [
    ("search_memory", {}, "bad_arguments"),
    ("search_memory", {"query": 3}, "bad_arguments"),
    ("search_memory", {"query": "x", "top-k": 3}, "bad_arguments"),
    ("search_memory", {"query": "x", "top_k": 0}, "bad_arguments"),
    ("search_memory", {"query": "x", "top_k": True}, "bad_arguments"),
    ("search_memory", {"query": "x", "boundary": []}, "bad_arguments"),
    ("search_memory", {"query": "x", "boundary": [3]}, "bad_arguments"),
    ("search_memory", {"query": "x", "min_score": 2}, "bad_arguments"),
    ("search_memory", {"query": " "}, "refused"),
    ("search_memory", {"query": "x", "filters": {"speeker": "Ann"}}, "refused"),
    ("search_memory", {"query": "x", "as_of": "yesterday"}, "refused"),
    ("search_memory", {"query": "x" * 10_000}, "too_large"),
    ("search_memory", {"query": "x", "boundary": "x" * 10_000}, "too_large"),
    ("search_memory", {"query": "x", "boundary": ["x" * 10_000]}, "too_large"),
    ("add_memory", {"text": "x" * 100_000}, "too_large"),
    ("get_memory", {"id": "x" * 10_000}, "too_large"),
    ("add_memory", {}, "refused"),
    ("add_memory", {"text": "x", "messages": [{"text": "y"}]}, "refused"),
    ("add_memory", {"messages": [{"text": "y"}], "speaker": "Ann"}, "refused"),
    ("add_memory", {"messages": [{"text": "y"}, {"text": ""}]}, "refused"),
    ("add_memory", {"messages": ["y"]}, "bad_arguments"),
    ("add_memory", {"messages": [{"text": "y", "boundary": "bob"}]}, "forbidden"),
    ("add_memory", {"text": "another", "id": "a/1"}, "conflict"),
    ("add_memory", {"text": "y", "time": "soon"}, "refused"),
    ("add_memory", {"text": "y", "metadata": {"a": {"b": 1}}}, "refused"),
    ("add_memory", {"messages": [{"text": "y"}] * 2000}, "too_large"),
    ("get_memory", {"id": "nope"}, "not_found"),
    ("get_memory", {"id": "a/1", "boundary": "bob"}, "forbidden"),
    ("delete_memory", {"id": "nope"}, "not_found"),
    ("delete_memory", {"id": "a/1", "purge": True}, "bad_arguments"),
    ("list_memories", {"limit": 100_000}, "too_large"),
    ("list_memories", {"cursor": "x"}, "refused"),
    ("memory_store", {"type": "facts", "key": "a", "value": 1}, "bad_arguments"),
    ("memory_store", {"type": "fact", "key": "a", "value": 1, "source": "nope"}, "refused"),
    ("memory_retrieve", {"handle": "mem:fact:nope"}, "not_found"),
    ("memory_retrieve", {"handle": "a/1"}, "refused"),
    ("memory_materialize", {"handles": []}, "bad_arguments"),
]


def test_mistakes_come_back_as_data_and_write_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            served(tmp_path / "m") as service,
            in_process(service, Caller("k", frozenset(["read", "write"]), ("ann",))) as client,
        ):
            await call(client, "add_memory", text="The red boat sank.", id="a/1")
            before = [trace.to_dict() for trace in service.memory.list()]
            wrong = [(tool, given, code) for tool, given, code in BAD if await refused(client, tool, **given) != code]
            assert not wrong
            assert [trace.to_dict() for trace in service.memory.list()] == before
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("drop_memory", {})

    run(work())


def test_a_server_under_load_says_when_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: object, **__: object) -> list[Evidence]:
        raise Overloaded("too late", reason="deadline", retry_after=2.04)

    async def work() -> None:
        async with served(tmp_path / "m") as service, in_process(service) as client:
            monkeypatch.setattr(service, "search", late)
            error = (await call(client, "search_memory", query="x", boundary="ann"))["error"]
            assert error == {"code": "overloaded", "message": "too late", "retry_after": 2.0}

    run(work())


def test_a_failure_of_ours_tells_nobody_what_was_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = "quokka"

    async def broken(*_: object, **__: object) -> list[Evidence]:
        raise RuntimeError(said)

    async def work() -> None:
        async with served(tmp_path / "m") as service, in_process(service) as client:
            monkeypatch.setattr(service, "search", broken)
            data = await call(client, "search_memory", query="x", boundary="ann")
            assert data["error"]["code"] == "internal"
            assert said not in json.dumps(data)

    with caplog.at_level(logging.DEBUG):
        run(work())
    logged = "\n".join(map(PlainFormatter().format, caplog.records))
    assert "error: tool tool=search_memory error=RuntimeError" in logged
    assert said not in logged


# Keys, over HTTP


def test_over_http_every_request_brings_its_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "m" / KEYS)
    ann, bob = (keys.make(name, boundaries=[name]) for name in ("ann", "bob"))

    async def work() -> None:
        async with unstarted(tmp_path / "m") as service, by_http(service) as connect:
            async with connect(ann) as hers, connect(bob) as his:
                for client, name in ((hers, "ann"), (his, "bob")):
                    await call(client, "add_memory", text=f"The boat of {name} sank.", id="1")
                for client, name in ((hers, "ann"), (his, "bob")):
                    found = await call(client, "search_memory", query="What sank?")
                    assert [item["boundary"] for item in found["items"]] == [name]
                    assert (await call(client, "get_memory", id="1"))["boundary"] == name
                assert await refused(hers, "get_memory", id="1", boundary="bob") == "forbidden"
                keys.revoke("ann")
                with pytest.raises(MCPError):
                    await hers.call_tool("get_memory", {"id": "1"})
                assert (await call(his, "get_memory", id="1"))["boundary"] == "bob"
            for key in (None, "", "zm_0_x", ann):
                with pytest.raises(BaseException) as caught:  # noqa: PT011  # the SDK's groups differ
                    async with connect(key) as client:
                        await client.list_tools()
                assert not isinstance(caught.value, AssertionError)

    run(work())


@pytest.mark.parametrize("key", [None, "Bearer", "Bearer zm_000000000000_x", "Basic eDp5", "Bearer \udcff"])
def test_without_a_key_nothing_of_the_protocol_is_reached(tmp_path: Path, key: str | None) -> None:
    Keys(tmp_path / "m" / KEYS).make("k", boundaries=["ann"])
    headers = {} if key is None else {b"Authorization": key.encode("utf-8", "surrogateescape")}
    bodies = [b"", b"{}", b"[", b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}']

    async def work() -> None:
        async with unstarted(tmp_path / "m") as service:
            app = create_app(service)
            transport = httpx2.ASGITransport(app)
            async with (
                app.router.lifespan_context(app),
                httpx2.AsyncClient(transport=transport, base_url=URL) as http,
            ):
                for method in ("GET", "POST", "DELETE"):
                    for body in bodies:
                        answer = await http.request(method, "/mcp", content=body, headers=headers)
                        assert answer.status_code == 401
                        assert answer.headers["www-authenticate"] == "Bearer"
                        assert answer.headers["content-type"] == "application/problem+json"
                        assert "tools" not in answer.text

    run(work())


def test_without_keys_a_page_in_a_browser_is_not_let_in(tmp_path: Path) -> None:
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"Accept": "application/json, text/event-stream"}

    async def work() -> None:
        async with unstarted(tmp_path / "m", limits=Limits(body_bytes=4096)) as service:
            app = create_app(service)
            transport = httpx2.ASGITransport(app)
            async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport) as http:
                assert (await http.post(f"{URL}/mcp", json=listing, headers=accept)).status_code == 200
                rebound = await http.post("http://evil.example/mcp", json=listing, headers=accept)
                assert rebound.status_code in (403, 421)
                elsewhere = accept | {"Origin": "https://evil.example"}
                assert (await http.post(f"{URL}/mcp", json=listing, headers=elsewhere)).status_code == 403
                simple = accept | {"Content-Type": "text/plain"}  # what a form may send without asking first
                text = json.dumps(listing)
                assert (await http.post(f"{URL}/mcp", content=text, headers=simple)).status_code in (400, 415)
                large = listing | {"params": {"x": "y" * 5000}}
                assert (await http.post(f"{URL}/mcp", json=large, headers=accept)).status_code == 413

    run(work())


# The command


def test_the_command_refuses_what_it_cannot_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zeromem_torch.serving.logs.set_up", lambda: None)  # it would stay for the tests that follow
    with ZeroMem.open(tmp_path / "m", encoder=HashEncoder(), config=RULES):
        pass
    monkeypatch.setattr("zeromem_torch.library.load_encoder", lambda *_, **__: HashEncoder())
    secret = Keys(tmp_path / "m" / KEYS).make("k", boundaries=["acme/"])

    def started(*arguments: str, key: str | None) -> str:
        """What is said to whoever looks into the client's log; the protocol's output stays clean."""
        if key is None:
            monkeypatch.delenv("ZEROMEM_KEY", raising=False)
        else:
            monkeypatch.setenv("ZEROMEM_KEY", key)
        assert main(["mcp", str(tmp_path / "m"), "--encoder", "toy", *arguments]) == 1
        out, error = capfd.readouterr()
        assert out == ""
        return error

    for key, got in ((None, "none"), ("", "none"), ("zm_000000000000_x", "another")):
        said = started(key=key)
        assert f"key: expected one that this memory knows, got '{got}'; set ZEROMEM_KEY" in said
        assert "Bearer" not in said, "there are no headers here"
    assert "key: expected one of scope read for what is asked" in started("--boundary", "acme-corp", key=secret)
    with ZeroMem.open(tmp_path / "m", encoder=HashEncoder()):
        assert "one that nobody else writes to" in started(key=secret)


def test_over_stdio_a_revoked_key_ends_at_once(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "m" / KEYS)
    secret = keys.make("k", boundaries=["acme/"])

    async def work() -> None:
        async with Client(by_stdio(tmp_path / "m", "--boundary", "acme/x", ZEROMEM_KEY=secret)) as client:
            assert (await call(client, "add_memory", text="The red boat sank."))["indexed"]
            assert await refused(client, "search_memory", query="What sank?", boundary="acme") == "forbidden"
            assert await refused(client, "add_memory", text="x", boundary="acme/x/y") == "forbidden"
            keys.revoke("k")
            assert await refused(client, "search_memory", query="What sank?") == "unauthorized"
            with pytest.raises(MCPError):
                await client.list_tools(cache_mode="bypass")

    run(work())


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_when_it_is_told_to(tmp_path: Path, told: signal.Signals) -> None:
    server = by_stdio(tmp_path / "m", "--boundary", "ann")
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    with subprocess.Popen(
        [server.command, *server.args],
        env={**os.environ, **(server.env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        process.stdin.write(json.dumps(opening) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["result"]["instructions"] == INSTRUCTIONS
        process.send_signal(told)  # while it waits for more
        assert process.wait(30) == 0
    assert not (tmp_path / "m" / "writer.json").exists()


def test_a_missing_sdk_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    monkeypatch.delitem(sys.modules, "zeromem_torch.serving.mcp")
    assert main(["mcp", str(tmp_path / "m")]) == 1
    assert "pip install '.[mcp]'" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_errors_of_ours_have_a_code() -> None:
    from zeromem_torch.serving.mcp import _told

    assert _told(ZeroMemError("x")) == {"code": "refused", "message": "x"}
