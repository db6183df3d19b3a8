"""Commands that read: none changes the memory, and all work while another process writes to it."""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromem_torch.cli import show
from zeromem_torch.cli.options import (
    NO,
    boundary_option,
    compute_options,
    describe,
    memory_options,
    meta_option,
    opened,
    positive,
    reader_option,
    say,
    the_boundary,
    unknown,
)
from zeromem_torch.substrate.traces import ZeroMemError

if TYPE_CHECKING:
    from zeromem_torch.evidence import EvidenceItem
    from zeromem_torch.library import ZeroMem


def search_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _search,
        "Finds what was said that answers a question. Each piece comes with its rank, its score, its day, who said it "
        "and the id of its trace; with --json all that is known of it. Filters are applied before anything is ranked.",
        'zeromem search "When does the course start?"',
        'zeromem search "What did we decide about Oslo?" --boundary acme/ --speaker Ann --after 2025-01-01',
        "zeromem search --json --token-budget 512 - < questions.txt > evidence.jsonl",
    )
    parser.add_argument("--explain", action="store_true", help="show the route, the views and what each score sums")
    _search_options(parser)


def answer_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _answer,
        "Answers a question from the memory: finds evidence as a search does, has a reader answer from it, and "
        "calibrates what it says against the evidence. Each answer cites the traces that bear it out. Only the reader "
        "is a language model; the embedded one is small, and shows how it works rather than how well: name your own.",
        'zeromem answer "When does the course start?"',
        'zeromem answer "Who likes jazz?" --boundary alice --reader openai:MODEL@http://localhost:8000/v1',
        "zeromem answer --json --abstain - < questions.txt > answers.jsonl",
    )
    reader_option(parser)
    parser.add_argument("--reader-budget", type=positive, metavar="N", help="most tokens of evidence in a prompt")
    parser.add_argument("--raw", action="store_true", help="the answer as the reader said it, without calibration")
    parser.add_argument("--abstain", action="store_true", help='answer "not in memory" where no evidence supports more')
    _search_options(parser)


def _answer(options: argparse.Namespace) -> int:
    from zeromem_torch.calibration.answer import NOT_IN_MEMORY

    with opened(options, read_only=True) as memory:
        queries, asked, settings = _question(options, memory)
        answers = memory.answer_batch(
            queries,
            boundaries=[asked] * len(queries),
            reader=options.reader,
            reader_budget=options.reader_budget,
            calibrate=not options.raw,
            abstain=options.abstain,
            **settings,
        )
        page = show.width()
        for number, answered in enumerate(answers):
            if options.json:
                show.as_json(answered.to_dict())
                continue
            if len(answers) > 1:
                show.lines(*([""] if number else []), answered.question)
            if answered.error:
                say(f"no answer: {answered.error}")
                continue
            show.lines(answered.text)
            if answered.text != answered.raw.strip() and answered.raw:
                show.lines(f'{show.INDENT}the reader said "{answered.raw.strip()}"; {answered.explanation}')
            if answered.text not in ("", NOT_IN_MEMORY) and not answered.supported and not options.raw:
                show.lines(f"{show.INDENT}nothing that was found bears this out")
            cited = replace(answered.evidence, items=answered.citations)
            several = len(memory.boundaries) > 1
            show.lines(*show.evidence_page(cited, _names(memory), page, boundary=several, explain=False))
    return 0 if any(answered.text and answered.evidence for answered in answers) else NO


def _question(options: argparse.Namespace, memory: ZeroMem) -> tuple[list[str], Any, dict[str, Any]]:
    """What is asked, where, and how it is searched for."""
    queries = [" ".join(options.query)]
    if options.query == ["-"]:
        queries = [line.strip() for line in sys.stdin if line.strip()]
    names = options.boundary or [the_boundary(memory, None)]
    unknown(memory, names)
    settings = {name: getattr(options, name) for name in ("top_k", "token_budget", "as_of", "min_score")}
    return queries, names[0] if len(names) == 1 else names, {**settings, "filters": _filters(options)}


def _search(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        queries, asked, settings = _question(options, memory)
        found = memory.search_batch(
            queries, boundaries=[asked] * len(queries), explain=options.explain, **settings
        )
        if options.json:
            for evidence in found:
                show.as_json(evidence.to_dict())
            return 0 if any(found) else NO
        several, page = not isinstance(asked, str) or asked.endswith("/"), show.width()
        for number, evidence in enumerate(found):
            if len(found) > 1:
                show.lines(*([""] if number else []), evidence.query)
            if not evidence:
                say(f"nothing found: {'; '.join(evidence.reasons)}")
            show.lines(*show.evidence_page(evidence, _names(memory), page, boundary=several, explain=options.explain))
    return 0 if any(found) else NO


def _search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", nargs="+", metavar="QUERY", help="the question; - reads one from each line of stdin")
    boundary_option(parser, "where to look (default: the only one there is)", several=True)
    parser.add_argument("--top-k", type=positive, metavar="N", help="the N best, and what closes them (normally 5)")
    parser.add_argument("--token-budget", type=positive, metavar="N", help="as many of the best as fit N tokens")
    for name in ("session", "speaker", "role"):
        parser.add_argument(f"--{name}", action="append", metavar="NAME", help=f"only of this {name}; may be repeated")
    parser.add_argument("--after", metavar="TIME", help="only what happened then or later")
    parser.add_argument("--before", metavar="TIME", help="only what happened earlier")
    meta_option(parser, "only what has this in its metadata")
    parser.add_argument("--as-of", metavar="TIME", help="what held at that time (default: now)")
    parser.add_argument(
        "--min-score", type=float, metavar="R", help="least relevance, a cosine from -1 to 1; --explain shows it"
    )
    memory_options(parser)
    compute_options(parser)


def _filters(options: argparse.Namespace) -> Mapping[str, Any] | None:
    given = {name: getattr(options, name) for name in ("session", "speaker", "role", "after", "before")}
    filters = {name: value for name, value in given.items() if value is not None}
    return (filters | {"metadata": dict(options.meta)} if options.meta else filters) or None


def _names(memory: ZeroMem) -> Any:
    from zeromem_torch.substrate.units import voice

    def who(item: EvidenceItem) -> str:
        """The speaker, a chat's user or assistant, or a document's title."""
        return item.speaker or voice(memory.get(item.trace_id, boundary=item.boundary)) or item.title

    return who


def get_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _get,
        "Shows all of a trace: what was said, by whom and when, and its metadata.",
        "zeromem get D1:3",
        "zeromem get D1:3 --boundary alice --json",
    )
    parser.add_argument("id", metavar="ID", help="as a search or a list shows it")
    boundary_option(parser, "where the trace is, if several boundaries have the id")
    memory_options(parser)


def _get(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        trace = memory.get(options.id, boundary=options.boundary)
    if options.json:
        show.as_json(trace.to_dict())
    else:
        show.lines(*show.trace_page(trace, show.width()))
    return 0


def list_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _list,
        "Shows traces in the order they came, a line each: boundary, id, day, and the beginning of what was said. "
        "When there are more, it says how to ask for them.",
        "zeromem list --limit 50",
        "zeromem list --limit 50 --cursor 50",
        "zeromem list --boundary acme/ --all",
    )
    boundary_option(parser, "only this one (default: all)", several=True)
    parser.add_argument("--limit", type=positive, default=20, metavar="N", help="at most N (default: %(default)s)")
    parser.add_argument("--cursor", metavar="CURSOR", help="go on where the last list ended")
    parser.add_argument("--all", action="store_true", help="all of them")
    memory_options(parser)


def _list(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        limit = None if options.all else options.limit
        unknown(memory, options.boundary or [])
        found = memory.list(boundary=options.boundary, cursor=options.cursor, limit=limit)
        several = len(memory.boundaries) > 1
    if options.json:
        show.as_json(found.to_dict())
        return 0
    page = show.width()
    show.lines(*(show.trace_line(trace, page, boundary=several) for trace in found.items))
    if found.next_cursor is not None:
        say(f"there are more: --cursor {found.next_cursor}, or --all")
    return 0


def history_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _history,
        "Shows what happened to a trace, oldest first: when, by whom, and what changed. Deleted traces have one too, "
        "purged ones have none.",
        "zeromem history D1:3",
        "zeromem history D1:3 --boundary alice --json",
    )
    parser.add_argument("id", metavar="ID", help="as a search or a list shows it")
    boundary_option(parser, "where the trace is or was, if several boundaries have the id")
    memory_options(parser)


def _history(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        changes = memory.history(options.id, boundary=options.boundary)
    for change in changes:
        if options.json:
            show.as_json(asdict(change))
            continue
        show.lines(f"{change.at}  {change.action}{f'  by {change.actor}' if change.actor else ''}")
        before, after = change.before or {}, change.after or {}
        for name in dict.fromkeys([*before, *after]):
            old, new = before.get(name), after.get(name)
            if old != new and name not in ("added_at", "updated_at"):
                shown = f"{old!r} -> {new!r}" if change.action == "update" else repr(old if new is None else new)
                show.lines(f"{show.INDENT}{name}: {shown}")
    if not changes:
        say(f"nothing happened to {options.id!r} there")
    return 0 if changes else NO


def export_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _export,
        "Writes traces as JSON Lines, in the order they came, with all their fields. `zeromem import` reads them back.",
        "zeromem export memory.jsonl.gz",
        "zeromem export --boundary acme/ - | jq .text",
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="- or nothing: stdout; .gz: compressed")
    boundary_option(parser, "only this one (default: all)", several=True)
    memory_options(parser)


def _export(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        unknown(memory, options.boundary or [])
        if options.file == "-":
            memory.export_jsonl(sys.stdout, boundary=options.boundary)
            return 0
        try:
            opener = gzip.open if options.file.endswith(".gz") else open
            with opener(options.file, "wt", encoding="utf-8", newline="\n") as file:
                count = memory.export_jsonl(file, boundary=options.boundary)
        except OSError as error:
            advice = f"name another ({error})"
            raise ZeroMemError.of("file", "one that can be written", options.file, advice) from error
    if options.json:
        show.as_json({"file": options.file, "traces": count})
    else:
        show.lines(f"wrote {count} traces to {options.file}")
    return 0


def stats_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _stats,
        "Counts what is stored, by boundary, and says where it is and which encoder it was made with.",
        "zeromem stats",
        "zeromem stats --memory ~/memories/work --json",
    )
    memory_options(parser)


def _stats(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        stats = memory.stats()
    counts = stats["boundaries"]
    size = sum(path.stat().st_size for path in Path(options.memory).rglob("*") if path.is_file())
    if options.json:
        show.as_json({**stats, "disk_bytes": size})
        return 0
    show.lines(
        f"memory      {options.memory}",
        f"traces      {stats['traces']}",
        f"encoder     {stats['encoder']}",
        *([f"weights     {stats['checkpoint']} (router: {stats['router']})"] if stats["checkpoint"] else []),
        f"on disk     {size / 1e6:.1f} MB",
        f"boundaries  {len(counts)}",
        *(f"{count:>10}  {name}" for name, count in counts.items()),
    )
    return 0
