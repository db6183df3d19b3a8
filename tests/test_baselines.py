"""Baselines, each against a plain loop over words and numbers."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.testing import assert_close
from toys import HashEncoder, talk

from zeromem_torch.evaluation.baselines import BASELINES, PlainRetrieval
from zeromem_torch.substrate.tokenizer import Analyzer
from zeromem_torch.substrate.traces import Trace

TALK = talk(
    "b",
    ["We saw the Opera of Oslo, and the sea.", "Was the sea cold?", "It was, Bo.", "The Opera stands by the sea."],
    ["I bought a boat.", "A red boat, or a blue boat?"],
)
FACTS = [
    Trace("d/1", "b", "The Mjosa is a lake.", title="Mjosa"),
    Trace("d/2", "b", "A church and boats.", title="Lom"),
    Trace("d/3", "b", "Nothing grows here."),
]
QUESTIONS = ["Where does the Opera stand?", "What boat did Ann buy?", "Did Ann or Bo see the sea?", "Whence?", "sea"]
ENCODER = HashEncoder()
Rows = list[list[float]]


def analyse(text: str) -> list[str]:
    return Analyzer(stop_words=True, stemmer="english")(text)


def bm25(question: str, texts: Sequence[Sequence[str]], k1: float, b: float) -> list[float]:
    """The Lucene variant, a term at a time."""
    mean = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(texts)
    for term in analyse(question):
        holders = sum(term in text for text in texts)
        idf = math.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
        for i, text in enumerate(texts):
            count = text.count(term)
            if count:
                scores[i] += idf * count * (k1 + 1) / (count + k1 * (1 - b + b * len(text) / mean))
    return scores


def minmax(scores: Sequence[float]) -> list[float]:
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) if high - low > 1e-6 else 1.0 for score in scores]


def cosine(question: str, text: str) -> float:
    one, other = ENCODER.encode([question, text]).vectors.tolist()
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def said(trace: Trace, *, dated: bool = False) -> str:
    date = f"[{trace.time.day} {trace.time:%B %Y}] " if dated and trace.time else ""
    speaker = f"{trace.speaker}: " if trace.speaker else ""
    title = f"{trace.title}. " if trace.title else ""
    return f"{date}{speaker}{title}{trace.text}"


def loop_bm25(traces: Sequence[Trace]) -> Rows:
    return [bm25(question, [analyse(said(trace)) for trace in traces], 0.9, 0.4) for question in QUESTIONS]


def loop_dense(traces: Sequence[Trace]) -> Rows:
    return [[cosine(question, said(trace)) for trace in traces] for question in QUESTIONS]


def loop_rrf(traces: Sequence[Trace]) -> Rows:
    total = [[0.0] * len(traces) for _ in QUESTIONS]
    for rows in (loop_bm25(traces), loop_dense(traces)):
        for question, scores in enumerate(rows):
            order = sorted(range(len(traces)), key=lambda unit: (-scores[unit], unit))
            for place, unit in enumerate(order, start=1):
                total[question][unit] += 1 / (60 + place)
    return total


def loop_hybrid(traces: Sequence[Trace]) -> Rows:
    pairs = zip(loop_bm25(traces), loop_dense(traces), strict=True)
    return [[0.5 * a + 0.5 * b for a, b in zip(minmax(x), minmax(y), strict=True)] for x, y in pairs]


def loop_context(traces: Sequence[Trace]) -> Rows:
    """s = .5 mm(.5 x + .5 xw) + .5 mm(.5 d + .5 w) + .1 g; the letters are the protocol's."""
    windows = WINDOWS[traces[0].id]
    found = []
    for question in QUESTIONS:
        x = [cosine(question, said(trace, dated=True)) for trace in traces]
        d = bm25(question, [analyse(said(trace, dated=True)) for trace in traces], 1.2, 0.75)
        near = [of_window(question, [traces[unit] for unit in window]) for window in windows]
        words = [[word for unit in window for word in analyse(said(traces[unit]))] for window in windows]
        lexical = bm25(question, words, 1.2, 0.75)
        holders = [[i for i, window in enumerate(windows) if unit in window] for unit in range(len(traces))]
        xw = [max(near[i] for i in own) for own in holders]
        w = [max(lexical[i] for i in own) for own in holders]
        speakers = sorted({trace.speaker for trace in traces} - {""})
        named = [name for name in speakers if name in question.replace("?", "").split()]
        g = [float(len(named) == 1 and trace.speaker == named[0]) for trace in traces]
        first = minmax([0.5 * a + 0.5 * b for a, b in zip(x, xw, strict=True)])
        second = minmax([0.5 * a + 0.5 * b for a, b in zip(d, w, strict=True)])
        found.append([0.5 * a + 0.5 * b + 0.1 * c for a, b, c in zip(first, second, g, strict=True)])
    return found


# Three turns of a session, or all of a shorter one; by the first trace.
WINDOWS = {"b/1:1": [[0, 1, 2], [1, 2, 3], [4, 5]], "d/1": [[0], [1], [2]], "one/1:1": [[0]]}


def of_window(question: str, window: Sequence[Trace]) -> float:
    """A window's vector is the normalised sum of its turns'."""
    asked, *turns = ENCODER.encode([question, *map(said, window)]).vectors.tolist()
    total = [sum(column) for column in zip(*turns, strict=True)]
    length = math.sqrt(sum(value * value for value in total))
    return math.fsum(a * b / length for a, b in zip(asked, total, strict=True))


LOOPS: dict[str, Callable[[Sequence[Trace]], Rows]] = {
    "bm25": loop_bm25,
    "dense": loop_dense,
    "rrf": loop_rrf,
    "hybrid": loop_hybrid,
    "context": loop_context,
}


@pytest.mark.parametrize("traces", [TALK, FACTS, talk("one", ["The Opera."])], ids=["talk", "documents", "one turn"])
@pytest.mark.parametrize("name", BASELINES)
def test_baseline_equals_its_loop(name: str, traces: list[Trace]) -> None:
    plain = PlainRetrieval(traces, QUESTIONS, ENCODER)
    assert plain.units == [trace.id for trace in traces]
    assert_close(plain.scores(name), torch.tensor(LOOPS[name](traces)), atol=1e-5, rtol=0)


def test_tokens_are_those_of_the_dated_text() -> None:
    plain = PlainRetrieval(TALK, [], ENCODER)
    assert plain.tokens == [len(spans) for spans in ENCODER.token_spans([said(trace, dated=True) for trace in TALK])]


@pytest.mark.parametrize("name", BASELINES)
def test_questions_without_a_known_word(name: str) -> None:
    scores = PlainRetrieval(TALK, ["Xyzzy?", "the of and"], ENCODER).scores(name)
    assert scores.shape == (2, len(TALK))
    assert scores.isfinite().all()
