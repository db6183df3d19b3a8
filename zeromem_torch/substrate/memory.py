"""Assemble a memory: forward rows of one scope's traces in, the tensors of both views out. No text is analysed here.

Everything that depends on more than one trace is derived anew from the rows, by sorting and counting whole tensors: a
memory that grew trace by trace is the same as one built at once, because both are this function of the same rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from zeromem_torch.bank import Index
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.sparse import offsets
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.entities import EntityExtractor, entity_key
from zeromem_torch.substrate.forward import Forward, read_traces
from zeromem_torch.substrate.graph import Gazetteer, GraphWeights, TitlesFound, entity_context_graph, title_words
from zeromem_torch.substrate.lexicon import (
    LearnedTerms,
    TermCounts,
    Vocabulary,
    inverse_frequency,
    pair_keys,
    word_key,
)
from zeromem_torch.substrate.traces import Trace
from zeromem_torch.substrate.units import Turns, day_of, episodes, order_turns, voice, windows


@dataclass(frozen=True)
class Memory:
    """One scope: its traces in order, its tensors, and the tables that turn words of a query into row numbers."""

    boundary: str
    turns: Turns
    index: Index
    sizes: Mapping[str, int]  # axes that no tensor spans
    words: Vocabulary
    rarity: Sequence[float]  # idf of a word over the turns
    vocabulary: Vocabulary  # of the postings: the words or, if learned, the encoder's tokens
    learned: bool
    phrases: Vocabulary  # pairs of neighbouring terms
    entities: Vocabulary
    speakers: Mapping[str, int]
    titles: Gazetteer
    chunk_spans: Int[Tensor, "chunks 2"]  # in the trace's text

    def best_span(self, unit: int, query: Float[Tensor, " dim"]) -> tuple[int, int]:
        """The stretch of a trace to hand over: all of it or, of a long one, the chunk nearest to the query."""
        first, last = self._first_chunk[unit], self._first_chunk[unit + 1]
        best = first
        if last - first > 1:
            nearness = self.index.chunk_vectors[first:last] @ query.to(self.index.chunk_vectors)
            best += int(nearness.argmax())
        start, end = self._spans[best]
        return int(start), int(end)

    @cached_property
    def _first_chunk(self) -> npt.NDArray[np.int64]:
        """Where the chunks of each unit begin, and where those of the last one end."""
        units = torch.arange(len(self.turns.traces) + 1)
        return torch.searchsorted(self.index.chunk_unit.contiguous(), units.to(self.index.chunk_unit)).numpy()

    @cached_property
    def _spans(self) -> npt.NDArray[np.int64]:
        return self.chunk_spans.numpy()

    def rarity_of(self, term: str, unseen: float) -> float:
        number = self.words.get(term)
        return unseen if number is None else self.rarity[number]

    def same_as(self, other: "Memory") -> bool:
        """Whether the traces, their order and every tensor are equal."""
        mine, theirs = (dict(memory.index.tensors()) for memory in (self, other))
        return self.turns.traces == other.turns.traces and all(torch.equal(mine[name], theirs[name]) for name in mine)

    @cached_property
    def latest(self) -> datetime | None:
        """The last event time: "now" for a query that brings no time of its own."""
        return max((trace.time for trace in self.turns.traces if trace.time), default=None)


def build_memory(
    boundary: str, traces: Sequence[Trace], encoder: Encoder, extractor: EntityExtractor, config: SubstrateConfig
) -> Memory:
    """Read and assemble the traces of one boundary, all at once."""
    turns = order_turns(traces)
    rows = read_traces(turns.traces, encoder, lambda _: extractor, config)
    return assemble(boundary, turns, rows, config)


def assemble(
    boundary: str, turns: Turns, rows: Forward, config: SubstrateConfig, titles_found: TitlesFound | None = None
) -> Memory:
    """The memory of some traces, whose forward rows are in the order of ``turns``."""
    traces, units = turns.traces, rows.rows
    chunk_unit = rows.row_of("chunks")
    unit_vectors = _mean_vectors(rows.chunk_vector, chunk_unit, units)
    member_window, member_unit, window_count = windows(turns.session, config.window)
    unit_episode = episodes(turns.session, config.episode)
    episode_count = int(unit_episode.max()) + 1 if units else 0

    words = _Words(rows)
    titles = Gazetteer(traces, words.cases)
    named = _entities(turns, rows, titles, words, titles_found or TitlesFound())
    graph = entity_context_graph(
        torch.stack([named.mention_unit, named.mention_entity], dim=1),
        named.titles,
        named.links,
        _neighbours(turns),
        units,
        len(named.entities),
        GraphWeights(config.rarity, config.title_edge, config.link, config.adjacency),
    )
    speakers: dict[str, int] = {}
    unit_speaker = [speakers.setdefault(said, len(speakers)) if (said := voice(t)) else -1 for t in traces]

    term_row = rows.row_of("terms")
    counts, vocabulary = TermCounts.of_keys(term_row, rows.term_key, units)
    rarity = inverse_frequency(torch.bincount(counts.term, minlength=counts.terms), units).tolist()
    lexical, lexicon = counts, vocabulary
    if config.lexicon == "learned":
        lexical, lexicon = LearnedTerms.weighed(rows.row_of("heavy"), rows.heavy_key, rows.heavy_weight, units)
    together = term_row[:-1] == term_row[1:]
    pairs, phrases = TermCounts.of_keys(term_row[:-1][together], pair_keys(rows.term_key)[together], units)

    index = Index(
        unit_session=turns.session,
        unit_position=turns.position,
        unit_speaker=_long(unit_speaker),
        unit_day=_long([day_of(trace.time) for trace in traces]),
        unit_kinds=rows.kinds,
        unit_tokens=rows.tokens,
        unit_asks=rows.asks,
        unit_leans=rows.leans,
        unit_node=torch.arange(units),
        unit_states=rows.per_row("states"),
        unit_episode=unit_episode,
        chunk_unit=chunk_unit,
        chunk_vectors=rows.chunk_vector,
        token_states=rows.state,
        date_unit=rows.row_of("dates"),
        date_first=rows.date_first,
        date_last=rows.date_last,
        window_vectors=_mean_vectors(unit_vectors[member_unit], member_window, window_count),
        member_window=member_window,
        member_unit=member_unit,
        episode_vectors=_mean_vectors(unit_vectors, unit_episode, episode_count),
        sentence_unit=rows.row_of("sentences"),
        sentence_vectors=rows.sentence_vector,
        mention_sentence=named.mention_sentence,
        mention_entity=named.mention_entity,
        entity_node=units + torch.arange(len(named.entities)),
        out_degree=graph.crow.diff(),
        edge_target=graph.col,
        edge_weight=graph.val,
        unit_postings=lexical.postings(config.k1, config.b),
        window_postings=lexical.merged(member_unit, member_window, window_count).postings(config.k1, config.b),
        phrase_postings=pairs.merged(member_unit, member_window, window_count).postings(config.k1, config.b),
        episode_postings=lexical.merged(torch.arange(units), unit_episode, episode_count).postings(config.k1, config.b),
    )
    return Memory(
        boundary,
        turns,
        index,
        {"sessions": turns.sessions, "speakers": len(speakers)},
        vocabulary,
        rarity,
        lexicon,
        lexical is not counts,
        phrases,
        named.entities,
        speakers,
        titles,
        rows.chunk_span,
    )


class _Words:
    """Which units hold a word as it is written, and in which case."""

    def __init__(self, rows: Forward) -> None:
        self.rows = rows

    def _places(self, words: Collection[str]) -> tuple[Tensor, Tensor]:
        """Entries that are one of the words, and the place of its key among the sorted ones."""
        asked = torch.tensor(sorted(word_key(word) for word in words), dtype=torch.long)
        place = torch.searchsorted(asked, self.rows.word_key).clamp(max=max(len(asked) - 1, 0))
        entry = (asked[place] == self.rows.word_key).nonzero()[:, 0] if len(asked) else torch.empty(0, dtype=torch.long)
        return entry, place[entry]

    def holding(self, words: Collection[str]) -> list[int]:
        entry, _ = self._places(words)
        units: list[int] = torch.unique(self.rows.row_of("words")[entry]).tolist()
        return units

    def cases(self, words: Collection[str]) -> dict[str, tuple[int, int]]:
        if not words:
            return {}
        entry, place = self._places(words)
        zero = torch.zeros(len(words), dtype=torch.long)
        small = zero.index_add(0, place, self.rows.word_small[entry].long()).tolist()
        capital = zero.index_add(0, place, self.rows.word_capital[entry].long()).tolist()
        by_key = sorted(words, key=word_key)
        return {word: (small[i], capital[i]) for i, word in enumerate(by_key)}


@dataclass(frozen=True)
class _Named:
    """Who is named where."""

    entities: Vocabulary
    mention_sentence: Tensor
    mention_unit: Tensor
    mention_entity: Tensor
    titles: Tensor  # unit, entity
    links: Tensor  # unit, unit whose title it names


def _entities(turns: Turns, rows: Forward, titles: Gazetteer, words: _Words, found: TitlesFound) -> _Named:
    """Join what the extractor found, the titles that a text names, and a document's own title (in sentence one)."""
    own_title = [entity_key(" ".join(title_words(trace.title))) if trace.title else "" for trace in turns.traces]
    named: list[tuple[int, int, int]] = []  # unit, character, entity
    links: set[tuple[int, int]] = set()
    if len(titles):
        for unit, places in enumerate(found.update(titles, turns.traces, words.holding)):
            for start, title in places:
                named.append((unit, start, word_key(entity_key(" ".join(title)))))
                links.update((unit, owner) for owner in titles.owners(title) if own_title[owner] != own_title[unit])
    entitled = [(unit, word_key(key)) for unit, key in enumerate(own_title) if key]
    named += [(unit, 0, key) for unit, key in entitled]
    mention = torch.stack([rows.row_of("mentions"), rows.mention_start, rows.mention_key], dim=1)
    if named:  # the extractor may have found them too
        mention = torch.unique(torch.cat([mention, _long(named)]), dim=0)
    said = {name for trace in turns.traces if (name := voice(trace))}
    speakers = {entity_key(word) for name in said for word in (name, name.split()[0])}
    # A speaker is a subject, not a node.
    apart = _long([word_key(key) for key in ("", *speakers)])
    mention = mention[~torch.isin(mention[:, 2], apart)]
    # An entity of a single unit leads nowhere, unless it is that unit's title.
    known, entity = torch.unique(mention[:, 2], return_inverse=True)
    holding = torch.unique(entity * max(rows.rows, 1) + mention[:, 0]) // max(rows.rows, 1)
    bears = torch.isin(known, _long([key for _, key in entitled]))
    kept = (torch.bincount(holding, minlength=len(known)) > 1) | bears
    number = torch.where(kept, kept.cumsum(0) - 1, -1)
    mention, entity = mention[kept[entity]], number[entity[kept[entity]]]
    entities = Vocabulary(known[kept])
    return _Named(
        entities,
        _sentence_at(rows, mention[:, 0], mention[:, 1]),
        mention[:, 0],
        entity,
        _long([(unit, at) for unit, key in entitled if (at := entities.number(key)) is not None]).reshape(-1, 2),
        _long(sorted(links)).reshape(-1, 2),
    )


def _sentence_at(
    rows: Forward, unit: Int[Tensor, " mentions"], start: Int[Tensor, " mentions"]
) -> Int[Tensor, " mentions"]:
    """The sentence of a unit in which a character lies: the first that ends behind it, or the last."""
    width = 2 + max(int(rows.sentence_end.max()), int(start.max())) if start.numel() else 1
    ends = rows.row_of("sentences") * width + rows.sentence_end
    last = offsets(rows.per_row("sentences"))[unit + 1] - 1
    return torch.minimum(torch.searchsorted(ends, unit * width + start, right=True), last)


def _neighbours(turns: Turns) -> Int[Tensor, "pairs 2"]:
    here = torch.arange(len(turns.traces) - 1) if turns.traces else torch.empty(0, dtype=torch.long)
    together = turns.session[here] == turns.session[here + 1] if here.numel() else torch.empty(0, dtype=torch.bool)
    return torch.stack([here, here + 1], dim=1)[together]


def _mean_vectors(vectors: Tensor, group: Tensor, groups: int) -> Tensor:
    return normalize(torch.zeros(groups, vectors.shape[1]).index_add_(0, group, vectors), dim=-1)


def _long(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
