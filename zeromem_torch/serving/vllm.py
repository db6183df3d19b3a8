"""How busy the vLLM on the same GPU is, and what that leaves for indexing."""

from __future__ import annotations

import logging
import re
import threading
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from zeromem_torch.errors import ZeroMemError

LEAST = 0.02
"""Of the time, what indexing always gets: what was added must be found one day."""
PATIENCE = 2.0
"""Seconds that an answer may take to come."""
LONGEST = 4 << 20
"""Bytes of an answer that are read; vLLM's is some tens of kilobytes."""
GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{.*\})?\s+(\S+)", re.MULTILINE)

logger = logging.getLogger(__name__)


class VllmWatch:
    """Asks vLLM's `/metrics` how many requests run and wait, every so often, in a thread of its own.

    While vLLM cannot be reached, indexing goes on as if it were idle: it may not have been started, or have ended. That
    is said once in the log, and `reachable` and `starting` tell it.
    """

    def __init__(self, url: str, *, every: float = 1.0, fetch: Callable[[str], str] | None = None) -> None:
        """``url`` is where vLLM listens, with or without `/metrics`; ``fetch`` reads it."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ZeroMemError.of("vllm-metrics", "an address", url, "name one such as http://127.0.0.1:8000/metrics")
        if every <= 0:
            raise ZeroMemError.of("every", "seconds above 0", every, "pass 1.0")
        self.url = url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"
        self.every = every
        self.running = self.waiting = 0.0
        self.reachable = False
        self.starting = True
        """It was never reached yet."""
        self._told = False  # that it cannot be reached
        self._fetch = _fetch if fetch is None else fetch
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="zeromem-vllm", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join(2 * PATIENCE)
            self._thread = None

    def share(self) -> float:
        """Of the time, what indexing may take: all while vLLM is idle, ``1 / (1 + running)`` beside requests that run,
        and next to nothing while some wait for their turn."""
        running, waiting = self.running, self.waiting
        return LEAST if waiting > 0 else max(LEAST, 1 / (1 + running))

    def poll(self) -> None:
        """Ask once."""
        try:
            self.running, self.waiting = _requests(self._fetch(self.url))
        except Exception as error:  # whatever goes wrong there must not end the watch
            self.running = self.waiting = 0.0
            self.reachable = False
            if not self._told:
                self._told = True
                logger.warning("vLLM cannot be asked at %s (%s); indexing goes on as if it were idle", self.url, error)
            return
        if self._told:
            logger.info("vLLM answers at %s", self.url)
        self.reachable, self.starting, self._told = True, False, False

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.poll()
            self._stop.wait(self.every)


def _requests(text: str) -> tuple[float, float]:
    """Requests that run and that wait, over all engines and models that the text lists."""
    found: dict[str, float] = {}
    for state, value in GAUGE.findall(text):
        found[state] = found.get(state, 0.0) + float(value)
    running, waiting = found["running"], found["waiting"]
    if not (0 <= running < float("inf") and 0 <= waiting < float("inf")):
        raise ValueError(f"{running} requests running, {waiting} waiting")
    return running, waiting


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine or next to it


def _fetch(url: str) -> str:
    with _direct.open(url, timeout=PATIENCE) as answer:
        return str(answer.read(LONGEST).decode("utf-8", "replace"))
