"""Lexical scores: every query's terms against the postings of every memory at once (BM25)."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.backends import choose, kernel
from zeromem_torch.bank import Axis, Postings

ROOM = 30
"""Bits that a query's scores may fill: an int32 has one more for its sign, and one for what rounding adds."""


class LexicalScores(nn.Module):
    """Sum the impacts of each query's terms, ``score(q, d) = sum_t count(t, q) * impact(t, d)``.

    A term is expanded to its postings, so the cost is that of the postings asked for, not of the matrix. Terms unseen
    when the memory was built have no number and score 0. Scores are in natural-log units, comparable inside a memory.

    Float32 impacts are summed in whole steps (`in_steps`): integers add up to the same in any order, so a score has the
    same bits in any batch, on any device and by any back end. Where a gradient is asked for, or impacts have another
    dtype, floats are summed.

    ``workspace`` bounds the bytes held beside the result.
    """

    def __init__(self, backend: str = "auto", workspace: int = 1 << 26) -> None:
        super().__init__()
        self.backend = backend
        self.workspace = workspace

    def forward(
        self,
        slot: Int[Tensor, " asked"],
        term: Int[Tensor, " asked"],
        weight: Float[Tensor, " asked"],
        postings: Postings,
        slots: int,
        rows: int,
    ) -> Float[Tensor, "slots rows"]:
        backend = self._backend(weight, postings)
        if backend == "floats":
            nothing = postings.impact.new_zeros(slots, rows)
            return self._sum(slot, term, weight.to(postings.impact.dtype), postings, nothing)
        scaled, step = in_steps(slot, term, weight, postings, slots)
        if backend != "torch":
            given = (slot, term, scaled, postings.ptr, postings.row, postings.impact, postings.longest)
            scores: Tensor = kernel("lexical", backend).scores(*given, step, rows)
            return scores
        none = torch.zeros(slots, rows, dtype=torch.int32, device=step.device)
        return self._sum(slot, term, scaled, postings, none) * step[:, None]

    def best(
        self,
        slot: Int[Tensor, " asked"],
        term: Int[Tensor, " asked"],
        weight: Float[Tensor, " asked"],
        postings: Postings,
        slots: int,
        axis: Axis,
        k: int,
    ) -> tuple[Float[Tensor, "slots segments k"], Int[Tensor, "slots segments k"]]:
        """Scores and row numbers of the ``k`` best rows of each segment, best first; of all scores, few at a time.

        Equal scores go by row number. Behind the last row of a short segment stand 0 and -1.
        """
        if self._backend(weight, postings) == "numba":
            scaled, step = in_steps(slot, term, weight, postings, slots)
            given = (slot, term, scaled, postings.ptr, postings.row, postings.impact, postings.longest)
            found: tuple[Tensor, Tensor] = kernel("lexical", "numba").best(*given, step, torch.tensor(axis.ptr), k)
            return found
        some = max(1, self.workspace // (64 * max(1, axis.padded.numel())))
        values = [postings.impact.new_zeros(0, axis.segments, k)]
        places = [postings.row.new_zeros(0, axis.segments, k)]
        for first in range(0, slots, some):
            own = (slot >= first) & (slot < first + some)
            part = min(some, slots - first)
            scores = self(slot[own] - first, term[own], weight[own], postings, part, axis.size)
            held = scores[:, axis.padded.clamp(min=0)].masked_fill(axis.padded < 0, -torch.inf)
            order = held.argsort(dim=2, descending=True, stable=True)[..., :k]
            row = axis.padded.expand_as(held).gather(2, order)
            missing = (0, k - order.shape[2])
            values.append(nn.functional.pad(held.gather(2, order).masked_fill(row < 0, 0), missing))
            places.append(nn.functional.pad(row, missing, value=-1))
        return torch.cat(values), torch.cat(places)

    def _backend(self, weight: Tensor, postings: Postings) -> str:
        """The back end, or "floats": PyTorch where whole steps will not do."""
        impact = postings.impact
        needs_grad = torch.is_grad_enabled() and (weight.requires_grad or impact.requires_grad)
        name = choose("lexical", self.backend, device=impact.device, dtype=impact.dtype, needs_grad=needs_grad).name
        return "floats" if name == "torch" and (needs_grad or impact.dtype != torch.float32) else name

    def _sum(self, slot: Tensor, term: Tensor, weight: Tensor, postings: Postings, total: Tensor) -> Tensor:
        """What the terms add to ``total``; to integers, each product rounded."""
        flat = total.flatten()
        for asked, entry in self._pairs(term, postings):
            product = weight[asked] * postings.impact[entry].to(weight.dtype)
            if not total.is_floating_point():
                product = (product + 0.5).floor().to(total.dtype)
            flat = flat.index_add(0, slot[asked] * total.shape[1] + postings.row[entry], product)
        return flat.view_as(total)

    def _pairs(self, term: Tensor, postings: Postings) -> Iterator[tuple[Tensor, Tensor]]:
        """Each term asked for with each of its postings, by their numbers, as many at a time as the workspace holds."""
        counts = postings.counts[term]
        last = counts.cumsum(0)
        first = last - counts
        asked, size = torch.arange(len(term), device=term.device), int(counts.sum())
        room = max(1, self.workspace // 64)
        for start in range(0, size, room):
            stop = min(start + room, size)
            here = (last.clamp(max=stop) - first.clamp(min=start)).clamp(min=0)
            own = torch.repeat_interleave(asked, here, output_size=stop - start)
            yield own, torch.arange(start, stop, device=term.device) + (postings.ptr[term] - first)[own]


def in_steps(
    slot: Int[Tensor, " asked"],
    term: Int[Tensor, " asked"],
    weight: Float[Tensor, " asked"],
    postings: Postings,
    slots: int,
) -> tuple[Float[Tensor, " asked"], Float[Tensor, " slots"]]:
    """Weights for which products with impacts are counted in steps, and the step of each slot,

        score(q, d) = step(q) * sum_t floor(scaled(t, q) * impact(t, d) + 1/2).

    A step is a power of two, so that scaling is exact; ``2^30`` of them are more than the query can score: its terms'
    number times what one adds at most. That is finer than a float sum, and depends on nothing but the query's terms.
    """
    most = weight.detach().abs().double() * postings.peak[term].double()
    largest = most.new_zeros(slots).scatter_reduce(0, slot, most, "amax")
    bound = torch.frexp(largest * torch.bincount(slot, minlength=slots)).exponent.long().clamp(-60, 150)
    # a power of two is its exponent's bits: `exp2` need not be exact on every device
    scale = (bound.new_tensor(1023 + ROOM) - bound << 52).view(torch.float64)
    step = (bound + (127 - ROOM) << 23).int().view(torch.float32)
    return weight.double() * scale[slot], step
