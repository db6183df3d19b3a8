"""The best rows of each segment on the CPU, by a histogram of scores instead of a sort of all of them.

The twin of `segment_topk`. Scores become whole steps; a histogram of them says down to which bucket the best ``k`` lie;
only rows of those buckets are kept, in their order, and sorted by counting digits, which keeps equal ones in it.
"""

# What numba compiles has no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-unreachable

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

INLINE = 1 << 15  # scores up to which a second thread would cost more than it brings
BUCKETS = 1 << 11
DIGIT = 8  # bits


def refuses(device: torch.device, dtype: torch.dtype, sizes: Any) -> str | None:
    return None if dtype in (torch.float32, torch.float64) else "float32 or float64 only"


def topk(
    scores: Tensor,  # [slots, rows]
    ptr: tuple[int, ...],  # rows of segment m: ptr[m] to ptr[m + 1]
    k: int,
    present: Tensor | None,  # [slots, rows]
    step: float,  # scores are compared in whole ones,
    farthest: float,  # at most as many from 0
) -> Tensor:
    """Row numbers, best first, -1 behind the last: ``[slots, segments, k]``."""
    slots = len(scores)
    out = torch.full((slots, len(ptr) - 1, k), -1)
    if not out.numel() or not ptr[-1]:
        return out
    bounds = np.array(ptr)
    held = torch.ones(0, 0, dtype=torch.bool) if present is None else present.contiguous()
    arrays = scores.detach().contiguous().numpy(), bounds, held.numpy(), out.numpy()
    longest = int(np.diff(bounds).max())

    def run(first: int, last: int) -> None:
        steps, kept = np.empty(longest, np.int64), np.empty((2, 2, longest), np.uint32)
        _topk(*arrays, first, last, step, farthest, steps, kept)

    workers = min(slots, torch.get_num_threads()) if scores.numel() > INLINE else 1
    if workers == 1:
        run(0, slots)
    else:
        edges = [slots * part // workers for part in range(workers + 1)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, edges[:-1], edges[1:]))
    return out


@njit(nogil=True, cache=True)
def _topk(scores, ptr, present, out, first, last, step, farthest, steps, kept):
    for slot in range(first, last):
        for m in range(len(ptr) - 1):
            size = ptr[m + 1] - ptr[m]
            own = scores[slot, ptr[m] : ptr[m + 1]]
            for i in range(size):
                value = np.rint(own[i] / step)
                value = value if value > -farthest else -farthest  # and what is no number
                steps[i] = np.int64(value if value < farthest else farthest)
            if len(present):
                count = _kept(steps[:size], present[slot, ptr[m] : ptr[m + 1]], out.shape[2], kept[0])
            else:
                count = _kept(steps[:size], present, out.shape[2], kept[0])
            best = kept[_sort(kept, count)]
            for rank in range(min(count, out.shape[2])):
                out[slot, m, rank] = ptr[m] + best[1, rank]


@njit(nogil=True, cache=True)
def _kept(steps, present, k, kept):
    """Rows among which the best ``k`` are, in their order, with how far each lies below the best; returns how many."""
    some = len(present) > 0
    least, most = np.int64(2**62), np.int64(-(2**62))
    for i in range(len(steps)):
        if not some or present[i]:
            least, most = min(least, steps[i]), max(most, steps[i])
    if least > most:
        return 0
    shift = 0
    while (most - least) >> shift >= BUCKETS:
        shift += 1
    held = np.zeros(BUCKETS, np.int32)
    for i in range(len(steps)):
        if not some or present[i]:
            held[(most - steps[i]) >> shift] += 1
    bucket, total = 0, held[0]
    while total < k and bucket < BUCKETS - 1:
        bucket += 1
        total += held[bucket]
    farthest = ((bucket + 1) << shift) - 1
    count = 0
    for i in range(len(steps)):
        if most - steps[i] <= farthest and (not some or present[i]):
            kept[0, count] = most - steps[i]
            kept[1, count] = i
            count += 1
    return count


@njit(nogil=True, cache=True)
def _sort(kept, count):
    """Sort the first ``count`` rows by their distance, stably; returns which half of ``kept`` holds them."""
    farthest = np.uint32(0)
    for i in range(count):
        farthest = max(farthest, kept[0, 0, i])
    now, shift = 0, 0
    place = np.empty(1 << DIGIT, np.int32)
    while farthest >> shift:
        place[:] = 0
        for i in range(count):
            place[(kept[now, 0, i] >> shift) & ((1 << DIGIT) - 1)] += 1
        total = 0
        for digit in range(len(place)):
            total, place[digit] = total + place[digit], total
        for i in range(count):
            digit = (kept[now, 0, i] >> shift) & ((1 << DIGIT) - 1)
            kept[1 - now, 0, place[digit]] = kept[now, 0, i]
            kept[1 - now, 1, place[digit]] = kept[now, 1, i]
            place[digit] += 1
        now, shift = 1 - now, shift + DIGIT
    return now
