"""`zeromem top`: what a server is doing, from its metrics: rates between two looks, and how things stand."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from zeromem_torch.errors import ZeroMemError

Labels = tuple[tuple[str, str], ...]
_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[-+]?\d[\d.eE+-]*|[+-]?Inf|NaN)(?:\s|$)", re.ASCII
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CLEAR = "\x1b[H\x1b[2J"
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Look:
    """What was seen at a time."""

    at: float  # seconds, by a clock that only goes on
    samples: Mapping[str, Mapping[Labels, float]]
    ready: str  # "" when ready, else why not

    def sum(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(value for own, value in self.samples.get(name, {}).items() if wanted <= set(own))

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for own, value in self.samples.get(name, {}).items():
            key = dict(own).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


def samples_of(text: str) -> dict[str, dict[Labels, float]]:
    """Values by name and labels, of Prometheus' text format."""
    found: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        if (match := _SAMPLE.match(line)) is not None:
            labels = tuple(_LABEL.findall(match["labels"] or ""))
            found.setdefault(match["name"], {})[labels] = float(match["value"])
    return found


def look(url: str, key: str | None) -> Look:
    """Ask a server; one that cannot be asked is an error that says what to do."""
    text = _get(f"{url}/metrics", key)
    ready = ""
    try:
        _get(f"{url}/readyz", None)
    except ZeroMemError as error:
        ready = str(error)
    return Look(time.monotonic(), samples_of(text), ready)


def watch(url: str, key: str | None, *, every: float, once: bool, out: TextIO | None = None) -> None:
    """Show a frame, and another one every so many seconds until interrupted."""
    out = sys.stdout if out is None else out
    live = out.isatty() and not once
    before = look(url, key)
    while True:
        time.sleep(min(every, 1.0) if once else every)
        now = look(url, key)
        out.write(f"{_CLEAR if live else ''}{frame(url, before, now)}\n")
        out.flush()
        if once:
            return
        before = now


def frame(url: str, before: Look, now: Look) -> str:
    return "\n".join(f"{name:<10} {said}".rstrip() for name, said in _lines(url, before, now))


def _lines(url: str, before: Look, now: Look) -> Iterator[tuple[str, str]]:
    seconds = max(now.at - before.at, 1e-9)

    def grown(name: str, **labels: str) -> float:
        """A counter that fell began anew: the server was started again."""
        then, value = before.sum(name, **labels), now.sum(name, **labels)
        return value - then if value >= then else value

    def mean(name: str, factor: float = 1.0) -> str:
        count = grown(f"{name}_count")
        return f"{factor * grown(f'{name}_sum') / count:.1f}" if count else "-"

    yield "zeromem", f"{url}  {'ready' if not now.ready else now.ready}"
    statuses = {status: grown("zeromem_requests_total", status=status) for status in _names(now, "status")}
    seen = ", ".join(f"{status} {count / seconds:.1f}/s" for status, count in statuses.items() if count)
    yield "requests", f"{sum(statuses.values()) / seconds:.1f}/s{f'  ({seen})' if seen else ''}"
    slowest = {
        route: (grown("zeromem_request_seconds_sum", route=route), grown("zeromem_request_seconds_count", route=route))
        for route in _names(now, "route")
    }
    for route, (spent, count) in sorted(slowest.items(), key=lambda pair: -pair[1][0])[:5]:
        if count:
            yield "", f"{count / seconds:8.1f}/s {1000 * spent / count:8.1f} ms  {route}"
    yield "queue", f"{now.sum('zeromem_queue_depth'):.0f} waiting, {mean('zeromem_wait_seconds', 1000)} ms each"
    batches = grown("zeromem_batch_seconds_count") / seconds
    size, tokens = mean("zeromem_batch_queries"), mean("zeromem_batch_tokens")
    took = mean("zeromem_batch_seconds", 1000)
    yield "batches", f"{batches:.1f}/s of {size} queries, {tokens} tokens, {took} ms"
    shed = {reason: grown("zeromem_shed_total", reason=reason) for reason in now.by("zeromem_shed_total", "reason")}
    refused = ", ".join(f"{reason} {count / seconds:.1f}/s" for reason, count in shed.items() if count) or "none"
    missed, gone = grown("zeromem_deadline_misses_total"), grown("zeromem_dropped_total")
    yield "refused", f"{refused}; {missed / seconds:.1f}/s too late, {gone / seconds:.1f}/s of clients that left"
    for stage in now.by("zeromem_stage_seconds_total", "stage"):
        share = grown("zeromem_stage_seconds_total", stage=stage) / seconds
        if share >= 0.001:
            yield "", f"{100 * share:7.1f}% of the time  {stage}"
    hits, misses = (grown("zeromem_memory_lookups_total", result=result) for result in ("hit", "miss"))
    ready = f"{100 * hits / (hits + misses):.0f}% were ready" if hits + misses else "none asked for"
    yield "memories", ready
    held = now.by("zeromem_held_bytes", "part")
    parts = ", ".join(f"{part} {value / (1 << 20):.0f} MiB" for part, value in held.items())
    yield "bytes", parts or "-"
    stored, indexed = now.sum("zeromem_stored_up_to"), now.sum("zeromem_indexed_up_to")
    waiting = now.sum("zeromem_unindexed_traces")
    yield "index", f"{waiting:.0f} traces wait; stored up to {stored:.0f}, indexed up to {indexed:.0f}"
    if vllm := now.by("zeromem_vllm_requests", "state"):
        yield "vllm", ", ".join(f"{value:.0f} {state}" for state, value in vllm.items())


def _names(now: Look, label: str) -> list[str]:
    return sorted(now.by("zeromem_requests_total", label))


def _get(url: str, key: str | None) -> str:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with _direct.open(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")
        if error.code == 401:
            got = "none" if not key else "another"
            advice = "set ZEROMEM_KEY to one of scope admin (`zeromem keys make` makes one)"
            raise ZeroMemError.of("key", "one that this server knows", got, advice) from None
        try:
            raise ZeroMemError(str(json.loads(said)["detail"])) from None
        except (ValueError, KeyError, TypeError) as other:
            if isinstance(other, ZeroMemError):
                raise
            raise ZeroMemError.of("url", "a server of ours", f"status {error.code}", "check the address") from None
    except (OSError, ValueError) as error:
        advice = "start one with `zeromem serve`, or name its address"
        raise ZeroMemError.of("url", f"a server that answers at {url}", str(error), advice) from None
