"""Replies: what the service said as bytes, and errors as problem+json (RFC 9457)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeromem_torch.errors import Conflict, NotFound, ZeroMemError
from zeromem_torch.serving.receiving import JSON, Send
from zeromem_torch.serving.refusals import Overloaded, Refusal, Unauthorized
from zeromem_torch.serving.schemas import Json

if TYPE_CHECKING:
    from zeromem_torch.evidence import Evidence, EvidenceItem
    from zeromem_torch.results import Answered


@dataclass(slots=True)
class Reply:
    body: bytes = b""
    status: int = 200
    content_type: bytes = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()


async def send_reply(send: Send, reply: Reply, request_id: str) -> None:
    headers = [(b"x-request-id", request_id.encode()), *reply.headers]
    if reply.status != 204:
        headers += [(b"content-type", reply.content_type), (b"content-length", b"%d" % len(reply.body))]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def evidence_json(found: Evidence, *, explain: bool) -> Json:
    """Evidence as it is sent: what a reader needs or, explained, all of it."""
    if explain:
        return {**found.to_dict(), "found": found.found, "tokens": found.tokens}
    return {
        "query": found.query,
        "boundary": found.boundary,
        "route": found.route,
        "rho": found.rho,
        "reasons": found.reasons,
        "found": bool(found.items),
        "tokens": found.tokens,
        "items": [_item_json(item) for item in found.items],
    }


def _item_json(item: EvidenceItem) -> Json:
    return {
        "trace_id": item.trace_id,
        "text": item.text,
        "start": item.start,
        "end": item.end,
        "score": item.score,
        "relevance": item.relevance,
        "reason": item.reason,
        "time": item.time.isoformat() if item.time is not None else None,
        "speaker": item.speaker,
        "title": item.title,
        "role": item.role,
        "session": item.session,
        "boundary": item.boundary,
        "tokens": item.tokens,
    }


def answered_json(answered: Answered, *, explain: bool) -> Json:
    names = ("question", "text", "raw", "rule", "explanation", "supported", "error")
    plain = {name: getattr(answered, name) for name in names}
    usage = {name: getattr(answered.usage, name) for name in ("prompt_tokens", "completion_tokens", "calls")}
    evidence = evidence_json(answered.evidence, explain=explain)
    return {**plain, "cites": answered.cites, "usage": usage, "evidence": evidence}


def kind_of(error: BaseException) -> str:
    if isinstance(error, NotFound):
        return "not-found"
    if isinstance(error, Conflict):
        return "conflict"
    if isinstance(error, Refusal):
        return error.title.lower().replace(" ", "-")
    return "invalid" if isinstance(error, ZeroMemError) else "internal-error"


def problem(error: BaseException, request_id: str) -> Reply:
    """An error as problem+json (RFC 9457); a fault of ours says nothing but where the log has it."""
    headers: list[tuple[bytes, bytes]] = []
    more: Json = {}
    if isinstance(error, Refusal):
        status, title, detail = error.status, error.title, str(error)
        given: Mapping[str, str] = getattr(error, "headers", {})
        headers += [(name.encode(), value.encode()) for name, value in given.items()]
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, Overloaded):
            seconds = max(1, math.ceil(min(error.retry_after, 3600)))
            more = {"reason": error.reason, "retry_after": seconds}
            headers.append((b"retry-after", str(seconds).encode()))
    elif isinstance(error, NotFound):
        status, title, detail = 404, "Not found", str(error)
    elif isinstance(error, Conflict):
        status, title, detail = 409, "Conflict", str(error)
    elif isinstance(error, ZeroMemError):
        status, title, detail = 422, "Cannot be used", str(error)
    else:
        status, title = 500, "Internal error"
        detail = "request: expected to carry it out, got a fault of ours; tell whoever runs the server the request_id"
    kind = kind_of(error)
    plain = {"type": f"urn:zeromem:{kind}", "title": title, "status": status, "detail": detail}
    body = json.dumps({**plain, "request_id": request_id, **more}).encode()  # ASCII: a detail may quote anything
    return Reply(body, status, b"application/problem+json", headers)
