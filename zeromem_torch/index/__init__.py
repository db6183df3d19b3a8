"""The index on disk: rows of `Forward` in immutable segments that are merged as they grow in number.

The record is the truth, and these files only spare reading it again: a row that is lost to a crash or to damage is
missing, never wrong, and the caller makes it anew. New rows gather in memory (the tail). A full tail becomes a segment,
and segments of like size become one, so that a row is written O(log N) times, however many follow it.

A file is written under a temporary name, synced and renamed, and the folder is synced; then the manifest that names it,
in the same way; only then are files that it replaces removed. So a folder holds one whole state at every moment.
"""

from zeromem_torch.index.segments import Segments

__all__ = ["Segments"]
