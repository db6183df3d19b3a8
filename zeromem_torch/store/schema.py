"""The tables of the record, and how those of an older version become those of this one."""

from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    delete,
    insert,
    inspect,
    select,
)

from zeromem_torch.substrate.traces import ZeroMemError

# Times are ISO 8601 text, since the caller's zone is part of what was given. Long columns come last, where a scan of
# the others does not have to read them.

TABLES = MetaData()
_SERIAL = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only in an INTEGER
TRACES = Table(
    "traces",
    TABLES,
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
HISTORY = Table(
    "history",
    TABLES,
    Column("number", _SERIAL, primary_key=True),
    Column("checksum", BigInteger, nullable=False),
    Column("id", Text, nullable=False),
    Column("boundary", Text, nullable=False),
    Column("at", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("before", Text),  # JSON; what came after is what the next change found, or what is there now
    Index("history_of_trace", "id", "boundary"),
)
SETTINGS = Table(
    "settings",
    TABLES,
    Column("name", Text, primary_key=True),
    Column("checksum", BigInteger, nullable=False),
    Column("value", Text, nullable=False),
)
VERSION = Table("schema_version", TABLES, Column("version", Integer, primary_key=True, autoincrement=False))


def _first(connection: Connection) -> None:
    TABLES.create_all(connection)


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_first,)
"""Step n makes version n of the schema out of version n - 1; what a released step does never changes."""


def migrate(engine: Engine, name: str, *, read_only: bool = False) -> None:
    """Bring the tables up to this version, in one transaction; ``name`` is what an error calls the database."""
    newest = len(MIGRATIONS)
    with engine.connect() as connection:
        version = _version(connection, name)
    if version > newest:
        advice = "update zeromem-torch, or open it with the version that made it"
        raise ZeroMemError.of(name, f"a schema of version {newest} or older", version, advice)
    if version < newest and read_only:
        advice = "open it once without read_only, which brings it up"
        raise ZeroMemError.of(name, f"a schema of version {newest}", version, advice)
    if version < newest:
        with engine.execution_options(write=True).begin() as connection:
            for step in MIGRATIONS[_version(connection, name) :]:  # asked again: we hold the write lock only now
                step(connection)
            connection.execute(delete(VERSION))
            connection.execute(insert(VERSION), {"version": newest})


def _version(connection: Connection, name: str) -> int:
    tables = inspect(connection).get_table_names()
    if not tables:
        return 0
    version = connection.scalar(select(VERSION.c.version)) if VERSION.name in tables else None
    if version is None:
        got = f"one with the tables {', '.join(tables)}"
        raise ZeroMemError.of(name, "a database that this library made", got, "name another file")
    return int(version)
