"""All that is made from the record, carried along with every change of it: index rows, memories in use, what waits."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from zeromem_torch.keeper import AT_ONCE, Keeper, TraceReader
from zeromem_torch.memories import Memories
from zeromem_torch.store import Record, Stored
from zeromem_torch.substrate.forward import Forward

CHARACTERS, TOKENS_BESIDE = 4, 8
"""Of a token, and tokens that a trace costs beside its text: enough to say how much is read at once."""


class Derived:
    """``keeper`` keeps the rows on disk; without one, those of the memories in use are all there is.

    ``live_budget`` is that of `Memories`.
    """

    def __init__(
        self, record: Record, reader: TraceReader, keeper: Keeper | None = None, live_budget: int | None = None
    ) -> None:
        self.record, self.reader, self.keeper = record, reader, keeper
        self.waiting: dict[int, None] = {} if keeper is None else keeper.waiting
        """Sequence numbers of traces that have no row yet, in order of arrival."""
        self.last = record.last()
        """Sequence number of the last trace."""
        if keeper is None:
            self.memories = Memories(reader.config, reader.encoder().dim, None)
        else:
            self.memories = Memories(reader.config, 0, keeper.load, live_budget)

    def take_in(self, stored: Sequence[Stored], rows: Forward) -> None:
        """Hand stored traces and their rows to the index, and to the memories in use."""
        if not stored:
            return
        seqs = [seq for seq, _ in stored]
        for seq in seqs:
            self.waiting.pop(seq, None)
        self.last = max(self.last, *seqs)
        if self.keeper is not None:
            self.keeper.segments.append(seqs, [trace.digest for _, trace in stored], rows)
        places: dict[str, list[int]] = {}
        for place, (_, trace) in enumerate(stored):
            places.setdefault(trace.boundary, []).append(place)
        for boundary, own in places.items():
            of_it = rows if len(places) == 1 else rows.take(torch.tensor(own))
            self.memories.put(boundary, [seqs[i] for i in own], [stored[i][1] for i in own], of_it)

    def put_off(self, stored: Sequence[Stored]) -> None:
        """Stored traces wait for their rows; what was found before of those that changed is not found any more."""
        for seq, trace in stored:
            self.waiting[seq] = None
            if trace.updated_at is not None:
                self.memories.drop(trace.boundary, [seq])
                if self.keeper is not None:
                    self.keeper.segments.retire([seq])
        self.last = max([self.last, *(seq for seq, _ in stored)])

    def due(self, tokens: int) -> list[Stored]:
        """The traces that have waited longest, about ``tokens`` tokens and at least one."""
        due: list[Stored] = []
        for seq, trace in self.record.fetch(islice(self.waiting, min(AT_ONCE, tokens // TOKENS_BESIDE + 1))):
            tokens -= tokens_about(trace.text)
            if due and tokens < 0:
                break
            due.append((seq, trace))
        return due

    def remove(self, seqs: Sequence[int], boundaries: Iterable[str], *, purge: bool) -> None:
        """Drop the rows of traces that are gone from these boundaries; ``purge``: from every file too."""
        if self.keeper is not None:
            self.keeper.segments.compact(seqs) if purge else self.keeper.segments.retire(seqs)
        for seq in seqs:
            self.waiting.pop(seq, None)
        for boundary in boundaries:
            self.memories.drop(boundary, seqs)

    @property
    def indexed_up_to(self) -> int:
        """Every trace up to this sequence number has its row."""
        return min(self.waiting) - 1 if self.waiting else self.last

    def rebuild(self) -> None:
        """Make all of it anew from the record."""
        if self.keeper is None:
            stored = self.record.fetch(self.record.keys()[0].tolist())
            rows = self.reader.read([trace for _, trace in stored])
            self.memories.clear(self.reader.encoder().dim)
            self.take_in(stored, rows)
        else:
            self.keeper.segments.clear(self.reader.fingerprint(self.reader.encoder().fingerprint))
            self.memories.release()
            self.keeper.catch_up()
        self.waiting.clear()

    def verify(self, *, quick: bool) -> tuple[int, int, list[str]]:
        """How many rows and how many memories were made again and compared (``quick``: none), and what is wrong."""
        problems = self.record.check()
        rows = memories = 0
        if self.keeper is not None:
            problems += self.keeper.problems()
            if not quick:
                rows, found = self.keeper.compare()
                problems += found
        if not quick:
            memories, differing = self.memories.compare()
            problems += [f"the memory of {name!r} is not what its rows make" for name in differing]
        return rows, memories, problems

    def stats(self) -> dict[str, Any]:
        """Counts and sizes of the rows on disk."""
        return {} if self.keeper is None else self.keeper.segments.stats()

    def copy(self, folder: Path) -> None:
        if self.keeper is not None:
            self.keeper.segments.copy(folder)

    def close(self) -> None:
        """Write what the index still holds in memory."""
        if self.keeper is not None:
            self.keeper.segments.close()


def tokens_about(text: str) -> int:
    """What it costs to read a trace or a query of this text, about."""
    return len(text) // CHARACTERS + TOKENS_BESIDE
