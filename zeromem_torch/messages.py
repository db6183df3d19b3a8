"""What callers write as messages, and what a file holds as lines, as traces."""

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import IO, Any, TypeVar

from zeromem_torch.substrate.traces import Trace, ZeroMemError

T = TypeVar("T")
Message = str | Trace | Mapping[str, Any]
TextFile = str | os.PathLike[str] | IO[str]


def messages_in(given: Message | Iterable[Message]) -> Sequence[Message]:
    """One message or many, as many."""
    return [given] if isinstance(given, str | Trace | Mapping) else listed("messages", given)


def trace_of(
    message: Message,
    boundary: str | None,
    session: str | None,
    when: datetime | None,
    metadata: Mapping[str, Any] | None,
) -> Trace:
    """A message as a trace; what it does not say itself is taken from the other arguments."""
    defaults = {"boundary": boundary, "session": session, "time": when}
    if isinstance(message, Trace):
        own = {name: getattr(message, name) for name in (*defaults, "metadata")}
    elif isinstance(message, str):
        own = {"text": message, "role": "user"}
    else:
        own = _plain(message)
    changes: dict[str, Any] = {k: v for k, v in defaults.items() if v is not None and own.get(k) in (None, "")}
    if metadata:
        changes["metadata"] = {**metadata, **(own.get("metadata") or {})}
    if isinstance(message, Trace):
        return replace(message, **changes) if changes else message
    if own.get("id") is None:
        changes["id"] = uuid.uuid4().hex
    if own.get("boundary") is None and boundary is None:
        raise ZeroMemError.of("boundary", "a name, as every trace needs one", None, 'pass boundary="..." or a user_id')
    return Trace.from_dict({**own, **changes})


def _plain(message: object) -> dict[str, Any]:
    """An OpenAI message's tool calls as text, and the id of the call that a tool's message answers as metadata."""
    if not isinstance(message, Mapping):
        expected, advice = "a text, a Trace or a mapping of its fields", "pass one of these per message"
        raise ZeroMemError.of("message", expected, message, advice)
    plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id", "refusal")}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        given = [call.get("function", {}) for call in calls if isinstance(call, Mapping)]
        called = [function for function in given if isinstance(function, Mapping)]
        lines = [f"{call.get('name', '')}({call.get('arguments', '')})" for call in called]
        said = plain.pop("content", None)
        plain["text"] = "\n".join([*([said] if isinstance(said, str) and said else []), *lines])
    if message.get("tool_call_id") is not None:
        plain["metadata"] = {"tool_call_id": message["tool_call_id"], **(plain.get("metadata") or {})}
    return plain


def message_in(line: str, file: str, number: int, boundary: str | None) -> dict[str, Any]:
    """A line of JSON Lines; one without an id gets the id that its place and content decide."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ZeroMemError.of(f"{file}, line {number}", "a JSON object", line, f"mend the line ({error})") from error
    if not isinstance(values, dict):
        raise ZeroMemError.of(f"{file}, line {number}", "a JSON object", line, "write one trace a line")
    if values.get("id") is None:
        values["id"] = uuid.uuid5(uuid.NAMESPACE_OID, f"{boundary}\n{number}\n{line.strip()}").hex
    return values


def messages_of(file: Iterable[str], name: str, boundary: str | None, batch: int) -> Iterator[list[Message]]:
    """The lines of JSON Lines, ``batch`` at a time; the last ones, which are fewer or none, always."""
    some: list[Message] = []
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        some.append(message_in(line, name, number, boundary))
        if len(some) == batch:
            yield some
            some = []
    yield some


def write_lines(file: IO[str], traces: Iterable[Trace]) -> int:
    """Traces as JSON Lines; returns how many."""
    count = 0
    for trace in traces:
        file.write(json.dumps(trace.to_dict(), ensure_ascii=False) + "\n")
        count += 1
    return count


def listed(name: str, values: Iterable[T]) -> Sequence[T]:
    given: object = values
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ZeroMemError.of(name, "a list", given, "pass a list, even of one")
    return values if isinstance(values, Sequence) else list(values)


@contextmanager
def text_file(path: TextFile, mode: str) -> Iterator[IO[str]]:
    """A file by its path, opened and closed; or one that the caller has open."""
    if not isinstance(path, str | os.PathLike):
        yield path
        return
    try:
        file = open(path, mode, encoding="utf-8", newline="\n" if mode == "w" else None)  # noqa: SIM115
    except OSError as error:
        raise ZeroMemError.of("path", "a file that can be opened", str(path), f"check it ({error})") from error
    with file:
        yield file
