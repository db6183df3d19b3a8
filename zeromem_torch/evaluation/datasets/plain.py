"""Traces and questions of one's own, by the names of their fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from zeromem_torch.evaluation.datasets.reading import Row, Source, time_of, trace_of
from zeromem_torch.evaluation.datasets.records import Parts, Question, answers_of, categories_of
from zeromem_torch.substrate.traces import Trace, ZeroMemError, nearest

_QUESTION_FIELDS = ("question", "boundary", "id", "evidence", "answers", "category", "time")


def load_jsonl(source: Source) -> Parts:
    """Traces, by the names of Trace's fields; an object with a `question` is a question.

    A trace without an `order` takes the number of earlier traces of its session.
    """
    traces: list[Trace] = []
    lengths: Counter[tuple[str, str]] = Counter()
    asked = [row for row in source.rows if "question" in row.fields]
    for row in source.rows:
        if "question" not in row.fields:
            fields = {key: value for key, value in row.fields.items() if value is not None}
            if "query" in fields and "text" not in fields:
                expected = "a trace with its text, or a question"
                raise ZeroMemError.of(row.place, expected, "query", "did you mean 'question'? rename it")
            session = str(fields.get("boundary")), str(fields.get("session", ""))
            traces.append(trace_of(row.place, {"order": lengths[session], **fields}))
            lengths[session] += bool(session[1])
    boundaries = {trace.id: trace.boundary for trace in traces}
    questions = [_plain_question(row, number, boundaries) for number, row in enumerate(asked, start=1)]
    return Parts(traces, questions, categories_of(questions), [])


def _plain_question(row: Row, number: int, boundaries: Mapping[str, str]) -> Question:
    for field in row.fields:
        if field not in _QUESTION_FIELDS:
            expected = f"the fields of a question ({', '.join(_QUESTION_FIELDS)})"
            raise ZeroMemError.of(row.place, expected, field, f"{nearest(field, _QUESTION_FIELDS)}rename or drop it")
    boundary = row.need("boundary", str)
    evidence = tuple(dict.fromkeys(row.strings("evidence")))
    for name in evidence:
        if boundaries.get(name) != boundary:
            near = nearest(name, [i for i, home in boundaries.items() if home == boundary])
            expected = f"ids of traces of boundary {boundary!r}"
            raise ZeroMemError.of(f"{row.place}, evidence", expected, name, f"{near}name traces of this file")
    time = row.fields.get("time")
    return Question(
        id=row.need("id", str) if "id" in row.fields else f"{boundary}/q{number}",
        boundary=boundary,
        text=row.need("question", str),
        evidence=evidence,
        answers=answers_of(row.several("answers")),
        category=str(row.fields.get("category") or ""),
        time=None if time is None else time_of(row.place, time),
    )
