"""What ours is measured against, on the same data, vectors and threads: each behind a function that a bench times.

LinearRAG's search is our re-statement of its algorithm, from its paper's description; the others are the packages
themselves. A package that is not installed is said to be missing, and its figure left out.
"""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import package
from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.entities import EntityExtractor, Mention, RuleExtractor
from zeromem_torch.substrate.memory import Memory
from zeromem_torch.substrate.tokenizer import sentence_spans
from zeromem_torch.substrate.units import turn_prefix

Names = Callable[[Sequence[str]], list[list[tuple[int, int]]]]
"""Where the names in each text stand."""


def names_by_rule(texts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Names by capitals, none inside another: a paragraph of HotpotQA then has about as many as a tagger finds."""
    found = zip(texts, RuleExtractor().extract(texts), strict=True)
    return [_outermost([m for m in own if not _JOINED.search(text, m.start, m.end)]) for text, own in found]


_JOINED = re.compile(r"\b(?:and|at|in|on|to)\b")  # "Ann Lee in Oslo" is two names


def names_by_tagger(extractor: EntityExtractor) -> Names:
    """Named entities as LinearRAG takes them: all that the tagger labels, apart from bare numbers."""
    own = ("NAME", "NOUN", "ORDINAL", "CARDINAL")  # what our extractor adds, and what theirs leaves out

    def names(texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [_outermost([m for m in mentions if m.label not in own]) for mentions in extractor.extract(texts)]

    return names


def _outermost(mentions: Sequence[Mention]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for start, end in sorted({(m.start, m.end) for m in mentions}, key=lambda span: (span[0], -span[1])):
        if not kept or end > kept[-1][1]:
            kept.append((start, end))
    return kept


@dataclass(frozen=True)
class LinearRag:
    """LinearRAG's search, one question at a time in Python and igraph, as the original runs it: our re-statement.

    Passages, sentences and their vectors are those of one of our memories. Entities wake others through the sentence
    nearest to the question; passages weigh by nearness and by how often they spell what is awake; a walk over passages
    and entities starts from both, and passages are ranked by the mass they get.
    """

    passages: Sequence[str]
    names: Sequence[str]  # of entities, as first written
    numbers: Mapping[str, int]  # of entities, by name in small letters
    names_in: Names
    entities_of: Sequence[Sequence[int]]  # of each sentence
    sentences_of: Sequence[Sequence[int]]  # of each entity
    passage_vectors: np.ndarray
    sentence_vectors: np.ndarray
    edges: Sequence[tuple[int, int]]  # passages are numbered first, entities behind them
    weights: Sequence[float]

    # The original's own settings.
    DAMPING = 0.5
    STEPS = 3  # what the question names counts as the first
    LEAST = 0.5  # an entity that is less awake wakes none
    NEAREST = 1  # sentences that an entity wakes others through
    RATIO = 1.5  # of a passage's nearness to what it spells
    SHARE = 0.05  # of passages beside entities

    @classmethod
    def of(cls, memory: Memory, names_in: Names) -> "LinearRag":
        traces, index = memory.turns.traces, memory.index
        prefixes = [turn_prefix(trace, dated=False) for trace in traces]  # who speaks, or the title: names too
        texts = [prefix + trace.text for prefix, trace in zip(prefixes, traces, strict=True)]
        numbers: dict[str, int] = {}
        names: list[str] = []
        entities_of: list[list[int]] = []
        counts: list[Counter[int]] = []
        for trace, prefix, text, spans in zip(traces, prefixes, texts, names_in(texts), strict=True):
            starts = [len(prefix) + start for start, _ in sentence_spans(trace.text) or [(0, 0)]]
            own: list[list[int]] = [[] for _ in starts]
            for start, end in spans:
                number = numbers.setdefault(text[start:end].lower(), len(numbers))
                names += [text[start:end]] if number == len(names) else []
                own[max(0, bisect_right(starts, start) - 1)].append(number)
            entities_of += [sorted(set(held)) for held in own]
            counts.append(Counter(number for held in own for number in held))
        sentences_of: list[list[int]] = [[] for _ in names]
        for sentence, numbered in enumerate(entities_of):
            for number in numbered:
                sentences_of[number].append(sentence)
        edges = [(unit, len(texts) + number) for unit, held in enumerate(counts) for number in held]
        weights = [count / held.total() for held in counts for count in held.values()]
        session = memory.turns.session.tolist()
        beside = [(unit, unit + 1) for unit in range(len(session) - 1) if session[unit] == session[unit + 1]]
        first = torch.searchsorted(index.chunk_unit, torch.arange(len(texts)))  # a passage is mostly one chunk
        return cls(
            texts,
            names,
            numbers,
            names_in,
            entities_of,
            sentences_of,
            index.chunk_vectors[first].numpy(),
            index.sentence_vectors.numpy(),
            edges + beside,
            weights + [1.0] * len(beside),
        )

    @property
    def nodes(self) -> int:
        return len(self.passages) + len(self.names)

    @cached_property
    def graph(self) -> Any:
        make = package("igraph").Graph
        return make(n=self.nodes, edges=self.edges, edge_attrs={"weight": self.weights}, directed=False)

    @cached_property
    def adjacency(self) -> Csr:
        """The same graph as a matrix: symmetric."""
        ends = torch.tensor(self.edges, dtype=torch.long).reshape(-1, 2)
        weight = torch.tensor(self.weights, dtype=torch.float64).repeat(2)
        row, col = torch.cat([ends, ends.flip(1)]).T
        made = Csr.from_coo(row, col, weight, self.nodes, self.nodes)
        return Csr(made.crow, made.col, made.val.float(), made.cols)

    def seeds(self, question: str) -> dict[int, float]:
        """Entities that the question names; finding them is no part of the search."""
        (spans,) = self.names_in([question])
        said = (question[start:end].lower() for start, end in spans)
        return {self.numbers[name]: 1.0 for name in said if name in self.numbers}

    def search(self, vector: np.ndarray, seeds: Mapping[int, float], k: int) -> list[int]:
        """The ``k`` best passages."""
        nearness = self.passage_vectors @ vector
        if not seeds:
            return [int(unit) for unit in np.argsort(-nearness)[:k]]
        return self.rank(self.walk(self.reset(vector, seeds, nearness)), k)

    def reset(self, vector: np.ndarray, seeds: Mapping[int, float], nearness: np.ndarray) -> np.ndarray:
        awake, weight = self._wake(vector, seeds)
        reset = np.zeros(self.nodes)
        reset[len(self.passages) :] = weight
        low, high = nearness.min(), nearness.max()
        scaled = (nearness - low) / (high - low) if high > low else np.ones_like(nearness)
        for unit, text in enumerate(self.passages):
            spelt, lower = 0.0, text.lower()
            for entity, (strength, step) in awake.items():
                if times := lower.count(self.names[entity].lower()):
                    spelt += strength * math.log(1 + times) / step
            reset[unit] = self.SHARE * (self.RATIO * scaled[unit] + math.log(1 + spelt))
        return np.maximum(reset, 0)

    def _wake(self, vector: np.ndarray, seeds: Mapping[int, float]) -> tuple[dict[int, tuple[float, int]], np.ndarray]:
        """Strength and step of every entity that is awake, and what each adds to the reset."""
        weight = np.zeros(len(self.names))
        awake = {entity: (strength, 1) for entity, strength in seeds.items()}
        for entity, strength in seeds.items():
            weight[entity] = strength
        read: set[int] = set()
        last = dict(awake)
        for step in range(2, self.STEPS + 1):
            woken: dict[int, tuple[float, int]] = {}
            for entity, (strength, _) in last.items():
                unread = [sentence for sentence in self.sentences_of[entity] if sentence not in read]
                if strength < self.LEAST or not unread:
                    continue
                near = self.sentence_vectors[unread] @ vector
                for place in np.argsort(-near)[: self.NEAREST]:
                    read.add(unread[place])
                    reached = strength * float(near[place])
                    if reached >= self.LEAST:
                        for other in self.entities_of[unread[place]]:
                            weight[other] += reached
                            woken[other] = (reached, step)
            awake.update(woken)
            last = woken
        return awake, weight

    def walk(self, reset: np.ndarray | Sequence[float], damping: float = DAMPING) -> list[float]:
        mass: list[float] = self.graph.personalized_pagerank(
            directed=False, damping=damping, reset=reset, weights="weight", implementation="prpack"
        )
        return mass

    def rank(self, mass: Sequence[float], k: int) -> list[int]:
        scores = np.array([mass[unit] for unit in range(len(self.passages))])
        return [int(unit) for unit in np.argsort(-scores)[:k]]


# Personalized PageRank


def scipy_pagerank(matrix: Csr, damping: float, steps: int) -> Callable[[np.ndarray], np.ndarray]:
    """Power iteration of all queries at once, ``[nodes, queries]``; as many steps as ours takes at most."""
    csr_array = package("scipy.sparse").csr_array
    leaving = np.asarray(matrix.val.new_zeros(matrix.rows).index_add(0, matrix.row_of_entry(), matrix.val))
    share = np.where(leaving > 0, 1 / np.where(leaving > 0, leaving, 1), 0)[matrix.row_of_entry().numpy()]
    step = csr_array((matrix.val.numpy() * share, matrix.col.numpy(), matrix.crow.numpy()), (matrix.rows, matrix.cols))
    back = step.T.tocsr().astype(np.float32)

    def walk(reset: np.ndarray) -> np.ndarray:
        mass = reset
        for _ in range(steps):
            mass = (1 - damping) * reset + damping * (back @ mass)
        return np.asarray(mass / mass.sum(0))  # what dangling nodes lost returns to the reset

    return walk


# BM25


def bm25s_index(documents: Sequence[Sequence[str]], k1: float, b: float, backend: str) -> Any:
    """An index of bm25s in Lucene's variant, which is ours too."""
    index = package("bm25s").BM25(method="lucene", k1=k1, b=b, backend=backend)
    index.index([list(words) for words in documents], show_progress=False)
    return index


def bm25s_search(index: Any, queries: Sequence[Sequence[str]], k: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents and scores of the ``k`` best, with ``count`` threads."""
    found = index.retrieve([list(words) for words in queries], k=k, show_progress=False, n_threads=count)
    return found[0], found[1]


# Vectors


def faiss_flat(vectors: Tensor) -> Any:
    """Exhaustive inner products."""
    index = package("faiss").IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors.float().numpy()))
    return index
