"""Made data sets of real sizes, for machines that have none: for times, not for what is found."""

import random
from collections.abc import Iterator
from itertools import islice

from bench.append import turns
from zeromem_torch.evaluation.datasets import Dataset, Question
from zeromem_torch.substrate.traces import Trace

NOTE = "made: of a real set's size, but what is found means nothing"


def conversations(boundaries: int = 6, size: int = 570, questions: int = 512) -> Dataset:
    """As many boundaries of about ``size`` turns, and questions about something that was said in each."""
    traces = list(islice(turns(boundaries), boundaries * size))
    draw = random.Random(1)
    asked = [
        Question(f"q{number}", trace.boundary, f"When did {trace.speaker} say {_some(trace.text, draw)}?", (trace.id,))
        for number, trace in enumerate(draw.choices(traces, k=questions))
    ]
    return _dataset("locomo", traces, asked)


def documents(count: int = 4_500, questions: int = 256, named: int = 6) -> Dataset:
    """A pool of titled paragraphs that name others' titles, and questions that name two of them."""
    draw = random.Random(2)
    source = turns(1, seed=3)
    titles = [f"{first.capitalize()} {second.capitalize()}" for first, second in islice(_pairs(), count)]
    traces = []
    for number, title in enumerate(titles):
        said = " ".join(next(source).text for _ in range(5)).split()
        for name in draw.choices(titles, k=named):
            said.insert(draw.randrange(len(said)), name)
        traces.append(Trace(f"pool/{number}", "pool", " ".join(said), title=title, role="document"))
    asked = []
    for number in range(questions):
        one, other = draw.sample(traces, 2)
        text = f"Was {one.title} or {other.title} {_some(other.text, draw)}?"
        asked.append(Question(f"q{number}", "pool", text, (one.id, other.id)))
    return _dataset("hotpotqa", traces, asked)


def _dataset(name: str, traces: list[Trace], questions: list[Question]) -> Dataset:
    return Dataset(name, "made", tuple(traces), tuple(questions), {}, "", (NOTE,))


def _some(text: str, draw: random.Random) -> str:
    words = text.rstrip(".").split()
    first = draw.randrange(max(1, len(words) - 5))
    return " ".join(words[first : first + 5]).lower()


def _pairs() -> Iterator[tuple[str, str]]:
    """Two words, no pair twice."""
    words = list(
        dict.fromkeys(word.strip(".") for trace in islice(turns(1, seed=4), 2_000) for word in trace.text.split())
    )
    draw, seen = random.Random(5), set[tuple[str, str]]()
    while True:
        pair = (draw.choice(words), draw.choice(words))
        if pair not in seen and pair[::-1] not in seen:
            seen.add(pair)
            yield pair
