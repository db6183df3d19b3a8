"""Graph retrieval after LinearRAG and HippoRAG, written from their papers' descriptions: "-style", for comparison.

Both search the same units with the same encoder and entities as the other baselines. Where no entity of a question is
known, both rank by the dense score, as their papers do.

LinearRAG: entities that the question names wake entities of sentences near the question, a few steps far; then a walk
over entities and units starts from those and from the units' own scores. No relations are extracted.

HippoRAG: a walk over entities that are related, or whose names are alike, starts from those that the question names,
rare ones first; a unit scores what its entities hold. The paper has an LLM extract the relations; here entities of one
sentence are related, so that no step uses an LLM.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from zeromem_torch.bank import axis_of, segment_minmax
from zeromem_torch.evaluation.baselines import PlainRetrieval, Scores
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.entities import EntityExtractor, Mention
from zeromem_torch.substrate.tokenizer import sentence_spans

DAMPING = 0.5  # both papers'
STEPS, LEAST = 3, 0.5  # LinearRAG: how far entities wake others, and how awake is asleep
PASSAGES = 0.05  # LinearRAG: what a unit's own score weighs beside entities
ALIKE = 0.8  # HippoRAG: cosine from which two names are of one thing
MOST = 8  # entities of a sentence that are related to each other: longer lists say little, and pairs grow fast


class EntityIndex:
    """Entities, sentences and units of one boundary, and the entities that each question names."""

    def __init__(self, plain: PlainRetrieval, extractor: EntityExtractor) -> None:
        self.plain, self.extractor = plain, extractor
        self.texts = [trace.text for trace in plain.turns.traces]
        self.keys: dict[str, int] = {}
        self.names: list[str] = []  # of each entity, as first written
        self.sentence_texts: list[str] = []
        in_sentence: list[tuple[int, int]] = []
        self.in_unit: Counter[tuple[int, int]] = Counter()
        for unit, (text, mentions) in enumerate(zip(self.texts, extractor.extract(self.texts), strict=True)):
            spans = sentence_spans(text)
            first = len(self.sentence_texts)
            self.sentence_texts += [text[start:end] for start, end in spans]
            starts = [start for start, _ in spans]
            for mention in filter(lambda mention: mention.key, mentions):
                entity = self._number(text, mention)
                self.in_unit[unit, entity] += 1
                in_sentence.append((first + max(0, bisect_right(starts, mention.start) - 1), entity))
        self.in_sentence = sorted(set(in_sentence))

    def _number(self, text: str, mention: Mention) -> int:
        if mention.key not in self.keys:
            self.keys[mention.key] = len(self.keys)
            self.names.append(text[mention.start : mention.end])
        return self.keys[mention.key]

    @cached_property
    def mentions(self) -> Csr:
        """Sentences x entities, 1 where one names the other."""
        row, col = _columns(self.in_sentence)
        return Csr.from_coo(row, col, torch.ones(len(row)), len(self.sentence_texts), len(self.names))

    @cached_property
    def vectors(self) -> Float[Tensor, "entities dim"]:
        return self.plain.encoder.encode(self.names).vectors.float()

    @cached_property
    def named(self) -> Float[Tensor, "queries entities"]:
        """Of each question's names the nearest entity, by its cosine."""
        seeds = torch.zeros(len(self.plain.questions), len(self.names))
        found = self.extractor.extract(self.plain.questions)
        said = [
            (row, question[mention.start : mention.end])
            for row, (question, mentions) in enumerate(zip(self.plain.questions, found, strict=True))
            for mention in mentions
            if mention.key
        ]
        if said and self.names:
            near = self.plain.encoder.encode([name for _, name in said]).vectors.float() @ self.vectors.T
            cosine, entity = near.max(dim=1)
            for (row, _), value, place in zip(said, cosine.tolist(), entity.tolist(), strict=True):
                seeds[row, place] = max(float(seeds[row, place]), value)
        return seeds.clamp(min=0)


def linear_rag(plain: PlainRetrieval, extractor: EntityExtractor) -> Scores:
    index = EntityIndex(plain, extractor)
    dense = _dense(plain)
    if not index.names:
        return dense
    near = (plain.queries.float() @ plain.encoder.encode(index.sentence_texts).vectors.float().T).clamp(min=0)
    awake, spread, back = index.named.T.contiguous(), index.mentions, index.mentions.transpose()
    for _ in range(STEPS):
        woken = back @ ((spread @ awake) * near.T)
        awake = torch.maximum(awake, torch.where(woken >= LEAST, woken, 0).clamp(max=1))
    unit, entity = _columns(list(index.in_unit))
    count = torch.tensor(list(index.in_unit.values()), dtype=torch.float32)
    units, entities = len(index.texts), len(index.names)
    holds = Csr.from_coo(unit, entity, torch.log1p(count), units, entities)
    own = segment_minmax(dense, plain.axis) + torch.log1p(holds @ awake).T
    graph = Csr.from_coo(
        torch.cat([unit, entity + units]), torch.cat([entity + units, unit]), torch.cat([count, count]),
        units + entities, units + entities,
    )  # fmt: skip
    mass = _walk(torch.cat([PASSAGES * own, awake.T], dim=1), graph)
    return _or_dense(mass[:, :units], dense, index)


def hippo_rag(plain: PlainRetrieval, extractor: EntityExtractor) -> Scores:
    index = EntityIndex(plain, extractor)
    dense = _dense(plain)
    if not index.names:
        return dense
    units, entities = len(index.texts), len(index.names)
    unit, entity = _columns(list(index.in_unit))
    holders = torch.bincount(entity, minlength=entities).clamp(min=1)
    row, col, weight = _related(index)
    graph = Csr.from_coo(torch.cat([row, col]), torch.cat([col, row]), torch.cat([weight, weight]), entities, entities)
    mass = _walk(index.named / holders, graph)
    holds = Csr.from_coo(unit, entity, torch.ones(len(unit)), units, entities)
    return _or_dense((holds @ mass.T.contiguous()).T, dense, index)


def _related(index: EntityIndex) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of entities, each once: those of one sentence by how often, those with like names by their cosine."""
    together: dict[int, list[int]] = {}
    for sentence, entity in index.in_sentence:
        together.setdefault(sentence, []).append(entity)
    pairs = Counter(pair for few in together.values() for pair in combinations(few[:MOST], 2))
    row, col = _columns(list(pairs))
    rows, cols, weights = [row], [col], [torch.tensor(list(pairs.values()), dtype=torch.float32)]
    for start in range(0, len(index.names), 1024):
        cosine = index.vectors[start : start + 1024] @ index.vectors.T
        near, other = (cosine >= ALIKE).nonzero().T
        later = near + start < other
        rows.append(near[later] + start)
        cols.append(other[later])
        weights.append(cosine[near[later], other[later]])
    return torch.cat(rows), torch.cat(cols), torch.cat(weights)


def _walk(reset: Float[Tensor, "queries nodes"], graph: Csr) -> Float[Tensor, "queries nodes"]:
    total = reset.sum(dim=1, keepdim=True)
    walk = PersonalizedPageRank(DAMPING)
    mass: Tensor = walk(reset / total.clamp(min=1e-30), graph, graph.transpose(), axis_of([graph.cols]))
    return mass


def _dense(plain: PlainRetrieval) -> Scores:
    return plain.queries.float() @ plain.encoder.encode(plain.undated).vectors.float().T


def _or_dense(scores: Scores, dense: Scores, index: EntityIndex) -> Scores:
    """Graph scores brought to [0, 1], for a walk over many nodes leaves little on each; dense ones without names."""
    known = (index.named > 0).any(dim=1, keepdim=True)
    return torch.where(known, segment_minmax(scores / scores.amax(1, True).clamp(min=1e-30), index.plain.axis), dense)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    return both[:, 0], both[:, 1]


GRAPH_BASELINES = {"linear_rag": linear_rag, "hippo_rag": hippo_rag}
