"""Errors that say which field, what was expected, what came and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZeroMemError(ValueError):
    """Input that cannot be used; the message says which field, and what to do."""

    @classmethod
    def of(cls, name: str, expected: str, got: object, advice: str) -> ZeroMemError:
        """The one shape of our messages: field, what was expected, what came, what to do next."""
        return cls(f"{name}: expected {expected}, got {shown(got)}; {advice}")


class NotFound(ZeroMemError):
    """A well-formed id that nothing stands behind: never stored, deleted, or expired."""


class Conflict(ZeroMemError):
    """A trace under an id that another one has."""


def install(extra: str) -> str:
    """How to get what an extra brings: by a path, since no registry has the package, and anybody may take its name."""
    return f"run `pip install '.[{extra}]'` in a clone of zeromem_torch"


def nearest(name: str, options: Iterable[str]) -> str:
    """'did you mean ...? ' with up to three near options, ready to stand in an error; '' when none is near."""
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(str(name).casefold()[:200], folded, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(repr(folded[c]) for c in close)}? " if close else ""


def shown(value: object) -> str:
    """A value as a message shows it: never long, never unprintable."""
    if isinstance(value, str):  # never the whole of a long text, nor an unprintable one
        return ascii(value) if len(value) <= 60 else f"{value[:60]!a}... ({len(value)} characters)"
    try:
        text = ascii(value)
    except ValueError:  # an integer of thousands of digits
        text = ""
    return text if 0 < len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"
