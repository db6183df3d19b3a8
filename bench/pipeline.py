"""Retrieval beside its peers, on conversations and on a pool of documents:

  python bench/pipeline.py --locomo locomo10.json --hotpotqa questions.json --corpus corpus.jsonl --json OUT

Everything is measured in this run, on the same traces, vectors and threads, and every stage is checked against its peer
before it is timed. The ratios say how many times as long the peer takes:

  retrieval_vs_linearrag_*     256 questions at once, from a compiled batch to the chosen units, all stages but late
                               interaction (MaxSim), which the peer lacks; against LinearRAG's search, a question at a
                               time in Python and igraph (our re-statement; its NER and encoding are left out as well).
                               With MaxSim, with compiling and with collecting stand beside it.
  pagerank_vs_igraph_*         the same walks over the same graphs, on one core each; 60k: the pool's graph
  bm25_vs_bm25s_numba          the best 50 units, on one core each; the worse of both data sets
  encoder_vs_sentence_transformers   texts of mixed lengths, same weights
  idle_memories_1000_vs_1      what a search costs with 999 memories beside the one it asks: the aim is 1

Encoded texts are kept in --cache, so a second run takes a few minutes. --quick shows in seconds that it all runs; its
figures mean nothing. Without the offline encoder, --encoder table takes vectors from a table: times hardly depend on
what they say.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script knows only its own folder

from bench import encoder as encoder_bench
from bench import made, peers, versus
from bench.append import TableEncoder
from bench.measure import Peak, Timing, each, floors, has, lines, made_by, say, threads, timed
from bench.peers import LinearRag, Names
from bench.table import AIMS
from zeromem_torch import Trace, ZeroMem, ZeroMemConfig
from zeromem_torch.collect import Batch, EvidenceWriter
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.evaluation.datasets import Dataset, Question, load_dataset
from zeromem_torch.pipeline import Selection, Views, ZeroMemPipeline
from zeromem_torch.substrate.encoder import CachedEncoder, Encoded, Encoder, load_encoder
from zeromem_torch.substrate.entities import EntityExtractor, Mention, load_extractor
from zeromem_torch.substrate.memory import Memory

B = 256
IDLE = 1000
TURNS = 10  # of an idle memory
SHOWN = (
    "figure", "data", "what", "queries", "threads", "median_us", "iqr_us", "p50_us", "p95_us", "p99_us", "cold_us",
    "floor_share", "peak_mib",
)  # fmt: skip


class Remembering:
    """An encoder that holds what it was last asked, so that compiling a batch again is not charged with encoding."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.held = encoder, dict[tuple[Any, ...], Encoded]()
        self.fingerprint, self.dim = encoder.fingerprint, encoder.dim
        self.max_tokens, self.late_chunking = encoder.max_tokens, encoder.late_chunking
        self.token_spans = encoder.token_spans

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        key = (states, *texts)
        if len(texts) > B:
            return self.encoder.encode(texts, states=states)
        if key not in self.held:
            self.held[key] = self.encoder.encode(texts, states=states)
        return self.held[key]


class Tagger:
    """An extractor that reads each text once: our memories and their peers are given the same mentions."""

    def __init__(self, extractor: EntityExtractor) -> None:
        self.extractor, self.fingerprint = extractor, extractor.fingerprint
        self.held: dict[str, list[Mention]] = {}

    def extract(self, texts: Sequence[str]) -> list[list[Mention]]:
        new = list(dict.fromkeys(text for text in texts if text not in self.held))
        self.held.update(zip(new, self.extractor.extract(new), strict=True))
        return [self.held[text] for text in texts]


@dataclass
class Ground:
    """A data set in memory, and what finds names in it."""

    data: Dataset
    memory: ZeroMem
    names: Names
    extractor: EntityExtractor | None

    def batches(self, size: int, most: int | None = None) -> list[list[Batch]]:
        """``size`` questions at a time, compiled: as the groups that they are searched in, mostly one.

        A set of fewer questions is asked again from its start.
        """
        asked = list(self.data.questions)
        draw = torch.randperm(len(asked), generator=torch.Generator().manual_seed(0)).tolist()
        whole = max(1, len(draw) // size)
        order = [draw[i % len(draw)] for i in range(size * (whole if most is None else min(most, whole)))]
        starts = range(0, len(order), size)
        # memories in one order: then they are packed once
        return [self.compiled([asked[i] for i in sorted(order[first : first + size])]) for first in starts]

    def compiled(self, questions: Sequence[Question]) -> list[Batch]:
        texts, homes, times = zip(*((q.text, q.boundary, q.time) for q in questions), strict=True)
        return list(self.memory.batches(texts, homes, times))

    def asked(self, group: Batch) -> Iterator[tuple[int, np.ndarray, str]]:
        """Memory, vector and text of each question of a batch."""
        vectors = group.batch.vectors.cpu().float().numpy()
        for slot, m in group.batch.filled.nonzero().tolist():
            yield m, vectors[slot, m], group.profiles[int(group.batch.query[slot, m])].text


def ground(data: Dataset, encoder: Encoder, config: ZeroMemConfig, device: str) -> Ground:
    """``auto`` entities are decided here, so that both sides are given the same."""
    spoken = any(trace.speaker for trace in data.traces)
    if config.substrate.entities == "auto" and spoken and has("spacy"):
        tagger = Tagger(load_extractor("spacy"))
        memory, names = ZeroMem(config, encoder=encoder, extractor=tagger, device=device), peers.names_by_tagger(tagger)
    else:
        tagger, rules = None, replace(config, substrate=replace(config.substrate, entities="rules"))
        memory, names = ZeroMem(rules, encoder=encoder, device=device), peers.names_by_rule
    memory.add(data.traces)
    return Ground(data, memory, names, tagger)


# Retrieval


def without_maxsim(pipeline: ZeroMemPipeline, device: str) -> ZeroMemPipeline:
    """The same pipeline with late interaction neither weighed nor computed."""
    config, none = pipeline.config, {"maxsim_turn": 0.0, "maxsim_window": 0.0}
    graph = replace(config.graph, prior=replace(config.graph.prior, **none), exact=replace(config.graph.exact, **none))
    hierarchy = replace(config.hierarchy, weights=replace(config.hierarchy.weights, **none))
    calibration = replace(config.calibration, weights=replace(config.calibration.weights, **none))
    made = ZeroMemPipeline(replace(config, graph=graph, hierarchy=hierarchy, calibration=calibration))
    skipped: Any = made.signals
    skipped._late_interaction = lambda batch, bank, signals: {}
    return made.to(device).eval()


def find(pipeline: ZeroMemPipeline, group: Batch) -> tuple[Views, Selection]:
    with torch.no_grad():
        views = pipeline.views(group.batch, group.bank)
        return views, pipeline.select(views, group.bank, pipeline.config.calibration.top_k)


def find_all(pipeline: ZeroMemPipeline, groups: Sequence[Batch]) -> None:
    for group in groups:
        find(pipeline, group)


def retrieval(name: str, held: Ground, device: str, quick: bool) -> tuple[list[dict[str, Any]], float]:
    """Ours in batches and alone, stage by stage, and LinearRAG a question at a time."""
    size, calls = (8, 2) if quick else (B, 12)
    whole, lean = held.memory.pipeline, without_maxsim(held.memory.pipeline, device)
    batches, singles = held.batches(size), held.batches(1, 8 if quick else 100)
    _same_alone(lean, held, batches[0][0])
    figures: list[dict[str, Any]] = []
    base = {"figure": "retrieval", "data": name, "units": len(held.data.traces), "threads": torch.get_num_threads()}

    def figure(what: str, timing: Timing, queries: int, **more: Any) -> Timing:
        figures.append({**base, "what": what, "queries": queries, **timing.to_dict(), **more})
        return timing

    spent: dict[str, Timing] = {}
    for what, pipeline in (("ours, all stages but MaxSim", lean), ("ours, with MaxSim", whole)):
        peak = Peak(device)
        timings = [
            timed(partial(find_all, pipeline, groups), items=size, calls=calls, device=device)[0]
            for groups in tqdm(batches, desc=f"{name}, {what}", unit="batch", disable=None, leave=False)
        ]
        spent[what] = figure(what, _together(timings), size, groups=len(batches[0]), peak_mib=peak.mib)
        alone = [timed(partial(find_all, pipeline, groups), calls=5, device=device)[0] for groups in singles]
        figure(what, _together(alone), 1)
    figures += [{**base, **row} for row in stages(lean, batches[0][0], device)]
    asked = [held.data.questions[number % len(held.data.questions)] for number in range(size)]
    figure("compile a batch, encoding left out", timed(lambda: held.compiled(asked), items=size, calls=5)[0], size)
    found = [(group, *find(whole, group)) for group in batches[0]]
    figure("collect the evidence", timed(lambda: _collect(whole, found), items=size, calls=3)[0], size)

    rags: dict[int, LinearRag] = {}
    inputs = []
    for group in itertools.chain.from_iterable(batches):
        for m, vector, text in held.asked(group):
            own = group.memories[m]
            if id(own) not in rags:
                rags[id(own)] = LinearRag.of(own, held.names)
                rags[id(own)].walk([1.0] * rags[id(own)].nodes)  # its graph is built when it is first walked
            rag = rags[id(own)]
            inputs.append((rag, vector, rag.seeds(text)))
    k = whole.config.calibration.top_k
    bar = tqdm(total=2 * len(inputs), desc=f"{name}, LinearRAG", unit="query", disable=None, leave=False)
    with threads(1):  # Python has one, and two of igraph's or NumPy's take longer over so little
        timing, _ = each(lambda given: given[0].search(given[1], given[2], k), inputs, bar)
    figure("LinearRAG's search, our re-statement", timing, 1, threads=1, mean_us=round(timing.mean * 1e6, 1))
    return figures, timing.mean / spent["ours, all stages but MaxSim"].median


def _together(timings: Sequence[Timing]) -> Timing:
    """Calls of several batches of one size; the first of all is cold."""
    return Timing(timings[0].cold, [call for timing in timings for call in timing.warm], timings[0].items)


def _same_alone(pipeline: ZeroMemPipeline, held: Ground, group: Batch) -> None:
    """A question finds the same in a batch as alone."""
    _, together = find(pipeline, group)
    for slot, m in group.batch.filled.nonzero().tolist()[:8]:
        number = int(group.batch.query[slot, m])
        text, memory = group.profiles[number].text, group.memories[m]
        question = next(q for q in held.data.questions if q.text == text and q.boundary == memory.boundary)
        (own,) = held.compiled([question])
        _, alone = find(pipeline, own)
        shift = group.bank.axes["units"].ptr[m]
        rows = [row - shift if row >= 0 else -1 for row in together.main[slot, m].tolist()]
        if rows != alone.main[0, 0].tolist():
            raise SystemExit(
                f"retrieval: expected {text!r} to find the same alone as in a batch, got {rows} and {alone}"
            )


def _collect(pipeline: ZeroMemPipeline, found: Sequence[tuple[Batch, Views, Selection]]) -> None:
    fusion = pipeline.config.fusion
    for group, views, chosen in found:
        writer = EvidenceWriter(group, views, chosen, (fusion.graph_contrast, fusion.hierarchy_contrast))
        for slot, m in group.batch.filled.nonzero().tolist():
            writer.evidence(slot, m, group.profiles[int(group.batch.query[slot, m])])


STAGES: Mapping[str, tuple[str, str]] = {
    "signals": ("signals", "forward"),
    "signals: dense": ("signals.dense", "forward"),
    "signals: lexical": ("signals.lexical", "forward"),
    "graph": ("graph", "forward"),
    "graph: propagation": ("graph.propagate", "forward"),
    "graph: walk": ("graph.walk", "forward"),
    "hierarchy": ("hierarchy", "forward"),
    "fusion": ("fusion", "best"),
    "closure": ("closure", "forward"),
    "calibration": ("calibration", "forward"),
}
"""A module of the pipeline by its name there, and the method that does its work."""


def stages(pipeline: ZeroMemPipeline, group: Batch, device: str, calls: int = 3) -> Iterator[dict[str, Any]]:
    """Where the time of a batch goes: each module's own calls, those inside it included."""
    spent = dict.fromkeys(STAGES, 0.0)

    def now() -> float:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed_stage(stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            start = now()
            result = work(*given, **named)
            spent[stage] += now() - start
            return result

        return run

    with ExitStack() as wrapped:
        for stage, (name, method) in STAGES.items():
            module = pipeline.get_submodule(name)
            setattr(module, method, timed_stage(stage, getattr(module, method)))
            wrapped.callback(delattr, module, method)
        start = now()
        for _ in range(calls):
            find(pipeline, group)
        total = now() - start
    queries = calls * len(group.numbers)
    for stage, seconds in spent.items():
        yield {"what": f"stage {stage}", "queries": len(group.numbers), "median_us": round(seconds / queries * 1e6, 3),
               "share": round(seconds / total, 3)}  # fmt: skip


# Stages beside their peers


def walks(held: Ground, size: int) -> list[versus.Walks]:
    """What the questions of one batch start from, by memory."""
    given: dict[str, tuple[Memory, list[tuple[np.ndarray, str]]]] = {}
    for group in held.batches(size, 1)[0]:
        for m, vector, text in held.asked(group):
            memory = group.memories[m]
            given.setdefault(memory.boundary, (memory, []))[1].append((vector, text))
    bar = tqdm(given.values(), desc="walks", unit="memory", disable=None, leave=False)
    return [versus.Walks.of(LinearRag.of(memory, held.names), *zip(*own, strict=True)) for memory, own in bar]


def largest(held: Ground) -> Memory:
    groups = held.batches(min(B, len(held.data.questions)), 1)[0]
    return max((memory for group in groups for memory in group.memories), key=lambda memory: len(memory.turns.traces))


def cycled(held: Ground, memory: Memory, size: int) -> list[Question]:
    own = [question for question in held.data.questions if question.boundary == memory.boundary]
    return [own[i % len(own)] for i in range(size)]


# Memories that nobody asks about


def idle(held: Ground, others: int, calls: int) -> tuple[list[dict[str, Any]], float]:
    """One search at a time in one memory, with and without ``others`` beside it; the calls alternate."""
    traces = held.data.traces
    home = held.data.questions[0].boundary
    asked = [q for q in held.data.questions if q.boundary == home][: max(1, calls)]
    own = [trace for trace in traces if trace.boundary == home]
    spent: dict[int, list[float]] = {1: [], 1 + others: []}
    memories: dict[int, ZeroMem] = {}
    for count in spent:
        model = held.memory
        memories[count] = ZeroMem(model.config, encoder=model.encoder, extractor=held.extractor, device=model.device)
        memories[count].add(own)
        beside = [
            Trace(id=f"idle-{m}/{i}", boundary=f"idle-{m}", text=turn.text, speaker=turn.speaker, time=turn.time,
                  session="1", order=i)
            for m in tqdm(range(count - 1), desc="idle memories", unit="memory", disable=None, leave=False)
            for i, turn in enumerate(traces[(m * TURNS + j) % len(traces)] for j in range(TURNS))
        ]  # fmt: skip
        memories[count].add(beside)
    for warming in (True, False):
        for number in range(calls):
            question = asked[number % len(asked)]
            for count, memory in memories.items():
                start = time.perf_counter()
                memory.search(question.text, boundary=home)
                if not warming:
                    spent[count].append(time.perf_counter() - start)
    base = {"figure": "idle memories", "data": held.data.name, "queries": 1, "threads": torch.get_num_threads()}
    figures: list[dict[str, Any]] = [
        {**base, "what": f"a search among {count} memories", "traces": len(memories[count]),
         **Timing(times[0], times).to_dict()}
        for count, times in spent.items()
    ]  # fmt: skip
    return figures, figures[1]["median_us"] / figures[0]["median_us"]


# The run


def run(args: argparse.Namespace) -> dict[str, Any]:
    quick, device = args.quick, args.device
    size, calls = (8, 2) if quick else (B, 10)
    config = ZeroMemConfig(substrate=SubstrateConfig(entities=args.entities))
    result: dict[str, Any] = {"data": {}, "floors": floors(device), "ratios": dict.fromkeys(AIMS), "skipped": []}
    figures: list[dict[str, Any]] = []
    ratios: dict[str, float | None] = result["ratios"]
    encoder = Remembering(encoder_of(args, result["skipped"]))
    grounds: dict[str, Ground] = {}
    for name, data in datasets(args, result["skipped"]):
        result["data"][name] = {
            "split": data.split, "sha256": data.sha256, "traces": len(data.traces), "questions": len(data.questions),
            "notes": list(data.notes),
        }  # fmt: skip
        say(f"{name}: {len(data.traces)} traces are read and encoded (kept in the cache)")
        grounds[name] = ground(data, encoder, config, device)

    for name, held in grounds.items():
        figure, ratios[f"retrieval_vs_linearrag_{name}"] = retrieval(name, held, device, quick)
        figures += figure
    for name, held in grounds.items():
        label = {"locomo": "locomo", "hotpotqa": "60k"}[name]
        figure, ratios[f"pagerank_vs_igraph_{label}"] = versus.pagerank(name, walks(held, size), device, calls)
        figures += figure
    lexical: list[float | None] = []
    for name, held in grounds.items():
        memory = largest(held)
        asked = cycled(held, memory, size)
        words = versus.Words.of(memory, [question.text for question in asked], config.substrate)
        figure, ratio = versus.bm25(name, words, device, calls, ("numpy",) if quick else ("numba", "numpy"))
        figures += figure
        lexical.append(ratio)
        vectors = torch.cat([g.batch.vectors.cpu()[g.batch.filled.cpu()] for g in held.compiled(asked)])
        figure, ratios[f"dense_vs_faiss_flat_{name}"] = versus.dense(name, memory, vectors, device, calls)
        figures += figure
    if quick:
        result["skipped"].append("bm25_vs_bm25s_numba: compiling it takes longer than all else of a quick run")
    ratios["bm25_vs_bm25s_numba"] = min((ratio for ratio in lexical if ratio is not None), default=None)
    if args.encoder == "table":
        result["skipped"].append("encoder_vs_sentence_transformers: vectors are from a table; see bench/encoder.py")
    else:
        inner = getattr(encoder.encoder, "encoder", encoder.encoder)
        figure, ratios["encoder_vs_sentence_transformers"] = encoders(args, inner, quick)
        figures += figure
    if "locomo" in grounds:
        say("memories that nobody asks about")
        figure, ratios["idle_memories_1000_vs_1"] = idle(
            grounds["locomo"], 9 if quick else IDLE - 1, 5 if quick else 100
        )
        figures += figure
    for name in ("igraph", "scipy", "bm25s", "numba", "faiss", "sentence_transformers", "spacy"):
        if not has(name):
            result["skipped"].append(f"{name} is not installed")
    result["ratios"] = {name: None if value is None else round(value, 3) for name, value in ratios.items()}
    return {**result, "figures": figures}


def datasets(args: argparse.Namespace, skipped: list[str]) -> Iterator[tuple[str, Dataset]]:
    if args.made:
        yield "locomo", made.conversations(2, 30, 16) if args.quick else made.conversations()
        yield "hotpotqa", made.documents(60, 16) if args.quick else made.documents()
        return
    for name, path, corpus in (("locomo", args.locomo, None), ("hotpotqa", args.hotpotqa, args.corpus)):
        if path is None:
            skipped.append(f"{name}: no data was given")
        else:
            yield name, load_dataset(name, path, corpus, limit=40 if args.quick else None)


def encoder_of(args: argparse.Namespace, skipped: list[str]) -> Encoder:
    if args.encoder == "table":
        skipped.append("encoder: vectors are from a table; what is found means nothing, times hardly change")
        return TableEncoder()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    loaded = load_encoder(args.encoder, device=args.device)
    return CachedEncoder(loaded, args.cache or home / "zeromem" / "encoded.sqlite")


def encoders(args: argparse.Namespace, ours: Any, quick: bool) -> tuple[list[dict[str, Any]], float | None]:
    if not has("sentence_transformers"):
        return [], None
    folder = str(ours.tokenizer.name_or_path)
    theirs = encoder_bench.sentence_transformer(folder, args.device, ours.model.dtype)
    theirs.max_seq_length = ours.max_tokens
    model = encoder_bench.Model(args.encoder, ours, theirs)
    texts = encoder_bench.loads_of(args.locomo, args.corpus, 12 if quick else 384)["mixed"]
    say("the encoder beside sentence-transformers")
    figures = encoder_bench.compare(model, "mixed", texts, args.device, 2 if quick else 5)
    for row in figures:
        row["data"] = row.pop("load")
    return figures, encoder_bench.ratio([{**row, "load": "mixed"} for row in figures])


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--locomo", type=Path, metavar="PATH", help="LoCoMo: .json, or .json.gz")
    parser.add_argument("--hotpotqa", type=Path, metavar="PATH", help="HotpotQA questions")
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="the pool of paragraphs they are asked of")
    parser.add_argument("--made", action="store_true", help="made data of these sizes instead, for times alone")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write ratios and figures here")
    parser.add_argument(
        "--cache", type=Path, metavar="FILE", help="encoded texts (default: in the user's cache folder)"
    )
    parser.add_argument("--encoder", default="minilm", help="minilm, bge-m3, a folder, or table (%(default)s)")
    parser.add_argument("--entities", choices=["auto", "rules"], default="auto", help="of conversations (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of PyTorch (default: its own choice)")
    parser.add_argument("--quick", action="store_true", help="few questions and calls: to see that it runs")
    args = parser.parse_args(words)
    if not args.made and args.locomo is None and args.hotpotqa is None:
        parser.error("nothing to search: name --locomo, or --hotpotqa with its --corpus, or take --made")
    with threads(args.threads or torch.get_num_threads()):
        by = made_by("pipeline", words, args.device)
        result = {**by, "encoder": args.encoder, "quick": args.quick, **run(args)}
    print("\n".join(lines(result["figures"], SHOWN)))
    for line in result["skipped"]:
        print(f"skipped: {line}")
    for name, value in result["ratios"].items():
        aim = f" (aim {AIMS[name][1]})" if name in AIMS else ""
        print(f"{name}: {'not measured' if value is None else f'{value:g}'}{aim}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
