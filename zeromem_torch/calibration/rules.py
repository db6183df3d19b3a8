"""The rules of answer calibration (paper Eq. 16), one for each kind of answer: what a reply becomes, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date as calendar
from typing import NamedTuple

from zeromem_torch.calibration.candidates import FINDERS, SOME_DAY, Candidate, dates_of, day_of, days_of, quoted_of
from zeromem_torch.calibration.chatter import sentences_of, unended
from zeromem_torch.calibration.support import Reading, terms_of
from zeromem_torch.substrate.cues import GRAMMAR
from zeromem_torch.substrate.tokenizer import STOP_WORDS


class Draft(NamedTuple):
    """A reply after a rule. Without support, `rests_on` is empty; `rule` is "" where nothing changed."""

    text: str
    rests_on: tuple[int, ...] = ()  # ranks of evidence items
    rule: str = ""
    why: str = ""


def calibrated(reading: Reading, text: str) -> Draft:
    """The rule of the question's type, applied once."""
    for name, rule in _RULES.items():
        if name in reading.types:
            return rule(reading, text)
    return phrase(reading, text)


def pointed(reading: Reading, reply: str) -> Draft | None:
    """What an item says, where a reply names the item instead: "[2] 8 May 2023, Ann (s/D2:3)"; None for other replies.

    Of the item, the only name or quantity of the type asked for, or else the sentence that is most about the question.
    A date question takes the day from such a reply, a count its number, "who" its name.
    """
    line = reply.strip()[:LONGEST_HEAD].split("\n", 1)[0]
    cited = _PARENTHESES.search(line)
    number = _NUMBERED.match(line)
    bare = _NUMBERED.sub("", _PARENTHESES.sub("", line), count=1).strip(" .,:")
    dates = dates_of(bare, SOME_DAY)
    said = "|".join(re.escape(bare[candidate.start : candidate.end]) for candidate in dates)
    left = frozenset(_WORDS.findall(re.sub(said or r"(?!)", " ", bare).casefold()))
    if not (cited or (number and not left and not dates and "number" not in reading.types)):
        return None
    rank = _item_named(reading, cited[1] if cited else "", dates, left, int(number[1]) if number else 0)
    if rank is None:
        return None
    names = frozenset(name for speaker in reading.speakers for name in speaker.casefold().split())
    if not left <= names or (dates and "date" in reading.types) or (left and "person" in reading.types):
        return Draft(bare, (rank,)) if bare and bare != reply else None
    why = f"the reader named {reading.items[rank].trace_id}, which says so"
    for kind in ("title", "person", "place", "organisation", "duration", "number"):
        if kind in reading.types:
            fresh = {c.key: c for c in reading.found(kind, rank) if not terms_of(c.text) <= reading.asked | names}
            if len(fresh) == 1:
                return Draft(next(iter(fresh.values())).text, (rank,), f"{kind}: of the item named", why)
    sentences = [sentence for sentence in sentences_of(reading.texts[rank]) if not sentence.endswith("?")]
    if not sentences:
        return None
    about = [(len(terms_of(one) & reading.asked - names), len(terms_of(one) - names)) for one in sentences]
    return Draft(sentences[about.index(max(about))], (rank,), "of the item named", why)


def _item_named(
    reading: Reading, cited: str, dates: list[Candidate], words: frozenset[str], number: int
) -> int | None:
    """By its trace id, its day and speaker, or its number in the prompt."""
    for rank, item in enumerate(reading.items):
        if cited == item.trace_id:
            return rank
    for rank, item in enumerate(reading.items):
        if dates and item.time and dates[0].key == days_of(item.time) and words <= {*item.speaker.casefold().split()}:
            return rank
    return number - 1 if 0 < number <= len(reading.items) else None


def date(reading: Reading, text: str) -> Draft:
    """A date in one form, no finer than asked for. Relative ones count from the day of the item they stand in."""
    draft = _date(reading, text)
    asked, said = _ASKS_STRETCH.search(reading.question), dates_of(draft.text)
    if asked and len(said) == 1 and said[0].key[0] == said[0].key[1]:
        day = calendar.fromordinal(said[0].key[0])
        coarse = f"{day:%B} {day.year}" if asked[1].casefold() == "month" else str(day.year)
        return draft._replace(text=coarse, rule="date: as asked", why=f"{draft.text!r}, by the {asked[1]}")
    return draft


def _date(reading: Reading, text: str) -> Draft:
    """A date in one form.

    A reader that gives the day on which something was said, where the item itself says "yesterday", means yesterday.
    """
    if said := dates_of(text):
        first = said[0]
        words = text[first.start : first.end]
        same = (words, f"the {words}")  # where what is vague has been resolved before
        ranks = [r for r, _ in enumerate(reading.items) if any(_equal(told, first, same) for told in reading.dates(r))]
        about = reading.question if _is_date(text) else text
        if not ranks and len(said) == 1 and (meant := _meant(reading, about, first.key)):
            return _resolved(reading, *meant)
        rests_on = (ranks or _inside(reading, first))[:1]
        if not rests_on and (better := _day_of_what_is_asked(reading, text)):
            return better
        return _formed(text, _date_alone(text, said), rests_on, "date: normalised")
    for rank in reading.nearest(text):  # a date without its year, or a relative one in the words of the item
        moment = reading.items[rank].time
        for candidate in dates_of(text, moment)[:1] if moment else ():
            if moment and candidate.key in (days_of(moment), *(found.key for found in reading.dates(rank))):
                return _resolved(reading, rank, candidate)
    dateless = not _DIGIT.search(text) and not dates_of(text, SOME_DAY) and not terms_of(text) <= reading.asked
    if dateless and _ASKS_WHEN.search(reading.question):
        for rank in reading.support(text, 0.7):
            moment, found = reading.items[rank].time, {c.key: c for c in reading.dates(rank)}
            if len(found) == 1:
                return _resolved(reading, rank, next(iter(found.values())))
            if not found and moment and not _meant(reading, reading.question, days_of(moment)):
                why = f"{reading.items[rank].trace_id} says so, and was said on that day"
                return Draft(day_of(moment), (rank,), "date: of the item", why)
    return (
        _replaced(reading, "date", text)
        or _day_of_what_is_asked(reading, text)
        or Draft(text, reading.support(text))
    )


def quantity(reading: Reading, text: str) -> Draft:
    """The count alone of a longer reply, as it was given: "three" for "She has three turtles."."""
    if "date" in reading.types and dates_of(text):
        return date(reading, text)
    kinds = [kind for kind in ("duration", "number") if kind in reading.types]
    for kind in kinds:
        said = FINDERS[kind](text)
        if len({candidate.key for candidate in said}) > 1:
            break
        if len({candidate.key for candidate in said}) == 1:
            key = said[0].key
            ranks = [rank for rank in reading.nearest(text) if any(c.key == key for c in reading.found(kind, rank))]
            shown = said[0].text if len(text.split()) > SHORT else text
            return _formed(text, shown, ranks[:1], f"{kind}: shortened")
    for kind in kinds:
        if better := _replaced(reading, kind, text):
            return better
    return phrase(reading, text)


def named(reading: Reading, text: str) -> Draft:
    """The one name of a sentence; a reply that is no sentence stays as it is."""
    kind = next(kind for kind in ("title", "person", "place", "organisation") if kind in reading.types)
    if better := _replaced(reading, kind, text):
        return better
    if kind == "title" and len(quoted := quoted_of(text)) == 1:
        return _formed(text, quoted[0].text, reading.support(quoted[0].text), "title: shortened")
    draft = phrase(reading, text)
    if len(draft.text.split()) > SENTENCE and text[0].isupper():  # written as a sentence
        fresh = {c.key: c for c in FINDERS[kind](draft.text) if not terms_of(c.text) <= reading.asked}
        if len(fresh) == 1:
            name = next(iter(fresh.values())).text
            if rests_on := reading.support(name):
                return _formed(text, name, rests_on, f"{kind}: shortened")
    return draft


def yes_no(reading: Reading, text: str) -> Draft:
    """Yes or no with its hedge, and with its reason where the evidence has it.

    A sentence that only repeats the question says yes, or no where it denies. Alone, yes and no rest on the item that
    is most about the question.
    """
    words = terms_of(text)
    if match := _YES_NO.match(text):
        reason = text[match.end() :]
        if terms_of(reason) - reading.asked and (rests_on := reading.support(reason, 0.5)):
            return Draft(text, rests_on)
        answer = f"{match['hedge'] or ''}{'yes' if match['word'].casefold() in _YES else 'no'}".capitalize()
    elif words and len(words & reading.asked) >= 0.5 * len(words):
        answer = "No" if _DENIES.search(text) else "Yes"
    else:
        return phrase(reading, text)
    return _formed(text, answer, reading.support(reading.question, 0.5), "yes/no: shortened")


def several(reading: Reading, text: str) -> Draft:
    """A list without what repeats and without what no item supports; as it is where nothing would be left."""
    whole = phrase(reading, text)
    listed = _SUCH_AS.split(whole.text, maxsplit=1)[-1]
    elements = [element for part in _BETWEEN.split(listed) if (element := unended(part))]
    kept: dict[frozenset[str], str] = {}
    rests_on: list[int] = []
    for element in elements:
        words = terms_of(element)
        if words - reading.asked and (ranks := reading.support(element, LIKE)):
            kept.setdefault(words, element)
            rests_on.extend(ranks)
    rests_on = list(dict.fromkeys(rests_on))
    if not kept or (len(kept) == len(elements) and (listed == whole.text or len(kept) == 1)):
        return whole._replace(rests_on=tuple(rests_on))
    left_out = ", ".join(repr(element) for element in dict.fromkeys(elements) if element not in kept.values())
    why = f"nothing in the evidence supports {left_out}" if left_out else "its elements, each once"
    return Draft(", ".join(kept.values()), tuple(rests_on), "list: pruned", why)


def phrase(reading: Reading, text: str) -> Draft:
    """What the sentence that answers says, without the words of the question that lead up to it."""
    short = text
    if len(sentences := sentences_of(text)) > 1:
        shared = [len(terms_of(sentence) & reading.asked) for sentence in sentences]
        short = sentences[shared.index(max(shared))] if any(shared) else text
    short = _before_echo(reading, _after_echo(reading, short)) or short
    if "list" not in reading.types and (tail := _TAIL.search(short)) and not reading.support(short[tail.start() :]):
        short = unended(short[: tail.start()]) or short
    return _formed(text, short, reading.support(short), "shortened")


_RULES: Mapping[str, Callable[[Reading, str], Draft]] = {
    "list": several,
    "yes_no": yes_no,
    "duration": quantity,
    "number": quantity,
    "date": date,
    "title": named,
    "person": named,
    "place": named,
    "organisation": named,
}
SHORT = 3  # words of a quantity that stays as it is: "40 points", "about two weeks"
SENTENCE = 6  # more words than that are no name
LIKE = 0.34  # of an element's words that one item must hold: a reader says "dog tags" for "tags for my dogs"
LONGEST_HEAD = 200  # characters of a line that names an item
_PARENTHESES = re.compile(r"\(([^()\s]{1,120})\)")
_NUMBERED = re.compile(r"^\W*(?:item\s+)?(\d{1,2})(?=\W|$)(?!\s*(?:-|/|:?\d))(?:[\].):]+|\s*$)", re.I)
_ASKS_STRETCH = re.compile(r"\b(?:which|what)\s+(month|year)\b", re.I)
_WORDS = re.compile(r"\w+(?:['\u2019-]\w+)*")
_LINKS = frozenset("because since by to as with for if when while so not no".split())
_YES = frozenset(("yes", "yeah", "yep", "yup"))
_YES_NO = re.compile(
    r"(?P<hedge>(?:(?:most\s+)?likely|probably|maybe|perhaps)\s+)?(?P<word>yes|yeah|yep|yup|no|nope|not)\b", re.I
)
_PREPOSITION = re.compile(r"\s(?:on|in|at|for|during|with|by|from|after|before)\s")
_DID = re.compile(r"\b(?:did|does|do)\b", re.I)
_DENIES = re.compile(r"\b(?:not|never|no|unlikely|neither|nor|none)\b|n['\u2019]t\b", re.I)
_ASKS_WHEN = re.compile(
    r"\bwhen\b|^\W*(?:\w+\s+)?(?:what|which)\s+(?:exact\s+)?(?:date|day|month|year|week|weekend|time|season)\b", re.I
)
_ASKS_AHEAD = re.compile(r"\bwhen\s+(?:does|do|will|shall|is|are|am)\b", re.I)
_QUALIFIERS = re.compile(
    r"(?:\bthe\s+)?(?:\b(?:around|about|since|until|till|by|early|late|mid|before|after|between|during|circa|from)[\s-]+"
    r"|\bthe\s+)(?:in\s+|the\s+)?$",
    re.I,
)
_DIGIT = re.compile(r"\d")
_UNREAD = re.compile(r"\d\S*\s*$")
_TAIL = re.compile(
    r",\s+(?:and\s+)?(?:which|who|making|showing|highlighting|indicating|reflecting|demonstrating|suggesting|symboli[sz]ing)\b"
)
_SUCH_AS = re.compile(r"^.*?\b(?:including|such\s+as)\s+")
_BETWEEN = re.compile(r"\s*[;\n]\s*|,\s+(?:and\s+|or\s+)?|\s+(?:and|&)\s+")


def _formed(text: str, shown: str, rests_on: Iterable[int], rule: str) -> Draft:
    if shown == text:
        return Draft(text, tuple(rests_on))
    return Draft(shown, tuple(rests_on), rule, f"{text!r} in short" if shown in text else f"{text!r} in one form")


def _is_date(text: str) -> bool:
    said = dates_of(text)
    return bool(said) and said[0].start == 0 and said[0].end == len(text)


def _resolved(reading: Reading, rank: int, candidate: Candidate) -> Draft:
    item = reading.items[rank]
    why = f"{item.trace_id} was said on {day_of(item.time)}" if item.time else f"{item.trace_id} says so"
    return Draft(candidate.text, (rank,), "date: resolved", why)


def _equal(told: Candidate, said: Candidate, words: tuple[str, ...]) -> bool:
    return told.key == said.key or told.text in words


def _meant(reading: Reading, about: str, day: tuple[int, int]) -> tuple[int, Candidate] | None:
    """The one date of the item that was said on this day, and shares most words with a text."""
    for rank in reading.nearest(about):
        moment, dates = reading.items[rank].time, reading.dates(rank)
        if moment and days_of(moment) == day:
            return (rank, dates[0]) if len({candidate.key for candidate in dates}) == 1 else None
    return None


def _replaced(reading: Reading, kind: str, text: str) -> Draft | None:
    """The only candidate of the evidence in place of a reply that says nothing new, or nothing but a date."""
    if terms_of(text) - reading.asked and (kind == "date" or not _is_date(text)):
        return None
    if (only := reading.only(kind)) is None:
        return None
    rank, candidate = only
    if kind in ("place", "organisation", "title") and set(candidate.text.casefold().split()) <= reading.names:
        return None
    why = f"nothing supports {text!r}; {reading.items[rank].trace_id} has the only {kind} of the evidence"
    return Draft(candidate.text, (rank,), f"{kind}: replaced", why)


def _day_of_what_is_asked(reading: Reading, text: str) -> Draft | None:
    """For a date that no item bears out: the one that the item most about the question tells of, or its own day.

    Such an item holds at least half of the question's words, the speakers' names aside. What is still to come ("When
    does the course start?") is not of its own day: then the one date of that day's talk behind it, in its place.
    """
    names = frozenset().union(*map(terms_of, reading.speakers))
    asked = reading.asked - names
    if not reading.items or not asked or not _ASKS_WHEN.search(reading.question) or reading.support(text):
        return None
    rank = reading.nearest(reading.question)[0]
    item, dates = reading.items[rank], {candidate.key: candidate for candidate in reading.dates(rank)}
    if len(asked & reading.terms[rank]) < 0.5 * len(asked) or len(dates) > 1 or not item.time:
        return None
    if not dates and _ASKS_AHEAD.search(reading.question):
        return _told_behind(reading, rank, text)
    told = next(iter(dates.values())).text if dates else day_of(item.time)
    why = f"nothing bears {text!r} out; {item.trace_id} is most about the question, and was said on {day_of(item.time)}"
    return None if told == text else Draft(told, (rank,), "date: replaced", why)


def _told_behind(reading: Reading, rank: int, text: str) -> Draft | None:
    """The one date that is told on the day of an item, behind it."""
    moment = reading.items[rank].time
    behind = {
        candidate.key: (other, candidate)
        for other, item in enumerate(reading.items)
        if moment and item.time and moment < item.time and days_of(item.time) == days_of(moment)
        for candidate in reading.dates(other)
    }
    if len(behind) != 1:
        return None
    ((other, candidate),) = behind.values()
    ids = reading.items[other].trace_id, reading.items[rank].trace_id
    why = f"nothing bears {text!r} out; {ids[0]} tells when, behind {ids[1]}, which is most about the question"
    return Draft(candidate.text, (other,), "date: replaced", why)


def _inside(reading: Reading, said: Candidate) -> list[int]:
    """Items whose day, or a date in whose text, lies inside a month or a year that was said."""
    first, last = said.key
    inside = []
    for rank, item in enumerate(reading.items):
        days = [candidate.key for candidate in reading.dates(rank)] + ([days_of(item.time)] if item.time else [])
        if any(first <= day[0] and day[1] <= last for day in days):
            inside.append(rank)
    return inside


def _date_alone(text: str, said: list[Candidate]) -> str:
    """The dates in our form, with the words that qualify them ("around", "the week before") and those between them.

    As it is where a date is more than was understood of it ("Januarty 5, 2024").
    """
    first, last = said[0], said[-1]
    before = text[: first.start]
    if _UNREAD.search(before):
        return text
    qualifier = _QUALIFIERS.search(before)
    start = qualifier.start() if qualifier else first.start
    for candidate in reversed(said):
        text = text[: candidate.start] + candidate.text + text[candidate.end :]
    grown = sum(len(candidate.text) - (candidate.end - candidate.start) for candidate in said)
    return text[start : last.end + grown]


def _before_echo(reading: Reading, text: str) -> str:
    """Without a last phrase that repeats the question: of "a new job on 2 May 2023", asked of that day, "a new job"."""
    for match in reversed(list(_PREPOSITION.finditer(text))):
        tail = terms_of(text[match.start() :])
        if tail and tail <= reading.asked and not terms_of(text[: match.start()]) <= reading.asked:
            return unended(text[: match.start()])
    return text


def _after_echo(reading: Reading, text: str) -> str:
    """What follows the words that repeat the question: of "Caroline is researching adoption", "adoption"."""
    cut = behind = 0
    subject = verb = asked = False
    for count, match in enumerate(_WORDS.finditer(text)):
        word = match.group().casefold().replace("\u2019", "'")
        bare = word.removesuffix("'s")
        if any(mark in text[behind : match.start()] for mark in ";:(\u2014"):
            break
        behind = match.end()
        if word in GRAMMAR["auxiliaries"] or bare in reading.names:
            verb = verb or bare not in reading.names
            subject = subject or (count == 0 and bare in reading.names)
            cut = match.end()
        elif (terms := terms_of(word)) and terms <= reading.asked:
            asked = True
            cut = match.end()
        elif (count == 1 and subject and _DID.search(reading.question)) or word in _LINKS & reading.words:
            continue  # "Ann met" for "did Ann meet"; "the team she signed with"
        elif bare not in STOP_WORDS or bare in _LINKS or count == 0:
            break
    return unended(text[cut:]) if verb or (subject and asked) else text
