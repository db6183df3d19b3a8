"""bench/table.py prints what the files hold, and nothing else."""

import json
from pathlib import Path

import pytest

from bench import table

MADE = {
    "command": "python bench/NAME.py --threads 2", "device": "a processor", "host": "a processor", "threads": 2,
    "commit": "0123456789abcdef", "versions": {"torch": "2.13.0"}, "floors": {"copy_gb_s": 12.34},
}  # fmt: skip


def printed(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    table.main([str(path)])
    return capsys.readouterr().out


def made(name: str) -> dict[str, object]:
    return {**MADE, "command": f"python bench/{name}.py --threads 2"}


def test_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [
        {"figure": "retrieval", "data": "locomo", "what": "ours", "queries": 256, "threads": 2, "median_us": 81.26,
         "p95_us": 1234.5, "p99_us": 2000.0, "cold_us": 90.0},
        {"figure": "retrieval", "data": "locomo", "what": "stage graph", "median_us": 20.0, "share": 0.25},
        {"figure": "pagerank", "data": "locomo", "what": "igraph", "queries": 256, "threads": 1, "median_us": 400.0,
         "p95_us": 500.0, "p99_us": 600.0, "cold_us": 700.0, "floor_share": 0.004},
    ]  # fmt: skip
    ratios = {"retrieval_vs_linearrag_locomo": 31.4159, "bm25_vs_bm25s_numba": None, "another": 2.0}
    path = tmp_path / "pipeline-x.json"
    path.write_text(
        json.dumps({**made("pipeline"), "ratios": ratios, "skipped": ["igraph is not there"], "figures": figures})
    )
    lines = printed(path, capsys).splitlines()
    assert (
        "| all stages but MaxSim, against LinearRAG's search, LoCoMo | 30x | 31.4x | `retrieval_vs_linearrag_locomo` |"
        in lines
    )
    assert any("| not measured | `bm25_vs_bm25s_numba` |" in line for line in lines)
    assert "| another |  | 2x | `another` |" in lines
    assert "- left out: igraph is not there" in lines
    assert "Floors measured first: copy (GB/s) 12.34" in lines
    assert "| locomo | ours | 256 | 2 | 81.3 | 1,234 | 2,000 | 90 |" in lines
    assert "| locomo | igraph | 256 | 1 | 400 | 500 | 600 | 700 | 0.4% |" in lines
    assert "Where a query's time goes, locomo: graph 20 us (25%)" in lines
    assert "**a processor**, 2 threads, commit 012345678, torch 2.13.0: `python bench/pipeline.py --threads 2`" in lines


def test_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"op": "spmm", "size": "pool", "backend": name, "queries": queries, "median_us": us, "floor_share": 0.5}
        for name, queries, us in (("torch", 1, 5.0), ("torch", 256, 150.4), ("triton", 256, 1.25))
    ]
    path = tmp_path / "operators-x.jsonl"
    head = {"made": {**made("operators"), "floors": None}, "floors": {"copy_gb_s": 1.0}}
    path.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))
    lines = printed(path, capsys).splitlines()
    assert "| size | back end | 1 | 256 |" in lines
    assert "| pool | torch | 5 (50%) | 150 (50%) |" in lines
    assert "| pool | triton |  | 1.25 (50%) |" in lines


def test_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"load": "mixed", "what": "ours", "batch_tokens": 4096, "median_us": 10.0, "p95_us": 11.0, "tokens_s": 12345}
    path = tmp_path / "encoder-x.json"
    path.write_text(json.dumps({**made("encoder"), "ratios": {"encoder_vs_x": 1.5}, "figures": [row]}))
    lines = printed(path, capsys).splitlines()
    assert "| load | what | tokens a batch | median us a text | p95 | tokens/s |" in lines
    assert "| mixed | ours | 4,096 | 10 | 11 | 12,345 |" in lines
    assert "- `encoder_vs_x`: 1.5x" in lines


def test_without_names_it_prints_all_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    table.main([])
    assert "no results yet" in capsys.readouterr().err
    for name in ("encoder", "pipeline"):
        (tmp_path / f"{name}-x.json").write_text(json.dumps({**made(name), "ratios": {}, "figures": []}))
    (tmp_path / "append.json").write_text("{}")  # another bench's
    table.main([])
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("###")]
    assert heads == ["### pipeline: pipeline-x.json", "### encoder: encoder-x.json"]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({**made("append"), "figures": []}))
    with pytest.raises(
        SystemExit, match=r"x\.json: expected a file that pipeline\.py, encoder\.py, operators\.py, serving\.py wrote"
    ):
        table.main([str(tmp_path / "x.json")])
