"""BM25 on the CPU: a query's terms are scattered into one row of scores, which stays in the cache while it is ranked.

Integers are summed, so the order of terms does not matter and any number of threads gives the same bits. Threads share
out the slots; numba's own threading layer, which survives neither threads nor a fork, is not used.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

WORTH_A_THREAD = 200_000  # nanoseconds, about: less is done before another thread has begun


def refuses(device: torch.device, dtype: torch.dtype, sizes: Any) -> str | None:
    return None if dtype == torch.float32 else f"float32 only, not {dtype}"


def scores(
    slot: Tensor,  # [asked] int64
    term: Tensor,  # [asked] int64
    weight: Tensor,  # [asked] float64, in steps of the slot
    ptr: Tensor,  # [terms + 1] int64
    row: Tensor,  # [postings] int64
    impact: Tensor,  # [postings] float32
    longest: int,  # postings of a term, at most
    step: Tensor,  # [slots] float32
    rows: int,
) -> Tensor:  # [slots, rows] float32
    """``step(s) * sum_t floor(weight(t, s) * impact(t, d) + 1/2)``."""
    out = torch.empty(len(step), rows)
    given = _given(slot, term, weight, ptr, row, impact, len(step))

    def part(first: int, last: int) -> None:  # sums and scores share their bytes
        _scores(first, last, given, step.numpy(), out.numpy().view(np.int32), out.numpy())

    _share_out(part, len(step), rows // 2)
    return out


def best(
    slot: Tensor,
    term: Tensor,
    weight: Tensor,
    ptr: Tensor,
    row: Tensor,
    impact: Tensor,
    longest: int,
    step: Tensor,
    segments: Tensor,  # [segments + 1] int64: where each begins, and where the last one ends
    k: int,
) -> tuple[Tensor, Tensor]:  # [slots, segments, k] float32 and int64
    """The ``k`` highest of the same scores in each segment, and their rows; equal ones by row; 0 and -1 for none."""
    value = torch.zeros(len(step), len(segments) - 1, k)
    found = torch.full(value.shape, -1)
    given = _given(slot, term, weight, ptr, row, impact, len(step))

    def part(first: int, last: int) -> None:
        _best(first, last, given, step.numpy(), segments.numpy(), value.numpy(), found.numpy())

    if k:
        _share_out(part, len(step), 4000 + int(segments[-1]))
    return value, found


def _given(
    slot: Tensor, term: Tensor, weight: Tensor, ptr: Tensor, row: Tensor, impact: Tensor, slots: int
) -> tuple[Any, ...]:
    """What is asked, by slot, and the postings, as arrays."""
    arrays = (term, weight.detach(), ptr, row, impact.detach())
    return (*_by_slot(slot.numpy(), slots), *(tensor.contiguous().numpy() for tensor in arrays))


def _share_out(part: Callable[[int, int], None], slots: int, each: int) -> None:
    """Call ``part`` on stretches of slots that take ``each`` nanoseconds. This thread takes some too, so that a busy
    machine costs no waiting."""
    helpers = min(torch.get_num_threads(), slots, slots * each // WORTH_A_THREAD) - 1
    if helpers < 1:
        part(0, slots)
        return
    size = max(1, slots // (8 * helpers + 8))  # some queries take longer than others
    starts = iter(range(0, slots, size))

    def take() -> None:
        for start in starts:
            part(start, min(start + size, slots))

    with ThreadPoolExecutor(helpers) as pool:
        others = [pool.submit(take) for _ in range(helpers)]
        take()
    for other in others:
        other.result()  # raises what was raised there


@njit(nogil=True, cache=True)
def _by_slot(slot: Any, slots: int) -> Any:
    """Entries sorted by slot, and where those of each slot begin."""
    bounds = np.zeros(slots + 1, np.int64)
    for s in slot:
        bounds[s + 1] += 1
    for s in range(slots):
        bounds[s + 1] += bounds[s]
    free = bounds[:-1].copy()
    asked = np.empty(len(slot), np.int64)
    for entry in range(len(slot)):
        asked[free[slot[entry]]] = entry
        free[slot[entry]] += 1
    return asked, bounds


@njit(nogil=True, cache=True)
def _scatter(s: int, given: Any, sums: Any) -> None:
    """The sums of one slot, in steps. Unsigned indices spare a test for negative ones in the innermost loop."""
    asked, bounds, term, weight, ptr, row, impact = given
    sums[:] = 0
    for place in range(bounds[s], bounds[s + 1]):
        entry = asked[place]
        t, w = term[entry], weight[entry]
        for p in range(np.uint64(ptr[t]), np.uint64(ptr[t + 1])):
            sums[np.uint64(row[p])] += np.int32(np.floor(w * np.float64(impact[p]) + 0.5))


@njit(nogil=True, cache=True)
def _scores(first: int, last: int, given: Any, step: Any, sums: Any, out: Any) -> None:
    for s in range(first, last):
        _scatter(s, given, sums[s])
        for i in range(out.shape[1]):
            out[s, i] = np.float32(sums[s, i]) * step[s]


@njit(nogil=True, cache=True)
def _best(first: int, last: int, given: Any, step: Any, segments: Any, value: Any, found: Any) -> None:
    k = value.shape[2]
    sums = np.empty(segments[-1], np.int32)
    keys = np.empty(segments[-1], np.int64)
    for s in range(first, last):
        _scatter(s, given, sums)
        for i in range(len(sums)):
            sums[i] = np.int32(np.float32(sums[i]))  # what is equal as a score is equal
        for m in range(len(segments) - 1):
            start = segments[m]
            own = sums[start : segments[m + 1]]
            held = _top_of_many(own, k, keys) if len(own) > MANY else _top(own, k, keys)
            for i in range(held):
                value[s, m, i] = np.float32(keys[i] >> 32) * step[s]
                found[s, m, i] = start + (_LAST_ROW - (keys[i] & 0xFFFFFFFF))


_LAST_ROW = 0x7FFFFFFF
_LOWEST = -0x80000000
BUCKETS = 1 << 9
MANY = 1 << 11


@njit(nogil=True, cache=True)
def _top(sums: Any, k: int, keys: Any) -> int:
    """Keys of the ``k`` highest sums, in order, to the front of ``keys``; returns how many there are.

    A key is a sum and, in its lower half, the row from the end. A histogram says down to which bucket the ``k`` highest
    lie; only what is in those buckets is sorted. Most rows hold no term, and of those with the lowest sum of all the
    first ``k`` are enough.
    """
    least, most = np.int64(2**62), np.int64(-(2**62))
    for one in sums:
        least, most = min(least, np.int64(one)), max(most, np.int64(one))
    shift = 0
    while (most - least) >> shift >= BUCKETS:
        shift += 1
    counts = np.zeros(BUCKETS, np.int32)
    for one in sums:
        counts[np.uint64((most - np.int64(one)) >> shift)] += 1
    bucket, total = 0, counts[0]
    while total < k and bucket < BUCKETS - 1:
        bucket += 1
        total += counts[bucket]
    bar = most - (((bucket + 1) << shift) - 1)
    held = ties = 0
    for i in range(len(sums)):
        if sums[i] >= bar:
            lowest = sums[i] == least
            if lowest and ties >= k:
                continue
            ties += lowest
            keys[held] = (np.int64(sums[i]) << 32) | (_LAST_ROW - i)
            held += 1
    _order(keys, held, min(k, held))
    return min(k, held)


@njit(nogil=True, cache=True)
def _top_of_many(sums: Any, k: int, keys: Any) -> int:
    """`_top` of so many rows that most are never looked at one by one: where ``k`` blocks of them hold something as
    high as ``bar``, what is below it is not among the ``k`` highest."""
    size = max(1, len(sums) // (2 * k))
    blocks = len(sums) // size
    bar = np.int64(_LOWEST)
    peaks = np.empty(blocks, np.int64)
    for b in range(blocks):
        block = sums[b * size : (b + 1) * size]
        peak = np.int64(_LOWEST)
        for i in range(len(block)):
            peak = max(peak, np.int64(block[i]))
        peaks[b] = keys[b] = peak
    if blocks >= k:
        _order(keys, blocks, k)
        bar = keys[k - 1]
    held = ties = 0
    for b in range(blocks + 1):
        if b < blocks and peaks[b] < bar:
            continue
        block = sums[b * size : (b + 1) * size]
        for i in range(len(block)):
            if block[i] > bar or (block[i] == bar and ties < k):
                ties += block[i] == bar
                keys[held] = (np.int64(block[i]) << 32) | (_LAST_ROW - (b * size + i))
                held += 1
    _order(keys, held, min(k, held))
    return min(k, held)


@njit(nogil=True, cache=True)
def _order(keys: Any, count: int, k: int) -> None:
    """The ``k`` highest of the first ``count`` keys to the front, highest first: quicksort of the parts that matter."""
    begins, ends, waiting = np.empty(64, np.int64), np.empty(64, np.int64), 0
    low, high = 0, count - 1
    while True:
        while high - low >= 16:
            a, b, c = keys[low], keys[(low + high) >> 1], keys[high]
            pivot = max(min(a, b), min(max(a, b), c))
            i, j = low, high
            while i <= j:
                while keys[i] > pivot:
                    i += 1
                while keys[j] < pivot:
                    j -= 1
                if i <= j:
                    keys[i], keys[j] = keys[j], keys[i]
                    i += 1
                    j -= 1
            if i < k:
                begins[waiting], ends[waiting] = i, high
                waiting += 1
            high = j
        for place in range(low + 1, high + 1):
            key = keys[place]
            while place > low and keys[place - 1] < key:
                keys[place] = keys[place - 1]
                place -= 1
            keys[place] = key
        if not waiting:
            return
        waiting -= 1
        low, high = begins[waiting], ends[waiting]
