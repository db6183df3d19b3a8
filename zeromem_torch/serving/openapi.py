"""The OpenAPI document: what a server does at which path, with examples that work; and the same as a page to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING

from zeromem_torch.serving.schemas import (
    HANDLES,
    NAME,
    SHORT,
    STRING,
    TOOLS_BY_NAME,
    Json,
    listing,
    ref,
    requests,
    responses,
)

if TYPE_CHECKING:
    from zeromem_torch.serving.service import Limits

_PROBLEMS = {
    400: "What was sent cannot be read",
    401: "No key, or one that is not known",
    403: "The key may not do this there",
    404: "No such trace or handle",
    408: "The body did not come in time",
    409: "Another trace has this id, or another request this Idempotency-Key",
    413: "More than the server takes at once",
    415: "The body is not JSON",
    422: "What was sent cannot be used",
    429: "The queue is full",
    500: "A mistake of ours: the log has it under the request id",
    503: "It would come too late, or the server is not ready",
}
_ALWAYS = (400, 401, 403, 413, 422, 429, 500, 503)
_ADDED = {"ids": ["5f0c..."], "position": 42, "indexed": False}
_FOUND = {
    "query": "When does the course start?",
    "boundary": "acme/alice",
    "route": "local",
    "rho": 0.6,
    "reasons": ["form: 0 for hops, 2 for one place"],
    "found": True,
    "tokens": 9,
    "items": [
        {
            "trace_id": "D1:3",
            "text": "The course starts on Monday.",
            "start": 0,
            "end": 28,
            "score": 1.1,
            "relevance": 0.7,
            "reason": "main",
            "time": "2025-03-02T09:30:00+00:00",
            "speaker": "Ann",
            "title": "",
            "role": "user",
            "session": "",
            "boundary": "acme/alice",
            "tokens": 9,
        }
    ],
}
_ID: Json = {"name": "id", "in": "path", "required": True, "schema": NAME}
_PATH_BOUNDARY: Json = {"name": "boundary", "in": "path", "required": True, "schema": NAME}
_WHERE: Json = {
    "name": "boundary",
    "in": "query",
    "description": "Where the trace is, if several boundaries have the id",
    "schema": NAME,
}
_PURGE: Json = {
    "name": "purge",
    "in": "query",
    "description": "Remove it from the history and from every file too; needs admin",
    "schema": {"type": "string", "enum": ["true", "false"]},
}
_LISTED: list[Json] = [
    {
        "name": "boundary",
        "in": "query",
        "description": "Only these ('acme/': and all below); may be repeated",
        "schema": listing(NAME, minItems=1),
    },
    {
        "name": "cursor",
        "in": "query",
        "description": "The next_cursor of the page before",
        "schema": {"type": "string", "pattern": "^[0-9]{1,18}$", "description": "the next_cursor of a page"},
    },
    {"name": "prefix", "in": "query", "description": "Only ids that begin so", "schema": SHORT},
]
IDEMPOTENCY_KEY: Json = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same request again under the same key writes nothing new",
    "schema": {"type": "string", "pattern": "^[!-~]{1,200}$", "description": "1 to 200 visible ASCII characters"},
}


def document(limits: Limits, version: str) -> Json:
    """The OpenAPI document of a server with these limits."""
    limit = {"type": "integer", "minimum": 1, "maximum": limits.page}
    page: Json = {"name": "limit", "in": "query", "description": "At most so many (100 if left out)", "schema": limit}
    where = {"boundary": "acme/alice"}
    paths: Json = {
        "/v1/search": {
            "post": _operation(
                "search",
                "Find evidence for one query, or for many over boundaries of their own",
                ["Evidence", "Evidences"],
                body=["Search", "SearchMany"],
                examples={
                    "one": {"query": "When does the course start?", **where},
                    "many": {"queries": ["Who teaches it?", {"query": "Where?", "boundary": "acme/"}], **where},
                },
                example=_FOUND,
            )
        },
        "/v1/memories": {
            "post": _operation(
                "add",
                "Store one message or many; acknowledged ones are on disk",
                ["Added"],
                body=["Add"],
                examples={
                    "one": {"messages": "The course starts on Monday.", **where},
                    "many": {
                        "messages": [
                            {"role": "user", "content": "When does it start?"},
                            {"text": "On Monday.", "speaker": "Ann", "time": "2025-03-02T09:30:00+01:00"},
                        ],
                        **where,
                        "session": "monday",
                        "wait": True,
                    },
                },
                example=_ADDED,
                parameters=[IDEMPOTENCY_KEY],
                status=201,
                more=(409,),
            ),
            "get": _operation(
                "list", "Traces in the order they came, a page at a time", ["Page"], parameters=[*_LISTED, page]
            ),
        },
        "/v1/memories/{id}": {
            "get": _operation("get", "A trace by its id", ["Trace"], parameters=[_ID, _WHERE], more=(404,)),
            "patch": _operation(
                "update",
                "Change a trace; returns it as it is now",
                ["Trace"],
                body=["Update"],
                examples={"text": {"text": "The course starts on Tuesday."}},
                parameters=[_ID, _WHERE],
                more=(404, 409),
            ),
            "delete": _operation(
                "delete", "Delete a trace", [], parameters=[_ID, _WHERE, _PURGE], status=204, more=(404,)
            ),
        },
        "/v1/history/{id}": {
            "get": _operation(
                "history",
                "What happened to a trace, oldest first; also to a deleted one",
                ["History"],
                parameters=[_ID, _WHERE],
                more=(404,),
            )
        },
        "/v1/boundaries/{boundary}": {
            "delete": _operation(
                "delete_boundary",
                "Delete all traces of a boundary ('acme/': and of all below)",
                ["Deleted"],
                parameters=[_PATH_BOUNDARY, _PURGE],
                more=(404,),
            )
        },
        "/v1/answer": {
            "post": _operation(
                "answer",
                "Answer questions from their evidence; only this spends tokens of a language model",
                ["Answered", "Answers"],
                body=["Ask", "AskMany"],
                examples={"one": {"question": "When does the course start?", **where}},
            )
        },
        **{
            f"/v1/handles/{name}": {
                "post": _operation(
                    f"handles_{name}",
                    TOOLS_BY_NAME[tool]["description"],
                    [_HANDLE_ANSWERS[name]],
                    body=[tool],
                    examples={"one": {**where, **_HANDLE_EXAMPLES[name]}},
                    more=(404,),
                )
            }
            for name, tool in HANDLES.items()
        },
        "/v1/status": {"get": _operation("status", "What is stored, and how far it is indexed", ["Status"])},
        "/v1/release-memory": {
            "post": _operation("release_memory", "Drop what can be read again from disk; needs admin", [], status=204)
        },
        "/healthz": {"get": _operation("health", "Whether the process answers", ["Health"], keyless=True)},
        "/readyz": {
            "get": _operation(
                "ready", "Whether memory is steady and requests are taken", ["Health"], keyless=True, more=(503,)
            )
        },
        "/metrics": {"get": _operation("metrics", "Prometheus metrics; needs admin", [], text=True)},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ZeroMem",
            "version": version,
            "description": "Long-term memory for LLM agents in which no step but the final answer uses an LLM. "
            "Errors are problem+json and say what was expected, what came and what to do.",
        },
        "paths": paths,
        "components": {
            "schemas": {**requests(limits), **responses()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key that `zeromem keys make` printed"}
            },
        },
    }


_HANDLE_ANSWERS = {
    "store": "Stored",
    "retrieve": "Entry",
    "query": "Matches",
    "materialize": "Materialized",
    "forget": "Forgotten",
}
_HANDLE = "mem:preference:reply/language"
_HANDLE_EXAMPLES: dict[str, Json] = {
    "store": {"type": "preference", "key": "reply/language", "value": "Answers in French, please"},
    "retrieve": {"handle": _HANDLE},
    "query": {"text": "In which language should I answer?"},
    "materialize": {"handles": [_HANDLE], "token_budget": 200},
    "forget": {"handle": _HANDLE},
}


def _operation(
    name: str,
    summary: str,
    answers: list[str],
    *,
    body: list[str] | None = None,
    examples: Mapping[str, Json] | None = None,
    example: Json | None = None,
    parameters: list[Json] | None = None,
    status: int = 200,
    more: tuple[int, ...] = (),
    keyless: bool = False,
    text: bool = False,
) -> Json:
    headers = {"X-Request-ID": {"description": "Also in the log", "schema": STRING}}
    done: Json = {"description": "Done", "headers": headers}
    if answers:
        done["content"] = {"application/json": {"schema": _one_of(answers)}}
        if example:
            done["content"]["application/json"]["example"] = example
    if text:
        done["content"] = {"text/plain": {"schema": STRING}}
    problems = sorted({*((400, 413, 500) if keyless else _ALWAYS), *more, *((408, 415) if body else ())})
    refused: Json = {
        "headers": headers,
        "content": {"application/problem+json": {"schema": ref("Problem")}},
    }
    later = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}
    operation: Json = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters or [],
        "responses": {
            str(status): done,
            **{
                str(code): {
                    **refused,
                    "description": _PROBLEMS[code],
                    **({"headers": {**headers, **later}} if code in (429, 503) and not keyless else {}),
                }
                for code in problems
            },
        },
        "security": [] if keyless else [{"key": []}],
    }
    if body:
        shown_examples = {key: {"value": value} for key, value in (examples or {}).items()}
        content = {"application/json": {"schema": _one_of(body), "examples": shown_examples}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _one_of(names: list[str]) -> Json:
    return ref(names[0]) if len(names) == 1 else {"anyOf": [ref(name) for name in names]}


# The page

_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin: 2rem 0 .3rem; font-size: 1.05rem; } code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { background: #f4f4f2; padding: .7rem; overflow-x: auto; } dt { float: left; clear: left; min-width: 9rem; }
dd { margin-left: 10rem; } small { color: #666; }
"""


def page(document: Json) -> str:
    """The document as HTML that loads nothing from anywhere: a server may have no way out, and has keys to keep."""
    info = document["info"]
    sections = [
        section
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for section in _section(method.upper(), path, operation, document["components"]["schemas"])
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><h1>{escape(info['title'])} "
        f"<small>{escape(info['version'])}</small></h1><p>{escape(info['description'])}</p>"
        "<p>Where there are keys, send <code>Authorization: Bearer zm_...</code>. "
        f"For programs: <a href=openapi.json>openapi.json</a></p>{''.join(sections)}</html>"
    )


def _section(method: str, path: str, operation: Json, schemas: Mapping[str, Json]) -> Iterator[str]:
    yield f"<h2 id={operation['operationId']}><code>{method} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation['summary'])}</p>"
    fields = {own["name"]: own.get("description", "") for own in operation["parameters"]}
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    for name in [] if content is None else _names(content["schema"]):
        for field, schema in schemas[name]["properties"].items():
            fields.setdefault(field, schema.get("description", ""))
    listed = [f"<dt><code>{escape(name)}</code></dt><dd>{escape(said) or '&nbsp;'}" for name, said in fields.items()]
    yield f"<dl>{''.join(listed)}</dl>" if listed else ""
    for example in ({} if content is None else content["examples"]).values():
        body = json.dumps(example["value"], ensure_ascii=False)
        call = f"curl -X {method} http://localhost:8765{path} -H 'Content-Type: application/json' \\\n  -d '{body}'"
        yield f"<pre>{escape(call)}</pre>"


def _names(schema: Json) -> list[str]:
    branches = schema.get("anyOf", [schema])
    return [branch["$ref"].rsplit("/", 1)[1] for branch in branches]
