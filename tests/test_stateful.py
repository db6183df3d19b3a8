"""The life of a memory: whatever is done to it, in any order, it holds and finds what a plain list would.

`python tests/test_stateful.py 2000` lives that many longer lives, drawn anew each time.
"""

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from faults.kill_writer import remains
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from toys import RULES, HashEncoder, memory_of, same_evidence

from zeromem_torch import keeper, memories
from zeromem_torch.evidence import Evidence
from zeromem_torch.index import Segments
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.traces import Trace, ZeroMemError

Fields = dict[str, Any]
Key = tuple[str, str]
Asked = str | Sequence[str]

NEIGHBOURS = (  # what a careless comparison takes for one, or for part of another
    ("a", "A", "a_b", "a%", "a/b"),
    ("acme", "acme-corp", "acme/x", "acme/x/y", "acme "),
    ("🚢", "🚢/x", "שלום", "*", "'; --"),
)
IDS = ("1", "2", "%", "_", "a/1", "'; --")
WORDS = ("kestrel", "lantern", "harbour", "violin", "orchard", "granite")
NOON = datetime(2024, 1, 10, 12, tzinfo=UTC)
IMMUTABLE = ("session", "order", "speaker", "role")
LIMITS = ("valid_from", "valid_to", "expires_at")

homes = st.runner().flatmap(lambda life: st.sampled_from(life.homes))
days = st.integers(-9, 9).map(lambda number: NOON + timedelta(days=number))
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
limits = st.dictionaries(st.sampled_from(LIMITS), st.none() | days, max_size=2)
said = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "title": st.sampled_from(["", "Granite"]),
        "time": st.none() | days,
        "metadata": st.dictionaries(st.sampled_from("kn"), st.sampled_from(["x", 1, True]), max_size=2),
    },
)
changes = said | st.builds(lambda some, more: {**some, **more}, said, limits)
provenance = st.fixed_dictionaries(
    {},
    optional={
        "session": st.sampled_from(["", "s", "t"]),
        "order": st.integers(0, 3),
        "speaker": st.sampled_from(["", "Ann", "Bo"]),
        "role": st.sampled_from(["", "user", "document"]),
    },
)
keys = st.fixed_dictionaries({"boundary": homes, "id": st.sampled_from(IDS), "text": texts})
given = st.builds(lambda key, said, rest: {**rest, **said, **key}, keys, provenance, changes)
many = st.lists(given, min_size=6, max_size=16, unique_by=lambda fields: (fields["boundary"], fields["id"]))
paths = homes | homes.map(lambda name: f"{name}/")
scopes = paths | st.lists(paths, min_size=1, max_size=4)
each = {
    "session": st.sampled_from(["s", ["s", "t"]]),
    "speaker": st.sampled_from(["Ann", ["Ann", "Bo"]]),
    "role": st.just("user"),
    "after": days,
    "before": days,
    "metadata": st.sampled_from([{"k": "x"}, {"n": 1}, {"n": True}, {"k": 1, "n": "x"}]),
}
filters = st.none() | st.one_of(*(st.fixed_dictionaries({name: each[name]}) for name in each))
filters |= st.fixed_dictionaries({}, optional=each)


def names(asked: Asked) -> list[str]:
    return [asked] if isinstance(asked, str) else list(asked)


def within(boundary: str, asked: Asked) -> bool:
    return any(f"{boundary}/".startswith(name) if name.endswith("/") else boundary == name for name in names(asked))


def passes(entry: Fields, filters: Mapping[str, Any] | None) -> bool:
    for name, wanted in (filters or {}).items():
        if name in ("after", "before"):
            time = entry.get("time")
            if time is None or (time < wanted if name == "after" else time >= wanted):
                return False
        elif name == "metadata":
            held = entry.get("metadata", {})
            if not all(key in held and (type(held[key]), held[key]) == (type(v), v) for key, v in wanted.items()):
                return False
        elif entry.get(name, "") not in ([wanted] if isinstance(wanted, str) else wanted):
            return False
    return True


def holds(entry: Fields, as_of: datetime | None, now: datetime) -> bool:
    moment = as_of or now
    begins, ends, gone = (entry.get(name) for name in LIMITS)
    known = as_of is None or (entry.get("time") or entry["added_at"]) <= moment
    return known and (begins is None or begins <= moment) and all(end is None or moment < end for end in (ends, gone))


def trace(entry: Fields) -> Trace:
    return Trace(**{name: value for name, value in entry.items() if value is not None})


def differences(one: Trace, other: Trace) -> list[str]:
    return [f.name for f in dataclasses.fields(one) if f.compare and getattr(one, f.name) != getattr(other, f.name)]


class Life(RuleBasedStateMachine):
    """A memory on disk beside a list of dicts, in order of arrival, that holds the same."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="zeromem-life-"))
        self.now = NOON
        self.homes: tuple[str, ...] = NEIGHBOURS[0]
        self.list: list[Fields] = []
        self.changes: dict[Key, list[tuple[str, Fields | None, Fields | None]]] = {}
        self.purged: list[Trace] = []
        self.told = 0
        small = partial(Segments, flush_rows=8, largest=1 << 16, background=False)
        self.patches = ExitStack()
        self.patches.enter_context(patch.object(keeper, "Segments", small))
        self.patches.enter_context(patch.object(memories, "utc_now", lambda: self.now))
        self.memory = self.opened()

    def opened(self, **rest: Any) -> ZeroMem:
        return ZeroMem.open(self.folder / "memory", encoder=HashEncoder(), config=RULES, **rest)

    def teardown(self) -> None:
        try:
            report = self.memory.verify()
            assert report.ok, report
            assert not remains(self.folder, self.purged, "at the end")
            self.memory.close()
        finally:
            self.patches.close()
            shutil.rmtree(self.folder)

    # What the list says

    def find(self, boundary: str, id: str) -> Fields | None:
        return next((entry for entry in self.list if (entry["boundary"], entry["id"]) == (boundary, id)), None)

    def unique(self, text: str) -> str:
        """The text with a word that no other text has."""
        self.told += 1
        return f"{text} u{self.told:06d}."

    def seen(self, asked: Asked, given: Mapping[str, Any] | None = None, as_of: datetime | None = None) -> list[Fields]:
        return [
            entry
            for entry in self.list
            if within(entry["boundary"], asked) and passes(entry, given) and holds(entry, as_of, self.now)
        ]

    def put(self, wanted: Sequence[Fields], overwrite: bool) -> bool:
        """Take entries in, or refuse them all."""
        new: dict[Key, Fields] = {}
        for fields in wanted:
            key = fields["boundary"], fields["id"]
            held = new.get(key) or self.find(*key)
            differing = [] if held is None else differences(trace(held), trace(fields))
            if (differing and not overwrite) or set(differing) & set(IMMUTABLE):
                return False
            new[key] = dict(fields)
        for key, fields in new.items():
            there = self.find(*key)
            if there is None:
                self.list.append(fields)
                self.changes.setdefault(key, []).append(("add", None, dict(fields)))
            elif trace(there) != trace(fields):
                was = dict(there)
                there.clear()
                there.update(fields, added_at=was["added_at"])
                self.changes[key].append(("update", was, dict(fields)))
        return True

    def drop(self, gone: Sequence[Fields], purge: bool) -> None:
        for entry in gone:
            self.list.remove(entry)
            if not purge:
                self.changes[entry["boundary"], entry["id"]].append(("delete", dict(entry), None))

    def forget(self, key: Key) -> None:
        for _, before, after in self.changes.pop(key):
            self.purged += [trace(fields) for fields in (before, after) if fields]

    @contextmanager
    def refused(self, if_so: bool) -> Iterator[None]:
        if not if_so:
            yield
            return
        with pytest.raises(ZeroMemError) as error:
            yield
        said = str(error.value)
        assert not [entry for entry in self.list if entry["text"].split()[-1] in said], "an error quotes what is stored"

    # What is done to it

    def add(self, wanted: Sequence[Fields], overwrite: bool) -> None:
        taken = self.put(wanted, overwrite)
        with self.refused(not taken):
            assert self.memory.add(wanted, overwrite=overwrite) == [fields["id"] for fields in wanted]
        for entry in self.list:
            if "added_at" not in entry:
                entry["added_at"] = self.memory.get(entry["id"], boundary=entry["boundary"]).added_at

    @initialize(homes=st.sampled_from(NEIGHBOURS))
    def settle(self, homes: tuple[str, ...]) -> None:
        self.homes = homes

    @precondition(lambda self: len(self.list) < 10)
    @rule(wanted=many)
    def add_many(self, wanted: list[Fields]) -> None:
        self.add_some([fields for fields in wanted if not self.find(fields["boundary"], fields["id"])], False)

    @rule(wanted=st.lists(given, min_size=1, max_size=3), overwrite=st.booleans())
    def add_some(self, wanted: list[Fields], overwrite: bool) -> None:
        told = [{**fields, "text": self.unique(fields["text"])} for fields in wanted]
        valid = [fields for fields in told if not _upside_down(fields)]
        if len(valid) == len(told):
            self.add(told, overwrite)
        else:
            with self.refused(True):
                self.memory.add(told, overwrite=overwrite)

    @precondition(lambda self: self.list)
    @rule(data=st.data(), overwrite=st.booleans(), also=given)
    def add_again(self, data: st.DataObject, overwrite: bool, also: Fields) -> None:
        """One that is there, as it is or with some field changed, and another behind it."""
        entry = data.draw(st.sampled_from(self.list))
        other: Fields = data.draw(st.one_of(st.just(Fields()), changes, provenance))
        same = {name: value for name, value in entry.items() if name != "added_at"}
        changed = {**same, **other}
        if "text" in other:
            changed["text"] = self.unique(other["text"])
        also["text"] = self.unique(also["text"])
        if not _upside_down(changed) and not _upside_down(also):
            self.add([changed, also], overwrite)

    @precondition(lambda self: self.list)
    @rule(data=st.data(), changes=changes)
    def update(self, data: st.DataObject, changes: Fields) -> None:
        entry = data.draw(st.sampled_from(self.list))
        if "text" in changes:
            changes["text"] = self.unique(changes["text"])
        changed = {**entry, **changes}
        with self.refused(_upside_down(changed)):
            updated = self.memory.update(entry["id"], boundary=entry["boundary"], **changes)
            assert updated == trace(changed)
            self.put([changed], True)

    @rule(boundary=homes, id=st.sampled_from(IDS), purge=st.booleans(), named=st.booleans())
    def delete(self, boundary: str, id: str, purge: bool, named: bool) -> None:
        homes = [boundary] if named else [entry["boundary"] for entry in self.list if entry["id"] == id]
        if not homes and purge:  # the history may still know it
            homes = [own for own, its_id in self.changes if its_id == id]
        there = [entry for home in homes if (entry := self.find(home, id))]
        known = len(homes) == 1 and bool(there or (purge and (homes[0], id) in self.changes))
        with self.refused(not known):
            self.memory.delete(id, boundary=boundary if named else None, purge=purge)
            self.drop(there, purge)
            if purge:
                self.forget((homes[0], id))
        if purge:
            assert not remains(self.folder, self.purged, "when it was purged")

    @precondition(lambda self: self.list)
    @rule(data=st.data(), purge=st.booleans())
    def delete_one_that_is_there(self, data: st.DataObject, purge: bool) -> None:
        entry = data.draw(st.sampled_from(self.list))
        self.delete(entry["boundary"], entry["id"], purge, True)

    @precondition(lambda self: len(self.list) > 10)
    @rule(asked=scopes, purge=st.booleans())
    def delete_all(self, asked: Asked, purge: bool) -> None:
        gone = [entry for entry in self.list if within(entry["boundary"], asked)]
        assert self.memory.delete_all(boundary=asked, purge=purge) == len(gone)
        self.drop(gone, purge)
        if purge:
            for key in [key for key in self.changes if within(key[0], asked)]:
                self.forget(key)
            assert not remains(self.folder, self.purged, "when it was purged")

    @rule(hours=st.integers(1, 100))
    def time_passes(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @rule(budget=st.sampled_from([None, 1 << 14]), closed=st.booleans())
    def open_again(self, budget: int | None, closed: bool) -> None:
        if closed:
            self.memory.close()
        else:  # as if killed: the index has not written what it holds in memory
            self.memory._record.close()
            assert self.memory._held is not None
            self.memory._held.release()
        self.memory = self.opened(memory_budget=budget)
        assert self.memory.notes == []
        report = self.memory.verify(quick=True)
        assert report.ok, report

    @rule(what=st.sampled_from([ZeroMem.release_memory, ZeroMem.rebuild, ZeroMem.verify, ZeroMem.stats]))
    def do_what_changes_nothing(self, what: Callable[[ZeroMem], Any]) -> None:
        what(self.memory)

    # What is asked of it

    @rule(asked=st.none() | scopes, limit=st.integers(1, 9))
    def list_by_pages(self, asked: Asked | None, limit: int) -> None:
        expected = [trace(entry) for entry in self.list if asked is None or within(entry["boundary"], asked)]
        found: list[Trace] = []
        cursor = None
        while True:
            page = self.memory.list(boundary=asked, cursor=cursor, limit=limit)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page) == limit
        assert found == expected
        assert list(self.memory.list(boundary=asked, limit=None)) == expected

    @precondition(lambda self: self.changes)
    @rule(data=st.data())
    def look_up_what_was(self, data: st.DataObject) -> None:
        self.look_up(*data.draw(st.sampled_from(sorted(self.changes))))

    @rule(boundary=homes, id=st.sampled_from(IDS))
    def look_up(self, boundary: str, id: str) -> None:
        entry = self.find(boundary, id)
        with self.refused(entry is None):
            assert entry is None or self.memory.get(id, boundary=boundary) == trace(entry)
            assert entry is not None or self.memory.get(id, boundary=boundary)
        homes = [own for own in self.list if own["id"] == id]
        with self.refused(len(homes) != 1):
            assert self.memory.get(id) == trace(homes[0] if homes else {})
        entries = [
            (change.action, *(part and Trace.from_dict(part) for part in (change.before, change.after)))
            for change in self.memory.history(id, boundary=boundary)
        ]
        assert entries == [
            (action, *(part and trace(part) for part in parts))
            for action, *parts in self.changes.get((boundary, id), [])
        ]

    @rule(asked=scopes, given=filters, as_of=st.none() | days, query=texts, top_k=st.integers(1, 4))
    def search(
        self, asked: Asked, given: Mapping[str, Any] | None, as_of: datetime | None, query: str, top_k: int
    ) -> None:
        """Finds what passes, all of it if asked for, ranked as in a memory that holds nothing else."""
        seen = self.seen(asked, given, as_of)
        found = self.memory.search(query, boundary=asked, filters=given, as_of=as_of, top_k=len(seen) + 1)
        assert sorted(keys_of(found.main)) == sorted(keys_in(seen))
        few = self.memory.search(query, boundary=asked, filters=given, as_of=as_of, top_k=top_k)
        assert keys_of(few.main) == keys_of(found.main)[:top_k]
        assert set(keys_of(few.items)) <= set(keys_of(found.main))
        if seen:
            bare = [trace({**entry, **dict.fromkeys(LIMITS)}) for entry in seen]
            alone = memory_of(*bare).search(query, boundary=asked, reference_time=as_of, top_k=len(seen) + 1)
            same_answer(found, alone)

    @precondition(lambda self: self.list)
    @rule(data=st.data())
    def search_for_what_was_said(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.list))
        found = self.memory.search(entry["text"], boundary=entry["boundary"])
        if holds(entry, None, self.now):
            assert found.main[0].trace_id == entry["id"]
            assert found.main[0].text in entry["text"]
        assert {item.boundary for item in found} <= {entry["boundary"]}

    @rule(asked=st.lists(st.tuples(texts, scopes), min_size=1, max_size=4), given=filters)
    def search_together(self, asked: list[tuple[str, Asked]], given: Mapping[str, Any] | None) -> None:
        queries, boundaries = [query for query, _ in asked], [scope for _, scope in asked]
        together = self.memory.search_batch(queries, boundaries=boundaries, filters=given)
        for query, boundary, found in zip(queries, boundaries, together, strict=True):
            same_answer(found, self.memory.search(query, boundary=boundary, filters=given))

    @rule(asked=scopes)
    def read_it_elsewhere(self, asked: Asked) -> None:
        with self.opened(read_only=True) as reader:
            assert list(reader.list(limit=None)) == [trace(entry) for entry in self.list]
            found = reader.search("granite", boundary=asked, top_k=99)
            assert sorted(keys_of(found.main)) == sorted(keys_in(self.seen(asked)))

    @invariant()
    def it_counts_right(self) -> None:
        assert len(self.memory) == len(self.list)
        assert sorted(self.memory.boundaries) == sorted({entry["boundary"] for entry in self.list})


def _upside_down(fields: Fields) -> bool:
    """Whether it ends before it begins."""
    begins, ends = fields.get("valid_from"), fields.get("valid_to")
    return begins is not None and ends is not None and ends <= begins


def same_answer(one: Evidence, other: Evidence) -> None:
    """The label is left out: it names boundaries too of which nothing passed."""
    same_evidence(dataclasses.replace(one, boundary=""), dataclasses.replace(other, boundary=""))


def keys_in(entries: Sequence[Fields]) -> list[Key]:
    return [(entry["boundary"], entry["id"]) for entry in entries]


def keys_of(items: Sequence[Any]) -> list[Key]:
    return [(item.boundary, item.trace_id) for item in items]


SHORT = settings(
    max_examples=50,
    stateful_step_count=40,
    derandomize=True,
    phases=[Phase.generate],  # to shrink a failure takes minutes
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


TestLife = Life.TestCase
TestLife.settings = SHORT


if __name__ == "__main__":
    lives = int(sys.argv[1])
    longer = settings(SHORT, max_examples=lives, stateful_step_count=60, derandomize=False, phases=list(Phase))
    run_state_machine_as_test(Life, settings=longer)
