"""LongMemEval: a haystack of sessions per question."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from benchmarks import has_note, haystack, write

from zeromem_torch.evaluation.datasets import load_dataset
from zeromem_torch.substrate.traces import ZeroMemError


def test_longmemeval(tmp_path: Path) -> None:
    data = load_dataset("longmemeval", write(tmp_path, "s.json", [haystack(), haystack("q2_abs")]))

    assert [t.id for t in data.traces[:4]] == ["q1/s:1", "q1/t:1", "q1/t:2", "q1/s#2:1"]
    assert [(t.session, t.order, t.role) for t in data.traces[1:3]] == [("t", 0, "user"), ("t", 1, "assistant")]
    assert data.traces[1].time == datetime(2023, 5, 21, 3, 24, tzinfo=UTC)
    question, abstained = data.questions
    assert (question.boundary, question.evidence) == ("q1", ("q1/t:1", "q1/s#2:1"))
    assert (question.answers, question.category) == (("7",), "single-session-user")
    assert question.time == datetime(2023, 5, 30, 23, 40, tzinfo=UTC)
    assert abstained.evidence == ()
    assert {t.boundary for t in data.traces} == {"q1", "q2_abs"}
    assert has_note(data, "2 turns without content left out")
    assert has_note(data, "2 session ids used twice by a question numbered")
    assert has_note(data, "1 questions whose answer is not in the history")


def test_longmemeval_needs_a_date_per_session(tmp_path: Path) -> None:
    with pytest.raises(ZeroMemError, match=r"s\.json\[0\], haystack: .*3 sessions, 3 ids, 1 dates"):
        load_dataset("longmemeval", write(tmp_path, "s.json", [haystack(haystack_dates=["2023/05/20 (Sat) 02:21"])]))
