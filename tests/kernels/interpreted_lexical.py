"""The Triton kernel that sums impacts, in the interpreter: `test_lexical.py` starts this."""

import pytest
import torch
from builders import SIZES
from test_lexicon import entries_of, some_postings, some_queries

from zeromem_torch.kernels import lexical_triton
from zeromem_torch.retrieval.lexical import LexicalScores


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("slots", [0, 1, 7])
@pytest.mark.parametrize("block", [4, 512])  # many blocks a term, or one
def test_triton_gives_the_bits_of_torch(rows: int, slots: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexical_triton, "BLOCK", block)
    postings, entries = some_postings(rows), entries_of(some_queries(slots, signed=rows == 129))
    scores, expected = (LexicalScores(name)(*entries, postings, slots, rows) for name in ("triton", "torch"))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)
    assert rows < 7 or slots < 7 or scores.any()
