"""Routing (paper Eq. 7): is the answer reached through entities, or does it stand in one place?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.errors import ZeroMemError, nearest
from zeromem_torch.routing.features import DEFAULT, FEATURES, Asked, checked, gathered, width_of
from zeromem_torch.routing.queries import QueryBatch

RELATIONAL, LOCAL = "relational", "local"

Signals = Mapping[str, Float[Tensor, "slots units"]]


@dataclass(frozen=True)
class Weighed:
    """What the views are to work with for each query; None is what the view has itself."""

    batch: QueryBatch
    signals: Signals
    damping: Float[Tensor, "slots memories"] | None = None
    decay: Float[Tensor, "slots memories"] | None = None


class RuleRouter(nn.Module):
    """The graph view is primary where the question's form suggests more hops than places, else the hierarchy.

    Returns the graph's weight per query: ``rho`` on the relational route, ``1 - rho`` on the local one. Every router is
    one of these: it can also change what the views work with, and add to what is fused.
    """

    kind = "rule"

    def __init__(self, rho: float = 0.6) -> None:
        super().__init__()
        if not 0 <= rho <= 1:
            raise ValueError(f"rho must lie in [0, 1], got {rho}")
        self.rho = nn.Parameter(torch.tensor(float(rho)), requires_grad=False)

    @property
    def spec(self) -> dict[str, Any]:
        """What `made` makes it from again."""
        return {"rho": float(self.rho)}

    @property
    def encoder_dim(self) -> int | None:
        """Dimension of the vectors that it works with; None where any will do."""
        return None

    def rule(self, batch: QueryBatch) -> Float[Tensor, "slots memories"]:
        return torch.where(batch.relational > batch.local, self.rho, 1 - self.rho)

    def forward(self, asked: Asked) -> Float[Tensor, "slots memories"]:
        return self.rule(asked.batch)

    def added(self, asked: Asked) -> Float[Tensor, "slots units"] | None:
        """A bonus of each unit on the fused score; None without one."""
        return None

    def weighed(self, asked: Asked, damping: Tensor | float, decay: Tensor | float) -> Weighed:
        """Signals and activation as the views get them, and gamma and hop decay where a query has its own."""
        return Weighed(asked.batch, asked.signals)


class LearnedRouter(RuleRouter):
    """The rule, and linear functions of the query's features f beside it, all of them 0 until somebody trains them:

        graph weight   sigma(logit(rule) + r . f)
        bonus(u)       sum_k (level + B f)_k signal_k(u), added to the fused score
        scale_k        exp((m + M f)_k) of a signal inside both views, and of the activation of Eq. 8
        gamma, decay   sigma(logit(own) + (d + D f)), per query

    so that the rule router is its initial point, to the bit. The rule is a step in ``relational - local``; with a
    ``temperature`` T it is the soft ``sigma((x - sqrt(T)) / T)``, which passes a gradient and tends to the step, at 0
    too, as T does. Only the graph weight is always there: ``bonus`` and ``mixes`` name signals, ``walk`` asks for the
    last line. Features are brought to mean 0 and deviation 1 of the training questions.
    """

    kind = "learned"

    def __init__(
        self,
        rho: float = 0.6,
        *,
        features: Sequence[str] = DEFAULT,
        bonus: Sequence[str] = (),
        mixes: Sequence[str] = (),
        walk: bool = False,
        dim: int = 0,
        temperature: float = 0.0,
    ) -> None:
        super().__init__(rho)
        self.features = checked(features)
        self.early = tuple(name for name in self.features if FEATURES[name].stage == "query")
        self.bonus_names, self.mix_names, self.walks, self.dim = tuple(bonus), tuple(mixes), walk, dim
        self.temperature = temperature
        width, early = width_of(self.features, dim), width_of(self.early, dim)
        self.route = _zeros(1 + width)
        self.level = _zeros(len(self.bonus_names))
        self.bonus = _zeros(width, len(self.bonus_names))
        self.mix = _zeros(1 + early, len(self.mix_names))
        self.walk = _zeros(1 + early, 2 if walk else 0)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))
        self.mean: Tensor
        self.deviation: Tensor

    @property
    def spec(self) -> dict[str, Any]:
        return {
            **super().spec,
            "features": list(self.features),
            "bonus": list(self.bonus_names),
            "mixes": list(self.mix_names),
            "walk": self.walks,
            "dim": self.dim,
            "temperature": self.temperature,
        }

    @property
    def encoder_dim(self) -> int | None:
        return self.dim if any(not FEATURES[name].width for name in self.features) else None

    def standardise(self, features: Float[Tensor, "queries width"]) -> None:
        """Take mean and deviation from these; a feature that never varies keeps its scale."""
        if not features.shape[1]:
            return
        deviation = features.std(0, correction=0)
        self.mean.copy_(features.mean(0))
        self.deviation.copy_(torch.where(deviation > 1e-6, deviation, 1))

    def described(self, asked: Asked) -> Float[Tensor, "slots memories width"]:
        return (gathered(self.features, asked) - self.mean) / self.deviation

    def rule(self, batch: QueryBatch) -> Float[Tensor, "slots memories"]:
        if not self.temperature:
            return super().rule(batch)
        margin = batch.relational - batch.local
        gate = torch.sigmoid((margin - self.temperature**0.5) / self.temperature)
        return gate * self.rho + (1 - gate) * (1 - self.rho)

    def forward(self, asked: Asked) -> Float[Tensor, "slots memories"]:
        return _moved(self.rule(asked.batch), _linear(self.described(asked), self.route[:, None])[..., 0])

    def added(self, asked: Asked) -> Float[Tensor, "slots units"] | None:
        if not self.bonus_names:
            return None
        weights = _linear(self.described(asked), torch.cat([self.level[None], self.bonus]))
        units = asked.bank.axes["units"]
        total = torch.zeros_like(asked.signals[self.bonus_names[0]])
        for k, name in enumerate(self.bonus_names):
            total = total + units.spread(weights[..., k]) * asked.signals[name]
        return total

    def weighed(self, asked: Asked, damping: Tensor | float, decay: Tensor | float) -> Weighed:
        batch, signals = asked.batch, asked.signals
        if not self.mix_names and not self.walks:
            return super().weighed(asked, damping, decay)
        own = gathered(self.early, asked)
        columns = _columns(self.features, self.dim)
        kept = [column for name in self.early for column in columns[name]]
        features = (own - self.mean[kept]) / self.deviation[kept]
        scales = _linear(features, self.mix).exp()
        units = asked.bank.axes["units"]
        scaled = dict(signals)
        for k, name in enumerate(self.mix_names):
            if name == ACTIVATION:
                named = batch.entities
                memory = asked.bank.axes["entities"].segment[named.row]
                weight = named.weight * scales[named.slot, memory, k]
                batch = replace(batch, entities=replace(named, weight=weight))
            else:
                scaled[name] = signals[name] * units.spread(scales[..., k])
        if not self.walks:
            return Weighed(batch, scaled)
        moved = _linear(features, self.walk)
        like = moved[..., 0]
        return Weighed(
            batch,
            scaled,
            _moved(torch.as_tensor(damping).to(like).expand_as(like), like),
            _moved(torch.as_tensor(decay).to(like).expand_as(like), moved[..., 1]),
        )


ACTIVATION = "activation"
"""Name, among a router's mixes, of the activation with which the query's entities start."""

ROUTERS: dict[str, type[RuleRouter]] = {router.kind: router for router in (RuleRouter, LearnedRouter)}
"""Routers by the name that a configuration and a checkpoint call them."""


def made(kind: str, spec: Mapping[str, Any]) -> RuleRouter:
    if kind not in ROUTERS:
        advice = f"{nearest(kind, ROUTERS)}register it in routing.router.ROUTERS"
        raise ZeroMemError.of("router", f"one of {', '.join(ROUTERS)}", kind, advice)
    return ROUTERS[kind](**spec)


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


def _linear(features: Float[Tensor, "slots memories width"], weights: Float[Tensor, "rows out"]) -> Tensor:
    """With a constant first."""
    return features.to(weights.dtype) @ weights[1:] + weights[0]


def _columns(names: Sequence[str], dim: int) -> dict[str, range]:
    """The columns of each feature."""
    found, start = dict[str, range](), 0
    for name in names:
        width = FEATURES[name].width or dim
        found[name] = range(start, start + width)
        start += width
    return found


def _moved(base: Tensor, by: Tensor) -> Tensor:
    """``sigma(logit(base) + by)``, and base to the bit where ``by`` is 0."""
    logit = torch.logit(base, eps=1e-6)
    return base + (torch.sigmoid(logit + by) - torch.sigmoid(logit))
