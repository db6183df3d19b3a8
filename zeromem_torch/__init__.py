"""Long-term memory for LLM agents in which no step but the final answer uses an LLM, as batched PyTorch operators.

One vocabulary names every axis of every tensor:

- ``slots``: slot ``s`` of memory ``m`` holds that memory's ``s``-th query of a batch
- ``memories``: boundaries that are searched together; also the segments of a ragged axis
- ``units``: turns, documents, tool results: one per trace
- ``chunks``: stretches of a unit that fit the encoder
- ``windows``, ``episodes``: runs of turns inside a session
- ``sentences``, ``entities``: of the entity-context graph; ``nodes`` are a memory's units, then its entities
- ``terms``, ``phrases``: of the lexicon
- ``tokens``, ``query_tokens``, ``dim``: of the encoder
"""

from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.substrate.encoder import CachedEncoder, Encoder, load_encoder
from zeromem_torch.substrate.traces import Trace, ZeroMemError

__all__ = [
    "CachedEncoder",
    "Encoder",
    "Evidence",
    "EvidenceItem",
    "Trace",
    "ZeroMem",
    "ZeroMemConfig",
    "ZeroMemError",
    "ZeroMemPipeline",
    "load_encoder",
]
