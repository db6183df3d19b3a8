"""What the record asks of its tables; every function works inside a transaction of the caller."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Executable, Table, bindparam, delete, func, insert, select, update

from zeromem_torch.errors import Conflict, NotFound
from zeromem_torch.store.rows import FIELDS, ROW, entry_of, given, read_trace, row_of, setting_of, stamped
from zeromem_torch.store.schema import HISTORY, SETTINGS, TRACES
from zeromem_torch.substrate.traces import MUTABLE, Trace

Key = tuple[str, str]
"""Boundary and id: what names a trace."""
Stored = tuple[int, Trace]
"""A trace with its sequence number, which it keeps for as long as it lives, and no other trace ever gets."""
Changed = tuple[Stored | None, Trace]
"""What is stored of a trace, and what is to be."""
T = TypeVar("T")
_AT_ONCE = 1000  # values in one list


def stored(connection: Connection, condition: ColumnElement[bool]) -> list[Stored]:
    """Traces that a condition holds for, by sequence number."""
    with connection.execute(select(*ROW).where(condition).order_by(TRACES.c.seq)) as rows:  # closed by a damaged one
        return [(row[0], read_trace(row)) for row in rows]


def fetch(connection: Connection, seqs: Iterable[int]) -> list[Stored]:
    """Those of the traces that are there, by sequence number."""
    return [one for few in some(sorted(set(seqs))) for one in stored(connection, TRACES.c.seq.in_(few))]


def find(connection: Connection, keys: Iterable[Key]) -> dict[Key, Stored]:
    """Those of the traces that are there."""
    found = (stored(connection, condition) for condition in _named(TRACES, keys))
    return {(one[1].boundary, one[1].id): one for few in found for one in few}


def known(connection: Connection, keys: Iterable[Key]) -> list[Stored]:
    """The traces, each once; all must be there."""
    wanted = dict.fromkeys(keys)
    found = find(connection, wanted)
    _refuse_unknown(wanted, found)
    return [found[key] for key in wanted]


def changed(connection: Connection, traces: Sequence[Trace], overwrite: bool) -> list[Changed]:
    """Those of the traces that are not stored yet as they are; of several under one key the last."""
    found = find(connection, dict.fromkeys((trace.boundary, trace.id) for trace in traces))
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
        if key not in found or given(found[key][1]) != given(trace)
    ]


def put(connection: Connection, wanted: Sequence[Changed], actor: str) -> list[Stored]:
    """Store what is to be, and enter it in the history."""
    now = datetime.now(UTC)
    added = [stamped(trace, now, None) for before, trace in wanted if before is None]
    last = connection.scalar(select(func.max(TRACES.c.seq))) or 0
    _each(connection, insert(TRACES), map(row_of, added))
    # Numbers ascend in the order of insertion, and nobody else inserts before this transaction ends.
    seqs = connection.scalars(select(TRACES.c.seq).where(TRACES.c.seq > last).order_by(TRACES.c.seq)).all()
    new = zip(seqs, added, strict=True)
    made = [(before[0], stamped(trace, before[1].added_at, now)) if before else next(new) for before, trace in wanted]
    befores = [None if before is None else before[1] for before, _ in wanted]
    updated = [row_of(trace) | {"its_seq": seq} for (seq, trace), before in zip(made, befores, strict=True) if before]
    _each(connection, update(TRACES).where(TRACES.c.seq == bindparam("its_seq")), updated)
    entries = (
        entry_of(trace, before, "update" if before else "add", actor, now)
        for (_, trace), before in zip(made, befores, strict=True)
    )
    _each(connection, insert(HISTORY), entries)
    return made


def remove(connection: Connection, traces: Sequence[Stored], actor: str) -> None:
    """Remove traces, and enter it in the history."""
    now = datetime.now(UTC)
    rows = ({"its_seq": seq} for seq, _ in traces)
    _each(connection, delete(TRACES).where(TRACES.c.seq == bindparam("its_seq")), rows)
    _each(connection, insert(HISTORY), (entry_of(trace, trace, "delete", actor, now) for _, trace in traces))


def purge(connection: Connection, keys: Iterable[Key], boundaries: Iterable[str]) -> list[int]:
    """Remove traces with their history; no row is read for it, since it may be a damaged one."""
    wanted = dict.fromkeys(keys)
    conditions = {table: list(_named(table, wanted)) for table in (TRACES, HISTORY)}
    there: set[Key] = set()
    for table, own in conditions.items():
        for condition in own:
            rows = connection.execute(select(table.c.boundary, table.c.id).where(condition))
            there.update((row[0], row[1]) for row in rows)
    _refuse_unknown(wanted, there)
    for few in some(list(dict.fromkeys(boundaries))):
        for table, own in conditions.items():
            own.append(table.c.boundary.in_(few))
    seqs: set[int] = set()
    for condition in conditions[TRACES]:
        seqs.update(connection.scalars(select(TRACES.c.seq).where(condition)))
    for table, own in conditions.items():
        for condition in own:
            connection.execute(delete(table).where(condition))
    return sorted(seqs)


def put_settings(connection: Connection, values: Mapping[str, str]) -> None:
    connection.execute(delete(SETTINGS).where(SETTINGS.c.name.in_(list(values))))
    _each(connection, insert(SETTINGS), (setting_of(name, value) for name, value in values.items()))


def some(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Values in lists that a statement can take."""
    return (values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE))


def _named(table: Table, keys: Iterable[Key]) -> Iterator[ColumnElement[bool]]:
    """Conditions that together hold for the rows of these keys. For a list of pairs SQLite would use no index."""
    ids: dict[str, list[str]] = {}
    for boundary, id in keys:
        ids.setdefault(boundary, []).append(id)
    for boundary, own in ids.items():
        for few in some(own):
            yield (table.c.boundary == boundary) & table.c.id.in_(few)


def _each(connection: Connection, statement: Executable, rows: Iterable[dict[str, Any]]) -> None:
    """Execute a statement for each of the rows, in one call; for none, not at all."""
    if listed := list(rows):
        connection.execute(statement, listed)


def _refuse_unknown(keys: Iterable[Key], there: Container[Key]) -> None:
    for boundary, id in keys:
        if (boundary, id) not in there:
            raise NotFound.of("id", f"one that boundary {boundary!r} holds", id, "list(boundary=...) shows them")


def _refuse_conflict(before: Trace, trace: Trace, overwrite: bool) -> None:
    """The message names fields, never what is in them: that may be another caller's."""
    pairs = zip(FIELDS, given(before), given(trace), strict=False)
    differing = [name for name, one, other in pairs if one != other]
    if differing and not overwrite:
        expected = f"one that its boundary does not hold yet with another {', '.join(differing)}"
        raise Conflict.of("id", expected, trace.id, "give it another id, or change what is there: overwrite=True")
    if fixed := [name for name in differing if name not in MUTABLE]:
        expected = f"a trace with the same {', '.join(fixed)} as the one that its boundary holds"
        advice = "who said it, where and in which order does not change: give it another id, or delete that one first"
        raise Conflict.of("id", expected, trace.id, advice)
