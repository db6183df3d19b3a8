"""Answer calibration (Eq. 16): rules by kind of answer, against the loops, and what must hold for any reply."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import equations
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.calibration.answer import NOT_IN_MEMORY, Answer, AnswerCalibration
from zeromem_torch.calibration.rules import LIKE
from zeromem_torch.calibration.support import terms_of
from zeromem_torch.evidence import Evidence, EvidenceItem
from zeromem_torch.routing.profile import profile_query
from zeromem_torch.substrate.kinds import AnswerType

CALIBRATION = AnswerCalibration()
JUNE = datetime(2023, 6, 9, 19, 55, tzinfo=UTC)  # a Friday
JULY = datetime(2023, 7, 15, 13, 51, tzinfo=UTC)
TALK = (
    "I went to a support group yesterday and it was so powerful.",
    "Last week I met my friends at the Blue Heron in Lisbon, all four of them.",
    'We saw "The Lean Startup" on the shelf. Rob has had it for about three years!',
    "I love pottery, hiking with my dogs and painting sunsets.",
)

LOVED = "pottery, hiking with my dogs and painting sunsets"


def item(number: int, text: str, moment: datetime | None = JUNE) -> EvidenceItem:
    return EvidenceItem(f"t{number}", 0, len(text), text, 1.0, {}, {}, "main", speaker="Ann", time=moment)


def kinds_of(question: str) -> tuple[str, ...]:
    asked = profile_query(question).answer_types
    return tuple(str(kind.name).lower() for kind in AnswerType if kind in asked)


def evidence(question: str, *texts: str | EvidenceItem, types: str = "") -> Evidence:
    items = [text if isinstance(text, EvidenceItem) else item(n, text) for n, text in enumerate(texts)]
    names = tuple(types.split()) or kinds_of(question)
    return Evidence(question, "b", "local", 0.6, (), items, items, items, names)


def answer(question: str, raw: str, *texts: str | EvidenceItem, types: str = "", abstain: bool = False) -> Answer:
    found = evidence(question, *(texts or TALK), types=types)
    return AnswerCalibration(abstain=abstain).calibrate(question, raw, found)


@pytest.mark.parametrize(
    "raw",
    [
        "pottery",
        "Pottery.".lower(),
        "**pottery**",
        '"pottery"',
        "The answer is pottery.",
        "Answer: pottery",
        "Sure! Answer: pottery",
        "Question: What does Ann love?\nAnswer: pottery\n\nExplanation: she said so in item 4.",
        "What does Ann love? pottery",
        "<think>It may be 5 May 2022, or hiking.</think>\n\npottery",
        "Based on the provided notes, pottery [4]",
        "pottery, as mentioned in the conversation.",
        "Ann loves pottery.",
        "She loves pottery.\n\nIt is said in the notes.",
        "[4] Ann: pottery",
        "pottery<|im_end|>",
        "```\npottery\n```",
        "1. pottery",
    ],
)
def test_what_is_said_around_an_answer_comes_off(raw: str) -> None:
    assert answer("What does Ann love?", raw).text == "pottery"


@pytest.mark.parametrize(
    ("question", "raw", "text", "rule", "rests_on"),
    [
        ("When did Ann go to the support group?", "8 June 2023", "8 June 2023", "kept", "t0"),
        ("When did Ann go to the support group?", "June 8, 2023", "8 June 2023", "date: normalised", "t0"),
        ("When did Ann go to the support group?", "It was on 2023-06-08.", "8 June 2023", "date: normalised", "t0"),
        ("When did Ann go to the support group?", "yesterday", "8 June 2023", "date: resolved", "t0"),
        ("When did Ann go to the support group?", "June 8th", "8 June 2023", "date: resolved", "t0"),
        ("When did Ann go to the support group?", "around June 2023", "around June 2023", "kept", "t0"),
        ("When did Ann meet her friends?", "Last week", "the week before 9 June 2023", "date: resolved", "t1"),
        ("When did Ann meet her friends?", "the week before 9 June 2023", "the week before 9 June 2023", "kept", "t1"),
        ("When did Ann move?", "Januarty 5, 2024", "Januarty 5, 2024", "kept", ""),
        ("How many friends did Ann meet?", "She met four friends at a bar.", "four", "number: shortened", "t1"),
        ("How many friends did Ann meet?", "4", "4", "kept", "t1"),
        ("How many friends did Ann meet?", "40 points", "40 points", "kept", ""),
        ("How long has Rob had it?", "He has had it for about 3 years.", "about 3 years", "duration: shortened", "t2"),
        ("How long has Rob had the book?", "", "about three years", "duration: replaced", "t2"),
        ("Who has the book?", "The person who has had it for so long is Rob.", "Rob", "person: shortened", "t2"),
        ("Where did Ann meet her friends?", "Ann met her friends in Lisbon.", "in Lisbon", "shortened", "t1"),
        ("Which film was it?", 'We saw "The Lean Startup" up there.', "The Lean Startup", "title: shortened", "t2"),
        ("Does Ann love pottery?", "Yes, Ann loves pottery.", "Yes", "yes/no: shortened", "t3"),
        ("Does Ann love pottery?", "Ann does not love pottery.", "No", "yes/no: shortened", "t3"),
        ("Would Ann love a kiln?", "Likely no, Ann would love Mars", "Likely no", "yes/no: shortened", "t3"),
        ("Does Ann love crafts?", "Yes, she loves painting sunsets", "Yes, she loves painting sunsets", "kept", "t3"),
        ("What hobbies does Ann have?", "pottery, kayaking, hiking, pottery", "pottery, hiking", "list: pruned", "t3"),
        ("What hobbies does Ann have?", "1. Pottery\n2. Kayaking\n3. Hiking", "Pottery, Hiking", "list: pruned", "t3"),
        ("What hobbies does Ann have?", "pottery and hiking", "pottery and hiking", "kept", "t3"),
        ("What hobbies does Ann have?", "skiing, kayaking", "skiing, kayaking", "kept", ""),
        ("What was powerful?", "The support group, which is a great example.", "The support group", "shortened", "t0"),
        ("What does Ann love?", "I don't know.", NOT_IN_MEMORY, "declined", ""),
        ("What does Ann love?", "The notes do not mention it.", NOT_IN_MEMORY, "declined", ""),
    ],
)  # fmt: skip
def test_rules(question: str, raw: str, text: str, rule: str, rests_on: str) -> None:
    said = answer(question, raw)
    assert (said.text, said.rule, " ".join(said.evidence)) == (text, rule, rests_on)
    assert said.supported == bool(rests_on)
    assert said.raw == raw
    assert said.explanation


@pytest.mark.parametrize(
    ("question", "raw", "text", "rule", "rests_on"),
    [
        ("What does Ann love?", "[4] 9 June 2023, Ann (t3)", LOVED, "shortened", "t3"),
        ("What does Ann love?", "Ann (t3)", LOVED, "shortened", "t3"),
        ("What does Ann love?", "[4]", LOVED, "shortened", "t3"),
        ("What does Ann love?", "pottery (t3)", "pottery", "cleaned", "t3"),
        ("Which film was it?", "3. 9 June 2023, Ann (t2)", "The Lean Startup", "title: of the item named", "t2"),
        ("How long has Rob had it?", "Ann (t2)", "about three years", "duration: of the item named", "t2"),
        ("Where did Ann meet her friends?", "Ann (t1)", "Blue Heron in Lisbon", "place: of the item named", "t1"),
        ("When did Ann go to the support group?", "9 June 2023, Ann (t0)", "8 June 2023", "date: resolved", "t0"),
        ("Who went to the support group?", "Ann (t0)", "Ann", "cleaned", "t0"),
        ("How many friends did Ann meet?", "4", "4", "kept", "t1"),
        ("What does Ann love?", "[9]", "", "cleaned", ""),
        ("What does Ann love?", "Ann (t9)", "Ann (t9)", "kept", ""),
    ],
)  # fmt: skip
def test_a_reply_that_names_an_item_is_what_the_item_says(
    question: str, raw: str, text: str, rule: str, rests_on: str
) -> None:
    said = answer(question, raw)
    assert (said.text, said.rule, " ".join(said.evidence)) == (text, rule, rests_on)


@pytest.mark.parametrize(
    ("question", "raw", "text"),
    [
        ("Which month did Ann go to the support group in?", "8 June 2023", "June 2023"),
        ("What year did Ann go to the support group?", "2023-06-08", "2023"),
        ("Which day did Ann go to the support group?", "2023-06-08", "8 June 2023"),
        ("Which month did Ann move in?", "May 2021", "May 2021"),
        ("What was red?", "The kite: the kite: the kite: the", "The kite"),
        ("What was red?", "I'm not sure, but I think it was the kite", "the kite"),
        ("What was red?", "I'm not sure, I'm not sure. I'm not sure.", NOT_IN_MEMORY),
        ("What did Ann find on 9 June 2023?", "Ann found a red kite on 9 June 2023.", "Ann found a red kite"),
        ("What is Ann's place on the team she won with?", "Ann's place on the team she won with is goal.", "goal"),
    ],
)
def test_what_is_asked_and_repeated_comes_off(question: str, raw: str, text: str) -> None:
    assert answer(question, raw).text == text


@pytest.mark.parametrize(
    ("question", "raw", "text", "rule"),
    [
        ("When did Ann go to the support group?", "3 March 2020", "8 June 2023", "date: replaced"),
        ("When did Ann go to the support group?", "on a Tuesday in spring", "8 June 2023", "date: replaced"),
        ("When did Ann buy her car?", "3 March 2020", "3 March 2020", "kept"),  # no item is about it
        ("When did Ann love pottery?", "2020-03-03", "9 June 2023", "date: replaced"),  # the day it was said on
        ("What did Ann do in March 2020?", "3 March 2020", "3 March 2020", "kept"),
    ],
)
def test_a_date_that_nothing_bears_out(question: str, raw: str, text: str, rule: str) -> None:
    said = answer(question, raw)
    assert (said.text, said.rule) == (text, rule)


def test_what_is_still_to_come_is_not_of_the_day_it_was_spoken_of() -> None:
    talk = ("I signed up for the pottery course.", "Lovely! When does it start?", "Next Tuesday, for ten weeks.")
    items = [item(n, text, JUNE + timedelta(minutes=n)) for n, text in enumerate(talk)]
    said = answer("When does the pottery course start?", "2020-03-03", *items)
    assert (said.text, said.rule, said.evidence) == ("13 June 2023", "date: replaced", ("t2",))
    assert answer("When did the pottery course start?", "2020-03-03", *items).text == "9 June 2023"
    later = replace(items[2], time=JUNE + timedelta(days=1))  # another day's talk
    assert answer("When does the pottery course start?", "2020-03-03", *items[:2], later).text == "3 March 2020"
    before = replace(items[2], time=JUNE - timedelta(minutes=1))
    assert answer("When does the pottery course start?", "2020-03-03", *items[:2], before).text == "3 March 2020"
    other = item(3, "We leave next Friday.", JUNE + timedelta(minutes=4))
    assert answer("When does the pottery course start?", "2020-03-03", *items, other).text == "3 March 2020"


def test_a_speaker_is_no_place() -> None:
    assert answer("Where was it?", "it", "Ann says that Ann was there.").text == "it"
    assert answer("Where was it?", "it", "She was in Lisbon.").text == "Lisbon"


def test_the_day_of_a_session_means_the_day_it_tells_of() -> None:
    question = "When did Ann go to the support group?"
    assert answer(question, "9 June 2023", TALK[0]).text == "8 June 2023"
    assert answer(question, "9 June 2023", TALK[0], TALK[3]).text == "8 June 2023"
    both = "I went to the group yesterday, and last week to the clinic."
    assert answer(question, "9 June 2023", both).text == "9 June 2023"  # which of the two, nobody can say
    assert answer(question, "9 June 2023", item(0, TALK[0], None)).text == "9 June 2023"


def test_a_reply_without_a_date_takes_that_of_the_item_it_copies() -> None:
    question = "When did Ann love pottery?"
    said = answer(question, TALK[3], TALK[3])
    assert (said.text, said.rule, said.evidence) == ("9 June 2023", "date: of the item", ("t0",))
    said = answer(question, "I met my friends at the Blue Heron", *TALK)
    assert (said.text, said.rule, said.evidence) == ("the week before 9 June 2023", "date: resolved", ("t1",))
    assert answer(question, TALK[3], TALK[0], TALK[3]).text == "9 June 2023"  # the other item is not about it
    assert answer("What type of date?", "picnic date", "It was a picnic date.", types="date").text == "picnic date"


def test_a_relative_date_counts_from_the_item_that_the_reply_copies() -> None:
    texts = (item(0, "Last week I moved.", JULY), item(1, "Last week we adopted a puppy.", JUNE))
    said = answer("When did they adopt a puppy?", "9 June 2023, Ann: Last week we adopted a puppy.", *texts)
    assert (said.text, said.evidence) == ("the week before 9 June 2023", ("t1",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I moved two days ago", "7 June 2023"),
        ("I moved two weeks ago", "two weeks before 9 June 2023"),
        ("I moved a few months ago", "a few months before 9 June 2023"),
        ("I moved last weekend", "the weekend before 9 June 2023"),
        ("I moved last month", "May 2023"),
        ("I moved last year", "2022"),
        ("I moved on Friday, 2 June", "2 June 2023"),
        ("I will move next week", "the week after 9 June 2023"),
        ("I will move in two weeks", "two weeks after 9 June 2023"),
        ("I will move tomorrow", "10 June 2023"),
    ],
)
def test_a_resolved_date_is_as_exact_as_it_was_said(text: str, expected: str) -> None:
    said = answer("When does Ann move?", text, text)
    assert (said.text, said.evidence) == (expected, ("t0",))
    again = answer("When does Ann move?", expected, text)
    assert (again.text, again.rule, again.supported) == (expected, "kept", True)


def test_abstaining_takes_back_only_what_nothing_supports() -> None:
    assert answer("What does Ann love?", "skiing", abstain=True).text == NOT_IN_MEMORY
    assert answer("What does Ann love?", "skiing").text == "skiing"
    assert answer("What does Ann love?", "pottery", abstain=True).text == "pottery"
    assert answer("What hobbies does Ann have?", "skiing, pottery", abstain=True).text == "pottery"
    nothing = Evidence.nothing("What does Ann love?", "b", "no traces")
    assert AnswerCalibration(abstain=True).calibrate("What does Ann love?", "pottery", nothing).text == NOT_IN_MEMORY


def test_only_a_reply_that_says_nothing_is_replaced_and_only_by_one_candidate() -> None:
    question = "How many friends did Ann meet?"
    assert answer(question, "", TALK[1]).text == "four"
    assert answer(question, "Ann did meet friends", TALK[1]).text == "four"
    assert answer(question, "five", TALK[1]).text == "five"
    assert answer(question, "", TALK[1], "We were five.").text == ""
    said = answer("Which book was on the shelf?", "9 June 2023", TALK[2])
    assert (said.text, said.rule, said.evidence) == ("The Lean Startup", "title: replaced", ("t0",))


def test_answers_of_a_batch_are_those_alone() -> None:
    questions, raws = ["What does Ann love?", "When did Ann meet her friends?"], ["Ann loves pottery.", "last week"]
    found = [evidence(question, *TALK) for question in questions]
    alone = [CALIBRATION.calibrate(*row) for row in zip(questions, raws, found, strict=True)]
    assert CALIBRATION.calibrate_batch(questions, raws, found) == alone
    with pytest.raises(ValueError, match="zip"):
        CALIBRATION.calibrate_batch(["one"], [], [])


# Eq. 16 against the loops: words that mean nothing, so that only the rules decide.

_WORDS = st.sampled_from("amber basalt cedar dahlia ember fjord garnet heron".split())
_TEXTS = st.lists(st.lists(_WORDS, min_size=1, max_size=6).map(" ".join), max_size=4)


@given(st.lists(_WORDS, min_size=1, max_size=2), _TEXTS, st.lists(st.lists(_WORDS, min_size=1, max_size=3), max_size=5))
def test_lists_equal_equation_16(asked: list[str], texts: list[str], elements: list[list[str]]) -> None:
    question = f"Which {' '.join(asked)} ones?"
    said = CALIBRATION.calibrate(
        question, ", ".join(map(" ".join, elements)), evidence(question, *texts, types="list phrase")
    )
    words = [sorted(terms_of(" ".join(element))) for element in elements]
    held = [terms_of(f"Ann {text}") for text in texts]
    kept = equations.pruned(words, terms_of(question), held, LIKE)
    assert said.text == ", ".join(" ".join(elements[i]) for i in kept)


@given(st.lists(_WORDS, min_size=1, max_size=4), _TEXTS)
def test_dates_that_nothing_bears_out_equal_equation_16(asked: list[str], texts: list[str]) -> None:
    question = f"When was Ann {' '.join(asked)}?"
    items = [item(number, text, JUNE.replace(day=number + 1)) for number, text in enumerate(texts)]
    said = CALIBRATION.calibrate(question, "3 March 2020", evidence(question, *items, types="date"))
    rank = equations.item_about(terms_of(question), terms_of("Ann"), [terms_of(f"Ann {text}") for text in texts])
    assert said.text == ("3 March 2020" if rank is None else f"{rank + 1} June 2023")
    assert said.evidence == (() if rank is None else (f"t{rank}",))


@given(st.lists(_WORDS, max_size=2), _TEXTS, st.lists(_WORDS, min_size=1, max_size=4), st.booleans())
def test_phrases_equal_equation_16(asked: list[str], texts: list[str], reply: list[str], abstain: bool) -> None:
    question = f"Which {' '.join(asked)} one?"
    found = evidence(question, *texts, types="phrase")
    said = AnswerCalibration(abstain=abstain).calibrate(question, " ".join(reply), found)
    rank = equations.supporting_item(
        terms_of(" ".join(reply)), terms_of(question), [terms_of(f"Ann {text}") for text in texts]
    )
    assert said.evidence == (() if rank is None else (f"t{rank}",))
    assert said.text == (NOT_IN_MEMORY if abstain and rank is None else " ".join(reply))


_COUNTS = {"three": "3", "3": "3", "four": "4", "12": "12"}


_COUNT = st.sampled_from(sorted(_COUNTS))


@given(st.none() | _COUNT, st.lists(st.lists(_COUNT, max_size=2), max_size=3), st.booleans())
def test_counts_equal_equation_16(reply: str | None, counts: list[list[str]], abstain: bool) -> None:
    texts = [" ".join(f"we saw {count} herons" for count in row) or "we saw herons" for row in counts]
    found = evidence("How many herons?", *texts, types="number")
    said = AnswerCalibration(abstain=abstain).calibrate("How many herons?", reply or "", found).text
    values = [[_COUNTS[count] for count in row] for row in counts]
    expected = equations.calibrate_scalar(reply, _COUNTS, values, abstain=abstain)
    assert _COUNTS.get(said) == expected


# What must hold for any reply.

_PIECES = st.sampled_from(
    [*TALK, "What does Ann love?", "Ann", "is", "was not", "yesterday", "last week", "8 June 2023", "June", "four"]
    + ["about 3 years", "pottery", "Mars", ", ", ". ", "\n", "\n\n", "- ", "1. ", "**", '"', "'", "(", "[1]", "<think>"]
    + ["</think>", "Answer:", "Question:", "Yes", "no", "because", "which is great", ", making it", "I don't know"]
    + ["\x00", "\u2028", "e\u0301", "\u6f22"]
)
_REPLIES = (
    st.lists(_PIECES, max_size=12).map(" ".join) | st.lists(_PIECES, max_size=8).map("".join) | st.text(max_size=80)
)
_TYPES = st.sampled_from([kind.name.lower() for kind in AnswerType if kind.name] + ["list phrase", "number duration"])


@given(_REPLIES, _TYPES, st.booleans())
def test_calibrating_again_changes_nothing(raw: str, types: str, abstain: bool) -> None:
    question = "What does Ann love?" if types != "date" else "When did Ann love it?"
    found = evidence(question, *TALK, types=types)
    once = AnswerCalibration(abstain=abstain).calibrate(question, raw, found)
    again = AnswerCalibration(abstain=abstain).calibrate(question, once.text, found)
    assert again.text == once.text
    assert once == AnswerCalibration(abstain=abstain).calibrate(question, raw, found)


@given(_REPLIES, _TYPES)
def test_an_answer_is_made_of_what_was_said(raw: str, types: str) -> None:
    found = evidence("What does Ann love?", *TALK, types=types)
    said = CALIBRATION.calibrate("What does Ann love?", raw, found)
    if said.rule != "declined" and not said.rule.startswith(("date", "yes/no")):
        known = raw + " ".join(TALK)
        assert all(word in known for word in re.findall(r"\w+", said.text))
    assert set(said.evidence) <= {one.trace_id for one in found}
    assert said.supported == bool(said.evidence)


_ENDLESS = ["", "a", "\x00\x1b", " ", "\n", "*", "**a", '"', "(", "1. a\n", "a, ", "a and ", "is ", "?", "9", "A."]


@pytest.mark.parametrize("piece", [*_ENDLESS, "Ann: ", "8 May 2023 ", "last week ", "<think>", "Answer: ", "no "])
def test_a_megabyte_of_anything_is_read(piece: str) -> None:
    """Only the first of it: what took quadratic time would not come back."""
    long = piece * (1_000_000 // max(len(piece), 1))
    for kind in AnswerType:
        said = answer(long, long, item(0, long), types=str(kind.name).lower())
        assert len(said.text) <= len(long[:20_000])
        assert answer("What does Ann love?", long, types=str(kind.name).lower()).raw == long
