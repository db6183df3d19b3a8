"""Measures of retrieval, as functions of rankings of trace ids, and the test that one system beats another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zeromem_torch.evaluation.datasets import Question

__all__ = ["handed_over", "paired_bootstrap", "recall_at_tokens", "recall_hit_all", "summarise"]

CHUNK = 1 << 22  # resampled counts held at once: 32 MiB


def recall_hit_all(ranked_ids: Sequence[str], evidence: Iterable[str], k: int) -> tuple[float, float, float]:
    """Of the evidence, the share in the first `k` ranks; whether any is there; whether all is.

    An id that is ranked twice takes two ranks and counts once.
    """
    gold = _gold(evidence)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    found = len(gold & set(ranked_ids[:k]))
    return found / len(gold), float(found > 0), float(found == len(gold))


def handed_over(items: Iterable[tuple[str, int]], budget: int) -> tuple[list[str], int]:
    """The ids a reader is given within a budget of tokens, and the tokens spent.

    Items are (id, tokens) in the order of their rank. Each is handed over whole if it fits in what is left of the
    budget; one that does not fit is skipped, and a later, shorter one may still be given.
    """
    ids, spent = [], 0
    for name, tokens in items:
        if tokens < 0:
            raise ValueError(f"item {name!r} must have at least 0 tokens, got {tokens}")
        if spent + tokens <= budget:
            ids.append(name)
            spent += tokens
    return ids, spent


def recall_at_tokens(items: Iterable[tuple[str, int]], evidence: Iterable[str], budget: int) -> float:
    """The share of the evidence that `handed_over` gives the reader within the budget."""
    gold = _gold(evidence)
    return len(gold.intersection(handed_over(items, budget)[0])) / len(gold)


def paired_bootstrap(a: ArrayLike, b: ArrayLike, resamples: int = 10_000, seed: int = 0) -> dict[str, float]:
    """Is system `a` better than `b` on the questions both were asked? `a[i]` and `b[i]` score question i.

    `diff` is mean(a) - mean(b), [`low`, `high`] its 95% percentile interval over resampled questions, and

        p = min(1, 2 (1 + min(#{mean* <= 0}, #{mean* >= 0})) / (resamples + 1))

    A resampled mean of exactly 0 counts on both sides, so equal systems get p = 1. Drawing n questions with
    replacement and counting how often each distinct difference came is one multinomial draw: the result is that of
    drawing questions, does not depend on their order, and costs by the number of distinct differences.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if left.ndim != 1 or left.shape != right.shape or not left.size:
        shapes = f"{left.shape} and {right.shape}"
        raise ValueError(f"a and b must score the same questions, at least one, got shapes {shapes}")
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise ValueError("a and b must be finite, got NaN or infinity; leave questions without a score out of both")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    values, counts = np.unique(left - right, return_counts=True)
    means = _resampled_means(values, counts, resamples, np.random.default_rng(seed))
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    low, high = np.quantile(means, [0.025, 0.975])
    return {
        "diff": float(values @ counts / left.size),
        "low": float(low),
        "high": float(high),
        "p": min(1.0, 2 * (1 + tail) / (resamples + 1)),
    }


def summarise(per_question: Sequence[Mapping[str, float]], questions: Sequence[Question]) -> dict[str, Any]:
    """Means of every measure over the questions (micro) and over those of each category, with `n`.

    `per_question[i]` holds the measures of `questions[i]`. Questions without evidence have no recall: they are left
    out here, whatever was measured, so that `n` is the same for every measure.
    """
    if len(per_question) != len(questions):
        raise ValueError(f"expected measures for {len(questions)} questions, got {len(per_question)}")
    scored = [(q.category, row) for q, row in zip(questions, per_question, strict=True) if q.evidence]
    names = sorted({category for category, _ in scored} - {""})
    return {
        "overall": _means([row for _, row in scored]),
        "by_category": {name: _means([row for category, row in scored if category == name]) for name in names},
    }


def _gold(evidence: Iterable[str]) -> set[str]:
    gold = set(evidence)
    if not gold:
        raise ValueError("recall needs at least one piece of evidence; leave questions without evidence out")
    return gold


def _resampled_means(
    values: NDArray[np.float64], counts: NDArray[np.int64], resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Means of `resamples` draws with replacement from `values`, each present `counts` times."""
    total = int(counts.sum())
    step = max(1, CHUNK // len(values))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    drawn = [generator.multinomial(total, counts / total, size=size) @ values / total for size in sizes]
    # Differences such as +1/3 and -1/3 that cancel leave rounding behind: 0 must be 0 for ties to be seen.
    return np.asarray(np.round(np.concatenate(drawn), 12), dtype=np.float64)


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    measures = list(rows[0]) if rows else []
    for row in rows:
        if row.keys() != set(measures):
            raise ValueError(f"every question needs the same measures: expected {measures}, got {list(row)}")
    return {"n": len(rows), **{name: float(np.mean([row[name] for row in rows])) for name in measures}}
