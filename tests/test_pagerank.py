"""Personalized PageRank (Eq. 10) against a loop, a dense solve and networkx."""

import equations
import networkx
import pytest
import torch
from builders import SIZES, Dice, bank_of, sample
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch.bank import axis_of, segment_sum
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.sparse import Csr

TIGHT = 1e-11


def random_graph(nodes: int, seed: int = 0, *, fill: float = 0.3) -> Csr:
    """Weighted and directed, with self-loops; every fourth node dangles, and every eighth is isolated."""
    dice = Dice(seed)
    edges = dice.uniform(nodes, nodes) * (dice.uniform(nodes, nodes) < max(fill, 4 / max(nodes, 1)))
    edges[3::4] = 0
    edges[:, 7::8] = 0
    row, col = edges.nonzero(as_tuple=True)
    return Csr.from_coo(row, col, edges[row, col], nodes, nodes)


def random_reset(slots: int, nodes: int, seed: int = 1) -> Tensor:
    mass = Dice(seed).uniform(slots, nodes)
    mass[:, 1::2] = 0
    return mass / mass.sum(1, keepdim=True).clamp(min=1e-30)


def walk(reset: Tensor, graph: Csr, damping: float, affinity: Tensor | None = None, tolerance: float = TIGHT) -> Tensor:
    nodes = axis_of([graph.rows])
    found: Tensor = PersonalizedPageRank(damping, tolerance)(reset, graph, graph.transpose(), nodes, affinity)
    return found


def solve(reset: Tensor, graph: Csr, damping: float, affinity: Tensor | None = None) -> Tensor:
    """The linear system, with dangling rows replaced by the reset."""
    rows = []
    for s, own in enumerate(reset):
        edges = graph.to_dense() * (1 if affinity is None else affinity[s])
        leaving = edges.sum(1, keepdim=True)
        steps = torch.where(leaving > 0, edges / leaving.clamp(min=1e-30), own)
        rows.append(torch.linalg.solve(torch.eye(len(own), dtype=own.dtype) - damping * steps.T, (1 - damping) * own))
    return torch.stack(rows)


@pytest.mark.parametrize("nodes", SIZES)
@pytest.mark.parametrize("liked", [False, True])
@pytest.mark.parametrize("damping", [0.0, 0.15, 0.6, 0.9])
def test_equals_the_loop(nodes: int, liked: bool, damping: float) -> None:
    graph, reset = random_graph(nodes), random_reset(2, nodes)
    affinity = Dice(2).uniform(2, nodes) if liked else None
    if affinity is not None:
        affinity[1, ::3] = 0  # a node that the query does not like at all
    rows = [
        equations.pagerank(
            reset[s].tolist(),
            equations.transition(graph.to_dense().tolist(), None if affinity is None else affinity[s].tolist()),
            damping,
        )
        for s in range(2)
    ]
    assert_close(
        walk(reset, graph, damping, affinity),
        torch.tensor(rows, dtype=torch.float64).reshape(2, nodes),
        rtol=0,
        atol=10 * TIGHT,
    )


@pytest.mark.parametrize("nodes", [1, 7, 129])
@pytest.mark.parametrize("liked", [False, True])
@pytest.mark.parametrize("damping", [0.15, 0.6, 0.9])
def test_equals_a_dense_solve(nodes: int, liked: bool, damping: float) -> None:
    graph, reset = random_graph(nodes, 3), random_reset(3, nodes)
    affinity = Dice(2).uniform(3, nodes) if liked else None
    found = walk(reset, graph, damping, affinity)
    assert_close(found, solve(reset, graph, damping, affinity), rtol=0, atol=10 * TIGHT)


@pytest.mark.parametrize("nodes", [1, 7, 129])
@pytest.mark.parametrize("damping", [0.15, 0.6, 0.9])
def test_equals_networkx(nodes: int, damping: float) -> None:
    graph, reset = random_graph(nodes, 4), random_reset(1, nodes)
    known = networkx.DiGraph()
    known.add_nodes_from(range(nodes))
    for row, col, weight in zip(graph.row_of_entry().tolist(), graph.col.tolist(), graph.val.tolist(), strict=True):
        known.add_edge(row, col, weight=weight)
    mass = dict(enumerate(reset[0].tolist()))
    scores = networkx.pagerank(known, damping, personalization=mass, dangling=mass, tol=1e-13, max_iter=1000)
    assert walk(reset, graph, damping)[0].tolist() == pytest.approx([scores[i] for i in range(nodes)], abs=1e-9)


@pytest.mark.parametrize("damping", [0.15, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
def test_the_fixed_number_of_steps_keeps_the_error_below_the_tolerance(damping: float, tolerance: float) -> None:
    graph, reset = random_graph(129, 5), random_reset(4, 129)
    error = (walk(reset, graph, damping, tolerance=tolerance) - solve(reset, graph, damping)).abs().sum(1)
    assert float(error.max()) <= tolerance


def test_many_memories_at_once() -> None:
    memories = [sample(seed, units) for seed, units in enumerate((7, 0, 129, 1, 3))]
    bank, dice = bank_of(memories), Dice(1)
    nodes = bank.axes["nodes"]
    mass = dice.uniform(3, nodes.size)
    mass[1, nodes.ptr[2] : nodes.ptr[3]] = 0  # an unfilled slot
    total = segment_sum(mass, nodes.segment, nodes.segments).clamp(min=1e-30)
    reset, affinity = mass / total[:, nodes.segment], dice.uniform(3, nodes.size)
    found = PersonalizedPageRank(0.6, TIGHT)(reset, bank.adjacency, bank.adjacency_t, nodes, affinity)
    for m, one in enumerate(memories):
        own = slice(nodes.ptr[m], nodes.ptr[m + 1])
        for s in range(3):
            steps = equations.transition(one.edges, affinity[s, own].tolist())
            row = equations.pagerank(reset[s, own].tolist(), steps, 0.6)
            assert found[s, own].tolist() == pytest.approx(row, abs=10 * TIGHT)


@pytest.mark.parametrize("nodes", [1, 7, 129])
def test_mass_is_kept(nodes: int) -> None:
    reset = random_reset(3, nodes)
    reset[1] = 0
    affinity = Dice(2).uniform(3, nodes)
    affinity[2] = 0  # every node dangles
    found = walk(reset, random_graph(nodes), 0.6, affinity)
    assert found.sum(1).tolist() == pytest.approx([1, 0, 1])
    assert bool((found >= 0).all())
    assert_close(found[2], reset[2])


def test_mass_is_kept_in_float32_with_affinities_near_nothing() -> None:
    affinity = torch.logspace(-45, 0, 129).repeat(2, 1)
    affinity[1] = 1e-38
    reset, graph = random_reset(2, 129).float(), random_graph(129)
    graph = Csr(graph.crow, graph.col, graph.val.float(), graph.cols)
    found = walk(reset, graph, 0.6, affinity, 1e-6)
    assert found.sum(1).tolist() == pytest.approx([1, 1], abs=1e-5)


def test_without_edges_the_reset_stays() -> None:
    none = torch.zeros(0, dtype=torch.long)
    nothing = Csr.from_coo(none, none, none.double(), 7, 7)
    reset = random_reset(2, 7)
    assert_close(walk(reset, nothing, 0.6), reset)


def test_scale_of_edges_and_of_affinities_does_not_matter() -> None:
    graph, reset, affinity = random_graph(20), random_reset(2, 20), Dice(2).uniform(2, 20)
    scaled = Csr(graph.crow, graph.col, 8 * graph.val, graph.cols)
    assert_close(walk(reset, scaled, 0.6, 4 * affinity), walk(reset, graph, 0.6, affinity))


def test_numbering_of_nodes_does_not_matter() -> None:
    graph, reset, affinity = random_graph(20), random_reset(2, 20), Dice(2).uniform(2, 20)
    order = torch.randperm(20)
    dense = graph.to_dense()[order][:, order]
    row, col = dense.nonzero(as_tuple=True)
    turned = Csr.from_coo(row, col, dense[row, col], 20, 20)
    assert_close(walk(reset[:, order], turned, 0.6, affinity[:, order]), walk(reset, graph, 0.6, affinity)[:, order])


def test_a_query_alone_is_as_in_a_batch() -> None:
    graph, reset, affinity = random_graph(129), random_reset(7, 129), Dice(2).uniform(7, 129)
    whole = walk(reset, graph, 0.6, affinity)
    for s in range(7):
        assert_close(walk(reset[[s]], graph, 0.6, affinity[[s]]), whole[[s]], rtol=0, atol=1e-14)


def test_nothing_asked() -> None:
    assert walk(torch.zeros(0, 7, dtype=torch.float64), random_graph(7), 0.6).shape == (0, 7)


@pytest.mark.parametrize("damping", [-0.1, 1.0, 1.5])
def test_damping_outside_its_range_is_refused(damping: float) -> None:
    with pytest.raises(ValueError, match="damping must lie in"):
        PersonalizedPageRank(damping)


def test_gradient_to_reset_edges_and_affinity() -> None:
    """Through the unrolled steps, with a dangling node, an isolated node and two memories."""
    graph, nodes = random_graph(9, 2, fill=0.5), axis_of([9, 3])
    reset = torch.cat([random_reset(2, 9), torch.ones(2, 3, dtype=torch.float64) / 3], 1).requires_grad_()
    affinity = (0.2 + Dice(2).uniform(2, 12)).requires_grad_()
    val = graph.val.clone().requires_grad_()
    crow = torch.cat([graph.crow, graph.crow[-1:].expand(3)])

    def mass(reset: Tensor, val: Tensor, affinity: Tensor) -> Tensor:
        edges = Csr(crow, graph.col, val, 12)
        found: Tensor = PersonalizedPageRank(0.6, 1e-6)(reset, edges, edges.transpose(), nodes, affinity)
        return found

    assert gradcheck(mass, (reset, val, affinity))


def test_gradient_stays_small_where_a_query_likes_nothing_or_has_no_reset() -> None:
    """The jump from nothing to something has no slope: it is 0 there, and not 1/0."""
    reset, affinity = random_reset(2, 9), torch.zeros(2, 9, dtype=torch.float64)
    reset[0] = 0
    reset, affinity = reset.requires_grad_(), affinity.requires_grad_()
    for grad in torch.autograd.grad(walk(reset, random_graph(9, 2), 0.6, affinity).pow(2).sum(), (reset, affinity)):
        assert float(grad[1].abs().max()) < 10
        assert bool(grad.isfinite().all())
