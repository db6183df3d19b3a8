"""HotpotQA, 2WikiMultihopQA and MuSiQue: pools of documents, their gold ones, and contexts as long as asked for."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks import CORPUS, has_note, sentenced, titled, write

from zeromem_torch.evaluation.datasets import hotpotqa_context, load_dataset, read_rows
from zeromem_torch.substrate.traces import ZeroMemError


@pytest.mark.parametrize("name", ["hotpotqa", "2wiki"])
def test_title_labels_search_the_corpus(tmp_path: Path, name: str) -> None:
    corpus = write(tmp_path, "corpus.jsonl.gz", CORPUS)
    data = load_dataset(name, write(tmp_path, "dev.json.gz", [titled(), titled("t2", gold_titles=["A", "Z"])]), corpus)

    assert sorted(t.id for t in data.traces) == [f"{name}/{title}" for title in "ABCDEF"]
    assert {(t.boundary, t.session, t.role, t.order) for t in data.traces} == {(name, "", "document", 0)}
    assert {(t.title, t.text) for t in data.traces} == {(row["title"], row["text"]) for row in CORPUS}
    assert data.questions[0].evidence == (f"{name}/B", f"{name}/A")
    assert data.questions[1].evidence == ()  # half of its gold would not be the benchmark's recall
    assert data.questions[0].category == "comparison"
    assert has_note(data, "1 questions without gold titles, or with one that the pool lacks")


@pytest.mark.parametrize("name", ["hotpotqa", "2wiki"])
def test_title_labels_without_corpus(tmp_path: Path, name: str) -> None:
    with pytest.raises(ZeroMemError, match=f"corpus: expected the documents that {name} is searched in.*--corpus"):
        load_dataset(name, write(tmp_path, "dev.json", [titled()]))


def test_sentence_labels_pool_their_own_paragraphs(tmp_path: Path) -> None:
    other = sentenced("s2", context=[["A", ["A is u."]], ["B", ["Another B."]], ["E", [" "]]])
    data = load_dataset("hotpotqa", write(tmp_path, "dev.json", [sentenced(), other]))

    assert {(t.id, t.text) for t in data.traces} == {
        ("hotpotqa/A", "A is u."),
        ("hotpotqa/B", "B is v."),
        ("hotpotqa/B#2", "Another B."),
        ("hotpotqa/C", "C is w."),
    }
    assert [q.evidence for q in data.questions] == [("hotpotqa/A", "hotpotqa/B"), ("hotpotqa/A", "hotpotqa/B#2")]
    assert has_note(data, "pool of 4 documents in shuffled order (seed 0); 2 repeated or blank ones left out")


def test_sentence_labels_with_corpus_search_the_corpus(tmp_path: Path) -> None:
    data = load_dataset("hotpotqa", write(tmp_path, "dev.json", [sentenced()]), write(tmp_path, "corpus.json", CORPUS))

    assert len(data.traces) == len(CORPUS)
    assert data.questions[0].evidence == ("hotpotqa/A", "hotpotqa/B")


def test_documents_are_shuffled_the_same_way_each_time(tmp_path: Path) -> None:
    corpus = write(tmp_path, "corpus.json", [{"title": f"{n:03}", "text": "text"} for n in range(129)])
    path = write(tmp_path, "dev.json", [titled()])
    orders = [[t.title for t in load_dataset("hotpotqa", path, corpus).traces] for _ in "ab"]

    assert orders[0] == orders[1]
    assert sorted(orders[0]) != orders[0]
    assert sum(int(b) - int(a) == 1 for a, b in pairwise(orders[0])) < 10  # neighbours are neighbours by chance


def test_2wiki_questions_with_unresolved_subjects_have_no_evidence(tmp_path: Path) -> None:
    rows = [titled("a", unresolved_subjects=[]), titled("b", unresolved_subjects=["Someone"])]
    data = load_dataset("2wiki", write(tmp_path, "q.json", rows), write(tmp_path, "c.json", CORPUS))

    assert [q.evidence for q in data.questions] == [("2wiki/B", "2wiki/A"), ()]
    assert has_note(data, "1 questions with unresolved subjects")
    assert has_note(data, "1 of 2 questions have no usable evidence")


def test_musique_paragraphs_are_told_apart_by_text(tmp_path: Path) -> None:
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
    data = load_dataset("musique", write(tmp_path, "dev.jsonl", rows))

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
def test_long_context(tmp_path: Path, row: dict[str, Any], documents: int) -> None:
    pool = load_dataset("hotpotqa", write(tmp_path, "dev.json", [row]), write(tmp_path, "c.json", CORPUS)).traces
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
def test_long_context_of_another_size_than_the_pool_allows(tmp_path: Path, documents: int) -> None:
    pool = load_dataset("hotpotqa", write(tmp_path, "dev.json", [titled()]), write(tmp_path, "c.json", CORPUS)).traces

    with pytest.raises(ZeroMemError, match=f"documents: expected between 3 .* and 6 .*, got {documents}"):
        hotpotqa_context(titled(), pool, documents)


def test_long_context_needs_the_paragraphs_of_the_question(tmp_path: Path) -> None:
    pool = load_dataset("hotpotqa", write(tmp_path, "dev.json", [titled()]), write(tmp_path, "c.json", CORPUS)).traces

    with pytest.raises(ZeroMemError, match=r"question t1, pool: .*none of title Q"):
        hotpotqa_context(titled(context_titles=["A", "Q"]), pool, 4)


# The files themselves


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
