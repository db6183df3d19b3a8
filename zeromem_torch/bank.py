"""Many memories end to end on shared axes, and reductions over the stretch of an axis that one memory owns.

A query batch is laid out as ``[slots, ...]``: slot ``s`` of memory ``m`` holds that memory's ``s``-th query, so that
``[slots, units]`` scores every query of every memory at once. One memory with B queries is the case of one segment and
B slots; 128 memories with a query each are 128 segments and one slot. A memory nobody asks about is left out.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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

    def to(self, device: torch.device | str) -> Self:
        moved = {f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self) if "axis" in f.metadata}
        for f in dataclasses.fields(self):
            if "rows" in f.metadata:
                postings = getattr(self, f.name)
                moved[f.name] = Postings(*(getattr(postings, g.name).to(device) for g in dataclasses.fields(postings)))
        return dataclasses.replace(self, **moved)


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
    def padded(self) -> Int[Tensor, "segments longest"]:
        """Row numbers, one line a segment, -1 behind the shorter ones."""
        longest = max((b - a for a, b in zip(self.ptr, self.ptr[1:], strict=False)), default=0)
        start = torch.tensor(self.ptr, device=self.segment.device)
        rows = start[:-1, None] + torch.arange(longest, device=self.segment.device)
        return torch.where(rows < start[1:, None], rows, -1)


def axis_of(sizes: Sequence[int], device: torch.device | str = "cpu") -> Axis:
    """The axis on which segment ``i`` has ``sizes[i]`` rows."""
    counts = torch.tensor(list(sizes), dtype=torch.long, device=device)
    segment = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts, output_size=sum(sizes))
    return Axis((0, *accumulate(sizes)), segment)


@dataclass(frozen=True)
class MemoryBank:
    """The index of several memories with their offsets on every axis."""

    index: Index
    axes: Mapping[str, Axis]

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
    for f in dataclasses.fields(Index):
        parts = [getattr(index, f.name) for index in indexes]
        if "axis" in f.metadata:
            packed[f.name] = join(parts, f.metadata["to"])
        else:
            rows = f.metadata["rows"]
            packed[f.name] = Postings(
                *(
                    join([getattr(part, g.name) for part in parts], rows if g.metadata["to"] == "rows" else None)
                    for g in dataclasses.fields(Postings)
                )
            )
    return MemoryBank(Index(**packed), axes)


def segment_max(
    values: Float[Tensor, "slots rows"], segment: Int[Tensor, " rows"], segments: int, empty: float = -torch.inf
) -> Float[Tensor, "slots segments"]:
    """The largest value of each segment; ``empty`` where there is none. Ties share the gradient evenly."""
    out = values.new_full((values.shape[0], segments), empty)
    return out.scatter_reduce(1, segment.long().expand(values.shape[0], -1), values, "amax", include_self=False)


def segment_sum(
    values: Float[Tensor, "slots rows"], segment: Int[Tensor, " rows"], segments: int
) -> Float[Tensor, "slots segments"]:
    return values.new_zeros(values.shape[0], segments).index_add(1, segment, values)


def segment_minmax(
    values: Float[Tensor, "slots rows"], axis: Axis, present: Bool[Tensor, "slots rows"] | None = None
) -> Float[Tensor, "slots rows"]:
    """Min-max over the present rows of each segment (Eq. 12); an absent row gets 0, and all get 1 when all are equal.

    Rows that span less than ``SCORE_STEP`` count as equal, or rounding would be blown up to the full range.
    """
    low = values if present is None else values.masked_fill(~present, torch.inf)
    high = values if present is None else values.masked_fill(~present, -torch.inf)
    least = -segment_max(-low, axis.segment, axis.segments)[:, axis.segment]
    most = segment_max(high, axis.segment, axis.segments)[:, axis.segment]
    span = most - least
    flat = ~(span > SCORE_STEP)
    safe = torch.where(flat, torch.ones_like(span), span)  # keeps 0/0 out of the gradient too
    scaled = torch.where(flat, torch.ones_like(span), (values - torch.where(flat, values, least)) / safe)
    return scaled if present is None else torch.where(present, scaled, torch.zeros_like(scaled))


def segment_topk(
    scores: Float[Tensor, "slots rows"], axis: Axis, k: int, present: Bool[Tensor, "slots rows"] | None = None
) -> Int[Tensor, "slots segments k"]:
    """Row numbers of the ``k`` best rows of each segment, best first, -1 where there are fewer.

    Scores are compared in steps of ``SCORE_STEP``; equal ones go by row number, whatever the batch and the device.
    """
    padded = axis.padded
    k_held = min(k, padded.shape[1])
    if not k_held:
        return torch.full((scores.shape[0], axis.segments, k), -1, device=scores.device)
    there = (padded >= 0).expand(scores.shape[0], -1, -1)
    if present is not None:
        there = there & present[:, padded.clamp(min=0)]
    steps = (scores.detach().double() / SCORE_STEP).round().clamp(-(2.0**30), 2.0**30).long()
    key = steps[:, padded.clamp(min=0)] * 2**32 + (2**31 - 1 - padded)
    best = key.masked_fill(~there, torch.iinfo(torch.long).min).topk(k_held, dim=-1)
    rows = padded.expand(scores.shape[0], -1, -1).gather(2, best.indices)
    rows = torch.where(best.values > torch.iinfo(torch.long).min, rows, -1)
    return torch.nn.functional.pad(rows, (0, k - k_held), value=-1)


def member_mask(rows: Int[Tensor, "slots memories k"], size: int) -> Bool[Tensor, "slots units"]:
    """Which units are among the rows; -1 is none."""
    flat = rows.flatten(1)
    mask = torch.zeros(len(flat), size + 1, dtype=torch.bool, device=rows.device)  # the last column takes the -1s
    return mask.scatter(1, torch.where(flat >= 0, flat, size), True)[:, :size]
