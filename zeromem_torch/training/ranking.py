"""Retrieval with its weights as parameters (paper Eqs. 7-15): the pipeline's own modules, differentiable end to end."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.bank import segment_minmax
from zeromem_torch.config import SignalWeights, ZeroMemConfig
from zeromem_torch.errors import ZeroMemError, nearest
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.retrieval.hierarchy import SignalMix
from zeromem_torch.routing.features import Asked, gathered
from zeromem_torch.routing.router import LearnedRouter
from zeromem_torch.training.cache import Cached
from zeromem_torch.training.gates import gate_episodes

NAMES = tuple(f.name for f in dataclasses.fields(SignalWeights))
POSITIVE = ("sharpness", "affinity", "graph_contrast", "hierarchy_contrast")  # value e^theta
SHARES = ("damping", "decay", "named")  # sigma(logit(value) + theta)
MIXES = ("prior", "exact", "hierarchy", "calibration")
ROUTES = ("rho", "route", "level", "bonus", "mix", "walk")  # of the router
LEARNABLE = (*MIXES, *POSITIVE, *SHARES, *ROUTES)
IN_WALK = {"prior", "exact", "sharpness", "affinity", "damping", "decay", "named", "mix", "walk"}


@dataclass(frozen=True)
class Scores:
    fused: Float[Tensor, "slots units"]  # what M(q) ranks by
    ranked: Float[Tensor, "slots units"]  # what R(q) ranks by


class Ranking(nn.Module):
    """A pipeline whose ``learn``-ed parts have a gradient; `pipeline` gives what was learned back as one.

    Mixes cover every signal, those of weight 0 too. Selection stays hard: closure supports the units around the best
    five as they are, and passes no gradient. Without a part inside the walk, the graph view is the cached one.
    """

    def __init__(self, config: ZeroMemConfig, router: LearnedRouter, learn: Sequence[str]) -> None:
        super().__init__()
        plain = dataclasses.replace(config, compute=dataclasses.replace(config.compute, backend="torch"))
        self.base = config
        self.inner = ZeroMemPipeline(plain)
        self.inner.router = self.router = router
        own = {
            "prior": config.graph.prior,
            "exact": config.graph.exact,
            "hierarchy": config.hierarchy.weights,
            "calibration": config.calibration.weights,
        }
        mixes = {name: _whole_mix(weights) for name, weights in own.items()}
        self.mixes = nn.ModuleDict(mixes)
        self.inner.graph.prior, self.inner.graph.exact = mixes["prior"], mixes["exact"]
        self.inner.hierarchy.mix = mixes["hierarchy"]
        graph, fusion = config.graph, config.fusion
        self.start = {name: getattr(graph, name) for name in ("sharpness", "affinity", *SHARES)}
        self.start |= {name: getattr(fusion, name) for name in ("graph_contrast", "hierarchy_contrast")}
        self.theta = nn.ParameterDict({name: nn.Parameter(torch.zeros(()), requires_grad=False) for name in self.start})
        self.gate = 0.0  # temperature of soft pruning, where the configuration prunes; 0 = hard
        self.learn(learn)

    def learn(self, names: Sequence[str]) -> None:
        """Of what can be learned, let just these have a gradient."""
        for name in names:
            if name not in LEARNABLE:
                expected = f"some of {', '.join(LEARNABLE)}"
                raise ZeroMemError.of("learn", expected, name, f"{nearest(name, LEARNABLE)}choose among these")
        self.learned = tuple(names)
        for part in self.parameters():
            part.requires_grad_(False)
        for name in names:
            if name in self.mixes:
                self.mixes[name].requires_grad_(True)
            elif name in self.theta:
                self.theta[name].requires_grad_(True)
            else:
                getattr(self.router, name).requires_grad_(True)
        weights = [part.detach().clone() for part in self.learning()]
        self.anchor = weights

    def learning(self) -> list[nn.Parameter]:
        return [part for part in self.parameters() if part.requires_grad]

    def away(self) -> Tensor:
        """How far the weights are from where they started, squared."""
        parts = [(part - start).square().sum() for part, start in zip(self.learning(), self.anchor, strict=True)]
        return torch.stack(parts).sum() if parts else torch.zeros(())

    def value(self, name: str) -> Tensor | float:
        theta, start = self.theta[name], self.start[name]
        if not theta.requires_grad and not float(theta.detach()):
            return float(start)  # to the bit
        if name in POSITIVE:
            found: Tensor = start * theta.exp()
            return found
        return torch.sigmoid(torch.logit(torch.as_tensor(start, dtype=theta.dtype), eps=1e-4) + theta)

    @property
    def walks(self) -> bool:
        """Whether the graph view differs from the cached one."""
        moved = any(float(self.theta[name].detach()) for name in ("sharpness", "affinity", *SHARES))
        inside = [part for name in ("prior", "exact") for part in self.mixes[name].parameters()]
        changed = any(not torch.equal(part, start) for part, start in zip(inside, self._inside, strict=True))
        return bool(IN_WALK & set(self.learned)) or moved or changed or bool(self.router.mix_names or self.router.walks)

    @property
    def _inside(self) -> list[Tensor]:
        weights = [self.base.graph.prior.to_dict(), self.base.graph.exact.to_dict()]
        return [torch.tensor(float(own[name])) for own in weights for name in NAMES]

    def forward(self, own: Cached) -> Scores:
        units, inner = own.bank.axes["units"], self.inner
        values = {name: self.value(name) for name in self.start}
        view, fusion = inner.graph, inner.fusion
        for name in ("sharpness", "affinity", "named"):
            setattr(view, name, values[name])
        for name in ("graph_contrast", "hierarchy_contrast"):
            setattr(fusion, name, values[name])
        asked = Asked(own.batch, own.bank, own.signals)
        weighed = self.router.weighed(asked, values["damping"], values["decay"])
        if self.walks:
            damping = values["damping"] if weighed.damping is None else weighed.damping
            decay = values["decay"] if weighed.decay is None else weighed.decay
            rates = [torch.as_tensor(rate) for rate in (damping, decay)]
            graph = segment_minmax(view(weighed.batch, own.bank, weighed.signals, *rates).units, units)
        else:
            graph = own.graph
        scores = inner.hierarchy(weighed.signals)
        keep = self.base.hierarchy.keep_episodes
        if keep and self.gate:
            scores = gate_episodes(scores, own.bank, keep, self.gate)
        hierarchy = segment_minmax(scores, units)
        asked = dataclasses.replace(asked, graph=graph, hierarchy=hierarchy)
        fused, main = fusion.best(
            graph, hierarchy, self.router(asked), units, self.base.calibration.top_k, bonus=self.router.added(asked)
        )
        with torch.no_grad():
            support = inner.closure(fused.detach(), main, own.bank)
        supported = fused + support.neighbour + support.graph
        return Scores(fused, supported + self.mixes["calibration"](own.signals))

    @torch.no_grad()
    def standardise(self, questions: Sequence[Cached]) -> None:
        """Bring the router's features to mean 0 and deviation 1 of these questions, with the weights as they are."""
        found = []
        for own in questions:
            units = own.bank.axes["units"]
            hierarchy = segment_minmax(self.inner.hierarchy(own.signals), units)
            asked = Asked(own.batch, own.bank, own.signals, own.graph, hierarchy)
            found.append(gathered(self.router.features, asked)[own.batch.filled])
        self.router.standardise(torch.cat(found))

    @torch.no_grad()
    def config(self) -> ZeroMemConfig:
        """The configuration with what was learned of it in place of what it had."""
        mixes = {
            name: SignalWeights(**{key: _number(part) for key, part in mix.weights.items()})  # type: ignore[union-attr,operator]
            for name, mix in self.mixes.items()
        }
        values = {name: float(self.value(name)) for name in self.start}
        graph: dict[str, Any] = {name: values[name] for name in ("sharpness", "affinity", *SHARES)}
        fusion = {name: values[name] for name in ("graph_contrast", "hierarchy_contrast")}
        base = self.base
        return dataclasses.replace(
            base,
            routing=dataclasses.replace(base.routing, rho=min(1.0, max(0.0, _number(self.router.rho)))),
            graph=dataclasses.replace(base.graph, prior=mixes["prior"], exact=mixes["exact"], **graph),
            hierarchy=dataclasses.replace(base.hierarchy, weights=mixes["hierarchy"]),
            fusion=dataclasses.replace(base.fusion, **fusion),
            calibration=dataclasses.replace(base.calibration, weights=mixes["calibration"]),
        )

    def pipeline(self) -> ZeroMemPipeline:
        """What was learned, as retrieval uses it: hard, on any back end, to be saved and loaded."""
        made = ZeroMemPipeline(self.config())
        made.router = type(self.router)(**{**self.router.spec, "rho": made.config.routing.rho, "temperature": 0.0})
        state = {name: value for name, value in self.router.state_dict().items() if name != "rho"}
        made.router.load_state_dict(state, strict=False)
        return made.eval()


def _whole_mix(weights: SignalWeights) -> SignalMix:
    """With a parameter for each signal: a mix leaves out those of weight 0."""
    mix = SignalMix({})
    mix.weights = nn.ParameterDict(
        {name: nn.Parameter(torch.tensor(float(w)), requires_grad=False) for name, w in weights.to_dict().items()}
    )
    return mix


def _number(part: Tensor) -> float:
    """As short as its precision: a weight that was not learned is what it was."""
    return float(f"{float(part):.7g}")
