"""The files of an index: a manifest, and the segments that it names with their sizes and checksums."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from zeromem_torch import disk
from zeromem_torch.index.parts import Part, bury
from zeromem_torch.substrate.forward import Forward
from zeromem_torch.substrate.traces import ZeroMemError

FORMAT = 1
"""Of the manifest and the segments. Whatever it becomes, `checksum` stays as it is: it tells newer from damaged."""
MANIFEST = "manifest.json"
_SEGMENT = re.compile(r"segment-(\d{8,})\.safetensors")
_READERS = 8  # files that are checked at once; hashing leaves the interpreter free

Entry = Mapping[str, Any]
"""What the manifest says of a segment: `Part.entry`."""
T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """What a folder holds, less what is damaged."""

    parts: list[Part]  # the older first
    stale: tuple[str, ...]  # what differs of the fingerprint; if anything does, no part was read
    problems: list[str]  # what is damaged, in sentences
    leftovers: list[str]  # files of ours that are none of the parts
    number: int  # of the newest segment
    new: bool  # nothing was ever written here


def read_state(folder: Path, fingerprint: Mapping[str, str]) -> State:
    """What is in place, though a writer may put another state there meanwhile."""
    while True:
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raw = disk.content(folder / MANIFEST)
        state = _state(folder, raw, names, fingerprint)
        if not state.problems or raw == disk.content(folder / MANIFEST):
            return state


def _state(folder: Path, raw: bytes | None, names: Sequence[str], fingerprint: Mapping[str, str]) -> State:
    parts: list[Part] = []
    problems: list[str] = []
    stale: tuple[str, ...] = ()
    if raw is None:
        if any(map(_SEGMENT.fullmatch, names)):
            problems.append(f"{MANIFEST} of the index is missing, so that none of its rows can be used")
    elif (manifest := parsed(raw)) is None:
        problems.append(f"{MANIFEST} of the index is damaged, so that none of its rows can be used")
    elif manifest["format"] != FORMAT:
        raise ZeroMemError.of(
            f"index {folder}",
            f"format {FORMAT}",
            manifest["format"],
            "upgrade zeromem-torch, or remove this folder: the index is then made again from the record",
        )
    else:
        made_with = manifest["fingerprint"]
        both = sorted({*made_with, *fingerprint})
        if manifest["segments"]:  # an index without rows was made with nothing yet
            stale = tuple(name for name in both if made_with.get(name) != fingerprint.get(name))
        for part in _of_each(load, folder, [] if stale else manifest["segments"]):
            if isinstance(part, str):
                problems.append(part)
            else:
                bury(parts, part.seqs)  # a later segment holds the later row
                parts.append(part)
    used = {part.file for part in parts}
    ours = (name for name in names if name.endswith(disk.TEMPORARY) or _SEGMENT.fullmatch(name))
    return State(
        parts,
        stale,
        problems,
        leftovers=[name for name in ours if name not in used],
        number=max((int(match[1]) for name in names if (match := _SEGMENT.match(name))), default=0),
        new=raw is None and not problems,
    )


# The manifest


def manifest_of(parts: Sequence[Part], fingerprint: Mapping[str, str]) -> bytes:
    """Names those of the parts that are in files."""
    segments = [part for part in parts if part.file]
    return printed(
        {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "segments": [part.entry for part in segments],
            "last_seq": max((part.last for part in segments), default=0),
        }
    )


def printed(manifest: Mapping[str, Any]) -> bytes:
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return (json.dumps(rest | {"checksum": checksum}, indent=1, sort_keys=True) + "\n").encode()


def parsed(raw: bytes) -> dict[str, Any] | None:
    """The manifest, or None if it is not, byte for byte, one that was written here."""
    try:
        manifest = json.loads(raw)
        if printed(manifest) != raw:
            return None
        if manifest["format"] == FORMAT:  # a name from elsewhere must not lead out of the folder
            dict(manifest["fingerprint"])
            if not all(_SEGMENT.fullmatch(entry["file"]) for entry in manifest["segments"]):
                return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return dict(manifest)


# Segments


def segment_name(number: int) -> str:
    return f"segment-{number:08d}.safetensors"


def saved(path: Path, part: Part) -> Part:
    """The same rows, in a segment."""
    held = {"seq": torch.from_numpy(part.seqs), "digest": torch.from_numpy(part.digests)}
    data = save({key: tensor.contiguous() for key, tensor in (part.forward.tensors() | held).items()})
    disk.put(path, data)
    return _mapped(path, len(data), hashlib.sha256(data).hexdigest())


def damage(folder: Path, entries: Sequence[Entry]) -> list[str]:
    """What is wrong with the segments of these entries, in sentences; each is read to its end."""
    return [*filter(None, _of_each(_wrong, folder, entries))]


def load(folder: Path, entry: Entry) -> Part | str:
    """A segment that is as the manifest says, or what is wrong with it."""
    try:
        return _wrong(folder, entry) or _mapped(folder / entry["file"], entry["bytes"], entry["sha256"])
    except (SafetensorError, ZeroMemError, KeyError) as error:
        return f"{entry['file']} of the index does not hold rows as this version makes them ({error})"


def _of_each(read: Callable[[Path, Entry], T], folder: Path, entries: Sequence[Entry]) -> list[T]:
    with ThreadPoolExecutor(max(1, min(_READERS, len(entries)))) as pool:
        return [*pool.map(partial(read, folder), entries)]


def _wrong(folder: Path, entry: Entry) -> str:
    path = folder / entry["file"]
    named = f"{path.name} of the index"
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{named} has {size} bytes instead of {entry['bytes']}"
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
        return "" if same else f"{named} does not match its checksum"
    except FileNotFoundError:
        return f"{named} is missing"
    except PermissionError:
        raise  # nothing that making the rows again would mend
    except OSError as error:
        return f"{named} cannot be read ({error.strerror or error})"


def _mapped(path: Path, size: int, sha256: str) -> Part:
    """A segment whose tensors are read from the file when somebody looks at them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    seqs, digests = (tensors.pop(name).numpy().copy() for name in ("seq", "digest"))
    part = Part.of(seqs, digests, Forward.of_tensors(tensors))
    part.size, part.file, part.sha256 = size, path.name, sha256
    return part
