"""bench/append.py runs, and writes what it says it does; no figure of it is looked at."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import memory_of

from bench import append
from zeromem_torch.substrate.traces import Trace


def test_the_figures_of_two_small_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "append.json"
    append.main(["--json", str(out), "--sizes", "20,120", "--quick", "--folder", str(tmp_path)])
    result: dict[str, Any] = json.loads(out.read_text())
    assert {"command", "commit", "device", "versions", "threads", "data", "encoder"} <= set(result)
    assert list(result["layouts"]) == list(result["ratios"]) == ["one boundary", "100 boundaries"]
    for layout, rows in result["layouts"].items():
        assert [row["traces"] for row in rows] == [20, 120]
        assert list(result["ratios"][layout]) == ["120/20"]
        for row in rows:
            assert set(row["amortised_us"]) == {"record", "read", "index", "merge", "wall"}
            assert min(row["amortised_us"][part] for part in ("record", "read", "index", "wall")) > 0
            assert row["rows_written_per_row"] >= 1
            assert {"median", "p95", "max", "parts"} == set(row["add_ms"]) == set(row["add_in_use_ms"])
            assert min(row["open_ms"].values()) > 0
    printed = capsys.readouterr().out
    assert "one boundary" in printed
    assert "120/20: index" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["append.json"]  # the memories are removed


def test_a_token_is_looked_up_and_a_text_is_the_mean_of_its_tokens() -> None:
    encoder = append.TableEncoder(dim=8, rows=64)
    encoded = encoder.encode(["Ann sails.", "", "Ann"], states=True)
    assert encoded.counts.tolist() == [3, 0, 1]
    assert torch.equal(encoded.states[0], encoded.states[3])
    torch.testing.assert_close(encoded.vectors[2], encoded.states[3])
    memory = memory_of(Trace("1", "b", "Ann sails."), Trace("2", "b", "Bo sleeps."), encoder=encoder)
    assert memory.search("sleeps", boundary="b").main[0].trace_id == "2"
