"""What every back end of the product, of propagation and of PageRank must do, against the loops of `equations`."""

import equations
import torch
from builders import SIZES, Dice
from torch import Tensor
from torch.testing import assert_close

from zeromem_torch.bank import axis_of
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.retrieval.propagation import EntityPropagation
from zeromem_torch.sparse import Csr, multiplier

TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}


def moved(matrix: Csr, device: str, dtype: torch.dtype) -> Csr:
    return Csr(matrix.crow.to(device), matrix.col.to(device), matrix.val.to(device, dtype), matrix.cols)


def random_matrix(rows: int, cols: int, seed: int = 0, *, hub: bool = False) -> Csr:
    """Every third row is empty; with ``hub``, row 1 is full."""
    dice = Dice(seed)
    dense = dice.uniform(rows, cols) * (dice.uniform(rows, cols) < 0.2)
    dense[::3] = 0
    if hub:
        dense[1] = dice.uniform(cols) + 0.1
    row, col = dense.nonzero(as_tuple=True)
    return Csr.from_coo(row, col, dense[row, col], rows, cols)


def check_product(
    backend: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = SIZES, columns: int = 40
) -> None:
    """Forty columns are a whole tile and a part of one."""
    for rows in sizes:
        for cols in sizes:
            matrix = moved(random_matrix(rows, cols), device, dtype)
            dense = Dice(1).uniform(cols, columns).to(device, dtype)
            found = matrix.times(dense, backend)
            expected = equations.product(matrix.to_dense().tolist(), dense.tolist(), columns)
            assert_close(found.cpu().double(), _rows(expected, columns), rtol=0, atol=20 * TOLERANCES[dtype])


def check_step(backend: str, device: str, dtype: torch.dtype) -> None:
    """With a scaling and a sum, and rows that are longer than any program takes on."""
    matrix = moved(random_matrix(4, 1500, hub=True), device, dtype)
    dice = Dice(1)
    dense, scale, plus = (dice.uniform(n, 3).to(device, dtype) for n in (1500, 4, 4))
    product = torch.tensor(equations.product(matrix.to_dense().tolist(), dense.tolist(), 3), dtype=torch.float64)
    found = multiplier(matrix, backend)(dense, scale, plus)
    expected = plus.cpu().double() + scale.cpu().double() * product
    assert_close(found.cpu().double(), expected, rtol=20 * TOLERANCES[dtype], atol=0)
    again = multiplier(matrix, backend)(dense, scale, plus)
    assert torch.equal(found, again)


def check_pagerank(
    backend: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = (7, 0, 129, 1), tolerance: float = 1e-6
) -> None:
    """Two queries of each of several memories, one with an affinity of nothing here and there, one unfilled."""
    dice = Dice(3)
    nodes = axis_of(sizes, device)
    total = nodes.size
    dense = torch.zeros(total, total, dtype=torch.float64)
    reset, affinity = torch.zeros(2, total, dtype=torch.float64), dice.uniform(2, total)
    affinity[1, ::3] = 0
    for m, size in enumerate(sizes):
        own = slice(nodes.ptr[m], nodes.ptr[m + 1])
        edges = dice.uniform(size, size) * (dice.uniform(size, size) < max(0.1, 4 / max(size, 1)))
        edges[3::4] = 0
        edges[:, :1] += 0.01  # a hub
        dense[own, own] = edges
        mass = dice.uniform(2, size) * (dice.uniform(2, size) < 0.5)
        mass[1] *= m != 2
        reset[:, own] = mass / mass.sum(1, keepdim=True).clamp(min=1e-30)
    row, col = dense.nonzero(as_tuple=True)
    graph = moved(Csr.from_coo(row, col, dense[row, col], total, total), device, dtype)
    for liked in (None, affinity):
        given = None if liked is None else liked.to(device, dtype)
        walk = PersonalizedPageRank(0.6, tolerance, backend=backend)
        found = walk(reset.to(device, dtype), graph, graph.transpose(), nodes, given).cpu().double()
        for m in range(len(sizes)):
            own = slice(nodes.ptr[m], nodes.ptr[m + 1])
            for s in range(2):
                steps = equations.transition(
                    dense[own, own].tolist(), None if liked is None else liked[s, own].tolist()
                )
                expected = torch.tensor(equations.pagerank(reset[s, own].tolist(), steps, 0.6), dtype=torch.float64)
                assert float((found[s, own] - expected).abs().sum()) <= tolerance + 10 * TOLERANCES[dtype]


def check_propagation(backend: str, device: str, dtype: torch.dtype, sizes: tuple[int, int] = (129, 40)) -> None:
    sentences, entities = sizes
    dice = Dice(5)
    named = dice.uniform(sentences, entities) < 0.1
    row, col = named.nonzero(as_tuple=True)
    mentions = moved(Csr.from_coo(row, col, torch.ones(len(row)), sentences, entities), device, dtype)
    seeds = dice.uniform(3, entities) * (dice.uniform(3, entities) < 0.2)
    seeds[2] = 0
    similarity = dice.uniform(3, sentences) * 2 - 1
    spread = EntityPropagation(2, 0.5, backend=backend)
    found = spread(
        seeds.to(device, dtype),
        similarity.to(device, dtype),
        mentions,
        mentions.transpose(),
        axis_of([entities], device),
    )
    held = [set(line.nonzero()[:, 0].tolist()) for line in named]
    expected = [
        equations.propagation(seed, near, held, hops=2, decay=0.5)
        for seed, near in zip(seeds.tolist(), similarity.tolist(), strict=True)
    ]
    assert_close(found.cpu().double(), _rows(expected, entities), rtol=0, atol=20 * TOLERANCES[dtype])


def check_gradient(backend: str, device: str, dtype: torch.dtype = torch.float64) -> None:
    """To everything the walk depends on: as PyTorch's, which `test_pagerank` holds against differences."""
    matrix, dice = random_matrix(6, 6, 2, hub=True), Dice(4)
    reset, weight = dice.uniform(2, 6), dice.uniform(2, 6)
    reset, affinity = reset / reset.sum(1, keepdim=True), dice.uniform(2, 6) + 0.2
    gradients = []
    for name, place in (("torch", "cpu"), (backend, device)):
        given = [part.detach().to(place, dtype).requires_grad_() for part in (reset, matrix.val, affinity)]
        edges = Csr(matrix.crow.to(place), matrix.col.to(place), given[1], 6)
        walk = PersonalizedPageRank(0.3, 1e-2, backend=name)
        found = walk(given[0], edges, edges.transpose(), axis_of([6], place), given[2])
        gradients.append([grad.cpu() for grad in torch.autograd.grad((found * weight.to(place, dtype)).sum(), given)])
    assert_close(gradients[1], gradients[0], rtol=0, atol=10 * TOLERANCES[dtype])


def _rows(rows: list[list[float]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), columns)
