"""What the page's list of questions is drawn from: every answer with its evidence, packed small."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

from zeromem_torch.evaluation.report.runs import MISSES, Run, miss_of, scores_of


def packed(runs: Sequence[Run]) -> str:
    """JSON, gzipped, in base64: text that no markup can end, a tenth of its size."""
    texts: dict[tuple[str, ...], int] = {}  # many systems hand over the same traces: each is written once
    questions: dict[tuple[int, str], dict[str, Any]] = {}
    for number, run in enumerate(runs):
        for line in run.lines:
            if line["system"] in run.systems:
                asked = questions.setdefault((number, line["id"]), _question(number, run, line))
                asked["rows"].append(_row(line, texts))
    for question in questions.values():
        order = list(runs[question["run"]].systems)
        question["rows"].sort(key=lambda row: order.index(row["system"]))
    data = {
        "runs": [_run(number, run, list(questions.values())) for number, run in enumerate(runs)],
        "traces": list(texts),
        "questions": list(questions.values()),
    }
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(written, mtime=0)).decode()


def _run(number: int, run: Run, questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [row for question in questions if question["run"] == number for row in question["rows"]]
    systems, kinds = {row["system"] for row in rows}, {row["miss"] for row in rows}
    categories = {question["category"] for question in questions if question["run"] == number} - {""}
    return {
        "name": run.name,
        "systems": [name for name in run.systems if name in systems],
        "categories": [(key, run.category(key)) for key in sorted(categories)],
        "misses": [kind for kind in MISSES if kind in kinds],
    }


def _question(number: int, run: Run, line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "run": number,
        "id": line["id"],
        "text": line["question"],
        "category": line["category"],
        "label": run.category(line["category"]),
        "gold": line["gold"],
        "evidence": line["gold_evidence"],
        "rows": [],
    }


def _row(line: Mapping[str, Any], texts: dict[tuple[str, ...], int]) -> dict[str, Any]:
    def place(item: Mapping[str, Any]) -> int:
        who, when = item.get("speaker") or item.get("title") or "", (item.get("time") or "")[:10]
        said = (item["trace_id"], who, when, item.get("session") or "", item["text"])
        return texts.setdefault(said, len(texts))

    def handed(item: Mapping[str, Any]) -> list[Any]:
        source = f" of {item['source']}" if item.get("source") else ""
        return [place(item), item.get("score"), item.get("views", {}), f"{item.get('reason', '')}{source}"]

    score, score_raw = scores_of(line)
    metrics, raw = line["metrics"], line["raw_metrics"]
    tokens, seconds = line["tokens"], line["seconds"]
    return {
        "system": line["system"],
        "answer": line["answer"],
        "raw": line["raw"],
        "rule": line["rule"],
        "explanation": line["explanation"],
        "supported": line["supported"],
        "cites": line["answer_evidence"],
        "error": line["error"],
        "score": score,
        "score_raw": score_raw,
        "miss": miss_of(line),
        "metrics": {"F1": metrics.get("f1"), "F1 before calibration": raw.get("f1"), "BLEU-1": metrics.get("bleu1")},
        "in_evidence": line["in_evidence"].get("handed"),
        "route": "" if line["route"] == "none" else line["route"],
        "rho": line["rho"],
        "reasons": line["reasons"],
        "answer_types": line["answer_types"],
        "subjects": line["subjects"],
        "evidence": [handed(item) for item in line["evidence"]],
        "rankings": {view: [[place(item), item["score"]] for item in best] for view, best in line["rankings"].items()},
        "evidence_tokens": tokens["evidence"],
        "reader_tokens": tokens["prompt"] + tokens["completion"],
        "memory_seconds": seconds["build"] + seconds["search"],
        "read_seconds": seconds["read"],
        "prompt": line["prompt_sha256"],
    }
