"""Systems: each hands over evidence of its own boundary within its cap, and is what its description says."""

import dataclasses
import importlib
import json
import math
import sys
import types
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import RULES, HashEncoder, memory_of, talk

from zeromem_torch.evaluation.adapters import ADAPTERS, SETTINGS
from zeromem_torch.evaluation.baselines import PlainRetrieval
from zeromem_torch.evaluation.datasets import Question
from zeromem_torch.evaluation.graph_baselines import hippo_rag, linear_rag
from zeromem_torch.evaluation.long_context import CONTEXTS, load_long_context
from zeromem_torch.evaluation.run import VARIANTS
from zeromem_torch.evaluation.systems import (
    CHUNKED,
    DEPTHS,
    OVERLAP,
    RAG_CHUNK,
    RAW,
    SYSTEMS,
    TAG,
    Ground,
    parse_system,
    shown,
)
from zeromem_torch.ledger import MeteredEncoder
from zeromem_torch.routing.profile import profile_query
from zeromem_torch.substrate.entities import RuleExtractor
from zeromem_torch.substrate.traces import Trace, ZeroMemError
from zeromem_torch.substrate.units import order_turns, turn_prefix

PLACES = ["Oslo", "Bergen", "Lom", "Tromso", "Bodo", "Molde"]
TRACES = [
    trace
    for name in "ab"
    for trace in talk(
        name, *[[f"I went to {p} with my boat.", f"Was {p} nice, Ann?", f"The kite in {p} was red."] for p in PLACES]
    )
]
QUESTIONS = [
    Question(f"{name}/q{i}", name, f"What did Ann do in {place}?", (f"{name}/{i}:1",), (place,), "1")
    for name in "ab"
    for i, place in enumerate(PLACES, start=1)
]
INSIDE = [name for name in SYSTEMS if name not in ADAPTERS and name != RAW]


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def ground(traces: Sequence[Trace] = TRACES, room: int = 400, encoder: HashEncoder | None = None) -> Ground:
    return Ground(traces, encoder or HashEncoder(), RULES, words, room)


@pytest.mark.parametrize("name", INSIDE)
def test_evidence_is_of_the_questions_boundary_and_within_the_cap(name: str) -> None:
    texts = {trace.id: trace.text for trace in TRACES}
    found, cost = ground().find(name, 2, QUESTIONS)
    assert cost.search_seconds > 0
    for question, one in zip(QUESTIONS, found, strict=True):
        assert 1 <= len(one.evidence.items) <= 2
        assert one.evidence.query == question.text
        types = profile_query(question.text).answer_types
        assert one.evidence.answer_types == tuple(str(kind.name).lower() for kind in types)
        assert all(item.boundary == question.boundary for item in one.evidence)
        if name not in CHUNKED:
            assert all(item.text == texts[item.trace_id][item.start : item.end] for item in one.evidence)
            assert any(question.answers[0] in item.text for item in one.evidence)


def test_zeromem_hands_over_what_the_library_finds() -> None:
    memory = memory_of(*TRACES)
    texts, boundaries = [q.text for q in QUESTIONS], [q.boundary for q in QUESTIONS]
    found, _ = ground().find("zeromem", 3, QUESTIONS)
    for one, whole in zip(found, memory.search_batch(texts, boundaries=boundaries, top_k=3), strict=True):
        assert list(one.evidence.items) == list(whole.items)[:3]
        assert (one.evidence.route, one.evidence.rho) == (whole.route, whole.rho)
    budget = 40
    for one, cut in zip(
        found, memory.search_batch(texts, boundaries=boundaries, top_k=3, token_budget=budget), strict=True
    ):
        left, kept = budget, []
        for piece in one.ranked:
            if piece.tokens <= left:
                left -= piece.tokens
                kept.append(piece.text)
        assert kept == [shown(item) for item in cut.items]
    for k in (1, 5, 20):
        for one, whole in zip(found, memory.search_batch(texts, boundaries=boundaries, top_k=k), strict=True):
            assert [piece.text for piece in one.tops[k - 1]] == [shown(item) for item in whole.items][:k]


def test_rankings_show_the_best_of_both_views() -> None:
    one = ground().find("zeromem", 5, QUESTIONS[:1])[0][0]
    assert list(one.rankings) == ["graph", "hierarchy", "fused"]
    for ranking in one.rankings.values():
        scores = [row["score"] for row in ranking]
        assert scores == sorted(scores, reverse=True)
        assert {row["trace_id"] for row in ranking} <= {trace.id for trace in TRACES if trace.boundary == "a"}
    alone = ground().find("graph", 5, QUESTIONS[:1])[0][0]
    fused = [[row["trace_id"] for row in alone.rankings[name]] for name in ("graph", "fused")]
    assert fused[0] == fused[1]


def test_plain_rankings_are_prefixes() -> None:
    for one in ground().find("bm25", 5, QUESTIONS)[0]:
        assert [shown(item) for item in one.evidence] == [piece.text for piece in one.ranked[:5]]
        assert [len(top) for top in one.tops] == [min(k, len(one.ranked)) for k in DEPTHS]


def test_what_variants_share_is_built_once_and_charged_to_each() -> None:
    encoder = HashEncoder()
    here = ground(encoder=encoder)
    costs = [here.find(name, 5, QUESTIONS)[1] for name in VARIANTS]
    assert len({cost.build_tokens for cost in costs}) == len({cost.search_tokens for cost in costs}) == 1
    stored = sum(map(len, encoder.token_spans([turn_prefix(t, dated=False) + t.text for t in TRACES])))
    assert costs[0].build_tokens == stored
    asked = sum(map(len, encoder.token_spans([question.text for question in QUESTIONS])))
    assert costs[0].search_tokens >= asked
    first = turn_prefix(TRACES[0], dated=False) + TRACES[0].text
    assert sum(text == first for call in encoder.calls for text in call) == 2  # in either boundary once


def test_the_metered_encoder_changes_nothing_but_counts() -> None:
    plain, metered = HashEncoder(), MeteredEncoder(HashEncoder())
    texts = ["red boat", "a kite in Oslo"]
    assert torch.equal(plain.encode(texts).vectors, metered.encode(texts).vectors)
    assert metered.tokens == 6
    assert metered.token_spans(texts) == plain.token_spans(texts)
    assert metered.tokens == 6  # counting spends nothing


@pytest.mark.parametrize(
    ("name", "parsed"), [("zeromem", ("zeromem", 5)), ("bm25@1", ("bm25", 1)), ("zeromem@20", ("zeromem", 20))]
)
def test_a_name_may_carry_a_cap(name: str, parsed: tuple[str, int]) -> None:
    assert parse_system(name, 5) == parsed


@pytest.mark.parametrize(
    ("name", "words_of_it"),
    [
        ("bm52", r"systems: expected some of zeromem, .* got 'bm52'; did you mean 'bm25'\?"),
        ("bm25@", "systems: expected a cap from 1"),
        ("bm25@0", "systems: expected a cap from 1"),
        ("bm25@x", "systems: expected a cap from 1"),
        ("no_answer_calibration@3", "systems: expected some of"),
    ],
)
def test_other_names_are_refused(name: str, words_of_it: str) -> None:
    with pytest.raises(ZeroMemError, match=words_of_it):
        parse_system(name, 5)


# Chunks


def test_chunks_hold_every_line_once_in_order() -> None:
    here = ground(room=5 * (60 + TAG))
    assert here.chunk == 60
    one = here.find("rag", 20, QUESTIONS[:1])[0][0]
    lines = [turn_prefix(t) + t.text for t in order_turns([t for t in TRACES if t.boundary == "a"]).traces]
    assert sorted(line for piece in one.ranked for line in piece.text.split("\n")) == sorted(lines)
    assert all(words([piece.text])[0] <= 60 for piece in one.ranked)
    assert len(one.ranked) > 1
    days = [item.time for item in one.evidence]
    assert None in days  # a chunk over two days has no day of its own
    assert all(item.trace_id.startswith("a/") for item in one.evidence)


def test_a_chunk_is_no_larger_than_the_papers() -> None:
    assert ground(room=100_000).chunk == RAG_CHUNK
    assert ground(room=1_500).chunk == 300 - TAG


def test_windows_overlap_and_cover_everything() -> None:
    here = ground(room=60 + TAG)
    one = here.find("long_llm", 5, QUESTIONS[:1])[0][0]
    texts = [window.items[0].text.split("\n") for window in one.windows]
    lines = [turn_prefix(t) + t.text for t in order_turns([t for t in TRACES if t.boundary == "a"]).traces]
    assert list(dict.fromkeys(line for text in texts for line in text)) == lines
    for before, after in pairwise(texts):
        shared = set(before) & set(after)
        assert shared
        assert sum(words(sorted(shared))) <= OVERLAP * here.window
        assert after[-1] not in before
    assert all(len(window.items) == 1 for window in one.windows)


def test_a_trace_longer_than_a_chunk_is_cut() -> None:
    long = Trace(id="x", boundary="x", text=" ".join(f"word{i}" for i in range(300)), title="Novel")
    here = ground([long], room=5 * (60 + TAG))
    one = here.find("rag", 30, [Question("q", "x", "word7?", (), ("word7",))])[0][0]
    assert all(words([piece.text])[0] <= 60 for piece in one.ranked)
    assert set(" ".join(piece.text for piece in one.ranked).split()) >= set(long.text.split())


# Graph retrieval in the papers' style

BRIDGE = [
    ("The Red Kite", "The Red Kite is a novel by Maria Sand."),
    ("Maria Sand", "Maria Sand was born in Bergen and wrote about harbours."),
    ("Ida Moen", "Ida Moen was born in Oslo and wrote about mountains."),
    ("Weather", "Clouds gather before rain over the sea."),
]


def bridge(question: str) -> PlainRetrieval:
    documents = [Trace(id=title, boundary="w", text=text, title=title, role="document") for title, text in BRIDGE]
    return PlainRetrieval(documents, [question, "what about clouds and rain?"], HashEncoder())


@pytest.mark.parametrize("retrieve", [linear_rag, hippo_rag])
def test_a_walk_reaches_the_document_that_the_question_does_not_name(retrieve: Any) -> None:
    plain = bridge("Where was the author of The Red Kite born?")
    scores = retrieve(plain, RuleExtractor())
    place = {name: plain.units.index(name) for name in plain.units}
    assert scores.shape == (2, 4)
    assert scores[0, place["Maria Sand"]] > scores[0, place["Weather"]] + 1e-6
    assert torch.allclose(scores[1], plain.scores("dense")[1], atol=1e-6)  # nothing is named
    assert bool(scores.isfinite().all())


@pytest.mark.parametrize("retrieve", [linear_rag, hippo_rag])
def test_texts_without_names_are_ranked_by_the_dense_score(retrieve: Any) -> None:
    traces = [Trace(id=str(i), boundary="w", text=text) for i, text in enumerate(["a red boat", "some blue lamp"])]
    plain = PlainRetrieval(traces, ["the red boat"], HashEncoder())
    assert torch.allclose(retrieve(plain, RuleExtractor()), plain.scores("dense"), atol=1e-6)


# Long contexts


def test_long_contexts_hold_the_gold_documents_and_others(tmp_path: Path) -> None:
    corpus = [{"title": f"T{i}", "text": f"Text number {i}."} for i in range(420)]
    questions = [
        {"id": f"q{i}", "question": f"What is {i}?", "answer": str(i), "type": "bridge",
         "gold_titles": [f"T{i}", f"T{i + 1}"], "context_titles": [f"T{j}" for j in range(i, i + 10)]}
        for i in range(3)
    ]  # fmt: skip
    (tmp_path / "q.json").write_text(json.dumps(questions))
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(row) for row in corpus))
    data = load_long_context(tmp_path / "q.json", tmp_path / "c.jsonl", "56k", limit=2)
    assert [question.id for question in data.questions] == ["q0", "q1"]
    assert data.split == "q-56k"
    assert len(data.traces) == 2 * CONTEXTS["56k"]
    for question in data.questions:
        own = {trace.id for trace in data.traces if trace.boundary == question.boundary}
        assert set(question.evidence) <= own
        assert len(own) == CONTEXTS["56k"]
    assert data == load_long_context(tmp_path / "q.json", tmp_path / "c.jsonl", "56k", limit=2)
    with pytest.raises(ZeroMemError, match="context: expected one of 56k, 224k, 448k, got '65k'"):
        load_long_context(tmp_path / "q.json", tmp_path / "c.jsonl", "65k")


def test_the_longest_context_builds_from_the_benchmarks_own_pool(shared_data: Path) -> None:
    folder = shared_data / "hotpotqa"
    files = folder / "hotpot_dev250_titles.json.gz", folder / "hotpot_corpus.jsonl.gz"
    data = load_long_context(*files, "448k", limit=1)
    assert len(data.traces) == 3_200
    assert len(data.questions[0].evidence) == 2


# Adapters


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_says_why_it_is_not_available(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    adapter = ADAPTERS[name]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv(SETTINGS, raising=False)
    if importlib.util.find_spec(adapter.module) is None:
        assert adapter.available() == f"{adapter.module} is not installed: {adapter.install}"
    monkeypatch.setattr(adapter, "module", "json")
    assert SETTINGS in str(adapter.available())
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({name: {"model": "m"}}))
    monkeypatch.setenv(SETTINGS, str(file))
    assert adapter.available() is None
    assert adapter.settings() == {"model": "m"}
    file.write_text("[1]")
    with pytest.raises(ZeroMemError, match="expected a JSON file of settings by adapter"):
        adapter.available()


class Remembering:
    """The calls that each system's own documentation shows, answered from a list."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.texts = settings, list[str]()
        self.hybrid_retriever = types.SimpleNamespace(
            retrieve=lambda question: [types.SimpleNamespace(lossless_restatement=text) for text in self.texts]
        )

    from_config = classmethod(lambda cls, config: cls(**config))

    def add(self, messages: list[dict[str, str]], *, user_id: str) -> None:
        self.texts += [message["content"] for message in messages]

    def search(self, query: str, *, user_id: str, limit: int) -> dict[str, Any]:
        return {"results": [{"memory": text} for text in self.texts]}

    def add_note(self, content: str, time: str | None = None) -> None:
        self.texts.append(content)

    def search_agentic(self, query: str, k: int) -> list[dict[str, str]]:
        return [{"content": text} for text in self.texts]

    def add_memory(self, messages: list[dict[str, str]], force_segment: bool, force_extract: bool) -> None:
        self.texts += [message["content"] for message in messages]

    def add_dialogue(self, speaker: str, content: str, timestamp: str) -> None:
        self.texts.append(f"{speaker}: {content}")

    def finalize(self) -> None: ...

    def index(self, docs: list[str]) -> None:
        self.texts += docs

    def retrieve(self, question: str = "", limit: int = 0, **other: Any) -> Any:
        return [types.SimpleNamespace(docs=self.texts)] if other else "\n".join(self.texts)


NAMES = ("Memory", "AgenticMemorySystem", "LightMemory", "SimpleMemSystem", "HippoRAG")


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_remembers_and_searches_by_the_systems_own_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("other")
    for each in NAMES:
        setattr(module, each, Remembering)
    for path in ("other", "other.memory", "other.memory.lightmem", "other.memory_system"):
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(ADAPTERS[name], "module", "other")
    found, cost = ground().find(name, 2, QUESTIONS[:2])
    assert cost.build_seconds >= 0
    for one in found:
        assert [item.trace_id for item in one.evidence] == [f"{name}/1", f"{name}/2"]
        assert "Oslo" in one.evidence.items[0].text
        assert len(one.ranked) == sum(trace.boundary == "a" for trace in TRACES)
        assert all(math.isfinite(item.score) for item in one.evidence)


def test_systems_have_distinct_names() -> None:
    assert len(set(SYSTEMS)) == len(SYSTEMS)
    assert dataclasses.is_dataclass(ground().find("bm25", 1, QUESTIONS[:1])[0][0])
