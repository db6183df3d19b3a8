"""Personalized PageRank over the entity-context graph (paper Eq. 10)."""

import math

from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.bank import Axis, segment_sum
from zeromem_torch.sparse import Csr


class PersonalizedPageRank(nn.Module):
    """Spread each query's reset mass along graph edges.

    Solves ``pi = (1 - damping) reset + damping P^T pi`` for all queries of all memories at once, where a step from
    ``i`` goes to ``j`` in proportion to the edge and to how much the query likes ``j``:

        P(i, j) = A(i, j) g(j) / sum_j' A(i, j') g(j')

    With ``g = 1`` that is the paper's row-normalised transition matrix. ``P`` differs per query and is never built: one
    product with ``A`` gives the row sums, and a step is one product with ``A^T`` between two scalings.

    Every step shrinks the L1 error by ``damping``, so ``tolerance`` fixes the step count up front: no convergence test,
    hence no host sync. The paper leaves dangling nodes open; ours return their mass to ``reset``. That solution equals
    the leaky one divided by its own sum, so the loop leaks and is normalised once at the end: at least ``1 - damping``
    of the mass remains and normalising at most doubles the relative error, which the step count allows for.
    """

    def __init__(self, damping: float = 0.6, tolerance: float = 1e-6) -> None:
        super().__init__()
        if not 0 <= damping < 1:
            raise ValueError(f"damping must lie in [0, 1), got {damping}")
        self.damping = damping
        self.steps = math.ceil(math.log(tolerance * (1 - damping) / 4, damping)) if damping else 0

    def forward(
        self,
        reset: Float[Tensor, "slots nodes"],  # sums to 1 over each segment, or to 0: then so does the result
        adjacency: Csr,  # A, from row to column
        adjacency_t: Csr,
        nodes: Axis,
        affinity: Float[Tensor, "slots nodes"] | None = None,  # g, not negative
    ) -> Float[Tensor, "slots nodes"]:
        start = reset.T.contiguous()  # [nodes, slots]: a sparse product reads whole rows
        liking = start.new_ones(start.shape) if affinity is None else affinity.T.contiguous()
        leaving = adjacency @ liking
        dangling = ~(leaving > 1e-30)  # no edge, or none to a node that the query likes
        share = (1 / leaving.masked_fill(dangling, 1)).masked_fill(dangling, 0)  # keeps 1/0 out of the gradient too
        mass = start
        for _ in range(self.steps):
            mass = (1 - self.damping) * start + self.damping * liking * (adjacency_t @ (mass * share))
        total = segment_sum(mass.T, nodes.segment, nodes.segments)
        return mass.T / total.clamp(min=1e-30)[:, nodes.segment]
