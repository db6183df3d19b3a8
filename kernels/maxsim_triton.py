"""Late interaction over candidates in Triton: gather a unit's token states, compare, keep the best, weigh and sum.

A program owns one (slot, candidate). It walks the unit's tokens in blocks, so that neither gathered states nor
similarities are ever written: what leaves it is the best match of each query token or, with weights, their sum.

Products run on tensor cores and lose nothing that a float32 product keeps: states of 16 or 8 bits are multiplied by
both halves of a query, its rounding to 16 bits and what that left over; float32 states by three products in tf32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ASKED = 16  # query tokens that a program compares at once; more of them go in turns
TOKENS = 32  # of a unit, at once


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    return None if dtype == torch.float32 else "float32 queries only"


def best_matches(
    queries: Tensor,  # [slots, query_tokens, dim] float32
    values: Tensor,  # [tokens, dim] float32, float16 or int8
    scale: Tensor | None,  # [tokens], of int8
    ptr: Tensor,  # [units + 1], into the tokens
    candidates: Tensor,  # [slots, k] units; negative behind the last
) -> Tensor:  # [slots, k, query_tokens]
    """``max(0, max_j <q_i, d_j>)`` of each query token i over the tokens j of each candidate."""
    slots, query_tokens, _ = queries.shape
    out = queries.new_empty(slots, candidates.shape[1], query_tokens)
    _launch(queries, None, values, scale, ptr, candidates, out)
    return out


def scores(
    queries: Tensor, weights: Tensor, values: Tensor, scale: Tensor | None, ptr: Tensor, candidates: Tensor
) -> Tensor:  # [slots, k]
    """``sum_i w_i max(0, max_j <q_i, d_j>) / sum_i w_i``; `best_matches` says what goes in, weights are per slot."""
    out = queries.new_empty(candidates.shape)
    _launch(queries, weights, values, scale, ptr, candidates, out)
    return out


def depth(values: torch.dtype) -> int:
    """How much of a vector is multiplied at once: float32 states take three times the registers of others."""
    return 32 if values == torch.float32 else 64


def _launch(
    queries: Tensor,
    weights: Tensor | None,
    values: Tensor,
    scale: Tensor | None,
    ptr: Tensor,
    candidates: Tensor,
    out: Tensor,
) -> None:
    slots, query_tokens, dim = queries.shape
    if not out.numel():
        return
    given = queries.contiguous(), None if weights is None else weights.float().contiguous()
    sizes = candidates.shape[1], query_tokens, dim
    options = {"ASKED": ASKED, "TOKENS": TOKENS, "DEPTH": depth(values.dtype), "num_warps": 4, "enable_fp_fusion": True}
    grid = (slots * candidates.shape[1],)
    _match[grid](*given, values.contiguous(), scale, ptr, candidates.contiguous(), out, *sizes, **options)


@triton.jit(do_not_specialize=["k", "query_tokens"])  # type: ignore[untyped-decorator]  # change from batch to batch
def _match(  # type: ignore[no-untyped-def]
    queries, weights, values, scale, ptr, candidates, out, k, query_tokens, dim,
    ASKED: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    slot = program // k
    unit = tl.load(candidates + program)
    first = tl.load(ptr + unit, mask=unit >= 0, other=0)
    last = tl.load(ptr + unit + 1, mask=unit >= 0, other=0)
    part = tl.arange(0, DEPTH)
    total, weighed = 0.0, 0.0
    for block in range(0, query_tokens, ASKED):
        asked = block + tl.arange(0, ASKED)
        wanted = asked < query_tokens
        best = tl.zeros([ASKED], tl.float32)
        for start in range(first, last, TOKENS):
            token = start + tl.arange(0, TOKENS)
            there = token < last
            similar = tl.zeros([ASKED, TOKENS], tl.float32)
            for d in range(0, dim, DEPTH):
                inside = d + part < dim
                query = tl.load(
                    queries + (slot * query_tokens + asked[:, None]) * dim + d + part[None, :],
                    mask=wanted[:, None] & inside[None, :],
                    other=0.0,
                )
                state = tl.load(
                    values + token[None, :] * dim + d + part[:, None], mask=there[None, :] & inside[:, None], other=0
                )
                if state.dtype == tl.float32:
                    similar = tl.dot(query, state, similar, input_precision="tf32x3")
                else:
                    high = query.to(tl.float16)
                    similar = tl.dot(high, state.to(tl.float16), similar)
                    similar = tl.dot((query - high).to(tl.float16), state.to(tl.float16), similar)
            if scale is not None:
                similar *= tl.load(scale + token, mask=there, other=0.0)[None, :]
            best = tl.maximum(best, tl.max(similar, 1))  # a token that is not there has 0, as no match has
        if weights is None:
            tl.store(out + program * query_tokens + asked, best, mask=wanted)
        else:
            weight = tl.load(weights + slot * query_tokens + asked, mask=wanted, other=0.0)
            total += tl.sum(weight * best, 0)
            weighed += tl.sum(weight, 0)
    if weights is not None:
        tl.store(out + program, total / tl.maximum(weighed, 1e-9))
