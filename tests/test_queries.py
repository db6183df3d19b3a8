"""Queries read, looked up and laid out: in a batch as alone, and each token by the word it is a piece of."""

import dataclasses
from datetime import UTC, datetime
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close
from toys import HashEncoder, talk

from zeromem_torch.bank import pack
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.routing.queries import (
    UNSEEN_RARITY,
    Asked,
    QueryBatch,
    _Layout,
    _word,
    _words_of_tokens,
    compile_queries,
)
from zeromem_torch.substrate.encoder import Encoded, Encoder
from zeromem_torch.substrate.entities import RuleExtractor, entity_key
from zeromem_torch.substrate.memory import Memory, build_memory
from zeromem_torch.substrate.tokenizer import STOP_WORDS, Analyzer, tokenize
from zeromem_torch.substrate.traces import Trace

ANALYSE = Analyzer(stop_words=True, stemmer="english")
NOW = datetime(2023, 9, 1, tzinfo=UTC)


def memory_of(*traces: Trace, encoder: Encoder | None = None) -> Memory:
    config = SubstrateConfig(entities="rules")
    return build_memory("b", traces, encoder or HashEncoder(), RuleExtractor(), config)


TALK = memory_of(
    *talk(
        "b",
        ["I adopted two kids in Lisbon last May.", "Wow! Did Melanie Smith help you, Ann?", "Yes, with the camp."],
        ["We saw the lake in Lisbon.", "Melanie Smith liked \u201cEd Wood\u201d."],
    )
)
FILMS = memory_of(
    *(
        Trace(id=title, boundary="b", text=text, title=title)
        for title, text in {
            "Ed Wood (film)": "Ed Wood was directed by Tim Burton in Hollywood in 1994.",
            "Tim Burton": "Tim Burton was born in Burbank.",
            "Burbank": "Burbank lies near Hollywood. Tim Burton left Burbank.",
        }.items()
    )
)
EMPTY = memory_of(*talk("b", ["?"]))
MEMORIES = [TALK, FILMS, EMPTY]
ASKED = [
    (0, "When did Ann adopt her kids in Lisbon?"),
    (1, "Which film by Tim Burton was made in Hollywood, not in Burbank?"),
    (0, "What did Bo say about \u201cEd Wood\u201d on 7 June 2023 or between May and June 2023?"),
    (2, "Who is Zoe?"),
    (0, "Who who?"),
    (1, "Tim Burton"),
    (0, "Did I see the lake? D\u00e9j\u00e0 vu: lake, lake."),
]


def compiled(asked: list[tuple[int, str]], memories: list[Memory], encoder: Encoder | None = None) -> QueryBatch:
    bank = pack([memory.index for memory in memories], [memory.sizes for memory in memories])
    batch, profiles = compile_queries(
        [text for _, text in asked],
        [m for m, _ in asked],
        memories,
        bank,
        encoder or HashEncoder(),
        ANALYSE,
        [NOW] * len(asked),
        0.125,
    )
    assert [profile.text for profile in profiles] == [text for _, text in asked]
    return batch


def entries(asked: Asked, slot: int, first: int, last: int) -> dict[int, float]:
    """What one query asks among the rows of its memory."""
    rows = zip(asked.slot.tolist(), asked.row.tolist(), asked.weight.tolist(), strict=True)
    return {row - first: weight for s, row, weight in rows if s == slot and first <= row < last}


AXES = {"terms": "terms", "phrases": "phrases", "rest_terms": "terms", "titles": "units", "entities": "entities"}
PADDED = {"states", "state_weights", "date_first", "date_last"}


@pytest.mark.parametrize("memories", [1, 3])
def test_a_query_is_laid_out_in_a_batch_as_alone(memories: int) -> None:
    asked = [(m, text) for m, text in ASKED if m < memories]
    batch = compiled(asked, MEMORIES[:memories])
    bank = pack([memory.index for memory in MEMORIES], [memory.sizes for memory in MEMORIES])
    places = [(sum(other == m for other, _ in asked[:i]), m) for i, (m, _) in enumerate(asked)]
    assert batch.query.shape == (max(slot for slot, _ in places) + 1, memories)
    assert int(batch.filled.sum()) == len(asked)
    for number, ((slot, m), (_, text)) in enumerate(zip(places, asked, strict=True)):
        alone = compiled([(0, text)], [MEMORIES[m]])
        assert int(batch.query[slot, m]) == number
        for field in dataclasses.fields(QueryBatch):
            one, other = getattr(alone, field.name), getattr(batch, field.name)
            if field.name in AXES:
                first, last = bank.axes[AXES[field.name]].ptr[m : m + 2]
                assert entries(other, slot, first, last) == entries(one, 0, 0, last - first)
            elif field.name == "subject":
                first = bank.axes["speakers"].ptr[m]
                assert int(other[slot, m]) == int(one[0, 0]) + (first if int(one[0, 0]) >= 0 else 0)
            elif field.name in PADDED:
                width = one.shape[2]
                assert torch.equal(other[slot, m, :width], one[0, 0])
                behind = other[slot, m, width:]
                assert torch.equal(behind, torch.full_like(behind, 1 if field.name == "date_first" else 0))
            elif field.name != "query":
                assert torch.equal(other[slot, m], one[0, 0])
    empty = ~batch.filled
    assert (batch.query[empty] == -1).all()
    assert (batch.subject[empty] == -1).all()
    assert (batch.date_first[empty] > batch.date_last[empty]).all()
    assert not batch.state_weights[empty].any()


def test_no_queries() -> None:
    batch = compiled([], MEMORIES)
    assert batch.query.shape == (0, 3)
    assert batch.terms.row.numel() == 0


def number_of(memory: Memory, *words: str) -> set[int]:
    return {memory.vocabulary[word] for word in words}


def test_what_a_query_asks_of_its_memory() -> None:
    batch = compiled([(0, "When did Ann adopt kids, kids of Melanie Smith?")], [TALK])
    terms = dict(zip(batch.terms.row.tolist(), batch.terms.weight.tolist(), strict=True))
    (kid,) = number_of(TALK, "kid")
    assert set(terms) == number_of(TALK, "adopt", "kid", "melani", "smith"), "who speaks is no word of the text"
    assert terms[kid] == 2
    assert set(batch.rest_terms.row.tolist()) == number_of(TALK, "adopt", "kid")
    melanie = TALK.entities[entity_key("Melanie Smith")]  # an entity of two turns; Ann speaks, and is none
    assert melanie in batch.entities.row.tolist()
    assert entity_key("Ann") not in TALK.entities
    assert set(batch.entities.weight.tolist()) == {0.125}
    assert int(batch.subject) == TALK.speakers["Ann"]


def word_at(text: str, first: int, last: int) -> str:
    while first > 0 and text[first - 1].isalnum():
        first -= 1
    while last < len(text) and text[last].isalnum():
        last += 1
    return text[first:last]


@dataclasses.dataclass
class Reading:
    """As much of a reading as says where its tokens stand."""

    spoken: str


@given(st.lists(st.tuples(st.text("ab1 _'\u00e9-?", max_size=12), st.data()), max_size=3))
def test_every_token_sees_the_word_it_is_a_piece_of(drawn: list[tuple[str, st.DataObject]]) -> None:
    spans = []
    for text, data in drawn:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        spans.append(list(pairwise(cuts)))
    flat = torch.tensor([span for own in spans for span in own], dtype=torch.long).reshape(-1, 2)
    counts = torch.tensor([len(own) for own in spans], dtype=torch.long)
    encoded = Encoded(torch.empty(len(drawn), 1), counts, torch.empty(len(flat), 1), flat)
    found = _words_of_tokens([Reading(text) for text, _ in drawn], encoded, ANALYSE)  # type: ignore[misc]
    assert found == [
        [_word(word_at(text, first, last), ANALYSE) for first, last in own]
        for (text, _), own in zip(drawn, spans, strict=True)
    ]


@pytest.mark.parametrize("word", ["Kids", "the", "don't", "?", "", " ", "Melanie's", "state-of-the-art", "東京", "_"])
def test_a_word_is_its_terms_and_parts(word: str) -> None:
    terms, parts, silent = _word(word, ANALYSE)
    assert list(terms) == ANALYSE(word)
    assert parts == set(tokenize(word))
    says_something = any(c.isalnum() for c in word) and bool(terms) and tokenize(word)[0] not in STOP_WORDS
    assert silent is not says_something


def tokens_of(text: str) -> list[str]:
    (spans,) = HashEncoder().token_spans([text])
    return [word_at(text, first, last) for first, last in spans]


@pytest.mark.parametrize(
    ("text", "named"), [("Which lake has Tim Burton left?", {"tim", "burton"}), ("Tim Burton", set())]
)
def test_the_rest_of_a_query_is_the_mean_of_what_names_nobody(text: str, named: set[str]) -> None:
    batch = compiled([(0, text)], [FILMS])
    states: Tensor = HashEncoder().encode([text], states=True).states
    kept = [not set(tokenize(word)) & named for word in tokens_of(text)]
    assert any(kept)
    assert_close(batch.rest_vectors[0, 0], normalize(states[torch.tensor(kept)].sum(0), dim=0))


def test_states_of_another_space_have_no_rest() -> None:
    batch = compiled([(0, ASKED[1][1])], [FILMS], HashEncoder(late_chunking=False))
    assert torch.equal(batch.rest_vectors, batch.vectors)


def test_a_token_weighs_as_much_as_its_word_is_rare() -> None:
    text = "Which film has Tim Burton shot in Hollywood?"
    weights = compiled([(0, text)], [FILMS]).state_weights[0, 0].tolist()
    for word, weight in zip(tokens_of(text), weights, strict=True):
        terms = ANALYSE(word) if word[0].casefold() + word[1:] not in STOP_WORDS and word[0].isalnum() else []
        rarest = max((FILMS.rarity_of(term, UNSEEN_RARITY) for term in terms), default=0.0)
        assert weight == pytest.approx(rarest)
    assert UNSEEN_RARITY in weights
    assert 0 in weights


def test_a_subjects_name_weighs_nothing() -> None:
    text = "Ann and Bo saw Lisbon"  # two of them: neither is asked about, and both are left where they stand
    weights = compiled([(0, text)], [TALK]).state_weights[0, 0].tolist()
    assert [weight > 0 for weight in weights] == [False, False, False, True, True]


def test_where_no_token_says_anything_all_do() -> None:
    assert set(compiled([(0, "Who who?")], [TALK]).state_weights.flatten().tolist()) == {1.0}


def test_one_memory_takes_the_layout_of_several() -> None:
    """What is only viewed for one memory is spread for more, with the same result."""
    values = torch.arange(6.0).view(3, 2)
    bank = pack([TALK.index], [TALK.sizes])
    one, two = _Layout([0, 0, 0], 1, bank), _Layout([0, 0, 0], 2, bank)
    assert torch.equal(two.spread(values)[:, :1], one.spread(values))
    assert not two.spread(values)[:, 1].any()
