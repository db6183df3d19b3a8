"""The folder that a memory lives in: what lies there, which process writes there, what a copy of it needs beside record
and index, and what is purged from its logs."""

import json
import os
import shutil
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from zeromem_torch.errors import ZeroMemError

RECORD = "memory.sqlite"
INDEX = "index"
LOGS = "logs"
WRITER = "writer.json"
KEYS = "keys.json"
"""Who may ask a server for what; there is none until a first key is made, and without it a server is open."""


def check_record(path: Path, *, read_only: bool) -> None:
    """Refuse a folder whose record is missing, where none may be made."""
    if (path / RECORD).exists():
        return
    if read_only:
        raise ZeroMemError.of("path", "a folder that holds a memory", str(path), "open it for writing to make one")
    if (path / INDEX / "manifest.json").exists():
        advice = "restore it from a backup; to begin anew, remove the folder's index too"
        raise ZeroMemError.of("path", f"the record {RECORD} beside its index", "no such file", advice)


def hold(path: Path) -> FileLock:
    """Be the one process that writes here; the lock goes with the process, however it ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / "lock", timeout=0)
        lock.acquire()
    except Timeout:
        try:
            who = json.loads((path / WRITER).read_text())
            holder = f"one that process {who['pid']} has open since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            holder = "one that another process has open"
        advice = (
            "end that process first, or, if it is `zeromem serve`, write through it (zeromem_torch.serving.client); to "
            "read beside it from Python, pass read_only=True"
        )
        raise ZeroMemError.of(f"memory {path}", "one that nobody else writes to", holder, advice) from None
    except OSError as error:
        advice = f"name another ({error})"
        raise ZeroMemError.of("path", "a folder that can be written to", str(path), advice) from error
    started = {"pid": os.getpid(), "since": datetime.now().astimezone().isoformat(timespec="seconds")}
    (path / WRITER).write_text(json.dumps(started))
    return lock


def let_go(path: Path, lock: FileLock) -> None:
    (path / WRITER).unlink(missing_ok=True)
    lock.release()


def new_folder(path: Path) -> None:
    """Make a folder for a copy, or take an empty one."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ZeroMemError.of("path", "a new or empty folder", str(path), "name another")
    path.mkdir(parents=True, exist_ok=True)


def copy_keys(path: Path, target: Path) -> None:
    """Before anything else of a copy: at no moment is it more open than what it copies."""
    try:
        content = (path / KEYS).read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        advice = f"copy as the user who serves the memory: a copy without its keys would be open to all ({error})"
        raise ZeroMemError.of("keys", "a file that can be read", str(path / KEYS), advice) from error
    with os.fdopen(os.open(target / KEYS, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def copy_logs(path: Path, target: Path) -> None:
    """After the record: what was purged before it was copied stands in no log of the copy either."""
    if (path / LOGS).is_dir():
        (target / LOGS).mkdir()
        for log_file in (path / LOGS).glob("*.jsonl"):
            shutil.copyfile(log_file, target / LOGS / log_file.name)


def scrub_logs(path: Path, keys: Collection[tuple[str, str]], boundaries: Collection[str]) -> None:
    """Remove from logs (JSON lines that name a boundary and a handle, which is a trace's id) what was purged."""
    for log_file in (path / LOGS).glob("*.jsonl"):
        lines = log_file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not _names_any(line, keys, boundaries)]
        if len(kept) < len(lines):
            beside = log_file.with_suffix(".new")
            beside.write_text("".join(kept), encoding="utf-8")
            os.replace(beside, log_file)


def _names_any(line: str, keys: Collection[tuple[str, str]], boundaries: Collection[str]) -> bool:
    try:
        named = json.loads(line)
        return named["boundary"] in boundaries or (named["boundary"], named["handle"]) in keys
    except (ValueError, KeyError, TypeError):  # the end of a line that a kill cut off
        return True
