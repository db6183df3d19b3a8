"""Term counts and lengths, and the BM25 impacts derived from them.

Impacts are computed once when a memory is built, so that a query is a walk over the postings of its terms:

    impact = idf(t) * tf (k1 + 1) / (tf + k1 (1 - b + b |d| / mean|d|)),   idf(t) = ln(1 + (N - df + .5) / (df + .5))

(the Lucene variant). Counts and lengths are what is kept; impacts are refreshed when corpus statistics change.

An encoder with a sparse head (BGE-M3) learnt what a token weighs: its weights take the place of impacts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from zeromem_torch.bank import Postings
from zeromem_torch.substrate.encoder import Encoder
from zeromem_torch.substrate.traces import ZeroMemError


@lru_cache(maxsize=1 << 18)
def word_key(word: str) -> int:
    """A word's number in every memory: 64 bits of a hash, signed. No table has to be shared, or cleared of a word."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little", signed=True)


def pair_keys(keys: Int[Tensor, " words"]) -> Int[Tensor, " pairs"]:
    """Keys of pairs of neighbouring words: the exact-phrase signal, at the cost of one more vocabulary."""
    mixed = keys[:-1] * 0x2545F4914F6CDD1D  # odd constants: products modulo 2^64 lose nothing, and order matters
    return (mixed ^ (mixed >> 29)) + keys[1:] * 0x369DEA0F31A53F85


class Vocabulary:
    """Words, or whatever has a key -> row numbers of one memory."""

    def __init__(self, keys: Int[Tensor, " terms"]) -> None:
        self._keys = keys.numpy()  # sorted

    def numbers(self, keys: Sequence[int]) -> list[int]:
        """The number of each key, -1 for one that is not here: one search for all."""
        if not len(self._keys):
            return [-1] * len(keys)
        asked = np.array(keys, dtype=np.int64)
        place = np.searchsorted(self._keys, asked)
        place[place == len(self._keys)] = 0
        found: list[int] = np.where(self._keys[place] == asked, place, -1).tolist()
        return found

    def among(self, words: Iterable[str]) -> dict[str, int]:
        """Those of some words that are here, with their numbers."""
        asked = list(words)
        numbers = self.numbers([word_key(word) for word in asked])
        return {word: number for word, number in zip(asked, numbers, strict=True) if number >= 0}

    def number(self, key: int) -> int | None:
        (found,) = self.numbers([key])
        return found if found >= 0 else None

    def get(self, word: str) -> int | None:
        return self.number(word_key(word))

    def __getitem__(self, word: str) -> int:
        if (number := self.get(word)) is None:
            raise KeyError(word)
        return number

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self.get(word) is not None

    def __len__(self) -> int:
        return len(self._keys)


class Numbers(Protocol):
    """What numbers words: a memory's vocabulary, or a plain dictionary."""

    def get(self, word: str, /) -> int | None: ...


class TermCounts:
    """Counts of terms in rows (turns, windows or episodes): one (term, row) pair an entry, sorted by term."""

    _joined_by = "sum"

    def __init__(self, term: Tensor, row: Tensor, count: Tensor, terms: int, rows: int) -> None:
        self.term, self.row, self.count = term, row, count
        self.terms, self.rows = terms, rows

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]], vocabulary: dict[str, int]) -> "TermCounts":
        """Count analysed texts; unseen terms get the next numbers of ``vocabulary``."""
        terms, rows, counts = [], [], []
        for row, words in enumerate(texts):
            for word, count in Counter(words).items():
                terms.append(vocabulary.setdefault(word, len(vocabulary)))
                rows.append(row)
                counts.append(count)
        order = torch.argsort(torch.tensor(terms, dtype=torch.long), stable=True)
        values = torch.tensor(counts, dtype=torch.float32)[order]
        return cls(
            torch.tensor(terms, dtype=torch.long)[order],
            torch.tensor(rows, dtype=torch.long)[order],
            values,
            len(vocabulary),
            len(texts),
        )

    @classmethod
    def of_keys(
        cls, row: Int[Tensor, " entries"], key: Int[Tensor, " entries"], rows: int
    ) -> tuple["TermCounts", Vocabulary]:
        """Count words by their keys; numbers go by the order of keys."""
        known, term = torch.unique(key, return_inverse=True)
        pair, count = torch.unique(term * rows + row, return_counts=True)
        size = max(rows, 1)
        return cls(pair // size, pair % size, count.float(), len(known), rows), Vocabulary(known)

    def merged(self, row: Int[Tensor, " members"], group: Int[Tensor, " members"], groups: int) -> "TermCounts":
        """Counts of groups of rows: ``row[i]`` belongs to ``group[i]``. A window's counts are its turns' sums."""
        order = torch.argsort(self.row, stable=True)
        held = torch.bincount(self.row, minlength=self.rows)
        start = held.cumsum(0) - held
        times = held[row]
        entry = order[
            torch.repeat_interleave(start[row] - times.cumsum(0) + times, times) + torch.arange(int(times.sum()))
        ]
        key = self.term[entry] * groups + torch.repeat_interleave(group, times)
        unique, place = torch.unique(key, return_inverse=True)
        count = self.count.new_zeros(unique.numel()).scatter_reduce_(0, place, self.count[entry], self._joined_by)
        return type(self)(unique // max(groups, 1), unique % max(groups, 1), count, self.terms, groups)

    def postings(self, k1: float, b: float) -> Postings:
        """BM25 impacts, as postings per term."""
        frequency = torch.bincount(self.term, minlength=self.terms)
        length = self.count.new_zeros(self.rows).index_add_(0, self.row, self.count)
        mean = length.mean().clamp(min=1e-9) if self.rows else length.sum()
        scale = k1 * (1 - b + b * length / mean)
        weight = inverse_frequency(frequency, self.rows)
        impact = weight[self.term] * self.count * (k1 + 1) / (self.count + scale[self.row])
        return Postings(frequency, self.row, impact)


class LearnedTerms(TermCounts):
    """Weights of tokens by an encoder's sparse head. The largest counts, in a turn as in a group, and is the impact."""

    _joined_by = "amax"

    @classmethod
    def weighed(
        cls, row: Int[Tensor, " entries"], key: Int[Tensor, " entries"], weight: Float[Tensor, " entries"], rows: int
    ) -> tuple[Self, Vocabulary]:
        """Tokens of some rows with what each weighs."""
        known, term = torch.unique(key, return_inverse=True)
        pair, place = torch.unique(term * rows + row, return_inverse=True)
        heaviest = torch.zeros(pair.numel()).scatter_reduce_(0, place, weight, cls._joined_by)
        size = max(rows, 1)
        return cls(pair // size, pair % size, heaviest, len(known), rows), Vocabulary(known)

    def postings(self, k1: float = 0.0, b: float = 0.0) -> Postings:
        return Postings(torch.bincount(self.term, minlength=self.terms), self.row, self.count)


def check_sparse_head(encoder: Encoder) -> None:
    """Refuse an encoder that has learnt no term weights."""
    if not encoder.encode(["lexicon"], states=True).weights.numel():
        expected = "an encoder with a sparse head, such as bge-m3"
        raise ZeroMemError.of("lexicon", expected, encoder.fingerprint, 'set lexicon = "bm25" under [substrate]')


def learned_query(terms: Sequence[int], weights: Sequence[float], vocabulary: Numbers) -> dict[int, float]:
    """The memory's numbers of a query's tokens, each with its largest weight."""
    found: dict[int, float] = {}
    for term, weight in zip(terms, weights, strict=True):
        if weight > 0 and (number := vocabulary.get(str(term))) is not None:
            found[number] = max(weight, found.get(number, 0.0))
    return found


def inverse_frequency(frequency: Int[Tensor, " terms"], rows: int) -> Float[Tensor, " terms"]:
    """``idf(t) = ln(1 + (N - df + .5) / (df + .5))``, in natural-log units."""
    return torch.log1p((rows - frequency + 0.5) / (frequency + 0.5)).float()


def query_terms(words: Sequence[str], vocabulary: Numbers) -> dict[int, float]:
    """The memory's numbers of a query's terms, with how often each is asked; unseen terms score nothing."""
    counted = ((vocabulary.get(word), count) for word, count in Counter(words).items())
    return {number: float(count) for number, count in counted if number is not None}


def query_phrases(queries: Sequence[Sequence[str]], phrases: Vocabulary) -> list[dict[int, float]]:
    """The same of the pairs of neighbouring terms, for each of some queries."""
    keys = [word_key(word) for words in queries for word in words]
    numbers = phrases.numbers(pair_keys(torch.tensor(keys, dtype=torch.long)).tolist())
    found, start = [], 0
    for words in queries:  # a pair of the last word of one and the first of the next is none
        counted = Counter(numbers[start : start + max(0, len(words) - 1)])
        found.append({number: float(count) for number, count in counted.items() if number >= 0})
        start += len(words)
    return found
