"""View fusion (Eqs. 12-13) against the loop."""

import equations
import pytest
import torch
from builders import SIZES, Dice
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch.bank import axis_of
from zeromem_torch.retrieval.fusion import ViewFusion


def fuse(
    graph: Tensor,
    hierarchy: Tensor,
    weight: Tensor,
    sizes: tuple[int, ...],
    contrasts: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    fused: Tensor = ViewFusion(*contrasts)(graph, hierarchy, weight, axis_of(sizes))
    return fused


@pytest.mark.parametrize("sizes", [(size,) for size in SIZES] + [(3, 0, 1, 7, 129, 0)])
@pytest.mark.parametrize("contrasts", [(1.0, 1.0), (2.0, 1.0), (4.0, 10.0)])
def test_equals_equation_13(sizes: tuple[int, ...], contrasts: tuple[float, float]) -> None:
    dice, axis = Dice(0), axis_of(sizes)
    graph, hierarchy = dice.uniform(4, axis.size), dice.uniform(4, axis.size)
    graph[1] = (graph[1] * 3).round() / 3  # ties
    hierarchy[2] = 0.25  # all equal
    graph[3] = hierarchy[3] = 0.0
    weight = dice.uniform(4, len(sizes))
    fused = fuse(graph, hierarchy, weight, sizes, contrasts)
    for s in range(4):
        for m, (first, last) in enumerate(zip(axis.ptr, axis.ptr[1:], strict=False)):
            views = graph[s, first:last].tolist(), hierarchy[s, first:last].tolist()
            expected = equations.fuse(*views, float(weight[s, m]), contrasts)
            assert fused[s, first:last].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_view_that_has_all_the_weight_decides_alone(weight: float) -> None:
    graph, hierarchy = Dice(0).uniform(1, 7), Dice(1).uniform(1, 7)
    fused = fuse(graph, hierarchy, torch.tensor([[weight]], dtype=torch.float64), (7,))
    alone = graph if weight else hierarchy
    assert fused.argsort().tolist() == alone.argsort().tolist()
    assert (float(fused.min()), float(fused.max())) == (0, 1)


def test_range_and_offset_of_a_view_do_not_matter() -> None:
    graph, hierarchy = Dice(0).uniform(2, 7), Dice(1).uniform(2, 7)
    weight = torch.full((2, 1), 0.6, dtype=torch.float64)
    assert_close(
        fuse(40 * graph - 3, hierarchy / 9, weight, (7,), (4.0, 4.0)), fuse(graph, hierarchy, weight, (7,), (4.0, 4.0))
    )


def test_order_of_units_does_not_matter() -> None:
    graph, hierarchy, order = Dice(0).uniform(2, 7), Dice(1).uniform(2, 7), torch.randperm(7)
    weight = torch.full((2, 1), 0.6, dtype=torch.float64)
    turned = fuse(graph[:, order], hierarchy[:, order], weight, (7,), (4.0, 4.0))
    assert torch.equal(turned, fuse(graph, hierarchy, weight, (7,), (4.0, 4.0))[:, order])


def test_a_query_alone_is_the_same_bits_as_in_a_batch() -> None:
    graph, hierarchy, weight = Dice(0).uniform(7, 12), Dice(1).uniform(7, 12), Dice(2).uniform(7, 2)
    whole = fuse(graph, hierarchy, weight, (5, 7), (4.0, 4.0))
    for s in range(7):
        assert torch.equal(fuse(graph[[s]], hierarchy[[s]], weight[[s]], (5, 7), (4.0, 4.0)), whole[[s]])


@pytest.mark.parametrize("contrasts", [(1.0, 1.0), (2.0, 1.0), (4.0, 10.0)])
def test_gradient_to_both_views_and_the_route(contrasts: tuple[float, float]) -> None:
    """Away from ties; several memories, an empty one and one of a single unit among them."""
    graph = Dice(0).uniform(2, 8).requires_grad_()
    hierarchy = Dice(1).uniform(2, 8).requires_grad_()
    weight = Dice(2).uniform(2, 4).requires_grad_()
    assert gradcheck(lambda g, h, w: fuse(g, h, w, (4, 0, 3, 1), contrasts), (graph, hierarchy, weight))


def test_units_that_tie_for_an_end_of_the_range_share_its_gradient_and_a_flat_view_has_none() -> None:
    """The rule at ties: an end moves by the mean of the units that hold it; all-equal stands for 1, whatever it is."""
    graph = torch.tensor([[1.0, 1.0, 0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    flat = torch.full((1, 4), 0.5, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.5]], dtype=torch.float64)
    middle = fuse(graph, flat, weight, (4,))[0, 2]
    of_graph, of_flat = torch.autograd.grad(middle, (graph, flat))
    # 0.5 * (s - min) / (max - min) at s = .5: 0.5 to itself, -0.25 to the maximum in halves, -0.25 to the minimum
    assert_close(of_graph, torch.tensor([[-0.125, -0.125, 0.5, -0.25]], dtype=torch.float64))
    assert of_flat.tolist() == [[0, 0, 0, 0]]
