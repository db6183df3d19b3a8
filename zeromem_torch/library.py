"""ZeroMem: what users hold. Traces go in, evidence comes out; everything between is the pipeline."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import torch
from torch import Tensor

from zeromem_torch.bank import MemoryBank, pack
from zeromem_torch.calibration.evidence import within_budget
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.pipeline import Selection, Views, ZeroMemPipeline
from zeromem_torch.retrieval.graph import RESET_REASONS
from zeromem_torch.routing.profile import QueryProfile
from zeromem_torch.routing.queries import QueryBatch, compile_queries
from zeromem_torch.routing.router import LOCAL, RELATIONAL
from zeromem_torch.substrate.encoder import Encoder, load_encoder
from zeromem_torch.substrate.entities import EntityExtractor, load_extractor
from zeromem_torch.substrate.lexicon import check_sparse_head
from zeromem_torch.substrate.memory import Memory, build_memory
from zeromem_torch.substrate.tokenizer import Analyzer
from zeromem_torch.substrate.traces import Trace, ZeroMemError, check_text, nearest
from zeromem_torch.substrate.units import voice

T = TypeVar("T")

LONGEST = 256
"""Units ranked, at least, for a token budget to cut: one that does not fit is skipped for a later one that does."""


@dataclass
class Ledger:
    """LLM calls and tokens of memory operations. Nothing here can call a language model, so nothing adds to it."""

    memory_llm_calls: int = 0
    memory_llm_tokens: int = 0


class ZeroMem:
    """Memories of many boundaries, searched together or alone; a search never sees another boundary than its own.

    Traces are kept in this process. A boundary's index is built at the first search after it changed.
    """

    def __init__(
        self,
        config: ZeroMemConfig | None = None,
        *,
        encoder: Encoder | str | None = None,  # None: the one the configuration names
        extractor: EntityExtractor | None = None,
        device: str = "cpu",
        workspace: int = 1 << 30,
    ) -> None:
        self.config = config or ZeroMemConfig()
        name = self.config.encoder.name if encoder is None else encoder
        self.encoder: Encoder = load_encoder(name, device=device) if isinstance(name, str) else name
        if self.config.substrate.lexicon == "learned":
            check_sparse_head(self.encoder)
        self._extractor = extractor
        self.pipeline = ZeroMemPipeline(self.config).to(device).eval()
        self.device = device
        self.workspace = workspace
        self.ledger = Ledger()
        self.timings: dict[str, float] = {}
        self._traces: dict[str, dict[str, Trace]] = {}  # boundary -> id -> trace
        self._boundary_of: dict[str, str] = {}
        self._memories: dict[str, Memory] = {}
        self._extractors: dict[str, EntityExtractor] = {}
        self._bank: tuple[Sequence[Memory], MemoryBank] | None = None
        self._analyse = Analyzer(self.config.substrate.stop_words, self.config.substrate.stemmer or None)

    def add(self, traces: Trace | Mapping[str, Any] | Iterable[Trace | Mapping[str, Any]]) -> list[str]:
        """Store traces; returns their ids in order. All of them or, when one cannot be used, none.

        Adding the same trace again changes nothing; another trace under a known id is an error.
        """
        given = [traces] if isinstance(traces, Trace | Mapping) else list(_listed("traces", traces))
        made = [trace if isinstance(trace, Trace) else Trace.from_dict(trace) for trace in given]
        seen: dict[str, Trace] = {}
        for trace in made:
            known = seen.get(trace.id) or self._traces.get(self._boundary_of.get(trace.id, ""), {}).get(trace.id)
            if known is not None and known != trace:
                raise ZeroMemError.of(
                    "id",
                    "a new id, or the same trace again",
                    trace.id,
                    f"it names another trace of boundary {known.boundary!r}; nothing was added, choose another id",
                )
            seen[trace.id] = trace
        for trace in made:
            if trace.id not in self._boundary_of:
                self._boundary_of[trace.id] = trace.boundary
                self._traces.setdefault(trace.boundary, {})[trace.id] = trace
                self._memories.pop(trace.boundary, None)
        return [trace.id for trace in made]

    @property
    def boundaries(self) -> tuple[str, ...]:
        return tuple(self._traces)

    def __len__(self) -> int:
        return len(self._boundary_of)

    def __repr__(self) -> str:
        return f"ZeroMem({len(self)} traces in {len(self._traces)} boundaries, encoder {self.encoder.fingerprint})"

    def search(
        self,
        query: str,
        *,
        boundary: str,
        top_k: int | None = None,
        token_budget: int | None = None,
        reference_time: datetime | None = None,
    ) -> Evidence:
        """Evidence for one query from one boundary; see `search_batch`."""
        times = None if reference_time is None else [reference_time]
        return self.search_batch(
            [query], boundaries=[boundary], top_k=top_k, token_budget=token_budget, reference_times=times
        )[0]

    def search_batch(
        self,
        queries: Sequence[str],
        *,
        boundaries: Sequence[str],
        top_k: int | None = None,
        token_budget: int | None = None,
        reference_times: Sequence[datetime | None] | None = None,
    ) -> list[Evidence]:
        """Evidence for each query from the boundary at its place, each as if it were asked alone.

        R(q) is the ``top_k`` best units and what closes them or, with ``token_budget``, as many ranked units as fit.
        Relative dates count from the reference time, or from the boundary's last event.
        """
        top_k = self.config.calibration.top_k if top_k is None else top_k
        queries, boundaries = _listed("queries", queries), _listed("boundaries", boundaries)
        self._check(queries, boundaries, top_k, token_budget)
        times = [None] * len(queries) if reference_times is None else list(_listed("reference_times", reference_times))
        if len(times) != len(queries):
            raise ZeroMemError.of("reference_times", f"{len(queries)} times or None", len(times), "give one per query")
        for reference in times:
            _check_time("reference_time", reference)
        found: dict[int, Evidence] = {}
        for group in self.batches(queries, boundaries, times):
            found.update(self._search(group, top_k, token_budget))
        return [found[number] for number in range(len(queries))]

    def _check(self, queries: Sequence[str], boundaries: Sequence[str], top_k: int, token_budget: int | None) -> None:
        if len(queries) != len(boundaries):
            raise ZeroMemError.of("boundaries", f"one per query, {len(queries)}", len(boundaries), "pair them")
        for name, value in (("top_k", top_k), ("token_budget", token_budget)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ZeroMemError.of(name, "a whole number of at least 1", value, "pass 1 or more")
        for number, query in enumerate(queries):
            check_text("query" if len(queries) == 1 else f"query {number}", "text", query)
        for boundary in boundaries:
            if not isinstance(boundary, str) or boundary not in self._traces:
                hint = nearest(str(boundary), self._traces) or ("" if self._traces else "the memory is empty; ")
                raise ZeroMemError.of("boundary", "one that has traces", boundary, f"{hint}add traces to it first")

    def _groups(self, boundaries: Sequence[str]) -> Iterator[list[int]]:
        """Query numbers that are searched together: at most as many as the workspace holds."""
        waiting: dict[str, list[int]] = {}
        for number, boundary in enumerate(boundaries):
            waiting.setdefault(boundary, []).append(number)
        while waiting:
            group: list[int] = []
            units = slots = 0
            for boundary in list(waiting):
                size = units + len(self._traces[boundary])
                room = max(1, self.workspace // (BYTES_PER_SCORE * size))
                take = min(len(waiting[boundary]), room if not slots else max(slots, 1), room)
                if group and (room < slots or max(slots, take) * size * BYTES_PER_SCORE > self.workspace):
                    continue
                group += waiting[boundary][:take]
                waiting[boundary] = waiting[boundary][take:]
                if not waiting[boundary]:
                    del waiting[boundary]
                units, slots = size, max(slots, take)
            yield sorted(group)

    def _memory(self, boundary: str) -> Memory:
        if boundary not in self._memories:
            traces = list(self._traces[boundary].values())
            with self._timed("build"):
                self._memories[boundary] = build_memory(
                    boundary, traces, self.encoder, self._extractor_of(traces), self.config.substrate
                )
        return self._memories[boundary]

    def _extractor_of(self, traces: Sequence[Trace]) -> EntityExtractor:
        """What finds the entities of these traces: names carry the graph of documents, nouns that of dialogues."""
        if self._extractor is not None:
            return self._extractor
        kind = self.config.substrate.entities
        if kind == "auto":
            kind = "spacy" if any(voice(trace) for trace in traces) else "rules"
        if kind not in self._extractors:
            self._extractors[kind] = load_extractor(kind)
        return self._extractors[kind]

    @property
    def extractors(self) -> tuple[str, ...]:
        """Fingerprints of the extractors in use."""
        used = [self._extractor] if self._extractor else list(self._extractors.values())
        return tuple(extractor.fingerprint for extractor in used)

    def _bank_of(self, memories: Sequence[Memory]) -> MemoryBank:
        """The memories end to end on the device; the last one asked for is kept."""
        if self._bank is None or not _same(self._bank[0], memories):
            with self._timed("pack"):
                bank = pack([m.index for m in memories], [m.sizes for m in memories], self.device)
            self._bank = (memories, bank)
        return self._bank[1]

    def batches(
        self, queries: Sequence[str], boundaries: Sequence[str], times: Sequence[datetime | None]
    ) -> Iterator["Batch"]:
        """Profiled queries in groups that fit the workspace, each with the memories it asks, on the device."""
        for numbers in self._groups(boundaries):
            names = list(dict.fromkeys(boundaries[i] for i in numbers))
            memories = [self._memory(name) for name in names]
            bank = self._bank_of(memories)
            place = {name: m for m, name in enumerate(names)}
            with self._timed("profile and encode"):
                batch, profiles = compile_queries(
                    [queries[i] for i in numbers],
                    [place[boundaries[i]] for i in numbers],
                    memories,
                    bank,
                    self.encoder,
                    self._analyse,
                    [times[i] for i in numbers],
                    self.config.graph.name,
                )
            yield Batch(numbers, memories, bank, batch, profiles)

    @torch.no_grad()  # not inference mode: the bank keeps tensors made here, and training may use them
    def _search(self, group: "Batch", top_k: int, token_budget: int | None) -> Iterator[tuple[int, Evidence]]:
        with self._timed("search both views"):
            views = self.pipeline.views(group.batch, group.bank)
        with self._timed("fuse, close, calibrate"):
            held = group.bank.axes["units"].padded.shape[1]  # asking for more would only pad
            longest = None if token_budget is None else min(held, max(LONGEST, token_budget))
            chosen = self.pipeline.select(views, group.bank, min(top_k, held), longest)
            result = chosen.result
            if token_budget is not None:
                result = within_budget(result, group.bank.unit_tokens, min(token_budget, 1 << 62))
        with self._timed("collect"):
            writer = _Writer(group, views, chosen)
            for slot, m in group.batch.filled.nonzero().tolist():
                number = int(group.batch.query[slot, m])
                yield group.numbers[number], writer.evidence(slot, m, group.profiles[number], result[slot, m])

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - start


def _listed(name: str, values: Iterable[T]) -> Sequence[T]:
    given: object = values
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ZeroMemError.of(name, "a list", given, "pass a list, even of one")
    return values if isinstance(values, Sequence) else list(values)


def _check_time(name: str, time: object) -> None:
    if time is not None and not isinstance(time, datetime):
        raise ZeroMemError.of(name, "a datetime or None", time, "read it with parse_time(...)")


def _same(left: Sequence[Memory], right: Sequence[Memory]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


BYTES_PER_SCORE = 4 * 64
"""Bytes a (slot, unit) pair may take while a batch is searched: about forty signals and the walk's nodes."""


@dataclass(frozen=True)
class Batch:
    """Queries that are searched together."""

    numbers: Sequence[int]  # places of the queries in the caller's list
    memories: Sequence[Memory]
    bank: MemoryBank
    batch: QueryBatch
    profiles: Sequence[QueryProfile]


class _Writer:
    """Turns ranked rows into evidence that names its traces."""

    def __init__(self, group: Batch, views: Views, chosen: Selection) -> None:
        self.memories, self.bank, self.batch = group.memories, group.bank, group.batch
        self.views, self.chosen = views, chosen
        self.tokens = group.bank.unit_tokens.tolist()

    def evidence(self, slot: int, m: int, profile: QueryProfile, result: Tensor) -> Evidence:
        weight = float(self.views.graph_weight[slot, m])
        relational = bool(self.batch.relational[slot, m] > self.batch.local[slot, m])
        main = [row for row in self.chosen.main[slot, m].tolist() if row >= 0]

        def items(rows: Tensor) -> list[EvidenceItem]:
            return [self._item(slot, m, row, main) for row in rows.tolist() if row >= 0]

        return Evidence(
            query=profile.text,
            boundary=self.memories[m].boundary,
            route=RELATIONAL if relational else LOCAL,
            rho=round(weight if relational else 1 - weight, 6),
            reasons=(
                f"form: {profile.relational:g} for hops, {profile.local:g} for one place",
                f"walk from {RESET_REASONS[int(self.views.reset_reason[slot, m])]}",
            ),
            main=items(self.chosen.main[slot, m]),
            closed=items(self.chosen.closed[slot, m]),
            items=items(result),
        )

    def _item(self, slot: int, m: int, row: int, main: Sequence[int]) -> EvidenceItem:
        memory = self.memories[m]
        unit = row - self.bank.axes["units"].ptr[m]
        trace = memory.turns.traces[unit]
        start, end = memory.best_span(unit, self.batch.vectors[slot, m])
        reason, source = self._reason(slot, row, main)
        score, parts = float(self.chosen.ranked[slot, row]), self._parts(slot, row)
        return EvidenceItem(
            trace_id=trace.id,
            start=start,
            end=end,
            text=trace.text[start:end],
            score=score,
            views={
                "graph": float(self.views.graph[slot, row]),
                "hierarchy": float(self.views.hierarchy[slot, row]),
            },
            parts={**parts, "profile": score - sum(parts.values())},
            reason=reason,
            source=None if source is None else memory.turns.traces[source - self.bank.axes["units"].ptr[m]].id,
            title=trace.title,
            speaker=trace.speaker,
            time=trace.time,
            session=trace.session,
            tokens=self.tokens[row],
        )

    def _parts(self, slot: int, row: int) -> dict[str, float]:
        support = self.chosen.support
        scores = {"fused": self.chosen.fused, "neighbour": support.neighbour, "graph support": support.graph}
        return {name: float(values[slot, row]) for name, values in scores.items()}

    def _reason(self, slot: int, row: int, main: Sequence[int]) -> tuple[str, int | None]:
        if row in main:
            return "main", None
        near, far = float(self.chosen.support.neighbour[slot, row]), float(self.chosen.support.graph[slot, row])
        beside = [unit for unit in (row - 1, row + 1) if unit in main and self._leaning(min(row, unit))]
        if near > 0 and beside and near >= far:
            return "neighbour", max(beside, key=lambda unit: float(self.chosen.fused[slot, unit]))
        if far > 0:
            return "graph support", self._graph_source(slot, row, main)
        return "ranked", None

    def _leaning(self, row: int) -> bool:
        """Whether a unit and the next one belong together, as closure sees it."""
        bank = self.bank
        same = bool(bank.unit_session[row] == bank.unit_session[row + 1]) and int(bank.unit_position[row + 1]) >= 0
        return same and bool(bank.unit_asks[row] | bank.unit_leans[row + 1])

    def _graph_source(self, slot: int, row: int, main: Sequence[int]) -> int | None:
        """The main unit that shares most with this one in the graph."""
        node = int(self.bank.unit_node[row])
        entities = set(self._neighbours(node))
        shared = {unit: len(entities & set(self._neighbours(int(self.bank.unit_node[unit])))) for unit in main}
        best = max(shared, key=lambda unit: (shared[unit], float(self.chosen.fused[slot, unit])), default=None)
        return best if best is not None and shared[best] else None

    def _neighbours(self, node: int) -> list[int]:
        graph = self.bank.adjacency
        neighbours: list[int] = graph.col[int(graph.crow[node]) : int(graph.crow[node + 1])].tolist()
        return neighbours
