"""The demonstration: a conversation shipped with the package goes in, and evidence comes out, laid out for a person."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from typing import TextIO

from zeromem_torch.evaluation.datasets import Dataset, Question, load_dataset
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.traces import Trace

TOP_K = 3  # a person reads every line of this
INDENT = " " * 5
HANG = " " * 7


def run_demo(memory: ZeroMem, out: TextIO | None = None, width: int | None = None) -> None:
    """Store the shipped conversations in an empty memory, ask every question at once, and show what was found and why.

    ``out`` is standard output and ``width``, in characters, the terminal's, if not given.
    """
    page = min(max(width or shutil.get_terminal_size((96, 24)).columns, 60), 110)
    with as_file(files("zeromem_torch") / "data" / "demo.jsonl") as path:
        data = load_dataset("jsonl", path)
    memory.add(data.traces)
    questions = data.questions
    found = memory.search_batch([q.text for q in questions], boundaries=[q.boundary for q in questions], top_k=TOP_K)
    for line in _page(data, found, memory, page):
        for part in textwrap.wrap(line, page, subsequent_indent=HANG, break_on_hyphens=False) or [""]:
            print(part, file=out)


def _page(data: Dataset, found: Sequence[Evidence], memory: ZeroMem, width: int) -> Iterator[str]:
    yield _rule("What was stored", width)
    for boundary in dict.fromkeys(trace.boundary for trace in data.traces):
        yield from _stored([trace for trace in data.traces if trace.boundary == boundary], width)
    yield ""
    yield _rule("What was asked, all of it in one batch", width)
    yield from textwrap.wrap(
        "The answers were written down with the conversation. Each turn found is shown with its place (trace and "
        "characters), the reason it is there, its score, and what each view gave it: * marks a turn that holds the "
        "answer, - another of the best turns, + those that only came along to close the context.",
        width,
    )
    for number, (question, evidence) in enumerate(zip(data.questions, found, strict=True), start=1):
        yield ""
        yield from _asked(number, question, evidence, width)
    yield ""
    yield _rule("What it comes to", width)
    yield from _summary(data, found)
    yield ""
    yield _rule("Where the time went", width)
    yield from _timings(memory.timings)
    yield ""
    yield f"LLM calls by memory: {memory.ledger.memory_llm_calls}, tokens: {memory.ledger.memory_llm_tokens}"


def _stored(traces: Sequence[Trace], width: int) -> Iterator[str]:
    speakers = " and ".join(dict.fromkeys(trace.speaker for trace in traces))
    sessions = dict.fromkeys(trace.session for trace in traces)
    dates = f"{_day(traces[0])} to {_day(traces[-1])}"
    yield f"{traces[0].boundary}: {speakers}, {len(traces)} turns in {len(sessions)} sessions, {dates}"
    opening = f'{traces[0].speaker}: "{traces[0].text}"'
    yield INDENT + textwrap.shorten(opening, width - len(INDENT), placeholder=' ..."')


def _asked(number: int, question: Question, evidence: Evidence, width: int) -> Iterator[str]:
    yield from _ends(f"{number:>3}. {question.text}", f"{question.boundary}, {question.category}", width)
    yield f"{INDENT}answer: {'; '.join(question.answers)}"
    yield f"{INDENT}route: {evidence.route}, rho {evidence.rho:.2f} ({'; '.join(evidence.reasons)})"
    rest = []
    for item in evidence.items:
        expected = item.trace_id in question.evidence
        if expected or item.source is None:
            yield from _piece(item, expected, width)
        else:
            rest.append(f"{item.trace_id} ({item.reason} {item.score:.2f})")
    if rest:
        yield f"   + {', '.join(rest)}"
    held = {item.trace_id for item in evidence.items}
    if missed := [name for name in question.evidence if name not in held]:
        yield f"{INDENT}not found: {', '.join(missed)}"


def _piece(item: EvidenceItem, expected: bool, width: int) -> Iterator[str]:
    why = item.reason if item.source is None else f"{item.reason} of {item.source}"
    scores = "  ".join(f"{name} {score:.2f}" for name, score in {"score": item.score, **item.views}.items())
    yield from _ends(f"{'*' if expected else '-':>4} {item.trace_id}[{item.start}:{item.end}]  {why}", scores, width)
    yield f'{HANG}{_day(item)}, {item.speaker}: "{item.text}"'


def _summary(data: Dataset, found: Sequence[Evidence]) -> Iterator[str]:
    pairs = list(zip(data.questions, found, strict=True))
    complete = sum(set(q.evidence) <= {item.trace_id for item in evidence.items} for q, evidence in pairs)
    yield f"questions whose evidence was found whole: {complete} of {len(pairs)}"
    home = {trace.id: trace.boundary for trace in data.traces}
    pieces = [(home[item.trace_id], q.boundary) for q, evidence in pairs for item in evidence.items]
    crossed = sum(came_from != asked_in for came_from, asked_in in pieces)
    yield f"pieces of evidence from another conversation than the one asked in: {crossed} of {len(pieces)}"


def _timings(seconds: Mapping[str, float]) -> Iterator[str]:
    total = sum(seconds.values())
    names = max((len(name) for name in seconds), default=0)
    for name, spent in seconds.items():
        yield f"{name:<{names}}  {spent * 1e3:>9.1f} ms  {spent / total if total else 0:>4.0%}"


def _ends(left: str, right: str, width: int) -> Iterator[str]:
    """One line with a text at each end, or two lines where they do not fit on one."""
    if len(left) + 2 + len(right) <= width:
        yield left + right.rjust(width - len(left))
    else:
        yield left
        yield right.rjust(width)


def _rule(title: str, width: int) -> str:
    return f"-- {title} ".ljust(width, "-")


def _day(said: Trace | EvidenceItem) -> str:
    return f"{said.time.day} {said.time:%b %Y}" if said.time else "no date"
