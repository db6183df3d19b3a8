"""A benchmark by its name: the data sets there are, and what holds for each of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from zeromem_torch.evaluation.datasets.conversations import load_locomo, load_longmemeval
from zeromem_torch.evaluation.datasets.plain import load_jsonl
from zeromem_torch.evaluation.datasets.pools import load_documents, load_musique
from zeromem_torch.evaluation.datasets.reading import Source, read, stem
from zeromem_torch.evaluation.datasets.records import Dataset, Parts, without_evidence
from zeromem_torch.substrate.traces import ZeroMemError, nearest


def load_dataset(
    name: str, data: str | Path, corpus: str | Path | None = None, *, audited: bool = False, limit: int | None = None
) -> Dataset:
    """Read a benchmark file: .json (an array) or .jsonl (one object a line), plain or gzipped.

    `corpus` is the pool of `title`, `text` documents that hotpotqa and 2wiki are searched in; a file of the official
    schema can do without, and is then searched in the pool of all its own paragraphs.

    `audited` (locomo) replaces the evidence of the questions that `label_errors.json`, next to the data file, marks
    WRONG_CITATION, by its `correct_evidence`. Gold answers and the other kinds of error are left as they are.

    `limit` keeps the first questions. A pool stays whole, so that ranks mean the same; a boundary that nobody asks
    about any more is left out.
    """
    if name not in _LOADERS:
        known = ", ".join(DATASETS)
        raise ZeroMemError.of("dataset", f"one of {known}", name, f"{nearest(name, DATASETS)}pass one of these")
    if corpus is not None and name not in _WITH_CORPUS:
        raise ZeroMemError.of("corpus", f"none for {name}", str(corpus), f"only {' and '.join(_WITH_CORPUS)} take one")
    if audited and name != "locomo":
        raise ZeroMemError.of("audited", f"False for {name}", audited, "only locomo has an audit of its labels")
    if limit is not None and limit < 1:
        raise ZeroMemError.of("limit", "at least 1", limit, "leave it out to load every question")

    raw, rows = read(Path(data))
    notes = []
    documents = None
    if corpus is not None:
        more, documents = read(Path(corpus))
        raw += more
        notes.append(f"sha256 is of the bytes of {Path(data).name} followed by those of {Path(corpus).name}")
    parts = _LOADERS[name](Source(Path(data), rows, documents, audited))
    traces, questions = tuple(parts.traces), tuple(parts.questions)
    _refuse_repeats("trace id", (t.id for t in traces))
    _refuse_repeats("question id", (q.id for q in questions))

    notes += parts.notes
    if bare := without_evidence(questions):
        notes.append(f"{bare} of {len(questions)} questions have no usable evidence: kept, but left out of recall")
    if limit is not None and limit < len(questions):
        notes.append(f"limited to the first {limit} of {len(questions)} questions")
        questions = questions[:limit]
        asked = {q.boundary for q in questions}
        traces = tuple(t for t in traces if t.boundary in asked)
    digest = hashlib.sha256(raw).hexdigest()
    return Dataset(name, stem(Path(data)), traces, questions, parts.categories, digest, tuple(notes))


def _refuse_repeats(what: str, ids: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    if repeated:
        raise ZeroMemError.of(what, "each one once", ", ".join(repeated[:3]), "make them unique")


_LOADERS: dict[str, Callable[[Source], Parts]] = {
    "locomo": load_locomo,
    "longmemeval": load_longmemeval,
    "hotpotqa": lambda source: load_documents("hotpotqa", source),
    "musique": load_musique,
    "2wiki": lambda source: load_documents("2wiki", source),
    "jsonl": load_jsonl,
}
DATASETS = tuple(_LOADERS)
_WITH_CORPUS = ("hotpotqa", "2wiki")
