"""View fusion (paper Eqs. 12-13), and the ranking it is for: M(q)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from zeromem_torch.backends import choose, kernel
from zeromem_torch.bank import SCORE_STEP, Axis, segment_extreme, segment_minmax, segment_sum, segment_topk


class ViewFusion(nn.Module):
    """Bring both views to [0, 1] and mix them by the route:

        S(u) = rho * primary(u) + (1 - rho) * secondary(u)

    with min-max over the units that a view returned; here a view returns every unit of its memory, since a small pool
    costs points (measured), and cutting comes after. Ours: each view is raised to a power first, its contrast; 1 is the
    paper's Eq. 13. Above 1 a view speaks up for the few units it is sure of and leaves the rest to the other: a strong
    view loses less to a weak one (measured). ``graph_weight`` is rho where the route is relational and 1 - rho where it
    is local, or what a learnt router gives.
    """

    def __init__(self, graph_contrast: float = 1.0, hierarchy_contrast: float = 1.0, backend: str = "auto") -> None:
        super().__init__()
        self.graph_contrast = graph_contrast
        self.hierarchy_contrast = hierarchy_contrast
        self.backend = backend

    def forward(
        self,
        graph: Float[Tensor, "slots units"],
        hierarchy: Float[Tensor, "slots units"],
        graph_weight: Float[Tensor, "slots memories"],
        units: Axis,
    ) -> Float[Tensor, "slots units"]:
        return self.best(graph, hierarchy, graph_weight, units, 0)[0]

    def best(
        self,
        graph: Float[Tensor, "slots units"],
        hierarchy: Float[Tensor, "slots units"],
        graph_weight: Float[Tensor, "slots memories"],
        units: Axis,
        k: int,
        *,
        bonus: Float[Tensor, "slots units"] | None = None,
        graph_there: Bool[Tensor, "slots units"] | None = None,
        hierarchy_there: Bool[Tensor, "slots units"] | None = None,
        admitted: Bool[Tensor, "slots units"] | None = None,
    ) -> tuple[Float[Tensor, "slots units"], Int[Tensor, "slots memories k"]]:
        """Fused scores, and the ``k`` best admitted units of each memory as `segment_topk` ranks them.

        A view scores a unit that it did not return (is not ``there``) with 0. ``bonus`` is added to what was mixed.
        """
        inputs = graph, hierarchy, graph_weight, bonus
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        choice = choose(
            "fused_score",
            self.backend,
            device=graph.device,
            dtype=graph.dtype,
            needs_grad=needs_grad,
            sizes={"k": k},
        )
        contrasts = self.graph_contrast, self.hierarchy_contrast
        masks = graph_there, hierarchy_there, admitted
        if choice.name == "torch":
            return _definition(graph, hierarchy, graph_weight, units, bonus, *masks, *contrasts, k)
        fused, rows = fused_score(
            graph, hierarchy, graph_weight, units.bounds, bonus, *masks, *contrasts, k, units.longest, choice.name
        )
        return fused, rows


def raised(scores: Float[Tensor, "..."], power: float | Float[Tensor, ""]) -> Float[Tensor, "..."]:
    """``scores ** power``; a whole power is multiplied out, which takes a tenth of the time of another."""
    if isinstance(power, Tensor):  # to be learned: ln 0 is kept out of both derivatives
        some = scores > 0
        return torch.where(some, torch.where(some, scores, 1) ** power, 0)
    whole = int(power)
    if whole != power or not 0 < whole <= 64:
        return scores**power
    product: Tensor | None = None
    while whole:
        if whole & 1:
            product = scores if product is None else product * scores
        whole >>= 1
        if whole:
            scores = scores * scores
    assert product is not None
    return product


def _definition(
    graph: Tensor,
    hierarchy: Tensor,
    graph_weight: Tensor,
    units: Axis,
    bonus: Tensor | None,
    graph_there: Tensor | None,
    hierarchy_there: Tensor | None,
    admitted: Tensor | None,
    graph_contrast: float,
    hierarchy_contrast: float,
    k: int,
) -> tuple[Tensor, Tensor]:
    precision = _precision(graph)
    weight = graph_weight.to(precision)
    of_graph = raised(segment_minmax(graph.to(precision), units, graph_there), graph_contrast)
    of_hierarchy = raised(segment_minmax(hierarchy.to(precision), units, hierarchy_there), hierarchy_contrast)
    fused = units.spread(weight) * of_graph + units.spread(1 - weight) * of_hierarchy
    if bonus is not None:
        fused = fused + bonus
    return fused, segment_topk(fused, units, k, admitted)


def _precision(scores: Tensor) -> torch.dtype:
    """Half precision has fewer steps than scores are compared in."""
    return torch.promote_types(scores.dtype, torch.float32)


@torch.library.custom_op("zeromem::fused_score", mutates_args=())
def fused_score(
    graph: Tensor,
    hierarchy: Tensor,
    graph_weight: Tensor,
    bounds: Tensor,
    bonus: Tensor | None,
    graph_there: Tensor | None,
    hierarchy_there: Tensor | None,
    admitted: Tensor | None,
    graph_contrast: float,
    hierarchy_contrast: float,
    k: int,
    longest: int,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """`ViewFusion.best` as one operator; ``bounds`` and ``longest`` are those of the units' axis."""
    views, masks = (graph, hierarchy, graph_weight), (graph_there, hierarchy_there, admitted)
    contrasts = graph_contrast, hierarchy_contrast
    if backend != "torch":
        run = kernel("fused_score", backend).fused_score
        found: tuple[Tensor, Tensor] = run(*views, bounds, bonus, *masks, *contrasts, k, longest)
        return found
    units = Axis(tuple(bounds.tolist()), _segment(bounds, graph.shape[1]))
    return _definition(*views, units, bonus, *masks, *contrasts, k)


@fused_score.register_fake
def _(
    graph: Tensor,
    hierarchy: Tensor,
    graph_weight: Tensor,
    bounds: Tensor,
    bonus: Tensor | None,
    graph_there: Tensor | None,
    hierarchy_there: Tensor | None,
    admitted: Tensor | None,
    graph_contrast: float,
    hierarchy_contrast: float,
    k: int,
    longest: int,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    slots, units = graph.shape
    fused = graph.new_empty(slots, units, dtype=_precision(graph))
    return fused, graph.new_empty(slots, bounds.shape[0] - 1, k, dtype=torch.long)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    graph, hierarchy, weight, bounds, bonus, graph_there, hierarchy_there, _, *contrasts, _, _, _ = inputs
    ctx.save_for_backward(graph, hierarchy, weight, bounds, graph_there, hierarchy_there)
    ctx.contrasts = contrasts
    ctx.bonus = None if bonus is None else bonus.dtype


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    """Closed form: of a fused score to both views, the weight and the bonus; a ranking has none."""
    graph, hierarchy, weight, bounds, *masks = ctx.saved_tensors
    segment, segments = _segment(bounds, graph.shape[1]), bounds.shape[0] - 1
    shares = weight.to(grad.dtype), 1 - weight.to(grad.dtype)
    to_views, raised_views = [], []
    for scores, share, contrast, there in zip((graph, hierarchy), shares, ctx.contrasts, masks, strict=True):
        own = scores.to(grad.dtype)
        to_scaled = grad * share.index_select(1, segment)
        to_view, scaled = _minmax_backward(own, to_scaled, segment, segments, contrast, there)
        to_views.append(to_view.to(scores.dtype))
        raised_views.append(raised(scaled, contrast))
    to_weight = segment_sum(grad * (raised_views[0] - raised_views[1]), segment, segments).to(weight.dtype)
    to_bonus = None if ctx.bonus is None else grad.to(ctx.bonus)
    return *to_views, to_weight, None, to_bonus, *([None] * 8)


def _minmax_backward(
    scores: Tensor, grad: Tensor, segment: Tensor, segments: int, contrast: float, there: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of ``minmax(scores) ** contrast``, and the scaled scores. With m, M the ends, D = M - m and a the
    gradient to what was scaled, a row gets ``a / D``, and each end, in equal parts to the rows that hold it,

        m: sum a (scaled - 1) / D,      M: -sum a scaled / D;

    a segment of equal rows stands for 1 whatever they are, so it has none.
    """
    there = torch.ones_like(scores, dtype=torch.bool) if there is None else there
    ends = [
        segment_extreme(scores.masked_fill(~there, fill), segment, segments, which, fill)
        for which, fill in (("amin", torch.inf), ("amax", -torch.inf))
    ]
    span = ends[1] - ends[0]
    flat = ~(span > SCORE_STEP)
    least, most = (end.masked_fill(flat, 0).index_select(1, segment) for end in ends)
    width = span.masked_fill(flat, torch.inf).index_select(1, segment)
    scaled = (scores - least) / width + flat.to(scores.dtype).index_select(1, segment)
    scaled = torch.where(there, scaled, 0)
    through = torch.where(there, grad * contrast * raised(scaled, contrast - 1), 0) / width
    to_least, to_most = through * (scaled - 1), -through * scaled
    total = through
    for end, to_end in ((least, to_least), (most, to_most)):
        holds = ((scores == end) & there).to(scores.dtype)
        share = segment_sum(to_end, segment, segments) / segment_sum(holds, segment, segments).clamp(min=1)
        total = total + holds * share.index_select(1, segment)
    return total, scaled


fused_score.register_autograd(_backward, setup_context=_save)


def _segment(bounds: Int[Tensor, " bounds"], rows: int) -> Int[Tensor, " rows"]:
    return torch.searchsorted(bounds[1:], torch.arange(rows, device=bounds.device), right=True)
