"""Run retrieval systems over a benchmark in one pass, with one encoder, and measure every one the same way."""

import dataclasses
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from zeromem_torch.bank import segment_topk
from zeromem_torch.collect import Batch
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.evaluation.baselines import BASELINES, PlainRetrieval
from zeromem_torch.evaluation.datasets import Dataset, Question
from zeromem_torch.evaluation.metrics import paired_bootstrap, recall_at_tokens, recall_hit_all, summarise
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import Views, ZeroMemPipeline
from zeromem_torch.searcher import LONGEST
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.traces import ZeroMemError, nearest

DEPTHS = (1, 2, 5, 10, 20)
BUDGETS = (256, 512, 1024)
COMPARED = ("recall@5", "recall@10", "all@5", "recall@512tok", "recall@1024tok")
AGAINST = ("hybrid", "context")
FEWEST = 20  # questions below which resampling them says nothing

# What each ablation changes: the graph's weight in place of the route's, closure, calibration.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "zeromem": {},
    "graph": {"graph_weight": 1.0},
    "hierarchy": {"graph_weight": 0.0},
    "no_closure": {"close": False},
    "no_calibration": {"calibrate": False},
}
MAIN = "zeromem"
UNLEARNED = "unlearned"  # the same by the weights of the configuration, beside a checkpoint's
SYSTEMS = (*VARIANTS, *BASELINES)


@dataclass(frozen=True)
class Found:
    """What a system gave for one question."""

    main: Sequence[str]  # trace ids, the main ranking
    ranked: Sequence[tuple[str, int]]  # what is handed over within a token budget, in order: id and tokens
    handed: Sequence[tuple[str, int]]  # what is handed over without one


def run_retrieval(
    data: Dataset,
    systems: Sequence[str],
    encoder: Encoder,
    config: ZeroMemConfig,
    *,
    device: str = "cpu",
    kept: dict[str, dict[str, Found]] | None = None,
    router: Path | None = None,
) -> dict[str, Any]:
    """Measure systems on a data set; the result is JSON, as the README shows it.

    ``router``: a checkpoint for `ZeroMem.use`; beside what it finds stands what is found without it.

    ``kept``, if given, is filled with what each system found for each question id.
    """
    for name in systems or [""]:
        if name not in SYSTEMS:
            known = ", ".join(SYSTEMS)
            raise ZeroMemError.of("systems", f"some of {known}", name, f"{nearest(name, SYSTEMS)}choose among these")
    scored = [question for question in data.questions if question.evidence]
    if not scored:
        got = f"{len(data.questions)} without any"
        raise ZeroMemError.of("questions", "at least one with evidence", got, f"check the file of {data.name}")
    seconds: dict[str, float] = {}
    found: dict[str, dict[str, Found]] = {}
    memory = ZeroMem(config, encoder=encoder, device=device)
    unlearned = None
    if router is not None:
        unlearned = memory.pipeline if MAIN in systems else None
        memory.use(router)
    variants = [name for name in systems if name in VARIANTS]
    if variants:
        memory.add(data.traces)
        found.update(_run_variants(memory, data.questions, variants, unlearned))
    if unlearned is not None:
        systems = [name for one in systems for name in ([MAIN, UNLEARNED] if one == MAIN else [one])]
    plain = [name for name in systems if name in BASELINES]
    with _timed(seconds, "baselines"):
        if plain:
            found.update(_run_baselines(data, plain, encoder, config.calibration.top_k))
    if kept is not None:
        kept.update(found)
    measures = {name: [_measure(question, found[name][question.id]) for question in scored] for name in systems}
    return {
        "dataset": data.name,
        "split": data.split,
        "sha256": data.sha256,
        "notes": list(data.notes),
        "categories": dict(data.categories),
        "questions": len(data.questions),
        "traces": len(data.traces),
        "encoder": encoder.fingerprint,
        "entities": list(memory.extractors),
        "config": memory.config.to_dict(),
        "device": device,
        **({"router": router.name} if router is not None else {}),
        **provenance(),
        "seconds": {**memory.timings, **seconds},
        "systems": {
            name: {
                **summarise(measures[name], scored),
                "vs": _compared(name, measures),
                **({"vs_by_category": _compared_by_category(name, measures, scored)} if name == MAIN else {}),
            }
            for name in systems
        },
    }


def _run_variants(
    memory: ZeroMem,
    questions: Sequence[Question],
    variants: Sequence[str],
    unlearned: ZeroMemPipeline | None = None,
) -> dict[str, dict[str, Found]]:
    found: dict[str, dict[str, Found]] = {name: {} for name in variants}
    batches = memory.batches([q.text for q in questions], [q.boundary for q in questions], [q.time for q in questions])
    with tqdm(total=len(questions), desc="retrieval", unit="question", disable=None) as bar, torch.no_grad():
        for group in batches:
            with _timed(memory.timings, "search both views"):
                views = memory.pipeline.views(group.batch, group.bank)
            for name in variants:
                with _timed(memory.timings, "fuse, close, calibrate"):
                    for question, result in _found(memory.pipeline, group, views, questions, **VARIANTS[name]):
                        found[name][question.id] = result
            if unlearned is not None:
                views = unlearned.views_of(group.batch, group.bank, views.signals)
                for question, result in _found(unlearned, group, views, questions):
                    found.setdefault(UNLEARNED, {})[question.id] = result
            bar.update(len(group.numbers))
    return found


def _found(
    pipeline: ZeroMemPipeline,
    group: Batch,
    views: Views,
    questions: Sequence[Question],
    graph_weight: float | None = None,
    **stages: bool,
) -> Iterator[tuple[Question, Found]]:
    if graph_weight is not None:
        views = dataclasses.replace(views, graph_weight=torch.full_like(views.graph_weight, graph_weight))
    top_k = pipeline.config.calibration.top_k
    ranked = pipeline.select(views, group.bank, top_k, LONGEST, **stages)
    handed = pipeline.select(views, group.bank, top_k, **stages)
    main = segment_topk(ranked.fused, group.bank.axes["units"], max(DEPTHS)).tolist()
    rows, few = ranked.result.tolist(), handed.result.tolist()
    ids = [trace.id for one in group.memories for trace in one.turns.traces]
    tokens = group.bank.unit_tokens.tolist()

    def items(numbers: Sequence[int]) -> list[tuple[str, int]]:
        return [(ids[row], tokens[row]) for row in numbers if row >= 0]

    for slot, m in group.batch.filled.nonzero().tolist():
        question = questions[group.numbers[int(group.batch.query[slot, m])]]
        yield (
            question,
            Found([ids[row] for row in main[slot][m] if row >= 0], items(rows[slot][m]), items(few[slot][m])),
        )


def _run_baselines(data: Dataset, names: Sequence[str], encoder: Encoder, top_k: int) -> dict[str, dict[str, Found]]:
    found: dict[str, dict[str, Found]] = {name: {} for name in names}
    boundaries = list(dict.fromkeys(question.boundary for question in data.questions))
    for boundary in tqdm(boundaries, desc="baselines", unit="boundary", disable=None):
        asked = [question for question in data.questions if question.boundary == boundary]
        traces = [trace for trace in data.traces if trace.boundary == boundary]
        plain = PlainRetrieval(traces, [question.text for question in asked], encoder)
        tokens = plain.tokens
        for name in names:
            rows = segment_topk(plain.scores(name), plain.axis, LONGEST)[:, 0].tolist()
            for question, ranked in zip(asked, rows, strict=True):
                items = [(plain.units[row], tokens[row]) for row in ranked if row >= 0]
                found[name][question.id] = Found([unit for unit, _ in items[: max(DEPTHS)]], items, items[:top_k])
    return found


def _measure(question: Question, found: Found) -> dict[str, float]:
    row: dict[str, float] = {}
    for k in DEPTHS:
        row[f"recall@{k}"], row[f"hit@{k}"], row[f"all@{k}"] = recall_hit_all(found.main, question.evidence, k)
    for budget in BUDGETS:
        row[f"recall@{budget}tok"] = recall_at_tokens(found.ranked, question.evidence, budget)
    handed = [unit for unit, _ in found.handed]
    row["recall_handed"] = recall_hit_all(handed, question.evidence, max(1, len(handed)))[0]
    row["turns_handed"] = float(len(handed))
    row["tokens_handed"] = float(sum(tokens for _, tokens in found.handed))
    return row


def _compared(name: str, measures: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    def scores(system: str, measure: str) -> list[float]:
        return [row[measure] for row in measures[system]]

    return {
        other: {measure: paired_bootstrap(scores(name, measure), scores(other, measure)) for measure in COMPARED}
        for other in (*AGAINST, *([UNLEARNED] if name == MAIN else []))
        if other in measures and other != name and len(measures[name]) >= FEWEST
    }


def _compared_by_category(
    name: str, measures: Mapping[str, Sequence[Mapping[str, float]]], questions: Sequence[Question]
) -> dict[str, Any]:
    """The same tests on the questions of each category."""

    def of(category: str) -> dict[str, Sequence[Mapping[str, float]]]:
        return {
            system: [row for row, question in zip(rows, questions, strict=True) if question.category == category]
            for system, rows in measures.items()
        }

    return {category: _compared(name, of(category)) for category in sorted({q.category for q in questions} - {""})}


def provenance() -> dict[str, Any]:
    """What made a number: commit, versions, machine."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    names = ("torch", "transformers", "numpy", "spacy", "zeromem-torch")
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    return {
        "commit": (git("rev-parse", "HEAD") or "unknown") + ("+changes" if changed else ""),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in names if name in installed},
        },
        "threads": torch.get_num_threads(),
    }


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """The result for a terminal: a line a system, then the tests, then where the time went."""
    systems: Mapping[str, Any] = result["systems"]
    columns = ("recall@1", "recall@2", "recall@5", "recall@10", "recall@20", "all@5", "recall@512tok", "recall@1024tok")
    tail = ("recall_handed", "turns_handed", "tokens_handed")
    yield (
        f"{result['dataset']} ({result['split']}): {result['traces']} traces, {result['questions']} questions; "
        f"encoder {result['encoder']}; entities {', '.join(result['entities']) or 'none'}"
    )
    yield from (f"  note: {note}" for note in result["notes"])
    heads = [c.replace("recall@", "r@") for c in columns] + ["r handed", "turns", "tokens"]
    yield f"{'system':<15}{'n':>5} " + "".join(f"{head:>10}" for head in heads)
    for name, system in systems.items():
        overall = system["overall"]
        cells = [f"{overall[c]:>10.3f}" for c in (*columns, tail[0])] + [f"{overall[c]:>10.1f}" for c in tail[1:]]
        yield f"{name:<15}{overall['n']:>5} " + "".join(cells)
    for category, label in result["categories"].items():
        lines = [(n, s["by_category"][category]) for n, s in systems.items() if category in s["by_category"]]
        if lines:
            yield f"category {category}, {label}: recall@5 / @10"
            yield "  " + ", ".join(f"{n} {row['recall@5']:.3f} / {row['recall@10']:.3f}" for n, row in lines)
    for category, others in systems.get(MAIN, {}).get("vs_by_category", {}).items():
        for other, tests in others.items():
            shown = ", ".join(f"{m} {tests[m]['diff']:+.3f} (p {tests[m]['p']:.4f})" for m in ("recall@5", "recall@10"))
            yield f"{MAIN} - {other}, category {category}: {shown}"
    for name, system in systems.items():
        for other, tests in system["vs"].items():
            shown = ", ".join(f"{m} {t['diff']:+.3f} (p {t['p']:.4f})" for m, t in tests.items())
            yield f"{name} - {other}: {shown}"
    yield "seconds: " + ", ".join(f"{stage} {spent:.1f}" for stage, spent in result["seconds"].items())
