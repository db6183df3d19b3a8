"""A reader that keeps account of what it spends."""

from __future__ import annotations

from collections.abc import Sequence

from zeromem_torch.evidence import Evidence
from zeromem_torch.ledger import Ledger, refuse_in_operations
from zeromem_torch.reader.protocol import Reader, Reply


class MeteredReader:
    """A reader whose calls and tokens go into a ledger, and which no memory operation may ask."""

    def __init__(self, reader: Reader, ledger: Ledger | None = None) -> None:
        self.reader = reader
        self.ledger = Ledger() if ledger is None else ledger
        self.name, self.context_tokens = reader.name, reader.context_tokens

    def count(self, texts: Sequence[str]) -> list[int]:
        return self.reader.count(texts)

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        refuse_in_operations(len(questions))
        replies = self.reader.read(questions, evidence, token_budget=token_budget)
        for reply in replies:
            self.ledger.reader_calls += reply.usage.calls
            self.ledger.prompt_tokens += reply.usage.prompt_tokens
            self.ledger.completion_tokens += reply.usage.completion_tokens
        return replies
