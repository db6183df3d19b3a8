"""What the reader's load leaves for indexing, and that a reader that is not there stops nothing."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_serving_batcher import LATER, Indexing, Server, started, until
from test_serving_budget import ENCODER, Card, loaded, the_plan

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.serving.budget import claim, held, steady
from zeromem_torch.serving.vllm import LEAST, VllmWatch

TEXT = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
%s
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
%s
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 77.0
vllm:kv_cache_usage_perc{engine="0",model_name="qwen"} 0.03
"""


def text(running: float, waiting: float) -> str:
    labels = '{engine="0",model_name="a {brace} \\" and quote"}'
    return TEXT % (f"vllm:num_requests_running{labels} {running}", f"vllm:num_requests_waiting{labels} {waiting}")


def watching(*answers: str | Exception) -> VllmWatch:
    left = iter(answers)

    def fetch(url: str) -> str:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return VllmWatch("http://127.0.0.1:8000", fetch=fetch)


@pytest.mark.parametrize(
    ("running", "waiting", "share"),
    [(0, 0, 1.0), (1, 0, 0.5), (4, 0, 0.2), (1000, 0, LEAST), (0, 1, LEAST), (3, 20, LEAST)],
)
def test_indexing_gets_what_the_reader_leaves(running: float, waiting: float, share: float) -> None:
    watch = watching(text(running, waiting))
    watch.poll()
    assert (watch.running, watch.waiting) == (running, waiting)
    assert watch.share() == pytest.approx(share)
    assert watch.reachable


def test_engines_and_models_are_counted_together() -> None:
    running = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0'
    watch = watching(TEXT % (running, "vllm:num_requests_waiting 1e0 1700000000000"))
    watch.poll()
    assert (watch.running, watch.waiting) == (5, 1)


def test_a_reader_that_is_not_there_is_as_if_idle_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    gone = ConnectionRefusedError("refused")
    watch = watching(gone, gone, text(5, 5), gone, gone, text(1, 0))
    assert (watch.starting, watch.reachable, watch.share()) == (True, False, 1.0)
    seen = []
    with caplog.at_level(logging.INFO):
        for _ in range(6):
            watch.poll()
            seen.append((watch.starting, watch.reachable, watch.share()))
    assert seen == [
        (True, False, 1.0),
        (True, False, 1.0),
        (False, True, LEAST),
        (False, False, 1.0),
        (False, False, 1.0),
        (False, True, 0.5),
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "<html>not found</html>",
        "vllm:num_requests_running 1.0",
        text(float("nan"), 0),
        text(-1, 0),
        TEXT % ("", ""),
    ],
)
def test_what_is_no_vllm_is_as_if_it_were_not_there(answer: str) -> None:
    watch = watching(answer)
    watch.poll()
    assert (watch.reachable, watch.share()) == (False, 1.0)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://localhost:8000", "http://localhost:8000/metrics"),
        ("http://localhost:8000/", "http://localhost:8000/metrics"),
        ("https://h/prefix/metrics", "https://h/prefix/metrics"),
    ],
)
def test_where_it_asks(given: str, asked: str) -> None:
    assert VllmWatch(given).url == asked


@pytest.mark.parametrize("url", ["", "localhost:8000", "file:///etc/passwd", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ZeroMemError, match="vllm-metrics"):
        VllmWatch(url)


def test_it_asks_now_and_then_but_not_all_the_time() -> None:
    with pytest.raises(ZeroMemError, match="every"):
        VllmWatch("http://h", every=0)


# A server that answers


class Reader:
    """A vLLM of which there is only `/metrics`."""

    def __init__(self) -> None:
        self.running = self.waiting = 0.0
        self.asked = threading.Semaphore(0)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = text(outer.running, outer.waiting).encode() if self.path == "/metrics" else b""
                self.send_response(200 if body else 404)
                self.end_headers()
                self.wfile.write(body)
                outer.asked.release()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # what is on this machine is asked without a proxy
    made = Reader()
    yield made
    made.close()


def test_the_watch_follows_a_server_until_it_is_stopped(reader: Reader) -> None:
    watch = VllmWatch(reader.url, every=0.001)
    watch.start()
    watch.start()  # once is enough
    assert reader.asked.acquire(timeout=10)
    reader.running, reader.waiting = 3.0, 1.0
    for _ in range(3):
        assert reader.asked.acquire(timeout=10)
    watch.stop()
    assert (watch.running, watch.waiting, watch.reachable) == (3.0, 1.0, True)
    watch.stop()
    assert threading.active_count() < 20


def test_a_server_that_ends_is_noticed(reader: Reader) -> None:
    reader.waiting = 1.0
    watch = VllmWatch(reader.url)
    watch.poll()
    assert watch.share() == LEAST
    elsewhere = VllmWatch(f"{reader.url}/elsewhere")
    elsewhere.poll()
    assert not elsewhere.reachable
    reader.server.server_close()
    watch.poll()
    assert (watch.reachable, watch.share()) == (False, 1.0)


# The two on one card


def test_co_location_from_the_first_byte_to_the_last_burst(reader: Reader) -> None:
    """We start first and hold; vLLM fits in what is left; its load slows indexing, and queries are answered."""
    card = loaded(Card())
    claim(the_plan(), card)
    before = held(card)
    assert card.free() >= the_plan().left * card.total()
    card.others = int(the_plan().left * card.total())

    async def play() -> None:
        server = Server(batch=4)
        watch = VllmWatch(reader.url)
        server.share = watch.share
        workspace = the_plan().workspace
        answer = server.run

        def run(items: object) -> object:
            card.allocate(workspace)
            card.used -= workspace
            return answer(items)  # type: ignore[arg-type]

        server.run = run  # type: ignore[assignment]
        indexing = Indexing(server, 1000, 0.1)
        reader.running, reader.waiting = 8.0, 2.0
        watch.poll()
        async with started(server):
            server.poke()
            for second in range(1, 101):  # a hundred seconds of a busy reader
                server.time.now = max(server.time.now, float(second))
                assert await server.submit([second], [(1, 1)], deadline=LATER) == [2 * second]
            assert indexing.spent <= LEAST * server.time.now + 0.1
            reader.running = reader.waiting = 0.0
            watch.poll()
            await until(lambda: not server.indexing)

    asyncio.run(asyncio.wait_for(play(), 30))
    assert steady(card, before)
    assert card.used == ENCODER
