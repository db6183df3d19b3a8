"""BM25 impacts and the scores made of them, against the formula spelled out."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import equations
import pytest
import torch
from builders import SIZES, TERMS, Dice, Sample, bank_of, lay_out, query, rows_of, sample
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch.bank import Axis, Postings, axis_of
from zeromem_torch.retrieval.lexical import LexicalScores, in_steps
from zeromem_torch.substrate.lexicon import (
    TermCounts,
    Vocabulary,
    inverse_frequency,
    pair_keys,
    query_phrases,
    query_terms,
    word_key,
)

CONSTANTS = [(0.9, 0.4), (1.2, 0.75), (0.0, 0.5), (1.5, 0.0), (1.5, 1.0)]
BACKENDS = [name for name in ("torch", "numba") if importlib.util.find_spec(name)]


def entries_of(asked: list[dict[int, float]]) -> tuple[Tensor, Tensor, Tensor]:
    slot = torch.tensor([s for s, own in enumerate(asked) for _ in own], dtype=torch.long)
    term = torch.tensor([t for own in asked for t in own], dtype=torch.long)
    weight = torch.tensor([w for own in asked for w in own.values()], dtype=torch.float64)
    return slot, term, weight


def scores_of(postings: Postings, asked: list[dict[int, float]], rows: int, backend: str = "auto") -> Tensor:
    found: Tensor = LexicalScores(backend)(*entries_of(asked), postings, len(asked), rows)
    return found


def texts_of(rows: int, seed: int = 0) -> list[list[str]]:
    """Some texts are empty, one is long, and words repeat."""
    dice = Dice(seed)
    return [[f"t{t}" for t in dice.below(TERMS, 40 if row == 3 else dice.one(6))] for row in range(rows)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("k1", "b"), CONSTANTS)
def test_scores_equal_the_formula(rows: int, k1: float, b: float, backend: str) -> None:
    texts, vocabulary = texts_of(rows), dict[str, int]()
    postings = TermCounts.of(texts, vocabulary).postings(k1, b)
    asked = [{"t0": 1.0, "t3": 2.0, "unseen": 1.0}, {}, {f"t{t}": 1.0 for t in range(TERMS)}]
    known = [{vocabulary[word]: weight for word, weight in own.items() if word in vocabulary} for own in asked]
    expected = [equations.bm25(texts, own, k1, b) for own in asked]
    assert_close(
        scores_of(postings, known, rows, backend).double(),
        torch.tensor(expected, dtype=torch.float64).reshape(3, rows),
        rtol=1e-5,
        atol=1e-6,
    )


def test_counts_in_float64_give_impacts_in_float64() -> None:
    counts = TermCounts.of(texts_of(7), {})
    doubled = TermCounts(counts.term, counts.row, counts.count.double(), counts.terms, counts.rows)
    assert doubled.postings(0.9, 0.4).impact.dtype == torch.float64
    assert_close(doubled.merged(torch.arange(7), torch.zeros(7, dtype=torch.long), 1).count.sum(), doubled.count.sum())


def test_only_empty_texts_have_no_impact() -> None:
    postings = TermCounts.of([[], [], []], {"known": 0}).postings(0.9, 0.4)
    assert postings.counts.tolist() == [0]
    assert scores_of(postings, [{0: 1.0}], 3).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("rows", SIZES)
def test_a_group_counts_the_words_of_its_rows(rows: int) -> None:
    texts, dice, vocabulary = texts_of(rows), Dice(5), dict[str, int]()
    groups = rows // 2 + 1  # some stay empty, and a row may be in two
    row, group = dice.below(rows, 2 * rows), dice.below(groups, 2 * rows)
    pairs = list(zip(row, group, strict=False))
    joined = [[word for r, g in pairs if g == own for word in texts[r]] for own in range(groups)]
    merged = TermCounts.of(texts, vocabulary).merged(
        torch.tensor(row, dtype=torch.long), torch.tensor(group[: len(row)], dtype=torch.long), groups
    )
    direct = TermCounts.of(joined, vocabulary)
    assert sorted(zip(merged.term.tolist(), merged.row.tolist(), merged.count.tolist(), strict=True)) == sorted(
        zip(direct.term.tolist(), direct.row.tolist(), direct.count.tolist(), strict=True)
    )
    assert merged.term.tolist() == sorted(merged.term.tolist())
    assert (merged.terms, merged.rows) == (len(vocabulary), groups)


def test_terms_get_the_next_numbers_of_a_vocabulary() -> None:
    vocabulary = {"old": 0}
    counts = TermCounts.of([["new", "old", "new"], ["newer"]], vocabulary)
    assert vocabulary == {"old": 0, "new": 1, "newer": 2}
    entries = zip(counts.term.tolist(), counts.row.tolist(), counts.count.tolist(), strict=True)
    assert list(entries) == [(0, 0, 1.0), (1, 0, 2.0), (2, 1, 1.0)]


def test_where_postings_lie_and_how_high_they_go() -> None:
    postings = Postings(torch.tensor([2, 0, 1]), torch.tensor([0, 3, 1]), torch.tensor([-3.0, 1.0, 2.0]))
    assert (postings.ptr.tolist(), postings.peak.tolist(), postings.longest) == ([0, 2, 2, 3], [3, 0, 2], 2)
    none = Postings(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long), torch.tensor([]))
    assert (none.ptr.tolist(), none.peak.tolist(), none.longest) == ([0], [], 0)


def test_rarer_terms_weigh_more_and_all_weigh_something() -> None:
    weights = inverse_frequency(torch.tensor([0, 1, 50, 100]), 100).tolist()
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] > 0


def test_words_of_a_query() -> None:
    assert query_terms(["a", "b", "a", "unseen"], {"a": 3, "b": 1}) == {3: 2.0, 1: 1.0}


def keys_of(words: Sequence[str]) -> Tensor:
    return torch.tensor([word_key(word) for word in words], dtype=torch.long)


def test_pairs_of_queries() -> None:
    pairs = pair_keys(keys_of(["a", "b", "c", "a"]))
    phrases = Vocabulary(pairs.sort().values)
    ab, bc, ca = (phrases.number(pair) for pair in pairs.tolist())
    queries = [["b", "c", "a", "b", "c"], [], ["c", "b"], ["a"], ["b"], ["c", "a"]]
    found = query_phrases(queries, phrases)  # order matters, and "a" of one query stands before no "b" of the next
    assert found == [{bc: 2.0, ca: 1.0, ab: 1.0}, {}, {}, {}, {}, {ca: 1.0}]
    assert query_phrases([], phrases) == []
    assert query_phrases([["a", "b"]], Vocabulary(keys_of([]))) == [{}]
    assert pair_keys(keys_of([])).numel() == pair_keys(keys_of(["a"])).numel() == 0


@pytest.mark.parametrize("size", SIZES)
def test_words_are_looked_up_at_once_as_one_by_one(size: int) -> None:
    words = [f"w{i}" for i in range(2 * size + 1)]
    vocabulary = Vocabulary(keys_of(words[:size]).sort().values)
    assert vocabulary.among(words) == {word: vocabulary[word] for word in words[:size]}
    assert sorted(vocabulary.among(words).values()) == list(range(size))
    numbers = vocabulary.numbers([word_key(word) for word in words])
    assert [None if number < 0 else number for number in numbers] == [vocabulary.get(word) for word in words]
    assert vocabulary.among([]) == {}


@pytest.mark.parametrize("rows", SIZES)
def test_counts_by_key_are_counts_by_word(rows: int) -> None:
    texts, numbers = texts_of(rows), dict[str, int]()
    row = torch.tensor([row for row, words in enumerate(texts) for _ in words], dtype=torch.long)
    counts, vocabulary = TermCounts.of_keys(row, keys_of([word for words in texts for word in words]), rows)
    plain = TermCounts.of(texts, numbers)
    assert len(vocabulary) == len(numbers) == counts.terms
    assert all(word in vocabulary for word in numbers)
    assert "unseen" not in vocabulary
    again = {vocabulary[word]: number for word, number in numbers.items()}
    found = zip([again[t] for t in counts.term.tolist()], counts.row.tolist(), counts.count.tolist(), strict=True)
    assert sorted(found) == sorted(zip(plain.term.tolist(), plain.row.tolist(), plain.count.tolist(), strict=True))
    assert counts.term.tolist() == sorted(counts.term.tolist())


# Many memories at once

MEMORIES = [sample(seed, units) for seed, units in enumerate((7, 0, 129, 1))]


def postings_rows(one: Sample, level: str) -> list[dict[int, float]]:
    """Impact per term, for each row of a level."""
    postings = getattr(one.index, f"{level}_postings")
    term = torch.repeat_interleave(torch.arange(len(postings.counts)), postings.counts).tolist()
    rows: list[dict[int, float]] = [{} for _ in range(len(getattr(one.index, f"{level}_vectors", one.words)))]
    for t, row, impact in zip(term, postings.row.tolist(), postings.impact.tolist(), strict=True):
        rows[row][t] = impact
    return rows


@pytest.mark.parametrize("level", ["unit", "window", "episode"])
def test_every_query_is_scored_in_its_own_memory(level: str) -> None:
    bank = bank_of(MEMORIES)
    asked = [[query(10 * m + s, one) for s in range(3 - m % 2)] for m, one in enumerate(MEMORIES)]
    terms = lay_out(asked, bank).terms
    postings, axis = getattr(bank, f"{level}_postings"), bank.axes[f"{level}s"]
    scores = LexicalScores()(terms.slot, terms.row, terms.weight, postings, 3, axis.size)
    for m, one in enumerate(MEMORIES):
        for slot in range(3):
            own = asked[m][slot].terms if slot < len(asked[m]) else {}
            expected = [sum(w * row.get(t, 0.0) for t, w in own.items()) for row in postings_rows(one, level)]
            assert rows_of(scores, bank, slot, m, f"{level}s") == pytest.approx(expected)


def test_nothing_asked() -> None:
    postings = TermCounts.of(texts_of(7), {}).postings(0.9, 0.4)
    assert scores_of(postings, [], 7).shape == (0, 7)
    assert not scores_of(postings, [{}, {}], 7).any()


def some_postings(rows: int, seed: int = 0) -> Postings:
    return TermCounts.of(texts_of(rows, seed), {f"t{t}": t for t in range(TERMS)}).postings(0.9, 0.4)


def some_queries(count: int, *, signed: bool = False) -> list[dict[int, float]]:
    """Some terms are asked for more than once, and some queries ask nothing; ``signed``: weights of both signs."""
    dice = Dice(count)
    weights = dice.uniform(TERMS) - (0.5 if signed else 0.0)
    return [{t: float(weights[t]) + 1.0 * (not signed) for t in dice.below(TERMS, dice.one(6))} for _ in range(count)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_the_same_bits_alone_and_in_a_batch(backend: str) -> None:
    postings, asked = some_postings(129), some_queries(40)
    whole = scores_of(postings, asked, 129, backend)
    assert all(torch.equal(whole[[s]], scores_of(postings, [own], 129, backend)) for s, own in enumerate(asked))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_the_same_bits_in_any_order_of_terms(backend: str) -> None:
    postings, (slot, term, weight) = some_postings(129), entries_of(some_queries(40, signed=True))
    scores = LexicalScores(backend)(slot, term, weight, postings, 40, 129)
    order = torch.randperm(len(slot), generator=Dice(3).generator)
    assert torch.equal(LexicalScores(backend)(slot[order], term[order], weight[order], postings, 40, 129), scores)
    assert (scores < 0).any()
    assert (scores > 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_the_same_bits_beside_another_memory(backend: str) -> None:
    """A step is fixed by the query's own terms: not by the larger impacts that some other memory holds."""
    one, other = some_postings(129), some_postings(7, seed=1)
    louder = torch.cat([one.impact, 1000 * other.impact])
    both = Postings(torch.cat([one.counts, other.counts]), torch.cat([one.row, other.row + 129]), louder)
    asked = some_queries(40)
    assert torch.equal(scores_of(both, asked, 136, backend)[:, :129], scores_of(one, asked, 129, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_in_steps_is_as_near_as_one_of_floats(backend: str) -> None:
    postings, asked = some_postings(129), some_queries(40)
    exact = scores_of(replace(postings, impact=postings.impact.double()), asked, 129, "torch")
    slot, term, weight = entries_of(asked)
    floats = LexicalScores()(slot, term, weight.float().requires_grad_(), postings, 40, 129).detach()
    in_whole_steps = scores_of(postings, asked, 129, backend)
    assert (in_whole_steps - exact).abs().max() <= (floats - exact).abs().max()
    _, step = in_steps(slot, term, weight, postings, 40)
    rounded = exact.float()  # what is left of float32's own rounding apart from the steps
    assert ((in_whole_steps - rounded).abs() <= step[:, None] * TERMS / 2 + 2 * torch.finfo().eps * rounded).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight", [1e-60, 1e-6, 1.0, 1e9, 1e36])
def test_no_weight_is_too_large_or_small(backend: str, weight: float) -> None:
    postings = some_postings(129)
    asked = [{t: weight * (1 + t % 3) for t in range(TERMS)}]
    exact = scores_of(replace(postings, impact=postings.impact.double()), asked, 129, "torch")
    assert_close(scores_of(postings, asked, 129, backend).double(), exact, rtol=1e-6, atol=1e-7 * weight + 1e-20)


def test_a_workspace_changes_no_bit() -> None:
    postings, (slot, term, weight) = some_postings(129), entries_of(some_queries(40))
    whole, small = LexicalScores("torch"), LexicalScores("torch", workspace=64 * 5)  # five postings at a time
    assert torch.equal(small(slot, term, weight, postings, 40, 129), whole(slot, term, weight, postings, 40, 129))
    axis = axis_of([129])
    few, all_at_once = (one.best(slot, term, weight, postings, 40, axis, 9) for one in (small, whole))
    assert all(torch.equal(a, b) for a, b in zip(few, all_at_once, strict=True))


def best_rows(scores: list[float], axis: Axis, k: int) -> list[list[int]]:
    """The best rows of each segment, by sorting all of them."""
    ranked = []
    for first, last in zip(axis.ptr, axis.ptr[1:], strict=False):
        rows = sorted(range(first, last), key=lambda row: (-scores[row], row))[:k]
        ranked.append(rows + [-1] * (k - len(rows)))
    return ranked


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [[], [0], [1], [7], [129], [7, 0, 1, 121], [400]])
@pytest.mark.parametrize("k", [0, 1, 5, 50])
@pytest.mark.parametrize("signed", [False, True])
def test_the_best_rows_are_the_first_of_all_sorted(backend: str, sizes: list[int], k: int, signed: bool) -> None:
    """Most rows of these are not asked for and score 0: they tie, and go by their number."""
    axis, asked = axis_of(sizes), some_queries(7, signed=signed)
    postings, entries = some_postings(axis.size), entries_of(asked)
    scores = LexicalScores(backend)(*entries, postings, 7, axis.size)
    values, rows = LexicalScores(backend).best(*entries, postings, 7, axis, k)
    assert rows.tolist() == [best_rows(own, axis, k) for own in scores.tolist()]
    padded = torch.nn.functional.pad(scores, (0, 1))  # its last column, number -1, is what stands behind a last row
    assert torch.equal(values.flatten(1), padded[torch.arange(7)[:, None], rows.flatten(1)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_score_the_same_float_tie(backend: str) -> None:
    """The second row is two steps ahead, which float32 does not show."""
    postings = Postings(torch.tensor([2, 1]), torch.tensor([0, 1, 1]), torch.tensor([1.0, 1.0, 2.0**-27]))
    entries = entries_of([{0: 1.0, 1: 1.0}])
    assert in_steps(*entries, postings, 1)[1].tolist() == [2.0**-28]
    values, rows = LexicalScores(backend).best(*entries, postings, 1, axis_of([2]), 2)
    assert (values.tolist(), rows.tolist()) == ([[[1.0, 1.0]]], [[[0, 1]]])


def test_the_best_rows_of_floats() -> None:
    """Impacts of another dtype are not counted in steps."""
    postings, axis, asked = some_postings(129), axis_of([129]), some_queries(7)
    doubles = replace(postings, impact=postings.impact.double())
    values, rows = LexicalScores().best(*entries_of(asked), doubles, 7, axis, 5)
    assert values.dtype == torch.float64
    assert rows.tolist() == [best_rows(own, axis, 5) for own in scores_of(doubles, asked, 129).tolist()]


def test_gradient_to_weights_and_impacts() -> None:
    postings = TermCounts.of(texts_of(7), {}).postings(0.9, 0.4)
    slot, term = torch.tensor([0, 0, 2]), torch.tensor([1, 4, 1])
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    impact = postings.impact.double().requires_grad_()
    assert gradcheck(
        lambda w, i: LexicalScores()(slot, term, w, Postings(postings.counts, postings.row, i), 3, 7), (weight, impact)
    )
