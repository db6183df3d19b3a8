"""The parts of an index: rows in order of seq, in memory or mapped from a file, and what is asked of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zeromem_torch.substrate.forward import Forward
from zeromem_torch.substrate.traces import ZeroMemError

Numbers = npt.NDArray[np.int64]


@dataclass(eq=False)
class Part:
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
    def of(cls, seqs: Numbers, digests: Numbers, forward: Forward) -> Part:
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

    def pieces(self, largest: int) -> list[Part]:
        """The same rows in memory, in parts of about that many bytes (0: in one); of no rows, no part."""
        if not len(self.seqs):
            return []
        count = -(-self.size // largest) if largest else 1
        if count == 1:
            return [self]
        each = -(-len(self.seqs) // count)
        cuts = (slice(start, start + each) for start in range(0, len(self.seqs), each))
        rows = torch.arange(len(self.seqs))
        return [Part.of(self.seqs[cut], self.digests[cut], self.forward.take(rows[cut])) for cut in cuts]


def living(parts: Iterable[Part]) -> tuple[Numbers, Numbers]:
    """Seqs, ascending, and digests of all rows that live; they are handed out more than once, and not to be changed."""
    none = np.empty(0, dtype=np.int64)
    seqs = np.concatenate([none, *(part.seqs[part.live] for part in parts)])
    digests = np.concatenate([none, *(part.digests[part.live] for part in parts)])
    if not _ascending(seqs):
        order = np.argsort(seqs, kind="stable")
        seqs, digests = seqs[order], digests[order]
    seqs.flags.writeable = digests.flags.writeable = False
    return seqs, digests


def bury(parts: Iterable[Part], seqs: Numbers) -> None:
    """Retire the rows of these seqs, ascending, in whichever part they live."""
    if len(seqs):
        first, last = int(seqs[0]), int(seqs[-1])
        for part in parts:
            if first <= part.last and part.first <= last:
                part.bury(seqs)


Located = Sequence[tuple[Forward, Numbers, Numbers]]
"""Rows of some parts, and the place of each among the seqs asked for."""


def locate(parts: Sequence[Part], wanted: Numbers) -> Located:
    """The rows that live under these seqs; a seq that no part holds has none."""
    order = np.argsort(wanted, kind="stable")
    ordered = wanted[order]
    found = []
    for part in parts:
        low, high = np.searchsorted(ordered, part.first), np.searchsorted(ordered, part.last, side="right")
        if low < high:
            at = part.find(ordered[low:high])
            if (at >= 0).any():
                found.append((part.forward, at[at >= 0], order[low:high][at >= 0]))
    if not len(wanted) and parts:  # no rows, of the width of the others
        found.append((parts[0].forward, wanted, wanted))
    return found


def copied(found: Located, wanted: Numbers) -> Forward:
    """A copy of the rows of these seqs, in their order; a seq for which none was found is an error."""
    place = np.concatenate([np.empty(0, dtype=np.int64), *(place for *_, place in found)])
    if len(place) < len(wanted):
        missing = int(np.delete(wanted, place)[0])
        raise ZeroMemError.of("index", "a seq that it holds", missing, "append its row, or rebuild the index")
    if not found:
        return Forward.empty(0)
    together = Forward.cat(_taken(forward, at, alone=len(found) == 1) for forward, at, _ in found)
    return together if _ascending(place) else together.take(torch.from_numpy(np.argsort(place)))


def due(parts: Sequence[Part], largest: int) -> Sequence[Part]:
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


def joined(parts: Sequence[Part], lives: Sequence[npt.NDArray[np.bool_]]) -> Part:
    """What lives of some parts, as one in memory."""
    seqs = np.concatenate([part.seqs[live] for part, live in zip(parts, lives, strict=True)])
    digests = np.concatenate([part.digests[live] for part, live in zip(parts, lives, strict=True)])
    forwards = (
        part.forward if live.all() else part.forward.take(torch.from_numpy(np.flatnonzero(live)))
        for part, live in zip(parts, lives, strict=True)
    )
    return Part.of(seqs, digests, Forward.cat(forwards))


def _taken(forward: Forward, rows: Numbers, *, alone: bool) -> Forward:
    """A copy of these rows, unless that is left to the joining of several parts, of which this is one as a whole."""
    whole = not alone and len(rows) == forward.rows and _ascending(rows)
    return forward if whole else forward.take(torch.from_numpy(rows))


def _ascending(numbers: Numbers) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all())
