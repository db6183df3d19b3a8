"""The entity-context graph as a view (paper Eqs. 8-10): where the query's entities and best units lead."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.bank import MemoryBank, segment_minmax, segment_sum
from zeromem_torch.retrieval.dense import DenseScores
from zeromem_torch.retrieval.fusion import raised
from zeromem_torch.retrieval.hierarchy import SignalMix
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.retrieval.propagation import EntityPropagation
from zeromem_torch.retrieval.signals import Signals
from zeromem_torch.routing.queries import QueryBatch

RESET_REASONS = (
    "entities and prior",
    "prior: no entity of the query is known",
    "uniform: the prior tells no unit from another",
)

LEAST_LIKED = 1e-3
"""How well a unit answers at least, as a step sees it: of 0 and next to 0, rounding would decide what is reached."""


@dataclass(frozen=True)
class GraphScores:
    units: Float[Tensor, "slots units"]
    entities: Float[Tensor, "slots entities"]  # activation of Eq. 9
    reason: Int[Tensor, "slots memories"]  # what the walk started from: an index into RESET_REASONS


class GraphView(nn.Module):
    """Walk from the query's entities and from the units that match it best, and rank units by the mass they get.

    - Reset: the units, in proportion to ``prior ** sharpness``, weigh 1 together; activated entities (Eqs. 8-9) weigh
      what their activation sums to. Where the prior tells no unit from another, they share their part evenly.
    - Affinity: a step prefers units that answer what the question asks *about* its names (the question without them),
      and passes less mass through the named entities themselves (``named``), which the prior has used already.
    - Score: ``pi ** (1 / sharpness)``, which undoes the sharpening: min-max would leave nothing but the top few.
    - Exact matches (titles and phrases) refine the ranking.
    """

    def __init__(
        self,
        prior: Mapping[str, float],
        exact: Mapping[str, float],
        *,
        damping: float = 0.6,
        sharpness: float = 12.0,
        affinity: float = 2.0,
        named: float = 0.2,
        hops: int = 2,
        decay: float = 0.2,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.prior = SignalMix(prior)
        self.exact = SignalMix(exact)
        self.similarity = DenseScores()
        self.propagate = EntityPropagation(hops, decay, backend=backend)
        self.walk = PersonalizedPageRank(damping, backend=backend)
        self.sharpness, self.affinity, self.named = sharpness, affinity, named

    def forward(
        self,
        batch: QueryBatch,
        bank: MemoryBank,
        signals: Signals,
        damping: Float[Tensor, "..."] | None = None,  # in place of the view's own, see the walk
        decay: Float[Tensor, "..."] | None = None,  # likewise, see the propagation
    ) -> GraphScores:
        units, entities, nodes = bank.axes["units"], bank.axes["entities"], bank.axes["nodes"]
        seeds = batch.entities.dense(batch.slots, entities.size)
        similarity = self.similarity(batch.vectors, bank.sentence_vectors, bank.axes["sentences"])
        activation = self.propagate(seeds, similarity, bank.mentions, bank.mentions_t, entities, decay)
        prior = raised(segment_minmax(self.prior(signals), units), self.sharpness)
        reset, reason = self._reset(prior, activation, bank)
        liking = self._liking(batch, bank, signals)
        mass = self.walk(reset, bank.adjacency, bank.adjacency_t, nodes, liking, damping)
        scores = bank.at_units(mass).clamp(min=0)
        flat = segment_minmax((scores + 1e-30) ** (1 / self.sharpness), units)
        return GraphScores(flat + self.exact(signals), activation, reason)

    def _liking(self, batch: QueryBatch, bank: MemoryBank, signals: Signals) -> Float[Tensor, "slots nodes"] | None:
        """How much mass each node draws beside those that a step could go to as well; None: all the same."""
        if not self.affinity and self.named == 1:
            return None
        rest, asked = signals["rest"], batch.entities
        draws = rest.clamp(min=LEAST_LIKED) ** self.affinity if self.affinity else torch.ones_like(rest)
        passing = draws.new_ones(1, 1).expand(batch.slots, bank.axes["entities"].size)
        seeds = torch.where(asked.weight > 0, self.named, 1.0).to(draws.dtype)
        return bank.on_nodes(draws, passing).index_put_((asked.slot, bank.entity_node[asked.row]), seeds)

    def _reset(self, prior: Tensor, activation: Tensor, bank: MemoryBank) -> tuple[Tensor, Tensor]:
        units, entities = bank.axes["units"], bank.axes["entities"]
        of_units = segment_sum(prior, units.segment, units.segments)
        flat = of_units >= units.bounds.diff()  # min-max made it 1 everywhere
        of_entities = segment_sum(activation, entities.segment, units.segments)
        known = of_entities > 0
        whole = 1 + of_entities
        reset = bank.on_nodes(prior / units.spread(of_units), activation).div_(bank.axes["nodes"].spread(whole))
        return reset, torch.where(known, 0, torch.where(flat, 2, 1))
