"""mem0, A-Mem, LightMem, SimpleMem and HippoRAG, by the calls that their own documentation shows."""

from __future__ import annotations

import importlib
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from zeromem_torch.evaluation.adapters.base import Adapter, said
from zeromem_torch.substrate.traces import Trace


class Mem0(Adapter):
    """Settings: the configuration of `Memory.from_config`."""

    name, module, install = "mem0", "mem0", "pip install mem0ai"

    def __init__(self) -> None:
        memory = importlib.import_module(self.module).Memory
        self.memory: Any = memory.from_config(self.settings()) if self.settings() else memory()
        self.user = f"zeromem-{uuid4().hex}"  # its store may outlive this run

    def build(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            self.memory.add([{"role": "user", "content": said(trace)}], user_id=self.user)

    def search(self, question: str, k: int) -> list[str]:
        if "top_k" in inspect.signature(self.memory.search).parameters:  # from its version 2
            found = self.memory.search(question, filters={"user_id": self.user}, top_k=k)
        else:
            found = self.memory.search(question, user_id=self.user, limit=k)
        return [row["memory"] for row in (found["results"] if isinstance(found, dict) else found)][:k]


class AMem(Adapter):
    """Settings: arguments of `AgenticMemorySystem`."""

    name, module, install = "a_mem", "agentic_memory", "pip install git+https://github.com/agiresearch/A-mem"

    def __init__(self) -> None:
        system = importlib.import_module(f"{self.module}.memory_system").AgenticMemorySystem
        self.memory: Any = system(**self.settings())

    def build(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            self.memory.add_note(said(trace), **({"time": f"{trace.time:%Y%m%d%H%M}"} if trace.time else {}))

    def search(self, question: str, k: int) -> list[str]:
        return [row["content"] for row in self.memory.search_agentic(question, k=k)][:k]


class LightMem(Adapter):
    """Settings: the configuration of `LightMemory.from_config`."""

    name, module, install = "light_mem", "lightmem", "pip install git+https://github.com/zjunlp/LightMem"
    needs_settings = True

    def __init__(self) -> None:
        memory = importlib.import_module(f"{self.module}.memory.lightmem").LightMemory
        self.memory: Any = memory.from_config(self.settings())

    def build(self, traces: Sequence[Trace]) -> None:
        for number, trace in enumerate(traces, start=1):
            stamp = {"time_stamp": trace.time.isoformat()} if trace.time else {}
            turn = {"role": "user", "content": said(trace), **stamp}
            last = number == len(traces)
            self.memory.add_memory(messages=[turn], force_segment=last, force_extract=last)

    def search(self, question: str, k: int) -> list[str]:
        found = self.memory.retrieve(question, limit=k)
        return (found.splitlines() if isinstance(found, str) else [str(row) for row in found])[:k]


class SimpleMem(Adapter):
    """Settings: arguments of `SimpleMemSystem`."""

    name, module, install = "simple_mem", "simplemem", "pip install git+https://github.com/aiming-lab/SimpleMem"

    def __init__(self) -> None:
        folder = _folder(self)
        system = importlib.import_module(self.module).SimpleMemSystem
        self.memory: Any = system(**{"db_path": folder, "clear_db": True, **self.settings()})

    def build(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            stamp = trace.time.isoformat() if trace.time else ""
            self.memory.add_dialogue(trace.speaker or trace.title, trace.text, stamp)
        self.memory.finalize()

    def search(self, question: str, k: int) -> list[str]:
        return [entry.lossless_restatement for entry in self.memory.hybrid_retriever.retrieve(question)][:k]


class HippoRAG(Adapter):
    """Settings: arguments of `HippoRAG`, among them its two models."""

    name, module, install = "hipporag", "hipporag", "pip install hipporag"
    needs_settings = True

    def __init__(self) -> None:
        folder = _folder(self)
        system = importlib.import_module(self.module).HippoRAG
        self.memory: Any = system(**{"save_dir": folder, **self.settings()})

    def build(self, traces: Sequence[Trace]) -> None:
        self.memory.index(docs=[said(trace) for trace in traces])

    def search(self, question: str, k: int) -> list[str]:
        return list(self.memory.retrieve(queries=[question], num_to_retrieve=k)[0].docs)[:k]


def _folder(adapter: Adapter) -> str:
    """A folder that goes with the adapter."""
    folder = tempfile.mkdtemp()
    weakref.finalize(adapter, shutil.rmtree, folder, ignore_errors=True)
    return folder
