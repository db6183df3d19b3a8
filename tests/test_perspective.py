"""Whom a question is about, and the question as that person would have said it."""

import pytest

from zeromem_torch.routing.perspective import asks_of_self, first_person, subject_of


@pytest.mark.parametrize(
    ("question", "named", "people"),
    [
        ("What did she paint?", [], ()),
        ("What did Ann paint?", ["Ann"], ("Ann",)),
        ("What did Ann give Bob?", ["Ann", "Bob"], ("Ann", "Bob")),
        ("What did Bob get from Ann?", ["Ann", "Bob"], ("Bob", "Ann")),
        ("What did Ann and Bob paint?", ["Ann", "Bob"], ()),
        ("What did Bob & Ann paint?", ["Ann", "Bob"], ()),
        ("Is Ann or Bob older?", ["Ann", "Bob"], ()),
        ("What do Ann, Bob, and Cid share?", ["Ann", "Bob", "Cid"], ()),
        ("What did Ann's and Bob's mothers say?", ["Ann", "Bob"], ()),
        ("What did Ann's brother Bob say?", ["Ann", "Bob"], ("Ann", "Bob")),
        ("what did ann give BOB?", ["Ann", "Bob"], ("Ann", "Bob")),
        ("What did Anna give Bob Lee?", ["Anna Marie", "Bob Lee"], ("Anna Marie", "Bob Lee")),
    ],
)
def test_who_is_asked_about(question: str, named: list[str], people: tuple[str, ...]) -> None:
    assert subject_of(question, named) == people


@pytest.mark.parametrize(
    ("question", "subject", "addressee", "spoken"),
    [
        ("What did Melanie paint?", "Melanie", None, "What did I paint?"),
        ("What is Melanie's favourite book?", "Melanie", None, "What is my favourite book?"),
        ("What is Melanie\u2019s favourite book?", "Melanie", None, "What is my favourite book?"),
        ("What is James' dog called?", "James", None, "What is my dog called?"),
        ("What did melanie say about her kids?", "Melanie", None, "What did I say about my kids?"),
        ("What did Ann give Bob?", "Ann", "Bob", "What did I give you?"),
        ("What did Ann think of Bob's dog?", "Ann", "Bob", "What did I think of your dog?"),
        ("Did Joanna see himself and him?", "Joanna", None, "Did I see myself and me?"),
        ("Where did Joanna say she went?", "Joanna", None, "Where did I say I went?"),
        ("Was it hers?", "Joanna", None, "Was it my?"),
        ("Did Anna Marie swim?", "Anna Marie", None, "Did I swim?"),
        ("Did Anna swim?", "Anna Marie", None, "Did I swim?"),
        ("Did Annabel swim with Ann?", "Ann", None, "Did Annabel swim with I?"),
        ("What is C. (the cat) like?", "C. (the cat)", None, "What is I like?"),
        ("The weather there?", "Ann", None, "The weather there?"),
    ],
)
def test_the_question_in_the_first_person(question: str, subject: str, addressee: str | None, spoken: str) -> None:
    assert first_person(question, subject, addressee) == spoken


@pytest.mark.parametrize(
    ("question", "own"),
    [
        ("What did I paint?", True),
        ("Where is my dog?", True),
        ("My dog?", True),
        ("Who wrote to me, or of a friend of mine?", True),
        ("Did I do it myself?", True),
        ("What did Ann paint?", False),
        ("Who is Mya, i.e. Amy?", False),
        ("Is it in Rome or Milan?", False),
        ("What's new, anyhow?", False),
    ],
)
def test_who_asks_of_themselves(question: str, own: bool) -> None:
    assert asks_of_self(question) is own


def test_a_name_that_is_a_common_word_counts_as_written() -> None:
    assert first_person("When will Will move to the new flat?", "Will Smith") == "When will I move to the new flat?"
    assert first_person("Did May move in may?", "May") == "Did I move in may?"
    assert subject_of("Will Ann visit Will Smith?", ("Will Smith", "Ann"))[0] == "Ann"
