"""What a reader says around its answer, taken off: thoughts, labels, the question again, explanations, markup."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from zeromem_torch.substrate.tokenizer import sentence_spans, tokenize

LONGEST = 2_000  # characters of a reply that are read: an answer is short, and what comes later explains it

_CONTROL = re.compile(r"<\|[^<>|\n]{1,40}\|>|</?s>|\[/?INST\]|```\w*")
_MARKUP = re.compile(r"(?<!\w)(\*{1,3}|_{2,3}|`)(?=\S)(.+?)(?<=\S)\1(?!\w)")
_HEADING = re.compile(r"^\s*(?:#{1,6}|>)\s+")
_BULLET = re.compile(r"^\s*(?:[-*\u2022\u2013]\s+|(?:\(?\d{1,2}[.)]\s+)+)")
_CITED = re.compile(
    r"\s?(?:\[(?:item\s)?\d{1,3}(?:,\s?\d{1,3})*\]|\((?:item|note|source|evidence|see)s?\b[^()]{0,80}\))(?!\w)", re.I
)
_LABEL = re.compile(r"^\W*(?:(?:final|short|the|my)\s+)*answer\s*[:=]\s*|^\W*(?:a|output|response)\s*:\s+", re.I)
_QUESTION = re.compile(r"^\W*(?:q|question)\s*:", re.I)
_EXPLAINS = re.compile(r"^\W*(?:note|explanation|reason(?:ing)?|evidence|source|context|confidence)s?\s*:", re.I)
_SEEN = "notes?|evidence|conversations?|context|memor(?:y|ies)|text|items?|information|dialogue|messages?|documents?"
_LEADS = re.compile(
    rf"""^(?:
      (?:sure|certainly|of\ course|okay|ok|great\ question)\s*[,!.:]\s*
    | (?:based\ on|according\ to|from|in)\s+(?:the|these|your)\s+(?:\w+\s+){{0,3}}(?:{_SEEN})
      (?:\s+(?:provided|given|above|shown))?\s*[,:]\s*
    | (?:so|thus|therefore|hence)\s*,\s*
    | i(?:['\u2019]m|\ am)\ not\ (?:\w+\ )?sure\s*,?\s+but\s+
      (?:i(?:\ think|\ believe|\ guess|['\u2019]m\ sure|\ am\ sure)\ (?:that\ )?)?(?:it(?:['\u2019]s|\ is|\ was)\ )?
    | (?:the|my)\s+(?:\w+\s+){{0,2}}answer\s+(?:to\s+(?:the|your|this)\s+question\s+)?
      (?:is|was|would\ be)\s*(?:that\s+)?:?\s*
    | (?:here\ (?:is|are)|these\ are|the\ following\ (?:is|are))\b[^:\n]{{0,80}}:\s+
    )(?=\S)""",
    re.I | re.X,
)
_TAILS = re.compile(
    r"\s?[,;(\u2014-]?\s?\b(?:according\s+to|based\s+on|as\s+(?:mentioned|stated|said|noted|shown|described))\s+"
    rf"(?:(?:in|by|on)\s+)?(?:the\s+)?(?:\w+\s+){{0,3}}(?:{_SEEN})\b.{{0,60}}$",
    re.I,
)
_AGAIN = re.compile(r"(?<!\w)(\w[^.:;!]{2,59}?)(?:\s*[.:;!]\s+\1(?!\w))+.{0,60}$", re.I)  # a small model cannot stop
_QUOTES = {'"': '"', "\u201c": "\u201d", "'": "'", "\u2018": "\u2019", "\u00ab": "\u00bb", "(": ")", "[": "]"}
_REFUSALS = re.compile(
    r"\b(?:not\s+in\s+(?:the\s+)?memory|no\s+(?:such\s+)?information\s+(?:is|was|about|on|in|given|available|provided)"
    r"|unanswerable|insufficient\s+(?:information|evidence)|not\s+(?:explicitly\s+)?(?:mentioned|stated|specified)"
    r"|(?:does\s+not|doesn['\u2019]?t|do\s+not|don['\u2019]?t)\s+(?:mention|say|specify)"
    r"|(?:can|could)(?:not|['\u2019]t|\s+not)\s+(?:be\s+)?(?:answered|answer|determined?))\b"
    r"|^(?:i\s+(?:do\s+not|don['\u2019]?t)\s+know|(?:i(?:['\u2019]m|\s+am)\s+not\s+sure[\s,.]*)+|not\s+(?:known|available|provided|given)|unknown|unsure|none|n/a"
    r"|no\s+(?:answer|information))\W*$",
    re.I,
)


def lines_of(raw: str, question: str, speakers: Iterable[str] = (), *, dated: bool = False) -> list[str]:
    """The lines of a reply that may hold its answer; several where it is a list of lines, none for a blank reply.

    A copied line of the evidence loses its speaker, and the day before that unless `dated`.
    """
    thought = raw.rfind("</think>")
    if thought >= 0:
        raw = raw[thought + len("</think>") :]
    elif raw[:100].lstrip().startswith("<think>"):  # it never came to its answer
        return []
    text = _CONTROL.sub(" ", raw[:LONGEST])
    asked = tokenize(question[:LONGEST])
    names = "|".join(re.escape(name) for name in speakers if name.strip())
    head = re.compile(rf"^\W*([^:\n]{{0,40}}\d,?\s+)?(?:{names})\s*:\s+") if names else None
    lines: list[tuple[bool, str]] = []
    for line in text.splitlines():
        if _EXPLAINS.match(line) and lines:
            break
        if _LABEL.match(line):  # what was said before it led there
            lines = []
        elif _QUESTION.match(line):
            if lines:  # it goes on with a question of its own
                break
            continue
        bullet = bool(_BULLET.match(line))
        if said := _plain(_BULLET.sub("", line), asked, head, r"\1" if dated else ""):
            lines.append((bullet, said))
        elif lines and not line.strip() and not lines[-1][0]:
            break  # a paragraph further down explains
    bullets = [said for bullet, said in lines if bullet]
    if len(bullets) > 1:
        return bullets
    return [said for _, said in lines[:1]]


def refuses(text: str) -> bool:
    """Whether a reply says, in few words, that the evidence does not hold the answer."""
    return len(text) < 160 and bool(_REFUSALS.search(text))


def sentences_of(text: str) -> list[str]:
    """Sentences without what ends them; initials ("J.K. Rowling") end none."""
    sentences: list[str] = []
    start = 0
    for _, end in sentence_spans(text):
        if end == len(text) or not _INITIALS.search(text, start, end):
            sentences.append(unended(text[start:end]))
            start = end
    return [sentence for sentence in sentences if sentence]


def unended(text: str) -> str:
    """Without the marks that end a sentence, the quotes around the whole of it, and blanks; "U.S." and "Jr." stay."""
    while True:
        kept = text.strip().strip(",;:")
        if kept.endswith((".", "!")) and not kept.endswith("..."):
            last = kept.rsplit(None, 1)[-1][:-1]
            if "." not in last and len(last) > 1 and last.casefold() not in _ABBREVIATED:
                kept = kept[:-1]
        close = _QUOTES.get(kept[:1])
        if close and len(kept) > 1 and kept.endswith(close) and not set(kept[1:-1]) & {kept[0], close}:
            kept = kept[1:-1]
        if kept == text:
            return kept
        text = kept


_INITIALS = re.compile(r"(?:\b[A-Z]\.)+$")
_ABBREVIATED = frozenset("jr sr inc ltd co corp st dr mr mrs ms etc vs no".split())


def _plain(line: str, asked: list[str], head: re.Pattern[str] | None, kept_of_head: str) -> str:
    """A line without labels, lead-ins and markup; "" for one that only repeats the question."""
    line = " ".join("".join(" " if unicodedata.category(char) == "Cc" else char for char in line).split())
    while True:  # what is taken off may lay the next open; each round makes it shorter
        said = _MARKUP.sub(r"\2", _HEADING.sub("", line))
        said = _LABEL.sub("", _CITED.sub("", _AGAIN.sub(r"\1", said)))
        said = head.sub(kept_of_head, said) if head else said
        said = _LEADS.sub("", said.strip())
        said = _TAILS.sub("", said) or said
        said = unended(_without_question(said, asked))
        if said == line:
            return said
        line = said


def _without_question(text: str, asked: list[str]) -> str:
    end = text.find("?")
    if end < 0 or not asked:
        return text
    said = tokenize(text[:end])
    repeats = said and sum(word in asked for word in said) >= 0.8 * len(said)
    return text[end + 1 :].strip() if repeats else text
