"""Training: the pipeline itself with gradients, checked in float64; what it learns is what retrieval then does."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from builders import Dice, bank_of, bank_with, lay_out, query, sample
from test_evaluation_run import DATA
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing import assert_close
from toys import RULES, HashEncoder

from zeromem_torch.bank import MemoryBank, axis_of, segment_minmax
from zeromem_torch.calibration.evidence import EvidenceCalibration
from zeromem_torch.config import ClosureConfig, ComputeConfig, HierarchyConfig, SignalWeights, ZeroMemConfig
from zeromem_torch.evaluation.datasets import Question
from zeromem_torch.evaluation.run import run_retrieval
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.retrieval.fusion import ViewFusion, raised
from zeromem_torch.retrieval.hierarchy import SignalMix, prune_episodes
from zeromem_torch.retrieval.propagation import EntityPropagation
from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.substrate.traces import ZeroMemError
from zeromem_torch.training.cache import Cached, cached, grouped
from zeromem_torch.training.fit import LOG, RESUME, fit, new_ranking
from zeromem_torch.training.gates import gate_episodes
from zeromem_torch.training.losses import LOSSES, ApproximateRecallAtTokens, Listwise, loss_of
from zeromem_torch.training.ranking import LEARNABLE, Ranking
from zeromem_torch.training.settings import SIGNALS, Stage, TrainingSettings
from zeromem_torch.training.validation import MEASURES, cross_validate, headroom, measured

PLAIN = ZeroMemConfig(compute=ComputeConfig(backend="torch"))
WHOLE = ("prior", "hierarchy", "sharpness", "affinity", "damping", "decay", "graph_contrast", "hierarchy_contrast")
SHORT = TrainingSettings(
    stages=(Stage(WHOLE, epochs=3, rate=0.02, pull=0.1), Stage(("route", "bonus"), epochs=2)), refit=False
)


def toy(slots: int = 3, units: int = 9) -> Cached:
    one = sample(4, units)
    bank = bank_of([one])
    batch = lay_out([[query(s, one) for s in range(slots)]], bank)
    views = ZeroMemPipeline(PLAIN).double().views(batch, bank)
    gold = Dice(3).uniform(slots, units) < 0.3
    gold[:, 1] = True
    ids = [str(row) for row in range(units)]
    questions = [
        Question(f"q{s}", "b", "?", tuple(ids[row] for row in own.nonzero()[:, 0].tolist()))
        for s, own in enumerate(gold)
    ]
    return Cached("b", questions, batch, bank, views.signals, gold, ids, views.graph)


def toy_asked() -> tuple[QueryBatch, MemoryBank]:
    one = toy()
    return one.batch, one.bank


def ranking(config: ZeroMemConfig = PLAIN, settings: TrainingSettings = SHORT) -> Ranking:
    return new_ranking(config, settings, 8).double()


# The same as retrieval


@pytest.mark.parametrize("keep", [0, 1])
@torch.no_grad()
def test_before_training_it_ranks_as_the_pipeline_does(keep: int) -> None:
    config = dataclasses.replace(PLAIN, hierarchy=dataclasses.replace(HierarchyConfig(), keep_episodes=0))
    own, made = toy(), ranking(config)
    made.standardise([own])
    pipeline = ZeroMemPipeline(config).double()
    views = pipeline.views_of(own.batch, own.bank, own.signals)
    chosen = pipeline.select(views, own.bank, 5, 20)
    if keep:  # through the walk, rather than from the cache
        made.learn(("damping", "prior"))
    found = made(own)
    assert_close(found.fused, chosen.fused, rtol=0, atol=1e-5)
    assert_close(found.ranked, chosen.ranked, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_was_learned_is_what_the_pipeline_made_of_it_does() -> None:
    own, made = toy(), ranking()
    made.standardise([own])
    made.learn((*WHOLE, "exact", "calibration", "rho", "route", "bonus"))
    draw = torch.Generator().manual_seed(1)
    for part in made.learning():
        part.add_(0.05 * torch.randn(part.shape, generator=draw, dtype=torch.float64))
    pipeline = made.pipeline().double()
    assert pipeline.config != made.base
    chosen = pipeline.select(pipeline.views_of(own.batch, own.bank, own.signals), own.bank, 5, 20)
    found = made(own)
    assert_close(found.fused, chosen.fused, rtol=0, atol=1e-4)
    assert_close(found.ranked, chosen.ranked, rtol=0, atol=1e-4)


def test_untouched_weights_come_back_as_they_were() -> None:
    assert ranking().config() == PLAIN


# Gradients


def of_parts(
    made: Ranking, names: tuple[str, ...], own: Cached, which: str
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    made.learn(names)
    parts = {name: part for name, part in made.named_parameters() if part.requires_grad}
    given = [part.detach().clone().requires_grad_() for part in parts.values()]

    def scores(*values: Tensor) -> Tensor:
        found = functional_call(made, dict(zip(parts, values, strict=True)), (own,))
        out: Tensor = getattr(found, which)
        return out

    return scores, given


@pytest.mark.parametrize(
    ("names", "which"),
    [
        (("hierarchy", "hierarchy_contrast", "graph_contrast"), "fused"),
        (("calibration", "rho"), "ranked"),
        (("sharpness", "affinity", "damping", "decay"), "fused"),
        (("prior", "exact", "named"), "fused"),
        (("route", "bonus"), "fused"),
    ],
)
def test_gradients_of_everything_that_is_learned(
    names: tuple[str, ...], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end, twice: mix, sharpening, walk, min-max, contrast, fusion, calibration, route."""
    alone = dataclasses.replace(PLAIN, closure=ClosureConfig(0.0, 0.0))  # its support passes no gradient
    own, made = toy(2, 7), ranking(alone)
    made.inner.graph.walk.tolerance = 1e-13
    monkeypatch.setattr("zeromem_torch.retrieval.graph.LEAST_LIKED", 1e-2)
    scores, given = of_parts(made, names, own, which)
    assert gradcheck(scores, given, atol=1e-4, fast_mode=True)
    assert gradgradcheck(scores, given, atol=1e-3, fast_mode=True)


def test_gradients_of_a_mix_and_of_calibrations_ranking() -> None:
    signals = {name: Dice(i).uniform(2, 5) for i, name in enumerate(("date", "phrase"))}
    mix = SignalMix({"date": 0.5, "phrase": 0.1}).double()
    weights = [part.detach().clone().requires_grad_() for part in mix.parameters()]

    def mixed(first: Tensor, second: Tensor, date: Tensor) -> Tensor:
        given = {"weights.date": first, "weights.phrase": second}
        found: Tensor = functional_call(mix, given, ({**signals, "date": date},))
        return found**2

    date = signals["date"].clone().requires_grad_()
    assert gradcheck(mixed, (*weights, date))
    assert gradgradcheck(mixed, (*weights, date))
    scores = Dice(4).uniform(2, 5).requires_grad_()
    calibrate = EvidenceCalibration({"date": 0.5, "phrase": 0.0})

    def ranked(scores: Tensor, date: Tensor) -> Tensor:
        found: Tensor = calibrate(scores, {**signals, "date": date})
        return found**2

    assert gradcheck(ranked, (scores, date))
    assert gradgradcheck(ranked, (scores, date))


def test_gradients_of_min_max_twice_with_its_ends_held_by_several() -> None:
    """A pair that holds an end moves as one; the rest lies between."""
    axis = axis_of([5, 2, 0, 1])
    inside = torch.tensor([[0.3, 0.6, 0.1, 0.8]], dtype=torch.float64, requires_grad=True)
    top = torch.tensor([[0.95]], dtype=torch.float64, requires_grad=True)

    def scaled(inside: Tensor, top: Tensor) -> Tensor:
        flat = torch.full((1, 1), 0.5, dtype=torch.float64)
        rows = torch.cat([inside[:, :2], top, top, 0 * top, inside[:, 2:], flat], 1)  # the maximum twice
        return segment_minmax(rows, axis) ** 2

    assert gradcheck(scaled, (inside, top))
    assert gradgradcheck(scaled, (inside, top))


def test_gradients_of_fusion_twice() -> None:
    units = axis_of([4, 0, 3])
    graph, hierarchy = (Dice(i).uniform(2, 7).requires_grad_() for i in range(2))
    weight = Dice(2).uniform(2, 3).requires_grad_()
    contrasts = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (3.5, 2.5)]

    def fused(graph: Tensor, hierarchy: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
        view = ViewFusion()
        view.graph_contrast, view.hierarchy_contrast = first, second  # type: ignore[assignment]
        found: Tensor = view(graph, hierarchy, weight, units)
        return found

    assert gradcheck(fused, (graph, hierarchy, weight, *contrasts))
    assert gradgradcheck(fused, (graph, hierarchy, weight, *contrasts), fast_mode=True)
    assert_close(raised(graph, torch.tensor(4.0)), raised(graph, 4.0))


def test_gradients_of_propagation_twice() -> None:
    one = sample(2, 6)
    bank = bank_of([one])
    seeds = Dice(1).uniform(2, bank.axes["entities"].size).requires_grad_()
    similarity = (0.1 + Dice(2).uniform(2, bank.axes["sentences"].size)).requires_grad_()
    decay = torch.tensor([[0.2], [0.4]], dtype=torch.float64, requires_grad=True)
    spread = EntityPropagation(2, 0.2)

    def activation(seeds: Tensor, similarity: Tensor, decay: Tensor) -> Tensor:
        found: Tensor = spread(seeds, similarity, bank.mentions, bank.mentions_t, bank.axes["entities"], decay)
        return found

    assert gradcheck(activation, (seeds, similarity, decay))
    assert gradgradcheck(activation, (seeds, similarity, decay), fast_mode=True)


def test_soft_gates_tend_to_pruning_and_pass_a_gradient() -> None:
    stored = sample(3, 17)
    bank = bank_with(stored)
    scores = Dice(1).uniform(3, 17)
    for keep in (1, 2):
        hard = prune_episodes(scores, bank, keep)
        away = [float((gate_episodes(scores, bank, keep, t) - hard).abs().max()) for t in (0.3, 0.03, 1e-5)]
        assert away[0] > away[2]
        assert away[2] < 1e-9
    assert torch.equal(gate_episodes(scores, bank, 50, 0.1), scores)  # there are fewer
    given = scores.clone().requires_grad_()
    assert gradcheck(lambda s: gate_episodes(s, bank, 1, 0.2), given)
    assert gradgradcheck(lambda s: gate_episodes(s, bank, 1, 0.2), given, fast_mode=True)


# Losses


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_falls_as_evidence_rises(name: str) -> None:
    gold = torch.tensor([[False, True, False, True, False]])
    tokens = torch.tensor([100, 200, 150, 300, 50])
    loss = loss_of(name)
    unit = 1 / vars(loss)["scale"]
    low = (unit * torch.tensor([[3.0, 1.0, 2.0, 0.0, -1.0]], dtype=torch.float64)).requires_grad_()
    (grad,) = torch.autograd.grad(loss(low, gold, tokens).sum(), low)
    assert bool((grad[gold] < 0).all())
    assert bool((grad[~gold] >= 0).all())
    fixed = low.detach()
    assert float(loss(fixed + 2 * unit * gold, gold, tokens)) < float(loss(fixed, gold, tokens))
    assert gradcheck(lambda s: loss(s, gold, tokens), low)
    above = [float(loss(fixed + height * unit * gold, gold, tokens)) for height in (50, 60)]
    assert above[0] == pytest.approx(above[1], abs=1e-3)


def test_listwise_is_the_mean_cross_entropy() -> None:
    scores, gold = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([[True, False, True]])
    total, tokens = torch.tensor([2.0, 0.0, 1.0]).exp().sum().log(), torch.ones(3, dtype=torch.long)
    assert float(Listwise(scale=1.0)(scores, gold, tokens)) == pytest.approx(float(((total - 2) + (total - 1)) / 2))


def test_recall_within_a_budget_counts_the_tokens_above() -> None:
    scores, gold = torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[False, True, False, True]])
    tokens = torch.tensor([300, 100, 200, 400])
    found = 0.0
    for own in (1, 3):
        above = sum(
            float(tokens[u] / (1 + math.exp(float(scores[0, own] - scores[0, u])))) for u in range(4) if u != own
        )
        found += 1 / (1 + math.exp(-(0.5 + (512 - above - float(tokens[own])) / 250)))
    assert float(ApproximateRecallAtTokens(512, scale=1.0)(scores, gold, tokens)) == pytest.approx(1 - found / 2)
    hard = ApproximateRecallAtTokens(512)(100 * scores, gold, tokens)
    assert float(hard) == pytest.approx(1 - (torch.sigmoid(torch.tensor([0.5 - 88 / 250, 0.5 - 488 / 250]))).mean())


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ZeroMemError, match=r"loss: expected one of .* did you mean 'listwise'"):
        TrainingSettings(loss="listwize")


# The loop


@pytest.fixture(scope="module")
def questions() -> list[Cached]:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add(DATA.traces)
    return cached(memory, DATA)


def thirds(questions: list[Cached]) -> list[Cached]:
    """The toy has two conversations: part one of them, so that there are three groups."""
    return [*questions, dataclasses.replace(questions[0], group="c")]


def test_questions_are_cached_by_conversation(questions: list[Cached]) -> None:
    assert [own.group for own in questions] == ["a", "b"]
    for own in questions:
        for slot, question in enumerate(own.questions):
            held = [own.ids[row] for row in own.gold[slot].nonzero()[:, 0].tolist()]
            assert sorted(held) == sorted(question.evidence)


def test_questions_of_one_pool_are_parted_and_none_is_lost() -> None:
    pool = [Question(f"q{i}", "pool", "?", ("x",)) for i in range(13)]
    parts = grouped(pool, 0)
    assert len(parts) == 5
    assert sorted(q.id for own in parts.values() for q in own) == sorted(q.id for q in pool)
    assert grouped(pool, 0) == parts
    assert grouped(pool, 1) != parts


def test_training_lowers_the_loss_and_is_the_same_again(questions: list[Cached], tmp_path: Path) -> None:
    first, epochs = fit(RULES, questions, (), SHORT, tmp_path)
    assert epochs == [3, 2]
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [(line["stage"], line["epoch"]) for line in lines] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert lines[-1]["loss"] < lines[0]["loss"]
    again, _ = fit(RULES, questions, (), SHORT)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """What runs inside is stopped behind the ``after``-th time that it keeps where it is."""
    kept, left = torch.save, [after]

    def save(*args: object) -> None:
        kept(*args)  # type: ignore[arg-type]
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("after", [2, 4])
def test_a_run_that_was_stopped_goes_on_where_it_was(
    questions: list[Cached], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole, epochs = fit(RULES, questions[:1], questions[1:], SHORT)
    with interrupted(monkeypatch, after):
        fit(RULES, questions[:1], questions[1:], SHORT, tmp_path)
    resumed, again = fit(RULES, questions[:1], questions[1:], SHORT, tmp_path)
    assert again == epochs
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ZeroMemError, match="made with the same settings"):
        fit(RULES, questions[:1], questions[1:], dataclasses.replace(SHORT, seed=5), tmp_path)
    with pytest.raises(ZeroMemError, match="made with the same configuration and questions"):
        fit(RULES, questions[1:], questions[:1], SHORT, tmp_path)
    assert (tmp_path / RESUME).exists()


def test_early_stopping_keeps_what_was_best_on_what_is_held_out(
    questions: list[Cached], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(("hierarchy",), epochs=30, rate=0.05, pull=0.0, patience=2)
    losses = iter([1.0, 0.5, 0.8, 0.5])  # before the first epoch, then after each
    monkeypatch.setattr("zeromem_torch.training.fit._held_out", lambda *given: next(losses))
    made, epochs = fit(RULES, questions[:1], questions[1:], dataclasses.replace(SHORT, stages=(stage,)))
    assert epochs == [1]
    assert next(losses, None) is None
    once = dataclasses.replace(SHORT, stages=(dataclasses.replace(stage, epochs=1),))
    assert fit(RULES, questions[:1], (), once)[0].config() == made.config() != RULES


def test_cross_validation_says_what_the_issue_asks_for(questions: list[Cached]) -> None:
    told: list[object] = []
    result = cross_validate(RULES, thirds(questions), SHORT, told=told.append)
    assert len(told) == len(result["folds"]) == 3
    for measure in MEASURES:
        assert {"fixed", "learned", "oracle_rho", "jitter", "diff", "p"} <= set(result[measure])
        assert result[measure]["diff"] == pytest.approx(result[measure]["learned"] - result[measure]["fixed"])
        assert len(result["rows"]["learned"][measure]) == sum(len(own.questions) for own in thirds(questions))
    with pytest.raises(ZeroMemError, match="cross-validation: expected at least 3 conversations"):
        cross_validate(RULES, questions, SHORT)


def test_fixed_figures_are_those_of_eval_and_an_oracle_is_no_worse(questions: list[Cached]) -> None:
    shown = run_retrieval(DATA, ["zeromem"], HashEncoder(), RULES)["systems"]["zeromem"]["overall"]
    pipeline = ZeroMemPipeline(RULES)
    rows = [measured(pipeline, own) for own in questions]
    room = [headroom(pipeline, own) for own in questions]
    for measure in MEASURES:
        values = [value for row in rows for value in row[measure]]
        assert sum(values) / len(values) == pytest.approx(shown[measure])
        for own, one in zip(rows, room, strict=True):
            # 0.4 and 0.6 are among the weights: the rule's own ranking is one of those the oracle has
            assert all(a >= b - 1e-9 for a, b in zip(one["oracle_rho"][measure], own[measure], strict=True))


def test_a_checkpoint_is_what_eval_and_a_memory_use(questions: list[Cached], tmp_path: Path) -> None:
    made, _ = fit(RULES, questions, (), SHORT)
    pipeline = made.pipeline()
    pipeline.save_pretrained(tmp_path)
    result = run_retrieval(DATA, ["zeromem", "bm25"], HashEncoder(), RULES, router=tmp_path)
    assert list(result["systems"]) == ["zeromem", "unlearned", "bm25"]
    plain = run_retrieval(DATA, ["zeromem"], HashEncoder(), RULES)["systems"]["zeromem"]
    assert result["systems"]["unlearned"]["overall"] == plain["overall"]
    assert "unlearned" not in run_retrieval(DATA, ["bm25"], HashEncoder(), RULES, router=tmp_path)["systems"]
    assert result["router"] == tmp_path.name
    assert result["config"]["hierarchy"] == dataclasses.asdict(pipeline.config)["hierarchy"]
    rows = [measured(pipeline, own) for own in questions]
    for measure in MEASURES:
        values = [value for row in rows for value in row[measure]]
        assert result["systems"]["zeromem"]["overall"][measure] == pytest.approx(sum(values) / len(values))
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add(DATA.traces)
    before = memory.search("Where was the boat bought?", boundary="a")
    memory.use(tmp_path)
    after = memory.search("Where was the boat bought?", boundary="a")
    assert before.items
    assert after.items
    assert after.rho != before.rho


def test_shipped_settings_are_read() -> None:
    files = sorted((Path(__file__).resolve().parent.parent / "configs" / "training").glob("*.toml"))
    assert [path.name for path in files] == ["from-equal.toml"]
    (stage,) = TrainingSettings.from_toml(files[0]).stages
    assert stage.learn == TrainingSettings().stages[0].learn
    assert stage.pull == 0.0
    weights = ZeroMemConfig.from_toml(files[0].parent.parent / "equal.toml")
    assert set(weights.hierarchy.weights.to_dict().values()) == {0.0, 0.2}
    assert weights.graph.prior == weights.hierarchy.weights


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('bonus = ["dat"]', r"bonus: expected some of .* got 'dat'; did you mean 'date'"),
        ('bonus = "date"', "bonus: expected a list of names, got 'date'"),
        ('mixes = ["activatoin"]', "mixes: expected some of .* did you mean 'activation'"),
        ('features = ["relatonal"]', "features: expected some of .* did you mean 'relational'"),
        ("stages = 3", "stages: expected tables, got 3; write .*stages"),
        ("stages = []", "stages: expected at least one stage"),
        ("[[stages]]\nepochs = 3", "stage 1, learn: expected a list of what is learned, got None"),
        ('[[stages]]\nlearn = "rho"', "stage 1, learn: expected a list of names, got 'rho'"),
        ("[[stages]]\nlearn = []", "stage 1, learn: expected some of prior, "),
        ('[[stages]]\nlearn = ["ro"]', "stage 1, learn: expected some of .* did you mean 'rho'"),
        (2 * '[[stages]]\nlearn = ["rho"]\n' + "epochs = 0", "stage 2, epochs: .* at least 1, got 0"),
        ('[[stages]]\nlearn = ["rho"]\npatience = 1.5', "stage 1, patience: .* at least 1, got 1.5"),
        ('[[stages]]\nlearn = ["rho"]\nrate = -1', "stage 1, rate: expected a number above 0, got -1"),
        ('[[stages]]\nlearn = ["rho"]\nrate = nan', "stage 1, rate: expected a number above 0, got nan"),
        ('[[stages]]\nlearn = ["rho"]\npull = -1', "stage 1, pull: expected a number of at least 0, got -1"),
        ('[[stages]]\nlearn = ["rho"]\npul = 1', "stage 1, settings: expected keys of .* did you mean 'pull'"),
        ('seed = "a"', "seed: expected a whole number of at least 0, got 'a'"),
        ("seed = true", "seed: expected a whole number of at least 0, got True"),
        ('[[stages]]\nlearn = ["walk"]', "learn: expected what the router has, got 'walk'; write walk = true too"),
        ('[[stages]]\nlearn = ["rho", "mix"]', "learn: expected what the router has, got 'mix'; write mixes = "),
        ("walk = 1", "walk: expected true or false, got 1"),
        ("loss = 3", "loss: expected one of .*, got 3"),
        ('handed_loss = "recal@5"', "handed_loss: expected one of .* did you mean 'recall@5'"),
    ],
)
def test_a_mistake_in_settings_names_its_key(tmp_path: Path, written: str, said: str) -> None:
    (tmp_path / "settings.toml").write_text(written)
    with pytest.raises(ZeroMemError, match=f"^{said}"):
        TrainingSettings.from_toml(tmp_path / "settings.toml")


def test_nothing_to_learn_from_is_said(questions: list[Cached]) -> None:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add(DATA.traces)
    for asked in ((), (dataclasses.replace(DATA.questions[0], evidence=()),)):
        bare = dataclasses.replace(DATA, questions=asked)
        with pytest.raises(ZeroMemError, match=f"questions: expected at least one with evidence, got '{len(asked)}"):
            cached(memory, bare)


def test_an_earlier_run_in_the_folder_is_told(
    questions: list[Cached], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with interrupted(monkeypatch, 2):
        fit(RULES, questions, (), SHORT, tmp_path, told=told.append)
    assert told == []
    _, epochs = fit(RULES, questions, (), SHORT, tmp_path, told=told.append)
    assert told == ["went on behind epoch 1 of stage 1"]  # the second one's file was not put in its place
    assert fit(RULES, questions, (), SHORT, tmp_path, told=told.append)[1] == epochs
    assert told[1:] == ["was trained there already; nothing was trained again"]


def test_settings_are_read_and_mistakes_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('loss = "ranknet"\nbonus = ["date"]\n[[stages]]\nlearn = ["hierarchy"]\nepochs = 3\n')
    settings = TrainingSettings.from_toml(path)
    assert settings.loss == "ranknet"
    assert settings.bonus == ("date",)
    assert settings.stages == (Stage(("hierarchy",), epochs=3),)
    assert set(SIGNALS) == set(ZeroMemPipeline(PLAIN).double().signals(*toy_asked()))
    path.write_text("los = 1\n")
    with pytest.raises(ZeroMemError, match="did you mean 'loss'"):
        TrainingSettings.from_toml(path)
    with pytest.raises(ZeroMemError, match=r"learn: expected some of .* did you mean 'hierarchy'"):
        new_ranking(RULES, SHORT, 8).learn(("hierarchi",))
    assert set(WHOLE) <= set(LEARNABLE)
    assert SignalWeights() == SignalWeights(**dict.fromkeys(SignalWeights().to_dict(), 0.0))
