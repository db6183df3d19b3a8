"""Kills a process that writes to a memory, again and again, and looks each time at what it has left.

    python tests/faults/kill_writer.py --points 500

A writer is forked that adds, updates, deletes and purges over several boundaries, with segments so small that the index
is flushed, merged and compacted all the time. It writes down what it is about to do, and again when the call has
returned: from then on it counts as acknowledged. It never stops by itself. SIGKILL ends it somewhere: after a random
time, at a random step of the index's files (before it, half-way through it, behind it), at a random statement of the
record's database or inside one. Then the memory is opened, as by the next process, and held against a plain model.

What counts as lost: a trace of an acknowledged call that is not there as it was given or that no search finds, a
deleted one that is, a byte of a purged one in any file. As unhealed: a memory that does not open, that `verify` finds
something wrong with, or in which the call that was cut short is done by half.

The same seed draws the same work and the same kills at steps; kills after a time fall where the machine lets them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read once, when torch and numpy are imported
        os.environ[variable] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sqlite3

import torch
from toys import RULES, HashEncoder, memory_of

from zeromem_torch import disk, keeper
from zeromem_torch.index import Segments
from zeromem_torch.library import ZeroMem
from zeromem_torch.store import sqlite
from zeromem_torch.substrate.traces import Trace

Key = tuple[str, str]
Operation = Mapping[str, Any]

BOUNDARIES = ("acme", "acme-corp", "acme/alice", "a_b", "作業")
WORDS = ("kestrel", "lantern", "harbour", "violin", "orchard", "granite", "saffron", "meadow", "copper", "glacier")
FOLDER_LIFE = 25  # points in one folder, about
MOST_TRACES = 200
PATIENCE = 60.0  # seconds until a writer that should have died at a step is taken for stuck
STEPS = ("write", "replace", "sync", "unlink")  # of the index, between which a crash can fall
VM_STEPS = 25  # instructions of a statement between two places where it may be cut short


# What should be there


@dataclass
class Model:
    """What the memory should hold; ``said`` is all that ever stood under a key and was not purged."""

    live: dict[Key, Trace] = field(default_factory=dict)
    said: dict[Key, list[Trace]] = field(default_factory=dict)
    purged: list[Trace] = field(default_factory=list)  # since the files were looked through last

    def copy(self) -> Model:
        return Model(dict(self.live), {key: list(own) for key, own in self.said.items()}, list(self.purged))

    def after(self, operation: Operation) -> Model:
        """What it should hold once the operation is done."""
        new = self.copy()
        match operation["do"]:
            case "add":
                for mapping in operation["traces"]:
                    new._put(Trace.from_dict(mapping))
            case "update":
                new._put(replace(self.live[_key(operation)], **operation["changes"]))
            case "delete" | "delete_all":
                for key in self.meant(operation):
                    new.live.pop(key, None)
                    if operation["purge"]:
                        new.purged += new.said.pop(key)
        return new

    def meant(self, operation: Operation) -> list[Key]:
        """Keys that an operation removes."""
        if operation["do"] == "delete":
            return [_key(operation)]
        held: Mapping[Key, object] = self.said if operation["purge"] else self.live
        asked = operation["boundary"]
        if asked.endswith("/"):
            return [key for key in held if f"{key[0]}/".startswith(asked)]
        return [key for key in held if key[0] == asked]

    def _put(self, trace: Trace) -> None:
        key = trace.boundary, trace.id
        self.live[key] = trace
        self.said.setdefault(key, []).append(trace)


def _key(operation: Operation) -> Key:
    boundary, id = operation["key"]
    return boundary, id


# The writer


def carry_out(memory: ZeroMem, operation: Operation) -> None:
    """Do an operation; when this returns, it is acknowledged."""
    match operation["do"]:
        case "add":
            memory.add(operation["traces"], overwrite=operation["overwrite"])
        case "update":
            boundary, id = _key(operation)
            memory.update(id, boundary=boundary, **operation["changes"])
        case "delete":
            boundary, id = _key(operation)
            memory.delete(id, boundary=boundary, purge=operation["purge"])
        case "delete_all":
            memory.delete_all(boundary=operation["boundary"], purge=operation["purge"])
        case "search":
            memory.search(operation["query"], boundary=operation["boundary"])
        case "rebuild":
            memory.rebuild()


def draw(model: Model, draws: random.Random) -> Operation:
    """Something to do with a memory that holds what the model says."""
    live, gone = list(model.live), [key for key in model.said if key not in model.live]
    kinds = {"add": 40, "batch": 12, "again": 6, "update": 14, "metadata": 4, "delete": 10, "purge": 5, "search": 5}
    kinds |= {"all": 2, "purge all": 1, "rebuild": 1, "purge gone": 3}
    if len(live) > MOST_TRACES:
        kinds = {"all": 1, "purge all": 1}
    if not live:
        kinds = {"add": 1, "batch": 1}
    (kind,) = draws.choices(list(kinds), list(kinds.values()))
    boundary, id = draws.choice(live) if live else ("", "")
    match kind:
        case "add":
            return {"do": "add", "traces": [_new(draws)], "overwrite": False}
        case "batch":
            return {"do": "add", "traces": [_new(draws) for _ in range(draws.randint(2, 20))], "overwrite": False}
        case "again":  # one that is there as it is, one that is there with another text, one that is new
            there, changed = model.live[boundary, id].to_dict(), model.live[draws.choice(live)].to_dict()
            traces = [there, _new(draws)]
            if (changed["boundary"], changed["id"]) != (boundary, id):
                traces.append(changed | {"text": _text(draws)})
            return {"do": "add", "traces": traces, "overwrite": True}
        case "update":
            return {"do": "update", "key": (boundary, id), "changes": {"text": _text(draws)}}
        case "metadata":
            return {"do": "update", "key": (boundary, id), "changes": {"metadata": {"seen": draws.randint(0, 9)}}}
        case "search":
            return {"do": "search", "query": _text(draws), "boundary": boundary}
        case "all" | "purge all":
            asked = draws.choice([boundary, f"{boundary.split('/')[0]}/"])
            return {"do": "delete_all", "boundary": asked, "purge": kind == "purge all"}
        case "rebuild":
            return {"do": "rebuild"}
        case "purge gone" if gone:
            return {"do": "delete", "key": draws.choice(gone), "purge": True}
    return {"do": "delete", "key": (boundary, id), "purge": kind.startswith("purge")}


def _new(draws: random.Random) -> dict[str, Any]:
    trace: dict[str, Any] = {"id": f"{draws.getrandbits(48):012x}", "boundary": draws.choice(BOUNDARIES)}
    trace["text"] = _text(draws)
    if draws.random() < 0.5:
        trace |= {"session": f"s{draws.randint(0, 3)}", "order": draws.randint(0, 99), "speaker": draws.choice("AB")}
        trace |= {"time": 1683554160 + draws.randint(0, 10**7)}
    return trace


def _text(draws: random.Random) -> str:
    """A few common words, and one that no other text has."""
    return f"{' '.join(draws.choices(WORDS, k=draws.randint(3, 9)))} q{draws.getrandbits(40):010x}."


def write_until_killed(folder: Path, log: Path, model: Model, draws: random.Random, trap: Trap) -> NoReturn:
    """The writer's whole life; what it does is in the log, a line before and one behind it."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with trap.set():
        while True:
            with opened(folder) as memory:
                for _ in range(draws.randint(5, 60)):  # then it is closed and opened again
                    operation = draw(model, draws)
                    os.write(said, f"{json.dumps(operation)}\n".encode())
                    carry_out(memory, operation)
                    os.write(said, b"done\n")
                    model = model.after(operation)


def told(log: Path) -> tuple[list[Operation], Operation | None]:
    """The operations that were acknowledged, and the one that was cut short."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []  # what has no end of line was not begun
    operations = [json.loads(line) for line in lines if line != b"done"]
    acknowledged = lines.count(b"done")
    return operations[:acknowledged], operations[acknowledged] if len(operations) > acknowledged else None


@dataclass
class Trap:
    """Where the writer is killed: at its ``left``-th step of a kind, by itself, or after ``delay`` by its parent."""

    kind: str  # "clock", "index", "statement", "in a statement"
    left: int = 0
    delay: float = 0.0

    @classmethod
    def drawn(cls, draws: random.Random) -> Trap:
        (kind,) = draws.choices(("clock", "index", "statement", "in a statement"), (4, 4, 2, 2))
        most = {"index": 90, "statement": 150, "in a statement": 900}.get(kind, 0)
        return cls(kind, draws.randint(0, most), draws.uniform(0.0, 0.5))

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def set(self) -> Iterator[None]:
        """Put it in the way of this process."""
        if self.kind == "clock":
            yield
        elif self.kind == "index":
            steps = {name: self._around(name, getattr(disk, name)) for name in STEPS}
            with patch.dict(vars(disk), steps):
                yield
        else:
            with patch.object(sqlite, "connect", self._watched(sqlite.connect)):
                yield

    def _around(self, name: str, do: Callable[..., None]) -> Callable[..., None]:
        def stepped(*args: Any) -> None:
            self.step()
            if name == "write":
                path, data = args
                path.write_bytes(data[: len(data) // 2])
                self.step()
            do(*args)
            self.step()

        return stepped

    def _watched(self, connect: Callable[..., sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
        def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
            connection = connect(*args, **kwargs)
            if self.kind == "statement":
                connection.set_trace_callback(lambda _: self.step())
            else:
                connection.set_progress_handler(self.step, VM_STEPS)
            return connection

        return connected


def opened(folder: Path) -> ZeroMem:
    """The memory, with segments of a few rows."""
    small = partial(Segments, flush_rows=8, largest=1 << 17)
    with patch.object(keeper, "Segments", small):
        return ZeroMem.open(folder, encoder=HashEncoder(), config=RULES)


def run_writer(folder: Path, log: Path, model: Model, draws: random.Random, trap: Trap) -> bool:
    """Fork a writer and see it die; False if it ended in another way than by SIGKILL."""
    writer = os.fork()
    if not writer:
        try:
            write_until_killed(folder, log, model, draws, trap)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if trap.kind == "clock":
        time.sleep(trap.delay)
        os.kill(writer, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while True:
        ended, status = os.waitpid(writer, os.WNOHANG)
        if ended:
            return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if time.monotonic() > deadline:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            return False
        time.sleep(0.002)


# What is there


@dataclass
class Found:
    """What is wrong with a memory that was opened again, and what it should hold from now on."""

    model: Model
    lost: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)


def examine(folder: Path, before: Model, operation: Operation | None, draws: random.Random) -> Found:
    """Open what a killed writer has left. The operation that was cut short may be done, or not done."""
    found = Found(before)
    after = before.after(operation) if operation else before
    found.lost += remains(folder, before.purged, "when it was killed")
    try:
        with opened(folder) as memory:
            _compare(memory, before, after, operation, found)
            found.lost += _not_found(memory, found.model, draws)
            found.unhealed += memory.verify().problems
            found.lost += remains(folder, found.model.purged, "after opening")
    except Exception as error:
        traceback.print_exc()
        found.unhealed.append(f"{type(error).__name__}: {error}")
    return found


def _compare(memory: ZeroMem, before: Model, after: Model, operation: Operation | None, found: Found) -> None:
    held = {(trace.boundary, trace.id): trace for trace in memory.list(limit=None)}
    for key in dict.fromkeys([*held, *before.live, *after.live]):
        if held.get(key) not in (before.live.get(key), after.live.get(key)):
            there = "is not there" if key not in held else "is not as it was given" if key in before.live else "is back"
            found.lost.append(f"trace {key} {there}")
    if operation and operation.get("purge"):  # of traces that were deleted before, only the history tells
        entries = [memory.history(id, boundary=boundary) for boundary, id in before.meant(operation)]
        done = not any(entries)
        half = not done and not all(entries)
    else:
        done = held == after.live
        half = not done and held != before.live
    if half and not found.lost:
        found.unhealed.append(f"half of it was done: {operation}")
    found.model = after if done else before


def _not_found(memory: ZeroMem, model: Model, draws: random.Random) -> list[str]:
    """Traces that a search for anything does not show, or should not, or that are not the best for what they say."""
    ids: dict[str, set[str]] = {}
    for boundary, id in model.live:
        ids.setdefault(boundary, set()).add(id)
    asked = [(_text(draws), boundary, "") for boundary in ids]
    asked += [(model.live[key].text, *key) for key in draws.sample(list(model.live), min(8, len(model.live)))]
    queries, boundaries = [query for query, *_ in asked], [boundary for _, boundary, _ in asked]
    wrong = []
    answers = memory.search_batch(queries, boundaries=boundaries, top_k=len(model.live) + 1) if asked else []
    for (_, boundary, best), evidence in zip(asked, answers, strict=True):
        shown = [item.trace_id for item in evidence.main]
        wrong += [f"trace {(boundary, id)} is not found" for id in ids[boundary].difference(shown)]
        wrong += [f"trace {(boundary, id)} is found" for id in shown if id not in ids[boundary]]
        if best and shown[:1] != [best]:
            wrong.append(f"trace {(boundary, best)} is not the best for what it says")
    return wrong


def remains(folder: Path, purged: Sequence[Trace], when: str) -> list[str]:
    """What the files of a folder hold of purged traces: the words that only they had, and their digests."""
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    wrong = []
    for trace in purged:
        marks = [trace.text.split()[-1].encode()]
        marks += [trace.digest.to_bytes(8, order) for order in ("little", "big")]  # as a tensor, as SQLite's integer
        wrong += [
            f"trace {(trace.boundary, trace.id)} was purged, and {path.name} has bytes of it {when}"
            for path, data in files.items()
            if any(mark in data for mark in marks)
        ]
    return wrong


# The run


@dataclass
class Score:
    points: int = 0
    acknowledged: int = 0
    lost: int = 0
    unhealed: int = 0


def run(points: int, seed: int, where: Path) -> Score:
    """Kill writers in folders below ``where``; one in which nothing went wrong is removed."""
    score = Score()
    where.mkdir(parents=True, exist_ok=True)
    model, folder = Model(), where / "memory-0"
    attempts = 0
    while score.points < points:
        attempts += 1
        draws = random.Random(f"{seed}/{attempts}")
        trap = Trap.drawn(draws)
        log = where / f"writer-{attempts}.log"
        killed = run_writer(folder, log, model, draws, trap)
        acknowledged, cut_short = told(log)
        if not killed:
            raise SystemExit(f"the writer ended by itself, or got stuck; what it did is in {log}")
        for operation in acknowledged:
            score.acknowledged += _size(model, operation)
            model = model.after(operation)
        found = examine(folder, model, cut_short, draws)
        model = replace(found.model, purged=[])  # what no file holds any more does not come back
        score.points += 1
        score.lost += len(found.lost)
        score.unhealed += bool(found.unhealed)
        for problem in (*found.lost, *found.unhealed):
            _tell(f"point {score.points} ({trap}), {folder}, {log.name}: {problem}")
        sound = not (found.lost or found.unhealed)
        if sound:
            log.unlink(missing_ok=True)
        if not sound or draws.random() < 1 / FOLDER_LIFE:
            if sound:
                shutil.rmtree(folder, ignore_errors=True)
            model, folder = Model(), where / f"memory-{attempts}"
        if score.points % 25 == 0 or score.points == points:
            _tell(f"{score.points} of {points} points, {score.acknowledged} acknowledged, {score.lost} lost")
    shutil.rmtree(folder, ignore_errors=True)
    return score


def _size(model: Model, operation: Operation) -> int:
    """Traces that an operation writes or removes."""
    match operation["do"]:
        case "add":
            return len(operation["traces"])
        case "update":
            return 1
        case "delete" | "delete_all":
            return len(model.meant(operation))
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=f"{about}\n\n{rest}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=500, metavar="N", help="kills (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="decides the work and the kills at steps (default 0)")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="make the memories here, where those with something wrong stay, with the writer's log (default: a "
        "temporary folder, removed at the end)",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fork copies one thread only
    memory_of({"id": "1", "boundary": "a", "text": "warm"}).search("warm", boundary="a")  # import all that it takes
    with tempfile.TemporaryDirectory(prefix="zeromem-kill-") as temporary:
        score = run(args.points, args.seed, args.folder or Path(temporary))
    print(json.dumps(vars(score)))
    return 1 if score.lost or score.unhealed else 0


if __name__ == "__main__":
    sys.exit(main())
