"""Profiled queries as tensors on the slot layout: what every operator behind the router reads.

Slot ``s`` of memory ``m`` holds that memory's ``s``-th query; a memory with fewer queries leaves its last slots empty.
Words of a query become row numbers of the bank here, once, on the host.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from zeromem_torch.bank import MemoryBank
from zeromem_torch.routing.perspective import asks_of_self, first_person, subject_of
from zeromem_torch.routing.profile import QueryProfile, profile_query
from zeromem_torch.substrate.dates import DateMention
from zeromem_torch.substrate.encoder import Encoded, Encoder, encode_states
from zeromem_torch.substrate.entities import entity_key, query_keys
from zeromem_torch.substrate.lexicon import learned_query, query_phrases, query_terms
from zeromem_torch.substrate.memory import Memory
from zeromem_torch.substrate.tokenizer import STOP_WORDS, Analyzer, tokenize
from zeromem_torch.substrate.units import ROLES

USER = ROLES[0]
UNSEEN_RARITY = 1.0
"""Weight of a query token whose word the memory has never seen: late interaction may still find its synonym."""


@dataclass(frozen=True)
class Asked:
    """Sparse query-side input: ``(slot, row)`` entries with a weight; rows are numbers on one axis of the bank."""

    slot: Int[Tensor, " entries"]
    row: Int[Tensor, " entries"]
    weight: Float[Tensor, " entries"]

    def dense(self, slots: int, rows: int) -> Float[Tensor, "slots rows"]:
        out = self.weight.new_zeros(slots, rows)
        return out.index_put((self.slot, self.row), self.weight, accumulate=True)


@dataclass(frozen=True)
class QueryBatch:
    query: Int[Tensor, "slots memories"]  # its number in the caller's list; -1 = empty slot
    vectors: Float[Tensor, "slots memories dim"]
    states: Float[Tensor, "slots memories query_tokens dim"]
    state_weights: Float[Tensor, "slots memories query_tokens"]  # 0 = padding, or a word that says nothing
    terms: Asked  # on the terms axis
    phrases: Asked  # pairs of neighbouring terms, on the phrases axis
    rest_vectors: Float[Tensor, "slots memories dim"]  # of the query without its names
    rest_terms: Asked
    titles: Asked  # units whose title the query names
    entities: Asked  # Eq. 8: eta_0
    subject: Int[Tensor, "slots memories"]  # speaker the query is about; -1 = none, or more than one
    kinds: Int[Tensor, "slots memories"]  # answer types, a bit each
    date_first: Int[Tensor, "slots memories dates"]
    date_last: Int[Tensor, "slots memories dates"]  # before date_first = padding
    relational: Float[Tensor, "slots memories"]
    local: Float[Tensor, "slots memories"]

    @property
    def slots(self) -> int:
        return self.query.shape[0]

    @property
    def filled(self) -> Bool[Tensor, "slots memories"]:
        return self.query >= 0


@dataclass(frozen=True)
class _Reading:
    """One query read against its memory: all that needs no encoder, in the memory's own numbers."""

    memory: int  # its place among the memories
    profile: QueryProfile
    spoken: str  # the query in the voice of its subject
    subject: int  # speaker; -1 = none
    named: frozenset[str]  # words of the names and titles in it
    terms: dict[int, float]
    phrases: dict[int, float]
    rest_terms: dict[int, float]  # terms without the names
    titles: dict[int, float]
    entities: dict[int, float]


def _read(
    text: str, place: int, memory: Memory, reference: datetime | None, analyse: Analyzer, name: float
) -> _Reading:
    speakers = [speaker for speaker in memory.speakers if speaker not in ROLES]
    profile = profile_query(text, reference=reference or memory.latest, speakers=speakers)
    people = subject_of(text, profile.subjects)
    subject = people[0] if people else USER if asks_of_self(text) else ""
    named = _named_words(profile, memory)
    name_terms = {term for word in named for term in analyse(word)}
    words = analyse(text)
    speaker_terms = {term for speaker in profile.subjects for term in analyse(speaker)}
    # who speaks is a signal of its own, not a word of the text
    spoken_of = [word for word in words if word not in speaker_terms] or words
    return _Reading(
        memory=place,
        profile=profile,
        spoken=first_person(text, *people[:2]) if people else text,
        subject=memory.speakers.get(subject, -1),
        named=named,
        terms=query_terms(spoken_of, memory.vocabulary),
        phrases=query_phrases(spoken_of, memory.phrases),
        rest_terms=query_terms([word for word in words if word not in name_terms], memory.vocabulary),
        titles={unit: 1.0 for *_, owners in memory.titles.find(text) for unit in owners},
        entities=_entities(profile, memory, name),
    )


class _Layout:
    """Where each query lies: slot ``s`` of memory ``m`` holds that memory's ``s``-th query."""

    def __init__(self, memory: Sequence[int], memories: int, bank: MemoryBank) -> None:
        held = [0] * memories
        slot = []
        for m in memory:
            slot.append(held[m])
            held[m] += 1
        self.bank, self.memory, self.slot = bank, memory, slot
        self.shape = (max(held, default=0), memories)

    def spread(self, values: Tensor, empty: float) -> Tensor:
        """A row a query -> ``[slots, memories, ...]``."""
        out = values.new_full((*self.shape, *values.shape[1:]), empty)
        out[torch.tensor(self.slot, dtype=torch.long), torch.tensor(self.memory, dtype=torch.long)] = values
        return out.to(self.bank.device)

    def padded(self, rows: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Rows of different lengths; ``shape`` is what they have where there is none."""
        return self.spread(pad_sequence(list(rows), batch_first=True) if rows else torch.empty(0, *shape), 0)

    def asked(self, axis: str, rows: Sequence[dict[int, float]]) -> Asked:
        """Numbers of each query's memory -> numbers of the bank."""
        start = self.bank.axes[axis].ptr
        found = [
            (slot, start[m] + row, weight)
            for slot, m, own in zip(self.slot, self.memory, rows, strict=True)
            for row, weight in own.items()
        ]
        columns = list(zip(*found, strict=True)) or [(), (), ()]
        slot, row = (torch.tensor(column, dtype=torch.long, device=self.bank.device) for column in columns[:2])
        return Asked(slot, row, torch.tensor(columns[2], dtype=torch.float32, device=self.bank.device))


def compile_queries(
    texts: Sequence[str],
    memory: Sequence[int],
    memories: Sequence[Memory],
    bank: MemoryBank,
    encoder: Encoder,
    analyse: Analyzer,
    references: Sequence[datetime | None],
    name: float,
) -> tuple[QueryBatch, list[QueryProfile]]:
    """Profile, encode and lay out queries; ``memory[i]`` is the place in ``memories`` of the one query ``i`` asks.

    ``name`` is the activation with which an entity starts that is named but is no title (Eq. 8).
    """
    asking = zip(texts, memory, references, strict=True)
    readings = [_read(text, m, memories[m], reference, analyse, name) for text, m, reference in asking]
    layout = _Layout(memory, len(memories), bank)

    encoded = encode_states(encoder, [reading.spoken for reading in readings])
    turned = [i for i, text in enumerate(texts) if readings[i].spoken != text]  # the others are encoded as they are
    as_asked = encoder.encode([texts[i] for i in turned]).vectors
    vectors = encoded.vectors.index_copy(0, torch.tensor(turned, dtype=torch.long), as_asked)
    counts = encoded.counts.tolist()
    spans = torch.split(encoded.spans, counts)
    states = [part.float() for part in torch.split(encoded.states, counts)]
    weights = [
        torch.tensor(_token_weights(reading, memories[reading.memory], own, analyse))
        for reading, own in zip(readings, spans, strict=True)
    ]
    unnamed = [_unnamed(reading, own) for reading, own in zip(readings, spans, strict=True)]
    rest = [normalize(own[kept].sum(0), dim=-1) for own, kept in zip(states, unnamed, strict=True)]
    if not encoder.late_chunking:  # states of another space than the vectors: the whole query has to do
        rest = list(vectors)
    if any(own.learned for own in memories):
        readings = _learned(readings, memories, encoded, unnamed)

    subjects = [r.subject + bank.axes["speakers"].ptr[r.memory] if r.subject >= 0 else -1 for r in readings]
    dates = _dates([reading.profile for reading in readings])
    batch = QueryBatch(
        query=layout.spread(torch.arange(len(texts)), -1),
        vectors=layout.spread(vectors, 0),
        rest_vectors=layout.spread(torch.stack(rest) if rest else encoded.vectors, 0),
        states=layout.padded(states, (0, encoder.dim)),
        state_weights=layout.padded(weights, (0,)),
        terms=layout.asked("terms", [reading.terms for reading in readings]),
        phrases=layout.asked("phrases", [reading.phrases for reading in readings]),
        rest_terms=layout.asked("terms", [reading.rest_terms for reading in readings]),
        titles=layout.asked("units", [reading.titles for reading in readings]),
        entities=layout.asked("entities", [reading.entities for reading in readings]),
        subject=layout.spread(torch.tensor(subjects, dtype=torch.long), -1),
        kinds=layout.spread(torch.tensor([int(r.profile.answer_types) for r in readings], dtype=torch.long), 0),
        date_first=layout.spread(dates[..., 0], 1),
        date_last=layout.spread(dates[..., 1], 0),
        relational=layout.spread(torch.tensor([r.profile.relational for r in readings], dtype=torch.float32), 0),
        local=layout.spread(torch.tensor([r.profile.local for r in readings], dtype=torch.float32), 0),
    )
    return batch, [reading.profile for reading in readings]


def _learned(
    readings: Sequence[_Reading], memories: Sequence[Memory], encoded: Encoded, unnamed: Sequence[Tensor]
) -> list[_Reading]:
    """The readings with terms and weights of the encoder's sparse head in place of the analysed words."""
    parts = [torch.split(part, encoded.counts.tolist()) for part in (encoded.terms, encoded.weights)]
    out = []
    for reading, kept, own, weight in zip(readings, unnamed, *parts, strict=True):
        vocabulary = memories[reading.memory].vocabulary
        terms = learned_query(own.tolist(), weight.tolist(), vocabulary)
        rest = learned_query(own[kept].tolist(), weight[kept].tolist(), vocabulary)
        out.append(replace(reading, terms=terms, rest_terms=rest))
    return out


def _dates(profiles: Sequence[QueryProfile]) -> Int[Tensor, "queries dates 2"]:
    """First and last day of each date a query should be near to; last before first is padding."""
    days = [[(d.first_day, d.last_day) for d in matched_dates(profile)] for profile in profiles]
    out = torch.tensor([1, 0]).repeat(len(days), max([1, *map(len, days)]), 1)
    for row, own in zip(out, days, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.long).reshape(-1, 2)
    return out


_LIMITS = re.compile(r"\b(?:as of|by|since|before|until|till)\s+(?:the\s+)?(?:\w+\s+){0,2}$", re.IGNORECASE)


def matched_dates(profile: QueryProfile) -> list[DateMention]:
    """Dates that evidence should be near to: one behind "by", "since", "before" or "until" is a limit, not a match."""
    return [mention for mention in profile.dates if not _LIMITS.search(profile.text[: mention.start])]


def _token_weights(reading: _Reading, memory: Memory, spans: Tensor, analyse: Analyzer) -> list[float]:
    """How rare the word of each token is in the memory; the subject's name, which half of all turns bear, weighs 0."""
    subject_words = {word for name in reading.profile.subjects for word in tokenize(name)}
    weights = []
    for start, end in spans.tolist():
        word = _word_at(reading.spoken, start, end)
        terms = analyse(word) if word.strip() else []
        silent = not terms or not any(c.isalnum() for c in word)
        if silent or set(tokenize(word)) & subject_words or tokenize(word)[0] in STOP_WORDS:
            weights.append(0.0)
        else:
            weights.append(max(memory.rarity_of(term, UNSEEN_RARITY) for term in terms))
    return weights if any(weights) else [1.0] * len(weights)


def _named_words(profile: QueryProfile, memory: Memory) -> frozenset[str]:
    """Words of the names and titles in a query: what is left of it says what is asked *about* them."""
    titles = (word for _, _, words, _ in memory.titles.find(profile.text) for word in words)
    names = (word for name in (*profile.names, *profile.quoted, *profile.subjects) for word in tokenize(name))
    return frozenset((*titles, *names)) - STOP_WORDS


def _unnamed(reading: _Reading, spans: Tensor) -> Bool[Tensor, " tokens"]:
    """Which tokens are of no name: what is asked *about* the names, in context (of a query of names: all of it)."""
    words = [set(tokenize(_word_at(reading.spoken, start, end))) for start, end in spans.tolist()]
    kept = torch.tensor([not word & reading.named for word in words], dtype=torch.bool)
    return kept if kept.any() else torch.ones_like(kept)


def _word_at(text: str, first: int, last: int) -> str:
    """The word that a token is a piece of."""
    while first > 0 and text[first - 1].isalnum():
        first -= 1
    while last < len(text) and text[last].isalnum():
        last += 1
    return text[first:last] or " "


def _entities(profile: QueryProfile, memory: Memory, name: float) -> dict[int, float]:
    """Eq. 8 by exact match: a title that the query names starts with activation 1, a known entity with ``name``."""
    found = {number: name for key in query_keys(profile.text) if (number := memory.entities.get(key)) is not None}
    for _, _, words, _ in memory.titles.find(profile.text):
        if (number := memory.entities.get(entity_key(" ".join(words)))) is not None:
            found[number] = 1.0
    return found
