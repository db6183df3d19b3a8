"""No key reads or changes what lies outside it, whatever it sends to whichever endpoint or tool.

A world of boundaries with look-alike names is planted with marked texts. Random keys send random requests to every
endpoint and every tool, and a plain model of who may see what says which marks an answer may carry, which boundaries it
may name, what is refused, and which rows of the record may have changed.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from random import Random
from typing import Any
from urllib.parse import quote, unquote, urlencode

import httpx2
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from toys import RULES, EchoReader, HashEncoder

from zeromem_torch.folder import RECORD
from zeromem_torch.handles import Entry, Handle
from zeromem_torch.library import ZeroMem
from zeromem_torch.serving.keys import KEYS, SCOPES, Keys
from zeromem_torch.serving.mcp import OPERATIONS, PATH
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import MemoryService

# Prefixes of each other, whole segments and not; wildcards; escapes that a path decodes; case; normal forms of Unicode.
NAMES = (
    "wren", "wren-corp", "wren/x", "wren/x/y", "wren/xy", "wren%2Fx", "wren%", "wren_x", "wren.x", "WREN", "wrén",
    "wre\u0301n", "wren x", "wren/🚣", "wren/..", "wren/%2e%2e", "wren?boundary=wren", "wren#x", "quoll", "quoll/wren",
)  # fmt: skip
ABSENT = ("wren/z", "quoll/x", "wrens", "auk")
WORLD = (*NAMES, *ABSENT)
EVERYWHERE = "same"
"""An id that every boundary has."""
HANDLE = "mem:fact:boat"
_SPELT = {
    spelt: name for name in WORLD for spelt in (name, ascii(name)[1:-1], json.dumps(name)[1:-1], quote(name, safe=""))
}
NAMED = re.compile("|".join(re.escape(spelt) for spelt in sorted(_SPELT, key=len, reverse=True)))
MARK = re.compile(r"zq(\d+)(?:id|text|said|meta|held)")


def mark(name: str) -> str:
    return f"zq{NAMES.index(name)}"


def named(text: str) -> set[str]:
    """The boundaries that a text names, however spelt; a longer name is not taken for the shorter one in it."""
    once = re.sub(r"\\+", r"\\", text)  # JSON in JSON escapes its escapes
    return {_SPELT[match[0]] for match in NAMED.finditer(once)}


def marked(text: str) -> set[str]:
    """The boundaries whose planted texts or ids it holds a piece of."""
    return {NAMES[int(match[1])] for match in MARK.finditer(text)}


# The model


def covers(bound: str, asked: str) -> bool:
    """Whether all that ``asked`` names lies inside ``bound``."""
    if not bound.endswith("/"):
        return asked == bound
    above, below = bound[:-1].split("/"), asked.removesuffix("/").split("/")
    return below[: len(above)] == above


@dataclass(frozen=True)
class Key:
    scopes: frozenset[str]
    bounds: tuple[str, ...] | None

    def may(self, scope: str, asked: str | Sequence[str]) -> bool:
        return bool({scope, "admin"} & self.scopes) and all(map(self.covers, listed(asked)))

    def covers(self, asked: str) -> bool:
        return self.bounds is None or any(covers(bound, asked) for bound in self.bounds)

    def reach(self, scope: str) -> set[str]:
        return {name for name in WORLD if self.may(scope, name)}


def listed(asked: str | Sequence[str]) -> list[str]:
    return [asked] if isinstance(asked, str) else list(asked)


def meant(asked: str | Sequence[str]) -> set[str]:
    """The boundaries that are asked for."""
    return {name for name in WORLD if any(covers(part, name) for part in listed(asked))}


# The world


def planted(name: str) -> list[dict[str, Any]]:
    own = mark(name)
    boat = {"id": f"{own}id", "text": f"The red boat sank near {own}text.", "speaker": f"{own}said", "session": "s"}
    raft = {"id": EVERYWHERE, "text": f"It was a raft, says {own}text.", "session": "s", "role": "user"}
    entry = Entry(Handle.parse(HANDLE), f"The boat is {own}held.", datetime(2023, 5, 8, tzinfo=UTC), name).trace()
    more = {"boundary": name, "metadata": {"kind": f"{own}meta"}, "time": "2023-05-08"}
    return [{**boat, **more}, {**raft, "boundary": name}, entry.to_dict()]


@dataclass(frozen=True)
class Ask:
    """What all requests are made from: each takes the parts that it knows."""

    where: str | list[str] | None
    id: str
    query: str
    flag: bool  # the rarer form of the request
    cursor: str | None


# The requests


@dataclass(frozen=True)
class Request:
    method: str
    url: str
    scope: str
    asked: str | list[str] | None  # None: no boundary is named
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str | None = None  # it asks for the trace of this id

    @property
    def sent(self) -> str:
        return " ".join(
            [self.method, unquote(self.url), json.dumps(self.json, ensure_ascii=False), *self.headers.values()]
        )


def _one(ask: Ask) -> str | None:
    return ask.where if ask.where is None or isinstance(ask.where, str) else ask.where[0]


def _url(path: str, **query: Any) -> str:
    told = {name: value for name, value in query.items() if value is not None}
    return path + (f"?{urlencode(told, doseq=True)}" if told else "")


def _add(ask: Ask) -> Request:
    said = {"text": ask.query, "role": "user"}
    if ask.flag:  # each message names its own
        homes = listed(ask.where or "wren")
        messages = [{**said, "id": ask.id, "boundary": home} for home in homes]
        body = {
            "messages": messages,
            "boundary": homes[0],
            "overwrite": True,
        }  # which is not asked where a message says
        return Request("POST", "/v1/memories", "write", homes, body)
    home = _one(ask) or "wren"
    body = {"messages": [said], "boundary": home, "wait": True}
    return Request("POST", "/v1/memories", "write", home, body, {"Idempotency-Key": "same"})


def _search(ask: Ask) -> Request:
    where = ask.where or "wren"
    body: dict[str, Any] = {"query": ask.query, "boundary": where, "top_k": 9, "explain": True}
    if ask.flag:
        queries = [{"query": ask.query, "boundary": part} for part in listed(where)]
        body = {"queries": [*queries, ask.query], "boundary": where, "token_budget": 500}
    return Request("POST", "/v1/search", "read", where, body)


def _answer(ask: Ask) -> Request:
    where = ask.where or "wren"
    body: dict[str, Any] = {"question": ask.query, "boundary": where, "calibrate": ask.flag}
    if ask.flag:
        body = {"questions": [{"question": ask.query, "boundary": part} for part in listed(where)], "explain": True}
    return Request("POST", "/v1/answer", "read", where, body)


def _list(ask: Ask) -> Request:
    prefix = ask.id[:3] if ask.flag else None
    url = _url("/v1/memories", boundary=ask.where, cursor=ask.cursor, limit=7 if ask.flag else 500, prefix=prefix)
    return Request("GET", url, "read", ask.where)


def _of_id(method: str, path: str, scope: str) -> Callable[[Ask], Request]:
    def build(ask: Ask) -> Request:
        purge = ask.flag and method == "DELETE"
        url = _url(path + quote(ask.id, safe=""), boundary=_one(ask), purge="true" if purge else None)
        body = {"metadata": {"kind": "changed"}} if method == "PATCH" else None
        return Request(method, url, "admin" if purge else scope, _one(ask), body, id=ask.id)

    return build


def _delete_boundary(ask: Ask) -> Request:
    home = _one(ask) or "wren"
    url = _url(f"/v1/boundaries/{quote(home, safe='')}", purge="true" if ask.flag else None)
    return Request("DELETE", url, "admin" if ask.flag else "write", home)


def _handled(operation: str, ask: Ask) -> dict[str, Any]:
    source = {"source": ask.id} if ask.flag else {}
    given: dict[str, dict[str, Any]] = {
        "store": {"type": "fact", "key": "boat", "value": ask.query, **source},
        "retrieve": {"handle": HANDLE},
        "query": {"text": ask.query} if ask.flag else {"type": "fact"},
        "materialize": {"handles": [HANDLE]},
        "forget": {"handle": HANDLE},
    }
    return given[operation]


def _handle(operation: str) -> Callable[[Ask], Request]:
    scope = "write" if operation in ("store", "forget") else "read"

    def build(ask: Ask) -> Request:
        home = _one(ask) or "wren"
        body = {"boundary": home, **_handled(operation, ask)}
        return Request("POST", f"/v1/handles/{operation}", scope, home, body)

    return build


def _plain(method: str, path: str, scope: str = "") -> Callable[[Ask], Request]:
    return lambda _: Request(method, path, scope, None)


ENDPOINTS: dict[str, Callable[[Ask], Request]] = {
    "POST /v1/memories": _add,
    "POST /v1/search": _search,
    "POST /v1/answer": _answer,
    "GET /v1/memories": _list,
    "GET /v1/memories/{id}": _of_id("GET", "/v1/memories/", "read"),
    "PATCH /v1/memories/{id}": _of_id("PATCH", "/v1/memories/", "write"),
    "DELETE /v1/memories/{id}": _of_id("DELETE", "/v1/memories/", "write"),
    "GET /v1/history/{id}": _of_id("GET", "/v1/history/", "read"),
    "DELETE /v1/boundaries/{boundary}": _delete_boundary,
    **{
        f"POST /v1/handles/{operation}": _handle(operation)
        for operation in ("store", "retrieve", "query", "materialize", "forget")
    },
    "GET /v1/status": _plain("GET", "/v1/status"),
    "POST /v1/release-memory": _plain("POST", "/v1/release-memory"),
    "GET /metrics": _plain("GET", "/metrics"),
    "GET /healthz": _plain("GET", "/healthz"),
    "GET /readyz": _plain("GET", "/readyz"),
    "GET /openapi.json": _plain("GET", "/openapi.json"),
    "GET /docs": _plain("GET", "/docs"),
}
OPEN = {"/healthz", "/readyz", "/openapi.json", "/docs"}
"""What needs no key."""


def _headers_of(build: Callable[[Ask], Request]) -> Callable[[Ask], Request]:
    return lambda ask: replace(build(ask), method="HEAD")


ENDPOINTS |= {
    name.replace("GET", "HEAD"): _headers_of(build) for name, build in ENDPOINTS.items() if name.startswith("GET ")
}


def _told(ask: Ask) -> dict[str, Any]:
    if ask.flag and isinstance(ask.where, list):
        return {"messages": [{"text": ask.query, "boundary": home} for home in ask.where]}
    return {"text": ask.query, **({"id": ask.id} if ask.flag else {})}


def _called(tool: str, arguments: Callable[[Ask], dict[str, Any]], *, several: bool) -> Callable[[Ask], Request]:
    scope = OPERATIONS[tool].scope
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}

    def build(ask: Ask) -> Request:
        where = ask.where if several else _one(ask)
        given = arguments(ask) | ({} if where is None else {"boundary": where})
        params = {"name": tool, "arguments": given}
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        asked = ask.where if "messages" in given else where
        return Request("POST", PATH, scope, asked, call, headers, given.get("id") if tool != "add_memory" else None)

    return build


TOOLS: dict[str, Callable[[Ask], Request]] = {
    "search_memory": _called("search_memory", lambda ask: {"query": ask.query, "top_k": 9}, several=True),
    "list_memories": _called("list_memories", lambda ask: {"limit": 7 if ask.flag else 500}, several=True),
    "add_memory": _called("add_memory", _told, several=False),
    "get_memory": _called("get_memory", lambda ask: {"id": ask.id}, several=False),
    "delete_memory": _called("delete_memory", lambda ask: {"id": ask.id}, several=False),
    **{
        f"memory_{operation}": _called(f"memory_{operation}", partial(_handled, operation), several=False)
        for operation in ("store", "retrieve", "query", "materialize", "forget")
    },
}
REQUESTS = {**ENDPOINTS, **TOOLS}
STATUS = {"forbidden": 403, "not_found": 404, "conflict": 409, "too_large": 413, "overloaded": 503, "internal": 500}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: str
    body: str

    @property
    def text(self) -> str:
        """All that came, as it came and as its JSON means it."""
        try:
            meant = json.dumps(json.loads(self.body), ensure_ascii=False)
        except ValueError:
            meant = ""
        return "\n".join([self.headers, self.body, meant])


class World:
    """A running server whose memory is the planted one, and what its record holds at any time."""

    def __init__(self, app: Any, portal: BlockingPortal, memory: ZeroMem, keys: Keys) -> None:
        self.app, self.portal, self.memory, self.keys = app, portal, memory, keys
        # Starlette's own test client decodes paths twice.
        self.client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:8765")
        assert memory.path is not None
        self.record = sqlite3.connect(f"file:{memory.path / RECORD}?mode=ro", uri=True, check_same_thread=False)
        self.log = memory.path / "logs" / "context.jsonl"
        self._number = count()
        self.touched = set(WORLD)
        self.written: set[str] = set()
        """Marks (ids of others, that is) that callers themselves have stored inside their own boundaries."""
        self.restore()

    def restore(self) -> None:
        for name in WORLD:
            if name in self.touched:
                self.memory.delete_all(boundary=name)
                if name in NAMES:
                    self.memory.add(planted(name))
        self.touched.clear()
        self.written.clear()
        self.last = self.rows()

    def secret(self, key: Key) -> str:
        return self.keys.make(f"k{next(self._number)}", scopes=key.scopes, boundaries=key.bounds)

    def send(self, request: Request, secret: str | None) -> Answer:
        headers = {**request.headers, **({} if secret is None else {"Authorization": f"Bearer {secret}"})}
        send = partial(self.client.request, request.method, request.url, json=request.json, headers=headers)
        got = self.portal.call(send)
        status = got.status_code
        if request.url == PATH and status == 200:
            error = (got.json()["result"]["structuredContent"]).get("error")
            status = 200 if error is None else STATUS.get(error["code"], 422)
        return Answer(status, repr(got.headers.multi_items()), got.text)

    def rows(self) -> dict[str, tuple[int, frozenset[str]]]:
        """Of each boundary, a hash of its rows and history, and the ids that it has now or once had."""
        held: dict[str, list[Any]] = {name: [] for name in WORLD}
        ids: dict[str, set[str]] = {name: set() for name in WORLD}
        for table in ("traces", "history"):
            cursor = self.record.execute(f"SELECT id, boundary, * FROM {table}")
            for trace, boundary, *row in cursor:
                held.setdefault(boundary, []).append(row)
                ids.setdefault(boundary, set()).add(trace)
        return {name: (hash(repr(own)), frozenset(ids[name])) for name, own in held.items()}

    def entered(self) -> list[str]:
        """Boundaries of what the log says entered a context."""
        if not self.log.exists():
            return []
        return [json.loads(line)["boundary"] for line in self.log.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    keys = Keys(folder / KEYS)
    keys.make("first", boundaries=["nobody"])  # from here on, nobody comes in without one
    with ZeroMem.open(folder, encoder=HashEncoder(), config=RULES) as memory:
        service = MemoryService(memory, keys=keys, reader=EchoReader(), warm_up=False)
        app = create_app(service)
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(app.router.lifespan_context(app)):
            yield World(app, portal, memory, keys)


def check(world: World, key: Key, request: Request, secret: str) -> Answer:
    """Send it, and hold what comes back and what has changed to the model."""
    before, entered = world.last, world.entered()
    answer = world.send(request, secret)
    after = world.last = world.rows()
    asked, scope = request.asked, request.scope
    changed = {name for name in after if before.get(name) != after[name]}
    world.touched |= changed
    assert answer.status < 500, answer

    # What is read.
    sent = {match[0] for match in MARK.finditer(request.sent)}
    seen = {match[0]: NAMES[int(match[1])] for match in MARK.finditer(answer.text)}
    world.written |= sent if changed else set()
    leaked = {piece for piece in seen.keys() - sent - world.written if seen[piece] not in key.reach("read")}
    assert not leaked, (key, request, answer)
    told = named(answer.text) - named(request.sent) - key.reach("read") - key.reach("write")
    assert not told, (key, request, answer)

    # What is refused.
    if request.method == "PATCH" and not key.reach("read"):
        assert answer.status >= 400, (key, request, answer)  # an update answers with the whole trace
    elif asked is not None:
        assert (answer.status == 403) == (not key.may(scope, asked)), (key, request, answer)
    elif request.id is not None:
        homes = {name for name in key.reach(scope) if request.id in before[name][1]}
        if {scope, "admin"}.isdisjoint(key.scopes):
            assert answer.status == 403, (key, request, answer)
        elif not homes:
            assert answer.status == 404, (key, request, answer)

    # What is changed.
    may_change = set() if scope in ("", "read") else key.reach(scope) & (set(WORLD) if asked is None else meant(asked))
    assert changed <= may_change, (key, request, answer)
    logged = set(world.entered()[len(entered) :])
    assert logged <= key.reach("read" if scope == "read" else scope or "read"), (key, request, answer)
    return answer


# The tests


def test_every_endpoint_and_every_tool_is_played(world: World) -> None:
    routes = set()
    for route in world.app.routes:
        path = re.sub(r":\w+}", "}", route.path)
        if path != PATH:
            methods = route.methods if route.methods is not None else route.endpoint.operations
            routes |= {f"{method} {path}" for method in methods}
    assert routes == set(ENDPOINTS)
    assert set(TOOLS) == set(OPERATIONS)


def test_the_model_and_the_marks_see_what_there_is(world: World) -> None:
    """The other tests would pass on a server that answers nothing: a key for everything does see marks."""
    world.restore()
    secret = world.secret(Key(frozenset(["admin"]), None))
    shows = {
        *("POST /v1/search", "POST /v1/answer", "GET /v1/memories", "GET /v1/memories/{id}", "PATCH /v1/memories/{id}"),
        *("GET /v1/history/{id}", "POST /v1/handles/materialize"),
        *("search_memory", "list_memories", "get_memory", "memory_materialize"),
    }
    for name, build in REQUESTS.items():
        if build(Ask("quoll", EVERYWHERE, "boat", False, None)).scope in ("read", "") or "PATCH" in name:
            answer = world.send(build(Ask("quoll", EVERYWHERE, "What is the red boat?", False, None)), secret)
            assert answer.status < 300, answer
            assert (marked(answer.text) == {"quoll"}) == (name in shows), (name, answer)
    for name, build in REQUESTS.items():
        before = world.rows()
        request = build(Ask("quoll", f"{mark('quoll')}id", "What is the red boat?", name == "add_memory", None))
        if request.scope == "write":
            assert world.send(request, secret).status < 300 or name == "add_memory"  # which may not overwrite
            assert (before["quoll"] != world.rows()["quoll"]) == (name != "add_memory"), name
            world.touched.add("quoll")
            world.restore()
    world.touched.add("quoll")
    world.restore()


LOOK_ALIKES = [
    ("wren/", "wren-corp"), ("wren/", "wrens"), ("wren/", "WREN"), ("wren", "wren/x"), ("wren", "wren/"),
    ("wren/x", "wren"), ("wren/x", "wren/xy"), ("wren/x/", "wren/xy"), ("wren/x/", "wren/"), ("wren%", "wren%2Fx"),
    ("wren%2Fx", "wren/x"), ("wren_x", "wren.x"), ("wren.x", "wren/x"), ("wren x", "wren"), ("wrén", "wre\u0301n"),
    ("wren/🚣", "wren/x"), ("wren/..", "wren"), ("wren/../", "quoll"), ("wren/%2e%2e", "wren/.."),
    ("wren?boundary=wren", "wren"), ("wren#x", "wren"), ("quoll/wren", "wren"), ("quoll/", "wren"),
]  # fmt: skip


@pytest.mark.parametrize(("bound", "outside"), LOOK_ALIKES)
def test_a_look_alike_is_another(world: World, bound: str, outside: str) -> None:
    world.restore()
    key = Key(frozenset(["admin"]), (bound,))
    secret = world.secret(key)
    inside = bound.removesuffix("/")
    for build in REQUESTS.values():
        for where, flag in ((outside, False), (outside, True), ([inside, outside], True)):
            check(world, key, build(Ask(where, EVERYWHERE, "What is the red boat?", flag, None)), secret)
    world.restore()
    for name, build in REQUESTS.items():  # and what it is for is open to it
        if (request := build(Ask(inside, EVERYWHERE, "What is the red boat?", False, None))).scope == "read":
            assert check(world, key, request, secret).status < 300, name


@pytest.mark.parametrize("scope", ["read", "write"])
def test_a_scope_is_not_the_other(world: World, scope: str) -> None:
    key = Key(frozenset([scope]), ("quoll", "quoll/wren"))
    secret = world.secret(key)
    for build in REQUESTS.values():
        for where in ("quoll", ["quoll", "quoll/wren"], None):
            for flag in (False, True):
                for id in (EVERYWHERE, f"{mark('quoll')}id"):
                    world.restore()
                    check(world, key, build(Ask(where, id, "What is the red boat?", flag, None)), secret)


BOUNDS = [*WORLD, *(f"{name}/" for name in WORLD), "wren/", "quoll/"]


def _key(dice: Random) -> Key:
    scopes = frozenset(dice.sample(SCOPES, dice.choice([1, 1, 2])))
    bounds = None if dice.random() < 0.05 else tuple(dice.sample(sorted(set(BOUNDS)), dice.choice([1, 1, 2, 3])))
    return Key(scopes, bounds)


def _ask(dice: Random, key: Key) -> Ask:
    """Half of what is asked for is near what the key is bound to, so that both sides of each edge are met."""
    near = [name for name in WORLD if key.covers(name)]
    names = [*near, *(bound for bound in key.bounds or ())] if near and dice.random() < 0.5 else BOUNDS
    several = [dice.choice(names) for _ in range(dice.choice([1, 2, 3]))]
    where = dice.choice([None, dice.choice(names), dice.choice(names), several])
    home = dice.choice(NAMES)
    id = dice.choice([EVERYWHERE, HANDLE, f"{mark(home)}id", "nobody's"])
    query = dice.choice(["What is the red boat?", "Who was it a raft for?", "near", "on the 8th of May"])
    return Ask(where, id, query, dice.random() < 0.5, dice.choice([None, "0", "5"]))


@pytest.mark.slow
# A failure is not shrunk: it names the key, the request and the answer, and the server remembers what came before.
@settings(
    max_examples=30,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(dice=st.randoms(use_true_random=False))
def test_no_key_reads_or_changes_what_lies_outside_it(world: World, dice: Random) -> None:
    world.restore()
    key = _key(dice)
    secret = world.secret(key)
    for name in dice.sample(sorted(REQUESTS), len(REQUESTS)):
        check(world, key, REQUESTS[name](_ask(dice, key)), secret)


@pytest.mark.parametrize("name", [name for name in REQUESTS if REQUESTS[name](Ask(None, "", "", False, None)).scope])
@pytest.mark.parametrize("flag", [False, True])
def test_what_lies_outside_is_answered_as_if_it_were_not_there(world: World, name: str, flag: bool) -> None:
    world.restore()
    key = Key(frozenset(SCOPES), ("wren/x", "wren_x"))
    secret = world.secret(key)
    there, absent = f"{mark('quoll')}id", "zx77id"
    pairs = [
        (Ask("quoll", there, "boat", flag, None), Ask("auk", absent, "boat", flag, None)),
        (Ask("quoll/", there, "boat", flag, None), Ask("auk/", absent, "boat", flag, None)),
        (Ask(["wren/x", "quoll"], there, "boat", flag, None), Ask(["wren/x", "auk"], absent, "boat", flag, None)),
        (Ask(None, there, "boat", flag, None), Ask(None, absent, "boat", flag, None)),
        (Ask("wren/x", there, "boat", flag, None), Ask("wren/x", absent, "boat", flag, None)),
    ]
    for pair in pairs:
        answers = []
        for ask in pair:
            answers.append(check(world, key, REQUESTS[name](ask), secret))
            world.restore()
        one, other = answers
        assert one.status == other.status
        if one.status >= 400:
            assert _blank(one) == _blank(other)


def _blank(answer: Answer) -> str:
    """An answer without the names that were sent, and without what differs from one request to the next."""
    text = answer.text
    for spelt in (f"{mark('quoll')}id", "zx77id", "quoll", "auk"):
        text = text.replace(spelt, "_")
    text = re.sub(r"[0-9a-f]{8}-?[0-9a-f-]{8,}", "_", text)
    return re.sub(r"'(date|content-length)', '[^']*'", "_", text)


@pytest.mark.parametrize("name", REQUESTS)
def test_without_a_key_nothing_is_answered(world: World, name: str) -> None:
    world.restore()
    before = world.rows()
    request = REQUESTS[name](Ask("wren", EVERYWHERE, "What is the red boat?", False, None))
    for secret in (None, "", "zm_000000000000_x", world.secret(Key(frozenset(SCOPES), None))[:-1]):
        answer = world.send(request, secret)
        assert not MARK.search(answer.text)
        assert not named(answer.text) - named(request.sent)
        assert answer.status == (200 if request.url in OPEN else 401)
    assert world.rows() == before


def test_a_key_that_was_revoked_ends_at_once(world: World) -> None:
    world.restore()
    secret = world.keys.make("leaver", boundaries=["wren"])
    request = REQUESTS["POST /v1/search"](Ask("wren", "", "What is the red boat?", False, None))
    assert world.send(request, secret).status == 200
    world.keys.revoke("leaver")
    assert world.send(request, secret).status == 401


def test_who_asks_at_the_same_time_gets_their_own(world: World) -> None:
    """Queries of many keys are searched in one batch."""
    world.restore()
    secrets = {name: world.secret(Key(frozenset(["read"]), (name,))) for name in NAMES}

    def ask(place: int) -> None:
        name = NAMES[place % len(NAMES)]
        kind = ("POST /v1/search", "search_memory", "POST /v1/answer", "memory_materialize")[place % 4]
        answer = world.send(REQUESTS[kind](Ask(name, "", "What is the red boat?", False, None)), secrets[name])
        assert answer.status == 200
        assert marked(answer.text) == {name}

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8 * len(NAMES))))


def test_the_same_idempotency_key_of_two_callers_is_two(world: World) -> None:
    world.restore()
    request = REQUESTS["POST /v1/memories"](Ask("wren", "", "The mast broke.", False, None))
    ids = set()
    for key in (Key(frozenset(["write"]), ("wren",)), Key(frozenset(["write"]), ("wren/",))):
        secret = world.secret(key)
        made = [json.loads(world.send(request, secret).body)["ids"] for _ in range(2)]
        assert made[0] == made[1]
        ids.add(tuple(made[0]))
    assert len(ids) == 2
    world.touched.add("wren")


def test_only_who_may_do_everything_sees_the_server_itself(world: World) -> None:
    everything, inside = Key(frozenset(["admin"]), None), Key(frozenset(["admin"]), ("wren/",))
    for key, released in (
        (everything, {200, 204}),
        (inside, {403}),
        (replace(everything, scopes=frozenset(["read"])), {403}),
    ):
        secret = world.secret(key)
        assert (
            world.send(REQUESTS["POST /v1/release-memory"](Ask(None, "", "", False, None)), secret).status in released
        )
        metrics = world.send(REQUESTS["GET /metrics"](Ask(None, "", "", False, None)), secret)
        assert (metrics.status == 200) == ("admin" in key.scopes)
        assert not named(metrics.text)
        status = json.loads(world.send(REQUESTS["GET /v1/status"](Ask(None, "", "", False, None)), secret).body)
        assert status["boundaries"] == len(key.reach("read") & set(NAMES))
