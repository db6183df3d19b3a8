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

    in two steps, so that windows come for free: `forward` finds the best match of each query token in each unit,
    `combine` weighs and sums them, over units or over groups of units. Opposite directions count as no match (0), and
    so does a unit without tokens.

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
        state_ptr: Int[Tensor, " bounds"],
        units: Axis,
        candidates: Int[Tensor, "slots memories k"],  # unit numbers, -1 behind the last
    ) -> Float[Tensor, "units slots query_tokens"]:
        best = [
            self._whole(queries[:, m], states, state_ptr[first : last + 1])
            if last - first <= self.exhaustive
            else self._some(queries[:, m], states, state_ptr[first : last + 1], candidates[:, m] - first)
            for m, (first, last) in enumerate(pairwise(units.ptr))
        ]
        return _joined(best, 0)

    def _whole(
        self, queries: Float[Tensor, "slots query_tokens dim"], states: Tensor, ptr: Int[Tensor, " own"]
    ) -> Float[Tensor, "own_units slots query_tokens"]:
        _, query_tokens, dim = queries.shape
        own = states[ptr[0] : ptr[-1]].to(queries.dtype)
        unit = torch.repeat_interleave(torch.arange(len(ptr) - 1, device=ptr.device), ptr.diff())
        step = max(1, self.workspace // max(1, 4 * query_tokens * len(own)))
        best = []
        for part in torch.split(queries, step):
            similar = own @ part.reshape(-1, dim).T
            rows = unit[:, None].expand_as(similar)
            held = similar.new_zeros(len(ptr) - 1, similar.shape[1]).scatter_reduce(0, rows, similar, "amax")
            best.append(held.view(len(ptr) - 1, len(part), query_tokens))
        return _joined(best, 1)

    def _some(
        self,
        queries: Float[Tensor, "slots query_tokens dim"],
        states: Tensor,
        ptr: Int[Tensor, " own"],
        candidates: Int[Tensor, "slots k"],  # among the memory's own units; negative behind the last
    ) -> Float[Tensor, "own_units slots query_tokens"]:
        _, query_tokens, dim = queries.shape
        sizes = torch.where(candidates >= 0, ptr.diff()[candidates.clamp(min=0)], 0)
        widest = max(1, int(sizes.sum(1).max())) if sizes.numel() else 1
        step = max(1, self.workspace // (widest * (dim + query_tokens) * 8))
        best = []
        for part, unit, size in zip(
            *(torch.split(rows, step) for rows in (queries, candidates.clamp(min=0), sizes)), strict=True
        ):
            slots = len(part)
            slot = torch.repeat_interleave(torch.arange(slots, device=unit.device), size.sum(1))
            each = torch.repeat_interleave(unit.flatten(), size.flatten())
            ends = size.flatten().cumsum(0)
            rank = torch.arange(each.numel(), device=unit.device)
            token = rank + torch.repeat_interleave(ptr[unit].flatten() - ends + size.flatten(), size.flatten())
            column = rank - torch.repeat_interleave(size.sum(1).cumsum(0) - size.sum(1), size.sum(1))
            held = part.new_zeros(slots, widest, dim)
            held[slot, column] = states[token].to(part.dtype)
            similar = torch.bmm(held, part.transpose(1, 2))[slot, column]
            place = (each * slots + slot)[:, None].expand_as(similar)
            flat = part.new_zeros((len(ptr) - 1) * slots, query_tokens).scatter_reduce(0, place, similar, "amax")
            best.append(flat.view(len(ptr) - 1, slots, query_tokens))
        return _joined(best, 1)

    def combine(
        self,
        best: Float[Tensor, "units slots query_tokens"],
        weights: Float[Tensor, "slots memories query_tokens"],
        units: Axis,
    ) -> Float[Tensor, "slots units"]:
        share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        return torch.einsum("usq,suq->su", best, share[:, units.segment])


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # the usual single part is not copied
