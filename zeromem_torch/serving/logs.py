"""Structured logs: a line an event, as JSON or for a person, with no memory text in it unless that was asked for.

What was said stands in requests, in error messages that quote them, and in the messages of exceptions (a database names
the values of a statement that failed). So without ``text`` an exception is logged by its type and its place alone.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

FIELDS = "zeromem_fields"
"""Where a log record carries its fields."""
log = logging.getLogger("zeromem_torch.serving")
_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def event(name: str, level: int = logging.INFO, *, raised: BaseException | None = None, **fields: Any) -> None:
    """Log that something happened; fields that are None are left out."""
    if log.isEnabledFor(level):
        log.log(level, name, exc_info=raised, extra={FIELDS: fields})


class Formatter(logging.Formatter):
    """What both forms share: fields of a record, and exceptions without what was said."""

    def __init__(self, *, text: bool = False) -> None:
        super().__init__()
        self.text = text

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        own: Mapping[str, Any] = getattr(record, FIELDS, {})
        found = {name: value for name, value in own.items() if value is not None}
        if record.exc_info and record.exc_info[0] is not None:
            found["error"] = record.exc_info[0].__name__
            found["traceback"] = self.formatException(record.exc_info)
        return found

    def formatException(self, ei: _Raised) -> str:
        kind, error, where = ei
        if kind is None or error is None:
            return ""
        if self.text:
            return "".join(traceback.format_exception(kind, error, where))
        parts, seen = [], set[int]()
        cause: BaseException | None = error
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            parts += [*traceback.format_tb(cause.__traceback__), f"{type(cause).__name__}\n"]
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        return "".join(parts)


class JsonFormatter(Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"time": time, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        return json.dumps({**head, **self.fields(record)}, default=str)


class PlainFormatter(Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        trace = fields.pop("traceback", "")
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        said = [f"{name}={_plain(value)}" for name, value in fields.items()]
        line = f"{time} {level}{' '.join([_one_line(record.getMessage()), *said])}"
        return f"{line}\n{trace.rstrip()}" if trace else line


def set_up(*, as_json: bool = False, text: bool = False, stream: TextIO | None = None) -> logging.Handler:
    """Send the logs of this process to ``stream`` (stderr); ``text``: what was said may stand in them."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(text=text) if as_json else PlainFormatter(text=text))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("zeromem_torch").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return handler


def _plain(value: object) -> str:
    """One word, or quoted: a value can neither end the line nor pass for another field."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isascii() and text.isprintable() and text and not set(text) & set(" =\"'") else ascii(text)


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
