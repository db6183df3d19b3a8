"""The command: pages and JSON for whom they are meant, one line for what went wrong, and quiet otherwise."""

import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import EchoReader, HashEncoder

from zeromem_torch.cli import COMMANDS, main, parser
from zeromem_torch.cli.options import NO
from zeromem_torch.evaluation.run import SYSTEMS
from zeromem_torch.library import ZeroMem
from zeromem_torch.reader.protocol import Reply, Usage
from zeromem_torch.substrate.traces import ZeroMemError

ROOT = Path(__file__).resolve().parent.parent
TRACES: list[dict[str, Any]] = [
    {"id": "a/1", "text": "I went to the lake in Oslo.", "speaker": "Ann", "session": "s1", "time": "2023-05-08"},
    {"id": "a/2", "text": "Was it cold?", "speaker": "Bo", "session": "s1", "time": "2023-05-08"},
    {"id": "a/3", "text": "I bought a red boat.", "speaker": "Ann", "session": "s2", "time": "2023-06-08"},
    {"id": "a/4", "text": "The red boat sank, sadly.", "speaker": "Bo", "session": "s2", "time": "2023-06-08"},
]
QUESTIONS: list[dict[str, Any]] = [
    {"question": "Where did Ann go?", "evidence": ["a/1"], "category": "place"},
    {"question": "What happened to the red boat?", "evidence": ["a/3", "a/4"], "category": "fate"},
] * 10  # enough of them to be resampled
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(json.dumps({"boundary": "a", **row}) for row in [*TRACES, *QUESTIONS]))
    (tmp_path / "rules.toml").write_text('[substrate]\nentities = "rules"\n')
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with an encoder of no weight; gives its status and what it printed."""

    def load(name: str, **_: object) -> HashEncoder:
        if name not in ("minilm", "bge-m3", "mine"):
            raise ZeroMemError.of("encoder", "one of the toys", name, "name another")
        return HashEncoder(fingerprint=f"hash-{name}")

    for module in ("substrate.encoder", "library"):
        monkeypatch.setattr(f"zeromem_torch.{module}.load_encoder", load)
    monkeypatch.setattr("zeromem_torch.answering.load_reader", lambda name, **_: EchoReader())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("ZEROMEM_MEMORY", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, stdin: str = "", terminal: bool = False) -> tuple[int, str, str]:
        given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        monkeypatch.setattr(given, "isatty", lambda: terminal)
        monkeypatch.setattr("sys.stdin", given)
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # what argparse does
            status = int(ended.code or 0)
        return status, *capsys.readouterr()

    return call


def evaluate(run: Run, data: Path, *more: object) -> tuple[int, str, str]:
    return run("eval", "retrieval", "jsonl", "--data", data, "--config", data.parent / "rules.toml", *more)


def test_a_table_on_standard_output_and_nothing_else(run: Run, data: Path) -> None:
    status, out, err = evaluate(run, data)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "jsonl (talk): 4 traces, 20 questions; encoder hash-minilm; entities rules-1"
    cells = [line.split() for line in lines]
    rows = {row[0]: row[1:] for row in cells if row[0] in SYSTEMS and len(row) == 13}
    assert tuple(rows) == SYSTEMS
    assert all(row[0] == "20" for row in rows.values())
    heads = next(line for line in lines if line.startswith("system"))
    assert heads.split()[1:4] == ["n", "r@1", "r@2"]
    assert len({len(line) for line in lines if line.startswith(("system", *SYSTEMS)) and " - " not in line}) == 1
    assert any(line.startswith("category fate") for line in lines)
    assert any(line.startswith("zeromem - context: recall@5 ") for line in lines)
    assert lines[-1].startswith("seconds: ")
    assert (data.parent / "cache" / "zeromem" / "encoded.sqlite").exists()


def test_the_json_holds_every_figure_and_where_it_came_from(run: Run, data: Path) -> None:
    out = data.parent / "new folder" / "out.json"
    assert evaluate(run, data, "--json", out, "--systems", "zeromem,context, hybrid")[0] == 0
    result = json.loads(out.read_text())
    assert list(result["systems"]) == ["zeromem", "context", "hybrid"]
    wanted = {"dataset", "split", "sha256", "encoder", "config", "commit", "versions", "device", "seconds", "systems"}
    assert wanted <= set(result)
    assert (result["dataset"], result["split"], result["device"]) == ("jsonl", "talk", "cpu")
    assert len(result["sha256"]) == 64
    assert result["config"]["substrate"]["entities"] == "rules"
    assert {"python", "torch"} <= set(result["versions"])
    assert all(spent >= 0 for spent in result["seconds"].values())
    system = result["systems"]["zeromem"]
    measures = {f"{kind}@{k}" for kind in ("recall", "hit", "all") for k in (1, 2, 5, 10, 20)}
    measures |= {f"recall@{budget}tok" for budget in (256, 512, 1024)} | {"n", "turns_handed", "tokens_handed"}
    assert measures <= set(system["overall"])
    assert set(system["by_category"]) == {"place", "fate"}
    assert all(measures <= set(row) for row in system["by_category"].values())
    assert set(system["vs"]) == {"context", "hybrid"}
    assert set(result["systems"]["context"]["vs"]) == {"hybrid"}
    assert {"diff", "p"} <= set(system["vs"]["context"]["recall@5"])


def test_an_encoder_may_be_named_by_the_configuration_or_the_command_line(run: Run, data: Path) -> None:
    config = data.parent / "mine.toml"
    config.write_text('[encoder]\nname = "bge-m3"\n[substrate]\nentities = "rules"\n')
    assert "encoder hash-bge-m3;" in run("eval", "retrieval", "jsonl", "--data", data, "--config", config)[1]
    assert "encoder hash-mine;" in evaluate(run, data, "--config", config, "--encoder", "mine")[1]


def test_a_second_run_encodes_nothing(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = data.parent / "kept.sqlite"
    first = evaluate(run, data, "--cache", kept)[1]
    encoder = HashEncoder(fingerprint="hash-minilm")
    monkeypatch.setattr("zeromem_torch.substrate.encoder.load_encoder", lambda name, device: encoder)
    second = evaluate(run, data, "--cache", kept)[1]
    assert encoder.calls == []
    assert first.rpartition("seconds: ")[0] == second.rpartition("seconds: ")[0]


def test_a_limit_is_said(run: Run, data: Path) -> None:
    out = evaluate(run, data, "--limit", 1, "--systems", "bm25")[1]
    assert "1 questions" in out
    assert "limited to the first 1 of 20 questions" in out


def test_demo(run: Run, data: Path) -> None:
    status, out, err = run("demo", "--config", data.parent / "rules.toml")
    assert (status, err) == (0, "")
    assert out.endswith("LLM calls by memory operations: 0\n")


# A memory: from a file to an answer


CHAT = """\
[08/05/2023, 13:56] Ann: I went to the lake in Oslo.
[08/05/2023, 13:57] Bo: Was it cold?
[25/06/2023, 09:00] Ann: I bought a red boat.
[26/06/2023, 09:00] Bo: The red boat sank, sadly.
"""


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text('[substrate]\nentities = "rules"\n')
    path = tmp_path / "chat.txt"
    path.write_text(CHAT)
    return path


@pytest.fixture
def memory(run: Run, chat: Path) -> Path:
    """A memory of one boundary, "chat", of four traces."""
    assert run("import", chat, "--config", "rules.toml")[0] == 0
    return chat.parent / "zeromem-memory"


def listed(run: Run, *more: object) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(run("list", "--all", "--json", *more)[1])["items"]
    return items


def ids(run: Run, *more: object) -> list[str]:
    return [trace["id"] for trace in listed(run, *more)]


def found(run: Run, *arguments: object, stdin: str = "") -> list[str]:
    """Texts that a search finds, best first."""
    status, out, err = run("search", "--json", *arguments, stdin=stdin)
    assert status in (0, NO), err
    return [item["text"] for line in out.splitlines() for item in json.loads(line)["items"]]


def test_from_a_file_to_an_answer_in_two_commands_behind_the_installation(run: Run, chat: Path) -> None:
    status, out, err = run("import", "chat.txt", "--config", "rules.toml")
    assert (status, err) == (0, "zeromem: made a new memory in zeromem-memory\n")
    assert out.splitlines() == [
        "chat.txt: 4 traces, format chat",
        "  speakers: Ann (2), Bo (2)",
        "  boundary 'chat' (after the file's name; --boundary names another)",
        "  added 4, already there 0, in zeromem-memory",
    ]
    status, out, err = run("search", "What", "happened to the red boat?", "--top-k", 2)
    assert (status, err) == (0, "")
    first = out.splitlines()[:4]
    assert re.fullmatch(r" 1  \d\.\d{3}  \d+ Jun 2023  (Ann|Bo) +[0-9a-f]{20}", first[0])
    assert first[1] in ("    I bought a red boat.", "    The red boat sank, sadly.")
    assert first[2].startswith(" 2  ")


def test_a_second_import_adds_nothing_and_a_grown_file_what_is_new(run: Run, memory: Path, chat: Path) -> None:
    before = listed(run)
    assert "added 0, already there 4" in run("import", chat)[1]
    assert listed(run) == before
    chat.write_text(CHAT + "[27/06/2023, 09:00] Ann: Oh no!\n")
    result = json.loads(run("import", chat, "--json")[1])
    assert (result["added"], result["known"], result["boundaries"]) == (1, 4, {"chat": 5})
    assert [trace["text"] for trace in listed(run)][4:] == ["Oh no!"]


def test_what_cannot_be_imported_is_told_by_its_line_and_nothing_is_added(run: Run, chat: Path) -> None:
    chat.write_text(f"Exported today\n{CHAT}[31/02/2023, 09:00] Bo: never\n")
    (chat.parent / "more.jsonl").write_text('{"text": "x", "spoker": "Ann"}\n{"text": "fine"}\n')
    command = ("import", "chat.txt", "more.jsonl", "--config", "rules.toml")
    status, out, err = run(*command)
    assert (status, out) == (1, "")
    told = err.splitlines()
    assert [line.split(": ")[1] for line in told[:3]] == ["chat.txt line 1", "chat.txt line 6", "more.jsonl line 1"]
    assert "did you mean 'speaker'" in told[2]
    assert told[3:] == ["zeromem: nothing was added: mend 3 lines, or leave them out with --skip-bad"]
    assert not (chat.parent / "zeromem-memory").exists()
    status, out, err = run(*command, "--skip-bad")
    assert status == 0
    assert "left out: 2 bad lines" in out
    assert [line.split(": ")[1] for line in err.splitlines()[:3]] == [line.split(": ")[1] for line in told[:3]]
    assert len(listed(run)) == 5


def test_formats_are_detected_and_said(run: Run, chat: Path) -> None:
    openai = '{"role": "user", "content": "I like tea."}\n{"role": "system", "content": "Be kind."}\n'
    claude = [{"uuid": "c", "chat_messages": [{"uuid": "m", "sender": "human", "text": "I like coffee."}]}]
    (chat.parent / "talk.jsonl").write_text(openai)
    (chat.parent / "conversations.json.gz").write_bytes(gzip.compress(json.dumps(claude).encode()))
    files = ("talk.jsonl", "conversations.json.gz")
    out = run("import", *files, "--boundary", "me", "--config", "rules.toml")[1]
    assert "talk.jsonl: 1 trace, format openai" in out
    assert "left out: 1 system message" in out
    assert "conversations.json.gz: 1 trace, format claude" in out
    assert "after the file's name" not in out
    assert {trace["boundary"] for trace in listed(run)} == {"me"}
    assert re.search(r" 1  \d\.\d{3}  no date  user  ", run("search", "tea", "--speaker", "x", "--top-k", 1)[1]) is None
    assert re.search(r" 1  \d\.\d{3}  no date  user  ", run("search", "tea", "--top-k", 1)[1])


def test_the_memory_is_where_the_option_or_the_environment_says(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROMEM_MEMORY", "elsewhere")
    assert run("list")[0] == 1
    assert len(listed(run, "--memory", memory)) == 4
    monkeypatch.setenv("ZEROMEM_MEMORY", str(memory))
    assert len(listed(run)) == 4


def test_only_what_adds_makes_a_memory(run: Run, chat: Path) -> None:
    for command in ("list", "stats", "verify", "rebuild", "export", "delete x", "update x --text y", "search x"):
        status, _, err = run(*command.split())
        assert status == 1
        assert "expected a folder that holds a memory, got 'zeromem-memory'; make one with `zeromem import" in err
    for command in ("add x", "add x --boundary a//b", "add x --time soon --boundary a", "handles store fact a b"):
        assert run(*command.split())[0] == 1
    assert run("handles", "store", "liking", "a", "b", "--boundary", "c")[0] == 1
    assert not (chat.parent / "zeromem-memory").exists()


# Searching


def test_what_a_search_may_see(run: Run, memory: Path) -> None:
    query = ("red boat lake", "--top-k", 10)
    everything = {line.partition(": ")[2] for line in CHAT.splitlines()}
    assert set(found(run, *query)) == everything
    assert set(found(run, *query, "--speaker", "Bo")) == {"Was it cold?", "The red boat sank, sadly."}
    assert found(run, *query, "--session", "chat 2023-06-25") == ["I bought a red boat."]
    assert set(found(run, *query, "--after", "2023-06-01", "--before", "2023-06-26")) == {"I bought a red boat."}
    assert set(found(run, *query, "--as-of", "2023-06-01")) == {"I went to the lake in Oslo.", "Was it cold?"}
    run("update", ids(run)[2], "--meta", "kind=boat", "--meta", "price=7")
    assert found(run, *query, "--meta", "kind=boat", "--meta", "price=7") == ["I bought a red boat."]
    assert found(run, *query, "--meta", 'price="7"') == []
    assert len(found(run, *query, "--token-budget", 30)) < 4


def test_a_memory_that_is_empty_says_how_to_fill_it(run: Run, data: Path) -> None:
    (data.parent / "other.toml").write_text('[substrate]\nentities = "rules"\nstop_words = false\n')
    ZeroMem.open("zeromem-memory", encoder="minilm").close()
    for command in (["search", "x"], ["add", "x", "--config", "other.toml"]):
        status, out, err = run(*command)
        assert (status, out) == (1, "")
        assert err.count("\n") == 1, "an index of no rows needs no word"
        assert "memory zeromem-memory: expected something stored in it, got 'nothing yet'" in err
        assert "`zeromem import FILE`" in err


def test_an_index_made_with_other_settings_is_told_of(run: Run, memory: Path) -> None:
    Path("other.toml").write_text('[substrate]\nentities = "rules"\nstop_words = false\n')
    err = run("add", "x", "--config", "other.toml")[2]
    assert "zeromem: the index was made with other settings (stop_words), and is made anew\n" in err


def test_nothing_found_is_said_and_has_its_exit_code(run: Run, memory: Path) -> None:
    for more in (["--speaker", "Cy"], ["--min-score", "1"], ["--boundary", "chatt"], ["--after", "2030-01-01"]):
        status, out, err = run("search", "red boat", *more)
        assert (status, out) == (NO, "")
        assert "zeromem: nothing found: " in err
        status, out, _ = run("search", "red boat", "--json", *more)
        assert (status, json.loads(out)["items"]) == (NO, [])
    assert "nothing is stored in boundary 'chatt'; did you mean 'chat'?" in run("search", "x", "--boundary", "chatt")[2]


def test_queries_from_standard_input(run: Run, memory: Path) -> None:
    status, out, _ = run("search", "-", "--json", "--top-k", 1, stdin="red boat\n\nthe lake in Oslo\n")
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [answer["query"] for answer in answers] == ["red boat", "the lake in Oslo"]
    assert answers[1]["main"][0]["text"] == "I went to the lake in Oslo."
    assert "red boat\n 1  " in run("search", "-", stdin="red boat\nlake\n")[1]


def test_an_answer_with_what_it_cites(run: Run, memory: Path) -> None:
    status, out, err = run("answer", "Where did Ann go?")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Oslo"
    assert lines[1].startswith('    the reader said "The answer is: I went to the lake in Oslo."; ')
    assert re.fullmatch(r" 1  \d\.\d+  8 May 2023  Ann +\w+", lines[2])
    assert lines[3:] == ["    I went to the lake in Oslo."]
    status, out, _ = run("answer", "Where did Ann go?", "--raw")
    assert (status, out) == (0, "The answer is: I went to the lake in Oslo.\n")


def test_an_answer_that_nothing_bears_out_says_so(run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = [Reply("a zebra", Usage(5, 2, 1), "hash")]
    monkeypatch.setattr(EchoReader, "read", lambda self, questions, evidence, **_: made_up)
    status, out, _ = run("answer", "Who sang?")
    assert (status, out) == (0, "a zebra\n    nothing that was found bears this out\n")
    assert run("answer", "Who sang?", "--abstain")[1].splitlines()[0] == "not in memory"
    assert "bears" not in run("answer", "Who sang?", "--abstain")[1]
    assert run("answer", "Who sang?", "--raw")[1] == "a zebra\n"


def test_answers_as_json_and_what_cannot_be_answered(run: Run, memory: Path) -> None:
    status, out, err = run("answer", "--json", "--top-k", "1", "-", stdin="Where did Ann go?\nWhat was the fault?\n")
    assert (status, err) == (0, "")
    went, fault = map(json.loads, out.splitlines())
    assert (went["text"], went["supported"], len(went["cites"])) == ("Oslo", True, 1)
    assert (fault["text"], fault["error"]) == ("", "the server was gone")
    status, out, err = run("answer", "What was the fault?")
    assert (status, out, err) == (NO, "", "zeromem: no answer: the server was gone\n")
    status, out, err = run("answer", "Where did Ann go?", "--speaker", "Cid")
    assert (status, out) == (NO, "not in memory\n")


def test_an_explanation_shows_route_views_and_sums(run: Run, memory: Path) -> None:
    out = run("search", "red boat", "--explain")[1]
    assert out.startswith("route ")
    for word in ("relevance: ", "views: graph ", "ranks: graph ", "score sums: ", "signals: "):
        assert word in out
    assert json.loads(run("search", "red boat", "--explain", "--json")[1])["items"][0]["explanation"]["ranks"]


def test_of_several_boundaries_one_must_be_named(run: Run, memory: Path, chat: Path) -> None:
    for boundary in ("acme/ann", "acme/bo", "acme-corp"):
        run("add", f"The boat of {boundary} is red.", "--boundary", boundary)
    status, out, err = run("search", "red boat")
    assert (status, out) == (1, "")
    assert "boundary: expected one of the 4 that the memory holds" in err
    assert found(run, "red boat", "--boundary", "acme/ann") == ["The boat of acme/ann is red."]
    below = ["The boat of acme/ann is red.", "The boat of acme/bo is red."]
    assert sorted(found(run, "red boat", "--boundary", "acme/")) == below
    assert sorted(found(run, "red boat", "--boundary", "acme/bo", "--boundary", "acme/ann")) == below
    assert "acme/bo  " in run("search", "red boat", "--boundary", "acme/")[1]


def test_what_was_said_cannot_steer_the_terminal(run: Run, memory: Path) -> None:
    run("add", "red \x1b[2Jboat\x9b5n", "--speaker", "E\x1bve", "--boundary", "b")
    for command in ("search red --boundary b", "list", "history"):
        words = command.split() + ([ids(run, "--boundary", "b")[0]] if command == "history" else [])
        out = run(*words)[1]
        assert "\x1b" not in out
        assert "\x9b" not in out


# Traces by id


def test_get_list_and_their_pages(run: Run, memory: Path) -> None:
    status, out, err = run("list", "--limit", 3)
    assert status == 0
    assert [line.split("  ")[1:] for line in out.splitlines()] == [
        ["8 May 2023", "Ann: I went to the lake in Oslo."],
        ["8 May 2023", "Bo: Was it cold?"],
        ["25 Jun 2023", "Ann: I bought a red boat."],
    ]
    (cursor,) = re.findall(r"there are more: --cursor (\w+), or --all", err)
    assert "The red boat sank" in run("list", "--cursor", cursor)[1]
    assert run("list", "--cursor", cursor)[2] == ""
    trace = listed(run)[0]
    assert json.loads(run("get", trace["id"], "--json")[1]) == trace
    assert "speaker   Ann\n" in run("get", trace["id"])[1]
    assert run("get", "nothing")[0] == 1


def test_r20_a_list_of_all_has_no_hidden_end(run: Run, chat: Path) -> None:
    rows = "".join(json.dumps({"id": str(n), "text": f"line {n}"}) + "\n" for n in range(1200))
    assert run("import", "-", "--boundary", "b", "--config", "rules.toml", stdin=rows)[0] == 0
    assert ids(run) == [str(n) for n in range(1200)]
    assert len(run("list", "--all")[1].splitlines()) == 1200
    assert len(run("export")[1].splitlines()) == 1200


def test_add_update_and_what_happened(run: Run, memory: Path) -> None:
    fields = ["--id", "x", "--speaker", "Cy", "--session", "s", "--order", 2, "--time", "2023-07-01T10:00"]
    command = ("add", "A blue boat.", *fields, "--meta", "kind=boat", "--meta", "n=1", "--actor", "me")
    assert run(*command) == (0, "x\n", "")
    assert run(*command)[0] == 0  # the same again changes nothing
    status, _, err = run("add", "Another boat.", "--id", "x", "--speaker", "Cy")
    assert status == 1
    assert "'x'" in err
    trace = json.loads(run("update", "x", "--title", "Log", "--meta", "n=", "--meta", "ok=true", "--json")[1])
    assert trace["metadata"] == {"kind": "boat", "ok": True}
    wanted = {"text": "A blue boat.", "speaker": "Cy", "session": "s", "order": 2, "title": "Log", "boundary": "chat"}
    assert wanted.items() <= trace.items()
    assert "valid_to  " in run("update", "x", "--valid-to", "2024-01-01")[1]
    assert "valid_to" not in run("update", "x", "--valid-to", "")[1]
    assert "\n    A green\n    boat.\n" in run("update", "x", "--text", "-", stdin="A green\nboat.\n")[1]
    out = run("history", "x")[1]
    assert out.count("  update  by cli\n") == 4
    assert out.count("  add  by me\n") == 1
    assert "text: 'A blue boat.' -> 'A green\\nboat.'" in out
    changes = [json.loads(line) for line in run("history", "x", "--json")[1].splitlines()]
    assert [change["action"] for change in changes] == ["add"] + ["update"] * 4
    assert run("history", "nothing", "--boundary", "chat")[0] == NO


def test_a_document_from_standard_input(run: Run, memory: Path) -> None:
    out = run("add", "-", "--title", "Rules", "--boundary", "wiki", "--json", stdin="One.\n\nTwo.\n")[1]
    (trace,) = listed(run, "--boundary", "wiki")
    assert json.loads(out) == {"id": trace["id"], "boundary": "wiki"}
    assert (trace["text"], trace["title"], trace.get("role")) == ("One.\n\nTwo.", "Rules", None)


def test_delete_and_purge(run: Run, memory: Path) -> None:
    first, second, third, fourth = ids(run)
    assert run("delete", first, "mistyped")[0] == 1
    assert len(ids(run)) == 4  # all or none
    assert run("delete", first, second)[:2] == (0, "deleted 2 traces\n")
    assert "by cli" in run("history", first)[1]
    assert run("delete", first, "--purge", "--json")[:2] == (0, '{"deleted": 1, "purged": true}\n')
    assert run("history", first)[0] == 1
    assert run("delete", "-", stdin=f"{third}\n")[0] == 0
    assert ids(run) == [fourth]
    assert run("delete", "--all", "--boundary", "chat", "--purge")[:2] == (0, "purged 1 trace\n")
    assert listed(run) == []
    held = b"".join(path.read_bytes() for path in memory.rglob("*") if path.is_file())
    assert b"lake in Oslo" not in held
    assert b"sank" not in held


def test_on_a_terminal_a_deletion_asks_first(run: Run, memory: Path) -> None:
    first = ids(run)[0]
    status, out, err = run("delete", first, terminal=True, stdin="n\n")
    assert (status, out) == (NO, "")
    assert err == "delete 1 trace? [y/N] zeromem: nothing was deleted\n"
    assert run("delete", "--all", "--boundary", "chat", "--purge", terminal=True, stdin="")[0] == NO
    assert len(ids(run)) == 4
    assert run("delete", first, terminal=True, stdin="y\n")[0] == 0
    assert run("delete", ids(run)[0], "--yes", terminal=True)[0] == 0
    assert len(ids(run)) == 2


# In, out and upkeep


def test_an_export_comes_back_as_it_was(run: Run, memory: Path) -> None:
    run("add", "Hers.", "--boundary", "acme/ann", "--valid-to", "2030-01-01")
    out = run("export")[1]
    assert [json.loads(line) for line in out.splitlines()] == listed(run)
    assert run("export", "all.jsonl.gz")[:2] == (0, "wrote 5 traces to all.jsonl.gz\n")
    assert gzip.decompress((memory.parent / "all.jsonl.gz").read_bytes()).decode() == out
    assert json.loads(run("export", "some", "--boundary", "acme/", "--json")[1]) == {"file": "some", "traces": 1}
    for source, stdin in (("all.jsonl.gz", ""), ("-", out)):
        assert run("import", source, "--memory", "new", "--config", "rules.toml", stdin=stdin)[0] == 0
        copies = listed(run, "--memory", "new")
        assert [{**trace, "added_at": ""} for trace in copies] == [{**trace, "added_at": ""} for trace in listed(run)]
    assert run("export", "no/such/folder/x")[0] == 1


def test_standard_input_without_a_boundary_is_a_wrong_command(run: Run, chat: Path) -> None:
    status, _, err = run("import", "-", stdin=CHAT)
    assert status == 2
    assert "what comes from stdin names no boundary: pass --boundary" in err


def test_verify_finds_a_flipped_byte_and_rebuild_mends_it(run: Run, memory: Path) -> None:
    assert run("verify")[:2] == (0, "4 traces checked, 4 index rows made again and compared: no problems\n")
    assert json.loads(run("verify", "--quick", "--json")[1])["ok"] is True
    segment = max(memory.glob("index/*.safetensors"), key=lambda path: path.stat().st_size)
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    segment.write_bytes(raw)
    status, out, _ = run("verify", "--json")
    assert status == NO
    report = json.loads(out)
    assert (report["ok"], len(report["problems"])) == (False, 1)
    assert segment.name in run("verify")[1]
    assert run("rebuild")[:2] == (0, "made the index of 4 traces anew\n")
    assert run("verify")[0] == 0
    assert len(found(run, "red boat")) > 1


def test_another_encoder_is_an_error_that_says_how_to_change_it(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run("add", "x", "--encoder", "mine")
    assert status == 1
    assert "zeromem reencode NAME" in err
    monkeypatch.setattr("zeromem_torch.library.load_encoder", lambda name, **_: pytest.fail(f"{name} was loaded"))
    with ZeroMem.open("own", encoder=HashEncoder(fingerprint="mine-0123456789abcdef")) as own:
        own._record.set_settings({"encoder_name": "some/mine"})
    status, _, err = run("add", "x", "--memory", "own", "--boundary", "b", "--encoder", "hub/other")
    assert status == 1, "its name tells, and a hub need not be asked"
    assert "expected the one this memory was made with, mine-0123456789abcdef, got 'hub/other'" in err
    assert "zeromem reencode NAME" in err
    monkeypatch.undo()


def test_a_memory_is_changed_to_another_encoder(run: Run, memory: Path) -> None:
    assert run("reencode", "nobody/nothing")[0] == 1
    assert run("reencode", "mine")[:2] == (0, "made the index of 4 traces anew with hash-mine\n")
    assert json.loads(run("stats", "--json")[1])["encoder"] == "hash-mine"
    assert run("add", "x")[0] == 0  # remembered
    assert run("verify")[0] == 0


def test_reading_and_backup_beside_a_writer(run: Run, memory: Path) -> None:
    with ZeroMem.open(memory, encoder=HashEncoder(fingerprint="hash-minilm")) as writer:
        writer.add("A late boat.", boundary="chat")
        assert "A late boat." in found(run, "late boat")
        assert run("backup", "copy")[:2] == (0, "copied 5 traces to copy\n")
        status, _, err = run("add", "x")
        assert status == 1
        assert "that nobody else writes to" in err
        assert "if it is `zeromem serve`, write through it" in err
    assert len(listed(run, "--memory", "copy")) == 5
    assert run("backup", "copy")[0] == 1


def test_stats(run: Run, memory: Path) -> None:
    run("add", "x", "--boundary", "acme/ann")
    rows = [line.split() for line in run("stats")[1].splitlines()]
    assert rows[:3] == [["memory", "zeromem-memory"], ["traces", "5"], ["encoder", "hash-minilm"]]
    assert rows[4:] == [["boundaries", "2"], ["4", "chat"], ["1", "acme/ann"]]
    stats = json.loads(run("stats", "--json")[1])
    assert (stats["traces"], stats["boundaries"]) == (5, {"chat": 4, "acme/ann": 1})
    assert stats["disk_bytes"] > 0


def test_r22_no_progress_bar_where_there_is_no_terminal(run: Run, chat: Path) -> None:
    rows = "".join(json.dumps({"id": str(n), "text": f"line {n}"}) + "\n" for n in range(600))
    (chat.parent / "many.jsonl").write_text(rows)
    assert run("import", "many.jsonl", "--config", "rules.toml")[2] == "zeromem: made a new memory in zeromem-memory\n"
    for command in ("rebuild", "verify", "export many.gz"):
        assert run(*command.split())[2] == ""


def test_an_interrupted_command_ends_quietly(run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ZeroMem, "search_batch", interrupted)
    monkeypatch.setattr(ZeroMem, "add", interrupted)
    assert run("search", "x") == (130, "", "zeromem: interrupted\n")
    assert run("add", "x") == (130, "", "zeromem: interrupted; what was added before stays\n")


# Handles


def test_handles_from_store_to_forget(run: Run, memory: Path) -> None:
    source = ids(run)[0]
    assert run("handles", "store", "preference", "reply/language", "In French, please") == (
        0,
        "mem:preference:reply/language\n",
        "",
    )
    more = ("--value-json", "--source", source, "--confidence", 0.5, "--json")
    assert json.loads(run("handles", "store", "fact", "floor", "3", *more)[1]) == {"handle": "mem:fact:floor"}
    entry = json.loads(run("handles", "get", "mem:fact:floor", "--json")[1])
    assert (entry["value"], entry["source"], entry["confidence"], entry["expires_at"]) == (3, source, 0.5, None)
    assert "value       In French, please\n" in run("handles", "get", "mem:preference:reply/language")[1]
    assert run("handles", "query", "--key", "reply/")[1] == "mem:preference:reply/language\n"
    assert run("handles", "query")[1].splitlines() == ["mem:fact:floor", "mem:preference:reply/language"]
    assert run("handles", "query", "--type", "episodic")[::2] == (NO, "zeromem: nothing found\n")
    nearest = run("handles", "query", "--text", "French", "--type", "preference", "--top-k", 1)[1]
    assert re.fullmatch(r"\d\.\d{3}  mem:preference:reply/language\n", nearest)
    asked = run("handles", "query")[1]
    status, out, err = run("handles", "materialize", "-", stdin=asked)
    assert (status, err) == (0, "")
    assert out == "[mem:fact:floor] 3\n[mem:preference:reply/language] In French, please\n"
    opened = json.loads(run("handles", "materialize", "mem:fact:floor", "--token-budget", 1, "--json")[1])
    assert (opened["text"], opened["left_out"]) == ("", ["mem:fact:floor"])
    logged = (memory / "logs" / "context.jsonl").read_text()
    assert logged.count("\n") == 2
    assert "French" not in logged
    assert run("handles", "forget", "mem:fact:floor", terminal=True, stdin="\n")[0] == NO
    assert run("handles", "forget", "mem:fact:floor")[:2] == (0, "forgot mem:fact:floor\n")
    assert run("handles", "get", "mem:fact:floor")[0] == 1
    assert run("handles", "get", "mem:liking:x")[0] == 1


def test_a_new_value_supersedes_the_old_one(run: Run, memory: Path) -> None:
    for value in ("third", "fourth"):
        run("handles", "store", "fact", "floor", value, "--session", "agent 7", "--ttl", 3600)
    assert json.loads(run("handles", "get", "mem:fact:floor", "--json")[1])["value"] == "fourth"
    assert run("history", "mem:fact:floor")[1].count("by agent 7\n") == 2
    assert run("handles", "store", "fact", "floor", "{", "--value-json")[0] == 1
    assert run("handles", "store", "fact", "floor", "x", "--source", "nowhere")[0] == 1


# What goes wrong


def test_what_cannot_be_used_is_said_in_one_line(run: Run, data: Path) -> None:
    (data.parent / "words.jsonl").write_text("not json\n")
    (data.parent / "empty.jsonl").write_text("")
    (data.parent / "bad.toml").write_text("[substrat]\n")
    (data.parent / "broken.toml").write_text("x = = 1\n")
    (data.parent / "unasked.jsonl").write_text("\n".join(json.dumps({"boundary": "a", **row}) for row in TRACES))
    (data.parent / "unknown.jsonl").write_text(data.read_text().replace('"evidence"', '"answers"'))
    table: list[tuple[list[object], str]] = [
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: expected a file that can be read"),
        (["--data", data.parent], "Is a directory"),
        (["--data", "words.jsonl"], "words.jsonl line 1: expected JSON"),
        (["--data", "empty.jsonl"], "empty.jsonl: expected JSON objects, got an empty file"),
        (["--data", "unknown.jsonl"], "questions: expected at least one with evidence"),
        (["--data", "unasked.jsonl"], "questions: expected at least one with evidence"),
        (["--systems", "zeromen"], "systems: expected some of zeromem, graph"),
        (["--systems", "bm52,dense"], "did you mean 'bm25'?"),
        (["--systems", ","], "systems: expected some of zeromem, graph"),
        (["--config", "nowhere.toml"], "config: expected a TOML file, got 'nowhere.toml'"),
        (["--config", "bad.toml"], "bad.toml: unknown key 'substrat'; the nearest known one is 'substrate'"),
        (["--config", "broken.toml"], "broken.toml: expected TOML"),
        (["--json", data.parent], "json: expected a file that can be written"),
        (["--cache", data], "cache: expected a file that encoded texts can be kept in"),
        (["--cache", data / "below"], "cache: expected a file that encoded texts can be kept in"),
        (["--device", "abacus"], "device: expected one that PyTorch finds here, got 'abacus'"),
        (["--corpus", data], "corpus: expected none for jsonl"),
        (["--audited"], "audited: expected False for jsonl"),
    ]
    before = data.read_bytes()
    for more, words in table:
        status, out, err = evaluate(run, data, *more)
        assert (status, out) == (1, ""), more
        assert err.startswith("zeromem: "), more
        assert words in err, more
        assert err.count("\n") == 1, more
        assert "Traceback" not in err
    assert data.read_bytes() == before


def test_an_encoder_that_cannot_be_loaded_is_said_in_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "retrieval", "jsonl", "--data", str(data), "--cache", str(tmp_path / "c.sqlite")]
    assert main([*command, "--encoder", "nobody/nothing"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zeromem: encoder: expected a folder or hub name")
    assert "or use 'minilm'" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["eval"], "WHAT"),
        (["demonstrate"], "invalid choice: 'demonstrate'"),
        (["eval", "retrieval"], "DATASET, --data"),
        (["eval", "retrieval", "jsonl"], "--data"),
        (["eval", "retrieval", "lokomo", "--data", "x"], "invalid choice: 'lokomo'"),
        (["eval", "retrieval", "jsonl", "--data", "x", "--limit", "0"], "--limit: expected a whole number of at least"),
        (["eval", "retrieval", "jsonl", "--data", "x", "--threads", "-1"], "--threads: expected a whole number"),
        (["eval", "retrieval", "jsonl", "--data", "x", "--threads", "two"], "got 'two'"),
        (["demo", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["search", "x", "--frobnicate"], "zeromem search: error: unrecognized arguments: --frobnicate"),
        (["search", "x", "--frobnicate"], "usage: zeromem search [-h] [--explain]"),
        (["handles", "get", "x", "--frobnicate"], "usage: zeromem handles get [-h]"),
        (["search"], "QUERY"),
        (["answer"], "QUERY"),
        (["answer", "x", "--reader-budget", "0"], "--reader-budget: expected a whole number of at least 1"),
        (["search", "x", "--top-k", "0"], "--top-k: expected a whole number of at least 1"),
        (["search", "x", "--meta", "kind"], "--meta: expected NAME=VALUE, got 'kind'"),
        (["import"], "FILE"),
        (["import", "x", "--format", "csv"], "invalid choice: 'csv'"),
        (["update", "x"], "name what to change"),
        (["delete"], "name the ids, or --all and its --boundary"),
        (["delete", "--all"], "name the ids, or --all and its --boundary"),
        (["delete", "x", "--all", "--boundary", "b"], "name the ids, or --all and its --boundary"),
        (["handles"], "WHAT"),
        (["handles", "query", "--text", "x", "--key", "k"], "--text goes with --type"),
        (["handles", "query", "--top-k", "3"], "--top-k goes with --text"),
    ],
)
def test_a_wrong_command_line_shows_how_to_write_it(run: Run, arguments: list[str], words: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("usage: zeromem")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["demo", "eval", "no LLM"]),
        (["demo", "--help"], ["--encoder", "--device", "--config", "--threads", "--cache", "shipped conversations"]),
        (["eval", "--help"], ["retrieval", "is the evidence found?"]),
        (
            ["eval", "retrieval", "--help"],
            ["recall@k", "r@512tok", "locomo, longmemeval, hotpotqa, musique, 2wiki, jsonl", "--json", *SYSTEMS],
        ),
    ],
)
def test_help(run: Run, arguments: list[str], words: list[str]) -> None:
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    shown = " ".join(out.split())
    assert [word for word in words if word not in shown] == []
    assert "``" not in out


CALLS = [
    *([name] for name in COMMANDS if name not in ("handles", "eval", "keys", "train")),
    *(["handles", name] for name in ("store", "get", "query", "materialize", "forget")),
    *(["keys", name] for name in ("make", "list", "revoke")),
    ["eval", "retrieval"],
    ["train", "router"],
]


def calls_in(text: str) -> list[list[str]]:
    """Arguments of the calls of our command in lines of shell, without redirections."""
    parts = [part.strip() for line in text.splitlines() for part in re.split(r" \| | < | > ", line)]
    return [shlex.split(part, comments=True)[1:] for part in parts if part.startswith("zeromem ")]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_command_teaches_with_examples_that_are_well_formed(run: Run, call: list[str]) -> None:
    status, out, err = run(*call, "--help")
    assert (status, err) == (0, "")
    about, _, examples = out.partition("\nexamples:\n")
    assert len(about.split("\n\n")) >= 3  # usage, what it does, options
    assert "exit codes: 0 done; 1 the input cannot be used" in examples
    shown = calls_in(examples)
    assert shown
    assert [arguments[: len(call)] for arguments in shown].count(call) >= 1
    for arguments in shown:
        parser().parse_args(arguments)


def test_what_the_documents_show_is_well_formed() -> None:
    shown = calls_in("\n".join(re.findall(r"```\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)))
    assert len(shown) > 20
    assert {arguments[0] for arguments in shown} == set(COMMANDS)
    for arguments in shown:
        parser().parse_args(arguments)


def test_help_and_mistakes_do_not_wait_for_pytorch() -> None:
    program = (
        "import sys\n"
        "from zeromem_torch.cli import main, COMMANDS\n"
        "for call in [['--help'], ['serch'], ['delete'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    try:\n"
        "        main(call)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    assert 'torch' not in sys.modules, call\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_ends_the_command_quietly(data: Path, tmp_path: Path) -> None:
    program = "import sys; from zeromem_torch.cli import main; sys.exit(main(sys.argv[1:]))"
    command: list[Any] = [sys.executable, "-u", "-c", program, "import", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.close()
        assert b"Traceback" not in done.stderr.read()
