"""LoCoMo: turns with their captions and dates, evidence in every form it has, the audit, and the real file."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from benchmarks import asked, check, has_note, sample, turn, write

from zeromem_torch.evaluation.datasets import load_dataset, read_rows
from zeromem_torch.substrate.traces import ZeroMemError


def test_locomo_turns(tmp_path: Path) -> None:
    data = load_dataset("locomo", write(tmp_path, "talk.json", [sample()]))

    assert [t.id for t in data.traces] == [f"conv-26/D{n}" for n in ("1:1", "1:2", "1:3", "2:1", "10:1")]
    assert [t.text for t in data.traces[:3]] == ["Look! (a red boat)", "And here. (a harbour)", "Fine."]
    assert [(t.session, t.order) for t in data.traces[2:]] == [("session_1", 2), ("session_2", 0), ("session_10", 0)]
    assert {t.time for t in data.traces[:3]} == {datetime(2023, 5, 8, 13, 56, tzinfo=UTC)}
    assert [t.time for t in data.traces[3:]] == [
        datetime(2023, 9, 13, 0, 9, tzinfo=UTC),
        datetime(2024, 1, 1, 12, 30, tzinfo=UTC),
    ]
    assert {(t.boundary, t.speaker) for t in data.traces} == {("conv-26", "Ann")}
    assert has_note(data, "1 session dates without a session left out")
    assert has_note(data, "1 captions without an img_url read")
    assert has_note(data, "1 turns without text or caption left out")


def test_locomo_never_reads_what_was_not_said(tmp_path: Path) -> None:
    said = " ".join(t.text for t in load_dataset("locomo", write(tmp_path, "talk.json", [sample()])).traces)

    assert not any(word in said for word in ("stock photo", "written", "by a", "model"))


def test_a_locomo_turn_that_cannot_be_placed(tmp_path: Path) -> None:
    talk = sample()
    talk["conversation"]["session_1"].append(turn("D1:1", "Again"))
    with pytest.raises(ZeroMemError, match=r"session_1\[4\], dia_id: expected each turn once, got 'D1:1'"):
        load_dataset("locomo", write(tmp_path, "x.json", [talk]))

    talk["conversation"]["session_1"][4]["dia_id"] = "first"
    with pytest.raises(ZeroMemError, match="dia_id: expected 'D<session>:<turn>', got 'first'"):
        load_dataset("locomo", write(tmp_path, "x.json", [talk]))


def test_a_locomo_session_date_that_cannot_be_read(tmp_path: Path) -> None:
    talk = sample()
    talk["conversation"]["session_2_date_time"] = "some day in May"
    with pytest.raises(ZeroMemError, match=r"session_2_date_time: time: expected .* got 'some day in May'"):
        load_dataset("locomo", write(tmp_path, "x.json", [talk]))

    del talk["conversation"]["session_2_date_time"]
    data = load_dataset("locomo", write(tmp_path, "x.json", [talk]))
    assert [t.id for t in data.traces if t.time is None] == ["conv-26/D2:1"]
    assert has_note(data, "1 sessions without a date")


@pytest.mark.parametrize(
    ("evidence", "turns"),
    [
        (["D1:2"], ["D1:2"]),
        (["D1:2; D2:1"], ["D1:2", "D2:1"]),
        (["D1:2 D1:1", "D1:1"], ["D1:2", "D1:1"]),
        (["D:10:1"], ["D10:1"]),
        (["D02:01"], ["D2:1"]),
        (["D1:3", "D", "D1:1"], ["D1:3", "D1:1"]),
        (["D10:19", "D2:1"], ["D2:1"]),
        (["D1:4"], []),  # left out: it says nothing
        (["D10:19"], []),
        ([], []),
        (None, []),
        ("D1:2", ["D1:2"]),
    ],
)
def test_locomo_evidence(tmp_path: Path, evidence: Any, turns: list[str]) -> None:
    data = load_dataset("locomo", write(tmp_path, "talk.json", [sample(asked(evidence=evidence))]))

    assert data.questions[0].evidence == tuple(f"conv-26/{name}" for name in turns)
    assert has_note(data, "1 of 1 questions have no usable evidence") is (not turns)


def test_locomo_evidence_repairs_are_counted(tmp_path: Path) -> None:
    strings = ["D1:1", "D1:2; D2:1", "D:10:1", "D", "D9:9"]
    data = load_dataset("locomo", write(tmp_path, "talk.json", [sample(asked(evidence=strings))]))

    assert has_note(data, "2 evidence strings that name no turn dropped")
    assert has_note(data, "2 evidence strings that are no plain turn id repaired")


def test_locomo_questions(tmp_path: Path) -> None:
    adversarial = asked(category=5, evidence=["D1:1"], adversarial_answer="at sea")
    del adversarial["answer"]
    qa = [asked(1, evidence=["D1:1"], answer=2022), adversarial, asked(2, answer=None), asked(3)]
    data = load_dataset("locomo", write(tmp_path, "talk.jsonl.gz", [sample(*qa)]))

    assert [(q.id, q.category) for q in data.questions] == [
        ("conv-26/q0", "1"),
        ("conv-26/q2", "2"),
        ("conv-26/q3", "3"),
    ]
    assert [q.answers for q in data.questions] == [("2022",), (), ("in the harbour",)]
    assert data.categories == {"1": "multi-hop", "2": "temporal", "3": "open-domain", "4": "single-hop"}
    shown = "1 conversations, not the ten of the official file: multi-hop 1, temporal 1, open-domain 1, single-hop 0"
    assert has_note(data, f"{shown}; adversarial 1 (left out)")
    assert has_note(data, "1 questions without an answer")
    assert has_note(data, "1 integer answers read as text")
    assert has_note(data, "3 questions that repeat one of their conversation")
    assert has_note(data, "2 of 3 questions have no usable evidence")


def official(counts: dict[int, int]) -> list[dict[str, Any]]:
    numbers = (26, 30, 41, 42, 43, 44, 47, 48, 49, 50)
    qa = [asked(category, evidence=["D1:1"]) for category, count in counts.items() for _ in range(count)]
    return [sample(*qa[i :: len(numbers)], sample_id=f"conv-{number}") for i, number in enumerate(numbers)]


def test_locomo_official_file_has_the_official_counts(tmp_path: Path) -> None:
    counts = {1: 282, 2: 321, 3: 96, 4: 841, 5: 446}
    data = load_dataset("locomo", write(tmp_path, "locomo10.json", official(counts)))

    assert len(data.questions) == 1540
    assert has_note(data, "the ten conversations of the official file, with its counts: multi-hop 282, temporal 321")

    with pytest.raises(ZeroMemError, match=r"expected 282 / 321 / 96 / 841 / 446 questions .* single-hop 840"):
        load_dataset("locomo", write(tmp_path, "locomo10.json", official(counts | {4: 840})))


def test_locomo_audit_replaces_wrong_citations_only(tmp_path: Path) -> None:
    qa = [asked(evidence=["D1:1"], question=text) for text in ("first?", "second?", "third?", "fourth?")]
    # conv-47 is the seventh conversation of the official file, wherever it stands in this one.
    path = write(tmp_path, "talk.json", [sample(*qa, sample_id="conv-47")])
    labels = [
        ("locomo_6_qa0", "first?", "WRONG_CITATION", ["D1:2", "D2:1"]),
        ("locomo_6_qa1", "second?", "HALLUCINATION", ["D1:3"]),
        ("locomo_6_qa2", "another question?", "WRONG_CITATION", ["D1:3"]),
        ("locomo_6_qa3", "fourth?", "WRONG_CITATION", ["D9:9"]),
        ("locomo_0_qa0", "first?", "WRONG_CITATION", ["D1:3"]),
    ]
    keys = ("question_id", "question", "error_type", "correct_evidence")
    write(tmp_path, "label_errors.json", [dict(zip(keys, label, strict=True)) for label in labels])

    plain, audited = load_dataset("locomo", path), load_dataset("locomo", path, audited=True)

    assert [q.evidence for q in plain.questions] == [("conv-47/D1:1",)] * 4
    assert audited.questions[0].evidence == ("conv-47/D1:2", "conv-47/D2:1")
    assert audited.questions[1:] == plain.questions[1:]
    assert audited.sha256 == plain.sha256
    assert has_note(audited, "audited by the 4 wrong citations of label_errors.json (sha256 ")
    assert has_note(audited, "2 questions with the audit's evidence")


def test_locomo_audit_needs_its_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroMemError, match="label_errors"):
        load_dataset("locomo", write(tmp_path, "talk.json", [sample()]), audited=True)


# The file itself


def test_locomo_tuning_file(shared_data: Path) -> None:
    path = shared_data / "locomo" / "locomo_tuning6.json.gz"
    data = load_dataset("locomo", path)
    check(data)

    assert data.sha256 == "1915d50788abd9a0b9f4aa04446380239e59e87807f85cd7fa813510aa95aee5"
    assert len(data.traces) == 3435
    assert Counter(q.category for q in data.questions) == {"1": 172, "2": 180, "3": 53, "4": 480}
    assert [q.id for q in data.questions if not q.evidence] == ["conv-26/q30", "conv-26/q46"]
    assert has_note(data, "16 session dates without a session left out")
    integers = [q.id for q in data.questions if q.boundary == "conv-26" and q.answers and q.answers[0].isdigit()]
    assert set(integers) >= {f"conv-26/q{n}" for n in (1, 26, 40, 49, 72, 75)}
    assert has_note(data, "6 integer answers read as text")


def test_locomo_session_dates_are_read(shared_data: Path) -> None:
    path = shared_data / "locomo" / "locomo_tuning6.json.gz"
    read = {(t.boundary, t.session): t.time for t in load_dataset("locomo", path).traces}
    written = {
        (row["sample_id"], key): datetime.strptime(
            row["conversation"][f"{key}_date_time"].upper(), "%I:%M %p ON %d %B, %Y"
        ).replace(tzinfo=UTC)
        for row in read_rows(path)
        for key, value in row["conversation"].items()
        if isinstance(value, list)
    }

    assert len(read) == 156
    assert read == written


def test_locomo_captions_are_read_and_queries_are_not(shared_data: Path) -> None:
    path = shared_data / "locomo" / "locomo_tuning6.json.gz"
    texts = {t.id: t.text for t in load_dataset("locomo", path).traces}
    for row in read_rows(path):
        for session in row["conversation"].values():
            for said in session if isinstance(session, list) else ():
                caption = said.get("blip_caption")
                expected = f"{said['text']} ({caption})" if caption else said["text"]
                assert texts[f"{row['sample_id']}/{said['dia_id']}"] == expected


def test_locomo_evidence_equals_the_published_repairs(shared_data: Path) -> None:
    folder = shared_data / "locomo"
    questions = {q.id: q for q in load_dataset("locomo", folder / "locomo_tuning6.json.gz").questions}
    repairs = read_rows(folder / "evidence_repairs.json")

    assert len(repairs) == 4
    for repair in repairs:
        question = questions[f"{repair['sample_id']}/q{repair['qa_index']}"]
        assert question.text == repair["question"]
        assert question.evidence == tuple(f"{repair['sample_id']}/{name}" for name in repair["evidence_clean"])


def test_locomo_audit_reaches_every_wrong_citation(shared_data: Path) -> None:
    data = load_dataset("locomo", shared_data / "locomo" / "locomo_tuning6.json.gz", audited=True)
    check(data)

    assert has_note(data, "audited by the 37 wrong citations")
    assert has_note(data, "37 questions with the audit's evidence")
    assert next(q for q in data.questions if q.id == "conv-26/q1").evidence == ("conv-26/D1:14",)
