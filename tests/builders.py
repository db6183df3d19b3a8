"""Small random memories and query batches, for the tests of operators.

A memory is made in its own numbers, and so is a query; `lay_out` puts queries on the slots of a bank as
`compile_queries` does. float64 throughout, so that operators can be held to 1e-9 and checked by gradcheck.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from zeromem_torch.bank import Index, MemoryBank, Postings, pack
from zeromem_torch.routing.queries import Asked, QueryBatch
from zeromem_torch.substrate.graph import GraphWeights, entity_context_graph
from zeromem_torch.substrate.lexicon import TermCounts
from zeromem_torch.substrate.units import episodes, windows

SIZES = (0, 1, 7, 129)
DIM, TERMS, DAY = 6, 12, 738_000
WEIGHTS = GraphWeights(rarity=2.0, title=10.0, link=1.0, adjacency=0.1)


@dataclass(frozen=True)
class Sample:
    """A memory's tensors, and the lists they were made from."""

    index: Index
    sizes: dict[str, int]
    words: list[list[str]]  # per unit
    mentions: list[tuple[int, int]]  # unit, entity
    titles: list[tuple[int, int]]
    links: list[tuple[int, int]]
    neighbours: list[tuple[int, int]]

    @property
    def units(self) -> int:
        return self.index.unit_session.numel()

    @property
    def entities(self) -> int:
        return self.index.entity_node.numel()

    @property
    def members(self) -> list[list[int]]:
        """The units of each window."""
        held: list[list[int]] = [[] for _ in range(len(self.index.window_vectors))]
        for window, unit in zip(self.index.member_window.tolist(), self.index.member_unit.tolist(), strict=True):
            held[window].append(unit)
        return held

    @property
    def sentences(self) -> list[set[int]]:
        """The entities that each sentence names."""
        named: list[set[int]] = [set() for _ in range(self.index.sentence_unit.numel())]
        for sentence, entity in zip(
            self.index.mention_sentence.tolist(), self.index.mention_entity.tolist(), strict=True
        ):
            named[sentence].add(entity)
        return named

    @property
    def edges(self) -> list[list[float]]:
        """``A``, dense."""
        dense = torch.zeros(len(self.index.out_degree), len(self.index.out_degree), dtype=torch.float64)
        row = torch.repeat_interleave(torch.arange(len(dense)), self.index.out_degree)
        rows: list[list[float]] = dense.index_put((row, self.index.edge_target), self.index.edge_weight).tolist()
        return rows

    def states_of(self, unit: int) -> list[list[float]]:
        start = int(self.index.unit_states[:unit].sum())
        states: list[list[float]] = self.index.token_states[start : start + int(self.index.unit_states[unit])].tolist()
        return states


@dataclass(frozen=True)
class Query:
    """One query in the numbers of the memory it is put to."""

    vector: Tensor
    rest_vector: Tensor
    states: Tensor
    state_weights: Tensor
    terms: dict[int, float]
    phrases: dict[int, float]
    rest_terms: dict[int, float]
    titles: dict[int, float]
    entities: dict[int, float]
    subject: int
    kinds: int
    dates: list[tuple[int, int]]
    relational: float
    local: float


class Dice:
    """Repeatable random numbers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, bound: int, count: int = 1) -> list[int]:
        """``count`` whole numbers of [0, bound); none when there is none."""
        return torch.randint(bound, (count,), generator=self.generator).tolist() if bound else []

    def one(self, bound: int) -> int:
        return self.below(bound)[0]

    def chance(self, share: float, count: int) -> list[bool]:
        drawn: list[bool] = (self.uniform(count) < share).tolist()
        return drawn

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def unit_vectors(self, count: int, *, kinds: int = 0) -> Tensor:
        """Random directions; with ``kinds``, only so many different ones, so that scores tie."""
        drawn = normalize(torch.randn(kinds or count, DIM, generator=self.generator, dtype=torch.float64), dim=-1)
        return drawn[self.below(kinds, count)] if kinds and count else drawn[:count]


def sample(seed: int, units: int, *, tied: bool = False, plain: bool = False, lone: bool = False) -> Sample:
    """A random memory: sessions of up to 5 turns and lone documents, units without tokens, entities or date among them.

    ``tied``: only three different vectors. ``plain``: no entity, no date, no speaker, no title, and no term. ``lone``:
    documents only, of one chunk each, so that a unit is a chunk, a window and an episode of its own.
    """
    dice = Dice(seed)
    kinds = 3 if tied else 0
    session: list[int] = []
    position: list[int] = []
    while len(session) < units:
        length = 1 if lone else min(1 + dice.one(5), units - len(session))
        alone = length == 1 and dice.one(2) == 0
        number = session[-1] + 1 if session else 0
        session += [number] * length
        position += [-1] if alone else list(range(length))
    unit_session = torch.tensor(session, dtype=torch.long)
    member_window, member_unit, window_count = windows(unit_session, 3)
    unit_episode = episodes(unit_session, 4)
    episode_count = len(set(unit_episode.tolist()))

    speakers = 0 if plain else 2
    entities = 0 if plain else units // 2 + 2  # more than are named: some stay isolated
    chunk_unit = sorted([*range(units), *dice.below(units, 0 if lone else units // 3)])
    sentence_unit = sorted([*range(units), *dice.below(units, units)])
    said = [] if plain else dice.below(len(sentence_unit), len(sentence_unit))
    named = dice.below(max(entities - 1, 0), len(said))
    mentions = [(sentence_unit[z], e) for z, e in zip(said, named, strict=False)]
    bearers = [] if plain else sorted(set(dice.below(units, units // 4)))
    titles = [(u, dice.one(entities)) for u in bearers]
    links = sorted({(a, b) for a, (b, _) in zip(dice.below(units, len(titles)), titles, strict=True) if a != b})
    neighbours = [(u, u + 1) for u in range(units - 1) if session[u] == session[u + 1]]
    graph = entity_context_graph(
        _pairs(mentions), _pairs(titles), _pairs(links), _pairs(neighbours), units, entities, WEIGHTS
    )
    words = [[] if plain else [f"t{t}" for t in dice.below(TERMS, dice.one(9))] for _ in range(units)]
    vocabulary = {f"t{t}": t for t in range(TERMS)}
    counts = _counts(words, vocabulary)
    pairs = _counts([[f"t{t}" for t in dice.below(TERMS, 2)] if own else [] for own in words], vocabulary)
    dated = [] if plain else sorted(dice.below(units, units))
    first = [DAY + d for d in dice.below(90, len(dated))]

    held = [0 if plain else n for n in dice.below(4, units)]
    index = Index(
        unit_session=unit_session,
        unit_position=torch.tensor(position, dtype=torch.long),
        unit_speaker=_long([s - 1 for s in dice.below(speakers + 1, units)]),
        unit_day=_long([0 if plain or d == 0 else DAY + d for d in dice.below(60, units)]),
        unit_kinds=_long([0 if plain else k for k in dice.below(1024, units)]),
        unit_tokens=_long([1 + n for n in dice.below(60, units)]),
        unit_asks=torch.tensor(dice.chance(0.4, units), dtype=torch.bool),
        unit_leans=torch.tensor(dice.chance(0.4, units), dtype=torch.bool),
        unit_node=torch.arange(units),
        unit_states=_long(held),
        unit_episode=unit_episode,
        chunk_unit=_long(chunk_unit),
        chunk_vectors=dice.unit_vectors(len(chunk_unit), kinds=kinds),
        token_states=dice.unit_vectors(sum(held), kinds=kinds),
        date_unit=_long(dated),
        date_first=_long(first),
        date_last=_long([a + b for a, b in zip(first, dice.below(60, len(dated)), strict=True)]),
        window_vectors=dice.unit_vectors(window_count, kinds=kinds),
        member_window=member_window,
        member_unit=member_unit,
        episode_vectors=dice.unit_vectors(episode_count, kinds=kinds),
        sentence_unit=_long(sentence_unit),
        sentence_vectors=dice.unit_vectors(len(sentence_unit), kinds=kinds),
        mention_sentence=_long(said[: len(named)]),
        mention_entity=_long(named),
        entity_node=units + torch.arange(entities),
        out_degree=graph.crow.diff(),
        edge_target=graph.col,
        edge_weight=graph.val.double(),
        unit_postings=_postings(counts),
        window_postings=_postings(counts.merged(member_unit, member_window, window_count)),
        phrase_postings=_postings(pairs.merged(member_unit, member_window, window_count)),
        episode_postings=_postings(counts.merged(torch.arange(units), unit_episode, episode_count)),
    )
    sizes = {"sessions": len(set(session)), "speakers": speakers}
    return Sample(index, sizes, words, mentions, titles, links, neighbours)


def bank_of(samples: Sequence[Sample]) -> MemoryBank:
    return pack([one.index for one in samples], [one.sizes for one in samples])


def bank_with(one: Sample, **tensors: Any) -> MemoryBank:
    """A bank of one memory, some of whose tensors are others."""
    return pack([dataclasses.replace(one.index, **tensors)], [one.sizes])


def query(seed: int, memory: Sample, *, blank: bool = False) -> Query:
    """A random query; a ``blank`` one knows no term, entity, title, date, subject or answer type of the memory."""
    dice = Dice(seed)
    tokens = 1 + dice.one(4)

    def some(bound: int, *, most: int = 3) -> dict[int, float]:
        return {} if blank else {row: 1.0 + dice.one(2) for row in dice.below(bound, dice.one(most + 1))}

    weights = dice.uniform(tokens)
    weights[0] = 0
    dates = [(DAY + a, DAY + a + b) for a, b in zip(dice.below(80, 2), dice.below(9, 2), strict=True)]
    return Query(
        vector=dice.unit_vectors(1)[0],
        rest_vector=dice.unit_vectors(1)[0],
        states=dice.unit_vectors(tokens),
        state_weights=weights,
        terms=some(TERMS),
        phrases=some(TERMS),
        rest_terms=some(TERMS),
        titles=dict.fromkeys(some(memory.units), 1.0),
        entities={entity: 0.5 * weight for entity, weight in some(memory.entities).items()},
        subject=-1 if blank or not memory.sizes["speakers"] else dice.one(memory.sizes["speakers"] + 1) - 1,
        kinds=0 if blank else dice.one(1024),
        dates=[] if blank else dates[: dice.one(3)],
        relational=float(dice.one(3)),
        local=float(dice.one(3)),
    )


def lay_out(asked: Sequence[Sequence[Query | None]], bank: MemoryBank) -> QueryBatch:
    """Queries on slots: ``asked[m][s]`` is put to memory ``m`` in slot ``s``; None or a short list: empty."""
    slots = max((len(own) for own in asked), default=0)
    placed = [(s, m, q) for m, own in enumerate(asked) for s, q in enumerate(own) if q is not None]
    tokens = max((len(q.states) for *_, q in placed), default=0)
    dates = max((len(q.dates) for *_, q in placed), default=0) or 1
    shape = (slots, len(asked))

    def sparse(name: str, axis: str) -> Asked:
        rows = [
            (s, bank.axes[axis].ptr[m] + row, weight) for s, m, q in placed for row, weight in getattr(q, name).items()
        ]
        return Asked(
            _long([s for s, *_ in rows]),
            _long([row for _, row, _ in rows]),
            torch.tensor([weight for *_, weight in rows], dtype=torch.float64),
        )

    batch = QueryBatch(
        query=torch.full(shape, -1),
        vectors=torch.zeros(*shape, DIM, dtype=torch.float64),
        states=torch.zeros(*shape, tokens, DIM, dtype=torch.float64),
        state_weights=torch.zeros(*shape, tokens, dtype=torch.float64),
        terms=sparse("terms", "terms"),
        phrases=sparse("phrases", "phrases"),
        rest_vectors=torch.zeros(*shape, DIM, dtype=torch.float64),
        rest_terms=sparse("rest_terms", "terms"),
        titles=sparse("titles", "units"),
        entities=sparse("entities", "entities"),
        subject=torch.full(shape, -1),
        kinds=torch.zeros(shape, dtype=torch.long),
        date_first=torch.ones(*shape, dates, dtype=torch.long),
        date_last=torch.zeros(*shape, dates, dtype=torch.long),
        relational=torch.zeros(shape, dtype=torch.float64),
        local=torch.zeros(shape, dtype=torch.float64),
    )
    for number, (s, m, q) in enumerate(placed):
        batch.query[s, m] = number
        batch.vectors[s, m], batch.rest_vectors[s, m] = q.vector, q.rest_vector
        batch.states[s, m, : len(q.states)] = q.states
        batch.state_weights[s, m, : len(q.states)] = q.state_weights
        batch.subject[s, m] = q.subject + bank.axes["speakers"].ptr[m] if q.subject >= 0 else -1
        batch.kinds[s, m], batch.relational[s, m], batch.local[s, m] = q.kinds, q.relational, q.local
        for place, (first, last) in enumerate(q.dates):
            batch.date_first[s, m, place], batch.date_last[s, m, place] = first, last
    return batch


def rows_of(scores: Tensor, bank: MemoryBank, slot: int, memory: int, axis: str = "units") -> list[float]:
    """What one query got in its own memory."""
    ptr = bank.axes[axis].ptr
    row: list[float] = scores[slot, ptr[memory] : ptr[memory + 1]].tolist()
    return row


def _counts(texts: Sequence[Sequence[str]], vocabulary: dict[str, int]) -> TermCounts:
    counts = TermCounts.of(texts, vocabulary)
    return TermCounts(counts.term, counts.row, counts.count.double(), counts.terms, counts.rows)


def _postings(counts: TermCounts) -> Postings:
    postings = counts.postings(0.9, 0.4)
    return dataclasses.replace(postings, impact=postings.impact.double())


def _long(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _pairs(values: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.long).reshape(-1, 2)
