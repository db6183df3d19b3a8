"""What a memory returns beside evidence: pages of traces, answers, the report of a check.

Plain data that needs no PyTorch, so that a client of a served memory has the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.reader.protocol import Usage
from zeromem_torch.substrate.traces import Trace


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


def place_of(cursor: str | None) -> int:
    """The sequence number behind which the page begins that a cursor asks for."""
    if cursor is None:
        return 0
    if not isinstance(cursor, str) or not cursor.isascii() or not cursor.isdigit():
        raise ZeroMemError.of("cursor", "the next_cursor of a page", cursor, "leave it out to start at the first trace")
    return int(cursor)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and what it rests on."""

    question: str
    text: str  # calibrated; empty where the reader failed
    raw: str  # as the reader said it
    rule: str  # what changed it last ("kept", "shortened", "date: resolved", ...), or "no evidence" | "failed"
    explanation: str
    supported: bool  # whether a piece of evidence bears it out
    cites: tuple[str, ...]  # ids of the traces that do
    evidence: Evidence
    usage: Usage  # what the reader spent
    error: str = ""  # why the reader gave no answer

    def __str__(self) -> str:
        if self.error:
            return f"no answer: {self.error}"
        return f"{self.text} [{', '.join(self.cites)}]" if self.cites else self.text

    @property
    def citations(self) -> list[EvidenceItem]:
        """The pieces of evidence that bear the answer out, best first."""
        return [item for item in self.evidence if item.trace_id in self.cites]

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("question", "text", "raw", "rule", "explanation", "supported")}
        usage = {name: getattr(self.usage, name) for name in ("prompt_tokens", "completion_tokens", "calls")}
        rest = {"error": self.error, "usage": usage, "evidence": self.evidence.to_dict()}
        return {**plain, "cites": list(self.cites), **rest}


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
