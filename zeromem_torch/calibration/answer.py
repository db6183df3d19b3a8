"""Answer calibration (paper Eq. 16): what the reader said, kept where the evidence bears it out, and put in form.

    a = a0                  where it is supported and well formed
    a = form(a0)            normalised, shortened to what answers, list items without support taken off
    a = c                   where a0 says nothing of the type asked for, and c is the only candidate of R(q) that does
    a = "not in memory"     where nothing has support, if that is asked for

No model takes part. Ours: what supports is one evidence item that holds all content words of the answer, those of the
question aside; for dates the same days, for quantities the same value, for list items each by itself and by a third of
its words. A scalar of the right type is not replaced even without support: a count is often right and stands in no
single item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeromem_torch.calibration.chatter import lines_of, refuses
from zeromem_torch.calibration.rules import Draft, calibrated, pointed
from zeromem_torch.calibration.support import Reading
from zeromem_torch.evidence import Evidence

__all__ = ["NOT_IN_MEMORY", "Answer", "AnswerCalibration"]

NOT_IN_MEMORY = "not in memory"
_PASSES = 8  # each but the last makes the text shorter, or words its date: two are enough for nearly all replies


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, what it was before, and why it changed."""

    text: str
    raw: str
    rule: str  # what changed it last: "kept", "cleaned", "shortened", "date: resolved", ...
    explanation: str
    evidence: tuple[str, ...]  # ids of the traces it rests on
    supported: bool


class AnswerCalibration:
    """Calibrate replies by the type of the question and against the evidence that the reader was given.

    A reply that declines becomes "not in memory"; with ``abstain`` so does one that nothing supports. Calibrating an
    answer again changes nothing.
    """

    def __init__(self, *, abstain: bool = False) -> None:
        self.abstain = abstain

    def calibrate(self, question: str, raw: str, evidence: Evidence) -> Answer:
        reading = Reading(question, evidence)
        draft, rule, why = Draft(raw), "kept", "as the reader said it"
        for _ in range(_PASSES):  # what one pass takes off may lay the next open
            if named := pointed(reading, draft.text):
                draft = named
                rule, why = named.rule or "cleaned", named.why or "without what was said around it"
            text = ", ".join(lines_of(draft.text, question, reading.speakers, dated="date" in reading.types))
            if refuses(text):
                return Answer(NOT_IN_MEMORY, raw, "declined", "the reader found no answer", (), False)
            if text != draft.text and rule == "kept":
                rule, why = "cleaned", "without what was said around it"
            after = calibrated(reading, text)
            if after.rule:
                rule, why = after.rule, after.why
            elif text == draft.text:
                draft = draft if draft.rests_on and after.rests_on else after  # the first still knows its item
                break
            draft = after
        if self.abstain and not draft.rests_on:
            why = f"nothing in the evidence supports {draft.text!r}"
            return Answer(NOT_IN_MEMORY, raw, "abstained", why, (), False)
        ids = tuple(dict.fromkeys(reading.items[rank].trace_id for rank in draft.rests_on))
        return Answer(draft.text, raw, rule, why, ids, bool(draft.rests_on))

    def calibrate_batch(
        self, questions: Sequence[str], raws: Sequence[str], evidence: Sequence[Evidence]
    ) -> list[Answer]:
        return [self.calibrate(*row) for row in zip(questions, raws, evidence, strict=True)]
