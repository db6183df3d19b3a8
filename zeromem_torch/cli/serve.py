"""Commands around a server: serve a memory over HTTP, make and revoke keys, look at what a server does."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from zeromem_torch.cli import show
from zeromem_torch.cli.options import (
    compute_options,
    config_of,
    describe,
    folder_option,
    maker_options,
    memory_options,
    positive,
    reader_option,
    say,
    use_threads_and_device,
)
from zeromem_torch.errors import install
from zeromem_torch.substrate.traces import ZeroMemError

if TYPE_CHECKING:
    from zeromem_torch.library import ZeroMem
    from zeromem_torch.serving.budget import Plan

PORT = 8765
DRAIN = 30
"""Seconds that requests under way have to end when the server is told to stop."""
_EXTRA = ("fastapi", "prometheus_client", "pydantic_core", "starlette", "uvicorn")


def serve_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _serve,
        "Serves a memory over HTTP; it is made if there is none. While it runs this process is the one that writes to "
        "it. /docs shows the API, /readyz says when to start what comes after, /metrics is for Prometheus.\n\n"
        "Without keys it listens on this machine only, and whoever is on this machine may do everything: make keys "
        "with `zeromem keys` to listen elsewhere.",
        "zeromem serve",
        "zeromem serve ~/memory --port 9000 --reader openai:MODEL@http://localhost:8000/v1",
        "zeromem serve ~/memory --device cuda --memory-budget 5GiB --vllm-metrics http://localhost:8000/metrics",
    )
    folder_option(parser, "memory", nargs="?")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help="0: any (default: %(default)s)")
    parser.add_argument(
        "--memory-budget", metavar="SIZE", help="all it may take: 5GiB, or 25%% of the device; refused if too small"
    )
    parser.add_argument("--workspace", metavar="SIZE", help="of the budget, for a batch (default: half, at most 1 GiB)")
    parser.add_argument(
        "--max-burst-tokens", type=positive, metavar="N", help="most tokens indexed in one go (default: 4096)"
    )
    parser.add_argument("--max-batch", type=positive, metavar="N", help="most queries searched together (default: 256)")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="of requests that name none (default: 30)"
    )
    reader_option(parser)
    parser.add_argument("--vllm-metrics", metavar="URL", help="of a vLLM on the same GPU, which indexing gives way to")
    parser.add_argument("--json-logs", action="store_true", help="log JSON, an object a line")
    parser.add_argument("--log-text", action="store_true", help="let what was said stand in the log")
    parser.add_argument("--otel", action="store_true", help="send OpenTelemetry traces; its own variables say where to")
    maker_options(parser)
    compute_options(parser)


def _serve(options: argparse.Namespace) -> int:
    try:
        import uvicorn

        from zeromem_torch.serving.server import create_app
        from zeromem_torch.serving.service import MemoryService
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise ImportError(f"a server needs more; {install('serve')}") from error
    from zeromem_torch.serving.keys import KEYS, Keys
    from zeromem_torch.serving.logs import set_up
    from zeromem_torch.serving.vllm import VllmWatch

    keys = Keys(options.memory / KEYS)
    local = _is_loopback(options.host)
    if not keys and not local:
        advice = "make a key first (`zeromem keys make NAME --boundary ...`), or leave out --host"
        raise ZeroMemError.of("host", "this machine's own address, as there are no keys", options.host, advice)
    watch = None if options.vllm_metrics is None else VllmWatch(options.vllm_metrics)
    limits = _limits(options)
    listener = _listener(options.host, options.port)
    set_up(as_json=options.json_logs, text=options.log_text)
    tracing = _tracing() if options.otel else None
    with listener, _opened(options) as (memory, plan):
        service = MemoryService(memory, limits=limits, keys=keys, reader=options.reader, plan=plan, watch=watch)
        app = create_app(
            service,
            hosts=None if keys else ("localhost", "127.0.0.1", "[::1]", options.host),
            mcp=_has("mcp"),
            log_text=options.log_text,
            tracing=tracing,
            drain_seconds=DRAIN,
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_keep_alive=30,
            lifespan="on",
            timeout_graceful_shutdown=DRAIN,
        )
        server = uvicorn.Server(config)
        host, port = listener.getsockname()[:2]
        say(f"serving {options.memory} at http://{f'[{host}]' if ':' in host else host}:{port} (/docs shows the API)")
        if not keys:
            say("there are no keys: it listens on this machine only, and whoever is here may do everything")
        _until_told(lambda: server.run(sockets=[listener]))
        if tracing is not None:
            tracing.close()
    return 0 if server.started else 1


def _until_told(run: Callable[[], None]) -> None:
    """Run until told to stop. uvicorn raises the signal again when it is done, and the memory is yet to be closed."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with suppress(KeyboardInterrupt):
            run()
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[tuple[ZeroMem, Plan | None]]:
    """The memory, inside its budget. What it could not index before is indexed while it serves."""
    from zeromem_torch.folder import RECORD
    from zeromem_torch.library import ZeroMem
    from zeromem_torch.sizes import bytes_of

    use_threads_and_device(options)
    if not (options.memory / RECORD).exists():
        say(f"makes a new memory in {options.memory}")
    settings: dict[str, Any] = {"encoder": options.encoder, "config": config_of(options), "device": options.device}
    workspace = None if options.workspace is None else bytes_of("workspace", options.workspace)
    plan = None
    if options.memory_budget is not None:
        settings, plan = _planned(options, settings, workspace)
        workspace = plan.workspace
        settings["memory_budget"] = plan.workspace + plan.resident
    with ZeroMem.open(options.memory, workspace=workspace, index=False, **settings) as memory:
        for note in memory.notes:
            say(note)
        yield memory, plan


def _planned(
    options: argparse.Namespace, settings: dict[str, Any], workspace: int | None
) -> tuple[dict[str, Any], Plan]:
    """Load the encoder, plan with what it weighs, and take what is planned."""
    import torch

    from zeromem_torch.library import ZeroMem
    from zeromem_torch.serving.budget import TorchAllocator, claim, device_bytes, plan
    from zeromem_torch.substrate.encoder import encoder_bytes

    with ZeroMem.open(options.memory, index=False, **settings) as memory:
        encoder = memory.encoder
    on_gpu = torch.device(options.device).type == "cuda"
    made = plan(
        options.memory_budget,
        device_total=device_bytes(options.device),
        encoder=encoder_bytes(encoder),
        on_gpu=on_gpu,
        workspace=workspace,
    )
    for line in str(made).splitlines():
        say(line)
    if on_gpu:
        claim(made, TorchAllocator(options.device))
    return {"encoder": encoder, "device": options.device}, made


def _limits(options: argparse.Namespace) -> Any:
    from zeromem_torch.serving.service import Limits

    given = {"burst_tokens": options.max_burst_tokens, "batch": options.max_batch, "timeout": options.timeout}
    return Limits(**{name: value for name, value in given.items() if value is not None})


def _listener(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded: a port that is taken should not cost a start."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        advice = f"name another ({error})"
        raise ZeroMemError.of("port", f"one that {host} can listen on", port, advice) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name may be anybody's
        return False


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _tracing() -> Any:
    try:
        from zeromem_torch.serving.tracing import Tracing
    except ModuleNotFoundError as error:
        raise ImportError(f"traces need OpenTelemetry; {install('otel')}") from error
    return Tracing()


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 120:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, at most 120, got {text!r}")
    return number


# Keys


def keys_command(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Keys say who may do what where on a server. Each is bound to boundaries: a name is that one alone, "acme/" is acme and
all below it. Running servers see a change at their next request."""
    commands = parser.add_subparsers(required=True, metavar="WHAT", title="commands")
    fills: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
        "make": ("make a key; its secret is shown this once", _make_command),
        "list": ("show what keys there are", _list_command),
        "revoke": ("take a key back", _revoke_command),
    }
    for name, (summary, fill) in fills.items():
        own: Any = {"fill": fill}
        commands.add_parser(name, help=summary, **own)


def _keys(options: argparse.Namespace) -> Any:
    from zeromem_torch.serving.keys import KEYS, Keys

    return Keys(options.memory / KEYS)


def _make_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _make,
        "Makes a key and prints its secret, which is stored as a hash and cannot be shown again. Scopes: read; write; "
        "admin, which is both, and purging and metrics too.",
        "zeromem keys make ann-agent --boundary acme/ann",
        "zeromem keys make acme-reader --boundary acme/ --scope read",
        "zeromem keys make operator --all-boundaries --scope admin",
    )
    parser.add_argument("name", metavar="NAME", help="who has it: stands in logs and in the history")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--boundary", action="append", metavar="NAME", help='"acme/": acme and all below it; may be repeated'
    )
    where.add_argument("--all-boundaries", action="store_true", help="all there are and will be")
    parser.add_argument(
        "--scope", action="append", metavar="SCOPE", help="read, write or admin; may be repeated (default: read, write)"
    )
    memory_options(parser)


def _make(options: argparse.Namespace) -> int:
    bound = None if options.all_boundaries else options.boundary
    scopes = options.scope or ["read", "write"]
    secret = _keys(options).make(options.name, scopes=scopes, boundaries=bound)
    if options.json:
        show.as_json({"name": options.name, "key": secret})
    else:
        show.lines(secret)
        say("keep it: it cannot be shown again")
        say("to use it here: export ZEROMEM_KEY=zm_...")
    return 0


def _list_command(parser: argparse.ArgumentParser) -> None:
    describe(parser, _list, "Shows names, scopes and boundaries of the keys; not their secrets.", "zeromem keys list")
    memory_options(parser)


def _list(options: argparse.Namespace) -> int:
    known = _keys(options).list()
    for info in known:
        if options.json:
            show.as_json(info.to_dict())
            continue
        where = "every boundary" if info.boundaries is None else ", ".join(info.boundaries)
        show.lines(f"{info.name}  {', '.join(info.scopes)}  {where}  made {info.made_at}")
    if not known:
        say("there are none; `zeromem keys make NAME --boundary ...` makes one")
    return 0


def _revoke_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _revoke,
        "Takes a key back; servers refuse it from their next request on.",
        "zeromem keys revoke ann-agent",
    )
    parser.add_argument("name", metavar="NAME", help="as `zeromem keys list` shows it")
    memory_options(parser)


def _revoke(options: argparse.Namespace) -> int:
    _keys(options).revoke(options.name)
    if options.json:
        show.as_json({"revoked": options.name})
    else:
        show.lines(f"revoked {options.name}")
    return 0


# Top


def top_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _top,
        "Shows what a server is doing: requests, batches, queue, refusals, memory and index, every two seconds. Where "
        "the server has keys it needs one of scope admin, in the environment variable ZEROMEM_KEY.",
        "zeromem top",
        "zeromem top http://memory.local:8765 --once",
    )
    parser.add_argument(
        "url",
        nargs="?",
        default=f"http://127.0.0.1:{PORT}",
        metavar="URL",
        help="of the server (default: %(default)s)",
    )
    parser.add_argument("--every", type=_seconds, default=2.0, metavar="SECONDS", help="(default: 2)")
    parser.add_argument("--once", action="store_true", help="look once, for a second, and end")


def _top(options: argparse.Namespace) -> int:
    from zeromem_torch.serving.top import watch

    try:
        watch(options.url.rstrip("/"), os.environ.get("ZEROMEM_KEY"), every=options.every, once=options.once)
    except KeyboardInterrupt:
        print()
    return 0
