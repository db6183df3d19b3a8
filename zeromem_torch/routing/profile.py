"""The query profile (paper Eq. 6): subject, keywords, answer type, temporal cues.

Rules only: patterns and word lists are data, in the substrate's `cues.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from functools import lru_cache

from zeromem_torch.substrate.cues import CUES, GRAMMAR, WORDS, compiled, is_plural
from zeromem_torch.substrate.dates import DateMention, find_dates
from zeromem_torch.substrate.kinds import NOUN_KINDS, AnswerType
from zeromem_torch.substrate.tokenizer import STOP_WORDS, Analyzer
from zeromem_torch.substrate.traces import check_text

__all__ = ["QueryProfile", "name_pattern", "profile_query"]

_ANALYZER = Analyzer(stop_words=True, stemmer="english")


@dataclass(frozen=True, slots=True)
class QueryProfile:
    """What a question says about its answer before anything is searched.

    `relational` counts the hops its form suggests, `local` how much it asks for one place of the
    record; both are sums of the weights in `cues.toml`, about 0 to 5.
    """

    text: str
    subjects: tuple[str, ...]  # speakers it names, as they were given
    keywords: tuple[str, ...]  # terms that are not function words, in order, once each
    answer_types: AnswerType  # never empty
    dates: tuple[DateMention, ...]
    temporal: frozenset[str]  # first, last, before, after, during, recent, future, often
    quoted: tuple[str, ...]
    names: tuple[str, ...]  # capitalised phrases
    relational: float
    local: float


def profile_query(
    text: str,
    *,
    reference: datetime | None = None,
    speakers: Sequence[str] = (),
    analyzer: Analyzer = _ANALYZER,
) -> QueryProfile:
    """Read a question. Relative dates count from `reference`, or from an exact day that the question names itself.

    `speakers` are the people of the query's boundary; one is a subject when the whole name or its
    first word is in the question. Only the keywords are taken from beyond its first 2,000 characters.
    """
    check_text("query", "text", text)
    keywords = tuple(dict.fromkeys(analyzer(text)))
    text, whole = text[:2_000], text
    folded = text.lower().replace("\u2019", "'")
    subjects = _subjects(text, tuple(speakers))
    dates = _dates(text, reference)
    answer_types = _answer_types(folded)
    quoted = tuple(q for match in _QUOTED.finditer(text) if (q := next(filter(None, match.groups()), "").strip()))
    names, runs = _names(text, dates)
    said = _WORD.findall(folded)
    known = {word for name in subjects for word in (name.casefold(), name.casefold().split()[0])}
    others = sum(run.casefold() not in known for run in runs)
    exact = any(mention.kind == "explicit" and mention.last_day - mention.first_day < 32 for mention in dates)
    return QueryProfile(
        text=whole,
        subjects=subjects,
        keywords=keywords,
        answer_types=answer_types,
        dates=dates,
        temporal=frozenset([cue for cue, words in _TEMPORAL.items() if not words.isdisjoint(said)]),
        quoted=quoted,
        names=names,
        relational=_strength("relational", folded)
        + _WEIGHTS["list"] * (AnswerType.LIST in answer_types)
        + _WEIGHTS["names"] * max(others - 1, 0)
        + _WEIGHTS["subjects"] * (len(subjects) > 1),
        local=_strength("local", folded)
        + _WEIGHTS["exact_date"] * exact
        + _WEIGHTS["quoted"] * bool(quoted)
        + _WEIGHTS["subject"] * (len(subjects) == 1),
    )


_ARTICLES = frozenset(("a", "an", "the"))
_COPULAS = frozenset(
    ("of", "two", "is", "are", "was", "were", "'s", "the", "a", "an", "would", "be", "will", "could", "might", "some")
)
_OPENERS, _CONNECTORS = GRAMMAR["openers"], GRAMMAR["connectors"]
_ANSWERS = [(rule["types"], compiled(rule["pattern"])) for rule in CUES["answers"]]
_STRENGTHS = {
    side: [(rule["weight"], rule["most"], compiled(rule["pattern"])) for rule in CUES[side]]
    for side in ("relational", "local")
}
_WEIGHTS: Mapping[str, float] = CUES["weights"]
_TEMPORAL = {cue: frozenset(words.split()) for cue, words in CUES["temporal"].items()}

_WORD = re.compile(r"\w+")
_QUOTED = re.compile(
    '"([^"]{1,300})"|\u201c([^\u201d]{1,300})\u201d|\u00ab([^\u00bb]{1,300})\u00bb'
    r"|(?<![\w'])'([^\W\d_a-z][^']{1,80})'(?!\w)"
)
_NAME_WORDS = re.compile(
    rf"(?:{'|'.join(sorted(GRAMMAR['titles']))})\.|"
    r"(?:[^\W\d_]\.)+(?!\w)|\w+(?:['\u2019&./-]\w+)*"
)


def _subjects(text: str, speakers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in dict.fromkeys(speakers) if name.split() and name_pattern(name).search(text))


@lru_cache(maxsize=4096)
def name_pattern(name: str) -> re.Pattern[str]:
    """A whole name or its first word, in any case; if that is a common word or a month ("Will", "May"), as written."""
    words = name.split()
    forms = {" ".join(words), words[0]} if len(words[0]) > 1 else {" ".join(words)}
    common = words[0].casefold() in STOP_WORDS | _OPENERS | GRAMMAR["calendar"]
    body = "|".join(sorted((re.escape(form).replace(r"\ ", r"\s+") for form in forms), key=len, reverse=True))
    start = r"(?<!^)" if common else ""
    return re.compile(rf"{start}(?<!\w)(?:{body})(?!\w)", 0 if common else re.IGNORECASE)


def _dates(text: str, reference: datetime | None) -> tuple[DateMention, ...]:
    """In "last week, as mentioned on 6 November 2023" the relative part counts from the named day."""
    found = find_dates(text, reference)
    explicit = [m for m in found if m.kind == "explicit"]
    named = next((m for m in explicit if m.first_day == m.last_day), None)
    if named is None:
        return tuple(found)
    day = datetime.combine(date.fromordinal(named.first_day), time(12), UTC)
    relative = [m for m in find_dates(text, day) if m.kind == "relative"]
    return tuple(sorted([*explicit, *relative], key=lambda mention: mention.start))


def _strength(side: str, folded: str) -> float:
    strength = 0.0
    for weight, most, pattern in _STRENGTHS[side]:
        strength += weight * min(len(pattern.findall(folded)), most)
    return strength


def _answer_types(folded: str) -> AnswerType:
    for names, pattern in _ANSWERS:
        if match := pattern.search(folded):
            types = AnswerType(0)
            for name in names.split():
                if name == "head":
                    types |= _head_types(folded[match.end() :])
                elif name == "choice":  # "Is it A or B?": an answer is one of the two, never yes
                    types |= AnswerType.PHRASE
                else:
                    types |= AnswerType[name.upper()]
            return types or AnswerType.PHRASE
    return AnswerType.PHRASE


def _head_types(rest: str) -> AnswerType:
    """What the noun after "what" or "which" stands for; a plural asks for a list as well."""
    words = [word for found in WORDS.findall(rest[:200]) for word in _split_possessive(found)]
    phrase: list[str] = []
    for position, word in enumerate(words):
        if not phrase and word in _COPULAS:  # "what is the name of the ..."
            continue
        if word == "of" and phrase and _singular(phrase[-1]) in GRAMMAR["transparent"]:
            plural = AnswerType.LIST if is_plural(phrase[-1]) else AnswerType(0)
            return _head_types(" ".join(words[position + 1 :])) | plural
        if word in GRAMMAR["noun_phrase_ends"] or (phrase and word in _ARTICLES):
            break
        phrase.append(word)
    for word in reversed(phrase):  # the last noun we know: what follows it is a verb, or a name in apposition
        noun = word.rpartition("-")[2]
        if types := NOUN_KINDS.get(noun) or NOUN_KINDS.get(_singular(noun)):
            return types | (AnswerType.LIST if is_plural(word) else AnswerType(0))
    if phrase and is_plural(phrase[-1]):
        return AnswerType.LIST | AnswerType.PHRASE
    return AnswerType.PHRASE


def _split_possessive(word: str) -> list[str]:
    return [word[:-2], "'s"] if word.endswith("'s") else [word]


def _singular(word: str) -> str:
    if not is_plural(word) or not word.endswith("s"):
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("ches", "shes", "xes", "sses")) else word[:-1]


def _names(text: str, dates: Sequence[DateMention]) -> tuple[tuple[str, ...], list[str]]:
    """Capitalised phrases, once each with the possessors inside them, and the whole runs they come from."""
    if text.isupper():  # shouting names nothing
        return (), []
    names: list[str] = []
    runs: list[str] = []
    for first, start, end in _capital_runs(text):
        run = _trimmed_run(text[start:end], first=first)
        if not run or any(mention.start <= start and end <= mention.end for mention in dates):
            continue
        if text[end : end + 1] == ")" and run.lower() in NOUN_KINDS:  # "Gaby (1987 Film)"
            continue
        runs.append(run)
        names.append(run)
        names.extend(part for part in re.split(r"['\u2019][sS]\s+", run) if part != run)
    return tuple(dict.fromkeys(names)), list(dict.fromkeys(runs))


def _capital_runs(text: str) -> Iterator[tuple[bool, int, int]]:
    """Spans of capitalised words with "of", "the" and the like between them; and whether a sentence begins there."""
    start, end = -1, 0  # of the run in progress
    opening = first = True
    previous = 0  # where the last word ended
    for match in _NAME_WORDS.finditer(text):
        word, gap = match.group(), text[previous : match.start()]
        opening = not previous or (gap != " " and any(mark in gap for mark in ".?!\n"))
        joined = start >= 0 and gap in (" ", " & ", ": ", "-")
        mixed = not word.islower() and word[0].islower() and any(c.isupper() for c in word[1:])
        capital = mixed or word[0].isupper()
        if start >= 0 and not (
            joined and (capital or word.lower() in _CONNECTORS or (word.isdigit() and len(word) < 4))
        ):
            yield first, start, end
            start = -1
        if capital or (start >= 0 and word.isdigit()):
            if start < 0:
                start, first = match.start(), opening
            end = match.end()
        previous = match.end()
    if start >= 0:
        yield first, start, end


def _trimmed_run(run: str, *, first: bool) -> str:
    """A run without the function words a sentence begins with, and without a closing possessive; "" for no name."""
    words = run.split()
    while words and first and words[0].lower().replace("\u2019", "'") in _OPENERS - _ARTICLES:
        words = words[1:]
    if not words or (len(words) == 1 and words[0].lower().replace("\u2019", "'") in _OPENERS):
        return ""
    name = " ".join(words)
    if name.lower() in GRAMMAR["calendar"]:
        return ""
    return re.sub(r"(?:['\u2019][sS]?|[.,])$", "", name) if len(name) > 2 else name
