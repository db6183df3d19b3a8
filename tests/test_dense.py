"""Dense scores and late interaction, against loops over vectors."""

import equations
import pytest
import torch
from builders import DIM, SIZES, Dice, bank_of, lay_out, query, rows_of, sample
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch.bank import TokenStates, axis_of, segment_topk
from zeromem_torch.retrieval.dense import DenseScores, MaxSim, token_minmax

RAGGED = [(0,), (1,), (7,), (129,), (3, 0, 1, 7, 20, 0)]


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_scores_equal_the_loop(sizes: tuple[int, ...], slots: int, dtype: torch.dtype) -> None:
    axis, dice = axis_of(sizes), Dice(0)
    vectors = dice.unit_vectors(axis.size).to(dtype)
    queries = dice.unit_vectors(slots * len(sizes)).to(dtype).reshape(slots, len(sizes), DIM)
    scores = DenseScores()(queries, vectors, axis)
    expected = [
        [equations.dot(queries[s, axis.segment[row]].tolist(), vectors[row].tolist()) for row in range(axis.size)]
        for s in range(slots)
    ]
    assert scores.dtype == dtype
    assert_close(scores, torch.tensor(expected, dtype=dtype).reshape(slots, axis.size))


def test_dense_scores_of_stored_half_precision_vectors_are_in_the_querys_precision() -> None:
    queries, vectors = Dice(0).unit_vectors(1)[None], Dice(1).unit_vectors(7).half()
    assert_close(DenseScores()(queries, vectors, axis_of([7])), queries[0] @ vectors.double().T)


def test_gradient_of_dense_scores() -> None:
    queries = Dice(0).unit_vectors(4).reshape(2, 2, DIM).requires_grad_()
    vectors = Dice(1).unit_vectors(5).requires_grad_()
    assert gradcheck(lambda q, v: DenseScores()(q, v, axis_of([3, 2])), (queries, vectors))


# Late interaction


def late_interaction(sizes: tuple[int, ...], exhaustive: int, workspace: int, k: int = 200) -> tuple[Tensor, Tensor]:
    """Best matches of four queries a memory, and the same by loops; the candidates are the first ``k`` units."""
    memories = [sample(seed, units) for seed, units in enumerate(sizes)]
    bank = bank_of(memories)
    units = bank.axes["units"]
    asked = [[query(100 * m + s, one) for s in range(4)] for m, one in enumerate(memories)]
    batch = lay_out(asked, bank)
    candidates = segment_topk(-torch.arange(units.size).double().expand(4, -1), units, k)
    best = MaxSim(exhaustive, workspace)(batch.states, bank.states(), units, candidates)
    expected = torch.zeros_like(best)
    for m, one in enumerate(memories):
        compared = one.units if one.units <= exhaustive else min(k, one.units)
        for s in range(4):
            for unit in range(compared):
                row = equations.best_matches(batch.states[s, m].tolist(), one.states_of(unit))
                expected[units.ptr[m] + unit, s] = torch.tensor(row)
    return best, expected


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("workspace", [1, 4000, 1 << 28])
def test_a_small_memory_is_compared_whole(sizes: tuple[int, ...], workspace: int) -> None:
    best, expected = late_interaction(sizes, 1000, workspace)
    assert_close(best, expected)


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("workspace", [1, 4000, 1 << 28])
@pytest.mark.parametrize("k", [0, 3, 200])
def test_of_a_large_memory_only_candidates_are_compared(sizes: tuple[int, ...], workspace: int, k: int) -> None:
    best, expected = late_interaction(sizes, 2, workspace, k)
    assert_close(best, expected)


def test_both_paths_agree_when_everything_is_a_candidate() -> None:
    assert_close(late_interaction((3, 0, 129), 1000, 1 << 28)[0], late_interaction((3, 0, 129), 0, 1 << 28)[0])


@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("slots", [0, 3])
def test_matches_are_weighed_and_summed(units: int, slots: int) -> None:
    dice, axis = Dice(3), axis_of([units, 2])
    best = dice.uniform(units + 2, slots, 4)
    weights = dice.uniform(slots, 2, 4)
    weights[:, 1] = 0  # a query with nothing but padding scores 0
    scores = MaxSim().combine(best, weights, axis)
    for s in range(slots):
        for unit in range(units + 2):
            expected = equations.late_interaction(best[unit, s].tolist(), weights[s, axis.segment[unit]].tolist())
            assert float(scores[s, unit]) == pytest.approx(expected)


def test_padding_of_a_query_changes_nothing() -> None:
    bank = bank_of([sample(1, 7)])
    units, maxsim = bank.axes["units"], MaxSim(100)
    own = query(2, sample(1, 7))
    batch = lay_out([[own]], bank)
    none = torch.full((1, 1, 0), -1)
    plain = maxsim(batch.states, bank.states(), units, none)
    padded = torch.cat([batch.states, torch.zeros(1, 1, 3, DIM, dtype=torch.float64)], dim=2)
    longer = maxsim(padded, bank.states(), units, none)
    weights = torch.cat([batch.state_weights, torch.zeros(1, 1, 3, dtype=torch.float64)], dim=2)
    assert_close(maxsim.combine(longer, weights, units), maxsim.combine(plain, batch.state_weights, units))


def test_order_of_units_and_of_tokens_does_not_matter() -> None:
    states, queries = Dice(1).unit_vectors(6), Dice(2).unit_vectors(3).reshape(1, 1, 3, DIM)
    none, axis = torch.full((1, 1, 0), -1), axis_of([2])
    best = MaxSim()(queries, TokenStates(states, torch.tensor([0, 2, 6])), axis, none)
    turned_states = torch.cat([states[2:].flip(0), states[:2]])
    turned = MaxSim()(queries, TokenStates(turned_states, torch.tensor([0, 4, 6])), axis, none)
    assert_close(turned, best.flip(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", RAGGED)
def test_each_tokens_matches_are_told_apart_inside_a_memory(sizes: tuple[int, ...]) -> None:
    axis, dice = axis_of(sizes), Dice(4)
    best = dice.uniform(axis.size, 3, 4)
    best[:, :, 2] = 0.5  # a token that all units match equally
    spread = token_minmax(best, axis)
    for s in range(3):
        for first, last in zip(axis.ptr, axis.ptr[1:], strict=False):
            expected = equations.told_apart(best[first:last, s].tolist())
            assert_close(spread[first:last, s], torch.tensor(expected, dtype=torch.float64).reshape(last - first, 4))


def test_rounding_of_equal_matches_is_not_told_apart() -> None:
    noise = 1e-7 * Dice(1).uniform(7, 1, 2).float()
    assert not token_minmax(0.5 + noise, axis_of([7])).any()
    faint = torch.linspace(0.5, 0.502, 7).reshape(7, 1, 1)
    spread = token_minmax(faint.expand(-1, 1, 2), axis_of([7]))
    assert_close(token_minmax(faint + noise, axis_of([7])), spread, rtol=0, atol=3e-5)


@pytest.mark.parametrize("exhaustive", [0, 100])
@pytest.mark.parametrize("workspace", [1, 1 << 28])
def test_gradient_of_late_interaction(exhaustive: int, workspace: int) -> None:
    """Two memories, several steps of a small workspace: no step may undo what another needs for its gradient."""
    axis, ptr = axis_of([3, 2]), torch.tensor([0, 2, 3, 3, 5, 6])
    queries = Dice(1).unit_vectors(8).reshape(2, 2, 2, DIM).requires_grad_()
    states = Dice(2).unit_vectors(6).requires_grad_()
    weights = Dice(3).uniform(2, 2, 2).requires_grad_()
    candidates = torch.tensor([[[0, 1, -1], [4, 3, -1]], [[2, 0, 1], [3, -1, -1]]])

    def scores(queries: Tensor, states: Tensor, weights: Tensor) -> Tensor:
        maxsim = MaxSim(exhaustive, workspace)
        combined: Tensor = maxsim.combine(maxsim(queries, TokenStates(states, ptr), axis, candidates), weights, axis)
        return combined

    assert gradcheck(scores, (queries, states, weights))


def test_a_query_alone_scores_as_in_a_batch() -> None:
    memories = [sample(1, 129), sample(2, 7)]
    bank = bank_of(memories)
    asked = [[query(10 * m + s, one) for s in range(5)] for m, one in enumerate(memories)]
    batch, maxsim = lay_out(asked, bank), MaxSim(50)
    units = bank.axes["units"]
    candidates = segment_topk(torch.rand(5, units.size, dtype=torch.float64), units, 9)
    whole = maxsim(batch.states, bank.states(), units, candidates)
    for s in range(5):
        one = maxsim(batch.states[[s]], bank.states(), units, candidates[[s]])
        assert_close(one[:, 0], whole[:, s], rtol=0, atol=1e-12)
    dense = DenseScores()(batch.vectors, bank.chunk_vectors, bank.axes["chunks"])
    assert rows_of(dense, bank, 2, 1, "chunks") == pytest.approx(
        [equations.dot(asked[1][2].vector.tolist(), row) for row in memories[1].index.chunk_vectors.tolist()]
    )
