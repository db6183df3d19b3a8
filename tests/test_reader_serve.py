"""A real OpenAI-compatible server, `transformers serve` with the small model, and a proxy before it that fails."""

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from test_reader_openai import Act, evidence, hang, reset, send, serving

from zeromem_torch.reader import load_reader, messages
from zeromem_torch.reader.local import EMBEDDED, EmbeddedReader
from zeromem_torch.reader.openai import OpenAICompatibleReader

pytestmark = pytest.mark.slow

NEEDED = (EMBEDDED, "gguf", "accelerate", "fastapi", "uvicorn", "openai")
QUESTIONS = ["Where did Ann go?", "What did Ann paint?"]
FOUND = [evidence("I went to West County to see what the flood did."), evidence("I painted a sunrise over a lake.")]
START_SECONDS = 120


@dataclass
class Served:
    model: str
    port: int
    local: EmbeddedReader

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def through(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> tuple[int, bytes]:
        """What the server says to a request that came to a proxy."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", handler.path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def forward(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        status, data = self.through(handler, body)
        send(data, status)(handler, body)

    def truncate(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        status, data = self.through(handler, body)
        send(data[: len(data) // 2], status, announced=len(data))(handler, body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    local = EmbeddedReader(begin="")
    model = str(local.folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as out, subprocess.Popen(command, env=quiet, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            give_up = time.monotonic() + START_SECONDS
            while not _is_up(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < give_up, log.read_text()
                time.sleep(0.2)
            yield Served(model, port, local)
        finally:
            process.terminate()


def _is_up(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def test_the_server_answers_from_the_evidence(served: Served) -> None:
    asked = load_reader(f"openai:{served.model}@{served.url}", max_tokens=16)
    replies = asked.read(QUESTIONS, FOUND)

    assert [reply.error for reply in replies] == ["", ""]
    assert "West County" in replies[0].text
    assert "sunrise" in replies[1].text.lower()
    for question, found, reply in zip(QUESTIONS, FOUND, replies, strict=True):
        prompt = messages(question, found, token_budget=None, count=served.local.count)
        assert reply.usage.prompt_tokens == len(served.local.tokens(prompt))  # the server's own word
        assert 0 < reply.usage.completion_tokens <= 16
        assert reply.usage.calls == 1


def test_an_answer_survives_every_passing_fault(served: Served) -> None:
    faults: list[Act] = [
        hang,
        send(b'{"error": {"message": "slow down"}}', 429, Retry_After="3"),
        send(b"upstream died", 500),
        send(b'{"choices": [{"message"'),
        served.truncate,
        reset,
    ]
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        asked.timeout = 60.0  # short for the first fault only: the model itself may be slow

    (direct,) = OpenAICompatibleReader(served.url, served.model, max_tokens=16).read(QUESTIONS[:1], FOUND[:1])
    with serving(*faults, after=served.forward) as proxy:
        asked = OpenAICompatibleReader(
            proxy.url, served.model, max_tokens=16, timeout=0.2, retries=len(faults), sleep=wait
        )
        (reply,) = asked.read(QUESTIONS[:1], FOUND[:1])
        assert len(proxy.seen) == len(faults) + 1

    assert (reply.text, reply.error) == (direct.text, "")
    assert reply.usage.calls == len(faults) + 1
    assert reply.usage.prompt_tokens == direct.usage.prompt_tokens  # only the answer that came was paid for
    assert waits[1] == 3
    assert len(waits) == len(faults)


def test_a_fault_that_stays_spoils_one_question_only(served: Served) -> None:
    def act(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if "paint" in body["messages"][1]["content"].split("Question:")[1]:
            served.truncate(handler, body)
        else:
            served.forward(handler, body)

    with serving(after=act) as proxy:
        asked = OpenAICompatibleReader(
            proxy.url, served.model, max_tokens=16, concurrency=2, retries=1, sleep=lambda _: None
        )
        replies = asked.read(QUESTIONS, FOUND)
    assert "West County" in replies[0].text
    assert replies[1].text == ""
    assert "IncompleteRead" in replies[1].error
    assert "tried 2 times" in replies[1].error


def test_what_the_server_refuses_is_said_in_its_words(served: Served) -> None:
    asked = OpenAICompatibleReader(served.url.replace("/v1", "/v9"), served.model)
    (reply,) = asked.read(QUESTIONS[:1], FOUND[:1])
    assert "got 404 (Not Found); check base_url" in reply.error
    assert reply.usage.calls == 1
