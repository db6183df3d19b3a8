"""Evidence calibration (Eq. 15) and the cut to a budget, against the loops."""

import equations
import pytest
import torch
from builders import SIZES, Dice
from torch import Tensor
from torch.autograd import gradcheck

from zeromem_torch.bank import axis_of, segment_topk
from zeromem_torch.calibration.evidence import EvidenceCalibration, within_budget

WEIGHTS = {"subject": 0.25, "date": -0.5, "unused": 0.0}
RAGGED = [(size,) for size in SIZES] + [(3, 0, 1, 7, 129, 0)]


def signals_of(slots: int, units: int) -> dict[str, Tensor]:
    return {name: Dice(seed).uniform(slots, units) for seed, name in enumerate(("subject", "date", "other"))}


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("k", [0, 1, 5, 200])
def test_equals_equation_15(sizes: tuple[int, ...], k: int) -> None:
    axis, dice = axis_of(sizes), Dice(9)
    scores = (4 * dice.uniform(3, axis.size)).round() / 4  # ties
    signals = signals_of(3, axis.size)
    signals["subject"][1] = signals["date"][1] = 0.0  # the profile says nothing
    closed = dice.uniform(3, axis.size) < 0.5
    closed[2] = False
    rows = segment_topk(EvidenceCalibration(WEIGHTS)(scores, signals), axis, k, closed)
    for s in range(3):
        for m, (first, last) in enumerate(zip(axis.ptr, axis.ptr[1:], strict=False)):
            expected = equations.calibrate(
                scores[s, first:last].tolist(),
                closed[s, first:last].nonzero()[:, 0].tolist(),
                {name: signal[s, first:last].tolist() for name, signal in signals.items()},
                {name: weight for name, weight in WEIGHTS.items() if weight},
                k,
            )
            assert rows[s, m].tolist() == [first + u for u in expected] + [-1] * (k - len(expected))


def test_without_weights_the_ranking_stays() -> None:
    scores = Dice(0).uniform(2, 7)
    assert torch.equal(EvidenceCalibration({})(scores, signals_of(2, 7)), scores)


def test_a_query_alone_is_the_same_bits_as_in_a_batch() -> None:
    scores, signals = Dice(9).uniform(7, 12), signals_of(7, 12)
    whole = EvidenceCalibration(WEIGHTS)(scores, signals)
    for s in range(7):
        alone = EvidenceCalibration(WEIGHTS)(scores[[s]], {name: signal[[s]] for name, signal in signals.items()})
        assert torch.equal(alone, whole[[s]])


def test_gradient_to_scores_and_signals() -> None:
    scores, signals = Dice(9).uniform(2, 5).requires_grad_(), signals_of(2, 5)
    subject = signals["subject"].requires_grad_()
    assert gradcheck(lambda s, t: EvidenceCalibration(WEIGHTS)(s, signals | {"subject": t}), (scores, subject))


@pytest.mark.parametrize("k", [0, 1, 7, 129])
@pytest.mark.parametrize("budget", [1, 30, 100, 10_000])
def test_the_cut_to_a_budget_equals_the_loop(k: int, budget: int) -> None:
    dice = Dice(k)
    tokens = torch.tensor(dice.below(60, 129)) + 1
    rows = torch.stack([torch.randperm(129, generator=dice.generator)[:k] for _ in range(6)]).reshape(3, 2, k)
    rows[1, :, k // 2 :] = -1
    rows[2, 0] = -1
    kept = within_budget(rows, tokens, budget)
    assert kept.shape == rows.shape
    for s in range(3):
        for m in range(2):
            handed = [row for row in kept[s, m].tolist() if row >= 0]
            ranked = [row for row in rows[s, m].tolist() if row >= 0]
            assert handed == equations.within_budget(ranked, tokens.tolist(), budget)
            assert sum(int(tokens[row]) for row in handed) <= budget


def test_a_unit_that_does_not_fit_is_skipped_and_a_later_one_still_fits() -> None:
    rows = torch.tensor([[[0, 1, 2]]])
    assert within_budget(rows, torch.tensor([5, 9, 4]), 10).tolist() == [[[0, -1, 2]]]


def test_a_bank_without_units_hands_over_nothing() -> None:
    none = torch.full((2, 1, 3), -1)
    assert torch.equal(within_budget(none, torch.empty(0, dtype=torch.long), 10), none)
    assert within_budget(none[:0], torch.tensor([3]), 10).shape == (0, 1, 3)
