"""Profiled queries as tensors on the slot layout: what every operator behind the router reads.

Slot ``s`` of memory ``m`` holds that memory's ``s``-th query; a memory with fewer queries leaves its last slots empty.
Words of a query become row numbers of the bank here, once, on the host.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.entities import entity_key, query_keys
from zeromem_torch.substrate.lexicon import bigrams, learned_query, query_terms
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
    """Profile, encode and lay out queries; ``memory[i]`` is the place in ``memories`` of the one query ``i`` asks."""
    profiles = [
        profile_query(
            text,
            reference=reference or memories[m].latest,
            speakers=[name for name in memories[m].speakers if name not in ROLES],
        )
        for text, m, reference in zip(texts, memory, references, strict=True)
    ]
    slot_of: list[int] = []
    held = [0] * len(memories)
    for m in memory:
        slot_of.append(held[m])
        held[m] += 1
    slots = max(held, default=0)
    place = (torch.tensor(slot_of, dtype=torch.long), torch.tensor(memory, dtype=torch.long))

    people = [subject_of(profile.text, profile.subjects) for profile in profiles]
    spoken = [first_person(p.text, *named[:2]) if named else p.text for p, named in zip(profiles, people, strict=True)]
    encoded = encoder.encode(spoken, states=True)
    turned = [i for i, text in enumerate(texts) if spoken[i] != text]  # the others are encoded as they are
    asked_as_is = encoder.encode([texts[i] for i in turned]).vectors
    vectors = encoded.vectors.index_copy(0, torch.tensor(turned, dtype=torch.long), asked_as_is)
    spans = torch.split(encoded.spans, encoded.counts.tolist())
    weights = [
        torch.tensor(_token_weights(text, profile, memories[m], own, analyse))
        for text, profile, m, own in zip(spoken, profiles, memory, spans, strict=True)
    ]
    states = [part.float() for part in torch.split(encoded.states, encoded.counts.tolist())]
    named_words = [_named_words(profile, memories[m]) for profile, m in zip(profiles, memory, strict=True)]
    unnamed = [_unnamed(*row) for row in zip(spoken, spans, named_words, strict=True)]
    rest = [normalize(own[kept].sum(0), dim=-1) for own, kept in zip(states, unnamed, strict=True)]

    asking = list(zip(texts, profiles, memory, strict=True))
    rest_words = [
        [word for word in analyse(text) if word not in {term for name in named for term in analyse(name)}]
        for text, named in zip(texts, named_words, strict=True)
    ]
    worded = [(_words(text, profile, analyse), m) for text, profile, m in asking]
    terms = [query_terms(words, memories[m].vocabulary) for words, m in worded]
    rest_terms = [query_terms(own, memories[m].vocabulary) for own, m in zip(rest_words, memory, strict=True)]
    if any(own.learned for own in memories):
        parts = [torch.split(part, encoded.counts.tolist()) for part in (encoded.terms, encoded.weights)]
        for i, (own, weight) in enumerate(zip(*parts, strict=True)):
            vocabulary, kept = memories[memory[i]].vocabulary, unnamed[i]
            terms[i] = learned_query(own.tolist(), weight.tolist(), vocabulary)
            rest_terms[i] = learned_query(own[kept].tolist(), weight[kept].tolist(), vocabulary)

    def spread(values: Tensor, empty: float) -> Tensor:
        out = values.new_full((slots, len(memories), *values.shape[1:]), empty)
        out[place] = values
        return out.to(bank.device)

    def asked(axis: str, rows: Sequence[dict[int, float]]) -> Asked:
        start = bank.axes[axis].ptr
        found = [
            (slot, start[m] + row, weight)
            for slot, m, own in zip(slot_of, memory, rows, strict=True)
            for row, weight in own.items()
        ]
        columns = list(zip(*found, strict=True)) or [(), (), ()]
        slot, row = (torch.tensor(column, dtype=torch.long, device=bank.device) for column in columns[:2])
        return Asked(slot, row, torch.tensor(columns[2], dtype=torch.float32, device=bank.device))

    subjects = [
        memories[m].speakers.get(named[0] if named else USER if asks_of_self(text) else "", -1)
        for text, named, m in zip(texts, people, memory, strict=True)
    ]
    subjects = [s + bank.axes["speakers"].ptr[m] if s >= 0 else -1 for s, m in zip(subjects, memory, strict=True)]
    dates = [[(d.first_day, d.last_day) for d in matched_dates(profile)] or [(1, 0)] for profile in profiles]
    padded_dates = pad_sequence([torch.tensor(d).flip(0) for d in dates], batch_first=True) if dates else None
    if padded_dates is None:
        padded_dates = torch.empty(0, 1, 2, dtype=torch.long)
    padded_dates[padded_dates[..., 0] == 0] = torch.tensor([1, 0])
    batch = QueryBatch(
        query=spread(torch.arange(len(texts)), -1),
        vectors=spread(vectors, 0),
        rest_vectors=spread(torch.stack(rest) if rest else encoded.vectors, 0),
        states=spread(pad_sequence(states, batch_first=True) if states else torch.empty(0, 0, encoder.dim), 0),
        state_weights=spread(pad_sequence(weights, batch_first=True) if weights else torch.empty(0, 0), 0),
        terms=asked("terms", terms),
        phrases=asked("phrases", [query_terms(bigrams(words), memories[m].phrases) for words, m in worded]),
        rest_terms=asked("terms", rest_terms),
        titles=asked("units", [_titles(t, memories[m]) for t, _, m in asking]),
        entities=asked("entities", [_entities(p, memories[m], name) for _, p, m in asking]),
        subject=spread(torch.tensor(subjects, dtype=torch.long), -1),
        kinds=spread(torch.tensor([int(p.answer_types) for p in profiles], dtype=torch.long), 0),
        date_first=spread(padded_dates[..., 0], 1),
        date_last=spread(padded_dates[..., 1], 0),
        relational=spread(torch.tensor([p.relational for p in profiles], dtype=torch.float32), 0),
        local=spread(torch.tensor([p.local for p in profiles], dtype=torch.float32), 0),
    )
    return batch, profiles


_LIMITS = re.compile(r"\b(?:as of|by|since|before|until|till)\s+(?:the\s+)?(?:\w+\s+){0,2}$", re.IGNORECASE)


def matched_dates(profile: QueryProfile) -> list[DateMention]:
    """Dates that evidence should be near to: one behind "by", "since", "before" or "until" is a limit, not a match."""
    return [mention for mention in profile.dates if not _LIMITS.search(profile.text[: mention.start])]


def _token_weights(text: str, profile: QueryProfile, memory: Memory, spans: Tensor, analyse: Analyzer) -> list[float]:
    """How rare the word of each token is in the memory; the subject's name, which half of all turns bear, weighs 0."""
    subject_words = {word for name in profile.subjects for word in tokenize(name)}
    weights = []
    for start, end in spans.tolist():
        word = _word_at(text, start, end)
        terms = analyse(word) if word.strip() else []
        silent = not terms or not any(c.isalnum() for c in word)
        if silent or set(tokenize(word)) & subject_words or tokenize(word)[0] in STOP_WORDS:
            weights.append(0.0)
        else:
            weights.append(max(memory.rarity.get(term, UNSEEN_RARITY) for term in terms))
    return weights if any(weights) else [1.0] * len(weights)


def _words(text: str, profile: QueryProfile, analyse: Analyzer) -> list[str]:
    """The query's terms without the speakers it names: who speaks is a signal of its own, not a word of the text."""
    named = {term for name in profile.subjects for term in analyse(name)}
    words = analyse(text)
    return [word for word in words if word not in named] or words


def _titles(text: str, memory: Memory) -> dict[int, float]:
    return {unit: 1.0 for *_, owners in memory.titles.find(text) for unit in owners}


def _named_words(profile: QueryProfile, memory: Memory) -> frozenset[str]:
    """Words of the names and titles in a query: what is left of it says what is asked *about* them."""
    titles = (word for _, _, words, _ in memory.titles.find(profile.text) for word in words)
    names = (word for name in (*profile.names, *profile.quoted, *profile.subjects) for word in tokenize(name))
    return frozenset((*titles, *names)) - STOP_WORDS


def _unnamed(text: str, spans: Tensor, named: frozenset[str]) -> Bool[Tensor, " tokens"]:
    """Which tokens are of no name: what is asked *about* the names, in context (of a query of names: all of it)."""
    words = [set(tokenize(_word_at(text, start, end))) for start, end in spans.tolist()]
    kept = torch.tensor([not word & named for word in words], dtype=torch.bool)
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
