"""Entity propagation on the CPU (paper Eq. 9), as many queries at a time as a vector register holds.

The twin of `EntityPropagation`, a tile of queries and a memory at a time: both products of a hop read and write rows of
the tile, which stays in the cache, and no score of a pair of query and sentence is written back to memory. To follow
only what a query reaches does not pay: two hops reach most entities of a memory (measured).
"""

# What numba compiles has no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-unreachable, disable-error-code="call-arg, var-annotated"

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from zeromem_torch.kernels.lanes_numba import fma, load, multiply, splat, store, width_of

BLOCK = 32  # rows that are copied or added up at a time
INLINE = 1 << 20  # mentions times queries up to which a second thread would cost more than it brings


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    return None if dtype in (torch.float32, torch.float64) else "float32 or float64 only"


def propagate(
    seeds: Tensor,  # [slots, entities]
    similarity: Tensor,  # [slots, sentences]
    mentions: Any,  # M, in CSR form: crow, col, val; sentences x entities
    mentions_t: Any,
    ptr: tuple[int, ...],  # entities of memory m: ptr[m] to ptr[m + 1]; no sentence names those of two
    hops: int,
    decay: float,
) -> Tensor:
    """The activation of every entity, as `EntityPropagation` returns it."""
    out = seeds.detach().clone(memory_format=torch.contiguous_format)
    width = width_of(len(seeds), seeds.element_size())
    tiles = -(-len(seeds) // width)
    jobs = tiles * (len(ptr) - 1)
    if not jobs or not out.numel() or not mentions.col.numel():
        return out
    bounds = np.array(ptr, dtype=np.int64)
    matrices = [
        part.numpy()
        for matrix in (mentions, mentions_t)
        for part in (matrix.crow.long(), matrix.col.int(), matrix.val.detach().to(seeds.dtype))
    ]
    sentences = _sentences(bounds, matrices[3], matrices[4])
    near, activation = similarity.detach().to(seeds.dtype).contiguous().numpy(), out.numpy()
    longest = (int(np.diff(bounds).max()), int(np.diff(sentences, axis=1).max()))
    row = (activation.dtype.type(0),) * width

    def run(first: int, last: int) -> None:
        # PyTorch's memory is aligned to cache lines, numpy's is not
        of_entities = torch.empty(2, longest[0], width, dtype=seeds.dtype).numpy()
        of_sentences = torch.empty(2, longest[1], width, dtype=seeds.dtype).numpy()
        arrays = (activation, near, *matrices, bounds, sentences)
        _propagate(*arrays, first, last, tiles, hops, decay, row, *of_entities, *of_sentences)

    workers = min(jobs, torch.get_num_threads()) if mentions.col.numel() * len(seeds) > INLINE else 1
    cuts = [jobs * part // workers for part in range(workers + 1)]
    if workers == 1:
        run(*cuts)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, cuts[:-1], cuts[1:]))
    return out


@njit(nogil=True, cache=True)
def _sentences(ptr, crow_t, col_t):
    """From which sentence to which each memory's entities are named: two columns."""
    found = np.zeros((len(ptr) - 1, 2), np.int64)
    for m in range(len(ptr) - 1):
        start, stop = crow_t[ptr[m]], crow_t[ptr[m + 1]]
        if stop > start:
            found[m, 0] = col_t[start:stop].min()
            found[m, 1] = col_t[start:stop].max() + 1
    return found


@njit(nogil=True, cache=True)
def _propagate(
    out, similarity, crow, col, val, crow_t, col_t, val_t, ptr, sentences,
    first, last, tiles, hops, decay, row, hop, total, near, reached,
):  # fmt: skip
    """Jobs ``first`` to ``last``; a job is a tile of queries in one memory."""
    scale = np.empty((1, len(row)), out.dtype)
    for job in range(first, last):
        memory, slot = job // tiles, job % tiles * len(row)
        queries = min(len(row), len(out) - slot)
        e, entities = ptr[memory], ptr[memory + 1] - ptr[memory]
        z, count = sentences[memory, 0], sentences[memory, 1] - sentences[memory, 0]
        _lay_out(out, e, entities, slot, queries, row, hop)
        _lay_out(similarity, z, count, slot, queries, row, near)
        for i in range(entities):
            store(total, i, load(hop, i, row))
        for _ in range(hops):
            mass = _sum(hop, entities, row)
            for i in range(count):
                arriving = splat(0.0, row)
                for m in range(crow[z + i], crow[z + i + 1]):
                    arriving = fma(splat(val[m], row), load(hop, col[m] - e, row), arriving)
                store(reached, i, multiply(load(near, i, row), arriving))
            for i in range(entities):
                arriving = splat(0.0, row)
                for m in range(crow_t[e + i], crow_t[e + i + 1]):
                    arriving = fma(splat(val_t[m], row), load(reached, col_t[m] - z, row), arriving)
                store(hop, i, arriving)
            arrived = _sum(hop, entities, row)
            for lane in range(len(row)):
                scale[0, lane] = decay * mass[lane] / max(arrived[lane], 1e-12)
            for i in range(entities):
                scaled = multiply(load(hop, i, row), load(scale, 0, row))
                store(hop, i, scaled)
                store(total, i, fma(splat(1.0, row), scaled, load(total, i, row)))
        for block in range(0, entities, BLOCK):
            for lane in range(queries):
                for i in range(block, min(block + BLOCK, entities)):
                    out[slot + lane, e + i] = total[i, lane]


@njit(nogil=True, cache=True)
def _lay_out(values, start, count, slot, queries, row, tile):
    """The values of a tile of queries, none below 0, as rows of the tile."""
    for block in range(0, count, BLOCK):
        stop = min(block + BLOCK, count)
        for i in range(block, stop):
            store(tile, i, splat(0.0, row))
        for lane in range(queries):
            for i in range(block, stop):
                tile[i, lane] = max(values[slot + lane, start + i], 0)


@njit(nogil=True, cache=True)
def _sum(tile, count, row):
    """What each query holds in all; short float sums go into long double ones."""
    total = np.zeros(len(row))
    part = np.empty((1, len(row)), tile.dtype)
    for block in range(0, count, BLOCK):
        held = splat(0.0, row)
        for i in range(block, min(block + BLOCK, count)):
            held = fma(splat(1.0, row), load(tile, i, row), held)
        store(part, 0, held)
        for lane in range(len(row)):
            total[lane] += part[0, lane]
    return total
