"""A made-up run of `zeromem eval qa`: the shipped conversation's questions, and answers as systems of given skill give.

    python tests/sample_run.py FOLDER [QUESTIONS]      # writes runs of three kinds, and the report of them

No figure of it measures anything. It has the shapes that `run_qa` writes, at any size.
"""

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from zeromem_torch.evaluation.answers import answer_in_evidence, measures
from zeromem_torch.evaluation.datasets import Dataset, Question, load_dataset
from zeromem_torch.evaluation.metrics import paired_bootstrap
from zeromem_torch.substrate.traces import Trace

DEMO = Path(str(files("zeromem_torch"))) / "data" / "demo.jsonl"
# How often each finds what answers a question, and how often the reader then says it.
SKILL = {
    "zeromem": (0.86, 0.74),
    "graph": (0.72, 0.70),
    "hierarchy": (0.80, 0.72),
    "no_closure": (0.82, 0.73),
    "no_calibration": (0.84, 0.72),
    "bm25": (0.66, 0.70),
    "dense": (0.60, 0.68),
    "hybrid": (0.74, 0.70),
    "context": (0.80, 0.71),
    "rag": (0.70, 0.60),
    "long_llm": (0.55, 0.50),
}
MEASURES = ("f1", "bleu1", "answer_in_evidence")
LABELS = {
    "graph": "graph only",
    "hierarchy": "hierarchy only",
    "no_closure": "no closure",
    "no_calibration": "no calibration of evidence",
    "no_answer_calibration": "no calibration of answers",
    "rag": "RAG, chunks of 2,048 tokens",
    "long_llm": "LONG-LLM, windows of 6,000 tokens",
}
VIEWS = ("zeromem", "graph", "hierarchy", "no_closure", "no_calibration")
CATEGORIES = {"1": "multi-hop", "2": "temporal", "3": "open-domain", "4": "single-hop"}
_KINDS = {"when": "2", "how long": "2", "date moved": "2", "multi-hop": "1", "list": "1", "change of mind": "3"}
_WRONG = ("a thermos", "in Haarlem", "Hanneke", "12 March 2025", "no", "three weeks", "Not in memory")


def write_run(
    folder: Path,
    name: str = "run",
    *,
    systems: Sequence[str] = tuple(SKILL),
    questions: int = 36,
    split: str = "made_up",
    context: str | None = None,
    sweep: bool = False,
    seed: int = 0,
    lines: bool = True,
    change: Mapping[str, Any] | None = None,
) -> Path:
    """Write NAME.json and NAME.jsonl; gives the first. ``change`` replaces fields of the JSON."""
    data = conversations()
    drawn = random.Random(seed)
    written = {system: list(_lines(data, system, questions, drawn)) for system in systems}
    for k in (1, 2, 10, 20) if sweep else ():
        skill = SKILL["zeromem"][0] * (1 - 0.5 / k)
        written[f"zeromem@{k}"] = list(_lines(data, "zeromem", questions, drawn, skill=skill, cap=k))
    whole = {system: _system(rows) for system, rows in written.items()}
    main = written.get("zeromem", [])
    if main:
        whole["zeromem"]["vs"] = {
            other: {"n": len(rows), **{measure: _versus(main, rows, measure) for measure in MEASURES}}
            for other, rows in written.items()
            if other != "zeromem" and "@" not in other
        }
        whole["zeromem"]["calibration"] = _calibration(main)
        whole["no_answer_calibration"] = _system([{**row, "metrics": row["raw_metrics"]} for row in main])
    result = {
        "kind": "qa",
        "lines": f"{name}.jsonl" if lines else None,
        "command": f"zeromem eval qa made-up --data {split}.jsonl --reader embedded --json {name}.json",
        "dataset": "made-up",
        "split": split,
        "context": context,
        "sha256": "0" * 64,
        "notes": ["every figure is made up: this run shows what a report looks like"],
        "categories": CATEGORIES,
        "questions": questions,
        "traces": len(data.traces) * -(-questions // len(data.questions)),
        "reader": "embedded",
        "encoder": "minilm",
        "config": {"routing": {"rho": 0.6}, "calibration": {"top_k": 5}},
        "top_k": 5,
        "token_budget": None,
        "seed": seed,
        "limit": None,
        "device": "cpu",
        "commit": "0" * 40,
        "versions": {"python": "3.11", "torch": "2.11"},
        "threads": 2,
        "unavailable": {"mem0": "it is not installed"},
        "labels": LABELS,
        "systems": whole,
        **(change or {}),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if lines:
        head = {"head": {"format": 1, "dataset": "made-up", "reader": "embedded"}}
        rows = [head, *(row for rows in written.values() for row in rows)]
        path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def conversations() -> Dataset:
    return load_dataset("jsonl", DEMO)


def _lines(
    data: Dataset, system: str, questions: int, drawn: random.Random, *, skill: float | None = None, cap: int = 5
) -> Iterator[dict[str, Any]]:
    by_id = {trace.id: trace for trace in data.traces}
    name = system if skill is None else f"zeromem@{cap}"
    finds, says = SKILL[system] if skill is None else (skill, SKILL[system][1])
    for number in range(questions):
        question = data.questions[number % len(data.questions)]
        gold = [by_id[trace] for trace in question.evidence]
        others = [t for t in data.traces if t.boundary == question.boundary and t not in gold]
        found = drawn.random() < finds
        handed = [*(gold if found else gold[1:]), *drawn.sample(others, 8)][:cap]
        drawn.shuffle(handed)
        told = " ".join(trace.text for trace in handed)
        holds = answer_in_evidence(told, question.answers)
        rank = drawn.randint(1, 5) if holds else drawn.randint(6, 50)
        raw, answer, rule = _answer(question, drawn, says if holds else says * 0.3)
        yield {
            "id": f"{question.id}-{number}",
            "system": name,
            "boundary": question.boundary,
            "question": question.text,
            "category": _KINDS.get(question.category, "4"),
            "gold": list(question.answers),
            "gold_evidence": list(question.evidence),
            **_route(system, question),
            "evidence": [_item(trace, rank, system in VIEWS, drawn) for rank, trace in enumerate(handed)],
            "rankings": _rankings([*gold, *others], drawn) if system in VIEWS else {},
            "prompt_sha256": f"{drawn.getrandbits(256):064x}",
            "raw": raw,
            "answer": answer,
            "rule": rule,
            "explanation": "" if answer == raw else f"{raw!r} became {answer!r}",
            "answer_evidence": [trace.id for trace in gold if trace in handed],
            "supported": holds,
            "error": "" if drawn.random() > 0.01 else "the server said 503 four times",
            "metrics": measures(answer, question.answers),
            "raw_metrics": measures(raw, question.answers),
            "in_evidence": {
                "handed": int(holds),
                "tokens": {"256": int(holds), "512": int(holds), "1024": int(holds or drawn.random() < 0.3)},
                "k": [int(k >= rank) for k in range(1, 21)],
            },
            "tokens": {
                "evidence": 34 * len(handed),
                "prompt": 90 + 40 * len(handed),
                "completion": 6,
                "calls": 1,
                "encoder": 61.5,
            },
            "seconds": {"build": 0.011, "search": 0.004, "read": 0.6},
            "memory_llm_calls": 0,
        }


def _answer(question: Question, drawn: random.Random, right: float) -> tuple[str, str, str]:
    gold = question.answers[0]
    if drawn.random() >= right:
        said = drawn.choice(_WRONG)
        return said, said, "kept"
    chance = drawn.random()
    if chance < 0.35:
        return f"The answer is {gold}.", gold, "phrase: words around it removed"
    if chance < 0.42:
        return gold, gold.split()[0], "phrase: shortened to what is supported"
    return gold, gold, "kept"


def _route(system: str, question: Question) -> dict[str, Any]:
    if system not in VIEWS:
        return {"route": "none", "rho": 0.0, "reasons": [], "answer_types": ["phrase"], "subjects": []}
    return {
        "route": "relational" if question.category == "multi-hop" else "local",
        "rho": 0.6,
        "reasons": ["names two people" if question.category == "multi-hop" else "asks for one fact"],
        "answer_types": ["date"] if question.category == "when" else ["phrase"],
        "subjects": ["Ines"] if "Ines" in question.text else [],
    }


def _item(trace: Trace, rank: int, views: bool, drawn: random.Random) -> dict[str, Any]:
    score = max(0.0, 0.95 - 0.11 * rank - 0.05 * drawn.random())
    return {
        "trace_id": trace.id,
        "start": 0,
        "end": len(trace.text),
        "text": trace.text,
        "score": score,
        "views": {"graph": score * drawn.random(), "hierarchy": score} if views else {},
        "parts": {"fused": score} if views else {},
        "reason": "main" if rank < 4 else "neighbour",
        "source": None,
        "title": trace.title,
        "speaker": trace.speaker,
        "time": trace.time.isoformat() if trace.time else None,
        "session": trace.session,
        "tokens": len(trace.text.split()),
        "boundary": trace.boundary,
        "relevance": score,
    }


def _rankings(traces: Sequence[Trace], drawn: random.Random) -> dict[str, list[dict[str, Any]]]:
    def best(view: str) -> list[dict[str, Any]]:
        chosen = drawn.sample(traces[:12], min(5, len(traces)))
        return [{"trace_id": t.id, "score": 0.97 - 0.13 * at, "text": t.text[:120]} for at, t in enumerate(chosen)]

    return {view: best(view) for view in ("graph", "hierarchy", "fused")}


def _system(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = sorted({row["category"] for row in rows})
    overall = _summary(rows)
    zero = np.zeros(len(rows))
    if len(rows) >= 20:
        values = {measure: _values(rows, measure) for measure in MEASURES}
        tests = {measure: paired_bootstrap(scores, zero, 2000) for measure, scores in values.items()}
        overall["interval"] = {measure: [test["low"], test["high"]] for measure, test in tests.items()}
    return {
        "overall": overall,
        "by_category": {key: _summary([row for row in rows if row["category"] == key]) for key in keys},
        "weighted": None,
        "calibration": {},
        "vs": {},
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(field: str, kind: str) -> dict[str, float]:
        return {name: float(np.mean([row[field][kind][name] for row in rows])) for name in rows[0][field][kind]}

    by_k = np.mean([row["in_evidence"]["k"] for row in rows], axis=0)
    return {
        "n": len(rows),
        "f1": mean("metrics", "f1"),
        "bleu1": mean("metrics", "bleu1"),
        "raw_f1": mean("raw_metrics", "f1"),
        "raw_bleu1": mean("raw_metrics", "bleu1"),
        "answer_in_evidence": float(np.mean([row["in_evidence"]["handed"] for row in rows])),
        "answer_in_evidence_at": mean("in_evidence", "tokens"),
        "answer_in_evidence_k": by_k.tolist(),
        "reader_tokens": sum(row["tokens"]["prompt"] + row["tokens"]["completion"] for row in rows),
        "evidence_tokens": float(np.mean([row["tokens"]["evidence"] for row in rows])),
        "encoder_tokens": 61.5 * len(rows),
        "memory_llm_tokens": 0,
        "seconds": 0.015 * len(rows),
        "read_seconds": 0.6 * len(rows),
        "errors": sum(bool(row["error"]) for row in rows),
        "unsupported": sum(not row["supported"] for row in rows),
    }


def _values(rows: Sequence[Mapping[str, Any]], measure: str) -> list[float]:
    if measure == "answer_in_evidence":
        return [row["in_evidence"]["handed"] for row in rows]
    return [row["metrics"][measure]["gam"] for row in rows]


def _versus(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], measure: str) -> dict[str, float]:
    return paired_bootstrap(_values(rows, measure), _values(others, measure), 2000)


def _calibration(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    changed = [row for row in rows if row["answer"] != row["raw"]]
    raw = [{**row, "metrics": row["raw_metrics"]} for row in rows]
    gain = {row["id"]: row["metrics"]["f1"]["gam"] - row["raw_metrics"]["f1"]["gam"] for row in changed}
    rules = sorted({row["rule"] for row in changed})
    by_rule = {rule: [gain[row["id"]] for row in changed if row["rule"] == rule] for rule in rules}
    return {
        **{measure: _versus(rows, raw, measure) for measure in ("f1", "bleu1")},
        "changed": len(changed),
        "by_rule": {rule: {"n": len(gains), "f1_diff": float(np.mean(gains))} for rule, gains in by_rule.items()},
    }


if __name__ == "__main__":
    from zeromem_torch.evaluation.report import build_report

    folder, size = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 360
    plain = write_run(folder, "conversations", questions=size, sweep=True)
    few = ("zeromem", "bm25", "dense", "rag")
    long = [
        write_run(
            folder, f"long-{length}", systems=few, questions=90, split=f"long-{length}", context=length, seed=seed
        )
        for seed, length in enumerate(("56k", "224k", "448k"))
    ]
    (folder / "report.html").write_text(build_report([plain, *long]), encoding="utf-8")
