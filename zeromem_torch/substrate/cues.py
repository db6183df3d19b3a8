"""The word and cue lists of `cues.toml`, by which the kinds of a text and the profile of a query are read."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def _load() -> Mapping[str, Any]:
    with (files(__package__) / "cues.toml").open("rb") as file:
        return tomllib.load(file)


CUES = _load()
GRAMMAR: Mapping[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in CUES["grammar"].items()}
_WORD_LISTS = {
    "AUX": "|".join(sorted(GRAMMAR["auxiliaries"])),
    "KINSHIP": "|".join(sorted(GRAMMAR["kinship"])),
    "STEPS": "|".join(sorted(GRAMMAR["steps"])),
    "CALENDAR": "|".join(sorted(word.capitalize() for word in GRAMMAR["calendar"])),
    "OPENER": "|".join(sorted(word.capitalize() for word in GRAMMAR["openers"] | GRAMMAR["fillers"])),
    "PLACE": "|".join(sorted(CUES["nouns"]["place"].split())),
}

WORDS = re.compile(r"[^\W_][\w'\u2019-]*")  # as the lists spell them: a hyphen or an apostrophe is part of a word


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of `cues.toml`, with its names of word lists (AUX, KINSHIP, ...) filled in."""
    for name, words in _WORD_LISTS.items():
        pattern = pattern.replace(name, words)
    return re.compile(pattern)


def is_plural(word: str) -> bool:
    if word in GRAMMAR["irregular_plurals"]:
        return True
    return (
        len(word) > 3
        and word.endswith("s")
        and not word.endswith(("ss", "us", "'s"))
        and (word not in GRAMMAR["not_plural"])
    )
