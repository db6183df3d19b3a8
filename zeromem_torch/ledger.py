"""What memory and reader spend, counted where it is spent; and the guard that no memory operation asks a reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeromem_torch.errors import ZeroMemError

if TYPE_CHECKING:  # readers need this module, and no PyTorch
    from zeromem_torch.substrate.encoder import Encoded, Encoder

_operating: ContextVar[tuple[Ledger, ...]] = ContextVar("ledgers of the memory operations that run here", default=())


@dataclass
class Ledger:
    """Tokens spent, each kind by its own tokenizer.

    ``memory_llm_calls`` counts questions put to a reader while an operation of the memory ran. Each was refused with an
    error, so no token was spent on it.
    """

    memory_llm_calls: int = 0
    reader_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    encoder_tokens: int = 0

    @property
    def reader_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @contextmanager
    def operation(self) -> Iterator[None]:
        """An operation of the memory runs here (in this thread or task): readers refuse to be asked."""
        before = _operating.set((*_operating.get(), self))
        try:
            yield
        finally:
            _operating.reset(before)


def refuse_in_operations(questions: int) -> None:
    """Every reader calls this before it spends a token."""
    if ledgers := _operating.get():
        for ledger in ledgers:
            ledger.memory_llm_calls += questions
        expected, advice = "no call during memory operations", "no step before the final answer may use an LLM"
        raise ZeroMemError.of("reader", expected, f"{questions} questions", advice)


class MeteredEncoder:
    """An encoder whose tokens go into a ledger; in all else it is the encoder it was given."""

    def __init__(self, encoder: Encoder, ledger: Ledger | None = None) -> None:
        self.encoder = encoder
        self.ledger = Ledger() if ledger is None else ledger

    @property
    def tokens(self) -> int:
        return self.ledger.encoder_tokens

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        encoded = self.encoder.encode(texts, states=states)
        self.ledger.encoder_tokens += int(encoded.counts.sum())
        return encoded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["encoder"], name)
