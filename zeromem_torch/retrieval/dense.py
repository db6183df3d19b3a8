"""Dense scores: one vector a unit, or late interaction over token states (MaxSim)."""

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.backends import choose, kernel
from zeromem_torch.bank import SCORE_STEP, Axis, MemoryBank, TokenStates

FAINT = 1e-2
"""Least difference of matches that counts as a whole one: a smaller one would bring its rounding with it."""
IN_CACHE = 1 << 25
"""Bytes of similarities at once on a CPU: more of them would leave its cache before they are reduced."""
STRETCH = 1024
"""Rows that a CPU multiplies at once: with thousands of them its library takes a slower way."""


class DenseScores(nn.Module):
    """Cosine of each query with each row of its memory: one matrix product a memory.

    Vectors have unit length. A row that belongs to no query's memory in a slot still gets a score; empty slots are the
    caller's to mask.
    """

    def forward(
        self, queries: Float[Tensor, "slots memories dim"], vectors: Float[Tensor, "rows dim"], axis: Axis
    ) -> Float[Tensor, "slots rows"]:
        step = STRETCH if vectors.device.type == "cpu" else max(1, axis.longest)
        stretches = [
            (m, first, min(first + step, stop))
            for m, (start, stop) in enumerate(pairwise(axis.ptr))
            for first in range(start, stop, step)
        ]
        if torch.is_grad_enabled() and (queries.requires_grad or vectors.requires_grad):
            scores = [queries[:, m] @ vectors[first:stop].to(queries.dtype).T for m, first, stop in stretches]
            return _joined(scores, 1) if scores else queries.new_zeros(queries.shape[0], 0)
        out = queries.new_empty(queries.shape[0], axis.size)
        for m, first, stop in stretches:  # each written where it belongs: joining them would be another pass
            torch.mm(queries[:, m], vectors[first:stop].to(queries.dtype).T, out=out[:, first:stop])
        return out


class MaxSim(nn.Module):
    """Late interaction: per query token the best token of the unit, weighted and summed,

        score(q, d) = sum_i w_i max_j <q_i, d_j> / sum_i w_i

    in two steps, so that windows come for free: `forward` finds the best match of each query token in each unit,
    `combine` weighs and sums them, over units or over groups of units. Opposite directions count as no match (0), and
    so does a unit without tokens.

    A memory of at most ``exhaustive`` units is compared whole, by one matrix product; in a larger one only the given
    candidates are, gathered per query. ``workspace`` bounds the bytes of similarities and gathered states held at once.
    """

    def __init__(self, exhaustive: int = 2048, workspace: int = 1 << 28, backend: str = "auto") -> None:
        super().__init__()
        self.exhaustive = exhaustive
        self.workspace = workspace
        self.backend = backend

    def forward(
        self,
        queries: Float[Tensor, "slots memories query_tokens dim"],
        states: TokenStates,
        units: Axis,
        candidates: Int[Tensor, "slots memories k"],  # unit numbers, -1 behind the last
    ) -> Float[Tensor, "units slots query_tokens"]:
        some = self._gathered if self.choice(queries, states.values) == "triton" else self._some
        best = [
            self._whole(queries[:, m], states, states.ptr[first : last + 1])
            if last - first <= self.exhaustive
            else some(queries[:, m], states, states.ptr[first : last + 1], candidates[:, m] - first)
            for m, (first, last) in enumerate(pairwise(units.ptr))
        ]
        return _joined(best, 0)

    def choice(self, queries: Tensor, states: Tensor) -> str:
        needs_grad = torch.is_grad_enabled() and (queries.requires_grad or states.requires_grad)
        dtype = queries.dtype
        return choose("maxsim", self.backend, device=queries.device, dtype=dtype, needs_grad=needs_grad).name

    def _whole(
        self,
        queries: Float[Tensor, "slots query_tokens dim"],
        states: TokenStates,
        ptr: Int[Tensor, " own"],
    ) -> Float[Tensor, "own_units slots query_tokens"]:
        _, query_tokens, dim = queries.shape
        own = states.read(slice(int(ptr[0]), int(ptr[-1])), queries.dtype)
        unit = torch.repeat_interleave(torch.arange(len(ptr) - 1, device=ptr.device), ptr.diff())
        room = min(self.workspace, IN_CACHE) if own.device.type == "cpu" else self.workspace
        step = max(1, room // max(1, 4 * query_tokens * len(own)))
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
        states: TokenStates,
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
            held[slot, column] = states.read(token, part.dtype)
            similar = torch.bmm(held, part.transpose(1, 2))[slot, column]
            place = (each * slots + slot)[:, None].expand_as(similar)
            flat = part.new_zeros((len(ptr) - 1) * slots, query_tokens).scatter_reduce(0, place, similar, "amax")
            best.append(flat.view(len(ptr) - 1, slots, query_tokens))
        return _joined(best, 1)

    def _gathered(
        self,
        queries: Float[Tensor, "slots query_tokens dim"],
        states: TokenStates,
        ptr: Int[Tensor, " own"],
        candidates: Int[Tensor, "slots k"],
    ) -> Float[Tensor, "own_units slots query_tokens"]:
        """`_some` by a kernel that writes neither gathered states nor similarities."""
        slots, query_tokens, _ = queries.shape
        found = kernel("maxsim", "triton").best_matches(queries, states.values, states.scale, ptr, candidates)
        slot = torch.arange(slots, device=queries.device)[:, None].expand_as(candidates)
        best = queries.new_zeros(len(ptr), slots, query_tokens)  # the last line takes what stands for no candidate
        none = len(ptr) - 1
        best = best.index_put((torch.where(candidates >= 0, candidates, none), slot), found)
        return best[:none]

    def combine(
        self,
        best: Float[Tensor, "units slots query_tokens"],
        weights: Float[Tensor, "slots memories query_tokens"],
        units: Axis,
    ) -> Float[Tensor, "slots units"]:
        share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        return torch.einsum("usq,suq->su", best, units.spread(share))


class LateInteraction(nn.Module):
    """MaxSim of turns, and of the best window of each turn, from the best matches of query tokens in turns.

    A token that matches well everywhere says little: for turns, each token's matches are brought to [0, 1] before they
    are summed. A window matches a token as its best turn does.

    ``precision`` is what states are kept in, see `TokenStates`.
    """

    def __init__(
        self, exhaustive: int = 2048, workspace: int = 1 << 28, backend: str = "auto", precision: str = "stored"
    ) -> None:
        super().__init__()
        self.maxsim = MaxSim(exhaustive, workspace, backend)
        self.precision = precision

    def forward(
        self,
        queries: Float[Tensor, "slots memories query_tokens dim"],
        weights: Float[Tensor, "slots memories query_tokens"],  # 0 = padding, or a token that says nothing
        bank: MemoryBank,
        candidates: Int[Tensor, "slots memories k"],  # of memories that are not compared whole
    ) -> tuple[Float[Tensor, "slots units"], Float[Tensor, "slots units"]]:
        units = bank.axes["units"]
        backend = self.maxsim.choice(queries, bank.token_states_of(0))
        if backend == "numba" and not (torch.is_grad_enabled() and weights.requires_grad):
            values, scale, starts = bank.states_by_memory(self.precision)
            found: tuple[Tensor, Tensor] = kernel("maxsim", "numba").late_interaction(
                queries,
                weights,
                values,
                scale,
                starts,
                bank.state_ptr,
                units.ptr,
                bank.axes["windows"].ptr,
                bank.member_window,
                bank.member_unit,
                candidates,
                self.maxsim.exhaustive,
                SCORE_STEP,
                FAINT,
            )
            return found
        states = bank.states(self.precision)
        # As many slots at once as the workspace holds: a match per unit, slot and query token is most of it.
        rows = 3 * units.size + 2 * bank.axes["members"].size
        step = max(1, self.maxsim.workspace // max(1, 4 * queries.shape[2] * rows))
        parts = zip(*(torch.split(rows, step) for rows in (queries, weights, candidates)), strict=True)
        turn, window = zip(*(self._scores(q, w, k, states, bank) for q, w, k in parts), strict=True)
        return torch.cat(turn), torch.cat(window)

    def _scores(
        self, queries: Tensor, weights: Tensor, candidates: Tensor, states: TokenStates, bank: MemoryBank
    ) -> tuple[Tensor, Tensor]:
        units, windows = bank.axes["units"], bank.axes["windows"]
        best = self.maxsim(queries, states, units, candidates)
        held = _group_max(best.index_select(0, bank.member_unit), bank.member_window, windows.size, empty=0.0)
        in_window = bank.best_window(self.maxsim.combine(held, weights, windows))
        return self.maxsim.combine(token_minmax(best, units), weights, units), in_window


def token_minmax(best: Float[Tensor, "units slots query_tokens"], units: Axis) -> Tensor:
    """Min-max of each query token's matches over the units of its memory; all equal -> 0: that one tells nothing."""
    least = -_group_max(-best, units.segment, units.segments, empty=-torch.inf)
    most = _group_max(best, units.segment, units.segments, empty=-torch.inf)
    span = most - least
    factor = (span > SCORE_STEP) / span.clamp(min=FAINT)
    if units.segments == 1:
        return (best - least) * factor
    return (best - least.index_select(0, units.segment)) * factor.index_select(0, units.segment)


def _group_max(
    best: Float[Tensor, "rows slots query_tokens"], group: Int[Tensor, " rows"], groups: int, empty: float
) -> Float[Tensor, "groups slots query_tokens"]:
    flat = best.flatten(1)
    most = flat.new_full((groups, flat.shape[1]), empty)
    return most.scatter_reduce(0, group[:, None].expand_as(flat), flat, "amax").view(groups, *best.shape[1:])


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # the usual single part is not copied
