"""What a server counts, for Prometheus; no label names a tenant, a boundary or a key: there may be millions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = tuple(16 * 4**power for power in range(7))


class Metrics:
    """Counters of one server, in a registry of their own, so that several may run in one process.

    Counts that other parts keep for themselves, of stages and of the LRU, are given as they stand and shown as they
    are when `render` is called.
    """

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self._requests = Counter(
            "zeromem_requests", "Requests answered, by route and HTTP status.", ["route", "status"], registry=own
        )
        self._request_seconds = Histogram(
            "zeromem_request_seconds",
            "Seconds from a request's arrival to its answer, by route.",
            ["route"],
            buckets=SECONDS,
            registry=own,
        )
        self._shed = Counter(
            "zeromem_shed", "Requests refused when they came, by reason: queue, deadline or closing.", ["reason"],
            registry=own,
        )  # fmt: skip
        self._missed = Counter(
            "zeromem_deadline_misses", "Queries and calls that were reached or answered after their deadline.",
            registry=own,
        )  # fmt: skip
        self._dropped = Counter(
            "zeromem_dropped", "Queries and calls dropped before they ran: the client was gone.", registry=own
        )
        self._depth = Gauge("zeromem_queue_depth", "Queries and calls that wait.", registry=own)
        self._waited = Histogram(
            "zeromem_wait_seconds", "Seconds that a query waited for its batch.", buckets=SECONDS, registry=own
        )
        self._batch_seconds = Histogram(
            "zeromem_batch_seconds", "Seconds that a batch of queries took.", buckets=SECONDS, registry=own
        )
        self._batch_queries = Histogram(
            "zeromem_batch_queries", "Queries searched together.", buckets=SIZES, registry=own
        )
        self._batch_tokens = Histogram(
            "zeromem_batch_tokens", "Tokens of queries searched together.", buckets=TOKENS, registry=own
        )
        self._held = Gauge("zeromem_held_bytes", "Bytes held, by part of the memory budget.", ["part"], registry=own)
        self._waiting = Gauge("zeromem_unindexed_traces", "Traces stored that no search finds yet.", registry=own)
        self._stored = Gauge("zeromem_stored_up_to", "Number of the last change that is stored.", registry=own)
        self._indexed = Gauge("zeromem_indexed_up_to", "Number of the last change that searches see.", registry=own)
        self._reader = Gauge(
            "zeromem_vllm_requests", "Requests of the vLLM on the same GPU, by state: running or waiting.", ["state"],
            registry=own,
        )  # fmt: skip
        self._stages: Mapping[str, float] = {}
        self._lru = (0, 0)
        own.register(self)  # for what `collect` gives
        for reason in ("queue", "deadline", "closing"):
            self._shed.labels(reason)  # a counter that begins at 0 shows its first step

    def request(self, route: str, status: int, seconds: float) -> None:
        """``route`` is the template of a path, never a path: that would name boundaries and ids."""
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def shed(self, reason: str) -> None:
        self._shed.labels(reason).inc()

    def deadline_missed(self) -> None:
        self._missed.inc()

    def dropped(self, number: int) -> None:
        self._dropped.inc(number)

    def queue(self, depth: int) -> None:
        self._depth.set(depth)

    def waited(self, seconds: float) -> None:
        self._waited.observe(seconds)

    def batch(self, queries: int, tokens: int, seconds: float) -> None:
        self._batch_queries.observe(queries)
        self._batch_tokens.observe(tokens)
        self._batch_seconds.observe(seconds)

    def stages(self, timings: Mapping[str, float]) -> None:
        """Seconds by stage of a search since the start, as the searcher keeps them."""
        self._stages = dict(timings)

    def held(self, part: str, nbytes: int) -> None:
        self._held.labels(part).set(nbytes)

    def lru(self, hits: int, misses: int) -> None:
        """How often a memory was ready when it was asked for, and how often not, since the start."""
        self._lru = hits, misses

    def backlog(self, waiting: int, stored_up_to: int, indexed_up_to: int) -> None:
        self._waiting.set(waiting)
        self._stored.set(stored_up_to)
        self._indexed.set(indexed_up_to)

    def vllm(self, running: float, waiting: float) -> None:
        self._reader.labels("running").set(running)
        self._reader.labels("waiting").set(waiting)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus' client asks of a collector: the counts that are kept elsewhere."""
        stages = CounterMetricFamily(
            "zeromem_stage_seconds", "Seconds spent in each stage of searching, all queries together.", labels=["stage"]
        )
        for stage, seconds in self._stages.items():
            stages.add_metric([stage], seconds)
        yield stages
        lru = CounterMetricFamily(
            "zeromem_memory_lookups", "Memories asked for, by whether they were ready: hit or miss.", labels=["result"]
        )
        for result, number in zip(("hit", "miss"), self._lru, strict=True):
            lru.add_metric([result], number)
        yield lru

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus reads, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
