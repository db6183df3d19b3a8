"""View fusion (paper Eqs. 12-13)."""

from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.bank import Axis, segment_minmax


class ViewFusion(nn.Module):
    """Bring both views to [0, 1] and mix them by the route:

        S(u) = rho * primary(u) + (1 - rho) * secondary(u)

    with min-max over the units that a view returned; here a view returns every unit of its memory, since a small pool
    costs points (measured), and cutting comes after. Ours: each view is raised to a power first, its contrast; 1 is the
    paper's Eq. 13. Above 1 a view speaks up for the few units it is sure of and leaves the rest to the other: a strong
    view loses less to a weak one (measured). ``graph_weight`` is rho where the route is relational and 1 - rho where it
    is local, or what a learnt router gives.
    """

    def __init__(self, graph_contrast: float = 1.0, hierarchy_contrast: float = 1.0) -> None:
        super().__init__()
        self.graph_contrast = graph_contrast
        self.hierarchy_contrast = hierarchy_contrast

    def forward(
        self,
        graph: Float[Tensor, "slots units"],
        hierarchy: Float[Tensor, "slots units"],
        graph_weight: Float[Tensor, "slots memories"],
        units: Axis,
    ) -> Float[Tensor, "slots units"]:
        weight = graph_weight[:, units.segment]
        of_graph = segment_minmax(graph, units) ** self.graph_contrast
        of_hierarchy = segment_minmax(hierarchy, units) ** self.hierarchy_contrast
        return weight * of_graph + (1 - weight) * of_hierarchy
