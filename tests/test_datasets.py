"""Loaders, on data made here for every fault that the benchmarks have, and on the real files where they are present."""

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zeromem_torch.evaluation.datasets import Dataset, hotpotqa_context, load_dataset, read_rows
from zeromem_torch.substrate.traces import ZeroMemError

Write = Callable[[str, list[dict[str, Any]]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes objects to a file in the form that its name asks for."""

    def to(name: str, rows: list[dict[str, Any]]) -> Path:
        text = "\n".join(json.dumps(row) for row in rows) + "\n" if ".jsonl" in name else json.dumps(rows)
        raw = text.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(raw, mtime=0) if name.endswith(".gz") else raw)
        return path

    return to


def has_note(data: Dataset, text: str) -> bool:
    return any(note.startswith(text) for note in data.notes)


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


def test_locomo_turns(write: Write) -> None:
    data = load_dataset("locomo", write("talk.json", [sample()]))

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


def test_locomo_never_reads_what_was_not_said(write: Write) -> None:
    said = " ".join(t.text for t in load_dataset("locomo", write("talk.json", [sample()])).traces)

    assert not any(word in said for word in ("stock photo", "written", "by a", "model"))


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
def test_locomo_evidence(write: Write, evidence: Any, turns: list[str]) -> None:
    data = load_dataset("locomo", write("talk.json", [sample(asked(evidence=evidence))]))

    assert data.questions[0].evidence == tuple(f"conv-26/{name}" for name in turns)
    assert has_note(data, "1 of 1 questions have no usable evidence") is (not turns)


def test_locomo_evidence_repairs_are_counted(write: Write) -> None:
    strings = ["D1:1", "D1:2; D2:1", "D:10:1", "D", "D9:9"]
    data = load_dataset("locomo", write("talk.json", [sample(asked(evidence=strings))]))

    assert has_note(data, "2 evidence strings that name no turn dropped")
    assert has_note(data, "2 evidence strings that are no plain turn id repaired")


def test_locomo_questions(write: Write) -> None:
    adversarial = asked(category=5, evidence=["D1:1"], adversarial_answer="at sea")
    del adversarial["answer"]
    qa = [asked(1, evidence=["D1:1"], answer=2022), adversarial, asked(2, answer=None), asked(3)]
    data = load_dataset("locomo", write("talk.jsonl.gz", [sample(*qa)]))

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


def test_locomo_official_file_has_the_official_counts(write: Write) -> None:
    counts = {1: 282, 2: 321, 3: 96, 4: 841, 5: 446}
    data = load_dataset("locomo", write("locomo10.json", official(counts)))

    assert len(data.questions) == 1540
    assert has_note(data, "the ten conversations of the official file, with its counts: multi-hop 282, temporal 321")

    with pytest.raises(ZeroMemError, match=r"expected 282 / 321 / 96 / 841 / 446 questions .* single-hop 840"):
        load_dataset("locomo", write("locomo10.json", official(counts | {4: 840})))


def test_locomo_audit_replaces_wrong_citations_only(write: Write) -> None:
    qa = [asked(evidence=["D1:1"], question=text) for text in ("first?", "second?", "third?", "fourth?")]
    # conv-47 is the seventh conversation of the official file, wherever it stands in this one.
    path = write("talk.json", [sample(*qa, sample_id="conv-47")])
    labels = [
        ("locomo_6_qa0", "first?", "WRONG_CITATION", ["D1:2", "D2:1"]),
        ("locomo_6_qa1", "second?", "HALLUCINATION", ["D1:3"]),
        ("locomo_6_qa2", "another question?", "WRONG_CITATION", ["D1:3"]),
        ("locomo_6_qa3", "fourth?", "WRONG_CITATION", ["D9:9"]),
        ("locomo_0_qa0", "first?", "WRONG_CITATION", ["D1:3"]),
    ]
    keys = ("question_id", "question", "error_type", "correct_evidence")
    write("label_errors.json", [dict(zip(keys, label, strict=True)) for label in labels])

    plain, audited = load_dataset("locomo", path), load_dataset("locomo", path, audited=True)

    assert [q.evidence for q in plain.questions] == [("conv-47/D1:1",)] * 4
    assert audited.questions[0].evidence == ("conv-47/D1:2", "conv-47/D2:1")
    assert audited.questions[1:] == plain.questions[1:]
    assert audited.sha256 == plain.sha256
    assert has_note(audited, "audited by the 4 wrong citations of label_errors.json (sha256 ")
    assert has_note(audited, "2 questions with the audit's evidence")


def test_locomo_audit_needs_its_file(write: Write) -> None:
    with pytest.raises(ZeroMemError, match="label_errors"):
        load_dataset("locomo", write("talk.json", [sample()]), audited=True)


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


def test_longmemeval(write: Write) -> None:
    data = load_dataset("longmemeval", write("s.json", [haystack(), haystack("q2_abs")]))

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


def test_longmemeval_needs_a_date_per_session(write: Write) -> None:
    with pytest.raises(ZeroMemError, match=r"s\.json\[0\], haystack: .*3 sessions, 3 ids, 1 dates"):
        load_dataset("longmemeval", write("s.json", [haystack(haystack_dates=["2023/05/20 (Sat) 02:21"])]))


def test_limit_leaves_out_boundaries_that_nobody_asks_about(write: Write) -> None:
    data = load_dataset("longmemeval", write("s.json", [haystack("q1"), haystack("q2")]), limit=1)

    assert [q.id for q in data.questions] == ["q1"]
    assert {t.boundary for t in data.traces} == {"q1"}
    assert has_note(data, "limited to the first 1 of 2 questions")


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


@pytest.mark.parametrize("name", ["hotpotqa", "2wiki"])
def test_title_labels_search_the_corpus(write: Write, name: str) -> None:
    corpus = write("corpus.jsonl.gz", CORPUS)
    data = load_dataset(name, write("dev.json.gz", [titled(), titled("t2", gold_titles=["A", "Z"])]), corpus)

    assert sorted(t.id for t in data.traces) == [f"{name}/{title}" for title in "ABCDEF"]
    assert {(t.boundary, t.session, t.role, t.order) for t in data.traces} == {(name, "", "document", 0)}
    assert {(t.title, t.text) for t in data.traces} == {(row["title"], row["text"]) for row in CORPUS}
    assert data.questions[0].evidence == (f"{name}/B", f"{name}/A")
    assert data.questions[1].evidence == ()  # half of its gold would not be the benchmark's recall
    assert data.questions[0].category == "comparison"
    assert has_note(data, "1 questions without gold titles, or with one that the pool lacks")


@pytest.mark.parametrize("name", ["hotpotqa", "2wiki"])
def test_title_labels_without_corpus(write: Write, name: str) -> None:
    with pytest.raises(ZeroMemError, match=f"corpus: expected the documents that {name} is searched in.*--corpus"):
        load_dataset(name, write("dev.json", [titled()]))


def test_sentence_labels_pool_their_own_paragraphs(write: Write) -> None:
    other = sentenced("s2", context=[["A", ["A is u."]], ["B", ["Another B."]], ["E", [" "]]])
    data = load_dataset("hotpotqa", write("dev.json", [sentenced(), other]))

    assert {(t.id, t.text) for t in data.traces} == {
        ("hotpotqa/A", "A is u."),
        ("hotpotqa/B", "B is v."),
        ("hotpotqa/B#2", "Another B."),
        ("hotpotqa/C", "C is w."),
    }
    assert [q.evidence for q in data.questions] == [("hotpotqa/A", "hotpotqa/B"), ("hotpotqa/A", "hotpotqa/B#2")]
    assert has_note(data, "pool of 4 documents in shuffled order (seed 0); 2 repeated or blank ones left out")


def test_sentence_labels_with_corpus_search_the_corpus(write: Write) -> None:
    data = load_dataset("hotpotqa", write("dev.json", [sentenced()]), write("corpus.json", CORPUS))

    assert len(data.traces) == len(CORPUS)
    assert data.questions[0].evidence == ("hotpotqa/A", "hotpotqa/B")


def test_documents_are_shuffled_the_same_way_each_time(write: Write) -> None:
    corpus = write("corpus.json", [{"title": f"{n:03}", "text": "text"} for n in range(129)])
    orders = [[t.title for t in load_dataset("hotpotqa", write("dev.json", [titled()]), corpus).traces] for _ in "ab"]

    assert orders[0] == orders[1]
    assert sorted(orders[0]) != orders[0]
    assert sum(int(b) - int(a) == 1 for a, b in pairwise(orders[0])) < 10  # neighbours are neighbours by chance


def test_2wiki_questions_with_unresolved_subjects_have_no_evidence(write: Write) -> None:
    rows = [titled("a", unresolved_subjects=[]), titled("b", unresolved_subjects=["Someone"])]
    data = load_dataset("2wiki", write("q.json", rows), write("c.json", CORPUS))

    assert [q.evidence for q in data.questions] == [("2wiki/B", "2wiki/A"), ()]
    assert has_note(data, "1 questions with unresolved subjects")
    assert has_note(data, "1 of 2 questions have no usable evidence")


def test_musique_paragraphs_are_told_apart_by_text(write: Write) -> None:
    def paragraphs(*triples: tuple[str, str, bool]) -> list[dict[str, Any]]:
        keys = ("title", "paragraph_text", "is_supporting")
        return [{"idx": i, **dict(zip(keys, triple, strict=True))} for i, triple in enumerate(triples)]

    first = paragraphs(("X", "one", True), ("X", "two", False), ("Y", "three", True))
    second = paragraphs(("X", "two", True), ("Y", "three", False), ("X#2", "four", True))
    shape = {"question": "Who?", "answer": "I", "answer_aliases": ["me", "I"], "answerable": True}
    rows = [
        {"id": "2hop__1_2", "paragraphs": first, **shape},
        {"id": "3hop1__1", "paragraphs": second, **shape},
        {"id": "2hop__3", "paragraphs": second, **shape, "answerable": False},
    ]
    data = load_dataset("musique", write("dev.jsonl", rows))

    ids = {(t.title, t.text): t.id for t in data.traces}
    assert len(set(ids.values())) == 4 == len(data.traces)
    assert data.questions[0].evidence == (ids["X", "one"], ids["Y", "three"])
    assert data.questions[1].evidence == (ids["X", "two"], ids["X#2", "four"])
    assert data.questions[2].evidence == ()
    assert data.questions[0].answers == ("I", "me")
    assert data.categories == {"2hop": "2hop", "3hop1": "3hop1"}
    assert has_note(data, "1 questions that cannot be answered")


# Long contexts


@pytest.mark.parametrize("row", [titled(), sentenced()])
@pytest.mark.parametrize("documents", [3, 4, 6])
def test_long_context(write: Write, row: dict[str, Any], documents: int) -> None:
    pool = load_dataset("hotpotqa", write("dev.json", [row]), write("c.json", CORPUS)).traces
    question, context = hotpotqa_context(row, pool, documents)

    titles = [t.title for t in context]
    assert len(set(titles)) == documents == len(context)
    assert {"A", "B", "C"} <= set(titles)
    assert {t.boundary for t in context} == {question.boundary} == {question.id}
    assert {t.title for t in context if t.id in question.evidence} == {"A", "B"}
    assert hotpotqa_context(row, pool, documents) == (question, context)

    order = list(range(documents))
    random.Random(4).shuffle(order)
    assert [title for i, title in zip(order, titles, strict=True) if i < 3] == ["ABC"[i] for i in order if i < 3]


def test_long_context_fill_depends_on_the_question_alone() -> None:
    rows = [sentenced(f"s{n}") for n in range(2)]
    pool = hotpotqa_context(sentenced("p", context=[[f"{n}", ["text"]] for n in range(400)]), (), 400)[1]
    fills = [{t.title for t in hotpotqa_context(row, pool, 33)[1]} for row in rows]

    assert fills[0] != fills[1]
    assert fills[0] != {t.title for t in hotpotqa_context(rows[0], pool, 33, seed=5)[1]}


@pytest.mark.parametrize("documents", [2, 7])
def test_long_context_of_another_size_than_the_pool_allows(write: Write, documents: int) -> None:
    pool = load_dataset("hotpotqa", write("dev.json", [titled()]), write("c.json", CORPUS)).traces

    with pytest.raises(ZeroMemError, match=f"documents: expected between 3 .* and 6 .*, got {documents}"):
        hotpotqa_context(titled(), pool, documents)


def test_long_context_needs_the_paragraphs_of_the_question(write: Write) -> None:
    pool = load_dataset("hotpotqa", write("dev.json", [titled()]), write("c.json", CORPUS)).traces

    with pytest.raises(ZeroMemError, match=r"question t1, pool: .*none of title Q"):
        hotpotqa_context(titled(context_titles=["A", "Q"]), pool, 4)


# Plain traces


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


# What every loader has in common


@pytest.mark.parametrize("name", ["part.json", "part.jsonl", "part.json.gz", "part.jsonl.gz"])
def test_every_form_of_a_file_reads_the_same(write: Write, name: str) -> None:
    path = write(name, [haystack("q1"), haystack("q2")])
    data = load_dataset("longmemeval", path)
    plain = load_dataset("longmemeval", write("other.json", [haystack("q1"), haystack("q2")]))

    assert (data.traces, data.questions) == (plain.traces, plain.questions)
    assert data.split == "part"
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_rows(path) == [haystack("q1"), haystack("q2")]


def test_sha256_covers_the_corpus(write: Write) -> None:
    path, corpus = write("dev.json", [titled()]), write("c.json.gz", CORPUS)
    data = load_dataset("hotpotqa", path, corpus)

    assert data.sha256 == hashlib.sha256(path.read_bytes() + corpus.read_bytes()).hexdigest()
    assert has_note(data, "sha256 is of the bytes of dev.json followed by those of c.json.gz")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("locomo", haystack(), "expected 'sample_id' .*got only the keys answer.*look like those of longmemeval"),
        ("longmemeval", sample(), "expected 'question_id' .*look like those of locomo"),
        ("hotpotqa", {"id": "x", "context": [["A", ["a"]]]}, "expected 'supporting_facts'"),
        ("hotpotqa", sentenced(supporting_facts=[3]), "supporting_facts: expected pairs"),
        ("hotpotqa", sentenced(context={"title": []}), "context: expected pairs"),
        ("musique", sentenced(), "expected 'paragraphs' .*look like those of hotpotqa"),
        ("locomo", sample() | {"qa": {}}, r"expected 'qa' \(list\), got 'qa' as dict"),
        ("locomo", sample(asked(6)), r"x\.json\[0\]\.qa\[0\], category: expected 1 to 5, got '6'"),
        ("locomo", sample(asked(evidence=[3])), r"qa\[0\], evidence: expected strings, got 3"),
        ("longmemeval", haystack(haystack_sessions=[1, 2, 3]), "expected a list, got 1"),
        ("longmemeval", haystack(question_date="soon"), r"question_date: time: expected .*, got 'soon'"),
    ],
)
def test_wrong_schema_names_the_key(write: Write, name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ZeroMemError, match=message):
        load_dataset(name, write("x.json", [row]))


def test_a_locomo_turn_that_cannot_be_placed(write: Write) -> None:
    talk = sample()
    talk["conversation"]["session_1"].append(turn("D1:1", "Again"))
    with pytest.raises(ZeroMemError, match=r"session_1\[4\], dia_id: expected each turn once, got 'D1:1'"):
        load_dataset("locomo", write("x.json", [talk]))

    talk["conversation"]["session_1"][4]["dia_id"] = "first"
    with pytest.raises(ZeroMemError, match="dia_id: expected 'D<session>:<turn>', got 'first'"):
        load_dataset("locomo", write("x.json", [talk]))


def test_a_locomo_session_date_that_cannot_be_read(write: Write) -> None:
    talk = sample()
    talk["conversation"]["session_2_date_time"] = "some day in May"
    with pytest.raises(ZeroMemError, match=r"session_2_date_time: time: expected .* got 'some day in May'"):
        load_dataset("locomo", write("x.json", [talk]))

    del talk["conversation"]["session_2_date_time"]
    data = load_dataset("locomo", write("x.json", [talk]))
    assert [t.id for t in data.traces if t.time is None] == ["conv-26/D2:1"]
    assert has_note(data, "1 sessions without a date")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hotpot", {}, "dataset: expected one of locomo, .*, got 'hotpot'; did you mean 'hotpotqa'"),
        ("nothing like it", {}, "dataset: expected one of .*; pass one of these"),
        ("locomo", {"corpus": "c.json"}, "corpus: expected none for locomo"),
        ("musique", {"audited": True}, "only locomo has an audit"),
        ("locomo", {"limit": 0}, "limit: expected at least 1, got 0"),
        ("locomo", {}, r"absent\.json: expected a file that can be read, got 'No such file"),
    ],
)
def test_wrong_arguments(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ZeroMemError, match=message):
        load_dataset(name, tmp_path / "absent.json", **options)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  \n",
        b"[{]",
        b'[{"a": 1}, 3]',
        b"\xff\xfe",
        gzip.compress(b"[]" * 99, mtime=0)[:-9],
        b"\x1f\x8bnot gzip after all",
        b'{"a": ' * 9999,
    ],
)
def test_damaged_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(raw)

    with pytest.raises(ZeroMemError, match=r"x\.json.*: expected .*JSON"):
        load_dataset("locomo", path)


def test_two_questions_of_one_id(write: Write) -> None:
    with pytest.raises(ZeroMemError, match="question id: expected each one once, got 't1'"):
        load_dataset("hotpotqa", write("x.json", [titled(), titled()]), write("c.json", CORPUS))


# The benchmark files themselves


def check(data: Dataset) -> None:
    """What holds of every data set."""
    home = {t.id: t.boundary for t in data.traces}
    assert len(home) == len(data.traces)
    for question in data.questions:
        assert {home[name] for name in question.evidence} <= {question.boundary}
        assert len(set(question.evidence)) == len(question.evidence)
        assert not question.category or question.category in data.categories


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


@pytest.mark.parametrize(
    ("name", "data", "corpus", "traces", "questions", "scored"),
    [
        ("longmemeval", "longmemeval/longmemeval_s_single.json.gz", None, 549, 1, 1),  # of 550, one is invisible
        ("hotpotqa", "hotpotqa/hotpot_dev250_titles.json.gz", "hotpotqa/hotpot_corpus.jsonl.gz", 7704, 250, 250),
        ("hotpotqa", "hotpotqa/hotpot_dev_sentences.json.gz", "hotpotqa/hotpot_corpus.jsonl.gz", 7704, 195, 195),
        ("hotpotqa", "hotpotqa/hotpot_dev_sentences.json.gz", None, 1931, 195, 195),
        ("hotpotqa", "hotpotqa/hotpot_train100.json.gz", None, 994, 100, 100),
        ("musique", "musique/musique_dev100.json.gz", None, 1603, 100, 100),
        ("2wiki", "2wikimultihopqa/questions500.json.gz", "2wikimultihopqa/corpus6119.json.gz", 6119, 500, 482),
    ],
)
def test_other_files(
    shared_data: Path, name: str, data: str, corpus: str | None, traces: int, questions: int, scored: int
) -> None:
    loaded = load_dataset(name, shared_data / data, shared_data / corpus if corpus else None)
    check(loaded)

    assert (len(loaded.traces), len(loaded.questions)) == (traces, questions)
    assert sum(bool(q.evidence) for q in loaded.questions) == scored


def test_hotpotqa_forms_agree(shared_data: Path) -> None:
    """The corpus holds the sentences joined as this loader joins them; both labels name the same documents."""
    folder = shared_data / "hotpotqa"
    pool = load_dataset("hotpotqa", folder / "hotpot_dev250_titles.json.gz", folder / "hotpot_corpus.jsonl.gz")
    own = load_dataset("hotpotqa", folder / "hotpot_dev_sentences.json.gz")

    assert {(t.title, t.text) for t in own.traces} <= {(t.title, t.text) for t in pool.traces}
    gold = {q.id: set(q.evidence) for q in pool.questions}
    shared = [q for q in own.questions if q.id in gold]
    assert shared
    assert all(set(q.evidence) == gold[q.id] for q in shared)


def test_hotpotqa_long_contexts(shared_data: Path) -> None:
    folder = shared_data / "hotpotqa"
    path = folder / "hotpot_dev_sentences.json.gz"
    pool = load_dataset("hotpotqa", path, folder / "hotpot_corpus.jsonl.gz").traces
    for row, documents in zip(read_rows(path), (400, 1600, 3200), strict=False):
        question, context = hotpotqa_context(row, pool, documents)
        assert len({t.id for t in context}) == documents
        assert len(question.evidence) == 2
        assert set(question.evidence) <= {t.id for t in context}
