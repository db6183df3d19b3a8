"""Late interaction over candidates in Triton, interpreted: `test_maxsim` runs this file."""

import equations
import pytest
import torch
from builders import Dice
from maxsim_cases import check_matches, check_scores, ragged_states
from torch.testing import assert_close

from zeromem_torch.bank import PRECISIONS, TokenStates
from zeromem_torch.kernels import maxsim_triton


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("dim", "query_tokens"), [(6, 1), (70, 19)])
def test_matches(precision: str, dim: int, query_tokens: int) -> None:
    check_matches("triton", "cpu", precision=precision, dim=dim, query_tokens=query_tokens)


def test_turns_and_windows() -> None:
    check_scores("triton", (7, 0, 20, 3, 2), exhaustive=2, k=4)


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_weighted_sums(precision: str) -> None:
    """Of more query tokens than go at once; a query with nothing but padding scores 0."""
    plain = ragged_states(10)
    states = TokenStates.kept(plain.values, plain.ptr, precision)
    queries, weights = Dice(3).uniform(2, 20, 10).float() - 0.5, Dice(4).uniform(2, 20).float()
    weights[1] = 0
    candidates = torch.tensor([[0, 4, -1], [2, 1, 0]])
    found = maxsim_triton.scores(queries, weights, states.values, states.scale, states.ptr, candidates)
    kept = states.read(slice(None), torch.float64)
    for s, c in ((s, c) for s in range(2) for c in range(3)):
        unit = int(candidates[s, c])
        tokens = kept[states.ptr[unit] : states.ptr[unit + 1]].tolist() if unit >= 0 else []
        expected = equations.late_interaction(equations.best_matches(queries[s].tolist(), tokens), weights[s].tolist())
        assert_close(float(found[s, c]), expected, rtol=0, atol=1e-5)
