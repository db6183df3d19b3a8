"""Readers: the only part of the package that can spend a token of a language model."""

from __future__ import annotations

import re
from typing import Any

from zeromem_torch.reader.metered import MeteredReader
from zeromem_torch.reader.prompts import NOT_IN_MEMORY, messages
from zeromem_torch.reader.protocol import Reader, Reply, Usage
from zeromem_torch.substrate.traces import ZeroMemError

__all__ = ["NOT_IN_MEMORY", "MeteredReader", "Reader", "Reply", "Usage", "load_reader", "messages"]

HOSTED = "https://api.openai.com/v1"


def load_reader(name: str, **options: Any) -> Reader:
    """A reader by its name; `options` are those of its class.

    ``embedded``                 SmolLM2-135M from a package, offline
    ``hf:FOLDER``                a folder or hub name, by transformers; FOLDER/FILE.gguf for a GGUF file
    ``openai:MODEL@BASE_URL``    any OpenAI-compatible server; without @BASE_URL the hosted one
    ``vllm:NAME``                vLLM's offline engine
    """
    kind, _, rest = name.partition(":")
    if name == "embedded":
        from zeromem_torch.reader.local import EmbeddedReader

        return EmbeddedReader(**options)
    if kind == "hf" and rest:
        from zeromem_torch.reader.local import TransformersReader

        folder, _, file = rest.rpartition("/")
        if file.endswith(".gguf"):
            return TransformersReader(folder or ".", gguf_file=file, **{"label": file.removesuffix(".gguf")} | options)
        return TransformersReader(rest, **options)
    if kind == "openai" and (match := re.fullmatch(r"(.+?)(?:@(https?://.+))?", rest)):
        from zeromem_torch.reader.openai import OpenAICompatibleReader

        return OpenAICompatibleReader(match[2] or HOSTED, match[1], **options)
    if kind == "vllm" and rest:
        from zeromem_torch.reader.vllm import VLLMReader

        return VLLMReader(rest, **options)
    expected = "embedded | hf:FOLDER | openai:MODEL@BASE_URL | vllm:NAME"
    raise ZeroMemError.of("reader", expected, name, "pass one of these")
