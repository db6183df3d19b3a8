"""Measuring: figures are those of the rankings, each ablation changes what it says, the floors are the known ones."""

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from toys import RULES, HashEncoder, talk

from zeromem_torch.config import CalibrationConfig, ClosureConfig, RoutingConfig, SignalWeights, ZeroMemConfig
from zeromem_torch.evaluation.baselines import BASELINES
from zeromem_torch.evaluation.datasets import Dataset, Question, load_dataset
from zeromem_torch.evaluation.metrics import paired_bootstrap
from zeromem_torch.evaluation.run import SYSTEMS, VARIANTS, Found, run_retrieval, table
from zeromem_torch.substrate.encoder import CachedEncoder, load_encoder
from zeromem_torch.substrate.traces import ZeroMemError

PLACES = ["Oslo", "Bergen", "Lom", "Tromso", "Bodo", "Molde"]
THINGS = ["boat", "kite", "lamp", "rope"]
TRACES = tuple(
    trace
    for name in ("a", "b")
    for trace in talk(
        name,
        *(
            [f"I bought a {thing} in {place}.", f"Was the {thing} cheap?", "Yes, very.", f"{place} is lovely."]
            for thing, place in zip(THINGS, PLACES[name == "b" :], strict=False)
        ),
    )
)


def question(number: int, boundary: str, text: str, *evidence: str, category: str) -> Question:
    return Question(f"q{number}", boundary, text, tuple(f"{boundary}/{turn}" for turn in evidence), category=category)


QUESTIONS = tuple(
    question(3 * number + kind, boundary, text, *evidence, category=category)
    for number, (boundary, session) in enumerate((b, s) for b in ("a", "b") for s in range(1, 5))
    for kind, (text, evidence, category) in enumerate(
        [
            (f"Where was the {THINGS[session - 1]} bought?", [f"{session}:1"], "1"),
            (f"Was the {THINGS[session - 1]} cheap?", [f"{session}:2", f"{session}:3"], "2"),
            ("What is lovely?", [], "2"),
        ]
    )
)
DATA = Dataset("toy", "all", TRACES, QUESTIONS, {"1": "places", "2": "prices"}, "0" * 64, ("made by hand",))
SCORED = [one for one in QUESTIONS if one.evidence]


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], dict[str, dict[str, Found]]]:
    kept: dict[str, dict[str, Found]] = {}
    return run_retrieval(DATA, SYSTEMS, HashEncoder(), RULES, kept=kept), kept


def recall(ranked: list[str], one: Question) -> float:
    return sum(name in ranked for name in one.evidence) / len(one.evidence)


@pytest.mark.parametrize("system", SYSTEMS)
def test_figures_are_those_of_the_rankings(
    measured: tuple[dict[str, Any], dict[str, dict[str, Found]]], system: str
) -> None:
    result, kept = measured[0]["systems"][system], measured[1][system]
    for category, shown in [(None, result["overall"]), *result["by_category"].items()]:
        asked = [one for one in SCORED if category in (None, one.category)]
        assert shown["n"] == len(asked)
        for k in (1, 2, 5, 10, 20):
            recalls = [recall(list(kept[one.id].main[:k]), one) for one in asked]
            assert shown[f"recall@{k}"] == pytest.approx(statistics.mean(recalls))
            assert shown[f"hit@{k}"] == pytest.approx(statistics.mean(value > 0 for value in recalls))
            assert shown[f"all@{k}"] == pytest.approx(statistics.mean(value == 1 for value in recalls))
        for budget in (256, 512, 1024):
            recalls = [recall(given(kept[one.id], budget), one) for one in asked]
            assert shown[f"recall@{budget}tok"] == pytest.approx(statistics.mean(recalls))
        handed = [kept[one.id].handed for one in asked]
        assert shown["turns_handed"] == pytest.approx(statistics.mean(len(items) for items in handed))
        assert shown["tokens_handed"] == pytest.approx(statistics.mean(sum(t for _, t in items) for items in handed))
        assert shown["recall_handed"] == pytest.approx(
            statistics.mean(recall([name for name, _ in items], one) for items, one in zip(handed, asked, strict=True))
        )


def given(found: Found, budget: int) -> list[str]:
    names = []
    for name, tokens in found.ranked:
        if tokens <= budget:
            names.append(name)
            budget -= tokens
    return names


def test_every_question_is_asked_in_its_own_boundary(
    measured: tuple[dict[str, Any], dict[str, dict[str, Found]]],
) -> None:
    for kept in measured[1].values():
        assert set(kept) == {one.id for one in QUESTIONS}
        for one in QUESTIONS:
            names = [*kept[one.id].main, *(name for name, _ in (*kept[one.id].ranked, *kept[one.id].handed))]
            assert {name.split("/")[0] for name in names} == {one.boundary}
            assert len(kept[one.id].main) == 16
            assert len(set(kept[one.id].main)) == 16


def test_words_alone_find_the_verbatim_turn(measured: tuple[dict[str, Any], dict[str, dict[str, Found]]]) -> None:
    found = measured[1]["bm25"]
    for one in QUESTIONS:
        if one.category == "2" and one.evidence:
            assert found[one.id].main[0] == one.evidence[0]  # asked in its own words
    assert measured[0]["systems"]["bm25"]["by_category"]["2"]["hit@1"] == 1.0


def test_systems_are_compared_question_by_question(
    measured: tuple[dict[str, Any], dict[str, dict[str, Found]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = measured[1]
    monkeypatch.setattr("zeromem_torch.evaluation.run.FEWEST", 1)
    result = run_retrieval(DATA, ["zeromem", "hybrid", "bm25"], HashEncoder(), RULES)["systems"]
    assert {name: set(system["vs"]) for name, system in result.items()} == {
        "zeromem": {"hybrid"},
        "hybrid": set(),
        "bm25": {"hybrid"},
    }
    ours, theirs = (
        [recall(list(kept[name][one.id].main[:5]), one) for one in SCORED] for name in ("zeromem", "hybrid")
    )
    expected = paired_bootstrap(ours, theirs)
    assert result["zeromem"]["vs"]["hybrid"]["recall@5"] == expected
    assert math.isclose(expected["diff"], statistics.mean(ours) - statistics.mean(theirs), abs_tol=1e-9)


def test_too_few_questions_are_not_compared() -> None:
    few = dataclasses.replace(DATA, questions=QUESTIONS[:6])
    assert run_retrieval(few, ["zeromem", "hybrid"], HashEncoder(), RULES)["systems"]["zeromem"]["vs"] == {}


@pytest.mark.parametrize(
    ("variant", "config"),
    [
        ("graph", dataclasses.replace(RULES, routing=RoutingConfig(views="graph"))),
        ("hierarchy", dataclasses.replace(RULES, routing=RoutingConfig(views="hierarchy"))),
        ("no_closure", dataclasses.replace(RULES, closure=ClosureConfig(0.0, 0.0, 0))),
        ("no_calibration", dataclasses.replace(RULES, calibration=CalibrationConfig(weights=SignalWeights()))),
    ],
)
def test_an_ablation_is_the_configuration_without_that_stage(
    measured: tuple[dict[str, Any], dict[str, dict[str, Found]]], variant: str, config: ZeroMemConfig
) -> None:
    kept: dict[str, dict[str, Found]] = {}
    run_retrieval(DATA, ["zeromem"], HashEncoder(), config, kept=kept)
    assert kept["zeromem"] == measured[1][variant]


def test_ablations_of_later_stages_leave_the_main_ranking(
    measured: tuple[dict[str, Any], dict[str, dict[str, Found]]],
) -> None:
    kept = measured[1]
    for one in QUESTIONS:
        main = kept["zeromem"][one.id].main
        assert kept["no_closure"][one.id].main == kept["no_calibration"][one.id].main == main
        assert len(kept["no_closure"][one.id].handed) == RULES.calibration.top_k
        assert {name for name, _ in kept["no_closure"][one.id].handed} == set(main[: RULES.calibration.top_k])
    assert any(kept["graph"][one.id].main != kept["hierarchy"][one.id].main for one in QUESTIONS)
    assert any(kept["zeromem"][one.id].handed != kept["no_closure"][one.id].handed for one in QUESTIONS)


def test_systems_are_those_asked_for_in_that_order() -> None:
    result = run_retrieval(DATA, ["dense", "hierarchy"], HashEncoder(), RULES)
    assert list(result["systems"]) == ["dense", "hierarchy"]
    assert (*VARIANTS, *BASELINES) == SYSTEMS
    lines = list(table(result))
    assert lines[1] == "  note: made by hand"
    assert [line.split()[0] for line in lines if line.startswith(("dense ", "hierarchy "))] == ["dense", "hierarchy"]
    only = run_retrieval(DATA, ["bm25"], HashEncoder(), RULES)
    assert only["entities"] == []  # no index was built


@pytest.mark.parametrize(
    ("systems", "words"),
    [
        (["zeromem", "bm52"], r"systems: expected some of zeromem, .* got 'bm52'; did you mean 'bm25'\?"),
        (["zero"], r"systems: .* got 'zero'; did you mean 'zeromem'\?"),
        ([], r"systems: expected some of zeromem"),
    ],
)
def test_unknown_systems_are_named_before_anything_is_encoded(systems: list[str], words: str) -> None:
    encoder = HashEncoder()
    with pytest.raises(ZeroMemError, match=words):
        run_retrieval(DATA, systems, encoder, RULES)
    assert encoder.calls == []


def test_questions_without_evidence_measure_nothing() -> None:
    bare = dataclasses.replace(DATA, questions=tuple(one for one in QUESTIONS if not one.evidence))
    with pytest.raises(ZeroMemError, match="questions: expected at least one with evidence"):
        run_retrieval(bare, ["bm25"], HashEncoder(), RULES)


@pytest.mark.slow
def test_floors_on_the_tuning_conversations(shared_data: Path, pytestconfig: pytest.Config) -> None:
    """Measured once with this tokeniser and encoder: a change of either baseline would move every comparison."""
    data = load_dataset("locomo", shared_data / "locomo" / "locomo_tuning6.json.gz")
    encoder = CachedEncoder(load_encoder("minilm"), pytestconfig.cache.mkdir("encoded") / "minilm.sqlite")
    systems = run_retrieval(data, ["hybrid", "context"], encoder, RULES)["systems"]
    assert systems["hybrid"]["overall"]["recall@5"] == pytest.approx(0.594, abs=0.01)
    assert systems["context"]["overall"]["recall@5"] == pytest.approx(0.693, abs=0.01)
