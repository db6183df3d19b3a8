"""Single stages beside the packages that do the same, on the graphs, words and vectors of real memories.

Each is checked against its peer first, and then both are timed on equal cores: one thread each. `bench/pipeline.py`
runs them, on the memories that it makes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

if __name__ == "__main__":
    sys.exit("bench/pipeline.py runs these, on the memories that it makes: see python bench/pipeline.py --help")

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from bench import peers
from bench.measure import Timing, backends_of, each, floor_of, has, moved, package, threads, timed
from bench.peers import LinearRag
from zeromem_torch.bank import Axis, Postings, axis_of
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.retrieval.dense import DenseScores
from zeromem_torch.retrieval.lexical import LexicalScores
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.lexicon import query_terms
from zeromem_torch.substrate.memory import Memory
from zeromem_torch.substrate.tokenizer import Analyzer

Figures = list[dict[str, Any]]
DAMPING = 0.6  # the paper's
WITHIN = 1e-6  # of igraph's result, in L1
DEPTH = 50  # units that a lexical search returns


@dataclass(frozen=True)
class Walks:
    """The walks that some questions start over one graph."""

    rag: LinearRag
    resets: np.ndarray  # [queries, nodes], each sums to 1

    @classmethod
    def of(cls, rag: LinearRag, vectors: Sequence[np.ndarray], questions: Sequence[str]) -> "Walks":
        """The resets that LinearRAG's search makes of real questions: all passages a little, entities more."""
        asked = zip(vectors, questions, strict=True)
        resets = np.stack([rag.reset(vector, rag.seeds(text), rag.passage_vectors @ vector) for vector, text in asked])
        return cls(rag, resets / resets.sum(1, keepdims=True))


def pagerank(data: str, walks: Sequence[Walks], device: str, calls: int) -> tuple[Figures, float | None]:
    """Ours, igraph's prpack and SciPy's power iteration over the same graphs from the same resets.

    The floor is that of all steps of power iteration; a solver that needs fewer gets past it.
    """
    queries, nodes = sum(len(own.resets) for own in walks), max(own.rag.nodes for own in walks)
    base = {"figure": "pagerank", "data": data, "queries": queries, "nodes": nodes, "threads": 1}
    graphs = [moved(own.rag.adjacency, device) for own in walks]
    resets = [torch.from_numpy(own.resets).float().to(device) for own in walks]
    axes = [axis_of([graph.rows], device) for graph in graphs]
    figures: Figures = []
    means: dict[str, float] = {}
    expected: list[np.ndarray] = []
    if has("igraph"):
        package("igraph")  # loaded before its threads are limited
    with threads(1):
        if has("igraph"):
            timing, expected = _igraph(
                walks, tqdm(total=2 * queries, desc=f"igraph, {data}", disable=None, leave=False)
            )
            means["igraph"] = timing.mean
            figures.append({**base, "what": "igraph", **timing.to_dict(), "mean_us": round(timing.mean * 1e6, 1)})
        for name in ("auto", *backends_of("pagerank", device, {})):
            walk = PersonalizedPageRank(DAMPING, WITHIN, backend=name)
            timing, found = timed(
                partial(_walk_all, walk, resets, graphs, axes), items=queries, calls=calls, seconds=10, device=device
            )
            apart = _apart(found, expected)
            if not apart <= WITHIN:
                raise SystemExit(f"pagerank, {data}, {name}: expected within {WITHIN} of igraph in L1, got {apart}")
            floor = floor_of(timing, device, size=walk.steps * _step_bytes(graphs, resets))
            means[name] = timing.median
            row = {**base, "what": _ours(name), **timing.to_dict(), "l1": apart, "steps": walk.steps}
            figures.append(row | floor)
        if has("scipy"):
            steps = PersonalizedPageRank(DAMPING, WITHIN).steps
            walking = [peers.scipy_pagerank(own.rag.adjacency, DAMPING, steps) for own in walks]
            columns = [np.ascontiguousarray(own.resets.T.astype(np.float32)) for own in walks]
            timing, masses = timed(
                lambda: [walk(own) for walk, own in zip(walking, columns, strict=True)],
                items=queries, calls=min(calls, 3), seconds=10,
            )  # fmt: skip
            apart = _apart([torch.from_numpy(mass).T for mass in masses], expected)
            figures.append({**base, "what": "scipy", **timing.to_dict(), "l1": apart, "steps": steps})
    return figures, means["igraph"] / means["auto"] if "igraph" in means else None


def _igraph(walks: Sequence[Walks], bar: Any) -> tuple[Timing, list[np.ndarray]]:
    """A query at a time; the graph is built before."""
    spent: list[float] = []
    expected = []
    for own in walks:
        own.rag.walk([1.0] * own.rag.nodes)
        timing, masses = each(partial(own.rag.walk, damping=DAMPING), own.resets.tolist(), bar)
        spent += timing.warm
        expected.append(np.array(masses))
    return Timing(spent[0], spent), expected


def _walk_all(
    walk: PersonalizedPageRank, resets: Sequence[Tensor], graphs: Sequence[Csr], axes: Sequence[Axis]
) -> list[Tensor]:
    return [walk(reset, graph, graph, axis) for reset, graph, axis in zip(resets, graphs, axes, strict=True)]


def _ours(backend: str) -> str:
    return "ours" if backend == "auto" else f"ours, {backend}"


def _step_bytes(graphs: Sequence[Csr], resets: Sequence[Tensor]) -> float:
    """Bytes of one step at least: entries and bounds, and three passes over the vectors (KERNELS 1.6)."""
    pairs = zip(graphs, resets, strict=True)
    return float(sum(8 * graph.col.numel() + 4 * (graph.rows + 1) + 12 * reset.numel() for graph, reset in pairs))


def _apart(found: Sequence[Tensor], expected: Sequence[np.ndarray]) -> float:
    """The largest L1 distance of a query's masses; 0 where there is nothing to compare with."""
    pairs = zip(found, expected, strict=False)
    return max((float(np.abs(mine.double().cpu().numpy() - theirs).sum(1).max()) for mine, theirs in pairs), default=0)


@dataclass(frozen=True)
class Words:
    """Documents and questions as the lexical index sees them, and its parameters."""

    memory: Memory
    documents: Sequence[Sequence[str]]
    asked: Sequence[Sequence[str]]
    k1: float
    b: float

    @classmethod
    def of(cls, memory: Memory, questions: Sequence[str], config: SubstrateConfig) -> "Words":
        analyse = Analyzer(config.stop_words, config.stemmer or None)
        documents = [analyse(f"{trace.title} {trace.text}") for trace in memory.turns.traces]
        return cls(memory, documents, [analyse(text) for text in questions], config.k1, config.b)

    def entries(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Slot, term and count of every term asked for."""
        rows = [query_terms(words, self.memory.vocabulary) for words in self.asked]
        found = [(slot, term, count) for slot, own in enumerate(rows) for term, count in own.items()]
        numbers = torch.tensor(found, dtype=torch.float64, device=device).reshape(-1, 3)
        return numbers[:, 0].long(), numbers[:, 1].long(), numbers[:, 2].float()


def bm25(
    data: str, words: Words, device: str, calls: int, kinds: Sequence[str] = ("numba", "numpy")
) -> tuple[Figures, float | None]:
    """The best units of each question by BM25: ours and bm25s, from term numbers to ranked units with scores.

    ``kinds`` of bm25s are measured; with numba it has to be compiled first, in every process.
    """
    units, queries = len(words.documents), len(words.asked)
    k = min(DEPTH, units)
    base = {"figure": "bm25", "data": data, "queries": queries, "units": units, "k": k, "threads": 1}
    figures: Figures = []
    theirs: dict[str, float] = {}
    ours: dict[str, float] = {}
    expected: np.ndarray | None = None
    kinds = [kind for kind in kinds if kind == "numpy" or has(kind)]
    with threads(1):
        for kind in kinds if has("bm25s") else ():
            index = peers.bm25s_index(words.documents, words.k1, words.b, kind)
            numbers = [index.get_tokens_ids(list(own)) for own in words.asked]
            timing, found = timed(partial(peers.bm25s_search, index, numbers, k, 1), items=queries, calls=calls)
            expected = found[1] * (words.k1 + 1)  # a constant that Lucene leaves out
            theirs[kind] = timing.median
            figures.append({**base, "what": f"bm25s, {kind}", **timing.to_dict()})
        held = words.memory.index.unit_postings
        postings = Postings(held.counts.to(device), held.row.to(device), held.impact.to(device))
        axis, entries = axis_of([units], device), words.entries(device)
        size = 8 * int(postings.counts[entries[1]].sum()) + 4 * queries * units
        for name in ("auto", *backends_of("lexical", device, {})):
            lexical = LexicalScores(backend=name)
            best = partial(lexical.best, *entries, postings, queries, axis, k)
            timing, scores = timed(best, items=queries, calls=calls, device=device)
            apart = 0.0 if expected is None else float(np.abs(scores[0][:, 0].cpu().numpy() - expected).max())
            if not apart <= 1e-3:
                raise SystemExit(f"bm25, {data}, {name}: expected the scores of bm25s, got a difference of {apart}")
            ours[name] = timing.median
            figures.append({**base, "what": _ours(name), **timing.to_dict(), "apart": apart})
            every = partial(lexical, *entries, postings, queries, units)
            timing, _ = timed(every, items=queries, calls=calls, device=device)
            row = {**base, "what": f"{_ours(name)}: scores of all units", "k": units, **timing.to_dict()}
            figures.append(row | floor_of(timing, device, size=size))
    return figures, theirs["numba"] / ours["auto"] if "numba" in theirs else None


def dense(data: str, memory: Memory, vectors: Tensor, device: str, calls: int) -> tuple[Figures, float | None]:
    """The nearest chunks of each question: ours by one product and top-k, FAISS by its flat index."""
    held = memory.index.chunk_vectors.float()
    k, queries = min(DEPTH, len(held)), len(vectors)
    base = {"figure": "dense", "data": data, "queries": queries, "units": len(held), "k": k, "threads": 1}
    axis, chunks, asked = axis_of([len(held)], device), held.to(device), vectors[:, None].float().to(device)
    score = DenseScores()
    with threads(1):
        timing, best = timed(lambda: score(asked, chunks, axis).topk(k), items=queries, calls=calls, device=device)
        floor = floor_of(timing, device, flops=2.0 * held.numel() * queries)
        figures = [{**base, "what": "ours", **timing.to_dict(), **floor}]
        if not has("faiss"):
            return figures, None
        package("faiss").omp_set_num_threads(1)
        search = partial(peers.faiss_flat(held).search, np.ascontiguousarray(vectors.float().numpy()), k)
        theirs, found = timed(search, items=queries, calls=calls)
    apart = float(np.abs(best.values.cpu().numpy() - found[0]).max())
    if not apart <= 1e-4:
        raise SystemExit(f"dense, {data}: expected the scores of FAISS, got a difference of {apart}")
    figures.append({**base, "what": "faiss, flat", **theirs.to_dict()})
    return figures, theirs.median / timing.median
