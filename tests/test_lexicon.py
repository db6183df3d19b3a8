"""BM25 impacts and the scores made of them, against the formula spelled out."""

from collections.abc import Sequence

import equations
import pytest
import torch
from builders import SIZES, TERMS, Dice, Sample, bank_of, lay_out, query, rows_of, sample
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch.bank import Postings
from zeromem_torch.retrieval.lexical import LexicalScores
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


def scores_of(postings: Postings, asked: list[dict[int, float]], rows: int) -> torch.Tensor:
    slot = torch.tensor([s for s, own in enumerate(asked) for _ in own], dtype=torch.long)
    term = torch.tensor([t for own in asked for t in own], dtype=torch.long)
    weight = torch.tensor([w for own in asked for w in own.values()], dtype=torch.float64)
    found: torch.Tensor = LexicalScores()(slot, term, weight, postings, len(asked), rows)
    return found


def texts_of(rows: int, seed: int = 0) -> list[list[str]]:
    """Some texts are empty, one is long, and words repeat."""
    dice = Dice(seed)
    return [[f"t{t}" for t in dice.below(TERMS, 40 if row == 3 else dice.one(6))] for row in range(rows)]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("k1", "b"), CONSTANTS)
def test_scores_equal_the_formula(rows: int, k1: float, b: float) -> None:
    texts, vocabulary = texts_of(rows), dict[str, int]()
    postings = TermCounts.of(texts, vocabulary).postings(k1, b)
    asked = [{"t0": 1.0, "t3": 2.0, "unseen": 1.0}, {}, {f"t{t}": 1.0 for t in range(TERMS)}]
    known = [{vocabulary[word]: weight for word, weight in own.items() if word in vocabulary} for own in asked]
    expected = [equations.bm25(texts, own, k1, b) for own in asked]
    assert_close(
        scores_of(postings, known, rows).double(),
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


def test_rarer_terms_weigh_more_and_all_weigh_something() -> None:
    weights = inverse_frequency(torch.tensor([0, 1, 50, 100]), 100).tolist()
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] > 0


def test_words_of_a_query() -> None:
    assert query_terms(["a", "b", "a", "unseen"], {"a": 3, "b": 1}) == {3: 2.0, 1: 1.0}


def keys_of(words: Sequence[str]) -> Tensor:
    return torch.tensor([word_key(word) for word in words], dtype=torch.long)


def test_pairs_of_a_query() -> None:
    pairs = pair_keys(keys_of(["a", "b", "c", "a"]))
    phrases = Vocabulary(pairs.sort().values)
    numbers = [phrases.number(pair) for pair in pairs.tolist()]
    assert query_phrases(["b", "c", "a", "b", "c"], phrases) == {numbers[1]: 2.0, numbers[2]: 1.0, numbers[0]: 1.0}
    assert query_phrases(["c", "b"], phrases) == {}  # order matters
    assert query_phrases(["a"], phrases) == query_phrases([], phrases) == {}
    assert pair_keys(keys_of([])).numel() == pair_keys(keys_of(["a"])).numel() == 0


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


def test_scores_are_the_same_bits_alone_and_in_a_batch() -> None:
    postings = TermCounts.of(texts_of(129), {}).postings(0.9, 0.4)
    asked = [{t: 1.0 + t for t in Dice(s).below(TERMS, 4)} for s in range(7)]
    whole = scores_of(postings, asked, 129)
    assert all(torch.equal(whole[[s]], scores_of(postings, [own], 129)) for s, own in enumerate(asked))


def test_gradient_to_weights_and_impacts() -> None:
    postings = TermCounts.of(texts_of(7), {}).postings(0.9, 0.4)
    slot, term = torch.tensor([0, 0, 2]), torch.tensor([1, 4, 1])
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    impact = postings.impact.double().requires_grad_()
    assert gradcheck(
        lambda w, i: LexicalScores()(slot, term, w, Postings(postings.counts, postings.row, i), 3, 7), (weight, impact)
    )
