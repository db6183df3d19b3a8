"""The index on disk: rows of `Forward` in immutable segments that are merged as they grow in number.

The record is the truth, and these files only spare reading it again: a row that is lost to a crash or to damage is
missing, never wrong, and the caller makes it anew. New rows gather in memory (the tail). A full tail becomes a segment,
and segments of like size become one, so that a row is written O(log N) times, however many follow it.

A file is written under a temporary name, synced and renamed, and the folder is synced; then the manifest that names it,
in the same way; only then are files that it replaces removed. So a folder holds one whole state at every moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from zeromem_torch.substrate.forward import Forward
from zeromem_torch.substrate.traces import ZeroMemError

__all__ = ["FORMAT", "Segments"]

FORMAT = 1
"""Of the manifest and the segments. Whatever it becomes, `checksum` stays as it is: it tells newer from damaged."""
MANIFEST = "manifest.json"
_SEGMENT = re.compile(r"segment-(\d{8,})\.safetensors")
_TEMPORARY = ".tmp"
_READERS = 8  # files that are checked at once; hashing leaves the interpreter free

Numbers = npt.NDArray[np.int64]


class Segments:
    """Rows by seq, with the digest of the trace that each was made from.

    `problems` says in sentences what was found damaged at open, or could not be written behind the caller's back.
    `stale` names the parts of the fingerprint that differ from what the rows were made with; then none of them is
    held, and the files stay as they are until `clear`. With `read_only`, or without a folder, nothing is written and
    new rows stay in memory. All methods may be called from several threads.
    """

    def __init__(
        self,
        folder: Path | None,
        fingerprint: Mapping[str, str],
        *,
        read_only: bool = False,
        flush_rows: int = 1024,
        flush_bytes: int = 64 << 20,
        largest: int = 256 << 20,  # bytes of a merged segment
        background: bool = True,
    ) -> None:
        self.problems: list[str] = []
        self.stale: tuple[str, ...] = ()
        self._folder = folder
        self._writable = folder is not None and not read_only
        self._fingerprint = dict(fingerprint)
        self._flush_rows, self._flush_bytes, self._largest = flush_rows, flush_bytes, largest
        self._background = background
        # Taken in this order: a merge, a flush, and what is held, which is never locked while a segment is written.
        self._merging, self._flushing, self._lock = Lock(), Lock(), RLock()
        self._parts: list[_Part] = []  # the older first; those in files, then those in memory
        self._leftovers: list[str] = []  # files that no manifest names once the next one is written
        self._unsettled = False  # the manifest does not name what is held, or there are leftovers
        self._held: tuple[Numbers, Numbers] | None = None
        self._patience = 1  # times as many rows are gathered after a flush has failed
        self._number = self._rows_written = 0
        self._merger: Thread | None = None
        self._closed = False
        if folder is not None:
            with self._in_words():
                self._open(folder)

    # What is held

    @property
    def seqs(self) -> Numbers:
        """Of all rows, ascending."""
        return self._all()[0]

    @property
    def digests(self) -> Numbers:
        """Of all rows, in the order of `seqs`."""
        return self._all()[1]

    def rows(self, seqs: npt.ArrayLike) -> Forward:
        """These rows, in the order asked; a seq that is not held is an error. No row of an empty index has no width."""
        wanted = np.asarray(seqs, dtype=np.int64).reshape(-1)
        order = np.argsort(wanted, kind="stable")
        ordered = wanted[order]
        found = []
        with self._lock:
            for part in self._parts:
                low, high = np.searchsorted(ordered, part.first), np.searchsorted(ordered, part.last, side="right")
                if low < high:
                    at = part.find(ordered[low:high])
                    if (at >= 0).any():
                        found.append((part.forward, at[at >= 0], order[low:high][at >= 0]))
            if not len(wanted) and self._parts:  # no rows, of the width of the others
                found.append((self._parts[0].forward, wanted, wanted))
        place = np.concatenate([order[:0], *(place for *_, place in found)])
        if len(place) < len(wanted):
            missing = int(np.delete(wanted, place)[0])
            raise ZeroMemError.of("index", "a seq that it holds", missing, "append its row, or rebuild the index")
        if not found:
            return Forward.empty(0)
        # Outside the lock: a segment stays mapped for as long as somebody reads it. What is handed out is a copy.
        together = Forward.cat(_taken(forward, at, alone=len(found) == 1) for forward, at, _ in found)
        return together if _ascending(place) else together.take(torch.from_numpy(np.argsort(place)))

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(part.size for part in self._parts)

    def check(self) -> list[str]:
        """What is wrong with the files by now, in sentences; all of them are read."""
        if self._folder is None:
            return []
        with self._in_words(), self._merging:  # so that no file goes meanwhile
            with self._lock:
                entries = [part.entry for part in self._parts if part.file]
                whole = not self._writable or _parsed(_content(self._folder / MANIFEST) or b"") is not None
            with _readers(entries) as pool:
                wrong = pool.map(_wrong, [self._folder] * len(entries), entries)
                return [*filter(None, wrong)] + ([] if whole else [f"{MANIFEST} of the index is damaged or missing"])

    def copy(self, folder: Path) -> None:
        """Put the segments into a new folder, the tail too unless it cannot be flushed (a reader's)."""
        self.flush()
        with self._in_words(), self._merging:
            with self._lock:
                parts = [part for part in self._parts if part.file]
            folder.mkdir(parents=True, exist_ok=True)
            for part in parts:
                _put(folder / part.file, (self._place() / part.file).read_bytes())
            _put(folder / MANIFEST, _printed(self._manifest(parts)))

    def stats(self) -> dict[str, int]:
        """Counts: rows that live and that are retired, rows in memory, segments, bytes, rows written since open."""
        with self._lock:
            return {
                "rows": sum(part.alive for part in self._parts),
                "retired": sum(part.dead for part in self._parts),
                "tail_rows": sum(part.alive for part in self._parts if not part.file),
                "segments": sum(bool(part.file) for part in self._parts),
                "bytes": self.nbytes,
                "rows_written": self._rows_written,
            }

    # What changes it

    def append(self, seqs: npt.ArrayLike, digests: npt.ArrayLike, forward: Forward) -> None:
        """Hold these rows; a row of the same seq that was held before is retired.

        Costs what the new rows cost. They are on disk once the tail is full or flushed; a disk that refuses a full tail
        is a problem in `problems`, since nothing is lost: the rows are held, and the record has their traces.
        """
        new = _Part.of(np.array(seqs, dtype=np.int64), np.array(digests, dtype=np.int64), forward)
        with self._lock:
            self._refuse_unusable()
            if new.alive:
                self._bury(new.seqs)
                self._parts.append(new)
                self._held = None
                self._tidy()
            full = self._full()
        try:
            flushed = full and self._flush(only_full=True)
        except OSError as error:
            with self._lock:
                self._patience *= 2
            self._note(error)
        else:
            if flushed:
                self._merge_soon()

    def retire(self, seqs: npt.ArrayLike) -> None:
        """Never hand these rows out again; a merge drops them, `compact` drops them now. Not remembered on disk."""
        with self._lock:
            self._bury(np.unique(np.asarray(seqs, dtype=np.int64)))
            self._held = None

    def flush(self) -> None:
        """Make the folder hold what is held here, less what was retired."""
        with self._in_words():
            flushed = self._flush()
        if flushed:
            self._merge_soon()

    def merge(self) -> None:
        """Do all merges that are due."""
        with self._in_words():
            self._merge_all()

    def compact(self, drop: npt.ArrayLike | None = None) -> None:
        """Retire `drop`, and rewrite what holds a retired row: when this returns, no file has a byte of one."""
        with self._in_words(), self._merging, self._flushing:
            with self._lock:
                self._refuse_unusable()
                if drop is not None:
                    self.retire(drop)
                for part in [part for part in self._parts if part.dead and not part.file]:
                    self._rewrite([part], to_disk=False)
                in_files = [part for part in self._parts if part.dead and part.file and self._writable]
            for part in in_files:
                self._rewrite([part], to_disk=True)
            self._settle()

    def clear(self, fingerprint: Mapping[str, str]) -> None:
        """Forget all rows; those to come are made with what `fingerprint` names."""
        with self._in_words(), self._merging, self._flushing, self._lock:
            self._leftovers += [part.file for part in self._parts if part.file]
            self._parts, self._held, self.stale = [], None, ()
            self._fingerprint = dict(fingerprint)
            self.problems.clear()
            self._unsettled = True
            self._settle()

    def close(self) -> None:
        """Flush, do the merges that are due, and let go of the files. Nothing may be appended to it any more."""
        with self._lock:
            self._closed, merger = True, self._merger
        if merger:
            merger.join()
        try:
            with self._in_words():
                self._flush()
                self._merge_all()  # or a thousand processes that add a trace each would leave as many segments
        finally:
            with self._merging, self._flushing, self._lock:
                self._parts, self._held, self._writable = [], None, False

    # Opening

    def _open(self, folder: Path) -> None:
        if self._writable:
            folder.mkdir(parents=True, exist_ok=True)
        while True:
            files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
            raw = _content(folder / MANIFEST)
            self._read(folder, raw, files)
            if not self.problems or raw == _content(folder / MANIFEST):
                break
            self.problems.clear()  # a writer has put another state in place while we were reading
        if self._writable:
            self._number = max((int(match[1]) for name in files if (match := _SEGMENT.match(name))), default=0)
            if raw is None and not self.problems:
                self._commit([])
            if not self._unsettled and not self.stale:
                self._sweep()

    def _read(self, folder: Path, raw: bytes | None, files: Sequence[str]) -> None:
        """Take over what the manifest names and what is whole; say what is not."""
        self._parts, self._held, self.stale = [], None, ()
        entries: list[dict[str, Any]] = []
        if raw is not None:
            manifest = _parsed(raw)
            if manifest is None:
                self.problems.append(f"{MANIFEST} of the index is damaged, so that none of its rows can be used")
            elif manifest["format"] != FORMAT:
                raise ZeroMemError.of(
                    f"index {folder}",
                    f"format {FORMAT}",
                    manifest["format"],
                    "upgrade zeromem-torch, or remove this folder: the index is then made again from the record",
                )
            else:
                entries = manifest["segments"]
                made_with = manifest["fingerprint"]
                names = sorted({*made_with, *self._fingerprint})
                self.stale = tuple(name for name in names if made_with.get(name) != self._fingerprint.get(name))
        elif any(map(_SEGMENT.fullmatch, files)):
            self.problems.append(f"{MANIFEST} of the index is missing, so that none of its rows can be used")
        if entries and not self.stale:
            with _readers(entries) as pool:
                for part in pool.map(lambda entry: _load(folder, entry), entries):
                    if isinstance(part, str):
                        self.problems.append(part)
                    else:  # a later segment holds the later row
                        self._bury(part.seqs)
                        self._parts.append(part)
        used = {part.file for part in self._parts}
        ours = (name for name in files if name.endswith(_TEMPORARY) or _SEGMENT.fullmatch(name))
        self._leftovers = [name for name in ours if name not in used]
        self._unsettled = bool(self.problems)

    # Changing, with the locks that each needs already held

    def _refuse_unusable(self) -> None:
        if self._closed:
            raise ZeroMemError.of("index", "one that is open", "one that was closed", "open the memory again")
        if self.stale:
            expected = f"rows made with the present {', '.join(self.stale)}"
            raise ZeroMemError.of("index", expected, "rows made with another", "clear it, and make the rows anew")

    def _all(self) -> tuple[Numbers, Numbers]:
        with self._lock:
            if self._held is None:
                none = np.empty(0, dtype=np.int64)
                seqs = np.concatenate([none, *(part.seqs[part.live] for part in self._parts)])
                digests = np.concatenate([none, *(part.digests[part.live] for part in self._parts)])
                if not _ascending(seqs):
                    order = np.argsort(seqs, kind="stable")
                    seqs, digests = seqs[order], digests[order]
                seqs.flags.writeable = digests.flags.writeable = False  # they are handed out more than once
                self._held = seqs, digests
            return self._held

    def _bury(self, seqs: Numbers) -> None:
        """Retire the rows of these seqs, ascending, in whichever part they live."""
        if len(seqs):
            first, last = int(seqs[0]), int(seqs[-1])
            for part in self._parts:
                if first <= part.last and part.first <= last:
                    part.bury(seqs)

    def _tail(self) -> list[_Part]:
        """The parts in memory that no flush is writing."""
        start = len(self._parts)
        while start and not self._parts[start - 1].file and not self._parts[start - 1].flushing:
            start -= 1
        return self._parts[start:]

    def _tidy(self) -> None:
        """Keep the parts in memory few, as those on disk are."""
        while run := _due(self._tail(), self._largest):
            self._rewrite(run, to_disk=False)

    def _full(self) -> bool:
        tail = self._tail() if self._writable else []
        rows, size = sum(part.alive for part in tail), sum(part.size for part in tail)
        return rows >= self._patience * self._flush_rows or size >= self._patience * self._flush_bytes

    def _flush(self, *, only_full: bool = False) -> bool:
        if not self._writable or self.stale:
            return False
        with self._flushing:
            with self._lock:
                if only_full and not self._full():  # another thread was faster
                    return False
                tail = self._tail()
                for part in tail:
                    part.flushing = True
            try:
                if tail:
                    self._rewrite(tail, to_disk=True)
            finally:
                with self._lock:
                    for part in tail:
                        part.flushing = False
            self._settle()
            with self._lock:
                self._patience = 1
            return bool(tail)

    def _mergeable(self) -> Sequence[_Part]:
        return _due([part for part in self._parts if part.file], self._largest) if self._writable else []

    def _merge_all(self) -> None:
        with self._merging:
            while True:
                with self._lock:
                    run = self._mergeable()
                    if not run:
                        self._merger = None  # under the lock, or a flush would rely on a thread that is leaving
                        return
                self._rewrite(run, to_disk=True)

    def _merge_quietly(self) -> None:
        try:
            self._merge_all()
        except OSError as error:
            self._note(error)

    def _merge_soon(self) -> None:
        if not self._background:
            self._merge_quietly()
            return
        with self._lock:
            if self._mergeable() and not self._closed and not (self._merger and self._merger.is_alive()):
                self._merger = Thread(target=self._merge_quietly, name="zeromem-merge")
                self._merger.start()

    def _rewrite(self, run: Sequence[_Part], *, to_disk: bool) -> None:
        """Put what lives of some neighbours in their place, as one part or, of a very large tail, as several."""
        with self._lock:
            before = [part.live.copy() for part in run]
        new = _joined(run, before)
        files: list[str] = []
        try:
            made = [self._saved(piece, files) for piece in new.pieces(self._largest)] if to_disk else new.pieces(0)
            with self._lock:
                at = self._parts.index(run[0])
                parts = [*self._parts[:at], *made, *self._parts[at + len(run) :]]
                if to_disk:
                    self._commit(parts)
                for old, was in zip(run, before, strict=True):
                    for part in made:
                        part.bury(old.seqs[was & ~old.live])  # retired while we were writing
                self._parts = parts
                self._leftovers += [part.file for part in run if part.file]
                if to_disk:
                    self._sweep()
        except OSError:
            with self._lock:
                self._unsettled = True
                held = {part.file for part in self._parts}
                self._leftovers += [name for name in files if name not in held]
            raise

    def _saved(self, part: _Part, files: list[str]) -> _Part:
        """The same rows in a segment; its name is added to `files` before there is such a file."""
        folder = self._place()
        with self._lock:
            self._number += 1
            self._rows_written += part.alive
            name = f"segment-{self._number:08d}.safetensors"
        files.append(name)
        held = {"seq": torch.from_numpy(part.seqs), "digest": torch.from_numpy(part.digests)}
        data = save({key: tensor.contiguous() for key, tensor in (part.forward.tensors() | held).items()})
        _put(folder / name, data)
        return _mapped(folder / name, len(data), hashlib.sha256(data).hexdigest())

    def _commit(self, parts: Sequence[_Part]) -> None:
        """Make these the parts that the next opening finds."""
        _put(self._place() / MANIFEST, _printed(self._manifest(parts)))

    def _manifest(self, parts: Sequence[_Part]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "fingerprint": self._fingerprint,
            "segments": [part.entry for part in parts if part.file],
            "last_seq": max((part.last for part in parts if part.file), default=0),
        }

    def _settle(self) -> None:
        """Do away with what opening or a failed write has left."""
        with self._lock:
            if self._writable and self._unsettled:
                self._commit(self._parts)
                self._sweep()

    def _sweep(self) -> None:
        """Remove the leftovers; only behind a manifest that does not name them."""
        while self._leftovers:
            self._unsettled = True
            _unlink(self._place() / self._leftovers[-1])
            self._leftovers.pop()
        self._unsettled = False

    def _place(self) -> Path:
        assert self._folder is not None  # only what writes asks
        return self._folder

    def _note(self, error: OSError) -> None:
        with self._lock:
            problem = f"the index could not be written ({error.strerror or error}); nothing is lost, it is tried again"
            if problem not in self.problems:
                self.problems.append(problem)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = "free some space or check the permissions, and try again; the record still has every trace"
            got = str(error.strerror or error)
            raise ZeroMemError.of(f"index {self._folder}", "files to read and write", got, advice) from error


@dataclass(eq=False)
class _Part:
    """Rows in order of seq, in memory or mapped from a file. What it holds never changes, what of it lives does."""

    seqs: Numbers
    digests: Numbers
    forward: Forward
    size: int  # bytes
    file: str = ""
    sha256: str = ""
    dead: int = 0
    flushing: bool = False
    live: npt.NDArray[np.bool_] = field(init=False)
    first: int = field(init=False)
    last: int = field(init=False)

    def __post_init__(self) -> None:
        self.live = np.ones(len(self.seqs), dtype=bool)
        self.first, self.last = (int(self.seqs[0]), int(self.seqs[-1])) if len(self.seqs) else (0, -1)

    @classmethod
    def of(cls, seqs: Numbers, digests: Numbers, forward: Forward) -> _Part:
        """A part in memory; of rows of the same seq, the last."""
        if not len(seqs) == len(digests) == forward.rows:
            got = f"{len(seqs)}, {len(digests)} and {forward.rows}"
            raise ZeroMemError.of("index", "as many seqs as digests and rows", got, "pass one of each for a trace")
        if not _ascending(seqs):
            _, behind = np.unique(seqs[::-1], return_index=True)
            keep = len(seqs) - 1 - behind
            seqs, digests, forward = seqs[keep], digests[keep], forward.take(torch.from_numpy(keep))
        return cls(seqs, digests, forward, forward.nbytes + seqs.nbytes + digests.nbytes)

    @property
    def entry(self) -> dict[str, Any]:
        """What the manifest says of a segment."""
        return {
            "file": self.file,
            "rows": len(self.seqs),
            "bytes": self.size,
            "sha256": self.sha256,
            "first_seq": self.first,
            "last_seq": self.last,
        }

    @property
    def alive(self) -> int:
        return len(self.seqs) - self.dead

    @property
    def weight(self) -> float:
        """Bytes, were the dead rows gone."""
        return self.size * self.alive / len(self.seqs)

    def find(self, seqs: Numbers) -> Numbers:
        """The rows that live under these seqs, -1 where there is none."""
        at = np.searchsorted(self.seqs, seqs).clip(max=len(self.seqs) - 1)
        return np.where((self.seqs[at] == seqs) & self.live[at], at, -1)

    def bury(self, seqs: Numbers) -> None:
        at = self.find(seqs)
        at = at[at >= 0]
        self.live[at] = False
        self.dead += len(at)

    def pieces(self, largest: int) -> list[_Part]:
        """The same rows in memory, in parts of about that many bytes (0: in one); of no rows, no part."""
        if not len(self.seqs):
            return []
        count = -(-self.size // largest) if largest else 1
        if count == 1:
            return [self]
        each = -(-len(self.seqs) // count)
        cuts = (slice(start, start + each) for start in range(0, len(self.seqs), each))
        rows = torch.arange(len(self.seqs))
        return [_Part.of(self.seqs[cut], self.digests[cut], self.forward.take(rows[cut])) for cut in cuts]


def _ascending(numbers: Numbers) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all())


def _due(parts: Sequence[_Part], largest: int) -> Sequence[_Part]:
    """Neighbours to make one part of: one and those behind it, once they weigh half as much; or a part half of it dead.

    What is left halves from part to part, so that there are few; and a part grows by half whenever it is rewritten
    behind its first merge, so that its rows are not rewritten often.
    """
    for part in parts:
        if 2 * part.dead > len(part.seqs):
            return [part]
    for stop in range(len(parts), 1, -1):
        start, total = stop - 1, parts[stop - 1].weight
        while start and parts[start - 1].weight <= 2 * total and total + parts[start - 1].weight <= largest:
            start -= 1
            total += parts[start].weight
        if stop - start > 1:
            return parts[start:stop]
    return []


def _taken(forward: Forward, rows: Numbers, *, alone: bool) -> Forward:
    """A copy of these rows, unless that is left to the joining of several parts, of which this is one as a whole."""
    whole = not alone and len(rows) == forward.rows and _ascending(rows)
    return forward if whole else forward.take(torch.from_numpy(rows))


def _joined(parts: Sequence[_Part], lives: Sequence[npt.NDArray[np.bool_]]) -> _Part:
    """What lives of some parts, as one in memory."""
    seqs = np.concatenate([part.seqs[live] for part, live in zip(parts, lives, strict=True)])
    digests = np.concatenate([part.digests[live] for part, live in zip(parts, lives, strict=True)])
    forwards = (
        part.forward if live.all() else part.forward.take(torch.from_numpy(np.flatnonzero(live)))
        for part, live in zip(parts, lives, strict=True)
    )
    return _Part.of(seqs, digests, Forward.cat(forwards))


# Files


def _readers(entries: Sequence[Any]) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(_READERS, len(entries))))


def _load(folder: Path, entry: Mapping[str, Any]) -> _Part | str:
    """A segment that is as the manifest says, or what is wrong with it."""
    try:
        return _wrong(folder, entry) or _mapped(folder / entry["file"], entry["bytes"], entry["sha256"])
    except (SafetensorError, ZeroMemError, KeyError) as error:
        return f"{entry['file']} of the index does not hold rows as this version makes them ({error})"


def _wrong(folder: Path, entry: Mapping[str, Any]) -> str:
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


def _mapped(path: Path, size: int, sha256: str) -> _Part:
    """A segment whose tensors are read from the file when somebody looks at them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    seqs, digests = (tensors.pop(name).numpy().copy() for name in ("seq", "digest"))
    part = _Part.of(seqs, digests, Forward.of_tensors(tensors))
    part.size, part.file, part.sha256 = size, path.name, sha256
    return part


def _content(path: Path) -> bytes | None:
    """What a file holds; nothing at all if it cannot be read to its end, and None if there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    except OSError:
        return b""


def _printed(manifest: Mapping[str, Any]) -> bytes:
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return (json.dumps(rest | {"checksum": checksum}, indent=1, sort_keys=True) + "\n").encode()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """The manifest, or None if it is not, byte for byte, one that was written here."""
    try:
        manifest = json.loads(raw)
        if _printed(manifest) != raw:
            return None
        if manifest["format"] == FORMAT:  # a name from elsewhere must not lead out of the folder
            dict(manifest["fingerprint"])
            if not all(_SEGMENT.fullmatch(entry["file"]) for entry in manifest["segments"]):
                return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return dict(manifest)


def _put(path: Path, data: bytes) -> None:
    """Make a file hold this, or leave it as it is, whatever happens."""
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        _write(temporary, data)
        _replace(temporary, path)
        _sync_folder(path.parent)
    except OSError:
        with suppress(OSError):  # a full disk gets its room back
            _unlink(temporary)
        raise


# The steps that a crash can fall between; tests put themselves in their place.


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(source: Path, target: Path) -> None:
    source.replace(target)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
