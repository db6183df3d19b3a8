"""What the memory has to beat, computed from the same texts with the same encoder: bm25, dense, rrf, hybrid, context.

Each is a plain ranking of the units of one boundary; none uses a graph, a route, closure or calibration.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from zeromem_torch.bank import axis_of, segment_max, segment_minmax
from zeromem_torch.retrieval.lexical import LexicalScores
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.lexicon import TermCounts, query_terms
from zeromem_torch.substrate.tokenizer import Analyzer
from zeromem_torch.substrate.traces import Trace
from zeromem_torch.substrate.units import order_turns, turn_prefix, windows

Scores = Float[Tensor, "queries units"]


class PlainRetrieval:
    """Scores of every baseline for the questions put to one boundary. Units are in the order of `units`."""

    def __init__(self, traces: Sequence[Trace], questions: Sequence[str], encoder: Encoder) -> None:
        self.turns = order_turns(traces)
        self.units = [trace.id for trace in self.turns.traces]
        self.questions = questions
        self.encoder = encoder
        self.axis = axis_of([len(self.units)])
        self.analyse = Analyzer(stop_words=True, stemmer="english")

    def scores(self, name: str) -> Scores:
        return BASELINES[name](self)

    @cached_property
    def undated(self) -> list[str]:
        return [turn_prefix(trace, dated=False) + trace.text for trace in self.turns.traces]

    @cached_property
    def dated(self) -> list[str]:
        return [turn_prefix(trace) + trace.text for trace in self.turns.traces]

    @cached_property
    def tokens(self) -> list[int]:
        """What each unit costs a reader: the encoder's tokens of its dated text."""
        return [len(spans) for spans in self.encoder.token_spans(self.dated)]

    @cached_property
    def queries(self) -> Float[Tensor, "queries dim"]:
        return self.encoder.encode(self.questions).vectors

    @cached_property
    def members(self) -> tuple[Tensor, Tensor, int]:
        return windows(self.turns.session, 3)

    def bm25(self, counts: TermCounts, vocabulary: Mapping[str, int], k1: float, b: float) -> Scores:
        asked = [
            (slot, term, weight)
            for slot, question in enumerate(self.questions)
            for term, weight in query_terms(self.analyse(question), vocabulary).items()
        ]
        slot, term, weight = (torch.tensor([row[i] for row in asked]) for i in range(3))
        scores: Scores = LexicalScores()(
            slot.long(), term.long(), weight, counts.postings(k1, b), len(self.questions), counts.rows
        )
        return scores

    def best_window(self, scores: Float[Tensor, "queries windows"]) -> Scores:
        window, unit, _ = self.members
        return segment_max(scores[:, window], unit, len(self.units))


def _bm25(plain: PlainRetrieval) -> Scores:
    vocabulary: dict[str, int] = {}
    counts = TermCounts.of([plain.analyse(text) for text in plain.undated], vocabulary)
    return plain.bm25(counts, vocabulary, 0.9, 0.4)


def _dense(plain: PlainRetrieval) -> Scores:
    return plain.queries @ plain.encoder.encode(plain.undated).vectors.T


def _rrf(plain: PlainRetrieval, k: int = 60) -> Scores:
    total = torch.zeros(len(plain.questions), len(plain.units))
    for scores in (_bm25(plain), _dense(plain)):
        rank = scores.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1) + 1
        total += 1 / (k + rank)
    return total


def _hybrid(plain: PlainRetrieval) -> Scores:
    return 0.5 * segment_minmax(_bm25(plain), plain.axis) + 0.5 * segment_minmax(_dense(plain), plain.axis)


def _context(plain: PlainRetrieval) -> Scores:
    """Turn and best 3-turn window half and half, dense and BM25 alike, plus .1 for the person the question names."""
    window, unit, count = plain.members
    vectors = plain.encoder.encode(plain.undated).vectors
    window_vectors = normalize(torch.zeros(count, vectors.shape[1]).index_add_(0, window, vectors[unit]), dim=-1)
    turn = plain.queries @ plain.encoder.encode(plain.dated).vectors.T
    dense = 0.5 * turn + 0.5 * plain.best_window(plain.queries @ window_vectors.T)
    vocabulary: dict[str, int] = {}
    dated = TermCounts.of([plain.analyse(text) for text in plain.dated], vocabulary)
    undated = TermCounts.of([plain.analyse(text) for text in plain.undated], vocabulary)
    of_window = plain.bm25(undated.merged(unit, window, count), vocabulary, 1.2, 0.75)
    dated.terms = len(vocabulary)
    lexical = 0.5 * plain.bm25(dated, vocabulary, 1.2, 0.75) + 0.5 * plain.best_window(of_window)
    speakers = [trace.speaker.casefold() for trace in plain.turns.traces]
    named = torch.zeros(len(plain.questions), len(speakers))
    for row, question in enumerate(plain.questions):
        words = Analyzer(stop_words=False, stemmer=None)(question)
        asked = {speaker for speaker in set(speakers) - {""} if speaker in words}
        if len(asked) == 1:
            named[row] = torch.tensor([float(speaker in asked) for speaker in speakers])
    return 0.5 * segment_minmax(dense, plain.axis) + 0.5 * segment_minmax(lexical, plain.axis) + 0.1 * named


BASELINES: Mapping[str, Callable[[PlainRetrieval], Scores]] = {
    "bm25": _bm25,
    "dense": _dense,
    "rrf": _rrf,
    "hybrid": _hybrid,
    "context": _context,
}
