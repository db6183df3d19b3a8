"""The temporal hierarchy as a view (paper Eq. 11)."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.bank import MemoryBank, member_mask, segment_max, segment_topk
from zeromem_torch.errors import ZeroMemError, nearest
from zeromem_torch.retrieval.signals import Signals


class SignalMix(nn.Module):
    """A weighted sum of signals; the weights are parameters, frozen until somebody trains them."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(torch.tensor(float(w)), requires_grad=False) for name, w in weights.items() if w}
        )

    def forward(self, signals: Signals) -> Float[Tensor, "slots units"]:
        total = torch.zeros_like(next(iter(signals.values())))
        for name, weight in self.weights.items():
            total = total.addcmul_(weight, signals[name])
        return total


class HierarchyView(nn.Module):
    """Coarse to fine, softly: a unit's score sums what its episode, its best window and the turn itself say,

        score(u) = sum_level sum_signal w signal(level of u) + sum_k w_k compatibility_k(q, u)

    with compatibility by subject, time, answer type and phrase. Nothing is pruned on the way down unless
    `prune_episodes` is asked to: measured, hard pruning costs up to four points.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self.mix = SignalMix(weights)

    def forward(self, signals: Signals) -> Float[Tensor, "slots units"]:
        scores: Tensor = self.mix(signals)
        return scores


VIEWS: dict[str, Callable[[Mapping[str, float]], HierarchyView]] = {"hierarchy": HierarchyView}
"""What can stand in the hierarchy's place, by the name that a configuration calls it."""


def view_of(name: str, weights: Mapping[str, float]) -> HierarchyView:
    if name not in VIEWS:
        advice = f"{nearest(name, VIEWS)}register it in retrieval.hierarchy.VIEWS"
        raise ZeroMemError.of("hierarchy view", f"one of {', '.join(VIEWS)}", name, advice)
    return VIEWS[name](weights)


def prune_episodes(scores: Float[Tensor, "slots units"], bank: MemoryBank, keep: int) -> Float[Tensor, "slots units"]:
    """Coarse to fine, hard: units of the ``keep`` best episodes stay, the rest fall to their memory's lowest score.

    An episode is as good as its best unit; equal ones go by their order.
    """
    units, episodes = bank.axes["units"], bank.axes["episodes"]
    best = segment_topk(segment_max(scores, bank.unit_episode, episodes.size), episodes, keep)
    kept = member_mask(best, episodes.size).index_select(1, bank.unit_episode)
    lowest = -segment_max(-scores, units.segment, units.segments)
    return torch.where(kept, scores, units.spread(lowest))
