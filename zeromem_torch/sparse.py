"""Sparse matrices as three dense buffers, and the one product that every walk uses.

A CSR matrix is kept as ``crow, col, val`` rather than as a sparse tensor: plain buffers follow ``.to()``, save to
safetensors and stay visible to ``torch.compile``. The product is one custom operator with a closed-form gradient for
both factors, so that no dense ``rows x cols`` matrix ever exists, and whose backward is written with itself, so that
it differentiates twice.
"""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Csr:
    """A ``rows x cols`` matrix in compressed sparse row form."""

    crow: Int[Tensor, " bounds"]
    col: Int[Tensor, " entries"]
    val: Float[Tensor, " entries"]
    cols: int

    @property
    def rows(self) -> int:
        return self.crow.numel() - 1

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, val: Tensor, rows: int, cols: int) -> "Csr":
        """Build from entries in any order; entries at the same place add up."""
        key, place = torch.unique(row.long() * cols + col.long(), return_inverse=True)
        total = val.new_zeros(key.numel()).index_add(0, place, val)
        return cls(offsets(torch.bincount(key // max(cols, 1), minlength=rows)), key % max(cols, 1), total, cols)

    def row_of_entry(self) -> Int[Tensor, " entries"]:
        return torch.repeat_interleave(
            torch.arange(self.rows, device=self.crow.device), self.crow.diff(), output_size=self.col.numel()
        )

    def transpose(self) -> "Csr":
        order = torch.argsort(self.col, stable=True)
        counts = torch.bincount(self.col, minlength=self.cols)
        return Csr(offsets(counts), self.row_of_entry()[order], self.val[order], self.rows)

    def __matmul__(self, dense: Float[Tensor, "cols columns"]) -> Float[Tensor, "rows columns"]:
        if dense.shape[0] != self.cols:  # the product below would read past the end
            raise ValueError(f"expected a factor of {self.cols} rows, got {dense.shape[0]}")
        product: Tensor = _spmm(self.crow, self.col, self.val, dense)
        return product

    def to_dense(self) -> Float[Tensor, "rows cols"]:
        dense = self.val.new_zeros(self.rows, self.cols)
        return dense.index_put((self.row_of_entry(), self.col.long()), self.val, accumulate=True)


def offsets(counts: Int[Tensor, " rows"]) -> Int[Tensor, " bounds"]:
    """Where each row starts, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


@torch.library.custom_op("zeromem::spmm", mutates_args=())
def _spmm(crow: Tensor, col: Tensor, val: Tensor, dense: Tensor) -> Tensor:
    if not col.numel() or not dense.numel():
        return dense.new_zeros(crow.numel() - 1, dense.shape[1])
    with warnings.catch_warnings():  # "Sparse CSR tensor support is in beta state"
        warnings.simplefilter("ignore", UserWarning)
        matrix = torch.sparse_csr_tensor(crow.long(), col.long(), val.detach(), (crow.numel() - 1, dense.shape[0]))
    return torch.mm(matrix, dense.contiguous())


@_spmm.register_fake
def _(crow: Tensor, col: Tensor, val: Tensor, dense: Tensor) -> Tensor:
    return dense.new_empty(crow.shape[0] - 1, dense.shape[1])


def _save_factors(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _spmm_backward(ctx, grad):  # type: ignore[no-untyped-def]
    crow, col, val, dense = ctx.saved_tensors
    matrix = Csr(crow, col, val, dense.shape[0])
    grad_val = grad_dense = None
    if ctx.needs_input_grad[2]:  # only the entries that exist: a sampled dense-dense product
        grad_val = (grad[matrix.row_of_entry()] * dense[col]).sum(dim=1)
    if ctx.needs_input_grad[3]:
        grad_dense = matrix.transpose() @ grad
    return None, None, grad_val, grad_dense


_spmm.register_autograd(_spmm_backward, setup_context=_save_factors)
