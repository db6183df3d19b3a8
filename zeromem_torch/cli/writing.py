"""Commands that change what is stored."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromem_torch.cli import show
from zeromem_torch.cli.options import (
    NO,
    actor_option,
    boundary_option,
    compute_options,
    confirmed,
    describe,
    maker_options,
    memory_options,
    meta_option,
    opened,
    say,
    the_boundary,
    validity_options,
)
from zeromem_torch.imports import DATES, FORMATS, Chat, read_chat
from zeromem_torch.substrate.traces import Trace, ZeroMemError

if TYPE_CHECKING:
    from zeromem_torch.library import ZeroMem

AT_ONCE = 512
"""Traces that are added in one transaction."""


def add_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _add,
        "Stores one message, and prints its id. When it returns, the message is on disk and a search finds it.",
        'zeromem add "I signed up for the pottery course" --boundary alice --speaker Alice --time 2025-03-02T10:00',
        "zeromem add --boundary acme/wiki --title 'Travel rules' - < rules.txt",
    )
    parser.add_argument("text", nargs="+", metavar="TEXT", help="what was said; - reads all of stdin")
    boundary_option(parser, "whose memory it is, never crossed by a search (default: the only one there is)")
    parser.add_argument("--speaker", metavar="NAME", help="who said it")
    parser.add_argument("--role", metavar="ROLE", help="user, assistant, tool, ... (default: user, if nobody is named)")
    parser.add_argument("--session", metavar="NAME", help="the conversation it belongs to")
    parser.add_argument("--order", type=int, metavar="N", help="its place in the session")
    parser.add_argument("--time", metavar="TIME", help="when it happened, as 2025-03-02T10:00; without a zone, UTC")
    parser.add_argument("--title", metavar="TITLE", help="of a document")
    parser.add_argument("--id", metavar="ID", help="its id (default: a new one)")
    meta_option(parser, "something to filter by")
    validity_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="change the trace that has this id, if one has")
    actor_option(parser)
    memory_options(parser)
    maker_options(parser)
    compute_options(parser)


_OPTIONAL = ("speaker", "role", "session", "order", "time", "title", "id", "valid_from", "valid_to", "expires_at")


def _add(options: argparse.Namespace) -> int:
    fields = {name: value for name in _OPTIONAL if (value := getattr(options, name)) is not None}
    if not {"speaker", "role", "title"} & set(fields):
        fields["role"] = "user"
    message: dict[str, Any] = {"text": _text(options.text), **fields, "metadata": dict(options.meta)}
    # Checked first, or a mistake would leave an empty memory behind.
    Trace.from_dict({"id": "new", "boundary": options.boundary or "new", **message})
    with opened(options, make=options.boundary is not None) as memory:
        boundary = the_boundary(memory, options.boundary)
        (id,) = memory.add(message, boundary=boundary, actor=options.actor, overwrite=options.overwrite)
    if options.json:
        show.as_json({"id": id, "boundary": boundary})
    else:
        show.lines(id)
    return 0


def _text(given: Sequence[str]) -> str:
    return sys.stdin.read().strip("\n") if list(given) == ["-"] else " ".join(given)


def import_command(parser: argparse.ArgumentParser) -> None:
    formats = "\n".join(f"  {name:<8} {about}" for name, about in FORMATS.items())
    describe(
        parser,
        _import,
        f"Adds conversations from files, plain, .gz or .zip. What a file is, is seen in its content:\n\n{formats}\n\n"
        "Traces keep their ids from one import to the next, so importing a file again adds only what is new in it. If "
        "a line cannot be used, nothing is added unless --skip-bad is given; each is told with its number.",
        "zeromem import chat.txt",
        "zeromem import chatgpt-export.zip --boundary me",
        "zeromem import --memory ~/memories/work --boundary acme/alice logs/*.jsonl",
        "zeromem export --memory old | zeromem import --memory new -",
    )
    parser.add_argument("file", nargs="+", metavar="FILE", help="- reads stdin")
    boundary_option(parser, "for what names none itself (default: the file's name)")
    parser.add_argument(
        "--format", choices=["auto", *FORMATS], default="auto", metavar="NAME", help="auto, or one of the above"
    )
    parser.add_argument(
        "--dates", choices=DATES, default="auto", help="how a chat writes 08/05/2023 (default: as its other days do)"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out what cannot be used, and count it")
    parser.add_argument("--overwrite", action="store_true", help="change traces whose text differs from the file's")
    actor_option(parser)
    memory_options(parser)
    maker_options(parser)
    compute_options(parser)


def _import(options: argparse.Namespace) -> int:
    chats = {name: _chat(options, name) for name in dict.fromkeys(options.file)}
    for chat in chats.values():
        for why in chat.bad:
            say(why)
    if (bad := sum(len(chat.bad) for chat in chats.values())) and not options.skip_bad:
        say(f"nothing was added: mend {_number(bad, 'line')}, or leave them out with --skip-bad")
        return 1
    with opened(options, make=True) as memory:
        for name, chat in chats.items():
            added = _add_all(memory, chat.traces, options)
            boundaries = Counter(trace.boundary for trace in chat.traces)
            result = {
                "file": name,
                "format": chat.format,
                "traces": len(chat.traces),
                "added": added,
                "known": len(chat.traces) - added,
                "bad": len(chat.bad),
                "left_out": dict(chat.left_out),
                "boundaries": dict(boundaries),
                "notes": chat.notes,
                "memory": str(options.memory),
            }
            if options.json:
                show.as_json(result)
            else:
                show.lines(*_told(options, chat, result))
    return 0


def _chat(options: argparse.Namespace, file: str) -> Chat:
    path = Path("stdin" if file == "-" else file)
    try:
        raw = sys.stdin.buffer.read() if file == "-" else path.read_bytes()
    except OSError as error:
        raise ZeroMemError.of(file, "a file that can be read", error.strerror, "check the path") from error
    chat = read_chat(raw, path.name, boundary=options.boundary, format=options.format, dates=options.dates)
    if not chat.traces and not chat.bad:
        got = ", ".join(f"{_number(n, kind)}" for kind, n in chat.left_out.items()) or "an empty list"
        raise ZeroMemError.of(path.name, "something that was said", got, "check the file")
    if file == "-" and chat.homeless and options.boundary is None:
        options.fail("what comes from stdin names no boundary: pass --boundary")
    return chat


def _add_all(memory: ZeroMem, traces: Sequence[Trace], options: argparse.Namespace) -> int:
    from tqdm import tqdm

    before = len(memory)
    with tqdm(total=len(traces), desc="adding", unit="trace", disable=None, leave=False) as bar:
        for start in range(0, len(traces), AT_ONCE):
            some = traces[start : start + AT_ONCE]
            memory.add(some, actor=options.actor, overwrite=options.overwrite)
            bar.update(len(some))
    return len(memory) - before


def _told(options: argparse.Namespace, chat: Chat, result: dict[str, Any]) -> list[str]:
    """The result in words."""
    left_out = [_number(n, kind) for kind, n in chat.left_out.items()]
    left_out += [_number(len(chat.bad), "bad line")] if chat.bad else []
    speakers = Counter(trace.speaker or trace.role or "nobody named" for trace in chat.traces)
    named = ", ".join(f"{name} ({count})" for name, count in speakers.most_common(5))
    boundaries = list(result["boundaries"])
    where = ", ".join(map(repr, boundaries[:5])) + (f" and {len(boundaries) - 5} more" if len(boundaries) > 5 else "")
    by_default = " (after the file's name; --boundary names another)" if chat.homeless and not options.boundary else ""
    return [
        f"{result['file']}: {_number(result['traces'], 'trace')}, format {chat.format}",
        *([f"  left out: {', '.join(left_out)}"] if left_out else []),
        *(f"  {note}" for note in chat.notes),
        f"  speakers: {named}{', ...' if len(speakers) > 5 else ''}",
        f"  boundary {where}{by_default}",
        f"  added {result['added']}, already there {result['known']}, in {result['memory']}",
    ]


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 or what.endswith("text") else f"{count} {what}s"


def update_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _update,
        "Changes a trace; what is not named stays, and what was there before stays in its history. An empty value "
        "clears a field. Who said it, in which session and where does not change: delete the trace and add another.",
        'zeromem update D1:3 --text "I moved to Bergen" --time 2023-06-01',
        "zeromem update D1:3 --meta topic=travel --meta draft=",
        "zeromem update D1:3 --valid-to 2024-01-01",
    )
    parser.add_argument("id", metavar="ID", help="as a search or a list shows it")
    boundary_option(parser, "where the trace is, if several boundaries have the id")
    parser.add_argument("--text", metavar="TEXT", help="- reads all of stdin")
    parser.add_argument("--title", metavar="TITLE")
    parser.add_argument("--time", metavar="TIME", help="when it happened")
    meta_option(parser, "set this in its metadata; NAME= removes it")
    validity_options(parser)
    actor_option(parser)
    memory_options(parser)
    compute_options(parser)


def _update(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in ("title", "time", "valid_from", "valid_to", "expires_at")}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changes = {name: None if value == "" and name != "title" else value for name, value in changes.items()}
    if options.text is not None:
        changes["text"] = _text([options.text])
    if not changes and not options.meta:
        options.fail("name what to change: --text, --title, --time, --meta, --valid-from, --valid-to or --expires-at")
    with opened(options) as memory:
        if options.meta:
            known = dict(memory.get(options.id, boundary=options.boundary).metadata) | dict(options.meta)
            changes["metadata"] = {name: value for name, value in known.items() if value != ""}
        trace = memory.update(options.id, boundary=options.boundary, actor=options.actor, **changes)
    if options.json:
        show.as_json(trace.to_dict())
    else:
        show.lines(*show.trace_page(trace, show.width()))
    return 0


def delete_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _delete,
        "Deletes traces: no search finds them from then on. Their history stays, unless --purge removes every byte of "
        "them from every file of the memory. On a terminal it asks first.",
        "zeromem delete D1:3 D1:4",
        "zeromem delete --all --boundary acme/alice --purge",
        "zeromem delete --boundary alice - < ids.txt",
    )
    parser.add_argument("id", nargs="*", metavar="ID", help="- reads one from each line of stdin")
    boundary_option(parser, "where the traces are, if several boundaries have the ids; with --all, what to empty")
    parser.add_argument("--all", action="store_true", help="all traces of the boundary, which must be named")
    parser.add_argument("--purge", action="store_true", help="remove their history too, and every byte from the files")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    actor_option(parser)
    memory_options(parser)


def _delete(options: argparse.Namespace) -> int:
    if options.all == bool(options.id) or (options.all and options.boundary is None):
        options.fail("name the ids, or --all and its --boundary")
    ids = [line.strip() for line in sys.stdin if line.strip()] if options.id == ["-"] else options.id
    way = "purge, for good," if options.purge else "delete"
    with opened(options) as memory:
        if options.all:
            question, where = f"{way} all traces of {options.boundary!r}?", {"boundary": options.boundary}
        else:
            for id in ids:
                _check_known(memory, id, options)
            question, where = f"{way} {_number(len(ids), 'trace')}?", {"boundary": options.boundary}
        if not confirmed(options, question):
            say("nothing was deleted")
            return NO
        if options.all:
            count = memory.delete_all(**where, actor=options.actor, purge=options.purge)
        else:
            count = len(ids)
            for id in ids:
                memory.delete(id, **where, actor=options.actor, purge=options.purge)
    if options.json:
        show.as_json({"deleted": count, "purged": options.purge})
    else:
        show.lines(f"{'purged' if options.purge else 'deleted'} {_number(count, 'trace')}")
    return 0


def _check_known(memory: ZeroMem, id: str, options: argparse.Namespace) -> None:
    """Before any is deleted, so that a mistyped id leaves all of them as they are."""
    if not (options.purge and memory.history(id, boundary=options.boundary)):  # what was deleted before can be purged
        memory.get(id, boundary=options.boundary)
