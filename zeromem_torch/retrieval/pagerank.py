"""Personalized PageRank over the entity-context graph (paper Eq. 10), with a gradient that needs no unrolled steps."""

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from zeromem_torch.backends import choose, has_kernel, kernel
from zeromem_torch.bank import Axis, segment_sum
from zeromem_torch.sparse import Csr, multiplier, sampled

SOLVERS = ("power", "chebyshev")


class PersonalizedPageRank(nn.Module):
    """Spread each query's reset mass along graph edges.

    Solves ``pi = (1 - damping) reset + damping P^T pi`` for all queries of all memories at once, where a step from
    ``i`` goes to ``j`` in proportion to the edge and to how much the query likes ``j``:

        P(i, j) = A(i, j) g(j) / sum_j' A(i, j') g(j')

    With ``g = 1`` that is the paper's row-normalised transition matrix. ``P`` differs per query and is never built: one
    product with ``A`` gives the row sums, and a step is one product with ``A^T`` between two scalings.

    The paper leaves dangling nodes open; ours return their mass to ``reset``. That solution equals the leaky one
    divided by its own sum, so the loop leaks and is normalised once at the end.

    Every step shrinks the L1 error by ``damping``, so ``tolerance`` fixes the step count up front: no convergence test,
    hence no host sync. ``K`` steps from the reset leave out the walks of more than ``K`` edges, which have at most
    ``damping^(K+1)`` of the mass of all; normalising doubles the relative error.

    ``solver="chebyshev"`` is for a symmetric ``A``, whatever the affinities: its steps combine so that each takes away
    ``1 - damping / (1 + sqrt(1 - damping^2))`` of an error weighed by the stationary distribution (at damping .6 two
    thirds, where power takes two fifths). How that error relates to L1 depends on how uneven the distribution is, which
    takes one read by the host; where the count would exceed power's, power is used.

    Gradients come from the fixed point, not from the steps: see `walk`.
    """

    def __init__(
        self, damping: float = 0.6, tolerance: float = 1e-6, *, solver: str = "power", backend: str = "auto"
    ) -> None:
        super().__init__()
        if not 0 <= damping < 1:
            raise ValueError(f"damping must lie in [0, 1), got {damping}")
        if solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
        self.damping = damping
        self.tolerance = tolerance
        self.solver = solver
        self.backend = backend

    @property
    def steps(self) -> int:
        return power_steps(self.damping, self.tolerance)

    def forward(
        self,
        reset: Float[Tensor, "slots nodes"],  # sums to 1 over each segment, or to 0: then so does the result
        adjacency: Csr,  # A, from row to column; no negative entry
        adjacency_t: Csr,
        nodes: Axis,
        affinity: Float[Tensor, "slots nodes"] | None = None,  # g, not negative
        damping: Float[Tensor, "..."] | float | None = None,  # not the module's own: one, or one a slot and memory
    ) -> Float[Tensor, "slots nodes"]:
        gamma = self.damping if damping is None else damping
        shorter: Tensor | None = None
        if isinstance(gamma, Tensor) and gamma.dim():  # the largest walks; a step of the others counts for less
            most = gamma.detach().amax().clamp(min=1e-6)
            shorter, gamma = nodes.spread(gamma / most).T, most
        rate = float(gamma.detach() if isinstance(gamma, Tensor) else gamma)
        steps = power_steps(rate, self.tolerance)
        inputs = (reset, adjacency.val, adjacency_t.val, affinity, gamma, shorter)
        needs_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        choice = choose(
            "pagerank" if self.solver == "power" else "spmm",
            self.backend if shorter is None else "torch",
            device=reset.device,
            dtype=reset.dtype,
            needs_grad=needs_grad,
            sizes={
                "nodes": max((b - a for a, b in pairwise(nodes.ptr)), default=0),
                "elements": reset.numel(),
            },
        )
        if choice.name != "torch" and self.solver == "power" and has_kernel("pagerank", choice.name):
            found: Tensor = kernel("pagerank", choice.name).pagerank(
                reset, affinity, adjacency, adjacency_t, nodes.ptr, rate, self.tolerance, steps
            )
            return found
        start = reset.T.contiguous()  # [nodes, slots]: a sparse product reads whole rows
        liking = torch.ones_like(start) if affinity is None else affinity.T.contiguous()
        leaving = adjacency.times(liking, choice.name)
        dangling = ~(leaving > 1e-30)  # no edge, or none to a node that the query likes
        share = (1 / leaving.masked_fill(dangling, 1)).masked_fill(dangling, 0)  # keeps 1/0 out of the gradient too
        solver = "power"
        if self.solver == "chebyshev":
            if not _same(adjacency, adjacency_t):
                raise ValueError('expected a symmetric adjacency for solver="chebyshev"; use solver="power"')
            fewer = chebyshev_steps(rate, self.tolerance, _unevenness(liking * leaving, nodes))
            solver, steps = ("chebyshev", fewer) if fewer < steps else ("power", steps)
        arriving = liking if shorter is None else liking * shorter
        mass = walk(adjacency_t, adjacency, arriving, share, start, gamma, steps, solver=solver, backend=choice.name)
        # in double: a float sum over all nodes of a large memory would be off by more than the tolerance
        total = segment_sum(mass.T.double(), nodes.segment, nodes.segments).clamp(min=1e-30).to(mass.dtype)
        return mass.T / total[:, nodes.segment]


def walk(
    matrix: Csr,  # M
    transposed: Csr,
    left: Float[Tensor, "nodes slots"],
    right: Float[Tensor, "nodes slots"],
    source: Float[Tensor, "nodes slots"],
    damping: Float[Tensor, ""] | float,
    steps: int,
    *,
    solver: str = "power",
    backend: str = "torch",
) -> Float[Tensor, "nodes slots"]:
    """The fixed point of ``x = source + damping left * (M (right * x))``, after ``steps`` products.

    Its gradient is the fixed point of the transposed equation, with ``grad`` for a source and the scalings swapped:

        a = grad + damping right * (M^T (left * a))

    so that no step is kept, and the backward is written with this operator, so that it differentiates twice.
    """
    # filled where it lies: a copy from the host would make it wait
    gamma = damping.to(source) if isinstance(damping, Tensor) else source.new_full((), damping)
    buffers = matrix.crow, matrix.col, matrix.val, transposed.crow, transposed.col, transposed.val
    found: Tensor = _walk(*buffers, left, right, source, gamma, steps, solver, backend)
    return found


@torch.library.custom_op("zeromem::walk", mutates_args=())
def _walk(
    crow: Tensor,
    col: Tensor,
    val: Tensor,
    crow_t: Tensor,
    col_t: Tensor,
    val_t: Tensor,
    left: Tensor,
    right: Tensor,
    source: Tensor,
    damping: Tensor,
    steps: int,
    solver: str,
    backend: str,
) -> Tensor:
    # In y = right * x a step is one product, one scaling and one sum.
    if not steps or not col.numel() or not source.numel():
        return source.clone()
    product = multiplier(Csr(crow, col, val, source.shape[0]), backend)
    scale, first = damping * left, right * source
    again, mass, before, omega = right * scale, first, first, 1.0
    for step in range(1, steps):
        after = product(mass, again, first)
        if solver == "chebyshev":
            squared = float(damping) ** 2
            omega = 1.0 if step == 1 else 1 / (1 - squared * (omega / 4 if step > 2 else 0.5))
            after = torch.lerp(before, after, omega)
        before, mass = mass, after
    return product(mass, scale, source)


@_walk.register_fake
def _(crow, col, val, crow_t, col_t, val_t, left, right, source, damping, steps, solver, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(source)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.steps, ctx.solver, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output)


def _walk_backward(ctx, grad):  # type: ignore[no-untyped-def]
    crow, col, val, crow_t, col_t, val_t, left, right, source, damping, mass = ctx.saved_tensors
    matrix, transposed = Csr(crow, col, val, len(source)), Csr(crow_t, col_t, val_t, len(source))
    how = {"solver": ctx.solver, "backend": ctx.backend}
    adjoint = walk(transposed, matrix, right, left, grad, damping, ctx.steps, **how)
    needs = ctx.needs_input_grad
    arriving = matrix.times(right * mass, ctx.backend) if needs[6] or needs[9] else None
    sent = left * adjoint
    grads: list[Tensor | None] = [None] * 13
    if needs[2]:
        grads[2] = damping * sampled(matrix, sent, right * mass)
    if needs[6]:
        grads[6] = damping * adjoint * arriving
    if needs[7]:
        grads[7] = damping * mass * transposed.times(sent, ctx.backend)
    if needs[8]:
        grads[8] = adjoint
    if needs[9]:
        grads[9] = (sent * arriving).sum()
    return tuple(grads)


_walk.register_autograd(_walk_backward, setup_context=_keep)


def power_steps(damping: float, tolerance: float) -> int:
    """Products after which the normalised result is within ``tolerance`` of the fixed point, in L1."""
    if not 0 <= damping < 1:
        raise ValueError(f"damping must lie in [0, 1), got {damping}")
    if not damping:
        return 0
    return max(0, math.ceil(math.log(tolerance / (2 + tolerance), damping)) - 1)


def chebyshev_steps(damping: float, tolerance: float, unevenness: float) -> int:
    """The same for Chebyshev's semi-iteration; ``unevenness`` is the whole stationary mass over its least node's."""
    if not damping:
        return 0
    rate = damping / (1 + math.sqrt(1 - damping**2))
    missing = 4 * damping / (1 - damping) * math.sqrt(max(unevenness, 1))
    return 1 + max(0, math.ceil(math.log(tolerance / missing, rate)))


def _unevenness(stationary: Float[Tensor, "nodes slots"], nodes: Axis) -> float:
    if not stationary.numel():
        return 1.0
    held = stationary.detach().T.double()
    total = segment_sum(held, nodes.segment, nodes.segments)[:, nodes.segment]
    return float(torch.where(held > 0, total / held, 1).max())


def _same(a: Csr, b: Csr) -> bool:
    return torch.equal(a.crow, b.crow) and torch.equal(a.col, b.col) and torch.equal(a.val, b.val)
