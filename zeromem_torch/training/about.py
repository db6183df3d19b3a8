"""What a checkpoint was learned from: a small file beside it, so that nobody measures it on the same by mistake."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABOUT = "training.json"


def write_about(folder: Path, told: Mapping[str, Any]) -> None:
    (folder / ABOUT).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read_about(folder: Path) -> dict[str, Any]:
    """Nothing where no training told all of it."""
    try:
        told = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(told, dict) and {"dataset", "split", "sha256", "questions"} <= set(told)
    return told if whole else {}
