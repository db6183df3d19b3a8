"""The learned router: the rule to the bit before it is trained, the step in the limit, and each query by itself."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from builders import bank_of, lay_out, query, sample
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing import assert_close

from zeromem_torch.bank import MemoryBank
from zeromem_torch.config import ComputeConfig, ZeroMemConfig
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.routing.features import DEFAULT, FEATURES, Asked, gathered
from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.routing.router import ACTIVATION, LearnedRouter, RuleRouter, made
from zeromem_torch.substrate.traces import ZeroMemError
from zeromem_torch.training.settings import TrainingSettings

PLAIN = ZeroMemConfig(compute=ComputeConfig(backend="torch"))


def toy(memories: int = 2, slots: int = 3) -> tuple[QueryBatch, MemoryBank]:
    stored = [sample(seed, (9, 4, 17)[seed % 3]) for seed in range(memories)]
    asked = [[query(10 * m + s, one) for s in range(slots)] for m, one in enumerate(stored)]
    return lay_out(asked, bank_of(stored)), bank_of(stored)


def pipeline_with(router: LearnedRouter, config: ZeroMemConfig = PLAIN) -> ZeroMemPipeline:
    pipeline = ZeroMemPipeline(config).double()
    pipeline.router = router.double()
    return pipeline


@torch.no_grad()
def test_an_untrained_router_changes_no_bit_of_the_default() -> None:
    batch, bank = toy()
    rule = ZeroMemPipeline(PLAIN).double()
    views, chosen = rule(batch, bank, 5, 20)
    learned = LearnedRouter(bonus=("date", "phrase"), mixes=("maxsim_turn", ACTIVATION))
    found, selected = pipeline_with(learned)(batch, bank, 5, 20)
    for name in ("graph", "hierarchy", "graph_weight"):
        assert torch.equal(getattr(found, name), getattr(views, name)), name
    for name in ("fused", "ranked", "main", "closed", "result"):
        assert torch.equal(getattr(selected, name), getattr(chosen, name)), name


@torch.no_grad()
def test_with_walks_of_its_own_an_untrained_router_finds_the_same() -> None:
    batch, bank = toy()
    _, chosen = ZeroMemPipeline(PLAIN).double()(batch, bank, 5, 20)
    _, selected = pipeline_with(LearnedRouter(walk=True))(batch, bank, 5, 20)
    assert_close(selected.fused, chosen.fused, rtol=0, atol=1e-6)  # the walk is computed within 1e-6
    assert torch.equal(selected.main, chosen.main)


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_soft_tends_to_hard(rho: float) -> None:
    batch, _ = toy(1)
    strengths = torch.tensor([[0.0], [0.5], [-0.5]], dtype=torch.float64)  # a query that suggests neither, among them
    batch = dataclasses.replace(batch, relational=1 + strengths, local=torch.ones_like(strengths))
    hard = RuleRouter(rho).rule(batch)
    assert torch.equal(LearnedRouter(rho).rule(batch), hard)
    away = [float((LearnedRouter(rho, temperature=t).rule(batch) - hard).abs().max()) for t in (1.0, 0.1, 0.01, 1e-3)]
    assert away == sorted(away, reverse=True)
    assert away[-1] < 1e-9


def test_soft_passes_a_gradient() -> None:
    batch, _ = toy(1)
    strength = torch.tensor([[0.3], [-0.2], [0.0]], dtype=torch.float64, requires_grad=True)
    router = LearnedRouter(temperature=0.5).double()

    def weight(strength: Tensor) -> Tensor:
        return router.rule(dataclasses.replace(batch, relational=strength, local=torch.zeros_like(strength)))

    assert gradcheck(weight, strength)
    assert gradgradcheck(weight, strength)


def trained(seed: int = 0, **how: object) -> LearnedRouter:
    router = LearnedRouter(**how)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(seed)
    for part in (router.route, router.level, router.bonus, router.mix, router.walk):
        part.data = 0.3 * torch.randn(part.shape, generator=draw)
    return router


@torch.no_grad()
def test_a_query_alone_is_as_in_a_batch() -> None:
    stored = [sample(1, 9), sample(2, 6)]
    asked = [[query(1, stored[0]), query(2, stored[0])], [query(3, stored[1])]]
    router = trained(bonus=("date", "phrase"), mixes=("maxsim_turn", ACTIVATION), walk=True)
    pipeline = pipeline_with(router)
    pipeline.graph.walk.tolerance = 1e-12  # a root of the mass makes more of what a walk leaves out
    bank = bank_of(stored)
    together, _ = pipeline(lay_out(asked, bank), bank, 5)
    assert bool(((together.graph_weight > 0) & (together.graph_weight < 1)).all())
    for m, own in enumerate(asked):
        for s, one in enumerate(own):
            alone_bank = bank_of([stored[m]])
            alone, _ = pipeline(lay_out([[one]], alone_bank), alone_bank, 5)
            units = slice(*bank.axes["units"].ptr[m : m + 2])
            assert_close(together.graph_weight[s, m], alone.graph_weight[0, 0], rtol=0, atol=1e-5)
            assert together.bonus is not None
            assert alone.bonus is not None
            assert_close(together.bonus[s, units], alone.bonus[0], rtol=0, atol=1e-5)
            assert_close(together.graph[s, units], alone.graph[0], rtol=0, atol=1e-5)


def test_gamma_of_each_query_is_the_gamma_of_a_walk_for_it_alone() -> None:
    batch, bank = toy(1, 3)
    view = ZeroMemPipeline(PLAIN).double()
    signals = view.signals(batch, bank)
    gammas = torch.tensor([[0.2], [0.6], [0.85]], dtype=torch.float64)
    decays = torch.tensor([[0.1], [0.2], [0.5]], dtype=torch.float64)
    together = view.graph(batch, bank, signals, gammas, decays)
    for s in range(3):
        alone = view.graph(batch, bank, signals, gammas[s, 0], decays[s, 0])
        assert_close(together.units[s], alone.units[s], rtol=0, atol=1e-5)
        assert_close(together.entities[s], alone.entities[s])


def test_gradients_of_the_route_and_of_the_bonus() -> None:
    batch, bank = toy(2, 2)
    pipeline = ZeroMemPipeline(PLAIN).double()
    views = pipeline.views(batch, bank)
    router = trained(features=("relational", "kinds", "graph_gap"), bonus=("date", "maxsim_turn")).double()
    asked = Asked(batch, bank, views.signals, views.graph, views.hierarchy)
    route, bonus = (part.detach().clone().requires_grad_() for part in (router.route, router.bonus))

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = router

        def forward(self) -> Tensor:
            added = self.router.added(asked)
            assert added is not None
            return torch.cat([self.router(asked).flatten(), added.flatten()])

    both = Both()

    def of(route: Tensor, bonus: Tensor) -> Tensor:
        found: Tensor = functional_call(both, {"router.route": route, "router.bonus": bonus}, ())
        return found

    assert gradcheck(of, (route, bonus))
    assert gradgradcheck(of, (route, bonus))


def test_a_router_is_saved_and_loaded(tmp_path: Path) -> None:
    batch, bank = toy()
    pipeline = ZeroMemPipeline(PLAIN)
    pipeline.router = trained(bonus=("date",), mixes=("phrase",), walk=True, features=("relational", "kinds"))
    pipeline.save_pretrained(tmp_path)
    again = ZeroMemPipeline.from_pretrained(tmp_path)
    assert isinstance(again.router, LearnedRouter)
    assert again.router.spec == pipeline.router.spec
    for one, other in zip(pipeline.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(again.double()(batch, bank, 5)[1].fused, pipeline.double()(batch, bank, 5)[1].fused)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["routing"]["router"] == "learned"
    assert again.config.routing.router == "learned"
    config["routing"]["router"] = "rule"  # as it was written once
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ZeroMemPipeline.from_pretrained(tmp_path).config == again.config
    as_text = ZeroMemPipeline.from_text(pipeline.to_text())
    assert as_text.config == again.config
    for one, other in zip(pipeline.parameters(), as_text.parameters(), strict=True):
        assert torch.equal(one, other)
    (tmp_path / "router.json").write_text('{"kind": "learnt"}')
    with pytest.raises(ZeroMemError, match=r"router: expected one of .*learned.*did you mean 'learned'"):
        ZeroMemPipeline.from_pretrained(tmp_path)


def test_every_feature_is_a_number_for_every_query() -> None:
    batch, bank = toy(3)
    views = ZeroMemPipeline(PLAIN).double().views(batch, bank)
    asked = Asked(batch, bank, views.signals, views.graph, views.hierarchy)
    for name, feature in FEATURES.items():
        found = feature.of(asked)
        assert found.shape[:2] == batch.query.shape, name
        assert bool(found.isfinite().all()), name
        width = feature.width or batch.vectors.shape[-1]
        assert (found.shape[2] if found.dim() == 3 else 1) == width, name
    assert gathered(DEFAULT, asked).shape == (*batch.query.shape, len(DEFAULT) - 1 + FEATURES["kinds"].width)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ZeroMemError, match=r"features: expected some of .* did you mean 'relational'"):
        LearnedRouter(features=("relatonal",))
    with pytest.raises(ValueError, match="rho must lie in"):
        LearnedRouter(1.5)
    with pytest.raises(ZeroMemError, match="router: expected one of rule, learned"):
        made("ruel", {})
    with pytest.raises(ZeroMemError, match="router: expected one of learned, got 'rule'"):
        TrainingSettings(router="rule")
