"""Late interaction on the CPU, from token states to the scores of turns and of windows.

The twin of `LateInteraction`. Query tokens that weigh something are packed into panels of sixteen columns, the lanes of
a vector register, whichever query they are of. A job takes as many queries as fill a few panels through all units that
they are compared with: states of a unit are widened to float32 in the cache, eight tokens at a time meet a panel, and
only the best match of each column is kept, so that no similarity of a token is ever written. What a job found is then
weighed and summed by turn and by window while it is in the cache. A query's result does not depend on the others.
"""

# What numba compiles has no annotations, and an intrinsic is called with other arguments than it is made of.
# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-unreachable, disable-error-code="call-arg, var-annotated"

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

LANES = 16  # columns of a panel
ROWS = 8  # tokens that meet a panel at once: as many sums stay in registers
PANELS = 4  # that a job fills, more if one query alone has more columns


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    return None if dtype == torch.float32 else "float32 queries only"


def late_interaction(
    queries: Tensor,  # [slots, memories, query_tokens, dim] float32
    weights: Tensor,  # [slots, memories, query_tokens]
    values: Sequence[Tensor],  # of each memory: [tokens, dim] float32, float16 or int8
    scale: Sequence[Tensor | None],  # [tokens], of int8
    starts: Sequence[int],  # which token of all is the first of those
    state_ptr: Tensor,  # [units + 1]
    units: tuple[int, ...],  # units of memory m: units[m] to units[m + 1]
    windows: tuple[int, ...],
    member_window: Tensor,  # [members], ascending
    member_unit: Tensor,  # [members]
    candidates: Tensor,  # [slots, memories, k] units, -1 behind the last
    exhaustive: int,  # units up to which a memory is compared whole
    step: float,  # matches that span less tell nothing,
    faint: float,  # and those that span less than this count as if they did
) -> tuple[Tensor, Tensor]:
    """Scores of turns and of the best window of each, ``[slots, units]``, as `LateInteraction` returns them."""
    slots, memories, _, dim = queries.shape
    turn = torch.zeros(slots, units[-1])
    window = torch.zeros(slots, units[-1])
    weight = weights.detach().float().contiguous().numpy()
    columns = (weight > 0).sum(-1)
    sizes = np.diff(np.array(units))
    whole = sizes <= exhaustive
    jobs = [
        (memory, *group)
        for memory in range(memories)
        for group in _groups(columns[:, memory], PANELS * LANES if whole[memory] else 1)
    ]
    if not jobs:
        return turn, window
    ptr = state_ptr.long().numpy()
    kept = [
        (_bits(own), np.empty(0, np.float32) if by is None else by.float().numpy(), ptr - start if start else ptr)
        for own, by, start in zip(values, scale, starts, strict=True)
    ]
    held = torch.bincount(member_window, minlength=windows[-1]).cumsum(0).numpy()
    asked = queries.detach().contiguous().numpy(), weight
    shared = (
        np.array(units),
        np.array(windows),
        np.concatenate([np.zeros(1, np.int64), held]),
        member_unit.long().numpy(),
        candidates.long().contiguous().numpy(),
        whole,
        step,
        faint,
        turn.numpy(),
        window.numpy(),
    )
    most = -(-max(PANELS * LANES, int(columns.max())) // LANES)
    rows = max(int(sizes[whole].max(initial=0)), candidates.shape[2])
    longest = int(np.diff(ptr).max(initial=0))

    def run(some: list[tuple[int, int, int]]) -> None:
        # PyTorch's memory is aligned to cache lines, numpy's is not
        panels = torch.empty(most, dim, LANES).numpy()
        best = torch.empty(rows, most * LANES).numpy()
        states = torch.empty(longest, dim).numpy()
        place = np.full(sizes.max(), -1)
        for memory, own in groupby(some, itemgetter(0)):
            _late_interaction(np.array(list(own)), *asked, *kept[memory], *shared, panels, best, states, place)

    workers = min(len(jobs), torch.get_num_threads())
    if workers == 1:
        run(jobs)
    else:
        with ThreadPoolExecutor(workers) as pool:
            parts = min(len(jobs), 8 * workers)
            list(pool.map(run, [jobs[len(jobs) * p // parts : len(jobs) * (p + 1) // parts] for p in range(parts)]))
    return turn, window


def _bits(values: Tensor) -> Any:
    """numba knows no half precision numbers: they come as the integers with their bits."""
    return values.detach().view(torch.uint16).numpy() if values.dtype == torch.float16 else values.detach().numpy()


def _groups(columns: Any, room: int) -> list[tuple[int, int]]:
    """Stretches of slots with as many columns as there is room for, or one slot; slots without any are left out."""
    groups: list[tuple[int, int]] = []
    first = held = 0
    for slot, count in enumerate(columns.tolist()):
        if held and held + count > room:
            groups.append((first, slot))
            held = 0
        if not held:
            first = slot
        held += count
    return [*groups, (first, len(columns))] if held else groups


@intrinsic
def widened(typing: Any, number: Any) -> Any:
    """A stored number as a float32; an unsigned integer holds the bits of one in half precision."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if number == types.uint16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return context.cast(builder, args[0], number, types.float32)

    return types.float32(number), emit


@intrinsic
def keep_best(typing: Any, states: Any, row: Any, last: Any, panel: Any, number: Any, best: Any, unit: Any) -> Any:
    """``best[unit, panel] = max(itself, <states[j], column>)`` over the tokens ``row <= j < min(row + 8, last)``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        states, panels, best = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 3, 5))
        row, last, number, unit = args[1], args[2], args[4], args[6]
        dim = builder.extract_value(states.shape, 1)
        vector = ir.VectorType(ir.FloatType(), LANES)
        align = 4

        def at(base: Any, place: Any) -> Any:
            return builder.bitcast(builder.gep(base, [place]), vector.as_pointer())

        end = builder.sub(last, ir.Constant(last.type, 1))
        starts = []
        for r in range(ROWS):  # the last token stands in for those behind it
            own = builder.add(row, ir.Constant(row.type, r))
            own = builder.select(builder.icmp_signed("<", own, end), own, end)
            starts.append(builder.gep(states.data, [builder.mul(own, dim)]))
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES)) for _ in range(ROWS)]
        for total in sums:
            builder.store(ir.Constant(vector, [0.0] * LANES), total)
        panel = builder.gep(panels.data, [builder.mul(builder.mul(number, dim), ir.Constant(dim.type, LANES))])
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        with cgutils.for_range(builder, dim) as loop:
            columns = builder.load(at(panel, builder.mul(loop.index, ir.Constant(dim.type, LANES))))
            columns.align = align
            for start, total in zip(starts, sums, strict=True):
                state = builder.load(builder.gep(start, [loop.index]))
                lane = builder.insert_element(undefined, state, ir.Constant(ir.IntType(32), 0))
                product = builder.fmul(builder.shuffle_vector(lane, undefined, zeros), columns, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        width = builder.extract_value(best.shape, 1)
        place = builder.add(builder.mul(unit, width), builder.mul(number, ir.Constant(number.type, LANES)))
        most = builder.load(at(best.data, place))
        most.align = align
        for total in sums:
            found = builder.load(total)
            most = builder.select(builder.fcmp_ordered(">", found, most), found, most)
        builder.store(most, at(best.data, place)).align = align
        return context.get_dummy_value()

    integer = types.intp
    return types.void(states, integer, integer, panel, integer, best, integer), emit


@njit(nogil=True, cache=True)
def _late_interaction(
    jobs, queries, weights, values, scale, ptr, units, windows, members, member_unit, candidates, whole, step, faint,
    turn, window, panels, best, states, place,
):  # fmt: skip
    share = np.empty(panels.shape[0] * panels.shape[2], np.float32)
    for j in range(len(jobs)):
        memory, first, last = jobs[j]
        start, stop = units[memory], units[memory + 1]
        columns = _lay_out(queries, weights, memory, first, last, panels, share)
        compared = np.arange(start, stop)
        if not whole[memory]:
            compared = candidates[first, memory]
            compared = compared[compared >= 0]
        _match(compared, values, scale, ptr, panels, columns, best, states)
        for r in range(len(compared)):
            place[compared[r] - start] = r
        column = 0
        for slot in range(first, last):
            count = 0
            for t in range(weights.shape[2]):
                count += weights[slot, memory, t] > 0
            own = best[: len(compared), column : column + count]
            held = share[column : column + count]
            _turns(turn[slot], compared, own, held, len(compared) == stop - start, step, faint)
            _windows(window[slot], own, held, windows[memory], windows[memory + 1], members, member_unit, start, place)
            column += count
        for r in range(len(compared)):
            place[compared[r] - start] = -1


@njit(nogil=True, cache=True)
def _lay_out(queries, weights, memory, first, last, panels, share):
    """The columns of some queries in panels, and the share each has of its query; returns how many there are."""
    column = 0
    for slot in range(first, last):
        total = np.float32(0)
        begin = column
        for t in range(weights.shape[2]):
            weight = weights[slot, memory, t]
            if weight > 0:
                panel, lane = column // panels.shape[2], column % panels.shape[2]
                for d in range(panels.shape[1]):
                    panels[panel, d, lane] = queries[slot, memory, t, d]
                share[column] = weight
                total += weight
                column += 1
        share[begin:column] /= max(total, np.float32(1e-9))
    # spare lanes are computed with as well: what lies there by chance could be slow to
    for spare in range(column, -(-column // panels.shape[2]) * panels.shape[2]):
        panels[spare // panels.shape[2], :, spare % panels.shape[2]] = 0
    return column


@njit(nogil=True, cache=True)
def _match(compared, values, scale, ptr, panels, columns, best, states):
    """Best match of every column in every unit that is compared; 0 where a unit has no token, or none agrees."""
    used = -(-columns // panels.shape[2])
    for r in range(len(compared)):
        best[r, : used * panels.shape[2]] = 0
        first, tokens = ptr[compared[r]], ptr[compared[r] + 1] - ptr[compared[r]]
        _widen(values, scale, first, tokens, states)
        for panel in range(used):
            for row in range(0, tokens, ROWS):
                keep_best(states, row, tokens, panels, panel, best, r)


@njit(nogil=True, cache=True)
def _widen(values, scale, first, tokens, states):
    for j in range(tokens):
        factor = scale[first + j] if len(scale) else np.float32(1)
        for d in range(values.shape[1]):
            states[j, d] = widened(values[first + j, d]) * factor


@njit(nogil=True, cache=True)
def _turns(turn, compared, best, share, complete, step, faint):
    """Each column's matches are brought to [0, 1] over the memory before they are weighed and summed."""
    least = np.empty(len(share), np.float32)
    factor = np.empty(len(share), np.float32)
    for c in range(len(share)):
        low = best[0, c] if complete and len(compared) else np.float32(0)
        high = np.float32(0)
        for r in range(len(compared)):
            low = min(low, best[r, c])
            high = max(high, best[r, c])
        span = high - low
        least[c] = low
        factor[c] = share[c] / max(span, np.float32(faint)) if span > np.float32(step) else np.float32(0)
    for r in range(len(compared)):
        total = np.float32(0)
        for c in range(len(share)):
            total += (best[r, c] - least[c]) * factor[c]
        turn[compared[r]] = total


@njit(nogil=True, cache=True)
def _windows(window, best, share, first, last, members, member_unit, start, place):
    """A window matches a column as its best unit does; a unit gets the best of its windows."""
    for w in range(first, last):
        total = np.float32(0)
        for c in range(len(share)):
            most = np.float32(0)
            for m in range(members[w], members[w + 1]):
                r = place[member_unit[m] - start]
                if r >= 0:
                    most = max(most, best[r, c])
            total += most * share[c]
        for m in range(members[w], members[w + 1]):
            window[member_unit[m]] = max(window[member_unit[m]], total)
