"""Chats in plain text: "Name: text" lines, and messengers' exports, whose lines open with a date."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeromem_torch.imports.chat import Reader
from zeromem_torch.substrate.traces import ZeroMemError, parse_time

_DATED = re.compile(
    r"[\u200e\u200f\s]*\[?(?P<date>\d{1,4}(?P<by>[./-])\d{1,2}(?P=by)\d{1,4}),?[\sT]\s*"
    r"(?P<hour>\d{1,2})[:.](?P<minute>\d{2})(?:[:.](?P<second>\d{2})(?:\.\d+)?)?"
    r"(?:\s*(?P<half>[ap])\.?\s?m\.?)?(?P<zone>Z|[+-]\d{2}:?\d{2})?(?:\]|\s[-–—]\s|:?\s)\s*(?P<rest>.*)",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?P<name>[^:]{1,60}):(?:\s+(?P<text>.*)|$)")
_SAID = re.compile(r"(?P<name>[^\W\d_][\w.'’-]*(?: [\w.'’()&-]+){0,3}):(?:[ \t]+(?P<text>.*)|[ \t\r]*$)", re.MULTILINE)
_OF_THE_APP = re.compile(r"\u200e<[^<>]*>|^<[^<>]*>$|^\u200e.*", re.DOTALL)  # "<Media omitted>", an edit, an attachment
_ROLES = {"user": "user", "human": "user", "assistant": "assistant"}


@dataclass
class _Turn:
    """Lines of one message."""

    place: str
    name: str  # "": the app's own notice
    lines: list[str]
    head: re.Match[str] | None  # what dates it


def is_chat(text: str) -> bool:
    return _is_dated(text) or _SAID.match(text.lstrip()) is not None


def read_text(reader: Reader, name: str, text: str, dates: str) -> None:
    """A line that opens with a name (in a chat with dates, with a date) starts a turn; others go on with the last.

    Sessions are days; a chat without dates is one. Order is the time in milliseconds and the place in that moment,
    so that it stays when the app leaves older messages out of a later export.
    """
    turns = _turns(reader, name, text.split("\n"), dated=_is_dated(text))
    day_first = _day_first([turn.head for turn in turns if turn.head], dates, reader.chat.notes)
    at: Counter[int] = Counter()
    for number, turn in enumerate(turns, start=1):
        if not (said := _OF_THE_APP.sub("", "\n".join(turn.lines).strip()).strip()):
            reader.leave_out("message without text")
            continue
        if not turn.name:
            reader.leave_out("notice of the app")
            continue
        role = _ROLES.get(turn.name.casefold(), "")
        fields = {"text": said, "role": role, "speaker": "" if role else turn.name}
        if turn.head:
            try:
                time = parse_time(_iso(turn.head, day_first))
            except ZeroMemError as error:
                reader.refuse(turn.place, error)
                continue
            moment = int(time.timestamp() * 1000)
            session, order = f"{reader.stem} {time:%Y-%m-%d}", moment + at[moment]
            at[moment] += 1
            reader.say(turn.place, {**fields, "time": time.isoformat(), "session": session, "order": order})
        else:
            reader.say(turn.place, {**fields, "session": reader.stem, "order": number})


def _turns(reader: Reader, name: str, lines: Sequence[str], *, dated: bool) -> list[_Turn]:
    turns: list[_Turn] = []
    for number, line in enumerate(lines, start=1):
        place, line = f"{name} line {number}", line.rstrip("\r")
        head = _DATED.match(line) if dated else None
        if head:
            said = _NAMED.match(head["rest"])
            speaker, text = (said["name"].strip(_AROUND_NAMES), said["text"] or "") if said else ("", head["rest"])
            turns.append(_Turn(place, speaker, [text], head))
        elif not dated and (said := _SAID.match(line)):
            turns.append(_Turn(place, said["name"], [said["text"] or ""], None))
        elif turns:
            turns[-1].lines.append(line)
        elif line.strip():
            expected = "a message that opens with its date" if dated else '"Name: text"'
            reader.refuse(place, ZeroMemError.of("text", expected, line, "remove what stands above the first message"))
    return turns


_AROUND_NAMES = " ~\u200e\u200f\u202a\u202c\u202f\u2068\u2069\xa0"


def _is_dated(text: str) -> bool:
    first = [line for line in text[:20_000].split("\n") if line.strip()][:20]
    return any(_DATED.match(line) for line in first)


def _day_first(heads: Sequence[re.Match[str]], dates: str, notes: list[str]) -> bool:
    """Whether 08/05/2023 is the 8th of May: as told, else as other days of the file say, else as keeps them rising."""
    days = [tuple(map(int, head["date"].split(head["by"]))) for head in heads]
    days = [day for day in days if day[0] <= 31]  # the others have the year first
    if not days or dates != "auto":
        return dates != "month-first"
    if any(first > 12 for first, _, _ in days) or any(second > 12 for _, second, _ in days):
        return any(first > 12 for first, _, _ in days)
    falls = [
        sum(later < earlier for earlier, later in pairwise(keys))
        for keys in ([(y, m, d) for d, m, y in days], [(y, m, d) for m, d, y in days])
    ]
    day_first = falls[0] <= falls[1]
    read = "day-first" if day_first else "month-first"
    notes.append(f"days such as {heads[0]['date']} can be read two ways, and were read {read}; --dates says how")
    return day_first


def _iso(head: re.Match[str], day_first: bool) -> str:
    """The time of a turn as ISO 8601; one that does not exist stays as impossible as it was."""
    first, second, third = map(int, head["date"].split(head["by"]))
    if first > 31:
        year, month, day = first, second, third
    else:
        (day, month), year = (first, second) if day_first else (second, first), third
    hour = int(head["hour"])
    if head["half"] and hour <= 12:
        hour = hour % 12 + (12 if head["half"].lower() == "p" else 0)
    clock = f"{hour:02}:{head['minute']}:{head['second'] or '00'}{(head['zone'] or '').upper()}"
    return f"{year + 2000 if year < 100 else year:04}-{month:02}-{day:02}T{clock}"
