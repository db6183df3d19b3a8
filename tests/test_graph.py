"""The entity-context graph (Eqs. 3-4), titles in running text, and the walk over it as a view (Eqs. 8-10)."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import equations
import pytest
import torch
from builders import DIM, SIZES, WEIGHTS, Dice, Query, Sample, bank_of, bank_with, lay_out, query, rows_of, sample
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close
from toys import HashEncoder, talk

from zeromem_torch.bank import MemoryBank, pack
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.retrieval.graph import RESET_REASONS, GraphScores, GraphView
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.retrieval.signals import Signals
from zeromem_torch.routing.queries import compile_queries
from zeromem_torch.substrate.entities import RuleExtractor, query_keys
from zeromem_torch.substrate.graph import Gazetteer, GraphWeights, entity_context_graph, title_words, word_cases
from zeromem_torch.substrate.memory import build_memory
from zeromem_torch.substrate.tokenizer import STOP_WORDS, Analyzer
from zeromem_torch.substrate.traces import Trace

# Eqs. 3-4

SETTINGS = [
    WEIGHTS,
    GraphWeights(rarity=0.0, title=0.0, link=0.0, adjacency=0.0),  # the paper's, without its adjacency edges
    GraphWeights(rarity=1.0, title=2.0, link=3.0, adjacency=1.0),
]


def pairs(values: list[tuple[int, int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.long).reshape(-1, 2)


def graph_of(one: Sample, weights: GraphWeights) -> Tensor:
    mentions, titles, links = pairs(one.mentions), pairs(one.titles), pairs(one.links)
    return entity_context_graph(
        mentions, titles, links, pairs(one.neighbours), one.units, one.entities, weights
    ).to_dense()


@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("weights", SETTINGS)
@pytest.mark.parametrize("plain", [False, True])
def test_edges_equal_equation_4(units: int, weights: GraphWeights, plain: bool) -> None:
    one = sample(units, units, plain=plain)
    expected = equations.entity_context_graph(
        one.mentions, one.titles, one.links, one.neighbours, one.units, one.entities,
        rarity=weights.rarity, title=weights.title, link=weights.link, adjacency=weights.adjacency,
    )  # fmt: skip
    nodes = one.units + one.entities
    assert_close(graph_of(one, weights), torch.tensor(expected).reshape(nodes, nodes), rtol=1e-5, atol=1e-6)


def test_a_unit_shares_one_among_what_it_names_and_its_neighbours() -> None:
    one = sample(3, 129)
    edges = graph_of(one, GraphWeights(rarity=2.0, title=10.0, link=0.0, adjacency=0.1))
    names = torch.zeros(129, dtype=torch.bool)
    names[[unit for unit, _ in one.mentions]] = True
    beside = torch.zeros(129, dtype=torch.bool)
    beside[[unit for pair in one.neighbours for unit in pair]] = True
    leaving = edges[:129].sum(1)
    assert_close(leaving, 0.9 * names + 0.1 * beside)
    assert (~names & ~beside).any(), "some unit stands alone: it dangles"
    assert not edges[129 + one.entities - 1].any(), "an entity that nobody names dangles"


def test_an_occurrence_counts_each_time() -> None:
    plain = GraphWeights(rarity=0.0, title=0.0, link=0.0, adjacency=0.0)
    none = pairs([])
    edges = entity_context_graph(pairs([(0, 0), (0, 0), (0, 1), (1, 1)]), none, none, none, 2, 2, plain).to_dense()
    assert edges[0].tolist() == pytest.approx([0, 0, 2 / 3, 1 / 3])
    assert edges[2].tolist() == [2, 0, 0, 0]
    assert edges[3].tolist() == [1, 1, 0, 0]


# Titles in running text


def documents(*titles: str, text: str = "Nothing.") -> list[Trace]:
    return [Trace(id=f"d{i}", boundary="b", text=text, title=title) for i, title in enumerate(titles)]


def gazetteer(traces: Sequence[Trace]) -> Gazetteer:
    """Over these traces alone, their words counted one by one."""

    def cases(words: Collection[str]) -> dict[str, tuple[int, int]]:
        counted = [word_cases(trace.text) for trace in traces]
        held = {word: [own[word] for own in counted if word in own] for word in words}
        return {word: (sum(small for small, _ in own), sum(big for _, big in own)) for word, own in held.items()}

    return Gazetteer(traces, cases)


def found(text: str, *titles: str) -> list[tuple[str, list[int]]]:
    return [(text[start:end], owners) for start, end, _, owners in gazetteer(documents(*titles)).find(text)]


@pytest.mark.parametrize(
    ("text", "titles", "expected"),
    [
        ("I saw Ed Wood twice.", ["Ed Wood (film)", "Ed Wood"], [("Ed Wood", [0, 1])]),
        ("She left New York City.", ["New York", "New York City"], [("New York City", [1])]),
        ("New York, New York City", ["New York", "New York City"], [("New York", [0]), ("New York City", [1])]),
        ("new york is a text without capitals", ["New York"], [("new york", [0])]),
        ("We met in new york, I think.", ["New York"], []),
        ("We met in new York, I think.", ["New York"], [("new York", [0])]),
        ("A Beautiful Mind", ["Beautiful"], []),
        ("STRASSE or Straße", ["Straße"], [("STRASSE", [0]), ("Straße", [0])]),
        ("The Who played.", ["The Who"], []),  # function words only
        ("In 1984 it rained.", ["1984"], []),  # a bare number is no name
        ("Он видел Москву и Рим.", ["Рим"], [("Рим", [0])]),
        ("nothing of it", ["Ed Wood"], []),
        ("", ["Ed Wood"], []),
        ("Ed Wood", [""], []),
        ("Ed Wood", ["(film)"], []),
    ],
)
def test_titles_are_found(text: str, titles: list[str], expected: list[tuple[str, list[int]]]) -> None:
    assert found(text, *titles) == expected


def test_a_title_that_its_memory_writes_small_is_a_word_like_any_other() -> None:
    often = documents("Water", text="The water is cold, and water is wet. Water!")
    assert gazetteer(often).find("Water is a film") == []
    seldom = documents("Water", text="Water came out in 2005. Some liked Water.")
    assert [words for _, _, words, _ in gazetteer(seldom).find("Who made Water?")] == [("water",)]


def titles_one_by_one(text: str, *titles: str) -> list[tuple[str, list[int]]]:
    """The longest title that begins at each word behind the last one found, by comparing it with every title."""
    words = list(re.finditer(r"\w+", text))
    known = {title_words(title) for title in titles} - {()}
    found, place = [], 0
    while place < len(words):
        for title in sorted(known, key=len, reverse=True):
            named = words[place : place + len(title)]
            small = named[0][0].islower() and named[-1][0].islower() and not text.islower()
            inside = len(title) == 1 and named[0][0][0].isupper() and any(
                beside[0][0].isupper() and beside[0].casefold() not in STOP_WORDS and gap == " "
                for beside, gap in (
                    *((w, text[w.end() : named[0].start()]) for w in words[place - 1 : place] if place),
                    *((w, text[named[0].end() : w.start()]) for w in words[place + 1 : place + 2]),
                )
            )  # fmt: skip
            common = STOP_WORDS.issuperset(title) or (len(title) == 1 and title[0].isdigit())
            if tuple(w[0].casefold() for w in named) == title and not (small or inside or common):
                owners = [unit for unit, other in enumerate(titles) if title_words(other) == title]
                found.append((text[named[0].start() : named[-1].end()], owners))
                place += len(title) - 1
                break
        place += 1
    return found


TITLE_WORDS = ["Ed", "ed", "Wood", "New", "York", "City", "of", "the", "İstanbul", "Straße", "STRASSE", "1984", "X"]
GAPS = [" ", " ", "-", ", ", "'", "̇", "_"]


@pytest.mark.parametrize("seed", range(60))
def test_titles_are_those_found_by_trying_each(seed: int) -> None:
    dice = Dice(seed)
    titles = [" ".join(TITLE_WORDS[w] for w in dice.below(len(TITLE_WORDS), 1 + dice.one(3))) for _ in range(7)]
    text = "".join(
        TITLE_WORDS[w] + GAPS[g]
        for w, g in zip(dice.below(len(TITLE_WORDS), 12), dice.below(len(GAPS), 12), strict=True)
    )
    assert found(text, *titles) == titles_one_by_one(text, *titles)


def test_owners_and_first_words_of_titles() -> None:
    known = gazetteer(documents("New York", "new york (city)", "New", "Ed Wood", "The Who", ""))
    assert known.owners(("new", "york")) == [0, 1]
    assert known.owners(("york",)) == known.owners(("the", "who")) == []
    assert known.first_words == {"new": {("new", "york"), ("new",)}, "ed": {("ed", "wood")}}
    assert len(known) == 3
    assert not len(gazetteer([]))


def test_without_titles_nothing_is_found() -> None:
    assert gazetteer([]).find("Ed Wood") == []
    assert gazetteer(documents("", "")).find("Ed Wood") == []


def test_words_of_a_title() -> None:
    assert title_words("Ed Wood (film)") == ("ed", "wood")
    assert title_words("(I Can't Get No) Satisfaction") == ("i", "can", "t", "get", "no", "satisfaction")
    assert title_words("C++ (language)") == ("c",)
    assert title_words("") == ()


# Eq. 8


def test_alignment_is_by_exact_key_and_a_title_weighs_more() -> None:
    texts = {
        "Ed Wood (film)": "Ed Wood was directed by Tim Burton in Hollywood.",
        "Tim Burton": "Tim Burton was born in Burbank.",
        "Burbank": "Burbank lies near Hollywood. Tim Burton left Burbank.",
    }
    traces = [Trace(id=title, boundary="b", text=text, title=title) for title, text in texts.items()]
    encoder, analyse = HashEncoder(), Analyzer(stop_words=True, stemmer="english")
    memory = build_memory("b", traces, encoder, RuleExtractor(), SubstrateConfig(entities="rules"))
    bank = pack([memory.index], [memory.sizes])
    asked = "Which film by Tim Burton was made in Hollywood, not Chicago?"
    batch, _ = compile_queries([asked], [0], [memory], bank, encoder, analyse, [None], 0.125)
    keys = query_keys(asked)
    known = {key: number for key in (*keys, "tim burton") if (number := memory.entities.get(key)) is not None}
    seeds = equations.alignment(keys, ["tim burton"], known, 0.125)
    assert set(seeds.values()) == {0.125, 1.0}
    dense = batch.entities.dense(1, len(memory.entities))
    assert {e: float(value) for e, value in enumerate(dense[0]) if value} == seeds


def test_a_query_that_names_nothing_known_has_no_seeds() -> None:
    encoder, analyse = HashEncoder(), Analyzer(stop_words=True, stemmer="english")
    traces = talk("b", ["Hello!", "Hi."])
    memory = build_memory("b", traces, encoder, RuleExtractor(), SubstrateConfig(entities="rules"))
    bank = pack([memory.index], [memory.sizes])
    batch, _ = compile_queries(["Who is Zoe?"], [0], [memory], bank, encoder, analyse, [None], 0.125)
    assert batch.entities.row.numel() == 0


# The view

PRIOR, EXACT = {"a": 0.5, "b": 0.25}, {"c": 0.125}


def signals_for(slots: int, units: int, *, seed: int = 0, flat: bool = False) -> dict[str, Tensor]:
    dice = Dice(seed)
    signals = {name: dice.uniform(slots, units) for name in ("a", "b", "c", "rest")}
    return {name: torch.ones_like(row) for name, row in signals.items()} if flat else signals


def view_of(sharpness: float, affinity: float, named: float, damping: float = 0.6) -> GraphView:
    view = GraphView(
        PRIOR, EXACT, damping=damping, sharpness=sharpness, affinity=affinity, named=named, hops=2, decay=0.5
    )
    view.walk = PersonalizedPageRank(damping, 1e-12)  # the root of a score magnifies what is left of the walk's error
    return view.double()


def expected_view(
    asked: Query, one: Sample, signals: dict[str, list[float]], sharpness: float, affinity: float, named: float
) -> list[float]:
    return equations.graph_view(
        equations.weighted(signals, PRIOR, one.units),
        equations.weighted(signals, EXACT, one.units),
        signals["rest"],
        [asked.entities.get(e, 0.0) for e in range(one.entities)],
        [equations.dot(asked.vector.tolist(), row) for row in one.index.sentence_vectors.tolist()],
        one.sentences,
        one.edges,
        damping=0.6,
        sharpness=sharpness,
        affinity=affinity,
        named=named,
        hops=2,
        decay=0.5,
    )


@pytest.mark.parametrize("sizes", [(size,) for size in SIZES] + [(7, 0, 40, 1, 2)])
@pytest.mark.parametrize(("sharpness", "affinity", "named"), [(1.0, 0.0, 1.0), (2.0, 1.0, 0.25), (8.0, 2.0, 0.5)])
def test_the_view_equals_its_loop(sizes: tuple[int, ...], sharpness: float, affinity: float, named: float) -> None:
    memories = [sample(20 + seed, units) for seed, units in enumerate(sizes)]
    bank = bank_of(memories)
    asked = [[query(7 * m + s, one, blank=s == 1) for s in range(2 + m % 2)] for m, one in enumerate(memories)]
    batch = lay_out(asked, bank)
    signals = signals_for(batch.slots, bank.axes["units"].size)
    scores = view_of(sharpness, affinity, named)(batch, bank, signals)
    for m, one in enumerate(memories):
        for s, own in enumerate(asked[m]):
            rows = {name: rows_of(signal, bank, s, m) for name, signal in signals.items()}
            expected = expected_view(own, one, rows, sharpness, affinity, named)
            assert rows_of(scores.units, bank, s, m) == pytest.approx(expected, abs=1e-6)


def test_the_ladder_of_resets() -> None:
    one = sample(5, 7)
    bank, known = bank_of([one, one]), query(1, one)
    known, unknown = replace(known, entities={0: 1.0, 2: 0.5}), replace(known, entities={})
    batch = lay_out([[known, unknown, known], [unknown, None, unknown]], bank)
    signals = signals_for(3, 14)
    for name in ("a", "b"):
        signals[name][2] = 0.5  # the prior of the third slot tells no unit from another
    scores: GraphScores = view_of(2.0, 0.0, 1.0)(batch, bank, signals)
    assert scores.reason.tolist() == [[0, 1], [1, 1], [0, 2]]
    assert len(RESET_REASONS) == 3


@pytest.mark.parametrize("units", SIZES)
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_a_reset_equals_its_loop(units: int, sharpness: float) -> None:
    """Read off a walk without steps and a root: with damping 0 the scores are those of the reset itself."""
    one = sample(6, units)
    bank = bank_of([one])
    batch = lay_out([[query(1, one), query(2, one, blank=True), query(3, one)]], bank)
    signals = signals_for(3, units)
    signals["a"][2] = signals["b"][2] = 0.0
    view = view_of(sharpness, 0.0, 1.0, damping=0.0)
    scores: GraphScores = view(batch, bank, signals)
    for s in range(3):
        rows = {name: signal[s].tolist() for name, signal in signals.items()}
        prior = equations.weighted(rows, PRIOR, units)
        of_units, of_entities, reason = equations.reset(prior, scores.entities[s].tolist(), sharpness)
        assert sum(of_units) + sum(of_entities) == pytest.approx(1 if units else sum(of_entities))
        assert int(scores.reason[s, 0]) == reason
        flat = equations.minmax([(mass + 1e-30) ** (1 / sharpness) for mass in of_units])
        boost = equations.weighted(rows, EXACT, units)
        expected = [score + more for score, more in zip(flat, boost, strict=True)]
        assert scores.units[s].tolist() == pytest.approx(expected, abs=1e-6)


def test_activation_is_that_of_the_propagation() -> None:
    one = sample(5, 20)
    bank, own = bank_of([one]), query(1, one)
    own = replace(own, entities={0: 1.0, 3: 0.5})
    scores: GraphScores = view_of(2.0, 0.0, 1.0)(lay_out([[own]], bank), bank, signals_for(1, 20))
    similarity = [equations.dot(own.vector.tolist(), row) for row in one.index.sentence_vectors.tolist()]
    seeds = [own.entities.get(e, 0.0) for e in range(one.entities)]
    expected = equations.propagation(seeds, similarity, one.sentences, hops=2, decay=0.5)
    assert scores.entities[0].tolist() == pytest.approx(expected)


def without_edges(one: Sample) -> MemoryBank:
    none = torch.empty(0, dtype=torch.long)
    degree = torch.zeros_like(one.index.out_degree)
    return bank_with(one, out_degree=degree, edge_target=none, edge_weight=none.double())


def test_in_a_graph_without_edges_units_keep_the_order_of_their_prior() -> None:
    one = sample(5, 20)
    bank = without_edges(one)
    signals = signals_for(1, 20)
    signals["c"].zero_()
    scores = view_of(8.0, 2.0, 0.5)(lay_out([[query(1, one)]], bank), bank, signals).units
    prior = 0.5 * signals["a"] + 0.25 * signals["b"]
    assert torch.equal(scores.argsort(), prior.argsort())


def test_the_view_in_float32() -> None:
    """Sharpened priors and small masses underflow nowhere that shows."""
    one = sample(5, 129)
    wide = bank_of([one])
    floats = {
        name: getattr(one.index, name).float()
        for name in ("chunk_vectors", "sentence_vectors", "edge_weight", "token_states", "window_vectors")
    }
    narrow, own, signals = bank_with(one, **floats), query(1, one), signals_for(1, 129)
    batch = lay_out([[own]], wide)
    floated = replace(
        batch, vectors=batch.vectors.float(), entities=replace(batch.entities, weight=batch.entities.weight.float())
    )
    scores = view_of(8.0, 2.0, 0.25)(batch, wide, signals).units
    near = view_of(8.0, 2.0, 0.25).float()(floated, narrow, {n: row.float() for n, row in signals.items()}).units
    assert near.dtype == torch.float32
    assert_close(near, scores.float(), rtol=0, atol=1e-4)


def test_rounding_of_what_answers_nothing_decides_nothing() -> None:
    """A root magnifies small masses: that a unit is reached must not hang on the last bit of how well it answers."""
    one = sample(5, 20)
    bank, signals = bank_of([one]), signals_for(1, 20)
    signals["rest"][:, 5:] = 0.0
    batch, view = lay_out([[query(1, one)]], bank), view_of(8.0, 2.0, 0.25)
    noisy = signals | {"rest": signals["rest"] + 1e-6 * Dice(7).uniform(1, 20)}
    assert_close(view(batch, bank, noisy).units, view(batch, bank, signals).units, rtol=0, atol=1e-5)


def test_gradient_to_signals_seeds_and_vectors() -> None:
    memories = [sample(5, 6), sample(6, 3)]
    bank = bank_of(memories)
    asked = [[replace(query(s, one), entities={0: 0.5, 1: 1.0}) for s in range(2)] for one in memories]
    batch = lay_out(asked, bank)
    signals = {name: (0.1 + row).requires_grad_() for name, row in signals_for(2, 9).items()}
    vectors = Dice(3).unit_vectors(4).reshape(2, 2, DIM).requires_grad_()
    weight = batch.entities.weight.clone().requires_grad_()
    view = view_of(2.0, 2.0, 0.5)

    def scores(vectors: Tensor, weight: Tensor, *rows: Tensor) -> Tensor:
        known: Signals = dict(zip(signals, rows, strict=True))
        moved = replace(batch, vectors=vectors, entities=replace(batch.entities, weight=weight))
        found: Tensor = view(moved, bank, known).units
        return found

    assert gradcheck(scores, (vectors, weight, *signals.values()), eps=1e-7, atol=1e-4)
