"""Handles: short typed names that stand in a model's context for what the memory holds.

`mem:<type>:<id>`, as in `mem:preference:reply/language`. The id is the entry's key, written as in a URI, so that a
model sees what a handle is about and a program can make one without asking the memory. A handle names a place and not
a version of what stands there: one in an old context leads to what holds now.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from zeromem_torch.substrate.traces import ZeroMemError, check_text, nearest

TYPES = ("preference", "fact", "episodic", "procedural")
LONGEST_KEY = 128
"""Characters of a key: a handle is read far more often than what it stands for."""

_FORM = "mem:<type>:<id>, as in 'mem:preference:reply/language'"
# ASCII but letters, digits and -._~/, white space and invisible characters: what could hide in a text, or end it early.
_ESCAPED = re.compile(
    r"[\x00-,:-@\[-^`{-}\x7f-\xa0\s\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"
)


@dataclass(frozen=True, slots=True, order=True)
class Handle:
    """A reference to one entry of a boundary; the boundary itself is never part of it."""

    type: str  # one of TYPES
    id: str  # the key, escaped

    def __post_init__(self) -> None:
        check_type(self.type)
        check_text("handle", "id", self.id)
        try:
            key = unquote(self.id, errors="strict")
        except UnicodeDecodeError:
            raise ZeroMemError.of("handle, id", "a key in UTF-8", self.id, "use Handle.of(type, key)") from None
        if (written := check_key(key)) != self.id:
            raise ZeroMemError.of("handle, id", f"the one spelling, {written!r}", self.id, "use that one")

    @classmethod
    def of(cls, type: str, key: str) -> Handle:
        """The handle of a key: a path of segments split at "/", at most 128 characters."""
        return cls(type, check_key(key))

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Read `str(handle)` back; nothing else is accepted, no blanks around it either."""
        parts = text.split(":", 2) if isinstance(text, str) else []
        if len(parts) != 3 or parts[0] != "mem":
            raise ZeroMemError.of("handle", _FORM, text, "copy it as the memory gave it")
        return cls(parts[1], parts[2])

    @property
    def key(self) -> str:
        return unquote(self.id)

    def __str__(self) -> str:
        return f"mem:{self.type}:{self.id}"


def check_type(type: object) -> None:
    if type not in TYPES:
        raise ZeroMemError.of("type", " | ".join(TYPES), type, f"{nearest(str(type), TYPES)}pass one of these")


def check_key(key: str) -> str:
    """The key as it is written in a handle; refuses what cannot be a key."""
    check_text("entry", "key", key)
    if not all(key.split("/")):
        expected = "segments that are not empty, as in 'reply/language'"
        raise ZeroMemError.of("key", expected, key, "leave out what stands before or behind a slash, or name it")
    if len(key) > LONGEST_KEY:
        raise ZeroMemError.of("key", f"at most {LONGEST_KEY} characters", key, "put what is long into the value")
    return _ESCAPED.sub(lambda found: quote(found[0], safe=""), key)
