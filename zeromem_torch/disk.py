"""A file is on disk as a whole or as it was before, whenever the process or the machine stops."""

import os
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp"
"""Ends the name of what is not yet a file."""


def put(path: Path, data: bytes) -> None:
    """Make a file hold this, or leave it as it is, whatever happens."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        write(temporary, data)
        replace(temporary, path)
        sync(path.parent)
    except OSError:
        with suppress(OSError):  # a full disk gets its room back
            unlink(temporary)
        raise


def content(path: Path) -> bytes | None:
    """What a file holds; nothing at all if it cannot be read to its end, and None if there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    except OSError:
        return b""


# The steps that a crash can fall between; tests put themselves in their place.


def write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(source: Path, target: Path) -> None:
    source.replace(target)


def sync(path: Path) -> None:
    """A file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
