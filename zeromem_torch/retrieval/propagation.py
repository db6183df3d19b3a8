"""Entity alignment and propagation: from the query's entities to those that its sentences lead to (paper Eqs. 8-9)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.backends import choose, has_kernel, kernel
from zeromem_torch.bank import Axis, segment_sum
from zeromem_torch.sparse import Csr


class EntityPropagation(nn.Module):
    """Spread activation from entity to entity through the sentences that name both:

        eta_{t+1}(e') = sum_e eta_t(e) sum_{z in Z(e) and Z(e')} sim(q, z)   =   M^T (S * (M eta_t))

    as two sparse products and a Hadamard product; no entity x entity matrix exists. Left open by the paper and chosen
    here: negative similarities are clipped at 0, since activation is a mass; a hop is scaled to ``decay`` times the
    mass of the one before, or hubs would grow without bound (a scale per query, so the order within a hop stays); the
    result is the sum over hops, so a seed keeps what it started with.
    """

    def __init__(self, hops: int = 2, decay: float = 0.5, *, backend: str = "auto") -> None:
        super().__init__()
        self.hops = hops
        self.decay = decay
        self.backend = backend

    def forward(
        self,
        seeds: Float[Tensor, "slots entities"],  # eta_0, not negative
        similarity: Float[Tensor, "slots sentences"],  # cosine of query and sentence
        mentions: Csr,  # M, sentences x entities
        mentions_t: Csr,
        entities: Axis,
        decay: Float[Tensor, "..."] | None = None,  # in place of the module's own, one or one a slot and memory
    ) -> Float[Tensor, "slots entities"]:
        inputs = (seeds, similarity, mentions.val, mentions_t.val)
        kept = self.decay if decay is None else decay
        choice = choose(
            "propagation",
            self.backend if decay is None else "torch",
            device=seeds.device,
            dtype=seeds.dtype,
            needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in inputs),
            sizes={"elements": max(seeds.numel(), similarity.numel())},
        )
        if has_kernel("propagation", choice.name):
            found: Tensor = kernel("propagation", choice.name).propagate(
                seeds, similarity, mentions, mentions_t, entities.ptr, self.hops, self.decay
            )
            return found
        relevance = similarity.clamp(min=0).T
        hop = total = seeds
        for _ in range(self.hops):
            mass = segment_sum(hop, entities.segment, entities.segments)
            reached = mentions.times(hop.T.contiguous(), choice.name)
            spread = mentions_t.times(relevance * reached, choice.name).T
            arrived = segment_sum(spread, entities.segment, entities.segments)
            scale = kept * mass / arrived.clamp(min=1e-12)
            hop = spread * scale[:, entities.segment]
            total = total + hop
        return total
