"""Build a memory: traces of one boundary in, the tensors of both views out. No generation, no network."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from zeromem_torch.bank import Index
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.sparse import offsets
from zeromem_torch.substrate.dates import find_dates
from zeromem_torch.substrate.encoder import STATE_DTYPE, Encoded, Encoder, encode_states, pool_spans
from zeromem_torch.substrate.entities import EntityExtractor, Mention, entity_key
from zeromem_torch.substrate.graph import Gazetteer, GraphWeights, entity_context_graph, title_words
from zeromem_torch.substrate.kinds import LABEL_KINDS, needs_context, text_kinds
from zeromem_torch.substrate.lexicon import LearnedTerms, TermCounts, bigrams, inverse_frequency
from zeromem_torch.substrate.tokenizer import Analyzer, sentence_spans
from zeromem_torch.substrate.traces import Trace
from zeromem_torch.substrate.units import Turns, chunk_spans, day_of, episodes, order_turns, turn_prefix, voice, windows

SPECIAL_TOKENS = 4  # room an encoder needs beside a chunk's own tokens


@dataclass(frozen=True)
class Memory:
    """One boundary: its traces in order, its tensors, and the tables that turn words of a query into row numbers."""

    boundary: str
    turns: Turns
    index: Index
    sizes: Mapping[str, int]  # axes that no tensor spans
    vocabulary: Mapping[str, int]
    learned: bool  # the vocabulary is of the encoder's tokens
    phrases: Mapping[str, int]  # pairs of neighbouring terms
    rarity: Mapping[str, float]  # idf of a term over the turns
    entities: Mapping[str, int]
    speakers: Mapping[str, int]
    titles: Gazetteer
    chunk_spans: Sequence[tuple[int, int]]  # in the trace's text

    def best_span(self, unit: int, query: Float[Tensor, " dim"]) -> tuple[int, int]:
        """The stretch of a trace to hand over: all of it or, of a long one, the chunk nearest to the query."""
        bounds: list[int] = torch.searchsorted(self.index.chunk_unit, torch.tensor([unit, unit + 1])).tolist()
        first, last = bounds
        if last - first == 1:
            return self.chunk_spans[first]
        nearness = self.index.chunk_vectors[first:last] @ query.to(self.index.chunk_vectors)
        return self.chunk_spans[first + int(nearness.argmax())]

    @property
    def latest(self) -> datetime | None:
        """The last event time: "now" for a query that brings no time of its own."""
        return max((trace.time for trace in self.turns.traces if trace.time), default=None)


@dataclass(frozen=True)
class _Chunks:
    """Stretches of a trace's text that fit the encoder, and the text each is encoded as (with the turn's prefix)."""

    unit: list[int]
    span: list[tuple[int, int]]  # in the trace's text
    text: list[str]
    shift: list[int]  # character in the trace's text + shift = character in the encoded text


def build_memory(
    boundary: str, traces: Sequence[Trace], encoder: Encoder, extractor: EntityExtractor, config: SubstrateConfig
) -> Memory:
    """Build the index of one boundary from all of its traces."""
    turns = order_turns(traces)
    prefixes = [turn_prefix(trace, dated=False) for trace in turns.traces]
    texts = [trace.text for trace in turns.traces]
    units = len(texts)

    chunks, unit_tokens = _chunk(texts, prefixes, [turn_prefix(trace) for trace in turns.traces], encoder)
    encoded = encode_states(encoder, chunks.text)
    chunk_unit = torch.tensor(chunks.unit, dtype=torch.long)
    unit_vectors = _mean_vectors(encoded.vectors, chunk_unit, units)
    member_window, member_unit, window_count = windows(turns.session, config.window)
    unit_episode = episodes(turns.session, config.episode)
    episode_count = int(unit_episode.max()) + 1 if units else 0

    mentions = extractor.extract(texts)
    titles = Gazetteer(turns.traces)
    named = _entities(turns.traces, mentions, titles, encoded, chunks, encoder.late_chunking)
    graph = entity_context_graph(
        torch.stack([named.mention_unit, named.mention_entity], dim=1),
        named.titles,
        named.links,
        _neighbours(turns),
        units,
        len(named.entities),
        GraphWeights(config.rarity, config.title_edge, config.link, config.adjacency),
    )
    dates = [(u, d) for u, trace in enumerate(turns.traces) for d in find_dates(trace.text, trace.time)]
    speakers: dict[str, int] = {}
    unit_speaker = [speakers.setdefault(voice(t), len(speakers)) if voice(t) else -1 for t in turns.traces]

    analyse = Analyzer(stop_words=config.stop_words, stemmer=config.stemmer or None)
    words: dict[str, int] = {}
    terms = [analyse(f"{trace.title} {trace.text}") for trace in turns.traces]
    counts = TermCounts.of(terms, words)
    lexical, vocabulary = counts, words
    if config.lexicon == "learned":
        lexical, vocabulary = LearnedTerms.of_tokens(encoded, chunk_unit, units)
    phrases: dict[str, int] = {}
    pairs = TermCounts.of([bigrams(own) for own in terms], phrases)
    rarity = inverse_frequency(torch.bincount(counts.term, minlength=counts.terms), units).tolist()

    held = torch.bincount(chunk_unit, minlength=units)
    index = Index(
        unit_session=turns.session,
        unit_position=turns.position,
        unit_speaker=_long(unit_speaker),
        unit_day=_long([day_of(trace.time) for trace in turns.traces]),
        unit_kinds=_long([_kinds(text, found) for text, found in zip(texts, mentions, strict=True)]),
        unit_tokens=_long(unit_tokens),
        unit_asks=torch.tensor([text.rstrip(" )\"'").endswith(("?", "？")) for text in texts], dtype=torch.bool),
        unit_leans=torch.tensor([needs_context(text) for text in texts], dtype=torch.bool),
        unit_node=torch.arange(units),
        unit_states=torch.zeros(units, dtype=torch.long).index_add_(0, chunk_unit, encoded.counts),
        unit_episode=unit_episode,
        chunk_unit=chunk_unit,
        chunk_vectors=encoded.vectors,
        token_states=encoded.states.to(STATE_DTYPE),
        date_unit=_long([u for u, _ in dates]),
        date_first=_long([d.first_day for _, d in dates]),
        date_last=_long([d.last_day for _, d in dates]),
        window_vectors=_mean_vectors(unit_vectors[member_unit], member_window, window_count),
        member_window=member_window,
        member_unit=member_unit,
        episode_vectors=_mean_vectors(unit_vectors, unit_episode, episode_count),
        sentence_unit=named.sentence_unit,
        sentence_vectors=named.sentence_vectors,
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
    assert int(held.min() if units else 1) >= 1, "every unit has a chunk"
    sizes = {"sessions": turns.sessions, "speakers": len(speakers)}
    return Memory(
        boundary,
        turns,
        index,
        sizes,
        vocabulary,
        lexical is not counts,
        phrases,
        dict(zip(words, rarity, strict=True)),
        named.entities,
        speakers,
        titles,
        chunks.span,
    )


def _chunk(
    texts: Sequence[str], prefixes: Sequence[str], dated: Sequence[str], encoder: Encoder
) -> tuple[_Chunks, list[int]]:
    chunks = _Chunks([], [], [], [])
    unit_tokens = []
    dated_tokens = [len(spans) for spans in encoder.token_spans(dated)]
    prefix_tokens = [len(spans) for spans in encoder.token_spans(prefixes)]
    for unit, (text, spans) in enumerate(zip(texts, encoder.token_spans(texts), strict=True)):
        prefix = prefixes[unit]
        room = max(encoder.max_tokens - SPECIAL_TOKENS - prefix_tokens[unit], encoder.max_tokens // 2)
        parts = chunk_spans(text, spans, room)
        unit_tokens.append(dated_tokens[unit] + min(len(spans), room))  # a reader is handed the best chunk at most
        for start, end in parts:
            chunks.unit.append(unit)
            chunks.span.append((start, end))
            chunks.text.append(prefix + text[start:end])
            chunks.shift.append(len(prefix) - start)
    return chunks, unit_tokens


@dataclass(frozen=True)
class _Named:
    """Sentences with their vectors, and who is named where."""

    entities: dict[str, int]
    sentence_unit: Tensor
    sentence_vectors: Tensor
    mention_sentence: Tensor
    mention_unit: Tensor
    mention_entity: Tensor
    titles: Tensor  # unit, entity
    links: Tensor  # unit, unit whose title it names


def _entities(
    traces: Sequence[Trace],
    mentions: Sequence[Sequence[Mention]],
    titles: Gazetteer,
    encoded: Encoded,
    chunks: _Chunks,
    late_chunking: bool,
) -> _Named:
    """Join what the extractor found, the titles that a text names, and a document's own title (in sentence one)."""
    speakers = {entity_key(word) for trace in traces for word in (voice(trace), *voice(trace).split()[:1])}
    first_chunk = offsets(torch.bincount(_long(chunks.unit), minlength=len(traces))).tolist()
    own_title = [entity_key(" ".join(title_words(trace.title))) for trace in traces]
    sentence_unit: list[int] = []
    sentence_chunk: list[int] = []
    sentence_span: list[tuple[int, int]] = []
    found_at: list[tuple[int, int, str]] = []  # sentence, unit, entity
    links: set[tuple[int, int]] = set()
    for unit, (trace, found) in enumerate(zip(traces, mentions, strict=True)):
        spans = sentence_spans(trace.text) or [(0, len(trace.text))]
        base, chunk = len(sentence_unit), first_chunk[unit]
        for start, end in spans:
            while chunk + 1 < first_chunk[unit + 1] and start >= chunks.span[chunk][1]:
                chunk += 1
            sentence_unit.append(unit)
            sentence_chunk.append(chunk)
            sentence_span.append((start + chunks.shift[chunk], end + chunks.shift[chunk]))
        named = {(mention.start, mention.key) for mention in found}
        for start, _, words, owners in titles.find(trace.text):
            named.add((start, entity_key(" ".join(words))))
            links.update((unit, owner) for owner in owners if own_title[owner] != own_title[unit])
        if own_title[unit]:
            named.add((0, own_title[unit]))
        place = base
        for start, key in sorted(named):
            if not key or key in speakers:  # a speaker is a subject, not a node
                continue
            while place + 1 < len(sentence_unit) and start >= spans[place - base][1]:
                place += 1
            found_at.append((place, unit, key))
    # An entity of a single unit leads nowhere, unless it is that unit's title.
    holders = Counter(key for _, key in {(unit, key) for _, unit, key in found_at})
    kept = {key for key, count in holders.items() if count > 1} | set(own_title) - {""}
    entities = {key: number for number, key in enumerate(dict.fromkeys(k for *_, k in found_at if k in kept))}
    found_at = [(place, unit, key) for place, unit, key in found_at if key in kept]
    in_chunk = _long(sentence_chunk)
    pooled = pool_spans(encoded, in_chunk, _pairs(sentence_span)) if late_chunking else encoded.vectors[in_chunk]
    return _Named(
        entities,
        _long(sentence_unit),
        pooled,
        _long([place for place, _, _ in found_at]),
        _long([unit for _, unit, _ in found_at]),
        _long([entities[key] for *_, key in found_at]),
        _pairs([(unit, entities[key]) for unit, key in enumerate(own_title) if key]),
        _pairs(sorted(links)),
    )


def _neighbours(turns: Turns) -> Int[Tensor, "pairs 2"]:
    here = torch.arange(len(turns.traces) - 1) if turns.traces else torch.empty(0, dtype=torch.long)
    together = turns.session[here] == turns.session[here + 1] if here.numel() else torch.empty(0, dtype=torch.bool)
    return torch.stack([here, here + 1], dim=1)[together]


def _kinds(text: str, mentions: Sequence[Mention]) -> int:
    kinds = text_kinds(text)
    for mention in mentions:
        kinds |= LABEL_KINDS.get(mention.label, 0)
    return kinds


def _mean_vectors(vectors: Tensor, group: Tensor, groups: int) -> Tensor:
    return normalize(torch.zeros(groups, vectors.shape[1]).index_add_(0, group, vectors), dim=-1)


def _long(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _pairs(values: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.long).reshape(-1, 2)
