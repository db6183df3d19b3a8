"""Evidence that a system ranked too low, sorted by what would have been needed to find it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zeromem_torch.evaluation.datasets import Dataset, Question
from zeromem_torch.substrate.tokenizer import Analyzer
from zeromem_torch.substrate.traces import Trace
from zeromem_torch.substrate.units import order_turns

KINDS = {
    "no shared word": "shares no content word with the question, nor does a neighbour: needs inference or a synonym",
    "only a neighbour": "only a neighbouring turn shares a word with the question",
    "one word": "shares one content word: crowded out by everything else that has it",
    "several words": "shares two or more content words, and others still rank above it",
}


@dataclass(frozen=True, slots=True)
class Miss:
    question: Question
    trace: Trace
    kind: str  # a key of KINDS
    above: str  # what ranked first instead


def find_misses(data: Dataset, main: Mapping[str, Sequence[str]], depth: int = 10) -> list[Miss]:
    """Evidence beyond rank ``depth`` of the main ranking (question id -> trace ids, best first)."""
    analyse = Analyzer(stop_words=True, stemmer="english")
    by_boundary: dict[str, list[Trace]] = defaultdict(list)
    for trace in data.traces:
        by_boundary[trace.boundary].append(trace)
    ordered = {name: order_turns(traces) for name, traces in by_boundary.items()}
    place = {t.id: i for turns in ordered.values() for i, t in enumerate(turns.traces)}
    misses = []
    for question in data.questions:
        turns = ordered.get(question.boundary)
        ranked = list(main.get(question.id, ()))[:depth]
        if turns is None or not ranked:
            continue
        speakers = {word for trace in turns.traces for word in analyse(trace.speaker)}
        asked = set(analyse(question.text)) - speakers
        for name in question.evidence:
            if name in ranked:
                continue
            at = place[name]
            near = [i for i in (at - 1, at + 1) if 0 <= i < len(turns.traces) and turns.session[i] == turns.session[at]]
            shared = len(asked & set(analyse(turns.traces[at].text)))
            beside = any(asked & set(analyse(turns.traces[i].text)) for i in near)
            kind = "several words" if shared > 1 else "one word" if shared else "only a neighbour" if beside else ""
            top = turns.traces[place[ranked[0]]]
            misses.append(Miss(question, turns.traces[at], kind or "no shared word", f"{top.id}: {top.text}"))
    return misses


def describe(misses: Sequence[Miss], most: int) -> Iterator[str]:
    """How many of each kind, and the first ``most`` of them spread over the kinds."""
    counts = Counter(miss.kind for miss in misses)
    yield f"{len(misses)} pieces of evidence are not among the 10 best:"
    for kind, meaning in KINDS.items():
        yield f"  {counts[kind]:>4}  {kind}: {meaning}"
    for kind in KINDS:
        for miss in [m for m in misses if m.kind == kind][: -(-most // len(KINDS))]:
            yield f"[{kind}] {miss.question.id} ({miss.question.category}) {miss.question.text}"
            yield f"    missed {miss.trace.id} {miss.trace.speaker}: {miss.trace.text[:160]}"
            yield f"    first  {miss.above[:160]}"
