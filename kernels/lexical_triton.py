"""BM25 on a GPU: one program a block of postings of one term that one query asks for, added up by int32 atomics.

Integers come to the same sum in any order, so atomics cost no reproducibility. The product of two float32 is exact in
float64, which leaves the compiler no choice of how to round it either.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # postings of one program


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
    sums = torch.zeros(len(step), rows, dtype=torch.int32, device=step.device)
    grid = (len(term), triton.cdiv(longest, BLOCK))
    if all(grid) and rows:
        scatter[grid](slot, term, weight.detach(), ptr, row, impact.detach(), sums, rows, BLOCK=BLOCK, num_warps=4)
    return sums * step[:, None]


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]  # changes from bank to bank
def scatter(slot, term, weight, ptr, row, impact, sums, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = tl.program_id(0)
    own = tl.load(term + entry)
    first = tl.load(ptr + own) + tl.program_id(1) * BLOCK
    last = tl.load(ptr + own + 1)
    if first < last:
        place = first + tl.arange(0, BLOCK)
        there = place < last
        product = tl.load(weight + entry) * tl.load(impact + place, mask=there, other=0.0).to(tl.float64)
        # rows of a slot may lie beyond what 32 bits number
        to = tl.load(slot + entry).to(tl.int64) * rows + tl.load(row + place, mask=there, other=0)
        tl.atomic_add(sums + to, tl.floor(product + 0.5).to(tl.int32), mask=there, sem="relaxed")
