"""The temporal hierarchy: turns, windows, episodes and local spans over the original traces (paper Eq. 5).

A turn is one trace. A window is a few neighbouring turns of one session, an episode a longer run of it; both are only
ranges of turns, so nothing is generated. A trace without a session (a document) is its own window and its own episode:
the order of a pool means nothing, so it makes no neighbours.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import torch
from jaxtyping import Int
from torch import Tensor

from zeromem_torch.substrate.tokenizer import sentence_spans
from zeromem_torch.substrate.traces import Trace


@dataclass(frozen=True)
class Turns:
    """Traces in order of time, and where each stands in its session."""

    traces: tuple[Trace, ...]
    source: Int[Tensor, " units"]  # the place at which each was given
    session: Int[Tensor, " units"]
    position: Int[Tensor, " units"]  # -1 for a trace without a session
    sessions: int


def order_turns(traces: Sequence[Trace]) -> Turns:
    """Sessions by their first event time, turns by their order; what has no time keeps the order it came in.

    Sessions of two boundaries are two, whatever their names.
    """
    groups: dict[tuple[str, str] | int, list[int]] = {}
    for i, trace in enumerate(traces):
        groups.setdefault((trace.boundary, trace.session) if trace.session else i, []).append(i)
    times = [trace.time for trace in traces]
    known = [min((time for i in group if (time := times[i])), default=None) for group in groups.values()]
    latest: datetime | None = None
    keys = []
    for arrival, start in enumerate(known):  # an undated session follows the one that came before it
        latest = start or latest
        keys.append((latest is not None, latest.timestamp() if latest else 0.0, arrival))
    ordered: list[int] = []
    session, position = [], []
    for number, (_, group) in enumerate(sorted(zip(keys, groups.values(), strict=True), key=lambda pair: pair[0])):
        alone = not traces[group[0]].session
        for place, i in enumerate(sorted(group, key=lambda i: traces[i].order)):
            ordered.append(i)
            session.append(number)
            position.append(-1 if alone else place)
    return Turns(
        tuple(traces[i] for i in ordered),
        torch.tensor(ordered, dtype=torch.long),
        torch.tensor(session, dtype=torch.long),
        torch.tensor(position, dtype=torch.long),
        len(groups),
    )


def day_of(time: datetime | None) -> int:
    """Proleptic ordinal of the day, as the speaker's own clock had it; 0 = unknown."""
    return time.date().toordinal() if time else 0


ROLES = ("user", "assistant")


def voice(trace: Trace) -> str:
    """Who speaks: the named speaker, else the user or the assistant of a chat; "" for a document or a tool."""
    return trace.speaker or (trace.role if trace.role in ROLES else "")


def turn_prefix(trace: Trace, *, dated: bool = True) -> str:
    """What is put before a turn's text to be indexed and read: "[8 May 2023] Melanie: ", or a document's title."""
    date = f"[{trace.time.day} {trace.time:%B %Y}] " if dated and trace.time else ""
    speaker = f"{voice(trace)}: " if voice(trace) else ""
    title = f"{trace.title}. " if trace.title else ""
    return f"{date}{speaker}{title}"


def windows(
    session: Int[Tensor, " units"], length: int
) -> tuple[Int[Tensor, " members"], Int[Tensor, " members"], int]:
    """Runs of ``length`` turns inside a session, stride 1; a shorter session is one window.

    Returns which window and which unit each membership joins, and the number of windows.
    """
    units = session.numel()
    if not units:
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), 0
    place = torch.arange(units)
    last = torch.searchsorted(session, session, right=True)  # one past the session's last unit
    first = torch.searchsorted(session, session)
    starts = place[(place + length <= last) | (place == first)]
    ends = torch.minimum(starts + length, last[starts])
    window = torch.repeat_interleave(torch.arange(starts.numel()), ends - starts)
    unit = torch.repeat_interleave(starts - (ends - starts).cumsum(0) + (ends - starts), ends - starts)
    return window, unit + torch.arange(window.numel()), starts.numel()


def episodes(session: Int[Tensor, " units"], length: int) -> Int[Tensor, " units"]:
    """The episode of each unit: a session cut into even runs of about ``length`` turns."""
    if not session.numel():
        return session.clone()
    first = torch.searchsorted(session, session)
    size = torch.searchsorted(session, session, right=True) - first
    parts = (size / length).round().clamp(min=1).long()
    part = (torch.arange(session.numel()) - first) * parts // size
    key = session * (session.numel() + 1) + part
    episode: Tensor = torch.unique(key, return_inverse=True)[1]
    return episode


def chunk_spans(text: str, token_spans: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Character spans of at most ``limit`` tokens that cover the text, cut at sentences where they fit.

    A sentence longer than the limit is cut between tokens; a character spelt in several tokens (bytes) stays whole,
    however many they are. Nothing is dropped.
    """
    if len(token_spans) <= limit:
        return [(0, len(text))]
    starts = [start for start, _ in token_spans]
    sentence_starts = {a for a, _ in sentence_spans(text)}
    places = [i for i in range(1, len(starts)) if starts[i] > starts[i - 1]]  # where a span may end
    sentences = [i for i in places if starts[i] in sentence_starts]
    spans, begin = [], 0
    while begin < len(starts):
        end = begin + limit
        if end < len(starts):
            fitting = [cuts[at - 1] for cuts in (sentences, places) if (at := bisect_right(cuts, end))]
            after = bisect_right(places, begin)
            beyond = places[after] if after < len(places) else len(starts)
            end = next((cut for cut in fitting if cut > begin), beyond)
        spans.append((starts[begin] if begin else 0, starts[end] if end < len(starts) else len(text)))
        begin = end
    return spans
