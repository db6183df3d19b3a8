"""Exact strings in texts on the GPU: a thread for each byte of the texts walks the trie of the phrases from there.

Most threads have left the trie after a byte or two. What is found is written in no order, and sorted afterwards.
"""

from functools import cache
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

THREADS = 256
ROOM = 1024  # matches that there is room for at first, at least

SOURCE = r"""
extern "C" __global__ void find(
    const unsigned char* data, const unsigned char* joins, long long bytes,  // texts end to end, a NUL behind each
    const int* ptr, const unsigned char* byte, const int* child, const int* phrase,  // the trie
    unsigned long long* found, unsigned long long room, long long* places, int* phrases  // the first `room` of them
) {
    const long long start = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (start >= bytes || joins[start]) return;
    int node = 0;
    for (long long at = start; data[at];) {
        int low = ptr[node], high = ptr[node + 1];
        const int end = high;
        while (low < high) {  // the first edge whose byte is not below this one
            const int middle = (low + high) / 2;
            if (byte[middle] < data[at]) low = middle + 1;
            else high = middle;
        }
        if (low == end || byte[low] != data[at]) return;
        node = child[low];
        at++;  // a NUL at least is behind
        if (phrase[node] >= 0 && !joins[at]) {
            const unsigned long long slot = atomicAdd(found, 1ull);
            if (slot < room) {
                places[slot] = start;
                phrases[slot] = phrase[node];
            }
        }
    }
}
"""


def find(
    data: Tensor,  # [bytes] uint8
    joins: Tensor,  # [bytes] bool: a match neither begins nor ends here
    ptr: Tensor,  # [nodes + 1] int32
    byte: Tensor,  # [edges] uint8
    child: Tensor,  # [edges] int32
    phrase: Tensor,  # [nodes] int32
) -> tuple[Tensor, Tensor]:
    """Byte and phrase of each match, in any order."""
    held = [part.contiguous() for part in (data, joins, ptr, byte, child, phrase)]
    places = [np.uint64(part.data_ptr()) for part in held]
    room = max(ROOM, len(data) // 16)  # is mostly enough; if not, the second round has as much as it takes
    while True:
        count = torch.zeros(1, dtype=torch.int64, device=data.device)
        start = torch.empty(room, dtype=torch.int64, device=data.device)
        found = torch.empty(room, dtype=torch.int32, device=data.device)
        if not len(data) or not len(byte):
            return start[:0], found[:0].long()
        arguments = (
            *places[:2], np.int64(len(data)), *places[2:],
            np.uint64(count.data_ptr()), np.uint64(room), np.uint64(start.data_ptr()), np.uint64(found.data_ptr()),
        )  # fmt: skip
        # every pointer comes from PyTorch, on whose stream the launch goes
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(data.device).cuda_stream)
        with cupy.cuda.Device(data.device.index or 0), stream:
            _kernel()((-(-len(data) // THREADS),), (THREADS,), arguments)
        total = int(count)
        if total <= room:
            return start[:total], found[:total].long()
        room = total


@cache
def _kernel() -> Any:
    return cupy.RawKernel(SOURCE, "find")
