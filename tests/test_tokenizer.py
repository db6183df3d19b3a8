"""Terms and sentences: tables of cases, and properties over all of Unicode."""

import time
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.substrate.tokenizer import STOP_WORDS, Analyzer, sentence_spans, tokenize
from zeromem_torch.substrate.traces import ZeroMemError

ENGLISH = Analyzer(stop_words=True, stemmer="english")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Melanie's 3 kids", "melanie 3 kids"),
        ("Melanie\u2019s", "melanie"),
        ("Ryan'S Daughter", "ryan daughter"),
        ("well-known and/or", "well known and or"),
        ("C++ and C#, F#", "c++ and c# f#"),
        ("v2.1.0", "v2.1.0 v2"),
        ("CN-A10293!", "cn-a10293 cn a10293"),
        ("16-year-old", "16-year-old 16 year old"),
        ("2023-05-07", "2023-05-07 2023"),
        ("3.14 13:56 1,000,000 1,2", "3.14 13:56 1000000 1 2"),
        ("bob.smith@example.com", "bob.smith@example.com bob smith example com"),
        ("user_id", "user_id user id"),
        ("AT&T", "at&t at t"),
        ("the U.S. at 7 p.m.", "the us at 7 pm"),
        ("great.Thanks", "great.thanks great thanks"),
        ("don't o'clock l\u2019amour", "don't o'clock clock l'amour amour"),
        ("a I x", "a i x"),
        ("Ｆｕｌｌ ｗｉｄｔｈ ①", "full width 1"),
        ("Straße ΣΊΣΥΦΟΣ", "strasse σίσυφοσ"),
        ("我喜欢iPhone手机 中", "我喜 喜欢 iphone 手机 中"),
        ("東京タワー", "東京 京タ タワ ワー"),
        ("한국어", "한국 국어"),
        ("हिन्दी में", "हिन्दी में"),
        ("ภาษา", "ภา าษ ษา"),
        ("مرحبا שלום", "مرحبا שלום"),
        ("café cafe\u0301", "café café"),
        ("soft\u00adhyphen non\u2011breaking", "softhyphen non breaking"),
        ("👍🏽 ok ❤️", "👍 ok ❤"),
        ("👨\u200d👩\u200d👧", "👨 👩 👧"),
        ("🇫🇷🇯🇵", "🇫🇷 🇯🇵"),
        ("!!! ...", "!!! ..."),
        ("", ""),
        (" \n", ""),
    ],
)
def test_terms(text: str, terms: str) -> None:
    assert tokenize(text) == terms.split()


def test_a_name_and_its_possessive_meet() -> None:
    assert tokenize("Caroline's") == tokenize("caroline") == tokenize("CAROLINE\u2019S")


def test_analyzer_removes_function_words_and_stems() -> None:
    assert ENGLISH("The camping trips were amazing") == ["camp", "trip", "amaz"]
    assert Analyzer(stop_words=True)("What did the dogs do?") == ["dogs"]
    assert Analyzer()("The dogs") == ["the", "dogs"]
    assert Analyzer(stemmer="german")("Häuser") == ["haus"]


def test_identifiers_and_numbers_are_not_stemmed() -> None:
    assert ENGLISH("v2.1.0s C++ 1990s") == ["v2.1.0s", "v2", "0s", "c++", "1990s"]


def test_a_text_of_function_words_keeps_them() -> None:
    assert Analyzer(stop_words=True)("What is it?") == ["what", "is", "it"]
    assert ENGLISH("to be or not to be") == ["to", "be", "or", "not", "to", "be"]


def test_an_unknown_stemmer_names_the_known_ones() -> None:
    with pytest.raises(ZeroMemError, match="english"):
        Analyzer(stemmer="klingon")


def test_stop_words_leave_months_and_countries_alone() -> None:
    assert not STOP_WORDS & {"may", "us", "will", "one"}
    assert all(tokenize(word) == [word] for word in STOP_WORDS if "'" not in word)


VISIBLE = st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zs", "Zl", "Zp", "Mn"])
SOME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(SOME_TEXT, VISIBLE, SOME_TEXT)
def test_content_always_has_terms(before: str, content: str, after: str) -> None:
    for analyzer in (Analyzer(), ENGLISH):
        terms = analyzer(before + content + after)
        assert terms
        assert all(terms)


@given(SOME_TEXT)
def test_terms_do_not_depend_on_the_normal_form(text: str) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert tokenize(unicodedata.normalize(form, text)) == tokenize(text)


@given(SOME_TEXT)
def test_terms_hold_no_blank(text: str) -> None:
    assert all(term == term.strip() and len(term.split()) == 1 for term in tokenize(text))


@given(st.lists(st.sampled_from(["Dogs", "C++", "我喜欢", "v2.1.0", "John's", "a-b", "हिन्दी", "👍", "7"]), max_size=8))
def test_words_apart_are_tokenized_apart(words: list[str]) -> None:
    assert tokenize(" ".join(words)) == [term for word in words for term in tokenize(word)]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hi. how are you? Fine!", ["Hi.", "how are you?", "Fine!"]),
        ("Dr. Smith lives in the U.S. now. OK", ["Dr. Smith lives in the U.S. now.", "OK"]),
        ("It is 3.5 km. v2.1.0 is out.", ["It is 3.5 km.", "v2.1.0 is out."]),
        ("J. K. Rowling wrote. It was I. So", ["J. K. Rowling wrote.", "It was I.", "So"]),
        ("See https://a.b/c?d=e.f! Then", ["See https://a.b/c?d=e.f!", "Then"]),
        ('"Really?" she said. "Yes!" He left.', ['"Really?" she said.', '"Yes!"', "He left."]),
        ("well... maybe. Etc. and so on", ["well... maybe.", "Etc. and so on"]),
        ("1. One\n2. Two", ["1. One", "2. Two"]),
        ("no. 5 is No. 5. No. Yes", ["no. 5 is No. 5.", "No.", "Yes"]),
        ("我来了。你呢？「好！」走吧", ["我来了。", "你呢？", "「好！」", "走吧"]),
        ("यह एक है। दो", ["यह एक है।", "दो"]),
        ("one\r\n\n two", ["one", "two"]),
        ("nothing ends here", ["nothing ends here"]),
        ("", []),
        (" \n ", []),
        ("?!", ["?!"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


@given(st.text(st.sampled_from("ab. !?\n\"'A。1，…)"), max_size=80) | st.text(max_size=80))
def test_sentences_hold_everything_but_blanks_once_and_in_order(text: str) -> None:
    spans = sentence_spans(text)
    assert all(start < end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert "".join("".join(text[start:end].split()) for start, end in spans) == "".join(text.split())


@given(st.from_regex(r"https?://[a-z]{1,8}\.[a-z]{2,3}/[!-~]{0,20}[a-z]", fullmatch=True))
def test_no_sentence_ends_inside_an_address(url: str) -> None:
    text = f"I read {url} today. It was good."
    assert [text[start:end] for start, end in sentence_spans(text)] == [f"I read {url} today.", "It was good."]


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "a-",
        "a.",
        "1,",
        ".",
        ". ",
        "中",
        "\u0301",
        "中" + "\u3099" * 99,
        "👍",
        "?\u201d",
        "Mr. ",
        "'",
        "@",
        "a'b ",
        "é.",
        "\n",
    ],
)
def test_a_megabyte_of_anything_takes_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    begin = time.perf_counter()
    assert tokenize(text) or not text.strip()
    assert max(map(len, tokenize(text)), default=0) <= 256
    sentence_spans(text)
    assert time.perf_counter() - begin < 30
