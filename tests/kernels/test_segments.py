"""The CPU kernel for the best rows of segments: the ranking of the definition, whatever the scores."""

import pytest
import torch
from builders import SIZES, Dice
from torch import Tensor

from zeromem_torch.backends import kernel
from zeromem_torch.bank import SCORE_STEP, axis_of, segment_minmax, segment_topk

RAGGED = (3, 0, 1, 7, 129, 0)


def scores(kind: str, slots: int, rows: int) -> Tensor:
    drawn = Dice(rows).uniform(slots, rows)
    return {
        "all different": drawn,
        "many ties": (drawn * 3).round() / 3 - 0.5,
        "all equal": torch.full_like(drawn, 0.25),
        "about a step apart": 0.3 + drawn * 5 * SCORE_STEP,
        "halves of a step": (drawn * 9).round() * SCORE_STEP / 2,
        "beyond what is told apart": (drawn - 0.5) * 1e6,
        "infinite": torch.where(drawn < 0.3, -torch.inf, torch.where(drawn > 0.8, torch.inf, drawn)),
    }[kind]


@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), (3000,), RAGGED])
@pytest.mark.parametrize(
    "kind",
    [
        "all different", "many ties", "all equal", "about a step apart", "halves of a step",
        "beyond what is told apart", "infinite",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_ranks_as_the_definition(sizes: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    axis, given = axis_of(sizes), scores(kind, 3, sum(sizes)).to(dtype)
    present = Dice(1).uniform(3, sum(sizes)) < 0.5
    present[2] = False
    for k in (1, 2, 5, 32, 64, 65, 256, 4000):
        for mask in (None, present):
            found, expected = (segment_topk(given, axis, k, mask, backend) for backend in ("numba", "torch"))
            assert torch.equal(found, expected)


@pytest.mark.parametrize("slots", [0, 1, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_queries_are_ranked_alone_whatever_the_threads(
    slots: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(kernel("segments", "numba"), "INLINE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    axis, given = axis_of(RAGGED), scores("many ties", slots, sum(RAGGED))
    whole = segment_topk(given, axis, 9, backend="numba")
    assert torch.equal(whole, segment_topk(given, axis, 9, backend="torch"))
    assert all(torch.equal(segment_topk(given[[s]], axis, 9, backend="numba"), whole[[s]]) for s in range(slots))


def test_a_score_that_is_no_number_ranks_last() -> None:
    pytest.importorskip("numba")
    given = torch.tensor([[torch.nan, 1.0, torch.nan, -3.0]])
    assert segment_topk(given, axis_of([4]), 4, backend="numba").tolist() == [[[1, 3, 0, 2]]]


def test_scores_of_half_precision_are_left_to_torch() -> None:
    pytest.importorskip("numba")
    refuses = kernel("segments", "numba").refuses
    assert refuses(torch.device("cpu"), torch.float32, {}) is None
    assert "float32" in refuses(torch.device("cpu"), torch.float16, {})
    assert segment_topk(torch.tensor([[0.5, 1.0]]).half(), axis_of([2]), 1).tolist() == [[[1]]]


@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), (3000,), RAGGED])
@pytest.mark.parametrize("kind", ["all different", "many ties", "all equal", "about a step apart", "halves of a step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_minmax_is_that_of_the_definition_to_the_bit(
    sizes: tuple[int, ...], kind: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(kernel("segments", "numba"), "INLINE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    axis, given = axis_of(sizes), scores(kind, 4, sum(sizes)).to(dtype)
    present = Dice(1).uniform(4, sum(sizes)) < 0.5
    present[2] = False
    for mask in (None, present):
        found, expected = (segment_minmax(given, axis, mask, backend) for backend in ("numba", "torch"))
        assert torch.equal(found, expected)
        turned = segment_minmax(given.T.contiguous().T, axis, mask, "numba")  # whatever way it lies
        assert torch.equal(turned, expected)


def test_an_absent_row_may_hold_anything() -> None:
    pytest.importorskip("numba")
    given = torch.tensor([[torch.nan, 1.0, torch.inf, 3.0]])
    present = torch.tensor([[False, True, False, True]])
    for backend in ("numba", "torch"):
        assert segment_minmax(given, axis_of([4]), present, backend).tolist() == [[0.0, 0.0, 0.0, 1.0]]
