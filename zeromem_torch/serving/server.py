"""The HTTP API: reads requests, asks the service, writes what it says; nothing is decided here about whose data it is.

Each operation is one function from a `Request` to a `Reply`; what all of them share (limits, keys, request ids, errors,
metrics, logs) stands in `Endpoint`. Bodies are checked against the schemas that the OpenAPI document shows, and answers
are written straight to bytes, as a search is asked for thousands of times a second.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from zeromem_torch.errors import NotFound, ZeroMemError
from zeromem_torch.serving.keys import Caller
from zeromem_torch.serving.logs import event
from zeromem_torch.serving.openapi import document, page
from zeromem_torch.serving.receiving import (
    NOBODY,
    Gone,
    Receive,
    Request,
    Room,
    Scope,
    Send,
    Unreadable,
    body_of,
    check_path,
    headers_of,
    host_of,
    idempotency_key,
    json_of,
    message_of,
    query_of,
    request_id_of,
    search_request,
    several,
    unless_gone,
)
from zeromem_torch.serving.refusals import Overloaded, TooLarge
from zeromem_torch.serving.replying import Reply, answered_json, evidence_json, kind_of, problem, send_reply
from zeromem_torch.serving.schemas import HANDLES, LONGEST_NAME, Check, compiled

if TYPE_CHECKING:
    from starlette.requests import Request as StarletteRequest

    from zeromem_torch.serving.service import MemoryService
    from zeromem_torch.serving.tracing import Tracing


class _Name(Convertor[str]):
    """The rest of a path: an id may hold slashes and line breaks."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _Name())


@dataclass(frozen=True)
class Operation:
    """What one method of a path does, and how its request is to be."""

    run: Callable[[Request], Awaitable[Reply]]
    bodies: Mapping[str, Check] = field(default_factory=dict)  # by the field that only this kind of body has
    query: tuple[str, ...] = ()
    keyless: bool = False
    watched: bool = True  # whether it may take long enough for a client to leave


class Api:
    """The operations over one service."""

    def __init__(self, service: MemoryService, *, hosts: Sequence[str] | None, log_text: bool, tracing: Tracing | None):
        self.service, self.log_text, self.tracing = service, log_text, tracing
        self.hosts = None if hosts is None else frozenset(hosts)
        self.document = document(service.limits, version("zeromem-torch"))
        self._openapi = to_json(self.document)
        self.room = Room(service.limits)

    def paths(self) -> dict[str, dict[str, Operation]]:
        known = self.document["components"]["schemas"]

        def body(**names: str) -> dict[str, Check]:
            return {field: compiled(known[name], known) for field, name in names.items()}

        where, purge = ("boundary",), ("boundary", "purge")
        quick: dict[str, Any] = {"keyless": True, "watched": False}
        return {
            "/v1/search": {"POST": Operation(self.search, body(query="Search", queries="SearchMany"))},
            "/v1/memories": {
                "POST": Operation(self.add, body(messages="Add")),
                "GET": Operation(self.list, query=("boundary", "cursor", "limit", "prefix")),
            },
            "/v1/memories/{id:name}": {
                "GET": Operation(self.get, query=where),
                "PATCH": Operation(self.update, body(text="Update"), query=where),
                "DELETE": Operation(self.delete, query=purge),
            },
            "/v1/history/{id:name}": {"GET": Operation(self.history, query=where)},
            "/v1/boundaries/{boundary:name}": {"DELETE": Operation(self.delete_boundary, query=("purge",))},
            "/v1/answer": {"POST": Operation(self.answer, body(question="Ask", questions="AskMany"))},
            **{
                f"/v1/handles/{name}": {"POST": Operation(self._handle(tool), body(boundary=tool))}
                for name, tool in HANDLES.items()
            },
            "/v1/status": {"GET": Operation(self.status)},
            "/v1/release-memory": {"POST": Operation(self.release_memory)},
            "/healthz": {"GET": Operation(self.health, **quick)},
            "/readyz": {"GET": Operation(self.ready, **quick)},
            "/metrics": {"GET": Operation(self.metrics)},
            "/openapi.json": {"GET": Operation(self.openapi, **quick)},
        }

    # Searching and answering

    async def search(self, request: Request) -> Reply:
        body = request.body
        if "queries" not in body:
            asked = search_request(body, body["query"])
            (found,) = await self.service.search(request.caller, [asked], timeout=body.get("timeout"))
            return Reply(to_json(evidence_json(found, explain=asked.explain), inf_nan_mode="null"))
        many = several(body, body["queries"], "query", "queries")
        results = await self.service.search(request.caller, many, timeout=body.get("timeout"))
        plain = [evidence_json(one, explain=own.explain) for one, own in zip(results, many, strict=True)]
        return Reply(to_json({"results": plain}, inf_nan_mode="null"))

    async def answer(self, request: Request) -> Reply:
        body = request.body
        one = "questions" not in body
        asked = (
            [search_request(body, body["question"])]
            if one
            else several(body, body["questions"], "question", "questions")
        )
        calibrate = body.get("calibrate")
        answers = await self.service.answer(
            request.caller,
            asked,
            reader_budget=body.get("reader_budget"),
            calibrate=True if calibrate is None else calibrate,
            abstain=bool(body.get("abstain")),
            timeout=body.get("timeout"),
        )
        plain = [answered_json(own, explain=wanted.explain) for own, wanted in zip(answers, asked, strict=True)]
        return Reply(to_json(plain[0] if one else {"results": plain}, inf_nan_mode="null"))

    # Writing

    async def add(self, request: Request) -> Reply:
        body = request.body
        given = body["messages"]
        messages = [message_of(one) for one in (given if isinstance(given, list) else [given])]
        added = await self.service.add(
            request.caller,
            messages,
            boundary=body.get("boundary"),
            session=body.get("session"),
            timestamp=body.get("timestamp"),
            metadata=body.get("metadata"),
            overwrite=bool(body.get("overwrite")),
            idempotency_key=idempotency_key(request.headers),
            wait=bool(body.get("wait")),
            timeout=body.get("timeout"),
        )
        return Reply(to_json(added.to_dict()), 201)

    async def update(self, request: Request) -> Reply:
        boundary = request.boundary()
        trace = await self.service.update(request.caller, request.params["id"], request.body, boundary=boundary)
        return Reply(to_json(trace.to_dict()))

    async def delete(self, request: Request) -> Reply:
        boundary, purge = request.boundary(), request.flag("purge")
        await self.service.delete(request.caller, request.params["id"], boundary=boundary, purge=purge)
        return Reply(status=204)

    async def delete_boundary(self, request: Request) -> Reply:
        purge = request.flag("purge")
        deleted = await self.service.delete_boundary(request.caller, request.params["boundary"], purge=purge)
        return Reply(to_json({"deleted": deleted}))

    def _handle(self, tool: str) -> Callable[[Request], Awaitable[Reply]]:
        async def run(request: Request) -> Reply:
            arguments = dict(request.body)
            boundary, session, timeout = (arguments.pop(name, None) for name in ("boundary", "session", "timeout"))
            assert isinstance(boundary, str)
            if isinstance(value := arguments.get("value"), dict | list):
                written, most = len(json.dumps(value)), self.service.limits.text_chars
                if written > most:
                    raise TooLarge.of("value", f"at most {most} characters of JSON", written, "split it")
            result = await self.service.handle(
                request.caller, tool, arguments, boundary=boundary, session=session or "", timeout=timeout
            )
            return Reply(to_json(result, inf_nan_mode="null"))

        return run

    # Reading

    async def get(self, request: Request) -> Reply:
        trace = await self.service.get(request.caller, request.params["id"], boundary=request.boundary())
        return Reply(to_json(trace.to_dict()))

    async def history(self, request: Request) -> Reply:
        changes = await self.service.history(request.caller, request.params["id"], boundary=request.boundary())
        return Reply(to_json({"items": [change.to_dict() for change in changes]}))

    async def list(self, request: Request) -> Reply:
        query = request.query
        limit = query.get("limit", ["100"])[0]
        if not re.fullmatch(r"[1-9][0-9]{0,8}", limit):
            raise ZeroMemError.of("limit", "a whole number of at least 1", limit, "leave it out for 100")
        cursor = query["cursor"][0] if "cursor" in query else None
        if cursor is not None and not re.fullmatch(r"[0-9]{1,18}", cursor):
            raise ZeroMemError.of("cursor", "the next_cursor of a page", cursor, "leave it out to start anew")
        prefix = query.get("prefix", [""])[0]
        named = query.get("boundary")
        page = await self.service.list(request.caller, boundary=named, cursor=cursor, limit=int(limit), prefix=prefix)
        return Reply(to_json(page.to_dict()))

    # The server itself

    async def status(self, request: Request) -> Reply:
        return Reply(to_json(await self.service.status(request.caller)))

    async def release_memory(self, request: Request) -> Reply:
        await self.service.release_memory(request.caller)
        return Reply(status=204)

    async def health(self, request: Request) -> Reply:
        return Reply(to_json({"status": "ok"}))

    async def ready(self, request: Request) -> Reply:
        if why := self.service.ready:
            expected = "ready: expected a server that is ready"
            message = f"{expected}, got one that is not: {why}; ask again in a second"
            raise Overloaded(message, reason="not ready", retry_after=1)
        return Reply(to_json({"status": "ready"}))

    async def metrics(self, request: Request) -> Reply:
        if "admin" not in request.caller.scopes:
            request.caller.check("admin", [])  # refused in the words of any other refusal
        text, content_type = await self.service.exposition()
        return Reply(text, content_type=content_type.encode())

    async def openapi(self, request: Request) -> Reply:
        return Reply(self._openapi)


# Requests

QUIET = ("/healthz", "/readyz", "/metrics")
"""Asked every few seconds by machines: in the log only when they fail in a way of ours."""


class Endpoint:
    """A path: its operations by method, and all that they share. An ASGI application."""

    def __init__(
        self, api: Api, path: str, operations: Mapping[str, Operation], otherwise: Operation | None = None
    ) -> None:
        self.api, self.service, self.otherwise = api, api.service, otherwise
        self.route = re.sub(r":name\}", "}", path)
        self.operations = {**operations, **({"HEAD": operations["GET"]} if "GET" in operations else {})}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        headers, double = headers_of(scope["headers"])
        request_id = request_id_of(headers)
        caller = ""
        failure: BaseException | None = None
        request: Request | None = None
        taken = 0
        try:
            operation = self._operation(scope["method"], headers, double)
            who = None if operation.keyless else self._caller(headers)
            caller = who.name if who is not None else ""
            taken = self.api.room.take(headers) if operation.bodies else 0
            body = await body_of(headers, receive, self.service.limits, wanted=bool(operation.bodies))
            request = self._request(request_id, scope, operation, headers, body, who)
            run = operation.run(request)
            if self.api.tracing is not None:
                run = self.api.tracing.around(run, f"{scope['method']} {self.route}", headers, request_id)
            reply = await (unless_gone(run, receive) if operation.watched else run)
        except Gone:
            self._account(scope["method"], request_id, caller, 499, started, None, request)
            return
        except Exception as error:
            failure = error
            reply = problem(error, request_id)
            if isinstance(error, Overloaded) and error.reason == "bodies":  # the others are counted where they arise
                self.service.metrics.shed(error.reason)
        finally:
            self.api.room.give(taken)
        await send_reply(send, reply, request_id)
        self._account(scope["method"], request_id, caller, reply.status, started, failure, request)

    def _operation(self, method: str, headers: Mapping[bytes, bytes], double: bytes | None) -> Operation:
        if self.api.hosts is not None:  # or any web page could have a browser call us
            if (host := host_of(headers)) not in self.api.hosts:
                expected = f"one of {', '.join(sorted(self.api.hosts))}"
                message = ZeroMemError.of("Host", expected, host, "call the server by its own address")
                raise Unreadable.because(421, "Misdirected request", str(message))
            if b"origin" in headers and host_of(headers, b"origin") not in self.api.hosts:
                message = ZeroMemError.of("Origin", "none, or a page of this machine", "another", "call it from there")
                raise Unreadable.because(403, "Forbidden", str(message))
        if double is not None:
            message = ZeroMemError.of(double.decode("latin-1"), "one header", "two", "send it once")
            raise Unreadable.because(400, "Bad request", str(message))
        operation = self.operations.get(method, self.otherwise)
        if operation is None:
            allowed = ", ".join(self.operations)
            message = ZeroMemError.of("method", allowed, method, "/openapi.json says what there is")
            raise Unreadable.because(405, "Method not allowed", str(message), allow=allowed)
        return operation

    def _caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        given = headers.get(b"authorization", b"").decode("latin-1")
        scheme, _, secret = given.partition(" ")
        return self.service.authenticate(secret.strip() if scheme.lower() == "bearer" else None)

    def _request(
        self,
        request_id: str,
        scope: Scope,
        operation: Operation,
        headers: Mapping[bytes, bytes],
        body: bytes,
        caller: Caller | None,
    ) -> Request:
        query = query_of(scope["query_string"], operation.query)
        params = scope.get("path_params") or {}
        for name, value in params.items():
            if len(value) > LONGEST_NAME:
                raise TooLarge.of(name, f"at most {LONGEST_NAME} characters", value, "check it")
        if params and "\N{REPLACEMENT CHARACTER}" in "".join(params.values()):
            check_path(scope.get("raw_path", b""))
        plain = json_of(headers, body, operation.bodies) if operation.bodies else {}
        return Request(request_id, scope["method"], headers, params, query, caller or NOBODY, plain)

    def _account(
        self,
        method: str,
        request_id: str,
        caller: str,
        status: int,
        started: float,
        failure: BaseException | None,
        request: Request | None,
    ) -> None:
        seconds = perf_counter() - started
        self.service.metrics.request(self.route, status, seconds)
        raised = failure if failure is not None and not isinstance(failure, ZeroMemError) else None
        level = logging.ERROR if raised is not None else logging.DEBUG if self.route in QUIET else logging.INFO
        event(
            "request",
            level,
            raised=raised,
            id=request_id,
            key=caller or None,
            method=method,
            route=self.route,
            status=status,
            ms=round(seconds * 1000, 2),
            kind=None if failure is None else kind_of(failure),
            detail=str(failure) if failure is not None and self.api.log_text else None,
            body=request.body or None if request is not None and self.api.log_text else None,
        )


# The application


def create_app(
    service: MemoryService,
    *,
    mcp: bool = True,
    hosts: Sequence[str] | None = None,
    log_text: bool = False,
    tracing: Tracing | None = None,
    drain_seconds: float = 30.0,
) -> FastAPI:
    """The application over a service, which it starts and stops.

    ``hosts``: names that the server may be called by; a server without keys must be given them, or any web page could
    have a browser call it under a name of its own. ``log_text``: bodies and details may stand in the log.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        started = perf_counter()
        await service.start()
        event("started", seconds=round(perf_counter() - started, 3))
        try:
            yield
        finally:
            done = await service.stop(drain_seconds)
            event("stopped", indexed=done)  # what is not is indexed by the next start

    api = Api(service, hosts=hosts, log_text=log_text, tracing=tracing)
    app = FastAPI(
        title="ZeroMem",
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={ZeroMemError: _told},
    )
    app.openapi = lambda: api.document  # type: ignore[method-assign]
    routes = [Route(path, Endpoint(api, path, operations), name=path) for path, operations in api.paths().items()]
    app.router.routes.extend(routes)
    alone = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    shown = HTMLResponse(page(api.document), headers=alone)
    app.router.routes.append(Route("/docs", shown, methods=["GET"]))
    if mcp:
        from zeromem_torch.serving.mcp import mount

        mount(app, service)
    nothing = Operation(_nothing, keyless=True, watched=False)
    app.router.routes.append(Route("/{rest:name}", Endpoint(api, "unknown", {}, nothing), name="unknown"))
    return app


async def _nothing(request: Request) -> Reply:
    raise NotFound("path: expected one of the API, got another; /openapi.json says what there is")


async def _told(request: StarletteRequest, error: Exception) -> Response:
    """Our errors where Starlette catches them."""
    request_id = request_id_of(dict(request.scope["headers"]))
    reply = problem(error, request_id)
    headers = {"x-request-id": request_id, **{name.decode(): value.decode() for name, value in reply.headers}}
    return Response(reply.body, reply.status, headers, reply.content_type.decode())
