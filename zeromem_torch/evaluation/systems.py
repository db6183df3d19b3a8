"""Systems that find evidence, all behind one interface, so that reader, prompt and answer calibration are the same.

zeromem and its ablations; plain rankings (`baselines`); graph retrieval in other papers' style (`graph_baselines`);
RAG over chunks; LONG-LLM, which reads everything window by window; and adapters to systems that a user has installed.
A name may carry a cap, "zeromem@10": how many items are handed to the reader.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from zeromem_torch.bank import segment_topk
from zeromem_torch.collect import Batch, EvidenceWriter
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.evaluation.adapters import ADAPTERS, Adapter
from zeromem_torch.evaluation.baselines import BASELINES, PlainRetrieval
from zeromem_torch.evaluation.datasets import Question
from zeromem_torch.evaluation.graph_baselines import GRAPH_BASELINES
from zeromem_torch.evaluation.run import VARIANTS
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.ledger import MeteredEncoder
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import Selection, Views
from zeromem_torch.routing.profile import profile_query
from zeromem_torch.searcher import LONGEST
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.entities import EntityExtractor, load_extractor
from zeromem_torch.substrate.traces import Trace, ZeroMemError, nearest
from zeromem_torch.substrate.units import chunk_spans, order_turns, turn_prefix, voice

MAIN = "zeromem"
RAW = "no_answer_calibration"
"""zeromem with the reader's answers as they came: scored again from its lines, nothing is asked for it."""
CHUNKED = ("rag", "long_llm")
SYSTEMS = (*VARIANTS, RAW, *BASELINES, *CHUNKED, *GRAPH_BASELINES, *ADAPTERS)
ABLATIONS = (*VARIANTS, RAW)
DEPTHS = range(1, 21)
RAG_CHUNK = 2048
OVERLAP = 0.25
"""Share of a LONG-LLM window that the next one repeats, so that what a cut parts stands together in one of them."""
TAG = 48
"""Tokens left for what a prompt puts around an item."""
VIEW_DEPTH, EXCERPT = 5, 120


@dataclass(frozen=True, slots=True)
class Piece:
    """A ranked text as a reader sees it, and what it costs in the encoder's tokens."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Found:
    """What a system found for one question."""

    evidence: Evidence  # what the reader is handed: at most as many items as the cap says
    ranked: Sequence[Piece] = ()  # best first, for a budget of tokens to cut
    tops: Sequence[Sequence[Piece]] = ()  # what would be handed over with each cap of DEPTHS
    rankings: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # best of each view
    windows: Sequence[Evidence] = ()  # LONG-LLM: the reader is asked once for each


@dataclass
class Cost:
    """Seconds and encoder tokens, of building a memory and of searching it."""

    build_seconds: float = 0.0
    build_tokens: int = 0
    search_seconds: float = 0.0
    search_tokens: int = 0


def parse_system(name: str, top_k: int) -> tuple[str, int]:
    """A system and its cap: "bm25@1" -> ("bm25", 1)."""
    base, at, cap = name.partition("@")
    if base not in SYSTEMS or (base == RAW and at):
        known = ", ".join(SYSTEMS)
        raise ZeroMemError.of("systems", f"some of {known}", name, f"{nearest(base, SYSTEMS)}choose among these")
    if not at:
        return base, top_k
    if not cap.isascii() or not cap.isdigit() or not 1 <= int(cap) <= LONGEST:
        raise ZeroMemError.of("systems", f"a cap from 1 to {LONGEST} behind '@'", name, "write it as in zeromem@10")
    return base, int(cap)


def shown(item: EvidenceItem) -> str:
    """An item with its date and who said it, as a reader sees it."""
    date = f"[{item.time.day} {item.time:%B %Y}] " if item.time else ""
    said = f"{item.speaker}: " if item.speaker else ""
    return f"{date}{said}{f'{item.title}. ' if item.title else ''}{item.text}"


class Ground:
    """The traces of some boundaries, and what systems make of them: made once, and charged to each that needs it.

    ``room``: tokens of evidence that the reader can take, counted by ``count``.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        encoder: Encoder,
        config: ZeroMemConfig,
        count: Callable[[Sequence[str]], list[int]],
        room: int,
        device: str = "cpu",
    ) -> None:
        self.traces, self.config, self.count, self.room, self.device = traces, config, count, room, device
        self.encoder = MeteredEncoder(encoder)
        self._adapters: dict[tuple[str, str], tuple[Adapter, float]] = {}
        self._built = 0.0  # seconds that adapters took to remember

    def find(self, system: str, cap: int, questions: Sequence[Question]) -> tuple[list[Found], Cost]:
        """What a system hands over for each question, and what building and searching its memory cost."""
        if system in VARIANTS:
            return self._zeromem(questions, cap, **VARIANTS[system])
        cost = Cost()
        found: dict[str, Found] = {}
        for boundary in dict.fromkeys(question.boundary for question in questions):
            asked = [question for question in questions if question.boundary == boundary]
            with self._charged(cost):
                if system in CHUNKED:
                    some = self._chunked(system, cap, boundary, asked)
                elif system in ADAPTERS:
                    some = self._adapted(system, cap, boundary, asked, cost)
                else:
                    some = self._ranked(system, cap, boundary, asked)
            found |= {question.id: one for question, one in zip(asked, some, strict=True)}
        return [found[question.id] for question in questions], cost

    @contextmanager
    def _charged(self, cost: Cost) -> Iterator[None]:
        """All that is done meanwhile is the search's, apart from what was built."""
        start, tokens, built = time.perf_counter(), self.encoder.tokens, self._built
        yield
        cost.search_seconds += time.perf_counter() - start - (self._built - built)
        cost.search_tokens += self.encoder.tokens - tokens

    # zeromem

    @cached_property
    def _memory(self) -> tuple[ZeroMem, int]:
        before = self.encoder.tokens
        memory = ZeroMem(self.config, encoder=self.encoder, device=self.device)
        memory.add(self.traces)
        return memory, self.encoder.tokens - before

    def _zeromem(
        self, questions: Sequence[Question], cap: int, graph_weight: float | None = None, **stages: bool
    ) -> tuple[list[Found], Cost]:
        memory, build_tokens = self._memory
        found: dict[int, Found] = {}
        cost = Cost(build_tokens=build_tokens)
        before = dict(memory.timings)
        tokens, start, aside = self.encoder.tokens, time.perf_counter(), 0.0
        asked = [q.text for q in questions], [q.boundary for q in questions], [q.time for q in questions]
        with torch.no_grad():
            for group in memory.batches(*asked):
                views = memory.pipeline.views(group.batch, group.bank)
                if graph_weight is not None:
                    weight = torch.full_like(views.graph_weight, graph_weight)
                    views = dataclasses.replace(views, graph_weight=weight)
                chosen = memory.pipeline.select(views, group.bank, cap, **stages)
                handed = dict(_evidence_of(memory, group, views, chosen, cap))
                measuring = time.perf_counter()
                for slot, m, number, rest in _rankings(memory, group, views, cap, stages):
                    found[number] = Found(handed[slot, m], **rest)
                aside += time.perf_counter() - measuring
        built = sum(memory.timings.get(stage, 0.0) - before.get(stage, 0.0) for stage in ("build", "pack"))
        cost.build_seconds = sum(memory.timings.get(stage, 0.0) for stage in ("build", "pack"))
        cost.search_seconds = time.perf_counter() - start - aside - built
        cost.search_tokens = self.encoder.tokens - tokens
        empty = [Found(Evidence.nothing(q.text, q.boundary, "nothing is there")) for q in questions]
        return [found.get(number, empty[number]) for number in range(len(questions))], cost

    # Rankings of units

    def _of(self, boundary: str) -> list[Trace]:
        return [trace for trace in self.traces if trace.boundary == boundary]

    def _ranked(self, system: str, cap: int, boundary: str, asked: Sequence[Question]) -> list[Found]:
        plain = PlainRetrieval(self._of(boundary), [question.text for question in asked], self.encoder)
        if system in GRAPH_BASELINES:
            scores = GRAPH_BASELINES[system](plain, self._extractor(plain.turns.traces))
        else:
            scores = plain.scores(system)
        pieces = [Piece(text, tokens) for text, tokens in zip(plain.dated, plain.tokens, strict=True)]
        best = segment_topk(scores, plain.axis, LONGEST)[:, 0].tolist()
        found = []
        for slot, question in enumerate(asked):
            rows = [row for row in best[slot] if row >= 0]
            items = [_item(plain.turns.traces[row], pieces[row].tokens, float(scores[slot, row])) for row in rows[:cap]]
            ranked = [pieces[row] for row in rows]
            evidence = _evidence(question, plain.turns.traces, items, system)
            found.append(Found(evidence, ranked, [ranked[:k] for k in DEPTHS]))
        return found

    def _extractor(self, traces: Sequence[Trace]) -> EntityExtractor:
        """What finds zeromem's entities in these traces."""
        kind = self.config.substrate.entities
        if kind == "auto":
            kind = "spacy" if any(voice(trace) for trace in traces) else "rules"
        if kind not in _EXTRACTORS:
            _EXTRACTORS[kind] = load_extractor(kind)
        return _EXTRACTORS[kind]

    # Chunks

    @property
    def chunk(self) -> int:
        """Tokens of a RAG chunk: five of them, and the prompt, have to fit the reader."""
        return min(RAG_CHUNK, max(TAG, self.room // 5 - TAG))

    @property
    def window(self) -> int:
        return max(TAG, self.room - TAG)

    def _chunked(self, system: str, cap: int, boundary: str, asked: Sequence[Question]) -> list[Found]:
        turns = order_turns(self._of(boundary)).traces
        most, overlap = (self.chunk, 0) if system == "rag" else (self.window, int(OVERLAP * self.window))
        heads = [f"Document {n}:\n{t.title}\n" if t.title else turn_prefix(t) for n, t in enumerate(turns, start=1)]
        whole = [head + trace.text for head, trace in zip(heads, turns, strict=True)]
        sizes = self.count(whole)
        parts = [_fitting(text, size, self.count, most) for text, size in zip(whole, sizes, strict=True)]
        lines = [line for own in parts for line, _ in own]
        origin = [trace for trace, own in zip(turns, parts, strict=True) for _ in own]
        spans = list(_spans([size for own in parts for _, size in own], most, overlap))
        texts = ["\n".join(lines[first:last]) for first, last in spans]
        tokens = [len(tokens) for tokens in self.encoder.token_spans(texts)]
        items = [
            _chunk(origin[first:last], text, size)
            for (first, last), text, size in zip(spans, texts, tokens, strict=True)
        ]
        if system == "long_llm":
            read = [[_evidence(question, turns, [item], system) for item in items] for question in asked]
            return [Found(windows[0], windows=windows) for windows in read]
        scores = self.encoder.encode([q.text for q in asked]).vectors.float() @ self._long_vectors(texts).T
        found = []
        for question, row in zip(asked, scores, strict=True):
            order = row.sort(descending=True, stable=True).indices.tolist()
            best = [dataclasses.replace(items[place], score=float(row[place])) for place in order]
            ranked = [Piece(item.text, item.tokens) for item in best]
            evidence = _evidence(question, turns, best[:cap], system)
            found.append(Found(evidence, ranked, [ranked[:k] for k in DEPTHS]))
        return found

    def _long_vectors(self, texts: Sequence[str]) -> Tensor:
        """A vector a text; a text longer than the encoder reads is the mean of its parts."""
        spans = self.encoder.token_spans(texts)
        cuts = [chunk_spans(text, own, self.encoder.max_tokens) for text, own in zip(texts, spans, strict=True)]
        parts = [text[start:end] for text, own in zip(texts, cuts, strict=True) for start, end in own]
        owner = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor([len(own) for own in cuts]))
        vectors = self.encoder.encode(parts).vectors.float()
        return normalize(torch.zeros(len(texts), vectors.shape[1]).index_add_(0, owner, vectors), dim=-1)

    # Systems of others

    def _adapted(
        self, system: str, cap: int, boundary: str, asked: Sequence[Question], cost: Cost
    ) -> list[Found]:
        traces = order_turns(self._of(boundary)).traces
        start = time.perf_counter()
        if (system, boundary) not in self._adapters:
            made = ADAPTERS[system]()
            made.build(traces)
            self._adapters[system, boundary] = made, time.perf_counter() - start
            self._built += self._adapters[system, boundary][1]
        adapter, seconds = self._adapters[system, boundary]
        cost.build_seconds += seconds
        found = []
        for question in asked:
            texts = adapter.search(question.text, max(cap, max(DEPTHS)))
            tokens = [len(spans) for spans in self.encoder.token_spans(texts)]
            ranked = [Piece(text, size) for text, size in zip(texts, tokens, strict=True)]
            items = [
                EvidenceItem(f"{system}/{rank}", 0, len(text), text, 1 / rank, {}, {}, "ranked", tokens=size)
                for rank, (text, size) in enumerate(zip(texts[:cap], tokens, strict=False), start=1)
            ]
            found.append(Found(_evidence(question, traces, items, system), ranked, [ranked[:k] for k in DEPTHS]))
        return found


_EXTRACTORS: dict[str, EntityExtractor] = {}


def _evidence_of(
    memory: ZeroMem, group: Batch, views: Views, chosen: Selection, cap: int
) -> Iterator[tuple[tuple[int, int], Evidence]]:
    fusion = memory.config.fusion
    chosen = dataclasses.replace(chosen, result=chosen.result[..., :cap])
    writer = EvidenceWriter(group, views, chosen, (fusion.graph_contrast, fusion.hierarchy_contrast))
    for slot, m in group.batch.filled.nonzero().tolist():
        profile = group.profiles[int(group.batch.query[slot, m])]
        yield (slot, m), writer.evidence(slot, m, profile)


def _rankings(
    memory: ZeroMem, group: Batch, views: Views, cap: int, stages: Mapping[str, bool]
) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """For measures only: what a token budget and other caps would hand over, and the best of each view."""
    bank, select = group.bank, memory.pipeline.select
    longest = select(views, bank, cap, LONGEST, **stages).result.tolist()
    tops = [select(views, bank, k, **stages).result[:, :, :k].tolist() for k in DEPTHS]
    traces = [trace for one in group.memories for trace in one.turns.traces]
    tokens = bank.unit_tokens.tolist()
    scores = {"graph": views.graph, "hierarchy": views.hierarchy, "fused": select(views, bank, cap, **stages).fused}
    best = {name: segment_topk(values, bank.axes["units"], VIEW_DEPTH) for name, values in scores.items()}

    def pieces(rows: Sequence[int]) -> list[Piece]:
        return [Piece(turn_prefix(traces[row]) + traces[row].text, tokens[row]) for row in rows if row >= 0]

    def ranking(name: str, slot: int, m: int) -> list[dict[str, Any]]:
        rows = [row for row in best[name][slot, m].tolist() if row >= 0]
        return [
            {"trace_id": traces[row].id, "score": float(scores[name][slot, row]), "text": traces[row].text[:EXCERPT]}
            for row in rows
        ]

    for slot, m in group.batch.filled.nonzero().tolist():
        yield slot, m, group.numbers[int(group.batch.query[slot, m])], {
            "ranked": pieces(longest[slot][m]),
            "tops": [pieces(rows[slot][m]) for rows in tops],
            "rankings": {name: ranking(name, slot, m) for name in scores},
        }


def _item(trace: Trace, tokens: int, score: float) -> EvidenceItem:
    return EvidenceItem(
        trace.id, 0, len(trace.text), trace.text, score, {}, {}, "ranked",
        title=trace.title, speaker=trace.speaker, time=trace.time, session=trace.session,
        tokens=tokens, boundary=trace.boundary,
    )  # fmt: skip


def _chunk(traces: Sequence[Trace], text: str, tokens: int) -> EvidenceItem:
    """Several traces as one item. Its lines carry their own dates; a day of its own it has only if they share it."""
    first, last = traces[0], traces[-1]
    same = {trace.time.date() if trace.time else None for trace in traces}
    name = first.id if first.id == last.id else f"{first.id}..{last.id}"
    return EvidenceItem(
        name, 0, len(text), text, 0.0, {}, {}, "ranked",
        time=first.time if len(same) == 1 else None, tokens=tokens, boundary=first.boundary,
    )  # fmt: skip


def _evidence(question: Question, traces: Sequence[Trace], items: Sequence[EvidenceItem], system: str) -> Evidence:
    """A ranking as evidence; what the question asks for is read by the same rules as zeromem's."""
    speakers = list(dict.fromkeys(trace.speaker for trace in traces if trace.speaker))
    profile = profile_query(question.text, reference=question.time, speakers=speakers)
    types = tuple(str(kind.name).lower() for kind in profile.answer_types)
    return Evidence(
        question.text, question.boundary, "none", 0.0, (f"ranked by {system}",), items, items, items,
        answer_types=types, subjects=profile.subjects,
    )  # fmt: skip


def _fitting(
    text: str, size: int, count: Callable[[Sequence[str]], list[int]], most: int
) -> list[tuple[str, int]]:
    """The text with its size or, where it is more than ``most``, cut in halves at a blank until each part fits."""
    if size <= most or len(text) < 2:
        return [(text, size)]
    middle = text.rfind(" ", 1, len(text) // 2 + 1) + 1 or len(text) // 2
    halves = [text[:middle], text[middle:]]
    return [part for half, own in zip(halves, count(halves), strict=True) for part in _fitting(half, own, count, most)]


def _spans(counts: Sequence[int], most: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Runs of lines of at most ``most`` tokens in all, each repeating at most ``overlap`` tokens of the one before."""
    first = 0
    while first < len(counts):
        last, held = first + 1, counts[first]
        while last < len(counts) and held + counts[last] <= most:
            held += counts[last]
            last += 1
        yield first, last
        if last == len(counts):
            return
        begin, again = last, 0
        while begin - 1 > first and again + counts[begin - 1] <= overlap:
            begin -= 1
            again += counts[begin]
        first = begin
