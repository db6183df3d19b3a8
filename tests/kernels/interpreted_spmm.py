"""The Triton product, and what is built on it, in the interpreter: `test_walk_triton` runs this file."""

import pytest
import torch
import walk_cases


def test_product() -> None:
    walk_cases.check_product("triton", "cpu", torch.float32)


def test_product_in_double() -> None:
    walk_cases.check_product("triton", "cpu", torch.float64, (7,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step(dtype: torch.dtype) -> None:
    walk_cases.check_step("triton", "cpu", dtype)


def test_pagerank() -> None:
    walk_cases.check_pagerank("triton", "cpu", torch.float32, (7, 0, 3, 1), 1e-3)


def test_propagation() -> None:
    walk_cases.check_propagation("triton", "cpu", torch.float32, (20, 9))


def test_gradient() -> None:
    walk_cases.check_gradient("triton", "cpu")
