"""Exact strings in texts, by the byte: where names, dates or quoted words stand that are known beforehand.

Texts lie end to end as UTF-8, each with a NUL behind it, which stands in no text and no phrase: a comparison never runs
on into the next text. A phrase is found wherever it stands as it is written; with ``whole_words``, where no word goes
on to its left or right. Folding case or blanks is the caller's, on both sides.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from zeromem_torch.backends import choose, kernel
from zeromem_torch.sparse import offsets


@dataclass(frozen=True)
class ByteTexts:
    """Texts end to end."""

    data: UInt8[Tensor, " bytes"]
    ptr: Int[Tensor, " bounds"]  # where each text begins, and where the last one has ended
    joins: Bool[Tensor, " bytes"]  # whether a word, or a character, goes on from the byte before to this one

    @classmethod
    def of(cls, texts: Sequence[str]) -> Self:
        """Raises ValueError for a NUL in a text."""
        if any("\0" in text for text in texts):
            raise ValueError("expected texts without NUL, which parts them; remove the character U+0000")
        encoded = [np.frombuffer(text.encode() + b"\0", np.uint8) for text in texts]
        joined = [_joined(text) for text in texts]
        return cls(
            torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *encoded])),
            offsets(torch.tensor([len(one) for one in encoded], dtype=torch.long)),
            torch.from_numpy(np.concatenate([np.empty(0, bool), *joined])),
        )

    def to(self, device: torch.device | str) -> "ByteTexts":
        return ByteTexts(self.data.to(device), self.ptr.to(device), self.joins.to(device))


class Matches(NamedTuple):
    """Where phrases stand, in order of text, first byte and length."""

    text: Int[Tensor, " matches"]
    phrase: Int[Tensor, " matches"]
    start: Int[Tensor, " matches"]  # byte of the text
    end: Int[Tensor, " matches"]  # behind the last


class Trie(NamedTuple):
    """Phrases by their bytes. Node 0 is the root; the edges of a node are sorted by their byte."""

    ptr: Int[Tensor, " bounds"]  # where the edges of each node begin
    byte: UInt8[Tensor, " edges"]
    child: Int[Tensor, " edges"]
    phrase: Int[Tensor, " nodes"]  # the phrase that ends at a node; -1 = none

    @classmethod
    def of(cls, phrases: Sequence[bytes]) -> "Trie":
        nodes: list[dict[int, int]] = [{}]
        ends = [-1]
        for number, phrase in enumerate(phrases):
            node = 0
            for byte in phrase:
                if byte not in nodes[node]:
                    nodes[node][byte] = len(nodes)
                    nodes.append({})
                    ends.append(-1)
                node = nodes[node][byte]
            ends[node] = number
        edges = [edge for own in nodes for edge in sorted(own.items())]
        ptr = offsets(torch.tensor([len(own) for own in nodes], dtype=torch.long))
        label, child = torch.tensor(edges, dtype=torch.int32).reshape(-1, 2).unbind(1)
        return cls(ptr.int(), label.to(torch.uint8), child.contiguous(), torch.tensor(ends, dtype=torch.int32))


class Phrases:
    """Phrases to look for: a text is read from each of its bytes for as long as it spells one.

    ``backend``: "auto" takes cupy on a GPU and pyahocorasick, where it is installed, on the CPU.
    """

    def __init__(self, phrases: Sequence[str], *, whole_words: bool = False, backend: str = "auto") -> None:
        if len(set(phrases)) < len(phrases) or not all(phrases) or any("\0" in phrase for phrase in phrases):
            raise ValueError("expected different phrases, none empty or with a NUL in it; drop the others")
        self._encoded = [phrase.encode() for phrase in phrases]
        self.whole_words, self.backend = whole_words, backend
        self._tries: dict[torch.device, Trie] = {}

    def __len__(self) -> int:
        return len(self._encoded)

    def __call__(self, texts: ByteTexts) -> Matches:
        device = texts.data.device
        joins = texts.joins if self.whole_words else torch.zeros_like(texts.joins)
        backend = choose("phrases", self.backend, device=device, dtype=texts.data.dtype).name
        if backend != "torch":
            found: tuple[Tensor, Tensor] = kernel("phrases", backend).find(texts.data, joins, *self._trie(device))
        elif self.backend == "auto" and device.type == "cpu" and importlib.util.find_spec("ahocorasick"):
            found = self._by_automaton(texts.data, joins)
        else:
            found = _by_trie(texts.data, joins, self._trie(device))
        place, phrase = found
        length = torch.tensor([len(one) for one in self._encoded], dtype=torch.long, device=device)[phrase]
        order = torch.argsort(place * (int(length.max()) + 1 if len(length) else 1) + length)
        place, phrase, length = place[order], phrase[order], length[order]
        text = torch.searchsorted(texts.ptr, place, right=True) - 1
        start = place - texts.ptr[text]
        return Matches(text, phrase, start, start + length)

    def _trie(self, device: torch.device) -> Trie:
        if device not in self._tries:
            self._tries[device] = Trie(*(part.to(device) for part in Trie.of(self._encoded)))
        return self._tries[device]

    def _by_automaton(self, data: Tensor, joins: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes go in as the characters of the same number, so that places are those of bytes."""
        whole = data.numpy().tobytes().decode("latin-1")
        hits = np.array(list(self._automaton.iter(whole)) if len(self) else [], dtype=np.int64).reshape(-1, 2)
        last, phrase = torch.from_numpy(hits).unbind(1)
        length = torch.tensor([len(one) for one in self._encoded], dtype=torch.long)
        place = last + 1 - length[phrase]
        kept = ~joins[place] & ~joins[last + 1]  # a NUL at least is behind
        return place[kept], phrase[kept]

    @cached_property
    def _automaton(self) -> Any:
        automaton = importlib.import_module("ahocorasick").Automaton()
        for number, phrase in enumerate(self._encoded):
            automaton.add_word(phrase.decode("latin-1"), number)
        automaton.make_automaton()
        return automaton


def _by_trie(data: Tensor, joins: Tensor, trie: Trie) -> tuple[Tensor, Tensor]:
    """Byte and phrase of each match. All bytes at once, one further in each step: most have left the trie after two."""
    parent = torch.repeat_interleave(torch.arange(len(trie.ptr) - 1, device=data.device), trie.ptr.diff())
    edge = parent * 256 + trie.byte
    place = (~joins).nonzero()[:, 0]
    node = torch.zeros_like(place)
    places, phrases, read = [place[:0]], [place[:0]], 0
    while len(place) and len(edge):
        asked = node * 256 + data[place + read]
        at = torch.searchsorted(edge, asked).clamp(max=len(edge) - 1)
        going = edge[at] == asked
        place, node = place[going], trie.child[at[going]].long()
        read += 1
        ended = (trie.phrase[node] >= 0) & ~joins[place + read]  # a NUL at least is behind
        places.append(place[ended])
        phrases.append(trie.phrase[node[ended]].long())
    return torch.cat(places), torch.cat(phrases)


_ASCII_WORD = np.array([chr(code).isalnum() or chr(code) == "_" for code in range(128)])


def _joined(text: str) -> npt.NDArray[np.bool_]:
    """For each byte of a text and the NUL behind it, whether it goes on what the byte before began."""
    if text.isascii():
        word = _ASCII_WORD[np.frombuffer(text.encode() + b"\0", np.uint8)]
        return np.append(False, word[:-1] & word[1:])
    word = np.array([c.isalnum() or c == "_" for c in text] + [False])
    code = np.array([ord(c) for c in text] + [0])
    size = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)  # bytes of a character
    joined = np.ones(size.sum(), bool)
    joined[size.cumsum() - size] = np.append(False, word[:-1] & word[1:])
    return joined
