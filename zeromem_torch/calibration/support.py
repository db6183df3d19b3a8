"""What in the evidence supports a text: the items that hold its words, and the candidates of each type they hold."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import cached_property, lru_cache

from zeromem_torch.calibration.candidates import FINDERS, Candidate, dates_of
from zeromem_torch.evidence import Evidence
from zeromem_torch.substrate.tokenizer import STOP_WORDS, Analyzer

LONGEST = 20_000  # characters of a question or of an evidence item that are read


class Reading:
    """A question and its evidence, with what the rules look up in them, each read at most once."""

    def __init__(self, question: str, evidence: Evidence) -> None:
        self.question = question[:LONGEST]
        self.types = frozenset(evidence.answer_types)
        self.items = evidence.items
        self.texts = [item.text[:LONGEST] for item in evidence.items]
        self.asked = terms_of(self.question)
        self.words = frozenset(re.findall(r"\w+", self.question.casefold()))
        self._dates: dict[int, list[Candidate]] = {}
        self._found: dict[tuple[str, int], list[Candidate]] = {}

    @cached_property
    def speakers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.speaker for item in self.items if item.speaker))

    @cached_property
    def names(self) -> frozenset[str]:
        """Words that stand for a person already known: speakers and pronouns."""
        return frozenset(word.casefold() for name in self.speakers for word in name.split()) | _PRONOUNS

    @cached_property
    def terms(self) -> list[frozenset[str]]:
        return [
            terms_of(f"{item.speaker} {item.title} {text}") for item, text in zip(self.items, self.texts, strict=True)
        ]

    def new(self, text: str) -> frozenset[str]:
        """Content words of a text that the question does not have; all of them where it has them all."""
        words = terms_of(text)
        return words - self.asked or words

    def support(self, text: str, share: float = 1.0) -> tuple[int, ...]:
        """The best-ranked item that holds at least this share of the new words of a text, and most of them."""
        words = self.new(text)
        if not words:
            return ()
        held = [len(words & terms) for terms in self.terms]
        best = max(held, default=0)
        return (held.index(best),) if best and best >= share * len(words) else ()

    def nearest(self, text: str) -> list[int]:
        """All items, those first that share most words with a text."""
        words = terms_of(text)
        return sorted(range(len(self.items)), key=lambda rank: -len(words & self.terms[rank]))

    def dates(self, rank: int) -> list[Candidate]:
        if rank not in self._dates:
            self._dates[rank] = dates_of(self.texts[rank], self.items[rank].time)
        return self._dates[rank]

    def found(self, kind: str, rank: int) -> list[Candidate]:
        if (kind, rank) not in self._found:
            self._found[kind, rank] = FINDERS[kind](self.texts[rank])
        return self._found[kind, rank]

    def only(self, kind: str) -> tuple[int, Candidate] | None:
        """The one candidate of a type that all of the evidence holds, and where; None for none or several."""
        seen: dict[Hashable, tuple[int, Candidate]] = {}
        for rank in range(len(self.items)):
            for candidate in self.dates(rank) if kind == "date" else self.found(kind, rank):
                if not terms_of(candidate.text) <= self.asked:
                    seen.setdefault(candidate.key, (rank, candidate))
        return next(iter(seen.values())) if len(seen) == 1 else None


@lru_cache(maxsize=1 << 11)
def terms_of(text: str) -> frozenset[str]:
    return frozenset(term for term in _ANALYZER(text) if term not in STOP_WORDS)


_ANALYZER = Analyzer(stop_words=True, stemmer="english")
_PRONOUNS = frozenset("i he she it they we you his her their my our your this that there".split())
