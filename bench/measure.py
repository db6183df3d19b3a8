"""How the benches measure: calls by the clock, the machine's own floors, and what a result file says of its making.

A time is the median over warm calls, with its spread and tail, and the first call apart (cold: what is compiled, built
or paged in by it). A floor is what the same bytes or operations would take at the rates that this machine reaches when
it does nothing else, so that a share of it compares across machines.
"""

import gc
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeromem_torch.backends import BACKENDS, choose
from zeromem_torch.sparse import Csr
from zeromem_torch.substrate.traces import ZeroMemError

T = TypeVar("T")
PACKAGES = (
    "bm25s", "cupy-cuda12x", "cupy-cuda13x", "faiss-cpu", "FlagEmbedding", "igraph", "numba", "scipy",
    "sentence-transformers", "threadpoolctl", "tokenizers", "torch-sparse", "triton",
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """Seconds of calls of the same work. Figures are per item (a query, a text), of which a call has ``items``."""

    cold: float
    warm: Sequence[float]
    items: int = 1

    @property
    def median(self) -> float:
        return statistics.median(self.warm) / self.items

    @property
    def mean(self) -> float:
        return sum(self.warm) / len(self.warm) / self.items

    @property
    def best(self) -> float:
        return min(self.warm) / self.items

    def quantile(self, share: float) -> float:
        ordered = sorted(self.warm)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / self.items

    def to_dict(self) -> dict[str, float]:
        spread = self.quantile(0.75) - self.quantile(0.25)
        quantiles = {f"p{percent}_us": self.quantile(percent / 100) * 1e6 for percent in (50, 95, 99)}
        figures = {"median_us": self.median * 1e6, "iqr_us": spread * 1e6, **quantiles}
        figures["cold_us"] = self.cold / self.items * 1e6
        return {name: _digits(value) for name, value in figures.items()} | {"calls": len(self.warm)}


def _digits(value: float, digits: int = 4) -> float:
    """As many digits as say something: a result file is read by people too."""
    return float(f"{value:.{digits}g}")


def timed(
    do: Callable[[], T],
    *,
    items: int = 1,
    calls: int = 20,
    seconds: float = 2.0,
    device: torch.device | str = "cpu",
    before: Callable[[], object] | None = None,
) -> tuple[Timing, T]:
    """Time a cold call, then ``calls`` warm ones (fewer, at least three, when ``seconds`` are over); and its result.

    ``before`` is called ahead of every call, and not timed.
    """
    cuda = torch.device(device).type == "cuda"

    def once() -> tuple[float, T]:
        if before is not None:
            before()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = do()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, result

    collects = gc.isenabled()
    gc.disable()  # one collection costs more than many of these calls
    try:
        cold, result = once()
        warm: list[float] = []
        while len(warm) < calls and (len(warm) < min(3, calls) or sum(warm) < seconds):
            warm.append(once()[0])
    finally:
        if collects:
            gc.enable()
    return Timing(cold, warm, items), result


def each(do: Callable[[Any], T], inputs: Sequence[Any], bar: Any = None, rounds: int = 2) -> tuple[Timing, list[T]]:
    """One call an input, so that the spread is between inputs; of ``rounds`` calls the shortest counts.

    ``bar`` is a progress bar.
    """
    best, cold = [float("inf")] * len(inputs), 0.0
    results: list[T] = []
    for turn in range(rounds):
        results.clear()
        for place, one in enumerate(inputs):
            start = time.perf_counter()
            results.append(do(one))
            spent = time.perf_counter() - start
            best[place] = min(best[place], spent)
            cold = cold if turn or place else spent
            if bar is not None:
                bar.update()
    return Timing(cold, best), results


@contextmanager
def threads(count: int) -> Iterator[None]:
    """As many threads of PyTorch, which our kernels go by too, and of the OpenMP and BLAS of the peers."""
    before = torch.get_num_threads()
    peers = package("threadpoolctl").threadpool_limits(count) if has("threadpoolctl") else nullcontext()
    torch.set_num_threads(count)
    try:
        with peers:
            yield
    finally:
        torch.set_num_threads(before)


class Peak:
    """Most memory held at once since it was made, in MiB: of the process, or of the GPU."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.cuda = torch.device(device).type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # the kernel's own high-water mark, from here; else the process's, from its start
                Path("/proc/self/clear_refs").write_text("5")

    @property
    def mib(self) -> float:
        if self.cuda:
            return _digits(torch.cuda.max_memory_allocated() / 2**20)
        status = Path("/proc/self/status")
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
        held = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return _digits(held / 1024)


# What the machine can do


@cache
def bandwidth(device: str, size: int = 1 << 28, count: int = 0) -> float:
    """Bytes a second of a copy that reads and writes ``size`` bytes; a small one stays in the cache, as small work.

    ``count`` is the number of threads: it only tells results apart.
    """
    source = torch.ones(max(1, size // 8), dtype=torch.float32, device=device)  # read once, written once
    target = torch.empty_like(source)
    inner = max(1, (1 << 24) // max(1, size))

    def copy() -> None:
        for _ in range(inner):
            target.copy_(source)

    timing, _ = timed(copy, items=inner, calls=9, seconds=1.0, device=device)
    return 2 * source.nbytes / timing.best


@cache
def operations(device: str, dtype: torch.dtype, count: int = 0) -> float:
    """Operations a second of a large matrix product in this precision."""
    side = 8192 if device != "cpu" else 1024
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timing, _ = timed(lambda: left @ right, calls=9, seconds=1.0, device=device)
    return 2 * side**3 / timing.best


def floors(device: str) -> dict[str, float]:
    """Copy bandwidth (GB/s) beyond any cache and within one, and matrix products (GFLOP/s)."""
    count = torch.get_num_threads()
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16} if device != "cpu" else {"fp32": torch.float32}
    found = {
        "copy_gb_s": bandwidth(device, 1 << 30 if device != "cpu" else 1 << 28, count) / 1e9,
        "copy_1mib_gb_s": bandwidth(device, 1 << 20, count) / 1e9,
    }
    found |= {f"matmul_{name}_gflop_s": operations(device, kind, count) / 1e9 for name, kind in kinds.items()}
    return {name: _digits(value) for name, value in found.items()}


def floor_of(
    timing: Timing, device: str, *, size: float = 0, flops: float = 0, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """The floor of a call that must move ``size`` bytes and do ``flops`` operations, and the share of it reached.

    Bytes go at the rate of a copy of as many: what fits a cache has the cache's floor.
    """
    count = torch.get_num_threads()
    moved = size / bandwidth(device, 1 << max(12, min(30, int(size).bit_length())), count) if size else 0.0
    done = flops / operations(device, dtype, count) if flops else 0.0
    least = max(moved, done) / timing.items
    figures = {"floor_us": least * 1e6, "floor_share": least / timing.median if timing.median else 0.0}
    figures["gb_s"] = size / timing.items / timing.median / 1e9 if size and timing.median else 0.0
    return {name: _digits(value) for name, value in figures.items()}


# What a result file says of its making


def device_name(device: str = "cpu") -> str:
    """The processor or GPU, as it names itself."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{named[1] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def made_by(script: str, words: Sequence[str], device: str) -> dict[str, Any]:
    """Command, commit, machine, versions."""
    made = _provenance()
    versions = made.pop("versions")
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {
        "command": shlex.join(["python", f"bench/{script}.py", *(_shown(word) for word in words)]),
        "device": device_name(device),
        "host": device_name("cpu"),
        **made,
        "versions": versions,
    }


def _shown(word: str) -> str:
    """A path of this machine says nothing elsewhere but its name."""
    return Path(word).name if os.path.isabs(word) else word


def _provenance() -> dict[str, Any]:
    try:
        from zeromem_torch.evaluation.run import provenance
    except ImportError as error:  # a GPU host may have what kernels need, and little else
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return {"commit": f"unknown ({error})", "versions": versions, "threads": torch.get_num_threads()}
    return provenance()


def moved(matrix: Csr, device: str) -> Csr:
    return Csr(matrix.crow.to(device), matrix.col.to(device), matrix.val.to(device), matrix.cols)


def backends_of(operator: str, device: str, refused: dict[str, str]) -> list[str]:
    """Back ends that run an operator here; why the others do not is put into ``refused``."""
    found = []
    for name in BACKENDS[1:]:
        try:
            choose(operator, name, device=torch.device(device), dtype=torch.float32)
        except ZeroMemError as error:
            refused[f"{operator}, {name}"] = str(error).split("; ")[1]
        else:
            found.append(name)
    return found


def has(name: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(name) is not None


def package(name: str) -> Any:
    """A peer's package: most bring no types."""
    return importlib.import_module(name)


def say(line: str) -> None:
    """Progress, kept apart from the figures."""
    print(line, file=sys.stderr, flush=True)


def lines(figures: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> Iterator[str]:
    """A table for a terminal: columns that no figure has are left out."""
    held = [name for name in shown if any(name in figure for figure in figures)]
    cells = [[_cell(figure.get(name, "")) for name in held] for figure in figures]
    widths = [max(len(row[i]) for row in [held, *cells]) for i in range(len(held))]
    for row in [held, *cells]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
