"""The peers compute what they are said to: a bench that beat a wrong one would prove nothing."""

import math

import networkx as nx
import numpy as np
import pytest
import torch
from toys import HashEncoder, memory_of

from bench.peers import LinearRag, names_by_rule, names_by_tagger, scipy_pagerank
from zeromem_torch.bank import axis_of
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.entities import Mention
from zeromem_torch.substrate.memory import Memory
from zeromem_torch.substrate.traces import Trace

TEXTS = (
    "We met Ann Lee in Oslo. The harbour was quiet.",
    "They say Ann Lee sails with Bo Dahl. Bo Dahl mends nets.",
    "In spring Bo Dahl moved to Bergen. Nobody asked about Ann Lee.",
    "Nothing happened.",
)


@pytest.fixture(scope="module")
def memory() -> Memory:
    held = memory_of(*(Trace(str(n), "b", text, session="s", order=n) for n, text in enumerate(TEXTS)))
    (group,) = held.batches(["Where is Ann Lee?"], ["b"], [None])
    return group.memories[0]


@pytest.fixture(scope="module")
def rag(memory: Memory) -> LinearRag:
    return LinearRag.of(memory, names_by_rule)


def test_names_that_stand_inside_another_are_none() -> None:
    text = "They met at the New York Film Academy and in New York."
    assert [text[start:end] for start, end in names_by_rule([text])[0]] == ["New York Film Academy", "New York"]


def test_a_tagger_gives_its_entities_apart_from_numbers() -> None:
    class Fixed:
        fingerprint = "fixed"

        def extract(self, texts: object) -> list[list[Mention]]:
            spans = [
                (0, 4, "PERSON"),
                (0, 9, "ORG"),
                (5, 9, "NOUN"),
                (10, 12, "CARDINAL"),
                (13, 15, "NAME"),
                (16, 20, "DATE"),
            ]
            return [[Mention(start, end, "", label) for start, end, label in spans]]

    assert names_by_tagger(Fixed())(["..."]) == [[(0, 9), (16, 20)]]


def test_the_graph_joins_passages_with_their_entities_and_neighbours(rag: LinearRag) -> None:
    assert rag.names == ["Ann Lee", "Oslo", "Bo Dahl", "Bergen"]
    assert rag.nodes == 4 + 4
    assert [rag.sentences_of[rag.numbers[name.lower()]] for name in rag.names] == [[0, 2, 5], [0], [2, 3, 4], [4]]
    edges = dict(zip(rag.edges, rag.weights, strict=True))
    assert edges[0, 4] == edges[0, 5] == 0.5  # Ann Lee and Oslo, once each
    assert [edges[1, 4], edges[1, 6]] == pytest.approx([1 / 3, 2 / 3])
    assert edges[0, 1] == edges[1, 2] == edges[2, 3] == 1  # one session
    dense = rag.adjacency.to_dense()
    for (one, other), weight in edges.items():
        assert dense[one, other] == dense[other, one] == pytest.approx(weight)
    assert int((dense != 0).sum()) == 2 * len(edges)


def test_who_speaks_is_named_in_the_first_sentence() -> None:
    held = memory_of(Trace("1", "b", "Bo Dahl sails. So do I.", speaker="Ann Lee", session="s"))
    (group,) = held.batches(["Who sails?"], ["b"], [None])
    rag = LinearRag.of(group.memories[0], names_by_rule)
    assert rag.passages == ["Ann Lee: Bo Dahl sails. So do I."]
    assert rag.names == ["Ann Lee", "Bo Dahl"]
    assert rag.entities_of == [[0, 1], []]


def vector_at(rag: LinearRag, cosines: dict[int, float]) -> np.ndarray:
    """A vector with these cosines to some sentences, and none to the others."""
    aims = np.zeros(len(rag.sentence_vectors))
    aims[list(cosines)] = list(cosines.values())
    found: np.ndarray = np.linalg.lstsq(rag.sentence_vectors, aims, rcond=None)[0].astype(np.float32)
    return found


def test_an_entity_wakes_others_through_its_nearest_sentence(rag: LinearRag) -> None:
    ann, oslo, bo, bergen = (rag.numbers[name] for name in ("ann lee", "oslo", "bo dahl", "bergen"))
    awake, weight = rag._wake(vector_at(rag, {0: 0.1, 2: 0.9, 4: 0.8}), {ann: 1.0})
    # first through sentence 2, to Bo Dahl and itself; then through sentence 4 with .9 x .8, to Bergen
    for entity in (bo, bergen):
        assert list(awake[entity]) == pytest.approx([0.72, 3], abs=1e-3)
    assert oslo not in awake
    assert weight[ann] == pytest.approx(1 + 0.9, abs=1e-3)
    assert weight[bo] == pytest.approx(0.9 + 0.72, abs=1e-3)
    awake, weight = rag._wake(vector_at(rag, {0: 0.1, 2: 0.49, 4: 0.8}), {ann: 1.0})
    assert set(awake) == {ann}  # what would be less than half awake is not woken
    assert weight.tolist() == [1, 0, 0, 0]
    awake, weight = rag._wake(vector_at(rag, {2: 1.9}), {ann: 0.4})
    assert set(awake) == {ann}  # and what is so itself wakes nothing
    assert weight.tolist() == [0.4, 0, 0, 0]


def test_passages_weigh_by_nearness_and_by_what_they_spell(rag: LinearRag) -> None:
    ann = rag.numbers["ann lee"]
    nearness = np.array([0.4, 0.2, 0.0, 0.1], dtype=np.float32)
    reset = rag.reset(np.zeros(64, dtype=np.float32), {ann: 1.0}, nearness)
    spelt = [math.log(1 + math.log(2)), math.log(1 + math.log(2)), math.log(1 + math.log(2)), 0]
    expected = [0.05 * (1.5 * near + bonus) for near, bonus in zip([1, 0.5, 0, 0.25], spelt, strict=True)]
    assert reset[:4] == pytest.approx(expected, rel=1e-6)
    assert reset[4:] == pytest.approx([1, 0, 0, 0])


def test_what_was_woken_late_counts_less(rag: LinearRag, monkeypatch: pytest.MonkeyPatch) -> None:
    bergen = rag.numbers["bergen"]
    monkeypatch.setattr(LinearRag, "_wake", lambda *_: ({bergen: (0.8, 3)}, np.zeros(len(rag.names))))
    reset = rag.reset(np.zeros(64, dtype=np.float32), {0: 1.0}, np.zeros(4, dtype=np.float32))
    assert reset[2] - reset[0] == pytest.approx(0.05 * math.log(1 + 0.8 * math.log(2) / 3))
    assert reset[:2] == pytest.approx(0.05 * 1.5)  # equally near: all are nearest


def test_a_search_ranks_by_the_walk(rag: LinearRag) -> None:
    pytest.importorskip("igraph")
    vector = HashEncoder().encode(["Where is Bo Dahl?"]).vectors[0].numpy()
    seeds = rag.seeds("Where is Bo Dahl?")
    assert seeds == {rag.numbers["bo dahl"]: 1.0}
    reset = rag.reset(vector, seeds, rag.passage_vectors @ vector)
    graph = nx.Graph()
    graph.add_nodes_from(range(rag.nodes))
    graph.add_weighted_edges_from((a, b, w) for (a, b), w in zip(rag.edges, rag.weights, strict=True))
    expected = nx.pagerank(graph, alpha=0.5, personalization=dict(enumerate(reset)), tol=1e-12)
    assert rag.walk(reset) == pytest.approx([expected[node] for node in range(rag.nodes)], abs=1e-9)
    order = sorted(range(4), key=lambda unit: -expected[unit])
    assert rag.search(vector, seeds, 3) == order[:3]


def test_without_a_known_name_passages_are_ranked_by_nearness(rag: LinearRag) -> None:
    vector = HashEncoder().encode(["nothing happened"]).vectors[0].numpy()
    assert rag.seeds("What happened to Carl?") == {}
    near = rag.passage_vectors @ vector
    assert rag.search(vector, {}, 4) == sorted(range(4), key=lambda unit: -near[unit])


def test_power_iteration_is_the_walk() -> None:
    pytest.importorskip("scipy")
    draw = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, 30, (90,), generator=draw) for _ in range(2))
    made = Csr.from_coo(row, col, torch.rand(90, generator=draw), 33, 33)  # three nodes without an edge
    reset = torch.rand(7, 33, generator=draw)
    reset /= reset.sum(1, keepdim=True)
    walk = PersonalizedPageRank(0.6, 1e-7, backend="torch")
    expected = walk(reset, made, made.transpose(), axis_of([33]))
    found = scipy_pagerank(made, 0.6, 40)(reset.T.numpy())
    torch.testing.assert_close(torch.from_numpy(found).T, expected, atol=1e-6, rtol=0)
