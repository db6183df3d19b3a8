"""`zeromem handles`: entries by typed references, through the memory manager that agents use."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zeromem_torch.cli import show
from zeromem_torch.cli.options import (
    NO,
    boundary_option,
    compute_options,
    confirmed,
    describe,
    maker_options,
    memory_options,
    opened,
    positive,
    say,
    the_boundary,
)
from zeromem_torch.substrate.traces import ZeroMemError

if TYPE_CHECKING:
    from zeromem_torch.handles import Entry, MemoryManager
    from zeromem_torch.library import ZeroMem

ABOUT = """\
A handle, mem:<type>:<key>, stands in an agent's context for what the memory holds; its text enters only where it is
materialised. Types are preference, fact, episodic and procedural. One value stands under a type and key: another
supersedes it, and the one before stays in the history."""


def handles_command(parser: argparse.ArgumentParser) -> None:
    parser.description = ABOUT
    commands = parser.add_subparsers(required=True, metavar="WHAT", title="commands")
    fills: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
        "store": ("remember a value; prints its handle", _store_command),
        "get": ("show an entry", _get_command),
        "query": ("find handles, by type and key or by meaning", _query_command),
        "materialize": ("write values out for a context, as many as fit", _materialize_command),
        "forget": ("delete an entry", _forget_command),
    }
    for name, (summary, fill) in fills.items():
        own: Any = {"fill": fill}  # our Parser's, which argparse's own types do not know
        commands.add_parser(name, help=summary, **own)


def _shared(parser: argparse.ArgumentParser) -> None:
    boundary_option(parser, "whose entries (default: the only boundary there is)")
    parser.add_argument("--session", default="cli", metavar="NAME", help="who asks, for history and log (default: cli)")
    memory_options(parser)


def _manager(options: argparse.Namespace, memory: ZeroMem) -> MemoryManager:
    from zeromem_torch.handles import MemoryManager

    return MemoryManager(memory, boundary=the_boundary(memory, options.boundary), session=options.session)


def _store_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _store,
        "Remembers a value under a type and a key, and prints its handle.",
        'zeromem handles store preference reply/language "Answers in French, please" --boundary alice',
        "zeromem handles store fact office/floor 3 --value-json --source D1:3 --confidence 0.8 --ttl 86400",
    )
    parser.add_argument("type", metavar="TYPE", help="preference, fact, episodic or procedural")
    parser.add_argument("key", metavar="KEY", help='a path such as "reply/language"')
    parser.add_argument("value", metavar="VALUE", help="a text; - reads all of stdin")
    parser.add_argument("--value-json", action="store_true", help="the value is JSON, not a text")
    parser.add_argument("--source", default="", metavar="ID", help="the trace that says so")
    parser.add_argument("--confidence", type=float, default=1.0, metavar="C", help="from 0 to 1 (default: 1)")
    parser.add_argument("--ttl", type=float, metavar="SECONDS", help="forget after so long (default: never)")
    _shared(parser)
    maker_options(parser)
    compute_options(parser)


def _store(options: argparse.Namespace) -> int:
    from zeromem_torch.handles import Handle

    Handle.of(options.type, options.key)  # before a memory is made for it
    value: Any = sys.stdin.read().strip("\n") if options.value == "-" else options.value
    if options.value_json:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ZeroMemError.of("value", "JSON", value, f"mend it, or drop --value-json ({error})") from error
    with opened(options, make=options.boundary is not None) as memory:
        handle = _manager(options, memory).store(
            options.type,
            options.key,
            value,
            source=options.source,
            confidence=options.confidence,
            ttl=options.ttl,
        )
    if options.json:
        show.as_json({"handle": str(handle)})
    else:
        show.lines(str(handle))
    return 0


def _get_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _get,
        "Shows an entry: its value, where it comes from, how sure it is and until when it holds. No encoder is loaded.",
        "zeromem handles get mem:preference:reply/language",
        "zeromem handles get mem:fact:office/floor --boundary alice --json",
    )
    parser.add_argument("handle", metavar="HANDLE", help="mem:<type>:<key>")
    _shared(parser)


def _get(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        fields = _fields(_manager(options, memory).retrieve(options.handle))
    if options.json:
        show.as_json(fields)
    else:
        longest = max(map(len, fields))
        show.lines(*(f"{name:<{longest}}  {value}" for name, value in fields.items() if value not in (None, "")))
    return 0


def _fields(entry: Entry) -> dict[str, Any]:
    return {
        "handle": str(entry.handle),
        "type": entry.handle.type,
        "key": entry.key,
        "value": entry.value,
        "source": entry.source,
        "confidence": entry.confidence,
        "created_at": entry.created_at.isoformat(),
        "expires_at": entry.expires_at.isoformat() if entry.expires_at else None,
        "boundary": entry.boundary,
    }


def _query_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _query,
        "Finds handles: by type and key, for which no encoder is loaded, or with --text the nearest by meaning. "
        "Without any of these, all of them.",
        "zeromem handles query --type preference",
        "zeromem handles query --key reply/",
        'zeromem handles query --text "Which language should I answer in?" --top-k 3',
    )
    parser.add_argument("--type", metavar="TYPE", help="preference, fact, episodic or procedural")
    parser.add_argument("--key", metavar="KEY", help='exactly this key; "reply/" is all keys below reply')
    parser.add_argument("--text", metavar="TEXT", help="what it should be about; goes with --type, not with --key")
    parser.add_argument("--top-k", type=positive, metavar="N", help="with --text: the N nearest (normally 5)")
    _shared(parser)
    compute_options(parser)


def _query(options: argparse.Namespace) -> int:
    if options.text is not None and options.key is not None:
        options.fail("--text goes with --type, not with --key")
    if options.text is None and options.top_k is not None:
        options.fail("--top-k goes with --text")
    with opened(options, read_only=True) as memory:
        manager = _manager(options, memory)
        found = manager.query(options.type, options.key, text=options.text, top_k=options.top_k)
    for match in found:
        if options.json:
            show.as_json({"handle": str(match.handle), "score": match.score})
        else:
            show.lines(str(match.handle) if options.text is None else f"{match.score:.3f}  {match.handle}")
    if not found:
        say("nothing found")
    return 0 if found else NO


def _materialize_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _materialize,
        "Writes the values of handles out for a context, in the order given, as many as fit; one that does not fit is "
        "left out whole. What was written is logged, as ids and tokens, in the memory's logs folder.",
        "zeromem handles materialize mem:preference:reply/language mem:fact:office/floor",
        "zeromem handles query --type preference | zeromem handles materialize --token-budget 200 -",
    )
    parser.add_argument("handle", nargs="+", metavar="HANDLE", help="- reads one from each line of stdin")
    parser.add_argument("--token-budget", type=positive, metavar="N", help="at most N tokens")
    _shared(parser)
    compute_options(parser)


def _materialize(options: argparse.Namespace) -> int:
    named = [line.strip() for line in sys.stdin if line.strip()] if options.handle == ["-"] else options.handle
    with opened(options) as memory:  # for writing: what enters a context is logged
        opened_up = _manager(options, memory).materialize(named, token_budget=options.token_budget)
    left_out = [str(handle) for handle in opened_up.left_out]
    if options.json:
        handles = [str(handle) for handle in opened_up.handles]
        show.as_json({"text": opened_up.text, "handles": handles, "tokens": opened_up.tokens, "left_out": left_out})
        return 0
    if opened_up.text:
        show.lines(*opened_up.text.split("\n"))
    if left_out:
        say(f"did not fit: {', '.join(left_out)}")
    return 0


def _forget_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _forget,
        "Deletes an entry. Its history stays, unless --purge removes every byte of it from every file. On a terminal "
        "it asks first.",
        "zeromem handles forget mem:fact:office/floor",
        "zeromem handles forget mem:fact:office/floor --purge --yes",
    )
    parser.add_argument("handle", metavar="HANDLE", help="mem:<type>:<key>")
    parser.add_argument("--purge", action="store_true", help="remove its history too, and every byte from the files")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _shared(parser)


def _forget(options: argparse.Namespace) -> int:
    with opened(options) as memory:
        manager = _manager(options, memory)
        if not confirmed(options, f"{'purge, for good,' if options.purge else 'delete'} {options.handle}?"):
            say("nothing was deleted")
            return NO
        manager.forget(options.handle, purge=options.purge)
    if options.json:
        show.as_json({"forgotten": options.handle, "purged": options.purge})
    else:
        show.lines(f"{'purged' if options.purge else 'forgot'} {options.handle}")
    return 0
