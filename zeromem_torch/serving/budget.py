"""One declared number of bytes, and what it is for: beside a reader on the same GPU nothing else may be taken.

The order that works: this process starts first, takes what it will ever need and keeps it; then it is ready; then vLLM
measures what is left. vLLM gives up if memory is freed while it measures, so nothing is given back to the device later.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.sizes import bytes_of

MIB = 1 << 20
CONTEXT = {True: 512 * MIB, False: 384 * MIB}
"""On a GPU: the CUDA context and the libraries' own buffers, which PyTorch's allocator does not see. Else: the
interpreter with its libraries."""
WORKSPACE = 1024 * MIB
"""Bytes for a batch or a burst of indexing, if there is room; a smaller one makes batches smaller, not impossible."""
LEAST_WORKSPACE = LEAST_RESIDENT = 64 * MIB
LEAST_SLACK = {True: 256 * MIB, False: 64 * MIB}
SLACK = 0.05
"""Of the total: what the allocator cannot use, and what the other parts were measured short."""
CGROUP = Path("/sys/fs/cgroup/memory.max")
PART = re.compile(r"(?P<percent>\d+(\.\d*)?)\s*%|(?P<part>0?\.\d+)")
MARGIN = 0.02
"""Of the card: what neither process may count on, as the driver keeps some."""

USES = {
    "context": "libraries, outside PyTorch's allocator",
    "encoder": "weights",
    "workspace": "a batch of queries, or a burst of indexing",
    "resident": "memories held ready",
    "slack": "fragments, and what was measured short",
}


@dataclass(frozen=True)
class Plan:
    """Where the bytes of a budget go; the parts sum to the total."""

    total: int
    context: int
    encoder: int
    workspace: int
    resident: int
    slack: int
    device_total: int
    on_gpu: bool

    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in USES}

    @property
    def left(self) -> float:
        """What vLLM may be given as `--gpu-memory-utilization`: a part of the whole card, rounded down."""
        return max(0.0, math.floor(100 * (1 - self.total / self.device_total - MARGIN)) / 100)

    def table(self) -> str:
        of = f"of the {_device(self.on_gpu)}'s {_gib(self.device_total)}"
        lines = [f"memory budget  {_gib(self.total):>10}  {of}"]
        lines += [f"  {name:<12} {_gib(nbytes):>10}  {USES[name]}" for name, nbytes in self.parts().items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        """What is printed at the start."""
        vllm = f"\nleaves vLLM   --gpu-memory-utilization {self.left:.2f}, started when this is ready"
        return self.table() + vllm * self.on_gpu


def plan(
    total: int | str | float,
    *,
    device_total: int,
    encoder: int,
    on_gpu: bool,
    workspace: int | None = None,
    context: int | None = None,
) -> Plan:
    """Share out a budget: bytes, a size such as "5GiB", or a part of the device such as "25%" or 0.25.

    ``encoder`` is the size of its weights. What is left when all else has its part is for memories held ready. A budget
    that cannot hold it all is refused, with the table and what would.
    """
    budget = _total(total, device_total)
    base = CONTEXT[on_gpu] if context is None else context
    slack = max(math.ceil(SLACK * budget), LEAST_SLACK[on_gpu])
    free = budget - base - encoder - slack  # for workspace and memories
    if workspace is None:
        workspace = max(LEAST_WORKSPACE, min(WORKSPACE, free // 2))
    elif workspace < 1:
        raise ZeroMemError.of("workspace", "a size above 0", workspace, "leave it out, or pass a size such as 1GiB")
    made = Plan(budget, base, encoder, workspace, free - workspace, slack, device_total, on_gpu)
    if budget > device_total:
        expected = f"memory-budget: expected at most the {_device(on_gpu)}'s {_gib(device_total)}, got {_gib(budget)}"
        raise ZeroMemError(f"{expected}:\n{made.table()}\npass less, or a part such as 25%")
    if made.resident < LEAST_RESIDENT:
        needed = _needed(base + encoder + workspace + LEAST_RESIDENT, on_gpu)
        larger = f"--memory-budget {math.ceil(needed / MIB)}MiB, " if needed + MIB <= device_total else ""
        smaller = "a smaller --workspace, " if workspace > LEAST_WORKSPACE else ""
        raise ZeroMemError(
            f"memory-budget: expected at least {_gib(needed)}, of which memories held ready have "
            f"{_gib(LEAST_RESIDENT)}, got {_gib(budget)}:\n{made.table()}\n"
            f"pass {larger}{smaller}or a smaller encoder"
        )
    return made


def device_bytes(device: str | torch.device) -> int:
    """What a device has: a GPU's memory, else the machine's, or what its container may use of it."""
    if torch.device(device).type == "cuda":
        return TorchAllocator(device).total()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine


class Allocator(Protocol):
    """What a budget asks of PyTorch's allocator, of one process on one device; all in bytes but the two counts."""

    def total(self) -> int:
        """What the device has."""

    def free(self) -> int:
        """What no process holds."""

    def allocated(self) -> int:
        """What tensors of this process hold."""

    def reserved(self) -> int:
        """What this process holds, in use or kept for later."""

    def retries(self) -> int:
        """How often it found no room, and gave back what it kept, to try again."""

    def segments(self) -> int:
        """How many pieces it got from the device."""

    def limit(self, fraction: float) -> None:
        """Never hold more than this part of the device."""

    def reserve(self, nbytes: int) -> None:
        """Get so much from the device in one piece, and keep it for later. MemoryError if there is none."""


class TorchAllocator:
    """PyTorch's own, of a CUDA device."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)

    def total(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def segments(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("segment.all.current", 0))

    def limit(self, fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def reserve(self, nbytes: int) -> None:
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)  # dropped at once: the allocator keeps the piece
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error


def claim(plan: Plan, allocator: Allocator) -> None:
    """Take the workspace now, and never more than the plan; called once the encoder is loaded.

    The limit is on what PyTorch holds, so the context is left out of it. What the allocator keeps unused counts towards
    the workspace.
    """
    loaded, held = allocator.allocated(), allocator.reserved()
    if loaded > plan.encoder + plan.slack:
        advice = "pass a larger --memory-budget, or load the encoder in half precision"
        expected = f"an encoder of {_gib(plan.encoder)} as planned"
        raise ZeroMemError.of("memory-budget", expected, f"{_gib(loaded)} on the device", advice)
    ours = plan.total - plan.context
    if (free := allocator.free()) < ours - held:
        advice = "start this before vLLM, or lower vLLM's --gpu-memory-utilization"
        expected = f"{_gib(ours - held)} free on the device"
        raise ZeroMemError.of("memory-budget", expected, _gib(free), f"{advice}\n{plan.table()}")
    allocator.limit(ours / allocator.total())
    if (missing := plan.workspace - (held - loaded)) > 0:
        try:
            allocator.reserve(missing)
        except MemoryError as error:
            expected, advice = f"room for a workspace of {_gib(plan.workspace)}", "pass a smaller --workspace"
            raise ZeroMemError.of("memory-budget", expected, str(error), f"{advice}\n{plan.table()}") from error


@dataclass(frozen=True)
class Held:
    """What an allocator had got from the device at a time."""

    reserved: int
    segments: int


def held(allocator: Allocator) -> Held:
    return Held(allocator.reserved(), allocator.segments())


def steady(allocator: Allocator, before: Held) -> bool:
    """Whether nothing was got from the device or given back since, and no allocation ever had to be tried again."""
    return allocator.retries() == 0 and held(allocator) == before


def _total(total: int | str | float, device_total: int) -> int:
    if isinstance(total, float):
        part = total
    elif isinstance(total, str) and (match := PART.fullmatch(total.strip())):
        part = float(match["percent"]) / 100 if match["percent"] else float(match["part"])
    else:
        return bytes_of("memory-budget", total)
    if not 0 < part <= 1:
        advice = 'pass bytes, a size such as "5GiB", or a part such as "25%" or 0.25'
        raise ZeroMemError.of("memory-budget", "a part of the device above 0, and at most all of it", total, advice)
    return int(part * device_total)


def _needed(parts: int, on_gpu: bool) -> int:
    """The smallest total that holds these parts and its slack."""
    return max(parts + LEAST_SLACK[on_gpu], math.ceil(parts / (1 - SLACK)) + 1)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _device(on_gpu: bool) -> str:
    return "GPU" if on_gpu else "machine"
