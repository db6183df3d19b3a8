"""Dense scores: one vector a unit, or late interaction over token states (MaxSim)."""

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.bank import Axis


class DenseScores(nn.Module):
    """Cosine of each query with each row of its memory: one matrix product a memory.

    Vectors have unit length. A row that belongs to no query's memory in a slot still gets a score; empty slots are the
    caller's to mask.
    """

    def forward(
        self, queries: Float[Tensor, "slots memories dim"], vectors: Float[Tensor, "rows dim"], axis: Axis
    ) -> Float[Tensor, "slots rows"]:
        scores = [queries[:, m] @ vectors[a:b].to(queries.dtype).T for m, (a, b) in enumerate(pairwise(axis.ptr))]
        return torch.cat(scores, dim=1) if scores else queries.new_zeros(queries.shape[0], 0)


class MaxSim(nn.Module):
    """Late interaction: per query token the best token of the unit, weighted and summed,

        score(q, d) = sum_i w_i max_j <q_i, d_j> / sum_i w_i

    in two steps, so that windows come for free: `forward` finds the best match of each query token in each unit, `combine`
    weighs and sums them, over units or over groups of units. Opposite directions count as no match (0), and so does a unit
    without tokens.

    A memory of at most ``exhaustive`` units is compared whole, by one matrix product; in a larger one only the given
    candidates are, gathered per query. ``workspace`` bounds the bytes of similarities and gathered states held at once.
    """

    def __init__(self, exhaustive: int = 2048, workspace: int = 1 << 28) -> None:
        super().__init__()
        self.exhaustive = exhaustive
        self.workspace = workspace

    def forward(
        self,
        queries: Float[Tensor, "slots memories query_tokens dim"],
        states: Float[Tensor, "tokens dim"],
        state_ptr: Int[Tensor, "units+1"],
        units: Axis,
        candidates: Int[Tensor, "slots memories k"],  # unit numbers, -1 behind the last
    ) -> Float[Tensor, "units slots query_tokens"]:
        slots, _, query_tokens, _ = queries.shape
        best = queries.new_zeros(units.size, slots, query_tokens)
        for m, (first, last) in enumerate(pairwise(units.ptr)):
            if last - first <= self.exhaustive:
                best[first:last] = self._whole(queries[:, m], states, state_ptr[first : last + 1])
            else:
                self._some(best, queries[:, m], states, state_ptr, candidates[:, m])
        return best

    def _whole(
        self, queries: Float[Tensor, "slots query_tokens dim"], states: Tensor, ptr: Int[Tensor, " own"]
    ) -> Float[Tensor, "own_units slots query_tokens"]:
        slots, query_tokens, dim = queries.shape
        own = states[ptr[0] : ptr[-1]].to(queries.dtype)
        unit = torch.repeat_interleave(torch.arange(len(ptr) - 1, device=ptr.device), ptr.diff())
        best = queries.new_zeros(len(ptr) - 1, slots, query_tokens)
        step = max(1, self.workspace // max(1, 4 * query_tokens * len(own)))
        for part, into in zip(queries.split(step), best.split(step, dim=1), strict=True):
            similar = own @ part.reshape(-1, dim).T
            rows = unit[:, None].expand_as(similar)
            held = similar.new_zeros(len(ptr) - 1, similar.shape[1]).scatter_reduce(0, rows, similar, "amax")
            into.copy_(held.view(-1, len(part), query_tokens))
        return best

    def _some(
        self,
        best: Float[Tensor, "units slots query_tokens"],
        queries: Float[Tensor, "slots query_tokens dim"],
        states: Tensor,
        ptr: Tensor,
        candidates: Int[Tensor, "slots k"],
    ) -> None:
        sizes = torch.where(candidates >= 0, ptr.diff()[candidates.clamp(min=0)], 0)
        widest = max(1, int(sizes.sum(1).max())) if sizes.numel() else 1
        step = max(1, self.workspace // (widest * (queries.shape[2] + queries.shape[1]) * 8))
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            unit, size = candidates[rows].clamp(min=0), sizes[rows]
            slot = torch.repeat_interleave(torch.arange(len(unit), device=unit.device), size.sum(1))
            each = torch.repeat_interleave(unit.flatten(), size.flatten())
            ends = size.flatten().cumsum(0)
            rank = torch.arange(each.numel(), device=unit.device)
            token = rank + torch.repeat_interleave(ptr[unit].flatten() - ends + size.flatten(), size.flatten())
            column = rank - torch.repeat_interleave(size.sum(1).cumsum(0) - size.sum(1), size.sum(1))
            held = states.new_zeros(len(unit), widest, states.shape[1], dtype=queries.dtype)
            held[slot, column] = states[token].to(queries.dtype)
            similar = torch.bmm(held, queries[rows].transpose(1, 2))[slot, column]
            place = (each * best.shape[1] + slot + start)[:, None].expand_as(similar)
            best.view(-1, best.shape[2]).scatter_reduce_(0, place, similar, "amax")

    def combine(
        self,
        best: Float[Tensor, "units slots query_tokens"],
        weights: Float[Tensor, "slots memories query_tokens"],
        units: Axis,
    ) -> Float[Tensor, "slots units"]:
        share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        return torch.einsum("usq,suq->su", best, share[:, units.segment])
