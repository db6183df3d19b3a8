"""Min-max and the best rows of each segment on the CPU.

`minmax` is the twin of `segment_minmax`: two looks at a segment while it is in the cache, in the arithmetic of the
definition.

`topk` is the twin of `segment_topk`, without a sort of all scores. They become whole steps; a histogram of them says
down to which bucket the best ``k`` lie; only rows of those buckets are kept, in their order, and sorted by counting
digits, which keeps equal ones in it. A heap of the best is no faster, whatever ``k``.
"""

# What numba compiles has no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-unreachable

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

INLINE = 1 << 15  # scores up to which a second thread would cost more than it brings
BUCKETS, SMALL_BUCKETS = 1 << 11, 1 << 8
SMALL = 1 << 11  # rows that fewer buckets do for
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

    _in_parts(run, slots, scores.numel())
    return out


def minmax(
    values: Tensor,  # [slots, rows]
    ptr: tuple[int, ...],  # rows of segment m: ptr[m] to ptr[m + 1]
    present: Tensor | None,  # [slots, rows]
    step: float,  # rows that span no more than this are equal
) -> Tensor:
    """Values of the present rows brought to [0, 1] in each segment, 1 where all are equal, 0 where none is present."""
    given = values.detach().contiguous()
    out = torch.empty_like(given)
    held = torch.ones(0, 0, dtype=torch.bool) if present is None else present.contiguous()
    arrays = given.numpy(), np.array(ptr), held.numpy(), out.numpy(), step
    _in_parts(partial(_minmax, *arrays), len(given), given.numel())
    return out


def _in_parts(run: Callable[[int, int], None], slots: int, size: int) -> None:
    """Run it over all slots, a stretch of them a thread where there is enough to do."""
    workers = min(slots, torch.get_num_threads()) if size > INLINE else 1
    if workers <= 1:
        run(0, slots)
        return
    edges = [slots * part // workers for part in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, edges[:-1], edges[1:]))


@njit(nogil=True, cache=True)
def _minmax(values, ptr, present, out, step, first, last):
    one, zero = values.dtype.type(1), values.dtype.type(0)
    for slot in range(first, last):
        for m in range(len(ptr) - 1):
            own, to = values[slot, ptr[m] : ptr[m + 1]], out[slot, ptr[m] : ptr[m + 1]]
            if len(present):
                there = present[slot, ptr[m] : ptr[m + 1]]
                least, most = values.dtype.type(np.inf), values.dtype.type(-np.inf)
                for i in range(len(own)):
                    if there[i]:
                        least, most = min(least, own[i]), max(most, own[i])
                span = most - least
                for i in range(len(own)):
                    if not there[i]:
                        to[i] = zero
                    elif span > step:
                        to[i] = (own[i] - least) / span
                    else:
                        to[i] = one
            elif len(own):
                least, most = own[0], own[0]
                for i in range(1, len(own)):
                    least = own[i] if own[i] < least else least
                    most = own[i] if own[i] > most else most
                span = most - least
                if span > step:
                    for i in range(len(own)):
                        to[i] = (own[i] - least) / span
                else:
                    for i in range(len(own)):
                        to[i] = one


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
    buckets = SMALL_BUCKETS if len(steps) <= SMALL else BUCKETS
    shift = 0
    while (most - least) >> shift >= buckets:
        shift += 1
    held = np.zeros(buckets, np.int32)
    for i in range(len(steps)):
        if not some or present[i]:
            held[(most - steps[i]) >> shift] += 1
    bucket, total = 0, held[0]
    while total < k and bucket < buckets - 1:
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
