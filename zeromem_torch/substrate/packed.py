"""BERT, RoBERTa and XLM-R over texts laid end to end: no padding is computed, and no mask.

Everything but attention treats tokens one by one, so a batch is one ``[tokens, dim]`` matrix, and each linear layer one
product. Attention needs to know where a text ends; there are two ways of telling it:

- on CUDA in half precision, `torch.nn.attention.varlen`: one launch for all texts of the batch;
- else runs of neighbours of (nearly) one length, each one call of ordinary attention. On CPU a run is of exactly one
  length, so it is a view of the batch; elsewhere, where launches cost more than products, a few columns may be padded.

The module that transformers loaded is the definition and keeps the weights; this reads them once.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

MAKES = ("bert", "camembert", "roberta", "xlm-roberta")
SLACK = 0.125
"""Share of a run's columns that may be padding where each launch costs time; on CPU none is."""
LAID_OUT = 1 << 29
"""Bytes of weights up to which oneDNN is given a copy in the order in which it reads them: a seventh less time."""

Attend = Callable[[Tensor], Tensor]  # [tokens, 3, heads, head_dim] -> [tokens, heads, head_dim]
Linear = Callable[[Tensor], Tensor]


def refusal(model: Any) -> str:
    """Why a model of transformers cannot be packed; empty if it can."""
    config = model.config
    if config.model_type not in MAKES:
        return f"a {config.model_type} is none of {', '.join(MAKES)}"
    if config.hidden_act != "gelu":
        return f"its activation is {config.hidden_act}, not gelu"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"its positions are {config.position_embedding_type}, not absolute"
    if config.is_decoder:
        return "it is a decoder"
    return ""


class PackedTransformer:
    """The last layer of such a model, one row a token. For inference: no gradient, no dropout."""

    def __init__(self, model: Any) -> None:
        if reason := refusal(model):
            raise ValueError(f"this model cannot be packed: {reason}")
        self.heads: int = model.config.num_attention_heads
        self.counts_from = model.config.pad_token_id if model.config.model_type != "bert" else None
        self.embeddings = model.embeddings
        weight = self.embeddings.word_embeddings.weight
        self.device, self.dtype, self.dim = weight.device, weight.dtype, weight.shape[1]
        layers = list(model.encoder.layer)
        make = _linear_maker(self.device, self.dtype, sum(p.nbytes for layer in layers for p in layer.parameters()))
        self.layers = [_Layer(layer, make) for layer in layers]

    @torch.no_grad()
    def __call__(
        self,
        ids: Int[Tensor, " tokens"],  # on the host; texts end to end
        lengths: Sequence[int],  # tokens of each text; neighbours of like length are cheapest
    ) -> Float[Tensor, "tokens dim"]:
        if not ids.numel():
            return torch.empty(0, self.dim, device=self.device, dtype=self.dtype)
        embeddings = self.embeddings
        place = self._positions(ids, lengths).to(self.device)
        tokens = embeddings.word_embeddings(ids.to(self.device)) + embeddings.token_type_embeddings.weight[0]
        states: Tensor = embeddings.LayerNorm(tokens + embeddings.position_embeddings(place))
        attend = _attention(lengths, self.device, self.dtype)
        for layer in self.layers:
            states = layer(states, attend, self.heads)
        return states

    def _positions(self, ids: Int[Tensor, " tokens"], lengths: Sequence[int]) -> Int[Tensor, " tokens"]:
        """BERT counts from 0; RoBERTa from behind its padding index, which itself is no position of a text."""
        size = torch.tensor(lengths)
        first = torch.repeat_interleave(size.cumsum(0) - size, size)
        if self.counts_from is None:
            return torch.arange(len(ids)) - first
        counted = ids != self.counts_from  # a text may spell the padding token out
        before = torch.cat([torch.zeros(1, dtype=torch.long), counted.cumsum(0)])
        place: Tensor = (before[1:] - before[first]) * counted + self.counts_from
        return place


class _Layer:
    def __init__(self, layer: Any, make: Callable[[Tensor, Tensor, str], Linear]) -> None:
        own = layer.attention.self
        asks = (own.query, own.key, own.value)
        weight, bias = (torch.cat([getattr(part, name) for part in asks]) for name in ("weight", "bias"))
        for row, part in enumerate(asks):  # the module's three become views of one
            part.weight.data, part.bias.data = weight.chunk(3)[row], bias.chunk(3)[row]
        self.qkv = make(weight, bias, "none")
        self.mix = make(layer.attention.output.dense.weight, layer.attention.output.dense.bias, "none")
        self.wide = make(layer.intermediate.dense.weight, layer.intermediate.dense.bias, "gelu")
        self.narrow = make(layer.output.dense.weight, layer.output.dense.bias, "none")
        self.norms: tuple[nn.LayerNorm, nn.LayerNorm] = (layer.attention.output.LayerNorm, layer.output.LayerNorm)

    def __call__(self, states: Tensor, attend: Attend, heads: int) -> Tensor:
        tokens, dim = states.shape
        mixed = attend(self.qkv(states).view(tokens, 3, heads, dim // heads)).reshape(tokens, dim)
        states = self.norms[0](self.mix(mixed).add_(states))
        out: Tensor = self.norms[1](self.narrow(self.wide(states)).add_(states))
        return out


def _linear_maker(device: torch.device, dtype: torch.dtype, weights: int) -> Callable[[Tensor, Tensor, str], Linear]:
    """Linear layers with an activation behind them: by oneDNN on CPU, where this build of PyTorch has it."""
    if device.type != "cpu" or dtype != torch.float32 or not has_fused_linear():

        def plain(weight: Tensor, bias: Tensor, then: str) -> Linear:
            product = partial(linear, weight=weight, bias=bias)
            return product if then == "none" else lambda states: gelu(product(states))

        return plain

    ops = torch.ops.mkldnn

    def fused(weight: Tensor, bias: Tensor, then: str) -> Linear:
        held = weight if weights > LAID_OUT else ops._reorder_linear_weight(weight.detach(), 1024)
        return lambda states: ops._linear_pointwise(states, held, bias, then, [], "none")

    return fused


@cache
def has_fused_linear() -> bool:
    """Whether oneDNN's operators are there and take what they are given here: they are PyTorch's own affair."""
    one = torch.ones(1, 1)
    try:
        ops = torch.ops.mkldnn
        ops._linear_pointwise(one, ops._reorder_linear_weight(one, 1024), one[0], "gelu", [], "none")
    except (AttributeError, RuntimeError):
        return False
    return True


# Attention that stays inside a text


def _attention(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Attend:
    """For texts of these lengths, end to end; made once a batch and used in every layer."""
    if _packed_attention_here(device, dtype) and (call := varlen()) is not None:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        longest = max(lengths)
        return lambda qkv: call(*qkv.unbind(1), bounds, bounds, longest, longest)
    runs = list(_runs(lengths, 0.0 if device.type == "cpu" else SLACK, device))
    return lambda qkv: _attend_runs(qkv, runs)


def _packed_attention_here(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


@cache
def varlen() -> Callable[..., Tensor] | None:
    """PyTorch's attention over packed texts, looking both ways; None where there is none."""
    try:
        call: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):  # before 2.10
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return None  # it is flash attention
    if "window_size" in inspect.signature(call).parameters:
        return partial(call, window_size=(-1, -1))
    return partial(call, is_causal=False)  # 2.10


@dataclass(frozen=True)
class _Run:
    """Neighbouring texts, and where their tokens go when they are padded to one width (None: nothing is)."""

    texts: int
    width: int
    first: int
    last: int  # tokens of the batch
    row: Int[Tensor, "texts width"] | None = None  # token that stands there
    there: Tensor | None = None  # [texts, 1, 1, width]
    place: Int[Tensor, " tokens"] | None = None  # of each token among texts x width


def _runs(lengths: Sequence[int], slack: float, device: torch.device) -> Iterator[_Run]:
    first = token = 0
    while first < len(lengths):
        last, held, width = first, 0, 0
        while last < len(lengths):
            wider, more = max(width, lengths[last]), held + lengths[last]
            if more < (1 - slack) * wider * (last + 1 - first):
                break
            last, held, width = last + 1, more, wider
        run = _Run(last - first, width, token, token + held)
        yield run if held == width * run.texts else _padded(run, lengths[first:last], device)
        first, token = last, token + held


def _padded(run: _Run, lengths: Sequence[int], device: torch.device) -> _Run:
    size = torch.tensor(lengths)
    there = torch.arange(run.width) < size[:, None]
    start = run.first + size.cumsum(0) - size
    row = start[:, None] + torch.arange(run.width).clamp(max=size[:, None] - 1)
    place = there.flatten().nonzero()[:, 0]
    return _Run(
        run.texts, run.width, run.first, run.last, row.to(device), there[:, None, None].to(device), place.to(device)
    )


def _attend_runs(qkv: Float[Tensor, "tokens 3 heads head_dim"], runs: Sequence[_Run]) -> Tensor:
    """``[tokens, heads, head_dim]``"""
    mixed = qkv.new_empty(len(qkv), *qkv.shape[2:])
    for run in runs:
        own = qkv[run.first : run.last] if run.row is None else qkv[run.row]
        query, key, value = own.view(run.texts, run.width, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, attn_mask=run.there).transpose(1, 2).flatten(0, 1)
        mixed[run.first : run.last] = found if run.place is None else found[run.place]
    return mixed
