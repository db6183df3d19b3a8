"""Who spent which tokens: the reader's, the encoder's, and those of memory operations, which must stay zero.

That memory operations call no language model is not taken on trust: they run marked as such, and a reader handed out
through the ledger counts every call that reaches it from inside of one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from zeromem_torch.evidence import Evidence
from zeromem_torch.reader.protocol import Reader, Reply

_INSIDE: ContextVar[bool] = ContextVar("inside a memory operation", default=False)


@dataclass
class Ledger:
    """Counts since the memory was opened."""

    reader_calls: int = 0
    reader_tokens: int = 0  # prompt and completion, by the reader's tokenizer
    encoder_tokens: int = 0  # of traces and queries that were encoded, by the encoder's
    memory_llm_calls: int = 0
    memory_llm_tokens: int = 0

    @contextmanager
    def memory_operation(self) -> Iterator[None]:
        """Marks what runs inside as an operation of the memory."""
        before = _INSIDE.set(True)
        try:
            yield
        finally:
            _INSIDE.reset(before)

    def metered(self, reader: Reader) -> Reader:
        """The reader, with what it spends written here."""
        return _Metered(reader, self)


class _Metered:
    def __init__(self, reader: Reader, ledger: Ledger) -> None:
        self.name, self.context_tokens = reader.name, reader.context_tokens
        self._reader, self._ledger = reader, ledger

    def count(self, texts: Sequence[str]) -> list[int]:
        return self._reader.count(texts)

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        inside, ledger = _INSIDE.get(), self._ledger
        if inside:  # counted before it answers: a call that fails was made all the same
            ledger.memory_llm_calls += max(1, len(questions))
        replies = self._reader.read(questions, evidence, token_budget=token_budget)
        for reply in replies:
            spent = reply.usage.prompt_tokens + reply.usage.completion_tokens
            ledger.reader_calls += reply.usage.calls
            ledger.reader_tokens += spent
            ledger.memory_llm_tokens += spent * inside
        return replies
