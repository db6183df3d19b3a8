"""Questions answered from a memory: who is asked, what is cited, and what it costs."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from toys import RULES, HashEncoder

from zeromem_torch.evidence import Evidence
from zeromem_torch.ledger import Ledger
from zeromem_torch.library import ZeroMem
from zeromem_torch.reader import MeteredReader, Reply, Usage, load_reader
from zeromem_torch.reader.protocol import check_pairs
from zeromem_torch.substrate.encoder import Encoded
from zeromem_torch.substrate.entities import RuleExtractor
from zeromem_torch.substrate.traces import ZeroMemError

SAID = [
    {"id": "m1", "speaker": "Ann", "text": "The red boat is called Petrel.", "time": "2024-03-01T10:00:00"},
    {"id": "m2", "speaker": "Bo", "text": "We sailed to Bergen yesterday.", "time": "2024-03-02T10:00:00"},
    {"id": "m3", "speaker": "Ann", "text": "Soup is on the stove.", "time": "2024-03-03T10:00:00"},
]


@dataclass
class Scripted:
    """Says what it is told to; an answer that begins with "!" is an error."""

    says: dict[str, str]
    name: str = "scripted"
    context_tokens: int = 1000
    budgets: list[int | None] = field(default_factory=list)

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        check_pairs(questions, evidence)
        self.budgets.append(token_budget)
        said = [self.says[question] for question in questions]
        return [
            Reply("", Usage(7, 0, 1), "", text[1:]) if text.startswith("!") else Reply(text, Usage(7, 3, 1), "hash")
            for text in said
        ]


def memory_of(encoder: HashEncoder | None = None, **options: Any) -> ZeroMem:
    memory = ZeroMem(RULES, encoder=encoder or HashEncoder(), **options)
    memory.add(SAID, boundary="sea")
    return memory


def test_an_answer_is_calibrated_and_cites_what_bears_it_out() -> None:
    memory, reader = memory_of(), Scripted({"What is the red boat called?": "The answer is Petrel."})
    answered = memory.answer("What is the red boat called?", boundary="sea", reader=reader, reader_budget=90)
    assert (answered.text, answered.raw, answered.supported) == ("Petrel", "The answer is Petrel.", True)
    assert answered.cites == ("m1",)
    assert [item.trace_id for item in answered.citations] == ["m1"]
    assert str(answered) == "Petrel [m1]"
    assert reader.budgets == [90]
    plain = answered.to_dict()
    assert plain["cites"] == ["m1"]
    assert plain["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "calls": 1}
    assert plain["evidence"]["items"][0]["trace_id"] == "m1"


def test_without_calibration_the_answer_is_as_it_was_said() -> None:
    reader = Scripted({"What is the red boat called?": " The answer is Petrel.\n"})
    answered = memory_of().answer("What is the red boat called?", boundary="sea", reader=reader, calibrate=False)
    assert (answered.text, answered.rule, answered.cites) == ("The answer is Petrel.", "not calibrated", ())


def test_what_nothing_supports_is_not_in_memory_if_asked() -> None:
    reader = Scripted({"Who is the captain?": "Zebedee"})
    memory = memory_of()
    assert memory.answer("Who is the captain?", boundary="sea", reader=reader).text == "Zebedee"
    assert memory.answer("Who is the captain?", boundary="sea", reader=reader, abstain=True).text == "not in memory"


def test_one_failure_leaves_the_others_and_no_evidence_costs_no_call() -> None:
    memory = memory_of()
    reader = Scripted({"What is the red boat called?": "Petrel", "Where did Bo sail?": "!the server was gone"})
    questions = ["What is the red boat called?", "What is in the dark?", "Where did Bo sail?"]
    good, empty, failed = memory.answer_batch(questions, boundaries=["sea", "elsewhere", "sea"], reader=reader)
    assert good.text == "Petrel"
    assert (empty.text, empty.rule, empty.usage, empty.explanation) == (
        "not in memory", "no evidence", Usage(), "nothing is there",
    )  # fmt: skip
    assert (failed.text, failed.error, str(failed)) == ("", "the server was gone", "no answer: the server was gone")
    spent = memory.ledger
    assert (spent.reader_calls, spent.prompt_tokens, spent.completion_tokens) == (2, 14, 3)
    assert (spent.reader_tokens, spent.memory_llm_calls) == (17, 0)


def test_other_arguments_are_those_of_a_search() -> None:
    memory, reader = memory_of(), Scripted({"What is the red boat called?": "Petrel"})
    answered = memory.answer(
        "What is the red boat called?", boundary="sea", reader=reader, top_k=1, filters={"speaker": "Bo"}
    )
    assert {item.speaker for item in answered.evidence} == {"Bo"}
    assert answered.cites == ()


def test_async_twins() -> None:
    memory, reader = memory_of(), Scripted({"What is the red boat called?": "Petrel"})
    answered = asyncio.run(memory.aanswer("What is the red boat called?", boundary="sea", reader=reader))
    assert answered.text == "Petrel"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reader": "gpt"}, "reader: expected embedded | hf:FOLDER"),
        ({"reader": 7}, "reader: expected a reader or the name of one, got 'int'"),
        ({"reader_budget": 0}, "reader_budget: expected a whole number of at least 1"),
        ({"top_k": 0}, "top_k: expected a whole number of at least 1"),
    ],
)
def test_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ZeroMemError) as raised:
        memory_of().answer("What is the red boat called?", **{"boundary": "sea"} | given)
    assert str(raised.value).startswith(words)


# The guard


class AskingEncoder(HashEncoder):
    """An encoder that asks a reader for help."""

    reader: Any = None

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        if self.reader:
            self.reader.read(["What matters here?"], [Evidence.nothing("", "", "")])
        return super().encode(texts, states=states)


class AskingExtractor(RuleExtractor):
    reader: Any = None

    def extract(self, texts: Sequence[str]) -> Any:
        if self.reader:
            self.reader.read(["Who is named here?"] * 2, [Evidence.nothing("", "", "")] * 2)
        return super().extract(texts)


@pytest.mark.parametrize("metered", [True, False])
def test_a_reader_fails_inside_memory_operations_and_is_counted(metered: bool) -> None:
    inner = Scripted({"What matters here?": "all of it"})
    encoder = AskingEncoder()
    memory = memory_of(encoder)
    encoder.reader = MeteredReader(inner) if metered else inner  # a reader of ours guards itself: check_pairs
    operations: tuple[Callable[[], object], ...] = (
        lambda: memory.add("Fog came in.", boundary="sea"),
        lambda: memory.search("What sank?", boundary="sea"),
        lambda: memory.update("m3", boundary="sea", text="Soup is gone."),
        lambda: memory.rebuild(),
        lambda: memory.answer("What sank?", boundary="sea", reader=inner),  # its search asks, before the reader is due
    )
    for number, operation in enumerate(operations, start=1):
        with pytest.raises(ZeroMemError, match="reader: expected no call during memory operations"):
            operation()
        assert memory.ledger.memory_llm_calls == number
    assert inner.budgets == []
    assert memory.ledger.reader_tokens == 0


def test_an_extractor_cannot_ask_either() -> None:
    extractor = AskingExtractor()
    memory = ZeroMem(RULES, encoder=HashEncoder(), extractor=extractor)
    extractor.reader = MeteredReader(Scripted({}))
    with pytest.raises(ZeroMemError, match="no call during memory operations, got '2 questions'"):
        memory.add(SAID, boundary="sea")
    assert memory.ledger.memory_llm_calls == 2
    assert len(memory) == 0


def test_operations_inside_operations_count_for_both_and_end() -> None:
    outer, inner = Ledger(), Ledger()
    reader = MeteredReader(Scripted({"What?": "that"}))
    with outer.operation():
        assert reader.count(["two words"]) == [2]  # counting spends nothing
        with inner.operation(), pytest.raises(ZeroMemError):
            reader.read(["What?"], [Evidence.nothing("", "", "")])
        with pytest.raises(ZeroMemError):
            reader.read(["What?"], [Evidence.nothing("", "", "")])
    assert (outer.memory_llm_calls, inner.memory_llm_calls) == (2, 1)
    assert reader.read(["What?"], [Evidence.nothing("", "", "")])[0].text == "that"
    assert reader.ledger.reader_tokens == 10


def test_a_reader_of_ours_guards_itself() -> None:
    reader = load_reader("openai:any@http://127.0.0.1:9/v1")
    ledger = Ledger()
    with ledger.operation(), pytest.raises(ZeroMemError, match="no call during memory operations"):
        reader.read(["What?"], [Evidence.nothing("", "", "")])
    assert ledger.memory_llm_calls == 1
