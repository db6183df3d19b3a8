"""The demonstration: shipped conversations go in, and questions are answered, laid out for a person."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from typing import TextIO

from zeromem_torch.evaluation.answers import f1
from zeromem_torch.evaluation.datasets import Dataset, Question, load_dataset
from zeromem_torch.evidence import EvidenceItem
from zeromem_torch.library import ZeroMem
from zeromem_torch.reader import Reader
from zeromem_torch.results import Answered
from zeromem_torch.substrate.traces import Trace

TOP_K = 3  # a person reads every line of this
INDENT = " " * 5
HANG = " " * 7


def run_demo(
    memory: ZeroMem, reader: Reader | str = "embedded", out: TextIO | None = None, width: int | None = None
) -> None:
    """Store the shipped conversations in an empty memory, ask every question, and show answers, evidence and cost.

    ``out`` is standard output and ``width``, in characters, the terminal's, if not given.
    """
    page = min(max(width or shutil.get_terminal_size((96, 24)).columns, 60), 110)
    with as_file(files("zeromem_torch") / "data" / "demo.jsonl") as path:
        data = load_dataset("jsonl", path)
    memory.add(data.traces)
    questions = data.questions
    found = memory.answer_batch(
        [q.text for q in questions], boundaries=[q.boundary for q in questions], reader=reader, top_k=TOP_K
    )
    for line in _page(data, found, memory, page):
        for part in textwrap.wrap(line, page, subsequent_indent=HANG, break_on_hyphens=False) or [""]:
            print(part, file=out)


def _page(data: Dataset, found: Sequence[Answered], memory: ZeroMem, width: int) -> Iterator[str]:
    yield _rule("What was stored", width)
    for boundary in dict.fromkeys(trace.boundary for trace in data.traces):
        yield from _stored([trace for trace in data.traces if trace.boundary == boundary], width)
    yield ""
    yield _rule("What was asked, all of it in one batch", width)
    yield from textwrap.wrap(
        "Each answer cites the turns that bear it out; what was written down as right stands below it. Each turn found "
        "is shown with its place (trace and characters), the reason it is there, its score, and what each view gave "
        "it: * marks a turn that holds the answer, - another of the best turns, + those that only came along to close "
        "the context. The reader is a small one: judge the memory by what it found.",
        width,
    )
    for number, (question, answered) in enumerate(zip(data.questions, found, strict=True), start=1):
        yield ""
        yield from _asked(number, question, answered, width)
    yield ""
    yield _rule("What it comes to", width)
    yield from _summary(data, found)
    yield ""
    yield _rule("Where the time went", width)
    yield from _timings(memory.timings)
    yield "(in a new installation this holds compiling the kernels, once; run it again for what a search costs)"
    yield ""
    spent = memory.ledger
    yield f"reader: {spent.reader_calls} calls, {spent.prompt_tokens} tokens read, {spent.completion_tokens} written"
    yield f"encoder: {spent.encoder_tokens} tokens"
    yield f"LLM calls by memory operations: {spent.memory_llm_calls}"


def _stored(traces: Sequence[Trace], width: int) -> Iterator[str]:
    speakers = " and ".join(dict.fromkeys(trace.speaker for trace in traces))
    sessions = dict.fromkeys(trace.session for trace in traces)
    dates = f"{_day(traces[0])} to {_day(traces[-1])}"
    yield f"{traces[0].boundary}: {speakers}, {len(traces)} turns in {len(sessions)} sessions, {dates}"
    opening = f'{traces[0].speaker}: "{traces[0].text}"'
    yield INDENT + textwrap.shorten(opening, width - len(INDENT), placeholder=' ..."')


def _asked(number: int, question: Question, answered: Answered, width: int) -> Iterator[str]:
    evidence = answered.evidence
    yield from _ends(f"{number:>3}. {question.text}", f"{question.boundary}, {question.category}", width)
    yield f"{INDENT}answer: {answered}"
    if answered.text != answered.raw.strip():
        said = textwrap.shorten(answered.raw, 2 * width, placeholder=" ...")
        yield f'{INDENT}the reader said: "{said}" ({answered.rule})'
    yield f"{INDENT}right: {'; '.join(question.answers)}"
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


def _summary(data: Dataset, found: Sequence[Answered]) -> Iterator[str]:
    pairs = [(question, answered.evidence) for question, answered in zip(data.questions, found, strict=True)]
    complete = sum(set(q.evidence) <= {item.trace_id for item in evidence.items} for q, evidence in pairs)
    yield f"questions whose evidence was found whole: {complete} of {len(pairs)}"
    home = {trace.id: trace.boundary for trace in data.traces}
    pieces = [(home[item.trace_id], q.boundary) for q, evidence in pairs for item in evidence.items]
    crossed = sum(came_from != asked_in for came_from, asked_in in pieces)
    yield f"pieces of evidence from another conversation than the one asked in: {crossed} of {len(pieces)}"
    cited = [bool(answered.cites) for answered in found]
    yield f"answers that cite their evidence: {sum(cited)} of {len(cited)}"
    scores = {
        how: sum(
            max(f1(getattr(answered, how), right, "gam") for right in question.answers)
            for question, answered in zip(data.questions, found, strict=True)
        )
        for how in ("raw", "text")
    }
    before, after = (scores[how] / len(found) for how in ("raw", "text"))
    yield f"F1 of the answers: {after:.2f}, and {before:.2f} as the reader said them"


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
