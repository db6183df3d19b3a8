"""What a training run does, as a typed record; a TOML file holds only what differs."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from zeromem_torch.errors import ZeroMemError, nearest
from zeromem_torch.retrieval.signals import KINDS
from zeromem_torch.routing.features import DEFAULT
from zeromem_torch.routing.router import ROUTERS, LearnedRouter
from zeromem_torch.training.losses import LOSSES

BONUS = (
    "dense_turn", "dense_window", "lexical_turn", "lexical_window", "lexical_episode", "phrase", "maxsim_turn",
    "maxsim_window", "rest", "subject", "date", "spoken_date", *(f"holds_{kind}" for kind in KINDS), "title", "asks",
    "answers", "opens",
)  # fmt: skip
"""Signals whose weight a router may shift for a query."""
COMMON = ("hierarchy", "calibration", "graph_contrast", "hierarchy_contrast", "rho")
"""What all questions share, outside the walk."""


@dataclass(frozen=True)
class Stage:
    """What is learned together, and how."""

    learn: tuple[str, ...]
    epochs: int = 40
    rate: float = 0.01  # of Adam
    pull: float = 20.0  # of the squared distance from where the stage began, against the summed loss of all questions
    patience: int = 8  # epochs without a better loss on what is held out


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
        learned = [name for name, router in ROUTERS.items() if issubclass(router, LearnedRouter)]
        for what, value, known in (
            ("loss", self.loss, list(LOSSES)),
            ("loss", self.handed_loss, list(LOSSES)),
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
        except tomllib.TOMLDecodeError as error:
            raise ZeroMemError.of("settings", "TOML", str(path), str(error)) from error

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Self:
        made: Self = _record(cls, {**table, **({"stages": _stages(table["stages"])} if "stages" in table else {})})
        return made

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _stages(tables: Any) -> tuple[Stage, ...]:
    return tuple(one if isinstance(one, Stage) else _record(Stage, one) for one in tables)


def _record(kind: Any, table: dict[str, Any]) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    for key in table:
        if key not in known:
            raise ZeroMemError.of("settings", f"keys of {', '.join(known)}", key, f"{nearest(key, known)}rename it")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
