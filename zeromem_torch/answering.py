"""From evidence to an answer: the one place that asks a reader, and calibrates what it says (paper Eq. 16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeromem_torch.calibration.answer import NOT_IN_MEMORY, AnswerCalibration
from zeromem_torch.evidence import Evidence
from zeromem_torch.ledger import Ledger
from zeromem_torch.reader import MeteredReader, Reader, Reply, Usage, load_reader
from zeromem_torch.results import Answered
from zeromem_torch.substrate.traces import ZeroMemError


class Answering:
    """Asks readers, and keeps those that were named for the next question."""

    def __init__(self, ledger: Ledger, device: str = "cpu") -> None:
        self.ledger, self.device = ledger, device
        self._named: dict[str, Reader] = {}

    def answer(
        self,
        questions: Sequence[str],
        evidence: Sequence[Evidence],
        reader: Reader | str,
        *,
        token_budget: int | None = None,
        calibrate: bool = True,
        abstain: bool = False,
    ) -> list[Answered]:
        """One answer a question, in order. A question without evidence is "not in memory", and costs no call."""
        asked = [number for number, found in enumerate(evidence) if found]
        replies: Mapping[int, Reply] = {}
        if asked:
            metered = MeteredReader(self._reader(reader), self.ledger)
            texts, found = [questions[number] for number in asked], [evidence[number] for number in asked]
            replies = dict(zip(asked, metered.read(texts, found, token_budget=token_budget), strict=True))
        calibration = AnswerCalibration(abstain=abstain) if calibrate else None
        return [
            _answered(question, own, replies.get(number), calibration)
            for number, (question, own) in enumerate(zip(questions, evidence, strict=True))
        ]

    def _reader(self, reader: Reader | str) -> Reader:
        if not isinstance(reader, str):
            if not callable(getattr(reader, "read", None)):
                advice = "pass one, or a name such as 'embedded'"
                raise ZeroMemError.of("reader", "a reader or the name of one", type(reader).__name__, advice)
            return reader
        if reader not in self._named:
            here = reader == "embedded" or reader.startswith("hf:")  # the others choose their device themselves
            self._named[reader] = load_reader(reader, **({"device": self.device} if here else {}))
        return self._named[reader]


def _answered(
    question: str, evidence: Evidence, reply: Reply | None, calibration: AnswerCalibration | None
) -> Answered:
    if reply is None:
        why = "; ".join(evidence.reasons)
        return Answered(question, NOT_IN_MEMORY, "", "no evidence", why, False, (), evidence, Usage())
    raw, usage = reply.text, reply.usage
    if reply.error:
        return Answered(question, "", raw, "failed", "", False, (), evidence, usage, reply.error)
    if calibration is None:
        return Answered(question, raw.strip(), raw, "not calibrated", "", False, (), evidence, usage)
    own = calibration.calibrate(question, raw, evidence)
    said = own.text, own.raw, own.rule, own.explanation, own.supported, own.evidence
    return Answered(question, *said, evidence, usage)
