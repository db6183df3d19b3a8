"""The ledger of one context window: what handles kept out of it, and what entered."""

from __future__ import annotations

from threading import RLock

from zeromem_torch.handles.handle import Handle
from zeromem_torch.handles.serialization import Counter


class Ledger:
    """Tokens, by the counter given.

    An entry is kept out while its handle was shown and its text was not: that spares its value's tokens, less those of
    the handle, once in a session however often the handle is met. A value shorter than its handle counts against it.
    Counting waits until somebody asks, so that a lookup costs no tokenizer.
    """

    def __init__(self, count: Counter) -> None:
        self._count = count
        self._waiting: dict[Handle, str] = {}
        self._outside: dict[Handle, int] = {}
        self._inside: set[Handle] = set()
        self._lock = RLock()
        self.tokens_entered = 0
        self.tokens_forced = 0  # of these, what a caller insisted on

    def stood(self, handle: Handle, text: str) -> None:
        """A handle was shown, or resolved, in place of the text of its entry."""
        with self._lock:
            if handle not in self._inside and handle not in self._outside:
                self._waiting[handle] = text

    def entered(self, handle: Handle, tokens: int, *, forced: bool = False) -> None:
        with self._lock:
            self.changed(handle)
            self._inside.add(handle)
            self.tokens_entered += tokens
            self.tokens_forced += tokens if forced else 0

    def changed(self, handle: Handle) -> None:
        """Another value holds now, or none: what was said of the handle is void."""
        with self._lock:
            self._waiting.pop(handle, None)
            self._outside.pop(handle, None)
            self._inside.discard(handle)

    @property
    def tokens_kept_out(self) -> int:
        with self._lock:
            for handle, text in self._waiting.items():
                self._outside[handle] = self._count(text) - self._count(str(handle))
            self._waiting.clear()
            return sum(self._outside.values())

    @property
    def handles_standing(self) -> int:
        return len(self._outside) + len(self._waiting)

    def to_dict(self) -> dict[str, int]:
        return {
            "handles_standing": self.handles_standing,
            "tokens_kept_out": self.tokens_kept_out,
            "tokens_entered": self.tokens_entered,
            "tokens_forced": self.tokens_forced,
        }

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{name}={value}' for name, value in self.to_dict().items())})"
