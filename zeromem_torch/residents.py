"""The memories whose indices stay on a device between two searches."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from zeromem_torch.bank import Index
from zeromem_torch.memories import FILTERED
from zeromem_torch.substrate.memory import Memory


class Residents:
    """Indices on a device, in the order in which they were asked for last; the first of them go when there is no room.

    What was moved there is kept in pinned memory of the host too, so that coming back is one copy that waits for
    nothing.
    """

    def __init__(self, device: torch.device | str, budget: int | None) -> None:
        self.device, self.budget = torch.device(device), budget
        self.hits = self.misses = 0
        self._held: OrderedDict[int, tuple[Memory, Index]] = OrderedDict()  # by the memory, which is kept with it
        self._pinned: OrderedDict[int, tuple[Memory, Index]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for _, index in self._held.values())

    def of(self, memories: Sequence[Memory]) -> list[Index]:
        """The indices of these memories on the device; they may be more than the budget holds, but nothing beside."""
        found = []
        for memory in memories:
            held = self._held.pop(id(memory), None)
            self.hits, self.misses = self.hits + (held is not None), self.misses + (held is None)
            self._held[id(memory)] = held or (memory, self._host(memory).to(self.device, non_blocking=True))
            found.append(self._held[id(memory)][1])
        used = self.nbytes
        while self.budget is not None and used > self.budget and len(self._held) > len(memories):
            used -= self._held.popitem(last=False)[1][1].nbytes
        return found

    def _host(self, memory: Memory) -> Index:
        if not torch.cuda.is_available():
            return memory.index
        if id(memory) not in self._pinned:
            self._pinned[id(memory)] = (memory, memory.index.pinned())
            if len(self._pinned) > FILTERED:
                self._pinned.popitem(last=False)
        self._pinned.move_to_end(id(memory))
        return self._pinned[id(memory)][1]

    def release(self) -> None:
        self._held.clear()
        self._pinned.clear()
