"""Live memories: the forward rows of the boundaries in use, and what was assembled from them, while the budget lasts.

Rows of a boundary are appended as they arrive and put in order of time when next assembled; traces that arrive in that
order, as those of a conversation do, are never moved again. What is not in use is dropped, and read anew from the
index when it is asked for.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from zeromem_torch.config import SubstrateConfig
from zeromem_torch.scope import Scope, bounded, utc_now
from zeromem_torch.substrate.forward import Forward, Growing
from zeromem_torch.substrate.graph import TitlesFound
from zeromem_torch.substrate.memory import Memory, assemble
from zeromem_torch.substrate.traces import Trace
from zeromem_torch.substrate.units import order_turns

FILTERED = 64
"""Memories of filtered or joined scopes that are kept."""
Key = tuple[tuple[str, ...], bytes]
Load = Callable[[str], tuple[Mapping[int, Trace], Forward]]
"""Traces of a boundary by sequence number, and their rows in that order, from where they are kept."""


class _Shelf:
    """One boundary: its traces by sequence number, and a row for each among rows that may be out of date."""

    def __init__(self, traces: Mapping[int, Trace], rows: Forward) -> None:
        self.traces = dict(traces)
        self.titles = TitlesFound()
        self._row = {seq: row for row, seq in enumerate(self.traces)}
        self._rows = Growing(rows)
        self.bounded = sum(map(bounded, self.traces.values()))

    @property
    def nbytes(self) -> int:
        return self._rows.forward.nbytes

    def put(self, seqs: Sequence[int], traces: Sequence[Trace], rows: Forward) -> None:
        first = self._rows.rows
        self._rows.append(rows)
        for place, (seq, trace) in enumerate(zip(seqs, traces, strict=True)):
            self.replace(seq, trace)
            self._row[seq] = first + place

    def replace(self, seq: int, trace: Trace) -> None:
        before = self.traces.get(seq)
        self.bounded += bounded(trace) - (before is not None and bounded(before))
        self.traces[seq] = trace

    def drop(self, seqs: Iterable[int]) -> None:
        for seq in self.traces.keys() & set(seqs):
            self.bounded -= bounded(self.traces.pop(seq))
            del self._row[seq]

    def rows_of(self, seqs: Sequence[int], *, keep: bool) -> Forward:
        """Rows in this order; with ``keep`` they are kept so, and none beside them."""
        wanted = [self._row[seq] for seq in seqs]
        if wanted == list(range(self._rows.rows)):
            return self._rows.forward
        rows = self._rows.forward.take(torch.tensor(wanted, dtype=torch.long))
        if keep:
            self._rows, self._row = Growing(rows), {seq: row for row, seq in enumerate(seqs)}
        return rows


class Memories:
    """Assembles the memory of a scope when it is asked for, and keeps it while nothing in it changes.

    ``load`` reads a boundary that is not live; None: all there is, is live, and stays.
    ``budget`` bounds the bytes of live rows and assembled memories beside the ones in use.
    """

    def __init__(self, config: SubstrateConfig, dim: int, load: Load | None, budget: int | None = None) -> None:
        self.config, self.dim, self.load, self.budget = config, dim, load, budget
        self.hits = self.misses = 0  # of boundaries: whether one that was asked for was live
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._assembled: OrderedDict[Key, Memory] = OrderedDict()
        self._keys: dict[str, set[Key]] = {}  # of the memories that a boundary is part of

    def put(self, boundary: str, seqs: Sequence[int], traces: Sequence[Trace], rows: Forward) -> None:
        """New or changed traces with their rows; a boundary that is not live will be read when it is asked for."""
        if boundary not in self._shelves and self.load is None:
            self._shelves[boundary] = _Shelf({}, Forward.empty(self.dim))
        if boundary in self._shelves:
            self._shelves[boundary].put(seqs, traces, rows)
        self._forget(boundary)

    def replace(self, boundary: str, seq: int, trace: Trace) -> None:
        """A trace whose row stands as it is."""
        if boundary in self._shelves:
            self._shelves[boundary].replace(seq, trace)
        self._forget(boundary)

    def drop(self, boundary: str, seqs: Iterable[int]) -> None:
        if boundary in self._shelves:
            self._shelves[boundary].drop(seqs)
            if not self._shelves[boundary].traces:
                del self._shelves[boundary]
        self._forget(boundary)

    def clear(self, dim: int) -> None:
        """Hold nothing; rows will have ``dim`` columns."""
        self.dim = dim
        for held in (self._shelves, self._assembled, self._keys):
            held.clear()

    def release(self) -> None:
        """Drop all that can be made again."""
        self._assembled.clear()
        self._keys.clear()
        if self.load is not None:
            self._shelves.clear()

    def of(self, scope: Scope) -> Memory | None:
        """The memory of a scope; None where it holds nothing."""
        shelves = {name: shelf for name in scope.boundaries if (shelf := self._shelf(name)) is not None}
        names, now = tuple(shelves), utc_now()
        seen: dict[str, list[int]] = {}
        if scope.filters or scope.as_of or any(shelf.bounded for shelf in shelves.values()):
            for name, shelf in shelves.items():
                seen[name] = [seq for seq, trace in shelf.traces.items() if scope.admits(trace, now)]
            if all(len(seen[name]) == len(shelf.traces) for name, shelf in shelves.items()):
                seen = {}
            elif not any(seen.values()):
                return None
        if not shelves:
            return None
        key = (names, torch.tensor([seq for own in seen.values() for seq in own]).numpy().tobytes())
        if (memory := self._assembled.get(key)) is None:
            chosen = seen or {name: list(shelf.traces) for name, shelf in shelves.items()}
            memory = self._assembled[key] = self._assemble(shelves, chosen, whole=not seen)
            for name in names:
                self._keys.setdefault(name, set()).add(key)
            self._make_room(names)
        self._assembled.move_to_end(key)
        return memory

    def compare(self) -> tuple[int, list[str]]:
        """Assemble the whole memories in use again from their rows: how many there are, and which are not the same."""
        whole = {names[0]: memory for (names, seen), memory in self._assembled.items() if len(names) == 1 and not seen}
        differing = []
        for name, memory in whole.items():
            shelf = self._shelves[name]
            seqs = sorted(shelf.traces)
            turns = order_turns([shelf.traces[seq] for seq in seqs])
            rows = shelf.rows_of([seqs[place] for place in turns.source.tolist()], keep=False)
            if not assemble(name, turns, rows, self.config).same_as(memory):
                differing.append(name)
        return len(whole), differing

    def _shelf(self, boundary: str) -> _Shelf | None:
        live = boundary in self._shelves
        self.hits, self.misses = self.hits + live, self.misses + (not live)
        if not live and self.load is not None:
            traces, rows = self.load(boundary)
            if traces:
                self._shelves[boundary] = _Shelf(traces, rows)
        if boundary in self._shelves:
            self._shelves.move_to_end(boundary)
        return self._shelves.get(boundary)

    def _assemble(self, shelves: Mapping[str, _Shelf], chosen: Mapping[str, list[int]], *, whole: bool) -> Memory:
        """Traces in order of arrival, across boundaries, are put in order of time; rows follow them."""
        arrived = sorted((seq, name) for name, seqs in chosen.items() for seq in seqs)
        turns = order_turns([shelves[name].traces[seq] for seq, name in arrived])
        ordered = [arrived[place] for place in turns.source.tolist()]
        if len(chosen) == 1:
            ((name, shelf),) = shelves.items()
            rows = shelf.rows_of([seq for seq, _ in ordered], keep=whole)
            return assemble(name, turns, rows, self.config, shelf.titles if whole else None)
        parts: list[Forward] = []
        place: dict[tuple[int, str], int] = {}
        for name, seqs in chosen.items():
            place.update({(seq, name): len(place) + i for i, seq in enumerate(seqs)})
            parts.append(shelves[name].rows_of(seqs, keep=False))
        rows = Forward.cat(parts).take(torch.tensor([place[one] for one in ordered], dtype=torch.long))
        return assemble(", ".join(chosen), turns, rows, self.config)

    def _forget(self, boundary: str) -> None:
        for key in self._keys.pop(boundary, ()):
            self._assembled.pop(key, None)

    def _make_room(self, in_use: Sequence[str]) -> None:
        """Drop what was asked for longest ago: filtered memories beyond a few, then boundaries beyond the budget."""
        filtered = [key for key in self._assembled if key[1] or len(key[0]) > 1]
        for key in filtered[: max(0, len(filtered) - FILTERED)]:
            del self._assembled[key]
        if self.budget is None or self.load is None:
            return
        held = self.nbytes
        for name in [name for name in self._shelves if name not in in_use]:
            if held <= self.budget:
                return
            held -= self._shelves[name].nbytes
            del self._shelves[name]
            held -= sum(_own_bytes(self._assembled[key]) for key in self._keys.get(name, ()) if key in self._assembled)
            self._forget(name)

    @property
    def nbytes(self) -> int:
        """Bytes of live rows, and about as much again as the memories assembled from them share no tensor with."""
        shelves = sum(shelf.nbytes for shelf in self._shelves.values())
        return shelves + sum(_own_bytes(memory) for memory in self._assembled.values())


def _own_bytes(memory: Memory) -> int:
    index = memory.index
    postings = (index.unit_postings, index.window_postings, index.episode_postings, index.phrase_postings)
    tensors = [index.window_vectors, index.episode_vectors, index.edge_target, index.edge_weight]
    tensors += [tensor for one in postings for tensor in (one.counts, one.row, one.impact)]
    return sum(tensor.nbytes for tensor in tensors)
