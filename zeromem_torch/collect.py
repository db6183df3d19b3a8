"""Ranked rows -> evidence that names its traces, and says why each is there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Turns ranked rows into evidence; with ``explain``, each piece with what its score is made of."""

    def __init__(
        self, group: Batch, views: Views, chosen: Selection, contrasts: tuple[float, float], *, explain: bool = False
    ) -> None:
        self.contrasts, self.explain = contrasts, explain
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
            answer_types=tuple(str(kind.name).lower() for kind in profile.answer_types),
            subjects=profile.subjects,
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
            parts={**parts, "calibration": score - sum(parts.values())},
            reason=reason,
            source=None if source is None else memory.turns.traces[source - self.bank.axes["units"].ptr[m]].id,
            title=trace.title,
            speaker=trace.speaker,
            time=trace.time,
            session=trace.session,
            tokens=self.tokens[row],
            boundary=trace.boundary,
            role=trace.role,
            relevance=float(self.views.signals["cosine"][slot, row]),
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
        parts = self._parts(slot, row)
        del parts["fused"]
        sums = {**shares, **parts}
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
