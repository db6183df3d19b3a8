"""Ragged axes, memories packed end to end, and the promise that they do not see each other."""

import copy
import dataclasses
from dataclasses import dataclass
from itertools import pairwise

import equations
import pytest
import torch
from builders import Query, Sample, bank_of, bank_with, lay_out, query, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch.bank import (
    SCORE_STEP,
    Index,
    MemoryBank,
    axis_of,
    member_mask,
    pack,
    segment_max,
    segment_minmax,
    segment_sum,
    segment_topk,
)
from zeromem_torch.calibration.evidence import EvidenceCalibration, within_budget
from zeromem_torch.closure import Closure
from zeromem_torch.retrieval.fusion import ViewFusion
from zeromem_torch.retrieval.graph import GraphView
from zeromem_torch.retrieval.hierarchy import HierarchyView
from zeromem_torch.retrieval.signals import UnitSignals
from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.routing.router import RuleRouter

RAGGED = [(), (0,), (1,), (7,), (129,), (3, 0, 1, 7, 129, 0)]


def grid(slots: int, rows: int, seed: int = 0, *, values: int = 5) -> Tensor:
    """Scores with many ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(values, (slots, rows), generator=generator).double() / 4 - 0.5


def parts(sizes: tuple[int, ...]) -> list[slice]:
    ptr = axis_of(sizes).ptr
    return [slice(a, b) for a, b in pairwise(ptr)]


# Axes and reductions


@pytest.mark.parametrize("sizes", RAGGED)
def test_axis_names_the_segment_of_every_row(sizes: tuple[int, ...]) -> None:
    axis = axis_of(sizes)
    assert axis.segments == len(sizes)
    assert axis.size == sum(sizes)
    assert axis.segment.tolist() == [m for m, size in enumerate(sizes) for _ in range(size)]
    lines = [[row for row in line if row >= 0] for line in axis.padded.tolist()]
    assert lines == [list(range(part.start, part.stop)) for part in parts(sizes)]
    assert axis.bounds.tolist() == list(axis.ptr)
    assert axis.longest == max(sizes, default=0)
    assert [part.ptr for part in axis.parts] == [(0, size) for size in sizes]


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("more", [(), (2,)])
def test_what_a_segment_has_is_spread_over_its_rows(sizes: tuple[int, ...], more: tuple[int, ...]) -> None:
    axis, values = axis_of(sizes), torch.rand(3, len(sizes), *more)
    assert torch.equal(axis.spread(values), values[:, axis.segment])


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_sum_and_max_of_each_segment(sizes: tuple[int, ...], slots: int) -> None:
    axis, values = axis_of(sizes), grid(slots, sum(sizes))
    sums = [[float(values[s, part].sum()) for part in parts(sizes)] for s in range(slots)]
    most = [[max(values[s, part].tolist(), default=-9.0) for part in parts(sizes)] for s in range(slots)]
    expected = torch.tensor([sums, most], dtype=torch.float64).reshape(2, slots, len(sizes))
    assert_close(segment_sum(values, axis.segment, axis.segments), expected[0])
    assert_close(segment_max(values, axis.segment, axis.segments, empty=-9.0), expected[1])


@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("worth", [1, 1 << 30])
def test_minmax_equals_equation_12(
    sizes: tuple[int, ...], masked: bool, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments one by one and all together."""
    monkeypatch.setattr("zeromem_torch.bank.WORTH_A_CALL", worth)
    values, present = grid(3, sum(sizes)), torch.rand(3, sum(sizes)) < 0.6
    values[1] = 0.25  # all equal
    present[2] = False  # all absent
    scaled = segment_minmax(values, axis_of(sizes), present if masked else None)
    for s in range(3):
        for part in parts(sizes):
            there = present[s, part].tolist() if masked else None
            assert scaled[s, part].tolist() == pytest.approx(equations.minmax(values[s, part].tolist(), there))


def test_minmax_takes_a_span_of_rounding_for_equal() -> None:
    axis = axis_of([3])
    values = torch.tensor([[0.5, 0.5 + 0.9 * SCORE_STEP, 0.5], [0.5, 0.5 + 1.1 * SCORE_STEP, 0.5]], dtype=torch.float64)
    assert segment_minmax(values, axis).tolist() == [[1, 1, 1], [0, 1, 0]]


def test_minmax_does_not_care_for_the_order_of_rows() -> None:
    values, order = torch.rand(2, 7, dtype=torch.float64), torch.randperm(7)
    assert torch.equal(segment_minmax(values[:, order], axis_of([7])), segment_minmax(values, axis_of([7]))[:, order])


@pytest.mark.parametrize("k", [0, 1, 5, 200])
@pytest.mark.parametrize("sizes", RAGGED)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_topk_equals_a_sort(sizes: tuple[int, ...], k: int, masked: bool, backend: str) -> None:
    scores, present = grid(3, sum(sizes)), torch.rand(3, sum(sizes)) < 0.6
    present[2] = False
    found = segment_topk(scores, axis_of(sizes), k, present if masked else None, backend)
    assert found.shape == (3, len(sizes), k)
    for s in range(3):
        for m, part in enumerate(parts(sizes)):
            admitted = present[s, part].nonzero()[:, 0].tolist() if masked else None
            rows = equations.ranking(scores[s, part].tolist(), k, admitted)
            assert found[s, m].tolist() == [part.start + row for row in rows] + [-1] * (k - len(rows))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_topk_of_scores_closer_than_a_step_goes_by_row(backend: str) -> None:
    scores = torch.tensor([[0.3, 0.3 + 0.4 * SCORE_STEP, 0.3 + 2 * SCORE_STEP]], dtype=torch.float64)
    assert segment_topk(scores, axis_of([3]), 3, backend=backend).tolist() == [[[2, 0, 1]]]


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_topk_ranks_negative_and_infinite_scores(backend: str) -> None:
    scores = torch.tensor([[-torch.inf, -1.0, torch.inf, 0.0]])
    assert segment_topk(scores, axis_of([4]), 5, backend=backend).tolist() == [[[2, 3, 1, 0, -1]]]


@pytest.mark.parametrize("size", [0, 1, 7])
def test_member_mask_names_the_rows(size: int) -> None:
    rows = torch.tensor([[[0, -1], [-1, 2]], [[-1, -1], [-1, -1]], [[5, 5], [1, -1]]])
    rows = torch.where(rows < size, rows, -1)
    mask = member_mask(rows, size)
    assert mask.shape == (3, size)
    assert [set(own.nonzero()[:, 0].tolist()) for own in mask] == [set(own.flatten().tolist()) - {-1} for own in rows]


@pytest.mark.parametrize("worth", [1, 1 << 30])
def test_gradient_of_minmax(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromem_torch.bank.WORTH_A_CALL", worth)
    axis, present = axis_of([4, 0, 3, 1]), torch.tensor([[True] * 4 + [True, False, True] + [False]])
    values = torch.rand(1, 8, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda v: segment_minmax(v, axis), values)
    assert gradcheck(lambda v: segment_minmax(v, axis, present), values)


def test_gradient_of_minmax_is_zero_where_all_are_equal_or_absent() -> None:
    values = torch.full((1, 3), 0.5, dtype=torch.float64, requires_grad=True)
    for present in (None, torch.zeros(1, 3, dtype=torch.bool)):
        (grad,) = torch.autograd.grad(segment_minmax(values, axis_of([3]), present).sum(), values)
        assert grad.tolist() == [[0, 0, 0]]


def test_rows_that_tie_for_the_maximum_share_its_gradient() -> None:
    for segments in (1, 2):  # a segment alone is another way through than one of several
        values = torch.tensor([[1.0, 3.0, 3.0]], requires_grad=True)
        most = segment_max(values, torch.zeros(3, dtype=torch.long), segments, empty=0.0)
        (grad,) = torch.autograd.grad(most.sum(), values)
        assert grad.tolist() == [[0, 0.5, 0.5]]


# Packing

SAMPLES = tuple(sample(seed, units) for seed, units in enumerate((7, 0, 1, 129, 2)))


def test_packed_rows_lie_end_to_end_and_point_into_their_own_memory() -> None:
    bank = bank_of(SAMPLES)
    assert bank.memories == len(SAMPLES)
    assert bank.axes["units"].ptr == (0, 7, 7, 8, 137, 139)
    for field in dataclasses.fields(Index):
        if "axis" not in field.metadata:
            continue
        own, to = bank.axes[field.metadata["axis"]].ptr, field.metadata["to"]
        for m, one in enumerate(SAMPLES):
            packed, given_ = getattr(bank, field.name)[own[m] : own[m + 1]], getattr(one.index, field.name)
            start = bank.axes[to].ptr[m] if to else 0
            moved = torch.where(given_ >= 0, given_ + start, given_) if to else given_
            assert torch.equal(packed, moved), field.name
            if to:
                inside = (packed >= start) & (packed < bank.axes[to].ptr[m + 1])
                assert bool((inside | (given_ == -1)).all()), field.name


def test_the_graph_of_a_bank_is_block_diagonal() -> None:
    bank = bank_of(SAMPLES)
    blocks = torch.zeros(bank.axes["nodes"].size, bank.axes["nodes"].size, dtype=torch.float64)
    for one, part in zip(SAMPLES, pairwise(bank.axes["nodes"].ptr), strict=True):
        blocks[slice(*part), slice(*part)] = torch.tensor(one.edges)
    assert torch.equal(bank.adjacency.to_dense(), blocks)
    assert torch.equal(bank.adjacency_t.to_dense(), bank.adjacency.to_dense().T)


def test_values_of_units_and_entities_meet_on_their_nodes() -> None:
    for samples in (SAMPLES, SAMPLES[:1]):
        bank = bank_of(samples)
        units, entities, nodes = (torch.rand(3, bank.axes[name].size) for name in ("units", "entities", "nodes"))
        on_nodes = bank.on_nodes(units, entities)
        assert on_nodes.shape == nodes.shape
        assert torch.equal(on_nodes[:, bank.unit_node], units)
        assert torch.equal(on_nodes[:, bank.entity_node], entities)
        assert torch.equal(bank.at_units(nodes), nodes[:, bank.unit_node])


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES[:1], SAMPLES[1:2], (sample(9, 12, lone=True),)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_unit_gets_the_best_of_its_chunks_and_windows_and_what_its_episode_has(
    samples: tuple[Sample, ...], grad: bool
) -> None:
    bank = bank_of(samples)
    chunks, windows, episodes = (torch.rand(3, bank.axes[n].size) for n in ("chunks", "windows", "episodes"))
    holding: list[list[int]] = [[] for _ in range(bank.axes["units"].size)]
    for window, unit in zip(bank.member_window.tolist(), bank.member_unit.tolist(), strict=True):
        holding[unit].append(window)
    found = [bank.best_chunk(chunks), bank.best_window(windows.requires_grad_(grad)), bank.of_episode(episodes)]
    for s in range(3):
        for unit, own in enumerate(holding):
            of_chunks = chunks[s][bank.chunk_unit == unit].max()
            expected = torch.stack([of_chunks, windows[s, own].max(), episodes[s, bank.unit_episode[unit]]])
            assert torch.equal(torch.stack([scores[s, unit] for scores in found]), expected)


def test_mentions_say_which_sentence_names_which_entity_not_how_often() -> None:
    bank = bank_of(SAMPLES)
    said = [pair for one in SAMPLES for pair in zip(one.index.mention_sentence, one.index.mention_entity, strict=True)]
    dense = bank.mentions.to_dense()
    assert len({(int(z), int(e)) for z, e in said}) < len(said), "some sentence names an entity twice"
    assert set(dense.flatten().tolist()) == {0.0, 1.0}
    for m, one in enumerate(SAMPLES):
        z, e = bank.axes["sentences"].ptr, bank.axes["entities"].ptr
        block = dense[z[m] : z[m + 1], e[m] : e[m + 1]]
        assert [set(row.nonzero()[:, 0].tolist()) for row in block] == one.sentences
    assert dense.sum() == sum(len(named) for one in SAMPLES for named in one.sentences)
    assert torch.equal(bank.mentions_t.to_dense(), dense.T)


def test_postings_count_terms_per_memory() -> None:
    bank = bank_of(SAMPLES)
    for name in ("unit_postings", "window_postings", "episode_postings", "phrase_postings"):
        postings = getattr(bank, name)
        assert postings.counts.tolist() == [n for one in SAMPLES for n in getattr(one.index, name).counts.tolist()]
        assert int(postings.counts.sum()) == postings.row.numel() == postings.impact.numel()


def test_token_states_are_found_by_offset() -> None:
    bank = bank_of(SAMPLES)
    assert bank.state_ptr[-1] == len(bank.token_states)
    unit = bank.axes["units"].ptr[3] + 5
    states = bank.token_states[bank.state_ptr[unit] : bank.state_ptr[unit + 1]]
    assert states.tolist() == SAMPLES[3].states_of(5)


def test_a_bank_can_move_be_copied_and_names_no_stranger() -> None:
    bank = bank_of(SAMPLES)
    assert torch.equal(copy.deepcopy(bank).unit_day, bank.unit_day)
    assert torch.equal(SAMPLES[0].index.to("cpu").unit_postings.impact, SAMPLES[0].index.unit_postings.impact)
    assert bank.device == torch.device("cpu")
    with pytest.raises(AttributeError, match="unit_colour"):
        _ = bank.unit_colour


def test_a_bank_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one memory"):
        pack([], [])


# Isolation: the whole of retrieval, on one bank and on many


@dataclass(frozen=True)
class Found:
    signals: dict[str, Tensor]
    graph: Tensor
    hierarchy: Tensor
    fused: Tensor
    ranked: Tensor
    main: Tensor
    rows: Tensor
    handed: Tensor


WEIGHTS = {
    "dense_window": 0.25, "lexical_turn": 0.25, "lexical_window": 0.125, "lexical_episode": 0.125, "phrase": 0.125,
    "maxsim_turn": 0.25, "maxsim_window": 0.5, "subject": 0.25, "date": 0.5, "spoken_date": 0.125, "holds_time": 0.25,
    "title": 0.25, "asks": -0.125, "answers": 0.125, "opens": 0.0625,
}  # fmt: skip


def search(batch: QueryBatch, bank: MemoryBank) -> Found:
    """Every operator in its place, with a memory of more than four units past the exhaustive late interaction."""
    units = bank.axes["units"]
    signals = UnitSignals(exhaustive=4, candidates=6, date_reach=15.0)(batch, bank)
    view = GraphView(
        WEIGHTS, {"phrase": 0.125}, damping=0.6, sharpness=4.0, affinity=2.0, named=0.25, hops=2, decay=0.5
    )
    graph, hierarchy = view(batch, bank, signals).units, HierarchyView(WEIGHTS)(signals)
    fused = ViewFusion(4.0)(graph, hierarchy, RuleRouter(0.6).double().rule(batch), units)
    main = segment_topk(fused, units, 3)
    support = Closure(0.125, 0.125)(fused, main, bank)
    calibration = EvidenceCalibration({"subject": 0.125, "date": 0.25})
    ranked = calibration(fused + support.neighbour + support.graph, signals)
    rows = segment_topk(ranked, units, 12)
    handed = within_budget(rows, bank.unit_tokens, 150)
    return Found(dict(signals), graph, hierarchy, fused, ranked, main, rows, handed)


def results(found: Found, bank: MemoryBank, slot: int, m: int) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """The scores and the rankings of one query, in the numbers of its memory."""
    first, last = bank.axes["units"].ptr[m : m + 2]
    scores = found.signals | {"graph": found.graph, "hierarchy": found.hierarchy}
    scores |= {"fused": found.fused, "ranked": found.ranked}
    rows = {"main": found.main, "rows": found.rows, "handed": found.handed}
    local = {name: [row - first if row >= 0 else -1 for row in of[slot, m].tolist()] for name, of in rows.items()}
    return {name: of[slot, first:last] for name, of in scores.items()}, local


def assert_same(
    one: tuple[dict[str, Tensor], dict[str, list[int]]], other: tuple[dict[str, Tensor], dict[str, list[int]]]
) -> None:
    """Equal within rounding; ranks may differ where two scores do not."""
    for name, scores in one[0].items():
        assert_close(scores, other[0][name], rtol=0, atol=1e-7, msg=name)
    for name, rows in one[1].items():
        scores = one[0]["fused" if name == "main" else "ranked"]
        for a, b in zip(rows, other[1][name], strict=True):
            assert a == b or (min(a, b) >= 0 and abs(float(scores[a] - scores[b])) < 1e-5), (name, rows, other[1][name])


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[Sample], list[list[Query]]]:
    """Boundaries of 0 to 9 units, tied or plain ones among them, asked 0 to 3 queries each."""
    samples = [
        sample(draw(st.integers(0, 999)), units, tied=draw(st.booleans()), plain=draw(st.booleans()))
        for units in draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    ]
    asked = [
        [query(seed, one, blank=seed % 3 == 0) for seed in draw(st.lists(st.integers(0, 999), max_size=3))]
        for one in samples
    ]
    return samples, asked


@settings(deadline=None, max_examples=40, derandomize=True)
@given(packed())
def test_a_query_finds_only_its_own_boundary_and_what_it_finds_there_alone(
    given_: tuple[list[Sample], list[list[Query]]],
) -> None:
    samples, asked = given_
    bank = bank_of(samples)
    found = search(lay_out(asked, bank), bank)
    ptr = bank.axes["units"].ptr
    for m, (one, queries) in enumerate(zip(samples, asked, strict=True)):
        for rows in (found.main[:, m], found.rows[:, m], found.handed[:, m]):
            assert bool(((rows == -1) | ((rows >= ptr[m]) & (rows < ptr[m + 1]))).all())
        own = bank_of([one])
        alone = search(lay_out([queries], own), own)
        for slot in range(len(queries)):
            assert_same(results(found, bank, slot, m), results(alone, own, slot, 0))


@pytest.mark.parametrize("together", [1, 7, 23])
def test_a_query_gets_the_same_alone_and_in_any_batch(together: int) -> None:
    memories = [sample(1, 129), sample(2, 7), sample(3, 1, plain=True), sample(4, 0), sample(5, 40, tied=True)]
    bank = bank_of(memories)
    asked = [[query(100 * m + s, one, blank=s == 3) for s in range(23 - 4 * m)] for m, one in enumerate(memories)]
    whole = search(lay_out(asked, bank), bank)
    for first in range(0, 23, 6):
        some = [own[first : first + together] for own in asked]
        part = search(lay_out(some, bank), bank)
        for m, own in enumerate(some):
            for slot in range(len(own)):
                assert_same(results(whole, bank, first + slot, m), results(part, bank, slot, m))


def test_nothing_asked_gives_nothing() -> None:
    bank = bank_of(SAMPLES)
    found = search(lay_out([[] for _ in SAMPLES], bank), bank)
    assert found.fused.shape == (0, 139)
    assert found.rows.shape == (0, 5, 12)


def test_an_unfilled_slot_is_finite_and_disturbs_nobody() -> None:
    bank = bank_of(SAMPLES)
    one = query(1, SAMPLES[3])
    holes = search(lay_out([[], [], [], [None, one], []], bank), bank)
    assert all(bool(scores.isfinite().all()) for scores in (*holes.signals.values(), holes.fused, holes.ranked))
    alone = search(lay_out([[], [], [], [one], []], bank), bank)
    assert_same(results(holes, bank, 1, 3), results(alone, bank, 0, 3))


def test_equal_units_come_in_order_of_their_number() -> None:
    one = sample(3, 7, plain=True)
    bank = bank_with(
        one,
        chunk_vectors=torch.ones_like(one.index.chunk_vectors),
        window_vectors=torch.ones_like(one.index.window_vectors),
        unit_asks=torch.zeros(7, dtype=torch.bool),
        unit_position=torch.ones(7, dtype=torch.long),
        out_degree=torch.zeros(7, dtype=torch.long),
        edge_target=torch.empty(0, dtype=torch.long),
        edge_weight=torch.empty(0, dtype=torch.float64),
    )
    found = search(lay_out([[query(2, one, blank=True)]], bank), bank)
    assert found.main.tolist() == [[[0, 1, 2]]]
