"""Every signal of a unit and their sum (Eq. 11), against loops over one query and one memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import equations
import pytest
import torch
from builders import DAY, SIZES, Dice, Query, Sample, bank_of, bank_with, lay_out, query, rows_of, sample
from equations import Row
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

from zeromem_torch.bank import Postings
from zeromem_torch.retrieval.hierarchy import HierarchyView, SignalMix, prune_episodes
from zeromem_torch.retrieval.signals import KINDS, Signals, UnitSignals, date_nearness, profile_signals, spoken_dates
from zeromem_torch.substrate.kinds import AnswerType

REACH, LONGEST = 15.0, 40
RAGGED = [(size,) for size in SIZES] + [(7, 0, 20, 1, 3)]


def impacts(postings: Postings, asked: Mapping[int, float], rows: int) -> Row:
    """Eq. 11's lexical score of each row: what the query's terms add up to."""
    scores = [0.0] * rows
    start = 0
    for term, count in enumerate(postings.counts.tolist()):
        for entry in range(start, start + count):
            scores[int(postings.row[entry])] += asked.get(term, 0.0) * float(postings.impact[entry])
        start += count
    return scores


def best_chunk(vector: Tensor, memory: Sample) -> Row:
    nearness = [equations.dot(vector.tolist(), row) for row in memory.index.chunk_vectors.tolist()]
    owner = memory.index.chunk_unit.tolist()
    return [max(n for n, u in zip(nearness, owner, strict=True) if u == unit) for unit in range(memory.units)]


def semantic_signals(asked: Query, memory: Sample) -> dict[str, Row]:
    """Each level's score where it reaches the unit, before it is brought to [0, 1]."""
    index, units, members = memory.index, memory.units, memory.members
    of_windows = [equations.dot(asked.vector.tolist(), row) for row in index.window_vectors.tolist()]
    best = [equations.best_matches(asked.states.tolist(), memory.states_of(u)) for u in range(units)]
    in_window = [[max((best[u][i] for u in held), default=0.0) for i in range(len(asked.states))] for held in members]
    weights = asked.state_weights.tolist()
    lexical = {
        "window": impacts(index.window_postings, asked.terms, len(members)),
        "phrase": impacts(index.phrase_postings, asked.phrases, len(members)),
        "episode": impacts(index.episode_postings, asked.terms, len(index.episode_vectors)),
    }
    return {
        "dense_turn": best_chunk(asked.vector, memory),
        "dense_window": equations.best_window(of_windows, members, units),
        "lexical_turn": impacts(index.unit_postings, asked.terms, units),
        "lexical_window": equations.best_window(lexical["window"], members, units),
        "lexical_episode": [lexical["episode"][e] for e in index.unit_episode.tolist()],
        "phrase": equations.best_window(lexical["phrase"], members, units),
        "maxsim_turn": [equations.late_interaction(row, weights) for row in equations.told_apart(best)],
        "maxsim_window": equations.best_window(
            [equations.late_interaction(row, weights) for row in in_window], members, units
        ),
    }


def rest(asked: Query, memory: Sample) -> Row:
    """How well a unit answers the question without its names, half by vectors and half by terms."""
    dense = equations.minmax(best_chunk(asked.rest_vector, memory))
    lexical = equations.minmax(impacts(memory.index.unit_postings, asked.rest_terms, memory.units))
    return [0.5 * d + 0.5 * t for d, t in zip(dense, lexical, strict=True)]


def compatibilities(asked: Query, memory: Sample) -> dict[str, Row]:
    index, units = memory.index, range(memory.units)
    session, position = index.unit_session.tolist(), index.unit_position.tolist()
    spoken: list[list[tuple[int, int]]] = [[] for _ in units]
    for u, first, last in zip(
        index.date_unit.tolist(), index.date_first.tolist(), index.date_last.tolist(), strict=True
    ):
        spoken[u].append((first, last))
    holds = {
        f"holds_{name}": [float(bool(asked.kinds & kind and int(index.unit_kinds[u]) & kind)) for u in units]
        for name, kind in KINDS.items()
    }
    return {
        "subject": [float(asked.subject >= 0 and int(index.unit_speaker[u]) == asked.subject) for u in units],
        "date": [equations.nearness(int(index.unit_day[u]), asked.dates, REACH) for u in units],
        "spoken_date": [equations.speaks_of(spoken[u], asked.dates, LONGEST) for u in units],
        **holds,
        "title": [min(asked.titles.get(u, 0.0), 1.0) for u in units],
        "asks": [float(index.unit_asks[u]) for u in units],
        "answers": equations.follows_question(index.unit_asks.tolist(), session),
        "opens": [float(position[u] == 0) for u in units],
    }


def laid_out(sizes: Sequence[int], *, tied: bool = False) -> tuple[list[Sample], list[list[Query]]]:
    memories = [sample(50 + seed, units, tied=tied) for seed, units in enumerate(sizes)]
    asked = [[query(10 * m + s, one, blank=s == 2) for s in range(3 - m % 2)] for m, one in enumerate(memories)]
    return memories, asked


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("tied", [False, True])
def test_every_signal_equals_its_loop(sizes: tuple[int, ...], tied: bool) -> None:
    memories, asked = laid_out(sizes, tied=tied)
    bank = bank_of(memories)
    signals = UnitSignals(exhaustive=1000, candidates=5, date_reach=REACH)(lay_out(asked, bank), bank)
    for m, one in enumerate(memories):
        for s, own in enumerate(asked[m]):
            raw = semantic_signals(own, one)
            expected = {name: equations.minmax(row) for name, row in raw.items()}
            expected["cosine"] = [max(pair) for pair in zip(raw["dense_turn"], raw["dense_window"], strict=True)]
            expected |= compatibilities(own, one) | {"rest": rest(own, one)}
            assert expected.keys() == signals.keys()
            for name, row in expected.items():
                assert rows_of(signals[name], bank, s, m) == pytest.approx(row, abs=1e-6), name


@pytest.mark.parametrize("sizes", RAGGED)
def test_every_signal_lies_between_0_and_1(sizes: tuple[int, ...]) -> None:
    memories, asked = laid_out(sizes)
    bank = bank_of(memories)
    signals = UnitSignals(exhaustive=2, candidates=3, date_reach=REACH)(lay_out(asked, bank), bank)
    for name, scores in signals.items():
        least = -1 if name == "cosine" else 0  # as it is, so that it can be compared between memories
        assert bool(((scores >= least) & (scores <= 1 + 1e-6)).all()), name


def test_a_query_that_asks_for_nothing_special_gets_no_profile_signal() -> None:
    one = sample(1, 20)
    bank = bank_of([one])
    signals = profile_signals(lay_out([[query(1, one, blank=True)]], bank), bank, REACH)
    for name in ("subject", "date", "spoken_date", "title", *(f"holds_{kind}" for kind in KINDS)):
        assert not signals[name].any(), name


def test_kinds_of_answers_are_bits_of_their_own() -> None:
    every = AnswerType.DATE | AnswerType.DURATION | AnswerType.PLACE | AnswerType.PERSON | AnswerType.TITLE
    assert sum(int(kind) for kind in KINDS.values()) == int(every)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ([(DAY, DAY)], 1.0),
        ([(DAY + 3, DAY + 9)], 1 - 3 / 15),
        ([(DAY - 9, DAY - 3)], 1 - 3 / 15),
        ([(DAY - 40, DAY + 40)], 1.0),
        ([(1, DAY)], 1.0),  # from the first day on; day 0 is no day
        ([(DAY + 15, DAY + 16)], 0.0),
        ([(DAY + 40, DAY + 50), (DAY + 1, DAY + 1)], 1 - 1 / 15),
        ([(DAY + 3, DAY - 3), (DAY + 40, DAY + 50)], 0.0),  # what ends before it begins is no interval
        ([], 0.0),
    ],
)
def test_nearness_to_a_date(asked: list[tuple[int, int]], near: float) -> None:
    one = sample(1, 2)
    bank = bank_with(one, unit_day=torch.tensor([DAY, 0]))
    own = replace(query(1, one), dates=asked)
    scores = date_nearness(lay_out([[own]], bank), bank, REACH)
    assert scores[0].tolist() == pytest.approx([near, 0.0])


@pytest.mark.parametrize(
    ("asked", "longest", "meets"),
    [
        ([(DAY + 5, DAY + 5)], 40, 1.0),
        ([(DAY + 11, DAY + 12)], 40, 0.0),
        ([(DAY + 10, DAY + 12)], 40, 1.0),
        ([(DAY - 12, DAY)], 40, 1.0),
        ([(DAY - 12, DAY + 40)], 10, 1.0),
        ([(DAY - 12, DAY + 40)], 9, 0.0),
        ([(DAY + 6, DAY + 4), (DAY + 40, DAY + 41)], 40, 0.0),
        ([], 40, 0.0),
    ],
)
def test_a_date_that_a_unit_speaks_of(asked: list[tuple[int, int]], longest: int, meets: float) -> None:
    one = sample(1, 2)
    dates = {"date_unit": [1, 1], "date_first": [DAY, DAY + 90], "date_last": [DAY + 10, DAY + 90]}
    bank = bank_with(one, **{name: torch.tensor(values) for name, values in dates.items()})
    own = replace(query(1, one), dates=asked)
    assert spoken_dates(lay_out([[own]], bank), bank, longest)[0].tolist() == [0.0, meets]


# The sum


def signals_of(slots: int, units: int) -> dict[str, Tensor]:
    return {name: Dice(seed).uniform(slots, units) for seed, name in enumerate(("dense_turn", "phrase", "subject"))}


@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_the_view_is_the_weighted_sum(units: int, slots: int) -> None:
    weights, signals = {"dense_turn": 0.5, "phrase": -0.25, "unused": 0.0}, signals_of(slots, units)
    scores = HierarchyView(weights).double()(signals)
    assert torch.equal(scores, SignalMix(weights).double()(signals))
    for s in range(slots):
        rows = {name: signal[s].tolist() for name, signal in signals.items()}
        known = {name: weight for name, weight in weights.items() if weight}
        assert scores[s].tolist() == pytest.approx(equations.weighted(rows, known, units))


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("keep", [0, 1, 3, 200])
def test_hard_pruning_keeps_the_best_episodes(sizes: tuple[int, ...], keep: int) -> None:
    memories = [sample(50 + seed, units) for seed, units in enumerate(sizes)]
    bank = bank_of(memories)
    scores = Dice(1).uniform(3, bank.axes["units"].size)
    scores[1] = (4 * scores[1]).round() / 4  # ties
    pruned = prune_episodes(scores, bank, keep)
    for m, one in enumerate(memories):
        for s in range(3):
            expected = equations.prune_episodes(rows_of(scores, bank, s, m), one.index.unit_episode.tolist(), keep)
            assert rows_of(pruned, bank, s, m) == expected


def test_no_weight_scores_nothing() -> None:
    assert not SignalMix({"dense_turn": 0.0})(signals_of(2, 7)).any()


def test_weights_can_be_trained_but_are_frozen() -> None:
    mix = SignalMix({"dense_turn": 0.5})
    assert [(name, bool(p.requires_grad)) for name, p in mix.named_parameters()] == [("weights.dense_turn", False)]


def test_a_query_alone_is_the_same_bits_as_in_a_batch() -> None:
    mix, signals = SignalMix({"dense_turn": 0.5, "phrase": 0.3}).double(), signals_of(7, 12)
    whole = mix(signals)
    assert all(torch.equal(mix({n: x[[s]] for n, x in signals.items()}), whole[[s]]) for s in range(7))


def test_gradient_to_weights_and_signals() -> None:
    mix = SignalMix({"dense_turn": 0.5, "phrase": 0.25}).double()
    weights = [Dice(9).uniform(1)[0].requires_grad_() for _ in range(2)]
    given = [signal.requires_grad_() for signal in signals_of(2, 5).values()]

    def scores(dense: Tensor, phrase: Tensor, *signals: Tensor) -> Tensor:
        known = dict(zip(signals_of(0, 0), signals, strict=True))
        mixed: Tensor = functional_call(mix, {"weights.dense_turn": dense, "weights.phrase": phrase}, (known,))
        return mixed

    assert gradcheck(scores, (*weights, *given))


def test_gradient_reaches_the_vectors_the_states_and_the_terms() -> None:
    """Through every level, away from ties."""
    memories = [sample(4, 9), sample(5, 2)]
    asked = [[query(21 + s, one) for s in range(2)] for one in memories]
    bank = bank_of(memories)
    batch = lay_out(asked, bank)
    weights = {"dense_turn": 0.5, "dense_window": 0.25, "lexical_window": 0.25, "maxsim_turn": 1, "maxsim_window": 1}
    view = HierarchyView(weights).double()
    compute = UnitSignals(exhaustive=1000, candidates=5, date_reach=REACH)

    def scores(vectors: Tensor, states: Tensor, weight: Tensor) -> Tensor:
        terms = replace(batch.terms, weight=weight)
        signals: Signals = compute(replace(batch, vectors=vectors, states=states, terms=terms), bank)
        summed: Tensor = view(signals)
        return summed

    inputs = batch.vectors, batch.states, batch.terms.weight
    assert gradcheck(scores, tuple(x.clone().requires_grad_() for x in inputs), eps=1e-7, atol=1e-5)
