"""Personalized PageRank (Eq. 10) against a loop, a dense solve and networkx, on each back end of the CPU."""

import math
from typing import Any

import equations
import networkx
import pytest
import torch
from builders import SIZES, Dice, bank_of, sample
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

import zeromem_torch.retrieval.pagerank as module
from zeromem_torch import backends
from zeromem_torch.bank import axis_of, segment_sum
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank, chebyshev_steps, power_steps
from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.traces import ZeroMemError

TIGHT = 1e-11


@pytest.fixture(autouse=True, params=["torch", "numba"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `auto` resolves to, wherever it can."""
    name = str(request.param)
    if name == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setitem(backends._AUTO, "cpu", ("torch",))
    return name


def random_graph(nodes: int, seed: int = 0, *, fill: float = 0.3) -> Csr:
    """Weighted and directed, with self-loops; every fourth node dangles, and every eighth is isolated."""
    dice = Dice(seed)
    edges = dice.uniform(nodes, nodes) * (dice.uniform(nodes, nodes) < max(fill, 4 / max(nodes, 1)))
    edges[3::4] = 0
    edges[:, 7::8] = 0
    row, col = edges.nonzero(as_tuple=True)
    return Csr.from_coo(row, col, edges[row, col], nodes, nodes)


def symmetric_graph(nodes: int) -> Csr:
    graph = random_graph(nodes, 6)
    row, col = torch.cat([graph.row_of_entry(), graph.col]), torch.cat([graph.col, graph.row_of_entry()])
    return Csr.from_coo(row, col, graph.val.repeat(2), nodes, nodes)


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


def test_the_step_count_is_what_the_tolerance_takes(backend: str) -> None:
    """On a path longer than the walk what is missing is known: the mass behind the last step."""
    nodes, tolerance = 64, 1e-4
    row = torch.arange(nodes - 1)
    path = Csr.from_coo(row, row + 1, torch.ones(nodes - 1, dtype=torch.float64), nodes, nodes)
    reset = torch.zeros(1, nodes, dtype=torch.float64)
    reset[0, 0] = 1
    whole = torch.tensor([0.6**i for i in range(nodes)], dtype=torch.float64)
    whole /= whole.sum()
    steps = power_steps(0.6, tolerance)
    error = float((walk(reset, path, 0.6, tolerance=tolerance)[0] - whole).abs().sum())
    assert error <= tolerance
    if backend == "torch":  # one step less would not do
        assert error > 0.6 * tolerance
    assert 2 * 0.6 ** (steps + 1) < tolerance < 2 * 0.6**steps * 1.001


@pytest.mark.parametrize("damping", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("liked", [False, True])
def test_chebyshev_equals_a_dense_solve(damping: float, liked: bool) -> None:
    graph, reset = symmetric_graph(129), random_reset(3, 129)
    affinity = Dice(2).uniform(3, 129) if liked else None
    if affinity is not None:
        affinity[1, ::3] = 0
    for tolerance in (1e-3, 1e-6, TIGHT):
        rank = PersonalizedPageRank(damping, tolerance, solver="chebyshev")
        found = rank(reset, graph, graph.transpose(), axis_of([129]), affinity)
        error = (found - solve(reset, graph, damping, affinity)).abs().sum(1)
        assert float(error.max()) <= tolerance + 1e-12


def test_chebyshev_takes_fewer_steps_where_nodes_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = torch.arange(40)
    graph = Csr.from_coo(
        torch.cat([ring, ring]), torch.cat([ring.roll(1), ring.roll(-1)]), torch.ones(80).double(), 40, 40
    )
    taken: list[tuple[int, str]] = []
    kept = module.walk

    def watched(*args: Any, **how: Any) -> Tensor:
        taken.append((args[6], how["solver"]))
        return kept(*args, **how)

    monkeypatch.setattr(module, "walk", watched)
    for solver in ("power", "chebyshev"):
        rank = PersonalizedPageRank(0.6, 1e-6, solver=solver, backend="torch")
        rank(random_reset(1, 40), graph, graph.transpose(), axis_of([40]))
    assert taken[0] == (28, "power")
    assert taken[1][1] == "chebyshev"
    assert taken[1][0] == chebyshev_steps(0.6, 1e-6, 40) < 20
    uneven = Csr(graph.crow, graph.col, graph.val.clone(), 40)
    uneven.val[(uneven.row_of_entry() == 0) & (uneven.col == 1)] = 1e30  # both directions
    uneven.val[(uneven.row_of_entry() == 1) & (uneven.col == 0)] = 1e30
    rank(random_reset(1, 40), uneven, uneven.transpose(), axis_of([40]))
    assert taken[2] == (28, "power")  # the bound would take more


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_chebyshev_takes_from_an_error_as_much_as_a_polynomial_can(steps: int) -> None:
    """Between two nodes each step turns an error around whole: what is left of it after k is 1 / T_k(1 / damping)."""
    swap = Csr(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2, dtype=torch.float64), 2)
    ones, source = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    solved = torch.tensor([[1.0], [0.6]], dtype=torch.float64) / (1 - 0.6**2)
    found = module.walk(swap, swap, ones, ones, source, 0.6, steps, solver="chebyshev")
    left = 0.6 / math.cosh((steps - 1) * math.acosh(1 / 0.6))  # the last product is a plain one
    assert float((found - solved).norm()) == pytest.approx(left * float((source - solved).norm()), rel=1e-9)


def test_chebyshev_refuses_what_is_not_symmetric() -> None:
    graph = random_graph(7)
    with pytest.raises(ValueError, match="expected a symmetric adjacency"):
        PersonalizedPageRank(0.6, solver="chebyshev")(random_reset(1, 7), graph, graph.transpose(), axis_of([7]))
    with pytest.raises(ValueError, match="solver must be one of power, chebyshev"):
        PersonalizedPageRank(0.6, solver="chebychev")


@pytest.mark.parametrize("backend", ["torch"], indirect=True)  # the other has no gradient
@pytest.mark.parametrize("solver", ["power", "chebyshev"])
def test_gradient_to_reset_edges_affinity_and_damping_twice(solver: str) -> None:
    """Through the fixed point, with a dangling node, an isolated node and two memories."""
    graph = random_graph(5, 2, fill=0.5) if solver == "power" else symmetric_graph(5)
    nodes = axis_of([5, 2])
    reset = torch.cat([random_reset(2, 5), torch.ones(2, 2, dtype=torch.float64) / 2], 1).requires_grad_()
    affinity = (0.2 + Dice(2).uniform(2, 7)).requires_grad_()
    damping = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    crow = torch.cat([graph.crow, graph.crow[-1:].expand(2)])
    rank = PersonalizedPageRank(tolerance=1e-13, solver=solver)
    own = torch.arange(len(graph.val))
    twin = Csr(crow, graph.col, own.double(), 7).transpose().val.long()
    place = own if solver == "power" else torch.minimum(own, twin)  # a symmetric matrix is changed symmetrically
    val = graph.val.clone().requires_grad_()

    def mass(reset: Tensor, val: Tensor, affinity: Tensor, damping: Tensor) -> Tensor:
        edges = Csr(crow, graph.col, val[place], 7)
        found: Tensor = rank(reset, edges, edges.transpose(), nodes, affinity, damping)
        return found

    assert gradcheck(mass, (reset, val, affinity, damping))
    assert gradgradcheck(mass, (reset, val, affinity, damping), fast_mode=True)


@pytest.mark.parametrize("backend", ["torch"], indirect=True)  # the other has no gradient
@pytest.mark.parametrize("damping", [0.0, 0.6])
def test_gradient_is_that_of_the_steps_unrolled(damping: float) -> None:
    graph, reset, affinity = random_graph(20, 2), random_reset(3, 20), 0.1 + Dice(2).uniform(3, 20)
    weight = Dice(3).uniform(3, 20)
    given = [part.clone().requires_grad_() for part in (reset, graph.val, affinity)]
    edges = Csr(graph.crow, graph.col, given[1], 20)
    found = walk(given[0], edges, damping, given[2])
    implicit = torch.autograd.grad((found * weight).sum(), given)

    edges_t, liking = edges.transpose(), given[2].T
    leaving = edges @ liking
    share = torch.where(leaving > 0, 1 / leaving.clamp(min=1e-30), 0)
    mass = given[0].T
    for _ in range(60):
        mass = (1 - damping) * given[0].T + damping * liking * (edges_t @ (mass * share))
    unrolled = torch.autograd.grad(((mass / mass.sum(0)).T * weight).sum(), given)
    assert_close(implicit, unrolled)


@pytest.mark.parametrize("backend", ["torch"], indirect=True)  # the other has no gradient
def test_what_is_kept_for_the_gradient_does_not_grow_with_the_steps() -> None:
    graph, reset, affinity = random_graph(129), random_reset(4, 129).requires_grad_(), Dice(2).uniform(4, 129)

    def kept(tolerance: float) -> int:
        total = 0

        def count(saved: Tensor) -> Tensor:
            nonlocal total
            total += saved.numel() * saved.element_size()
            return saved

        with saved_tensors_hooks(count, lambda saved: saved):
            walk(reset, graph, 0.9, affinity, tolerance)
        return total

    few, many = (2.001 * 0.9**walks / (1 - 0.9**walks) for walks in (11, 201))
    assert (power_steps(0.9, few), power_steps(0.9, many)) == (10, 200)
    assert 0 < kept(many) == kept(few)


def test_a_damping_to_be_learned_replaces_the_modules_own() -> None:
    graph, reset = random_graph(20), random_reset(2, 20)
    rank = PersonalizedPageRank(0.1, TIGHT)
    inputs = (reset, graph, graph.transpose(), axis_of([20]), None)
    assert_close(rank(*inputs, 0.7), walk(reset, graph, 0.7))
    assert_close(rank(*inputs, torch.tensor(0.7, dtype=torch.float64)), walk(reset, graph, 0.7))
    with pytest.raises(ValueError, match="damping must lie in"):
        rank(*inputs, 1.0)


def test_a_back_end_without_a_gradient_is_not_taken_for_one(backend: str) -> None:
    graph, reset = random_graph(7), random_reset(1, 7).requires_grad_()
    inputs = (graph, graph.transpose(), axis_of([7]))
    assert PersonalizedPageRank(0.6)(reset, *inputs).requires_grad
    if backend == "numba":
        rank = PersonalizedPageRank(0.6, backend="numba")
        with pytest.raises(ZeroMemError, match="no gradient"):
            rank(reset, *inputs)
        with torch.no_grad():
            assert_close(rank(reset, *inputs), walk(reset.detach(), graph, 0.6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["numba"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_and_the_rest_of_a_tile_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries stop at their own times: of 37, spread over three tiles or more, some converge long before others."""
    from zeromem_torch.kernels import pagerank_numba

    graph = random_graph(129)
    graph = Csr(graph.crow, graph.col, graph.val.to(dtype), 129)
    reset = random_reset(37, 129) ** 4
    reset[::2] = 0
    reset[::2, 3] = 1  # dangles: done at once
    reset = (reset / reset.sum(1, keepdim=True)).to(dtype)
    affinity = Dice(2).uniform(37, 129).to(dtype)
    whole = walk(reset, graph, 0.6, affinity, 1e-6)
    for s in range(37):
        assert torch.equal(walk(reset[[s]], graph, 0.6, affinity[[s]], 1e-6), whole[[s]])
    monkeypatch.setattr(pagerank_numba, "INLINE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(walk(reset, graph, 0.6, affinity, 1e-6), whole)


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_the_operator_keeps_torchs_contract() -> None:
    graph, dice = random_graph(5, 2, fill=0.5), Dice(1)
    flipped = graph.transpose()
    left, right, source = (dice.uniform(5, 2).requires_grad_() for _ in range(3))
    buffers = (graph.crow, graph.col, graph.val.clone().requires_grad_(), flipped.crow, flipped.col, flipped.val)
    damping = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    args = (*buffers, left, right, source, damping, 40, "power", "torch")
    torch.library.opcheck(torch.ops.zeromem.walk.default, args)


def test_gradient_stays_small_where_a_query_likes_nothing_or_has_no_reset() -> None:
    """The jump from nothing to something has no slope: it is 0 there, and not 1/0."""
    reset, affinity = random_reset(2, 9), torch.zeros(2, 9, dtype=torch.float64)
    reset[0] = 0
    reset, affinity = reset.requires_grad_(), affinity.requires_grad_()
    for grad in torch.autograd.grad(walk(reset, random_graph(9, 2), 0.6, affinity).pow(2).sum(), (reset, affinity)):
        assert float(grad[1].abs().max()) < 10
        assert bool(grad.isfinite().all())
