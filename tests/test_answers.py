"""Answer measures: the protocol's vectors, formulas by loops, tokens and stems as the packages they stand for."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.evaluation.answers import BLEU1, F1, answer_in_evidence, bleu1, f1, measures, nltk_tokens
from zeromem_torch.evaluation.porter import porter_stem

VECTORS = [  # prediction, gold, gam F1, gam BLEU-1, amem F1, hotpot F1
    ("The sunday before 25 May 2023", "May 25, 2023", 0.75, 0.6, 0.6667, 0.75),
    ("a the apple", "apple", 0.6667, 0.5, 0.5, 1.0),
    ("pottery, camping, painting, swimming", "pottery, camping", 0.6667, 0.5, 0.6667, 0.6667),
    ("Melanie's kids", "melanies kids", 0.4, 0.3333, 0.5, 1.0),
    ("no no no", "no", 0.5, 0.3333, 1.0, 0.5),
    ("counseling", "Psychology, counseling certification", 0.5, 0.1353, 0.5, 0.5),
    ("2022", 2022, 1, 1, 1, 1),
    ("", "x", 0, 0, 0, 0),
    ("Yes, the the dog", "yes dog", 0.8, 0.6667, 0.8, 1.0),
]


@pytest.mark.parametrize(("prediction", "gold", "gam", "bleu", "amem", "hotpot"), VECTORS)
def test_the_protocols_vectors(
    prediction: str, gold: str | int, gam: float, bleu: float, amem: float, hotpot: float
) -> None:
    assert f1(prediction, gold, "gam") == pytest.approx(gam, abs=5e-5)
    assert bleu1(prediction, gold, "gam") == pytest.approx(bleu, abs=5e-5)
    assert f1(prediction, gold, "amem") == pytest.approx(amem, abs=5e-5)
    assert f1(prediction, gold, "hotpot") == pytest.approx(hotpot, abs=5e-5)


@pytest.mark.parametrize(
    ("convention", "both", "one"), [("gam", 1.0, 0.0), ("amem", 0.0, 0.0), ("locomo", 0.0, 0.0), ("hotpot", 0.0, 0.0)]
)
def test_answers_without_words(convention: str, both: float, one: float) -> None:
    assert f1("", "", convention) == f1("!", "...", "gam" if convention == "gam" else "hotpot") == both
    assert f1("?", "dog", convention) == f1("dog", "", convention) == one
    assert all(bleu1(*pair, name) == 0 for name in BLEU1 for pair in (("", ""), ("dog", ""), ("", "dog")))


@pytest.mark.parametrize(
    ("prediction", "gold", "category", "score"),
    [
        ("painting", "paintings", "4", 1.0),  # stems
        ("the dog and a cat", "dog cat", "4", 1.0),  # "and" is dropped like an article
        ("1,000 apples", "1000 apple", "2", 1.0),
        ("pottery, hiking", "pottery, camping", "1", 0.5),  # a gold part takes its best match, and the mean counts
        ("pottery", "pottery, camping, swimming", "1", 1 / 3),
        ("camping in the woods, pottery", "pottery, camping", "1", (1.0 + 0.5) / 2),
        ("likely no", "Likely no; because she is busy", "3", 1.0),
        ("likely no", "Likely no; because she is busy", "4", 2 * 2 / (2 + 6)),
        ("No information available.", "", "5", 1.0),
        ("It is NOT MENTIONED", "", "5", 1.0),
        ("a blue car", "", "5", 0.0),
    ],
)
def test_locomo_treats_its_categories_apart(prediction: str, gold: str, category: str, score: float) -> None:
    assert f1(prediction, gold, "locomo", category) == pytest.approx(score)


WORDS = st.lists(st.sampled_from("red dog ran up a hill".split()), max_size=6).map(" ".join)


@given(WORDS, WORDS)
def test_f1_is_that_of_precision_and_recall(prediction: str, gold: str) -> None:
    given_words, right = (
        [w for w in text.split() if w != "a"] for text in (prediction, gold)
    )
    shared = sum(min(given_words.count(word), right.count(word)) for word in set(given_words))
    if shared:
        precision, recall = shared / len(given_words), shared / len(right)
        assert f1(prediction, gold, "hotpot") == pytest.approx(2 * precision * recall / (precision + recall))
    else:
        assert f1(prediction, gold, "hotpot") == 0
    assert f1(prediction, gold, "hotpot") == pytest.approx(f1(gold, prediction, "hotpot"))


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_has_a_measure(prediction: str, gold: str) -> None:
    scores = measures(prediction, [gold])
    assert set(scores["f1"]) == set(F1)
    assert set(scores["bleu1"]) == set(BLEU1)
    assert all(0 <= score <= 1 for kind in scores.values() for score in kind.values())


def test_of_several_accepted_answers_the_best_counts() -> None:
    both = measures("New York", ["NYC", "New York City"])
    assert both["f1"]["gam"] == f1("New York", "New York City", "gam") == 0.8
    assert both["bleu1"]["gam"] == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize(
    ("text", "tokens"),  # what NLTK 3.9 gives with its English model
    [
        ("melanie's kids can't swim.", "melanie 's kids ca n't swim ."),
        ("3,000 apples, pears: 4:30 p.m.", "3,000 apples , pears : 4:30 p.m ."),
        ('he said "yes." then left', "he said `` yes . '' then left"),
        ("mr. smith ate. he left", "mr. smith ate . he left"),
        ("in 2019. she moved", "in 2019. she moved"),
        ("well... (maybe) -- 50% & $5!", "well ... ( maybe ) -- 50 % & $ 5 !"),
        ("they're gonna, 'tis said; cannot", "they 're gon na , ' tis said ; can not"),
        ("the dogs' toys and 'old' ones", "the dogs ' toys and ' old ' ones"),
        ("", ""),
    ],
)
def test_tokens_are_those_of_nltk(text: str, tokens: str) -> None:
    assert nltk_tokens(text) == tokens.split()


def test_bleu_counts_punctuation_under_amem() -> None:
    assert bleu1("May 25, 2023", "25 may 2023.", "amem") == pytest.approx(3 / 4)
    assert bleu1("dog", "a big dog.", "amem") == pytest.approx(math.exp(1 - 4))
    given_tokens, right = nltk_tokens("no no no"), nltk_tokens("no")
    assert bleu1("no no no", "no", "amem") == (Counter(given_tokens) & Counter(right)).total() / 3


@pytest.mark.parametrize(
    ("word", "stem"),  # of NLTK's PorterStemmer
    [
        ("caresses", "caress"), ("ponies", "poni"), ("ties", "tie"), ("died", "die"), ("dying", "die"),
        ("agreed", "agre"),
        ("plastered", "plaster"), ("bled", "bled"), ("sing", "sing"), ("conflated", "conflat"), ("hopping", "hop"),
        ("falling", "fall"), ("filing", "file"),
        ("aged", "age"), ("happy", "happi"), ("enjoy", "enjoy"), ("by", "by"),
        ("relational", "relat"), ("conditional", "condit"), ("carefully", "care"), ("apology", "apolog"),
        ("additionally", "addit"), ("triplicate", "triplic"), ("hopefulness", "hope"), ("adoption", "adopt"),
        ("controlling", "control"), ("rate", "rate"), ("news", "news"), ("skies", "sky"), ("2023", "2023"), ("s", "s"),
    ],
)  # fmt: skip
def test_stems_are_those_of_nltk(word: str, stem: str) -> None:
    assert porter_stem(word) == stem


@pytest.mark.parametrize(
    ("text", "golds", "there"),
    [
        ("[7 May 2023] Ann: I went to the support group.", ["7 May 2023"], True),
        ("Ann: She lives in the New York area", ["a New-York area"], True),
        ("Ann: forty catfish", ["cat"], False),  # whole words only
        ("Ann: cat, dog", ["dog cat"], False),  # in order
        ("Ann: cat", ["dog", "Cat!"], True),
        ("Ann: the", ["the"], False),  # nothing to look for
        ("", ["x"], False),
        ("anything", [], False),
    ],
)
def test_answers_are_found_word_by_word(text: str, golds: list[str], there: bool) -> None:
    assert answer_in_evidence(text, golds) is there
