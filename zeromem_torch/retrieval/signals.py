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

from zeromem_torch.bank import Axis, MemoryBank, Postings, segment_max, segment_minmax, segment_topk
from zeromem_torch.retrieval.dense import DenseScores, LateInteraction
from zeromem_torch.retrieval.lexical import LexicalScores
from zeromem_torch.routing.queries import Asked, QueryBatch
from zeromem_torch.substrate.kinds import AnswerType

Signals = Mapping[str, Float[Tensor, "slots units"]]

TIMES = AnswerType.DATE | AnswerType.DURATION
KINDS = {"time": TIMES, "place": AnswerType.PLACE, "person": AnswerType.PERSON, "title": AnswerType.TITLE}
"""Answer types worth matching. Numbers, lists and yes/no stand in most turns: holding one tells nothing (measured)."""


class UnitSignals(nn.Module):
    """Compute every signal of a query batch over a bank, by name.

    ``date_reach``: days from a date asked for at which a unit's own day counts for nothing, falling linearly.
    ``precision`` is that of token states, see `TokenStates`.
    """

    def __init__(
        self,
        *,
        exhaustive: int = 2048,
        candidates: int = 256,
        date_reach: float = 15.0,
        precision: str = "stored",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.dense = DenseScores()
        self.lexical = LexicalScores(backend)
        self.late = LateInteraction(exhaustive, backend=backend, precision=precision)
        self.candidates = candidates
        self.date_reach = date_reach

    def forward(self, batch: QueryBatch, bank: MemoryBank) -> Signals:
        units = bank.axes["units"]
        near = {
            axis: self.dense(batch.vectors, vectors, bank.axes[axis])
            for axis, vectors in (("chunks", bank.chunk_vectors), ("windows", bank.window_vectors))
        }
        said = {
            axis: self._lexical(batch.terms, postings, bank.axes[axis], batch.slots)
            for axis, postings in (
                ("units", bank.unit_postings),
                ("windows", bank.window_postings),
                ("episodes", bank.episode_postings),
            )
        }
        phrases = self._lexical(batch.phrases, bank.phrase_postings, bank.axes["windows"], batch.slots)
        signals = {
            "dense_turn": bank.best_chunk(near["chunks"]),
            "dense_window": bank.best_window(near["windows"]),
            "lexical_turn": said["units"],
            "lexical_window": bank.best_window(said["windows"]),
            "lexical_episode": bank.of_episode(said["episodes"]),
            "phrase": bank.best_window(phrases),
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
        units = bank.axes["units"]
        dense = bank.best_chunk(self.dense(batch.rest_vectors, bank.chunk_vectors, bank.axes["chunks"]))
        lexical = self._lexical(batch.rest_terms, bank.unit_postings, units, batch.slots)
        return (segment_minmax(dense, units) + segment_minmax(lexical, units)).mul_(0.5)

    def _late_interaction(self, batch: QueryBatch, bank: MemoryBank, first: Signals) -> Signals:
        units = bank.axes["units"]
        candidates = batch.query.new_empty(*batch.query.shape, 0)
        if units.longest > self.late.maxsim.exhaustive:
            quick = first["dense_turn"] + first["lexical_turn"] + first["dense_window"] + first["lexical_window"]
            candidates = segment_topk(quick, units, self.candidates)
        turn, window = self.late(batch.states, batch.state_weights, bank, candidates)
        return {"maxsim_turn": segment_minmax(turn, units), "maxsim_window": segment_minmax(window, units)}

    def _lexical(self, asked: Asked, postings: Postings, axis: Axis, slots: int) -> Float[Tensor, "slots rows"]:
        scores: Tensor = self.lexical(asked.slot, asked.row, asked.weight, postings, slots, axis.size)
        return scores


def profile_signals(batch: QueryBatch, bank: MemoryBank, date_reach: float) -> Signals:
    """Compatibility with the profile (Eq. 11): subject, dates, answer type, titles, and the form of a dialogue."""
    units = bank.axes["units"]
    subject = torch.where(batch.subject >= 0, batch.subject, -2)  # no unit's speaker: nobody is -1
    after_question = torch.zeros_like(bank.unit_asks)
    after_question[1:] = bank.unit_asks[:-1] & (bank.unit_session[1:] == bank.unit_session[:-1])
    form = {"asks": bank.unit_asks, "answers": after_question, "opens": bank.unit_position == 0}
    return {
        "subject": (units.spread(subject) == bank.unit_speaker).float(),
        "date": date_nearness(batch, bank, date_reach),
        "spoken_date": spoken_dates(batch, bank),
        **{
            f"holds_{name}": units.spread((batch.kinds & int(kind) != 0).float())
            * (bank.unit_kinds & int(kind) != 0).float()
            for name, kind in KINDS.items()
        },
        "title": batch.titles.dense(batch.slots, units.size).clamp_(max=1),
        **{name: holds.float().expand(batch.slots, -1) for name, holds in form.items()},
    }


def date_nearness(batch: QueryBatch, bank: MemoryBank, reach: float) -> Float[Tensor, "slots units"]:
    """1 where a unit's own day lies in an interval asked about, falling to 0 at ``reach`` days from it."""
    units = bank.axes["units"]
    day = torch.where(bank.unit_day > 0, bank.unit_day, -torch.inf)
    slots, asked = _asked_dates(batch)
    near = day.new_zeros(len(slots), units.size)
    for first, last in asked:
        days = torch.maximum(units.spread(first) - day, day - units.spread(last))
        near = torch.maximum(near, days.div_(-reach).add_(1).clamp_(max=1))
    return day.new_zeros(batch.slots, units.size).index_copy(0, slots, near)


def spoken_dates(batch: QueryBatch, bank: MemoryBank, longest: int = 40) -> Float[Tensor, "slots units"]:
    """1 where a unit speaks of a day, or of at most ``longest`` days in a row, that meet an interval asked about."""
    units, dates = bank.axes["units"], bank.axes["dates"]
    short = bank.date_last - bank.date_first <= longest
    begin, end = torch.where(short, bank.date_first, torch.inf), bank.date_last.float()
    slots, asked = _asked_dates(batch)
    meets = torch.zeros(len(slots), dates.size, dtype=torch.bool, device=bank.device)
    for first, last in asked:
        meets |= (dates.spread(first) <= end) & (begin <= dates.spread(last))
    spoken = segment_max(meets.float(), bank.date_unit, units.size, empty=0.0)
    return spoken.new_zeros(batch.slots, units.size).index_copy(0, slots, spoken)


def _asked_dates(batch: QueryBatch) -> tuple[Int[Tensor, " asking"], list[tuple[Tensor, Tensor]]]:
    """Slots that may ask for a date, and the first and last days of each one they ask, ``[asking, memories]``.

    Days are floats, which hold them exactly; what stands for no interval begins after all time.
    """
    some = batch.date_first <= batch.date_last
    slots = torch.arange(batch.slots, device=some.device)
    if some.device.type == "cpu":  # elsewhere the host would have to wait to know them
        slots = slots[some.flatten(1).any(1)]
    first = torch.where(some, batch.date_first, torch.inf).index_select(0, slots)
    last = batch.date_last.float().index_select(0, slots)
    return slots, list(zip(first.unbind(2), last.unbind(2), strict=True))
