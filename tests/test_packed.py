"""The packed forward is the model's own, text by text: any make, any mix of lengths, whichever attention runs."""

import inspect
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, XLMRobertaConfig, XLMRobertaModel

from zeromem_torch.substrate import packed
from zeromem_torch.substrate.packed import PackedTransformer, refusal

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 140,
    "initializer_range": 0.5,  # so that attention is not flat, and a wrong one shows
}
PAD = 1
LENGTHS = {
    "one": [1],
    "two of one length": [7, 7],
    "falling": [129, 129, 128, 9, 7, 7, 7, 2, 1, 1],
    "in any order": [3, 129, 1, 1, 40, 41, 3, 3, 2],
}


def model_of(make: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    kinds: Any = (BertModel, BertConfig) if make == "bert" else (XLMRobertaModel, XLMRobertaConfig)
    model, config = kinds
    return model(config(**SIZES | changed, pad_token_id=PAD)).eval()


def texts_of(lengths: Sequence[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(2, 50, (length,), generator=draw) for length in lengths]


def alone(model: Any, texts: Sequence[Tensor]) -> Tensor:
    """Each text by itself, as transformers runs it."""
    with torch.no_grad():
        return torch.cat([model(input_ids=text[None]).last_hidden_state[0] for text in texts])


@pytest.mark.parametrize("make", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_pack_is_each_text_alone(make: str, lengths: list[int]) -> None:
    model, texts = model_of(make), texts_of(lengths)
    expected = alone(model, texts)
    together = PackedTransformer(model)(torch.cat(texts), lengths)
    assert_close(together, expected, atol=2e-5, rtol=0)
    assert_close(alone(model, texts), expected, atol=1e-6, rtol=0)  # the model itself is left as it was


def test_no_tokens_have_no_states() -> None:
    empty = PackedTransformer(model_of("bert"))(torch.empty(0, dtype=torch.long), [])
    assert empty.shape == (0, 32)


@pytest.mark.parametrize("make", ["bert", "xlm-roberta"])
def test_a_text_may_spell_the_padding_token(make: str) -> None:
    """RoBERTa does not number it, and numbers what follows as if it were not there."""
    model = model_of(make)
    texts = [torch.tensor([5, PAD, 7, PAD, PAD, 9]), torch.tensor([PAD]), torch.tensor([6, 8])]
    together = PackedTransformer(model)(torch.cat(texts), [6, 1, 2])
    assert_close(together, alone_with_padding(model, texts), atol=2e-5, rtol=0)


def alone_with_padding(model: Any, texts: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        states = [
            model(input_ids=text[None], attention_mask=torch.ones(1, len(text))).last_hidden_state[0] for text in texts
        ]
    return torch.cat(states)


@pytest.mark.parametrize("slack", [0.0, 0.125, 0.5, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_runs_cover_the_pack_within_their_slack(lengths: list[int], slack: float) -> None:
    runs = list(packed._runs(lengths, slack, torch.device("cpu")))
    assert sum(run.texts for run in runs) == len(lengths)
    assert [run.first for run in runs] == [0, *(run.last for run in runs[:-1])]
    assert runs[-1].last == sum(lengths)
    for run in runs:
        columns = run.texts * run.width
        assert columns - (run.last - run.first) <= slack * columns
        assert (run.row is None) == (columns == run.last - run.first)
    if slack == 0:
        assert all(run.row is None for run in runs)
    if slack == 1:
        assert len(runs) == 1


@pytest.mark.parametrize("slack", [0.0, 0.125, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_padded_runs_change_nothing(lengths: list[int], slack: float) -> None:
    qkv = torch.randn(sum(lengths), 3, 4, 8, generator=torch.Generator().manual_seed(2))
    runs = list(packed._runs(lengths, slack, torch.device("cpu")))
    assert_close(packed._attend_runs(qkv, runs), one_by_one(qkv, lengths), atol=1e-5, rtol=0)


def one_by_one(qkv: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention as it is defined, a text at a time."""
    mixed = []
    for own in torch.split(qkv, list(lengths)):
        query, key, value = own.transpose(0, 2).unbind(1)  # [heads, tokens, head_dim]
        share = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
        mixed.append((share @ value).transpose(0, 1))
    return torch.cat(mixed)


# Attention over packed texts, which needs CUDA: here a stand-in with the signatures that PyTorch has had


def with_window(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, window_size: tuple[int, int] = (-1, 0),
) -> Tensor:  # fmt: skip
    assert window_size == (-1, -1)
    return stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def with_causal(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = True,
) -> Tensor:  # fmt: skip
    assert not is_causal
    return stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def stand_in(query: Tensor, key: Tensor, value: Tensor, first: Tensor, same: Tensor, most: int, too: int) -> Tensor:
    assert first is same
    assert first.dtype == torch.int32
    lengths = first.diff().tolist()
    assert (int(first[0]), int(first[-1]), max(lengths)) == (0, len(query), most)
    assert most == too
    return torch.cat([
        scaled_dot_product_attention(*(part.transpose(0, 1) for part in own)).transpose(0, 1)
        for own in zip(*(torch.split(each, lengths) for each in (query, key, value)), strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("call", [with_window, with_causal])
def test_packed_attention_is_called_as_its_version_wants(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=call))
    packed.varlen.cache_clear()
    try:
        found = packed.varlen()
        assert found is not None
        lengths = LENGTHS["in any order"]
        qkv = torch.randn(sum(lengths), 3, 4, 8, generator=torch.Generator().manual_seed(2))
        monkeypatch.setattr(packed, "_packed_attention_here", lambda device, dtype: True)
        attend = packed._attention(lengths, torch.device("cpu"), torch.float16)
        assert_close(attend(qkv), one_by_one(qkv, lengths), atol=1e-5, rtol=0)
    finally:
        packed.varlen.cache_clear()


def test_this_pytorch_has_packed_attention() -> None:
    """What the stand-ins stand in for: if its signature changes once more, this says so."""
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    assert names[:7] == list(inspect.signature(with_window).parameters)[:7]
    assert {"window_size", "is_causal"} & set(names)


def test_without_packed_attention_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    packed.varlen.cache_clear()
    try:
        assert packed.varlen() is None
    finally:
        packed.varlen.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_a_pack_is_each_text_alone(dtype: torch.dtype) -> None:
    lengths = LENGTHS["in any order"]
    model, texts = model_of("xlm-roberta"), texts_of(lengths)
    expected = alone(model, texts)
    found = PackedTransformer(model.to("cuda", dtype))(torch.cat(texts), lengths).float().cpu()
    nearness = torch.nn.functional.cosine_similarity(found, expected)
    assert float(nearness.min()) >= (0.9995 if dtype == torch.float16 else 0.995)


# Linear layers


@pytest.mark.parametrize("laid_out", [0, 1 << 40], ids=["as they are", "laid out anew"])
@pytest.mark.parametrize("then", ["none", "gelu"])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_linear_layers_are_linear(rows: int, then: str, laid_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LAID_OUT", laid_out)
    draw = torch.Generator().manual_seed(0)
    states, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((rows, 33), (17, 33), (17,)))
    expected = states @ weight.T + bias
    if then == "gelu":
        expected = expected * 0.5 * (1 + torch.erf(expected / 2**0.5))
    for dtype in (torch.float32, torch.float64):
        made = packed._linear_maker(torch.device("cpu"), dtype, 1)(weight.to(dtype), bias.to(dtype), then)
        assert_close(made(states.to(dtype)).float(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_fused_products_there_are_plain_ones(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Tensor:
        raise error

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", missing, raising=False)
    packed.has_fused_linear.cache_clear()
    try:
        assert not packed.has_fused_linear()
        model, texts = model_of("xlm-roberta"), texts_of([9, 3])
        assert_close(PackedTransformer(model)(torch.cat(texts), [9, 3]), alone(model, texts), atol=2e-5, rtol=0)
    finally:
        packed.has_fused_linear.cache_clear()


# Models of another make


def test_what_cannot_be_packed_says_why() -> None:
    assert refusal(model_of("bert")) == refusal(model_of("xlm-roberta")) == ""
    assert "activation is relu" in refusal(model_of("bert", hidden_act="relu"))
    assert "decoder" in refusal(model_of("bert", is_decoder=True))
    other = DistilBertModel(DistilBertConfig(vocab_size=50, dim=32, hidden_dim=48, n_layers=1, n_heads=4))
    assert "distilbert" in refusal(other)
    with pytest.raises(ValueError, match="cannot be packed: a distilbert is none of"):
        PackedTransformer(other)
