"""What every back end of late interaction must do, against the loops of `equations`."""

import dataclasses

import equations
import torch
from builders import Dice, bank_of, lay_out, query, sample
from torch import Tensor
from torch.testing import assert_close

from zeromem_torch.bank import MemoryBank, TokenStates, axis_of, segment_topk
from zeromem_torch.retrieval.dense import LateInteraction, MaxSim
from zeromem_torch.routing.queries import QueryBatch


def short(bank: MemoryBank, batch: QueryBatch) -> tuple[MemoryBank, Tensor, Tensor]:
    """What late interaction reads, in float32."""
    index = dataclasses.replace(bank.index, token_states=bank.token_states.float())
    return MemoryBank(index, bank.axes), batch.states.float(), batch.state_weights.float()


def check_scores(
    backend: str, sizes: tuple[int, ...], *, exhaustive: int, k: int, precision: str = "stored", slots: int = 3
) -> None:
    """Turns and windows of several memories with different numbers of queries, some without any."""
    memories = [sample(seed, units, tied=seed == 1, plain=seed == 4) for seed, units in enumerate(sizes)]
    bank = bank_of(memories)
    asked = [[query(10 * m + s, one) for s in range(slots - m % 2)] for m, one in enumerate(memories)]
    bank, queries, weights = short(bank, lay_out(asked, bank))
    units, states = bank.axes["units"], bank.states(precision)
    candidates = segment_topk(Dice(1).uniform(slots, units.size), units, k)
    turn, window = LateInteraction(exhaustive, backend=backend, precision=precision)(queries, weights, bank, candidates)
    assert turn.shape == window.shape == (slots, units.size)
    kept = states.read(slice(None), torch.float64)
    for m, one in enumerate(memories):
        first, last = units.ptr[m : m + 2]
        own = [
            kept[a:b].tolist() for a, b in zip(states.ptr[first:last], states.ptr[first + 1 : last + 1], strict=True)
        ]
        for s in range(slots):
            some = range(one.units) if one.units <= exhaustive else (candidates[s, m] - first).tolist()
            tokens, shares = queries[s, m].tolist(), weights[s, m].tolist()
            best = [equations.best_matches(tokens, own[u] if u in some else []) for u in range(one.units)]
            of_turns = [equations.late_interaction(row, shares) for row in equations.told_apart(best)]
            held = [[max(best[u][i] for u in members) for i in range(len(tokens))] for members in one.members]
            of_windows = [equations.late_interaction(row, shares) for row in held]
            in_window = equations.best_window(of_windows, one.members, one.units)
            for found, expected in ((turn, of_turns), (window, in_window)):
                assert_close(found[s, first:last], torch.tensor(expected).reshape(-1), rtol=0, atol=1e-5)


def ragged_states(dim: int, counts: tuple[int, ...] = (3, 0, 40, 1, 33, 9)) -> TokenStates:
    held = torch.tensor([0, *counts]).cumsum(0)
    vectors = torch.nn.functional.normalize(Dice(2).uniform(int(held[-1]), dim) - 0.5, dim=-1)
    return TokenStates(vectors.float(), held)


def check_matches(backend: str, device: str, *, precision: str, dim: int, query_tokens: int) -> None:
    """Best matches in candidates, in units of no token and of more than a block of them."""
    plain = ragged_states(dim)
    kept = TokenStates.kept(plain.values, plain.ptr, precision)
    scale = None if kept.scale is None else kept.scale.to(device)
    states = TokenStates(kept.values.to(device), kept.ptr.to(device), scale)
    queries = torch.nn.functional.normalize(Dice(3).uniform(3, 1, query_tokens, dim) - 0.5, dim=-1).float()
    candidates = torch.tensor([[[0, 1, 2, -1]], [[4, 3, 5, 2]], [[-1, -1, -1, -1]]])
    axis = axis_of([len(plain.ptr) - 1], device)
    best = MaxSim(0, backend=backend)(queries.to(device), states, axis, candidates.to(device)).cpu()
    exact = kept.read(slice(None), torch.float64)
    expected = torch.zeros(best.shape, dtype=torch.float64)
    for s in range(3):
        for unit in candidates[s, 0].tolist():
            if unit >= 0:
                tokens = exact[plain.ptr[unit] : plain.ptr[unit + 1]].tolist()
                expected[unit, s] = torch.tensor(equations.best_matches(queries[s, 0].tolist(), tokens))
    assert_close(best.double(), expected, rtol=0, atol=2e-6)
