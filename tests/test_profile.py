"""The query profile: questions of every type, and the forms that names and subjects take."""

import gzip
import json
import time
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.routing.profile import QueryProfile, profile_query
from zeromem_torch.substrate.kinds import AnswerType
from zeromem_torch.substrate.tokenizer import Analyzer
from zeromem_torch.substrate.traces import ZeroMemError

SPEAKERS = ("Melanie", "John Smith", "Will", "user")


def types(text: str) -> set[str]:
    return {kind.name or "" for kind in AnswerType if kind in profile_query(text).answer_types}


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("When did Ana move to Lisbon?", "DATE"),
        ("Since when has Ana lived there?", "DATE"),
        ("In which year was the bridge built?", "DATE"),
        ("What is the date of death of the director of film Vertigo?", "DATE"),
        ("The club was founded by a man born in what year?", "DATE"),
        ("How long ago did she move?", "DATE DURATION"),
        ("How long has Ana lived in Lisbon?", "DURATION"),
        ("How many years passed between the two trips?", "DURATION"),
        ("How old is Ana's brother?", "NUMBER DURATION"),
        ("How many dogs does Ana have?", "NUMBER"),
        ("How much did the car cost?", "NUMBER"),
        ("What is the population of the city where Ana lives?", "NUMBER"),
        ("The arena can seat how many people?", "NUMBER"),
        ("Who is Ana's mentor?", "PERSON"),
        ("With whom did Ana travel?", "PERSON"),
        ("What actor played the narrator?", "PERSON"),
        ("The album was produced by who?", "PERSON"),
        ("In True North, who did the star marry?", "PERSON"),
        ("Where does Ana work?", "PLACE"),
        ("Which country has Tim visited most often?", "PLACE"),
        ("Which country the composer of film Vertigo is from?", "PLACE"),
        ("What is the place of birth of Ana's mother?", "PLACE"),
        ("Which company did Ana found?", "ORGANISATION"),
        ("What is the name of the band founded by Ana?", "ORGANISATION"),
        ("What's the name of the film starring Ana?", "TITLE"),
        ("What book did Ana read?", "TITLE"),
        ("Which film was released first, Vertigo or Rope?", "TITLE"),
        ("What books has Ana read?", "TITLE LIST"),
        ("What are the names of Ana's children?", "PERSON LIST"),
        ("Which cities has John been to?", "PLACE LIST"),
        ("What activities does Ana do with her kids?", "LIST PHRASE"),
        ("List the cities Ana has seen", "PLACE LIST"),
        ("Name the singer of the song Hello", "PERSON"),
        ("Does Ana live near a beach?", "YES_NO"),
        ("Would Ana move again soon?", "YES_NO"),
        ("Are both Frozen and Bambi animated features?", "YES_NO"),
        ("Isn't Ana a vegetarian?", "YES_NO"),
        ("Was Ana or Bea born first?", "PHRASE"),
        ("Why did Ana quit?", "PHRASE"),
        ("How did Ana feel about it?", "PHRASE"),
        ("What did Ana say about the news?", "PHRASE"),
        ("What kind of art does Ana make?", "PHRASE"),
        ("Ana's favourite colour", "PHRASE"),
        ("爱娜在哪里工作？", "PHRASE"),
        ("???", "PHRASE"),
    ],
)
def test_answer_types(question: str, expected: str) -> None:
    assert types(question) == set(expected.split())


@pytest.mark.parametrize("question", ["WHEN DID ANA MOVE?", "  when did ana move", "\u201cWhen did Ana move?\u201d"])
def test_answer_types_whatever_the_case(question: str) -> None:
    assert types(question) == {"DATE"}


@pytest.mark.parametrize(
    ("question", "subjects"),
    [
        ("What does Melanie's son like?", ["Melanie"]),
        ("what does melanie like", ["Melanie"]),
        ("Did MELANIE\u2019S dog bark?", ["Melanie"]),
        ("What did John say?", ["John Smith"]),
        ("What did John Smith tell Melanie?", ["Melanie", "John Smith"]),
        ("Is Johnny here?", []),
        ("Does Amelanie exist?", []),
        ("Where will they go?", []),
        ("Will they go?", []),
        ("Where did Will go?", ["Will"]),
        ("Who is Anthony?", []),
    ],
)
def test_subjects(question: str, subjects: list[str]) -> None:
    assert list(profile_query(question, speakers=SPEAKERS).subjects) == subjects


def test_speakers_may_be_anything() -> None:
    assert profile_query("Who is (x)?", speakers=["", " ", "(x)", "[", "a\\", "李"]).subjects == ("(x)",)
    assert profile_query("李?", speakers=["李"]).subjects == ("李",)


@pytest.mark.parametrize(
    ("question", "names"),
    [
        ("Were Scott Derrickson and Ed Wood of the same nationality?", ["Scott Derrickson", "Ed Wood"]),
        ("What did Ana's brother say?", ["Ana"]),
        ("Who wrote The Lord of the Rings?", ["The Lord of the Rings"]),
        ("In Batman Under the Red Hood, who dies?", ["Batman Under the Red Hood"]),
        ("Is J. K. Rowling older than Dr. Seuss?", ["J. K. Rowling", "Dr. Seuss"]),
        ("Are Big Hero 6 and iZombie shows?", ["Big Hero 6", "iZombie"]),
        ("Who is Abd al-Aziz ibn Saud?", ["Abd al-Aziz ibn Saud"]),
        ("Who is Leonardo da Vinci or Vincent van Gogh?", ["Leonardo da Vinci", "Vincent van Gogh"]),
        ("When did Élodie go to Österreich?", ["Élodie", "Österreich"]),
        ("Did Simon & Garfunkel sing?", ["Simon & Garfunkel"]),
        ("Who lives in Nim's Island?", ["Nim's Island", "Nim", "Island"]),
        ("Where was Ana in May, on Monday or in August 2023?", ["Ana"]),
        ("The director of film Safe (2012 Film)?", ["Safe"]),
        ("What is the best one?", []),
        ("Yes. How are you? I'm fine", []),
        ("WHO IS THERE", []),
    ],
)
def test_names(question: str, names: list[str]) -> None:
    assert list(profile_query(question).names) == names


def test_quotations() -> None:
    question = 'Is "Moon River" in \u201cVertigo\u201d or \'Rope\', Ana\'s "" film? «Oui»'
    assert profile_query(question).quoted == ("Moon River", "Vertigo", "Rope", "Oui")


def test_keywords_are_terms_in_order_once() -> None:
    assert profile_query("What did the dogs do to the other dogs' dog?").keywords == ("dog",)
    assert profile_query("What is it?").keywords == ("what", "is", "it")
    assert profile_query("The dogs ran", analyzer=Analyzer()).keywords == ("the", "dogs", "ran")


def test_dates_count_from_the_reference_or_from_a_day_in_the_question() -> None:
    def days(profile: QueryProfile) -> list[str]:
        return [str(date.fromordinal(mention.first_day)) for mention in profile.dates]

    reference = datetime(2024, 1, 31, tzinfo=UTC)
    assert days(profile_query("What did Ana do yesterday?", reference=reference)) == ["2024-01-30"]
    assert days(profile_query("What did Ana do yesterday?")) == []
    asked = "What did Ana do yesterday, as mentioned on 6 November 2023?"
    assert days(profile_query(asked, reference=reference)) == ["2023-11-05", "2023-11-06"]
    assert days(profile_query(asked)) == ["2023-11-05", "2023-11-06"]


@pytest.mark.parametrize(
    ("question", "cues"),
    [
        ("What was Ana's first job before Lisbon?", {"first", "before"}),
        ("What did Ana do recently, after the last trip?", {"recent", "after", "last"}),
        ("What will Ana do during winter?", {"future", "during"}),
        ("How often does Ana run?", {"often"}),
        ("Who is Ana?", set()),
    ],
)
def test_temporal_words(question: str, cues: set[str]) -> None:
    assert profile_query(question).temporal == cues


def test_relational_questions_are_told_from_local_ones() -> None:
    relational = (
        "Who is the mother of the director of film Vertigo?",
        "Where was Ana Maria's father born?",
        "Which film has the director who was born first, Vertigo or Rope?",
        "What do both Ana and Bea like?",
        "When was the company that bought the bank of the city where Ana lives founded?",
        "The author of the novel that inspired Vertigo was born in what city?",
    )
    local = (
        "When did Melanie adopt the dog?",
        "What did Melanie say about the trip?",
        "What did Melanie do on 7 May 2023?",
        "How long has Melanie had the car?",
        "Why did Melanie quit?",
    )
    for question in relational:
        profile = profile_query(question, speakers=SPEAKERS)
        assert profile.relational > profile.local, question
    for question in local:
        profile = profile_query(question, speakers=SPEAKERS)
        assert profile.local > profile.relational, question


def test_more_hops_are_stronger() -> None:
    questions = (
        "Who is Ana?",
        "Who is the father of Ana?",
        "Who is the father of the director of film Vertigo?",
        "Who is the father of the director of the film that was based on the novel Rope?",
    )
    strengths = [profile_query(question).relational for question in questions]
    assert strengths == sorted(set(strengths))


@pytest.mark.parametrize("text", ["", " ", "\u200b", "a\x00", "\ud800"])
def test_an_unusable_query_is_refused(text: str) -> None:
    with pytest.raises(ZeroMemError, match="query, text: expected"):
        profile_query(text)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=80), st.lists(st.text(max_size=8)))
def test_any_query_has_a_profile(text: str, speakers: list[str]) -> None:
    try:
        profile = profile_query(text, speakers=speakers, reference=datetime(2023, 7, 15, tzinfo=UTC))
    except ZeroMemError:
        return
    assert profile.answer_types
    assert profile.keywords
    assert profile.relational >= 0
    assert profile.local >= 0
    assert set(profile.subjects) <= set(speakers)
    assert profile == profile_query(text, speakers=speakers, reference=datetime(2023, 7, 15, tzinfo=UTC))


@pytest.mark.parametrize(
    "unit", ["first ", "a", '"', "A ", "b's ", "a, ", "what ", "the mother of ", "é ", "n't", "Of A "]
)
def test_a_megabyte_of_anything_takes_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    begin = time.perf_counter()
    profile_query(text, speakers=SPEAKERS)
    assert time.perf_counter() - begin < 30


def test_nearly_every_question_of_a_dialogue_names_its_subject(shared_data: Path) -> None:
    path = shared_data / "locomo" / "locomo_tuning6.json.gz"
    if not path.is_file():
        pytest.skip(f"no LoCoMo at {path}")
    profiles = [
        profile_query(str(entry["question"]), speakers=[talk["conversation"][f"speaker_{s}"] for s in "ab"])
        for talk in json.loads(gzip.decompress(path.read_bytes()))
        for entry in talk["qa"]
        if entry["category"] != 5
    ]
    assert sum(bool(profile.subjects) for profile in profiles) > 0.97 * len(profiles)
    when = [profile for profile in profiles if profile.text.lower().startswith("when")]
    assert all(profile.answer_types == AnswerType.DATE for profile in when)
