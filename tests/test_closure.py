"""Evidence closure (Eq. 14) against the loop, and cases a person can check."""

import equations
import pytest
import torch
from builders import SIZES, Dice, Sample, bank_of, bank_with, rows_of, sample
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch.bank import MemoryBank, segment_topk
from zeromem_torch.closure import Closure, Support


def close(fused: Tensor, main: Tensor, bank: MemoryBank) -> Support:
    support: Support = Closure(0.25, 0.5)(fused, main, bank)
    return support


def assert_equals_the_loop(memories: list[Sample], k: int, slots: int = 3) -> None:
    bank = bank_of(memories)
    fused = Dice(1).uniform(slots, bank.axes["units"].size) - 0.2
    if slots > 2:
        fused[1] = 0.5  # all equal
        fused[2] = -0.5  # nothing worth supporting from
    main = segment_topk(fused, bank.axes["units"], k)
    support = close(fused, main, bank)
    ptr = bank.axes["units"].ptr
    for m, one in enumerate(memories):
        for s in range(slots):
            near, far = equations.closure(
                rows_of(fused, bank, s, m),
                [row - ptr[m] for row in main[s, m].tolist() if row >= 0],
                one.index.unit_session.tolist(),
                one.index.unit_asks.tolist(),
                one.index.unit_leans.tolist(),
                one.edges,
                neighbour=0.25,
                graph=0.5,
            )
            assert rows_of(support.neighbour, bank, s, m) == pytest.approx(near)
            assert rows_of(support.graph, bank, s, m) == pytest.approx(far, abs=1e-9)


@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("k", [0, 1, 3, 200])
def test_equals_equation_14(units: int, k: int) -> None:
    assert_equals_the_loop([sample(units, units)], k)


@pytest.mark.parametrize("k", [1, 4])
def test_many_memories_at_once(k: int) -> None:
    assert_equals_the_loop([sample(seed, units) for seed, units in enumerate((7, 0, 60, 1, 3, 2))], k)


@pytest.mark.parametrize("slots", [0, 1])
def test_few_queries(slots: int) -> None:
    assert_equals_the_loop([sample(1, 7), sample(2, 0)], 2, slots)


def dialogue(asks: list[bool], leans: list[bool], session: list[int]) -> MemoryBank:
    """Turns without entities."""
    none = torch.empty(0, dtype=torch.long)
    return bank_with(
        sample(0, len(asks), plain=True),
        unit_session=torch.tensor(session),
        unit_position=torch.zeros(len(asks), dtype=torch.long),
        unit_asks=torch.tensor(asks),
        unit_leans=torch.tensor(leans),
        out_degree=torch.zeros(len(asks), dtype=torch.long),
        edge_target=none,
        edge_weight=none.double(),
    )


def test_a_question_brings_its_answer_and_an_answer_its_question() -> None:
    bank = dialogue([True, False, False, False], [False] * 4, [0, 0, 0, 0])
    fused = torch.tensor([[0.8, 0.4, 0.2, 0.0]], dtype=torch.float64)
    for chosen, expected in ((0, [0, 0.2, 0, 0]), (1, [0.1, 0, 0, 0]), (2, [0, 0, 0, 0])):
        support = close(fused, torch.tensor([[[chosen, -1]]]), bank)
        assert support.neighbour.tolist() == [pytest.approx(expected)]
        assert not support.graph.any()


def test_a_turn_that_leans_brings_the_one_before_it_in_its_session_only() -> None:
    bank = dialogue([False] * 4, [False, False, True, True], [0, 0, 1, 1])
    fused = torch.full((1, 4), 0.8, dtype=torch.float64)
    support = close(fused, torch.tensor([[[2, 3]]]), bank)
    assert support.neighbour.tolist() == [pytest.approx([0, 0, 0.2, 0.2])]


def test_the_best_of_two_neighbours_counts() -> None:
    bank = dialogue([False] * 3, [False, True, True], [0, 0, 0])
    fused = torch.tensor([[0.4, 0.1, 0.8]], dtype=torch.float64)
    assert close(fused, torch.tensor([[[0, 2]]]), bank).neighbour.tolist() == [pytest.approx([0, 0.2, 0])]


def test_no_main_evidence_supports_nothing() -> None:
    bank = bank_of([sample(1, 7), sample(2, 20)])
    support = close(Dice(1).uniform(2, 27), torch.full((2, 2, 3), -1), bank)
    assert not support.neighbour.any()
    assert not support.graph.any()


def test_without_closure_there_is_no_support() -> None:
    support = Support.none(torch.rand(2, 7))
    assert support.neighbour.shape == support.graph.shape == (2, 7)
    assert not (support.neighbour + support.graph).any()


def test_order_of_main_units_and_doubles_among_them_do_not_matter() -> None:
    bank = bank_of([sample(1, 20)])
    fused = Dice(1).uniform(1, 20)
    first, again = close(fused, torch.tensor([[[3, 9, -1]]]), bank), close(fused, torch.tensor([[[9, 3, 9]]]), bank)
    assert_close((first.neighbour, first.graph), (again.neighbour, again.graph))


def test_a_query_alone_is_as_in_a_batch() -> None:
    bank = bank_of([sample(1, 129), sample(2, 7)])
    fused = Dice(1).uniform(7, 136)
    main = segment_topk(fused, bank.axes["units"], 5)
    whole = close(fused, main, bank)
    for s in range(7):
        one = close(fused[[s]], main[[s]], bank)
        assert torch.equal(one.neighbour, whole.neighbour[[s]])
        assert_close(one.graph, whole.graph[[s]], rtol=1e-12, atol=0)


def test_gradient_to_the_fused_scores() -> None:
    bank = bank_of([sample(1, 9), sample(2, 3)])
    fused = (0.1 + Dice(1).uniform(2, 12)).requires_grad_()
    main = segment_topk(fused, bank.axes["units"], 3)

    def supports(fused: Tensor) -> tuple[Tensor, Tensor]:
        support = close(fused, main, bank)
        return support.neighbour, support.graph

    assert gradcheck(supports, fused)
