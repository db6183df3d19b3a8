"""One memory, many callers: what each may do is decided here, and all of it is done on the thread that owns the memory.

HTTP and MCP only translate: every operation of theirs is a method of `MemoryService`, which asks first whether the
caller's key reaches that far.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from zeromem_torch.derived import tokens_about
from zeromem_torch.errors import NotFound, ZeroMemError
from zeromem_torch.evidence import Evidence
from zeromem_torch.handles import MemoryManager, execute
from zeromem_torch.library import ZeroMem
from zeromem_torch.reader import Reader
from zeromem_torch.results import Answered, Page
from zeromem_torch.scope import Boundary, SearchRequest
from zeromem_torch.searcher import BYTES_PER_SCORE
from zeromem_torch.serving.batcher import Batching, MicroBatcher
from zeromem_torch.serving.budget import TorchAllocator, held, steady
from zeromem_torch.serving.cost import Observation
from zeromem_torch.serving.keys import LOCAL, Caller, Keys
from zeromem_torch.serving.metrics import Metrics
from zeromem_torch.serving.refusals import Overloaded, Refusal, TooLarge
from zeromem_torch.store import Change
from zeromem_torch.substrate.traces import Trace

if TYPE_CHECKING:
    from zeromem_torch.serving.budget import Allocator, Plan
    from zeromem_torch.serving.vllm import VllmWatch

T = TypeVar("T")
MANAGERS = 256
"""Handle sessions that are kept; one that was dropped begins anew, with an empty context log."""
PROBES = ((1, 8), (8, 8), (32, 8), (1, 96), (8, 96), (32, 96))
"""Queries and turns of the batches that the cost model is fitted to."""
INSIDE = 0.5
"""Of the time that a request has. The rest is for its way in and out, and for batches that take longer than predicted
because the thread that refuses what is too much takes the interpreter from the one that computes."""
NEARLY = 0.95
"""Of that time, what a reader or the index may take: they are waited for, not predicted."""
PULSE = 0.05
"""Seconds between two looks at how late the event loop is."""
LOOK = 0.2
"""Seconds that a look at the sizes may wait for a batch to end."""
READS = frozenset({"memory_retrieve", "memory_query", "memory_materialize"})
"""Operations on handles that change nothing in the record."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for, and how much may be under way."""

    body_bytes: int = 4 << 20
    queries: int = 256
    messages: int = 1024
    text_chars: int = 65_536  # of a message
    query_chars: int = 8_192
    page: int = 1000  # traces
    timeout: float = 30.0  # seconds, unless the request says
    longest_timeout: float = 120.0
    queue: int = 2048
    batch: int = 256  # queries searched together
    batch_tokens: int = 16_384
    burst_tokens: int = 4_096  # indexed in one step, which no query can interrupt
    recent_queries: int = 4_096  # whose vectors are kept


@dataclass(frozen=True)
class Added:
    """Traces that are on disk. A search finds them once the memory's ``indexed_up_to`` has reached ``position``."""

    ids: builtins.list[str]
    position: int
    indexed: bool

    def to_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids), "position": self.position, "indexed": self.indexed}


class MemoryService:
    """A memory that is served. All methods belong to one event loop; errors are `ZeroMemError`s.

    `Refusal`s name their status; `NotFound` and `Conflict` are 404 and 409; any other is input that cannot be used.
    """

    def __init__(
        self,
        memory: ZeroMem,
        *,
        limits: Limits | None = None,
        keys: Keys | None = None,
        metrics: Metrics | None = None,
        reader: Reader | str = "embedded",
        plan: Plan | None = None,
        watch: VllmWatch | None = None,
        allocator: Allocator | None = None,  # of the plan's device; None: that of PyTorch, on a GPU
        warm_up: bool = True,
    ) -> None:
        self.memory, self.keys, self.plan, self.watch = memory, keys, plan, watch
        self.limits = limits or Limits()
        self.metrics = metrics or Metrics()
        self.reader = reader
        self._warm_up = warm_up
        own = self.limits
        batching = Batching(own.batch, own.batch_tokens, memory.workspace, own.queue)
        self._batcher: MicroBatcher[SearchRequest, Evidence] = MicroBatcher(
            self._search, batching, metrics=self.metrics
        )
        self._batcher.background = self._index
        if watch is not None:
            self._batcher.share = watch.share
        # A local reader computes here, one question list at a time; one behind a server takes many.
        here = not isinstance(reader, str) or reader == "embedded" or reader.startswith(("hf:", "vllm:"))
        self._readers = asyncio.Semaphore(1 if here else 32)
        self._managers: OrderedDict[tuple[str, str, str], MemoryManager] = OrderedDict()
        self._waiters: dict[asyncio.Future[None], int] = {}  # what waits for an index position
        self._position = 0  # up to which the index is known to be; the memory itself is not asked from the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "starting"
        if allocator is None and plan is not None and plan.on_gpu:
            allocator = TorchAllocator(memory.device)
        self._lag = 0.0  # seconds by which the event loop is late: a request waits so long before we see it
        self._pulse: asyncio.Task[None] | None = None
        self._allocator, self._held = allocator, None if allocator is None else held(allocator)

    # Life

    async def start(self) -> None:
        """Begin to answer: what batches cost is measured first, on made text, which also compiles what will run."""
        self._loop = asyncio.get_running_loop()
        if self.limits.recent_queries:
            await asyncio.to_thread(self.memory.remember_queries, self.limits.recent_queries)
        if self._warm_up:
            self._batcher.cost.fit(await asyncio.to_thread(_observed, self.memory, self.limits))
        if self.watch is not None:
            self.watch.start()
        self._batcher.start()
        self._batcher.poke()
        self._pulse = self._loop.create_task(self._feel_lag())
        self._state = ""

    async def stop(self, drain_seconds: float = 30.0) -> bool:
        """Refuse what comes, finish what waits, and index while there is time; whether nothing was left to do."""
        self._state = "closing"
        done = await self._batcher.drain(drain_seconds)
        if self._pulse is not None:
            self._pulse.cancel()
        if self.watch is not None:
            self.watch.stop()
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
        return done

    @property
    def ready(self) -> str:
        """Why what is started after this one should wait; "" when it need not.

        Beside a reader on the same GPU that is until nothing more was got from the device, or given back to it, between
        two looks: then what the reader measures as free is so.
        """
        if self._state or self._allocator is None or self._held is None:
            return self._state
        before, self._held = self._held, held(self._allocator)
        if not steady(self._allocator, before):
            return "its memory on the device still changes"
        self._held = None  # from now on it stays so
        return ""

    def authenticate(self, secret: str | None) -> Caller:
        """Who this secret belongs to; without keys everybody is `LOCAL`."""
        return self.keys.authenticate(secret) if self.keys else LOCAL

    # Writing

    async def add(
        self,
        caller: Caller,
        messages: Sequence[Mapping[str, Any]],
        *,
        boundary: str | None = None,
        session: str | None = None,
        timestamp: str | float | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        idempotency_key: str | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Added:
        """Store messages, all or none; on disk when this returns. ``wait``: and indexed, unless time runs out first.

        Under an ``idempotency_key`` a message without an id gets one that the key and its place decide: sent again,
        after a crash too, it is there already, and another text under the same key is a conflict.
        """
        deadline, end = self._deadline(timeout), self._deadline(timeout, NEARLY)
        self._count("messages", messages, self.limits.messages)
        whole = []
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise ZeroMemError.of(f"message {place}", "an object", message, 'send {"text": ..., "boundary": ...}')
            home = message.get("boundary", boundary)
            if not isinstance(home, str):
                raise ZeroMemError.of(f"message {place}, boundary", "a name", home, "say whose memory it is")
            caller.check("write", home)
            for value in message.values():
                self._short(f"message {place}", value, self.limits.text_chars)
            given = dict(message)
            if idempotency_key is not None and given.get("id") is None:
                given["id"] = _derived(caller.name, idempotency_key, place)
            whole.append(given)
        store = partial(
            self.memory.add,
            whole,
            boundary=boundary,
            session=session,
            timestamp=timestamp,
            metadata=metadata,
            actor=caller.name,
            overwrite=overwrite,
            index=False,
        )
        added = await self._batcher.call(lambda: self._added(store()), deadline=deadline)
        return added if added.indexed else replace(added, indexed=wait and await self._indexed(added.position, end))

    def _added(self, ids: builtins.list[str]) -> Added:
        self._poke()
        return Added(ids, self.memory.stored_up_to, not self.memory.waiting)

    def _poke(self) -> None:
        """On the memory's thread, so that no step of indexing lies between the change and this: one behind it would
        find nothing to do, yet be expected to take as long as that one."""
        if self.memory.waiting:
            self._batcher.poke()

    async def update(
        self,
        caller: Caller,
        id: str,
        changes: Mapping[str, Any],
        *,
        boundary: str | None = None,
        timeout: float | None = None,
    ) -> Trace:
        """Change some fields; what an update cannot change is an error. The caller sees the trace, so it must be one
        that may read it."""
        for reserved in ("id", "boundary", "actor", "index"):
            if reserved in changes:
                raise ZeroMemError.of("update", "fields that may change", reserved, "leave it out")
        for value in changes.values():
            self._short("update", value, self.limits.text_chars)

        def do(home: str) -> Trace:
            after = self.memory.update(id, boundary=home, actor=caller.name, index=False, **changes)
            self._poke()
            return after

        return await self._at_home(caller, ("write", "read"), id, boundary, do, timeout)

    async def delete(
        self,
        caller: Caller,
        id: str,
        *,
        boundary: str | None = None,
        purge: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Remove a trace; with ``purge``, which is an admin's, out of every file."""

        def do(home: str) -> None:
            self.memory.delete(id, boundary=home, actor=caller.name, purge=purge)

        await self._at_home(caller, "admin" if purge else "write", id, boundary, do, timeout, ever=purge)

    async def delete_boundary(
        self, caller: Caller, boundary: Boundary, *, purge: bool = False, timeout: float | None = None
    ) -> int:
        """Remove all traces of a boundary ("acme/": and below); returns their number."""
        caller.check("admin" if purge else "write", boundary)
        do = partial(self.memory.delete_all, boundary=boundary, actor=caller.name, purge=purge)
        return await self._batcher.call(do, deadline=self._deadline(timeout))

    # Reading

    async def search(
        self, caller: Caller, requests: Sequence[SearchRequest], *, timeout: float | None = None
    ) -> builtins.list[Evidence]:
        """Evidence for each request; one that cannot be used is an error that names its number."""
        deadline = self._deadline(timeout)
        self._count("queries", requests, self.limits.queries)
        for number, request in enumerate(requests):
            caller.check("read", request.boundary)
            self._short(f"query {number}", request.query, self.limits.query_chars)
        found = await self._batcher.submit(requests, [self._size(request) for request in requests], deadline=deadline)
        answers: builtins.list[Evidence] = []
        for number, one in enumerate(found):
            if isinstance(one, ZeroMemError):
                if len(requests) == 1 or isinstance(one, Refusal):
                    raise one
                raise type(one)(f"query {number}: {one}")
            answers.append(one)
        return answers

    def _search(self, requests: Sequence[SearchRequest]) -> builtins.list[Evidence | ZeroMemError]:
        return self.memory.search_each(requests)

    async def answer(
        self,
        caller: Caller,
        requests: Sequence[SearchRequest],
        *,
        reader_budget: int | None = None,
        calibrate: bool = True,
        abstain: bool = False,
        timeout: float | None = None,
    ) -> builtins.list[Answered]:
        """Answers from the evidence of each request, by the reader this server was started with."""
        end = self._deadline(timeout, NEARLY)
        evidence = await self.search(caller, requests, timeout=timeout)
        read = partial(
            self.memory.answer_from,
            evidence,
            reader=self.reader,
            reader_budget=reader_budget,
            calibrate=calibrate,
            abstain=abstain,
        )

        async def ask() -> builtins.list[Answered]:
            async with self._readers:
                return await asyncio.to_thread(read)

        return await _until(ask(), end, "the reader's answer")

    async def get(self, caller: Caller, id: str, *, boundary: str | None = None, timeout: float | None = None) -> Trace:
        return await self._at_home(
            caller, "read", id, boundary, lambda home: self.memory.get(id, boundary=home), timeout
        )

    async def history(
        self, caller: Caller, id: str, *, boundary: str | None = None, timeout: float | None = None
    ) -> builtins.list[Change]:
        return await self._at_home(
            caller, "read", id, boundary, lambda home: self.memory.history(id, boundary=home), timeout, ever=True
        )

    async def list(
        self,
        caller: Caller,
        *,
        boundary: Boundary | None = None,
        cursor: str | None = None,
        limit: int = 100,
        prefix: str = "",
        timeout: float | None = None,
    ) -> Page:
        """Traces in the order they came; without a boundary, all that the caller may read."""
        if isinstance(limit, int) and limit > self.limits.page:
            raise TooLarge.of("limit", f"at most {self.limits.page}", limit, "follow next_cursor for more")
        if boundary is not None:
            caller.check("read", boundary)
        else:
            self._has(caller, "read")

        def do() -> Page:
            asked = boundary
            if asked is None and caller.boundaries is not None:
                asked = caller.visible(self.memory.boundaries)
                if not asked:
                    return Page((), None)
            return self.memory.list(boundary=asked, cursor=cursor, limit=limit, prefix=prefix)

        return await self._batcher.call(do, deadline=self._deadline(timeout))

    async def handle(
        self,
        caller: Caller,
        operation: str,
        arguments: Mapping[str, Any],
        *,
        boundary: str,
        session: str = "",
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """A memory operation by typed reference (`zeromem_torch.handles.TOOLS`), in one session of the caller's."""
        caller.check("read" if operation in READS else "write", boundary)
        for value in arguments.values():
            self._short("value", value, self.limits.text_chars)
        call = {"name": operation, "arguments": dict(arguments)}

        def do() -> dict[str, Any]:
            return execute(self._manager(caller.name, boundary, session), call)

        result = await self._batcher.call(do, deadline=self._deadline(timeout))
        if isinstance(error := result.get("error"), dict):
            raise (NotFound if error.get("code") == "not_found" else ZeroMemError)(str(error.get("message")))
        return result

    def _manager(self, caller: str, boundary: str, session: str) -> MemoryManager:
        key = (caller, boundary, session)
        if key not in self._managers:
            self._managers[key] = MemoryManager(self.memory, boundary=boundary, session=session or "served")
            if len(self._managers) > MANAGERS:
                self._managers.popitem(last=False)
        self._managers.move_to_end(key)
        return self._managers[key]

    # The server itself

    async def status(self, caller: Caller) -> dict[str, Any]:
        """Counts of what the caller may read, and how far the index is; positions are numbers of the whole memory."""

        def do() -> dict[str, Any]:
            own = caller.visible(self.memory.boundaries)
            counts = self.memory.counts
            return {
                "traces": sum(counts[name] for name in own),
                "boundaries": len(own),
                "stored_up_to": self.memory.stored_up_to,
                "indexed_up_to": self.memory.indexed_up_to,
                "encoder": self.memory.encoder.fingerprint,
            }

        found = await self._batcher.call(do, deadline=self._deadline(None))
        return {**found, "ready": not self._state}

    async def release_memory(self, caller: Caller) -> None:
        """Drop all that can be read again from disk; for who may do everything everywhere."""
        caller.check("admin", "/")
        release = partial(self.memory.release_memory, keep_reserved=self._allocator is not None)
        await self._batcher.call(release, deadline=self._deadline(None))

    async def exposition(self) -> tuple[bytes, str]:
        """Metrics as Prometheus reads them. Sizes are looked at between batches, or are a little old."""
        with contextlib.suppress(Overloaded):
            await self._batcher.call(self._look, deadline=time.monotonic() + LOOK)
        self.metrics.queue(self._batcher.depth)
        if self.watch is not None:
            self.metrics.vllm(self.watch.running, self.watch.waiting)
        return self.metrics.render()

    def _look(self) -> None:
        """What is measured by looking; on the memory's thread, as all that reads the memory is."""
        memory, metrics = self.memory, self.metrics
        metrics.stages(dict(memory.timings))
        metrics.lru(*memory.cache_hits)
        for part, nbytes in memory.held_bytes().items():
            metrics.held(part, nbytes)
        metrics.backlog(memory.waiting, memory.stored_up_to, memory.indexed_up_to)

    # Indexing

    def _index(self) -> bool:
        """One bounded step, on the memory's thread."""
        self.memory.index_some(self.limits.burst_tokens)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell, self.memory.indexed_up_to)
        return self.memory.waiting > 0

    def _tell(self, position: int) -> None:
        self._position = position
        for future, wanted in list(self._waiters.items()):
            if wanted <= position and not future.done():
                future.set_result(None)

    async def _indexed(self, position: int, deadline: float) -> bool:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = position
        try:
            if self._position < position:
                await asyncio.wait_for(future, max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return False
        finally:
            del self._waiters[future]
        return self._position >= position

    # What every method needs

    async def _feel_lag(self) -> None:
        """Quick to rise, slow to fall."""
        while True:
            start = time.monotonic()
            await asyncio.sleep(PULSE)
            self._lag = max(time.monotonic() - start - PULSE, 0.8 * self._lag)

    def _deadline(self, timeout: float | None, share: float = INSIDE) -> float:
        """When an answer has to be there, so that it reaches the client in time."""
        own = self.limits
        if timeout is None:
            timeout = own.timeout
        elif not isinstance(timeout, int | float) or not 0 < timeout <= own.longest_timeout or timeout is True:
            raise ZeroMemError.of("timeout", f"seconds, at most {own.longest_timeout:g}", timeout, "leave it out")
        # On its way in it waited about as long as the loop is late, and will again on its way out.
        return time.monotonic() + max(share * timeout - 2 * self._lag, 0.0)

    async def _at_home(
        self,
        caller: Caller,
        scope: str | tuple[str, ...],
        id: str,
        boundary: str | None,
        do: Callable[[str], T],
        timeout: float | None,
        *,
        ever: bool = False,
    ) -> T:
        """Do it to the trace of this id: in the boundary named, else in the only one of the caller's that has it."""
        scopes = (scope,) if isinstance(scope, str) else scope
        for own in scopes:
            if boundary is not None:
                caller.check(own, boundary)
            else:
                self._has(caller, own)
        self._short("id", id, self.limits.query_chars)

        def found() -> T:
            if boundary is not None:
                return do(boundary)
            everywhere = self.memory.homes(id, ever=ever)
            homes = [name for name in everywhere if all(caller.may(own, name) for own in scopes)]
            if len(homes) > 1:
                raise ZeroMemError.of("id", "one that a single boundary holds", id, "name its boundary too")
            if not homes:
                raise NotFound.of("id", "one that is there, for this key", id, "list what there is")
            return do(homes[0])

        return await self._batcher.call(found, deadline=self._deadline(timeout))

    def _has(self, caller: Caller, scope: str) -> None:
        """Refuse a key that may do this nowhere."""
        caller.check(scope, caller.boundaries[:1] if caller.boundaries else "anywhere")

    def _size(self, request: SearchRequest) -> tuple[int, int]:
        """About how many tokens and bytes of workspace a query takes."""
        names = [request.boundary] if isinstance(request.boundary, str) else request.boundary
        counts = self.memory.counts
        units = sum(len(self.memory) if name.endswith("/") else counts.get(name, 0) for name in names)
        return tokens_about(request.query), BYTES_PER_SCORE * max(1, units)

    def _count(self, name: str, given: Sequence[object], most: int) -> None:
        if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
            raise ZeroMemError.of(name, "a list of at least one", given, "send one or more")
        if len(given) > most:
            raise TooLarge.of(name, f"at most {most} in a request", len(given), "send them in several")

    def _short(self, name: str, value: object, most: int) -> None:
        """No text may be too long, those inside of lists and objects together included."""
        if (size := _characters(value)) > most:
            raise TooLarge.of(name, f"at most {most} characters", f"{size} of them", "split it")


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_characters, inside))


async def _until(work: Coroutine[Any, Any, T], deadline: float, what: str) -> T:
    try:
        return await asyncio.wait_for(work, max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        message = f"deadline: expected {what} in time, got none; allow more time, or try again later"
        raise Overloaded(message, reason="deadline", retry_after=5.0) from None


def _derived(caller: str, key: str, place: int) -> str:
    """An id that cannot be guessed from another caller's key."""
    return "ik-" + blake2b(repr((caller, key, place)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _observed(memory: ZeroMem, limits: Limits) -> builtins.list[Observation]:
    """What some batches took, on made text in a memory of its own: no caller's text is touched."""
    made = ZeroMem(memory.config, encoder=memory.encoder, device=memory.device, workspace=memory.workspace)
    for turns in {turns for _, turns in PROBES}:
        texts = [f"On day {turn} we met at the {turn % 7}th bridge to plan the trip." for turn in range(turns)]
        made.add(texts, boundary=str(turns), session="one")
    seen = []
    for again in range(2):  # what is compiled when it first runs is not what a batch costs
        for queries, turns in PROBES:
            asked = [SearchRequest(f"When did we plan trip {again} of {i}?", str(turns)) for i in range(queries)]
            start = time.perf_counter()
            made.search_each(asked)
            spent = time.perf_counter() - start
            tokens = sum(tokens_about(one.query) for one in asked)
            if again:
                seen.append((float(tokens), float(queries * turns * BYTES_PER_SCORE), spent))
    return seen
