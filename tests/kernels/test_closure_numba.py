"""The CPU kernel for evidence closure: what the definition adds, query by query."""

import dataclasses

import numpy as np
import pytest
import torch
from builders import SIZES, Dice, bank_of, sample
from torch.testing import assert_close

from zeromem_torch.backends import kernel
from zeromem_torch.bank import MemoryBank, segment_topk
from zeromem_torch.closure import Closure

RAGGED = (7, 0, 60, 1, 3, 2)


def check(sizes: tuple[int, ...], k: int, slots: int = 4, dtype: torch.dtype = torch.float64) -> None:
    bank = bank_of([sample(seed, units) for seed, units in enumerate(sizes)])
    bank = MemoryBank(dataclasses.replace(bank.index, edge_weight=bank.edge_weight.to(dtype)), bank.axes)
    fused = (Dice(1).uniform(slots, bank.axes["units"].size) - 0.3).to(dtype)
    if slots > 2:
        fused[1] = 0.5  # all equal
        fused[2] = -0.5  # nothing worth supporting from
    main = segment_topk(fused, bank.axes["units"], k)
    found, expected = (Closure(0.25, 0.5, backend)(fused, main, bank) for backend in ("numba", "torch"))
    for name in ("neighbour", "graph"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.dtype == dtype
        assert_close(mine, theirs, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), RAGGED])
@pytest.mark.parametrize("k", [0, 1, 4, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_adds_what_the_definition_adds(sizes: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    check(sizes, k, dtype=dtype)


@pytest.mark.parametrize("slots", [0, 1, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_queries_and_threads(slots: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    check(RAGGED, 4, slots)


def test_a_unit_that_is_named_twice_counts_once() -> None:
    pytest.importorskip("numba")
    bank = bank_of([sample(3, 60)])
    fused = Dice(1).uniform(1, 60)
    one, other = (
        Closure(0.25, 0.5, "numba")(fused, torch.tensor([[rows]]), bank) for rows in ([5, 9, -1, -1], [9, 5, 9, 9])
    )
    assert torch.equal(one.graph, other.graph)
    assert torch.equal(one.neighbour, other.neighbour)


def test_an_edge_of_no_weight_leads_nowhere() -> None:
    """However many there are: none may fill the list of nodes that are met."""
    pytest.importorskip("numba")
    bank = bank_of([sample(3, 60)])
    index = dataclasses.replace(bank.index, edge_weight=torch.zeros_like(bank.edge_weight))
    support = Closure(0.25, 0.5, "numba")(
        torch.rand(2, 60), torch.arange(60).expand(2, 1, 60), MemoryBank(index, bank.axes)
    )
    assert not support.graph.any()
    # two edges without weight from the first node to a unit: plain Python minds the bounds of the list of one
    edges = np.array([0, 2, 2]), np.array([1, 1]), np.zeros(2), np.array([-1, 0])
    step = kernel("closure", "numba")._second_step.py_func
    step(np.zeros(1), np.array([-1]), *edges, 0.5, np.ones(2), np.array([0]), np.empty(1, np.int64))


def test_scores_of_half_precision_are_left_to_torch() -> None:
    pytest.importorskip("numba")
    refuses = kernel("closure", "numba").refuses
    assert refuses(torch.device("cpu"), torch.float64, {}) is None
    assert "float32" in refuses(torch.device("cpu"), torch.float16, {})
