"""Profiled queries as tensors on the slot layout: what every operator behind the router reads.

Slot ``s`` of memory ``m`` holds that memory's ``s``-th query; a memory with fewer queries leaves its last slots empty.
Words of a query become row numbers of the bank here, once, on the host.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import compress, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from zeromem_torch.bank import MemoryBank
from zeromem_torch.routing.perspective import asks_of_self, first_person, subject_of
from zeromem_torch.routing.profile import QueryProfile, profile_query
from zeromem_torch.substrate.dates import DateMention
from zeromem_torch.substrate.encoder import Encoded, Encoder, encode_states
from zeromem_torch.substrate.entities import entity_key, query_keys
from zeromem_torch.substrate.graph import TitleFound
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
    """One query read: all that needs neither the encoder nor a row number of its memory."""

    profile: QueryProfile
    spoken: str  # the query in the voice of its subject
    subject: int  # speaker; -1 = none
    titles: Sequence[TitleFound]  # that it names
    named: frozenset[str]  # words of the names and titles in it
    terms: Sequence[str]
    rest: Sequence[str]  # terms without the names


@dataclass(frozen=True)
class _Numbers:
    """The same query in its memory's own row numbers, with weights."""

    terms: dict[int, float]
    phrases: dict[int, float]
    rest_terms: dict[int, float]
    titles: dict[int, float]
    entities: dict[int, float]
    state_weights: Sequence[float]


def _read(
    text: str, memory: Memory, speakers: Sequence[str], reference: datetime | None, analyse: Analyzer
) -> _Reading:
    profile = profile_query(text, reference=reference or memory.latest, speakers=speakers)
    people = subject_of(text, profile.subjects)
    subject = people[0] if people else USER if asks_of_self(text) else ""
    titles = memory.titles.find(text)
    named = _named_words(profile, titles)
    name_terms = {term for word in named for term in _word(word, analyse).terms}
    words = analyse(text)
    speaker_terms = {term for speaker in profile.subjects for term in _word(speaker, analyse).terms}
    return _Reading(
        profile=profile,
        spoken=first_person(text, *people[:2]) if people else text,
        subject=memory.speakers.get(subject, -1),
        titles=titles,
        named=named,
        # who speaks is a signal of its own, not a word of the text
        terms=[word for word in words if word not in speaker_terms] or words,
        rest=[word for word in words if word not in name_terms],
    )


class _Layout:
    """Where each query lies: slot ``s`` of memory ``m`` holds that memory's ``s``-th query."""

    def __init__(self, memory: Sequence[int], memories: int, bank: MemoryBank) -> None:
        self.queries: dict[int, list[int]] = {}  # of each memory that is asked
        slot = []
        for query, m in enumerate(memory):
            own = self.queries.setdefault(m, [])
            slot.append(len(own))
            own.append(query)
        self.bank, self.memory, self.slot = bank, memory, slot
        self.shape = (max(map(len, self.queries.values()), default=0), memories)
        self._place = torch.tensor([s * memories + m for s, m in zip(slot, memory, strict=True)], dtype=torch.long)

    def spread(self, values: Tensor, empty: float = 0) -> Tensor:
        """A row a query -> ``[slots, memories, ...]``."""
        if self.shape[1] == 1:  # query i is in slot i
            return values[:, None].to(self.bank.device)
        out = values.new_full((self.shape[0] * self.shape[1], *values.shape[1:]), empty)
        return out.index_copy(0, self._place, values).view(*self.shape, *values.shape[1:]).to(self.bank.device)

    def padded(self, rows: Tensor, query: Int[Tensor, " rows"], counts: Int[Tensor, " queries"]) -> Tensor:
        """As many rows a query as counted, one after the other -> ``[slots, memories, most, ...]``, 0 behind them."""
        most = int(counts.max()) if len(counts) else 0
        place = torch.arange(len(rows)) + (self._place * most - counts.cumsum(0) + counts)[query]
        out = rows.new_zeros(self.shape[0] * self.shape[1] * most, *rows.shape[1:])
        return out.index_copy(0, place, rows).view(*self.shape, most, *rows.shape[1:]).to(self.bank.device)

    def asked(self, axes: Sequence[str], rows: Sequence[Sequence[dict[int, float]]]) -> list[Asked]:
        """Numbers of each query's memory -> numbers of the bank; for each axis, a dictionary a query."""
        slots: list[int] = []
        numbers: list[int] = []
        weights: list[float] = []
        ends = [0]
        for axis, given in zip(axes, rows, strict=True):
            start = self.bank.axes[axis].ptr
            for slot, m, own in zip(self.slot, self.memory, given, strict=True):
                slots += [slot] * len(own)
                numbers += [start[m] + row for row in own]
                weights += own.values()
            ends.append(len(slots))
        slot_of, row_of = torch.tensor([slots, numbers], dtype=torch.long).to(self.bank.device)  # one copy for all
        weight = torch.tensor(weights, dtype=torch.float32).to(self.bank.device)
        return [Asked(slot_of[i:j], row_of[i:j], weight[i:j]) for i, j in pairwise(ends)]


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
    layout = _Layout(memory, len(memories), bank)
    speakers = {m: [speaker for speaker in memories[m].speakers if speaker not in ROLES] for m in layout.queries}
    asking = zip(texts, memory, references, strict=True)
    readings = [_read(text, memories[m], speakers[m], reference, analyse) for text, m, reference in asking]

    encoded = encode_states(encoder, [reading.spoken for reading in readings])
    vectors = encoded.vectors
    if turned := [i for i, text in enumerate(texts) if readings[i].spoken != text]:  # the others are as they were asked
        as_asked = encoder.encode([texts[i] for i in turned]).vectors
        vectors = vectors.index_copy(0, torch.tensor(turned), as_asked)
    states, counts = encoded.states.float(), encoded.counts
    query = torch.repeat_interleave(torch.arange(len(texts)), counts, output_size=len(states))

    words = _words_of_tokens(readings, encoded, analyse)
    unnamed = [_unnamed(reading, own) for reading, own in zip(readings, words, strict=True)]
    # states may be of another space than the vectors: then the whole query has to do
    rest = _mean_states(states, query, unnamed) if encoder.late_chunking else vectors
    weighed = _weighed(encoded) if any(memories[m].learned for m in layout.queries) else []
    looked_up: dict[int, _Numbers] = {}
    for m, own in layout.queries.items():
        found = _look_up([readings[i] for i in own], [words[i] for i in own], memories[m], name)
        if memories[m].learned:
            found = _learned(found, [weighed[i] for i in own], [unnamed[i] for i in own], memories[m])
        looked_up.update(zip(own, found, strict=True))
    numbers = [looked_up[i] for i in range(len(texts))]

    profiles = [reading.profile for reading in readings]
    first_speaker = bank.axes["speakers"].ptr
    subjects = [r.subject + first_speaker[m] if r.subject >= 0 else -1 for r, m in zip(readings, memory, strict=True)]
    dates = _dates(profiles)
    weights = torch.tensor([weight for own in numbers for weight in own.state_weights], dtype=torch.float32)
    terms, phrases, rest_terms, titles, entities = layout.asked(
        ("terms", "phrases", "terms", "units", "entities"),
        list(zip(*((n.terms, n.phrases, n.rest_terms, n.titles, n.entities) for n in numbers), strict=True))
        or [()] * 5,
    )
    batch = QueryBatch(
        query=layout.spread(torch.arange(len(texts)), -1),
        vectors=layout.spread(vectors),
        rest_vectors=layout.spread(rest),
        states=layout.padded(states, query, counts),
        state_weights=layout.padded(weights, query, counts),
        terms=terms,
        phrases=phrases,
        rest_terms=rest_terms,
        titles=titles,
        entities=entities,
        subject=layout.spread(torch.tensor(subjects, dtype=torch.long), -1),
        kinds=layout.spread(torch.tensor([int(own.answer_types) for own in profiles], dtype=torch.long)),
        date_first=layout.spread(dates[..., 0], 1),
        date_last=layout.spread(dates[..., 1]),
        relational=layout.spread(torch.tensor([own.relational for own in profiles], dtype=torch.float32)),
        local=layout.spread(torch.tensor([own.local for own in profiles], dtype=torch.float32)),
    )
    return batch, profiles


def _dates(profiles: Sequence[QueryProfile]) -> Int[Tensor, "queries dates 2"]:
    """First and last day of each date a query should be near to; last before first is padding."""
    days = [[(d.first_day, d.last_day) for d in matched_dates(profile)] for profile in profiles]
    most = max([1, *map(len, days)])
    rows = [own + [(1, 0)] * (most - len(own)) for own in days]
    return torch.tensor(rows, dtype=torch.long).reshape(len(days), most, 2)


_LIMITS = re.compile(r"\b(?:as of|by|since|before|until|till)\s+(?:the\s+)?(?:\w+\s+){0,2}$", re.IGNORECASE)


def matched_dates(profile: QueryProfile) -> list[DateMention]:
    """Dates that evidence should be near to: one behind "by", "since", "before" or "until" is a limit, not a match."""
    return [mention for mention in profile.dates if not _LIMITS.search(profile.text[: mention.start])]


class _Word(NamedTuple):
    """A word of a query as each of its tokens sees it."""

    terms: tuple[str, ...]
    parts: frozenset[str]  # tokenised
    silent: bool  # says nothing: a function word, or no word at all


@lru_cache(maxsize=1 << 16)
def _word(word: str, analyse: Analyzer) -> _Word:
    parts = tokenize(word)
    terms = tuple(analyse(word)) if parts else ()
    silent = not terms or parts[0] in STOP_WORDS or not any(c.isalnum() for c in word)
    return _Word(terms, frozenset(parts), silent)


_LETTERS = re.compile(r"[^\W_]+")


def _words_of_tokens(readings: Sequence[_Reading], encoded: Encoded, analyse: Analyzer) -> list[list[_Word]]:
    """Of each query, the word that each token is a piece of."""
    found, start, spans = [], 0, encoded.spans.tolist()
    for reading, count in zip(readings, encoded.counts.tolist(), strict=True):
        text = reading.spoken
        runs = [match.span() for match in _LETTERS.finditer(text)]
        firsts, lasts = [first for first, _ in runs], [last for _, last in runs]
        own = []
        for first, last in spans[start : start + count]:
            before, behind = bisect_left(firsts, first) - 1, bisect_right(firsts, last) - 1
            if before >= 0 and first <= lasts[before]:
                first = firsts[before]
            if behind >= 0 and last < lasts[behind]:
                last = lasts[behind]
            own.append(_word(text[first:last], analyse))
        found.append(own)
        start += count
    return found


def _named_words(profile: QueryProfile, titles: Sequence[TitleFound]) -> frozenset[str]:
    """Words of the names and titles in a query: what is left of it says what is asked *about* them."""
    names = (word for name in (*profile.names, *profile.quoted, *profile.subjects) for word in tokenize(name))
    return frozenset((*(word for _, _, words, _ in titles for word in words), *names)) - STOP_WORDS


def _unnamed(reading: _Reading, words: Sequence[_Word]) -> list[bool]:
    """Which tokens are of no name: what is asked *about* the names, in context (of a query of names: all of it)."""
    kept = [reading.named.isdisjoint(word.parts) for word in words]
    return kept if any(kept) else [True] * len(kept)


def _mean_states(
    states: Float[Tensor, "tokens dim"], query: Int[Tensor, " tokens"], kept: Sequence[Sequence[bool]]
) -> Float[Tensor, "queries dim"]:
    """Mean direction of the states kept of each query."""
    some = torch.tensor([one for own in kept for one in own], dtype=states.dtype)
    total = states.new_zeros(len(kept), states.shape[1]).index_add(0, query, states * some[:, None])
    return normalize(total, dim=-1)


def _look_up(
    readings: Sequence[_Reading], words: Sequence[Sequence[_Word]], memory: Memory, name: float
) -> list[_Numbers]:
    """The row numbers of what queries name, all of one memory: one search a table for all of them."""
    asked = {term for reading in readings for term in (*reading.terms, *reading.rest)}
    known = memory.words.among(asked.union(*(word.terms for own in words for word in own)))
    rarity = {term: memory.rarity[number] for term, number in known.items()}
    phrases = query_phrases([reading.terms for reading in readings], memory.phrases)
    keys = [query_keys(reading.profile.text) for reading in readings]
    titled = [[entity_key(" ".join(title)) for _, _, title, _ in reading.titles] for reading in readings]
    entities = memory.entities.among({key for own in (*keys, *titled) for key in own})
    found = []
    for i, reading in enumerate(readings):
        # Eq. 8 by exact match
        named = {entities[key]: name for key in keys[i] if key in entities}
        named |= {entities[key]: 1.0 for key in titled[i] if key in entities}
        found.append(
            _Numbers(
                terms=query_terms(reading.terms, known),
                phrases=phrases[i],
                rest_terms=query_terms(reading.rest, known),
                titles={unit: 1.0 for *_, owners in reading.titles for unit in owners},
                entities=named,
                state_weights=_token_weights(reading, words[i], rarity),
            )
        )
    return found


def _token_weights(reading: _Reading, words: Sequence[_Word], rarity: Mapping[str, float]) -> list[float]:
    """How rare the word of each token is in the memory; the subject's name, which half of all turns bear, weighs 0."""
    subject = {word for name in reading.profile.subjects for word in tokenize(name)}
    weights = [
        0.0
        if word.silent or not subject.isdisjoint(word.parts)
        else max([rarity.get(term, UNSEEN_RARITY) for term in word.terms])
        for word in words
    ]
    return weights if any(weights) else [1.0] * len(weights)


def _learned(
    numbers: Sequence[_Numbers],
    tokens: Sequence[tuple[Sequence[int], Sequence[float]]],
    kept: Sequence[Sequence[bool]],
    memory: Memory,
) -> list[_Numbers]:
    """The same with terms and weights of the encoder's sparse head in place of the analysed words."""
    known = memory.vocabulary.among({str(term) for terms, _ in tokens for term in terms})
    out = []
    for own, (terms, weights), some in zip(numbers, tokens, kept, strict=True):
        rest = list(compress(terms, some)), list(compress(weights, some))
        out.append(replace(own, terms=learned_query(terms, weights, known), rest_terms=learned_query(*rest, known)))
    return out


def _weighed(encoded: Encoded) -> list[tuple[list[int], list[float]]]:
    """Of each query the tokens, and what the sparse head gives each."""
    terms, weights = (torch.split(part, encoded.counts.tolist()) for part in (encoded.terms, encoded.weights))
    return [(own.tolist(), weight.tolist()) for own, weight in zip(terms, weights, strict=True)]
