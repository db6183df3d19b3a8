"""What a benchmark gives: questions over the traces of their boundaries, and what was done to get them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from zeromem_torch.substrate.traces import Trace


@dataclass(frozen=True, slots=True)
class Question:
    """A question put to one boundary. No evidence means that none is usable: recall leaves the question out."""

    id: str
    boundary: str
    text: str
    evidence: tuple[str, ...]  # ids of traces of the same boundary, each once
    answers: tuple[str, ...] = ()
    category: str = ""
    time: datetime | None = None


@dataclass(frozen=True)
class Dataset:
    name: str
    split: str  # the file's name without its suffixes
    traces: tuple[Trace, ...]
    questions: tuple[Question, ...]
    categories: Mapping[str, str]  # as printed: "1" -> "multi-hop"
    sha256: str  # of the data file's bytes as stored, followed by the corpus file's if one was given
    notes: tuple[str, ...]  # what was repaired or dropped, in words with counts


class Parts(NamedTuple):
    """What a loader makes of a file; `load_dataset` makes the rest of a Dataset."""

    traces: Sequence[Trace]
    questions: Sequence[Question]
    categories: Mapping[str, str]
    notes: list[str]


def answers_of(values: Iterable[Any]) -> tuple[str, ...]:
    """Answers as text, each once; an absent one is none."""
    return tuple(dict.fromkeys(str(value) for value in values if value is not None and str(value).strip()))


def categories_of(questions: Iterable[Question]) -> dict[str, str]:
    """The categories that occur, by their own names."""
    return {category: category for category in sorted({q.category for q in questions} - {""})}


def counted(counts: Mapping[str, int]) -> list[str]:
    """Notes of what happened at least once."""
    return [f"{count} {what}" for what, count in counts.items() if count]


def without_evidence(questions: Iterable[Question]) -> int:
    return sum(not q.evidence for q in questions)


def unused(name: str, used: set[str]) -> str:
    """`name`, or the first of name#2, name#3, ... that is free; it is then taken."""
    free, number = name, 1
    while free in used:
        number += 1
        free = f"{name}#{number}"
    used.add(free)
    return free
