"""vLLM's offline engine as a reader: the whole batch is one call, which the engine schedules itself."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from zeromem_torch.evidence import Evidence
from zeromem_torch.reader.prompts import prepare
from zeromem_torch.reader.protocol import Reply, Usage, prompt_hash
from zeromem_torch.substrate.traces import ZeroMemError


class VLLMReader:
    """A model by name or folder, decoded greedily. `engine` are arguments of vLLM's `LLM`, such as
    `gpu_memory_utilization` and `max_model_len`; vLLM takes most of the GPU's memory when it starts."""

    def __init__(self, name: str, *, max_new_tokens: int = 64, variant: str = "auto", **engine: Any) -> None:
        try:
            vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise ZeroMemError(f"reader: 'vllm:{name}' needs vLLM; run `pip install vllm` ({error})") from error
        self.model = vllm.LLM(model=name, **engine)
        self.name, self.max_new_tokens, self.variant = name, max_new_tokens, variant
        self.context_tokens: int = self.model.llm_engine.model_config.max_model_len
        self._sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, logprobs=0)

    def count(self, texts: Sequence[str]) -> list[int]:
        tokenizer = self.model.get_tokenizer()
        return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        replies = prepare(
            questions,
            evidence,
            token_budget=token_budget,
            count=self.count,
            context_tokens=self.context_tokens,
            answer_tokens=self.max_new_tokens,
            variant=self.variant,
        )
        prompts = {i: prompt for i, prompt in enumerate(replies) if not isinstance(prompt, Reply)}
        began = time.perf_counter()
        answers = self.model.chat(list(prompts.values()), self._sampling, use_tqdm=False) if prompts else []
        seconds = time.perf_counter() - began
        read = {i: reply for i, reply in enumerate(replies) if isinstance(reply, Reply)}
        for (i, prompt), answer in zip(prompts.items(), answers, strict=True):
            said = answer.outputs[0]
            spent = len(said.token_ids)
            mean = said.cumulative_logprob / spent if spent and said.cumulative_logprob is not None else None
            usage = Usage(len(answer.prompt_token_ids), spent, 1)
            read[i] = Reply(said.text.strip(), usage, prompt_hash(prompt), seconds=seconds, logprob=mean)
        return [read[i] for i in range(len(replies))]
