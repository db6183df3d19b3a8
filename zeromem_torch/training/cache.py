"""Questions with everything about them that no weight changes: an epoch then costs two sums and a walk."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from zeromem_torch.bank import MemoryBank
from zeromem_torch.errors import ZeroMemError
from zeromem_torch.evaluation.datasets import Dataset, Question
from zeromem_torch.library import ZeroMem
from zeromem_torch.retrieval.signals import Signals
from zeromem_torch.routing.queries import QueryBatch

AT_ONCE = 200  # questions of a boundary that are held together
PARTS = 5  # into which the questions of a single pool are parted


@dataclass(frozen=True)
class Cached:
    """Questions of one boundary. ``group`` is what a fold leaves out: the boundary, or a part of a pool's questions."""

    group: str
    questions: Sequence[Question]
    batch: QueryBatch
    bank: MemoryBank
    signals: Signals
    gold: Bool[Tensor, "slots units"]
    ids: Sequence[str]  # of the traces, by unit
    graph: Float[Tensor, "slots units"]  # the graph view with the weights of the configuration


def cached(memory: ZeroMem, data: Dataset, *, seed: int = 0) -> list[Cached]:
    """One forward of all that is dear, for each question with evidence."""
    asked = usable(data)
    found = []
    groups = grouped(asked, seed)
    with tqdm(total=len(asked), desc="signals", unit="question", disable=None) as bar, torch.no_grad():
        for group, own in groups.items():
            for start in range(0, len(own), AT_ONCE):
                some = own[start : start + AT_ONCE]
                found += _cached(memory, group, some)
                bar.update(len(some))
    return found


def usable(data: Dataset) -> list[Question]:
    """The questions to learn from: those with evidence, without any of which there is nothing to learn."""
    asked = [question for question in data.questions if question.evidence]
    if not asked:
        got = f"{len(data.questions)} without any"
        raise ZeroMemError.of("questions", "at least one with evidence", got, f"check the file of {data.name}")
    return asked


def grouped(questions: Sequence[Question], seed: int) -> dict[str, list[Question]]:
    """By boundary; questions of a single boundary are shuffled and parted."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.boundary, []).append(question)
    if len(groups) > 1:
        return groups
    (own,) = groups.values()
    own = random.Random(seed).sample(own, len(own))
    parts = min(PARTS, len(own))
    return {f"part {i + 1}": own[i::parts] for i in range(parts)}


def _cached(memory: ZeroMem, group: str, questions: Sequence[Question]) -> list[Cached]:
    texts, homes = [q.text for q in questions], [q.boundary for q in questions]
    found = []
    for one in memory.batches(texts, homes, [q.time for q in questions]):
        assert len(one.memories) == 1
        ids = [trace.id for trace in one.memories[0].turns.traces]
        place = {name: row for row, name in enumerate(ids)}
        own = [questions[one.numbers[int(i)]] for i in one.batch.query[:, 0]]
        gold = torch.zeros(len(own), len(ids), dtype=torch.bool, device=one.bank.device)
        for slot, question in enumerate(own):
            gold[slot, [place[name] for name in question.evidence if name in place]] = True
        views = memory.pipeline.views(one.batch, one.bank)
        found.append(Cached(group, own, one.batch, one.bank, views.signals, gold, ids, views.graph))
    return found
