"""One thread owns the memory: queries are searched together, the earliest deadline first; indexing gets what is left.

What the thread does next, when one thing is done: a bounded run of calls, in the order they came; indexing, if its
share of the time is due; the queries with the earliest deadlines, as many as fit a batch; indexing again.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.serving.cost import CostModel
from zeromem_torch.serving.deadlines import Batching, Deadlines, Work
from zeromem_torch.serving.refusals import Overloaded, Refusal, TooLarge

if TYPE_CHECKING:
    from zeromem_torch.serving.metrics import Metrics

__all__ = ["Batching", "CostModel", "Failed", "MicroBatcher"]

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

CALLS_AT_ONCE, CALL_SECONDS = 64, 0.05
"""How many calls, and for how long, may hold up queries that wait."""
MANY, LINGER = 8, 0.005
"""Queries of a batch whose clients may ask again at once, and seconds that the first of them waits for half of them."""
PAUSE = 5.0
"""Seconds that indexing rests after an error, unless there is new work before."""
LOOK_AGAIN = 0.25
"""Seconds after which throttled indexing asks for its share again: the reader may have fallen silent."""

logger = logging.getLogger(__name__)


class Failed(Refusal):
    """A fault of ours: the server's log has the traceback, the caller gets its kind."""

    status, title = 500, "Internal error"


class Asked(Generic[R]):
    """One `submit`: its results, in the order asked, and how many are still missing."""

    __slots__ = ("future", "gone", "missing", "results")

    def __init__(self, future: asyncio.Future[list[R | ZeroMemError]], size: int) -> None:
        self.future = future
        self.results: list[Any] = [None] * size
        self.missing = size
        self.gone = False


@dataclass(eq=False)
class _Call:
    do: Callable[[], Any]
    deadline: float
    future: asyncio.Future[Any]
    context: contextvars.Context
    gone: bool = False


class MicroBatcher(Generic[Q, R]):
    """Runs everything that touches the memory, on one thread.

    ``run`` gets queries to be searched together and returns as many results. If it raises, the batch is halved until
    the query that it fails for is alone: its neighbours are answered. Whether work makes its deadline is predicted when
    it comes, and it is refused at once if not; work that nobody waits for any more, or whose deadline has passed, is
    dropped before it runs.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Q]], Sequence[R | ZeroMemError]],
        batching: Batching,
        *,
        cost: CostModel | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.batching = run, batching
        self.cost = CostModel() if cost is None else cost
        self.metrics, self.clock = metrics, clock
        self.background: Callable[[], bool] | None = None
        """One bounded step of indexing; True: there is more to do."""
        self.share: Callable[[], float] = lambda: 1.0
        """Of the worker's time, what indexing may take at all: less than 1 while a reader on the same GPU is busy.
        While queries wait it is at most ``batching.indexing`` besides."""
        self._changed = threading.Condition()  # guards all that follows
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()
        self._closing = False
        self._stop_at = math.inf
        self._drained = True
        self._idle = False
        self._queue: Deadlines[Asked[R], Q] = Deadlines(batching)
        self._calls: deque[_Call] = deque()
        self._calls_run, self._calls_until = 0, math.inf
        self._call_seconds = self._step_seconds = 0.0  # running means
        self._busy_until = -math.inf  # predicted; -inf when nothing runs
        self._more = False  # background work
        self._returning, self._linger_until = 0, -math.inf
        self._rest_until = -math.inf
        self._credit = 0.0  # seconds that indexing may take now; below 0 it took too much
        self._counted_to = 0.0  # the credit is reckoned up to this time
        self._held_up = False  # calls or queries run

    # What the event loop asks

    def start(self) -> None:
        """Start the thread; called inside the event loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self._counted_to = self.clock()
        self._thread = threading.Thread(target=self._work, name="zeromem-memory", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Queries and calls that wait."""
        return self._queue.depth + len(self._calls)

    @property
    def waiting_seconds(self) -> float:
        """Predicted, until all that waits now is done."""
        with self._changed:
            return self._ahead(self.clock()) + self._queued()

    @property
    def indexing(self) -> bool:
        """Whether there is background work left."""
        return self._more

    async def submit(
        self, items: Sequence[Q], sizes: Sequence[tuple[int, int]], *, deadline: float
    ) -> list[R | ZeroMemError]:
        """Results in the order of ``items``, whose ``sizes`` are tokens and bytes of workspace. ``deadline`` is a time
        of `clock`. All of one call are let in, or none: then `Overloaded` says for how long."""
        if not items:
            return []
        asked: Asked[R] = Asked(asyncio.get_running_loop().create_future(), len(items))
        now, part, share = self.clock(), self.cost.part, self.batching.share
        works = [
            Work(asked, place, item, size, part(*size, share(*size)), deadline, now)
            for place, (item, size) in enumerate(zip(items, sizes, strict=True))
        ]
        with self._changed:
            try:
                self._admit(now, len(items), sum(work.seconds for work in works), deadline)
            except Overloaded as error:
                if self.metrics:
                    self.metrics.shed(error.reason)
                raise
            self._reckon_if_idle()
            self._queue.add(works)
            self._wake()
        self._tell_depth()
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._forget(asked, works)
            raise

    async def call(self, do: Callable[[], T], *, deadline: float) -> T:
        """A short operation, run between batches in the order of arrival; what it raises is raised here."""
        made = _Call(do, deadline, asyncio.get_running_loop().create_future(), contextvars.copy_context())
        with self._changed:
            now = self.clock()
            try:
                finish = self._ahead(now) + self._call_seconds
                self._check_open(1)
                if deadline <= now or (finish > deadline - now and self._busy()):
                    raise _too_late(deadline - now, finish)
            except Overloaded as error:
                if self.metrics:
                    self.metrics.shed(error.reason)
                raise
            self._reckon_if_idle()
            self._calls.append(made)
            self._wake()
        try:
            return await made.future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            made.gone = True
            raise

    def poke(self) -> None:
        """There is new background work."""
        with self._changed:
            self._reckon()  # what passed before there was work earns no time for it
            self._more = self.background is not None
            self._rest_until = -math.inf
            self._wake()

    async def drain(self, seconds: float) -> bool:
        """Refuse new work, finish what waits, then index until all is done or time is up; then the thread ends.

        Returns whether all was done. What is running when time is up is waited for: the memory must not be closed
        beneath it.
        """
        if self._thread is None:
            return True
        with self._changed:
            self._closing = True
            self._stop_at = min(self._stop_at, self.clock() + seconds)
            self._wake()
        await self._over.wait()
        self._thread.join()
        return not self._more and self._drained

    # Admission; the lock is held

    def _admit(self, now: float, size: int, seconds: float, deadline: float) -> None:
        self._check_open(size)
        ahead = self._ahead(now)
        finish = ahead + self._queued(seconds)
        if deadline > now and (finish <= deadline - now or not self._busy()):  # an idle worker tries: it may learn
            return
        start, slower = now + ahead, self._slower()
        first = start + self.cost.fixed * slower  # if its batch is the next
        if first <= deadline < self._queue.latest and self._queue.fits_between(start, seconds, deadline, slower):
            return
        raise _too_late(deadline - now, finish)

    def _check_open(self, size: int) -> None:
        if self._closing or self._thread is None:
            state = "closing" if self._closing else "not started"
            raise Overloaded(
                f"server: expected one that takes work, got one that is {state}; try again when it is back",
                reason="closing",
                retry_after=1.0,
            )
        if size > self.batching.queue:
            advice = "ask for fewer at once"
            raise TooLarge(f"queries: expected at most {self.batching.queue} at once, got {size}; {advice}")
        if (over := self.depth + size - self.batching.queue) > 0:
            wait = (self._ahead(self.clock()) + self._queued()) * min(1.0, over / max(1, self.depth))
            raise Overloaded(
                f"queue: expected room for {size}, got {self.depth} of {self.batching.queue} waiting; "
                f"try again in {math.ceil(max(1.0, wait))} s",
                reason="queue",
                retry_after=max(1.0, wait),
            )

    def _busy(self) -> bool:
        return self._queue.depth > 0 or bool(self._calls) or self._busy_until > -math.inf

    def _ahead(self, now: float) -> float:
        """Predicted seconds until what runs, and the calls that wait, are done."""
        return max(0.0, self._busy_until - now) + len(self._calls) * self._call_seconds

    def _queued(self, more: float = 0.0) -> float:
        """Predicted seconds that the queue takes, with what is to be added; even a small batch has its fixed part."""
        seconds = self._queue.seconds + more
        return max(seconds, self.cost.fixed if seconds else 0.0) * self._slower()

    def _slower(self) -> float:
        """What the cost model's seconds are to be multiplied by: its correction, and what indexing takes meanwhile."""
        return self.cost.correction / (1 - self.batching.indexing if self._more else 1.0)

    def _forget(self, asked: Asked[R], works: Sequence[Work[Asked[R], Q]]) -> None:
        """Nobody waits for these any more."""
        with self._changed:
            asked.gone = True
            left = self._queue.forget(works)
        if self.metrics:
            self.metrics.dropped(left)
            self._tell_depth()

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._changed.notify()

    def _tell_depth(self) -> None:
        if self.metrics:
            self.metrics.queue(self.depth)

    # The thread

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                try:
                    job()
                except BaseException:  # a fault of this module; what it held is lost, the thread is not
                    logger.exception("the memory's thread failed at a piece of work")
        finally:
            self._tell_depth()
            self._hand_over(self._over.set)

    def _next(self) -> Callable[[], None] | None:
        """What to do now; None: it is over."""
        with self._changed:
            self._reckon()
            self._busy_until, self._held_up = -math.inf, False
            while True:
                now = self._reckon()
                if now >= self._stop_at:
                    self._refuse_the_rest()
                    return None
                if now < self._calls_until and self._calls_run < CALLS_AT_ONCE and self._calls:
                    return self._next_call(now)
                self._calls_run, self._calls_until = 0, math.inf
                waits = self._queue.depth > 0 or bool(self._calls)
                if self._may_index(now, waits):
                    self._busy_until = now + self._step_seconds
                    return self._index
                if self._queue.depth < self._returning and now < self._linger_until:
                    if not self._changed.wait(self._linger_until - now):
                        self._linger_until = -math.inf
                    continue
                if batch := self._take(now):
                    tokens, nbytes = sum(work.tokens for work in batch), sum(work.nbytes for work in batch)
                    self._busy_until, self._held_up = now + self.cost.predict(tokens, nbytes), True
                    return partial(self._search, batch, tokens, nbytes)
                if waits:  # calls, or queries that were all late
                    continue
                if self._closing:
                    return None
                self._idle = True
                self._changed.wait(self._until_indexing(now))
                self._idle = False

    def _linger(self, answered: int, now: float) -> None:
        """Those who were answered together mostly ask again together: the first of them waits a little for the rest."""
        self._returning = answered // 2 if answered >= MANY else 0
        self._linger_until = now + LINGER

    def _next_call(self, now: float) -> Callable[[], None]:
        if not self._calls_run:
            self._calls_until = now + CALL_SECONDS
        self._calls_run += 1
        self._busy_until, self._held_up = now + self._call_seconds, True
        return partial(self._run_call, self._calls.popleft())

    def _refuse_the_rest(self) -> None:
        """Time is up."""
        self._drained = not self._queue.depth and not self._calls
        error = Overloaded("server: expected to finish, got closed before; try again", reason="closing", retry_after=1)
        finished: list[Asked[R]] = []
        for work in self._queue.clear():
            finished += self._note(work, error)
        self._hand_over(_resolve, finished)
        while self._calls:
            self._hand_over(_settle, self._calls.popleft().future, None, error)

    # Indexing's share of the time

    def _reckon(self) -> float:
        """Bring the credit of indexing up to now, and return now."""
        now = self.clock()
        passed, self._counted_to = now - self._counted_to, now
        if passed > 0:
            held_up = self._held_up or self._queue.depth > 0 or bool(self._calls)
            earned = self._credit + passed * self._share(held_up)
            self._credit = earned if held_up else min(earned, max(self._credit, 0.0))  # a debt ends, no wealth begins
        if not self._more:
            self._credit = min(self._credit, 0.0)
        return now

    def _reckon_if_idle(self) -> None:
        """Until now nothing waited."""
        if self._idle:
            self._reckon()

    def _share(self, held_up: bool) -> float:
        try:
            share = min(1.0, max(0.0, self.share()))
        except Exception:
            logger.exception("the share of indexing is not known; it takes what it may while queries wait")
            share = self.batching.indexing
        return min(share, self.batching.indexing) if held_up else share

    def _may_index(self, now: float, waits: bool) -> bool:
        if not self._more or self.background is None:
            return False
        if self._closing:  # all that is left to do; an error ends it
            return not waits and now >= self._rest_until
        return now >= self._rest_until and (self._credit >= 0 or (not waits and self._share(False) >= 1))

    def _until_indexing(self, now: float) -> float | None:
        if not self._more or self.background is None:
            return None
        if now < self._rest_until:
            return self._rest_until - now
        share = self._share(False)
        return min(LOOK_AGAIN, max(0.0, -self._credit) / share) if share > 0 else LOOK_AGAIN

    def _index(self) -> None:
        assert self.background is not None
        began, self._more = self.clock(), False
        try:
            more = self.background()
        except BaseException:
            logger.exception("indexing failed; it goes on with the next change, or in %.0f s", PAUSE)
            more, self._rest_until = True, self.clock() + PAUSE
        took = self.clock() - began
        with self._changed:
            self._more |= more
            self._credit -= took
            self._step_seconds = _mean(self._step_seconds, took)

    # Calls

    def _run_call(self, call: _Call) -> None:
        began = self.clock()
        if call.gone:
            if self.metrics:
                self.metrics.dropped(1)
            return
        result: Any = None
        error: BaseException | None = None
        if call.deadline <= began:
            error = self._missed(began - call.deadline)
        else:
            try:
                result = call.context.run(call.do)
            except BaseException as raised:
                fine = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                error = raised if fine else self._told(raised)  # the others would end the event loop, or a future
            self._call_seconds = _mean(self._call_seconds, self.clock() - began)
        self._hand_over(_settle, call.future, result, error)

    # Queries

    def _take(self, now: float) -> list[Work[Asked[R], Q]]:
        """The next batch; those that are late are told so."""
        batch, late = self._queue.take(now, self.cost.predict)
        finished: list[Asked[R]] = []
        for work in late:
            finished += self._note(work, self._missed(now - work.deadline))
        if finished:
            self._hand_over(_resolve, finished)
        if self.metrics:
            for work in batch:
                self.metrics.waited(now - work.since)
        return batch

    def _search(self, batch: list[Work[Asked[R], Q]], tokens: int, nbytes: int) -> None:
        began = self.clock()
        finished: list[Asked[R]] = []
        whole = self._run(batch, finished)
        ended = self.clock()
        self._linger(len(batch), ended)
        if whole:  # a batch that was run in pieces says nothing about its cost
            self.cost.observe(tokens, nbytes, ended - began)
        if finished:
            self._hand_over(_resolve, finished)
        if self.metrics:
            self.metrics.batch(len(batch), tokens, ended - began)
            for _ in range(sum(work.deadline < ended for work in batch)):
                self.metrics.deadline_missed()
            self._tell_depth()

    def _run(self, batch: list[Work[Asked[R], Q]], finished: list[Asked[R]]) -> bool:
        """Answer these; False if they were not run as one."""
        if not batch:
            return False
        try:
            results = self.run([work.item for work in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} queries")
        except BaseException as error:
            if len(batch) > 1:
                half = len(batch) // 2
                self._run(self._still(batch[:half], finished), finished)
                self._run(self._still(batch[half:], finished), finished)
                return False
            finished += self._note(batch[0], self._told(error))
            return False
        for work, result in zip(batch, results, strict=True):
            finished += self._note(work, result)
        return True

    def _still(self, batch: list[Work[Asked[R], Q]], finished: list[Asked[R]]) -> list[Work[Asked[R], Q]]:
        """Those of a batch in pieces that are still waited for, and not late."""
        now = self.clock()
        still: list[Work[Asked[R], Q]] = []
        for work in batch:
            if work.deadline <= now:
                finished += self._note(work, self._missed(now - work.deadline))
            elif not work.asked.gone:
                still.append(work)
        return still

    def _note(self, work: Work[Asked[R], Q], result: R | ZeroMemError) -> list[Asked[R]]:
        """Keep a result; the call it belongs to, if it was the last one missing."""
        asked = work.asked
        asked.results[work.place] = result
        asked.missing -= 1
        return [] if asked.missing else [asked]

    def _missed(self, late: float) -> Overloaded:
        if self.metrics:
            self.metrics.deadline_missed()
        message = f"deadline: expected to begin before it, got to it {late:.2f} s after; try again, or allow more time"
        return Overloaded(message, reason="deadline", retry_after=max(1.0, late))

    def _told(self, error: BaseException) -> ZeroMemError:
        if isinstance(error, ZeroMemError):
            return error
        logger.error("the memory's thread was asked for what failed", exc_info=error)
        return Failed(f"memory: expected an answer, got {type(error).__name__}; the server's log says where")

    def _hand_over(self, do: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(do, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits
            logger.debug("an answer came after the event loop had ended")


def _resolve(finished: Sequence[Asked[Any]]) -> None:
    for asked in finished:
        if not asked.future.done():
            asked.future.set_result(asked.results)


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _too_late(allowed: float, needed: float) -> Overloaded:
    wait = max(1.0, needed - allowed)
    return Overloaded(
        f"deadline: expected one that can be met, got {max(0.0, allowed):.2f} s for what takes {needed:.2f} s; "
        f"try again in {math.ceil(wait)} s, or allow more time",
        reason="deadline",
        retry_after=wait,
    )


def _mean(mean: float, value: float) -> float:
    return value if mean == 0 else mean + 0.1 * (value - mean)
