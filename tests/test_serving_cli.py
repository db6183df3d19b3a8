"""The commands around a server: one that is started, used and told to stop; keys; and what `top` shows."""

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import serving
from toys import HashEncoder, memory_of, talk

from zeromem_torch.cli.options import Parser
from zeromem_torch.cli.serve import keys_command, serve_command, top_command
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.library import ZeroMem
from zeromem_torch.serving.client import Client
from zeromem_torch.serving.keys import KEYS, Keys
from zeromem_torch.serving.refusals import Unauthorized
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import MemoryService
from zeromem_torch.serving.top import Look, frame, look, samples_of, watch
from zeromem_torch.substrate.traces import ZeroMemError

ROOT = Path(__file__).resolve().parent.parent
# The command with an encoder of no weight, which a new process has to be given from within.
PROGRAM = """
import sys
from toys import HashEncoder
from zeromem_torch.substrate import encoder
import zeromem_torch.library as library
library.load_encoder = encoder.load_encoder = lambda name, **_: HashEncoder()
from zeromem_torch.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""
COMMANDS = {"serve": serve_command, "keys": keys_command, "top": top_command}


def run(command: str, *arguments: object) -> int:
    options = Parser(prog=f"zeromem {command}", fill=COMMANDS[command]).parse_args([str(one) for one in arguments])
    status: int = options.run(options)
    return status


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[str, "subprocess.Popen[str]", list[str]]]:
    """A server in a process of its own: its address, the process, and the lines it has written."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(folder), "--port", "0", *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stderr is not None
    reading = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))  # type: ignore[union-attr]
    reading.start()
    try:
        yield _address(process, lines), process, lines
    finally:
        process.kill()
        process.wait(30)
        reading.join(30)
        process.stderr.close()


def _address(process: "subprocess.Popen[str]", lines: list[str]) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"at (http://\S+)", "".join(lines)):
            try:
                urllib.request.urlopen(f"{found[1]}/readyz", timeout=5).close()
                return found[1]
            except OSError:
                pass
        time.sleep(0.05)
    raise AssertionError("".join(lines))


def test_a_server_is_started_used_told_to_stop_and_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    (tmp_path / "rules.toml").write_text('[substrate]\nentities = "rules"\n')
    config = ("--config", str(tmp_path / "rules.toml"), "--json-logs", "--memory-budget", "2GiB")
    with started(folder, *config) as (url, process, lines):
        with Client(url) as client:
            client.add(["I bought a red boat.", "It is called Secretotter."], boundary="ann")
            assert client.search("Secretotter", boundary="ann").found
            client.add([f"Note {number}." for number in range(300)], boundary="notes", index=False)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        time.sleep(0.1)
    said = "".join(lines)
    assert "no keys: it listens on this machine only" in said
    assert re.search(r"workspace +0\.\d\d GiB", said), "the plan is printed"
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert {"/v1/search", "/v1/memories"} <= {line.get("route") for line in logged}
    assert all({"time", "level", "event"} <= set(line) for line in logged)
    assert "Secretotter" not in said, "no memory text in the log"
    with ZeroMem.open(folder, encoder=HashEncoder(), read_only=True) as memory:
        assert len(memory) == 302
        assert memory.verify().ok
    with started(folder, *config) as (url, process, _), Client(url) as client:
        assert client.search("Secretotter", boundary="ann").found
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_without_keys_it_listens_nowhere_else(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "example.com", "192.168.0.1"):
        with pytest.raises(ZeroMemError, match=r"there are no keys.*zeromem keys make"):
            run("serve", tmp_path, "--host", host)
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_a_copy_of_a_served_memory_is_open_to_nobody_else(tmp_path: Path) -> None:
    folder, copy = tmp_path / "m", tmp_path / "copies" / "monday"
    secret = Keys(folder / KEYS).make("ann", boundaries=["ann"])
    rules = ZeroMemConfig.from_dict({"substrate": {"entities": "rules"}}, "test")
    with ZeroMem.open(folder, encoder=HashEncoder(), config=rules) as memory:
        memory.add("I bought a red boat.", boundary="ann")
        (folder / "logs").mkdir()
        (folder / "logs" / "handles.jsonl").write_text('{"boundary": "ann", "handle": "x"}\n')
        memory.backup(copy)
    assert stat.S_IMODE((copy / KEYS).stat().st_mode) == 0o600
    assert (copy / KEYS).read_bytes() == (folder / KEYS).read_bytes()
    assert (copy / "logs" / "handles.jsonl").read_bytes() == (folder / "logs" / "handles.jsonl").read_bytes()
    with ZeroMem.open(copy, encoder=HashEncoder(), config=rules, read_only=True) as memory:
        service = MemoryService(memory, keys=Keys(copy / KEYS), warm_up=False)
        with serving(create_app(service, mcp=False)) as url:
            with Client(url) as nobody, pytest.raises(Unauthorized):
                nobody.list()
            with Client(url, secret) as ann:
                assert ann.search("boat", boundary="ann").found


def test_keys_that_cannot_be_read_make_no_copy(tmp_path: Path) -> None:
    folder, copy = tmp_path / "m", tmp_path / "copy"
    with ZeroMem.open(folder, encoder=HashEncoder()) as memory:
        (folder / KEYS).mkdir()  # root reads every file, and no folder
        with pytest.raises(ZeroMemError, match="keys: expected a file that can be read"):
            memory.backup(copy)
    assert not list(copy.iterdir()), "a copy without its keys would be open"


def test_with_keys_it_needs_one_and_may_listen_elsewhere(tmp_path: Path) -> None:
    keys = Keys(tmp_path / KEYS)
    secret = keys.make("ann", scopes=["read", "write"], boundaries=["ann"])
    (tmp_path / "rules.toml").write_text('[substrate]\nentities = "rules"\n')
    arguments = ("--config", str(tmp_path / "rules.toml"), "--host", "0.0.0.0")
    with started(tmp_path, *arguments) as (url, _, lines):
        assert "no keys" not in "".join(lines)
        with Client(url, secret) as ann:
            ann.add("I bought a red boat.", boundary="ann")
            assert ann.search("boat", boundary="ann").found
            keys.revoke("ann")
            with pytest.raises(Unauthorized):
                ann.search("boat", boundary="ann")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "70000"), "port"),
        (("--memory-budget", "1MiB"), "memory-budget"),
        (("--memory-budget", "much"), "memory-budget"),
        (("--vllm-metrics", "localhost"), "vllm-metrics"),
        (("--device", "tpu9"), "device"),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("zeromem_torch.library.load_encoder", lambda *_, **__: HashEncoder())
    monkeypatch.setattr("zeromem_torch.serving.logs.set_up", lambda **_: None)
    port = () if "--port" in arguments else ("--port", "0")
    with pytest.raises(ZeroMemError, match=said):
        run("serve", tmp_path / "m", *port, *arguments)


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--timeout", "x"], ["--max-batch", "0"], ["a", "b"]])
def test_a_wrong_command_line_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("serve", *arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


# Keys


def test_keys_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ("--memory", tmp_path)
    assert run("keys", "make", "ann", "--boundary", "acme/ann", *at) == 0
    out, err = capsys.readouterr()
    secret = out.strip()
    assert "export ZEROMEM_KEY=" in err, "what to do next"
    assert secret not in err, "what is kept of stderr holds no secret"
    assert run("keys", "make", "ops", "--all-boundaries", "--scope", "admin", "--json", *at) == 0
    made = json.loads(capsys.readouterr().out)
    keys = Keys(tmp_path / KEYS)
    assert keys.authenticate(secret).boundaries == ("acme/ann",)
    assert keys.authenticate(secret).scopes == {"read", "write"}
    assert keys.authenticate(made["key"]).boundaries is None
    assert run("keys", "list", *at) == 0
    shown = capsys.readouterr().out
    assert re.search(r"ann  read, write  acme/ann  made 20", shown)
    assert re.search(r"ops  admin  every boundary", shown)
    assert secret not in shown
    assert run("keys", "list", "--json", *at) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["ann", "ops"]
    assert run("keys", "revoke", "ann", *at) == 0
    assert [info.name for info in keys.list()] == ["ops"]
    with pytest.raises(ZeroMemError, match="did you mean 'ops'"):
        run("keys", "revoke", "op", *at)
    with pytest.raises(SystemExit):
        run("keys", "make", "bo", *at)  # where it is bound to has to be said
    capsys.readouterr()
    run("keys", "list", "--memory", tmp_path / "none")
    assert "there are none" in capsys.readouterr().err


# Top


def test_samples_are_read_with_their_labels() -> None:
    text = '# HELP a b\na_total{x="1",y="q\\"} 2"} 3.0\na_total{x="2",y=""} 4 1700000000\nplain 1e3\n\nodd line\n'
    found = samples_of(text)
    assert found["a_total"] == {(("x", "1"), ("y", 'q\\"} 2')): 3.0, (("x", "2"), ("y", "")): 4.0}
    assert found["plain"] == {(): 1000.0}


def test_a_frame_shows_rates_between_two_looks() -> None:
    def seen(at: float, **values: float) -> Look:
        labels = (("route", "/v1/search"), ("status", "200"))
        names: dict[str, Any] = {name: {labels: value} for name, value in values.items()}
        return Look(at, names, "")

    first = seen(0.0, zeromem_requests_total=10, zeromem_request_seconds_sum=1, zeromem_request_seconds_count=10)
    then = seen(2.0, zeromem_requests_total=50, zeromem_request_seconds_sum=2, zeromem_request_seconds_count=50)
    shown = frame("http://s", first, then)
    assert re.search(r"requests +20\.0/s  \(200 20\.0/s\)", shown)
    assert re.search(r"20\.0/s +25\.0 ms  /v1/search", shown)
    anew = seen(4.0, zeromem_requests_total=4)
    assert re.search(r"requests +2\.0/s", frame("http://s", then, anew)), "a server that was started again"


def test_top_looks_at_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Keys(tmp_path / KEYS)
    admin = keys.make("ops", scopes=["admin"], boundaries=None)
    reader = keys.make("ann", scopes=["read"], boundaries=None)
    memory = memory_of(*talk("lake", ["We went to the lake.", "Was it cold?"]))
    with serving(create_app(MemoryService(memory, keys=keys, warm_up=False), mcp=False)) as url:
        with Client(url, reader) as client:
            before = look(url, admin)
            for _ in range(5):
                client.search("Was the lake cold?", boundary="lake")
            shown = frame(url, before, look(url, admin))
        assert "ready" in shown.splitlines()[0]
        assert re.search(r"ms  /v1/search", shown)
        assert re.search(r"batches +\d+\.\d/s of 1\.0 queries", shown)
        assert re.search(r"memories +100% were ready", shown)
        assert "indexed up to" in shown
        with pytest.raises(ZeroMemError, match="key: expected one of scope admin"):
            look(url, reader)
        with pytest.raises(ZeroMemError, match="got 'none'; set ZEROMEM_KEY to one of scope admin"):
            look(url, None)
        monkeypatch.setenv("ZEROMEM_KEY", admin)
        assert run("top", url, "--once", "--every", "0.1") == 0
        assert "requests" in capsys.readouterr().out
    with pytest.raises(ZeroMemError, match="zeromem serve"):
        look(url, admin)


def test_a_terminal_is_cleared_and_a_file_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Look(float(n), {}, "") for n in range(3)])

    def next_look(url: str, key: str | None) -> Look:
        if (found := next(looks, None)) is None:
            raise KeyboardInterrupt
        return found

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("zeromem_torch.serving.top.look", next_look)
    screen = Terminal()
    with pytest.raises(KeyboardInterrupt):
        watch("http://s", None, every=0.001, once=False, out=screen)
    assert screen.getvalue().count("\x1b[2J") == 2
    looks, file = iter([Look(0.0, {}, ""), Look(1.0, {}, "")]), io.StringIO()
    watch("http://s", None, every=0.001, once=True, out=file)
    assert "\x1b" not in file.getvalue()
