"""Rows in the forms of the benchmarks, with the faults that theirs have, and what is looked at in what is read."""

import gzip
import json
from pathlib import Path
from typing import Any

from zeromem_torch.evaluation.datasets import Dataset


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a file in the form that its name asks for."""
    text = "\n".join(json.dumps(row) for row in rows) + "\n" if ".jsonl" in name else json.dumps(rows)
    raw = text.encode()
    path = folder / name
    path.write_bytes(gzip.compress(raw, mtime=0) if name.endswith(".gz") else raw)
    return path


def has_note(data: Dataset, text: str) -> bool:
    return any(note.startswith(text) for note in data.notes)


def check(data: Dataset) -> None:
    """What holds of every data set."""
    home = {t.id: t.boundary for t in data.traces}
    assert len(home) == len(data.traces)
    for question in data.questions:
        assert {home[name] for name in question.evidence} <= {question.boundary}
        assert len(set(question.evidence)) == len(question.evidence)
        assert not question.category or question.category in data.categories


# LoCoMo


def turn(dia_id: str, text: str, **more: Any) -> dict[str, Any]:
    return {"speaker": "Ann", "dia_id": dia_id, "text": text, **more}


def asked(category: int = 4, **fields: Any) -> dict[str, Any]:
    return {"question": "Where is the boat?", "answer": "in the harbour", "category": category, **fields}


def sample(*qa: dict[str, Any], sample_id: str = "conv-26") -> dict[str, Any]:
    conversation = {
        "speaker_a": "Ann",
        "speaker_b": "Bo",
        "session_2": [turn("D2:1", "Back again.")],
        "session_2_date_time": "12:09 am on 13 September, 2023",
        "session_10": [turn("D10:1", "A third time.")],
        "session_10_date_time": "12:30 pm on 1 January, 2024",
        "session_1": [
            turn("D1:1", "Look!", blip_caption="a red boat", query="boat stock photo", img_url=["x"]),
            turn("D1:2", "And here.", blip_caption="a harbour"),
            turn("D1:3", "Fine."),
            turn("D1:4", " "),
        ],
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_11_date_time": "2:00 pm on 2 January, 2024",
    }
    summaries = {"event_summary": {"s": "written"}, "observation": {"o": "by a"}, "session_summary": {"s": "model"}}
    return {"sample_id": sample_id, "conversation": conversation, "qa": list(qa), **summaries}


# LongMemEval


def haystack(question_id: str = "q1", **fields: Any) -> dict[str, Any]:
    return {
        "question_id": question_id,
        "question_type": "single-session-user",
        "question": "What did I study?",
        "question_date": "2023/05/30 (Tue) 23:40",
        "answer": 7,
        "haystack_session_ids": ["s", "t", "s"],
        "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/21 (Sun) 03:24", "2023/05/22 (Mon) 00:00"],
        "haystack_sessions": [
            [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "\u200b"}],
            [
                {"role": "user", "content": "I studied law", "has_answer": True},
                {"role": "assistant", "content": "Good", "has_answer": False},
            ],
            [{"role": "user", "content": "Law it was", "has_answer": True}],
        ],
        "answer_session_ids": ["t"],
        **fields,
    }


# Documents


CORPUS = [{"title": title, "text": f"{title} is {what}."} for title, what in zip("ABCDEF", "uvwxyz", strict=True)]


def titled(name: str = "t1", **fields: Any) -> dict[str, Any]:
    labels = {"gold_titles": ["B", "A"], "context_titles": ["A", "B", "C"]}
    return {"id": name, "question": "Which?", "answer": "yes", "type": "comparison", **labels, **fields}


def sentenced(name: str = "s1", **fields: Any) -> dict[str, Any]:
    facts = [["A", 0], ["B", 1], ["A", 1]]
    context = [["A", ["A is u."]], ["B", ["B is", " v."]], ["C", [" C is w. "]]]
    question = {"_id": name, "question": "Which?", "answer": "yes", "type": "bridge", "level": "hard"}
    return question | {"supporting_facts": facts, "context": context} | fields
