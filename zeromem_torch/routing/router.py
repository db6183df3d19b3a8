"""Routing (paper Eq. 7): is the answer reached through entities, or does it stand in one place?"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.routing.queries import QueryBatch

RELATIONAL, LOCAL = "relational", "local"


class RuleRouter(nn.Module):
    """The graph view is primary where the question's form suggests more hops than places, else the hierarchy.

    Returns the graph's weight per query: ``rho`` on the relational route, ``1 - rho`` on the local one.
    """

    def __init__(self, rho: float = 0.6) -> None:
        super().__init__()
        if not 0 <= rho <= 1:
            raise ValueError(f"rho must lie in [0, 1], got {rho}")
        self.rho = nn.Parameter(torch.tensor(float(rho)), requires_grad=False)

    def forward(self, batch: QueryBatch) -> Float[Tensor, "slots memories"]:
        return torch.where(batch.relational > batch.local, self.rho, 1 - self.rho)
