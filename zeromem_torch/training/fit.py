"""The loop: Adam over conversations, early stopping on those held out, resumable after every epoch."""

import copy
import hashlib
import importlib.util
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.errors import ZeroMemError
from zeromem_torch.routing.router import LearnedRouter, made
from zeromem_torch.training.cache import Cached
from zeromem_torch.training.losses import ApproximateRecall, ApproximateRecallAtTokens, loss_of
from zeromem_torch.training.ranking import Ranking
from zeromem_torch.training.settings import Stage, TrainingSettings

RESUME, LOG = "training.pt", "log.jsonl"
Losses = tuple[nn.Module, nn.Module]  # of M(q)'s scores, and of R(q)'s
JUDGES: Losses = ApproximateRecall(5, scale=100.0), ApproximateRecallAtTokens(512, scale=100.0)
"""What stops the training, whatever it makes small: nearly the measures themselves."""


class Log:
    """One line an epoch in ``log.jsonl``, and for TensorBoard where it is installed; without a folder, nowhere."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.board: Any = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(folder))

    def write(self, step: int, **values: Any) -> None:
        if self.folder is None:
            return
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, step)
            self.board.flush()


def new_ranking(config: ZeroMemConfig, settings: TrainingSettings, dim: int) -> Ranking:
    """With the rule router's behaviour, to begin with."""
    spec = {"features": settings.features, "bonus": settings.bonus, "mixes": settings.mixes, "walk": settings.walk}
    router = made(settings.router, {"rho": config.routing.rho, "dim": dim, **spec})
    assert isinstance(router, LearnedRouter)
    return Ranking(config, router, ())


def loss_on(ranking: Ranking, own: Cached, losses: Losses) -> Tensor:
    """Summed over questions: half of it on M(q)'s scores, half on R(q)'s."""
    scores = ranking(own)
    parts = scores.fused, scores.ranked
    both = [loss(part, own.gold, own.bank.unit_tokens).sum() for loss, part in zip(losses, parts, strict=True)]
    return torch.stack(both).mean()


def fit(
    config: ZeroMemConfig,
    train: Sequence[Cached],
    held_out: Sequence[Cached],
    settings: TrainingSettings,
    folder: Path | None = None,
    *,
    told: Callable[[str], None] = lambda line: None,
) -> tuple[Ranking, list[int]]:
    """Train through the stages; returns the ranking and the epochs each stage took.

    With ``refit`` the epochs are found with ``held_out``, and then taken with all questions. ``told`` is what the
    folder held of an earlier run.
    """
    if not train:
        raise ZeroMemError.of("training", "questions to learn from", "none", "give a data set of several conversations")
    log = Log(folder)
    with _seeded(settings.seed):
        run = _Run(config, train, held_out, settings, log, folder)
        ranking, epochs = run.through()
    if run.went_on is not None:
        stage, epoch = run.went_on
        where = f"went on behind epoch {epoch} of stage {stage + 1}"
        told(where if run.trained else "was trained there already; nothing was trained again")
    if settings.refit and held_out:
        with _seeded(settings.seed):
            ranking, _ = _Run(config, [*train, *held_out], (), settings, log).through(epochs)
    return ranking, epochs


class _Run:
    """One pass through the stages; with a folder, it goes on where one of the same kind was stopped there."""

    def __init__(
        self,
        config: ZeroMemConfig,
        train: Sequence[Cached],
        held_out: Sequence[Cached],
        settings: TrainingSettings,
        log: Log,
        folder: Path | None = None,
    ) -> None:
        self.train, self.held_out, self.settings, self.log, self.folder = train, held_out, settings, log, folder
        self.kind = {"settings": settings.to_dict(), "configuration and questions": _digest(config, train, held_out)}
        self.ranking = new_ranking(config, settings, train[0].batch.vectors.shape[-1]).to(train[0].bank.device)
        self.ranking.standardise(train)
        self.took: list[int] = []
        self.went_on: tuple[int, int] | None = None  # stage and epoch after which an earlier run was stopped
        self.trained = 0  # epochs of this one

    def through(self, fixed: Sequence[int] | None = None) -> tuple[Ranking, list[int]]:
        """All stages, each of so many epochs as it needs, or of as many as are ``fixed``."""
        stopped = self._stopped()
        self.took = list(stopped["took"]) if stopped else []
        self.went_on = (stopped["stage"], stopped["epoch"]) if stopped else None
        for number in range(len(self.took), len(self.settings.stages)):
            own = stopped if stopped and number == stopped["stage"] else None
            if own:
                self.ranking.load_state_dict(own["began"])
            most = self.settings.stages[number].epochs if fixed is None else fixed[number]
            self.took.append(self._stage(number, most, own))
        self.ranking.learn(())
        return self.ranking, self.took

    def _stage(self, number: int, most: int, stopped: Mapping[str, Any] | None) -> int:
        """Returns the epochs after which the loss on what is held out was best, and leaves the ranking there."""
        ranking, held_out, stage = self.ranking, self.held_out, self.settings.stages[number]
        ranking.learn(stage.learn)
        began = copy.deepcopy(ranking.state_dict())
        adam = torch.optim.Adam(ranking.learning(), lr=stage.rate)
        best, best_epoch, best_state, first = float("inf"), 0, began, 0
        if stopped:
            ranking.load_state_dict(stopped["now"])
            adam.load_state_dict(stopped["adam"])
            best, best_epoch, best_state = stopped["best"], stopped["best_epoch"], stopped["best_state"]
            first = stopped["epoch"]
        elif held_out:
            best = _held_out(ranking, held_out)
        shown_as = f"stage {number + 1} of {len(self.settings.stages)}"
        bar = tqdm(range(first, most), desc=shown_as, unit="epoch", disable=None)
        for epoch in bar:
            if held_out and epoch - best_epoch >= stage.patience:
                break
            shown = {"loss": self._epoch(epoch, stage, adam)}
            if held_out:
                shown["held out"] = now = _held_out(ranking, held_out)
                if now < best:
                    best, best_epoch, best_state = now, epoch + 1, copy.deepcopy(ranking.state_dict())
            bar.set_postfix(shown)
            self.log.write(100 * number + epoch, stage=number, epoch=epoch, **shown)
            state = {"began": began, "now": ranking.state_dict(), "adam": adam.state_dict(), "best_state": best_state}
            self._keep({"stage": number, "epoch": epoch + 1, "best": best, "best_epoch": best_epoch, **state})
        ranking.gate = 0.0
        if not held_out:
            return most
        ranking.load_state_dict(best_state)
        return best_epoch

    def _epoch(self, epoch: int, stage: Stage, adam: torch.optim.Adam) -> float:
        """A step for each conversation; returns the mean loss of a question."""
        self.trained += 1
        ranking, settings = self.ranking, self.settings
        losses = loss_of(settings.loss), loss_of(settings.handed_loss)
        ranking.gate = settings.gate * 0.5**epoch
        total, spent = sum(len(own.questions) for own in self.train), 0.0
        for place in random.Random(1000 * settings.seed + epoch).sample(range(len(self.train)), len(self.train)):
            adam.zero_grad()
            own = self.train[place]
            data = loss_on(ranking, own, losses) / max(1, len(own.questions))
            torch.autograd.backward(data + stage.pull / total * ranking.away())
            adam.step()
            spent += float(data.detach()) * len(own.questions)
        with torch.no_grad():
            ranking.router.rho.clamp_(0, 1)
        return spent / total

    def _keep(self, state: Mapping[str, Any]) -> None:
        if self.folder is not None:
            beside = self.folder / f"{RESUME}.new"
            torch.save({**state, "took": self.took, "kind": json.dumps(self.kind)}, beside)
            os.replace(beside, self.folder / RESUME)

    def _stopped(self) -> dict[str, Any] | None:
        """Where an earlier run is to go on."""
        if self.folder is None or not (self.folder / RESUME).exists():
            return None
        told: dict[str, Any] = torch.load(self.folder / RESUME, weights_only=True)
        before = json.loads(told["kind"])
        for what, now in json.loads(json.dumps(self.kind)).items():
            if before[what] != now:
                expected = f"a folder without {RESUME}, or one made with the same {what}"
                raise ZeroMemError.of("out", expected, str(self.folder), "name another folder, or remove that file")
        return told


def _digest(config: ZeroMemConfig, *parts: Sequence[Cached]) -> str:
    told = [[[own.group, [q.text for q in own.questions]] for own in part] for part in parts]
    return hashlib.sha256(json.dumps([config.to_dict(), told]).encode()).hexdigest()


@torch.no_grad()
def _held_out(ranking: Ranking, held_out: Sequence[Cached]) -> float:
    total = sum(float(loss_on(ranking, own, JUDGES)) for own in held_out)
    return total / max(1, sum(len(own.questions) for own in held_out))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield
