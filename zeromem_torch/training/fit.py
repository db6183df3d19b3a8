"""The loop: Adam over conversations, early stopping on those held out, resumable after every epoch."""

import copy
import importlib.util
import json
import random
from collections.abc import Iterator, Sequence
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
) -> tuple[Ranking, list[int]]:
    """Train through the stages; returns the ranking and the epochs each stage took.

    With ``refit`` the epochs are found with ``held_out``, and then taken with all questions.
    """
    if not train:
        raise ZeroMemError.of("training", "questions to learn from", "none", "give a data set of several conversations")
    log = Log(folder)
    ranking, epochs = _run(config, train, held_out, settings, log, folder, None)
    if settings.refit and held_out:
        ranking, _ = _run(config, [*train, *held_out], (), settings, log, None, epochs)
    return ranking, epochs


def _run(
    config: ZeroMemConfig,
    train: Sequence[Cached],
    held_out: Sequence[Cached],
    settings: TrainingSettings,
    log: Log,
    folder: Path | None,
    fixed: Sequence[int] | None,
) -> tuple[Ranking, list[int]]:
    with _seeded(settings.seed):
        ranking = new_ranking(config, settings, train[0].batch.vectors.shape[-1]).to(train[0].bank.device)
        ranking.standardise(train)
        state = _Resumed.of(folder, settings)
        took: list[int] = state.took if state else []
        for number, stage in enumerate(settings.stages):
            if state and number < state.stage:
                continue
            own = state if state and number == state.stage else None
            if own:
                ranking.load_state_dict(own.began)
            most = stage.epochs if fixed is None else fixed[number]
            took.append(_stage(ranking, number, stage, most, train, held_out, settings, log, folder, own, list(took)))
    ranking.learn(())
    return ranking, took


class _Resumed:
    """Where a run that was stopped is to go on."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.stage, self.epoch, self.took = told["stage"], told["epoch"], list(told["took"])
        self.began, self.now, self.adam = told["began"], told["now"], told["adam"]
        self.best, self.best_epoch, self.best_state = told["best"], told["best_epoch"], told["best_state"]

    @classmethod
    def of(cls, folder: Path | None, settings: TrainingSettings) -> "_Resumed | None":
        if folder is None or not (folder / RESUME).exists():
            return None
        told = torch.load(folder / RESUME, weights_only=True)
        if told["settings"] != json.dumps(settings.to_dict()):
            expected = f"a folder without {RESUME}, or one made with these settings"
            raise ZeroMemError.of("out", expected, str(folder), "name another folder, or remove that file")
        return cls(told)


def _stage(
    ranking: Ranking,
    number: int,
    stage: Stage,
    most: int,
    train: Sequence[Cached],
    held_out: Sequence[Cached],
    settings: TrainingSettings,
    log: Log,
    folder: Path | None,
    resumed: _Resumed | None,
    took: list[int],
) -> int:
    """Returns the epochs after which the loss on what is held out was best, and leaves the ranking there."""
    ranking.learn(stage.learn)
    losses = loss_of(settings.loss), loss_of(settings.handed_loss)
    began = copy.deepcopy(ranking.state_dict())
    adam = torch.optim.Adam(ranking.learning(), lr=stage.rate)
    best, best_epoch, best_state, first = float("inf"), 0, began, 0
    if resumed:
        ranking.load_state_dict(resumed.now)
        adam.load_state_dict(resumed.adam)
        best, best_epoch, best_state, first = resumed.best, resumed.best_epoch, resumed.best_state, resumed.epoch
    elif held_out:
        best = _held_out(ranking, held_out)
    total = sum(len(own.questions) for own in train)
    bar = tqdm(range(first, most), desc=f"stage {number + 1} of {len(settings.stages)}", unit="epoch", disable=None)
    for epoch in bar:
        if held_out and epoch - best_epoch >= stage.patience:
            break
        ranking.gate = settings.gate * 0.5**epoch
        order = random.Random(1000 * settings.seed + epoch).sample(range(len(train)), len(train))
        spent = 0.0
        for place in order:
            adam.zero_grad()
            own = train[place]
            data = loss_on(ranking, own, losses) / max(1, len(own.questions))
            torch.autograd.backward(data + stage.pull / total * ranking.away())
            adam.step()
            spent += float(data.detach()) * len(own.questions)
        with torch.no_grad():
            ranking.router.rho.clamp_(0, 1)
        shown = {"loss": spent / total}
        if held_out:
            shown["held out"] = now = _held_out(ranking, held_out)
            if now < best:
                best, best_epoch, best_state = now, epoch + 1, copy.deepcopy(ranking.state_dict())
        bar.set_postfix(shown)
        log.write(100 * number + epoch, stage=number, epoch=epoch, **shown)
        if folder is not None:
            held = {"began": began, "now": ranking.state_dict(), "adam": adam.state_dict(), "best_state": best_state}
            told = {"stage": number, "epoch": epoch + 1, "took": took, "best": best, "best_epoch": best_epoch}
            torch.save({**told, **held, "settings": json.dumps(settings.to_dict())}, folder / RESUME)
    ranking.gate = 0.0
    if not held_out:
        return most
    ranking.load_state_dict(best_state)
    return best_epoch


@torch.no_grad()
def _held_out(ranking: Ranking, held_out: Sequence[Cached]) -> float:
    total = sum(float(loss_on(ranking, own, JUDGES)) for own in held_out)
    return total / max(1, sum(len(own.questions) for own in held_out))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield
