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
        self._starts: dict[str, list[tuple[tuple[str, ...], list[int]]]] = defaultdict(list)
        for words, units in owners.items():
            word = words[0]
            small, capital = single.get(word, (0, 0)) if len(words) == 1 else (0, 0)
            common = len(words) == 1 and (word in STOP_WORDS or word.isdigit() or small > capital)
            if not common and not STOP_WORDS.issuperset(words):
                self._starts[word].append((words, units))
        for known in self._starts.values():
            known.sort(key=lambda item: -len(item[0]))

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def first_words(self) -> dict[str, list[tuple[str, ...]]]:
        """The titles that begin with each word: what is found in a text depends on those of its own words only."""
        return {word: [title for title, _ in known] for word, known in self._starts.items()}

    def owners(self, words: tuple[str, ...]) -> list[int]:
        """The units that bear a title."""
        return next((units for title, units in self._starts.get(words[0], ()) if title == words), [])

    def find_starts(self, text: str) -> list[tuple[int, tuple[str, ...]]]:
        return [(start, words) for start, _, words, _ in self.find(text)]

    def find(self, text: str) -> list[tuple[int, int, tuple[str, ...], list[int]]]:
        """Characters from and to, the title's words, and the units that bear it."""
        if not self._starts:
            return []
        found = []
        words = [(m.group(), m.start(), m.end()) for m in _WORD.finditer(text)]
        folded = [word.casefold() for word, _, _ in words]
        cased = not text.islower()
        place = 0
        while place < len(words):
            for title, owners in self._starts.get(folded[place], ()):
                last = place + len(title) - 1
                if tuple(folded[place : last + 1]) != title:
                    continue
                small = cased and words[place][0][0].islower() and words[last][0][0].islower()
                if not small and not self._inside(text, words, place, last):
                    found.append((words[place][1], words[last][2], title, owners))
                    place = last
                    break
            place += 1
        return found

    @staticmethod
    def _inside(text: str, words: Sequence[tuple[str, int, int]], first: int, last: int) -> bool:
        """One word beside another capitalised one is a part of a longer name: "United" in "United Kingdom"."""
        if first != last or words[first][0][0].islower():
            return False
        return any(
            0 <= beside < len(words)
            and words[beside][0][0].isupper()
            and words[beside][0].casefold() not in STOP_WORDS
            and text[min(words[first][2], words[beside][2]) : max(words[first][1], words[beside][1])] == " "
            for beside in (first - 1, first + 1)
        )


class TitlesFound:
    """The titles that each text names, kept from one assembly of a memory to the next.

    A text is looked through again only when a title that begins with one of its words has come or gone.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[str, ...]]] = {}
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
