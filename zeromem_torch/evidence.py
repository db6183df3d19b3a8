"""What a search returns: pieces of the original traces, each with its place, its scores and the reason it is there."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    parts: Mapping[str, float]  # what the score sums: "fused", "neighbour", "graph support", "calibration"
    reason: str  # "main" | "neighbour" | "graph support", or "ranked": good enough for what a token budget left
    source: str | None = None  # the main trace it was added for
    title: str = ""
    speaker: str = ""
    time: datetime | None = None
    session: str = ""
    tokens: int = 0  # what it costs a reader, counted by the encoder's tokenizer, date and speaker included
    boundary: str = ""
    role: str = ""
    relevance: float = 0.0  # cosine of the query and the trace, or the window around it: the same measure everywhere
    explanation: Mapping[str, Any] | None = None  # ranks, sums, signals, window and episode, when asked for

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "EvidenceItem":
        """What `Evidence.to_dict` made of one."""
        return cls(**{**plain, "time": datetime.fromisoformat(plain["time"]) if plain.get("time") else None})

    def __str__(self) -> str:
        day = f"[{self.time.day} {self.time:%b %Y}] " if self.time else ""
        said = f"{self.speaker}: " if self.speaker else f"{self.title}. " if self.title else ""
        return f"{self.score:.3f} {day}{said}{textwrap.shorten(self.text, 80)} ({self.trace_id})"


@dataclass(frozen=True, slots=True, repr=False)
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
    answer_types: tuple[str, ...] = ("phrase",)  # what the question asks for: "date", "person", ...; never empty
    subjects: tuple[str, ...] = ()  # speakers it names

    @classmethod
    def nothing(cls, query: str, boundary: str, reason: str) -> "Evidence":
        """What a search returns that has nothing to look through."""
        return cls(query, boundary, "none", 0.0, (reason,), (), (), ())

    @property
    def found(self) -> bool:
        return bool(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[EvidenceItem]:
        return iter(self.items)

    def __bool__(self) -> bool:
        return self.found

    def __repr__(self) -> str:
        head = f"Evidence({self.query!r} in {self.boundary!r}: {len(self.items)} found, {self.route})"
        return "\n".join([head, *(f"  {item}" for item in self.items), *(() if self.items else self.reasons)])

    def at_least(self, relevance: float) -> "Evidence":
        """Without what is less relevant; where nothing is left, the reasons say so."""
        kept: dict[str, Any] = {name: [i for i in getattr(self, name) if i.relevance >= relevance] for name in _LISTS}
        best = max((item.relevance for item in (*self.main, *self.items)), default=0.0)
        said = () if kept["items"] else (f"nothing reached a relevance of {relevance:g}; the best had {best:.3f}",)
        return replace(self, reasons=(*self.reasons, *said), **kept)

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
                "explanation": None if item.explanation is None else dict(item.explanation),
                "time": item.time.isoformat() if item.time else None,
            }

        return {
            "query": self.query,
            "boundary": self.boundary,
            "route": self.route,
            "rho": self.rho,
            "reasons": list(self.reasons),
            "answer_types": list(self.answer_types),
            "subjects": list(self.subjects),
            **{name: [plain(item) for item in getattr(self, name)] for name in _LISTS},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Evidence":
        """What `to_dict` made of one; lists that are left out are empty."""
        fields: dict[str, Any] = {name: plain[name] for name in ("query", "boundary", "route", "rho")}
        fields |= {name: tuple(plain[name]) for name in ("reasons", "answer_types", "subjects")}
        fields |= {name: [EvidenceItem.from_dict(item) for item in plain.get(name, ())] for name in _LISTS}
        return cls(**fields)


_LISTS = ("main", "closed", "items")
