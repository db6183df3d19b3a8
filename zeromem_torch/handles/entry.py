"""Entries: what a handle stands for. An entry is a trace of the same record, so it has one history and one isolation
rule with all others: the trace's id is the handle, its title the key, its text the value as a search should read it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from zeromem_torch.handles.handle import Handle
from zeromem_torch.substrate.traces import Trace, ZeroMemError, check_text

ROLE = "memory"
"""The role of traces that are entries."""
DEEPEST = 64
"""Levels of JSON in a value: far from what a reader's stack can hold, wherever it is read."""


@dataclass(frozen=True)
class Entry:
    """One thing remembered, and how far it can be trusted."""

    handle: Handle
    value: Any = field(hash=False)  # a text, or small JSON
    created_at: datetime
    boundary: str
    source: str = ""  # the trace that says so; "" = none
    confidence: float = 1.0  # in [0, 1]
    ttl: timedelta | None = None  # None: for good

    def __post_init__(self) -> None:
        check_text("entry", "source", self.source, blank_ok=self.source == "")
        confidence = self.confidence
        if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
            raise ZeroMemError.of("confidence", "a number in [0, 1]", confidence, "pass 1 for what was said outright")
        if self.ttl is not None:
            try:
                self.created_at + self.ttl
            except OverflowError:
                raise ZeroMemError.of("ttl", "an end before the year 10000", self.ttl, "pass None for good") from None

    @property
    def key(self) -> str:
        return self.handle.key

    @property
    def text(self) -> str:
        """The value as a reader gets it: a text as it is, other values as JSON."""
        return written(self.value)[0]

    @property
    def expires_at(self) -> datetime | None:
        return None if self.ttl is None else self.created_at + self.ttl

    def to_dict(self) -> dict[str, Any]:
        """JSON-like data; times as ISO 8601, the lifetime in seconds."""
        return {
            "handle": str(self.handle),
            "type": self.handle.type,
            "key": self.key,
            "value": self.value,
            "source": self.source,
            "confidence": self.confidence,
            "ttl": None if self.ttl is None else self.ttl.total_seconds(),
            "created_at": self.created_at.isoformat(),
            "expires_at": None if self.expires_at is None else self.expires_at.isoformat(),
            "boundary": self.boundary,
        }

    def trace(self) -> Trace:
        """The trace that the record keeps; `of` reads it back."""
        text, is_json = written(self.value)
        metadata: dict[str, str | int | float | bool] = {"type": self.handle.type, "key": self.key}
        metadata |= {"confidence": float(self.confidence)}
        if self.source:
            metadata["source"] = self.source
        if is_json:
            metadata["json"] = True
        return Trace(
            id=str(self.handle),
            boundary=self.boundary,
            text=text,
            title=self.key.replace("/", " "),  # words that a query may use
            role=ROLE,
            time=self.created_at,
            metadata=metadata,
            expires_at=self.expires_at,
        )

    @classmethod
    def of(cls, trace: Trace) -> Entry:
        """Read an entry back; a trace that is none, or was changed into none, is refused by its id."""
        known = trace.metadata
        if not is_entry(trace) or trace.time is None:
            advice = "such ids are the manager's: add it under another id"
            raise ZeroMemError.of(f"trace {trace.id!r}", "an entry of the memory", "another trace", advice)
        try:
            value = json.loads(trace.text) if known.get("json") else trace.text
            confidence = float(known.get("confidence", 1.0))
        except ValueError as error:
            advice = f"it was changed by hand: store it anew ({error})"
            raise ZeroMemError.of(f"trace {trace.id!r}", "an entry of the memory", trace.text, advice) from error
        return cls(
            handle=Handle.parse(trace.id),
            value=value,
            created_at=trace.time,
            boundary=trace.boundary,
            source=str(known.get("source", "")),
            confidence=confidence,
            ttl=None if trace.expires_at is None else trace.expires_at - trace.time,
        )


def is_entry(trace: Trace) -> bool:
    """Whether a trace is one of ours: others may bear that role, or an id that looks so."""
    try:
        return trace.role == ROLE and bool(Handle.parse(trace.id))
    except ZeroMemError:
        return False


def written(value: object) -> tuple[str, bool]:
    """A value as text, and whether that is JSON. What would not come back equal is refused.

    A text stays as it is; one that a trace cannot hold so (nothing visible in it) is JSON as well.
    """
    if isinstance(value, str):
        try:
            check_text("entry", "value", value)
        except ZeroMemError:
            check_text("entry", "value", value, blank_ok=True)
        else:
            return value, False
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        same = json.loads(text) == value
        deep = _depth(value) > DEEPEST
    except RecursionError:
        same = deep = True
    except (TypeError, ValueError) as error:
        raise ZeroMemError.of("value", "a text, or JSON", value, f"write it as a text ({error})") from error
    if deep:
        raise ZeroMemError.of("value", f"JSON of at most {DEEPEST} levels", "more", "flatten it, or write it as a text")
    if not same:
        advice = "use lists for tuples and strings for the keys of objects"
        raise ZeroMemError.of("value", "JSON that comes back equal", value, advice)
    return text, True


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def lifetime(ttl: timedelta | float | None) -> timedelta | None:
    """How long an entry holds; a number is seconds."""
    if ttl is None:
        return None
    if isinstance(ttl, int | float) and not isinstance(ttl, bool) and math.isfinite(ttl):
        try:
            ttl = timedelta(seconds=ttl)
        except OverflowError:
            raise ZeroMemError.of("ttl", "at most 2.7 million years", ttl, "pass None for good") from None
    if not isinstance(ttl, timedelta) or ttl <= timedelta():
        raise ZeroMemError.of("ttl", "a timedelta or seconds above 0, or None", ttl, "pass None for what stays")
    return ttl
