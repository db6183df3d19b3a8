"""Evidence closure on the CPU (paper Eq. 14), from the few units of M(q) and along their edges only.

The twin of `Closure`. A query has a handful of main units: what they lead to in two steps is a small part of a graph,
found edge by edge, where the definition multiplies the whole of it.
"""

# What numba compiles has no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-unreachable, disable-error-code="call-arg"

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

INLINE = 32  # queries up to which a second thread would cost more than it brings


def refuses(device: torch.device, dtype: torch.dtype, sizes: Any) -> str | None:
    return None if dtype in (torch.float32, torch.float64) else "float32 or float64 only"


def support(
    fused: Tensor,  # [slots, units]
    main: Tensor,  # [slots, memories, k] units, -1 behind the last
    joined: Tensor,  # [units - 1]: whether a unit and the next one belong together
    crow: Tensor,  # A, from row to column
    col: Tensor,
    val: Tensor,
    unit_node: Tensor,  # [units]
    neighbour: float,
    graph: float,
) -> tuple[Tensor, Tensor]:
    """What neighbours and what the graph add to each unit: ``[slots, units]`` twice."""
    slots, units = fused.shape
    near, far = torch.zeros(slots, units, dtype=fused.dtype), torch.zeros(slots, units, dtype=fused.dtype)
    nodes = len(crow) - 1
    owner = torch.full((nodes,), -1).index_copy(0, unit_node, torch.arange(units))
    given = (fused.detach(), main, joined, crow.long(), col.int(), val.detach().to(fused.dtype), unit_node, owner)
    arrays = [tensor.contiguous().numpy() for tensor in (*given, near, far)]

    def run(first: int, last: int) -> None:
        _support(*arrays, neighbour, graph, first, last, np.zeros(nodes, arrays[0].dtype), np.empty(nodes, np.int64))

    workers = min(slots, torch.get_num_threads()) if slots > INLINE else 1
    if workers == 1:
        run(0, slots)
    else:
        edges = [slots * part // workers for part in range(workers + 1)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, edges[:-1], edges[1:]))
    return near, far


@njit(nogil=True, cache=True)
def _support(
    fused, main, joined, crow, col, val, unit_node, owner, near, far, neighbour, graph, first, last, mass, met
):
    zero = fused.dtype.type(0)
    reached = np.empty(fused.shape[1], np.int64)
    for slot in range(first, last):
        for memory in range(main.shape[1]):
            count = 0
            for rank, unit in enumerate(main[slot, memory]):
                if unit < 0 or not fused[slot, unit] > zero or unit in main[slot, memory, :rank]:
                    continue
                score = fused[slot, unit]
                if unit + 1 < fused.shape[1] and joined[unit]:
                    near[slot, unit + 1] = max(near[slot, unit + 1], neighbour * score)
                if unit > 0 and joined[unit - 1]:
                    near[slot, unit - 1] = max(near[slot, unit - 1], neighbour * score)
                node = unit_node[unit]
                share = score / _leaving(crow, val, node)
                for e in range(crow[node], crow[node + 1]):
                    more = share * val[e]
                    if more > zero:
                        if mass[col[e]] == zero:
                            met[count] = col[e]
                            count += 1
                        mass[col[e]] += more
            _second_step(far[slot], main[slot, memory], crow, col, val, owner, graph, mass, met[:count], reached)


@njit(nogil=True, cache=True)
def _leaving(crow, val, node):
    total = val.dtype.type(0)
    for e in range(crow[node], crow[node + 1]):
        total += val[e]
    return max(total, val.dtype.type(1e-30))


@njit(nogil=True, cache=True)
def _second_step(far, main, crow, col, val, owner, graph, mass, met, reached):
    """From the nodes met, to units outside M(q), as a share of what reached the best of them; ``mass`` is emptied."""
    zero = far.dtype.type(0)
    count = 0
    for node in met:
        share = mass[node] / _leaving(crow, val, node)
        mass[node] = zero
        for e in range(crow[node], crow[node + 1]):
            unit, more = owner[col[e]], share * val[e]
            if unit >= 0 and more > zero:
                if far[unit] == zero:
                    reached[count] = unit
                    count += 1
                far[unit] += more
    for unit in main:
        if unit >= 0:
            far[unit] = zero
    peak = far.dtype.type(1e-9)
    for unit in reached[:count]:
        peak = max(peak, far[unit])
    for unit in reached[:count]:
        far[unit] = graph * far[unit] / peak
