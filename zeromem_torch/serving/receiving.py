"""Requests, read strictly: limits before anything is parsed, one reading of what is sent, and refusals in words."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from zeromem_torch.errors import ZeroMemError, nearest, shown
from zeromem_torch.scope import SearchRequest
from zeromem_torch.serving.keys import Caller
from zeromem_torch.serving.openapi import IDEMPOTENCY_KEY
from zeromem_torch.serving.refusals import Overloaded, Refusal, TooLarge
from zeromem_torch.serving.schemas import LONGEST_NAME, Check, Json
from zeromem_torch.substrate.traces import parse_time

T = TypeVar("T")
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
"""ASGI's, as Starlette has them."""
JSON = b"application/json"
_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_DEFAULTS = ("boundary", "top_k", "token_budget", "filters", "as_of", "min_score", "explain", "reference_time")
"""What a query of several may leave to the fields beside the list."""


class Unreadable(Refusal):
    """A request whose form, not its content, is at fault."""

    title = "Bad request"

    @classmethod
    def because(cls, status: int, title: str, message: str, **headers: str) -> Unreadable:
        error = cls(message)
        error.status, error.title, error.headers = status, title, headers
        return error

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers: Mapping[str, str] = {}


class Gone(Exception):
    """The client hung up: nobody is left to answer."""


@dataclass(slots=True)
class Request:
    """One request, as an operation sees it."""

    id: str
    method: str
    headers: Mapping[bytes, bytes]
    params: Mapping[str, str]  # from the path
    query: Mapping[str, list[str]]
    caller: Caller
    body: Json = field(default_factory=dict)

    def boundary(self) -> str | None:
        return self.query["boundary"][0] if "boundary" in self.query else None

    def flag(self, name: str) -> bool:
        value = self.query.get(name, ["false"])[0]
        if value not in ("true", "false"):
            raise ZeroMemError.of(name, "true or false", value, "send one of these")
        return value == "true"


NOBODY = Caller("", frozenset(), ())
"""Who asks what needs no key."""


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], bytes | None]:
    """Headers by name; and one of those that must not come twice, if it did."""
    found: dict[bytes, bytes] = {}
    double = None
    for name, value in raw:
        if name in found and name in _ONCE:
            double = name
        found[name] = value
    return found, double


_ONCE = frozenset({b"authorization", b"content-type", b"content-length", b"host", b"idempotency-key"})


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The caller's, if it may stand in a log; else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(text := given.decode("latin-1")):
        return text
    return secrets.token_hex(8)


def host_of(headers: Mapping[bytes, bytes], name: bytes = b"host") -> str:
    """The host that was called, or that a page came from, without scheme and port."""
    host = headers.get(name, b"").decode("latin-1").lower().rpartition("//")[2]
    return host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host


SMALL = 1 << 16
"""Bytes of a body that is not counted: connections bound how many of these there are."""
AT_ONCE = 16
"""Largest bodies that are held at once."""


class Room:
    """For large bodies: one that is refused can be sent again, while memory that runs out ends everybody's requests."""

    def __init__(self, limits: Any) -> None:
        self.largest = limits.body_bytes
        self.left = AT_ONCE * self.largest

    def take(self, headers: Mapping[bytes, bytes]) -> int:
        """Bytes to `give` back when the request is answered. A body that does not say its length may be the largest."""
        declared = headers.get(b"content-length", b"")
        size = int(declared) if declared.isdigit() and len(declared) <= 18 else 0
        if b"transfer-encoding" in headers:
            size = self.largest
        if size <= SMALL or size > self.largest:  # which is refused as such
            return 0
        if size > self.left:
            message = f"body: expected room for {size} bytes, got other large ones that are under way; wait a second"
            raise Overloaded(message, reason="bodies", retry_after=1)
        self.left -= size
        return size

    def give(self, size: int) -> None:
        self.left += size


async def body_of(headers: Mapping[bytes, bytes], receive: Receive, limits: Any, *, wanted: bool) -> bytes:
    """All of it, if it keeps to the limit and comes in time; what is too long is not read."""
    most = limits.body_bytes if wanted else min(SMALL, limits.body_bytes)
    declared = headers.get(b"content-length")
    if declared is not None and (not declared.isdigit() or len(declared) > 18 or int(declared) > most):
        raise _too_long(most, declared.decode("latin-1"))
    if declared is None and b"transfer-encoding" not in headers:  # then there is none, and nothing to wait for long
        message = await receive()
    else:
        message = await _in_time(receive, limits.timeout)
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and message.get("more_body"):
        parts, size = [body], len(body)
        end = asyncio.get_running_loop().time() + limits.timeout
        while message.get("more_body") and size <= most:
            message = await _in_time(receive, end - asyncio.get_running_loop().time())
            parts.append(message.get("body", b""))
            size += len(parts[-1])
        body = b"".join(parts)
    if message["type"] == "http.disconnect":
        raise Gone
    if len(body) > most:
        raise _too_long(most, len(body))
    return body


async def _in_time(receive: Receive, seconds: float) -> Message:
    try:
        async with asyncio.timeout(seconds):
            return await receive()
    except TimeoutError:
        message = ZeroMemError.of("body", "all of it in time", "a part", "send it without pauses")
        raise Unreadable.because(408, "Request timeout", str(message), connection="close") from None


def _too_long(most: int, got: object) -> TooLarge:
    message = ZeroMemError.of("body", f"at most {most} bytes", got, "send it in several requests")
    error = TooLarge(str(message))
    error.headers = {"connection": "close"}  # type: ignore[attr-defined]  # the rest of it is not read
    return error


def json_of(headers: Mapping[bytes, bytes], body: bytes, checks: Mapping[str, Check]) -> Json:
    """The body as an object that follows the schema of its kind."""
    content_type = headers.get(b"content-type", b"")
    if content_type != JSON and content_type.partition(b";")[0].strip().lower() != JSON:
        advice = "send -H 'Content-Type: application/json'"  # which no web page of another origin may
        message = ZeroMemError.of("Content-Type", "application/json", content_type.decode("latin-1"), advice)
        raise Unreadable.because(415, "Unsupported media type", str(message))
    try:
        plain = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else _reason(error)
        message = ZeroMemError.of("body", "a JSON object in UTF-8", said, "mend it")
        raise Unreadable.because(400, "Bad request", str(message)) from None
    if not isinstance(plain, dict):
        raise ZeroMemError.of("body", "a JSON object", type(plain).__name__, "send one")
    names = list(checks)
    kind = next((name for name in names[1:] if name in plain), names[0])
    checks[kind](plain, "")
    return plain


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"a byte that is not UTF-8 at {error.start}"
    return str(error)


def _once_each(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):  # which of the two would count, readers of JSON do not agree on
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {shown(next(name for name in names if names.count(name) > 1))} twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {shown(text)}, which is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"the number {shown(text)}, which is too large")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_once_each, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole
)


def query_of(raw: bytes, known: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Parameters behind the question mark; each once, but for the boundaries of a list."""
    if not raw:
        return {}
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=2000)
    except ValueError as error:
        message = ZeroMemError.of("query string", "UTF-8, percent-encoded", _reason(error), "encode it")
        raise Unreadable.because(400, "Bad request", str(message)) from None
    for name, value in pairs:
        if name not in known:
            expected = f"some of {', '.join(known)}" if known else "none"
            raise ZeroMemError.of("query string", expected, name, f"{nearest(name, known)}leave it out")
        if name in found and not (name == "boundary" and "cursor" in known):
            raise ZeroMemError.of(name, "one value", "two", "send it once")
        if len(value) > LONGEST_NAME:
            raise TooLarge.of(name, f"at most {LONGEST_NAME} characters", value, "shorten it")
        found.setdefault(name, []).append(value)
    return found


def check_path(raw: bytes) -> None:
    """Refuse a path that is not UTF-8: what it was read as is not what was sent."""
    if b"%EF%BF%BD" not in raw.upper() and b"\xef\xbf\xbd" not in raw:
        message = ZeroMemError.of("path", "UTF-8, percent-encoded", raw.decode("latin-1"), "encode it")
        raise Unreadable.because(400, "Bad request", str(message))


def idempotency_key(headers: Mapping[bytes, bytes]) -> str | None:
    given = headers.get(b"idempotency-key")
    if given is None:
        return None
    pattern, expected = (IDEMPOTENCY_KEY["schema"][name] for name in ("pattern", "description"))
    if not re.fullmatch(pattern, text := given.decode("latin-1")):
        raise ZeroMemError.of("Idempotency-Key", expected, text, "send a UUID, for example")
    return text


def message_of(given: str | Json) -> Json:
    if isinstance(given, str):
        return {"text": given, "role": "user"}
    said = {name: value for name, value in given.items() if value is not None}
    for name in ("text", "content"):
        if isinstance(parts := said.get(name), list):  # as one text, whose length the service looks at
            said[name] = "\n".join(part["text"] for part in parts)
    return said


def search_request(plain: Mapping[str, Any], text: str) -> SearchRequest:
    """A search request of checked fields."""
    asked = SearchRequest(text, plain["boundary"])
    if len(plain) == 2:  # as most are
        return asked
    reference = plain.get("reference_time")
    return replace(
        asked,
        top_k=plain.get("top_k"),
        token_budget=plain.get("token_budget"),
        filters=plain.get("filters"),
        as_of=plain.get("as_of"),
        min_score=plain.get("min_score"),
        explain=bool(plain.get("explain")),
        reference_time=None if reference is None else parse_time(reference),
    )


def several(body: Json, given: Sequence[str | Json], one: str, many: str) -> list[SearchRequest]:
    beside = {name: body[name] for name in _DEFAULTS if body.get(name) is not None}
    found = []
    for number, own in enumerate(given):
        plain = {one: own} if isinstance(own, str) else {name: v for name, v in own.items() if v is not None}
        plain = {**beside, **plain}
        if "boundary" not in plain:
            raise ZeroMemError.of(f"{many}[{number}].boundary", "a name", None, "give it here, or beside the list")
        try:
            found.append(search_request(plain, plain[one]))
        except ZeroMemError as error:
            raise ZeroMemError(f"{many}[{number}]: {error}") from None
    return found


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """What the work gives; it is cancelled when the client hangs up, and then nobody is answered."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    def hung_up(watch: asyncio.Task[None]) -> None:
        nonlocal left
        if not watch.cancelled() and watch.exception() is None:
            left = True
            task.cancel()

    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(hung_up)
    try:
        return await work
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise Gone from None
    finally:
        watch.remove_done_callback(hung_up)
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
