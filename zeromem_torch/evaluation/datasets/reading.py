"""Files of JSON objects, plain or gzipped, as rows that know where they stand."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zeromem_torch.substrate.traces import Trace, ZeroMemError, parse_time

_KIND = TypeVar("_KIND")

# Keys by which a data set is known, to name the right loader when the wrong one was asked for.
_SIGNS = {
    "conversation": "locomo",
    "haystack_sessions": "longmemeval",
    "paragraphs": "musique",
    "unresolved_subjects": "2wiki",
    "evidences": "2wiki",
    "supporting_facts": "hotpotqa",
    "gold_titles": "hotpotqa",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A JSON object, and where it stands, so that an error can say so."""

    place: str
    fields: Mapping[str, Any]

    def need(self, key: str, kind: type[_KIND]) -> _KIND:
        """The value of a key that the schema has."""
        value = self.fields.get(key)
        if isinstance(value, kind):
            return value
        keys = ", ".join(sorted(self.fields)) or "(none)"
        got = f"{key!r} as {type(value).__name__}" if key in self.fields else f"only the keys {keys}"
        known = next((name for sign, name in _SIGNS.items() if sign in self.fields), None)
        looks = f"its keys look like those of {known}; " if known else ""
        advice = f"{looks}check the file and the data set's name"
        raise ZeroMemError(f"{self.place}: expected {key!r} ({kind.__name__}), got {got}; {advice}")

    def rows(self, key: str) -> list[Row]:
        return rows_of(f"{self.place}.{key}", self.need(key, list))

    def several(self, key: str) -> list[Any]:
        """A list; none if the key is absent, one value if it holds a bare one."""
        value = self.fields.get(key)
        return value if isinstance(value, list) else [] if value is None else [value]

    def strings(self, key: str) -> list[str]:
        values = self.several(key)
        if other := [value for value in values if not isinstance(value, str)]:
            raise ZeroMemError.of(f"{self.place}, {key}", "strings", other[0], "check the file")
        return values


class Source(NamedTuple):
    """What a loader is given: the rows of the data file, and of the corpus file if there is one."""

    path: Path
    rows: list[Row]
    corpus: list[Row] | None
    audited: bool


def read_rows(path: str | Path) -> list[Mapping[str, Any]]:
    """The objects of a .json or .jsonl file, plain or gzipped, as they are."""
    return [row.fields for row in read(Path(path))[1]]


def read(path: Path) -> tuple[bytes, list[Row]]:
    """The bytes of a file as stored, and its objects."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ZeroMemError(
            f"{path}: expected a file that can be read, got {error.strerror!r}; check the path"
        ) from error
    try:
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        expected, advice = "JSON in UTF-8, plain or gzipped", "fetch the file again"
        raise ZeroMemError.of(path.name, expected, str(error), advice) from error
    if re.match(r"\s*\[", text):
        return raw, rows_of(path.name, _parsed(text, path.name))
    # Not splitlines(): U+2028 may stand unescaped inside a JSON string.
    lines = [(f"{path.name} line {n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows = [_object(place, _parsed(line, place)) for place, line in lines]
    if not rows:
        raise ZeroMemError(f"{path.name}: expected JSON objects, got an empty file; check the path")
    return raw, rows


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        advice = "write an array of objects, or one object a line"
        raise ZeroMemError(f"{place}: expected JSON, got something else ({error}); {advice}") from error


def rows_of(place: str, items: Any) -> list[Row]:
    if not isinstance(items, list):
        raise ZeroMemError.of(place, "a list", items, "check the file and the data set's name")
    return [_object(f"{place}[{i}]", item) for i, item in enumerate(items)]


def _object(place: str, item: Any) -> Row:
    if not isinstance(item, dict):
        raise ZeroMemError.of(place, "a JSON object", item, "check the file and the data set's name")
    return Row(place, item)


def trace_of(place: str, fields: Mapping[str, Any]) -> Trace:
    try:
        return Trace.from_dict(fields)
    except ZeroMemError as error:
        raise ZeroMemError(f"{place}: {error}") from error


def time_of(place: str, value: Any) -> datetime:
    try:
        return parse_time(value)
    except ZeroMemError as error:
        raise ZeroMemError(f"{place}: {error}") from error


def blank(text: str) -> bool:
    """A trace must say something; white space and invisible format characters do not."""
    return not any(character.isprintable() and not character.isspace() for character in text)


def stem(path: Path) -> str:
    """A file's name without its suffixes."""
    return re.sub(r"(\.jsonl?)?(\.gz)?$", "", path.name)
