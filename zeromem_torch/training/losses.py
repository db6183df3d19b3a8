"""Listwise losses on the scores of a query's units, which cost tokens. A new one is a class here and its name in
`LOSSES`.

Scores lie about one apart at most, so each loss multiplies them first: the larger its ``scale``, the nearer to a rank.
It is not learned: a loss that only grew sharper would look like progress.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from zeromem_torch.errors import ZeroMemError, nearest


class Listwise(nn.Module):
    """Softmax cross-entropy: ``- mean over evidence of ln softmax(scale score)``, evidence spread evenly."""

    def __init__(self, scale: float = 12.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, scores: Float[Tensor, "slots units"], gold: Bool[Tensor, "slots units"], tokens: Int[Tensor, " units"]
    ) -> Float[Tensor, " slots"]:
        wanted = gold.to(scores.dtype)
        return -((self.scale * scores).log_softmax(1) * wanted).sum(1) / wanted.sum(1).clamp(min=1)


class RankNet(nn.Module):
    """``ln(1 + e^(scale (s_u - s_e)))``, mean over evidence e and the ``hardest`` other units u."""

    def __init__(self, hardest: int = 50, scale: float = 12.0) -> None:
        super().__init__()
        self.hardest, self.scale = hardest, scale

    def forward(
        self, scores: Float[Tensor, "slots units"], gold: Bool[Tensor, "slots units"], tokens: Int[Tensor, " units"]
    ) -> Float[Tensor, " slots"]:
        others = scores.masked_fill(gold, -torch.inf).topk(min(self.hardest, scores.shape[1]), dim=1).values
        behind = softplus(self.scale * (others[:, None, :] - scores[..., None])).mean(2)  # of a unit of -inf: 0
        wanted = gold.to(scores.dtype)
        return (behind * wanted).sum(1) / wanted.sum(1).clamp(min=1)


class ApproximateRecall(nn.Module):
    """One minus a soft recall@k: evidence counts by ``sigma(k + 1/2 - rank)``, its rank being

    ``1 + sum over other units of sigma(scale (s_u - s_e))``.
    """

    def __init__(self, k: int = 5, scale: float = 30.0) -> None:
        super().__init__()
        self.k, self.scale = k, scale

    def forward(
        self, scores: Float[Tensor, "slots units"], gold: Bool[Tensor, "slots units"], tokens: Int[Tensor, " units"]
    ) -> Float[Tensor, " slots"]:
        slot, row = gold.nonzero(as_tuple=True)
        above = torch.sigmoid(self.scale * (scores[slot] - scores[slot, row][:, None])).sum(1)
        found = torch.sigmoid(self.k + 1 - above)  # a unit beside itself counts half: rank = 1/2 + above
        return _missed(found, slot, gold)


class ApproximateRecallAtTokens(nn.Module):
    """The same within a budget: with t the mean tokens of a unit, evidence counts by

    ``sigma(1/2 + (budget - tokens of itself and, by sigma(scale (s_u - s_e)), of the other units) / t)``.
    """

    def __init__(self, budget: int = 512, scale: float = 30.0) -> None:
        super().__init__()
        self.budget, self.scale = budget, scale

    def forward(
        self, scores: Float[Tensor, "slots units"], gold: Bool[Tensor, "slots units"], tokens: Int[Tensor, " units"]
    ) -> Float[Tensor, " slots"]:
        slot, row = gold.nonzero(as_tuple=True)
        cost = tokens.to(scores.dtype)
        above = torch.sigmoid(self.scale * (scores[slot] - scores[slot, row][:, None])) @ cost  # half of its own in it
        found = torch.sigmoid(0.5 + (self.budget - above - cost[row] / 2) / cost.mean().clamp(min=1))
        return _missed(found, slot, gold)


def _missed(
    found: Float[Tensor, " evidence"], slot: Int[Tensor, " evidence"], gold: Bool[Tensor, "slots units"]
) -> Float[Tensor, " slots"]:
    """The share of its evidence that a query lacks."""
    total = torch.zeros_like(gold[:, 0], dtype=found.dtype).index_add(0, slot, found)
    return 1 - total / gold.sum(1).clamp(min=1)


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "listwise": Listwise,
    "ranknet": RankNet,
    "recall@5": ApproximateRecall,
    "recall@10": partial(ApproximateRecall, 10),
    "recall@512tok": ApproximateRecallAtTokens,
}


def loss_of(name: str) -> nn.Module:
    if name not in LOSSES:
        advice = f"{nearest(name, LOSSES)}register it in training.losses.LOSSES"
        raise ZeroMemError.of("loss", f"one of {', '.join(LOSSES)}", name, advice)
    return LOSSES[name]()
