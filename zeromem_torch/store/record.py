"""The record and its methods, each one transaction."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, delete, func, select

from zeromem_torch.store import sqlite, statements
from zeromem_torch.store.rows import ENTRY, ROW, SETTING, given, is_sound, line, read_entry, read_setting, read_trace
from zeromem_torch.store.schema import HISTORY, SETTINGS, TABLES, TRACES, migrate
from zeromem_torch.store.statements import Key, Stored
from zeromem_torch.substrate.traces import MUTABLE, Trace, ZeroMemError, check_text, nearest

Numbers = npt.NDArray[np.int64]
_PURGING = "purge_unfinished"  # a setting: rows are gone, and their bytes may not be
_PURGED = "the traces are gone, and their last bytes go when the record is opened or purged next"


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
        self._name = sqlite.name_of(path)
        self._lock = RLock()
        self._closed = False
        with sqlite.in_words(path):
            if path is not None:
                sqlite.check_file(path)
                if not read_only and not path.exists():
                    with sqlite.placed(path) as new:  # so that there is a whole record, or none
                        engine = sqlite.engine_of(new)
                        try:
                            migrate(engine, self._name)
                        finally:
                            engine.dispose()
            self._engine = sqlite.engine_of(path, read_only=read_only)
            self._writer = self._engine.execution_options(write=True)
            try:
                migrate(self._engine, self._name, read_only=read_only)
                if not read_only:
                    sqlite.use_log(self._engine)  # not before it is known to be ours
                    if self.setting(_PURGING):
                        self._scrub()
            except BaseException:
                self._engine.dispose()
                raise

    def close(self) -> None:
        with self._lock, sqlite.in_words(self._path):
            self._closed = True
            self._engine.dispose()

    # Writing

    def changes(self, traces: Iterable[Trace], *, overwrite: bool = False) -> list[Trace]:
        """Those that `add` would store; what it would refuse is refused here too."""
        with self._reading() as connection:
            return [trace for _, trace in statements.changed(connection, list(traces), overwrite)]

    def add(self, traces: Iterable[Trace], *, actor: str = "", overwrite: bool = False) -> list[Stored]:
        """Store all of the traces or none; returns those that are new or changed, in the order given.

        A trace that is there already, the same in every field, is left out. Another one under its boundary and id is an
        error, or with ``overwrite`` an update of what an update may change; of several such the last one counts.
        """
        with self._writing(actor) as connection:
            return statements.put(connection, statements.changed(connection, list(traces), overwrite), actor)

    def update(self, boundary: str, id: str, changes: Mapping[str, Any], *, actor: str = "") -> Stored:
        """Change some fields and keep the others. What changes nothing writes nothing."""
        for name in changes:
            if name not in MUTABLE:
                advice = f"{nearest(name, MUTABLE)}who said it, where and in which order does not change"
                raise ZeroMemError.of("update", f"some of {', '.join(MUTABLE)}", name, advice)
        with self._writing(actor) as connection:
            ((seq, before),) = statements.known(connection, [(boundary, id)])
            after = replace(before, **changes)
            if given(after) == given(before):
                return seq, before
            return statements.put(connection, [((seq, before), after)], actor)[0]

    def delete(self, keys: Iterable[Key], *, actor: str = "") -> list[int]:
        """Remove all of the traces or, when one is not there, none; returns their sequence numbers."""
        with self._writing(actor) as connection:
            found = statements.known(connection, keys)
            statements.remove(connection, found, actor)
            return [seq for seq, _ in found]

    def purge(self, keys: Iterable[Key] | None = None, boundaries: Iterable[str] | None = None) -> list[int]:
        """Remove traces and their history, and every byte of them from the files; returns their sequence numbers.

        ``keys`` may name traces that were deleted before; one that was never there is an error, and nothing is removed.
        Costs as much as copying the record. Cut short, it is finished when the record is opened next.
        """
        with self._lock:
            self._refuse_unwritable()
            self._cut_log()  # a reader in the way is found before anything is done
            with self._writing() as connection:
                seqs = statements.purge(connection, keys or (), boundaries or ())
                statements.put_settings(connection, {_PURGING: "true"})
            self._scrub()
            return seqs

    def set_settings(self, values: Mapping[str, str]) -> None:
        """Remember values by name, all in one transaction; other names keep theirs."""
        with self._writing() as connection:
            statements.put_settings(connection, values)

    # Reading

    def get(self, boundary: str, id: str) -> Trace | None:
        with self._reading() as connection:
            found = statements.find(connection, [(boundary, id)])
        return found[boundary, id][1] if found else None

    def known(self, boundary: str, id: str) -> Trace:
        """The trace; one that is not there is an error."""
        with self._reading() as connection:
            return statements.known(connection, [(boundary, id)])[0][1]

    def home_of(self, id: str, *, gone: bool = False) -> str:
        """The only boundary that holds this id (``gone``: or ever held it); none or several are an error."""
        homes = self.boundaries_of(id) or (self.boundaries_of(id, ever=True) if gone else [])
        if len(homes) != 1:
            expected = "one that the memory holds" if not homes else "one that a single boundary holds"
            advice = "list() shows what there is" if not homes else "name its boundary too: boundary=..."
            raise ZeroMemError.of("id", expected, id, advice)
        return homes[0]

    def boundaries_of(self, id: str, *, ever: bool = False) -> list[str]:
        """Boundaries that hold this id; with ``ever``, those too that held it once, unless it was purged."""
        table = HISTORY if ever else TRACES
        with self._reading() as connection:
            return list(connection.scalars(select(table.c.boundary).where(table.c.id == id).distinct()))

    def boundaries(self) -> dict[str, int]:
        """How many traces each boundary holds, in the order in which they appeared."""
        name = TRACES.c.boundary
        with self._reading() as connection:
            rows = connection.execute(select(name, func.count()).group_by(name).order_by(func.min(TRACES.c.seq)))
            return {row[0]: row[1] for row in rows}

    def boundaries_ever(self) -> list[str]:
        """Boundaries that hold traces, or held some that were not purged, in the order in which they appeared."""
        name = HISTORY.c.boundary
        with self._reading() as connection:
            return list(connection.scalars(select(name).group_by(name).order_by(func.min(HISTORY.c.number))))

    def count(self, boundary: str) -> int:
        with self._reading() as connection:
            return connection.scalar(select(func.count()).where(TRACES.c.boundary == boundary)) or 0

    def __len__(self) -> int:
        with self._reading() as connection:
            return connection.scalar(select(func.count()).select_from(TRACES)) or 0

    def traces_of(self, boundary: str) -> list[Stored]:
        """All traces of a boundary, by sequence number."""
        with self._reading() as connection:
            return statements.stored(connection, TRACES.c.boundary == boundary)

    def fetch(self, seqs: Iterable[int]) -> list[Stored]:
        """Traces of these sequence numbers, by sequence number; one that is not there is left out."""
        with self._reading() as connection:
            return statements.fetch(connection, seqs)

    def page(
        self, after: int, limit: int, *, boundaries: Sequence[str] | None = None, prefix: str = ""
    ) -> list[Stored]:
        """The first ``limit`` traces behind a sequence number, by sequence number.

        Of all boundaries or, if any are given, of these; and only those whose id begins with ``prefix``.
        """
        behind = select(TRACES.c.seq).where(TRACES.c.seq > after).order_by(TRACES.c.seq).limit(limit)
        if prefix:  # LIKE would know wildcards, and take a letter for its capital
            behind = behind.where(func.substr(TRACES.c.id, 1, len(prefix)) == prefix)
        pages = [behind]
        if boundaries is not None:
            names = list(dict.fromkeys(boundaries))
            pages = [behind.where(TRACES.c.boundary.in_(few)) for few in statements.some(names)]
        with self._reading() as connection:
            seqs = sorted(seq for page in pages for seq in connection.scalars(page))
            return statements.fetch(connection, seqs[:limit])

    def keys(self) -> tuple[Numbers, Numbers]:
        """Sequence numbers of all traces, ascending, and the digest of each."""
        with self._reading() as connection:
            rows = connection.execute(select(TRACES.c.seq, TRACES.c.digest).order_by(TRACES.c.seq)).all()
        seqs = np.fromiter((row[0] for row in rows), np.int64, len(rows))
        return seqs, np.fromiter((row[1] for row in rows), np.int64, len(rows))

    def last(self) -> int:
        """The largest sequence number; 0 where there is no trace."""
        with self._reading() as connection:
            return connection.scalar(select(func.max(TRACES.c.seq))) or 0

    def history(self, boundary: str, id: str) -> list[Change]:
        """What has happened to a trace, oldest first; nothing to one that was never there, or was purged."""
        of_it = select(*ENTRY).where(HISTORY.c.id == id, HISTORY.c.boundary == boundary).order_by(HISTORY.c.number)
        with self._reading() as connection:
            with connection.execute(of_it) as rows:
                entries = [read_entry(row) for row in rows]
            found = statements.find(connection, [(boundary, id)])
        befores = [None if text is None else json.loads(text) for *_, text in entries]
        now = found[boundary, id][1].to_dict() if found else None
        return [
            Change(datetime.fromisoformat(at), actor, action, before, after)
            for (at, actor, action, _), before, after in zip(entries, befores, [*befores[1:], now], strict=False)
        ]

    def setting(self, name: str) -> str | None:
        with self._reading() as connection:
            row = connection.execute(select(*SETTING).where(SETTINGS.c.name == name)).one_or_none()
            return None if row is None else read_setting(row)

    # Keeping it sound

    def row_hash(self) -> str:
        """SHA-256 over all rows of all tables: the same for as long as nothing is written."""
        digest = hashlib.sha256()
        with self._reading() as connection:
            for table in TABLES.sorted_tables:
                for row in connection.execute(select(table).order_by(*table.primary_key)):
                    digest.update(line((table.name, *row)) + b"\n")
        return digest.hexdigest()

    def check(self) -> list[str]:
        """What is wrong with the database, in sentences: with its structure, then with each row."""
        problems: list[str] = []
        try:
            with self._reading() as connection:
                problems += [f"{self._name}: {problem}" for problem in sqlite.structure_problems(connection)]
                for row in connection.execute(select(*ROW).order_by(TRACES.c.seq)):
                    if not is_sound(row) or read_trace(row).digest != row.digest:
                        problems.append(f"trace {row.seq} of the record is not what was stored")
                for row in connection.execute(select(*ENTRY).order_by(HISTORY.c.number)):
                    if not is_sound(row):
                        problems.append(f"entry {row.number} of the history is not what was stored")
                for row in connection.execute(select(*SETTING).order_by(SETTINGS.c.name)):
                    if not is_sound(row):
                        problems.append(f"setting {row.name} of the record is not what was stored")
        except ZeroMemError as error:  # it cannot be read to its end
            problems.append(str(error))
        return problems

    def backup(self, path: Path) -> None:
        """Copy the record to a new file, as it is at one moment; others may read and write it meanwhile."""
        if path.exists():
            raise ZeroMemError.of("path", "a file that is not there yet", str(path), "name another")
        with self._lock:
            self._refuse_closed()
        with sqlite.in_words(self._path), sqlite.placed(path) as new:
            if self._path is None:
                with self._lock:
                    sqlite.copy(sqlite.driver_of(self._engine), new)
            else:
                with closing(sqlite.connect(self._path, read_only=True)) as source:
                    sqlite.copy(source, new)

    # What every method needs

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A transaction that sees one state."""
        with self._lock, sqlite.in_words(self._path):
            self._refuse_closed()
            with self._engine.connect() as connection:
                yield connection

    @contextmanager
    def _writing(self, actor: str = "") -> Iterator[Connection]:
        """A transaction that is on disk behind its end, or never was."""
        check_text("record", "actor", actor, blank_ok=True)
        with self._lock, sqlite.in_words(self._path):
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
        with sqlite.in_words(self._path, _PURGED):
            sqlite.driver_of(self._engine).execute("VACUUM")
            self._cut_log(_PURGED)
            with self._writer.begin() as connection:
                connection.execute(delete(SETTINGS).where(SETTINGS.c.name == _PURGING))

    def _cut_log(self, state: str = sqlite.UNCHANGED) -> None:
        with sqlite.in_words(self._path, state):
            if not sqlite.cut_log(sqlite.driver_of(self._engine)):
                advice = f"wait until it has done, and try again; {state}"
                raise ZeroMemError.of(self._name, "a log in use here only", "another process that reads it", advice)
