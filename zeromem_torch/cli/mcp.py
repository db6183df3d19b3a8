"""`zeromem mcp`: the memory as tools of a model, over standard input and output."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from zeromem_torch.cli.options import compute_options, describe, folder_option, maker_options, opened, say
from zeromem_torch.errors import install


def mcp_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _mcp,
        "Offers a memory to a model by the Model Context Protocol, over standard input and output; the program that "
        "the model works in starts it. The memory is made if there is none.\n\n"
        "While it runs nothing else can write to the memory. Where several programs share one, run `zeromem serve`, "
        "which speaks the same protocol at http://localhost:8765/mcp.\n\n"
        "A memory that has keys (`zeromem keys`) needs one, in the environment variable ZEROMEM_KEY.",
        "zeromem mcp ~/memory --boundary me",
        "ZEROMEM_KEY=zm_... zeromem mcp ~/memory",
    )
    folder_option(parser, "memory", nargs="?")
    parser.add_argument(
        "--boundary",
        metavar="NAME",
        help='whose memory: the model sees and names no other; "acme/" is acme and all below it (default: all that the '
        "key allows, and the model names one)",
    )
    maker_options(parser)
    compute_options(parser)


def _mcp(options: argparse.Namespace) -> int:
    try:
        from zeromem_torch.serving.mcp import serve_stdio
        from zeromem_torch.serving.service import MemoryService
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "prometheus_client"):
            raise
        raise ImportError(f"this needs the official MCP SDK; {install('mcp')}") from error
    from zeromem_torch.serving.keys import KEYS, Keys
    from zeromem_torch.serving.logs import set_up

    if sys.stdin.isatty():
        say("this speaks with a program, not with a person; end it with Ctrl-D, and see `zeromem mcp --help`")
    set_up()
    with opened(options, make=True) as memory:
        # One client calls here, and waits for a greeting first: what batches cost is learnt as they run.
        service = MemoryService(memory, keys=Keys(options.memory / KEYS), warm_up=False)
        serving = serve_stdio(service, key=os.environ.get("ZEROMEM_KEY"), boundary=options.boundary)
        asyncio.run(_until_told(serving, memory.close))
    return 0


async def _until_told(work: Coroutine[Any, Any, None], close: Callable[[], None]) -> None:
    """Until it is done: the other side has closed our input. Told to stop before, the process ends at once.

    A thread of it waits for input, and nothing can wake it; so the memory is closed here.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # on Windows
            loop.add_signal_handler(number, told.set)
    serving, stopping = asyncio.ensure_future(work), asyncio.ensure_future(told.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        close()
        os._exit(0)
    stopping.cancel()
    await serving
