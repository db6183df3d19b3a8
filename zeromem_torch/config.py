"""One frozen record per stage, and TOML files that hold only what differs from the defaults.

What the paper fixes is marked so; every other field is a choice it leaves open, set by a run on the tuning data that
`bench/results/EXPERIMENTS.md` records. Constructors of the stages take plain values, never the whole config.
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints


@dataclass(frozen=True)
class EncoderConfig:
    """What turns text into vectors."""

    name: str = "minilm"  # "minilm" | "bge-m3" (the paper's) | any folder or hub name of a sentence encoder


@dataclass(frozen=True)
class SubstrateConfig:
    """Eqs. 3-5: what is built when traces arrive."""

    entities: str = "auto"  # "rules" | "spacy" | "spacy-chunks"; auto: spacy where somebody speaks, else rules
    lexicon: str = "bm25"  # "learned": term weights by the encoder's sparse head, which BGE-M3 has
    window: int = 3  # turns
    episode: int = 8  # turns, about
    k1: float = 0.9
    b: float = 0.4
    stop_words: bool = True
    stemmer: str = "english"  # a Snowball algorithm; "" = none
    rarity: float = 2.0  # power of an entity's idf on its edges; 0 = the paper's Eq. 4
    title_edge: float = 10.0  # an entity that is a document's title leads there so much more strongly
    link: float = 1.0  # an edge from a document to one whose title it names; naming an entity shares 1
    adjacency: float = 0.1  # share of a turn's mass that goes to its neighbours

    def __post_init__(self) -> None:
        _one_of("entities", self.entities, ("auto", "rules", "spacy", "spacy-chunks"))
        _one_of("lexicon", self.lexicon, ("bm25", "learned"))
        _at_least(1, window=self.window, episode=self.episode)
        _at_least(0, k1=self.k1, rarity=self.rarity, title_edge=self.title_edge, link=self.link)
        _share(b=self.b, adjacency=self.adjacency)


@dataclass(frozen=True)
class SignalWeights:
    """What each signal of a unit weighs in a score; the signals are described in `retrieval/signals.py`."""

    dense_turn: float = 0.0
    dense_window: float = 0.0
    lexical_turn: float = 0.0
    lexical_window: float = 0.0
    lexical_episode: float = 0.0
    phrase: float = 0.0
    maxsim_turn: float = 0.0
    maxsim_window: float = 0.0
    subject: float = 0.0
    date: float = 0.0
    spoken_date: float = 0.0
    holds_time: float = 0.0
    holds_place: float = 0.0
    holds_person: float = 0.0
    holds_title: float = 0.0
    title: float = 0.0
    asks: float = 0.0
    answers: float = 0.0
    opens: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


_SHARED = SignalWeights(
    title=0.3,
    dense_window=0.2,
    lexical_window=0.1,
    phrase=0.1,
    subject=0.25,
    date=0.5,
    spoken_date=0.1,
    holds_time=0.2,
    holds_place=0.2,
    holds_person=0.2,
    holds_title=0.2,
    asks=-0.05,
    answers=0.05,
    opens=0.05,
)


@dataclass(frozen=True)
class SignalsConfig:
    """How signals are computed."""

    exhaustive: int = 2048  # units up to which late interaction compares a whole memory
    candidates: int = 256  # units it compares in a larger one
    date_reach: float = 15.0  # days at which a unit's nearness to a date asked about is 0

    def __post_init__(self) -> None:
        _at_least(1, candidates=self.candidates, date_reach=self.date_reach)
        _at_least(0, exhaustive=self.exhaustive)


@dataclass(frozen=True)
class RoutingConfig:
    """Eq. 7."""

    rho: float = 0.6  # the paper's: weight of the primary view
    router: str = "rule"  # or a name in `routing.router.ROUTERS`
    views: str = "both"  # "both" | "graph" | "hierarchy"

    def __post_init__(self) -> None:
        _one_of("views", self.views, ("both", "graph", "hierarchy"))
        _share(rho=self.rho)


@dataclass(frozen=True)
class GraphConfig:
    """Eqs. 8-10: the entity-context graph as a view."""

    prior: SignalWeights = field(
        default_factory=lambda: dataclasses.replace(_SHARED, maxsim_turn=0.5, maxsim_window=0.25)
    )
    exact: SignalWeights = field(default_factory=SignalWeights)  # refinement of the ranking by exact matches
    damping: float = 0.6  # the paper's gamma
    hops: int = 2
    decay: float = 0.2
    name: float = 0.05  # activation of a known entity that the query names; one that is a title starts with 1
    sharpness: float = 12.0  # power of the prior
    affinity: float = 2.0  # power with which a step prefers units that answer the question without its names
    named: float = 0.2  # mass that the question's own entities pass on

    def __post_init__(self) -> None:
        _share(damping=self.damping, decay=self.decay, named=self.named)
        _at_least(0, hops=self.hops, name=self.name, affinity=self.affinity)
        _at_least(0.1, sharpness=self.sharpness)


@dataclass(frozen=True)
class HierarchyConfig:
    """Eq. 11."""

    weights: SignalWeights = field(
        default_factory=lambda: dataclasses.replace(_SHARED, maxsim_turn=0.2, maxsim_window=0.55)
    )
    view: str = "hierarchy"  # or a name in `retrieval.hierarchy.VIEWS`
    keep_episodes: int = 0  # hard pruning to the best episodes; 0 keeps all

    def __post_init__(self) -> None:
        _at_least(0, keep_episodes=self.keep_episodes)


@dataclass(frozen=True)
class FusionConfig:
    """Eqs. 12-13. With a contrast above 1 a view speaks for the few units it is sure of, the other for the rest."""

    graph_contrast: float = 4.0  # power of the view's score before mixing; the paper's fusion is 1
    hierarchy_contrast: float = 10.0  # higher, for its scores are flatter

    def __post_init__(self) -> None:
        _at_least(0.1, graph_contrast=self.graph_contrast, hierarchy_contrast=self.hierarchy_contrast)


@dataclass(frozen=True)
class ClosureConfig:
    """Eq. 14."""

    neighbour: float = 0.05  # support of a neighbour that leans on a main unit, or is leant on
    graph: float = 0.02  # support along the graph
    most: int = 5  # units that closure may add to the main evidence

    def __post_init__(self) -> None:
        _at_least(0, most=self.most, neighbour=self.neighbour, graph=self.graph)


@dataclass(frozen=True)
class CalibrationConfig:
    """Eq. 15."""

    top_k: int = 5  # the paper's
    weights: SignalWeights = field(default_factory=lambda: SignalWeights(subject=0.05, dense_window=0.1))

    def __post_init__(self) -> None:
        _at_least(1, top_k=self.top_k)


@dataclass(frozen=True)
class ComputeConfig:
    """How it is computed; what is found does not depend on it, apart from rounding."""

    backend: str = "auto"  # the fastest that runs here; "torch" = the definitions alone
    states: str = "stored"  # what token states are kept in: as encoded, or "float32" | "float16" | "int8"

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, ("auto", "torch"))
        _one_of("states", self.states, ("stored", "float32", "float16", "int8"))


@dataclass(frozen=True)
class ZeroMemConfig:
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    substrate: SubstrateConfig = field(default_factory=SubstrateConfig)
    signals: SignalsConfig = field(default_factory=SignalsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    hierarchy: HierarchyConfig = field(default_factory=HierarchyConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    closure: ClosureConfig = field(default_factory=ClosureConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a file of differences; an unknown table or key is an error that names its nearest neighbour."""
        try:
            tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # neither TOML nor UTF-8
            raise ValueError(f"{path}: expected TOML; {error}") from error
        return cls.from_dict(tables, str(path))

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], source: str = "config") -> Self:
        changed: Self = _changed(cls(), tables, source)
        return changed

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _changed(default: Any, values: Mapping[str, Any], where: str) -> Any:
    """The default with some values changed: a table inside it keeps what is not named."""
    types = get_type_hints(type(default))
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1, cutoff=0.0)[0]
            known = ", ".join(types)
            raise ValueError(f"{where}: unknown key {key!r}; the nearest known one is {near!r} (known: {known})")
        kind = types[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}: {key} is a table, got {value!r}; write [{key}] and its keys below")
            given[key] = _changed(getattr(default, key), value, f"{where}: [{key}]")
        else:
            value = float(value) if kind is float and type(value) is int else value
            if type(value) is not kind:  # a bool is no int here
                raise ValueError(f"{where}: {key} must be {kind.__name__}, got {value!r}")
            given[key] = value
    try:
        return dataclasses.replace(default, **given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _at_least(least: float, **values: float) -> None:
    for name, value in values.items():
        if not least <= value < math.inf:  # nan is neither
            raise ValueError(f"{name} must be at least {least}, and finite, got {value}")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")
