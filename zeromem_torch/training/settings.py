"""What a training run does, as a typed record; a TOML file holds only what differs."""

import dataclasses
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from zeromem_torch.errors import ZeroMemError, nearest
from zeromem_torch.retrieval.signals import KINDS
from zeromem_torch.routing.features import DEFAULT, checked
from zeromem_torch.routing.router import ACTIVATION, ROUTERS, LearnedRouter
from zeromem_torch.training.losses import LOSSES
from zeromem_torch.training.ranking import LEARNABLE, NAMES

BONUS = (
    "dense_turn", "dense_window", "lexical_turn", "lexical_window", "lexical_episode", "phrase", "maxsim_turn",
    "maxsim_window", "rest", "subject", "date", "spoken_date", *(f"holds_{kind}" for kind in KINDS), "title", "asks",
    "answers", "opens",
)  # fmt: skip
"""Signals whose weight a router may shift for a query."""
SIGNALS = (*NAMES, "rest", "cosine")
"""Signals there are."""
COMMON = ("hierarchy", "calibration", "graph_contrast", "hierarchy_contrast", "rho")
"""What all questions share, outside the walk."""


def _names(what: str, value: Any, known: Sequence[str] | None = None) -> Sequence[str]:
    """A list of names, each a known one."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ZeroMemError.of(what, "a list of names", value, f'write {what} = ["...", "..."]')
    for name in value:
        if known is not None and name not in known:
            advice = f"{nearest(name, known)}choose among these"
            raise ZeroMemError.of(what, f"some of {', '.join(known)}", name, advice)
    found: Sequence[str] = value
    return found


def _number(what: str, value: Any, kind: type, expected: str, holds: Callable[[Any], bool]) -> None:
    wanted = (int, float) if kind is float else (int,)
    if type(value) not in wanted or not math.isfinite(value) or not holds(value):  # a bool is no int here
        raise ZeroMemError.of(what, expected, value, "correct it")


@dataclass(frozen=True)
class Stage:
    """What is learned together, and how."""

    learn: tuple[str, ...]
    epochs: int = 40
    rate: float = 0.01  # of Adam
    pull: float = 20.0  # of the squared distance from where the stage began, against the summed loss of all questions
    patience: int = 8  # epochs without a better loss on what is held out

    def __post_init__(self) -> None:
        if not _names("learn", self.learn, LEARNABLE):
            raise ZeroMemError.of("learn", f"some of {', '.join(LEARNABLE)}", [], "name at least one")
        for name in ("epochs", "patience"):
            _number(name, getattr(self, name), int, "a whole number of at least 1", lambda value: value >= 1)
        _number("rate", self.rate, float, "a number above 0", lambda value: value > 0)
        _number("pull", self.pull, float, "a number of at least 0", lambda value: value >= 0)


@dataclass(frozen=True)
class TrainingSettings:
    """First the mixing weights that all queries share, then what the router gives each query."""

    stages: tuple[Stage, ...] = (
        Stage((*COMMON, "level"), rate=0.005),
        Stage(("route",), epochs=20, patience=5),
    )
    loss: str = "recall@5"  # of M(q)
    handed_loss: str = "recall@512tok"  # of R(q)
    router: str = "learned"
    features: tuple[str, ...] = DEFAULT
    bonus: tuple[str, ...] = BONUS
    mixes: tuple[str, ...] = ()
    walk: bool = False  # gamma and hop decay of each query too
    refit: bool = False  # once the epochs are known, train again with what was held out
    gate: float = 0.1  # first temperature of soft pruning, where the configuration prunes; halved every epoch
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.stages or not all(isinstance(stage, Stage) for stage in self.stages):
            raise ZeroMemError.of("stages", "at least one stage", self.stages, "write [[stages]] and its keys below")
        checked(_names("features", self.features))
        _names("bonus", self.bonus, SIGNALS)
        _names("mixes", self.mixes, (*SIGNALS, ACTIVATION))
        for name in ("walk", "refit"):
            if not isinstance(getattr(self, name), bool):
                raise ZeroMemError.of(name, "true or false", getattr(self, name), "write one of these")
        for name, key, there in (("walk", "walk = true", self.walk), ("mix", "mixes = [...]", self.mixes)):
            if not there and any(name in stage.learn for stage in self.stages):
                raise ZeroMemError.of("learn", "what the router has", name, f"write {key} too, or leave it out")
        _number("gate", self.gate, float, "a number of at least 0", lambda value: value >= 0)
        _number("seed", self.seed, int, "a whole number of at least 0", lambda value: value >= 0)
        learned = [name for name, router in ROUTERS.items() if issubclass(router, LearnedRouter)]
        for what, value, known in (
            ("loss", self.loss, list(LOSSES)),
            ("handed_loss", self.handed_loss, list(LOSSES)),
            ("router", self.router, learned),
        ):
            if value not in known:
                advice = f"{nearest(value, known)}choose among these"
                raise ZeroMemError.of(what, f"one of {', '.join(known)}", value, advice)

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ZeroMemError.of("settings", "a TOML file", str(path), f"check the path ({error})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ZeroMemError.of("settings", "TOML", str(path), str(error)) from error

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Self:
        made: Self = _record(cls, {**table, **({"stages": _stages(table["stages"])} if "stages" in table else {})})
        return made

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _stages(tables: Any) -> tuple[Stage, ...]:
    if not isinstance(tables, list | tuple) or not all(isinstance(one, dict | Stage) for one in tables):
        raise ZeroMemError.of("stages", "tables", tables, "write [[stages]] and its keys below")
    made = []
    for number, one in enumerate(tables, start=1):
        try:
            made.append(one if isinstance(one, Stage) else _record(Stage, one))
        except ZeroMemError as error:
            raise ZeroMemError(f"stage {number}, {error}") from error
    return tuple(made)


def _record(kind: Any, table: dict[str, Any]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in table:
        if key not in fields:
            raise ZeroMemError.of("settings", f"keys of {', '.join(fields)}", key, f"{nearest(key, fields)}rename it")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise ZeroMemError.of(name, "a list of what is learned", None, f"write {name} = [...]")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
