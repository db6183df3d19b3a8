"""What a learned router knows of a query: one number, or a few, per feature and query.

A feature is a function of `Asked` and a line in a router's list; `feature` registers it. Features of the stage "query"
are there before a view has ranked anything and may change the views; those of "views" look at what the views say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from zeromem_torch.bank import MemoryBank, segment_max, segment_sum, segment_topk
from zeromem_torch.errors import ZeroMemError, nearest
from zeromem_torch.routing.queries import Asked as Named
from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.substrate.kinds import AnswerType

STAGES = ("query", "views")
TOP = 5  # units at the top of a view, as its features see it


@dataclass(frozen=True)
class Asked:
    """A query batch, what is known of each unit, and, once they are there, both views in [0, 1]."""

    batch: QueryBatch
    bank: MemoryBank
    signals: Mapping[str, Float[Tensor, "slots units"]]
    graph: Float[Tensor, "slots units"] | None = None
    hierarchy: Float[Tensor, "slots units"] | None = None


@dataclass(frozen=True)
class Feature:
    of: Callable[[Asked], Tensor]  # [slots, memories] or [slots, memories, width]
    stage: str
    width: int  # 0: the dimension of the encoder


FEATURES: dict[str, Feature] = {}
DEFAULT = (
    "relational", "local", "kinds", "dated", "subject", "titles", "entities", "rarity", "words", "cosine",
    "graph_gap", "hierarchy_gap", "graph_mean", "hierarchy_mean", "agreement",
)  # fmt: skip


def feature(name: str, *, stage: str = "query", width: int = 1) -> Callable[[Callable[[Asked], Tensor]], Feature]:
    """Register a function as the feature ``name``."""
    if stage not in STAGES:
        raise ZeroMemError.of("feature", f"a stage of {', '.join(STAGES)}", stage, "name one of these")

    def register(of: Callable[[Asked], Tensor]) -> Feature:
        FEATURES[name] = Feature(of, stage, width)
        return FEATURES[name]

    return register


def checked(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in FEATURES:
            advice = f"{nearest(name, FEATURES)}register it with routing.features.feature"
            raise ZeroMemError.of("features", f"some of {', '.join(FEATURES)}", name, advice)
    return tuple(names)


def width_of(names: Sequence[str], dim: int) -> int:
    return sum(FEATURES[name].width or dim for name in names)


def gathered(names: Sequence[str], asked: Asked) -> Float[Tensor, "slots memories width"]:
    """The features side by side; nothing learns through them."""
    found = [FEATURES[name].of(asked).detach() for name in names]
    columns = [own if own.dim() == 3 else own[..., None] for own in found]
    like = asked.batch.relational
    return torch.cat([column.to(like.dtype) for column in columns], dim=2) if columns else like[..., None][..., :0]


@feature("relational")
def _(asked: Asked) -> Tensor:
    return asked.batch.relational


@feature("local")
def _(asked: Asked) -> Tensor:
    return asked.batch.local


@feature("kinds", width=len(AnswerType))
def _(asked: Asked) -> Tensor:
    """Answer types, a column each."""
    bits = torch.tensor([int(kind) for kind in AnswerType], device=asked.batch.kinds.device)
    return (asked.batch.kinds[..., None] & bits != 0).float()


@feature("dated")
def _(asked: Asked) -> Tensor:
    return (asked.batch.date_first <= asked.batch.date_last).any(-1).float()


@feature("subject")
def _(asked: Asked) -> Tensor:
    return (asked.batch.subject >= 0).float()


@feature("titles")
def _(asked: Asked) -> Tensor:
    """Titles that the query names, as ln(1 + n)."""
    return _counted(asked.batch.titles, asked, "units")


@feature("entities")
def _(asked: Asked) -> Tensor:
    """Known entities that the query names, as ln(1 + n)."""
    return _counted(asked.batch.entities, asked, "entities")


@feature("rarity")
def _(asked: Asked) -> Tensor:
    """The rarest word of the query in its memory, by idf."""
    weights = asked.batch.state_weights
    return weights.amax(-1) if weights.shape[-1] else weights.sum(-1)


@feature("words")
def _(asked: Asked) -> Tensor:
    """Tokens of the query that say something, as ln(1 + n)."""
    return (asked.batch.state_weights > 0).sum(-1).float().log1p()


@feature("cosine")
def _(asked: Asked) -> Tensor:
    """How near the nearest unit is."""
    units = asked.bank.axes["units"]
    return segment_max(asked.signals["cosine"], units.segment, units.segments, empty=0.0)


@feature("embedding", width=0)
def _(asked: Asked) -> Tensor:
    return asked.batch.vectors


def _of_view(name: str, of: Callable[[Tensor, Asked], Tensor]) -> None:
    for view in ("graph", "hierarchy"):

        def own(asked: Asked, view: str = view) -> Tensor:
            scores: Tensor | None = getattr(asked, view)
            if scores is None:
                raise ZeroMemError.of(f"{view}_{name}", "a view's scores", None, 'use it at the stage "views"')
            return of(scores, asked)

        feature(f"{view}_{name}", stage="views")(own)


def _gap(scores: Tensor, asked: Asked) -> Tensor:
    """From the best unit to the last of the top."""
    best = _top(scores, asked)
    last = best.amax(-1)
    rows = best.clamp(min=0)
    value = scores.gather(1, rows.flatten(1)).view(rows.shape).masked_fill(best < 0, 1)
    return torch.where(last >= 0, 1 - value.amin(-1), 0)


def _mean(scores: Tensor, asked: Asked) -> Tensor:
    """How much of its range a view gives to all units: low where it is sure of a few."""
    units = asked.bank.axes["units"]
    return segment_sum(scores, units.segment, units.segments) / units.bounds.diff().clamp(min=1)


_of_view("gap", _gap)
_of_view("mean", _mean)


@feature("agreement", stage="views")
def _(asked: Asked) -> Tensor:
    """The share of one view's top that the other has there too."""
    assert asked.graph is not None
    assert asked.hierarchy is not None
    first, second = _top(asked.graph, asked), _top(asked.hierarchy, asked)
    same = (first[..., :, None] == second[..., None, :]) & (first >= 0)[..., None]
    return same.any(-1).float().mean(-1)


def _top(scores: Tensor, asked: Asked) -> Tensor:
    return segment_topk(scores, asked.bank.axes["units"], TOP)


def _counted(named: Named, asked: Asked, axis: str) -> Tensor:
    rows = asked.bank.axes[axis]
    there = named.dense(asked.batch.slots, rows.size).clamp(max=1).ceil()
    return segment_sum(there, rows.segment, rows.segments).log1p()
