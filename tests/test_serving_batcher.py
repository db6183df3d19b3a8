"""Who goes first, who is refused and who is dropped; that every query gets its own answer, once, whatever else runs."""

import asyncio
import contextvars
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.serving.batcher import CALLS_AT_ONCE, Batching, CostModel, Failed, MicroBatcher
from zeromem_torch.serving.cost import ENOUGH_TO_FIT
from zeromem_torch.serving.deadlines import ENOUGH, LOOK_BEHIND, Deadlines, Work
from zeromem_torch.serving.metrics import Metrics
from zeromem_torch.serving.refusals import Overloaded, TooLarge

LATER = 1e6
"""A deadline that nothing misses."""
SMALL = (1, 1)
"""Tokens and bytes of a query that fits anywhere."""


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds

    def __call__(self) -> float:
        return self.now


class Toy:
    """Answers a number with its double, keeps the batches it was given, and fails when one of them is poison."""

    def __init__(self, clock: Clock, seconds: float = 0.0, poison: Sequence[int] = ()) -> None:
        self.clock, self.seconds, self.poison = clock, seconds, set(poison)
        self.ran: list[list[int]] = []

    def __call__(self, items: Sequence[int]) -> list[int | ZeroMemError]:
        self.clock.advance(self.seconds)
        self.ran.append(list(items))
        if self.poison & set(items):
            raise KeyError("poison")
        return [2 * item for item in items]


class Server(MicroBatcher[int, int]):
    """A batcher with a toy to run, on a clock of its own."""

    def __init__(
        self, *, batch: int = 100, tokens: int = 1000, nbytes: int = 1000, queue: int = 1000, seconds: float = 0.0,
        poison: Sequence[int] = (), cost: CostModel | None = None,
    ) -> None:  # fmt: skip
        self.time = Clock()
        self.toy = Toy(self.time, seconds, poison)
        self.counted = Metrics()
        super().__init__(
            self.toy, Batching(batch, tokens, nbytes, queue), cost=cost, metrics=self.counted, clock=self.time
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.counted.registry.get_sample_value(f"zeromem_{name}", labels)

    @property
    def order(self) -> list[int]:
        """What ran, in the order it did."""
        return [item for batch in self.toy.ran for item in batch]


@asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    server.start()
    try:
        yield server
    finally:
        await server.drain(LATER)


class Plug:
    """A call that keeps the worker until it is pulled."""

    def __init__(self) -> None:
        self.begun, self.pulled = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.pulled.wait(10)

    def pull(self) -> None:
        self.pulled.set()


async def plugged(server: Server) -> tuple[Plug, "asyncio.Task[None]"]:
    plug = Plug()
    task = asyncio.create_task(server.call(plug, deadline=LATER))
    await asyncio.to_thread(plug.begun.wait, 10)
    return plug, task


async def asked(server: Server, *items: int, deadline: float = LATER, size: tuple[int, int] = SMALL) -> Any:
    """A task that waits for these; when this returns it has been let in or refused."""
    task = asyncio.create_task(server.submit(items, [size] * len(items), deadline=deadline))
    await asyncio.sleep(0)
    return task


async def until(true: Callable[[], bool]) -> None:
    while not true():  # the limit is that of `scene`
        await asyncio.sleep(0.001)


def scene(play: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine, and that ends."""

    def test() -> None:
        asyncio.run(asyncio.wait_for(play(), 30))

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


async def refusal(answer: Awaitable[Any]) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        await answer
    return caught.value


# Order and batches


@scene
async def test_the_earliest_deadline_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    async with started(Server(batch=1)) as server:
        plug, _ = await plugged(server)
        deadlines = [30, 10, 20, 10, 40, 5]
        tasks = [await asked(server, number, deadline=deadline) for number, deadline in enumerate(deadlines)]
        plug.pull()
        assert await asyncio.gather(*tasks) == [[2 * number] for number in range(6)]
        assert server.toy.ran == [[5], [1], [3], [2], [0], [4]]


@scene
async def test_a_batch_is_the_earliest_and_as_many_behind_it_as_fit() -> None:
    async with started(Server(batch=3, tokens=10, nbytes=100)) as server:
        plug, _ = await plugged(server)
        sizes = [(6, 1), (5, 1), (4, 1), (1, 90), (1, 20), (50, 500), (1, 1)]
        tasks = [await asked(server, number, size=size) for number, size in enumerate(sizes)]
        plug.pull()
        await asyncio.gather(*tasks)
        # 1 is passed over, as 6 + 5 tokens are too many; 4 does not fit beside 3's bytes; 5 fits nowhere and runs alone
        assert server.toy.ran == [[0, 2], [1, 3, 6], [4], [5]]


@scene
async def test_no_more_queries_than_the_batch_allows() -> None:
    async with started(Server(batch=3)) as server:
        plug, _ = await plugged(server)
        tasks = [await asked(server, *range(10 * number, 10 * number + 4)) for number in range(2)]
        plug.pull()
        assert await asyncio.gather(*tasks) == [[0, 2, 4, 6], [20, 22, 24, 26]]
        assert server.toy.ran == [[0, 1, 2], [3, 10, 11], [12, 13]]


@scene
async def test_one_by_one_is_a_batch_too() -> None:
    async with started(Server(batch=1, tokens=1, nbytes=1, queue=3)) as server:
        assert await server.submit([1, 2, 3], [(9, 9)] * 3, deadline=LATER) == [2, 4, 6]
        assert server.toy.ran == [[1], [2], [3]]
        assert await server.submit([], [], deadline=LATER) == []


def test_what_was_passed_over_keeps_its_place_and_a_long_line_of_it_ends_the_batch() -> None:
    line: Deadlines[None, int] = Deadlines(Batching(100, 10, 100, 1000))
    sizes = [6, *[5] * (LOOK_BEHIND + 5), 1]
    line.add([Work(None, place, place, (size, 1), 0.0, LATER, 0.0) for place, size in enumerate(sizes)])
    taken, late = line.take(0.0)
    assert ([work.item for work in taken], late) == ([0], [])
    assert [work.item for work in line] == list(range(1, len(sizes)))


@pytest.mark.parametrize(("now", "is_late"), [(0.9, False), (1.0, True), (1.1, True)])
def test_at_its_deadline_it_is_late(now: float, is_late: bool) -> None:
    line: Deadlines[None, int] = Deadlines(Batching(1, 1, 1, 1))
    line.add([Work(None, 0, 0, SMALL, 0.0, 1.0, 0.0)])
    batch, late = line.take(now)
    assert (len(batch), len(late)) == (not is_late, is_late)


def test_what_nobody_waits_for_does_not_pile_up() -> None:
    line: Deadlines[None, int] = Deadlines(Batching(10, 10, 10, 1000))
    line.add([Work(None, 0, 0, SMALL, 1.0, 1.0, 0.0)])
    for number in range(1000):
        late = Work(None, 0, number, SMALL, 1.0, LATER, 0.0)
        line.add([late])
        assert line.forget([late]) == 1
        assert line.forget([late]) == 0
    assert (line.depth, line.seconds) == (1, 1.0)
    assert len(line._sorted) <= LOOK_BEHIND + 3


# Admission


@scene
async def test_a_full_queue_refuses_and_lets_in_all_of_a_call_or_none() -> None:
    async with started(Server(batch=1, queue=4, cost=CostModel(fixed=2.0))) as server:
        plug, _ = await plugged(server)
        waiting = await asked(server, 1, 2, 3)
        error = await refusal(server.submit([4, 5], [SMALL] * 2, deadline=LATER))
        # three wait, one place is missing: predicted to be free when one of them is done
        assert (error.reason, error.status) == ("queue", 429)
        assert error.retry_after == pytest.approx(2.0)
        assert "3 of 4 waiting" in str(error)
        last = await asked(server, 6)
        assert server.depth == 4
        assert (await refusal(server.call(int, deadline=LATER))).reason == "queue"
        plug.pull()
        assert (await waiting, await last) == ([2, 4, 6], [12])
        assert server.order == [1, 2, 3, 6]
        assert server.value("shed_total", reason="queue") == 2
        with pytest.raises(TooLarge, match="at most 4 at once, got 5"):
            await server.submit([0] * 5, [SMALL] * 5, deadline=LATER)


@scene
async def test_what_would_come_too_late_is_refused_and_told_for_how_long() -> None:
    async with started(Server(batch=2, cost=CostModel(fixed=1.0, per_token=0.5))) as server:
        plug, _ = await plugged(server)
        waiting = await asked(server, 1, 2, size=(2, 1), deadline=4.0)  # one batch: 1 s and 4 tokens
        assert server.waiting_seconds == pytest.approx(3.0)
        error = await refusal(server.submit([3], [(2, 1)], deadline=2.0))  # half a batch more: 1.5 s
        assert (error.reason, error.status) == ("deadline", 503)
        assert error.retry_after == pytest.approx(2.5)
        assert "2.00 s" in str(error)
        assert "4.50 s" in str(error)
        assert (await refusal(server.submit([3], [(2, 1)], deadline=4.4))).retry_after == 1  # never less than a second
        made = await asked(server, 4, size=(2, 1), deadline=4.6)
        assert (await refusal(server.submit([5], [SMALL], deadline=0.0))).reason == "deadline"
        plug.pull()
        assert (await waiting, await made) == ([2, 4], [8])
        assert server.value("shed_total", reason="deadline") == 3


@scene
async def test_a_small_batch_takes_its_fixed_part_too() -> None:
    async with started(Server(batch=100, cost=CostModel(fixed=1.0))) as server:
        plug, _ = await plugged(server)
        patient = await asked(server, 1, deadline=1.0)
        assert server.waiting_seconds == 1.0
        for deadline in (0.9, 0.99):
            assert (await refusal(server.submit([2], [SMALL], deadline=deadline))).retry_after == 1.0
        beside = await asked(server, 3, deadline=1.0)  # the same batch
        plug.pull()
        assert (await patient, await beside) == ([2], [6])


@scene
async def test_indexing_that_runs_meanwhile_is_reckoned_with() -> None:
    async with started(Server(batch=1, cost=CostModel(fixed=1.0))) as server:
        plug, _ = await plugged(server)
        waiting = await asked(server, *range(9))
        assert server.waiting_seconds == pytest.approx(9.0)
        Indexing(server, 3, 0.0)
        server.poke()
        assert server.waiting_seconds == pytest.approx(10.0)
        plug.pull()
        await waiting


@scene
async def test_the_rest_of_what_runs_is_reckoned_with() -> None:
    server = Server(batch=1, cost=CostModel(fixed=10.0))
    gate = threading.Event()
    answer = server.run
    server.run = lambda items: answer(items) if gate.wait(10) else []
    async with started(server):
        running = await asked(server, 1)
        await until(lambda: server.depth == 0)
        server.time.now = 4.0
        assert server.waiting_seconds == pytest.approx(6.0)
        await refusal(server.submit([2], [SMALL], deadline=19.0))
        made = await asked(server, 3, deadline=21.0)
        server.time.now = 15.0  # longer than predicted: no time is left, and none is negative
        assert server.waiting_seconds == pytest.approx(10.0)
        gate.set()
        assert (await running, await made) == ([2], [6])


@scene
async def test_the_urgent_goes_between_if_nobody_is_late_for_it() -> None:
    async with started(Server(batch=1, cost=CostModel(fixed=1.0))) as server:
        plug, _ = await plugged(server)
        patient = [await asked(server, number, deadline=5.0) for number in range(4)]
        urgent = await asked(server, 10, deadline=1.5)
        assert not urgent.done()
        error = await refusal(server.submit([11], [SMALL], deadline=2.5))  # the last patient one would be done at 6
        assert error.reason == "deadline"
        plug.pull()
        assert await urgent == [20]
        await asyncio.gather(*patient)
        assert server.order == [10, 0, 1, 2, 3]


@scene
async def test_an_idle_worker_tries_what_is_predicted_to_be_late() -> None:
    """A model that overestimates would else refuse everything, and never learn."""
    async with started(Server(cost=CostModel(fixed=100.0))) as server:
        assert await server.submit([1], [SMALL], deadline=1.0) == [2]


# What is dropped


@scene
async def test_what_nobody_waits_for_any_more_never_runs() -> None:
    async with started(Server(batch=1, queue=4)) as server:
        plug, _ = await plugged(server)
        gone, kept = await asked(server, 1, 2, 3), await asked(server, 4)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert server.depth == 1
        assert server.waiting_seconds == 0
        more = await asked(server, 5, 6, 7)  # there is room again
        plug.pull()
        assert (await kept, await more) == ([8], [10, 12, 14])
        assert server.order == [4, 5, 6, 7]
        assert server.value("dropped_total") == 3
        await until(lambda: server.value("queue_depth") == 0)


@scene
async def test_a_client_that_goes_while_its_query_runs_harms_nobody() -> None:
    server = Server()
    plug = Plug()
    answer = server.run

    def run(items: Sequence[int]) -> Sequence[int | ZeroMemError]:
        plug()
        return answer(items)

    server.run = run
    async with started(server):
        first, second = await asked(server, 1), await asked(server, 2)
        await asyncio.to_thread(plug.begun.wait, 10)
        first.cancel()
        plug.pull()
        assert await second == [4]
        assert first.cancelled()


@scene
async def test_a_deadline_that_has_passed_is_told_and_counted() -> None:
    async with started(Server(batch=10)) as server:
        plug, _ = await plugged(server)
        late, other = await asked(server, 1, 2, deadline=5.0), await asked(server, 3, deadline=50.0)
        call = asyncio.create_task(server.call(lambda: server.toy.ran.append([0]), deadline=5.0))
        await asyncio.sleep(0)
        server.time.now = 7.0
        plug.pull()
        results = await late
        assert [(result.reason, result.status, result.retry_after) for result in results] == [
            ("deadline", 503, 2.0)
        ] * 2
        assert (await refusal(call)).reason == "deadline"
        assert await other == [6]
        assert server.toy.ran == [[3]]
        assert server.value("deadline_misses_total") == 3


@scene
async def test_an_answer_that_comes_late_is_given_and_counted() -> None:
    async with started(Server(seconds=3.0)) as server:
        assert await server.submit([1, 2], [SMALL] * 2, deadline=2.0) == [2, 4]
        await until(lambda: server.value("deadline_misses_total") == 2)


# Faults


@scene
async def test_poison_harms_only_itself() -> None:
    async with started(Server(batch=8, poison=[3, 6])) as server:
        plug, _ = await plugged(server)
        tasks = [await asked(server, number) for number in range(8)]
        plug.pull()
        results = [result for [result] in await asyncio.gather(*tasks)]
        assert [number for number in range(8) if isinstance(results[number], Failed)] == [3, 6]
        assert [results[number] for number in (0, 1, 2, 4, 5, 7)] == [0, 2, 4, 8, 10, 14]
        assert results[3].status == 500
        assert "KeyError" in str(results[3])
        assert "poison" not in str(results[3])  # what an error says may hold a text
        answered = [batch for batch in server.toy.ran if not server.toy.poison & set(batch)]
        assert sorted(item for batch in answered for item in batch) == [0, 1, 2, 4, 5, 7]
        assert await server.submit([9], [SMALL], deadline=LATER) == [18]


@scene
async def test_in_a_batch_that_is_halved_the_gone_and_the_late_are_left_out() -> None:
    server = Server(batch=8)
    plug = Plug()
    answer = server.run
    first = True

    def run(items: Sequence[int]) -> Sequence[int | ZeroMemError]:
        nonlocal first
        if first:
            first = False
            plug()
            raise RuntimeError
        return answer(items)

    async with started(server):
        before, _ = await plugged(server)
        server.run = run
        gone, late, kept = await asked(server, 1), await asked(server, 2, deadline=5.0), await asked(server, 3)
        before.pull()
        await asyncio.to_thread(plug.begun.wait, 10)
        gone.cancel()
        await asyncio.sleep(0)
        server.time.now = 6.0
        plug.pull()
        assert await kept == [6]
        assert (await late)[0].reason == "deadline"
        assert server.toy.ran == [[3]]


@pytest.mark.parametrize("fault", [SystemExit(1), KeyboardInterrupt(), MemoryError(), ZeroMemError("mine"), None])
def test_the_thread_survives(fault: BaseException | None) -> None:
    @scene
    async def play() -> None:
        server = Server()
        answer = server.run

        def run(items: Sequence[int]) -> Sequence[int | ZeroMemError]:
            if fault is None:
                return [1, 2, 3]  # results for other queries than were asked
            raise fault

        server.run = run
        async with started(server):
            [result] = await server.submit([1], [SMALL], deadline=LATER)
            assert result is fault if isinstance(fault, ZeroMemError) else isinstance(result, Failed)
            server.run = answer
            assert await server.submit([1], [SMALL], deadline=LATER) == [2]

    play()


@scene
async def test_errors_that_are_results_are_handed_on() -> None:
    server = Server()
    error = ZeroMemError("no such boundary")
    server.run = lambda items: [error if item == 2 else item for item in items]
    async with started(server):
        assert await server.submit([1, 2, 3], [SMALL] * 3, deadline=LATER) == [1, error, 3]


# Calls


@scene
async def test_calls_run_in_order_of_arrival_and_before_queries() -> None:
    async with started(Server()) as server:
        plug, _ = await plugged(server)
        query = await asked(server, 0, deadline=1.0)
        ran: list[int] = server.toy.ran  # type: ignore[assignment]
        calls = [asyncio.create_task(server.call(partial(ran.append, n), deadline=LATER - n)) for n in range(5)]
        await asyncio.sleep(0)
        plug.pull()
        await asyncio.gather(query, *calls)
        assert server.toy.ran == [0, 1, 2, 3, 4, [0]]


@pytest.mark.parametrize(("seconds", "before"), [(0.0, CALLS_AT_ONCE), (0.02, 3)])
def test_a_flood_of_calls_holds_queries_up_only_so_long(seconds: float, before: int) -> None:
    @scene
    async def play() -> None:
        async with started(Server(batch=1)) as server:
            plug, _ = await plugged(server)
            ran = server.toy.ran

            def call() -> None:
                server.time.advance(seconds)
                ran.append([])

            queries = await asked(server, 1, 2)
            calls = [asyncio.create_task(server.call(call, deadline=LATER)) for _ in range(3 * CALLS_AT_ONCE)]
            await asyncio.sleep(0)
            plug.pull()
            await asyncio.gather(queries, *calls)
            first, second = ran.index([1]), ran.index([2])
            assert first in (before - 1, before)  # the plug was one of them
            assert second - first - 1 == before
            assert len(ran) == 3 * CALLS_AT_ONCE + 2

    play()


@scene
async def test_a_call_returns_or_raises_what_it_did_and_sees_the_context_of_its_caller() -> None:
    who = contextvars.ContextVar("who", default="nobody")
    async with started(Server()) as server:
        who.set("ann")
        assert await server.call(who.get, deadline=LATER) == "ann"
        assert await server.call(threading.get_ident, deadline=LATER) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await server.call(lambda: 1 / 0, deadline=LATER)
        empty: Iterator[int] = iter([])
        with pytest.raises(Failed, match="StopIteration"):  # it would end a future
            await server.call(lambda: next(empty), deadline=LATER)
        with pytest.raises(Failed, match="SystemExit"):  # it would end the event loop
            await server.call(exit, deadline=LATER)
        assert await server.call(lambda: 5, deadline=LATER) == 5


@scene
async def test_a_call_that_nobody_waits_for_never_runs() -> None:
    async with started(Server()) as server:
        plug, _ = await plugged(server)
        ran: list[int] = []
        call = asyncio.create_task(server.call(lambda: ran.append(1), deadline=LATER))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        plug.pull()
        await server.call(lambda: ran.append(2), deadline=LATER)
        assert ran == [2]
        assert server.value("dropped_total") == 1


# Indexing


class Indexing:
    """Background work of so many steps, each of which takes its time."""

    def __init__(self, server: Server, steps: int, seconds: float) -> None:
        self.server, self.left, self.seconds = server, steps, seconds
        self.spent = 0.0
        self.seen: list[tuple[float, float]] = []  # what was spent, and the time, when a batch was done
        server.background = self
        answer = server.run

        def run(items: Sequence[int]) -> Sequence[int | ZeroMemError]:
            results = answer(items)
            self.seen.append((self.spent, server.time.now))
            return results

        server.run = run

    def __call__(self) -> bool:
        self.left -= 1
        self.spent += self.seconds
        self.server.time.advance(self.seconds)
        return self.left > 0


@pytest.mark.parametrize(("query", "step"), [(0.01, 0.004), (0.01, 0.1), (1.0, 0.01), (0.03, 0.03)])
@pytest.mark.parametrize("given_share", [1.0, 0.05])
def test_while_queries_wait_indexing_takes_its_share_no_more_and_no_less(
    query: float, step: float, given_share: float
) -> None:
    @scene
    async def play() -> None:
        server = Server(batch=1, queue=2000, seconds=query)
        indexing = Indexing(server, 10**9, step)
        server.share = lambda: given_share
        server.start()
        plug, _ = await plugged(server)
        flood = await asked(server, *range(1500))
        server.poke()
        plug.pull()
        await flood
        spent, passed = indexing.seen[-1]
        share = min(given_share, server.batching.indexing)
        assert spent >= share * 1500 * query - step
        took = 1500 * query / (1 - share)
        assert passed <= took + 2 * step / share
        indexing.left = 1
        assert await server.drain(LATER)

    play()


@scene
async def test_indexing_waits_for_a_busy_reader_and_asks_again() -> None:
    server = Server()
    indexing = Indexing(server, 20, 1.0)
    server.share = lambda: 0.25
    async with started(server):
        server.poke()
        for _ in range(40):
            # A second that passes while the thread is still at a call counts as one in which queries wait.
            await until(lambda: indexing.spent >= 0.1 * server.time.now - 1)
            assert indexing.spent <= 0.25 * server.time.now + 1  # one step may be ahead of its time
            server.time.advance(1.0)
            await server.call(int, deadline=LATER)
        assert indexing.left > 0
        server.share = lambda: 1.0  # the reader fell silent: no poke is needed
        await until(lambda: indexing.left <= 0)
        assert not server.indexing


@scene
async def test_what_passed_before_there_was_work_earns_it_no_time() -> None:
    async with started(Server(batch=1, seconds=0.01)) as server:
        indexing = Indexing(server, 10**9, 0.01)
        server.time.now = 1000.0
        await (await asked(server, *range(800)))
        plug, _ = await plugged(server)
        flood = await asked(server, *range(200))
        server.poke()
        plug.pull()
        await flood
        spent, _ = indexing.seen[-1]
        assert 0 < spent <= 0.1 * 200 * 0.01 / 0.9 + 0.01
        indexing.left = 1


@scene
async def test_indexing_that_fails_rests_until_there_is_more_and_kills_nothing() -> None:
    async with started(Server()) as server:
        failures: list[float] = []

        def fail() -> bool:
            failures.append(server.time.now)
            raise OSError("disk full")

        server.background = fail
        server.poke()
        await until(lambda: len(failures) == 1)
        for number in range(20):
            assert await server.submit([number], [SMALL], deadline=LATER) == [2 * number]
        assert len(failures) == 1
        assert server.indexing
        Indexing(server, 3, 0.0)
        server.poke()
        await until(lambda: not server.indexing)


@scene
async def test_a_share_that_cannot_be_told_stops_nothing() -> None:
    async with started(Server()) as server:
        indexing = Indexing(server, 3, 0.0)
        server.share = lambda: 1 / 0
        server.poke()
        await until(lambda: indexing.left == 0)
        assert await server.submit([1], [SMALL], deadline=LATER) == [2]


@scene
async def test_work_that_comes_while_indexing_runs_is_not_forgotten() -> None:
    async with started(Server()) as server:
        plug, steps = Plug(), count()

        def step() -> bool:
            if next(steps) == 0:
                plug()
            return False

        server.background = step
        server.poke()
        await asyncio.to_thread(plug.begun.wait, 10)
        server.poke()
        plug.pull()
        await until(lambda: not server.indexing)
        assert next(steps) == 2


# The end


@scene
async def test_draining_finishes_what_waits_then_indexes_and_refuses_what_is_new() -> None:
    server = Server(batch=2)
    server.share = lambda: 0.0  # no reader is spared now
    server.start()
    plug, held = await plugged(server)
    indexing = Indexing(server, 5, 0.1)
    server.poke()
    queries, call = await asked(server, 1, 2, 3), asyncio.create_task(server.call(lambda: "done", deadline=LATER))
    await asyncio.sleep(0)
    drained = asyncio.create_task(server.drain(100.0))
    await asyncio.sleep(0)
    for refused in (server.submit([4], [SMALL], deadline=LATER), server.call(int, deadline=LATER)):
        error = await refusal(refused)
        assert (error.reason, error.status) == ("closing", 503)
    plug.pull()
    assert await drained
    assert (await queries, await call) == ([2, 4, 6], "done")
    await held
    assert indexing.left == 0
    assert server._thread is not None
    assert not server._thread.is_alive()
    assert await server.drain(1.0)  # once more changes nothing


@scene
async def test_when_time_is_up_what_waits_is_refused_and_what_runs_is_waited_for() -> None:
    server = Server(batch=1, seconds=1.0)
    server.start()
    plug, held = await plugged(server)
    Indexing(server, 5, 1.0)
    server.poke()
    query, other = await asked(server, 1, 2, 3), await asked(server, 9)
    drained = asyncio.create_task(server.drain(2.0))
    await asyncio.sleep(0)
    plug.pull()
    assert not await drained
    await held
    first, second, third = await query
    assert (first, second) == (2, 4)
    assert third.reason == "closing"
    assert (await other)[0].reason == "closing"
    assert server.toy.ran == [[1], [2]]
    assert server.depth == 0


@scene
async def test_indexing_that_is_not_done_in_time_is_told() -> None:
    server = Server()
    server.start()
    Indexing(server, 10**9, 1.0)
    server.poke()
    assert not await server.drain(10.0)
    assert server.time.now == pytest.approx(10.0, abs=1.01)


@scene
async def test_what_is_late_does_not_keep_draining_from_the_rest() -> None:
    server = Server()
    server.start()
    plug, _ = await plugged(server)
    indexing = Indexing(server, 3, 0.1)
    server.poke()
    late = await asked(server, 1, deadline=1.0)
    server.time.now = 2.0
    drained = asyncio.create_task(server.drain(LATER))
    await asyncio.sleep(0)
    plug.pull()
    assert await drained
    assert (await late)[0].reason == "deadline"
    assert indexing.left == 0


@scene
async def test_before_it_starts_it_refuses() -> None:
    server = Server()
    assert (await refusal(server.submit([1], [SMALL], deadline=LATER))).reason == "closing"
    assert await server.drain(1.0)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch_tokens": -1}, {"queue": 0}, {"indexing": 0.0}])
def test_batches_of_nothing_are_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"batch": 1, "batch_tokens": 1, "batch_bytes": 1, "queue": 1}
    with pytest.raises(ZeroMemError, match=next(iter(wrong))):
        Batching(**{**right, **wrong})


# Any schedule

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.integers(1, 6),
            st.sampled_from([0.0, 0.5, 2.0, 5.0, 20.0, LATER]),
            st.tuples(st.integers(1, 40), st.integers(1, 40)),
            st.integers(0, 7),
        ),
        st.tuples(st.just("call"), st.sampled_from([0.5, LATER])),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, 10.0])),
        st.tuples(st.just("rest"), st.sampled_from([0.0, 0.0005])),
        st.tuples(st.just("poke")),
        st.tuples(st.just("plug")),
    ),
    max_size=30,
)


@settings(max_examples=150)
@given(steps=STEPS, batch=st.integers(1, 5), queue=st.integers(1, 20), seconds=st.sampled_from([0.0, 0.3]))
def test_whatever_comes_nothing_is_lost_and_nothing_is_answered_twice(
    steps: list[tuple[Any, ...]], batch: int, queue: int, seconds: float
) -> None:
    asyncio.run(asyncio.wait_for(_any_schedule(steps, batch, queue, seconds), 30))


async def _any_schedule(steps: list[tuple[Any, ...]], batch: int, queue: int, seconds: float) -> None:
    server = Server(batch=batch, tokens=60, nbytes=60, queue=queue, seconds=seconds, cost=CostModel(fixed=0.2))
    indexing = Indexing(server, 5, 0.1)
    numbers, asks, calls, plugs, called = count(), list[Any](), list[Any](), list[Any](), list[int]()
    server.start()
    for kind, *details in steps:
        if kind == "ask":
            size, within, item_size, poison = details
            items = [next(numbers) for _ in range(size)]
            if poison < size:
                server.toy.poison.add(items[poison])
            asks.append((items, await asked(server, *items, deadline=server.time.now + within, size=item_size)))
        elif kind == "call":
            number = next(numbers)
            do = lambda number=number: called.append(number) or number  # type: ignore[func-returns-value]  # noqa: E731
            calls.append((number, asyncio.create_task(server.call(do, deadline=server.time.now + details[0]))))
            await asyncio.sleep(0)
        elif kind == "cancel" and asks + calls:
            [*asks, *calls][details[0] % (len(asks) + len(calls))][1].cancel()
            await asyncio.sleep(0)
        elif kind == "pass":
            server.time.advance(details[0])
        elif kind == "rest":
            await asyncio.sleep(details[0])
        elif kind == "poke":
            server.poke()
        elif kind == "plug":
            plugs.append(Plug())
            calls.append((None, asyncio.create_task(server.call(plugs[-1], deadline=LATER))))
            await asyncio.sleep(0)
    for plug in plugs:
        plug.pull()
    assert await server.drain(LATER)
    assert server.depth == 0
    assert server.waiting_seconds == 0
    assert indexing.left in (0, 5) or indexing.left < 0

    tasks = [task for _, task in asks + calls]
    _, lost = await asyncio.wait(tasks, timeout=10) if tasks else (set(), set())
    assert not lost
    answered = [item for ran in server.toy.ran if not server.toy.poison & set(ran) for item in ran]
    assert len(answered) == len(set(answered))
    for items, task in asks:
        if task.cancelled():
            continue
        if (error := task.exception()) is not None:
            assert isinstance(error, Overloaded | TooLarge)
            assert not set(items) & set(server.order)  # what was refused did not run
            continue
        assert len(task.result()) == len(items)
        for item, result in zip(items, task.result(), strict=True):
            if isinstance(result, Overloaded):
                assert result.reason == "deadline"
                assert item not in answered
            elif item in server.toy.poison:
                assert isinstance(result, Failed)
            else:
                assert result == 2 * item
                assert item in answered
    assert called == sorted(called)
    for number, task in calls:
        if not task.cancelled() and task.exception() is None and number is not None:
            assert task.result() == number
            assert called.count(number) == 1


# What a batch costs


def test_the_fit_finds_the_cost_of_a_batch_again() -> None:
    sizes = [(tokens, nbytes) for tokens in (16, 128, 4096, 16384) for nbytes in (1e5, 1e7, 3e8)]
    cost = CostModel()
    assert cost.predict(100, 100) == 0
    cost.fit([(t, n, 0.004 + 2e-5 * t + 1e-10 * n) for t, n in sizes])
    assert (cost.fixed, cost.per_token, cost.per_byte) == pytest.approx((0.004, 2e-5, 1e-10), rel=1e-6)
    assert cost.predict(1000, 1e6) == pytest.approx(0.004 + 0.02 + 1e-4)


@given(
    st.lists(st.tuples(st.integers(0, 16384), st.integers(0, 10**9), st.floats(1e-4, 10.0)), min_size=1, max_size=20)
)
def test_the_fit_is_the_non_negative_least_squares_one(seen: list[tuple[int, int, float]]) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    cost = CostModel()
    cost.fit(seen)
    found = np.array([cost.fixed, cost.per_token, cost.per_byte])
    assert (found >= 0).all()
    rows = np.array([(1.0, t, n) for t, n, _ in seen]) / np.array([[s] for _, _, s in seen])
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    _, error = optimize.nnls(rows / scale, np.ones(len(rows)))
    assert np.linalg.norm(rows @ found - 1) <= error + 1e-6


def test_a_fit_needs_something_to_go_by() -> None:
    with pytest.raises(ZeroMemError, match="observations"):
        CostModel().fit([(1, 1, 0.0)])


def test_the_correction_follows_what_is_seen_but_not_a_single_stall() -> None:
    cost = CostModel(fixed=0.01, per_token=1e-4)
    for _ in range(100):
        cost.observe(100, 0, 0.06)  # three times as slow as fitted
    assert cost.predict(100, 0) == pytest.approx(0.06, rel=1e-3)
    cost.observe(100, 0, 1000.0)
    assert cost.predict(100, 0) < 0.12
    cost.observe(100, 0, 0.0)
    for _ in range(100):
        cost.observe(200, 0, 0.03)
    assert cost.correction == pytest.approx(1.0, rel=1e-3)


def test_a_model_that_was_never_fitted_is_by_what_it_sees() -> None:
    cost = CostModel()
    for number in range(ENOUGH_TO_FIT):
        assert cost.predict(100, 0) == 0
        cost.observe(100 * number, 0, 0.5 + 0.01 * number)
    assert cost.predict(1000, 0) == pytest.approx(0.6)
    assert math.isclose(cost.part(100, 0, 0.5), 0.25 + 0.01)


def test_a_batch_grows_only_while_its_first_deadline_is_met() -> None:
    def waiting(number: int, first: float) -> Deadlines[str, int]:
        queue: Deadlines[str, int] = Deadlines(Batching(256, 10_000, 10_000, 1000))
        queue.add([Work("", 0, i, (1, 1), 0.01, first if i == 0 else 99.0, 0.0) for i in range(number)])
        return queue

    def predict(tokens: int, nbytes: int) -> float:
        return 0.01 * tokens

    queue = waiting(200, first=1.0)  # a hundred of them take the second that there is
    sizes = []
    while queue.depth:
        batch, late = queue.take(0.0, predict)
        assert not late
        sizes.append(len(batch))
    assert sizes == [100, 100]
    assert len(waiting(200, first=0.01).take(0.0, predict)[0]) == ENOUGH
    assert len(waiting(200, first=0.01).take(0.0)[0]) == 200  # nothing is known of what they take
    assert len(waiting(7, first=0.01).take(0.0, predict)[0]) == 7


def test_who_was_answered_together_is_waited_for_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromem_torch.serving.batcher.LINGER", 1.0)  # a busy machine may take longer than it does
    sizes: list[int] = []

    def run(items: Sequence[int]) -> Sequence[int]:
        sizes.append(len(items))
        return list(items)

    async def ask(batcher: MicroBatcher[int, int], times: int) -> None:
        for number in range(times):
            await batcher.submit([number], [(1, 1)], deadline=batcher.clock() + 30)

    async def main() -> None:
        batcher: MicroBatcher[int, int] = MicroBatcher(run, Batching(256, 10_000, 10_000, 1000))
        batcher.start()
        await asyncio.gather(*(ask(batcher, 20) for _ in range(32)))
        many = len(sizes)
        await ask(batcher, 5)  # alone nobody is waited for for long
        assert sizes[many:] == [1] * 5
        assert await batcher.drain(5)

    asyncio.run(main())
    assert sum(sizes) == 32 * 20 + 5
    whole = [size for size in sizes if size >= 16]
    assert sum(whole) > 0.8 * 32 * 20, sizes
