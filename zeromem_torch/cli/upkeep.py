"""Commands that look after a memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from zeromem_torch.cli import show
from zeromem_torch.cli.options import NO, compute_options, describe, memory_options, opened, say


def verify_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _verify,
        "Checks the record, the index files and that they agree, and reads every trace again to prove that the index "
        "is what a rebuild would make. It mends nothing: `zeromem rebuild` makes the index anew.",
        "zeromem verify",
        "zeromem verify --quick --json",
    )
    parser.add_argument("--quick", action="store_true", help="do not read the traces again, which takes longest")
    memory_options(parser)
    compute_options(parser)


def _verify(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        met = list(memory.notes)  # what was wrong when it was opened
        report = memory.verify(quick=options.quick).to_dict()
    problems = list(dict.fromkeys([*met, *report["problems"]]))
    if options.json:
        show.as_json({**report, "ok": not problems, "problems": problems})
        return NO if problems else 0
    compared = "" if options.quick else f", {report['rows_compared']} index rows made again and compared"
    show.lines(f"{report['traces']} traces checked{compared}: {len(problems) or 'no'} problems", *problems)
    if problems:
        say("`zeromem rebuild` makes the index anew from the record")
    return NO if problems else 0


def rebuild_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _rebuild,
        "Makes the whole index anew from the record. Needed only if `zeromem verify` says so: what is damaged or out "
        "of date is found and mended when a memory is opened for writing.",
        "zeromem rebuild",
        "zeromem rebuild --memory ~/memories/work --threads 8",
    )
    memory_options(parser)
    compute_options(parser)


def _rebuild(options: argparse.Namespace) -> int:
    with opened(options) as memory:
        memory.rebuild()
        traces = len(memory)
    if options.json:
        show.as_json({"traces": traces})
    else:
        show.lines(f"made the index of {traces} traces anew")
    return 0


def reencode_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _reencode,
        "Changes the encoder of a memory, and makes the index anew with it. Interrupted, it goes on when the memory is "
        "next opened.",
        "zeromem reencode bge-m3 --device cuda",
        "zeromem reencode ./my-encoder",
    )
    parser.add_argument("encoder_name", metavar="NAME", help="minilm, bge-m3, a folder or a hub name")
    memory_options(parser)
    compute_options(parser)


def _reencode(options: argparse.Namespace) -> int:
    with opened(options) as memory:
        memory.reencode(options.encoder_name)
        traces, encoder = len(memory), memory.encoder.fingerprint
    if options.json:
        show.as_json({"traces": traces, "encoder": encoder})
    else:
        show.lines(f"made the index of {traces} traces anew with {encoder}")
    return 0


def backup_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _backup,
        "Copies a memory to a new folder, also while another process writes to it. The copy opens like any other.",
        "zeromem backup backups/2025-03-02",
        "zeromem search --memory backups/2025-03-02 'Is all of it there?'",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new, or empty")
    memory_options(parser)


def _backup(options: argparse.Namespace) -> int:
    with opened(options, read_only=True) as memory:
        memory.backup(options.folder)
        traces = len(memory)
    if options.json:
        show.as_json({"traces": traces, "folder": str(options.folder)})
    else:
        show.lines(f"copied {traces} traces to {options.folder}")
    return 0
