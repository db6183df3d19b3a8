"""bench/encoder.py runs, and times nothing that differs from sentence-transformers; no figure is looked at."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import encoder
from bench.encoder import compare, loads_of, open_model, ratio

SAID = [{"speaker": "Ann", "dia_id": f"D1:{n}", "text": f"I saw boat {n} today."} for n in range(9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> encoder.Model:
    pytest.importorskip("sentence_transformers")
    return open_model("tiny-shape", tmp_path_factory.mktemp("model"), "cpu", torch.float32)


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentence_transformers")
    out = tmp_path / "new" / "encoder.json"
    encoder.main(["--quick", "--model", "tiny-shape", "--json", str(out)])
    result: dict[str, Any] = json.loads(out.read_text())
    assert {"command", "commit", "device", "versions", "floors", "ratios", "figures", "model"} <= set(result)
    assert result["ratios"]["encoder_vs_sentence_transformers_mixed"] > 0
    whats = {row["what"] for row in result["figures"]}
    assert {"ours", "sentence-transformers", "padded, by transformers", "ours, one at a time"} <= whats
    assert {row["batch_tokens"] for row in result["figures"] if row["what"] == "ours"} >= set(encoder.BUDGETS)
    assert all(row["median_us"] > 0 for row in result["figures"])
    assert "encoder_vs_sentence_transformers_mixed: " in capsys.readouterr().out


def test_the_sweep_leaves_the_encoder_as_it_was(model: encoder.Model) -> None:
    before = model.ours.batch_tokens, model.ours.packed
    rows = list(encoder.sweep(model, "mixed", ["one", "two words"], "cpu", 1))
    assert len(rows) == len(encoder.BUDGETS) + 1 + 2
    assert (model.ours.batch_tokens, model.ours.packed) == before


def test_vectors_that_differ_are_not_timed(model: encoder.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = model.ours.encode
    figures = compare(model, "mixed", ["one", "two words"], "cpu", 1)
    assert [row["what"] for row in figures] == ["ours", "sentence-transformers"]

    def wrong(texts: Any, **named: Any) -> Any:
        return right([f"{text} indeed" for text in texts], **named)

    monkeypatch.setattr(model.ours, "encode", wrong)
    with pytest.raises(
        SystemExit, match=r"encoder, mixed: expected vectors within 1e-05 of sentence-transformers, got"
    ):
        compare(model, "mixed", ["one", "two words"], "cpu", 1)


def test_a_ratio_is_their_time_over_ours() -> None:
    rows = [
        {"load": "mixed", "what": "ours", "median_us": 2.0, "peak_mib": 1},
        {"load": "mixed", "what": "ours", "median_us": 1.0},  # at another batch size
        {"load": "mixed", "what": "sentence-transformers", "median_us": 5.0, "peak_mib": 1},
        {"load": "turns", "what": "sentence-transformers", "median_us": 9.0, "peak_mib": 1},
    ]
    assert ratio(rows) == 2.5
    assert ratio(rows[:2]) is None


def test_operations_are_those_of_the_products(model: encoder.Model) -> None:
    """Four products of dim x dim, two of dim x wide, a layer; and twice a length of scores, a token."""
    dim, wide, layers = 32, 64, 2
    per_token = 2 * layers * (4 * dim * dim + 2 * dim * wide)
    attention = layers * 4 * dim * (3**2 + 5**2)
    assert model.flops([3, 5]) == 8 * per_token + attention


def test_loads_are_drawn_from_the_files(tmp_path: Path) -> None:
    sample = {
        "conversation": {"speaker_a": "Ann", "session_1": SAID},
        "qa": [{"question": f"Which boat, {n}?"} for n in range(9)],
    }
    (tmp_path / "talk.json").write_text(json.dumps([sample]))
    (tmp_path / "pool.jsonl").write_text(
        "".join(json.dumps({"title": f"{n}", "text": f"Paragraph {n}."}) + "\n" for n in range(9))
    )
    loads = loads_of(tmp_path / "talk.json", tmp_path / "pool.jsonl", 6)
    assert {name: len(texts) for name, texts in loads.items()} == {"questions": 6, "turns": 6, "mixed": 6}
    assert all(text.startswith("Which boat") for text in loads["questions"])
    assert {text.split()[0] for text in loads["mixed"]} == {"Which", "I", "Paragraph"}
    assert loads_of(None, None, 6) == loads_of(None, None, 6)
    assert len(set(loads_of(None, None, 6)["mixed"])) == 6
