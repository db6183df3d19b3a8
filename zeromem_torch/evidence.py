"""What a search returns: pieces of the original traces, each with its place, its scores and the reason it is there."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """A stretch of one trace. ``text == trace.text[start:end]``."""

    trace_id: str
    start: int
    end: int
    text: str
    score: float  # what it was ranked by
    views: Mapping[str, float]  # each view's score, brought to [0, 1] over the boundary
    parts: Mapping[str, float]  # what the score sums: "fused", "neighbour", "graph support", "profile"
    reason: str  # "main" | "neighbour" | "graph support", or "ranked": good enough for what a token budget left
    source: str | None = None  # the main trace it was added for
    title: str = ""
    speaker: str = ""
    time: datetime | None = None
    session: str = ""
    tokens: int = 0  # what it costs a reader, counted by the encoder's tokenizer, date and speaker included


@dataclass(frozen=True, slots=True)
class Evidence:
    """Answer of the memory to one query: M(q), C(q) and R(q) of the paper, best first."""

    query: str
    boundary: str
    route: str  # "relational" | "local"
    rho: float  # weight of the primary view
    reasons: tuple[str, ...]  # why this route, what the walk started from
    main: Sequence[EvidenceItem]  # M(q): best of the fused views
    closed: Sequence[EvidenceItem]  # C(q): with what supports it
    items: Sequence[EvidenceItem]  # R(q): calibrated, what a reader is handed

    @property
    def tokens(self) -> int:
        return sum(item.tokens for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; times as ISO 8601."""

        def plain(item: EvidenceItem) -> dict[str, Any]:
            return {
                **asdict(item),
                "views": dict(item.views),
                "parts": dict(item.parts),
                "time": item.time.isoformat() if item.time else None,
            }

        return {
            "query": self.query,
            "boundary": self.boundary,
            "route": self.route,
            "rho": self.rho,
            "reasons": list(self.reasons),
            **{name: [plain(item) for item in getattr(self, name)] for name in ("main", "closed", "items")},
        }
