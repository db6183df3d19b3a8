"""What a server refuses, each with its HTTP status; any other `ZeroMemError` is 422, input that cannot be used."""

from __future__ import annotations

from zeromem_torch.errors import ZeroMemError


class Refusal(ZeroMemError):
    """A request that is not carried out, for a reason that a caller can act on."""

    status = 400
    title = "Bad request"


class Unauthorized(Refusal):
    """No key, or one that is not known: both are told the same."""

    status, title = 401, "Unauthorized"


class Forbidden(Refusal):
    """A key that may not do this there; says nothing of whether anything is there."""

    status, title = 403, "Forbidden"


class TooLarge(Refusal):
    status, title = 413, "Too large"


class Overloaded(Refusal):
    """Work that would come too late, or finds the queue full; ``retry_after`` seconds from now it may not."""

    title = "Overloaded"

    def __init__(self, message: str, *, reason: str, retry_after: float) -> None:
        super().__init__(message)
        self.reason, self.retry_after = reason, retry_after
        self.status = 429 if reason == "queue" else 503
