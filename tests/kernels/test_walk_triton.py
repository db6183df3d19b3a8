"""The Triton product without a GPU: its results in the interpreter, and what its programs take when compiled."""

from pathlib import Path

import pytest
from harness import compiled, run_interpreted

pytest.importorskip("triton", reason="triton is not installed")

INDICES = {"crow": "*i64", "col": "*i32", "chunk_row": "*i32", "chunk_first": "*i32", "long_row": "*i32"}
VALUES = ("val", "dense", "scale", "plus", "out", "parts")


def test_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_spmm.py"))


@pytest.mark.parametrize("sm", [89, 90])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kernel", ["_rows", "_join"])
def test_programs_are_small(kernel: str, scaled: bool, sm: int) -> None:
    """Few registers let many programs of one warp run at once, which hides the time their gathers take."""
    from zeromem_torch.kernels import spmm_triton

    fn = getattr(spmm_triton, kernel)
    types = {**INDICES, **dict.fromkeys(VALUES, "*fp32"), "columns": "i32"}
    constants = {"LIMIT": spmm_triton.LIMIT, "ENTRIES": spmm_triton.ENTRIES, "TILE": spmm_triton.TILE, "SCALED": scaled}
    names = set(fn.arg_names)
    aligned = [name for name in (*VALUES, *INDICES, "columns") if name in names]
    used = compiled(
        fn,
        {name: kind for name, kind in types.items() if name in names},
        {name: value for name, value in constants.items() if name in names},
        num_warps=1,
        sm=sm,
        aligned=aligned,
    )
    assert used.spills == 0
    assert used.registers <= 48
    assert used.shared <= 1024
