"""The rule router (Eq. 7)."""

from dataclasses import replace
from types import SimpleNamespace

import equations
import pytest
import torch
from builders import bank_of, lay_out, query, sample
from torch.func import functional_call

from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.routing.router import RuleRouter


def batch_of(strengths: list[tuple[float, float]]) -> QueryBatch:
    one = sample(1, 3)
    asked = [replace(query(1, one), relational=hops, local=place) for hops, place in strengths]
    return lay_out([asked], bank_of([one]))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.6, 1.0])
def test_the_primary_view_weighs_rho(rho: float) -> None:
    strengths = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (2.5, 2.5), (2.5, 2.0), (-1.0, -2.0)]
    weight = RuleRouter(rho).rule(batch_of(strengths))
    expected = [equations.graph_weight(*strength, rho) for strength in strengths]
    assert weight[:, 0].tolist() == pytest.approx(expected)


def test_a_query_that_suggests_neither_is_local() -> None:
    assert RuleRouter(0.75).rule(batch_of([(1.0, 1.0)])).tolist() == [[0.25]]


def test_many_memories_and_none() -> None:
    memories = [sample(1, 3), sample(2, 0), sample(3, 1)]
    bank = bank_of(memories)
    relational = replace(query(1, memories[0]), relational=2.0, local=1.0)
    weight = RuleRouter(0.75).rule(lay_out([[relational], [], [None, relational]], bank))
    assert weight.tolist() == [[0.75, 0.25, 0.25], [0.25, 0.25, 0.75]]
    assert RuleRouter(0.75).rule(lay_out([[], [], []], bank)).shape == (0, 3)


def test_rho_can_be_trained_but_is_frozen() -> None:
    router = RuleRouter(0.6)
    assert not router.rho.requires_grad
    rho = torch.tensor(0.6, requires_grad=True)
    asked = SimpleNamespace(batch=batch_of([(1.0, 0.0), (1.0, 0.0), (0.0, 1.0)]))
    weight = functional_call(router, {"rho": rho}, (asked,))
    (grad,) = torch.autograd.grad(weight.sum(), rho)
    assert float(grad) == 1.0  # two queries take rho, one takes 1 - rho


@pytest.mark.parametrize("rho", [-0.1, 1.1, float("nan")])
def test_rho_outside_its_range_is_refused(rho: float) -> None:
    with pytest.raises(ValueError, match="rho must lie in"):
        RuleRouter(rho)
