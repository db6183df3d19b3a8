"""Every acknowledgement follows its sync: an added trace is on disk before `add` returns, not in the kernel's care."""

from collections.abc import Sequence
from pathlib import Path

from faults.shim import Acknowledged, Call, acknowledged, calls_of

ADDED = 5
SCRIPT = """
import os, sys
from pathlib import Path
from zeromem_torch.store import Record, sqlite
from zeromem_torch.substrate.traces import Trace

added, *folders = sys.argv[1:]
for folder in folders:
    record = Record(Path(folder, "memory.sqlite"))
    if folder.endswith("careless"):
        sqlite.driver_of(record._engine).execute("PRAGMA synchronous=OFF")
    told = os.open(folder + ".told", os.O_WRONLY | os.O_CREAT)
    for number in range(int(added)):
        record.add([Trace(f"{number}.{turn}", "b", "hello " * 500) for turn in range(3)])
        os.write(told, b"done")
    record.update("b", "0.0", {"text": "changed"})
    os.write(told, b"done")
    record.delete([("b", "0.0")])
    os.write(told, b"done")
    record.purge(keys=[("b", "0.0")])
    os.write(told, b"done")
    record.close()
"""


def test_every_acknowledgement_follows_its_sync(tmp_path: Path) -> None:
    folders = [tmp_path / "sound", tmp_path / "careless"]
    for folder in folders:
        folder.mkdir()

    calls = calls_of(SCRIPT, str(ADDED), *folders, folder=tmp_path)

    def told(folder: Path) -> Sequence[Acknowledged]:
        def of_the_record(path: Path) -> bool:
            return path.parent == folder and not path.name.endswith("-shm")  # shared memory, made anew at each opening

        return acknowledged(calls, folder.with_suffix(".told"), of_the_record)

    sound, careless = map(told, folders)
    assert len(sound) == len(careless) == ADDED + 3
    assert all(one.written for one in sound)
    assert not any(one.unsynced for one in sound)
    log = folders[1] / "memory.sqlite-wal"
    assert all(log in one.written & one.unsynced for one in careless[: ADDED + 2])


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
