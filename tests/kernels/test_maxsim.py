"""Late interaction: states in fewer bits, the CPU kernel against loops, and the Triton kernel as far as no GPU goes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from builders import SIZES, Dice, bank_of, lay_out, query, sample
from harness import compiled, run_interpreted
from maxsim_cases import check_matches, check_scores, ragged_states
from torch.nn.functional import normalize
from torch.testing import assert_close

from zeromem_torch.backends import kernel
from zeromem_torch.bank import PRECISIONS, TokenStates, segment_topk
from zeromem_torch.retrieval.dense import FAINT, LateInteraction

RAGGED = (3, 0, 1, 7, 20, 0)


def threads(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)


@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), RAGGED])
@pytest.mark.parametrize(("exhaustive", "k"), [(1000, 0), (2, 0), (2, 3), (2, 200)])
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_scores_equal_the_loops(backend: str, sizes: tuple[int, ...], exhaustive: int, k: int) -> None:
    pytest.importorskip(backend)
    check_scores(backend, sizes, exhaustive=exhaustive, k=k)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_states_are_read_in_every_precision(backend: str, precision: str) -> None:
    pytest.importorskip(backend)
    check_scores(backend, RAGGED, exhaustive=5, k=9, precision=precision)


@pytest.mark.parametrize("slots", [0, 1, 40])
@pytest.mark.parametrize("number", [1, 3])
def test_more_queries_than_a_job_takes_on_any_number_of_threads(
    slots: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    threads(number, monkeypatch)
    check_scores("numba", (7, 3), exhaustive=5, k=4, slots=slots)


@pytest.mark.parametrize("exhaustive", [0, 100])
def test_a_query_alone_is_the_same_bits_as_in_a_batch(exhaustive: int) -> None:
    """And one with more columns than a job usually fills; its neighbours have few or none."""
    pytest.importorskip("numba")
    dice, states = Dice(1), ragged_states(32)
    queries = normalize(dice.uniform(5, 1, 90, 32) - 0.5, dim=-1).float()
    weights = dice.uniform(5, 1, 90).float()
    weights[0, :, 7:] = weights[1] = weights[3, :, 16:] = 0
    candidates = torch.tensor([[[0, 2, 4, -1]]]).expand(5, 1, 4)
    windows = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]), torch.tensor([0, 1, 2, 1, 2, 3, 2, 3, 4, 3, 4, 5])

    def scores(slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        axes = (0, 6), (0, 4), *windows, candidates[slots], exhaustive, 1e-6, FAINT
        run = kernel("maxsim", "numba").late_interaction
        turn, window = run(queries[slots], weights[slots], [states.values], [None], [0], states.ptr, *axes)
        return turn, window

    whole = scores([0, 1, 2, 3, 4])
    assert not whole[0][1].any(), "no token of it weighs anything"
    assert whole[0][[0, 2, 3, 4]].any(1).all()
    for s in range(5):
        for alone, together in zip(scores([s]), whole, strict=True):
            assert torch.equal(alone[0], together[s])


def test_states_that_are_not_joined_are_scored_as_if_they_were() -> None:
    """A bank of several memories on the CPU leaves each its own; whoever needs them joined gets them so."""
    pytest.importorskip("numba")
    memories = [sample(seed, units) for seed, units in enumerate((7, 0, 129, 3))]
    apart = bank_of(memories)
    assert len(apart.own_states) == 4
    assert not len(apart.index.token_states)
    whole = dataclasses.replace(
        apart, index=dataclasses.replace(apart.index, token_states=apart.token_states), own_states=()
    )
    batch = lay_out([[query(10 * m + s, one) for s in range(2)] for m, one in enumerate(memories)], apart)
    units = apart.axes["units"]
    for exhaustive in (0, 1000):
        late = LateInteraction(exhaustive, backend="numba")
        candidates = segment_topk(torch.rand(2, units.size), units, 3)
        given = batch.states.float(), batch.state_weights.float()
        for one, other in zip(late(*given, apart, candidates), late(*given, whole, candidates), strict=True):
            assert torch.equal(one, other)
    assert "token_states" in vars(apart), "joined here, to make the other"


def test_an_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    module = kernel("maxsim", "numba")

    def fails(*given: object) -> None:
        raise ValueError("a job failed")

    monkeypatch.setattr(module, "_late_interaction", fails)
    threads(3, monkeypatch)
    with pytest.raises(ValueError, match="a job failed"):
        check_scores("numba", (7, 3), exhaustive=5, k=4, slots=40)


# Precision


@pytest.mark.parametrize(("precision", "size"), [("stored", 4), ("float32", 4), ("float16", 2), ("int8", 1)])
def test_bytes_of_a_unit_are_known(precision: str, size: int) -> None:
    plain = ragged_states(10, (3, 0, 5))
    states = TokenStates.kept(plain.values, plain.ptr, precision)
    assert states.bytes_per_token == 10 * size + (4 if precision == "int8" else 0)
    assert states.bytes_per_unit == pytest.approx(states.bytes_per_token * 8 / 3)
    held = [states.values] + ([] if states.scale is None else [states.scale])
    assert sum(tensor.nbytes for tensor in held) == 8 * states.bytes_per_token


def test_a_state_of_8_bits_is_off_by_half_a_step_at_most() -> None:
    plain = ragged_states(33)
    values = torch.cat([plain.values, torch.zeros(1, 33)])  # and a state of nothing stays nothing
    states = TokenStates.kept(values, plain.ptr, "int8")
    assert states.scale is not None
    assert_close(states.scale, values.abs().amax(1) / 127)
    off = (states.read(slice(None), torch.float64) - values).abs()
    assert bool((off <= states.scale[:, None] * 0.5001).all())
    assert torch.equal(
        states.read(torch.tensor([5, 2]), torch.float32), states.read(slice(None), torch.float32)[[5, 2]]
    )


def test_no_states_can_be_kept_and_an_unknown_precision_is_refused() -> None:
    none = TokenStates.kept(torch.empty(0, 4), torch.zeros(1, dtype=torch.long), "int8")
    assert none.bytes_per_unit == 0
    with pytest.raises(ValueError, match="precision must be one of stored, float32, float16, int8, got 'int4'"):
        TokenStates.kept(torch.empty(0, 4), torch.zeros(1, dtype=torch.long), "int4")


# On a GPU


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_definition_equals_the_loops_in_every_precision(precision: str) -> None:
    check_matches("torch", "cpu", precision=precision, dim=70, query_tokens=19)


def test_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_maxsim.py"))


@pytest.mark.parametrize("sm", [89, 90])
@pytest.mark.parametrize("values", ["fp32", "fp16", "i8"])
@pytest.mark.parametrize("weighed", [False, True])
def test_the_triton_kernel_stays_in_registers(sm: int, values: str, weighed: bool) -> None:
    pytest.importorskip("triton")
    from zeromem_torch.kernels.maxsim_triton import ASKED, TOKENS, _match, depth

    signature = {
        "queries": "*fp32", "values": f"*{values}", "ptr": "*i64", "candidates": "*i64", "out": "*fp32", "k": "i32",
        "query_tokens": "i32", "dim": "i32",
    }  # fmt: skip
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "i8": torch.int8}[values]
    constants: dict[str, object] = {"ASKED": ASKED, "TOKENS": TOKENS, "DEPTH": depth(dtype)}
    for name, type_of, given in (("scale", "*fp32", values == "i8"), ("weights", "*fp32", weighed)):
        if given:
            signature[name] = type_of
        else:
            constants[name] = None
    taken = compiled(_match, signature, constants, 4, sm, aligned=["queries", "values", "dim"])
    assert taken.registers <= 104
    assert taken.shared <= 16384
    assert not taken.spills


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_kernels_leave_other_queries_to_torch(backend: str) -> None:
    pytest.importorskip(backend)
    refuses = kernel("maxsim", backend).refuses
    assert refuses(torch.device("cpu"), torch.float32, {}) is None
    assert "float32" in refuses(torch.device("cpu"), torch.float64, {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("dim", "query_tokens"), [(6, 1), (384, 30)])
def test_a_gpu_finds_the_same_matches(precision: str, dim: int, query_tokens: int) -> None:
    check_matches("triton", "cuda", precision=precision, dim=dim, query_tokens=query_tokens)
