"""The tiers that the manager itself keeps: L1, what this session met, and L4, what entered the context window.

L2 is the index and L3 the record, which the memory keeps for everybody. L1 spares a statement of SQL, and is never
trusted beyond the next change of the memory; L4 says afterwards what a model was shown.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock

from zeromem_torch.handles.handle import Handle
from zeromem_torch.substrate.traces import Trace, ZeroMemError

_FILES = Lock()  # managers of one memory share its log


class SessionCache:
    """L1: traces of entries, by id; the one that was not used for longest makes room for the next.

    Traces and not entries: a value that its caller changes in place must not change here.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: OrderedDict[str, Trace] = OrderedDict()

    def get(self, id: str) -> Trace | None:
        if id in self._held:
            self._held.move_to_end(id)
        return self._held.get(id)

    def put(self, trace: Trace) -> None:
        self._held[trace.id] = trace
        self._held.move_to_end(trace.id)
        if len(self._held) > self.size:
            self._held.popitem(last=False)

    def drop(self, id: str) -> None:
        self._held.pop(id, None)

    def clear(self) -> None:
        self._held.clear()

    def __contains__(self, id: object) -> bool:
        return id in self._held

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True, slots=True)
class Entered:
    """That text of an entry entered a context window; the text itself is not kept."""

    at: datetime
    boundary: str
    session: str
    handle: str
    tokens: int
    how: str  # "materialize" | "serialize" | "forced"


class ContextLog:
    """L4: what entered the context window of this session, and a file of JSON lines for those who ask later.

    The file belongs to no transaction, and may be deleted at any time.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.entered: list[Entered] = []

    def append(self, entered: Sequence[Entered]) -> None:
        if self.path and entered:
            lines = [
                json.dumps(asdict(one) | {"at": one.at.isoformat()}, ensure_ascii=False) + "\n" for one in entered
            ]
            try:
                with _FILES:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with self.path.open("a", encoding="utf-8") as file:
                        file.write("".join(lines))
            except OSError as error:
                raise ZeroMemError.of(
                    "context log", "a file that can be written", str(self.path), f"make room or allow it ({error})"
                ) from error
        self.entered += entered

    def purge(self, boundary: str, handle: Handle) -> None:
        """Forget that an entry ever entered a context, in the file as well."""
        gone = boundary, str(handle)
        self.entered = [one for one in self.entered if (one.boundary, one.handle) != gone]
        if not self.path:
            return
        with _FILES:
            if not self.path.exists():
                return
            kept = [line for line in self.path.read_text(encoding="utf-8").splitlines(True) if _names(line) != gone]
            beside = self.path.with_suffix(".new")
            beside.write_text("".join(kept), encoding="utf-8")
            os.replace(beside, self.path)


def _names(line: str) -> tuple[object, object] | None:
    try:
        fields = json.loads(line)
    except ValueError:  # the end of a line that a kill cut off
        return None
    return fields.get("boundary"), fields.get("handle")
