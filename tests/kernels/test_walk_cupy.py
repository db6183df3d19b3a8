"""The CUDA walk without a GPU: compiled by nvcc for what it takes, and run thread by thread on the CPU for its results.

The module that launches it runs as it is, on a stand-in for cupy whose kernels are compiled by g++ against
`cuda_on_cpu.h`.
"""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import walk_cases
from harness import nvcc

from zeromem_torch.backends import Choice
from zeromem_torch.retrieval import pagerank as walk

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
NAME = "zeromem_torch.kernels.pagerank_cupy"


class CpuKernel:
    """What cupy.RawKernel is, compiled for the CPU."""

    folder: Path
    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, code: str, name: str) -> None:
        source, library = self.folder / f"{name}.cpp", self.folder / f"{name}.so"
        kinds = "const float*, const float*, const int*, const int*, const float*, const int*, const int*, const float*"
        types = [*kinds.split(", "), "const int*", "int", "long long", "float", "int", "float*"]
        declared = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types))
        passed = ", ".join(f"a{i}" for i in range(len(types)))
        source.write_text(
            f'#include "{HEADER}"\n{code}\nextern "C" void run(int blocks, int threads, {declared}) '
            f"{{ launch(blocks, threads, [&] {{ {name}({passed}); }}); }}\n"
        )
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        self.run = ctypes.CDLL(str(library)).run

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...], *, shared_mem: int) -> None:
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        kinds: dict[str, Any] = {
            "uint64": ctypes.c_void_p, "int32": ctypes.c_int, "int64": ctypes.c_int64, "float32": ctypes.c_float,
        }  # fmt: skip
        threads = min(block[0], 64)  # each is a thread of the system's
        self.run(grid[0], threads, *(kinds[value.dtype.name](value.item()) for value in args))


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    CpuKernel.folder = tmp_path
    cupy = ModuleType("cupy")
    vars(cupy)["RawKernel"] = CpuKernel
    vars(cupy)["cuda"] = SimpleNamespace(Device=nullcontext, ExternalStream=nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(walk, "choose", lambda *_, **__: Choice("cupy", {"cupy": "asked for"}))
    sys.modules.pop(NAME, None)
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.usefixtures("on_cpu")
def test_results() -> None:
    walk_cases.check_pagerank("cupy", "cpu", torch.float32, (7, 0, 129, 1))


@pytest.mark.usefixtures("on_cpu")
def test_nothing_asked() -> None:
    walk_cases.check_pagerank("cupy", "cpu", torch.float32, ())


@pytest.mark.usefixtures("on_cpu")
def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeromem_torch.kernels import pagerank_cupy

    room = SimpleNamespace(shared_memory_per_block_optin=99 << 10)  # sm_89's
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)
    cuda = torch.device("cuda")
    assert pagerank_cupy.refuses(cuda, torch.float32, {"nodes": 12_000}) is None
    assert "nodes only" in str(pagerank_cupy.refuses(cuda, torch.float32, {"nodes": 13_000}))
    assert pagerank_cupy.refuses(cuda, torch.float64, {"nodes": 1}) == "float32 only"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sm", [89, 90])
def test_threads_are_small(sm: int, tmp_path: Path) -> None:
    """Sixty-four registers at most, or two blocks would not fit on a multiprocessor; and nothing spilled."""
    from zeromem_torch.kernels import pagerank_cupy

    used = nvcc(pagerank_cupy.SOURCE, sm, tmp_path)
    assert used.spills == 0
    assert used.registers * pagerank_cupy.THREADS * 2 <= 65536
    assert used.shared == 0  # all of it dynamic
