"""What goes in and out over HTTP: JSON Schemas, and the checks that are made of them.

A request is checked by functions compiled from the very schema that the OpenAPI document shows, so the two cannot
differ. What a schema cannot say (a time that can be read, a boundary without empty segments) the memory checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zeromem_torch.errors import ZeroMemError, nearest, shown
from zeromem_torch.handles.tools import TOOLS
from zeromem_torch.serving.refusals import TooLarge

if TYPE_CHECKING:
    from zeromem_torch.serving.service import Limits

Json = dict[str, Any]
Check = Callable[[Any, str], None]
"""Refuses a value that does not follow a schema; the text is what an error calls the value."""

LONGEST_NAME = 1024
"""Characters of an id, a boundary, a session: names, not texts."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_WORDS = {
    "string": "a text",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}

_MEANT = {"query": "question", "question": "query", "queries": "questions", "questions": "queries"}
"""What is searched for is a query, and what is answered a question: too far apart as words to be guessed."""


# Checks


def compiled(schema: Json, schemas: Mapping[str, Json]) -> Check:
    """The check of a schema; ``schemas`` are those that its references name. Knows what our schemas use."""
    if "$ref" in schema:
        return compiled(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    if "anyOf" in schema:
        return _any_of([(_kinds(one, schemas), compiled(one, schemas)) for one in schema["anyOf"]])
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else list(schema.get("type", _TYPES))
    types = tuple(own for kind in kinds for own in _TYPES[kind])
    booleans, expected = "boolean" in kinds, " or ".join(_WORDS[kind] for kind in kinds)
    further: dict[type, Check] = {}
    if "string" in kinds and (check := _text(schema)):
        further[str] = check
    if check := _number(schema):
        further[int] = further[float] = check
    if "array" in kinds:
        further[list] = _array(schema, schemas)
    if "object" in kinds and (check := _object(schema, schemas)):
        further[dict] = check

    def checked(value: Any, name: str) -> None:
        kind = type(value)
        if kind is bool:
            if not booleans:
                raise ZeroMemError.of(name, expected, value, "send a value of that type")
        elif not isinstance(value, types):
            raise ZeroMemError.of(name, expected, value, "send a value of that type")
        elif (check := further.get(kind)) is not None:
            check(value, name)

    return checked


def _kinds(schema: Json, schemas: Mapping[str, Json]) -> list[str]:
    if "$ref" in schema:
        return _kinds(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    return [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])


def _any_of(branches: list[tuple[list[str], Check]]) -> Check:
    """Branches are told apart by their type, so that an error speaks of the one that was meant."""
    by_type = {own: check for kinds, check in branches for kind in kinds for own in _TYPES[kind]}
    expected = " or ".join(_WORDS[kind] for kinds, _ in branches for kind in kinds)

    def checked(value: Any, name: str) -> None:
        check = by_type.get(type(value))
        if check is None:
            raise ZeroMemError.of(name, expected, value, "send a value of that type")
        check(value, name)

    return checked


def _text(schema: Json) -> Check | None:
    options, shortest, longest = schema.get("enum"), schema.get("minLength", 0), schema.get("maxLength")
    pattern = re.compile(schema["pattern"]) if "pattern" in schema else None
    if options is None and not shortest and longest is None and pattern is None:
        return None

    def checked(value: str, name: str) -> None:
        if options is not None and value not in options:
            wanted = " | ".join(option for option in options if option is not None)
            raise ZeroMemError.of(name, wanted, value, f"{nearest(value, filter(None, options))}send one of these")
        if len(value) < shortest:
            raise ZeroMemError.of(name, "a text that is not empty", value, "leave it out, or fill it in")
        if longest is not None and len(value) > longest:
            raise TooLarge.of(name, f"at most {longest} characters", len(value), "shorten it, or divide it")
        if pattern is not None and not pattern.search(value):
            raise ZeroMemError.of(name, schema["description"], value, "send it so")

    return checked


def _number(schema: Json) -> Check | None:
    least, above, most = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if least is None and above is None and most is None:
        return None
    words = [
        *([f"at least {least}"] if least is not None else []),
        *([f"above {above}"] if above is not None else []),
        *([f"at most {most}"] if most is not None else []),
    ]
    expected = f"a number of {' and '.join(words)}"

    def checked(value: float, name: str) -> None:
        low = (least is not None and not value >= least) or (above is not None and not value > above)
        if low or (most is not None and not value <= most):
            raise ZeroMemError.of(name, expected, value, "send one in that range")

    return checked


def _array(schema: Json, schemas: Mapping[str, Json]) -> Check:
    shortest, longest = schema.get("minItems", 0), schema.get("maxItems")
    each = compiled(schema["items"], schemas) if "items" in schema else None

    def checked(value: list[Any], name: str) -> None:
        if len(value) < shortest:
            raise ZeroMemError.of(name, "at least one", value, "send one or more")
        if longest is not None and len(value) > longest:
            raise TooLarge.of(name, f"at most {longest}", len(value), "send them in several requests")
        if each is not None:
            for place, item in enumerate(value):
                each(item, f"{name}[{place}]")

    return checked


def _object(schema: Json, schemas: Mapping[str, Json]) -> Check | None:
    required, rest = schema.get("required", ()), schema.get("additionalProperties", True)
    properties = {name: compiled(own, schemas) for name, own in schema.get("properties", {}).items()}
    others = compiled(rest, schemas) if isinstance(rest, dict) else None
    least = schema.get("minProperties", 0)
    if not properties and not required and rest is True:
        return None

    def checked(value: Json, name: str) -> None:
        prefix = f"{name}." if name else ""
        for field, own in value.items():
            check = properties.get(field)
            if check is not None:
                check(own, f"{prefix}{field}")
            elif others is not None:
                others(own, f"{prefix}{shown(field)}")
            elif not rest:
                expected = f"some of {', '.join(properties)}"
                asks = field in _MEANT and not properties.keys().isdisjoint(_MEANT)
                close = f"did you mean {_MEANT[field]!r}? " if asks else nearest(field, properties)
                raise ZeroMemError.of(name or "body", expected, field, f"{close}leave it out")
        for field in required:
            if field not in value:
                close = nearest(field, (other for other in value if other not in properties))
                raise ZeroMemError.of(f"{prefix}{field}", "a value", None, f"{close}it is required")
        if len(value) < least:
            raise ZeroMemError.of(name or "body", f"at least one of {', '.join(properties)}", value, "name one")

    return checked


# Schemas


def _or_null(schema: Json) -> Json:
    """Optional, and null counts as left out."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    kinds = kinds if "null" in kinds else [*kinds, "null"]
    return {**schema, "type": kinds, **({"enum": [*schema["enum"], None]} if "enum" in schema else {})}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _record(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def listing(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def said(description: str, schema: Json) -> Json:
    return {**schema, "description": description}


STRING: Json = {"type": "string"}
NUMBER: Json = {"type": "number"}
COUNT: Json = {"type": "integer", "minimum": 0}
BOOLEAN: Json = {"type": "boolean"}
NAME: Json = {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}
SHORT: Json = {"type": "string", "maxLength": LONGEST_NAME}
SCALAR: Json = {"type": ["string", "number", "boolean"]}
TIME: Json = {
    "type": ["string", "number"],
    "description": "ISO 8601, seconds or milliseconds since 1970, or '1:56 pm on 8 May, 2023'; UTC if no zone is named",
    "examples": ["2025-03-02T09:30:00+01:00"],
}
BOUNDARY: Json = {
    "anyOf": [NAME, listing(NAME, minItems=1, maxItems=LONGEST_NAME)],
    "description": "A name; 'acme/' is acme and all below it; a list of such is searched as one",
    "examples": ["acme/alice", "acme/", ["acme/alice", "acme/team"]],
}
SOME: Json = {"anyOf": [STRING, listing(STRING, minItems=1)]}
METADATA: Json = {"type": "object", "additionalProperties": SCALAR, "examples": [{"channel": "mail"}]}
FILTERS: Json = {
    "type": "object",
    "description": "Applied before anything is ranked",
    "properties": {
        **dict.fromkeys(("session", "speaker", "role"), SOME),
        "after": said("Event time, this one included", TIME),
        "before": said("Event time, this one not included", TIME),
        "metadata": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
    },
    "additionalProperties": False,
    "examples": [{"speaker": "Ann", "after": "2025-01-01"}],
}


def requests(limits: Limits) -> dict[str, Json]:
    """Schemas of what is sent to a server with these limits."""
    text: Json = {"type": "string", "maxLength": limits.text_chars}
    query: Json = {"type": "string", "minLength": 1, "maxLength": limits.query_chars}
    timeout = {"type": "number", "exclusiveMinimum": 0, "maximum": limits.longest_timeout}
    late = _or_null(said("Seconds in which an answer is of use; later it is not made", timeout))
    part = {"type": "object", "properties": {"text": STRING}, "required": ["text"]}
    content: Json = {"anyOf": [text, listing(part), {"type": "null"}]}
    called = {"type": "object", "properties": {"name": STRING, "arguments": STRING}}
    call = {"type": "object", "properties": {"function": called}, "required": ["function"]}
    message = _record(
        [],
        id=_or_null(said("Unique in its boundary; made if left out", NAME)),
        boundary=_or_null(NAME),
        text=said("What was said; OpenAI's content is read too", content),
        content=content,
        session=_or_null(SHORT),
        order={"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
        time=_or_null(said("When it happened", TIME)),
        speaker=_or_null(SHORT),
        name=_or_null(SHORT),
        role=_or_null(SHORT),
        title=_or_null(text),
        metadata=_or_null(METADATA),
        valid_from=_or_null(TIME),
        valid_to=_or_null(TIME),
        expires_at=_or_null(TIME),
        added_at=_or_null(said("Set by the record: what is sent is not used", TIME)),
        updated_at=_or_null(said("Set by the record: what is sent is not used", TIME)),
        tool_calls=listing(call) | {"type": ["array", "null"]},
        tool_call_id=_or_null(SHORT),
        refusal={"type": ["string", "null"]},
    )
    search = {
        "top_k": _or_null({"type": "integer", "minimum": 1, "description": "The N best, and what closes them"}),
        "token_budget": _or_null({"type": "integer", "minimum": 1, "description": "As many of the best as fit"}),
        "filters": _or_null(FILTERS),
        "as_of": _or_null(said("What held then; now, if left out", TIME)),
        "min_score": _or_null({"type": "number", "minimum": -1, "maximum": 1, "description": "Least relevance"}),
        "explain": _or_null(said("All that is known of each piece: views, ranks, sums, signals", BOOLEAN)),
        "reference_time": _or_null(said("What relative dates count from", TIME)),
    }
    asked = said("What a query does not say itself is taken from the fields beside it", {"type": "array"})
    answer = {
        **search,
        "reader_budget": _or_null({"type": "integer", "minimum": 1, "description": "Most tokens of evidence"}),
        "calibrate": _or_null(said("Calibrate what the reader says against its evidence (default)", BOOLEAN)),
        "abstain": _or_null(said("Answer 'not in memory' where nothing supports more", BOOLEAN)),
        "timeout": late,
    }
    one_query = _record(["query"], query=query, boundary=BOUNDARY, **search)
    one_question = _record(["question"], question=query, boundary=BOUNDARY, **search)
    update = {
        "type": "object",
        "description": "What an update may change; who said it, where and in which order is provenance",
        "properties": {
            "text": {**text, "minLength": 1},
            "title": text,
            "metadata": said("Replaces all of it", METADATA),
            **{name: _or_null(TIME) for name in ("time", "valid_from", "valid_to", "expires_at")},
        },
        "additionalProperties": False,
        "minProperties": 1,
        "examples": [{"text": "The course starts on Tuesday."}],
    }
    return {
        "Message": message | {"examples": [{"text": "The course starts on Monday.", "speaker": "Ann"}]},
        "Add": _record(
            ["messages"],
            messages={
                "anyOf": [
                    text | {"minLength": 1},
                    ref("Message"),
                    listing({"anyOf": [text | {"minLength": 1}, ref("Message")]}, minItems=1, maxItems=limits.messages),
                ],
                "description": "One or many: all are stored, or none",
            },
            boundary=_or_null(said("Of messages that name none", NAME)),
            session=_or_null(SHORT),
            timestamp=_or_null(said("Event time of messages that name none", TIME)),
            metadata=_or_null(METADATA),
            overwrite=_or_null(said("Another trace under a known id is an update, not an error", BOOLEAN)),
            wait=_or_null(said("Answer when searches find them, not already when they are on disk", BOOLEAN)),
            timeout=late,
        ),
        "Query": one_query,
        "Search": _record(["query", "boundary"], query=query, boundary=BOUNDARY, **search, timeout=late),
        "SearchMany": _record(
            ["queries"],
            queries=listing({"anyOf": [query, ref("Query")]}, minItems=1, maxItems=limits.queries)
            | {"description": asked["description"]},
            boundary=_or_null(BOUNDARY),
            **search,
            timeout=late,
        ),
        "Question": one_question,
        "Ask": _record(["question", "boundary"], question=query, boundary=BOUNDARY, **answer),
        "AskMany": _record(
            ["questions"],
            questions=listing({"anyOf": [query, ref("Question")]}, minItems=1, maxItems=limits.queries)
            | {"description": asked["description"]},
            boundary=_or_null(BOUNDARY),
            **answer,
        ),
        "Update": update,
        **{name: _tool(tool, late) for name, tool in TOOLS_BY_NAME.items()},
    }


TOOLS_BY_NAME: dict[str, Json] = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
HANDLES = {name.removeprefix("memory_"): name for name in TOOLS_BY_NAME}
"""Handle operations, as paths name them, and as tools are called."""


def _tool(tool: Json, late: Json) -> Json:
    """A tool's parameters beside the boundary, which a tool may not name but a request must."""
    required = tool["parameters"]["required"]
    own = {
        name: schema if name in required else _or_null(schema)
        for name, schema in tool["parameters"]["properties"].items()
    }
    session = _or_null(said("Whose context it is, for the history and the log", SHORT))
    return _record(["boundary", *required], boundary=NAME, session=session, **own, timeout=late)


def responses() -> dict[str, Json]:
    null_string, null_time = {"type": ["string", "null"]}, {"type": ["string", "null"], "description": "ISO 8601"}
    scores = {"type": "object", "additionalProperties": NUMBER}
    item = _record(
        ["trace_id", "text", "start", "end", "score", "relevance", "reason", "time", "speaker", "title", "role"]
        + ["session", "boundary", "tokens"],
        trace_id=STRING,
        text=said("trace.text[start:end]", STRING),
        start=COUNT,
        end=COUNT,
        score=said("What it was ranked by", NUMBER),
        relevance=said("Cosine of query and trace", NUMBER),
        reason=said("main, neighbour, graph support or ranked", STRING),
        time=null_time,
        speaker=STRING,
        title=STRING,
        role=STRING,
        session=STRING,
        boundary=STRING,
        tokens=COUNT,
        views=scores,
        parts=scores,
        source=null_string,
        explanation={"type": ["object", "null"]},
    )
    evidence = _record(
        ["query", "boundary", "route", "rho", "reasons", "found", "tokens", "items"],
        query=STRING,
        boundary=STRING,
        route=said("relational, local, or none where there was nothing to search", STRING),
        rho=NUMBER,
        reasons=listing(STRING),
        found=BOOLEAN,
        tokens=COUNT,
        items=listing(ref("EvidenceItem")),
        answer_types=said("With explain", listing(STRING)),
        subjects=said("With explain", listing(STRING)),
        main=said("With explain: the best of both views", listing(ref("EvidenceItem"))),
        closed=said("With explain: with what supports them", listing(ref("EvidenceItem"))),
    )
    usage = _record(
        ["prompt_tokens", "completion_tokens", "calls"], prompt_tokens=COUNT, completion_tokens=COUNT, calls=COUNT
    )
    names = ["question", "text", "raw", "rule", "explanation", "supported", "cites", "error", "usage", "evidence"]
    answered = _record(
        names,
        question=STRING,
        text=said("Calibrated; empty where the reader failed", STRING),
        raw=said("As the reader said it", STRING),
        rule=said("What changed it last", STRING),
        explanation=STRING,
        supported=BOOLEAN,
        cites=said("Ids of the traces that bear it out", listing(STRING)),
        error=said("Why the reader gave no answer", STRING),
        usage=usage,
        evidence=ref("Evidence"),
    )
    trace = _record(
        ["id", "boundary", "text"],
        **dict.fromkeys(("id", "boundary", "text", "session", "speaker", "role", "title"), STRING),
        order={"type": "integer"},
        metadata={"type": "object", "additionalProperties": SCALAR},
        **dict.fromkeys(("time", "valid_from", "valid_to", "expires_at", "added_at", "updated_at"), STRING),
    )
    change = _record(
        ["at", "actor", "action", "before", "after"],
        at=STRING,
        actor=STRING,
        action={"type": "string", "enum": ["add", "update", "delete"]},
        before={"anyOf": [ref("Trace"), {"type": "null"}]},
        after={"anyOf": [ref("Trace"), {"type": "null"}]},
    )
    problem = _record(
        ["type", "title", "status", "detail", "request_id"],
        type=said("urn:zeromem:<kind>", STRING),
        title=STRING,
        status={"type": "integer"},
        detail=said("What was expected, what came, what to do", STRING),
        request_id=STRING,
        reason=said("Of overload: queue, deadline, ...", STRING),
        retry_after=said("Seconds after which it may not be so", COUNT),
    )
    added = _record(
        ["ids", "position", "indexed"],
        ids=said("In the order of the messages", listing(STRING)),
        position=said("Of the last of them in the record; indexed_up_to reaches it", {"type": "integer"}),
        indexed=said("Whether searches find them already", BOOLEAN),
    )
    status = {
        "type": "object",
        "properties": {
            "traces": COUNT,
            "boundaries": COUNT,
            "stored_up_to": COUNT,
            "indexed_up_to": COUNT,
            "ready": BOOLEAN,
            "encoder": null_string,
        },
        "required": ["traces", "boundaries", "stored_up_to", "indexed_up_to", "ready", "encoder"],
    }
    handle = said("mem:<type>:<key>", STRING)
    entry = {
        "type": "object",
        "properties": {"handle": handle, "type": STRING, "key": STRING, "tokens": COUNT},
        "required": ["handle", "type", "key", "tokens"],
    }
    match = _record(["handle", "score"], handle=handle, score=NUMBER)
    return {
        "EvidenceItem": item,
        "Evidence": evidence,
        "Evidences": _record(["results"], results=listing(ref("Evidence"))),
        "Answered": answered,
        "Answers": _record(["results"], results=listing(ref("Answered"))),
        "Trace": trace,
        "Page": _record(["items", "next_cursor"], items=listing(ref("Trace")), next_cursor=null_string),
        "Change": change,
        "History": _record(["items"], items=listing(ref("Change"))),
        "Added": added,
        "Deleted": _record(["deleted"], deleted=COUNT),
        "Status": status,
        "Health": _record(["status"], status=STRING),
        "Problem": problem,
        "Stored": _record(["handle"], handle=handle),
        "Entry": entry,
        "Matches": _record(["matches", "left_out"], matches=listing(match), left_out=COUNT),
        "Materialized": _record(
            ["text", "handles", "tokens", "left_out"],
            text=STRING,
            handles=listing(handle),
            tokens=COUNT,
            left_out=listing(handle),
        ),
        "Forgotten": _record(["forgotten"], forgotten=handle),
    }
