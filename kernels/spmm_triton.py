"""Sparse times dense in Triton: a program takes one stretch of a row and a tile of 32 columns.

Rows are at most ``LIMIT`` entries long to a program; a hub's row is split and its parts are added in their order, so a
result does not depend on when which program ran. Nothing here waits for the host: how many parts there are is bounded
by counts that the host knows, and programs beyond the last part do nothing.

Sums are float32, or float64 for float64 factors.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GRADIENT = True  # the product that calls it has one, written with it
LIMIT = 256  # entries of a row that one program adds up
TILE, ENTRIES = 32, 8  # columns, and entries that are loaded at a time


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    return None if dtype in (torch.float32, torch.float64) else "float32 or float64 only"


def prepare(crow: Tensor, col: Tensor, val: Tensor) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The function ``product(dense, scale, plus) = plus + scale * (A @ dense)``, for ``A`` in CSR form."""
    rows, entries = crow.numel() - 1, col.numel()
    chunk_row, chunk_first, long_row = _plan(crow, entries)
    narrow, weight = col.int(), val.contiguous()

    def product(dense: Tensor, scale: Tensor | None, plus: Tensor | None) -> Tensor:
        columns = dense.shape[1]
        dense = dense.contiguous()
        out = dense.new_empty(rows, columns)
        if not out.numel():
            return out
        scaled = scale is not None and plus is not None
        # a pointer is needed even where nothing is read
        by, added = (scale.contiguous(), plus.contiguous()) if scaled else (out, out)  # type: ignore[union-attr]
        sums = torch.float64 if dense.dtype == torch.float64 else torch.float32
        parts = torch.empty(max(1, entries // LIMIT), columns, dtype=sums, device=dense.device)
        tiles = triton.cdiv(columns, TILE)
        shared: dict[str, Any] = {
            "SCALED": scaled, "TILE": TILE, "num_warps": 1, "enable_fp_fusion": True,
        }  # fmt: skip
        _rows[(len(chunk_row), tiles)](
            crow, narrow, weight, dense, by, added, out, parts, chunk_row, chunk_first, columns,
            LIMIT=LIMIT, ENTRIES=ENTRIES, **shared,
        )  # fmt: skip
        if len(long_row):
            _join[(len(long_row), tiles)](by, added, out, parts, long_row, chunk_first, columns, **shared)
        return out

    return product


def _plan(crow: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """The row of each chunk (-1 behind the last), the first chunk of each row, and the rows of several (-1 likewise).

    A row of n entries has at most 1 + n // LIMIT chunks, which bounds all three without reading anything back.
    """
    rows, device = crow.numel() - 1, crow.device
    chunks = ((crow.diff() + LIMIT - 1) // LIMIT).clamp(min=1)
    first = torch.cat([chunks.new_zeros(1), chunks.cumsum(0)])
    row = torch.searchsorted(first, torch.arange(rows + entries // LIMIT, device=device), right=True) - 1
    several = chunks > 1
    most = entries // LIMIT
    place = torch.where(several, several.cumsum(0) - 1, most)
    long_row = torch.full((most + 1,), -1, dtype=torch.int32, device=device)
    long_row.scatter_(0, place, torch.arange(rows, dtype=torch.int32, device=device))
    return torch.where(row < rows, row, -1).int(), first.int(), long_row[:most]


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    crow,
    col,
    val,
    dense,
    scale,
    plus,
    out,
    parts,
    chunk_row,
    chunk_first,
    columns,
    LIMIT: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
):
    """A chunk of a row: to ``out`` where it is the row's first, else to ``parts``."""
    chunk = tl.program_id(0)
    row = tl.load(chunk_row + chunk)
    if row >= 0:
        first = tl.load(chunk_first + row)
        start = tl.load(crow + row).to(tl.int32) + (chunk - first) * LIMIT
        stop = tl.minimum(start + LIMIT, tl.load(crow + row + 1).to(tl.int32))
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        there = column < columns
        total = tl.zeros((TILE,), parts.dtype.element_ty)
        for entry in range(start, stop, ENTRIES):
            place = entry + tl.arange(0, ENTRIES)
            held = place < stop
            source = tl.load(col + place, mask=held, other=0).to(tl.int64)  # rows times columns may pass 2^31
            weight = tl.load(val + place, mask=held, other=0).to(total.dtype)
            factor = tl.load(
                dense + source[:, None] * columns + column[None, :], mask=held[:, None] & there[None, :], other=0
            )
            total += tl.sum(weight[:, None] * factor.to(total.dtype), axis=0)
        if chunk == first:
            place = row.to(tl.int64) * columns + column
            if SCALED:  # noqa: SIM102 (decided when the kernel is compiled)
                if chunk + 1 == tl.load(chunk_first + row + 1):  # or the row is not whole yet
                    by = tl.load(scale + place, mask=there, other=0).to(total.dtype)
                    total = tl.load(plus + place, mask=there, other=0).to(total.dtype) + by * total
            tl.store(out + place, total.to(out.dtype.element_ty), mask=there)
        else:
            # each row before this one has one chunk that is not among the parts, and so has this one
            tl.store(parts + (chunk - row - 1).to(tl.int64) * columns + column, total, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    scale, plus, out, parts, long_row, chunk_first, columns, SCALED: tl.constexpr, TILE: tl.constexpr
):
    """Add the later chunks of a row to its first."""
    row = tl.load(long_row + tl.program_id(0))
    if row >= 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        there = column < columns
        place = row.to(tl.int64) * columns + column
        total = tl.load(out + place, mask=there, other=0).to(parts.dtype.element_ty)
        first = tl.load(chunk_first + row)
        last = tl.load(chunk_first + row + 1)
        for chunk in range(first + 1, last):
            total += tl.load(parts + (chunk - row - 1).to(tl.int64) * columns + column, mask=there, other=0)
        if SCALED:
            by = tl.load(scale + place, mask=there, other=0).to(total.dtype)
            total = tl.load(plus + place, mask=there, other=0).to(total.dtype) + by * total
        tl.store(out + place, total.to(out.dtype.element_ty), mask=there)
