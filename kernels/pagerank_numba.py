"""Personalized PageRank on the CPU (paper Eq. 10), as many queries at a time as a vector register holds.

The twin of `PersonalizedPageRank` walks in ``y = x / leaving``, the mass a node hands out per unit of edge:

    y(j) = b(j) + c(j) sum_i A(i, j) y(i),      b = reset / leaving,      c = damping g / leaving

so that a step reads, per edge, one weight and one row of ``y``. A row is as wide as a cache line and holds one value of
each query of a tile; a tile's state stays in the cache from the first sweep to the last.

Sweeps are Gauss-Seidel: each node already sees what the nodes before it got. They start from the reset and only climb,
so after as many sweeps they are at least as near as power iteration, whose step count therefore bounds theirs. A query
stops earlier, once its last change proves the tolerance: with no negative edge a sweep shrinks the error by ``damping``
or better, so that at most ``damping / (1 - damping)`` times the last change is missing. Whether a query stops never
depends on the others of its tile.

Rows are vectors of `lanes_numba`.
"""

# What numba compiles has no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-unreachable, disable-error-code="call-arg, var-annotated"

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from zeromem_torch.kernels.lanes_numba import divide, fma, load, multiply, one_unless_above, splat, store, width_of

BLOCK = 32  # nodes that are copied or added up at a time
INLINE = 1 << 20  # edges times queries up to which a second thread would cost more than it brings


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    return None if dtype in (torch.float32, torch.float64) else "float32 or float64 only"


def pagerank(
    reset: Tensor,  # [slots, nodes]
    affinity: Tensor | None,  # [slots, nodes]
    adjacency: Any,  # A, in CSR form: crow, col, val
    adjacency_t: Any,
    ptr: tuple[int, ...],  # nodes of memory m: ptr[m] to ptr[m + 1]; no edge leaves them
    damping: float,
    tolerance: float,
    steps: int,
) -> Tensor:
    """The mass of every query over its memory's nodes: rows as `PersonalizedPageRank` returns them."""
    slots, nodes = reset.shape
    out = torch.zeros_like(reset, memory_format=torch.contiguous_format)
    width = width_of(slots, reset.element_size())
    tiles = -(-slots // width)
    jobs = tiles * (len(ptr) - 1)
    if not jobs or not nodes:
        return out
    bounds = np.array(ptr, dtype=np.int64)
    longest = int(np.diff(bounds).max())
    # after normalising the error is at most twice what is missing, relative to a mass that is at least the reset's
    enough = tolerance * (1 - damping) / (2 * damping) if damping else 0.0
    liked = reset.new_zeros(0, 0) if affinity is None else affinity.detach().to(reset.dtype).contiguous()
    edges = adjacency_t.crow.long(), adjacency_t.col.int(), adjacency_t.val.detach().to(reset.dtype)
    arrays = [part.numpy() for part in (reset.detach().contiguous(), liked, *edges, out)]
    row = (out.numpy().dtype.type(0),) * width

    def run(first: int, last: int) -> None:
        # PyTorch's memory is aligned to cache lines, numpy's is not
        state = torch.empty(4, longest, width, dtype=reset.dtype).numpy()
        _walk(*arrays, bounds, first, last, tiles, damping, enough, steps, row, *state)

    workers = min(jobs, torch.get_num_threads()) if adjacency_t.col.numel() * slots > INLINE else 1
    if workers == 1:
        run(0, jobs)
    else:
        parts = min(jobs, 4 * workers)  # more than workers, as some stop early
        cuts = [jobs * part // parts for part in range(parts + 1)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, cuts[:-1], cuts[1:]))
    return out


@njit(nogil=True, cache=True)
def _walk(reset, affinity, crow, col, val, out, ptr, first, last, tiles, damping, enough, steps, row, b, c, y, leaving):
    """Jobs ``first`` to ``last``; a job is a tile of queries in one memory."""
    for job in range(first, last):
        start, stop = ptr[job // tiles], ptr[job // tiles + 1]
        slot = job % tiles * len(row)
        queries = min(len(row), len(reset) - slot)
        _begin(reset, affinity, crow, col, val, start, stop, slot, queries, damping, row, b, c, y, leaving)
        _climb(crow, col, val, start, stop, enough, steps, row, b, c, y, leaving)
        _finish(out, start, stop, slot, queries, row, y, leaving)


@njit(nogil=True, cache=True)
def _begin(reset, affinity, crow, col, val, start, stop, slot, queries, damping, row, b, c, y, leaving):
    """Lay a tile out: b, c, y and the sums ``leaving``, each [nodes, lanes]."""
    zero = splat(0.0, row)
    nodes = stop - start
    for i in range(nodes):
        store(y, i, zero)
        store(c, i, splat(1.0, row))
        store(leaving, i, zero)
    for block in range(0, nodes, BLOCK):
        for lane in range(queries):
            for i in range(block, min(block + BLOCK, nodes)):
                y[i, lane] = reset[slot + lane, start + i]
            if len(affinity):
                for i in range(block, min(block + BLOCK, nodes)):
                    c[i, lane] = affinity[slot + lane, start + i]
    for i in range(nodes):
        liking = load(c, i, row)
        for e in range(crow[start + i], crow[start + i + 1]):
            j = col[e] - start
            store(leaving, j, fma(splat(val[e], row), liking, load(leaving, j, row)))
    for i in range(nodes):  # a node that dangles hands nothing out, whatever it is divided by
        total = one_unless_above(load(leaving, i, row), splat(1e-30, row))
        share = divide(load(y, i, row), total)
        store(leaving, i, total)
        store(y, i, share)
        store(b, i, share)
        store(c, i, multiply(load(c, i, row), divide(splat(damping, row), total)))


@njit(nogil=True, cache=True)
def _climb(crow, col, val, start, stop, enough, steps, row, b, c, y, leaving):
    """Sweep until each query's last change proves its tolerance, or ``steps`` times."""
    nodes = stop - start
    last, alive = np.empty((1, len(row)), y.dtype), np.ones((1, len(row)), y.dtype)
    least = enough * _mass(nodes, row, y, leaving)
    for _ in range(steps):
        going, change = load(alive, 0, row), splat(0.0, row)
        for i in range(nodes):
            arriving = splat(0.0, row)
            for e in range(crow[start + i], crow[start + i + 1]):
                arriving = fma(splat(val[e], row), load(y, col[e] - start, row), arriving)
            before = load(y, i, row)
            step = fma(splat(-1.0, row), before, fma(load(c, i, row), arriving, load(b, i, row)))
            store(y, i, fma(going, step, before))
            change = fma(step, load(leaving, i, row), change)  # they only climb
        store(last, 0, change)
        left = False
        for lane in range(len(row)):
            if last[0, lane] <= least[lane]:
                alive[0, lane] = 0
            left |= alive[0, lane] > 0
        if not left:
            break


@njit(nogil=True, cache=True)
def _mass(nodes, row, y, leaving):
    """What each query holds in all; short float sums go into long double ones."""
    total = np.zeros(len(row))
    part = np.empty((1, len(row)), y.dtype)
    for block in range(0, nodes, BLOCK):
        held = splat(0.0, row)
        for i in range(block, min(block + BLOCK, nodes)):
            held = fma(load(y, i, row), load(leaving, i, row), held)
        store(part, 0, held)
        for lane in range(len(row)):
            total[lane] += part[0, lane]
    return total


@njit(nogil=True, cache=True)
def _finish(out, start, stop, slot, queries, row, y, leaving):
    """Back to mass, which sums to 1: what dangling nodes lost returns to the reset in proportion."""
    nodes = stop - start
    total = _mass(nodes, row, y, leaving)
    for block in range(0, nodes, BLOCK):
        for lane in range(queries):
            share = 1 / max(total[lane], 1e-30)
            for i in range(block, min(block + BLOCK, nodes)):
                out[slot + lane, start + i] = y[i, lane] * leaving[i, lane] * share
