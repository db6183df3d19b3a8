"""Dense scores: one vector a unit, or late interaction over token states (MaxSim)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.bank import Axis, segment_max


class DenseScores(nn.Module):
    """Cosine of each query with each row of its memory: one matrix product a memory.

    Vectors have unit length. A row that belongs to no query's memory in a slot still gets a score; empty slots are the
    caller's to mask.
    """

    def forward(
        self, queries: Float[Tensor, "slots memories dim"], vectors: Float[Tensor, "rows dim"], axis: Axis
    ) -> Float[Tensor, "slots rows"]:
        bounds = zip(axis.ptr, axis.ptr[1:], strict=False)
        scores = [queries[:, m] @ vectors[a:b].to(queries.dtype).T for m, (a, b) in enumerate(bounds)]
        return torch.cat(scores, dim=1) if scores else queries.new_zeros(queries.shape[0], 0)


class MaxSim(nn.Module):
    """Late interaction: per query token the best token of the unit, weighted and summed.

        score(q, d) = sum_i w_i max_j <q_i, d_j> / sum_i w_i

    in two steps, so that windows come for free: `forward` gives the best match of each query token in each unit, and
    `combine` weighs and sums them, over units or over groups of units. A unit without tokens matches nothing (0).
    ``workspace`` bounds the bytes of the token x token similarities held at once.
    """

    def __init__(self, workspace: int = 1 << 28) -> None:
        super().__init__()
        self.workspace = workspace

    def forward(
        self,
        queries: Float[Tensor, "slots memories query_tokens dim"],
        states: Float[Tensor, "tokens dim"],
        tokens: Axis,
        token_unit: Int[Tensor, " tokens"],
        units: Axis,
    ) -> Float[Tensor, "slots query_tokens units"]:
        slots, _, query_tokens, _ = queries.shape
        best = queries.new_full((slots, query_tokens, units.size), -torch.inf)
        for m, (a, b) in enumerate(zip(tokens.ptr, tokens.ptr[1:], strict=False)):
            first, last = units.ptr[m], units.ptr[m + 1]
            own = states[a:b].to(queries.dtype)
            rows = max(1, self.workspace // max(1, 4 * query_tokens * (b - a)))
            for s in range(0, slots, rows):
                part = queries[s : s + rows, m].reshape(-1, own.shape[1])
                held = segment_max(part @ own.T, token_unit[a:b] - first, last - first)
                best[s : s + rows, :, first:last] = held.view(-1, query_tokens, last - first)
        return best.clamp(min=0)  # opposite directions are no evidence against; empty units match nothing

    def combine(
        self,
        best: Float[Tensor, "slots query_tokens units"],
        weights: Float[Tensor, "slots memories query_tokens"],
        units: Axis,
    ) -> Float[Tensor, "slots units"]:
        share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        return torch.einsum("squ,suq->su", best, share[:, units.segment])
