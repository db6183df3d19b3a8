"""Traces and rows: how the fields of a trace stand in columns, and the checksum that goes with every row."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from typing import Any

from zeromem_torch.store.schema import HISTORY, SETTINGS, TRACES
from zeromem_torch.substrate.traces import Trace

FIELDS = tuple(f.name for f in fields(Trace))
GIVEN = len(FIELDS) - 2  # the other two, added_at and updated_at, are the record's
ROW = (TRACES.c.seq, TRACES.c.checksum, TRACES.c.digest, *(TRACES.c[name] for name in FIELDS))
"""The columns that `read_trace` and `is_sound` expect."""
ENTRY = (HISTORY.c.number, HISTORY.c.checksum, *(c for c in HISTORY.c if c.name not in ("number", "checksum")))
"""The columns that `read_entry` and `is_sound` expect."""
SETTING = (SETTINGS.c.name, SETTINGS.c.checksum, SETTINGS.c.value)
"""The columns that `read_setting` and `is_sound` expect."""

_TIMES = ("time", "valid_from", "valid_to", "expires_at", "added_at", "updated_at")
_ENCODE: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_TIMES, datetime.isoformat),
    "metadata": json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode,
    "order": int,  # an IntEnum, say, comes back as what it is worth
}
_DECODE: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(_TIMES, datetime.fromisoformat),
    "metadata": lambda text: {} if text == "{}" else json.loads(text),
}
_WRITERS = tuple(_ENCODE.get(name) for name in FIELDS)
_SETTERS = tuple(getattr(Trace, name).__set__ for name in FIELDS)
_READERS = tuple((getattr(Trace, name).__set__, _DECODE.get(name)) for name in FIELDS)
_values = attrgetter(*FIELDS)


class DamagedRow(Exception):
    """A row that is not what was stored."""


def given(trace: Trace) -> tuple[Any, ...]:
    """What the caller decides of a trace, as columns hold it; in the order of `FIELDS`."""
    return _encoded(trace)[:GIVEN]


def row_of(trace: Trace) -> dict[str, Any]:
    values = (trace.digest, *_encoded(trace))
    return dict(zip(("digest", *FIELDS), values, strict=True)) | {"checksum": checksum(values)}


def entry_of(trace: Trace, before: Trace | None, action: str, actor: str, now: datetime) -> dict[str, Any]:
    """A row of the history."""
    text = None if before is None else json.dumps(before.to_dict(), ensure_ascii=False)
    values = (trace.id, trace.boundary, now.isoformat(), actor, action, text)
    return dict(zip((c.name for c in ENTRY[2:]), values, strict=True)) | {"checksum": checksum(values)}


def setting_of(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value, "checksum": checksum([value])}


def read_trace(row: Sequence[Any]) -> Trace:
    """The checksum stands for all checks of a trace, which were made when it was stored."""
    if not is_sound(row):
        raise DamagedRow(f"trace {row[0]} with another checksum than it was stored with")
    trace = object.__new__(Trace)
    for (put, decode), value in zip(_READERS, row[3:], strict=True):
        put(trace, value if decode is None or value is None else decode(value))
    return trace


def read_entry(row: Sequence[Any]) -> tuple[str, str, str, str | None]:
    """When, by whom, what was done, and to what."""
    if not is_sound(row):
        raise DamagedRow(f"entry {row[0]} of the history with another checksum than it was stored with")
    at, actor, action, before = row[4:]
    return at, actor, action, before


def read_setting(row: Sequence[Any]) -> str:
    if not is_sound(row):
        raise DamagedRow(f"setting {row[0]} with another checksum than it was stored with")
    return str(row[2])


def is_sound(row: Sequence[Any]) -> bool:
    return bool(row[1] == checksum(row[2:]))


def stamped(trace: Trace, added_at: datetime | None, updated_at: datetime | None) -> Trace:
    """The same trace with the times of the record."""
    made = object.__new__(Trace)
    for put, value in zip(_SETTERS, (*_values(trace)[:GIVEN], added_at, updated_at), strict=True):
        put(made, value)
    return made


def checksum(values: Sequence[Any]) -> int:
    """CRC-32: it finds damage, not forgery."""
    return zlib.crc32(line(values))


def line(values: Sequence[Any]) -> bytes:
    return "\x1f".join([value if isinstance(value, str) else str(value) for value in values]).encode()


def _encoded(trace: Trace) -> tuple[Any, ...]:
    pairs = zip(_values(trace), _WRITERS, strict=True)
    return tuple([value if encode is None or value is None else encode(value) for value, encode in pairs])
