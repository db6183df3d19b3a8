"""A query gets the same evidence in the same order alone, in a batch of 7 and in a batch of all, whatever is with it.

Matrix products round differently at other shapes, so scores may differ by 1e-5 and pairs closer than that may swap.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from toys import RULES, memory_of, same_evidence, talk

from zeromem_torch.evaluation.datasets import load_dataset
from zeromem_torch.evidence import Evidence
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.encoder import CachedEncoder, load_encoder
from zeromem_torch.substrate.traces import Trace

WORDS = "boat lake raft Oslo Bergen reed lamp harbour red cold Friday sank built bought sold kite rope sail map".split()
Asked = Sequence[tuple[str, str]]


def sentence(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(3, 12))).capitalize() + dice.choice([".", "?", "!"])


def records(dice: random.Random) -> list[Trace]:
    """Three boundaries of very different sizes: a long talk, a talk of one turn, and documents."""
    long = talk("long", *([sentence(dice) for _ in range(dice.randint(5, 20))] for _ in range(9)))
    documents = [Trace(f"d/{n}", "pool", sentence(dice), title=f"{dice.choice(WORDS)} {n}") for n in range(40)]
    return [*long, *talk("one", ["The only turn."]), *documents]


def questions(dice: random.Random, count: int) -> list[tuple[str, str]]:
    forms = ["What did {} do with the {}?", "When was the {} {}?", "Who {} the {}?", "Where is the {} that {} built?"]
    return [
        (dice.choice(forms).format(*dice.choices([*WORDS, "Ann", "Bo"], k=2)), dice.choice(["long", "one", "pool"]))
        for _ in range(count)
    ]


def in_batches(memory: ZeroMem, asked: Asked, size: int) -> list[Evidence]:
    found: list[Evidence] = []
    for start in range(0, len(asked), size):
        part = asked[start : start + size]
        found += memory.search_batch([query for query, _ in part], boundaries=[boundary for _, boundary in part])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_evidence_does_not_depend_on_the_batch(seed: int) -> None:
    dice = random.Random(seed)
    memory, asked = memory_of(*records(dice)), questions(dice, 45)
    alone = [memory.search(query, boundary=boundary) for query, boundary in asked]
    for size in (7, 45):
        for one, other in zip(alone, in_batches(memory, asked, size), strict=True):
            same_evidence(one, other)


def test_asking_twice_in_one_batch_gives_one_answer() -> None:
    dice = random.Random(0)
    memory, asked = memory_of(*records(dice)), questions(dice, 5)
    found = in_batches(memory, asked * 4, 20)
    for number, evidence in enumerate(found):
        assert same_evidence(evidence, found[number % 5])


@pytest.mark.parametrize("workspace", [1, 40_000, 1_000_000])
def test_evidence_does_not_depend_on_the_workspace(workspace: int) -> None:
    dice = random.Random(4)
    traces, asked = records(dice), questions(dice, 30)
    roomy, tight = memory_of(*traces), memory_of(*traces, workspace=workspace)
    groups = list(tight.batches([q for q, _ in asked], [b for _, b in asked], [None] * len(asked)))
    assert sorted(number for group in groups for number in group.numbers) == list(range(30))
    assert len(groups) > 1
    if workspace == 1:
        assert len(groups) == 30
    for one, other in zip(in_batches(roomy, asked, 30), in_batches(tight, asked, 30), strict=True):
        same_evidence(one, other)


@pytest.mark.parametrize("workspace", [40_000, 1_000_000, 1 << 30])
def test_a_group_keeps_within_the_workspace(workspace: int) -> None:
    dice = random.Random(4)
    memory, asked = memory_of(*records(dice), workspace=workspace), questions(dice, 60)
    for group in memory.batches([q for q, _ in asked], [b for _, b in asked], [None] * len(asked)):
        slots, units = group.batch.slots, group.bank.axes["units"].size
        assert slots == 1 or slots * units * 256 <= workspace


def test_the_order_of_a_batch_changes_nothing() -> None:
    dice = random.Random(7)
    memory, asked = memory_of(*records(dice)), questions(dice, 20)
    straight = in_batches(memory, asked, 20)
    backwards = in_batches(memory, asked[::-1], 20)[::-1]
    for one, other in zip(straight, backwards, strict=True):
        same_evidence(one, other)


@pytest.mark.slow
def test_every_tuning_question_of_locomo(shared_data: Path, pytestconfig: pytest.Config) -> None:
    """All of them in one batch and in batches of 7, every fourteenth alone; queries are encoded anew each time."""
    data = load_dataset("locomo", shared_data / "locomo" / "locomo_tuning6.json.gz")
    plain = load_encoder("minilm")
    kept = pytestconfig.cache.mkdir("encoded") / "minilm.sqlite"
    memory = ZeroMem(RULES, encoder=CachedEncoder(plain, kept))
    memory.add(data.traces)
    memory.search_batch(["What?"] * len(memory.boundaries), boundaries=memory.boundaries)  # builds every index
    memory._encoder.loaded = plain
    asked = [(question.text, question.boundary) for question in data.questions]

    together = in_batches(memory, asked, len(asked))
    by_seven = in_batches(memory, asked, 7)
    picked = range(0, len(asked), 14)
    alone = [memory.search(asked[i][0], boundary=asked[i][1]) for i in picked]
    same = [same_evidence(one, other) for one, other in zip(together, by_seven, strict=True)]
    same += [same_evidence(together[i], one) for i, one in zip(picked, alone, strict=True)]
    assert len(alone) > 60
    assert sum(same) / len(same) > 0.99
