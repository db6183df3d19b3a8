"""What tests of the whole memory share: an encoder without weights, and small conversations."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from zeromem_torch.config import SubstrateConfig, ZeroMemConfig
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.library import ZeroMem
from zeromem_torch.reader import Reply, Usage
from zeromem_torch.reader.protocol import check_pairs
from zeromem_torch.substrate.encoder import Encoded, Encoder
from zeromem_torch.substrate.traces import Trace

RULES = ZeroMemConfig(substrate=SubstrateConfig(entities="rules"))  # no tagger: these tests are about other things
START = datetime(2023, 5, 8, 13, 56, tzinfo=UTC)
_TOKEN = re.compile(r"\w{1,12}|[^\w\s\u0300-\u036f]")  # a mark alone has no token, as in BERT
_DIM = 64


@lru_cache(maxsize=1 << 16)
def _drawn(token: str) -> Tensor:
    digest = blake2b(token.casefold().encode(), digest_size=_DIM).digest()
    return normalize(torch.frombuffer(bytearray(digest), dtype=torch.uint8).float() - 127.5, dim=0)


@dataclass
class HashEncoder:
    """A token's state is drawn by its hash, and mixed with its neighbours'; a text's vector is the mean of its states.

    Texts that share words are near each other, no two machines disagree, and nothing has to be loaded. ``calls`` keeps
    what was encoded, so that a test can see what a cache spared.
    """

    max_tokens: int = 48
    late_chunking: bool = True
    fingerprint: str = "hash-1"
    dim: int = _DIM
    calls: list[list[str]] = field(default_factory=list)

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [[match.span() for match in _TOKEN.finditer(text)] for text in texts]

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        self.calls.append(list(texts))
        vectors, counts, all_states, all_spans = [], [], [torch.empty(0, _DIM)], [torch.empty(0, 2, dtype=torch.long)]
        for text, spans in zip(texts, self.token_spans(texts), strict=True):
            spans = spans[: self.max_tokens]
            tokens = [_drawn(text[start:end]) for start, end in spans]
            own = torch.stack(tokens) if tokens else torch.empty(0, _DIM)
            around = torch.nn.functional.pad(own, (0, 0, 1, 1))
            mixed = normalize(own + 0.3 * around[:-2] + 0.3 * around[2:], dim=-1)
            vectors.append(normalize(mixed.mean(0), dim=0) if tokens else _drawn(""))
            counts.append(len(spans))
            all_states.append(mixed)
            all_spans.append(torch.tensor(spans, dtype=torch.long).reshape(-1, 2))
        kept = slice(None) if states else slice(0)
        return Encoded(
            torch.stack(vectors) if vectors else torch.empty(0, _DIM),
            torch.tensor(counts, dtype=torch.long),
            torch.cat(all_states)[kept],
            torch.cat(all_spans)[kept],
        )


def talk(boundary: str, *sessions: Sequence[str], speakers: Sequence[str] = ("Ann", "Bo")) -> list[Trace]:
    """A conversation: one session a month, its turns spoken in turn, ids such as "boundary/2:1"."""
    return [
        Trace(
            id=f"{boundary}/{number}:{place}",
            boundary=boundary,
            text=text,
            session=f"session {number}",
            order=place,
            time=START + timedelta(days=30 * number, minutes=place),
            speaker=speakers[place % len(speakers)] if speakers else "",
        )
        for number, session in enumerate(sessions, start=1)
        for place, text in enumerate(session, start=1)
    ]


def memory_of(
    *traces: Trace | Mapping[str, Any],
    config: ZeroMemConfig = RULES,
    encoder: Encoder | None = None,
    workspace: int = 1 << 30,
) -> ZeroMem:
    memory = ZeroMem(config, encoder=encoder or HashEncoder(), workspace=workspace)
    memory.add(list(traces))
    return memory


def same_evidence(one: Evidence, other: Evidence, tolerance: float = 1e-5) -> bool:
    """Refuse two answers to one query that differ; False where units closer than the tolerance have changed places.

    Where that happened at the edge of M(q), what closes the one or the other unit may differ, and is not compared.
    """
    for name in ("query", "boundary", "route", "rho", "reasons"):
        assert getattr(one, name) == getattr(other, name)
    same = _same_ranking(one.main, other.main, lambda item: item.parts["fused"], tolerance)
    if {item.trace_id for item in one.main} != {item.trace_id for item in other.main}:
        return False
    added = len(one.main)
    assert len(one.closed) == len(other.closed)
    before_profile = _same_ranking(
        one.closed[added:], other.closed[added:], lambda item: item.score - item.parts["calibration"], tolerance
    )
    if {item.trace_id for item in one.closed} != {item.trace_id for item in other.closed}:
        return False
    return _same_ranking(one.items, other.items, lambda item: item.score, tolerance) and same and before_profile


def _same_ranking(
    one: Sequence[EvidenceItem],
    other: Sequence[EvidenceItem],
    ranked_by: Callable[[EvidenceItem], float],
    tolerance: float,
) -> bool:
    assert len(one) == len(other)
    scores = {item.trace_id: ranked_by(item) for item in other}
    last = min(scores.values(), default=0.0)
    for left, right in zip(one, other, strict=True):
        assert abs(ranked_by(left) - ranked_by(right)) <= tolerance
        if left.trace_id == right.trace_id:
            assert (left.start, left.end, left.reason) == (right.start, right.end, right.reason)
        else:  # a pair that is as good as equal, or the last place of a list
            assert abs(ranked_by(left) - scores.get(left.trace_id, last)) <= tolerance
    return [item.trace_id for item in one] == [item.trace_id for item in other]


class EchoReader:
    """Answers with the text of the best item; one that is asked about a fault fails."""

    name, context_tokens = "echo", 2048

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        check_pairs(questions, evidence)
        return [
            Reply("", Usage(5, 0, 1), "", "the server was gone")
            if "fault" in question
            else Reply(f"The answer is: {found.items[0].text}", Usage(5, 2, 1), "hash")
            for question, found in zip(questions, evidence, strict=True)
        ]
