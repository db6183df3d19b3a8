"""One frozen record per stage, the paper's values as defaults, and TOML files that hold only what differs.

What the paper fixes is marked so; every other field is a choice it leaves open, set by a run on the tuning data that
`bench/results/EXPERIMENTS.md` records. Constructors of the stages take plain values, never the whole config.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints


@dataclass(frozen=True)
class SubstrateConfig:
    """Eqs. 3-5: what is built when traces arrive."""

    entities: str = "rules"  # "rules" | "spacy" | "spacy-chunks"
    window: int = 3  # turns
    episode: int = 8  # turns, about
    k1: float = 0.9
    b: float = 0.4
    stop_words: bool = True
    stemmer: str | None = "english"
    adjacency: float = 0.0  # weight of an edge between neighbouring turns; 1.0 takes 2/3 of the walk's mass
    title_links: float = 1.0  # weight of an edge from a document to one whose title it names


@dataclass(frozen=True)
class RoutingConfig:
    """Eqs. 6-7."""

    rho: float = 0.6  # the paper's: weight of the primary view


@dataclass(frozen=True)
class GraphConfig:
    """Eqs. 8-10: the entity-context graph as a view."""

    damping: float = 0.6  # the paper's gamma
    hops: int = 2
    align: float = 0.8  # a query entity is aligned to its nearest graph entity from this cosine on
    activation: float = 0.3  # share of the reset that entities get; the prior gets the rest
    sharpness: float = 8.0  # power of the prior


@dataclass(frozen=True)
class HierarchyConfig:
    """Eq. 11: weights of a unit's signals."""

    dense: float = 0.5
    lexical: float = 0.5


@dataclass(frozen=True)
class ClosureConfig:
    """Eq. 14."""

    neighbours: int = 1


@dataclass(frozen=True)
class CalibrationConfig:
    """Eq. 15."""

    top_k: int = 5  # the paper's


@dataclass(frozen=True)
class ZeroMemConfig:
    substrate: SubstrateConfig = field(default_factory=SubstrateConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    hierarchy: HierarchyConfig = field(default_factory=HierarchyConfig)
    closure: ClosureConfig = field(default_factory=ClosureConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a file of differences; an unknown table or key is an error that names its nearest neighbour."""
        with open(path, "rb") as file:
            return cls.from_dict(tomllib.load(file), str(path))

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], source: str = "config") -> Self:
        return _build(cls, tables, source)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _build(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    types = get_type_hints(cls)
    given = {}
    for key, value in values.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where}: unknown key {key!r}; the nearest known one is {near!r} (known: {', '.join(types)})")
        kind = types[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}: {key} is a table, got {value!r}; write [{key}] and its keys below")
            given[key] = _build(kind, value, f"{where}: [{key}]")
        else:
            value = float(value) if kind is float and type(value) is int else value
            if not isinstance(value, kind):
                raise ValueError(f"{where}: {key} must be {getattr(kind, '__name__', kind)}, got {value!r}")
            given[key] = value
    return cls(**given)
