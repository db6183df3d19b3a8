"""HotpotQA in long contexts: each question over a pool of its own, of 400, 1,600 or 3,200 documents.

A context is the question's own ten paragraphs, gold and official distractors, among others drawn at random; the order
is that of `random.Random(4)`. One document is one unit. The official list of questions, those of the first 200 that
two models of 7B parameters could not answer without the context, is not public: ours are the first 128 of the file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from zeromem_torch.evaluation.datasets import Dataset, hotpotqa_context, load_dataset, read_rows
from zeromem_torch.evaluation.datasets.records import categories_of
from zeromem_torch.substrate.traces import ZeroMemError, nearest

CONTEXTS = {"56k": 400, "224k": 1_600, "448k": 3_200}
"""Documents of a context, by the tokens they are on average."""
SEED = 4
QUESTIONS = 128


def load_long_context(data: str | Path, corpus: str | Path, context: str, *, limit: int | None = QUESTIONS) -> Dataset:
    """The first ``limit`` questions of a HotpotQA file, each a boundary of its own filled up from the corpus."""
    if context not in CONTEXTS:
        known = ", ".join(CONTEXTS)
        raise ZeroMemError.of("context", f"one of {known}", context, f"{nearest(context, CONTEXTS)}pass one of these")
    pool = load_dataset("hotpotqa", data, corpus)
    rows = read_rows(data)[:limit]
    built = [hotpotqa_context(row, pool.traces, CONTEXTS[context], SEED) for row in rows]
    questions = tuple(question for question, _ in built)
    size = f"{CONTEXTS[context]:,} documents (about {context.upper()} tokens)"
    notes = (
        f"contexts of {size}, filled and shuffled with seed {SEED}; sha256 is of both files' digest, context and seed",
        f"the first {len(questions)} questions of the file; the official list of 128 is not public",
    )
    return Dataset(
        "hotpotqa",
        f"{pool.split}-{context}",
        tuple(trace for _, traces in built for trace in traces),
        questions,
        categories_of(questions),
        hashlib.sha256(f"{pool.sha256} {context} {SEED}".encode()).hexdigest(),
        notes,
    )
