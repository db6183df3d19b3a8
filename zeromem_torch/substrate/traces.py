"""Traces: the pieces of the record that every piece of evidence points back to.

A trace is checked once, where it is made, so that nothing behind it meets a blank id, a lone
surrogate or a time without a zone. Every refusal is a `ZeroMemError` that names the field, what
was expected, what came, and what to do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timezone
from hashlib import blake2b
from typing import Any

from zeromem_torch.errors import NotFound, ZeroMemError, nearest, shown

__all__ = [
    "MUTABLE",
    "NotFound",
    "Trace",
    "ZeroMemError",
    "check_boundary",
    "check_text",
    "nearest",
    "parse_changes",
    "parse_time",
]

TIME_FORMS = (
    "'1:56 pm on 8 May, 2023' (LoCoMo), '2023/05/20 (Sat) 02:21' (LongMemEval), "
    "ISO 8601 with or without a zone ('2023-05-08T13:56:00+02:00', '2023-05-08'), "
    "seconds or milliseconds since 1970 (1683554160, 1683554160000)"
)

# White space, control and invisible format characters: a text of nothing else says nothing.
_INVISIBLE = r"\s\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
_CONTENT = re.compile(f"[^{_INVISIBLE}]")
_ALIASES = {"content": "text", "name": "speaker"}  # OpenAI's message fields
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_LOCOMO = re.compile(
    r"(\d{1,2}):(\d{2})\s*([ap])\.?m\.?\s+on\s+(\d{1,2})\s+([a-z]{3})[a-z]*\.?,?\s+(\d{4})", re.IGNORECASE | re.ASCII
)
_LONGMEMEVAL = re.compile(
    r"(\d{4})/(\d{1,2})/(\d{1,2})(?:\s*\([a-z]+\))?(?:\s+(\d{1,2}):(\d{2})(?::(\d{2}))?)?", re.IGNORECASE | re.ASCII
)
_EPOCH = re.compile(r"-?\d{9,14}(?:\.\d+)?", re.ASCII)  # shorter runs of digits are years or basic ISO dates
_MILLISECONDS_FROM = 1e11  # as seconds this is the year 5138, as milliseconds 1973


@dataclass(frozen=True, slots=True)
class Trace:
    """One original piece of the record: a turn, a document, a tool result.

    Traces of one session have neighbours, by `order`; a trace with no session stands alone.
    A time without a zone is read as UTC. Text is kept exactly as given.
    `time` says when it happened, `added_at` when the record took it in.
    """

    id: str  # unique in its boundary, e.g. "D1:3"
    boundary: str  # isolation key, a path of segments, e.g. "acme/alice"
    text: str
    session: str = ""
    order: int = 0
    time: datetime | None = None
    speaker: str = ""
    role: str = ""  # user, assistant, tool, document, ...
    title: str = ""
    metadata: Mapping[str, str | int | float | bool] = field(default_factory=dict, hash=False)
    valid_from: datetime | None = None  # what it says holds from then on,
    valid_to: datetime | None = None  # until just before then
    expires_at: datetime | None = None  # no search finds it from then on
    added_at: datetime | None = field(default=None, compare=False)  # set by the record, as is
    updated_at: datetime | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        where = _Where(self.id)
        for name in ("id", "boundary", "text", "session", "speaker", "role", "title"):
            check_text(where, name, getattr(self, name), blank_ok=name not in _REQUIRED)
        check_boundary(self.boundary)
        if isinstance(self.order, bool) or not isinstance(self.order, int) or not -(2**63) <= self.order < 2**63:
            raise ZeroMemError.of(f"{where}, order", "a 64-bit integer", self.order, "number the turns of a session")
        for name in _TIMES:
            time = getattr(self, name)
            if time is None:
                continue
            if not isinstance(time, datetime):
                raise ZeroMemError.of(f"{where}, {name}", "a datetime or None", time, "read it with parse_time(...)")
            object.__setattr__(self, name, _with_zone(time))
        if self.valid_from and self.valid_to and self.valid_to <= self.valid_from:
            expected = f"a time behind valid_from, {self.valid_from}"
            raise ZeroMemError.of(f"{where}, valid_to", expected, str(self.valid_to), "exchange the two, or drop one")
        object.__setattr__(self, "metadata", _checked_metadata(where, self.metadata))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Trace:
        """Build a trace from JSON-like data; the fields are those of Trace.

        OpenAI-style messages are read too: `content` (a string, or a list of text parts) is the
        text, `name` the speaker. Times may be in any form `parse_time` reads. An absent or null
        optional field takes its default; what the record sets (`added_at`, `updated_at`) is left out.
        """
        if not isinstance(mapping, Mapping):
            raise ZeroMemError.of("trace", "a mapping of fields to values", mapping, "pass one object per trace")
        known = [f.name for f in fields(cls)]
        where = _Where(mapping.get("id", "?"))
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            name = _ALIASES.get(key, key)
            if name not in known:
                raise ZeroMemError.of(
                    f"{where}",
                    f"fields {', '.join(known)} (or OpenAI's role, content, name)",
                    key,
                    f"{nearest(key, [*known, *_ALIASES])}other values belong in 'metadata'",
                )
            if name in values:
                raise ZeroMemError.of(f"{where}, {name}", "one value", "two", f"keep only {name!r}, not its alias too")
            if value is not None and name not in _OF_THE_RECORD:
                values[name] = value
        for name in _REQUIRED:
            if name not in values:
                close = [k for k in mapping if isinstance(k, str) and k not in known]
                advice = f"{nearest(name, close)}every trace needs id, boundary and text"
                raise ZeroMemError.of(f"{where}, {name}", "a value", None, advice)
        values["text"] = _joined_parts(where, values["text"])
        for name in _TIMES:
            if name in values:
                try:
                    values[name] = parse_time(values[name])
                except ZeroMemError as error:
                    raise ZeroMemError(f"{where}, {str(error).replace('time', name, 1)}") from None
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like data that `from_dict` reads back; times as ISO 8601, empty fields left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _TIMES:
            if values[name] is not None:
                values[name] = values[name].isoformat()
        values["metadata"] = dict(self.metadata)
        return {name: value for name, value in values.items() if name in _REQUIRED or value not in ("", 0, None, {})}

    @property
    def digest(self) -> int:
        """63 bits of a hash over what an index depends on: an index row with another digest is out of date."""
        time = self.time.isoformat() if self.time else ""
        read = [self.boundary, self.id, self.text, self.title, self.speaker, self.role, time]
        return int.from_bytes(blake2b(json.dumps(read).encode(), digest_size=8).digest()) >> 1


MUTABLE = ("text", "title", "time", "metadata", "valid_from", "valid_to", "expires_at")
"""What an update may change. Who said it, where and in which order is provenance."""
_REQUIRED = ("id", "boundary", "text")
_OF_THE_RECORD = ("added_at", "updated_at")
_TIMES = ("time", "valid_from", "valid_to", "expires_at", *_OF_THE_RECORD)


@dataclass(frozen=True, slots=True)
class _Where:
    """Names the trace in a message; formatted only when there is something to say."""

    id: object

    def __str__(self) -> str:
        return f"trace {shown(self.id)}"


def parse_time(value: str | float | datetime) -> datetime:
    """An event time with its zone; a time that names no zone is UTC, a day without a time is its midnight.

    A number of 1e11 or more is milliseconds since 1970, a smaller one seconds.
    """
    try:
        if isinstance(value, datetime):
            return _with_zone(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _from_epoch(float(value))
        if isinstance(value, str) and len(value) <= 100:
            return _with_zone(_from_text(value.strip()))
    except (ValueError, OverflowError, OSError) as error:
        raise ZeroMemError.of("time", TIME_FORMS, value, f"write it in one of these forms ({error})") from error
    raise ZeroMemError.of("time", TIME_FORMS, value, "write it in one of these forms")


def parse_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """What an update is to change, with its times read; what it may not change is an error."""
    for name in changes:
        if name not in MUTABLE:
            advice = f"{nearest(name, MUTABLE)}what says who, where and when in order stays as it was"
            raise ZeroMemError.of("update", f"some of {', '.join(MUTABLE)}", name, advice)
    return {
        name: parse_time(value) if name in _TIMES and value is not None else value for name, value in changes.items()
    }


def check_text(where: object, name: str, value: object, *, blank_ok: bool = False) -> None:
    """Refuse what is not a usable string: blank, or with a NUL or a lone surrogate in it."""
    if not isinstance(value, str):
        raise ZeroMemError.of(f"{where}, {name}", "a string", value, "convert it first")
    if not blank_ok and not _CONTENT.search(value):
        advice = f"give it, or leave the {where} out"
        raise ZeroMemError.of(f"{where}, {name}", "something that is not blank", value, advice)
    if "\x00" in value:
        raise ZeroMemError.of(f"{where}, {name}", "text without NUL", value, "remove the character U+0000")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        got = f"a lone surrogate at character {error.start}"
        advice = "decode the bytes with errors='replace', or remove it"
        raise ZeroMemError.of(f"{where}, {name}", "valid Unicode", got, advice) from None


def check_boundary(boundary: str) -> None:
    """Refuse a path with an empty segment: "acme/" asks for all below "acme", so nothing may be named so."""
    if not all(boundary.split("/")):
        advice = "leave out what stands before or behind a slash, or name it"
        raise ZeroMemError.of("boundary", 'segments that are not empty, as in "acme/alice"', boundary, advice)


def _from_text(text: str) -> datetime:
    if match := _LOCOMO.fullmatch(text):
        hour, minute, half, day, month, year = match.groups()
        if not 1 <= int(hour) <= 12:
            raise ValueError(f"hour {hour} with am or pm")
        if month.lower() not in _MONTHS:
            raise ValueError(f"no month begins with {month!r}")
        hours = int(hour) % 12 + (12 if half.lower() == "p" else 0)
        return datetime(int(year), _MONTHS.index(month.lower()) + 1, int(day), hours, int(minute))
    if match := _LONGMEMEVAL.fullmatch(text):  # the weekday is redundant, and wrong in places
        return datetime(*(int(part or 0) for part in match.groups()))  # type: ignore[arg-type]
    if _EPOCH.fullmatch(text):
        return _from_epoch(float(text))
    return datetime.fromisoformat(text)


def _from_epoch(number: float) -> datetime:
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return datetime.fromtimestamp(number / 1000 if abs(number) >= _MILLISECONDS_FROM else number, UTC)


def _with_zone(time: datetime) -> datetime:
    """With the offset that its zone had then: two times of a named zone may be equal and not compare so."""
    offset = time.utcoffset()
    if offset is None:
        return time.replace(tzinfo=UTC)
    return time if isinstance(time.tzinfo, timezone) else time.replace(tzinfo=timezone(offset), fold=0)


def _checked_metadata(where: _Where, metadata: object) -> dict[str, str | int | float | bool]:
    if not isinstance(metadata, Mapping):
        raise ZeroMemError.of(f"{where}, metadata", "a mapping", metadata, "pass names and scalar values")
    for key, value in metadata.items():
        check_text(where, "metadata key", key, blank_ok=False)
        if isinstance(value, str):
            check_text(where, f"metadata[{shown(key)}]", value, blank_ok=True)
        elif not isinstance(value, (bool, int, float)) or not _storable(value):
            expected, advice = "a string, a bool, a 64-bit or a finite number", "drop it, or write it as a string"
            raise ZeroMemError.of(f"{where}, metadata[{shown(key)}]", expected, value, advice)
    return dict(metadata)


def _storable(value: float) -> bool:
    return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)


def _joined_parts(where: _Where, content: object) -> object:
    """OpenAI's list of content parts as one text; parts that are not text cannot be remembered as such."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            advice = "describe other parts in words, or drop them"
            raise ZeroMemError.of(f"{where}, content", "text parts", part, advice)
        texts.append(part["text"])
    return "\n".join(texts)
