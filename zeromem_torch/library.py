"""ZeroMem, what users hold: traces go in, evidence comes out; between them stand record, index and pipeline."""

import builtins
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import Any, Self

import torch
from filelock import FileLock
from tqdm.auto import tqdm

from zeromem_torch.answering import Answering
from zeromem_torch.collect import Batch
from zeromem_torch.config import EncoderConfig, ZeroMemConfig
from zeromem_torch.derived import Derived
from zeromem_torch.encoding import MemoryEncoder, check_name
from zeromem_torch.evidence import Evidence
from zeromem_torch.folder import (
    INDEX,
    RECORD,
    check_record,
    copy_keys,
    copy_logs,
    hold,
    let_go,
    new_folder,
    scrub_logs,
)
from zeromem_torch.keeper import AT_ONCE, Keeper, Progress, TraceReader, open_index
from zeromem_torch.ledger import Ledger
from zeromem_torch.messages import Message, TextFile, listed, messages_in, messages_of, text_file, trace_of, write_lines
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.reader import Reader
from zeromem_torch.results import Answered, Page, Report, place_of
from zeromem_torch.scope import Boundary, Scope, SearchRequest, boundaries_in, boundary_of, scopes_of
from zeromem_torch.searcher import Searcher
from zeromem_torch.sizes import bytes_of, check_count
from zeromem_torch.store import Change, Record
from zeromem_torch.substrate.encoder import Encoder, load_encoder
from zeromem_torch.substrate.entities import EntityExtractor
from zeromem_torch.substrate.traces import Trace, ZeroMemError, check_text, parse_changes, parse_time
from zeromem_torch.twins import in_thread

LEARNED = "learned"
"""Name, among a record's settings, of what `use` keeps there."""


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
        self._set_up(config, Record(), encoder, None, extractor, device, dtype, _budget(memory_budget), workspace)
        self._serve(None)

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
        says how to `reencode`. The weights that `use` gave it are searched by, unless a ``config`` is named. One
        process may write; any number may read (``read_only``), and see what was there when they opened it. What the
        index lacks, after a crash or damage, is made again from the record: `notes` says so; with ``index=False`` it
        waits for `index_some`.

        ``memory_budget`` ("2GiB", or bytes): how much of the memory may be held ready at once, the rest is read when it
        is asked for; ``workspace`` bytes of it, else half and at most 1 GiB, are for the working tensors of a search.
        """
        path, budget = Path(path), _budget(memory_budget)
        check_record(path, read_only=read_only)
        held = None if read_only else hold(path)
        record = None
        try:
            record = Record(path / RECORD, read_only=read_only)
            stored, name, made_with = (record.setting(key) for key in ("config", "encoder_name", "encoder"))
            learned = record.setting(LEARNED) if config is None else None
            if config is None:
                config = ZeroMemConfig.from_dict(json.loads(stored), "config") if stored else ZeroMemConfig()
            given = None if isinstance(encoder, str) else encoder
            named = encoder if isinstance(encoder, str) else name or None
            if made_with and given is None and named is None:
                expected = f"the one this memory was made with, {made_with}, which was given as an object"
                raise ZeroMemError.of("encoder", expected, None, "pass it: ZeroMem.open(path, encoder=...)")
            if named is not None:
                config = replace(config, encoder=EncoderConfig(named))
            if made_with and name and given is None:
                check_name(config.encoder.name, name, made_with)
            memory = cls.__new__(cls)
            memory._set_up(config, record, given, made_with, extractor, device, dtype, budget, workspace)
            memory.path, memory.read_only, memory._held = path, read_only, held
            lacking = memory._take_up_weights(learned) if learned else []
            if made_with is None or given is not None or config.encoder.name != name:
                memory._encoder.get()  # an encoder that is not the memory's is refused now
            if not read_only and made_with is not None:
                memory._remember()
            elif not read_only:
                own_name = "" if given is not None else config.encoder.name
                memory._remember(encoder_name=own_name, encoder=memory.encoder.fingerprint)
            memory._take_up_index(path / INDEX, index)
            memory.notes += lacking
        except BaseException:
            if record is not None:
                record.close()
            if held is not None:
                let_go(path, held)
            raise
        return memory

    def _set_up(
        self,
        config: ZeroMemConfig,
        record: Record,
        encoder: Encoder | None,
        made_with: str | None,
        extractor: EntityExtractor | None,
        device: str,
        dtype: torch.dtype | None,
        budget: int | None,
        workspace: int | None,
    ) -> None:
        self.config = self._plain = config  # in use; and without what `use` brought
        self.pipeline = ZeroMemPipeline(config)
        self._checkpoint: str | None = None
        self.device, self._dtype = device, dtype
        half = 1 << 30 if budget is None else min(1 << 30, max(1, budget // 2))
        self.workspace = half if workspace is None else workspace
        self._live_budget = None if budget is None else max(0, budget - self.workspace)
        self.ledger = Ledger()
        """What was spent through this object."""
        self.notes: builtins.list[str] = []
        self.path: Path | None = None
        self.read_only = False
        self.revision = 0
        """Grows with every change made through this object: what was read before one may be out of date."""
        self._record = record
        self._counts = record.boundaries()
        self._encoder = MemoryEncoder(
            lambda: encoder or load_encoder(config.encoder.name, device=device, dtype=dtype),
            made_with,
            self.ledger,
            learned=config.substrate.lexicon == "learned",
        )
        self._reader = TraceReader(config.substrate, self._encoder.metered, extractor)
        self._answering = Answering(self.ledger, device)
        self._held: FileLock | None = None
        self._lock = RLock()
        self._closed = False

    def _serve(self, keeper: Keeper | None) -> None:
        self._derived = Derived(self._record, self._reader, keeper, self._live_budget)
        memories, encoder = self._derived.memories, self._encoder.for_queries
        self._searcher = Searcher(self.pipeline, memories, encoder, self._counts, self.device, self.workspace)

    # Opening and closing

    def _remember(self, **encoder: str) -> None:
        """Have the record know the configuration, and what else is said."""
        now = {"config": json.dumps(self._plain.to_dict()), **encoder}
        if any(self._record.setting(name) != value for name, value in now.items()):
            self._record.set_settings(now)

    def _take_up_index(self, folder: Path, index: bool) -> None:
        """Open the index, and bring it up to the record, now or later."""
        fingerprint = self._reader.fingerprint(self._encoder.made_with or self.encoder.fingerprint)
        segments, self.notes = open_index(folder, fingerprint, read_only=self.read_only)
        keeper = Keeper(self._record, segments, self._reader)
        if index:
            keeper.catch_up(self.notes)
        else:
            keeper.line_up()
        self._serve(keeper)

    def _take_up_weights(self, kept: str) -> builtins.list[str]:
        """Search by what `use` kept; returns what keeps it from that, after which the memory still opens."""
        told = json.loads(kept)
        try:
            self._follow(ZeroMemPipeline.from_text(told["pipeline"]), told["name"])
        except ZeroMemError as error:
            said = f"the weights of {told['name']!r} cannot be used, and those of the configuration are ({error})"
            return [f"{said}; import what defines them first, or go back with `zeromem use --default`"]
        return []

    def _follow(self, pipeline: ZeroMemPipeline | None, name: str | None) -> None:
        """Search by this pipeline's weights from now on; None: by those of the configuration."""
        self.pipeline = ZeroMemPipeline(self._plain) if pipeline is None else pipeline.within(self._plain)
        self.config, self._checkpoint = self.pipeline.config, name

    @property
    def encoder(self) -> Encoder:
        """Loaded when it is first needed: a memory that is only listed or counted needs none."""
        return self._encoder.get()

    def remember_queries(self, most: int) -> None:
        """Keep what the encoder says of the last ``most`` texts of queries; asked again, they are not encoded again."""
        self._encoder.remember_queries(most)

    def close(self) -> None:
        """Write what the index still holds in memory, and let go of the folder."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._derived.close()
            finally:
                self._record.close()
                if self.path is not None and self._held is not None:
                    let_go(self.path, self._held)

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
            if boundary is None and (user_id, agent_id, run_id) != (None, None, None):
                boundary = boundary_of(user_id, agent_id, run_id)
            when = None if timestamp is None else parse_time(timestamp)
            made = [trace_of(message, boundary, session, when, metadata) for message in messages_in(messages)]
            if index:
                made, given = self._record.changes(made, overwrite=overwrite), made
                with self._searcher.timed("build"):
                    rows = self._reader.read(made, progress)
                stored = self._record.add(made, actor=actor, overwrite=overwrite)
                self._derived.take_in(stored, rows)
            else:
                given, stored = made, self._record.add(made, actor=actor, overwrite=overwrite)
                self._derived.put_off(stored)
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
            stored = self._derived.due(tokens)
            with self._searcher.timed("build"):
                rows = self._reader.read([trace for _, trace in stored])
            self._derived.take_in(stored, rows)
            return len(stored)

    @property
    def waiting(self) -> int:
        """Traces that are stored and not found yet: `index_some` makes them so."""
        return len(self._derived.waiting)

    @property
    def stored_up_to(self) -> int:
        """Number of the last trace that was stored; numbers grow with every trace."""
        return self._derived.last

    @property
    def indexed_up_to(self) -> int:
        """A search finds every trace up to this number."""
        with self._lock:
            return self._derived.indexed_up_to

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
            changes = parse_changes(changes)
            before = self._record.known(boundary, id)
            wanted = replace(before, **changes)
            same = wanted.digest == before.digest
            rows = self._reader.read([wanted]) if index and not same else None
            seq, after = self._record.update(boundary, id, changes, actor=actor)
            if rows is not None:
                self._derived.take_in([(seq, after)], rows)
            elif not same:
                self._derived.put_off([(seq, after)])
            elif seq not in self._derived.waiting:
                self._derived.memories.replace(boundary, seq, after)
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
        self._derived.remove(seqs, dict.fromkeys([*(boundary for boundary, _ in keys), *names]), purge=purge)
        for trace in there:
            self._counts[trace.boundary] -= 1
            if not self._counts[trace.boundary]:
                del self._counts[trace.boundary]
        if purge:
            self._searcher.release()
            if self.path is not None:
                scrub_logs(self.path, set(keys), set(names))
            self._encoder.forget(there)

    # Reading

    def get(self, id: str, *, boundary: str | None = None) -> Trace:
        """The trace of this id. Ids are unique in their boundary: name it where several have the id."""
        with self._operation():
            return self._record.known(self._home_of(id, boundary), id)

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
                check_count("limit", limit)
            after = place_of(cursor)
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
        made_with = f"encoder {self._encoder.made_with}"
        where = "" if self.path is None else f", in {str(self.path)!r}"
        return f"ZeroMem({len(self)} traces in {len(self._counts)} boundaries, {made_with}{where})"

    def _home_of(self, id: str, boundary: str | None, *, gone: bool = False) -> str:
        """The boundary of an id: the one named, or the only one that has it (``gone``: or ever had it)."""
        check_text("search", "id", id)
        if boundary is None:
            return self._record.home_of(id, gone=gone)
        check_text("search", "boundary", boundary)
        return boundary

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
            return self._searcher.evidence(requests, scopes_of(requests, self._counts), behind=bool(self.waiting))

    def search_each(self, requests: Sequence[SearchRequest]) -> builtins.list[Evidence | ZeroMemError]:
        """Evidence for each request, as if it came alone; one that cannot be used is answered with its error.

        Requests that rank alike (top_k, token_budget, explain) are searched together.
        """
        with self._operation():
            self._open_still()
            scopes: builtins.list[Scope | ZeroMemError] = []
            for request in requests:
                try:
                    scopes += scopes_of([request], self._counts)
                except ZeroMemError as error:
                    scopes.append(error)
            usable = [(asked, scope) for asked, scope in zip(requests, scopes, strict=True) if isinstance(scope, Scope)]
            asked, seen = [asked for asked, _ in usable], [scope for _, scope in usable]
            found = iter(self._searcher.evidence(asked, seen, behind=bool(self.waiting)))
            return [scope if isinstance(scope, ZeroMemError) else next(found) for scope in scopes]

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
            check_count("reader_budget", reader_budget)
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
            check_count("reader_budget", reader_budget)
        queries = [found.query for found in evidence]
        return self._answering.answer(
            queries, evidence, reader, token_budget=reader_budget, calibrate=calibrate, abstain=abstain
        )

    def use(self, checkpoint: str | os.PathLike[str] | None) -> None:
        """Route and rank by what `zeromem train router` learned; None: by the rule and the configuration again.

        A memory in a folder keeps a copy, and every later opening searches by it that names no ``config`` of its own.
        What is stored, and how it is read, stays.
        """
        with self._operation():
            self._writable()
            pipeline = None if checkpoint is None else ZeroMemPipeline.from_pretrained(checkpoint)
            name = None if checkpoint is None else Path(checkpoint).resolve().name
            if pipeline is not None and pipeline.router.encoder_dim is not None:
                _check_dim(pipeline, self.encoder)
            kept = "" if pipeline is None else json.dumps({"name": name, "pipeline": pipeline.to_text()})
            self._record.set_settings({LEARNED: kept})
            self._follow(pipeline, name)
            self._searcher.follow(self.pipeline)

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
            return Report(len(self), *self._derived.verify(quick=quick))

    def rebuild(self) -> None:
        """Make the whole index anew from the record."""
        with self._operation():
            self._writable()
            self._searcher.release()
            self._derived.rebuild()
            self.notes.clear()

    def reencode(self, encoder: Encoder | str) -> None:
        """Change to another encoder, and make the index anew with it; after a crash the next opening goes on."""
        with self._operation():
            self._writable()
            name = encoder if isinstance(encoder, str) else ""
            if isinstance(encoder, str):
                encoder = load_encoder(encoder, device=self.device, dtype=self._dtype)
            _check_dim(self.pipeline, encoder)
            self._encoder.change(encoder)
            if name:
                self.config = replace(self.config, encoder=EncoderConfig(name))
                self._plain = replace(self._plain, encoder=EncoderConfig(name))
            self._remember(encoder_name=name, encoder=encoder.fingerprint)
            self.rebuild()

    def release_memory(self, *, keep_reserved: bool = False) -> None:
        """Drop all that can be read again from disk: memories in use, and tensors on the device.

        ``keep_reserved``: what PyTorch has got from the device stays with it, for the next search; a reader that starts
        beside it must not see free memory change.
        """
        with self._operation():
            self._searcher.release()
            self._derived.memories.release()
            if torch.device(self.device).type == "cuda" and not keep_reserved:
                torch.cuda.empty_cache()

    def held_bytes(self) -> dict[str, int]:
        """Bytes in use, by part: the encoder's weights, live memories, and what is on the device of them."""
        own = {"encoder": self._encoder.nbytes, "memories": self._derived.memories.nbytes}
        return {**own, **self._searcher.held_bytes()}

    @property
    def cache_hits(self) -> tuple[int, int]:
        """How often a boundary that was asked for was live, and how often it had to be read."""
        return self._derived.memories.hits, self._derived.memories.misses

    def stats(self) -> dict[str, Any]:
        """Counts and sizes."""
        with self._operation():
            return {
                "traces": len(self),
                "boundaries": dict(self._counts),
                "encoder": self._encoder.made_with,
                "router": self.pipeline.router.kind,
                "checkpoint": self._checkpoint,  # what `use` took its weights from
                "path": None if self.path is None else str(self.path),
                "live_bytes": self._derived.memories.nbytes,
                "index": self._derived.stats(),
                "notes": list(self.notes),
            }

    # In and out

    def export_jsonl(self, path: TextFile, *, boundary: Boundary | None = None) -> int:
        """Write traces, a JSON object a line, in the order they came; returns their number. `import_jsonl` reads it."""
        with text_file(path, "w") as file:
            return write_lines(file, self._all(boundary))

    def _all(self, boundary: Boundary | None) -> Iterator[Trace]:
        page = self.list(boundary=boundary, limit=1000)
        yield from page
        while page.next_cursor is not None:
            page = self.list(boundary=boundary, cursor=page.next_cursor, limit=1000)
            yield from page

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
        check_count("batch", batch)
        done = 0
        with text_file(path, "r") as file, tqdm(desc="importing", unit="trace", disable=None) as bar:
            for some in messages_of(file, getattr(file, "name", "the file"), boundary, batch):
                done += len(self.add(some, boundary=boundary, actor=actor))
                bar.update(len(some))
                if progress:
                    progress(done, None if len(some) == batch else done)
        return done

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the memory to a new folder, while it is in use; the copy opens like any other."""
        with self._operation():
            self._open_still()
            target = Path(path)
            new_folder(target)
            if self.path is not None:
                copy_keys(self.path, target)
            self._record.backup(target / RECORD)
            self._derived.copy(target / INDEX)
            if self.path is not None:
                copy_logs(self.path, target)

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

    aadd = in_thread(add)
    asearch = in_thread(search)
    asearch_batch = in_thread(search_batch)
    aanswer = in_thread(answer)  # type: ignore[arg-type]  # as with update
    aanswer_batch = in_thread(answer_batch)  # type: ignore[arg-type]
    aget = in_thread(get)
    alist = in_thread(list)
    aupdate = in_thread(update)  # type: ignore[arg-type]  # any change could be named "self"
    adelete = in_thread(delete)
    adelete_all = in_thread(delete_all)
    ahistory = in_thread(history)


def _budget(size: int | str | None) -> int | None:
    return None if size is None else bytes_of("memory_budget", size)


def _check_dim(pipeline: ZeroMemPipeline, encoder: Encoder) -> None:
    """Refuse what was learned from the vectors of an encoder that this one cannot stand in for."""
    needed = pipeline.router.encoder_dim
    if needed is not None and needed != encoder.dim:
        advice = "train with this encoder, or go back to the configuration's weights with use(None)"
        expected = f"an encoder of {needed} dimensions, as it was trained with"
        raise ZeroMemError.of("router", expected, encoder.dim, advice)
