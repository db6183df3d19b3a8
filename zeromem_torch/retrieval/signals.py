"""What is known of each unit before a view ranks it: semantic scores of its levels, and compatibility with the profile.

Both views start from these. A level above the turn reaches it as the best window that holds it, and as its episode, so
nothing is pruned on the way down (Eq. 11 as a soft sum; hard pruning to the best sessions costs points, measured).
Continuous signals are brought to [0, 1] over the units of a memory; profile signals are there (1), partly, or absent
(0), and absent for every unit where the query does not ask for them, or the traces have no such thing.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zeromem_torch.bank import SCORE_STEP, Axis, MemoryBank, Postings, segment_max, segment_minmax, segment_topk
from zeromem_torch.retrieval.dense import DenseScores, MaxSim
from zeromem_torch.retrieval.lexical import LexicalScores
from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.substrate.kinds import AnswerType

Signals = Mapping[str, Float[Tensor, "slots units"]]

TIMES = AnswerType.DATE | AnswerType.DURATION
KINDS = {"time": TIMES, "place": AnswerType.PLACE, "person": AnswerType.PERSON, "title": AnswerType.TITLE}
"""Answer types worth matching. Numbers, lists and yes/no stand in most turns: holding one tells nothing (measured)."""


class UnitSignals(nn.Module):
    """Compute every signal of a query batch over a bank, by name.

    ``date_reach``: days from a date asked for at which a unit's own day counts for nothing, falling linearly.
    """

    def __init__(self, *, exhaustive: int = 2048, candidates: int = 256, date_reach: float = 15.0) -> None:
        super().__init__()
        self.dense = DenseScores()
        self.lexical = LexicalScores()
        self.maxsim = MaxSim(exhaustive)
        self.candidates = candidates
        self.date_reach = date_reach

    def forward(self, batch: QueryBatch, bank: MemoryBank) -> Signals:
        units = bank.axes["units"]
        chunk = self.dense(batch.vectors, bank.chunk_vectors, bank.axes["chunks"])
        signals = {
            "dense_turn": segment_max(chunk, bank.chunk_unit, units.size),
            "dense_window": self._best_window(
                self.dense(batch.vectors, bank.window_vectors, bank.axes["windows"]), bank
            ),
            "lexical_turn": self._lexical(batch, bank.unit_postings, "units", bank),
            "lexical_window": self._best_window(self._lexical(batch, bank.window_postings, "windows", bank), bank),
            "lexical_episode": self._lexical(batch, bank.episode_postings, "episodes", bank)[:, bank.unit_episode],
            "phrase": self._best_window(
                self.lexical(
                    batch.phrases.slot,
                    batch.phrases.row,
                    batch.phrases.weight,
                    bank.phrase_postings,
                    batch.slots,
                    bank.axes["windows"].size,
                ),
                bank,
            ),
        }
        cosine = torch.maximum(signals["dense_turn"], signals["dense_window"])
        signals = {name: segment_minmax(scores, units) for name, scores in signals.items()}
        signals["cosine"] = cosine  # of the unit or the window around it: comparable between memories, ranks nothing
        signals["rest"] = self._rest(batch, bank)
        signals.update(self._late_interaction(batch, bank, signals))
        signals.update(profile_signals(batch, bank, self.date_reach))
        return signals

    def _rest(self, batch: QueryBatch, bank: MemoryBank) -> Float[Tensor, "slots units"]:
        """How well a unit answers what is asked about the query's names, whoever it speaks of."""
        units, terms = bank.axes["units"], batch.rest_terms
        chunk = self.dense(batch.rest_vectors, bank.chunk_vectors, bank.axes["chunks"])
        dense = segment_max(chunk, bank.chunk_unit, units.size)
        lexical = self.lexical(terms.slot, terms.row, terms.weight, bank.unit_postings, batch.slots, units.size)
        return 0.5 * segment_minmax(dense, units) + 0.5 * segment_minmax(lexical, units)

    def _late_interaction(self, batch: QueryBatch, bank: MemoryBank, first: Signals) -> Signals:
        """As many slots at once as the workspace holds: a match per unit, slot and query token is most of it."""
        units, tokens = bank.axes["units"], batch.states.shape[2]
        quick = first["dense_turn"] + first["lexical_turn"] + first["dense_window"] + first["lexical_window"]
        candidates = segment_topk(quick, units, self.candidates)
        members = bank.axes["members"].size
        step = max(1, self.maxsim.workspace // max(1, 4 * tokens * (3 * units.size + 2 * members)))
        states, weights, few = (torch.split(rows, step) for rows in (batch.states, batch.state_weights, candidates))
        parts = [self._matches(s, w, k, bank) for s, w, k in zip(states, weights, few, strict=True)]
        in_turn, in_window = (torch.cat(scores) for scores in zip(*parts, strict=True))
        return {"maxsim_turn": segment_minmax(in_turn, units), "maxsim_window": segment_minmax(in_window, units)}

    def _matches(self, states: Tensor, weights: Tensor, candidates: Tensor, bank: MemoryBank) -> tuple[Tensor, Tensor]:
        """MaxSim of turns and of each turn's best window, ``[slots, units]``."""
        units, windows = bank.axes["units"], bank.axes["windows"]
        best = self.maxsim(states, bank.token_states, bank.state_ptr, units, candidates)
        held = _group_max(best[bank.member_unit], bank.member_window, windows.size, empty=0.0)
        in_window = self._best_window(self.maxsim.combine(held, weights, windows), bank)
        # A token that matches well everywhere says little: bring each token's matches to [0, 1] before they are summed.
        return self.maxsim.combine(token_minmax(best, units), weights, units), in_window

    def _lexical(self, batch: QueryBatch, postings: Postings, axis: str, bank: MemoryBank) -> Tensor:
        terms = batch.terms
        scores: Tensor = self.lexical(terms.slot, terms.row, terms.weight, postings, batch.slots, bank.axes[axis].size)
        return scores

    def _best_window(self, scores: Float[Tensor, "slots windows"], bank: MemoryBank) -> Float[Tensor, "slots units"]:
        return segment_max(scores[:, bank.member_window], bank.member_unit, bank.axes["units"].size)


FAINT = 1e-2
"""Least difference of matches that counts as a whole one: a smaller one would bring its rounding with it."""


def token_minmax(best: Float[Tensor, "units slots query_tokens"], units: Axis) -> Tensor:
    """Min-max of each query token's matches over the units of its memory; all equal -> 0: that one tells nothing."""
    least = -_group_max(-best, units.segment, units.segments, empty=-torch.inf)[units.segment]
    most = _group_max(best, units.segment, units.segments, empty=-torch.inf)[units.segment]
    span = most - least
    return (best - least) * (span > SCORE_STEP) / span.clamp(min=FAINT)


def _group_max(
    best: Float[Tensor, "rows slots query_tokens"], group: Int[Tensor, " rows"], groups: int, empty: float
) -> Float[Tensor, "groups slots query_tokens"]:
    flat = best.flatten(1)
    most = flat.new_full((groups, flat.shape[1]), empty)
    return most.scatter_reduce(0, group[:, None].expand_as(flat), flat, "amax").view(groups, *best.shape[1:])


def profile_signals(batch: QueryBatch, bank: MemoryBank, date_reach: float) -> Signals:
    """Compatibility with the profile (Eq. 11): subject, dates, answer type, titles, and the form of a dialogue."""
    units = bank.axes["units"]
    subject, asked = batch.subject[:, units.segment], batch.kinds[:, units.segment]
    one = torch.ones(batch.slots, units.size, device=bank.device)
    after_question = torch.zeros_like(bank.unit_asks)
    after_question[1:] = bank.unit_asks[:-1] & (bank.unit_session[1:] == bank.unit_session[:-1])
    kinds = {
        f"holds_{name}": ((asked & int(kind) != 0) & (bank.unit_kinds & int(kind) != 0)).float()
        for name, kind in KINDS.items()
    }
    return {
        "subject": ((subject == bank.unit_speaker) & (subject >= 0)).float(),
        "date": date_nearness(batch, bank, date_reach),
        "spoken_date": spoken_dates(batch, bank),
        **kinds,
        "title": batch.titles.dense(batch.slots, units.size).clamp(max=1),
        "asks": one * bank.unit_asks,
        "answers": one * after_question,
        "opens": one * (bank.unit_position == 0),
    }


def date_nearness(batch: QueryBatch, bank: MemoryBank, reach: float) -> Float[Tensor, "slots units"]:
    """1 where a unit's own day lies in an interval asked about, falling to 0 at ``reach`` days from it."""
    memory = bank.axes["units"].segment
    first, last = batch.date_first[:, memory], batch.date_last[:, memory]  # [slots, units, dates]
    day = bank.unit_day[:, None]
    days = torch.maximum(first - day, day - last).clamp(min=0).float()
    near: Tensor = (1 - days / reach).clamp(min=0) * ((first <= last) & (day > 0))
    return near.amax(-1)


def spoken_dates(batch: QueryBatch, bank: MemoryBank, longest: int = 40) -> Float[Tensor, "slots units"]:
    """1 where a unit speaks of a day, or of at most ``longest`` days in a row, that meet an interval asked about."""
    units = bank.axes["units"]
    memory = units.segment[bank.date_unit]
    first, last = batch.date_first[:, memory], batch.date_last[:, memory]
    meets = (first <= bank.date_last[:, None]) & (bank.date_first[:, None] <= last) & (first <= last)
    short = bank.date_last - bank.date_first <= longest
    return segment_max((meets.any(-1) & short).float(), bank.date_unit, units.size, empty=0.0)
