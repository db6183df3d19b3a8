"""HotpotQA, 2WikiMultihopQA and MuSiQue: questions over one pool of documents, and evidence that names documents.

A document has no session: in the files of these sets the gold paragraphs of a question lie side by side, so an order
between documents would read the labels. Every pool of documents is therefore shuffled, with a fixed seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zeromem_torch.evaluation.datasets.reading import Row, Source, blank, trace_of
from zeromem_torch.evaluation.datasets.records import (
    Parts,
    Question,
    answers_of,
    categories_of,
    counted,
    unused,
    without_evidence,
)
from zeromem_torch.substrate.traces import Trace, ZeroMemError

POOL_SEED = 0  # order of a pool of documents


def hotpotqa_context(
    question: Mapping[str, Any], pool: Sequence[Trace], documents: int, seed: int = 4
) -> tuple[Question, tuple[Trace, ...]]:
    """The long context of one HotpotQA question (a row of its file): a boundary of its own, named by the question's id.

    Its own paragraphs (gold and official distractors) come first, then documents of the pool with other titles up to
    `documents` in all, drawn with a generator seeded by `seed` and the id, so that two questions get different ones
    and the order of questions does not matter; then all are shuffled with `random.Random(seed)`. The traces are in
    the order in which a reader without a memory would be given them, as "Document i:", title, new line, text.
    """
    row = Row("question", question)
    name = _question_id(row)
    own = [(title, text) for title, text in dict.fromkeys(_own_paragraphs(row)) if not blank(text)]
    if not own:  # title labels: the paragraphs stand in the pool
        texts = {t.title: t.text for t in pool}
        wanted = row.strings("context_titles")
        if missing := [title for title in wanted if title not in texts]:
            expected, advice = "every paragraph of the question in the pool", "take the corpus that belongs to the file"
            raise ZeroMemError.of(f"question {name}, pool", expected, f"none of title {missing[0]}", advice)
        own = [(title, texts[title]) for title in dict.fromkeys(wanted)]
    titles = {title for title, _ in own}
    others = [(t.title, t.text) for t in pool if t.title not in titles]
    if not 0 <= documents - len(own) <= len(others):
        expected = f"between {len(own)} (the question's own) and {len(own) + len(others)} (the pool)"
        raise ZeroMemError.of("documents", expected, documents, "take another size, or a larger pool")
    chosen = own + random.Random(f"{seed}/{name}").sample(others, documents - len(own))
    random.Random(seed).shuffle(chosen)
    context = _Documents.of(name, chosen, seed=None)
    return _document_question(row, name, context), context.traces


class _Documents(NamedTuple):
    traces: tuple[Trace, ...]
    by_content: Mapping[tuple[str, str], str]  # (title, text) -> trace id
    by_title: Mapping[str, list[str]]
    note: str

    @classmethod
    def of(cls, boundary: str, documents: Iterable[tuple[str, str]], seed: int | None = POOL_SEED) -> _Documents:
        """A boundary of documents, each (title, text) once; named by title, numbered where a title repeats."""
        every = list(documents)
        distinct = [(title, text) for title, text in dict.fromkeys(every) if not blank(text)]
        used: set[str] = set()
        by_content = {(title, text): f"{boundary}/{unused(title or 'untitled', used)}" for title, text in distinct}
        by_title: dict[str, list[str]] = {}
        for (title, _), name in by_content.items():
            by_title.setdefault(title, []).append(name)
        if seed is not None:
            random.Random(seed).shuffle(distinct)
        traces = tuple(
            trace_of(
                boundary,
                {"id": by_content[title, text], "boundary": boundary, "text": text, "title": title, "role": "document"},
            )
            for title, text in distinct
        )
        note = f"pool of {len(distinct)} documents in shuffled order (seed {seed})"
        if left_out := len(every) - len(distinct):
            note += f"; {left_out} repeated or blank ones left out"
        return cls(traces, by_content, by_title, note)

    def find(self, title: str, text: str = "") -> str | None:
        """The document with this text, else the only one of this title."""
        named = self.by_title.get(title, [])
        return self.by_content.get((title, text)) or (named[0] if len(named) == 1 else None)


def load_documents(name: str, source: Source) -> Parts:
    """HotpotQA and 2WikiMultihopQA: gold titles, or the official schema's supporting facts, over one pool."""
    if source.corpus is not None:
        documents = [(row.need("title", str), row.need("text", str)) for row in source.corpus]
    else:
        documents = [paragraph for row in source.rows for paragraph in _own_paragraphs(row)]
        if not documents:
            got, advice = "none, and no paragraphs in the data file", "pass corpus=PATH (--corpus PATH)"
            raise ZeroMemError.of("corpus", f"the documents that {name} is searched in", got, advice)
    pool = _Documents.of(name, documents)
    questions = [_document_question(row, name, pool) for row in source.rows]
    unresolved = sum(bool(row.fields.get("unresolved_subjects")) for row in source.rows)
    lacking = without_evidence(questions) - unresolved
    counts = {
        "questions with unresolved subjects: no evidence": unresolved,
        "questions without gold titles, or with one that the pool lacks: no evidence": lacking,
    }
    return Parts(pool.traces, questions, categories_of(questions), [pool.note, *counted(counts)])


def _own_paragraphs(row: Row) -> list[tuple[str, str]]:
    """The paragraphs that the official schema gives with a question; their sentences joined as in the corpus."""
    own = []
    for entry in row.several("context"):
        match entry:
            case [str(title), [*sentences]] if all(isinstance(sentence, str) for sentence in sentences):
                own.append((title, " ".join(sentence.strip() for sentence in sentences)))
            case _:
                expected = "pairs of a title and a list of sentences"
                raise ZeroMemError.of(f"{row.place}, context", expected, entry, "check the file")
    return own


def _document_question(row: Row, boundary: str, pool: _Documents) -> Question:
    if "gold_titles" in row.fields:
        titles = row.strings("gold_titles")
    else:
        titles = []
        for fact in row.need("supporting_facts", list):
            match fact:
                case [str(title), *_]:
                    titles.append(title)
                case _:
                    expected = "pairs of a title and a sentence number"
                    raise ZeroMemError.of(f"{row.place}, supporting_facts", expected, fact, "check the file")
    own = dict(_own_paragraphs(row))
    gold = [pool.find(title, own.get(title, "")) for title in dict.fromkeys(titles)]
    usable = not row.fields.get("unresolved_subjects")
    evidence = _all_found(gold) if usable else ()
    text, kind = row.need("question", str), str(row.fields.get("type") or "")
    return Question(_question_id(row), boundary, text, evidence, answers_of([row.fields.get("answer")]), kind)


def _question_id(row: Row) -> str:
    return row.need("_id" if "_id" in row.fields else "id", str)


def _all_found(gold: Sequence[str | None]) -> tuple[str, ...]:
    """Every gold document, or none: with one missing, recall of the rest would not be the benchmark's."""
    found = [name for name in gold if name is not None]
    return tuple(dict.fromkeys(found)) if len(found) == len(gold) else ()


def load_musique(source: Source) -> Parts:
    """Titles repeat in MuSiQue: the key of a paragraph is (title, paragraph_text)."""

    def key(paragraph: Row) -> tuple[str, str]:
        return paragraph.need("title", str), paragraph.need("paragraph_text", str)

    paragraphs = [row.rows("paragraphs") for row in source.rows]
    pool = _Documents.of("musique", (key(paragraph) for own in paragraphs for paragraph in own))
    questions = []
    counts: Counter[str] = Counter()
    for row, own in zip(source.rows, paragraphs, strict=True):
        gold = [pool.find(*key(paragraph)) for paragraph in own if paragraph.need("is_supporting", bool)]
        evidence = _all_found(gold)
        if row.fields.get("answerable") is False:
            counts["questions that cannot be answered: no evidence"] += 1
            evidence = ()
        name = row.need("id", str)
        answers = answers_of([row.fields.get("answer"), *row.several("answer_aliases")])
        hops = name.partition("__")[0]  # "2hop", "3hop1", ...
        questions.append(Question(name, "musique", row.need("question", str), evidence, answers, hops))
    return Parts(pool.traces, questions, categories_of(questions), [pool.note, *counted(counts)])
