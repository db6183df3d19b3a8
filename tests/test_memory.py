"""The index of one boundary: its tensors are what a reader of the traces would write down by hand."""

from collections.abc import Sequence
from datetime import UTC, date, datetime

import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close
from toys import HashEncoder, talk

from zeromem_torch.bank import pack
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.substrate.entities import RuleExtractor, entity_key
from zeromem_torch.substrate.forward import SPECIAL_TOKENS
from zeromem_torch.substrate.kinds import AnswerType
from zeromem_torch.substrate.memory import Memory, build_memory
from zeromem_torch.substrate.tokenizer import Analyzer
from zeromem_torch.substrate.traces import Trace

RULES = SubstrateConfig(entities="rules")
SAID = talk(
    "b",
    ["We saw the Oslo Opera.", "Was it cold?", "On 12 May 2023 it was.", "It stands by the sea."],
    ["Ann likes Oslo.", "I bought a boat in Bergen on 3 June 2023."],
)
FACTS = [
    Trace("d/1", "b", "The Mjosa is a lake near Lom. It is deep.", title="Mjosa"),
    Trace("d/2", "b", "Lom has a church. Boats on the Mjosa are rare.", title="Lom (village)"),
    Trace("d/3", "b", "Nothing grows here.", title="Waste Land"),
]
LONG = "One two three four five six seven. " * 12 + "The end is here."


def built(traces: Sequence[Trace], config: SubstrateConfig = RULES, encoder: HashEncoder | None = None) -> Memory:
    return build_memory("b", traces, encoder or HashEncoder(), RuleExtractor(), config)


def test_turns_in_order_with_their_places() -> None:
    memory = built([SAID[i] for i in (5, 2, 0, 3, 1, 4)])
    index = memory.index
    assert [trace.id for trace in memory.turns.traces] == [trace.id for trace in SAID]
    assert index.unit_session.tolist() == [0, 0, 0, 0, 1, 1]
    assert index.unit_position.tolist() == [0, 1, 2, 3, 0, 1]
    assert memory.speakers == {"Ann": 1, "Bo": 0}  # in the order they spoke
    assert index.unit_speaker.tolist() == [0, 1, 0, 1, 0, 1]
    days = [date(2023, 6, 7).toordinal()] * 4 + [date(2023, 7, 7).toordinal()] * 2
    assert index.unit_day.tolist() == days
    assert index.unit_asks.tolist() == [False, True, False, False, False, False]
    assert index.unit_leans.tolist()[3] is True  # "It" stands for what was said before
    assert memory.sizes == {"sessions": 2, "speakers": 2}
    assert memory.latest == SAID[-1].time


def test_documents_stand_alone() -> None:
    index = built(FACTS).index
    assert index.unit_session.tolist() == [0, 1, 2]
    assert index.unit_position.tolist() == [-1, -1, -1]
    assert index.unit_speaker.tolist() == [-1, -1, -1]
    assert index.unit_day.tolist() == [0, 0, 0]
    assert index.member_window.tolist() == index.member_unit.tolist() == index.unit_episode.tolist() == [0, 1, 2]
    assert built(FACTS).latest is None


def test_vectors_of_turns_windows_and_episodes() -> None:
    encoder = HashEncoder()
    index = built(SAID, SubstrateConfig(window=3, episode=2)).index
    texts = [f"{trace.speaker}: {trace.text}" for trace in SAID]
    turns = encoder.encode(texts).vectors
    assert_close(index.chunk_vectors, turns)
    windows = [[0, 1, 2], [1, 2, 3], [4, 5]]
    assert members(index.member_window.tolist(), index.member_unit.tolist()) == windows
    assert_close(index.window_vectors, torch.stack([normalize(turns[w].mean(0), dim=0) for w in windows]))
    assert index.unit_episode.tolist() == [0, 0, 1, 1, 2, 2]
    assert_close(index.episode_vectors, torch.stack([normalize(turns[i : i + 2].mean(0), dim=0) for i in (0, 2, 4)]))
    states = encoder.encode(texts, states=True)
    assert_close(index.token_states.float(), states.states, atol=1e-3, rtol=0)
    assert index.unit_states.tolist() == states.counts.tolist()


def members(groups: list[int], units: list[int]) -> list[list[int]]:
    return [[u for g, u in zip(groups, units, strict=True) if g == group] for group in sorted(set(groups))]


@pytest.mark.parametrize("limit", [16, 24, 48, 512])
def test_a_long_trace_is_chunked_and_nothing_is_lost(limit: int) -> None:
    encoder = HashEncoder(max_tokens=limit)
    traces = [Trace("1", "b", "Short."), Trace("2", "b", LONG, title="Counting"), Trace("3", "b", "Short too.")]
    memory = built(traces, encoder=encoder)
    units = memory.index.chunk_unit.tolist()
    spans = [span for unit, span in zip(units, memory.chunk_spans, strict=True) if unit == 1]
    assert units == sorted(units)
    assert "".join(LONG[start:end] for start, end in spans) == LONG
    assert (len(spans) == 1) == (limit == 512)
    encoded = [text for call in encoder.calls for text in call]
    assert encoded == [
        f"{traces[unit].title + '. ' if traces[unit].title else ''}{traces[unit].text[start:end]}"
        for unit, (start, end) in zip(units, memory.chunk_spans, strict=True)
    ]
    assert max(len(tokens) for tokens in encoder.token_spans(encoded)) <= limit
    # a span handed over is the best chunk, and what a reader pays for is at most that
    query = encoder.encode(["The end is here."]).vectors[0]
    assert memory.best_span(0, query) == (0, len("Short."))
    start, end = memory.best_span(1, query)
    assert "The end is here." in LONG[start:end]
    (whole,), title = encoder.token_spans([LONG]), 2
    assert memory.index.unit_tokens.tolist()[1] == title + min(len(whole), limit - title - SPECIAL_TOKENS)


def test_what_a_reader_pays_for() -> None:
    trace = Trace("1", "b", "It rained.", time=datetime(2023, 5, 8, tzinfo=UTC), speaker="Ann")
    (read,) = HashEncoder().token_spans(["[8 May 2023] Ann: It rained."])
    assert built([trace]).index.unit_tokens.tolist() == [len(read)]


def test_kinds_and_dates_that_a_turn_holds() -> None:
    index = built(SAID).index
    kinds = index.unit_kinds.tolist()
    assert [bool(held & AnswerType.DATE) for held in kinds] == [False, False, True, False, False, True]
    first = dict(zip(index.date_unit.tolist(), index.date_first.tolist(), strict=True))
    assert first == {2: date(2023, 5, 12).toordinal(), 5: date(2023, 6, 3).toordinal()}
    assert torch.equal(index.date_first, index.date_last)


def test_entities_are_those_that_lead_somewhere() -> None:
    memory = built([*SAID, *FACTS])
    named = [entity_key(name) for name in ("Oslo", "Mjosa", "Lom", "Waste Land")]
    assert all(name in memory.entities for name in named)
    assert entity_key("Bergen") not in memory.entities  # one unit only
    assert entity_key("Ann") not in memory.entities  # somebody who speaks is a subject
    mentions = zip(memory.index.mention_sentence.tolist(), memory.index.mention_entity.tolist(), strict=True)
    names = {memory.entities[key]: key for key in named}
    found = {(memory.turns.traces[memory.index.sentence_unit[s]].id, names.get(e)) for s, e in mentions}
    assert {("b/1:1", "oslo"), ("b/2:1", "oslo"), ("d/1", "mjosa"), ("d/2", "mjosa"), ("d/1", "lom")} <= found


def test_a_mention_is_in_its_own_sentence() -> None:
    memory = built(FACTS)
    index = memory.index
    assert index.sentence_unit.tolist() == [0, 0, 1, 1, 2]
    at = memory.entities["mjosa"]
    assert sorted(set(index.mention_sentence[index.mention_entity == at].tolist())) == [0, 3]
    encoder = HashEncoder()
    whole = encoder.encode(["Lom (village). Lom has a church. Boats on the Mjosa are rare."], states=True)
    inside = whole.spans[:, 0] >= len("Lom (village). Lom has a church.")
    expected = normalize(whole.states[inside].mean(0), dim=0)
    assert_close(index.sentence_vectors[3], expected, atol=1e-5, rtol=0)


def test_edges_of_neighbours_links_and_titles() -> None:
    memory = built([*SAID, *FACTS], SubstrateConfig(rarity=0.0, title_edge=10.0, link=2.0, adjacency=0.25))
    units = {trace.id: number for number, trace in enumerate(memory.turns.traces)}
    graph = pack([memory.index], [memory.sizes]).adjacency.to_dense()
    assert graph[units["b/1:1"], units["b/1:2"]] == 0.25  # its only neighbour
    assert graph[units["b/1:2"], units["b/1:1"]] == graph[units["b/1:2"], units["b/1:3"]] == 0.125
    assert graph[units["b/1:4"], units["b/2:1"]] == 0  # another session
    assert graph[units["d/1"], units["d/2"]] == 2  # its text names the other's title
    assert graph[units["d/2"], units["d/1"]] == 2
    assert graph[units["d/3"], units["d/1"]] == 0
    lom = len(units) + memory.entities["lom"]
    assert graph[lom, units["d/2"]] >= 10  # it is that document's title
    assert 0 < graph[lom, units["d/1"]] < 10
    assert graph[units["b/1:1"], len(units) + memory.entities["oslo"]] > 0


def test_postings_count_the_terms_of_titles_and_texts() -> None:
    memory = built(FACTS)
    analyse = Analyzer(stop_words=True, stemmer="english")
    words = {word for trace in FACTS for word in analyse(f"{trace.title} {trace.text}")}
    assert all(word in memory.vocabulary for word in words)
    assert len(memory.vocabulary) == len(memory.rarity) == len(words)
    assert not memory.learned
    counts = memory.index.unit_postings.counts
    assert int(counts[memory.vocabulary[analyse("Mjosa")[0]]]) == 2
    assert int(counts[memory.vocabulary[analyse("grows")[0]]]) == 1
    assert memory.rarity_of(analyse("Mjosa")[0], 0.0) < memory.rarity_of(analyse("grows")[0], 0.0)
    assert memory.rarity_of("unseen", 2.5) == 2.5
    plain = built(FACTS, SubstrateConfig(entities="rules", stemmer="", stop_words=False))
    assert all(word in plain.vocabulary for word in ("grows", "the", "is"))


def test_nothing_to_remember_is_an_empty_index() -> None:
    memory = built([])
    assert memory.index.chunk_vectors.shape == (0, HashEncoder().dim)
    assert memory.index.out_degree.numel() == 0
    assert memory.latest is None


def test_sentences_of_an_encoder_whose_states_live_elsewhere_take_their_chunks_vector() -> None:
    """BGE-M3's states are of its multi-vector head, its vectors of its first token: a mean of the one is no other."""
    text = "Ann bought a boat. It is green. Bob laughed."
    traces = [Trace(id="a/1", boundary="a", text=text, speaker="Ann")]
    pooled = build_memory("a", traces, HashEncoder(), RuleExtractor(), RULES).index
    apart = HashEncoder(late_chunking=False)
    whole = build_memory("a", traces, apart, RuleExtractor(), RULES).index
    assert len(whole.sentence_vectors) == len(pooled.sentence_vectors) == 3
    assert torch.equal(whole.sentence_vectors, whole.chunk_vectors.expand(3, -1))
    assert not torch.equal(pooled.sentence_vectors, whole.sentence_vectors)
