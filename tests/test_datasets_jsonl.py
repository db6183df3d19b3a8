"""Traces and questions of one's own, a JSON object a line."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from zeromem_torch.evaluation.datasets import load_dataset
from zeromem_torch.substrate.traces import ZeroMemError


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        '{"question": "Where?", "boundary": "acme", "evidence": ["b", "b"], "answers": "here", "category": "place"}',
        "",
        '{"id": "a", "boundary": "acme", "text": "line\u2028break", "session": "s", "time": "2023-05-08T13:56+02:00"}',
        '{"id": "b", "boundary": "acme", "text": "two", "session": "s", "time": null, "order": null}',
        '{"id": "c", "boundary": "other", "text": "three", "session": "s", "metadata": {"page": 3}}',
        '{"id": "d", "boundary": "acme", "text": "four", "title": "T"}',
        '{"id": "e", "boundary": "acme", "text": "five", "session": "s", "order": 40}',
        '   \r\n{"question": "When?", "boundary": "acme", "id": "q", "time": 1683554160, "answers": [1, "1", "one"]}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    data = load_dataset("jsonl", path)

    assert [(t.id, t.order) for t in data.traces] == [("a", 0), ("b", 1), ("c", 0), ("d", 0), ("e", 40)]
    assert data.traces[0].text == "line\u2028break"
    assert data.traces[0].time == datetime(2023, 5, 8, 11, 56, tzinfo=UTC)
    assert data.traces[2].metadata == {"page": 3}
    first, second = data.questions
    assert (first.id, first.evidence, first.answers, first.category) == ("acme/q1", ("b",), ("here",), "place")
    assert (second.id, second.answers, second.time) == ("q", ("1", "one"), datetime(2023, 5, 8, 13, 56, tzinfo=UTC))
    assert data.split == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b", "boundary": "x"', "mine.jsonl line 3: expected JSON"),
        ("7", "mine.jsonl line 3: expected a JSON object, got 7"),
        ('{"id": "b", "boundary": "x", "txt": "t"}', "mine.jsonl line 3: .*did you mean 'text'"),
        ('{"id": "b", "boundary": "x", "text": " "}', "mine.jsonl line 3: .*text: .*not blank"),
        ('{"id": "b", "boundary": "x", "text": "t", "time": "soon"}', "mine.jsonl line 3: .*time: .*got 'soon'"),
        ('{"id": "trace-1", "boundary": "x", "text": "t"}', "trace id: expected each one once, got 'trace-1'"),
        ('{"question": "Q?", "boundary": "x", "evidence": ["trace-2"]}', "line 3, evidence: .*did you mean 'trace-1'"),
        ('{"question": "Q?", "boundary": "y", "evidence": ["trace-1"]}', "ids of traces of boundary 'y'"),
        ('{"question": "Q?", "boundary": "x", "evidence": [{}]}', "line 3, evidence: expected strings"),
        ('{"question": "Q?", "boundary": "x", "answer": "a"}', "line 3: .*did you mean 'answers'"),
        ('{"question": "Q?"}', "line 3: expected 'boundary' .*, got only the keys question"),
        ('{"question": "Q?", "boundary": "x", "time": "soon"}', "mine.jsonl line 3: time"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "trace-1", "boundary": "x", "text": "t"}\n\n' + line + "\n", encoding="utf-8")

    with pytest.raises(ZeroMemError, match=message):
        load_dataset("jsonl", path)
