"""Many memories end to end on shared axes, and reductions over the stretch of an axis that one memory owns.

A query batch is laid out as ``[slots, ...]``: slot ``s`` of memory ``m`` holds that memory's ``s``-th query, so that
``[slots, units]`` scores every query of every memory at once. One memory with B queries is the case of one segment and
B slots; 128 memories with a query each are 128 segments and one slot. A memory nobody asks about is left out.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from zeromem_torch.backends import choose, kernel
from zeromem_torch.sparse import Csr, offsets

SCORE_STEP = 1e-6
"""Scores closer than this are equal to the ranking, which then goes by unit index."""


def on(axis: str, to: str | None = None) -> Any:
    """A tensor whose rows lie on ``axis``; its values index ``to``, if given (-1 = none)."""
    return field(metadata={"axis": axis, "to": to})


def between(terms: str, rows: str) -> Any:
    """Postings of the axis ``terms`` in the axis ``rows``."""
    return field(metadata={"terms": terms, "rows": rows})


@dataclass(frozen=True)
class Postings:
    """Per term, the rows it occurs in and what it adds to their score: CSC of an impact matrix, terms x rows."""

    counts: Int[Tensor, " terms"] = on("terms")
    row: Int[Tensor, " postings"] = on("postings", to="rows")
    impact: Float[Tensor, " postings"] = on("postings")

    @cached_property
    def ptr(self) -> Int[Tensor, " bounds"]:
        """Where the postings of each term begin, and where the last ones end."""
        return offsets(self.counts)

    @cached_property
    def peak(self) -> Float[Tensor, " terms"]:
        """The largest impact of each term, without its sign; 0 for a term without postings."""
        term = torch.arange(len(self.counts), device=self.counts.device)
        term = torch.repeat_interleave(term, self.counts, output_size=len(self.row))
        none = self.impact.new_zeros(len(self.counts))
        return none.scatter_reduce(0, term, self.impact.detach().abs(), "amax")

    @cached_property
    def longest(self) -> int:
        """How many postings a term has at most: what a kernel's grid has to span."""
        return int(self.counts.max()) if len(self.counts) else 0


PRECISIONS = ("stored", "float32", "float16", "int8")


@dataclass(frozen=True)
class TokenStates:
    """Token states of units end to end, in the precision they are kept in.

    A state of ``dim`` numbers takes 4, 2 or 1 bytes a number (float32, float16, int8), and 4 bytes for its scale if it
    is int8: that is its largest number over 127. The states of a bank are "stored" in float16.
    """

    values: Shaped[Tensor, "tokens dim"]
    ptr: Int[Tensor, " bounds"]  # unit u has rows ptr[u] to ptr[u + 1]
    scale: Float[Tensor, " tokens"] | None = None

    @classmethod
    def kept(
        cls, values: Float[Tensor, "tokens dim"], ptr: Int[Tensor, " bounds"], precision: str = "stored"
    ) -> "TokenStates":
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        if precision == "int8":
            scale = values.abs().amax(1).float() / 127 if values.numel() else values.new_zeros(len(values)).float()
            steps = values.float() / scale.clamp(min=1e-30)[:, None]
            return cls(steps.round_().to(torch.int8), ptr, scale)
        return cls(values if precision == "stored" else values.to(getattr(torch, precision)), ptr)

    def read(self, rows: slice | Int[Tensor, " rows"], dtype: torch.dtype) -> Float[Tensor, "rows dim"]:
        some = self.values[rows].to(dtype)
        return some if self.scale is None else some * self.scale[rows].to(dtype)[:, None]

    @property
    def bytes_per_token(self) -> int:
        own = self.values.shape[1] * self.values.element_size()
        return own if self.scale is None else own + self.scale.element_size()

    @property
    def bytes_per_unit(self) -> float:
        """On average."""
        return self.bytes_per_token * len(self.values) / max(1, len(self.ptr) - 1)


@dataclass(frozen=True)
class Index:
    """The tensors of one memory, or of several end to end. Everything here can be rebuilt from the traces."""

    # turns: one unit per trace
    unit_session: Int[Tensor, " units"] = on("units", to="sessions")
    unit_position: Int[Tensor, " units"] = on("units")  # inside its session; -1 in a trace without a session
    unit_speaker: Int[Tensor, " units"] = on("units", to="speakers")
    unit_day: Int[Tensor, " units"] = on("units")  # proleptic ordinal of the event time; 0 = unknown
    unit_kinds: Int[Tensor, " units"] = on("units")  # answer types the text can hold, a bit each
    unit_tokens: Int[Tensor, " units"] = on("units")  # tokens handed to a reader
    unit_asks: Bool[Tensor, " units"] = on("units")  # ends with a question
    unit_leans: Bool[Tensor, " units"] = on("units")  # depends on what stands near it
    unit_node: Int[Tensor, " units"] = on("units", to="nodes")
    unit_states: Int[Tensor, " units"] = on("units")  # how many token states
    unit_episode: Int[Tensor, " units"] = on("units", to="episodes")
    chunk_unit: Int[Tensor, " chunks"] = on("chunks", to="units")
    chunk_vectors: Float[Tensor, "chunks dim"] = on("chunks")
    token_states: Float[Tensor, "tokens dim"] = on("tokens")
    date_unit: Int[Tensor, " dates"] = on("dates", to="units")
    date_first: Int[Tensor, " dates"] = on("dates")
    date_last: Int[Tensor, " dates"] = on("dates")
    # windows, and which units each of them holds
    window_vectors: Float[Tensor, "windows dim"] = on("windows")
    member_window: Int[Tensor, " members"] = on("members", to="windows")
    member_unit: Int[Tensor, " members"] = on("members", to="units")
    # episodes
    episode_vectors: Float[Tensor, "episodes dim"] = on("episodes")
    # sentences and the entities they name (M of Eq. 9)
    sentence_unit: Int[Tensor, " sentences"] = on("sentences", to="units")
    sentence_vectors: Float[Tensor, "sentences dim"] = on("sentences")
    mention_sentence: Int[Tensor, " mentions"] = on("mentions", to="sentences")
    mention_entity: Int[Tensor, " mentions"] = on("mentions", to="entities")
    entity_node: Int[Tensor, " entities"] = on("entities", to="nodes")
    # edges of the entity-context graph, sorted by the node they leave: out_degree counts them
    out_degree: Int[Tensor, " nodes"] = on("nodes")
    edge_target: Int[Tensor, " edges"] = on("edges", to="nodes")
    edge_weight: Float[Tensor, " edges"] = on("edges")
    # lexical impacts of terms at three levels, and of pairs of neighbouring terms
    unit_postings: Postings = between("terms", "units")
    window_postings: Postings = between("terms", "windows")
    episode_postings: Postings = between("terms", "episodes")
    phrase_postings: Postings = between("phrases", "windows")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by a name of its own; those of postings as "unit_postings.row"."""
        for f in dataclasses.fields(self):
            held = getattr(self, f.name)
            if isinstance(held, Postings):
                yield from ((f"{f.name}.{g.name}", getattr(held, g.name)) for g in dataclasses.fields(held))
            else:
                yield f.name, held

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> Self:
        """The same in memory that a GPU reads without a copy in between; needs CUDA."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, do: Callable[[Tensor], Tensor]) -> Self:
        made: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            held = getattr(self, f.name)
            if isinstance(held, Postings):
                made[f.name] = Postings(*(do(getattr(held, g.name)) for g in dataclasses.fields(held)))
            else:
                made[f.name] = do(held)
        return dataclasses.replace(self, **made)


@dataclass(frozen=True)
class Axis:
    """A ragged axis: memory ``m`` owns rows ``ptr[m]`` to ``ptr[m + 1]``."""

    ptr: tuple[int, ...]
    segment: Int[Tensor, " rows"]

    @property
    def segments(self) -> int:
        return len(self.ptr) - 1

    @property
    def size(self) -> int:
        return self.ptr[-1]

    @cached_property
    def longest(self) -> int:
        return max((b - a for a, b in pairwise(self.ptr)), default=0)

    @cached_property
    def bounds(self) -> Int[Tensor, " bounds"]:
        """``ptr`` on the device."""
        return torch.tensor(self.ptr, dtype=torch.long, device=self.segment.device)

    @cached_property
    def padded(self) -> Int[Tensor, "segments longest"]:
        """Row numbers, one line a segment, -1 behind the shorter ones."""
        rows = self.bounds[:-1, None] + torch.arange(self.longest, device=self.segment.device)
        return torch.where(rows < self.bounds[1:, None], rows, -1)

    @cached_property
    def parts(self) -> list["Axis"]:
        """Each segment as an axis of its own."""
        return [axis_of([last - first], self.segment.device) for first, last in pairwise(self.ptr)]

    def spread(self, values: Shaped[Tensor, "slots segments ..."]) -> Shaped[Tensor, "slots rows ..."]:
        """What each segment has, for each of its rows; of a single segment it is a view that takes no memory."""
        if self.segments == 1:
            return values.expand(-1, self.size, *values.shape[2:])
        return values.index_select(1, self.segment)


def axis_of(sizes: Sequence[int], device: torch.device | str = "cpu") -> Axis:
    """The axis on which segment ``i`` has ``sizes[i]`` rows."""
    counts = torch.tensor(list(sizes), dtype=torch.long, device=device)
    segment = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts, output_size=sum(sizes))
    return Axis((0, *accumulate(sizes)), segment)


_READ_SINGLY = ("unit_tokens", "unit_session", "unit_position", "unit_asks", "unit_leans", "unit_node")


@dataclass(frozen=True)
class MemoryBank:
    """The index of several memories with their offsets on every axis."""

    index: Index
    axes: Mapping[str, Axis]
    own_states: Sequence[Tensor] = ()
    """Token states of each memory where they are not joined: most bytes of a memory, and copied for nothing where each
    is looked at by itself. The index then has none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.index, name)

    @property
    def memories(self) -> int:
        return self.axes["units"].segments

    @property
    def device(self) -> torch.device:
        return self.index.unit_session.device

    @cached_property
    def host(self) -> Mapping[str, npt.NDArray[Any]]:
        """Small tensors of the index and the graph where Python reads single numbers of them."""
        tensors = {name: getattr(self.index, name) for name in _READ_SINGLY}
        tensors |= {"adjacency.crow": self.adjacency.crow, "adjacency.col": self.adjacency.col}
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def on_nodes(
        self, units: Float[Tensor, "slots units"], entities: Float[Tensor, "slots entities"]
    ) -> Float[Tensor, "slots nodes"]:
        """What units and entities have, on the nodes that stand for them: a memory's units, then its entities."""
        both = torch.cat([units, entities], dim=1)
        return both if self.memories == 1 else both.index_select(1, self._node_source)

    def at_units(self, nodes: Float[Tensor, "slots nodes"]) -> Float[Tensor, "slots units"]:
        return nodes[:, : self.axes["units"].size] if self.memories == 1 else nodes.index_select(1, self.unit_node)

    @cached_property
    def _node_source(self) -> Int[Tensor, " nodes"]:
        return torch.cat([self.unit_node, self.entity_node]).argsort()

    @cached_property
    def adjacency(self) -> Csr:
        """``A`` over the nodes of all memories, from row to column: block-diagonal."""
        return Csr(offsets(self.out_degree), self.edge_target, self.edge_weight, self.axes["nodes"].size)

    @cached_property
    def adjacency_t(self) -> Csr:
        return self.adjacency.transpose()

    @cached_property
    def mentions(self) -> Csr:
        """``M``, sentences x entities, 1 where a sentence names an entity."""
        ones = torch.ones_like(self.mention_sentence, dtype=self.sentence_vectors.dtype)
        sizes = self.axes["sentences"].size, self.axes["entities"].size
        counted = Csr.from_coo(self.mention_sentence, self.mention_entity, ones, *sizes)
        return dataclasses.replace(counted, val=torch.ones_like(counted.val))  # named twice is named

    @cached_property
    def mentions_t(self) -> Csr:
        return self.mentions.transpose()

    @cached_property
    def state_ptr(self) -> Int[Tensor, " bounds"]:
        return offsets(self.unit_states)

    @cached_property
    def token_states(self) -> Float[Tensor, "tokens dim"]:
        """Of all memories; where they were not joined, joined when this is first asked for."""
        return torch.cat(list(self.own_states)) if self.own_states else self.index.token_states

    def token_states_of(self, memory: int) -> Float[Tensor, "tokens dim"]:
        """Those of a memory, or of all, without joining any."""
        return self.own_states[memory] if self.own_states else self.index.token_states

    def states_by_memory(self, precision: str) -> tuple[list[Tensor], list[Tensor | None], list[int]]:
        """For each memory tensors that hold its token states, their scale, and which token of all they begin with."""
        if self.own_states and precision == "stored":
            return list(self.own_states), [None] * self.memories, list(self.axes["tokens"].ptr[:-1])
        held = self.states(precision)
        return [held.values] * self.memories, [held.scale] * self.memories, [0] * self.memories

    def states(self, precision: str = "stored") -> TokenStates:
        """The token states, converted when they are first asked for."""
        if precision not in self._states:
            self._states[precision] = TokenStates.kept(self.token_states, self.state_ptr, precision)
        return self._states[precision]

    @cached_property
    def _states(self) -> dict[str, TokenStates]:
        return {}

    def best_window(self, scores: Float[Tensor, "slots windows"]) -> Float[Tensor, "slots units"]:
        """For each unit the best of the windows that hold it; there is one at least."""
        units, windows, members = (self.axes[name].size for name in ("units", "windows", "members"))
        if members == windows == units:  # a window holds at least one unit: here just one, each its own
            return scores
        if _plain(scores):
            return _best_of(scores, self._windows_by_rank)
        rows = scores.T.contiguous().index_select(0, self.member_window)
        return segment_max(rows.T, self.member_unit, units)

    def best_chunk(self, scores: Float[Tensor, "slots chunks"]) -> Float[Tensor, "slots units"]:
        """For each unit the best of its chunks; there is one at least."""
        chunks, units = self.axes["chunks"].size, self.axes["units"].size
        if chunks == units:
            return scores
        return _best_of(scores, self._chunks_by_rank) if _plain(scores) else segment_max(scores, self.chunk_unit, units)

    @cached_property
    def _windows_by_rank(self) -> list[tuple[Tensor | None, Tensor]]:
        order = self.member_unit.argsort(stable=True)
        return _by_rank(self.member_unit[order], self.member_window[order], self.axes["units"].size)

    @cached_property
    def _chunks_by_rank(self) -> list[tuple[Tensor | None, Tensor]]:
        return _by_rank(self.chunk_unit, torch.arange(self.axes["chunks"].size), self.axes["units"].size)

    def of_episode(self, scores: Float[Tensor, "slots episodes"]) -> Float[Tensor, "slots units"]:
        """For each unit what its episode has."""
        alone = self.axes["episodes"].size == self.axes["units"].size
        return scores if alone else scores.index_select(1, self.unit_episode)


def pack(
    indexes: Sequence[Index], sizes: Sequence[Mapping[str, int]], device: torch.device | str = "cpu"
) -> MemoryBank:
    """Lay memories end to end. ``sizes`` gives the axes that no tensor of the index spans (sessions, speakers)."""
    if not indexes:
        raise ValueError("pack: expected at least one memory, got none; leave the search out, it would find nothing")
    lengths: list[dict[str, int]] = []
    for index, given in zip(indexes, sizes, strict=True):
        own = dict(given)
        for f in dataclasses.fields(index):
            if "axis" in f.metadata:
                own[f.metadata["axis"]] = getattr(index, f.name).shape[0]
            else:
                own[f.metadata["terms"]] = getattr(index, f.name).counts.shape[0]
        lengths.append(own)
    axes = {name: axis_of([own[name] for own in lengths], device) for name in lengths[0]}

    def join(tensors: Sequence[Tensor], to: str | None) -> Tensor:
        if to is not None:
            starts = axes[to].ptr
            tensors = [torch.where(t >= 0, t + starts[m], t) for m, t in enumerate(tensors)]
        return (tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))).to(device)

    packed: dict[str, Any] = {}
    apart = [index.token_states for index in indexes] if torch.device(device).type == "cpu" and len(indexes) > 1 else []
    for f in dataclasses.fields(Index):
        parts = [getattr(index, f.name) for index in indexes]
        if apart and f.name == "token_states":
            packed[f.name] = apart[0][:0]
        elif "axis" in f.metadata:
            packed[f.name] = join(parts, f.metadata["to"])
        else:
            rows = f.metadata["rows"]
            packed[f.name] = Postings(
                *(
                    join([getattr(part, g.name) for part in parts], rows if g.metadata["to"] == "rows" else None)
                    for g in dataclasses.fields(Postings)
                )
            )
    return MemoryBank(Index(**packed), axes, apart)


def segment_max(
    values: Float[Tensor, "slots rows"], segment: Int[Tensor, " rows"], segments: int, empty: float = -torch.inf
) -> Float[Tensor, "slots segments"]:
    """The largest value of each segment; ``empty`` where there is none. Ties share the gradient evenly."""
    return segment_extreme(values, segment, segments, "amax", empty)


def _plain(scores: Tensor) -> bool:
    """Whether a way that is fast on a CPU and has no gradient will do."""
    return scores.device.type == "cpu" and not (torch.is_grad_enabled() and scores.requires_grad)


def _by_rank(
    unit: Int[Tensor, " places"], place: Int[Tensor, " places"], units: int
) -> list[tuple[Tensor | None, Tensor]]:
    """Places by units, ascending -> the first place of each unit, then the second, and so on.

    With them the units that have one; None is all of them, and one that has no more has its first again.
    """
    first = offsets(torch.bincount(unit, minlength=units))
    held, ranks = first.diff(), list[tuple[Tensor | None, Tensor]]()
    for rank in range(int(held.max())):
        some = (held > rank).nonzero()[:, 0]
        if 2 * len(some) > units:
            ranks.append((None, place[first[:-1] + torch.where(held > rank, rank, 0)]))
        else:
            ranks.append((some, place[first[some] + rank]))
    return ranks


def _best_of(scores: Tensor, ranks: list[tuple[Tensor | None, Tensor]]) -> Tensor:
    """The best of each unit's places, which is `segment_max` without a scatter."""
    best = scores.index_select(1, ranks[0][1])
    for units, places in ranks[1:]:
        more = scores.index_select(1, places)
        if units is None:
            torch.maximum(best, more, out=best)
        else:
            best.index_copy_(1, units, torch.maximum(best.index_select(1, units), more))
    return best


WORTH_A_CALL = 1 << 12
"""Values of a segment from which a CPU takes it by itself faster than one by one among others."""


def segment_extreme(values: Tensor, segment: Tensor, segments: int, which: str, empty: float) -> Tensor:
    """`segment_max`, or the smallest value: ``which`` is "amax" or "amin"."""
    if segments == 1 and values.shape[1]:
        return values.amax(1, keepdim=True) if which == "amax" else values.amin(1, keepdim=True)
    rows = values.T.contiguous()  # whole rows of slots are compared at once: along the other axis, one by one
    place = segment.long()[:, None].expand_as(rows)
    out = rows.new_full((segments, rows.shape[1]), empty)
    return out.scatter_reduce(0, place, rows, which, include_self=False).T.contiguous()


def segment_sum(
    values: Float[Tensor, "slots rows"], segment: Int[Tensor, " rows"], segments: int
) -> Float[Tensor, "slots segments"]:
    if segments == 1:
        return values.sum(1, keepdim=True)
    rows = values.T.contiguous()
    place = segment.long()[:, None].expand_as(rows)
    return rows.new_zeros(segments, rows.shape[1]).scatter_add(0, place, rows).T.contiguous()


def segment_minmax(
    values: Float[Tensor, "slots rows"],
    axis: Axis,
    present: Bool[Tensor, "slots rows"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "slots rows"]:
    """Min-max over the present rows of each segment (Eq. 12); an absent row gets 0, and all get 1 when all are equal.

    Rows that span less than ``SCORE_STEP`` count as equal, or rounding would be blown up to the full range. Values are
    finite where they are present.
    """
    if _plain(values) and not torch.compiler.is_compiling():
        choice = choose("segments", backend, device=values.device, dtype=values.dtype)
        if choice.name != "torch":
            found: Tensor = kernel("segments", choice.name).minmax(values, axis.ptr, present, SCORE_STEP)
            return found
    if 1 < axis.segments < values.numel() / WORTH_A_CALL and values.device.type == "cpu":
        parts = [
            segment_minmax(values[:, a:b], part, None if present is None else present[:, a:b], "torch")
            for part, (a, b) in zip(axis.parts, pairwise(axis.ptr), strict=True)
        ]
        return torch.cat(parts, dim=1)
    low = values if present is None else values.masked_fill(~present, torch.inf)
    high = values if present is None else values.masked_fill(~present, -torch.inf)
    least = segment_extreme(low, axis.segment, axis.segments, "amin", torch.inf)
    most = segment_extreme(high, axis.segment, axis.segments, "amax", -torch.inf)
    span = most - least
    flat = ~(span > SCORE_STEP)
    # Divided by infinity, equal rows keep nothing of their values or gradients, and 1 is put there.
    width = span.masked_fill(flat, torch.inf)
    scaled = (values - axis.spread(least)).div_(axis.spread(width)).add_(axis.spread(flat.to(values.dtype)))
    return scaled if present is None else torch.where(present, scaled, torch.zeros_like(scaled))


def segment_topk(
    scores: Float[Tensor, "slots rows"],
    axis: Axis,
    k: int,
    present: Bool[Tensor, "slots rows"] | None = None,
    backend: str = "auto",
) -> Int[Tensor, "slots segments k"]:
    """Row numbers of the ``k`` best rows of each segment, best first, -1 where there are fewer.

    Scores are compared in steps of ``SCORE_STEP``; equal ones go by row number, whatever the batch and the device.
    """
    k_held = min(k, axis.longest)
    if not k_held:
        return torch.full((scores.shape[0], axis.segments, k), -1, device=scores.device)
    if not torch.compiler.is_compiling():
        choice = choose("segments", backend, device=scores.device, dtype=scores.dtype)
        if choice.name != "torch":
            found: Tensor = kernel("segments", choice.name).topk(scores, axis.ptr, k, present, SCORE_STEP, FARTHEST)
            return found
    padded = axis.padded
    there = None if axis.size == padded.numel() else padded >= 0
    if present is not None:
        own = _padded(present, axis)
        there = own if there is None else own & there
    key = ranking_key(_padded(scores.detach(), axis), padded)
    if there is not None:
        key.masked_fill_(~there, NO_KEY)
    best = key.topk(k_held, dim=-1).values
    rows = torch.where(best > NO_KEY, LAST_ROW - (best & 0xFFFFFFFF), -1)
    return torch.nn.functional.pad(rows, (0, k - k_held), value=-1)


FARTHEST = 2.0**30
"""Steps from 0 at which scores are no more told apart."""
LAST_ROW = 2**31 - 1
NO_KEY = -(2**63)


def ranking_key(scores: Float[Tensor, "..."], rows: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """One integer by which scores are ranked: the step in the high half, the falling row number in the low one."""
    steps = (scores.double() / SCORE_STEP).round_().clamp_(-FARTHEST, FARTHEST)
    return steps.long().mul_(2**32).add_(LAST_ROW - rows)


def _padded(values: Shaped[Tensor, "slots rows"], axis: Axis) -> Shaped[Tensor, "slots segments longest"]:
    """Rows by segment, behind the shorter ones whatever stands there."""
    if axis.segments == 1:
        return values[:, None]
    rows = values.index_select(1, axis.padded.clamp(min=0).flatten())
    return rows.view(len(values), axis.segments, axis.longest)


def member_mask(rows: Int[Tensor, "slots memories k"], size: int) -> Bool[Tensor, "slots units"]:
    """Which units are among the rows; -1 is none."""
    flat = rows.flatten(1)
    mask = torch.zeros(len(flat), size + 1, dtype=torch.bool, device=rows.device)  # the last column takes the -1s
    return mask.scatter(1, torch.where(flat >= 0, flat, size), True)[:, :size]
