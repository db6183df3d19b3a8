"""The command: tables and JSON for whom they are meant, one line for what went wrong, and quiet otherwise."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import HashEncoder

from zeromem_torch.cli import main
from zeromem_torch.evaluation.run import SYSTEMS

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
    monkeypatch.setattr("zeromem_torch.cli.load_encoder", lambda name, device: HashEncoder(fingerprint=f"hash-{name}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
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
    monkeypatch.setattr("zeromem_torch.cli.load_encoder", lambda name, device: encoder)
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
    assert out.endswith("LLM calls by memory: 0, tokens: 0\n")


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


def test_a_reader_that_goes_away_ends_the_command_quietly(data: Path, tmp_path: Path) -> None:
    program = "import sys; from zeromem_torch.cli import main; sys.exit(main(sys.argv[1:]))"
    command: list[Any] = [sys.executable, "-u", "-c", program, "eval", "retrieval", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.close()
        assert b"Traceback" not in done.stderr.read()
