"""How long a batch will take: fitted when the server starts, corrected by every batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from zeromem_torch.errors import ZeroMemError

ENOUGH_TO_FIT = 8
"""Batches after which a model that was never fitted is."""

Observation = tuple[float, float, float]
"""Tokens, bytes and seconds of a batch."""


class CostModel:
    """Seconds of a batch: ``correction * (fixed + per_token * tokens + per_byte * bytes)``.

    The three are fitted once, to errors relative to the seconds seen, so that small batches count as much as large
    ones; none is below 0. Afterwards each batch moves the correction by a part of what it was off.
    """

    def __init__(self, fixed: float = 0.0, per_token: float = 0.0, per_byte: float = 0.0, *, rate: float = 0.1) -> None:
        self.fixed, self.per_token, self.per_byte = fixed, per_token, per_byte
        self.rate = rate
        self.correction = 1.0
        self._seen: list[Observation] | None = [] if fixed == per_token == per_byte == 0 else None  # until it is fitted

    def fit(self, observations: Iterable[Observation]) -> None:
        """Non-negative least squares: the best of the seven plain ones whose coefficients are none below 0.

        The solution is the plain one on the columns it uses, so trying each set of columns finds it.
        """
        seen = np.array([(1.0, t, n, s) for t, n, s in observations if s > 0], dtype=np.float64).reshape(-1, 4)
        if not len(seen):
            raise ZeroMemError.of("observations", "batches that took some time", "none", "time a few batches")
        rows = seen[:, :3] / seen[:, 3:]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
        rows = rows / scale
        best, error = np.zeros(3), math.inf
        for columns in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
            solution = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
            left = float(np.square(rows[:, columns] @ solution - 1).sum())
            if (solution >= 0).all() and left < error - 1e-12:  # more columns only for a better fit
                best, error = np.zeros(3), left
                best[columns] = solution
        self.fixed, self.per_token, self.per_byte = map(float, best / scale)
        self.correction, self._seen = 1.0, None

    def observe(self, tokens: float, nbytes: float, seconds: float) -> None:
        """A batch took this long."""
        if seconds <= 0:
            return
        if self._seen is not None:
            self._seen.append((tokens, nbytes, seconds))
            if len(self._seen) >= ENOUGH_TO_FIT:
                self.fit(self._seen)
            return
        expected = self.predict(tokens, nbytes)
        off = min(max(seconds / expected, 0.1), 10.0) if expected > 0 else 1.0  # one stall must not refuse all
        self.correction *= 1 + self.rate * (off - 1)

    def predict(self, tokens: float, nbytes: float) -> float:
        """Seconds that a batch will take; 0 while nothing is known."""
        return self.correction * (self.fixed + self.per_token * tokens + self.per_byte * nbytes)

    def part(self, tokens: float, nbytes: float, share: float) -> float:
        """Seconds, before correction, that a query adds to batches of which it fills this share."""
        return self.fixed * share + self.per_token * tokens + self.per_byte * nbytes
