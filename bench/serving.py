"""A served memory under load: a real server process, real HTTP, clients that ask at once.

  python bench/serving.py --clients 64 --seconds 30 --json OUT

Every figure is of this run, on one memory: conversations in boundaries of their own, each query of one of them.

  closed loop     as many clients as said, each asks again when it is answered: throughput, p50, p95, p99
  unbatched       the same with --max-batch 1: one query at a time, all else equal
                    batched_vs_unbatched          every query text is new, and has to be encoded
                    batched_vs_unbatched_cached   texts that were asked before, whose vectors are known
  open loop       arrivals that wait for nobody, at a share of the measured capacity, and at ten times it: what is
                  refused (429, 503), whether what is accepted keeps its deadline, and the memory taken
  add to found    from a message on its way in to the search that finds it
  peer            another server on the same vectors: Chroma, where its command is at hand (--chroma)
  soak            (--soak SECONDS) adds, searches and deletes: memory, errors, and whether every trace that was
                  acknowledged is there at the end

Load is made by this process, the server is another: on two cores they share the machine.
"""

import argparse
import asyncio
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script knows only its own folder

from bench import made
from bench.measure import has, lines, made_by, say
from zeromem_torch import Trace, ZeroMem
from zeromem_torch.evaluation.datasets import Dataset, load_dataset

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 2.0
"""Seconds that a query of the open loop may take."""
ASKED_BEFORE = 256
"""Texts of the runs with cached vectors."""
OVERLOAD = 10
SHOWN = (
    "what", "clients", "rate", "throughput", "answered", "shed_share", "late_share", "errors", "p50_ms", "p95_ms",
    "p99_ms", "peak_mib",
)  # fmt: skip


# HTTP


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time; reads no more of an answer than its status and length say."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.held = b""
        self.wanted = -1
        self.answer: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # one that writes, which uvloop's does not declare

    def data_received(self, data: bytes) -> None:
        self.held += data
        if self.wanted < 0:
            end = self.held.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.held[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self.wanted = end + 4 + length
        if len(self.held) >= self.wanted and self.answer is not None:
            whole, self.held = self.held[: self.wanted], self.held[self.wanted :]
            self.wanted, future, self.answer = -1, self.answer, None
            if not future.done():
                future.set_result((int(whole[9:12]), whole.partition(b"\r\n\r\n")[2]))

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or ConnectionResetError("the server closed the connection"))
        self.transport = None

    async def send(self, request: bytes) -> tuple[int, bytes]:
        if self.transport is None:
            raise ConnectionResetError("the server closed the connection")
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own, uvloop's where there is one."""
    factory = importlib.import_module("uvloop").new_event_loop if has("uvloop") else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def closed(connections: Iterable[Connection]) -> None:
    """And nothing of them is left to the loop."""
    for connection in connections:
        if connection.transport is not None:
            connection.transport.close()
    await asyncio.sleep(0.05)


async def connected(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


def http(method: str, path: str, body: object = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def asked(port: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """One request on a connection of its own."""
    connection = await connected(port)
    try:
        status, content = await connection.send(http(method, path, body))
        return status, json.loads(content) if content else None
    finally:
        if connection.transport is not None:
            connection.transport.close()
            await asyncio.sleep(0)


# What was measured


@dataclass
class Load:
    """Answers of one run, with what each took; an answer is late beyond ``deadline``."""

    deadline: float = float("inf")
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of those that were answered
    refused: list[float] = field(default_factory=list)
    errors: int = 0
    span: float = 0.0

    def note(self, status: int, spent: float) -> None:
        self.statuses[status] += 1
        (self.seconds if status < 300 else self.refused).append(spent)

    def figures(self) -> dict[str, Any]:
        asked, shed = self.statuses.total() + self.errors, self.statuses[429] + self.statuses[503]
        late = sum(spent > self.deadline for spent in self.seconds)
        ordered = sorted(self.seconds)
        at = {f"p{p}_ms": round(1e3 * ordered[int(len(ordered) * p / 100)], 2) for p in (50, 95, 99) if ordered}
        return {
            "throughput": round(len(ordered) / self.span, 1),
            "answered": len(ordered),
            "shed_share": round(shed / max(1, asked), 4),
            "late_share": round(late / max(1, len(ordered)), 4),
            "errors": asked - len(ordered) - shed,
            **at,
            **({"refused_p50_ms": round(1e3 * statistics.median(self.refused), 2)} if self.refused else {}),
        }


async def closed_loop(port: int, requests: Iterator[bytes], clients: int, seconds: float) -> Load:
    """Each client asks again when it is answered; who is refused waits a little, as the server asks for."""
    load, end = Load(), time.perf_counter() + seconds

    async def client() -> None:
        connection = await connected(port)
        while time.perf_counter() < end:
            start = time.perf_counter()
            try:
                status, _ = await connection.send(next(requests))
            except OSError:
                load.errors += 1
                connection = await connected(port)
                continue
            load.note(status, time.perf_counter() - start)
            if status >= 400:
                await asyncio.sleep(0.05)
        await closed([connection])

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.span = time.perf_counter() - start
    return load


async def open_loop(port: int, requests: Iterator[bytes], rate: float, seconds: float, most: int) -> Load:
    """Arrivals at random times, ``rate`` a second, over at most ``most`` connections, whoever still waits."""
    load, draw, idle = Load(DEADLINE), random.Random(0), list[Connection]()
    running = set[asyncio.Task[None]]()

    async def once(request: bytes) -> None:
        start = time.perf_counter()
        try:
            connection = idle.pop() if idle else await connected(port)
            status, _ = await connection.send(request)
        except OSError:
            load.errors += 1
            return
        load.note(status, time.perf_counter() - start)
        idle.append(connection)

    start = due = time.perf_counter()
    while due < start + seconds:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if len(running) >= most:  # more than this machine has sockets for
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(once(next(requests)))
        running.add(task)
        task.add_done_callback(running.discard)
    if running:
        await asyncio.wait(running)
    load.span = time.perf_counter() - start
    await closed(idle)
    return load


# The server


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    def memory(self) -> dict[str, int]:
        """Bytes resident now, and at most so far."""
        status = Path(f"/proc/{self.process.pid}/status")
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
        return {
            name: 1024 * int(fields[key].split()[0])
            for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))
            if key in fields
        }


@contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """`zeromem serve` as a process of its own, until it is ready; told to stop behind it."""
    log.write_bytes(b"")  # or the port of the server before would be found in it
    command = [sys.executable, "-c", "import sys; from zeromem_torch.cli import main; sys.exit(main())", "serve"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, str(folder), "--port", "0", *options], stderr=file, stdout=file, cwd=ROOT, env={**os.environ}
        )
    try:
        port = _until(lambda: _port(log, process), 120, log)
        _until(lambda: run(_is_ready(port)), 300, log)
        yield Server(process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()


def _until(look: Callable[[], Any], seconds: float, log: Path) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")


def _port(log: Path, process: subprocess.Popen[bytes]) -> int | None:
    if process.poll() is not None:
        raise SystemExit(f"the server ended:\n{log.read_text()[-2000:]}")
    said = [line for line in log.read_text().splitlines() if "at http://127.0.0.1:" in line]
    return int(said[-1].rsplit("http://127.0.0.1:", 1)[1].split()[0]) if said else None


async def _is_ready(port: int) -> bool:
    try:
        status, _ = await asked(port, "GET", "/readyz")
        return status == 200
    except OSError:
        return False


# What is asked


class Questions:
    """Requests for questions of a data set: new ones each time, or the same few again."""

    def __init__(self, data: Dataset, timeout: float | None = None) -> None:
        own = list(data.questions)
        random.Random(3).shuffle(own)
        self.own, self.timeout, self.number = own, timeout, count()

    def new(self) -> Iterator[bytes]:
        """Texts that were never asked before: they have to be encoded."""
        for question in cycle(self.own):
            yield self._request(f"{question.text} (asked as number {next(self.number)})", question.boundary)

    def again(self) -> Iterator[bytes]:
        return cycle([self._request(question.text, question.boundary) for question in self.own[:ASKED_BEFORE]])

    def _request(self, text: str, boundary: str) -> bytes:
        body: dict[str, Any] = {"query": text, "boundary": boundary}
        return http("POST", "/v1/search", body if self.timeout is None else {**body, "timeout": self.timeout})


def filled(folder: Path, data: Dataset) -> int:
    """The memory on disk; returns how many traces it holds."""
    with ZeroMem.open(folder) as memory:
        memory.add(data.traces)
        return len(memory)


# Runs


async def loop_of(server: Server, requests: Iterator[bytes], clients: int, seconds: float, warm: float) -> Load:
    await closed_loop(server.port, requests, clients, warm)
    return await closed_loop(server.port, requests, clients, seconds)


def closed_loops(
    args: argparse.Namespace, folder: Path, data: Dataset, log: Path
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Batched and one at a time, with texts that are new and with texts that were asked before."""
    figures: list[dict[str, Any]] = []
    reached: dict[tuple[str, str], float] = {}
    for batching, options in (("batched", ()), ("unbatched", ("--max-batch", "1"))):
        with served(folder, log, *args.options, *options) as server:
            for texts in ("new", "again"):
                questions = Questions(data)
                requests = questions.new() if texts == "new" else questions.again()
                load = run(loop_of(server, requests, args.clients, args.seconds, args.warm))
                figure = load.figures()
                reached[batching, texts] = figure["throughput"]
                what = f"closed loop, {batching}, {'texts are new' if texts == 'new' else 'vectors known'}"
                figures.append({"what": what, "clients": args.clients, **figure, **_peak(server)})
            if batching == "batched":
                for clients in args.more_clients:
                    load = run(loop_of(server, Questions(data).new(), clients, args.seconds / 3, args.warm))
                    row = {"what": "closed loop, batched, texts are new", "clients": clients}
                    figures.append({**row, **load.figures(), **_peak(server)})
    ratios = {
        "batched_vs_unbatched": reached["batched", "new"] / reached["unbatched", "new"],
        "batched_vs_unbatched_cached": reached["batched", "again"] / reached["unbatched", "again"],
    }
    return figures, ratios


def open_loops(
    args: argparse.Namespace, folder: Path, data: Dataset, log: Path, capacity: float
) -> list[dict[str, Any]]:
    figures = []
    with served(folder, log, *args.options) as server:
        for share in (0.5, 0.8, OVERLOAD):
            rate = max(1.0, share * capacity)
            requests = Questions(data, timeout=DEADLINE).new()
            load = run(open_loop(server.port, requests, rate, args.seconds / 2, args.connections))
            row = {"what": f"open loop, {share:g} x capacity, {DEADLINE:g} s allowed", "rate": round(rate, 1)}
            figures.append({**row, **load.figures(), **_peak(server)})
    return figures


def add_to_found(args: argparse.Namespace, folder: Path, log: Path) -> list[dict[str, Any]]:
    """Seconds from sending a message, ``wait`` set, to the end of a search that finds it."""

    async def each(port: int) -> list[float]:
        spent = []
        for number in range(5 if args.quick else 30):
            text = f"The code of locker {number} is {number * 7919}."
            start = time.perf_counter()
            body = {"messages": {"text": text}, "boundary": "bench/lockers", "wait": True}
            status, added = await asked(port, "POST", "/v1/memories", body)
            query = {"query": f"What is the code of locker {number}?", "boundary": "bench/lockers"}
            _, found = await asked(port, "POST", "/v1/search", query)
            if status >= 300 or added["ids"][0] not in [item["trace_id"] for item in found["items"]]:
                raise SystemExit(f"add to found: expected {text!r} to be found, got {found}")
            spent.append(time.perf_counter() - start)
        await asked(port, "DELETE", f"/v1/boundaries/{quote('bench/lockers', safe='')}?purge=true")
        return spent

    with served(folder, log, *args.options) as server:
        load = Load(seconds=run(each(server.port)), span=1.0)
    return [{"what": "add to found, alone", "clients": 1, **{k: v for k, v in load.figures().items() if k[0] == "p"}}]


def peer(args: argparse.Namespace, folder: Path, data: Dataset, log: Path) -> list[dict[str, Any]]:
    """Chroma on the same vectors, a collection a boundary, asked with vectors that are known; ours stands beside it."""
    command = args.chroma or shutil.which("chroma")
    if not command:
        return []
    from zeromem_torch.substrate.encoder import load_encoder

    encoder = load_encoder("minilm")
    traces: dict[str, list[Trace]] = {}
    for trace in data.traces:
        traces.setdefault(trace.boundary, []).append(trace)
    questions = Questions(data).own[:ASKED_BEFORE]
    vectors = encoder.encode([question.text for question in questions]).vectors.tolist()
    port = 18_000 + os.getpid() % 1000
    base = "/api/v2/tenants/default_tenant/databases/default_database/collections"

    async def fill() -> dict[str, str]:
        homes = {}
        for number, (boundary, own) in enumerate(traces.items()):
            _, made = await asked(port, "POST", base, {"name": f"boundary-{number}"})
            homes[boundary] = made["id"]
            for first in range(0, len(own), 500):
                some = own[first : first + 500]
                rows = encoder.encode([trace.text for trace in some]).vectors.tolist()
                body = {"ids": [t.id for t in some], "embeddings": rows, "documents": [t.text for t in some]}
                status, said = await asked(port, "POST", f"{base}/{made['id']}/add", body)
                if status >= 300:
                    raise SystemExit(f"chroma: expected to add, got {status} {said}")
        return homes

    with tempfile.TemporaryDirectory() as held, log.open("ab") as file:
        start = [command, "run", "--path", held, "--port", str(port)]
        process = subprocess.Popen(start, stdout=file, stderr=file, env={**os.environ, "ANONYMIZED_TELEMETRY": "False"})
        try:
            _until(lambda: run(_answers(port, "/api/v2/heartbeat")), 60, log)
            homes = run(fill())
            requests = cycle(
                http("POST", f"{base}/{homes[q.boundary]}/query", {"query_embeddings": [vector], "n_results": 10})
                for q, vector in zip(questions, vectors, strict=True)
            )
            load = run(loop_of(Server(process, port), requests, args.clients, args.seconds / 2, args.warm))
            row = {"what": "peer: Chroma, vectors known, nearest 10", "clients": args.clients}
            return [{**row, **load.figures(), **_peak(Server(process, port))}]
        finally:
            process.terminate()
            process.wait(20)


async def _answers(port: int, path: str) -> bool:
    try:
        status, _ = await asked(port, "GET", path)
        return status == 200
    except OSError:
        return False


def soak(args: argparse.Namespace, folder: Path, data: Dataset, log: Path) -> dict[str, Any]:
    """Adds, searches and deletes for a long time; memory is sampled, and at the end every trace is looked for."""
    kept: dict[str, str] = {}  # acknowledged and not deleted since: id and boundary
    errors: list[str] = []
    searches = adds = deletes = refused = 0
    samples: list[tuple[float, int]] = []
    number = count()

    async def act(port: int, draw: random.Random, requests: Iterator[bytes], end: float) -> None:
        nonlocal searches, adds, deletes, refused
        connection = await connected(port)
        while time.monotonic() < end:
            chance = draw.random()
            try:
                if chance < 0.15:
                    boundary = f"soak/{draw.randrange(50)}"
                    text = f"Parcel {next(number)} went to shelf {draw.randrange(1000)} in hall {draw.randrange(9)}."
                    body = {"messages": {"text": text}, "boundary": boundary}
                    status, said = await connection.send(http("POST", "/v1/memories", body))
                    if status == 201:
                        adds += 1
                        kept[json.loads(said)["ids"][0]] = boundary
                elif chance < 0.25 and len(kept) > 200:
                    own = next(iter(kept)) if draw.random() < 0.5 else draw.choice(list(kept))
                    boundary = kept.pop(own)
                    path = f"/v1/memories/{quote(own, safe='')}?boundary={quote(boundary, safe='')}"
                    status, said = await connection.send(http("DELETE", path))
                    deletes += status == 204
                    if status != 204:
                        kept[own] = boundary
                else:
                    status, said = await connection.send(next(requests))
                    searches += status == 200
            except OSError as error:
                errors.append(repr(error))
                connection = await connected(port)
                continue
            if status in (429, 503):
                refused += 1
                await asyncio.sleep(0.2)
            elif status >= 300:
                errors.append(f"{status} {said[:200]!r}")
        await closed([connection])

    async def sample(server: Server, end: float) -> None:
        while time.monotonic() < end:
            samples.append((round(args.soak - (end - time.monotonic()), 1), server.memory()["now"]))
            await asyncio.sleep(min(10.0, args.soak / 20))

    async def missing(port: int) -> int:
        held: set[str] = set()
        cursor = ""
        while True:
            _, page = await asked(port, "GET", f"/v1/memories?boundary=soak/&limit=1000{cursor}")
            held.update(trace["id"] for trace in page["items"])
            if page["next_cursor"] is None:
                return len(kept.keys() - held) + len(held - kept.keys())
            cursor = f"&cursor={page['next_cursor']}"

    async def whole(server: Server) -> int:
        end = time.monotonic() + args.soak
        requests = Questions(data).new()
        clients = [act(server.port, random.Random(seed), requests, end) for seed in range(args.soak_clients)]
        await asyncio.gather(sample(server, end), *clients)
        return await missing(server.port)

    with served(folder, log, *args.options) as server:
        lost = run(whole(server))
        peak = _peak(server)
    half = [held for at, held in samples if at > args.soak / 2] or [0]
    thirds = [held for at, held in samples if at > args.soak * 5 / 6] or [0]
    return {
        "what": "soak", "seconds": args.soak, "clients": args.soak_clients, "searches": searches, "adds": adds,
        "deletes": deletes, "refused": refused, "errors": len(errors), "first_errors": errors[:3],
        "acknowledged_and_missing_or_deleted_and_there": lost, "traces_at_the_end": len(kept),
        "mib_at_half_time": round(half[0] / 2**20, 1),
        "mib_in_the_last_sixth": round(statistics.median(thirds) / 2**20, 1),
        "mib_by_time": [(at, round(held / 2**20, 1)) for at, held in samples], **peak,
    }  # fmt: skip


def _peak(server: Server) -> dict[str, float]:
    held = server.memory()
    return {"peak_mib": round(held["peak"] / 2**20, 1)} if held else {}


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64, metavar="N", help="of the closed loop (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each run (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write ratios and figures here")
    parser.add_argument("--locomo", type=Path, metavar="PATH", help="LoCoMo conversations (default: made ones)")
    parser.add_argument("--memory-budget", default="3GiB", metavar="SIZE", help="of the server (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the server's PyTorch (%(default)s)")
    parser.add_argument("--connections", type=int, default=400, metavar="N", help="open at once, at most (%(default)s)")
    parser.add_argument("--chroma", metavar="COMMAND", help="of a peer server (default: chroma, if it is on the path)")
    parser.add_argument("--soak", type=float, metavar="S", help="only this: seconds of adds, searches and deletes")
    parser.add_argument("--soak-clients", type=int, default=8, metavar="N", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small and short: to see that it runs")
    args = parser.parse_args(words)
    args.warm = min(3.0, args.seconds / 5)
    args.more_clients = () if args.quick else (1, 8, 200)
    args.options = ("--threads", str(args.threads), "--memory-budget", args.memory_budget)
    if args.locomo:
        data = load_dataset("locomo", args.locomo)
    else:
        data = made.conversations(2, 30, 16) if args.quick else made.conversations()
    result: dict[str, Any] = {**made_by("serving", words, "cpu"), "data": data.name if args.locomo else "made",
                              "memory_budget": args.memory_budget, "server_threads": args.threads}  # fmt: skip
    with tempfile.TemporaryDirectory() as held:
        folder, log = Path(held) / "memory", Path(held) / "server.log"
        say("the memory is read and encoded")
        result["traces"] = filled(folder, data)
        if args.soak:
            figures = [soak(args, folder, data, log)]
            ratios: dict[str, float] = {}
            print(json.dumps({name: value for name, value in figures[0].items() if name != "mib_by_time"}, indent=1))
        else:
            say("closed loops")
            figures, ratios = closed_loops(args, folder, data, log)
            say("open loops")
            figures += open_loops(args, folder, data, log, figures[0]["throughput"])
            say("add to found")
            figures += add_to_found(args, folder, log)
            say("peer")
            figures += peer(args, folder, data, log)
            print("\n".join(lines(figures, SHOWN)))
            first = figures[0]
            names = ("throughput", "p50_ms", "p95_ms", "p99_ms", "shed_share")
            result |= {name: first[name] for name in names}
            result["peak_bytes"] = round(max(row.get("peak_mib", 0) for row in figures[:-1]) * 2**20)
    result |= {name: round(value, 3) for name, value in ratios.items()}
    for name, value in ratios.items():
        print(f"{name}: {value:.3g}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**result, "figures": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
