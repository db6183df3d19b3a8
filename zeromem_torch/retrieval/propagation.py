"""Entity alignment and propagation: from the query's entities to those that its sentences lead to (paper Eqs. 8-9)."""

from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.bank import Axis, segment_max
from zeromem_torch.sparse import Csr


class EntityPropagation(nn.Module):
    """Spread activation from entity to entity through the sentences that name both:

        eta_{t+1}(e') = sum_e eta_t(e) sum_{z in Z(e) and Z(e')} sim(q, z)   =   M^T (S * (M eta_t))

    as two sparse products and a Hadamard product; no entity x entity matrix exists. Left open by the paper and chosen
    here: negative similarities are clipped at 0, since activation is a mass; after each hop the largest activation of a
    memory is brought back to 1, or a hub would grow without bound (a scale, so the order within the hop stays); the
    result is the sum over hops, hop ``t`` weighing ``decay ** t``, so a seed keeps what it started with.
    """

    def __init__(self, hops: int = 2, decay: float = 0.5) -> None:
        super().__init__()
        self.hops = hops
        self.decay = decay

    def forward(
        self,
        seeds: Float[Tensor, "slots entities"],  # eta_0
        similarity: Float[Tensor, "slots sentences"],  # cosine of query and sentence
        mentions: Csr,  # M, sentences x entities
        mentions_t: Csr,
        entities: Axis,
    ) -> Float[Tensor, "slots entities"]:
        relevance = similarity.clamp(min=0).T
        hop = seeds
        total = seeds
        for step in range(1, self.hops + 1):
            spread = (mentions_t @ (relevance * (mentions @ hop.T.contiguous()))).T
            peak = segment_max(spread, entities.segment, entities.segments, empty=0.0)[:, entities.segment]
            hop = spread / peak.clamp(min=1e-12)
            total = total + self.decay**step * hop
        return total
