"""Measures of retrieval, against plain loops and known distributions."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from zeromem_torch.evaluation import metrics
from zeromem_torch.evaluation.datasets import Question
from zeromem_torch.evaluation.metrics import (
    handed_over,
    paired_bootstrap,
    recall_at_tokens,
    recall_hit_all,
    summarise,
)

NAMES = st.sampled_from("abcdefg")


@pytest.mark.parametrize(
    ("ranked", "k", "expected"),
    [
        ("abcd", 1, (1 / 3, 1, 0)),
        ("abcd", 2, (1 / 3, 1, 0)),
        ("abcd", 3, (2 / 3, 1, 0)),
        ("acxd", 4, (1, 1, 1)),
        ("aacd", 3, (2 / 3, 1, 0)),  # a repeat takes a rank
        ("xyz", 20, (0, 0, 0)),
        ("", 5, (0, 0, 0)),
    ],
)
def test_recall_hit_all(ranked: str, k: int, expected: tuple[float, float, float]) -> None:
    assert recall_hit_all(list(ranked), ("a", "c", "d"), k) == expected


@given(ranked=st.lists(NAMES), evidence=st.lists(NAMES, min_size=1), k=st.integers(1, 9))
def test_recall_hit_all_is_a_count(ranked: list[str], evidence: list[str], k: int) -> None:
    recall, hit, every = recall_hit_all(ranked, evidence, k)
    found = [name for name in sorted(set(evidence)) if name in ranked[:k]]

    assert recall == len(found) / len(set(evidence))
    assert (hit, every) == (float(recall > 0), float(recall == 1))
    assert recall <= recall_hit_all(ranked, evidence, k + 1)[0]


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one(k: int) -> None:
    with pytest.raises(ValueError, match="k must be at least 1"):
        recall_hit_all(["a"], ["a"], k)


def test_recall_without_evidence() -> None:
    with pytest.raises(ValueError, match="at least one piece of evidence"):
        recall_hit_all(["a"], (), 1)
    with pytest.raises(ValueError, match="at least one piece of evidence"):
        recall_at_tokens([("a", 1)], (), 1)


@pytest.mark.parametrize(
    ("budget", "ids", "spent"),
    [
        (0, "z", 0),
        (1, "z", 0),
        (4, "cz", 2),
        (5, "az", 5),
        (7, "acz", 7),
        (14, "acz", 7),
        (15, "abz", 15),
        (17, "abcz", 17),
    ],
)
def test_items_that_do_not_fit_are_skipped(budget: int, ids: str, spent: int) -> None:
    items = [("a", 5), ("b", 10), ("c", 2), ("z", 0)]

    assert handed_over(items, budget) == (list(ids), spent)
    assert recall_at_tokens(items, ["b", "c", "not ranked"], budget) == len(set(ids) & {"b", "c"}) / 3


@given(items=st.lists(st.tuples(NAMES, st.integers(0, 50))), budget=st.integers(0, 200))
def test_a_budget_is_kept(items: list[tuple[str, int]], budget: int) -> None:
    ids, spent = handed_over(items, budget)

    assert spent <= budget
    if sum(tokens for _, tokens in items) <= budget:
        assert ids == [name for name, _ in items]


def test_negative_tokens() -> None:
    with pytest.raises(ValueError, match="at least 0 tokens, got -1"):
        handed_over([("a", -1)], 5)


def drawn_means(differences: list[float], resamples: int) -> list[float]:
    """The bootstrap as its textbook writes it: draw questions one by one."""
    generator = random.Random(7)
    return [statistics.fmean(generator.choices(differences, k=len(differences))) for _ in range(resamples)]


@pytest.mark.parametrize("questions", [2, 7, 129])
def test_bootstrap_draws_questions(questions: int) -> None:
    generator = np.random.default_rng(questions)
    a, b = generator.integers(0, 4, questions) / 3, generator.integers(0, 4, questions) / 3
    result = paired_bootstrap(a, b, resamples=20_000)
    means = drawn_means((a - b).tolist(), 4_000)
    spread = statistics.stdev(means)

    assert result["diff"] == pytest.approx(statistics.fmean((a - b).tolist()))
    low, high = np.quantile(means, [0.025, 0.975])
    close = 0.15 * spread + 1 / (3 * questions)  # means of thirds come in steps
    assert result["low"] == pytest.approx(low, abs=close)
    assert result["high"] == pytest.approx(high, abs=close)
    below, above = sum(m <= 1e-12 for m in means) / 4_000, sum(m >= -1e-12 for m in means) / 4_000
    assert result["p"] == pytest.approx(min(1, 2 * min(below, above)), abs=0.04)


def test_bootstrap_agrees_with_the_t_test_where_that_holds() -> None:
    generator = np.random.default_rng(3)
    a = generator.normal(0.02, 0.3, 1_500)
    b = np.zeros(1_500)
    result = paired_bootstrap(a, b)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)

    assert result["p"] == pytest.approx(expected.pvalue, abs=0.005)
    assert result["low"] == pytest.approx(interval.low, abs=1e-3)
    assert result["high"] == pytest.approx(interval.high, abs=1e-3)


def test_bootstrap_keeps_its_level_without_a_difference() -> None:
    """Under the null, p < 0.05 must come about one time in twenty."""
    generator = np.random.default_rng(11)
    trials = [generator.integers(0, 3, (2, 200)) / 2 for _ in range(400)]
    rejected = sum(paired_bootstrap(a, b, resamples=500)["p"] < 0.05 for a, b in trials)

    assert stats.binom.cdf(rejected, 400, 0.05) > 0.001
    assert stats.binom.sf(rejected - 1, 400, 0.05) > 0.001


def test_equal_systems() -> None:
    assert paired_bootstrap([0.1, 1 / 3, 0.7], [0.1, 1 / 3, 0.7]) == {"diff": 0, "low": 0, "high": 0, "p": 1}


def test_differences_that_cancel_are_ties() -> None:
    """Means that are 0 but for rounding count on both sides."""
    a, b = [1 / 3, 0.0, 0.1, 0.3], [0.0, 1 / 3, 0.3, 0.1]

    assert paired_bootstrap(a, b)["p"] == 1


def test_a_clear_difference_has_the_smallest_p() -> None:
    assert paired_bootstrap([1.0] * 9, [0.0] * 9, resamples=999) == {"diff": 1, "low": 1, "high": 1, "p": 2 / 1000}


def test_swapping_the_systems_swaps_the_signs() -> None:
    generator = np.random.default_rng(5)
    a, b = generator.random(129), generator.random(129)
    one, other = paired_bootstrap(a, b), paired_bootstrap(b, a)

    assert one["diff"] == pytest.approx(-other["diff"])
    assert one["low"] == pytest.approx(-other["high"], abs=0.01)
    assert one["p"] == pytest.approx(other["p"], abs=0.05)


def test_bootstrap_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(9)
    a, b = generator.random(130), generator.random(130)
    order = generator.permutation(130)
    expected = paired_bootstrap(a, b)

    assert paired_bootstrap(a[order], b[order]) == pytest.approx(expected, abs=1e-11)
    assert paired_bootstrap(a, b, seed=1)["low"] != expected["low"]
    monkeypatch.setattr(metrics, "CHUNK", 1_000)
    assert paired_bootstrap(a, b) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "at least one"),
        ([1.0], [1.0, 2.0], r"shapes \(1,\) and \(2,\)"),
        ([[1.0]], [[1.0]], "shapes"),
        ([math.nan], [1.0], "finite"),
    ],
)
def test_bootstrap_of_what_cannot_be_compared(a: list[float], b: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(a, b)


def test_bootstrap_needs_resamples() -> None:
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        paired_bootstrap([1.0], [0.0], resamples=0)


def question(category: str, *evidence: str) -> Question:
    return Question(id="q", boundary="b", text="?", evidence=evidence, category=category)


def test_summarise() -> None:
    questions = [question("2", "a"), question("1", "a"), question("2", "a"), question("2"), question("", "a")]
    measures: list[dict[str, float]] = [
        {"recall@5": 1.0, "turns": 3},
        {"recall@5": 0.5, "turns": 5},
        {"recall@5": 0.0, "turns": 4},
        {"turns": 1_000},  # no evidence: left out whatever was measured
        {"recall@5": 0.5, "turns": 4},
    ]

    assert summarise(measures, questions) == {
        "overall": {"n": 4, "recall@5": 0.5, "turns": 4},
        "by_category": {"1": {"n": 1, "recall@5": 0.5, "turns": 5}, "2": {"n": 2, "recall@5": 0.5, "turns": 3.5}},
    }
    assert list(summarise(measures, questions)["by_category"]) == ["1", "2"]


def test_summarise_nothing() -> None:
    assert summarise([], []) == {"overall": {"n": 0}, "by_category": {}}
    assert summarise([{}], [question("1")]) == {"overall": {"n": 0}, "by_category": {}}


def test_summarise_refuses_holes() -> None:
    with pytest.raises(ValueError, match="same measures"):
        summarise([{"x": 1}, {"y": 1}], [question("1", "a"), question("1", "a")])
    with pytest.raises(ValueError, match="2 questions, got 1"):
        summarise([{"x": 1}], [question("1", "a")] * 2)
