"""The record: every trace as it was given, and what has happened to it, in one transactional database.

The record is the truth; all else is an index that can be made again from it. A write is one transaction, and is on disk
when its method returns. Every row carries a checksum and is held against it when it is read, so that a damaged row is
refused instead of returned. Of a change only what was before is stored: what came after is what the next change found,
or what is there now.

The tables and their statements suit PostgreSQL as they are. What only SQLite needs stands at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Index,
    Integer,
    MetaData,
    Row,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from zeromem_torch.substrate.traces import MUTABLE, Trace, ZeroMemError, check_text, nearest

__all__ = ["Change", "Record"]

Key = tuple[str, str]
"""Boundary and id: what names a trace."""
Stored = tuple[int, Trace]
"""A trace with its sequence number, which it keeps for as long as it lives and no other trace ever gets."""
Numbers = npt.NDArray[np.int64]
T = TypeVar("T")

BUSY_SECONDS = 10.0
"""How long a transaction waits for another process to end its own."""
_AT_ONCE = 1000  # values in one IN list

# The tables. Times are ISO 8601 text, since the caller's zone is part of what was given.

_TABLES = MetaData()
_SERIAL = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only in an INTEGER
_TRACES = Table(
    "traces",
    _TABLES,
    Column("seq", _SERIAL, primary_key=True),
    Column("checksum", BigInteger, nullable=False),
    Column("digest", BigInteger, nullable=False),
    Column("id", Text, nullable=False),
    Column("boundary", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("order", BigInteger, nullable=False),
    Column("time", Text),
    Column("speaker", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("valid_from", Text),
    Column("valid_to", Text),
    Column("expires_at", Text),
    Column("added_at", Text, nullable=False),
    Column("updated_at", Text),
    Column("title", Text, nullable=False),
    Column("metadata", Text, nullable=False),  # JSON
    Column("text", Text, nullable=False),
    UniqueConstraint("id", "boundary", name="trace_key"),  # in this order it also finds the boundaries of an id
    Index("traces_of_boundary", "boundary", "seq"),
    sqlite_autoincrement=True,  # a number is never used again
)
_HISTORY = Table(
    "history",
    _TABLES,
    Column("number", _SERIAL, primary_key=True),
    Column("checksum", BigInteger, nullable=False),
    Column("id", Text, nullable=False),
    Column("boundary", Text, nullable=False),
    Column("at", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("before", Text),  # JSON
    Index("history_of_trace", "id", "boundary"),
)
_SETTINGS = Table("settings", _TABLES, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))
_VERSION = Table("schema_version", _TABLES, Column("version", Integer, primary_key=True, autoincrement=False))


def _first_tables(connection: Connection) -> None:
    _TABLES.create_all(connection)


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_first_tables,)
"""Step n makes version n of the schema out of version n - 1. What a released step does never changes."""

_FIELDS = tuple(f.name for f in fields(Trace))
_GIVEN = len(_FIELDS) - 2  # the other two, added_at and updated_at, are set here
_TIMES = ("time", "valid_from", "valid_to", "expires_at", "added_at", "updated_at")
_ENCODE: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(_TIMES, datetime.isoformat),
    "metadata": json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode,
}
_DECODE: Mapping[str, Callable[[str], Any]] = {**dict.fromkeys(_TIMES, datetime.fromisoformat), "metadata": json.loads}
_WRITERS = tuple(_ENCODE.get(name) for name in _FIELDS)
_READERS = tuple((getattr(Trace, name).__set__, _DECODE.get(name)) for name in _FIELDS)
_values = attrgetter(*_FIELDS)
_line = json.JSONEncoder(default=ascii).encode  # ascii: of what only damage can have put there
_ROW = (_TRACES.c.seq, _TRACES.c.checksum, _TRACES.c.digest, *(_TRACES.c[name] for name in _FIELDS))
_ENTRY = (_HISTORY.c.number, _HISTORY.c.checksum, *(c for c in _HISTORY.c if c.name not in ("number", "checksum")))
_PURGING = "purge_unfinished"  # a setting: rows are gone, and their bytes may not be


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to a trace: when, by whom, and the trace before and after, as `Trace.to_dict` writes it."""

    at: datetime
    actor: str
    action: str  # add, update or delete
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        values = {"actor": self.actor, "action": self.action, "before": self.before, "after": self.after}
        return {"at": self.at.isoformat(), **values}


class Record:
    """Traces by boundary and id, with their history, in a database file; without a path, in this process only.

    May be used from several threads, which take turns. Of several processes one may write: the caller sees to it. A
    record opened with ``read_only`` is never written to.
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        self._path, self._read_only = path, read_only
        self._lock = RLock()
        self._closed = False
        with _in_words(path):
            if path is not None:
                _check_file(path)
                if not read_only and not path.exists():
                    with _placed(path) as new:  # so that there is a whole record, or none
                        engine = _engine(new)
                        _migrate(engine, new)
                        engine.dispose()
            self._engine = _engine(path, read_only=read_only)
            self._writer = self._engine.execution_options(write=True)
            try:
                _migrate(self._engine, path, read_only=read_only)
                if not read_only and self.setting(_PURGING):
                    self._scrub()
            except BaseException:
                self._engine.dispose()
                raise

    def close(self) -> None:
        with self._lock, _in_words(self._path):
            self._closed = True
            self._engine.dispose()

    # Writing

    def changes(self, traces: Iterable[Trace], *, overwrite: bool = False) -> list[Trace]:
        """Those that `add` would store; what it would refuse is refused here too."""
        with self._reading() as connection:
            return [after for _, after in _changed(connection, list(traces), overwrite)]

    def add(self, traces: Iterable[Trace], *, actor: str = "", overwrite: bool = False) -> list[Stored]:
        """Store all of the traces or none; returns those that are new or changed, in the order given.

        A trace that is there already, the same in every field, is left out. Another one under its boundary and id is an
        error, or with ``overwrite`` an update of what an update may change; of several such the last one counts.
        """
        with self._writing(actor) as connection:
            return _put(connection, _changed(connection, list(traces), overwrite), actor)

    def update(self, boundary: str, id: str, changes: Mapping[str, Any], *, actor: str = "") -> Stored:
        """Change some fields and keep the others. What changes nothing writes nothing."""
        for name in changes:
            if name not in MUTABLE:
                advice = f"{nearest(name, MUTABLE)}who said it, where and in which order stays as it was"
                raise ZeroMemError.of("update", f"some of {', '.join(MUTABLE)}", name, advice)
        with self._writing(actor) as connection:
            ((seq, before),) = _known(connection, [(boundary, id)])
            after = replace(before, **changes)
            if _given(after) == _given(before):
                return seq, before
            return _put(connection, [((seq, before), after)], actor)[0]

    def delete(self, keys: Sequence[Key], *, actor: str = "") -> list[int]:
        """Remove all of the traces or, when one is not there, none; returns their sequence numbers."""
        with self._writing(actor) as connection:
            found = _known(connection, keys)
            seqs = [seq for seq, _ in found]
            _remove(connection, seqs)
            _log(connection, "delete", [(trace, trace) for _, trace in found], actor, datetime.now(UTC))
            return seqs

    def purge(self, keys: Sequence[Key] | None = None, boundaries: Sequence[str] | None = None) -> list[int]:
        """Remove traces and their history, and every byte of them from the files; returns their sequence numbers.

        ``keys`` may name traces that were deleted before; one that was never there is an error, and nothing is removed.
        Costs as much as copying the record. Cut short, it is finished when the record is opened next.
        """
        with self._lock:
            self._refuse_unwritable()
            with _in_words(self._path):
                _cut_log(_driver(self._engine), self._path)  # a reader in the way is found before anything is done
            with self._writing() as connection:
                seqs = _purged(connection, keys or (), boundaries or ())
                _set(connection, {_PURGING: "true"})
            self._scrub()
            return seqs

    def set_settings(self, values: Mapping[str, str]) -> None:
        """Remember values by name, all in one transaction; other names keep theirs."""
        with self._writing() as connection:
            _set(connection, values)

    # Reading

    def get(self, boundary: str, id: str) -> Trace | None:
        with self._reading() as connection:
            found = _find(connection, [(boundary, id)])
            return found[boundary, id][1] if found else None

    def boundaries_of(self, id: str, *, ever: bool = False) -> list[str]:
        """Boundaries that hold this id; ``ever``: that hold it or held it once, unless it was purged."""
        table = _HISTORY if ever else _TRACES
        with self._reading() as connection:
            return list(connection.scalars(select(table.c.boundary).distinct().where(table.c.id == id)))

    def boundaries(self) -> dict[str, int]:
        """How many traces each boundary holds, in the order in which they appeared."""
        name = _TRACES.c.boundary
        with self._reading() as connection:
            rows = connection.execute(select(name, func.count()).group_by(name).order_by(func.min(_TRACES.c.seq)))
            return {row[0]: row[1] for row in rows}

    def boundaries_ever(self) -> list[str]:
        """Boundaries that hold traces, or held some that were not purged, in the order in which they appeared."""
        name = _HISTORY.c.boundary
        with self._reading() as connection:
            return list(connection.scalars(select(name).group_by(name).order_by(func.min(_HISTORY.c.number))))

    def count(self, boundary: str) -> int:
        with self._reading() as connection:
            return connection.scalar(select(func.count()).where(_TRACES.c.boundary == boundary)) or 0

    def __len__(self) -> int:
        with self._reading() as connection:
            return connection.scalar(select(func.count()).select_from(_TRACES)) or 0

    def traces_of(self, boundary: str) -> list[Stored]:
        """All traces of a boundary, by sequence number."""
        with self._reading() as connection:
            return _stored(connection, _TRACES.c.boundary == boundary)

    def fetch(self, seqs: Sequence[int]) -> list[Stored]:
        """Traces of these sequence numbers, by sequence number; one that is not there is left out."""
        with self._reading() as connection:
            return _fetch(connection, seqs)

    def page(
        self, after: int, limit: int, *, boundaries: Sequence[str] | None = None, prefix: str = ""
    ) -> list[Stored]:
        """The first ``limit`` traces behind a sequence number, of these boundaries or of all, by sequence number.

        With a ``prefix`` only those whose id begins so.
        """
        behind = select(_TRACES.c.seq).where(_TRACES.c.seq > after).order_by(_TRACES.c.seq).limit(limit)
        if prefix:
            behind = behind.where(func.substr(_TRACES.c.id, 1, len(prefix)) == prefix)  # LIKE would read % and _
        pages = [behind]
        if boundaries is not None:
            pages = [behind.where(_TRACES.c.boundary.in_(some)) for some in _some(list(dict.fromkeys(boundaries)))]
        with self._reading() as connection:
            return _fetch(connection, sorted(seq for page in pages for seq in connection.scalars(page))[:limit])

    def keys(self) -> tuple[Numbers, Numbers]:
        """Sequence numbers of all traces, ascending, and the digest of each."""
        with self._reading() as connection:
            rows = connection.execute(select(_TRACES.c.seq, _TRACES.c.digest).order_by(_TRACES.c.seq)).all()
        return tuple(np.fromiter((row[place] for row in rows), np.int64, len(rows)) for place in (0, 1))  # type: ignore[return-value]

    def history(self, boundary: str, id: str) -> list[Change]:
        """What has happened to a trace, oldest first; nothing to one that was never there, or was purged."""
        of_it = select(*_ENTRY).where(_HISTORY.c.id == id, _HISTORY.c.boundary == boundary)
        with self._reading() as connection:
            entries = [_entry(row) for row in connection.execute(of_it.order_by(_HISTORY.c.number))]
            found = _find(connection, [(boundary, id)])
        befores = [None if text is None else json.loads(text) for *_, text in entries]
        now = found[boundary, id][1].to_dict() if found else None
        return [
            Change(datetime.fromisoformat(at), actor, action, before, after)
            for (at, actor, action, _), before, after in zip(entries, befores, [*befores[1:], now], strict=False)
        ]

    def setting(self, name: str) -> str | None:
        with self._reading() as connection:
            return connection.scalar(select(_SETTINGS.c.value).where(_SETTINGS.c.name == name))

    # Keeping it sound

    def row_hash(self) -> str:
        """SHA-256 over all rows of all tables: the same for as long as nothing is written."""
        digest = hashlib.sha256()
        with self._reading() as connection:
            for table in _TABLES.sorted_tables:
                digest.update(table.name.encode())
                for row in connection.execute(select(table).order_by(*table.primary_key)):
                    digest.update(_line(row[:]).encode())
        return digest.hexdigest()

    def check(self) -> list[str]:
        """What is wrong with the database, in sentences: with its structure, then with each row."""
        problems: list[str] = []
        try:
            with self._reading() as connection:
                problems += [f"the database of the record: {problem}" for problem in _structure(connection)]
                for row in connection.execute(select(*_ROW).order_by(_TRACES.c.seq)):
                    if _checksum(row[2:]) != row.checksum or _trace(row).digest != row.digest:
                        problems.append(f"trace {row.seq} of the record is not what was stored")
                for row in connection.execute(select(*_ENTRY).order_by(_HISTORY.c.number)):
                    if _checksum(row[2:]) != row.checksum:
                        problems.append(f"entry {row.number} of the history is not what was stored")
        except ZeroMemError as error:  # it cannot be read to its end
            problems.append(str(error))
        return problems

    def backup(self, path: Path) -> None:
        """Copy the record to a new file, as it is at one moment; others may read and write it meanwhile."""
        if path.exists():
            raise ZeroMemError.of("path", "a file that is not there yet", str(path), "name another")
        _check_file(path)
        with self._lock:
            self._refuse_closed()
        with _in_words(self._path), _placed(path) as new:
            if self._path is None:
                with self._lock:
                    _copy(_driver(self._engine), new)
            else:
                with closing(_connect(self._path, read_only=True)) as source:
                    _copy(source, new)

    # What every method needs

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A transaction that sees one state."""
        with self._lock, _in_words(self._path):
            self._refuse_closed()
            with self._engine.connect() as connection:
                yield connection

    @contextmanager
    def _writing(self, actor: str = "") -> Iterator[Connection]:
        """A transaction that is on disk behind its end, or never was."""
        check_text("record", "actor", actor, blank_ok=True)
        with self._lock, _in_words(self._path):
            self._refuse_unwritable()
            with self._writer.begin() as connection:
                yield connection

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ZeroMemError.of("record", "one that is open", "one that was closed", "open it again")

    def _refuse_unwritable(self) -> None:
        self._refuse_closed()
        if self._read_only:
            raise ZeroMemError.of("record", "one opened for writing", "read_only=True", "open it without read_only")

    def _scrub(self) -> None:
        """Leave no byte of what was removed in any file."""
        with self._lock, _in_words(self._path):
            driver = _driver(self._engine)
            driver.execute("VACUUM")
            _cut_log(driver, self._path)
            with self._writer.begin() as connection:
                connection.execute(delete(_SETTINGS).where(_SETTINGS.c.name == _PURGING))


# Rows


def _encoded(trace: Trace) -> tuple[Any, ...]:
    """The fields of a trace as columns hold them."""
    pairs = zip(_values(trace), _WRITERS, strict=True)
    return tuple(value if write is None or value is None else write(value) for value, write in pairs)


def _given(trace: Trace) -> tuple[Any, ...]:
    return _encoded(trace)[:_GIVEN]


def _row(trace: Trace) -> dict[str, Any]:
    values = (trace.digest, *_encoded(trace))
    return dict(zip(("digest", *_FIELDS), values, strict=True)) | {"checksum": _checksum(values)}


def _trace(row: Row[Any]) -> Trace:
    """The trace of a row of `_ROW`. The checksum stands for all checks, which were made when it was stored."""
    seq, checksum, *values = row
    if _checksum(values) != checksum:
        raise _DamagedRow(f"trace {seq} with another checksum than it was stored with")
    trace = object.__new__(Trace)
    for (put, read), value in zip(_READERS, values[1:], strict=True):
        put(trace, value if read is None or value is None else read(value))
    return trace


def _stamped(trace: Trace, added_at: datetime | None, updated_at: datetime | None) -> Trace:
    stamped = object.__new__(Trace)
    for (put, _), value in zip(_READERS, (*_values(trace)[:_GIVEN], added_at, updated_at), strict=True):
        put(stamped, value)
    return stamped


def _entry(row: Row[Any]) -> tuple[str, str, str, str | None]:
    """Time, actor, action and what was before, of a row of `_ENTRY`."""
    number, checksum, *values = row
    if _checksum(values) != checksum:
        raise _DamagedRow(f"entry {number} of the history with another checksum than it was stored with")
    return row.at, row.actor, row.action, row.before


def _checksum(values: Sequence[Any]) -> int:
    """Finds damage, not forgery."""
    return zlib.crc32(_line(values).encode())


class _DamagedRow(Exception):
    """A row that is not what was stored."""


# Statements, each inside a transaction of the caller


def _stored(connection: Connection, condition: ColumnElement[bool]) -> list[Stored]:
    rows = connection.execute(select(*_ROW).where(condition).order_by(_TRACES.c.seq))
    return [(row[0], _trace(row)) for row in rows]


def _fetch(connection: Connection, seqs: Sequence[int]) -> list[Stored]:
    return [one for some in _some(sorted(set(seqs))) for one in _stored(connection, _TRACES.c.seq.in_(some))]


def _find(connection: Connection, keys: Iterable[Key]) -> dict[Key, Stored]:
    """Those of the traces that are there."""
    found = (_stored(connection, condition) for condition in _named(_TRACES, keys))
    return {(one[1].boundary, one[1].id): one for some in found for one in some}


def _known(connection: Connection, keys: Iterable[Key]) -> list[Stored]:
    """The traces, each once; all must be there."""
    keys = dict.fromkeys(keys)
    found = _find(connection, keys)
    _refuse_unknown(keys, found)
    return [found[key] for key in keys]


def _named(table: Table, keys: Iterable[Key]) -> Iterator[ColumnElement[bool]]:
    """Conditions that together hold for the rows of these traces. SQLite would not use an index for pairs."""
    ids: dict[str, list[str]] = {}
    for boundary, id in keys:
        ids.setdefault(boundary, []).append(id)
    for boundary, own in ids.items():
        for some in _some(own):
            yield (table.c.boundary == boundary) & table.c.id.in_(some)


def _refuse_unknown(keys: Iterable[Key], known: Container[Key]) -> None:
    for boundary, id in keys:
        if (boundary, id) not in known:
            raise ZeroMemError.of("id", f"one that boundary {boundary!r} holds", id, "list(boundary=...) shows them")


def _changed(
    connection: Connection, traces: Sequence[Trace], overwrite: bool
) -> list[tuple[Stored | None, Trace]]:
    """What is stored and what is to be, of the traces that differ from what is stored."""
    found = _find(connection, dict.fromkeys((trace.boundary, trace.id) for trace in traces))
    before = {key: trace for key, (_, trace) in found.items()}
    wanted: dict[Key, Trace] = {}
    for trace in traces:
        key = (trace.boundary, trace.id)
        if key in before:
            _refuse_conflict(before[key], trace, overwrite)
        before[key] = wanted[key] = trace
    return [
        (found.get(key), trace)
        for key, trace in wanted.items()
        if key not in found or _given(found[key][1]) != _given(trace)
    ]


def _refuse_conflict(before: Trace, trace: Trace, overwrite: bool) -> None:
    pairs = zip(_FIELDS, _given(before), _given(trace), strict=False)
    differing = [name for name, one, other in pairs if one != other]
    if differing and not overwrite:
        expected = f"one that its boundary does not hold yet with another {', '.join(differing)}"
        raise ZeroMemError.of("id", expected, trace.id, "give it another id, or change what is there: overwrite=True")
    if fixed := [name for name in differing if name not in MUTABLE]:
        expected = f"a trace with the same {', '.join(fixed)} as the one that its boundary holds"
        advice = "who said it, where and in which order does not change: give it another id, or delete that one first"
        raise ZeroMemError.of("id", expected, trace.id, advice)


def _put(connection: Connection, changed: Sequence[tuple[Stored | None, Trace]], actor: str) -> list[Stored]:
    """Store what is to be, and enter it in the history."""
    now = datetime.now(UTC)
    made = [
        _stamped(after, found[1].added_at, now) if found else _stamped(after, now, None) for found, after in changed
    ]
    befores = [found and found[1] for found, _ in changed]
    added = [trace for trace, before in zip(made, befores, strict=True) if before is None]
    last = connection.scalar(select(func.max(_TRACES.c.seq))) or 0
    _each(connection, insert(_TRACES), map(_row, added))
    # Numbers ascend in the order of insertion, and nobody else inserts before this transaction ends.
    new = iter(connection.scalars(select(_TRACES.c.seq).where(_TRACES.c.seq > last).order_by(_TRACES.c.seq)).all())
    stored = [(found[0] if found else next(new), trace) for (found, _), trace in zip(changed, made, strict=True)]
    rows = [_row(trace) | {"its_seq": seq} for (seq, trace), before in zip(stored, befores, strict=True) if before]
    _each(connection, update(_TRACES).where(_TRACES.c.seq == bindparam("its_seq")), rows)
    pairs = list(zip(made, befores, strict=True))
    _log(connection, "add", [pair for pair in pairs if pair[1] is None], actor, now)
    _log(connection, "update", [pair for pair in pairs if pair[1] is not None], actor, now)
    return stored


def _log(
    connection: Connection, action: str, pairs: Iterable[tuple[Trace, Trace | None]], actor: str, now: datetime
) -> None:
    """Enter traces in the history, each with what was before."""
    names = ("id", "boundary", "at", "actor", "action", "before")
    rows = []
    for trace, before in pairs:
        text = None if before is None else json.dumps(before.to_dict(), ensure_ascii=False)
        values = (trace.id, trace.boundary, now.isoformat(), actor, action, text)
        rows.append(dict(zip(names, values, strict=True)) | {"checksum": _checksum(values)})
    _each(connection, insert(_HISTORY), rows)


def _remove(connection: Connection, seqs: Iterable[int]) -> None:
    _each(connection, delete(_TRACES).where(_TRACES.c.seq == bindparam("its_seq")), ({"its_seq": seq} for seq in seqs))


def _purged(connection: Connection, keys: Iterable[Key], boundaries: Iterable[str]) -> list[int]:
    """Remove traces and their history. No row is read, since it may be a damaged one."""
    keys = dict.fromkeys(keys)
    known: set[Key] = set()
    seqs: set[int] = set()
    conditions = {table: list(_named(table, keys)) for table in (_TRACES, _HISTORY)}
    for table, own in conditions.items():
        for condition in own:
            rows = connection.execute(select(table.c.boundary, table.c.id).where(condition))
            known.update((row[0], row[1]) for row in rows)
    _refuse_unknown(keys, known)
    for some in _some(list(dict.fromkeys(boundaries))):
        for table, own in conditions.items():
            own.append(table.c.boundary.in_(some))
    for condition in conditions[_TRACES]:
        seqs.update(connection.scalars(select(_TRACES.c.seq).where(condition)))
    for table, own in conditions.items():
        for condition in own:
            connection.execute(delete(table).where(condition))
    return sorted(seqs)


def _set(connection: Connection, values: Mapping[str, str]) -> None:
    connection.execute(delete(_SETTINGS).where(_SETTINGS.c.name.in_(list(values))))
    _each(connection, insert(_SETTINGS), ({"name": name, "value": value} for name, value in values.items()))


def _each(connection: Connection, statement: Executable, rows: Iterable[dict[str, Any]]) -> None:
    """Execute a statement for each of the rows, in one call; for none, not at all."""
    if rows := list(rows):
        connection.execute(statement, rows)


def _some(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE))


# Versions of the schema


def _migrate(engine: Engine, path: Path | None, *, read_only: bool = False) -> None:
    """Bring the tables up to this version, in one transaction."""
    newest = len(MIGRATIONS)
    with engine.connect() as connection:
        version = _version(connection, path)
    if version > newest:
        advice = "update zeromem-torch, or open it with the version that made it"
        raise ZeroMemError.of(_name(path), f"a schema of version {newest} or older", version, advice)
    if version < newest and read_only:
        advice = "open it once without read_only, which brings it up"
        raise ZeroMemError.of(_name(path), f"a schema of version {newest}", version, advice)
    if version < newest:
        with engine.execution_options(write=True).begin() as connection:
            for step in MIGRATIONS[_version(connection, path) :]:
                step(connection)
            connection.execute(delete(_VERSION))
            connection.execute(insert(_VERSION), {"version": newest})


def _version(connection: Connection, path: Path | None) -> int:
    tables = inspect(connection).get_table_names()
    if not tables:
        return 0
    version = connection.scalar(select(_VERSION.c.version)) if _VERSION.name in tables else None
    if version is None:
        got = f"one with the tables {', '.join(tables)}"
        raise ZeroMemError.of(_name(path), "a database that this library made", got, "name another file")
    return int(version)


# Files


def _check_file(path: Path) -> None:
    """Refuse a file that SQLite would take for a new database though it cannot be one."""
    log = path.with_name(f"{path.name}-wal")
    if path.exists() and not path.stat().st_size:  # a new record gets its name when it is whole
        raise _damaged(path, "a file of 0 bytes")
    if not path.exists() and log.exists():
        raise _damaged(path, f"only its log, {log.name}")


@contextmanager
def _placed(path: Path) -> Iterator[Path]:
    """A place to make a file at; it has its name once it is whole and on disk, and otherwise never."""
    new = path.with_name(f"{path.name}.new")
    _unlink(new)
    try:
        yield new
        _sync(new)
        new.replace(path)
        _sync(path.parent)
    except BaseException:
        _unlink(new)
        raise


def _unlink(database: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What only SQLite needs

_PRAGMAS = (
    "cell_size_check=ON",  # damage is noticed early
    "secure_delete=ON",  # what is deleted is overwritten
    "synchronous=FULL",  # a commit returns when the disk has it
    "fullfsync=ON",  # on macOS nothing less reaches the disk
)


def _engine(path: Path | None, *, read_only: bool = False) -> Engine:
    """An engine of one connection, whose transactions begin when we say so, those that write with the write lock."""
    engine = create_engine("sqlite://", creator=lambda: _connect(path, read_only=read_only), poolclass=StaticPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("write") else "BEGIN")

    return engine


def _connect(path: Path | None, *, read_only: bool = False) -> sqlite3.Connection:
    name = ":memory:" if path is None else f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    # No isolation level: or sqlite3 would begin transactions when it thinks fit, and leave some statements outside.
    connection = sqlite3.connect(
        name, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in (*_PRAGMAS, *(() if read_only else ("journal_mode=WAL",))):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _driver(engine: Engine) -> sqlite3.Connection:
    """The connection itself, for what cannot stand in a transaction."""
    connection = engine.raw_connection()
    try:
        assert isinstance(connection.driver_connection, sqlite3.Connection)
        return connection.driver_connection
    finally:
        connection.close()  # back to the pool, which keeps it open


def _cut_log(driver: sqlite3.Connection, path: Path | None) -> None:
    """Bring all of the write-ahead log into the database, and cut it to nothing."""
    busy, *_ = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        advice = "let the other process end its work and try again; a purge that has begun ends at the next open"
        raise ZeroMemError.of(_name(path), "a log that nobody is reading", "one in use", advice)


def _structure(connection: Connection) -> list[str]:
    return [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check") if row[0] != "ok"]


def _copy(source: sqlite3.Connection, path: Path) -> None:
    with closing(sqlite3.connect(path)) as target:
        source.backup(target)


_WRITE_ADVICE = "check the permissions of the file and its folder, or open it with read_only=True"
_REFUSALS = {
    sqlite3.SQLITE_BUSY: ("a file that no other program has locked", "close it there, and try again"),
    sqlite3.SQLITE_LOCKED: ("a file that no other program has locked", "close it there, and try again"),
    sqlite3.SQLITE_FULL: ("room on the disk", "free some space, and try again"),
    sqlite3.SQLITE_READONLY: ("a file that can be written to", _WRITE_ADVICE),
    sqlite3.SQLITE_PERM: ("a file that can be written to", _WRITE_ADVICE),
    sqlite3.SQLITE_CANTOPEN: ("a file that can be opened", "check that its folder is there, and the permissions"),
    sqlite3.SQLITE_IOERR: ("a disk that can be read and written", "check the disk, and try again"),
}
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def _in_words(path: Path | None) -> Iterator[None]:
    """Say what is wrong with a file in our words. The transaction is rolled back by then: nothing was changed."""
    try:
        yield
    except _DamagedRow as error:
        raise _damaged(path, str(error)) from None
    except OSError as error:
        advice = "check that its folder is there, and the permissions"
        raise ZeroMemError.of(_name(path), "files to read and write", error.strerror, advice) from error
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        code = getattr(cause, "sqlite_errorcode", None)
        if code is None and "decode" in str(cause):  # quotes the text, which is nobody's business
            raise _damaged(path, "text that is not UTF-8") from None
        if code is None:
            raise
        if code & 0xFF in _DAMAGE:
            raise _damaged(path, str(cause)) from error
        if code & 0xFF not in _REFUSALS:
            raise
        expected, advice = _REFUSALS[code & 0xFF]
        advice += "; nothing was changed, and nothing stored is lost"
        raise ZeroMemError.of(_name(path), expected, str(cause), advice) from error


def _damaged(path: Path | None, got: str) -> ZeroMemError:
    advice = "nothing was changed: keep the file as it is, and restore a copy that backup(path) made"
    return ZeroMemError.of(_name(path), "a sound database", got, advice)


def _name(path: Path | None) -> str:
    return "record in memory" if path is None else f"record {path}"
