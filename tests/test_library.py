"""What users hold: traces in, evidence out, every piece with its place, its reason and the sum that ranked it."""

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from toys import RULES, HashEncoder, memory_of, talk

from zeromem_torch.config import CalibrationConfig, ComputeConfig, FusionConfig, RoutingConfig, SignalWeights
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.routing.router import LOCAL, RELATIONAL, ROUTERS, LearnedRouter
from zeromem_torch.substrate.traces import Trace, ZeroMemError

LAKE = talk(
    "lake",
    ["We went to the lake in Oslo.", "Was it cold?", "Yes, the Mjosa is always cold.", "I bought a red boat."],
    ["The red boat sank.", "Oh no! What will you do?", "I will build a raft from the Mjosa reeds.", "Call it Otter."],
    ["Otter floats.", "It is a fine raft.", "We sail to Oslo on Friday.", "Bring the red flag."],
)
FACTS = [
    Trace("d/1", "docs", "Otter Lake is fed by the Mjosa.", title="Otter Lake"),
    Trace("d/2", "docs", "The Mjosa rises near Lom.", title="Mjosa"),
    Trace("d/3", "docs", "Lom is a village. It has a church.", title="Lom (village)"),
    Trace("d/4", "docs", "Reeds grow on every shore.", title="Reed"),
]


def lists(evidence: Evidence) -> list[list[EvidenceItem]]:
    return [list(evidence.main), list(evidence.closed), list(evidence.items)]


def ids(items: object) -> list[str]:
    assert isinstance(items, list)
    return [item.trace_id for item in items]


@pytest.fixture(scope="module")
def memory() -> ZeroMem:
    return memory_of(*LAKE, *FACTS)


QUESTIONS = [
    ("What did Ann buy?", "lake"),
    ("What sank?", "lake"),
    ("Where do we sail on Friday?", "lake"),
    ("Where does the water of Otter Lake come from, and what village is near its source?", "docs"),
    ("Who knows the church of the village where the Mjosa rises?", "docs"),
]


@pytest.mark.parametrize(("query", "boundary"), QUESTIONS)
@pytest.mark.parametrize("budget", [None, 30])
def test_every_piece_of_evidence_points_at_its_trace(
    memory: ZeroMem, query: str, boundary: str, budget: int | None
) -> None:
    traces = {trace.id: trace for trace in (*LAKE, *FACTS)}
    evidence = memory.search(query, boundary=boundary, top_k=3, token_budget=budget)
    assert (evidence.query, evidence.boundary) == (query, boundary)
    for items in lists(evidence):
        assert len(set(ids(items))) == len(items)
        for item in items:
            trace = traces[item.trace_id]
            assert trace.boundary == boundary
            assert item.text == trace.text[item.start : item.end]
            assert (item.speaker, item.time, item.session, item.title) == (
                trace.speaker,
                trace.time,
                trace.session,
                trace.title,
            )


@pytest.mark.parametrize(("query", "boundary"), QUESTIONS)
def test_the_sums_reproduce_the_score(memory: ZeroMem, query: str, boundary: str) -> None:
    evidence = memory.search(query, boundary=boundary, top_k=3)
    primary, secondary = ("graph", "hierarchy") if evidence.route == RELATIONAL else ("hierarchy", "graph")
    fusion = memory.config.fusion
    contrast = {"graph": fusion.graph_contrast, "hierarchy": fusion.hierarchy_contrast}
    for item in evidence.closed:
        seen = {view: item.views[view] ** contrast[view] for view in contrast}
        fused = evidence.rho * seen[primary] + (1 - evidence.rho) * seen[secondary]
        assert item.parts["fused"] == pytest.approx(fused, abs=1e-5)
        assert sum(item.parts.values()) == pytest.approx(item.score, abs=1e-6)
        assert set(item.parts) == {"fused", "neighbour", "graph support", "calibration"}


@pytest.mark.parametrize("subject", [0.0, 0.5])
def test_the_profile_part_is_what_calibration_weighs(subject: float) -> None:
    calibration = CalibrationConfig(weights=SignalWeights(subject=subject))
    memory = memory_of(*LAKE, config=dataclasses.replace(RULES, calibration=calibration))
    for item in memory.search("What did Ann buy?", boundary="lake").closed:
        assert item.parts["calibration"] == pytest.approx(subject * (item.speaker == "Ann"), abs=1e-6)


@pytest.mark.parametrize(("query", "boundary"), QUESTIONS)
def test_each_list_is_ranked_by_what_it_says(memory: ZeroMem, query: str, boundary: str) -> None:
    evidence = memory.search(query, boundary=boundary, top_k=3)
    fused = [item.parts["fused"] for item in evidence.main]
    scores = [item.score for item in evidence.items]
    assert len(evidence.main) == 3
    assert fused == sorted(fused, reverse=True)
    assert scores == sorted(scores, reverse=True)
    # C(q) is M(q) and what closes it; R(q) is C(q) in another order
    assert ids(list(evidence.closed))[:3] == ids(list(evidence.main))
    assert sorted(ids(list(evidence.closed))) == sorted(ids(list(evidence.items)))
    assert len(evidence.closed) <= 3 + memory.config.closure.most


def test_what_closure_adds_names_the_unit_that_it_supports(memory: ZeroMem) -> None:
    reasons = set()
    for query, boundary in QUESTIONS:
        evidence = memory.search(query, boundary=boundary, top_k=1)
        main = set(ids(list(evidence.main)))
        for item in evidence.closed:
            reasons.add(item.reason)
            assert (item.reason == "main") == (item.trace_id in main)
            if item.reason == "neighbour":
                assert item.source in main
                assert item.parts["neighbour"] > 0
            elif item.reason == "graph support":
                assert item.source in main | {None}
                assert item.parts["graph support"] > 0
    assert reasons == {"main", "neighbour", "graph support"}


@pytest.mark.parametrize(("views", "weight"), [("graph", 1.0), ("hierarchy", 0.0)])
def test_rho_is_the_weight_of_the_primary_view(views: str, weight: float) -> None:
    memory = memory_of(*LAKE, config=dataclasses.replace(RULES, routing=RoutingConfig(views=views)))
    routes = set()
    for query in ("What sank?", "Who knows the person whose friend built the raft that Ann and Bo both sail?"):
        evidence = memory.search(query, boundary="lake")
        assert evidence.rho == (weight if evidence.route == RELATIONAL else 1 - weight)
        routes.add(evidence.route)
    assert routes == {LOCAL, RELATIONAL}


@pytest.mark.parametrize("budget", [1, 12, 25, 60, 200, 10_000])
def test_a_token_budget_is_kept_and_used(memory: ZeroMem, budget: int) -> None:
    evidence = memory.search("What sank?", boundary="lake", token_budget=budget)
    assert evidence.tokens == sum(item.tokens for item in evidence.items) <= budget
    whole = memory.search("What sank?", boundary="lake", token_budget=10_000).items
    assert len(whole) == len(LAKE)
    left = budget
    expected = []
    for item in whole:  # greedy by rank: what does not fit is skipped
        if item.tokens <= left:
            expected.append(item.trace_id)
            left -= item.tokens
    assert ids(list(evidence.items)) == expected


def test_a_large_budget_is_not_cut_at_any_default() -> None:
    memory = memory_of(*talk("long", [f"Entry {number}." for number in range(700)]))
    assert len(memory.search("entry", boundary="long", token_budget=100_000).items) == 700
    assert len(memory.search("entry", boundary="long", top_k=700).main) == 700


def test_a_turn_is_counted_as_a_reader_gets_it(memory: ZeroMem) -> None:
    (item,) = memory.search("What sank?", boundary="lake", top_k=1).main
    assert item.text == "The red boat sank."
    dated = "[7 July 2023] Ann: The red boat sank."
    assert item.tokens == len(HashEncoder().token_spans([dated])[0])


def test_evidence_is_plain_data(memory: ZeroMem) -> None:
    found = memory.search("What sank?", boundary="lake", explain=True)
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert Evidence.from_dict(plain).to_dict() == plain
    assert Evidence.from_dict(plain).items == list(found.items)
    assert plain["main"][0]["time"] == "2023-07-07T13:57:00+00:00"


def test_adding_the_same_traces_again_changes_nothing() -> None:
    encoder = HashEncoder()
    memory = memory_of(*LAKE, encoder=encoder)
    before = memory.search("What sank?", boundary="lake")
    assert memory.add(LAKE) == [trace.id for trace in LAKE]
    assert memory.add(LAKE[0]) == [LAKE[0].id]
    assert len(memory) == len(LAKE)
    encoded = len(encoder.calls)
    assert memory.search("What sank?", boundary="lake") == before
    assert [text for call in encoder.calls[encoded:] for text in call] == ["What sank?"]  # nothing is built again


def test_an_addition_shows_in_the_next_search_whatever_was_searched_before() -> None:
    memory = memory_of(Trace("0", "a", "first words"))
    for number in range(1, 30):  # freed indexes leave their addresses to new ones
        memory.search("words", boundary="a")
        memory.add(Trace(str(number), "a", f"number {number} words"))
        found = memory.search(f"number {number} words", boundary="a", top_k=100)
        assert len(found.main) == number + 1
        assert found.main[0].trace_id == str(number)


def test_traces_may_come_in_any_order_and_in_any_number_of_calls() -> None:
    expected = memory_of(*LAKE).search("What sank?", boundary="lake")
    backwards = memory_of(*reversed(LAKE))
    apart = memory_of()
    for trace in (*LAKE[6:], *LAKE[:6]):
        apart.add(trace)
    assert backwards.search("What sank?", boundary="lake") == expected
    assert apart.search("What sank?", boundary="lake") == expected
    assert memory_of(*(dataclasses.asdict(t) for t in LAKE)).search("What sank?", boundary="lake") == expected


def test_equal_units_come_in_the_order_of_the_record() -> None:
    memory = memory_of(*(Trace(f"t{number}", "same", "The red boat sank.") for number in range(9)))
    assert ids(list(memory.search("red boat", boundary="same", top_k=9).main)) == [f"t{number}" for number in range(9)]


def test_relative_dates_count_from_the_reference_time_or_the_last_event() -> None:
    day = datetime(2024, 1, 10, 12, tzinfo=UTC)
    traces = [
        Trace(f"s/{n}", "s", "We met and talked.", session=f"s{n}", time=day.replace(day=n)) for n in range(1, 28)
    ]
    memory = memory_of(*traces)
    assert memory.search("What did we say yesterday?", boundary="s").main[0].trace_id == "s/26"
    then = datetime(2024, 1, 11, 9)
    assert memory.search("What did we say yesterday?", boundary="s", reference_time=then).main[0].trace_id == "s/10"


def test_the_memory_spends_no_token_of_a_language_model(memory: ZeroMem) -> None:
    memory.search("What sank?", boundary="lake")
    spent = memory.ledger
    assert (spent.memory_llm_calls, spent.reader_calls, spent.reader_tokens) == (0, 0, 0)
    assert spent.encoder_tokens > 0
    assert memory.boundaries == ("lake", "docs")
    assert repr(memory) == f"ZeroMem({len(LAKE) + len(FACTS)} traces in 2 boundaries, encoder hash-1)"
    assert {"build", "pack", "profile and encode", "search both views"} <= set(memory.timings)


def test_a_neighbour_is_of_the_same_session() -> None:
    """Two sessions meet in the order of units, which makes their turns no neighbours."""
    traces = talk(
        "x", ["We baked bread.", "Do you like rye?"], ["Yes, it is dark.", "Do you bake?", "Yes, it was rye."]
    )
    memory, session = memory_of(*traces), {trace.id: trace.session for trace in traces}
    pairs = [
        (item.trace_id, item.source)
        for query in ("Who likes rye?", "What is dark?", "What did we bake?")
        for top_k in (1, 2)
        for item in memory.search(query, boundary="x", top_k=top_k).closed
        if item.reason == "neighbour"
    ]
    assert pairs
    assert all(source is not None and session[name] == session[source] for name, source in pairs)


def test_weights_can_be_trained_after_a_search(memory: ZeroMem) -> None:
    query, boundary = QUESTIONS[0]
    memory.search(query, boundary=boundary)
    (group,) = memory.batches([query], [boundary], [None])
    weight = next(iter(memory.pipeline.graph.prior.weights.values()))
    weight.requires_grad_()
    try:
        (gradient,) = torch.autograd.grad(memory.pipeline.views(group.batch, group.bank).graph.sum(), weight)
    finally:
        weight.requires_grad_(False)
    assert gradient.isfinite()


def test_a_small_workspace_of_late_interaction_changes_nothing(memory: ZeroMem) -> None:
    queries = [query for query, boundary in QUESTIONS if boundary == "lake"] * 3
    (group,) = memory.batches(queries, ["lake"] * len(queries), [None] * len(queries))
    assert group.batch.slots > 1
    whole = memory.pipeline.signals(group.batch, group.bank)
    memory.pipeline.signals.late.maxsim.workspace = 1
    try:
        parts = memory.pipeline.signals(group.batch, group.bank)
    finally:
        memory.pipeline.signals.late.maxsim.workspace = 1 << 28
    for name in ("maxsim_turn", "maxsim_window"):
        assert parts[name].tolist() == [pytest.approx(row, abs=1e-6) for row in whole[name].tolist()]


# Learned weights


class Odd(LearnedRouter):
    kind = "odd"


def checkpoint(folder: Path, router: LearnedRouter | None = None) -> Path:
    """As training writes it, with weights that show."""
    pipeline = ZeroMemPipeline(dataclasses.replace(RULES, fusion=FusionConfig(graph_contrast=1.5)))
    pipeline.router = router or LearnedRouter()
    assert isinstance(pipeline.router, LearnedRouter)
    pipeline.router.route.data[0] = 1.5
    pipeline.save_pretrained(folder)
    return folder


def asked(memory: ZeroMem) -> list[float]:
    found = memory.search("What did Ann buy?", boundary="lake")
    return [found.rho, *(item.score for item in found.items)]


def kept(folder: Path, **how: object) -> ZeroMem:
    return ZeroMem.open(folder, encoder=HashEncoder(), **how)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with kept(tmp_path / "memory", config=RULES) as memory:
        memory.add(LAKE)
    return tmp_path / "memory"


def test_a_memory_keeps_the_weights_that_it_was_given(folder: Path, tmp_path: Path) -> None:
    with kept(folder) as memory:
        before = asked(memory)
        assert (memory.stats()["router"], memory.stats()["checkpoint"]) == ("rule", None)
        memory.use(checkpoint(tmp_path / "learned"))
        after = asked(memory)
        assert after != before
    (tmp_path / "learned").rename(tmp_path / "gone")  # the memory has its own
    for how in ({}, {"read_only": True}, {"index": False}):
        with kept(folder, **how) as memory:
            assert asked(memory) == after
            assert (memory.stats()["router"], memory.stats()["checkpoint"]) == ("learned", "learned")
            assert memory.config.fusion.graph_contrast == 1.5
            assert memory.notes == []
    with kept(folder) as memory:
        memory.backup(tmp_path / "copy")
        memory.rebuild()
        memory.reencode(HashEncoder(fingerprint="hash-2"))
        assert asked(memory) == after
    with ZeroMem.open(folder, encoder=HashEncoder(fingerprint="hash-2")) as memory:
        assert asked(memory) == after
    with kept(tmp_path / "copy") as memory:
        assert asked(memory) == after
        memory.use(None)
        assert asked(memory) == before
    with kept(tmp_path / "copy") as memory:
        assert asked(memory) == before
        assert (memory.stats()["router"], memory.config) == ("rule", RULES)


def test_a_configuration_of_the_callers_own_comes_before_learned_weights(folder: Path, tmp_path: Path) -> None:
    with kept(folder) as memory:
        before = asked(memory)
        memory.use(checkpoint(tmp_path / "learned"))
        after = asked(memory)
    with kept(folder, config=RULES) as memory:
        assert asked(memory) == before
        assert memory.stats()["router"] == "rule"
    with kept(folder) as memory:  # the next one who names none has them again
        assert asked(memory) == after


def test_a_memory_that_is_only_read_refuses_other_weights(folder: Path, tmp_path: Path) -> None:
    with kept(folder, read_only=True) as memory:
        before = asked(memory)
        for given in (checkpoint(tmp_path / "learned"), None):
            with pytest.raises(ZeroMemError, match="memory: expected one opened for writing"):
                memory.use(given)
        assert asked(memory) == before


def test_weights_are_kept_whole_or_not_at_all(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(folder) as memory:
        before = asked(memory)
        with pytest.raises(ZeroMemError, match="expected a folder with config"):
            memory.use(tmp_path / "nothing")

        def full(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("zeromem_torch.store.Record.set_settings", full)
        with pytest.raises(OSError, match="disk full"):
            memory.use(checkpoint(tmp_path / "learned"))
        assert asked(memory) == before
    with kept(folder) as memory:
        assert asked(memory) == before


def test_a_router_that_is_not_known_here_is_said_and_the_memory_opens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROUTERS, Odd.kind, Odd)
    with kept(folder) as memory:
        before = asked(memory)
        memory.use(checkpoint(tmp_path / "mine", Odd()))
        assert memory.stats()["router"] == "odd"
    monkeypatch.delitem(ROUTERS, Odd.kind)
    with kept(folder, read_only=True) as memory:
        (note,) = memory.notes
        assert "the weights of 'mine' cannot be used" in note
        assert "router: expected one of rule, learned, got 'odd'" in note
        assert "`zeromem use --default`" in note
        assert asked(memory) == before
    with kept(folder) as memory:
        memory.use(None)
    with kept(folder) as memory:
        assert memory.notes == []


def test_what_is_stored_and_computed_stays_as_the_memory_has_it(tmp_path: Path) -> None:
    own = dataclasses.replace(RULES, compute=ComputeConfig(backend="torch"), calibration=CalibrationConfig(top_k=2))
    memory = memory_of(*LAKE, config=own)
    memory.use(checkpoint(tmp_path / "learned"))
    assert len(memory.search("What did Ann buy?", boundary="lake").main) == 2
    assert memory.config.compute.backend == "torch"
    assert memory.pipeline.fusion.backend == "torch"
    assert memory.config.routing.router == "learned"


def test_a_router_of_another_encoders_vectors_is_refused(folder: Path, tmp_path: Path) -> None:
    with kept(folder) as memory:
        wrong = checkpoint(tmp_path / "wrong", LearnedRouter(features=("embedding",), dim=8))
        with pytest.raises(ZeroMemError, match=r"router: expected an encoder of 8 dimensions.* got 64"):
            memory.use(wrong)
        memory.use(checkpoint(tmp_path / "right", LearnedRouter(features=("embedding",), dim=64)))
        smaller = HashEncoder(fingerprint="small", dim=8)
        with pytest.raises(ZeroMemError, match=r"router: expected an encoder of 64 dimensions.* got 8"):
            memory.reencode(smaller)
        assert memory.stats()["encoder"] == "hash-1"
