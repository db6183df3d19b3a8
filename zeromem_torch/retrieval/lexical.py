"""Lexical scores: every query's terms against the postings of every memory at once (BM25)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.bank import Postings
from zeromem_torch.sparse import offsets


class LexicalScores(nn.Module):
    """Sum the impacts of each query's terms, ``score(q, d) = sum_t count(t, q) * impact(t, d)``.

    A term is expanded to its postings, so the cost is that of the postings asked for, not of the matrix. Terms unseen
    when the memory was built have no number and score 0. Scores are in natural-log units, comparable inside a memory.
    """

    def forward(
        self,
        slot: Int[Tensor, " asked"],
        term: Int[Tensor, " asked"],
        weight: Float[Tensor, " asked"],
        postings: Postings,
        slots: int,
        rows: int,
    ) -> Float[Tensor, "slots rows"]:
        counts = postings.counts[term]
        ends = counts.cumsum(0)
        entry = torch.repeat_interleave(offsets(postings.counts)[term] - ends + counts, counts)
        entry = entry + torch.arange(entry.numel(), device=entry.device)
        asked = torch.repeat_interleave(torch.arange(term.numel(), device=term.device), counts)
        place = slot[asked] * rows + postings.row[entry]
        impacts = weight[asked].to(postings.impact.dtype) * postings.impact[entry]
        return postings.impact.new_zeros(slots * rows).index_add(0, place, impacts).view(slots, rows)
