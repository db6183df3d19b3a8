"""What a text holds: its kinds, the labels of a tagger, and turns that lean on their neighbours."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.substrate.kinds import LABEL_KINDS, AnswerType, needs_context, text_kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("We met last Friday.", "DATE"),
        ("See you at 7 pm", "DATE NUMBER"),
        ("On Sundays I rest", "DATE"),
        ("It took three weeks", "DURATION NUMBER"),
        ("We have been here for years", "DURATION"),
        ("There were twenty people", "NUMBER"),
        ("It cost $40", "NUMBER"),
        ("I spoke with my sister", "PERSON"),
        ("We moved to Lisbon", "PLACE"),
        ("I saw it at the old museum", "PLACE"),
        ("She studies at Stanford University", "PLACE ORGANISATION TITLE"),
        ('He is reading "the old man"', "TITLE"),
        ("Have you seen Dead Poets Society?", "TITLE ORGANISATION"),
        ("No, never", "YES_NO"),
        ("We saw lions, tigers, and bears", "LIST"),
        ("Hey John! That sounds good", ""),
        ("Nice", ""),
    ],
)
def test_text_kinds(text: str, kinds: str) -> None:
    held = text_kinds(text)
    assert {kind.name for kind in AnswerType if held & kind} == {*kinds.split(), "PHRASE"}


def test_a_blank_text_holds_nothing() -> None:
    assert text_kinds("") == text_kinds(" \n") == 0


def test_labels_are_single_kinds() -> None:
    assert LABEL_KINDS["PERSON"] == AnswerType.PERSON
    assert LABEL_KINDS["GPE"] == LABEL_KINDS["LOC"] == LABEL_KINDS["FAC"] == AnswerType.PLACE
    assert LABEL_KINDS["ORG"] == LABEL_KINDS["NORP"] == AnswerType.ORGANISATION
    assert LABEL_KINDS["DATE"] == LABEL_KINDS["TIME"] == AnswerType.DATE
    assert LABEL_KINDS["WORK_OF_ART"] == AnswerType.TITLE
    assert all(kind.bit_count() == 1 for kind in LABEL_KINDS.values())


@pytest.mark.parametrize(
    "text",
    ["Yes!", "Sounds good", "Thanks, Maria!", "Yeah, I talked to my sister about the move to Lisbon last week"]
    + ["It was quite a journey through the hills, I must say", "That looks fun! What else do you do with the kids?"]
    + ["They were so happy when we came home from the trip", "Wow, what inspired it? The colours look so lively"]
    + ["", "?!", "👍"],
)
def test_turns_that_lean_on_their_neighbours(text: str) -> None:
    assert needs_context(text)


@pytest.mark.parametrize(
    "text",
    [
        "I started a weekend yoga class with a colleague last month",
        "Hey John! My sister and I moved to Lisbon last week",
    ]
    + ["The dog ran away, and then he came back to the house", "Thanks! We feel so lucky to have Scout in the family"],
)
def test_turns_that_stand_alone(text: str) -> None:
    assert not needs_context(text)


@given(st.text(max_size=80))
def test_any_text_has_kinds(text: str) -> None:
    assert bool(text_kinds(text) & AnswerType.PHRASE) == bool(text.strip())
    assert needs_context(text) or text.strip()


@pytest.mark.parametrize(
    "unit", ["first ", "a", '"', "A ", "b's ", "a, ", "what ", "the mother of ", "é ", "n't", "Of A "]
)
def test_a_megabyte_of_anything_takes_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    begin = time.perf_counter()
    text_kinds(text)
    needs_context(text)
    assert time.perf_counter() - begin < 30
