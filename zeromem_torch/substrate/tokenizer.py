"""Text to terms for BM25 (the lexical signal of the paper's substrate), and text to sentences.

Both sides of every match, units and queries, go through the same functions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import snowballstemmer

from zeromem_torch.substrate.traces import ZeroMemError

__all__ = ["STOP_WORDS", "Analyzer", "sentence_spans", "tokenize"]

_LONGEST = 256  # characters of a term: room for any digest, but not for a pasted blob


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# English function words. Not here: "us" (U.S. folds to it), "may" and "will" (a month, a name).
STOP_WORDS = _words(
    """
    a an the this that these those some any each every either neither such
    i me my mine myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves someone something anything
    who whom whose which what when where why how
    am is are was were be been being do does did doing done have has had having
    can could would should shall might must ought
    and or but nor so yet if then else than because while although though as until unless whether
    of at by for with about against between into through during before after above below to from up down in out on
    off over under again further once here there upon onto within without toward towards among along around near
    all both few more most other others only own same too very just also even still already ever much many
    no not yes eg ie etc per via
    aren't can't couldn't didn't doesn't don't hadn't hasn't haven't isn't mustn't shan't shouldn't wasn't weren't
    won't wouldn't i'm i've i'd i'll you're you've you'd you'll he'd he'll she'd she'll we're we've we'd we'll
    they're they've they'd they'll it'd it'll that'd that'll there'd there'll who'd who'll what're let
    """
)

# Apostrophes and hyphens have one form each, a zero-width space parts words, and joiners and
# variation selectors, which change the look and not the word, are dropped.
_FOLDED: dict[int, str | None] = {
    **dict.fromkeys(map(ord, "\u2018\u2019\u02bc\u201b\u02b9\u05f3"), "'"),
    **dict.fromkeys((0x2010, 0x2011), "-"),
    0x200B: " ",
    **dict.fromkeys((0xAD, 0x200C, 0x200D, 0x2060, 0xFEFF, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))),
}

# Scripts written without spaces between words (Hangul too: its particles are glued on):
# Han, kana and Hangul, then Thai, Lao, Burmese and Khmer.
_UNSPACED = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff\U00020000-\U000323af"
    "\u0e01-\u0e30\u0e32\u0e40-\u0e46\u0e81-\u0eb0\u0eb2\u0ebd-\u0ec6\u1000-\u102a\u103f\u1780-\u17b3"
)


def tokenize(text: str) -> list[str]:
    """Terms of a text in order, NFKC and casefolded, and never none for a text that is not blank.

    - A possessive 's is dropped; 1,000 is 1000; U.S. is us.
    - `well-known` and `and/or` are their parts. Identifiers (`CN-A10293`, `user_id`, `a.b@c.org`, `16-year-old`,
      `example.com`) are the whole and its parts, but bare digits split from a version, a decimal or a
      date (`v2.1.0`, `3.14`, `2023-05-07`) are not terms, save for runs of three or more, such as years.
    - Scripts without spaces give overlapping pairs of characters, a lone character itself; combining
      marks stay with their base. An emoji is a term (its skin tone is not), a flag is one.
    - A text of nothing but punctuation is its blank-separated pieces.
    """
    if text.isascii():
        folded = text.lower()
        tokens = _split_ascii(folded)
    else:
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        tokens = _split_unicode(folded.translate(_FOLDED))
    return tokens or [piece[:_LONGEST] for piece in folded.split()]


@dataclass(frozen=True, slots=True)
class Analyzer:
    """Terms of a text with stop words removed and words stemmed, as asked for.

    `stemmer` names a Snowball algorithm ("english"). Only plain words are stemmed. A text of nothing
    but stop words keeps them; a word whose stem is empty stays as it is.
    """

    stop_words: bool = False
    stemmer: str | None = None

    def __post_init__(self) -> None:
        if self.stemmer is not None and self.stemmer not in snowballstemmer.algorithms():
            known = ", ".join(snowballstemmer.algorithms())
            raise ZeroMemError.of("stemmer", f"None or one of {known}", self.stemmer, "name a Snowball algorithm")

    def __call__(self, text: str) -> list[str]:
        tokens = tokenize(text)
        if self.stop_words:
            tokens = [token for token in tokens if token not in STOP_WORDS] or tokens
        if self.stemmer is not None:
            language = self.stemmer
            tokens = [_stem(language, token) for token in tokens]
        return tokens


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Character spans of the sentences of a text, in order and apart, that hold all of it but blanks between.

    A line break ends a sentence. A full stop does not after an abbreviation, an initial, or inside a
    number, a name or an address; nor do dots or quotes that a small letter follows.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    for end in _ends(text):
        _append_trimmed(spans, text, start, end)
        start = end
    _append_trimmed(spans, text, start, len(text))
    return spans


def _pattern(letters: str) -> str:
    """A word, or words joined by one joiner: a colon or comma joins digits only, a comma only thousands."""
    joiner = r"[-_.@&/'+]|(?<=[0-9]):(?=[0-9])|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))"
    return rf"[{letters}]++(?:(?:{joiner})[{letters}]++)*+(?:\+\+|\#)?"


_ASCII = re.compile(_pattern("a-z0-9"))


def _split_ascii(text: str) -> list[str]:
    tokens: list[str] = []
    append, extend = tokens.append, tokens.extend
    for token in _ASCII.findall(text):
        if token.isalnum() and len(token) <= _LONGEST:
            append(token)
        else:
            extend(_parts(token))
    return tokens


def _split_unicode(text: str) -> list[str]:
    words, cluster = _unicode_patterns()
    tokens: list[str] = []
    for token in words.findall(text):
        if not token.isascii() and cluster.match(token):
            clusters = cluster.findall(token)
            tokens.extend(map("".join, pairwise(clusters)) if len(clusters) > 1 else clusters)
        elif token.isalnum() and len(token) <= _LONGEST:
            tokens.append(token)
        else:
            tokens.extend(_parts(token))
    return tokens


@cache
def _unicode_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Tokens, and one character of an unspaced script with its marks; built when first needed (15 ms)."""
    letters, marks, symbols = [], [], []
    unspaced = re.compile(f"[{_UNSPACED}]")
    for code in range(0x80, 0x20000):
        char = chr(code)
        category = unicodedata.category(char)
        if category[0] == "M":
            marks.append(code)
        elif category[0] in "LN" and not unspaced.match(char):
            letters.append(code)
        elif category == "So" and not 0x1F1E6 <= code <= 0x1F1FF:
            symbols.append(code)
    word = f"a-z0-9{_ranges(letters)}"
    cluster = f"[{_UNSPACED}][{_ranges(marks)}]{{0,16}}+"
    flag = "[\U0001f1e6-\U0001f1ff]{1,2}"
    token = f"(?:{cluster})++|{_pattern(word + _ranges(marks))}|{flag}|[{_ranges(symbols)}]"
    return re.compile(token), re.compile(cluster)


def _ranges(codes: list[int]) -> str:
    """A character class body of sorted code points."""
    body, first = [], 0
    for index, code in enumerate(codes):
        if index + 1 == len(codes) or codes[index + 1] != code + 1:
            body.append(f"{re.escape(chr(codes[first]))}-{re.escape(chr(code))}")
            first = index + 1
    return "".join(body)


def _parts(token: str) -> tuple[str, ...]:
    return _cached_parts(token) if len(token) <= 64 else _uncached_parts(token)


def _uncached_parts(token: str) -> tuple[str, ...]:
    """What a joined token is indexed as; see `tokenize`."""
    if token.endswith("'s"):
        token = token[:-2]
    token = token.replace(",", "")
    joiners = set(token).intersection("-_.@&/'+:")
    if not joiners or token[-1] in "+#":  # also C++, C#
        return (token[:_LONGEST],)
    words = re.split(r"[-_.@&/'+:]", token)
    whole = (token,) if len(token) <= _LONGEST else ()
    if joiners == {"'"}:  # don't, o'clock: the whole; l'amour also its noun
        return whole + tuple(w[:_LONGEST] for w in words[1:] if len(w) > 2)
    if joiners == {"."} and all(len(w) == 1 for w in words) and not any(w.isdigit() for w in words):
        return ("".join(words)[:_LONGEST],)  # U.S., p.m.
    digits = any(c.isdigit() for c in token)
    if joiners <= {"-", "/", "'"} and not digits:
        return tuple(w[:_LONGEST] for w in words)
    split_digits = not joiners & {".", ":"} and not all(w.isdigit() for w in words)
    return whole + tuple(w[:_LONGEST] for w in words if not w.isdigit() or split_digits or len(w) > 2)


_cached_parts = lru_cache(maxsize=1 << 16)(_uncached_parts)


@lru_cache(maxsize=1 << 17)
def _stem(language: str, word: str) -> str:
    if not word.isalpha() or len(word) > 64:
        return word
    # A stemmer holds the word it works on: one for each miss keeps threads apart.
    return str(snowballstemmer.stemmer(language).stemWord(word)) or word


# A stop after these never ends a sentence; after the second kind it does unless a small letter follows.
_BEFORE_NAMES = _words(
    "mr mrs ms dr prof st mt vs fig approx gen col sgt lt capt rev hon gov sen rep messrs mme e.g i.e cf ca v"
)
_ENDING = _words("etc inc ltd co corp jr sr dept est esp incl excl min max hrs tel al bros ave blvd")
_BEFORE_NUMBERS = _words("no nos vol pp ch sec art jan feb mar apr jun jul aug sep sept oct nov dec")
_STOP = re.compile(
    r"(?P<line>[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+)"
    r"|(?P<wide>[\u3002\uff01\uff1f\uff61]+[\u300d\u300f\u201d\u2019\uff09)\]]*)"
    r"|(?P<stop>(?<![.!?\u2026])[.!?\u2026\u0964\u0965\u061f\u06d4]++[\"'\u201d\u2019)\]\u00bb]*+(?=\s))"
)
_LAST_WORD = re.compile(r"[^\s(\"'\u201c]*$")


def _ends(text: str) -> Iterator[int]:
    start = 0
    for stop in _STOP.finditer(text):
        if stop.lastgroup != "stop" or not _runs_on(text, start, stop):
            yield stop.end()
            start = stop.end()


def _runs_on(text: str, start: int, stop: re.Match[str]) -> bool:
    """Whether the sentence goes on after these marks."""
    marks, following = stop.group(), text[stop.end() : stop.end() + 8].lstrip()[:1]
    if marks != ".":  # dots that trail off, or a quotation: "Really?" she said
        return following.islower() and (len(marks) > 1 or marks == "\u2026")
    word = _LAST_WORD.search(text, max(start, stop.start() - 24), stop.start())
    said = word.group().casefold() if word else ""
    if said in _BEFORE_NAMES or (len(said) == 1 and word is not None and word.group().isupper() and said != "i"):
        return True
    if said in _BEFORE_NUMBERS and following.isdigit():
        return True
    if said.isdigit() and text[start : stop.start()].strip() == said:  # the number of a list item
        return True
    return following.islower() and (said in _ENDING or "." in said)


def _append_trimmed(spans: list[tuple[int, int]], text: str, start: int, end: int) -> None:
    piece = text[start:end]
    if kept := piece.strip():
        first = start + len(piece) - len(piece.lstrip())
        spans.append((first, first + len(kept)))
