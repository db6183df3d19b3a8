"""bench/pipeline.py runs, checks before it times, and leaves out what it says it leaves out; no figure is looked at."""

import gzip
import json
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import made, peers, pipeline, versus
from bench.append import TableEncoder
from bench.measure import backends_of
from bench.table import AIMS
from zeromem_torch.collect import Batch
from zeromem_torch.config import SubstrateConfig, ZeroMemConfig
from zeromem_torch.pipeline import Selection, Views, ZeroMemPipeline
from zeromem_torch.retrieval.dense import DenseScores, LateInteraction
from zeromem_torch.retrieval.lexical import LexicalScores
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank

SAID = (
    "I sailed to Oslo with Bo Dahl.",
    "Did you like the harbour?",
    "The harbour was quiet, and Bo Dahl mended nets.",
    "Ann Lee moved to Bergen in May.",
    "She keeps a red boat there.",
    "We meet in Bergen every summer.",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two conversations and a pool, in the official schemas."""
    folder = tmp_path_factory.mktemp("data")
    samples: list[dict[str, Any]] = []
    for name, people in (("conv-1", ("Mia", "Tom")), ("conv-2", ("Zoe", "Ian"))):
        turns = [{"speaker": people[n % 2], "dia_id": f"D1:{n + 1}", "text": text} for n, text in enumerate(SAID * 3)]
        talk: dict[str, Any] = {
            "speaker_a": people[0],
            "speaker_b": people[1],
            "session_1_date_time": "1:56 pm on 8 May, 2023",
        }
        asked = [
            {"question": f"Where did {people[n % 2]} sail with Bo Dahl{'?' * (n + 1)}", "answer": "Oslo", "category": 4,
             "evidence": [f"D1:{n + 1}"]}
            for n in range(4)
        ]  # fmt: skip
        samples.append({"sample_id": name, "conversation": {**talk, "session_1": turns}, "qa": asked})
    documents = [
        {"title": f"Boat {n}", "text": f"Boat {n} lies in Bergen beside Boat {n + 1}. {SAID[n % 6]}"} for n in range(60)
    ]
    questions = [
        {"idx": n, "id": str(n), "question": f"Who owns Boat {n} and Boat {n + 1}?", "answer": "Ann Lee",
         "type": "bridge", "level": "hard", "gold_titles": [f"Boat {n}", f"Boat {n + 1}"],
         "context_titles": [f"Boat {n}"]}
        for n in range(8)
    ]  # fmt: skip
    paths = {name: folder / f"{name}.json" for name in ("locomo", "hotpotqa")} | {"corpus": folder / "corpus.jsonl.gz"}
    paths["locomo"].write_text(json.dumps(samples))
    paths["hotpotqa"].write_text(json.dumps(questions))
    with gzip.open(paths["corpus"], "wt") as corpus:
        corpus.writelines(json.dumps(row) + "\n" for row in documents)
    return paths


@pytest.fixture(scope="module")
def held() -> pipeline.Ground:
    encoder = pipeline.Remembering(TableEncoder())
    config = ZeroMemConfig(substrate=SubstrateConfig(entities="rules"))
    return pipeline.ground(made.conversations(2, 40, 16), encoder, config, "cpu")


@pytest.fixture(scope="module")
def quick(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What a quick run writes, and what it prints."""
    pytest.importorskip("igraph")
    pytest.importorskip("bm25s")
    out = tmp_path_factory.mktemp("out") / "new" / "out.json"
    given = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    with redirect_stdout(StringIO()) as printed:
        pipeline.main([*given, "--quick", "--encoder", "table", "--entities", "rules", "--json", str(out)])
    return json.loads(out.read_text()), printed.getvalue()


def test_every_ratio_is_measured(quick: tuple[dict[str, Any], str]) -> None:
    result, printed = quick
    assert {"command", "commit", "device", "host", "versions", "threads", "floors", "encoder", "skipped"} <= set(result)
    assert {name: row["traces"] for name, row in result["data"].items()} == {"locomo": 36, "hotpotqa": 60}
    assert all(len(row["sha256"]) == 64 for row in result["data"].values())
    assert set(AIMS) <= set(result["ratios"])
    left_out = {name for name, value in result["ratios"].items() if value is None}
    # a table of vectors is no encoder, bm25s takes ten seconds to compile, and FAISS may be absent
    without = set() if find_spec("faiss") else {"dense_vs_faiss_flat_locomo", "dense_vs_faiss_flat_hotpotqa"}
    assert left_out == {"encoder_vs_sentence_transformers", "bm25_vs_bm25s_numba"} | without
    assert all(any(line.startswith(name) for line in result["skipped"]) for name in left_out - without)
    assert all(value > 0 for value in result["ratios"].values() if value is not None)
    for name, value in result["ratios"].items():
        assert f"{name}: {'not measured' if value is None else format(value, 'g')}" in printed


def test_every_figure_stands_beside_its_peer(quick: tuple[dict[str, Any], str]) -> None:
    result, _ = quick
    expected = {
        "retrieval": (
            "ours, all stages but MaxSim", "ours, with MaxSim", "LinearRAG's search, our re-statement",
            "compile a batch, encoding left out", "collect the evidence", "stage signals", "stage graph: walk",
        ),
        "pagerank": ("igraph", "ours", "ours, torch"),
        "bm25": ("bm25s, numpy", "ours", "ours, torch"),
        "dense": ("ours",),
    }  # fmt: skip
    whats = {(row["figure"], row["data"], row["what"]) for row in result["figures"]}
    for data in ("locomo", "hotpotqa"):
        assert {(figure, data, what) for figure, held in expected.items() for what in held} <= whats
    assert ("idle memories", "locomo", "a search among 10 memories") in whats
    for row in result["figures"]:
        assert row["median_us"] > 0
        if not row["what"].startswith("stage"):
            assert {"p50_us", "p95_us", "p99_us", "iqr_us", "cold_us", "calls", "threads"} <= set(row)


def test_a_ratio_is_the_peers_time_over_ours(quick: tuple[dict[str, Any], str]) -> None:
    result, _ = quick
    ratios = result["ratios"]

    def of(figure: str, data: str, what: str, column: str = "median_us") -> float:
        own = (row for row in result["figures"] if (row["figure"], row["data"], row["what"]) == (figure, data, what))
        return float(next(own)[column])  # of several, the first is of whole batches

    for data, name in (("locomo", "locomo"), ("hotpotqa", "60k")):
        theirs = of("pagerank", data, "igraph", "mean_us") / of("pagerank", data, "ours")
        assert ratios[f"pagerank_vs_igraph_{name}"] == pytest.approx(theirs, rel=0.02)
        search = of("retrieval", data, "LinearRAG's search, our re-statement", "mean_us")
        ours = of("retrieval", data, "ours, all stages but MaxSim")
        assert ratios[f"retrieval_vs_linearrag_{data}"] == pytest.approx(search / ours, rel=0.02, abs=1e-3)
    alone, among = (of("idle memories", "locomo", f"a search among {count} memories") for count in (1, 10))
    assert ratios["idle_memories_1000_vs_1"] == pytest.approx(among / alone, rel=0.02)


# Checked before it is timed


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_wrong_walk_is_not_timed(held: pipeline.Ground, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("igraph")
    walks = pipeline.walks(held, 8)
    right = PersonalizedPageRank.forward

    def wrong(self: PersonalizedPageRank, reset: Tensor, *given: Any, **named: Any) -> Tensor:
        mass: Tensor = right(self, reset, *given, **named)
        return mass.lerp(reset, 1e-5) if self.backend == backend else mass

    assert versus.pagerank("made", walks, "cpu", 1)[1] is not None
    monkeypatch.setattr(PersonalizedPageRank, "forward", wrong)
    if backend in backends_of("pagerank", "cpu", {}):
        with pytest.raises(SystemExit, match=rf"pagerank, made, {backend}: expected within 1e-06 of igraph in L1, got"):
            versus.pagerank("made", walks, "cpu", 1)


def test_wrong_lexical_scores_are_not_timed(held: pipeline.Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    asked = [question.text for question in held.data.questions]
    words = versus.Words.of(pipeline.largest(held), asked, SubstrateConfig())
    versus.bm25("made", words, "cpu", 1, ["numpy"])
    right = LexicalScores.best

    def wrong(self: LexicalScores, *given: Any) -> tuple[Tensor, Tensor]:
        values, rows = right(self, *given)
        return values * 1.01, rows

    monkeypatch.setattr(LexicalScores, "best", wrong)
    with pytest.raises(SystemExit, match="bm25, made, auto: expected the scores of bm25s, got a difference"):
        versus.bm25("made", words, "cpu", 1, ["numpy"])


def test_the_ratio_of_bm25_is_that_of_numba(held: pipeline.Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    right = peers.bm25s_index
    monkeypatch.setattr(
        peers, "bm25s_index", lambda texts, k1, b, _: right(texts, k1, b, "numpy")
    )  # nothing to compile
    monkeypatch.setattr(versus, "has", lambda _: True)
    words = versus.Words.of(pipeline.largest(held), [held.data.questions[0].text], SubstrateConfig())
    figures, ratio = versus.bm25("made", words, "cpu", 3)
    median = {row["what"]: row["median_us"] for row in figures}
    assert {"bm25s, numba", "bm25s, numpy", "ours", "ours, torch"} <= set(median)
    assert ratio == pytest.approx(median["bm25s, numba"] / median["ours"], rel=0.01)


def test_wrong_dense_scores_are_not_timed(held: pipeline.Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    memory = pipeline.largest(held)
    vectors = held.memory.encoder.encode([question.text for question in held.data.questions]).vectors
    assert versus.dense("made", memory, vectors, "cpu", 1)[1] is not None
    right = DenseScores.forward
    monkeypatch.setattr(DenseScores, "forward", lambda *given: right(*given) + 1e-3)
    with pytest.raises(SystemExit, match="dense, made: expected the scores of FAISS, got a difference"):
        versus.dense("made", memory, vectors, "cpu", 1)


def test_what_a_batch_finds_is_what_a_question_finds_alone(
    held: pipeline.Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean, group = pipeline.without_maxsim(held.memory.pipeline, "cpu"), held.batches(8, 1)[0][0]
    pipeline._same_alone(lean, held, group)
    right = pipeline.find

    def wrong(own: ZeroMemPipeline, asked: Batch) -> tuple[Views, Selection]:
        views, chosen = right(own, asked)
        return views, replace(chosen, main=chosen.main.flip(2)) if asked is group else chosen

    monkeypatch.setattr(pipeline, "find", wrong)
    with pytest.raises(SystemExit, match="to find the same alone as in a batch"):
        pipeline._same_alone(lean, held, group)


def test_without_maxsim_it_is_neither_weighed_nor_computed(
    held: pipeline.Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = held.memory.pipeline
    lean = pipeline.without_maxsim(whole, "cpu")
    (group,) = held.batches(8, 1)[0]
    views, chosen = pipeline.find(lean, group)
    weighed = ZeroMemPipeline(lean.config).eval()  # computes it, and weighs it with nothing
    expected, same = pipeline.find(weighed, group)
    torch.testing.assert_close(views.graph, expected.graph)
    assert torch.equal(chosen.result, same.result)
    assert "maxsim_turn" not in views.signals

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("MaxSim was computed")

    monkeypatch.setattr(LateInteraction, "forward", refuse)
    assert torch.equal(pipeline.find(lean, group)[1].result, chosen.result)
    with pytest.raises(AssertionError, match="MaxSim was computed"):
        pipeline.find(whole, group)


def test_stages_are_timed_and_left_as_they_were(held: pipeline.Ground) -> None:
    lean, group = pipeline.without_maxsim(held.memory.pipeline, "cpu"), held.batches(8, 1)[0][0]
    before = pipeline.find(lean, group)[1].result
    rows = list(pipeline.stages(lean, group, "cpu", calls=1))
    assert [row["what"].removeprefix("stage ") for row in rows] == list(pipeline.STAGES)
    assert all(row["median_us"] > 0 for row in rows)
    share = {row["what"]: row["share"] for row in rows}
    assert share["stage graph"] >= share["stage graph: walk"]
    assert sum(share[f"stage {name}"] for name in pipeline.STAGES if ":" not in name) <= 1.01
    assert not any("forward" in vars(module) or "best" in vars(module) for module in lean.modules())
    assert torch.equal(pipeline.find(lean, group)[1].result, before)


def test_batches_hold_as_many_questions_as_were_asked_for(held: pipeline.Ground) -> None:
    for size, whole in ((1, 16), (5, 3), (16, 1), (40, 1)):
        batches = held.batches(size)
        assert len(batches) == whole
        assert all(sum(len(group.numbers) for group in groups) == size for groups in batches)
    seen = {text for groups in held.batches(5) for group in groups for *_, text in held.asked(group)}
    assert len(seen) == 15  # none twice
    assert seen <= {question.text for question in held.data.questions}


def test_a_compiled_batch_is_not_encoded_again(held: pipeline.Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = held.memory.encoder
    assert isinstance(encoder, pipeline.Remembering)
    calls: list[int] = []
    right = encoder.encoder.encode

    def count(texts: Any, **named: Any) -> Any:
        calls.append(len(texts))
        return right(texts, **named)

    monkeypatch.setattr(encoder.encoder, "encode", count)
    asked = held.data.questions[3:7]
    (first,) = held.compiled(asked)
    assert calls
    calls.clear()
    (again,) = held.compiled(asked)
    assert not calls
    assert torch.equal(first.batch.vectors, again.batch.vectors)


def test_made_data_is_of_its_size() -> None:
    talk, pool = made.conversations(3, 20, 10), made.documents(50, 10)
    assert len(talk.traces) == 60
    assert {question.boundary for question in talk.questions} <= {trace.boundary for trace in talk.traces}
    assert len({trace.title for trace in pool.traces}) == len(pool.traces) == 50
    titles = {trace.title for trace in pool.traces}
    assert all(sum(title in trace.text for title in titles) >= 3 for trace in pool.traces)
    assert all(sum(title in question.text for title in titles) == 2 for question in pool.questions)


def test_nothing_to_search_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pipeline.main([])
    assert "name --locomo, or --hotpotqa with its --corpus, or take --made" in capsys.readouterr().err
