"""What an adapter does, and how it learns its settings."""

from __future__ import annotations

import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from zeromem_torch.substrate.traces import Trace, ZeroMemError
from zeromem_torch.substrate.units import turn_prefix

SETTINGS = "ZEROMEM_ADAPTERS"
"""Environment variable: a JSON file of settings by adapter, {"mem0": {...}}; what each takes is said in its class."""


class Adapter(ABC):
    """A memory system that somebody else wrote. Made without arguments, filled once, then searched."""

    name: ClassVar[str]
    module: ClassVar[str]  # what is imported
    install: ClassVar[str]  # how a user gets it
    needs_settings: ClassVar[bool] = False  # it has no defaults that would run

    @classmethod
    def available(cls) -> str | None:
        """None if it can run here, else why not."""
        if importlib.util.find_spec(cls.module) is None:
            return f"{cls.module} is not installed: {cls.install}"
        if cls.needs_settings and not cls.settings():
            return f"it needs settings: name a JSON file with {{{cls.name!r}: {{...}}}} in ${SETTINGS}"
        if not cls.settings() and not os.environ.get("OPENAI_API_KEY"):
            return f"it calls an LLM: set $OPENAI_API_KEY, or name its settings in ${SETTINGS}"
        return None

    @classmethod
    def settings(cls) -> dict[str, Any]:
        path = os.environ.get(SETTINGS)
        if not path:
            return {}
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8")).get(cls.name, {})
            if isinstance(given, dict):
                return given
        except (OSError, ValueError, AttributeError) as error:
            expected = "a JSON file of settings by adapter"
            raise ZeroMemError.of(f"${SETTINGS}", expected, path, f"check it ({error})") from error
        raise ZeroMemError.of(f"${SETTINGS}, {cls.name}", "an object", given, "write the settings by name")

    @abstractmethod
    def build(self, traces: Sequence[Trace]) -> None:
        """Remember the traces of one boundary, in order."""

    @abstractmethod
    def search(self, question: str, k: int) -> list[str]:
        """At most ``k`` texts that it remembers, best first."""


def said(trace: Trace) -> str:
    """A trace as a text with its date and speaker, for systems that take no more."""
    return turn_prefix(trace) + trace.text
