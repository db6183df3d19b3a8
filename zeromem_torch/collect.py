"""Ranked rows -> evidence that names its traces, and says why each is there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeromem_torch.bank import SCORE_STEP, MemoryBank
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.pipeline import Selection, Views
from zeromem_torch.retrieval.graph import RESET_REASONS
from zeromem_torch.routing.profile import QueryProfile
from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.routing.router import LOCAL, RELATIONAL
from zeromem_torch.substrate.memory import Memory


@dataclass(frozen=True)
class Batch:
    """Queries that are searched together."""

    numbers: Sequence[int]  # places of the queries in the caller's list
    memories: Sequence[Memory]
    bank: MemoryBank
    batch: QueryBatch
    profiles: Sequence[QueryProfile]


class EvidenceWriter:
    """Turns ranked rows into evidence; with ``explain``, each piece with what its score is made of.

    Whatever is said of a ranked unit is gathered for all of them at once: a device is asked a few times, not for every
    number.
    """

    def __init__(
        self, group: Batch, views: Views, chosen: Selection, contrasts: tuple[float, float], *, explain: bool = False
    ) -> None:
        self.contrasts, self.explain = contrasts, explain
        self.memories, self.bank, self.batch = group.memories, group.bank, group.batch
        self.views, self.chosen = views, chosen
        self._lists = {name: getattr(chosen, name).cpu().numpy() for name in ("main", "closed", "result")}
        self._said = self._gathered()
        self._weight, self._reset = views.graph_weight.cpu().numpy(), views.reset_reason.cpu().numpy()
        self._relational = (self.batch.relational > self.batch.local).cpu().numpy()

    def evidence(self, slot: int, m: int, profile: QueryProfile) -> Evidence:
        weight, relational = float(self._weight[slot, m]), bool(self._relational[slot, m])
        ranked = {name: [row for row in rows[slot, m].tolist() if row >= 0] for name, rows in self._lists.items()}
        query = _Query(slot, m, ranked["main"])
        made: dict[int, EvidenceItem] = {}

        def items(name: str) -> list[EvidenceItem]:
            for row in ranked[name]:
                if row not in made:
                    made[row] = self._item(query, row)
            return [made[row] for row in ranked[name]]

        return Evidence(
            query=profile.text,
            boundary=self.memories[m].boundary,
            route=RELATIONAL if relational else LOCAL,
            rho=round(weight if relational else 1 - weight, 6),
            reasons=(
                f"form: {profile.relational:g} for hops, {profile.local:g} for one place",
                f"walk from {RESET_REASONS[int(self._reset[slot, m])]}",
            ),
            main=items("main"),
            closed=items("closed"),
            items=items("result"),
            answer_types=tuple(str(kind.name).lower() for kind in profile.answer_types),
            subjects=profile.subjects,
        )

    def _gathered(self) -> dict[tuple[int, int], tuple[float, ...]]:
        """Of each slot and ranked row: final, graph, hierarchy, cosine, fused and both supports."""
        pairs = {
            (slot, row)
            for rows in self._lists.values()
            for slot, own in enumerate(rows.reshape(len(rows), -1).tolist())
            for row in own
            if row >= 0
        }
        views, chosen = self.views, self.chosen
        wanted = (
            chosen.ranked, views.graph, views.hierarchy, views.signals["cosine"],
            chosen.fused, chosen.support.neighbour, chosen.support.graph,
        )  # fmt: skip
        slots, rows = torch.tensor(sorted(pairs), dtype=torch.long).reshape(-1, 2).T.to(chosen.ranked.device)
        said = torch.stack([scores[slots, rows].double() for scores in wanted], dim=1).tolist()
        return dict(zip(sorted(pairs), map(tuple, said), strict=True))

    def _item(self, query: "_Query", row: int) -> EvidenceItem:
        slot, m = query.slot, query.m
        memory, first = self.memories[m], self.bank.axes["units"].ptr[m]
        unit = row - first
        trace = memory.turns.traces[unit]
        start, end = memory.best_span(unit, self.batch.vectors[slot, m])
        score, graph, hierarchy, cosine, *parts = self._said[slot, row]
        named = dict(zip(("fused", "neighbour", "graph support"), parts, strict=True))
        reason, source = self._reason(query, row)
        return EvidenceItem(
            trace_id=trace.id,
            start=start,
            end=end,
            text=trace.text[start:end],
            score=score,
            views={"graph": graph, "hierarchy": hierarchy},
            parts={**named, "calibration": score - sum(parts)},
            reason=reason,
            source=None if source is None else memory.turns.traces[source - first].id,
            title=trace.title,
            speaker=trace.speaker,
            time=trace.time,
            session=trace.session,
            tokens=int(self.bank.host["unit_tokens"][row]),
            boundary=trace.boundary,
            role=trace.role,
            relevance=cosine,
            explanation=self._explanation(slot, m, row, score) if self.explain else None,
        )

    def _explanation(self, slot: int, m: int, row: int, score: float) -> dict[str, Any]:
        """Where the unit stands in each ranking, what its score sums, each signal, and what it is a part of."""
        weight = float(self.views.graph_weight[slot, m])
        graph, hierarchy = (view[slot, row].double() for view in (self.views.graph, self.views.hierarchy))
        shares = {
            "graph": weight * float(graph ** self.contrasts[0]),
            "hierarchy": (1 - weight) * float(hierarchy ** self.contrasts[1]),
        }
        near, far = self._said[slot, row][5:]
        sums = {**shares, "neighbour": near, "graph support": far}
        rankings = {
            "graph": self.views.graph,
            "hierarchy": self.views.hierarchy,
            "fused": self.chosen.fused,
            "final": self.chosen.ranked,
        }
        same = self.bank.unit_episode == self.bank.unit_episode[row]
        window = self.bank.member_window[self.bank.member_unit == row]
        around = self.bank.member_unit[(self.bank.member_window[:, None] == window).any(1)].unique()
        return {
            "weights": {"graph": weight, "hierarchy": 1 - weight},
            "ranks": {name: self._rank(scores[slot], m, row) for name, scores in rankings.items()},
            "sums": {**sums, "calibration": score - sum(sums.values())},
            "signals": {name: float(values[slot, row]) for name, values in self.views.signals.items()},
            "windows": list(self._ids(m, around.tolist())),
            "episode": list(self._ids(m, same.nonzero()[:, 0].tolist())),
        }

    def _ids(self, m: int, rows: Sequence[int]) -> Iterator[str]:
        first = self.bank.axes["units"].ptr[m]
        return (self.memories[m].turns.traces[row - first].id for row in rows)

    def _rank(self, scores: Tensor, m: int, row: int) -> int:
        """1 for the best of the memory; equal scores go by their place in it, as the ranking has it."""
        first, last = self.bank.axes["units"].ptr[m : m + 2]
        steps = (scores[first:last].double() / SCORE_STEP).round()
        own = steps[row - first]
        return 1 + int((steps > own).sum()) + int((steps[: row - first] == own).sum())

    def _reason(self, query: "_Query", row: int) -> tuple[str, int | None]:
        if row in query.main:
            return "main", None
        *_, near, far = self._said[query.slot, row]
        beside = [unit for unit in (row - 1, row + 1) if unit in query.main and self._leaning(min(row, unit))]
        if near > 0 and beside and near >= far:
            return "neighbour", max(beside, key=lambda unit: self._fused(query, unit))
        if far > 0:
            return "graph support", self._graph_source(query, row)
        return "ranked", None

    def _fused(self, query: "_Query", unit: int) -> float:
        return self._said[query.slot, unit][4]

    def _leaning(self, row: int) -> bool:
        """Whether a unit and the next one belong together, as closure sees it."""
        held = self.bank.host
        same = held["unit_session"][row] == held["unit_session"][row + 1] and held["unit_position"][row + 1] >= 0
        return bool(same and (held["unit_asks"][row] or held["unit_leans"][row + 1]))

    def _graph_source(self, query: "_Query", row: int) -> int | None:
        """The main unit that shares most with this one in the graph."""
        entities = self._neighbours(row)
        for unit in query.main:
            if unit not in query.neighbours:
                query.neighbours[unit] = self._neighbours(unit)
        shared = {unit: len(entities & query.neighbours[unit]) for unit in query.main}
        best = max(shared, key=lambda unit: (shared[unit], self._fused(query, unit)), default=None)
        return best if best is not None and shared[best] else None

    def _neighbours(self, row: int) -> set[int]:
        """Nodes next to a unit's in the graph."""
        held = self.bank.host
        node = held["unit_node"][row]
        return set(held["adjacency.col"][held["adjacency.crow"][node] : held["adjacency.crow"][node + 1]].tolist())


@dataclass(frozen=True)
class _Query:
    """Where a query lies, its main units, and what is next to those that were looked at."""

    slot: int
    m: int
    main: Sequence[int]
    neighbours: dict[int, set[int]] = field(default_factory=dict)
