"""`zeromem train router`: what it writes, and that `zeromem eval retrieval --router` takes it."""

import dataclasses
import json
from pathlib import Path

import pytest
from test_evaluation_run import DATA
from toys import RULES, HashEncoder

from zeromem_torch.cli import evaluate, main, train
from zeromem_torch.cli.options import Parser
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.routing.router import LearnedRouter
from zeromem_torch.substrate.traces import ZeroMemError
from zeromem_torch.training.about import read_about
from zeromem_torch.training.losses import LOSSES
from zeromem_torch.training.ranking import LEARNABLE
from zeromem_torch.training.settings import Stage, TrainingSettings

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


def ran(command: str | Path, *words: str | Path) -> int:
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


def test_a_run_says_what_it_gained_and_a_second_one_that_it_was_trained(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("jsonl", "--data", files / "mine.jsonl", "--config", files / "config.toml")
    out = ("--settings", files / "settings.toml", "--out", files / "checkpoint", "--json", files / "out.json")
    words = ("train", "router", *data, *out)
    assert ran(*words) == 0
    told = capsys.readouterr().err
    trained = json.loads((files / "out.json").read_text())["trained"]
    assert f"epochs of each stage: {trained['epochs'][0]}, {trained['epochs'][1]}" in told
    own = trained["held_out"]
    figures = f"recall@5 {own['fixed']['recall@5']:.3f} -> {own['learned']['recall@5']:.3f}, recall@512tok "
    assert f"fixed -> learned, on a-2 ({own['questions']} questions), which stopped the training: {figures}" in told
    assert "trained there already" not in told
    assert ran(*words) == 0
    assert "was trained there already; nothing was trained again" in capsys.readouterr().err
    about = json.loads((files / "checkpoint" / "training.json").read_text())
    assert about["questions"] == json.loads((files / "out.json").read_text())["questions"] - own["questions"]


def test_a_measurement_says_which_weights_it_is_of_and_warns_of_what_they_were_learned_from(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--settings", files / "settings.toml", "--out", files / "checkpoint")
    data = ("jsonl", "--config", files / "config.toml", "--data")
    assert ran("train", "router", *data, files / "mine.jsonl", *out) == 0
    capsys.readouterr()
    more = ("--systems", "zeromem", "--router", files / "checkpoint")
    assert ran("eval", "retrieval", *data, files / "mine.jsonl", *more) == 0
    shown = capsys.readouterr()
    assert "questions of jsonl (mine); unlearned is zeromem with those of the configuration" in shown.err
    assert "warning: they were learned from this file" in shown.err
    assert "\nunlearned " in shown.out
    (files / "other.jsonl").write_text((files / "mine.jsonl").read_text() + "\n")
    assert ran("eval", "retrieval", *data, files / "other.jsonl", *more) == 0
    shown = capsys.readouterr()
    assert "unlearned is" in shown.err
    assert "warning" not in shown.err
    for told in ("[]", "{", '{"sha256": 1}'):  # of a checkpoint that nobody trained here
        (files / "checkpoint" / "training.json").write_text(told)
        assert read_about(files / "checkpoint") == {}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "questions: expected at least one with evidence, got '0 without any'"),
        ('{"boundary": "a", "question": "Who?"}', "questions: expected at least one with evidence, got '1 without"),
        ('{"boundary": "a", "query": "Who?"}', r"line 2: expected a trace with its text, or a question, got 'query'; "),
        ('{"boundary": "a", "question": "Who?", "evidence": ["x"]}', "cross-validation: expected at least 3 conv"),
    ],
)
def test_data_that_cannot_be_learned_from_is_said(files: Path, rows: str, said: str) -> None:
    path = files / "few.jsonl"
    path.write_text('{"id": "x", "boundary": "a", "text": "A boat."}\n' + rows)
    with pytest.raises(ZeroMemError, match=said):
        ran("train", "router", "jsonl", "--data", path, "--cross-validate")


def test_a_file_is_no_place_for_a_checkpoint(files: Path) -> None:
    with pytest.raises(ZeroMemError, match="out: expected a folder that can be written to"):
        ran("train", "router", "jsonl", "--data", files / "mine.jsonl", "--out", files / "mine.jsonl")


def test_use(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromem_torch.library.load_encoder", lambda name, **_: HashEncoder())
    memory, checkpoint = files / "memory", files / "checkpoint"
    with ZeroMem.open(memory, config=RULES) as made:
        made.add(DATA.traces)
    pipeline = ZeroMemPipeline(RULES)
    pipeline.router = LearnedRouter()
    pipeline.save_pretrained(checkpoint)

    def call(*words: str | Path) -> tuple[int, str]:
        code = main(["use", *map(str, words), "--memory", str(memory)])
        return code, capsys.readouterr().out

    assert call(checkpoint) == (0, f"searches by what {checkpoint} learned from now on (router: learned)\n")
    with ZeroMem.open(memory, read_only=True) as held:
        assert held.stats()["checkpoint"] == "checkpoint"
    assert main(["stats", "--memory", str(memory)]) == 0
    assert "weights     checkpoint (router: learned)" in capsys.readouterr().out
    code, out = call("--default", "--json")
    assert (code, json.loads(out)) == (0, {"router": "rule", "checkpoint": None})
    assert main(["stats", "--memory", str(memory)]) == 0
    assert "weights" not in capsys.readouterr().out
    wrong: list[list[str | Path]] = [[], [checkpoint, "--default"]]
    for words in wrong:
        with pytest.raises(SystemExit):
            call(*words)
        assert "name a CHECKPOINT, or --default, and not both" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ran("train", "router", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "zeromem eval retrieval locomo" in shown
    taught = [field.name for kind in (TrainingSettings, Stage) for field in dataclasses.fields(kind)]
    words = [*taught, *LEARNABLE, *LOSSES, "fixed", "oracle_rho", '"evidence": ["a/1"]', "configs/equal.toml"]
    words += ['learn = ["damping", "decay"]', "configs/training/from-equal.toml", 'memory.use("FOLDER")', "zeromem use"]
    words += ["3 conversations", "split into fifths", "recall@5 for M(q), recall@512tok for R(q)"]
    assert [word for word in words if word not in shown] == []
    assert "no router can beat" not in shown
    assert "all questions" not in shown.split("--out ")[-1]
