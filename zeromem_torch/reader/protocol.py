"""What a reader is: the one stage that may spend tokens of a language model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeromem_torch.evidence import Evidence
from zeromem_torch.ledger import refuse_in_operations
from zeromem_torch.substrate.traces import ZeroMemError


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the reader's own tokenizer counts them; a call that failed counts as a call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.calls + other.calls,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one question. With an `error` there is no text; the usage is what was spent all the same."""

    text: str
    usage: Usage
    prompt_sha256: str
    error: str = ""
    seconds: float = 0.0  # from asking to having it; questions of one batch share theirs
    logprob: float | None = None  # mean over the tokens of the answer, natural log; None = the reader does not say


class Reader(Protocol):
    """Answers questions, each from its own evidence. One that fails gets a reply that says so; the others go on."""

    name: str
    context_tokens: int  # prompt and answer together

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without what a chat template adds. Spends nothing."""
        ...

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        """One reply a question, in order. `token_budget` bounds the evidence in a prompt; None = the context."""
        ...


def prompt_hash(messages: Sequence[Mapping[str, str]]) -> str:
    """Two prompts with one hash are one prompt."""
    return hashlib.sha256(json.dumps(list(messages), sort_keys=True).encode()).hexdigest()


def check_pairs(questions: Sequence[str], evidence: Sequence[Evidence]) -> None:
    """Refuse a call inside a memory operation, and one whose evidence cannot be told to its questions."""
    refuse_in_operations(1 if isinstance(questions, str) else len(questions))
    if isinstance(questions, str) or len(questions) != len(evidence):
        got = "one text" if isinstance(questions, str) else f"{len(questions)} and {len(evidence)}"
        raise ZeroMemError.of("questions", "a list with one evidence each", got, "pass both in the same order")
