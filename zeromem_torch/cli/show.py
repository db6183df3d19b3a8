"""What a person or a program reads: traces and evidence laid out for a page, or JSON, an object a line."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from zeromem_torch.substrate.traces import Trace

if TYPE_CHECKING:
    from zeromem_torch.evidence import Evidence, EvidenceItem

INDENT = " " * 4
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what was said must not steer the terminal


def as_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str))


def lines(*shown: str) -> None:
    for line in shown:
        print(plain(line))


def plain(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def day(time: datetime | None) -> str:
    return f"{time.day} {time:%b %Y}" if time else "no date"


def wrapped(text: str, page: int) -> Iterator[str]:
    """All of a text, its own lines kept."""
    for line in text.splitlines():
        yield from textwrap.wrap(
            line, page, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        ) or [""]


def ends(left: str, right: str, page: int) -> str:
    """A text at each end of a line; on two lines where one is too short."""
    gap = "" if len(left) + 2 + len(right) <= page else "\n"
    return f"{left}{gap}{right.rjust(page if gap else page - len(left))}"


def trace_line(trace: Trace, page: int, *, boundary: bool) -> str:
    """One line: id, day, who and the beginning of what."""
    where = f"{trace.boundary}  " if boundary else ""
    who = trace.speaker or trace.title or trace.role
    text = f"{who}: {trace.text}" if who else trace.text
    head = f"{where}{trace.id}  {day(trace.time)}  "
    room = max(page - len(head), 20)
    said = " ".join(text.split())
    return head + (said if len(said) <= room else f"{said[: room - 3].rstrip()}...")


def trace_page(trace: Trace, page: int) -> Iterator[str]:
    """All of a trace."""
    fields = trace.to_dict()
    text, metadata = fields.pop("text"), fields.pop("metadata", {})
    fields |= {f"metadata {name}": value for name, value in metadata.items()}
    longest = max(map(len, fields))
    for name, value in fields.items():
        yield f"{name:<{longest}}  {value}"
    yield ""
    yield from wrapped(text, page)


def evidence_page(
    found: Evidence, who: Callable[[EvidenceItem], str], page: int, *, boundary: bool, explain: bool
) -> Iterator[str]:
    """Rank, score, day and speaker of each piece, its trace at the end of the line, and what was said."""
    if explain:
        yield f"route {found.route}, rho {found.rho:.2f} ({'; '.join(found.reasons)})"
    for rank, item in enumerate(found.items, start=1):
        left = "  ".join(filter(None, [f"{rank:>2}", f"{item.score:.3f}", day(item.time), who(item)]))
        why = f"{item.reason} of {item.source}, " if item.source else ""
        where = f"{item.boundary}  " if boundary else ""
        yield ends(left, f"{why}{where}{item.trace_id}", page)
        yield from wrapped(item.text, page)
        if explain:
            yield from _explained(item, page)


def _explained(item: EvidenceItem, page: int) -> Iterator[str]:
    known = item.explanation or {}
    parts = {
        "reason": item.reason,
        "relevance": f"{item.relevance:.3f}",
        "views": _numbers(item.views),
        "ranks": ", ".join(f"{name} {rank}" for name, rank in known.get("ranks", {}).items()),
        "score sums": _numbers(known.get("sums", {})),
        "signals": _numbers({name: value for name, value in known.get("signals", {}).items() if value}),
        "session": item.session,
        "characters": f"{item.start} to {item.end}, {item.tokens} tokens",
    }
    for name, value in parts.items():
        if value:
            line = f"{name}: {value}"
            yield from textwrap.wrap(line, page, initial_indent=INDENT * 2, subsequent_indent=INDENT * 3)


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
