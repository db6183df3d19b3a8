"""ZeroMem, what users hold: traces go in, evidence comes out; between them stand record, index and pipeline."""

import asyncio
import builtins
import json
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import wraps
from itertools import islice
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from zeromem_torch.answering import Answered, Answering
from zeromem_torch.collect import Batch
from zeromem_torch.config import EncoderConfig, ZeroMemConfig
from zeromem_torch.evidence import Evidence
from zeromem_torch.index import Segments
from zeromem_torch.keeper import AT_ONCE, Keeper, Progress, TraceReader, scrub_logs
from zeromem_torch.ledger import Ledger, MeteredEncoder
from zeromem_torch.memories import Memories
from zeromem_torch.messages import Message, TextFile, listed, message_in, messages_in, text_file, trace_of
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.reader import Reader
from zeromem_torch.scope import Boundary, Filters, Scope, SearchRequest, boundaries_in, boundary_of
from zeromem_torch.searcher import Searcher
from zeromem_torch.sizes import bytes_of
from zeromem_torch.store import Change, Record
from zeromem_torch.substrate.encoder import Encoder, RecentTexts, encoder_bytes, load_encoder
from zeromem_torch.substrate.entities import EntityExtractor
from zeromem_torch.substrate.forward import Forward, encoded_texts
from zeromem_torch.substrate.lexicon import check_sparse_head
from zeromem_torch.substrate.traces import MUTABLE, NotFound, Trace, ZeroMemError, check_text, nearest, parse_time

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Page:
    """Some traces of a longer list; ``next_cursor`` asks for those behind them, and is None at the end."""

    items: Sequence[Trace]
    next_cursor: str | None

    def __iter__(self) -> Iterator[Trace]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def to_dict(self) -> dict[str, Any]:
        return {"items": [trace.to_dict() for trace in self.items], "next_cursor": self.next_cursor}


@dataclass(frozen=True)
class Report:
    """What `verify` looked at, and what is wrong."""

    traces: int
    rows_compared: int  # index rows that were made again and compared
    memories_compared: int  # assembled memories that were assembled again and compared
    problems: Sequence[str] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("traces", "rows_compared", "memories_compared")}
        return {"ok": self.ok, **counts, "problems": list(self.problems)}


def _in_thread(
    method: Callable[Concatenate["ZeroMem", P], T],
) -> Callable[Concatenate["ZeroMem", P], Coroutine[Any, Any, T]]:
    """The method's async twin: the same, in a thread, so that the event loop goes on."""

    @wraps(method)
    async def twin(self: "ZeroMem", *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    twin.__name__ = twin.__qualname__ = f"a{method.__name__}"
    return twin  # type: ignore[return-value]  # mypy gives the first parameter the name that wraps shows


class ZeroMem:
    """Memories of many boundaries, searched together or alone; a search never sees another boundary than its own.

    `ZeroMem.open(path)` keeps its traces on disk; `ZeroMem()` keeps them in this process. May be used from several
    threads, which take turns.
    """

    def __init__(
        self,
        config: ZeroMemConfig | None = None,
        *,
        encoder: Encoder | str | None = None,  # None: the one the configuration names
        extractor: EntityExtractor | None = None,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        workspace: int | None = None,
        memory_budget: int | str | None = None,
    ) -> None:
        config = config or ZeroMemConfig()
        if isinstance(encoder, str):
            config, encoder = replace(config, encoder=EncoderConfig(encoder)), None
        self._set_up(config, encoder, extractor, device, dtype, _budget(memory_budget), workspace)
        self._record = Record()
        self._keeper: Keeper | None = None  # in this process the live memories are all there is
        self._serve(Memories(config.substrate, self.encoder.dim, None))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        encoder: Encoder | str | None = None,
        config: ZeroMemConfig | None = None,
        extractor: EntityExtractor | None = None,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        memory_budget: int | str | None = None,
        workspace: int | None = None,
        read_only: bool = False,
        index: bool = True,
    ) -> Self:
        """The memory kept in the folder ``path``, made if there is none; a context manager.

        A memory remembers its encoder and configuration: name them when it is made. Another encoder is an error that
        says how to `reencode`. One process may write; any number may read (``read_only``), and see what was there when
        they opened it. What the index lacks, after a crash or damage, is made again from the record: `notes` says so;
        with ``index=False`` it waits for `index_some`.

        ``memory_budget`` ("2GiB", or bytes): how much of the memory may be held ready at once, the rest is read when it
        is asked for; ``workspace`` bytes of it, else half and at most 1 GiB, are for the working tensors of a search.
        """
        memory = cls.__new__(cls)
        memory._open(Path(path), encoder, config, extractor, device, dtype, memory_budget, workspace, read_only, index)
        return memory

    def _set_up(
        self,
        config: ZeroMemConfig,
        encoder: Encoder | None,
        extractor: EntityExtractor | None,
        device: str,
        dtype: torch.dtype | None,
        budget: int | None,
        workspace: int | None = None,
    ) -> None:
        self.config = config
        self.pipeline = ZeroMemPipeline(config)
        self.device, self._dtype = device, dtype
        half = 1 << 30 if budget is None else min(1 << 30, max(1, budget // 2))
        self.workspace = half if workspace is None else workspace
        self._live_budget = None if budget is None else max(0, budget - self.workspace)
        self.ledger = Ledger()
        """What was spent through this object."""
        self._answering = Answering(self.ledger, device)
        self.notes: builtins.list[str] = []
        self.path: Path | None = None
        self.read_only = False
        self._held: FileLock | None = None
        self._encoder = encoder
        self._recent: RecentTexts | None = None
        self._made_with: str | None = None  # fingerprint of the encoder, once there is one
        self._reader = TraceReader(config.substrate, self._metered, extractor)
        self._counts: dict[str, int] = {}  # traces of each boundary
        self._waiting: dict[int, None] = {}  # sequence numbers of traces that the index lacks, in order of arrival
        self._last = 0  # sequence number of the last trace
        self.revision = 0
        """Grows with every change made through this object: what was read before one may be out of date."""
        self._lock = RLock()
        self._closed = False

    def _serve(self, memories: Memories) -> None:
        self._memories = memories
        self._searcher = Searcher(self.pipeline, memories, self._for_queries, self._counts, self.device, self.workspace)

    # Opening and closing

    def _open(
        self,
        path: Path,
        encoder: Encoder | str | None,
        config: ZeroMemConfig | None,
        extractor: EntityExtractor | None,
        device: str,
        dtype: torch.dtype | None,
        memory_budget: int | str | None,
        workspace: int | None,
        read_only: bool,
        index: bool,
    ) -> None:
        budget = _budget(memory_budget)
        if read_only and not (path / RECORD).exists():
            raise ZeroMemError.of("path", "a folder that holds a memory", str(path), "open it for writing to make one")
        if not (path / RECORD).exists() and (path / "index" / "manifest.json").exists():
            advice = "restore it from a backup; to begin anew, remove the folder's index too"
            raise ZeroMemError.of("path", f"the record {RECORD} beside its index", "no such file", advice)
        held = None if read_only else _hold(path)
        record = None
        try:
            record = Record(path / RECORD, read_only=read_only)
            stored, name = record.setting("config"), record.setting("encoder_name")
            if config is None:
                config = ZeroMemConfig.from_dict(json.loads(stored), "config") if stored else ZeroMemConfig()
            if isinstance(encoder, str) or name:
                config = replace(config, encoder=EncoderConfig(encoder if isinstance(encoder, str) else name or ""))
            given = None if isinstance(encoder, str) else encoder
            self._set_up(config, given, extractor, device, dtype, budget, workspace)
            self.path, self.read_only, self._record, self._held = path, read_only, record, held
            self._made_with = record.setting("encoder")
            self._counts.update(record.boundaries())
            if self._made_with and given is None and not name and not isinstance(encoder, str):
                expected = f"the one this memory was made with, {self._made_with}, which was given as an object"
                raise ZeroMemError.of("encoder", expected, None, "pass it: ZeroMem.open(path, encoder=...)")
            if self._made_with is None or given is not None or config.encoder.name != name:
                self._load_encoder()
            if not read_only:
                self._remember("" if given is not None else config.encoder.name)
            self._take_up_index(index)
        except BaseException:
            if record is not None:
                record.close()
            if held is not None:
                held.release()
            raise

    def _remember(self, encoder_name: str) -> None:
        now = {"config": json.dumps(self.config.to_dict())}
        if self._record.setting("encoder") is None:
            now |= {"encoder_name": encoder_name, "encoder": self.encoder.fingerprint}
        if any(self._record.setting(name) != value for name, value in now.items()):
            self._record.set_settings(now)

    def _take_up_index(self, index: bool) -> None:
        """Open the index, and bring it up to the record, now or later."""
        assert self.path is not None
        fingerprint = self._reader.fingerprint(self._made_with or self.encoder.fingerprint)
        segments = Segments(self.path / "index", fingerprint, read_only=self.read_only)
        self.notes += segments.problems
        if segments.stale:
            self.notes.append(f"the index was made with another {', '.join(segments.stale)}, and is made anew")
            if self.read_only:  # a reader cannot mend what is on disk: it makes rows of its own
                segments = Segments(None, fingerprint)
            else:
                segments.clear(fingerprint)
        self._keeper = Keeper(self._record, segments, self._reader, self._waiting)
        if index:
            self._keeper.catch_up(self.notes)
        else:
            self._keeper.line_up()
        self._last = self._record.last()
        self._serve(Memories(self.config.substrate, 0, self._keeper.load, self._live_budget))

    @property
    def encoder(self) -> Encoder:
        """Loaded when it is first needed: a memory that is only listed or counted needs none."""
        return self._encoder if self._encoder is not None and self._made_with is not None else self._load_encoder()

    def _metered(self) -> Encoder:
        return MeteredEncoder(self.encoder, self.ledger)

    def remember_queries(self, most: int) -> None:
        """Keep what the encoder says of the last ``most`` texts of queries; asked again, they are not encoded again."""
        self._recent = RecentTexts(self._metered(), most)

    def _for_queries(self) -> Encoder:
        if self._recent is None:
            return self._metered()
        if self._recent.fingerprint != self.encoder.fingerprint:
            self.remember_queries(self._recent.most)
        return self._recent

    def _load_encoder(self) -> Encoder:
        loaded = self._encoder or load_encoder(self.config.encoder.name, device=self.device, dtype=self._dtype)
        if self._made_with is not None and loaded.fingerprint != self._made_with:
            raise ZeroMemError.of(
                "encoder",
                f"the one this memory was made with, {self._made_with}",
                loaded.fingerprint,
                "open the memory without naming an encoder, then change it for all traces with reencode(encoder), or "
                "on the command line: zeromem reencode NAME",
            )
        if self.config.substrate.lexicon == "learned":
            check_sparse_head(loaded)
        self._encoder, self._made_with = loaded, loaded.fingerprint
        return loaded

    def close(self) -> None:
        """Write what the index still holds in memory, and let go of the folder."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._keeper is not None:
                    self._keeper.segments.close()
            finally:
                self._record.close()
                if self.path is not None and self._held is not None:
                    (self.path / WRITER).unlink(missing_ok=True)
                    self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def add(
        self,
        messages: Message | Iterable[Message],
        *,
        boundary: str | None = None,
        session: str | None = None,
        timestamp: datetime | str | float | None = None,
        metadata: Mapping[str, Any] | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        actor: str = "",
        overwrite: bool = False,
        index: bool = True,
        progress: Progress | None = None,
    ) -> builtins.list[str]:
        """Store messages; returns their ids in order. All of them or, when one cannot be used, none.

        A message is a text (what the user said), a `Trace`, or a mapping of its fields; OpenAI's role, content and name
        are read too. What it does not say itself is taken from the other arguments: its boundary, session, event time,
        metadata. One without an id gets a new one. The same trace again changes nothing; another one under a known id
        is an error, or with ``overwrite`` an update.

        When this returns the traces are on disk, and a search finds them; with ``index=False`` it finds them once
        `index_some` has come to them.
        """
        with self._operation():
            self._writable()
            home = boundary if boundary is not None else _home(user_id, agent_id, run_id)
            when = None if timestamp is None else parse_time(timestamp)
            made = [trace_of(message, home, session, when, metadata) for message in messages_in(messages)]
            if index:
                made, given = self._record.changes(made, overwrite=overwrite), made
                with self._searcher.timed("build"):
                    rows = self._reader.read(made, progress)
                stored = self._record.add(made, actor=actor, overwrite=overwrite)
                self._take_in(stored, rows)
            else:
                given, stored = made, self._record.add(made, actor=actor, overwrite=overwrite)
                self._put_off(stored)
            for _, trace in stored:
                if trace.updated_at is None:
                    self._counts[trace.boundary] = self._counts.get(trace.boundary, 0) + 1
            return [trace.id for trace in given]

    def index_some(self, tokens: int) -> int:
        """Index the traces that have waited longest, about ``tokens`` tokens and at least one; returns how many.

        Where one of them cannot be read, an encoder's failure for example, all of them go on waiting.
        """
        with self._operation():
            self._writable()
            most = min(AT_ONCE, tokens // TOKENS_BESIDE + 1)
            stored: builtins.list[tuple[int, Trace]] = []
            for seq, trace in self._record.fetch(islice(self._waiting, most)):
                tokens -= len(trace.text) // CHARACTERS + TOKENS_BESIDE
                if stored and tokens < 0:
                    break
                stored.append((seq, trace))
            with self._searcher.timed("build"):
                rows = self._reader.read([trace for _, trace in stored])
            self._take_in(stored, rows)
            return len(stored)

    @property
    def waiting(self) -> int:
        """Traces that are stored and not found yet: `index_some` makes them so."""
        return len(self._waiting)

    @property
    def stored_up_to(self) -> int:
        """Number of the last trace that was stored; numbers grow with every trace."""
        return self._last

    @property
    def indexed_up_to(self) -> int:
        """A search finds every trace up to this number."""
        with self._lock:
            return min(self._waiting) - 1 if self._waiting else self._last

    def _put_off(self, stored: Sequence[tuple[int, Trace]]) -> None:
        """What was found before of traces that have changed is not found any more."""
        for seq, trace in stored:
            self._waiting[seq] = None
            if trace.updated_at is not None:
                self._memories.drop(trace.boundary, [seq])
                if self._keeper is not None:
                    self._keeper.segments.retire([seq])
        self._last = max([self._last, *(seq for seq, _ in stored)])

    def _take_in(self, stored: Sequence[tuple[int, Trace]], rows: Forward) -> None:
        """Hand stored traces and their rows to the index, and to the memories in use."""
        if not stored:
            return
        seqs = [seq for seq, _ in stored]
        for seq in seqs:
            self._waiting.pop(seq, None)
        self._last = max(self._last, *seqs)
        if self._keeper is not None:
            self._keeper.segments.append(seqs, [trace.digest for _, trace in stored], rows)
        places: dict[str, builtins.list[int]] = {}
        for place, (_, trace) in enumerate(stored):
            places.setdefault(trace.boundary, []).append(place)
        for boundary, own in places.items():
            of_it = rows if len(places) == 1 else rows.take(torch.tensor(own))
            self._memories.put(boundary, [seqs[i] for i in own], [stored[i][1] for i in own], of_it)

    def update(
        self, id: str, *, boundary: str | None = None, actor: str = "", index: bool = True, **changes: Any
    ) -> Trace:
        """Change what an update may change, and keep the rest; returns the trace as it is now.

        Text, title, time, metadata, validity and expiry may change. Who said it, where and in which order is provenance
        and does not: delete the trace and add another. ``metadata`` replaces all of it. ``index`` is that of `add`.
        """
        with self._operation():
            self._writable()
            boundary = self._home_of(id, boundary)
            for name in changes:
                if name not in MUTABLE:
                    advice = f"{nearest(name, MUTABLE)}what says who, where and when in order stays as it was"
                    raise ZeroMemError.of("update", f"some of {', '.join(MUTABLE)}", name, advice)
            for name in ("time", "valid_from", "valid_to", "expires_at"):
                if changes.get(name) is not None:
                    changes[name] = parse_time(changes[name])
            before = self._known(boundary, id)
            wanted = replace(before, **changes)
            same = wanted.digest == before.digest
            rows = self._reader.read([wanted]) if index and not same else None
            seq, after = self._record.update(boundary, id, changes, actor=actor)
            if rows is not None:
                self._take_in([(seq, after)], rows)
            elif not same:
                self._put_off([(seq, after)])
            elif seq not in self._waiting:
                self._memories.replace(boundary, seq, after)
            return after

    def delete(self, id: str, *, boundary: str | None = None, actor: str = "", purge: bool = False) -> None:
        """Remove a trace from every index. The history keeps it, unless ``purge`` removes it from all files too."""
        with self._operation():
            self._writable()
            boundary = self._home_of(id, boundary, gone=purge)
            there = self._record.get(boundary, id)
            self._remove([(boundary, id)], [there] if there else [], actor, purge)

    def delete_all(self, *, boundary: Boundary, actor: str = "", purge: bool = False) -> int:
        """Remove all traces of the boundaries, named as in a search ("acme/": and below); returns their number."""
        with self._operation():
            self._writable()
            names = boundaries_in(boundary, self._record.boundaries_ever() if purge else self._counts)
            there = [trace for name in names for _, trace in self._record.traces_of(name)]
            self._remove([(trace.boundary, trace.id) for trace in there], there, actor, purge, names)
            return len(there)

    def _remove(
        self,
        keys: Sequence[tuple[str, str]],
        there: Sequence[Trace],  # what of them is not gone already
        actor: str,
        purge: bool,
        names: Sequence[str] = (),  # whole boundaries, with their history if purged
    ) -> None:
        if purge:
            seqs = self._record.purge(keys=keys, boundaries=names or None)
        else:
            seqs = self._record.delete(keys, actor=actor) if keys else []
        if self._keeper is not None:
            self._keeper.segments.compact(seqs) if purge else self._keeper.segments.retire(seqs)
        gone = set(seqs)
        for seq in gone & self._waiting.keys():
            del self._waiting[seq]
        for boundary in dict.fromkeys([*(boundary for boundary, _ in keys), *names]):
            self._memories.drop(boundary, gone)
        for trace in there:
            self._counts[trace.boundary] -= 1
            if not self._counts[trace.boundary]:
                del self._counts[trace.boundary]
        if purge:
            self._searcher.release()
            if self.path is not None:
                scrub_logs(self.path / "logs", set(keys), set(names))
            if forget := getattr(self._encoder, "forget", None):  # a cache of texts
                forget(encoded_texts(there, self.encoder))

    # Reading

    def get(self, id: str, *, boundary: str | None = None) -> Trace:
        """The trace of this id. Ids are unique in their boundary: name it where several have the id."""
        with self._operation():
            return self._known(self._home_of(id, boundary), id)

    def list(
        self,
        *,
        boundary: Boundary | None = None,
        cursor: str | None = None,
        limit: int | None = 100,
        prefix: str = "",  # only ids that begin so
    ) -> Page:
        """Traces in the order they came, ``limit`` at a time (None: all); the page says where the next one starts."""
        with self._operation():
            if limit is not None:
                _check_count("limit", limit)
            after = _cursor(cursor)
            names = None if boundary is None else boundaries_in(boundary, self._counts)
            size = len(self) + 1 if limit is None else limit + 1
            found = self._record.page(after, size, boundaries=names, prefix=prefix)
            more = limit is not None and len(found) > limit
            found = found[:limit] if more else found
            return Page([trace for _, trace in found], str(found[-1][0]) if more else None)

    def history(self, id: str, *, boundary: str | None = None) -> builtins.list[Change]:
        """What happened to a trace, oldest first: when, by whom, and what it was before and after."""
        with self._operation():
            return self._record.history(self._home_of(id, boundary, gone=True), id)

    @property
    def boundaries(self) -> tuple[str, ...]:
        return tuple(self._counts)

    @property
    def counts(self) -> Mapping[str, int]:
        """Traces of each boundary."""
        return MappingProxyType(self._counts)

    def homes(self, id: str, *, ever: bool = False) -> builtins.list[str]:
        """Boundaries that hold this id (``ever``: or held it once)."""
        with self._operation():
            check_text("search", "id", id)
            return self._record.boundaries_of(id, ever=ever)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __bool__(self) -> bool:
        return True  # a memory that is empty yet is a memory

    def __repr__(self) -> str:
        where = "" if self.path is None else f", in {str(self.path)!r}"
        return f"ZeroMem({len(self)} traces in {len(self._counts)} boundaries, encoder {self._made_with}{where})"

    def _known(self, boundary: str, id: str) -> Trace:
        if (trace := self._record.get(boundary, id)) is None:
            raise NotFound.of("id", f"one that boundary {boundary!r} holds", id, "list(boundary=...) shows them")
        return trace

    def _home_of(self, id: str, boundary: str | None, *, gone: bool = False) -> str:
        """The boundary of an id: the one named, or the only one that has it (``gone``: or ever had it)."""
        check_text("search", "id", id)
        if boundary is not None:
            check_text("search", "boundary", boundary)
            return boundary
        homes = self._record.boundaries_of(id) or (self._record.boundaries_of(id, ever=True) if gone else [])
        if len(homes) != 1:
            expected = "one that the memory holds" if not homes else "one that a single boundary holds"
            advice = "list() shows what there is" if not homes else "name its boundary too: boundary=..."
            raise ZeroMemError.of("id", expected, id, advice)
        return homes[0]

    # Searching

    def search(
        self,
        query: str,
        *,
        boundary: Boundary | None = None,
        top_k: int | None = None,
        token_budget: int | None = None,
        filters: Mapping[str, Any] | None = None,
        as_of: datetime | str | float | None = None,
        min_score: float | None = None,
        explain: bool = False,
        reference_time: datetime | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> Evidence:
        """Evidence for one query from one boundary, or from several as one; see `search_batch`."""
        if boundary is None:
            boundary = boundary_of(user_id, agent_id, run_id) + "/"
        return self.search_batch(
            [query],
            boundaries=[boundary],
            top_k=top_k,
            token_budget=token_budget,
            filters=filters,
            as_of=as_of,
            min_score=min_score,
            explain=explain,
            reference_times=None if reference_time is None else [reference_time],
        )[0]

    def search_batch(
        self,
        queries: Sequence[str],
        *,
        boundaries: Sequence[Boundary],
        top_k: int | None = None,
        token_budget: int | None = None,
        filters: Mapping[str, Any] | None = None,
        as_of: datetime | str | float | None = None,
        min_score: float | None = None,
        explain: bool = False,
        reference_times: Sequence[datetime | None] | None = None,
    ) -> builtins.list[Evidence]:
        """Evidence for each query from the boundary at its place, each as if it were asked alone.

        R(q) is the ``top_k`` best units and what closes them or, with ``token_budget``, as many ranked units as fit.

        - A boundary is a name ("acme/alice"), a name and all below it ("acme/"), or a list of such, searched as one.
        - ``filters``: session, speaker, role (a name or several), after, before (event time), metadata (equal values).
          They and ``as_of`` (what held then; now, if not given) are applied first: the answer is that of a memory
          which holds nothing else.
        - ``min_score``: least relevance, a cosine from -1 to 1; where nothing has it, nothing is found.
        - ``explain``: each piece says its rank in each view, and what its score sums.

        Relative dates count from the reference time, else from ``as_of``, else from the boundary's last event.
        """
        with self._operation():
            self._open_still()
            queries, boundaries = listed("queries", queries), listed("boundaries", boundaries)
            if len(queries) != len(boundaries):
                raise ZeroMemError.of("boundaries", f"one per query, {len(queries)}", len(boundaries), "pair them")
            times = [None] * len(queries) if reference_times is None else listed("reference_times", reference_times)
            if len(times) != len(queries):
                expected = f"{len(queries)} times or None"
                raise ZeroMemError.of("reference_times", expected, len(times), "give one per query")
            requests = [
                SearchRequest(query, boundary, top_k, token_budget, filters, as_of, min_score, explain, time)
                for query, boundary, time in zip(queries, boundaries, times, strict=True)
            ]
            scopes = self._scopes(requests, alone=len(requests) == 1)
            return self._found(requests, scopes, range(len(requests)))

    def search_each(self, requests: Sequence[SearchRequest]) -> builtins.list[Evidence | ZeroMemError]:
        """Evidence for each request, as if it came alone; one that cannot be used is answered with its error.

        Requests that rank alike (top_k, token_budget, explain) are searched together.
        """
        with self._operation():
            self._open_still()
            answers: builtins.list[Evidence | ZeroMemError] = []
            scopes: builtins.list[Scope] = []
            groups: dict[tuple[object, ...], builtins.list[int]] = {}
            for number, request in enumerate(requests):
                try:
                    scopes += self._scopes([request], alone=True)
                except ZeroMemError as error:
                    answers.append(error)
                    scopes.append(Scope(()))
                else:
                    answers.append(Evidence.nothing(request.query, _name(request.boundary), ""))
                    groups.setdefault((request.top_k, request.token_budget, request.explain), []).append(number)
            for numbers in groups.values():
                for number, evidence in zip(numbers, self._found(requests, scopes, numbers), strict=True):
                    answers[number] = evidence
            return answers

    def _scopes(self, requests: Sequence[SearchRequest], *, alone: bool) -> builtins.list[Scope]:
        """What each request may see; a request that cannot be used is an error."""
        scopes: builtins.list[Scope] = []
        known: dict[str, tuple[str, ...]] = {}
        admitted: dict[int, Filters | None] = {}
        for number, asked in enumerate(requests):
            for name, value in (("top_k", asked.top_k), ("token_budget", asked.token_budget)):
                if value is not None:
                    _check_count(name, value)
            if asked.min_score is not None and not (_is_number(asked.min_score) and -1 <= asked.min_score <= 1):
                advice = "evidence shows its relevance"
                raise ZeroMemError.of("min_score", "a cosine from -1 to 1", asked.min_score, advice)
            check_text("query" if alone else f"query {number}", "text", asked.query)
            _check_time("reference_time", asked.reference_time)
            moment = None if asked.as_of is None else parse_time(asked.as_of)
            if id(asked.filters) not in admitted:
                admitted[id(asked.filters)] = Filters.of(asked.filters)
            name = repr(asked.boundary)
            if name not in known:
                known[name] = boundaries_in(asked.boundary, self._counts)
            scopes.append(Scope(known[name], admitted[id(asked.filters)], moment))
        return scopes

    def _found(
        self, requests: Sequence[SearchRequest], scopes: Sequence[Scope], numbers: Sequence[int]
    ) -> builtins.list[Evidence]:
        """Evidence for some of the requests, which rank alike."""
        if not numbers:
            return []
        alike = requests[numbers[0]]
        found = self._searcher.search(
            [requests[i].query for i in numbers],
            [scopes[i] for i in numbers],
            [requests[i].reference_time or scopes[i].as_of for i in numbers],
            self.config.calibration.top_k if alike.top_k is None else alike.top_k,
            alike.token_budget,
            explain=alike.explain,
        )
        answers = []
        for place, number in enumerate(numbers):
            asked = requests[number]
            if (evidence := found.get(place)) is None:
                evidence = Evidence.nothing(asked.query, _name(asked.boundary), self._why(scopes[number]))
            answers.append(evidence if asked.min_score is None else evidence.at_least(asked.min_score))
        return answers

    def _why(self, scope: Scope) -> str:
        """Why there is nothing to search."""
        if not any(name in self._counts for name in scope.boundaries):
            return "nothing is there"
        if self._waiting:
            return "nothing that is indexed yet passes the filters and holds at this time"
        return "nothing there passes the filters and holds at this time"

    def answer(
        self,
        question: str,
        *,
        boundary: Boundary | None = None,
        reader: Reader | str = "embedded",
        reader_budget: int | None = None,
        calibrate: bool = True,
        abstain: bool = False,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        **search: Any,
    ) -> Answered:
        """Answer one question from its evidence; see `answer_batch`."""
        if boundary is None:
            boundary = boundary_of(user_id, agent_id, run_id) + "/"
        how: dict[str, Any] = {"reader_budget": reader_budget, "calibrate": calibrate, "abstain": abstain}
        return self.answer_batch([question], boundaries=[boundary], reader=reader, **how, **search)[0]

    def answer_batch(
        self,
        questions: Sequence[str],
        *,
        boundaries: Sequence[Boundary],
        reader: Reader | str = "embedded",
        reader_budget: int | None = None,
        calibrate: bool = True,
        abstain: bool = False,
        **search: Any,
    ) -> builtins.list[Answered]:
        """Search, hand what was found to a reader, and calibrate what it says (Eq. 16).

        Only this spends tokens of a language model; a question without evidence costs none. Where the reader fails for
        one question its answer says so, and the others stand.

        - ``reader``: one, or a name that `zeromem_torch.reader.load_reader` knows; what was named stays loaded.
        - ``reader_budget``: most tokens of evidence in a prompt, by the reader's tokenizer.
        - ``calibrate=False`` leaves the answer as it was said; ``abstain``: what nothing supports is "not in memory".
        - the others are those of `search_batch`.
        """
        if reader_budget is not None:
            _check_count("reader_budget", reader_budget)
        how: dict[str, Any] = {"reader_budget": reader_budget, "calibrate": calibrate, "abstain": abstain}
        return self.answer_from(self.search_batch(questions, boundaries=boundaries, **search), reader=reader, **how)

    def answer_from(
        self,
        evidence: Sequence[Evidence],
        *,
        reader: Reader | str = "embedded",
        reader_budget: int | None = None,
        calibrate: bool = True,
        abstain: bool = False,
    ) -> builtins.list[Answered]:
        """Answer the queries of evidence that was found before; the memory itself is not asked."""
        if reader_budget is not None:
            _check_count("reader_budget", reader_budget)
        queries = [found.query for found in evidence]
        return self._answering.answer(
            queries, evidence, reader, token_budget=reader_budget, calibrate=calibrate, abstain=abstain
        )

    def use(self, checkpoint: str | os.PathLike[str]) -> None:
        """Route and rank by what `zeromem train router` learned; what is stored, and how it is read, stays."""
        with self._operation():
            pipeline = ZeroMemPipeline.from_pretrained(checkpoint)
            own = self.config
            pipeline.config = replace(
                pipeline.config, encoder=own.encoder, substrate=own.substrate, signals=own.signals, compute=own.compute
            )
            pipeline.signals = self.pipeline.signals
            self.config, self.pipeline = pipeline.config, pipeline
            self._searcher.follow(pipeline)

    def batches(
        self, queries: Sequence[str], boundaries: Sequence[str], times: Sequence[datetime | None]
    ) -> Iterator[Batch]:
        """Profiled queries in groups that fit the workspace, each with the memories it asks, on the device."""
        return self._searcher.batches(queries, [Scope((boundary,)) for boundary in boundaries], times)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds spent in each stage so far."""
        return self._searcher.timings

    @property
    def extractors(self) -> tuple[str, ...]:
        """Fingerprints of the entity extractors in use."""
        return self._reader.extractors

    # Keeping it sound

    def verify(self, *, quick: bool = False) -> Report:
        """Check the record, the index files, that they agree, and that the index equals a rebuild.

        For the last, every trace is read again and its row compared: whole numbers must be equal, vectors within
        `TOLERANCE`; and every memory in use is assembled again from the rows, and must be equal. ``quick`` leaves that
        part out, which takes as long as adding the traces did.
        """
        with self._operation():
            self._open_still()
            problems = self._record.check()
            compared = memories = 0
            if self._keeper is not None:
                problems += self._keeper.problems()
                if not quick:
                    compared, found = self._keeper.compare()
                    problems += found
            if not quick:
                memories, differing = self._memories.compare()
                problems += [f"the memory of {name!r} is not what its rows make" for name in differing]
            return Report(len(self), compared, memories, problems)

    def rebuild(self) -> None:
        """Make the whole index anew from the record."""
        with self._operation():
            self._writable()
            if self._keeper is None:
                stored = self._record.fetch(self._record.keys()[0].tolist())
                rows = self._reader.read([trace for _, trace in stored])
                self._serve(Memories(self.config.substrate, self.encoder.dim, None))
                self._take_in(stored, rows)
            else:
                self._keeper.segments.clear(self._reader.fingerprint(self.encoder.fingerprint))
                self._memories.release()
                self._searcher.release()
                self._keeper.catch_up()
            self.notes.clear()
            self._waiting.clear()

    def reencode(self, encoder: Encoder | str) -> None:
        """Change to another encoder, and make the index anew with it; after a crash the next opening goes on."""
        with self._operation():
            self._writable()
            name = encoder if isinstance(encoder, str) else ""
            if isinstance(encoder, str):
                encoder = load_encoder(encoder, device=self.device, dtype=self._dtype)
            if self.config.substrate.lexicon == "learned":
                check_sparse_head(encoder)
            if name:
                self.config = replace(self.config, encoder=EncoderConfig(name))
            self._encoder, self._made_with = encoder, encoder.fingerprint
            settings = {"encoder_name": name, "encoder": encoder.fingerprint}
            self._record.set_settings({"config": json.dumps(self.config.to_dict()), **settings})
            self.rebuild()

    def release_memory(self, *, keep_reserved: bool = False) -> None:
        """Drop all that can be read again from disk: memories in use, and tensors on the device.

        ``keep_reserved``: what PyTorch has got from the device stays with it, for the next search; a reader that starts
        beside it must not see free memory change.
        """
        with self._operation():
            self._searcher.release()
            self._memories.release()
            if torch.device(self.device).type == "cuda" and not keep_reserved:
                torch.cuda.empty_cache()

    def held_bytes(self) -> dict[str, int]:
        """Bytes in use, by part: the encoder's weights, live memories, and what is on the device of them."""
        encoder = 0 if self._encoder is None else encoder_bytes(self._encoder)
        return {"encoder": encoder, "memories": self._memories.nbytes, **self._searcher.held_bytes()}

    @property
    def cache_hits(self) -> tuple[int, int]:
        """How often a boundary that was asked for was live, and how often it had to be read."""
        return self._memories.hits, self._memories.misses

    def stats(self) -> dict[str, Any]:
        """Counts and sizes."""
        with self._operation():
            index = {} if self._keeper is None else self._keeper.segments.stats()
            return {
                "traces": len(self),
                "boundaries": dict(self._counts),
                "encoder": self._made_with,
                "path": None if self.path is None else str(self.path),
                "live_bytes": self._memories.nbytes,
                "index": index,
                "notes": list(self.notes),
            }

    # In and out

    def export_jsonl(self, path: TextFile, *, boundary: Boundary | None = None) -> int:
        """Write traces, a JSON object a line, in the order they came; returns their number. `import_jsonl` reads it."""
        with text_file(path, "w") as file:
            count, cursor = 0, None
            while True:
                page = self.list(boundary=boundary, cursor=cursor, limit=1000)
                for trace in page:
                    file.write(json.dumps(trace.to_dict(), ensure_ascii=False) + "\n")
                    count += 1
                if (cursor := page.next_cursor) is None:
                    return count

    def import_jsonl(
        self,
        path: TextFile,
        *,
        boundary: str | None = None,
        batch: int = AT_ONCE,
        actor: str = "",
        progress: Progress | None = None,
    ) -> int:
        """Add traces, a JSON object a line, some at a time; returns how many lines there were.

        Killed or refused half-way, what was read so far stays, and the same call goes on: traces that are known change
        nothing. So a line without an id gets one that its content and place in the file decide.
        """
        _check_count("batch", batch)
        done = 0
        waiting: builtins.list[Message] = []
        with text_file(path, "r") as file, tqdm(desc="importing", unit="trace", disable=None) as bar:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                waiting.append(message_in(line, getattr(file, "name", "the file"), number, boundary))
                if len(waiting) == batch:
                    done += len(self.add(waiting, boundary=boundary, actor=actor))
                    bar.update(len(waiting))
                    waiting = []
                    if progress:
                        progress(done, None)
            done += len(self.add(waiting, boundary=boundary, actor=actor))
            bar.update(len(waiting))
            if progress:
                progress(done, done)
        return done

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the memory to a new folder, while it is in use; the copy opens like any other."""
        with self._operation():
            self._open_still()
            target = Path(path)
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise ZeroMemError.of("path", "a new or empty folder", str(target), "name another")
            target.mkdir(parents=True, exist_ok=True)
            self._record.backup(target / RECORD)
            if self._keeper is not None:
                self._keeper.segments.copy(target / "index")

    # What every method needs

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """One at a time, and no reader may be asked inside."""
        with self._lock, self.ledger.operation():
            yield

    def _open_still(self) -> None:
        if self._closed:
            raise ZeroMemError.of("memory", "one that is open", "one that was closed", "open it again")

    def _writable(self) -> None:
        self._open_still()
        self.revision += 1
        if self.read_only:
            raise ZeroMemError.of("memory", "one opened for writing", "read_only=True", "open it without read_only")

    aadd = _in_thread(add)
    asearch = _in_thread(search)
    asearch_batch = _in_thread(search_batch)
    aanswer = _in_thread(answer)  # type: ignore[arg-type]  # as with update
    aanswer_batch = _in_thread(answer_batch)  # type: ignore[arg-type]
    aget = _in_thread(get)
    alist = _in_thread(list)
    aupdate = _in_thread(update)  # type: ignore[arg-type]  # any change could be named "self"
    adelete = _in_thread(delete)
    adelete_all = _in_thread(delete_all)
    ahistory = _in_thread(history)


CHARACTERS, TOKENS_BESIDE = 4, 8
"""Of a token, and tokens that a trace costs beside its text: enough to say how much is read at once."""
RECORD = "memory.sqlite"
WRITER = "writer.json"


def _hold(path: Path) -> FileLock:
    """Be the one process that writes here; the lock goes with the process, however it ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / "lock", timeout=0)
        lock.acquire()
    except Timeout:
        try:
            who = json.loads((path / WRITER).read_text())
            holder = f"one that process {who['pid']} has open since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            holder = "one that another process has open"
        advice = "close it there, or open it here with read_only=True"
        raise ZeroMemError.of(f"memory {path}", "one that nobody else writes to", holder, advice) from None
    except OSError as error:
        advice = f"name another ({error})"
        raise ZeroMemError.of("path", "a folder that can be written to", str(path), advice) from error
    started = {"pid": os.getpid(), "since": datetime.now().astimezone().isoformat(timespec="seconds")}
    (path / WRITER).write_text(json.dumps(started))
    return lock


def _home(user_id: str | None, agent_id: str | None, run_id: str | None) -> str | None:
    return None if (user_id, agent_id, run_id) == (None, None, None) else boundary_of(user_id, agent_id, run_id)


def _name(asked: Boundary) -> str:
    return ", ".join(map(str, asked)) if isinstance(asked, list | tuple) else str(asked)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ZeroMemError.of(name, "a whole number of at least 1", value, "pass 1 or more")


def _check_time(name: str, time: object) -> None:
    if time is not None and not isinstance(time, datetime):
        raise ZeroMemError.of(name, "a datetime or None", time, "read it with parse_time(...)")


def _cursor(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not isinstance(cursor, str) or not cursor.isascii() or not cursor.isdigit():
        raise ZeroMemError.of("cursor", "the next_cursor of a page", cursor, "leave it out to start at the first trace")
    return int(cursor)


def _budget(size: int | str | None) -> int | None:
    return None if size is None else bytes_of("memory_budget", size)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
