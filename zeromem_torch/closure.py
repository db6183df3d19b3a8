"""Evidence closure (paper Eq. 14): what the main evidence needs beside it to be understood, bounded, without doubles.

Three relations bring a unit in: it neighbours a main unit in its session and one leans on the other (a question and its
answer, a pronoun and its referent), or it hangs on a main unit in the graph (a document whose title the other names, or
an entity they share). Added by default, neighbours cost more than they bring at equal tokens (measured), so support is
a score: it raises a unit among the others, and the ranking decides what is handed over.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.backends import choose, kernel
from zeromem_torch.bank import MemoryBank, member_mask, segment_max


@dataclass(frozen=True)
class Support:
    """What closure adds to each unit's score, by relation."""

    neighbour: Float[Tensor, "slots units"]
    graph: Float[Tensor, "slots units"]

    @classmethod
    def none(cls, scores: Float[Tensor, "slots units"]) -> "Support":
        return cls(torch.zeros_like(scores), torch.zeros_like(scores))


class Closure(nn.Module):
    """Support of every unit by the main evidence M(q).

    A main unit of fused score S supports its neighbour with ``neighbour * S`` where one leans on the other (the better
    of two neighbours counts), and units outside M(q) with ``graph * sum S P2``, where P2 is the chance that two steps
    of the graph (unit -> entity -> unit) lead there, and the sum is brought to [0, 1].
    """

    def __init__(self, neighbour: float = 0.05, graph: float = 0.02, backend: str = "auto") -> None:
        super().__init__()
        self.neighbour = neighbour
        self.graph = graph
        self.backend = backend

    def forward(
        self,
        fused: Float[Tensor, "slots units"],
        main: Int[Tensor, "slots memories k"],
        bank: MemoryBank,
    ) -> Support:
        together = (bank.unit_session[1:] == bank.unit_session[:-1]) & (bank.unit_position[1:] >= 0)
        joined = together & (bank.unit_asks[:-1] | bank.unit_leans[1:])
        needs_grad = torch.is_grad_enabled() and (fused.requires_grad or bank.adjacency.val.requires_grad)
        choice = choose("closure", self.backend, device=fused.device, dtype=fused.dtype, needs_grad=needs_grad)
        if choice.name != "torch":
            edges = bank.adjacency.crow, bank.adjacency.col, bank.adjacency.val
            weights = self.neighbour, self.graph
            return Support(
                *kernel("closure", choice.name).support(fused, main, joined, *edges, bank.unit_node, *weights)
            )
        chosen = member_mask(main, fused.shape[1])
        source = fused.clamp(min=0).masked_fill(~chosen, 0)
        units = bank.axes["units"]
        near = torch.zeros_like(fused)
        if units.size > 1:
            none, passed = torch.zeros_like(near[:, :1]), joined.to(fused.dtype)
            near = torch.cat([none, source[:, :-1] * passed], 1)
            near = torch.maximum(near, torch.cat([source[:, 1:] * passed, none], 1))
        mass = bank.on_nodes(source, source.new_zeros(len(source), bank.axes["entities"].size)).T.contiguous()
        leaving = (bank.adjacency @ torch.ones_like(mass[:, :1])).clamp(min=1e-30)
        once = bank.adjacency_t @ (mass / leaving)
        reached = bank.at_units((bank.adjacency_t @ (once / leaving)).T).masked_fill(chosen, 0)
        peak = segment_max(reached, units.segment, units.segments, empty=0.0)
        return Support(self.neighbour * near, self.graph * reached / units.spread(peak.clamp(min=1e-9)))
