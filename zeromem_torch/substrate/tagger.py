"""spaCy's entities and nouns of texts, in this process or in one of its own.

A worker is this file run as a script, with texts as JSON lines in and spans as JSON lines out. It shares nothing with
the process that started it: no lock held by another thread at a fork, no second run of the caller's main module. This
file imports nothing of ours, so that a worker starts without PyTorch.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

Spans = list[tuple[int, int, str]]
"""Characters from and to, and spaCy's label; "NOUN" for a noun."""

IDLE = 60.0  # seconds without a text after which a worker leaves
AT_ONCE = 64  # texts handed to a worker: enough for spaCy to batch, few enough to share out evenly


class Tagger:
    """A spaCy pipeline with the components that are used, and none else.

    ``chunks`` takes noun chunks in place of single nouns. Runs in spaCy's memory zone: its vocabulary would otherwise
    grow for ever in a service.
    """

    def __init__(self, model: str, *, chunks: bool) -> None:
        unused = ["lemmatizer", "senter"] if chunks else ["lemmatizer", "senter", "parser"]
        self.nlp: Any = importlib.import_module(model).load(exclude=unused)
        self.chunks = chunks

    def __call__(self, texts: Sequence[str]) -> list[Spans]:
        with self.nlp.memory_zone():
            return [self._spans(doc) for doc in self.nlp.pipe(texts)]

    def _spans(self, doc: Any) -> Spans:
        found = [(entity.start_char, entity.end_char, entity.label_) for entity in doc.ents]
        if self.chunks:
            return found + [(c.start_char, c.end_char, "NOUN") for c in doc.noun_chunks if c.root.pos_ != "PRON"]
        nouns = (token for token in doc if token.pos_ in ("NOUN", "PROPN") and len(token) > 1)
        return found + [(token.idx, token.idx + len(token), "NOUN") for token in nouns]


class Taggers:
    """A tagger, and workers beside it that are started once there is enough for them to do."""

    def __init__(self, model: str, *, chunks: bool, workers: int, worthwhile: int = 1024) -> None:
        """``worthwhile``: texts, of calls that several could share, that are tagged before a worker is started."""
        self.here = Tagger(model, chunks=chunks)
        self.most, self.worthwhile = workers, worthwhile
        self._command = [sys.executable, "-P", __file__, model, str(int(chunks))]
        self._workers: list[_Worker] = []
        self._tagged = 0

    def __call__(self, texts: Sequence[str], done: Callable[[int], object] = lambda count: None) -> list[Spans]:
        """Spans of each text; ``done`` is told how many texts were just finished."""
        batches = [texts[i : i + AT_ONCE] for i in range(0, len(texts), AT_ONCE)]
        found: list[list[Spans] | None] = [None] * len(batches)
        waiting = iter(range(len(batches)))

        def take(tag: Callable[[Sequence[str]], list[Spans] | None]) -> None:
            for number in waiting:
                found[number] = tag(batches[number])
                if found[number] is None:  # the worker has left
                    return
                done(len(batches[number]))

        workers = self._ready(len(texts)) if len(batches) > 2 else []
        if workers:
            with ThreadPoolExecutor(len(workers)) as pool:
                others = [pool.submit(take, worker.tag) for worker in workers]
                take(self.here)
            for other in others:
                other.result()
        waiting = iter([number for number, spans in enumerate(found) if spans is None])
        take(self.here)
        return [spans for batch in found for spans in batch or ()]

    def _ready(self, texts: int) -> "list[_Worker]":
        """Workers that have loaded their model; once it pays, more of them are started for the calls to come."""
        self._workers = [worker for worker in self._workers if worker.alive]
        self._tagged += texts
        if self._tagged > self.worthwhile:
            self._workers += [_Worker(self._command) for _ in range(self.most - len(self._workers))]
        return [worker for worker in self._workers if worker.loaded.is_set()]


class _Worker:
    """A process that tags what it is given; `loaded` is set as soon as it can."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
        )
        self.loaded = threading.Event()
        threading.Thread(target=_wait, args=(self._process, self.loaded), daemon=True).start()
        self.close = weakref.finalize(self, _close, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def tag(self, texts: Sequence[str]) -> list[Spans] | None:
        """Spans of each text; None if the process has gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(texts) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            return None
        return [[(a, b, label) for a, b, label in spans] for spans in json.loads(line)] if line else None


def _wait(process: subprocess.Popen[str], loaded: threading.Event) -> None:
    assert process.stdout is not None
    if process.stdout.readline():
        loaded.set()


def _close(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written yet is of no use to anybody
                pipe.close()


def _serve(model: str, chunks: str) -> None:
    tag = Tagger(model, chunks=chunks == "1")
    print("loaded", flush=True)
    idle = threading.Timer(IDLE, os._exit, (0,))
    idle.daemon = True
    idle.start()
    for line in sys.stdin:
        idle.cancel()
        print(json.dumps(tag(json.loads(line))), flush=True)
        idle = threading.Timer(IDLE, os._exit, (0,))
        idle.daemon = True
        idle.start()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
