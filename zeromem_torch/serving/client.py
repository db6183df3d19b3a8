"""A served memory, called as one that is embedded: `Client` and `AsyncClient` have the methods of `ZeroMem`.

    memory = ZeroMem.open("folder")                        # embedded
    memory = Client("http://localhost:8765", key="zm_...")  # served

What differs: who did something is the key's name, and the reader that answers is the server's. A request that the
server has no room for is sent again when it says so, within the timeout; one whose connection broke only where sending
it twice changes nothing. Errors are those of the library, and `Refusal`s.
"""

from __future__ import annotations

import asyncio
import builtins
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar
from urllib.parse import quote

from zeromem_torch.errors import Conflict, NotFound, ZeroMemError, install
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.messages import Message, listed, messages_in
from zeromem_torch.reader.protocol import Usage
from zeromem_torch.results import Answered, Page
from zeromem_torch.scope import Boundary, boundary_of
from zeromem_torch.serving.refusals import Forbidden, Overloaded, Refusal, TooLarge, Unauthorized
from zeromem_torch.substrate.traces import Trace, parse_time

try:
    import httpx2
except ImportError as error:
    raise ImportError(f"the client needs httpx2; {install('client')}") from error

if TYPE_CHECKING:
    from zeromem_torch.store import Change

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE = 256
"""Queries sent in one request; more are sent in several."""
REFUSED_FOR = 2.0
"""Seconds for which a server that cannot be reached is tried: one that starts anew comes back, a wrong address not."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and what to make of its answer: a result, or the next request on the way to it."""

    method: str
    path: str
    read: Callable[[Any], T | Call[T]]
    body: Mapping[str, Any] | None = None
    params: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    again: bool = True  # whether it may be sent again when nobody knows if it arrived


class Calls:
    """The methods, as requests."""

    def add(
        self,
        messages: Message | Iterable[Message],
        *,
        boundary: str | None = None,
        session: str | None = None,
        timestamp: datetime | str | float | None = None,
        metadata: Mapping[str, Any] | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        overwrite: bool = False,
        index: bool = True,
        idempotency_key: str | None = None,
    ) -> Call[builtins.list[str]]:
        """Store messages; returns their ids in order. All of them or, when one cannot be used, none.

        When this returns the traces are on disk, and a search finds them; without ``index`` a little later.
        """
        given = [one if isinstance(one, str) else _plain_message(one) for one in messages_in(messages)]
        if not given:
            return Call("GET", "/healthz", lambda _: [])
        if boundary is None and (user_id, agent_id, run_id) != (None, None, None):
            boundary = boundary_of(user_id, agent_id, run_id)
        body = {
            "messages": given,
            "boundary": boundary,
            "session": session,
            "timestamp": _time(timestamp),
            "metadata": None if metadata is None else dict(metadata),
            "overwrite": overwrite,
            "wait": index,
        }
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return Call("POST", "/v1/memories", lambda plain: builtins.list(plain["ids"]), _given(body), headers=headers)

    def search(
        self,
        query: str,
        *,
        boundary: Boundary | None = None,
        top_k: int | None = None,
        token_budget: int | None = None,
        filters: Mapping[str, Any] | None = None,
        as_of: datetime | str | float | None = None,
        min_score: float | None = None,
        explain: bool = False,
        reference_time: datetime | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> Call[Evidence]:
        """Evidence for one query from one boundary, or from several as one; without ``explain`` only its items."""
        settings = _settings(top_k, token_budget, filters, as_of, min_score, explain)
        where = _where(boundary, user_id, agent_id, run_id)
        body = {"query": query, "boundary": where, **settings, "reference_time": _time(reference_time)}
        return Call("POST", "/v1/search", evidence_of, _given(body))

    def search_batch(
        self,
        queries: Sequence[str],
        *,
        boundaries: Sequence[Boundary],
        top_k: int | None = None,
        token_budget: int | None = None,
        filters: Mapping[str, Any] | None = None,
        as_of: datetime | str | float | None = None,
        min_score: float | None = None,
        explain: bool = False,
        reference_times: Sequence[datetime | None] | None = None,
    ) -> Call[builtins.list[Evidence]]:
        """Evidence for each query from the boundary at its place."""
        many = _paired("query", "queries", queries, boundaries, reference_times)
        settings = _settings(top_k, token_budget, filters, as_of, min_score, explain)
        return _in_parts("/v1/search", "queries", many, settings, evidence_of)

    def answer(
        self,
        question: str,
        *,
        boundary: Boundary | None = None,
        reader_budget: int | None = None,
        calibrate: bool = True,
        abstain: bool = False,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int | None = None,
        token_budget: int | None = None,
        filters: Mapping[str, Any] | None = None,
        as_of: datetime | str | float | None = None,
        min_score: float | None = None,
        explain: bool = False,
        reference_time: datetime | None = None,
    ) -> Call[Answered]:
        """Answer one question from its evidence."""
        body = {
            "question": question,
            "boundary": _where(boundary, user_id, agent_id, run_id),
            **_settings(top_k, token_budget, filters, as_of, min_score, explain),
            "reference_time": _time(reference_time),
            **_given({"reader_budget": reader_budget, "calibrate": calibrate, "abstain": abstain}),
        }
        return Call("POST", "/v1/answer", _answered, _given(body), again=False)  # an answer costs tokens

    def answer_batch(
        self,
        questions: Sequence[str],
        *,
        boundaries: Sequence[Boundary],
        reader_budget: int | None = None,
        calibrate: bool = True,
        abstain: bool = False,
        top_k: int | None = None,
        token_budget: int | None = None,
        filters: Mapping[str, Any] | None = None,
        as_of: datetime | str | float | None = None,
        min_score: float | None = None,
        explain: bool = False,
        reference_times: Sequence[datetime | None] | None = None,
    ) -> Call[builtins.list[Answered]]:
        """An answer to each question from the evidence of the boundary at its place."""
        many = _paired("question", "questions", questions, boundaries, reference_times)
        settings = _settings(top_k, token_budget, filters, as_of, min_score, explain)
        settings |= _given({"reader_budget": reader_budget, "calibrate": calibrate, "abstain": abstain})
        return _in_parts("/v1/answer", "questions", many, settings, _answered, again=False)

    def get(self, id: str, *, boundary: str | None = None) -> Call[Trace]:
        """The trace of this id."""
        return Call("GET", _path("memories", id), trace_of, params=_at(boundary))

    def update(self, id: str, *, boundary: str | None = None, **changes: Any) -> Call[Trace]:
        """Change what an update may change; returns the trace as it is now."""
        times = ("time", "valid_from", "valid_to", "expires_at")
        body = {name: _time(value) if name in times else value for name, value in changes.items()}
        return Call("PATCH", _path("memories", id), trace_of, body, _at(boundary))

    def delete(self, id: str, *, boundary: str | None = None, purge: bool = False) -> Call[None]:
        """Remove a trace; ``purge``: from the history and from every file too."""
        params = [*_at(boundary), *([("purge", "true")] if purge else [])]
        return Call("DELETE", _path("memories", id), lambda _: None, params=params, again=False)

    def delete_all(self, *, boundary: Boundary, purge: bool = False) -> Call[int]:
        """Remove all traces of the boundaries ("acme/": and below); returns their number."""
        names = [boundary] if isinstance(boundary, str) else builtins.list(listed("boundary", boundary))
        params = [("purge", "true")] if purge else []

        def one(place: int, before: int) -> Call[int]:
            def read(plain: Any) -> int | Call[int]:
                deleted = before + int(plain["deleted"])
                return deleted if place + 1 == len(names) else one(place + 1, deleted)

            return Call("DELETE", _path("boundaries", names[place]), read, params=params, again=False)

        if not names:
            raise ZeroMemError.of("boundary", "a name, or a list of names", names, "name at least one")
        return one(0, 0)

    def list(
        self,
        *,
        boundary: Boundary | None = None,
        cursor: str | None = None,
        limit: int | None = 100,
        prefix: str = "",
    ) -> Call[Page]:
        """Traces in the order they came, ``limit`` at a time (None: all)."""
        names = [boundary] if isinstance(boundary, str) else listed("boundary", boundary or ())
        fixed = [*(("boundary", name) for name in names), *([("prefix", prefix)] if prefix else [])]

        def page(start: str | None, before: builtins.list[Trace]) -> Call[Page]:
            def read(plain: Any) -> Page | Call[Page]:
                found = [*before, *map(trace_of, plain["items"])]
                more = plain["next_cursor"]
                return page(more, found) if limit is None and more is not None else Page(found, more)

            place = [] if start is None else [("cursor", start)]
            params = [*fixed, *place, ("limit", str(1000 if limit is None else limit))]
            return Call("GET", "/v1/memories", read, params=params)

        return page(cursor, [])

    def history(self, id: str, *, boundary: str | None = None) -> Call[builtins.list[Change]]:
        """What happened to a trace, oldest first."""

        def read(plain: Any) -> builtins.list[Change]:
            from zeromem_torch.store import Change

            return [Change(**{**one, "at": datetime.fromisoformat(one["at"])}) for one in plain["items"]]

        return Call("GET", _path("history", id), read, params=_at(boundary))

    def handle(
        self, operation: str, *, boundary: str, session: str = "", **arguments: Any
    ) -> Call[builtins.dict[str, Any]]:
        """A handle operation (store, retrieve, query, materialize, forget), with the arguments of the tool."""
        body = {"boundary": boundary, "session": session, **arguments}
        return Call("POST", f"/v1/handles/{quote(operation, safe='')}", lambda plain: dict(plain), body)

    def status(self) -> Call[builtins.dict[str, Any]]:
        """Counts of what the key may read, and how far the index is."""
        return Call("GET", "/v1/status", lambda plain: dict(plain))

    def release_memory(self) -> Call[None]:
        """Have the server drop all that it can read again from disk."""
        return Call("POST", "/v1/release-memory", lambda _: None)


def _now(build: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(build)
    def method(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(build(_CALLS, *args, **kwargs))

    return method  # type: ignore[return-value]  # mypy gives the first parameter the name that wraps shows


def _later(build: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    @wraps(build)
    async def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(build(_CALLS, *args, **kwargs))

    return method  # type: ignore[return-value]


_CALLS = Calls()


class Client:
    """A served memory; a context manager. May be used from several threads."""

    def __init__(
        self, url: str, key: str | None = None, *, timeout: float = 30.0, transport: httpx2.BaseTransport | None = None
    ) -> None:
        self.url, self.timeout = url, timeout
        self._http = httpx2.Client(base_url=url, headers=_headers(key), timeout=timeout, transport=transport)

    def _run(self, call: Call[T]) -> T:
        found: T | Call[T] = call
        while isinstance(found, Call):
            found = found.read(self._send(found))
        return found

    def _send(self, call: Call[Any]) -> Any:
        patience = _Patience(call, self.url, self.timeout)
        while True:
            with patience:
                return _read(self._http.request(call.method, call.path, **patience.request()))
            time.sleep(patience.pause)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    add = _now(Calls.add)
    search = _now(Calls.search)
    search_batch = _now(Calls.search_batch)
    answer = _now(Calls.answer)
    answer_batch = _now(Calls.answer_batch)
    get = _now(Calls.get)
    update = _now(Calls.update)  # type: ignore[arg-type]  # any change could be named "self"
    delete = _now(Calls.delete)
    delete_all = _now(Calls.delete_all)
    list = _now(Calls.list)
    history = _now(Calls.history)
    handle = _now(Calls.handle)  # type: ignore[arg-type]
    status = _now(Calls.status)
    release_memory = _now(Calls.release_memory)


class AsyncClient:
    """A served memory, awaited; an async context manager."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self.timeout = url, timeout
        self._http = httpx2.AsyncClient(base_url=url, headers=_headers(key), timeout=timeout, transport=transport)

    async def _run(self, call: Call[T]) -> T:
        found: T | Call[T] = call
        while isinstance(found, Call):
            found = found.read(await self._send(found))
        return found

    async def _send(self, call: Call[Any]) -> Any:
        patience = _Patience(call, self.url, self.timeout)
        while True:
            with patience:
                return _read(await self._http.request(call.method, call.path, **patience.request()))
            await asyncio.sleep(patience.pause)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    add = _later(Calls.add)
    search = _later(Calls.search)
    search_batch = _later(Calls.search_batch)
    answer = _later(Calls.answer)
    answer_batch = _later(Calls.answer_batch)
    get = _later(Calls.get)
    update = _later(Calls.update)  # type: ignore[arg-type]
    delete = _later(Calls.delete)
    delete_all = _later(Calls.delete_all)
    list = _later(Calls.list)
    history = _later(Calls.history)
    handle = _later(Calls.handle)  # type: ignore[arg-type]
    status = _later(Calls.status)
    release_memory = _later(Calls.release_memory)


# Sending


class _Patience:
    """How long one request is tried for, and when it is sent again."""

    def __init__(self, call: Call[Any], url: str, timeout: float) -> None:
        self.call, self.url = call, url
        self.end = time.monotonic() + timeout
        self.pause = 0.0
        self._tries = 0
        self._unreached: float | None = None  # since when

    def request(self) -> builtins.dict[str, Any]:
        left = max(0.001, self.end - time.monotonic())
        call = self.call
        given: builtins.dict[str, Any] = {"headers": dict(call.headers), "timeout": left}
        if call.params:
            given["params"] = builtins.list(call.params)
        if call.body is not None:
            given["json"] = call.body
        return given

    def __enter__(self) -> None:
        self._tries += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Swallows what another try may mend, and sets the pause before it."""
        if isinstance(error, Overloaded):  # refused before anything was done
            return self._goes_on(error.retry_after * random.uniform(1.0, 1.2))
        if not isinstance(error, httpx2.TransportError):
            return False
        pause, reached = min(0.1 * 2**self._tries, 2.0), not isinstance(error, httpx2.ConnectError)
        if reached:
            self._unreached = None
        elif self._unreached is None:
            self._unreached = time.monotonic()
        soon = self._unreached is None or time.monotonic() + pause < self._unreached + REFUSED_FOR
        if soon and (self.call.again or not reached) and self._goes_on(pause):
            return True
        got = f"{type(error).__name__}: {error}"
        advice = "start it with `zeromem serve`, or name another"
        raise ZeroMemError.of("server", f"one that answers at {self.url}", got, advice) from error

    def _goes_on(self, seconds: float) -> bool:
        self.pause = seconds
        return time.monotonic() + seconds < self.end


def _headers(key: str | None) -> Mapping[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


_REFUSALS: Mapping[int, type[ZeroMemError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: ZeroMemError,
}


def _read(reply: httpx2.Response) -> Any:
    """What the server says, or the error that it tells."""
    if reply.is_success:
        return reply.json() if reply.content else None
    try:
        plain = reply.json()
        detail = f"{plain['detail']} (request {plain['request_id']})"
    except (ValueError, KeyError, TypeError):  # a proxy's page, or no server of ours
        got = f"status {reply.status_code}"
        raise ZeroMemError.of("server", "an answer of zeromem serve", got, f"check the address {reply.url}") from None
    if reply.status_code in (429, 503):
        raise Overloaded(detail, reason=plain.get("reason", ""), retry_after=float(plain.get("retry_after", 1)))
    if (kind := _REFUSALS.get(reply.status_code)) is not None:
        raise kind(detail)
    refusal = Refusal(detail)
    refusal.status, refusal.title = reply.status_code, str(plain.get("title", "Refused"))
    raise refusal


def _path(kind: str, name: str) -> str:
    """A name as one segment, whatever is in it; also dots, which clients resolve."""
    if not isinstance(name, str) or not name:
        raise ZeroMemError.of("id" if kind != "boundaries" else "boundary", "a text that is not empty", name, "name it")
    try:
        return f"/v1/{kind}/{quote(name, safe='').replace('.', '%2E')}"
    except UnicodeEncodeError:
        raise ZeroMemError.of("id", "valid Unicode", name, "remove the lone surrogate") from None


def _at(boundary: str | None) -> builtins.list[tuple[str, str]]:
    return [] if boundary is None else [("boundary", boundary)]


def _where(boundary: Boundary | None, user_id: str | None, agent_id: str | None, run_id: str | None) -> Any:
    if boundary is None:
        return boundary_of(user_id, agent_id, run_id) + "/"
    return boundary if isinstance(boundary, str) else builtins.list(listed("boundary", boundary))


def _given(body: Mapping[str, Any]) -> builtins.dict[str, Any]:
    """What differs from what a server takes where nothing is said."""
    return {name: value for name, value in body.items() if value is not None and value is not (name == "calibrate")}


def _settings(
    top_k: int | None,
    token_budget: int | None,
    filters: Mapping[str, Any] | None,
    as_of: datetime | str | float | None,
    min_score: float | None,
    explain: bool,
) -> builtins.dict[str, Any]:
    given = None if filters is None else {name: _plain_filter(value) for name, value in filters.items()}
    named = {"top_k": top_k, "token_budget": token_budget, "filters": given, "as_of": _time(as_of)}
    return _given({**named, "min_score": min_score, "explain": explain})


def _plain_filter(value: Any) -> Any:
    if isinstance(value, datetime):
        return _time(value)
    return builtins.list(value) if isinstance(value, tuple | set | frozenset) else value


def _time(value: datetime | str | float | None) -> str | float | None:
    return parse_time(value).isoformat() if isinstance(value, datetime) else value


def _plain_message(message: object) -> Mapping[str, Any]:
    if isinstance(message, Trace):
        return message.to_dict()
    if not isinstance(message, Mapping):
        advice = "pass one of these per message"
        raise ZeroMemError.of("message", "a text, a Trace or a mapping of its fields", message, advice)
    return {name: _time(value) if isinstance(value, datetime) else value for name, value in message.items()}


def _paired(
    one: str,
    many: str,
    texts: Sequence[str],
    boundaries: Sequence[Boundary],
    times: Sequence[datetime | None] | None,
) -> builtins.list[builtins.dict[str, Any]]:
    texts, boundaries = listed(many, texts), listed("boundaries", boundaries)
    moments = [None] * len(texts) if times is None else listed("reference_times", times)
    for name, given in (("boundaries", boundaries), ("reference_times", moments)):
        if len(given) != len(texts):
            raise ZeroMemError.of(name, f"one per {one}, {len(texts)}", len(given), "pair them")
    return [
        _given({one: text, "boundary": _where(where, None, None, None), "reference_time": _time(moment)})
        for text, where, moment in zip(texts, boundaries, moments, strict=True)
    ]


def _in_parts(
    path: str,
    name: str,
    many: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    read_one: Callable[[Any], T],
    *,
    again: bool = True,
) -> Call[builtins.list[T]]:
    def part(start: int, before: builtins.list[T]) -> Call[builtins.list[T]]:
        def read(plain: Any) -> builtins.list[T] | Call[builtins.list[T]]:
            found = [*before, *map(read_one, plain["results"])]
            return found if start + AT_ONCE >= len(many) else part(start + AT_ONCE, found)

        body = {name: builtins.list(many[start : start + AT_ONCE]), **settings}
        return Call("POST", path, read, body, again=again)

    return part(0, []) if many else Call("GET", "/healthz", lambda _: [])


# Reading


def evidence_of(plain: Mapping[str, Any]) -> Evidence:
    """Evidence as it was sent; what is only sent when explained is empty."""
    own: builtins.dict[str, Any] = {name: plain[name] for name in ("query", "boundary", "route", "rho")}
    own |= {name: tuple(plain[name]) for name in ("reasons", "answer_types", "subjects") if name in plain}
    own |= {name: [_item(item) for item in plain.get(name, ())] for name in ("main", "closed", "items")}
    return Evidence(**own)


def _item(plain: Mapping[str, Any]) -> EvidenceItem:
    return EvidenceItem.from_dict({"views": {}, "parts": {}, **plain})


def _answered(plain: Mapping[str, Any]) -> Answered:
    own = dict(plain)
    own["cites"], own["usage"] = tuple(own["cites"]), Usage(**own["usage"])
    return Answered(**{**own, "evidence": evidence_of(own["evidence"])})


def trace_of(plain: Mapping[str, Any]) -> Trace:
    """A trace as it was sent, with what the record knows of it."""
    added_at, updated_at = (
        None if plain.get(name) is None else parse_time(plain[name]) for name in ("added_at", "updated_at")
    )
    return replace(Trace.from_dict(plain), added_at=added_at, updated_at=updated_at)
