"""What a process asks of the disk, call by call, and the rule that an acknowledgement comes behind the syncs it needs.

A killed process loses nothing that it has handed to the kernel, so killing it says nothing about a power cut. Here the
calls themselves are read: `shim.c`, preloaded into a child, writes them down in their order.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Call:
    """One that changed a file or a folder, or synced one; `target` is the new name of a rename."""

    name: str
    path: Path
    target: Path | None = None


@dataclass(frozen=True)
class Acknowledged:
    """What stood before an acknowledgement, and behind the one before it."""

    written: frozenset[Path]
    unsynced: frozenset[Path]  # also from before; a folder, where a new name in it is not on disk


def calls_of(script: str, *arguments: str | Path, folder: Path) -> list[Call]:
    """Run a Python script in a child, and give the calls it made; the test is skipped where that cannot be done."""
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("reading the calls of a process needs Linux and a C compiler")
    library, log = folder / "shim.so", folder / "calls.log"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    preloaded = {"LD_PRELOAD": str(library), "FILE_CALLS": str(log), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | preloaded, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    return [Call(name, *map(Path, paths)) for name, *paths in (line.split("\t") for line in lines)]


def acknowledged(
    calls: Iterable[Call], acknowledgements: Path, watched: Callable[[Path], bool]
) -> Sequence[Acknowledged]:
    """What each write to the file of acknowledgements stands behind, of the files that are watched."""
    found: list[Acknowledged] = []
    written: set[Path] = set()
    unsynced: set[Path] = set()
    for call in calls:
        name = call.target or call.path
        if name == acknowledgements:
            if call.name != "create":
                found.append(Acknowledged(frozenset(written), frozenset(unsynced)))
                written.clear()
        elif call.name in ("fsync", "fdatasync"):
            unsynced.discard(name)
        elif watched(name):
            written.add(name)
            if call.name in ("create", "rename"):
                unsynced.add(name.parent)
            if call.name != "rename" or call.path in unsynced:
                unsynced.add(name)
            if call.name == "rename":
                unsynced.discard(call.path)
    return found
