"""A reader behind HTTP: any server with OpenAI's chat completions (vLLM, llama.cpp, transformers serve, hosted)."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import random
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from zeromem_torch.evidence import Evidence
from zeromem_torch.reader.prompts import Message, prepare
from zeromem_torch.reader.protocol import Reply, Usage, prompt_hash
from zeromem_torch.substrate.traces import ZeroMemError

LARGEST = 16 << 20
"""Bytes of an answer that are read."""
LONGEST_WAIT = 60.0
"""Seconds between two tries, whatever a server asks for."""
PASSING = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
"""Statuses after which the same request may succeed."""


class _Passing(Exception):
    """What may go better next time; `wait` is what the server asked for, in seconds."""

    def __init__(self, said: str, wait: float | None = None) -> None:
        super().__init__(said)
        self.wait = wait


class _Final(Exception):
    """What will not."""


@dataclass(frozen=True)
class _Spoken:
    text: str
    usage: Usage
    logprob: float | None


class OpenAICompatibleReader:
    """Questions go out side by side, `concurrency` at a time, one request each.

    Passing failures (timeouts, lost connections, bodies that are cut or no JSON, statuses such as 429 and 503) are
    tried again up to `retries` times, after a wait that doubles, with jitter, or what Retry-After says; all others are
    the reply's error at once. `timeout` bounds one request, connecting and reading, in seconds.

    The key (else $OPENAI_API_KEY) goes only to https and to this machine, and no redirect is followed. There is no
    tokenizer here: `count` is any function from texts to token counts, else a count on the safe side for English.
    Usage is the server's own word, or that count where it gives none.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        concurrency: int = 8,
        timeout: float = 60.0,
        retries: int = 4,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int | None = 0,
        context_tokens: int = 8_192,
        logprobs: bool = False,
        variant: str = "auto",
        count: Callable[[Sequence[str]], list[int]] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            advice = "pass it up to the version, and the key as api_key"
            raise ZeroMemError.of("base_url", "an address such as http://localhost:8000/v1", base_url, advice)
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/") + "/chat/completions"
        trusted = self._secure or _is_here(parts.hostname)
        if api_key and not trusted:
            advice = "use https, or leave the key out"
            raise ZeroMemError.of("base_url", "https, or this machine, with an api_key", base_url, advice)
        limits = {"concurrency": concurrency, "max_tokens": max_tokens, "context_tokens": context_tokens}
        for name, value in limits.items():
            if value < 1:
                raise ZeroMemError.of(name, "at least 1", value, "leave it out for the default")
        key = api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if trusted:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls = ssl.create_default_context() if self._secure else None
        self.name, self.model, self.base_url = model, model, base_url.rstrip("/")
        self.concurrency, self.timeout, self.retries = concurrency, timeout, retries
        self.max_tokens, self.context_tokens, self.variant = max_tokens, context_tokens, variant
        self._options: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._options["stream"] = False
        if seed is not None:
            self._options["seed"] = seed
        if logprobs:
            self._options["logprobs"] = True
        self.count = count or estimated_tokens
        self.sleep = sleep

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        prepared = prepare(
            questions,
            evidence,
            token_budget=token_budget,
            count=self.count,
            context_tokens=self.context_tokens,
            answer_tokens=self.max_tokens,
            variant=self.variant,
        )
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda given: given if isinstance(given, Reply) else self._ask(given), prepared))

    def _ask(self, prompt: list[Message]) -> Reply:
        body = json.dumps(self._options | {"messages": prompt}).encode()
        began = time.perf_counter()
        spent, tries, error, wait = Usage(), 0, "", 0.0
        while tries <= self.retries:
            if tries:
                self.sleep(wait)
            tries += 1
            spent += Usage(calls=1)
            try:
                spoken = self._spoken(self._post(body), prompt)
            except _Passing as passing:
                backoff = min(2.0 ** (tries - 1) / 2, LONGEST_WAIT) * random.uniform(0.5, 1.0)
                wait = backoff if passing.wait is None else min(passing.wait, LONGEST_WAIT)
                error = f"{passing}; tried {tries} times: look whether the server is up, or raise timeout or retries"
            except _Final as final:
                error = str(final)
                break
            else:
                seconds = time.perf_counter() - began
                return Reply(spoken.text, spent + spoken.usage, prompt_hash(prompt), "", seconds, spoken.logprob)
        said = f"reader {self.model} at {self.base_url}: {error}"
        return Reply("", spent, prompt_hash(prompt), said, time.perf_counter() - began)

    def _post(self, body: bytes) -> bytes:
        """What came back with a status of success, whole and within the time."""
        end = time.monotonic() + self.timeout
        connection = self._connection()
        try:
            connection.request("POST", self._path, body, self._headers)
            if connection.sock is not None:
                connection.sock.settimeout(max(0.001, end - time.monotonic()))
            response = connection.getresponse()
            parts, size = [], 0
            while part := response.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > LARGEST:
                    raise _Final(f"expected an answer of at most {LARGEST} bytes, got more; lower max_tokens")
                if time.monotonic() > end:  # a server that drips keeps each single read short
                    raise TimeoutError("timed out")
            if response.length:  # bytes that were announced and did not come
                raise http.client.IncompleteRead(b"", response.length)
        except ssl.SSLCertVerificationError as error:
            raise _Final(f"expected a certificate that holds, got none; check the address ({error})") from error
        except TimeoutError as error:
            raise _Passing(f"expected an answer within {self.timeout:g} s, got none") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"expected an answer, got {type(error).__name__} ({error})") from error
        finally:
            connection.close()
        data = b"".join(parts)
        if response.status in PASSING:
            wait = _retry_after(response.getheader("Retry-After"))
            raise _Passing(f"expected status 200, got {response.status}{_reason(data)}", wait)
        if response.status != 200:
            advice = _ADVICE.get(response.status, "check base_url and model")
            raise _Final(f"expected status 200, got {response.status}{_reason(data)}; {advice}")
        return data

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=self.timeout, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=self.timeout)

    def _spoken(self, data: bytes, prompt: Sequence[Message]) -> _Spoken:
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise _Passing(f"expected JSON, got {data[:80]!r} ({error})") from error
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError("content is no text")
        except (LookupError, TypeError) as error:
            got = f"{_reason(data) or data[:200]!r}"
            raise _Passing(f"expected an answer with choices[0].message.content, got none{got} ({error!r})") from error
        return _Spoken(text.strip(), self._usage(answer, prompt, text), _mean_logprob(choice))

    def _usage(self, answer: dict[str, Any], prompt: Sequence[Message], text: str) -> Usage:
        told = answer.get("usage")
        told = told if isinstance(told, dict) else {}
        sent, got = told.get("prompt_tokens"), told.get("completion_tokens")
        return Usage(
            sent if isinstance(sent, int) else sum(self.count([message["content"] for message in prompt])),
            got if isinstance(got, int) else self.count([text])[0],
        )


_ADVICE = {
    400: "check model, and that the prompt fits: lower token_budget, or context_tokens",
    401: "pass api_key, or set OPENAI_API_KEY",
    403: "check what the key is allowed to do",
    404: "check base_url, which mostly ends in /v1, and model",
}


def estimated_tokens(texts: Sequence[str]) -> list[int]:
    """A count on the safe side: three bytes of UTF-8 a token, where English has about four."""
    return [-(-len(text.encode("utf-8", "replace")) // 3) for text in texts]


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date; None where it says nothing that can be read."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError):
        return None
    return max(0.0, seconds)


def _reason(data: bytes) -> str:
    """What the server says is wrong, shortened, ready to follow a status."""
    try:
        error = json.loads(data)
        error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
        said = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        said = data.decode("utf-8", "replace")
    text = " ".join(str(said).split())[:200]
    return f" ({text})" if text else ""


def _mean_logprob(choice: dict[str, Any]) -> float | None:
    told = choice.get("logprobs")
    rows = told.get("content") if isinstance(told, dict) else None
    told = [row.get("logprob") for row in rows or () if isinstance(row, dict)]
    values = [value for value in told if isinstance(value, int | float)]
    return sum(values) / len(values) if values else None
