"""Keeps the index up with the record: reads traces to rows, makes what is lacking, and proves that both agree.

The record is the truth. The index may lag behind it, after a crash or damage, and never says anything else: a row is
used only while its digest is that of its trace.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from zeromem_torch.config import SubstrateConfig
from zeromem_torch.index import Segments
from zeromem_torch.store import Record
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.entities import EntityExtractor, extractor_fingerprint, load_extractor
from zeromem_torch.substrate.forward import READING, Forward, read_traces
from zeromem_torch.substrate.traces import Trace
from zeromem_torch.substrate.units import voice

Progress = Callable[[int, int | None], None]
"""Called with how many are done, and of how many if that is known."""
AT_ONCE = 512
"""Traces read together: bounds what is held beside the memory itself."""
TOLERANCE = 4e-3
"""Most by which a number of an index row may differ when its trace is read again, in another batch: a few steps of
half precision, in which token states are kept."""
log = logging.getLogger("zeromem_torch")


class TraceReader:
    """Reads traces to index rows; what it needs for that is loaded when it is first needed."""

    def __init__(
        self, config: SubstrateConfig, encoder: Callable[[], Encoder], extractor: EntityExtractor | None = None
    ) -> None:
        self.config, self.encoder = config, encoder
        self._given = extractor
        self._loaded: dict[str, EntityExtractor] = {}

    def read(self, traces: Sequence[Trace], progress: Progress | None = None) -> Forward:
        if not traces:
            return Forward.empty(0)
        parts = []
        for some in _some(traces, "reading", "trace"):
            parts.append(read_traces(some, self.encoder(), self._extractor_of, self.config))
            if progress:
                progress(min(len(parts) * AT_ONCE, len(traces)), len(traces))
        return Forward.cat(parts)

    def _extractor_of(self, trace: Trace) -> EntityExtractor:
        """What finds the entities of a trace: names carry the graph of documents, nouns that of dialogues."""
        if self._given is not None:
            return self._given
        kind = self.config.entities
        if kind == "auto":
            kind = "spacy" if voice(trace) else "rules"
        if kind not in self._loaded:
            self._loaded[kind] = load_extractor(kind)
        return self._loaded[kind]

    @property
    def extractors(self) -> tuple[str, ...]:
        """Fingerprints of the extractors in use."""
        used = [self._given] if self._given else list(self._loaded.values())
        return tuple(extractor.fingerprint for extractor in used)

    def fingerprint(self, encoder: str) -> dict[str, str]:
        """All that a row depends on beside its trace."""
        given = self._given
        return {
            "reading": READING,
            "encoder": encoder,
            "entities": extractor_fingerprint(self.config.entities) if given is None else given.fingerprint,
            "stop_words": str(self.config.stop_words),
            "stemmer": self.config.stemmer,
            "lexicon": self.config.lexicon,
        }


def open_index(folder: Path, fingerprint: Mapping[str, str], *, read_only: bool) -> tuple[Segments, list[str]]:
    """The index of a folder, and what was wrong with it; one that was made with other means is made anew."""
    segments = Segments(folder, fingerprint, read_only=read_only)
    notes = list(segments.problems)
    if segments.stale:
        notes.append(f"the index was made with other settings ({', '.join(segments.stale)}), and is made anew")
        if read_only:  # a reader cannot mend what is on disk: it makes rows of its own
            return Segments(None, fingerprint), notes
        segments.clear(fingerprint)
    return segments, notes


class Keeper:
    """Record and index of one folder."""

    def __init__(self, record: Record, segments: Segments, reader: TraceReader) -> None:
        self.record, self.segments, self.reader = record, segments, reader
        self.waiting: dict[int, None] = {}
        """Sequence numbers of traces that are known to have no row yet, in order of arrival."""

    def load(self, boundary: str) -> tuple[Mapping[int, Trace], Forward]:
        """A boundary's traces from the record, their rows from the index; those that wait for theirs are left out."""
        traces = {seq: trace for seq, trace in self.record.traces_of(boundary) if seq not in self.waiting}
        return traces, self.segments.rows(list(traces)) if traces else Forward.empty(0)

    def catch_up(self, why: Sequence[str] = ()) -> int:
        """Make the index hold a row for every trace, and no other; returns how many traces were read for it."""
        lacking = self._tidied()
        if why or len(lacking) > AT_ONCE:
            log.warning("index: %s; %d traces are read again", "; ".join(why) or "behind the record", len(lacking))
        for some in _some(lacking, "index", "trace"):
            stored = self.record.fetch(some.tolist())
            rows = self.reader.read([trace for _, trace in stored])
            self.segments.append([seq for seq, _ in stored], [trace.digest for _, trace in stored], rows)
        if len(lacking):
            self.segments.flush()
        return len(lacking)

    def line_up(self) -> None:
        """The index holds no row beside those of traces; which ones lack theirs is known from here on."""
        self.waiting.update(dict.fromkeys(self._tidied().tolist()))

    def _tidied(self) -> npt.NDArray[np.int64]:
        """Sequence numbers of traces without a row; rows without a trace are removed."""
        lacking, beside = self._differences()
        if len(beside):  # also what a purge did not come to: after it no file may hold a byte of the trace
            self.segments.compact(beside)
        return lacking

    def _differences(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Traces without a row of their own, and rows without a trace; both as sequence numbers."""
        pair = np.dtype([("seq", np.int64), ("digest", np.int64)])
        traces, rows = (
            np.ascontiguousarray(np.stack(held, axis=1)).view(pair)[:, 0]
            for held in (self.record.keys(), (self.segments.seqs, self.segments.digests))
        )
        return np.setdiff1d(traces, rows)["seq"], np.setdiff1d(rows, traces)["seq"]

    def problems(self) -> list[str]:
        """What is wrong with the files, or between record and index."""
        lacking, beside = self._differences()
        return [
            *self.segments.check(),
            *(f"trace {seq} has no row in the index" for seq in lacking.tolist() if seq not in self.waiting),
            *(f"index row {seq} has no trace" for seq in beside.tolist()),
        ]

    def compare(self) -> tuple[int, list[str]]:
        """Read every trace again, and compare its row: whole numbers exactly, others within `TOLERANCE`."""
        problems: list[str] = []
        seqs = np.intersect1d(self.record.keys()[0], self.segments.seqs)
        for some in _some(seqs, "verify", "trace"):
            stored = self.record.fetch(some.tolist())
            held = self.segments.rows([seq for seq, _ in stored])
            again = self.reader.read([trace for _, trace in stored])
            if wrong := held.differences(again, TOLERANCE):
                between = f"between {stored[0][0]} and {stored[-1][0]}"
                problems.append(f"index rows {between} are not what their traces give: {', '.join(wrong)}")
        return len(seqs), problems


def _some(items: Any, what: str, unit: str) -> Iterator[Any]:
    """Items some at a time, with a bar where there are many and stderr is a terminal."""
    if len(items) <= AT_ONCE:  # even a bar that is not shown takes a lock that all forks of a process share
        yield from [items] if len(items) else []
        return
    with tqdm(total=len(items), desc=what, unit=unit, disable=None) as bar:
        for start in range(0, len(items), AT_ONCE):
            yield items[start : start + AT_ONCE]
            bar.update(min(AT_ONCE, len(items) - start))
