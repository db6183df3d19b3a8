"""Personalized PageRank on the GPU (paper Eq. 10), a query's whole walk in one block of threads.

The twin of `PersonalizedPageRank` where a memory fits into the shared memory of one multiprocessor: two floats a node,
which is about 12,000 nodes on sm_89 and 28,000 on sm_90. One launch takes all steps of all queries of all memories, so
that neither launches nor the distance to main memory count; larger memories take a product a step.

A walk goes in ``y = x / leaving``, the mass a node hands out per unit of edge, of which a step reads old values and
writes new ones. Eight threads share a row and add up their parts in a fixed order, so a result is the same every time.
"""

from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

THREADS = 512
OWN = 256  # bytes of shared memory beside the two vectors

SOURCE = r"""
// Lanes that share a row: rows have a handful of edges, and a hub's have hundreds.
#define LANES 8

__device__ float over_row(float part, unsigned group) {
    for (int apart = LANES / 2; apart; apart /= 2) part += __shfl_xor_sync(group, part, apart);
    return part;
}

extern "C" __global__ void pagerank(
    const float* reset, const float* affinity,  // [slots, nodes]; without affinity, null
    const int* crow, const int* col, const float* val,  // A: where a node's edges lead
    const int* crow_t, const int* col_t, const float* val_t,  // and where they come from
    const int* ptr, int memories, long long nodes,
    float damping, int steps, float* out  // [slots, nodes]; holds `leaving` while the walk goes
) {
    extern __shared__ double shared[];
    double* sums = shared;
    const int memory = blockIdx.x % memories;
    const int first = ptr[memory], count = ptr[memory + 1] - first;
    const long long base = (blockIdx.x / memories) * nodes + first;
    float* now = (float*)(shared + 32);
    float* next = now + count;
    reset += base;
    out += base;
    if (affinity) affinity += base;

    const int lane = threadIdx.x % LANES, rows = blockDim.x / LANES;
    const unsigned group = ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);

    for (int i = threadIdx.x / LANES; i < count; i += rows) {
        float leaving = 0;
        for (int e = crow[first + i] + lane; e < crow[first + i + 1]; e += LANES)
            leaving += val[e] * (affinity ? affinity[col[e] - first] : 1.0f);
        leaving = over_row(leaving, group);
        if (!(leaving > 1e-30f)) leaving = 1;  // dangles: it hands nothing out, whatever it is divided by
        if (!lane) {
            out[i] = leaving;
            now[i] = reset[i] / leaving;
        }
    }
    __syncthreads();

    for (int step = 0; step < steps; step++) {
        for (int i = threadIdx.x / LANES; i < count; i += rows) {
            float arriving = 0;
            for (int e = crow_t[first + i] + lane; e < crow_t[first + i + 1]; e += LANES)
                arriving += val_t[e] * now[col_t[e] - first];
            arriving = over_row(arriving, group);
            if (!lane) {
                const float liking = affinity ? affinity[i] : 1.0f;
                next[i] = (reset[i] + damping * liking * arriving) / out[i];
            }
        }
        __syncthreads();
        float* old = now;
        now = next;
        next = old;
    }

    // What dangling nodes lost returns to the reset in proportion: the mass is made to sum to 1.
    double mass = 0;
    if (!lane)
        for (int i = threadIdx.x / LANES; i < count; i += rows) mass += (double)now[i] * out[i];
    for (int apart = 16; apart; apart /= 2) mass += __shfl_xor_sync(0xffffffffu, mass, apart);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mass;
    __syncthreads();
    mass = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) mass += sums[warp];
    const float share = (float)(1 / fmax(mass, 1e-30));
    if (!lane)
        for (int i = threadIdx.x / LANES; i < count; i += rows) out[i] *= now[i] * share;
}
"""


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    if dtype != torch.float32:
        return "float32 only"
    held = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)
    room = (held - OWN) // 8
    return f"memories of up to {room} nodes only" if sizes.get("nodes", 0) > room else None


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
    out = torch.empty_like(reset, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    held = [reset.detach().contiguous()]
    held += [] if affinity is None else [affinity.detach().to(reset.dtype).contiguous()]
    for matrix in (adjacency, adjacency_t):
        held += [matrix.crow.int(), matrix.col.int(), matrix.val.detach().to(reset.dtype).contiguous()]
    held.append(_on(reset.device, ptr))
    places = [np.uint64(part.data_ptr()) for part in held]
    if affinity is None:
        places.insert(1, np.uint64(0))
    memories = len(ptr) - 1
    longest = max(b - a for a, b in pairwise(ptr))
    bytes_shared = OWN + 8 * longest
    # every pointer comes from PyTorch, on whose stream the launch goes: nothing of cupy's own is allocated
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(reset.device).cuda_stream)
    with cupy.cuda.Device(reset.device.index or 0), stream:
        kernel = _kernel()
        if kernel.max_dynamic_shared_size_bytes < bytes_shared:
            kernel.max_dynamic_shared_size_bytes = bytes_shared
        sizes = np.int32(memories), np.int64(nodes), np.float32(damping), np.int32(steps)
        arguments = (*places, *sizes, np.uint64(out.data_ptr()))
        kernel((slots * memories,), (THREADS,), arguments, shared_mem=bytes_shared)
    return out


@cache
def _kernel() -> Any:
    return cupy.RawKernel(SOURCE, "pagerank")


@lru_cache(maxsize=8)
def _on(device: torch.device, ptr: tuple[int, ...]) -> Tensor:
    """Kept, since the copy would make the host wait in every search."""
    return torch.tensor(ptr, dtype=torch.int32, device=device)
