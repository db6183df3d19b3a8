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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "CachedEncoder": "substrate.encoder",
    "Encoder": "substrate.encoder",
    "Evidence": "evidence",
    "EvidenceItem": "evidence",
    "Trace": "substrate.traces",
    "ZeroMem": "library",
    "ZeroMemConfig": "config",
    "ZeroMemError": "substrate.traces",
    "ZeroMemPipeline": "pipeline",
    "load_encoder": "substrate.encoder",
}

if not TYPE_CHECKING:  # or every name would pass for one of ours

    def __getattr__(name: str) -> object:
        """Import a name when it is first used: most of what the command does first needs no PyTorch."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
