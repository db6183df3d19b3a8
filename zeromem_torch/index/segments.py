"""An index that is written to: what threads append and retire, and when that is flushed, merged and committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, RLock, Thread

import numpy as np
import numpy.typing as npt

from zeromem_torch import disk
from zeromem_torch.index.files import MANIFEST, damage, manifest_of, parsed, read_state, saved, segment_name
from zeromem_torch.index.parts import Numbers, Part, bury, copied, due, joined, living, locate
from zeromem_torch.substrate.forward import Forward
from zeromem_torch.substrate.traces import ZeroMemError


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
        self._parts: list[Part] = []  # the older first; those in files, then those in memory
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
        with self._lock:
            found = locate(self._parts, wanted)
        return copied(found, wanted)  # outside the lock: a segment stays mapped for as long as somebody reads it

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
                whole = not self._writable or parsed(disk.content(self._folder / MANIFEST) or b"") is not None
            wrong = damage(self._folder, entries)
            return wrong if whole else [*wrong, f"{MANIFEST} of the index is damaged or missing"]

    def copy(self, folder: Path) -> None:
        """Put the segments into a new folder, the tail too unless it cannot be flushed (a reader's)."""
        self.flush()
        with self._in_words(), self._merging:
            with self._lock:
                parts = [part for part in self._parts if part.file]
            folder.mkdir(parents=True, exist_ok=True)
            for part in parts:
                disk.put(folder / part.file, (self._place() / part.file).read_bytes())
            disk.put(folder / MANIFEST, manifest_of(parts, self._fingerprint))

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
        new = Part.of(np.array(seqs, dtype=np.int64), np.array(digests, dtype=np.int64), forward)
        with self._lock:
            self._refuse_unusable()
            if new.alive:
                bury(self._parts, new.seqs)
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
            bury(self._parts, np.unique(np.asarray(seqs, dtype=np.int64)))
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
        state = read_state(folder, self._fingerprint)
        self._parts, self._number, self._leftovers = state.parts, state.number, state.leftovers
        self.problems, self.stale = state.problems, state.stale
        self._unsettled = bool(state.problems)
        if self._writable:
            if state.new:
                self._commit([])
            if not self._unsettled and not self.stale:
                self._sweep()

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
                self._held = living(self._parts)
            return self._held

    def _tail(self) -> list[Part]:
        """The parts in memory that no flush is writing."""
        start = len(self._parts)
        while start and not self._parts[start - 1].file and not self._parts[start - 1].flushing:
            start -= 1
        return self._parts[start:]

    def _tidy(self) -> None:
        """Keep the parts in memory few, as those on disk are."""
        while run := due(self._tail(), self._largest):
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

    def _mergeable(self) -> Sequence[Part]:
        return due([part for part in self._parts if part.file], self._largest) if self._writable else []

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

    def _rewrite(self, run: Sequence[Part], *, to_disk: bool) -> None:
        """Put what lives of some neighbours in their place, as one part or, of a very large tail, as several."""
        with self._lock:
            before = [part.live.copy() for part in run]
        new = joined(run, before)
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

    def _saved(self, part: Part, files: list[str]) -> Part:
        """The same rows in a segment; its name is added to `files` before there is such a file."""
        with self._lock:
            self._number += 1
            self._rows_written += part.alive
            name = segment_name(self._number)
        files.append(name)
        return saved(self._place() / name, part)

    def _commit(self, parts: Sequence[Part]) -> None:
        """Make these the parts that the next opening finds."""
        disk.put(self._place() / MANIFEST, manifest_of(parts, self._fingerprint))

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
            disk.unlink(self._place() / self._leftovers[-1])
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
