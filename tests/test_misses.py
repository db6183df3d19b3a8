"""Misses are sorted by what would have been needed to find them."""

from zeromem_torch.evaluation.datasets import Dataset, Question
from zeromem_torch.evaluation.misses import KINDS, describe, find_misses
from zeromem_torch.substrate.traces import Trace

TEXTS = (
    "My puppy Toby chewed a shoe.",  # shares nothing, nor do its neighbours
    "What a day.",
    "It rained all week.",
    "Do you keep any animals?",
    "Yes, two.",  # only its neighbour names animals
    "Animals are noisy.",
    "Animals at the farm make me keep a diary.",
)


def data(*evidence: int) -> Dataset:
    traces = tuple(
        Trace(id=f"b/{i}", boundary="b", text=text, session="s", order=i, speaker="Ann") for i, text in enumerate(TEXTS)
    )
    question = Question("q", "b", "What animals does Ann keep?", tuple(f"b/{i}" for i in evidence), category="1")
    return Dataset("jsonl", "toy", traces, (question,), {"1": "one"}, "", ())


def test_each_kind() -> None:
    found = find_misses(data(0, 4, 5, 6), {"q": ["b/3"]})
    assert [miss.kind for miss in found] == ["no shared word", "only a neighbour", "one word", "several words"]
    assert found[0].above == "b/3: Do you keep any animals?"
    assert list(KINDS) == [miss.kind for miss in found]


def test_what_is_ranked_is_no_miss_and_depth_counts() -> None:
    ranking = {"q": ["b/3", "b/4", "b/5"]}
    assert find_misses(data(4), ranking) == []
    assert [miss.trace.id for miss in find_misses(data(5), ranking, depth=2)] == ["b/5"]
    assert find_misses(data(4), {}) == [], "a question that was not asked is not missed"


def test_description_counts_and_cuts() -> None:
    lines = list(describe(find_misses(data(0, 4, 5, 6), {"q": ["b/3"]}), 2))
    assert lines[0].startswith("4 pieces of evidence")
    assert sum(line.startswith("[") for line in lines) == 4, "at least one of each kind that there is"
    assert any("Toby" in line for line in lines)
