"""Kills a server in the middle of concurrent adds, again and again, and looks each time for what it had acknowledged.

    python tests/faults/kill_server.py --times 50

A real server process over a folder that lives through all of it. Clients add over HTTP, some waiting for the index,
some sending the same request again under one idempotency key; an id counts as acknowledged once its answer has come.
After a random time SIGKILL ends the server. The next one is started on the same folder and must, by itself: answer,
list every acknowledged trace once, catch up with its index, and find what was added last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read once, when torch and numpy are imported
        os.environ[variable] = "1"
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import httpx2

CLIENTS = 6
STARTS_IN, CATCHES_UP_IN = 60.0, 60.0  # seconds, at most
BOUNDARIES = ("acme", "acme/ann", "acme-corp", "作業")


@dataclass
class Result:
    """What all kills together have shown."""

    kills: int = 0
    acknowledged: dict[str, tuple[str, str]] = field(default_factory=dict)  # id: boundary and text
    unanswered: int = 0  # sent, and cut off by a kill
    waiting_at_start: int = 0  # traces that a server had stored and not yet indexed when it was killed
    problems: list[str] = field(default_factory=list)


def run(times: int, seed: int, folder: Path, *, say: Any = lambda line: None) -> Result:
    """Kill a server ``times`` times, and look at what the next one makes of it each time."""
    draw, result, number = random.Random(seed), Result(), count()
    for kill in range(times + 1):
        process, url = _started(folder)
        try:
            asyncio.run(_look(url, result))
            if kill == times:
                process.send_signal(signal.SIGTERM)  # the last one ends in peace
                if process.wait(60):
                    result.problems.append(f"the last server ended with {process.returncode}")
                break
            asyncio.run(_add_until_killed(url, process, draw.uniform(0.05, 1.0), draw, number, result))
            result.kills += 1
            say(f"kill {result.kills}: {len(result.acknowledged)} acknowledged, {len(result.problems)} problems")
        finally:
            process.kill()
            process.wait()
    return result


def _started(folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, __file__, "--serve", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        url = process.stdout.readline().strip()
    end = time.monotonic() + STARTS_IN
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx2.get(f"{url}/readyz", timeout=5).status_code == 200:
                return process, url
        except httpx2.TransportError:
            time.sleep(0.05)
    process.kill()
    raise RuntimeError(f"the server did not get ready (it ended with {process.wait()})")


async def _look(url: str, result: Result) -> None:
    """Every acknowledged trace is there, once; the index catches up; the newest of each boundary are found."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        status = (await client.get("/v1/status")).json()
        result.waiting_at_start += status["stored_up_to"] - status["indexed_up_to"]
        held: dict[str, str] = {}
        cursor: dict[str, str] = {}
        while True:
            page = (await client.get("/v1/memories", params={"limit": 1000, **cursor})).json()
            for trace in page["items"]:
                if trace["id"] in held:
                    result.problems.append(f"{trace['id']} is there twice")
                held[trace["id"]] = trace["text"]
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
        for own, (_, text) in result.acknowledged.items():
            if held.get(own) != text:
                result.problems.append(f"{own} was acknowledged as {text!r}, and is {held.get(own)!r}")
        end = time.monotonic() + CATCHES_UP_IN
        while status["indexed_up_to"] < status["stored_up_to"] and time.monotonic() < end:
            await asyncio.sleep(0.05)
            status = (await client.get("/v1/status")).json()
        if status["indexed_up_to"] < status["stored_up_to"]:
            result.problems.append(f"the index did not catch up: {status}")
        newest = {boundary: (own, text) for own, (boundary, text) in result.acknowledged.items()}
        for boundary, (own, text) in newest.items():
            found = (await client.post("/v1/search", json={"query": text, "boundary": boundary})).json()
            if own not in [item["trace_id"] for item in found["items"]]:
                result.problems.append(f"{own} ({text!r}) is not found")


async def _add_until_killed(
    url: str, process: subprocess.Popen[str], seconds: float, draw: random.Random, number: Any, result: Result
) -> None:
    async def add(client: httpx2.AsyncClient, own: random.Random) -> None:
        while True:
            boundary, first = own.choice(BOUNDARIES), next(number)
            texts = [
                f"crate {first} part {part} stands in yard {own.randrange(90)}" for part in range(own.choice((1, 1, 5)))
            ]
            body = {"messages": [{"text": text} for text in texts], "boundary": boundary, "wait": own.random() < 0.2}
            again = own.random() < 0.3
            headers = {"Idempotency-Key": f"key-{first}"} if again else {}
            try:
                answers = [await client.post("/v1/memories", json=body, headers=headers) for _ in range(1 + again)]
            except httpx2.TransportError:
                result.unanswered += 1
                return
            for answer in answers:
                if answer.status_code != 201:
                    result.problems.append(f"an add was answered {answer.status_code} {answer.text[:200]}")
                    return
                result.acknowledged.update(
                    {own_id: (boundary, text) for own_id, text in zip(answer.json()["ids"], texts, strict=True)}
                )

    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        adding = [asyncio.create_task(add(client, random.Random(draw.random()))) for _ in range(CLIENTS)]
        await asyncio.sleep(seconds)
        process.kill()
        await asyncio.gather(*adding)


def serve(folder: Path) -> None:
    """A server over the folder, with an encoder that needs no weights; says its address on standard output."""
    import socket

    import torch
    import uvicorn
    from toys import RULES, HashEncoder

    from zeromem_torch.library import ZeroMem
    from zeromem_torch.serving.server import create_app
    from zeromem_torch.serving.service import Limits, MemoryService

    torch.set_num_threads(1)
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # uvicorn raises it again when it is done, before the memory is closed
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        memory = ZeroMem.open(folder, encoder=HashEncoder(), config=RULES, index=False)
        # Steps so small that a kill finds some of the traces indexed and some not.
        service = MemoryService(memory, limits=Limits(burst_tokens=256), warm_up=False)
        server = uvicorn.Server(uvicorn.Config(create_app(service, mcp=False), log_config=None, access_log=False))
        server.run(sockets=[listener])
        memory.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50, metavar="N", help="kills (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = run(
            options.times, options.seed, Path(folder) / "memory", say=lambda line: print(line, file=sys.stderr)
        )
    print(f"kills {result.kills}")
    print(f"acknowledged traces {len(result.acknowledged)}")
    print(f"requests cut off {result.unanswered}")
    print(f"stored and not yet indexed at a start {result.waiting_at_start}")
    print(f"problems {len(result.problems)}")
    for problem in result.problems[:20]:
        print(f"  {problem}")
    return bool(result.problems)


if __name__ == "__main__":
    raise SystemExit(main())
