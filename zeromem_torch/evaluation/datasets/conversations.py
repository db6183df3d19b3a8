"""LoCoMo and LongMemEval: turns in sessions, and evidence that names turns."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeromem_torch.evaluation.datasets.reading import Row, Source, blank, read, rows_of, time_of, trace_of
from zeromem_torch.evaluation.datasets.records import Parts, Question, answers_of, categories_of, counted, unused
from zeromem_torch.substrate.traces import Trace, ZeroMemError

LOCOMO_CATEGORIES = {"1": "multi-hop", "2": "temporal", "3": "open-domain", "4": "single-hop"}
ADVERSARIAL = "5"
# In the order of the official file: the audit names a conversation by its index there.
LOCOMO_SAMPLES = tuple(f"conv-{number}" for number in (26, 30, 41, 42, 43, 44, 47, 48, 49, 50))
LOCOMO_COUNTS = {"1": 282, "2": 321, "3": 96, "4": 841, ADVERSARIAL: 446}
LOCOMO_AUDIT = "label_errors.json"

_SESSION = re.compile(r"session_(\d+)(_date_time)?")
_TURN = re.compile(r"D:?(\d+):(\d+)")


def load_locomo(source: Source) -> Parts:
    """Turns carry the time of their session; queries of stock photos and the model-written summaries are not read."""
    audit, notes = _read_audit(source.path.with_name(LOCOMO_AUDIT)) if source.audited else ({}, [])
    traces: list[Trace] = []
    questions: list[Question] = []
    counts: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    for sample in source.rows:
        boundary = sample.need("sample_id", str)
        talk = Row(f"{sample.place}.conversation", sample.need("conversation", dict))
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
            questions.append(Question(name, boundary, text, evidence, answers_of([answer]), category))
    samples = {row.need("sample_id", str) for row in source.rows}
    notes = [_locomo_counts(samples, categories), *notes, *counted(counts)]
    return Parts(traces, questions, LOCOMO_CATEGORIES, notes)


def _locomo_turns(boundary: str, talk: Row, counts: Counter[str]) -> dict[tuple[int, int], Trace]:
    """The turns of one conversation by (session, turn), as `dia_id` numbers them."""
    keys = {key: match for key in talk.fields if (match := _SESSION.fullmatch(key))}
    sessions = sorted((int(match[1]), key) for key, match in keys.items() if not match[2])
    dated = {int(match[1]) for match in keys.values() if match[2]}
    counts["session dates without a session left out"] += len(dated - {number for number, _ in sessions})
    turns: dict[tuple[int, int], Trace] = {}
    for _, key in sessions:
        date = talk.fields.get(f"{key}_date_time")
        counts["sessions without a date"] += date is None
        time = None if date is None else time_of(f"{talk.place}.{key}_date_time", date)
        for order, turn in enumerate(talk.rows(key)):
            text, dia_id = turn.need("text", str), turn.need("dia_id", str)
            match = _TURN.fullmatch(dia_id)
            if match is None:
                raise ZeroMemError.of(f"{turn.place}, dia_id", "'D<session>:<turn>'", dia_id, "check the file")
            if caption := turn.fields.get("blip_caption"):
                counts["captions without an img_url read like the others"] += not turn.fields.get("img_url")
                text += f" ({caption})"
            if blank(text):
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
            turns[spot] = trace_of(turn.place, fields)
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
    raw, rows = read(path)
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


def load_longmemeval(source: Source) -> Parts:
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
            name = unused(name, used)
            time = time_of(f"{row.place}.haystack_dates[{index}]", date)
            for order, turn in enumerate(rows_of(place, session)):
                text = turn.need("content", str)
                if blank(text):
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
                traces.append(trace_of(turn.place, fields))
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
                answers_of([row.fields.get("answer")]),
                row.need("question_type", str),
                time_of(f"{row.place}.question_date", row.need("question_date", str)),
            )
        )
    return Parts(traces, questions, categories_of(questions), counted(counts))
