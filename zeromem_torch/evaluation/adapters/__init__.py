"""Memory systems of others, as a user has them installed, behind one interface; none of them is a dependency.

They spend LLM tokens on their own memories, which are not counted here.
"""

from collections.abc import Mapping

from zeromem_torch.evaluation.adapters.base import SETTINGS, Adapter
from zeromem_torch.evaluation.adapters.installed import AMem, HippoRAG, LightMem, Mem0, SimpleMem

__all__ = ["ADAPTERS", "SETTINGS", "Adapter"]

ADAPTERS: Mapping[str, type[Adapter]] = {
    adapter.name: adapter for adapter in (Mem0, AMem, LightMem, SimpleMem, HippoRAG)
}
