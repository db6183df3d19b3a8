"""Evidence calibration (paper Eq. 15): rank the closed set once more, and cut it to what is handed over."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.retrieval.signals import Signals


class EvidenceCalibration(nn.Module):
    """Rank the closed set C(q) by

        score(u) + sum_k w_k signal_k(u)

    over signals of the profile and of context. The views know them too; here they weigh once more, against what closure
    brought in and in the long tail that a token budget reaches. The filter by provenance and boundary is structural: a
    unit is one trace, and one of another boundary has no row in the query's segment.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, scores: Float[Tensor, "slots units"], signals: Signals) -> Float[Tensor, "slots units"]:
        for name, weight in self.weights.items():
            if weight:
                scores = scores + weight * signals[name]
        return scores


def within_budget(
    rows: Int[Tensor, "slots memories k"], tokens: Int[Tensor, " units"], budget: int
) -> Int[Tensor, "slots memories k"]:
    """Ranked units that fit a budget of tokens; one that does not is skipped and the fill goes on (-1 = skipped)."""
    cost = torch.cat([tokens, tokens.new_zeros(1)])[rows]  # row -1 is the last one, and costs nothing
    left = rows.new_full(rows.shape[:-1], budget)
    kept = torch.zeros_like(rows, dtype=torch.bool)
    for rank in range(rows.shape[-1]):  # over ranks, for all queries at once
        fits = (rows[..., rank] >= 0) & (cost[..., rank] <= left)
        kept[..., rank] = fits
        left = left - torch.where(fits, cost[..., rank], 0)
    return torch.where(kept, rows, -1)
