"""Many queries over many scopes in few launches: grouped to fit the workspace, each answered as if asked alone."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

import torch

from zeromem_torch.bank import MemoryBank, pack
from zeromem_torch.calibration.evidence import within_budget
from zeromem_torch.collect import Batch, EvidenceWriter
from zeromem_torch.evidence import Evidence
from zeromem_torch.memories import Memories
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.residents import Residents
from zeromem_torch.routing.queries import compile_queries
from zeromem_torch.scope import Scope, SearchRequest
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.memory import Memory
from zeromem_torch.substrate.tokenizer import Analyzer

LONGEST = 256
"""Units ranked, at least, for a token budget to cut: one that does not fit is skipped for a later one that does."""
BYTES_PER_SCORE = 4 * 64
"""Bytes a (slot, unit) pair may take while a batch is searched: about forty signals and the walk's nodes."""
BANKS = 4
"""Groups of memories that are kept packed, if they take no more of the workspace than one of as many parts."""


class Searcher:
    """Searches live memories. ``sizes`` says how many traces each boundary has; ``encoder`` gives the encoder."""

    def __init__(
        self,
        pipeline: ZeroMemPipeline,
        memories: Memories,
        encoder: Callable[[], Encoder],
        sizes: Mapping[str, int],
        device: str,
        workspace: int,
    ) -> None:
        config = self.config = pipeline.config
        self.memories, self.encoder, self.sizes = memories, encoder, sizes
        self.device, self.workspace = device, workspace
        self.pipeline = pipeline.to(device).eval()
        self.timings: dict[str, float] = {}
        self._banks: OrderedDict[tuple[int, ...], tuple[Sequence[Memory], MemoryBank]] = OrderedDict()
        here = torch.device(device).type == "cpu"
        self._residents = None if here else Residents(device, memories.budget)
        self._analyse = Analyzer(config.substrate.stop_words, config.substrate.stemmer or None)

    def follow(self, pipeline: ZeroMemPipeline) -> None:
        """Search by this pipeline from now on."""
        self.config, self.pipeline = pipeline.config, pipeline.to(self.device).eval()

    def release(self) -> None:
        """Drop the tensors on the device."""
        self._banks.clear()
        if self._residents is not None:
            self._residents.release()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the tensors on the device."""
        bank = sum(bank.index.nbytes for _, bank in self._banks.values())
        return {"bank": bank, "resident": 0 if self._residents is None else self._residents.nbytes}

    def _kept_bytes(self) -> int:
        """Bytes that would be free without the packed memories, if nobody else held them."""
        states = (tensor for _, bank in self._banks.values() for tensor in bank.own_states)
        return self.held_bytes()["bank"] + sum(tensor.nbytes for tensor in states)

    def search(
        self,
        queries: Sequence[str],
        scopes: Sequence[Scope],
        times: Sequence[datetime | None],
        top_k: int,
        token_budget: int | None = None,
        *,
        explain: bool = False,
    ) -> dict[int, Evidence]:
        """Evidence by the number of its query; a query whose scope holds nothing has none."""
        found: dict[int, Evidence] = {}
        for group in self.batches(queries, scopes, times):
            found.update(self._search(group, top_k, token_budget, explain))
        return found

    def evidence(self, requests: Sequence[SearchRequest], scopes: Sequence[Scope], *, behind: bool) -> list[Evidence]:
        """Evidence for each request; those that rank alike are searched together.

        ``behind``: some of what is stored has no row yet.
        """
        alike: dict[tuple[int | None, int | None, bool], list[int]] = {}
        for number, asked in enumerate(requests):
            alike.setdefault((asked.top_k, asked.token_budget, asked.explain), []).append(number)
        found: dict[int, Evidence] = {}
        for (top_k, token_budget, explain), numbers in alike.items():
            own = self.search(
                [requests[i].query for i in numbers],
                [scopes[i] for i in numbers],
                [requests[i].reference_time or scopes[i].as_of for i in numbers],
                self.config.calibration.top_k if top_k is None else top_k,
                token_budget,
                explain=explain,
            )
            found.update((numbers[place], evidence) for place, evidence in own.items())
        answers = []
        for number, (asked, scope) in enumerate(zip(requests, scopes, strict=True)):
            if (evidence := found.get(number)) is None:
                evidence = Evidence.nothing(asked.query, asked.place, self._why_nothing(scope, behind))
            answers.append(evidence if asked.min_score is None else evidence.at_least(asked.min_score))
        return answers

    def _why_nothing(self, scope: Scope, behind: bool) -> str:
        if not any(name in self.sizes for name in scope.boundaries):
            return "nothing is there"
        if behind:
            return "nothing that is indexed yet passes the filters and holds at this time"
        return "nothing there passes the filters and holds at this time"

    def batches(
        self, queries: Sequence[str], scopes: Sequence[Scope], times: Sequence[datetime | None]
    ) -> Iterator[Batch]:
        """Profiled queries in groups that fit the workspace, each with the memories it asks, on the device."""
        for numbers in self._groups(scopes):
            with self.timed("build"):
                found = {scope: self.memories.of(scope) for scope in dict.fromkeys(scopes[i] for i in numbers)}
            # in one order, whoever asks first: then memories that are asked together again are packed already
            held = ((scope, memory) for scope, memory in found.items() if memory is not None)
            memories = dict(sorted(held, key=lambda own: own[1].boundary))
            numbers = [i for i in numbers if scopes[i] in memories]
            if not numbers:
                continue
            bank = self._bank_of(list(memories.values()))
            place = {scope: m for m, scope in enumerate(memories)}
            with self.timed("profile and encode"):
                batch, profiles = compile_queries(
                    [queries[i] for i in numbers],
                    [place[scopes[i]] for i in numbers],
                    list(memories.values()),
                    bank,
                    self.encoder(),
                    self._analyse,
                    [times[i] for i in numbers],
                    self.config.graph.name,
                )
            yield Batch(numbers, list(memories.values()), bank, batch, profiles)

    def _groups(self, scopes: Sequence[Scope]) -> Iterator[list[int]]:
        """Query numbers that are searched together: at most as many as the workspace holds."""
        waiting: dict[Scope, list[int]] = {}
        for number, scope in enumerate(scopes):
            waiting.setdefault(scope, []).append(number)
        while waiting:
            group: list[int] = []
            units = slots = 0
            for scope in list(waiting):
                size = units + max(1, sum(self.sizes.get(name, 0) for name in scope.boundaries))
                room = max(1, self.workspace // (BYTES_PER_SCORE * size))
                take = min(len(waiting[scope]), room if not slots else max(slots, 1), room)
                if group and (room < slots or max(slots, take) * size * BYTES_PER_SCORE > self.workspace):
                    continue
                group += waiting[scope][:take]
                waiting[scope] = waiting[scope][take:]
                if not waiting[scope]:
                    del waiting[scope]
                units, slots = size, max(slots, take)
            yield sorted(group)

    def _bank_of(self, memories: Sequence[Memory]) -> MemoryBank:
        """The memories end to end on the device; those asked for last are kept."""
        key = tuple(map(id, memories))  # of memories that are kept with their bank
        if key not in self._banks:
            with self.timed("pack"):
                indexes = [m.index for m in memories] if self._residents is None else self._residents.of(memories)
                self._banks[key] = (memories, pack(indexes, [m.sizes for m in memories], self.device))
            while len(self._banks) > 1 and (len(self._banks) > BANKS or self._kept_bytes() > self.workspace // BANKS):
                self._banks.popitem(last=False)
        self._banks.move_to_end(key)
        return self._banks[key][1]

    @torch.no_grad()  # not inference mode: the bank keeps tensors made here, and training may use them
    def _search(
        self, group: Batch, top_k: int, token_budget: int | None, explain: bool
    ) -> Iterator[tuple[int, Evidence]]:
        with self.timed("search both views"):
            views = self.pipeline.views(group.batch, group.bank)
        with self.timed("fuse, close, calibrate"):
            held = group.bank.axes["units"].padded.shape[1]  # asking for more would only pad
            longest = None if token_budget is None else min(held, max(LONGEST, token_budget))
            chosen = self.pipeline.select(views, group.bank, min(top_k, held), longest)
            if token_budget is not None:
                fitting = within_budget(chosen.result, group.bank.unit_tokens, min(token_budget, 1 << 62))
                chosen = replace(chosen, result=fitting)
        with self.timed("collect"):
            fusion = self.config.fusion
            contrasts = (fusion.graph_contrast, fusion.hierarchy_contrast)
            writer = EvidenceWriter(group, views, chosen, contrasts, explain=explain)
            for slot, m in group.batch.filled.nonzero().tolist():
                number = int(group.batch.query[slot, m])
                yield group.numbers[number], writer.evidence(slot, m, group.profiles[number])

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - start
