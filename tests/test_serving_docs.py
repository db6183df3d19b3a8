"""What the pages about serving say is so: commands run or at least parse, code runs, tables are true."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from zeromem_torch.cli import parser
from zeromem_torch.errors import ZeroMemError
from zeromem_torch.library import ZeroMem
from zeromem_torch.serving.mcp import OPERATIONS, PAGE
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import Limits, MemoryService

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("serving", "co-location", "security", "mcp")
}
COMPOSE = ROOT / "configs" / "compose-4090.yaml"
PORT = "localhost:8765"


def blocks(page: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    return [block for own, block in found if own == language]


def commands(page: str) -> list[str]:
    """Lines of shell, those that go on in the next one put together."""
    return [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines() if line.strip()]


# They run


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """An environment in which `zeromem` is this tree's, and listens where nobody else does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = tmp_path / "bin" / "zeromem"
    command.parent.mkdir()
    script = f"""#!{sys.executable}
import os, sys
if os.environ.get("TOYS"):
    import zeromem_torch.library as library
    from toys import HashEncoder
    library.load_encoder = lambda *_, **__: HashEncoder()
from zeromem_torch.cli import main
extra = ["--port", {port!r}, "--threads", "1"] if sys.argv[1] == "serve" else []
raise SystemExit(main([*sys.argv[1:], *extra]))
"""
    command.write_text(script)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(command.parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    for name in ("ZEROMEM_MEMORY", "ZEROMEM_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return {"port": port}


def bash(line: str, shell: Mapping[str, str]) -> str:
    line = line.replace(PORT, f"localhost:{shell['port']}")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def serving(line: str, shell: Mapping[str, str]) -> Iterator[None]:
    """The line runs until the block ends, and ends well when it is told to stop."""
    with Path("serve.log").open("w") as log, subprocess.Popen(["bash", "-c", f"exec {line}"], stderr=log) as process:
        try:
            end = time.monotonic() + 100
            while True:
                try:
                    urllib.request.urlopen(f"http://localhost:{shell['port']}/readyz", timeout=5).close()
                    break
                except (urllib.error.URLError, ConnectionError):
                    assert process.poll() is None, Path("serve.log").read_text()
                    assert time.monotonic() < end, Path("serve.log").read_text()
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
    assert process.returncode == 0, Path("serve.log").read_text()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")


@needs_curl
@pytest.mark.slow
def test_five_commands_lead_from_nothing_to_a_searched_memory(
    shell: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install, add, keys, serve, curl = blocks("serving")[0].strip().splitlines()
    assert install.startswith("pip install ")
    assert add.startswith("zeromem add ")
    assert serve == "zeromem serve"
    bash(add, shell)
    monkeypatch.setenv("ZEROMEM_KEY", bash(keys, shell).strip())
    with serving(serve, shell):
        found = json.loads(bash(f"{curl} --silent --fail", shell))
        assert found["items"][0]["text"] == "My pottery course in Ghent starts on Tuesday."
        (code,) = blocks("serving", "python")
        exec(compile(code.replace(PORT, f"localhost:{shell['port']}"), "serving.md", "exec"), {})
        monkeypatch.setenv("ZEROMEM_KEY", "another")
        assert json.loads(bash(f"{curl} --silent", shell))["status"] == 401
    with ZeroMem.open("zeromem-memory") as memory:
        assert len(memory) == 2
        assert memory.verify().ok


@needs_curl
def test_the_other_requests_are_answered(shell: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOYS", "1")
    Path("rules.toml").write_text('[substrate]\nentities = "rules"\n')
    lines = [line for line in commands("serving") if line.startswith("curl ") and "ZEROMEM_KEY" not in line]
    assert len(lines) >= 4
    bash("zeromem add 'Bo teaches the course.' --boundary alice --config rules.toml", shell)
    with serving("zeromem serve", shell):
        for line in lines:
            json.loads(bash(f"{line} --silent --fail", shell))
        lines = [line for line in commands("serving") if line.startswith("zeromem top") and "--once" in line]
        assert lines
        for line in lines:
            assert "ready" in bash(line, shell)


@pytest.mark.slow
def test_the_client_of_the_sdk_is_answered(shell: Mapping[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("mcp", "python")
    exec(compile(code, "mcp.md", "exec"), {})
    assert "I moved to Bergen." in capfd.readouterr().out


# They parse


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_ours_is_one(page: str) -> None:
    ours = [re.sub(r"\s*&$", "", line) for line in commands(page) if re.match(r"([A-Z_]+=\S+ )*zeromem ", line)]
    assert ours or page == "mcp"
    for line in ours:
        words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        parser().parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_json_is_json_and_links_lead_somewhere(page: str) -> None:
    for block in blocks(page, "json"):
        json.loads(block)
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert (ROOT / "docs" / link).exists(), link


def test_the_compose_file_starts_the_reader_when_the_memory_is_ready() -> None:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
    memory, reader = services["memory"], services["reader"]
    assert reader["depends_on"] == {"memory": {"condition": "service_healthy"}}
    assert "/readyz" in " ".join(memory["healthcheck"]["test"])
    program, *arguments = memory["command"]
    assert program == "zeromem"
    options = parser().parse_args(arguments)
    assert options.memory == Path(memory["volumes"][0].partition(":")[2])
    page = next(line for line in commands("co-location") if line.startswith("zeromem serve"))
    shown = parser().parse_args(shlex.split(page.rstrip("& "))[1:])
    for name in ("encoder", "device", "memory_budget", "vllm_metrics", "reader"):
        assert getattr(options, name) == getattr(shown, name), name
    vllm = next(line for line in commands("co-location") if line.startswith("vllm serve"))
    model, *rest = shlex.split(vllm)[2:]
    flags = [f"{flag}={value}" for flag, value in zip(rest[::2], rest[1::2], strict=True)]
    assert reader["command"] == [f"--model={model}", *flags]
    assert model in options.reader


def test_extras_that_are_named_are_there() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    text = "\n".join([*PAGES.values(), COMPOSE.read_text("utf-8")])
    named = {
        extra for found in re.findall(r"(?:zeromem-torch|/src|\.)\[([\w,]+)\]", text) for extra in found.split(",")
    }
    assert named
    assert named <= set(known)


# Their tables are true


def rows(page: str, head: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    section = PAGES[page].partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_endpoint_is_listed() -> None:
    listed = {span for row in rows("serving", "Endpoints") for span in re.findall(r"`([A-Z]+ /[^`]*)`", row[0])}
    routes = {"POST /mcp"}
    app: Any = create_app(MemoryService(ZeroMem(encoder=_toy()), warm_up=False), mcp=False)
    for route in app.routes:
        methods = route.methods if route.methods is not None else route.endpoint.operations
        path = re.sub(r":\w+}", "}", route.path)
        routes |= {f"{method} {path}" for method in methods if method != "HEAD"}
    assert listed == routes


def _toy() -> Any:
    from toys import HashEncoder

    return HashEncoder()


def test_limits_are_as_listed() -> None:
    limits = Limits()
    listed = {row[0]: row[1] for row in rows("serving", "Limits")}
    assert listed == {
        "body": f"{limits.body_bytes >> 20} MiB",
        "messages of a request": f"{limits.messages}",
        "characters of a message": f"{limits.text_chars}",
        "queries of a request": f"{limits.queries}",
        "characters of a query": f"{limits.query_chars}",
        "traces of a page": f"{limits.page}",
        "seconds, unless the request says (`timeout`)": f"{limits.timeout:g}",
        "seconds, at most": f"{limits.longest_timeout:g}",
        "queries that wait": f"{limits.queue}",
        "queries searched together (`--max-batch`)": f"{limits.batch}",
        "tokens indexed in one go (`--max-burst-tokens`)": f"{limits.burst_tokens}",
    }


def test_every_tool_is_listed_with_what_it_needs() -> None:
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows("mcp", "Tools")}
    assert listed == {name: operation.scope for name, operation in OPERATIONS.items()}
    assert f"in the order they came, {PAGE} at a time" in PAGES["mcp"]


def test_the_mistake_that_is_shown_is_told_so() -> None:
    (shown,) = (json.loads(block) for block in blocks("mcp", "json") if "error" in block)
    with pytest.raises(ZeroMemError) as told:
        OPERATIONS["search_memory"].check({}, "arguments")
    assert shown == {"error": {"code": "bad_arguments", "message": str(told.value)}}


def test_the_arithmetic_of_the_card_holds() -> None:
    page = PAGES["co-location"]
    shares = [int(row[1]) for row in rows("co-location", "A 4090 with a quantised reader")]
    card, *parts = shares
    assert card == sum(parts)
    utilization = float(re.findall(r"--gpu-memory-utilization ([\d.]+)", page)[0])
    assert parts[0] == card * utilization
    assert f"--memory-budget {parts[1]}GiB" in page
    token = 48 * 8 * 128 * 2 * 2
    assert f"{token >> 10} KiB" in page
    assert f"{(1 << 30) // token:,} more tokens" in page


def test_no_block_is_left_untested() -> None:
    for name, text in PAGES.items():
        assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) <= {"python", "json"}
        assert len(blocks(name, "python")) == (1 if name in ("serving", "mcp") else 0)
