"""Queries that wait, the earliest deadline first; a batch is the first of them, and as many behind it as fit."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from zeromem_torch.errors import ZeroMemError

A = TypeVar("A")
Q = TypeVar("Q")

LOOK_BEHIND = 64
"""Queries that may be passed over, too large for what is left of a batch, before the batch is taken as it is."""
ENOUGH = 32
"""Queries with which a batch has most of what batching brings."""


@dataclass(frozen=True)
class Batching:
    """What is searched together at most, and how much may wait.

    A query that is too large for any batch is searched alone. ``indexing`` is its part of the worker's time while
    queries wait: no more, so that they are answered, and no less, so that what was added is found one day.
    """

    batch: int  # queries
    batch_tokens: int
    batch_bytes: int  # of workspace
    queue: int  # queries and calls
    indexing: float = 0.1

    def __post_init__(self) -> None:
        for name in ("batch", "batch_tokens", "batch_bytes", "queue"):
            if getattr(self, name) < 1:
                raise ZeroMemError.of(name, "a whole number of at least 1", getattr(self, name), "pass 1 or more")
        if not 0 < self.indexing < 1:
            raise ZeroMemError.of("indexing", "a share between 0 and 1", self.indexing, "pass 0.1")

    def share(self, tokens: int, nbytes: int) -> float:
        """How much of a batch a query fills, by what it fills most of."""
        return max(1 / self.batch, min(1.0, max(tokens / self.batch_tokens, nbytes / self.batch_bytes)))


class Work(Generic[A, Q]):
    """One query; ``asked`` is whose it is, and ``seconds`` what it adds to the work, by the cost model."""

    __slots__ = ("asked", "deadline", "item", "nbytes", "place", "seconds", "since", "tokens", "waits")

    def __init__(
        self, asked: A, place: int, item: Q, size: tuple[int, int], seconds: float, deadline: float, since: float
    ) -> None:
        self.asked, self.place, self.item = asked, place, item
        self.tokens, self.nbytes = size
        self.seconds, self.deadline, self.since = seconds, deadline, since
        self.waits = True


class Deadlines(Generic[A, Q]):
    """The queue; it knows neither threads nor the clock. Equal deadlines keep the order of arrival."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.depth = 0
        self.seconds = 0.0
        self.latest = -math.inf  # deadline of anything that ever waited
        self._number = count()
        self._sorted: list[tuple[float, int, Work[A, Q]]] = []  # by (-deadline, -number), so the first to go is last

    def __iter__(self) -> Iterator[Work[A, Q]]:
        return (work for _, _, work in reversed(self._sorted) if work.waits)

    def add(self, works: Sequence[Work[A, Q]]) -> None:
        for work in works:
            insort(self._sorted, (-work.deadline, -next(self._number), work))
            self.seconds += work.seconds
            self.latest = max(self.latest, work.deadline)
        self.depth += len(works)

    def take(
        self, now: float, predict: Callable[[int, int], float] = lambda tokens, nbytes: 0.0
    ) -> tuple[list[Work[A, Q]], list[Work[A, Q]]]:
        """A batch, and those whose deadline has passed.

        What is searched together is answered together, so a batch grows beyond `ENOUGH` queries only while the first
        of its deadlines is met: ``predict`` says how many seconds tokens and bytes take.
        """
        most = self.batching
        batch: list[Work[A, Q]] = []
        late: list[Work[A, Q]] = []
        passed_over: list[tuple[float, int, Work[A, Q]]] = []
        tokens = nbytes = 0
        while self._sorted and len(batch) < most.batch and len(passed_over) < LOOK_BEHIND:
            entry = self._sorted.pop()
            work = entry[2]
            if not work.waits:
                continue
            if work.deadline <= now:
                self._leaves(work)
                late.append(work)
            elif batch and (tokens + work.tokens > most.batch_tokens or nbytes + work.nbytes > most.batch_bytes):
                passed_over.append(entry)
            elif len(batch) >= ENOUGH and (
                now + predict(tokens + work.tokens, nbytes + work.nbytes) > batch[0].deadline
            ):
                passed_over.append(entry)
                break
            else:
                self._leaves(work)
                batch.append(work)
                tokens, nbytes = tokens + work.tokens, nbytes + work.nbytes
        self._sorted += reversed(passed_over)
        return batch, late

    def forget(self, works: Sequence[Work[A, Q]]) -> int:
        """Nobody waits for these any more; how many had not been taken yet."""
        left = [work for work in works if work.waits]
        for work in left:
            self._leaves(work)
        if len(self._sorted) > 2 * self.depth + LOOK_BEHIND:  # else they go when their turn comes
            self._sorted = [entry for entry in self._sorted if entry[2].waits]
        return len(left)

    def clear(self) -> list[Work[A, Q]]:
        """All that waited."""
        left = list(self)
        self.forget(left)
        self._sorted.clear()
        return left

    def fits_between(self, start: float, seconds: float, deadline: float, slower: float) -> bool:
        """Whether work with an early deadline makes it, as do all behind it that would have made it without it.

        ``start`` is when the queue gets its turn; all seconds are to be multiplied by ``slower``.
        """
        done, own = start, seconds * slower
        placed = False
        for work in self:
            if not placed and work.deadline > deadline:
                placed, done = True, done + own
                if done > deadline:
                    return False
            done += work.seconds * slower
            if placed and done > work.deadline >= done - own:
                return False
        return placed or done + own <= deadline

    def _leaves(self, work: Work[A, Q]) -> None:
        work.waits = False
        self.depth -= 1
        self.seconds = self.seconds - work.seconds if self.depth else 0.0  # no rounding is carried on
