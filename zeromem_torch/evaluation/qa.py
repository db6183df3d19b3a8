"""Question answering over a benchmark: every system's evidence to one reader, every answer kept, measured and compared.

A run appends a JSON line for each answer, on disk before the next is asked, and goes on where it was stopped: an answer
that was kept is never asked for again. While evidence is sought the reader is shut, so that no memory operation can
spend one of its tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from zeromem_torch.calibration.answer import NOT_IN_MEMORY, Answer, AnswerCalibration
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.evaluation.adapters import ADAPTERS
from zeromem_torch.evaluation.answers import answer_in_evidence, measures
from zeromem_torch.evaluation.datasets import Dataset, Question
from zeromem_torch.evaluation.long_context import CONTEXTS
from zeromem_torch.evaluation.run import BUDGETS, provenance
from zeromem_torch.evaluation.scores import summary
from zeromem_torch.evaluation.systems import (
    CHUNKED,
    MAIN,
    RAG_CHUNK,
    RAW,
    Cost,
    Found,
    Ground,
    Piece,
    parse_system,
    shown,
)
from zeromem_torch.evidence import Evidence
from zeromem_torch.reader.metered import MeteredReader
from zeromem_torch.reader.protocol import Reader, Reply, Usage
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.traces import ZeroMemError

FORMAT = 1
TOGETHER = 8_192
"""Traces whose memories are held at once: a LoCoMo file whole, long contexts a few at a time."""
AT_ONCE = 32
"""Questions that are read between two writes: what a killed run may have to ask again."""
SAMPLE = 100
"""Questions that LONG-LLM is asked: each takes a call for every window of the whole conversation."""


class AnswerLog:
    """The lines of a run by system and question; with a path they are on disk when `add` returns."""

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self.path = path
        self.lines: dict[tuple[str, str], dict[str, Any]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_bytes() if path.exists() else b""
        whole = kept[: kept.rfind(b"\n") + 1]  # behind it stands what a killed run had begun to write
        rows = [self._parsed(row, number) for number, row in enumerate(whole.splitlines(), start=1)]
        if rows:
            self._check(rows[0].get("head"), head)
        for row in rows[1:]:
            self.lines[row["system"], row["id"]] = row
        if len(whole) < len(kept):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        if not rows:
            self._write([{"head": head}])

    def answered(self, system: str, question: str) -> bool:
        line = self.lines.get((system, question))
        return line is not None and not line["error"]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        if self.path is not None:
            self._write(rows)
        self.lines |= {(row["system"], row["id"]): row for row in rows}

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self.path is not None
        with self.path.open("ab") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())

    def _parsed(self, row: bytes, number: int) -> dict[str, Any]:
        try:
            parsed = json.loads(row)
            if isinstance(parsed, dict) and (number == 1) == ("head" in parsed):
                return parsed
        except ValueError:
            pass
        expected, advice = "a line that a run wrote", "name another file, or remove this one"
        raise ZeroMemError.of(f"{self.path} line {number}", expected, row[:60].decode(errors="replace"), advice)

    def _check(self, kept: Any, head: Mapping[str, Any]) -> None:
        other = [key for key, value in head.items() if not isinstance(kept, dict) or kept.get(key) != value]
        if other:
            expected = "answers of this run, to go on with"
            raise ZeroMemError.of(
                str(self.path), expected, f"those of a run with another {', '.join(other)}", "name another file"
            )


def run_qa(
    data: Dataset,
    systems: Sequence[str],
    reader: Reader,
    encoder: Encoder,
    config: ZeroMemConfig | None = None,
    *,
    out: Path | None = None,
    token_budget: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    at_once: int = AT_ONCE,
) -> dict[str, Any]:
    """Ask every question once for each system, and measure the answers; the result is JSON, as the report reads it.

    Questions without a gold answer are left out. ``limit`` draws so many of the others with the seed, so that every
    conversation and category may have some. ``token_budget`` limits the evidence in a prompt, by the reader's count.

    ``out``: the file of answers (JSONL). One that is there is gone on with, and must be of the same data, reader,
    encoder and settings; systems and questions may be added to it. Its answers are calibrated anew, as calibration may
    have changed since: that takes no reader.
    """
    config = config or ZeroMemConfig()
    top_k = config.calibration.top_k
    named = {name: parse_system(name, top_k) for name in dict.fromkeys(systems)}
    if not named:
        raise ZeroMemError.of("systems", "at least one", None, "name some, such as zeromem,bm25")
    if RAW in named and MAIN not in named:
        raise ZeroMemError.of("systems", f"{MAIN} beside {RAW}", ", ".join(named), f"add {MAIN}: its answers are used")
    unavailable = {
        name: why for name, (base, _) in named.items() if base in ADAPTERS and (why := ADAPTERS[base].available())
    }
    asked = {name: named[name] for name in named if name not in unavailable and name != RAW}
    questions, notes = _chosen(data, limit, seed)
    metered = reader if isinstance(reader, MeteredReader) else MeteredReader(reader)
    room = token_budget or metered.context_tokens * 3 // 4
    head = {
        "format": FORMAT, "dataset": data.name, "split": data.split, "sha256": data.sha256, "reader": metered.name,
        "encoder": encoder.fingerprint, "config": json.loads(json.dumps(config.to_dict())), "top_k": top_k,
        "token_budget": token_budget, "answers": "abstain=False", "seed": seed,
    }  # fmt: skip
    del head["config"]["compute"]  # which does not change what is found
    log = AnswerLog(out, head)
    log.add(_calibrated_anew(list(log.lines.values()), data.name))
    sample = {q.id for q in _sampled(questions, SAMPLE, seed)}
    labels: dict[str, str] = {}
    runner = _Runner(data, metered, log, token_budget, at_once)
    with tqdm(total=len(questions) * len(asked), desc="answers", unit="answer", disable=None) as bar:
        for group in _groups(data, questions):
            boundaries = {question.boundary for question in group}
            traces = [trace for trace in data.traces if trace.boundary in boundaries]
            ground = Ground(traces, encoder, config, metered.count, room, device)
            for name, (base, cap) in asked.items():
                wanted = [q for q in group if base != "long_llm" or q.id in sample]
                if base in CHUNKED:
                    labels[name] = _label(base, ground, len(sample), len(questions))
                runner.answer(name, base, cap, ground, wanted)
                bar.update(len(group))
    lines = {name: [log.lines[name, q.id] for q in questions if (name, q.id) in log.lines] for name in asked}
    if RAW in named:
        lines[RAW] = [
            {**line, "system": RAW, "answer": line["raw"], "metrics": line["raw_metrics"]} for line in lines[MAIN]
        ]
    context = data.split.rpartition("-")[2]
    return {
        "kind": "qa",
        "lines": None if out is None else out.name,
        "command": None,
        **{key: head[key] for key in ("dataset", "split", "sha256")},
        "context": context if context in CONTEXTS else None,
        "notes": [*data.notes, *notes],
        "categories": dict(data.categories),
        "questions": len(questions),
        "traces": len(data.traces),
        **{key: head[key] for key in ("reader", "encoder", "config", "top_k", "token_budget", "seed")},
        "limit": limit,
        "device": device,
        **provenance(),
        "unavailable": unavailable,
        "labels": _LABELS | labels,
        "systems": summary({name: lines[name] for name in named if name in lines}, data.name),
    }


class _Runner:
    """Answers what has no answer yet."""

    def __init__(
        self, data: Dataset, reader: MeteredReader, log: AnswerLog, token_budget: int | None, at_once: int
    ) -> None:
        self.data, self.reader, self.log = data, reader, log
        self.token_budget, self.at_once = token_budget, at_once
        self.calibration = AnswerCalibration()

    def answer(self, name: str, base: str, cap: int, ground: Ground, group: Sequence[Question]) -> None:
        pending = [question for question in group if not self.log.answered(name, question.id)]
        if not pending:
            return
        ledger, before = self.reader.ledger, self.reader.ledger.memory_llm_calls
        with ledger.operation():
            found, cost = ground.find(base, cap, pending)
        calls = None if base in ADAPTERS else ledger.memory_llm_calls - before
        spent = _shares(cost, len(group), len(pending))
        for start in range(0, len(pending), self.at_once):
            some, of_some = pending[start : start + self.at_once], found[start : start + self.at_once]
            chosen = self._read_windows(some, of_some) if base == "long_llm" else self._read(some, of_some)
            self.log.add(
                [
                    {**self._line(question, name, *read, cut=base == "rag", spent=spent), "memory_llm_calls": calls}
                    for question, read in zip(some, chosen, strict=True)
                ]
            )

    def _read(self, questions: Sequence[Question], found: Sequence[Found]) -> list[tuple[Found, Reply, Answer]]:
        texts, evidence = [q.text for q in questions], [one.evidence for one in found]
        start = time.perf_counter()
        replies = self.reader.read(texts, evidence, token_budget=self.token_budget)
        share = (time.perf_counter() - start) / max(1, len(texts))  # a batch is read as one
        return [
            (one, dataclasses.replace(reply, seconds=share), self.calibration.calibrate(text, reply.text, one.evidence))
            for text, one, reply in zip(texts, found, replies, strict=True)
        ]

    def _read_windows(self, questions: Sequence[Question], found: Sequence[Found]) -> list[tuple[Found, Reply, Answer]]:
        """LONG-LLM: one reply a window; the reader's surest counts or, where it gives no confidence, the first that
        its window supports. A window that holds nothing declines, and does not count."""
        chosen = []
        for question, one in zip(questions, found, strict=True):
            windows = [dataclasses.replace(one, evidence=window) for window in one.windows]
            read = self._read([question] * len(windows), windows)
            usage = sum((reply.usage for _, reply, _ in read), Usage(0, 0, 0))
            seconds = sum(reply.seconds for _, reply, _ in read)
            told = [entry for entry in read if not entry[1].error and entry[2].text not in ("", NOT_IN_MEMORY)]
            sure = [entry for entry in told if entry[1].logprob is not None]
            if sure:
                best = max(sure, key=lambda entry: entry[1].logprob or 0.0)
            else:
                supported = [entry for entry in told if entry[2].supported]
                fine = [entry for entry in read if not entry[1].error]
                best = (supported or told or fine or read)[0]
            chosen.append((best[0], dataclasses.replace(best[1], usage=usage, seconds=seconds), best[2]))
        return chosen

    def _line(
        self,
        question: Question,
        system: str,
        found: Found,
        reply: Reply,
        answer: Answer,
        *,
        cut: bool,
        spent: tuple[dict[str, float], float],
    ) -> dict[str, Any]:
        category = question.category if self.data.name == "locomo" else ""
        if reply.error:
            answer = dataclasses.replace(answer, text="")
        evidence = found.evidence.to_dict()
        seconds, encoder_tokens = spent
        return {
            "id": question.id,
            "system": system,
            "boundary": question.boundary,
            "question": question.text,
            "category": question.category,
            "gold": list(question.answers),
            "gold_evidence": list(question.evidence),
            **{key: evidence[key] for key in ("route", "rho", "reasons", "answer_types", "subjects")},
            "evidence": [{k: v for k, v in item.items() if k != "explanation"} for item in evidence["items"]],
            "rankings": found.rankings,
            "prompt_sha256": reply.prompt_sha256,
            "raw": reply.text,
            **_answer_fields(answer, question.answers, category),
            "error": reply.error,
            "raw_metrics": measures(reply.text.strip(), question.answers, category),
            "in_evidence": _in_evidence(found, question.answers, cut),
            "tokens": {
                "evidence": found.evidence.tokens,
                "prompt": reply.usage.prompt_tokens,
                "completion": reply.usage.completion_tokens,
                "calls": reply.usage.calls,
                "encoder": encoder_tokens,
            },
            "seconds": {**seconds, "read": reply.seconds},
        }


def _calibrated_anew(lines: Sequence[Mapping[str, Any]], dataset: str) -> list[dict[str, Any]]:
    """Kept answers that are calibrated otherwise now; what the reader said is not asked for again."""
    calibration, changed = AnswerCalibration(), []
    for line in lines:
        if line["error"]:
            continue
        evidence = Evidence.from_dict({**line, "query": line["question"], "items": line["evidence"]})
        answer = calibration.calibrate(line["question"], line["raw"], evidence)
        fields = _answer_fields(answer, line["gold"], line["category"] if dataset == "locomo" else "")
        if any(line[name] != value for name, value in fields.items()):
            changed.append({**line, **fields})
    return changed


def _answer_fields(answer: Answer, gold: Sequence[str], category: str) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "rule": answer.rule,
        "explanation": answer.explanation,
        "answer_evidence": list(answer.evidence),
        "supported": answer.supported,
        "metrics": measures(answer.text, gold, category),
    }


def _chosen(data: Dataset, limit: int | None, seed: int) -> tuple[list[Question], list[str]]:
    questions = [question for question in data.questions if question.answers]
    notes = []
    if bare := len(data.questions) - len(questions):
        notes.append(f"{bare} of {len(data.questions)} questions have no gold answer: left out")
    if not questions:
        got = f"{len(data.questions)} without any"
        raise ZeroMemError.of("questions", "at least one with a gold answer", got, f"check the file of {data.name}")
    if limit is not None and limit < 1:
        raise ZeroMemError.of("limit", "at least 1", limit, "leave it out to ask every question")
    if limit is not None and limit < len(questions):
        notes.append(f"{limit} of {len(questions)} questions, drawn with seed {seed}")
        questions = _sampled(questions, limit, seed)
    return questions, notes


def _sampled(questions: Sequence[Question], most: int, seed: int) -> list[Question]:
    """At most so many, drawn with the seed, in the order of the file."""
    if most >= len(questions):
        return list(questions)
    return [questions[i] for i in sorted(random.Random(seed).sample(range(len(questions)), most))]


def _groups(data: Dataset, questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Questions of boundaries whose memories are held at once."""
    sizes: dict[str, int] = {}
    for trace in data.traces:
        sizes[trace.boundary] = sizes.get(trace.boundary, 0) + 1
    by_boundary: dict[str, list[Question]] = {}
    for question in questions:
        by_boundary.setdefault(question.boundary, []).append(question)
    group: list[Question] = []
    held = 0
    for boundary, own in by_boundary.items():
        if group and held + sizes.get(boundary, 0) > TOGETHER:
            yield group
            group, held = [], 0
        group += own
        held += sizes.get(boundary, 0)
    yield group


def _shares(cost: Cost, group: int, pending: int) -> tuple[dict[str, float], float]:
    """A question's share: of building over all that the memory is asked, of searching over those that were."""
    seconds = {"build": cost.build_seconds / group, "search": cost.search_seconds / pending}
    return seconds, cost.build_tokens / group + cost.search_tokens / pending


def _in_evidence(found: Found, golds: Sequence[str], cut: bool) -> dict[str, Any]:
    """Whether the answer occurs in what was handed over, in what each token budget allows, and with each cap."""
    known: dict[str, bool] = {}

    def there(text: str) -> bool:
        if text not in known:
            known[text] = answer_in_evidence(text, golds)
        return known[text]

    return {
        "handed": int(any(there(shown(item)) for item in found.evidence)),
        "tokens": {
            str(budget): int(any(there(piece.text) for piece in _within(found.ranked, budget, cut)))
            for budget in BUDGETS
            if found.ranked
        },
        "k": [int(any(there(piece.text) for piece in top)) for top in found.tops],
    }


def _within(ranked: Sequence[Piece], budget: int, cut: bool) -> Iterator[Piece]:
    """What a budget of tokens hands over. A unit that does not fit is skipped for a later one; a chunk is ``cut``."""
    left = budget
    for piece in ranked:
        if piece.tokens <= left:
            left -= piece.tokens
            yield piece
        elif cut:
            yield Piece(piece.text[: len(piece.text) * left // piece.tokens], left)
            return


_LABELS = {
    "zeromem": "ZeroMem",
    "graph": "graph only",
    "hierarchy": "hierarchy only",
    "no_closure": "no closure",
    "no_calibration": "no evidence calibration",
    RAW: "no answer calibration",
    "linear_rag": "LinearRAG-style (ours)",
    "hippo_rag": "HippoRAG-style (ours, no LLM)",
}


def _label(base: str, ground: Ground, sample: int, questions: int) -> str:
    if base == "rag":
        fit = f", scaled down from {RAG_CHUNK:,} so that five fit the reader's {ground.room:,} tokens"
        short = fit if ground.chunk < RAG_CHUNK else ""
        return f"RAG, chunks of {ground.chunk:,} tokens{short}"
    some = f"; {sample} of {questions} questions" if sample < questions else ""
    return f"LONG-LLM, windows of {ground.window:,} tokens{some}"
