"""Sparse matrices as three dense buffers, and the one product that every walk uses.

A CSR matrix is kept as ``crow, col, val`` rather than as a sparse tensor: plain buffers follow ``.to()``, save to
safetensors and stay visible to ``torch.compile``. The product is one custom operator with a closed-form gradient for
both factors, so that no dense ``rows x cols`` matrix ever exists, and whose backward is written with itself, so that
it differentiates twice.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

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
        return self.times(dense)

    def times(self, dense: Float[Tensor, "cols columns"], backend: str = "torch") -> Float[Tensor, "rows columns"]:
        """The product, by a back end that `choose("spmm", ...)` has found to run here."""
        if dense.shape[0] != self.cols:  # the product below would read past the end
            raise ValueError(f"expected a factor of {self.cols} rows, got {dense.shape[0]}")
        product: Tensor = _spmm(self.crow, self.col, self.val, dense, backend)
        return product

    def to_dense(self) -> Float[Tensor, "rows cols"]:
        dense = self.val.new_zeros(self.rows, self.cols)
        return dense.index_put((self.row_of_entry(), self.col.long()), self.val, accumulate=True)


def offsets(counts: Int[Tensor, " rows"]) -> Int[Tensor, " bounds"]:
    """Where each row starts, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def multiplier(matrix: Csr, backend: str = "torch") -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The function ``product(dense, scale, plus) = plus + scale * (A @ dense)``, or ``A @ dense`` where they are None.

    It is prepared once for all steps of a walk, and has no gradient.
    """
    if backend != "torch":
        prepare = import_module(f"zeromem_torch.kernels.spmm_{backend}").prepare
        prepared: Callable[[Tensor, Tensor | None, Tensor | None], Tensor] = prepare(
            matrix.crow, matrix.col, matrix.val.detach()
        )
        return prepared
    with warnings.catch_warnings():  # "Sparse CSR tensor support is in beta state"
        warnings.simplefilter("ignore", UserWarning)
        sizes = matrix.rows, matrix.cols
        native = torch.sparse_csr_tensor(matrix.crow.long(), matrix.col.long(), matrix.val.detach(), sizes)

    def product(dense: Tensor, scale: Tensor | None, plus: Tensor | None) -> Tensor:
        found = torch.mm(native, dense.contiguous())
        return found if scale is None or plus is None else torch.addcmul(plus, scale, found)

    return product


@torch.library.custom_op("zeromem::spmm", mutates_args=())
def _spmm(crow: Tensor, col: Tensor, val: Tensor, dense: Tensor, backend: str = "torch") -> Tensor:
    if not col.numel() or not dense.numel():
        return dense.new_zeros(crow.numel() - 1, dense.shape[1])
    return multiplier(Csr(crow, col, val, dense.shape[0]), backend)(dense, None, None)


@_spmm.register_fake
def _(crow: Tensor, col: Tensor, val: Tensor, dense: Tensor, backend: str = "torch") -> Tensor:
    return dense.new_empty(crow.shape[0] - 1, dense.shape[1])


def _save_factors(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *factors, ctx.backend = inputs
    ctx.save_for_backward(*factors)


def _spmm_backward(ctx, grad):  # type: ignore[no-untyped-def]
    crow, col, val, dense = ctx.saved_tensors
    matrix = Csr(crow, col, val, dense.shape[0])
    grad_val = grad_dense = None
    if ctx.needs_input_grad[2]:
        grad_val = sampled(matrix, grad, dense)
    if ctx.needs_input_grad[3]:
        grad_dense = matrix.transpose().times(grad, ctx.backend)
    return None, None, grad_val, grad_dense, None


_spmm.register_autograd(_spmm_backward, setup_context=_save_factors)


def sampled(
    matrix: Csr, left: Float[Tensor, "rows columns"], right: Float[Tensor, "cols columns"]
) -> Float[Tensor, " entries"]:
    """``left @ right.T`` at the entries of a matrix only: the gradient of a product to what is stored of it."""
    return (left[matrix.row_of_entry()] * right[matrix.col.long()]).sum(dim=1)
