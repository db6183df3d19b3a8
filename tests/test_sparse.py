"""The sparse product and what stands around it, against dense loops."""

import equations
import pytest
import torch
from builders import SIZES
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from zeromem_torch.sparse import Csr, offsets


def random_csr(rows: int, cols: int, seed: int = 0, *, fill: float = 0.3) -> Csr:
    """Random entries; about half of the rows and columns are empty."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(rows, cols, generator=generator, dtype=torch.float64)
    there = torch.rand(rows, cols, generator=generator) < fill
    there &= (torch.rand(rows, 1, generator=generator) < 0.5) & (torch.rand(1, cols, generator=generator) < 0.5)
    row, col = there.nonzero(as_tuple=True)
    return Csr.from_coo(row, col, dense[row, col], rows, cols)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("cols", SIZES)
@pytest.mark.parametrize("columns", [0, 1, 5])
def test_product_equals_the_loop(rows: int, cols: int, columns: int) -> None:
    matrix = random_csr(rows, cols)
    dense = torch.rand(cols, columns, dtype=torch.float64)
    expected = equations.product(matrix.to_dense().tolist(), dense.tolist(), columns)
    assert_close(matrix @ dense, torch.tensor(expected, dtype=torch.float64).reshape(rows, columns))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("cols", SIZES)
def test_transpose_is_the_dense_transpose(rows: int, cols: int) -> None:
    matrix = random_csr(rows, cols, fill=0.8)
    flipped = matrix.transpose()
    assert (flipped.rows, flipped.cols) == (cols, rows)
    assert torch.equal(flipped.to_dense(), matrix.to_dense().T)
    assert torch.equal(flipped.transpose().to_dense(), matrix.to_dense())


def test_entries_at_one_place_add_up_and_come_out_sorted() -> None:
    row, col = torch.tensor([2, 0, 2, 2]), torch.tensor([1, 3, 1, 0])
    matrix = Csr.from_coo(row, col, torch.tensor([1.0, 2.0, 4.0, 8.0]), 4, 5)
    assert matrix.crow.tolist() == [0, 1, 1, 3, 3]
    assert matrix.col.tolist() == [3, 0, 1]
    assert matrix.val.tolist() == [2.0, 8.0, 5.0]
    assert matrix.row_of_entry().tolist() == [0, 2, 2]


def test_offsets_bound_every_row() -> None:
    assert offsets(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert offsets(torch.tensor([], dtype=torch.long)).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
def test_dtypes(dtype: torch.dtype, indices: torch.dtype) -> None:
    matrix = random_csr(7, 5)
    small = Csr(matrix.crow.to(indices), matrix.col.to(indices), matrix.val.to(dtype), 5)
    dense = torch.rand(5, 3, dtype=dtype)
    assert_close(small @ dense, matrix.to_dense().to(dtype) @ dense)
    assert_close(small.transpose() @ (small @ dense), matrix.to_dense().to(dtype).T @ (small @ dense))


def test_a_column_of_the_product_does_not_depend_on_the_others() -> None:
    matrix = random_csr(129, 129)
    dense = torch.rand(129, 7, dtype=torch.float64)
    alone = torch.cat([matrix @ dense[:, [k]] for k in range(7)], dim=1)
    assert_close(matrix @ dense, alone, rtol=1e-14, atol=0)


def test_factors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a factor of 4 rows, got 3"):
        random_csr(3, 4) @ torch.rand(3, 2, dtype=torch.float64)


@pytest.mark.parametrize("columns", [1, 3])
def test_gradients_to_both_factors_twice(columns: int) -> None:
    matrix = random_csr(5, 4, seed=3, fill=0.9)
    assert matrix.val.numel()
    val = matrix.val.clone().requires_grad_()
    dense = torch.rand(4, columns, dtype=torch.float64, requires_grad=True)

    def product(val: Tensor, dense: Tensor) -> Tensor:
        return Csr(matrix.crow, matrix.col, val, matrix.cols) @ dense

    assert gradcheck(product, (val, dense))
    assert gradgradcheck(product, (val, dense))


def test_gradient_through_a_transpose() -> None:
    matrix = random_csr(5, 4, seed=3, fill=0.9)
    val = matrix.val.clone().requires_grad_()
    dense = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)

    def product(val: Tensor, dense: Tensor) -> Tensor:
        return Csr(matrix.crow, matrix.col, val, matrix.cols).transpose() @ dense

    assert gradcheck(product, (val, dense))


def test_the_operator_keeps_torchs_contract() -> None:
    """Schema, shapes without data, and gradients under tracing: what torch.compile relies on."""
    matrix = random_csr(5, 4, seed=3, fill=0.9)
    val = matrix.val.clone().requires_grad_()
    dense = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.zeromem.spmm.default, (matrix.crow, matrix.col, val, dense))
