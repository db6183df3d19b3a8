"""What learning buys: recall of questions whose conversation was left out, beside an oracle's rho and mere jitter."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeromem_torch.bank import segment_topk
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.errors import ZeroMemError
from zeromem_torch.evaluation.metrics import paired_bootstrap, recall_at_tokens, recall_hit_all
from zeromem_torch.pipeline import Views, ZeroMemPipeline
from zeromem_torch.searcher import LONGEST
from zeromem_torch.training.cache import Cached
from zeromem_torch.training.fit import fit
from zeromem_torch.training.settings import TrainingSettings

MEASURES = ("recall@5", "recall@512tok")
WEIGHTS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Weights of the graph view among which the oracle chooses for each question."""
DISTURBED = 50  # units by which the size of a disturbance is taken

Rows = dict[str, list[float]]


@torch.no_grad()
def measured(pipeline: ZeroMemPipeline, own: Cached, views: Views | None = None) -> Rows:
    """Of each question recall@5 of M(q) and recall at 512 tokens of R(q), as `zeromem eval retrieval` has them."""
    if views is None:
        views = pipeline.views_of(own.batch, own.bank, own.signals)
    chosen = pipeline.select(views, own.bank, 5, LONGEST)
    tokens = own.bank.unit_tokens.tolist()
    rows: Rows = {name: [] for name in MEASURES}
    main, result = chosen.main[:, 0].tolist(), chosen.result[:, 0].tolist()
    for question, best, handed in zip(own.questions, main, result, strict=True):
        names = [own.ids[row] for row in best if row >= 0]
        rows["recall@5"].append(recall_hit_all(names, question.evidence, 5)[0])
        items = [(own.ids[row], tokens[row]) for row in handed if row >= 0]
        rows["recall@512tok"].append(recall_at_tokens(items, question.evidence, 512))
    return rows


@torch.no_grad()
def headroom(pipeline: ZeroMemPipeline, own: Cached, seed: int = 0) -> dict[str, Rows]:
    """The best of `WEIGHTS` for each question, and the best of as many rankings that were only disturbed.

    A disturbance is as large as the change that the other weight made: normal, with its root mean square over the
    question's best units.
    """
    views = pipeline.views_of(own.batch, own.bank, own.signals)
    units, draw = own.bank.axes["units"], torch.Generator().manual_seed(seed)
    fused = pipeline.fusion(views.graph, views.hierarchy, views.graph_weight, units)
    best = segment_topk(fused, units, DISTURBED)[:, 0].clamp(min=0)
    found: dict[str, list[Rows]] = {"oracle_rho": [], "jitter": []}
    for weight in WEIGHTS:
        other = torch.full_like(views.graph_weight, weight)
        turned = dataclasses.replace(views, graph_weight=other)
        found["oracle_rho"].append(measured(pipeline, own, turned))
        change = pipeline.fusion(views.graph, views.hierarchy, other, units) - fused
        size = change.gather(1, best).square().mean(1, keepdim=True).sqrt()
        noise = torch.randn(fused.shape, generator=draw).to(fused) * size
        noise = noise if views.bonus is None else noise + views.bonus
        found["jitter"].append(measured(pipeline, own, dataclasses.replace(views, bonus=noise)))
    return {
        name: {measure: np.max([one[measure] for one in rows], axis=0).tolist() for measure in MEASURES}
        for name, rows in found.items()
    }


def check_folds(groups: int) -> None:
    """One is left out and another one stops the training, so that a third has to be there to learn from."""
    if groups < 3:
        expected = "at least 3 conversations (boundaries), or 3 questions of a single one"
        raise ZeroMemError.of("cross-validation", expected, groups, "train without --cross-validate")


def cross_validate(
    config: ZeroMemConfig,
    questions: Sequence[Cached],
    settings: TrainingSettings,
    *,
    control: bool = True,
    folder: Path | None = None,
    told: Callable[[Mapping[str, Any]], None] = lambda fold: None,
) -> dict[str, Any]:
    """Leave each group (a conversation, part of a pool's questions) out in turn; another one stops the training.

    ``control``: beside them the `headroom` of rho, which no training changes.
    """
    groups = list(dict.fromkeys(own.group for own in questions))
    check_folds(len(groups))
    start = ZeroMemPipeline(config).to(questions[0].bank.device).eval()
    names = ("fixed", "learned", *(("oracle_rho", "jitter") if control else ()))
    rows: dict[str, Rows] = {name: {measure: [] for measure in MEASURES} for name in names}
    folds = []
    for number, group in enumerate(groups):
        began = time.perf_counter()
        rest = [other for other in groups if other != group]
        stop = rest[number % len(rest)]
        own = [one for one in questions if one.group == group]
        train = [one for one in questions if one.group not in (group, stop)]
        held_out = [one for one in questions if one.group == stop]
        ranking, epochs = fit(config, train, held_out, settings, folder and folder / f"fold-{number + 1}")
        learned = ranking.pipeline().to(questions[0].bank.device)
        fold: dict[str, Any] = {"left_out": group, "questions": sum(len(one.questions) for one in own)}
        found = {"fixed": joined([measured(start, one) for one in own])}
        found["learned"] = joined([measured(learned, one) for one in own])
        both = [headroom(start, one) for one in own] if control else []
        found |= {name: joined([one[name] for one in both]) for name in names[2:]}
        for name, own_rows in found.items():
            for measure in MEASURES:
                rows[name][measure] += own_rows[measure]
            fold[name] = {measure: float(np.mean(own_rows[measure])) for measure in MEASURES}
        fold |= {"epochs": epochs, "seconds": round(time.perf_counter() - began, 1)}
        folds.append(fold)
        told(fold)
    return {**summary(rows), "folds": folds, "rows": rows}


def summary(rows: Mapping[str, Rows]) -> dict[str, dict[str, float]]:
    """Means of each measure, and the paired bootstrap of what was learned against what was fixed."""
    return {
        measure: {
            **{name: float(np.mean(own[measure])) for name, own in rows.items()},
            **paired_bootstrap(rows["learned"][measure], rows["fixed"][measure]),
        }
        for measure in MEASURES
    }


def joined(parts: Sequence[Rows]) -> Rows:
    return {measure: [value for part in parts for value in part[measure]] for measure in MEASURES}


def means_of(pipeline: ZeroMemPipeline, questions: Sequence[Cached]) -> dict[str, float]:
    rows = joined([measured(pipeline, own) for own in questions])
    return {measure: float(np.mean(rows[measure])) for measure in MEASURES}


def weights_of(config: ZeroMemConfig) -> dict[str, Any]:
    """What the stages weigh, by name, without what is 0."""
    mixes = {
        "prior": config.graph.prior,
        "exact": config.graph.exact,
        "hierarchy": config.hierarchy.weights,
        "calibration": config.calibration.weights,
    }
    numbers = {
        "rho": config.routing.rho,
        **{name: getattr(config.graph, name) for name in ("damping", "decay", "named", "sharpness", "affinity")},
        **{name: getattr(config.fusion, name) for name in ("graph_contrast", "hierarchy_contrast")},
    }
    return {name: {k: v for k, v in mix.to_dict().items() if v} for name, mix in mixes.items()} | numbers
