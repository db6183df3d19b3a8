"""What only SQLite needs: connections, files, and its errors in words."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from zeromem_torch import disk
from zeromem_torch.store.rows import DamagedRow
from zeromem_torch.substrate.traces import ZeroMemError

BUSY_SECONDS = 10.0
"""How long a statement waits for another connection to let go of the file."""
_PRAGMAS = (
    "cell_size_check=ON",  # damage is noticed early
    "secure_delete=ON",  # what is deleted is overwritten
    "synchronous=FULL",  # a commit returns when the disk has it
    "fullfsync=ON",  # on macOS nothing less reaches the disk
)
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
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: of tables that are not ours
UNCHANGED = "nothing was changed, and nothing stored is lost"


def engine_of(path: Path | None, *, read_only: bool = False) -> Engine:
    """An engine of one connection, whose transactions begin when we say so: with the write lock, if they write."""
    engine = create_engine("sqlite://", creator=lambda: connect(path, read_only=read_only), poolclass=StaticPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("write") else "BEGIN")

    return engine


def connect(path: Path | None, *, read_only: bool = False) -> sqlite3.Connection:
    name = ":memory:" if path is None else f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    # Without an isolation level: or sqlite3 would begin transactions where it thinks fit, and never with the lock.
    connection = sqlite3.connect(name, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def use_log(engine: Engine) -> None:
    """Keep a write-ahead log, with which readers and a writer are not in each other's way. The file remembers it."""
    driver_of(engine).execute("PRAGMA journal_mode=WAL")


def driver_of(engine: Engine) -> sqlite3.Connection:
    """The connection itself, for what cannot stand in a transaction."""
    with closing(engine.raw_connection()) as borrowed:  # the pool keeps it open
        driver = borrowed.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def cut_log(driver: sqlite3.Connection) -> bool:
    """Bring the write-ahead log into the database, and cut it to nothing; False if another connection is reading it."""
    return not driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]


def structure_problems(connection: Connection) -> list[str]:
    rows = connection.exec_driver_sql("PRAGMA integrity_check")
    return [" ".join(row[0].split()) for row in rows if row[0] != "ok"]


def copy(source: sqlite3.Connection, path: Path) -> None:
    """Copy a database as it is at one moment; others may write to it meanwhile."""
    with closing(sqlite3.connect(path)) as target:
        source.backup(target)


# Files


def check_file(path: Path) -> None:
    """Refuse a file that SQLite would take for a new database, though a new record gets its name only when whole."""
    log = path.with_name(f"{path.name}-wal")
    if not path.exists() and log.exists() and log.stat().st_size:
        raise damaged(path, f"only its log, {log.name}")
    if path.exists() and not path.stat().st_size:
        raise damaged(path, "a file of 0 bytes")


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A place to make a database at; it gets its name once it is whole and on disk, and otherwise never."""
    new = path.with_name(f"{path.name}.new")
    _unlink(new)
    try:
        yield new
        disk.sync(new)
        new.replace(path)
        disk.sync(path.parent)
    except BaseException:
        _unlink(new)
        raise


def _unlink(database: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


# Errors


@contextmanager
def in_words(path: Path | None, state: str = UNCHANGED) -> Iterator[None]:
    """Say what is wrong with a file in our words, and what became of the traces."""
    try:
        yield
    except DamagedRow as error:
        raise damaged(path, str(error)) from None
    except UnicodeDecodeError as error:
        raise damaged(path, "text that is not UTF-8") from error
    except OSError as error:
        advice = f"check that its folder is there, and the permissions; {state}"
        raise ZeroMemError.of(name_of(path), "files to read and write", error.strerror, advice) from error
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        code = getattr(cause, "sqlite_errorcode", None)
        if code is None and "decode" in str(cause):  # Python's own, which quotes the text
            raise damaged(path, "text that is not UTF-8") from None
        code = -1 if code is None else code & 0xFF
        if code in _DAMAGE:
            raise damaged(path, str(cause)) from error
        if code not in _REFUSALS:
            raise
        expected, advice = _REFUSALS[code]
        raise ZeroMemError.of(name_of(path), expected, str(cause), f"{advice}; {state}") from error


def damaged(path: Path | None, got: str) -> ZeroMemError:
    advice = "keep the file as it is, and restore a copy that backup(path) made; nothing was changed"
    return ZeroMemError.of(name_of(path), "a sound database", got, advice)


def name_of(path: Path | None) -> str:
    return "record in memory" if path is None else f"record {path}"
