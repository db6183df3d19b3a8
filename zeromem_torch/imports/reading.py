"""From the bytes of a file to its traces: unpack it, see what it is, and hand it to who can read that."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from zeromem_torch.imports.chat import DATES, FORMATS, Chat, Json, Piece, Reader, stem
from zeromem_torch.imports.exports import JSON_READERS
from zeromem_torch.imports.plain import is_chat, read_text
from zeromem_torch.substrate.traces import ZeroMemError, check_boundary, check_text


def read_chat(
    raw: bytes, name: str, *, boundary: str | None = None, format: str = "auto", dates: str = "auto"
) -> Chat:
    """Traces of a file's bytes, plain, gzipped or in a .zip; ``name`` is what messages call it.

    ``boundary`` is for what names none itself (None: the file's stem). A file of another kind than ``format`` is an
    error; pieces of it that cannot be used are told in `Chat.bad`. ``dates`` says how a chat writes 08/05/2023; if it
    does not, the file's own days decide.
    """
    for option, value, known in (("format", format, ("auto", *FORMATS)), ("dates", dates, DATES)):
        if value not in known:
            raise ZeroMemError.of(option, f"one of {', '.join(known)}", value, "leave it out to go by the content")
    boundary = stem(name) if boundary is None else boundary
    check_text("import", "boundary", boundary)
    check_boundary(boundary)
    chat = Chat()
    reader = Reader(chat, boundary)
    for place, reader.stem, text in _texts(raw, name):
        if not text.strip():
            raise ZeroMemError.of(place, "conversations", "an empty file", "check the path")
        kind, pieces = _recognised(text, place, format)
        if chat.format not in ("", kind):
            advice = "unpack it, and import its files one by one"
            raise ZeroMemError.of(place, f"more of the format {chat.format}", kind, advice)
        chat.format = kind
        if kind == "chat":
            read_text(reader, place, text, dates)
        else:
            JSON_READERS[kind](reader, pieces)
    return chat


def _texts(raw: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    """The texts in a file that hold conversations; each with its place, and what names its sessions."""
    try:
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        if not raw.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            yield name, stem(name), _decoded(raw, name)
            return
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            files = [file for file in archive.namelist() if not file.startswith("__MACOSX/")]
            wanted = sorted(file for file in files if re.search(r"(^|/)conversations[^/]*\.json$", file))
            wanted = wanted or [file for file in files if re.search(r"\.(jsonl?|txt)$", file, re.IGNORECASE)]
            if not wanted:
                expected = "conversations.json, or .jsonl, .json or .txt files, in the archive"
                got = ", ".join(files[:5]) or "an empty archive"
                raise ZeroMemError.of(name, expected, got, "unpack it, and import what holds the conversations")
            for file in wanted:
                place = f"{name}/{file}"
                yield place, stem(name if len(wanted) == 1 else file), _decoded(archive.read(file), place)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError) as error:  # Runtime: needs a password
        advice = "fetch or export it again, or unpack it yourself"
        raise ZeroMemError.of(name, "a file that can be unpacked", str(error), advice) from error


def _decoded(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"the byte {raw[error.start]:#04x} at {error.start}"
        raise ZeroMemError.of(name, "text in UTF-8", got, "save it as UTF-8") from error


def _recognised(text: str, name: str, wanted: str) -> tuple[str, list[Piece]]:
    """The format, asked for or seen in the content, and the values of a file of JSON."""
    if not re.match(r"\s*(\{|\[\s*[\]{])", text):
        if wanted in ("auto", "chat") and is_chat(text):
            return "chat", []
        expected = FORMATS.get(wanted) or f"one of these: {'; '.join(FORMATS.values())}"
        advice = "a text that is no chat goes in with `zeromem add -`" if wanted == "auto" else "leave --format out"
        raise ZeroMemError.of(name, expected, text.strip().partition("\n")[0], advice)
    pieces = list(_pieces(text, name))
    seen = next((_kind(piece.value) for piece in pieces if isinstance(piece.value, Mapping)), "jsonl")
    of_one_kind = {"jsonl", "openai"} if seen in ("jsonl", "openai") else {seen}  # a message is a trace of few words
    if wanted not in ("auto", *of_one_kind):
        raise ZeroMemError.of(name, FORMATS[wanted], f"what looks like {seen}", "leave --format out, or name that")
    return (seen if wanted == "auto" else wanted), pieces


def _kind(value: Json) -> str:
    if isinstance(value.get("mapping"), Mapping):
        return "chatgpt"
    if isinstance(value.get("chat_messages"), list):
        return "claude"
    return "openai" if "messages" in value or {"role", "content"} <= set(value) else "jsonl"


def _pieces(text: str, name: str) -> Iterator[Piece]:
    """The elements of an array, or the objects of a file that has one a line."""
    try:
        whole = _loads(text)  # of a file of lines this reads no more than the first
    except ValueError as error:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if text.lstrip().startswith("[") or not any(_is_object(line) for _, line in lines):
            raise ZeroMemError.of(name, "JSON", str(error), "fetch or export it again: it may be cut short") from error
        for number, line in lines:
            yield _piece(f"{name} line {number}", line)
        return
    if isinstance(whole, list):
        yield from (Piece(f"{name}[{number}]", value) for number, value in enumerate(whole))
    else:
        yield Piece(f"{name} line 1" if "\n" not in text.strip() else name, whole)


def _piece(place: str, line: str) -> Piece:
    try:
        return Piece(place, _loads(line))
    except ValueError as error:
        refusal = ZeroMemError.of(place, "a JSON object", line.strip(), f"mend the line ({error})")
        return Piece(place, error=str(refusal))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _is_object(line: str) -> bool:
    try:
        return isinstance(_loads(line), Mapping)
    except ValueError:
        return False
