"""The serialization boundary: when may the text of an entry enter a model's context, and how much of it?

                    simple task               complex task
    confident       the handle, always        the handle, unless the policy says otherwise
    unsure          the handle, unless ...    an extract within the budget

What enters is the value or sentences of it, never a text that was generated. `force_context` overrides the table, and
never the budget: a context has no more room because a caller insists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from zeromem_torch.handles.entry import Entry
from zeromem_torch.handles.handle import Handle
from zeromem_torch.substrate.tokenizer import STOP_WORDS, sentence_spans, tokenize
from zeromem_torch.substrate.traces import ZeroMemError

Counter = Callable[[str], int]
"""Tokens of a text, by the tokenizer of whoever reads it."""

GAP = " ... "
_PIECE = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class SerializationPolicy:
    """Where the lines of the table lie, and what the two mixed cases do. A value at a threshold is above it."""

    high_confidence: float = 0.7
    high_complexity: float = 0.5
    when_confident_and_complex: bool = False  # True: an extract enters
    when_unsure_and_simple: bool = False
    extract_tokens: int | None = None  # at most so many of one entry; None: whatever the budget leaves

    def __post_init__(self) -> None:
        _check_share("high_confidence", self.high_confidence)
        _check_share("high_complexity", self.high_complexity)
        check_tokens("extract_tokens", self.extract_tokens)


@dataclass(frozen=True)
class Decision:
    """What was decided of one entry, and why."""

    handle: Handle
    serialize: bool
    text: str  # what enters the context; "" while the handle stands
    tokens: int  # of that text
    reason: str
    forced: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "handle": str(self.handle)}


def serialize_if(
    entry: Entry,
    *,
    context_budget_remaining: int | None,
    task_complexity: float,
    retrieval_confidence: float,
    policy: SerializationPolicy | None = None,
    query: str = "",
    force_context: bool = False,
    count: Counter | None = None,
) -> Decision:
    """Decide whether an entry's handle is enough, or text of it must enter the context.

    Complexity and confidence lie in [0, 1]. A budget of None is no limit. With a ``query`` an extract is the sentences
    that share most words with it, else the first ones. Without ``count`` a word or a mark is a token, which is an
    estimate: pass the reader's tokenizer. Nothing is logged here: `MemoryManager.serialize` does.
    """
    policy = policy or SerializationPolicy()
    check_tokens("context_budget_remaining", context_budget_remaining, zero_ok=True)
    confident = _check_share("retrieval_confidence", retrieval_confidence) >= policy.high_confidence
    complex_ = _check_share("task_complexity", task_complexity) >= policy.high_complexity
    case = f"{'confident' if confident else 'unsure'} and {'complex' if complex_ else 'simple'}"
    wanted = {
        (True, False): False,
        (True, True): policy.when_confident_and_complex,
        (False, False): policy.when_unsure_and_simple,
        (False, True): True,
    }[confident, complex_]
    if not (wanted or force_context):
        return Decision(entry.handle, False, "", 0, f"{case}: the handle stands")
    forced = not wanted
    case = f"{case}, forced" if forced else case
    limits = [limit for limit in (context_budget_remaining, policy.extract_tokens) if limit is not None]
    text, tokens = extract(entry, min(limits, default=None), count or estimate, query)
    if not text:
        return Decision(entry.handle, False, "", 0, f"{case}: nothing of it fits in {min(limits)} tokens", forced)
    part = "the value" if text == entry.text else "an extract"
    return Decision(entry.handle, True, text, tokens, f"{case}: {part} enters", forced)


def extract(entry: Entry, budget: int | None, count: Counter, query: str = "") -> tuple[str, int]:
    """The value, or whole sentences of it in their order, and its tokens, at most ``budget``; ("", 0) if none fits.

    Where sentences are left out between two others stands " ... ". JSON is not cut: half of it says something else.
    """
    text = entry.text
    whole = count(text)
    if budget is None or whole <= budget:
        return text, whole
    if not isinstance(entry.value, str):
        return "", 0
    spans = sentence_spans(text)
    ranked, any_place = _ranked(text, spans, query)
    chosen: list[int] = []
    left = budget
    for number in ranked:
        if left < 1:
            break
        start, end = spans[number]
        if (cost := count(text[start:end])) <= left:
            chosen.append(number)
            left -= cost
        elif not any_place:
            break
    while chosen:
        joined = _joined(text, [spans[number] for number in sorted(chosen)])
        if (tokens := count(joined)) <= budget:  # a tokenizer may count a whole otherwise than its parts
            return joined, tokens
        chosen.pop()
    return "", 0


def estimate(text: str) -> int:
    return sum(1 for _ in _PIECE.finditer(text))


def _ranked(text: str, spans: list[tuple[int, int]], query: str) -> tuple[list[int], bool]:
    """Sentences that share words with the query, best first, or all in order; and whether gaps between are meant."""
    asked = set(tokenize(query)) - STOP_WORDS if query else set()
    shared = [len(asked & set(tokenize(text[start:end]))) for start, end in spans] if asked else []
    if not any(shared):
        return list(range(len(spans))), False
    return [number for number in sorted(range(len(spans)), key=lambda n: -shared[n]) if shared[number]], True


def _joined(text: str, spans: list[tuple[int, int]]) -> str:
    """Spans as they stand in the text, with a mark where something between them was left out."""
    joined, last = "", None
    for start, end in spans:
        if last is not None:
            between = text[last:start]
            joined += GAP if between.strip() else between
        joined += text[start:end]
        last = end
    return joined


def _check_share(name: str, value: float) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1
    if not fits:
        raise ZeroMemError.of(name, "a number in [0, 1]", value, "0 is none at all, 1 the most there is")
    return value


def check_tokens(name: str, value: int | None, *, zero_ok: bool = False) -> None:
    least = 0 if zero_ok else 1
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ZeroMemError.of(name, f"a whole number of at least {least}, or None", value, "None is no limit")
