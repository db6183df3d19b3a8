"""Fused scoring in Triton (paper Eqs. 12-13): min-max, mixing and top-k of a segment in one pass over its scores.

A program owns one (slot, segment). Up to ``WHOLE`` units it holds the segment in registers: it reads both views once,
brings them to [0, 1], mixes them, writes the fused scores, and takes the best ``k`` one after another. A longer segment
is cut into chunks: the ends of the ranges first, for all of a segment has to be seen before any of it can be scaled,
then scores and the best of each chunk, then the best of those.

Units are ranked by one integer, their score in steps above their falling row number: ties go to the lowest row, on any
device. Products and sums are rounded one by one as PyTorch rounds them, so that the ranking is the definition's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GRADIENT = True  # of the operator that wraps it
WHOLE = 8192  # units that fit the registers of one program
CHUNK = 4096  # units of a longer segment that a program takes
SIZES = ["units", "segments", "chunks"]  # they change from bank to bank: no kernel of their own for 1, or for 16 n
MOST = 32  # the best are taken one by one: of more, a sort is faster

SCORE_STEP = tl.constexpr(1e-6)
STEPS_PER_ONE = tl.constexpr(1e6)
MAGIC = tl.constexpr(6755399441055744.0)  # 3 * 2^51: a double this large has no room for a fraction
FARTHEST = tl.constexpr(1073741824.0)  # 2^30 steps
LAST_ROW = tl.constexpr(2147483647)
NO_STEP = tl.constexpr(-2147483648)
NO_KEY = -(2**63)  # NO_STEP in the high half, 0 in the low one


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "float32, float16 or bfloat16 only"
    return f"k <= {MOST} only" if sizes.get("k", 0) > MOST else None


def fused_score(
    graph: Tensor,  # [slots, units]
    hierarchy: Tensor,  # [slots, units]
    graph_weight: Tensor,  # [slots, segments]
    bounds: Tensor,  # [segments + 1]
    bonus: Tensor | None,  # [slots, units], and so are the masks
    graph_there: Tensor | None,
    hierarchy_there: Tensor | None,
    admitted: Tensor | None,
    graph_contrast: float,
    hierarchy_contrast: float,
    k: int,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Fused scores in float32, ``[slots, units]``, and the best rows of each segment, ``[slots, segments, k]``."""
    slots, units = graph.shape
    segments = bounds.numel() - 1
    programs = slots * segments
    fused = torch.empty(slots, units, dtype=torch.float32, device=graph.device)
    rows = torch.full((slots, segments, k), -1, dtype=torch.int64, device=graph.device)
    if not programs or not longest:
        return fused, rows
    graph, hierarchy, graph_weight = graph.contiguous(), hierarchy.contiguous(), graph_weight.contiguous()
    masks = [None if m is None else m.contiguous().view(torch.uint8) for m in (graph_there, hierarchy_there, admitted)]
    given = (graph, hierarchy, graph_weight, bounds, None if bonus is None else bonus.contiguous(), *masks)
    powers = {
        "GRAPH_POWER": _whole_power(graph_contrast),
        "HIERARCHY_POWER": _whole_power(hierarchy_contrast),
        "graph_contrast": graph_contrast,
        "hierarchy_contrast": hierarchy_contrast,
    }
    if longest <= WHOLE:
        block = max(128, triton.next_power_of_2(longest))
        options = {"BLOCK": block, "num_warps": warps(block), "enable_fp_fusion": False}
        _score_whole[(programs,)](*given, fused, rows, units, segments, K=k, **powers, **options)
        return fused, rows
    options = {"BLOCK": CHUNK, "num_warps": warps(CHUNK), "enable_fp_fusion": False}
    chunks = triton.cdiv(longest, CHUNK)
    ends = torch.empty(programs, chunks, 4, dtype=torch.float32, device=graph.device)
    keys = torch.empty(programs, chunks, k, dtype=torch.int64, device=graph.device)
    _find_ends[(programs, chunks)](*given[:2], bounds, *masks[:2], ends, units, segments, **options)
    _score_chunk[(programs, chunks)](*given, ends, fused, keys, units, segments, chunks, K=k, **powers, **options)
    best = keys.view(programs, chunks * k).topk(k, dim=1).values
    return fused, torch.where(best > NO_KEY, LAST_ROW.value - (best & 0xFFFFFFFF), -1).view(rows.shape)


def warps(block: int) -> int:
    """Eight units a thread, sixteen in the largest block: both fit its registers."""
    return min(16, max(1, block // 256))


def _whole_power(contrast: float) -> int:
    """A contrast that can be multiplied out, as the definition does; 0: it cannot."""
    return int(contrast) if contrast == int(contrast) and 0 < contrast <= 64 else 0


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _score_whole(  # type: ignore[no-untyped-def]
    graph, hierarchy, weight, bounds, bonus, graph_there, hierarchy_there, admitted, fused, rows, units, segments,
    graph_contrast, hierarchy_contrast,
    K: tl.constexpr, GRAPH_POWER: tl.constexpr, HIERARCHY_POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    first, inside, place = _stretch(bounds, program, units, segments, 0, BLOCK)
    values, there = _view(graph, graph_there, place, inside)
    least, most = _ends(values, there)
    of_graph = _raised(_scaled(values, there, least, most), graph_contrast, GRAPH_POWER)
    values, there = _view(hierarchy, hierarchy_there, place, inside)
    least, most = _ends(values, there)
    of_hierarchy = _raised(_scaled(values, there, least, most), hierarchy_contrast, HIERARCHY_POWER)
    steps = _mixed(of_graph, of_hierarchy, weight + program, bonus, admitted, fused, place, inside)
    lane = tl.arange(0, BLOCK)
    for rank in range(K):
        best, at = _best(steps, lane)
        tl.store(rows + program * K + rank, tl.where(best > NO_STEP, first + at, -1))
        steps = tl.where(lane == at, NO_STEP, steps)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _find_ends(  # type: ignore[no-untyped-def]
    graph, hierarchy, bounds, graph_there, hierarchy_there, ends, units, segments, BLOCK: tl.constexpr
):
    """Least and most of each view in one chunk: infinite where it holds nothing."""
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, inside, place = _stretch(bounds, program, units, segments, chunk, BLOCK)
    out = ends + (program * tl.num_programs(1) + chunk) * 4
    values, there = _view(graph, graph_there, place, inside)
    least, most = _ends(values, there)
    tl.store(out, least)
    tl.store(out + 1, most)
    values, there = _view(hierarchy, hierarchy_there, place, inside)
    least, most = _ends(values, there)
    tl.store(out + 2, least)
    tl.store(out + 3, most)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _score_chunk(  # type: ignore[no-untyped-def]
    graph, hierarchy, weight, bounds, bonus, graph_there, hierarchy_there, admitted, ends, fused, keys, units, segments,
    chunks, graph_contrast, hierarchy_contrast,
    K: tl.constexpr, GRAPH_POWER: tl.constexpr, HIERARCHY_POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of one chunk, and the keys of its best: steps in the high half, the falling row number in the low one."""
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, inside, place = _stretch(bounds, program, units, segments, chunk, BLOCK)
    found = ends + program * chunks * 4
    least, most = _all_ends(found, chunks)
    values, there = _view(graph, graph_there, place, inside)
    of_graph = _raised(_scaled(values, there, least, most), graph_contrast, GRAPH_POWER)
    least, most = _all_ends(found + 2, chunks)
    values, there = _view(hierarchy, hierarchy_there, place, inside)
    of_hierarchy = _raised(_scaled(values, there, least, most), hierarchy_contrast, HIERARCHY_POWER)
    steps = _mixed(of_graph, of_hierarchy, weight + program, bonus, admitted, fused, place, inside)
    lane = tl.arange(0, BLOCK)
    for rank in range(K):
        best, at = _best(steps, lane)
        low = tl.where(best > NO_STEP, LAST_ROW - (first + at), 0)
        tl.store(keys + (program * chunks + chunk) * K + rank, best.to(tl.int64) * 4294967296 + low)
        steps = tl.where(lane == at, NO_STEP, steps)


@triton.jit  # type: ignore[untyped-decorator]
def _stretch(bounds, program, units, segments, chunk, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk's first row, which of the lanes it fills, and where a row of scores has them."""
    segment = program % segments
    first = tl.load(bounds + segment) + chunk * BLOCK
    inside = tl.arange(0, BLOCK) < tl.load(bounds + segment + 1) - first
    return first, inside, program // segments * units + first


@triton.jit
def _load(values, place, inside):  # type: ignore[no-untyped-def]
    # the long offset is one number of the program: lanes add a short one to it
    return tl.load(values + place + tl.arange(0, inside.shape[0]), mask=inside, other=0)


@triton.jit
def _view(values, mask, place, inside):  # type: ignore[no-untyped-def]
    """A view's scores, and which units it returned."""
    if mask is not None:
        inside = inside & (_load(mask, place, inside) != 0)
    return _load(values, place, inside).to(tl.float32), inside


@triton.jit
def _ends(values, there):  # type: ignore[no-untyped-def]
    return tl.min(tl.where(there, values, float("inf")), 0), tl.max(tl.where(there, values, float("-inf")), 0)


@triton.jit
def _all_ends(found, chunks):  # type: ignore[no-untyped-def]
    least, most = float("inf"), float("-inf")
    for chunk in range(chunks):
        least = tl.minimum(least, tl.load(found + chunk * 4))
        most = tl.maximum(most, tl.load(found + chunk * 4 + 1))
    return least, most


@triton.jit
def _scaled(values, there, least, most):  # type: ignore[no-untyped-def]
    """Eq. 12: absent -> 0, all equal -> 1."""
    span = most - least
    flat = ~(span > SCORE_STEP)
    scaled = tl.div_rn(values - tl.where(flat, 0.0, least), tl.where(flat, 1.0, span))
    return tl.where(there, tl.where(flat, 1.0, scaled), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _raised(scores, contrast, POWER: tl.constexpr):  # type: ignore[no-untyped-def]
    if POWER == 0:
        product = tl.where(scores > 0, tl.exp2(contrast * tl.log2(tl.where(scores > 0, scores, 1.0))), 0.0)
    else:
        product = tl.full(scores.shape, 1.0, tl.float32)
        for bit in tl.static_range(7):
            if (POWER >> bit) & 1:
                product = product * scores
            if POWER >> (bit + 1):
                scores = scores * scores
    return product


@triton.jit
def _mixed(of_graph, of_hierarchy, weight, bonus, admitted, fused, place, inside):  # type: ignore[no-untyped-def]
    """Eq. 13: write the fused scores; returns them in whole steps, by which their units are ranked."""
    rho = tl.load(weight).to(tl.float32)
    scores = rho * of_graph + (1 - rho) * of_hierarchy
    if bonus is not None:
        scores += _load(bonus, place, inside).to(tl.float32)
    tl.store(fused + place + tl.arange(0, inside.shape[0]), scores, mask=inside)
    # a product with 10^6 has no more bits than a double, so rounding it is rounding the definition's quotient
    steps = tl.minimum(tl.maximum(scores.to(tl.float64) * STEPS_PER_ONE, -FARTHEST), FARTHEST)
    if admitted is not None:
        inside = inside & (_load(admitted, place, inside) != 0)
    return tl.where(inside, ((steps + MAGIC) - MAGIC).to(tl.int32), NO_STEP)


@triton.jit
def _best(steps, lane):  # type: ignore[no-untyped-def]
    """The most steps, and the first lane that has them."""
    best = tl.max(steps, 0)
    return best, tl.min(tl.where(steps == best, lane, 2147483647), 0)
