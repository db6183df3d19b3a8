"""Memory for agents by reference: a handle stands in the context, and its text enters only where it is needed."""

from zeromem_torch.handles.entry import Entry
from zeromem_torch.handles.handle import Handle
from zeromem_torch.handles.manager import Match, Materialized, MemoryManager
from zeromem_torch.handles.serialization import Decision, SerializationPolicy, serialize_if
from zeromem_torch.handles.tools import TOOLS, execute

__all__ = [
    "TOOLS",
    "Decision",
    "Entry",
    "Handle",
    "Match",
    "Materialized",
    "MemoryManager",
    "SerializationPolicy",
    "execute",
    "serialize_if",
]
