"""GGUF files, unpacked once: reading one takes half a minute, reading what it was unpacked to less than a second."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from zeromem_torch.errors import install
from zeromem_torch.substrate.traces import ZeroMemError


def unpacked(file: Path, cache: Path | None = None) -> Path:
    """A folder with the model and tokenizer of a GGUF file, made if it is not there; safe to delete.

    It lies in `cache`, else under $XDG_CACHE_HOME or ~/.cache, and is named after the file's content. Weights are kept
    in float16, two to four times the file's size. Processes may ask at once: one unpacks, the others wait.
    """
    home = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeromem" / "readers"
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    folder = home / f"{file.stem}-{digest[:16]}"
    if folder.is_dir():
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f"{folder.name}.lock"):
            if not folder.is_dir():
                part = home / f"{folder.name}.part"
                shutil.rmtree(part, ignore_errors=True)  # of somebody who was stopped
                _unpack(file, part)
                part.rename(folder)
    except OSError as error:
        advice = "name another folder with XDG_CACHE_HOME"
        raise ZeroMemError.of("cache", "a folder that can be written", str(home), f"{advice} ({error})") from error
    return folder


def _unpack(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ZeroMemError(f"reader: reading a GGUF file needs {package}; {install('reader')}")
    bars = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())  # its bar cannot be turned off
    with quiet_transformers(), bars:
        options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float16, **options, **dense(file.name))
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)


def dense(gguf_file: str | None) -> dict[str, Any]:
    """What has transformers unpack a GGUF file's weights; releases before 5.20 or so always do."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if gguf_file and config else {}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no notes while a model loads; errors are ours to tell."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
