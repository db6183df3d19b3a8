"""Every acknowledgement follows its sync: an added trace is on disk before `add` returns, not in the kernel's care."""

from pathlib import Path

from faults.shim import Call, acknowledged, calls_of

ADDED = 5
SCRIPT = """
import os, sys
from pathlib import Path
from zeromem_torch.store import Record, sqlite
from zeromem_torch.substrate.traces import Trace

acknowledgements = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for folder, syncs in ((Path(sys.argv[2]), True), (Path(sys.argv[3]), False)):
    record = Record(folder / "memory.sqlite")
    if not syncs:
        sqlite.driver_of(record._engine).execute("PRAGMA synchronous=OFF")
    for number in range(int(sys.argv[4])):
        record.add([Trace(f"{number}.{turn}", "b", "hello " * 500) for turn in range(3)])
        os.write(acknowledgements, b"done\\n")
    record.update("b", "0.0", {"text": "changed"})
    os.write(acknowledgements, b"done\\n")
    record.delete([("b", "0.0")])
    os.write(acknowledgements, b"done\\n")
    record.purge(keys=[("b", "0.0")])
    os.write(acknowledgements, b"done\\n")
    record.close()
"""


def test_every_acknowledgement_follows_its_sync(tmp_path: Path) -> None:
    acknowledgements, sound, careless = tmp_path / "acknowledged", tmp_path / "sound", tmp_path / "careless"
    sound.mkdir()
    careless.mkdir()

    calls = calls_of(SCRIPT, acknowledgements, sound, careless, str(ADDED), folder=tmp_path)

    def in_record(folder: Path) -> list[frozenset[Path]]:
        """What was not synced before each acknowledgement of this folder; shared memory is no part of the record."""
        seen = acknowledged(calls, acknowledgements, lambda path: path.parent == folder and path.suffix != ".sqlite-shm")
        own = [one for one in seen if one.written]
        assert len(own) == ADDED + 3
        return [one.unsynced for one in own]

    assert not any(in_record(sound))
    assert all(careless / "memory.sqlite-wal" in unsynced for unsynced in in_record(careless)[:ADDED])


def test_the_rule_itself() -> None:
    folder, log, other, told = Path("/m"), Path("/m/log"), Path("/m/new"), Path("/told")
    write, sync, tell = Call("write", log), Call("fsync", log), Call("write", told)

    def unsynced(*calls: Call) -> list[set[Path]]:
        return [set(one.unsynced) for one in acknowledged(calls, told, lambda path: path.parent == folder)]

    assert unsynced(write, sync, tell) == [set()]
    assert unsynced(write, tell, sync, tell) == [{log}, set()]
    assert unsynced(sync, write, tell) == [{log}]
    assert unsynced(Call("create", log), write, sync, tell) == [{folder}]
    assert unsynced(Call("create", log), write, sync, Call("fsync", folder), tell) == [set()]
    assert unsynced(write, sync, Call("rename", log, other), tell) == [{folder}]
    assert unsynced(write, Call("rename", log, other), Call("fsync", folder), tell) == [{other}]
    assert unsynced(Call("write", Path("/elsewhere")), tell) == [set()]
