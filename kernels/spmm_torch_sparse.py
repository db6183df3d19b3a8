"""Sparse times dense by torch-sparse, with the guards that its kernels need.

Their index arithmetic is 32 bits wide, half precision is added up in half, and there is no bfloat16.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch_sparse import SparseTensor

GRADIENT = True  # the product that calls it has one, written with it


def refuses(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    if dtype != torch.float32:
        return "float32 only"
    return "fewer than 2^31 elements only" if sizes.get("elements", 0) >= 2**31 else None


def prepare(crow: Tensor, col: Tensor, val: Tensor) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The function ``product(dense, scale, plus) = plus + scale * (A @ dense)``, for ``A`` in CSR form."""
    rows = crow.numel() - 1

    def product(dense: Tensor, scale: Tensor | None, plus: Tensor | None) -> Tensor:
        if max(rows, len(dense)) * dense.shape[1] >= 2**31:
            raise ValueError("torch_sparse: expected fewer than 2^31 elements")
        matrix = SparseTensor(
            rowptr=crow.long(), col=col.long(), value=val, sparse_sizes=(rows, len(dense)), is_sorted=True,
            trust_data=True,
        )  # fmt: skip
        found: Tensor = matrix.matmul(dense.contiguous())
        return found if scale is None or plus is None else torch.addcmul(plus, scale, found)

    return product
