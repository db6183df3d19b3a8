"""Fused scoring: the operator's registrations, its closed-form gradient, and the Triton kernel as far as a CPU goes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SIZES
from fused_score_cases import OPTIONS, check_scores, views
from harness import Resources, compiled, run_interpreted
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.testing import assert_close

from zeromem_torch.bank import Axis, axis_of
from zeromem_torch.retrieval.fusion import ViewFusion, fused_score

RAGGED = (3, 0, 1, 7, 129, 0)
DIFFERENTIABLE = ("graph", "hierarchy", "weight", "bonus")


def score(
    graph: Tensor,
    hierarchy: Tensor,
    weight: Tensor,
    axis: Axis,
    contrasts: tuple[float, float] = (4.0, 2.5),
    **given: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The operator, as `ViewFusion.best` calls it for a kernel, with the three best rows."""
    beside = [given.get(name) for name in ("bonus", "graph_there", "hierarchy_there", "admitted")]
    fused, rows = fused_score(graph, hierarchy, weight, axis.bounds, *beside, *contrasts, 3, axis.longest)
    return fused, rows


@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), RAGGED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_definition_equals_the_loops(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check_scores("torch", "cpu", dtype, sizes)


@pytest.mark.parametrize("sizes", [(0,), (4, 0, 3, 1)])
@pytest.mark.parametrize("given", [OPTIONS[0], OPTIONS[-1]])
def test_registrations(sizes: tuple[int, ...], given: tuple[str, ...]) -> None:
    graph, hierarchy, weight, beside = views(sizes, slots=2)
    for tensor in (graph, hierarchy, weight, beside["bonus"]):
        tensor.requires_grad_()
    axis = axis_of(sizes)
    some = [beside[name] if name in given else None for name in ("bonus", "graph_there", "hierarchy_there", "admitted")]
    opcheck(fused_score, (graph, hierarchy, weight, axis.bounds, *some, 4.0, 1.0, 3, axis.longest))


@pytest.mark.parametrize("given", OPTIONS)
@pytest.mark.parametrize("contrasts", [(1.0, 1.0), (4.0, 2.5)])
def test_the_gradient_is_right_twice(given: tuple[str, ...], contrasts: tuple[float, float]) -> None:
    sizes = (4, 0, 3, 1)
    graph, hierarchy, weight, beside = views(sizes, torch.float64, slots=2)
    inputs = [graph, hierarchy, weight, *([beside["bonus"]] if "bonus" in given else [])]
    masks = {name: beside[name] for name in given if name != "bonus"}

    def fused(graph: Tensor, hierarchy: Tensor, weight: Tensor, bonus: Tensor | None = None) -> Tensor:
        return score(graph, hierarchy, weight, axis_of(sizes), contrasts, bonus=bonus, **masks)[0]

    for tensor in inputs:
        tensor.requires_grad_()
    assert gradcheck(fused, inputs)
    assert gradgradcheck(fused, inputs)


@pytest.mark.parametrize("given", OPTIONS)
@pytest.mark.parametrize("contrasts", [(1.0, 1.0), (4.0, 10.0)])
def test_the_gradient_at_ties_is_that_of_the_definition(given: tuple[str, ...], contrasts: tuple[float, float]) -> None:
    """Where finite differences say nothing: ends of the range that rows share, flat views, views that returned none."""
    graph, hierarchy, weight, beside = views(RAGGED, torch.float64)
    inputs = dict(zip(DIFFERENTIABLE, (graph, hierarchy, weight, beside["bonus"]), strict=True))
    for tensor in inputs.values():
        tensor.requires_grad_()
    some = {name: beside[name] for name in given}
    axis = axis_of(RAGGED)
    found = score(graph, hierarchy, weight, axis, contrasts, **some)
    expected = ViewFusion(*contrasts, backend="torch").best(graph, hierarchy, weight, axis, 3, **some)
    assert torch.equal(found[1], expected[1])
    upstream = torch.rand_like(found[0])
    given_inputs = [inputs[name] for name in DIFFERENTIABLE if name != "bonus" or "bonus" in given]
    grads = [torch.autograd.grad((out * upstream).sum(), given_inputs) for out in (found[0], expected[0])]
    for mine, theirs in zip(*grads, strict=True):
        assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_whole(backend: str) -> None:
    """One graph for memories of every size, forward and backward."""
    compiled_score = torch.compile(score, backend=backend, fullgraph=True, dynamic=True)
    for sizes in ((7, 5), (12, 3), (20, 1)):
        graph, hierarchy, weight, beside = views(sizes)
        graph.requires_grad_()
        axis = axis_of(sizes)
        _ = axis.bounds, axis.longest  # made where the bank is, not in a compiled step
        plain, traced = (
            run(graph, hierarchy, weight, axis, bonus=beside["bonus"], admitted=beside["admitted"])
            for run in (score, compiled_score)
        )
        assert torch.equal(plain[1], traced[1])
        assert_close(traced[0], plain[0], rtol=0, atol=1e-6)
        grads = [torch.autograd.grad(fused.square().sum(), graph)[0] for fused, _ in (plain, traced)]
        assert_close(grads[1], grads[0], rtol=0, atol=1e-5)


def test_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_fused_score.py"))


TYPES = {
    "bounds": "*i64", "graph_there": "*u8", "hierarchy_there": "*u8", "admitted": "*u8", "fused": "*fp32",
    "rows": "*i64", "keys": "*i64", "ends": "*fp32", "units": "i32", "segments": "i32", "chunks": "i32",
    "graph_contrast": "fp32", "hierarchy_contrast": "fp32",
}  # fmt: skip


def resources(name: str, dtype: str, sm: int, *, beside: bool = True) -> Resources:
    from zeromem_torch.kernels import fused_score_triton as kernels

    fn = getattr(kernels, name)
    types = TYPES | dict.fromkeys(("graph", "hierarchy", "weight", "bonus"), f"*{dtype}")
    block = kernels.WHOLE if name == "_score_whole" else kernels.CHUNK
    constants: dict[str, Any] = {"BLOCK": block, "K": 32, "GRAPH_POWER": 4, "HIERARCHY_POWER": 0}
    if not beside:
        constants |= dict.fromkeys(("bonus", "graph_there", "hierarchy_there", "admitted"))
    constants = {key: value for key, value in constants.items() if key in fn.arg_names}
    signature = {key: types[key] for key in fn.arg_names if key in types and key not in constants}
    return compiled(fn, signature, constants, kernels.warps(block), sm)


@pytest.mark.parametrize("sm", [89, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_kernels_stay_in_registers(sm: int, dtype: str) -> None:
    pytest.importorskip("triton")
    for name, ceiling in (("_score_whole", 128), ("_find_ends", 64), ("_score_chunk", 112)):
        taken = resources(name, dtype, sm)
        assert taken.registers <= ceiling, name
        assert not taken.spills, name


@pytest.mark.parametrize("sm", [89, 90])
def test_what_is_not_given_costs_nothing(sm: int) -> None:
    pytest.importorskip("triton")
    assert (
        resources("_score_whole", "fp32", sm, beside=False).registers < resources("_score_whole", "fp32", sm).registers
    )


def test_the_kernel_says_what_it_does_not_take() -> None:
    pytest.importorskip("triton")
    from zeromem_torch.kernels.fused_score_triton import refuses

    cpu = torch.device("cpu")
    assert refuses(cpu, torch.float32, {"k": 32}) is None
    assert "float32" in str(refuses(cpu, torch.float64, {"k": 5}))
    assert "32" in str(refuses(cpu, torch.float32, {"k": 33}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sizes", [(7,), RAGGED, (8192, 100), (20_000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_ranks_as_the_definition(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check_scores("triton", "cuda", dtype, sizes)
