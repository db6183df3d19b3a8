"""Runs as `run_qa` leaves them: the figures of its JSON, and its lines, one for each system and question."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

from zeromem_torch.substrate.traces import ZeroMemError

MAIN = "zeromem"
RIGHT = 0.5  # F1 from which an answer counts as right, where answers are sorted into right and wrong
CONVENTION = "gam"  # the paper's

# Why an answer is wrong, the first that applies.
MISSES = {
    "reader failed": "no answer came back; a resumed run asks again",
    "lowered by calibration": "the reader's own answer was right",
    "overlooked": "the answer stands in the evidence handed over, and the reader said something else",
    "to be inferred": "labelled evidence was handed over, but the answer is not in it word for word",
    "ranked too low": "labelled evidence is among the best of a view, and was not handed over",
    "not found": "the evidence handed over does not hold the answer, nor anything that is labelled",
}


@dataclass(frozen=True)
class Run:
    name: str  # as the report prints it
    result: Mapping[str, Any]  # the JSON of `run_qa`
    lines: Sequence[Mapping[str, Any]]  # the last line of each system and question; none if the file is gone
    file: str

    @property
    def systems(self) -> Mapping[str, Any]:
        """Without those of another cap ("zeromem@10"), which only the budget's figure shows."""
        return {name: system for name, system in self.result["systems"].items() if "@" not in name}

    @property
    def context(self) -> str | None:
        """Length of a long context: "56K", "224K" or "448K"; None for other data."""
        context: str | None = self.result.get("context")
        return context.upper() if context else None

    def label(self, system: str) -> str:
        return str(self.result.get("labels", {}).get(system, system))

    @cached_property
    def short(self) -> Mapping[str, str]:
        """Labels of the systems where there is little room, no two the same."""
        labels = {name: shorten(self.label(name).partition(",")[0], 28, placeholder="…") for name in self.systems}
        counts = Counter(labels.values())
        return {name: label if counts[label] == 1 else name for name, label in labels.items()}

    def category(self, key: str) -> str:
        """LoCoMo's number and name: tables of other projects permute the names."""
        name = self.result["categories"].get(key, key)
        return key if name == key else f"{key} {name}"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Raises ZeroMemError where a file is not the JSON of a run, or a line of its lines cannot be read."""
    if not paths:
        raise ZeroMemError.of("runs", "at least one", "none", "name the JSON of `zeromem eval qa ... --json OUT`")
    results = [_result(path) for path in paths]
    short = [f"{r['dataset']} ({r['split']}), {r['reader']}" for r in results]
    names = [f"{name}: {path.stem}" if short.count(name) > 1 else name for name, path in zip(short, paths, strict=True)]
    return [
        Run(name, result, _lines(path, result.get("lines")), path.name)
        for name, result, path in zip(names, results, paths, strict=True)
    ]


def miss_of(line: Mapping[str, Any]) -> str:
    """A key of MISSES; "" for an answer that is right, or that has no gold answer to be measured by."""
    score, raw = scores_of(line)
    if score is None or score >= RIGHT:
        return ""
    if line["error"]:
        return "reader failed"
    if raw is not None and raw >= RIGHT:
        return "lowered by calibration"
    if line["in_evidence"].get("handed"):
        return "overlooked"
    gold = set(line["gold_evidence"])
    if gold & {item["trace_id"] for item in line["evidence"]}:
        return "to be inferred"
    seen = {item["trace_id"] for ranked in line["rankings"].values() for item in ranked}
    return "ranked too low" if gold & seen else "not found"


def scores_of(line: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """F1 after and before calibration."""
    after, before = (line[name].get("f1", {}).get(CONVENTION) for name in ("metrics", "raw_metrics"))
    return after, before


def _result(path: Path) -> Mapping[str, Any]:
    advice = "name the JSON of `zeromem eval qa ... --json OUT`"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ZeroMemError.of(str(path), "a file that can be read", error.strerror, "check the path") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ZeroMemError.of(str(path), "JSON", f"another text ({error})", advice) from error
    kind = result.get("kind", "none") if isinstance(result, dict) else "no object"
    if kind != "qa":
        raise ZeroMemError.of(f"{path}, kind", '"qa"', kind, advice)
    written = json.dumps(result, ensure_ascii=False).encode("utf-8", "replace")  # half a surrogate pair becomes a "?"
    return dict(json.loads(written))


def _lines(path: Path, name: str | None) -> list[Mapping[str, Any]]:
    beside = path.with_name(Path(name).name) if name else None
    if beside is None or not beside.exists():
        return []
    last: dict[tuple[str, str], Mapping[str, Any]] = {}
    for line in _parsed(beside):
        if "head" not in line:
            last[line["system"], line["id"]] = line
    return list(last.values())


def _parsed(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return  # a run was killed as it wrote this: the question has no answer yet
            try:
                line = json.loads(raw)
                whole = "head" in line or {"system", "id"} <= line.keys()
            except (ValueError, TypeError, AttributeError):
                whole = False
            if not whole:
                expected, advice = "a line of `zeromem eval qa`", "run it again: it answers what is missing"
                raise ZeroMemError.of(f"{path}:{number}", expected, raw[:60].decode(errors="replace"), advice)
            yield line
