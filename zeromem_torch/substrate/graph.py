"""The entity-context graph (paper Eqs. 3-4): context units and entities as nodes, weighted edges, one transition matrix.

Speakers are no nodes: a speaker's name hangs on half of all turns and would drown the rest; it is a unit's *subject*.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.tokenizer import tokenize


def transition(
    unit: Int[Tensor, " mentions"],
    entity: Int[Tensor, " mentions"],
    links: Int[Tensor, "links 2"],
    neighbours: Int[Tensor, "pairs 2"],
    units: int,
    entities: int,
    *,
    link_weight: float,
    adjacency: float,
) -> Csr:
    """``P^T`` over the nodes (units first, then entities).

    A mention is one occurrence: ``w(d, e) = c(e, d) / sum_e' c(e', d)`` (Eq. 4), used both ways. A link (from a document
    to one whose title it names) and a pair of neighbouring turns join context units both ways with a weight of their own.
    ``P`` is that symmetric matrix with its rows normalised; a node without edges keeps an empty row (it dangles).
    """
    nodes = units + entities
    count = torch.bincount(unit, minlength=units).clamp(min=1).float()
    one_way = [
        (unit, units + entity, 1 / count[unit]),
        (links[:, 0], links[:, 1], torch.full((len(links),), link_weight)),
        (neighbours[:, 0], neighbours[:, 1], torch.full((len(neighbours),), adjacency)),
    ]
    row = torch.cat([side for a, b, _ in one_way for side in (a, b)])
    col = torch.cat([side for a, b, _ in one_way for side in (b, a)])
    weight = torch.cat([side for *_, w in one_way for side in (w, w)])
    present = weight > 0
    adjacent = Csr.from_coo(row[present], col[present], weight[present], nodes, nodes)
    source = adjacent.row_of_entry()
    out = torch.zeros(nodes).index_add_(0, source, adjacent.val)
    return Csr.from_coo(adjacent.col, source, adjacent.val / out[source], nodes, nodes)


class Gazetteer:
    """Finds known phrases in token sequences: a table from first word to the phrases that start with it."""

    def __init__(self, phrases: Mapping[str, Sequence[int]]) -> None:
        self._starts: dict[str, list[tuple[tuple[str, ...], Sequence[int]]]] = defaultdict(list)
        for phrase, owners in phrases.items():
            words = tuple(tokenize(phrase))
            self._starts[words[0]].append((words, owners))
        for known in self._starts.values():
            known.sort(key=lambda item: -len(item[0]))  # the longest phrase wins

    def find(self, words: Sequence[str]) -> list[tuple[int, int, Sequence[int]]]:
        """First word, one past the last, and owners of each phrase found, longest first, without overlap."""
        found, place = [], 0
        while place < len(words):
            for phrase, owners in self._starts.get(words[place], ()):
                if tuple(words[place : place + len(phrase)]) == phrase:
                    found.append((place, place + len(phrase), owners))
                    place += len(phrase)
                    break
            else:
                place += 1
        return found
