"""The entity-context graph (paper Eqs. 3-4): context units and entities as nodes, and weighted edges between them.

Speakers are no nodes: a speaker's name hangs on half of all turns and would drown the rest; it is a unit's *subject*.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.tokenizer import STOP_WORDS
from zeromem_torch.substrate.traces import Trace

_WORD = re.compile(r"\w+")

TitleFound = tuple[int, int, tuple[str, ...], list[int]]
"""A title in a text: characters from and to, its words, and the units that bear it."""


@dataclass(frozen=True)
class GraphWeights:
    """How strong each kind of edge is; 1 is a mention.

    ``rarity``: a unit's mass goes to the entities it names in proportion to ``c(e, d) idf(e)^rarity`` (0 = the paper's
    Eq. 4). ``title``: an entity that is a document's title leads there this much more strongly than to a mere mention.
    ``link``: of the edge from a document to one whose title it names; all entities a unit names share 1.
    ``adjacency``: share of a unit's mass that goes to its neighbours in the session.
    """

    rarity: float = 2.0
    title: float = 10.0
    link: float = 1.0
    adjacency: float = 0.1


def entity_context_graph(
    mention: Int[Tensor, "mentions 2"],  # unit, entity: one occurrence each
    title: Int[Tensor, "titles 2"],  # unit, entity
    links: Int[Tensor, "links 2"],  # unit, unit whose title it names
    neighbours: Int[Tensor, "pairs 2"],
    units: int,
    entities: int,
    weights: GraphWeights,
) -> Csr:
    """``A`` over the nodes (units first, then entities), from row to column.

    Unit -> entity: ``w(d, e) = c(e, d) idf(e)^r / sum_e' c(e', d) idf(e')^r``. Entity -> unit: ``c(e, d)``, and more
    where ``e`` is the title of ``d``. Unit -> unit: title links, and a share for the neighbours. A node without edges
    keeps an empty row: it dangles. Rows need not sum to 1: the walk normalises them, per query.
    """
    count = Csr.from_coo(mention[:, 0], mention[:, 1], torch.ones(len(mention)), units, entities)
    unit, entity = count.row_of_entry(), count.col
    frequency = torch.bincount(entity, minlength=entities)
    rare = count.val * torch.log((units + 1) / (frequency[entity] + 0.5)).clamp(min=1e-3) ** weights.rarity
    named = torch.zeros(units).index_add_(0, unit, rare)
    beside = torch.cat([neighbours, neighbours.flip(1)])
    degree = torch.bincount(beside[:, 0], minlength=units).float()
    edges = [
        (unit, units + entity, (1 - weights.adjacency) * rare / named[unit]),
        (units + entity, unit, count.val),
        (units + title[:, 1], title[:, 0], torch.full((len(title),), weights.title)),
        (links[:, 0], links[:, 1], torch.full((len(links),), weights.link)),
        (beside[:, 0], beside[:, 1], weights.adjacency / degree[beside[:, 0]]),
    ]
    row, col, weight = (torch.cat([edge[i] for edge in edges]) for i in range(3))
    present = weight > 0
    nodes = units + entities
    return Csr.from_coo(row[present], col[present], weight[present], nodes, nodes)


class Gazetteer:
    """Finds the titles of a memory's documents in running text, longest first and without overlap.

    "Ed Wood (film)" is found as "Ed Wood". A title is a name, so its first or last word must be capitalised where it is
    found, unless the text has no capitals at all, and one word must not be part of a longer name; a one-word title that
    its own memory mostly writes small ("Water") is a word like any other and is not looked for.
    """

    def __init__(
        self, traces: Sequence[Trace], cases: Callable[[Collection[str]], Mapping[str, tuple[int, int]]]
    ) -> None:
        """``cases`` tells of some words how often the memory writes each small, and how often with a capital."""
        owners: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for unit, trace in enumerate(traces):
            if trace.title and (words := title_words(trace.title)):
                owners[words].append(unit)
        single = cases([words[0] for words in owners if len(words) == 1])
        self._owners: dict[tuple[str, ...], list[int]] = {}
        lengths: dict[tuple[str, ...], set[int]] = defaultdict(set)
        for words, units in owners.items():
            word = words[0]
            small, capital = single.get(word, (0, 0)) if len(words) == 1 else (0, 0)
            common = len(words) == 1 and (word in STOP_WORDS or word.isdigit() or small > capital)
            if not common and not STOP_WORDS.issuperset(words):
                self._owners[words] = units
                lengths[words[:2]].add(len(words))
        # of the titles that begin with two words: how many they have in all, most first
        self._lengths = {begin: sorted(known, reverse=True) for begin, known in lengths.items() if len(begin) > 1}

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def first_words(self) -> dict[str, set[tuple[str, ...]]]:
        """The titles that begin with each word: what is found in a text depends on those of its own words only."""
        found: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for words in self._owners:
            found[words[0]].add(words)
        return dict(found)

    def owners(self, words: tuple[str, ...]) -> list[int]:
        """The units that bear a title."""
        return self._owners.get(words, [])

    def find_starts(self, text: str) -> list[tuple[int, tuple[str, ...]]]:
        return [(start, words) for start, _, words, _ in self.find(text)]

    def find(self, text: str) -> list[TitleFound]:
        if not self._owners:
            return []
        words = _WORD.findall(text)
        folded = tuple(" ".join(words).casefold().split(" "))
        spans: list[tuple[int, int]] = []  # of the words; a text that names no title needs none
        found: list[TitleFound] = []
        behind = 0  # the last title found
        for first, begin in enumerate(zip(folded, (*folded[1:], ""), strict=True)):
            if first < behind:
                continue
            for length in (*self._lengths.get(begin, ()), 1):
                title = folded[first : first + length]
                if (owners := self._owners.get(title)) is None:
                    continue
                spans = spans or [match.span() for match in _WORD.finditer(text)]
                last = first + len(title) - 1
                small = words[first][0].islower() and words[last][0].islower() and not text.islower()
                if not small and not self._inside(text, words, spans, first, last):
                    found.append((spans[first][0], spans[last][1], title, owners))
                    behind = last + 1
                    break
        return found

    @staticmethod
    def _inside(text: str, words: Sequence[str], spans: Sequence[tuple[int, int]], first: int, last: int) -> bool:
        """One word beside another capitalised one is a part of a longer name: "United" in "United Kingdom"."""
        if first != last or words[first][0].islower():
            return False
        return any(
            0 <= beside < len(words)
            and words[beside][0].isupper()
            and words[beside].casefold() not in STOP_WORDS
            and text[min(spans[first][1], spans[beside][1]) : max(spans[first][0], spans[beside][0])] == " "
            for beside in (first - 1, first + 1)
        )


class TitlesFound:
    """The titles that each text names, kept from one assembly of a memory to the next.

    A text is looked through again only when a title that begins with one of its words has come or gone.
    """

    def __init__(self) -> None:
        self._known: dict[str, set[tuple[str, ...]]] = {}
        self._found: dict[Trace, list[tuple[int, tuple[str, ...]]]] = {}

    def update(
        self, titles: Gazetteer, traces: Sequence[Trace], holding: Callable[[Collection[str]], Collection[int]]
    ) -> Iterator[list[tuple[int, tuple[str, ...]]]]:
        """Of each text, where a title begins and its words; ``holding`` finds the traces with any of some words."""
        now = titles.first_words
        changed = [word for word in now.keys() | self._known.keys() if now.get(word) != self._known.get(word)]
        again = set(holding(changed)) if changed else set()
        before, self._known, self._found = self._found, now, {}
        for unit, trace in enumerate(traces):
            kept = None if unit in again else before.get(trace)
            self._found[trace] = found = titles.find_starts(trace.text) if kept is None else kept
            yield found


def word_cases(text: str) -> dict[str, tuple[int, int]]:
    """Each folded word of a text: how often it is written small, and how often with a capital, or as a number."""
    counted: dict[str, tuple[int, int]] = {}
    for word in _WORD.findall(text):
        small, capital = counted.get(folded := word.casefold(), (0, 0))
        counted[folded] = (small + 1, capital) if word[0].islower() else (small, capital + 1)
    return counted


def title_words(title: str) -> tuple[str, ...]:
    """A title as it is named in running text: without what stands in brackets behind it."""
    bare = re.sub(r"\s*\([^()]*\)\s*$", "", title)
    return tuple(word.casefold() for word in _WORD.findall(bare))
