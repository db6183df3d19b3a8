"""`zeromem train router`: what it writes, and that `zeromem eval retrieval --router` takes it."""

import json
from pathlib import Path

import pytest
from test_evaluation_run import DATA
from toys import HashEncoder

from zeromem_torch.cli import evaluate, train
from zeromem_torch.cli.options import Parser

SETTINGS = "refit = false\n[[stages]]\nlearn = ['hierarchy']\nepochs = 2\n[[stages]]\nlearn = ['route']\nepochs = 2\n"
CONFIG = "[substrate]\nentities = 'rules'\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three conversations, the third being the first again."""
    for module in (train, evaluate):
        monkeypatch.setattr(module, "cached_encoder", lambda options, config: HashEncoder())
    rows: list[dict[str, object]] = []
    for suffix, only in (("", "ab"), ("-2", "a")):
        for trace in DATA.traces:
            if trace.boundary in only:
                home = {"id": trace.id + suffix, "boundary": trace.boundary + suffix, "session": trace.session}
                rows.append({**home, "time": trace.time and trace.time.isoformat(), "text": trace.text})
        for one in DATA.questions:
            if one.boundary in only and one.evidence:
                own = {"id": one.id + suffix, "boundary": one.boundary + suffix, "question": one.text}
                rows.append({**own, "evidence": [name + suffix for name in one.evidence]})
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "settings.toml").write_text(SETTINGS)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def ran(command: str, *words: str | Path) -> int:
    parser = Parser()
    (train.train_command if command == "train" else evaluate.eval_command)(parser)
    options = parser.parse_args([str(word) for word in words])
    code: int = options.run(options)
    return code


def test_cross_validation_and_a_checkpoint(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ("jsonl", "--data", files / "mine.jsonl", "--config", files / "config.toml")
    out = ("--json", files / "out.json", "--out", files / "checkpoint", "--settings", files / "settings.toml")
    assert ran("train", "router", *data, "--cross-validate", *out) == 0
    shown = capsys.readouterr()
    assert "recall@5: fixed" in shown.out
    assert "a-2 (8 questions)" in shown.err
    result = json.loads((files / "out.json").read_text())
    for measure in ("recall@5", "recall@512tok"):
        assert {"fixed", "learned", "oracle_rho", "jitter", "diff", "p"} <= set(result[measure])
    assert [fold["left_out"] for fold in result["folds"]] == ["a", "b", "a-2"]
    assert {"config.json", "model.safetensors", "router.json"} <= {p.name for p in (files / "checkpoint").iterdir()}
    more = ("--systems", "zeromem", "--router", files / "checkpoint", "--json", files / "eval.json")
    assert ran("eval", "retrieval", *data, *more) == 0
    measured = json.loads((files / "eval.json").read_text())
    assert measured["router"] == "checkpoint"
    assert measured["config"]["hierarchy"] != {}


def test_nothing_to_do_is_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ran("train", "router", "jsonl", "--data", files / "mine.jsonl")
    assert "--cross-validate, --out CHECKPOINT, or both" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ran("train", "router", "--help")
    shown = capsys.readouterr().out
    assert "oracle_rho" in shown
    assert "zeromem eval retrieval locomo" in shown
