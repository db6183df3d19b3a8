"""What a file of conversations holds: collected piece by piece, each with an id that the next import gives it again.

The id is the file's own where it has one, else a hash of what was said, when, by whom and in which session. So a file
that has grown, or whose import was interrupted, is imported again and adds what is new. Nothing is dropped silently:
what is no turn of a conversation is counted by its kind.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from zeromem_torch.substrate.traces import Trace, ZeroMemError

Json = Mapping[str, Any]

FORMATS = {
    "jsonl": "traces, one JSON object a line, as `zeromem export` writes them",
    "chat": '"Ann: Hello" lines, with or without "[08/05/2023, 13:56] " or "2023-05-08 13:56 - " before the name',
    "chatgpt": "ChatGPT's exported conversations.json",
    "claude": "Claude's exported conversations.json",
    "openai": '{"role": ..., "content": ...} or {"messages": [...]}, one a line',
}
DATES = ("auto", "day-first", "month-first")


@dataclass
class Chat:
    """What a file held."""

    format: str = ""
    traces: list[Trace] = field(default_factory=list)
    homeless: int = 0  # traces that named no boundary of their own
    bad: list[str] = field(default_factory=list)  # a message for each piece that cannot be used
    left_out: Counter[str] = field(default_factory=Counter)  # what is no turn of a conversation, by kind
    notes: list[str] = field(default_factory=list)  # what had to be guessed


def stem(name: str) -> str:
    """A file's name without folder and suffixes: the boundary, and the session, of what names none."""
    return re.sub(r"(\.(jsonl?|txt))?(\.(gz|zip))?$", "", re.split(r"[/\\]", name)[-1], flags=re.IGNORECASE) or name


class Piece(NamedTuple):
    """A value of a JSON file and where it stands; or what is wrong there."""

    place: str
    value: Any = None
    error: str = ""


@dataclass
class Reader:
    """Collects what is said, gives it ids, and tells what cannot be used by its place."""

    chat: Chat
    boundary: str
    stem: str = ""
    seen: dict[tuple[str, str], Trace] = field(default_factory=dict)
    said: Counter[str] = field(default_factory=Counter)

    def say(self, place: str, fields: Json) -> None:
        given = {name: value for name, value in fields.items() if value is not None and value != ""}
        try:
            trace = Trace.from_dict({"boundary": self.boundary, **given, "id": given.get("id") or self._id(given)})
        except ZeroMemError as error:
            self.refuse(place, error)
            return
        before = self.seen.setdefault((trace.boundary, trace.id), trace)
        if before is trace:
            self.chat.traces.append(trace)
            self.chat.homeless += "boundary" not in given
        elif before == trace:
            self.leave_out("repeated line")
        else:
            self.refuse(place, ZeroMemError.of("id", "one trace of each id", trace.id, "give the second one another"))

    def _id(self, fields: Json) -> str:
        """The same for the same words by the same person at the same time; said twice, they are two."""
        written = json.dumps(fields, sort_keys=True)
        self.said[written] += 1
        return blake2b(f"{written}\n{self.said[written]}".encode(), digest_size=10).hexdigest()

    def refuse(self, place: str, why: object) -> None:
        self.chat.bad.append(f"{place}: {why}")

    def leave_out(self, kind: str) -> None:
        self.chat.left_out[kind] += 1

    def objects(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, Json]]:
        for place, value, error in pieces:
            if isinstance(value, Mapping):
                yield place, value
            else:
                self.chat.bad.append(error or str(ZeroMemError.of(place, "a JSON object", value, "mend it")))

    def each(self, place: str, value: Json, key: str) -> Iterator[tuple[str, Json]]:
        """The objects of a list inside an object."""
        inner = value.get(key)
        if isinstance(inner, list):
            yield from self.objects([Piece(f"{place}, {key}[{number}]", one) for number, one in enumerate(inner)])
        else:
            self.refuse(place, ZeroMemError.of(key, "a list", inner, "mend it"))
