"""From the lines of a question-answering run to its figures: means, intervals, calibration, and who beats whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zeromem_torch.evaluation.answers import BLEU1, F1
from zeromem_torch.evaluation.datasets.conversations import ADVERSARIAL, LOCOMO_COUNTS
from zeromem_torch.evaluation.metrics import paired_bootstrap
from zeromem_torch.evaluation.run import BUDGETS, FEWEST
from zeromem_torch.evaluation.systems import MAIN, RAW

Line = Mapping[str, Any]
HEADLINE = "gam"
"""The convention of intervals and tests: the one the paper follows."""


def summary(lines: Mapping[str, Sequence[Line]], dataset: str) -> dict[str, Any]:
    """The figures of every system, by name."""
    return {
        name: {
            "overall": {**_means(own), **_interval(own)},
            "by_category": {
                category: _means([line for line in own if line["category"] == category])
                for category in sorted({line["category"] for line in own} - {""})
            },
            "weighted": _weighted(own) if dataset == "locomo" else None,
            "calibration": _calibration(own) if name != RAW else {},
            "vs": _versus(own, {other: rows for other, rows in lines.items() if other != name}) if name == MAIN else {},
        }
        for name, own in lines.items()
        if own
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _metric(line: Line, measure: str) -> float:
    """A measure by its name: "f1", "raw_f1", "bleu1", "raw_bleu1" (gam), "answer_in_evidence", "...@512tok"."""
    name, _, budget = measure.partition("@")
    if name == "answer_in_evidence":
        held = line["in_evidence"]
        return float(held["tokens"][budget.removesuffix("tok")] if budget else held["handed"])
    metrics = line["raw_metrics"] if name.startswith("raw_") else line["metrics"]
    return float(metrics[name.removeprefix("raw_")][HEADLINE])


def _means(lines: Sequence[Line]) -> dict[str, Any]:
    def of(metrics: str, kind: str, convention: str) -> float | None:
        return _mean([line[metrics][kind][convention] for line in lines])

    def total(group: str, *names: str) -> float:
        return float(sum(line[group][name] for line in lines for name in names))

    held = [line["in_evidence"] for line in lines]
    prompt, completion = int(total("tokens", "prompt")), int(total("tokens", "completion"))
    uncounted = any(line["memory_llm_calls"] is None for line in lines)
    return {
        "n": len(lines),
        "f1": {name: of("metrics", "f1", name) for name in F1},
        "bleu1": {name: of("metrics", "bleu1", name) for name in BLEU1},
        "raw_f1": {name: of("raw_metrics", "f1", name) for name in F1},
        "raw_bleu1": {name: of("raw_metrics", "bleu1", name) for name in BLEU1},
        "answer_in_evidence": _mean([one["handed"] for one in held]),
        "answer_in_evidence_at": {
            str(budget): _mean([one["tokens"][str(budget)] for one in held if one["tokens"]]) for budget in BUDGETS
        },
        "answer_in_evidence_k": [
            float(np.mean(column)) for column in zip(*(one["k"] for one in held if one["k"]), strict=True)
        ],
        "reader_tokens": prompt + completion,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "reader_calls": int(total("tokens", "calls")),
        "evidence_tokens": total("tokens", "evidence") / len(lines),
        "encoder_tokens": total("tokens", "encoder"),
        # the run stops at the first call to the reader while memory operations run, so a line that is there counts none
        "memory_llm_tokens": None if uncounted else int(sum(line["memory_llm_calls"] for line in lines)),
        "seconds": total("seconds", "build", "search"),
        "read_seconds": total("seconds", "read"),
        "errors": sum(bool(line["error"]) for line in lines),
        "unsupported": sum(not line["supported"] for line in lines),
    }


def _interval(lines: Sequence[Line]) -> dict[str, Any]:
    if len(lines) < FEWEST:
        return {}
    interval = {}
    for measure in ("f1", "bleu1", "answer_in_evidence"):
        test = paired_bootstrap([_metric(line, measure) for line in lines], [0.0] * len(lines))
        interval[measure] = [test["low"], test["high"]]
    return {"interval": interval}


def _weighted(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Means of LoCoMo's categories weighted as its 1,540 questions have them; None where a category lacks."""
    counts = {category: count for category, count in LOCOMO_COUNTS.items() if category != ADVERSARIAL}
    of = {category: [line for line in lines if line["category"] == category] for category in counts}
    if not all(of.values()):
        return None

    def mean(kind: str, convention: str) -> float:
        means = [np.mean([line["metrics"][kind][convention] for line in own]) for own in of.values()]
        return float(np.average(means, weights=list(counts.values())))

    return {kind: {name: mean(kind, name) for name in names} for kind, names in (("f1", F1), ("bleu1", BLEU1))}


def _calibration(lines: Sequence[Line]) -> dict[str, Any]:
    """What answer calibration changed, and what that was worth, by rule and in all."""
    by_rule: dict[str, list[float]] = {}
    for line in lines:
        by_rule.setdefault(line["rule"], []).append(_metric(line, "f1") - _metric(line, "raw_f1"))
    found: dict[str, Any] = {
        "changed": sum(line["answer"] != line["raw"].strip() for line in lines),
        "by_rule": {rule: {"n": len(own), "f1_diff": float(np.mean(own))} for rule, own in sorted(by_rule.items())},
    }
    if len(lines) >= FEWEST:
        for measure in ("f1", "bleu1"):
            raw = [_metric(line, f"raw_{measure}") for line in lines]
            found[measure] = paired_bootstrap([_metric(line, measure) for line in lines], raw)
    return found


def _versus(own: Sequence[Line], others: Mapping[str, Sequence[Line]]) -> dict[str, Any]:
    """Paired tests on the questions that both systems were asked."""
    mine = {line["id"]: line for line in own}
    found: dict[str, Any] = {}
    for other, lines in others.items():
        pairs = [(mine[line["id"]], line) for line in lines if line["id"] in mine]
        if len(pairs) < FEWEST:
            continue
        names = ["answer_in_evidence", "f1", "raw_f1", "bleu1"]
        if all(line["in_evidence"]["tokens"] for pair in pairs for line in pair):
            names += [f"answer_in_evidence@{budget}tok" for budget in BUDGETS]
        tests: dict[str, Any] = {}
        for name in names:
            theirs = [_metric(right, name) for _, right in pairs]
            tests[name] = paired_bootstrap([_metric(left, name) for left, _ in pairs], theirs)
        found[other] = {"n": len(pairs), **tests}
    return found


def depth_of(name: str) -> int | None:
    """The cap in a system's name: "zeromem@10" -> 10."""
    cap = name.partition("@")[2]
    return int(cap) if cap else None
