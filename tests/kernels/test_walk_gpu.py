"""The walk's back ends on a CUDA device: the same cases as without one, and no wait of the host in a search."""

import pytest
import torch
import walk_cases
from builders import Dice

from zeromem_torch.backends import choose
from zeromem_torch.bank import axis_of
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.substrate.traces import ZeroMemError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["torch", "triton", "torch_sparse"])
def backend(request: pytest.FixtureRequest) -> str:
    return there("spmm", str(request.param))


def there(operator: str, backend: str) -> str:
    try:
        choose(operator, backend, device=torch.device("cuda"), dtype=torch.float32)
    except ZeroMemError as error:
        pytest.skip(str(error))
    return backend


def test_product(backend: str) -> None:
    walk_cases.check_product(backend, "cuda", torch.float32)


def test_step(backend: str) -> None:
    if backend == "torch_sparse":
        pytest.skip("torch-sparse adds a row up in no fixed order on CUDA")
    walk_cases.check_step(backend, "cuda", torch.float32)


def test_pagerank(backend: str) -> None:
    walk_cases.check_pagerank(backend, "cuda", torch.float32)


def test_pagerank_in_one_launch() -> None:
    walk_cases.check_pagerank(there("pagerank", "cupy"), "cuda", torch.float32)


def test_propagation(backend: str) -> None:
    walk_cases.check_propagation(backend, "cuda", torch.float32)


def test_gradient(backend: str) -> None:
    walk_cases.check_gradient(backend, "cuda", torch.float32)


@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_the_host_does_not_wait(backend: str) -> None:
    there("pagerank", backend)
    graph = walk_cases.moved(walk_cases.random_matrix(600, 600, hub=True), "cuda", torch.float32)
    flipped, nodes = graph.transpose(), axis_of([600], "cuda")
    reset = Dice(1).uniform(40, 600).to("cuda", torch.float32)
    walk = PersonalizedPageRank(0.6, backend=backend)
    first = walk(reset, graph, flipped, nodes, reset)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = walk(reset, graph, flipped, nodes, reset)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
