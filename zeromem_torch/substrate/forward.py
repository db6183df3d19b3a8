"""The forward index: what each trace alone tells, whatever else the memory holds.

A row is a pure function of its trace, the encoder, the extractor and the reading options, so it is made once, kept on
disk, and never touched by what arrives later. All that depends on other traces (order, windows, document frequencies,
which entities join two turns) is derived from these rows when a memory is assembled.

Words and entities are known by 64 bits of a hash: rows made at different times agree on them without a shared table,
and nothing of a word remains when its row is dropped.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from zeromem_torch.bank import on
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.sparse import offsets
from zeromem_torch.substrate.dates import find_dates
from zeromem_torch.substrate.encoder import STATE_DTYPE, Encoded, Encoder, encode_states, pool_spans
from zeromem_torch.substrate.entities import EntityExtractor, Mention
from zeromem_torch.substrate.graph import word_cases
from zeromem_torch.substrate.kinds import LABEL_KINDS, needs_context, text_kinds
from zeromem_torch.substrate.lexicon import word_key
from zeromem_torch.substrate.tokenizer import Analyzer, sentence_spans
from zeromem_torch.substrate.traces import Trace, ZeroMemError
from zeromem_torch.substrate.units import chunk_spans, turn_prefix

READING = "1"
"""Bumped when a trace is read to other rows than before (tokeniser, dates, kinds): older index files are made anew."""
SPECIAL_TOKENS = 4  # room an encoder needs beside a chunk's own tokens


@dataclass(frozen=True)
class Forward:
    """Rows of traces. A field on a ragged axis holds their entries end to end; ``counts`` says how many each has."""

    counts: Int[Tensor, "units ragged"]  # a column for each of RAGGED
    tokens: Int[Tensor, " units"] = on("units")  # handed to a reader
    kinds: Int[Tensor, " units"] = on("units")  # answer types the text can hold, a bit each
    asks: Bool[Tensor, " units"] = on("units")  # ends with a question
    leans: Bool[Tensor, " units"] = on("units")  # depends on what stands near it
    chunk_span: Int[Tensor, "chunks 2"] = on("chunks")  # characters of the trace's text
    chunk_vector: Float[Tensor, "chunks dim"] = on("chunks")
    state: Float[Tensor, "states dim"] = on("states")  # of its tokens
    heavy_key: Int[Tensor, " heavy"] = on("heavy")  # tokens that a sparse head gives a weight
    heavy_weight: Float[Tensor, " heavy"] = on("heavy")
    sentence_end: Int[Tensor, " sentences"] = on("sentences")  # in characters
    sentence_vector: Float[Tensor, "sentences dim"] = on("sentences")
    mention_key: Int[Tensor, " mentions"] = on("mentions")  # of an entity
    mention_start: Int[Tensor, " mentions"] = on("mentions")
    date_first: Int[Tensor, " dates"] = on("dates")  # days, as proleptic ordinals
    date_last: Int[Tensor, " dates"] = on("dates")
    term_key: Int[Tensor, " terms"] = on("terms")  # the analysed text, in order
    word_key: Int[Tensor, " words"] = on("words")  # its different words, folded
    word_small: Int[Tensor, " words"] = on("words")  # times written small,
    word_capital: Int[Tensor, " words"] = on("words")  # and with a capital

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def per_row(self, axis: str) -> Int[Tensor, " units"]:
        return self.counts[:, RAGGED.index(axis)]

    def row_of(self, axis: str) -> Int[Tensor, " entries"]:
        """The row of each entry of a ragged axis."""
        return torch.repeat_interleave(torch.arange(self.rows), self.per_row(axis))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def take(self, rows: Int[Tensor, " rows"]) -> Self:
        """These rows, in this order."""
        places = {"units": rows} | {axis: entries(self.per_row(axis), rows) for axis in RAGGED}
        taken = {f.name: getattr(self, f.name)[places[f.metadata["axis"]]] for f in _on_axes(type(self))}
        return type(self)(self.counts[rows], **taken)

    def differences(self, other: Self, tolerance: float) -> list[str]:
        """Fields in which these rows are not those: in any whole number, or in another by more than ``tolerance``."""
        found = []
        for name, mine in self.tensors().items():
            theirs = getattr(other, name)
            alike = mine.shape == theirs.shape
            if alike and mine.is_floating_point():
                alike = bool(((mine.float() - theirs.float()).abs() <= tolerance).all())
            elif alike:
                alike = torch.equal(mine, theirs)
            if not alike:
                found.append(name)
        return found

    @classmethod
    def cat(cls, parts: Iterable[Self]) -> Self:
        given = list(parts)
        if len(given) == 1:
            return given[0]
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in given]) for f in dataclasses.fields(cls)})

    @classmethod
    def empty(cls, dim: int) -> Self:
        """No rows at all, of vectors of ``dim`` numbers."""
        shapes = {"counts": (0, len(RAGGED)), "chunk_span": (0, 2)}
        shapes |= dict.fromkeys(("chunk_vector", "state", "sentence_vector"), (0, dim))
        return cls(**{name: torch.empty(shapes.get(name, (0,)), dtype=kind) for name, kind in DTYPES.items()})

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Rows from elsewhere, such as a file; names, types and lengths are checked."""
        names = [f.name for f in dataclasses.fields(cls)]
        if set(tensors) != set(names):
            wrong = sorted(set(tensors) ^ set(names))
            raise ZeroMemError.of("index row", ", ".join(names), f"also or not {', '.join(wrong)}", "make it anew")
        for name, kind in DTYPES.items():
            if tensors[name].dtype != kind:
                raise ZeroMemError.of(f"index row, {name}", str(kind), str(tensors[name].dtype), "make it anew")
        counts = tensors["counts"]
        if counts.ndim != 2 or counts.shape[1] != len(RAGGED) or bool((counts < 0).any()):
            raise ZeroMemError.of("index row, counts", f"{len(RAGGED)} counts a row", counts.shape, "make it anew")
        lengths = {"units": len(counts)} | dict(zip(RAGGED, counts.sum(0).tolist(), strict=True))
        for f in _on_axes(cls):
            if len(tensors[f.name]) != lengths[f.metadata["axis"]]:
                expected = f"{lengths[f.metadata['axis']]} entries, as counted"
                raise ZeroMemError.of(f"index row, {f.name}", expected, len(tensors[f.name]), "make it anew")
        return cls(**tensors)


RAGGED = ("chunks", "states", "heavy", "sentences", "mentions", "dates", "terms", "words")
DTYPES: Mapping[str, torch.dtype] = {
    f.name: {
        "asks": torch.bool,
        "leans": torch.bool,
        "state": STATE_DTYPE,
        "chunk_vector": torch.float32,
        "sentence_vector": torch.float32,
        "heavy_weight": torch.float32,
        "word_small": torch.int32,
        "word_capital": torch.int32,
    }.get(f.name, torch.int64)
    for f in dataclasses.fields(Forward)
}


def _on_axes(kind: type[Forward]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(kind) if "axis" in f.metadata]


def entries(counts: Int[Tensor, " units"], rows: Int[Tensor, " rows"]) -> Int[Tensor, " entries"]:
    """Places of the entries of some rows, row by row, where row ``i`` has ``counts[i]`` of them."""
    start, held = offsets(counts)[rows], counts[rows]
    return torch.repeat_interleave(start - held.cumsum(0) + held, held) + torch.arange(int(held.sum()))


class Growing:
    """Rows that are appended to: room is doubled when it is full, so a row costs the same however many there are."""

    def __init__(self, rows: Forward) -> None:
        self._held = rows.tensors()
        self._length = {name: len(tensor) for name, tensor in self._held.items()}

    @property
    def rows(self) -> int:
        return self._length["counts"]

    def append(self, rows: Forward) -> None:
        for name, new in rows.tensors().items():
            held, length = self._held[name], self._length[name]
            needed = length + len(new)
            if needed > len(held):  # what was handed out as `forward` keeps the old buffer
                bigger = held.new_empty(max(needed, 2 * length), *held.shape[1:])
                bigger[:length] = held[:length]
                self._held[name] = bigger
            self._held[name][length:needed] = new
            self._length[name] = needed

    @property
    def forward(self) -> Forward:
        return Forward(**{name: tensor[: self._length[name]] for name, tensor in self._held.items()})


def read_traces(
    traces: Sequence[Trace],
    encoder: Encoder,
    extractor_of: Callable[[Trace], EntityExtractor],
    config: SubstrateConfig,
) -> Forward:
    """A row for each trace: all that has to be computed from text, and nothing that depends on another trace."""
    texts = [trace.text for trace in traces]
    prefixes = [turn_prefix(trace, dated=False) for trace in traces]
    chunks, tokens = _chunk(texts, prefixes, [turn_prefix(trace) for trace in traces], encoder)
    encoded = encode_states(encoder, chunks.text)
    heavy = encoded.weights > 0
    weighed = heavy if config.lexicon == "learned" else torch.zeros_like(heavy)
    numbers = encoded.terms[weighed]
    sentences = _sentences(texts, chunks, encoded, encoder.late_chunking)
    mentions = _mentions(traces, extractor_of)
    named = [sorted({(m.start, m.key) for m in own if m.key}) for own in mentions]
    dates = [find_dates(trace.text, trace.time) for trace in traces]
    analyse = Analyzer(stop_words=config.stop_words, stemmer=config.stemmer or None)
    terms = [analyse(f"{trace.title} {trace.text}") for trace in traces]
    words = [word_cases(text) for text in texts]

    chunk_unit = _long(chunks.unit)
    per_chunk = torch.zeros(len(chunks.unit), dtype=torch.long)
    if weighed.numel():
        per_chunk.index_add_(0, torch.repeat_interleave(torch.arange(len(per_chunk)), encoded.counts), weighed.long())
    held = {
        "chunks": torch.bincount(chunk_unit, minlength=len(traces)),
        "states": torch.zeros(len(traces), dtype=torch.long).index_add_(0, chunk_unit, encoded.counts),
        "heavy": torch.zeros(len(traces), dtype=torch.long).index_add_(0, chunk_unit, per_chunk),
        "sentences": _long(sentences.per_text),
        "mentions": _long([len(own) for own in named]),
        "dates": _long([len(own) for own in dates]),
        "terms": _long([len(own) for own in terms]),
        "words": _long([len(own) for own in words]),
    }
    return Forward(
        counts=torch.stack([held[axis] for axis in RAGGED], dim=1),
        tokens=_long(tokens),
        kinds=_long([_kinds(text, own) for text, own in zip(texts, mentions, strict=True)]),
        asks=torch.tensor([text.rstrip(" )\"'").endswith(("?", "？")) for text in texts], dtype=torch.bool),
        leans=torch.tensor([needs_context(text) for text in texts], dtype=torch.bool),
        chunk_span=_long(chunks.span).reshape(-1, 2),
        chunk_vector=encoded.vectors.float(),
        state=encoded.states.to(STATE_DTYPE),
        heavy_key=_long([word_key(str(number)) for number in numbers.tolist()]),
        heavy_weight=encoded.weights[weighed].float(),
        sentence_end=_long(sentences.end),
        sentence_vector=sentences.vectors.float(),
        mention_key=_long([word_key(key) for own in named for _, key in own]),
        mention_start=_long([start for own in named for start, _ in own]),
        date_first=_long([date.first_day for own in dates for date in own]),
        date_last=_long([date.last_day for own in dates for date in own]),
        term_key=_long([word_key(term) for own in terms for term in own]),
        word_key=_long([word_key(word) for own in words for word in own]),
        word_small=_long([small for own in words for small, _ in own.values()]).int(),
        word_capital=_long([capital for own in words for _, capital in own.values()]).int(),
    )


def encoded_texts(traces: Sequence[Trace], encoder: Encoder) -> list[str]:
    """The texts that an encoder was given for these traces: what a cache of it may still hold."""
    prefixes = [turn_prefix(trace, dated=False) for trace in traces]
    return _chunk([trace.text for trace in traces], prefixes, prefixes, encoder)[0].text


@dataclass(frozen=True)
class _Chunks:
    """Stretches of a trace's text that fit the encoder, and the text each is encoded as (with the turn's prefix)."""

    unit: list[int]
    span: list[tuple[int, int]]  # in the trace's text
    text: list[str]
    shift: list[int]  # character in the trace's text + shift = character in the encoded text


def _chunk(
    texts: Sequence[str], prefixes: Sequence[str], dated: Sequence[str], encoder: Encoder
) -> tuple[_Chunks, list[int]]:
    chunks = _Chunks([], [], [], [])
    tokens = []
    dated_tokens = [len(spans) for spans in encoder.token_spans(dated)]
    prefix_tokens = [len(spans) for spans in encoder.token_spans(prefixes)]
    for unit, (text, spans) in enumerate(zip(texts, encoder.token_spans(texts), strict=True)):
        prefix = prefixes[unit]
        room = max(encoder.max_tokens - SPECIAL_TOKENS - prefix_tokens[unit], encoder.max_tokens // 2)
        parts = chunk_spans(text, spans, room)
        tokens.append(dated_tokens[unit] + min(len(spans), room))  # a reader is handed the best chunk at most
        for start, end in parts:
            chunks.unit.append(unit)
            chunks.span.append((start, end))
            chunks.text.append(prefix + text[start:end])
            chunks.shift.append(len(prefix) - start)
    return chunks, tokens


@dataclass(frozen=True)
class _Sentences:
    per_text: list[int]
    end: list[int]
    vectors: Tensor


def _sentences(texts: Sequence[str], chunks: _Chunks, encoded: Encoded, late_chunking: bool) -> _Sentences:
    """Sentences of each text, each pooled inside the chunk in which it begins."""
    first_chunk = offsets(torch.bincount(_long(chunks.unit), minlength=len(texts))).tolist()
    per_text, end, in_chunk, span = [], [], [], []
    for unit, text in enumerate(texts):
        spans = sentence_spans(text) or [(0, len(text))]
        per_text.append(len(spans))
        chunk = first_chunk[unit]
        for start, stop in spans:
            while chunk + 1 < first_chunk[unit + 1] and start >= chunks.span[chunk][1]:
                chunk += 1
            end.append(stop)
            in_chunk.append(chunk)
            span.append((start + chunks.shift[chunk], stop + chunks.shift[chunk]))
    inside = _long(in_chunk)
    pooled = pool_spans(encoded, inside, _long(span).reshape(-1, 2)) if late_chunking else encoded.vectors[inside]
    return _Sentences(per_text, end, pooled)


def _mentions(traces: Sequence[Trace], extractor_of: Callable[[Trace], EntityExtractor]) -> list[Sequence[Mention]]:
    """What each trace's extractor finds in it; every extractor is asked once."""
    extractors = [extractor_of(trace) for trace in traces]
    found: list[Sequence[Mention]] = [()] * len(traces)
    for extractor in {id(extractor): extractor for extractor in extractors}.values():
        own = [unit for unit, other in enumerate(extractors) if other is extractor]
        for unit, mentions in zip(own, extractor.extract([traces[unit].text for unit in own]), strict=True):
            found[unit] = mentions
    return found


def _kinds(text: str, mentions: Sequence[Mention]) -> int:
    kinds = text_kinds(text)
    for mention in mentions:
        kinds |= LABEL_KINDS.get(mention.label, 0)
    return kinds


def _long(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
