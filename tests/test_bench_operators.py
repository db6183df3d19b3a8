"""bench/operators.py checks every operator before it times it; no figure is looked at."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import operators
from bench.operators import OPERATORS, SIZES, Case, Made
from zeromem_torch.retrieval.dense import LateInteraction
from zeromem_torch.retrieval.fusion import ViewFusion
from zeromem_torch.retrieval.lexical import LexicalScores
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.retrieval.propagation import EntityPropagation
from zeromem_torch.sparse import Csr


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("out") / "new" / "operators.jsonl"
    operators.main(["--quick", "--json", str(out)])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_operator_is_measured_by_every_back_end_that_runs(written: list[dict[str, Any]]) -> None:
    head, *figures = written
    assert {"made", "floors", "auto", "left_out"} <= set(head)
    assert head["made"]["command"].startswith("python bench/operators.py --quick")
    found = {(row["op"], row["queries"]) for row in figures if row["backend"] == "torch"}
    assert found == {(op, queries) for op in OPERATORS for queries in (1, 7)}
    assert {row["backend"] for row in figures if row["op"] == "fused_score"} >= {"torch", "unfused"}
    for row in figures:
        assert {"device", "torch", "threads", "median_us", "iqr_us", "floor_share", "peak_mib"} <= set(row)
        assert row["median_us"] > 0
        assert ("error" in row) == (row["backend"] not in ("unfused", "torch.topk"))
    for name in ("triton", "cupy"):
        if not torch.cuda.is_available():
            assert not [row for row in figures if row["backend"] == name]
            assert "CUDA" in head["left_out"][f"pagerank, {name}"]


def spoilt(found: Any) -> Any:
    """A result that is a hundredth off, or one place."""
    if isinstance(found, tuple):
        return tuple(spoilt(part) for part in found)
    return found.roll(1, -1) if found.dtype == torch.long else found * 1.01


@pytest.mark.parametrize(
    ("op", "kind", "method"),
    [
        ("spmm", Csr, "times"),
        ("pagerank", PersonalizedPageRank, "forward"),
        ("propagation", EntityPropagation, "forward"),
        ("lexical", LexicalScores, "forward"),
        ("lexical_best", LexicalScores, "best"),
        ("maxsim", LateInteraction, "forward"),
        ("maxsim_int8", LateInteraction, "forward"),
        ("fused_score", ViewFusion, "best"),
    ],
)
def test_a_wrong_result_is_not_timed(op: str, kind: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, operator = OPERATORS[op]
    expected = make(Made(SIZES["tiny"], 3, "cpu")).expected()  # before anything is broken
    right = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda *given, **named: spoilt(right(*given, **named)))

    def broken(made: Made) -> Case:
        return replace(make(made), expected=lambda: expected)

    monkeypatch.setattr(operators, "OPERATORS", {op: (broken, operator)})
    with pytest.raises(SystemExit, match=rf"{op}, tiny, 3 queries, torch: expected"):
        list(operators.measure(op, "tiny", 3, "cpu", 1, 1 << 30, {}))


def test_what_would_not_fit_is_left_out() -> None:
    refused: dict[str, str] = {}
    for op in OPERATORS:
        assert not list(operators.measure(op, "HotpotQA pool", 64, "cpu", 1, 1 << 20, refused))
    assert set(refused) == {f"{op}, HotpotQA pool, 64 queries" for op in OPERATORS}
    assert set(refused.values()) == {"a tensor would take more than 1 MiB"}


def test_floors_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operators.main(["--floors", "--json", str(tmp_path / "floors.jsonl")])
    (head,) = (json.loads(line) for line in (tmp_path / "floors.jsonl").read_text().splitlines())
    assert head["floors"]["copy_gb_s"] > 0
    assert "copy_gb_s" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--operators", "spmv"], ["--sizes", "tiny,huge"]])
def test_an_unknown_name_is_an_error(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        operators.main(given)
    assert "expected some of" in capsys.readouterr().err
