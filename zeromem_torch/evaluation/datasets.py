"""Benchmark files in, traces and questions out; every repair and every omission is counted in `Dataset.notes`.

A document has no session: in the files of the multi-hop sets the gold paragraphs of a question lie side by side, so
an order between documents would read the labels. Every pool of documents is therefore shuffled, with a fixed seed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zeromem_torch.substrate.traces import Trace, ZeroMemError, nearest, parse_time

__all__ = ["DATASETS", "Dataset", "Question", "hotpotqa_context", "load_dataset", "read_rows"]

POOL_SEED = 0  # order of a pool of documents

LOCOMO_CATEGORIES = {"1": "multi-hop", "2": "temporal", "3": "open-domain", "4": "single-hop"}
ADVERSARIAL = "5"
# In the order of the official file: the audit names a conversation by its index there.
LOCOMO_SAMPLES = tuple(f"conv-{number}" for number in (26, 30, 41, 42, 43, 44, 47, 48, 49, 50))
LOCOMO_COUNTS = {"1": 282, "2": 321, "3": 96, "4": 841, ADVERSARIAL: 446}
LOCOMO_AUDIT = "label_errors.json"

_KIND = TypeVar("_KIND")
_SESSION = re.compile(r"session_(\d+)(_date_time)?")
_TURN = re.compile(r"D:?(\d+):(\d+)")
# Keys by which a data set is known, to name the right loader when the wrong one was asked for.
_SIGNS = {
    "conversation": "locomo",
    "haystack_sessions": "longmemeval",
    "paragraphs": "musique",
    "unresolved_subjects": "2wiki",
    "evidences": "2wiki",
    "supporting_facts": "hotpotqa",
    "gold_titles": "hotpotqa",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question put to one boundary. No evidence means that none is usable: recall leaves the question out."""

    id: str
    boundary: str
    text: str
    evidence: tuple[str, ...]  # ids of traces of the same boundary, each once
    answers: tuple[str, ...] = ()
    category: str = ""
    time: datetime | None = None


@dataclass(frozen=True)
class Dataset:
    name: str
    split: str  # the file's name without its suffixes
    traces: tuple[Trace, ...]
    questions: tuple[Question, ...]
    categories: Mapping[str, str]  # as printed: "1" -> "multi-hop"
    sha256: str  # of the data file's bytes as stored, followed by the corpus file's if one was given
    notes: tuple[str, ...]  # what was repaired or dropped, in words with counts


@dataclass(frozen=True, slots=True)
class _Row:
    """A JSON object, and where it stands, so that an error can say so."""

    place: str
    fields: Mapping[str, Any]

    def need(self, key: str, kind: type[_KIND]) -> _KIND:
        """The value of a key that the schema has."""
        value = self.fields.get(key)
        if isinstance(value, kind):
            return value
        keys = ", ".join(sorted(self.fields)) or "(none)"
        got = f"{key!r} as {type(value).__name__}" if key in self.fields else f"only the keys {keys}"
        known = next((name for sign, name in _SIGNS.items() if sign in self.fields), None)
        looks = f"its keys look like those of {known}; " if known else ""
        advice = f"{looks}check the file and the data set's name"
        raise ZeroMemError(f"{self.place}: expected {key!r} ({kind.__name__}), got {got}; {advice}")

    def rows(self, key: str) -> list[_Row]:
        return _rows(f"{self.place}.{key}", self.need(key, list))

    def several(self, key: str) -> list[Any]:
        """A list; none if the key is absent, one value if it holds a bare one."""
        value = self.fields.get(key)
        return value if isinstance(value, list) else [] if value is None else [value]

    def strings(self, key: str) -> list[str]:
        values = self.several(key)
        if other := [value for value in values if not isinstance(value, str)]:
            raise ZeroMemError.of(f"{self.place}, {key}", "strings", other[0], "check the file")
        return values


class _Source(NamedTuple):
    path: Path
    rows: list[_Row]
    corpus: list[_Row] | None
    audited: bool


class _Parts(NamedTuple):
    traces: Sequence[Trace]
    questions: Sequence[Question]
    categories: Mapping[str, str]
    notes: list[str]


def load_dataset(
    name: str, data: str | Path, corpus: str | Path | None = None, *, audited: bool = False, limit: int | None = None
) -> Dataset:
    """Read a benchmark file: .json (an array) or .jsonl (one object a line), plain or gzipped.

    `corpus` is the pool of `title`, `text` documents that hotpotqa and 2wiki are searched in; a file of the official
    schema can do without, and is then searched in the pool of all its own paragraphs.

    `audited` (locomo) replaces the evidence of the questions that `label_errors.json`, next to the data file, marks
    WRONG_CITATION, by its `correct_evidence`. Gold answers and the other kinds of error are left as they are.

    `limit` keeps the first questions. A pool stays whole, so that ranks mean the same; a boundary that nobody asks
    about any more is left out.
    """
    if name not in _LOADERS:
        known = ", ".join(DATASETS)
        raise ZeroMemError.of("dataset", f"one of {known}", name, f"{nearest(name, DATASETS)}pass one of these")
    if corpus is not None and name not in _WITH_CORPUS:
        raise ZeroMemError.of("corpus", f"none for {name}", str(corpus), f"only {' and '.join(_WITH_CORPUS)} take one")
    if audited and name != "locomo":
        raise ZeroMemError.of("audited", f"False for {name}", audited, "only locomo has an audit of its labels")
    if limit is not None and limit < 1:
        raise ZeroMemError.of("limit", "at least 1", limit, "leave it out to load every question")

    raw, rows = _read(Path(data))
    notes = []
    documents = None
    if corpus is not None:
        more, documents = _read(Path(corpus))
        raw += more
        notes.append(f"sha256 is of the bytes of {Path(data).name} followed by those of {Path(corpus).name}")
    parts = _LOADERS[name](_Source(Path(data), rows, documents, audited))
    traces, questions = tuple(parts.traces), tuple(parts.questions)
    _refuse_repeats("trace id", (t.id for t in traces))
    _refuse_repeats("question id", (q.id for q in questions))

    notes += parts.notes
    if bare := _bare(questions):
        notes.append(f"{bare} of {len(questions)} questions have no usable evidence: kept, but left out of recall")
    if limit is not None and limit < len(questions):
        notes.append(f"limited to the first {limit} of {len(questions)} questions")
        questions = questions[:limit]
        asked = {q.boundary for q in questions}
        traces = tuple(t for t in traces if t.boundary in asked)
    digest = hashlib.sha256(raw).hexdigest()
    return Dataset(name, _stem(Path(data)), traces, questions, parts.categories, digest, tuple(notes))


def read_rows(path: str | Path) -> list[Mapping[str, Any]]:
    """The objects of a .json or .jsonl file, plain or gzipped, as they are."""
    return [row.fields for row in _read(Path(path))[1]]


def hotpotqa_context(
    question: Mapping[str, Any], pool: Sequence[Trace], documents: int, seed: int = 4
) -> tuple[Question, tuple[Trace, ...]]:
    """The long context of one HotpotQA question (a row of its file): a boundary of its own, named by the question's id.

    Its own paragraphs (gold and official distractors) come first, then documents of the pool with other titles up to
    `documents` in all, drawn with a generator seeded by `seed` and the id, so that two questions get different ones
    and the order of questions does not matter; then all are shuffled with `random.Random(seed)`. The traces are in
    the order in which a reader without a memory would be given them, as "Document i:", title, new line, text.
    """
    row = _Row("question", question)
    name = _question_id(row)
    own = [(title, text) for title, text in dict.fromkeys(_own_paragraphs(row)) if not _blank(text)]
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


# Reading files


def _read(path: Path) -> tuple[bytes, list[_Row]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ZeroMemError(
            f"{path}: expected a file that can be read, got {error.strerror!r}; check the path"
        ) from error
    try:
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        expected, advice = "JSON in UTF-8, plain or gzipped", "fetch the file again"
        raise ZeroMemError.of(path.name, expected, str(error), advice) from error
    if re.match(r"\s*\[", text):
        return raw, _rows(path.name, _parsed(text, path.name))
    # Not splitlines(): U+2028 may stand unescaped inside a JSON string.
    lines = [(f"{path.name} line {n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows = [_object(place, _parsed(line, place)) for place, line in lines]
    if not rows:
        raise ZeroMemError(f"{path.name}: expected JSON objects, got an empty file; check the path")
    return raw, rows


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        advice = "write an array of objects, or one object a line"
        raise ZeroMemError(f"{place}: expected JSON, got something else ({error}); {advice}") from error


def _rows(place: str, items: Any) -> list[_Row]:
    if not isinstance(items, list):
        raise ZeroMemError.of(place, "a list", items, "check the file and the data set's name")
    return [_object(f"{place}[{i}]", item) for i, item in enumerate(items)]


def _object(place: str, item: Any) -> _Row:
    if not isinstance(item, dict):
        raise ZeroMemError.of(place, "a JSON object", item, "check the file and the data set's name")
    return _Row(place, item)


def _trace(place: str, fields: Mapping[str, Any]) -> Trace:
    try:
        return Trace.from_dict(fields)
    except ZeroMemError as error:
        raise ZeroMemError(f"{place}: {error}") from error


def _time(place: str, value: Any) -> datetime:
    try:
        return parse_time(value)
    except ZeroMemError as error:
        raise ZeroMemError(f"{place}: {error}") from error


def _answers(values: Iterable[Any]) -> tuple[str, ...]:
    """Answers as text, each once; an absent one is none."""
    return tuple(dict.fromkeys(str(value) for value in values if value is not None and str(value).strip()))


def _refuse_repeats(what: str, ids: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    if repeated:
        raise ZeroMemError.of(what, "each one once", ", ".join(repeated[:3]), "make them unique")


def _seen(questions: Iterable[Question]) -> dict[str, str]:
    return {category: category for category in sorted({q.category for q in questions} - {""})}


def _counted(counts: Mapping[str, int]) -> list[str]:
    return [f"{count} {what}" for what, count in counts.items() if count]


def _bare(questions: Iterable[Question]) -> int:
    return sum(not q.evidence for q in questions)


def _blank(text: str) -> bool:
    """A trace must say something; white space and invisible format characters do not."""
    return not any(character.isprintable() and not character.isspace() for character in text)


def _stem(path: Path) -> str:
    return re.sub(r"(\.jsonl?)?(\.gz)?$", "", path.name)


# Conversations


def _load_locomo(source: _Source) -> _Parts:
    """Turns carry the time of their session; queries of stock photos and the model-written summaries are not read."""
    audit, notes = _read_audit(source.path.with_name(LOCOMO_AUDIT)) if source.audited else ({}, [])
    traces: list[Trace] = []
    questions: list[Question] = []
    counts: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    for sample in source.rows:
        boundary = sample.need("sample_id", str)
        talk = _Row(f"{sample.place}.conversation", sample.need("conversation", dict))
        turns = _locomo_turns(boundary, talk, counts)
        traces += turns.values()
        texts = set()
        for index, row in enumerate(sample.rows("qa")):
            text, category = row.need("question", str), str(row.need("category", int))
            if category not in LOCOMO_COUNTS:
                raise ZeroMemError.of(f"{row.place}, category", "1 to 5", category, "check the file")
            categories[category] += 1
            counts["questions that repeat one of their conversation (category 5 too): nothing dropped"] += text in texts
            texts.add(text)
            if category == ADVERSARIAL:
                continue
            evidence = _locomo_evidence(row.strings("evidence"), turns, counts)
            corrected = audit.get((boundary, index, text))
            if corrected is not None:
                counts[_AUDITED] += 1
                evidence = _locomo_evidence(corrected, turns, Counter()) or evidence
            answer = row.fields.get("answer")
            counts["questions without an answer"] += answer is None
            counts["integer answers read as text"] += isinstance(answer, int)
            name = f"{boundary}/q{index}"
            questions.append(Question(name, boundary, text, evidence, _answers([answer]), category))
    samples = {row.need("sample_id", str) for row in source.rows}
    notes = [_locomo_counts(samples, categories), *notes, *_counted(counts)]
    return _Parts(traces, questions, LOCOMO_CATEGORIES, notes)


def _locomo_turns(boundary: str, talk: _Row, counts: Counter[str]) -> dict[tuple[int, int], Trace]:
    """The turns of one conversation by (session, turn), as `dia_id` numbers them."""
    keys = {key: match for key in talk.fields if (match := _SESSION.fullmatch(key))}
    sessions = sorted((int(match[1]), key) for key, match in keys.items() if not match[2])
    dated = {int(match[1]) for match in keys.values() if match[2]}
    counts["session dates without a session left out"] += len(dated - {number for number, _ in sessions})
    turns: dict[tuple[int, int], Trace] = {}
    for _, key in sessions:
        date = talk.fields.get(f"{key}_date_time")
        counts["sessions without a date"] += date is None
        time = None if date is None else _time(f"{talk.place}.{key}_date_time", date)
        for order, turn in enumerate(talk.rows(key)):
            text, dia_id = turn.need("text", str), turn.need("dia_id", str)
            match = _TURN.fullmatch(dia_id)
            if match is None:
                raise ZeroMemError.of(f"{turn.place}, dia_id", "'D<session>:<turn>'", dia_id, "check the file")
            if caption := turn.fields.get("blip_caption"):
                counts["captions without an img_url read like the others"] += not turn.fields.get("img_url")
                text += f" ({caption})"
            if _blank(text):
                counts["turns without text or caption left out"] += 1
                continue
            fields = {
                "id": f"{boundary}/{dia_id}",
                "boundary": boundary,
                "text": text,
                "session": key,
                "order": order,
                "time": time,
                "speaker": turn.need("speaker", str),
            }
            spot = int(match[1]), int(match[2])
            if spot in turns:
                raise ZeroMemError.of(f"{turn.place}, dia_id", "each turn once", dia_id, "check the file")
            turns[spot] = _trace(turn.place, fields)
    return turns


def _locomo_evidence(
    strings: Sequence[str], turns: Mapping[tuple[int, int], Trace], counts: Counter[str]
) -> tuple[str, ...]:
    """Ids of the turns that the strings name. One string may hold several ids, or digits with leading zeros."""
    found: dict[str, None] = {}
    for string in strings:
        spots = [(int(session), int(turn)) for session, turn in _TURN.findall(string)]
        ids = [turns[spot].id for spot in spots if spot in turns]
        counts["evidence strings that name no turn dropped"] += not ids
        plain = bool(ids) and ids[0].endswith(f"/{string}")
        counts["evidence strings that are no plain turn id repaired"] += bool(ids) and not plain
        found |= dict.fromkeys(ids)
    return tuple(found)


def _locomo_counts(samples: set[str], categories: Counter[str]) -> str:
    shown = ", ".join(f"{name} {categories[key]}" for key, name in LOCOMO_CATEGORIES.items())
    shown += f"; adversarial {categories[ADVERSARIAL]} (left out)"
    if samples != set(LOCOMO_SAMPLES):
        return f"{len(samples)} conversations, not the ten of the official file: {shown}"
    if categories != LOCOMO_COUNTS:
        expected = " / ".join(map(str, LOCOMO_COUNTS.values()))
        advice = "fetch the official file again"
        raise ZeroMemError(f"locomo: expected {expected} questions in categories 1 to 5, got {shown}; {advice}")
    return f"the ten conversations of the official file, with its counts: {shown}"


_AUDITED = "questions with the audit's evidence in place of a wrong citation"


def _read_audit(path: Path) -> tuple[dict[tuple[str, int, str], list[str]], list[str]]:
    """Corrected evidence by conversation, index into qa and question; and what to say of the file."""
    raw, rows = _read(path)
    corrections: dict[tuple[str, int, str], list[str]] = {}
    for row in rows:
        name = row.need("question_id", str)
        match = re.fullmatch(r"locomo_(\d+)_qa(\d+)", name)
        if match is None or int(match[1]) >= len(LOCOMO_SAMPLES):
            expected = "'locomo_<conversation>_qa<index>'"
            raise ZeroMemError.of(f"{row.place}, question_id", expected, name, "check the file")
        if row.need("error_type", str) == "WRONG_CITATION":
            spot = LOCOMO_SAMPLES[int(match[1])], int(match[2]), row.need("question", str)
            corrections[spot] = row.strings("correct_evidence")
    digest = hashlib.sha256(raw).hexdigest()
    return corrections, [f"audited by the {len(corrections)} wrong citations of {path.name} (sha256 {digest})"]


def _load_longmemeval(source: _Source) -> _Parts:
    """One boundary per question; evidence is the turns marked `has_answer`."""
    traces: list[Trace] = []
    questions: list[Question] = []
    counts: Counter[str] = Counter()
    for row in source.rows:
        boundary = row.need("question_id", str)
        sessions, names, dates = (row.need(f"haystack_{key}", list) for key in ("sessions", "session_ids", "dates"))
        if not len(sessions) == len(names) == len(dates):
            got = f"{len(sessions)} sessions, {len(names)} ids, {len(dates)} dates"
            raise ZeroMemError.of(f"{row.place}, haystack", "as many ids and dates as sessions", got, "check the file")
        evidence = []
        used: set[str] = set()
        for index, (session, name, date) in enumerate(zip(sessions, map(str, names), dates, strict=True)):
            place = f"{row.place}.haystack_sessions[{index}]"
            counts["session ids used twice by a question numbered"] += name in used
            name = _unused(name, used)
            time = _time(f"{row.place}.haystack_dates[{index}]", date)
            for order, turn in enumerate(_rows(place, session)):
                text = turn.need("content", str)
                if _blank(text):
                    counts["turns without content left out"] += 1
                    continue
                fields = {
                    "id": f"{boundary}/{name}:{order + 1}",
                    "boundary": boundary,
                    "text": text,
                    "session": name,
                    "order": order,
                    "time": time,
                    "role": turn.need("role", str),
                }
                traces.append(_trace(turn.place, fields))
                if turn.fields.get("has_answer"):
                    evidence.append(traces[-1].id)
        if boundary.endswith("_abs"):  # its turns marked has_answer are near the question, but do not answer it
            counts["questions whose answer is not in the history: no evidence"] += 1
            evidence = []
        questions.append(
            Question(
                boundary,
                boundary,
                row.need("question", str),
                tuple(evidence),
                _answers([row.fields.get("answer")]),
                row.need("question_type", str),
                _time(f"{row.place}.question_date", row.need("question_date", str)),
            )
        )
    return _Parts(traces, questions, _seen(questions), _counted(counts))


# Pools of documents


class _Documents(NamedTuple):
    traces: tuple[Trace, ...]
    by_content: Mapping[tuple[str, str], str]  # (title, text) -> trace id
    by_title: Mapping[str, list[str]]
    note: str

    @classmethod
    def of(cls, boundary: str, documents: Iterable[tuple[str, str]], seed: int | None = POOL_SEED) -> _Documents:
        """A boundary of documents, each (title, text) once; named by title, numbered where a title repeats."""
        every = list(documents)
        distinct = [(title, text) for title, text in dict.fromkeys(every) if not _blank(text)]
        used: set[str] = set()
        by_content = {(title, text): f"{boundary}/{_unused(title or 'untitled', used)}" for title, text in distinct}
        by_title: dict[str, list[str]] = {}
        for (title, _), name in by_content.items():
            by_title.setdefault(title, []).append(name)
        if seed is not None:
            random.Random(seed).shuffle(distinct)
        traces = tuple(
            _trace(
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


def _load_documents(name: str, source: _Source) -> _Parts:
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
    counts = {
        "questions with unresolved subjects: no evidence": unresolved,
        "questions without gold titles, or with one that the pool lacks: no evidence": _bare(questions) - unresolved,
    }
    return _Parts(pool.traces, questions, _seen(questions), [pool.note, *_counted(counts)])


def _own_paragraphs(row: _Row) -> list[tuple[str, str]]:
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


def _document_question(row: _Row, boundary: str, pool: _Documents) -> Question:
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
    return Question(_question_id(row), boundary, text, evidence, _answers([row.fields.get("answer")]), kind)


def _question_id(row: _Row) -> str:
    return row.need("_id" if "_id" in row.fields else "id", str)


def _all_found(gold: Sequence[str | None]) -> tuple[str, ...]:
    """Every gold document, or none: with one missing, recall of the rest would not be the benchmark's."""
    found = [name for name in gold if name is not None]
    return tuple(dict.fromkeys(found)) if len(found) == len(gold) else ()


def _load_musique(source: _Source) -> _Parts:
    """Titles repeat in MuSiQue: the key of a paragraph is (title, paragraph_text)."""

    def key(paragraph: _Row) -> tuple[str, str]:
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
        answers = _answers([row.fields.get("answer"), *row.several("answer_aliases")])
        hops = name.partition("__")[0]  # "2hop", "3hop1", ...
        questions.append(Question(name, "musique", row.need("question", str), evidence, answers, hops))
    return _Parts(pool.traces, questions, _seen(questions), [pool.note, *_counted(counts)])


def _unused(name: str, used: set[str]) -> str:
    """`name`, or the first of name#2, name#3, ... that is free; it is then taken."""
    free, number = name, 1
    while free in used:
        number += 1
        free = f"{name}#{number}"
    used.add(free)
    return free


# Plain traces

_QUESTION_FIELDS = ("question", "boundary", "id", "evidence", "answers", "category", "time")


def _load_jsonl(source: _Source) -> _Parts:
    """Traces, by the names of Trace's fields; an object with a `question` is a question.

    A trace without an `order` takes the number of earlier traces of its session.
    """
    traces: list[Trace] = []
    lengths: Counter[tuple[str, str]] = Counter()
    asked = [row for row in source.rows if "question" in row.fields]
    for row in source.rows:
        if "question" not in row.fields:
            fields = {key: value for key, value in row.fields.items() if value is not None}
            session = str(fields.get("boundary")), str(fields.get("session", ""))
            traces.append(_trace(row.place, {"order": lengths[session], **fields}))
            lengths[session] += bool(session[1])
    boundaries = {trace.id: trace.boundary for trace in traces}
    questions = [_plain_question(row, number, boundaries) for number, row in enumerate(asked, start=1)]
    return _Parts(traces, questions, _seen(questions), [])


def _plain_question(row: _Row, number: int, boundaries: Mapping[str, str]) -> Question:
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
        answers=_answers(row.several("answers")),
        category=str(row.fields.get("category") or ""),
        time=None if time is None else _time(row.place, time),
    )


_LOADERS: dict[str, Callable[[_Source], _Parts]] = {
    "locomo": _load_locomo,
    "longmemeval": _load_longmemeval,
    "hotpotqa": lambda source: _load_documents("hotpotqa", source),
    "musique": _load_musique,
    "2wiki": lambda source: _load_documents("2wiki", source),
    "jsonl": _load_jsonl,
}
DATASETS = tuple(_LOADERS)
_WITH_CORPUS = ("hotpotqa", "2wiki")
