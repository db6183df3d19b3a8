"""View fusion (paper Eqs. 12-13)."""

from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.bank import Axis, segment_minmax


class ViewFusion(nn.Module):
    """Bring both views to [0, 1] and mix them by the route:

        S(u) = rho * primary(u) + (1 - rho) * secondary(u)

    with min-max over the units that a view returned; here a view returns every unit of its memory, since a small pool
    costs points (measured), and cutting comes after. ``graph_weight`` is rho where the route is relational and 1 - rho
    where it is local, so it may also be any number that a learnt router gives.
    """

    def forward(
        self,
        graph: Float[Tensor, "slots units"],
        hierarchy: Float[Tensor, "slots units"],
        graph_weight: Float[Tensor, "slots memories"],
        units: Axis,
    ) -> Float[Tensor, "slots units"]:
        weight = graph_weight[:, units.segment]
        return weight * segment_minmax(graph, units) + (1 - weight) * segment_minmax(hierarchy, units)
