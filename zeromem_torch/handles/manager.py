"""The memory manager of one agent session: entries in, handles out, and text only where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from threading import RLock
from typing import Any

from zeromem_torch.folder import LOGS
from zeromem_torch.handles.entry import ROLE, Entry, is_entry, lifetime
from zeromem_torch.handles.handle import TYPES, Handle, check_key, check_type
from zeromem_torch.handles.ledger import Ledger
from zeromem_torch.handles.serialization import Counter, Decision, SerializationPolicy, check_tokens, serialize_if
from zeromem_torch.handles.tiers import ContextLog, Entered, SessionCache
from zeromem_torch.library import ZeroMem
from zeromem_torch.messages import listed
from zeromem_torch.substrate.traces import NotFound, Trace, ZeroMemError, check_boundary, check_text, parse_time


@dataclass(frozen=True, slots=True)
class Match:
    """An entry that answers a query, by its handle."""

    handle: Handle
    score: float = 1.0  # what a semantic query was ranked by; 1 where type and key were asked for
    relevance: float = 1.0  # cosine of query and entry, the same measure everywhere

    def to_dict(self) -> dict[str, Any]:
        return {"handle": str(self.handle), "score": self.score, "relevance": self.relevance}


@dataclass(frozen=True, slots=True)
class Materialized:
    """Text that entered the context: a line "[handle] value" an entry."""

    text: str
    handles: tuple[Handle, ...]  # in the text, in this order
    tokens: int
    left_out: tuple[Handle, ...]  # what did not fit

    def to_dict(self) -> dict[str, Any]:
        handles, left_out = ([str(handle) for handle in some] for some in (self.handles, self.left_out))
        return {"text": self.text, "handles": handles, "tokens": self.tokens, "left_out": left_out}


class MemoryManager:
    """Stores, finds and opens entries of one boundary for one session, which has one context window.

    An entry of a type and key has one handle for good: storing another value under them supersedes the old one in one
    transaction, the old value stays in the history, and a handle given out before leads to the new value. Managers of
    one memory may live side by side, and threads may share one.
    """

    def __init__(
        self,
        memory: ZeroMem,
        *,
        boundary: str,
        session: str = "",  # names the writer in the history, and the reader in the log
        policy: SerializationPolicy | None = None,
        context_budget: int | None = None,  # tokens of text that may enter in this session; None: no limit
        count: Counter | None = None,  # tokens of a text; None: by the encoder's tokenizer
        cached: int = 1024,  # entries of L1
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        check_text("manager", "boundary", boundary)
        check_boundary(boundary)
        check_text("manager", "session", session, blank_ok=True)
        check_tokens("context_budget", context_budget, zero_ok=True)
        self.memory = memory
        self.boundary = boundary
        self.session = session
        self.policy = policy or SerializationPolicy()
        self.context_budget = context_budget
        self.count = count or self._encoder_tokens
        self.ledger = Ledger(self.count)
        self._clock = clock or (lambda: datetime.now(UTC))
        self._cache = SessionCache(cached)
        self._seen = memory.revision
        self._log = ContextLog(memory.path / LOGS / "context.jsonl" if memory.path and not memory.read_only else None)
        self._lock = RLock()

    def store(
        self,
        type: str,
        key: str,
        value: Any,
        *,
        source: str = "",
        confidence: float = 1.0,
        ttl: timedelta | float | None = None,
    ) -> Handle:
        """Remember a value, and supersede the one of the same type and key, if there is one.

        ``source`` is the id of the trace that says so, and must be one of this boundary: provenance that leads nowhere
        is none. ``ttl`` in seconds, if a number. Storing what holds already writes nothing.
        """
        handle = Handle.of(type, key)
        trace = Entry(handle, value, self._now(), self.boundary, source, confidence, lifetime(ttl)).trace()
        with self._lock:
            if source and self._found(source) is None:
                advice = "add that trace first, or leave the source out"
                raise ZeroMemError.of("source", "the id of a trace of this boundary", source, advice)
            held = self._held(str(handle))
            if held is not None and trace.expires_at is None and replace(trace, time=held.time) == held:
                return handle  # with an end, the date would matter
            self.memory.add(trace, actor=self.session, overwrite=True)
            self._seen += 1  # L1 outlives this session's own change; was there another, the numbers still differ
            self._cache.put(trace)
            self.ledger.changed(handle)
        return handle

    def retrieve(self, handle: Handle | Match | str) -> Entry:
        """What a handle stands for, for the program: nothing enters the context. One that is gone is an error."""
        with self._lock:
            entry = self._entry(handle)
            self.ledger.stood(entry.handle, entry.text)
        return entry

    def query(
        self, type: str | None = None, key: str | None = None, *, text: str | None = None, top_k: int | None = None
    ) -> list[Match]:
        """Handles of entries: by type and key, with no encoder, or the ones nearest to a text.

        A key that ends in "/" means all keys below it, by whole segments, and the key without the slash. A text goes
        with a type, not with a key. Without any of them all entries answer, in the order of their handles.
        """
        if type is not None:
            check_type(type)
        if text is not None:
            if key is not None:
                raise ZeroMemError.of("key", "None beside a text", key, "drop the text, or the key")
            return self._nearest(type, text, top_k)
        if top_k is not None:
            raise ZeroMemError.of("top_k", "None without a text", top_k, "pass text=..., or cut the list")
        with self._lock:
            return [self._shown(trace) for trace in self._exact(type, key)]

    def materialize(
        self, handles: Sequence[Handle | Match | str] | Handle | Match | str, *, token_budget: int | None = None
    ) -> Materialized:
        """Values as text for the context, in the order given, as many as fit; one that does not is left out whole.

        What enters is logged, and counted against the session's budget. An unknown handle is an error, and then
        nothing enters.
        """
        check_tokens("token_budget", token_budget, zero_ok=True)
        given = [handles] if isinstance(handles, Handle | Match | str) else listed("handles", handles)
        with self._lock:
            entries = [self._entry(handle) for handle in dict.fromkeys(map(_handle, given))]
            limits = [limit for limit in (token_budget, self.context_remaining) if limit is not None]
            lines = {entry.handle: _line(entry) for entry in entries}
            text, costs = _packed(lines, min(limits, default=None), self.count)
            self._enter(costs, "materialize")
            left_out = [entry for entry in entries if entry.handle not in costs]
            for entry in left_out:
                self.ledger.stood(entry.handle, entry.text)
        return Materialized(text, tuple(costs), sum(costs.values()), tuple(entry.handle for entry in left_out))

    def serialize(
        self,
        handle: Handle | Match | str,
        *,
        task_complexity: float,
        retrieval_confidence: float | None = None,  # None: the entry's own, or a match's relevance if that is lower
        query: str = "",
        force_context: bool = False,
    ) -> Decision:
        """Let the policy decide whether text of an entry enters the context (`serialize_if`); what does is logged."""
        with self._lock:
            entry = self._entry(handle)
            if retrieval_confidence is None:
                found = max(0.0, handle.relevance) if isinstance(handle, Match) else 1.0
                retrieval_confidence = min(entry.confidence, found)
            decision = serialize_if(
                entry,
                context_budget_remaining=self.context_remaining,
                task_complexity=task_complexity,
                retrieval_confidence=retrieval_confidence,
                policy=self.policy,
                query=query,
                force_context=force_context,
                count=self.count,
            )
            if decision.serialize:
                self._enter({entry.handle: decision.tokens}, "forced" if decision.forced else "serialize")
            else:
                self.ledger.stood(entry.handle, entry.text)
        return decision

    def forget(self, handle: Handle | Match | str, *, purge: bool = False) -> None:
        """Delete an entry; its history stays. With ``purge`` neither that nor a byte of it in any file does."""
        handle = _handle(handle)
        with self._lock:
            held = self._held(str(handle))
            past = purge and held is None and self.memory.history(str(handle), boundary=self.boundary)
            if not past and (held is None or not is_entry(held)):
                raise _missing(handle, None if held is None else "another trace")
            self.memory.delete(str(handle), boundary=self.boundary, actor=self.session, purge=purge)
            self._seen += 1
            self._cache.drop(str(handle))
            self.ledger.changed(handle)
            if purge:
                self._log.purge(self.boundary, handle)

    def where(self, handle: Handle | Match | str) -> tuple[str, ...]:
        """The tiers that hold an entry: L1 this session, L2 the index, L3 the record, L4 the context window."""
        handle = _handle(handle)
        with self._lock:
            held = self._found(str(handle))
            kept = held is not None and is_entry(held)
            tiers = {
                "L1": kept and str(handle) in self._fresh(),
                "L2": kept and held is not None and not self._expired(held),
                "L3": kept,
                "L4": any(one.handle == str(handle) for one in self._log.entered),
            }
        return tuple(tier for tier, holds in tiers.items() if holds)

    def tiers(self) -> dict[str, int]:
        """How many entries each tier holds."""
        with self._lock:
            traces = self._traces()
            return {
                "L1": len(self._fresh()),
                "L2": sum(not self._expired(trace) for trace in traces),
                "L3": len(traces),
                "L4": len({one.handle for one in self._log.entered}),
            }

    @property
    def context_log(self) -> tuple[Entered, ...]:
        """What entered the context window of this session."""
        return tuple(self._log.entered)

    @property
    def context_remaining(self) -> int | None:
        """Tokens that may still enter; None without a limit."""
        return None if self.context_budget is None else self.context_budget - self.ledger.tokens_entered

    def __repr__(self) -> str:
        return f"MemoryManager(boundary={self.boundary!r}, session={self.session!r})"

    def _now(self) -> datetime:
        return parse_time(self._clock())

    def _expired(self, trace: Trace) -> bool:
        return trace.expires_at is not None and trace.expires_at <= self._now()

    def _encoder_tokens(self, text: str) -> int:
        return len(self.memory.encoder.token_spans([text])[0])

    def _found(self, id: str) -> Trace | None:
        try:
            return self.memory.get(id, boundary=self.boundary)
        except NotFound:
            return None

    def _fresh(self) -> SessionCache:
        """L1, emptied if the memory was changed: by another session, or behind the managers' back."""
        if self._seen != self.memory.revision:
            self._cache.clear()
            self._seen = self.memory.revision
        return self._cache

    def _held(self, id: str) -> Trace | None:
        """A trace from L1 or the record; expired ones too."""
        held = self._fresh().get(id)
        if held is None and (held := self._found(id)) is not None:
            self._cache.put(held)
        return held

    def _entry(self, given: Handle | Match | str) -> Entry:
        handle = _handle(given)
        trace = self._held(str(handle))
        if trace is None:
            raise _missing(handle, None)
        if self._expired(trace):
            raise _missing(handle, f"one that expired at {trace.expires_at}")
        return Entry.of(trace)

    def _traces(self, prefix: str = "mem:") -> list[Trace]:
        """Entries of the boundary whose handle begins so, expired ones too."""
        return list(filter(is_entry, self.memory.list(boundary=self.boundary, limit=None, prefix=prefix)))

    def _exact(self, type: str | None, key: str | None) -> list[Trace]:
        """Entries of a type and key, in the order of their handles."""
        if key is not None and not key.endswith("/"):
            places = [self._held(str(Handle.of(one, key))) for one in ([type] if type else sorted(TYPES))]
            traces = [trace for trace in places if trace is not None and is_entry(trace)]
        else:
            top = "" if key is None else check_key(key[:-1])
            found = {Handle.parse(trace.id): trace for trace in self._traces(f"mem:{type}:{top}" if type else "mem:")}
            named = sorted(found) if not top else [one for one in sorted(found) if f"{one.id}/".startswith(f"{top}/")]
            traces = [found[handle] for handle in named]
        return [trace for trace in traces if not self._expired(trace)]

    def _shown(self, trace: Trace, score: float = 1.0, relevance: float = 1.0) -> Match:
        """A match of an entry, whose handle is now seen in place of its text."""
        match = Match(Handle.parse(trace.id), score, relevance)
        self.ledger.stood(match.handle, trace.text)
        return match

    def _nearest(self, type: str | None, text: str, top_k: int | None) -> list[Match]:
        filters: dict[str, Any] = {"role": ROLE}
        if type is not None:
            filters["metadata"] = {"type": type}
        top_k = self.memory.config.calibration.top_k if top_k is None else top_k
        evidence = self.memory.search(text, boundary=self.boundary, top_k=top_k, filters=filters, as_of=self._now())
        matches = []
        with self._lock:
            for item in evidence.items[:top_k]:
                trace = self._held(item.trace_id)
                if trace is not None and is_entry(trace):  # another thread may have deleted it by now
                    matches.append(self._shown(trace, item.score, item.relevance))
        return matches

    def _enter(self, costs: Mapping[Handle, int], how: str) -> None:
        at = self._now()
        named = [Entered(at, self.boundary, self.session, str(handle), tokens, how) for handle, tokens in costs.items()]
        self._log.append(named)  # first: what cannot be logged does not enter
        for handle, tokens in costs.items():
            self.ledger.entered(handle, tokens, forced=how == "forced")


def _handle(given: Handle | Match | str) -> Handle:
    if isinstance(given, Match):
        return given.handle
    return given if isinstance(given, Handle) else Handle.parse(given)


def _missing(handle: Handle, got: str | None) -> ZeroMemError:
    return NotFound.of(str(handle), "an entry of this boundary", got, "store it, or query(...) for what there is")


def _line(entry: Entry) -> str:
    """"[handle] value"; lines after the first are set in, so that no value can pose as another entry."""
    return f"[{entry.handle}] " + "\n  ".join(entry.text.splitlines())


def _packed(lines: Mapping[Handle, str], limit: int | None, count: Counter) -> tuple[str, dict[Handle, int]]:
    """The lines that fit, in order, as one text, and the tokens of each; a line that does not is skipped."""
    costs: dict[Handle, int] = {}
    left = limit
    for handle, line in lines.items():
        cost = count(line)
        if left is None or cost <= left:
            costs[handle] = cost
            left = None if left is None else left - cost
    while costs:
        text = "\n".join(lines[handle] for handle in costs)
        tokens = count(text)
        last = next(reversed(costs))
        if limit is None or tokens <= limit:
            costs[last] += tokens - sum(costs.values())  # a tokenizer may count a whole otherwise than its parts
            return text, costs
        del costs[last]
    return "", {}
