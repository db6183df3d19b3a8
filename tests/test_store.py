"""The record: what is stored comes back, all or nothing is written, and damage is said instead of returned."""

import random
import re
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from zeromem_torch.store import Record, schema, sqlite, statements
from zeromem_torch.substrate.traces import Trace, ZeroMemError

TOKYO = timezone(timedelta(hours=9))
NOON = datetime(2023, 5, 8, 12, 30, 15, 250, tzinfo=TOKYO)
FULL = Trace(
    "D1:3", "acme/alice", "I moved to Tokyo.", "s1", 3, NOON, "Ann", "user", "Moving", {"n": 1, "ok": True, "x": 1.5},
    valid_from=NOON, valid_to=NOON + timedelta(days=1), expires_at=NOON + timedelta(days=2),
)  # fmt: skip
ODD = ["'; DROP TABLE x; --", '"', "%", "_", "\\", "{}", "a_b", "a%", "A", "a", "é", "e\u0301", "a\x1fb", "👋", "שלום"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.sqlite"


@pytest.fixture(params=["file", "process"])
def record(request: pytest.FixtureRequest, path: Path) -> Iterator[Record]:
    with closing(Record(path if request.param == "file" else None)) as record:
        yield record


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.01)


def many(count: int, boundary: str = "b", start: int = 0) -> list[Trace]:
    return [Trace(f"t{number}", boundary, f"text {number}") for number in range(start, start + count)]


def ids(stored: Sequence[tuple[int, Trace]]) -> list[str]:
    return [trace.id for _, trace in stored]


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(ZeroMemError, match=r"expected .+, got .+; ") as error:
        action()
    return str(error.value)


# What is stored comes back


def test_the_table_has_a_column_for_every_field() -> None:
    own = {"seq", "checksum", "digest"}
    assert {column.name for column in schema.TRACES.columns} == {f.name for f in fields(Trace)} | own


def test_every_field_comes_back_with_its_zone(record: Record) -> None:
    before = datetime.now(UTC)
    ((seq, trace),) = record.add([FULL])
    assert trace == FULL
    assert trace.added_at is not None
    assert before <= trace.added_at <= datetime.now(UTC)
    assert trace.updated_at is None

    read = record.get(FULL.boundary, FULL.id)
    assert read is not None
    assert read == FULL
    assert read.to_dict() == trace.to_dict()
    assert str(read.time) == "2023-05-08 12:30:15.000250+09:00"
    assert [type(value) for value in read.metadata.values()] == [int, bool, float]
    assert record.fetch([seq]) == record.traces_of(FULL.boundary) == record.page(0, 9) == [(seq, FULL)]


def test_a_trace_that_says_when_it_was_added_is_not_believed(record: Record) -> None:
    long_ago = datetime(1999, 1, 1, tzinfo=UTC)
    ((_, trace),) = record.add([replace(FULL, added_at=long_ago, updated_at=long_ago)])
    assert trace.added_at is not None
    assert trace.added_at > long_ago
    assert trace.updated_at is None
    assert record.add([replace(FULL, added_at=long_ago)]) == []


@pytest.mark.parametrize("odd", [*ODD, "x" * 1_000_000])
def test_adversarial_names_in_every_field(record: Record, odd: str) -> None:
    trace = Trace(odd, odd, odd, odd, -(2**63), None, odd, odd, odd, {odd: odd})
    neighbours = [Trace(name, name, "other") for name in ODD if name != odd]
    record.add([*neighbours, trace], actor=odd)
    record.set_settings({odd: odd})

    assert record.get(odd, odd) == trace
    assert record.boundaries_of(odd) == [odd]
    assert ids(record.page(0, 99, boundaries=[odd], prefix=odd)) == [odd]
    assert [one.actor for one in record.history(odd, odd)] == [odd]
    assert record.setting(odd) == odd
    assert record.boundaries() == dict.fromkeys([*(trace.boundary for trace in neighbours), odd], 1)
    record.delete([(odd, odd)])
    assert len(record) == len(neighbours)
    assert record.check() == []


def test_fields_may_be_of_subclasses(record: Record) -> None:
    class Role(StrEnum):
        USER = "user"

    class Place(IntEnum):
        FIRST = 1

    class Loud(str):
        def __str__(self) -> str:
            return self.upper()

        __repr__ = __str__

    record.add([Trace("a", "b", Loud("text"), order=Place.FIRST, role=Role.USER, speaker=np.str_("Ann"))])
    assert record.get("b", "a") == Trace("a", "b", "text", order=1, role="user", speaker="Ann")
    assert record.check() == []


def test_a_prefix_knows_no_wildcards_and_no_other_case(record: Record) -> None:
    names = ["a_b", "axb", "A_b", "a%", "a%b", "mem:fact:x", "mem:factual"]
    record.add([Trace(name, "b", "text") for name in names] + [Trace("a_c", "other", "text")])
    for prefix in ("a_", "a%", "A", "mem:fact:", "mem:fact", "", "zzz"):
        assert ids(record.page(0, 99, boundaries=["b"], prefix=prefix)) == [n for n in names if n.startswith(prefix)]


def test_boundaries_are_counted_in_the_order_in_which_they_appeared(record: Record) -> None:
    record.add([*many(2, "z"), *many(1, "acme"), *many(3, "acme-corp"), *many(1, "acme/bob", 5), *many(1, "z", 7)])
    assert list(record.boundaries().items()) == [("z", 3), ("acme", 1), ("acme-corp", 3), ("acme/bob", 1)]
    assert [record.count(name) for name in ("acme", "acme/bob", "ACME", "nowhere")] == [1, 1, 0, 0]
    assert len(record) == 8
    assert record.boundaries_of("t0") == ["acme", "acme-corp", "z"]
    record.delete([("acme", "t0")])
    assert record.boundaries_of("t0") == ["acme-corp", "z"]
    assert record.boundaries_of("t0", ever=True) == ["acme", "acme-corp", "z"]
    assert record.boundaries_ever() == ["z", "acme", "acme-corp", "acme/bob"]


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_pages_end_only_where_the_traces_do(record: Record, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(statements, "_AT_ONCE", at_once)
    traces = [Trace(f"t{number}", f"b{number % 11}", "text") for number in range(129)]
    stored = record.add(traces)
    for boundaries in (None, ["b3"], ["b9", "b1", "b1", "none", "b2"], []):
        wanted = [one for one in stored if boundaries is None or one[1].boundary in boundaries]
        for limit in (1, 10, 1000):
            seen: list[tuple[int, Trace]] = []
            while page := record.page(seen[-1][0] if seen else 0, limit, boundaries=boundaries):
                assert len(page) <= limit
                seen += page
            assert seen == wanted
    seqs = [seq for seq, _ in stored]
    assert record.fetch([*seqs[::-1], 10**6, *seqs[:3]]) == stored


def test_keys_are_those_of_the_live_rows(record: Record) -> None:
    stored = record.add(many(129))
    record.delete([("b", "t5")])
    record.update("b", "t7", {"text": "new"})
    left = [(seq, Trace("t7", "b", "new") if trace.id == "t7" else trace) for seq, trace in stored if trace.id != "t5"]
    seqs, digests = record.keys()
    assert seqs.dtype == digests.dtype == np.int64
    assert list(zip(seqs.tolist(), digests.tolist(), strict=True)) == [(seq, trace.digest) for seq, trace in left]


def test_an_empty_record(record: Record) -> None:
    assert len(record) == record.count("b") == len(record.keys()[0]) == len(record.keys()[1]) == 0
    assert record.boundaries() == {}
    empty: list[Any] = [
        *(record.traces_of("b"), record.fetch([]), record.page(0, 9), record.history("b", "t")),
        *(record.add([]), record.delete([]), record.changes([]), record.check()),
        *(record.boundaries_of("t"), record.boundaries_ever()),
    ]
    assert empty == [[]] * len(empty)
    assert record.get("b", "t") is None
    assert record.setting("x") is None


# Adding


def test_the_same_trace_again_changes_nothing(record: Record) -> None:
    stored = record.add([*many(3), FULL])
    before = record.row_hash()
    assert record.add([FULL, *many(3), FULL], actor="me") == []
    assert record.add([FULL, *many(3)], overwrite=True) == []
    assert record.row_hash() == before
    assert ids(record.add(many(5))) == ["t3", "t4"]  # the others are known
    assert record.fetch([seq for seq, _ in stored]) == stored


def test_an_id_belongs_to_its_boundary(record: Record) -> None:
    record.add([Trace("1", "alice", "one"), Trace("1", "bob", "two")])
    assert [one.text for one in (record.get("alice", "1"), record.get("bob", "1")) if one] == ["one", "two"]
    record.update("bob", "1", {"text": "three"})
    record.delete([("bob", "1")])
    assert record.get("alice", "1") == Trace("1", "alice", "one")
    assert record.get("bob", "1") is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text": "other"}, "text"),
        ({"metadata": {"n": 1, "ok": 1, "x": 1.5}}, "metadata"),  # equal in Python, and not the same
        ({"time": NOON.astimezone(UTC)}, "time"),  # the same moment, and another day
        ({"time": None, "speaker": "Bo"}, "time, speaker"),
        ({"session": "", "order": 0, "role": "tool"}, "session, order, role"),
        ({"expires_at": None}, "expires_at"),
    ],
)
def test_another_trace_under_a_known_id_is_refused_by_field(record: Record, change: dict[str, Any], named: str) -> None:
    record.add([FULL])
    before = record.row_hash()
    for action in (record.add, record.changes):
        message = refused(lambda action=action: action([*many(3), replace(FULL, **change), *many(3, "c")]))  # type: ignore[misc]
        assert f"another {named}" in message
        assert "overwrite=True" in message
    assert record.row_hash() == before  # of the others, too, none was added


def test_two_different_traces_under_one_id_in_one_call(record: Record) -> None:
    refused(lambda: record.add([Trace("1", "b", "one"), Trace("1", "b", "two")]))
    assert len(record) == 0
    refused(lambda: record.add([Trace("1", "b", "one"), Trace("1", "b", "one", speaker="Bo")], overwrite=True))
    assert len(record) == 0
    ((_, trace),) = record.add([Trace("1", "b", "one"), Trace("1", "b", "two")], overwrite=True)
    assert trace.text == "two"
    assert [change.action for change in record.history("b", "1")] == ["add"]


def test_a_conflict_says_nothing_of_what_is_stored(record: Record) -> None:
    record.add([Trace("1", "acme", "the secret text", speaker="Sue"), Trace("1", "rival", "the rival's text")])
    messages = [
        refused(lambda: record.add([Trace("1", "acme", "mine", speaker="Bo")])),
        refused(lambda: record.add([Trace("1", "acme", "mine", speaker="Bo")], overwrite=True)),
        refused(lambda: record.update("nobody", "1", {"text": "mine"})),
        refused(lambda: record.delete([("nobody", "1")])),
        refused(lambda: record.purge([("nobody", "1")])),
    ]
    for message in messages:
        assert not re.search("secret|rival|Sue", message)
    assert not any("acme" in message for message in messages[2:])


def test_overwriting_is_an_update(record: Record) -> None:
    ((seq, first),) = record.add([FULL])
    new = replace(FULL, text="I moved to Kyoto.", metadata={}, valid_to=None)
    fresh = Trace("new", "b", "text")
    assert record.changes([fresh, new], overwrite=True) == [fresh, new]
    (_, added), (again, second) = record.add([fresh, new], overwrite=True, actor="me")
    assert (again, second, added) == (seq, new, fresh)
    assert second.added_at == first.added_at
    assert second.updated_at is not None
    assert record.get(FULL.boundary, FULL.id) == new
    changes = record.history(FULL.boundary, FULL.id)
    assert [(change.action, change.actor) for change in changes] == [("add", ""), ("update", "me")]
    message = refused(lambda: record.add([replace(new, speaker="Bo", session="s2")], overwrite=True))
    assert "session, speaker" in message


def test_numbers_are_never_used_again(record: Record) -> None:
    stored = record.add(many(5))
    record.delete([("b", trace.id) for _, trace in stored])
    ((seq, _),) = record.add([Trace("x", "b", "text")])
    assert seq > stored[-1][0]
    record.purge(boundaries=["b"])
    ((later, _),) = record.add([Trace("x", "b", "text")])
    assert later > seq


def test_many_traces_take_as_many_statements_as_few(record: Record) -> None:
    driver = sqlite.driver_of(record._engine)

    def statements_of(action: Callable[[], Any]) -> set[str]:
        seen: list[str] = []
        driver.set_trace_callback(seen.append)
        action()
        driver.set_trace_callback(None)
        assert seen[0] == "BEGIN IMMEDIATE"
        assert seen[-1] == "COMMIT"
        return {re.sub(r"'[^']*'|\d+|NULL|\b(IN )?\([^()]*\)", "", statement) for statement in seen}

    for action in (record.add, lambda traces: record.delete([(trace.boundary, trace.id) for trace in traces])):
        few = statements_of(lambda action=action: action(many(3)))  # type: ignore[misc]
        assert statements_of(lambda action=action: action(many(900, "c"))) == few  # type: ignore[misc]


# Changing, removing, and the history


def test_an_update_keeps_what_was_not_passed(record: Record) -> None:
    (seq, first), *_ = record.add([FULL, *many(2)])
    again, after = record.update(FULL.boundary, FULL.id, {"text": "New.", "expires_at": None}, actor="me")
    assert again == seq
    assert after == replace(FULL, text="New.", expires_at=None)
    assert after.added_at == first.added_at
    assert after.updated_at is not None
    read = record.get(FULL.boundary, FULL.id)
    assert read is not None
    assert read.to_dict() == after.to_dict()

    before = record.row_hash()
    assert record.update(FULL.boundary, FULL.id, {"text": "New.", "metadata": dict(FULL.metadata)}) == (seq, after)
    assert record.row_hash() == before


@pytest.mark.parametrize("name", ["speaker", "role", "session", "order", "id", "boundary", "added_at", "txt"])
def test_provenance_does_not_change(record: Record, name: str) -> None:
    record.add([FULL])
    before = record.row_hash()
    assert name in refused(lambda: record.update(FULL.boundary, FULL.id, {"text": "new", name: "x"}))
    assert record.row_hash() == before


@pytest.mark.parametrize(
    "changes", [{"text": " "}, {"text": None}, {"time": "soon"}, {"valid_to": NOON - timedelta(days=9)}]
)
def test_an_update_is_checked_like_a_new_trace(record: Record, changes: dict[str, Any]) -> None:
    record.add([FULL])
    refused(lambda: record.update(FULL.boundary, FULL.id, changes))
    assert record.get(FULL.boundary, FULL.id) == FULL


def test_history_tells_who_when_and_what(record: Record) -> None:
    start = datetime.now(UTC)
    record.add([FULL, Trace("D1:3", "other", "of no interest")], actor="importer")
    first = record.get(FULL.boundary, FULL.id)
    _, second = record.update(FULL.boundary, FULL.id, {"text": "two"}, actor="agent 👋")
    record.delete([(FULL.boundary, FULL.id)], actor="user")
    assert [change.after for change in record.history(FULL.boundary, FULL.id)][-1] is None
    ((_, third),) = record.add([replace(FULL, speaker="Bo")])

    assert first is not None
    one, two, three = first.to_dict(), second.to_dict(), third.to_dict()
    changes = record.history(FULL.boundary, FULL.id)
    assert [(change.actor, change.action, change.before, change.after) for change in changes] == [
        ("importer", "add", None, one),
        ("agent 👋", "update", one, two),
        ("user", "delete", two, None),
        ("", "add", None, three),
    ]
    times = [start, *(change.at for change in changes), datetime.now(UTC)]
    assert times == sorted(times)
    assert all(time.utcoffset() == timedelta(0) for time in times)
    assert Trace.from_dict(two) == second
    assert changes[2].to_dict() == {
        "at": changes[2].at.isoformat(), "actor": "user", "action": "delete", "before": two, "after": None,
    }  # fmt: skip


def test_all_are_deleted_or_none(record: Record) -> None:
    stored = record.add(many(10))
    before = record.row_hash()
    refused(lambda: record.delete([("b", "t1"), ("b", "t2"), ("b", "nothing")]))
    assert record.row_hash() == before
    assert record.delete([("b", "t3"), ("b", "t1"), ("b", "t3")]) == [stored[3][0], stored[1][0]]
    assert len(record) == 8


def test_an_actor_is_a_text(record: Record) -> None:
    assert "actor" in refused(lambda: record.add(many(1), actor="a\x00b"))
    assert len(record) == 0


# Purging


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def test_no_byte_of_what_is_purged_is_left(path: Path) -> None:
    secret = [Trace(f"secret-{n}", "vault", f"hidden {n} " * 300, session="covert", speaker="Eve") for n in range(20)]
    with closing(Record(path)) as record:
        record.add([*many(200), *secret], actor="informer")
        record.update("vault", "secret-3", {"text": "hidden, and changed"}, actor="informer")
        record.delete([("vault", "secret-4")], actor="informer")
        assert b"hidden 4" in contents(path.parent)
        kept = [record.history("b", f"t{n}") for n in range(200)]

        gone = record.purge([("vault", f"secret-{n}") for n in range(20)])

        assert len(gone) == 19
        for word in (b"hidden", b"secret", b"covert", b"Eve", b"vault"):
            assert word not in contents(path.parent)
        assert record.history("vault", "secret-3") == []
        assert record.boundaries_of("secret-3", ever=True) == []
        assert [record.history("b", f"t{n}") for n in range(200)] == kept
        assert record.check() == []
        assert "vault" in refused(lambda: record.purge([("vault", "secret-3")]))

        record.purge(boundaries=["b", "unknown"])
        assert b"informer" not in contents(path.parent)
        assert len(record) == 0


def test_a_boundary_is_purged_with_what_was_deleted_from_it(record: Record) -> None:
    stored = record.add([*many(5), *many(5, "c")])
    record.delete([("b", "t0")])
    assert record.purge(keys=[("c", "t4")], boundaries=["b"]) == [*(seq for seq, _ in stored[1:5]), stored[9][0]]
    assert record.boundaries_ever() == list(record.boundaries()) == ["c"]
    assert record.history("b", "t0") == []


@pytest.mark.usefixtures("hasty")
def test_a_purge_waits_for_no_reader(path: Path) -> None:
    with closing(Record(path)) as record, closing(sqlite3.connect(path)) as reader:
        record.add(many(3))
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM traces").fetchone()
        assert "try again" in refused(lambda: record.purge([("b", "t1")]))
        assert len(record) == 3
        reader.rollback()
        record.purge([("b", "t1")])
        assert len(record) == 2


def test_a_purge_that_was_cut_short_is_finished_when_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(path)
    record.add([*many(50), Trace("x", "b", "hidden " * 5000)])
    with monkeypatch.context() as patched:
        patched.setattr(record, "_scrub", lambda: None)
        record.purge([("b", "x")])
    for file in path.parent.glob("memory.sqlite*"):  # as a crash would leave it
        shutil.copy(file, file.with_name(f"crashed-{file.name}"))
    record.close()
    crashed = path.with_name(f"crashed-{path.name}")
    path.unlink()
    assert b"hidden" in contents(path.parent)
    with closing(Record(crashed)) as record:
        assert b"hidden" not in contents(path.parent)
        assert len(record) == 50


# Threads, processes, files


def test_threads_lose_nothing(path: Path) -> None:
    with closing(Record(path)) as record:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(20):
                    record.add(many(3, f"b{number}", 3 * turn))
                    assert len(record.traces_of(f"b{number}")) == 3 * (turn + 1)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert record.boundaries() == {f"b{number}": 60 for number in range(8)}
        assert record.check() == []


def test_a_backup_is_one_moment_of_a_record_in_use(path: Path, tmp_path: Path) -> None:
    with closing(Record(path)) as record:
        record.add(many(100))
        record.set_settings({"encoder": "e1"})
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                record.add(many(2, f"pair {number}"))  # both are in a copy, or neither
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        copies = [tmp_path / f"copy {number}.sqlite" for number in range(5)]
        for copy in copies:
            record.backup(copy)
        stop.set()
        writer.join()
        assert len(list(tmp_path.glob("copy*"))) == len(copies)
        for copy in copies:
            with closing(Record(copy)) as other:
                assert other.check() == []
                assert other.setting("encoder") == "e1"
                assert set(other.boundaries().values()) <= {100, 2}
        refused(lambda: record.backup(copies[0]))
        refused(lambda: record.backup(tmp_path / "no such folder" / "copy"))


def test_a_record_in_this_process_is_copied_to_a_file(tmp_path: Path) -> None:
    with closing(Record()) as record:
        stored = record.add(many(5))
        record.backup(tmp_path / "copy")
    with closing(Record(tmp_path / "copy", read_only=True)) as copy:
        assert copy.traces_of("b") == stored


def test_reading_changes_nothing(record: Record) -> None:
    record.add([FULL, *many(20)])
    record.update("b", "t1", {"text": "new"})
    record.set_settings({"a": "1"})
    known = [trace for _, trace in record.traces_of("b")]
    hashes = {record.row_hash()}
    for _ in range(20):
        record.get("b", "t1"), record.traces_of("b"), record.page(3, 5), record.fetch([1]), record.history("b", "t1")
        record.changes(known), record.keys(), record.boundaries(), record.setting("a"), record.check()
    hashes.add(record.row_hash())
    assert len(hashes) == 1
    writes: list[Callable[[], Any]] = [
        lambda: record.add(many(1, "new")),
        lambda: record.update("b", "t2", {"title": "x"}),
        lambda: record.delete([("b", "t3")]),
        lambda: record.set_settings({"a": "2"}),
        lambda: record.purge([("b", "t3")]),
    ]
    for number, write in enumerate(writes, start=2):
        write()
        hashes.add(record.row_hash())
        assert len(hashes) == number


def test_what_was_written_is_there_after_reopening(path: Path) -> None:
    with closing(Record(path)) as record:
        stored = record.add([FULL, *many(5)])
        record.set_settings({"a": "1", "b": "2"})
        record.set_settings({"b": "3"})
        before = record.row_hash()
    with closing(Record(path)) as record:
        assert record.row_hash() == before
        assert record.page(0, 99) == stored
        assert (record.setting("a"), record.setting("b")) == ("1", "3")


def test_a_reader_sees_what_the_writer_has_written_and_writes_nothing(path: Path) -> None:
    with closing(Record(path)) as writer, closing(Record(path, read_only=True)) as reader:
        writer.add(many(3))
        assert len(reader) == 3
        assert reader.check() == []
        for write in (
            lambda: reader.add(many(1, "c")),
            lambda: reader.update("b", "t1", {"text": "x"}),
            lambda: reader.delete([("b", "t1")]),
            lambda: reader.purge([("b", "t1")]),
            lambda: reader.set_settings({"a": "b"}),
        ):
            assert "read_only" in refused(write)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            sqlite.driver_of(reader._engine).execute("DELETE FROM traces")
        assert len(writer) == 3


def test_a_closed_record_says_so(record: Record) -> None:
    record.close()
    for action in (lambda: len(record), lambda: record.add(many(1)), record.purge, lambda: record.backup(Path("x"))):
        assert "closed" in refused(action)
    assert "closed" in str(record.check())
    record.close()


def test_surprising_names_of_files(tmp_path: Path) -> None:
    for name in ("a b.sqlite", "100%.sqlite", "a?mode=ro#x.sqlite", "メモ.sqlite"):
        with closing(Record(tmp_path / name)) as record:
            record.add(many(2))
        with closing(Record(tmp_path / name, read_only=True)) as record:
            assert len(record) == 2
        assert (tmp_path / name).is_file()


# Versions


def _extra(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE traces ADD COLUMN mood TEXT"))


def _failing(connection: Connection) -> None:
    connection.execute(text("DROP TABLE history"))
    raise RuntimeError("half-way")


def columns(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as driver:
        return [row[1] for row in driver.execute("PRAGMA table_info(traces)")]


def test_an_older_record_is_brought_up_and_a_newer_one_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Record(path)) as record:
        stored = record.add(many(3))
        before = record.row_hash()

    with monkeypatch.context() as patched:
        patched.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, _failing))
        with pytest.raises(RuntimeError, match="half-way"):
            Record(path)
    with closing(Record(path)) as record:
        assert record.row_hash() == before  # nothing of the step that failed

    with monkeypatch.context() as patched:
        patched.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, _extra))
        assert "open it once without read_only" in refused(lambda: Record(path, read_only=True))
        assert "mood" not in columns(path)
        with closing(Record(path)) as record:
            assert record.traces_of("b") == stored
        assert "mood" in columns(path)
        with closing(Record(path, read_only=True)) as record:
            assert len(record) == 3

    for read_only in (True, False):
        message = refused(lambda read_only=read_only: Record(path, read_only=read_only))  # type: ignore[misc]
        assert "version 1 or older, got 2" in message
        assert "update zeromem-torch" in message


def test_a_record_appears_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, _failing))
        with pytest.raises(RuntimeError, match="half-way"):
            Record(path)
    assert list(path.parent.iterdir()) == []
    path.with_name("memory.sqlite.new").write_bytes(b"left behind by a crash")
    with closing(Record(path)) as record:
        record.add(many(1))
    assert list(path.parent.iterdir()) == [path]


# Errors and damage


@pytest.mark.usefixtures("hasty")
def test_a_locked_file_is_said_to_be_locked(path: Path) -> None:
    with closing(Record(path)) as record, closing(sqlite3.connect(path, isolation_level=None)) as other:
        record.add(many(3))
        other.execute("BEGIN IMMEDIATE")
        message = refused(lambda: record.add(many(1, "c")))
        assert str(path) in message
        assert "database is locked" in message
        assert len(record) == 3  # readers are not in its way
        other.rollback()
        record.add(many(1, "c"))
        assert record.check() == []


def test_a_full_disk_loses_nothing(path: Path) -> None:
    with closing(Record(path)) as record:
        stored = record.add(many(50))
        driver = sqlite.driver_of(record._engine)
        pages = driver.execute("PRAGMA page_count").fetchone()[0]
        driver.execute(f"PRAGMA max_page_count={pages + 2}")
        message = refused(lambda: record.add(many(5000, "c")))
        assert "room on the disk" in message
        assert "nothing stored is lost" in message
        assert record.page(0, 9999) == stored
        assert record.check() == []
        driver.execute("PRAGMA max_page_count=1000000")
        assert len(record.add(many(5000, "c"))) == 5000


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Dear diary, " * 1000)
    (tmp_path / "empty").touch()
    (tmp_path / "lost-wal").write_bytes(b"x" * 5000)
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE songs (name TEXT)")
    for name, words in {
        "text": "not a database",
        "empty": "0 bytes",
        "lost": "lost-wal",
        "other": "songs",
        ".": "nothing was changed",
        "no folder/x": "that can be opened",
    }.items():
        for read_only in (False, True):
            before = sorted(tmp_path.iterdir())
            message = refused(lambda name=name, read_only=read_only: Record(tmp_path / name, read_only=read_only))  # type: ignore[misc]
            assert words in message or (name == "lost" and read_only)
            assert ("restore" in message) == (name in ("text", "empty", "lost"))
            assert sorted(tmp_path.iterdir()) == before
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        assert [row[0] for row in other.execute("SELECT name FROM sqlite_master")] == ["songs"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Callable[[Record], Any]], list[Any]]:
    """A record, questions to it, and their answers."""
    path = tmp_path_factory.mktemp("sound") / "memory.sqlite"
    with closing(Record(path)) as record:
        record.add([Trace(f"t{n}", f"b{n % 3}", f"héllo 👋 {n} " * 5, time=NOON, metadata={"n": n}) for n in range(40)])
        record.update("b0", "t0", {"title": "new"})
        record.delete([("b1", "t1")])
        record.set_settings({"encoder": "e1"})
        asked: list[Callable[[Record], Any]] = [
            lambda record: len(record),
            lambda record: record.boundaries(),
            lambda record: record.page(0, 99),
            lambda record: record.setting("encoder"),
            *(lambda record, n=n: record.traces_of(f"b{n}") for n in range(3)),
            *(lambda record, n=n: record.history(f"b{n % 3}", f"t{n}") for n in range(10)),
        ]
        answers = [question(record) for question in asked]
    return path, asked, answers


def heard(path: Path, asked: Sequence[Callable[[Record], Any]], *, read_only: bool) -> tuple[list[Any], list[str]]:
    """Answers, or the errors in their place, and what `check` says."""
    try:
        record = Record(path, read_only=read_only)
    except ZeroMemError as error:
        return [error] * len(asked), [str(error)]
    answers: list[Any] = []
    with closing(record):
        for question in asked:
            try:
                answers.append(question(record))
            except ZeroMemError as error:
                answers.append(error)
        return answers, record.check()


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_are_found_and_never_returned(
    sound: tuple[Path, list[Callable[[Record], Any]], list[Any]], path: Path, seed: int
) -> None:
    source, asked, expected = sound
    draw, found = random.Random(seed), 0
    for number in range(60):
        data = bytearray(source.read_bytes())
        data[draw.randrange(len(data) if number % 2 else 8192)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        answers, problems = heard(path, asked, read_only=number % 4 > 1)
        differing = [answer for answer, right in zip(answers, expected, strict=True) if answer != right]
        assert problems or not differing
        found += bool(problems)
        for error in differing:
            if isinstance(error, ZeroMemError):
                assert re.search("backup|newer|older|this library made", str(error))
        _remove(path)
    assert found


def test_a_truncated_file_is_refused(
    sound: tuple[Path, list[Callable[[Record], Any]], list[Any]], path: Path
) -> None:
    source, asked, expected = sound
    data = source.read_bytes()
    for size in (*range(0, len(data), 2500), len(data) - 1):
        path.write_bytes(data[:size])
        answers, problems = heard(path, asked, read_only=False)
        assert problems
        for answer, right in zip(answers, expected, strict=True):
            assert answer == right or isinstance(answer, ZeroMemError)
        _remove(path)


def test_a_damaged_trace_is_refused_alone(path: Path) -> None:
    with closing(Record(path)) as record:
        record.add(many(9))
    data = path.read_bytes()
    assert data.count(b"text 5") == 1
    path.write_bytes(data.replace(b"text 5", b"text 7"))
    with closing(Record(path)) as record:
        message = refused(lambda: record.get("b", "t5"))
        assert "backup" in message
        assert "text 7" not in message
        refused(lambda: record.traces_of("b"))
        assert record.get("b", "t4") == many(9)[4]
        assert record.check() == ["trace 6 of the record is not what was stored"]
        record.purge([("b", "t5")])
        assert record.check() == []
        assert len(record.traces_of("b")) == 8


def _remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


# Against a dictionary


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_record_is_a_dictionary_with_a_memory(data: st.DataObject) -> None:
    names = st.sampled_from(["1", "2", "a_", "a%"])
    texts = st.sampled_from(["one", "two", "three"])
    model: dict[tuple[str, str], Trace] = {}
    past: dict[tuple[str, str], list[tuple[str, dict[str, Any] | None]]] = {}
    with closing(Record()) as record:
        for _ in range(data.draw(st.integers(1, 12))):
            boundary, id = key = data.draw(names), data.draw(names)
            trace = Trace(id, boundary, data.draw(texts))
            action = data.draw(st.sampled_from(["add", "overwrite", "update", "delete", "purge"]))
            known, before = key in model, model.get(key)
            same = before is not None and before.text == trace.text
            expected = {
                "add": not known or same,
                "overwrite": True,
                "update": known,
                "delete": known,
                "purge": key in past,
            }[action]
            try:
                if action in ("add", "overwrite"):
                    stored = record.add([trace], overwrite=action == "overwrite")
                    assert len(stored) == (not same)
                elif action == "update":
                    assert record.update(boundary, id, {"text": trace.text})[1] == trace
                elif action == "delete":
                    assert len(record.delete([key])) == 1
                else:
                    assert len(record.purge([key])) == known
            except ZeroMemError:
                assert not expected
                continue
            assert expected
            if action == "purge":
                model.pop(key, None)
                del past[key]
            elif action == "delete":
                del model[key]
                past[key].append(("delete", None))
            elif not same:
                model[key] = trace
                past.setdefault(key, []).append(("update" if known else "add", {"text": trace.text}))
        assert {(trace.boundary, trace.id): trace for _, trace in record.page(0, 99)} == model
        assert record.boundaries() == Counter(boundary for boundary, _ in model)
        for key, changes in past.items():
            told = record.history(*key)
            assert [(one.action, one.after and {"text": one.after["text"]}) for one in told] == changes
            assert [one.before for one in told] == [None, *(one.after for one in told)][: len(told)]
        assert record.check() == []
