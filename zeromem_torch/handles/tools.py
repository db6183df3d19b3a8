"""Memory operations as tool calls of a language model: schemas in OpenAI's form, and the hook that runs a call.

A model's words are checked against the very schema it was shown. Whatever it sends, it gets data back: a result, or
an error that says what to send instead, and then nothing was written. The boundary is the manager's; no argument can
name another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from zeromem_torch.handles.handle import TYPES, Handle
from zeromem_torch.handles.manager import MemoryManager
from zeromem_torch.substrate.traces import NotFound, ZeroMemError, nearest

Json = dict[str, Any]

_TYPE: Json = {
    "type": "string",
    "enum": list(TYPES),
    "description": "preference: what somebody likes or wants; fact: what is so; episodic: what happened; "
    "procedural: how something is done",
}
_KEY: Json = {
    "type": "string",
    "description": "What it is about, as a short path in lower case, from general to special: reply/language",
}
_HANDLE: Json = {"type": "string", "description": "A handle as the memory gave it: mem:preference:reply/language"}


def _tool(name: str, description: str, required: list[str], **properties: Json) -> Json:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[Json] = [
    _tool(
        "memory_store",
        "Remember something beyond this conversation. What was stored under the same type and key is superseded. "
        "Returns a handle, which you may keep in place of the value.",
        ["type", "key", "value"],
        type=_TYPE,
        key=_KEY,
        value={
            "type": ["string", "number", "boolean", "object", "array", "null"],
            "description": "A text that can be understood on its own, or small JSON",
        },
        source={"type": "string", "description": "Id of the message that says so; leave out if there is none"},
        confidence={"type": "number", "minimum": 0, "maximum": 1, "description": "1: said outright; lower: inferred"},
        ttl_seconds={"type": "number", "exclusiveMinimum": 0, "description": "Forget after; leave out for good"},
    ),
    _tool(
        "memory_retrieve",
        "Look up what is known of one handle: type, key, source, confidence, dates, and the tokens its value would "
        "take. The value itself stays out of the context; memory_materialize brings it in.",
        ["handle"],
        handle=_HANDLE,
    ),
    _tool(
        "memory_query",
        "Find handles: by type and key, or by meaning with text (with a type, if you know it, but without a key). "
        "A key ending in / means all keys below it. Values stay out of the context.",
        [],
        type=_TYPE,
        key=_KEY,
        text={"type": "string", "description": "What you want to know, as a question or in a few words"},
        limit={"type": "integer", "minimum": 1, "description": "Handles at most; 10 if left out"},
    ),
    _tool(
        "memory_materialize",
        "Bring the values of some handles into the context, in the order given, as many as fit. Do this only for what "
        "you need word for word.",
        ["handles"],
        handles={"type": "array", "items": _HANDLE, "minItems": 1},
        token_budget={"type": "integer", "minimum": 1, "description": "Tokens at most"},
    ),
    _tool(
        "memory_forget",
        "Delete what a handle stands for, because it is wrong or somebody asks for it.",
        ["handle"],
        handle=_HANDLE,
    ),
]
"""The tools to offer a model, for `tools=` of an OpenAI-compatible client."""

LIMIT = 10
"""Handles of one query, unless the call names a limit; how many more there were is always said."""


def execute(manager: MemoryManager, call: object) -> Json:
    """Run one tool call, and return what to send back to the model as the tool's result, ready for `json.dumps`.

    ``call`` is OpenAI's tool call, as an object or a mapping: `function` with `name` and `arguments` (JSON text), or
    these two alone. Malformed calls return {"error": {"code", "message", "expected", "got", "next"}}; codes are
    bad_call, bad_json, unknown_operation, bad_arguments, not_found, refused.
    """
    try:
        name, arguments = _read(call)
        return _OPERATIONS[name](manager, arguments)
    except _Malformed as error:
        return _error(error.code, error)
    except NotFound as error:
        return _error("not_found", error)
    except ZeroMemError as error:
        return _error("refused", error)
    except RecursionError:
        return _error("bad_json", ZeroMemError.of("arguments", "a JSON object", "one nested too deeply", "flatten it"))


class _Malformed(ZeroMemError):
    """A call that cannot be run."""

    code: str

    @classmethod
    def coded(cls, code: str, name: str, expected: str, got: object, advice: str) -> _Malformed:
        error = cls(str(ZeroMemError.of(name, expected, got, advice)))
        error.code = code
        return error


def _store(manager: MemoryManager, given: Json) -> Json:
    ttl = given.pop("ttl_seconds", None)
    return {"handle": str(manager.store(given.pop("type"), given.pop("key"), given.pop("value"), ttl=ttl, **given))}


def _retrieve(manager: MemoryManager, given: Json) -> Json:
    entry = manager.retrieve(_handle(given["handle"]))
    known = {name: value for name, value in entry.to_dict().items() if name not in ("value", "ttl", "boundary")}
    return {**known, "tokens": manager.count(entry.text)}


def _query(manager: MemoryManager, given: Json) -> Json:
    limit, text = given.get("limit", LIMIT), given.get("text")
    found = manager.query(given.get("type"), given.get("key"), text=text, top_k=limit if text is not None else None)
    matches = [{"handle": str(match.handle), "score": round(match.score, 3)} for match in found[:limit]]
    return {"matches": matches, "left_out": len(found) - len(matches)}


def _materialize(manager: MemoryManager, given: Json) -> Json:
    handles = [_handle(text) for text in given["handles"]]
    return manager.materialize(handles, token_budget=given.get("token_budget")).to_dict()


def _forget(manager: MemoryManager, given: Json) -> Json:
    handle = _handle(given["handle"])
    manager.forget(handle)
    return {"forgotten": str(handle)}


_OPERATIONS: dict[str, Callable[[MemoryManager, Json], Json]] = {
    "memory_store": _store,
    "memory_retrieve": _retrieve,
    "memory_query": _query,
    "memory_materialize": _materialize,
    "memory_forget": _forget,
}
_SCHEMAS: dict[str, Json] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def _read(call: object) -> tuple[str, Json]:
    """The operation and its checked arguments."""
    function = _part(call, "function") or call
    name, written = _part(function, "name"), _part(function, "arguments")
    if not isinstance(name, str):
        expected = "a tool call with function.name and function.arguments"
        raise _Malformed.coded("bad_call", "call", expected, call, "pass what the client gave, as it is")
    if name not in _SCHEMAS:
        advice = f"{nearest(name, _SCHEMAS)}call one of these"
        raise _Malformed.coded("unknown_operation", "name", " | ".join(_SCHEMAS), name, advice)
    arguments = _parsed(written) if isinstance(written, str) else written
    if not isinstance(arguments, Mapping):
        raise _Malformed.coded("bad_json", "arguments", "a JSON object", arguments, "send the arguments as one object")
    return name, _checked(dict(arguments), _SCHEMAS[name])


def _part(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _parsed(text: str) -> object:
    if not text.strip():  # what some clients make of no arguments
        return {}
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_constant)
    except _Malformed:
        raise
    except (ValueError, RecursionError) as error:
        advice = f"send valid JSON ({error})"
        raise _Malformed.coded("bad_json", "arguments", "a JSON object", text, advice) from None


def _once_each(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Malformed.coded("bad_json", "arguments", "each field once", twice, "send one value for it")
    return found


def _no_constant(name: str) -> None:
    raise _Malformed.coded("bad_json", "arguments", "numbers that JSON has", name, "send a finite number, or null")


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def _checked(given: Json, schema: Json) -> Json:
    """The arguments, if they follow the schema; an optional one that is null counts as left out."""
    properties, required = schema["properties"], schema["required"]
    for name in given:
        if name not in properties:
            advice = f"{nearest(name, properties)}leave it out"
            raise _Malformed.coded("bad_arguments", "arguments", f"fields {', '.join(properties)}", name, advice)
    for name in required:
        if name not in given:
            expected = properties[name].get("description", "a value")
            raise _Malformed.coded("bad_arguments", name, expected, None, f"it is required, with {', '.join(required)}")
    kept = {name: value for name, value in given.items() if value is not None or name in required}
    for name, value in kept.items():
        _check(name, value, properties[name])
    return kept


def _check(name: str, value: object, schema: Json) -> None:
    """One value against the part of JSON Schema that the tools use."""
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(_is(value, kind) for kind in types):
        raise _Malformed.coded("bad_arguments", name, " or ".join(types), value, "send a value of that type")
    if "enum" in schema and value not in schema["enum"]:
        advice = f"{nearest(str(value), schema['enum'])}send one of these"
        raise _Malformed.coded("bad_arguments", name, " | ".join(schema["enum"]), value, advice)
    if isinstance(value, int | float):
        for bound, sign, fits in _BOUNDS:
            if bound in schema and not fits(value, schema[bound]):
                advice = "send a number in range"
                raise _Malformed.coded("bad_arguments", name, f"a number {sign} {schema[bound]}", value, advice)
    if isinstance(value, list) and "items" in schema:
        if len(value) < schema["minItems"]:
            raise _Malformed.coded("bad_arguments", name, "at least one item", value, "name what you want")
        for place, item in enumerate(value):
            _check(f"{name}[{place}]", item, schema["items"])


_BOUNDS: list[tuple[str, str, Callable[[float, float], bool]]] = [
    ("minimum", "of at least", lambda value, bound: value >= bound),
    ("exclusiveMinimum", "above", lambda value, bound: value > bound),
    ("maximum", "of at most", lambda value, bound: value <= bound),
]


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):  # which Python takes for a number
        return kind == "boolean"
    return isinstance(value, _PYTHON_TYPES[kind])


def _handle(text: str) -> Handle:
    try:
        return Handle.parse(text)
    except ZeroMemError as error:
        malformed = _Malformed(str(error))
        malformed.code = "bad_arguments"
        raise malformed from None


_SHAPE = re.compile(r"(?s)(?P<name>.*?): expected (?P<expected>.*), got (?P<got>.*?); (?P<next>.*)")


def _error(code: str, error: ZeroMemError) -> Json:
    """The parts of a message of ours (`ZeroMemError.of`), each by its name."""
    shape = _SHAPE.fullmatch(str(error))
    parts = {name: shape[name] if shape else "" for name in ("expected", "got", "next")}
    return {"error": {"code": code, "message": str(error), **parts}}
