"""A reader behind HTTP: what it sends, what it tries again, and what it says when nothing helps."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.reader import load_reader
from zeromem_torch.reader.openai import OpenAICompatibleReader, estimated_tokens
from zeromem_torch.substrate.traces import ZeroMemError

Act = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def evidence(text: str = "I went hiking.") -> Evidence:
    said = EvidenceItem("D1:3", 0, len(text), text, 1.0, {}, {}, "main", speaker="Ann")
    return Evidence("q", "talk", "local", 0.6, (), (), (), [said])


def answer(text: str = "hiking", **more: Any) -> bytes:
    choices = [{"message": {"role": "assistant", "content": text}}]
    usage = {"prompt_tokens": 100, "completion_tokens": 2}
    return json.dumps({"choices": choices, "usage": usage} | more).encode()


def send(data: bytes, status: int = 200, announced: int | None = None, **headers: str) -> Act:
    def act(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data) if announced is None else announced))
        handler.end_headers()
        handler.wfile.write(data)

    return act


def reset(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    """Close without a word, so that the peer sees the connection reset."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def hang(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    time.sleep(0.4)


def drip(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    """Each byte soon enough, all of them never."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    for _i in range(8):
        handler.wfile.write(b" ")
        time.sleep(0.1)


class Server(ThreadingHTTPServer):
    """Does to each request what the script says, then `after`."""

    daemon_threads = True

    def __init__(self, script: list[Act], after: Act) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.after = list(script), after
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        act = self.server.script.pop(0) if self.server.script else self.server.after
        act(self, body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@contextmanager
def serving(*script: Act, after: Act | None = None) -> Iterator[Server]:
    server = Server(list(script), after or send(answer()))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reader(server: Server, **options: Any) -> tuple[OpenAICompatibleReader, list[float]]:
    waits: list[float] = []
    given: dict[str, Any] = {"timeout": 5.0, "sleep": waits.append} | options
    return OpenAICompatibleReader(server.url, "tiny", **given), waits


def test_a_request_is_a_chat_of_two_messages_without_streaming() -> None:
    with serving() as server:
        asked, _ = reader(server, logprobs=True)
        (reply,) = asked.read(["What did Ann do?"], [evidence()])
        ((path, headers, body),) = server.seen
    assert (reply.text, reply.error) == ("hiking", "")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.calls) == (100, 2, 1)
    assert path == "/v1/chat/completions"
    assert headers["content-type"] == "application/json"
    assert [message["role"] for message in body.pop("messages")] == ["system", "user"]
    rest = {"model": "tiny", "max_tokens": 64, "temperature": 0.0, "seed": 0, "stream": False, "logprobs": True}
    assert body == rest


FAULTS = {
    "500": send(b"oops", 500),
    "502": send(b"", 502),
    "503": send(b"{}", 503),
    "504": send(b"<html>", 504),
    "429": send(b'{"error": {"message": "slow down"}}', 429),
    "malformed JSON": send(b'{"choices": [{"mess'),
    "JSON without an answer": send(b'{"choices": []}'),
    "JSON of another kind": send(b"[1, 2]"),
    "a truncated body": send(answer()[:40], announced=4_000),
    "a reset": reset,
    "a time-out": hang,
    "a body that drips": drip,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_tried_again(fault: str) -> None:
    with serving(FAULTS[fault], FAULTS[fault]) as server:
        asked, waits = reader(server, timeout=0.25)
        (reply,) = asked.read(["What did Ann do?"], [evidence()])
        assert len(server.seen) == 3
    assert (reply.text, reply.error) == ("hiking", "")
    assert reply.usage.calls == 3
    assert 0.25 <= waits[0] <= 0.5 <= waits[1] <= 1.0  # doubles, with jitter


SAID = {
    "500": "expected status 200, got 500 (oops); tried 2 times",
    "429": "got 429 (slow down)",
    "malformed JSON": "expected JSON, got b",
    "JSON without an answer": "choices[0].message.content",
    "a truncated body": "IncompleteRead",
    "a reset": "Connection",
    "a time-out": "expected an answer within 0.25 s",
}


@pytest.mark.parametrize("fault", SAID)
def test_a_fault_that_stays_is_the_reply_s_error(fault: str) -> None:
    with serving(after=FAULTS[fault]) as server:
        asked, waits = reader(server, retries=1, timeout=0.25)
        (reply,) = asked.read(["What did Ann do?"], [evidence()])
    assert reply.text == ""
    assert reply.error.startswith(f"reader tiny at {server.url}: ")
    assert SAID[fault] in reply.error
    assert "look whether the server is up" in reply.error
    assert (len(waits), reply.usage.calls) == (1, 2)


@pytest.mark.parametrize(
    ("status", "advice"),
    [(400, "fits"), (401, "OPENAI_API_KEY"), (404, "base_url"), (302, "base_url"), (422, "model")],
)
def test_a_fault_that_is_ours_is_not_tried_again(status: int, advice: str) -> None:
    act = send(b'{"error": {"message": "no such model"}}', status, Location="http://127.0.0.1:1/elsewhere")
    with serving(after=act) as server:
        asked, waits = reader(server)
        (reply,) = asked.read(["What did Ann do?"], [evidence()])
        assert len(server.seen) == 1
    assert not waits
    assert f"got {status} (no such model); " in reply.error
    assert advice in reply.error


def test_nobody_there_is_an_error_that_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    asked = OpenAICompatibleReader(url, "tiny", retries=1, sleep=lambda _: None)
    (reply,) = asked.read(["What did Ann do?"], [evidence()])
    assert "ConnectionRefusedError" in reply.error


@pytest.mark.parametrize(("asked_for", "least", "most"), [("7", 7, 7), ("100000", 60, 60), ("soon", 0.25, 0.5)])
def test_the_server_s_wait_is_honoured_within_bounds(asked_for: str, least: float, most: float) -> None:
    with serving(send(b"", 429, Retry_After=asked_for)) as server:
        asked, waits = reader(server)
        asked.read(["What did Ann do?"], [evidence()])
    assert least <= waits[0] <= most


def test_the_server_s_wait_may_be_a_date() -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    with serving(send(b"", 503, Retry_After=when)) as server:
        asked, waits = reader(server)
        asked.read(["What did Ann do?"], [evidence()])
    assert 20 < waits[0] <= 30


def test_replies_keep_their_order_and_one_failure_is_its_own() -> None:
    def act(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        number = body["messages"][1]["content"].split("number ")[1].split("?")[0]
        time.sleep(0.05 if number == "0" else 0)
        (send(b"no", 400) if number == "3" else send(answer(number)))(handler, body)

    with serving(after=act) as server:
        asked, _ = reader(server, concurrency=4)
        replies = asked.read([f"Say number {i}?" for i in range(8)], [evidence()] * 8)
    assert [reply.text for reply in replies] == ["0", "1", "2", "", "4", "5", "6", "7"]
    assert [bool(reply.error) for reply in replies] == [i == 3 for i in range(8)]


def test_at_most_so_many_questions_are_out_at_once() -> None:
    lock, out, most = threading.Lock(), [0], [0]

    def act(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with lock:
            out[0] += 1
            most[0] = max(most[0], out[0])
        time.sleep(0.03)
        with lock:
            out[0] -= 1
        send(answer())(handler, body)

    with serving(after=act) as server:
        asked, _ = reader(server, concurrency=3)
        asked.read(["What?"] * 9, [evidence()] * 9)
    assert most[0] == 3


def test_without_usage_from_the_server_tokens_are_estimated() -> None:
    with serving(after=send(answer("four words are here", usage=None))) as server:
        asked, _ = reader(server, count=lambda texts: [len(text.split()) for text in texts])
        (reply,) = asked.read(["What?"], [evidence()])
    assert reply.usage.completion_tokens == 4
    assert reply.usage.prompt_tokens > 40


def test_an_answer_s_log_probability_is_the_mean_of_its_tokens() -> None:
    choice = {"message": {"content": "a b"}, "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}}
    with serving(after=send(answer(choices=[choice]))) as server:
        asked, _ = reader(server)
        (reply,) = asked.read(["What?"], [evidence()])
    assert reply.logprob == -1.0


def test_the_key_comes_from_the_environment_if_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    with serving() as server:
        reader(server)[0].read(["What?"], [evidence()])
        reader(server, api_key="given")[0].read(["What?"], [evidence()])
        monkeypatch.delenv("OPENAI_API_KEY")
        reader(server)[0].read(["What?"], [evidence()])
    sent = [headers["authorization"] for _, headers, _ in server.seen]
    assert sent == ["Bearer from-env", "Bearer given", "Bearer EMPTY"]


def test_no_key_goes_to_another_machine_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    with pytest.raises(ZeroMemError, match="use https, or leave the key out"):
        OpenAICompatibleReader("http://models.example/v1", "tiny", "secret")
    for url, sent in (
        ("http://models.example/v1", False),
        ("http://10.0.0.5:8000/v1", False),
        ("http://localhost.example/v1", False),
        ("https://models.example/v1", True),
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.2:8000/v1", True),
        ("http://[::1]:8000/v1", True),
    ):
        assert ("Authorization" in OpenAICompatibleReader(url, "tiny")._headers) == sent


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "https://user:key@x/v1", "https://x/v1?key=1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ZeroMemError, match="base_url: expected an address such as"):
        OpenAICompatibleReader(url, "tiny")


def test_a_reader_has_a_name() -> None:
    asked = load_reader("openai:org/model@v2@https://models.example/v1/", timeout=5.0)
    assert isinstance(asked, OpenAICompatibleReader)
    assert (asked.model, asked.base_url, asked.timeout) == ("org/model@v2", "https://models.example/v1", 5.0)
    hosted = load_reader("openai:small")
    assert isinstance(hosted, OpenAICompatibleReader)
    assert hosted.base_url.startswith("https://")


@pytest.mark.parametrize("name", ["", "gpt", "openai:", "hf:", "vllm:", "embedded:x", "minilm"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ZeroMemError, match=r"reader: expected embedded \| hf:FOLDER"):
        load_reader(name)


def test_the_estimate_is_on_the_safe_side() -> None:
    assert estimated_tokens(["", "a", "abcd", "日本"]) == [0, 1, 2, 2]
